"""The TE core attention: never run on a GPU here; what can be proved without one is.

- a stand-in with TE's assertions (heads, groups, head widths, plain boundaries) trains
  bit-identically to the local attention, CP switched per micro-batch, MLA and GQA;
- checkpoints have the stock keys, in both directions;
- what we call is what the host's and TE's sources take.
"""

import ast
import dataclasses
import functools
import importlib.util
import inspect
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the extra [train]")

from tests.distributed import flags, handmade

ROOT = Path(__file__).resolve().parents[2]


def _core_attention(cp_sizes, monkeypatch, **changes):
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_hbp.host import te_attention
    from tests.distributed.jobs_te import StandInTE

    monkeypatch.setattr(te_attention, "TEDotProductAttention", StandInTE)
    config = SimpleNamespace(
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=16,
        context_parallel_size=1,
        fp8_dot_product_attention=False,
        fp8_multi_head_attention=False,
        qk_clip=False,
        log_max_attention_logit=False,
    )
    for name, value in changes.items():
        setattr(config, name, value)
    arguments = {
        "config": config,
        "layer_number": 1,
        "attn_mask_type": AttnMaskType.causal,
        "attention_type": "self",
        "pg_collection": SimpleNamespace(tp=None, cp=None),
    }
    stock = StandInTE(**arguments)
    return stock, te_attention.TEUlyssesAttention(**arguments, cp_sizes=cp_sizes)


def _in_layer(core_attention):
    layer = torch.nn.Module()
    layer.linear = torch.nn.Linear(2, 2)
    layer.core_attention = core_attention
    return layer


def test_checkpoints_have_the_stock_keys_both_ways(monkeypatch):
    stock, ours = map(_in_layer, _core_attention((1, 2, 4), monkeypatch))
    assert list(stock.state_dict()) == list(ours.state_dict())
    assert "core_attention._extra_state" in ours.state_dict()

    stock.core_attention.state = torch.tensor([1.0, 2.0, 3.0])
    ours.load_state_dict(stock.state_dict(), strict=True)
    inner = ours.core_attention.documents.by_cp_size
    assert list(inner) == [1, 2, 4]
    for attention in inner.values():
        assert torch.equal(attention.state, stock.core_attention.state)

    inner[1].state = torch.tensor([7.0, 8.0, 9.0])
    stock.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(stock.core_attention.state, inner[1].state)


def test_checkpoint_without_extra_state_loads_strictly_as_into_stock(monkeypatch):
    for layer in map(_in_layer, _core_attention((1, 4), monkeypatch)):
        state = layer.state_dict()
        del state["core_attention._extra_state"]
        layer.load_state_dict(state, strict=True)
        del state["linear.bias"]
        with pytest.raises(RuntimeError, match=r"linear\.bias"):
            layer.load_state_dict(state, strict=True)


def test_sharded_checkpoint_is_the_stock_one(monkeypatch):
    stock, ours = _core_attention((1, 2, 4), monkeypatch)
    arguments = {"prefix": "a.b.", "sharded_offsets": ((0, 1, 2),), "metadata": {"x": 1}}
    assert ours.sharded_state_dict(**arguments) == stock.sharded_state_dict(**arguments)


def test_mode_reaches_every_attention(monkeypatch):
    _, ours = _core_attention((1, 2), monkeypatch)
    ours.eval()
    assert [a.training for a in ours.documents.by_cp_size.values()] == [False, False]
    assert list(ours.children()) == []
    assert list(ours.parameters()) == []


@pytest.mark.parametrize(
    ("heads", "groups", "cp_size", "expected"),
    [(8, 8, 4, (2, 2)), (8, 2, 4, (2, 1)), (8, 2, 2, (4, 1)), (8, 4, 1, (8, 4))],
)
def test_each_cp_size_has_its_heads_and_groups(monkeypatch, heads, groups, cp_size, expected):
    _, ours = _core_attention(
        (cp_size,), monkeypatch, num_attention_heads=heads, num_query_groups=groups
    )
    inner = ours.documents.by_cp_size[cp_size]
    assert (inner.num_heads, inner.num_groups) == expected


@pytest.mark.parametrize(
    "field",
    ["fp8_dot_product_attention", "fp8_multi_head_attention", "qk_clip", "log_max_attention_logit"],
)
def test_refused_settings(monkeypatch, field):
    with pytest.raises(ValueError, match=f"{field} is not supported with HBP under transformer_e"):
        _core_attention((1,), monkeypatch, **{field: True})


