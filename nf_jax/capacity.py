"""Reducer capacity: bytes on the wire and who is admitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from nf_jax import codecs
from nf_jax import segments as segment_rules
from nf_jax.profile import CapacityLimits, Codec, Route
from nf_jax.segments import Segment
from nf_jax.telemetry import Array

_MAX_COUNT = 2**30  # counters saturate here


class CapacityState(NamedTuple):
    """Carried from step to step; every field is the same on all workers.

    Attributes:
      saturated: bool[], whether the reducer takes no low-bit lanes.
      wait: int32[], quiet steps in a row that it still needs; 0 where it is not saturated.
      hold: int32[], quiet steps in a row that the next saturation needs; doubles with each.
      flips: int32[], times `saturated` has changed.
    """

    saturated: Array
    wait: Array
    hold: Array
    flips: Array


def init(limits: CapacityLimits) -> CapacityState:
    """The state before the first step: not saturated."""
    zero, hold = jnp.zeros([], jnp.int32), jnp.asarray(min(limits.hold_steps, _MAX_COUNT), jnp.int32)
    return CapacityState(jnp.zeros([], jnp.bool_), zero, hold, zero)


def step(limits: CapacityLimits, state: CapacityState, reducer_load: Array) -> CapacityState:
    """One transition, with hysteresis so that routes do not flap around one threshold.

    Args:
      limits: the profile's limits (static).
      state: the state before the step.
      reducer_load: f32[], the largest load over workers; 1 is full. NaN counts as saturated.

    Returns:
      The state after the step: saturated from `max_reducer_load` on, until the load has stayed at
      `resume_reducer_load` or below for `hold_steps` steps in a row, twice as many at each further
      saturation. So `n` steps see at most `2 * log2(n / hold_steps + 1) + 1` changes of routes by load.
    """
    high = ~(reducer_load < np.asarray(limits.max_reducer_load, np.float32))
    quiet = ~high & (reducer_load <= np.asarray(limits.resume_reducer_load, np.float32))
    starts = high & ~state.saturated
    hold = jnp.where(starts, jnp.minimum(state.hold, np.int32(_MAX_COUNT // 2)) * np.int32(2), state.hold)
    # The hold of the present saturation is half of what the next one will need.
    left = jnp.where(quiet, state.wait - np.int32(1), hold // np.int32(2))
    saturated = high | (state.saturated & (left > np.int32(0)))
    flipped = saturated ^ state.saturated
    return CapacityState(
        saturated=saturated,
        wait=jnp.where(saturated, left, np.int32(0)),
        hold=hold,
        flips=jnp.minimum(state.flips + flipped.astype(jnp.int32), np.int32(_MAX_COUNT)),
    )


def allreduce_bytes(num_bytes: int, num_workers: int) -> int:
    """Bytes that one worker sends when `num_bytes` are averaged by a ring: `2 (W - 1) / W` of them."""
    return -(-2 * (num_workers - 1) * num_bytes // num_workers)


def gather_bytes(num_bytes: int, num_workers: int) -> int:
    """Bytes that one worker sends when each hands `num_bytes` to every other."""
    return (num_workers - 1) * num_bytes


def signal_bytes(num_values: int, num_workers: int, rides_along: bool) -> int:
    """Bytes that one worker sends so that all have every worker's `f32[num_values]`.

    A gather, or a row of its own in the all-reduce of the leaves that are always exact.
    """
    if rides_along:
        return allreduce_bytes(4 * num_values * num_workers, num_workers)
    return gather_bytes(4 * num_values, num_workers)


def agree_bytes(num_values: int, num_workers: int) -> int:
    """Bytes that one worker sends in `collectives.agree`: bf16, one phase for two workers, else two."""
    if num_workers == 2:
        return gather_bytes(2 * num_values, num_workers)
    return 2 * gather_bytes(2 * -(-num_values // num_workers), num_workers)


def group_bytes(
    route: Route, segments: Sequence[Segment], num_lanes: int, codec: Codec, num_workers: int
) -> int:
    """Bytes that one worker sends to average the packable leaves of some lanes by `route`.

    Exact, everything counted: words, scales, sketches, levels and the lanes' statistics. A test compares
    it with the collectives of the compiled program.

    Args:
      route: how they travel.
      segments: the leaves, as they are cut into shards.
      num_lanes: lanes these leaves belong to.
      codec: the codec settings of their region.
      num_workers: `W`.

    Returns:
      Bytes; 0 where there is nothing to send.
    """
    if not segments:
        return 0
    if route == Route.FP32:
        return allreduce_bytes(4 * sum(segment.size for segment in segments), num_workers)
    shard_size = sum(segment.shard_size for segment in segments)
    if route == Route.BF16:
        return gather_bytes(4 * shard_size + 8 * num_lanes, num_workers)
    up_planes = 1 if route == Route.SIGN else 2
    plane_bytes = shard_size // 8
    scales = sum(segment.scale_size for segment in segments) + segment_rules.SKETCH_SIZE * num_lanes
    if codecs.goes_straight(codec.down, num_workers, up_planes):
        votes = gather_bytes(num_workers * up_planes * plane_bytes + 4 * num_lanes, num_workers)
    else:
        down = codecs.num_planes_down(codec.down, num_workers * up_planes) * plane_bytes
        levels = 0 if codec.down == "count" else 4 * len(segments)
        votes = gather_bytes(up_planes * plane_bytes + down + levels + 8 * num_lanes, num_workers)
    return agree_bytes(scales, num_workers) + votes
