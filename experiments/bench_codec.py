"""What packing, counting and decoding a leaf costs, as the kernels that a step has, without collectives."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.timing import carried, interleave, ratio
from nf_jax import codecs, segments


def bench_codec(megabytes: int, repeats: int) -> dict[str, Any]:
    """16 MiB as one square matrix on one device, as worker and reducer of W = 8 would handle it."""
    side = int((megabytes * 2**18) ** 0.5)
    values = jax.random.normal(jax.random.key(0), (side, side))
    arms: dict[str, Callable[[], Any]] = {"copy": functools.partial(jax.jit(lambda x: x * 2), values)}
    plain = plain_codec(segments.make_segment(values.shape, 8, "leaf"))
    arms["plain"] = functools.partial(code_plain, plain, values)
    for scale in ("leaf", "rank1"):
        segment = segments.make_segment(values.shape, 8, scale)
        step = functools.partial(code_with_feedback, feedback_codec(segment))
        state = (jnp.zeros_like(values), jnp.zeros(segment.shard_size))
        arms[f"ef {scale}"] = carried(step, values, state=state)
    seconds = interleave(arms, repeats)
    return {
        "codec_over_copy": ratio(seconds, "plain", "copy"),
        "codec_ef_over_copy": ratio(seconds, "ef leaf", "copy"),
        "codec_ef_rank1_over_copy": ratio(seconds, "ef rank1", "copy"),
        "codec_copy_seconds": statistics.median(seconds["copy"]),
    }


class CodecPrograms(NamedTuple):
    """What a worker, and reducer of one shard, computes for a leaf, as the kernels that a step has.

    In one program XLA would fuse across the collectives' places, which no step can: it would count votes
    anew for every element that is decoded.
    """

    pack: Callable[..., Any]
    reduce: Callable[..., Any]
    receive: Callable[..., Any]
    scale: Callable[..., Any] = lambda *_: None
    keep: Callable[..., Any] = lambda *_: None


def plain_codec(segment: segments.Segment) -> CodecPrograms:
    """Signs up, majority down, nothing else."""
    levels = codecs.LEVELS["majority"]

    def pack(values: jax.Array) -> jax.Array:
        return codecs.pack_bits(segments.to_shards(values > 0, segment))

    def reduce(words: jax.Array) -> jax.Array:
        planes = codecs.count_votes(words)
        ties = codecs.random_words(jnp.uint32(1), words.shape[1])
        majority = codecs.majority_words(planes, segment.num_workers, ties)
        return jnp.broadcast_to(majority, words.shape)[:, None]

    def receive(down: jax.Array) -> jax.Array:
        return segments.from_shards(codecs.decode_levels(down, levels), segment)

    return CodecPrograms(jax.jit(pack), jax.jit(reduce), jax.jit(receive))


def feedback_codec(segment: segments.Segment) -> CodecPrograms:
    """The arithmetic of one SIGN majority step with both error feedbacks."""
    levels, tie = codecs.LEVELS["majority"], jnp.asarray(True)

    def scale(gradient: jax.Array, residual: jax.Array) -> jax.Array:
        again, kept = lax.optimization_barrier((gradient, residual))
        return segments.local_scale(jnp.abs(gradient + residual), jnp.abs(again + kept), scale=segment.scale)

    def pack(gradient: jax.Array, residual: jax.Array) -> jax.Array:
        positive = codecs.is_positive(gradient + residual, tie)
        return codecs.pack_bits(segments.to_shards(positive, segment))

    def keep(gradient: jax.Array, residual: jax.Array, scale: jax.Array) -> jax.Array:
        row, col = segments.scale_factors(scale, segment)
        corrected = gradient + residual
        return corrected - jnp.where(codecs.is_positive(corrected, tie), row * col, -(row * col))

    def reduce(words: jax.Array, scale: jax.Array, server: jax.Array) -> tuple[jax.Array, ...]:
        row, col = segments.shard_factors(*segments.scale_factors(scale, segment), segment, jnp.int32(0))
        counts = codecs.decode_counts(codecs.count_votes(words), segment.num_workers)
        values = segments.shard_matrix(counts, segment) * (row * col) + segments.shard_matrix(server, segment)
        total = jnp.sum(row * row) * jnp.sum(col * col) * (segment.cols // col.size)
        level = jnp.sum(jnp.abs(values) * (row * col)) / total
        positive, unit = codecs.is_positive(values, tie), level * row * col
        down = codecs.pack_bits(segments.shard_vector(positive[None], segment))
        server = segments.shard_vector((values - jnp.where(positive, unit, -unit))[None], segment)[0]
        return jnp.broadcast_to(down, (segment.num_workers, *down.shape)), level, server

    def receive(down: jax.Array, level: jax.Array, scale: jax.Array) -> jax.Array:
        row, col = segments.scale_factors(scale, segment)
        return segments.from_shards(codecs.decode_levels(down, levels), segment) * (level * row * col)

    return CodecPrograms(
        jax.jit(pack),
        jax.jit(reduce, donate_argnums=2),
        jax.jit(receive),
        jax.jit(scale),
        jax.jit(keep, donate_argnums=1),
    )


def code_plain(codec: CodecPrograms, values: jax.Array) -> jax.Array:
    return codec.receive(codec.reduce(codec.pack(values)))


def code_with_feedback(codec: CodecPrograms, gradient: jax.Array, state: Any) -> tuple[jax.Array, Any]:
    residual, server = state
    scale = codec.scale(gradient, residual)
    words = codec.pack(gradient, residual)
    residual = codec.keep(gradient, residual, scale)
    down, level, server = codec.reduce(words, scale, server)
    return codec.receive(down, level, scale), (residual, server)
