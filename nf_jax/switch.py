"""One group of lanes: it sends by the route it is told, and receives.

The route is data, the same on all workers. Here it becomes control flow, and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from nf_jax import collectives
from nf_jax.groups import Given, Group, narrow, nothing_voted, wide_gradients
from nf_jax.profile import Route
from nf_jax.routes import ROUTES, average_fp32, settle_fp32


class Outcome(NamedTuple):
    """What averaging a group leaves.

    Attributes:
      means: stacks in runs, `[k, *run_shape]`, in the dtype of the gradients given.
      sent: stacks, this worker's share as the others understood it; empty unless asked for.
      residuals: stacks, empty without error feedback.
      server: a `f32[k, shard_size]` per stack, or empty.
      settled: `bool[]`, whether an exact step has paid the residuals out; None: it never does.
      agreement, residual_ratio: `f32[lanes]`, see `telemetry.Signals`.
    """

    means: Sequence[Array]
    sent: Sequence[Array]
    residuals: Sequence[Array]
    server: Sequence[Array]
    settled: Array | None
    agreement: Array
    residual_ratio: Array


class _Carry(NamedTuple):
    """What sending changes: the memory, and a place for what arrives by each lossy route."""

    residuals: list[Array]
    server: list[Array]
    payloads: dict[Route, tuple[Array, ...]]
    agreement: Array
    residual_ratio: Array
    sent: list[Array]


def average_group(
    group: Group,
    route: int | Array,
    pending: Array,
    given: Given,
    axis: collectives.Where,
    keep_sent: bool,
) -> Outcome:
    """Sends and receives; what an exact step has settled is cleared later (`clear_settled`).

    Sending is a loop of one trip or none: a loop works on its arrays in place, where a conditional would
    copy the residuals at every step, and most of all at an exact one, that does not touch them.
    """
    carry = _empty_carry(group, given, axis, keep_sent)
    lossy = [r for r in group.routes if r != Route.FP32]
    if not isinstance(route, Array):
        if route != Route.FP32:
            carry = _send(Route(route), group, given, axis, carry)
    elif lossy == list(group.routes) and len(lossy) == 1:
        carry = _send(lossy[0], group, given, axis, carry)
    else:
        send = functools.partial(_send_by, route, lossy, group, given, axis)
        carry = _once(route != Route.FP32, send, carry)
    means, sent, settled = _receive(group, route, pending, given, carry, axis, keep_sent)
    return Outcome(means, sent, carry.residuals, carry.server, settled, carry.agreement, carry.residual_ratio)


def clear_settled(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Sets the residuals to zero that an exact step has paid out: one loop for all, of one trip or none."""
    flags = {i: o.settled for i, o in enumerate(outcomes) if o.settled is not None}
    memory: dict[int, Any] = {i: (outcomes[i].residuals, outcomes[i].server) for i in flags}
    if not memory:
        return list(outcomes)

    def clear(memory: dict[int, Any]) -> dict[int, Any]:
        return {
            i: jax.tree.map(lambda part, i=i: jnp.where(flags[i], jnp.zeros((), part.dtype), part), parts)
            for i, parts in memory.items()
        }

    memory = _once(jnp.any(jnp.stack(list(flags.values()))), clear, memory)
    return [
        o._replace(residuals=memory[i][0], server=memory[i][1]) if i in memory else o
        for i, o in enumerate(outcomes)
    ]


def _empty_carry(group: Group, given: Given, axis: collectives.Where, keep_sent: bool) -> _Carry:
    lossy = [route for route in group.routes if route != Route.FP32]
    zeros = lambda shapes: tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)  # noqa: E731
    payloads = {r: zeros(ROUTES[r].payload_shapes(group, collectives.num_members(axis))) for r in lossy}
    # What arrives is the same on all workers of this level, but not where another level cuts pieces.
    typed = functools.partial(collectives.vary_like, other=given.gradients[0], among=axis)
    agreement, residual_ratio = map(typed, nothing_voted(group))
    return _Carry(
        residuals=[collectives.vary_like(stack, given.gradients[0]) for stack in given.residuals or []],
        server=[collectives.vary_like(part, given.gradients[0]) for part in given.server or []],
        payloads=jax.tree.map(typed, payloads),
        agreement=agreement,
        residual_ratio=residual_ratio,
        sent=wide_gradients(given) if keep_sent else [],
    )


