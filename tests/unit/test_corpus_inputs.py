"""Inputs: which files are read, in which order, and what is said about the others."""

import gzip
import json
import os

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from megatron_hbp.corpus.blocks import block_rows, read_blocks
from megatron_hbp.corpus.inputs import InputFile, find_inputs
from megatron_hbp.corpus.rows import parse_row

ROW = b'{"messages": []}\n'


def put(path, data=ROW):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def paths(*given) -> list:
    return [file.path for file in find_inputs(given)]


def failure(*given) -> str:
    with pytest.raises(ValueError, match=r"\w") as error:
        find_inputs(given)
    assert "\n" not in str(error.value)
    return str(error.value)


def parquet(path):
    pq.write_table(pa.table({"messages": ["m"]}), path)
    return path


def arrow(path, new=pa.ipc.new_stream):
    table = pa.table({"messages": ["m"]})
    with new(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.jsonl", ROW, "jsonl"),
        ("a.JSONL", ROW, "jsonl"),
        ("a.ndjson", ROW, "jsonl"),
        ("a.jsonl", b"[1]\n", "jsonl"),
        ("a.json", ROW, "jsonl"),
        ("a.json", b'{"a": 1}', "jsonl"),
        ("a.json", b"\xef\xbb\xbf \n [" + ROW + b"]", "json"),
        ("a", ROW, "jsonl"),
        ("a", b"[" + ROW + b"]", "json"),
    ],
)
def test_json_files_packed_or_not(tmp_path, name, data, kind):
    path = put(tmp_path / name, data)
    assert find_inputs([path]) == [InputFile(path, kind, compressed=False, size=len(data))]
    packed = gzip.compress(data)
    for packed_name in (name, f"{name}.gz"):  # whatever the name says
        path = put(tmp_path / packed_name, packed)
        assert find_inputs([path]) == [InputFile(path, kind, compressed=True, size=len(packed))]
    path = put(tmp_path / f"{name}.gz", data)
    assert find_inputs([path]) == [InputFile(path, kind, compressed=False, size=len(data))]


def test_tables_by_their_content(tmp_path):
    for name in ("a.parquet", "a.bin", "a"):
        assert find_inputs([parquet(tmp_path / name)])[0].kind == "parquet"
    for new in (pa.ipc.new_stream, pa.ipc.new_file):
        for name in ("a.arrow", "a.feather", "a"):
            assert find_inputs([arrow(tmp_path / name, new)])[0].kind == "arrow"
    pyarrow.feather.write_feather(pa.table({"messages": ["m"]}), str(tmp_path / "f.feather"))
    (file,) = find_inputs([tmp_path / "f.feather"])
    assert [row for block in read_blocks(file) for _, row in block_rows(block)] == [
        {"messages": "m"}
    ]


def test_folders_give_their_files_sorted_by_path(tmp_path):
    names = ["b/c.jsonl", "b/a.json.gz", "a.ndjson", "c/d/e.jsonl"]
    files = [put(tmp_path / name) for name in names]
    for name in ("README.md", ".hidden.jsonl", ".cache/x.jsonl", "dataset_infos.json", "x.py"):
        put(tmp_path / name)
    expected = sorted([*files, parquet(tmp_path / "b" / "d.parquet")])
    assert paths(tmp_path) == expected
    assert paths(tmp_path / "b", str(tmp_path / "a.ndjson")) == [*expected[1:-1], expected[0]]


def test_patterns_are_sorted(tmp_path):
    a, b, c = (put(tmp_path / name) for name in ("a.jsonl", "x/b.jsonl", "x/y/c.jsonl"))
    put(tmp_path / "notes.md")
    put(tmp_path / ".d.jsonl")
    assert paths(f"{tmp_path}/*.jsonl") == [a]
    assert paths(f"{tmp_path}/**/*.jsonl") == [a, b, c]
    assert paths(f"{tmp_path}/**") == [a, b, c]
    assert paths(f"{tmp_path}/*") == [a, b, c]
    assert paths(f"{tmp_path}/x/?.jsonl", f"{tmp_path}/[ab].jsonl") == [b, a]
    odd = put(tmp_path / "odd[1].jsonl")
    assert paths(odd) == [odd]  # a file of that name comes before the pattern
    assert "matches no file" in failure(f"{tmp_path}/*.parquet")
    assert "matches no file of rows but notes.md" in failure(f"{tmp_path}/*.md")


def test_a_file_is_taken_once(tmp_path, monkeypatch):
    path = put(tmp_path / "a.jsonl")
    (tmp_path / "link.jsonl").symlink_to(path)
    os.link(path, tmp_path / "hard.jsonl")
    monkeypatch.chdir(tmp_path)
    for twice in ("a.jsonl", "./a.jsonl", "a.json?", "link.jsonl", "hard.jsonl"):
        message = failure(path, twice)
        assert "is given twice" in message
        assert message.startswith(f"input {twice.replace('?', 'l').removeprefix('./')} ")
    put(tmp_path / "same.jsonl")  # equal content is not the same file
    assert len(paths(path, "same.jsonl")) == 2


