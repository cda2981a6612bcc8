"""Length tables: read, written, refused; and everywhere that --lengths is taken."""

import json

import numpy as np
import pytest

from examples.paper_lengths import paper_lengths, paper_table
from megatron_hbp.cli import main
from megatron_hbp.length_table import read_lengths, read_table, table_text

LEVELS = ["--level", "16:1", "--level", "32:2", "--ranks", "2"]


@pytest.fixture
def table(tmp_path):
    def written(text, name="lengths.csv"):
        path = tmp_path / name
        path.write_bytes(text.encode())
        return path

    return written


def test_every_length_as_often_as_counted(table):
    lengths = read_lengths(table("length,count\n3,2\n7,1\n\n"))
    assert lengths.dtype == np.int32
    assert lengths.tolist() == [3, 3, 7]


def test_spaces_and_other_line_ends(table):
    assert read_lengths(table(" length,count \r\n 3 , 2 \r\n")).tolist() == [3, 3]
    assert read_lengths(table("\ufefflength,count\r\n3,2\r\n")).tolist() == [3, 3]


def test_what_is_written_comes_back(table):
    rng = np.random.default_rng(5)
    lengths = np.unique(rng.integers(1, 2**31 - 1, 300))
    counts = rng.integers(1, 1000, len(lengths))
    found = read_table(table(table_text(lengths, counts)))
    np.testing.assert_array_equal(found[0], lengths)
    np.testing.assert_array_equal(found[1], counts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"line 1 is nothing; it must be `length,count`"),
        ("3,2\n", r"line 1 is '3,2'; it must be `length,count`"),
        ("length,count\n", r"has no row below its header"),
        ("length,count\n3,2\n3,1\n", r"line 3: length 3 comes after 3; .*ascending"),
        ("length,count\n4,2\n\n3,1\n", r"line 4: length 3 comes after 4"),
        ("length,count\n0,2\n", r"line 2 is '0,2'; give lines"),
        ("length,count\n3,0\n", r"line 2 is '3,0'; give lines"),
        ("length,count\n3\n", r"line 2 is '3'; give lines"),
        ("length,count\n3,2,1\n", r"line 2 is '3,2,1'"),
        ("length,count\n3,-2\n", r"line 2 is '3,-2'"),
        ("length,count\n3.5,2\n", r"line 2 is '3.5,2'"),
        ("length,count\n\u0663,2\n", r"line 2 is"),
        ("length,count\n3,9999999999999999999\n", r"line 2 is"),
        ("length,count\n3,3000000000\n", r"line 2: a length or the number of sequences so far"),
        ("length,count\n3000000000,1\n", r"line 2: a length or the number of sequences so far"),
        ("length,count\n3,2000000000\n4,2000000000\n", r"line 3: a length or the number"),
    ],
)
def test_what_is_no_table(table, text, said):
    path = table(text)
    with pytest.raises(ValueError, match=said) as caught:
        read_lengths(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read(tmp_path, table):
    with pytest.raises(ValueError, match=r"none.csv cannot be read \(.*No such file"):
        read_lengths(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"length,count\n\xff\xfe,2\n")
    with pytest.raises(ValueError, match=r"bytes.csv cannot be read"):
        read_lengths(tmp_path / "bytes.csv")


def test_a_table_plans_like_its_array(tmp_path, table, capsys):
    path = table("length,count\n5,40\n16,8\n31,3\n")
    np.save(tmp_path / "lengths.npy", np.repeat(np.array([5, 16, 31]), [40, 8, 3]))
    found = []
    for given in (path, tmp_path / "lengths.npy"):
        assert main(["plan", "--lengths", str(given), *LEVELS, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]


def test_a_table_audits_its_plan(tmp_path, table, capsys):
    path = str(table("length,count\n5,40\n16,8\n31,3\n"))
    folder = str(tmp_path / "plan")
    assert main(["plan", "--lengths", path, *LEVELS, "--output", folder]) == 0
    assert main(["audit", folder, "--lengths", path]) == 0
    other = str(table("length,count\n5,41\n16,8\n31,3\n", "other.csv"))
    assert main(["audit", folder, "--lengths", other]) != 0


def test_errors_of_a_table_are_one_line_of_the_command(table, capsys):
    argv = ["plan", "--lengths", str(table("length,count\n9\n", "BAD.CSV")), *LEVELS]
    assert main(argv) == 2
    assert "BAD.CSV, line 2 is '9'" in capsys.readouterr().err


def test_a_table_has_no_sources(tmp_path, table, capsys):
    np.save(tmp_path / "sources.npy", np.zeros(3, dtype=np.int64))
    argv = ["plan", "--lengths", str(table("length,count\n3,3\n")), *LEVELS]
    assert main([*argv, "--sources", str(tmp_path / "sources.npy")]) == 2
    assert "--sources goes with --lengths FILE.npy" in capsys.readouterr().err


@pytest.mark.parametrize("longest", [131_072, 32_768])
def test_the_papers_table_rounds_up_by_two_percent(table, longest):
    lengths = paper_lengths(20_000)
    kept = np.sort(lengths[lengths <= longest])
    rounded = np.sort(read_lengths(table(paper_table(20_000, longest))))
    assert len(rounded) == len(kept)
    assert rounded[-1] == longest
    # but for the last, which stands for the longest that may come
    assert (rounded[:-1] >= kept[:-1]).all()
    assert (rounded[:-1] <= np.maximum(kept[:-1] * 1.0205 + 1, kept[:-1])).all()


def test_a_table_that_would_be_empty():
    with pytest.raises(ValueError, match="no sample has 4 tokens or fewer; raise --longest"):
        paper_table(1000, 4)
