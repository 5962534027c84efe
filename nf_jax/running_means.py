"""Running means of loss and gradient norms, and how far a step lies from them.

- A mean is a plain average at first, then an exponential one.
- Baselines learn from finite steps only, and slowly, from the limit instead of the value, where a
  value exceeds its limit: one spike moves them little, a new level is learnt in some tens of steps.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from nf_jax.profile import HealthLimits
from nf_jax.telemetry import Array, Signals

MIN_BASELINE_STEPS = 10  # with fewer samples a mean deviation says nothing: no spike, no jump
MAX_COUNT = 2**30  # counters saturate here
_MAX_VALUE = 1e30  # sums and products of a few such values stay finite in f32
# A loss that hardly moves has next to no deviation; without a floor any flicker would be a spike.
_DEVIATION_FLOOR_RATIO = 0.01
_DEVIATION_FLOOR = 1e-6


class Baselines(Protocol):
    """What is read of a `HealthState`; its fields are described there."""

    @property
    def loss_mean(self) -> Array: ...
    @property
    def loss_deviation(self) -> Array: ...
    @property
    def norm_mean(self) -> Array: ...
    @property
    def num_steps(self) -> Array: ...
    @property
    def num_losses(self) -> Array: ...


class Distances(NamedTuple):
    """How far one step's signals lie from their baselines; R regions, L lanes.

    Each field is what the limit of the same name is compared with, NaN where nothing is: in a step that is
    not finite, while a baseline is too young, where no lane voted or keeps a residual.

    Attributes:
      loss_spike_deviations: f32[], loss above its running mean, in mean absolute deviations.
      norm_jump_ratio: f32[R], gradient norm over its running mean.
      min_agreement: f32[R], mean agreement of the region's lanes that voted.
      max_residual_ratio: f32[L], as the signal says.
    """

    loss_spike_deviations: Array
    norm_jump_ratio: Array
    min_agreement: Array
    max_residual_ratio: Array


def distances(lane_regions: tuple[int, ...], state: Baselines, signals: Signals) -> Distances:
    """What `health.step` would compare with the limits; `thresholds.py` makes limits of their distribution.

    Args:
      lane_regions: the region of each lane, length L (static).
      state: the state before the step.
      signals: what the step measured.
    """
    state, signals = jax.tree.map(jnp.asarray, (state, signals))
    finite, missing = is_finite(signals), jnp.float32(jnp.nan)
    has_losses, has_norms = _has_baselines(state, signals)
    members = lanes_of(state.norm_mean.shape[0], lane_regions)
    total, voted = _sum_agreement(members, signals.agreement)
    keeps = signals.residual_ratio > f32(0)
    return Distances(
        jnp.where(finite & has_losses, (signals.loss - state.loss_mean) / _deviation(state), missing),
        jnp.where(finite & has_norms, signals.gradient_norm / state.norm_mean, missing),
        jnp.where(finite & (voted > f32(0)), total / voted, missing),
        jnp.where(finite & keeps, signals.residual_ratio, missing),
    )


def f32(value: float) -> np.ndarray:
    return np.asarray(min(value, _MAX_VALUE), np.float32)


def i32(value: int) -> np.ndarray:
    return np.asarray(min(value, MAX_COUNT), np.int32)


def count_up(count: Array) -> Array:
    return jnp.minimum(count, i32(MAX_COUNT - 1)) + i32(1)


def is_finite(signals: Signals) -> Array:
    """bool[]: whether the loss, if there is one, and all gradients are."""
    gradients = jnp.all((signals.nonfinite == i32(0)) & jnp.isfinite(signals.gradient_norm))
    return gradients & (jnp.isfinite(signals.loss) | ~signals.has_loss)


def lanes_of(num_regions: int, lane_regions: tuple[int, ...]) -> np.ndarray:
    """bool[R, L]: which lanes are the region's."""
    return np.arange(num_regions)[:, None] == np.asarray(lane_regions, np.int64)


