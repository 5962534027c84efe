"""How a leaf is cut into shards, scaled, and sketched: geometry and statistics, still without a mesh.

A scale turns a sign back into a number. One per leaf is cheap and poor on matrices, where rows and columns
differ: `rank1` keeps a factor for each row and each column, and leaves residuals a tenth of the size.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from nf_jax import codecs

SKETCH_SIZE = 32
_PROJECTIONS = 8  # random vectors that every row is multiplied with
_SKETCHED_COLS = 1024  # of a vector, seen as a matrix


@dataclasses.dataclass(frozen=True)
class Segment:
    """How one leaf is cut into `W` shards, one for each worker that reduces.

    The leaf is seen as a matrix `[rows, cols]` (a convolution kernel as [everything, out]); a shard is
    `shard_rows` whole rows, padded to `shard_size` elements, a multiple of `BLOCK`. On hosts of several
    devices this is a *piece* of the leaf, one of `num_inner` that each have `rows` of its rows.
    """

    num_workers: int
    rows: int
    cols: int
    scale: str
    num_inner: int = 1

    @property
    def size(self) -> int:
        return self.rows * self.cols

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The form in which the leaf is worked on; no axis of length 1, which no backend likes innermost."""
        return (self.rows,) if self.cols == 1 else (self.rows, self.cols)

    @property
    def run_shape(self) -> tuple[int, ...]:
        """The form in which the leaf is decoded: columns in runs of `LANE_WORDS`, where they divide so.

        Neighbours in a run are neighbouring words: XLA on CPU then decodes them at once, not one by one.
        """
        if self.cols == 1 or self.cols % codecs.LANE_WORDS:
            return self.matrix_shape
        return (self.rows, self.cols // codecs.LANE_WORDS, codecs.LANE_WORDS)

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


def make_segment(shape: tuple[int, ...], num_workers: int, scale: str, num_inner: int = 1) -> Segment:
    """The segment of a leaf, of which `num_inner` equal pieces are made (the size is a multiple of it).

    `scale` "auto" is rank1 where its numbers cost under 0.5 % of FP32's bytes. A vector has no rows and
    columns to tell apart: whatever is asked, its scale is the leaf's.
    """
    size, cols = math.prod(shape), shape[-1] if len(shape) > 1 else 1
    rows = size // max(cols, 1)
    if len(shape) < 2 or cols == 1 or rows % num_inner or rows // num_inner < num_workers:
        return Segment(num_workers, size // num_inner, 1, "leaf", num_inner)
    rows = rows // num_inner
    if scale == "auto":
        scale = "rank1" if (rows + cols) / (2 * rows * cols) < 0.005 else "leaf"
    return Segment(num_workers, rows, cols, scale, num_inner)


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


def in_runs(matrix: Array, segment: Segment) -> Array:
    """A matrix, or a factor that broadcasts over it, `[..., r, cols or 1]` -> `[..., r, *run_shape[1:]]`."""
    if segment.run_shape == segment.matrix_shape:
        return matrix
    trailing = (1, 1) if matrix.shape[-1] == 1 else segment.run_shape[1:]
    return matrix.reshape(*matrix.shape[:-1], *trailing)


# ----------------------------------------------------------------------------------------------- scales


def local_scale(magnitude: Array, again: Array | None = None, *, scale: str) -> Array:
    """One worker's scale of a leaf: means of |values| over the leaf, its rows, its columns, or both.

    Args:
      magnitude: `f32[*Segment.matrix_shape]`, |gradient + residual|.
      again: the same, made anew: XLA can compute it while it reads, where nothing else uses it.
      scale: "leaf", "row", "channel" (a column is an output channel) or "rank1".

    Returns:
      `f32[Segment.scale_size]`, in gradient units.
    """
    if scale == "leaf":
        return jnp.mean(magnitude).reshape(1)
    by_row = jnp.mean(magnitude, axis=1) if scale in ("row", "rank1") else None
    again = magnitude if again is None else again
    by_col = jnp.mean(again, axis=0) if scale in ("channel", "rank1") else None
    return jnp.concatenate([part for part in (by_row, by_col) if part is not None])


def scale_factors(agreed: Array, segment: Segment) -> tuple[Array, Array]:
    """The agreed scale as two factors whose product broadcasts over the leaf's matrix.

    A non-finite entry anywhere makes every entry NaN: a leaf with a NaN or an overflow on any worker must
    come back non-finite as a whole (a sign would hide it). So does an overflow of the sum of all magnitudes,
    over elements and workers: wherever a plain mean overflows, that sum does.

    Returns:
      `row`, `f32[rows or 1, 1]`, and `col`, `f32[1, cols or 1]`; of one axis where the matrix has one.
    """
    poison = (jnp.sum(agreed) + _total(agreed, segment)) * jnp.float32(0)
    one = jnp.ones((1,) * len(segment.matrix_shape), jnp.float32)
    if segment.scale == "leaf":
        return one * (agreed + poison), one
    if segment.scale == "row":
        return (agreed + poison)[:, None], one
    if segment.scale == "channel":
        return one, (agreed + poison)[None, :]
    row, col = agreed[: segment.rows], agreed[segment.rows :]
    mean = jnp.mean(row)
    # The inverse of a denormal would be infinite, where the hardware does not take it for zero.
    live = mean >= jnp.finfo(jnp.float32).tiny
    inverse = jnp.where(live, 1 / jnp.where(live, mean, jnp.float32(1)), jnp.float32(0))
    return (row + poison)[:, None], (col * inverse + poison)[None, :]


def _total(agreed: Array, segment: Segment) -> Array:
    """The sum of magnitudes over a leaf's elements and all workers, `f32[]`, from its agreed scale."""
    by_row = agreed[: segment.rows] if segment.scale == "rank1" else agreed
    summed = segment.size // by_row.shape[0] * segment.num_workers
    return jnp.sum(by_row) * np.float32(summed)


def shard_factors(row: Array, col: Array, segment: Segment, index: Array) -> tuple[Array, Array]:
    """The scale factors of shard `index`, zero beyond the leaf's last row: they broadcast over its rows.

    Returns:
      `row`, `f32[shard_rows, 1]`, and `col`, `f32[1, cols or 1]`; of one axis where the matrix has one.
    """
    first = index * segment.shard_rows
    trailing = (1,) * (len(segment.matrix_shape) - 1)
    if row.size == segment.rows:
        missing = segment.num_workers * segment.shard_rows - segment.rows
        padded = jnp.pad(row.reshape(-1), (0, missing))
        return lax.dynamic_slice_in_dim(padded, first, segment.shard_rows).reshape(-1, *trailing), col
    is_row = first + jnp.arange(segment.shard_rows, dtype=first.dtype) < segment.rows
    return jnp.where(is_row, row.reshape(-1), jnp.float32(0)).reshape(-1, *trailing), col


def shard_matrix(shard: Array, segment: Segment) -> Array:
    """`[..., shard_size]` -> `[..., shard_rows, *cols]`: the rows of a shard, without its pads."""
    kept = shard[..., : segment.shard_rows * segment.cols]
    return kept.reshape(*shard.shape[:-1], segment.shard_rows, *segment.matrix_shape[1:])


def shard_vector(matrix: Array, segment: Segment) -> Array:
    """`[k, shard_rows, *cols]` -> `[k, shard_size]`: the inverse of `shard_matrix`, padded with zeros."""
    return pad_shard(matrix.reshape(matrix.shape[0], -1), segment)


# --------------------------------------------------------------------------------------------- sketches


def sketch(values: Array, seed: Array) -> Array:
    """A random projection whose squared norm estimates that of `values` without bias.

    Workers that use the same seed can average their sketches: the squared norm of the mean sketch then
    estimates that of the mean vector, from `SKETCH_SIZE` numbers instead of all (tug-of-war sketch: Alon,
    Matias and Szegedy, 1996). The random signs are products of a row's and a column's, so that one thin
    matrix product reads the values once.

    Args:
      values: `f32[rows, cols]` or `f32[n]`.
      seed: `uint32[]`, the same on all workers.

    Returns:
      `f32[SKETCH_SIZE]`, in the values' unit. For values without structure its squared norm has a relative
      standard error of `sqrt(2 / SKETCH_SIZE)`; for a matrix of rank one, of about `sqrt(2 / 8)`.
    """
    if values.ndim == 1:
        values = jnp.pad(values, (0, -values.shape[0] % _SKETCHED_COLS)).reshape(-1, _SKETCHED_COLS)
    rows, cols = values.shape
    inner = _random_signs(seed, (cols, _PROJECTIONS))
    outer = _random_signs(seed ^ jnp.uint32(0x5BD1E995), (rows, _PROJECTIONS))
    projected = (values @ inner) * outer * np.float32(_PROJECTIONS**-0.5)
    parts = SKETCH_SIZE // _PROJECTIONS
    padded = jnp.pad(projected, ((0, -rows % parts), (0, 0)))
    return padded.reshape(-1, SKETCH_SIZE).sum(0)


def _random_signs(seed: Array, shape: tuple[int, ...]) -> Array:
    bits = codecs.random_words(seed, math.prod(shape)).reshape(shape) & jnp.uint32(1)
    return jnp.where(bits != 0, jnp.float32(1), jnp.float32(-1))
