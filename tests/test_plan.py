"""Laws of the plan: what each kind of leaf may do, why, and what it costs."""

from __future__ import annotations

import doctest
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_runs import Run
from workers import AXIS

import nf_jax
from nf_jax import Profile, Route, capacity
from nf_jax import plan as make_plan
from nf_jax.profile import Buckets, CapacityLimits, Codec, Leaf, Model, Phase, Region
from nf_jax.telemetry import Reason

plan_module = __import__("nf_jax.plan", fromlist=["plan"])
FP32, BF16, SIGN, TERNARY = Route


def array(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def by_path(plan: nf_jax.Plan, indices: Any) -> set[str]:
    return {plan.paths[i] for i in indices}


def packed(plan: nf_jax.Plan) -> set[str]:
    return by_path(plan, (i for group in plan.groups for i in group.leaves))


KINDS = {
    "bf16": array(64, 64, dtype=jnp.bfloat16),
    "complex": array(64, 64, dtype="complex64"),
    "empty": array(0, 64),
    "f16": array(64, 64, dtype="float16"),
    "float0": np.zeros((64, 64), jax.dtypes.float0),
    "integer": array(64, 64, dtype="int32"),
    "masked": optax.MaskedNode(),
    "matrix": array(64, 64),
    "none": None,
    "scalar": array(),
    "tiny": array(10),
    "vector": array(4096),
}


def test_every_kind_of_leaf_has_its_treatment():
    plan = make_plan(Profile.static(SIGN), KINDS, 8)
    assert set(plan.paths) == set(KINDS) - {"masked", "none"}
    assert packed(plan) == {"bf16", "f16", "matrix", "vector"}
    assert by_path(plan, plan.exact) == {"complex", "integer", "scalar", "tiny"}
    assert by_path(plan, plan.idle) == {"empty", "float0"}
    lanes = [leaf for lane in plan.lane_leaves for leaf in lane]
    assert sorted(lanes) == sorted(set(lanes)) and not set(lanes) & set(plan.idle)
    for lane in plan.lane_leaves:  # one dtype each
        assert len({plan.dtypes[i] for i in lane}) == 1


def test_a_dtype_without_a_mean_is_an_error_that_names_the_leaf():
    with pytest.raises(ValueError, match=r"leaf 'a/mask'.*got bool.*has no mean"):
        make_plan(Profile.static(SIGN), {"a": {"mask": array(3, dtype=bool)}}, 2)


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, None])
def test_the_number_of_workers_is_a_positive_int(bad: Any):
    with pytest.raises(ValueError, match="num_workers: expected a positive int"):
        make_plan(Profile.static(SIGN), {"w": array(4)}, bad)


def test_an_empty_tree_has_an_empty_plan():
    plan = make_plan(Profile.static(SIGN), {"none": None}, 8)
    assert plan.num_lanes == 0 and plan.groups == () and plan.protected_share == 0
    assert plan.wire_bytes([]) == plan.overhead_bytes


def test_a_leaf_that_is_mostly_pads_stays_exact():
    # 8 shards of 512 elements hold 4096: with 2048 elements as many are pads, with fewer more.
    tree = {"good": array(4095), "last": array(2048), "bad": array(2047)}
    assert packed(make_plan(Profile.static(SIGN), tree, 8)) == {"good", "last"}


def mixed(**changes: Any) -> Profile:
    """Three regions: protected, low-bit, and low-bit by another codec."""
    fields: dict[str, Any] = dict(
        name="mixed",
        regions=(
            Region(name="head", pattern="head.*"),
            Region(name="body", pattern="body.*", codec=Codec(scale="leaf")),
            Region(name="rest", pattern=".*", codec=Codec(down="count")),
        ),
        phases=(
            Phase(start_step=0, routes={"head": FP32, "body": FP32, "rest": TERNARY}),
            Phase(start_step=5, routes={"body": SIGN}),
        ),
    )
    return Profile(**fields | changes)


TREE = {
    "body_1": array(256, 128),
    "body_2": array(256, 128),
    "body_norm": array(),
    "head": array(128, 10),
    "other": array(8, dtype="int32"),
    "rest": array(512, 64),
}


def reasons_of(plan: nf_jax.Plan) -> dict[str, Reason | None]:
    return {
        plan.paths[leaf]: reason
        for lane, reason in zip(plan.lane_leaves, plan.lanes.fixed, strict=True)
        for leaf in lane
    }


def test_why_a_lane_is_always_exact():
    reasons = reasons_of(make_plan(mixed(), TREE, 4))
    assert reasons["head"] == Reason.PROTECTED
    assert reasons["other"] == Reason.UNSUITABLE
    assert reasons["body_1"] is reasons["rest"] is None
    alone = reasons_of(make_plan(mixed(), TREE, 1))
    assert set(alone.values()) == {Reason.SINGLE_WORKER}
    limits = CapacityLimits(min_lane_bytes=256 * 1024 + 1)
    small = reasons_of(make_plan(mixed(capacity=limits), TREE, 4))
    assert small["rest"] == small["body_1"] == Reason.SMALL
    assert make_plan(mixed(capacity=limits), TREE, 4).groups == ()


def test_a_mixed_bucket_is_cut_into_lanes():
    plan = make_plan(mixed(), TREE, 4)
    assert plan.lanes.names == ("0/rest", "1/rest", "0/head", "0/body") or sorted(plan.lanes.names) == [
        "0/body",
        "0/head",
        "0/rest",
        "1/rest",
    ]
    for lane, region in zip(plan.lane_leaves, plan.lanes.regions, strict=True):
        assert {plan.leaf_regions[i] for i in lane} == {region}


