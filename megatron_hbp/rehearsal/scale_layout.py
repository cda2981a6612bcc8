"""Parallelism of a recipe on a few processes: every kind that it uses is kept, at its least size.

Guarantees (asserted by tests/unit/test_rehearsal_scale.py):
- TP, PP, virtual stages and EP that are above 1 stay above 1, unless the processes are too few,
  which is said; uneven first and last stages stay uneven where two stages can be;
- levels keep their number, their order, and whether all, some or none of their layers are
  recomputed; CP sizes ascend as they did.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_hbp.level import Level, check_levels
from megatron_hbp.rehearsal.scaling import Scaling

BUDGET = 128  # tokens per rank and micro-batch
MOST_PROCESSES = 8

_FEW = "a few processes stand for the cluster"
_EACH = "the least that is a pipeline"


@dataclass(frozen=True, kw_only=True)
class Places:
    """Sizes of a layout. cp_sizes: of the levels, ascending."""

    tp_size: int
    num_stages: int
    num_virtual_stages: int
    num_ranks: int
    num_microbatches: int
    ep_size: int
    cp_sizes: tuple[int, ...]

    @property
    def num_processes(self) -> int:
        return self.tp_size * self.num_stages * self.num_ranks


def read_places(scaling: Scaling, gpus: int) -> tuple[Places, tuple[Level, ...]]:
    """The recipe's own layout and levels. Raises ValueError where its flags do not fit."""
    tp = scaling.number("tensor-model-parallel-size", 1)
    pp = scaling.number("pipeline-model-parallel-size", 1)
    if min(tp, pp, gpus) < 1 or gpus % (tp * pp):
        raise ValueError(
            f"{gpus} GPUs are no multiple of --tensor-model-parallel-size {tp} x "
            f"--pipeline-model-parallel-size {pp}; change one of them"
        )
    ranks = gpus // (tp * pp)
    batch = scaling.number("global-batch-size")
    if batch < 1 or batch % ranks:
        raise ValueError(
            f"--global-batch-size is {batch}; it must be ranks x micro-batches, a multiple of "
            f"{ranks} ranks"
        )
    levels = tuple(Level.parse(text) for text in scaling.texts("hbp-level"))
    check_levels(levels, ranks)
    budget = scaling.number("seq-length")
    if levels[0].tokens_per_rank != budget:
        raise ValueError(
            f"level {levels[0]}: PACK_LEN must be S x CP with S = --seq-length {budget}; use "
            f"{budget * levels[0].cp_size}:{levels[0].cp_size}"
        )
    return Places(
        tp_size=tp,
        num_stages=pp,
        num_virtual_stages=_virtual_stages(scaling, pp),
        num_ranks=ranks,
        num_microbatches=batch // ranks,
        ep_size=scaling.number("expert-model-parallel-size", 1),
        cp_sizes=tuple(level.cp_size for level in levels),
    ), levels


