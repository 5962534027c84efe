"""What the routes promise, in NumPy and f64, without packing anything: the oracle of the law tests.

Written from the design, not from the code: scales are means of magnitudes, a worker sends a sign (or
zero) at that scale, a reducer rounds the mean of what was sent to a few levels per leaf and shard.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from nf_jax.segments import make_segment

# Optimal quantizers of a unit Gaussian: threshold, inner and outer level (Max, 1960, rounded there
# to 4 places); a ternary one whose inner level is 0.
LEVELS = {"2bit": (0.9816, 0.4528, 1.5104), "ternary": (0.6120, 0.0, 1.2240)}


class Sent(NamedTuple):
    """What workers send of one leaf: `f64[W, *shape]`, and where that is beyond doubt."""

    values: np.ndarray
    certain: np.ndarray


def bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)


def gaussian_mean_beyond(gate: float) -> float:
    """E|x| where |x| > gate E|x|, in units of E|x|, for a Gaussian x."""
    x = np.linspace(0, 12, 600_001)
    density = np.exp(-(x**2) / 2)
    mean = np.average(x, weights=density)
    return float(np.average(x[x > gate * mean], weights=density[x > gate * mean]) / mean)


def scale_of(corrected: np.ndarray, scale: str) -> np.ndarray:
    """The agreed scale of every element: `f64[*shape]`. A kernel is seen as [everything, out]."""
    shape = corrected.shape[1:]
    cols = shape[-1] if len(shape) > 1 else 1
    mean = np.abs(corrected).mean(0).reshape(-1, cols)  # over workers
    whole, row, col = mean.mean(), mean.mean(1, keepdims=True), mean.mean(0, keepdims=True)
    if len(shape) < 2 or scale == "leaf":
        product = whole
    elif scale == "rank1":
        product = row * col / whole if whole else 0.0
    else:
        product = row if scale == "row" else col
    return np.broadcast_to(product, mean.shape).reshape(shape)


def owner_of(shape: tuple[int, ...], num_workers: int, scale: str) -> np.ndarray:
    """The worker that reduces every element: `int[*shape]`."""
    segment = make_segment(shape, num_workers, scale)
    return (np.arange(segment.size) // (segment.shard_rows * segment.cols)).reshape(shape)


def send_sign(corrected: np.ndarray, scale: np.ndarray) -> Sent:
    values = np.where(corrected > 0, scale, -scale)
    return Sent(values, corrected != 0)


def send_ternary(corrected: np.ndarray, scale: np.ndarray, gate: float, slack: float) -> Sent:
    level = gaussian_mean_beyond(gate) * scale
    excess = np.abs(corrected) - gate * scale
    values = np.where(excess > 0, np.sign(corrected) * level, 0.0)
    return Sent(values, np.abs(excess) > slack * gate * scale)


def reduce_levels(wanted: np.ndarray, scale: np.ndarray, owner: np.ndarray, down: str, slack: float) -> Sent:
    """Rounds what a reducer wants to send, `f64[*shape]`, to its levels, shard by shard."""
    values, certain = np.zeros_like(wanted), np.zeros(wanted.shape, bool)
    for worker in range(int(owner.max()) + 1):
        mine = owner == worker
        v, s = wanted[mine], scale[mine]
        total = (s * s).sum()
        if down == "majority":  # least squares
            unit = s * ((np.abs(v) * s).sum() / total if total else 0.0)
            values[mine] = np.where(v > 0, unit, -unit)
            certain[mine] = np.abs(v) > slack * s
        else:
            threshold, low, high = LEVELS[down]
            unit = s * (math.sqrt((v * v).sum() / total) if total else 0.0)
            large = np.abs(v) > threshold * unit
            values[mine] = np.sign(v) * np.where(large, high, low) * unit
            clear = np.abs(np.abs(v) - threshold * unit) > slack * np.maximum(unit, s)
            certain[mine] = clear & ((np.abs(v) > slack * s) | ~large & (low == 0))
    return Sent(values, certain)


def reduce_majority(votes: np.ndarray, scale: np.ndarray, owner: np.ndarray) -> Sent:
    """Without a server residual: the majority's sign at a shard's mean |mean vote|."""
    level = np.zeros_like(votes)
    for worker in range(int(owner.max()) + 1):
        level[owner == worker] = np.abs(votes[owner == worker]).mean()
    return Sent(np.where(votes > 0, level, -level) * scale, np.abs(votes) > 1e-6)
