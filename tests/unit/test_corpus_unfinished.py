"""A making that was stopped: what a later one goes on with, and what it throws away."""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_hbp.corpus import Corpus, preparation
from megatron_hbp.corpus.indexed_files import ChangedFileError, HashingFile
from megatron_hbp.corpus.preparation import Preparation
from megatron_hbp.corpus.prepare import prepare_corpus
from megatron_hbp.corpus.row_encoder import RowEncoder
from tests.kills.prepare_runs import CAP, content, mixed_inputs, work_of
from tests.unit.corpus_samples import char_tokenizer, chat, write_rows


class Maker:
    """Makes corpora in `folder`, a checkpoint after each small block. whole: one made at once."""

    def __init__(self, folder: Path, monkeypatch, given: SimpleNamespace) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self.inputs, self.tokenizer, self.whole = given.inputs, given.tokenizer, given.whole
        monkeypatch.setattr(preparation, "_BLOCK_BYTES", 1500)
        monkeypatch.setattr(preparation, "_CHECKPOINT_SECONDS", -1.0)

    def make(self, output: Path, inputs=None, **options) -> list[str]:
        """Returns the lines for the user."""
        return make(inputs or self.inputs, self.tokenizer, output, **options)

    def stopped(self, output: Path, block: int, inputs=None, **options) -> bool:
        """Stops before what became of block number `block` is stored; False when it has fewer."""
        count, original = 0, Preparation._store

        def store(self, *arguments):
            nonlocal count
            if count == block:
                raise Killed
            count += 1
            return original(self, *arguments)

        with self._monkeypatch.context() as patch:
            patch.setattr(Preparation, "_store", store)
            try:
                self.make(output, inputs, **options)
            except Killed:
                assert not output.exists()
                assert work_of(output).is_dir() == (block > 0)
                return True
        return False


def make(inputs, tokenizer, output, **options):
    lines = []
    options = {"max_length": CAP, "overlong": "truncate", "valid_share": 0.1} | options
    prepare_corpus(inputs, tokenizer, output, report=lines.append, **options)
    return lines


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    inputs = mixed_inputs(folder / "rows", 40)
    tokenizer = char_tokenizer(folder / "t")
    make(inputs, tokenizer, folder / "whole")
    return SimpleNamespace(
        inputs=inputs, tokenizer=tokenizer, whole=content(folder / "whole"), path=folder / "whole"
    )


@pytest.fixture
def maker(tmp_path, monkeypatch, given):
    return Maker(tmp_path, monkeypatch, given)


class Killed(BaseException):
    pass


def test_the_inputs_have_something_of_everything(given):
    counts = Corpus.open(given.path).info["row_counts"]
    names = ("rows_rejected", "rows_dropped", "rows_truncated", "rows_held_out", "blank_lines")
    assert all(counts[name] for name in names), counts
    assert counts["rows_in"] == 4 * 40 + 1


def test_stopped_at_every_block(maker):
    block = 0
    while maker.stopped(output := maker.folder / f"c{block}", block):
        lines = maker.make(output)
        assert [line.startswith("goes on after ") for line in lines] == [True] * (block > 0)
        assert content(output) == maker.whole
        assert not work_of(output).exists()
        block += 1
    assert block > 15
    assert content(output) == maker.whole  # with blocks of another size


def test_stopped_at_every_block_of_one_making(maker):
    output, stops = maker.folder / "c", 0
    while maker.stopped(output, 1):
        stops += 1
    assert stops > 15
    assert content(output) == maker.whole


def test_goes_on_with_other_workers(maker):
    for before, after in ((1, 3), (2, 1)):
        output = maker.folder / f"c{before}"
        assert maker.stopped(output, 6, workers=before)
        (line,) = maker.make(output, workers=after)
        assert line.startswith("goes on after ")
        assert content(output) == maker.whole


def plain_rows(folder):
    rows = [
        chat("ua" if i % 9 else "u", None if i % 9 == 0 else ["q", f"a {i}"]) for i in range(99)
    ]
    return write_rows(folder / "rows.jsonl", rows)


def test_other_inputs_or_options_start_anew(maker):
    source, output = plain_rows(maker.folder), maker.folder / "c"
    told = (
        f"the unfinished work in {work_of(output)} is of other inputs or with other options; "
        "starts anew"
    )
    assert maker.stopped(output, 4, [source])
    source.write_text(source.read_text().replace('"a 3"', '"a X"'))
    assert maker.stopped(output, 4, [source])
    assert maker.make(output, [source], valid_share=0.2) == [told]
    maker.make(maker.folder / "other", [source], valid_share=0.2)
    assert content(output) == content(maker.folder / "other")


def test_renamed_inputs_start_anew(maker):
    source, output = plain_rows(maker.folder), maker.folder / "c"
    assert maker.stopped(output, 4, [source])
    source = source.rename(maker.folder / "renamed.jsonl")
    maker.make(output, [source])
    entries = map(json.loads, (output / "rejects.jsonl").read_text().splitlines())
    assert {entry["file"] for entry in entries} == {str(source)}


def test_an_input_changed_meanwhile(maker):
    source, output = plain_rows(maker.folder), maker.folder / "c"
    rows = source.read_text()
    for change in (lambda _: source.write_text(rows + " "), lambda _: source.unlink(True)):
        source.write_text(rows)
        with pytest.raises(ValueError, match="was changed while it was read; prepare it again"):
            prepare_corpus([source], maker.tokenizer, output, progress=change)
        assert [p.name for p in maker.folder.iterdir() if "c" in p.name.split(".")] == []


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def grow(path):
    path.write_bytes(path.read_bytes() + b"more")


