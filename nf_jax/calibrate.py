"""Finds the operating profile of a job: the fewest bytes at which it still trains as FP32 does.

1. A shadow run, if the job has one: regions, and which of them are safe (`protections.py`).
2. FP32 runs of full length, one per seed: the reference, and health limits from their own signals.
3. Hyperband over short runs of another seed: bytes against held-out loss (`search.py`).
4. Finalists: BF16 and the best of the search's Pareto front, at full length, paired with FP32 by seed.
5. The cheapest whose one-sided bound on the loss of quality is within tolerance; limits for its residuals and
   votes from its own runs. If none is: stay on FP32.

Everything measured is kept in a folder: what was killed goes on, and ends with the same file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from nf_jax import thresholds
from nf_jax.columns import read_columns
from nf_jax.job import Job, Measure, Outcome, Report
from nf_jax.lab import Lab, Options, Run, Tell, find_versions, num_steps, open_folder, search_steps
from nf_jax.profile import Profile, Provenance, Target
from nf_jax.protections import find_protections
from nf_jax.replay import replay
from nf_jax.search import Trial, import_optuna
from nf_jax.shortlist import Makers, choose_finalists, search_short
from nf_jax.space import BF16, Settings, describe, make_profile, model_of
from nf_jax.thresholds import Limit

# What jobs and calls are written with, from one place.
__all__ = ["Found", "Job", "Measure", "Options", "Outcome", "Report", "calibrate", "num_steps"]

NOTHING_FOUND = "no admissible profile found: stay on FP32"


class Candidate(NamedTuple):
    """A profile at full length.

    Attributes:
      name: "fp32", "bf16" or "trial N".
      settings: None for FP32.
      profile: what ran.
      runs: one per seed.
      gaps: how much worse than FP32 each was, in the metric's unit; below 0: better.
      bound: what their mean lies below, at the confidence asked for.
      wire_fraction: bytes sent over bytes in FP32, mean over seeds.
    """

    name: str
    settings: Settings | None
    profile: Profile
    runs: tuple[Run, ...]
    gaps: tuple[float, ...]
    bound: float
    wire_fraction: float

    def is_admissible(self, tolerance: float) -> bool:
        return self.bound <= tolerance and self.wire_fraction < 1


class Found(NamedTuple):
    """What a calibration found.

    Attributes:
      profile: the profile to use; None: stay on FP32.
      message: that, in a sentence.
      exact: FP32 at full length.
      candidates: the finalists, BF16 first.
      chosen: the name of one of them, or None.
      trials: all of the search's, BF16's short run not among them.
      short: name -> (wire fraction, relative excess of the held-out loss) of FP32's and BF16's short runs.
      limits: health limits found, with what they come from.
    """

    profile: Profile | None
    message: str
    exact: Candidate
    candidates: tuple[Candidate, ...]
    chosen: str | None
    trials: list[Trial]
    short: dict[str, tuple[float, float]]
    limits: dict[str, Limit]


def calibrate(
    job: Job,
    options: Options,
    folder: Path,
    *,
    measured_by: str = "nf_jax.calibrate",
    date: str | None = None,
    tell: Tell = lambda text, steps: None,
) -> Found:
    """Finds a profile for a job; see the top of this file.

    Args:
      job: what is trained.
      options: how thoroughly to look.
      folder: keeps what was measured. One that holds part of the same calibration is gone on with.
      measured_by: for the profile's provenance.
      date: likewise, ISO 8601; by default the day on which the calibration began.
      tell: told about progress; `num_steps` says of how many steps at most.

    Returns:
      What was found.

    Raises:
      ValueError: the folder holds another calibration, optuna is missing, the job's reports do not fit.
    """
    import_optuna()  # before hours of runs rather than after them
    began = open_folder(folder, job, options)
    lab = Lab(job, folder, tell)
    protections = find_protections(job, lab, options)
    model = model_of(job.name, job.params)
    exact = measure_exact(lab, options, make_profile(job.start, model, protections[0], None, {}, job.steps))
    traces = [read_columns(run.trace) for run in exact.runs if run.trace]
    limits = thresholds.find_limits(traces, job.start.health, thresholds.EXACT_RULES)
    makers = Makers(job, model, protections, {name: limit.value for name, limit in limits.items()})

    trials, short = search_short(lab, options, makers)
    finalists = {"bf16": BF16} | {
        f"trial {trial.number}": trial.settings for trial in choose_finalists(trials, options.finalists)
    }
    candidates = tuple(
        measure_candidate(lab, options, exact, name, settings, makers.profile(settings, job.steps))
        for name, settings in finalists.items()
    )
    chosen, own = choose(lab, options, exact, candidates)
    limits |= own
    found = Found(None, NOTHING_FOUND, exact, candidates, None, trials, short, limits)
    if chosen is None:
        found = found._replace(message=f"{NOTHING_FOUND}. {_describe_nearest(job, candidates)}")
    else:
        provenance = _provenance(job, options, exact, chosen, measured_by, date or began)
        target = _target(job, exact)
        profile = chosen.profile.model_copy(update={"target": target, "provenance": provenance})
        found = found._replace(profile=profile, chosen=chosen.name, message=_describe_chosen(job, chosen))
    return found


# ------------------------------------------------------------------------------------------ full length


def measure_exact(lab: Lab, options: Options, profile: Profile) -> Candidate:
    """FP32 at full length."""
    runs = lab.run_full("fp32", profile, options.seeds)
    for seed, run in zip(options.seeds, runs, strict=True):
        if not math.isfinite(run.outcome.value):
            value = run.outcome.value
            raise ValueError(f"fp32, seed {seed}: expected a finite {lab.job.metric}, got {value}")
    return Candidate("fp32", None, profile, runs, (0.0,) * len(runs), 0.0, _wire_fraction(runs))


def measure_candidate(
    lab: Lab, options: Options, exact: Candidate, name: str, settings: Settings | None, profile: Profile
) -> Candidate:
    """A finalist at full length, paired with FP32 by seed."""
    runs = lab.run_full(name, profile, options.seeds)
    sign = 1 if lab.job.higher_is_better else -1
    pairs = zip(exact.runs, runs, strict=True)
    gaps = tuple(sign * (a.outcome.value - b.outcome.value) for a, b in pairs)
    return Candidate(
        name, settings, profile, runs, gaps, upper_bound(gaps, options.confidence), _wire_fraction(runs)
    )


def upper_bound(gaps: Sequence[float], confidence: float) -> float:
    """What the mean gap lies below, one-sided, by Student's t; inf where a gap is not finite."""
    if not np.isfinite(gaps).all():
        return math.inf
    from scipy.special import stdtrit  # slow to import, and only needed here

    error = float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
    return float(np.mean(gaps)) + float(stdtrit(len(gaps) - 1, confidence)) * error


