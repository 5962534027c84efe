"""Whether training is healthy enough for low-bit routes: one small state machine per region.

    WARMUP     -- warmup_steps finite steps -->      ADMITTED
    ADMITTED   -- trip -->                           FALLBACK
    FALLBACK   -- cooldown healthy steps -->         PROBATION
    PROBATION  -- probation_steps healthy steps -->  ADMITTED
    PROBATION  -- trip -->                           FALLBACK, for twice as long as the last time
    any        -- more than max_trips trips -->      LOCKED, for good

- Non-finite values and loss spikes are everybody's business: every region sees them. Norm jumps and
  low agreement stay in their region. A residual that is too large refuses one lane for a while.
- A trip takes `patience_steps` unhealthy steps in a row; one where a value is not finite, and one
  step in PROBATION. Nothing trips in WARMUP, which travels in FP32 anyway.
- FALLBACK counts healthy steps only; an unhealthy one leaves the count where it is. Unhealthy steps
  in a row, as many as the first cooldown, are one more trip: an endless overflow ends in LOCKED.
- Baselines learn from finite steps only, and slowly, from the limit instead of the value, where a
  value exceeds its limit: one spike moves them little, a new level is learnt in some tens of steps.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nf_jax.profile import HealthLimits
from nf_jax.telemetry import Array, Signals

MIN_BASELINE_STEPS = 10  # with fewer samples a mean deviation says nothing: no spike, no jump
MAX_COOLDOWN_STEPS = 2**20
_MAX_COUNT = 2**30  # counters saturate here
_MAX_VALUE = 1e30  # sums and products of a few such values stay finite in f32
# A loss that hardly moves has next to no deviation; without a floor any flicker would be a spike.
_DEVIATION_FLOOR_RATIO = 0.01
_DEVIATION_FLOOR = 1e-6


class Health(enum.IntEnum):
    """The state of one region."""

    WARMUP = 0
    ADMITTED = 1
    FALLBACK = 2
    PROBATION = 3
    LOCKED = 4


class Trigger(enum.IntEnum):
    """What made a step unhealthy; the most severe one is recorded (the first of these)."""

    NONE = 0
    NONFINITE = 1
    LOSS_SPIKE = 2
    NORM_JUMP = 3
    LOW_AGREEMENT = 4
    RESIDUAL = 5


STATES: dict[Health, str] = {
    Health.WARMUP: "warming up in FP32 while baselines are learnt",
    Health.ADMITTED: "healthy: low-bit routes are allowed",
    Health.FALLBACK: "in FP32 until enough healthy steps have passed",
    Health.PROBATION: "low-bit again, and back to FP32 at the first unhealthy step",
    Health.LOCKED: "in FP32 for good after too many trips",
}
TRIGGERS: dict[Trigger, str] = {
    Trigger.NONE: "nothing so far",
    Trigger.NONFINITE: "a loss or gradient was not finite",
    Trigger.LOSS_SPIKE: "the loss rose far above its running mean",
    Trigger.NORM_JUMP: "the gradient norm rose far above its running mean",
    Trigger.LOW_AGREEMENT: "the workers' signs hardly agreed",
    Trigger.RESIDUAL: "a lane's residual grew too large for its gradient (that lane only)",
}


class HealthState(NamedTuple):
    """Carried from step to step; R regions, L lanes; every field is the same on all workers.

    Attributes:
      state: int32[R], `Health`.
      trigger: int32[R], the last `Trigger` seen (it stays until another one).
      trips: int32[R], times the region fell back; never decreases.
      streak: int32[R], unhealthy steps in a row, counted anew after a trip.
      wait: int32[R], steps left in FALLBACK or PROBATION, else 0.
      cooldown: int32[R], steps that the next FALLBACK lasts.
      loss_mean: f32[], running mean of the loss.
      loss_deviation: f32[], running mean of the loss's absolute deviation.
      norm_mean: f32[R], running mean of the gradient norm; 0 until a gradient is not zero.
      num_steps: int32[], finite steps seen.
      num_losses: int32[], finite steps that came with a loss.
      lane_wait: int32[L], steps for which the lane is still refused.
    """

    state: Array
    trigger: Array
    trips: Array
    streak: Array
    wait: Array
    cooldown: Array
    loss_mean: Array
    loss_deviation: Array
    norm_mean: Array
    num_steps: Array
    num_losses: Array
    lane_wait: Array


def init(limits: HealthLimits, num_regions: int, num_lanes: int) -> HealthState:
    """The state before the first step: WARMUP, or ADMITTED where there is nothing to warm up.

    Args:
      limits: the profile's limits.
      num_regions: R.
      num_lanes: L.

    Returns:
      A `HealthState`.
    """
    warm = limits.enabled and limits.warmup_steps > 0
    regions, zero = jnp.zeros([num_regions], jnp.int32), jnp.zeros([], jnp.int32)
    cooldown = min(max(limits.cooldown_steps, 1), MAX_COOLDOWN_STEPS)
    return HealthState(
        state=jnp.full_like(regions, np.int32(Health.WARMUP if warm else Health.ADMITTED)),
        trigger=regions,
        trips=regions,
        streak=regions,
        wait=regions,
        cooldown=jnp.full_like(regions, np.int32(cooldown)),
        loss_mean=jnp.zeros([], jnp.float32),
        loss_deviation=jnp.zeros([], jnp.float32),
        norm_mean=jnp.zeros([num_regions], jnp.float32),
        num_steps=zero,
        num_losses=zero,
        lane_wait=jnp.zeros([num_lanes], jnp.int32),
    )


def step(
    limits: HealthLimits, lane_regions: tuple[int, ...], state: HealthState, signals: Signals
) -> HealthState:
    """One transition: what this step's signals say about the next step's routes.

    Args:
      limits: the profile's limits (static).
      lane_regions: the region of each lane, length L (static).
      state: the state before the step.
      signals: what the step measured; any value is allowed, NaN and infinities too.

    Returns:
      The state after the step.
    """
    state, signals = jax.tree.map(jnp.asarray, (state, signals))
    finite = _is_finite(signals)
    large = ~(signals.residual_ratio <= _f32(limits.max_residual_ratio)) & finite
    spike, jump = _outliers(limits, state, signals)

    # The most severe trigger of this step wins, so it comes last.
    lanes_of = np.arange(state.state.shape[0])[:, None] == np.asarray(lane_regions, np.int64)
    trigger = jnp.where(jnp.any(large & lanes_of, 1), _i32(Trigger.RESIDUAL), _i32(Trigger.NONE))
    if limits.min_agreement > 0:
        low = _agrees_little(limits, lanes_of, signals.agreement)
        trigger = jnp.where(low, _i32(Trigger.LOW_AGREEMENT), trigger)
    trigger = jnp.where(jump, _i32(Trigger.NORM_JUMP), trigger)
    trigger = jnp.where(spike, _i32(Trigger.LOSS_SPIKE), trigger)
    trigger = jnp.where(finite, trigger, _i32(Trigger.NONFINITE))

    last = jnp.where(trigger > _i32(Trigger.NONE), trigger, state.trigger)
    state = state._replace(trigger=last, **_learn(limits, state, signals, finite, spike, jump))
    if not limits.enabled:
        return state
    lane_wait = jnp.where(large, _i32(limits.lane_hold_steps), _count_down(state.lane_wait))
    return _move(limits, state._replace(lane_wait=lane_wait), trigger)


def admitted(state: HealthState) -> Array:
    """bool[R]: whether the region may travel low-bit in the next step."""
    return (state.state == _i32(Health.ADMITTED)) | (state.state == _i32(Health.PROBATION))


def _f32(value: float) -> np.ndarray:
    return np.asarray(min(value, _MAX_VALUE), np.float32)


def _i32(value: int) -> np.ndarray:
    return np.asarray(min(value, _MAX_COUNT), np.int32)


def _count_up(count: Array) -> Array:
    return jnp.minimum(count, _i32(_MAX_COUNT - 1)) + _i32(1)


def _count_down(count: Array) -> Array:
    return jnp.maximum(count - _i32(1), _i32(0))


def _is_finite(signals: Signals) -> Array:
    gradients = jnp.all((signals.nonfinite == _i32(0)) & jnp.isfinite(signals.gradient_norm))
    return gradients & (jnp.isfinite(signals.loss) | ~signals.has_loss)


def _loss_reach(limits: HealthLimits, state: HealthState) -> Array:
    """How far from its mean the loss may go before it counts as a spike."""
    floor = jnp.maximum(jnp.abs(state.loss_mean) * _f32(_DEVIATION_FLOOR_RATIO), _f32(_DEVIATION_FLOOR))
    return jnp.maximum(state.loss_deviation, floor) * _f32(limits.loss_spike_deviations)


def _outliers(limits: HealthLimits, state: HealthState, signals: Signals) -> tuple[Array, Array]:
    """(bool[], bool[R]): whether the loss spikes, and where the gradient norm jumps."""
    spike = signals.loss > state.loss_mean + _loss_reach(limits, state)
    spike &= (state.num_losses >= _i32(MIN_BASELINE_STEPS)) & signals.has_loss
    jump = signals.gradient_norm > state.norm_mean * _f32(limits.norm_jump_ratio)
    jump &= (state.num_steps >= _i32(MIN_BASELINE_STEPS)) & (state.norm_mean > _f32(0))
    return spike, jump


def _agrees_little(limits: HealthLimits, lanes_of: np.ndarray, agreement: Array) -> Array:
    """bool[R]: whether the region's lanes that voted agree less than they must, on average."""
    voted = lanes_of & (agreement >= _f32(0))
    total = jnp.sum(jnp.where(voted, agreement, _f32(0)), 1)
    return total < jnp.sum(voted, 1, dtype=jnp.float32) * _f32(limits.min_agreement)


