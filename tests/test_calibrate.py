"""Laws of calibration: the cheapest profile that holds its promise, the same again, or an honest no."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_job import PARAMS, START, STEPS, W, low_route, make_job, penalty

from nf_jax import calibrate, calibrate_command, calibrate_report, cli, lab
from nf_jax.calibrate import Found, Job, Options
from nf_jax.profile import Profile, Route
from nf_jax.search import Trial
from nf_jax.shortlist import choose_finalists, make_judge, pareto_front
from nf_jax.space import Settings, make_profile, model_of, protection_of
from nf_jax.telemetry import Signals

OPTIONS = Options(trials=12, search_steps=60, seeds=(1, 2, 3), finalists=2)
TESTS = Path(__file__).parent


class Killed(Exception):
    """Takes the place of a kill within the process."""


@pytest.fixture(autouse=True, scope="module")
def no_sync() -> Iterator[None]:
    """Nothing here depends on what a disk has written; hundreds of small waits would add up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def run(folder: Path, job: Job, **changes: Any) -> Found:
    arguments: dict[str, Any] = {"date": "2026-01-02"} | changes
    return calibrate.calibrate(job, OPTIONS, folder, **arguments)


def written(found: Found) -> str:
    assert found.profile is not None
    return found.profile.dumps()


class Count:
    """Counts reports, and is killed at the one of a number."""

    def __init__(self, kill_at: int = 0):
        self.kill_at, self.reports = kill_at, 0

    def __call__(self) -> None:
        self.reports += 1
        if self.reports == self.kill_at:
            raise Killed


@pytest.fixture(scope="module")
def counted(no_sync: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, int]:
    count = Count()
    return run(tmp_path_factory.mktemp("whole"), make_job(on_report=count)), count.reports


@pytest.fixture(scope="module")
def whole(counted: tuple[Found, int]) -> Found:
    return counted[0]


@pytest.fixture(scope="module")
def num_reports(counted: tuple[Found, int]) -> int:
    return counted[1]


# ------------------------------------------------------------------------------------------- the answer


def test_the_cheapest_admissible_finalist_is_chosen(whole):
    by_name = {own.name: own for own in whole.candidates}
    admissible = [own for own in whole.candidates if own.is_admissible(0.003)]
    assert whole.chosen == min(admissible, key=lambda own: own.wire_fraction).name != "bf16"
    assert by_name["bf16"].is_admissible(0.003)
    assert 0.5 < by_name["bf16"].wire_fraction < 0.55
    for own in whole.candidates:
        assert own.gaps == tuple(
            run.outcome.value - exact.outcome.value
            for run, exact in zip(own.runs, whole.exact.runs, strict=True)
        )


def test_what_is_found_is_what_the_formula_of_the_losses_says(whole):
    profile = whole.profile
    assert profile is not None
    assert penalty(profile, STEPS) == 0.002, "nothing that costs more is within tolerance"
    assert low_route(profile) in (Route.SIGN, Route.TERNARY)
    assert profile.regions[1].codec.error_feedback


def test_the_profile_says_where_it_comes_from_and_what_it_promises(whole):
    profile = whole.profile
    assert profile is not None and profile.target is not None and profile.provenance is not None
    reference = np.mean([run.outcome.value for run in whole.exact.runs])
    assert profile.target.reference == pytest.approx(reference, rel=1e-5)
    assert (profile.target.metric, profile.target.tolerance) == ("loss", 0.003)
    chosen = next(own for own in whole.candidates if own.name == whole.chosen)
    assert profile.target.is_met(float(np.mean([run.outcome.value for run in chosen.runs])))
    source = profile.provenance
    assert (source.date, source.num_workers, source.batch_size) == ("2026-01-02", W, 32)
    assert (source.devices, source.optimizer) == ("imagined", "none")
    assert {"jax", "optuna"} <= set(source.versions)
    assert "seeds 1, 2, 3" in (source.notes or "")
    profile.check_model(model_of("synthetic", PARAMS).leaves)
    assert Profile.loads(profile.dumps()) == profile