def _wire_fraction(runs: Iterable[Run]) -> float:
    return float(np.mean([run.outcome.wire_bytes / run.outcome.fp32_bytes for run in runs]))


def choose(
    lab: Lab, options: Options, exact: Candidate, candidates: Sequence[Candidate]
) -> tuple[Candidate | None, dict[str, Limit]]:
    """The cheapest that is admissible with limits of its own, and those limits."""
    tolerance = lab.job.tolerance
    admissible = [own for own in candidates if own.is_admissible(tolerance)]
    for candidate in sorted(admissible, key=lambda own: own.wire_fraction):
        traces = [read_columns(run.trace) for run in candidate.runs if run.trace]
        limits = thresholds.find_limits(traces, candidate.profile.health, thresholds.LOSSY_RULES)
        new = {name: limit.value for name, limit in limits.items()}
        health = candidate.profile.health.model_copy(update=new)
        profile = candidate.profile.model_copy(update={"health": health})
        if decides_alike(profile, traces):  # so these runs are the new profile's runs too
            return candidate._replace(profile=profile), limits
        again = measure_candidate(lab, options, exact, candidate.name, candidate.settings, profile)
        if again.is_admissible(tolerance):
            return again, limits
    return None, {}


def decides_alike(profile: Profile, traces: Iterable[Any]) -> bool:
    """Whether a profile that differs in its limits alone would have decided the same at every step."""
    changed = (own._replace(header=own.header | {"profile": profile.dumps()}) for own in traces)
    return all(replay(columns).first_difference is None for columns in changed)


# ---------------------------------------------------------------------------------------------- results


def _describe_chosen(job: Job, chosen: Candidate) -> str:
    settings = "" if chosen.settings is None else f" ({describe(chosen.settings)})"
    return f"{chosen.name}{settings}: {_describe_cost(job, chosen)}."


def _describe_nearest(job: Job, candidates: Sequence[Candidate]) -> str:
    nearest = min(candidates, key=lambda own: own.bound)
    return f"Nearest was {nearest.name}: {_describe_cost(job, nearest)}. More seeds narrow the bound."


def _describe_cost(job: Job, own: Candidate) -> str:
    alike = "; alike in all seeds, so a finer metric would tell more" if len(set(own.gaps)) == 1 else ""
    return (
        f"{job.metric} worse than FP32's by {np.mean(own.gaps):.4g} on average, by its bound at most "
        f"{own.bound:.4g}, {job.tolerance:.4g} allowed; {own.wire_fraction:.4f} of FP32's bytes{alike}"
    )


def _target(job: Job, exact: Candidate) -> Target:
    reference = float(f"{np.mean([run.outcome.value for run in exact.runs]):.6g}")
    return Target(
        metric=job.metric,
        reference=reference,
        tolerance=job.tolerance,
        higher_is_better=job.higher_is_better,
    )


def _provenance(
    job: Job, options: Options, exact: Candidate, chosen: Candidate, measured_by: str, date: str
) -> Provenance:
    own = [run.outcome.value for run in chosen.runs]
    fp32 = [run.outcome.value for run in exact.runs]
    seeds = ", ".join(map(str, options.seeds))
    most_trips = max(run.outcome.trips for run in chosen.runs)
    notes = (
        f"Full runs of {job.steps} steps, seeds {seeds}: {job.metric} {np.mean(own):.5g} (FP32 "
        f"{np.mean(fp32):.5g}, standard deviation {np.std(fp32, ddof=1):.2g}); paired, worse by "
        f"{np.mean(chosen.gaps):.3g}, with {options.confidence:.0%} confidence by less than "
        f"{chosen.bound:.3g}. {chosen.wire_fraction:.4f} of FP32's bytes, {most_trips} trips at most. Chosen "
        f"among {options.trials} short runs of {search_steps(job, options)} steps, seed "
        f"{options.search_seed}; finalists are tested one by one, not corrected for their number."
    )
    workers = job.num_workers if isinstance(job.num_workers, int) else math.prod(job.num_workers)
    return Provenance(
        measured_by=measured_by,
        date=date,
        devices=job.devices or f"{workers} x {jax.devices()[0].device_kind}",
        num_workers=workers,
        batch_size=job.batch_size,
        optimizer=job.optimizer,
        notes=notes,
        versions=find_versions(),
    )
