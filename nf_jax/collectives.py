"""Every operation that crosses workers. No other file of the library names a mesh axis in an operation.

Results that are the same on all workers are typed so (`to="invarying"`) where `shard_map` checks it. Sums
over workers that decide something are taken in worker order, so that they have the same bits in one process
and in several; only `mean_exact` leaves the order to the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from nf_jax import codecs

AxisName = str | tuple[str, ...]


def check_axis(axis: AxisName, num_workers: int) -> None:
    """Raises at trace time unless `axis` is bound here and has `num_workers` members."""
    try:
        size = lax.axis_size(axis)
    except NameError as error:
        raise ValueError(
            f"aggregate_gradients: expected to run inside pmap or shard_map with axis {axis!r}, but no such "
            "axis is bound here. Call the transform's update inside the mapped function, with the axis name "
            "that pmap(axis_name=...) or the mesh uses."
        ) from error
    if size != num_workers:
        raise ValueError(
            f"aggregate_gradients: num_workers={num_workers}, but axis {axis!r} has {size} members here. "
            f"Pass num_workers={size} (the state must then be made anew, or resharded)."
        )


def is_checked(axis: AxisName) -> bool:
    """Whether JAX tracks here what varies over `axis` (`shard_map` with `check_vma=True`)."""
    return _names(axis) <= jax.typeof(lax.axis_index(axis)).mat.varying


def varies(value: Array, axis: AxisName) -> bool:
    """Whether JAX knows `value` to differ between the members of `axis`; False where it tracks nothing."""
    return bool(_names(axis) & jax.typeof(value).mat.varying)


def varying(value: Array, axis: AxisName) -> Array:
    """`value`, typed as differing between workers where JAX tracks it (branches must agree in type)."""
    if not is_checked(axis):
        return value
    missing = tuple(name for name in _names(axis) if name not in jax.typeof(value).mat.varying)
    return lax.pcast(value, missing, to="varying") if missing else value


def check_local(leaves: Sequence[Array], paths: Sequence[str], axis: AxisName) -> None:
    """Raises if gradients are already summed over `axis`: nothing would be left to compress.

    Under `shard_map` with `check_vma=True`, `jax.grad` of replicated parameters sums over the axis by itself.
    """
    if not is_checked(axis):
        return
    sharded = [path for path, leaf in zip(paths, leaves, strict=True) if _varying(leaf) - _names(axis)]
    if sharded:
        others = sorted(frozenset().union(*map(_varying, leaves)) - _names(axis))
        raise ValueError(
            f"aggregate_gradients: expected gradients that vary over axis {axis!r} only, but "
            f"{_some(sharded)} differ(s) over {others} too: parameters sharded over another manual axis are "
            "not supported. "
            f"Leave {others} to the compiler (shard_map's axis_names={{...}}), or pass them in `axis`."
        )
    summed = [path for path, leaf in zip(paths, leaves, strict=True) if not _names(axis) <= _varying(leaf)]
    if summed:
        raise ValueError(
            f"aggregate_gradients: expected local gradients, but {_some(summed)} do(es) not vary over axis "
            f"{axis!r}: under shard_map, jax.grad of replicated parameters has already summed them over the "
            "network in FP32. Make the parameters local before the gradient is taken, "
            f"`local = jax.lax.pcast(params, {axis!r}, to='varying')`, and differentiate with respect to "
            "`local`; or pass check_vma=False to shard_map."
        )


def check_uniform(value: Array, axis: AxisName, what: str) -> None:
    """Raises if `value`, on which a branch is taken, may differ between workers (they would deadlock)."""
    if varies(value, axis):
        raise ValueError(
            f"{what} differs between the workers of axis {axis!r}: they would take different branches and "
            "wait for each other for ever. Derive it from replicated values only (lax.pmean, lax.pmax)."
        )


def worker_index(axis: AxisName) -> Array:
    """This worker's number, `int32[]` in `0 .. W - 1`."""
    return lax.axis_index(axis)


