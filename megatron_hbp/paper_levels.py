"""Levels chosen as in the HBP paper (arXiv 2503.07680, Algorithms 1, 3 and 4), from a profile.

Guarantees (asserted by tests/unit/test_paper_levels.py):
- the paper's published times give the paper's levels, 16384:1 and 131072:8;
- the same profile gives the same levels, whatever the order of its points; ties go to the shorter
  pack, then to the smaller CP size;
- every decision is a line of the explanation.
It does not look at the lengths of a corpus: that is select.py.

Words of the paper: l is a pack length, sp the CP size, ckpt the layers whose activations are
recomputed. P(l) is the least time of a rank over the CP sizes measured for l, for equal tokens.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from megatron_hbp.hardware import find_device
from megatron_hbp.level import Level
from megatron_hbp.models import find_model
from megatron_hbp.profile import Point, Profile


@dataclass(frozen=True)
class PaperSelection:
    """levels: ascending. seconds: of each, a rank's time for equal_tokens tokens (forward and
    backward), None where it was not measured. explanation: a line per decision.
    """

    levels: tuple[Level, ...]
    seconds: tuple[float | None, ...]
    equal_tokens: int
    explanation: tuple[str, ...]

    @property
    def iso_token(self) -> bool:
        """Whether all levels put equally many tokens on a rank, so that one plan can hold them."""
        return len({level.tokens_per_rank for level in self.levels}) == 1


@dataclass(frozen=True)
class _Choice:
    """The best of a pack length: its level, and a rank's seconds for equal tokens."""

    level: Level
    seconds: float


def paper_levels(
    profile: Profile, *, num_layers: int | None = None, memory_bytes: int | None = None
) -> PaperSelection:
    """The groups l_1, l_best, l_2 and l_max of Algorithm 1.

    num_layers: of the model (None: of the model that the profile names; needed for `full`).
    memory_bytes: of a device (None: of the device that the profile names; needed where memory was
    measured). Raises ValueError when no point of the profile fits in memory.
    """
    search = _Search(profile, num_layers, memory_bytes)
    best_of = {}
    for pack_len in search.pack_lens():
        choice = search.find_best(pack_len)
        if choice is not None:
            best_of[pack_len] = choice
    if not best_of:
        raise ValueError(
            f"no level of the profile of {profile.model} on {profile.device} fits in memory; "
            "measure shorter packs, more recompute or larger CP sizes"
        )
    say = search.explanation.append
    l_best = min(best_of, key=lambda pack_len: (best_of[pack_len].seconds, pack_len))
    best = best_of[l_best]
    say(
        f"l_best = {l_best}: least time for {search.equal_tokens} tokens of a rank, "
        f"{best.seconds:.3f} s, at CP {best.level.cp_size}"
    )
    l_max = max(best_of)
    longest = best_of[l_max]
    say(f"l_max = {l_max}: the longest that fits, {longest.seconds:.3f} s")
    l_1, l_2 = best.level.tokens_per_rank, longest.level.tokens_per_rank
    say(f"l_1 = l_best / CP = {l_best} / {best.level.cp_size} = {l_1}, with CP 1")
    say(f"l_2 = l_max / CP = {l_max} / {longest.level.cp_size} = {l_2}, with CP 1")
    groups = {l_best: best.level, l_max: longest.level}
    if l_1 not in groups:
        groups[l_1] = search.on_one_rank(best.level)
    if l_2 < l_best:
        say(f"l_2 < l_best: merged into l_best ({l_2} < {l_best})")
    elif l_2 not in groups:
        groups[l_2] = search.on_one_rank(longest.level)
    levels = tuple(groups[pack_len] for pack_len in sorted(groups))
    seconds = tuple(search.seconds_at(level) for level in levels)
    return PaperSelection(levels, seconds, search.equal_tokens, tuple(search.explanation))