def _once(todo: Array, body: Callable[[Any], Any], value: Any) -> Any:
    """`body(value)` if `todo`, else `value`, in place."""
    return lax.while_loop(
        lambda held: held[0], lambda held: (jnp.asarray(False), body(held[1])), (todo, value)
    )[1]


def _position(routes: Sequence[Route], route: Array) -> Array:
    """Where a route stands among `routes`, `int32[]`."""
    position = np.zeros(len(Route), np.int32)
    position[list(routes)] = range(len(routes))
    return jnp.asarray(position)[route]


def _send_by(
    route: Array,
    lossy: Sequence[Route],
    group: Group,
    given: Given,
    axis: collectives.Where,
    carry: _Carry,
) -> _Carry:
    """Sends by one of several lossy routes."""
    branches = [functools.partial(_send, r, group, given, axis) for r in lossy]
    if len(branches) == 1:
        return branches[0](carry)
    return lax.switch(_position(lossy, route), branches, carry)


def _send(route: Route, group: Group, given: Given, axis: collectives.Where, carry: _Carry) -> _Carry:
    sent = ROUTES[route].send(group, _remembering(given, carry), axis)
    return carry._replace(
        residuals=[
            collectives.varying(new.astype(old.dtype), axis)
            for old, new in zip(carry.residuals, sent.residuals or [], strict=True)
        ],
        server=[collectives.varying(part, axis) for part in sent.server or []],
        payloads=carry.payloads | {route: sent.payload},
        agreement=collectives.vary_like(sent.agreement, carry.agreement),
        residual_ratio=collectives.vary_like(sent.residual_ratio, carry.residual_ratio),
        sent=[collectives.varying(stack, axis) for stack in sent.values] if carry.sent else [],
    )


def _remembering(given: Given, carry: _Carry) -> Given:
    return given._replace(residuals=carry.residuals or None, server=carry.server or None)


def _receive(
    group: Group,
    route: int | Array,
    pending: Array,
    given: Given,
    carry: _Carry,
    axis: collectives.Where,
    keep_sent: bool,
) -> tuple[Sequence[Array], Sequence[Array], Array | None]:
    """The means, what this worker sent, and whether residuals were settled (None: cannot be)."""
    has_memory = bool(carry.residuals or carry.server)

    def narrowed(means: Sequence[Array]) -> list[Array]:
        # Here, so that of small dtypes one group at a time is held in f32.
        return [narrow(mean, own.dtype) for mean, own in zip(means, given.gradients, strict=True)]

    def by_route(r: Route) -> Callable[[], Any]:
        if r == Route.FP32:
            return lambda: (narrowed(average_fp32(group, given, axis)), carry.sent, jnp.asarray(False))
        receive = ROUTES[r].receive
        return lambda: (narrowed(receive(group, carry.payloads[r])), carry.sent, jnp.asarray(False))

    def settle() -> Any:
        means, local = settle_fp32(group, _remembering(given, carry), axis)
        local = [collectives.varying(stack, axis) for stack in local] if keep_sent else []
        return narrowed(means), local, jnp.asarray(True)

    settles = has_memory and Route.FP32 in group.routes
    pending = pending & given.ok  # a step that is not sound may be dropped: it pays nothing out
    if not isinstance(route, Array):
        branch = by_route(Route(route))
        if not settles or route != Route.FP32:
            return *branch()[:2], None
        return lax.cond(pending, settle, branch)
    branches = [by_route(r) for r in group.routes] + [settle] * settles
    if len(branches) == 1:
        return *branches[0]()[:2], None
    index = _position(group.routes, route)
    if settles:
        index = jnp.where((route == Route.FP32) & pending, np.int32(len(group.routes)), index)
    return lax.switch(index, branches)
