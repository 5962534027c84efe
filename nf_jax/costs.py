"""What averaging a lane costs in seconds, predicted from measured stages; and which lanes that admits.

A route is a list of *stages* (`stages_of`), each with the bytes it works on: packing, counting and decoding
on the worker, collectives between workers. A `Substrate` holds how long every stage takes on the mesh where
`nf_jax.substrate.probe` measured it. A prediction is the sum: no stage overlaps with another. Four ways of
reducing are told apart:

- *ring all-reduce* (FP32): `2 (W - 1)` messages, `2 (W - 1) / W` of the bytes; what compression has to beat
  (the critique arXiv 2103.00543);
- *two phases* (1-bit Adam, arXiv 2102.02888): all-to-all of packed words, count, all-gather of the result:
  `W - 1` messages and `(W - 1) / W` of the words each way;
- *straight*: all-gather of packed words, and everyone counts: `W - 1` times the words, one message less;
- *endpoint*: up to a reducer and down again (SwitchML, arXiv 1903.06701; THC, arXiv 2302.08545).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from nf_jax import checks, codecs
from nf_jax.checks import Frozen, Many, PositiveSize, Size, Text
from nf_jax.profile import Codec, Profile, Route
from nf_jax.telemetry import Lanes, Reason

StageName = Literal[
    "pack", "count", "decode", "all_reduce", "all_to_all", "all_gather", "fp32", "bf16", "sign", "ternary"
]
STAGES: tuple[StageName, ...] = StageName.__args__
COLLECTIVES: frozenset[StageName] = frozenset(("all_reduce", "all_to_all", "all_gather"))
OWN_STAGE: dict[Route, StageName] = {
    Route.FP32: "fp32",
    Route.BF16: "bf16",
    Route.SIGN: "sign",
    Route.TERNARY: "ternary",
}
"""What a route does on the worker beside the stages that routes share: scales, residuals, health's norms."""

NonNegative = Annotated[float, Field(ge=0)]

# ---------------------------------------------------------------------------------------------- substrate


class Stage(Frozen):
    """One stage, measured at several sizes; a fit, latency + bytes x seconds per byte, goes beyond them."""

    latency_seconds: NonNegative
    """Of one call without bytes, s."""
    seconds_per_byte: NonNegative
    """Of every byte, s. A collective's bytes are those a worker sends; else votes, or the lane in FP32."""
    latency_error_seconds: NonNegative
    """Standard error of the latency, s."""
    seconds_per_byte_error: NonNegative
    """Standard error of the seconds per byte, s."""
    sizes_bytes: Many[Size]
    """Where it was measured, ascending, bytes."""
    measured_seconds: Many[float]
    """What was measured there, s; of a route's own stage what the shared ones leave, so maybe below 0."""

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        sizes, num = list(self.sizes_bytes), len(self.measured_seconds)
        if sizes != sorted(set(sizes)) or len(sizes) != num:
            raise ValueError(
                f"sizes_bytes: expected {num} ascending sizes, one for each of measured_seconds, got {sizes}"
            )
        return self

    def seconds(self, num_bytes: float) -> float:
        """Predicted seconds: between two measured sizes on the line through them, beyond the largest parallel
        to the fit. Caches and page faults bend the curve where one line over all sizes would miss."""
        beyond = max(num_bytes - self.sizes_bytes[-1], 0)
        inside = float(np.interp(num_bytes, self.sizes_bytes, self.measured_seconds))
        return inside + beyond * self.seconds_per_byte

    def slowed(self, longer: float, seconds_per_byte: float) -> Self:
        """Return it with `longer` times the latency, and at least so many seconds per byte."""
        latency, extra = self.latency_seconds * longer, self.latency_seconds * (longer - 1)
        points = zip(self.sizes_bytes, self.measured_seconds, strict=True)
        return self.model_copy(
            update={
                "latency_seconds": latency,
                "seconds_per_byte": max(self.seconds_per_byte, seconds_per_byte),
                "measured_seconds": tuple(max(t + extra, latency + b * seconds_per_byte) for b, t in points),
            }
        )

    def error_seconds(self, num_bytes: float) -> float:
        """Standard error of the prediction, s."""
        return math.hypot(self.latency_error_seconds, num_bytes * self.seconds_per_byte_error)


