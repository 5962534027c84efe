"""What calibration searches: settings, the profile that they make, and the bytes that it plans to send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from nf_jax import regions as region_rules
from nf_jax.plan import Plan
from nf_jax.profile import HealthLimits, Leaf, Model, Phase, Profile, Provenance, Region, Route, Target

LOW_BIT = (Route.SIGN, Route.TERNARY)
_HOLD = "hold "  # before a region's name: the choice whether to hold it


class Protection(NamedTuple):
    """Regions, and which of them never go low-bit.

    Attributes:
      regions: in the profile's order.
      routes: region name -> FP32 or BF16; a region not named is free to go low-bit.
    """

    regions: tuple[Region, ...]
    routes: dict[str, Route]

    @property
    def free(self) -> tuple[str, ...]:
        """Names of the regions that may go low-bit."""
        return tuple(region.name for region in self.regions if region.name not in self.routes)

    def hold(self, names: Sequence[str]) -> Protection:
        """The same with these of the free regions in BF16; other names are no matter."""
        held = {name: Route.BF16 for name in self.free if name in names}
        return self._replace(routes=self.routes | held)


class Settings(NamedTuple):
    """One point of the search; shares are parts of a run's steps.

    Attributes:
      protection: which of the job's protections.
      held: names of regions that it leaves free, not all of them, to send in BF16 all the same.
      warmup_share: FP32 at the start.
      bridge_share: BF16 after that, before low-bit.
      tail_share: FP32 at the end.
      route: SIGN or TERNARY (BF16 for the plain BF16 profile).
      gate, scale, down, error_feedback, server_error_feedback, on_fallback: as `Codec`'s.
    """

    protection: int = 0
    held: tuple[str, ...] = ()
    warmup_share: float = 0.05
    bridge_share: float = 0.0
    tail_share: float = 0.0
    route: Route = Route.SIGN
    gate: float = 0.767
    scale: str = "auto"
    down: str = "majority"
    error_feedback: bool = True
    server_error_feedback: bool = True
    on_fallback: str = "drain"


STARTS = (
    Settings(),
    Settings(warmup_share=0.1, down="count", server_error_feedback=False),
    Settings(warmup_share=0.02, scale="leaf"),
    Settings(route=Route.TERNARY, down="2bit", warmup_share=0.1),
    Settings(held=("head",), scale="leaf", down="count", error_feedback=False, server_error_feedback=False),
)
"""Tried first: what has worked on several models. The last is for Adam, whose mean squares error feedback
disturbs."""

BF16 = Settings(route=Route.BF16, warmup_share=0.0)
"""Half of FP32's bytes and next to no loss: what a low-bit profile has to beat."""


def describe(settings: Settings) -> str:
    text = f"{settings.route.name}, {settings.scale} scales, {settings.down} down"
    text = f"{text}, {settings.warmup_share:.1%} warm-up"
    return f"{text}, {' and '.join(settings.held)} in BF16" if settings.held else text


class Chooser(Protocol):
    """What picks a value, such as an optuna trial."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float: ...

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...


def choose_settings(chooser: Chooser, protections: Sequence[Protection]) -> Settings:
    """A point of the space; what one choice makes meaningless is not asked for."""
    pick = chooser.suggest_categorical
    protection = pick("protection", list(range(len(protections)))) if len(protections) > 1 else 0
    route = Route[pick("route", [route.name for route in LOW_BIT])]
    down = pick("down", ["majority", "ternary", "2bit", "count"])
    return Settings(
        protection=protection,
        held=_choose_held(pick, protections[protection].free),
        warmup_share=chooser.suggest_float("warmup_share", 0.005, 0.3, log=True),
        bridge_share=chooser.suggest_float("bridge_share", 0.0, 0.3, step=0.1),
        tail_share=chooser.suggest_float("tail_share", 0.0, 0.1, step=0.05),
        route=route,
        gate=chooser.suggest_float("gate", 0.3, 1.2) if route == Route.TERNARY else 0.767,
        scale=pick("scale", ["auto", "leaf", "row", "channel", "rank1"]),
        down=down,
        error_feedback=pick("error_feedback", [True, False]),
        server_error_feedback=down != "count" and pick("server_error_feedback", [True, False]),
        on_fallback=pick("on_fallback", ["drain", "drop"]),
    )


def _choose_held(pick: Callable[[str, Sequence[Any]], Any], free: Sequence[str]) -> tuple[str, ...]:
    """Some of the free regions, never all: BF16 everywhere is measured anyway."""
    held: list[str] = []
    for name in free:
        if len(held) < len(free) - 1 and pick(f"{_HOLD}{name}", [False, True]):
            held.append(name)
    return tuple(held)


def to_params(settings: Settings, protections: Sequence[Protection]) -> dict[str, Any]:
    """The choices that make `choose_settings` return these settings."""
    params = settings._asdict() | {"route": settings.route.name}
    held = params.pop("held")
    params |= {f"{_HOLD}{name}": name in held for name in protections[settings.protection].free}
    if settings.down == "count":
        del params["server_error_feedback"]
    if settings.route != Route.TERNARY:
        del params["gate"]
    return params


def protection_of(profile: Profile) -> Protection:
    """What a profile protects: every region that it never sends low-bit, by its last phase's route."""
    last = dict(zip(profile.region_names, profile.route_table[-1][1], strict=True))
    ever = {
        name
        for _, routes in profile.route_table
        for name, route in zip(profile.region_names, routes, strict=True)
        if route in LOW_BIT
    }
    return Protection(profile.regions, {name: route for name, route in last.items() if name not in ever})


