"""Steps and learning-rate schedule from a plan of real rows, before anything is trained."""

import re
from argparse import Namespace

import pytest

pytest.importorskip("megatron.core", reason="needs the extra [train]")

from megatron_hbp import cli
from megatron_hbp.host.iterations import set_iterations
from megatron_hbp.plan import Plan


def test_br_j14_the_plan_tells_the_iterations(shared_data, tmp_path, capsys):
    """887 rows: `hbp plan` prints packs and steps per epoch, two epochs are twice the steps, and
    they are --train-iters. That the rate then ends at its minimum: tests/distributed/test_resume.py
    """
    rows = shared_data / "messages" / "mixed_long_short.jsonl"
    argv = ["prepare", "--input", rows, "--output", tmp_path / "corpus"]
    argv += ["--tokenizer", shared_data / "tokenizer" / "tt2k"]
    assert cli.main([str(word) for word in argv]) == 0
    capsys.readouterr()
    printed = {}
    for epochs in (1, 2):
        argv = ["plan", "--corpus", tmp_path / "corpus", "--level", "4096:1", "--level", "16384:4"]
        argv += ["--ranks", 8, "--overlong", "truncate", "--epochs", epochs]
        argv += ["--output", tmp_path / f"plan{epochs}"]
        assert cli.main([str(word) for word in argv]) == 0
        out = capsys.readouterr().out
        assert re.search(r"^in +887 ", out, re.MULTILINE)
        packs = [int(n) for n in re.findall(r"^(?:4096:1|16384:4) +(\d+)", out, re.MULTILINE)]
        steps, per_epoch = re.search(r"^steps (\d+) \((.*) per epoch\)", out, re.MULTILINE).groups()
        printed[epochs] = int(steps), [int(n) for n in per_epoch.split(" + ")], packs
    steps, (per_epoch,), packs = printed[1]
    assert steps == per_epoch > 20
    assert sum(packs) > steps
    assert printed[2][0] == 2 * steps
    assert printed[2][1] == [steps, steps]
    args = Namespace(
        train_iters=None, eval_iters=0, eval_interval=1, lr_decay_iters=None, lr_warmup_iters=5
    )
    set_iterations(args, Plan.load(tmp_path / "plan2"), None)
    assert args.train_iters == 2 * steps
