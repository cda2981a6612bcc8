"""Shapes of models: published totals, FLOPs, exchanged values, and files of Megatron arguments."""

import json
from dataclasses import replace

import pytest

from examples.demo.job import ModelShape as DemoShape
from megatron_hbp.model_arguments import model_of
from megatron_hbp.model_shape import ModelShape
from megatron_hbp.models import MODELS, find_model

# Billions of parameters that the model cards publish. Active ones are rounded there, some counted
# with the embedding (DeepSeek-V2, V3: 21, 37 B), some without (V2-Lite, Qwen3: 2.4, 3.3 B).
PUBLISHED = {
    "llama-3.1-8b": (8.03, 8.03),
    "llama-3.1-70b": (70.55, 70.55),
    "qwen2.5-32b": (32.76, 32.76),
    "qwen2.5-72b": (72.71, 72.71),
    "qwen3-30b-a3b": (30.53, 3.35),
    "deepseek-v2": (235.74, 21.38),
    "deepseek-v2-lite": (15.71, 2.66),
    "deepseek-v3": (671.03, 37.55),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_the_published_totals(name):
    total, active = PUBLISHED[name]
    assert MODELS[name].parameters() == pytest.approx(total * 1e9, rel=0.005)
    assert MODELS[name].active_parameters() == pytest.approx(active * 1e9, rel=0.005)


@pytest.mark.parametrize(
    ("name", "with_embedding", "billions"),
    [
        ("deepseek-v2", True, 21),
        ("deepseek-v3", True, 37),
        ("deepseek-v2-lite", False, 2.4),
        ("qwen3-30b-a3b", True, 3.3),
    ],
)
def test_active_parameters_round_down_to_the_cards(name, with_embedding, billions):
    shape = MODELS[name]
    count = shape.active_parameters() - (0 if with_embedding else shape.embedding_parameters)
    unit = 1 if billions > 10 else 0.1
    assert billions <= count / 1e9 < billions + unit


def test_published_names_are_all_models():
    assert set(PUBLISHED) == set(MODELS)


def test_flops_of_llama_8b_by_hand():
    shape = MODELS["llama-3.1-8b"]
    # per layer q, k, v 4096 x 6144, output 4096 x 4096, three of 4096 x 14336; output layer
    layer = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336
    assert shape.matmul_flops_per_token() == 2 * (32 * layer + 4096 * 128256)
    # 32 layers x 32 heads x (128 + 128): the causal half of 2 x 2 FLOPs
    assert shape.attention_flops_per_square() == 32 * 32 * 256


def test_flops_of_mla_and_moe_agree_with_the_demo_job():
    demo = DemoShape()
    shape = ModelShape(
        name="demo",
        num_layers=demo.layers,
        hidden_size=demo.hidden,
        ffn_hidden_size=demo.dense_ffn,
        num_attention_heads=demo.heads,
        num_query_groups=demo.heads,
        head_dim=demo.hidden // demo.heads,
        vocab_size=512,
        q_lora_rank=demo.q_lora,
        kv_lora_rank=demo.kv_lora,
        qk_nope_head_dim=demo.qk_dim,
        qk_rope_head_dim=demo.rotary_dim,
        v_head_dim=demo.v_dim,
        num_experts=demo.experts,
        moe_topk=demo.topk,
        moe_ffn_hidden_size=demo.expert_ffn,
        moe_shared_ffn_hidden_size=demo.expert_ffn,
        first_dense_layers=1,
    )
    per_token, per_square = demo.flops(512)
    assert 3 * shape.matmul_flops_per_token() == per_token
    assert 3 * shape.attention_flops_per_square() == per_square


@pytest.mark.parametrize(
    ("name", "cp_size", "tp_size", "values"),
    [
        ("llama-3.1-8b", 1, 1, 0),
        ("llama-3.1-8b", 8, 1, 32 * 256 + 8 * 256),
        ("llama-3.1-8b", 16, 1, 32 * 256 + 16 * 256),  # 8 key/value heads repeated to 16
        ("llama-3.1-70b", 4, 8, 8 * 256 + 4 * 256),  # one key/value head a rank, repeated to 4
        ("deepseek-v2", 8, 1, 128 * (192 + 128) * 2),  # keys 192 wide, values 128, one per head
    ],
)
def test_exchanged_values(name, cp_size, tp_size, values):
    assert MODELS[name].exchanged_values_per_token(cp_size, tp_size) == values


def test_an_unknown_model_lists_the_names():
    with pytest.raises(ValueError, match=r"'gpt-5' is neither a known name .*llama-3.1-8b.*v3"):
        find_model("gpt-5")
    assert find_model(" DeepSeek-V2 ") is MODELS["deepseek-v2"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama-3.1-8b", {"num_layers": 0}, "num_layers is 0; give a whole number of 1 or more"),
        ("llama-3.1-8b", {"vocab_size": 1.5}, "vocab_size is 1.5; give a whole number"),
        ("llama-3.1-8b", {"num_layers": 10**8}, "num_layers is over 10000"),
        ("llama-3.1-8b", {"hidden_size": 2**31}, "hidden_size is over 2147483647"),
        ("llama-3.1-8b", {"num_query_groups": 5}, "5 query groups do not divide 32"),
        ("llama-3.1-8b", {"kv_lora_rank": 512}, "also needs qk_nope_head_dim, qk_rope_head_dim"),
        ("llama-3.1-8b", {"q_lora_rank": 512}, "also needs kv_lora_rank"),
        ("llama-3.1-8b", {"num_experts": 8}, "moe_topk, moe_ffn_hidden_size must be"),
        ("llama-3.1-8b", {"first_dense_layers": 1}, "need num_experts"),
        ("deepseek-v2", {"moe_topk": 161}, "moe_topk is 161 of 160 experts"),
        ("deepseek-v2", {"first_dense_layers": 61}, "61 dense layers of 60"),
        ("deepseek-v2", {"num_query_groups": 8}, "num_query_groups must be 128"),
    ],
)
def test_impossible_shapes_are_refused(name, change, message):
    with pytest.raises(ValueError, match=message):
        replace(MODELS[name], **change)


