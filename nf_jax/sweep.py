"""What if: whole replays over a swept value, and a profile fitted to what they find (co-design).

Which reducer, which buckets, which routes: each point of an axis is one `replay`, by the very same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nf_jax.columns import Columns
from nf_jax.endpoint import Endpoint
from nf_jax.plan import plan
from nf_jax.prices import find_prices
from nf_jax.profile import Phase, Profile, Route
from nf_jax.replan import hosts_of, profile_of, replan
from nf_jax.replay import Replay, estimate_compute_seconds, replay
from nf_jax.stages import Substrate

MAX_WORKERS = 4096
FLOOR_SIZES = tuple(2**power for power in range(12, 27))
"""Sizes of a lane, FP32 bytes, among which `co_design` looks for the smallest that pays."""


class Case(NamedTuple):
    """What one replay is asked about. Attributes: as `replay` takes them."""

    columns: Columns
    substrate: Substrate | None
    endpoint: Endpoint | None
    compute_seconds: float


class Point(NamedTuple):
    """One point of a sweep. Attributes: value: of the axis; found: the replay there."""

    value: float
    found: Replay


class Axis(NamedTuple):
    """What can be swept.

    Attributes:
      title: for people, with the unit.
      change: (case, value) -> the case with that value.
      now: the value that a case has; None where it does not say.
      is_whole: whether values are counts, from 1 on; else they are rates, from 0 on.
    """

    title: str
    change: Callable[[Case, Any], Case]
    now: Callable[[Case], float | None]
    is_whole: bool


def sweep(
    columns: Columns,
    substrate: Substrate | None,
    endpoint: Endpoint | None,
    *,
    axis: str,
    values: Sequence[float],
    compute_seconds: float | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Point]:
    """Replays a trace once for each value of one thing, all else as given.

    Args:
      columns: the trace.
      substrate: measured where the trace was; what the axis asks about is computed from it
        (`Substrate.rescaled`).
      endpoint: the endpoint reducer, or None for collectives alone.
      axis: a key of `AXES`.
      values: in the unit that `AXES` says.
      compute_seconds: as `replay` takes it; estimated once, so that it stays the same over the sweep.
      tell: called once per point, with what has been replayed.

    Returns:
      One point per value.

    Raises:
      ValueError: an unknown axis; one that needs an endpoint or the profile's [model] without it; a value
        that is not allowed; and what `replay` raises.

    Example:
      sweep(columns, substrate, None, axis="workers", values=(8, 64, 512, 4096))
    """
    if axis not in AXES:
        raise ValueError(f"axis: expected one of {', '.join(AXES)}, got {axis!r}")
    if substrate is None and endpoint is None:
        raise ValueError("sweep: expected a substrate or an endpoint, got neither, so nothing takes time")
    case = make_case(columns, substrate, endpoint, compute_seconds)
    points = []
    for value in values:
        points.append(Point(value, replay_case(AXES[axis].change(case, _to_number(axis, value)))))
        tell(f"{axis} = {value:g}")
    return points


def make_case(
    columns: Columns,
    substrate: Substrate | None,
    endpoint: Endpoint | None,
    compute_seconds: float | None = None,
) -> Case:
    """The case of a sweep before anything is changed."""
    if compute_seconds is None:
        compute_seconds = estimate_compute_seconds(profile_of(columns), columns, substrate)
    return Case(columns, substrate, endpoint, compute_seconds)


def replay_case(case: Case) -> Replay:
    """One replay."""
    columns, substrate, endpoint, seconds = case
    return replay(columns, substrate=substrate, endpoint=endpoint, compute_seconds=seconds)


def what_if(case: Case, tell: Callable[[str], None] = lambda text: None) -> dict[str, list[Point]]:
    """Sweeps every axis that applies, around the case's own values; see `default_values`."""
    if case.substrate is None and case.endpoint is None:
        raise ValueError("what if: expected a substrate or an endpoint to vary, got neither")
    return {
        axis: sweep(*case[:3], axis=axis, values=values, compute_seconds=case.compute_seconds, tell=tell)
        for axis, values in default_values(case).items()
    }


