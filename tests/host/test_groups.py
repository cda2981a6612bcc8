"""CP groups by arithmetic, for more ranks than could be started, and once on real ranks."""

import pytest

pytest.importorskip("megatron.core", reason="needs the extra [train]")

from megatron.core import parallel_state

from megatron_hbp.host.groups import CpGroups, cp_offsets
from tests.distributed import flags, handmade
from tests.distributed.documents import packs_of_lengths, save_plan


def _divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


@pytest.mark.parametrize("num_ranks", [6, 8, 12, 64, 2048])
def test_groups_of_one_size_are_consecutive_and_cover_the_ranks(num_ranks):
    for size in _divisors(num_ranks):
        groups = cp_offsets(num_ranks, size)
        assert len(groups) == num_ranks // size
        assert all(len(group) == size for group in groups)
        assert [rank for group in groups for rank in group] == list(range(num_ranks))


def test_members_of_small_domains():
    assert cp_offsets(6, 3) == [range(0, 3), range(3, 6)]
    assert cp_offsets(8, 2) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert cp_offsets(12, 4) == [range(0, 4), range(4, 8), range(8, 12)]


@pytest.mark.parametrize(("num_ranks", "size"), [(6, 4), (8, 3), (12, 8), (64, 48), (2048, 3)])
def test_sizes_that_do_not_divide_the_ranks_are_refused(num_ranks, size):
    with pytest.raises(ValueError, match=f"CP size {size} does not divide {num_ranks} ranks"):
        cp_offsets(num_ranks, size)


class _Recorder:
    """Stands in for the host's create_group: remembers what each rank makes, in order."""

    def __init__(self):
        self.made = []

    def __call__(self, ranks, timeout, use_local_synchronization, group_desc):
        assert use_local_synchronization
        assert timeout is None
        self.made.append(tuple(ranks))
        return self.made[-1]


@pytest.mark.parametrize("num_ranks", [6, 8, 12, 64, 2048])
def test_br_i11_one_group_per_size_and_offset_in_the_same_order(num_ranks, monkeypatch):
    """Every rank makes one group per size above 1, smallest first, whatever order it is told.

    domain: every second global rank, as with TP 2. Two ranks that share two groups meet in them in
    the same order, so nobody waits for a group that the other makes later.
    """
    domain = list(range(1, 2 * num_ranks, 2))
    sizes = _divisors(num_ranks)
    distinct = set()
    for rank in range(num_ranks):
        recorder = _Recorder()
        monkeypatch.setattr(parallel_state, "create_group", recorder)
        groups = CpGroups(domain, rank, [*reversed(sizes), *sizes])
        assert groups[1] is None
        assert [len(made) for made in recorder.made] == sizes[1:]
        for made in recorder.made:
            assert domain[rank] in made
            assert made[0] == domain[rank // len(made) * len(made)]
            assert list(made) == list(range(made[0], made[0] + 2 * len(made), 2))
            assert groups[len(made)] == made
        distinct |= set(recorder.made)
    assert len(distinct) == sum(num_ranks // size for size in sizes[1:])


def test_cp_groups_wait_as_long_as_the_hosts(cluster, tmp_path):
    lens, packs = packs_of_lengths([[40, 20]])
    corpus = handmade.random_corpus(tmp_path / "corpus", lens)
    save_plan(tmp_path / "plan", corpus, packs, [2], budget=32, num_ranks=2, num_microbatches=1)
    argv = [*flags.COMMON, *flags.SIZE, "--seq-length", "32", "--global-batch-size", "2"]
    argv += ["--hbp-plan", str(tmp_path / "plan"), "--distributed-timeout-minutes", "7"]
    for found in cluster.run(2, "tests.distributed.jobs_groups:timeouts", argv=argv):
        assert found["HBP_CP_GROUP_2"] == found["DATA_PARALLEL_GROUP_WITH_CP"] == 7


def test_groups_on_four_ranks(cluster):
    """Real process groups: members and this rank's place, for sizes 2 and 4."""
    for rank, members in enumerate(cluster.run(4, "tests.distributed.jobs_groups:members")):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert members == {1: None, 2: (pair, rank % 2), 4: ([0, 1, 2, 3], rank)}
