"""States as training leaves them, without training: residuals, counters and moments drawn at random."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nf_jax.host_state import host_state
from nf_jax.state import AggregateState, is_aggregate, own_part, with_own_part


def drawn(fresh: Any, seed: int = 0) -> Any:
    """A host state in the form of `fresh`, one worker's view: all numbers drawn, after 7 steps."""
    rng = np.random.default_rng(seed)

    def like(leaf: Any, *leading: int) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        shape, dtype = (*leading, *leaf.shape), np.dtype(leaf.dtype)
        if dtype.kind == "b":
            return rng.random(shape) < 0.5
        if jnp.issubdtype(dtype, jnp.integer):
            return rng.integers(1, 4, shape).astype(dtype)
        return rng.normal(size=shape).astype(dtype)

    def visit(node: Any) -> Any:
        if not isinstance(node, AggregateState):
            return like(node)
        num_workers = int(node.num_workers)
        own = own_part(node)
        shared = jax.tree.map(like, with_own_part(node, [None] * len(own)))
        steps = {"step": np.int32(7), "num_workers": np.int32(num_workers)}
        rows = jax.tree.map(lambda x: like(x[0], num_workers), own)
        return with_own_part(shared._replace(**steps), rows)

    return jax.tree.map(visit, host_state(fresh), is_leaf=is_aggregate)


def same_bits(one: Any, other: Any) -> bool:
    """Whether two trees have the same leaves, of the same dtypes, to the bit."""
    flat = [jax.tree_util.tree_leaves_with_path(host_state(tree)) for tree in (one, other)]
    return len(flat[0]) == len(flat[1]) and all(
        a_path == b_path and np.asarray(a).dtype == np.asarray(b).dtype and _bytes(a) == _bytes(b)
        for (a_path, a), (b_path, b) in zip(*flat, strict=True)
    )


def _bytes(leaf: Any) -> bytes:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).tobytes()