LLAMA = """
#!/bin/bash
# LLaMA-3.1-8B; --num-layers 99 in a comment is not read
HIDDEN=4096
export LAYERS=32
MODEL_ARGS=(
    --num-layers $LAYERS --hidden-size ${HIDDEN}
    --ffn-hidden-size ${FFN:-14336} --num-attention-heads=32 \\
    --group-query-attention --num-query-groups 8 --swiglu
    --untie-embeddings-and-output-weights --vocab-size 128256 --lr 1e-5
    --rotary-base 500000)
torchrun pretrain_gpt.py ${MODEL_ARGS[@]}
"""
DEEPSEEK = """--num-layers 60 --hidden-size 5120 --ffn-hidden-size 12288 --num-attention-heads 128
--kv-channels 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
--qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 160 --moe-router-topk 6
--moe-ffn-hidden-size 1536 --moe-shared-expert-intermediate-size 3072
--moe-layer-freq "([0]*1+[1]*59)" --swiglu --untie-embeddings-and-output-weights
--vocab-size 1000 --padded-vocab-size 102400"""


def _read(tmp_path, text, name="model.sh"):
    (tmp_path / name).write_text(text)
    return find_model(str(tmp_path / name))


@pytest.mark.parametrize(("text", "name"), [(LLAMA, "llama-3.1-8b"), (DEEPSEEK, "deepseek-v2")])
def test_argument_files_equal_the_known_models(tmp_path, text, name):
    assert _read(tmp_path, text) == replace(MODELS[name], name="model")


def test_json_objects_and_lists_are_argument_files(tmp_path):
    flags = {"num_layers": 32, "--hidden-size": 4096, "ffn-hidden-size": 14336, "swiglu": True}
    flags |= {"num-attention-heads": 32, "group-query-attention": True, "num-query-groups": 8}
    flags |= {"untie-embeddings-and-output-weights": True, "vocab-size": 128256, "bf16": True}
    flags |= {"add-qkv-bias": False, "q-lora-rank": None}
    wanted = replace(MODELS["llama-3.1-8b"], name="model")
    assert _read(tmp_path, json.dumps(flags), "model.json") == wanted
    assert _read(tmp_path, json.dumps(DEEPSEEK.replace('"', "").split()), "model.json") == replace(
        MODELS["deepseek-v2"], name="model"
    )


