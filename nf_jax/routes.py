"""The routes: how the lanes of one group are averaged, each a codec and its collectives.

`ROUTES` is the table, in the order of `Route`; a new codec is one function and one row. Every route has
the same signature, `(group, given, axis) -> Averaged`, and moves data without deciding anything.

SIGN and TERNARY, per worker: pack one or two bits of every element; hand shard i to worker i (all-to-all);
count there, on whole words; send the counts, or the shard requantized, to all (all-gather); decode. What a
lossy stage leaves unsent is its residual, kept by who caused it: by each worker for the way up, by the
worker that reduces a shard for the way down (error feedback: arXiv 1901.09847, 2102.02888).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from nf_jax import codecs, collectives
from nf_jax.codecs import Segment
from nf_jax.profile import Codec, Route


@dataclasses.dataclass(frozen=True)
class Group:
    """Lanes that switch together, with the leaves of theirs that can be packed. Static.

    Attributes:
      lanes: indices of its lanes in the plan.
      leaves: indices of its packable leaves in the flattened tree, those of a stack side by side.
      segments: how each of these leaves is cut into shards.
      lane_of_leaf: for each of these leaves, the position of its lane in `lanes`.
      stacks: how many leaves each stack has. Leaves of one stack are alike and are worked on as one array,
        which keeps the compiled program small.
      codec: the codec settings of its region.
      routes: the routes that it can ever take.
    """

    lanes: tuple[int, ...]
    leaves: tuple[int, ...]
    segments: tuple[Segment, ...]
    lane_of_leaf: tuple[int, ...]
    stacks: tuple[int, ...]
    codec: Codec
    routes: tuple[Route, ...]

    @property
    def is_lossy(self) -> bool:
        return any(route != Route.FP32 for route in self.routes)

    @property
    def keeps_residual(self) -> bool:
        return self.is_lossy and self.codec.error_feedback

    @property
    def keeps_server_residual(self) -> bool:
        requantizes = self.codec.down != "count" and bool({Route.SIGN, Route.TERNARY} & {*self.routes})
        return self.codec.server_error_feedback and (requantizes or Route.BF16 in self.routes)

    @property
    def stack_segments(self) -> list[Segment]:
        """The segment that the leaves of each stack share."""
        starts = np.cumsum([0, *self.stacks[:-1]]).tolist()
        return [self.segments[start] for start in starts]


class Given(NamedTuple):
    """What a route is given. A *stack* holds leaves that are alike, `f32[k, *matrix_shape]`.

    Attributes:
      gradients: local gradients, `[*shape]` in their own dtype; differ between workers.
      residuals: what the worker has not sent yet, stacks; None without error feedback.
      server: what the worker as reducer has not sent yet, `f32[sum of shard sizes]`, or None.
      seed: `uint32[]`, the same on all workers, another at every step.
    """

    gradients: Sequence[Array]
    residuals: Sequence[Array] | None
    server: Array | None
    seed: Array


class Averaged(NamedTuple):
    """What a route gives back.

    Attributes:
      means: `f32[*shape]`, the same bits on all workers.
      sent: makes stacks, this worker's share of the mean as the others understood it; called where needed.
      residuals: stacks, gradient + old residual - sent; None without error feedback.
      server: the new server residual, or None.
      agreement: `f32[lanes]`, mean |votes| in [0, 1]; -1 where nothing was voted.
      residual_ratio: `f32[lanes]`, RMS over workers of the residual norm / norm of the mean gradient.
    """

    means: list[Array]
    sent: Callable[[], list[Array]]
    residuals: Sequence[Array] | None
    server: Array | None
    agreement: Array
    residual_ratio: Array


# ------------------------------------------------------------------------------------------------- FP32


def average_fp32(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """The plain mean; residuals are left as they are (`settle_fp32` pays them out)."""
    means = collectives.mean_exact(_wide(given), axis)
    sent = lambda: stack_leaves(group, _wide(given))  # noqa: E731
    return Averaged(means, sent, given.residuals, given.server, *_nothing_voted(group))


def settle_fp32(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """The plain mean on the first exact step after a lossy one: drains the residuals into it, or drops them.

    Draining costs no extra bytes: a worker adds its residual to its gradient, and, where it reduced a
    shard, `W` times what it still owes there.
    """
    local = stack_leaves(group, _wide(given))
    if group.codec.on_fallback == "drain":
        local = _corrected(group, given)
        if given.server is not None:
            owed = _owed(group, given.server, axis)
            local = [stack + part for stack, part in zip(local, owed, strict=True)]
    means = collectives.mean_exact(local, axis)
    zeros = [jnp.zeros_like(stack) for stack in local] if given.residuals is not None else None
    server = None if given.server is None else jnp.zeros_like(given.server)
    return Averaged(_natural(given, means), lambda: local, zeros, server, *_nothing_voted(group))


def _owed(group: Group, server: Array, axis: collectives.AxisName) -> list[Array]:
    """`W` times the server residual, at the elements this worker reduces, zero elsewhere: stacks."""
    index, owed = collectives.worker_index(axis), []
    for segment, part in zip(group.stack_segments, _split(server, group, codecs.WORD_BITS), strict=True):
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
    corrected = _corrected(group, given)
    words = lax.optimization_barrier([codecs.to_bf16_words(stack) for stack in corrected])
    sent = [codecs.from_bf16_words(stack) for stack in words]
    received = collectives.exchange(_shards(group, words), axis)
    mean = codecs.from_bf16_words(received).mean(0)
    if given.server is not None:
        mean = mean + given.server
    down = lax.optimization_barrier(codecs.to_bf16_words(mean))
    server = None if given.server is None else mean - codecs.from_bf16_words(down)
    residuals, squared = _residuals(group, given, corrected, sent)
    statistics = lax.bitcast_convert_type(squared, jnp.uint16).reshape(-1)
    gathered = collectives.gather(jnp.concatenate([down, statistics]), axis)

    num_workers, size = gathered.shape[0], down.shape[0]
    decode = jax.vmap(lambda part: _poisoned(codecs.from_bf16_words(part)))
    means = _decode_stacks(group, gathered[:, :size], codecs.WORD_BITS, decode)
    squared = _as_f32(gathered[:, size:].reshape(num_workers, -1, 2)).sum(0)
    norms = _by_lane(group, jnp.concatenate([_squared_norms(stack) for stack in means]))
    no_votes, _ = _nothing_voted(group)
    ratio = _ratio(squared / jnp.float32(num_workers), norms)
    return Averaged(_natural(given, means), lambda: sent, residuals, server, no_votes, ratio)


def _poisoned(mean: Array) -> Array:
    """A leaf with one non-finite element is non-finite as a whole, as on the sign routes."""
    return mean + jnp.sum(mean * jnp.float32(0))


# ----------------------------------------------------------------------------------- SIGN and TERNARY


def average_sign(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """One bit an element up: the sign of gradient + residual, at an agreed scale."""
    return _average_votes(group, given, axis, gated=False)


def average_ternary(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """Two bits an element up: its sign, or zero where it lies below `gate` times the scale."""
    return _average_votes(group, given, axis, gated=True)


def _average_votes(group: Group, given: Given, axis: collectives.AxisName, gated: bool) -> Averaged:
    corrected = _corrected(group, given)
    factors, mean_squared = _agree_on_scales(group, given, corrected, axis)
    tie = (given.seed & jnp.uint32(1)) != 0
    voted = [
        _vote(stack, row * col, group.codec, tie, gated)
        for stack, (row, col) in zip(corrected, factors, strict=True)
    ]
    planes = [
        codecs.pack_bits(_shards(group, [bits[p] for bits, _ in voted])) for p in range(2 if gated else 1)
    ]
    votes = collectives.exchange(jnp.stack(planes, axis=1), axis)
    votes = votes.reshape(-1, votes.shape[2])

    sent = [values for _, values in voted]
    residuals, squared = _residuals(group, given, corrected, sent)
    down = _reduce_votes(group, given, votes, factors, axis, gated)
    stats = jnp.concatenate([down.agreeing, squared])
    payload = jnp.concatenate([down.payload, lax.bitcast_convert_type(stats, jnp.uint32)])
    gathered = collectives.gather(payload, axis)

    leveled = _leveled(factors, group, gated)
    means = [values * (row * col) for values, (row, col) in zip(down.decode(gathered), leveled, strict=True)]
    totals = _as_f32(gathered[:, -stats.shape[0] :]).sum(0)
    agreeing, squared = jnp.split(totals, 2)
    sizes = np.bincount(group.lane_of_leaf, [segment.size for segment in group.segments], len(group.lanes))
    ratio = _ratio(squared / jnp.float32(gathered.shape[0]), mean_squared)
    return Averaged(
        _natural(given, means),
        lambda: sent,
        residuals,
        down.server,
        agreeing * np.asarray(1 / sizes, np.float32),
        ratio,
    )


def _agree_on_scales(
    group: Group, given: Given, corrected: Sequence[Array], axis: collectives.AxisName
) -> tuple[list[tuple[Array, Array]], Array]:
    """Scale factors per stack, and the squared norm of each lane's mean gradient, estimated: `f32[lanes]`."""
    segments = group.stack_segments
    scales = [
        jax.vmap(lambda matrix, scale=segment.scale: codecs.local_scale(jnp.abs(matrix), scale))(stack)
        for stack, segment in zip(corrected, segments, strict=True)
    ]
    sketches = [
        jax.vmap(codecs.sketch, (0, None))(stack, given.seed) for stack in stack_leaves(group, _wide(given))
    ]
    sketched = _by_lane(group, jnp.concatenate(sketches))
    agreed = collectives.agree(jnp.concatenate([part.reshape(-1) for part in (*scales, sketched)]), axis)
    *parts, sketched = jnp.split(agreed, np.cumsum([part.size for part in scales]).tolist())
    factors = [
        jax.vmap(lambda values, segment=segment: codecs.scale_factors(values, segment))(
            part.reshape(local.shape)
        )
        for part, local, segment in zip(parts, scales, segments, strict=True)
    ]
    return factors, jnp.sum(sketched.reshape(len(group.lanes), -1) ** 2, axis=1)


