"""Groups: lanes that switch together, what a route is given and gives back, and leaves worked on as stacks.

A *stack* holds leaves of a group that are alike, as one array `[k, *matrix_shape]`: a program over stacks
stays small however many layers a model repeats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from nf_jax import codecs, segments
from nf_jax.profile import Codec, Route
from nf_jax.segments import Segment


@dataclasses.dataclass(frozen=True)
class Group:
    """Lanes that switch together, with the leaves of theirs that can be packed. Static.

    Attributes:
      lanes: indices of its lanes in the plan.
      leaves: indices of its packable leaves in the flattened tree, those of a stack side by side.
      segments: how each of these leaves is cut into shards.
      lane_of_leaf: for each of these leaves, the position of its lane in `lanes`.
      stacks: how many leaves each stack has. Leaves of one stack are alike and are worked on as one array,
        which keeps the compiled program small.
      codec: the codec settings of its region.
      routes: the routes that it can ever take.
    """

    lanes: tuple[int, ...]
    leaves: tuple[int, ...]
    segments: tuple[Segment, ...]
    lane_of_leaf: tuple[int, ...]
    stacks: tuple[int, ...]
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
        planes_up = {Route.SIGN: 1, Route.TERNARY: 2}
        requantizes = self.codec.down != "count" and any(
            not codecs.goes_straight(self.codec.down, self.segments[0].num_workers, planes)
            for route, planes in planes_up.items()
            if route in self.routes
        )
        return self.codec.server_error_feedback and (requantizes or Route.BF16 in self.routes)

    @property
    def stack_segments(self) -> list[Segment]:
        """The segment that the leaves of each stack share."""
        starts = np.cumsum([0, *self.stacks[:-1]]).tolist()
        return [self.segments[start] for start in starts]


class Given(NamedTuple):
    """What a route is given. A *stack* holds leaves that are alike, `[k, *matrix_shape]`.

    Attributes:
      gradients: local gradients, stacks in the leaves' own dtype; differ between workers.
      residuals: what the worker has not sent yet, stacks in f32 or bf16; None without error feedback.
      server: what the worker as reducer has not sent yet, a `f32[k, shard_size]` per stack; None likewise.
      seed: `uint32[]`, the same on all workers, another at every step.
      ok: `bool[]`, the same on all workers; where False, residuals stay as they are.
    """

    gradients: Sequence[Array]
    residuals: Sequence[Array] | None
    server: Sequence[Array] | None
    seed: Array
    ok: Array


class Sent(NamedTuple):
    """What is left of sending: what arrived, and what was not sent.

    Attributes:
      payload: arrays from which `receive` makes the means; the same on all workers.
      residuals: stacks, gradient + old residual - sent; None without error feedback.
      server: the new server residuals, or None.
      agreement: `f32[lanes]`, mean |votes| in [0, 1]; -1 where nothing was voted.
      residual_ratio: `f32[lanes]`, RMS over workers of the residual norm / norm of the mean gradient.
      values: stacks, this worker's share of the mean as the others understood it.
    """

    payload: tuple[Array, ...]
    residuals: Sequence[Array] | None
    server: Sequence[Array] | None
    agreement: Array
    residual_ratio: Array
    values: Sequence[Array]


def stack_leaves(group: Group, leaves: Sequence[Array]) -> list[Array]:
    """The group's leaves as one array a stack, `[k, *matrix_shape]`."""
    return join_stacks(group, leaves, [segment.matrix_shape for segment in group.segments])


