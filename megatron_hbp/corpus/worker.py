"""python -m megatron_hbp.corpus.worker: encodes blocks of rows that another process sends.

stdin: a pickled Recipe, then Blocks; stdout: for each block its EncodedBlock, or the text of what
went wrong. Both ends are processes of one user on one machine. It ends, without a word, when either
of them does, so it never outlives the process that started it.
"""

import contextlib
import os
import pickle
import sys
import traceback

from megatron_hbp.corpus.row_encoder import RowEncoder


def main() -> None:
    """Serves until stdin ends."""
    requests = sys.stdin.buffer
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not end up between the replies
    encoder = RowEncoder(pickle.load(requests))
    while True:
        block = pickle.load(requests)
        try:
            reply = encoder(block)
        except Exception:
            reply = traceback.format_exc()
        _write(replies, pickle.dumps(reply, protocol=pickle.HIGHEST_PROTOCOL))


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


if __name__ == "__main__":
    # raised when the starter ended, maybe in the middle of a block
    with contextlib.suppress(EOFError, pickle.UnpicklingError, BrokenPipeError):
        main()
