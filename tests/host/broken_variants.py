"""Runs that must not start, as changes of a small good one, each with what must be said.

The good run: MLA and MoE on 16 GPUs, TP 2, PP 2 with 2 virtual stages, EP 2, 4 ranks with 4
micro-batches of S = 64 tokens. `!--flag` takes one of its flags away, with its value. {name} is a
corpus or plan of test_broken_variants.py.
"""

from dataclasses import dataclass

from tests.distributed import flags

LAYOUT = """--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
--num-virtual-stages-per-pipeline-rank 2 --expert-model-parallel-size 2 --seq-length 64
--global-batch-size 16""".split()
BASE = [*flags.COMMON, *flags.SIZE, *flags.MLA, *flags.moe("aux_loss"), *LAYOUT]


@dataclass(frozen=True)
class Variant:
    """flags: after those of the good run. pattern: of the text (empty: it must start)."""

    flags: str
    pattern: str = ""
    gpus: int = 16
    levels: str = "64:1:2 128:2:full"
    data: str = "--hbp-corpus {corpus}"

    def command_line(self, names: dict[str, str]) -> list[str]:
        argv = [*BASE, *self.data.format_map(names).split()]
        for level in self.levels.split():
            argv += ["--hbp-level", level]
        for word in self.flags.format_map(names).split():
            if not word.startswith("!"):
                argv.append(word)
                continue
            at = argv.index(word[1:])
            has_value = at + 1 < len(argv) and not argv[at + 1].startswith("--")
            del argv[at : at + 1 + has_value]
        return argv