def _virtual_stages(scaling: Scaling, num_stages: int) -> int:
    """Model chunks of a stage."""
    given = scaling.number("num-virtual-stages-per-pipeline-rank", 1)
    if "num-layers-per-virtual-pipeline-stage" in scaling:
        layers = scaling.number("num-layers") + _counted(scaling)
        each = scaling.number("num-layers-per-virtual-pipeline-stage")
        if each < 1 or layers % (num_stages * each):
            raise ValueError(
                f"--num-layers-per-virtual-pipeline-stage is {each}; {layers} layers (with those "
                f"that embedding and loss count for) must be a multiple of {num_stages} stages x "
                "it; change one of them"
            )
        return layers // num_stages // each
    if "pipeline-model-parallel-layout" in scaling:
        chunks = _chunks_of_layout(scaling.texts("pipeline-model-parallel-layout")[0])
        return max(1, chunks // num_stages)
    return given


def _counted(scaling: Scaling) -> int:
    """Of embedding and loss, how many count as a layer when layers are split."""
    flags = [f"account-for-{part}-in-pipeline-split" for part in ("embedding", "loss")]
    return sum(flag in scaling for flag in flags)


def _chunks_of_layout(text: str) -> int:
    """Chunks of Megatron's layout text, where (tt|)*3 repeats a part and | or , ends a chunk."""
    text = text.replace(",", "")
    number = 0
    while "(" in text:
        opening = text.rindex("(")
        inner, _, rest = text[opening + 1 :].partition(")")
        digits = ""
        if rest.startswith("*"):
            digits = rest[1 : 1 + len(rest[1:]) - len(rest[1:].lstrip("0123456789"))]
            rest = rest[1 + len(digits) :]
        text = text[:opening] + inner * int(digits or 1) + rest
        number += 1
        if number > 64:
            break
    return text.count("|") + 1


def fewer_places(own: Places, most: int | None) -> Places:
    """The smallest layout with everything that `own` has above 1, on at most `most` processes.

    Two CP groups of one size lie beside each other where there is room. Raises ValueError when not
    even the levels fit.
    """
    limit = MOST_PROCESSES if most is None else most
    first = 1 if own.cp_sizes[0] == 1 else 2
    cp_sizes = tuple(first << place for place in range(len(own.cp_sizes)))
    ep = min(own.ep_size, 2)
    least = max(cp_sizes[-1], 1)
    if least > limit:
        raise ValueError(
            f"--processes is {limit}, too few for {len(cp_sizes)} levels, which need CP sizes "
            f"{', '.join(map(str, cp_sizes))}; give at least {least}"
            if least <= MOST_PROCESSES
            else f"{len(cp_sizes)} levels need CP sizes up to {least}, more than the "
            f"{MOST_PROCESSES} processes of a rehearsal; use fewer levels"
        )
    for tp, pp in ((own.tp_size, own.num_stages), (1, own.num_stages), (1, 1)):
        tp_size, num_stages = min(tp, 2), min(pp, 2)
        ranks = least
        if ranks * tp_size % ep:
            ranks *= ep
        beside = own.num_ranks > own.cp_sizes[-1] and ranks <= 2
        if beside and 2 * ranks * tp_size * num_stages <= limit:
            ranks *= 2
        if ranks * tp_size * num_stages <= limit:
            break
    else:
        ranks, ep = least, 1
    virtual = min(own.num_virtual_stages, 2) if num_stages > 1 else 1
    microbatches = min(own.num_microbatches, 2 * num_stages)
    if virtual > 1 and own.num_microbatches % own.num_stages == 0:
        microbatches = -(-microbatches // num_stages) * num_stages
    return Places(
        tp_size=tp_size,
        num_stages=num_stages,
        num_virtual_stages=virtual,
        num_ranks=ranks,
        num_microbatches=microbatches,
        ep_size=ep,
        cp_sizes=cp_sizes,
    )


def scale_layout(scaling: Scaling, own: Places, few: Places) -> None:
    """Sets the flags of the parallel layout, but for layers and levels."""
    for flag, before, after in (
        ("tensor-model-parallel-size", own.tp_size, few.tp_size),
        ("pipeline-model-parallel-size", own.num_stages, few.num_stages),
        ("expert-model-parallel-size", own.ep_size, few.ep_size),
    ):
        if before != after:
            lost = after == 1 and before > 1
            reason = "dropped: the processes are too few for it" if lost else _FEW
            scaling.set(flag, after, reason)
    if own.tp_size > 1 and few.tp_size == 1:
        scaling.take_away("sequence-parallel", "goes with tensor parallelism")
    batch = few.num_ranks * few.num_microbatches
    scaling.set(
        "global-batch-size",
        batch,
        f"{few.num_ranks} ranks x {few.num_microbatches} micro-batches",
    )
    if "eval-global-batch-size" in scaling:
        scaling.set("eval-global-batch-size", batch, "as --global-batch-size")
    group = "microbatch-group-size-per-virtual-pipeline-stage"
    if group in scaling:
        scaling.set(group, few.num_stages, _EACH)


def scale_layers(scaling: Scaling, own: Places, few: Places, num_dense: int, is_moe: bool) -> int:
    """Sets the flags that say which stage has how many layers; returns the new --num-layers.

    num_dense: dense layers in front of the first MoE layer. A chunk has one layer, or two where it
    has more than other chunks; stages without virtual ones have two.
    """
    layers = scaling.number("num-layers")
    virtual = few.num_virtual_stages
    first, last = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
    if few.num_stages == 1:
        for flag in _PIPELINE_FLAGS:
            scaling.take_away(flag, "one stage is left")
        least = 2 if not is_moe else min(num_dense, 1) + 1
        new = max(least, 2)
        scaling.set("num-layers", min(layers, new), "few layers of each kind")
        return min(layers, new)
    _scale_virtual(scaling, own, few)
    if "pipeline-model-parallel-layout" in scaling:
        scaling.take_away(
            "pipeline-model-parallel-layout", "it names layers that are scaled away: split evenly"
        )
        if virtual > 1:
            scaling.set("num-virtual-stages-per-pipeline-rank", virtual, "as the layout named")
    if first in scaling or last in scaling:
        new = _uneven(scaling, own, virtual, layers)
    else:
        counted = _counted(scaling)
        each = 2 if virtual == 1 or counted else 1
        new = few.num_stages * virtual * each - counted
    scaling.set("num-layers", new, "a layer or two on each pipeline chunk")
    return new


def _scale_virtual(scaling: Scaling, own: Places, few: Places) -> None:
    if own.num_virtual_stages == 1:
        return
    if "num-virtual-stages-per-pipeline-rank" in scaling:
        scaling.set("num-virtual-stages-per-pipeline-rank", few.num_virtual_stages, _EACH)
    if "num-layers-per-virtual-pipeline-stage" in scaling:
        each = 2 if _counted(scaling) else 1
        scaling.set("num-layers-per-virtual-pipeline-stage", each, _EACH)


def _uneven(scaling: Scaling, own: Places, virtual: int, layers: int) -> int:
    """Layers of two stages of which one keeps the flag that makes it differ from the other.

    With both flags the host has no layers left for the stages between, of which two have none, and
    under virtual stages divides by their number.
    """
    first, last = "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"
    given = {flag: scaling.number(flag) for flag in (first, last) if flag in scaling}
    others = own.num_stages - len(given)
    each = (layers - sum(given.values())) / others if others else float(given[last])
    kept = first if first in given and (last not in given or given[first] != each) else last
    if len(given) == 2:
        scaling.take_away(last if kept == first else first, "of two stages, the other one is left")
    mine, rest = (2, 1) if given[kept] > each else (1, 2)
    scaling.set(kept, mine * virtual, "uneven as the recipe's, on two stages")
    return (mine + rest) * virtual


_PIPELINE_FLAGS = (
    "decoder-first-pipeline-num-layers",
    "decoder-last-pipeline-num-layers",
    "account-for-embedding-in-pipeline-split",
    "account-for-loss-in-pipeline-split",
    "pipeline-model-parallel-layout",
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "microbatch-group-size-per-virtual-pipeline-stage",
    "overlap-param-gather-with-optimizer-step",
    "defer-embedding-wgrad-compute",
)


def scale_levels(
    scaling: Scaling, levels: tuple[Level, ...], few: Places, layers: int, new_layers: int
) -> tuple[Level, ...]:
    """Sets the flags that depend on S; returns the new levels."""
    new = tuple(
        Level(BUDGET * cp_size, cp_size, _recomputed(level, layers, new_layers))
        for level, cp_size in zip(levels, few.cp_sizes, strict=True)
    )
    scaling.set("seq-length", BUDGET, "short sequences")
    texts: list[str | int | float] = [str(level) for level in new]
    scaling.set("hbp-level", texts, "S x CP, as many levels, in their order")
    scaling.set("max-position-embeddings", new[-1].pack_len, "the longest level")
    if "recompute-num-layers" in scaling:
        scaling.set("recompute-num-layers", 1, "few layers")
    return new


def _recomputed(level: Level, layers: int, new_layers: int) -> int | Literal["full"]:
    """All layers stay all, none none, some some (one of one)."""
    count = level.recompute_layers
    if count == "full":
        return count
    if count == 0:
        return 0
    if count >= layers:
        return new_layers
    return min(max(1, round(count * new_layers / layers)), max(new_layers - 1, 1))
