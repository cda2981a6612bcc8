"""Readers share what they read: a corpus is mapped, not loaded."""

import subprocess
import sys

import numpy as np
import pytest

from megatron_hbp.corpus import write_corpus

READER = """
import sys
from megatron_hbp.corpus.store import Corpus
def private():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    # a clean page of a mapped file counts as private while no other process has touched it
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) * 1024
before = private()
corpus = Corpus.open(sys.argv[1])
tokens = sum(int(corpus.tokens(i)[-1]) for i in range(len(corpus)))
print(tokens, private() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads private memory from /proc")
@pytest.mark.parametrize(
    "num_rows", [20_000, pytest.param(200_000, marks=pytest.mark.slow)]
)  # a tenth of the case's rows, and of its 1.5 GB, and all of it
def test_br_l03_eight_readers_share_the_tokens(tmp_path, num_rows):
    row = np.arange(2000, dtype=np.int32)
    mask = np.ones(2000, dtype=np.uint8)
    rows = ((np.roll(row, i), mask) for i in range(num_rows))
    write_corpus(tmp_path / "corpus", rows, vocab_size=2000, end_id=0)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(tmp_path / "corpus")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    found = [reader.communicate()[0].split() for reader in readers]
    assert len({tokens for tokens, _ in found}) == 1
    assert sum(int(private) for _, private in found) < 1.5e9 * num_rows / 200_000
