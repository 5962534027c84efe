"""Checkpoints that keep every worker's residuals, verified when they are read, continued bit for bit.

The only file that imports orbax.
"""

from __future__ import annotations

import ast
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from nf_jax import leaves, manifest
from nf_jax.host_state import host_state
from nf_jax.state import Layout, check_layout, find_states, is_aggregate, wrap_keys

_MAX_LISTED = 5


def save(directory: str | Path, state: Any, *, step: int | None = None, keep: int | None = None) -> Path:
    """Writes `directory/<step>`: all of the state, every worker's residuals included.

    The checkpoint appears under its name only when it is whole and on the disk: who is killed while saving
    finds the one before it. In several processes all of them call this, with a directory that they share.

    Args:
      directory: where a run's checkpoints lie, on a local or mounted file system; made if missing.
      state: any pytree as pmap returns it (stacked; do not unreplicate it) or shard_map (global).
      step: the checkpoint's number; by default `state.step`.
      keep: how many checkpoints to keep, this one and those before it; older ones are deleted. All by
        default; 2 leave one to go back to where the last is damaged.

    Returns:
      The checkpoint's path.

    Raises:
      ValueError: there is such a checkpoint already (a damaged one is replaced), or only one worker's
        residuals are left.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep: expected at least 1, got {keep}")
    for path, aggregate in find_states(state):
        check_layout(path, aggregate)
    step = _step_of(state) if step is None else int(step)
    target = Path(directory).absolute() / str(step)
    if target.exists() and _is_whole(target):
        raise ValueError(f"save: {target} exists already; delete it or pass another step")
    if jax.process_index() == 0:
        manifest.clear_partials(target.parent)
    named = leaves.named(state)
    encoded = {name: leaves.encode(leaf) for name, leaf in named.items() if np.size(leaf)}
    ocp.save(str(manifest.partial_of(target)), encoded, overwrite=True)
    if jax.process_index() == 0:
        described = {name: leaves.describe(leaf) for name, leaf in named.items()}
        manifest.publish(target, {"leaves": described, "plans": _plans_of(state)})
        if keep is not None:
            manifest.prune(target.parent, keep, newest=step)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"nf_jax.save {target.name}")
    return target


def restore(directory: str | Path, state_like: Any, *, step: int | None = None) -> Any:
    """Reads a checkpoint of `save`, bit for bit.

    Args:
      directory: what `save` was given.
      state_like: a state with the structure, shapes and placement to restore: a fresh one after
        `replicate` or `place`. Leaves without a sharding (`jax.eval_shape`) come back on the
        default device.
      step: which, and no other; by default the latest that is whole: damaged ones after it are named in
        a warning.

    Returns:
      The state, placed like `state_like`.

    Raises:
      ValueError: there is no checkpoint, none that is not torn or corrupted, or it holds another model,
        profile, optimizer or number of workers (see `read`), or the other layout.
    """
    path, content = _find(Path(directory).absolute(), step)
    named = leaves.named(state_like)
    _check_leaves(path, content["leaves"], {name: leaves.describe(leaf) for name, leaf in named.items()})
    _check_plans(path, content["plans"], _plans_of(state_like))
    loaded = _load(path, {n: leaves.abstract(x) for n, x in named.items() if np.size(x)})
    values = [leaves.decode(x, loaded[n]) if np.size(x) else leaves.empty(x) for n, x in named.items()]
    return jax.tree.unflatten(jax.tree.structure(state_like), values)


def read(directory: str | Path, state_like: Any, *, step: int | None = None) -> Any:
    """Reads a checkpoint of `save` to the host, whatever workers, profile and layout it was saved with.

    For a run that goes on with other workers (`nf_jax.elastic.resize`), under another mapping, or for
    looking into it. Every process reads all of it.

    Args:
      directory: what `save` was given.
      state_like: one worker's state as `init` returns it, or its `jax.eval_shape`: the same model and
        optimizer; its own number of workers and its residuals do not matter.
      step: as in `restore`.

    Returns:
      A `nf_jax.host_state.host_state`: NumPy, residuals of all workers that there were. A shadow is left
      out: it only measures, and begins anew with `state._replace(shadow=fresh.shadow)`.

    Raises:
      ValueError: as `restore`, or workers differed in what they should share.
    """
    path, content = _find(Path(directory).absolute(), step)
    state_like = jax.tree.map(leaves.shape_of, state_like)
    saved, likes = content["leaves"], leaves.named(state_like)
    asked = {name: leaves.describe(leaf) for name, leaf in likes.items()}
    free = tuple(f"{name}.{field}" for name in content["plans"] for field in ("memory", "pending", "shadow"))
    shared, asked = ({n: x for n, x in xs.items() if not n.startswith(free)} for xs in (saved, asked))
    one_row = {name: [shape[1:], dtype] for name, (shape, dtype) in shared.items() if shape}
    is_stacked = one_row == asked and shared != asked
    _check_leaves(path, one_row if is_stacked else shared, asked)
    loaded = _load(path, {n: leaves.on_host(x, likes.get(n)) for n, x in saved.items() if 0 not in x[0]})
    loaded |= {n: leaves.on_host(x, likes.get(n)) for n, x in saved.items() if 0 in x[0]}
    return host_state(_rebuilt(state_like, loaded, content["plans"]), is_stacked=is_stacked)


def latest_step(directory: str | Path) -> int | None:
    """The number of the latest checkpoint in `directory`, or None; whether it is whole is not looked at."""
    return max(manifest.steps_in(Path(directory)), default=None)


def _rebuilt(state_like: Any, loaded: dict[str, Any], plans: dict[str, Any]) -> Any:
    """The tree as it was saved: like `state_like`, but with the residuals that there were."""

    def leaf_at(key_path: Any, like: Any) -> Any:
        return wrap_keys(like, loaded[jax.tree_util.keystr(key_path)])

    def visit(key_path: Any, node: Any) -> Any:
        if not is_aggregate(node):
            return leaf_at(key_path, node)
        name = jax.tree_util.keystr(key_path)
        shared = jax.tree_util.tree_map_with_path(
            lambda inner, leaf: leaf_at((*key_path, *inner), leaf), node._replace(memory=None, shadow=None)
        )
        memory = {field: _entries(loaded, f"{name}.memory.{field}") for field in node.memory._fields}
        return shared._replace(memory=type(node.memory)(**memory), layout=Layout(**plans[name]))

    return jax.tree_util.tree_map_with_path(visit, state_like, is_leaf=is_aggregate)


def _entries(loaded: dict[str, Any], name: str) -> dict[str, Any]:
    """The entries of a dict in the saved tree, by their keys."""
    start = f"{name}["
    return {ast.literal_eval(n[len(start) : -1]): x for n, x in loaded.items() if n.startswith(start)}


def _step_of(state: Any) -> int:
    if not hasattr(state, "step"):
        raise ValueError(f"save: a {type(state).__name__} has no `step`; pass step=")
    shards = getattr(state.step, "addressable_shards", None)
    return int(np.ravel(shards[0].data if shards else state.step)[0])


def _find(root: Path, step: int | None) -> tuple[Path, dict[str, Any]]:
    """The checkpoint to read and its manifest: the same in all processes."""
    if step is None:
        step = _latest_whole(root) if jax.process_index() == 0 else -1
        if jax.process_count() > 1:
            step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    return root / str(step), manifest.verified(root / str(step))


def _latest_whole(root: Path) -> int:
    refused = []
    for step in reversed(manifest.steps_in(root)):
        try:
            manifest.verified(root / str(step))
        except ValueError as error:
            refused.append(str(error))
            continue
        if refused:
            lines = "\n".join(f"  {line}" for line in refused)
            warnings.warn(f"refused:\n{lines}\nUsing {root / str(step)}.", RuntimeWarning, stacklevel=4)
        return step
    if not refused:
        raise ValueError(f"expected a checkpoint in {root}, found none")
    lines = "".join(f"\n  {line}" for line in refused)
    raise ValueError(f"expected a checkpoint in {root} that is whole, found none:{lines}")


def _is_whole(path: Path) -> bool:
    try:
        manifest.verified(path)
    except ValueError:
        return False
    return True


def _load(path: Path, targets: dict[str, Any]) -> dict[str, Any]:
    try:
        return ocp.load(str(path), targets)
    except Exception as error:  # whatever orbax meets in a checkpoint whose sums are right
        raise ValueError(f"orbax cannot read the checkpoint {path}: {error}") from error


def _check_leaves(path: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    wrong = [name for name in {**asked, **saved} if saved.get(name) != asked.get(name)]
    if wrong:
        lines = [f"  {n}: saved {saved.get(n)}, asked for {asked.get(n)}" for n in wrong[:_MAX_LISTED]]
        lines += [f"  and {len(wrong) - _MAX_LISTED} more"] * (len(wrong) > _MAX_LISTED)
        raise ValueError(
            f"{len(wrong)} leaves of the checkpoint {path} differ from state_like:\n"
            + "\n".join(lines)
            + "\nResiduals belong to their workers: restore with the same model, profile, "
            "optimizer and number of workers, and in the layout that was saved: pmap's from "
            "replicate, shard_map's from place. To go on with others: checkpoint.read, elastic.resize."
        )


def _check_plans(path: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    if wrong := [name for name in asked if saved.get(name) != asked[name]]:
        raise ValueError(
            f"the checkpoint {path} was saved under other regions, buckets, routes, codecs or another "
            f"substrate than state_like's (at {', '.join(wrong)}), though its shapes are the same. Restore "
            "with those, or go on with the new ones: checkpoint.read, elastic.resize."
        )


def _plans_of(state: Any) -> dict[str, Any]:
    """The layout of every aggregate state, by its name in a checkpoint."""
    nodes = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_aggregate)[0]
    found = {jax.tree_util.keystr(path): node for path, node in nodes if is_aggregate(node)}
    return {name: dataclasses.asdict(node.layout) for name, node in found.items()}
