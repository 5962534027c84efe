"""SIGN and TERNARY: gradients as votes.

Per worker: pack one or two bits of every element; hand shard i to worker i (all-to-all); count there, on
whole words; send the counts, or the shard requantized, to all (all-gather); decode. Two workers hand each
other all words at once, and both count. Sources: signSGD with majority vote (arXiv 1810.05291), 1-bit Adam's
two phases (2102.02888), error feedback (1901.09847).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
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
    keep_unless,
    leaf_of_block,
    new_residuals,
    nonzero,
    norm_ratio,
    split_stacks,
    stack_leaves,
    sum_by_lane,
    to_leaves,
    wide_gradients,
)
from nf_jax.profile import Codec
from nf_jax.segments import Segment

# A leaf whose largest scale lies below comes back as zero; hardware flushes such numbers to zero anyway.
_SMALLEST_SCALE = np.float32(1e-37)

Factors = list[tuple[Array, Array]]
"""Per stack, the agreed scale as two factors whose product broadcasts over `[k, *matrix_shape]`."""


# ---------------------------------------------------------------------------------------------- sending


def send_votes(group: Group, given: Given, axis: collectives.Where, *, gated: bool) -> Sent:
    """One bit an element up: the sign of gradient + residual at an agreed scale; two where gated.

    Gated, an element below `gate` times the scale counts as zero.
    """
    gradients = stack_leaves(group, wide_gradients(given))
    agreed, mean_squared = _agree_on_scales(group, given, gradients, axis)
    factors = _factors(group, agreed, gated)
    tie = (given.seed & jnp.uint32(1)) != 0
    bits = [
        _vote_bits(stack, row * col, group.codec, tie, gated)
        for stack, (row, col) in zip(add_residuals(gradients, given, reader=2), factors, strict=True)
    ]
    words = jnp.stack([codecs.pack_bits(cut_shards(group, plane)) for plane in zip(*bits, strict=True)], 1)
    deliver = _deliver_straight if _goes_straight(group, words.shape[0], gated) else _deliver_by_shards
    arriving = deliver(group, given, words, factors, axis)

    # Decoded from the words, not decided anew: so residuals are written, in place, after all have read them.
    sent = [
        values * (row * col)
        for values, (row, col) in zip(decode_stacks(group, words, 1, _decode_vote), factors, strict=True)
    ]
    corrected = add_residuals(gradients, given, reader=3)
    residuals, squared = new_residuals(group, given, corrected, sent)
    gathered, server, agreeing, squared = arriving(squared)
    sizes = np.bincount(group.lane_of_leaf, [segment.size for segment in group.segments], len(group.lanes))
    ratio = norm_ratio(squared / jnp.float32(gathered.shape[0]), mean_squared)
    agreement = agreeing * np.asarray(1 / sizes, np.float32)
    return Sent((gathered, agreed), residuals, server, agreement, ratio, sent)


Arrived = tuple[Array, Sequence[Array] | None, Array, Array]
"""Words of all workers, `uint32[W, n]`; server residuals; |mean vote| and squared residual norms summed over
all elements and workers, `f32[lanes]`."""


def _deliver_straight(
    group: Group, given: Given, words: Array, factors: Factors, axis: collectives.Where
) -> Callable[[Array], Arrived]:
    """Every word to every worker."""
    del factors
    gathered = collectives.gather(words, axis)
    votes = _votes_of(gathered)
    majority = codecs.majority_words(codecs.count_votes(votes), votes.shape[0], jnp.zeros_like(votes[0]))
    sizes = jnp.asarray([segment.size for segment in group.segments], jnp.float32)
    agreeing = sum_by_lane(group, _excess_by_leaf(group, votes, majority, sizes))

    def arriving(squared: Array) -> Arrived:
        totals = collectives.gather(squared, axis).sum(0)
        return gathered.reshape(gathered.shape[0], -1), given.server, agreeing, totals

    return arriving


def _deliver_by_shards(
    group: Group, given: Given, words: Array, factors: Factors, axis: collectives.Where
) -> Callable[[Array], Arrived]:
    """Shard i of every worker to worker i, and what it makes of them to all."""
    votes = collectives.exchange(words, axis)
    votes = votes.reshape(-1, votes.shape[2])
    down, levels, server, agreeing = _reduce_votes(group, given, votes, factors, axis)

    def arriving(squared: Array) -> Arrived:
        numbers = lax.bitcast_convert_type(jnp.concatenate([levels, agreeing, squared]), jnp.uint32)
        gathered = collectives.gather(jnp.concatenate([down.reshape(-1), numbers]), axis)
        agreed, kept = jnp.split(as_f32(gathered[:, -2 * len(group.lanes) :]).sum(0), 2)
        return gathered, server, agreed, kept

    return arriving


def _votes_of(gathered: Array) -> Array:
    """`uint32[W, W shards, planes, m]` -> `uint32[votes, W shards * m]`."""
    workers, shards, planes, num_words = gathered.shape
    return jnp.moveaxis(gathered, 2, 1).reshape(workers * planes, shards * num_words)


def payload_shapes(group: Group, num_workers: int, *, gated: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of a payload: what every worker gathered, `uint32[W, n]`, and the agreed scales, `f32[s]`."""
    if _goes_straight(group, num_workers, gated):
        num_words = num_workers * (2 if gated else 1) * _words_of_shards(group)
    else:
        num_words = _num_planes(group, num_workers, gated) * _words_of_shards(group)
        num_words += _num_levels(group) + 2 * len(group.lanes)
    num_scales = sum(segment.scale_size for segment in group.segments)
    return (
        jax.ShapeDtypeStruct((num_workers, num_words), jnp.uint32),
        jax.ShapeDtypeStruct((num_scales,), jnp.float32),
    )