def test_limits_come_from_the_runs(whole):
    health = whole.profile.health
    assert set(whole.limits) == {
        "loss_spike_deviations",
        "norm_jump_ratio",
        "max_residual_ratio",
        "min_agreement",
    }
    for name, limit in whole.limits.items():
        assert getattr(health, name) == limit.value
    assert 2 * 6 < health.max_residual_ratio < 2 * 8, "drawn around 5 with a deviation of 0.5"


def test_no_trial_is_stopped_in_what_may_be_its_warm_up(whole):
    stopped = [trial.steps for trial in whole.trials if not trial.is_complete]
    assert stopped and min(stopped) >= lab.search_steps(make_job(), OPTIONS) / 3


# ------------------------------------------------------------------------------------------ again, alike


def test_the_same_seeds_make_the_same_files(whole, tmp_path):
    again = run(tmp_path / "again", make_job())
    assert written(again) == written(whole)
    texts = [
        json.dumps(lab.to_plain(calibrate_report.summarize(make_job(), OPTIONS, found)))
        for found in (again, whole)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("part", [0.03, 0.3, 0.5, 0.6, 0.97])
def test_killed_anywhere_it_goes_on_to_the_same_file(part, whole, num_reports, tmp_path):
    first, second, third = Count(round(part * num_reports)), Count(), Count()
    with pytest.raises(Killed):
        run(tmp_path, make_job(on_report=first))
    again = run(tmp_path, make_job(on_report=second))
    assert written(again) == written(whole)
    assert num_reports <= first.reports + second.reports <= num_reports + 10, (
        "one run more than needed at most"
    )
    run(tmp_path, make_job(on_report=third))
    assert third.reports == 0, "nothing is measured twice"


def test_a_folder_of_another_calibration_is_refused(tmp_path):
    lab.open_folder(tmp_path, make_job(), OPTIONS)
    lab.open_folder(tmp_path, make_job(), OPTIONS)
    with pytest.raises(ValueError, match="tolerance differ"):
        lab.open_folder(tmp_path, make_job(tolerance=0.5), OPTIONS)


# --------------------------------------------------------------------------------------------- an honest no


def test_where_nothing_holds_the_answer_is_fp32(tmp_path):
    found = run(tmp_path, make_job(cost=0.1))
    assert found.profile is None and found.chosen is None
    assert found.message.startswith("no admissible profile found: stay on FP32")
    assert "Nearest was" in found.message
    assert not any(own.is_admissible(0.003) for own in found.candidates)
    calibrate_report.plot_pareto(make_job(), OPTIONS, found, tmp_path / "pareto.png")


def test_a_profile_whose_losses_are_not_finite_is_never_chosen(tmp_path):
    found = run(tmp_path, make_job(cost=math.nan))
    assert found.profile is None
    assert all(own.bound == math.inf for own in found.candidates)
    text = json.dumps(lab.to_plain(calibrate_report.summarize(make_job(), OPTIONS, found)), allow_nan=False)
    assert '"nan"' in text
    calibrate_report.plot_pareto(make_job(), OPTIONS, found, tmp_path / "pareto.png")


def test_limits_that_decide_otherwise_are_measured_before_they_are_written(tmp_path):
    """One residual of some 1,700 lies beyond the limit that all make: the runs are not the new profile's."""

    def spoil(signals: Signals, seed: int) -> Signals:
        ratio = signals.residual_ratio.copy()
        if seed == 2 and len(ratio) == 600:
            ratio[300] = np.where(ratio[300] > 0, np.float32(45), ratio[300])
        return signals._replace(residual_ratio=ratio)

    measured: list[Profile] = []
    job = make_job(steps=600, signals=spoil)

    def measure(profile: Profile, **how: Any) -> Any:
        measured.append(profile)
        return job.measure(profile, **how)

    found = run(tmp_path, dataclasses.replace(job, measure=measure))
    limit = found.limits["max_residual_ratio"]
    assert limit.most == 45 and 12 < limit.value < 20
    assert found.profile is not None
    bare = found.profile.model_copy(update={"target": None, "provenance": None})
    assert bare.health.max_residual_ratio == limit.value
    assert measured[-3:] == [bare] * 3


# ------------------------------------------------------------------------------------------------ the bound


def test_the_bound_is_students():
    assert calibrate.upper_bound([1.0, 2.0, 3.0], 0.95) == pytest.approx(2 + 2.919986 / math.sqrt(3))
    assert calibrate.upper_bound([1.0, 1.0], 0.99) == 1.0
    assert calibrate.upper_bound([1.0, math.nan], 0.95) == math.inf


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_the_bound_holds_as_often_as_it_says(confidence):
    gaps = np.random.default_rng(0).normal(0.3, 2.0, (4000, 3))
    held = np.mean([calibrate.upper_bound(row, confidence) >= 0.3 for row in gaps])
    assert abs(held - confidence) < 4 * math.sqrt(confidence * (1 - confidence) / 4000)


# ---------------------------------------------------------------------------------------------- short runs


def test_finalists_are_beaten_by_nobody_and_two_hold_the_one_that_loses_least():
    points = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.booleans()), max_size=12)

    @given(points, st.integers(1, 4))
    def law(points: list[tuple[int, int, bool]], count: int) -> None:
        trials = [
            Trial(i, Settings(), complete, 1, loss + fraction, {"wire_fraction": fraction, "excess": loss})
            for i, (fraction, loss, complete) in enumerate(points)
        ]
        whole = [trial.found for trial in trials if trial.is_complete]
        chosen = [trial.found for trial in choose_finalists(trials, count)]
        assert len(chosen) <= count
        assert bool(chosen) == bool(whole)
        for own in chosen:
            better = [
                other
                for other in whole
                if all(other[key] <= own[key] for key in own) and any(other[key] < own[key] for key in own)
            ]
            assert not better
        if chosen:
            best = min(trial.score for trial in pareto_front(trials))
            assert any(own["wire_fraction"] + own["excess"] == best for own in chosen)
        if whole and count > 1:
            assert min(own["excess"] for own in chosen) == min(other["excess"] for other in whole)
        assert len(pareto_front(trials)) >= len(chosen)

    law()


