"""The main job in a tiny form: what it writes and prints, and the profile it ships with."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import process_groups
import pytest
import substrates

import nf_jax
from experiments import batches, jobs, vision
from nf_jax import trace

jax.devices()  # the suite's eight, before a job asks for fewer

COLUMNS = [
    "workload",
    "policy",
    "seed",
    "num_workers",
    "metric",
    "value",
    "test_loss",
    "steps",
    "wire_bytes",
    "fp32_bytes",
    "wire_fraction",
    "trips",
    "step_seconds_median",
]
# One step more than the profile's warm-up.
TINY = ["digits", "--devices", "4", "--seeds", "0", "--steps", "6", "--per-worker-batch", "4"]


@pytest.fixture
def loose_promotion():
    """The suite is strict, but optax.adamw raises a float to an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def row_of(policy: str, value: float, test_loss: float) -> dict:
    return {
        "policy": policy,
        "metric": "test_accuracy",
        "value": value,
        "test_loss": test_loss,
        "wire_fraction": 0.05,
        "trips": 0,
        "step_seconds_median": 0.01,
    }


def shipped_plan() -> nf_jax.Plan:
    task = vision.TASKS["digits"](vision.digits())
    train, _ = task.load()
    shapes, _ = jax.eval_shape(lambda: task.init(jax.random.key(0), train))
    return nf_jax.plan(nf_jax.Profile.load(vision.digits().profile), shapes, num_workers=8)


@pytest.mark.usefixtures("loose_promotion")
def test_a_job_writes_its_files_and_prints_one_table(tmp_path, capsys):
    vision.main([*TINY, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "summary.json").read_text())

    assert [row["policy"] for row in rows] == ["fp32", "static", "guided"]
    for row in rows:
        assert list(row) == COLUMNS
        assert (row["seed"], row["num_workers"], row["steps"]) == (0, 4, 6)
        assert row["metric"] == "test_accuracy" and 0 <= row["value"] <= 100
        assert row["trips"] == 0 and np.isfinite(row["test_loss"])
        steps = trace.read_trace(tmp_path / f"{row['policy']}-0" / "trace.jsonl")
        assert [step["step"] for step in steps.steps] == list(range(6)) and not steps.truncated
        assert sum(step["wire_bytes"] for step in steps.steps) == row["wire_bytes"]
        assert steps.steps[-1]["test_accuracy"] == pytest.approx(row["value"])

    fp32, static, guided = (row["wire_fraction"] for row in rows)
    assert fp32 == pytest.approx(1, abs=1e-3)
    assert static < 0.05 < guided < 1
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    for word in ("policy", "accuracy", "min - max", "wire/FP32", "trips", "steps/s"):
        assert printed.count(word) >= 1, word
    for text in ("static:", "guided:", "The profile's target"):
        assert text in printed, text


@pytest.mark.usefixtures("loose_promotion")
def test_shard_map_sends_the_same_bytes_as_pmap_and_an_earlier_jobs_traces_go(tmp_path, monkeypatch):
    small = vision.classification(vision.load_digits, vision.MLP((16,), num_classes=10))
    monkeypatch.setitem(vision.TASKS, "digits", lambda _: small)
    old = tmp_path / "static-7" / "trace.jsonl"
    kept = tmp_path / "notes-1" / "trace.jsonl"
    for path in (old, kept):
        path.parent.mkdir()
        path.write_text("{}")
    rows = {}
    for parallel in ("pmap", "shard_map"):
        args = [*TINY, "--policies", "fp32", "--out", str(tmp_path), "--parallel", parallel]
        vision.main(args)
        (rows[parallel],) = json.loads((tmp_path / "summary.json").read_text())
    assert not old.exists() and kept.exists()
    assert rows["pmap"]["wire_bytes"] == rows["shard_map"]["wire_bytes"]
    assert rows["pmap"]["test_loss"] == pytest.approx(rows["shard_map"]["test_loss"], rel=1e-3)


def test_the_shipped_profile_round_trips_and_protects_under_3_percent():
    path = vision.digits().profile
    profile = nf_jax.Profile.load(path)
    assert profile.dumps() == path.read_text()
    assert shipped_plan().protected_share < 0.03  # the plan checks the model's fingerprint
    assert profile.target and profile.target.metric == "test_accuracy"


