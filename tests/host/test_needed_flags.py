"""Flags that depend on the GPU: FP8 recipes, and the queue that tensor parallelism relies on."""

import argparse

import pytest

pytest.importorskip("megatron.training", reason="needs the extra [train]")

import torch
from megatron.core import utils
from megatron.training.arguments import add_megatron_arguments
from packaging.version import Version

from megatron_hbp.host.needed_flags import check_flags

NEEDED = "--lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 255".split()
TP = ["--tensor-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def _error(parser, *words, on_cpu=False):
    try:
        check_flags(parser.parse_args([*NEEDED, *words]), on_cpu=on_cpu)
    except ValueError as error:
        return str(error)
    return None


@pytest.fixture
def device(monkeypatch):
    """Sets the capability that the GPUs have."""

    def set_capability(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (major, minor))

    monkeypatch.setattr(utils, "_te_version", Version("2.8.0"))
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    return set_capability


@pytest.mark.parametrize(
    ("capability", "recipes"),
    [
        ((8, 0), ()),
        ((8, 9), ("delayed", "tensorwise")),
        ((9, 0), ("delayed", "tensorwise", "blockwise")),
        ((10, 0), ("delayed", "tensorwise", "blockwise", "mxfp8")),
        ((12, 0), ("delayed", "tensorwise", "blockwise")),
    ],
)
def test_fp8_recipes_of_a_gpu(parser, device, capability, recipes):
    device(*capability)
    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        words = ["--fp8-format", "hybrid", "--fp8-recipe", recipe]
        error = _error(parser, *words)
        assert (error is None) == (recipe in recipes), error
        assert _error(parser, *words, on_cpu=True) is None
        if error is not None:
            assert f"these have {capability[0]}.{capability[1]}; use " in error
            assert error.endswith(" or ".join(recipes) or "--bf16 without --fp8-format")


def test_fp8_recipes_of_a_transformer_engine(parser, device, monkeypatch):
    device(9, 0)
    for release, there in (
        ("2.1.0", ("delayed",)),
        ("2.2.0", ("delayed", "tensorwise")),
        ("2.3.0", ("delayed", "tensorwise", "blockwise")),
    ):
        monkeypatch.setattr(utils, "_te_version", Version(release))
        for recipe in ("delayed", "tensorwise", "blockwise"):
            error = _error(parser, "--fp8-format", "hybrid", "--fp8-recipe", recipe)
            assert (error is None) == (recipe in there)
            if error is not None:
                assert f"or later, there is {release}; use delayed, or a later release" in error


def test_fp4_of_a_gpu(parser, device):
    for capability, there in (((9, 0), False), ((10, 0), True), ((12, 0), True)):
        device(*capability)
        error = _error(parser, "--fp4-format", "e2m1")
        assert (error is None) == there
        if error is not None:
            assert error.startswith("--fp4-format needs GPUs of compute capability 10.0 or later")
    device(9, 0)
    assert _error(parser, "--fp4-format", "e2m1", on_cpu=True) is None


def test_router_fusion_needs_a_transformer_engine_that_has_it(parser, monkeypatch):
    """The host finds out in its first forward."""
    for release, there in (("2.6.0", False), ("2.7.0", True)):
        monkeypatch.setattr(utils, "_te_version", Version(release))
        error = _error(parser, "--moe-router-fusion")
        assert (error is None) == there
        if error is not None:
            assert "needs Transformer Engine 2.7 or later, there is 2.6.0; leave it out" in error


def test_tensor_parallelism_needs_one_connection(parser, device, monkeypatch):
    device(9, 0)
    error = _error(parser, *TP)
    assert error is not None
    assert (
        "needs CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment on these GPUs, it is not set"
        in (error)
    )
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    assert "it is 8; export it before torchrun" in str(_error(parser, *TP))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert _error(parser, *TP) is None


def test_later_gpus_and_one_gpu_do_not(parser, device):
    device(10, 0)
    assert _error(parser, *TP) is None
    device(9, 0)
    assert _error(parser) is None
    assert _error(parser, *TP, on_cpu=True) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--fp8-format hybrid --fp8-param-gather", "--fp8-param-gather needs --use-distributed"),
        ("--min-lr 1", "--min-lr is 1.0, --lr is 0.001; it must be from 0 to that"),
        ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction is 1.5; it must be from 0 to below 1"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 3", "exclude each other; leave one out"),
        ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters; add it"),
        ("--start-weight-decay 0.1", "--start-weight-decay goes not with --weight-decay-incr-st"),
        ("--weight-decay-incr-style linear", "--start-weight-decay must go with"),
        ("--save-interval 5 --save-retain-interval 7", "--save-retain-interval 7 is no multiple"),
        ("--save-retain-interval 7", "is no multiple of --save-interval None"),
        ("--log-memory-interval 150", "is no multiple of --log-interval 100"),
        ("--multi-latent-attention --rope-type rope", "needs --no-rope-fusion; add it"),
        ("--rope-type yarn", "--rope-type yarn needs --multi-latent-attention"),
        ("--recompute-granularity full", "needs --recompute-method and --recompute-num-layers"),
        (
            "--recompute-granularity selective --recompute-method block",
            "--recompute-method does not go with --recompute-granularity selective",
        ),
        (
            "--num-experts 8 --expert-tensor-parallel-size 2",
            "--expert-tensor-parallel-size 2 needs --disable-bias-linear",
        ),
        (
            "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
            "--cross-entropy-fusion-impl te is refused by Megatron-LM as unstable; use native",
        ),
        ("--tp-comm-overlap", "--tp-comm-overlap needs --sequence-parallel; add it"),
        ("--optimizer-cpu-offload", "needs --use-precision-aware-optimizer; add it"),
    ],
)
def test_flags_that_need_or_exclude_each_other(parser, words, message):
    error = _error(parser, *words.split(), on_cpu=True)
    assert error is not None
    assert message in error
    assert ";" in error
