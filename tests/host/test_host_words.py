"""Errors of the host as one line that says what to do."""

import pytest

from megatron_hbp.host import host_words
from megatron_hbp.host.host_words import is_host, last_words, own_words


def _raised(path: str, source: str) -> Exception:
    """What the source raises, as if it stood in that file."""
    try:
        exec(compile(source, path, "exec"), {})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("assert 1 > 2", "Megatron refuses these flags: not (assert 1 > 2) (x.py, <module>); chan"),
        ("assert 1 > 2, 'one\\nline'", "Megatron refuses these flags: one line (x.py, <module>); "),
        ("import no_such_module", "Megatron does not find what these flags need: No module named"),
        (
            "raise RuntimeError('Z is not installed.')",
            "Megatron does not find what these flags need: Z is not installed. (x.py, <module>);",
        ),
        (
            "raise ValueError('no X. Please install TE >= 2.1.0.')",
            "Megatron refuses these flags with the Transformer Engine that is assumed: no X.",
        ),
    ],
)
def test_what_the_host_raises(tmp_path, source, words):
    file = tmp_path / "megatron" / "x.py"
    file.parent.mkdir()
    file.write_text(source)
    error = _raised(str(file), source)
    assert is_host(error)
    text = host_words.host_words(error)
    assert text.startswith(words)
    assert "\n" not in text


def test_a_tokenizer_whose_files_are_elsewhere(tmp_path):
    folder = tmp_path / "megatron" / "tokenizers"
    error = _raised(str(folder / "x.py"), "raise OSError('no such file')")
    assert host_words.host_words(error) == (
        "the tokenizer cannot be made here: no such file (x.py, <module>); only its size counts: "
        "check with --tokenizer-type NullTokenizer --vocab-size N, or where its files are"
    )


def test_an_error_of_the_check_is_no_verdict(tmp_path):
    error = _raised(str(tmp_path / "megatron_hbp" / "x.py"), "1 / 0")
    assert not is_host(error)
    assert own_words(error) == (
        "the check cannot go on: ZeroDivisionError: division by zero (x.py, <module>); this says "
        "nothing about the flags"
    )


def test_one_line_of_ours_is_kept():
    assert last_words(SystemExit("megatron_hbp: error: too few; use more")) == "too few; use more"
