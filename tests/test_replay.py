"""Laws of replay: it decides as the run did, and what it cannot know it refuses."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces import FAST, NUM_STEPS, PROFILE, make_substrate, write_run

from nf_jax import costs, trace
from nf_jax.columns import Columns, read_columns
from nf_jax.profile import Profile, Route
from nf_jax.replay import replay
from nf_jax.telemetry import Reason

FP32 = Route.FP32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "trace.jsonl")


@pytest.fixture(scope="module")
def columns(path: Path) -> Columns:
    return read_columns(path)


# ----------------------------------------------------------------------------------------- the run again


def test_replayed_decisions_are_those_of_the_live_run_step_by_step(path: Path, columns: Columns):
    found = replay(columns)
    np.testing.assert_array_equal(found.routes, columns.routes)
    np.testing.assert_array_equal(found.reasons, columns.reasons)
    assert found.first_difference is None
    live = trace.read_trace(path).steps
    np.testing.assert_array_equal(found.trips, [step["trips"] for step in live])
    np.testing.assert_array_equal(found.saturated, [step["saturated"] for step in live])
    assert found.wire_bytes.tolist() == [step["wire_bytes"] for step in live]
    assert {found.fp32_bytes} == {step["fp32_bytes"] for step in live}


def test_the_live_run_was_no_easy_one(columns: Columns):
    seen = {Reason(reason) for reason in np.unique(columns.reasons)}
    wanted = {Reason.WARMUP, Reason.FALLBACK, Reason.LOAD, Reason.RESIDUAL, Reason.PROTECTED, Reason.PROFILE}
    assert seen >= wanted
    assert replay(columns).trips.max() >= 2


def test_the_first_step_that_differs_is_said(columns: Columns):
    routes = columns.routes.copy()
    routes[17:] = 0
    later = int(np.flatnonzero(columns.routes[17:].any(1))[0]) + 17
    assert replay(columns._replace(routes=routes)).first_difference == later


def test_a_torn_trace_replays_up_to_its_last_whole_step(path: Path, columns: Columns, tmp_path: Path):
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(path.read_bytes()[:-20])
    found = replay(read_columns(torn))
    assert found.truncated and len(found.steps) == NUM_STEPS - 1
    np.testing.assert_array_equal(found.routes, columns.routes[:-1])


def test_refusals_are_lanes_that_the_profile_wants_low_bit(columns: Columns):
    found = replay(columns)
    wanted = np.asarray([region != 0 for region in columns.lanes.regions])
    after = columns.steps >= 3
    low = (columns.routes != FP32).sum(1)
    np.testing.assert_array_equal(found.refusals[after], wanted.sum() - low[after])
    assert found.refusals[0] == 1  # the first phase wants `wide` alone, and health is warming up


# --------------------------------------------------------------------------------- substrate and endpoint


def test_seconds_on_a_substrate_are_those_of_its_lanes(columns: Columns):
    substrate = make_substrate()
    found = replay(columns, substrate=substrate)
    table = costs.lane_seconds(PROFILE, columns.lanes, substrate)
    expected = [table[np.arange(len(row)), row].sum() for row in found.routes]
    np.testing.assert_allclose(found.seconds, expected)
    assert found.fp32_seconds == pytest.approx(table[:, FP32].sum())
    assert found.speedup > 1


def test_a_substrate_on_which_nothing_pays_refuses_everything(columns: Columns):
    found = replay(columns, substrate=make_substrate(rate=1e15, latency=1e-3))
    assert not found.routes.any() and found.speedup == pytest.approx(1)
    refused = [lane for lane, region in enumerate(columns.lanes.regions) if region != 0]
    assert {int(reason) for reason in found.reasons[-1, refused]} == {Reason.SLOWER}


def test_bytes_of_a_refused_lane_are_its_bytes_in_fp32(columns: Columns):
    found = replay(columns, substrate=make_substrate(rate=1e15, latency=1e-3))
    assert set(found.wire_bytes) == {columns.fp32_bytes + columns.overhead_bytes}


def test_the_endpoints_load_acts_one_step_later(columns: Columns):
    quiet = columns._replace(signals=columns.signals._replace(reducer_load=np.ones(NUM_STEPS, np.float32)))
    slow = {"link_bytes_per_second": 1e8, "vote_elements_per_second": 1e9}  # served slower than it arrives
    full = FAST.model_copy(update={"queue_bytes": 1, "slots": 10**6} | slow)
    found = replay(quiet, endpoint=full)
    low = (found.routes != FP32).any(1)
    first = int(np.flatnonzero(low)[0])
    assert found.load[first] >= 1 and found.saturated[first] and not found.saturated[first - 1]
    assert Reason.LOAD in found.reasons[first + 1] and not low[first + 1]
    assert found.num_flips > 1  # after hold_steps quiet steps it is tried again


def test_an_endpoint_with_room_replaces_the_recorded_load(columns: Columns):
    found = replay(columns, endpoint=FAST)
    assert not found.saturated.any() and Reason.LOAD not in found.reasons
    assert Reason.LOAD in columns.reasons


@pytest.mark.parametrize(
    "changes",
    [
        {"count_bits": 1},
        {"vote_elements_per_second": 0.0},
        {"ingress_bytes_per_second": 0.0},
        {"link_bytes_per_second": 0.0},
        {"background_load": 1.0},
        {"vote_elements_per_second": 1e3},
        {"slots": 1, "slot_bytes": 1, "round_trip_seconds": 1.0},
        {"vote_elements_per_second": 0.0, "fp32_elements_per_second": 0.0},
    ],
)
def test_what_the_endpoint_cannot_take_in_time_is_refused(columns: Columns, changes: dict[str, Any]):
    found = replay(columns, endpoint=FAST.model_copy(update=changes))
    assert not found.routes.any()
    assert Reason.SLOWER in found.reasons


def test_a_profile_without_fallback_waits_for_ever_where_the_endpoint_cannot(columns: Columns):
    forced = PROFILE.model_copy(update={"fallback": False})
    header = columns.header | {"profile": forced.dumps()}
    found = replay(
        columns._replace(header=header), endpoint=FAST.model_copy(update={"vote_elements_per_second": 0.0})
    )
    assert np.isinf(found.seconds[found.routes.any(1)]).all()


def test_what_a_step_computes_is_what_averaging_leaves_of_it(columns: Columns):
    assert replay(columns).compute_seconds == pytest.approx(0.01)
    substrate = make_substrate()
    found = replay(columns, substrate=substrate)
    table = costs.lane_seconds(PROFILE, columns.lanes, substrate)
    live = np.median([table[np.arange(len(row)), row].sum() for row in columns.routes])
    assert found.compute_seconds == pytest.approx(0.01 - live)
    assert (
        replay(columns, endpoint=FAST, compute_seconds=0.0).load.max()
        > replay(columns, endpoint=FAST).load.max()
    )


@pytest.mark.parametrize("fp32_rate", [None, 1e9])
def test_a_faster_link_never_makes_low_bit_more_attractive(columns: Columns, fp32_rate: float | None):
    speedups = []
    for link in (1e6, 1e7, 1e8, 1e9):
        endpoint = FAST.model_copy(
            update={"link_bytes_per_second": link, "fp32_elements_per_second": fp32_rate}
        )
        speedups.append(replay(columns, endpoint=endpoint).speedup)
    assert all(fast <= slow * 1.0001 for slow, fast in itertools.pairwise(speedups))


# ---------------------------------------------------------------------------------------------- bad input


def test_a_trace_that_is_not_whole_is_an_error(columns: Columns):
    with pytest.raises(ValueError, match="got 1 in place 0"):
        replay(columns._replace(steps=columns.steps + 1))
    gap = columns.steps.copy()
    gap[7:] += 3
    with pytest.raises(ValueError, match="got 10 in place 7"):
        replay(columns._replace(steps=gap))
    with pytest.raises(ValueError, match="steps: expected at least one"):
        replay(columns._replace(steps=columns.steps[:0]))


def test_a_trace_of_another_profile_is_an_error(columns: Columns):
    other = Profile.static("SIGN").dumps()
    with pytest.raises(ValueError, match="regions"):
        replay(columns._replace(header=columns.header | {"profile": other}))
    with pytest.raises(ValueError, match=r"trace.jsonl: line 1: profile: not valid"):
        replay(columns._replace(header=columns.header | {"profile": "name = 3"}))
    signals = columns.signals._replace(gradient_norm=columns.signals.gradient_norm[:, :1])
    with pytest.raises(ValueError, match="gradient_norm of shape"):
        replay(columns._replace(signals=signals))


def test_a_substrate_of_other_workers_or_backend_is_an_error(columns: Columns):
    with pytest.raises(ValueError, match="num_workers=2"):
        replay(columns, substrate=make_substrate(num_workers=4))
    there = columns._replace(header=columns.header | {"backend": "tpu"})
    with pytest.raises(ValueError, match="backend=tpu"):
        replay(there, substrate=make_substrate())


def test_a_header_without_workers_is_an_error_only_where_it_matters(columns: Columns):
    header = {name: value for name, value in columns.header.items() if name != "num_workers"}
    assert replay(columns._replace(header=header)).first_difference is None
    with pytest.raises(ValueError, match=r"TraceWriter\(\.\.\., num_workers=W\)"):
        replay(columns._replace(header=header), endpoint=FAST)


def test_of_two_levels_the_hosts_count(columns: Columns):
    header = columns.header | {"num_workers": [2, 4]}
    assert replay(columns._replace(header=header), substrate=make_substrate()).speedup > 1