def test_the_protected_share_is_what_may_not_go_low_bit():
    plan = make_plan(mixed(), TREE, 4)
    protected = 1 + 1280 + 8
    total = protected + 2 * 256 * 128 + 512 * 64
    assert plan.protected_share == pytest.approx(protected / total)
    assert make_plan(Profile.static(FP32), TREE, 4).protected_share == 1
    assert make_plan(mixed(), TREE, 1).protected_share == 1


def test_groups_know_the_routes_of_their_region():
    plan = make_plan(mixed(), TREE, 4)
    names = ["head", "body", "rest"]
    for group in plan.groups:
        region = names[plan.leaf_regions[group.leaves[0]]]
        assert group.routes == {"body": (FP32, SIGN), "rest": (FP32, TERNARY)}[region]


@pytest.mark.parametrize("num_workers", (2, 3, 8))
def test_wire_bytes_add_up_over_lanes_and_groups(num_workers: int):
    buckets = Buckets(first_bytes=1, cap_bytes=1)  # a lane for each leaf
    tree = {f"body_{i}": array(96, 128) for i in range(40)} | {"head": array(128, 10)}
    limits = CapacityLimits(min_lane_bytes=0)
    plan = make_plan(mixed(buckets=buckets, capacity=limits), tree, num_workers)
    assert plan.num_lanes == 41 and max(len(group.lanes) for group in plan.groups) > 1
    share = 2 * (num_workers - 1) / num_workers
    elements = sum(plan.lanes.num_elements)
    for route in (FP32, SIGN):
        claimed = plan.wire_bytes([int(route)] * 41)
        by_group = sum(
            capacity.group_bytes(route, g.segments, len(g.lanes), g.codec, num_workers) for g in plan.groups
        )
        rest = claimed - plan.overhead_bytes - by_group
        assert rest == -(-4 * 1280 * 2 * (num_workers - 1) // num_workers)  # the head, in FP32
    assert 0 <= plan.fp32_bytes - 4 * elements * share < 42
    assert plan.fp32_bytes == plan.wire_bytes([0] * 41) - plan.overhead_bytes
    with pytest.raises(ValueError, match=r"one route per lane \(41\), got 2"):
        plan.wire_bytes([0, 0])


def test_small_dtypes_cost_what_they_travel_as():
    for dtype in ("float32", "bfloat16", "float16", "int8", "uint16", "int32"):
        plan = make_plan(Profile.static(FP32), {"w": array(100, dtype=dtype)}, 4)
        assert plan.fp32_bytes == 600
    assert make_plan(Profile.static(FP32), {"w": array(10, dtype="complex64")}, 4).fp32_bytes == 120


def test_a_profile_of_another_model_is_an_error():
    leaves = (Leaf(path="w", shape=(64, 64), dtype="float32"),)
    profile = mixed(model=Model(name="mlp", leaves=leaves))
    make_plan(profile, {"w": array(64, 64)}, 4)
    with pytest.raises(ValueError, match=r"'mlp'.*\n?.*shape of w"):
        make_plan(profile, {"w": array(64, 65)}, 4)


def test_a_leaf_that_no_region_matches_is_an_error_that_names_it():
    profile = mixed().model_copy(update={"regions": mixed().regions[:2]})
    with pytest.raises(ValueError, match="'rest'"):
        make_plan(profile, TREE, 4)


def test_which_scale_auto_means():
    tree = {"large": array(512, 512), "small": array(96, 128), "vector": array(8192)}
    plan = make_plan(Profile.static(SIGN), tree, 8)
    (group,) = plan.groups
    scales = {plan.paths[i]: s.scale for i, s in zip(group.leaves, group.segments, strict=True)}
    assert scales == {"large": "rank1", "small": "leaf", "vector": "leaf"}


# --------------------------------------------------------------- independent of how it is bucketed

CODECS = {"rank1": Codec(scale="rank1"), "2bit": Codec(scale="leaf", down="2bit")}


@functools.cache
def two_steps(caps: tuple[int, int], codec: str) -> tuple[Any, Any, int]:
    base = Profile.static(SIGN)
    profile = base.model_copy(
        update=dict(
            regions=(Region(name="all", pattern=".*", codec=CODECS[codec]),),
            buckets=Buckets(first_bytes=caps[0], cap_bytes=caps[1]),
        )
    )
    shapes = {"a": (96, 64), "b": (64, 96), "c": (96, 64), "d": (5,)}
    rng = np.random.default_rng(0)
    tx = nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=4)
    run = Run(tx, {k: np.zeros(s, np.float32) for k, s in shapes.items()}, 4, "unchecked")
    means = [
        run.step({k: rng.normal(size=(4, *s)).astype(np.float32) for k, s in shapes.items()})
        for _ in range(2)
    ]
    return means, run.memory, len(run.info.routes)


@pytest.mark.parametrize("codec", CODECS)
def test_means_and_residuals_do_not_depend_on_the_buckets(codec: str):
    one, several = two_steps((2**20, 2**20), codec), two_steps((1, 40_000), codec)
    assert one[2] == 1 and several[2] == 3
    # The same signs and levels; sums of 1536 f32 in another order.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6), one[:2], several[:2])


def test_the_example_runs():
    assert doctest.testmod(plan_module, raise_on_error=True).attempted > 0
