import numpy as np
import pytest
from scipy import stats

from fedld.analysis.statistics import holm, paired_difference
from fedld.errors import FedLDError


@pytest.mark.parametrize("n", [2, 5, 20])
def test_agrees_with_scipy(n):
    a, b = np.random.default_rng(n).normal(size=(2, n))
    expected = stats.ttest_rel(a, b)
    got = paired_difference(a, b)
    assert got.mean == pytest.approx((a - b).mean(), rel=1e-12)
    assert got.p_value == pytest.approx(expected.pvalue, rel=1e-10)
    assert got.interval == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-10)


def test_one_pair_has_no_interval():
    got = paired_difference([0.9], [0.8])
    assert got.mean == pytest.approx(0.1)
    assert (got.sd, got.interval, got.p_value) == (None, None, None)


def test_no_spread():
    same = paired_difference([1.0, 2.0], [1.0, 2.0])
    assert (same.p_value, same.interval) == (1.0, (0.0, 0.0))
    assert paired_difference([2.0, 3.0], [1.0, 2.0]).p_value == 0.0


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([np.nan], [1.0])])
def test_bad_pairs(a, b):
    with pytest.raises(FedLDError, match="paired values"):
        paired_difference(a, b)


def test_holm():
    assert holm([0.04, None, 0.01, 0.03]) == pytest.approx([0.06, None, 0.03, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
