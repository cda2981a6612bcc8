"""Room on disk: which checkpoints stay, bytes of a parameter, bytes of a corpus."""

import numpy as np
import pytest

from megatron_hbp.check.sizes import checkpoint_sizes, corpus_bytes, parameter_bytes, saved_steps
from megatron_hbp.corpus.writer import write_corpus

ADAM = {"bf16": True, "optimizer": "adam", "use_distributed_optimizer": True}
SAVING = ADAM | {"save": "checkpoints", "save_interval": 50}


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({}, 14),  # bf16 weight; fp32 weight and two moments
        ({"use_distributed_optimizer": False}, 14),
        ({"no_save_optim": True}, 2),
        ({"optimizer": "sgd"}, 10),
        ({"bf16": False}, 16),
        ({"bf16": False, "use_distributed_optimizer": False}, 12),
        ({"bf16": False, "no_save_optim": True}, 4),
        ({"bf16": False, "fp16": True}, 14),
    ],
)
def test_bytes_of_a_parameter(changes, each):
    assert parameter_bytes(ADAM | changes) == each


@pytest.mark.parametrize(
    ("first", "last", "steps"),
    [
        (0, 100, [50, 100]),
        (0, 120, [50, 100, 120]),
        (100, 170, [150, 170]),
        (70, 170, [100, 150, 170]),
        (0, 30, [30]),
        (30, 30, []),
        (100, 100, []),
    ],
)
def test_steps_that_are_saved(first, last, steps):
    assert saved_steps(SAVING, first, last) == steps


def _kept_by_the_host(steps, retain):
    """save_checkpoint's rule, step by step: what is there at the end and at most."""
    there, before, most = [], 0, 0
    for step in steps:
        there.append(step)
        most = max(most, len(there))
        if before and before != step and before % retain:
            there.remove(before)
        before = step
    return len(there), most


@pytest.mark.parametrize("retain", [50, 100, 150, 200, 1000])
@pytest.mark.parametrize("last", [40, 50, 100, 120, 500, 501, 1000])
def test_checkpoints_that_stay(retain, last):
    arguments = SAVING | {"save_retain_interval": retain}
    sizes = checkpoint_sizes(arguments, parameters=10, gpus=4, first=0, last=last)
    assert sizes is not None
    kept, most = _kept_by_the_host(saved_steps(SAVING, 0, last), retain)
    assert sizes.kept == kept
    assert sizes.most == most


def test_all_stay_without_a_retain_interval():
    sizes = checkpoint_sizes(SAVING, parameters=8 * 10**9, gpus=32, first=0, last=520)
    assert sizes is not None
    assert (sizes.kept, sizes.most, sizes.files_each) == (11, 11, 32)
    assert sizes.bytes_each == 112 * 10**9
    assert sizes.bytes_kept == sizes.most_bytes == 11 * 112 * 10**9


def test_a_run_that_saves_nothing():
    for arguments in (ADAM, ADAM | {"save": "checkpoints"}, ADAM | {"save_interval": 50}):
        assert checkpoint_sizes(arguments, parameters=10, gpus=4, first=0, last=100) is None


@pytest.mark.parametrize("vocab_size", [1000, 65499, 65500, 128256])
def test_bytes_of_a_corpus(tmp_path, vocab_size):
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, 200, 50)
    pairs = [(rng.integers(1, 1000, length), np.ones(length)) for length in lengths]
    write_corpus(tmp_path / "corpus", pairs, vocab_size=vocab_size, end_id=0)
    found = sum(
        path.stat().st_size for path in (tmp_path / "corpus").iterdir() if path.suffix != ".json"
    )
    assert found == corpus_bytes(
        num_sequences=50, num_tokens=int(lengths.sum()), vocab_size=vocab_size
    )
