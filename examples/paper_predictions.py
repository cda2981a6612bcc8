"""What the paper's tables do not decide: our own optimum, other clusters.

Printed by paper_tables.py. Every figure here is a prediction; ASSUMPTIONS lists what it rests on.
"""

from dataclasses import replace

import numpy as np

from megatron_hbp.baselines import next_fit, plan_placement, single_level
from megatron_hbp.cost_model import CostModel, analytic, fitted
from megatron_hbp.hardware import find_device
from megatron_hbp.level import Level
from megatron_hbp.models import find_model
from megatron_hbp.planner import build_plan
from megatron_hbp.profile import Profile
from megatron_hbp.run_layout import RunLayout
from megatron_hbp.select import Candidates, Prediction, best_levels
from megatron_hbp.simulate import simulate

NUM_RANKS = 32
TOKENS_PER_STEP = 16384 * NUM_RANKS  # of the paper's iterations
PUBLISHED_SPEEDUPS = {"h100-80gb": 1.40, "a100-80gb": 1.38}
# DeepSeek-V2 on 256 H100 at 32K: 57.1 and 23.8 GPU days
DEEPSEEK_SPEEDUP = 57.1 / 23.8
DEEPSEEK_LAYOUT = RunLayout(num_ranks=16, num_stages=16, ep_size=8, num_microbatches=16)
DEEPSEEK_LONGEST = 32768
DEEPSEEK_TOKENS_PER_STEP = 4 * 2**20

ASSUMPTIONS = (
    "own optimum: the cost model fitted to the published times, whose packs are taken to have held "
    "samples of up to 16384 tokens; attention at its analytic speed, memory analytic; steps of "
    f"{TOKENS_PER_STEP} tokens as in the paper; both rows simulated from real plans, the reduction "
    "added although published times may hold it",
    "8B on H100 and A100: analytic cost model, data sheet peaks and the efficiencies of "
    "hardware.py, the paper's two levels with the least recompute that fits, one micro-batch "
    "a step",
    "DeepSeek-V2: analytic cost model; TP 1, 16 stages, EP 8 and 16 ranks (the paper does not "
    "publish its layout), steps of 4M tokens, the samples of up to 32768 tokens; MLA exchanges 128 "
    "full heads of q, k and v, CP between nodes; before: packs of 32K in random order at the CP "
    "size that is fastest, which is a better start than one that a user would guess",
)


def own_optimum(lengths: np.ndarray, profile: Profile) -> tuple[float, float, tuple[Level, ...]]:
    """Seconds of a pass with the paper's levels, and with ours; ours.

    lengths: int64 [n]. profile: the published times, with the lengths of their packs.
    """
    cost, _ = fitted(profile)
    paper = (Level(16384, 1, 28), Level(131072, 8, 28))
    candidates = Candidates(tokens_per_step=TOKENS_PER_STEP)
    ours = best_levels(lengths, cost, candidates).best
    plans = [
        (build_plan(lengths, levels, NUM_RANKS, micro), _with_microbatches(cost, micro))
        for levels, micro in ((paper, 1), (ours.levels, _microbatches(ours)))
    ]
    seconds = [simulate(plan, with_micro).total_seconds for plan, with_micro in plans]
    return seconds[0], seconds[1], ours.levels


def dense_speedup(lengths: np.ndarray, device: str) -> float:
    """ISF at 128K over HBP, LLaMA-3.1-8B on 32 of the devices."""
    layout = RunLayout(num_ranks=NUM_RANKS)
    cost = analytic(find_model("llama-3.1-8b"), find_device(device), layout)
    levels = []
    for pack_len, cp_size in ((16384, 1), (131072, 8)):
        recompute = cost.least_recompute(pack_len, cp_size)
        levels.append(Level(pack_len, cp_size, "full" if recompute is None else recompute))
    isf = simulate(single_level(lengths, levels[-1], NUM_RANKS), cost, levels[-1:])
    hbp = simulate(plan_placement(build_plan(lengths, levels, NUM_RANKS)), cost, levels)
    return isf.total_seconds / hbp.total_seconds


def deepseek(lengths: np.ndarray) -> tuple[float, Prediction, Prediction]:
    """DeepSeek-V2 on 256 H100 at 32K: static packing over ours, simulated; static packing, ours."""
    cost = analytic(find_model("deepseek-v2"), find_device("h100-80gb"), DEEPSEEK_LAYOUT)
    kept = lengths[lengths <= DEEPSEEK_LONGEST]
    found = best_levels(kept, cost, Candidates(tokens_per_step=DEEPSEEK_TOKENS_PER_STEP))
    static, best = found.static, found.best
    assert static is not None  # 32K fits with every layer recomputed
    ranks, stages = DEEPSEEK_LAYOUT.num_ranks, DEEPSEEK_LAYOUT.num_stages
    micro = [_microbatches(one) for one in (static, best)]
    unbalanced = next_fit(kept, static.levels[0], ranks, micro[0], order="random")
    plan = build_plan(kept, best.levels, ranks, micro[1], stages)
    before = simulate(unbalanced, _with_microbatches(cost, micro[0]), static.levels)
    after = simulate(plan, _with_microbatches(cost, micro[1]))
    return before.total_seconds / after.total_seconds, static, best


def predictions_text(lengths: np.ndarray, profile: Profile, hbp_days: float) -> str:
    """All of it in words. hbp_days: predicted GPU days of the paper's levels and balance."""
    paper, ours, levels = own_optimum(lengths, profile)
    lines = [
        "our own optimum on the same times: " + " ".join(map(str, levels)),
        f"  {100 * (1 - ours / paper):.1f} % less time than the paper's levels: "
        f"{hbp_days * ours / paper:.2f} GPU days instead of {hbp_days:.2f}",
        "  the cost model fitted to the published times:",
        *(f"    {line}" for line in fitted(profile)[1].lines()),
        "other clusters, ISF or static packing over HBP:",
    ]
    for device, published in PUBLISHED_SPEEDUPS.items():
        speedup = dense_speedup(lengths, device)
        lines.append(f"  8B on 32 {device}: {speedup:.2f}x (paper {published:.2f}x)")
    speedup, static, best = deepseek(lengths)
    lines.append(
        f"  DeepSeek-V2 on 256 h100-80gb, 32K: {speedup:.2f}x (paper "
        f"{DEEPSEEK_SPEEDUP:.1f}x), {_texts(static)} -> {_texts(best)}"
    )
    return "\n".join([*lines, "assumptions:", *(f"  {text}" for text in ASSUMPTIONS)])


def _texts(prediction: Prediction) -> str:
    return " ".join(map(str, prediction.levels))


def _microbatches(prediction: Prediction) -> int:
    rank_tokens = prediction.tokens_per_step // prediction.num_ranks
    return rank_tokens // prediction.levels[0].tokens_per_rank


def _with_microbatches(cost: CostModel, num_microbatches: int) -> CostModel:
    return replace(cost, layout=replace(cost.layout, num_microbatches=num_microbatches))
