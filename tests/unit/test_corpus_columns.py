"""Columns: values of Parquet and Arrow tables as JSON-lines rows would have them."""

import datetime
import decimal
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_hbp.corpus.columns import to_bytes, to_rows
from megatron_hbp.corpus.row_values import OddValue
from megatron_hbp.corpus.rows import RowError, parse_row


def rows_of(table) -> list[dict]:
    batches = pa.table(table).combine_chunks().to_batches()
    return [row for batch in batches for row in to_rows(to_bytes(batch))]


def column(array) -> list:
    return [row["c"] for row in rows_of({"c": array})]


def test_keys_that_a_struct_has_for_others_are_dropped_at_every_depth():
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    other = {"function": {"name": "g", "arguments": {"y": {"z": [{"w": None, "v": "1"}]}}}}
    rows = [
        {"messages": [{"role": "user", "content": "q"}], "id": "1"},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "id": None},
        {"messages": [{"role": "assistant", "tool_calls": [other], "content": ""}], "id": "3"},
        {"messages": None, "id": "4"},
    ]
    found = rows_of(pa.Table.from_pylist(rows))
    assert found[0] == rows[0]
    assert found[1]["messages"] == [{"role": "assistant", "tool_calls": [call]}]
    cleaned = {"function": {"name": "g", "arguments": {"y": {"z": [{"v": "1"}]}}}}
    assert found[2]["messages"] == [{"role": "assistant", "content": "", "tool_calls": [cleaned]}]
    assert found[3] == {"messages": None, "id": "4"}  # the top keeps its keys


@pytest.mark.parametrize("start", [0, 1, 3])
def test_slices_of_nested_columns(start):
    values = [
        {"a": ["x", None], "b": {"c": [[1], [2, 3]]}},
        None,
        {"a": [], "b": None},
        {"a": None, "b": {"c": [None, []]}},
        {"a": ["y"] * 3, "b": {"c": []}},
    ]
    expected = [
        value and {key: item for key, item in value.items() if item is not None} for value in values
    ]
    batch = pa.record_batch({"c": pa.array(values)}).slice(start)
    assert [row["c"] for row in to_rows(to_bytes(batch))] == expected[start:]


@pytest.mark.parametrize("text", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("of_list", [pa.list_, pa.large_list])
def test_large_types(text, of_list):
    values = [["a", "b"], None, [], ["c", None]]
    assert column(pa.array(values, of_list(text))) == values


def test_dictionaries_maps_and_lists_of_one_size():
    assert column(pa.array(["a", None, "a"]).dictionary_encode()) == ["a", None, "a"]
    maps = pa.array([[("k", 1), ("l", None)], None, []], pa.map_(pa.string(), pa.int64()))
    assert column(maps) == [{"k": 1}, None, {}]
    pairs = pa.array([["a", "b"], ["c", "d"]], pa.list_(pa.string(), 2))
    assert column(pairs) == [["a", "b"], ["c", "d"]]
    assert column(pa.array([{}, None, {}], pa.struct([]))) == [{}, None, {}]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int32(), pa.int64(), pa.uint16(), pa.bool_()])
def test_lists_of_numbers_at_the_top_are_arrays(kind):
    one, zero = (True, False) if kind == pa.bool_() else (1, 0)
    values = [[one, zero, one], [], [zero]]
    for of_list in (pa.list_(kind), pa.large_list(kind)):
        found = column(pa.array(values, of_list))
        assert all(isinstance(value, np.ndarray) for value in found)
        assert [value.tolist() for value in found] == values
    found = column(pa.array([[one, zero], [zero, zero]], pa.list_(kind, 2)))
    assert [value.tolist() for value in found] == [[one, zero], [zero, zero]]
    assert column(pa.array([[one, None], None], pa.list_(kind))) == [[one, None], None]
    assert column(pa.array([{"a": [one, zero]}], pa.struct([("a", pa.list_(kind))]))) == [
        {"a": [one, zero]}
    ]


def test_json_columns_are_parsed():
    texts = ['{"x": null, "y": "\\ud800"}', None, "[1]", "{no"]
    expected = [{"x": None, "y": "\ufffd"}, None, [1], OddValue("text that is not JSON")]
    assert column(pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts))) == expected
    # as releases of pyarrow without the type read it
    field = pa.field("c", pa.string(), metadata={"ARROW:extension:name": "arrow.json"})
    batch = pa.record_batch([pa.array(texts)], schema=pa.schema([field]))
    assert [row["c"] for row in to_rows(to_bytes(batch))] == expected


