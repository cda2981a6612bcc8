"""All state of one pack, on the object that travels with it through the model.

The host's own fields describe one document of S tokens without CP; what attention and rotary need
to know of the real pack is in fields of ours. So several micro-batches of different levels can be
in flight (pipelines, recompute), each with its own boundaries and group.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass
class HbpPackedSeqParams(PackedSeqParams):
    """pack_cu_seqlens: int32 [num_documents + 1], on the device, boundaries of the whole pack.

    pack_bounds: the same as Python ints. pack_max_seqlen: longest document, tokens.
    pack_cp_group: the ranks that share the pack, None for CP 1.
    local_positions: int64 [S], position in its document of each token on this rank.
    rotary_rows: rows that a rotary table must have, the same for all packs of a run.
    """

    pack_cu_seqlens: torch.Tensor | None = None
    pack_bounds: tuple[int, ...] = ()
    pack_max_seqlen: int = 0
    pack_cp_group: dist.ProcessGroup | None = None
    local_positions: torch.Tensor | None = None
    rotary_rows: int = 0
    _rotary: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def pack_cp_size(self) -> int:
        return 1 if self.pack_cp_group is None else self.pack_cp_group.size()

    def rotary_at_positions(self, table: torch.Tensor) -> torch.Tensor:
        """Rows of a table [rotary_rows, ...] at this rank's positions: [S, ...].

        Gathered once per pack and table, not once per layer.
        """
        key = (table.data_ptr(), table.shape, table.dtype)
        if key not in self._rotary:
            self._rotary[key] = (table, table[self.local_positions])  # keeps the address taken
        return self._rotary[key][1]


def check_cu_seqlens(cu_seqlens: torch.Tensor, num_tokens: int, max_seqlen: int) -> tuple[int, ...]:
    """The boundaries as Python ints; ValueError unless they are valid for num_tokens tokens.

    int32, from 0 to num_tokens, never decreasing (repeats at the end are allowed), and max_seqlen
    is the largest step.
    """
    if cu_seqlens.dtype != torch.int32:
        raise ValueError(f"cu_seqlens is {cu_seqlens.dtype}; it must be int32")
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0:
        raise ValueError(f"cu_seqlens starts at {bounds[:1]}; it must start at 0")
    if bounds[-1] != num_tokens:
        raise ValueError(f"cu_seqlens ends at {bounds[-1]}; the pack has {num_tokens} tokens")
    steps = [end - start for start, end in pairwise(bounds)]
    if min(steps, default=0) < 0:
        raise ValueError(f"cu_seqlens decreases at entry {steps.index(min(steps)) + 1}")
    if max(steps, default=0) != max_seqlen:
        raise ValueError(
            f"max_seqlen is {max_seqlen}; the longest document has {max(steps, default=0)} tokens"
        )
    return tuple(bounds)
