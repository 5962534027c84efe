"""Laws of the public `pmean`: like `jax.lax.pmean`, by routes that are pinned or data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import AXIS, MODES, mapped, rows_are_equal

import nf_jax
from nf_jax import Plan, Profile, Route
from nf_jax.profile import Codec, Phase, Region

FP32, BF16, SIGN, TERNARY = Route
W = 4
REGIONS = (
    Region(name="head", pattern="head/.*"),
    Region(name="body", pattern=".*", codec=Codec(down="count", scale="leaf")),
)
PROFILE = Profile.static(SIGN).model_copy(
    update=dict(
        fallback=True,
        regions=REGIONS,
        phases=(
            Phase(start_step=0, routes={"head": FP32, "body": SIGN}),
            Phase(start_step=9, routes={"body": BF16}),
        ),
    )
)


def tree(num_workers: int = W) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return (rng.normal(size=(num_workers, *shape)) * 8).astype(dtype)

    return {
        "body": {
            "kernel": values(96, 64),
            "half": values(64, 32, dtype=jnp.bfloat16),
            "f16": values(2048, dtype=np.float16),
        },
        "head": {"kernel": values(64, 10), "bias": values(), "half": values(7, dtype=np.float16)},
        "odd": {
            "complex": values(5).astype(np.complex64) * np.complex64(1 + 2j),
            "count": values(3, 2).astype(np.int32),
            "empty": values(0, 4),
            "none": None,
        },
    }


def planned(profile: Profile = PROFILE, num_workers: int = W) -> Plan:
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree())
    return nf_jax.plan(profile, one, num_workers)


def routes_of(plan: Plan, route: Route) -> np.ndarray:
    return np.where([fixed is None for fixed in plan.lanes.fixed], route, FP32).astype(np.int32)


def run(plan: Plan, mode: str, routes: Any, values: Any, pinned: bool = True) -> Any:
    def average(local: Any, shared: Any) -> Any:
        chosen = routes.tolist() if pinned else shared
        mean, sent = nf_jax.pmean(local, plan, chosen, axis=AXIS, seed=7)
        return {"mean": mean, "sent": sent}

    return jax.tree.map(np.asarray, mapped(average, plan.num_workers, mode)(values, routes))


@pytest.mark.parametrize("route", [FP32, BF16, SIGN], ids=lambda r: r.name)
def test_pinned_and_dynamic_routes_give_the_same_bits(route: Route):
    plan, values = planned(), tree()
    routes = routes_of(plan, route)
    assert set(routes.tolist()) == {FP32, route}
    found = [
        run(plan, "checked", routes, values),
        run(plan, "unchecked", routes, values),
        run(plan, "pmap", routes, values, pinned=False),
    ]
    assert rows_are_equal([result["mean"] for result in found])
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)
    assert all("none" in result["mean"]["odd"] for result in found)

    mean = found[0]["mean"]
    assert jax.tree.map(lambda x: x.dtype, mean) == jax.tree.map(lambda x: x.dtype, values)
    for name in ("kernel", "bias", "half"):  # protected: the mean in f32, then the leaf's dtype
        leaf = values["head"][name].astype(np.float64)
        eps = max(float(jnp.finfo(values["head"][name].dtype).eps), 2.0**-22)
        np.testing.assert_allclose(mean["head"][name][0], leaf.mean(0), atol=eps * 40)
    np.testing.assert_allclose(
        mean["odd"]["complex"][0], values["odd"]["complex"].mean(0), rtol=1e-5, atol=1e-4
    )
    np.testing.assert_array_equal(
        mean["odd"]["count"][0], np.round(values["odd"]["count"].mean(0)).astype(np.int32)
    )
    assert mean["odd"]["empty"].shape == (W, 0, 4)


@pytest.mark.parametrize("route", [FP32, BF16, SIGN], ids=lambda r: r.name)
def test_the_mean_of_what_was_sent_is_the_mean(route: Route):
    plan, values = planned(), tree()
    found = run(plan, "unchecked", routes_of(plan, route), values)
    for name, leaf in values["body"].items():
        sent, mean = found["sent"]["body"][name], found["mean"]["body"][name][0]
        expected = sent.astype(np.float64).mean(0)
        # BF16 is rounded on the way down too; then the leaf's own dtype rounds.
        eps = max(float(jnp.finfo(leaf.dtype).eps), 2.0**-8 if route == BF16 else 2.0**-20)
        size = np.abs(sent.astype(np.float64)).max(0)
        assert (np.abs(mean.astype(np.float64) - expected) <= eps * size).all()
        if route == SIGN:
            np.testing.assert_array_equal(np.sign(sent), np.sign(leaf.astype(np.float32)))
    for name, leaf in values["head"].items():
        np.testing.assert_array_equal(found["sent"]["head"][name], leaf)


@pytest.mark.parametrize("mode", MODES)
def test_one_worker_is_the_identity(mode: str):
    values = tree(1)
    plan = planned(num_workers=1)
    found = run(plan, mode, np.zeros(plan.num_lanes, np.int32), values)
    jax.tree.map(np.testing.assert_array_equal, found["mean"], values)
    jax.tree.map(np.testing.assert_array_equal, found["sent"], values)


def test_half_precision_does_not_overflow_in_the_sum():
    values = tree()
    values["head"]["half"][:] = 60000
    plan = planned()
    found = run(plan, "unchecked", routes_of(plan, FP32), values)
    np.testing.assert_array_equal(found["mean"]["head"]["half"], values["head"]["half"])


# ---------------------------------------------------------------------------------------- misuse


def test_routes_of_another_length_are_an_error():
    plan = planned()
    for routes in (np.zeros(plan.num_lanes + 1, np.int32), np.zeros(0, np.int32)):
        with pytest.raises(ValueError, match=rf"one route for each of the {plan.num_lanes} lanes"):
            run(plan, "unchecked", routes, tree())


@pytest.mark.parametrize("pinned", [True, False])
def test_dynamic_routes_of_another_length_are_an_error_too(pinned: bool):
    plan = planned()
    with pytest.raises(ValueError, match=f"{plan.num_lanes} lanes"):
        run(plan, "unchecked", np.zeros(plan.num_lanes + 1, np.int32), tree(), pinned=pinned)


@pytest.mark.parametrize("bad", [TERNARY, 4, -1])
def test_a_route_that_the_profile_never_takes_is_an_error_that_lists_them(bad: int):
    plan = planned()
    routes = np.where([fixed is None for fixed in plan.lanes.fixed], bad, FP32)
    with pytest.raises(ValueError, match=r"one of (\['FP32', 'BF16', 'SIGN'\]|FP32, BF16, SIGN, TERNARY)"):
        run(plan, "unchecked", routes, tree())


def test_a_protected_lane_cannot_be_pinned_to_a_lossy_route():
    plan = planned()
    fixed = [reason is not None for reason in plan.lanes.fixed]
    assert any(fixed)
    with pytest.raises(ValueError, match="routes: expected FP32 for the lanes that can only be exact"):
        run(plan, "unchecked", np.where(fixed, SIGN, FP32), tree())


def test_another_tree_than_the_planned_one_is_an_error_that_names_the_leaf():
    plan, values = planned(), tree()
    values["head"]["kernel"] = values["head"]["kernel"][:, :-1]
    with pytest.raises(ValueError, match=r"1 leaves differ.*'head/kernel'.*\(64, 10\)"):
        run(plan, "unchecked", routes_of(plan, FP32), values)
    values = tree()
    del values["body"]["half"]
    with pytest.raises(ValueError, match="'body/half'"):
        run(plan, "unchecked", routes_of(plan, FP32), values)


def test_an_axis_of_another_size_is_an_error():
    plan = planned(num_workers=8)
    with pytest.raises(ValueError, match=r"num_workers=8.*4 members"):

        def average(local: Any, _: Any) -> Any:
            return nf_jax.pmean(local, plan, [0] * plan.num_lanes, axis=AXIS)[0]

        mapped(average, W, "pmap")(tree(), None)


def test_values_that_are_already_summed_are_an_error():
    plan, values = planned(), tree()

    def average(local: Any, _: Any) -> Any:
        summed = jax.tree.map(lambda x: jax.lax.psum(x, AXIS), local)
        return nf_jax.pmean(summed, plan, [0] * plan.num_lanes, axis=AXIS)[0]

    with pytest.raises(ValueError, match="already summed"):
        mapped(average, W, "checked")(values, None)


def test_routes_that_differ_between_workers_are_an_error():
    plan = planned()

    def average(local: Any, _: Any) -> Any:
        routes = jnp.full((plan.num_lanes,), jax.lax.axis_index(AXIS))
        return nf_jax.pmean(local, plan, routes, axis=AXIS)[0]

    with pytest.raises(ValueError, match="route differs between the workers"):
        mapped(average, W, "checked")(tree(), None)