def _vote(corrected: Array, scale: Array, codec: Codec, tie: Array, gated: bool) -> tuple[list[Array], Array]:
    """The bit planes that a worker sends of a stack, and the values they stand for."""
    if not gated:
        positive = codecs.is_positive(corrected, tie)
        return [positive], jnp.where(positive, scale, -scale)
    threshold, level = jnp.float32(codec.gate) * scale, _level(codec, gated) * scale
    positive, negative = corrected > threshold, corrected < -threshold
    sent = jnp.where(positive, level, jnp.where(negative, -level, level * jnp.float32(0)))
    # Votes "is positive" and "is not negative": both set +1, both clear -1, one of them 0.
    return [positive, ~negative], sent


def _level(codec: Codec, gated: bool) -> Array:
    return jnp.float32(codecs.gated_level(codec.gate) if gated else 1.0)


def _leveled(factors: Sequence[tuple[Array, Array]], group: Group, gated: bool) -> list[tuple[Array, Array]]:
    return [(row * _level(group.codec, gated), col) for row, col in factors]


class _Down(NamedTuple):
    """What a reducer sends of its shard (`uint32[n]`), and how any worker decodes what it gathered."""

    payload: Array
    decode: Callable[[Array], list[Array]]
    server: Array | None
    agreeing: Array  # f32[lanes], |mean vote| summed over the shard's elements


