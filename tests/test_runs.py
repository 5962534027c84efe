"""The engine of the experiments: image tasks with batch norm, trouble, runs that are kept."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
import pytest

import nf_jax
from experiments import batches, jobs, kept, runs, vision
from experiments.config import AXIS, Config, Policy
from experiments.data import SETS, Images
from experiments.policies import learning_rates, make_optimizer, rule_of
from experiments.runs import Task
from nf_jax import trace

jax.devices()  # the suite's eight, before a job asks for fewer


@pytest.fixture(autouse=True)
def loose_promotion():
    """The suite is strict, but optax raises a float to an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def write_images(data: Path, num: int = 40) -> None:
    """A folder in CIFAR-10's format: every class is one brightness, so that a network learns it at once."""
    rng = np.random.default_rng(0)
    for file in SETS["cifar10"].files:
        labels = rng.integers(0, 10, num).astype(np.uint8)
        pixels = np.repeat((labels * 25)[:, None], 3072, axis=1)
        path = data / "cifar10" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(np.concatenate([labels[:, None], pixels.astype(np.uint8)], 1).tobytes())


def tiny(**changes: object) -> Config:
    few = {"steps": 4, "warmup_steps": 1, "per_worker_batch": 4, "devices": 2, "num_evaluations": 2}
    return dataclasses.replace(vision.cifar10(), seeds=(0,), last_evaluations=2, **{**few, **changes})


def toy_task(count: list[int]) -> Task:
    """Digits by a small network; counts how often the step was traced."""
    small = vision.classification(vision.load_digits, vision.MLP((16,), num_classes=10))

    def loss_fn(params: object, batch: object) -> object:
        count[0] += 1
        return small.loss_fn(params, batch)

    return small._replace(loss_fn=loss_fn)


def ignore(text: str) -> None:
    del text


def test_an_image_job_trains_tests_and_counts_batch_norms_bytes(tmp_path):
    write_images(tmp_path / "data")
    config = tiny(policies=("fp32",), data=tmp_path / "data", out=tmp_path / "out")
    task = vision.TASKS["cifar10"](config)
    (run,) = runs.run_policy(config, task, "fp32", ignore)
    assert [("test_accuracy" in step) for step in run.steps] == [False, True, False, True]
    last = [step["test_accuracy"] for step in run.steps if "test_accuracy" in step]
    assert run.row["value"] == pytest.approx(np.mean(last))
    assert run.row["metric"] == "test_accuracy" and run.row["workload"] == "cifar10"
    params, batch_stats = jax.eval_shape(lambda: task.init(jax.random.key(0), task.load()[0]))
    num_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves((params, batch_stats)))
    # An all-reduce between two workers sends each of them its own size once.
    assert run.row["fp32_bytes"] == 4 * num_bytes


def test_the_whole_test_set_counts_alike_however_it_is_cut(tmp_path):
    write_images(tmp_path / "data")
    config = tiny(data=tmp_path / "data", policies=("fp32",), out=tmp_path / "out")
    task = vision.TASKS["cifar10"](config)
    train, test = task.load()
    params, batch_stats = task.init(jax.random.key(0), train)
    whole, cut = (
        runs.test_scores(task._replace(test_size=size), task.test_fn, params, batch_stats, test)
        for size in (40, 17)
    )
    assert whole.keys() == {"test_loss", "test_accuracy"}
    for name, value in whole.items():
        assert cut[name] == pytest.approx(value, rel=1e-5)


def test_crops_and_flips_keep_the_image_and_depend_on_the_generator_alone():
    rng = np.random.default_rng(0)
    examples = Images(rng.integers(1, 255, (16, 32, 32, 3)).astype(np.uint8), np.arange(16, dtype=np.int32))
    first, again, other = (vision.crop_and_flip(np.random.default_rng(s), examples) for s in (1, 1, 2))
    np.testing.assert_array_equal(first.images, again.images)
    assert (first.images != other.images).any() and (first.labels == examples.labels).all()
    for before, after in zip(examples.images, first.images, strict=True):
        # The middle of the crop is in the original, mirrored or not.
        core = after[8:24, 8:24]
        views = [before, before[:, ::-1]]
        assert any(
            (view[8 + dy : 24 + dy, 8 + dx : 24 + dx] == core).all()
            for view in views
            for dy in range(-4, 5)
            for dx in range(-4, 5)
        )


