"""What a user can get wrong, each through the entry point and tested by its text.

Every command line runs alone up to the point where training would start, with the world size set as
torchrun sets it; all of them in one job. The good ones must get to that point: a check that refuses
too much would show.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hbp import cli
from megatron_hbp.alignment import Alignment
from megatron_hbp.config import HbpConfig, field_docs, flag_name
from megatron_hbp.corpus import Corpus, write_corpus
from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan
from tests.distributed import flags
from tests.distributed.command_lines import AS_RANK_1, CASES, GOOD

S = 64
MODEL = [*flags.COMMON, *flags.SIZE, *flags.GQA, "--seq-length", str(S)]


class _Files:
    """Corpora and plans that the command lines name, all for 4 ranks with 2 micro-batches."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(0)

        def made(name: str, lens: list[int], vocab: int = 250, high: int = 250) -> Corpus:
            rows = [(rng.integers(0, high, n), np.ones(n, dtype=np.uint8)) for n in lens]
            return write_corpus(folder / name, rows, vocab_size=vocab, end_id=0)

        corpus = made("corpus", [40, 60, 100, 20, 30, 64, 128, 10] * 4)
        self.corpus = str(corpus.path)
        self.other_corpus = str(made("other", [40, 60, 100]).path)
        self.big_ids = str(made("big_ids", [40, 60], vocab=5000, high=5000).path)
        self.long_rows = str(made("long_rows", [40, 129, 500]).path)
        self.plan = self._plan(folder / "plan", corpus)
        self.dense_plan = self._plan(folder / "dense", corpus, levels=("64:1", "128:2:full"))
        self.plan_of_8_ranks = self._plan(folder / "plan8", corpus, num_ranks=8)
        self.padded_plan = self._plan(folder / "padded", corpus, alignment=Alignment(16, (16, 16)))
        self.fp8_plan = self._plan(folder / "fp8", corpus, alignment=Alignment(16, (1, 1)))
        self.one_by_one = self._plan(folder / "one", corpus, num_microbatches=1)
        self.lengths_only = self._plan(folder / "lengths", corpus, corpus_paths=())
        self.cut_plan = self._plan(folder / "cut", corpus)
        with (Path(self.cut_plan) / "sequence_ids.npy").open("r+b") as file:
            file.seek(-4, 2)
            file.write(b"\x07\x00\x00\x00")
        self.torn_plan = self._plan(folder / "torn", corpus)
        text = (Path(self.torn_plan) / "plan.json").read_text()
        (Path(self.torn_plan) / "plan.json").write_text(text[: len(text) // 2])
        self.cut_corpus = str(made("cut_corpus", [40, 60]).path)
        with (Path(self.cut_corpus) / "tokens.bin").open("r+b") as file:
            file.truncate(10)
        self.nothing = str(folder / "nothing")
        self.cache = str(folder / "cache")

    @staticmethod
    def _plan(folder: Path, corpus: Corpus, levels=("64:1", "128:2"), **changes: Any) -> str:
        settings: dict[str, Any] = {
            "num_ranks": 4,
            "num_microbatches": 2,
            "corpus_hash": corpus.hash,
            "corpus_paths": (str(corpus.path),),
            "first_trained": corpus.first_trained,
        } | changes
        plan = build_plan(corpus.seq_lens, [Level.parse(text) for text in levels], **settings)
        plan.save(folder)
        return str(folder)


def _command_line(template: str, files: _Files) -> list[str]:
    """MODEL and the template's flags; !--flag takes one of MODEL's away, with its value."""
    argv = [*MODEL, "--global-batch-size", "8"]
    for word in template.split():
        if not word.startswith("!"):
            argv.append(word.format_map(vars(files)))
            continue
        at = argv.index(word[1:])
        has_value = not argv[at + 1].startswith("--")
        del argv[at : at + 1 + has_value]
    return argv


@pytest.fixture(scope="module")
def outcomes(cluster, tmp_path_factory) -> dict[str, dict[str, Any]]:
    files = _Files(tmp_path_factory.mktemp("errors"))
    templates = {name: (text, environment) for name, (text, environment, _) in CASES.items()}
    templates |= {
        name: (text, {"RANK": 1} if name in AS_RANK_1 else {}) for name, text in GOOD.items()
    }
    templates["help"] = ("--help", {})
    (results,) = cluster.run(
        1,
        "tests.distributed.jobs_errors:outcomes",
        command_lines=[_command_line(text, files) for text, _ in templates.values()],
        environments=[
            {"RANK": "0", "WORLD_SIZE": "4"} | {k: str(v) for k, v in environment.items()}
            for _, environment in templates.values()
        ],
    )
    return dict(zip(templates, results, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_error(outcomes, name):
    outcome = outcomes[name]
    assert "error" in outcome, outcome
    error = outcome["error"]
    assert error.startswith("megatron_hbp: error: ")
    assert "\n" not in error
    assert re.match(CASES[name][2], error.removeprefix("megatron_hbp: error: ")), error


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_is_not_refused(outcomes, name):
    assert outcomes[name] == {"starts": True}


def test_help_shows_every_flag(outcomes):
    text = outcomes["help"]["exit"]
    shown = re.findall(r"^  (--hbp-[a-z-]+)", text, flags=re.MULTILINE)
    assert sorted(shown) == sorted(flag_name(name) for name in field_docs(HbpConfig))
    words = " ".join(text.split())
    assert "Epochs in the plan, 1 or more (default 1)." in words


def test_a_missing_tokenizer_is_named(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    missing = str(tmp_path / "tokenizer")
    code = cli.main(
        ["prepare", "--input", str(rows), "--tokenizer", missing, "--output", str(tmp_path / "out")]
    )
    assert code == 2
    assert re.match(
        rf"hbp: error: .*{re.escape(missing)}.*; .*tokenizer.json", capsys.readouterr().err
    )


def test_a_corpus_without_trained_tokens_is_refused(tmp_path):
    rows = [(np.array([1, 2, 3]), np.array([1, 0, 0]))]
    with pytest.raises(ValueError, match="sequence 0 has no trained token"):
        write_corpus(tmp_path / "corpus", rows, vocab_size=10, end_id=0)
    with pytest.raises(ValueError, match=r"all 2 sequences are dropped \(2 no trainable token\)"):
        build_plan(np.array([3, 4]), [Level(8, 1)], 1, first_trained=np.array([3, 4]))
