"""Several corpora read as one: which tokens belong to which id, and what does not go together."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_hbp import Level, build_plan
from megatron_hbp.cli import main
from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.corpus.joint import (
    JointCorpus,
    corpus_paths,
    open_corpora,
    parts_of,
    weighted_sources,
)
from megatron_hbp.plan import DROP_WEIGHTLESS, Plan

VOCAB = 100
LENS = ([5, 9, 3], [7, 2, 30, 11], [4])
LEVELS = ["--level", "32:1", "--level", "64:2", "--ranks", "2"]


def _write(path: Path, lens, seed=0, vocab=VOCAB, end_id=2, **info) -> str:
    rng = np.random.default_rng(seed)
    rows = []
    for length in lens:
        mask = rng.integers(0, 2, length)
        mask[-1] = 1
        rows.append((rng.integers(0, vocab, length), mask))
    write_corpus(path, rows, vocab_size=vocab, end_id=end_id, info=info)
    return str(path)


@pytest.fixture
def folders(tmp_path) -> list[str]:
    return [_write(tmp_path / f"c{i}", lens, seed=i) for i, lens in enumerate(LENS)]


def test_one_corpus_stays_as_it_is(folders):
    corpus = open_corpora(folders[:1])
    assert type(corpus) is Corpus
    assert corpus.source_ids is None
    assert parts_of(corpus) == (corpus,)
    assert weighted_sources(corpus, None) is None
    assert corpus.hash == Corpus.open(folders[0]).hash


def test_ids_of_a_source_read_the_tokens_of_its_corpus(folders):
    joint = open_corpora(folders)
    assert isinstance(joint, JointCorpus)
    parts = [Corpus.open(folder) for folder in folders]
    assert len(joint) == sum(map(len, LENS))
    pairs = [(source, i) for source, lens in enumerate(LENS) for i in range(len(lens))]
    assert joint.source_ids.tolist() == [source for source, _ in pairs]
    assert joint.source_ids.dtype == np.int32
    for index, (source, i) in enumerate(pairs):
        part = parts[source]
        np.testing.assert_array_equal(joint.tokens(index), part.tokens(i))
        np.testing.assert_array_equal(joint.tokens(index, 2), part.tokens(i)[:2])
        np.testing.assert_array_equal(joint.mask(index), part.mask(i))
        np.testing.assert_array_equal(joint.mask(index, 1), part.mask(i)[:1])
        assert not joint.tokens(index).flags.writeable
        for name in ("seq_lens", "first_trained", "num_trained"):
            assert getattr(joint, name)[index] == getattr(part, name)[i]
            assert getattr(joint, name).dtype == np.int32
    assert joint.max_token_id == max(part.max_token_id for part in parts)
    assert (joint.vocab_size, joint.end_id) == (VOCAB, 2)
    assert corpus_paths(joint) == tuple(str(Path(folder).resolve()) for folder in folders)


@pytest.mark.parametrize("index", [-1, 8, 100])
def test_an_id_that_does_not_exist_is_refused(folders, index):
    """A negative one would otherwise be another corpus' sequence, in silence."""
    joint = open_corpora(folders)
    with pytest.raises(IndexError, match=f"sequence {index} of 8"):
        joint.tokens(index)
    with pytest.raises(IndexError, match=f"sequence {index} of 8"):
        joint.mask(index)


def test_sixteen_bytes_a_sequence_and_memory_mapped_tokens(folders):
    joint = open_corpora(folders)
    arrays = (joint.seq_lens, joint.first_trained, joint.num_trained, joint.source_ids)
    assert sum(array.nbytes for array in arrays) == 16 * len(joint)
    for index in (0, 3, 7):
        assert np.shares_memory(
            joint.tokens(index), parts_of(joint)[joint.source_ids[index]]._tokens.values
        )


def test_the_hash_is_of_the_parts_in_order(folders, tmp_path):
    hashes = {
        open_corpora(order).hash
        for order in (folders, folders[::-1], folders[:2], folders[:1], folders[1:])
    }
    assert len(hashes) == 5
    shutil.copytree(folders[0], tmp_path / "moved")
    assert open_corpora([tmp_path / "moved", *folders[1:]]).hash == open_corpora(folders).hash


def test_one_sequence_each_and_many_corpora(tmp_path):
    folders = [_write(tmp_path / f"c{i}", [3 + i], seed=i) for i in range(40)]
    joint = open_corpora(folders)
    for index, folder in enumerate(folders):
        np.testing.assert_array_equal(joint.tokens(index), Corpus.open(folder).tokens(0))