class _Search:
    """Algorithms 3 and 4 on the points of one profile."""

    def __init__(self, profile: Profile, num_layers: int | None, memory_bytes: int | None) -> None:
        self.explanation: list[str] = []
        self._num_layers = num_layers
        self._memory_bytes = memory_bytes
        self._profile = profile
        self._points: dict[tuple[int, int], dict[int, list[Point]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for point in profile.points:
            level = point.level
            self._points[level.pack_len, level.cp_size][self._layers(level)].append(point)
        self.equal_tokens = max(point.level.tokens_per_rank for point in profile.points)

    def pack_lens(self) -> list[int]:
        return sorted({pack_len for pack_len, _ in self._points})

    def find_best(self, pack_len: int) -> _Choice | None:
        """FindBestSpCkpt (Algorithm 4): the CP size and recompute with the least time."""
        choices = []
        for cp_size in sorted(cp for length, cp in self._points if length == pack_len):
            for layers in self._candidates(pack_len, cp_size):
                seconds = self._time(pack_len, cp_size, layers)
                if seconds is not None:
                    choices.append(_Choice(self._level(pack_len, cp_size, layers), seconds))
        if not choices:
            return None
        best = min(choices, key=lambda choice: (choice.seconds, choice.level.cp_size))
        others = ", ".join(f"{choice.level} {choice.seconds:.3f} s" for choice in choices)
        self.explanation.append(f"l = {pack_len}: {others}: {best.level} is fastest")
        return best

    def on_one_rank(self, level: Level) -> Level:
        """The level of CP 1 with as many tokens on a rank as `level`, at its best recompute."""
        budget = level.tokens_per_rank
        found = self.find_best_at(budget, 1)
        if found is not None:
            return found.level
        self.explanation.append(
            f"{budget}:1 was not measured: recompute as for {level}, which puts as many tokens on "
            "a rank"
        )
        return Level(budget, 1, level.recompute_layers)

    def find_best_at(self, pack_len: int, cp_size: int) -> _Choice | None:
        """The best recompute of one pack length and CP size, None when it was not measured."""
        if (pack_len, cp_size) not in self._points:
            return None
        choices = [
            _Choice(self._level(pack_len, cp_size, layers), seconds)
            for layers in self._candidates(pack_len, cp_size)
            if (seconds := self._time(pack_len, cp_size, layers)) is not None
        ]
        return min(choices, key=lambda choice: choice.seconds, default=None)

    def seconds_at(self, level: Level) -> float | None:
        if (level.pack_len, level.cp_size) not in self._points:
            return None
        return self._time(level.pack_len, level.cp_size, self._layers(level))

    def _candidates(self, pack_len: int, cp_size: int) -> list[int]:
        """GreedyProfileCkpt (Algorithm 3): the fewest recomputed layers that fit in memory.

        Where memory was not measured: what was timed, which therefore fitted.
        """
        by_layers = self._points[pack_len, cp_size]
        used = {
            layers: max(point.memory_bytes for point in points if point.memory_bytes is not None)
            for layers, points in by_layers.items()
            if any(point.memory_bytes is not None for point in points)
        }
        if not used:
            return sorted(by_layers)
        c_min, c_max = min(used), max(used)
        m1, m2 = self._memory() - used[c_min], self._memory() - used[c_max]
        name = f"{pack_len}:{cp_size}"
        if c_min == c_max:
            if m2 >= 0:
                return [c_max]
            self.explanation.append(f"{name} needs {-m2} bytes more than there are: left out")
            return []
        saved = (m2 - m1) / (c_max - c_min)
        if m1 >= 0:
            answer = c_min
        elif saved <= 0:
            answer = c_max + 1
        else:
            answer = max(c_min, math.ceil(c_max - m2 / saved))
        measured = f"{m1} bytes remain with {c_min} layers recomputed, {m2} with {c_max}"
        if answer > c_max:
            self.explanation.append(f"{name}: {measured}: does not fit, left out")
            return []
        self.explanation.append(f"{name}: {measured}: {answer} layers")
        return [answer]

    def _time(self, pack_len: int, cp_size: int, layers: int) -> float | None:
        """ProfileTime: a rank's seconds for equal_tokens; between measured recomputes linear."""
        times = {
            measured: sum(map(self._for_equal_tokens, points)) / len(points)
            for measured, points in self._points[pack_len, cp_size].items()
        }
        if layers in times:
            return times[layers]
        below = [measured for measured in times if measured < layers]
        above = [measured for measured in times if measured > layers]
        if not above:
            return None
        if not below:  # less is recomputed than was timed: an upper bound
            return times[min(above)]
        low, high = max(below), min(above)
        return times[low] + (times[high] - times[low]) * (layers - low) / (high - low)

    def _for_equal_tokens(self, point: Point) -> float:
        level = point.level
        tokens = level.pack_len if point.tokens is None else point.tokens
        return point.seconds * self.equal_tokens / (tokens / level.cp_size)

    def _memory(self) -> int:
        if self._memory_bytes is None:
            self._memory_bytes = find_device(self._profile.device).memory_bytes
        return self._memory_bytes

    def _layers(self, level: Level) -> int:
        if level.recompute_layers != "full":
            return level.recompute_layers
        if self._num_layers is None:
            self._num_layers = find_model(self._profile.model).num_layers
        return self._num_layers

    def _level(self, pack_len: int, cp_size: int, layers: int) -> Level:
        return Level(pack_len, cp_size, layers)
