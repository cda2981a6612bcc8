"""python -m tests.kills.hbp CHECKPOINT_SECONDS BLOCK_BYTES ARGUMENTS: hbp in small steps."""

import sys

from megatron_hbp.cli import main
from megatron_hbp.corpus import preparation

if __name__ == "__main__":
    preparation._CHECKPOINT_SECONDS = float(sys.argv[1])
    preparation._BLOCK_BYTES = int(sys.argv[2])
    sys.exit(main(sys.argv[3:]))
