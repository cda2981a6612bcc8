"""Transfers between pipeline stages: every step ends, and a wrong order is found."""

import pytest

from megatron_hbp.check.transfers import stage_actions, transfer_problems
from megatron_hbp.pipeline import Work, stage_order

PIPELINES = [
    (stages, chunks, microbatches)
    for stages in (1, 2, 3, 4, 8)
    for chunks in ((1,) if stages == 1 else (1, 2, 3))
    for microbatches in (
        (1, 2, stages, 2 * stages + 1) if chunks == 1 else (stages, 2 * stages, 5 * stages)
    )
]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("stages", "chunks", "microbatches"), PIPELINES)
def test_every_step_ends(stages, chunks, microbatches, overlap):
    overlap = overlap and chunks > 1
    assert transfer_problems(stages, chunks, microbatches, overlap=overlap) == []
    for stage in range(stages):
        actions = stage_actions(stage, stages, chunks, microbatches, overlap)
        works = [action for action in actions if isinstance(action, Work)]
        assert works == stage_order(stage, stages, chunks, microbatches)
        calls = [one for action in actions if not isinstance(action, Work) for one in action]
        ends = (stage == 0) + (stage == stages - 1)  # where nothing comes in or goes out
        wanted = 2 * microbatches * (2 * chunks - ends) if stages > 1 else 0
        assert len(calls) == wanted
        assert sum(one.send for one in calls) == len(calls) // 2


def changed(at_stage, change):
    """Actions with those of one stage changed."""

    def actions_of(stage, *pipeline):
        actions = list(stage_actions(stage, *pipeline))
        if stage == at_stage:
            change(actions)
        return tuple(actions)

    return actions_of


def swap_receives(actions):
    """The first two outputs that come in, the other way round."""
    calls = [at for at, action in enumerate(actions) if not isinstance(action, Work)]
    first, second = calls[0], next(at for at in calls[1:] if not actions[at][0].send)
    actions[first], actions[second] = actions[second], actions[first]


def drop_last_send(actions):
    at = max(a for a, action in enumerate(actions) if not isinstance(action, Work))
    actions[at] = tuple(one for one in actions[at] if not one.send)


def receive_late(actions):
    """A backward before its gradient has come."""
    at = next(a for a, one in enumerate(actions) if isinstance(one, Work) and not one.forward)
    actions.insert(0, actions.pop(at))


@pytest.mark.parametrize(
    ("stage", "change", "sentence"),
    [
        (
            1,
            swap_receives,
            "stage 0 sends the output of chunk 0 for micro-batch 0 to stage 1, which waits for the "
            "output of chunk 0 for micro-batch 1",
        ),
        (
            1,
            drop_last_send,
            "stage 0 waits for the gradient of chunk 0 for micro-batch 3 for ever: stage 1 never "
            "sends it",
        ),
        (
            1,
            receive_late,
            "stage 1 never gets the input of the backward of chunk 0 for micro-batch 0",
        ),
    ],
)
def test_a_wrong_order_is_found(stage, change, sentence):
    found = transfer_problems(3, 1, 4, actions_of=changed(stage, change))
    assert sentence in found
