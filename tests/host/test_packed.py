"""What travels with a pack: its boundaries are valid, its rotary rows are gathered once."""

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the extra [train]")

from megatron_hbp.dataset import HbpDataset, pack_layout
from megatron_hbp.host.packed import HbpPackedSeqParams, check_cu_seqlens
from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan
from tests.unit.memory_corpus import random_memory_corpus


def _int32(values):
    return torch.tensor(values, dtype=torch.int32)


def test_br_d06_valid_boundaries_are_accepted():
    check_cu_seqlens(_int32([0, 16, 40]), 40, 24)
    check_cu_seqlens(_int32([0, 16, 40, 40, 40]), 40, 24)
    check_cu_seqlens(_int32([0, 40]), 40, 40)


@pytest.mark.parametrize(
    ("cu_seqlens", "max_seqlen", "message"),
    [
        (_int32([1, 16, 40]), 24, r"cu_seqlens starts at \[1\]; it must start at 0"),
        (_int32([]), 24, r"cu_seqlens starts at \[\]; it must start at 0"),
        (_int32([0, 16, 39]), 24, "cu_seqlens ends at 39; the pack has 40 tokens"),
        (_int32([0, 20, 16, 40]), 24, "cu_seqlens decreases at entry 2"),
        (torch.tensor([0, 16, 40]), 24, "cu_seqlens is torch.int64; it must be int32"),
        (_int32([0, 16, 40]), 20, "max_seqlen is 20; the longest document has 24 tokens"),
        (_int32([0, 16, 40]), 40, "max_seqlen is 40; the longest document has 24 tokens"),
    ],
)
def test_br_d06_invalid_boundaries_have_each_their_message(cu_seqlens, max_seqlen, message):
    with pytest.raises(ValueError, match=message):
        check_cu_seqlens(cu_seqlens, 40, max_seqlen)


def test_br_d04_boundaries_have_no_fill_entries():
    """[0, 16, 40] stays three entries: nothing is stored at a fixed size, so nothing is trimmed."""
    assert pack_layout(np.array([16, 24]), 40).cu_seqlens.tolist() == [0, 16, 40]
    assert pack_layout(np.array([16, 20]), 40).cu_seqlens.tolist() == [0, 16, 36, 40]


def test_boundaries_of_every_item_are_valid():
    corpus = random_memory_corpus([2 + 13 * i % 120 for i in range(80)])
    levels = (Level(32, 1), Level(64, 2), Level(128, 4))
    plan = build_plan(corpus.seq_lens, levels, 4, num_microbatches=2)
    for rank in range(4):
        dataset = HbpDataset(plan, corpus, rank)
        for item in (dataset[m] for m in range(len(dataset))):
            check_cu_seqlens(
                item["cu_seqlens"], plan.levels[item["level"]].pack_len, item["max_seqlen"]
            )


def test_rotary_rows_are_gathered_once_per_pack_and_table():
    """Every layer gets the same tensor; another table, another dtype or another pack its own."""
    positions = torch.tensor([0, 1, 2, 0, 1])
    pack = HbpPackedSeqParams(local_positions=positions)
    table = torch.arange(24.0).reshape(8, 1, 1, 3)
    rows = pack.rotary_at_positions(table)
    torch.testing.assert_close(rows, table[positions])
    assert pack.rotary_at_positions(table) is rows
    assert pack.rotary_at_positions(table.clone()) is not rows
    assert pack.rotary_at_positions(table.double()).dtype == torch.float64
    other = HbpPackedSeqParams(local_positions=torch.tensor([4, 0]))
    torch.testing.assert_close(other.rotary_at_positions(table), table[[4, 0]])


def test_a_freed_table_is_not_mistaken_for_a_new_one():
    """The pack keeps the table whose address it knows, so that no other can come to lie there."""
    pack = HbpPackedSeqParams(local_positions=torch.tensor([1, 0]))
    for value in range(50):
        table = torch.full((4, 2), float(value))
        assert pack.rotary_at_positions(table).eq(value).all()
        del table


def test_the_host_sees_one_document_without_cp():
    pack = HbpPackedSeqParams(qkv_format="thd", cu_seqlens_q=_int32([0, 8]), max_seqlen_q=64)
    assert pack.pack_cp_size == 1
    assert getattr(pack, "local_cp_size", None) is None
    assert pack.cp_group is None
