"""The layers that the cost model takes to be recomputed are those that the host recomputes."""

from argparse import Namespace

import pytest

from megatron_hbp.host.recompute import LevelRecompute
from megatron_hbp.level import Level
from megatron_hbp.models import MODELS
from megatron_hbp.run_layout import RunLayout, stages_of


@pytest.mark.parametrize(
    "layout",
    [
        RunLayout(num_ranks=1),
        RunLayout(num_ranks=1, num_stages=8),
        RunLayout(num_ranks=1, num_stages=8, chunk_layers=(6, 8, 8, 8, 8, 8, 10, 4)),
        RunLayout(num_ranks=1, num_stages=4, num_virtual_stages=2, num_microbatches=4),
        RunLayout(
            num_ranks=1,
            num_stages=2,
            num_virtual_stages=2,
            num_microbatches=2,
            chunk_layers=(14, 17, 16, 13),
        ),
    ],
)
@pytest.mark.parametrize("layers", [1, 7, 8, 20, 31, 59, 60, "full"])
def test_layers_of_each_stage(layout, layers):
    """Method `block` recomputes the first layers of a chunk, `uniform` with 1 all of them."""
    config = Namespace(recompute_granularity=None, recompute_method=None, recompute_num_layers=None)
    LevelRecompute(config, (Level(64, 1, layers),), layout.num_chunks).apply(config, 0)
    assert config.recompute_granularity == "full"
    for stage in stages_of(MODELS["deepseek-v2"], layout):
        again = sum(
            chunk
            if config.recompute_method == "uniform"
            else min(chunk, config.recompute_num_layers)
            for chunk in stage.chunk_layers
        )
        assert stage.recomputed(layers, layout.num_chunks) == again
