"""What pipeline stages send each other in a step, in Megatron's order, and the proof that it ends.

Guarantees (asserted by tests/unit/test_transfers.py and tests/distributed/test_lockstep.py):
- the calls of a stage are those of the host's two schedules (megatron-core 0.19, without
  interleaving and with it, one group of `stages` micro-batches a chunk);
- `transfer_problems` runs all stages against each other: what is sent is what is received, in the
  same order, and no stage waits for ever; where one does, the sentence names stage and micro-batch.
Transfers are taken to be unbuffered: a call that does not overlap ends when all it sends and
receives has met its other half. A forward or backward never begins without what it needs.
"""

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from megatron_hbp.pipeline import Work, stage_order


class Transfer(NamedTuple):
    """One tensor: the output of a chunk's forward, or the gradient of a chunk's input.

    chunk, microbatch: of the sender. peer: the other stage.
    """

    send: bool
    peer: int
    forward: bool
    chunk: int
    microbatch: int


# What a stage does: a forward or backward, or one call with all its transfers.
Action = Work | tuple[Transfer, ...]


@lru_cache(maxsize=256)
def stage_actions(
    stage: int,
    num_stages: int,
    num_virtual_stages: int,
    num_microbatches: int,
    overlap: bool = False,
) -> tuple[Action, ...]:
    """Forwards, backwards and transfer calls of a stage in a step, in order.

    overlap: the host's default with virtual stages, --no-overlap-p2p-communication is without.
    """
    order = stage_order(stage, num_stages, num_virtual_stages, num_microbatches)
    if num_stages == 1:
        return tuple(order)
    if num_virtual_stages == 1:
        return tuple(_plain(stage, num_stages, order))
    return tuple(_interleaved(stage, (num_stages, num_virtual_stages), order, overlap))


def _received(work: Work, num_stages: int, num_virtual_stages: int) -> Transfer | None:
    """What `work` needs from another stage; None at the ends of the model."""
    stage, chunk, microbatch, forward = work
    if forward:
        if stage == 0:
            sender = (num_stages - 1, chunk - 1)
            return None if chunk == 0 else Transfer(False, sender[0], True, sender[1], microbatch)
        return Transfer(False, stage - 1, True, chunk, microbatch)
    if stage == num_stages - 1:
        last = chunk == num_virtual_stages - 1
        return None if last else Transfer(False, 0, False, chunk + 1, microbatch)
    return Transfer(False, stage + 1, False, chunk, microbatch)


def _sent(work: Work, num_stages: int, num_virtual_stages: int) -> Transfer | None:
    """What `work` gives to another stage; None at the ends of the model."""
    stage, chunk, microbatch, forward = work
    if forward:
        if stage == num_stages - 1 and chunk == num_virtual_stages - 1:
            return None
        return Transfer(True, (stage + 1) % num_stages, True, chunk, microbatch)
    if stage == 0 and chunk == 0:
        return None
    return Transfer(True, (stage - 1) % num_stages, False, chunk, microbatch)


# Within a call, as P2PCommunicator orders them: (send, forward).
_BATCHED = ((True, False), (False, True), (True, True), (False, False))
_EVEN = ((True, True), (False, True), (True, False), (False, False))
_ODD = ((False, True), (True, True), (False, False), (True, False))


def _call(*transfers: Transfer | None, order: tuple = _BATCHED) -> list[Action]:
    found = [transfer for transfer in transfers if transfer is not None]
    found.sort(key=lambda transfer: order.index((transfer.send, transfer.forward)))
    return [tuple(found)] if found else []


def _plain(stage: int, num_stages: int, order: list[Work]) -> list[Action]:
    """forward_backward_pipelining_without_interleaving."""

    def received(work: Work) -> Transfer | None:
        return _received(work, num_stages, 1)

    def sent(work: Work) -> Transfer | None:
        return _sent(work, num_stages, 1)

    forwards = [work for work in order if work.forward]
    backwards = [work for work in order if not work.forward]
    fill = min(num_stages - stage - 1, len(forwards))
    actions: list[Action] = []
    for work in forwards[:fill]:
        actions += [*_call(received(work)), work, *_call(sent(work))]
    steady = list(zip(forwards[fill:], backwards, strict=False))
    if steady:
        actions += _call(received(steady[0][0]))
    for place, (forward, backward) in enumerate(steady):
        actions += [forward, *_call(sent(forward), received(backward)), backward]
        following = steady[place + 1][0] if place + 1 < len(steady) else None
        actions += _call(sent(backward), None if following is None else received(following))
    for work in backwards[len(steady) :]:
        actions += [*_call(received(work)), work, *_call(sent(work))]
    return actions


