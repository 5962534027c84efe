"""Laws of the endpoint reducer: closed forms, conservation, monotonicity; and an event simulation of it."""

from __future__ import annotations

import heapq
import math
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from nf_jax.endpoint import Endpoint, Load, Work, rates, simulate

NUM_LANES, NUM_PACKETS = 5, 64
MEBI = 2**20

_simulate = jax.jit(simulate)


def run(endpoint: Endpoint, work: Work, num_workers: int = 4, rest_seconds: float = 0.0) -> Load:
    numbers = np.float32(num_workers), np.float32(rest_seconds)
    load: Any = _simulate(rates(endpoint), work, *numbers)
    return jax.tree.map(float, load)


def fp32_work(*sizes: int) -> Work:
    size = np.asarray(sizes, np.float32)
    return Work(4 * size, 4 * size, size, 0 * size)


def sign_work(*sizes: int) -> Work:
    size = np.asarray(sizes, np.float32)
    return Work(size / 8, size / 8, 0 * size, size)


# ------------------------------------------------------------------------------------------ closed forms

UNLIMITED: dict[str, Any] = dict(
    ingress_bytes_per_second=1e30,
    egress_bytes_per_second=1e30,
    link_bytes_per_second=1e30,
    fp32_elements_per_second=1e30,
    vote_elements_per_second=1e30,
    round_trip_seconds=0.0,
    slots=2**40,
    queue_bytes=2**40,
)


def limited(**changes: Any) -> Endpoint:
    return Endpoint(**(UNLIMITED | changes))


# what limits: (changes to an endpoint without limits, seconds that 4 workers take for 1 Mi FP32 elements)
LIMITS = {
    "nothing": ({}, 0.0),
    "a worker's link": (dict(link_bytes_per_second=1e6), 4 * MEBI / 1e6),
    "what it receives": (dict(ingress_bytes_per_second=1e6), 16 * MEBI / 1e6),
    "what it sends": (dict(egress_bytes_per_second=1e6), 16 * MEBI / 1e6),
    "its adders": (dict(fp32_elements_per_second=1e6), 4 * MEBI / 1e6),
    "others": (dict(fp32_elements_per_second=1e6, background_load=0.75), 16 * MEBI / 1e6),
    "its slots": (dict(slots=2, slot_bytes=1024, round_trip_seconds=1e-3), MEBI / 512 * 1e-3 + 1e-3),
    "the way there and back": (dict(round_trip_seconds=0.5), 0.5),
}


@pytest.mark.parametrize("kind", LIMITS)
def test_one_limit_alone_gives_its_closed_form(kind: str):
    changes, seconds = LIMITS[kind]
    load = run(limited(**changes), fp32_work(MEBI), num_workers=4)
    assert load.seconds == pytest.approx(seconds, rel=1e-5, abs=1e-12)
    assert load.in_bytes == load.out_bytes == 4 * 4 * MEBI


def test_one_worker_takes_the_slowest_of_its_stages():
    endpoint = limited(link_bytes_per_second=1e9, ingress_bytes_per_second=5e8, fp32_elements_per_second=1e7)
    load = run(endpoint, fp32_work(MEBI), num_workers=1)
    assert load.seconds == pytest.approx(MEBI / 1e7, rel=1e-5)  # lanes are streamed: stages overlap
    assert load.busy_seconds == pytest.approx(load.seconds, rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "ingress_bytes_per_second",
        "egress_bytes_per_second",
        "link_bytes_per_second",
        "fp32_elements_per_second",
    ],
)
def test_a_rate_of_zero_never_finishes_and_is_full(name: str):
    load = run(limited(**{name: 0.0}), fp32_work(10, MEBI))
    assert math.isinf(load.seconds) and load.load >= 1 and not math.isnan(load.queue_bytes)


def test_a_rate_of_zero_does_not_matter_to_what_does_not_need_it():
    load = run(Endpoint(fp32_elements_per_second=0.0), sign_work(MEBI))
    assert 0 < load.seconds < 1 and load.load <= 1


def test_a_slot_without_room_for_one_number_never_finishes():
    assert math.isinf(run(Endpoint(slot_bytes=3, fp32_elements_per_second=1e9), fp32_work(10)).seconds)
    assert math.isinf(run(Endpoint(slot_bytes=1, count_bits=9), sign_work(10)).seconds)


def test_nothing_to_do_takes_no_time_and_leaves_the_background():
    load = run(Endpoint(background_load=0.5), fp32_work(0, 0))
    assert (load.seconds, load.queue_bytes, load.load) == (0, 0, 0.5)


