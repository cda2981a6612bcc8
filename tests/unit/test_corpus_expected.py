"""The made-up bad rows and the files of real rows: what each line becomes, with three tokenizers.

What a line should become is told beside the rows in EXPECTED.md; the texts here are written by hand
from it and from the rows.
"""

import json

import numpy as np
import pytest

from megatron_hbp.corpus.prepare import prepare_corpus
from megatron_hbp.corpus.tokenizer import Place, load_tokenizer
from tests.unit.corpus_samples import char_tokenizer, prepare, rejects, texts

NAMES = ["tt2k", "sp2k/tokenizer.model", "internlm2/tokenizer.model"]
REJECTED = {
    5: "no messages",
    6: "expected messages",
    8: "no trained token",
    9: "no answer: no message has the role assistant",
    15: "unknown role critic of message 1",
}
KEPT = [line for line in range(1, 21) if line not in REJECTED]
LONG = (17, 18)

# the whole text of each line with internlm2, whose pieces spell any text; {} is the end token
CALL = '[{"type": "function", "function": {"name": "w", "arguments": {"c": "X"}}}]'
TEXTS = {
    1: ["user\nplain question", "assistant\n", "plain answer"],
    2: ["user\nline\u2028sep\u2029and\u0085nel\u000bvt", "assistant\n", "a\u2028b"],
    3: ["user\nlone \ufffd high", "assistant\n", "ok"],
    4: ["user\npair \U0001f600", "assistant\n", "ok"],
    7: ["user\nhi", "assistant\n", "yo"],
    10: ["user\na", "user\nb", "assistant\n", "c"],
    14: ["user\nparts", "assistant\n", "ok"],
    16: ["user\n<|end_of_text|> injected <|begin_of_text|>", "assistant\n", "ok"],
    19: ["system\n", "user\na", "assistant\n", "b"],
    20: ["user\ndup", "assistant\n", "ok"],
}


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def edge(shared_data, name, tmp_path_factory):
    """(corpus of edge_cases.jsonl, index by line, tokenizer)."""
    path = shared_data / "tokenizer" / name
    rows = shared_data / "edge" / "edge_cases.jsonl"
    corpus = prepare(tmp_path_factory.mktemp("edge"), rows, path)
    return corpus, {line: i for i, line in enumerate(KEPT)}, load_tokenizer(path)


def accounts(corpus):
    counts = corpus.info["row_counts"]
    lost = counts["rows_rejected"] + counts.get("rows_dropped", 0)
    assert counts["rows_in"] == counts["rows_kept"] + lost
    assert counts["rows_kept"] == len(corpus)
    return counts["rows_in"], counts["rows_kept"]


def test_edge_lines_kept_and_rejected(edge):
    corpus, _, _ = edge
    assert accounts(corpus) == (20, 15)
    found = dict(rejects(corpus))
    assert list(found) == list(REJECTED)
    for line, reason in REJECTED.items():
        assert found[line].startswith(reason)
    assert found[6].endswith("found id")  # the keys that are there


def test_edge_strict_stops_at_line_5(tmp_path, shared_data, name):
    rows = shared_data / "edge" / "edge_cases.jsonl"
    with pytest.raises(ValueError, match=r"edge_cases\.jsonl:5: no messages") as error:
        prepare(tmp_path, rows, shared_data / "tokenizer" / name, strict=True)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize("line", TEXTS)
def test_edge_texts(edge, name, line):
    corpus, index, tokenizer = edge
    tokens, mask = corpus.tokens(index[line]), corpus.mask(index[line])
    whole, trained = tokenizer.decode(tokens.tolist()), tokenizer.decode(tokens[mask == 1].tolist())
    *context, header, answer = TEXTS[line]
    end = {"tt2k": "<|end_of_text|>"}.get(name, "</s>")
    start = {"tt2k": "<|begin_of_text|>"}.get(name, "<s>")
    expected = start + "".join(f"{text}{end}" for text in context) + f"{header}{answer}{end}"
    if name == "internlm2/tokenizer.model":
        assert (whole, trained) == (expected, f"{answer}{end}")
        return
    # the others have no id for some characters: white space goes, or what is unknown is <unk>
    assert trained.endswith(end)
    known = "".join(char for char in expected if char.isascii() and not char.isspace())
    found = "".join(char for char in whole if not char.isspace())
    if name == "tt2k":
        assert found.replace("\u000b", "") == known
    elif line not in (4, 16, 2):
        assert found == known
    else:
        assert "<unk>" in found


def test_edge_line_4_is_one_emoji(tmp_path, shared_data):
    corpus = prepare(
        tmp_path,
        shared_data / "edge" / "edge_cases.jsonl",
        shared_data / "tokenizer" / "internlm2" / "tokenizer.model",
    )
    tokenizer = load_tokenizer(shared_data / "tokenizer" / "internlm2" / "tokenizer.model")
    assert tokenizer.decode(corpus.tokens(3).tolist()).count("\U0001f600") == 1
    assert "\ufffd" not in tokenizer.decode(corpus.tokens(3).tolist())
    assert tokenizer.decode(corpus.tokens(2).tolist()).count("\ufffd") == 1


