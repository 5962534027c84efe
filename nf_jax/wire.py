"""Bytes that one worker sends, by lane and for the signals: `capacity.py`'s formulas over a plan's parts.

With two levels they are bytes between hosts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from nf_jax import buckets, capacity, collectives
from nf_jax.groups import Group
from nf_jax.profile import Route
from nf_jax.telemetry import Lanes


def num_signals(num_regions: int) -> int:
    """Numbers a worker contributes to the step's signals: loss, load, and per region norm and non-finite."""
    return 2 + 2 * num_regions


def lane_bytes(
    slices: Sequence[buckets.LaneSlice],
    groups: Sequence[Group],
    packed: set[int],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    num_hosts: int,
    num_inner: int,
) -> tuple[tuple[int, int, int, int], ...]:
    """Bytes per lane and route. A group's lanes share its collectives; their parts add up to the whole.

    What is always exact goes by a plain mean over all workers: a ring that is laid host by host crosses
    between hosts as often as one over hosts, once for all the devices of a host.
    """
    rows = []
    for lane in slices:
        exact = [i for i in lane.leaf_indices if i not in packed]
        sent = plain_leaf_bytes([(shapes[i], dtypes[i]) for i in exact], num_hosts * num_inner, num_inner)
        rows.append([sent] * len(Route))
    for group in groups:
        for route in Route:
            before = 0
            for position, lane in enumerate(group.lanes):
                owned = zip(group.segments, group.lane_of_leaf, strict=True)
                upto = capacity.group_bytes(
                    route,
                    [segment for segment, owner in owned if owner <= position],
                    position + 1,
                    group.codec,
                    num_hosts,
                )
                rows[lane][route] += upto - before
                before = upto
    return tuple((row[0], row[1], row[2], row[3]) for row in rows)


def signal_bytes(num_regions: int, exact_dtypes: Sequence[str], num_hosts: int, num_inner: int) -> int:
    """What a worker sends for the step's signals, whatever the routes."""
    num_workers = num_hosts * num_inner
    together = collectives.rides_along(exact_dtypes)
    sent = capacity.signal_bytes(num_signals(num_regions), num_workers, together)
    if num_inner == 1 or num_workers == 1:
        return sent
    # A ring crosses once for all devices of a host.
    if together:
        return -(-sent // num_inner)
    return gather_bytes(num_signals(num_regions), num_hosts, num_inner)


def gather_bytes(num_values: int, num_hosts: int, num_inner: int) -> int:
    """What a worker sends of an `f32[num_values]` that every device of the other hosts is handed."""
    return capacity.gather_bytes(4 * num_values, num_hosts) * num_inner


def plain_bytes(
    lanes: Lanes,
    slices: Sequence[buckets.LaneSlice],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    num_workers: int,
    num_inner: int,
) -> int:
    """What a plain mean over all workers would send; with one level, the FP32 route of every lane."""
    if num_inner == 1:
        return sum(row[Route.FP32] for row in lanes.wire_bytes)
    leaves = [(shapes[leaf], dtypes[leaf]) for lane in slices for leaf in lane.leaf_indices]
    return plain_leaf_bytes(leaves, num_workers, num_inner)


def plain_leaf_bytes(leaves: Sequence[tuple[tuple[int, ...], str]], num_workers: int, num_inner: int) -> int:
    """What a plain mean of leaves, each a shape and a dtype, would send."""
    num_bytes = sum(math.prod(shape) * _wire_itemsize(dtype) for shape, dtype in leaves)
    return -(-capacity.allreduce_bytes(num_bytes, num_workers) // num_inner)


def _wire_itemsize(dtype: str) -> int:
    """Small dtypes are averaged in 32 bits, so that a sum over workers loses and overflows nothing."""
    return max(4, jnp.dtype(dtype).itemsize)
