"""The custom psum wrapper: averages a gradient tree over workers, every lane by its own route.

What may only be exact shares one variadic all-reduce. Every other group of lanes is averaged by itself
(`switch.py`), by a route that is data; with routes given as Python integers ("pinned") there is no switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nf_jax import collectives, regions
from nf_jax.groups import Given, Group, join_stacks, narrow, stack_leaves, unstack
from nf_jax.plan import Plan
from nf_jax.profile import Route, to_route
from nf_jax.switch import average_group, clear_settled


class Memory(NamedTuple):
    """Error feedback: what has not been sent yet. Differs between workers.

    Attributes:
      residual: path -> `f32` or `bf16` `[1, *shape]`, gradient units.
      server_residual: path -> `f32[1, shard_size]`, gradient units, for the shard this worker reduces.
    """

    residual: dict[str, Array]
    server_residual: dict[str, Array]


def init_memory(plan: Plan) -> Memory:
    """One worker's view of a memory in which everything has been sent."""
    residual, server = {}, {}
    for group in plan.groups:
        dtype = jnp.dtype(group.codec.residual_dtype)
        for leaf, segment in zip(group.leaves, group.segments, strict=True):
            if group.keeps_residual:
                residual[plan.paths[leaf]] = jnp.zeros((1, *plan.residual_shape(leaf, segment)), dtype)
            if group.keeps_server_residual:
                server[plan.paths[leaf]] = jnp.zeros((1, segment.shard_size), jnp.float32)
    return Memory(residual, server)


class Result(NamedTuple):
    """What `average` returns.

    Attributes:
      means: one per leaf, in the leaf's dtype, the same bits on all workers.
      sent: one per leaf, this worker's share as the others understood it (`keep="sent"`), else empty.
      memory: the new residuals.
      pending: `bool[G]`, whether a group has residuals that an exact step must settle.
      agreement, residual_ratio: `f32[L]`, see `telemetry.Signals`.
    """

    means: list[Array]
    sent: list[Array]
    memory: Memory
    pending: Array
    agreement: Array
    residual_ratio: Array


def pmean(
    tree: Any, plan: Plan, routes: Array | Sequence[int], *, axis: collectives.AxisName, seed: int | Array = 0
) -> tuple[Any, Any]:
    """Averages a pytree over workers like `jax.lax.pmean`, every lane by its own route.

    The stateless core of `aggregate_gradients`, for those who keep their own error feedback. Call it inside
    `pmap` or `shard_map`.

    Args:
      tree: local values, a pytree of the plan's shapes.
      plan: `nf_jax.plan(profile, tree, num_workers)`.
      routes: one per lane, `int32[L]`; the same on all workers. As a list of ints they are pinned:
        compiled in, without a switch.
      axis: name of the mesh axis (or several names).
      seed: varies from step to step, the same on all workers; decides ties.

    Returns:
      `(mean, sent)`: the mean in the leaves' dtypes, the same on all workers, and what this worker sent of
      its values (f32 where it was lossy): `tree - sent` is the residual of the way up.

    Raises:
      ValueError: another tree than the plan's, routes of another length, an axis of another size,
        values that are already summed over the axis.
    """
    named, treedef = regions.leaves_with_paths(tree)
    check_tree(plan, named)
    collectives.check_axis(axis, plan.num_workers, plan.num_inner)
    if plan.num_inner > 1:
        raise ValueError(
            f"pmean: expected a plan of one level, got one for {plan.num_hosts} hosts of {plan.num_inner} "
            "devices: what a worker sent is then no longer its own. Use aggregate_gradients."
        )
    collectives.check_uniform(jnp.asarray(seed), axis, "seed")
    leaves = [leaf for _, leaf in named]
    moving = [i for i in range(len(leaves)) if i not in plan.idle]
    collectives.check_local([leaves[i] for i in moving], [plan.paths[i] for i in moving], axis)
    result = average(
        plan,
        routes,
        leaves,
        Memory({}, {}),
        jnp.zeros((len(plan.groups),), bool),
        axis,
        seed=seed,
        keep_sent=True,
    )
    return jax.tree.unflatten(treedef, result.means), jax.tree.unflatten(treedef, result.sent)


