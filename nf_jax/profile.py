"""The operating profile: what may travel low-bit, when, and what stops it. A checked TOML file."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from nf_jax import checks
from nf_jax.checks import (
    Frozen,
    Many,
    PositiveLimit,
    PositiveSize,
    PositiveSteps,
    Size,
    Steps,
    Text,
)


class Route(enum.IntEnum):
    """How one lane is averaged in one step; the value is its row in `routes.ROUTES`."""

    FP32 = 0
    BF16 = 1
    SIGN = 2
    TERNARY = 3


def to_route(value: object) -> Route:
    """A `Route` from itself, its number or its name in either case; ValueError otherwise."""
    for route in Route:
        if value in (route, route.name, route.name.lower()) and not isinstance(value, bool):
            return route
    raise ValueError(f"route: expected one of {', '.join(Route.__members__)}, got {value!r}")


class Codec(Frozen):
    """How a region's lanes are encoded on their low-bit routes."""

    scale: Literal["auto", "leaf", "row", "channel", "rank1"] = "auto"
    """What shares one scale; auto is rank1 for matrices where it is cheap."""
    down: Literal["count", "majority", "ternary", "2bit"] = "majority"
    """What comes back: exact counts, or 1 bit, 3 levels, 4 levels."""
    gate: Annotated[float, Field(gt=0, le=1.5)] = 0.767
    """TERNARY: elements below gate x scale are sent as zero. Beyond 1.5 residuals outgrow the gate."""
    error_feedback: bool = True
    """Keep the worker's error for its next step."""
    server_error_feedback: bool = True
    """Keep the reducer's error likewise."""
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which the errors are kept."""
    on_fallback: Literal["drain", "drop"] = "drain"
    """Kept errors on the first FP32 step: sent along, or forgotten."""


class Region(Frozen):
    """A named set of parameters that share a policy."""

    name: checks.Name
    """Unique; ASCII letters, digits and _, at most 64."""
    pattern: checks.Pattern
    """Regular expression for the whole `/`-joined path, at most 500 characters. A repeated group
    holds nothing optional, repeated or alternative; in all, at most 6 repeats of variable count
    and 4096 ways to choose by `?` and `|`, so that no path takes long to match."""
    codec: Codec = Codec()
    """How it is encoded on low-bit routes."""


class Phase(Frozen):
    """The routes from one step on, until the next phase starts."""

    start_step: Steps
    """First step of the phase, counted in updates."""
    routes: Annotated[dict[str, Annotated[Route, *checks.by_name(Route)]], Field(min_length=1)]
    """Region name -> route; a region not named keeps its. Read-only."""


class Buckets(Frozen):
    """How leaves are gathered into buckets, in reverse order of definition."""

    first_bytes: PositiveSize = 2**20
    """Cap of the first bucket, bytes."""
    cap_bytes: PositiveSize = 25 * 2**20
    """Cap of every other bucket, bytes."""
    order: Annotated[Many[str], checks.distinct()] | None = None
    """Leaf paths in order of definition; None: their natural order."""


class HealthLimits(Frozen):
    """When training counts as unhealthy, and how long a region then stays in FP32."""

    enabled: bool = True
    """False: triggers are reported, never acted on."""
    warmup_steps: Steps = 20
    """FP32 at the start, finite steps."""
    patience_steps: PositiveSteps = 3
    """Consecutive unhealthy steps before a trip; a non-finite one trips at once."""
    cooldown_steps: Annotated[int, Field(ge=1, le=2**20)] = 50
    """FP32 after a trip, steps; doubles at each trip."""
    probation_steps: Steps = 50
    """Low-bit with a patience of 1, steps."""
    max_trips: Steps = 5
    """Trips of a region; one more locks it in FP32, count."""
    loss_spike_deviations: PositiveLimit = 8.0
    """Loss above its running mean, running mean absolute deviations."""
    norm_jump_ratio: Annotated[float, Field(gt=1, le=1e38)] = 10.0
    """Gradient norm of a region over its running mean, ratio."""
    min_agreement: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least mean |votes| per element, 0 to 1; 0: off."""
    max_residual_ratio: PositiveLimit = 50.0
    """Residual norm of a lane over its mean gradient's norm, ratio."""
    lane_hold_steps: PositiveSteps = 50
    """FP32 for a lane above max_residual_ratio, steps."""
    smoothing_steps: PositiveSteps = 50
    """Horizon of running means, steps."""


