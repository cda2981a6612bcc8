"""What a plan is made from or checked against: corpora, or lengths in an array or a table."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hbp.arrays import load_array
from megatron_hbp.corpus.joint import corpus_paths, open_corpora, weighted_sources
from megatron_hbp.length_table import read_lengths
from megatron_hbp.packing import check_lengths


@dataclass(frozen=True)
class Given:
    """What a plan is made from. seq_lens, first_trained, source_ids: see build_plan()."""

    seq_lens: np.ndarray
    first_trained: np.ndarray | None = None
    source_ids: np.ndarray | None = None
    corpus_hash: str | None = None
    corpus_paths: tuple[str, ...] = ()
    origin: Callable[[int], str | None] = lambda _: None  # file and line of a sequence


def add_input(parser: argparse.ArgumentParser, *, required: bool) -> None:
    source = parser.add_mutually_exclusive_group(required=required)
    source.add_argument(
        "--corpus",
        action="append",
        metavar="DIR",
        help="a corpus made by hbp prepare; repeat for several in one plan: source 0, 1, ... in "
        "this order",
    )
    source.add_argument(
        "--lengths",
        metavar="FILE.npy|FILE.csv",
        help="an int32 or int64 array, one length in tokens per sequence; or a table with the "
        "header length,count: how many sequences have each length",
    )
    parser.add_argument(
        "--sources",
        metavar="FILE.npy",
        help="with --lengths FILE.npy: an int32 or int64 array, the source (0 or more) of each "
        "sequence",
    )


def read_input(
    namespace: argparse.Namespace, source_weights: Sequence[float] | None = None
) -> Given | None:
    """What the flags of add_input name, None when they name nothing.

    source_weights: those that the plan is made with. ValueError unless each corpus has one, and for
    whatever cannot be read.
    """
    if namespace.sources is not None and namespace.lengths is None:
        raise ValueError("--sources goes with --lengths; a corpus knows its sources")
    if namespace.corpus is not None:
        corpus = open_corpora(namespace.corpus)
        return Given(
            corpus.seq_lens,
            corpus.first_trained,
            weighted_sources(corpus, source_weights),
            corpus.hash,
            corpus_paths(corpus),
            corpus.origin,
        )
    if namespace.lengths is None:
        return None
    is_table = namespace.lengths.lower().endswith(".csv")
    if is_table and namespace.sources is not None:
        raise ValueError(
            "--sources goes with --lengths FILE.npy: the rows of a table are counts, not "
            "sequences; give one length per sequence, or leave --sources out"
        )
    seq_lens = given_lengths(namespace.lengths)
    if namespace.sources is None:
        if source_weights is not None:
            raise ValueError(
                "--source-weight needs to know the source of each sequence; add --sources FILE.npy"
            )
        return Given(seq_lens)
    return Given(seq_lens, source_ids=_load_array("--sources", namespace.sources))


def given_lengths(path: str) -> np.ndarray:
    """int32 or int64 [sequences], tokens, from the file given to --lengths."""
    if path.lower().endswith(".csv"):
        return read_lengths(path)
    return _load_array("--lengths", path)


def _load_array(flag: str, path: str) -> np.ndarray:
    try:
        array = load_array(path, mapped=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{flag} {path} cannot be read ({error}); make it with "
            "numpy.save(file, a), a being a one-dimensional int32 or int64 array"
        ) from None
    check_lengths(array, f"{flag} {path}")
    return array
