"""The decision: operating profile x training health x reducer capacity -> a route per lane."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from nf_jax.capacity import CapacityState
from nf_jax.capacity import step as step_capacity
from nf_jax.health import Health, HealthState
from nf_jax.health import step as step_health
from nf_jax.profile import Profile, Route
from nf_jax.telemetry import Array, Lanes, Reason, Signals

_ADMIT = -1
_REASON_OF_HEALTH = np.asarray(
    [
        {
            Health.WARMUP: Reason.WARMUP,
            Health.FALLBACK: Reason.FALLBACK,
            Health.LOCKED: Reason.LOCKED,
        }.get(health, _ADMIT)
        for health in Health
    ],
    np.int32,
)


def choose_routes(
    profile: Profile, lanes: Lanes, step: Array, health: HealthState, capacity: CapacityState
) -> tuple[Array, Array]:
    """The route of every lane in one step, and why.

    Live training and replay both call this. It has no collective and reads only state that is the
    same on all workers, so that all of them take the same branch.

    Args:
      profile: the operating profile (static).
      lanes: the plan's lanes (static).
      step: int32[], the step about to run.
      health: the health state after the previous step.
      capacity: the capacity state after the previous step.

    Returns:
      (routes, reasons): int32[L] of `Route` and int32[L] of `Reason`. A lane that goes FP32 has the
      first reason that applies: fixed, the profile, the substrate, health, its residual, the load, its group.

    Raises:
      ValueError: lanes of one group have different routes in the profile.
    """
    starts, table = _route_table(profile, lanes)
    _check_groups(table, lanes)
    phase = jnp.sum(step >= starts[1:], dtype=jnp.int32)
    refusals = _static_refusals(table, lanes)
    planned, refusal = jnp.asarray(table)[phase], jnp.asarray(refusals)[phase]
    fp32 = np.asarray(Route.FP32, np.int32)
    if profile.fallback:
        refusal = _first(refusal, _refuse(lanes, health, capacity))
        refusal = _first(refusal, _refuse_groups(lanes, refusal))

    admit = refusal == np.int32(_ADMIT)
    routes = jnp.where(admit, planned, fp32)
    return routes, jnp.where(admit, np.int32(Reason.PROFILE), refusal)


def advance(
    profile: Profile,
    lanes: Lanes,
    next_step: Array,
    health: HealthState,
    capacity: CapacityState,
    signals: Signals,
) -> tuple[HealthState, CapacityState, Array, Array]:
    """The control plane's part of a step, in training and in replay alike.

    Args:
      profile: the operating profile (static).
      lanes: the plan's lanes (static).
      next_step: int32[], the step after this one.
      health: the health state before this step.
      capacity: the capacity state before it.
      signals: what it measured.

    Returns:
      `(health, capacity, routes, reasons)`: the states after it, and `choose_routes` of the next step.
    """
    health = step_health(profile.health, lanes.regions, health, signals)
    capacity = step_capacity(profile.capacity, capacity, signals.reducer_load)
    return health, capacity, *choose_routes(profile, lanes, next_step, health, capacity)


def _first(reasons: Array, others: Array) -> Array:
    return jnp.where(reasons == np.int32(_ADMIT), others, reasons)


def _route_table(profile: Profile, lanes: Lanes) -> tuple[np.ndarray, np.ndarray]:
    """int32[P] first steps and int32[P, L] routes."""
    starts = np.asarray([start for start, _ in profile.route_table], np.int32)
    table = np.asarray([routes for _, routes in profile.route_table], np.int32)
    return starts, table[:, np.asarray(lanes.regions, np.int64)]


def _static_refusals(table: np.ndarray, lanes: Lanes) -> np.ndarray:
    """int32[P, L], why a lane goes FP32 whatever training does, or -1: shape, profile, substrate."""
    fixed = np.asarray([_ADMIT if reason is None else reason for reason in lanes.fixed], np.int32)
    is_exact = table == Route.FP32
    by_profile = np.where(is_exact.all(0), Reason.PROTECTED, Reason.PROFILE)
    pays = np.asarray(lanes.pays or [[True] * len(Route)] * len(lanes.fixed), bool).reshape(-1, len(Route))
    by_speed = np.where(pays[np.arange(len(pays)), table], _ADMIT, Reason.SLOWER)
    refusals = np.where(fixed == _ADMIT, np.where(is_exact, by_profile, by_speed), fixed)
    return refusals.astype(np.int32)


def _check_groups(table: np.ndarray, lanes: Lanes) -> None:
    first: dict[int, int] = {}
    for lane, group in enumerate(lanes.groups):
        other = first.setdefault(group, lane)
        if group >= 0 and (table[:, lane] != table[:, other]).any():
            raise ValueError(
                f"group {group}: expected lanes that the profile routes alike, got "
                f"{lanes.names[other]!r} and {lanes.names[lane]!r}; put them in different groups"
            )


def _refuse(lanes: Lanes, health: HealthState, capacity: CapacityState) -> Array:
    """int32[L], why health or capacity refuses the lane, or -1."""
    load = jnp.where(capacity.saturated, np.int32(Reason.LOAD), np.int32(_ADMIT))
    own = jnp.where(health.lane_wait > np.int32(0), np.int32(Reason.RESIDUAL), load)
    region = jnp.asarray(_REASON_OF_HEALTH)[health.state]
    return _first(region[np.asarray(lanes.regions, np.int32)], own)


def _refuse_groups(lanes: Lanes, refusal: Array) -> Array:
    """int32[L], GROUP where a lane of the same group goes FP32, or -1."""
    groups = np.asarray(lanes.groups, np.int32)
    members = np.arange(groups.max(initial=0) + 1)[:, None] == groups[None]
    if not (members.sum(1) > 1).any():
        return np.full(groups.shape, _ADMIT, np.int32)
    down = jnp.any(members & (refusal != np.int32(_ADMIT)), 1)
    grouped = down[np.maximum(groups, 0)] & (groups >= 0)
    return jnp.where(grouped, np.int32(Reason.GROUP), np.int32(_ADMIT))
