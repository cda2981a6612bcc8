"""What `hbp prepare` tells about a corpus: rows in and out, tokens, lengths."""

from typing import Any

import numpy as np

LENGTH_BINS = (256, 1024, 4096, 8192, 16384, 32768, 65536)  # upper ends, tokens
_PERCENTILES = (0, 10, 50, 90, 99, 100)
_BAR_WIDTH = 40
_MUCH = 0.05  # share of lost rows that the first line speaks of
_CHUNK = 1 << 20  # sequences read at a time


def length_summary(seq_lens: np.ndarray) -> dict[str, Any]:
    """Percentiles (nearest rank) and a histogram of int32 [N] lengths and of their tokens.

    Reads a piece at a time, so the lengths may be memory-mapped.
    """
    counts = np.zeros(0, dtype=np.int64)  # of each length
    for start in range(0, len(seq_lens), _CHUNK):
        part = np.bincount(seq_lens[start : start + _CHUNK], minlength=len(counts))
        part[: len(counts)] += counts
        counts = part
    lengths = np.flatnonzero(counts)
    counts = counts[lengths]
    ranks = np.around(np.array(_PERCENTILES) / 100 * (len(seq_lens) - 1)).astype(np.int64)
    values = lengths[np.searchsorted(np.cumsum(counts), ranks, side="right")]
    bins = np.searchsorted(np.array(LENGTH_BINS), lengths)
    num_bins = len(LENGTH_BINS) + 1
    tokens = [int((counts * lengths)[bins == i].sum()) for i in range(num_bins)]
    return {
        "percentiles": [[p, int(value)] for p, value in zip(_PERCENTILES, values, strict=True)],
        "bins": list(LENGTH_BINS),
        "sequences": [int(counts[bins == i].sum()) for i in range(num_bins)],
        "tokens": tokens,
    }


def summary_text(info: dict[str, Any]) -> str:
    """The printed summary of a corpus.json made by `hbp prepare`."""
    counts, lengths = info["row_counts"], info["lengths"]
    lines = []
    lost = (counts["rows_rejected"] + counts["rows_dropped"]) / counts["rows_in"]
    if lost > _MUCH:
        lines.append(f"WARNING     {lost:.1%} of the rows were lost; see the reasons below")
    lines.append(
        f"rows        {counts['rows_in']} in = {counts['rows_kept']} kept + "
        f"{counts['rows_rejected']} rejected + {counts['rows_dropped']} dropped"
        + (f" ({counts['blank_lines']} blank lines)" if counts["blank_lines"] else "")
    )
    for kind, count in sorted(counts["reasons"].items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"  reason    {count}  {kind}")
    for form, count in sorted(counts["forms"].items()):
        lines.append(f"  form      {count}  {form}")
    if counts["rows_held_out"]:
        lines.append(f"held out    {counts['rows_held_out']} of the kept rows, in `valid`")
    lines += [
        f"tokens      {counts['tokens_in']} in = {counts['tokens_kept']} kept + "
        f"{counts['tokens_dropped']} dropped + {counts['tokens_truncated']} truncated",
        f"trained     {info['trained_tokens']} of {info['tokens']} tokens "
        f"({info['trained_tokens'] / info['tokens']:.1%})"
        + (", those held out not counted" if counts["rows_held_out"] else ""),
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
