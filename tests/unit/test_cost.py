"""What a pack costs a rank, by hand."""

import numpy as np
import pytest

from megatron_hbp.cost import DENSE_8B_H100, PackCost


def test_per_rank_by_hand():
    cost = PackCost(fixed=5, linear=2, quadratic=0.5, communication=3)
    counts, tokens, squares = np.array([2, 2]), np.array([30, 30]), np.array([500, 500])
    # 2 x 5 + 30 x 2 + 500 / 2 = 320, with CP 4 also 3 x 30
    assert cost.work(counts, tokens, squares).tolist() == [320, 320]
    found = cost.per_rank(counts, tokens, squares, np.array([1, 4]))
    assert found.tolist() == [320, (320 + 90) / 4]


def test_dense_8b_seconds():
    # 131072 tokens on 8 ranks: 15.73 s of products and 39.51 s of attention, 0.39 s sent
    found = DENSE_8B_H100.per_rank(*np.array([[1], [131072], [131072**2], [8]]))
    assert found[0] == pytest.approx((15.7286 + 39.5137 + 0.3932) / 8, rel=1e-4)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("term", ["fixed", "linear", "quadratic", "communication"])
def test_a_term_must_be_finite_and_not_negative(term, value):
    with pytest.raises(ValueError, match="every term must be a finite number of 0 or more"):
        PackCost(**({"linear": 1.0} | {term: value}))


def test_a_cost_of_nothing_is_refused():
    with pytest.raises(ValueError, match="fixed, linear or quadratic must be above 0"):
        PackCost(communication=1.0)