@pytest.mark.parametrize("steps", [10, 100])
def test_trouble_strikes_from_the_middle_for_twenty_steps(steps):
    calm, struck = (
        dataclasses.replace(vision.digits(), steps=steps, trouble=trouble)
        for trouble in ("none", "learning_rate")
    )
    before, after = learning_rates(calm, 1e-3), learning_rates(struck, 1e-3)
    factors = [float(np.divide(after(step), before(step))) for step in range(steps)]
    expected = [10.0 if steps // 2 <= step < steps // 2 + 20 else 1.0 for step in range(steps)]
    assert factors == pytest.approx(expected)


def test_shuffled_labels_strike_every_process_alike_and_nothing_else():
    config = dataclasses.replace(vision.digits(), steps=60, trouble="labels", devices=4)
    calm = dataclasses.replace(config, trouble="none")
    task = vision.TASKS["digits"](config)
    train, _ = task.load()
    pairs = zip(
        runs.worker_batches(config, task, train, 0), runs.worker_batches(calm, task, train, 0), strict=True
    )
    struck = []
    for step, (now, then) in enumerate(pairs):
        np.testing.assert_array_equal(now.inputs, then.inputs)
        np.testing.assert_array_equal(np.sort(now.labels), np.sort(then.labels))
        if (now.labels != then.labels).any():
            struck.append(step)
    assert struck == list(range(30, 50))

    def shuffled(rows: list[int]) -> np.ndarray:
        data = batches.batches(train, 2, (4, 16), 0, rows)
        return np.stack([b.labels for b in batches.changed(data, vision.spoil_labels, None, 0, rows)])

    joint = np.concatenate([shuffled([0, 1]), shuffled([2, 3])], axis=1)
    np.testing.assert_array_equal(joint, shuffled([0, 1, 2, 3]))


def test_a_resumed_job_keeps_its_finished_runs_and_trains_the_others(tmp_path):
    traced = [0]
    config = dataclasses.replace(
        vision.digits(), steps=3, devices=2, num_evaluations=1, seeds=(0,), out=tmp_path
    )
    (first,) = runs.run_policy(config, toy_task(traced), "fp32", ignore)
    again = dataclasses.replace(config, resume=True, seeds=(0, 1))
    before, ticks = traced[0], []
    old, new = runs.run_policy(again, toy_task(traced), "fp32", ticks.append)
    assert old == first and new.row["seed"] == 1
    assert traced[0] > before  # only for the second seed
    assert len(ticks) == 6
    other = dataclasses.replace(again, learning_rate=0.5)
    with pytest.raises(ValueError, match=r"resume: expected .* of this config.*\n  learning_rate"):
        list(runs.run_policy(other, toy_task(traced), "fp32", ignore))
    path = tmp_path / "fp32-0" / "run.json"
    assert json.loads(path.read_text())["row"] == first.row


class Killed(Exception):
    """Stands for whatever ends a job in the middle of a run."""


@pytest.mark.parametrize("policy", ["guided", "powersgd2", "dgc", "accordion"])
def test_a_job_that_ended_inside_a_run_goes_on_from_its_checkpoint(tmp_path, policy):
    """The result is that of the run that nothing ended; only what follows the checkpoint is trained again."""
    profile = nf_jax.Profile.static(nf_jax.Route.SIGN)
    profile.save(tmp_path / "signs.toml")
    config = dataclasses.replace(
        vision.digits(), steps=8, devices=2, num_evaluations=4, seeds=(1,), checkpoint_every=3
    )
    config = dataclasses.replace(config, profile=tmp_path / "signs.toml", policies=(policy,))
    whole, ended = (dataclasses.replace(config, out=tmp_path / name) for name in ("whole", "ended"))
    task = toy_task([0])
    (expected,) = runs.run_policy(whole, task, policy, ignore)
    ticks: list[str] = []

    def kill(text: str) -> None:
        ticks.append(text)
        if len(ticks) == 5:
            raise Killed

    with pytest.raises(Killed):
        list(runs.run_policy(ended, task, policy, kill))
    again = dataclasses.replace(ended, resume=True)
    kept.check_resumed(again)
    assert kept.describe_resumed(again) == f"{policy}, seed 1: goes on after step 3"
    ticks.clear()
    (run,) = runs.run_policy(again, task, policy, ticks.append)
    assert [text.endswith("trained earlier") for text in ticks] == [True] * 3 + [False] * 5
    assert kept.describe_resumed(again) == f"{policy}, seed 1: finished earlier"
    assert untimed(run.steps) == untimed(expected.steps)
    assert untimed([run.row]) == untimed([expected.row])
    traces = [trace.read_trace(out / f"{policy}-1" / "trace.jsonl").steps for out in (whole.out, ended.out)]
    assert untimed(traces[0]) == untimed(traces[1])
    assert not any(path.exists() for path in tmp_path.glob("*/*/checkpoints"))
    other = dataclasses.replace(again, weight_decay=0.5)
    with pytest.raises(ValueError, match=r"of this config.*\n  weight_decay: there 0.0001, here 0.5"):
        kept.check_resumed(other)


def test_an_unfinished_run_of_another_config_is_refused_before_anything_is_trained(tmp_path):
    config = dataclasses.replace(vision.digits(), steps=3, devices=2, seeds=(0,), out=tmp_path)

    def kill(text: str) -> None:
        raise Killed(text)

    with pytest.raises(Killed):
        list(runs.run_policy(config, toy_task([0]), "fp32", kill))
    kept.check_resumed(dataclasses.replace(config, resume=True))
    assert "starts anew" in kept.describe_resumed(config)
    with pytest.raises(ValueError, match=r"learning_rate: there .*, here 0.5"):
        kept.check_resumed(dataclasses.replace(config, resume=True, learning_rate=0.5))


def test_every_process_forgets_what_an_earlier_job_left_on_its_disk(tmp_path, monkeypatch):
    """Or one of them would go on from an old checkpoint while the others begin."""
    config = dataclasses.replace(vision.digits(), out=tmp_path)
    old = tmp_path / "guided-0" / "checkpoints" / "300"
    old.mkdir(parents=True)
    monkeypatch.setattr("nf_jax.cluster.is_first", lambda: False)
    monkeypatch.setattr(jobs, "run_policies", lambda *args, **kwargs: {})
    jobs.run_here(dataclasses.replace(config, resume=True), toy_task([0]))
    assert old.exists()
    jobs.run_here(config, toy_task([0]))
    assert not old.exists()


def test_who_begins_anew_over_a_stopped_run_is_told(tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(vision.digits(), out=tmp_path, policies=("fp32", "guided"), seeds=(0,))
    (tmp_path / "guided-0" / "checkpoints" / "40").mkdir(parents=True)
    monkeypatch.setattr(jobs, "run_policies", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        jobs.run_here(config, toy_task([0]))
    said = capsys.readouterr().out
    assert said.startswith("guided, seed 0: replaces a run that stopped after step 40") and "fp32" not in said


def test_a_folder_that_processes_do_not_share_has_no_checkpoints_and_is_not_resumed(tmp_path, monkeypatch):
    config = dataclasses.replace(vision.digits(), out=tmp_path, checkpoint_every=5)
    assert kept.open_folder(config) == config
    monkeypatch.setattr("nf_jax.processes.is_shared", lambda folder: False)
    assert kept.open_folder(config).checkpoint_every == 0
    with pytest.raises(ValueError, match=r"resume: expected --out on a file system that all processes share"):
        kept.open_folder(dataclasses.replace(config, resume=True))


def untimed(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: step[name] for name in step if "seconds" not in name} for step in steps]


def test_every_policy_has_a_rule_and_a_style():
    config = dataclasses.replace(vision.digits(), devices=4)
    params = jax.eval_shape(lambda: toy_task([0]).init(jax.random.key(0), vision.load_digits()[0])[0])
    for policy in get_args(Policy):
        if policy == "guided":
            continue  # its profile is of another model
        rule = rule_of(config, policy, params)
        assert nf_jax.plan(rule.profile, params, 4).num_lanes >= 1
        jax.eval_shape(make_optimizer(config, rule, policy).init, params)
    assert set(jobs.STYLES) == set(get_args(Policy))


@pytest.mark.parametrize("policy", ["signsgd", "dgc"])
def test_rules_that_bring_their_own_steps_are_followed_by_none(policy):
    config = dataclasses.replace(
        vision.digits(), optimizer="sgd", devices=1, weight_decay=0.0, clip_norm=1e9, learning_rate=0.5
    )
    params = {"kernel": jax.numpy.ones((8, 8))}
    tx = make_optimizer(config, rule_of(config, policy, params), policy)

    @functools.partial(jax.pmap, axis_name=AXIS)
    def two_steps(gradients: Any, state: Any) -> Any:
        updates, state = tx.update(gradients, state, params)
        return updates, tx.update(gradients, state, params)[0]

    stack = lambda tree: jax.tree.map(lambda leaf: jax.numpy.asarray(leaf)[None], tree)  # noqa: E731
    gradients = {"kernel": np.random.default_rng(0).normal(size=(1, 8, 8)).astype(np.float32)}
    first, second = (np.asarray(u["kernel"]) for u in two_steps(gradients, stack(tx.init(params))))
    if policy == "signsgd":
        # A step's length is the learning rate, whatever the gradient and the step before.
        np.testing.assert_allclose(np.abs(first), config.signsgd_learning_rate, rtol=1e-3)
        np.testing.assert_allclose(first, second, rtol=1e-2)
    else:
        # Without momentum after it: what is not sent does not move.
        assert ((first == 0) | (first == -0.5 * gradients["kernel"])).mean() > 0.9
