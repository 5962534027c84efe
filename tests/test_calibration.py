"""Laws of an experiment as a job: it trains and counts as the experiment does, on other held-out examples."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import calibration, finetune, lm, vision
from nf_jax import calibrate
from nf_jax.columns import read_columns, wire_bytes_of
from nf_jax.lab import Lab
from nf_jax.profile import Profile
from nf_jax.replay import replay
from nf_jax.shadow_trace import read_shadow
from nf_jax.space import BF16, Settings, make_profile, model_of, protection_of

jax.devices()  # the suite's eight, before a job asks for fewer

STEPS = 6
MAPPINGS = Path("/proc/self/maps")
CONFIG = dataclasses.replace(vision.digits(), steps=STEPS, devices=2, num_evaluations=3)
TASK = vision.classification(vision.load_digits, vision.MLP((64, 64), num_classes=10))


@pytest.fixture(autouse=True)
def loose_promotion():
    """The suite is strict, but optax.adamw raises a float to an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def job() -> calibrate.Job:
    return calibration.make_job(CONFIG, TASK, tolerance=1.0, loss_tolerance=0.1)


def profile_of(job: calibrate.Job, settings: Settings | None) -> Profile:
    start = job.start.model_copy(update={"capacity": type(job.start.capacity)(min_lane_bytes=0)})
    model = model_of(job.name, job.params)
    return make_profile(start, model, protection_of(start), settings, {}, job.steps)


def measure(job: calibrate.Job, profile: Profile, trace: Path | None, stop_at: int = 0) -> Any:
    points: list[tuple[int, float, int]] = []

    def report(step: int, loss: float, wire_bytes: int) -> bool:
        points.append((step, loss, wire_bytes))
        return len(points) != stop_at

    outcome = job.measure(profile, steps=STEPS, seed=3, trace=trace, report=report)
    return outcome, points


def test_a_low_bit_run_is_reported_counted_and_traced_and_stops_when_told_to(job, tmp_path):
    profile = profile_of(job, Settings(warmup_share=0.3))
    outcome, points = measure(job, profile, tmp_path / "trace.jsonl")
    assert [step for step, _, _ in points] == [2, 4, 6]
    columns = read_columns(tmp_path / "trace.jsonl")
    sent = (wire_bytes_of(columns.lanes, columns.routes) + columns.overhead_bytes).cumsum()
    assert [bytes_sent for _, _, bytes_sent in points] == [sent[1], sent[3], sent[5]]
    assert columns.routes[:2].max() == 0 and columns.routes[2:].max() == 2
    assert replay(columns).first_difference is None
    assert (outcome.wire_bytes, outcome.fp32_bytes) == (sent[-1], columns.fp32_bytes * STEPS)
    assert outcome.loss == points[-1][1] > 0 and 0 < outcome.value <= 100

    again, same = measure(job, profile, None)
    assert (again, same) == (outcome, points), "the same arguments give the same numbers"
    stopped, few = measure(job, profile, None, stop_at=1)
    assert stopped is None and few == points[:1]


def test_held_out_examples_are_neither_trained_on_nor_tested_on():
    train, test = vision.load_digits()
    rest, held_out = calibration.split(train)
    assert len(held_out.labels) == -(-len(train.labels) // 5)
    assert len(rest.labels) + len(held_out.labels) == len(train.labels)
    numbered = calibration.split({"n": np.arange(50_000)})
    assert not set(numbered[0]["n"]) & set(numbered[1]["n"])
    assert len(numbered[1]["n"]) == calibration.MAX_HELD_OUT
    assert len(test.labels) == len(vision.load_digits()[1].labels)


def test_a_short_run_is_the_whole_schedule_in_small():
    config = dataclasses.replace(vision.cifar10(), steps=1000, warmup_steps=100)
    short = calibration.shorten(config, 50)
    assert (short.steps, short.warmup_steps, short.num_evaluations) == (50, 5, 12)
    assert calibration.shorten(config, 7).num_evaluations == 7
    assert calibration.shorten(config, 1).warmup_steps == 0


def test_a_shadow_run_watches_every_leaf(job, tmp_path):
    job.shadow(steps=STEPS, seed=0, trace=tmp_path / "shadow.jsonl")
    trace = read_shadow(tmp_path / "shadow.jsonl")
    assert trace.info.step.tolist() == list(range(STEPS))
    assert {path: shape for path, shape in zip(trace.leaves.paths, trace.leaves.shapes, strict=True)} == {
        leaf.path: leaf.shape for leaf in model_of("digits", job.params).leaves
    }
    assert np.isfinite(trace.info.cosine).all()


def test_a_job_says_what_it_is(job):
    assert (job.metric, job.higher_is_better, job.tolerance) == ("validation_accuracy", True, 1.0)
    assert (job.num_workers, job.batch_size, job.steps) == (2, 32, STEPS)
    assert "adamw" in job.optimizer and "over 6 steps" in job.optimizer
    assert profile_of(job, BF16).model == model_of("digits", job.params)
    for module in (vision, lm, finetune):
        assert callable(module.calibration_job)


def test_without_a_profile_heads_and_vectors_are_protected():
    config = dataclasses.replace(CONFIG, profile=Path("nowhere.toml"))
    job = calibration.make_job(config, TASK, tolerance=1.0, loss_tolerance=0.1)
    assert job.start == calibration.START
    assert protection_of(job.start).free == ("backbone",)


@pytest.mark.skipif(not MAPPINGS.exists(), reason="counts a process's memory mappings, which Linux lists")
def test_many_profiles_do_not_fill_the_process_with_programs(job, tmp_path):
    calibrating, counts = Lab(job, tmp_path, lambda text, steps: None), []
    for warmup_share in (0.2, 0.4, 0.6, 0.8):
        calibrating.run_full("profile", profile_of(job, Settings(warmup_share=warmup_share)), [3])
        counts.append(MAPPINGS.read_bytes().count(b"\n"))
    assert counts[-1] < counts[0] + 100, counts  # without care, 400 a profile
