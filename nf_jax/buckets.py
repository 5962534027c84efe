"""Buckets of leaves as PyTorch DDP forms them, cut into lanes, and lanes put into groups."""

from __future__ import annotations

import collections
import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from nf_jax.regions import quote_paths

PathKey = tuple[tuple[tuple[str | int, ...], ...], str]


class LaneSlice(NamedTuple):
    """The leaves of one bucket that belong to one region: what is routed together.

    Static Python data, the same on all workers.

    Attributes:
      bucket: index of the bucket in the order of ``form_buckets``.
      region: index of the region in the profile.
      leaf_indices: positions in the flattened tree, in backward order.
    """

    bucket: int
    region: int
    leaf_indices: tuple[int, ...]


def natural_key(path: str) -> PathKey:
    """Sort key under which numbers in a path count as numbers.

    Use it to recover the order of definition from names: ``block_2`` comes before ``block_10``.

    Args:
      path: a ``/``-joined path.

    Returns:
      A key for ``sorted``; different paths have different keys.

    Example:
      >>> sorted(["block_10/bias", "block_2/bias"], key=natural_key)
      ['block_2/bias', 'block_10/bias']
    """
    # The capturing group makes text and digits alternate, so that only like is compared to like.
    split_names = (re.split(r"([0-9]+)", name) for name in path.split("/"))
    names = tuple(
        tuple(int(part) if index % 2 else part for index, part in enumerate(parts)) for parts in split_names
    )
    return names, path


def backward_order(paths: Sequence[str], order: Sequence[str] | None = None) -> tuple[int, ...]:
    """Orders leaves as a backward pass is expected to finish them: last defined, first done.

    Use it before ``form_buckets``. The tree does not know the order of definition (JAX sorts the
    keys of a dict), so it is the natural order of the paths unless ``order`` lists it.

    Args:
      paths: one path per leaf; no two the same.
      order: the same paths in definition order, or None.

    Returns:
      Positions in ``paths``, the last defined leaf first.

    Raises:
      ValueError: ``order`` is not exactly the paths of the leaves.

    Example:
      >>> backward_order(["block_10", "block_2", "stem"], order=["stem", "block_2", "block_10"])
      (0, 1, 2)
    """
    if order is None:
        defined = sorted(range(len(paths)), key=lambda index: natural_key(paths[index]))
        return tuple(reversed(defined))
    _check_order(paths, order)
    position = {path: index for index, path in enumerate(paths)}
    return tuple(position[path] for path in reversed(order))


def _check_order(paths: Sequence[str], order: Sequence[str]) -> None:
    expected, given = set(paths), collections.Counter(order)
    differences = {
        "missing": [path for path in paths if path not in given],
        "not a leaf of the model": [path for path in given if path not in expected],
        "listed more than once": [path for path, count in given.items() if count > 1],
    }
    found = [f"{what}: {quote_paths(which)}" for what, which in differences.items() if which]
    if found:
        raise ValueError(
            f"expected buckets.order to list each of the model's {len(paths)} leaf paths once, in "
            f"definition order, got {len(order)} paths; {'; '.join(found)}. Correct the list, or "
            "leave it out to order the leaves by name."
        )


