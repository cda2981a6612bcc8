"""The child of `hbp check`: what a start does with the host, without a GPU."""

import numpy as np
import pytest

pytest.importorskip("megatron.training", reason="needs the extra [train]")

from megatron_hbp.level import Level
from megatron_hbp.plan import Plan
from megatron_hbp.planner import build_plan
from tests.distributed import flags, handmade
from tests.host.asked import ask

LENS = [60, 33, 45, 120, *[3 + (11 * i) % 29 for i in range(140)]]
# a GPU's flags: nothing that only the CPU runtime needs
GPU = """
--micro-batch-size 1 --dataloader-type external --calculate-per-token-loss --lr 1e-3 --bf16
--tokenizer-type NullTokenizer --vocab-size 255 --normalization RMSNorm
--position-embedding-type rope --swiglu --disable-bias-linear --attention-dropout 0
--hidden-dropout 0 --untie-embeddings-and-output-weights --max-position-embeddings 512
--transformer-impl transformer_engine --use-distributed-optimizer --seq-length 64
""".split()
MODEL = [*flags.SIZE, *flags.MLA, *flags.moe("aux_loss")]
LAYOUT = """--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
--num-virtual-stages-per-pipeline-rank 2 --expert-model-parallel-size 2
--moe-grouped-gemm --moe-permute-fusion --global-batch-size 16""".split()
LEVELS = ["--hbp-level", "64:1:2", "--hbp-level", "128:2:full"]
WITHOUT_CORPUS = ["--hbp-corpus", "no-such-folder", *LEVELS]


@pytest.fixture(scope="module")
def lengths(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("lengths") / "lengths.npy"
    np.save(path, np.array(LENS, dtype=np.int32))
    return str(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, lengths):
    """A good run on 16 GPUs: TP 2, PP 2, 2 virtual stages, EP 2, fused and grouped MoE."""
    folder = tmp_path_factory.mktemp("whole")
    argv = [*GPU, *MODEL, *LAYOUT, *WITHOUT_CORPUS]
    return ask(folder, argv, 16, lengths=lengths)


def test_a_good_run_has_no_problem(whole):
    assert whole.problems == []
    assert whole.plan_from == "lengths"
    assert any("no-such-folder" in note for note in whole.notes)


def test_arguments_are_the_hosts_after_validation(whole):
    assert whole.arguments["data_parallel_size"] == 4
    assert whole.arguments["virtual_pipeline_model_parallel_size"] == 2
    assert whole.arguments["padded_vocab_size"] == 256
    assert whole.plan is not None
    assert whole.arguments["train_iters"] == Plan.load(whole.plan).num_steps


def test_every_chunk_of_every_stage_is_built(whole):
    assert [stage.chunk_dense_layers for stage in whole.stages] == [(1, 0), (0, 0)]
    assert [stage.chunk_moe_layers for stage in whole.stages] == [(0, 1), (1, 1)]


def test_all_groups_cover_every_gpu_once(whole):
    for kind, groups in whole.groups.items():
        assert sorted(rank for group in groups for rank in group) == list(range(16)), kind
    assert whole.groups["dp"][0] == [0, 2, 4, 6]
    assert whole.groups["pp"][3] == [3, 11]


def test_unique_parameters_do_not_depend_on_the_layout(whole, tmp_path, lengths):
    """TP, EP and PP copies are counted once: one GPU holds as many as 16 hold together."""
    argv = [*GPU, *MODEL, "--global-batch-size", "2", *WITHOUT_CORPUS[:4]]
    (alone,) = ask(tmp_path, argv, 1, lengths=lengths).stages
    assert alone.dense_parameters == alone.unique_dense
    assert alone.expert_parameters == alone.unique_experts
    assert sum(stage.unique_dense for stage in whole.stages) == alone.unique_dense
    assert sum(stage.unique_experts for stage in whole.stages) == alone.unique_experts


def test_tied_embeddings_are_counted_once(tmp_path, lengths):
    model = [word for word in GPU if not word.startswith("--untie")]
    model += [*flags.SIZE, *flags.GQA, "--pipeline-model-parallel-size", "2"]
    first, last = ask(
        tmp_path, [*model, "--global-batch-size", "2", *WITHOUT_CORPUS[:4]], 2, lengths=lengths
    ).stages
    assert first.dense_parameters == first.unique_dense
    assert last.dense_parameters - last.unique_dense == 256 * 64


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--no-such-flag", "3"], "unrecognized arguments: --no-such-flag 3"),
        (["--micro-batch-size", "2"], "--micro-batch-size is 2; with HBP it must be 1"),
        (["--fp16"], "--fp16 and --bf16 exclude each other"),
        (["--moe-token-dispatcher-type", "nowhere"], "invalid choice: 'nowhere'"),
        (["--rotary-interleaved"], "Megatron refuses these flags: "),
        (["--hbp-curriculum-steps", "9999"], "--hbp-curriculum-steps is 9999, but the plan"),
        (["--lr-warmup-iters", "9999"], "--lr-warmup-iters 9999 is not below"),
    ],
)
def test_what_ends_a_start_is_a_problem_in_its_words(tmp_path, lengths, more, text):
    facts = ask(tmp_path, [*GPU, *MODEL, *LAYOUT, *WITHOUT_CORPUS, *more], 16, lengths=lengths)
    assert len(facts.problems) == 1
    assert text in facts.problems[0]


