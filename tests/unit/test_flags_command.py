"""`hbp flags`: the words that a launch script passes on."""

import pytest

from megatron_hbp.cli import main

RECIPE = """
title = "small"
[cluster]
gpus = 16
device = "h100-80gb"
[flags]
num-layers = 4
swiglu = true
bf16 = false
tensor-model-parallel-size = 2
pipeline-model-parallel-size = 4
moe-layer-freq = "([0]*1+[1]*3)"
recompute-modules = ["core_attn", "mla_up_proj"]
global-batch-size = 8
hbp-level = ["64:1", "128:2"]
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return str(path)


def _lines(capsys, *argv):
    assert main(["flags", *argv]) == 0
    return capsys.readouterr().out.splitlines()


def _error(capsys, *argv):
    assert main(["flags", *argv]) == 2
    return capsys.readouterr().err


def test_a_word_a_line_in_order(capsys, recipe):
    assert _lines(capsys, recipe) == [
        *("--num-layers", "4", "--swiglu"),
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"),
        *("--moe-layer-freq", "([0]*1+[1]*3)"),
        *("--recompute-modules", "core_attn", "mla_up_proj", "--global-batch-size", "8"),
        *("--hbp-level", "64:1", "--hbp-level", "128:2"),
    ]


def test_flags_after_the_dashes_win(capsys, recipe):
    found = _lines(capsys, recipe, "--", "--hbp-level", "64:1", "--num-layers=6", "--bf16")
    assert found.count("--hbp-level") == 1
    assert found[-4:] == ["--hbp-level", "64:1", "--num-layers=6", "--bf16"]
    assert "--num-layers" not in found


@pytest.mark.parametrize("gpus", [8, 16, 64])
def test_gpus_that_fit(capsys, recipe, gpus):
    assert _lines(capsys, recipe, "--gpus", str(gpus)) == _lines(capsys, recipe)


def test_gpus_that_make_no_whole_ranks(capsys, recipe):
    assert (
        "20 GPUs are no multiple of TP 2 x 4 stages; give --gpus 24, or other sizes after --"
        in _error(capsys, recipe, "--gpus", "20")
    )
    # the sizes may come after the dashes
    assert "16 GPUs are no multiple of TP 8 x 4 stages; give --gpus 32" in _error(
        capsys, recipe, "--", "--tensor-model-parallel-size", "8"
    )


def test_a_global_batch_that_ranks_do_not_divide(capsys, recipe):
    assert (
        "--global-batch-size 8 is no multiple of the 3 ranks that 24 GPUs make; add -- "
        "--global-batch-size 9" in _error(capsys, recipe, "--gpus", "24")
    )
    assert _lines(capsys, recipe, "--gpus", "24", "--", "--global-batch-size=9")


def test_a_word_with_a_line_end(capsys, recipe):
    assert "cannot be a line of its own" in _error(capsys, recipe, "--", "--save", "a\nb")
    assert "cannot be a line of its own" in _error(capsys, recipe, "--", "--save", "")


def test_neither_recipe_nor_flags(capsys):
    assert "neither a RECIPE nor" in _error(capsys)
