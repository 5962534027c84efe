"""The plan: from parameter shapes and a profile to buckets, lanes, groups and exact bytes. All static.

A plan is recomputed at trace time, never stored: it depends on shapes, the profile and `W` alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nf_jax import buckets, costs, regions, wire
from nf_jax import segments as segment_rules
from nf_jax.groups import Group
from nf_jax.profile import Leaf, Model, Profile, Route
from nf_jax.segments import Segment
from nf_jax.stages import Substrate
from nf_jax.telemetry import Lanes, Reason

MAX_GROUPS = 16
# A leaf that would be padded with more than this many of its own size stays exact. At the limit a sign takes
# two bits, a sixteenth of FP32, and a small network's early layers are no larger.
MAX_PAD_RATIO = 1.0
# Alike leaves up to this many elements are worked on as one array; larger ones would pay for the copy.
MAX_STACKED_SIZE = 2**16
# Rows are found by int32 indices, so a leaf of more rows stays exact; it may have any number of elements.
MAX_ROWS = 2**31 - 1
_PACKABLE = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is routed how, from shapes alone.

    Attributes:
      num_workers: `W`, of all hosts.
      num_inner: devices of a host that average among themselves first; 1: a single level.
      paths, shapes, dtypes, leaf_regions: one entry per leaf of the flattened tree.
      lanes: one entry per lane (bucket x region), the form that controller, telemetry and replay share.
      lane_leaves: indices of every lane's leaves, packable or not.
      lane_buckets: the bucket of every lane.
      groups: lanes that switch together, with their packable leaves.
      exact: indices of the leaves that always travel in full precision.
      idle: indices of the leaves that do not travel: size 0, or without a gradient (`float0`).
      overhead_bytes: what a worker sends for the signals at every step, whatever the routes.
      fp32_bytes: what a worker would send with a plain mean of everything.

    Bytes are those that a worker sends to other hosts, where `num_inner` is not 1.
    """

    num_workers: int
    num_inner: int
    paths: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    leaf_regions: tuple[int, ...]
    lanes: Lanes
    lane_leaves: tuple[tuple[int, ...], ...]
    lane_buckets: tuple[int, ...]
    groups: tuple[Group, ...]
    exact: tuple[int, ...]
    idle: tuple[int, ...]
    overhead_bytes: int
    fp32_bytes: int

    @property
    def num_hosts(self) -> int:
        """Members of the outer level, between which lanes are routed: `W` where there is one level."""
        return self.num_workers // self.num_inner

    @property
    def num_lanes(self) -> int:
        return len(self.lane_leaves)

    @property
    def protected_share(self) -> float:
        """Part of the travelling elements that may only travel in full precision."""
        packable = sum(s.size * s.num_inner for group in self.groups for s in group.segments)
        total = sum(self.lanes.num_elements)
        return 1 - packable / total if total else 0.0

    def residual_shape(self, leaf: int, segment: Segment) -> tuple[int, ...]:
        """The shape of a leaf's residual: the leaf's, or its piece's where there are two levels."""
        return self.shapes[leaf] if self.num_inner == 1 else segment.matrix_shape

    @property
    def fingerprint(self) -> str:
        """What a state depends on, hashed: workers, lanes, groups with their codecs and routes."""
        parts = (
            self.num_workers,
            self.num_inner,
            self.lanes.names,
            self.lanes.groups,
            self.lanes.fixed,
            self.groups,
        )
        paths = [[self.paths[leaf] for leaf in group.leaves] for group in self.groups]
        return f"{zlib.crc32(repr((parts, paths)).encode()):08x}"

    def wire_bytes(self, routes: Sequence[int]) -> int:
        """Bytes that one worker sends in a step with these routes, one per lane, signals included."""
        if len(routes) != self.num_lanes:
            raise ValueError(f"expected one route per lane ({self.num_lanes}), got {len(routes)}")
        table = self.lanes.wire_bytes
        return sum(row[int(r)] for row, r in zip(table, routes, strict=True)) + self.overhead_bytes


