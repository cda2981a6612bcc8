"""Blocks: every row of every kind of file, from any place on, and damage that is named."""

import dataclasses
import gzip
import json
import re
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp.corpus.blocks import START, Position, block_rows, read_blocks
from megatron_hbp.corpus.inputs import find_inputs

INSIDE = "x\u2028y\u2029z\u0085w\u000b"
KINDS = ("jsonl", "jsonl.gz", "json", "json.gz", "parquet", "stream.arrow", "file.arrow")


def write(folder, rows, kind, name="rows"):
    """A file of rows of the given kind."""
    path = folder / f"{name}.{kind}"
    if kind.startswith("json"):
        texts = [json.dumps(row, ensure_ascii=False) for row in rows]
        lines = kind.startswith("jsonl")
        data = ("\n".join(texts) + "\n" if lines else "[" + ",\n ".join(texts) + "]\n").encode()
        path.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    else:
        table = pa.Table.from_pylist(rows)
        new = pa.ipc.new_stream if kind.startswith("stream") else pa.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return path


def blocks(path, start=START, target_bytes=1 << 20, columns=None):
    (file,) = find_inputs([path])
    return list(read_blocks(file, start, target_bytes, columns))


def rows_of(found):
    return [row for block in found for row in block_rows(block)]


def values(rows):
    return [json.loads(row) if isinstance(row, bytes) else row for _, row in rows]


