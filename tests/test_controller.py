"""Laws of the decision: profile x health x capacity -> a route and a reason for every lane."""

from __future__ import annotations

from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from nf_jax import capacity, health
from nf_jax.controller import choose_routes
from nf_jax.health import Health
from nf_jax.profile import CapacityLimits, Phase, Profile, Region, Route
from nf_jax.telemetry import REASONS, Lanes, Reason

FP32, BF16, SIGN, TERNARY = Route

PROFILE = Profile(
    name="test",
    regions=(
        Region(name="backbone", pattern="block.*"),
        Region(name="embedding", pattern="embed.*"),
        Region(name="head", pattern="head.*"),
    ),
    phases=(
        Phase(start_step=0, routes={"backbone": SIGN, "embedding": FP32, "head": FP32}),
        Phase(start_step=10, routes={"embedding": BF16}),
        Phase(start_step=20, routes={"backbone": TERNARY}),
    ),
)
# Lanes 0 to 2 are backbone, 0 and 1 in one group; 3 is embedding; 4 head; 5 a small backbone lane.
LANES = Lanes(
    names=("b0", "b1", "b2", "e", "h", "small"),
    regions=(0, 0, 0, 1, 2, 0),
    groups=(0, 0, 1, 2, -1, -1),
    fixed=(None, None, None, None, None, Reason.SMALL),
    num_elements=(8,) * 6,
    wire_bytes=((32, 16, 1, 2),) * 6,
)
R = Reason
ADMITTED, FALLBACK, PROBATION = Health.ADMITTED, Health.FALLBACK, Health.PROBATION
WARMUP, LOCKED = Health.WARMUP, Health.LOCKED


def inputs(
    states: Any = (ADMITTED,) * 3, lane_wait: Any = (0,) * 6, saturated: bool = False
) -> tuple[health.HealthState, capacity.CapacityState]:
    state = health.init(PROFILE.health, 3, 6)._replace(
        state=np.asarray(states, np.int32), lane_wait=np.asarray(lane_wait, np.int32)
    )
    return state, capacity.init(CapacityLimits())._replace(saturated=np.asarray(saturated, np.bool_))


def choose(step: int, *state: Any, profile: Profile = PROFILE, lanes: Lanes = LANES):
    routes, reasons = choose_routes(profile, lanes, np.asarray(step, np.int32), *state)
    assert routes.dtype == reasons.dtype == np.int32
    return routes.tolist(), reasons.tolist()


ROUTE = {"-": FP32, "B": BF16, "S": SIGN, "T": TERNARY}
REASON = {".": R.PROFILE, "p": R.PROTECTED, "s": R.SMALL, "w": R.WARMUP, "f": R.FALLBACK}
REASON |= {"l": R.LOCKED, "r": R.RESIDUAL, "c": R.LOAD, "g": R.GROUP}
EVERYTHING = dict(states=(ADMITTED, LOCKED, LOCKED), lane_wait=(0, 1, 0, 1, 1, 1), saturated=True)

# law: (step, what is not healthy, routes, reasons), one letter a lane
LAWS = {
    "the first phase": (0, {}, "SSS---", "....ps"),
    "just before a phase": (9, {}, "SSS---", "....ps"),
    "a phase starts at its step": (10, {}, "SSSB--", "....ps"),
    "a later phase changes only what it names": (2**31 - 1, {}, "TTTB--", "....ps"),
    "warm-up": (10, dict(states=(WARMUP,) * 3), "------", "wwwwps"),
    "fallback is per region": (10, dict(states=(ADMITTED, FALLBACK, FALLBACK)), "SSS---", "...fps"),
    "probation is low-bit": (10, dict(states=(PROBATION,) * 3), "SSSB--", "....ps"),
    "locked": (10, dict(states=(LOCKED, ADMITTED, LOCKED)), "---B--", "lll.ps"),
    "a refused lane takes its group": (10, dict(lane_wait=(0, 7, 0, 0, 0, 0)), "--SB--", "gr..ps"),
    "a lane alone goes alone": (10, dict(lane_wait=(0, 0, 1, 0, 0, 9)), "SS-B--", "..r.ps"),
    "a saturated reducer refuses all": (10, dict(saturated=True), "------", "ccccps"),
    "the first reason counts": (10, EVERYTHING, "------", "crclps"),
}