ONE_CHUNK = "!--num-virtual-stages-per-pipeline-rank"
# a real start refuses them, and so does `hbp check`
BROKEN = {
    "heads no multiple of TP": Variant(
        "--num-attention-heads 6 --tensor-model-parallel-size 4",
        r"--num-attention-heads 6 is no multiple of --tensor-model-parallel-size 4; use a TP size "
        r"of 1, 2, 3, 6",
    ),
    "heads no multiple of CP": Variant(
        "",
        r"level 256:4: CP size 4 does not divide the 2 attention heads of a tensor-parallel rank",
        levels="64:1 256:4",
    ),
    "a level above the ranks": Variant(
        "--num-attention-heads 32",
        r"level 512:8: CP size 8 does not divide 4 ranks; choose one of \[1, 2, 4\]",
        levels="64:1 512:8",
    ),
    "PACK_LEN is not S x CP": Variant(
        "", r"level 192:2: PACK_LEN must be S x CP .* use 128:2", levels="64:1 192:2"
    ),
    "EP does not divide the GPUs": Variant(
        "--num-experts 24 --expert-model-parallel-size 8 --global-batch-size 24",
        r"--expert-model-parallel-size 8 x --expert-tensor-parallel-size 1 does not divide the 12 "
        r"GPUs of a stage .* one of 1, 2, 3, 4, 6, 12",
        gpus=24,
    ),
    "EP does not divide the experts": Variant(
        "--num-experts 6 --expert-model-parallel-size 4",
        r"--num-experts 6 is no multiple of --expert-model-parallel-size 4; use an EP size of 1, 2",
    ),
    "EP without experts": Variant(
        "!--num-experts", r"--expert-model-parallel-size is 2 without --num-experts; use 1"
    ),
    "S no multiple of TP": Variant(
        "--seq-length 66 --tensor-model-parallel-size 4 --global-batch-size 16",
        r"--seq-length 66 is not a multiple of 4 .* use 68",
        levels="66:1",
    ),
    "S no multiple of TP x 32 with MXFP8": Variant(
        "--seq-length 96 --fp8-format e4m3 --fp8-recipe mxfp8",
        r"--seq-length 96 is not a multiple of 64 .* use 128",
        levels="96:1",
    ),
    "S is missing": Variant("!--seq-length", r"--seq-length is missing; give it: the token budget"),
    "width is missing": Variant("!--hidden-size", r"--hidden-size is missing; give it"),
    "TP 0": Variant(
        "--tensor-model-parallel-size 0", r"--tensor-model-parallel-size is 0; it must be a whole"
    ),
    "FFN no multiple of TP": Variant(
        "--ffn-hidden-size 97",
        r"--ffn-hidden-size 97 is no multiple of --tensor-model-parallel-size 2",
    ),
    "MLA with query groups": Variant(
        "--group-query-attention --num-query-groups 2",
        r"--group-query-attention and --multi-latent-attention exclude each other",
    ),
    "MLA sizes without MLA": Variant(
        "!--multi-latent-attention",
        r"--q-lora-rank needs --multi-latent-attention; add it",
    ),
    "more stages than layers": Variant(
        f"{ONE_CHUNK} --pipeline-model-parallel-size 8",
        r"--pipeline-model-parallel-size 8 is above --num-layers 4; use at most as many stages",
    ),
    "layers no multiple of PP": Variant(
        f"{ONE_CHUNK} --num-layers 5 --moe-layer-freq ([0]*1+[1]*4)",
        r"--num-layers 5 is no multiple of --pipeline-model-parallel-size 2; .* or "
        r"--decoder-last-pipeline-num-layers 2",
    ),
    "an uneven first stage that leaves others unequal": Variant(
        f"{ONE_CHUNK} --pipeline-model-parallel-size 4 --num-layers 8 --moe-layer-freq 1 "
        "--decoder-first-pipeline-num-layers 3",
        r"--decoder-first-pipeline-num-layers 3: 5 of --num-layers 8 are left for 3 other stages",
    ),
    "virtual stages that do not divide a stage": Variant(
        "--num-virtual-stages-per-pipeline-rank 3",
        r"--num-virtual-stages-per-pipeline-rank 3 does not divide the 2 layers of a stage; use "
        r"one of 1, 2",
    ),
    "virtual stages of one stage": Variant(
        "--pipeline-model-parallel-size 1",
        r"--num-virtual-stages-per-pipeline-rank gives 2 virtual stages, which need "
        r"--pipeline-model-parallel-size of 2 or more",
    ),
    "virtual stages twice": Variant(
        "--num-layers-per-virtual-pipeline-stage 1",
        r"--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
        r"exclude each other; keep one",
    ),
    "micro-batches no multiple of PP under virtual stages": Variant(
        "--global-batch-size 12",
        r"--global-batch-size gives 3 micro-batches a step, which virtual stages take in groups of "
        r"2 .* use --global-batch-size 16",
    ),
    "a pipeline layout of other layers": Variant(
        f"{ONE_CHUNK} --pipeline-model-parallel-layout Ett|tL",
        r"--pipeline-model-parallel-layout Ett\|tL does not describe --num-layers 4",
    ),
    "experts with TP but without sequence parallelism": Variant(
        "!--sequence-parallel",
        r"--tensor-model-parallel-size 2 with --num-experts needs --sequence-parallel; add it",
    ),
    "a layer pattern of another length": Variant(
        "--moe-layer-freq ([0]*1+[1]*4)",
        r"--moe-layer-freq describes 5 layers, --num-layers is 4; make them agree",
    ),
    "groups that do not divide the experts": Variant(
        "--moe-router-num-groups 3 --moe-router-group-topk 1",
        r"--num-experts 8 is no multiple of --moe-router-num-groups 3; use one of 1, 2, 4, 8",
    ),
    "more experts than the chosen groups have": Variant(
        "--moe-router-num-groups 8 --moe-router-group-topk 1",
        r"--moe-router-topk 2 from --moe-router-group-topk 1 groups of 1 experts",
    ),
    "chosen groups without groups": Variant(
        "--moe-router-group-topk 2", r"--moe-router-group-topk needs --moe-router-num-groups"
    ),
    "more experts a token than there are": Variant(
        "--moe-router-topk 9", r"--moe-router-topk is 9 of --num-experts 8; use 1 to 8"
    ),
    "an auxiliary loss of sequences": Variant(
        "--moe-router-load-balancing-type seq_aux_loss",
        r"--moe-router-load-balancing-type seq_aux_loss is not supported with HBP",
    ),
    "GPUs no multiple of TP x PP": Variant(
        "", r"the world size 18 is not a multiple of TP x PP = 4", gpus=18
    ),
    "a batch that the ranks do not divide": Variant(
        "--global-batch-size 18",
        r"--global-batch-size is 18; it must be ranks x micro-batches, a multiple of 4 ranks",
    ),
    "parameters gathered early without a distributed optimizer": Variant(
        "--overlap-param-gather", r"--overlap-param-gather needs --use-distributed-optimizer"
    ),
    "both half precisions": Variant("--bf16 --fp16", r"--fp16 and --bf16 exclude each other"),
    "saving without an interval": Variant("--save somewhere", r"--save needs --save-interval"),
    "no learning rate": Variant("!--lr", r"--lr is missing; give the largest learning rate"),
    "a warm-up in samples": Variant(
        "--lr-warmup-samples 10",
        r"--lr-warmup-samples is not supported with HBP: .* use --lr-warmup-iters",
    ),
    "a warm-up beyond the plan": Variant(
        "--lr-warmup-iters 9999", r"--lr-warmup-iters 9999 is not below the \d+ steps"
    ),
    "more steps than the plan": Variant(
        "--train-iters 9999", r"--train-iters 9999 is beyond the plan's \d+ steps"
    ),
    "positions below the longest level": Variant(
        "--max-position-embeddings 64", r"--max-position-embeddings 64 is below the longest level"
    ),
    "a vocabulary smaller than the corpus": Variant(
        "--vocab-size 30 --make-vocab-size-divisible-by 1",
        r"the corpus \S+ holds token id \d+, the model's vocabulary has 30 rows",
    ),
    "no evaluation of a validation corpus": Variant(
        "--eval-iters 0",
        r"--eval-iters 0 contradicts --hbp-valid-corpus; leave one of them out",
        data="--hbp-corpus {corpus} --hbp-valid-corpus {corpus}",
    ),
    "no seed": Variant("--seed 0", r"--seed is 0; it must be 1 or more"),
    "a log of every 0 steps": Variant("--log-interval 0", r"--log-interval is 0; it must be 1 or"),
    "an evaluation every 0 steps": Variant(
        "--eval-interval 0", r"--eval-interval is 0; it must be 1 or more"
    ),
    "fewer than no workers": Variant("--num-workers -1", r"--num-workers is -1; it must be 0 or"),
    "a schedule of no steps": Variant("--lr-decay-iters 0", r"--lr-decay-iters is 0; it must be 1"),
    "no time for the first collective": Variant(
        "--distributed-timeout-minutes 0", r"--distributed-timeout-minutes is 0; it must be 1 or"
    ),
    "a vocabulary of multiples of 0": Variant(
        "--make-vocab-size-divisible-by 0", r"--make-vocab-size-divisible-by is 0; it must be 1 or"
    ),
    "no tokenizer": Variant("!--tokenizer-type", r"--tokenizer-type is missing; use NullTokenizer"),
    "a tokenizer without a size": Variant(
        "!--vocab-size", r"--vocab-size is missing; --tokenizer-type NullTokenizer needs it"
    ),
    "a log on the network without a folder": Variant(
        "--wandb-project here", r"--wandb-project needs --wandb-save-dir, or --save; add one"
    ),
    "configurations written out": Variant(
        "--config-logger-dir here",
        r"--config-logger-dir is not supported with HBP: the host can",
    ),
    "attention of another spec": Variant(
        "--attention-backend local", r"--attention-backend local needs --spec local, and HBP brings"
    ),
    "a plan for other ranks": Variant(
        "",
        r"the plan is for 8 ranks, the run has 4 .* plan again with --ranks 4",
        levels="",
        data="--hbp-plan {plan_of_8_ranks}",
    ),
    "recompute by flag and by level": Variant(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        r"--recompute-granularity full and the recompute of level 64:1:2 contradict each other",
    ),
}
# both start them
GOOD = {
    "the good run": Variant(""),
    "an uneven last stage": Variant(
        f"{ONE_CHUNK} --num-layers 5 --moe-layer-freq ([0]*1+[1]*4) "
        "--decoder-last-pipeline-num-layers 2"
    ),
    "a pipeline layout": Variant(f"{ONE_CHUNK} --pipeline-model-parallel-layout Ettt|tL"),
    "a stage that holds the loss alone": Variant(
        f"{ONE_CHUNK} --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ett|t|t|L",
        levels="64:1 128:2",
    ),
    "group-limited routing": Variant("--moe-router-num-groups 4 --moe-router-group-topk 2"),
    "no evaluation interval": Variant("!--eval-interval"),
    "a plan of its own": Variant("", levels="", data="--hbp-plan {plan}"),
    "fewer micro-batches than stages": Variant(f"{ONE_CHUNK} --global-batch-size 4"),
    "saving and a schedule": Variant(
        "--save {saved} --save-interval 2 --save-retain-interval 4 --lr-warmup-fraction 0.1 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    ),
}
