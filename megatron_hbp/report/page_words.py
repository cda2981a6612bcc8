"""The page's sentences: what is saved, what is trained, how even it is."""

from collections.abc import Iterator

from megatron_hbp.plan import Plan
from megatron_hbp.report.page_time import saving
from megatron_hbp.report.pareto import Search

_CLEARLY = 1.05  # a difference worth a word
_Compared = dict[str, dict[str, float]]


def headline(gpu_days: dict[str, float], single: str) -> str:
    """gpu_days: by method, HBP first. single: the method that packs at the longest level only."""
    own = gpu_days["HBP"]
    text = f"This plan takes {_days(own)} GPU-days"
    if single in gpu_days:
        beside = saving(own, gpu_days[single])
        text += f", {beside} than" if beside != "as much" else ", as much as"
        text += f" single-level packing ({_days(gpu_days[single])})"
    return text


def summary(gpu_days: dict[str, float], single: str, compared: _Compared) -> Iterator[str]:
    """The saving in GPU-days, and beside the fastest of the others."""
    own = gpu_days["HBP"]
    if single in gpu_days:
        gain = gpu_days[single] - own
        verb = "saves" if gain >= 0 else "costs"
        yield (
            f"Predicted: beside packing everything at {single.replace(' ', ' with ')}, as is "
            f"usual, it {verb} {_days(abs(gain))} GPU-days for the same tokens."
        )
    others = {name: days for name, days in gpu_days.items() if name != "HBP"}
    if others:
        name, days = min(others.items(), key=lambda item: item[1])
        beside = saving(own, days)
        than = "as" if beside == "as much" else "than"
        text = (
            f"The fastest other method is {name} ({_days(days)} GPU-days): the plan takes "
            f"{beside} {than} that"
        )
        mixing = [compared[method]["mixing_ratio"] for method in (name, "HBP")]
        if mixing[0] > _CLEARLY * mixing[1]:
            text += (
                f", and its steps are closer to the corpus (mixing {mixing[1]:.2f}, not "
                f"{mixing[0]:.2f})"
            )
        elif mixing[1] > _CLEARLY * mixing[0]:
            text += (
                f", but its steps are less like the corpus (mixing {mixing[1]:.2f}, not "
                f"{mixing[0]:.2f})"
            )
        yield text + "."


def glance(
    plan: Plan, gpu_days: dict[str, float], compared: _Compared
) -> Iterator[tuple[str, str]]:
    """Numbers to see at a glance, each with its words."""
    own = compared["HBP"]
    counts = plan.counts()
    yield _days(gpu_days["HBP"]), "GPU-days, predicted"
    yield (
        f"{counts['sequences_kept']:,}",
        f"sequences of {counts['sequences_in']:,}: {counts['sequences_dropped']:,} dropped, "
        f"{counts['sequences_truncated']:,} cut",
    )
    yield f"{own['padding_ratio']:.2%}".replace("%", " %"), "padding"
    yield f"{own['communication_ratio']:.1%}".replace("%", " %"), "of the tokens pay for CP"
    yield (
        f"{own['attention_balance_ratio']:.2%}".replace("%", " %"),
        "of the attention time is waiting for the slowest rank (ABR)",
    )


def run_words(plan: Plan) -> str:
    """The run's shape in a sentence."""
    epochs = "1 epoch" if plan.epochs == 1 else f"{plan.epochs} epochs"
    return (
        f"Trained in {plan.num_steps:,} steps ({epochs}) of {plan.num_microbatches} micro-batches "
        f"on {plan.num_ranks} ranks, {plan.token_budget:,} tokens per rank and micro-batch."
    )


def balance_words(compared: _Compared, single: str) -> str:
    """Attention balance before and after."""
    before, after = (100 * compared[name]["attention_balance_ratio"] for name in (single, "HBP"))
    return (
        "Ranks of a micro-batch wait for the one with the most attention to compute. In the mean "
        f"micro-batch that wastes {before:.1f} % of their attention time with {single}, and "
        f"{after:.2f} % with this plan (ABR {before / 100:.3f} and {after / 100:.4f})."
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
        f"{len(found.points)} different results of other packers, levels and ways of mixing, "
        f"planned for {sample}{failed}. On {best} of them nothing can be gained without a loss "
        f"elsewhere; this plan {place}. Another token budget per rank changes the tokens per "
        "micro-batch; whether it fits the memory is not looked at here. Hover over a point, or "
        "press the arrow keys in the figure."
    )


def _days(days: float) -> str:
    return f"{days:.3g}" if days < 1000 else f"{days:,.0f}"
