"""Sample lengths like those of the HBP paper's 8B job, as its tables imply them.

939,344 short samples (Tulu3: mean about 750 tokens, at most 32K) and 1,920 long ones (LongCite:
uniform over 8K to 128K), arXiv 2503.07680. The long ones are what makes 17 % of the tokens lie in
samples over 16K, the paper's communication ratio. The real data is not needed, and not used.

    python -m examples.paper_lengths --csv paper.csv [--samples 941264] [--longest 32768]

writes them as a table for `--lengths`: lengths rounded up to a grid of about 2 %, the longest to
what the longest sample may have. examples/recipes/lengths/ holds two such tables.
"""

import argparse
from pathlib import Path

import numpy as np

from megatron_hbp.length_table import table_text

NUM_SAMPLES = 941_264
NUM_LONG = 1_920
SHORTEST, LONGEST_SHORT = 8, 32_768
SHORTEST_LONG, LONGEST = 8_192, 131_072

_MEDIAN, _SIGMA = 375.0, 1.17  # of the log-normal lengths of short samples
_SEED, _STREAM = 20260101, 2
_GRID = 1.02  # a length of the table is at most this times the sample's


def paper_lengths(num_samples: int = NUM_SAMPLES) -> np.ndarray:
    """int64 [num_samples], tokens, shuffled; the same number gives the same lengths.

    Fewer samples keep the mixture: one long sample for 489 short ones, and at least one. Raises
    ValueError for fewer than two.
    """
    if num_samples < 2:
        raise ValueError(
            f"num_samples is {num_samples}; it must be at least 2: a short, a long one"
        )
    rng = np.random.default_rng([_SEED, 0 if num_samples == NUM_SAMPLES else num_samples, _STREAM])
    num_long = max(1, round(num_samples * NUM_LONG / NUM_SAMPLES))
    short = _short_lengths(rng, num_samples - num_long)
    long = rng.integers(SHORTEST_LONG, LONGEST, num_long, endpoint=True)
    lengths = np.concatenate([short, long])
    rng.shuffle(lengths)
    return lengths


def _short_lengths(rng: np.random.Generator, num: int) -> np.ndarray:
    """int64 [num]: log-normal, those out of range drawn anew."""
    kept: list[np.ndarray] = []
    missing = num
    while missing > 0:
        drawn = rng.lognormal(np.log(_MEDIAN), _SIGMA, missing * 13 // 10 + 64)
        inside = drawn[(drawn >= SHORTEST) & (drawn <= LONGEST_SHORT)][:missing]
        kept.append(np.rint(inside).astype(np.int64))
        missing -= len(inside)
    return np.concatenate(kept)


def paper_table(num_samples: int = NUM_SAMPLES, longest: int = LONGEST) -> str:
    """The text of a length table of paper_lengths(num_samples), those over `longest` left out.

    Lengths are rounded up to a grid of about 2 %; the largest row is `longest`, so that levels are
    chosen for a corpus that may hold one such sample. Raises ValueError where nothing is left.
    """
    lengths = paper_lengths(num_samples)
    lengths = lengths[lengths <= longest]
    if len(lengths) == 0:
        raise ValueError(f"no sample has {longest} tokens or fewer; raise --longest")
    grid = _grid(longest)
    rounded = grid[np.searchsorted(grid, lengths)]
    if rounded.max() < longest:
        rounded[lengths.argmax()] = longest
    return table_text(*np.unique(rounded, return_counts=True))


def _grid(longest: int) -> np.ndarray:
    """int64, ascending, from 1 to `longest`, steps of 1 while that is more than 2 %."""
    points = [longest]
    while points[-1] > 1:
        points.append(min(points[-1] - 1, int(points[-1] / _GRID)))
    return np.array(points[::-1], dtype=np.int64)


def main() -> None:
    """Writes a table."""
    parser = argparse.ArgumentParser(description="Lengths of the HBP paper's job as a table.")
    parser.add_argument("--csv", required=True, metavar="FILE", help="where the table is written")
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES, metavar="N")
    parser.add_argument("--longest", type=int, default=LONGEST, metavar="TOKENS")
    given = parser.parse_args()
    text = paper_table(given.samples, given.longest)
    target = Path(given.csv)
    unfinished = target.with_name(target.name + ".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(target)
    print(f"{target}: {len(text.splitlines()) - 1} lengths")


if __name__ == "__main__":
    main()