def _agree_on_scales(
    group: Group, given: Given, gradients: Sequence[Array], axis: collectives.Where
) -> tuple[Array, Array]:
    """All scales in one vector, and an estimate of each lane's squared mean gradient norm, `f32[lanes]`."""
    by_row, by_col = add_residuals(gradients, given), add_residuals(gradients, given, reader=1)
    scales = [
        jax.vmap(functools.partial(segments.local_scale, scale=segment.scale))(jnp.abs(one), jnp.abs(other))
        for one, other, segment in zip(by_row, by_col, group.stack_segments, strict=True)
    ]
    sketches = [jax.vmap(segments.sketch, (0, None))(stack, given.seed) for stack in gradients]
    sketched = sum_by_lane(group, jnp.concatenate(sketches))
    local = jnp.concatenate([part.reshape(-1) for part in (*scales, sketched)])
    agreed, sketched = jnp.split(collectives.agree(local, axis), [local.size - sketched.size])
    return agreed, jnp.sum(sketched.reshape(len(group.lanes), -1) ** 2, axis=1)


def _factors(group: Group, agreed: Array, gated: bool) -> Factors:
    """The scale factors, times what a vote stands for in units of its scale."""
    level = jnp.float32(codecs.gated_level(group.codec.gate) if gated else 1.0)
    sizes = [count * s.scale_size for count, s in zip(group.stacks, group.stack_segments, strict=True)]
    factors = []
    parts = jnp.split(agreed, np.cumsum(sizes)[:-1].tolist())
    for part, count, segment in zip(parts, group.stacks, group.stack_segments, strict=True):
        split = jax.vmap(lambda values, segment=segment: segments.scale_factors(values, segment))
        row, col = split(part.reshape(count, -1))
        factors.append((row * level, col))
    return factors


def _vote_bits(corrected: Array, level: Array, codec: Codec, tie: Array, gated: bool) -> list[Array]:
    """The bit planes that a worker sends of a stack.

    Gated, they are the votes "is positive" and "is not negative": both set +1, both clear -1, one of them 0.
    """
    if not gated:
        return [codecs.is_positive(corrected, tie)]
    threshold = level * jnp.float32(codec.gate / codecs.gated_level(codec.gate))
    return [corrected > threshold, ~(corrected < -threshold)]


def _decode_vote(words: Array) -> Array:
    """What one worker's words say, `uint32[..., planes, m]` -> `f32[..., 32 * m]`, in units of the level."""
    bits = [codecs.unpack_bits(words[..., plane, :]) for plane in range(words.shape[-2])]
    one, zero = jnp.float32(1), jnp.float32(0)
    if len(bits) == 1:
        return jnp.where(bits[0], one, -one)
    return jnp.where(bits[0], one, jnp.where(bits[1], zero, -one))


# --------------------------------------------------------------------------------------------- reducing


