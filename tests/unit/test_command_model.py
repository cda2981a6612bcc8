"""The flags of model, device, layout and profile: where each value comes from, and wrong use."""

import argparse

import numpy as np
import pytest

from megatron_hbp import Level, build_plan
from megatron_hbp.commands.model import add_model, given_model, names_model
from megatron_hbp.cost_model import analytic
from megatron_hbp.hardware import find_device
from megatron_hbp.models import find_model
from megatron_hbp.profile import Point, Profile
from megatron_hbp.run_layout import RunLayout

NAMED = ["--model", "llama-3.1-8b", "--device", "h100-80gb"]


def _given(*words, plan=None):
    parser = argparse.ArgumentParser()
    add_model(parser, from_plan=plan is not None)
    return given_model(parser.parse_args([str(word) for word in words]), plan)


def _error(*words, plan=None):
    with pytest.raises(ValueError, match=r"\S") as caught:
        _given(*words, plan=plan)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def plan():
    return build_plan(
        np.full(200, 100), [Level(128, 1), Level(512, 4)], 8, 4, 2, num_virtual_stages=2
    )


@pytest.fixture
def profile(tmp_path):
    """Measured at TP 2 on 16 ranks: twice what the model says."""
    layout = RunLayout(num_ranks=16, tp_size=2, distributed_optimizer=False)
    cost = analytic(find_model("llama-3.1-8b"), find_device("h100-80gb"), layout)
    points = []
    for level in (Level(8192, 1), Level(16384, 1), Level(16384, 1, 16), Level(131072, 8)):
        for count in (1, 4, 32):
            length = level.pack_len // count
            sums = count, length * count, length**2 * count
            seconds = cost.pack_seconds(level, *(np.array([value]) for value in sums)).total[0]
            points.append(Point(level, 2 * float(seconds), sums[1], float(sums[2]), count))
    path = tmp_path / "profile.json"
    Profile("llama-3.1-8b", "h100-80gb", layout, tuple(points)).save(path)
    return path


def test_names_and_defaults():
    given = _given(*NAMED, "--ranks", 32)
    assert given.cost.model.name == "llama-3.1-8b"
    assert given.cost.device.name == "h100-80gb"
    assert given.cost.layout == RunLayout(num_ranks=32)
    assert given.profile is None
    assert given.fit is None


def test_every_flag_arrives():
    words = "--ranks 8 --microbatches 4 --tp 2 --stages 2 --virtual-stages 2 --ep 4 --expert-tp 2"
    words = ["--model", "deepseek-v2", "--device", "h200-141gb", *words.split()]
    assert _given(*words).cost.layout == RunLayout(
        num_ranks=8,
        num_microbatches=4,
        tp_size=2,
        num_stages=2,
        num_virtual_stages=2,
        ep_size=4,
        expert_tp_size=2,
    )


def test_layers_of_each_chunk(plan):
    words = [*NAMED, "--ranks", 4, "--stages", 3, "--chunk-layers"]
    assert _given(*words, "12,12,8").cost.layout.chunk_layers == (12, 12, 8)
    # the plan's stages: 2, with 2 virtual ones
    layout = _given(*NAMED, "--chunk-layers", "9,9,9,5", plan=plan).cost.layout
    assert layout.chunk_layers == (9, 9, 9, 5)
    assert "chunk_layers 12,12,12 add up to 36, the model has 32 layers" in _error(
        *words, "12,12,12"
    )
    assert "has 2 numbers for 3 stages" in _error(*words, "16,16")
    for wrong in ("16,a,8", "", "16;8;8", "-1,20,13"):
        assert f"--chunk-layers is {wrong!r}; give whole numbers" in _error(
            *words[:-1], f"--chunk-layers={wrong}"
        )


def test_files_of_arguments_and_devices(tmp_path):
    model = tmp_path / "tiny.sh"
    model.write_text(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 "
        "--vocab-size 1000 --swiglu --untie-embeddings-and-output-weights\n"
    )
    given = _given("--model", model, "--device", "h100-80gb", "--ranks", 2)
    assert given.cost.model.num_layers == 2
    assert given.cost.model.hidden_size == 64