class CapacityLimits(Frozen):
    """When the reducer's load, or a lane's size, rules low-bit routes out."""

    min_lane_bytes: Size = 2**16
    """Smallest routable part of a low-bit lane, FP32 bytes; 0: off."""
    min_speedup: Annotated[float, Field(ge=1, le=1e38)] = 1.05
    """Predicted seconds in FP32 over those of a low-bit route, ratio; judged where a substrate is given."""
    max_reducer_load: PositiveLimit = 0.9
    """Busy share of the reducer at which low-bit stops, ratio."""
    resume_reducer_load: checks.Limit = 0.7
    """Busy share at which it resumes, ratio; at most max_reducer_load."""
    hold_steps: PositiveSteps = 20
    """Consecutive steps at that share; doubles with each saturation, steps."""

    @model_validator(mode="after")
    def _check_loads(self) -> Self:
        resume, most = self.resume_reducer_load, self.max_reducer_load
        if resume > most:
            limit = f"at most max_reducer_load ({most})"
            raise ValueError(f"resume_reducer_load: expected {limit}, got {resume}")
        return self


class Target(Frozen):
    """What a run has to reach for the profile to count as good."""

    metric: Text
    """Name of the measured number."""
    reference: float
    """What FP32 reaches, in the metric's unit."""
    tolerance: Annotated[float, Field(ge=0)]
    """How much worse is accepted, the metric's unit."""
    higher_is_better: bool
    """True for an accuracy, False for a loss."""

    def is_met(self, value: float) -> bool:
        """Return whether `value`, in the metric's unit, is within tolerance; NaN never is."""
        if self.higher_is_better:
            return value >= self.reference - self.tolerance
        return value <= self.reference + self.tolerance


class Provenance(Frozen):
    """Where the profile was measured."""

    measured_by: str | None = None
    """Command or person."""
    date: checks.Date | None = None
    """Day of the measurement, ISO 8601."""
    devices: str | None = None
    """Kind of device."""
    num_workers: PositiveSize | None = None
    """Workers, count."""
    batch_size: PositiveSize | None = None
    """Examples per step, all workers."""
    optimizer: str | None = None
    """Optimizer and its settings."""
    notes: str | None = None
    """Anything else."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Package -> version. Read-only."""


class Leaf(Frozen):
    """One parameter array of a model."""

    path: str
    """`/`-joined path; empty when the model is a single array."""
    shape: Annotated[tuple[Size, ...], Field(strict=False)]
    """Elements per dimension."""
    dtype: Text
    """Name of the dtype, such as float32."""

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if (size := math.prod(self.shape)) >= 2**63:
            raise ValueError(f"shape: expected fewer than 2**63 elements, got {size:.3g}")
        return self


class Model(Frozen):
    """The fingerprint of the model that a profile was made for."""

    name: Text
    """Name for people."""
    leaves: Annotated[Many[Leaf], checks.distinct("path")]
    """Every parameter array, in any order."""

    def differences(self, leaves: Sequence[Leaf]) -> list[str]:
        """Return a line per path, shape or dtype in which `leaves` differ from the model's."""
        want, have = ({leaf.path: leaf for leaf in side} for side in (self.leaves, leaves))
        lines = [f"missing: {path}" for path in want if path not in have]
        lines += [f"unexpected: {path}" for path in have if path not in want]
        for path in (path for path in want if path in have):
            for key in ("shape", "dtype"):
                expected, got = getattr(want[path], key), getattr(have[path], key)
                if expected != got:
                    lines.append(f"{key} of {path}: expected {expected}, got {got}")
        return lines


