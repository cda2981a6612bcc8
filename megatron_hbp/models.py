"""Models known by name, and models described by a file of Megatron arguments.

Guarantees (asserted by tests/unit/test_models.py):
- parameters() and active_parameters() of each model in MODELS are the published totals to 0.5 %;
- an unknown name is refused with all names.
Shapes are taken from config.json of the model cards on Hugging Face.
"""

from pathlib import Path

from megatron_hbp.model_arguments import read_model
from megatron_hbp.model_shape import ModelShape

_SHAPES = (
    # meta-llama/Llama-3.1-8B config.json
    ModelShape(
        name="llama-3.1-8b",
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        num_query_groups=8,
        head_dim=128,
        vocab_size=128256,
    ),
    # meta-llama/Llama-3.1-70B config.json
    ModelShape(
        name="llama-3.1-70b",
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_attention_heads=64,
        num_query_groups=8,
        head_dim=128,
        vocab_size=128256,
    ),
    # Qwen/Qwen2.5-32B config.json
    ModelShape(
        name="qwen2.5-32b",
        num_layers=64,
        hidden_size=5120,
        ffn_hidden_size=27648,
        num_attention_heads=40,
        num_query_groups=8,
        head_dim=128,
        vocab_size=152064,
        qkv_bias=True,
    ),
    # Qwen/Qwen2.5-72B config.json
    ModelShape(
        name="qwen2.5-72b",
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=29568,
        num_attention_heads=64,
        num_query_groups=8,
        head_dim=128,
        vocab_size=152064,
        qkv_bias=True,
    ),
    # Qwen/Qwen3-30B-A3B config.json: decoder_sparse_step 1, so every layer is MoE
    ModelShape(
        name="qwen3-30b-a3b",
        num_layers=48,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=32,
        num_query_groups=4,
        head_dim=128,
        vocab_size=151936,
        num_experts=128,
        moe_topk=8,
        moe_ffn_hidden_size=768,
    ),
    # deepseek-ai/DeepSeek-V2 config.json: 2 shared experts of 1536
    ModelShape(
        name="deepseek-v2",
        num_layers=60,
        hidden_size=5120,
        ffn_hidden_size=12288,
        num_attention_heads=128,
        num_query_groups=128,
        head_dim=128,
        vocab_size=102400,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=160,
        moe_topk=6,
        moe_ffn_hidden_size=1536,
        moe_shared_ffn_hidden_size=3072,
        first_dense_layers=1,
    ),
    # deepseek-ai/DeepSeek-V2-Lite config.json: q_lora_rank null, 2 shared experts of 1408
    ModelShape(
        name="deepseek-v2-lite",
        num_layers=27,
        hidden_size=2048,
        ffn_hidden_size=10944,
        num_attention_heads=16,
        num_query_groups=16,
        head_dim=128,
        vocab_size=102400,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=64,
        moe_topk=6,
        moe_ffn_hidden_size=1408,
        moe_shared_ffn_hidden_size=2816,
        first_dense_layers=1,
    ),
    # deepseek-ai/DeepSeek-V3 config.json, without its multi-token prediction layer
    ModelShape(
        name="deepseek-v3",
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        num_attention_heads=128,
        num_query_groups=128,
        head_dim=128,
        vocab_size=129280,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=256,
        moe_topk=8,
        moe_ffn_hidden_size=2048,
        moe_shared_ffn_hidden_size=2048,
        first_dense_layers=3,
    ),
)

MODELS = {shape.name: shape for shape in _SHAPES}


def find_model(text: str) -> ModelShape:
    """The shape named `text` (any case), or described by the file of Megatron arguments `text`.

    Raises ValueError for an unknown name, with all names, and for a file that does not describe a
    model (see model_arguments.py).
    """
    known = MODELS.get(text.strip().lower())
    if known is not None:
        return known
    path = Path(text)
    if not path.is_file():
        raise ValueError(
            f"model {text!r} is neither a known name nor a file of Megatron arguments; known: "
            f"{', '.join(MODELS)}"
        )
    return read_model(path)
