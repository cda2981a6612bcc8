"""Recipes scaled down: what changes is told, what the recipe uses is kept."""

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_hbp.config import HbpConfig, flag_name
from megatron_hbp.level import Level
from megatron_hbp.recipe import flag_words, read_recipe
from megatron_hbp.rehearsal.cpu_limits import fit_cpu
from megatron_hbp.rehearsal.scale import scale
from megatron_hbp.rehearsal.scale_layout import MOST_PROCESSES, Places, fewer_places
from megatron_hbp.rehearsal.scaling import Scaling, given_flags

RECIPES = sorted(Path(__file__).parents[2].glob("examples/recipes/*.toml"))
RECIPES = [path for path in RECIPES if path.name != "sft.toml"]

DENSE = """
[cluster]
gpus = 32
device = "h100-80gb"
[flags]
num-layers = 32
hidden-size = 4096
num-attention-heads = 32
group-query-attention = true
num-query-groups = 8
vocab-size = 1000
seq-length = 1024
global-batch-size = 64
hbp-corpus = "corpus"
hbp-level = ["1024:1:28", "8192:8:full"]
"""

MOE = """
num-experts = 160
moe-router-topk = 6
moe-router-num-groups = 8
moe-router-group-topk = 3
moe-ffn-hidden-size = 1536
moe-shared-expert-intermediate-size = 3072
moe-layer-freq = "([0]*3+[1]*29)"
expert-model-parallel-size = 8
"""


@pytest.fixture
def recipe(tmp_path):
    def made(more: str = "", gpus: int = 32):
        (tmp_path / "base.toml").write_text(DENSE)
        (tmp_path / "r.toml").write_text(
            f'include = ["base.toml"]\n[cluster]\ngpus = {gpus}\n[flags]\n{more}'
        )
        return read_recipe(tmp_path / "r.toml")

    return made


def test_changes_are_the_difference(recipe):
    made = recipe('foreign-flag = "x"\nlr-warmup-iters = 100\nbf16 = true')
    scaled = scale(made, ["--another", "7", "8", "--num-layers", "16"])
    before = given_flags(made, ["--another", "7", "8", "--num-layers", "16"])
    assert scaled.flags["foreign-flag"] == "x"
    assert scaled.flags["another"] == ["7", "8"]
    assert scaled.flags["bf16"] is True
    changed = {change.flag: change for change in scaled.changes}
    assert len(changed) == len(scaled.changes)
    assert all(change.reason for change in scaled.changes)
    assert str(changed["num-layers"]).startswith("--num-layers: 16 -> 2 (")
    for flag in {*before, *scaled.flags}:
        old, new = before.get(flag), scaled.flags.get(flag)
        words = [flag_words({flag: value}) if value is not None else [] for value in (old, new)]
        assert (words[0] != words[1]) == (flag in changed), flag
    assert scale(made, ["--another", "7", "8", "--num-layers", "16"]) == scaled


def test_words_after_the_recipe_win_and_repeat(recipe):
    words = "--hbp-level 1024:1 --hbp-level 2048:2 --lr=1e-3 --bf16 --lr 2e-3".split()
    flags = given_flags(recipe(), words)
    assert flags["hbp-level"] == ["1024:1", "2048:2"]
    assert flags["lr"] == "2e-3"
    assert flags["bf16"] is True
    with pytest.raises(ValueError, match=r"'8' follows no flag; write flags as --name value"):
        given_flags(recipe(), ["8"])