@pytest.mark.parametrize("law", LAWS)
def test_decision(law: str):
    step, state, routes, reasons = LAWS[law]
    expected = [ROUTE[letter] for letter in routes], [REASON[letter] for letter in reasons]
    assert choose(step, *inputs(**state)) == expected


def test_a_static_profile_is_refused_by_fixed_lanes_only():
    profile, lanes = Profile.static(SIGN), LANES._replace(regions=(0,) * 6)
    worst = inputs(states=(LOCKED,) * 3, lane_wait=(9,) * 6, saturated=True)
    routes, reasons = choose(0, *worst, profile=profile, lanes=lanes)
    assert routes == [SIGN] * 5 + [FP32] and reasons == [R.PROFILE] * 5 + [R.SMALL]


def test_a_static_fp32_profile_protects_everything():
    lanes = LANES._replace(regions=(0,) * 6, fixed=(None,) * 6)
    routes, reasons = choose(0, *inputs(), profile=Profile.static(FP32), lanes=lanes)
    assert routes == [FP32] * 6 and reasons == [R.PROTECTED] * 6


def test_a_group_of_lanes_that_are_routed_apart_is_an_error():
    with pytest.raises(ValueError, match=r"group 0: .* 'b0' and 'e'"):
        choose(0, *inputs(), lanes=LANES._replace(groups=(0, 0, 1, 0, -1, -1)))


any_inputs = st.builds(
    inputs,
    states=st.lists(st.sampled_from(list(Health)), min_size=3, max_size=3),
    lane_wait=st.lists(st.sampled_from([0, 0, 0, 1, 2**30]), min_size=6, max_size=6),
    saturated=st.booleans(),
)
any_groups = st.lists(st.integers(-1, 2), min_size=3, max_size=3)
JITTED = jax.jit(choose_routes, static_argnums=(0, 1))


@hypothesis.given(step=st.integers(0, 2**31 - 1), state=any_inputs, groups=any_groups)
def test_laws_of_every_decision(step: int, state: Any, groups: list[int]):
    lanes = LANES._replace(groups=(*groups, 3, -1, -1))
    routes, reasons = choose(step, *state, lanes=lanes)
    starts, table = zip(*PROFILE.route_table, strict=True)
    planned = table[sum(step >= start for start in starts) - 1]
    for lane, (route, reason) in enumerate(zip(routes, reasons, strict=True)):
        assert route in (planned[lanes.regions[lane]], FP32)
        assert reason in REASONS
        assert (reason == R.PROFILE) == (route == planned[lanes.regions[lane]] and reason == 0)
        mates = [i for i, g in enumerate(lanes.groups) if g == lanes.groups[lane] >= 0]
        assert {routes[mate] for mate in mates} <= {route}
        if reason == R.GROUP:
            assert any(reasons[mate] not in (R.GROUP, R.PROFILE) for mate in mates)


@hypothesis.given(step=st.integers(0, 40), state=any_inputs)
def test_numpy_and_jit_decide_the_same(step: int, state: Any):
    state = jax.tree.map(np.asarray, state)
    plain = choose_routes(PROFILE, LANES, np.asarray(step, np.int32), *state)
    chex.assert_trees_all_equal(JITTED(PROFILE, LANES, np.int32(step), *state), plain)


def test_one_trace_whatever_the_decision():
    once = jax.jit(chex.assert_max_traces(n=1)(lambda *args: choose_routes(PROFILE, LANES, *args)))
    for step, state, *_ in LAWS.values():
        once(np.int32(step), *jax.tree.map(jax.numpy.asarray, inputs(**state)))


def test_few_operations_are_traced_into_a_step():
    columns: Any = (column * 100 for column in LANES)
    lanes = Lanes(*columns)
    lanes = lanes._replace(groups=tuple(region % 3 for region in lanes.regions))
    state = inputs(lane_wait=[0] * 600)
    jaxpr = jax.make_jaxpr(lambda *args: choose_routes(PROFILE, lanes, *args))(np.int32(0), *state)
    assert str(jaxpr).count(" = ") < 80
