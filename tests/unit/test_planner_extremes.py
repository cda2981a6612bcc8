"""build_plan at the edges: huge lengths, capacity 1, few sequences, memory."""

import subprocess
import sys

import numpy as np
import pytest

from megatron_hbp import Level, build_plan
from megatron_hbp.alignment import Alignment


def test_lengths_near_two_to_the_31():
    longest = 2**31 - 1
    lens = np.array([longest, longest - 1, 1, 5, longest // 2], dtype=np.int64)
    plan = build_plan(lens, [Level(longest, 1)], 1)
    assert plan.audit(lens) == []
    assert plan.counts()["tokens_kept"] == lens.sum()
    assert plan.metrics()["attention_balance_ratio"] == 0.0
    with pytest.raises(ValueError, match="sequence 0 has 2147483648 tokens"):
        build_plan(np.array([2**31]), [Level(longest, 1)], 1)
    with pytest.raises(ValueError, match="level 2147483648:1 is longer than 2147483647 tokens"):
        build_plan(lens, [Level(2**31, 1)], 1)


def test_capacity_one():
    lens = np.ones(10, dtype=np.int32)
    plan = build_plan(lens, [Level(1, 1), Level(4, 4)], 4)
    assert plan.audit(lens) == []
    assert plan.counts()["filler_packs"] == 2


def test_more_ranks_than_packs():
    lens = np.array([3, 4, 5])
    plan = build_plan(lens, [Level(8, 1), Level(16, 2)], 64, 2)
    assert plan.audit(lens) == []
    assert plan.num_steps == 1
    assert plan.counts()["filler_packs"] == plan.num_packs - 3


def test_virtual_stages_need_whole_groups_of_micro_batches():
    lens = np.full(100, 4)
    with pytest.raises(ValueError, match="6 micro-batches are no multiple of 4 pipeline"):
        build_plan(lens, [Level(8, 1)], 2, 6, 4, num_virtual_stages=2)
    plan = build_plan(lens, [Level(8, 1)], 2, 8, 4, num_virtual_stages=2)
    assert (plan.num_virtual_stages, plan.num_microbatches) == (2, 8)


def test_br_i07_fillers_make_whole_groups_of_micro_batches():
    """5 micro-batches of packs for 2 stages of 2 chunks: 6 run, the sixth of flagged fillers."""
    plan = build_plan(np.full(5, 8), [Level(8, 1)], 1, 6, 2, num_virtual_stages=2)
    assert (plan.num_steps, plan.num_microbatches) == (1, 6)
    assert plan.counts()["filler_packs"] == 1
    assert plan.audit(np.full(5, 8)) == []


def test_br_a18_multiples_apply_to_the_length_that_runs():
    # a document runs at its stored length: its last position has no loss, and stays in the row
    aligned = Alignment(1, (8,))
    lens = np.array([16, 17])
    assert build_plan(lens, [Level(40, 1)], 1, alignment=aligned).num_packs == 1  # 16 + 24
    assert build_plan(lens, [Level(39, 1)], 1, alignment=aligned).num_packs == 2
    levels, aligned = [Level(150007, 1)], Alignment(1, (16,))
    plan = build_plan(np.array([150000]), levels, 1, alignment=aligned)
    assert plan.seq_lens.tolist() == [150000]  # whole, its last label is the true last token
    with pytest.raises(ValueError, match="150001 tokens, but the longest level holds 150000"):
        build_plan(np.array([150001]), levels, 1, alignment=aligned)


MEMORY = """
import numpy as np
from pathlib import Path
from megatron_hbp import Level, build_plan
rng = np.random.default_rng(0)
lens = np.clip(np.rint(rng.lognormal(6.0, 1.2, 1_000_000)), 1, 131072).astype(np.int64)
levels = [Level(16384 * cp, cp) for cp in (1, 2, 4, 8)]
def status(name):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if name in x)
    return int(line.split()[1]) * 1024
build_plan(lens[:50_000], levels, 32)
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
plan = build_plan(lens, levels, 32)
arrays = (plan.sequence_ids, plan.pack_offsets, plan.microbatch_offsets, plan.microbatch_level)
print(status("VmHWM") - before, sum(a.nbytes for a in arrays), len(plan.audit(lens)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_br_l01_l03_a_million_sequences_need_little_memory():
    """1M log-normal lengths, 4 levels; times are in docs/benchmarks.md, tests have no clock."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    peak, plan_bytes, num_problems = map(int, done.stdout.split())
    assert num_problems == 0
    assert peak < 200e6 / 4
    assert plan_bytes <= 24 * 1_000_000
