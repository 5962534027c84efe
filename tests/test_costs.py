"""Laws of the cost model: predictions, and the lanes that they admit."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from substrates import FREE, MIB, stage, substrate

import nf_jax
from nf_jax import Profile, Route, costs
from nf_jax.profile import Buckets, CapacityLimits, Codec, HealthLimits, Phase, Region
from nf_jax.stages import COLLECTIVES, Substrate, fit
from nf_jax.telemetry import Reason


def guided(*routes: Route, **capacity: Any) -> Profile:
    """One region, a phase for each route, from steps 0, 10, 20 on."""
    return Profile(
        name="guided",
        regions=(Region(name="all", pattern=".*", codec=Codec(scale="leaf", down="majority")),),
        phases=tuple(Phase(start_step=10 * i, routes={"all": route}) for i, route in enumerate(routes)),
        buckets=Buckets(first_bytes=MIB, cap_bytes=MIB),
        health=HealthLimits(warmup_steps=0),
        capacity=CapacityLimits(min_lane_bytes=0, **capacity),
    )


def params(*sides: int) -> Any:
    return {f"kernel_{i}": jax.ShapeDtypeStruct((side, side), "float32") for i, side in enumerate(sides)}


def first_info(profile: Profile, measured: Substrate) -> Any:
    """What the controller says before the first step."""
    tx = nf_jax.aggregate_gradients(profile, axis="batch", num_workers=4, substrate=measured)
    return nf_jax.step_info(tx.init(params(512)))


# ------------------------------------------------------------------------------------------------- fits


@hypothesis.given(
    latency=st.floats(0, 1), slope=st.floats(0, 1e-6), sizes=st.sets(st.integers(1, 2**30), min_size=2)
)
def test_a_line_is_fitted_as_it_is(latency: float, slope: float, sizes: set[int]):
    hypothesis.assume(latency + slope > 1e-12 and max(sizes) > 2 * min(sizes))
    seconds = [latency + slope * size for size in sorted(sizes)]
    found = fit(sorted(sizes), seconds)
    for size, expected in zip(sorted(sizes), seconds, strict=True):
        fitted = found.latency_seconds + found.seconds_per_byte * size
        assert fitted == pytest.approx(expected, rel=1e-3, abs=1e-9)


@hypothesis.given(seconds=st.lists(st.floats(-1, 10), min_size=2, max_size=8))
def test_a_fit_is_never_negative_and_never_nan(seconds: list[float]):
    found = fit([4**i for i in range(len(seconds))], seconds)
    errors = found.latency_error_seconds, found.seconds_per_byte_error
    for value in (found.latency_seconds, found.seconds_per_byte, *errors):
        assert value >= 0 and math.isfinite(value)


def test_errors_grow_with_the_scatter():
    sizes, rng = [4**i for i in range(4, 14)], np.random.default_rng(0)
    errors = []
    for scatter in (0.01, 0.1, 0.3):
        noise = 1 + scatter * rng.standard_normal(len(sizes))
        seconds = (1e-4 + 1e-9 * np.asarray(sizes)) * noise
        found = fit(sizes, seconds.tolist())
        errors.append((found.latency_error_seconds, found.seconds_per_byte_error))
    for smaller, larger in itertools.pairwise(errors):
        assert smaller[0] < larger[0] and smaller[1] < larger[1]


def test_a_stage_goes_through_its_points_and_on_as_fitted():
    found = stage(1e-4, 1e-9).model_copy(update={"measured_seconds": (1e-4, 5e-4, 1e-3)})
    assert [found.seconds(size) for size in found.sizes_bytes] == pytest.approx([1e-4, 5e-4, 1e-3])
    assert found.seconds(2 * MIB) == pytest.approx(1e-3 + MIB * 1e-9)
    assert found.seconds(0) == pytest.approx(1e-4)


# ---------------------------------------------------------------------------------------- closed forms


def test_one_worker_sends_nothing():
    for route in Route:
        stages = costs.stages_of(route, Codec(), MIB, 0, num_workers=1)
        assert not {name for name, _ in stages} & COLLECTIVES


# route, workers -> bytes that a worker sends in each collective, of a matrix of 512 x 512 with leaf scales.
WORDS = 512 * 512 // 8
SENT = {
    (Route.FP32, 2): {"all_reduce": 4 * 512 * 512},
    (Route.FP32, 4): {"all_reduce": 6 * 512 * 512},
    (Route.BF16, 4): {"all_to_all": 1.5 * 512 * 512, "all_gather": 1.5 * 512 * 512},
    (Route.SIGN, 2): {"all_gather": WORDS},
    (Route.SIGN, 4): {"all_to_all": 0.75 * WORDS, "all_gather": 0.75 * WORDS},
    (Route.TERNARY, 4): {"all_to_all": 1.5 * WORDS, "all_gather": 0.75 * WORDS},
}


@pytest.mark.parametrize(("route", "num_workers"), SENT)
def test_collectives_carry_the_bytes_of_the_scheme(route: Route, num_workers: int):
    profile = guided(route)
    lanes = nf_jax.plan(profile, params(512), num_workers).lanes
    stages = costs.stages_of(
        route, profile.regions[0].codec, 512 * 512, lanes.wire_bytes[0][route], num_workers
    )
    carried: dict[str, float] = {}
    for name, num_bytes in stages:
        if name in COLLECTIVES:
            carried[name] = carried.get(name, 0) + num_bytes
    assert carried == pytest.approx(SENT[route, num_workers], abs=400)  # scales, sketches, levels
    assert sum(carried.values()) == pytest.approx(lanes.wire_bytes[0][route], abs=200)


def test_infinite_links_leave_the_workers_own_part():
    local: dict[str, Any] = {name: stage(0.0, 1e-9) for name in ("pack", "decode", "sign")}
    free: dict[str, Any] = dict.fromkeys(COLLECTIVES, FREE)
    fast = substrate(**local, **free)
    profile = guided(Route.SIGN)
    lanes = nf_jax.plan(profile, params(512), 4).lanes
    seconds = costs.lane_seconds(profile, lanes, fast)[0]
    assert seconds[Route.FP32] == 0
    assert seconds[Route.SIGN] == pytest.approx(3 * MIB * 1e-9)
    np.testing.assert_allclose(costs.local_seconds(profile, lanes, substrate(**local))[0], seconds)


def test_lanes_of_a_group_share_a_latency_and_exact_ones_an_all_reduce():
    profile = guided(Route.SIGN)
    many = nf_jax.plan(profile, params(*[512] * 40), 4).lanes  # more lanes than groups
    seconds = costs.lane_seconds(profile, many, substrate())
    groups = np.asarray(many.groups)
    assert len(set(groups)) < len(groups)
    for group in set(groups.tolist()):
        members = groups == group
        total = sum(np.asarray(many.num_elements)[members]) * 4 * 1.5 * 1e-9 + 1e-4
        assert seconds[members, Route.FP32].sum() == pytest.approx(total, rel=1e-6)


# --------------------------------------------------------------------------------------------- what if


@hypothesis.given(
    rates=st.lists(st.floats(1e5, 1e11), min_size=2, max_size=2, unique=True).map(sorted),
    size=st.integers(6, 11),
    num_workers=st.integers(2, 16),
)
def test_a_faster_link_never_makes_a_route_slower_nor_low_bit_more_attractive(
    rates: list[float], size: int, num_workers: int
):
    profile = guided(Route.SIGN)
    lanes = nf_jax.plan(profile, params(2**size), num_workers).lanes
    slow, fast = (
        costs.lane_seconds(profile, lanes, substrate(num_workers).rescaled(link_bytes_per_second=rate))[0]
        for rate in rates
    )
    assert (fast <= slow * (1 + 1e-9)).all()
    gains = [seconds[Route.FP32] / seconds[Route.SIGN] for seconds in (slow, fast)]
    assert gains[1] <= gains[0] * (1 + 1e-9)


def test_more_workers_wait_longer():
    one = substrate(2)
    more = one.rescaled(num_workers=5)
    assert more.num_workers == 5
    assert more.stages["all_reduce"].latency_seconds == pytest.approx(4e-4)
    assert more.stages["all_reduce"].seconds(0) == pytest.approx(4e-4, rel=0.05)
    assert more.stages["pack"] == one.stages["pack"]


def test_a_link_is_never_faster_than_measured():
    same = substrate().rescaled(link_bytes_per_second=1e12)
    assert same.stages["all_gather"] == substrate().stages["all_gather"]


# ------------------------------------------------------------------------------------------- admission

SLOW_SIGNS: dict[str, Any] = {"sign": stage(1.0, 0.0)}


def test_without_a_substrate_all_routes_pay():
    lanes = nf_jax.plan(guided(Route.SIGN), params(512), 4).lanes
    assert lanes.fixed == (None,) and lanes.pays == ()


def test_a_lane_that_gains_is_admitted_and_one_that_does_not_is_exact():
    profile = guided(Route.SIGN)
    fast = nf_jax.plan(profile, params(512), 4, substrate=substrate())
    slow = nf_jax.plan(profile, params(512), 4, substrate=substrate(**SLOW_SIGNS))
    assert fast.lanes.fixed == (None,) and fast.lanes.pays[0][Route.SIGN]
    assert slow.lanes.fixed == (Reason.SLOWER,) and not slow.lanes.pays[0][Route.SIGN]
    assert slow.groups == () and slow.exact == (0,) and slow.protected_share == 1.0
    info = first_info(profile, substrate(**SLOW_SIGNS))
    assert info.next_routes.tolist() == [Route.FP32] and info.next_reasons.tolist() == [Reason.SLOWER]


@pytest.mark.parametrize(("min_speedup", "is_admitted"), [(1.0, True), (3.9, True), (4.1, False)])
def test_the_margin_is_the_profiles(min_speedup: float, is_admitted: bool):
    profile = guided(Route.SIGN, min_speedup=min_speedup)
    lanes = nf_jax.plan(profile, params(512), 4).lanes
    seconds = np.asarray([[4.0, 9.0, 1.0, 9.0]])
    assert (costs.admit(profile, lanes, seconds).fixed[0] is None) == is_admitted


def test_a_route_that_does_not_pay_is_refused_in_its_phase_alone():
    profile = guided(Route.BF16, Route.SIGN)
    slow_bf16 = substrate(bf16=stage(1.0, 0.0))
    plan = nf_jax.plan(profile, params(512), 4, substrate=slow_bf16)
    assert plan.lanes.fixed == (None,)
    assert plan.lanes.pays == ((True, False, True, plan.lanes.pays[0][Route.TERNARY]),)
    info = first_info(profile, slow_bf16)
    assert info.next_routes.tolist() == [Route.FP32] and info.next_reasons.tolist() == [Reason.SLOWER]


def test_what_was_refused_can_be_asked_again():
    profile = guided(Route.SIGN)
    plain = nf_jax.plan(profile, params(512), 4).lanes
    refused = nf_jax.plan(profile, params(512), 4, substrate=substrate(**SLOW_SIGNS)).lanes
    assert refused.wire_bytes == plain.wire_bytes
    again = costs.admit(profile, refused, costs.lane_seconds(profile, refused, substrate()))
    assert again.fixed == (None,)


def test_a_profile_without_fallback_has_nowhere_to_go():
    profile = Profile.static(Route.SIGN)
    plan = nf_jax.plan(profile, params(512), 4, substrate=substrate(**SLOW_SIGNS))
    assert plan.lanes.fixed == (None,) and plan.lanes.pays == ()


# ------------------------------------------------------------------------------------------- bad input


def test_a_substrate_of_other_workers_or_another_backend_is_refused():
    with pytest.raises(ValueError, match="num_workers=2, as this run has it, got 4"):
        nf_jax.plan(guided(Route.SIGN), params(512), 2, substrate=substrate(4))
    other = substrate().model_copy(update={"backend": "tpu"})
    with pytest.raises(ValueError, match="backend=cpu, as this run has it, got tpu"):
        nf_jax.aggregate_gradients(guided(Route.SIGN), axis="batch", num_workers=4, substrate=other)


def test_a_substrate_is_what_was_saved(tmp_path):
    substrate().save(tmp_path / "substrate.toml")
    assert Substrate.load(tmp_path / "substrate.toml") == substrate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('backend = "cpu"', "backend: expected a value, got nothing"),
        ("latency_seconds = 0.0001", "latency_seconds: expected a value"),
        ("num_workers = 4", "num_workers: expected a value"),
    ],
)
def test_a_file_with_a_key_missing_says_which(change: str, message: str):
    with pytest.raises(ValueError, match=message):
        Substrate.loads(substrate().dumps().replace(change, "", 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("latency_seconds = 0.0001", "latency_seconds = -1.0", "greater than or equal to 0"),
        ("latency_seconds = 0.0001", "latency_seconds = nan", "finite"),
        ("seconds_per_byte = 1e-09", "seconds_per_byte = inf", "finite"),
        ("4096,", "99999999,", "ascending sizes"),
        ("[stages.pack]", "[stages.park]", "park"),
    ],
)
def test_a_number_that_is_none_is_refused(old: str, new: str, message: str):
    text = substrate().dumps()
    assert old in text
    with pytest.raises(ValueError, match=message):
        Substrate.loads(text.replace(old, new, 1))
