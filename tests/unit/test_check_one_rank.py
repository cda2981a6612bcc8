"""What one rank does in one step, as `hbp check --rank` shows it."""

import re

import pytest

from megatron_hbp.check.one_rank import one_rank_document, one_rank_text
from megatron_hbp.check.outcome import conclude
from megatron_hbp.check.sequence import rank_sequence
from tests.unit.check_samples import DEVICE, WORDS, facts, recipe


@pytest.fixture
def found(tmp_path):
    return conclude(recipe(), DEVICE, WORDS, facts(tmp_path))


def test_packs_are_those_of_the_ranks_place(found):
    """Global rank 13 of TP 2, PP 2: the second stage, TP rank 1, place 2 of 4."""
    document = one_rank_document(found, 13, 1)
    assert (document["stage"], document["tp_rank"], document["place"]) == (1, 1, 2)
    assert document["cp_groups"] == {"2": [13, 15]}
    plan = found.plan
    for one in document["microbatches"]:
        index = plan.num_microbatches + one["microbatch"]
        level = plan.levels[plan.microbatch_level[index]]
        assert one["level"] == str(level)
        assert one["cp_group"] == ([13] if level.cp_size == 1 else [13, 15])
        pack = plan.microbatch_offsets[index] + 2 // level.cp_size
        assert one["pack"] == pack
        assert one["sequences"] == plan.pack(pack).tolist()
        assert one["tokens"] == plan.seq_lens[plan.pack(pack)].sum()


def test_ranks_of_a_pack_show_the_same_pack(found):
    level = found.plan.microbatch_level.tolist()
    step = level.index(1) // found.plan.num_microbatches  # the first with a micro-batch on CP 2
    first, second = (one_rank_document(found, rank, step)["microbatches"] for rank in (4, 6))
    shared = [m for m in first if len(m["cp_group"]) == 2]
    assert shared
    assert shared == [m for m in second if len(m["cp_group"]) == 2]


def test_collectives_are_the_sequence(found):
    document = one_rank_document(found, 3, 0)
    issued = rank_sequence(found.plan, found.ranks, found.works, found.traffic, rank=3, step=0)
    assert [tuple(one.values()) for one in document["collectives"]] == issued
    text = one_rank_text(document)
    assert sum(map(int, re.findall(r"(\d+) x [a-z_]+ with", text))) == len(issued)


@pytest.mark.parametrize(
    ("rank", "step", "text"), [(16, 0, "--rank is 16"), (0, 99, "--step is 99")]
)
def test_what_is_not_there(found, rank, step, text):
    with pytest.raises(ValueError, match=text):
        one_rank_document(found, rank, step)


def test_a_run_that_does_not_start_has_no_ranks_to_show(tmp_path):
    nothing = conclude(recipe(), DEVICE, WORDS, facts(tmp_path, arguments={}, stages=[]))
    with pytest.raises(ValueError, match="--rank needs a run"):
        one_rank_document(nothing, 0, 0)
