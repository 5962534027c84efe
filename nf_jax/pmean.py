"""The custom psum wrapper: averages a gradient tree over workers, every lane by its own route.

What may only be exact shares one variadic all-reduce. Every other group of lanes has one `lax.switch` over
the routes it can take; with routes given as Python integers ("pinned") there is no switch at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from nf_jax import collectives, regions
from nf_jax.groups import Averaged, Given, Group, stack_leaves, unstack
from nf_jax.plan import Plan
from nf_jax.profile import Route, to_route
from nf_jax.routes import ROUTES, settle_fp32


class Memory(NamedTuple):
    """Error feedback: what has not been sent yet. Differs between workers.

    Attributes:
      residual: path -> `f32` or `bf16` `[*shape]`, gradient units.
      server_residual: path -> `f32[shard_size]`, gradient units, for the shard this worker reduces.
    """

    residual: dict[str, Array]
    server_residual: dict[str, Array]


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
    collectives.check_axis(axis, plan.num_workers)
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
      keep_sent: return what was sent instead of new residuals.

    Returns:
      The result; nothing raises once routes have been checked.
    """
    pinned = None if isinstance(routes, Array) else _pinned(plan, routes)
    if pinned is None:
        _check_length(plan, np.shape(routes))
        collectives.check_uniform(jnp.asarray(routes), axis, "the route")
    means, sent = list(leaves), list(leaves)
    for index, mean in zip(
        plan.exact, collectives.mean_leaves([leaves[i] for i in plan.exact], axis), strict=True
    ):
        means[index] = mean
    memory = Memory(dict(memory.residual), dict(memory.server_residual))
    agreement = jnp.full((plan.num_lanes,), -1, jnp.float32)
    residual_ratio = jnp.zeros((plan.num_lanes,), jnp.float32)
    still_pending = []
    for number, group in enumerate(plan.groups):
        route = pinned[group.lanes[0]] if pinned is not None else jnp.asarray(routes)[group.lanes[0]]
        paths = [plan.paths[i] for i in group.leaves]
        operands = _Operands(
            [leaves[i] for i in group.leaves],
            _stack_residuals(group, [memory.residual.get(path) for path in paths]),
            _join_servers(group, [memory.server_residual.get(path) for path in paths]),
            jnp.asarray(ok),
            jnp.asarray(seed, jnp.uint32),
        )
        outcome = _switch(group, route, pending[number], operands, axis, keep_sent)
        shapes = [plan.shapes[i] for i in group.leaves]
        for index, mean in zip(group.leaves, outcome.means, strict=True):
            means[index] = mean
        if keep_sent:
            for index, part in zip(group.leaves, unstack(outcome.sent, shapes), strict=True):
                sent[index] = part
        if outcome.residuals:
            memory.residual.update(zip(paths, unstack(outcome.residuals, shapes), strict=True))
        if outcome.server is not None:
            memory.server_residual.update(zip(paths, _split_server(group, outcome.server), strict=True))
        lanes = np.asarray(group.lanes)
        agreement = agreement.at[lanes].set(outcome.agreement)
        residual_ratio = residual_ratio.at[lanes].set(outcome.residual_ratio)
        still_pending.append(jnp.where(ok, jnp.asarray(route) != Route.FP32, pending[number]))
    return Result(
        means,
        sent if keep_sent else [],
        memory,
        jnp.stack(still_pending) if still_pending else pending,
        agreement,
        residual_ratio,
    )


class _Operands(NamedTuple):
    gradients: list[Array]
    residuals: list[Array]
    server: Array | None
    ok: Array
    seed: Array


class _Outcome(NamedTuple):
    means: list[Array]
    sent: list[Array]
    residuals: list[Array]
    server: Array | None
    agreement: Array
    residual_ratio: Array


def _switch(
    group: Group,
    route: int | Array,
    pending: Array,
    operands: _Operands,
    axis: collectives.AxisName,
    keep_sent: bool,
) -> _Outcome:
    """One of the group's routes, by number; FP32 has a branch of its own while residuals are pending."""
    has_memory = bool(operands.residuals) or operands.server is not None
    functions = [ROUTES[r] for r in group.routes]
    if has_memory and Route.FP32 in group.routes:
        functions.append(settle_fp32)
    branches = [_branch(function, group, axis, keep_sent) for function in functions]
    if not isinstance(route, Array):
        position = group.routes.index(Route(route))
        if settle_fp32 not in functions or route != Route.FP32:
            return branches[position](operands)
        return lax.cond(pending, branches[-1], branches[position], operands)
    if len(branches) == 1:
        return branches[0](operands)
    position = np.zeros(len(Route), np.int32)
    position[list(group.routes)] = range(len(group.routes))
    index = jnp.asarray(position)[route]
    if settle_fp32 in functions:
        index = jnp.where((route == Route.FP32) & pending, np.int32(len(functions) - 1), index)
    return lax.switch(index, branches, operands)


def _branch(
    function: Callable[..., Averaged], group: Group, axis: collectives.AxisName, keep_sent: bool
) -> Callable[[_Operands], _Outcome]:
    def run(operands: _Operands) -> _Outcome:
        residuals, server = operands.residuals, operands.server
        wide = [stack.astype(jnp.float32) for stack in residuals] or None
        averaged = function(group, Given(operands.gradients, wide, server, operands.seed), axis)
        if function is not ROUTES[Route.FP32]:
            residuals = [
                _update(operands.ok, old, new)
                for old, new in zip(residuals, averaged.residuals or residuals, strict=True)
            ]
            server = None if server is None else _update(operands.ok, server, averaged.server)
        return _Outcome(
            [m.astype(g.dtype) for m, g in zip(averaged.means, operands.gradients, strict=True)],
            [collectives.varying(stack, axis) for stack in averaged.sent()] if keep_sent else [],
            [collectives.varying(stack, axis) for stack in residuals],
            None if server is None else collectives.varying(server, axis),
            averaged.agreement,
            averaged.residual_ratio,
        )

    return run


def _update(ok: Array, old: Array, new: Array | None) -> Array:
    """The new residual where the step was sound; chosen, never multiplied: a NaN times zero is a NaN."""
    return old if new is None else jnp.where(ok, new.astype(old.dtype), old)


def _stack_residuals(group: Group, residuals: Sequence[Array | None]) -> list[Array]:
    if not group.keeps_residual or any(residual is None for residual in residuals):
        return []
    return stack_leaves(group, [residual for residual in residuals if residual is not None])


def _join_servers(group: Group, servers: Sequence[Array | None]) -> Array | None:
    if not group.keeps_server_residual or any(server is None for server in servers):
        return None
    return jnp.concatenate([server for server in servers if server is not None])


def _split_server(group: Group, server: Array) -> list[Array]:
    cuts = np.cumsum([segment.shard_size for segment in group.segments])[:-1].tolist()
    return jnp.split(server, cuts)


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
