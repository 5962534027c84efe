"""Health limits from data: from the distribution of each signal in runs that went well, not by hand.

A limit is a quantile of what `health.step` would have compared with it, times a margin, rounded away from
the data to two digits. FP32 runs say how far losses and norms stray when nothing is wrong; residuals and
agreement only exist in low-bit runs, so runs of the profile itself say what is usual for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nf_jax import health, running_means
from nf_jax.columns import Columns
from nf_jax.profile import HealthLimits
from nf_jax.running_means import Distances

_DIGITS = 2
_UNLIMITED = 1e30
MIN_VALUES = 50


class Rule(NamedTuple):
    """How a limit follows from a signal.

    Attributes:
      quantile: of the signal's values over steps, regions or lanes, and runs; an observed one.
      margin: what it is multiplied with.
      least: the limit is at least this, so that a signal that hardly moves makes no hair trigger.
    """

    quantile: float
    margin: float
    least: float


EXACT_RULES = {
    "loss_spike_deviations": Rule(0.999, 2.0, 4.0),
    "norm_jump_ratio": Rule(0.999, 2.0, 2.0),
}
"""Limits that FP32 runs decide."""

LOSSY_RULES = {
    "max_residual_ratio": Rule(0.999, 2.0, 1.0),
    "min_agreement": Rule(0.001, 0.5, 0.0),
}
"""Limits that runs of the low-bit profile decide."""


class Limit(NamedTuple):
    """A limit and what it comes from.

    Attributes:
      value: the limit.
      at_quantile: the signal at the rule's quantile.
      most: the value nearest to the limit: the largest, or the smallest agreement.
      num_values: how many there were.
    """

    value: float
    at_quantile: float
    most: float
    num_values: int


def measure(columns: Columns, limits: HealthLimits) -> Distances:
    """How far every step of a trace lay from its baselines, by the recursions that run in training.

    Args:
      columns: a trace, from its first step on.
      limits: say over how many steps baselines are smoothed; nothing counts as an outlier here.

    Returns:
      `Distances` (NumPy) with a leading dimension n.
    """
    free = {"loss_spike_deviations": _UNLIMITED, "norm_jump_ratio": _UNLIMITED, "enabled": False}
    limits = HealthLimits(**{"smoothing_steps": limits.smoothing_steps, **free})
    return jax.device_get(_scan(limits, columns.lanes.regions, columns.signals))


def find_limits(
    traces: Iterable[Columns], limits: HealthLimits, rules: Mapping[str, Rule]
) -> dict[str, Limit]:
    """A limit for each rule, from all traces together.

    Args:
      traces: of runs that went well.
      limits: as for `measure`.
      rules: `EXACT_RULES` or `LOSSY_RULES`.

    Returns:
      Name of the limit -> `Limit`; without those of which there are fewer than `MIN_VALUES` values. A
      `min_agreement` that votes by chance would exceed is 0: it could never trip.
    """
    traces = list(traces)
    measured = [measure(columns, limits) for columns in traces]
    found = {}
    for name, rule in rules.items():
        values = np.concatenate([np.ravel(getattr(own, name)) for own in measured] or [np.zeros(0)])
        values = values[np.isfinite(values)]
        if len(values) >= MIN_VALUES:
            found[name] = make_limit(name, rule, values)
    if "min_agreement" in found and found["min_agreement"].value <= _chance_agreement(traces):
        found["min_agreement"] = found["min_agreement"]._replace(value=0.0)
    return found


def make_limit(name: str, rule: Rule, values: Sequence[float] | np.ndarray) -> Limit:
    """The limit that a rule makes of a signal's values."""
    is_upper = rule.quantile > 0.5
    at = float(np.quantile(values, rule.quantile, method="higher" if is_upper else "lower"))
    value = _round(max(at * rule.margin, rule.least), is_upper)
    most = float(np.max(values) if is_upper else np.min(values))
    HealthLimits.model_validate({name: value})  # says so where a signal is beyond all limits
    return Limit(value, at, most, len(values))


def _round(value: float, up: bool) -> float:
    if value == 0:
        return 0.0
    digits = _DIGITS - 1 - math.floor(math.log10(abs(value)))
    scaled = round(value * 10.0**digits, 9)
    return round((math.ceil(scaled) if up else math.floor(scaled)) / 10.0**digits, max(digits, 0))


def _chance_agreement(traces: Sequence[Columns]) -> float:
    """Mean |votes| per element of W fair coins."""
    workers: Any = traces[0].header.get("num_workers", 1)
    count = int(workers[0] if isinstance(workers, list) else workers)
    if count > 1000:
        return math.sqrt(2 / (math.pi * count))
    return sum(math.comb(count, k) * abs(2 * k - count) for k in range(count + 1)) / 2**count / count


@functools.partial(jax.jit, static_argnames=("limits", "lane_regions"))
def _scan(limits: HealthLimits, lane_regions: tuple[int, ...], signals: Any) -> Distances:
    def one_step(state: Any, measured: Any) -> tuple[Any, Distances]:
        found = running_means.distances(lane_regions, state, measured)
        return health.step(limits, lane_regions, state, measured), found

    num_regions, num_lanes = signals.gradient_norm.shape[1], len(lane_regions)
    first = health.init(limits, num_regions, num_lanes)
    return jax.lax.scan(one_step, first, jax.tree.map(jnp.asarray, signals))[1]
