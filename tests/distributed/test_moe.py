"""MoE: auxiliary losses are right under TP, CP, padding and partly trained tokens; idle experts.

"Auxiliary alone": the main loss is multiplied by zero, so that what reaches the routers is the
gradient of their own losses.
"""

from itertools import count, pairwise

import numpy as np
import pytest
import torch

from megatron_hbp.corpus import write_corpus
from tests.distributed import flags, handmade
from tests.distributed.layouts import RATE_ZERO, Layout

COEFFICIENT, TOP_K, NUM_EXPERTS = 0.01, 2, 8
ROUTED_LAYERS = (2, 3, 4)
AUX = [*flags.MLA, *flags.moe("aux_loss", COEFFICIENT), *RATE_ZERO, "--clip-grad", "1e9"]
Z_LOSS = ["--moe-z-loss-coeff", "1e-2"]
DOCUMENTS = (40, 24, 11, 53)  # tokens; the first two, and the last two, fill a rank's 64


def documents(trained: float = 0.6) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, mask) of each; the tokens do not depend on `trained`."""
    rng = np.random.default_rng(5)
    made = []
    for length in DOCUMENTS:
        tokens, draws = rng.integers(0, handmade.VOCAB, length), rng.random(length)
        mask = (draws < trained).astype(np.uint8)
        mask[-1] = 1
        made.append((tokens, mask))
    return made


@pytest.fixture(scope="module")
def train(bench, cluster):
    """Trains on micro-batches given as (CP size, packs of places in DOCUMENTS)."""
    numbers = count()

    def run(layout: Layout, microbatches: list, model: list[str], trained: float = 0.6, **job):
        folder = bench.folder / f"moe-{next(numbers)}"
        pool = documents(trained)
        packs = [pack for _, packs in microbatches for pack in packs]
        corpus = write_corpus(
            folder / "corpus",
            (pool[document] for pack in packs for document in pack),
            vocab_size=handmade.VOCAB,
            end_id=0,
            info={"made_by": "test"},
        )
        ends = np.cumsum([0, *map(len, packs)])
        handmade.plan_over_slots(
            corpus,
            [list(range(a, b)) for a, b in pairwise(ends)],
            [cp for cp, _ in microbatches],
            budget=layout.budget,
            num_ranks=layout.num_ranks,
            num_microbatches=layout.num_microbatches,
            tp_size=layout.tp_size,
        ).save(folder / "plan")
        argv = [*flags.COMMON, *flags.SIZE, *layout.flags(), *model, "--hbp-plan"]
        return cluster.run(
            layout.world_size,
            "tests.distributed.jobs_moe:train",
            argv=[*argv, str(folder / "plan")],
            **job,
        )

    return run


def router_gradients(ranks: list[dict], step: int) -> dict[int, torch.Tensor]:
    """Of each layer's router; ranks that hold the same router must agree."""
    found: dict[int, torch.Tensor] = {}
    for rank in ranks:
        for layer, gradient in rank["router_gradients"][step].items():
            assert torch.equal(found.setdefault(layer, gradient), gradient)
    assert tuple(sorted(found)) == ROUTED_LAYERS
    return found


def assert_close(some: dict[int, torch.Tensor], others: dict[int, torch.Tensor]) -> None:
    """To 1e-5 of the largest entry."""
    for layer, expected in others.items():
        largest = float(expected.abs().max())
        assert largest > 1e-7, "no gradient: nothing is compared"
        assert float((some[layer] - expected).abs().max()) <= 1e-5 * largest


