"""Plans at start-up: what decides their cache folder, who builds, what happens to damage."""

import inspect
import json
import multiprocessing
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import megatron_hbp
from megatron_hbp import Level, build_plan, cli
from megatron_hbp.alignment import Alignment
from megatron_hbp.claim import Claim
from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.corpus.joint import corpus_paths, open_corpora
from megatron_hbp.host import plan_source
from megatron_hbp.plan import Plan
from tests.host import plan_runs
from tests.host.plan_runs import config, plan_of, shape
from tests.unit.corpus_samples import CHATML, char_tokenizer, chat, prepare

SPAWN = multiprocessing.get_context("spawn")
LENS = [40, 60, 100, 20, 30, 64, 128, 10] * 8


@pytest.fixture
def corpus(tmp_path) -> str:
    return str(plan_runs.write(tmp_path / "corpus", LENS).path)


@pytest.fixture
def other(tmp_path) -> str:
    return str(plan_runs.write(tmp_path / "other", [33, 50, 90], seed=1).path)


@pytest.fixture
def builds(monkeypatch) -> list[int]:
    """One entry for each call of the planner in this process."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return build_plan(*args, **kwargs)

    monkeypatch.setattr(plan_source, "build_plan", counted)
    return calls


def _folders(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


# parameter of build_plan: another value of it, as flags or as what the host fixes
FLAGS = {
    "epochs": {"epochs": 2},
    "seed": {"seed": 1235},
    "packer": {"packer": "isf"},
    "mixing": {"mixing": "step"},
    "max_mixing": {"max_mixing": 1.0},
    "curriculum_steps": {"curriculum_steps": 1},
    "overlong": {"overlong": "drop"},
    "source_weights": {"source_weight": (2.0,)},
    "source_weights, another": {"source_weight": (3.0,)},
    "levels, longest pack": {"level": (Level(64, 1), Level(128, 2), Level(256, 4))},
    "levels, CP size": {"level": (Level(64, 1), Level(256, 4))},
    "levels, recompute": {"level": (Level(64, 1), Level(128, 2, "full"))},
    "levels, S": {"level": (Level(80, 1), Level(160, 2))},
}
HOST = {
    "num_ranks": {"num_ranks": 8},
    "num_microbatches": {"num_microbatches": 4},
    "num_stages": {"num_stages": 2},
    "num_virtual_stages": {"num_virtual_stages": 2},
    "alignment, budget": {"alignment_of": lambda levels: Alignment(16, (1,) * len(levels))},
    "alignment, documents": {"alignment_of": lambda levels: Alignment(1, (2,) * len(levels))},
}


def test_br_k01_every_setting_has_a_folder_of_its_own(corpus, tmp_path, builds):
    cache = tmp_path / "cache"
    settings = [({}, {}), *((flags, {}) for flags in FLAGS.values())]
    settings += [({}, changes) for changes in HOST.values()]
    for count, (flags, changes) in enumerate(settings, 1):
        plan = plan_of(config([corpus], cache, **flags), **changes)
        assert len(builds) == len(_folders(cache)) == count, (flags, changes)
        assert plan_of(config([corpus], cache, **flags), **changes).hash() == plan.hash()
        assert len(builds) == count, (flags, changes)  # unchanged: a hit


def test_br_k01_no_parameter_of_the_planner_is_forgotten():
    """A new one has to appear above, or here with its reason."""
    of_the_corpus = {"seq_lens", "first_trained", "source_ids", "corpus_hash"}
    not_content = {"corpus_paths"}
    never_given = {"cost", "lineage"}
    changed = {name.split(",")[0] for name in (*FLAGS, *HOST)}
    parameters = set(inspect.signature(build_plan).parameters)
    assert parameters <= changed | of_the_corpus | not_content | never_given
    assert changed <= parameters
    given = re.findall(r"^            (\w+)=", inspect.getsource(plan_source._planned), re.M)
    assert not never_given & set(given)


def test_br_k01_one_byte_of_data_tokenizer_or_template(tmp_path, builds):
    """From rows to plans: whatever changes a token or a mask has another folder."""
    tokenizer = char_tokenizer(tmp_path / "tokenizer")
    rows = [chat("ua", ["a", "b" * n]) for n in range(1, 9)]
    edited = [*rows[:-1], chat("ua", ["a", "b" * 7 + "c"])]
    longer = CHATML.replace("role }}\n", "role }}:\n").replace("assistant\n", "assistant:\n")
    corpora = [
        prepare(tmp_path, rows, tokenizer, "rows"),
        prepare(tmp_path, edited, tokenizer, "edited"),
        prepare(tmp_path, rows, char_tokenizer(tmp_path / "t", template=longer), "template"),
        prepare(tmp_path, rows[::-1], tokenizer, "order"),
        prepare(tmp_path, rows[1:], tokenizer, "one_row_less"),
    ]
    for count, corpus in enumerate(corpora, 1):
        for _ in range(2):
            plan_of(config([str(corpus.path)], tmp_path / "cache"))
            assert len(builds) == len(_folders(tmp_path / "cache")) == count, corpus.path
    again = prepare(tmp_path, rows, tokenizer, "again")
    plan_of(config([str(again.path)], tmp_path / "cache"))  # the same content elsewhere: a hit
    assert len(builds) == len(corpora)


@pytest.mark.parametrize("what", ["a token", "the mask", "the vocabulary"])
def test_br_k01_one_value_of_the_store(tmp_path, builds, what):
    rows = [(np.arange(n), np.ones(n, dtype=np.uint8)) for n in LENS[:8]]
    write_corpus(tmp_path / "a", rows, vocab_size=200, end_id=2)
    rows[3][0][-1] += what == "a token"
    rows[3][1][5] = what != "the mask"
    write_corpus(tmp_path / "b", rows, vocab_size=200 + (what == "the vocabulary"), end_id=2)
    for name in ("a", "b"):
        plan_of(config([str(tmp_path / name)], tmp_path / "cache"))
    assert len(builds) == len(_folders(tmp_path / "cache")) == 2


def test_br_k01_sources_their_order_and_weights(corpus, other, tmp_path, builds):
    third = str(plan_runs.write(tmp_path / "third", [12, 14], seed=2).path)
    asked = [
        ([corpus], None),
        ([corpus, other], None),
        ([other, corpus], None),
        ([corpus, other, third], None),
        ([corpus, other], (2.0, 1.0)),
        ([corpus, other], (1.0, 2.0)),
        ([corpus, other], (1.0, 0.5)),
    ]
    for count, (corpora, weights) in enumerate(asked, 1):
        for _ in range(2):
            plan_of(config(corpora, tmp_path / "cache", source_weight=weights))
            assert len(builds) == len(_folders(tmp_path / "cache")) == count, (corpora, weights)


def test_br_k01_code_version(corpus, tmp_path, builds, monkeypatch):
    package = Path(megatron_hbp.__file__).parent
    hashes = {plan_source._code_hash()}
    for name in ("planner.py", next(package.glob("_C*.so")).name):
        copy = tmp_path / name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
        content = bytearray((copy / name).read_bytes())
        content[-1] ^= 1
        (copy / name).write_bytes(content)
        with monkeypatch.context() as patch:
            patch.setattr(megatron_hbp, "__file__", str(copy / "__init__.py"))
            hashes.add(plan_source._code_hash.__wrapped__())
    assert len(hashes) == 3
    for count, code in enumerate(hashes, 1):
        monkeypatch.setattr(plan_source, "_code_hash", lambda code=code: code)
        plan_of(config([corpus], tmp_path / "cache"))
        assert len(builds) == count


def test_the_cache_lies_in_the_first_corpus_unless_named(corpus, other):
    plan_of(config([other, corpus]))
    assert len(_folders(Path(other) / "plans")) == 1
    assert not (Path(corpus) / "plans").exists()
    assert len(open_corpora([other])) == 3  # it is no part of the corpus


def _processes(tmp_path, caches: list[Path], corpus: str, seconds: float = 0.0):
    """One process for each cache, acting as rank 0, 1, ...; (hashes, number of builds)."""
    traces, answers = tmp_path / "traces", tmp_path / "answers"
    traces.mkdir()
    answers.mkdir()
    workers = [
        SPAWN.Process(
            target=plan_runs.one_rank,
            args=(config([corpus], cache), rank, traces, seconds, answers / str(rank)),
        )
        for rank, cache in enumerate(caches)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * len(workers)
    return [file.read_text() for file in answers.iterdir()], len(list(traces.iterdir()))


def test_br_k02_two_nodes_with_local_folders_both_plan(corpus, tmp_path):
    caches = [tmp_path / "node0", tmp_path / "node1"]
    hashes, num_builds = _processes(tmp_path, caches, corpus)
    assert num_builds == 2
    assert len(set(hashes)) == 1
    (first,), (second,) = (list(cache.iterdir()) for cache in caches)
    assert first.name == second.name
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    assert Plan.load(second).audit(Corpus.open(corpus).seq_lens) == []


def test_br_k02_eight_processes_on_one_folder_build_once(corpus, tmp_path):
    hashes, num_builds = _processes(tmp_path, [tmp_path / "cache"] * 8, corpus, seconds=0.5)
    assert num_builds == 1
    assert len(hashes) == 8
    assert len(set(hashes)) == 1
    assert len(_folders(tmp_path / "cache")) == 1


def test_br_k02_any_rank_may_build(corpus, tmp_path, builds, capsys):
    """Of a node that sees no folder of rank 0's."""
    plan_of(config([corpus], tmp_path / "cache"), rank=13, local_rank=5)
    assert len(builds) == 1
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"> hbp: rank 13 plans 64 sequences in \S+/cache/[0-9a-f]{24}", lines[0])
    assert re.fullmatch(r"> hbp: planned in \d+\.\d s", lines[1])
    assert len(lines) == 2


