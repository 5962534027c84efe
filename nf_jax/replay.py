"""Replay: the controller of training over a recorded trace, against a reducer that was measured or imagined.

What the trace measured (losses, norms, residuals) is taken as it was, whatever the routes would have changed.
Routes, bytes and seconds are computed anew, by the very functions that run in training.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nf_jax import capacity, controller, costs, health
from nf_jax.columns import Columns, wire_bytes_of
from nf_jax.endpoint import Endpoint, Load, Rates, Work, simulate
from nf_jax.prices import Prices, find_prices
from nf_jax.profile import Profile, Route
from nf_jax.replan import hosts_of, profile_of
from nf_jax.stages import Substrate
from nf_jax.telemetry import Array, Lanes, Signals


class Replay(NamedTuple):
    """What a replay found: n steps, L lanes, R regions; NumPy arrays.

    Attributes:
      lanes: as the substrate and the endpoint admit them.
      steps: int32[n].
      routes, reasons: int32[n, L], of every step.
      seconds: f64[n], predicted seconds in which a step averages its gradients; NaN without a substrate
        and an endpoint.
      fp32_seconds: what that would be with every lane in FP32.
      compute_seconds: what else a step takes.
      wire_bytes: int64[n], bytes a worker sends (to its peers or to the endpoint, as the plan counts them).
      fp32_bytes: what it would send at every step in FP32.
      queue_bytes: f32[n], the endpoint's longest queue; 0 without one.
      load: f32[n], the endpoint's load, or the recorded `reducer_load`.
      refusals: int32[n], lanes that the profile wants low-bit and that went FP32.
      trips: int32[n, R], times a region has fallen back.
      saturated: bool[n], whether the reducer counts as saturated after the step.
      is_rerun: whether neither a substrate nor an endpoint was given, so that decisions have to be the
        recorded ones.
      first_difference: the first step of a rerun where they are not; None where there is none.
      truncated: whether the trace's last line was torn, and left out.
    """

    lanes: Lanes
    steps: np.ndarray
    routes: np.ndarray
    reasons: np.ndarray
    seconds: np.ndarray
    fp32_seconds: float
    compute_seconds: float
    wire_bytes: np.ndarray
    fp32_bytes: int
    queue_bytes: np.ndarray
    load: np.ndarray
    refusals: np.ndarray
    trips: np.ndarray
    saturated: np.ndarray
    is_rerun: bool
    first_difference: int | None
    truncated: bool

    @property
    def total_seconds(self) -> float:
        """Seconds of averaging in all steps."""
        return float(self.seconds.sum())

    @property
    def speedup(self) -> float:
        """Seconds of averaging in FP32 over those by these routes; NaN where neither ends."""
        if math.isinf(self.fp32_seconds) and math.isinf(self.total_seconds):
            return math.nan
        return self.fp32_seconds * len(self.steps) / self.total_seconds if self.total_seconds else 1.0

    @property
    def wire_fraction(self) -> float:
        """Bytes sent over bytes in FP32."""
        sent_in_fp32 = self.fp32_bytes * len(self.steps)
        return float(self.wire_bytes.sum()) / sent_in_fp32 if sent_in_fp32 else 1.0

    @property
    def low_bit_share(self) -> float:
        """Part of all elements in all steps that went low-bit."""
        sizes = np.asarray(self.lanes.num_elements, float)
        return float(((self.routes != Route.FP32) @ sizes).mean() / max(sizes.sum(), 1))

    @property
    def num_flips(self) -> int:
        """Times the reducer became saturated, or ceased to be."""
        return int(np.count_nonzero(np.diff(self.saturated.astype(np.int8), prepend=0)))


def replay(
    columns: Columns,
    *,
    substrate: Substrate | None = None,
    endpoint: Endpoint | None = None,
    compute_seconds: float | None = None,
) -> Replay:
    """Runs the controller over a trace again.

    Args:
      columns: a trace, from its first step on (`nf_jax.columns.read_columns`).
      substrate: what was measured between as many workers: says what a lane costs by each route, and lanes
        are admitted anew by that. None: as they were admitted in the run.
      endpoint: reduces what goes low-bit, and FP32 too if it adds that. Its simulated load takes the place of
        the recorded `reducer_load`, and acts one step later, as in training. A lane that it cannot
        take (its counters are too narrow for the workers, a rate is 0) or that it makes slower than FP32 is
        refused with the reason SLOWER, so an endpoint too slow for a lane never gets it. Without a substrate
        packing and decoding cost nothing here, and FP32 by a ring is counted at the workers' links.
      compute_seconds: what a step takes beside averaging; the endpoint idles then. By default the median of
        the recorded `step_seconds`, less what the substrate predicts for the recorded routes; 0 without any.

    Returns:
      The `Replay`. Without substrate and endpoint its routes and reasons are those of the run.

    Raises:
      ValueError: the trace is empty, does not start at step 0 or has gaps; it does not fit its own profile;
        a substrate of another number of workers or backend; the trace's header lacks `num_workers`.

    Example:
      found = replay(read_columns("run/trace.jsonl"), endpoint=Endpoint.load("switch.toml"))
    """
    profile = _check(columns)
    if compute_seconds is not None and not 0 <= compute_seconds < math.inf:
        raise ValueError(f"compute_seconds: expected a finite number from 0 on, got {compute_seconds}")
    if substrate is not None:
        _check_substrate(columns, substrate)
    is_rerun = substrate is None and endpoint is None
    num_workers = 0 if is_rerun else hosts_of(columns)
    prices = find_prices(profile, columns.lanes, num_workers, substrate, endpoint)
    if compute_seconds is None:
        compute_seconds = estimate_compute_seconds(profile, columns, substrate)
    limits = _limits(prices, num_workers, compute_seconds)
    # What the controller does not read would compile it anew for nothing.
    control = prices.lanes._replace(num_elements=(), wire_bytes=())
    run = _run(profile, control, jnp.asarray(columns.steps), columns.signals, limits)
    run = jax.tree.map(np.asarray, run)
    all_fp32 = np.zeros((1, len(prices.lanes.names)), np.int32)
    at_endpoint = 0.0 if limits is None else float(_load(limits, jnp.asarray(all_fp32[0])).seconds)
    return Replay(
        lanes=prices.lanes,
        steps=columns.steps,
        routes=run.routes,
        reasons=run.reasons,
        seconds=_sum_lanes(prices.seconds, run.routes) + run.load.seconds,
        fp32_seconds=_sum_lanes(prices.seconds, all_fp32).item() + at_endpoint,
        compute_seconds=compute_seconds,
        wire_bytes=wire_bytes_of(prices.lanes, run.routes) + columns.overhead_bytes,
        fp32_bytes=columns.fp32_bytes,
        queue_bytes=run.load.queue_bytes,
        load=run.load.load,
        refusals=_refusals(profile, prices.lanes, columns.steps, run.routes),
        trips=run.trips,
        saturated=run.saturated,
        is_rerun=is_rerun,
        first_difference=_first_difference(columns, run) if is_rerun else None,
        truncated=columns.truncated,
    )


def estimate_compute_seconds(profile: Profile, columns: Columns, substrate: Substrate | None) -> float:
    """What a step of the run took beside averaging: its median time, less what the substrate predicts."""
    if columns.step_seconds is None:
        return 0.0
    averaging = 0.0
    if substrate is not None:
        table = costs.lane_seconds(profile, columns.lanes, substrate)
        averaging = float(np.median(_sum_lanes(table, columns.routes)))
    return max(float(np.nanmedian(columns.step_seconds)) - averaging, 0.0)


# ----------------------------------------------------------------------------------------------- the run


class _Limits(NamedTuple):
    """The endpoint inside the scan, all traced: as `simulate` takes it, but work for every route."""

    rates: Rates
    work: Work
    num_workers: Array
    compute_seconds: Array


class _Run(NamedTuple):
    """What every step of the scan leaves, stacked; see `Replay`."""

    routes: Array
    reasons: Array
    trips: Array
    saturated: Array
    load: Load


def _limits(prices: Prices, num_workers: int, compute_seconds: float) -> _Limits | None:
    if prices.rates is None or prices.work is None:
        return None
    numbers = np.asarray(num_workers, np.float32), np.asarray(compute_seconds, np.float32)
    return _Limits(prices.rates, prices.work, *numbers)


@jax.jit
def _load(limits: _Limits, routes: Array) -> Load:
    """What a step with these routes does to the endpoint."""
    lanes = np.arange(routes.shape[0])
    work = Work(*(jnp.asarray(table)[lanes, routes] for table in limits.work))
    return simulate(limits.rates, work, limits.num_workers, limits.compute_seconds)


@functools.partial(jax.jit, static_argnames=("profile", "lanes"))
def _run(profile: Profile, lanes: Lanes, steps: Array, signals: Signals, limits: _Limits | None) -> Any:
    """The control plane's part of every step, as `transform` runs it."""

    def one_step(carry: Any, measured: Any) -> tuple[Any, _Run]:
        health_state, capacity_state, routes, reasons = carry
        step, signals = measured
        load = Load(*(jnp.float32(0),) * 5, load=signals.reducer_load)
        if limits is not None:
            load = _load(limits, routes)
        signals = signals._replace(reducer_load=load.load)
        carry = controller.advance(profile, lanes, step + 1, health_state, capacity_state, signals)
        return carry, _Run(routes, reasons, carry[0].trips, carry[1].saturated, load)

    states = (
        health.init(profile.health, len(profile.regions), len(lanes.names)),
        capacity.init(profile.capacity),
    )
    chosen = controller.choose_routes(profile, lanes, steps[0], *states)
    return jax.lax.scan(one_step, (*states, *chosen), (steps, signals))[1]