ODD = [
    (pa.array([datetime.date(2020, 1, 1)]), "date32"),
    (pa.array([1 << 62], pa.timestamp("ns")), "timestamp"),
    (pa.array([1 << 62], pa.timestamp("s")), "timestamp"),
    (pa.array([1 << 62], pa.duration("us")), "duration"),
    (pa.array([decimal.Decimal("1.5")]), "decimal128"),
    (pa.array([b"\xff"]), "binary"),
    (pa.array([b"ab"], pa.binary(2)), "fixed_size_binary"),
    (pa.array([b"\xff"]).view(pa.string()), "text that is not UTF-8"),
]


@pytest.mark.parametrize(("array", "name"), ODD)
def test_odd_values_reject_their_row_only(array, name):
    array = pa.concat_arrays([array, pa.nulls(1, array.type)])
    roles = pa.array(["assistant"] * 2)
    structs = pa.StructArray.from_arrays([roles, array], names=["role", "content"])
    messages = pa.ListArray.from_arrays([0, 1, 2], structs)
    odd, null = rows_of({"messages": messages})
    with pytest.raises(RowError, match=f"content of message 1 is {name}.*, not text"):
        parse_row(odd)
    assert parse_row(null).messages == [{"role": "assistant", "content": ""}]
    with pytest.raises(RowError, match=f"completion is {name}.*, not text"):
        parse_row(rows_of({"prompt": ["q", "q"], "completion": array})[0])
    with pytest.raises(RowError, match="input_ids"):
        parse_row(
            rows_of({"input_ids": pa.ListArray.from_arrays([0, 1], array[:1]), "labels": [[1]]})[0]
        )
    with pytest.raises(TypeError, match=name):
        str(odd["messages"][0]["content"])


def test_one_text_that_is_not_utf8_leaves_its_neighbours():
    texts = pa.array([b"good", b"\xff", None, b"too"]).view(pa.string())
    assert column(texts) == ["good", OddValue("text that is not UTF-8"), None, "too"]


def test_a_table_gives_the_chats_of_the_same_json_lines():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "int"}}}}
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {
            "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}],
            "tools": [tool],
        },
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"prompt": "p", "completion": "c"},
        {"instruction": "i", "input": "j", "output": "o"},
        {"prompt": "p", "completion": [{"role": "assistant", "content": "c", "loss": True}]},
    ]
    for row in rows:
        expected = parse_row(json.dumps(row).encode())
        assert parse_row(rows_of(pa.Table.from_pylist([row, {}]))[0]) == expected
        texts = {k: json.dumps(v) if k in ("messages", "tools") else v for k, v in row.items()}
        assert parse_row(rows_of(pa.Table.from_pylist([texts, {}]))[0]) == expected


READ = """
import pathlib, sys
from megatron_hbp.corpus.blocks import read_blocks, block_rows
from megatron_hbp.corpus.inputs import find_inputs

def peak_mebibytes():
    # getrusage would count what the parent held before this program started
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024

(file,) = find_inputs([sys.argv[1]])
first = peak_mebibytes()
columns = frozenset({"messages"})
count = sum(1 for block in read_blocks(file, columns=columns) for _ in block_rows(block))
print(count, peak_mebibytes() - first)
"""


@pytest.mark.parametrize("kind", ["parquet of one group", "parquet", "stream", "file"])
def test_memory_does_not_grow_with_a_table(tmp_path, kind):
    """Also not where a file is one row group, or a column that is left out is big."""
    generator = np.random.default_rng(0)
    texts = [generator.bytes(5000).hex() for _ in range(1000)]  # 10 MB that do not compress well
    table = pa.table({"messages": texts * 20, "image": [text[:4000] + "x" for text in texts] * 20})
    path = tmp_path / "rows"
    if kind.startswith("parquet"):
        group_rows = 1000 if kind == "parquet" else 1 << 30
        pq.write_table(table, path, row_group_size=group_rows, use_dictionary=False)
    else:
        new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=1000)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    count, mebibytes = map(int, done.stdout.split())
    assert count == 20_000
    assert mebibytes < 100  # of 270 MiB
