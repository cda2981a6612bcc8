"""Flags of a GPU job, judged where neither a GPU nor the job's files are, as a start would."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.training", reason="needs the extra [train]")

from megatron_hbp.alignment import alignment
from megatron_hbp.check.facts import Facts, Question
from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan
from tests.distributed import handmade
from tests.host.test_preflight import GPU, LAYOUT, LENS, LEVELS, MODEL


@dataclass(frozen=True)
class Case:
    """more: after the flags of the good run. text: of the problem (empty: there is none). levels:
    whether they are given; plain: without recompute.
    """

    more: str
    text: str = ""
    note: str = ""
    gpus: int = 16
    release: str = "2.8"
    data: str = "--hbp-corpus not-here"
    levels: bool = True
    plain: bool = False


ONE_GPU = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
--num-virtual-stages-per-pipeline-rank 1 --expert-model-parallel-size 1"""
FLEX = "--moe-token-dispatcher-type flex --moe-router-dtype fp32 --moe-flex-dispatcher-backend"
PLAN, OF_LENGTHS = "--hbp-plan {plan}", "--hbp-plan {of_lengths}"
BY_NAME = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model no-such/model"
CASES = {
    # libraries of a GPU
    "DeepEP": Case(f"{FLEX} deepep", note="--moe-flex-dispatcher-backend deepep is only assumed"),
    "HybridEP": Case(f"{FLEX} hybridep", note="backend hybridep is only assumed"),
    "an optimizer of 16 bits": Case("--use-precision-aware-optimizer --exp-avg-dtype bf16"),
    "fused routing": Case("--moe-router-fusion"),
    "fused routing, older": Case(
        "--moe-router-fusion", "2.7 or later, there is 2.6", release="2.6"
    ),
    "fused permutation, older": Case("", "name the cluster's release with --tr", release="2.0"),
    "fused cross entropy": Case("--cross-entropy-loss-fusion --cross-entropy-fusion-impl native"),
    "overlaps": Case("--tp-comm-overlap --overlap-grad-reduce --overlap-param-gather"),
    "selective recompute": Case("--recompute-granularity selective --recompute-modules moe_act"),
    "shared experts beside the others": Case("--moe-shared-expert-overlap"),
    "FP8": Case("--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16"),
    "FP8, older": Case(
        "--fp8-format hybrid --fp8-recipe tensorwise",
        "--fp8-recipe tensorwise needs Transformer Engine 2.2 or later, there is 2.1",
        release="2.1",
    ),
    "offloaded activations": Case(
        "--cpu-offloading-num-layers 1 --pipeline-model-parallel-size 1 "
        "--num-virtual-stages-per-pipeline-rank 1",
        plain=True,
    ),
    # refused only after the flags are parsed and the model's configuration is made
    "16 bits for another optimizer": Case("--exp-avg-dtype bf16", "exp_avg_dtype can only be fp32"),
    "integrity of another format": Case(
        "--verify-integrity --ckpt-format torch", "`verify_integrity` is only supported with"
    ),
    "gradients' buffer for BF16": Case(
        "--reuse-grad-buf-for-mxfp8-param-ag", "Reuse grad buffer only when keeping params in MXFP8"
    ),
    # files that are elsewhere
    "a tokenizer by name": Case(BY_NAME, "the tokenizer cannot be made here: "),
    "a plan whose corpus is elsewhere": Case("", data=PLAN, levels=False),
    "other flags than the plan's": Case(
        "--hbp-epochs 3",
        "--hbp-epochs 3 contradicts the plan",
        data=PLAN,
        levels=False,
    ),
    "a plan without a corpus": Case(
        "",
        "was made from lengths and names no corpus",
        data=OF_LENGTHS,
        levels=False,
    ),
    "a validation corpus elsewhere": Case(
        "--hbp-valid-corpus nor-here --eval-iters 3", note="--hbp-valid-corpus nor-here is not here"
    ),
    "tokens of a validation corpus": Case(
        "--hbp-valid-corpus {corpus} --vocab-size 30 --make-vocab-size-divisible-by 1",
        "the model's vocabulary has 30 rows",
    ),
    # what the last rank would write, and who it would call
    "TensorBoard": Case(f"{ONE_GPU} --tensorboard-dir written", gpus=1),
    "Weights & Biases": Case(f"{ONE_GPU} --wandb-project x --wandb-save-dir written", gpus=1),
}


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    handmade.random_corpus(folder / "corpus", LENS)
    made = {"corpus": str(folder / "corpus"), "written": str(folder / "written")}
    for name, corpus in (
        ("plan", {"corpus_hash": "0" * 64, "corpus_paths": ("/no/such/corpus",)}),
        ("of_lengths", {}),
    ):
        plan = build_plan(
            np.array(LENS),
            (Level(64, 1, 2), Level(128, 2, "full")),
            4,
            4,
            num_stages=2,
            num_virtual_stages=2,
            alignment=alignment((1, 2), tp_size=2, sequence_parallel=True),
            **corpus,
        )
        plan.save(folder / name)
        made[name] = str(folder / name)
    return made


@pytest.fixture(scope="module")
def working(tmp_path_factory) -> Path:
    """The folder that the questions are answered in."""
    return tmp_path_factory.mktemp("working")


@pytest.fixture(scope="module")
def answers(names, working, tmp_path_factory) -> dict[str, Facts]:
    folder = tmp_path_factory.mktemp("questions")
    # on one GPU only the first level has enough ranks
    np.save(folder / "lengths.npy", np.array([n for n in LENS if n <= 64], dtype=np.int32))
    questions = []
    for number, case in enumerate(CASES.values()):
        workspace = folder / str(number)
        workspace.mkdir()
        flags = [*GPU, *MODEL, *LAYOUT, *case.data.format_map(names).split()]
        if case.levels:
            flags += LEVELS if case.gpus > 1 else LEVELS[:2]
        if case.plain:
            flags = [{"64:1:2": "64:1", "128:2:full": "128:2"}.get(word, word) for word in flags]
        asked = Question(
            flags=[*flags, *case.more.format_map(names).split()],
            gpus=case.gpus,
            gpus_per_node=8,
            capability=(9, 0),
            transformer_engine=case.release,
            lengths=str(folder / "lengths.npy"),
            workspace=str(workspace),
        )
        questions.append(asked.save())
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-m", "tests.host.forked_checks", *map(str, questions)],
        check=True,
        timeout=300,
        cwd=working,
        env={"PYTHONPATH": str(root), "PATH": "", "HOME": str(working)},
    )
    found = {}
    for name, question in zip(CASES, questions, strict=True):
        facts = Facts.load(question.parent)
        assert facts is not None, (question.parent / "host.log").read_text()[-2000:]
        found[name] = facts
    return found


@pytest.mark.parametrize("name", CASES)
def test_flags_of_a_gpu_job(answers, name):
    case, facts = CASES[name], answers[name]
    if case.text:
        (problem,) = facts.problems
        assert case.text in problem
        assert ";" in problem, "no way out"
    else:
        assert facts.problems == []
        assert facts.plan is not None
        assert facts.stages != []
    assert case.note in " ".join(facts.notes)


def test_nothing_is_written_where_the_check_runs(answers, working):
    assert len(answers) == len(CASES)
    assert [path.name for path in working.iterdir()] == []