def test_opening_verifies(folders):
    file = Path(folders[1]) / "tokens.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"the corpus in \S+c1 is damaged"):
        open_corpora(folders)
    with pytest.raises(ValueError, match=r"\S+nothing holds no corpus.json"):
        open_corpora([folders[0], f"{folders[0]}/nothing"])


def test_large_files_are_verified_on_request(folders, monkeypatch):
    file = Path(folders[2]) / "tokens.bin"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    monkeypatch.setattr("megatron_hbp.corpus.store._HASHED_AT_OPEN", 0)
    open_corpora(folders)
    with pytest.raises(ValueError, match=r"tokens\.bin does not match its hash"):
        open_corpora(folders, verify=True)


def test_no_corpus_at_all():
    with pytest.raises(ValueError, match="no corpus is named"):
        open_corpora([])


def test_the_same_corpus_twice_is_refused(folders, tmp_path):
    shutil.copytree(folders[0], tmp_path / "copy")
    for again in (folders[0], str(tmp_path / "copy")):
        with pytest.raises(
            ValueError, match=r"c0 and \S+ hold the same sequences; .*--hbp-source-weight of 2"
        ):
            open_corpora([folders[0], folders[1], again])


TOKENIZER = {"tokenizer.json": "a" * 64, "tokenizer_config.json": "b" * 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": 101}, r"\(vocabulary sizes 100 and 101\)"),
        ({"end_id": 3}, r"\(end ids 2 and 3\)"),
        ({"end_id": -1, "vocab": 99}, r"\(vocabulary sizes 100 and 99; end ids 2 and -1\)"),
        (
            {"hashes": TOKENIZER | {"tokenizer.json": "c" * 64}},
            r"\(other tokenizer.json\): a token id would mean two things; make \S+/b again with "
            r"`hbp prepare` and the tokenizer of \S+/a \(/the/tokenizer\)$",
        ),
        ({"hashes": {"tokenizer.model": "a" * 64}}, r"\(other files\)"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path, changes, message):
    def write(name, hashes=TOKENIZER, **options):
        origin = {"tokenizer_hashes": hashes}
        return _write(
            tmp_path / name, [5, 6], origin=origin, tokenizer_path="/the/tokenizer", **options
        )

    with pytest.raises(ValueError, match=f"were made with different tokenizers {message}"):
        open_corpora([write("a"), write("b", seed=1, **changes)])


@pytest.mark.parametrize(
    "hashes",
    [
        TOKENIZER,
        {"tokenizer.json": "a" * 64},  # the same one, given as a file instead of its folder
        TOKENIZER | {"chat_template.jinja": "d" * 64},  # ids do not depend on it
        None,
    ],
)
def test_the_same_tokenizer_in_other_words_is_taken(tmp_path, hashes):
    first = _write(tmp_path / "a", [5], origin={"tokenizer_hashes": TOKENIZER})
    info = {} if hashes is None else {"origin": {"tokenizer_hashes": hashes}}
    assert len(open_corpora([first, _write(tmp_path / "b", [6], seed=1, **info)])) == 2


def test_weights_are_one_for_each_corpus(folders):
    joint = open_corpora(folders)
    assert weighted_sources(joint, None) is joint.source_ids
    assert weighted_sources(joint, [1, 2, 0.5]) is joint.source_ids
    for weights in ([], [2], [1, 1], [1, 1, 1, 1]):
        with pytest.raises(
            ValueError,
            match=rf"the number of --hbp-source-weight is {len(weights)}, that of corpora 3 "
            r"\(\S+c0, \S+c1, \S+c2\); give one for each, in the order of --hbp-corpus",
        ):
            weighted_sources(joint, weights)


def test_one_corpus_may_have_a_weight_too(folders):
    corpus = open_corpora(folders[:1])
    np.testing.assert_array_equal(weighted_sources(corpus, [2.0]), [0, 0, 0])


def test_plan_of_several_corpora_from_the_command_line(folders, tmp_path, capsys):
    corpora = [word for folder in folders for word in ("--corpus", folder)]
    weights = ["--source-weight", "2", "--source-weight", "1", "--source-weight", "0"]
    argv = ["plan", *corpora, *LEVELS, *weights, "--epochs", "2"]
    assert main([*argv, "--output", str(tmp_path / "plan")]) == 0
    lines = capsys.readouterr().out.splitlines()
    joint, plan = open_corpora(folders), Plan.load(tmp_path / "plan")
    assert plan.corpus_hash == joint.hash
    assert plan.corpus_paths == corpus_paths(joint)
    assert plan.source_weights == (2.0, 1.0, 0.0)
    np.testing.assert_array_equal(plan.source_ids, joint.source_ids)
    times = np.bincount(plan.sequence_ids, minlength=len(joint))
    assert times.tolist() == [4, 4, 4, 2, 2, 2, 2, 0]
    assert plan.dropped_reason.tolist() == [DROP_WEIGHTLESS]
    shown = [line.split() for line in lines if line.startswith(str(tmp_path / "c"))]
    total = 2 * sum(LENS[0]) + sum(LENS[1])
    assert shown == [
        [folders[0], "3", "17", "2", f"{2 * 17 / total:.1%}"],
        [folders[1], "4", "50", "1", f"{50 / total:.1%}"],
        [folders[2], "1", "4", "0", "0.0%"],
    ]
    assert main([*argv, "--json"]) == 0
    sources = json.loads(capsys.readouterr().out)["sources"]
    assert [source["source"] for source in sources] == folders
    assert sum(source["share"] for source in sources) == pytest.approx(1)

    assert main(["audit", str(tmp_path / "plan"), *corpora]) == 0
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "plan"), *corpora[2:], *corpora[:2]]) == 1
    assert "the plan was made from corpus" in capsys.readouterr().out


