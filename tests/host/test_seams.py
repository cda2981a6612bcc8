"""Every name of the host that megatron_hbp/host uses exists, and takes the keywords that we pass.

A new host version that moves one fails here, in seconds, with the name in the message.
"""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

pytest.importorskip("megatron.training", reason="needs the extra [train]")

from megatron.core.datasets import utils as dataset_utils
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import RerunStateMachine
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.training.models import GPTModelConfig

from megatron_hbp.host import checks, layer_spec
from megatron_hbp.host.attention import PositionedRotary, UlyssesAttention
from megatron_hbp.host.packed import HbpPackedSeqParams
from megatron_hbp.host.refused import REFUSED
from megatron_hbp.host.router import PaddedRouter
from tests.distributed import flags
from tests.host import seams

SOURCES = seams.sources(Path(checks.__file__).parent)
TREES = {name: ast.parse(source) for name, source in SOURCES.items()}
CONFIG_USERS = ("aux_scale", "forward", "layer_spec", "recompute", "router", "te_attention")


@pytest.mark.parametrize("file", SOURCES)
def test_host_names_and_keywords(file):
    assert seams.host_problems(SOURCES[file]) == []


def test_many_names_are_found():
    """So that the collector itself cannot go blind."""
    found = {name for t in TREES.values() for name in seams.imported_names(t, "megatron").values()}
    assert {"megatron.training.pretrain", "megatron.core.parallel_state"} <= found
    assert len(found) >= 20


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from megatron.core import no_such_name", r"^megatron.core.no_such_name: .*no_such_name"),
        ("import megatron.core.no_such as n", r"^megatron.core.no_such: "),
        (
            "from megatron.core import parallel_state as p\np.get_data_parallel_group(cp=True)",
            r"^line 2: .*parallel_state.get_data_parallel_group\(.*\): got an unexpected keyword",
        ),
        ("from megatron.core import mpu\nmpu.no_such()", r"^line 2: megatron.core.mpu.no_such: "),
        ("def f():\n from megatron.training import pretrain\n pretrain()", r": missing a required"),
    ],
)
def test_a_wrong_use_is_found(source, problem):
    problems = seams.host_problems(source)
    assert any(re.search(problem, text) for text in problems), problems


def test_arguments_that_we_read_exist(cluster):
    """A renamed flag would pass our `getattr` checks in silence."""
    (known,) = cluster.run(
        1,
        "tests.distributed.jobs_errors:argument_names",
        argv=[*flags.COMMON, *flags.SIZE, "--seq-length", "64", "--global-batch-size", "1"],
    )
    read = set()
    for tree in TREES.values():
        read |= seams.attributes_of(tree, {"args", "get_args()"})
    read |= {attribute for attribute, *_ in REFUSED}
    # loops over attribute names: every word with an underscore in checks.py that is no value
    words = {
        node.value
        for node in ast.walk(TREES["checks.py"])
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", node.value)
    }
    read |= words - {"aux_loss", "transformer_engine"}
    read = {name for name in read if not name.startswith("hbp_")}
    # of the stock script alone; and of models other than GPT
    assert read - set(known) <= {"modelopt_enabled"}
    assert len(read) > 50


def test_config_fields_that_we_read_or_set_exist():
    fields = {f.name for f in dataclasses.fields(MLATransformerConfig)}
    for name in CONFIG_USERS:
        read = seams.attributes_of(TREES[f"{name}.py"], {"config", "self.config", "self._config"})
        assert read, name
        assert read <= fields, name
    assert {"recompute_granularity", "recompute_method", "recompute_num_layers"} <= fields
    assert {"moe_grad_scale_func", "transformer_impl"} <= fields
    model_fields = {f.name for f in dataclasses.fields(GPTModelConfig)}
    assert seams.attributes_of(TREES["pretrain_gpt.py"], {"model_config"}) <= model_fields
    assert "transformer_layer_spec" in model_fields


def _parameters(function):
    return list(inspect.signature(function).parameters)


