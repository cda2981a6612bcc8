"""What a run says about itself equals what is recomputed from the plan and the token losses.

Two steps of three micro-batches at CP 1, 2 and 4 on four ranks: the host's log, TensorBoard, the
files of --hbp-step-log, and the FLOPs that the host counts.
"""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_hbp import cli
from tests.distributed import flags, handmade
from tests.distributed.documents import (
    by_document,
    packs_of_lengths,
    packs_of_step,
    random_packs,
    save_plan,
    target_mask,
)

BUDGET, RANKS, STEPS = 32, 4, 2
CP_SIZES = [1, 2, 4] * STEPS


@pytest.fixture(scope="module")
def run(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("logging")
    lens, packs = packs_of_lengths(random_packs(CP_SIZES, budget=BUDGET, num_ranks=RANKS, seed=7))
    corpus = handmade.random_corpus(folder / "corpus", lens)
    plan = save_plan(
        folder / "plan",
        corpus,
        packs,
        CP_SIZES,
        budget=BUDGET,
        num_ranks=RANKS,
        num_microbatches=3,
    )
    ours = cluster.run(
        RANKS,
        "tests.distributed.jobs_recorded:train",
        argv=[
            *flags.COMMON,
            *flags.SIZE,
            *flags.GQA,
            *["--num-layers", "2", "--seq-length", str(BUDGET)],
            *["--global-batch-size", str(3 * RANKS), "--hbp-plan", str(folder / "plan")],
            *["--tensorboard-dir", str(folder / "board"), "--hbp-step-log", str(folder / "steps")],
        ],
        with_output=True,
    )
    expected = {
        (step, str(plan.levels[level])): _expected(corpus, plan, ours, step, level)
        for step in range(STEPS)
        for level in range(3)
    }
    return SimpleNamespace(folder=folder, plan=plan, ours=ours, expected=expected)


def _expected(corpus, plan, ours, step: int, level: int) -> dict[str, float]:
    """The four numbers of a level and step, in NumPy float64."""
    packs = packs_of_step(plan, step)
    ids = [(pack, int(i)) for pack in packs for i in plan.pack(pack)]
    loss = trained = tokens = 0.0
    squares = dict.fromkeys((p for p in packs if plan.pack_level()[p] == level), 0.0)
    for (pack, i), losses in zip(ids, by_document(ours, plan, step, "losses"), strict=True):
        if pack in squares:
            mask = target_mask(corpus, plan, i)
            loss += float(losses.astype(np.float64) @ mask)
            trained += float(mask.sum())
            tokens += len(losses)
            squares[pack] += float(len(losses)) ** 2
    costs = np.array(list(squares.values()))
    return {
        "loss": loss / trained,
        "trained tokens": trained,
        "padding": 1.0 - tokens / (RANKS * BUDGET),
        "attention balance ratio": (costs.max() - costs).sum() / (costs.max() * len(costs)),
    }


def test_levels_are_uneven_enough(run):
    """The numbers to compare differ between levels and steps, and are not all 0."""
    for name in ("loss", "trained tokens", "padding"):
        assert len({values[name] for values in run.expected.values()}) == 3 * STEPS
    balance = [v["attention balance ratio"] for v in run.expected.values()]
    assert sum(value > 0.05 for value in balance) == 2 * STEPS  # one pack at CP 4 is balanced


def test_log_has_a_line_per_level_and_step(run):
    """Printed by the last rank only, beside the host's own line."""
    pattern = re.compile(r" hbp step (\d+) level (\S+) \| micro-batches: 1 \| (.*)")
    lines = [pattern.match(line) for line in run.ours[-1]["output"].splitlines()]
    found = {}
    for line in filter(None, lines):
        pairs = (part.split(": ") for part in line[3].split(" | "))
        found[int(line[1]) - 1, line[2]] = {name: float(value) for name, value in pairs}
    assert found.keys() == run.expected.keys()
    for key, values in run.expected.items():
        assert found[key] == pytest.approx(values, rel=1e-5, abs=1e-9)
    assert "lm loss" in run.ours[-1]["output"]
    for result in run.ours[:-1]:
        assert "hbp step" not in result["output"]


def test_tensorboard_has_the_same_numbers(run):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    ).EventAccumulator(str(run.folder / "board"))
    accumulator.Reload()
    for (step, level), values in run.expected.items():
        for name, value in values.items():
            events = {e.step: e.value for e in accumulator.Scalars(f"hbp {level} {name}")}
            assert len(events) == STEPS
            assert events[step + 1] == pytest.approx(value, rel=1e-5, abs=1e-7)
    host = {e.step: e.value for e in accumulator.Scalars("lm loss")}
    for step in range(STEPS):
        values = [v for (s, _), v in run.expected.items() if s == step]
        total = sum(v["loss"] * v["trained tokens"] for v in values)
        mean = total / sum(v["trained tokens"] for v in values)
        assert host[step + 1] == pytest.approx(mean, rel=1e-5)


def test_step_log_has_every_micro_batch_of_every_rank(run):
    files = sorted((run.folder / "steps").iterdir())
    assert [f.name for f in files] == [f"rank-{rank:05d}.jsonl" for rank in range(RANKS)]
    for rank, file in enumerate(files):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        name = run.plan.hash()[:12]
        assert lines.pop(0) == {"plan": name, "start": 0, "rank": rank}
        assert [(line["step"], line["rank"]) for line in lines] == [(s, rank) for s in range(STEPS)]
        recorded = iter(run.ours[rank]["microbatches"])
        for line in lines:
            assert (line["plan"], line["iteration"]) == (name, line["step"] + 1)
            assert line["wall_seconds"] > 0.0
            for logged in line["microbatches"]:
                item = next(recorded)
                assert logged["level"] == str(run.plan.levels[item["level"]])
                assert logged["cp_size"] == run.plan.levels[item["level"]].cp_size
                assert logged["loss_sum"] == item["returned"][0]
                assert logged["trained_tokens"] == item["returned"][1]
                assert logged["cpu_seconds"] > 0.0
        assert next(recorded, None) is None


def test_step_log_proves_what_was_trained(run, capsys):
    """Every pack's sequences are logged once, whatever its CP size; `hbp audit` says so."""
    logged = [
        json.loads(line)
        for file in (run.folder / "steps").iterdir()
        for line in file.read_text().splitlines()[1:]
    ]
    ids = [i for line in logged for m in line["microbatches"] for i in m["sequences"]]
    assert sorted(ids) == sorted(run.plan.sequence_ids.tolist())
    argv = ["audit", str(run.folder / "plan"), "--step-log", str(run.folder / "steps")]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert f"good: steps 1 to {STEPS} of {STEPS} trained as planned, 0 restarts; epoch 0: " in out


def test_host_counts_flops_by_document(run):
    """Sum of lengths and of squared lengths of the step's documents, each counted once."""
    for result in run.ours:
        assert len(result["seqlen_stats"]) == STEPS
        for step, (tokens, squares) in enumerate(result["seqlen_stats"]):
            lens = np.concatenate(
                [run.plan.seq_lens[run.plan.pack(p)] for p in packs_of_step(run.plan, step)]
            ).astype(np.float64)
            assert tokens == lens.sum()
            assert squares == (lens**2).sum()
