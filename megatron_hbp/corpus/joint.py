"""Several corpora as one: their sequences one after another, each corpus a source of its own.

Guarantees (asserted by tests/unit/test_corpus_joint.py):
- sequence ids of source 1 follow those of source 0, and read the tokens and the mask of corpus 1;
- one corpus stays a plain `Corpus`, without a copy of its memory-mapped arrays; several cost 16
  bytes a sequence in each process, their tokens and masks stay memory-mapped;
- corpora that do not go together (the same twice, other tokenizers) are refused by name.
"""

import bisect
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from megatron_hbp.corpus.store import Corpus

# read by `hbp prepare` with the tokenizer, but no part of what turns text into ids
_TEMPLATE_FILES = ("chat_template.jinja",)


@dataclass(frozen=True, eq=False)
class JointCorpus:
    """Corpora read as one. Make one with `open_corpora`.

    parts: the corpora; part k is source k. hash: SHA-256 of the parts' hashes in order. seq_lens,
    first_trained, num_trained: int32 [N] as in `Corpus`, part after part. source_ids: int32 [N],
    the part of each sequence. max_token_id: the largest of all parts.
    """

    parts: tuple[Corpus, ...]
    hash: str
    seq_lens: np.ndarray
    first_trained: np.ndarray
    num_trained: np.ndarray
    source_ids: np.ndarray
    vocab_size: int
    max_token_id: int
    end_id: int
    _starts: tuple[int, ...]  # the first sequence of each part

    def __len__(self) -> int:
        return len(self.seq_lens)

    @property
    def values(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """(tokens, mask) of each part, see `Corpus.values`."""
        return tuple(part.values[0] for part in self.parts)

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(part int32 [n], start int64 [n]) of sequences in `values`."""
        sources = self.source_ids[ids]
        inside = ids - np.array(self._starts)[sources]
        starts = np.empty(len(ids), dtype=np.int64)
        for source in np.unique(sources):
            here = sources == source
            starts[here] = self.parts[source].locate(inside[here])[1]
        return sources, starts

    def tokens(self, index: int, length: int | None = None) -> np.ndarray:
        """uint16 or int32 [length]: the first `length` tokens (default all), a read-only view."""
        part, inside = self._place(index)
        return part.tokens(inside, length)

    def mask(self, index: int, length: int | None = None) -> np.ndarray:
        """uint8 [length]: 1 where the token is trained, a read-only view."""
        part, inside = self._place(index)
        return part.mask(inside, length)

    def origin(self, index: int) -> str | None:
        """Where a sequence came from, see `Corpus.origin`."""
        part, inside = self._place(index)
        return part.origin(inside)

    def _place(self, index: int) -> tuple[Corpus, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        source = bisect.bisect_right(self._starts, index) - 1
        return self.parts[source], index - self._starts[source]


def open_corpora(paths: Sequence[str | PathLike], *, verify: bool = False) -> Corpus | JointCorpus:
    """Memory-maps corpora and joins them in this order; a single one stays as it is.

    verify: as in `Corpus.open`. ValueError when there is none, one is missing or damaged, or they
    do not go together.
    """
    if not paths:
        raise ValueError("no corpus is named; give at least one with --hbp-corpus DIR")
    parts = tuple(Corpus.open(path, verify=verify) for path in paths)
    if len(parts) == 1:
        return parts[0]
    for index, part in enumerate(parts):
        for earlier in parts[:index]:
            _check_pair(earlier, part)
    lens = [len(part) for part in parts]
    return JointCorpus(
        parts=parts,
        hash=hashlib.sha256(json.dumps([part.hash for part in parts]).encode()).hexdigest(),
        seq_lens=np.concatenate([part.seq_lens for part in parts]),
        first_trained=np.concatenate([part.first_trained for part in parts]),
        num_trained=np.concatenate([part.num_trained for part in parts]),
        source_ids=np.repeat(np.arange(len(parts), dtype=np.int32), lens),
        vocab_size=parts[0].vocab_size,
        max_token_id=max(part.max_token_id for part in parts),
        end_id=parts[0].end_id,
        _starts=tuple(np.cumsum([0, *lens[:-1]]).tolist()),
    )


def parts_of(corpus: Corpus | JointCorpus) -> tuple[Corpus, ...]:
    """The corpora on disk that one is made of."""
    return (corpus,) if isinstance(corpus, Corpus) else corpus.parts


def corpus_paths(corpus: Corpus | JointCorpus) -> tuple[str, ...]:
    """The absolute folder of each part, as a plan keeps them."""
    return tuple(str(Path(part.path).resolve()) for part in parts_of(corpus))


def weighted_sources(
    corpus: Corpus | JointCorpus, weights: Sequence[float] | None
) -> np.ndarray | None:
    """int32 [N]: the source of each sequence for a plan, None where there is but one and no weight.

    weights: how often an epoch takes each sequence of part 0, 1, ..., or None. ValueError unless
    there is one for each part.
    """
    parts = parts_of(corpus)
    if weights is not None and len(weights) != len(parts):
        raise ValueError(
            f"the number of --hbp-source-weight is {len(weights)}, that of corpora {len(parts)} "
            f"({', '.join(str(part.path) for part in parts)}); give one for each, in the order of "
            "--hbp-corpus, 0 to leave one out"
        )
    if isinstance(corpus, JointCorpus):
        return corpus.source_ids
    return None if weights is None else np.zeros(len(corpus), dtype=np.int32)


def _check_pair(first: Corpus, second: Corpus) -> None:
    """Raises ValueError unless one run may train both."""
    names = f"the corpora {first.path} and {second.path}"
    if first.hash == second.hash:
        raise ValueError(
            f"{names} hold the same sequences; name one of them, and give it an "
            "--hbp-source-weight of 2 to take each of its sequences twice"
        )
    differ = [
        f"{word} {ours} and {theirs}"
        for word, ours, theirs in (
            ("vocabulary sizes", first.vocab_size, second.vocab_size),
            ("end ids", first.end_id, second.end_id),
        )
        if ours != theirs
    ]
    ours, theirs = _tokenizer_hashes(first), _tokenizer_hashes(second)
    if ours and theirs:  # a corpus that was not made by `hbp prepare` names no tokenizer
        common = ours.keys() & theirs.keys()
        changed = sorted(name for name in common if ours[name] != theirs[name])
        if changed or not common:
            differ.append(f"other {', '.join(changed or ['files'])}")
    if differ:
        raise ValueError(
            f"{names} were made with different tokenizers ({'; '.join(differ)}): a token id "
            f"would mean two things; make {second.path} again with `hbp prepare` and the tokenizer "
            f"of {first.path}" + (f" ({first.tokenizer_path})" if first.tokenizer_path else "")
        )


def _tokenizer_hashes(corpus: Corpus) -> dict[str, str]:
    origin = corpus.info.get("origin")
    hashes = origin.get("tokenizer_hashes", {}) if isinstance(origin, dict) else {}
    return {name: value for name, value in hashes.items() if name not in _TEMPLATE_FILES}