def average(
    plan: Plan,
    routes: Array | Sequence[int],
    leaves: Sequence[Any],
    memory: Memory,
    pending: Array,
    axis: collectives.AxisName,
    *,
    seed: int | Array,
    ok: bool | Array = True,
    exact: Sequence[Array] | None = None,
    keep_sent: bool = False,
) -> Result:
    """Averages the leaves of a tree; `aggregate_gradients` and `pmean` are both made of it.

    Args:
      plan: the plan (static).
      routes: `int32[L]`, or ints to pin them.
      leaves: local values in the order of the flattened tree.
      memory: residuals; leaves that have none get no error feedback.
      pending: `bool[G]`, groups whose residuals are not zero.
      axis: name(s) of the mesh axis.
      seed: `uint32[]`, the same on all workers.
      ok: `bool[]`, the same on all workers; where False the memory stays as it was.
      exact: the means of `plan.exact`, where they are known already.
      keep_sent: return what was sent instead of new residuals.

    Returns:
      The result; nothing raises once routes have been checked.
    """
    pinned = None if isinstance(routes, Array) else _pinned(plan, routes)
    if pinned is None:
        _check_length(plan, np.shape(routes))
        collectives.check_uniform(jnp.asarray(routes), axis, "the route")
    means, sent = list(leaves), list(leaves)
    if exact is None:
        exact = collectives.mean_leaves([leaves[i] for i in plan.exact], axis)
    for index, mean in zip(plan.exact, exact, strict=True):
        means[index] = mean
    outer, inner = collectives.levels(axis, plan.num_workers, plan.num_inner)
    memory = Memory(dict(memory.residual), dict(memory.server_residual))
    agreement = jnp.full((plan.num_lanes,), -1, jnp.float32)
    residual_ratio = jnp.zeros((plan.num_lanes,), jnp.float32)
    still_pending, outcomes, taken = [], [], []
    for number, group in enumerate(plan.groups):
        route = pinned[group.lanes[0]] if pinned is not None else jnp.asarray(routes)[group.lanes[0]]
        paths = [plan.paths[i] for i in group.leaves]
        given = Given(
            _pieces(group, [leaves[i] for i in group.leaves], inner),
            _stack_residuals(group, [memory.residual.get(path) for path in paths]),
            _stack_servers(group, [memory.server_residual.get(path) for path in paths]),
            jnp.asarray(seed, jnp.uint32),
            jnp.asarray(ok),
        )
        taken.append(route)
        outcomes.append(average_group(group, route, pending[number], given, outer, keep_sent))
        still_pending.append(jnp.where(ok, jnp.asarray(route) != Route.FP32, pending[number]))
    for group, route, outcome in zip(plan.groups, taken, clear_settled(outcomes), strict=True):
        paths = [plan.paths[i] for i in group.leaves]
        shapes = [plan.residual_shape(i, s) for i, s in zip(group.leaves, group.segments, strict=True)]
        is_lossy = jnp.asarray(route) != Route.FP32
        wholes = _wholes(outcome.means, [plan.shapes[i] for i in group.leaves], is_lossy, inner)
        for index, mean in zip(group.leaves, wholes, strict=True):
            means[index] = narrow(mean, leaves[index].dtype)
        if keep_sent:
            for index, part in zip(group.leaves, unstack(outcome.sent, shapes), strict=True):
                sent[index] = part
        for kept, stacks in ((memory.residual, outcome.residuals), (memory.server_residual, outcome.server)):
            if stacks:
                kept.update(zip(paths, unstack(stacks, [kept[path].shape for path in paths]), strict=True))
        lanes = np.asarray(group.lanes)
        agreement = agreement.at[lanes].set(outcome.agreement)
        residual_ratio = residual_ratio.at[lanes].set(outcome.residual_ratio)
    if inner is not None and plan.groups:
        agreement, residual_ratio = collectives.gather(jnp.stack([agreement, residual_ratio]), inner).mean(0)
    return Result(
        means,
        sent if keep_sent else [],
        memory,
        jnp.stack(still_pending) if still_pending else pending,
        agreement,
        residual_ratio,
    )


