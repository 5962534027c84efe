"""The language-model experiment on a tiny text and a tiny decoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nf_jax
from experiments import gpt_neox, lm, runs

jax.devices()  # the suite's eight, before a job asks for fewer


def write_text(data: Path, num: int = 40) -> None:
    (data / "text").mkdir(parents=True)
    for name in ("train.txt", "valid.txt", "test.txt"):
        (data / "text" / name).write_text("the quick brown fox jumps over the lazy dog. " * num)


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> object:
    write_text(tmp_path / "data")
    monkeypatch.setitem(gpt_neox.CONFIGS, "tiny", gpt_neox.NeoXConfig(1, 16, 32, 2, vocab_size=256))
    few = {"steps": 4, "warmup_steps": 1, "per_worker_batch": 2, "devices": 2, "num_evaluations": 2}
    return dataclasses.replace(
        lm.text(), model="tiny", data=tmp_path / "data", out=tmp_path / "out", seeds=(0,), **few
    )


def test_windows_predict_every_byte_but_the_first_once():
    ids = np.arange(3 * lm.LENGTH + 5)
    windows = lm.cut_windows(ids)
    np.testing.assert_array_equal(windows.ids[:, 1:].ravel(), ids[1 : 3 * lm.LENGTH + 1])
    np.testing.assert_array_equal(windows.ids[:, 0], ids[[0, lm.LENGTH, 2 * lm.LENGTH]])
    some = lm.some_windows(windows, 2)
    np.testing.assert_array_equal(some.ids, windows.ids[[0, 2]])
    with pytest.raises(ValueError, match="expected more than"):
        lm.cut_windows(ids[: lm.LENGTH])


def test_a_job_trains_and_reports_nats_per_byte(tiny):
    with jax.numpy_dtype_promotion("standard"):
        (run,) = runs.run_policy(tiny, lm.TASKS["text"](tiny), "fp32", lambda text: None)
    # Bytes are the tokens, and a decoder that knows nothing is as good as 256 equal odds.
    assert run.row["metric"] == "test_loss_per_byte" and run.row["value"] == run.row["test_loss"]
    assert run.steps[0]["train_loss"] == pytest.approx(np.log(256), abs=0.1)
    assert run.row["value"] < np.log(256)


def test_the_loss_is_that_of_the_next_byte(tiny):
    task = lm.TASKS["text"](tiny)
    train, _ = task.load()
    params, _ = task.init(jax.random.key(0), train)
    batch = lm.Windows(train.ids[:3])
    model = gpt_neox.NeoX(gpt_neox.CONFIGS["tiny"])
    logits = model.apply({"params": params}, jnp.asarray(batch.ids[:, :-1]))
    odds = jax.nn.log_softmax(jnp.asarray(logits))
    picked = np.take_along_axis(np.asarray(odds), batch.ids[:, 1:, None], axis=-1)
    assert float(task.loss_fn(params, batch)) == pytest.approx(-picked.mean(), rel=1e-5)


def test_trouble_shuffles_tokens_within_their_windows():
    windows = lm.Windows(np.arange(2 * 65).reshape(2, 65).astype(np.int32))
    spoiled = lm.spoil_windows(np.random.default_rng(0), windows)
    assert (spoiled.ids != windows.ids).any()
    np.testing.assert_array_equal(np.sort(spoiled.ids), windows.ids)


def test_an_unknown_size_is_refused_by_name(tiny):
    with pytest.raises(ValueError, match=r"model: expected one of .*2m"):
        lm.TASKS["text"](dataclasses.replace(tiny, model="3m"))


def test_the_shipped_profile_is_of_the_default_model_and_a_tenth_of_the_bytes():
    config = lm.text()
    shapes = gpt_neox.param_shapes(gpt_neox.NeoX(gpt_neox.CONFIGS[config.model]))
    profile = nf_jax.Profile.load(config.profile)
    plan = nf_jax.plan(profile, shapes, config.num_workers)  # the plan checks the fingerprint
    last = profile.route_table[-1][1]
    lanes = zip(plan.lanes.regions, plan.lanes.groups, strict=True)
    routes = [last[region] if group >= 0 else 0 for region, group in lanes]
    assert plan.wire_bytes(routes) / plan.fp32_bytes < 0.1
    assert profile.dumps() == config.profile.read_text()
