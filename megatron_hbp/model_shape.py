"""The shape of a model: parameters, FLOPs, and what context parallelism moves.

Guarantees (asserted by tests/unit/test_models.py):
- a ModelShape that no Megatron run can build does not exist;
- FLOPs are those of Megatron-LM's num_floating_point_operations (megatron/training/training.py).
Norms inside attention, biases other than q, k, v ones, and rotary tables are left out: together
less than 0.01 % of the parameters of any model here.
Names are Megatron's arguments.
"""

from dataclasses import dataclass, fields

_MLA = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MOE = ("num_experts", "moe_topk", "moe_ffn_hidden_size")
# More than any model has; larger numbers are slips of the finger that would run for ever.
MOST_LAYERS = 10_000
_MOST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A GPT-like model. Widths are in elements, counts are whole numbers.

    num_query_groups: key/value heads; with MLA equal to num_attention_heads. head_dim: of q, k and
    v without MLA. kv_lora_rank .. v_head_dim: multi-latent attention (MLA), all or none;
    q_lora_rank: None projects queries directly. num_experts .. moe_ffn_hidden_size: mixture of
    experts (MoE), all or none; moe_shared_ffn_hidden_size: all shared experts together;
    first_dense_layers: layers before the first MoE layer. Raises ValueError for a shape that cannot
    be.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool = False
    gated_mlp: bool = True
    qkv_bias: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    num_experts: int = 0
    moe_topk: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_ffn_hidden_size: int = 0
    first_dense_layers: int = 0

    def __post_init__(self) -> None:
        where = f"model {self.name!r}"
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (str, bool) or (value is None and field.default is None):
                continue
            least = 0 if field.default == 0 else 1
            if type(value) is not int or value < least:
                raise ValueError(
                    f"{where}: {field.name} is {value!r}; give a whole number of {least} or more"
                )
            most = MOST_LAYERS if field.name == "num_layers" else _MOST
            if value > most:
                raise ValueError(f"{where}: {field.name} is over {most}; give at most that")
        given = [name for name in _MLA if getattr(self, name) is not None]
        if (given or self.q_lora_rank) and len(given) < len(_MLA):
            missing = [name for name in _MLA if name not in given]
            raise ValueError(f"{where}: multi-latent attention also needs {', '.join(missing)}")
        experts = [name for name in _MOE if getattr(self, name)]
        if experts and len(experts) < len(_MOE):
            missing = [name for name in _MOE if name not in experts]
            raise ValueError(f"{where}: {experts[0]} is set, so {', '.join(missing)} must be, too")
        if not experts and (self.moe_shared_ffn_hidden_size or self.first_dense_layers):
            raise ValueError(f"{where}: shared experts and dense layers first need num_experts")
        if self.moe_topk > self.num_experts:
            raise ValueError(
                f"{where}: moe_topk is {self.moe_topk} of {self.num_experts} experts; use at most "
                "as many"
            )
        if self.first_dense_layers > self.num_layers:
            raise ValueError(
                f"{where}: {self.first_dense_layers} dense layers of {self.num_layers}; use at "
                "most as many"
            )
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"{where}: {self.num_query_groups} query groups do not divide "
                f"{self.num_attention_heads} attention heads"
            )
        if self.is_mla and self.num_query_groups != self.num_attention_heads:
            raise ValueError(
                f"{where}: multi-latent attention has a key per head, so num_query_groups must be "
                f"{self.num_attention_heads}"
            )

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.first_dense_layers if self.num_experts else 0

    @property
    def num_dense_layers(self) -> int:
        return self.num_layers - self.num_moe_layers

    @property
    def qk_dim(self) -> int:
        """Width of a query or key head."""
        if self.kv_lora_rank is None:
            return self.head_dim
        return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)

    @property
    def v_dim(self) -> int:
        """Width of a value head, and of a head's output."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def replicated_attention_parameters(self) -> int:
        """Of a layer's attention, those that every tensor-parallel rank holds whole.

        MLA's down projections (TELinear with parallel_mode "duplicated" in Megatron).
        """
        if self.kv_lora_rank is None:
            return 0
        width = (self.q_lora_rank or 0) + self.kv_lora_rank + (self.qk_rope_head_dim or 0)
        return self.hidden_size * width

    @property
    def split_attention_parameters(self) -> int:
        """Of a layer's attention, those that tensor parallelism splits."""
        queries = self.num_attention_heads * self.qk_dim
        output = self.num_attention_heads * self.v_dim * self.hidden_size
        if self.kv_lora_rank is None:
            keys_values = 2 * self.num_query_groups * self.head_dim
            bias = queries + keys_values if self.qkv_bias else 0
            return self.hidden_size * (queries + keys_values) + bias + output
        up = self.num_attention_heads * ((self.qk_nope_head_dim or 0) + self.v_dim)
        return (self.q_lora_rank or self.hidden_size) * queries + self.kv_lora_rank * up + output

    def mlp_parameters(self, width: int) -> int:
        """Of one MLP with `width` hidden elements."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * width

    @property
    def expert_parameters(self) -> int:
        """Of one routed expert."""
        return self.mlp_parameters(self.moe_ffn_hidden_size)

    @property
    def router_parameters(self) -> int:
        return self.hidden_size * self.num_experts

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding or of the output layer."""
        return self.vocab_size * self.hidden_size

    def parameters(self) -> int:
        """Of the whole model, without multi-token prediction."""
        return self._parameters(self.num_experts)

    def active_parameters(self) -> int:
        """Of what one token passes: its routed experts only, embeddings included."""
        return self._parameters(self.moe_topk)

    def _parameters(self, experts: int) -> int:
        attention = self.replicated_attention_parameters + self.split_attention_parameters
        norms = 2 * self.hidden_size
        moe = self.router_parameters + experts * self.expert_parameters
        moe += self.mlp_parameters(self.moe_shared_ffn_hidden_size)
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return (
            self.num_layers * (attention + norms)
            + self.num_dense_layers * self.mlp_parameters(self.ffn_hidden_size)
            + self.num_moe_layers * moe
            + embeddings
            + self.hidden_size
        )

    def attention_matmul_flops_per_token(self) -> float:
        """Projections of one layer's attention, forward."""
        return 2.0 * (self.replicated_attention_parameters + self.split_attention_parameters)

    def dense_mlp_flops_per_token(self) -> float:
        """MLP of a dense layer, forward."""
        return 2.0 * self.mlp_parameters(self.ffn_hidden_size)

    def expert_flops_per_token(self) -> float:
        """Routed experts of an MoE layer, forward."""
        return 2.0 * self.moe_topk * self.expert_parameters

    def shared_flops_per_token(self) -> float:
        """Router and shared experts of an MoE layer, forward."""
        shared = self.mlp_parameters(self.moe_shared_ffn_hidden_size)
        return 2.0 * (self.router_parameters + shared)

    def logit_flops_per_token(self) -> float:
        """Output layer, forward."""
        return 2.0 * self.embedding_parameters

    def matmul_flops_per_token(self) -> float:
        """Matrix products of a token, forward: all layers and the output layer."""
        moe = self.expert_flops_per_token() + self.shared_flops_per_token()
        return (
            self.num_layers * self.attention_matmul_flops_per_token()
            + self.num_dense_layers * self.dense_mlp_flops_per_token()
            + self.num_moe_layers * moe
            + self.logit_flops_per_token()
        )

    def attention_flops_per_square(self) -> float:
        """Causal core attention of all layers, forward, per squared token of a sequence.

        2 FLOPs x (q k + probabilities v) x half of the square.
        """
        return float(self.num_layers * self.num_attention_heads * (self.qk_dim + self.v_dim))

    def exchanged_values_per_token(self, cp_size: int, tp_size: int = 1) -> float:
        """Elements of q, k, v and output that a token brings to the two Ulysses exchanges.

        Of one layer, forward, on one tensor-parallel rank; 0 without CP. Key/value heads fewer than
        cp_size are repeated until every CP rank has one.
        """
        if cp_size == 1:
            return 0.0
        heads = self.num_attention_heads / tp_size
        kv_heads = max(self.num_query_groups / tp_size, cp_size)
        return heads * (self.qk_dim + self.v_dim) + kv_heads * (self.qk_dim + self.v_dim)
