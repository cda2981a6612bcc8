"""What the corpus holds and what each level makes of it: tables and figures of the page.

Guarantees (asserted by tests/unit/test_report_page.py):
- sequences and tokens of all levels add up to those of the plan;
- the tokens of a level are those that must pay for CP, those that pay without need, and those that
  do not pay.
"""

from dataclasses import dataclass

import numpy as np

from megatron_hbp.level import Level
from megatron_hbp.plan import DROP_REASONS, Plan
from megatron_hbp.report.figure import Axis, Figure, Line, Mark, Text, short_count

_BINS_PER_OCTAVE = 2


@dataclass(frozen=True)
class LevelFacts:
    """Of all epochs. tokens = must_pay + need_not_pay + free; padding: slots without a token."""

    level: Level
    microbatches: int
    packs: int
    fillers: int
    sequences: int
    tokens: int
    must_pay: int
    need_not_pay: int
    free: int
    padding: int

    @property
    def name(self) -> str:
        """Pack length and CP size, as a reader says it."""
        return f"{short_count(self.level.pack_len)}, CP {self.level.cp_size}"


def level_facts(plan: Plan) -> list[LevelFacts]:
    """One for each level, in the plan's order."""
    lens = plan.seq_lens[plan.sequence_ids].astype(np.int64)
    counts = np.diff(plan.pack_offsets)
    pack_level = plan.pack_level()
    level_of = np.repeat(pack_level, counts)
    without_cp = [
        level.pack_len // multiple * multiple
        for level, multiple in zip(plan.levels, plan.alignment.document_multiples, strict=True)
        if level.cp_size == 1
    ]
    short = lens <= max(without_cp, default=0)
    facts = []
    for index, level in enumerate(plan.levels):
        packs, here = pack_level == index, level_of == index
        tokens, short_tokens = int(lens[here].sum()), int(lens[here & short].sum())
        pays = level.cp_size > 1
        num_packs = int(np.count_nonzero(packs))
        facts.append(
            LevelFacts(
                level=level,
                microbatches=int(np.count_nonzero(plan.microbatch_level == index)),
                packs=num_packs,
                fillers=int(np.count_nonzero(packs & (counts == 0))),
                sequences=int(np.count_nonzero(here)),
                tokens=tokens,
                must_pay=tokens - short_tokens if pays else 0,
                need_not_pay=short_tokens if pays else 0,
                free=0 if pays else tokens,
                padding=num_packs * level.pack_len - tokens,
            )
        )
    return facts


def account(plan: Plan) -> list[tuple[str, int, int | None]]:
    """Rows of name, sequences, tokens: in, kept, dropped by reason, truncated.

    A plan knows the tokens of all that is dropped together, so that they stand beside the reason
    where there is one only.
    """
    counts = plan.counts()
    reasons = [reason for reason in DROP_REASONS if counts[f"dropped: {reason}"]]
    rows: list[tuple[str, int, int | None]] = [
        ("in", counts["sequences_in"], counts["tokens_in"]),
        ("kept", counts["sequences_kept"], counts["tokens_kept"]),
    ]
    if len(reasons) == 1:
        rows.append((f"dropped: {reasons[0]}", len(plan.dropped_ids), plan.tokens_dropped))
    else:
        rows.append(("dropped", len(plan.dropped_ids), plan.tokens_dropped))
        rows += [(f"dropped: {reason}", counts[f"dropped: {reason}"], None) for reason in reasons]
    return [*rows, ("cut to fit", counts["sequences_truncated"], counts["tokens_truncated"])]


def histogram(plan: Plan) -> tuple[Figure, list[tuple[str, int, int]]]:
    """Kept sequences and their tokens by length; and the same as rows of a table."""
    lens = plan.seq_lens[plan.seq_lens > 0]
    longest = max(int(lens.max()), plan.levels[-1].pack_len)
    first = int(np.floor(np.log2(lens.min())))
    last = max(int(np.ceil(np.log2(longest))), first + 1)
    edges = 2.0 ** (np.arange((last - first) * _BINS_PER_OCTAVE + 1) / _BINS_PER_OCTAVE + first)
    bins = np.searchsorted(edges[1:-1], lens, side="left")  # a bin holds its upper edge
    sequences = np.bincount(bins, minlength=len(edges) - 1)
    tokens = np.bincount(bins, weights=lens, minlength=len(edges) - 1).astype(np.int64)
    shares = np.array([sequences / sequences.sum(), tokens / tokens.sum()])
    axis = Axis.over(0.0, 100 * float(shares.max()))
    width = 100.0 / len(sequences)
    marks, rows = [], []
    for index, (count, total) in enumerate(zip(sequences.tolist(), tokens.tolist(), strict=True)):
        if not count:
            continue
        low, high = int(edges[index]) + 1, int(edges[index + 1])
        low = int(lens.min()) if index == 0 else low
        span = f"{low:,}-{high:,} tokens" if high > low else f"{high:,} tokens"
        rows.append((span, count, total))
        for at, kind in enumerate(("sequences", "tokens")):
            share = 100 * float(shares[at, index])
            height = axis.at(share)
            tip = f"{span}: {count:,} sequences, {total:,} tokens ({share:.2f} % of {kind})"
            left = (index + 0.06 + 0.44 * at) * width
            marks.append(Mark(left, 100 - height, 0.44 * width, height, kind, tip))
    octaves = range(first, last + 1)
    figure = Figure(
        title="Share of sequences and of tokens by sequence length, with the levels marked",
        height=240,
        x_label="tokens of a sequence (each bar up to the next)",
        y_label="% of all",
        x_ticks=[
            Text(100.0 * (power - first) / (last - first), short_count(2**power), bool(index % 2))
            for index, power in enumerate(octaves)
        ],
        y_ticks=axis.texts_at(upwards=True),
        marks=marks,
        lines=[
            Line(at, 0, at, 100, "level", f"{short_count(level.pack_len)}:{level.cp_size}", row % 3)
            for row, level in enumerate(plan.levels)
            for at in [100.0 * (np.log2(level.pack_len) - first) / (last - first)]
        ],
        legend=(
            ("sequences", "sequences"),
            ("tokens", "tokens"),
            ("level", "level (pack length:CP)"),
        ),
    )
    return figure, rows


def level_bars(facts: list[LevelFacts]) -> Figure:
    """A bar for each level: who pays for CP, and why."""
    kinds = {
        "free": "do not pay for CP",
        "must_pay": "pay: too long for one rank",
        "need_not_pay": "pay: short, they fill up long packs",
        "padding": "padding",
    }
    largest = max(fact.tokens + fact.padding for fact in facts) or 1
    row = 100.0 / len(facts)
    marks = []
    for index, fact in enumerate(facts):
        left = 0.0
        for kind, words in kinds.items():
            tokens = getattr(fact, kind)
            if tokens:
                width = 100.0 * tokens / largest
                tip = f"level {fact.name}: {tokens:,} tokens {words}"
                marks.append(Mark(left, (index + 0.15) * row, width, 0.7 * row, kind, tip))
                left += width
    return Figure(
        title="Tokens of each level that pay for context parallelism and that do not",
        height=36 * len(facts),
        y_ticks=[
            Text((index + 0.5) * row, f"{short_count(fact.level.pack_len)}:{fact.level.cp_size}")
            for index, fact in enumerate(facts)
        ],
        marks=marks,
        legend=tuple(item for item in kinds.items() if item[0] in {mark.kind for mark in marks}),
    )