def test_br_k04_eight_processes_build_and_read_fifty_plans(corpus, tmp_path):
    traces, cache = tmp_path / "traces", tmp_path / "cache"
    traces.mkdir()
    workers = [
        SPAWN.Process(target=plan_runs.many_plans, args=([corpus], cache, rank, traces, 50))
        for rank in range(8)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 8
    assert len(_folders(cache)) == len(list(traces.iterdir())) == 50


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


FILES = ["plan.json", "seq_lens.npy", "sequence_ids.npy", "epoch_offsets.npy", "source_ids.npy"]
DAMAGE = {"cut": _cut, "flipped": _flip, "removed": Path.unlink}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_br_k04_a_damaged_plan_is_set_aside_and_made_again(
    corpus, other, tmp_path, builds, *, capsys, name, damage
):
    settings = config([corpus, other], tmp_path / "cache")
    wanted = plan_of(settings).hash()
    (folder,) = (tmp_path / "cache").iterdir()
    DAMAGE[damage](folder / name)
    capsys.readouterr()
    again = plan_of(settings)
    assert again.hash() == wanted
    assert len(builds) == 2
    aside = f"{folder.name}.damaged-1"
    assert _folders(tmp_path / "cache") == {folder.name, aside}
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("> hbp: ")
    assert first.endswith(f": it is set aside as {folder.parent / aside} and made again")
    plan_of(settings)
    assert len(builds) == 2


def test_br_k04_a_second_damage_is_kept_too(corpus, tmp_path):
    settings = config([corpus], tmp_path / "cache")
    for _ in range(3):
        plan_of(settings)
        (folder,) = (p for p in (tmp_path / "cache").iterdir() if "." not in p.name)
        _cut(folder / "sequence_ids.npy")
    assert len(_folders(tmp_path / "cache")) == 3


def test_br_k04_a_valid_plan_is_never_written_again(corpus, tmp_path):
    plan_of(config([corpus], tmp_path / "cache"))
    (folder,) = (tmp_path / "cache").iterdir()
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    for rank in range(3):
        plan_of(config([corpus], tmp_path / "cache"), rank=rank)
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before


def test_what_is_there_needs_no_right_to_write(corpus, tmp_path, monkeypatch):
    plan_of(config([corpus], tmp_path / "cache"))
    monkeypatch.setattr(Claim, "take", lambda self: pytest.fail("claimed"))
    plan_of(config([corpus], tmp_path / "cache"), rank=1)


def test_a_cache_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError,
        match=r"the plan cache \S+/file cannot be used \(.*\); name a folder .* with "
        r"--hbp-plan-cache, or make the plan beforehand with `hbp plan`",
    ):
        plan_of(config([corpus], tmp_path / "file"))


