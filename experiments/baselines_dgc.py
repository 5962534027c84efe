"""Deep Gradient Compression: every worker sends its largest elements, and gathers the rest."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from experiments.baselines_rule import Leaves, Rule, Shapes, transform
from nf_jax.capacity import allreduce_bytes, gather_bytes


def dgc(
    axis: str,
    num_workers: int,
    *,
    density: float = 0.001,
    momentum: float = 0.9,
    clip_norm: float | None = None,
    warmup_steps: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Deep Gradient Compression: the largest elements of every leaf, the rest later (arXiv 1712.01887).

    A worker adds its gradient to its velocity, the velocity to what it has not sent, and sends the largest of
    that (momentum correction); there it clears both (momentum factor masking). So momentum is inside: follow
    it with `optax.sgd(learning_rate)` without any, or set `momentum=0` for plain top-k with error feedback,
    which any optimizer can follow. Leaves of fewer than two dimensions are averaged exactly.

    Simulated: the mean is exact arithmetic, in FP32, on what would have been sent. Bytes: 4 of value and 4 of
    index for each element, gathered by all; the exact leaves, all-reduced.

    Args:
      axis, num_workers: see `BASELINES`.
      density: part of a leaf's elements that is sent, rounded up; 0.001 is the paper's (sparsity 99.9 %).
        The largest are found exactly, where the paper samples.
      momentum: decay of the velocity.
      clip_norm: limit of the *mean* gradient's norm; a worker clips its own to sqrt(W) times that, as
        independent gradients are so much longer than their mean. None: no clipping.
      warmup_steps: steps in four equal parts of density 1/4, 1/16, 1/64, 1/256 before `density`; the paper
        takes four epochs.
    """
    if not 0 < density <= 1:
        raise ValueError(f"dgc: expected a density in (0, 1], got {density}")
    if warmup_steps < 0:
        raise ValueError(f"dgc: expected warmup_steps of at least 0, got {warmup_steps}")
    warmup = [max(density, 4.0**-part) for part in (1, 2, 3, 4)] if warmup_steps else []
    densities = [*warmup, density]
    starts = [math.ceil(warmup_steps * part / 4) for part in range(1, len(densities))]

    def phase(step: Array) -> Array:
        return jnp.sum(step >= np.asarray(starts, np.int32), dtype=jnp.int32)

    def make_rule(shapes: Shapes) -> Rule:
        sparse = {p: shape for p, shape in shapes.items() if len(shape) > 1 and math.prod(shape)}
        exact = sum(math.prod(shape) for path, shape in shapes.items() if path not in sparse)
        counts = {p: [math.ceil(part * math.prod(s)) for part in densities] for p, s in sparse.items()}
        totals = [sum(row[i] for row in counts.values()) for i in range(len(densities))]
        exact_bytes = allreduce_bytes(4 * exact, num_workers)

        def send(gradients: Leaves, own: Leaves, shared: Any, step: Array) -> tuple[Leaves, Leaves]:
            if clip_norm is not None:
                gradients = _clip(gradients, clip_norm * math.sqrt(num_workers))
            velocity = {p: momentum * own[f"velocity/{p}"] + leaf for p, leaf in gradients.items()}
            unsent = {p: own[f"unsent/{p}"] + velocity[p] for p in sparse}
            masks = {p: _largest(unsent[p], counts[p], phase(step)) for p in sparse}
            sent = velocity | {p: jnp.where(masks[p], unsent[p], 0) for p in sparse}
            velocity |= {p: jnp.where(masks[p], 0, velocity[p]) for p in sparse}
            kept = {f"velocity/{p}": leaf for p, leaf in velocity.items()}
            return sent, kept | {f"unsent/{p}": jnp.where(masks[p], 0, unsent[p]) for p in sparse}

        def receive(means: Leaves, kept: Leaves) -> tuple[Leaves, Leaves, Any]:
            return means, kept, ()

        return Rule(
            send,
            receive,
            wire_bytes=tuple(gather_bytes(8 * total, num_workers) + exact_bytes for total in totals),
            own={f"velocity/{p}": s for p, s in shapes.items()}
            | {f"unsent/{p}": s for p, s in sparse.items()},
            phase=phase,
        )

    return transform(axis, num_workers, make_rule)


def _clip(gradients: Leaves, limit: float) -> Leaves:
    norm = jnp.sqrt(sum((jnp.sum(leaf * leaf) for leaf in gradients.values()), start=jnp.float32(0)))
    return {path: leaf * (limit / jnp.maximum(norm, limit)) for path, leaf in gradients.items()}


def _largest(values: Array, counts: list[int], phase: Array) -> Array:
    """`bool`, true at the `counts[phase]` elements of largest magnitude; what is not a number comes first."""
    magnitudes = jnp.abs(values).reshape(-1)
    # Where NaN stands in an order is each backend's own affair.
    magnitudes = jnp.where(jnp.isnan(magnitudes), jnp.inf, magnitudes)
    _, order = lax.top_k(magnitudes, max(counts))
    chosen = jnp.arange(max(counts)) < jnp.asarray(counts, jnp.int32)[phase]
    return jnp.zeros(magnitudes.shape, bool).at[order].set(chosen).reshape(values.shape)
