"""Printed rows: what is trained can be read off, whole characters, nothing acts on the terminal."""

import re
from io import StringIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.style import Style

from megatron_hbp.corpus import show
from megatron_hbp.corpus.rows import RowError
from megatron_hbp.corpus.tokenizer import Place, load_tokenizer
from tests.unit.corpus_samples import (
    char_tokenizer,
    chat,
    decoder,
    prepare,
)

EMOJI = "\U0001f600"
NAMES = ["tt2k", "sp2k/tokenizer.model", "internlm2/tokenizer.model"]
ANSI = re.compile(r"\x1b\[([0-9;]*)m")
GREEN = ("48;5;40", "48;5;77")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return char_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def byte_tokenizer(folder):
    return load_tokenizer(folder)


def ids_of(tokenizer, *parts):
    """(tokens, mask) of (text or control token's id, trained) pairs."""
    tokens, mask = [], []
    for part, trained in parts:
        ids = [part] if isinstance(part, int) else tokenizer.encode([part], [Place.AFTER_TEXT])[0]
        tokens += ids
        mask += [trained] * len(ids)
    return np.array(tokens, dtype=np.int64), np.array(mask, dtype=np.uint8)


def plain(tokens, mask, tokenizer, where="rows.jsonl:3"):
    file = StringIO()
    show.print_row(Console(file=file, width=40), where, tokens, mask, tokenizer)
    return file.getvalue()


def body(*arguments):
    printed = plain(*arguments)
    return printed[printed.index("\n") + 1 :]


def coloured(tokens, mask, tokenizer, *, color_system="256", **console):
    file = StringIO()
    terminal = Console(
        file=file, width=40, force_terminal=True, color_system=color_system, _environ={}, **console
    )
    show.print_row(terminal, "rows.jsonl:3", tokens, mask, tokenizer)
    printed = file.getvalue()
    return printed[printed.index("\n") + 1 :]


def styled(printed):
    """[(style codes, text)] of what was printed, neighbours of one style joined."""
    pieces, style = [], ""
    for i, piece in enumerate(ANSI.split(printed)):
        if i % 2:
            style = piece
        elif piece and pieces and pieces[-1][0] == style:
            pieces[-1] = (style, pieces[-1][1] + piece)
        elif piece:
            pieces.append((style, piece))
    return pieces


def green_text(printed):
    return "".join(text for style, text in styled(printed) if style.endswith(GREEN))


def test_without_colour_the_trained_text_is_marked(byte_tokenizer):
    end = byte_tokenizer.control_tokens.by_text["<|im_end|>"].id
    tokens, mask = ids_of(
        byte_tokenizer, ("ask ", 0), ("say", 1), (end, 1), ("\nask ", 0), ("more", 1), (end, 1)
    )
    assert plain(tokens, mask, byte_tokenizer) == (
        "rows.jsonl:3  18 tokens, 9 trained (50.0%)\n"
        "ask {+say<|im_end|>+}\nask {+more<|im_end|>+}\n\n"
    )


def test_legend_says_how_trained_text_looks():
    file = StringIO()
    show.print_legend(Console(file=file, width=40))
    assert file.getvalue().startswith("{+trained+} tokens, all others are masked")
    file = StringIO()
    show.print_legend(Console(file=file, force_terminal=True, color_system="256", _environ={}))
    assert green_text(file.getvalue()) == "trained tokens"
    assert "{+" not in file.getvalue()


def test_with_colour_trained_tokens_are_green_and_take_turns(byte_tokenizer):
    end = byte_tokenizer.control_tokens.by_text["<|im_end|>"].id
    tokens, mask = ids_of(byte_tokenizer, ("q<>", 0), (end, 0), (" ab", 1), (end, 1), ("\n", 0))
    assert styled(coloured(tokens, mask, byte_tokenizer)) == [
        ("39", "q<>"),
        ("1;39", "<|im_end|>"),
        ("30;48;5;40", " "),
        ("30;48;5;77", "a"),
        ("30;48;5;40", "b"),
        ("1;30;48;5;77", "<|im_end|>"),
        ("0", "\n\n"),
    ]


