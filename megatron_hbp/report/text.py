"""A plan as plain text and as JSON: what went in, what came out, how good it is.

Guarantees (asserted by tests/unit/test_cli.py):
- sequences and tokens in = kept + dropped by reason + truncated, beside packs and steps;
- every source is named, with its sequences, tokens, weight and share of what is trained;
- every metric stands beside its bound.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_hbp.plan import DROP_REASONS, Plan

_SOURCES_SHOWN = 20


def plan_document(plan: Plan, seq_lens: np.ndarray) -> dict[str, Any]:
    """Everything in the text report, as JSON values. seq_lens: the planner's input lengths."""
    filled = np.diff(plan.pack_offsets) > 0
    pack_level = plan.pack_level()
    levels = []
    for index, level in enumerate(plan.levels):
        here = pack_level == index
        levels.append(
            {
                "level": str(level),
                "packs": int(np.count_nonzero(here)),
                "filler_packs": int(np.count_nonzero(here & ~filled)),
                "microbatches": int(np.count_nonzero(plan.microbatch_level == index)),
            }
        )
    dropped_lens = seq_lens[plan.dropped_ids].astype(np.int64)
    dropped_tokens = {
        reason: int(dropped_lens[plan.dropped_reason == code].sum())
        for code, reason in enumerate(DROP_REASONS)
    }
    return {
        "hash": plan.hash(),
        "mixing": plan.mixing,
        "counts": plan.counts(),
        "dropped_tokens": dropped_tokens,
        "sources": plan_sources(plan, seq_lens),
        "levels": levels,
        "steps_per_epoch": np.diff(plan.epoch_offsets).tolist(),
        "metrics": plan.metrics(),
    }


def plan_text(plan: Plan, seq_lens: np.ndarray) -> str:
    """The report of `hbp plan`. seq_lens: the planner's input lengths."""
    document = plan_document(plan, seq_lens)
    counts, metrics = document["counts"], document["metrics"]
    rows = [
        ["", "sequences", "tokens"],
        ["in", counts["sequences_in"], counts["tokens_in"]],
        ["kept", counts["sequences_kept"], counts["tokens_kept"]],
        *(
            [f"dropped: {reason}", counts[f"dropped: {reason}"], document["dropped_tokens"][reason]]
            for reason in DROP_REASONS
        ),
        ["truncated", counts["sequences_truncated"], counts["tokens_truncated"]],
    ]
    account = (
        f"tokens in {counts['tokens_in']} == kept {counts['tokens_kept']} + dropped "
        f"{counts['tokens_dropped']} + truncated {counts['tokens_truncated']}"
    )
    level_rows = [
        ["level", "packs", "of them fillers", "micro-batches"],
        *(list(row.values()) for row in document["levels"]),
    ]
    metric_rows = [
        ["metric", "value", "bound"],
        *(
            [name, metrics[name], metrics[f"{name}_bound"]]
            for name in metrics
            if not name.endswith("_bound")
        ),
    ]
    steps = document["steps_per_epoch"]
    run = (
        f"steps {plan.num_steps} ({' + '.join(map(str, steps))} per epoch), "
        f"{plan.num_microbatches} micro-batches each, {plan.num_ranks} ranks, "
        f"{plan.token_budget} tokens per rank and micro-batch, mixing {plan.mixing}"
    )
    parts = [f"plan {document['hash']}", f"{table(rows)}\n{account}"]
    if document["sources"]:
        parts.append(_source_table(document["sources"]))
    return "\n\n".join([*parts, table(level_rows), run, table(metric_rows)])


def plan_sources(plan: Plan, seq_lens: np.ndarray) -> list[dict[str, Any]]:
    """Of each source that occurs: what went in, and its share of the tokens of all epochs.

    seq_lens: the planner's input lengths.
    """
    if plan.source_ids is None:
        return []
    sequences = np.bincount(plan.source_ids)
    tokens = np.bincount(plan.source_ids, weights=seq_lens)
    times = np.bincount(plan.sequence_ids, minlength=len(plan.seq_lens))
    planned = np.bincount(plan.source_ids, weights=plan.seq_lens * times)
    named = len(plan.corpus_paths) == len(sequences)
    return [
        {
            "source": plan.corpus_paths[index] if named else str(index),
            "sequences": int(sequences[index]),
            "tokens": int(tokens[index]),
            "weight": 1.0 if plan.source_weights is None else plan.source_weights[index],
            "share": float(planned[index] / planned.sum()),
        }
        for index in np.flatnonzero(sequences).tolist()
    ]


def _source_table(sources: list[dict[str, Any]]) -> str:
    head = ["source", "sequences", "tokens", "weight", "share of tokens planned"]
    rows = [
        [
            row["source"],
            row["sequences"],
            row["tokens"],
            f"{row['weight']:g}",
            f"{row['share']:.1%}",
        ]
        for row in sources[:_SOURCES_SHOWN]
    ]
    more = len(sources) - len(rows)
    return table([head, *rows]) + (f"\nand {more} more sources" if more else "")


def table(rows: Sequence[Sequence[str | int | float]]) -> str:
    """Aligned columns, the first to the left, the others to the right."""
    texts = [
        [f"{cell:.4f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in texts
    )