@pytest.mark.parametrize("path", RECIPES, ids=[path.stem for path in RECIPES])
def test_bundled_recipes_keep_their_structure(path):
    recipe = read_recipe(path)
    flags, scaled = recipe.flags, scale(recipe)
    places = scaled.places
    assert places.num_processes <= MOST_PROCESSES

    def number(name: str, default: int = 1, of=None) -> int:
        return int(str((scaled.flags if of is None else of).get(name, default)))

    for name in (
        "pipeline-model-parallel-size",
        "expert-model-parallel-size",
        "num-virtual-stages-per-pipeline-rank",
    ):
        assert (number(name) > 1) == (number(name, of=flags) > 1), name
    for name in ("multi-latent-attention", "group-query-attention", "num-experts"):
        assert (name in scaled.flags) == (name in flags)
    layers, stages = number("num-layers"), places.num_stages
    uneven = [
        n for n in scaled.flags if re.fullmatch("decoder-(first|last)-pipeline-num-layers", n)
    ]
    if uneven:
        assert number(uneven[0]) * stages != layers
        assert number(uneven[0]) % places.num_virtual_stages == 0
        layers = layers - number(uneven[0])
        stages -= 1
    assert layers >= stages * places.num_virtual_stages
    heads = number("num-attention-heads")
    assert heads % (places.tp_size * places.cp_sizes[-1]) == 0
    if "num-query-groups" in flags:
        groups = number("num-query-groups")
        assert groups % places.tp_size == 0
        ratio = number("num-attention-heads", of=flags) // number("num-query-groups", of=flags)
        assert heads // groups == ratio
    old = [Level.parse(text) for text in flags["hbp-level"]]
    assert [level.cp_size for level in scaled.levels] == list(places.cp_sizes)
    for before, after in zip(old, scaled.levels, strict=True):
        assert after.pack_len == number("seq-length") * after.cp_size
        assert (before.cp_size == 1) == (after.cp_size == 1)
        assert (before.recompute_layers == 0) == (after.recompute_layers == 0)
        assert (before.recompute_layers == "full") == (after.recompute_layers == "full")
        assert places.num_ranks % after.cp_size == 0
    assert number("global-batch-size") == places.num_ranks * places.num_microbatches
    if places.num_virtual_stages > 1:
        assert places.num_microbatches % places.num_stages == 0
    assert places.num_ranks * places.tp_size % places.ep_size == 0


def test_experts_keep_groups_and_dense_layers(recipe):
    scaled = scale(recipe(MOE))
    flags = scaled.flags
    assert flags["moe-layer-freq"] == "([0,1])"
    topk, group_topk = flags["moe-router-topk"], flags["moe-router-group-topk"]
    experts, groups = flags["num-experts"], flags["moe-router-num-groups"]
    assert groups > group_topk > 1
    assert topk / group_topk == 6 / 3
    assert experts % groups == 0
    assert experts // groups >= topk // group_topk
    assert flags["moe-shared-expert-intermediate-size"] == 2 * flags["moe-ffn-hidden-size"]
    assert flags["expert-model-parallel-size"] == 2


@pytest.mark.parametrize(
    ("given", "scaled"),
    [
        ("([0]*3+[1]*29)", "([0,1,1,1])"),
        ("([1]*32)", "([1,1,1,1])"),
        ("([0,1]*16)", "([0,1,0,1])"),
        ("([1,0]*16)", "([1,0,1,0])"),
        ("([1]*16+[0]*16)", "([1,0,0,0])"),
        ("2", "2"),
    ],
)
def test_dense_and_moe_layers_keep_their_order(recipe, given, scaled):
    more = MOE.replace("([0]*3+[1]*29)", given) + PIPELINE
    assert scale(recipe(more)).flags["moe-layer-freq"] == scaled


PIPELINE = "pipeline-model-parallel-size = 4\n"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", {"num-layers": 4}),
        (
            "decoder-last-pipeline-num-layers = 5",
            {"num-layers": 3, "decoder-last-pipeline-num-layers": 1},
        ),
        (
            "decoder-first-pipeline-num-layers = 11",
            {"num-layers": 3, "decoder-first-pipeline-num-layers": 2},
        ),
        (
            "decoder-first-pipeline-num-layers = 8\ndecoder-last-pipeline-num-layers = 6",
            {"num-layers": 3, "decoder-first-pipeline-num-layers": 1},
        ),
        (
            "num-virtual-stages-per-pipeline-rank = 4",
            {"num-layers": 4, "num-virtual-stages-per-pipeline-rank": 2},
        ),
        (
            "num-layers-per-virtual-pipeline-stage = 2",
            {"num-layers": 4, "num-layers-per-virtual-pipeline-stage": 1},
        ),
        (
            "num-virtual-stages-per-pipeline-rank = 3\ndecoder-first-pipeline-num-layers = 5",
            {"num-layers": 6, "decoder-first-pipeline-num-layers": 2},
        ),
        (
            "num-layers = 30\naccount-for-embedding-in-pipeline-split = true\n"
            "account-for-loss-in-pipeline-split = true",
            {"num-layers": 2, "account-for-loss-in-pipeline-split": True},
        ),
        (
            'pipeline-model-parallel-layout = "Ett|(tttt|)*7ttL"',
            {"num-layers": 4, "num-virtual-stages-per-pipeline-rank": 2},
        ),
    ],
)
def test_pipelines(recipe, more, expected):
    scaled = scale(recipe(PIPELINE + more))
    assert scaled.flags.items() >= expected.items()
    assert scaled.flags["pipeline-model-parallel-size"] == 2
    assert "pipeline-model-parallel-layout" not in scaled.flags
    both = {"decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"}
    assert not both <= scaled.flags.keys()


