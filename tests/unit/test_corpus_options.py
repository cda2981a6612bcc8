"""`hbp prepare` as a user gives it: each flag does what its help says, in a pipe or not."""

import gzip
import json
import os
import pty
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_hbp.cli import main
from megatron_hbp.commands.progress import RowProgress
from megatron_hbp.corpus import Corpus
from megatron_hbp.corpus.counts import RowCounts
from megatron_hbp.corpus.preparation import Progress
from tests.kills.prepare_runs import ROOT, mixed_inputs
from tests.unit.corpus_samples import char_tokenizer, chat, texts, write_rows

END = "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t")


def hbp(capsys, *arguments):
    code = main(["prepare", *map(str, arguments)])
    return code, *capsys.readouterr()


KEYS = [
    # (flags, row, the whole text, the trained text)
    (
        ["--messages-key", "talk"],
        {"talk": chat("ua", ["Q", "A"])["messages"], "messages": chat("ua", ["no", "no"])},
        f"<s><|im_start|>user\nQ{END}\n<|im_start|>assistant\nA{END}\n",
        f"A{END}",
    ),
    (
        ["--prompt-key", "ask", "--completion-key", "reply"],
        {"ask": "Q", "reply": "A", "prompt": "no", "completion": "no"},
        f"<s><|im_start|>user\nQ{END}\n<|im_start|>assistant\nA{END}\n",
        f"A{END}",
    ),
    (
        ["--prompt-format", "text"],
        {"prompt": "Q:", "completion": " A"},
        "Q: A</s>",
        " A</s>",
    ),
    (
        ["--prompt-format", "rendered"],
        {"prompt": f"<|im_start|>user\nQ{END}", "completion": f"A{END}"},
        f"<|im_start|>user\nQ{END}A{END}",
        f"A{END}",
    ),
    (["--text-key", "story"], {"story": "once", "id": 1}, "once</s>", "once</s>"),
    (
        ["--tokens-key", "t", "--labels-key", "l"],
        {"t": [65, 66, 67], "l": [-100, 66, -100], "input_ids": [1], "labels": [1]},
        None,
        1,
    ),
    (["--tokens-key", "t", "--mask-key", "m"], {"t": [65, 66, 67], "m": [0, 1, 1]}, None, 2),
]


@pytest.mark.parametrize("case", KEYS)
def test_keys_and_prompt_formats(tmp_path, tokenizer, capsys, case):
    flags, row, whole, trained = case
    source = write_rows(tmp_path / "rows.jsonl", [row])
    given = ("--input", source, "--tokenizer", tokenizer, *flags)
    code, _, errors = hbp(capsys, *given, "--output", tmp_path / "c")
    assert (code, errors) == (0, "")
    corpus = Corpus.open(tmp_path / "c")
    if whole is None:
        assert corpus.tokens(0).tolist() == row["t"]
        assert corpus.num_trained.tolist() == [trained]
    else:
        assert texts(corpus, tokenizer) == (whole, trained)


def test_a_key_that_is_not_there_names_those_that_are(tmp_path, tokenizer, capsys):
    source = write_rows(tmp_path / "rows.jsonl", [chat("ua")])
    code, _, errors = hbp(capsys, "--input", source, "--tokenizer", tokenizer, "--strict",
                          "--prompt-key", "ask", "--output", tmp_path / "c")  # fmt: skip
    assert code == 2
    assert "ask" in errors
    assert "messages" in errors


def test_chat_template_max_length_valid_share(tmp_path, tokenizer, capsys):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
                        "{% if add_generation_prompt %}[assistant]{% endif %}")  # fmt: skip
    rows = [chat("ua", ["Q", f"A{i}"]) for i in range(40)] + [chat("ua", ["Q" * 90, "A"])]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    code, printed, _ = hbp(
        capsys, "--input", source, "--tokenizer", tokenizer, "--output", tmp_path / "c",
        "--chat-template", template, "--max-length", 50, "--overlong", "drop",
        "--valid-share", 0.3, "--valid-seed", 7, "--workers", 2, "--max-reject-share", 0.03,
    )  # fmt: skip
    assert code == 0
    assert f"template    {template}" in printed
    assert "rows        41 in = 40 kept + 0 rejected + 1 dropped" in printed
    assert "  reason    1  over-long" in printed
    corpus, valid = Corpus.open(tmp_path / "c"), Corpus.open(tmp_path / "c" / "valid")
    assert texts(corpus, tokenizer)[0].startswith("[user]Q</s>[assistant]A")
    assert f"held out    {len(valid)} of the kept rows, in `valid`" in printed
    assert len(corpus) + len(valid) == 40


