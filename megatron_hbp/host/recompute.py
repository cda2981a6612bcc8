"""Activation recompute per level.

The host reads `recompute_granularity`, `recompute_method` and `recompute_num_layers` at every
forward; selective modules are fixed when layers are built. So a level may switch full recompute on
for its own micro-batches; a level without a recompute setting leaves the user's own flags alone.
"""

from dataclasses import dataclass
from typing import Any

from megatron_hbp.level import Level


@dataclass(frozen=True)
class _Setting:
    granularity: str | None
    method: str | None
    num_layers: int | None


class LevelRecompute:
    """Applies a level's recompute to the model config before each forward."""

    def __init__(self, config: Any, levels: tuple[Level, ...], num_chunks: int) -> None:
        """num_chunks: pipeline stages x virtual stages; method `block` counts per chunk."""
        own = _Setting(
            config.recompute_granularity, config.recompute_method, config.recompute_num_layers
        )
        self._settings = [_setting(level, num_chunks, own) for level in levels]

    def apply(self, config: Any, level: int) -> None:
        setting = self._settings[level]
        config.recompute_granularity = setting.granularity
        config.recompute_method = setting.method
        config.recompute_num_layers = setting.num_layers


def _setting(level: Level, num_chunks: int, own: _Setting) -> _Setting:
    if level.recompute_layers == 0:
        return own
    if level.recompute_layers == "full":
        return _Setting("full", "uniform", 1)
    return _Setting("full", "block", -(-level.recompute_layers // num_chunks))
