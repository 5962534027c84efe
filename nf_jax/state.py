"""The transform's state: what it holds, how it is laid out over workers, and how to read it from outside."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nf_jax import capacity, health
from nf_jax.collectives import AxisName
from nf_jax.pmean import Memory
from nf_jax.regions import path_string
from nf_jax.telemetry import ShadowInfo, StepInfo


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layout:
    """The plan that a state was made for, as part of its tree structure: it holds no array.

    Attributes:
      fingerprint: of the plan.
      num_inner: devices of a host that average among themselves first; 1: a single level.
    """

    fingerprint: str
    num_inner: int = 1


class ShadowState(NamedTuple):
    """What a shadow run carries beside: nothing of it reaches the updates.

    Attributes:
      memory: residuals of every candidate; differ between workers.
      info: what the last step measured; the same on all workers.
      layout: the shadow plan it was made for; static.
    """

    memory: tuple[Memory, ...]
    info: ShadowInfo
    layout: Layout


class AggregateState(NamedTuple):
    """What `aggregate_gradients` carries from step to step. `init` returns one worker's view.

    Attributes:
      step: `int32[]`, steps taken; the same on all workers, as is everything but `memory` and the
        shadow's.
      pending: `bool[G]`, groups whose residuals the next exact step settles.
      memory: residuals, `[1, *shape]` and `[1, shard_size]`: the leading dimension is the worker's own, so
        that `shard_map` can lay them out under `P(axis)`; differ between workers.
      health: the health state machine.
      capacity: the reducer's state.
      info: what the last step did, and the routes of the next one.
      num_workers: `int32[]`, what the state was made for.
      layout: the plan it was made for; static.
      shadow: what candidates would have built up; None without shadow mode.
    """

    step: Array
    pending: Array
    memory: Memory
    health: health.HealthState
    capacity: capacity.CapacityState
    info: StepInfo
    num_workers: Array
    layout: Layout
    shadow: ShadowState | None = None


def step_info(state: Any) -> StepInfo:
    """What the last step did: routes and reasons per lane, bytes, health, signals.

    Args:
      state: an optimizer state, a Flax TrainState or any pytree that holds one `AggregateState`: inside
        the mapped function, or outside it as pmap (stacked) or shard_map (global) return it.

    Returns:
      The `StepInfo`; `info.step` is -1 before the first step. `nf_jax.report.explain_step(info,
      profile.region_names, plan.lanes)` puts health, routes and reasons into sentences.

    Raises:
      ValueError: there is none, there are several (their paths are listed; pass a part of the state),
        or the per-worker part was laid out as if it were replicated.

    Example:
      >>> import jax, optax, nf_jax
      >>> tx = nf_jax.aggregate_gradients(nf_jax.Profile.static("FP32"), axis="batch", num_workers=1)
      >>> int(nf_jax.step_info(tx.init({"kernel": jax.numpy.ones(4)})).step)
      -1
    """
    aggregate = _only_state(state, "step_info")
    if aggregate.step.ndim:
        return jax.tree.map(_first_worker, aggregate.info)
    return aggregate.info


def shadow_info(state: Any) -> ShadowInfo:
    """What candidates would have done in the last step (`aggregate_gradients(..., shadow=True)`).

    Args:
      state: as `step_info` takes it.

    Returns:
      The `ShadowInfo`; `info.step` is -1 before the first step.

    Raises:
      ValueError: as `step_info`, or the state was made without shadow mode.

    Example:
      >>> import jax, optax, nf_jax
      >>> tx = nf_jax.aggregate_gradients(
      ...     nf_jax.Profile.static("FP32"), axis="batch", num_workers=8, shadow=True
      ... )
      >>> nf_jax.shadow_info(tx.init({"kernel": jax.numpy.ones((64, 64))})).cosine.shape
      (5, 1)
    """
    aggregate = _only_state(state, "shadow_info")
    if aggregate.shadow is None:
        raise ValueError(
            "shadow_info: expected a state of aggregate_gradients(..., shadow=True), got one without shadow"
        )
    if aggregate.step.ndim:
        return jax.tree.map(_first_worker, aggregate.shadow.info)
    return aggregate.shadow.info


def _only_state(state: Any, asked: str) -> AggregateState:
    found = find_states(state)
    if len(found) != 1:
        raise ValueError(
            f"{asked}: expected a state with one aggregate_gradients in it, got "
            + (
                f"{len(found)}, at {', '.join(path for path, _ in found)}; pass one of them"
                if found
                else "none"
            )
            + "."
        )
    ((path, aggregate),) = found
    check_layout(path, aggregate)
    return aggregate


def state_spec(state: Any, axis: AxisName) -> Any:
    """PartitionSpecs for `shard_map`: residuals are split over `axis`, all else is replicated.

    Args:
      state: a pytree that holds `AggregateState`s, or its `jax.eval_shape`.
      axis: name(s) of the data-parallel axis.

    Returns:
      A tree of `PartitionSpec` of the same structure, for `in_specs` and `out_specs`.

    Example:
      >>> import jax, nf_jax
      >>> tx = nf_jax.aggregate_gradients(nf_jax.Profile.static("SIGN"), axis="batch", num_workers=2)
      >>> state = tx.init({"kernel": jax.numpy.ones((64, 64))})
      >>> nf_jax.state_spec(state, "batch").memory.residual["kernel"]
      PartitionSpec('batch',)
    """

    def spec_of(node: Any) -> Any:
        if not isinstance(node, AggregateState):
            return PartitionSpec()
        replicated = jax.tree.map(lambda _: PartitionSpec(), node)
        return with_own_part(replicated, jax.tree.map(lambda _: PartitionSpec(axis), own_part(node)))

    return jax.tree.map(spec_of, state, is_leaf=is_aggregate)


def shard_state(state: Any, mesh: Mesh, axis: AxisName | None = None) -> Any:
    """Places a state on a mesh, for `shard_map` with `state_spec`.

    Args:
      state: a pytree as `init` returns it, every residual `[1, ...]`, or a `host_state` with those of
        all workers.
      mesh: the device mesh; all processes call this with the same state.
      axis: name(s) of the data-parallel axis; the mesh's only axis by default.

    Returns:
      The same tree of global arrays: residuals `[W, ...]` split over `axis`, all else replicated.

    Raises:
      ValueError: the mesh has several axes and `axis` is not given, or it is not the state's `num_workers`,
        or the state has lost residuals.
    """
    if axis is None:
        if len(mesh.axis_names) != 1:
            raise ValueError(
                f"shard_state: the mesh has axes {mesh.axis_names}; say which one is data-parallel: axis=..."
            )
        return shard_state(state, mesh, mesh.axis_names[0])
    names = (axis,) if isinstance(axis, str) else axis
    num_workers = int(np.prod([mesh.shape[name] for name in names]))
    for path, aggregate in find_states(state):
        if int(aggregate.num_workers) != num_workers:
            raise ValueError(
                f"shard_state: the state at {path} was made for num_workers={int(aggregate.num_workers)}, "
                f"but axis {axis!r} of this mesh has {num_workers} members"
            )
        check_layout(path, aggregate)

    def place(leaf: Any, spec: PartitionSpec) -> Array:
        host = np.asarray(leaf)
        if spec != PartitionSpec():
            host = np.broadcast_to(host, (num_workers, *host.shape[1:]))
        return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda index: host[index])

    return wrap_keys(state, jax.tree.map(place, unwrap_keys(state), state_spec(state, axis)))


def find_states(tree: Any) -> list[tuple[str, AggregateState]]:
    """All `AggregateState`s in a tree, with their paths."""
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_aggregate)[0]
    return [(path_string(path) or "<root>", node) for path, node in nodes if is_aggregate(node)]


def own_part(state: AggregateState) -> tuple[Memory, ...]:
    """What differs between workers: the memory, and the shadow's."""
    return (state.memory, *(state.shadow.memory if state.shadow is not None else ()))