class Profile(checks.File):
    """Everything a user decides about which lanes may travel low-bit, and when.

    Written by hand or found by `calibrate`; immutable, hashable, checked where it is built.

    Example:
      >>> profile = Profile.static(Route.SIGN, down="ternary")
      >>> profile.route_table
      ((0, (<Route.SIGN: 2>,)),)
      >>> Profile.loads(profile.dumps()) == profile
      True
    """

    name: Text
    """Name for people."""
    description: str = ""
    """What the profile is for."""
    fallback: bool = True
    """A lane that health or capacity refuses goes FP32; False: none is."""
    model: Model | None = None
    """The model it was made for; None: any."""
    regions: Annotated[Many[Region], checks.distinct("name")]
    """Ordered rules; the first that matches wins."""
    phases: Many[Phase]
    """Routes over time; the first starts at step 0."""
    buckets: Buckets = Buckets()
    """How leaves are gathered."""
    health: HealthLimits = HealthLimits()
    """When training is unhealthy."""
    capacity: CapacityLimits = CapacityLimits()
    """When low-bit is ruled out."""
    target: Target | None = None
    """What a run has to reach."""
    provenance: Provenance | None = None
    """Where it was measured."""

    @model_validator(mode="after")
    def _check_phases(self) -> Self:
        names, least, first = set(self.region_names), 0, self.phases[0]
        if first.start_step != 0:
            raise ValueError(f"phases[0].start_step: expected 0, got {first.start_step}")
        if missing := names - first.routes.keys():
            text = f"expected every region, got none for {checks.show(sorted(missing))}"
            raise ValueError(f"phases[0].routes: {text}")
        for index, phase in enumerate(self.phases):
            if phase.start_step < least:
                text = f"expected at least {least}, after the last phase, got {phase.start_step}"
                raise ValueError(f"phases[{index}].start_step: {text}")
            if unknown := phase.routes.keys() - names:
                text = f"expected names of {checks.show(self.region_names)}"
                got = checks.show(sorted(unknown))
                raise ValueError(f"phases[{index}].routes: {text}, got {got}")
            least = phase.start_step + 1
        return self

    @property
    def region_names(self) -> tuple[str, ...]:
        """Names of the regions, in profile order."""
        return tuple(region.name for region in self.regions)

    @property
    def route_table(self) -> tuple[tuple[int, tuple[Route, ...]], ...]:
        """`(start_step, route of every region)` per phase, what a phase leaves out filled in."""
        routes: dict[str, Route] = {}
        table: list[tuple[int, tuple[Route, ...]]] = []
        for phase in self.phases:
            routes |= phase.routes
            table.append((phase.start_step, tuple(routes[name] for name in self.region_names)))
        return tuple(table)

    def routes_of(self, region_index: int) -> tuple[Route, ...]:
        """Return, sorted, the routes a region can ever take: its phases' and the fallback."""
        routes = {routes[region_index] for _, routes in self.route_table}
        return tuple(sorted(routes | ({Route.FP32} if self.fallback else set())))

    def check_model(self, leaves: Sequence[Leaf]) -> None:
        """Raise ValueError, listing what differs, unless `leaves` (any order) are the model's."""
        if self.model and (lines := self.model.differences(leaves)):
            head = f"profile {self.name!r}: expected the model {self.model.name!r}, got another"
            raise ValueError(checks.join_lines(f"{head}; calibrate anew or drop `model`:", lines))

    @classmethod
    def static(cls, route: Route | str, **codec: Any) -> Self:
        """Return the profile of one route for everything, always; `codec`: fields of `Codec`."""
        route = to_route(route)
        return cls(
            name=f"static_{route.name.lower()}",
            fallback=False,
            regions=(Region(name="all", pattern=".*", codec=Codec(**codec)),),
            phases=(Phase(start_step=0, routes={"all": route}),),
            health=HealthLimits(enabled=False),
            capacity=CapacityLimits(min_lane_bytes=0),
        )