def form_buckets(
    sizes_bytes: Sequence[int],
    dtypes: Sequence[Hashable],
    order_indices: Sequence[int],
    first_bytes: int,
    cap_bytes: int,
) -> tuple[tuple[int, ...], ...]:
    """Gathers leaves into buckets, by the rule of PyTorch's ``DistributedDataParallel``.

    Use it at trace time. Leaves are taken in backward order, each into the open bucket of its
    dtype. A bucket closes as soon as it holds its cap or more, so it overshoots by at most its
    last leaf, and a leaf is never split. The first bucket of each dtype has the small cap, so
    that something can leave early; the caps count per dtype, as they do in DDP.

    Args:
      sizes_bytes: size of every leaf, in bytes. A leaf of size 0 moves nothing and is in no bucket.
      dtypes: dtype of every leaf (anything hashable).
      order_indices: positions of the leaves in backward order.
      first_bytes: cap of the first bucket of a dtype, in bytes.
      cap_bytes: cap of all later ones, in bytes.

    Returns:
      The leaf positions of every bucket, in backward order inside a bucket; buckets are ordered
      by when their first leaf comes.

    Example:
      >>> form_buckets([4, 4, 4, 4], ["f32"] * 4, [3, 2, 1, 0], first_bytes=4, cap_bytes=8)
      ((3,), (2, 1), (0,))
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    held_bytes: dict[Hashable, int] = {}
    caps = dict.fromkeys(dtypes, first_bytes)
    for leaf in order_indices:
        size, dtype = sizes_bytes[leaf], dtypes[leaf]
        if size == 0:
            continue
        if dtype not in open_buckets:
            open_buckets[dtype], held_bytes[dtype] = [], 0
            buckets.append(open_buckets[dtype])
        open_buckets[dtype].append(leaf)
        held_bytes[dtype] += size
        if held_bytes[dtype] >= caps[dtype]:
            del open_buckets[dtype]
            caps[dtype] = cap_bytes
    return tuple(tuple(bucket) for bucket in buckets)


def cut_lanes(buckets: Sequence[Sequence[int]], regions: Sequence[int]) -> tuple[LaneSlice, ...]:
    """Cuts every bucket by region, so that a mixed bucket can take several routes.

    Use it after ``form_buckets`` and ``regions.assign_regions``.

    Args:
      buckets: the leaf positions of every bucket.
      regions: the region index of every leaf.

    Returns:
      The lanes, bucket by bucket; inside a bucket in the order in which its regions first
      appear. The leaves of a lane keep their order.

    Example:
      >>> [tuple(lane) for lane in cut_lanes([(3, 2, 1)], regions=[0, 0, 1, 0])]
      [(0, 0, (3, 1)), (0, 1, (2,))]
    """
    lanes: dict[tuple[int, int], list[int]] = {}
    for bucket, leaves in enumerate(buckets):
        for leaf in leaves:
            lanes.setdefault((bucket, regions[leaf]), []).append(leaf)
    return tuple(LaneSlice(bucket, region, tuple(leaves)) for (bucket, region), leaves in lanes.items())


def merge_groups(lane_keys: Sequence[Hashable], max_groups: int) -> tuple[int, ...]:
    """Puts lanes into groups that switch together, to keep the number of switches small.

    Use it at trace time: compile time grows with the number of switches. Lanes share a group
    only if their keys are equal (say region and route set). As long as there are no more lanes
    than ``max_groups`` each is its own group; beyond that the lanes of a key are cut into
    contiguous runs of near-equal count, and the keys with the most lanes get the most runs.

    Args:
      lane_keys: one key per lane; None for a lane that is never switched.
      max_groups: how many groups to aim at; exceeded only by the number of distinct keys.

    Returns:
      A group id per lane, numbered from 0 by first lane; -1 where the key is None.

    Raises:
      ValueError: ``max_groups`` is less than 1.

    Example:
      >>> merge_groups(["a", "a", None, "a", "b"], max_groups=3)
      (0, 0, -1, 1, 2)
    """
    if max_groups < 1:
        raise ValueError(f"expected max_groups to be at least 1, got {max_groups}")
    lanes_of: dict[Hashable, list[int]] = {}
    for lane, key in enumerate(lane_keys):
        if key is not None:
            lanes_of.setdefault(key, []).append(lane)
    num_runs = _share_runs([len(lanes) for lanes in lanes_of.values()], max_groups)
    run_of: dict[int, tuple[Hashable, int]] = {}
    for (key, lanes), num in zip(lanes_of.items(), num_runs, strict=True):
        run_of |= {lane: (key, index * num // len(lanes)) for index, lane in enumerate(lanes)}
    ids: dict[tuple[Hashable, int], int] = {}
    return tuple(
        ids.setdefault(run_of[lane], len(ids)) if lane in run_of else -1 for lane in range(len(lane_keys))
    )


def _share_runs(counts: Sequence[int], max_groups: int) -> list[int]:
    """Shares ``max_groups`` runs over keys: one each, then to whichever has the longest runs."""
    num_runs = [1] * len(counts)
    for _ in range(min(max_groups, sum(counts)) - len(counts)):
        longest = max(range(len(counts)), key=lambda key: counts[key] / num_runs[key])
        num_runs[longest] += 1
    return num_runs
