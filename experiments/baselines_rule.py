"""What simulated baselines share: `aggregate_gradients` averages exactly, between the halves of a rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import nf_jax
from nf_jax import Profile, Route, collectives, regions
from nf_jax.pmean import Memory
from nf_jax.state import AggregateState

Leaves = dict[str, Array]
"""Path -> an `f32` array."""

Shapes = dict[str, tuple[int, ...]]
"""Path -> the shape of a leaf, in the order of the flattened tree."""


class BaselineState(NamedTuple):
    """What a baseline carries; `nf_jax`'s own functions find the part that they know.

    Attributes:
      aggregate: of the averaging inside. Its `memory.residual` also holds what the rule keeps per worker,
        `f32[1, *shape]`, and its `info` the bytes that the rule would send.
      shared: what else the rule carries, the same on all workers.
    """

    aggregate: AggregateState
    shared: Any


def _pass_on(means: Leaves, kept: Any) -> tuple[Leaves, Leaves, Any]:
    return means, {}, ()


class Rule(NamedTuple):
    """A published rule for leaves of given shapes, on one worker.

    Attributes:
      send: `(gradients, own, shared, step) -> (sent, kept)`: what all others would understand of this
        worker's gradients, and anything that `receive` needs.
      receive: `(means, kept) -> (updates, own, shared)`, from the mean over workers of what was sent.
      wire_bytes: what one worker sends in a step, an entry per phase.
      own: names and shapes of what every worker keeps, zero at first.
      shared: what all keep alike, at first.
      phase: `int32[] step -> int32[]`, an index into `wire_bytes`.
    """

    send: Callable[[Leaves, Leaves, Any, Array], tuple[Leaves, Any]]
    receive: Callable[[Leaves, Any], tuple[Leaves, Leaves, Any]] = _pass_on
    wire_bytes: tuple[int, ...] = (0,)
    own: Shapes = {}  # noqa: RUF012 (never written to)
    shared: Any = ()
    phase: Callable[[Array], Array] = jnp.zeros_like


def exact_profile() -> Profile:
    """Everything in FP32: what the averaging inside goes by."""
    return Profile.static(Route.FP32)


def transform(
    axis: str, num_workers: int, make_rule: Callable[[Shapes], Rule]
) -> optax.GradientTransformationExtraArgs:
    """The optax transform of a rule: send, average exactly, receive.

    A step in which something sent is not finite changes nothing that the rule keeps, as with the library's
    own residuals.
    """
    check_one_level(num_workers)
    exact: Any = nf_jax.aggregate_gradients(exact_profile(), axis=axis, num_workers=num_workers)

    def init_fn(params: Any) -> Any:
        rule = make_rule(leaf_shapes(params))
        aggregate = exact.init(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, "f4"), params))
        own = {name: jnp.zeros((1, *shape), jnp.float32) for name, shape in rule.own.items()}
        shared = jax.tree.map(jnp.asarray, rule.shared)
        return BaselineState(aggregate._replace(memory=Memory(own, {})), shared)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del params
        shapes, aggregate = leaf_shapes(updates), state.aggregate
        rule, (named, treedef) = make_rule(shapes), regions.leaves_with_paths(updates)
        collectives.check_axis(axis, num_workers)
        collectives.check_local([leaf for _, leaf in named], list(shapes), axis)
        own = _own(aggregate.memory, rule)

        gradients = {path: leaf.astype(jnp.float32) for path, leaf in named}
        sent, kept = rule.send(gradients, own, state.shared, aggregate.step)
        tree = jax.tree.unflatten(treedef, [sent[path] for path in shapes])
        means, after = exact.update(tree, aggregate._replace(memory=Memory({}, {})), **extra_args)
        averaged = dict(zip(shapes, jax.tree.leaves(means), strict=True))
        results, new_own, shared = rule.receive(averaged, kept)

        ok = is_finite(after)
        new_own, shared = jax.tree.map(
            lambda new, old: jnp.where(ok, new, old), (new_own, shared), (own, state.shared)
        )
        after = after._replace(
            memory=Memory({name: leaf[None] for name, leaf in new_own.items()}, {}),
            info=after.info._replace(wire=_as_pairs(rule.wire_bytes)[rule.phase(aggregate.step)]),
        )
        leaves = [results[path].astype(leaf.dtype) for path, leaf in named]
        return jax.tree.unflatten(treedef, leaves), BaselineState(after, shared)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def leaf_shapes(tree: Any) -> Shapes:
    """The shapes of a tree of gradients, by path; ValueError where they are not real numbers."""
    named, _ = regions.leaves_with_paths(tree)
    wrong = [path for path, leaf in named if not jnp.issubdtype(leaf.dtype, jnp.floating)]
    if wrong:
        raise ValueError(
            f"baseline: expected leaves of floating point, got others: {regions.quote_paths(wrong)}. "
            "The published rules are for real gradients only; leave them out of the gradient tree."
        )
    return {path: tuple(leaf.shape) for path, leaf in named}


def check_one_level(num_workers: Any) -> None:
    """Raises for hosts of several devices: the papers count single workers."""
    if type(num_workers) is not int or num_workers < 1:
        raise ValueError(f"num_workers: expected a positive int (one level), got {num_workers!r}")


def is_finite(after: AggregateState) -> Array:
    """Whether all that was averaged in a step was finite, `bool[]`, the same on all workers."""
    return jnp.sum(after.info.signals.nonfinite) == 0


def add_bytes(wire: Array, num_bytes: int) -> Array:
    """`StepInfo.wire` with some more bytes, fewer than 2 GiB."""
    low = wire[1] + jnp.int32(num_bytes)
    return jnp.stack([wire[0] + (low >> 16), low & 0xFFFF])


def _own(memory: Memory, rule: Rule) -> Leaves:
    found = {name: tuple(leaf.shape) for name, leaf in memory.residual.items()}
    if found != (want := {name: (1, *shape) for name, shape in rule.own.items()}):
        raise ValueError(
            f"baseline: expected what one worker keeps, {want}, got {found}. Either the state was made for "
            "another model or rule, or it entered the mapped function under the wrong PartitionSpec: use "
            "nf_jax.state_spec and shard_state with shard_map, training.replicate with pmap."
        )
    return {name: leaf[0] for name, leaf in memory.residual.items()}


def _as_pairs(counts: tuple[int, ...]) -> Array:
    """Counts of bytes as `StepInfo.wire` holds them: `int32[n, 2]`."""
    table = np.asarray(counts, np.int64)
    return jnp.asarray(np.stack([table >> 16, table & 0xFFFF], axis=1), jnp.int32)
