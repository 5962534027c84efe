"""Codecs: values <-> packed words, and the counting of words without unpacking them.

Nothing here knows of a mesh axis. A *word* is 32 one-bit votes in a `uint32`; a *vote* is one bit of one
worker about one element; `V` votes are counted bit by bit with logic on whole words (a carry-save adder
whose digits are words), 32 elements an instruction. Sources: signSGD with majority vote (arXiv 1802.04434,
1810.05291), 1-bit Adam's two-phase aggregation (arXiv 2102.02888), NEURON-Fabric (arXiv 2606.25759).

Layout. `BLOCK` = 512 consecutive elements become 16 words: bit `b` of word `j` of a block is element
`16 * b + j` of it. Neighbouring words then hold neighbouring elements, so both packing and unpacking run on
whole vectors; with 32 consecutive elements to a word, packing is a horizontal sum and 3 times slower.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array, lax

WORD_BITS = 32
LANE_WORDS = 16
BLOCK = WORD_BITS * LANE_WORDS
SKETCH_SIZE = 2 * LANE_WORDS


# ------------------------------------------------------------------------------------------------ words


def pack_bits(bits: Array) -> Array:
    """Packs booleans into words.

    Args:
      bits: `bool[..., n]`, `n` a multiple of `BLOCK`.

    Returns:
      `uint32[..., n // 32]`.
    """
    *lead, num = bits.shape
    blocks = bits.reshape(*lead, num // BLOCK, WORD_BITS, LANE_WORDS).astype(jnp.uint32)
    words = jnp.sum(blocks << _bit_index(), axis=-2, dtype=jnp.uint32)
    return _materialized(words.reshape(*lead, num // WORD_BITS))


def unpack_bits(words: Array) -> Array:
    """Unpacks words into booleans: the inverse of `pack_bits`.

    Args:
      words: `uint32[..., m]`, `m` a multiple of `LANE_WORDS`.

    Returns:
      `bool[..., 32 * m]`.
    """
    *lead, num = words.shape
    blocks = words.reshape(*lead, num // LANE_WORDS, 1, LANE_WORDS)
    bits = (blocks >> _bit_index()) & jnp.uint32(1)
    return (bits != 0).reshape(*lead, num * WORD_BITS)


def is_positive(values: Array, tie: Array) -> Array:
    """The sign bit of `values`; exact zeros follow `tie` (`bool[]`), so that over steps they have no bias."""
    return (values > 0) | ((values == 0) & tie)


def random_words(seed: Array, num_words: int) -> Array:
    """Pseudo-random words, the same on every worker for the same `seed` (`uint32[]`): `uint32[num_words]`."""
    return _mix(seed + jnp.arange(num_words, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))


def _materialized(words: Array) -> Array:
    """Keeps XLA from fusing the making of words into their unpacking: every bit would make its word anew."""
    return lax.optimization_barrier(words)


def _bit_index() -> Array:
    return jnp.arange(WORD_BITS, dtype=jnp.uint32)[:, None]


def _mix(state: Array) -> Array:
    """A 32-bit integer hash: two rounds of xor-shift and odd multiply."""
    for multiplier in (0x7FEB352D, 0x846CA68B):
        state = (state ^ (state >> jnp.uint32(16))) * jnp.uint32(multiplier)
    return state ^ (state >> jnp.uint32(15))


# -------------------------------------------------------------------------------------------- bfloat16


def to_bf16_words(values: Array) -> Array:
    """Rounds `f32[...]` to bfloat16, to nearest even, as `uint16[...]`: the upper half of each number.

    Integer arithmetic, because XLA on CPU converts numbers one by one and widens bf16 collectives to f32. A
    finite value stays finite (clipped to bfloat16's range); NaN and infinity stay what they are.
    """
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    odd = (bits >> jnp.uint32(16)) & jnp.uint32(1)
    rounded = (bits + jnp.uint32(0x7FFF) + odd) >> jnp.uint32(16)
    magnitude = bits & jnp.uint32(0x7FFFFFFF)
    sign = (bits >> jnp.uint32(16)) & jnp.uint32(0x8000)
    clipped = jnp.where(magnitude > jnp.uint32(0x7F7F7FFF), sign | jnp.uint32(0x7F7F), rounded)
    special = jnp.where(magnitude > jnp.uint32(0x7F800000), jnp.uint32(0x7FC0), sign | jnp.uint32(0x7F80))
    return jnp.where(magnitude >= jnp.uint32(0x7F800000), special, clipped).astype(jnp.uint16)


def from_bf16_words(words: Array) -> Array:
    """`uint16[...]` -> `f32[...]`: the inverse of `to_bf16_words`, exact."""
    return lax.bitcast_convert_type(words.astype(jnp.uint32) << jnp.uint32(16), jnp.float32)


# --------------------------------------------------------------------------------------------- counting


def count_votes(votes: Array) -> Array:
    """Counts set bits over votes, position by position, without unpacking (any number of votes).

    Args:
      votes: `uint32[V, m]`.

    Returns:
      `uint32[P, m]`, `P = V.bit_length()`: plane `p` holds bit `p` of all `32 * m` counts.
    """
    num_votes = votes.shape[0]
    numbers = votes[:, None]
    while numbers.shape[0] > 1:
        if numbers.shape[0] % 2:
            numbers = jnp.concatenate([numbers, jnp.zeros_like(numbers[:1])])
        numbers = _add_planes(numbers[0::2], numbers[1::2])
    return _materialized(numbers[0, : num_votes.bit_length()])


def _add_planes(a: Array, b: Array) -> Array:
    """Adds two bit-sliced numbers `uint32[k, P, m]` -> `uint32[k, P + 1, m]`."""
    carry, planes = jnp.zeros_like(a[:, 0]), []
    for p in range(a.shape[1]):
        either = a[:, p] ^ b[:, p]
        planes.append(either ^ carry)
        carry = (a[:, p] & b[:, p]) | (either & carry)
    return jnp.stack([*planes, carry], axis=1)


def majority_words(planes: Array, num_votes: int, ties: Array) -> Array:
    """The majority bit of every position, from its bit-sliced count.

    Args:
      planes: `uint32[P, m]` from `count_votes`.
      num_votes: `V`.
      ties: `uint32[m]`, the bits taken where exactly half of an even `V` are set.

    Returns:
      `uint32[m]`.
    """
    half = num_votes // 2
    above, equal = jnp.zeros_like(planes[0]), jnp.full_like(planes[0], 0xFFFFFFFF)
    for p in reversed(range(planes.shape[0])):
        if (half >> p) & 1:
            equal = equal & planes[p]
        else:
            above = above | (equal & planes[p])
            equal = equal & ~planes[p]
    return _materialized(above if num_votes % 2 else above | (equal & ties))


def decode_counts(planes: Array, num_votes: int) -> Array:
    """Mean vote in [-1, 1]: `(2 * count - V) / V`.

    Args:
      planes: `uint32[..., P, m]`.
      num_votes: `V`.

    Returns:
      `f32[..., 32 * m]`.
    """
    *lead, num_planes, num = planes.shape
    blocks = planes.reshape(*lead, num_planes, num // LANE_WORDS, 1, LANE_WORDS)
    count = jnp.zeros((), jnp.uint32)
    for p in range(num_planes):
        plane = lax.index_in_dim(blocks, p, axis=len(lead), keepdims=False)
        count = count | (((plane >> _bit_index()) & jnp.uint32(1)) << jnp.uint32(p))
    excess = 2 * count.astype(jnp.int32) - jnp.int32(num_votes)
    mean = excess.astype(jnp.float32) * jnp.float32(1 / num_votes)
    return mean.reshape(*lead, num * WORD_BITS)


def count_agreeing(votes: Array, majority: Array) -> Array:
    """How many votes side with the majority, block by block.

    Args:
      votes: `uint32[V, m]`.
      majority: `uint32[m]`.

    Returns:
      `f32[m // LANE_WORDS]`: votes that agree, summed over a block's 512 elements.
    """
    agree = lax.population_count(~(votes ^ majority)).astype(jnp.int32)
    return agree.reshape(votes.shape[0], -1, LANE_WORDS).sum(axis=(0, 2)).astype(jnp.float32)


# ----------------------------------------------------------------------------------------------- levels


@dataclasses.dataclass(frozen=True)
class Levels:
    """A symmetric quantizer of at most four levels: `+-low` up to `threshold`, `+-high` above.

    The three numbers are in units of the values' root mean square and are the Lloyd-Max quantizer of a
    Gaussian (J. Max, Quantizing for minimum distortion, 1960). `threshold` None means one level, fitted
    by least squares to the values at hand instead.
    """

    low: float
    high: float
    threshold: float | None

    @property
    def num_bits(self) -> int:
        return 1 if self.threshold is None else 2


LEVELS = {
    "majority": Levels(1.0, 1.0, None),
    "ternary": Levels(0.0, 1.2240, 0.6120),
    "2bit": Levels(0.4528, 1.5104, 0.9816),
}


def gated_level(gate: float) -> float:
    """Mean of |x| beyond `gate * mean |x|`, in units of mean |x|, for a Gaussian x: TERNARY's level."""
    threshold = gate * math.sqrt(2 / math.pi)
    density = math.exp(-(threshold**2) / 2) / math.sqrt(2 * math.pi)
    tail = math.erfc(threshold / math.sqrt(2)) / 2
    return density / tail / math.sqrt(2 / math.pi)


def decode_levels(words: Array, levels: Levels) -> Array:
    """`uint32[..., bits, m]` (sign, then magnitude plane) -> `f32[..., 32 * m]`, units of the level."""
    sign = jnp.where(unpack_bits(words[..., 0, :]), jnp.float32(1), jnp.float32(-1))
    if levels.threshold is None:
        return sign
    large = unpack_bits(words[..., 1, :])
    return sign * jnp.where(large, jnp.float32(levels.high), jnp.float32(levels.low))


# --------------------------------------------------------------------------------------------- segments


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
        return -(-self.shard_rows * self.cols // BLOCK) * BLOCK

    @property
    def shard_words(self) -> int:
        return self.shard_size // WORD_BITS

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
      `f32[SKETCH_SIZE]`, in the values' unit; its relative standard error is about `sqrt(1 / SKETCH_SIZE)`.
    """
    flat = values.reshape(-1)
    width = WORD_BITS * SKETCH_SIZE
    missing = -flat.shape[0] % width
    blocks = jnp.pad(flat, (0, missing)).reshape(-1, WORD_BITS, SKETCH_SIZE)
    inner = _random_signs(seed, (WORD_BITS, SKETCH_SIZE))
    outer = _random_signs(seed ^ jnp.uint32(0x5BD1E995), (blocks.shape[0], SKETCH_SIZE))
    return jnp.sum(jnp.sum(blocks * inner, axis=1) * outer, axis=0)


def _random_signs(seed: Array, shape: tuple[int, ...]) -> Array:
    bits = random_words(seed, math.prod(shape)).reshape(shape) & jnp.uint32(1)
    return jnp.where(bits != 0, jnp.float32(1), jnp.float32(-1))
