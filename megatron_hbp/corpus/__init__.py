"""Tokenised samples on disk: read rows, apply a chat template, tokenise, store, memory-map."""

from megatron_hbp.corpus.store import Corpus, write_corpus

__all__ = ["Corpus", "write_corpus"]
