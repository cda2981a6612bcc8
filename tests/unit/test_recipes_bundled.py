"""The recipes of examples/recipes: complete, of the published size, with levels that hbp select
finds. How they are launched: test_launch_scripts.py.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from examples import paper_lengths
from megatron_hbp.cli import main
from megatron_hbp.hardware import find_device
from megatron_hbp.level import Level
from megatron_hbp.model_arguments import model_of
from megatron_hbp.models import MODELS
from megatron_hbp.recipe import read_recipe

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.toml") if path.stem != "sft")
PAGE = (ROOT / "examples" / "README.md").read_text()


@pytest.fixture(params=NAMES)
def recipe(request):
    return read_recipe(RECIPES / f"{request.param}.toml")


def test_the_recipes_that_there_are():
    assert NAMES == [
        "deepseek-v2-128k",
        "deepseek-v2-128k-2048gpus",
        "deepseek-v2-32k",
        "deepseek-v2-lite",
        "llama-3.1-70b",
        "llama-3.1-8b",
        "qwen2.5-32b",
        "qwen2.5-72b",
        "qwen3-30b-a3b",
    ]


def test_a_recipe_is_complete(recipe):
    assert recipe.title != recipe.name
    assert recipe.source.startswith("https://huggingface.co/")
    assert recipe.parameters
    assert recipe.active_parameters
    assert recipe.lengths.is_file()
    assert find_device(recipe.device)
    assert {"save", "load", "pretrained-checkpoint", "hbp-corpus"} <= set(recipe.flags)


def test_the_parameters_are_the_published_ones(recipe):
    model = model_of(recipe.name, recipe.command_line())
    assert model.parameters() == pytest.approx(recipe.parameters, rel=0.005)
    # published without the input embedding, of which a token takes one row, where that is much
    embedding = model.vocab_size * model.hidden_size
    active = model.active_parameters() - (embedding if recipe.name == "deepseek-v2-lite" else 0)
    assert active == pytest.approx(recipe.active_parameters, rel=0.025)


def test_the_shape_is_the_one_known_by_name(recipe):
    model = model_of(recipe.name, recipe.command_line())
    known = MODELS[re.sub("-(32k|128k|128k-2048gpus)$", "", recipe.name)]
    assert model.parameters() == known.parameters()
    assert model.active_parameters() == known.active_parameters()


def test_no_row_of_the_vocabulary_is_padded(recipe):
    multiple = recipe.flags["make-vocab-size-divisible-by"] * _tp(recipe)
    assert recipe.flags["vocab-size"] % multiple == 0


def test_the_levels_and_the_batch_fit_the_ranks(recipe):
    ranks = recipe.gpus // (_tp(recipe) * _stages(recipe))
    assert recipe.flags["global-batch-size"] % ranks == 0
    for text in recipe.flags["hbp-level"]:
        level = Level.parse(text)
        assert level.pack_len == recipe.flags["seq-length"] * level.cp_size
        assert ranks % level.cp_size == 0
    longest = Level.parse(recipe.flags["hbp-level"][-1])
    assert longest.pack_len <= recipe.flags["max-position-embeddings"]


def test_the_levels_are_those_that_its_command_finds(recipe, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)  # the command's paths are the repository's
    words = shlex.split(recipe.select)
    assert words[:2] == ["hbp", "select"]
    assert Path(words[words.index("--lengths") + 1]).resolve() == recipe.lengths.resolve()
    assert main([*words[1:], "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["ours"]["best"]
    assert best["levels"] == recipe.flags["hbp-level"]
    days = ", ".join(f"{found['ours'][kind]['gpu_days']:#.3g}" for kind in ("best", "static"))
    assert f" {days} |" in _row_of(recipe)
    if recipe.lengths.stem == "paper":
        size = f"{found['sequences']:,} sequences, {found['tokens'] / 1e6:.0f} million tokens"
        assert size in PAGE
    ranks = int(words[words.index("--ranks") + 1])
    assert ranks * _tp(recipe) * _stages(recipe) == recipe.gpus
    batch = recipe.flags["global-batch-size"]
    given = f"--seq-length {recipe.flags['seq-length']} --global-batch-size {batch}"
    assert main(words[1:]) == 0
    assert f"run:  {given}\n" in capsys.readouterr().out


def test_the_layout_of_its_command_is_the_recipes(recipe):
    words = shlex.split(recipe.select)

    def number(flag, default=1):
        return int(words[words.index(flag) + 1]) if flag in words else default

    assert number("--tp") == _tp(recipe)
    assert number("--stages") == _stages(recipe)
    assert number("--ep") == recipe.flags.get("expert-model-parallel-size", 1)
    virtual = recipe.flags.get("num-virtual-stages-per-pipeline-rank", 1)
    assert number("--virtual-stages") == virtual
    if "--chunk-layers" in words:
        layers = [int(n) for n in words[words.index("--chunk-layers") + 1].split(",")]
        stages = _stages(recipe)
        assert sum(layers[::stages]) == recipe.flags["decoder-first-pipeline-num-layers"]
        assert sum(layers[stages - 1 :: stages]) == recipe.flags["decoder-last-pipeline-num-layers"]
        assert sum(layers) == recipe.flags["num-layers"]


def test_the_page_names_every_recipe_with_its_levels(recipe):
    row = _row_of(recipe)
    assert " ".join(recipe.flags["hbp-level"]) in row
    assert f"{recipe.gpus:,}" in row


@pytest.mark.parametrize(("name", "longest"), [("paper", 131_072), ("paper-32k", 32_768)])
def test_the_tables_of_lengths_are_what_their_script_makes(name, longest):
    made = paper_lengths.paper_table(longest=longest)
    assert (RECIPES / "lengths" / f"{name}.csv").read_text() == made


def test_the_reserve_is_the_device_with_less_memory():
    reserved = find_device(str(RECIPES / "devices" / "h100-80gb-reserve.json"))
    device = find_device("h100-80gb")
    assert device.memory_bytes - reserved.memory_bytes > 4 * 2**30
    assert reserved.peak_flops == device.peak_flops
    assert reserved.inter_node_bandwidth == device.inter_node_bandwidth


def _row_of(recipe):
    return next(line for line in PAGE.splitlines() if line.startswith(f"| {recipe.name} |"))


def _tp(recipe):
    return recipe.flags.get("tensor-model-parallel-size", 1)


def _stages(recipe):
    return recipe.flags.get("pipeline-model-parallel-size", 1)
