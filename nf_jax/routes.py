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
      leaves: indices of its packable leaves in the flattened tree.
      segments: how each of these leaves is cut into shards.
      lane_of_leaf: for each of these leaves, the position of its lane in `lanes`.
      codec: the codec settings of its region.
      routes: the routes that it can ever take.
    """

    lanes: tuple[int, ...]
    leaves: tuple[int, ...]
    segments: tuple[Segment, ...]
    lane_of_leaf: tuple[int, ...]
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
    def offsets(self) -> tuple[int, ...]:
        """Where each leaf's shard begins among the group's, in words; the last entry is their sum."""
        return tuple(np.cumsum([0, *(segment.shard_words for segment in self.segments)]).tolist())


class Given(NamedTuple):
    """What a route is given.

    Attributes:
      gradients: local gradients, `[*shape]` in their own dtype; differ between workers.
      residuals: what the worker has not sent yet, `f32[*shape]`, or None without error feedback.
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
      sent: `f32[*shape]`, this worker's share of the mean as the others understood it.
      residuals: `f32[*shape]`, gradient + old residual - sent; None without error feedback.
      server: the new server residual, or None.
      agreement: `f32[lanes]`, mean |votes| in [0, 1]; -1 where nothing was voted.
      residual_ratio: `f32[lanes]`, RMS over workers of the residual norm / norm of the mean gradient.
    """

    means: list[Array]
    sent: list[Array]
    residuals: list[Array] | None
    server: Array | None
    agreement: Array
    residual_ratio: Array


# ------------------------------------------------------------------------------------------------- FP32


def average_fp32(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """The plain mean; residuals are left as they are (`settle_fp32` pays them out)."""
    local = [gradient.astype(jnp.float32) for gradient in given.gradients]
    means = collectives.mean_exact(local, axis)
    residuals = list(given.residuals) if given.residuals is not None else None
    return Averaged(means, local, residuals, given.server, *_nothing_voted(group))


def settle_fp32(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """The plain mean on the first exact step after a lossy one: drains the residuals into it, or drops them.

    Draining costs no extra bytes: a worker adds its residual to its gradient, and, where it reduced a
    shard, `W` times what it still owes there.
    """
    local = _corrected(given)
    if group.codec.on_fallback == "drop":
        local = [gradient.astype(jnp.float32) for gradient in given.gradients]
    elif given.server is not None:
        local = [
            leaf + owed.reshape(leaf.shape)
            for leaf, owed in zip(local, _owed(group, given.server, axis), strict=True)
        ]
    means = collectives.mean_exact(local, axis)
    zeros = [jnp.zeros_like(leaf) for leaf in local] if given.residuals is not None else None
    server = None if given.server is None else jnp.zeros_like(given.server)
    return Averaged(means, local, zeros, server, *_nothing_voted(group))


def _owed(group: Group, server: Array, axis: collectives.AxisName) -> list[Array]:
    """`W` times the server residual, at the elements this worker reduces, as leaves in their matrix form."""
    index, owed = collectives.worker_index(axis), []
    for part, segment in zip(_split(server, group, codecs.WORD_BITS), group.segments, strict=True):
        rows = part[: segment.shard_rows * segment.cols].reshape(-1, segment.cols)
        whole = jnp.zeros((segment.num_workers * segment.shard_rows, segment.cols), jnp.float32)
        whole = collectives.varying(whole, axis)
        whole = lax.dynamic_update_slice_in_dim(
            whole, rows * jnp.float32(segment.num_workers), index * segment.shard_rows, 0
        )
        owed.append(whole[: segment.rows])
    return owed


# ------------------------------------------------------------------------------------------------- BF16


def average_bf16(group: Group, given: Given, axis: collectives.AxisName) -> Averaged:
    """Two bytes an element both ways, summed in f32; both roundings have their residual."""
    corrected = _corrected(given)
    rounded = [_round_bf16(leaf) for leaf in corrected]
    sent = [leaf.astype(jnp.float32) for leaf in rounded]
    shards = [
        codecs.to_shards(_bits16(leaf).reshape(segment.rows, segment.cols), segment)
        for leaf, segment in zip(rounded, group.segments, strict=True)
    ]
    received = collectives.exchange(jnp.concatenate(shards, axis=1), axis)
    total = _from_bits16(received).mean(0)
    if given.server is not None:
        total = total + given.server
    down = _round_bf16(total)
    server = None if given.server is None else total - down.astype(jnp.float32)
    residuals, squared = _residuals(group, given, corrected, sent)
    gathered = collectives.gather(
        jnp.concatenate([_bits16(down), lax.bitcast_convert_type(squared, jnp.uint16).reshape(-1)]), axis
    )
    size = down.shape[0]
    flat = _from_bits16(gathered[:, :size])
    means = [
        _poisoned(codecs.from_shards(part, segment))
        for part, segment in zip(_split(flat, group, codecs.WORD_BITS), group.segments, strict=True)
    ]
    squared = _as_f32(gathered[:, size:].reshape(gathered.shape[0], -1, 2)).sum(0)
    norms = _by_lane(group, [jnp.sum(mean * mean) for mean in means])
    no_votes = jnp.full((len(group.lanes),), -1, jnp.float32)
    ratio = _ratio(squared / jnp.float32(gathered.shape[0]), norms)
    return Averaged(_natural(given, means), sent, residuals, server, no_votes, ratio)


def _round_bf16(values: Array) -> Array:
    # Clipped, so that a large finite value does not round up to infinity; infinity itself stays.
    limit = jnp.float32(jnp.finfo(jnp.bfloat16).max)
    clipped = jnp.where(jnp.isinf(values), values, jnp.clip(values, -limit, limit))
    return clipped.astype(jnp.bfloat16)


def _bits16(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.uint16)


def _from_bits16(bits: Array) -> Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


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
    corrected = _corrected(given)
    factors, mean_squared = _agree_on_scales(group, given, corrected, axis)
    tie = (given.seed & jnp.uint32(1)) != 0
    voted = [
        _vote(leaf.reshape(segment.rows, segment.cols), row * col, group.codec, tie, gated)
        for leaf, segment, (row, col) in zip(corrected, group.segments, factors, strict=True)
    ]
    planes = [
        jnp.stack([codecs.pack_bits(codecs.to_shards(bits, segment)) for bits in leaf_planes], axis=1)
        for (leaf_planes, _), segment in zip(voted, group.segments, strict=True)
    ]
    received = collectives.exchange(jnp.concatenate(planes, axis=2), axis)
    votes = received.reshape(-1, received.shape[2])

    sent = _natural(given, [leaf for _, leaf in voted])
    residuals, squared = _residuals(group, given, corrected, sent)
    down = _reduce_votes(group, given, votes, factors, axis, gated)
    stats = jnp.concatenate([down.agreeing, squared])
    payload = jnp.concatenate([down.payload, lax.bitcast_convert_type(stats, jnp.uint32)])
    gathered = collectives.gather(payload, axis)

    means = [
        values * (row * col)
        for values, (row, col) in zip(down.decode(gathered), _leveled(factors, group, gated), strict=True)
    ]
    totals = _as_f32(gathered[:, -stats.shape[0] :]).sum(0)
    agreeing, squared = jnp.split(totals, 2)
    sizes = _by_lane(group, [jnp.float32(segment.size) for segment in group.segments])
    ratio = _ratio(squared / jnp.float32(gathered.shape[0]), mean_squared)
    return Averaged(_natural(given, means), sent, residuals, down.server, agreeing / sizes, ratio)


def _agree_on_scales(
    group: Group, given: Given, corrected: Sequence[Array], axis: collectives.AxisName
) -> tuple[list[tuple[Array, Array]], Array]:
    """Scale factors per leaf, and the squared norm of each lane's mean gradient, estimated: `f32[lanes]`."""
    scales = [
        codecs.local_scale(jnp.abs(leaf).reshape(segment.rows, segment.cols), segment.scale)
        for leaf, segment in zip(corrected, group.segments, strict=True)
    ]
    sketches = _by_lane(
        group, [codecs.sketch(leaf.astype(jnp.float32), given.seed) for leaf in given.gradients]
    )
    agreed = collectives.agree(jnp.concatenate([*scales, sketches.reshape(-1)]), axis)
    sizes = [segment.scale_size for segment in group.segments]
    *parts, sketches = jnp.split(agreed, np.cumsum(sizes).tolist())
    factors = [codecs.scale_factors(part, seg) for part, seg in zip(parts, group.segments, strict=True)]
    return factors, jnp.sum(sketches.reshape(len(group.lanes), -1) ** 2, axis=1)