def test_time_out_names_the_builder_and_the_ways_out(corpus, tmp_path):
    settings = config([corpus], tmp_path / "cache", plan_timeout=0.2)
    plan_of(settings)
    (folder,) = (tmp_path / "cache").iterdir()
    shutil.rmtree(folder)
    holder = Claim(folder)
    assert holder.take()
    with pytest.raises(
        ValueError,
        match=rf"rank 3 waited \d s for process {os.getpid()} on \S+ to make the plan in {folder}; "
        r"look at the log of that process, make the plan beforehand with `hbp plan` and name it "
        r"with --hbp-plan, or raise --hbp-plan-timeout",
    ):
        plan_of(settings, rank=3)
    holder.release()


@pytest.mark.parametrize("local_rank", [0, 1])
def test_only_the_first_of_a_node_tells_how_long_it_waits(
    corpus, tmp_path, monkeypatch, capsys, local_rank
):
    settings = config([corpus], tmp_path / "cache", plan_timeout=0.2)
    plan_of(settings)
    (folder,) = (tmp_path / "cache").iterdir()
    shutil.rmtree(folder)
    monkeypatch.setattr("megatron_hbp.claim._REPORT_SECONDS", 0.0)
    holder = Claim(folder)
    assert holder.take()
    capsys.readouterr()
    with pytest.raises(ValueError, match="rank 8 waited"):
        plan_of(settings, rank=8, local_rank=local_rank)
    holder.release()
    out = capsys.readouterr().out
    assert (f"> hbp: rank 8 waited 0 s for process {os.getpid()} on " in out) == (local_rank == 0)