def _reduce_votes(
    group: Group,
    given: Given,
    votes: Array,
    factors: Sequence[tuple[Array, Array]],
    axis: collectives.AxisName,
    gated: bool,
) -> _Down:
    num_votes = votes.shape[0]
    planes = codecs.count_votes(votes)
    ties = codecs.random_words(given.seed, votes.shape[1])
    majority = codecs.majority_words(planes, num_votes, ties)
    by_leaf = _excess_by_leaf(group, votes, majority, axis)
    agreeing = _by_lane(group, by_leaf)
    if group.codec.down == "count":
        decode = lambda words: codecs.decode_counts(words, num_votes)  # noqa: E731
        return _Down(planes.reshape(-1), _decoder(group, planes.shape, decode), given.server, agreeing)
    if group.codec.down == "majority" and given.server is None:
        level = by_leaf / jnp.maximum(_valid_elements(group, axis), jnp.float32(1))
        words, server = majority[None], None
    else:
        words, level, server = _requantize(group, given, planes, num_votes, factors, axis, gated)
    decode = lambda words: codecs.decode_levels(words, codecs.LEVELS[group.codec.down])  # noqa: E731
    payload = jnp.concatenate([words.reshape(-1), lax.bitcast_convert_type(level, jnp.uint32)])
    return _Down(payload, _decoder(group, words.shape, decode, num_levels=level.shape[0]), server, agreeing)


def _decoder(
    group: Group, shape: tuple[int, ...], decode: Callable[[Array], Array], num_levels: int = 0
) -> Callable[[Array], list[Array]]:
    """Decodes gathered payloads: planes of `shape`, then the levels that multiply them, one a leaf."""
    size = shape[0] * shape[1]

    def run(gathered: Array) -> list[Array]:
        values = _decode_stacks(group, gathered[:, :size].reshape(-1, *shape), 1, decode)
        if not num_levels:
            return values
        levels = _as_f32(gathered[:, size : size + num_levels]).T
        return [
            stack * _by_row(part, segment)
            for stack, part, segment in zip(
                values, jnp.split(levels, np.cumsum(group.stacks)[:-1]), group.stack_segments, strict=True
            )
        ]

    return run