def relax(protection: Protection) -> Protection:
    """The same with BF16 in place of FP32."""
    return protection._replace(routes=dict.fromkeys(protection.routes, Route.BF16))


def model_of(name: str, params: Any) -> Model:
    """The fingerprint of a parameter tree."""
    named, _ = region_rules.leaves_with_paths(params)
    leaves = [Leaf(path=path, shape=np.shape(leaf), dtype=str(leaf.dtype)) for path, leaf in named]
    return Model(name=name, leaves=tuple(leaves))


def make_profile(
    start: Profile,
    model: Model,
    protection: Protection,
    settings: Settings | None,
    limits: Mapping[str, float],
    steps: int,
    *,
    target: Target | None = None,
    provenance: Provenance | None = None,
) -> Profile:
    """The profile that settings make.

    Args:
      start: gives buckets, capacity and what is left of the health limits.
      model: of the job.
      protection: the one that the settings name.
      settings: None: everything in FP32, the regions alike.
      limits: names and values of health limits.
      steps: length of the run that shares are parts of.
      target, provenance: as the profile's.
    """
    if settings is not None:
        protection = protection.hold(settings.held)
    phases, warmup_steps = _phases(protection, settings, steps)
    health: dict[str, Any] = start.health.model_dump() | dict(limits)
    health |= {"warmup_steps": warmup_steps, "enabled": True}
    return Profile(
        name=start.name,
        description=start.description,
        fallback=True,
        model=model,
        regions=tuple(_with_codec(region, protection, settings) for region in protection.regions),
        phases=phases,
        buckets=start.buckets,
        health=HealthLimits(**health),
        capacity=start.capacity,
        target=target,
        provenance=provenance,
    )


def _phases(protection: Protection, settings: Settings | None, steps: int) -> tuple[tuple[Phase, ...], int]:
    exact = {region.name: Route.FP32 for region in protection.regions}
    if settings is None:
        return (Phase(start_step=0, routes=exact),), 0
    bridge = _steps(settings.warmup_share, steps)
    low = bridge + _steps(settings.bridge_share, steps)
    tail = steps - _steps(settings.tail_share, steps)

    def free(route: Route) -> dict[str, Route]:
        return dict.fromkeys(protection.free, route)

    changes: dict[int, dict[str, Route]] = {0: exact}
    changes[bridge] = changes.get(bridge, {}) | protection.routes | free(Route.BF16)
    changes[low] = changes.get(low, {}) | free(settings.route)
    if low < tail < steps and protection.free:
        changes[tail] = free(Route.FP32)
    phases = tuple(Phase(start_step=at, routes=routes) for at, routes in changes.items() if routes)
    return phases, bridge


def _steps(share: float, steps: int) -> int:
    return 0 if share == 0 else max(1, round(share * steps))


def _with_codec(region: Region, protection: Protection, settings: Settings | None) -> Region:
    if settings is None or region.name in protection.routes:
        return region
    own = ("gate", "scale", "down", "error_feedback", "server_error_feedback", "on_fallback")
    codec = region.codec.model_dump() | {name: getattr(settings, name) for name in own}
    return Region(name=region.name, pattern=region.pattern, codec=type(region.codec)(**codec))


def planned_bytes(profile: Profile, plan: Plan, steps: int) -> np.ndarray:
    """int64[steps], bytes that a worker sends in each step if nothing is refused after the warm-up."""
    starts, table = zip(*profile.route_table, strict=True)
    is_fixed = np.asarray([reason is not None for reason in plan.lanes.fixed])
    routes = np.where(is_fixed, Route.FP32, np.asarray(table)[:, np.asarray(plan.lanes.regions)])
    sent = np.asarray([plan.wire_bytes(row.tolist()) for row in routes], np.int64)
    by_step = sent[np.searchsorted(starts, np.arange(steps), side="right") - 1]
    by_step[: profile.health.warmup_steps] = plan.wire_bytes([Route.FP32] * plan.num_lanes)
    return by_step