def test_key_value_heads_fewer_than_cp_ranks_stay_fewer(recipe):
    few = scale(recipe("tensor-model-parallel-size = 4\nnum-query-groups = 8", gpus=64)).flags
    many = scale(recipe("num-query-groups = 8")).flags
    assert few["num-query-groups"] // few["tensor-model-parallel-size"] < 2
    assert many["num-query-groups"] == 2


def _places(**changes) -> Places:
    places = Places(
        tp_size=1,
        num_stages=1,
        num_virtual_stages=1,
        num_ranks=32,
        num_microbatches=8,
        ep_size=1,
        cp_sizes=(1, 8),
    )
    return dataclasses.replace(places, **changes)


@pytest.mark.parametrize(
    ("own", "most", "sizes", "cp_sizes"),
    [
        (_places(), None, (1, 1, 4), (1, 2)),
        (_places(), 2, (1, 1, 2), (1, 2)),
        (_places(cp_sizes=(1,)), None, (1, 1, 2), (1,)),
        (_places(cp_sizes=(2, 8)), None, (1, 1, 4), (2, 4)),
        (_places(cp_sizes=(1, 2, 8), num_stages=8), None, (1, 2, 4), (1, 2, 4)),
        (_places(tp_size=8, num_stages=4), None, (2, 2, 2), (1, 2)),
        (_places(tp_size=8, num_stages=4, cp_sizes=(1, 2, 8)), None, (1, 2, 4), (1, 2, 4)),
        (_places(tp_size=8, num_stages=4), 4, (1, 2, 2), (1, 2)),
        (_places(tp_size=8, num_stages=4), 3, (1, 1, 2), (1, 2)),
        (_places(cp_sizes=(1,), ep_size=8), None, (1, 1, 4), (1,)),
        (_places(cp_sizes=(1,), ep_size=8), 1, (1, 1, 1), (1,)),
    ],
)
def test_processes(own, most, sizes, cp_sizes):
    """sizes: TP, stages, ranks."""
    few = fewer_places(own, most)
    assert (few.tp_size, few.num_stages, few.num_ranks) == sizes
    assert few.cp_sizes == cp_sizes
    assert few.num_processes <= (most or MOST_PROCESSES)


def test_what_is_dropped_is_said(recipe):
    more = PIPELINE + "tensor-model-parallel-size = 2\nsequence-parallel = true"
    scaled = scale(recipe(more, gpus=64), num_processes=2)
    told = {change.flag: change.reason for change in scaled.changes}
    assert "too few" in told["tensor-model-parallel-size"]
    assert "too few" in told["pipeline-model-parallel-size"]
    assert "sequence-parallel" in told
    assert "sequence-parallel" not in scaled.flags