def test_control_text_in_content_is_not_bold(byte_tokenizer):
    end = byte_tokenizer.control_tokens.by_text["<|im_end|>"].id
    tokens, mask = ids_of(byte_tokenizer, ("<|im_end|>", 0), (end, 0))
    assert styled(coloured(tokens, mask, byte_tokenizer))[:2] == [
        ("39", "<|im_end|>"),
        ("1;39", "<|im_end|>"),
    ]


@pytest.mark.parametrize(
    "console",
    [
        {"file": StringIO()},
        {"force_terminal": True, "_environ": {"NO_COLOR": "1"}},
        {"force_terminal": True, "_environ": {"TERM": "dumb"}},
        {"force_terminal": True, "no_color": True},
    ],
)
def test_no_colour_means_no_escape_codes(byte_tokenizer, console):
    file = StringIO()
    terminal = Console(**{"file": file, **console})
    tokens, mask = ids_of(byte_tokenizer, ("ab", 0), ("cd", 1))
    show.print_row(terminal, "f:1", tokens, mask, byte_tokenizer)
    show.print_legend(terminal)
    show.print_reject(terminal, "f:2", RowError("no answer"))
    printed = terminal.file.getvalue()
    assert "ab{+cd+}" in printed
    assert "\x1b" not in printed


def test_sixteen_colours_are_enough(byte_tokenizer):
    Style.parse.cache_clear()  # rich keeps a style's codes for the first terminal it is used on
    Style._add.cache_clear()
    tokens, mask = ids_of(byte_tokenizer, ("ab", 0), ("cd", 1))
    printed = coloured(tokens, mask, byte_tokenizer, color_system="standard")
    Style.parse.cache_clear()
    Style._add.cache_clear()
    assert styled(printed)[:3] == [("39", "ab"), ("30;42", "c"), ("30;102", "d")]


def test_characters_of_several_tokens_come_out_once(byte_tokenizer):
    text = f"\u00e4{EMOJI}\u4e2d\ufffd{EMOJI}"
    tokens, mask = ids_of(byte_tokenizer, (text, 0), (text, 1), (text, 0))
    assert len(tokens) > 3 * len(text)
    assert body(tokens, mask, byte_tokenizer) == f"{text}{{+{text}+}}{text}\n\n"
    assert green_text(coloured(tokens, mask, byte_tokenizer)) == text


def test_a_mask_that_changes_inside_a_character(byte_tokenizer):
    tokens, _ = ids_of(byte_tokenizer, (f"a{EMOJI}b", 0))
    assert len(tokens) == 6
    shown = body(tokens, np.array([0, 0, 0, 1, 1, 1], dtype=np.uint8), byte_tokenizer)
    assert re.fullmatch(rf"a\ufffd+{{\+[\ufffd{EMOJI}]+b\+}}\n\n", shown)


def test_markup_is_not_read(byte_tokenizer):
    text = "[bold]x[/bold] :smile: [link=https://a.b]y[/link] [/] \\[red]"
    tokens, mask = ids_of(byte_tokenizer, (text, 0), (text, 1))
    assert body(tokens, mask, byte_tokenizer) == f"{text}{{+{text}+}}\n\n"
    assert green_text(coloured(tokens, mask, byte_tokenizer)) == text
    file = StringIO()
    show.print_reject(Console(file=file), "[red]f:1", RowError("kind", "unknown role [bold]"))
    assert file.getvalue() == "[red]f:1  rejected: unknown role [bold]\n\n"


ACTING = {
    "\x1b[2J": r"\x1b[2J",
    "a\rb": r"a\rb",
    "a\bb": r"a\x08b",
    "\x07\x00\x7f\x9b\x0b\x0c": r"\x07\x00\x7f\x9b\x0b\x0c",
    "\u202eabc\u202c\u2066d": r"\u202eabc\u202c\u2066d",
    "\u200b\ufeff\u00ad\u2028\u0085": r"\u200b\ufeff\xad\u2028\x85",
    "\U000e0041": r"\U000e0041",
}


