"""Differences between policies by seed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from experiments.paired import difference


def test_the_bounds_are_those_of_a_paired_t_test():
    rng = np.random.default_rng(0)
    own, other = rng.normal(1, 1, 6), rng.normal(0, 1, 6)
    found = difference(own.tolist(), other.tolist())
    assert found.mean == pytest.approx(np.mean(own - other))
    # At the bound, a one-sided test has exactly the odds of 5 %.
    for bound, alternative in ((found.low, "greater"), (found.high, "less")):
        assert stats.ttest_rel(own, other + bound, alternative=alternative).pvalue == pytest.approx(0.05)


def test_one_seed_bounds_nothing():
    assert difference([1.0], [0.5]) == (0.5, -math.inf, math.inf)


def test_seeds_that_agree_leave_no_doubt():
    assert difference([2.0, 3.0], [1.0, 2.0]) == (1.0, 1.0, 1.0)
