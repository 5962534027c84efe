"""Laws of reducer capacity."""

from __future__ import annotations

import math

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from nf_jax import capacity
from nf_jax.capacity import CapacityState
from nf_jax.profile import CapacityLimits

LIMITS = CapacityLimits(max_reducer_load=0.9, resume_reducer_load=0.7, hold_steps=3)
NAN, INF = float("nan"), float("inf")
STEP = jax.jit(capacity.step, static_argnums=0)


def run(loads: list[float], limits: CapacityLimits = LIMITS) -> list[CapacityState]:
    states = [capacity.init(limits)]
    for load in loads:
        states.append(STEP(limits, states[-1], np.asarray(load, np.float32)))
    return states[1:]


# law: (loads, saturated after each, flips)
LAWS = {
    "no load is no saturation": ([0, 0, 0], "...", 0),
    "below the maximum is admitted": ([0.89, 0.8, 0.89], "...", 0),
    "the maximum saturates at once": ([0.5, 0.9, 0.5], ".SS", 1),
    "quiet steps in a row resume": ([1, 0.7, 0.7, 0.7, 0], "SSS..", 2),
    "a load in between starts the count anew": ([1, 0, 0, 0.8, 0, 0, 0], "SSSSSS.", 2),
    "NaN and infinity saturate": ([NAN, 0, 0, INF, 0, 0, 0], "SSSSSS.", 2),
    "it saturates again": ([1, 0, 0, 0, 1], "SSS.S", 3),
    "a second time it takes twice as long": ([1, *[0] * 3, 1, *[0] * 6], "SSS.SSSSSS.", 4),
    "and a third time twice that": (
        [1, *[0] * 3, 1, *[0] * 6, 1, *[0] * 12],
        "SSS.SSSSSS." + "S" * 12 + ".",
        6,
    ),
    "a load in between starts the longer count anew": (
        [1, *[0] * 3, 1, 0, 0, 0, 0, 0, 0.8, *[0] * 6],
        "SSS." + "S" * 12 + ".",
        4,
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_hysteresis(law: str):
    loads, expected, flips = LAWS[law]
    states = run(loads)
    assert "".join("S" if state.saturated else "." for state in states) == expected
    assert int(states[-1].flips) == flips


def test_equal_thresholds_and_the_shortest_hold_follow_the_load():
    limits = CapacityLimits(max_reducer_load=0.9, resume_reducer_load=0.9, hold_steps=1)
    states = run([0.9, 0.89, 0.9, 0.0, 0.0], limits)
    assert [bool(state.saturated) for state in states] == [True, False, True, True, False]


@hypothesis.given(loads=st.lists(st.floats(width=32), max_size=30))
def test_any_load_leaves_a_valid_state_and_jit_changes_nothing(loads: list[float]):
    state = capacity.init(LIMITS)
    for load in loads:
        after = STEP(LIMITS, state, np.asarray(load, np.float32))
        chex.assert_trees_all_equal_shapes_and_dtypes(state, after)
        plain = capacity.step(LIMITS, jax.tree.map(np.asarray, state), np.asarray(load, np.float32))
        chex.assert_trees_all_equal(after, jax.tree.map(np.asarray, plain))
        assert 0 <= int(after.wait) <= int(after.hold) and bool(after.saturated) == (int(after.wait) > 0)
        assert int(after.flips) == int(state.flips) + (bool(after.saturated) ^ bool(state.saturated))
        assert not load >= 0.9 or after.saturated
        state = after


@hypothesis.given(loads=st.lists(st.sampled_from([0.0, 0.8, 1.0]), max_size=200))
def test_changes_of_routes_are_bounded(loads: list[float]):
    states = run(loads)
    flips = int(states[-1].flips) if states else 0
    assert flips <= 2 * math.log2(len(loads) / LIMITS.hold_steps + 1) + 1


def test_a_load_that_comes_back_at_once_costs_few_steps():
    state, lossy = capacity.init(LIMITS), 0
    for _ in range(10_000):  # the reducer is full whenever it is used
        state = STEP(LIMITS, state, np.asarray(0.0 if state.saturated else 1.0, np.float32))
        lossy += not state.saturated
    assert lossy <= 12


def test_one_trace_whatever_the_load():
    once = jax.jit(chex.assert_max_traces(n=1)(lambda s, x: capacity.step(LIMITS, s, x)))
    state = capacity.init(LIMITS)
    for load in (0.0, 1.0, NAN):
        state = once(state, np.asarray(load, np.float32))
