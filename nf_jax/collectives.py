"""Every operation that crosses workers. No other file of the library names a mesh axis in an operation.

Results that are the same on all workers are typed so (`to="invarying"`) where `shard_map` checks it. Sums
over workers that decide something are taken in worker order, so that they have the same bits in one process
and in several; only exact means leave the order to the backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from nf_jax import codecs

# Exact leaves up to this many elements are summed as one array: the copy costs less than a message.
MAX_JOINED_SIZE = 2**14
MAX_JOINED = 16  # arrays; XLA takes long to compile a copy of hundreds

AxisName = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Level:
    """Workers that average among themselves: those along `names`, or each of `groups` of them by itself.

    Attributes:
      names: the mesh axis, or several.
      groups: numbers of the workers along the axis, a row for each group; None: all of them.
    """

    names: AxisName
    groups: tuple[tuple[int, ...], ...] | None = None


Where = AxisName | Level


def levels(axis: AxisName, num_workers: int, num_inner: int) -> tuple[Level, Level | None]:
    """Splits the data-parallel axis in two: between hosts, and inside each (None where that is one device).

    Two names are the outer and the inner axis of a mesh. One name is grouped: worker `h * num_inner + d` is
    device `d` of host `h`, which is the order of `jax.devices()`.
    """
    if num_inner == 1:
        return Level(axis), None
    if not isinstance(axis, str):
        return Level(axis[0]), Level(axis[1])
    hosts = range(num_workers // num_inner)
    inner = tuple(tuple(h * num_inner + d for d in range(num_inner)) for h in hosts)
    return Level(axis, tuple(zip(*inner, strict=True))), Level(axis, inner)


def check_axis(axis: AxisName, num_workers: int, num_inner: int = 1) -> None:
    """Raises at trace time unless `axis` is bound here and has as many members as planned."""
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
    if num_inner == 1:
        return
    if isinstance(axis, str):
        if is_checked(axis):
            raise ValueError(
                f"aggregate_gradients: num_workers=({num_workers // num_inner}, {num_inner}) over the single "
                f"axis {axis!r} groups its members, which JAX does not support under shard_map with "
                "check_vma=True. Use a mesh with two axes and axis=(outer, inner), or check_vma=False."
            )
        return
    shape = tuple(lax.axis_size(name) for name in axis)
    if shape != (num_workers // num_inner, num_inner):
        raise ValueError(
            f"aggregate_gradients: expected axes {axis!r} of sizes {(num_workers // num_inner, num_inner)}, "
            f"as in num_workers, got {shape}. The outer axis (between hosts) comes first."
        )


def is_checked(axis: Where) -> bool:
    """Whether JAX tracks here what varies over `axis` (`shard_map` with `check_vma=True`)."""
    return _names(axis) <= jax.typeof(lax.axis_index(_axis(axis))).mat.varying


def varies(value: Array, axis: Where) -> bool:
    """Whether JAX knows `value` to differ between the members of `axis`; False where it tracks nothing."""
    return bool(_names(axis) & jax.typeof(value).mat.varying)


def varying(value: Array, axis: Where) -> Array:
    """`value`, typed as differing between workers where JAX tracks it (branches must agree in type)."""
    if not is_checked(axis):
        return value
    missing = tuple(name for name in _names(axis) if name not in jax.typeof(value).mat.varying)
    return lax.pcast(value, missing, to="varying") if missing else value


def vary_like(value: Array, other: Array, among: Where | None = None) -> Array:
    """`value`, typed as differing wherever `other` does, less `among`: what loops and branches carry."""
    extra = jax.typeof(other).mat.varying - (frozenset() if among is None else _names(among))
    missing = tuple(sorted(extra - jax.typeof(value).mat.varying))
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


def num_members(axis: Where) -> int:
    """How many workers average among themselves."""
    groups = axis.groups if isinstance(axis, Level) else None
    return len(groups[0]) if groups else lax.axis_size(_axis(axis))


def worker_index(axis: Where) -> Array:
    """This worker's number among those it averages with, `int32[]` in `0 .. num_members - 1`."""
    index, groups = lax.axis_index(_axis(axis)), _groups(axis)["axis_index_groups"]
    if groups is None:
        return index
    place = np.zeros((len(groups) * len(groups[0]),), np.int32)
    for group in groups:
        place[list(group)] = range(len(group))
    return jnp.asarray(place)[index]


