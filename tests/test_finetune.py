"""The fine-tuning experiment on a few sentences and a tiny pretrained encoder."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from experiments import finetune, runs

jax.devices()  # the suite's eight, before a job asks for fewer

ENCODER = Path(__file__).resolve().parent / "pretrained" / "bert"
SENTENCES = ["a good film\t1", "a bad film\t0", "good\t1", "bad .\t0", "good films\t1", "films, bad\t0"]


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> object:
    monkeypatch.setattr(finetune, "LENGTH", 8)  # the tiny encoder reads no more than 9
    data = tmp_path / "data"
    shutil.copytree(ENCODER, data / "minilm")
    weights = data / "minilm" / "model.safetensors"
    tensors = {name: x for name, x in load_file(weights).items() if not name.startswith("classifier")}
    save_file(tensors, weights)
    (data / "sst2").mkdir()
    for name in ("train.tsv", "dev.tsv"):
        (data / "sst2" / name).write_text("\n".join(["sentence\tlabel", *SENTENCES * 3]) + "\n")
    few = {"steps": 4, "warmup_steps": 1, "per_worker_batch": 2, "devices": 2, "num_evaluations": 2}
    return dataclasses.replace(finetune.sst2(), data=data, out=tmp_path / "out", seeds=(0, 1), **few)


def test_a_job_starts_from_the_pretrained_weights_with_a_classifier_of_its_seed(tiny):
    task = finetune.TASKS["sst2"](tiny)
    train, test = task.load()
    assert train.ids.shape == (18, finetune.LENGTH) and test.mask.dtype == bool
    first, second = (task.init(jax.random.key(seed), train)[0] for seed in (0, 1))
    differing = {
        jax.tree_util.keystr(path)
        for (path, a), b in zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True)
        if (np.asarray(a) != np.asarray(b)).any()
    }
    assert differing == {"['top']['kernel']"}


def test_a_job_learns_its_few_sentences(tiny):
    tiny = dataclasses.replace(tiny, steps=80, learning_rate=1e-2, seeds=(0,), last_evaluations=1)
    with jax.numpy_dtype_promotion("standard"):
        (run,) = runs.run_policy(tiny, finetune.TASKS["sst2"](tiny), "fp32", lambda text: None)
    assert run.row["metric"] == "test_accuracy" and run.row["value"] == pytest.approx(100)
    assert run.row["test_loss"] < 0.5 < run.steps[0]["train_loss"]


def test_the_command_runs_in_a_fresh_process(tiny):
    """Here JAX has started before; there a job has to say first how many devices it wants."""
    flags = {"devices": 2, "steps": 1, "warmup-steps": 0, "num-evaluations": 1, "per-worker-batch": 2}
    arguments = [
        "sst2",
        "--policies",
        "fp32",
        "--seeds",
        "0",
        "--data",
        str(tiny.data),
        "--out",
        str(tiny.out),
    ]
    arguments += [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    script = f"from experiments import finetune; finetune.LENGTH = 8; finetune.main({arguments!r})"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ENCODER.parents[2], timeout=120)
    (row,) = json.loads((tiny.out / "summary.json").read_text())
    assert row["num_workers"] == 2 and row["steps"] == 1


def test_labels_of_other_classes_are_refused_by_file(tiny):
    (tiny.data / "sst2" / "dev.tsv").write_text("sentence\tlabel\nso so\t2\n")
    with pytest.raises(ValueError, match=r"dev\.tsv: expected labels 0 and 1, got 2"):
        finetune.TASKS["sst2"](tiny).load()
