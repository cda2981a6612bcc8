"""`hbp prepare` killed: real processes, at any moment, and at each of its changes to files."""

import os
import random
import signal
import subprocess
import sys
import warnings

import psutil
import pytest

from megatron_hbp.corpus import preparation
from megatron_hbp.corpus.indexed_files import HashingFile
from megatron_hbp.corpus.prepare import prepare_corpus
from megatron_hbp.corpus.tokenizer import load_tokenizer
from tests.kills.prepare_runs import (
    CAP,
    OPTIONS,
    content,
    kill,
    mixed_inputs,
    saved_rows,
    start,
    until,
    work_of,
)
from tests.unit.corpus_samples import char_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t")


def make(inputs, tokenizer, output):
    options = {"max_length": CAP, "overlong": "truncate", "valid_share": 0.1}
    prepare_corpus(inputs, tokenizer, output, **options)


def forked(function) -> int:
    """Runs it in a child process; its exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        try:
            function()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.__stderr__, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(number, folder):
    """This process ends as by kill -9 just before its `number`-th change to files in `folder`."""
    left = number

    def count(path):
        nonlocal left
        if str(path).startswith(str(folder)):
            if left == 0:
                os._exit(9)
            left -= 1

    def hook(event, arguments):
        if (
            event == "open" and isinstance(arguments[0], str) and arguments[2] & os.O_ACCMODE
        ) or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
            count(arguments[0])

    def counted(name):
        original = getattr(HashingFile, name)

        def method(self, *data):
            count(self._path)
            return original(self, *data)

        setattr(HashingFile, name, method)

    sys.addaudithook(hook)
    counted("write")
    counted("sync")


def killed_at_operations(tmp_path, inputs, tokenizer, step):
    load_tokenizer(tokenizer)  # what it imports, which takes seconds, the children then have
    whole = tmp_path / "whole"
    assert forked(lambda: make(inputs, tokenizer, whole)) == 0
    expected = content(whole)
    number, kills = 0, 0
    while True:
        folder = tmp_path / str(number)
        output = folder / "c"

        def dying(folder=folder, output=output, number=number):
            die_at(number, folder)
            make(inputs, tokenizer, output)

        code = forked(dying)
        if code == 9:
            kills += 1
            if output.exists():  # whole or not at all
                assert content(output) == expected, f"operation {number}"
        assert forked(lambda output=output: make(inputs, tokenizer, output)) == 0, number
        assert content(output) == expected, f"operation {number}"
        assert not work_of(output).exists()
        if code == 0:
            return kills
        assert code == 9
        number += step


@pytest.fixture
def few_blocks(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # its threads would not be forked
    monkeypatch.setattr(preparation, "_BLOCK_BYTES", 2000)
    monkeypatch.setattr(preparation, "_CHECKPOINT_SECONDS", -1.0)
    inputs = mixed_inputs(tmp_path / "rows", 30)
    return [inputs[0], inputs[4], inputs[5]]


def test_killed_at_some_operations(tmp_path, few_blocks, tokenizer):
    assert killed_at_operations(tmp_path, few_blocks, tokenizer, 13) >= 8


@pytest.mark.slow
def test_killed_at_every_operation(tmp_path, few_blocks, tokenizer):
    kills = killed_at_operations(tmp_path, few_blocks, tokenizer, 1)
    print(f"killed before each of {kills} changes to files")
    assert kills > 100


def kill_at_random(tmp_path, inputs, tokenizer, num_kills, seed):
    reference = start(inputs, tokenizer, tmp_path / "whole", *OPTIONS)
    _, errors = reference.communicate(timeout=300)
    assert reference.returncode == 0, errors
    expected = content(tmp_path / "whole")
    rng = random.Random(seed)
    rows, run_number = [], 0
    while len(rows) < num_kills:
        output = tmp_path / f"run{run_number}"
        run_number += 1
        while not output.exists():
            run = start(inputs, tokenizer, output, *OPTIONS)
            if len(rows) < num_kills:
                if rng.random() < 0.8:  # most of the time goes into starting up
                    begun = saved_rows(output)
                    until(
                        lambda run=run, output=output, begun=begun: (
                            run.poll() is not None or saved_rows(output) != begun
                        ),
                        "a checkpoint",
                    )
                try:
                    run.wait(rng.uniform(0, 1.0))
                except subprocess.TimeoutExpired:
                    kill(run)
                    rows.append(saved_rows(output))
                    run.communicate()
                    continue
            _, errors = run.communicate(timeout=300)
            assert run.returncode == 0, errors
        assert content(output) == expected
        if work_of(output).exists():  # killed with the corpus in place: the next run tidies up
            run = start(inputs, tokenizer, output, *OPTIONS)
            _, errors = run.communicate(timeout=300)
            assert run.returncode == 0, errors
            assert content(output) == expected
        assert not work_of(output).exists()
    print(f"{num_kills} kills over {run_number} runs, at rows {rows}")
    return rows


def test_killed_at_random_moments(tmp_path, tokenizer):
    inputs = mixed_inputs(tmp_path / "rows", 2000)
    rows = kill_at_random(tmp_path, inputs, tokenizer, 3, seed=1)
    assert any(rows), "no kill came between the first checkpoint and the end"


@pytest.mark.slow
def test_killed_at_fifty_random_moments(tmp_path, tokenizer):
    inputs = mixed_inputs(tmp_path / "rows", 6000)
    rows = kill_at_random(tmp_path, inputs, tokenizer, 50, seed=2)
    assert len({row for row in rows if row}) >= 20, "too few kills came at work"


def at_work(run, output):
    until(lambda: run.poll() is not None or bool(saved_rows(output)), "a checkpoint")
    assert run.poll() is None, run.communicate()
    workers = psutil.Process(run.pid).children(recursive=True)
    assert len(workers) == 2
    return workers


def finish(inputs, tokenizer, output, whole):
    run = start(inputs, tokenizer, output, *OPTIONS)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0
    assert "goes on after " in errors
    assert content(output) == whole


def test_real_interruptions(tmp_path, tokenizer):
    """Ctrl-C, a killed worker, kill by a scheduler: one line, nobody left, the work kept."""
    inputs = mixed_inputs(tmp_path / "rows", 1500)
    make(inputs, tokenizer, tmp_path / "whole")
    whole = content(tmp_path / "whole")

    output = tmp_path / "ctrl-c"
    run = start(inputs, tokenizer, output, *OPTIONS, block_bytes=4000, process_group=0)
    workers = at_work(run, output)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    printed, errors = run.communicate(timeout=60)
    assert (run.returncode, printed) == (130, "")
    lines = errors.splitlines()
    assert lines[0].startswith("hbp: interrupted: the same command goes on from the work kept in")
    assert lines[1:] == ["hbp: interrupted"]
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    finish(inputs, tokenizer, output, whole)

    output = tmp_path / "worker"
    run = start(inputs, tokenizer, output, *OPTIONS, block_bytes=4000)
    workers = at_work(run, output)
    workers[0].kill()
    printed, errors = run.communicate(timeout=60)
    assert (run.returncode, printed) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith("hbp: error: a process that tokenises ended with exit code -9 near row ")
    assert "fewer --workers" in line
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    finish(inputs, tokenizer, output, whole)

    output = tmp_path / "terminated"
    run = start(inputs, tokenizer, output, *OPTIONS, block_bytes=4000)
    workers = at_work(run, output)
    run.terminate()
    assert run.communicate(timeout=60) == ("", "")  # not a word of the workers' either
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    finish(inputs, tokenizer, output, whole)


def test_workers_that_are_killed_while_they_start(tmp_path, tokenizer):
    inputs = mixed_inputs(tmp_path / "rows", 100)
    run = start(inputs, tokenizer, tmp_path / "c", *OPTIONS, stderr=subprocess.PIPE)
    process = psutil.Process(run.pid)
    until(lambda: len(process.children()) == 2, "the workers")
    workers = process.children()
    os.kill(run.pid, signal.SIGKILL)
    assert run.communicate(timeout=60) == ("", "")
    assert psutil.wait_procs(workers, timeout=30)[1] == []
