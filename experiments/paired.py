"""Differences between two policies, seed by seed: they start alike and see the same examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


class Difference(NamedTuple):
    """How one policy differs from another.

    Attributes:
      mean: of the differences by seed.
      low, high: one-sided bounds of their mean, at 95 % each (Student's t); infinite with one seed.
    """

    mean: float
    low: float
    high: float


def difference(own: Sequence[float], other: Sequence[float]) -> Difference:
    """`own - other`, both by seed in the same order."""
    gaps = np.subtract(own, other)
    mean = float(gaps.mean())
    if len(gaps) < 2:
        return Difference(mean, -math.inf, math.inf)
    error = float(stats.t.ppf(CONFIDENCE, len(gaps) - 1) * gaps.std(ddof=1) / math.sqrt(len(gaps)))
    return Difference(mean, mean - error, mean + error)
