"""Adam's moments where gradients change their kind: votes and exact means have mean squares of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from nf_jax.profile import Route
from nf_jax.state import step_info


def fresh_moments(
    tx: optax.GradientTransformation, *, b1: float = 0.9, b2: float = 0.999, num_steps: int = 10
) -> optax.GradientTransformationExtraArgs:
    """Lets Adam learn its moments anew where routes change between votes and exact means, at a fallback say.

    Votes have the sizes of their scales, all of a leaf alike or a row times a column; exact means have each
    their own. Adam divides by mean squares that it remembers for some `1 / (1 - b2)` steps, a thousand by
    default: after a change they are those of the other kind, and elements take steps of the wrong size for as
    long. Here, the moments after the first step of the other kind stay what they are, but weigh no more than
    `num_steps` steps against what follows: they, and the count that Adam's bias correction reads
    (arXiv 1412.6980), become those of a run of `num_steps` steps with the same corrected moments.

    A change is one of half of the lanes or more that vote in either of two steps, by whatever routes they
    took, pinned ones too: phases, fallbacks and returns, a reducer's load. Of a model with many lanes, one
    that is refused alone, or a small region that falls back alone, is none. Adam's one count is for all
    leaves, so those that never vote have their moments shortened with the rest. Learning-rate schedules count
    for themselves. The state is that of `tx`, unchanged in structure.

    Args:
      tx: a chain with one `aggregate_gradients` in it and `optax.adam`, `adamw` or `lamb`. Not `adamax`,
        `nadam`, `yogi` or `radam`, which correct otherwise and whose states look the same.
      b1, b2: those of Adam in it, by default optax's. Its state does not tell: with a b2 of 0.95 there and
        0.999 here, steps after a change are some five times too long.
      num_steps: for how many steps the moments before a change count at most.

    Returns:
      The transform to use instead of `tx`.

    Raises:
      ValueError: at once, for numbers out of range; from `init`, where there is no Adam in `tx`, or not one
        `aggregate_gradients`.

    Example:
      >>> import jax.numpy as jnp, optax, nf_jax
      >>> first = nf_jax.aggregate_gradients(nf_jax.Profile.static("SIGN"), axis="batch", num_workers=1)
      >>> tx = nf_jax.fresh_moments(optax.chain(first, optax.adamw(1e-3, b2=0.99)), b2=0.99)
      >>> state = tx.init({"kernel": jnp.ones(4)})
    """
    for name, decay in (("b1", b1), ("b2", b2)):
        if not 0 <= decay < 1:
            raise ValueError(f"fresh_moments: {name}: expected 0 to below 1, as Adam's own, got {decay}")
    if num_steps < 1:
        raise ValueError(f"fresh_moments: num_steps: expected at least 1, got {num_steps}")
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: Any) -> Any:
        state = inner.init(params)
        step_info(state)  # its error, if there is not one aggregate_gradients
        if not any(map(_is_adam, jax.tree.leaves(state, is_leaf=_is_adam))):
            raise ValueError(
                "fresh_moments: expected Adam in the transform, as in optax.chain(aggregate_gradients(...), "
                "optax.adamw(...)), found no optax.ScaleByAdamState in its state"
            )
        return state

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        updates, new_state = inner.update(updates, state, params, **extra_args)
        has_changed = _kinds_change(step_info(state).routes, step_info(new_state).routes)

        def renew(node: Any) -> Any:
            return _shorten(node, has_changed, b1, b2, num_steps) if _is_adam(node) else node

        return updates, jax.tree.map(renew, new_state, is_leaf=_is_adam)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _is_adam(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def _kinds_change(routes: Any, new_routes: Any) -> Array:
    """bool[]: whether half of the lanes that vote in either of two steps do not in the other; int32[L]."""
    before, after = (jnp.asarray(lanes) >= jnp.int32(Route.SIGN) for lanes in (routes, new_routes))
    num_changed, num_voting = (jnp.sum(lanes, dtype=jnp.int32) for lanes in (before ^ after, before | after))
    return (num_changed > 0) & (2 * num_changed >= num_voting)


def _shorten(
    adam: optax.ScaleByAdamState, has_changed: Array, b1: float, b2: float, num_steps: int
) -> optax.ScaleByAdamState:
    """The same corrected moments after `num_steps` steps, where there were more and the kind has changed."""
    old = jnp.asarray(adam.count)
    new = jnp.where(has_changed, jnp.minimum(old, jnp.asarray(num_steps, old.dtype)), old)

    def scaled(moments: Any, decay: float) -> Any:
        weights = [1 - jnp.float32(decay) ** count.astype(jnp.float32) for count in (new, old)]
        factor = jnp.where(new < old, weights[0] / weights[1], jnp.float32(1))
        return jax.tree.map(lambda leaf: (leaf * factor.astype(leaf.dtype)).astype(leaf.dtype), moments)

    return adam._replace(count=new, mu=scaled(adam.mu, b1), nu=scaled(adam.nu, b2))