def test_a_command_line():
    words = DEEPSEEK.replace('"', "").split()
    assert model_of("deepseek-v2", words) == MODELS["deepseek-v2"]
    # the last one counts, as for Megatron; the built embedding is known better than the flags
    again = model_of("deepseek-v2", [*words, "--num-layers=30", "--moe-layer-freq", "1"])
    assert (again.num_layers, again.num_dense_layers) == (30, 0)
    assert model_of("deepseek-v2", words, vocab_rows=102528).vocab_size == 102528
    bare = [word for word in words if word not in ("--vocab-size", "--padded-vocab-size")]
    assert model_of("deepseek-v2", bare, vocab_rows=102400) == MODELS["deepseek-v2"]
    with pytest.raises(ValueError, match=r"--hidden-size is 'wide'; give a whole number"):
        model_of("deepseek-v2", [*words, "--hidden-size", "wide"])


def test_the_demo_job_is_an_argument_file(tmp_path):
    demo = DemoShape()
    text = " ".join([*demo.flags(), "--vocab-size", "512"])
    per_token, per_square = demo.flops(512)
    shape = _read(tmp_path, text)
    assert 3 * shape.matmul_flops_per_token() == per_token
    assert 3 * shape.attention_flops_per_square() == per_square


def test_defaults_are_megatrons(tmp_path):
    least = "--num-layers 4 --hidden-size 1024 --num-attention-heads 8 --vocab-size 1000"
    shape = _read(tmp_path, least)
    assert (shape.ffn_hidden_size, shape.num_query_groups, shape.head_dim) == (4096, 8, 128)
    assert shape.tied_embeddings
    assert not shape.gated_mlp
    gated = _read(tmp_path, least + " --swiglu --num-experts 8")
    assert (gated.ffn_hidden_size, gated.moe_ffn_hidden_size, gated.moe_topk) == (2688, 2688, 2)
    assert gated.num_moe_layers == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("--num-layers 60", "", "--num-layers is missing; add it"),
        ("--vocab-size 1000 --padded-vocab-size 102400", "", "add --vocab-size N"),
        ("--num-layers 60", "--num-layers $N", r"--num-layers is \$N, which the file does not set"),
        ("--num-layers 60", "--num-layers six", "--num-layers is 'six'; give a whole number"),
        ("--num-layers 60", "--num-layers", "--num-layers is None; give a whole number"),
        ("--num-layers 60", "--num-layers 60 --num-layers 61", "given twice, as 60 and 61"),
        ("--multi-latent-attention", "", "--q-lora-rank is given without --multi-latent"),
        ("--num-experts 160", "", "--moe-router-topk is given without --num-experts"),
        ("--swiglu", "--group-query-attention --num-query-groups 8", "exclude each other"),
        ("--swiglu", "--num-query-groups 8", "given without --group-query-attention"),
        ("--swiglu", "--mtp-num-layers 1", "multi-token prediction is not supported"),
        ("([0]*1+[1]*59)", "([0]*1+[1]*60)", "describes 61 layers, --num-layers is 60"),
        ("([0]*1+[1]*59)", "([0]*1+[1]*58+[0]*1)", "mixes dense and MoE layers"),
        ("([0]*1+[1]*59)", "2", "--moe-layer-freq is '2'; give 1, or dense layers first"),
        ("([0]*1+[1]*59)", "([0]*1+[1]*999999999999)", "layers, --num-layers is 60"),
        ("--num-layers 60", "--num-layers " + "9" * 5000, "--num-layers is '9*'; give a whole"),
        ("--moe-router-topk 6", "--moe-router-topk 600", "moe_topk is 600 of 160 experts"),
        ('59)"', "59)", "a quote is not closed"),
    ],
)
def test_bad_argument_files(tmp_path, old, new, message):
    assert old in DEEPSEEK
    with pytest.raises(ValueError, match=message) as error:
        _read(tmp_path, DEEPSEEK.replace(old, new))
    assert "model.sh" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["[1, {}]", '{"num-layers": [1]}', "{", b"\xff\xfe", "[" * 100_000]
)
def test_files_of_other_kinds_are_refused(tmp_path, text):
    path = tmp_path / "model.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"Megatron arguments .*model\.json: "):
        find_model(str(path))
