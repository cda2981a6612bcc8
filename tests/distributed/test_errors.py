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
from megatron_hbp.corpus.store import Corpus, write_corpus
from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan
from tests.distributed import flags

S = 64
MODEL = [*flags.COMMON, *flags.SIZE, *flags.GQA, "--seq-length", str(S)]
FOUR_LEVELS = ["--hbp-level", "64:1", "--hbp-level", "128:2"]


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
        self.lengths_only = self._plan(folder / "lengths", corpus, corpus_path=None)
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
        self.untrained_cache = str(folder / "cache")

    @staticmethod
    def _plan(folder: Path, corpus: Corpus, levels=("64:1", "128:2"), **changes: Any) -> str:
        settings: dict[str, Any] = {
            "num_ranks": 4,
            "num_microbatches": 2,
            "corpus_hash": corpus.hash,
            "corpus_path": str(corpus.path),
            "first_trained": corpus.first_trained,
        } | changes
        plan = build_plan(corpus.seq_lens, [Level.parse(text) for text in levels], **settings)
        plan.save(folder)
        return str(folder)


# name: (flags after MODEL and the batch size, changed environment, expected text)
# {name} is a path of _Files; the world is 4 ranks unless the environment says otherwise
PLAN = "--hbp-plan {plan}"
CORPUS = "--hbp-corpus {corpus} --hbp-level 64:1 --hbp-level 128:2"