def test_stages_are_built_although_there_is_no_plan(tmp_path):
    facts = ask(tmp_path, [*GPU, *MODEL, *LAYOUT, *WITHOUT_CORPUS], 16)
    assert facts.problems == []
    assert facts.plan is None
    assert len(facts.stages) == 2
    assert any("no plan" in note for note in facts.notes)


def test_weights_are_looked_at_where_they_are(tmp_path, lengths):
    """A note where they are not here; a problem where the folder is here and has no checkpoint."""
    for weights, problems, notes in ((tmp_path / "none", 0, 1), (tmp_path, 1, 0)):
        argv = [*GPU, *MODEL, *LAYOUT, *WITHOUT_CORPUS, "--pretrained-checkpoint", str(weights)]
        folder = tmp_path / f"asked-{problems}"
        folder.mkdir()
        facts = ask(folder, argv, 16, lengths=lengths)
        assert len(facts.problems) == problems
        assert sum("its weights are not looked at" in note for note in facts.notes) == notes
        assert all("latest_checkpointed_iteration.txt" in text for text in facts.problems)


def test_the_runs_own_corpus_is_planned_and_nothing_is_written_to_it(tmp_path):
    corpus = tmp_path / "corpus"
    handmade.random_corpus(corpus, LENS)
    before = sorted(corpus.rglob("*"))
    argv = [*GPU, *MODEL, *LAYOUT, "--hbp-corpus", str(corpus), *LEVELS]
    facts = ask(tmp_path / "asked", argv, 16)
    assert (facts.problems, facts.plan_from, facts.notes) == ([], "corpus", [])
    assert sorted(corpus.rglob("*")) == before
    assert facts.plan is not None
    assert Plan.load(facts.plan).corpus_hash is not None


def test_a_vocabulary_smaller_than_the_corpus(tmp_path):
    corpus = tmp_path / "corpus"
    handmade.random_corpus(corpus, LENS)
    argv = [*GPU, *MODEL, *LAYOUT, "--hbp-corpus", str(corpus), *LEVELS]
    argv += ["--vocab-size", "30", "--make-vocab-size-divisible-by", "1"]
    (problem,) = ask(tmp_path / "asked", argv, 16).problems
    assert "the model's vocabulary has" in problem
    assert str(corpus) in problem


def test_a_plan_for_other_ranks(tmp_path):
    plan = tmp_path / "plan"
    build_plan(np.array(LENS), (Level(64, 1), Level(128, 2)), 8, 4).save(plan)
    argv = [*GPU, *MODEL, *LAYOUT, "--hbp-plan", str(plan), "--hbp-corpus", "no-such-folder"]
    (problem,) = ask(tmp_path / "asked", argv, 16).problems
    assert "the plan is for 8 ranks, the run has 4" in problem
    assert "--ranks 4" in problem


def test_what_the_host_changes_by_itself_is_said(tmp_path, lengths):
    argv = [*GPU, *MODEL, "--sequence-parallel", "--global-batch-size", "8", *WITHOUT_CORPUS]
    facts = ask(tmp_path, argv, 4, lengths=lengths)
    assert any("Disabling sequence parallelism" in note for note in facts.notes)


def test_fp8_needs_a_device_that_has_it(tmp_path, lengths):
    argv = [*GPU, *MODEL, *LAYOUT, *WITHOUT_CORPUS, "--fp8-format", "hybrid"]
    old = ask(tmp_path / "a100", argv, 16, lengths=lengths, capability=(8, 0))
    new = ask(tmp_path / "h100", argv, 16, lengths=lengths, capability=(9, 0))
    assert new.problems == []
    assert old.problems != []