def join_stacks(group: Group, leaves: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Leaves that are alike as one array, `[k, *shape]`.

    Written out, so that a stack is copied once and its making is not fused into every reader: a fusion of
    dozens of operands takes XLA long to compile.
    """
    rows = [leaf.reshape(1, *shape) for leaf, shape in zip(leaves, shapes, strict=True)]
    stops = np.cumsum(group.stacks).tolist()
    return [
        lax.optimization_barrier(jnp.concatenate(rows[stop - count : stop])) if count > 1 else rows[stop - 1]
        for count, stop in zip(group.stacks, stops, strict=True)
    ]


def unstack(stacks: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Stacks back to leaves of these shapes."""
    rows = [row for stack in stacks for row in jnp.split(stack, stack.shape[0])]
    return [row.reshape(shape) for row, shape in zip(rows, shapes, strict=True)]


def narrow(mean: Array, dtype: np.dtype) -> Array:
    """A mean in the leaf's dtype. What is finite stays so: signs at one size, or gradients with what was
    owed, may go beyond the largest `f16` or `bf16`, which a plain mean cannot."""
    if mean.dtype == dtype:
        return mean
    largest = jnp.finfo(dtype).max.astype(jnp.float32)
    return jnp.where(jnp.isfinite(mean), jnp.clip(mean, -largest, largest), mean).astype(dtype)


def in_runs(group: Group, stacks: Sequence[Array]) -> list[Array]:
    """Stacks `[k, *matrix_shape]` as `[k, *run_shape]`."""
    return [
        stack.reshape(-1, *segment.run_shape)
        for stack, segment in zip(stacks, group.stack_segments, strict=True)
    ]


def wide_gradients(given: Given, reader: int = 0) -> list[Array]:
    """The local gradients in f32, stacks, widened anew for each `reader` (see `add_residuals`)."""
    return [_widen(gradient) for gradient in _read_by(reader, list(given.gradients))]


def add_residuals(given: Given, reader: int = 0) -> list[Array]:
    """Gradient + residual in f32, stacks, widened and added anew for each `reader`.

    XLA does both while it reads; what several share, and all that stands before a barrier, is written out:
    as large as the gradient, of small dtypes larger, and kept from its first reader to its last. Behind
    barriers, of another number for each reader, XLA does not find out that two readers ask for the same.
    """
    if given.residuals is None:
        return wide_gradients(given, reader)
    gradients, residuals = _read_by(reader, (list(given.gradients), list(given.residuals)))
    return [_widen(one) + _widen(other) for one, other in zip(gradients, residuals, strict=True)]


def _read_by(reader: int, operands: Any) -> Any:
    for _ in range(reader):
        operands = lax.optimization_barrier(operands)
    return operands


def _widen(stack: Array) -> Array:
    return stack.astype(jnp.float32)


def new_residuals(
    group: Group, given: Given, corrected: Sequence[Array], sent: Sequence[Array]
) -> tuple[list[Array] | None, Array]:
    """New residuals in f32, and their squared norm per lane (this worker's)."""
    if given.residuals is None:
        return None, jnp.zeros((len(group.lanes),), jnp.float32)
    residuals = [
        keep_unless(given.ok, _widen(old), c - part)
        for old, c, part in zip(given.residuals, corrected, sent, strict=True)
    ]
    return residuals, sum_by_lane(
        group, jnp.concatenate([jax.vmap(squared_norm)(stack) for stack in residuals])
    )


def keep_unless(ok: Array, old: Array, new: Array) -> Array:
    """The new residual where the step was sound; chosen, never multiplied: a NaN times zero is a NaN."""
    return jnp.where(ok, new, old)


def squared_norm(values: Array) -> Array:
    return jnp.sum(values * values)


def cut_shards(group: Group, stacks: Sequence[Array]) -> Array:
    """`[W, n]`: row i is what worker i reduces, leaf by leaf."""
    shards = []
    for segment, stack in zip(group.stack_segments, stacks, strict=True):
        cut = jax.vmap(lambda matrix, segment=segment: segments.to_shards(matrix, segment))(stack)
        shards.append(jnp.moveaxis(cut, 1, 0).reshape(segment.num_workers, -1))
    return jnp.concatenate(shards, axis=1)


def decode_stacks(group: Group, words: Array, per_word: int, decode: Callable[[Array], Array]) -> list[Array]:
    """Gathered `[W, ..., n]` -> `f32[k, *matrix_shape]` per stack; `decode` maps `[k, W, ..., m]`."""
    stacks = []
    for segment, part in zip(group.stack_segments, split_stacks(words, group, per_word), strict=True):
        values = decode(jnp.moveaxis(part, -2, 0))
        stacks.append(jax.vmap(lambda v, segment=segment: segments.from_shards(v, segment))(values))
    return stacks


def nothing_voted(group: Group) -> tuple[Array, Array]:
    return jnp.full((len(group.lanes),), -1, jnp.float32), jnp.zeros((len(group.lanes),), jnp.float32)


def norm_ratio(residual_squared: Array, mean_squared: Array) -> Array:
    return jnp.sqrt(residual_squared / nonzero(mean_squared))


def nonzero(values: Array) -> Array:
    return jnp.where(values == 0, jnp.float32(1), values)


def sum_by_lane(group: Group, values: Array | np.ndarray) -> Array:
    """Sums by lane what is given by leaf: `[leaves, ...]` -> `[lanes, ...]`."""
    return jax.ops.segment_sum(jnp.asarray(values), np.asarray(group.lane_of_leaf), len(group.lanes))


def leaf_of_block(group: Group) -> np.ndarray:
    num_blocks = [segment.shard_size // codecs.BLOCK for segment in group.segments]
    return np.repeat(np.arange(len(num_blocks), dtype=np.int32), num_blocks)


def split_stacks(values: Array, group: Group, per_word: int) -> list[Array]:
    """Cuts the last axis, a concatenation of the leaves' shards, into stacks: `[..., k, m]`."""
    parts, start = [], 0
    for count, segment in zip(group.stacks, group.stack_segments, strict=True):
        size = segment.shard_words * per_word
        part = lax.slice_in_dim(values, start, start + count * size, axis=values.ndim - 1)
        parts.append(part.reshape(*values.shape[:-1], count, size))
        start += count * size
    return parts


def as_f32(words: Array) -> Array:
    return lax.bitcast_convert_type(words, jnp.float32)