def _vote(corrected: Array, scale: Array, codec: Codec, tie: Array, gated: bool) -> tuple[list[Array], Array]:
    """The bit planes that a worker sends of one leaf `f32[rows, cols]`, and what they stand for."""
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
    by_leaf = _excess_by_leaf(group, votes, majority, axis, gated)
    agreeing = _by_lane(group, [by_leaf[i] for i in range(len(group.leaves))])
    if group.codec.down == "count":

        def decode_planes(gathered: Array) -> list[Array]:
            words = gathered[:, : planes.size].reshape(-1, *planes.shape)
            parts = _split(words, group, 1)
            values = [codecs.decode_counts(part, num_votes) for part in parts]
            return [codecs.from_shards(v, s) for v, s in zip(values, group.segments, strict=True)]

        return _Down(planes.reshape(-1), decode_planes, given.server, agreeing)
    if group.codec.down == "majority" and given.server is None:
        level = by_leaf / jnp.maximum(_valid_elements(group, axis), jnp.float32(1))
        words, server = majority[None], None
    else:
        words, level, server = _requantize(group, given, planes, num_votes, factors, axis, gated)
    levels = codecs.LEVELS[group.codec.down]

    def decode_words(gathered: Array) -> list[Array]:
        packed = gathered[:, : words.size].reshape(-1, *words.shape)
        level = _as_f32(gathered[:, words.size : words.size + len(group.leaves)])
        return [
            codecs.from_shards(codecs.decode_levels(part, levels) * level[:, i, None], segment)
            for i, (part, segment) in enumerate(zip(_split(packed, group, 1), group.segments, strict=True))
        ]

    payload = jnp.concatenate([words.reshape(-1), lax.bitcast_convert_type(level, jnp.uint32)])
    return _Down(payload, decode_words, server, agreeing)