# ------------------------------------------------------------------------------------------ what came of it


def _sum_lanes(table: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """f64[n], the sum over lanes of `table[lane, route]`."""
    total = np.zeros(len(routes))
    for lane, row in enumerate(table):
        total += row[routes[:, lane]]
    return total


def _refusals(profile: Profile, lanes: Lanes, steps: np.ndarray, routes: np.ndarray) -> np.ndarray:
    starts, table = (np.asarray(column) for column in zip(*profile.route_table, strict=True))
    phase = np.searchsorted(starts, steps, side="right") - 1
    is_wanted = (table != Route.FP32)[:, np.asarray(lanes.regions)]
    return np.count_nonzero(is_wanted[phase] & (routes == Route.FP32), axis=1).astype(np.int32)


def _first_difference(columns: Columns, run: _Run) -> int | None:
    differs = (columns.routes != run.routes) | (columns.reasons != run.reasons)
    found = np.flatnonzero(differs.any(1))
    return int(columns.steps[found[0]]) if len(found) else None


# ------------------------------------------------------------------------------------------------ checks


def _check(columns: Columns) -> Profile:
    """The trace's profile, if the trace is whole and fits it."""
    profile = profile_of(columns)
    if not len(columns.steps):
        raise ValueError(f"{columns.source}: steps: expected at least one to replay, got none")
    if not np.array_equal(columns.steps, np.arange(len(columns.steps))):
        wrong = int(np.argmax(columns.steps != np.arange(len(columns.steps))))
        raise ValueError(
            f"{columns.source}: steps: expected 0, 1, 2, ... without gaps, got {columns.steps[wrong]} in "
            f"place {wrong}: health depends on all steps before. Replay the whole run's trace."
        )
    num_regions, num_lanes = len(profile.regions), len(columns.lanes.names)
    if any(not 0 <= region < num_regions for region in columns.lanes.regions):
        raise ValueError(
            f"{columns.source}: line 1: lanes: expected regions below the profile's {num_regions}, got others"
        )
    sizes = {"nonfinite": num_regions, "gradient_norm": num_regions}
    sizes |= {"agreement": num_lanes, "residual_ratio": num_lanes}
    for name, field in columns.signals._asdict().items():
        expected = (len(columns.steps), sizes[name]) if name in sizes else (len(columns.steps),)
        if field.shape != expected:
            raise ValueError(
                f"{columns.source}: signals: expected {name} of shape {expected}, got {field.shape}"
            )
    return profile


def _check_substrate(columns: Columns, substrate: Substrate) -> None:
    substrate.check_workers(hosts_of(columns))
    if "backend" in columns.header:
        substrate.check_backend(columns.header["backend"])
