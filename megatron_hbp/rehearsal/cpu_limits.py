"""What a CPU run cannot do, or must not: flags that a rehearsal takes away, each with its reason.

Guarantee (asserted by tests/unit/test_rehearsal_scale.py): a flag of the recipe that none of the
tables names is kept.
"""

from megatron_hbp.rehearsal.scaling import Scaling

_TE = "needs Transformer Engine"
_KERNEL = "its kernel runs on GPUs only"
_NCCL = "sets up NCCL, a CPU run has gloo"
_FILES = "a rehearsal reads and writes in its own folder only"
_SHORT = "a rehearsal ends by its own count of steps"

_TAKEN_AWAY = {
    "fp16": "low precision of GPUs",
    "no-fp8-wgrad": _TE,
    "disable-fp8-wgrad": _TE,
    "te-precision-config-file": _TE,
    "first-last-layers-bf16": _TE,
    "num-layers-at-start-in-bf16": _TE,
    "num-layers-at-end-in-bf16": _TE,
    "reuse-grad-buf-for-mxfp8-param-ag": _TE,
    "keep-fp8-transpose-cache": _TE,
    "moe-router-padding-for-fp8": _TE,
    "moe-router-padding-for-quantization": _TE,
    "te-rng-tracker": _TE,
    "tp-comm-overlap": _TE,
    "tp-comm-overlap-cfg": _TE,
    "tp-comm-bootstrap-backend": _TE,
    "disable-tp-comm-bulk-dgrad": _TE,
    "disable-tp-comm-bulk-wgrad": _TE,
    "delay-wgrad-compute": _TE,
    "use-precision-aware-optimizer": _TE,
    "main-grads-dtype": _TE,
    "main-params-dtype": _TE,
    "exp-avg-dtype": _TE,
    "exp-avg-sq-dtype": _TE,
    "optimizer-cpu-offload": "the optimizer is on the CPU already",
    "overlap-cpu-optimizer-d2h-h2d": "the optimizer is on the CPU already",
    "use-torch-optimizer-for-cpu-offload": "the optimizer is on the CPU already",
    "cross-entropy-loss-fusion": _KERNEL,
    "cross-entropy-fusion-impl": _KERNEL,
    "moe-grouped-gemm": _KERNEL,
    "moe-permute-fusion": _KERNEL,
    "moe-router-fusion": _KERNEL,
    "moe-enable-deepep": _KERNEL,
    "moe-flex-dispatcher-backend": _KERNEL,
    "mla-down-proj-fusion": _KERNEL,
    "fused-residual-rmsnorm": _KERNEL,
    "attention-backend": _KERNEL,
    "use-flash-attn": _KERNEL,
    "nccl-communicator-config-path": _NCCL,
    "use-nccl-ub": _NCCL,
    "use-sharp": _NCCL,
    "high-priority-stream-groups": _NCCL,
    "disable-symmetric-registration": _NCCL,
    "ddp-pad-buckets-for-high-nccl-busbw": _NCCL,
    "ddp-reduce-scatter-with-fp32-accumulation": "gloo sums in the tensors' own type",
    "tokenizer-model": _FILES,
    "ckpt-step": _FILES,
    "data-cache-path": _FILES,
    "save-retain-interval": _FILES,
    "exit-interval": _SHORT,
    "exit-duration-in-mins": _SHORT,
    "train-iters": _SHORT,
    "eval-iters": "the synthetic validation corpus is evaluated whole, too",
    "lr-decay-iters": "the schedule ends with the plan's last step",
    "use-pytorch-profiler": "profiles GPUs",
    "log-straggler": "reads GPU counters",
    "enable-ft-package": "needs a launcher of its own",
}

_BEGINNINGS = {
    "fp8-": _TE,
    "fp4-": _TE,
    "moe-deepep-": _KERNEL,
    "moe-hybridep-": _KERNEL,
    "moe-flex-": _KERNEL,
    "optimizer-offload-": "the optimizer is on the CPU already",
    "wandb-": _FILES,
    "non-persistent-": _FILES,
    "profile": "profiles GPUs",
    "pytorch-profiler-": "profiles GPUs",
}

_GIVEN = {
    "distributed-backend": ("gloo", "the CPU's backend"),
    "transformer-impl": ("local", _TE),
    "hbp-device": ("cpu", "CPU processes"),
    "num-workers": (0, "the ranks share few cores"),
    "log-interval": (1, "every step is looked at"),
    "no-masked-softmax-fusion": (True, _KERNEL),
    "no-bias-swiglu-fusion": (True, _KERNEL),
    "no-bias-gelu-fusion": (True, _KERNEL),
    "no-bias-dropout-fusion": (True, _KERNEL),
    "no-rope-fusion": (True, _KERNEL),
    "no-gradient-accumulation-fusion": (True, _KERNEL),
    "no-persist-layer-norm": (True, _KERNEL),
}


def fit_cpu(scaling: Scaling) -> None:
    """Takes away what a CPU cannot, and gives what it needs."""
    for flag in list(scaling.flags):
        reasons = [why for start, why in _BEGINNINGS.items() if flag.startswith(start)]
        reason = _TAKEN_AWAY.get(flag) or "".join(reasons[:1])
        if reason:
            scaling.take_away(flag, reason)
    for flag, (value, reason) in _GIVEN.items():
        scaling.set(flag, value, reason)
    if scaling.flags.get("moe-token-dispatcher-type") == "flex":  # DeepEP's
        scaling.set("moe-token-dispatcher-type", "alltoall", _KERNEL)
    if "num-experts" in scaling:
        scaling.set("expert-tensor-parallel-size", 1, "gloo has no uneven all-gather")
    if scaling.flags.get("tokenizer-type") != "NullTokenizer":
        scaling.set("tokenizer-type", "NullTokenizer", "the synthetic corpus needs no tokenizer")
