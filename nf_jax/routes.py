"""The routes: how the lanes of one group are averaged, each a codec and its collectives.

`ROUTES` is the table, in the order of `Route`; a new codec is two functions and one row. A route *sends*
(all that crosses workers and changes residuals) and *receives* (what arrived -> the means); it moves data
without deciding anything. What a lossy stage leaves unsent is its residual, kept by who caused it: by each
worker for the way up, by the worker that reduces a shard for the way down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from nf_jax import codecs, collectives, segments
from nf_jax.groups import (
    Given,
    Group,
    Sent,
    add_residuals,
    as_f32,
    cut_shards,
    decode_stacks,
    in_runs,
    keep_unless,
    new_residuals,
    norm_ratio,
    nothing_voted,
    split_stacks,
    squared_norm,
    sum_by_lane,
    wide_gradients,
)
from nf_jax.profile import Route
from nf_jax.votes import payload_shapes, receive_votes, send_votes

# ------------------------------------------------------------------------------------------------- FP32


def average_fp32(group: Group, given: Given, axis: collectives.Where) -> list[Array]:
    """The plain mean, stacks in runs; residuals are left as they are (`settle_fp32` pays them out)."""
    # Put into runs before the sum, so that dividing it works in place.
    return collectives.mean_exact(in_runs(group, wide_gradients(given)), axis)


def settle_fp32(group: Group, given: Given, axis: collectives.Where) -> tuple[list[Array], list[Array]]:
    """The plain mean on the first exact step after a lossy one: drains the residuals into it, or drops them.

    Draining costs no extra bytes: a worker adds its residual to its gradient, and, where it reduced a
    shard, `W` times what it still owes there. Who calls it sets the residuals to zero.

    Returns:
      The means, stacks in runs, and what this worker sent, stacks.
    """
    if group.codec.on_fallback == "drop":
        local = wide_gradients(given)
    else:
        local = add_residuals(given)
        if given.server is not None:
            owed = _owed(group, given.server, axis)
            local = [stack + part for stack, part in zip(local, owed, strict=True)]
    # Put into runs after the sum: before it, XLA would copy the residuals.
    return in_runs(group, collectives.mean_exact(local, axis)), local


def _owed(group: Group, server: Sequence[Array], axis: collectives.Where) -> list[Array]:
    """`W` times the server residual, at the elements this worker reduces, zero elsewhere: stacks."""
    index, owed = collectives.worker_index(axis), []
    for segment, part in zip(group.stack_segments, server, strict=True):
        rows = segments.shard_matrix(part, segment)
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


def send_bf16(group: Group, given: Given, axis: collectives.Where) -> Sent:
    """Two bytes an element both ways, summed in f32; both roundings have their residual."""
    corrected = add_residuals(given)
    words = [codecs.to_bf16_words(stack) for stack in corrected]
    sent = [codecs.from_bf16_words(stack) for stack in words]
    received = collectives.exchange(cut_shards(group, words), axis)
    mean = codecs.mean_bf16_words(received)
    if given.server is not None:
        mean = mean + jnp.concatenate([part.reshape(-1) for part in given.server])
    down = codecs.to_bf16_words(mean)
    server = None
    if given.server is not None:
        unsent = split_stacks(mean - codecs.from_bf16_words(down), group, codecs.WORD_BITS)
        server = [keep_unless(given.ok, old, new) for old, new in zip(given.server, unsent, strict=True)]
    residuals, squared = new_residuals(group, given, corrected, sent)
    norms = [jax.vmap(squared_norm)(part) for part in split_stacks(mean, group, codecs.WORD_BITS)]
    numbers = jnp.concatenate([squared, sum_by_lane(group, jnp.concatenate(norms))])
    statistics = lax.bitcast_convert_type(numbers, jnp.uint16).reshape(-1)
    gathered = collectives.gather(jnp.concatenate([down, statistics]), axis)

    num_workers, size = gathered.shape[0], down.shape[0]
    squared, norms = jnp.split(as_f32(gathered[:, size:].reshape(num_workers, -1, 2)).sum(0), 2)
    no_votes, _ = nothing_voted(group)
    return Sent(
        (gathered,), residuals, server, no_votes, norm_ratio(squared / jnp.float32(num_workers), norms), sent
    )


def receive_bf16(group: Group, payload: tuple[Array, ...]) -> list[Array]:
    """The means, stacks in runs, `f32[k, *run_shape]`."""
    words = payload[0][:, : _shard_sizes(group)]
    decode = jax.vmap(lambda part: _poisoned(codecs.from_bf16_words(part)))
    return in_runs(group, decode_stacks(group, words, codecs.WORD_BITS, decode))


def bf16_shapes(group: Group, num_workers: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shape of a payload: what every worker gathered, `uint16[W, n]`."""
    return (jax.ShapeDtypeStruct((num_workers, _shard_sizes(group) + 4 * len(group.lanes)), jnp.uint16),)


def _shard_sizes(group: Group) -> int:
    return sum(segment.shard_size for segment in group.segments)


def _poisoned(mean: Array) -> Array:
    """A leaf with one non-finite element is non-finite as a whole, as on the sign routes."""
    return mean + jnp.sum(mean * jnp.float32(0))


# ------------------------------------------------------------------------------------------------ table


class Lossy(NamedTuple):
    """One lossy route.

    Attributes:
      send: `(group, given, axis) -> Sent`.
      receive: `(group, payload) -> means`; no collective.
      payload_shapes: `(group, num_workers)` -> shapes and dtypes of `Sent.payload`.
    """

    send: Callable[[Group, Given, collectives.Where], Sent]
    receive: Callable[[Group, tuple[Array, ...]], list[Array]]
    payload_shapes: Callable[[Group, int], tuple[jax.ShapeDtypeStruct, ...]]


def _votes(gated: bool) -> Lossy:
    return Lossy(
        send=functools.partial(send_votes, gated=gated),
        receive=functools.partial(receive_votes, gated=gated),
        payload_shapes=functools.partial(payload_shapes, gated=gated),
    )


ROUTES: dict[Route, Lossy] = {
    Route.BF16: Lossy(send_bf16, receive_bf16, bf16_shapes),
    Route.SIGN: _votes(gated=False),
    Route.TERNARY: _votes(gated=True),
}
"""Every route but FP32, which sends and receives at once (`average_fp32`, `settle_fp32`)."""
