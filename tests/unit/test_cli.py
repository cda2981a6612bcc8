"""The command line: results, exit codes, and one line for every wrong use."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_hbp import Level, Plan, build_plan
from megatron_hbp.cli import main
from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.report.compare import compare_plan, compare_text
from tests.unit.corpus_samples import char_tokenizer, chat, prepare

LEVELS = ["--level", "64:1:2", "--level", "256:4:full"]
METHODS = [
    "levels, unbalanced",
    "256:4 isf",
    "256:4 best_fit",
    "256:4 first_fit_decreasing",
    "256:4 best_fit_decreasing",
    "256:4 in order",
    "256:4 random",
    "256:4 sorted",
    "online",
    "online, no lockstep",
]


@pytest.fixture
def lengths(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "lengths.npy"
    np.save(
        path, np.concatenate([rng.integers(2, 60, 300), rng.integers(65, 256, 20), [0, 1, 300]])
    )
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(0)
    pairs = []
    for length in rng.integers(3, 100, 60):
        mask = np.zeros(length, dtype=np.uint8)
        mask[length // 2 :] = 1
        pairs.append((rng.integers(3, 100, length), mask))
    write_corpus(tmp_path / "corpus", pairs, vocab_size=100, end_id=2, info={})
    return str(tmp_path / "corpus")


def _plan(lengths, *flags):
    return ["plan", "--lengths", lengths, *LEVELS, "--ranks", "8", "--overlong", "drop", *flags]


def _error(capsys, *argv):
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hbp: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


def test_plan_prints_a_table_and_saves(lengths, tmp_path, capsys):
    folder = tmp_path / "plan"
    assert main(_plan(lengths, "--output", str(folder), "--microbatches", "2")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    plan = Plan.load(folder)
    assert plan.hash() in out
    assert plan.num_microbatches == 2
    assert [str(level) for level in plan.levels] == ["64:1:2", "256:4:full"]
    assert plan.audit(np.load(lengths)) == []
    rows = {line.rsplit(maxsplit=2)[0]: line.split()[-2:] for line in out.splitlines() if line}
    assert rows["in"] == ["323", str(plan.tokens_in)]
    assert rows["dropped: over-long"] == ["1", "300"]
    assert rows["dropped: no trainable token"] == ["0", "0"]
    assert rows["dropped: empty"] == ["1", "0"]
    assert rows["padding_ratio"] == [
        f"{plan.metrics()[name]:.4f}" for name in ("padding_ratio", "padding_ratio_bound")
    ]
    assert f"steps {plan.num_steps} ({plan.num_steps} per epoch)" in out


def test_every_flag_reaches_the_plan(lengths, tmp_path, capsys):
    flags = {
        "--microbatches": "3",
        "--stages": "2",
        "--epochs": "2",
        "--seed": "5",
        "--packer": "isf",
        "--mixing": "step",
        "--curriculum-steps": "1",
        "--overlong": "truncate",
        "--tp": "2",
        "--fp8-recipe": "delayed",
    }
    argv = [*_plan(lengths), *(word for pair in flags.items() for word in pair)]
    argv += ["--sequence-parallel", "--output", str(tmp_path / "plan")]
    assert main(argv) == 0
    plan = Plan.load(tmp_path / "plan")
    assert (plan.num_microbatches, plan.num_stages, plan.epochs, plan.seed) == (3, 2, 2, 5)
    assert (plan.packer, plan.mixing, plan.curriculum_steps) == ("isf", "step", 1)
    assert plan.overlong == "truncate"
    assert plan.alignment.budget_multiple == 32


def test_json(lengths, capsys):
    assert main(_plan(lengths, "--json", "--compare")) == 0
    document = json.loads(capsys.readouterr().out)
    counts = document["counts"]
    assert counts["tokens_in"] == counts["tokens_kept"] + sum(document["dropped_tokens"].values())
    assert [level["level"] for level in document["levels"]] == ["64:1:2", "256:4:full"]
    assert sum(document["steps_per_epoch"]) == counts["steps"]
    assert document["output"] is None
    compared = document["compare"]
    assert list(compared) == ["HBP", *METHODS]
    metrics = [name for name in document["metrics"] if not name.endswith("_bound")]
    assert len(metrics) == 11
    for values in compared.values():
        assert set(values) == {"steps_per_epoch", *document["metrics"]}
        for name in metrics:
            most = name == "tokens_per_rank" or name.startswith("modelled_efficiency")
            value, bound = values[name], values[f"{name}_bound"]
            assert value <= bound + 1e-9 if most else value >= bound - 1e-9
    ours, isf, online = (compared[name] for name in ("HBP", "256:4 isf", "online"))
    assert {name: ours[name] for name in document["metrics"]} == document["metrics"]
    assert ours["communication_ratio"] < isf["communication_ratio"] == 1
    assert ours["communication_ratio_bound"] == online["communication_ratio"] < 1
    assert isf["communication_ratio_bound"] == 1
    assert ours["attention_balance_ratio"] < isf["attention_balance_ratio"]


def test_compare_table(lengths, capsys):
    assert main(_plan(lengths, "--compare", "--epochs", "2")) == 0
    out, err = capsys.readouterr()
    tables = out[out.index("Each metric stands") :]
    assert max(map(len, tables.splitlines())) <= 100
    heads = [line.split() for line in tables.splitlines() if line.startswith("method")]
    headings = "PR CR Ave-T eff. eff./step DBR DBR/step ABR ABR/step stretch mixing"
    assert [
        word for head in heads for word in head if word not in ("method", "steps", "bound")
    ] == (headings.split())
    for name in ("HBP", *METHODS):
        rows = [line for line in tables.splitlines() if line.startswith(f"{name}  ")]
        assert len(rows) == len(heads), name
        numbers = [row[len(name) :].split() for row in rows]
        assert [len(own) for own in numbers] == [len(head) - 1 for head in heads]
    assert err.splitlines() == [
        f"hbp: comparing with {name} ({index} of {len(METHODS)})"
        for index, name in enumerate(METHODS, 1)
    ]


def test_compare_by_domain():
    lens = np.array([0, *range(4, 64)])
    plan = build_plan(
        lens, [Level(64, 1)], 4, overlong="drop", source_ids=np.arange(61, dtype=np.int32) % 3
    )
    compared = compare_plan(plan, lambda line: None)
    assert all(values["source_mixing_ratio"] >= 0 for values in compared.values())
    assert "source mixing   bound" in compare_text(compared)


def test_the_same_plan_may_be_saved_again_but_no_other(lengths, tmp_path, capsys):
    folder = str(tmp_path / "plan")
    assert main(_plan(lengths, "--output", folder)) == 0
    assert main(_plan(lengths, "--output", folder)) == 0
    capsys.readouterr()
    error = _error(capsys, *_plan(lengths, "--output", folder, "--seed", "9"))
    assert "exists and is not this plan; name another folder" in error


def test_plan_from_a_corpus_and_audit_against_it(corpus, lengths, tmp_path, capsys):
    folder = str(tmp_path / "plan")
    argv = ["plan", "--corpus", corpus, *LEVELS, "--ranks", "8", "--output", folder]
    assert main(argv) == 0
    plan = Plan.load(folder)
    assert plan.corpus_hash == Corpus.open(corpus).hash
    assert plan.corpus_paths == (str(Path(corpus).resolve()),)
    assert plan.first_trained_hash is not None
    capsys.readouterr()
    assert main(["audit", folder]) == 0
    assert main(["audit", folder, "--corpus", corpus]) == 0
    assert capsys.readouterr().out.startswith("good: ")
    assert main(["audit", folder, "--lengths", lengths]) == 1
    assert "made from other lengths" in capsys.readouterr().out


def test_audit_says_when_the_corpus_is_another(corpus, tmp_path, capsys):
    folder, other = str(tmp_path / "plan"), tmp_path / "other"
    main(["plan", "--corpus", corpus, *LEVELS, "--ranks", "8", "--output", folder])
    opened = Corpus.open(corpus)
    masks = []
    for index, length in enumerate(opened.seq_lens):
        mask = np.zeros(length, dtype=np.uint8)
        mask[-1] = 1
        masks.append((np.array(opened.tokens(index)), mask))
    write_corpus(other, masks, vocab_size=100, end_id=2, info={})
    capsys.readouterr()
    assert main(["audit", folder, "--corpus", str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("the plan was made from corpus" in line for line in lines)
    assert any("made from another mask" in line for line in lines)


def test_audit_finds_sequences_without_a_trained_token(corpus, tmp_path, capsys):
    opened = Corpus.open(corpus)
    np.save(tmp_path / "lens.npy", np.array(opened.seq_lens))
    folder = str(tmp_path / "plan")
    argv = ["plan", "--lengths", str(tmp_path / "lens.npy"), "--level", "8:1", "--ranks", "2"]
    assert main([*argv, "--overlong", "truncate", "--output", folder]) == 0
    capsys.readouterr()
    assert main(["audit", folder, "--corpus", corpus]) == 1
    assert "kept sequences have no trained token" in capsys.readouterr().out


def test_audit_of_a_damaged_plan(lengths, tmp_path, capsys):
    folder = tmp_path / "plan"
    main(_plan(lengths, "--output", str(folder)))
    capsys.readouterr()
    path = folder / "sequence_ids.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["audit", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert "does not match its hash" in out
    assert err == ""


def test_audit_lists_each_violation_on_a_line(lengths, tmp_path, capsys):
    folder = tmp_path / "plan"
    main(_plan(lengths, "--output", str(folder)))
    plan = Plan.load(folder)
    ids = plan.sequence_ids.copy()
    ids[0] = ids[-1]
    counts = {"sequence_ids": ids, "tokens_in": 1}
    type(plan)(**(vars(plan) | counts)).save(tmp_path / "bad")
    capsys.readouterr()
    assert main(["audit", str(tmp_path / "bad")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    assert any(line.startswith("epoch 0: 1 kept") for line in lines)
    assert any(line.startswith("tokens in 1 !=") for line in lines)


def test_wrong_use_is_one_line(lengths, tmp_path, capsys):
    missing = _error(capsys, "plan")
    assert "--level, --ranks; see hbp plan --help" in missing
    assert "COMMAND; see hbp --help" in _error(capsys)
    assert "invalid choice: 'fly'" in _error(capsys, "fly")
    assert "one of the arguments --corpus --lengths is required" in _error(
        capsys, "plan", *LEVELS, "--ranks", "8"
    )
    assert "invalid int value: 'x'" in _error(capsys, *_plan(lengths, "--seed", "x"))
    assert "invalid choice: 'x'" in _error(capsys, *_plan(lengths, "--packer", "x"))
    assert "level 'x' is not PACK_LEN:CP" in _error(capsys, *_plan(lengths, "--level", "x"))
    assert "use 256:4" in _error(capsys, *_plan(lengths, "--level", "512:4"))
    assert "--tp is 0; it must be at least 1" in _error(capsys, *_plan(lengths, "--tp", "0"))
    assert "fp8 recipe 'x' is unknown" in _error(capsys, *_plan(lengths, "--fp8-recipe", "x"))
    assert "ranks" in _error(capsys, *_plan(lengths, "--ranks", "6"))
    overlong = _error(capsys, *_plan(lengths, "--overlong", "error"))
    assert "sequence 322 has 300 tokens" in overlong
    assert "use --overlong drop or --overlong truncate" in overlong  # this command's own flag
    nowhere = str(tmp_path / "nowhere")
    assert "cannot be read" in _error(capsys, *_plan(nowhere))
    assert "nowhere" in _error(capsys, "plan", "--corpus", nowhere, *LEVELS, "--ranks", "8")
    assert "holds no plan.json" in _error(capsys, "audit", nowhere)


@pytest.mark.parametrize("kind", ["floats", "pickle", "text", "two dimensions"])
def test_wrong_length_files(kind, tmp_path, capsys):
    path = tmp_path / "lengths.npy"
    if kind == "floats":
        np.save(path, np.array([1.0, 2.0]))
    elif kind == "pickle":
        np.save(path, np.array([{}]), allow_pickle=True)
    elif kind == "text":
        path.write_text("1 2 3")
    else:
        np.save(path, np.array([[1, 2]]))
    error = _error(capsys, *_plan(str(path)))
    assert "one-dimensional" in error
    assert "int32 or int64" in error


def test_help_names_the_commands(capsys):
    for argv, words in (
        (["--help"], ("prepare", "plan", "audit")),
        (["plan", "--help"], ("--curriculum-steps", "PACK_LEN:CP[:RECOMPUTE]", "--compare")),
    ):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 0
        out = capsys.readouterr().out
        assert all(word in out for word in words)


def test_br_a07_the_summary_adds_up(tmp_path, capsys):
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(1, 3000, 7473))
    argv = ["plan", "--lengths", str(path), "--level", "2048:1", "--ranks", "4", "--json"]
    assert main([*argv, "--overlong", "truncate"]) == 0
    document = json.loads(capsys.readouterr().out)
    counts = document["counts"]
    assert counts["sequences_in"] == 7473
    assert counts["sequences_in"] == counts["sequences_kept"] + counts["sequences_dropped"]
    assert main([*argv[:-1], "--overlong", "truncate"]) == 0
    out = capsys.readouterr().out
    assert (
        f"tokens in {counts['tokens_in']} == kept {counts['tokens_kept']} + dropped "
        f"{counts['tokens_dropped']} + truncated {counts['tokens_truncated']}"
    ) in out
    assert counts["tokens_in"] == sum(
        counts[f"tokens_{what}"] for what in ("kept", "dropped", "truncated")
    )
    assert ["2048:1", str(counts["packs"])] in [line.split()[:2] for line in out.splitlines()]


def test_example_runs():
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "examples.plan_only"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "HBP: 100200 sequences" in done.stdout


def test_planning_needs_neither_torch_nor_megatron():
    code = (
        "import sys; import megatron_hbp, megatron_hbp.cli\n"
        "print([name for name in ('torch', 'megatron', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_over_long_sequence_of_a_corpus_is_named_by_file_and_line(tmp_path, capsys):
    tokenizer = char_tokenizer(tmp_path / "t")
    rows = [chat("ua", ["q", "a"]), chat("u"), chat("ua", ["q", "a" * 300])]
    prepare(tmp_path, rows, tokenizer, "one")
    prepare(tmp_path, [*rows[:1], chat("ua", ["r", "b"])], tokenizer, "two")
    for corpora in (["one"], ["two", "one"]):
        names = [part for name in corpora for part in ("--corpus", str(tmp_path / name))]
        assert main(["plan", *names, "--level", "128:1", "--ranks", "1"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"hbp: error: {tmp_path}/one.jsonl:3: sequence ")
        assert "use --overlong drop" in error
