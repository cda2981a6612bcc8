"""Every row and every token that goes in comes out, or is listed with its reason."""

import json
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp.cli import main
from megatron_hbp.corpus import Corpus, preparation
from megatron_hbp.corpus.prepare import prepare_corpus
from megatron_hbp.corpus.row_encoder import RowEncoder
from megatron_hbp.corpus.summary import summary_text
from tests.kills.prepare_runs import content, work_of
from tests.unit.corpus_samples import char_tokenizer, chat, prepare, write_rows

CAP = 40
OVERHEAD = 22  # tokens of a question and an answer beside their text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t")


@dataclass
class Row:
    """A line of input and, by another way of counting, what must become of it without a cap."""

    line: str
    length: int = 0  # 0: cannot be tokenised
    first_trained: int = 0
    reason: str = ""


def question(prompt: int, answer: int) -> Row:
    row = chat("ua", ["q" * prompt, "a" * answer])
    # <s>, <|im_start|>, "user\\n", the prompt, <|im_end|>, "\\n", <|im_start|>, "assistant\\n"
    return Row(json.dumps(row), OVERHEAD + prompt + answer, 1 + 1 + 5 + prompt + 1 + 1 + 1 + 10)


def tokens(length: int, first_trained: int | None = 1) -> Row:
    labels = [-100] * length
    if first_trained is not None:
        labels[first_trained:] = [7] * (length - first_trained)
    line = json.dumps({"input_ids": [7] * length, "labels": labels})
    if first_trained is None:
        return Row(line, reason="no trained token")
    return Row(line, length, first_trained)


def bad(kind: int) -> Row:
    lines = ("{broken", json.dumps(chat("u")), json.dumps({"other": 1}), "[1]")
    return Row(lines[kind], reason="any")


AROUND = st.sampled_from([CAP - 1, CAP, CAP + 1, 2 * CAP])
ROWS = st.lists(
    st.one_of(
        st.builds(lambda n, a: question(n - OVERHEAD - a, a), AROUND, st.integers(1, 17)),
        st.builds(lambda p: question(p, 3), st.integers(CAP - OVERHEAD, CAP + 5)),
        st.builds(tokens, AROUND, st.sampled_from([1, 5, CAP - 2])),
        st.builds(lambda: tokens(CAP + 3, CAP)),
        st.builds(lambda: tokens(4, None)),
        st.builds(bad, st.integers(0, 3)),
        st.just(Row("")),
        st.just(Row(" \t")),
    ),
    min_size=1,
    max_size=12,
)


def fate(row: Row, overlong: str) -> tuple[str, int]:
    """(action, tokens lost)."""
    if row.reason:
        return "rejected", 0
    if row.length <= CAP:
        return "kept", 0
    if overlong == "truncate" and row.first_trained < CAP:
        return "truncated", row.length - CAP
    return "dropped", row.length


def refusal(source, tokenizer, output, **options) -> str | None:
    """The error of making a corpus, None when it was made."""
    try:
        prepare_corpus([source], tokenizer, output, **options)
    except ValueError as error:
        return str(error)
    return None


OPTIONS = st.fixed_dictionaries(
    {
        "max_length": st.just(CAP),
        "overlong": st.sampled_from(["error", "drop", "truncate"]),
        "strict": st.booleans(),
        "valid_share": st.sampled_from([0.0, 0.3]),
    }
)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, options=OPTIONS)
def test_everything_is_accounted_for(tmp_path_factory, tokenizer, rows, options):
    folder = tmp_path_factory.mktemp("c")
    source = folder / "rows.jsonl"
    source.write_text("".join(row.line + "\n" for row in rows))
    fates = [
        (line, row, *fate(row, options["overlong"]))
        for line, row in enumerate(rows, start=1)
        if row.line.strip()
    ]
    stops = [
        line
        for line, row, action, _ in fates
        if (options["strict"] and action in ("rejected", "dropped"))
        or (options["overlong"] == "error" and action == "dropped")
    ]
    kept = [entry for entry in fates if entry[2] in ("kept", "truncated")]
    error = refusal(source, tokenizer, folder / "c", **options)
    if error is not None:
        assert "\n" not in error
        if stops:
            assert error.startswith(f"{source}:{stops[0]}: ")
        elif kept:
            assert options["valid_share"]
            assert "rows into the valid corpus" in error
        else:
            assert ("rows were lost" in error) == bool(fates)
            assert ("no row at all" in error) == (not fates)
        assert [p.name for p in folder.iterdir()] == ["rows.jsonl"]
        return
    assert not stops
    parts = [Corpus.open(folder / "c", verify=True)]
    if options["valid_share"]:
        parts.append(Corpus.open(folder / "c" / "valid", verify=True))
    counts = parts[0].info["row_counts"]

    def number(action):
        return sum(entry[2] == action for entry in fates)

    def lost(action):
        return sum(entry[3] for entry in fates if entry[2] == action)

    assert counts["rows_in"] == len(fates)
    assert counts["rows_kept"] == len(kept) == sum(map(len, parts))
    assert counts["rows_rejected"] == number("rejected")
    assert counts["rows_dropped"] == number("dropped")
    assert counts["rows_truncated"] == number("truncated")
    assert counts["blank_lines"] == len(rows) - len(fates)
    assert counts["tokens_in"] == sum(row.length for _, row, _, _ in fates)
    assert counts["tokens_dropped"] == lost("dropped")
    assert counts["tokens_truncated"] == lost("truncated")
    stored = sum(int(part.seq_lens.sum()) for part in parts)
    assert counts["tokens_kept"] == stored == sum(min(row.length, CAP) for _, row, _, _ in kept)
    lines = (folder / "c" / "rejects.jsonl").read_text().splitlines()
    listed = [json.loads(line) for line in lines]
    assert [(e["file"], e["line"], e["action"], e.get("tokens", 0)) for e in listed] == [
        (str(source), line, action, number_lost)
        for line, _, action, number_lost in fates
        if action != "kept"
    ]
    assert all(entry["reason"] for entry in listed)
    origins = {part.origin(i): int(part.seq_lens[i]) for part in parts for i in range(len(part))}
    assert origins == {f"{source}:{line}": min(row.length, CAP) for line, row, _, _ in kept}