def mean_exact(leaves: Sequence[Array], axis: Where) -> list[Array]:
    """The plain mean over workers in the leaves' own dtypes: one variadic all-reduce, no copy."""
    return list(lax.pmean(tuple(leaves), _axis(axis), **_groups(axis))) if leaves else []


def mean_of_rows(stack: Array, axis: Where) -> Array:
    """Reduce-scatter: `f32[k, D * r, ...]` -> `f32[k, r, ...]`, the mean of the rows of this worker.

    On CPU it is an all-to-all, of the same bytes, and a sum in worker order: gloo's own takes four times as
    long.
    """
    num = num_members(axis)

    def scatter(stack: Array) -> Array:
        return lax.psum_scatter(stack, _axis(axis), scatter_dimension=1, tiled=True, **_groups(axis))

    def exchange_and_sum(stack: Array) -> Array:
        rows = stack.reshape(stack.shape[0], num, stack.shape[1] // num, *stack.shape[2:])
        return codecs.sum_in_order(exchange(jnp.moveaxis(rows, 1, 0), axis))

    return lax.platform_dependent(stack, cpu=exchange_and_sum, default=scatter) * jnp.float32(1 / num)


def gather_rows(stack: Array, axis: Where) -> Array:
    """All-gather: `[k, r, ...]` -> `[k, D, r, ...]`, the shares of all workers in their order."""
    return jnp.moveaxis(gather(stack, axis), 0, 1)


def mean_leaves(leaves: Sequence[Array], axis: AxisName) -> list[Array]:
    """The plain mean of leaves of any numeric dtype, in that dtype.

    `f16` and `bf16` are summed in f32, small integers in 32 bits, so that the sum loses and overflows
    nothing; the mean of integers is rounded to the nearest, half to even, without leaving the integers.
    """
    if lax.axis_size(axis) == 1 and not is_checked(axis):
        return list(leaves)
    return _mean_beside(leaves, (), axis)[0]


def mean_and_gather(leaves: Sequence[Array], numbers: Array, axis: AxisName) -> tuple[list[Array], Array]:
    """`mean_leaves(leaves)` and `gather(numbers)`, `f32[n]` -> `f32[W, n]`, together where that can be.

    Beside an all-reduce a gather waits for all workers a second time. So the numbers ride along, each
    worker's in a row of its own, zero elsewhere: a sum with zeros is exact in any order.
    """
    num_workers = lax.axis_size(axis)
    if num_workers == 1 or not rides_along([leaf.dtype for leaf in leaves]):
        return mean_leaves(leaves, axis), gather(numbers, axis)
    is_own = jnp.arange(num_workers)[:, None] == lax.axis_index(axis)
    means, (gathered,) = _mean_beside(leaves, (jnp.where(is_own, numbers, jnp.float32(0)),), axis)
    return means, gathered


def _mean_beside(
    leaves: Sequence[Array], others: Sequence[Array], axis: AxisName
) -> tuple[list[Array], list[Array]]:
    """The means of leaves and, from the same all-reduce, the sums of others."""
    wide = [leaf.astype(_WIDE.get(leaf.dtype.name, leaf.dtype)) for leaf in leaves]
    inexact = [i for i, leaf in enumerate(wide) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    integers = [i for i in range(len(wide)) if i not in set(inexact)]
    num_workers = lax.axis_size(axis)
    sums = _sum_joined([*(wide[i] for i in inexact), *others], axis)
    means = {i: total / num_workers for i, total in zip(inexact, sums, strict=False)}
    if integers:
        totals = lax.psum(tuple(wide[i] for i in integers), axis)
        means |= {i: _round_mean(total, num_workers) for i, total in zip(integers, totals, strict=True)}
    return [means[i].astype(leaf.dtype) for i, leaf in enumerate(leaves)], sums[len(inexact) :]


def _sum_joined(arrays: Sequence[Array], axis: AxisName) -> list[Array]:
    """Sums over workers, in one variadic all-reduce; small arrays of one dtype as a single one.

    Backends without a combiner sum a variadic all-reduce array by array: between hosts every bias would pay
    for messages, headers and a wait of its own.
    """
    if not arrays:
        return []
    kinds: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        kind = (array.dtype, _varying(array)) if array.size <= MAX_JOINED_SIZE else i
        kinds.setdefault(kind, []).append(i)
    groups = [own[at : at + MAX_JOINED] for own in kinds.values() for at in range(0, len(own), MAX_JOINED)]
    joined = [
        jnp.concatenate([arrays[i].reshape(-1) for i in members]) if len(members) > 1 else arrays[members[0]]
        for members in groups
    ]
    sums: dict[int, Array] = {}
    for members, total in zip(groups, lax.psum(tuple(joined), axis), strict=True):
        sizes = [arrays[i].size for i in members]
        parts = jnp.split(total, np.cumsum(sizes)[:-1].tolist()) if len(members) > 1 else [total]
        sums |= {i: part.reshape(arrays[i].shape) for i, part in zip(members, parts, strict=True)}
    return [sums[i] for i in range(len(arrays))]


def rides_along(dtypes: Sequence[Any]) -> bool:
    """Whether numbers that are gathered beside leaves of these dtypes share their all-reduce."""
    return any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


_WIDE: dict[str, Any] = dict.fromkeys(("bfloat16", "float16"), jnp.float32)
_WIDE |= dict.fromkeys(("int8", "int16"), jnp.int32) | dict.fromkeys(("uint8", "uint16"), jnp.uint32)


def _round_mean(total: Array, num: int) -> Array:
    quotient, twice = total // num, 2 * (total % num)
    up = (twice > num) | ((twice == num) & (quotient % 2 == 1))
    return quotient + up.astype(total.dtype)


def exchange(shards: Array, axis: Where) -> Array:
    """All-to-all: `[W, ...]`, row i for worker i -> `[W, ...]`, row i from worker i."""
    return lax.all_to_all(shards, _axis(axis), split_axis=0, concat_axis=0, tiled=True, **_groups(axis))


def gather(value: Array, axis: Where) -> Array:
    """All-gather: `[...]` -> `[W, ...]` in worker order, the same on all workers."""
    if is_checked(axis):
        return lax.all_gather(varying(value, axis), _axis(axis), to="invarying", **_groups(axis))
    return lax.all_gather(value, _axis(axis), **_groups(axis))


def agree(values: Array, axis: Where) -> Array:
    """The mean over workers of a small vector that travels as bf16, the same bits on every worker.

    Two phases (a shard of the vector is averaged by one worker, in f32 and in worker order, and handed to
    all), so that a worker sends about `4 * n` bytes whatever `W`; with two workers one phase does the same.

    Args:
      values: `f32[n]`.

    Returns:
      `f32[n]`, rounded to bf16 on the way.
    """
    num_workers = num_members(axis)
    if num_workers == 2:
        return codecs.from_bf16_words(gather(codecs.to_bf16_words(values), axis)).mean(0)
    size = -(-values.shape[0] // num_workers)
    padded = jnp.pad(values, (0, num_workers * size - values.shape[0])).reshape(num_workers, size)
    mean = codecs.from_bf16_words(exchange(codecs.to_bf16_words(padded), axis)).mean(0)
    return codecs.from_bf16_words(gather(codecs.to_bf16_words(mean), axis)).reshape(-1)[: values.shape[0]]


def _axis(axis: Where) -> AxisName:
    return axis.names if isinstance(axis, Level) else axis


def _groups(axis: Where) -> dict[str, Any]:
    groups = axis.groups if isinstance(axis, Level) else None
    return {"axis_index_groups": groups and [list(group) for group in groups]}


def _names(axis: Where) -> frozenset[str]:
    names = _axis(axis)
    return frozenset((names,) if isinstance(names, str) else names)


def _varying(value: Array) -> frozenset[str]:
    return jax.typeof(value).mat.varying


def _some(paths: Sequence[str], most: int = 5) -> str:
    listed = ", ".join(repr(path) for path in paths[:most])
    return listed if len(paths) <= most else f"{listed} and {len(paths) - most} more"