@pytest.mark.parametrize(
    ("value", "test_loss", "expected"),
    [
        (95.0, 0.1, "static: visibly worse than fp32"),
        (98.0, float("nan"), "static: visibly worse than fp32"),
        (98.0, 0.2, "static: accuracy does not suffer visibly"),
        (98.0, 0.1, "static: no visible difference"),
    ],
)
def test_the_caption_says_what_the_numbers_say(value, test_loss, expected):
    config = dataclasses.replace(vision.digits(), policies=("fp32", "static"), seeds=(0,))
    rows = [row_of("fp32", 98.5, 0.1), row_of("static", value, test_loss)]
    assert jobs.make_caption(config, rows).startswith(expected)


def test_all_policies_see_the_same_examples_and_every_epoch_sees_all():
    train, test = vision.load_digits()
    assert len(train.labels) + len(test.labels) == 1797
    size = len(train.labels)
    whole = [batch.labels for batch in batches.batches(train, 2, (size,), seed=3)]
    again = [batch.labels for batch in batches.batches(train, 2, (size,), seed=3)]
    np.testing.assert_array_equal(whole, again)
    for labels in whole:
        np.testing.assert_array_equal(np.sort(labels), np.sort(train.labels))


def test_processes_share_the_batches_that_one_process_would_see():
    train, _ = vision.load_digits()
    whole = list(batches.batches(train, 3, (4, 5), seed=0))
    parts = [batches.batches(train, 3, (4, 5), seed=0, rows=rows) for rows in ([0, 1], [2, 3])]
    for expected, *shares in zip(whole, *parts, strict=True):
        for name in ("inputs", "labels"):
            joint = np.concatenate([getattr(share, name) for share in shares])
            np.testing.assert_array_equal(joint, getattr(expected, name))


SMALL_JOB = """
import sys
from experiments import vision
small = vision.classification(vision.load_digits, vision.MLP((128,), num_classes=10))
vision.TASKS["digits"] = lambda _: small
vision.main(sys.argv[1:])
"""
DOOMED_JOB = """
import os, signal
import jax
from nf_jax import resume
record = resume.Run.record
def record_or_die(run, state, **extra):
    if run.step == 4 and jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return record(run, state, **extra)
resume.Run.record = record_or_die
"""


@pytest.mark.usefixtures("loose_promotion")
def test_two_processes_that_were_killed_and_resumed_give_the_summary_and_trace_of_one(tmp_path, monkeypatch):
    args = [*TINY, "--devices", "2", "--policies", "static", "--out"]
    several = ["--distributed", "--start-timeout-seconds", "60", "--checkpoint-every", "2"]
    here = [*args, str(tmp_path / "two"), *several]
    with process_groups.started(2, "-c", DOOMED_JOB + SMALL_JOB, *here) as group:
        killed = process_groups.wait(group)
    assert all(ended.code != 0 for ended in killed), killed
    first, _ = process_groups.run(2, "-c", SMALL_JOB, *here, "--resume")
    assert "static, seed 0: goes on after step 4" in first.output
    small = vision.classification(vision.load_digits, vision.MLP((128,), num_classes=10))
    monkeypatch.setitem(vision.TASKS, "digits", lambda _: small)
    vision.main([*args, str(tmp_path / "one")])
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two"))
    for (row,) in (one, two):
        del row["step_seconds_median"]
    assert one == two  # with two workers, sums have the same bits too
    traces = [trace.read_trace(tmp_path / name / "static-0" / "trace.jsonl").steps for name in ("one", "two")]
    for steps in traces:
        for step in steps:
            del step["step_seconds"]
    assert traces[0] == traces[1]
    assert not list(tmp_path.glob("*/*/checkpoints"))


@pytest.mark.parametrize("change", [{"devices": 0}, {"seeds": (1, 1)}, {"policies": ()}])
def test_a_config_that_means_nothing_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(vision.digits(), **change)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--profile", "nope.toml"), "nope.toml"),
        (("--substrate", "{substrate}"), "num_workers=8"),
        (("--seeds", "-1"), "seeds: expected numbers from 0 on"),
    ],
)
def test_a_bad_option_leaves_an_earlier_run_alone(options, said, tmp_path, capsys):
    earlier = tmp_path / "summary.json"
    earlier.write_text("[]")
    substrates.substrate(2).save(tmp_path / "substrate.toml")
    filled = [option.format(substrate=tmp_path / "substrate.toml") for option in options]
    with pytest.raises((SystemExit, ValueError)) as stopped:
        vision.main(["digits", "--out", str(tmp_path), *filled])
    assert said in f"{stopped.value}{capsys.readouterr().err}" and earlier.read_text() == "[]"