@pytest.mark.parametrize("attention", ["MLA", "GQA"])
def test_stand_in_trains_bit_equal_to_local_attention(cluster, tmp_path, attention):
    """4 ranks, CP 1, 2 and 4 inside one step; GQA has 2 KV heads, so CP 4 repeats them."""
    budget, ranks, microbatches = 32, 4, 3
    cp_sizes = [1, 2, 4] * 2
    slots = handmade.exact_slots(ranks * len(cp_sizes), budget)
    lens = [length for slot in slots for length in slot]
    corpus = handmade.random_corpus(tmp_path / "corpus", lens)
    starts = [sum(map(len, slots[:i])) for i in range(len(slots))]
    ids = [list(range(s, s + len(slot))) for s, slot in zip(starts, slots, strict=True)]
    plan = handmade.regrouped(
        tmp_path / "plan",
        corpus,
        ids,
        cp_sizes,
        budget=budget,
        num_ranks=ranks,
        num_microbatches=microbatches,
    )
    argv = [
        *flags.COMMON,
        *flags.SIZE,
        *(flags.MLA if attention == "MLA" else flags.GQA),
        *f"--seq-length {budget} --global-batch-size {ranks * microbatches}".split(),
        *f"--hbp-plan {plan}".split(),
    ]
    local = cluster.run(ranks, "tests.distributed.jobs:train", argv=argv, with_gradients=True)
    te = cluster.run(ranks, "tests.distributed.jobs_te:train_with_stand_in", argv=argv)
    for mine, theirs in zip(te, local, strict=True):
        assert len(mine["losses"]) == 2, mine
        assert mine["losses"] == theirs["losses"]
        assert mine["gradient_norms"] == theirs["gradient_norms"]
        assert mine["gradients"].keys() == theirs["gradients"].keys()
        for name, gradient in mine["gradients"].items():
            assert torch.equal(gradient, theirs["gradients"][name]), name


# --- the layer spec of the TE backend ---


@pytest.fixture
def te_backend(monkeypatch):
    """The host's TE layer specs without TE: its own classes (mocks), a recent version."""
    from megatron.core.extensions import transformer_engine, transformer_engine_spec_provider
    from megatron.core.models.gpt import gpt_layer_specs

    # the pipeline stage is not asked here
    monkeypatch.setattr(gpt_layer_specs, "get_num_layers_to_build", lambda config, **kwargs: 4)
    monkeypatch.setattr(gpt_layer_specs, "get_transformer_layer_offset", lambda config, **kwargs: 0)
    if transformer_engine.HAVE_TE:
        return
    provider = transformer_engine_spec_provider
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", provider.TESpecProvider)
    monkeypatch.setattr(gpt_layer_specs, "TENorm", transformer_engine.TENorm)
    monkeypatch.setattr(provider, "is_te_min_version", lambda *args, **kwargs: True)


def _spec_config(**changes):
    values = {
        "transformer_impl": "transformer_engine",
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "qk_l2_norm": False,
        "multi_latent_attention": True,
        "num_moe_experts": 8,
        "moe_grouped_gemm": True,
        "moe_layer_freq": [0, 1, 1, 1],
        "num_layers": 4,
        "experimental_attention_variant": None,
        "pipeline_model_parallel_layout": None,
        "use_kitchen": False,
        "use_kitchen_attention": False,
        "kitchen_attention_backend": "sdpa",
        "use_te_activation_func": False,
        "mla_down_proj_fusion": False,
    }
    return SimpleNamespace(transformer=SimpleNamespace(**(values | changes)))


@pytest.mark.parametrize("multi_latent_attention", [True, False])
@pytest.mark.parametrize("mla_down_proj_fusion", [True, False])
@pytest.mark.parametrize("moe_grouped_gemm", [True, False])
def test_te_spec_changes_attention_and_router_only(
    te_backend, multi_latent_attention, mla_down_proj_fusion, moe_grouped_gemm
):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_hbp.host.layer_spec import hbp_layer_spec
    from megatron_hbp.host.router import PaddedRouter
    from megatron_hbp.host.te_attention import TEUlyssesAttention

    config = _spec_config(
        multi_latent_attention=multi_latent_attention,
        mla_down_proj_fusion=mla_down_proj_fusion,
        moe_grouped_gemm=moe_grouped_gemm,
    )
    stock = get_gpt_decoder_block_spec(
        config=config.transformer, use_transformer_engine=True, normalization="RMSNorm"
    )
    ours = hbp_layer_spec(config, cp_sizes=(1, 8))
    assert ours.layer_norm is stock.layer_norm
    assert len(ours.layer_specs) == 4
    for number, (mine, theirs) in enumerate(zip(ours.layer_specs, stock.layer_specs, strict=True)):
        assert mine.module is theirs.module
        assert _changed(mine.submodules, theirs.submodules) <= {"self_attention", "mlp"}
        attention, stock_attention = (
            mine.submodules.self_attention,
            theirs.submodules.self_attention,
        )
        assert issubclass(attention.module, stock_attention.module)
        assert attention.params == stock_attention.params
        assert _changed(attention.submodules, stock_attention.submodules) == {"core_attention"}
        core = attention.submodules.core_attention
        assert core.module is TEUlyssesAttention
        assert core.params == {"cp_sizes": (1, 8)}
        mlp, stock_mlp = mine.submodules.mlp, theirs.submodules.mlp
        assert isinstance(mlp, functools.partial)
        assert mlp.func == stock_mlp.func
        if number == 0:  # dense
            assert mlp.keywords == stock_mlp.keywords
        else:
            moe, stock_moe = mlp.keywords["submodules"], stock_mlp.keywords["submodules"]
            assert moe.router is PaddedRouter
            assert issubclass(PaddedRouter, stock_moe.router)
            assert _changed(moe, stock_moe) == {"router"}