def with_own_part(state: AggregateState, own: Sequence[Any]) -> AggregateState:
    """The state with another `own_part`."""
    shadow = None if state.shadow is None else state.shadow._replace(memory=tuple(own[1:]))
    return state._replace(memory=own[0], shadow=shadow)


def check_layout(path: str, state: AggregateState) -> None:
    """Raises if the per-worker part was laid out as replicated: other workers' residuals would be lost."""
    stacked = state.step.ndim
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(own_part(state))}
    if not sizes or any(isinstance(x, Tracer) for x in (state.step, state.num_workers)):
        return
    num_workers, step = (int(np.max(np.asarray(_local(x)))) for x in (state.num_workers, state.step))
    if not stacked and step > 0 and sizes != {num_workers}:
        raise ValueError(
            f"the aggregate state at {path} holds residuals of {sorted(sizes)} worker(s), expected "
            f"{num_workers}: it left the mapped function under PartitionSpec(), or was unreplicated, and the "
            "other workers' residuals are gone. Use state_spec(state, axis) as in_specs and out_specs of "
            "shard_map, and save the state as pmap returns it."
        )


def _local(value: Any) -> Any:
    shards = getattr(value, "addressable_shards", None)
    return shards[0].data if shards else value


def _first_worker(leaf: Any) -> Any:
    # Through NumPy: an indexing operation for each field would cost more than many a step.
    host = np.asarray(_local(leaf))
    return host[0] if host.ndim == leaf.ndim else host


def is_aggregate(node: Any) -> bool:
    """Whether a node of a tree is the transform's state."""
    return isinstance(node, AggregateState)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key array."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def unwrap_keys(tree: Any) -> Any:
    """PRNG keys as their data."""
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)


def wrap_keys(like: Any, tree: Any) -> Any:
    """Keys where `like` has keys, from their data."""

    def wrap(pattern: Any, leaf: Any) -> Any:
        if not is_key(pattern):
            return leaf
        impls = []  # JAX tells it of arrays only, and `pattern` may be abstract
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), pattern)
        return jax.random.wrap_key_data(leaf, impl=impls[0])

    return jax.tree.map(wrap, like, tree)
