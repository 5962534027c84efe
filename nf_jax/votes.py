"""SIGN and TERNARY: gradients as votes.

Per worker: pack one or two bits of every element; hand shard i to worker i (all-to-all); count there, on
whole words; send the counts, or the shard requantized, to all (all-gather); decode. Two workers hand each
other all words at once, and both count. Sources: signSGD with majority vote (arXiv 1810.05291), 1-bit Adam's
two phases (2102.02888), error feedback (1901.09847).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
    new_residuals,
    norm_ratio,
    sum_by_lane,
    wide_gradients,
)
from nf_jax.profile import Codec
from nf_jax.reducer import Factors, excess_by_leaf, reduce_votes
from nf_jax.segments import Segment

# ---------------------------------------------------------------------------------------------- sending


def send_votes(group: Group, given: Given, axis: collectives.Where, *, gated: bool) -> Sent:
    """One bit an element up: the sign of gradient + residual at an agreed scale; two where gated.

    Gated, an element below `gate` times the scale counts as zero.
    """
    agreed, mean_squared = _agree_on_scales(group, given, axis)
    factors = _factors(group, agreed, gated)
    tie = (given.seed & jnp.uint32(1)) != 0
    bits = [
        _vote_bits(stack, row * col, group.codec, tie, gated)
        for stack, (row, col) in zip(add_residuals(given, reader=3), factors, strict=True)
    ]
    words = jnp.stack([codecs.pack_bits(cut_shards(group, plane)) for plane in zip(*bits, strict=True)], 1)
    # Decided anew from the sum, which takes less than decoding the words.
    given = given._replace(ok=_after(words, given.ok))
    corrected = add_residuals(given, reader=4)
    sent = [
        _votes(_vote_bits(stack, row * col, group.codec, tie, gated)) * (row * col)
        for stack, (row, col) in zip(corrected, factors, strict=True)
    ]
    residuals, squared = new_residuals(group, given, corrected, sent)
    if _goes_straight(group, words.shape[0], gated):
        gathered, agreeing, squared = _deliver_straight(group, words, squared, axis)
        server = given.server
    else:
        gathered, agreeing, squared, server = _deliver_by_shards(group, given, words, squared, factors, axis)
    sizes = np.bincount(group.lane_of_leaf, [segment.size for segment in group.segments], len(group.lanes))
    ratio = norm_ratio(squared / jnp.float32(gathered.shape[0]), mean_squared)
    agreement = agreeing * np.asarray(1 / sizes, np.float32)
    return Sent((gathered, agreed), residuals, server, agreement, ratio, sent)


def _deliver_straight(
    group: Group, words: Array, squared: Array, axis: collectives.Where
) -> tuple[Array, Array, Array]:
    """Every word to every worker: `uint32[W, n]`; and, summed over all elements and workers, `f32[lanes]`,
    |mean vote| and the squared residual norms."""
    gathered = collectives.gather(words, axis)
    votes = _votes_of(gathered)
    majority = codecs.majority_words(codecs.count_votes(votes), votes.shape[0], jnp.zeros_like(votes[0]))
    sizes = jnp.asarray([segment.size for segment in group.segments], jnp.float32)
    agreeing = sum_by_lane(group, excess_by_leaf(group, votes, majority, sizes))
    return gathered.reshape(gathered.shape[0], -1), agreeing, collectives.gather(squared, axis).sum(0)


def _deliver_by_shards(
    group: Group, given: Given, words: Array, squared: Array, factors: Factors, axis: collectives.Where
) -> tuple[Array, Array, Array, Sequence[Array] | None]:
    """Shard i of every worker to worker i, and what it makes of them to all; as `_deliver_straight`, and the
    new server residuals."""
    votes = collectives.exchange(words, axis)
    votes = votes.reshape(-1, votes.shape[2])
    down, levels, server, agreeing = reduce_votes(group, given, votes, factors, axis)
    numbers = lax.bitcast_convert_type(jnp.concatenate([levels, agreeing, squared]), jnp.uint32)
    gathered = collectives.gather(jnp.concatenate([down.reshape(-1), numbers]), axis)
    agreeing, squared = jnp.split(as_f32(gathered[:, -2 * len(group.lanes) :]).sum(0), 2)
    return gathered, agreeing, squared, server


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


def _agree_on_scales(group: Group, given: Given, axis: collectives.Where) -> tuple[Array, Array]:
    """All scales in one vector, and an estimate of each lane's squared mean gradient norm, `f32[lanes]`."""
    by_row, by_col = add_residuals(given, reader=1), add_residuals(given, reader=2)
    scales = [
        jax.vmap(functools.partial(segments.local_scale, scale=segment.scale))(jnp.abs(one), jnp.abs(other))
        for one, other, segment in zip(by_row, by_col, group.stack_segments, strict=True)
    ]
    sketches = [
        jax.vmap(segments.sketch, (0, None))(stack, given.seed) for stack in wide_gradients(given, reader=1)
    ]
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


def _after(words: Array, flag: Array) -> Array:
    """`flag`, but known only after `words`, `uint32[W, planes, n]`: no word has more than 32 bits set.

    XLA overwrites an array in place only if what reads it must come before: else it copies it first.
    """
    return flag & jnp.all(lax.population_count(words[0, :, 0]) <= codecs.WORD_BITS)


def _votes(bits: Sequence[Array]) -> Array:
    """What the bit planes of `_vote_bits` say, in units of the level: +1, -1, or 0 where they differ."""
    one, zero = jnp.float32(1), jnp.float32(0)
    return jnp.where(bits[0], one, jnp.where(bits[-1], zero, -one) if len(bits) > 1 else -one)


# -------------------------------------------------------------------------------------------- receiving


def receive_votes(group: Group, payload: tuple[Array, ...], *, gated: bool) -> list[Array]:
    """The means, stacks in runs, `f32[k, *run_shape]`."""
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
    for i, ((row, col), segment) in enumerate(zip(factors, group.stack_segments, strict=True)):
        values, row, col = (segments.in_runs(part, segment) for part in (means[i], row, col))
        means[i] = values * (row * col)
    return means


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
