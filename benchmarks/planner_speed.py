"""Packers and one call of build_plan() against other packers, on tulu with 1M sequences.

All calls take turns in one process; a ratio is the peer's least time over ours. At each pack
length, sequences that are longer are left out for both sides. The peer is the fastest one that
needs no more packs than our best_fit_decreasing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import planner_peers
from benchmarks.planner_figures import Figure, Row, at_least, at_most, not_run, shown
from benchmarks.planner_peers import EARLIER, EARLIER_YARDSTICK, NUM_SLOW, Peer
from benchmarks.planner_timing import best_times
from benchmarks.planner_workloads import Workloads
from megatron_hbp import Level, Plan, build_plan
from megatron_hbp.packing import pack

NUM_SEQUENCES = 1_000_000
CAPS = (32768, 131072)
LEVELS = (Level(16384, 1), Level(131072, 8))
NUM_RANKS, NUM_MICROBATCHES = 32, 8
MIN_SPEEDUP = {"best_fit_decreasing": 5.0, "best_fit": 8.0}
MAX_PACKS = 1.0005  # of random-order best fit, over the peer's
_PLANS: dict[str, dict[str, Any]] = {
    "plan": {},
    "step": {"mixing": "step"},
    "stages": {"num_stages": 8},
}


@dataclass(frozen=True)
class _Race:
    """Least seconds by call, packs by packer, plans by name; peer: the one that counts."""

    seconds: dict[str, float]
    num_packs: dict[str, int]
    plans: dict[str, Plan]
    peer: str | None
    num_sequences: int


class Speed:
    """The rows packers, plan, step and stages. Each pack length is raced once."""

    def __init__(self, workloads: Workloads, rounds: int) -> None:
        self._workloads = workloads
        self._rounds = rounds
        self._races: dict[int, _Race] = {}

    def packers(self) -> Row:
        figures: list[Figure] = []
        notes: list[str] = []
        for cap in CAPS:
            race = self._race(cap)
            figures += _packer_figures(race, cap)
            slow = {name for name in race.num_packs if name not in MIN_SPEEDUP}
            others = sorted(slow, key=lambda name: race.seconds[name])
            notes.append(
                f"cap {cap}, {race.num_sequences} sequences, against {race.peer}: "
                + "; ".join(
                    f"{name} {race.seconds[name] * 1e3:.1f} ms, {race.num_packs[name]} packs"
                    for name in others
                )
            )
        notes += self._slow_notes() + self._earlier_notes()
        notes.append("two threads: ours, lightbinpack obfdp and seqpacker obfdp; the others one")
        return Row(
            "packers", f"pack() on tulu {NUM_SEQUENCES}, best of {self._rounds}", figures, notes
        )

    def plan(self) -> Row:
        return self._plan_row("plan", "ONE call of build_plan()", 1.01, at_most_mixing)

    def step(self) -> Row:
        return self._plan_row("step", 'the same with mixing="step"', 1.02, shown_mixing)

    def stages(self) -> Row:
        race = self._race(CAPS[-1])
        metrics = race.plans["stages"].metrics()
        figures = [
            at_most("pipeline stretch", metrics["pipeline_stretch"], 1.03, bound=1.0),
            shown_mixing(metrics["mixing_ratio"]),
            *_time_figures(race, "stages", bar=False),
            *_quality_figures(metrics, None),
        ]
        return Row("stages", 'the same with 8 stages, mixing="auto"', figures)

    def _plan_row(
        self, name: str, title: str, max_cr: float, mixing: Callable[[float], Figure]
    ) -> Row:
        race = self._race(CAPS[-1])
        metrics = race.plans[name].metrics()
        figures = [
            *_time_figures(race, name, bar=True),
            *_quality_figures(metrics, max_cr),
            mixing(metrics["mixing_ratio"]),
        ]
        levels = " + ".join(map(str, LEVELS))
        job = f"{levels}, {NUM_RANKS} ranks, {NUM_MICROBATCHES} micro-batches"
        notes = [
            "two threads; the peer's time is that of packing the same sequences at 131072",
        ]
        return Row(name, f"{title}, tulu {NUM_SEQUENCES}, {job}", figures, notes)

    def _race(self, cap: int) -> _Race:
        if cap not in self._races:
            self._races[cap] = self._run_race(cap)
        return self._races[cap]

    def _run_race(self, cap: int) -> _Race:
        everything = self._workloads.lengths("tulu", NUM_SEQUENCES)
        lens = everything[everything <= cap]
        calls: dict[str, Callable[[], Any]] = {
            method: lambda method=method: pack(lens, cap, method) for method in MIN_SPEEDUP
        }
        fast = [peer for peer in planner_peers.peers() if not peer.slow]
        for peer in fast:
            calls[peer.name] = _bound(peer, peer.convert(lens), cap)
        if cap == CAPS[-1]:
            for name, settings in _PLANS.items():
                calls[name] = lambda settings=settings: build_plan(
                    everything, LEVELS, NUM_RANKS, NUM_MICROBATCHES, **settings
                )
        seconds, results = best_times(calls, self._rounds)
        num_packs = {method: len(results[method][1]) - 1 for method in MIN_SPEEDUP}
        num_packs |= {peer.name: peer.count(results[peer.name]) for peer in fast}
        good = [p.name for p in fast if num_packs[p.name] <= num_packs["best_fit_decreasing"]]
        return _Race(
            seconds,
            num_packs,
            {name: results[name] for name in _PLANS if name in results},
            min(good, key=lambda name: seconds[name], default=None),
            len(lens),
        )

    def _slow_notes(self) -> list[str]:
        lens = self._workloads.lengths("tulu", NUM_SEQUENCES)[:NUM_SLOW].copy()
        cap, notes = CAPS[-1], []
        for peer in planner_peers.peers():
            if peer.slow:
                given = peer.convert(lens)
                calls = {
                    "ours": lambda: pack(lens, cap, "best_fit_decreasing"),
                    "peer": _bound(peer, given, cap),
                }
                seconds, _ = best_times(calls, 2)
                notes.append(
                    f"{peer.name} is slow: {seconds['peer'] * 1e3:.1f} ms for {NUM_SLOW} sequences "
                    f"at cap {cap}, ours {seconds['ours'] * 1e3:.2f} ms"
                )
        return notes

    def _earlier_notes(self) -> list[str]:
        notes = [f"{name} is not installed: {why}" for name, why in planner_peers.absent().items()]
        yardsticks = [self._race(cap) for cap in CAPS]
        for name, earlier in EARLIER.items():
            if name == EARLIER_YARDSTICK or name.split()[0] not in planner_peers.absent():
                continue
            parts = []
            for cap, race in zip(CAPS, yardsticks, strict=True):
                times = [race.seconds[n] for n in race.num_packs if n.startswith("lightbinpack")]
                if times:
                    scale = min(times) / EARLIER[EARLIER_YARDSTICK][cap]
                    ratio = earlier[cap] * scale / race.seconds["best_fit_decreasing"]
                    parts.append(f"{earlier[cap]} s at {cap}, {ratio:.1f} x ours by that")
            notes.append(f"{name}, measured earlier beside lightbinpack: " + "; ".join(parts))
        if len(notes) > len(planner_peers.absent()):
            notes.append(
                "(measured earlier on a shared 2-core machine where lightbinpack's fastest took "
                + " and ".join(f"{EARLIER[EARLIER_YARDSTICK][cap]} s" for cap in CAPS)
                + ")"
            )
        return notes


def at_most_mixing(value: float) -> Figure:
    return at_most("mixing ratio", value, 1.15)


def shown_mixing(value: float) -> Figure:
    return shown("mixing ratio", value)


def _bound(peer: Peer, given: Any, cap: int) -> Callable[[], Any]:
    return lambda: peer.run(given, cap)


def _packer_figures(race: _Race, cap: int) -> list[Figure]:
    figures = []
    for method, speedup in MIN_SPEEDUP.items():
        label = f"{method}, {cap}"
        if race.peer is None:
            figures.append(not_run(f"{label}: speed against a peer", "no peer"))
            continue
        peer = race.peer
        figures += [
            shown(f"{label}: time", race.seconds[method] * 1e3, ".1f ms"),
            at_least(
                f"{label}: speed against {peer.split()[-1]}",
                race.seconds[peer] / race.seconds[method],
                speedup,
                ".2f x",
            ),
            at_most(
                f"{label}: packs over the peer's",
                race.num_packs[method] / race.num_packs[peer],
                MAX_PACKS if method == "best_fit" else 1.0,
                ".5f",
            ),
        ]
    return figures


def _time_figures(race: _Race, name: str, *, bar: bool) -> list[Figure]:
    seconds = race.seconds[name]
    figures = [shown("time", seconds * 1e3, ".1f ms")]
    if race.peer is None:
        return [*figures, not_run("time over the peer's bare packing", "no peer")]
    label = f"time over {race.peer}"
    value = seconds / race.seconds[race.peer]
    return [*figures, at_most(label, value, 0.5, ".3f") if bar else shown(label, value, ".3f")]


def _quality_figures(metrics: dict[str, float], max_cr: float | None) -> list[Figure]:
    """The bars of a plan's quality; max_cr: of the bound, None for no bars at all."""
    floor = metrics["padding_ratio_bound"]
    cr_bound = metrics["communication_ratio_bound"]
    found = [
        ("padding ratio", metrics["padding_ratio"], floor + 0.0003, ".5f", floor),
        ("distribution balance ratio", metrics["distribution_balance_ratio"], 0.001, ".5f", 0.0),
        ("attention balance ratio", metrics["attention_balance_ratio"], 0.002, ".5f", 0.0),
        ("communication ratio", metrics["communication_ratio"], 0.0, ".4f", cr_bound),
    ]
    figures = []
    for name, value, limit, form, bound in found:
        if max_cr is None:
            figures.append(shown(name, value, form, bound))
        elif name == "communication ratio":
            figures.append(at_most(name, value, max_cr * cr_bound, form, bound))
        else:
            figures.append(at_most(name, value, limit, form, bound))
    return figures