def default_values(case: Case) -> dict[str, list[float]]:
    """Values for every axis that applies: powers around what the case has, workers up to 4,096."""
    profile = profile_of(case.columns)
    values = {"link": [1.25e7 * 10 ** (power / 2) for power in range(7)]}
    if profile.model is not None:
        values["workers"] = [2.0**power for power in range(1, 13)]
    if case.endpoint is not None:
        rate, slots = case.endpoint.vote_elements_per_second or 1e9, case.endpoint.slots
        values["service"] = [rate * 10 ** (power / 2) for power in range(-6, 3)]
        values["slots"] = [max(slots * 4.0**power, 1.0) for power in range(-4, 3)]
        values["count_bits"] = [1, 2, 3, 4, 6, 8, 12, 16]
    if profile.model is not None:
        values["cap"] = [2.0**power for power in range(16, 27, 2)]
    return {axis: sorted(set(found)) for axis, found in values.items()}


def _to_number(axis: str, value: float) -> float | int:
    is_whole = AXES[axis].is_whole
    if not np.isfinite(value) or value < is_whole or (is_whole and value != int(value)):
        allowed = "a whole number from 1 on" if is_whole else "a finite rate from 0 on"
        raise ValueError(f"{axis}: expected {allowed}, got {value}")
    return int(value) if is_whole else float(value)


# ------------------------------------------------------------------------------------------------- axes


def _change_link(case: Case, value: float) -> Case:
    substrate = case.substrate
    if substrate is not None:
        if value == 0:
            raise ValueError("link: expected a rate above 0 where a substrate is given, got 0")
        substrate = substrate.rescaled(link_bytes_per_second=value)
    if case.endpoint is None:
        return case._replace(substrate=substrate)
    return case._replace(substrate=substrate, endpoint=_with(case.endpoint, link_bytes_per_second=value))


def _change_workers(case: Case, value: int) -> Case:
    if value > MAX_WORKERS:
        raise ValueError(f"workers: expected at most {MAX_WORKERS}, got {value}")
    substrate = None if case.substrate is None else case.substrate.rescaled(num_workers=value)
    return case._replace(columns=replan(case.columns, num_workers=value), substrate=substrate)


def _change_service(case: Case, value: float) -> Case:
    endpoint = _endpoint_of(case, "service")
    fp32, votes = endpoint.fp32_elements_per_second, endpoint.vote_elements_per_second
    if fp32 is not None and votes > 0:
        fp32 = fp32 * value / votes
    return case._replace(
        endpoint=_with(endpoint, vote_elements_per_second=value, fp32_elements_per_second=fp32)
    )


def _change_slots(case: Case, value: int) -> Case:
    return case._replace(endpoint=_with(_endpoint_of(case, "slots"), slots=value))


def _change_count_bits(case: Case, value: int) -> Case:
    return case._replace(endpoint=_with(_endpoint_of(case, "count_bits"), count_bits=value))


def _change_cap(case: Case, value: int) -> Case:
    profile = with_cap(profile_of(case.columns), value)
    return case._replace(columns=replan(case.columns, profile=profile))


def with_cap(profile: Profile, cap_bytes: int) -> Profile:
    """The profile with another bucket cap; the first bucket's is never larger."""
    first = min(profile.buckets.first_bytes, cap_bytes)
    buckets = profile.buckets.model_copy(update={"cap_bytes": cap_bytes, "first_bytes": first})
    return profile.model_copy(update={"buckets": buckets})


def _endpoint_of(case: Case, axis: str) -> Endpoint:
    if case.endpoint is None:
        raise ValueError(f"{axis}: expected an endpoint to ask about, got none; give one (--endpoint)")
    return case.endpoint


def _with(endpoint: Endpoint, **values: Any) -> Endpoint:
    """The endpoint with other values, checked like those of a file."""
    return Endpoint.model_validate(endpoint.model_dump() | values)


