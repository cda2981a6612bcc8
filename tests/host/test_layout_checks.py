"""Our checks of layouts refuse what the host would refuse, and nothing else."""

import random

import pytest

pytest.importorskip("megatron.training", reason="needs the extra [train]")

from tests.distributed import flags

# One rank's worth of each; a case starts from these and changes up to three of them.
BASE: dict[str, str | None] = {
    "--num-layers": "8",
    "--hidden-size": "48",
    "--num-attention-heads": "12",
    "--ffn-hidden-size": "96",
    "--tensor-model-parallel-size": "2",
    "--pipeline-model-parallel-size": "2",
    "--sequence-parallel": "",
    "--seq-length": "48",
}
DENSE = BASE | {"--group-query-attention": "", "--num-query-groups": "4"}
MOE = BASE | {
    "--num-experts": "12",
    "--moe-router-topk": "2",
    "--moe-ffn-hidden-size": "24",
    "--moe-shared-expert-intermediate-size": "24",
    "--expert-model-parallel-size": "2",
    "--expert-tensor-parallel-size": "1",
    "--moe-layer-freq": "([0]*1+[1]*7)",
}
SIZES = ["1", "2", "3", "4"]
# The host may build such a model; its first forward cannot give every query head a key.
UNTIL_FORWARD = "does not divide --num-attention-heads"
BOTH: dict[str, list[str | None]] = {
    "--num-layers": ["6", "7", "9", "10", "12", None],
    "--hidden-size": ["40", "60", None],
    "--num-attention-heads": ["6", "8", "16"],
    "--kv-channels": ["8"],
    "--ffn-hidden-size": ["64", "90", None],
    "--tensor-model-parallel-size": [*SIZES, "0"],
    "--pipeline-model-parallel-size": [*SIZES, "8", "9"],
    "--decoder-first-pipeline-num-layers": ["0", "1", "2", "3", "4"],
    "--decoder-last-pipeline-num-layers": ["1", "2", "3", "8"],
    "--account-for-embedding-in-pipeline-split": [""],
    "--account-for-loss-in-pipeline-split": [""],
    "--num-layers-per-virtual-pipeline-stage": ["1", "2", "3"],
    "--num-virtual-stages-per-pipeline-rank": ["1", "2", "3"],
    "--pipeline-model-parallel-layout": [
        "Etttt|ttttL",
        "Ett|tt|tt|ttL",
        "Et|ttttttt|L",
        "Ettttttt|L",
        "Etttt|tttt",
        "ttttE|ttttL",
        "Ett|tx|tt|ttL",
    ],
    "--no-overlap-p2p-communication": [""],
    "--overlap-param-gather": [""],
    "--use-distributed-optimizer": [""],
    "--lr-warmup-fraction": ["0.5"],
    "--save": ["somewhere"],
    "--seq-length": [None],
    "--padded-vocab-size": ["255", "256"],
}
ONLY: dict[str, dict[str, list[str | None]]] = {
    "dense": {
        "--num-query-groups": ["1", "2", "3", "5", "12"],
        "--group-query-attention": [None],
        "--expert-model-parallel-size": ["2"],
        "--expert-tensor-parallel-size": ["1", "2", "4"],
    },
    "moe": {
        "--num-experts": ["8", "10", "15"],
        "--moe-ffn-hidden-size": ["20", "25", None],
        "--moe-shared-expert-intermediate-size": ["20", "25", None],
        "--expert-model-parallel-size": ["1", "3", "4", "6"],
        "--expert-tensor-parallel-size": ["2", None],
        "--moe-layer-freq": ["1", "2", "([0]*1+[1]*8)", "([1]*8)"],
        "--moe-router-topk": ["1", "12"],
    },
}


def _cases(kind: str, count: int) -> tuple[list[list[str]], list[int]]:
    """Command lines and world sizes, the same each time."""
    dice = random.Random(kind)
    choices = BOTH | ONLY[kind]
    lines, worlds = [], []
    while len(lines) < count:
        changed = dict(DENSE if kind == "dense" else MOE)
        for flag in dice.sample(sorted(choices), dice.randint(1, 3)):
            changed[flag] = dice.choice(choices[flag])
        tp, pp = (
            int(changed[f"--{name}-model-parallel-size"] or 1) for name in ("tensor", "pipeline")
        )
        ranks = dice.choice([1, 2, 4, 6])
        worlds.append(max(1, tp) * pp * ranks)
        # two micro-batches a stage, so that virtual stages take them
        argv = [*flags.COMMON, "--global-batch-size", str(ranks * pp * 2)]
        argv = [word for word in argv if word != "--hbp-device"]
        argv.remove("cpu")
        for flag, value in changed.items():
            if value is not None:
                argv += [flag, value] if value else [flag]
        lines.append(argv)
    return lines, worlds


@pytest.mark.parametrize(("kind", "count"), [("dense", 200), ("moe", 80)])
def test_the_host_agrees(cluster, kind, count):
    lines, worlds = _cases(kind, count)
    (found,) = cluster.run(
        1, "tests.host.jobs_layout_rules:verdicts", command_lines=lines, world_sizes=worlds
    )
    refused = 0
    for argv, world, verdict in zip(lines, worlds, found, strict=True):
        said = f"{' '.join(argv[len(flags.COMMON) - 2 :])}, {world} GPUs: {verdict}"
        if verdict["ours"] is None or UNTIL_FORWARD not in verdict["ours"]:
            assert (verdict["ours"] is None) == (verdict["host"] is None), said
        if verdict["ours"] is not None:
            refused += 1
            assert verdict["ours"].startswith("--"), said
            assert "\n" not in verdict["ours"], said
            assert ";" in verdict["ours"], said
    assert 0.2 * count <= refused <= 0.8 * count