class Substrate(checks.File):
    """How long every stage takes between these workers. Written by `nf-jax probe`; immutable, checked."""

    num_workers: PositiveSize
    """W, count."""
    num_processes: PositiveSize
    """Processes that they live in, count."""
    backend: Text
    """Name of JAX's backend: cpu, gpu, tpu."""
    device_kind: Text
    """Kind of device, as JAX calls it."""
    link: str | None = None
    """What links them, in words, such as 1gbit."""
    measured_by: str | None = None
    """Command or person."""
    date: checks.Date | None = None
    """Day of the measurement, ISO 8601."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Package -> version. Read-only."""
    stages: dict[StageName, Stage]
    """Stage -> what was measured. Read-only."""

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if missing := [name for name in STAGES if name not in self.stages]:
            raise ValueError(f"stages: expected all of {', '.join(STAGES)}, got none for {missing}")
        return self

    def check_workers(self, num_workers: int) -> None:
        """Raise ValueError unless it was measured between as many workers."""
        self._check("num_workers", self.num_workers, num_workers)

    def check_backend(self, backend: str) -> None:
        """Raise ValueError unless it was measured on the same backend."""
        self._check("backend", self.backend, backend)

    def _check(self, name: str, own: object, other: object) -> None:
        if own != other:
            raise ValueError(
                f"substrate: expected one measured with {name}={other}, as this run has it, got {own}: what "
                "pays there says nothing about here. Measure here: nf-jax probe."
            )

    def rescaled(self, *, num_workers: int | None = None, link_bytes_per_second: float | None = None) -> Self:
        """Return what it would be with other workers or links, for what-if questions.

        A collective's latency goes with its messages (`W - 1`); its seconds per byte are at least the link's.
        Probe without a limit first: a slow link cannot be taken out of what was measured through it.
        """
        workers = num_workers or self.num_workers
        longer = (workers - 1) / max(self.num_workers - 1, 1)
        slope = 0.0 if link_bytes_per_second is None else 1 / link_bytes_per_second
        stages = {
            name: stage.slowed(longer, slope) if name in COLLECTIVES else stage
            for name, stage in self.stages.items()
        }
        return self.model_copy(update={"num_workers": workers, "stages": stages})


def fit(sizes_bytes: Sequence[int], seconds: Sequence[float], scales: Sequence[float] | None = None) -> Stage:
    """Fits latency and seconds per byte to medians: least squares of relative errors, neither below 0.

    Args:
      sizes_bytes: at least one size, ascending.
      seconds: the median at each size; below 0 counts as nothing.
      scales: what an error at each size is relative to, s; the medians themselves by default.

    Returns:
      The stage, standard errors from the residuals of the fit (0 where it goes through all points).
    """
    x, y = np.asarray(sizes_bytes, float), np.maximum(np.asarray(seconds, float), 0)
    weights = 1 / np.maximum(y if scales is None else np.asarray(scales, float), 1e-9)
    design = np.stack([np.ones_like(x), x], 1) * weights[:, None]
    chosen = min(
        (_least_squares(design, y * weights, columns) for columns in ([0, 1], [1], [0])),
        key=lambda found: (np.any(found[0] < 0), found[1]),
    )
    (latency, slope), squared = chosen
    free = max(len(x) - 2, 1)
    covariance = np.linalg.pinv(design.T @ design) * squared / free
    errors = np.sqrt(np.maximum(np.diag(covariance), 0))
    return Stage(
        latency_seconds=max(float(latency), 0.0),
        seconds_per_byte=max(float(slope), 0.0),
        latency_error_seconds=float(errors[0]),
        seconds_per_byte_error=float(errors[1]),
        sizes_bytes=tuple(int(size) for size in sizes_bytes),
        measured_seconds=tuple(float(value) for value in seconds),
    )


def _least_squares(design: np.ndarray, target: np.ndarray, columns: list[int]) -> tuple[np.ndarray, float]:
    """Coefficients with those outside `columns` at 0, and the sum of squares that is left."""
    found = np.zeros(design.shape[1])
    found[columns] = np.linalg.lstsq(design[:, columns], target, rcond=None)[0]
    return found, float(np.sum((design @ found - target) ** 2))


# ----------------------------------------------------------------------------------------------- routes


