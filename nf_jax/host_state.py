"""A state off its devices and onto them: one copy of what workers share, and every worker's residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nf_jax.regions import path_string
from nf_jax.state import (
    AggregateState,
    check_layout,
    find_states,
    is_aggregate,
    is_key,
    own_part,
    unwrap_keys,
    with_own_part,
    wrap_keys,
)


def host_state(state: Any, *, is_stacked: bool | None = None) -> Any:
    """A state off its devices: one copy of what all workers share, and every worker's residuals.

    The form in which a state can be looked at, resized (`nf_jax.elastic`) and laid out anew, under pmap or
    shard_map: `replicate` and `place` of `nf_jax.training` take it.

    Args:
      state: a pytree as pmap (stacked) or shard_map (global) returns it, or as `init` does.
      is_stacked: whether it is pmap's; told by its `AggregateState` where not given.

    Returns:
      The same tree of NumPy arrays, residuals `[W, ...]`; typed keys are JAX's.

    Raises:
      ValueError: residuals are lost, or live in other processes (save a checkpoint, and read that), or
        workers differ in what they should share; the leaf is named.
    """
    found = find_states(state)
    for path, aggregate in found:
        check_layout(path, aggregate)
    if is_stacked is None:
        is_stacked = any(aggregate.step.ndim for _, aggregate in found)

    def one_copy(path: Any, leaf: Any) -> Any:
        rows = _to_host(path, leaf)
        return wrap_keys(leaf, _same_row(path, rows) if is_stacked else rows)

    def own_rows(path: Any, leaf: Any) -> Any:
        rows = _to_host(path, leaf)
        return rows[:, 0] if is_stacked else rows

    def visit(path: Any, node: Any) -> Any:
        if not isinstance(node, AggregateState):
            return one_copy(path, node)
        own = own_part(node)
        within = lambda function: lambda inner, leaf: function((*path, *inner), leaf)  # noqa: E731
        shared = jax.tree_util.tree_map_with_path(within(one_copy), with_own_part(node, [None] * len(own)))
        return with_own_part(shared, jax.tree_util.tree_map_with_path(within(own_rows), own))

    return jax.tree_util.tree_map_with_path(visit, state, is_leaf=is_aggregate)


def stack_state(state: Any, workers: Sequence[int]) -> Any:
    """The rows of some workers, for `pmap`: every leaf `[len(workers), ...]`, NumPy.

    Args:
      state: a pytree as `init` returns it, or a `host_state`.
      workers: numbers of the workers that live in this process, in the order of its devices.

    Raises:
      ValueError: the state has lost residuals, or has fewer workers.
    """
    for path, aggregate in find_states(state):
        check_layout(path, aggregate)
        if max(workers) >= (num_workers := int(aggregate.num_workers)):
            raise ValueError(
                f"stack_state: the state at {path} was made for num_workers={num_workers}, got worker "
                f"{max(workers)}: make it for the number of devices, or resize it (nf_jax.elastic)"
            )

    def stack(leaf: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(leaf), (len(workers), *np.shape(leaf)))

    def rows(leaf: Any) -> np.ndarray:
        host = np.asarray(leaf)
        return stack(host) if host.shape[0] == 1 else host[list(workers)][:, None]

    def visit(node: Any) -> Any:
        if not isinstance(node, AggregateState):
            return stack(node)
        own = own_part(node)
        shared = jax.tree.map(stack, with_own_part(node, [None] * len(own)))
        return with_own_part(shared, jax.tree.map(rows, own))

    return wrap_keys(state, jax.tree.map(visit, unwrap_keys(state), is_leaf=is_aggregate))


def _to_host(path: Any, leaf: Any) -> np.ndarray:
    if isinstance(leaf, Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise ValueError(
            f"host_state: rows of {path_string(path)} live in other processes; save, and read that"
        )
    if is_key(leaf):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf, getattr(leaf, "dtype", None) or jnp.result_type(leaf))


def _same_row(path: Any, rows: np.ndarray) -> np.ndarray:
    if any(row.tobytes() != rows[0].tobytes() for row in rows):
        raise ValueError(
            f"host_state: workers differ in {path_string(path)}, of which one copy would be kept: only "
            "residuals may differ. Make it the same on all workers, or take it out of the state."
        )
    return rows[0]
