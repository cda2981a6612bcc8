"""hbp select: levels ready to paste, every error one line."""

import json

import numpy as np
import pytest

from megatron_hbp.cli import main
from megatron_hbp.level import Level
from megatron_hbp.profile import Point, Profile
from megatron_hbp.run_layout import RunLayout
from tests.unit.selection_cases import mixture
from tests.unit.test_paper_levels import PUBLISHED

RUN = "--model llama-3.1-8b --device h100-80gb --ranks 16".split()


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "lengths.npy"
    np.save(path, mixture(0, 20000, 60, 65536))
    return str(path)


def select(*flags):
    return main(["select", *flags])


def document(capsys, *flags):
    assert select(*flags, "--json") == 0
    return json.loads(capsys.readouterr().out)


def error(capsys, *flags):
    assert select(*flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_the_flags_printed_make_a_plan_as_predicted(lengths, capsys, tmp_path):
    assert select("--lengths", lengths, *RUN, "--microbatches", "2") == 0
    text = capsys.readouterr().out
    assert "static packing" in text
    flags = text.split("plan: ")[1].splitlines()[0].split()
    run_flags = text.split("run:  ")[1].split()
    output = str(tmp_path / "plan")
    assert main(["plan", "--lengths", lengths, *flags, "--output", output]) == 0
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert plan["num_microbatches"] == 2
    assert run_flags == [
        "--seq-length",
        str(Level.parse(plan["levels"][0]).tokens_per_rank),
        "--global-batch-size",
        "32",
    ]
    capsys.readouterr()
    best = document(capsys, "--lengths", lengths, *RUN, "--microbatches", "2")["ours"]["best"]
    assert best["levels"] == plan["levels"]
    assert abs(best["num_steps"] - plan["counts"]["steps"]) <= 1


def test_flags_of_pipelines_and_tensor_parallelism_are_passed_on(lengths, capsys):
    model = "--model llama-3.1-70b --device h100-80gb --ranks 8".split()
    layout = "--tp 4 --stages 4 --virtual-stages 2 --microbatches 8 --fp8-recipe delayed".split()
    assert select("--lengths", lengths, *model, *layout) == 0
    flags = capsys.readouterr().out.split("plan: ")[1].splitlines()[0]
    for part in ("--stages 4", "--virtual-stages 2", "--tp 4", "--sequence-parallel", "--fp8-rec"):
        assert part in flags
    assert main(["plan", "--lengths", lengths, *flags.split()]) == 0
    capsys.readouterr()
    found = document(capsys, "--lengths", lengths, *model, *layout)
    assert found["ours"]["best"]["plan_flags"] == flags


def test_memory_is_shown_against_the_card(lengths, capsys):
    found = document(capsys, "--lengths", lengths, *RUN)
    for name in ("best", "static"):
        one = found["ours"][name]
        assert len(one["memory_gib"]) == len(one["levels"])
        assert 0 < max(one["memory_gib"]) <= found["device_gib"]
    assert found["ours"]["best"]["gpu_days"] < found["ours"]["static"]["gpu_days"]
    assert select("--lengths", lengths, *RUN) == 0
    assert "h100-80gb has 79.1" in capsys.readouterr().out


def test_explain_says_where_time_goes_and_why_others_lost(lengths, capsys):
    assert select("--lengths", lengths, *RUN, "--method", "both", "--explain") == 0
    text = capsys.readouterr().out
    for part in ("seconds of an epoch", "l_best =", "why the others lost:"):
        assert part in text
    rejected = document(capsys, "--lengths", lengths, *RUN)["ours"]["rejected"]
    assert len(rejected) > 40
    for one in rejected:
        assert f"{one['subject']}: {one['reason']}" in text


def test_paper_levels_from_a_measured_profile(lengths, capsys, tmp_path):
    points = tuple(
        Point(Level.parse(text), seconds, tokens=level.pack_len, squares=level.pack_len * 3000.0)
        for text, seconds, level in (
            (text, value * Level.parse(text).tokens_per_rank / 16384, Level.parse(text))
            for text, value in PUBLISHED.items()
        )
    )
    path = tmp_path / "profile.json"
    Profile("llama-3.1-8b", "h100-80gb", RunLayout(num_ranks=32), points).save(path)
    flags = ("--lengths", lengths, "--profile", str(path))
    paper = document(capsys, *flags, "--method", "both")
    assert paper["paper"]["levels"] == ["16384:1:28", "131072:8:28"]
    assert paper["fit"]
    assert paper["paper"]["prediction"]["seconds"] >= paper["ours"]["best"]["seconds"] * 0.99
    assert select(*flags, "--method", "paper") == 0
    assert "--level 16384:1:28 --level 131072:8:28 --ranks 32" in capsys.readouterr().out
    assert "not 'llama-3.1-70b'" in error(capsys, *flags, "--model", "llama-3.1-70b")
    other = json.loads(path.read_text()) | {"format_version": 7}
    path.write_text(json.dumps(other))
    assert "format version 7 is not 1" in error(capsys, *flags)


def test_paper_levels_that_no_plan_can_hold_are_said_to_be(lengths, capsys):
    flags = ("--lengths", lengths, *RUN, "--method", "paper")
    paper = document(capsys, *flags)
    budgets = {Level.parse(text).tokens_per_rank for text in paper["paper"]["levels"]}
    assert (paper["paper"]["problem"] is None) == (len(budgets) == 1)
    assert select(*flags) == 0
    assert ("cannot be planned" in capsys.readouterr().out) == (len(budgets) > 1)


def test_given_candidates_are_kept_to(lengths, capsys):
    flags = "--token-budget 8192 --token-budget 16384 --cp 1 --cp 8".split()
    best = document(capsys, "--lengths", lengths, *RUN, *flags)["ours"]["best"]
    assert best["seq_length"] in (8192, 16384)
    assert {Level.parse(text).cp_size for text in best["levels"]} <= {1, 8}


def test_steps_of_given_tokens(lengths, capsys):
    flags = ("--lengths", lengths, *RUN, "--tokens-per-step", str(2**20))
    best = document(capsys, *flags)["ours"]["best"]
    assert best["tokens_per_step"] == pytest.approx(2**20, rel=0.2)
    assert best["microbatches_per_step"] * best["seq_length"] * 16 == best["tokens_per_step"]
    assert "leave --microbatches out" in error(capsys, *flags, "--microbatches", "2")


def test_steps_of_given_tokens_with_virtual_stages(lengths, capsys):
    flags = "--stages 2 --virtual-stages 2 --tokens-per-step 2097152".split()
    best = document(capsys, "--lengths", lengths, *RUN, *flags)["ours"]["best"]
    assert best["tokens_per_step"] == pytest.approx(2**21, rel=0.2)
    assert best["microbatches_per_step"] % 2 == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "llama-9", *RUN[2:]), "known: llama-3.1-8b"),
        ((*RUN[:2], "--device", "gtx-1080", "--ranks", "8"), "known: a100-80gb"),
        (RUN[:4], "--ranks is missing"),
        ((*RUN, "--cp", "3"), "no CP size is left"),
        ((*RUN, "--token-budget", "256"), "the smallest S that would do is"),
        ((*RUN, "--token-budget", "2000000"), "no candidate fits in memory"),
        ((*RUN, "--token-budget", "0"), "token_budgets is [0]"),
        (("--model", "llama-3.1-70b", *RUN[2:]), "no candidate fits in memory"),
        ((*RUN, "--fp8-recipe", "int3"), "unknown"),
        ((*RUN, "--tokens-per-step", "0"), "tokens_per_step is 0"),
    ],
)
def test_what_cannot_be_is_one_line(lengths, capsys, flags, said):
    assert said in error(capsys, "--lengths", lengths, *flags)


def test_empty_lengths_are_an_error(capsys, tmp_path):
    path = tmp_path / "none.npy"
    np.save(path, np.array([], dtype=np.int64))
    assert "none of the 0 sequences has a token" in error(capsys, "--lengths", str(path), *RUN)
    assert "one of the arguments" in error(capsys, *RUN)
