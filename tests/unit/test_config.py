"""Flags: the list is pinned, each has help, each error names the value, the rule and a way out."""

import argparse
import re

import pytest

from megatron_hbp.config import (
    PLAN_DEFAULTS,
    HbpConfig,
    add_arguments,
    config_from_args,
    field_docs,
    flag_name,
    given_names,
)
from megatron_hbp.level import Level

FLAGS = {
    "--hbp-plan",
    "--hbp-corpus",
    "--hbp-source-weight",
    "--hbp-level",
    "--hbp-epochs",
    "--hbp-curriculum-steps",
    "--hbp-max-mixing",
    "--hbp-mixing",
    "--hbp-overlong",
    "--hbp-packer",
    "--hbp-seed",
    "--hbp-plan-cache",
    "--hbp-plan-timeout",
    "--hbp-valid-corpus",
    "--hbp-loss-normalizer",
    "--hbp-cp-backend",
    "--hbp-device",
    "--hbp-step-log",
}


def _parse(*flags):
    return config_from_args(add_arguments(argparse.ArgumentParser()).parse_args(flags))


def test_flag_list_is_pinned():
    parser = add_arguments(argparse.ArgumentParser(add_help=False))
    assert {flag for action in parser._actions for flag in action.option_strings} == FLAGS


def test_every_flag_has_help_with_its_default():
    docs = field_docs(HbpConfig)
    assert {flag_name(name) for name in docs} == FLAGS
    for name, text in docs.items():
        assert len(text) > 20, name
        assert text.isascii()
        assert "\n" not in text
    for name, value in PLAN_DEFAULTS.items():
        assert f"default {value}" in docs[name]


def test_help_text_prints():
    parser = add_arguments(argparse.ArgumentParser())
    text = parser.format_help()
    assert "hierarchical balance packing" in text
    assert "PACK_LEN:CP[:RECOMPUTE]" in text
    assert "seconds (default 3600)" in " ".join(text.split())


def test_nothing_given_is_off():
    config = _parse()
    assert config == HbpConfig()
    assert not config.enabled
    assert given_names(config) == []


def test_values_arrive():
    config = _parse(
        "--hbp-corpus", "data", "--hbp-level", "16:1", "--hbp-level", "64:4:full", "--hbp-seed", "7"
    )
    assert config.enabled
    assert config.level == (Level(16, 1), Level(64, 4, "full"))
    assert given_names(config) == ["corpus", "level", "seed"]
    assert config.corpus == ("data",)
    assert _parse().level == ()  # the list of one parser does not leak into the next
    assert _parse().corpus == ()


def test_corpora_and_weights_arrive_in_order():
    corpora = ["--hbp-corpus", "b", "--hbp-corpus", "a", "--hbp-level", "16:1"]
    config = _parse(*corpora, "--hbp-source-weight", "2", "--hbp-source-weight", "0.5")
    assert config.corpus == ("b", "a")
    assert config.source_weight == (2.0, 0.5)
    assert given_names(config) == ["corpus", "source_weight", "level"]
    assert _parse(*corpora).source_weight is None


def test_plan_alone_is_enough():
    assert _parse("--hbp-plan", "plan").enabled


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "--hbp-epochs is 0; it must be at least 1"),
        ({"curriculum_steps": -1}, "--hbp-curriculum-steps is -1; it must be at least 0"),
        ({"seed": -1}, "--hbp-seed is -1; it must be at least 0"),
        (
            {"source_weight": (1.0, -2.0)},
            "--hbp-source-weight is 1 -2; each must be a finite number",
        ),
        ({"source_weight": (float("nan"),)}, "--hbp-source-weight is nan; each must be a finite"),
        ({"plan_timeout": 0}, "--hbp-plan-timeout is 0; it must be above 0 seconds"),
        ({"mixing": "x"}, "--hbp-mixing is 'x'; it must be one of auto, microbatch, step"),
        ({"overlong": "x"}, "--hbp-overlong is 'x'; it must be one of error, drop, truncate"),
        ({"packer": "x"}, "--hbp-packer is 'x'; it must be one of best_fit, "),
        ({"loss_normalizer": "x"}, "--hbp-loss-normalizer is 'x'; it must be one of ave-token, "),
        ({"cp_backend": "ring"}, "--hbp-cp-backend is 'ring'; it must be one of ulysses"),
        ({"device": "tpu"}, "--hbp-device is 'tpu'; it must be one of cuda, cpu"),
        ({"level": ()}, "--hbp-corpus without --hbp-plan needs at least one --hbp-level, e.g. "),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        HbpConfig(**({"corpus": ("data",), "level": (Level(16, 1),)} | values))


@pytest.mark.parametrize("flag", sorted(FLAGS - {"--hbp-plan", "--hbp-corpus", "--hbp-device"}))
def test_a_flag_without_plan_or_corpus_is_refused(flag):
    value = {
        "--hbp-level": "16:1",
        "--hbp-mixing": "step",
        "--hbp-overlong": "drop",
        "--hbp-packer": "isf",
        "--hbp-loss-normalizer": "sum",
    }.get(flag, "5")
    if flag == "--hbp-cp-backend":
        assert not _parse(flag, "ulysses").enabled  # its only value is the default
        return
    with pytest.raises(ValueError, match=f"{flag} is given without --hbp-plan or --hbp-corpus"):
        _parse(flag, value)


def test_device_may_be_given_alone():
    assert not _parse("--hbp-device", "cpu").enabled


def test_bad_level_names_the_form():
    with pytest.raises(ValueError, match=r"level '16' is not PACK_LEN:CP"):
        _parse("--hbp-corpus", "data", "--hbp-level", "16")
