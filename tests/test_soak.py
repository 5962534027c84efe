"""The soak: each of its laws can fail, troubles are data of one shape, and a short one holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import nf_jax
from experiments import soak, soak_laws, soak_troubles, soak_watch
from experiments.soak_laws import Episode, Found
from experiments.soak_troubles import Trouble
from nf_jax import Route, StepInfo, telemetry
from nf_jax.health import Health

jax.devices()  # the suite's eight, before a soak asks for fewer

PROFILE = soak.make_profile()
LANES = telemetry.Lanes(
    names=("0/backbone", "1/backbone", "0/head"),
    regions=(2, 2, 0),
    groups=(0, 0, -1),
    fixed=(None, None, telemetry.Reason.PROTECTED),
    num_elements=(10, 10, 10),
    wire_bytes=((4, 2, 1, 1),) * 3,
)
W, NUM_LEAVES = 4, 8


def info(step: int, **changes: Any) -> StepInfo:
    """A healthy step in the first low-bit phase."""
    sign, zero = np.asarray([2, 2, 0], np.int32), np.zeros((3,), np.int32)
    signals = telemetry.Signals(
        loss=np.asarray(1.0, np.float32),
        has_loss=np.asarray(True),
        nonfinite=zero,
        gradient_norm=np.ones((3,), np.float32),
        agreement=np.ones((3,), np.float32),
        residual_ratio=np.ones((3,), np.float32),
        reducer_load=np.asarray(0.0, np.float32),
    )
    healthy = StepInfo(
        step=np.asarray(step),
        routes=sign,
        reasons=zero,
        next_routes=sign,
        next_reasons=zero,
        wire=np.zeros((2,), np.int32),
        fp32_wire=np.zeros((2,), np.int32),
        health_state=np.full((3,), Health.ADMITTED, np.int32),
        trigger=zero,
        trips=zero,
        saturated=np.asarray(False),
        signals=signals,
    )
    return healthy._replace(**changes)


def seen(**changes: Any) -> Any:
    fine = {"loss": 1.0, "has_moved": True, "is_finite": True, "digest": 7}
    return soak.Seen(**{name: np.full((W,), value) for name, value in (fine | changes).items()})


def trouble(factor: float = 1.0) -> Trouble:
    none = np.zeros((W,), np.float32)
    return Trouble(none, np.full((W, NUM_LEAVES), factor, np.float32), none)


# ------------------------------------------------------------------------------------------------- laws

BAD_STEPS = {
    "a step left out": (info(7), info(9), "expected step 8"),
    "other routes than chosen": (info(7), info(8, routes=np.asarray([2, 0, 0])), "not the routes"),
    "a route that there is not": (
        info(7, next_routes=np.asarray([5, 2, 0])),
        info(8, routes=np.asarray([5, 2, 0])),
        "routes [5",
    ),
    "low bits where the profile protects": (
        info(7, next_routes=np.asarray([2, 2, 2])),
        info(8, routes=np.asarray([2, 2, 2])),
        "where the profile says",
    ),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_step_that_breaks_a_law_is_told(case: str):
    before, after, said = BAD_STEPS[case]
    lines = soak_laws.observe(Episode("calm"), PROFILE, LANES, before, after)
    assert any(said in line and "calm" in line for line in lines)
    assert soak_laws.observe(Episode("calm"), PROFILE, LANES, info(7), info(8)) == []


@pytest.mark.parametrize(
    ("changes", "factor", "said"),
    [
        ({"digest": np.arange(W)}, 1.0, "different bits"),
        ({"is_finite": False}, 1.0, "parameters are not finite"),
    ],
)
def test_workers_that_differ_or_are_not_finite_are_told(changes: dict[str, Any], factor: float, said: str):
    shown = seen()._replace(**{name: np.broadcast_to(value, (W,)) for name, value in changes.items()})
    (line,) = soak.check_seen(trouble(factor), shown, info(3))
    assert said in line
    assert soak.check_seen(trouble(), seen(), info(3)) == []


def test_a_gradient_that_is_not_finite_has_to_be_seen_and_to_move_nothing():
    counted = info(3)._replace(signals=info(3).signals._replace(nonfinite=np.asarray([0, 0, 1])))
    still = seen(has_moved=False)
    assert soak.check_seen(trouble(np.nan), still, counted) == []
    assert "no signal says so" in soak.check_seen(trouble(np.nan), still, info(3))[0]
    assert "parameters moved" in soak.check_seen(trouble(np.inf), seen(), counted)[0]


def test_what_changes_is_counted_and_more_than_its_bound_is_told():
    episode = Episode("load")
    before = info(-1, saturated=np.asarray(True))
    for step in range(40):
        after = info(
            step,
            saturated=np.asarray(step % 2 == 1),
            next_routes=np.asarray([2, 2, 0]) * (step % 2),
            routes=before.next_routes,
        )
        soak_laws.observe(episode, PROFILE, LANES, before, after)
        before = after
    assert (episode.steps, episode.load_flips) == (40, 40)
    assert episode.route_flips.tolist() == [40, 40, 0] and episode.low_bit == 2 * 20
    lines = soak_laws.judge_episode(episode, PROFILE, LANES)
    assert len(lines) == 1 and "load_flips, got 40" in lines[0]


GOOD_RUN: dict[str, Any] = dict(
    episodes=[Episode("calm", steps=400)],
    memory=[(step, 10**9) for step in range(0, 1000, 20)],
    arrays=[(3, 300), (3, 300)],
    accuracy=[98.0],
    compilations=(5, 0),
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"compilations": (5, 1)}, "nothing compiled"),
        ({"arrays": [(3, 300), (4, 312)]}, "as many arrays alive"),
        ({"memory": [(step, 10**9 + 10**5 * step) for step in range(0, 1000, 20)]}, "MiB more memory"),
        ({"accuracy": [40.0]}, "a calm episode to learn"),
    ],
)
def test_a_run_that_grows_compiles_or_does_not_learn_is_told(changes: dict[str, Any], said: str | None):
    found = Found(**GOOD_RUN | changes)
    lines = soak_laws.judge_run(found, episode_steps=400, max_growth_mib=32)
    assert lines == [] if said is None else said in lines[0]


def test_memory_is_told_from_the_second_fifth_on():
    samples = [(step, 10**9 if step < 200 else 2 * 10**9) for step in range(0, 1000, 20)]
    told = soak_watch.describe_memory(samples)
    assert told["growth_mib"] == 0 and abs(told["slope_bytes_per_step"]) < 1e-3
    rising = soak_watch.describe_memory([(step, 10**9 + 500 * step) for step in range(0, 1000, 20)])
    assert rising["slope_bytes_per_step"] == pytest.approx(500)
    assert soak_watch.describe_memory([(20, 5)])["growth_mib"] == 0


# --------------------------------------------------------------------------------------------- troubles


@pytest.mark.parametrize("kind", soak_troubles.KINDS)
def test_a_trouble_is_data_of_one_shape_and_only_calm_does_nothing(kind: str):
    rng, acted = np.random.default_rng(0), False
    for step in range(200):
        made = soak_troubles.make_trouble(kind, rng, info(step), W, NUM_LEAVES)
        assert [(x.shape, x.dtype.name) for x in made] == [(x.shape, x.dtype.name) for x in trouble()]
        acted |= any(not np.array_equal(x, y) for x, y in zip(made, trouble(), strict=True))
    assert acted == (kind != "calm")


def test_adversaries_answer_what_they_see():
    rng = np.random.default_rng(0)
    make = lambda kind, seen_info: soak_troubles.make_trouble(kind, rng, seen_info, W, NUM_LEAVES)  # noqa: E731
    assert make("load", info(3)).load.max() == 1
    assert make("load", info(3, saturated=np.asarray(True))).load.max() == 0
    fallen = info(3, health_state=np.full((3,), Health.FALLBACK, np.int32))
    for _ in range(20):
        broken, healthy = make("health", info(3)), make("health", fallen)
        assert not np.isfinite(broken.factors).all() or broken.loss.max() > 1
        assert np.isfinite(healthy.factors).all() and not healthy.loss.any()


# --------------------------------------------------------------------------------------------- watching


def test_compilations_are_counted():
    function = jax.jit(lambda x: x * 3 + 1)
    with soak_watch.counted_compilations() as compiled:
        function(np.float32(1))
        first = len(compiled)
        function(np.float32(2))
        assert (first, len(compiled)) == (1, 1)
        function(np.ones((3,), np.float32))
        assert len(compiled) == 2
    function(np.ones((5,), np.float32))
    assert len(compiled) == 2


HANG = """
import time
from experiments.soak_watch import watchdog
def step_that_waits_for_ever():
    time.sleep(60)