def test_edge_texts_byte_for_byte(tmp_path, shared_data):
    """With a token per byte nothing can be unknown."""
    tokenizer = char_tokenizer(tmp_path / "t", template=None)
    corpus = prepare(tmp_path, shared_data / "edge" / "edge_cases.jsonl", tokenizer)
    assert [line for line, _ in rejects(corpus)] == list(REJECTED)
    for line, (*context, header, answer) in TEXTS.items():
        whole, trained = texts(corpus, tokenizer, KEPT.index(line))
        context_text = "".join(f"{text}</s>" for text in context)
        assert whole == f"<s>{context_text}{header}{answer}</s>"
        assert trained == f"{answer}</s>"


def test_edge_line_11_trains_both_answers(edge):
    corpus, index, tokenizer = edge
    tokens, mask = corpus.tokens(index[11]), corpus.mask(index[11])
    trained = tokenizer.decode(tokens[mask == 1].tolist()).replace(" ", "")
    end = next(t for t, token in tokenizer.control_tokens.by_text.items()
               if token.id == tokenizer.end_id)  # fmt: skip
    assert trained == f"Istart{end}c{end}"


def test_br_c06_edge_lines_12_and_13_are_the_same(edge, name):
    corpus, index, tokenizer = edge
    np.testing.assert_array_equal(corpus.tokens(index[12]), corpus.tokens(index[13]))
    np.testing.assert_array_equal(corpus.mask(index[12]), corpus.mask(index[13]))
    tokens, mask = corpus.tokens(index[12]), corpus.mask(index[12])
    result = tokenizer.encode(['{"t":1}'], [Place.AFTER_TEXT])[0]
    assert tokenizer.decode(result)[-3:] in tokenizer.decode(tokens[mask == 0].tolist())
    trained = tokenizer.decode(tokens[mask == 1].tolist())
    assert '"t"' not in trained
    if name == "internlm2/tokenizer.model":
        assert trained == f"{CALL}</s>one degree</s>"
    elif name == "tt2k":  # whose own template does not print calls, which is noted
        assert trained == "onedegree<|end_of_text|>"
        assert any("does not print tool calls" in note for note in corpus.info["notes"])


def test_edge_line_16_has_no_control_token_of_its_content(edge):
    corpus, index, tokenizer = edge
    tokens = corpus.tokens(index[16]).tolist()
    control = [token for token in tokens if token in tokenizer.control_tokens.ids]
    assert control == [tokenizer.start_id, tokenizer.end_id, tokenizer.end_id]
    # so it is of the same shape as a row without such text
    plain = corpus.tokens(index[20]).tolist()
    assert control == [token for token in plain if token in tokenizer.control_tokens.ids]


@pytest.mark.parametrize("line", LONG)
def test_edge_long_lines_are_whole_without_a_limit(edge, line):
    corpus, index, tokenizer = edge
    tokens, mask = corpus.tokens(index[line]), corpus.mask(index[line])
    assert len(tokens) > 7000
    assert tokens[-1] == tokenizer.end_id
    trained = tokenizer.decode(tokens[mask == 1].tolist())
    assert ("x" if line == 17 else "y") * 60_000 in tokenizer.decode(tokens.tolist())
    assert trained.count("y") == (0 if line == 17 else 60_000)


def limited(tmp_path, shared_data, name, overlong):
    rows = shared_data / "edge" / "edge_cases.jsonl"
    path = shared_data / "tokenizer" / name
    options = {"max_length": 1000} | ({"overlong": overlong} if overlong else {})
    return prepare_corpus([rows], path, tmp_path / "corpus", **options)


@pytest.mark.parametrize("overlong", [None, "error"])
def test_edge_long_lines_stop_by_default(tmp_path, shared_data, name, overlong):
    with pytest.raises(ValueError, match=r"edge_cases\.jsonl:17: over-long: \d+ tokens, .*1000"):
        limited(tmp_path, shared_data, name, overlong)
    assert not (tmp_path / "corpus").exists()


def test_edge_long_lines_dropped(tmp_path, shared_data, name, edge):
    corpus = limited(tmp_path, shared_data, name, "drop")
    whole, index, _ = edge
    assert accounts(corpus) == (20, 13)
    found = dict(rejects(corpus))
    assert list(found) == sorted([*REJECTED, *LONG])
    lengths = [int(whole.seq_lens[index[line]]) for line in LONG]
    for line, length in zip(LONG, lengths, strict=True):
        assert found[line] == f"over-long: {length} tokens, the maximum is 1000"
    counts = corpus.info["row_counts"]
    assert counts["rows_dropped"] == 2
    assert counts["tokens_dropped"] == sum(lengths)
    assert counts["tokens_in"] == int(whole.seq_lens.sum())
    assert counts["tokens_kept"] == counts["tokens_in"] - sum(lengths) == corpus.seq_lens.sum()