def test_the_load_is_the_busy_share_of_the_whole_step():
    endpoint = limited(fp32_elements_per_second=1e6)
    busy = 4 * MEBI / 1e6
    assert run(endpoint, fp32_work(MEBI), rest_seconds=3 * busy).load == pytest.approx(0.25, rel=1e-3)


def test_the_queue_fills_the_buffer_unless_the_slots_are_fewer():
    limits: dict[str, Any] = dict(fp32_elements_per_second=1e6, queue_bytes=MEBI)
    load = run(limited(**limits), fp32_work(MEBI), rest_seconds=1e9)
    assert load.queue_bytes == 16 * MEBI and load.load == 16  # all arrives at once
    load = run(limited(**limits, slots=8, slot_bytes=1024), fp32_work(MEBI), rest_seconds=1e9)
    assert load.queue_bytes == 4 * 8 * 1024


# ------------------------------------------------------------------------------------- an event simulation


def stage_seconds(endpoint: Endpoint, work: Work, num_workers: int) -> list[tuple[float, float, float]]:
    """Arrival, service and egress of every lane, from the endpoint's fields, in plain Python."""
    fp32 = endpoint.fp32_elements_per_second or 0.0
    free = 1 - endpoint.background_load
    found = []
    for up, down, adds, votes in zip(*(field.tolist() for field in work), strict=True):
        slots = adds / (endpoint.slot_bytes // 4) + votes / (8 * endpoint.slot_bytes // endpoint.count_bits)
        arriving = max(
            up / endpoint.link_bytes_per_second,
            num_workers * up / endpoint.ingress_bytes_per_second,
            slots / endpoint.slots * endpoint.round_trip_seconds,
        )
        service = num_workers * (adds / fp32 + votes / endpoint.vote_elements_per_second) / free
        leaving = max(
            down / endpoint.link_bytes_per_second, num_workers * down / endpoint.egress_bytes_per_second
        )
        found.append((arriving, service, leaving))
    return found


def events(stages: list[tuple[float, float, float]], up_bytes: list[float]) -> tuple[float, float]:
    """Three servers in a row, lanes cut into packets: (when the last one has left, the longest queue).

    At every event the bytes that came in are those that went out and those that wait.
    """
    packets = [(lane, part) for lane in range(len(stages)) for part in range(NUM_PACKETS)]
    size = [value / NUM_PACKETS for value in up_bytes]
    heap = [(0.0, 0, 0)]  # (time, stage that the packet enters, packet)
    free = [0.0] * 3
    waiting: set[int] = set()
    came = went = last = peak = 0.0
    while heap:
        time, stage, packet = heapq.heappop(heap)
        lane = packets[packet][0]
        if stage == 1:
            came += size[lane]
            waiting.add(packet)
        if stage == 2:
            went += size[lane]
            waiting.discard(packet)
        assert came == pytest.approx(went + sum(size[packets[p][0]] for p in waiting), abs=1e-3)
        peak = max(peak, came - went)
        last = max(last, time)
        if stage < 3:
            free[stage] = max(free[stage], time) + stages[lane][stage] / NUM_PACKETS
            heapq.heappush(heap, (free[stage], stage + 1, packet))
        if stage == 0 and packet + 1 < len(packets):
            heapq.heappush(heap, (free[0], 0, packet + 1))
    return last, peak


RATES = st.floats(1e4, 1e8)
ENDPOINTS = st.builds(
    Endpoint,
    ingress_bytes_per_second=RATES,
    egress_bytes_per_second=RATES,
    link_bytes_per_second=RATES,
    fp32_elements_per_second=RATES,
    vote_elements_per_second=RATES,
    slots=st.integers(1, 4096),
    slot_bytes=st.integers(64, 4096),
    count_bits=st.integers(1, 16),
    round_trip_seconds=st.floats(0, 1e-2),
    queue_bytes=st.integers(1, 2**30),
    background_load=st.floats(0, 0.9),
)
WORKERS = st.integers(1, 64)
SIZES = st.lists(st.integers(1, 10**5), min_size=NUM_LANES, max_size=NUM_LANES)


@st.composite
def works(draw: st.DrawFn) -> Work:
    """Lanes of both kinds; some do not pass at all."""
    parts = [fp32_work(*draw(SIZES)), sign_work(*draw(SIZES)), fp32_work(*[0] * NUM_LANES)]
    kinds = np.asarray(draw(st.lists(st.integers(0, 2), min_size=NUM_LANES, max_size=NUM_LANES)))
    return Work(*(np.choose(kinds, fields).astype(np.float32) for fields in zip(*parts, strict=True)))


@hypothesis.given(ENDPOINTS, works(), WORKERS)
def test_the_closed_form_is_what_an_event_simulation_finds(endpoint: Endpoint, work: Work, workers: int):
    load = run(endpoint, work, workers)
    stages = stage_seconds(endpoint, work, workers)
    last, peak = events(stages, (workers * work.up_bytes).tolist())
    if not work.up_bytes.any():
        assert load.seconds == 0
        return
    # Cut into packets, each stage waits for one whole packet of the stage before.
    slack = sum(max(lane[stage] for lane in stages) for stage in (0, 1, 2)) / NUM_PACKETS
    assert last - slack <= (load.seconds - endpoint.round_trip_seconds) * (1 + 1e-4) + 1e-6
    assert load.seconds - endpoint.round_trip_seconds <= last * (1 + 1e-4) + 1e-6
    assert load.busy_seconds == pytest.approx(sum(lane[1] for lane in stages), rel=1e-4)
    packet = workers * float(work.up_bytes.max()) / NUM_PACKETS
    if load.queue_bytes > peak + 1:  # else the slots bound it
        assert load.queue_bytes <= peak * (1 + 1e-3) + 2 * packet


@hypothesis.given(ENDPOINTS, works(), WORKERS)
def test_the_queue_is_that_of_the_event_simulation_where_slots_abound(
    endpoint: Endpoint, work: Work, workers: int
):
    endpoint = endpoint.model_copy(update={"slots": 2**40})
    load = run(endpoint, work, workers)
    _, peak = events(stage_seconds(endpoint, work, workers), (workers * work.up_bytes).tolist())
    packet = workers * float(work.up_bytes.max()) / NUM_PACKETS
    assert load.queue_bytes == pytest.approx(
        peak, abs=2 * packet + 1e-3 * float(work.up_bytes.sum()) * workers
    )


# ------------------------------------------------------------------------------------------- monotonicity

FASTER = {
    "ingress_bytes_per_second": 2.0,
    "egress_bytes_per_second": 2.0,
    "link_bytes_per_second": 2.0,
    "fp32_elements_per_second": 2.0,
    "vote_elements_per_second": 2.0,
    "slots": 2,
    "round_trip_seconds": 0.5,
    "background_load": 0.5,
}


@pytest.mark.parametrize("name", FASTER)
@hypothesis.given(endpoint=ENDPOINTS, work=works(), workers=WORKERS)
def test_a_better_endpoint_is_never_slower(name: str, endpoint: Endpoint, work: Work, workers: int):
    better = endpoint.model_copy(update={name: getattr(endpoint, name) * FASTER[name]})
    before, after = run(endpoint, work, workers).seconds, run(better, work, workers).seconds
    assert after <= before * (1 + 1e-4)


@hypothesis.given(ENDPOINTS, works(), WORKERS)
def test_more_workers_are_never_faster_and_bytes_add_up(endpoint: Endpoint, work: Work, workers: int):
    one, more = run(endpoint, work, workers), run(endpoint, work, workers + 1)
    assert one.seconds <= more.seconds * (1 + 1e-4)
    assert more.in_bytes == pytest.approx((workers + 1) * float(work.up_bytes.sum()), rel=1e-5)
    assert more.out_bytes == pytest.approx((workers + 1) * float(work.down_bytes.sum()), rel=1e-5)


# --------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("link_bytes_per_second = -1.0", "link_bytes_per_second"),
        ("ingress_bytes_per_second = nan", "ingress_bytes_per_second"),
        ("egress_bytes_per_second = inf", "egress_bytes_per_second"),
        ("vote_elements_per_second = '8e9'", "vote_elements_per_second"),
        ("slots = 0", "slots"),
        ("count_bits = 33", "count_bits"),
        ("background_load = 1.5", "background_load"),
        ("round_trip_seconds = -1e-6", "round_trip_seconds"),
        ("slot = 3", "slots"),
    ],
)
def test_a_bad_value_names_its_key(text: str, said: str):
    with pytest.raises(ValueError, match=said):
        Endpoint.loads(text, "endpoint.toml")


def test_an_endpoint_is_what_was_saved(tmp_path: Path):
    endpoint = Endpoint(name="switch", fp32_elements_per_second=None, count_bits=4)
    endpoint.save(tmp_path / "e.toml")
    assert endpoint.max_workers == 15
    assert Endpoint.load(tmp_path / "e.toml") == endpoint
