"""Plans a run from lengths alone: python -m examples.plan_only

No GPU, no torch, no Megatron. 100,000 short and 200 long samples, 32 ranks: short packs of 16K
on one rank each, long ones of 128K on eight.
"""

import numpy as np

from megatron_hbp import Level, build_plan

RANKS = 32


def make_lengths() -> np.ndarray:
    """int64 [100200], tokens: most samples are short, a few are very long."""
    rng = np.random.default_rng(0)
    short = np.clip(np.rint(rng.lognormal(np.log(350), 1.1, 100_000)), 8, 16384)
    long = rng.integers(32768, 131072, 200)
    return rng.permutation(np.concatenate([short, long]).astype(np.int64))


def main() -> None:
    """Prints what HBP makes of the lengths, beside packing everything at 128K."""
    seq_lens = make_lengths()
    plans = {
        "HBP": build_plan(seq_lens, [Level(16384, 1), Level(131072, 8)], RANKS),
        "128K only": build_plan(seq_lens, [Level(131072, 8)], RANKS),
    }
    for name, plan in plans.items():
        assert plan.audit(seq_lens) == []
        counts, metrics = plan.counts(), plan.metrics()
        print(f"{name}: {counts['sequences_kept']} sequences in {counts['packs']} packs, ", end="")
        print(f"{counts['steps']} steps")
        for metric in ("padding_ratio", "attention_balance_ratio", "communication_ratio"):
            print(
                f"  {metric:24} {metrics[metric]:.4f} (at least {metrics[metric + '_bound']:.4f})"
            )
    first = plans["HBP"].pack(0)
    print(f"the first pack holds sequences {first[:5].tolist()}... ({len(first)} of them),")
    print(f"{int(seq_lens[first].sum())} tokens")


if __name__ == "__main__":
    main()
