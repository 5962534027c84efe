"""The leaves of a state as a checkpoint holds them: named, described, in forms that can be written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nf_jax.state import is_key, wrap_keys


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their names in a checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def describe(leaf: Any) -> list[Any]:
    """Global shape and dtype, as the manifest keeps them."""
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


def encode(leaf: Any) -> Any:
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


def abstract(leaf: Any) -> Any:
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


def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """A leaf's shape and dtype alone, keys and Python scalars included."""
    return jax.ShapeDtypeStruct(np.shape(leaf), getattr(leaf, "dtype", None) or jnp.result_type(leaf))


def on_host(saved: list[Any], like: Any) -> np.ndarray:
    """The shape and dtype in which orbax is to read a leaf as NumPy, from its description."""
    shape, dtype = saved
    if is_key(like):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(tuple(shape), like.dtype))
        shape, dtype = data.shape, data.dtype
    # Broadcasting takes no memory.
    return np.broadcast_to(np.zeros((), jnp.dtype(dtype)), shape)


def decode(like: Any, value: Any) -> Any:
    """What orbax read as the kind of leaf that was saved, placed like `like`."""
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


def empty(like: Any) -> Any:
    """A leaf of size 0, which orbax does not store."""
    if isinstance(like, Array | np.ndarray):
        return like
    return jnp.zeros(like.shape, like.dtype)