def test_an_error_of_the_planner_reaches_each_rank(corpus, tmp_path):
    settings = config([corpus], tmp_path / "cache", level=(Level(64, 1),))
    for rank in range(2):
        with pytest.raises(ValueError, match="sequence 2 has 100 tokens, but the longest level"):
            plan_of(settings, rank=rank)
    assert _folders(tmp_path / "cache") == set()


def test_kill_9_of_the_builder_lets_another_plan_at_once(corpus, tmp_path, builds):
    traces, cache = tmp_path / "traces", tmp_path / "cache"
    traces.mkdir()
    victim = SPAWN.Process(
        target=plan_runs.one_rank,
        args=(config([corpus], cache), 0, traces, 600.0, tmp_path / "answer"),
        daemon=True,
    )
    victim.start()
    while not list(traces.iterdir()):
        time.sleep(0.05)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    plan = plan_of(config([corpus], cache, plan_timeout=5.0), rank=1)
    assert plan.audit(Corpus.open(corpus).seq_lens) == []
    assert len(builds) == 1
    assert len(_folders(cache)) == 1  # the dead builder's claim is gone


@pytest.mark.slow
def test_br_k05_a_build_longer_than_the_time_out_of_the_group(corpus, tmp_path):
    """120 s of planning against 30 s of the group, scaled down to 20 s and 5 s."""
    pytest.importorskip("torch")
    traces = tmp_path / "traces"
    traces.mkdir()
    workers = [
        SPAWN.Process(
            target=plan_runs.slow_build_then_collective,
            args=(config([corpus], tmp_path / "cache"),),
            kwargs={
                "rank": rank,
                "traces": traces,
                "seconds": 20.0,
                "group": tmp_path / "group",
                "group_seconds": 5.0,
            },
        )
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(list(traces.iterdir())) == 1


def _saved(tmp_path, corpora: list[str], *flags: str) -> str:
    """A plan made by the command line for the ranks of `shape`."""
    argv = ["plan", *(word for folder in corpora for word in ("--corpus", folder)), *flags]
    for level in plan_runs.LEVELS:
        argv += ["--level", str(level)]
    argv += ["--ranks", "4", "--microbatches", "2", "--output", str(tmp_path / "plan")]
    assert cli.main(argv) == 0
    return str(tmp_path / "plan")


def test_the_command_line_and_the_host_make_the_same_plan(corpus, other, tmp_path):
    weights = ["--source-weight", "1", "--source-weight", "2.5"]
    saved = Plan.load(_saved(tmp_path, [corpus, other], *weights))
    ours = plan_of(config([corpus, other], tmp_path / "cache", source_weight=(1.0, 2.5)))
    assert ours.hash() == saved.hash()
    assert ours.corpus_paths == saved.corpus_paths == corpus_paths(open_corpora([corpus, other]))
    assert ours.source_weights == (1.0, 2.5)


def test_a_plan_names_its_corpora(corpus, other, tmp_path):
    saved = _saved(tmp_path, [corpus, other], "--source-weight", "1", "--source-weight", "2")
    for settings in (
        config([], plan=saved, level=()),
        config([corpus, other], plan=saved, level=(), source_weight=(1.0, 2.0)),
    ):
        plan, opened = plan_source.training_plan(settings, shape())
        assert plan.hash() == Plan.load(saved).hash()
        assert len(opened) == len(LENS) + 3
        np.testing.assert_array_equal(opened.source_ids, plan.source_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"source_weight": (2.0, 1.0)},
            r"--hbp-source-weight 2 1 contradicts the plan \S+, which has 1 2; leave",
        ),
        ({"corpora": "other corpus"}, r"was made from \S+corpus, \S+other in this order; name"),
        ({"corpora": "corpus"}, r"was made from another corpus than \S+/corpus \(hash"),
    ],
)
def test_what_contradicts_the_plan_is_refused(corpus, other, tmp_path, changes, message):
    saved = _saved(tmp_path, [corpus, other], "--source-weight", "1", "--source-weight", "2")
    names = changes.pop("corpora", "").split()
    corpora = [str(tmp_path / name) for name in names]
    with pytest.raises(ValueError, match=message):
        plan_of(config(corpora, plan=saved, level=(), **changes))