def _reduce_votes(
    group: Group, given: Given, votes: Array, factors: Factors, axis: collectives.Where
) -> tuple[Array, Array, Sequence[Array] | None, Array]:
    """What a reducer sends of its shard: words `[planes, m]`, levels, its new residual; and `f32[lanes]`,
    |mean vote| summed over the shard's elements."""
    num_votes = votes.shape[0]
    planes = codecs.count_votes(votes)
    majority = codecs.majority_words(planes, num_votes, codecs.random_words(given.seed, votes.shape[1]))
    by_leaf = _excess_by_leaf(group, votes, majority, _valid_elements(group, axis))
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
        row, col = cut(*factors[i])
        values = segments.shard_matrix(codecs.decode_counts(jnp.moveaxis(part, 1, 0), num_votes), segment)
        values = values * (row * col)
        if given.server is not None:
            values = values + segments.shard_matrix(given.server[i], segment)
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
    row_peak, col_peak = (jnp.max(factor, axis=inner, keepdims=True) for factor in factors)
    peak = row_peak * col_peak
    live = peak > _SMALLEST_SCALE
    inverse = jnp.where(live, 1 / jnp.maximum(peak, _SMALLEST_SCALE), peak * jnp.float32(0))
    row = row * jnp.where(live, 1 / jnp.where(live, row_peak, jnp.float32(1)), jnp.float32(0))
    col = col * jnp.where(live, 1 / jnp.where(live, col_peak, jnp.float32(1)), jnp.float32(0))
    repeats = segment.cols // col[0].size
    scale_squared = jnp.sum(row * row, axis=inner) * jnp.sum(col * col, axis=inner) * np.float32(repeats)
    size = jnp.abs(values * inverse)
    if levels.threshold is None:
        fitted = jnp.sum(size * (row * col), axis=inner) / nonzero(scale_squared)
    else:
        fitted = jnp.sqrt(jnp.sum(size * size, axis=inner) / nonzero(scale_squared))
    return fitted + jnp.sum(peak * jnp.float32(0), axis=inner)  # a NaN stays one


def _excess_by_leaf(group: Group, votes: Array, majority: Array, valid: Array) -> Array:
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


# -------------------------------------------------------------------------------------------- receiving


def receive_votes(
    group: Group, payload: tuple[Array, ...], like: Sequence[Array], *, gated: bool
) -> list[Array]:
    """The means, `f32[*shape]` in the shapes of `like`."""
    gathered, agreed = payload
    num_workers, num_levels = gathered.shape[0], _num_levels(group)
    num_planes = _num_planes(group, num_workers, gated)
    size = num_planes * _words_of_shards(group)
    num_votes = num_workers * (2 if gated else 1)
    count = lambda words: codecs.decode_counts(words, num_votes)  # noqa: E731
    decode = lambda words: codecs.decode_levels(words, codecs.LEVELS[group.codec.down])  # noqa: E731
    if _goes_straight(group, num_workers, gated):
        num_levels = 0
        votes = _votes_of(gathered.reshape(num_workers, num_workers, num_votes // num_workers, -1))
        planes = codecs.count_votes(votes).reshape(-1, num_workers, votes.shape[1] // num_workers)
        means = decode_stacks(group, jnp.moveaxis(planes, 0, 1), 1, count)
    else:
        words = gathered[:, :size].reshape(num_workers, num_planes, -1)
        means = decode_stacks(group, words, 1, count if group.codec.down == "count" else decode)
    factors = _factors(group, agreed, gated)
    if num_levels:
        levels = as_f32(gathered[:, size : size + num_levels]).T
        parts = jnp.split(levels, np.cumsum(group.stacks)[:-1])
        factors = [
            (row * _by_row(part, segment), col)
            for (row, col), part, segment in zip(factors, parts, group.stack_segments, strict=True)
        ]
    means = [values * (row * col) for values, (row, col) in zip(means, factors, strict=True)]
    return to_leaves(like, means)


def _by_row(levels: Array, segment: Segment) -> Array:
    """A level per leaf and shard, `[k, W]`, spread over the rows that the shards hold."""
    rows = jnp.repeat(levels, segment.shard_rows, axis=1)[:, : segment.rows]
    return rows.reshape(*rows.shape, *([1] * (len(segment.matrix_shape) - 1)))


def _goes_straight(group: Group, num_workers: int, gated: bool) -> bool:
    return codecs.goes_straight(group.codec.down, num_workers, 2 if gated else 1)


def _num_planes(group: Group, num_workers: int, gated: bool) -> int:
    return codecs.num_planes_down(group.codec.down, num_workers * (2 if gated else 1))


def _num_levels(group: Group) -> int:
    return 0 if group.codec.down == "count" else len(group.leaves)


def _words_of_shards(group: Group) -> int:
    return sum(segment.shard_words for segment in group.segments)
