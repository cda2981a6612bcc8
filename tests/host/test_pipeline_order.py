"""The simulator's order of work is the one that Megatron's schedules compute."""

import pytest

from megatron_hbp.pipeline import stage_order

schedules = pytest.importorskip(
    "megatron.core.pipeline_parallel.schedules", reason="needs the extra [train]"
)


class _Communicator:
    """What get_pp_rank_microbatches asks for: stages, which one, virtual stages or None."""

    def __init__(self, stages, stage, chunks):
        self.pp_group = self
        self.virtual_pipeline_model_parallel_size = None if chunks == 1 else chunks
        self.size = lambda: stages
        self.rank = lambda: stage


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches"),
    [(2, 1, 5), (4, 1, 8), (4, 1, 2), (2, 2, 2), (2, 3, 6), (4, 2, 8), (4, 2, 12), (8, 4, 16)],
)
def test_forwards_before_the_first_backward_and_the_turn_of_chunks(stages, chunks, microbatches):
    turns = schedules.get_schedule_table(microbatches, chunks, stages)
    for stage in range(stages):
        total, _, fill, _ = schedules.get_pp_rank_microbatches(
            microbatches, chunks, stages, p2p_communicator=_Communicator(stages, stage, chunks)
        )
        order = stage_order(stage, stages, chunks, microbatches)
        assert len(order) == 2 * total
        assert [work.forward for work in order].index(False) == min(fill + 1, total)
        forwards = [(w.microbatch, w.chunk) for w in order if w.forward]
        backwards = [(w.microbatch, chunks - 1 - w.chunk) for w in order if not w.forward]
        assert forwards == turns
        assert backwards == turns
