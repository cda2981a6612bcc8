"""python -m megatron_hbp.corpus.worker: encodes blocks of rows that another process sends.

stdin: a pickled Recipe, then Blocks; stdout: for each block its EncodedBlock, or the text of what
went wrong. Both ends are processes of one user on one machine. It ends when stdin does, so it never
outlives the process that started it.
"""

import os
import pickle
import signal
import sys
import traceback

from megatron_hbp.corpus.row_encoder import RowEncoder


def main() -> None:
    """Serves until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the starter hears it too, and closes stdin
    requests = sys.stdin.buffer
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not end up between the replies
    encoder = RowEncoder(pickle.load(requests))
    while True:
        try:
            block = pickle.load(requests)
        except EOFError:
            return
        try:
            reply = encoder(block)
        except Exception:
            reply = traceback.format_exc()
        pickle.dump(reply, replies, protocol=pickle.HIGHEST_PROTOCOL)
        replies.flush()


if __name__ == "__main__":
    main()
