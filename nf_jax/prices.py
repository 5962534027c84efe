"""What a lane costs by each route where replay asks: on a substrate, through an endpoint, or both."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from nf_jax import codecs, costs
from nf_jax import endpoint as endpoints
from nf_jax.endpoint import Endpoint, Rates, Work
from nf_jax.profile import Profile, Route
from nf_jax.stages import Substrate
from nf_jax.telemetry import Lanes

_stage_seconds = jax.jit(endpoints.stage_seconds)
_LOW_BIT = (Route.SIGN, Route.TERNARY)


class Prices(NamedTuple):
    """What lanes cost, and which of them that admits.

    Attributes:
      lanes: as admitted.
      seconds: f64[L, 4], what a lane takes outside of the endpoint; NaN where nothing is known.
      work: what it brings to the endpoint, `f32[L, 4]` each; None without one.
      rates: the endpoint's numbers; None without one.
    """

    lanes: Lanes
    seconds: np.ndarray
    work: Work | None
    rates: Rates | None


def find_prices(
    profile: Profile,
    lanes: Lanes,
    num_workers: int,
    substrate: Substrate | None,
    endpoint: Endpoint | None,
) -> Prices:
    """Prices of all lanes by all routes; lanes are admitted by them where there is anything to judge by.

    Low-bit lanes pass the endpoint; the others do if it adds FP32, and else go by the substrate's
    collectives at no more than the speed of the worker's link, or, without one, by a ring at that speed.
    """
    if substrate is None and endpoint is None:
        return Prices(lanes, np.full((len(lanes.names), len(Route)), np.nan), None, None)
    if endpoint is None:
        assert substrate is not None
        seconds = costs.lane_seconds(profile, lanes, substrate)
        return Prices(costs.admit(profile, lanes, seconds), seconds, None, None)
    passes = np.asarray([r in _LOW_BIT or endpoint.fp32_elements_per_second is not None for r in Route])
    work = _work(profile, lanes, num_workers, endpoint, passes)
    rates = endpoints.rates(endpoint)
    between, local = _outside(profile, lanes, num_workers, substrate, endpoint)
    seconds = np.where(passes, local, between)
    alone = np.max(_stage_seconds(rates, work, np.asarray(num_workers, np.float32)), axis=0)
    trip = np.where(passes, endpoint.round_trip_seconds * _shares(lanes), 0)
    return Prices(_admit(profile, lanes, seconds + alone + trip), seconds, work, rates)


def _work(profile: Profile, lanes: Lanes, num_workers: int, endpoint: Endpoint, passes: np.ndarray) -> Work:
    """A lane as packed words up, and down what its codec makes of the counts.

    Votes that the endpoint cannot count, because its counters are too narrow, never end.
    """
    rows = []
    for elements, region in zip(lanes.num_elements, lanes.regions, strict=True):
        down = profile.regions[region].codec.down
        one, two = (codecs.num_planes_down(down, num_workers * planes) / 8 for planes in (1, 2))
        votes = 1 if num_workers <= endpoint.max_workers else np.inf
        # Per element: bytes up, bytes down, FP32 adds, votes; in the order of `Route`.
        parts = [(4, 4, 1, 0), (2, 2, 1, 0), (1 / 8, one, 0, votes), (2 / 8, two, 0, 2 * votes)]
        rows.append(np.asarray(parts) * elements * passes[:, None] if elements else np.zeros((4, 4)))
    fields = np.asarray(rows, np.float32).reshape(-1, len(Route), 4)
    return Work(*np.moveaxis(fields, 2, 0))


def _outside(
    profile: Profile, lanes: Lanes, num_workers: int, substrate: Substrate | None, endpoint: Endpoint
) -> tuple[np.ndarray, np.ndarray]:
    """f64[L, 4] each: seconds of a lane that workers reduce among themselves, and of a worker's own part."""
    link, sent = endpoint.link_bytes_per_second, np.asarray(lanes.wire_bytes, float).reshape(-1, len(Route))
    local = np.zeros_like(sent) if substrate is None else costs.local_seconds(profile, lanes, substrate)
    if link == 0:
        return np.where(sent > 0, np.inf, local), local
    if substrate is None:
        return sent / link + (num_workers - 1) * endpoint.round_trip_seconds * _shares(lanes), local
    # Workers reach each other over the links by which they reach the endpoint.
    limited = substrate.rescaled(link_bytes_per_second=link)
    return costs.lane_seconds(profile, lanes, limited), local


def _shares(lanes: Lanes) -> np.ndarray:
    """f64[L, 1], a lane's part of the elements that travel with it: of the latency that they share."""
    sizes, groups = np.asarray(lanes.num_elements, float), np.asarray(lanes.groups)
    together = (sizes[None] * (groups[:, None] == groups[None])).sum(1)
    return (sizes / np.maximum(together, 1))[:, None]


def _admit(profile: Profile, lanes: Lanes, seconds: np.ndarray) -> Lanes:
    """Never ends is never admitted, even where FP32 does not end either."""
    is_known = np.isfinite(seconds)
    is_known[:, Route.FP32] = True
    return costs.admit(profile, lanes, np.where(is_known, seconds, np.nan))
