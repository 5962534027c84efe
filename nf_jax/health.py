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
  step in PROBATION.
- FALLBACK counts healthy steps only; an unhealthy one leaves the count where it is. Unhealthy steps
  in a row, as many as the first cooldown, are one more trip.
- WARMUP travels in FP32 anyway, so nothing falls back there. But steps that are not finite, as many in
  a row, are a trip there too: an endless overflow ends in LOCKED, whenever it starts.

What loss and norms are compared with, `running_means.py` learns.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nf_jax.profile import HealthLimits
from nf_jax.running_means import agrees_little, count_up, f32, i32, is_finite, lanes_of, learn, outliers
from nf_jax.telemetry import Array, Signals

MAX_COOLDOWN_STEPS = 2**20


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
    Health.LOCKED: (
        "in FP32 for good, after more trips than health.max_trips allows; "
        "once the cause is gone, a state from init starts anew"
    ),
}
TRIGGERS: dict[Trigger, str] = {
    Trigger.NONE: "nothing so far",
    Trigger.NONFINITE: "a loss or gradient was not finite, or too large to square",
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
      trips: int32[R], times the region fell back, or stayed unhealthy for as long as it would have been in
        FALLBACK the first time; never decreases.
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
    finite = is_finite(signals)
    large = ~(signals.residual_ratio <= f32(limits.max_residual_ratio)) & finite
    spike, jump = outliers(limits, state, signals)

    # The most severe trigger of this step wins, so it comes last.
    members = lanes_of(state.state.shape[0], lane_regions)
    trigger = jnp.where(jnp.any(large & members, 1), i32(Trigger.RESIDUAL), i32(Trigger.NONE))
    if limits.min_agreement > 0:
        low = agrees_little(limits, members, signals.agreement)
        trigger = jnp.where(low, i32(Trigger.LOW_AGREEMENT), trigger)
    trigger = jnp.where(jump, i32(Trigger.NORM_JUMP), trigger)
    trigger = jnp.where(spike, i32(Trigger.LOSS_SPIKE), trigger)
    trigger = jnp.where(finite, trigger, i32(Trigger.NONFINITE))

    last = jnp.where(trigger > i32(Trigger.NONE), trigger, state.trigger)
    state = state._replace(trigger=last, **learn(limits, state, signals, finite, spike, jump))
    if not limits.enabled:
        return state
    lane_wait = jnp.where(large, i32(limits.lane_hold_steps), _count_down(state.lane_wait))
    return _move(limits, state._replace(lane_wait=lane_wait), trigger)


def admitted(state: HealthState) -> Array:
    """bool[R]: whether the region may travel low-bit in the next step."""
    return (state.state == i32(Health.ADMITTED)) | (state.state == i32(Health.PROBATION))


def _count_down(count: Array) -> Array:
    return jnp.maximum(count - i32(1), i32(0))


def _move(limits: HealthLimits, state: HealthState, trigger: Array) -> HealthState:
    """Counts, trips and the new state of each region; `trigger` is this step's."""
    warmup, on, fallback, probation, locked = (state.state == i32(health) for health in Health)
    unhealthy = (trigger > i32(Trigger.NONE)) & (trigger < i32(Trigger.RESIDUAL))
    nonfinite = trigger == i32(Trigger.NONFINITE)
    counted = (unhealthy & ~warmup & ~locked) | (nonfinite & warmup)
    streak = jnp.where(counted, count_up(state.streak), i32(0))
    first_cooldown = max(limits.cooldown_steps, limits.patience_steps, 1)
    patience = jnp.where(fallback | warmup, i32(first_cooldown), i32(max(limits.patience_steps, 1)))
    trip = (on & nonfinite) | (probation & unhealthy) | (streak >= patience)
    falls = trip & ~warmup

    trips = state.trips + trip.astype(jnp.int32)
    lock = locked | (trips > i32(limits.max_trips))
    waiting = (fallback | probation) & ~unhealthy
    wait = jnp.where(waiting, _count_down(state.wait), state.wait)
    served = waiting & (wait == i32(0))
    probe = served & fallback & (limits.probation_steps > 0)
    begin = (served & ~probe) | (warmup & (state.num_steps >= i32(limits.warmup_steps)))

    def pick(on_lock: int, on_fall: Any, on_begin: int, on_probe: int, old: Array) -> Array:
        value = jnp.where(probe, i32(on_probe), jnp.where(begin, i32(on_begin), old))
        return jnp.where(lock, i32(on_lock), jnp.where(falls, on_fall, value))

    fall_back, probing = i32(Health.FALLBACK), Health.PROBATION
    return state._replace(
        state=pick(Health.LOCKED, fall_back, Health.ADMITTED, probing, state.state),
        trips=trips,
        streak=jnp.where(trip | begin, i32(0), streak),
        wait=pick(0, state.cooldown, 0, limits.probation_steps, wait),
        cooldown=jnp.where(
            falls, jnp.minimum(state.cooldown * i32(2), i32(MAX_COOLDOWN_STEPS)), state.cooldown
        ),
    )
