"""Laws of what-if: each point is a replay of its own, and what is found can be saved as a profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from traces import FAST, PROFILE, make_substrate, write_run

from nf_jax import plan
from nf_jax.columns import Columns, read_columns
from nf_jax.plan import model_shapes
from nf_jax.profile import Buckets, Profile
from nf_jax.replan import replan
from nf_jax.replay import replay
from nf_jax.sweep import (
    AXES,
    FLOOR_SIZES,
    co_design,
    default_values,
    make_case,
    smallest_lane,
    sweep,
    what_if,
)

SUBSTRATE = make_substrate()


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Columns:
    return read_columns(write_run(tmp_path_factory.mktemp("run") / "trace.jsonl"))


def without_model(columns: Columns) -> Columns:
    profile = PROFILE.model_copy(update={"model": None})
    return columns._replace(header=columns.header | {"profile": profile.dumps()})


# ---------------------------------------------------------------------------------------------- one point


@pytest.mark.parametrize("axis", AXES)
def test_a_point_at_the_present_value_is_the_replay_itself(columns: Columns, axis: str):
    case = make_case(columns, None, FAST)
    now = AXES[axis].now(case)
    assert now is not None
    (point,) = sweep(columns, None, FAST, axis=axis, values=[now])
    expected = replay(columns, endpoint=FAST)
    np.testing.assert_array_equal(point.found.routes, expected.routes)
    np.testing.assert_array_equal(point.found.wire_bytes, expected.wire_bytes)
    np.testing.assert_allclose(point.found.seconds, expected.seconds)
    assert point.found.fp32_bytes == expected.fp32_bytes


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("link", (1e6, 1e7, 1e8)),
        ("service", (1e7, 1e9, 1e11)),
        ("slots", (1, 8, 64)),
        ("count_bits", (1, 2, 3)),
    ],
)
def test_more_of_it_never_takes_longer(columns: Columns, axis: str, values: tuple[float, ...]):
    endpoint = FAST.model_copy(update={"fp32_elements_per_second": 1e9})
    points = sweep(columns, None, endpoint, axis=axis, values=values)
    seconds = [point.found.total_seconds for point in points]
    exact = [point.found.fp32_seconds for point in points]
    assert seconds == sorted(seconds, reverse=True) and exact == sorted(exact, reverse=True)


def test_a_faster_link_never_makes_low_bit_gain_more_on_a_substrate(columns: Columns):
    points = sweep(columns, SUBSTRATE, None, axis="link", values=(1e6, 1e7, 1e8, 1e9))
    speedups = [point.found.speedup for point in points]
    assert speedups == sorted(speedups, reverse=True)


def test_counters_that_are_too_narrow_refuse_more_workers(columns: Columns):
    endpoint = FAST.model_copy(update={"count_bits": 2})  # holds up to 3 workers
    points = sweep(columns, None, endpoint, axis="workers", values=(2, 3, 4))
    assert [point.found.routes.any() for point in points] == [True, True, False]


def test_other_workers_have_the_bytes_of_their_plan(columns: Columns):
    (point,) = sweep(columns, SUBSTRATE, None, axis="workers", values=[4])
    assert PROFILE.model is not None
    planned = plan(PROFILE, model_shapes(PROFILE.model), 4)
    expected = [planned.wire_bytes(routes.tolist()) for routes in point.found.routes]
    assert point.found.wire_bytes.tolist() == expected and point.found.fp32_bytes == planned.fp32_bytes
    assert len(sweep(columns, SUBSTRATE, None, axis="workers", values=[4096])) == 1


def test_other_buckets_are_other_lanes(columns: Columns):
    found = {p.value: p.found for p in sweep(columns, SUBSTRATE, None, axis="cap", values=(2**10, 2**26))}
    assert found[2**10].lanes.names == ("0/wide", "1/head", "2/body", "3/body")
    assert found[2**26].lanes.names == columns.lanes.names == ("0/wide", "0/head", "0/body", "1/body")
    assert sum(found[2**10].lanes.num_elements) == sum(found[2**26].lanes.num_elements)


# ------------------------------------------------------------------------------------- other lanes, same run


def test_lanes_that_merge_agree_on_average_and_keep_the_largest_residual(columns: Columns):
    signals = columns.signals
    buckets = Buckets(first_bytes=2**26, cap_bytes=2**26)
    merged = replan(columns, profile=PROFILE.model_copy(update={"buckets": buckets})).signals
    body = [i for i, region in enumerate(columns.lanes.regions) if region == 2]
    assert merged.residual_ratio.shape[1] == 3
    np.testing.assert_array_equal(merged.residual_ratio[:, 2], signals.residual_ratio[:, body].max(1))
    agreement = signals.agreement[:, body]
    voted = agreement >= 0
    total = np.where(voted, agreement, 0).sum(1)  # both have as many elements
    expected = np.where(voted.any(1), total / np.maximum(voted.sum(1), 1), -1)
    np.testing.assert_allclose(merged.agreement[:, 2], expected, rtol=1e-5)


def test_a_trace_without_a_model_has_no_other_lanes(columns: Columns):
    for axis, value in (("cap", 2**20), ("workers", 8)):
        with pytest.raises(ValueError, match=r"no \[model\]"):
            sweep(without_model(columns), SUBSTRATE, None, axis=axis, values=[value])
    case = make_case(without_model(columns), SUBSTRATE, None)
    assert not {"cap", "workers"} & default_values(case).keys()


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("axis", "value", "said"),
    [
        ("wind", 1, "axis: expected one of link"),
        ("slots", 0, "whole number"),
        ("slots", 1.5, "whole number"),
        ("count_bits", 33, "count_bits"),
        ("workers", 8192, "at most 4096"),
        ("link", float("nan"), "finite rate"),
        ("service", -1.0, "finite rate"),
    ],
)
def test_a_value_that_cannot_be_is_an_error(columns: Columns, axis: str, value: float, said: str):
    with pytest.raises(ValueError, match=said):
        sweep(columns, None, FAST, axis=axis, values=[value])


def test_there_has_to_be_something_to_vary(columns: Columns):
    with pytest.raises(ValueError, match="a substrate or an endpoint"):
        sweep(columns, None, None, axis="link", values=[1e9])
    with pytest.raises(ValueError, match="expected an endpoint"):
        sweep(columns, SUBSTRATE, None, axis="slots", values=[1])
    with pytest.raises(ValueError, match="above 0"):
        sweep(columns, SUBSTRATE, None, axis="link", values=[0.0])


# ------------------------------------------------------------------------------------------------ co-design


def test_the_smallest_lane_is_where_low_bit_begins_to_pay(columns: Columns):
    case = make_case(columns, make_substrate(latency=1e-3), None)
    floor = smallest_lane(PROFILE, case)
    assert FLOOR_SIZES[0] < floor < FLOOR_SIZES[-1]
    cheap = make_case(columns, make_substrate(latency=0.0), None)
    assert smallest_lane(PROFILE, cheap) == FLOOR_SIZES[0]


def test_where_nothing_pays_no_lane_is_large_enough(columns: Columns):
    never = make_case(columns, None, FAST.model_copy(update={"vote_elements_per_second": 0.0}))
    assert smallest_lane(PROFILE, never) > 4 * max(columns.lanes.num_elements)


def test_sizes_that_do_not_occur_do_not_count(columns: Columns, monkeypatch: pytest.MonkeyPatch):
    """Very large arrays may cease to pay, of page faults: a run without them is not to suffer."""
    largest = 4 * max(columns.lanes.num_elements)
    monkeypatch.setattr("nf_jax.sweep._pays", lambda profile, case, size: 2**14 <= size < 2 * largest)
    assert smallest_lane(PROFILE, make_case(columns, SUBSTRATE, None)) == 2**14


def test_a_profile_that_would_be_slower_is_not_made(columns: Columns, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("nf_jax.sweep.smallest_lane", lambda profile, case: 2**40)
    case = make_case(columns, SUBSTRATE, FAST)
    assert replay(columns, substrate=SUBSTRATE, endpoint=FAST).routes.any()
    assert co_design(case) == PROFILE


def test_a_designed_profile_can_be_saved_and_replayed(columns: Columns, tmp_path: Path):
    case = make_case(columns, SUBSTRATE, FAST)
    caps = sweep(columns, SUBSTRATE, FAST, axis="cap", values=(2**10, 2**16, 2**26))
    designed = co_design(case, caps)
    designed.save(tmp_path / "designed.toml")
    loaded = Profile.load(tmp_path / "designed.toml")
    assert loaded == designed and loaded.regions == PROFILE.regions
    assert loaded.capacity.min_lane_bytes == smallest_lane(PROFILE, case)
    again = replay(replan(columns, profile=loaded), substrate=SUBSTRATE, endpoint=FAST)
    before = replay(columns, substrate=SUBSTRATE, endpoint=FAST)
    assert again.total_seconds <= before.total_seconds * 1.0001


def test_buckets_stay_where_others_gain_little(columns: Columns):
    caps = sweep(columns, None, FAST, axis="cap", values=[PROFILE.buckets.cap_bytes])
    assert co_design(make_case(columns, None, FAST), caps).buckets == PROFILE.buckets


def test_what_if_covers_every_axis_that_applies(columns: Columns):
    told: list[str] = []
    case = make_case(columns, SUBSTRATE, FAST)
    few = {axis: values[:2] for axis, values in default_values(case).items()}
    assert few.keys() == AXES.keys() and max(default_values(case)["workers"]) == 4096
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nf_jax.sweep.default_values", lambda case: few)
        found = what_if(case, tell=told.append)
    assert {axis: [point.value for point in points] for axis, points in found.items()} == few
    assert len(told) == sum(map(len, few.values()))
