"""One rank's host, set up as `pretrain` does, stepped by hand: the loop is the benchmark's own."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_model_config
from megatron.training import get_args, get_timers
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import (
    consume_seqlen_stats_in_iteration,
    setup_model_and_optimizer,
    train_step,
)

from benchmarks.host_counts import StepCounts
from megatron_hbp.corpus.store import Corpus
from megatron_hbp.dataset import HbpDataset
from megatron_hbp.host import compat, pretrain_gpt
from megatron_hbp.host.training import HbpTraining
from megatron_hbp.plan import Plan

ForwardStep = Callable[[Any, Any], Any]


@dataclass
class HostRun:
    """args: the host's. dataset: this rank's micro-batches. training: HBP, ready to step."""

    args: Any
    model: list[Any]
    optimizer: Any
    scheduler: Any
    training: HbpTraining
    dataset: HbpDataset

    @property
    def plan(self) -> Plan:
        return self.dataset.plan

    def step(self, forward_step: ForwardStep, iterator: RerunDataIterator) -> dict[str, Any]:
        """One training step and the read of the FLOPs statistics that the host's loop does."""
        result = train_step(
            forward_step_func=forward_step,
            data_iterator=iterator,
            model=self.model,
            optimizer=self.optimizer,
            opt_param_scheduler=self.scheduler,
            config=get_model_config(self.model[0]),
            forward_backward_func=get_forward_backward_func(),
        )
        consume_seqlen_stats_in_iteration()
        return result[0]

    def counted_step(
        self, forward_step: ForwardStep, items: list[Any], host_tensors: Iterable[torch.Tensor]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """One step over items that are read already: what it counts, and its report."""
        counter = StepCounts(host_tensors)

        def leave_out_bounds(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            counter.leave_out(kwargs["packed_seq_params"].cu_seqlens_q)  # see forward.py

        set_counting = functools.partial(setattr, counter, "counts_syncs")
        hooks = [self.model[0].register_forward_pre_hook(leave_out_bounds, with_kwargs=True)]
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            # torch's AdamW reads its step numbers, which lie in host memory on a GPU too
            hooks += [
                part.optimizer.register_step_pre_hook(lambda *_: set_counting(False)),
                part.optimizer.register_step_post_hook(lambda *_: set_counting(True)),
            ]
        try:
            with counter:
                report = self.step(forward_step, data_iterator(items))
        finally:
            for hook in hooks:
                hook.remove()
        return counter.result(), report

    def log_steps(self, every: bool) -> None:
        """Whether each step is a step that is logged, or none is."""
        self.args.log_interval = 1 if every else 1 << 40


def start(extra_args_provider: Any) -> HostRun:
    """Parses sys.argv and builds everything up to the first step."""
    compat.use_bundled_dataset_helpers()
    args: Any = parse_and_validate_args(
        extra_args_provider=pretrain_gpt.with_arguments(extra_args_provider)
    )
    model_config = gpt_config_from_args(args)
    training = pretrain_gpt.setup(args, model_config)
    assert training is not None
    initialize_megatron()
    container = pretrain_cfg_container_from_args(args, model_config)
    model, optimizer, scheduler = setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        checkpointing_context={},
        cfg_container=container,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    assert optimizer is not None
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.timers = get_timers()
    config.finalize_model_grads_func = finalize_model_grads
    for chunk in model:
        chunk.train()
    args = get_args()
    args.consumed_train_samples = args.consumed_train_samples or 0
    training.datasets_provider(None)
    plan = Plan.load(args.hbp_plan)
    assert plan.corpus_paths
    rank = mpu.get_data_parallel_rank(with_context_parallel=True)
    dataset = HbpDataset(plan, Corpus.open(plan.corpus_paths[0]), rank)
    return HostRun(args, model, optimizer, scheduler, training, dataset)


def data_iterator(items: Iterable[Any]) -> RerunDataIterator:
    return RerunDataIterator(iter(items))


def tensors_of(items: Iterable[dict[str, Any]]) -> Iterator[torch.Tensor]:
    for item in items:
        yield from (value for value in item.values() if isinstance(value, torch.Tensor))