def failure(path, **options) -> str:
    with pytest.raises(ValueError, match=path.name) as error:
        blocks(path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_br_m01_rows_are_split_at_lf_only(tmp_path, kind):
    rows = [{"messages": text} for text in ("a", INSIDE, "b")]
    path = write(tmp_path, rows, kind)
    found = rows_of(blocks(path))
    assert [number for number, _ in found] == [1, 2, 3]
    assert values(found) == rows


@pytest.mark.parametrize(("end", "last"), [("\n", "\n"), ("\r\n", "\r\n"), ("\n", "")])
@pytest.mark.parametrize("target_bytes", [1, 7, 1 << 20])
def test_br_m01_line_ends(tmp_path, end, last, target_bytes):
    rows = [json.dumps({"messages": text}, ensure_ascii=False) for text in ("a", INSIDE, "b")]
    assert "\u2028" in rows[1]
    for packed in (False, True):
        path = tmp_path / "rows.jsonl"
        data = (end.join(rows) + last).encode()
        path.write_bytes(gzip.compress(data) if packed else data)
        found = rows_of(blocks(path, target_bytes=target_bytes))
        assert [number for number, _ in found] == [1, 2, 3]
        assert [row.decode() for _, row in found] == rows


@pytest.mark.parametrize("target_bytes", [1, 5, 1 << 20])
def test_blank_lines_keep_their_number(tmp_path, target_bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf{}\n\n \t\r\n{}\n\n")
    expected = [(1, b"{}"), (2, b""), (3, b""), (4, b"{}"), (5, b"")]
    assert rows_of(blocks(path, target_bytes=target_bytes)) == expected


def test_a_byte_order_mark_counts_at_the_start_only(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"{}\n\xef\xbb\xbf{}\n")
    assert rows_of(blocks(path, target_bytes=1)) == [(1, b"{}"), (2, b"\xef\xbb\xbf{}")]


ALPHABET = st.sampled_from([b"\n", b"\r", b"\r\n", b"\xef\xbb\xbf", "\u2028".encode(), b"ab", b" "])


@settings(max_examples=200, deadline=None)
@given(
    data=st.lists(st.one_of(ALPHABET, st.binary(max_size=6)), min_size=1).map(b"".join),
    target_bytes=st.integers(1, 20),
    packed=st.booleans(),
)
def test_lines_are_whole_and_reading_goes_on_anywhere(tmp_path_factory, data, target_bytes, packed):
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    data = b"{" + data  # no other kind of file starts like this
    path.write_bytes(gzip.compress(data) if packed else data)
    lines = data.split(b"\n")
    lines = lines if lines[-1] else lines[:-1]
    expected = [(number, line.strip(b" \t\r")) for number, line in enumerate(lines, start=1)]
    whole = blocks(path, target_bytes=target_bytes)
    assert rows_of(whole) == expected
    assert b"".join(block.payload for block in whole) == data
    for index, block in enumerate(whole):
        assert len(block.payload) <= target_bytes or block.payload.count(b"\n") <= 1
        assert blocks(path, block.end, target_bytes) == whole[index + 1 :]
        assert rows_of(blocks(path, block.end, 3)) == rows_of(whole[index + 1 :])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target_bytes", [1, 100, 1 << 20])
def test_reading_goes_on_from_every_block(tmp_path, kind, target_bytes):
    rows = [{"messages": "x" * (i % 9 * 20), "n": i} for i in range(40)]
    whole = blocks(write(tmp_path, rows, kind), target_bytes=target_bytes)
    assert values(rows_of(whole)) == rows
    assert [number for number, _ in rows_of(whole)] == list(range(1, 41))
    reads = [block.read for block in whole]
    size = (tmp_path / f"rows.{kind}").stat().st_size
    assert reads == sorted(reads)
    assert 0 < reads[0] <= reads[-1] <= size
    for index, block in enumerate(whole):
        end = Position(**json.loads(json.dumps(dataclasses.asdict(block.end))))
        rest = rows_of(blocks(tmp_path / f"rows.{kind}", end, 150))
        assert rest == rows_of(whole[index + 1 :])


def test_blocks_are_about_as_big_as_asked_for(tmp_path):
    rows = [{"messages": "x" * 100} for _ in range(2000)]
    for kind in KINDS:
        found = blocks(write(tmp_path, rows, kind), target_bytes=20_000)
        assert 8 <= len(found) <= 300, kind
        assert max(len(block.payload) for block in found) < 30_000, kind


def test_gzip_of_several_members(tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n{"a"') + gzip.compress(b": 2}\n") + b"\0" * 8)
    assert values(rows_of(blocks(path, target_bytes=4))) == [{"a": 1}, {"a": 2}]


def noisy_rows(count):
    generator = np.random.default_rng(0)
    return [{"messages": generator.bytes(60).hex()} for _ in range(count)]


@pytest.mark.parametrize("kind", ["jsonl.gz", "json.gz"])
@pytest.mark.parametrize("target_bytes", [1000, 1 << 22])
def test_a_cut_gzip_is_named_with_its_whole_rows(tmp_path, kind, target_bytes):
    rows = noisy_rows(5000)
    path = write(tmp_path, rows, kind)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (file,) = find_inputs([path])
    found = []
    with pytest.raises(ValueError, match=r"rows.*gz is cut or damaged after (\d+) whole") as error:
        found.extend(block_rows(block) for block in read_blocks(file, target_bytes=target_bytes))
    count = int(re.search(r"after (\d+) whole", str(error.value)).group(1))
    read = values([row for block in found for row in block])
    assert read == rows[:count]
    assert 2000 < count < 3000


def test_every_damage_of_a_gzip_is_seen(tmp_path):
    good = gzip.compress(b'{"a": 1}\n' * 1000)
    path = tmp_path / "rows.jsonl.gz"
    for bad in (good[:-3], good[:-8], good[:-8] + b"\1" * 8, good + b"more", good + good[:40]):
        path.write_bytes(bad)
        assert "cut or damaged after" in failure(path)
        assert "cut or damaged after" in failure(path, target_bytes=50)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_became_shorter_is_named(tmp_path, kind):
    path = write(tmp_path, [{"messages": "m"}] * 3, kind)
    end = blocks(path)[-1].end
    assert blocks(path, end) == []
    past = Position(end.at + 100, end.number + 100)
    assert "shorter than when it was read before" in failure(path, start=past)


@settings(max_examples=100, deadline=None)
@given(
    items=st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=8,
        ),
        max_size=6,
    ),
    indent=st.sampled_from([None, 0, 2]),
    is_ascii=st.booleans(),
    target_bytes=st.integers(1, 40),
)
def test_arrays_give_their_items(tmp_path_factory, items, indent, is_ascii, target_bytes):
    path = tmp_path_factory.mktemp("array") / "rows.json"
    text = json.dumps(items, indent=indent, ensure_ascii=is_ascii)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    whole = blocks(path, target_bytes=target_bytes)
    assert values(rows_of(whole)) == items
    for index, block in enumerate(whole):
        assert rows_of(blocks(path, block.end, 7)) == rows_of(whole[index + 1 :])


@pytest.mark.parametrize("target_bytes", [1, 3, 1 << 20])
def test_arrays_in_any_layout(tmp_path, target_bytes):
    items = [{"a": [1, -2.5e3, None, True, {}]}, {"b": INSIDE + '\\"]},[{'}, 12, "t", [], {}]
    path = tmp_path / "rows.json"
    for indent, mark in ((None, ""), (1, ""), (None, "\ufeff"), (2, "\ufeff")):
        text = json.dumps(items, indent=indent, ensure_ascii=False)
        path.write_bytes((mark + " \r\n" * (not mark) + text + "\r\n ").encode())
        found = blocks(path, target_bytes=target_bytes)
        assert values(rows_of(found)) == items
        assert [number for number, _ in rows_of(found)] == list(range(1, 7))
        for index, block in enumerate(found):
            rest = [dataclasses.replace(b, read=0) for b in found[index + 1 :]]
            again = blocks(path, block.end, target_bytes)
            assert [dataclasses.replace(b, read=0) for b in again] == rest


def test_empty_arrays_have_no_rows(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b" [ ] \n")
    assert blocks(path) == []


def test_bytes_of_an_item_are_left_to_its_parser(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": "\xff"}, {"b": "' + "\U0001f600".encode() + b'"}, {"c": 1}]')
    for target_bytes in (1, 1 << 20):
        found = rows_of(blocks(path, target_bytes=target_bytes))
        assert found[0][1] == b'{"a": "\xff"}'
        assert values(found[1:]) == [{"b": "\U0001f600"}, {"c": 1}]


def test_numbers_of_any_length_are_left_to_the_parser(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": ' + b"9" * 6000 + b'}, {"a": NaN}, {"a": -Infinity}]')
    assert [len(row) for _, row in rows_of(blocks(path, target_bytes=9))] == [6007, 10, 16]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (b'[{"a": 1},\n{"a": 2}\n', 3, "the array does not end"),
        (b'[{"a": 1},\n{"a": 2},', 2, "the array does not end"),
        (b'[{"a": 1},\n{"a": "cut', 2, "the array does not end"),
        (b'[{"a": 1},\n{"a": tr', 2, "Expecting value"),
        (b'[{"a": 1}\n\n{"a": 2}]', 3, "a comma is missing"),
        (b'[{"a": 1},\n]', 2, "Expecting value"),
        (b'[{"a": 1},\n{"a" 2}, {"long": "' + b"x" * 50 + b'"}]', 2, "Expecting ':' delimiter"),
        (b'[{"a": "x\ny"}, {"long": "' + b"x" * 50 + b'"}]', 1, "Invalid control character"),
        (b'[{"a": 1}]\n[{"a": 2}]\n', 2, "text after the end of the array"),
        (b'[{"a": 1}]]', 1, "text after the end of the array"),
        (b'[{"a": 1}]\n\xff', 2, "text after the end of the array"),
        (b"[{},\n" + b"[" * 100_000, 2, "a row is nested too deeply"),
    ],
)
@pytest.mark.parametrize("target_bytes", [1, 1 << 20])
def test_errors_in_an_array_name_the_line(tmp_path, text, line, what, target_bytes):
    path = tmp_path / "rows.json"
    path.write_bytes(text)
    message = failure(path, target_bytes=target_bytes)
    assert f"rows.json:{line}: the array of rows cannot be read ({what}" in message.replace(
        "there is text", "text"
    )


def test_errors_after_going_on_name_the_line_in_the_file(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1},\n\n{"a": 2},\n{"b" 1}]' + b" " * 50)
    (file,) = find_inputs([path])
    first = next(read_blocks(file, target_bytes=1))
    assert "rows.json:4:" in failure(path, start=first.end)


def peak_bytes(function) -> int:
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("kind", ["json", "jsonl", "jsonl.gz", "json.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    row = {"messages": [{"role": "user", "content": "y" * 5000}] * 4}
    path = write(tmp_path, [row] * 1000, kind)  # 20 MB
    (file,) = find_inputs([path])

    def read():
        assert sum(block.number > 0 for block in read_blocks(file, target_bytes=1 << 18)) > 50

    assert peak_bytes(read) < 4 << 20


@pytest.mark.parametrize("kind", ["parquet", "stream.arrow", "file.arrow"])
def test_left_out_columns_keep_their_names(tmp_path, kind):
    rows = [{"id": i, "messages": "m", "image": b"\0" * 50_000} for i in range(30)]
    path = write(tmp_path, rows, kind)
    for columns in (frozenset({"messages", "no"}), frozenset({"no"})):
        found = blocks(path, columns=columns)
        assert sum(len(block.payload) for block in found) < 10_000
        kept = "m" if "messages" in columns else None
        assert values(rows_of(found)) == [{"id": None, "messages": kept, "image": None}] * 30


@pytest.mark.parametrize("kind", ["parquet", "stream.arrow", "file.arrow"])
def test_damaged_tables_are_named(tmp_path, kind):
    rows = [{"messages": text["messages"]} for text in noisy_rows(200)]
    path = write(tmp_path, rows, kind)
    whole = path.read_bytes()
    for keep in (len(whole) // 2, len(whole) - 3, len(whole) - 8, 20):
        path.write_bytes(whole[:keep])
        assert "is cut or damaged after row" in failure(path)


def test_a_stream_cut_between_batches_is_named(tmp_path):
    path = write(tmp_path, [{"messages": "x"}] * 20, "stream.arrow")
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    assert "the mark that ends a stream is missing" in failure(path)
    path.write_bytes(whole + whole)
    assert "more data after the end of the stream" in failure(path)


def test_columns_of_one_name_are_named(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    path = tmp_path / "rows.arrow"
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    assert "two columns have one name" in failure(path)


def test_tables_without_rows_have_no_blocks(tmp_path):
    table = pa.table({"messages": pa.array([], pa.string())})
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    assert blocks(path) == []


def test_wrong_offsets_in_an_arrow_file_do_not_end_the_process(tmp_path):
    path = write(tmp_path, [{"messages": "m" * 100}] * 5, "stream.arrow")
    offsets = np.arange(0, 600, 100, dtype=np.int32).tobytes()
    good = path.read_bytes()
    assert good.count(offsets) == 1
    bad = np.array([0, 100, 1 << 30, 300, 400, 500], dtype=np.int32).tobytes()
    path.write_bytes(good.replace(offsets, bad))
    assert "is cut or damaged after row 0" in failure(path)
