"""The demo's training job: Megatron's flags, eight processes, a progress bar from the step log."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_hbp.corpus.store import Corpus
from megatron_hbp.plan import Plan

NUM_RANKS = 8
NUM_MICROBATCHES = 2


@dataclass(frozen=True)
class ModelShape:
    """A small DeepSeek-V2: multi-latent attention, shared and routed experts, first layer dense."""

    layers: int = 4
    hidden: int = 128
    heads: int = 8
    dense_ffn: int = 256
    q_lora: int = 64
    kv_lora: int = 32
    qk_dim: int = 16
    rotary_dim: int = 8
    v_dim: int = 16
    experts: int = 8
    topk: int = 2
    expert_ffn: int = 64

    def flags(self) -> list[str]:
        return f"""
            --num-layers {self.layers} --hidden-size {self.hidden}
            --num-attention-heads {self.heads} --ffn-hidden-size {self.dense_ffn}
            --multi-latent-attention --q-lora-rank {self.q_lora} --kv-lora-rank {self.kv_lora}
            --qk-head-dim {self.qk_dim} --qk-pos-emb-head-dim {self.rotary_dim}
            --v-head-dim {self.v_dim} --qk-layernorm
            --num-experts {self.experts} --moe-router-topk {self.topk}
            --moe-ffn-hidden-size {self.expert_ffn}
            --moe-shared-expert-intermediate-size {self.expert_ffn}
            --moe-layer-freq ([0]*1+[1]*{self.layers - 1})
            --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
            --moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1
            --expert-model-parallel-size 4
            --swiglu --disable-bias-linear --normalization RMSNorm
            --position-embedding-type rope --rope-type yarn --rotary-scaling-factor 4
            --mscale 0.707 --mscale-all-dim 0.707 --untie-embeddings-and-output-weights
        """.split()

    def flops(self, vocab: int) -> tuple[float, float]:
        """(per token, per squared document length): forward and backward of the whole model."""
        attention = self.hidden * (self.q_lora + self.kv_lora + self.rotary_dim)
        attention += self.heads * self.q_lora * (self.qk_dim + self.rotary_dim)
        attention += self.heads * self.kv_lora * (self.qk_dim + self.v_dim)
        attention += self.heads * self.v_dim * self.hidden
        dense = 3 * self.hidden * self.dense_ffn
        moe = 3 * self.hidden * self.expert_ffn * (self.topk + 1) + self.hidden * self.experts
        linear = self.layers * attention + dense + (self.layers - 1) * moe + self.hidden * vocab
        per_square = self.heads * (self.qk_dim + self.rotary_dim + self.v_dim)
        return 6.0 * linear, 3.0 * self.layers * per_square


def train(
    name: str, plan_folder: Path, valid: Corpus, shape: ModelShape, *, vocab: int, output: Path
) -> Path:
    """Trains one plan to its end; returns the folder of its step logs. Raises RuntimeError."""
    plan = Plan.load(plan_folder)
    step_log = output / f"{name}-steps"
    command = [
        *[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)],
        *["--standalone", "-m", "megatron_hbp.host.pretrain_gpt"],
        *_training_flags(plan, vocab),
        *shape.flags(),
        *["--hbp-device", "cpu", "--hbp-plan", str(plan_folder), "--hbp-step-log", str(step_log)],
        *["--hbp-valid-corpus", str(valid.path)],
        *["--tensorboard-dir", str(output / f"{name}-tensorboard")],
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    log = output / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            _watch(process, name, step_log / "rank-00000.jsonl", plan)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"training {name} failed (whole log: {log}):\n{tail}")
    return step_log


def _training_flags(plan: Plan, vocab: int) -> list[str]:
    return f"""
        --distributed-backend gloo --transformer-impl local
        --micro-batch-size 1 --global-batch-size {plan.num_ranks * plan.num_microbatches}
        --seq-length {plan.token_budget} --max-position-embeddings {plan.levels[-1].pack_len}
        --dataloader-type external --calculate-per-token-loss --use-distributed-optimizer
        --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.2
        --clip-grad 1.0 --weight-decay 0.01 --attention-dropout 0 --hidden-dropout 0
        --tokenizer-type NullTokenizer --vocab-size {vocab}
        --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion
        --no-gradient-accumulation-fusion --no-bias-dropout-fusion --no-persist-layer-norm
        --log-interval 1 --eval-interval 100000 --num-workers 0
    """.split()


def _watch(process: subprocess.Popen, name: str, step_log: Path, plan: Plan) -> None:
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns) as progress:
        task = progress.add_task(f"train {name}", total=plan.num_steps)
        while process.poll() is None:
            if step_log.exists():
                progress.update(task, completed=step_log.read_text().count('"step"'))
            time.sleep(0.5)
        if process.returncode == 0:
            progress.update(task, completed=plan.num_steps)
