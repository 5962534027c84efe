"""Laws of the load meter: low-bit steps against FP32 steps, by the clock."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

import nf_jax
from nf_jax import LoadMeter, Profile, capacity
from nf_jax.profile import CapacityLimits

PARAMS: Any = {"kernel": jax.ShapeDtypeStruct((64, 64), "float32")}
INFO = nf_jax.step_info(
    nf_jax.aggregate_gradients(Profile.static("SIGN"), axis="batch", num_workers=2).init(PARAMS)
)
EXACT, LOSSY = (INFO._replace(routes=np.asarray([route], np.int32)) for route in (0, 2))


def test_there_is_no_load_until_both_kinds_are_known():
    meter = LoadMeter()
    assert [meter.update(1.0, EXACT) for _ in range(5)] == [0.0] * 5
    assert [meter.update(2.0, LOSSY) for _ in range(3)] == [0.0, 0.0, 2.0]


def test_one_slow_step_is_no_load():
    meter = LoadMeter()
    for seconds, info in [(9.0, EXACT), *[(1.0, EXACT)] * 4, *[(0.25, LOSSY)] * 4, (50.0, LOSSY)]:
        load = meter.update(seconds, info)
    assert load == 0.25


def test_what_low_bit_took_is_forgotten_in_fp32():
    meter = LoadMeter()
    for seconds, info in [*[(1.0, EXACT)] * 3, *[(2.0, LOSSY)] * 3]:
        load = meter.update(seconds, info)
    assert load == 2.0
    assert meter.update(1.0, EXACT) == 0.0
    assert [meter.update(0.5, LOSSY) for _ in range(3)] == [0.0, 0.0, 0.5]


def test_with_the_profiles_hysteresis_a_slow_reducer_is_tried_seldom():
    limits, meter = CapacityLimits(hold_steps=10), LoadMeter()
    state, load, lossy = capacity.init(limits), 0.0, 0
    for step in range(2000):
        is_lossy = step >= 5 and not state.saturated
        lossy += is_lossy
        load = meter.update(1.5 if is_lossy else 1.0, LOSSY if is_lossy else EXACT)
        state = capacity.step(limits, state, np.asarray(load, np.float32))
    assert 3 <= lossy <= 40


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(seconds: float):
    with pytest.raises(ValueError, match="step_seconds: expected a positive number"):
        LoadMeter().update(seconds, EXACT)


def test_a_window_too_small_is_refused():
    with pytest.raises(ValueError, match="at least 3"):
        LoadMeter(2)