def test_a_score_weighs_the_bytes_of_the_whole_run_and_the_loss_beyond_tolerance():
    job = make_job(loss_tolerance=0.1)
    model, protection = model_of(job.name, job.params), protection_of(START)
    long, short = (
        make_profile(START, model, protection, Settings(warmup_share=share), {}, 100) for share in (0.5, 0.1)
    )
    reference = {10: 2.0, 100: 1.0}
    exact = 2 * 3 * 4 * (64 * 10 + 128 * 128) // 4
    fractions = [make_judge(job, own, 100, reference)(10, 2.0, 10 * exact)[0] for own in (long, short)]
    assert 0.5 < fractions[0] < 0.6 and 0.1 < fractions[1] < 0.2, "though both are in their warm-up"
    judge = make_judge(job, short, 100, reference)
    fraction, excess, score = judge(10, 2.2, 10 * exact)
    assert (excess, score) == (pytest.approx(0.1), pytest.approx(math.log(fraction)))
    assert judge(10, 2.6, 10 * exact)[2] == pytest.approx(math.log(fraction) + 2)
    assert judge(10, math.inf, 10 * exact)[2] > 1e6
    with pytest.raises(ValueError, match=r"after steps \[10, 100\], as in FP32, got one after 11"):
        judge(11, 2.0, 0)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((10, 20), "last step, 60, got the last after 20"),
        ((10, 10), "11 to 60, got 10"),
        ((61,), "1 to 60, got 61"),
    ],
)
def test_reports_that_do_not_fit_are_an_error_that_says_so(steps, said, tmp_path):
    def measure(profile: Profile, *, report: Callable[..., bool], **_: Any) -> calibrate.Outcome:
        for step in steps:
            report(step, 1.0, step)
        return calibrate.Outcome(1.0, 1.0, 1, 1, 0)

    watched = lab.Lab(make_job(measure=measure), tmp_path, lambda text, steps: None)
    with pytest.raises(ValueError, match=said):
        watched.run("a run", START, 60, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seeds": (1,)}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"search_seed": 1}, "search_seed"),
        ({"trials": 0}, "trials"),
        ({"confidence": 1.0}, "confidence"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        Options(**changes)


def test_what_is_missing_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    count = Count()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match="pip install"):
        run(tmp_path / "none", make_job(on_report=count))
    assert count.reports == 0 and not (tmp_path / "none").exists()


def test_a_start_without_a_region_that_may_go_low_bit_is_refused(tmp_path):
    start = Profile.static("BF16")
    with pytest.raises(ValueError, match="expected a region that may go low-bit"):
        run(tmp_path, make_job(start=start))


# ------------------------------------------------------------------------------------------------ the command

FLAGS = ("--trials", "5", "--search-steps", "60", "--finalists", "1", "--seeds", "1", "2", "--no-plots")


def command(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    own = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "JAX_PLATFORMS": "cpu"} | environment
    line = [sys.executable, "-m", "nf_jax.cli", "calibrate", *map(str, words), *FLAGS]
    return subprocess.run(line, env=own, capture_output=True, text=True, timeout=120, check=False)


def main(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["nf-jax", "calibrate", *map(str, words), *FLAGS])
    monkeypatch.setenv("COLUMNS", "200")
    try:
        cli.main()
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


def test_a_process_that_was_killed_goes_on_to_the_same_file(tmp_path, monkeypatch, capsys):
    job = ("synthetic_job:killed", "--date", "2026-01-02")
    out, folder = tmp_path / "a.toml", tmp_path / "a"
    dead = command(*job, "--out", out, "--folder", folder, KILL_AT_REPORT="75")
    assert dead.returncode == -9, dead.stderr
    assert not out.exists() and (folder / "search.journal").exists()
    assert main(monkeypatch, *job, "--out", out, "--folder", folder) == 0
    assert main(monkeypatch, *job, "--out", tmp_path / "b.toml", "--folder", tmp_path / "b") == 0
    assert out.read_bytes() == (tmp_path / "b.toml").read_bytes()
    shown = capsys.readouterr().out
    assert "chosen" in shown and f"wrote {out}" in shown
    loaded = Profile.load(out)
    assert loaded.provenance is not None
    assert loaded.provenance.measured_by == (
        "nf-jax calibrate synthetic_job:killed --trials 5 --search-steps 60 --seeds 1 2 --finalists 1"
    )


def test_an_honest_no_has_a_code_of_its_own_and_writes_no_profile(tmp_path, monkeypatch, capsys):
    out = tmp_path / "none.toml"
    assert main(monkeypatch, "synthetic_job:hopeless", "--out", out, "--folder", tmp_path / "run") == 3
    assert not out.exists()
    assert "no admissible profile found: stay on FP32" in capsys.readouterr().err
    kept = json.loads((tmp_path / "run" / "calibration.json").read_text())
    assert kept["chosen"] is None and len(kept["trials"]) == 5


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("synthetic_job:nothing", "cannot find it"),
        ("no_such_module:job", "cannot find it"),
        ("synthetic_job:make_columns", "cannot call it"),
        ("synthetic_job:W", "cannot call it"),
    ],
)
def test_a_job_that_cannot_be_made_is_one_line(spec, said, tmp_path, monkeypatch, capsys):
    assert main(monkeypatch, spec, "--out", tmp_path / "a.toml") == 1
    error = capsys.readouterr().err
    assert spec in error and said in error


def test_a_module_may_make_its_job_of_what_its_function_returns(monkeypatch):
    import synthetic_job

    monkeypatch.setattr(synthetic_job, "calibration_job", lambda made: make_job(name=made), raising=False)
    monkeypatch.setattr(synthetic_job, "config", lambda: "made of a config", raising=False)
    assert calibrate_command.make_job("synthetic_job:config").name == "made of a config"
