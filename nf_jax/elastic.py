"""Other workers than before: residuals that go on, and what the mean still owes where they cannot.

A worker's residual enters the mean divided by `W`, so what the mean owes an element is the mean of all
workers' residuals there plus the residual of the server that reduces it. Both are conserved, to rounding.
All of this runs on the host, on states as `host_state` or `checkpoint.read` return them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nf_jax import controller, segments
from nf_jax.plan import Plan
from nf_jax.pmean import Memory
from nf_jax.profile import Profile
from nf_jax.segments import Segment
from nf_jax.state import AggregateState, Layout, check_layout, find_states, is_aggregate


class Resized(NamedTuple):
    """A state for other workers.

    Attributes:
      state: a host state, for `training.replicate` or `training.place`.
      unpaid: path -> `f32[*shape]`, gradient units: what the mean still owes leaves that keep no residuals
        any more, because they can only be exact between so many workers. Empty where all can be kept. Add
        it to every worker's gradients at the first step to pay it, or let it go, as a profile does with
        `on_fallback = "drop"`.
    """

    state: Any
    unpaid: dict[str, np.ndarray]


def resize(state: Any, profile: Profile, plan: Plan) -> Resized:
    """Makes a state for another number of workers, or other levels, of the same model and profile.

    Parameters and optimizer stay as they are, and so do step, health, capacity and all counters. Routes of
    the next step are chosen anew, by the new plan. Residuals are handed on:

    - Old and new hosts share the unit interval evenly, in order; a new host gets the mean of the old
      residuals weighted by its overlap with each. Fewer hosts average neighbours', more hosts copy them.
    - The server residual is put together and cut into the new shards; where the new plan keeps none (two
      hosts count exactly), it goes into the residuals of all, and the other way round.
    - What has no place in the new plan is returned as `unpaid`.
    - A shadow only measures: it is left out, and begins anew with `state._replace(shadow=fresh.shadow)`.

    Args:
      state: a host state (`host_state`, `checkpoint.read`) with one or more `AggregateState`s.
      profile: the operating profile, with the regions that the state was made for.
      plan: of the new workers: `nf_jax.plan(profile, params, num_workers, substrate=...)`.

    Returns:
      The state and what is unpaid, summed over the `AggregateState`s.

    Raises:
      ValueError: the state is not a host state, or was made for other regions, lanes or leaves.

    Example:
      >>> import jax, jax.numpy as jnp, nf_jax
      >>> from nf_jax import elastic
      >>> params = {"kernel": jnp.ones((64, 64))}
      >>> profile = nf_jax.Profile.static(nf_jax.Route.SIGN)
      >>> tx = nf_jax.aggregate_gradients(profile, axis="batch", num_workers=4)
      >>> resized = elastic.resize(tx.init(params), profile, nf_jax.plan(profile, params, 2))
      >>> int(resized.state.num_workers), resized.unpaid
      (2, {})
    """
    unpaid: dict[str, np.ndarray] = {}

    def visit(node: Any) -> Any:
        if not is_aggregate(node):
            return node
        _check(node, profile, plan)
        resized, left = _resize(node, profile, plan)
        for path, value in left.items():
            unpaid[path] = unpaid.get(path, np.float32(0)) + value
        return resized

    if not find_states(state):
        raise ValueError("resize: expected a state with an aggregate_gradients in it, found none")
    return Resized(jax.tree.map(visit, state, is_leaf=is_aggregate), unpaid)


def owed(state: Any, plan: Plan) -> dict[str, np.ndarray]:
    """What the mean still owes each leaf that keeps residuals: `f32[*shape]` by path, gradient units.

    Added to every worker's gradients it is paid: for those who take nf_jax out, or ask how much it is.

    Args:
      state: a host state, or a part of it, with one `AggregateState`.
      plan: any plan of the model: its paths and shapes are read.
    """
    ((_, aggregate),) = find_states(state)
    return _owed(*_wholes(aggregate, plan), plan)


def share(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """`[n, ...]` -> `f64[num_rows, ...]` with the same mean, every row a weighted mean of old neighbours."""
    # On a line of n * num_rows units, an old row is num_rows of them long and a new one n.
    old, new = np.arange(len(rows)), np.arange(num_rows)[:, None]
    stop = np.minimum((new + 1) * len(rows), (old + 1) * num_rows)
    overlap = np.maximum(stop - np.maximum(new * len(rows), old * num_rows), 0)
    return np.tensordot(overlap / len(rows), rows.astype(np.float64), axes=1)


def _resize(
    state: AggregateState, profile: Profile, plan: Plan
) -> tuple[AggregateState, dict[str, np.ndarray]]:
    residual, server = _wholes(state, plan)
    kept: dict[str, Any] = {}
    reduced: dict[str, Any] = {}
    pending = []
    for group in plan.groups:
        dtype = jnp.dtype(group.codec.residual_dtype)
        for leaf, segment in zip(group.leaves, group.segments, strict=True):
            path, none = plan.paths[leaf], np.zeros((1, math.prod(plan.shapes[leaf])), np.float32)
            if not (group.keeps_residual or group.keeps_server_residual):
                continue
            hosts = share(residual.pop(path, none), plan.num_hosts)
            whole = server.pop(path, none[0])
            if not group.keeps_server_residual:
                hosts, whole = hosts + whole, none[0]
            elif not group.keeps_residual:
                hosts, whole = none, hosts.mean(0) + whole
            if group.keeps_residual:
                shape = (plan.num_workers, *plan.residual_shape(leaf, segment))
                kept[path] = hosts.reshape(shape).astype(dtype)
            if group.keeps_server_residual:
                reduced[path] = _cut(whole, segment)
        paths = [plan.paths[leaf] for leaf in group.leaves]
        pending.append(any(np.any(part[path]) for part in (kept, reduced) for path in paths if path in part))
    routes, reasons = controller.choose_routes(profile, plan.lanes, state.step, state.health, state.capacity)
    new = state._replace(
        pending=np.asarray(pending, bool),
        memory=Memory(kept, reduced),
        info=state.info._replace(next_routes=np.asarray(routes), next_reasons=np.asarray(reasons)),
        num_workers=np.int32(plan.num_workers),
        layout=Layout(plan.fingerprint, plan.num_inner),
        shadow=None,
    )
    return new, {path: left for path, left in _owed(residual, server, plan).items() if left.any()}


def _owed(
    residual: Mapping[str, np.ndarray], server: Mapping[str, np.ndarray], plan: Plan
) -> dict[str, np.ndarray]:
    totals = {path: rows.astype(np.float64).mean(0) for path, rows in residual.items()}
    for path, whole in server.items():
        totals[path] = totals.get(path, np.float64(0)) + whole
    shapes = dict(zip(plan.paths, plan.shapes, strict=True))
    return {path: total.astype(np.float32).reshape(shapes[path]) for path, total in totals.items()}


def _wholes(state: AggregateState, plan: Plan) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Residuals `[hosts, size]`, and server residuals `f32[size]`, of whole leaves, by path."""
    num_workers, num_inner = int(state.num_workers), state.layout.num_inner
    num_hosts = num_workers // num_inner
    shapes = dict(zip(plan.paths, plan.shapes, strict=True))

    def rows_of(path: str, rows: Any, size: int) -> np.ndarray:
        rows = np.asarray(rows)
        if path not in shapes or rows[0].size != size:
            raise ValueError(
                f"residual {path!r}: expected a leaf of the plan's with {size} elements in a worker's share, "
                f"got {rows[0].size}; the state is another model's"
            )
        # A fresh state has one row, of zeros, for all.
        return np.broadcast_to(rows, (num_workers, *rows.shape[1:])).reshape(num_hosts, num_inner, -1)

    residual, server = {}, {}
    for path, rows in state.memory.residual.items():
        size = math.prod(shapes.get(path, ()))
        residual[path] = rows_of(path, rows, size // num_inner).reshape(num_hosts, size)
    for path, rows in state.memory.server_residual.items():
        segment = segments.make_segment(shapes.get(path, ()), num_hosts, "leaf", num_inner)
        server[path] = _join(rows_of(path, rows, segment.shard_size), segment)
    return residual, server


def _join(shards: np.ndarray, segment: Segment) -> np.ndarray:
    """`[hosts, devices, shard_size]` -> `[size]` of the whole leaf: a device's shards are its piece."""
    rows = np.moveaxis(shards[..., : segment.shard_rows * segment.cols], 0, 1)
    return rows.reshape(segment.num_inner, -1)[:, : segment.size].reshape(-1)


def _cut(whole: np.ndarray, segment: Segment) -> np.ndarray:
    """`[size]` of the whole leaf -> `f32[W, shard_size]`: the inverse of `_join`."""
    pieces = whole.reshape(segment.num_inner, segment.size)
    length = segment.shard_rows * segment.cols
    padded = np.pad(pieces, ((0, 0), (0, segment.num_workers * length - segment.size)))
    shards = np.moveaxis(padded.reshape(segment.num_inner, segment.num_workers, length), 0, 1)
    shards = shards.reshape(-1, length)
    return np.pad(shards, ((0, 0), (0, segment.shard_size - length))).astype(np.float32)


def _check(state: AggregateState, profile: Profile, plan: Plan) -> None:
    if state.step.ndim:
        raise ValueError("resize: expected a host state, got pmap's; give it host_state(state)")
    check_layout("<state>", state)
    found = state.health.state.shape[0], state.health.lane_wait.shape[0]
    if found != (len(profile.regions), plan.num_lanes):
        raise ValueError(
            f"resize: expected a state of {len(profile.regions)} regions and {plan.num_lanes} lanes, as the "
            f"profile and the plan have them, got {found[0]} and {found[1]}: another model, or other regions "
            "or buckets, whose health does not carry over"
        )
