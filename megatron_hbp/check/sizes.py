"""How much room the run takes on disk: its checkpoints and the corpus.

A checkpoint holds every parameter once, whatever the number of GPUs: its weight, and unless
--no-save-optim says otherwise the optimizer's fp32 copy and states (megatron-core 0.19,
DistributedOptimizer._get_main_param_and_optimizer_states). A rank writes one file.

Guarantees (asserted by tests/unit/test_check_sizes.py):
- which checkpoints stay is Megatron's rule: multiples of --save-interval and the last step, of
  which --save-retain-interval keeps its multiples and the last;
- the bytes of a corpus are those that the writer writes, but for corpus.json.
tests/distributed/test_checkpoint_size.py compares the bytes of a parameter with real checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_hbp.corpus.writer import token_dtype

_FP32 = 4
# fp32 states of a parameter, by --optimizer
_STATES = {"adam": 2, "sgd": 1}
# tokens.idx and mask.idx: a header each with one document end more than sequences, then length,
# offset and document end of a sequence; seq_lens, first_trained, num_trained and row_numbers
_INDEX_HEADER, _INDEX_ROW = 34 + 8, 4 + 8 + 8
_ARRAY_HEADER, _ARRAY_ROW = 128, 3 * 4 + 8


@dataclass(frozen=True, kw_only=True)
class CheckpointSizes:
    """bytes_each: of one checkpoint. files_each: at most. kept: checkpoints that are there when the
    run has ended. most: that are there at once, while the last is written.
    """

    bytes_each: int
    bytes_per_parameter: int
    files_each: int
    kept: int
    most: int

    @property
    def bytes_kept(self) -> int:
        return self.kept * self.bytes_each

    @property
    def most_bytes(self) -> int:
        return self.most * self.bytes_each


def parameter_bytes(arguments: Mapping[str, Any]) -> int:
    """Bytes of a parameter in a checkpoint. arguments: the host's, by attribute name.

    The fp32 copy is there for 16-bit weights, and for all weights in a distributed optimizer. Other
    optimizers than adam and sgd are taken to keep as much as adam.
    """
    half = bool(arguments.get("bf16") or arguments.get("fp16"))
    weight = 2 if half else _FP32
    if arguments.get("no_save_optim"):
        return weight
    states = _STATES.get(str(arguments.get("optimizer", "adam")), 2)
    copy = half or bool(arguments.get("use_distributed_optimizer"))
    return weight + _FP32 * (copy + states)


def saved_steps(arguments: Mapping[str, Any], first: int, last: int) -> list[int]:
    """Steps after `first` whose checkpoints are written, the run ending with step `last`."""
    interval = arguments.get("save_interval")
    if not arguments.get("save") or not interval:
        return []
    steps = list(range(first // interval * interval + interval, last + 1, interval))
    return steps if last <= first or last % interval == 0 else [*steps, last]


def checkpoint_sizes(
    arguments: Mapping[str, Any], *, parameters: int, gpus: int, first: int, last: int
) -> CheckpointSizes | None:
    """Of a run from step `first` to step `last`; None when it saves nothing.

    parameters: of the whole model. arguments: see parameter_bytes(). Local and non-persistent
    checkpoints are not counted.
    """
    steps = saved_steps(arguments, first, last)
    if not steps:
        return None
    retain = arguments.get("save_retain_interval")
    kept = len(steps)
    most = kept
    if retain:
        kept = sum(step % retain == 0 or step == steps[-1] for step in steps)
        # the one before goes only after the tracker file names the new one
        most = kept + (len(steps) > 1 and steps[-2] % retain != 0)
    each = parameter_bytes(arguments)
    return CheckpointSizes(
        bytes_each=each * parameters,
        bytes_per_parameter=each,
        files_each=gpus,
        kept=kept,
        most=most,
    )


def corpus_bytes(*, num_sequences: int, num_tokens: int, vocab_size: int) -> int:
    """Bytes of a corpus folder without corpus.json. vocab_size: ids that the tokenizer knows."""
    values = num_tokens * (token_dtype(vocab_size).itemsize + 1)
    indices = 2 * (_INDEX_HEADER + num_sequences * _INDEX_ROW)
    return values + indices + 4 * _ARRAY_HEADER + num_sequences * _ARRAY_ROW
