"""Sums over ranges of lengths, and the packs that they need."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hbp.histogram import LengthHistogram
from megatron_hbp.packing import pack

lengths = st.lists(st.integers(1, 3000), min_size=1, max_size=200)


@given(lengths, st.integers(0, 2000), st.integers(1, 3000))
@settings(deadline=None, max_examples=200)
def test_a_histogram_sums_and_never_needs_more_packs_than_there_are(values, above, capacity):
    lens = np.array(values, dtype=np.int64)
    histogram = LengthHistogram(lens)
    chosen = lens[(lens > above) & (lens <= capacity)]
    sums = histogram.between(above, capacity)
    assert (sums.sequences, sums.tokens) == (len(chosen), chosen.sum())
    assert sums.squares == (chosen * chosen).sum()
    needed = histogram.packs_needed(above, capacity)
    assert needed * capacity >= chosen.sum()
    assert needed >= (2 * chosen > capacity).sum()
    if len(chosen):
        assert needed <= len(pack(chosen, capacity, "best_fit_decreasing")[1]) - 1
        assert histogram.extremes(above, capacity) == (chosen.min(), chosen.max())
    else:
        assert needed == 0
