"""The routes: how the lanes of one group are averaged, each a codec and its collectives.

`ROUTES` is the table, in the order of `Route`; a new codec is one function and one row. Every route has
the same signature, `(group, given, axis) -> Averaged`, and moves data without deciding anything. What a
lossy stage leaves unsent is its residual, kept by who caused it: by each worker for the way up, by the
worker that reduces a shard for the way down.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from nf_jax import codecs, collectives
from nf_jax.groups import (
    Averaged,
    Given,
    Group,
    add_residuals,
    as_f32,
    cut_shards,
    decode_stacks,
    new_residuals,
    norm_ratio,
    nothing_voted,
    split_stacks,
    squared_norms,
    stack_leaves,
    sum_by_lane,
    to_leaves,
    wide_gradients,
)
from nf_jax.votes import average_sign, average_ternary

# ------------------------------------------------------------------------------------------------- FP32


def average_fp32(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """The plain mean; residuals are left as they are (`settle_fp32` pays them out)."""
    means = collectives.mean_exact(wide_gradients(given), axis)
    sent = lambda: stack_leaves(group, wide_gradients(given))  # noqa: E731
    return Averaged(means, sent, given.residuals, given.server, *nothing_voted(group))


def settle_fp32(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """The plain mean on the first exact step after a lossy one: drains the residuals into it, or drops them.

    Draining costs no extra bytes: a worker adds its residual to its gradient, and, where it reduced a
    shard, `W` times what it still owes there.
    """
    local = stack_leaves(group, wide_gradients(given))
    if group.codec.on_fallback == "drain":
        local = add_residuals(group, given)
        if given.server is not None:
            owed = _owed(group, given.server, axis)
            local = [stack + part for stack, part in zip(local, owed, strict=True)]
    means = collectives.mean_exact(local, axis)
    zeros = [jnp.zeros_like(stack) for stack in local] if given.residuals is not None else None
    server = None if given.server is None else jnp.zeros_like(given.server)
    return Averaged(to_leaves(given, means), lambda: local, zeros, server, *nothing_voted(group))


def _owed(group: Group, server: Array, axis: collectives.AxisName) -> list[Array]:
    """`W` times the server residual, at the elements this worker reduces, zero elsewhere: stacks."""
    index, owed = collectives.worker_index(axis), []
    for segment, part in zip(
        group.stack_segments, split_stacks(server, group, codecs.WORD_BITS), strict=True
    ):
        rows = part[:, : segment.shard_rows * segment.cols]
        rows = rows.reshape(part.shape[0], segment.shard_rows, *segment.matrix_shape[1:])
        shape = (part.shape[0], segment.num_workers * segment.shard_rows, *segment.matrix_shape[1:])
        whole = lax.dynamic_update_slice_in_dim(
            collectives.varying(jnp.zeros(shape, jnp.float32), axis),
            rows * jnp.float32(segment.num_workers),
            index * segment.shard_rows,
            1,
        )
        owed.append(whole[:, : segment.rows])
    return owed


# ------------------------------------------------------------------------------------------------- BF16


def average_bf16(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """Two bytes an element both ways, summed in f32; both roundings have their residual."""
    corrected = add_residuals(group, given)
    words = lax.optimization_barrier([codecs.to_bf16_words(stack) for stack in corrected])
    sent = [codecs.from_bf16_words(stack) for stack in words]
    received = collectives.exchange(cut_shards(group, words), axis)
    mean = codecs.from_bf16_words(received).mean(0)
    if given.server is not None:
        mean = mean + given.server
    down = lax.optimization_barrier(codecs.to_bf16_words(mean))
    server = None if given.server is None else mean - codecs.from_bf16_words(down)
    residuals, squared = new_residuals(group, given, corrected, sent)
    statistics = lax.bitcast_convert_type(squared, jnp.uint16).reshape(-1)
    gathered = collectives.gather(jnp.concatenate([down, statistics]), axis)

    num_workers, size = gathered.shape[0], down.shape[0]
    decode = jax.vmap(lambda part: _poisoned(codecs.from_bf16_words(part)))
    means = decode_stacks(group, gathered[:, :size], codecs.WORD_BITS, decode)
    squared = as_f32(gathered[:, size:].reshape(num_workers, -1, 2)).sum(0)
    norms = sum_by_lane(group, jnp.concatenate([squared_norms(stack) for stack in means]))
    no_votes, _ = nothing_voted(group)
    ratio = norm_ratio(squared / jnp.float32(num_workers), norms)
    return Averaged(to_leaves(given, means), lambda: sent, residuals, server, no_votes, ratio)


def _poisoned(mean: Array) -> Array:
    """A leaf with one non-finite element is non-finite as a whole, as on the sign routes."""
    return mean + jnp.sum(mean * jnp.float32(0))


# ------------------------------------------------------------------------------------------------ table

RouteFunction = Callable[[Group, Given, collectives.AxisName], Averaged]

ROUTES: tuple[RouteFunction, ...] = (average_fp32, average_bf16, average_sign, average_ternary)