def plan(
    profile: Profile,
    params: Any,
    num_workers: int | tuple[int, int],
    *,
    substrate: Substrate | None = None,
) -> Plan:
    """Plans the routing of a gradient tree shaped like `params`.

    Args:
      profile: the operating profile.
      params: a pytree of arrays, or of anything with a shape and a dtype (`jax.eval_shape`).
      num_workers: size of the data-parallel axis; `(hosts, devices)` for two levels.
      substrate: what was measured between these workers (between hosts, for two levels): lanes that it
        predicts to gain too little by going low-bit stay in FP32. None: only the size floor applies.

    Returns:
      The plan.

    Raises:
      ValueError: a leaf that no region matches, a dtype without a mean, a model that is not the profile's,
        a substrate of another number of workers.

    Example:
      >>> import jax, nf_jax
      >>> params = {"dense": jax.ShapeDtypeStruct((512, 512), "float32")}
      >>> nf_jax.plan(nf_jax.Profile.static(nf_jax.Route.SIGN), params, num_workers=8).protected_share
      0.0
    """
    num_hosts, num_inner = to_levels(num_workers)
    named, _ = regions.leaves_with_paths(params)
    paths = tuple(path for path, _ in named)
    shapes = tuple(tuple(np.shape(leaf)) for _, leaf in named)
    dtypes = tuple(_dtype_name(path, leaf) for path, leaf in named)
    profile.check_model(
        [Leaf(path=p, shape=s, dtype=d) for p, s, d in zip(paths, shapes, dtypes, strict=True)]
    )
    leaf_regions = regions.assign_regions(paths, [region.pattern for region in profile.regions])
    idle = tuple(i for i, d in enumerate(dtypes) if d == "float0" or math.prod(shapes[i]) == 0)

    slices = _cut(profile, paths, shapes, dtypes, leaf_regions, idle)
    segments = {
        i: segment
        for i in range(len(paths))
        if i not in idle
        and (segment := _segment(profile, leaf_regions[i], shapes[i], dtypes[i], num_hosts, num_inner))
    }

    def route_lanes(fixed: tuple[Reason | None, ...]) -> tuple[Lanes, tuple[Group, ...]]:
        keys = [None if reason is not None else s.region for s, reason in zip(slices, fixed, strict=True)]
        group_ids = buckets.merge_groups(keys, MAX_GROUPS)
        groups = tuple(
            _group(profile, slices, segments, dtypes, [i for i, g in enumerate(group_ids) if g == number])
            for number in range(max(group_ids, default=-1) + 1)
        )
        packed = {leaf for group in groups for leaf in group.leaves}
        lanes = Lanes(
            names=tuple(f"{s.bucket}/{profile.regions[s.region].name}" for s in slices),
            regions=tuple(s.region for s in slices),
            groups=group_ids,
            fixed=fixed,
            num_elements=tuple(sum(math.prod(shapes[i]) for i in s.leaf_indices) for s in slices),
            wire_bytes=wire.lane_bytes(slices, groups, packed, shapes, dtypes, num_hosts, num_inner),
        )
        return lanes, groups

    lanes, groups = route_lanes(tuple(_fixed_reason(profile, s, segments, num_hosts) for s in slices))
    if substrate is not None:
        substrate.check_workers(num_hosts)
        asked = costs.admit(profile, lanes, costs.lane_seconds(profile, lanes, substrate))
        lanes, groups = route_lanes(asked.fixed)
        lanes = lanes._replace(pays=asked.pays, wire_bytes=_keep_asked(lanes, asked))
    packed = {leaf for group in groups for leaf in group.leaves}
    exact = tuple(i for i in range(len(paths)) if i not in packed and i not in idle)
    return Plan(
        num_workers=num_hosts * num_inner,
        num_inner=num_inner,
        paths=paths,
        shapes=shapes,
        dtypes=dtypes,
        leaf_regions=leaf_regions,
        lanes=lanes,
        lane_leaves=tuple(s.leaf_indices for s in slices),
        lane_buckets=tuple(s.bucket for s in slices),
        groups=groups,
        exact=exact,
        idle=idle,
        overhead_bytes=wire.signal_bytes(
            len(profile.regions), [dtypes[i] for i in exact], num_hosts, num_inner
        ),
        fp32_bytes=wire.plain_bytes(lanes, slices, shapes, dtypes, num_hosts * num_inner, num_inner),
    )


def model_shapes(model: Model) -> Any:
    """The leaves of a profile's model, as `plan` takes them."""
    return {
        leaf.path: jax.ShapeDtypeStruct(leaf.shape, _to_dtype(f"model.leaves[{index}].dtype", leaf.dtype))
        for index, leaf in enumerate(model.leaves)
    }


def _to_dtype(where: str, name: str) -> Any:
    if re.fullmatch("[a-z]+[0-9][a-z0-9_]*|bool", name):  # of what else NumPy reads, nothing is meant here
        with contextlib.suppress(TypeError):
            if (dtype := np.dtype(name)).name == name:
                return dtype
    raise ValueError(f"{where}: expected the name of a dtype, such as float32, got {name!r}")