def _pieces(group: Group, leaves: Sequence[Array], inner: collectives.Level | None) -> Sequence[Array]:
    """Stacks of the leaves; of hosts of several devices, stacks in f32 of the piece of each leaf that this
    device answers for, averaged over them."""
    if inner is None:
        return stack_leaves(group, leaves)
    shapes = [(segment.rows * segment.num_inner, *segment.matrix_shape[1:]) for segment in group.segments]
    whole = join_stacks(group, [leaf.astype(jnp.float32) for leaf in leaves], shapes)
    return [collectives.mean_of_rows(stack, inner) for stack in whole]


def _wholes(
    means: Sequence[Array],
    shapes: Sequence[tuple[int, ...]],
    is_lossy: Array,
    inner: collectives.Level | None,
) -> Sequence[Array]:
    """Leaves of these shapes from stacks: of the means, or of the pieces of all devices of the host.

    A lossy piece that is not finite spoils its leaf.
    """
    if inner is None:
        return unstack(means, shapes)
    stacks = []
    for stack in means:
        gathered = collectives.gather_rows(stack, inner)
        firsts = gathered.reshape(*gathered.shape[:2], -1)[:, :, :1]
        poison = jnp.where(is_lossy, jnp.sum(firsts * jnp.float32(0), axis=1), jnp.float32(0))
        stacks.append(gathered.reshape(stack.shape[0], -1) + poison)
    return unstack(stacks, shapes)


def _stack_residuals(group: Group, residuals: Sequence[Array | None]) -> list[Array] | None:
    if not group.keeps_residual or any(residual is None for residual in residuals):
        return None
    return stack_leaves(group, [residual for residual in residuals if residual is not None])


def _stack_servers(group: Group, servers: Sequence[Array | None]) -> list[Array] | None:
    """A `[k, shard_size]` per stack."""
    if not group.keeps_server_residual or any(server is None for server in servers):
        return None
    sizes = [(segment.shard_size,) for segment in group.segments]
    return join_stacks(group, [server for server in servers if server is not None], sizes)


def _check_length(plan: Plan, shape: tuple[int, ...]) -> None:
    if shape != (plan.num_lanes,):
        raise ValueError(
            f"routes: expected one route for each of the {plan.num_lanes} lanes, got shape {shape}"
        )


def _pinned(plan: Plan, routes: Sequence[int]) -> tuple[int, ...]:
    pinned = tuple(to_route(route) for route in routes)
    _check_length(plan, (len(pinned),))
    exact = [
        name for name, g, r in zip(plan.lanes.names, plan.lanes.groups, pinned, strict=True) if g < 0 and r
    ]
    if exact:
        raise ValueError(f"routes: expected FP32 for the lanes that can only be exact, not so: {exact}")
    for number, group in enumerate(plan.groups):
        asked = {pinned[lane] for lane in group.lanes}
        if len(asked) > 1 or not asked <= {int(route) for route in group.routes}:
            names = ", ".join(plan.lanes.names[lane] for lane in group.lanes)
            raise ValueError(
                f"routes: group {number} (lanes {names}) can take one of "
                f"{[route.name for route in group.routes]} together, got {sorted(asked)}"
            )
    return pinned


def check_tree(plan: Plan, named: Sequence[tuple[str, Any]]) -> None:
    """Raises unless the named leaves are those that the plan was made for."""
    got = {path: (tuple(np.shape(leaf)), str(getattr(leaf, "dtype", None))) for path, leaf in named}
    want = {
        path: (shape, dtype if dtype != "float0" else str(jax.dtypes.float0))
        for path, shape, dtype in zip(plan.paths, plan.shapes, plan.dtypes, strict=True)
    }
    wrong = [path for path in {**want, **got} if want.get(path) != got.get(path)]
    if wrong:
        path = wrong[0]
        raise ValueError(
            f"pmean: expected the tree that the plan was made for, but {len(wrong)} leaves differ, first "
            f"{path!r}: planned {want.get(path)}, got {got.get(path)}. Make the plan from this tree."
        )