def empty(path):
    path.write_bytes(b"")


WORK_FILES = (
    *("corpus/tokens.bin", "corpus/mask.bin", "corpus/rejects.jsonl", "0.columns", "1.columns"),
    *("corpus/valid/tokens.bin", "corpus/valid/mask.bin", "progress.json"),
)


@pytest.mark.parametrize("damage", [cut, flip, empty, grow, Path.unlink])
def test_damaged_work_is_never_published(maker, damage):
    half = maker.folder / "half"
    assert maker.stopped(half, 14)
    for number, name in enumerate(WORK_FILES):
        output = maker.folder / f"c{number}"
        shutil.copytree(work_of(half), work_of(output))
        (work,) = work_of(output).glob("work.*")
        file = work_of(output) / name if name == "progress.json" else work / name
        assert file.stat().st_size > 1, name
        damage(file)
        lines = maker.make(output)
        assert content(output) == maker.whole, name
        if damage is grow and name != "progress.json":
            assert lines[0].startswith("goes on after ")  # as after a kill between checkpoints
        elif (damage, name) != (Path.unlink, "progress.json"):
            (line,) = lines
            assert line.endswith("; starts anew")


def test_a_checkpoint_whose_numbers_were_edited(maker):
    output = maker.folder / "c"
    assert maker.stopped(output, 6)
    path = work_of(output) / "progress.json"
    document = json.loads(path.read_text())
    document["state"]["position"]["at"] += 1
    path.write_text(json.dumps(document))
    assert maker.make(output) == [
        f"the unfinished work in {work_of(output)} is damaged; starts anew"
    ]


def test_two_owners_of_one_work_do_not_mix(maker, monkeypatch):
    """As on two hosts, where locks do not reach and the first was silent for long."""
    output = maker.folder / "c"
    original, count = Preparation._store, 0

    def store(self, *arguments):
        nonlocal count
        count += 1
        if count == 5:  # the first one sleeps; another takes over and is done
            names = [field.name for field in dataclasses.fields(Preparation)]
            Preparation(**{name: getattr(self, name) for name in names}).run()
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Preparation, "_store", store)
        with pytest.raises(ChangedFileError, match="was changed by another process; run again"):
            maker.make(output)
    assert content(output) == maker.whole
    maker.make(output)
    assert not work_of(output).exists()


def test_files_that_another_process_writes_into(tmp_path):
    path = tmp_path / "f"
    file = HashingFile(path)
    file.write(b"abc")
    assert file.sync()[0] == 3
    with path.open("ab") as other:
        other.write(b"x")
    for act in (lambda: file.write(b"d"), file.sync, file.close):
        with pytest.raises(ChangedFileError, match="was changed by another process"):
            act()
    file.abandon()
    written = (3, hashlib.sha256(b"abc").hexdigest())
    HashingFile(path, written).abandon()  # what came after is cut off
    assert path.read_bytes() == b"abc"
    path.write_bytes(b"ab")  # must not be filled up with zeros
    with pytest.raises(ChangedFileError, match="is not as it was left"):
        HashingFile(path, written)
    assert path.read_bytes() == b"ab"


def test_full_disk(maker, monkeypatch):
    output = maker.folder / "c"
    original, left = HashingFile.write, 20

    def write(self, data):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device")
        original(self, data)

    monkeypatch.setattr(HashingFile, "write", write)
    message = (
        rf"{output} cannot be written \(No space left on device\); .*goes on from the work kept"
    )
    for sooner in (20, 0):
        left = sooner
        with pytest.raises(ValueError, match=message):
            maker.make(output)
        assert not output.exists()
    left = 1 << 60
    (line,) = maker.make(output)
    assert line.startswith("goes on after ")
    assert content(output) == maker.whole


def test_nothing_stays_when_nothing_was_done(maker, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HashingFile, "write", full)
    with pytest.raises(ValueError, match="it starts anew, nothing was done yet"):
        maker.make(maker.folder / "c")
    assert list(maker.folder.iterdir()) == []


def test_an_input_that_cannot_be_read_for_a_while(maker, monkeypatch):
    output, original = maker.folder / "c", preparation.read_blocks

    def broken(file, *arguments):
        for number, block in enumerate(original(file, *arguments)):
            if file.kind == "parquet" and number == 2:
                raise ValueError(f"input {file.path} is cut or damaged")
            yield block

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "read_blocks", broken)
        with pytest.raises(ValueError, match="cut or damaged"):
            maker.make(output)
    (line,) = maker.make(output)
    assert line.startswith("goes on after ")
    assert content(output) == maker.whole


def test_the_output_appears_by_other_hands(maker, monkeypatch):
    output, original = maker.folder / "c", preparation.publish

    def publish(folder, target):
        target.mkdir()
        (target / "theirs").touch()
        original(folder, target)

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "publish", publish)
        with pytest.raises(ValueError, match="exists and is not this corpus"):
            maker.make(output)
    assert [p.name for p in output.iterdir()] == ["theirs"]
    (output / "theirs").unlink()
    monkeypatch.setattr(RowEncoder, "__call__", None)  # nothing is encoded again
    maker.make(output)
    assert content(output) == maker.whole


def test_links_and_the_folder_one_is_in(maker, monkeypatch):
    (maker.folder / "link").symlink_to(maker.folder / "elsewhere")
    maker.make(maker.folder / "link")
    assert content(maker.folder / "elsewhere") == maker.whole
    (maker.folder / "here").mkdir()
    monkeypatch.chdir(maker.folder / "here")
    maker.make(Path())
    assert content(maker.folder / "here") == maker.whole
