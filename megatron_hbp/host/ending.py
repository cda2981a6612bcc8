"""How a run ends on an error that every rank finds: one line on standard error, no traceback."""

import sys
from typing import NoReturn

import torch.distributed as dist


def end_every_rank(error: ValueError) -> NoReturn:
    """Ends the process with code 1 on every rank; rank 0 prints the error.

    Every rank must come here: none leaves before all are there, so that the line is not lost when
    the launcher ends the others.
    """
    text = f"megatron_hbp: error: {error}"
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)
    dist.barrier()
    sys.exit(1)