def test_router_methods_that_we_override_or_call():
    """Same parameters, in the same order: the host calls them by position."""
    for name in ("_apply_aux_loss", "_apply_expert_bias"):
        assert name in PaddedRouter.__dict__
        assert _parameters(getattr(PaddedRouter, name)) == _parameters(getattr(TopKRouter, name))
    ours = {name for name, value in vars(PaddedRouter).items() if inspect.isfunction(value)}
    assert ours == {"_apply_aux_loss", "_apply_expert_bias"}
    (call,) = [
        node
        for node in ast.walk(TREES["router.py"])
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "self.attach_and_log_load_balancing_loss"
    ]
    signature = inspect.signature(TopKRouter.attach_and_log_load_balancing_loss)
    signature.bind(None, **{keyword.arg: None for keyword in call.keywords})
    inspect.signature(TopKRouter.get_aux_loss_coeff).bind(None, "aux_loss")


def test_core_attention_takes_what_the_host_passes():
    built = set(_parameters(UlyssesAttention.__init__))
    assert set(_parameters(DotProductAttention.__init__)) <= built
    assert {"k_channels", "v_channels"} <= built  # of MLA
    assert _parameters(UlyssesAttention.forward) == _parameters(DotProductAttention.forward)


@pytest.mark.parametrize("host_attention", [SelfAttention, MLASelfAttention])
def test_core_attention_is_called_through_one_method(host_attention):
    """The pack reaches core attention as `packed_seq_params`."""
    parameters = _parameters(host_attention._run_core_attention)
    assert parameters[1:5] == ["query", "key", "value", "attention_mask"]
    assert {"packed_seq_params", "attn_mask_type"} <= set(parameters)


def test_self_attention_forward_takes_the_rotary_table_and_the_pack():
    assert {"rotary_pos_emb", "packed_seq_params"} <= set(_parameters(SelfAttention.forward))


def test_rotary_embeddings_that_ours_stands_in_for():
    wanted = _parameters(RotaryEmbedding.get_rotary_seq_len)
    ours = _parameters(PositionedRotary.get_rotary_seq_len)
    assert wanted[: len(ours)] == ours
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        forward = inspect.signature(inspect.unwrap(embedding.forward))
        forward.bind(None, 64, packed_seq=True)
    cached = inspect.signature(YarnRotaryEmbedding.get_cached_cos_sin)
    cached.bind(None, 64, dtype=None, packed_seq=True)


def test_the_model_takes_what_the_forward_step_passes():
    (call,) = [
        node
        for node in ast.walk(TREES["forward.py"])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "model"
    ]
    passed = {keyword.arg for keyword in call.keywords if keyword.arg} | {"padding_mask"}
    assert {"input_ids", "labels", "packed_seq_params"} <= passed
    assert passed <= set(_parameters(GPTModel.forward))
    assert {"result", "rejection_func", "message", "tolerance", "fatal"} <= set(
        _parameters(RerunStateMachine.validate_result)
    )


def test_packed_parameters_keep_the_host_fields():
    fields = {f.name for f in dataclasses.fields(PackedSeqParams)}
    assert {
        "qkv_format",
        "cu_seqlens_q",
        "cu_seqlens_kv",
        "max_seqlen_q",
        "max_seqlen_kv",
    } <= fields
    own = {f.name for f in dataclasses.fields(HbpPackedSeqParams)} - fields
    assert not own & {f"local_{name}" for name in fields}
    assert "pack_cp_group" in own


def test_spec_fields_that_we_replace_exist():
    def fields(cls):
        return {f.name for f in dataclasses.fields(cls)}

    assert {"self_attention", "mlp", "input_layernorm", "pre_mlp_layernorm"} <= fields(
        TransformerLayerSubmodules
    )
    assert {"layer_specs", "layer_norm"} <= fields(TransformerBlockSubmodules)
    assert {"core_attention", "q_layernorm", "k_layernorm"} <= fields(SelfAttentionSubmodules)
    assert {"core_attention", "q_layernorm", "kv_layernorm"} <= fields(MLASelfAttentionSubmodules)
    assert "router" in fields(MoESubmodules)
    known = fields(TransformerLayerSubmodules) | fields(SelfAttentionSubmodules)
    assert set(layer_spec._NORM_FIELDS) <= known | fields(MLASelfAttentionSubmodules)


def test_the_one_host_function_that_compat_replaces_exists():
    assert _parameters(dataset_utils.compile_helpers) == []
