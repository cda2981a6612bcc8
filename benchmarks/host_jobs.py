"""Starts the jobs of `host_overhead.py`: a synthetic corpus, its plan, and torchrun on the CPU."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hbp.corpus import write_corpus
from megatron_hbp.level import Level
from megatron_hbp.planner import build_plan

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 2048


@dataclass(frozen=True)
class Job:
    """name: one of host_measure.JOBS. lens: tokens of each sequence of the corpus."""

    name: str
    lens: list[int]
    levels: tuple[Level, ...]
    num_ranks: int
    num_microbatches: int
    learning_rate: float
    layers: int

    def run(self, folder: Path, rounds: int) -> list[dict[str, Any]]:
        """Every rank's result. Raises RuntimeError with the end of the output when it fails."""
        folder.mkdir()
        plan = self._make_plan(folder)
        command = [
            *[sys.executable, "-m", "torch.distributed.run", "--standalone"],
            *["--nproc-per-node", str(self.num_ranks), "-m", "benchmarks.host_job"],
            *_model_flags(self.layers),
            *_host_flags(),
            *["--lr", str(self.learning_rate), "--seq-length", str(self.levels[0].pack_len)],
            *["--max-position-embeddings", str(self.levels[-1].pack_len)],
            *["--global-batch-size", str(self.num_ranks * self.num_microbatches)],
            *["--hbp-plan", str(plan), "--hbp-device", "cpu"],
            *["--bench-job", self.name, "--bench-rounds", str(rounds)],
            *["--bench-output", str(folder)],
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONWARNINGS": "ignore",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"the job {self.name} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
            )
        return [
            json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(self.num_ranks)
        ]

    def _make_plan(self, folder: Path) -> Path:
        rng = np.random.default_rng(0)
        corpus = write_corpus(
            folder / "corpus",
            (
                (rng.integers(0, VOCAB, n), (np.arange(n) >= n // 3).astype(np.uint8))
                for n in self.lens
            ),
            vocab_size=VOCAB,
            end_id=0,
        )
        plan = build_plan(
            corpus.seq_lens,
            self.levels,
            self.num_ranks,
            self.num_microbatches,
            first_trained=corpus.first_trained,
            corpus_hash=corpus.hash,
            corpus_paths=(str(corpus.path),),
        )
        plan.save(folder / "plan")
        return folder / "plan"


def overhead_job() -> Job:
    """One process, S = 512 tokens, about five documents a pack, two micro-batches a step."""
    lens = np.random.default_rng(1).lognormal(4.3, 0.8, 400)
    return Job(
        name="overhead",
        lens=np.clip(lens, 8, 512).astype(int).tolist(),
        levels=(Level(512, 1),),
        num_ranks=1,
        num_microbatches=2,
        learning_rate=1e-4,
        layers=4,
    )


def switch_job() -> Job:
    """Two processes, S = 64, levels of CP 1 and CP 2.

    Micro-batches are small, so that a switch would show. Ranks have equal documents, and weights
    stay as they are, so that all steps do the same.
    """
    return Job(
        name="switch",
        lens=[16] * 128 + [128] * 16,
        levels=(Level(64, 1), Level(128, 2)),
        num_ranks=2,
        num_microbatches=16,
        learning_rate=0.0,
        layers=2,
    )


def _model_flags(layers: int) -> list[str]:
    """A small DeepSeek-V2: latent attention, shared and routed experts, first layer dense."""
    return f"""
        --num-layers {layers} --hidden-size 128 --num-attention-heads 8 --ffn-hidden-size 256
        --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 16
        --qk-pos-emb-head-dim 8 --v-head-dim 16 --qk-layernorm
        --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64
        --moe-shared-expert-intermediate-size 64 --moe-layer-freq ([0]*1+[1]*{layers - 1})
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
        --moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1
        --swiglu --disable-bias-linear --normalization RMSNorm
        --position-embedding-type rope --rope-type yarn --rotary-scaling-factor 4
        --mscale 0.707 --mscale-all-dim 0.707 --untie-embeddings-and-output-weights
    """.split()


def _host_flags() -> list[str]:
    return f"""
        --distributed-backend gloo --transformer-impl local
        --micro-batch-size 1 --dataloader-type external --calculate-per-token-loss
        --use-distributed-optimizer --clip-grad 1.0 --weight-decay 0.01
        --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0
        --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1}
        --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion
        --no-gradient-accumulation-fusion --no-bias-dropout-fusion --no-persist-layer-norm
        --eval-interval 100000 --num-workers 0
    """.split()
