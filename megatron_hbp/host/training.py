"""One run: the datasets provider and the forward step that Megatron is given."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.training import get_args, print_rank_0

from megatron_hbp.config import HbpConfig
from megatron_hbp.corpus.joint import JointCorpus
from megatron_hbp.corpus.store import Corpus
from megatron_hbp.dataset import HbpDataset
from megatron_hbp.host.aux_scale import AuxScale
from megatron_hbp.host.ending import end_every_rank
from megatron_hbp.host.forward import ForwardStep
from megatron_hbp.host.groups import create_cp_groups
from megatron_hbp.host.resume import Start, consumed_steps
from megatron_hbp.host.step_log import StepLog
from megatron_hbp.plan import Plan
from megatron_hbp.sampler import CyclicSampler, MicrobatchSampler


class HbpTraining:
    """What a run shares between model chunks: CP groups are made once, data sets per chunk."""

    def __init__(
        self,
        config: HbpConfig,
        plan: Plan,
        corpus: Corpus | JointCorpus,
        valid: tuple[Plan, Corpus] | None,
        aux_scale: AuxScale | None,
        start: Start,
    ) -> None:
        self._config = config
        self._plan = plan
        self._corpus = corpus
        self._valid = valid
        self._aux_scale = aux_scale
        self._start = start
        self._forward: ForwardStep | None = None

    def datasets_provider(
        self, train_val_test_num_samples: Any, vp_stage: int | None = None
    ) -> tuple[Any, Any, None]:
        """Iterators over micro-batches, from the first step that is not consumed yet.

        Ends every rank with one line when the checkpoint is not one of this plan.
        """
        args: Any = get_args()
        if self._forward is None:
            check_same_plan(self._plan, None if self._valid is None else self._valid[0])
        try:
            consumed = consumed_steps(args, self._plan, self._start)
            sampler = MicrobatchSampler(self._plan, consumed)
        except ValueError as error:
            end_every_rank(error)
        rank = mpu.get_data_parallel_rank(with_context_parallel=True)
        first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        train = HbpDataset(
            self._plan,
            self._corpus,
            rank,
            normalizer=self._config.loss_normalizer,
            with_tokens=first,
            with_labels=last,
        )
        if self._forward is None:
            self._forward = ForwardStep(
                self._plan,
                create_cp_groups(
                    (level.cp_size for level in self._plan.levels),
                    timedelta(minutes=args.distributed_timeout_minutes),
                ),
                self._aux_scale,
                StepLog(self._plan, self._config.step_log, rank, consumed, self._start),
            )
            _announce(self._plan, consumed)
        train_iterator = _iterate(train, sampler, args)
        valid_iterator = None
        if self._valid is not None:
            plan, corpus = self._valid
            valid = HbpDataset(
                plan, corpus, rank, with_tokens=first, with_labels=last, training=False
            )
            valid_iterator = _iterate(valid, CyclicSampler(plan), args)
        return train_iterator, valid_iterator, None

    datasets_provider.is_distributed = True  # type: ignore[attr-defined]  # every rank reads the plan

    def forward_step(
        self, data_iterator: Any, model: Any, return_schedule_plan: bool = False
    ) -> Any:
        """Megatron's forward step."""
        assert self._forward is not None, "the host asks for data before it trains"
        assert not return_schedule_plan, "refused by checks.py"
        return self._forward(data_iterator, model)


def check_same_plan(plan: Plan, valid: Plan | None) -> None:
    """Ends every rank with one line when ranks hold different plans. One all-gather."""
    device = torch.cuda.current_device()
    value = torch.tensor(
        [0 if p is None else int(p.hash()[:15], 16) for p in (plan, valid)],
        dtype=torch.int64,
        device=device,
    )
    everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, value)
    for place, word in enumerate(("", "validation ")):
        other = [r for r, held in enumerate(everyone) if held[place] != everyone[0][place]]
        if other:
            error = (
                f"ranks {other[:8]} hold another {word}plan than rank 0 does: the corpus, the "
                "--hbp-plan or the release differs between nodes; copy the same to all of them"
            )
            end_every_rank(ValueError(error))


def _iterate(dataset: HbpDataset, sampler: Any, args: Any) -> Any:
    if args.num_workers == 0:
        return map(dataset.__getitem__, sampler)
    return iter(
        torch.utils.data.DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=args.num_workers,
            pin_memory=torch.zeros(0, device=torch.cuda.current_device()).is_cuda,
            generator=torch.Generator(),  # leaves the host's random state alone
        )
    )


def _announce(plan: Plan, consumed: int) -> None:
    counts = plan.counts()
    print_rank_0(
        f"> hbp: {counts['sequences_in']} sequences ({counts['sequences_kept']} kept, "
        f"{counts['sequences_dropped']} dropped, {counts['sequences_truncated']} truncated), "
        f"{counts['tokens_in']} tokens = {counts['tokens_kept']} kept + "
        f"{counts['tokens_dropped']} dropped + {counts['tokens_truncated']} truncated"
    )
    print_rank_0(
        f"> hbp: levels {' '.join(map(str, plan.levels))}, {counts['packs']} packs "
        f"({counts['filler_packs']} fillers), {counts['steps']} steps of "
        f"{plan.num_microbatches} micro-batches in {plan.epochs} epochs, mixing {plan.mixing}; in "
        f"the host's log a sample is one rank's {plan.token_budget} tokens"
    )
    parent = f", which continues {plan.parent_hash[:12]}" if plan.parent_hash else ""
    print_rank_0(f"> hbp: starts at step {consumed} of plan {plan.hash()[:12]}{parent}")
