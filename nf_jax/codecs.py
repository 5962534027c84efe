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
import functools
import math

import jax.numpy as jnp
from jax import Array, lax

WORD_BITS = 32
LANE_WORDS = 16
BLOCK = WORD_BITS * LANE_WORDS
_MOST_WRITTEN_OUT = 64


# ------------------------------------------------------------------------------------------------ words


def pack_bits(bits: Array) -> Array:
    """Packs booleans into words.

    Args:
      bits: `bool[..., n]`, `n` a multiple of `BLOCK`.

    Returns:
      `uint32[..., n // 32]`.
    """
    *lead, num = bits.shape
    blocks = bits.reshape(*lead, num // BLOCK, WORD_BITS, LANE_WORDS)
    placed = jnp.where(blocks, jnp.uint32(1) << _bit_index(), jnp.uint32(0))
    # By quarters: XLA on CPU takes three times as long for a reduction over 32 bits at once.
    first, second, third, fourth = jnp.split(placed, 4, axis=-2)
    words = jnp.sum(first | second | third | fourth, axis=-2, dtype=jnp.uint32)
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
    return values >= jnp.where(tie, jnp.float32(0), jnp.finfo(jnp.float32).tiny)


def random_words(seed: Array, num_words: int) -> Array:
    """Pseudo-random words, the same on every worker for the same `seed` (`uint32[]`): `uint32[num_words]`."""
    return _mix(seed + jnp.arange(num_words, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9))


def _materialized(words: Array) -> Array:
    """Keeps XLA from fusing the making of words into their unpacking: every bit would make its word anew."""
    return lax.optimization_barrier(words)


def _signs(words: Array) -> Array:
    """+1 for a set bit, -1 for another, as the sign of a one: `uint32[..., m]` -> `f32[..., 32 * m]`."""
    *lead, num = words.shape
    blocks = words.reshape(*lead, num // LANE_WORDS, 1, LANE_WORDS)
    is_set = (blocks << (jnp.uint32(WORD_BITS - 1) - _bit_index())) & jnp.uint32(1 << 31)
    signs = lax.bitcast_convert_type(is_set ^ jnp.uint32(0xBF800000), jnp.float32)
    return signs.reshape(*lead, num * WORD_BITS)


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


def mean_bf16_words(words: Array) -> Array:
    """The mean over workers, `uint16[W, n]` -> `f32[n]`, added by `sum_in_order`."""
    return sum_in_order(from_bf16_words(words)) * jnp.float32(1 / words.shape[0])


def sum_in_order(values: Array) -> Array:
    """The sum over workers, `f32[W, ...]` -> `f32[...]`, added in their order; past 64 in XLA's.

    Written out up to there: XLA's reduction over so few rows takes ten times as long on CPU.
    """
    if values.shape[0] > _MOST_WRITTEN_OUT:
        return values.sum(0)
    return functools.reduce(jnp.add, values)


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
    num_planes = planes.shape[-2]
    excess = jnp.float32(2**num_planes - 1 - num_votes)
    for p in range(num_planes):
        excess = excess + _signs(planes[..., p, :]) * jnp.float32(2**p)
    return excess * jnp.float32(1 / num_votes)


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


def num_planes_down(down: str, num_votes: int) -> int:
    """Words a reducer sends for every 32 elements: a count's digits, or the bits of a level."""
    return num_votes.bit_length() if down == "count" else LEVELS[down].num_bits


def goes_straight(down: str, num_workers: int, num_planes_up: int) -> bool:
    """Whether votes go from each worker to all, instead of by way of a reducer.

    With two workers that costs no more bytes, nothing is requantized, and there is one wait less.
    """
    return num_workers == 2 and num_planes_down(down, num_workers * num_planes_up) >= num_planes_up


def gated_level(gate: float) -> float:
    """Mean of |x| beyond `gate * mean |x|`, in units of mean |x|, for a Gaussian x: TERNARY's level."""
    threshold = gate * math.sqrt(2 / math.pi)
    density = math.exp(-(threshold**2) / 2) / math.sqrt(2 * math.pi)
    tail = math.erfc(threshold / math.sqrt(2)) / 2
    return density / tail / math.sqrt(2 / math.pi)


def decode_levels(words: Array, levels: Levels) -> Array:
    """`uint32[..., bits, m]` (sign, then magnitude plane) -> `f32[..., 32 * m]`, units of the level."""
    sign = _signs(words[..., 0, :])
    if levels.threshold is None:
        return sign
    large = unpack_bits(words[..., 1, :])
    return sign * jnp.where(large, jnp.float32(levels.high), jnp.float32(levels.low))