with watchdog(0.5) as beat:
    for _ in range(4):
        time.sleep(0.25)
        beat()
    print("alive")
    step_that_waits_for_ever()
"""


def test_a_step_that_hangs_ends_the_process_with_its_place():
    root = Path(__file__).resolve().parent.parent
    ended = subprocess.run(
        [sys.executable, "-c", HANG], capture_output=True, text=True, timeout=50, cwd=root, check=False
    )
    assert ended.returncode == 1 and ended.stdout == "alive\n"
    assert "no step ended within 0.5 s" in ended.stderr and "step_that_waits_for_ever" in ended.stderr


# --------------------------------------------------------------------------------------------- a soak


def test_a_short_soak_holds_and_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = ["--devices", "2", "--steps", "100", "--episode-steps", "30", "--out", str(tmp_path)]
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw needs it
        soak.main([*options, "--kinds", "random", "load", "health"])
    assert "100 steps" in capsys.readouterr().out
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["broken"] == [] and found["steps"] == 100
    assert [row["steps"] for row in found["episodes"]] == [30, 30, 30, 10]
    assert found["compilations"]["later"] == 0 and len(found["arrays_alive"]) == 1
    assert found["episodes"][1]["load_flips"] >= 6 and found["episodes"][2]["trips"] >= 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps: expected more than 0"),
        ({"seconds": float("nan")}, "seconds: expected more than 0"),
        ({"kinds": ("rain",)}, "kinds: expected some of calm"),
        ({"kinds": ()}, "kinds: expected some of calm"),
    ],
)
def test_a_soak_that_cannot_be_is_an_error(options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        soak.Config(**options)


def test_the_soaks_profile_takes_every_route():
    routes = {route for _, row in PROFILE.route_table for route in row}
    assert routes == set(Route) and nf_jax.Profile.loads(PROFILE.dumps()) == PROFILE
