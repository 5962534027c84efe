"""Laws of the codecs, against NumPy: packing, counting, levels, segments, scales, sketches."""

from __future__ import annotations

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from nf_jax import codecs, segments
from nf_jax.codecs import BLOCK, LEVELS, WORD_BITS
from nf_jax.segments import SKETCH_SIZE, Segment, make_segment

NUM_VOTES = (1, 2, 3, 5, 7, 8, 255, 256, 300, 1000)
SEEDS = st.integers(0, 2**32 - 1)

pack = jax.jit(codecs.pack_bits)
unpack = jax.jit(codecs.unpack_bits)
count = jax.jit(codecs.count_votes)
sketch = jax.jit(segments.sketch)


def random_bits(seed: int, *shape: int) -> np.ndarray:
    """Bits whose density differs from position to position, so that all counts occur."""
    rng = np.random.default_rng(seed)
    return rng.random(shape) < rng.choice([0.0, 0.1, 0.5, 0.9, 1.0], shape[-1])


def counts_of(planes: np.ndarray) -> np.ndarray:
    bits = np.asarray(unpack(planes)).astype(np.int64)
    return (bits << np.arange(len(bits))[:, None]).sum(0)


# ---------------------------------------------------------------------------------------- words


@hypothesis.given(seed=SEEDS, lead=st.sampled_from([(), (1,), (2, 3)]), blocks=st.integers(1, 3))
@hypothesis.settings(max_examples=25)
def test_unpacking_inverts_packing(seed: int, lead: tuple[int, ...], blocks: int):
    bits = random_bits(seed, *lead, blocks * BLOCK)
    words = pack(bits)
    assert words.shape == (*lead, blocks * BLOCK // WORD_BITS) and words.dtype == jnp.uint32
    np.testing.assert_array_equal(unpack(words), bits)
    assert np.bitwise_count(np.asarray(words)).sum() == bits.sum()


@hypothesis.given(seed=SEEDS)
@hypothesis.settings(max_examples=10)
def test_packing_inverts_unpacking(seed: int):
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (2, BLOCK // WORD_BITS), dtype=np.uint32)
    np.testing.assert_array_equal(pack(unpack(words)), words)


@pytest.mark.parametrize("tie", [False, True])
def test_only_exact_zeros_follow_the_tie(tie: bool):
    tiny = np.float32(1.2e-38)
    values = np.asarray([0.0, -0.0, tiny, -tiny, np.inf, -np.inf, 3, -3], np.float32)
    positive = codecs.is_positive(jnp.asarray(values), jnp.asarray(tie))
    expected = [tie, tie, True, False, True, False, True, False]
    np.testing.assert_array_equal(positive, expected)


def test_random_words_are_a_function_of_the_seed_and_balanced():
    words = [np.asarray(codecs.random_words(jnp.uint32(seed), 4096)) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(words[0], words[1])
    for other in (words[0], words[0] ^ words[2], words[0][1:] ^ words[0][:-1]):
        by_bit = ((other[:, None] >> np.arange(32)) & 1).mean(0)
        assert abs(by_bit - 0.5).max() < 5 * 0.5 / math.sqrt(4095)


# ------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize("num_votes", NUM_VOTES)
def test_votes_are_counted_without_unpacking(num_votes: int):
    bits = random_bits(num_votes, num_votes, BLOCK)
    planes = np.asarray(count(pack(bits)))
    assert planes.shape == (num_votes.bit_length(), BLOCK // WORD_BITS)
    np.testing.assert_array_equal(counts_of(planes), bits.sum(0))


@pytest.mark.parametrize("num_votes", NUM_VOTES)
def test_the_majority_wins_and_ties_take_their_bit(num_votes: int):
    rng = np.random.default_rng(num_votes)
    bits = random_bits(num_votes, num_votes, BLOCK)
    bits[:, : BLOCK // 2] = rng.permuted(  # an exact tie where there can be one, else nearly
        np.arange(num_votes)[:, None] < np.full(BLOCK // 2, num_votes // 2), axis=0
    )
    ties = rng.integers(0, 2**32, BLOCK // WORD_BITS, dtype=np.uint32)
    planes = count(pack(bits))
    majority = jax.jit(codecs.majority_words, static_argnums=1)(planes, num_votes, ties)
    twice = 2 * bits.sum(0)
    tie_bits = np.asarray(unpack(ties))
    expected = (twice > num_votes) | ((twice == num_votes) & tie_bits)
    assert num_votes % 2 or len(set(tie_bits[twice == num_votes])) == 2
    np.testing.assert_array_equal(unpack(majority), expected)


@pytest.mark.parametrize("num_votes", NUM_VOTES)
def test_counts_decode_to_the_mean_vote(num_votes: int):
    bits = random_bits(num_votes + 1, num_votes, BLOCK)
    mean = jax.jit(codecs.decode_counts, static_argnums=1)(count(pack(bits)), num_votes)
    assert mean.dtype == jnp.float32
    np.testing.assert_allclose(mean, np.where(bits, 1.0, -1.0).mean(0), rtol=0, atol=1e-6)
    unanimous = bits.all(0) | ~bits.any(0)
    np.testing.assert_allclose(np.abs(mean)[unanimous], 1, rtol=2e-7)


def test_counts_decode_under_leading_dimensions():
    bits = random_bits(0, 3, BLOCK)
    planes = np.asarray(count(pack(bits)))
    whole = codecs.decode_counts(jnp.asarray(planes), 3)
    stacked = codecs.decode_counts(jnp.asarray(np.stack([planes, 0 * planes])), 3)
    np.testing.assert_array_equal(stacked[0], whole)
    np.testing.assert_array_equal(stacked[1], -np.ones(BLOCK, np.float32))


@pytest.mark.parametrize("num_votes", (1, 2, 3, 8, 300))
def test_agreeing_votes_are_counted_block_by_block(num_votes: int):
    bits = random_bits(num_votes + 2, num_votes, 3 * BLOCK)
    majority = random_bits(7, 3 * BLOCK)
    agreeing = jax.jit(codecs.count_agreeing)(pack(bits), pack(majority))
    expected = (bits == majority).sum(0).reshape(3, BLOCK).sum(1)
    np.testing.assert_array_equal(agreeing, expected.astype(np.float32))


# --------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize("name", LEVELS)
def test_levels_are_read_from_a_sign_and_a_magnitude(name: str):
    levels = LEVELS[name]
    sign, large = random_bits(1, BLOCK), random_bits(2, BLOCK)
    planes = np.stack([sign, large][: levels.num_bits])
    values = codecs.decode_levels(pack(planes), levels)
    size = np.where(large, levels.high, levels.low) if levels.num_bits == 2 else 1.0
    np.testing.assert_allclose(values, np.where(sign, 1, -1) * size, rtol=1e-6)


@pytest.mark.parametrize(("name", "fixed_low"), [("ternary", 0.0), ("2bit", None)])
def test_the_levels_are_the_best_for_a_gaussian(name: str, fixed_low: float | None):
    x = np.linspace(0, 8, 40_001)
    density = np.exp(-(x**2) / 2)
    low, high = 0.3, 1.3
    for _ in range(200):  # Lloyd's iteration: threshold halfway, levels the means of their cells
        threshold = (low + high) / 2
        cells = x < threshold, x >= threshold
        low, high = (np.average(x[cell], weights=density[cell]) for cell in cells)
        low = low if fixed_low is None else fixed_low
    levels = LEVELS[name]
    assert levels.threshold is not None
    found = levels.low, levels.high, levels.threshold
    np.testing.assert_allclose(found, (low, high, (low + high) / 2), atol=2e-3)


@pytest.mark.parametrize("gate", [0.01, 0.767, 1.0, 4.0])
def test_the_gated_level_is_the_mean_beyond_the_gate(gate: float):
    x = np.linspace(0, 12, 1_200_001)
    density = np.exp(-(x**2) / 2)
    mean = np.average(x, weights=density)
    beyond = x > gate * mean
    expected = np.average(x[beyond], weights=density[beyond]) / mean
    assert codecs.gated_level(gate) == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------------- segments

SHAPES = st.lists(st.integers(1, 40), min_size=1, max_size=4).filter(lambda s: math.prod(s) < 20000)
SCALES = st.sampled_from(["auto", "leaf", "row", "channel", "rank1"])


def values_of(segment: Segment, seed: int = 0) -> np.ndarray:
    """A matrix without a zero, so that a pad cannot be mistaken for a value."""
    values = np.random.default_rng(seed).normal(size=segment.matrix_shape)
    return (np.sign(values) * (np.abs(values) + 0.1)).astype(np.float32)


@hypothesis.given(shape=SHAPES, num_workers=st.integers(1, 9), scale=SCALES)
def test_a_segment_covers_its_leaf(shape: list[int], num_workers: int, scale: str):
    segment = make_segment(tuple(shape), num_workers, scale)
    size = math.prod(shape)
    assert segment.size == segment.rows * segment.cols == size
    assert segment.shard_size % BLOCK == 0 and segment.shard_words * WORD_BITS == segment.shard_size
    assert segment.num_pads == num_workers * segment.shard_size - size >= 0
    assert num_workers * segment.shard_rows >= segment.rows
    assert segment.shard_size - segment.shard_rows * segment.cols < BLOCK
    if segment.scale != "leaf":  # a convolution kernel is [everything, out]
        assert segment.cols == shape[-1] and len(shape) > 1


@hypothesis.given(shape=SHAPES, num_workers=st.integers(1, 9), scale=SCALES, seed=SEEDS)
@hypothesis.settings(max_examples=15)
def test_shards_are_whole_rows_padded_with_zeros(shape: list[int], num_workers: int, scale: str, seed: int):
    segment = make_segment(tuple(shape), num_workers, scale)
    matrix = values_of(segment, seed)
    shards = np.asarray(segments.to_shards(jnp.asarray(matrix), segment))
    assert shards.shape == (num_workers, segment.shard_size)
    for index, shard in enumerate(shards):
        rows = matrix[index * segment.shard_rows :][: segment.shard_rows]
        np.testing.assert_array_equal(shard[: rows.size], rows.reshape(-1))
        assert not shard[rows.size :].any()
    np.testing.assert_array_equal(segments.from_shards(jnp.asarray(shards), segment), matrix)


@pytest.mark.parametrize(
    ("shape", "num_workers", "scale", "expected"),
    [
        ((4096,), 8, "rank1", "leaf"),  # a vector has no rows and columns
        ((4096,), 8, "row", "leaf"),
        ((4, 4096), 8, "rank1", "leaf"),  # fewer rows than workers
        ((96, 128), 8, "rank1", "rank1"),
        ((96, 128), 8, "row", "row"),
        ((3, 3, 16, 28), 8, "channel", "channel"),
        ((96, 128), 8, "auto", "leaf"),  # 224 numbers of 2 bytes are 0.9 % of 49 152
        ((512, 512), 8, "auto", "rank1"),  # 0.2 %
        ((200, 200), 8, "auto", "leaf"),  # exactly 0.5 %
        ((202, 200), 8, "auto", "rank1"),  # just under
        ((40000,), 8, "auto", "leaf"),
    ],
)
def test_which_scale_a_leaf_gets(shape: tuple[int, ...], num_workers: int, scale: str, expected: str):
    segment = make_segment(shape, num_workers, scale)
    assert segment.scale == expected
    rows, cols = math.prod(shape[:-1]), shape[-1]
    numbers = {"leaf": 1, "row": rows, "channel": cols, "rank1": rows + cols}
    assert segment.scale_size == numbers[expected]


# --------------------------------------------------------------------------------------- scales


def full_scale(magnitude: np.ndarray, scale: str) -> np.ndarray:
    """What one element's scale is, by the design, in f64."""
    magnitude = magnitude.astype(np.float64)
    row, col = magnitude.mean(1, keepdims=True), magnitude.mean(0, keepdims=True)
    whole = magnitude.mean()
    product = row * col / whole if whole else 0 * row * col
    scales = {"leaf": whole, "row": row, "channel": col, "rank1": product}
    return np.broadcast_to(scales[scale], magnitude.shape)


def factors_of(magnitude: np.ndarray, segment: Segment) -> tuple[jax.Array, jax.Array]:
    return segments.scale_factors(segments.local_scale(jnp.asarray(magnitude), scale=segment.scale), segment)


@pytest.mark.parametrize("scale", ["leaf", "row", "channel", "rank1"])
def test_scales_are_means_of_magnitudes(scale: str):
    segment = make_segment((37, 50), 3, scale)
    magnitude = np.abs(values_of(segment)) * np.geomspace(1e-3, 1e3, segment.rows)[:, None]
    magnitude = magnitude.astype(np.float32)
    numbers = segments.local_scale(jnp.asarray(magnitude), scale=segment.scale)
    assert numbers.shape == (segment.scale_size,) and numbers.dtype == jnp.float32
    row, col = factors_of(magnitude, segment)
    np.testing.assert_allclose(
        np.broadcast_to(row * col, magnitude.shape), full_scale(magnitude, scale), rtol=2e-6
    )


@pytest.mark.parametrize("scale", ["leaf", "row", "channel", "rank1"])
def test_what_is_all_zero_has_scale_zero(scale: str):
    segment = make_segment((16, 40), 2, scale)
    row, col = factors_of(np.zeros(segment.matrix_shape, np.float32), segment)
    assert not np.any(row * col)
    if segment.scale in ("row", "rank1"):
        magnitude = np.abs(values_of(segment))
        magnitude[3] = 0
        row, col = factors_of(magnitude, segment)
        scales = np.broadcast_to(row * col, magnitude.shape)
        assert not scales[3].any() and scales[[2, 4]].all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scale", ["leaf", "row", "channel", "rank1"])
def test_one_value_that_is_not_finite_makes_every_scale_nan(scale: str, bad: float):
    segment = make_segment((16, 40), 2, scale)
    magnitude = np.abs(values_of(segment))
    magnitude[-1, -1] = abs(bad)
    row, col = factors_of(magnitude, segment)
    assert np.isnan(row * col).all()


@pytest.mark.parametrize("scale", ["leaf", "row", "channel", "rank1"])
def test_a_shard_has_the_scales_of_its_rows_and_zero_beyond_the_last(scale: str):
    segment = make_segment((37, 50), 4, scale)
    row, col = factors_of(np.abs(values_of(segment)), segment)
    whole = np.zeros((segment.num_workers, segment.shard_rows, segment.cols), np.float32)
    whole.reshape(-1, segment.cols)[: segment.rows] = row * col
    for index in range(4):
        part = segments.shard_factors(row, col, segment, jnp.int32(index))
        np.testing.assert_array_equal(part[0] * part[1] + 0 * whole[index], whole[index])


@hypothesis.given(shape=SHAPES, num_workers=st.integers(2, 9), seed=SEEDS)
def test_a_shard_is_its_rows_and_pads(shape: list[int], num_workers: int, seed: int):
    segment = make_segment(tuple(shape), num_workers, "leaf")
    values = np.random.default_rng(seed).normal(size=(3, segment.shard_rows, *segment.matrix_shape[1:]))
    vector = segments.shard_vector(jnp.asarray(values, jnp.float32), segment)
    assert vector.shape == (3, segment.shard_size)
    assert np.count_nonzero(vector) == np.count_nonzero(values)
    np.testing.assert_array_equal(segments.shard_matrix(vector, segment), values.astype(np.float32))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 64, 65])
def test_the_mean_of_bf16_words_is_that_of_their_numbers(num_workers: int):
    values = np.random.default_rng(0).normal(size=(num_workers, 100)).astype(jnp.bfloat16)
    words = codecs.to_bf16_words(jnp.asarray(values, jnp.float32))
    found = codecs.mean_bf16_words(words)
    np.testing.assert_allclose(found, values.astype(np.float64).mean(0), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------- sketches


def squared_norms(values: np.ndarray, num_seeds: int = 400) -> np.ndarray:
    """Estimates by many seeds, over the true squared norm."""
    seeds = np.random.default_rng(0).integers(0, 2**32, num_seeds, dtype=np.uint32)
    sketches = jax.jit(jax.vmap(segments.sketch, in_axes=(None, 0)))(jnp.asarray(values), seeds)
    assert sketches.shape == (num_seeds, SKETCH_SIZE)
    return np.square(np.asarray(sketches, np.float64)).sum(1) / np.square(values).sum(dtype=np.float64)


VECTORS = {
    "gaussian": np.random.default_rng(1).normal(size=5000),
    "not a multiple of anything": np.random.default_rng(2).normal(size=(33, 37)),
    "one element": np.eye(1, 777)[0],
    "heavy tails": np.random.default_rng(3).standard_cauchy(size=4000),
    "alternating": np.where(np.arange(5000) % 2, 1.0, -1.0),
    "constant": np.ones(5000),
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_sketch_estimates_the_squared_norm_without_bias(name: str):
    ratios = squared_norms(VECTORS[name].astype(np.float32))
    error = ratios.std() / math.sqrt(len(ratios))
    assert abs(ratios.mean() - 1) < 4 * error + 1e-6


@pytest.mark.parametrize("name", VECTORS)
def test_a_sketch_is_about_as_accurate_as_its_size_says(name: str):
    # Independent signs give the squared norm a relative standard error of sqrt(2 / size). The signs
    # are products of an inner and an outer one: a column that is constant gets (3 * 3 - 1) / size.
    variance = 8 if name in ("constant", "alternating") else 2
    limit = 1.3 * math.sqrt(variance / SKETCH_SIZE)
    assert squared_norms(VECTORS[name].astype(np.float32)).std() < limit


@hypothesis.given(seed=SEEDS)
@hypothesis.settings(max_examples=10)
def test_the_mean_of_sketches_is_the_sketch_of_the_mean(seed: int):
    values = np.random.default_rng(seed).normal(size=(4, 3000)).astype(np.float32)
    sketches = np.stack([sketch(row, np.uint32(seed)) for row in values])
    whole = sketch(values.mean(0), np.uint32(seed))
    np.testing.assert_allclose(sketches.mean(0), whole, atol=1e-4)
    assert not np.asarray(sketch(0 * values[0], np.uint32(seed))).any()
