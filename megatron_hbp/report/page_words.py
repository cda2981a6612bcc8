"""The page's sentences: what is saved, what is trained, how even it is."""

from collections.abc import Iterator

from megatron_hbp.plan import Plan
from megatron_hbp.report.page_time import AS_MUCH, saving
from megatron_hbp.report.pareto import Search
from megatron_hbp.report.words import counted, gpu_time, gpu_time_text, method_name, percent

_CLEARLY = 1.05  # a difference worth a word
_Compared = dict[str, dict[str, float]]


def headline(gpu_days: dict[str, float], usual: str) -> str:
    """gpu_days: by method, HBP first. usual: the method that packs at the longest level only."""
    own = gpu_days["HBP"]
    text = f"This plan takes {gpu_time_text(own)}"
    if usual in gpu_days:
        text += f", {saving(own, gpu_days[usual])} single-level packing"
        text += f" ({gpu_time_text(gpu_days[usual])})"
    return text


def summary(gpu_days: dict[str, float], usual: str, compared: _Compared) -> Iterator[str]:
    """The saving in GPU-days, and beside the fastest of the others."""
    own = gpu_days["HBP"]
    if usual in gpu_days:
        gain = gpu_days[usual] - own
        level, packer = method_name(usual).split(" ")
        beside = f"beside packing everything at level {level} with {packer}, as is usual"
        does = f"{'saves' if gain > 0 else 'costs another'} {gpu_time_text(abs(gain))}"
        if saving(own, gpu_days[usual]) == AS_MUCH:
            does = "takes as long"
        yield f"Predicted: {beside}, it {does} for the same tokens."
    others = {name: days for name, days in gpu_days.items() if name != "HBP"}
    if others:
        name, days = min(others.items(), key=lambda item: item[1])
        text = (
            f"The fastest other method is {method_name(name)} ({gpu_time_text(days)}): the plan "
            f"takes {saving(own, days)} that"
        )
        mixing = [compared[method]["mixing_ratio"] for method in ("HBP", name)]
        figures = f"(mixing {mixing[0]:.2f}, not {mixing[1]:.2f})"
        if mixing[1] > _CLEARLY * mixing[0]:
            text += f", and its steps are more like the corpus {figures}"
        elif mixing[0] > _CLEARLY * mixing[1]:
            text += f", but its steps are less like the corpus {figures}"
        yield text + "."


def glance(
    plan: Plan, gpu_days: dict[str, float], compared: _Compared
) -> Iterator[tuple[str, str]]:
    """Numbers to see at a glance, each with its words."""
    own = compared["HBP"]
    counts = plan.counts()
    number, unit = gpu_time(gpu_days["HBP"])
    yield number, f"{unit}, predicted"
    yield (
        f"{counts['sequences_kept']:,}",
        f"sequences of {counts['sequences_in']:,}: {counts['sequences_dropped']:,} dropped, "
        f"{counts['sequences_truncated']:,} cut",
    )
    yield percent(own["padding_ratio"], 2), "padding"
    yield percent(own["communication_ratio"]), "of the tokens pay for CP"
    yield (
        percent(own["attention_balance_ratio"], 2),
        "of the attention time is waiting for the slowest rank (ABR)",
    )


def run_words(plan: Plan) -> str:
    """The run's shape in a sentence."""
    return (
        f"Trained in {counted(plan.num_steps, 'step')} ({counted(plan.epochs, 'epoch')}) of "
        f"{counted(plan.num_microbatches, 'micro-batch', 'es')} on "
        f"{counted(plan.num_ranks, 'rank')}, {plan.token_budget:,} tokens per rank and micro-batch."
    )


def balance_words(compared: _Compared, usual: str) -> str:
    """Attention balance before and after."""
    before, after = (compared[name]["attention_balance_ratio"] for name in (usual, "HBP"))
    return (
        "Ranks of a micro-batch wait for the one with the most attention to compute. In the mean "
        f"micro-batch that wastes {percent(before)} of their attention time with "
        f"{method_name(usual)}, and {percent(after, 2)} with this plan (ABR {before:.3f} and "
        f"{after:.4f})."
    )


def front_words(found: Search) -> str:
    """What the search has tried."""
    sample = (
        f"a random sample of {found.sequences:,} of the {found.of:,} sequences, whose balance "
        "and mixing are a little worse than those above, as there are fewer packs to choose from"
        if found.sequences < found.of
        else f"all {found.of:,} sequences"
    )
    best = sum(point.front for point in found.points)
    own = next(point for point in found.points if point.own)
    place = "is one of them" if own.front else "is not among them"
    failed = f"; {found.failed} more are not possible" if found.failed else ""
    return (
        f"{counted(len(found.points), 'different result')} of other packers, levels and "
        f"ways of mixing, planned for one epoch of {sample}{failed}. On {best} of them nothing can "
        f"be gained without a loss elsewhere; this plan {place}. Another token budget per rank "
        "changes the tokens per micro-batch; whether it fits the memory is not looked at here. "
        "Hover over a point, or press the arrow keys in the figure."
    )
