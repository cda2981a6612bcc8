"""The processes that tokenise: the same bytes however many there are, flat memory, no one left."""

import json
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest
from tokenizers import Tokenizer

from megatron_hbp.corpus import Corpus, preparation
from megatron_hbp.corpus.blocks import Position, block_rows, read_blocks
from megatron_hbp.corpus.encoder_pool import EncoderPool, WorkerDiedError
from megatron_hbp.corpus.inputs import find_inputs
from megatron_hbp.corpus.options import Options
from megatron_hbp.corpus.prepare import load_recipe, prepare_corpus
from megatron_hbp.corpus.row_encoder import RowEncoder
from tests.kills.prepare_runs import CAP, OPTIONS, content, mixed_inputs, start
from tests.unit.corpus_samples import char_tokenizer, chat, write_rows


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    return mixed_inputs(folder / "rows", 60), char_tokenizer(folder / "t")


def make(given, output, **options):
    options = {"max_length": CAP, "overlong": "truncate", "valid_share": 0.1} | options
    return prepare_corpus(*given, output, **options)


def test_the_bytes_depend_on_rows_alone(tmp_path, given, monkeypatch):
    whole = content(make(given, tmp_path / "whole", workers=1).path)
    for number, (workers, block_bytes) in enumerate([(2, 1), (3, 777), (2, 5000), (1, 60_000)]):
        monkeypatch.setattr(preparation, "_BLOCK_BYTES", block_bytes)
        output = tmp_path / str(number)
        assert content(make(given, output, workers=workers).path) == whole, (workers, block_bytes)


