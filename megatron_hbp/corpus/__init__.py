"""Tokenised samples on disk: read rows, apply a chat template, tokenise, store, memory-map."""

from megatron_hbp.corpus.store import Corpus
from megatron_hbp.corpus.writer import write_corpus

__all__ = ["Corpus", "write_corpus"]