def _deviation(state: Baselines) -> Array:
    floor = jnp.maximum(jnp.abs(state.loss_mean) * f32(_DEVIATION_FLOOR_RATIO), f32(_DEVIATION_FLOOR))
    return jnp.maximum(state.loss_deviation, floor)


def _loss_reach(limits: HealthLimits, state: Baselines) -> Array:
    """How far from its mean the loss may go before it counts as a spike."""
    return _deviation(state) * f32(limits.loss_spike_deviations)


def _has_baselines(state: Baselines, signals: Signals) -> tuple[Array, Array]:
    """(bool[], bool[R]): whether there are enough samples to compare the loss, and norms, with."""
    has_losses = (state.num_losses >= i32(MIN_BASELINE_STEPS)) & signals.has_loss
    return has_losses, (state.num_steps >= i32(MIN_BASELINE_STEPS)) & (state.norm_mean > f32(0))


def outliers(limits: HealthLimits, state: Baselines, signals: Signals) -> tuple[Array, Array]:
    """(bool[], bool[R]): whether the loss spikes, and where the gradient norm jumps."""
    has_losses, has_norms = _has_baselines(state, signals)
    spike = signals.loss > state.loss_mean + _loss_reach(limits, state)
    jump = signals.gradient_norm > state.norm_mean * f32(limits.norm_jump_ratio)
    return spike & has_losses, jump & has_norms


def _sum_agreement(members: np.ndarray, agreement: Array) -> tuple[Array, Array]:
    """f32[R] each: the sum of agreement over the region's lanes that voted, and how many did."""
    voted = members & (agreement >= f32(0))
    total = jnp.sum(jnp.where(voted, agreement, f32(0)), 1)
    return total, jnp.sum(voted, 1, dtype=jnp.float32)


def agrees_little(limits: HealthLimits, members: np.ndarray, agreement: Array) -> Array:
    """bool[R]: whether the region's lanes that voted agree less than they must, on average."""
    total, voted = _sum_agreement(members, agreement)
    return total < voted * f32(limits.min_agreement)


def learn(
    limits: HealthLimits,
    state: Baselines,
    signals: Signals,
    finite: Array,
    spike: Array,
    jump: Array,
) -> dict[str, Array]:
    """The baselines after this step: a plain average at first, then an EMA; slow for outliers."""
    heard = finite & signals.has_loss
    num_steps, num_losses = count_up(state.num_steps), count_up(state.num_losses)
    horizon = i32(max(limits.smoothing_steps, 1))

    reach = _loss_reach(limits, state)
    shift = jnp.clip(signals.loss, -f32(_MAX_VALUE), f32(_MAX_VALUE)) - state.loss_mean
    first = state.num_losses == i32(0)
    shift = jnp.where(first, shift, jnp.clip(shift, -reach, reach))
    spread = jnp.where(first, f32(0), jnp.abs(shift)) - state.loss_deviation
    count = jnp.where(spike, horizon, jnp.minimum(num_losses, horizon)).astype(jnp.float32)

    unseen = state.norm_mean <= f32(0)  # frozen or zero-initialised: adopt the first norm
    limit = jnp.where(unseen, f32(_MAX_VALUE), state.norm_mean * f32(limits.norm_jump_ratio))
    norm = jnp.clip(signals.gradient_norm, f32(0), jnp.minimum(limit, f32(_MAX_VALUE)))
    norm_count = jnp.where(jump, horizon, jnp.minimum(num_steps, horizon)).astype(jnp.float32)
    norm_count = jnp.where(unseen, f32(1), norm_count)
    norm_mean = state.norm_mean + (norm - state.norm_mean) / norm_count
    return dict(
        loss_mean=jnp.where(heard, state.loss_mean + shift / count, state.loss_mean),
        loss_deviation=jnp.where(heard, state.loss_deviation + spread / count, state.loss_deviation),
        norm_mean=jnp.where(finite, norm_mean, state.norm_mean),
        num_steps=jnp.where(finite, num_steps, state.num_steps),
        num_losses=jnp.where(heard, num_losses, state.num_losses),
    )
