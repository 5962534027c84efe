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

from collections.abc import Sequence

import numpy as np

from nf_jax import codecs
from nf_jax.profile import Codec, Profile, Route
from nf_jax.stages import COLLECTIVES, OWN_STAGE, STAGES, StageName, Substrate
from nf_jax.telemetry import Lanes, Reason

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