def auxiliary_gradient(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of coefficient x the load-balancing loss over real tokens [T, H], by hand in float64."""
    weight = weight.double().requires_grad_()
    scores = torch.softmax(inputs.double() @ weight.T, dim=-1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOP_K, dim=1).indices, 1.0)
    share_of_tokens = chosen.sum(dim=0) / (len(inputs) * TOP_K)
    loss = COEFFICIENT * NUM_EXPERTS * (share_of_tokens * scores.mean(dim=0)).sum()
    return torch.autograd.grad(loss, weight)[0]


FULL, SHARED = [[0, 1], [2, 3]], [[0, 1, 2, 3]]
PARTLY = [[0], [3]]  # 24 and 11 of each rank's 64 tokens are padding
STEPS = [(1, FULL), (2, SHARED), (1, [[0, 1], [2]]), (2, [[0, 1, 2]]), (1, PARTLY)]


@pytest.fixture(scope="module")
def two_ranks(train, start):
    return train(Layout(2, num_microbatches=1), STEPS, [*AUX, *start])


def test_br_g05_auxiliary_gradient_does_not_depend_on_cp(two_ranks):
    assert_close(router_gradients(two_ranks, 1), router_gradients(two_ranks, 0))
    assert_close(router_gradients(two_ranks, 3), router_gradients(two_ranks, 2))  # padded


@pytest.mark.parametrize("pp_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_br_g05_auxiliary_gradient_does_not_depend_on_tp(train, start, two_ranks, pp_size):
    """Also with padding, whose mask the host scatters over TP ranks on the first stage only."""
    layout = Layout(2, tp_size=2, pp_size=pp_size, num_microbatches=1)
    ranks = train(layout, STEPS, [*AUX, *start])
    for step in range(len(STEPS)):
        assert_close(router_gradients(ranks, step), router_gradients(two_ranks, step))


def test_br_g05_auxiliary_gradient_of_one_and_of_four_equal_microbatches(train, start, two_ranks):
    layout = Layout(2, num_microbatches=4)
    ranks = train(layout, [(1, FULL), (2, SHARED), (2, SHARED), (1, FULL)], [*AUX, *start])
    assert_close(router_gradients(ranks, 0), router_gradients(two_ranks, 0))


def test_auxiliary_gradient_is_the_token_weighted_mean_over_ranks(two_ranks):
    """The last router hears of no later one: its gradient is that of its own loss, by hand."""
    layer = ROUTED_LAYERS[-1]
    for step in range(len(STEPS)):
        total, expected = 0, torch.zeros(NUM_EXPERTS, 64, dtype=torch.float64)
        for rank in two_ranks:
            own = [(x, mask) for place, x, mask in rank["router_inputs"] if place == layer]
            inputs, mask = own[step]
            real = inputs.reshape(-1, 64)[~mask.reshape(-1)]
            expected += len(real) * auxiliary_gradient(real, rank["router_weights"][layer])
            total += len(real)
        assert total == sum(DOCUMENTS[d] for pack in STEPS[step][1] for d in pack)
        assert_close({layer: router_gradients(two_ranks, step)[layer]}, {layer: expected / total})


def test_auxiliary_gradient_does_not_depend_on_the_share_of_trained_tokens(train):
    layout, steps = Layout(2), [(1, FULL), (2, [[0, 1, 2]])]
    model = [*AUX, *Z_LOSS]
    everything = train(layout, steps, model, trained=1.0)
    quarter = train(layout, steps, model, trained=0.25)
    shares = [sum(sum(r["trained"]) for r in run) / (128 + 75) for run in (everything, quarter)]
    assert shares[0] > 0.95
    assert shares[1] < 0.35
    assert_close(router_gradients(quarter, 0), router_gradients(everything, 0))


def test_br_g06_the_hosts_local_count_is_the_groups(cluster):
    """Why host/router.py counts anew. Fails when the host is repaired: then delete the repair."""
    answers = cluster.run(2, "tests.distributed.jobs_moe:local_token_counts")
    assert [a["total"] for a in answers] == [8, 8]
    assert [a["local"] for a in answers] == [8, 8], (
        "the host counts 3 and 5 now: delete the repair in PaddedRouter._apply_aux_loss"
    )


def test_br_h03_padding_does_not_count(train, start):
    """40 tokens in a pack of 64 and in one of 40: expert counts, losses, gradients are equal."""
    model = [*AUX, *Z_LOSS, *start]
    padded, exact = (
        train(Layout(1, num_microbatches=1, budget=budget), [(1, [[0]])], model)
        for budget in (64, 40)
    )
    assert padded[0]["expert_counts"] == exact[0]["expert_counts"]
    assert [sum(counts) for _, counts in padded[0]["expert_counts"]] == [40 * TOP_K] * 3
    names = [name for name, _, _ in exact[0]["metrics"]]
    assert sorted(names) == ["load_balancing_loss"] * 3 + ["z_loss"] * 3
    for have, expected in zip(padded[0]["metrics"], exact[0]["metrics"], strict=True):
        assert have[:2] == expected[:2]
        np.testing.assert_allclose(have[2], expected[2], rtol=1e-5)
    assert_close(router_gradients(padded, 0), router_gradients(exact, 0))


def test_br_h03_padding_does_not_move_the_expert_bias(train):
    bias = ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
    model = [*flags.MLA, *flags.moe(), *RATE_ZERO, *bias]
    (rank,) = train(Layout(1, num_microbatches=1), [(1, [[0]])], model, loss_scale=1.0)
    assert rank["bias_counts"] == dict(rank["expert_counts"])
    assert [sum(counts) for counts in rank["bias_counts"].values()] == [40 * TOP_K] * 3


def test_br_h05_experts_without_tokens_have_zero_gradients(train):
    """EP 4, all 24 tokens of each rank to expert 0: the step ends, every parameter's hook ran."""
    model = [*flags.MLA, *flags.moe(), "--num-experts", "4"]
    model += ["--moe-router-topk", "1", "--moe-router-pre-softmax", "--overlap-grad-reduce"]
    layout = Layout(4, ep_size=4, num_microbatches=1, budget=24)
    ranks = train(
        layout,
        [(1, [[1]] * 4)],
        model,
        loss_scale=1.0,
        expert_zero_only=True,
        timeout=60,
    )
    for place, rank in enumerate(ranks):
        assert [counts for _, counts in rank["expert_counts"]] == [[24, 0, 0, 0]] * 3
        gradients = rank["expert_gradients"]
        assert len(gradients) == 3 * 2  # two matrices in each of three layers
        for gradient in gradients.values():
            assert gradient is not None
            assert bool(gradient.any()) == (place == 0)