def _requantize(
    group: Group,
    given: Given,
    planes: Array,
    num_votes: int,
    factors: Sequence[tuple[Array, Array]],
    axis: collectives.AxisName,
    gated: bool,
) -> tuple[Array, Array, Array | None]:
    """The shard's mean + server residual at one or two bits: words `[bits, m]`, level per leaf, new residual."""
    index = collectives.worker_index(axis)
    scale = jnp.concatenate(
        [
            codecs.shard_scale(row, col, segment, index)
            for (row, col), segment in zip(_leveled(factors, group, gated), group.segments, strict=True)
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


def _excess_by_leaf(
    group: Group, votes: Array, majority: Array, axis: collectives.AxisName, gated: bool
) -> Array:
    """|mean vote| summed over this shard's elements of each leaf, pads left out: `f32[leaves]`."""
    num_votes = votes.shape[0]
    agree = codecs.count_agreeing(votes, majority) - jnp.float32(codecs.BLOCK * num_votes / 2)
    excess = jax.ops.segment_sum(
        agree, _leaf_of_block(group), len(group.leaves), indices_are_sorted=True
    ) * jnp.float32(2 / num_votes)
    if gated:  # pads vote zero
        return excess
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


def _corrected(given: Given) -> list[Array]:
    local = [gradient.astype(jnp.float32) for gradient in given.gradients]
    if given.residuals is None:
        return local
    return [leaf + residual for leaf, residual in zip(local, given.residuals, strict=True)]


def _residuals(
    group: Group, given: Given, corrected: Sequence[Array], sent: Sequence[Array]
) -> tuple[list[Array] | None, Array]:
    """New residuals, and their squared norm per lane (this worker's)."""
    if given.residuals is None:
        return None, jnp.zeros((len(group.lanes),), jnp.float32)
    residuals = [whole - part for whole, part in zip(corrected, sent, strict=True)]
    return residuals, _by_lane(group, [jnp.sum(leaf * leaf) for leaf in residuals])


def _natural(given: Given, matrices: Sequence[Array]) -> list[Array]:
    """Matrices back in the shapes of the gradients."""
    return [m.reshape(g.shape) for m, g in zip(matrices, given.gradients, strict=True)]


def _nothing_voted(group: Group) -> tuple[Array, Array]:
    return jnp.full((len(group.lanes),), -1, jnp.float32), jnp.zeros((len(group.lanes),), jnp.float32)


def _ratio(residual_squared: Array, mean_squared: Array) -> Array:
    return jnp.sqrt(residual_squared / _nonzero(mean_squared))


def _nonzero(values: Array) -> Array:
    return jnp.where(values == 0, jnp.float32(1), values)


def _by_lane(group: Group, values: Sequence[Array]) -> Array:
    """Sums per-leaf arrays by lane: `[lanes, ...]`."""
    rows = [
        sum(value for value, lane in zip(values, group.lane_of_leaf, strict=True) if lane == position)
        for position in range(len(group.lanes))
    ]
    return jnp.stack(rows)


def _sum_by_leaf(group: Group, values: Array) -> Array:
    by_block = values.reshape(-1, codecs.BLOCK).sum(1)
    return jax.ops.segment_sum(by_block, _leaf_of_block(group), len(group.leaves), indices_are_sorted=True)


def _leaf_of_block(group: Group) -> np.ndarray:
    num_blocks = [segment.shard_size // codecs.BLOCK for segment in group.segments]
    return np.repeat(np.arange(len(num_blocks), dtype=np.int32), num_blocks)


def _split(values: Array, group: Group, per_word: int) -> list[Array]:
    """Cuts the last axis, a concatenation of the leaves' shards, into leaves."""
    offsets = group.offsets
    return [
        lax.slice_in_dim(values, start * per_word, stop * per_word, axis=values.ndim - 1)
        for start, stop in zip(offsets[:-1], offsets[1:], strict=True)
    ]


def _as_f32(words: Array) -> Array:
    return lax.bitcast_convert_type(words, jnp.float32)


RouteFunction = Callable[[Group, Given, collectives.AxisName], Averaged]

ROUTES: tuple[RouteFunction, ...] = (average_fp32, average_bf16, average_sign, average_ternary)