def _learn(
    limits: HealthLimits,
    state: HealthState,
    signals: Signals,
    finite: Array,
    spike: Array,
    jump: Array,
) -> dict[str, Array]:
    """The baselines after this step: a plain average at first, then an EMA; slow for outliers."""
    heard = finite & signals.has_loss
    num_steps, num_losses = _count_up(state.num_steps), _count_up(state.num_losses)
    horizon = _i32(max(limits.smoothing_steps, 1))

    reach = _loss_reach(limits, state)
    shift = jnp.clip(signals.loss, -_f32(_MAX_VALUE), _f32(_MAX_VALUE)) - state.loss_mean
    first = state.num_losses == _i32(0)
    shift = jnp.where(first, shift, jnp.clip(shift, -reach, reach))
    spread = jnp.where(first, _f32(0), jnp.abs(shift)) - state.loss_deviation
    count = jnp.where(spike, horizon, jnp.minimum(num_losses, horizon)).astype(jnp.float32)

    unseen = state.norm_mean <= _f32(0)  # frozen or zero-initialised: adopt the first norm
    limit = jnp.where(unseen, _f32(_MAX_VALUE), state.norm_mean * _f32(limits.norm_jump_ratio))
    norm = jnp.clip(signals.gradient_norm, _f32(0), jnp.minimum(limit, _f32(_MAX_VALUE)))
    norm_count = jnp.where(jump, horizon, jnp.minimum(num_steps, horizon)).astype(jnp.float32)
    norm_count = jnp.where(unseen, _f32(1), norm_count)
    norm_mean = state.norm_mean + (norm - state.norm_mean) / norm_count
    return dict(
        loss_mean=jnp.where(heard, state.loss_mean + shift / count, state.loss_mean),
        loss_deviation=jnp.where(heard, state.loss_deviation + spread / count, state.loss_deviation),
        norm_mean=jnp.where(finite, norm_mean, state.norm_mean),
        num_steps=jnp.where(finite, num_steps, state.num_steps),
        num_losses=jnp.where(heard, num_losses, state.num_losses),
    )