def test_output_and_show(tmp_path, tokenizer, capsys):
    source = write_rows(tmp_path / "rows.jsonl", [chat("ua")])
    given = ("--input", source, "--tokenizer", tokenizer)
    assert hbp(capsys, *given) == (
        2,
        "",
        "hbp: error: --output is missing; name the folder of the corpus (or use --show)\n",
    )
    assert hbp(capsys, *given, "--output", "")[2].startswith("hbp: error: --output is missing")
    code, _, errors = hbp(capsys, *given, "--output", source / "below")
    assert (code, errors) == (
        2,
        f"hbp: error: output {source}/below cannot be used (File exists); see to that, or name "
        "another folder\n",
    )
    assert "/ exists and is not this corpus" in hbp(capsys, *given, "--output", "/")[2]
    for seed in (2**63, -(2**63) - 1):
        asked = ("--valid-share", "0.1", "--valid-seed", seed, "--output", tmp_path / "c")
        assert "; it must fit into 64 bits\n" in hbp(capsys, *given, *asked)[2]
    for number in (0, -3):
        code, printed, errors = hbp(capsys, *given, "--show", number)
        assert (code, printed) == (2, "")
        assert errors == f"hbp: error: --show is {number}; it must be at least 1\n"


def test_show_with_each_kind_of_input(tmp_path, tokenizer, capsys):
    rows = [chat("ua", ["Question", "Answer"]), chat("u"), chat("ua", ["More", "Told"])]
    lines = write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    (tmp_path / "c.json").write_text(json.dumps(rows))
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, tmp_path / "d.parquet")
    with pa.ipc.new_stream(tmp_path / "e.arrow", table.schema) as writer:
        writer.write_table(table)
    before = sorted(tmp_path.iterdir())
    for file in before:
        code, printed, errors = hbp(
            capsys, "--input", file, "--tokenizer", tokenizer, "--show", 2, "--max-length", 999
        )
        assert (code, errors) == (0, ""), file
        assert "template: the tokenizer's own" in printed
        assert f"{file}:1" in printed
        assert "Answer" in printed
        assert f"{file}:2" in printed
        assert "no answer" in printed
        assert "Told" not in printed
    assert sorted(tmp_path.iterdir()) == before  # nothing is made


def command(*arguments):
    return [sys.executable, "-m", "tests.kills.hbp", "5", "100000", "prepare", *map(str, arguments)]


@pytest.mark.parametrize("show", [True, False])
def test_a_reader_that_stops_early(tmp_path, tokenizer, show):
    """As `hbp prepare ... | head -1`."""
    source = write_rows(tmp_path / "rows.jsonl", [chat("ua", ["q" * 999, "a"])] * 300)
    flags = ["--show", 300] if show else ["--output", tmp_path / "c"]
    reader, writer = os.pipe()
    run = subprocess.Popen(
        command("--input", source, "--tokenizer", tokenizer, *flags),
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    if show:
        assert os.read(reader, 10)
    os.close(reader)
    _, errors = run.communicate(timeout=300)
    assert (run.returncode, errors) == (141, "")
    if not show:
        assert len(Corpus.open(tmp_path / "c")) == 300


def test_a_terminal_without_the_letters(tmp_path, tokenizer):
    source = write_rows(tmp_path / "rows.jsonl", [chat("ua", ["q", "a"])])
    run = subprocess.run(
        command("--input", source, "--tokenizer", tokenizer, "--output", tmp_path / "c\u4e2d"),
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert f"{tmp_path}/c\\u4e2d".encode() in run.stdout


def test_a_bar_on_a_terminal_only(tmp_path, tokenizer):
    inputs = mixed_inputs(tmp_path / "rows", 2000)
    main_end, other_end = pty.openpty()
    run = subprocess.Popen(
        command("--input", *inputs, "--tokenizer", tokenizer, "--output", tmp_path / "c"),
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=other_end,
    )
    os.close(other_end)
    drawn = b""
    while True:
        try:
            piece = os.read(main_end, 1 << 16)
        except OSError:  # the other end is closed
            break
        drawn += piece
    os.close(main_end)
    printed, _ = run.communicate(timeout=300)
    assert run.returncode == 0
    assert b"\x1b" not in printed  # what is piped stays plain
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", drawn).decode()
    assert re.search(r"\u2501+", text), "no bar"
    assert re.search(r"[0-9.]+/[0-9.]+ [kM]?B", text)
    assert re.search(r"[0-9.]+ [kM]?B/s", text)
    assert re.search(r"\d+ rows, \d+/s, \d+ lost", text)
    assert re.search(r"\d:\d\d:\d\d", text), "no time left"


def test_lines_of_progress_where_there_is_no_terminal(capsys, monkeypatch):
    clock = 100.0
    monkeypatch.setattr("megatron_hbp.commands.progress.time.monotonic", lambda: clock)
    with RowProgress() as progress:
        clock = 150.0  # starting up is no part of the rate
        progress.update(Progress(1_000_000, 9_000_000, RowCounts(rows_in=50)))
        clock = 155.0
        progress.update(Progress(2_000_000, 9_000_000, RowCounts(rows_in=60)))
        clock = 170.0
        progress.update(
            Progress(5_000_000, 9_000_000, RowCounts(rows_in=90, rows_rejected=2, rows_dropped=1))
        )
    assert capsys.readouterr().err == (
        "hbp: 90 rows, 2/s, 3 lost, 55.6% of the input, 0.2 MB/s, 20 s left\n"
    )