def test_corpora_made_anew_in_the_same_folders_are_others(corpus, other, tmp_path):
    saved = _saved(tmp_path, [corpus, other])
    shutil.rmtree(other)
    plan_runs.write(tmp_path / "other", [33, 50, 90], seed=2)
    with pytest.raises(ValueError, match=r"was made from another corpus than \S+corpus, \S+other "):
        plan_of(config([], plan=saved, level=()))


def test_a_weight_against_a_plan_without(corpus, tmp_path):
    saved = _saved(tmp_path, [corpus])
    with pytest.raises(ValueError, match=r"--hbp-source-weight 2 contradicts .*, which has none"):
        plan_of(config([], plan=saved, level=(), source_weight=(2.0,)))


def test_a_wrong_number_of_weights_names_the_corpora(corpus, other, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"the number of --hbp-source-weight is 1, that of corpora 2 \(\S+corpus, \S+other\)",
    ):
        plan_of(config([corpus, other], tmp_path / "cache", source_weight=(2.0,)))


def test_a_plan_from_lengths_fits_those_lengths_only(corpus, tmp_path):
    plans = {}
    for name, lens in (("right", LENS), ("reversed", LENS[::-1])):
        np.save(tmp_path / f"{name}.npy", np.array(lens))
        argv = ["plan", "--lengths", str(tmp_path / f"{name}.npy"), "--ranks", "4"]
        for level in plan_runs.LEVELS:
            argv += ["--level", str(level)]
        argv += ["--microbatches", "2", "--output", str(tmp_path / name)]
        assert cli.main(argv) == 0
        plans[name] = str(tmp_path / name)
    assert plan_of(config([corpus], plan=plans["right"], level=())).num_steps > 0
    with pytest.raises(ValueError, match=r"reversed was made from other lengths than those of "):
        plan_of(config([corpus], plan=plans["reversed"], level=()))


@pytest.mark.parametrize("text", ["[]", "3", '"plan"', "{}", '{"format_version": 3}'])
def test_a_document_that_is_no_plan_is_set_aside(corpus, tmp_path, builds, text):
    settings = config([corpus], tmp_path / "cache")
    plan_of(settings)
    (folder,) = (tmp_path / "cache").iterdir()
    (folder / "plan.json").write_text(text)
    plan_of(settings)
    assert len(builds) == 2
    assert json.loads((folder / "plan.json").read_text())["format_version"]