@pytest.mark.parametrize("text", ACTING)
def test_nothing_acts_on_the_terminal(byte_tokenizer, text):
    expected = ACTING[text]
    tokens, mask = ids_of(byte_tokenizer, (text, 0), (text, 1))
    assert body(tokens, mask, byte_tokenizer) == f"{expected}{{+{expected}+}}\n\n"
    printed = coloured(tokens, mask, byte_tokenizer)
    assert green_text(printed) == expected
    assert not set(ANSI.sub("", printed)) & set(text) - set(expected)
    file = StringIO()
    show.print_reject(Console(file=file), f"{text}:1", RowError("k", f"role {text}\n"))
    assert file.getvalue() == f"{expected}:1  rejected: role {expected}\\n\n\n"


def test_joined_emoji_stay_whole(byte_tokenizer):
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
    tokens, mask = ids_of(byte_tokenizer, (family, 1))
    assert body(tokens, mask, byte_tokenizer) == f"{{+{family}+}}\n\n"


def test_line_ends_and_tabs_of_trained_text_are_marked(byte_tokenizer):
    tokens, mask = ids_of(byte_tokenizer, ("q\n\tr\n", 0), ("a\n\tb\n", 1))
    shown = re.sub(" +", " ", body(tokens, mask, byte_tokenizer))  # a tab is printed as spaces
    assert shown == "q\n r\n{+a\u21b5\n\u21e5 b\u21b5\n+}\n\n"
    printed = green_text(coloured(tokens, mask, byte_tokenizer))
    assert printed == f"a\u21b5\u21e5{7 * ' '}b\u21b5"  # the line ends themselves have no colour


def test_lines_are_not_folded_and_spaces_stay(byte_tokenizer):
    text = "word  " * 30
    tokens, mask = ids_of(byte_tokenizer, (text, 0), (text, 1))
    assert body(tokens, mask, byte_tokenizer) == f"{text}{{+{text}+}}\n\n"


@pytest.mark.parametrize("trained", [0, 1])
def test_long_stretches_show_their_ends_and_what_is_left_out(byte_tokenizer, trained):
    text = "".join(chr(ord("a") + i % 26) for i in range(6000))
    tokens, mask = ids_of(byte_tokenizer, ("q", 1 - trained), (text, trained))
    ends = 2000 if trained else 300
    shown = body(tokens, mask, byte_tokenizer)
    left_out = f"{text[:ends]}[... {6000 - 2 * ends:,} tokens ...]{text[-ends:]}"
    assert shown == (f"q{{+{left_out}+}}\n\n" if trained else f"{{+q+}}{left_out}\n\n")
    assert f"[... {6000 - 2 * ends:,} tokens ...]" in ANSI.sub(
        "", coloured(tokens, mask, byte_tokenizer)
    )


@pytest.mark.parametrize("length", [600, 601, 619, 620])
def test_leaving_out_a_few_tokens_saves_nothing(byte_tokenizer, length):
    text = "x" * length
    tokens, mask = ids_of(byte_tokenizer, (text, 0))
    shown = body(tokens, mask, byte_tokenizer).strip()
    assert shown == (text if length < 620 else f"{'x' * 300}[... 20 tokens ...]{'x' * 300}")


@settings(deadline=None, max_examples=60)
@given(st.text(st.sampled_from(f"ab \u00e4\u4e2d{EMOJI}"), min_size=1, max_size=1500))
def test_every_token_is_shown_or_counted(byte_tokenizer, text):
    tokens, mask = ids_of(byte_tokenizer, (text, 0))
    pieces = list(show._shown(tokens.tolist(), 0, len(tokens), False, byte_tokenizer))
    assert [start for start, _, _ in pieces] == [0, *(stop for _, stop, _ in pieces[:-1])]
    assert pieces[-1][1] == len(tokens)
    shown = body(tokens, mask, byte_tokenizer).removesuffix("\n\n")
    before, _, after = shown.partition("[...")
    assert text.startswith(before)
    assert text.endswith(after.partition("...]")[2])
    assert shown.count("[...") == sum(text is None for _, _, text in pieces) <= 1


def test_tokens_without_text_are_shown_by_id(byte_tokenizer):
    tokens = np.array([65, 9999, -1, 66], dtype=np.int64)
    mask = np.array([0, 1, 1, 0], dtype=np.uint8)
    first, last = byte_tokenizer.decode([65]), byte_tokenizer.decode([66])
    assert body(tokens, mask, byte_tokenizer) == f"{first}{{+<id 9999><id -1>+}}{last}\n\n"