def listed(corpus):
    entries = map(json.loads, (corpus.path / "rejects.jsonl").read_text().splitlines())
    return [(entry["line"], entry["action"], entry.get("tokens", 0)) for entry in entries]


def length_rows(tmp_path, lengths):
    rows = [json.loads(tokens(length).line) for length in lengths]
    return write_rows(tmp_path / f"{len(lengths)}.jsonl", rows)


def test_br_a06_exactly_the_maximum_is_kept(tmp_path, tokenizer):
    source = length_rows(tmp_path, [100, 2472, 3457, 50, 2048])
    corpus = prepare(tmp_path, source, tokenizer, "a", max_length=2048, overlong="drop")
    assert corpus.seq_lens.tolist() == [100, 50, 2048]
    assert listed(corpus) == [(2, "dropped", 2472), (3, "dropped", 3457)]
    assert corpus.info["row_counts"]["reasons"] == {"over-long": 2}
    source = length_rows(tmp_path, [2047, 2048, 2049])
    corpus = prepare(tmp_path, source, tokenizer, "b", max_length=2048, overlong="drop")
    assert listed(corpus) == [(3, "dropped", 2049)]
    with pytest.raises(ValueError, match=r"3\.jsonl:3: over-long: 2049 tokens, the maximum is"):
        prepare(tmp_path, source, tokenizer, "c", max_length=2048)


def test_br_b03_a_prompt_beyond_the_maximum(tmp_path, tokenizer):
    rows = [json.loads(question(prompt, 10).line) for prompt in (2049, 2027, 2010)]
    corpus = prepare(tmp_path, rows, tokenizer, max_length=2048, overlong="truncate")
    assert listed(corpus)[0] == (1, "dropped", 2049 + 10 + OVERHEAD)
    first = json.loads((corpus.path / "rejects.jsonl").read_text().splitlines()[0])
    assert first["reason"].startswith("no trainable token")
    assert listed(corpus)[1:] == [(2, "truncated", 2027 + 10 + OVERHEAD - 2048)]
    assert corpus.seq_lens.tolist() == [2048, 2010 + 10 + OVERHEAD]
    assert corpus.num_trained.tolist() == [2048 - (2027 + 20), 11]


def test_br_a15_a_stub_without_trained_tokens(tmp_path, tokenizer):
    rows = [json.loads(row.line) for row in (tokens(5000), tokens(4, None), tokens(4))]
    corpus = prepare(tmp_path, rows, tokenizer, max_length=4096, overlong="truncate")
    assert corpus.seq_lens.tolist() == [4096, 4]
    assert listed(corpus) == [(1, "truncated", 904), (2, "rejected", 0)]


