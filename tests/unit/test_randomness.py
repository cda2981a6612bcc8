"""Random words are those of splitmix64; seeds made of different keys are unrelated."""

import numpy as np
import pytest

from megatron_hbp.randomness import mix_seed, permutation, random_words
from tests import reference


def test_words_are_those_of_splitmix64():
    """The test vector that comes with other implementations of splitmix64."""
    assert random_words(1234567, 5).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1, reference.MASK - reference.GOLDEN])
def test_words_equal_the_reference(seed):
    random = reference.Random(seed)
    words = random_words(seed, 1000)
    assert words.dtype == np.uint64
    assert words.tolist() == [random.next() for _ in range(1000)]
    assert random_words(seed, 3).tolist() == words[:3].tolist()
    assert random_words(seed, 0).tolist() == []


def test_bits_are_fair():
    words = random_words(mix_seed(1), 100_000)
    for bit in range(64):
        ones = int(((words >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - 50_000) < 5 * 158  # five standard deviations


def test_one_seed_of_several_keys():
    keys = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (2**64 + 7,), (1, 2**64 - 1)]
    seeds = [mix_seed(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert mix_seed(1234, 5) == mix_seed(1234, 5)
    # never to change: plans depend on it
    assert mix_seed(0) == reference.mix(reference.GOLDEN)
    assert mix_seed(3, 4) == reference.mix((mix_seed(3) ^ 4) + reference.GOLDEN & reference.MASK)


def test_seeds_of_neighbouring_keys_are_unrelated():
    seeds = np.array(
        [[mix_seed(run, epoch) for epoch in range(40)] for run in range(40)], dtype=np.uint64
    )
    assert len(np.unique(seeds)) == seeds.size
    for one, other in ((seeds[1:], seeds[:-1]), (seeds[:, 1:], seeds[:, :-1])):
        differing = np.bitwise_count(one ^ other)
        assert abs(differing.mean() - 32) < 0.6  # of 64 bits; the standard deviation is 0.1


def test_a_permutation_holds_each_number_once():
    for num in (0, 1, 2, 1000):
        order = permutation(7, num)
        assert sorted(order.tolist()) == list(range(num))
        assert order.tolist() == permutation(7, num).tolist()
    assert permutation(7, 1000).tolist() != permutation(8, 1000).tolist()
    firsts = np.bincount([permutation(mix_seed(seed), 4)[0] for seed in range(4000)])
    assert (abs(firsts - 1000) < 5 * 28).all()