def _keep_asked(lanes: Lanes, asked: Lanes) -> tuple[tuple[int, int, int, int], ...]:
    """Bytes per lane and route; of routes that did not pay, what they would have sent: replay may ask."""
    rows = zip(lanes.wire_bytes, asked.wire_bytes, asked.fixed, strict=True)
    return tuple((sent[0], *(old if reason == Reason.SLOWER else sent)[1:]) for sent, old, reason in rows)


def to_levels(num_workers: Any) -> tuple[int, int]:
    """`(hosts, devices of a host)`: `W` alone is `W` hosts of one device."""
    pair = tuple(num_workers) if isinstance(num_workers, (tuple, list)) else (num_workers, 1)
    if len(pair) != 2 or any(type(n) is not int or n < 1 for n in pair):
        raise ValueError(
            "num_workers: expected a positive int, or a pair (hosts, devices of each host), "
            f"got {num_workers!r}"
        )
    return pair


def _dtype_name(path: str, leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        dtype = jnp.result_type(leaf)
    if dtype == jax.dtypes.float0:
        return "float0"
    if not (jnp.issubdtype(dtype, jnp.number)):
        raise ValueError(
            f"leaf {path!r}: expected a float, complex or integer dtype, got {dtype}, which has no mean. "
            "Leave it out of the gradient tree."
        )
    return jnp.dtype(dtype).name


def _cut(
    profile: Profile,
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
    leaf_regions: Sequence[int],
    idle: Sequence[int],
) -> tuple[buckets.LaneSlice, ...]:
    sizes = [
        0 if i in idle else math.prod(shape) * jnp.dtype(dtype).itemsize
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    order = buckets.backward_order(paths, profile.buckets.order)
    formed = buckets.form_buckets(
        sizes, dtypes, order, profile.buckets.first_bytes, profile.buckets.cap_bytes
    )
    return buckets.cut_lanes(formed, leaf_regions)


def _segment(
    profile: Profile, region: int, shape: tuple[int, ...], dtype: str, num_hosts: int, num_inner: int
) -> Segment | None:
    """How a leaf is cut into shards, or None where it may only travel exactly."""
    is_lossy = any(route != Route.FP32 for route in profile.routes_of(region))
    if num_hosts == 1 or not is_lossy or dtype not in _PACKABLE or not shape:
        return None
    if math.prod(shape) % num_inner:
        return None
    scale = profile.regions[region].codec.scale
    segment = segment_rules.make_segment(shape, num_hosts, scale, num_inner)
    if segment.num_workers * segment.shard_rows > MAX_ROWS:
        return None
    return segment if segment.num_pads <= MAX_PAD_RATIO * segment.size else None


def _fixed_reason(
    profile: Profile, lane: buckets.LaneSlice, segments: dict[int, Segment], num_hosts: int
) -> Reason | None:
    """Why the lane can only be FP32, or None."""
    if num_hosts == 1:
        return Reason.SINGLE_WORKER
    if all(route == Route.FP32 for route in profile.routes_of(lane.region)):
        return Reason.PROTECTED
    found = [segments[i] for i in lane.leaf_indices if i in segments]
    packable = sum(segment.size * segment.num_inner for segment in found)
    if not packable:
        return Reason.UNSUITABLE
    return Reason.SMALL if 4 * packable < profile.capacity.min_lane_bytes else None


def _group(
    profile: Profile,
    slices: Sequence[buckets.LaneSlice],
    segments: dict[int, Segment],
    dtypes: Sequence[str],
    lanes: Sequence[int],
) -> Group:
    members = [
        (position, leaf)
        for position, lane in enumerate(lanes)
        for leaf in slices[lane].leaf_indices
        if leaf in segments
    ]
    kinds: dict[Any, list[tuple[int, int]]] = {}
    for position, leaf in members:
        alone = segments[leaf].size > MAX_STACKED_SIZE
        kinds.setdefault((segments[leaf], dtypes[leaf], leaf if alone else None), []).append((position, leaf))
    members = [member for kind in kinds.values() for member in kind]
    region = slices[lanes[0]].region
    return Group(
        lanes=tuple(lanes),
        leaves=tuple(leaf for _, leaf in members),
        segments=tuple(segments[leaf] for _, leaf in members),
        lane_of_leaf=tuple(position for position, _ in members),
        stacks=tuple(len(kind) for kind in kinds.values()),
        codec=profile.regions[region].codec,
        routes=profile.routes_of(region),
    )
