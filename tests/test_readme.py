"""The README is true: its quickstart runs, its files exist, its commands are those that CI runs."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from nf_jax import Candidate, Profile, plan
from nf_jax.report import explain_step
from nf_jax.shadow_findings import find_out, sentence
from nf_jax.telemetry import Reason

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def fenced(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_quickstart_runs_and_sends_few_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    quickstart, explained, beside, loop = fenced("python")
    names: dict[str, Any] = {}
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw needs it
        exec(compile(quickstart, "README.md", "exec"), names)
    percent = float(capsys.readouterr().out.split("%")[0])
    assert 3 < percent < 5
    exec(compile(explained, "README.md", "exec"), names)
    region, lane = capsys.readouterr().out.splitlines()
    fresh = names["nf_jax"].step_info(names["tx"].init({"kernel": jax.numpy.zeros((512, 512))}))
    assert explain_step(fresh, ["all"], names["plan"].lanes)[1] == lane  # what the first step will do
    assert "(trips: 0)" in region and lane.endswith("SIGN, the profile's current phase says so")

    monkeypatch.setattr("nf_jax.candidates.DEFAULT_CANDIDATES", (Candidate.of("BF16"),))  # the fastest
    monkeypatch.chdir(tmp_path)
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(beside, "README.md", "exec"), names)
    assert sentence(find_out(tmp_path / "shadow.jsonl")).startswith("safe to admit: middle (BF16). Saves ")

    names |= {"time": time, "batches": range(4), "step": lambda params, state, batch, load: (params, state)}
    exec(compile(loop, "README.md", "exec"), names)
    assert names["load"] == 0.0  # no FP32 step to compare with


def test_the_profile_by_hand_is_good_and_does_what_its_comments_say(tmp_path: Path):
    (text,) = fenced("toml")
    (tmp_path / "mine.toml").write_text(text)
    profile = Profile.load(tmp_path / "mine.toml")
    body = profile.regions[1]
    assert (body.codec.error_feedback, body.codec.server_error_feedback) == (True, True)
    shapes = {name: {"kernel": jax.ShapeDtypeStruct((512, 512), "float32")} for name in ("head", "body")}
    lanes = plan(profile, shapes, num_workers=8).lanes
    assert dict(zip(lanes.regions, lanes.fixed, strict=True)) == {0: Reason.PROTECTED, 1: None}


def test_every_file_that_is_named_exists():
    named = set(re.findall(r"`((?:nf_jax|tests|experiments|profiles)/[\w/.-]+\.\w+)`", README))
    assert named
    assert [path for path in sorted(named) if not (ROOT / path).is_file()] == []


def test_two_commands_do_their_own_set_up():
    main_job, tests = (block.strip() for block in fenced("bash")[:2])
    assert main_job == 'pip install -e ".[experiments]" && python -m experiments.vision digits'
    assert tests == 'pip install -e ".[test]" && pytest'
