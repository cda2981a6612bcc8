"""What `hbp prepare` tells about a corpus: rows in and out, tokens, lengths."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

LENGTH_BINS = (256, 1024, 4096, 8192, 16384, 32768, 65536)  # upper ends, tokens
_PERCENTILES = (0, 10, 50, 90, 99, 100)
_BAR_WIDTH = 40


@dataclass
class RowCounts:
    """rows_in == rows_kept + rows_rejected; blank lines are not rows."""

    rows_in: int = 0
    rows_kept: int = 0
    rows_held_out: int = 0
    blank_lines: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def rows_rejected(self) -> int:
        return sum(self.reasons.values())

    def reject(self, kind: str) -> None:
        self.reasons[kind] = self.reasons.get(kind, 0) + 1

    def reasons_text(self) -> str:
        """E.g. "no answer 3, unknown role 1", the most frequent first."""
        ordered = sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{kind} {count}" for kind, count in ordered)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rows_rejected": self.rows_rejected}


def length_summary(seq_lens: np.ndarray) -> dict[str, Any]:
    """Percentiles and a histogram of int32 [N] lengths, of sequences and of their tokens."""
    bins = np.searchsorted(np.array(LENGTH_BINS), seq_lens)
    count = len(LENGTH_BINS) + 1
    values = np.percentile(seq_lens, _PERCENTILES, method="nearest")
    return {
        "percentiles": [[p, int(value)] for p, value in zip(_PERCENTILES, values, strict=True)],
        "bins": list(LENGTH_BINS),
        "sequences": np.bincount(bins, minlength=count).tolist(),
        "tokens": [int(seq_lens[bins == i].sum(dtype=np.int64)) for i in range(count)],
    }


def summary_text(info: dict[str, Any]) -> str:
    """The printed summary of a corpus.json made by `hbp prepare`."""
    counts, lengths = info["row_counts"], info["lengths"]
    kept_in = counts["rows_kept"]
    lines = [
        f"rows        {counts['rows_in']} in = {kept_in} kept + {counts['rows_rejected']} rejected"
        + (f" ({counts['blank_lines']} blank lines)" if counts["blank_lines"] else ""),
    ]
    if counts["rows_held_out"]:
        lines.append(f"held out    {counts['rows_held_out']} of the kept rows, in `valid`")
    for kind, count in sorted(counts["reasons"].items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"  rejected  {count}  {kind}")
    share = info["trained_tokens"] / info["tokens"]
    lines += [
        f"tokens      {info['tokens']}, {info['trained_tokens']} trained ({share:.1%})",
        f"tokenizer   {info['tokenizer_path']} ({info['vocab_size']} ids, end id {info['end_id']})",
        f"template    {info['chat_template']}",
        *(f"note        {note}" for note in info["notes"]),
        "lengths     "
        + ", ".join(f"p{p} {value}" for p, value in lengths["percentiles"])
        + " tokens",
        "",
        f"{'tokens up to':>14} {'sequences':>10} {'share of tokens':>16}",
    ]
    names = [str(end) for end in lengths["bins"]] + ["longer"]
    for name, sequences, tokens in zip(names, lengths["sequences"], lengths["tokens"], strict=True):
        bar = "#" * round(_BAR_WIDTH * tokens / info["tokens"])
        lines.append(f"{name:>14} {sequences:>10} {tokens / info['tokens']:>16.1%} {bar}".rstrip())
    return "\n".join(lines)