def test_edge_long_lines_truncated(tmp_path, shared_data, name, edge):
    """The long question leaves nothing to train; of the long answer its beginning is kept."""
    corpus = limited(tmp_path, shared_data, name, "truncate")
    whole, index, _ = edge
    question, answer = (int(whole.seq_lens[index[line]]) for line in LONG)
    assert accounts(corpus) == (20, 14)
    found = dict(rejects(corpus))
    assert list(found) == sorted([*REJECTED, *LONG])
    assert found[17].startswith("no trainable token")
    assert found[18] == f"over-long: {answer} tokens, the maximum is 1000; {answer - 1000} cut"
    kept = [line for line in KEPT if line != 17].index(18)
    np.testing.assert_array_equal(corpus.tokens(kept), whole.tokens(index[18], 1000))
    np.testing.assert_array_equal(corpus.mask(kept), whole.mask(index[18], 1000))
    counts = corpus.info["row_counts"]
    assert (counts["rows_dropped"], counts["rows_truncated"]) == (1, 1)
    assert (counts["tokens_dropped"], counts["tokens_truncated"]) == (question, answer - 1000)


def test_br_m03_malformed_lines(tmp_path, shared_data, name):
    tokenizer = shared_data / "tokenizer" / name
    corpus = prepare(tmp_path, shared_data / "edge" / "malformed.jsonl", tokenizer)
    assert accounts(corpus) == (8, 4)
    found = rejects(corpus)
    assert [line for line, _ in found] == [3, 4, 6, 7]
    assert found[0][1].startswith("not JSON: Unterminated string")
    assert found[1][1].startswith("not JSON: Expecting value")
    assert found[2][1].startswith("expected messages")
    assert found[2][1].endswith("found id")
    assert found[3][1] == "messages is text, not a list"
    assert corpus.info["row_counts"]["blank_lines"] == 0
    loaded = load_tokenizer(tokenizer)
    decoded = [loaded.decode(corpus.tokens(i).tolist()) for i in range(4)]
    for text, word in zip(decoded, ("one", "two", "five", "eight"), strict=True):
        assert word in text
        assert "\r" not in text


def test_br_m03_malformed_strict_stops_at_line_3(tmp_path, shared_data, name):
    path = shared_data / "edge" / "malformed.jsonl"
    with pytest.raises(ValueError, match=r"malformed\.jsonl:3: not JSON: Unterminated") as error:
        prepare(tmp_path, path, shared_data / "tokenizer" / name, strict=True)
    assert "\n" not in str(error.value)


def _image_rows(rows):
    """(line, reason) of rows with pictures or films."""
    expected = []
    for line, row in enumerate(rows, start=1):
        for number, message in enumerate(row["messages"], start=1):
            parts = message["content"] if isinstance(message["content"], list) else []
            kinds = [part["type"] for part in parts if part["type"] != "text"]
            if kinds:
                expected.append((line, f"unsupported content part {kinds[0]} in message {number}"))
                break
    return expected


FILES = {
    "mixed_long_short": 887,
    "glaive_toolcall_en": 300,
    "glaive_toolcall_zh": 300,
    "gsm8k_test": 1319,
    "xtuner_tools_think": 17,
    "fastchat_dummy": 500,
    "axolotl_fixtures": 2,
    "self_instruct_seed": 175,
    "qmsum_long": 58,
    "qmsum_spans": 348,
}
# many of their rows are in mixed_long_short
SLOW_FILES = ("qmsum_long", "qmsum_spans")


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=pytest.mark.slow) if file in SLOW_FILES else file for file in FILES],
)
def test_br_c05_whole_files(tmp_path, shared_data, name, file):
    """No row of a real file is lost but those with pictures or films, which are no text."""
    path = shared_data / "messages" / f"{file}.jsonl"
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    corpus = prepare(tmp_path, path, shared_data / "tokenizer" / name)
    lost = _image_rows(rows)
    assert [line for line, _ in lost] == (
        [13, 14, 15, 16, 17] if file == "xtuner_tools_think" else []
    )
    assert accounts(corpus) == (FILES[file], FILES[file] - len(lost))
    assert rejects(corpus) == lost
    assert (corpus.num_trained > 0).all()
    assert int(corpus.num_trained.sum()) == corpus.info["trained_tokens"]
    # as many end tokens are trained as answers say something
    end, answers = corpus.end_id, 0
    lost_lines = {line for line, _ in lost}
    for line, row in enumerate(rows, start=1):
        for message in row["messages"] if line not in lost_lines else []:
            if message["role"] != "assistant" or message.get("loss", True) is False:
                continue
            calls = message.get("tool_calls") if name != "tt2k" else None  # which prints none
            answers += bool((message["content"] or "").strip() or calls)
    trained_ends = sum(
        int(((corpus.tokens(i) == end) & (corpus.mask(i) == 1)).sum()) for i in range(len(corpus))
    )
    assert trained_ends == answers