def test_links_to_folders_are_followed_once(tmp_path):
    path = put(tmp_path / "data" / "x" / "a.jsonl")
    (tmp_path / "data" / "x" / "up").symlink_to(tmp_path / "data")
    assert paths(tmp_path / "data") == [path]
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "link").symlink_to(tmp_path / "data" / "x")
    assert paths(tmp_path / "top") == [tmp_path / "top" / "link" / "a.jsonl"]


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl.gz", gzip.compress(b""), "is empty"),
        ("a.parquet", b"", "is empty"),
        ("a.txt", b"text", "is not a kind of file that is read; give .jsonl"),
        ("a.csv", b"a,b\n1,2\n", "is not a kind of file that is read; give .jsonl"),
        ("a", b"text", "is not a kind of file that is read"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd1234", "zstd-compressed; unpack it with `zstd -d`"),
        ("a.jsonl.bz2", b"BZh91AY", "bzip2-compressed; unpack"),
        ("a.jsonl.xz", b"\xfd7zXZ\x00", "xz-compressed; unpack"),
        ("a.zip", b"PK\x03\x04", "a zip archive; unpack"),
        ("a.feather", b"FEA1....", "Feather version 1; write it as Parquet"),
        ("a.jsonl", "{}\n".encode("utf-16"), "UTF-16; write it as UTF-8"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("a.parquet", ROW, "does not start as Parquet files do"),
        ("a.arrow", ROW, "does not start as Arrow files do"),
        ("a.parquet.gz", gzip.compress(b"PAR1..."), "a gzipped parquet file; unpack it"),
        ("a.json", b'{\n "train": []\n}\n', "is one object over several lines"),
        ("a.jsonl.gz", gzip.compress(ROW)[:9], "is a damaged gzip file"),
        ("a.jsonl.gz", b"\x1f\x8b\x08junk and more junk", "is a damaged gzip file"),
    ],
)
def test_files_that_are_not_read(tmp_path, name, data, expected):
    path = put(tmp_path / name, data)
    message = failure(path)
    assert message.startswith(f"input {path} ")
    assert expected in message


