"""How a leaf is cut into shards, scaled, and sketched: geometry and statistics, still without a mesh.

A scale turns a sign back into a number. One per leaf is cheap and poor on matrices, where rows and columns
differ: `rank1` keeps a factor for each row and each column, and leaves residuals a tenth of the size.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array, lax

from nf_jax import codecs

SKETCH_SIZE = 2 * codecs.LANE_WORDS


@dataclasses.dataclass(frozen=True)
class Segment:
    """How one leaf is cut into `W` shards, one for each worker that reduces.

    The leaf is seen as a matrix `[rows, cols]` (a convolution kernel as [everything, out]); a shard is
    `shard_rows` whole rows, padded to `shard_size` elements, a multiple of `BLOCK`.
    """

    num_workers: int
    rows: int
    cols: int
    scale: str

    @property
    def size(self) -> int:
        return self.rows * self.cols

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The form in which the leaf is worked on; no axis of length 1, which no backend likes innermost."""
        return (self.rows,) if self.cols == 1 else (self.rows, self.cols)

    @property
    def shard_rows(self) -> int:
        return -(-self.rows // self.num_workers)

    @property
    def shard_size(self) -> int:
        return -(-self.shard_rows * self.cols // codecs.BLOCK) * codecs.BLOCK

    @property
    def shard_words(self) -> int:
        return self.shard_size // codecs.WORD_BITS

    @property
    def num_pads(self) -> int:
        return self.num_workers * self.shard_size - self.size

    @property
    def scale_size(self) -> int:
        by_scale = {"leaf": 1, "row": self.rows, "channel": self.cols, "rank1": self.rows + self.cols}
        return by_scale[self.scale]


def make_segment(shape: tuple[int, ...], num_workers: int, scale: str) -> Segment:
    """The segment of a leaf; `scale` "auto" is rank1 where its numbers cost under 0.5 % of FP32's bytes.

    A vector has no rows and columns to tell apart: whatever is asked, its scale is the leaf's.
    """
    size, cols = math.prod(shape), shape[-1] if len(shape) > 1 else 1
    rows = size // max(cols, 1)
    if scale == "auto":
        cheap = size > 0 and (rows + cols) / (2 * size) < 0.005 and rows >= num_workers
        scale = "rank1" if cheap and len(shape) > 1 else "leaf"
    if len(shape) < 2 or rows < num_workers:
        return Segment(num_workers, size, 1, "leaf")
    return Segment(num_workers, rows, cols, scale)


def to_shards(matrix: Array, segment: Segment) -> Array:
    """`[*matrix_shape]` -> `[W, shard_size]`, padded with zeros (False)."""
    missing = segment.num_workers * segment.shard_rows - segment.rows
    if missing:
        matrix = jnp.pad(matrix, [(0, missing)] + [(0, 0)] * (matrix.ndim - 1))
    return pad_shard(matrix.reshape(segment.num_workers, -1), segment)


def pad_shard(shards: Array, segment: Segment) -> Array:
    """`[..., shard_rows * cols]` -> `[..., shard_size]`, padded with zeros."""
    missing = segment.shard_size - shards.shape[-1]
    if not missing:
        return shards
    return jnp.pad(shards, [(0, 0)] * (shards.ndim - 1) + [(0, missing)])


def from_shards(shards: Array, segment: Segment) -> Array:
    """`[W, shard_size]` -> `[*matrix_shape]`: the inverse of `to_shards`."""
    kept = shards[:, : segment.shard_rows * segment.cols]
    return kept.reshape(-1, *segment.matrix_shape[1:])[: segment.rows]


# ----------------------------------------------------------------------------------------------- scales


def local_scale(magnitude: Array, scale: str) -> Array:
    """One worker's scale of a leaf: means of |values| over the leaf, its rows, its columns, or both.

    Args:
      magnitude: `f32[*Segment.matrix_shape]`, |gradient + residual|.
      scale: "leaf", "row", "channel" (a column is an output channel) or "rank1".

    Returns:
      `f32[Segment.scale_size]`, in gradient units.
    """
    if scale == "leaf":
        return jnp.mean(magnitude).reshape(1)
    by_row = jnp.mean(magnitude, axis=1) if scale in ("row", "rank1") else None
    by_col = jnp.mean(magnitude, axis=0) if scale in ("channel", "rank1") else None
    return jnp.concatenate([part for part in (by_row, by_col) if part is not None])


def scale_factors(agreed: Array, segment: Segment) -> tuple[Array, Array]:
    """The agreed scale as two factors whose product broadcasts over the leaf's matrix.

    A non-finite entry anywhere makes every entry NaN: a leaf with a NaN or an overflow on any worker must
    come back non-finite as a whole (a sign would hide it).

    Returns:
      `row`, `f32[rows or 1, 1]`, and `col`, `f32[1, cols or 1]`; of one axis where the matrix has one.
    """
    poison = jnp.sum(agreed * jnp.float32(0))
    one = jnp.ones((1,) * len(segment.matrix_shape), jnp.float32)
    if segment.scale == "leaf":
        return one * (agreed + poison), one
    if segment.scale == "row":
        return (agreed + poison)[:, None], one
    if segment.scale == "channel":
        return one, (agreed + poison)[None, :]
    row, col = agreed[: segment.rows], agreed[segment.rows :]
    mean = jnp.mean(row)
    inverse = jnp.where(mean > 0, 1 / jnp.where(mean > 0, mean, jnp.float32(1)), jnp.float32(0))
    return (row + poison)[:, None], (col * inverse + poison)[None, :]


def shard_scale(row: Array, col: Array, segment: Segment, index: Array) -> Array:
    """The scale of shard `index`, element by element, zero on pads: `f32[shard_size]`."""
    first = index * segment.shard_rows
    row = row.reshape(-1)
    if row.shape[0] == segment.rows:
        padded = jnp.pad(row, (0, segment.num_workers * segment.shard_rows - segment.rows))
        row = lax.dynamic_slice_in_dim(padded, first, segment.shard_rows)
    else:
        is_row = first + jnp.arange(segment.shard_rows, dtype=first.dtype) < segment.rows
        row = jnp.where(is_row, row, jnp.float32(0))
    scale = row[:, None] * jnp.broadcast_to(col.reshape(1, -1), (1, segment.cols))
    return lax.optimization_barrier(pad_shard(scale.reshape(-1), segment))


# --------------------------------------------------------------------------------------------- sketches


def sketch(values: Array, seed: Array) -> Array:
    """A random projection whose squared norm estimates that of `values` without bias.

    Workers that use the same seed can average their sketches: the squared norm of the mean sketch then
    estimates that of the mean vector, from `SKETCH_SIZE` numbers instead of all (tug-of-war sketch: Alon,
    Matias and Szegedy, 1996).

    Args:
      values: `f32[...]`.
      seed: `uint32[]`, the same on all workers.

    Returns:
      `f32[SKETCH_SIZE]`, in the values' unit. For values without structure its squared norm has a relative
      standard error of `sqrt(2 / SKETCH_SIZE)`.
    """
    flat = values.reshape(-1)
    width = codecs.WORD_BITS * SKETCH_SIZE
    missing = -flat.shape[0] % width
    blocks = jnp.pad(flat, (0, missing)).reshape(-1, codecs.WORD_BITS, SKETCH_SIZE)
    inner = _random_signs(seed, (codecs.WORD_BITS, SKETCH_SIZE))
    outer = _random_signs(seed ^ jnp.uint32(0x5BD1E995), (blocks.shape[0], SKETCH_SIZE))
    return jnp.sum(jnp.sum(blocks * inner, axis=1) * outer, axis=0)


def _random_signs(seed: Array, shape: tuple[int, ...]) -> Array:
    bits = codecs.random_words(seed, math.prod(shape)).reshape(shape) & jnp.uint32(1)
    return jnp.where(bits != 0, jnp.float32(1), jnp.float32(-1))
