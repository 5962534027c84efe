"""Checkpoints that keep every worker's residuals, verified when they are read, continued bit for bit.

The only file that imports orbax.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from nf_jax.state import check_layout, find_states, is_key, wrap_keys

_MANIFEST = "nf_jax.json"


def save(directory: str | Path, state: Any, *, step: int | None = None) -> Path:
    """Writes `directory/<step>`: all of the state, every worker's residuals included.

    The checkpoint appears under its name only when it is whole. In several processes all of them
    call this, with a directory that they share.

    Args:
      directory: where a run's checkpoints lie, on a local or mounted file system; made if missing.
      state: any pytree as pmap returns it (stacked; do not unreplicate it) or shard_map (global).
      step: the checkpoint's number; by default `state.step`.

    Returns:
      The checkpoint's path.

    Raises:
      ValueError: there is such a checkpoint already, or only one worker's residuals are left.
    """
    for path, aggregate in find_states(state):
        check_layout(path, aggregate)
    step = _step_of(state) if step is None else int(step)
    target = Path(directory).absolute() / str(step)
    if target.exists():
        raise ValueError(f"save: {target} exists already; delete it or pass another step")
    partial = target.with_name(f"{step}.partial")
    leaves = {name: leaf for name, leaf in _named(state).items() if np.size(leaf)}
    ocp.save(str(partial), {name: _encode(leaf) for name, leaf in leaves.items()}, overwrite=True)
    if jax.process_index() == 0:
        described = {name: _describe(leaf) for name, leaf in _named(state).items()}
        manifest = {"format": 1, "leaves": described, "files": _checksums(partial)}
        own = zlib.crc32(json.dumps(manifest).encode())
        (partial / _MANIFEST).write_text(json.dumps({**manifest, "crc32": own}))
        os.replace(partial, target)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"nf_jax.save {target}")
    return target


def restore(directory: str | Path, state_like: Any, *, step: int | None = None) -> Any:
    """Reads a checkpoint of `save`, bit for bit.

    Args:
      directory: what `save` was given.
      state_like: a state with the structure, shapes and placement to restore: a fresh one after
        `replicate` or `place`. Leaves without a sharding (`jax.eval_shape`) come back on the
        default device.
      step: which; by default the latest.

    Returns:
      The state, placed like `state_like`.

    Raises:
      ValueError: there is no checkpoint, it is torn or corrupted, or it holds another model,
        profile, optimizer or number of workers, or the other layout.
    """
    root = Path(directory).absolute()
    step = latest_step(root) if step is None else step
    if step is None:
        raise ValueError(f"restore: expected a checkpoint in {root}, found none")
    path = root / str(step)
    manifest = _verified(path)
    named = _named(state_like)
    _check_leaves(path, manifest["leaves"], {name: _describe(leaf) for name, leaf in named.items()})
    try:
        loaded = ocp.load(str(path), {n: _abstract(x) for n, x in named.items() if np.size(x)})
    except Exception as error:  # whatever orbax meets in a checkpoint whose sums are right
        raise ValueError(f"restore: orbax cannot read the checkpoint {path}: {error}") from error
    leaves = [_decode(x, loaded[n]) if np.size(x) else _empty(x) for n, x in named.items()]
    return jax.tree.unflatten(jax.tree.structure(state_like), leaves)


def latest_step(directory: str | Path) -> int | None:
    """The number of the latest checkpoint in `directory`, or None."""
    root = Path(directory)
    names = [child.name for child in root.iterdir()] if root.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=None)


def _step_of(state: Any) -> int:
    if not hasattr(state, "step"):
        raise ValueError(f"save: a {type(state).__name__} has no `step`; pass step=")
    shards = getattr(state.step, "addressable_shards", None)
    return int(np.ravel(shards[0].data if shards else state.step)[0])


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _describe(leaf: Any) -> list[Any]:
    shape = list(np.shape(leaf))
    if _is_stacked(leaf):
        shape[0] = jax.device_count()
    return [shape, str(getattr(leaf, "dtype", None) or jnp.result_type(leaf))]


def _is_stacked(leaf: Any) -> bool:
    """Whether, in several processes, the leaf is pmap's: this process's rows, one per device."""
    if jax.process_count() == 1 or not isinstance(leaf, Array) or not leaf.is_fully_addressable:
        return False
    num_devices = len(leaf.sharding.device_set)
    return leaf.ndim > 0 and num_devices == leaf.shape[0] == jax.local_device_count()


def _global_sharding() -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(jax.devices()), ("worker",)), PartitionSpec("worker"))


def _encode(leaf: Any) -> Any:
    """What orbax can write: no typed keys, no Python or NumPy scalars, no process-local arrays."""
    if not isinstance(leaf, Array):
        return np.asarray(leaf, getattr(leaf, "dtype", None) or jnp.result_type(leaf))
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    if _is_stacked(leaf):
        rows = [shard.data for shard in data.addressable_shards]
        shape = (jax.device_count(), *data.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, _global_sharding(), rows)
    if jax.process_count() > 1 and data.is_fully_addressable:
        return np.asarray(data)
    return data


def _abstract(leaf: Any) -> Any:
    """The shape, dtype and placement in which orbax is to read a leaf."""
    sharding = _global_sharding() if _is_stacked(leaf) else getattr(leaf, "sharding", None)
    shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None) or jnp.result_type(leaf)
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = data.shape, data.dtype
    if _is_stacked(leaf):
        shape = (jax.device_count(), *shape[1:])
    is_own = jax.process_count() > 1 and not _is_stacked(leaf)
    if sharding is None or (is_own and sharding.is_fully_addressable):
        # Orbax then reads NumPy; broadcasting takes no memory for it here.
        return np.broadcast_to(np.zeros((), dtype), shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _decode(like: Any, value: Any) -> Any:
    if _is_stacked(like):
        rows = [shard.data for shard in value.addressable_shards]
        shape = (like.shape[0], *value.shape[1:])
        value = jax.make_array_from_single_device_arrays(shape, like.sharding, rows)
    elif isinstance(like, np.ndarray | np.generic):
        return np.asarray(value)[()] if isinstance(like, np.generic) else np.asarray(value)
    elif isinstance(like, bool | int | float | complex):
        return type(like)(np.asarray(value).item())
    elif not isinstance(value, Array):
        value = jax.device_put(value, getattr(like, "sharding", None))
    return wrap_keys(like, value)


def _empty(like: Any) -> Any:
    """Orbax stores no arrays of size 0."""
    if isinstance(like, Array | np.ndarray):
        return like
    return jnp.zeros(like.shape, like.dtype)


def _checksums(path: Path) -> dict[str, list[int]]:
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != _MANIFEST)
    name = lambda file: file.relative_to(path).as_posix()  # noqa: E731
    return {name(file): [file.stat().st_size, _crc32(file)] for file in files}


def _crc32(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def _verified(path: Path) -> dict[str, Any]:
    """The manifest, once every file has proved to be as written: orbax keeps no sums of data."""
    if not path.is_dir():
        raise ValueError(f"restore: expected a checkpoint at {path}, found none")
    damaged = f"restore: the checkpoint {path} is torn or corrupted"
    advice = "restore an earlier one with step=, and delete this one"
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        own = manifest.pop("crc32")
        intact = zlib.crc32(json.dumps(manifest).encode()) == own
        files, found = manifest["files"], _checksums(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{damaged}, or was not written by nf_jax: {_MANIFEST}: {error!r}; {advice}"
        ) from error
    wrong = sorted(name for name in {**files, **found} if files.get(name) != found.get(name))
    if wrong or not intact:
        shown = ", ".join(wrong[:5]) if intact else _MANIFEST
        raise ValueError(f"{damaged} ({shown}: missing, added or changed since then); {advice}")
    return manifest


def _check_leaves(path: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    wrong = [name for name in {**asked, **saved} if saved.get(name) != asked.get(name)]
    if wrong:
        lines = [f"  {n}: saved {saved.get(n)}, asked for {asked.get(n)}" for n in wrong[:5]]
        raise ValueError(
            f"restore: {len(wrong)} leaves of the checkpoint {path} differ from state_like:\n"
            + "\n".join(lines)
            + "\nResiduals belong to their workers: restore with the same model, profile, "
            "optimizer and number of workers, and in the layout that was saved: pmap's from "
            "replicate, shard_map's from place."
        )