def test_the_plan_decides_the_layout(plan):
    wanted = RunLayout(
        num_ranks=8, num_microbatches=4, num_stages=2, num_virtual_stages=2, tp_size=4
    )
    assert _given(*NAMED, "--tp", 4, plan=plan).cost.layout == wanted
    same = "--tp 4 --ranks 8 --microbatches 4 --stages 2 --virtual-stages 2".split()
    assert _given(*NAMED, *same, plan=plan).cost.layout == wanted
    for flag, value, planned in (
        ("--ranks", 16, 8),
        ("--microbatches", 2, 4),
        ("--stages", 1, 2),
        ("--virtual-stages", 1, 2),
    ):
        message = f"{flag} is {value}, the plan has {planned}; leave the flag out, or plan again"
        assert _error(*NAMED, flag, value, plan=plan).startswith(message)


def test_a_profile_is_fitted(profile):
    given = _given("--profile", profile)
    assert given.cost.layout.num_ranks == 16
    assert given.cost.layout.tp_size == 2
    assert not given.cost.layout.distributed_optimizer
    assert given.profile is not None
    assert given.fit is not None
    assert given.fit.worst < 1e-6
    # other ranks and micro-batches take the same time per pack
    other = _given("--profile", profile, *NAMED, "--ranks", 64, "--microbatches", 3)
    assert (other.cost.layout.num_ranks, other.cost.layout.num_microbatches) == (64, 3)
    pack = np.array([4]), np.array([16384]), np.array([4096**2 * 4])
    twice = other.cost.pack_seconds(Level(16384, 1), *pack).total
    once = _given(*NAMED, "--tp", 2, "--ranks", 64).cost.pack_seconds(Level(16384, 1), *pack).total
    assert twice == pytest.approx(2 * once)


def test_a_profile_of_something_else(profile, tmp_path):
    message = _error("--profile", profile, "--model", "llama-3.1-70b")
    assert "measured for model 'llama-3.1-8b', not 'llama-3.1-70b'" in message
    message = _error("--profile", profile, "--device", "a100-80gb")
    assert "measured for device 'h100-80gb', not 'a100-80gb'" in message
    assert "tp_size 2, not 4" in _error("--profile", profile, "--tp", 4)
    assert "num_stages 1, not 2" in _error("--profile", profile, "--stages", 2)
    assert "there is no profile" in _error("--profile", tmp_path / "none.json")
    for level, name, said in (
        (Level(98304, 6), "llama-3.1-8b", "point of level 98304:6: model 'llama-3.1-8b'"),
        (Level(8192, 1), "gpt-99", "model 'gpt-99' is neither a known name"),
    ):
        path = tmp_path / "bad.json"
        point = Point(level, 1.0, 8192, 8192.0**2 / 4, 4)
        Profile(name, "h100-80gb", RunLayout(num_ranks=6), (point,)).save(path)
        assert _error("--profile", path).startswith(f"profile {path}: {said}")


def test_wrong_use():
    ranks = "--ranks", 8
    assert "known: llama-3.1-8b, llama-3.1-70b" in _error("--model", "x", *NAMED[2:], *ranks)
    assert "known: a100-80gb, h100-80gb" in _error(*NAMED[:2], "--device", "x", *ranks)
    assert _error(*NAMED[:2], *ranks).startswith("--device is missing; give one of a100-80gb, ")
    assert _error(*NAMED[2:], *ranks).startswith("--model is missing; give one of llama-3.1-8b, ")
    assert _error(*NAMED) == "--ranks is missing; give the world size / (TP x PP)"
    assert _error(*NAMED, *ranks, "--tp", 0) == "--tp is 0; it must be at least 1"
    assert _error(*NAMED, "--ranks", -1) == "--ranks is -1; it must be at least 1"
    assert "TP 3 does not divide the 32 attention heads" in _error(*NAMED, *ranks, "--tp", 3)
    assert "has no experts, but EP is 2" in _error(*NAMED, *ranks, "--ep", 2)


def test_whether_a_model_is_named():
    parser = argparse.ArgumentParser()
    add_model(parser, from_plan=True)
    assert not names_model(parser.parse_args([]))
    assert not names_model(parser.parse_args(["--tp", "2"]))
    assert names_model(parser.parse_args(["--device", "h100-80gb"]))
    assert names_model(parser.parse_args(["--profile", "p.json"]))