def _changed(mine, theirs) -> set[str]:
    """Fields that differ; partials are equal when function and arguments are."""

    def plain(value):
        if isinstance(value, functools.partial):
            return value.func, value.args, value.keywords
        return value

    assert type(mine) is type(theirs)
    names = [field.name for field in dataclasses.fields(theirs)]
    return {n for n in names if plain(getattr(mine, n)) != plain(getattr(theirs, n))}


# --- signatures, read from source ---


def _parameters(source: str, class_name: str, method: str) -> list[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == method:
                    assert item.args.kwarg is None
                    return [a.arg for a in (*item.args.args, *item.args.kwonlyargs)]
    raise AssertionError(f"{class_name}.{method} is gone")


def _host_source() -> str:
    spec = importlib.util.find_spec("megatron.core.extensions.transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_stand_in_has_the_host_s_signature(method):
    from tests.distributed.jobs_te import StandInTE

    host = _parameters(_host_source(), "TEDotProductAttention", method)
    assert list(inspect.signature(getattr(StandInTE, method)).parameters) == host


def test_host_builds_core_attention_with_what_we_take():
    """The host's two calls: GQA by name, MLA through build_module; both by keyword."""
    from megatron_hbp.host.te_attention import TEUlyssesAttention

    ours = inspect.signature(TEUlyssesAttention.__init__).parameters
    host = _parameters(_host_source(), "TEDotProductAttention", "__init__")
    assert set(host) - set(ours) == {"num_splits"}  # inference only
    for module in ("attention", "multi_latent_attention"):
        spec = importlib.util.find_spec(f"megatron.core.transformer.{module}")
        assert spec is not None
        assert spec.origin is not None
        calls = [
            node.value
            for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "self.core_attention"
            and isinstance(node.value, ast.Call)
        ]
        assert calls, module
        for call in calls:
            assert {keyword.arg for keyword in call.keywords} <= set(ours)
            positional = [ast.unparse(argument) for argument in call.args]
            assert positional in ([], ["submodules.core_attention"])


def _te_source(revision: str, path: str) -> str:
    """A file of TE's, from TRANSFORMER_ENGINE_PATH or the mirror beside the checkout."""
    default = ROOT.parent / ".mirror" / "NVIDIA+TransformerEngine" / "repo"
    folder = Path(os.environ.get("TRANSFORMER_ENGINE_PATH", default))
    if not folder.is_dir():
        pytest.skip("needs TRANSFORMER_ENGINE_PATH, a clone of TransformerEngine")
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), "show", f"{revision}:{path}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    if shown.returncode:
        pytest.skip(f"{folder} has no {revision}: {shown.stderr.strip()}")
    return shown.stdout


_TE_ATTENTION = (
    "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py"
)


@pytest.mark.parametrize("revision", ["v2.7", "v2.18", "HEAD"])
def test_te_takes_what_the_host_passes_for_our_pack(revision):
    source = _te_source(revision, _TE_ATTENTION)
    forward = _parameters(source, "DotProductAttention", "forward")
    passed = {
        "qkv_format",
        "cu_seqlens_q",
        "cu_seqlens_kv",
        "cu_seqlens_q_padded",
        "cu_seqlens_kv_padded",
        "max_seqlen_q",
        "max_seqlen_kv",
        "pad_between_seqs",
        "attn_mask_type",
    }
    assert passed <= set(forward)
    built = _parameters(source, "DotProductAttention", "__init__")
    assert {"num_attention_heads", "kv_channels", "num_gqa_groups", "softmax_scale"} <= set(built)


@pytest.mark.parametrize("revision", ["v2.7", "v2.18", "HEAD"])
def test_te_still_needs_one_attention_per_cp_size(revision):
    """When this fails, one TE attention may serve all CP sizes: te_attention.py gets simpler."""
    attention = next(
        node
        for node in ast.walk(ast.parse(_te_source(revision, _TE_ATTENTION)))
        if isinstance(node, ast.ClassDef) and node.name == "DotProductAttention"
    )
    asserted = [ast.unparse(n.test) for n in ast.walk(attention) if isinstance(n, ast.Assert)]
    assert any(
        "num_gqa_groups ==" in a.replace("key_layer.shape[-2]", "num_gqa_groups")
        and "self.num_gqa_groups_per_partition" in a
        for a in asserted
    )
    base = _te_source(revision, "transformer_engine/pytorch/module/base.py")
    for method in ("get_extra_state", "set_extra_state"):
        assert _parameters(base, "TransformerEngineBaseModule", method)
