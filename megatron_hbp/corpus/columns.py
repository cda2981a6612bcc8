"""Parquet and Arrow files: batches of the columns that matter, and rows out of batches.

Guarantees:
- memory does not grow with the number of rows, nor with columns that are left out;
- a None inside a struct is a key that the row does not have: Arrow gives every struct all keys of
  its column. So None-valued keys are dropped at every depth but the top;
- text in a column of JSON values (as `datasets` writes mixed types) is parsed;
- a top-level list of numbers comes as a numpy array;
- a value that JSON does not have (a date, bytes, a decimal) comes as an OddValue, as does text
  that is not UTF-8; no value makes a file unreadable.
"""

import mmap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_hbp.corpus.row_values import OddValue, parse_json

_JSON = "arrow.json"
_MAX_BATCH_ROWS = 1 << 12  # many equal values take little room in a file
_SHORTER = "it is shorter than when it was read before"
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


def read_parquet(
    path: Path, start: int, target_bytes: int, columns: frozenset[str] | None
) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Yields (batch, share of the file read so far), from row `start` on."""
    # pages are read as they are needed, so that one big row group does not fill the memory
    with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        metadata = file.metadata
        names = file.schema_arrow.names
        group_rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        group_starts = np.cumsum([0, *group_rows])
        first = int(np.searchsorted(group_starts, start, side="right")) - 1
        if start > metadata.num_rows:
            raise ValueError(_SHORTER)
        if first >= len(group_rows):
            return
        chosen = _chosen(names, columns)
        batches = file.iter_batches(
            _batch_rows(metadata, None if chosen == names else chosen, target_bytes),
            row_groups=list(range(first, len(group_rows))),
            columns=chosen,
            use_threads=False,
        )
        row = int(group_starts[first])
        for batch in batches:
            skipped = min(max(start - row, 0), batch.num_rows)
            row += batch.num_rows
            if skipped < batch.num_rows:
                yield _with_all_names(batch.slice(skipped), names), row / metadata.num_rows
        if row != metadata.num_rows:
            raise ValueError(f"{row} rows instead of {metadata.num_rows}")


def _batch_rows(metadata: Any, chosen: list[str] | None, target_bytes: int) -> int:
    """Rows whose chosen columns (None: all) take about target_bytes."""
    size = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        if chosen is None:  # some damage to what is said about a column ends the process
            size += group.total_byte_size
            continue
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema.split(".")[0] in chosen:
                size += column.total_uncompressed_size
    rows = target_bytes * metadata.num_rows // max(size, 1)
    return min(max(rows, 1), _MAX_BATCH_ROWS)


def read_arrow(
    path: Path, start: int, columns: frozenset[str] | None
) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Yields (batch, share of the file read so far), from row `start` on; batches of any size."""
    with path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    source = pa.BufferReader(pa.py_buffer(content))
    is_file = content[:6] == b"ARROW1"
    if not is_file:
        _check_end(content)
    reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
    row = 0
    batches = _batches_of_file(reader) if is_file else reader
    for index, batch in enumerate(batches, start=1):
        skipped = min(max(start - row, 0), batch.num_rows)
        row += batch.num_rows
        if skipped < batch.num_rows:
            names = batch.schema.names
            chosen = batch.select(_chosen(names, columns))
            chosen.validate(full=True)  # a wrong offset would end the process
            share = index / reader.num_record_batches if is_file else source.tell() / len(content)
            yield _with_all_names(chosen.slice(skipped), names), share
            content.madvise(mmap.MADV_DONTNEED)  # pages that were read count as our memory
    if row < start:
        raise ValueError(_SHORTER)
    if not is_file and source.tell() < len(content):
        raise ValueError(f"more data after the end of the stream, at byte {source.tell()}")


def _batches_of_file(reader: Any) -> Iterator[pa.RecordBatch]:
    return map(reader.get_batch, range(reader.num_record_batches))


def _check_end(content: mmap.mmap) -> None:
    """A reader takes a stream that was cut between two batches for a whole one."""
    is_old = content[:4] != _END_OF_STREAM[:4]  # before Arrow 0.15; its end mark is optional
    if not is_old and content[-8:] != _END_OF_STREAM:
        raise ValueError("the mark that ends a stream is missing")


def _chosen(names: list[str], columns: frozenset[str] | None) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have one name among {', '.join(names)}")
    return [name for name in names if columns is None or name in columns]