def _by_row(levels: Array, segment: Segment) -> Array:
    """A level per leaf and shard, `[k, W]`, spread over the rows that the shards hold."""
    rows = jnp.repeat(levels, segment.shard_rows, axis=1)[:, : segment.rows]
    return rows.reshape(*rows.shape, *([1] * (len(segment.matrix_shape) - 1)))


def _requantize(
    group: Group,
    given: Given,
    planes: Array,
    num_votes: int,
    factors: Sequence[tuple[Array, Array]],
    axis: collectives.AxisName,
    gated: bool,
) -> tuple[Array, Array, Array | None]:
    """The shard's mean + server residual at one or two bits: words `[bits, m]`, levels, new residual."""
    index = collectives.worker_index(axis)
    scale = jnp.concatenate(
        [
            jax.vmap(lambda row, col, segment=segment: codecs.shard_scale(row, col, segment, index))(
                row, col
            ).reshape(-1)
            for (row, col), segment in zip(_leveled(factors, group, gated), group.stack_segments, strict=True)
        ]
    )
    values = codecs.decode_counts(planes, num_votes) * scale
    if given.server is not None:
        values = values + given.server
    levels = codecs.LEVELS[group.codec.down]
    squared_scale = _sum_by_leaf(group, scale * scale)
    if levels.threshold is None:
        level = _sum_by_leaf(group, jnp.abs(values) * scale) / _nonzero(squared_scale)
    else:
        level = jnp.sqrt(_sum_by_leaf(group, values * values) / _nonzero(squared_scale))
    unit = (level[_leaf_of_block(group)][:, None] * scale.reshape(-1, codecs.BLOCK)).reshape(-1)
    tie = (given.seed & jnp.uint32(2)) != 0
    bits = [codecs.is_positive(values, tie)]
    if levels.threshold is not None:
        bits.append(jnp.abs(values) > jnp.float32(levels.threshold) * unit)
    words = jnp.stack([codecs.pack_bits(plane) for plane in bits])
    server = None if given.server is None else values - codecs.decode_levels(words, levels) * unit
    return words, level, server


def _excess_by_leaf(group: Group, votes: Array, majority: Array, axis: collectives.AxisName) -> Array:
    """|mean vote| summed over this shard's elements of each leaf, pads left out: `f32[leaves]`."""
    num_votes = votes.shape[0]
    agree = codecs.count_agreeing(votes, majority) - jnp.float32(codecs.BLOCK * num_votes / 2)
    excess = jax.ops.segment_sum(
        agree, _leaf_of_block(group), len(group.leaves), indices_are_sorted=True
    ) * jnp.float32(2 / num_votes)
    sizes = jnp.asarray([segment.shard_size for segment in group.segments], jnp.float32)
    return excess - (sizes - _valid_elements(group, axis))  # all workers agree on a pad


def _valid_elements(group: Group, axis: collectives.AxisName) -> Array:
    """Elements that are not pads, per leaf, in the shard this worker reduces: `f32[leaves]`."""
    table = [
        [
            min(max(segment.size - worker * segment.shard_rows * segment.cols, 0),
                segment.shard_rows * segment.cols)
            for segment in group.segments
        ]
        for worker in range(group.segments[0].num_workers)
    ]  # fmt: skip
    return jnp.asarray(table, jnp.float32)[collectives.worker_index(axis)]


# ----------------------------------------------------------------------------------------------- shared


def stack_leaves(group: Group, leaves: Sequence[Array]) -> list[Array]:
    """The group's leaves as one array a stack, `[k, *matrix_shape]`.

    Written out, so that a stack is copied once and its making is not fused into every reader: a fusion of
    dozens of operands takes XLA long to compile.
    """
    matrices = [
        leaf.reshape(1, *segment.matrix_shape) for leaf, segment in zip(leaves, group.segments, strict=True)
    ]
    stops = np.cumsum(group.stacks).tolist()
    return [
        lax.optimization_barrier(jnp.concatenate(matrices[stop - count : stop]))
        if count > 1
        else matrices[stop - 1]
        for count, stop in zip(group.stacks, stops, strict=True)
    ]


