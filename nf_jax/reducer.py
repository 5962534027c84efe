"""What the worker that reduces a shard makes of its votes: a majority, counts, or levels with a residual.

Sources: signSGD with majority vote (arXiv 1810.05291), 1-bit Adam's second compression (2102.02888).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nf_jax import codecs, collectives, segments
from nf_jax.groups import Given, Group, keep_unless, leaf_of_block, nonzero, split_stacks, sum_by_lane
from nf_jax.segments import Segment

# A leaf whose largest scale lies below comes back as zero; hardware flushes such numbers to zero anyway.
_SMALLEST_SCALE = np.float32(1e-37)

Factors = list[tuple[Array, Array]]
"""Per stack, the agreed scale as two factors whose product broadcasts over `[k, *matrix_shape]`."""


def reduce_votes(
    group: Group, given: Given, votes: Array, factors: Factors, axis: collectives.Where
) -> tuple[Array, Array, Sequence[Array] | None, Array]:
    """What a reducer sends of its shard: words `[planes, m]`, levels, its new residual; and `f32[lanes]`,
    |mean vote| summed over the shard's elements."""
    num_votes = votes.shape[0]
    planes = codecs.count_votes(votes)
    majority = codecs.majority_words(planes, num_votes, codecs.random_words(given.seed, votes.shape[1]))
    by_leaf = excess_by_leaf(group, votes, majority, _valid_elements(group, axis))
    agreeing = sum_by_lane(group, by_leaf)
    if group.codec.down == "count":
        return planes, jnp.zeros((0,), jnp.float32), given.server, agreeing
    if group.codec.down == "majority" and given.server is None:
        level = by_leaf / jnp.maximum(_valid_elements(group, axis), jnp.float32(1))
        return majority[None], level, None, agreeing
    words, level, server = _requantize(group, given, planes, num_votes, factors, axis)
    return words, level, server, agreeing


def _requantize(
    group: Group, given: Given, planes: Array, num_votes: int, factors: Factors, axis: collectives.Where
) -> tuple[Array, Array, list[Array] | None]:
    """The shard's mean + server residual at one or two bits: words `[bits, m]`, levels, new residuals."""
    index, tie = collectives.worker_index(axis), (given.seed & jnp.uint32(2)) != 0
    levels = codecs.LEVELS[group.codec.down]
    words, fitted, server = [], [], []
    for i, (segment, part) in enumerate(
        zip(group.stack_segments, split_stacks(planes, group, 1), strict=True)
    ):
        cut = jax.vmap(lambda row, col, segment=segment: segments.shard_factors(row, col, segment, index))
        row, col = (segments.in_runs(factor, segment) for factor in cut(*factors[i]))
        values = segments.shard_matrix(codecs.decode_counts(jnp.moveaxis(part, 1, 0), num_votes), segment)
        values = segments.in_runs(values, segment) * (row * col)
        if given.server is not None:
            owed = segments.shard_matrix(given.server[i], segment)
            values = values + segments.in_runs(owed, segment)
        level = _fit_level(values, row, col, factors[i], segment, levels)
        row = row * level.reshape(-1, *([1] * (row.ndim - 1)))
        bits, sent = _to_levels(values, row, col, levels, tie)
        packed = [codecs.pack_bits(segments.shard_vector(plane, segment)) for plane in bits]
        words.append(jnp.stack(packed).reshape(len(bits), -1))
        fitted.append(level)
        if given.server is not None:
            new = segments.shard_vector(values - sent, segment)
            server.append(keep_unless(given.ok, given.server[i], new))
    joined = jnp.concatenate(words, axis=1), jnp.concatenate(fitted)
    return *joined, None if given.server is None else server


def _to_levels(
    values: Array, row: Array, col: Array, levels: codecs.Levels, tie: Array
) -> tuple[list[Array], Array]:
    """Bit planes of a quantized stack (sign, magnitude), and the values they stand for."""
    unit = row * col
    positive = codecs.is_positive(values, tie)
    if levels.threshold is None:
        return [positive], jnp.where(positive, unit, -unit)
    large = jnp.abs(values) > jnp.float32(levels.threshold) * unit
    size = unit * jnp.where(large, jnp.float32(levels.high), jnp.float32(levels.low))
    return [positive, large], jnp.where(positive, size, -size)


def _fit_level(
    values: Array,
    row: Array,
    col: Array,
    factors: tuple[Array, Array],
    segment: Segment,
    levels: codecs.Levels,
) -> Array:
    """The level per leaf of a stack in units of its scale, `f32[k]`: least squares, or the root mean square.

    Both are squares over squares; divided by the leaf's largest scale first, none under- or overflows. The
    scale's own square needs no pass over the shard: it is a product of two sums.
    """
    inner = tuple(range(1, values.ndim))
    peaks = (jnp.max(factor.reshape(factor.shape[0], -1), axis=1) for factor in factors)
    row_peak, col_peak = (peak.reshape(-1, *([1] * len(inner))) for peak in peaks)
    peak = row_peak * col_peak
    live = peak > _SMALLEST_SCALE
    inverse = jnp.where(live, 1 / jnp.maximum(peak, _SMALLEST_SCALE), peak * jnp.float32(0))
    row, col = (
        jnp.where(live, factor / jnp.where(live, its_peak, jnp.float32(1)), jnp.float32(0))
        for factor, its_peak in ((row, row_peak), (col, col_peak))
    )
    repeats = segment.cols // col[0].size
    scale_squared = jnp.sum(row * row, axis=inner) * jnp.sum(col * col, axis=inner) * np.float32(repeats)
    size = jnp.abs(values * inverse)
    if levels.threshold is None:
        fitted = jnp.sum(size * (row * col), axis=inner) / nonzero(scale_squared)
    else:
        fitted = jnp.sqrt(jnp.sum(size * size, axis=inner) / nonzero(scale_squared))
    # Where what is owed is so much larger than the scale that their ratio overflows, it waits.
    fitted = jnp.where(jnp.isfinite(fitted), fitted, jnp.float32(0))
    return fitted + jnp.sum(peak * jnp.float32(0), axis=inner)  # a NaN stays one


def excess_by_leaf(group: Group, votes: Array, majority: Array, valid: Array) -> Array:
    """|mean vote| summed over the elements of each leaf in one shard or more, pads left out: `f32[leaves]`.

    Args:
      votes: `uint32[V, shards * m]`.
      majority: `uint32[shards * m]`.
      valid: `f32[leaves]`, elements that are not pads.
    """
    num_votes, owners = votes.shape[0], leaf_of_block(group)
    agree = codecs.count_agreeing(votes, majority) - jnp.float32(codecs.BLOCK * num_votes / 2)
    agree = agree.reshape(-1, owners.size)
    by_leaf = jax.ops.segment_sum(agree.sum(0), owners, len(group.leaves), indices_are_sorted=True)
    sizes = np.asarray([segment.shard_size for segment in group.segments], np.float32) * agree.shape[0]
    return by_leaf * jnp.float32(2 / num_votes) - (sizes - valid)  # all workers agree on a pad


def _valid_elements(group: Group, axis: collectives.Where) -> Array:
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
