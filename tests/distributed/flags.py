"""Megatron flags of small models, as lists."""

COMMON = """
--distributed-backend gloo --transformer-impl local --hbp-device cpu
--micro-batch-size 1 --dataloader-type external --calculate-per-token-loss
--lr 1e-3 --clip-grad 1.0 --weight-decay 0.01
--tokenizer-type NullTokenizer --vocab-size 255
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion --no-rope-fusion
--no-gradient-accumulation-fusion --no-bias-dropout-fusion --no-persist-layer-norm
--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear
--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights
--log-interval 1 --eval-interval 1000 --num-workers 0 --max-position-embeddings 512
""".split()

SIZE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96".split()

MLA = """--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16
--qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm""".split()

GQA = "--group-query-attention --num-query-groups 2 --qk-layernorm".split()

MOE = """--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32
--moe-shared-expert-intermediate-size 32 --moe-token-dispatcher-type alltoall
--moe-layer-freq ([0]*1+[1]*3) --expert-tensor-parallel-size 1""".split()


def moe(balancing: str = "none", coefficient: float = 1e-2) -> list[str]:
    return [
        *MOE,
        "--moe-router-load-balancing-type",
        balancing,
        "--moe-aux-loss-coeff",
        str(coefficient),
    ]
