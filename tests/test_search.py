"""Laws of the search: it finds what is good, stops what is not, and a kill changes nothing."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_job import START

from nf_jax.search import Score, Trial, run_search
from nf_jax.space import STARTS, Settings, protection_of

MAX_STEPS, EVERY, NUM_TRIALS = 27, 3, 14
OWN = protection_of(START)
FREE = OWN._replace(routes={})


def loss_of(settings: Settings) -> float:
    """Least for error feedback at both ends, `drop`, a warm-up of 2 %, and the head held or protected."""
    loss = abs(math.log(settings.warmup_share / 0.02))
    loss += 3 * (settings.protection == 0 and "head" not in settings.held)
    return loss + 2 * (not settings.error_feedback) + (settings.on_fallback == "drain")


class Watched:
    """Evaluates, and is killed at the report of a number."""

    def __init__(self, kill_at: int = 0):
        self.kill_at, self.reports, self.numbers = kill_at, 0, list[int]()

    def __call__(self, number: int, settings: Settings, score: Score) -> dict[str, Any]:
        self.numbers.append(number)
        for step in range(EVERY, MAX_STEPS + 1, EVERY):
            self.reports += 1
            if self.reports == self.kill_at:
                raise KeyboardInterrupt
            if not score(step, loss_of(settings) + 1 / step):
                return {"stopped_at": step}
        return {"stopped_at": None}


def run(folder: Path, evaluate: Callable[..., dict[str, Any]], seed: int = 0, **changes: Any) -> list[Trial]:
    folder.mkdir(exist_ok=True)
    arguments: dict[str, Any] = {
        "name": "test",
        "seed": seed,
        "num_trials": NUM_TRIALS,
        "protections": [FREE, OWN],
        "starts": STARTS,
        "min_steps": EVERY,
        "max_steps": MAX_STEPS,
        "evaluate": evaluate,
    }
    return run_search(folder / "journal", **arguments | changes)


@pytest.fixture(autouse=True, scope="module")
def no_sync() -> Iterator[None]:
    """Nothing here depends on what a disk has written; hundreds of small waits would add up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def whole(no_sync: None, tmp_path_factory: pytest.TempPathFactory) -> list[Trial]:
    return run(tmp_path_factory.mktemp("whole"), Watched())


def test_trials_start_with_those_given_and_stop_where_they_are_not_worth_it(whole):
    assert [trial.number for trial in whole] == list(range(NUM_TRIALS))
    assert [trial.settings for trial in whole[: len(STARTS)]] == list(STARTS)
    stopped = [trial for trial in whole if not trial.is_complete]
    assert stopped and len(stopped) < NUM_TRIALS
    for trial in whole:
        assert trial.found["stopped_at"] == (None if trial.is_complete else trial.steps)
        assert trial.score == pytest.approx(loss_of(trial.settings) + 1 / trial.steps)
    best = min(whole, key=lambda trial: loss_of(trial.settings))
    assert best.is_complete, "the best is never stopped: nothing at its rungs beats it"


def test_it_finds_better_than_chance_and_than_where_it_started(tmp_path):
    found = run(tmp_path, Watched(), num_trials=40)
    early, late = found[:20], found[20:]
    typical = [sorted(loss_of(trial.settings) for trial in part)[10] for part in (early, late)]
    assert typical[1] < typical[0]
    assert min(loss_of(t.settings) for t in found) < min(loss_of(s) for s in STARTS) - 0.9


def test_it_finds_which_region_not_to_send_low_bit(tmp_path):
    found = run(tmp_path, Watched(), num_trials=30, protections=[FREE], starts=STARTS[:1])
    best = sorted(found, key=lambda trial: loss_of(trial.settings))[:5]
    assert all(trial.settings.held == ("head",) for trial in best)
    late = [trial.settings.held for trial in found[20:]]
    assert late.count(("head",)) > len(late) // 2


def test_the_same_seed_makes_the_same_trials_and_another_seed_others(whole, tmp_path):
    assert run(tmp_path / "again", Watched()) == whole
    assert run(tmp_path / "other", Watched(), seed=1) != whole


@pytest.mark.parametrize("kill_at", [1, 10, 11, 47])
def test_a_killed_search_goes_on_as_if_nothing_had_happened(kill_at, whole, tmp_path):
    first = Watched(kill_at)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, first)
    with (tmp_path / "journal").open("ab") as journal:
        journal.write(b'{"op_code": 4, "torn')
    (tmp_path / "journal.lock").touch()
    kept: list[int] = []
    second = Watched()
    assert run(tmp_path, second, on_kept=kept.append) == whole
    assert kept == [first.numbers[-1]]
    assert second.numbers == list(range(first.numbers[-1], NUM_TRIALS))


def test_a_finished_search_runs_nothing(whole, tmp_path):
    run(tmp_path, Watched())
    again = Watched()
    assert run(tmp_path, again) == whole
    assert again.numbers == []


def test_scores_may_be_huge(tmp_path):
    def evaluate(number: int, settings: Settings, score: Score) -> dict[str, Any]:
        for step in range(EVERY, MAX_STEPS + 1, EVERY):
            if not score(step, 1e6 if number % 2 else 1.0):
                break
        return {}

    assert {trial.score for trial in run(tmp_path, evaluate)} == {1.0, 1e6}


def test_a_report_after_the_last_step_is_asked_for(tmp_path):
    def evaluate(number: int, settings: Settings, score: Score) -> dict[str, Any]:
        score(EVERY, 1.0)
        return {}

    with pytest.raises(
        ValueError, match="expected a report after the last step, 27, got the last after step 3"
    ):
        run(tmp_path, evaluate)


def test_without_optuna_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ValueError, match=r'pip install "nf-jax\[calibrate\]"'):
        run(tmp_path, Watched())