@pytest.mark.parametrize("workers", [1, 3])
def test_strict_stops_at_the_first_bad_row(tmp_path, tokenizer, workers, monkeypatch):
    monkeypatch.setattr(preparation, "_BLOCK_BYTES", 500)
    rows = [chat("ua", ["q", f"a{i}"]) for i in range(200)]
    rows[17] = chat("u")
    rows[3 + 17] = chat("x")
    source = write_rows(tmp_path / "rows.jsonl", rows)
    with source.open("ab") as file:
        file.write(b"{")
    with pytest.raises(ValueError, match=rf"^{source}:18: no answer.*leave --strict out"):
        prepare(tmp_path, source, tokenizer, strict=True, workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_row_before_a_cut_file_is_named_first(tmp_path, tokenizer, workers, monkeypatch):
    import gzip

    monkeypatch.setattr(preparation, "_BLOCK_BYTES", 500)
    rng = np.random.default_rng(0)
    rows = [chat("ua", ["q", str(rng.integers(1 << 60))]) for i in range(60)]
    rows[2] = chat("u")
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    source = tmp_path / "rows.jsonl.gz"
    packed = gzip.compress(text)
    source.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz:3: no answer"):
        prepare(tmp_path, source, tokenizer, strict=True, workers=workers)
    with pytest.raises(ValueError, match="is cut or damaged after"):
        prepare(tmp_path, source, tokenizer, workers=workers)


def twenty(tmp_path, num_bad):
    rows = [chat("u") if i < num_bad else chat("ua", ["q", f"a{i}"]) for i in range(20)]
    return write_rows(tmp_path / f"{num_bad}.jsonl", rows)


def test_max_reject_share_stops_above_and_keeps_the_work(tmp_path, tokenizer, monkeypatch):
    source = twenty(tmp_path, 2)
    assert len(prepare(tmp_path, source, tokenizer, "at", max_reject_share=0.1)) == 18
    output = tmp_path / "c"
    stopped = (
        r"10\.00% of the rows were lost \(no answer 2\), more than --max-reject-share 0\.09 allows;"
        r" (\S+) lists them; mend them, or raise the share: the work done is kept"
    )
    with pytest.raises(ValueError, match=stopped) as error:
        prepare_corpus([source], tokenizer, output, max_reject_share=0.09)
    assert not output.exists()
    (named,) = [word for word in str(error.value).split() if word.endswith("rejects.jsonl")]
    with open(named) as lines:
        assert [json.loads(line)["line"] for line in lines] == [1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(RowEncoder, "__call__", None)  # nothing is tokenised again
        prepare_corpus([source], tokenizer, output, max_reject_share=0.1)
    assert content(output) == content(tmp_path / "at")
    assert not work_of(output).exists()


def test_work_of_a_laxer_run_is_judged_again(tmp_path, tokenizer):
    source = twenty(tmp_path, 2)
    output = tmp_path / "c"
    with pytest.raises(ValueError, match="the work done is kept"):
        prepare_corpus([source], tokenizer, output, max_reject_share=0.0)
    with pytest.raises(ValueError, match=rf"^{source}:1: no answer.*leave --strict out"):
        prepare_corpus([source], tokenizer, output, strict=True)
    assert not output.exists()
    assert len(prepare_corpus([source], tokenizer, output)) == 18


def test_a_corpus_that_lost_rows_is_refused_to_who_allows_none(tmp_path, tokenizer):
    source = twenty(tmp_path, 2)
    output = tmp_path / "c"
    prepare_corpus([source], tokenizer, output)
    prepare_corpus([source], tokenizer, output, max_reject_share=0.1)
    with pytest.raises(ValueError, match=r"was made without --strict and lost rows.*leave --str"):
        prepare_corpus([source], tokenizer, output, strict=True)
    with pytest.raises(ValueError, match=r"--max-reject-share 0\.05 allows; .*raise the share"):
        prepare_corpus([source], tokenizer, output, max_reject_share=0.05)


def test_the_first_line_warns_above_a_twentieth(tmp_path, tokenizer, capsys):
    for num_bad, first in (
        (1, "rows        20 in = 19 kept"),
        (2, "WARNING     10.0% of the rows"),
    ):
        corpus = prepare(tmp_path, twenty(tmp_path, num_bad), tokenizer, f"c{num_bad}")
        assert summary_text(corpus.info).startswith(first)


def hbp(capsys, *arguments):
    code = main(["prepare", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_exit_codes_and_one_line(tmp_path, tokenizer, capsys):
    source = twenty(tmp_path, 2)
    given = ("--input", source, "--tokenizer", tokenizer, "--output", tmp_path / "c")
    for flags, words in (
        (["--strict"], f"hbp: error: {source}:1: no answer"),
        (["--max-reject-share", "0.01"], "hbp: error: 10.00% of the rows were lost"),
        (["--max-length", "9"], f"hbp: error: {source}:3: over-long: "),
        (["--max-length", "9", "--overlong", "drop"], "hbp: error: "),
        (["--max-reject-share", "2"], "hbp: error: max reject share is 2.0; it must be"),
        (["--max-length", "1"], "hbp: error: max length is 1; it must be at least 2 tokens"),
        (["--overlong", "drop"], "hbp: error: overlong drop needs a --max-length; give one"),
        (["--workers", "0"], "hbp: error: workers is 0; it must be at least 1"),
        (["--valid-share", "0.5"], "hbp: error: valid share is 0.5; it must be"),
    ):
        code, printed, errors = hbp(capsys, *given, *flags)
        assert (code, printed) == (2, ""), flags
        lines = [line for line in errors.splitlines() if line.startswith("hbp: error: ")]
        assert len(lines) == 1
        assert errors.splitlines()[-1] == lines[0]
        assert lines[0].startswith(words), flags
    code, printed, errors = hbp(capsys, *given)
    assert code == 0
    assert printed.startswith("WARNING")
    assert hbp(capsys, *given) == (0, printed, "")
