"""What commands are told of a run: a recipe, flags after --, or both."""

import argparse

import pytest

from megatron_hbp import cli
from megatron_hbp.commands.recipe import add_machine, add_run, given_run

RECIPE = """
title = "One"
[cluster]
gpus = 8
device = "h100-80gb"
[flags]
lr = 1e-5
swiglu = true
hbp-level = ["64:1", "128:2"]
"""


@pytest.fixture
def given(tmp_path):
    (tmp_path / "one.toml").write_text(RECIPE)

    def parse(*words, flags=()):
        parser = argparse.ArgumentParser()
        add_run(parser)
        add_machine(parser)
        namespace = parser.parse_args([w.format(recipe=tmp_path / "one.toml") for w in words])
        namespace.flags = list(flags)
        return given_run(namespace)

    return parse


def test_flags_after_the_dashes_win(given):
    found = given("{recipe}", flags=["--lr", "2e-5", "--hbp-level", "256:4"])
    assert found.words == ["--swiglu", "--lr", "2e-5", "--hbp-level", "256:4"]


def test_the_cluster_can_be_another(given):
    found = given("{recipe}", "--gpus", "16", "--device", "a100-80gb", "--gpus-per-node", "4")
    assert (found.recipe.gpus, found.recipe.device) == (16, "a100-80gb")
    assert found.recipe.gpus_per_node == 4


def test_flags_alone(given):
    found = given("--gpus", "4", "--device", "h100-80gb", flags=["--lr", "1"])
    assert found.words == ["--lr", "1"]
    assert found.recipe.gpus == 4


@pytest.mark.parametrize(
    ("words", "flags", "text"),
    [
        ([], [], "neither a RECIPE nor"),
        ([], ["--lr", "1"], "--gpus is missing"),
        (["--gpus", "0"], ["--lr", "1"], "--gpus is 0"),
        (["{recipe}", "--gpus", "-1"], [], "--gpus is -1"),
        (["{recipe}", "--gpus-per-node", "0"], [], "--gpus-per-node is 0"),
        (["{recipe}"], ["lr", "1"], "'lr' after -- is no flag"),
        (["nowhere.toml"], [], "recipe nowhere.toml is no file"),
    ],
)
def test_wrong_use(given, words, flags, text):
    with pytest.raises(ValueError, match=text):
        given(*words, flags=flags)


def test_commands_without_a_run_take_no_flags_after_the_dashes(capsys):
    assert cli.main(["audit", "plan", "--", "--lr", "1"]) == 2
    assert "takes no flags after --: --lr 1" in capsys.readouterr().err