def _move(limits: HealthLimits, state: HealthState, trigger: Array) -> HealthState:
    """Counts, trips and the new state of each region; `trigger` is this step's."""
    warmup, on, fallback, probation, locked = (state.state == _i32(health) for health in Health)
    unhealthy = (trigger > _i32(Trigger.NONE)) & (trigger < _i32(Trigger.RESIDUAL))
    streak = jnp.where(unhealthy & ~warmup & ~locked, _count_up(state.streak), _i32(0))
    first_cooldown = max(limits.cooldown_steps, limits.patience_steps, 1)
    patience = jnp.where(fallback, _i32(first_cooldown), _i32(max(limits.patience_steps, 1)))
    at_once = (on & (trigger == _i32(Trigger.NONFINITE))) | (probation & unhealthy)
    trip = at_once | (streak >= patience)

    trips = state.trips + trip.astype(jnp.int32)
    lock = locked | (trips > _i32(limits.max_trips))
    waiting = (fallback | probation) & ~unhealthy
    wait = jnp.where(waiting, _count_down(state.wait), state.wait)
    served = waiting & (wait == _i32(0))
    probe = served & fallback & (limits.probation_steps > 0)
    begin = (served & ~probe) | (warmup & (state.num_steps >= _i32(limits.warmup_steps)))

    def pick(on_lock: int, on_trip: Any, on_begin: int, on_probe: int, old: Array) -> Array:
        value = jnp.where(probe, _i32(on_probe), jnp.where(begin, _i32(on_begin), old))
        return jnp.where(lock, _i32(on_lock), jnp.where(trip, on_trip, value))

    fall_back, probing = _i32(Health.FALLBACK), Health.PROBATION
    return state._replace(
        state=pick(Health.LOCKED, fall_back, Health.ADMITTED, probing, state.state),
        trips=trips,
        streak=jnp.where(trip | begin, _i32(0), streak),
        wait=pick(0, state.cooldown, 0, limits.probation_steps, wait),
        cooldown=jnp.where(
            trip, jnp.minimum(state.cooldown * _i32(2), _i32(MAX_COOLDOWN_STEPS)), state.cooldown
        ),
    )
