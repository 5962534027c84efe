"""SIGN and TERNARY: gradients as votes.

Per worker: pack one or two bits of every element; hand shard i to worker i (all-to-all); count there, on
whole words; send the counts, or the shard requantized, to all (all-gather); decode. Sources: signSGD with
majority vote (arXiv 1810.05291), 1-bit Adam's two phases (2102.02888), error feedback (1901.09847).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from nf_jax import codecs, collectives, segments
from nf_jax.groups import (
    Averaged,
    Given,
    Group,
    add_residuals,
    as_f32,
    cut_shards,
    decode_stacks,
    leaf_of_block,
    new_residuals,
    nonzero,
    norm_ratio,
    stack_leaves,
    sum_by_lane,
    sum_by_leaf,
    to_leaves,
    wide_gradients,
)
from nf_jax.profile import Codec
from nf_jax.segments import Segment

# A leaf whose largest scale lies below comes back as zero; hardware flushes such numbers to zero anyway.
_SMALLEST_SCALE = np.float32(1e-37)


def average_sign(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """One bit an element up: the sign of gradient + residual, at an agreed scale."""
    return _average_votes(group, given, axis, gated=False)


def average_ternary(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """Two bits an element up: its sign, or zero where it lies below `gate` times the scale."""
    return _average_votes(group, given, axis, gated=True)


def _average_votes(group: Group, given: Given, axis: collectives.AxisName, gated: bool) -> Averaged:
    corrected = add_residuals(group, given)
    factors, mean_squared = _agree_on_scales(group, given, corrected, axis)
    tie = (given.seed & jnp.uint32(1)) != 0
    voted = [
        _vote(stack, row * col, group.codec, tie, gated)
        for stack, (row, col) in zip(corrected, factors, strict=True)
    ]
    planes = [
        codecs.pack_bits(cut_shards(group, [bits[p] for bits, _ in voted])) for p in range(2 if gated else 1)
    ]
    votes = collectives.exchange(jnp.stack(planes, axis=1), axis)
    votes = votes.reshape(-1, votes.shape[2])

    sent = [values for _, values in voted]
    residuals, squared = new_residuals(group, given, corrected, sent)
    down = _reduce_votes(group, given, votes, factors, axis, gated)
    stats = jnp.concatenate([down.agreeing, squared])
    payload = jnp.concatenate([down.payload, lax.bitcast_convert_type(stats, jnp.uint32)])
    gathered = collectives.gather(payload, axis)

    leveled = _leveled(factors, group, gated)
    means = [values * (row * col) for values, (row, col) in zip(down.decode(gathered), leveled, strict=True)]
    totals = as_f32(gathered[:, -stats.shape[0] :]).sum(0)
    agreeing, squared = jnp.split(totals, 2)
    sizes = np.bincount(group.lane_of_leaf, [segment.size for segment in group.segments], len(group.lanes))
    ratio = norm_ratio(squared / jnp.float32(gathered.shape[0]), mean_squared)
    return Averaged(
        to_leaves(given, means),
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
    scales = [
        jax.vmap(lambda matrix, scale=segment.scale: segments.local_scale(jnp.abs(matrix), scale))(stack)
        for stack, segment in zip(corrected, group.stack_segments, strict=True)
    ]
    sketches = [
        jax.vmap(segments.sketch, (0, None))(stack, given.seed)
        for stack in stack_leaves(group, wide_gradients(given))
    ]
    sketched = sum_by_lane(group, jnp.concatenate(sketches))
    agreed = collectives.agree(jnp.concatenate([part.reshape(-1) for part in (*scales, sketched)]), axis)
    *parts, sketched = jnp.split(agreed, np.cumsum([part.size for part in scales]).tolist())
    factors = [
        jax.vmap(lambda values, segment=segment: segments.scale_factors(values, segment))(
            part.reshape(local.shape)
        )
        for part, local, segment in zip(parts, scales, group.stack_segments, strict=True)
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
    agreeing = sum_by_lane(group, by_leaf)
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
        values = decode_stacks(group, gathered[:, :size].reshape(-1, *shape), 1, decode)
        if not num_levels:
            return values
        levels = as_f32(gathered[:, size : size + num_levels]).T
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
            jax.vmap(lambda row, col, segment=segment: segments.shard_scale(row, col, segment, index))(
                row, col
            ).reshape(-1)
            for (row, col), segment in zip(_leveled(factors, group, gated), group.stack_segments, strict=True)
        ]
    )
    values = codecs.decode_counts(planes, num_votes) * scale
    if given.server is not None:
        values = values + given.server
    levels = codecs.LEVELS[group.codec.down]
    level = _fit_level(group, values, scale, factors, levels)
    unit = (level[leaf_of_block(group)][:, None] * scale.reshape(-1, codecs.BLOCK)).reshape(-1)
    tie = (given.seed & jnp.uint32(2)) != 0
    bits = [codecs.is_positive(values, tie)]
    if levels.threshold is not None:
        bits.append(jnp.abs(values) > jnp.float32(levels.threshold) * unit)
    words = jnp.stack([codecs.pack_bits(plane) for plane in bits])
    server = None if given.server is None else values - codecs.decode_levels(words, levels) * unit
    return words, level, server


def _fit_level(
    group: Group,
    values: Array,
    scale: Array,
    factors: Sequence[tuple[Array, Array]],
    levels: codecs.Levels,
) -> Array:
    """The level per leaf in units of its scale, `f32[leaves]`: least squares, or the root mean square.

    Both are squares over squares; divided by the leaf's largest scale first, none under- or overflows.
    """
    peaks = [
        jnp.max(row, axis=range(1, row.ndim)) * jnp.max(col, axis=range(1, col.ndim)) for row, col in factors
    ]
    peak = jnp.concatenate(peaks)
    inverse = jnp.where(peak > _SMALLEST_SCALE, 1 / jnp.maximum(peak, _SMALLEST_SCALE), peak * jnp.float32(0))
    inverse = inverse[leaf_of_block(group)][:, None]
    values = (values.reshape(-1, codecs.BLOCK) * inverse).reshape(-1)
    scale = (scale.reshape(-1, codecs.BLOCK) * inverse).reshape(-1)
    squared_scale = nonzero(sum_by_leaf(group, scale * scale))
    if levels.threshold is None:
        return sum_by_leaf(group, jnp.abs(values) * scale) / squared_scale
    return jnp.sqrt(sum_by_leaf(group, values * values) / squared_scale)


def _excess_by_leaf(group: Group, votes: Array, majority: Array, axis: collectives.AxisName) -> Array:
    """|mean vote| summed over this shard's elements of each leaf, pads left out: `f32[leaves]`."""
    num_votes = votes.shape[0]
    agree = codecs.count_agreeing(votes, majority) - jnp.float32(codecs.BLOCK * num_votes / 2)
    excess = jax.ops.segment_sum(
        agree, leaf_of_block(group), len(group.leaves), indices_are_sorted=True
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