def _endpoints(name: str) -> Callable[[Case], float | None]:
    return lambda case: None if case.endpoint is None else getattr(case.endpoint, name)


AXES: dict[str, Axis] = {
    "link": Axis("a worker's link, bytes/s", _change_link, _endpoints("link_bytes_per_second"), False),
    "workers": Axis("workers", _change_workers, lambda case: hosts_of(case.columns), True),
    "service": Axis(
        "votes that the endpoint counts, elements/s",
        _change_service,
        _endpoints("vote_elements_per_second"),
        False,
    ),
    "slots": Axis("aggregation slots", _change_slots, _endpoints("slots"), True),
    "count_bits": Axis("width of a counter, bits", _change_count_bits, _endpoints("count_bits"), True),
    "cap": Axis(
        "bucket cap, bytes", _change_cap, lambda case: profile_of(case.columns).buckets.cap_bytes, True
    ),
}
"""What can be swept. `service` takes FP32 along in proportion, where the endpoint adds it."""

# --------------------------------------------------------------------------------------------- co-design


def co_design(case: Case, caps: Sequence[Point] = ()) -> Profile:
    """The trace's profile, fitted to what it was replayed against.

    Args:
      case: substrate, endpoint, or both.
      caps: a sweep over `cap`, or nothing: the buckets stay.

    Returns:
      The profile with `capacity.min_lane_bytes`, the smallest lane that pays by each of its low-bit routes
      (`smallest_lane`), and with the `buckets.cap_bytes` that average fastest, if that gains 1 % or more;
      as it is, where a replay with the new values takes longer.
    """
    profile = profile_of(case.columns)
    floor = smallest_lane(profile, case)
    limits = profile.capacity.model_copy(update={"min_lane_bytes": floor})
    now, before = profile.buckets.cap_bytes, replay_case(case).total_seconds
    ranked = sorted(caps, key=lambda point: (point.found.total_seconds, -point.value))
    if ranked and ranked[0].found.total_seconds < 0.99 * before:
        now = int(ranked[0].value)
    fitted = with_cap(profile, now).model_copy(update={"capacity": limits})
    if profile.model is not None:
        again = case._replace(columns=replan(case.columns, profile=fitted))
        if replay_case(again).total_seconds > 1.01 * before:
            return profile
    return fitted


def smallest_lane(profile: Profile, case: Case) -> int:
    """FP32 bytes from which on a lane pays by every low-bit route of the profile.

    Looked for up to the run's largest lane, for larger ones may cease to pay (page faults) and do not
    occur; beyond that if none pays.
    """
    largest = 4 * max(case.columns.lanes.num_elements, default=0)
    sizes = [size for size in FLOOR_SIZES if size < 2 * largest] or FLOOR_SIZES[:1]
    floors = [FLOOR_SIZES[0]]
    for index, region in enumerate(profile.regions):
        for route in set(profile.routes_of(index)) - {Route.FP32}:
            alone = Profile(
                name=region.name,
                regions=(region.model_copy(update={"pattern": ".*"}),),
                phases=(Phase(start_step=0, routes={region.name: route}),),
                capacity=profile.capacity.model_copy(update={"min_lane_bytes": 0}),
            )
            fails = [size for size in sizes if not _pays(alone, case, size)]
            floors.append(2 * fails[-1] if fails else FLOOR_SIZES[0])
    return max(floors)


def _pays(profile: Profile, case: Case, size: int) -> bool:
    """Whether a lane of one square matrix goes low-bit by a profile of one route."""
    rows = 2 ** ((size // 4).bit_length() // 2)
    shapes: Any = {"kernel": jax.ShapeDtypeStruct((rows, size // 4 // rows), "float32")}
    workers = hosts_of(case.columns)
    lanes = plan(profile, shapes, workers).lanes
    return find_prices(profile, lanes, workers, case.substrate, case.endpoint).lanes.fixed[0] is None