def _with_all_names(batch: pa.RecordBatch, names: list[str]) -> pa.RecordBatch:
    """Columns that were left out come back as nulls, which take no room, for error messages."""
    fields = {
        field.name: (column, field) for column, field in zip(batch, batch.schema, strict=True)
    }
    nulls = pa.nulls(batch.num_rows)
    arrays = [fields[name][0] if name in fields else nulls for name in names]
    schema = [fields[name][1] if name in fields else pa.field(name, pa.null()) for name in names]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(schema))


def to_bytes(batch: pa.RecordBatch) -> bytes:
    """A batch as an Arrow stream, of its rows alone."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def to_rows(payload: bytes) -> Iterator[dict[str, Any]]:
    """The rows of a batch that `to_bytes` wrote, in order; keys are the columns in order."""
    with pa.ipc.open_stream(pa.py_buffer(payload)) as reader:
        for batch in reader:
            names = batch.schema.names
            columns = [
                _values(array, field, top=True)
                for array, field in zip(batch, batch.schema, strict=True)
            ]
            for values in zip(*columns, strict=True):
                yield dict(zip(names, values, strict=True))


def _values(array: Any, field: pa.Field, *, top: bool = False) -> list[Any]:  # noqa: PLR0911
    """One Python value per entry of an Arrow array."""
    kind = array.type
    if _is_json(field):
        return [_parsed(text) for text in _texts(_storage(array))]
    if isinstance(kind, pa.ExtensionType):
        return _values(array.storage, field.with_type(kind.storage_type), top=top)
    if pa.types.is_dictionary(kind):
        return _values(array.dictionary_decode(), field.with_type(kind.value_type), top=top)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _texts(array)
    if _is_number(kind) or pa.types.is_null(kind):
        return array.to_pylist()
    if pa.types.is_struct(kind):
        return _objects(array)
    if pa.types.is_map(kind):
        return _mappings(array)
    if pa.types.is_fixed_size_list(kind):
        array = array.cast(pa.list_(kind.value_field))
        return _lists(array, top=top)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(array, top=top)
    return _with_nulls([OddValue(str(kind))] * len(array), array)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _is_json(field: pa.Field) -> bool:
    # releases of pyarrow that do not know the type leave its name beside the text
    name = getattr(field.type, "extension_name", None)
    return name == _JSON or (field.metadata or {}).get(b"ARROW:extension:name") == _JSON.encode()


def _storage(array: Any) -> Any:
    return array.storage if isinstance(array.type, pa.BaseExtensionType) else array


def _texts(array: Any) -> list[Any]:
    try:
        return array.to_pylist()
    except UnicodeDecodeError:
        return [_text(scalar) for scalar in array]


def _text(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return OddValue("text that is not UTF-8")


def _parsed(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return OddValue("text that is not JSON")


def _with_nulls(values: list[Any], array: Any) -> list[Any]:
    if array.null_count == 0:
        return values
    valid = array.is_valid().to_pylist()
    return [value if is_valid else None for value, is_valid in zip(values, valid, strict=True)]


def _objects(array: Any) -> list[Any]:
    fields = list(array.type)
    names = [field.name for field in fields]
    if not names:
        return _with_nulls([{} for _ in range(len(array))], array)
    columns = [_values(array.field(i), field) for i, field in enumerate(fields)]
    rows = [
        {name: value for name, value in zip(names, values, strict=True) if value is not None}
        for values in zip(*columns, strict=True)
    ]
    return _with_nulls(rows, array)


def _lists(array: Any, *, top: bool) -> list[Any]:
    offsets = array.offsets.to_numpy()
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    child = array.values.slice(first, last - first)
    if top and child.null_count == 0 and _is_number(child.type):
        items: Any = child.to_numpy(zero_copy_only=False)
    else:
        items = _values(child, array.type.value_field)
    bounds = (offsets - first).tolist()
    rows = [items[begin:end] for begin, end in pairwise(bounds)]
    return _with_nulls(rows, array)


def _mappings(array: Any) -> list[Any]:
    offsets = array.offsets.to_numpy()
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    keys = _values(array.keys.slice(first, last - first), array.type.key_field)
    items = _values(array.items.slice(first, last - first), array.type.item_field)
    pairs = [(key, item) for key, item in zip(keys, items, strict=True)]
    bounds = (offsets - first).tolist()
    rows = [
        {key: item for key, item in pairs[begin:end] if item is not None}
        for begin, end in pairwise(bounds)
    ]
    return _with_nulls(rows, array)