def _interleaved(
    stage: int, pipeline: tuple[int, int], order: list[Work], overlap: bool
) -> list[Action]:
    """forward_backward_pipelining_with_interleaving. pipeline: stages and virtual stages.

    A stage receives one turn ahead of its need. The leading stage (the first in forwards, the last
    in backwards) receives what the ending stage, stages - 1 turns behind, has just produced.
    """
    num_stages, num_virtual_stages = pipeline
    forwards = [work for work in order if work.forward]
    backwards = [work for work in order if not work.forward]
    # forwards before the first steady turn, as in get_pp_rank_microbatches
    fill = 2 * (num_stages - stage - 1) + (num_virtual_stages - 1) * num_stages
    fill = min(fill, len(forwards))
    steady = len(forwards) - fill

    def next_received(works: list[Work], turn: int, leading: bool) -> Transfer | None:
        if not leading:
            following = turn + 1
            if following >= len(works):
                return None
            return _received(works[following], num_stages, num_virtual_stages)
        aligned = turn - (num_stages - 1)
        if aligned < 0:
            return None
        forward = works[0].forward
        ending = Work(
            num_stages - 1 if forward else 0,
            works[aligned].chunk,
            works[aligned].microbatch,
            forward,
        )
        given = _sent(ending, num_stages, num_virtual_stages)
        return None if given is None else given._replace(send=False, peer=ending.stage)

    def sent(work: Work) -> Transfer | None:
        return _sent(work, num_stages, num_virtual_stages)

    def calls(*parts: tuple[Transfer | None, ...]) -> list[Action]:
        if overlap:
            return [call for part in parts for call in _call(*part, order=overlapped)]
        return _call(*(transfer for part in parts for transfer in part))

    overlapped = _ODD if stage % 2 else _EVEN
    first, last = stage == 0, stage == num_stages - 1
    actions: list[Action] = _call(_received(forwards[0], num_stages, num_virtual_stages))
    for turn in range(fill):
        coming = None if turn == len(forwards) - 1 else next_received(forwards, turn, first)
        gradient = None
        if turn == fill - 1 and steady:
            gradient = _received(backwards[0], num_stages, num_virtual_stages)
        actions.append(forwards[turn])
        actions += calls((sent(forwards[turn]), coming), (gradient,))
    for turn in range(steady):
        forward, backward = forwards[fill + turn], backwards[turn]
        coming = None if turn == steady - 1 else next_received(forwards, fill + turn, first)
        gradient = next_received(backwards, turn, last)
        after_forward, after_backward = (sent(forward), coming), (sent(backward), gradient)
        if overlap:
            actions += [forward, *calls(after_forward), backward, *calls(after_backward)]
        else:
            actions += [forward, backward, *calls(after_forward, after_backward)]
    if not steady:
        actions += _call(_received(backwards[0], num_stages, num_virtual_stages))
    for turn in range(steady, len(backwards)):
        gradient = None if turn == len(backwards) - 1 else next_received(backwards, turn, last)
        actions += [backwards[turn], *calls((sent(backwards[turn]), gradient))]
    return actions


def transfer_problems(
    num_stages: int,
    num_virtual_stages: int,
    num_microbatches: int,
    *,
    overlap: bool = False,
    actions_of: Callable[..., tuple[Action, ...]] = stage_actions,
) -> list[str]:
    """Runs a step of all stages against each other; what goes wrong, in words."""
    stages = [
        _Running(
            stage,
            actions_of(stage, num_stages, num_virtual_stages, num_microbatches, overlap),
            (num_stages, num_virtual_stages),
            overlap,
        )
        for stage in range(num_stages)
    ]
    channels: dict[tuple[int, int, bool], tuple[deque[Transfer], deque[Transfer]]] = {}
    problems: list[str] = []

    def post(stage: int, transfer: Transfer) -> None:
        pair = (stage, transfer.peer) if transfer.send else (transfer.peer, stage)
        sides = channels.setdefault((*pair, transfer.forward), (deque(), deque()))
        sides[0 if transfer.send else 1].append(transfer)
        if sides[0] and sides[1]:
            given, taken = sides[0].popleft(), sides[1].popleft()
            if given[2:] != taken[2:]:
                problems.append(
                    f"stage {pair[0]} sends {_named(given)} to stage {pair[1]}, which waits for "
                    f"{_named(taken)}"
                )
            stages[pair[0]].met(given)
            stages[pair[1]].met(taken)

    moved = True
    while moved:
        moved = False
        for running in stages:
            while running.ready():
                moved = True
                for transfer in running.step():
                    post(running.stage, transfer)
    for running in stages:
        problems += running.what_is_left()
    return problems


class _Running:
    """A stage on its way through a step: transfers that have not met their other half."""

    def __init__(
        self, stage: int, actions: tuple[Action, ...], pipeline: tuple[int, int], overlap: bool
    ) -> None:
        self.stage = stage
        self._left = deque(actions)
        self._pipeline = pipeline
        self._overlap = overlap
        self._pending: list[Transfer] = []
        self._received: set[Transfer] = set()

    def met(self, transfer: Transfer) -> None:
        self._pending.remove(transfer)
        if not transfer.send:
            self._received.add(transfer)

    def ready(self) -> bool:
        """A forward or backward needs its input, a call that does not overlap all earlier ones."""
        if not self._left or (self._pending and not self._overlap):
            return False
        action = self._left[0]
        if not isinstance(action, Work):
            return True
        needed = _received(action, *self._pipeline)
        return needed is None or needed in self._received

    def step(self) -> tuple[Transfer, ...]:
        """Does the next action; the transfers that it begins."""
        action = self._left.popleft()
        if isinstance(action, Work):
            return ()
        self._pending += action
        return action

    def what_is_left(self) -> list[str]:
        found = []
        for transfer in self._pending:
            verb, other = ("sends", "takes") if transfer.send else ("waits for", "sends")
            found.append(
                f"stage {self.stage} {verb} {_named(transfer)} for ever: stage {transfer.peer} "
                f"never {other} it"
            )
        if self._left and not found:
            work = next(action for action in self._left if isinstance(action, Work))
            found.append(
                f"stage {self.stage} never gets the input of the "
                f"{'forward' if work.forward else 'backward'} of chunk {work.chunk} for "
                f"micro-batch {work.microbatch}"
            )
        return found


def _named(transfer: Transfer) -> str:
    what = "the output" if transfer.forward else "the gradient"
    return f"{what} of chunk {transfer.chunk} for micro-batch {transfer.microbatch}"
