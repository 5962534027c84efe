"""What has to hold while a soak runs: of every step, and of how often routes may change in an episode."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

import nf_jax
from experiments.soak_watch import describe_memory
from nf_jax import Profile, Route
from nf_jax.health import Health
from nf_jax.telemetry import Lanes, Reason


@dataclasses.dataclass
class Episode:
    """Counts of one episode: a run from a fresh state on, under one kind of trouble; all start at 0.

    Attributes:
      kind: which kind of trouble.
      steps: steps taken.
      low_bit: lane steps that went low-bit, of all that the profile wants so.
      wanted: those that it wants so.
      nonfinite: steps with a value that was not finite.
      load_flips: times the reducer became saturated, or ceased to be.
      health_flips: per region, times it became trusted, or ceased to be.
      residual_falls: per lane, times its residual sent it to FP32.
      route_flips: per lane, changes of its route.
      trips: per region, times health fell back.
    """

    kind: str
    steps: int = 0
    low_bit: int = 0
    wanted: int = 0
    nonfinite: int = 0
    load_flips: int = 0
    health_flips: Any = 0
    residual_falls: Any = 0
    route_flips: Any = 0
    trips: Any = 0


@dataclasses.dataclass
class Found:
    """What a soak has found so far.

    Attributes:
      episodes: all of them, the last one maybe cut off.
      broken: a line for each law that did not hold.
      memory: (step, bytes) now and then.
      arrays: (number, bytes) of JAX arrays alive at the end of each whole episode.
      accuracy: of the test images at the end of each whole episode, percent.
      compilations: programs compiled, in the first episode and later.
      seconds: of all steps.
    """

    episodes: list[Episode] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)
    memory: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    arrays: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    accuracy: list[float] = dataclasses.field(default_factory=list)
    compilations: tuple[int, int] = (0, 0)
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        return sum(episode.steps for episode in self.episodes)


def observe(
    episode: Episode, profile: Profile, lanes: Lanes, before: nf_jax.StepInfo, info: nf_jax.StepInfo
) -> list[str]:
    """Counts one step; returns a line for each law of a single step that it breaks.

    Args:
      episode: counted on.
      profile: the run's.
      lanes: of its plan.
      before: what the step before reported; of a fresh state, step -1.
      info: what this one reports.
    """
    broken = []
    if int(info.step) != int(before.step) + 1:
        broken.append(f"expected step {before.step + 1} next")
    if not np.array_equal(info.routes, before.next_routes):
        broken.append(f"took {info.routes}, not the routes {before.next_routes} that were chosen")
    if not set(info.routes.tolist()) <= set(Route):
        broken.append(f"routes {info.routes}")
    phase = [routes for start, routes in profile.route_table if start <= info.step][-1]
    wanted = np.asarray([phase[region] for region in lanes.regions])
    if np.any((info.routes != Route.FP32) & (info.routes != wanted)):
        broken.append(f"took {info.routes} where the profile says {wanted}")
    trusted = (Health.ADMITTED, Health.PROBATION)
    is_first = int(before.step) < 0
    fell = (info.routes == Route.FP32) & (info.reasons == Reason.RESIDUAL)
    fell &= (before.routes != Route.FP32) & ~np.bool_(is_first)
    can = wanted * np.asarray([reason is None for reason in lanes.fixed])
    episode.steps += 1
    episode.low_bit += int(np.count_nonzero(info.routes))
    episode.wanted += int(np.count_nonzero(can))
    episode.nonfinite += bool(np.any(info.signals.nonfinite) or not np.isfinite(info.signals.loss))
    episode.load_flips += int(bool(info.saturated) != bool(before.saturated))
    changed = np.isin(info.health_state, trusted) != np.isin(before.health_state, trusted)
    episode.health_flips = episode.health_flips + changed.astype(int)
    episode.residual_falls = episode.residual_falls + fell.astype(int)
    episode.route_flips = episode.route_flips + (info.next_routes != before.next_routes).astype(int)
    episode.trips = np.array(info.trips)  # a copy: a view would keep JAX's array alive
    return [f"{episode.kind}, step {int(info.step)}: {line}" for line in broken]


def bounds(profile: Profile, lanes: Lanes, num_steps: int) -> dict[str, float]:
    """How large each count of an episode may be at most after `num_steps`.

    - load: each saturation needs twice as many quiet steps as the one before;
    - health: after `max_trips` one more trip locks a region;
    - residual: a lane that fell stays in FP32 for `lane_hold_steps`;
    - routes: of one lane, by any of these (a group moves with its members) or by the profile.
    """
    load = 2 * math.log2(num_steps / profile.capacity.hold_steps + 1) + 1
    trips = profile.health.max_trips + 1
    health = 2 * trips + 1
    falls = num_steps / (profile.health.lane_hold_steps + 1) + 1
    largest = max(lanes.groups.count(group) for group in lanes.groups)
    routes = load + health + 2 * falls * largest + len(profile.phases)
    return {
        "load_flips": load,
        "trips": trips,
        "health_flips": health,
        "residual_falls": falls,
        "route_flips": routes,
    }


def judge_episode(episode: Episode, profile: Profile, lanes: Lanes) -> list[str]:
    """A line for each bound that an episode breaks."""
    return [
        f"{episode.kind}, {episode.steps} steps: expected at most {most:.4g} {name}, got {found}"
        for name, most in bounds(profile, lanes, episode.steps).items()
        if (found := int(np.max(getattr(episode, name)))) > most
    ]


def judge_run(found: Found, episode_steps: int, max_growth_mib: float) -> list[str]:
    """A line for each law of the whole run that does not hold."""
    broken = []
    if found.compilations[1]:
        broken.append(f"expected nothing compiled after the first episode, got {found.compilations[1]}")
    if len(set(found.arrays)) > 1:
        broken.append(f"expected as many arrays alive after every episode, got {sorted(set(found.arrays))}")
    growth = describe_memory(found.memory)["growth_mib"]
    if growth > max_growth_mib:
        broken.append(f"expected at most {max_growth_mib:g} MiB more memory, got {growth:.1f}")
    whole = [episode for episode in found.episodes if episode.steps == episode_steps]
    for episode, accuracy in zip(whole, found.accuracy, strict=True):
        if episode.kind == "calm" and episode_steps >= 200 and accuracy < 95:
            broken.append(f"expected a calm episode to learn (95 %), got {accuracy:.1f} %")
    return broken
