"""Laws of the order, the buckets, the lanes and the groups."""

from __future__ import annotations

import collections
import doctest
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nf_jax import buckets

MIB = 1 << 20
NAMES = st.text(alphabet="ab_0129", min_size=1, max_size=4)
PATHS = st.lists(st.lists(NAMES, min_size=1, max_size=3).map("/".join), unique=True, max_size=12)
KEYS = st.lists(st.sampled_from([None, "a", "b", "c", ("d", 1)]), max_size=40)
REGION_IDS = st.integers(0, 3)


@st.composite
def models(draw):
    """Sizes in bytes, dtypes, backward order, both caps."""
    leaf = st.tuples(st.integers(0, 40), st.sampled_from(["f32", "bf16", "f16"]))
    leaves = draw(st.lists(leaf, max_size=25))
    order = draw(st.permutations(range(len(leaves))))
    first_bytes, cap_bytes = draw(st.integers(1, 60)), draw(st.integers(1, 60))
    return (
        [size for size, _ in leaves],
        [dtype for _, dtype in leaves],
        order,
        first_bytes,
        cap_bytes,
    )


def test_numbers_in_a_path_count_as_numbers():
    paths = [
        "block_10/a",
        "block_2/b",
        "block_2/a",
        "block/a",
        "block_2",
        "9",
        "10",
        "a1b10",
        "a1b9",
    ]
    assert sorted(paths, key=buckets.natural_key) == [
        "9", "10", "a1b9", "a1b10", "block/a", "block_2", "block_2/a", "block_2/b", "block_10/a",
    ]  # fmt: skip


@given(PATHS)
def test_different_paths_have_different_keys_that_compare(paths):
    assert len({buckets.natural_key(path) for path in paths}) == len(paths)
    shuffled = random.Random(0).sample(paths, len(paths))
    by_key = sorted(paths, key=buckets.natural_key)
    assert by_key == sorted(shuffled, key=buckets.natural_key)


@given(PATHS)
def test_backward_order_is_the_natural_order_reversed(paths):
    order = buckets.backward_order(paths)
    assert sorted(order) == list(range(len(paths)))
    ordered = [paths[index] for index in reversed(order)]
    assert ordered == sorted(paths, key=buckets.natural_key)


@given(PATHS, st.randoms(use_true_random=False))
def test_a_listed_order_is_reversed_whatever_the_names_say(paths, rng):
    defined = rng.sample(paths, len(paths))
    order = buckets.backward_order(paths, defined)
    assert [paths[index] for index in order] == defined[::-1]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (["a"], "missing: 'b', 'c'"),
        (["a", "b", "c", "d"], "not a leaf of the model: 'd'"),
        (["a", "b", "c", "a"], "listed more than once: 'a'"),
        (["a", "b", "x"], "missing: 'c'; not a leaf of the model: 'x'"),
        ([], "missing: 'a', 'b', 'c'"),
    ],
)
def test_an_order_that_is_not_exactly_the_leaves_is_refused(order, message):
    with pytest.raises(ValueError, match=message):
        buckets.backward_order(["a", "b", "c"], order)


@given(models())
def test_every_leaf_with_elements_is_in_exactly_one_bucket(model):
    sizes, *_ = model
    held = [leaf for bucket in buckets.form_buckets(*model) for leaf in bucket]
    assert sorted(held) == [leaf for leaf, size in enumerate(sizes) if size > 0]


@given(models())
def test_a_bucket_has_one_dtype(model):
    _, dtypes, *_ = model
    for bucket in buckets.form_buckets(*model):
        assert len({dtypes[leaf] for leaf in bucket}) == 1


@given(models())
def test_buckets_close_at_their_cap_and_only_there(model):
    sizes, dtypes, _, first_bytes, cap_bytes = model
    of_dtype = collections.defaultdict(list)
    for bucket in buckets.form_buckets(*model):
        of_dtype[dtypes[bucket[0]]].append([sizes[leaf] for leaf in bucket])
    for held in of_dtype.values():
        for index, bucket_sizes in enumerate(held):
            cap = first_bytes if index == 0 else cap_bytes
            assert sum(bucket_sizes[:-1]) < cap
            assert sum(bucket_sizes) >= cap or index == len(held) - 1