def test_inputs_that_are_not_there(tmp_path):
    assert "no input; give .jsonl" in failure()
    assert failure("").startswith("an input is empty text; give local files")
    assert failure(tmp_path / "no.jsonl").endswith(
        "does not exist; give local files, folders or patterns"
    )
    assert "does not exist" in failure("https://example.com/rows.jsonl")
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "no")
    assert "is a link to nothing" in failure(tmp_path / "broken.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is not a regular file" in failure(tmp_path / "pipe.jsonl")
    (tmp_path / "empty").mkdir()
    assert "holds no file of rows but nothing" in failure(tmp_path / "empty")
    for number in range(10):
        put(tmp_path / "other" / f"{number}.txt")
    (tmp_path / "other" / "0folder").mkdir()
    assert "but 0.txt, 0folder/, 1.txt" in failure(tmp_path / "other")
    assert "and 3 more; give" in failure(tmp_path / "other")


def test_packed_rows_in_a_folder_are_not_passed_over(tmp_path):
    put(tmp_path / "a.jsonl")
    packed = put(tmp_path / "b.jsonl.zst")
    for given in (tmp_path, f"{tmp_path}/*"):
        assert f"input {packed} is packed in a way that is not read (.zst)" in failure(given)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_unreadable_files_and_folders(tmp_path):
    path = put(tmp_path / "x" / "a.jsonl")
    path.chmod(0)
    assert "cannot be read (Permission denied)" in failure(path)
    path.parent.chmod(0)
    assert "cannot be read (Permission denied)" in failure(path.parent)
    path.parent.chmod(0o700)


def test_a_file_that_fails_while_it_is_read(tmp_path, monkeypatch):
    path = put(tmp_path / "a.jsonl")

    def fail(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", fail)
    assert failure(path) == (f"input {path} cannot be read (Permission denied); see to its rights")


@pytest.fixture
def library(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return datasets


def chats(count):
    return [
        {
            "messages": [
                {"role": "user", "content": f"q{i}"},
                {"role": "assistant", "content": f"a{i}" if i % 2 else None}
                | ({} if i % 2 else {"tool_calls": [{"function": {"name": "f", "arguments": a}}]}),
            ]
        }
        for i, a in zip(range(count), [{"x": "1"}, {"y": "2"}] * count, strict=False)
    ]


def read(*given):
    return [
        parse_row(row)
        for file in find_inputs(given)
        for block in read_blocks(file)
        for _, row in block_rows(block)
    ]


@pytest.mark.parametrize("num_shards", [1, 3, 12])
def test_datasets_folders_keep_the_order_of_the_library(tmp_path, library, num_shards):
    rows = chats(24)
    whole = library.Dataset.from_list(rows)
    for name, dataset in {
        "whole": whole,
        "shuffled": whole.shuffle(seed=3),
        "selected": whole.select([5, 3, 20, *range(9)] + [7] * 5),
        "sorted": whole.add_column("n", [-i for i in range(24)]).sort("n"),
    }.items():
        folder = tmp_path / name
        dataset.save_to_disk(folder, num_shards=num_shards)
        expected = [parse_row(json.dumps(row).encode()) for row in clean(dataset)]
        assert len(expected) == len(dataset)
        assert read(folder) == expected
    assert read(tmp_path / "whole") == [parse_row(json.dumps(row).encode()) for row in rows]
    # beside others, and below a folder
    assert len(read(tmp_path)) == 24 * 3 + 17


def test_what_the_library_computed_beside_its_data_is_left_out(tmp_path, library):
    folder = tmp_path / "set"
    library.Dataset.from_list(chats(6)).save_to_disk(folder)
    loaded = library.load_from_disk(folder)
    loaded.map(lambda row: row, load_from_cache_file=False)
    assert list(folder.glob("cache-*.arrow"))
    for given in (folder, tmp_path, f"{folder}/*.arrow", f"{tmp_path}/**"):
        assert len(read(given)) == 6


def clean(value):
    if isinstance(value, dict):
        return {key: clean(item) for key, item in value.items() if item is not None}
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        return value
    return [clean(item) for item in value]


def test_datasets_of_mixed_types_and_of_tokens(tmp_path, library):
    rows = chats(4)
    rows[2]["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"x": 7, "z": [1, "s"]}
    try:
        mixed = library.Dataset.from_list(rows, on_mixed_types="use_json")
    except TypeError:
        pytest.skip("this release of datasets has no columns of JSON values")
    mixed.save_to_disk(tmp_path / "mixed")
    mixed.to_parquet(tmp_path / "mixed.parquet")
    expected = [parse_row(json.dumps(row).encode()) for row in rows]
    assert read(tmp_path / "mixed") == expected
    assert read(tmp_path / "mixed.parquet") == expected
    tokens = {"input_ids": [[5, 6, 7], [8, 9]], "labels": [[-100, 6, 7], [-100, 9]]}
    library.Dataset.from_dict(tokens).save_to_disk(tmp_path / "tokens")
    first, second = read(tmp_path / "tokens")
    assert (first.tokens.tolist(), first.mask.tolist()) == ([5, 6, 7], [0, 1, 1])
    assert (second.tokens.tolist(), second.mask.tolist()) == ([8, 9], [0, 1])


def test_splits_must_be_named(tmp_path, library):
    dataset = library.Dataset.from_list(chats(6))
    folder = tmp_path / "both"
    library.DatasetDict(train=dataset, test=dataset.select(range(2))).save_to_disk(folder)
    for given in (folder, tmp_path, f"{tmp_path}/*"):
        assert failure(given) == (
            f"input {folder} is a saved data set of the splits train, test; name one of them, "
            f"e.g. {folder}/train"
        )
    assert len(read(folder / "train")) == 6
    assert len(read(folder / "train", folder / "test")) == 8


def test_what_is_wrong_with_a_datasets_folder(tmp_path, library):
    folder = tmp_path / "set"
    library.Dataset.from_list(chats(6)).save_to_disk(folder, num_shards=2)
    state = json.loads((folder / "state.json").read_text())
    indices = {**state, "_indices_data_files": [{"filename": "indices.arrow"}]}
    (folder / "state.json").write_text(json.dumps(indices))
    assert "keeps the order of its rows in an indices mapping" in failure(folder)
    (folder / "state.json").write_text(json.dumps({**state, "_data_files": []}))
    assert "is a saved data set without rows" in failure(folder)
    put(tmp_path / "other.jsonl")
    for name in ("../other.jsonl", str(tmp_path / "other.jsonl")):
        outside = {**state, "_data_files": [{"filename": name}]}
        (folder / "state.json").write_text(json.dumps(outside))
        assert f"names a file outside of it, {name};" in failure(folder)
    (folder / "state.json").write_text(json.dumps(state))
    (folder / state["_data_files"][1]["filename"]).unlink()
    assert "whose file data-00001-of-00002.arrow is missing" in failure(folder)


def test_a_state_file_of_something_else_is_no_datasets_folder(tmp_path):
    path = put(tmp_path / "a.jsonl")
    for state in (b'{"step": 7}', b"[]", b"{no"):
        put(tmp_path / "state.json", state)
        assert paths(tmp_path) == [path]
