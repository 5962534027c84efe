"""Hyperband over short runs (arXiv 1603.06560), by optuna: TPE proposes, successive halving stops.

The search is a function of its seed alone, also when it is killed and resumed: the sampler of every trial is
seeded anew from the trial's number, optuna's brackets follow from name and number, and a trial that was
not finished is taken out of the journal and run again under its old number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nf_jax.space import Protection, Settings, choose_settings, to_params

REDUCTION_FACTOR = 3
NUM_RANDOM_TRIALS = 8

Score = Callable[[int, float], bool]
"""`(step, score)`: lower is better; returns whether the trial may go on."""


class Trial(NamedTuple):
    """One finished trial.

    Attributes:
      number: from 0 on.
      settings: what was tried.
      is_complete: False: stopped early.
      steps: how far it came.
      score: its last one.
      found: what `evaluate` returned.
    """

    number: int
    settings: Settings
    is_complete: bool
    steps: int
    score: float
    found: dict[str, Any]


def run_search(
    journal: Path,
    *,
    name: str,
    seed: int,
    num_trials: int,
    protections: Sequence[Protection],
    starts: Sequence[Settings],
    min_steps: int,
    max_steps: int,
    evaluate: Callable[[int, Settings, Score], dict[str, Any]],
    on_kept: Callable[[int], None] = lambda count: None,
) -> list[Trial]:
    """Runs trials, or what is left of them.

    Args:
      journal: optuna's journal; trials that it holds are not run again.
      name: of the study.
      seed: of everything random.
      num_trials: in all.
      protections: choices of `Settings.protection`, and of what it holds.
      starts: tried first.
      min_steps: a trial runs at least for so long; the lowest rung.
      max_steps: length of a whole trial.
      evaluate: `(number, settings, score)`: trains, calls `score(step, value)` now and then, stops where
        that returns False; returns JSON-like facts to keep.
      on_kept: told how many trials the journal holds.

    Returns:
      All trials, by number.

    Raises:
      ValueError: optuna is not installed.
    """
    optuna = import_optuna()
    study = _open_study(optuna, journal, name)
    study.pruner = optuna.pruners.HyperbandPruner(min_steps, max_steps, REDUCTION_FACTOR)
    on_kept(len(study.get_trials(deepcopy=False)))
    while (number := len(study.get_trials(deepcopy=False))) < num_trials:
        own_seed = (seed * 1_000_003 + number) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=own_seed, n_startup_trials=NUM_RANDOM_TRIALS)
        if number < len(starts):
            study.enqueue_trial(to_params(starts[number], protections))
        _run_trial(optuna, study, protections, max_steps, evaluate)
    return [_read_trial(trial, protections) for trial in study.get_trials(deepcopy=False)]


def _run_trial(
    optuna: Any,
    study: Any,
    protections: Sequence[Protection],
    max_steps: int,
    evaluate: Callable[[int, Settings, Score], dict[str, Any]],
) -> None:
    trial = study.ask()
    settings = choose_settings(trial, protections)
    last: list[Any] = [0, float("inf"), True]

    def score(step: int, value: float) -> bool:
        trial.report(value, step)
        last[:] = step, value, step >= max_steps or not trial.should_prune()
        return last[2]

    found = evaluate(trial.number, settings, score)
    steps, value, goes_on = last
    if goes_on and steps != max_steps:
        raise ValueError(
            f"expected a report after the last step, {max_steps}, got the last after step {steps}"
        )
    trial.set_user_attr("steps", steps)
    trial.set_user_attr("score", value)
    trial.set_user_attr("found", found)
    state = optuna.trial.TrialState.COMPLETE if goes_on else optuna.trial.TrialState.PRUNED
    study.tell(trial, value if goes_on else None, state)


def _read_trial(trial: Any, protections: Sequence[Protection]) -> Trial:
    kept = trial.user_attrs
    settings = choose_settings(_Recorded(trial.params), protections)
    return Trial(
        trial.number, settings, trial.state.name == "COMPLETE", kept["steps"], kept["score"], kept["found"]
    )


class _Recorded(NamedTuple):
    """Chooses again what was chosen."""

    params: dict[str, Any]

    def suggest_float(self, name: str, *_: Any, **__: Any) -> float:
        return self.params[name]

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self.params[name]


def import_optuna() -> Any:
    """optuna, told to say no more than it must; ValueError, with what to install, where it is missing."""
    try:
        import optuna
    except ImportError:
        raise ValueError('calibration needs optuna: pip install "nf-jax[calibrate]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _open_study(optuna: Any, journal: Path, name: str) -> Any:
    """The study in the journal, without a line or a trial that was cut off."""
    journal.with_name(f"{journal.name}.lock").unlink(
        missing_ok=True
    )  # of a killed process; nobody else writes
    if journal.exists():
        content = journal.read_bytes()
        os.truncate(journal, content.rfind(b"\n") + 1)
        trials = _load(optuna, journal, name).get_trials(deepcopy=False)
        finished = [trial for trial in trials if trial.state.is_finished()]
        if len(finished) < len(trials):
            rest = journal.with_name(f"{journal.name}.new")
            rest.unlink(missing_ok=True)
            _load(optuna, rest, name).add_trials(finished)
            os.replace(rest, journal)
    return _load(optuna, journal, name)


def _load(optuna: Any, journal: Path, name: str) -> Any:
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    lock = JournalFileOpenLock(str(journal))  # works on file systems without links
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal), lock))
    return optuna.create_study(study_name=name, storage=storage, load_if_exists=True)