@given(models())
def test_buckets_keep_the_backward_order(model):
    _, dtypes, order, *_ = model
    formed = buckets.form_buckets(*model)
    position = {leaf: index for index, leaf in enumerate(order)}
    firsts = [position[bucket[0]] for bucket in formed]
    assert firsts == sorted(firsts)
    for dtype in set(dtypes):
        held = [position[leaf] for bucket in formed for leaf in bucket if dtypes[leaf] == dtype]
        assert held == sorted(held)


def test_a_large_leaf_closes_a_bucket_and_the_default_caps_apply():
    sizes = [20 * MIB, 10 * MIB, 30 * MIB, MIB // 2, MIB // 2]
    formed = buckets.form_buckets(sizes, ["f32"] * 5, [4, 3, 2, 1, 0], MIB, 25 * MIB)
    assert formed == ((4, 3), (2,), (1, 0))


def test_each_dtype_has_a_first_bucket_of_its_own():
    formed = buckets.form_buckets([4] * 6, ["a", "b"] * 3, range(6), first_bytes=4, cap_bytes=8)
    assert formed == ((0,), (1,), (2, 4), (3, 5))


@given(models(), st.data())
def test_lanes_hold_every_bucket_once_in_its_order(model, data):
    formed = buckets.form_buckets(*model)
    num_leaves = len(model[0])
    regions = data.draw(st.lists(REGION_IDS, min_size=num_leaves, max_size=num_leaves))
    lanes = buckets.cut_lanes(formed, regions)
    assert len({(lane.bucket, lane.region) for lane in lanes}) == len(lanes)
    assert [lane.bucket for lane in lanes] == sorted(lane.bucket for lane in lanes)
    for index, bucket in enumerate(formed):
        cut = [lane for lane in lanes if lane.bucket == index]
        for lane in cut:
            expected = tuple(leaf for leaf in bucket if regions[leaf] == lane.region)
            assert lane.leaf_indices == expected
        assert sorted(leaf for lane in cut for leaf in lane.leaf_indices) == sorted(bucket)
        assert [lane.region for lane in cut] == list(dict.fromkeys(regions[i] for i in bucket))


@given(KEYS, st.integers(1, 20))
def test_a_group_holds_lanes_of_one_key_and_ids_follow_the_lanes(keys, max_groups):
    groups = buckets.merge_groups(keys, max_groups)
    assert [group == -1 for group in groups] == [key is None for key in keys]
    switched = [(group, key) for group, key in zip(groups, keys, strict=True) if group >= 0]
    assert len({group for group, _ in switched}) == len(set(switched))
    assert list(dict.fromkeys(group for group, _ in switched)) == list(
        range(len({group for group, _ in switched}))
    )


@given(KEYS, st.integers(1, 20))
def test_the_number_of_groups_is_bounded_and_the_bound_is_used(keys, max_groups):
    groups = set(buckets.merge_groups(keys, max_groups)) - {-1}
    switched = [key for key in keys if key is not None]
    assert len(groups) == min(len(switched), max(max_groups, len(set(switched))))


@given(KEYS, st.integers(1, 20))
def test_groups_of_a_key_are_contiguous_runs_of_near_equal_count(keys, max_groups):
    groups = buckets.merge_groups(keys, max_groups)
    for key in set(keys) - {None}:
        ids = [group for group, other in zip(groups, keys, strict=True) if other == key]
        assert ids == sorted(ids)
        counts = collections.Counter(ids).values()
        assert max(counts) - min(counts) <= 1


def test_keys_with_more_lanes_get_more_groups():
    groups = buckets.merge_groups(["big"] * 30 + ["small"] * 2, max_groups=4)
    assert groups == (0,) * 10 + (1,) * 10 + (2,) * 10 + (3,) * 2


def test_fewer_than_one_group_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        buckets.merge_groups(["a"], 0)


def test_the_examples_in_the_docstrings_run():
    assert doctest.testmod(buckets).failed == 0