def stages_of(
    route: Route, codec: Codec, num_elements: int, wire_bytes: int, num_workers: int
) -> list[tuple[StageName, float]]:
    """The stages of a route for lanes that travel together, each with the bytes that it works on.

    Args:
      route: how they travel.
      codec: the codec settings of their region.
      num_elements: of all these lanes.
      wire_bytes: what a worker sends of them by this route, as the plan counts it.
      num_workers: W.
    """
    size, share = 4.0 * num_elements, (num_workers - 1) / num_workers
    own = (OWN_STAGE[route], size)
    if num_workers == 1:
        return [own]
    if route == Route.FP32:
        return [own, ("all_reduce", float(wire_bytes))]
    if route == Route.BF16:
        return [own, ("all_to_all", wire_bytes / 2), ("all_gather", wire_bytes / 2)]
    planes = 1 if route == Route.SIGN else 2
    words = planes * num_elements / 8
    local: list[tuple[StageName, float]] = [own, ("pack", size), ("decode", size)]
    if codecs.goes_straight(codec.down, num_workers, planes):
        sent = (num_workers - 1) * words
        scales = max(wire_bytes - sent, 0.0)
        return [
            *local,
            ("all_gather", scales),
            ("all_gather", sent),
            ("all_gather", 0.0),
            ("count", num_workers * words),
        ]
    down = codecs.num_planes_down(codec.down, num_workers * planes) * num_elements / 8
    scales = max(wire_bytes - share * words - share * down, 0.0)
    return [
        *local,
        ("all_to_all", scales / 2),
        ("all_gather", scales / 2),
        ("all_to_all", share * words),
        ("count", words),
        ("all_gather", share * down),
    ]


def total_seconds(substrate: Substrate, stages: Sequence[tuple[StageName, float]]) -> float:
    """Predicted seconds of stages one after another."""
    return sum(substrate.stages[name].seconds(num_bytes) for name, num_bytes in stages)


def lane_seconds(profile: Profile, lanes: Lanes, substrate: Substrate) -> np.ndarray:
    """Predicted seconds of every lane by every route, `f64[L, 4]` in `Route` order.

    Lanes that travel together share their latency by their elements. Lanes that are always exact share one
    all-reduce, whatever the route.
    """
    return _by_lane(profile, lanes, substrate, _ALL_STAGES)


def local_seconds(profile: Profile, lanes: Lanes, substrate: Substrate) -> np.ndarray:
    """The part of `lane_seconds` that a worker spends by itself, without any collective: `f64[L, 4]`."""
    return _by_lane(profile, lanes, substrate, _ALL_STAGES - COLLECTIVES)


_ALL_STAGES = frozenset(STAGES)


def _by_lane(
    profile: Profile, lanes: Lanes, substrate: Substrate, counted: frozenset[StageName]
) -> np.ndarray:
    seconds = np.zeros((len(lanes.names), len(Route)))
    sizes = np.asarray(lanes.num_elements, float)
    for members in _together(lanes):
        together, codec = sizes[members].sum(), profile.regions[lanes.regions[members[0]]].codec
        is_exact = lanes.fixed[members[0]] not in (None, Reason.SLOWER)
        for route in Route:
            taken = Route.FP32 if is_exact else route
            sent = sum(lanes.wire_bytes[lane][taken] for lane in members)
            stages = stages_of(taken, codec, int(together), sent, substrate.num_workers)
            total = total_seconds(substrate, [stage for stage in stages if stage[0] in counted])
            seconds[members, route] = total * sizes[members] / max(together, 1)
    return seconds


def _together(lanes: Lanes) -> list[list[int]]:
    """Lanes that travel together: those of a group, all that are always exact, and alone what a substrate
    refused."""
    sets: dict[object, list[int]] = {}
    for lane, (group, fixed) in enumerate(zip(lanes.groups, lanes.fixed, strict=True)):
        key = ("refused", lane) if fixed == Reason.SLOWER else group
        sets.setdefault(key, []).append(lane)
    return list(sets.values())


# -------------------------------------------------------------------------------------------- admission


def admit(profile: Profile, lanes: Lanes, seconds: np.ndarray) -> Lanes:
    """The lanes with `pays` set, and `fixed` where no low-bit route of theirs pays (arXiv 2606.25759).

    A route pays where FP32's predicted time is at least the profile's `capacity.min_speedup` times its own;
    lanes that travel together are judged together. An earlier refusal of this kind is forgotten.

    Args:
      profile: one without fallback has no FP32 to go to: its lanes come back as they are.
      lanes: of a plan.
      seconds: predicted, `f64[L, 4]`.
    """
    if not profile.fallback:
        return lanes
    fixed = list(lanes.fixed)
    pays = np.ones((len(fixed), len(Route)), bool)
    for members in _together(lanes):
        if fixed[members[0]] not in (None, Reason.SLOWER):
            continue
        total = seconds[members].sum(0)
        gains = np.asarray(total[Route.FP32] >= profile.capacity.min_speedup * total)
        gains[Route.FP32] = True
        lossy = [route for route in profile.routes_of(lanes.regions[members[0]]) if route != Route.FP32]
        for lane in members:
            pays[lane] = gains
            fixed[lane] = None if gains[lossy].any() else Reason.SLOWER
    rows = tuple((bool(a), bool(b), bool(c), bool(d)) for a, b, c, d in pays)
    return lanes._replace(fixed=tuple(fixed), pays=rows)
