"""Within a layout, the CP size of a pack changes nothing: loss, trained tokens, gradient norm.

The same tokens lie on the same ranks under every CP schedule, so even the bits are equal. Two kinds
of proof: runs of 4 optimizer steps against a CP 1 run; and single runs at learning rate 0 whose
steps hold the same tokens under another CP size each.
"""

import numpy as np
import pytest

from tests.distributed import flags
from tests.distributed.layouts import (
    RATE_ZERO,
    Layout,
    assert_same,
    assert_steps_same,
    cp_sizes_seen,
    schedule,
)

MOE_RANKS = Layout(4, ep_size=2)
MLA_MOE = [*flags.MLA, *flags.moe()]
EIGHT_HEADS = ["--num-attention-heads", "8"]
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


@pytest.mark.parametrize(
    "kind", [pytest.param("2", marks=pytest.mark.slow), "4", "step", "microbatch"]
)
def test_br_f03_mla_and_moe_train_the_same_under_any_cp_schedule(bench, kind):
    reference = bench.run(MOE_RANKS, "1", MLA_MOE)
    run = bench.run(MOE_RANKS, kind, MLA_MOE)
    assert cp_sizes_seen(reference) == {1}
    assert cp_sizes_seen(run) == set(schedule(kind, MOE_RANKS, 4))
    assert_same(run, reference)
    # the four steps are four: training moves, or equal losses would mean nothing
    assert len(set(run.losses)) == len(set(run.gradient_norms)) == 4


@pytest.fixture(scope="module")
def eight_ranks(bench):
    """Steps: dp8, dp4cp2, dp2cp4, dp1cp8, and two levels in one step."""
    return bench.run(
        Layout(8),
        "1,1,2,2,4,4,8,8,1,4",
        [*MLA_MOE, *EIGHT_HEADS, *RATE_ZERO],
        num_steps=5,
        same_tokens=True,
    )


def test_br_g02_gradient_norm_does_not_depend_on_the_split_into_dp_and_cp(eight_ranks):
    assert cp_sizes_seen(eight_ranks) == {1, 2, 4, 8}
    assert_steps_same(eight_ranks)


def test_br_i11_one_group_per_size_and_offset_made_in_one_order(eight_ranks):
    made = [rank["groups"] for rank in eight_ranks.ranks]
    expected = {
        (f"HBP_CP_GROUP_{size}", tuple(range(start, start + size)))
        for size in (2, 4, 8)
        for start in range(0, 8, size)
    }
    assert {(name, tuple(members)) for rank in made for name, members in rank} == expected
    assert len(expected) <= 8 + 4 + 2 + 1
    for place, rank in enumerate(made):
        assert [name for name, _ in rank] == [f"HBP_CP_GROUP_{size}" for size in (2, 4, 8)]
        assert all(place in members for _, members in rank)
    # attention ran in exactly those groups
    for place, rank in enumerate(eight_ranks.ranks):
        used = {tuple(visit["members"]) for visit in rank["visits"]} - {()}
        assert used == {tuple(members) for _, members in made[place]}


KINDS = {
    "gqa": flags.GQA,
    "mha": [],
    "fewer-kv-heads-than-cp": [*EIGHT_HEADS, *flags.GQA],
    "mla": flags.MLA,
}
# a repeated key/value head sums the gradients of its copies after the all-to-all, not in attention
SUMMED_IN_ANOTHER_ORDER = {"fewer-kv-heads-than-cp"}


@pytest.mark.parametrize("name", KINDS)
def test_attention_of_every_kind(bench, name):
    run = bench.run(
        Layout(4), "1,1,2,2,4,4,1,4,2,1", [*KINDS[name], *RATE_ZERO], num_steps=5, same_tokens=True
    )
    assert cp_sizes_seen(run) == {1, 2, 4}
    assert_steps_same(run, bits=name not in SUMMED_IN_ANOTHER_ORDER)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "mha", "fewer-kv-heads-than-cp"])
def test_attention_of_every_kind_over_four_steps(bench, name):
    reference = bench.run(Layout(4), "1", KINDS[name])
    for kind in ("microbatch", "step"):
        run = bench.run(Layout(4), kind, KINDS[name])
        assert_same(run, reference, bits=name not in SUMMED_IN_ANOTHER_ORDER)


def test_distributed_optimizer_with_overlapped_communication(bench):
    reference = bench.run(MOE_RANKS, "1", [*MLA_MOE, *DISTRIBUTED])
    assert_same(bench.run(MOE_RANKS, "microbatch", [*MLA_MOE, *DISTRIBUTED]), reference)
    plain = bench.run(MOE_RANKS, "1", MLA_MOE)
    np.testing.assert_allclose(reference.losses, plain.losses, rtol=1e-6)
    np.testing.assert_allclose(reference.gradient_norms, plain.gradient_norms, rtol=1e-5)


def test_auxiliary_and_z_loss(bench):
    """They are functions of a rank's own tokens: equal under every schedule, and really there."""
    model = [*flags.MLA, *flags.moe("aux_loss", 0.1), "--moe-z-loss-coeff", "1e-2"]
    reference = bench.run(MOE_RANKS, "1", model)
    assert_same(bench.run(MOE_RANKS, "microbatch", model), reference)
    without = bench.run(MOE_RANKS, "1", MLA_MOE)
    assert reference.losses[0] == without.losses[0]  # the host reports the main loss alone
    assert abs(reference.gradient_norms[0] / without.gradient_norms[0] - 1) > 1e-4
