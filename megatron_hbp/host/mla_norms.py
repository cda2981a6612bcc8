"""Multi-latent attention whose queries are not compressed, as in DeepSeek-V2-Lite: no query norm.

With --qk-layernorm and without --q-lora-rank megatron-core 0.19 normalizes the input of the query
projection once more in its Transformer Engine backend, with weights that the published model does
not have, and cannot build the layer in its local backend. Such a model has a norm on the compressed
keys and values only.

Guarantees (asserted by tests/host/test_mla_norms.py): without --q-lora-rank the query projection is
the plain one of the layer spec, the key/value side is what the host makes it; with it nothing is
changed. Delete when the host builds the plain projection itself.
"""

import copy
from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver


def norms_of(config: Any, submodules: Any) -> dict[str, Any]:
    """What MLASelfAttention builds its projections and norms from.

    config: the host's MLATransformerConfig; submodules: its MLASelfAttentionSubmodules. Raises
    ValueError as the host does.
    """
    if config.q_lora_rank is not None or not config.qk_layernorm:
        return QKNormConfigResolver(config, submodules).resolve()
    compressed = copy.copy(config)
    compressed.q_lora_rank = config.kv_lora_rank  # any rank: the key/value side is not asked for it
    resolved = QKNormConfigResolver(compressed, submodules).resolve()
    return resolved | {
        "linear_q_proj": submodules.linear_q_proj,
        "linear_q_up_proj": IdentityOp,
        "q_layernorm": IdentityOp,
    }