def test_a_wrong_number_of_weights_names_the_corpora(folders, capsys):
    argv = ["plan", "--corpus", folders[0], "--corpus", folders[1], *LEVELS]
    assert main([*argv, "--source-weight", "2"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "hbp: error: the number of --source-weight is 1, that of corpora 2 "
        f"({folders[0]}, {folders[1]}); give one for each, in the order of --corpus, 0 to "
        "leave one out\n"
    )
    assert main(["plan", "--lengths", "x.npy", *LEVELS, "--source-weight", "2"]) == 2


def test_sources_of_lengths_are_named_by_number(tmp_path, capsys):
    np.save(tmp_path / "lengths.npy", np.full(60, 8))
    np.save(tmp_path / "sources.npy", np.arange(60) * 3)
    argv = ["plan", "--lengths", str(tmp_path / "lengths.npy"), *LEVELS]
    assert main([*argv, "--sources", str(tmp_path / "sources.npy")]) == 0
    out = capsys.readouterr().out
    assert "and 40 more sources" in out
    assert "\n3               1       8       1                     1.7%\n" in out
    assert main([*argv, "--source-weight", "2"]) == 2
    assert "add --sources FILE.npy" in capsys.readouterr().err


def test_data_set_reads_the_corpus_of_the_source(folders):
    pytest.importorskip("torch")
    from megatron_hbp.dataset import HbpDataset
    from megatron_hbp.sampler import MicrobatchSampler

    joint = open_corpora(folders)
    parts = [Corpus.open(folder) for folder in folders]
    firsts = np.cumsum([0, *map(len, LENS)])
    weights = (2.0, 1.0, 3.0)
    plan = build_plan(
        joint.seq_lens,
        [Level(32, 1), Level(64, 2)],
        num_ranks=2,
        epochs=2,
        first_trained=joint.first_trained,
        source_ids=joint.source_ids,
        source_weights=weights,
        corpus_hash=joint.hash,
        corpus_paths=corpus_paths(joint),
    )
    assert plan.audit(joint.seq_lens) == []
    read: dict[int, int] = {0: 0, 1: 0, 2: 0}
    sets = [HbpDataset(plan, joint, rank) for rank in range(2)]
    for microbatch in MicrobatchSampler(plan):
        items = [data[microbatch] for data in sets]
        level = plan.levels[items[0]["level"]]
        for replica in range(2 // level.cp_size):
            pack, _ = plan.pack_index(microbatch, replica * level.cp_size)
            local = items[replica * level.cp_size : (replica + 1) * level.cp_size]
            tokens = np.concatenate([item["tokens"][0].numpy() for item in local])
            at = 0
            for sequence in plan.pack(pack):
                source = int(joint.source_ids[sequence])
                own = parts[source].tokens(int(sequence - firsts[source]))
                np.testing.assert_array_equal(tokens[at : at + len(own)], own)
                at += len(own)
                read[source] += 1
    assert read == {source: 2 * int(weights[source]) * len(LENS[source]) for source in range(3)}


def test_joining_loads_no_tokenizer():
    code = (
        "import sys, megatron_hbp.corpus.joint\n"
        "print([n for n in ('torch', 'transformers', 'tokenizers') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