@pytest.mark.parametrize(
    ("more", "words", "options", "message"),
    [
        ("", [], {"num_steps": 5}, r"--steps is 5; give at least 6"),
        ("", [], {"num_processes": 1}, r"--processes is 1, too few for 2 levels.*give at least 2"),
        ("", ["--hbp-plan", "p"], {}, r"--hbp-plan is a plan for the real run; .*--hbp-corpus"),
        ("global-batch-size = 33", [], {}, r"--global-batch-size is 33; .*a multiple of 32 ranks"),
        ("seq-length = 512", [], {}, r"level 1024:1:28: PACK_LEN must be S x CP .*512; use 512:1"),
        ("seq-length = false", [], {}, r"--seq-length is missing"),
        ('hidden-size = 1\nnum-layers = "many"', [], {}, r"--num-layers is 'many'; give a whole"),
        (
            'hbp-corpus = false\nhbp-level = false\nhbp-plan = "p"',
            [],
            {},
            r"--hbp-plan is a plan for the real run; .*give --hbp-corpus and --hbp-level instead",
        ),
        ("hbp-corpus = false", [], {}, r"--hbp-corpus is missing"),
        ("tensor-model-parallel-size = 3", [], {}, r"32 GPUs are no multiple of --tensor-model"),
        (
            PIPELINE + "num-layers-per-virtual-pipeline-stage = 3",
            [],
            {},
            r"--num-layers-per-virtual-pipeline-stage is 3; 32 layers .*multiple of 4 stages",
        ),
        (
            'num-experts = 8\nmoe-layer-freq = "[0]*x"',
            [],
            {},
            r"--moe-layer-freq is '\[0\]\*x'; give a number, or layers as in",
        ),
    ],
)
def test_wrong_use(recipe, more, words, options, message):
    with pytest.raises(ValueError, match=message) as error:
        scale(recipe(more), words, **options)
    assert "\n" not in str(error.value)


def test_what_a_cpu_cannot_is_taken_away_and_nothing_else():
    scaling = Scaling(
        {
            "fp8-format": "hybrid",
            "wandb-project": "p",
            "eval-iters": 25,
            "moe-grouped-gemm": True,
            "num-experts": 8,
            "moe-z-loss-coeff": 1e-3,
            "overlap-grad-reduce": True,
            "tokenizer-type": "NullTokenizer",
        }
    )
    fit_cpu(scaling)
    gone = {change.flag for change in scaling.changes() if change.after is None}
    assert gone == {"fp8-format", "wandb-project", "eval-iters", "moe-grouped-gemm"}
    assert scaling.flags["expert-tensor-parallel-size"] == 1
    assert scaling.flags["distributed-backend"] == "gloo"


def test_everything_that_is_written_is_in_the_folder(recipe, tmp_path):
    folders = {f.name for f in dataclasses.fields(HbpConfig) if f.metadata.get("metavar") == "DIR"}
    more = 'hbp-valid-corpus = "v"\ntensorboard-dir = "t"\nsave = "s"'
    scaled = scale(recipe(more), ["--hbp-corpus", "a", "--hbp-corpus", "b"])
    words = scaled.command_line(tmp_path)
    assert words.count("--hbp-corpus") == 2
    flags = {*map(flag_name, folders - {"plan"}), "--save", "--load", "--tensorboard-dir"}
    for flag in flags:
        assert words[words.index(flag) + 1].startswith(str(tmp_path)), flag


def test_weights_are_made_apart_from_the_run_that_starts_from_them(recipe, tmp_path):
    assert not scale(recipe()).starts_from_weights
    scaled = scale(recipe('pretrained-checkpoint = "w"\nload = "c"\nlr = 1e-5\nseed = 7'))
    assert scaled.starts_from_weights
    words, weights = scaled.command_line(tmp_path), scaled.weights_command_line(tmp_path)
    place = words[words.index("--pretrained-checkpoint") + 1]
    assert weights[weights.index("--save") + 1] == place == str(tmp_path / "weights")
    assert words[words.index("--save") + 1] == words[words.index("--load") + 1] != place
    assert not {"--load", "--pretrained-checkpoint"} & set(weights)
    for flag in ("--hbp-step-log", "--seed", "--lr"):
        assert words[words.index(flag) + 1] != weights[weights.index(flag) + 1]
    same = scale(recipe('pretrained-checkpoint = "w"\nseed = 4321')).weights_command_line(tmp_path)
    assert same[same.index("--seed") + 1] != "4321"
    for flag in ("--hbp-plan-cache", "--hbp-corpus", "--hbp-level", "--num-layers"):
        assert words[words.index(flag) + 1] == weights[weights.index(flag) + 1]