def mean_exact(leaves: Sequence[Array], axis: AxisName) -> list[Array]:
    """The plain mean over workers in the leaves' own dtypes: one variadic all-reduce, no copy."""
    return list(lax.pmean(tuple(leaves), axis)) if leaves else []


def mean_leaves(leaves: Sequence[Array], axis: AxisName) -> list[Array]:
    """The plain mean of leaves of any numeric dtype, in that dtype.

    `f16` and `bf16` are summed in f32, small integers in 32 bits, so that the sum loses and overflows
    nothing; the mean of integers is rounded to the nearest, half to even, without leaving the integers.
    """
    if lax.axis_size(axis) == 1 and not is_checked(axis):
        return list(leaves)
    wide = [leaf.astype(_WIDE.get(leaf.dtype.name, leaf.dtype)) for leaf in leaves]
    inexact = [i for i, leaf in enumerate(wide) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    integers = [i for i in range(len(wide)) if i not in set(inexact)]
    means = dict(zip(inexact, mean_exact([wide[i] for i in inexact], axis), strict=True))
    if integers:
        sums = lax.psum(tuple(wide[i] for i in integers), axis)
        means |= {i: _round_mean(s, lax.axis_size(axis)) for i, s in zip(integers, sums, strict=True)}
    return [means[i].astype(leaf.dtype) for i, leaf in enumerate(leaves)]


_WIDE: dict[str, Any] = dict.fromkeys(("bfloat16", "float16"), jnp.float32)
_WIDE |= dict.fromkeys(("int8", "int16"), jnp.int32) | dict.fromkeys(("uint8", "uint16"), jnp.uint32)


def _round_mean(total: Array, num: int) -> Array:
    quotient, twice = total // num, 2 * (total % num)
    up = (twice > num) | ((twice == num) & (quotient % 2 == 1))
    return quotient + up.astype(total.dtype)


def exchange(shards: Array, axis: AxisName) -> Array:
    """All-to-all: `[W, ...]`, row i for worker i -> `[W, ...]`, row i from worker i."""
    return lax.all_to_all(shards, axis, split_axis=0, concat_axis=0, tiled=True)


def gather(value: Array, axis: AxisName) -> Array:
    """All-gather: `[...]` -> `[W, ...]` in worker order, the same on all workers."""
    if is_checked(axis):
        return lax.all_gather(varying(value, axis), axis, to="invarying")
    return lax.all_gather(value, axis)


def agree(values: Array, axis: AxisName) -> Array:
    """The mean over workers of a small vector that travels as bf16, the same bits on every worker.

    Two phases (a shard of the vector is averaged by one worker, in f32 and in worker order, and handed to
    all), so that a worker sends about `4 * n` bytes whatever `W`; with two workers one phase does the same.

    Args:
      values: `f32[n]`.

    Returns:
      `f32[n]`, rounded to bf16 on the way.
    """
    num_workers = lax.axis_size(axis)
    if num_workers == 2:
        return codecs.from_bf16_words(gather(codecs.to_bf16_words(values), axis)).mean(0)
    size = -(-values.shape[0] // num_workers)
    padded = jnp.pad(values, (0, num_workers * size - values.shape[0])).reshape(num_workers, size)
    mean = codecs.from_bf16_words(exchange(codecs.to_bf16_words(padded), axis)).mean(0)
    return codecs.from_bf16_words(gather(codecs.to_bf16_words(mean), axis)).reshape(-1)[: values.shape[0]]


def _names(axis: AxisName) -> frozenset[str]:
    return frozenset((axis,) if isinstance(axis, str) else axis)


def _varying(value: Array) -> frozenset[str]:
    return jax.typeof(value).mat.varying


def _some(paths: Sequence[str], most: int = 5) -> str:
    listed = ", ".join(repr(path) for path in paths[:most])
    return listed if len(paths) <= most else f"{listed} and {len(paths) - most} more"
