"""Nothing that `hbp check` accepts is refused by a real start, and the other way round."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.training", reason="needs the extra [train]")

from megatron_hbp import cli
from megatron_hbp.alignment import alignment
from megatron_hbp.check.facts import Facts, Question
from megatron_hbp.check.outcome import Outcome, conclude
from megatron_hbp.hardware import DEVICES, Device
from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan
from megatron_hbp.recipe import Recipe
from tests.distributed import flags, handmade
from tests.host.broken_variants import BROKEN, GOOD

ALL = BROKEN | GOOD
LENS = [60, 33, 45, 100, 128, *[3 + (11 * i) % 29 for i in range(140)]]
H100 = DEVICES["h100-80gb"]


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict[str, str]:
    """Files that the command lines name."""
    folder = tmp_path_factory.mktemp("variants")
    corpus = handmade.random_corpus(folder / "corpus", LENS)
    made = {"corpus": str(corpus.path), "saved": str(folder / "saved")}
    for name, num_ranks in (("plan", 4), ("plan_of_8_ranks", 8)):
        plan = build_plan(
            corpus.seq_lens,
            (Level(64, 1, 2), Level(128, 2, "full")),
            num_ranks,
            4,
            num_stages=2,
            num_virtual_stages=2,
            alignment=alignment((1, 2), tp_size=2, sequence_parallel=True),
            first_trained=corpus.first_trained,
            corpus_hash=corpus.hash,
            corpus_paths=(str(corpus.path),),
        )
        plan.save(folder / name)
        made[name] = str(folder / name)
    return made


def _recipe(gpus: int, **changes: Any) -> Recipe:
    known: dict[str, Any] = {"title": "small", "device": "h100-80gb", "flags": {}}
    return Recipe(name="small", path=Path("small.toml"), gpus=gpus, **known | changes)


def _checked(
    folder: Path,
    runs: dict[str, tuple[list[str], Recipe]],
    device: Device = H100,
    lengths: str | None = None,
) -> dict[str, Outcome]:
    """What `hbp check` concludes of each command line."""
    questions = []
    for number, (argv, recipe) in enumerate(runs.values()):
        workspace = folder / str(number)
        workspace.mkdir(parents=True)
        capability = int(device.compute_capability), round(10 * device.compute_capability) % 10
        asked = Question(
            flags=argv,
            gpus=recipe.gpus,
            gpus_per_node=recipe.gpus_per_node,
            capability=capability,
            transformer_engine="2.8",
            lengths=lengths,
            workspace=str(workspace),
        )
        questions.append(str(asked.save()))
    subprocess.run(
        [sys.executable, "-m", "tests.host.forked_checks", *questions], check=True, timeout=500
    )
    found = {}
    for question, (name, (argv, recipe)) in zip(questions, runs.items(), strict=True):
        facts = Facts.load(Path(question).parent)
        assert facts is not None, (Path(question).parent / "host.log").read_text()[-2000:]
        found[name] = conclude(recipe, device, argv, facts)
    return found


@pytest.fixture(scope="module")
def checked(names, tmp_path_factory) -> dict[str, Outcome]:
    runs = {n: (v.command_line(names), _recipe(v.gpus)) for n, v in ALL.items()}
    return _checked(tmp_path_factory.mktemp("checked"), runs)


@pytest.fixture(scope="module")
def started(cluster, names) -> dict[str, dict[str, Any]]:
    (results,) = cluster.run(
        1,
        "tests.distributed.jobs_errors:outcomes",
        command_lines=[variant.command_line(names) for variant in ALL.values()],
        environments=[{"RANK": "0", "WORLD_SIZE": str(variant.gpus)} for variant in ALL.values()],
    )
    return dict(zip(ALL, results, strict=True))


def test_there_are_enough_of_them():
    assert len(BROKEN) >= 25
    assert len({variant.pattern for variant in BROKEN.values()}) == len(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_a_start_refuses_it_in_one_line(started, name):
    assert "error" in started[name], started[name]
    error = started[name]["error"].removeprefix("megatron_hbp: error: ")
    assert "\n" not in error
    assert re.match(BROKEN[name].pattern, error), error
    assert ";" in error, "no way out"


@pytest.mark.parametrize("name", BROKEN)
def test_check_refuses_it_with_the_same_words(checked, started, name):
    outcome = checked[name]
    assert not outcome.fits
    error = started[name]["error"].removeprefix("megatron_hbp: error: ")
    assert error in outcome.problems


@pytest.mark.parametrize("name", GOOD)
def test_what_is_good_is_accepted_by_both(checked, started, name):
    assert started[name] == {"starts": True}
    assert checked[name].problems == []


# --- what a start cannot know -------------------------------------------------------------------

# a GPU's flags: 4 ranks of TP 2 x PP 2
GPU = """
--micro-batch-size 1 --dataloader-type external --calculate-per-token-loss --lr 1e-3 --bf16
--tokenizer-type NullTokenizer --vocab-size 255 --normalization RMSNorm
--position-embedding-type rope --swiglu --disable-bias-linear --attention-dropout 0
--hidden-dropout 0 --untie-embeddings-and-output-weights --max-position-embeddings 512
--transformer-impl transformer_engine --use-distributed-optimizer --seq-length 64
--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
--global-batch-size 16 --hbp-corpus not-here --hbp-level 64:1
""".split()
SHORT = [*GPU, *flags.SIZE, *flags.GQA]
SMALL = [*SHORT, "--hbp-level", "128:2"]


@pytest.fixture(scope="module")
def lengths(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("lengths") / "lengths.npy"
    np.save(path, np.array(LENS, dtype=np.int32))
    return str(path)


@pytest.fixture(scope="module")
def only_check(tmp_path_factory, lengths) -> dict[str, Outcome]:
    runs = {
        "good": (SMALL, _recipe(16)),
        "CP across nodes": (SMALL, _recipe(16, gpus_per_node=2)),
        "another model than published": (SMALL, _recipe(16, parameters=8.03e9, source="a card")),
        "few micro-batches": ([*SMALL, "--global-batch-size", "4"], _recipe(16)),
        "MXFP8 on Hopper": (
            [*SMALL, "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
            _recipe(16),
        ),
        "a sequence longer than every level": (
            SHORT,
            _recipe(16),
        ),
    }
    return _checked(tmp_path_factory.mktemp("only"), runs, lengths=lengths)


def test_a_good_run_has_neither_problems_nor_warnings(only_check):
    assert only_check["good"].problems == []
    assert only_check["good"].warnings == []


def test_cp_groups_across_nodes_are_a_warning(only_check):
    outcome = only_check["CP across nodes"]
    assert outcome.problems == []
    assert any("CP" in warning and "node" in warning for warning in outcome.warnings)


def test_another_model_than_published_is_a_problem(only_check):
    (problem,) = only_check["another model than published"].problems
    assert "published are 8.03 B (a card)" in problem


def test_few_micro_batches_are_a_warning(only_check):
    outcome = only_check["few micro-batches"]
    assert outcome.problems == []
    assert any("--global-batch-size" in warning for warning in outcome.warnings)


def test_a_recipe_that_the_gpus_do_not_have_is_a_problem(only_check):
    (problem,) = only_check["MXFP8 on Hopper"].problems
    assert problem.startswith(
        "--fp8-recipe mxfp8 needs GPUs of compute capability 10.0 or later, below 12.0, these have "
        "9.0; use delayed or tensorwise or blockwise"
    )


def test_an_overlong_sequence_is_a_problem(only_check):
    (problem,) = only_check["a sequence longer than every level"].problems
    assert "over-long" in problem
    assert "--hbp-overlong" in problem


def test_too_little_memory_is_a_problem(only_check):
    """The same facts on smaller GPUs."""
    good = only_check["good"]
    small = replace(H100, memory_bytes=3 * 2**30)
    outcome = conclude(_recipe(16), small, SMALL, good.facts)
    assert len(outcome.problems) == 2  # one a level
    for level, problem in zip(("64:1", "128:2"), outcome.problems, strict=True):
        assert problem.startswith(f"level {level} needs 3.0 GiB on a GPU of stage ")
        assert "use more GPUs for a replica" in problem


def test_the_command_answers_by_its_exit_code(names, capsys):
    argv = BROKEN["TP 0"].command_line(names)
    words = ["check", "--gpus", "16", "--device", "h100-80gb", "--", *argv]
    assert cli.main(words) == 1
    assert "--tensor-model-parallel-size is 0" in capsys.readouterr().out
