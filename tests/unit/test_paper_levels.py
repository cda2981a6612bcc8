"""Levels by the HBP paper's Algorithms 1, 3 and 4."""

import dataclasses
import math
import random

import numpy as np
import pytest

from megatron_hbp.cost_model import analytic
from megatron_hbp.hardware import find_device
from megatron_hbp.histogram import LengthHistogram
from megatron_hbp.level import Level
from megatron_hbp.models import find_model
from megatron_hbp.paper_levels import paper_levels
from megatron_hbp.paper_profile import paper_profile
from megatron_hbp.profile import Point, Profile
from megatron_hbp.run_layout import RunLayout

GIB = 2**30
# seconds of 16384 tokens of a rank: the paper's, LLaMA-3.1-8B on 32 H100
PUBLISHED = {
    "8192:2:8": 2.69,
    "16384:1:28": 2.65,
    "32768:2:28": 3.01,
    "32768:4:23": 2.95,
    "32768:8:8": 2.82,
    "32768:16": 3.60,
    "65536:4:28": 3.01,
    "131072:8:28": 3.05,
}


def profile_of(seconds, memory=None, tokens=16384):
    """seconds: level text -> seconds of `tokens` tokens of a rank. memory: level text -> GiB."""
    points = []
    for text, value in seconds.items():
        level = Level.parse(text)
        points.append(
            Point(
                level,
                value * level.tokens_per_rank / tokens,
                memory_bytes=None if memory is None else int(memory[text] * GIB),
            )
        )
    return Profile("llama-3.1-8b", "h100-80gb", RunLayout(num_ranks=32), tuple(points))


def texts(selection):
    return [str(level) for level in selection.levels]


def test_the_published_times_give_the_published_levels():
    found = paper_levels(profile_of(PUBLISHED))
    assert texts(found) == ["16384:1:28", "131072:8:28"]
    assert found.seconds == pytest.approx((2.65, 3.05))
    assert found.equal_tokens == 16384
    assert found.iso_token


def test_a_best_pack_length_with_cp_adds_its_share_on_one_rank():
    """l_best 32768 at CP 2: l_1 is 16384 at CP 1; l_2 = 131072 / 8 < l_best is merged."""
    found = paper_levels(
        profile_of(
            {
                "8192:1": 3.0,
                "16384:1:28": 2.9,
                "32768:2:28": 2.5,
                "32768:4:8": 2.7,
                "65536:4:28": 2.8,
                "131072:8:28": 3.05,
                "131072:16:10": 3.40,
            }
        )
    )
    assert texts(found) == ["16384:1:28", "32768:2:28", "131072:8:28"]
    assert "merged" in "\n".join(found.explanation)


def test_every_step_is_explained():
    lines = "\n".join(paper_levels(profile_of(PUBLISHED)).explanation)
    for text in ("l = 8192:", "32768:8:8 is fastest", "l_best = 16384", "l_max", "l_1 =", "l_2 ="):
        assert text in lines


def test_the_order_of_points_does_not_matter():
    profile = profile_of(PUBLISHED)
    for seed in range(5):
        points = list(profile.points)
        random.Random(seed).shuffle(points)
        shuffled = dataclasses.replace(profile, points=tuple(points))
        assert paper_levels(shuffled) == paper_levels(profile)


def test_times_are_compared_at_equal_tokens():
    """A pack that was half full took its time for half of the tokens."""
    layout = RunLayout(num_ranks=32)
    full = Point(Level(16384, 1), 2.0)
    half = Point(Level(32768, 2), 1.5, tokens=16384, squares=16384.0 * 512)
    found = paper_levels(Profile("llama-3.1-8b", "h100-80gb", layout, (full, half)))
    assert found.seconds == pytest.approx((2.0, 3.0))


@pytest.mark.parametrize(("most", "least", "layers"), [(180, 20, 16), (181, 20, 17), (100, 20, 0)])
def test_recompute_is_what_the_remaining_memory_needs(most, least, layers):
    """answer = c_max - m2 / saved per layer, rounded up; 100 GiB of memory, 0 and 32 layers."""
    profile = profile_of(
        {"16384:1": 2.0, "16384:1:32": 2.64}, {"16384:1": most, "16384:1:32": least}
    )
    found = paper_levels(profile, memory_bytes=100 * GIB)
    saved = (most - least) / 32
    assert layers == max(0, math.ceil(32 - (100 - least) / saved))
    assert texts(found) == [str(Level(16384, 1, layers))]
    # between what was timed, time is linear in the recomputed layers
    assert found.seconds == pytest.approx((2.0 + 0.02 * layers,))


def test_what_does_not_fit_is_left_out():
    seconds = {"16384:1": 2.0, "16384:1:32": 2.5, "32768:2": 2.9, "32768:2:32": 3.0}
    memory = {"16384:1": 300, "16384:1:32": 120, "32768:2": 90, "32768:2:32": 30}
    found = paper_levels(profile_of(seconds, memory), memory_bytes=100 * GIB)
    # 32768:2 is l_best and l_max; its share on one rank is 16384:1, which was measured not to fit
    assert Level(32768, 2) in found.levels
    assert "16384:1: " in "\n".join(found.explanation)
    assert "does not fit, left out" in "\n".join(found.explanation)
    with pytest.raises(ValueError, match=r"no level of the profile .* fits in memory"):
        paper_levels(profile_of(seconds, memory), memory_bytes=10 * GIB)


def test_a_share_that_was_not_measured_takes_the_recompute_of_its_level():
    found = paper_levels(profile_of({"32768:2:28": 2.5, "131072:8:26": 3.0}))
    assert texts(found) == ["16384:1:28", "32768:2:28", "131072:8:26"]
    assert found.seconds[0] is None
    assert "16384:1 was not measured" in "\n".join(found.explanation)


def test_levels_that_no_plan_can_hold_are_told():
    """l_best 8192 at CP 2 puts 4096 tokens on a rank, l_max 131072 at CP 8 puts 16384."""
    found = paper_levels(profile_of({"8192:2": 2.0, "16384:1:28": 2.6, "131072:8:28": 3.0}))
    assert [level.pack_len for level in found.levels] == [4096, 8192, 16384, 131072]
    assert not found.iso_token


def test_full_recompute_is_every_layer_of_the_model():
    points = (
        Point(Level(16384, 1, "full"), 2.7, memory_bytes=60 * GIB),
        Point(Level(16384, 1, 16), 2.4, memory_bytes=90 * GIB),
    )
    layout = RunLayout(num_ranks=32)
    found = paper_levels(Profile("llama-3.1-8b", "h100-80gb", layout, points))
    card = find_device("h100-80gb").memory_bytes
    saved = (90 - 60) * GIB / 16
    assert found.levels[0].recompute_layers == math.ceil(32 - (card - 60 * GIB) / saved)


def test_a_computed_profile_is_chosen_from_as_a_measured_one():
    cost = analytic(find_model("llama-3.1-8b"), find_device("h100-80gb"), RunLayout(num_ranks=32))
    lengths = np.concatenate([np.full(5000, 700), np.arange(9000, 120_000, 500)])
    profile = paper_profile(LengthHistogram(lengths.astype(np.int64)), cost)
    assert max(point.level.pack_len for point in profile.points) == 131072
    found = paper_levels(profile)
    assert found.levels[-1].pack_len == 131072
    for level in found.levels:
        layers = level.recompute_layers
        assert isinstance(layers, int)
        # Algorithm 3 takes memory to be linear in the layers: one more or less than the model says
        least = cost.least_recompute(level.pack_len, level.cp_size)
        assert least is not None
        assert abs(layers - least) <= 2