def test_a_row_without_tokens(byte_tokenizer):
    printed = plain(np.empty(0, np.int64), np.empty(0, np.uint8), byte_tokenizer)
    assert printed == "rows.jsonl:3  0 tokens, 0 trained\n\n\n"


def test_an_encoding_without_the_characters_gets_escapes(byte_tokenizer):
    class Ascii(StringIO):
        encoding = "ascii"

    for options in ({}, {"force_terminal": True, "color_system": "256"}):
        file = Ascii()
        console = Console(file=file, **options)
        tokens, mask = ids_of(byte_tokenizer, (f"{EMOJI}q", 0), ("a\n", 1))
        show.print_legend(console)
        show.print_row(console, "f:1", tokens, mask, byte_tokenizer)
        assert file.getvalue().isascii()
        assert "\\U0001f600q{+a\\u21b5\n+}" in file.getvalue()


def seen(text):
    """The text as `print_row` has it, its marks aside."""
    return "".join(show._escaped_char(char) if char not in "\n\t" else char for char in text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("file", ["glaive_toolcall_en", "glaive_toolcall_zh", "gsm8k_test"])
def test_real_rows_read_as_their_tokens_decode(tmp_path, shared_data, name, file):
    path = shared_data / "tokenizer" / name
    lines = (shared_data / "messages" / f"{file}.jsonl").read_bytes().splitlines(True)[:25]
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(lines))
    corpus, tokenizer, decode = prepare(tmp_path, rows, path), load_tokenizer(path), decoder(path)
    for i in range(len(corpus)):
        tokens, mask = corpus.tokens(i), corpus.mask(i)
        pieces = list(show._pieces(tokens.tolist(), 0, len(tokens), tokenizer))
        assert "".join(text for _, _, text in pieces) == decode(tokens)
        marked = re.findall(r"\{\+(.*?)\+\}", plain(tokens, mask, tokenizer), re.DOTALL)
        joined = "".join(marked).replace("\u21b5", "").replace("\u21e5", "")
        if "tokens ...]" not in joined:
            assert joined == seen(decode(tokens[mask == 1]))


@pytest.mark.parametrize("name", NAMES)
def test_real_long_rows_are_short_to_read(tmp_path, shared_data, name):
    path = shared_data / "tokenizer" / name
    lines = (shared_data / "messages" / "mixed_long_short.jsonl").read_bytes().splitlines(True)
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"".join(sorted(lines, key=len)[-3:]))
    corpus, tokenizer = prepare(tmp_path, rows, path), load_tokenizer(path)
    for i in range(3):
        tokens, mask = corpus.tokens(i), corpus.mask(i)
        printed = plain(tokens, mask, tokenizer)
        counts = re.findall(r"\[\.\.\. ([0-9,]+) tokens \.\.\.\]", printed)
        assert sum(int(count.replace(",", "")) for count in counts) > 4000
        assert len(printed) < 12_000
        assert f"{len(tokens):,} tokens, {int(mask.sum()):,} trained" in printed


@pytest.mark.parametrize("name", ["internlm2/tokenizer.model"])
def test_leading_spaces_and_byte_pieces_of_sentencepiece(shared_data, name):
    tokenizer = load_tokenizer(shared_data / "tokenizer" / name)
    end = tokenizer.end_id
    text = " two  spaces \U0001f9ff\u9f98 end "
    tokens, mask = ids_of(tokenizer, ("q", 0), (end, 0), (text, 1), (end, 1), (text, 0))
    assert body(tokens, mask, tokenizer) == f"q</s>{{+{text}</s>+}}{text}\n\n"


def test_the_row_of_a_corpus(tmp_path, folder, byte_tokenizer):
    corpus = prepare(tmp_path, [chat("sua", ["s", "q", f" a{EMOJI}\n"])], folder)
    assert body(corpus.tokens(0), corpus.mask(0), byte_tokenizer) == (
        "<s><|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"
        f"<|im_start|>assistant\n{{+ a{EMOJI}\u21b5\n<|im_end|>+}}\n\n"
    )