CASES: dict[str, tuple[str, dict[str, int], str]] = {
    "pack_len_is_not_s_x_cp": (
        "--hbp-corpus {corpus} --hbp-level 64:1 --hbp-level 192:2",
        {},
        r"level 192:2: PACK_LEN must be S x CP with S = --seq-length 64; use 128:2, or "
        r"--seq-length 96",
    ),
    "pack_len_is_no_multiple_of_cp": (
        "--hbp-corpus {corpus} --hbp-level 64:1 --hbp-level 127:2",
        {},
        r"level 127:2: pack_len must be S x cp_size, a multiple of 2; use 126",
    ),
    "seq_length_is_not_s": (
        f"{PLAN} --seq-length 32",
        {},
        r"level 64:1: PACK_LEN must be S x CP with S = --seq-length 32; use 32:1, or "
        r"--seq-length 64",
    ),
    "cp_does_not_divide_ranks": (
        "--hbp-corpus {corpus} --hbp-level 256:4 --global-batch-size 6",
        {"WORLD_SIZE": 6},
        r"level 256:4: CP size 4 does not divide 6 ranks; choose one of \[1, 2, 3, 6\]",
    ),
    "cp_does_not_divide_heads": (
        "--hbp-corpus {corpus} --hbp-level 64:1 --hbp-level 512:8",
        {"WORLD_SIZE": 8},
        r"level 512:8: CP size 8 does not divide the 4 attention heads of a tensor-parallel rank",
    ),
    "cp_does_not_divide_heads_per_tp_rank": (
        "--hbp-corpus {corpus} --hbp-level 256:4 --tensor-model-parallel-size 2",
        {"WORLD_SIZE": 8},
        r"level 256:4: CP size 4 does not divide the 2 attention heads of a tensor-parallel rank",
    ),
    "br_d17_micro_batch_size": (
        f"{PLAN} --micro-batch-size 2",
        {},
        r"--micro-batch-size is 2; with HBP it must be 1: a micro-batch is one pack per rank; "
        r"raise "
        r"--seq-length and the levels' PACK_LEN instead",
    ),
    "eval_micro_batch_size": (
        f"{PLAN} --eval-micro-batch-size 2",
        {},
        r"--eval-micro-batch-size is 2; with HBP it must be 1",
    ),
    "context_parallel_size": (
        f"{PLAN} --context-parallel-size 2",
        {},
        r"--context-parallel-size is 2; with HBP it must be 1: the CP size of each pack comes from "
        r"--hbp-level",
    ),
    "global_batch_is_not_ranks_x_micro_batches": (
        f"{PLAN} --global-batch-size 6",
        {},
        r"--global-batch-size is 6; it must be ranks x micro-batches, a multiple of 4 ranks",
    ),
    "br_j16_global_batch_below_the_ranks": (
        f"{PLAN} --global-batch-size 4",
        {"WORLD_SIZE": 8},
        r"--global-batch-size is 4; it must be ranks x micro-batches, a multiple of 8 ranks",
    ),
    "eval_global_batch_is_not_ranks_x_micro_batches": (
        f"{PLAN} --eval-global-batch-size 6",
        {},
        r"--eval-global-batch-size is 6; it must be ranks x micro-batches, a multiple of 4 ranks",
    ),
    "world_size_is_not_a_multiple_of_tp_x_pp": (
        f"{PLAN} --pipeline-model-parallel-size 4",
        {"WORLD_SIZE": 6},
        r"the world size 6 is not a multiple of TP x PP = 4",
    ),
    "dataloader_type_is_missing": (
        f"{PLAN} !--dataloader-type",
        {},
        r"--dataloader-type is missing; HBP needs --dataloader-type external",
    ),
    "dataloader_type_is_another": (
        f"{PLAN} --dataloader-type cyclic",
        {},
        r"--dataloader-type is cyclic; HBP needs --dataloader-type external",
    ),
    "per_token_loss_is_missing": (
        f"{PLAN} !--calculate-per-token-loss",
        {},
        r"--calculate-per-token-loss is missing; HBP needs it",
    ),
    "s_is_not_a_multiple_of_tp": (
        "--hbp-corpus {corpus} --hbp-level 66:1 --seq-length 66 --tensor-model-parallel-size 4 "
        "--sequence-parallel",
        {},
        r"--seq-length 66 is not a multiple of 4 \(TP 4 under sequence parallelism x the "
        r"low-precision recipe's multiple\); use 68",
    ),
    "longest_level_is_beyond_the_positions": (
        f"{PLAN} --max-position-embeddings 64",
        {},
        r"--max-position-embeddings 64 is below the longest level 128:2; raise it to 128",
    ),
    "train_iters_beyond_the_plan": (
        f"{PLAN} --train-iters 1000",
        {},
        r"--train-iters 1000 is beyond the plan's \d+ steps \(1 epochs\); raise --hbp-epochs",
    ),
    "train_samples": (
        f"{PLAN} --train-samples 100",
        {},
        r"--train-samples is not supported with HBP: use --hbp-epochs or --train-iters",
    ),
    "br_j16_batch_size_ramp_up": (
        f"{PLAN} --rampup-batch-size 4 4 100",
        {},
        r"--rampup-batch-size is not supported with HBP: a plan has whole steps of one size",
    ),
    "br_j16_batch_size_schedule": (
        f"{PLAN} --step-batch-size-schedule 0:8",
        {},
        r"--step-batch-size-schedule is not supported with HBP: a plan has one batch size",
    ),
    "multi_token_prediction": (
        f"{PLAN} --mtp-num-layers 1",
        {},
        r"--mtp-num-layers is not supported with HBP: multi-token prediction rebuilds stock layers",
    ),
    "qk_clip": (
        f"{PLAN} --qk-clip",
        {},
        r"--qk-clip is not supported with HBP: it reads attention logits that HBP",
    ),
    "full_validation": (
        f"{PLAN} --full-validation",
        {},
        r"--full-validation is not supported with HBP: --hbp-valid-corpus is evaluated whole "
        r"anyway",
    ),
    "sft": (
        f"{PLAN} --sft",
        {},
        r"--sft is not supported with HBP: HBP brings its own SFT data",
    ),
    "hybrid_context_parallel": (
        f"{PLAN} --hybrid-context-parallel",
        {},
        r"--hybrid-context-parallel is not supported with HBP: HBP switches the CP size itself",
    ),
    "cuda_graph_impl": (
        f"{PLAN} --cuda-graph-impl local",
        {},
        r"--cuda-graph-impl is not supported with HBP: a graph fixes the pack's boundaries",
    ),
    "enable_cuda_graph": (
        f"{PLAN} --enable-cuda-graph",
        {},
        r"--enable-cuda-graph is not supported with HBP: a graph fixes the pack's boundaries",
    ),
    "external_cuda_graph": (
        f"{PLAN} --external-cuda-graph",
        {},
        r"--external-cuda-graph is not supported with HBP: a graph fixes the pack's boundaries",
    ),
    "cpu_offload_with_per_level_recompute": (
        "--hbp-plan {dense_plan} --cpu-offloading-num-layers 1",
        {},
        r"--cpu-offloading-num-layers is not supported with per-level recompute \(level "
        r"128:2:full\)",
    ),
    "activation_offload_with_per_level_recompute": (
        "--hbp-plan {dense_plan} --fine-grained-activation-offloading",
        {},
        r"--fine-grained-activation-offloading is not supported with per-level recompute",
    ),
    "full_recompute_with_per_level_recompute": (
        "--hbp-plan {dense_plan} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        {},
        r"--recompute-granularity full and the recompute of level 128:2:full contradict each other",
    ),
    "unknown_level": (
        "--hbp-corpus {corpus} --hbp-level 64x1",
        {},
        r"level '64x1' is not PACK_LEN:CP\[:RECOMPUTE\]; RECOMPUTE is a number of layers or "
        r"'full', "
        r"e.g. 16384:1:28",
    ),
    "levels_do_not_ascend": (
        "--hbp-corpus {corpus} --hbp-level 128:2 --hbp-level 64:1",
        {},
        r"levels 128:2 and 64:1 do not ascend in pack_len; sort them, each once",
    ),
    "no_level": (
        "--hbp-corpus {corpus}",
        {},
        r"--hbp-corpus without --hbp-plan needs at least one --hbp-level, e.g. --hbp-level 16384:1",
    ),
    "neither_plan_nor_corpus": (
        "",
        {},
        r"no --hbp-plan and no --hbp-corpus; name one, or train with Megatron-LM's own "
        r"pretrain_gpt",
    ),
    "a_flag_without_plan_or_corpus": (
        "--hbp-epochs 2",
        {},
        r"--hbp-epochs is given without --hbp-plan or --hbp-corpus; name one of them, or leave "
        r"it out",
    ),
    "plan_for_other_ranks": (
        "--hbp-plan {plan_of_8_ranks}",
        {},
        r"the plan is for 8 ranks, the run has 4 \(world size / \(TP x PP\)\); plan again with "
        r"--ranks 4",
    ),
    "plan_for_another_batch": (
        "--hbp-plan {one_by_one}",
        {},
        r"the plan has 1 micro-batches a step, --global-batch-size gives 2; it must be ranks x "
        r"micro-batches = 4",
    ),
    "br_e05_plan_for_another_document_alignment": (
        "--hbp-plan {padded_plan}",
        {},
        r"the plan aligns documents to \[16, 16\], the run needs \[1, 1\]; plan again",
    ),
    "br_e05_plan_for_another_budget_alignment": (
        f"{PLAN} --tensor-model-parallel-size 2 --sequence-parallel",
        {"WORLD_SIZE": 8},
        r"the plan aligns the token budget to 1, the run needs 2 \(TP and low-precision recipe\)",
    ),
    "br_e05_plan_for_another_recipe": (
        "--hbp-plan {fp8_plan} --fp8-format hybrid --fp8-recipe mxfp8",
        {},
        r"the plan aligns the token budget to 16, the run needs 32 \(TP and low-precision recipe\)",
    ),
    "plan_for_another_corpus": (
        f"{PLAN} --hbp-corpus {{other_corpus}}",
        {},
        r"the plan \S+/plan was made from another corpus than \S+/other \(hash [0-9a-f]{12}, found "
        r"[0-9a-f]{12}\); plan again or name its corpus",
    ),
    "plan_from_lengths_names_no_corpus": (
        "--hbp-plan {lengths_only}",
        {},
        r"the plan \S+ was made from lengths and names no corpus; add --hbp-corpus DIR",
    ),
    "a_flag_against_the_plan": (
        f"{PLAN} --hbp-epochs 2",
        {},
        r"--hbp-epochs 2 contradicts the plan \S+, which has 1; leave the flag out",
    ),
    "a_level_against_the_plan": (
        f"{PLAN} --hbp-level 64:1",
        {},
        r"--hbp-level 64:1 contradicts the plan \S+, which has 64:1 128:2; leave the flag out",
    ),
    "damaged_plan_array": (
        "--hbp-plan {cut_plan}",
        {},
        r"the plan in \S+/cut does not match its hash: a file was cut or edited; make it again",
    ),
    "damaged_plan_document": (
        "--hbp-plan {torn_plan}",
        {},
        r"\S+/torn/plan.json is damaged \(.*\); make it again",
    ),
    "plan_is_not_there": (
        "--hbp-plan {nothing}",
        {},
        r"\S+/nothing holds no plan.json; make the plan with `hbp plan --output",
    ),
    "damaged_corpus": (
        "--hbp-corpus {cut_corpus} --hbp-level 64:1",
        {},
        r"the corpus in \S+/cut_corpus is damaged \(tokens.bin has 10 bytes, not \d+\); remove it",
    ),
    "token_id_beyond_the_vocabulary": (
        "--hbp-corpus {big_ids} --hbp-level 64:1",
        {},
        r"the corpus \S+/big_ids holds token id \d+, the model's vocabulary has 256 rows; use the "
        r"tokenizer that the corpus was prepared with",
    ),
    "overlong_sample": (
        "--hbp-corpus {long_rows} --hbp-level 64:1 --hbp-level 128:2",
        {},
        r"sequence 1 has 129 tokens, but the longest level holds 128; 2 of 3 sequences are "
        r"over-long; "
        r"add a longer level, or use --hbp-overlong drop or --hbp-overlong truncate",
    ),
    "br_h01_sequence_aux_loss": (
        f"{PLAN} {' '.join(flags.moe('seq_aux_loss'))}",
        {},
        r"--moe-router-load-balancing-type seq_aux_loss is not supported with HBP: a rank's S "
        r"tokens "
        r"are many documents",
    ),
    "plan_time_out_of_a_waiting_rank": (
        f"{CORPUS} --hbp-plan-timeout 1 --hbp-plan-cache {{untrained_cache}}",
        {"RANK": 1},
        r"rank 1 waited 1 s for rank 0's plan in \S+/cache/[0-9a-f]{24}; look at its log, "
        r"make the plan beforehand with `hbp plan`",
    ),
    "attention_dropout": (
        f"{PLAN} --attention-dropout 0.1",
        {},
        r"--attention-dropout is 0.1; with HBP it must be 0",
    ),
    "position_embedding": (
        f"{PLAN} --position-embedding-type learned_absolute",
        {},
        r"--position-embedding-type learned_absolute is not supported with HBP; tested models "
        r"use rope",
    ),
    "cpu_needs_gloo": (
        f"{PLAN} --distributed-backend nccl",
        {},
        r"--distributed-backend is nccl; --hbp-device cpu needs gloo",
    ),
    "eval_iters_against_the_validation_corpus": (
        f"{CORPUS} --hbp-valid-corpus {{other_corpus}} --eval-iters 7",
        {},
        r"--eval-iters is 7; the validation corpus takes \d+ evaluation steps, all of it each time",
    ),
    "eval_iters_zero_with_a_validation_corpus": (
        f"{CORPUS} --hbp-valid-corpus {{other_corpus}} --eval-iters 0",
        {},
        r"--eval-iters 0 contradicts --hbp-valid-corpus; leave one of them out",
    ),
}

GOOD = {
    "plan": PLAN,
    "plan and its own flags": f"{PLAN} --hbp-level 64:1 --hbp-level 128:2 --hbp-epochs 1",
    "corpus": CORPUS,
    "corpus and fewer iterations": f"{CORPUS} --train-iters 2",
    "qk-norm, no clip": f"{PLAN} --recompute-granularity selective",
    "legacy rotary flag": f"{PLAN} !--position-embedding-type --use-rotary-position-embeddings",
    "validation": f"{CORPUS} --hbp-valid-corpus {{other_corpus}}",
    "overlong dropped": "--hbp-corpus {long_rows} --hbp-level 128:2 --hbp-overlong drop",
    "per-level recompute": "--hbp-plan {dense_plan}",
}


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
    templates |= {name: (text, {}) for name, text in GOOD.items()}
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


def test_a_waiting_rank_gives_up_after_its_time(outcomes):
    assert 1 <= outcomes["plan_time_out_of_a_waiting_rank"]["seconds"] < 30


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