def unstack(stacks: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Stacks back to leaves of these shapes."""
    matrices = [part for stack in stacks for part in jnp.split(stack, stack.shape[0])]
    return [matrix.reshape(shape) for matrix, shape in zip(matrices, shapes, strict=True)]


def _natural(given: Given, stacks: Sequence[Array]) -> list[Array]:
    return unstack(stacks, [gradient.shape for gradient in given.gradients])


def _wide(given: Given) -> list[Array]:
    return [gradient.astype(jnp.float32) for gradient in given.gradients]


def _corrected(group: Group, given: Given) -> list[Array]:
    """Gradient + residual, stacked. Written out once: four passes read it, and XLA would add anew in each."""
    stacks = stack_leaves(group, _wide(given))
    if given.residuals is not None:
        stacks = [stack + residual for stack, residual in zip(stacks, given.residuals, strict=True)]
    return lax.optimization_barrier(stacks)


def _residuals(
    group: Group, given: Given, corrected: Sequence[Array], sent: Sequence[Array]
) -> tuple[list[Array] | None, Array]:
    """New residuals, and their squared norm per lane (this worker's)."""
    if given.residuals is None:
        return None, jnp.zeros((len(group.lanes),), jnp.float32)
    residuals = lax.optimization_barrier([c - part for c, part in zip(corrected, sent, strict=True)])
    return residuals, _by_lane(group, jnp.concatenate([_squared_norms(stack) for stack in residuals]))


def _squared_norms(stack: Array) -> Array:
    flat = stack.reshape(stack.shape[0], -1)
    return jnp.sum(flat * flat, axis=1)


def _shards(group: Group, stacks: Sequence[Array]) -> Array:
    """`[W, n]`: row i is what worker i reduces, leaf by leaf."""
    shards = []
    for segment, stack in zip(group.stack_segments, stacks, strict=True):
        cut = jax.vmap(lambda matrix, segment=segment: codecs.to_shards(matrix, segment))(stack)
        shards.append(jnp.moveaxis(cut, 1, 0).reshape(segment.num_workers, -1))
    return jnp.concatenate(shards, axis=1)


def _decode_stacks(
    group: Group, words: Array, per_word: int, decode: Callable[[Array], Array]
) -> list[Array]:
    """Gathered `[W, ..., n]` -> `f32[k, *matrix_shape]` per stack; `decode` maps `[k, W, ..., m]`."""
    stacks = []
    for segment, part in zip(group.stack_segments, _split(words, group, per_word), strict=True):
        values = decode(jnp.moveaxis(part, -2, 0))
        stacks.append(jax.vmap(lambda v, segment=segment: codecs.from_shards(v, segment))(values))
    return stacks


def _nothing_voted(group: Group) -> tuple[Array, Array]:
    return jnp.full((len(group.lanes),), -1, jnp.float32), jnp.zeros((len(group.lanes),), jnp.float32)


def _ratio(residual_squared: Array, mean_squared: Array) -> Array:
    return jnp.sqrt(residual_squared / _nonzero(mean_squared))


def _nonzero(values: Array) -> Array:
    return jnp.where(values == 0, jnp.float32(1), values)


def _by_lane(group: Group, values: Array | np.ndarray) -> Array:
    """Sums by lane what is given by leaf: `[leaves, ...]` -> `[lanes, ...]`."""
    return jax.ops.segment_sum(jnp.asarray(values), np.asarray(group.lane_of_leaf), len(group.lanes))


def _sum_by_leaf(group: Group, values: Array) -> Array:
    by_block = values.reshape(-1, codecs.BLOCK).sum(1)
    return jax.ops.segment_sum(by_block, _leaf_of_block(group), len(group.leaves), indices_are_sorted=True)


def _leaf_of_block(group: Group) -> np.ndarray:
    num_blocks = [segment.shard_size // codecs.BLOCK for segment in group.segments]
    return np.repeat(np.arange(len(num_blocks), dtype=np.int32), num_blocks)


def _split(values: Array, group: Group, per_word: int) -> list[Array]:
    """Cuts the last axis, a concatenation of the leaves' shards, into stacks: `[..., k, m]`."""
    parts, start = [], 0
    for count, segment in zip(group.stacks, group.stack_segments, strict=True):
        size = segment.shard_words * per_word
        part = lax.slice_in_dim(values, start, start + count * size, axis=values.ndim - 1)
        parts.append(part.reshape(*values.shape[:-1], count, size))
        start += count * size
    return parts


def _as_f32(words: Array) -> Array:
    return lax.bitcast_convert_type(words, jnp.float32)


RouteFunction = Callable[[Group, Given, collectives.AxisName], Averaged]

ROUTES: tuple[RouteFunction, ...] = (average_fp32, average_bf16, average_sign, average_ternary)
