"""nf_jax into a run that began without it, and out again: the optimizer's state stays as it is."""

from __future__ import annotations

import collections
from typing import Any

import jax
import numpy as np

from nf_jax.state import find_states, is_aggregate

_MAX_LISTED = 5


def adopt(plain: Any, fresh: Any) -> Any:
    """Brings nf_jax into a run: a state of `optax.adamw(...)`, say, becomes one of
    `optax.chain(nf_jax.aggregate_gradients(...), optax.adamw(...))`.

    The profile's phases and the warm-up begin at the next step: health has baselines to learn.

    Args:
      plain: an optimizer's state, a TrainState or any pytree of them, one copy, however it was saved.
      fresh: the same with `aggregate_gradients` in its chain, as `init` returns it.

    Returns:
      `fresh`, with everything that is not nf_jax's from `plain`.

    Raises:
      ValueError: besides nf_jax's, the two have not the same leaves: those that differ are named.

    Example:
      >>> import jax.numpy as jnp, optax, nf_jax
      >>> params, adam = {"kernel": jnp.ones(4)}, optax.adam(0.1)
      >>> first = nf_jax.aggregate_gradients(nf_jax.Profile.static("SIGN"), axis="batch", num_workers=1)
      >>> state = adopt(adam.init(params), optax.chain(first, adam).init(params))
      >>> int(nf_jax.step_info(state).step)
      -1
    """
    _check("adopt", "plain", plain, 0)
    _check("adopt", "fresh", fresh, 1)
    return _carry(plain, fresh)


def take_out(state: Any, plain: Any) -> Any:
    """Takes nf_jax out of a run, which goes on with `jax.lax.pmean` in its place.

    What the mean still owes is dropped. It is `nf_jax.elastic.owed(state, plan)`, and paid if it is added to
    every worker's gradients at the first step.

    Args:
      state: one copy of a state with `aggregate_gradients` in its chain: a `host_state`, or what
        `checkpoint.read` returns.
      plain: a fresh state without it.

    Returns:
      `plain` with the values of `state`.

    Raises:
      ValueError: besides nf_jax's, the two have not the same leaves: those that differ are named.
    """
    _check("take_out", "state", state, 1)
    _check("take_out", "plain", plain, 0)
    return _carry(state, plain)


def _check(function: str, argument: str, tree: Any, num_states: int) -> None:
    if len(found := find_states(tree)) != num_states:
        raise ValueError(
            f"{function}: expected {argument} to hold {num_states} states of aggregate_gradients, got "
            f"{len(found)}" + "".join(f", at {path}" for path, _ in found)
        )


def _carry(source: Any, target: Any) -> Any:
    """`target` with the leaves of `source` wherever it is not nf_jax's."""
    given, wanted = _leaves_beside(source), _leaves_beside(target)
    wrong = [n for n in {**wanted, **given} if _form(given, n) != _form(wanted, n)]
    if wrong:
        lines = [f"  {n}: expected {_form(wanted, n)}, got {_form(given, n)}" for n in wrong[:_MAX_LISTED]]
        lines += [f"  and {len(wrong) - _MAX_LISTED} more"] * (len(wrong) > _MAX_LISTED)
        raise ValueError(
            "\n".join([f"besides nf_jax's, {len(wrong)} leaves differ:", *lines])
            + "\nBoth must be of the same model and optimizer, and one copy (unreplicate what is plain)."
        )
    values = iter([given[name] for name in wanted])
    return jax.tree.map(lambda x: x if is_aggregate(x) else next(values), target, is_leaf=is_aggregate)


def _leaves_beside(tree: Any) -> dict[str, Any]:
    """All leaves but nf_jax's. A chain with one member more counts from another place, so numbers are left
    out of the names, and equal names are told apart by their order."""
    seen, named = collections.Counter(), {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_aggregate):
        if is_aggregate(leaf):
            continue
        keys = tuple(key for key in path if not isinstance(key, jax.tree_util.SequenceKey))
        name = jax.tree_util.keystr(keys) or "<root>"
        seen[name] += 1
        named[f"{name} ({seen[name]})" if seen[name] > 1 else name] = leaf
    return named


def _form(leaves: dict[str, Any], name: str) -> str:
    if name not in leaves:
        return "none"
    leaf = leaves[name]
    return f"{getattr(leaf, 'dtype', None) or jax.numpy.result_type(leaf)}{list(np.shape(leaf))}"