def test_the_bytes_do_not_depend_on_the_surroundings(tmp_path, given):
    whole = content(make(given, tmp_path / "whole").path)
    surroundings = (
        {"PYTHONHASHSEED": "1", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8", "TZ": "Asia/Tokyo"},
    )
    for number, names in enumerate(surroundings):
        output = tmp_path / str(number)
        run = start(
            *given, output, *OPTIONS, env=os.environ | names, umask=0o077 if number else 0o002
        )
        _, errors = run.communicate(timeout=300)
        assert run.returncode == 0, errors
        assert content(output) == whole


def test_every_sequence_names_its_row(tmp_path, given):
    """Over files of four kinds, two of them without a row, and both corpora."""
    inputs, _ = given
    corpus = make(given, tmp_path / "c")
    texts = {}  # of each row, by file and line
    for file in find_inputs(inputs):
        for block in read_blocks(file):
            for number, row in block_rows(block):
                texts[f"{file.path}:{number}"] = row
    tokenizer = Tokenizer.from_file(str(given[1] / "tokenizer.json"))
    seen = set()
    for part in (corpus, Corpus.open(corpus.path / "valid")):
        assert len(part.info["input_starts"]) == len(inputs)
        for i in range(len(part)):
            row = texts[part.origin(i)]
            row = row if isinstance(row, dict) else json.loads(row)
            question = tokenizer.decode(part.tokens(i).tolist(), skip_special_tokens=True)
            asked = "user\n" + row["messages"][0]["content"]
            assert question[: len(asked)] == asked[: len(question)], part.origin(i)
            seen.add(part.origin(i))
    assert len(seen) == corpus.info["row_counts"]["rows_kept"]
    files = {origin.rsplit(":", 1)[0] for origin in seen}
    assert files == {str(inputs[i]) for i in (0, 2, 3, 4)}


def test_files_of_which_nothing_is_kept(tmp_path, given):
    rows = {"a": [chat("u")], "b": [chat("ua")], "c": [chat("u"), chat("x")], "d": [chat("ua")]}
    inputs = [write_rows(tmp_path / f"{name}.jsonl", content) for name, content in rows.items()]
    inputs.append(write_rows(tmp_path / "e.jsonl", [chat("u")]))
    corpus = prepare_corpus(inputs, given[1], tmp_path / "corpus")
    assert [corpus.origin(i) for i in range(2)] == [f"{inputs[1]}:1", f"{inputs[3]}:1"]


@pytest.fixture
def recipe(given):
    return load_recipe(given[1], Options())[0]


def blocks(tmp_path, count, size=400):
    rows = [chat("ua", ["q", f"a {i}"]) for i in range(count)]
    (file,) = find_inputs([write_rows(tmp_path / "rows.jsonl", rows)])
    return list(enumerate(read_blocks(file, Position(), size)))


def test_results_come_in_order_and_errors_after_them(tmp_path, recipe):
    given = blocks(tmp_path, 60)
    assert len(given) > 12
    seen = []

    def run(source, workers):
        seen.clear()
        with EncoderPool(recipe, workers) as pool:
            for pair, encoded in pool.encode(source):
                assert encoded.rows_in == RowEncoder(recipe)(pair[1]).rows_in
                seen.append(pair)

    def cut():
        yield from given[:7]
        raise ValueError("cut")

    for workers in (1, 3):
        run(given, workers)
        assert seen == given
        with pytest.raises(ValueError, match="cut"):
            run(cut(), workers)
        assert seen == given[:7]


def test_a_pool_that_is_left_early_ends_its_workers(tmp_path, recipe):
    given = blocks(tmp_path, 60)
    before = set(psutil.Process().children())
    with EncoderPool(recipe, 3) as pool:
        next(pool.encode(given))
        workers = set(psutil.Process().children()) - before
        assert len(workers) == 3
    assert psutil.wait_procs(workers, timeout=10)[1] == []
    assert [thread for thread in threading.enumerate() if "ThreadPool" in thread.name] == []


def test_modules_of_the_folder_at_hand_are_not_imported(tmp_path, recipe, monkeypatch):
    (tmp_path / "tokenizers.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    with EncoderPool(recipe, 2) as pool:
        assert sum(encoded.rows_in for _, encoded in pool.encode(blocks(tmp_path, 2))) == 2


def test_all_workers_killed(tmp_path, recipe):
    given = blocks(tmp_path, 60)
    before = set(psutil.Process().children())
    with EncoderPool(recipe, 2) as pool:
        for worker in set(psutil.Process().children()) - before:
            worker.kill()
        with pytest.raises(WorkerDiedError, match="exit code -9 near row 1; if it was killed"):
            list(pool.encode(given))


def test_a_failure_of_ours_names_the_block(tmp_path, recipe):
    (number, block), *_ = blocks(tmp_path, 2)
    broken = type(block)("table", b"not a table", 17, block.end, 0)
    with (
        EncoderPool(recipe, 2) as pool,
        pytest.raises(RuntimeError, match=r"(?s)row 17 or one soon after it:\n.*Traceback"),
    ):
        list(pool.encode([(number, broken)]))


def test_a_worker_whose_starter_ends_in_the_middle_says_nothing():
    for request in (b"", b"\x80\x05\x95\xff\x00", b"\x80"):
        run = subprocess.run(
            [sys.executable, "-m", "megatron_hbp.corpus.worker"],
            input=request,
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert (run.returncode, run.stdout, run.stderr) == (0, b"", b"")


def peak_memory(run) -> dict[str, int]:
    """Most bytes of the process and of any of its workers, beside what files they map."""
    process = psutil.Process(run.pid)
    peaks = {"main": 0, "worker": 0}
    while run.poll() is None:
        for name, processes in (("main", [process]), ("worker", process.children())):
            for one in processes:
                try:
                    memory = one.memory_info()
                except psutil.NoSuchProcess:
                    continue
                peaks[name] = max(peaks[name], memory.rss - memory.shared)
        time.sleep(0.02)
    assert run.returncode == 0, run.communicate()
    return peaks


@pytest.mark.slow
def test_memory_is_flat_in_the_number_of_rows(tmp_path, given):
    peaks = []
    for count in (20_000, 80_000):
        rows = (chat("ua", ["q" * 300, f"answer {i} " * 20]) for i in range(count))
        source = tmp_path / f"{count}.jsonl"
        with source.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        run = start([source], given[1], tmp_path / str(count), seconds=1.0, block_bytes=1 << 20,
                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        peaks.append(peak_memory(run))
    print("peak MB:", [{name: round(n / 1e6) for name, n in peak.items()} for peak in peaks])
    for name in ("main", "worker"):
        # four times the rows are 40 MB more of input and as much of output
        assert peaks[1][name] < peaks[0][name] + 15e6, name
        assert peaks[1][name] < 1.5 * 2**30
