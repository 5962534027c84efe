"""Signs with one scale per bucket: what it costs that a hook sees flat buckets and not the leaves in them."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import optax
from jax import Array, lax

from experiments.baselines_rule import Leaves, Rule, Shapes, transform
from nf_jax import buckets
from nf_jax.capacity import allreduce_bytes, gather_bytes


def bucketsign(axis: str, num_workers: int, *, cap_bytes: int) -> optax.GradientTransformationExtraArgs:
    """Scaled signs with error feedback at the workers (arXiv 1901.09847), one scale for a whole bucket.

    A bucket's scale is the mean magnitude of all its elements, over workers; counts come back exactly, so
    that nothing but the reach of a scale differs between caps. Follow it with any optimizer.

    Simulated: the mean is exact arithmetic, in FP32, on what would have been sent. Bytes: one bit an element
    up (all-to-all), the counts down (all-gather), one f32 a bucket (all-reduce).

    Args:
      axis, num_workers: see `BASELINES`.
      cap_bytes: of every bucket, formed as PyTorch's DDP forms them; 0: every leaf is a bucket.
    """
    if cap_bytes < 0:
        raise ValueError(f"bucketsign: expected cap_bytes of at least 0, got {cap_bytes}")

    def make_rule(shapes: Shapes) -> Rule:
        members = form(shapes, cap_bytes)
        words = -(-sum(math.prod(shape) for shape in shapes.values()) // (32 * num_workers))
        num_planes = math.ceil(math.log2(num_workers + 1))
        num_bytes = gather_bytes(4 * words * (1 + num_planes), num_workers)

        def send(gradients: Leaves, own: Leaves, shared: Any, step: Array) -> tuple[Leaves, Any]:
            corrected = {path: leaf + own[path] for path, leaf in gradients.items()}
            local = jnp.stack([mean_magnitude([corrected[p] for p in bucket]) for bucket in members])
            agreed = lax.pmean(local, axis)
            scales = {path: agreed[i] for i, bucket in enumerate(members) for path in bucket}
            # An empty leaf is in no bucket, and has no sign.
            sent = {p: jnp.sign(leaf) * scales[p] if p in scales else leaf for p, leaf in corrected.items()}
            return sent, {path: corrected[path] - sent[path] for path in shapes}

        return Rule(
            send,
            lambda means, kept: (means, kept, ()),
            wire_bytes=(num_bytes + allreduce_bytes(4 * len(members), num_workers),),
            own=shapes,
        )

    return transform(axis, num_workers, make_rule)


def form(shapes: Shapes, cap_bytes: int) -> list[list[str]]:
    """The paths in every bucket."""
    paths = list(shapes)
    sizes = [4 * math.prod(shape) for shape in shapes.values()]
    order = buckets.backward_order(paths)
    formed = buckets.form_buckets(sizes, ["float32"] * len(paths), order, cap_bytes, cap_bytes)
    return [[paths[i] for i in bucket] for bucket in formed]


def mean_magnitude(leaves: list[Array]) -> Array:
    return sum((jnp.sum(jnp.abs(leaf)) for leaf in leaves), jnp.float32(0)) / sum(
        leaf.size for leaf in leaves
    )
