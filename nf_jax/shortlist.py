"""Short runs: what is worth a run of full length?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from nf_jax.job import Job
from nf_jax.lab import Lab, Options, forget_programs, search_steps
from nf_jax.plan import plan
from nf_jax.profile import Model, Profile
from nf_jax.search import Score, Trial, run_search
from nf_jax.space import BF16, STARTS, Protection, Settings, describe, make_profile, planned_bytes

_MAX_EXCESS = 1e6
_UNJUDGED_SHARE = 1 / 3
"""Part of a short run in which no trial is stopped: losses that are still those of a warm-up tell nothing,
and whoever sends least would win."""


class Makers(NamedTuple):
    """What turns settings into profiles. Attributes: as `make_profile` takes them."""

    job: Job
    model: Model
    protections: tuple[Protection, ...]
    limits: dict[str, float]

    def profile(self, settings: Settings | None, steps: int) -> Profile:
        protection = self.protections[settings.protection if settings else 0]
        return make_profile(self.job.start, self.model, protection, settings, self.limits, steps)


def search_short(
    lab: Lab, options: Options, makers: Makers
) -> tuple[list[Trial], dict[str, tuple[float, float]]]:
    """The search's trials, and where FP32 and BF16 lie among them."""
    job, steps, seed = lab.job, search_steps(lab.job, options), options.search_seed
    exact, half = (
        lab.run(f"{name}, short", makers.profile(settings, steps), steps, seed)
        for name, settings in (("fp32", None), ("bf16", BF16))
    )
    reference = {step: loss for step, loss, _ in exact.curve}

    def evaluate(number: int, settings: Settings, score: Score) -> dict[str, Any]:
        profile = makers.profile(settings, steps)
        judge = make_judge(job, profile, steps, reference)
        points: list[tuple[int, float, float]] = []

        def report(step: int, loss: float, wire_bytes: int) -> bool:
            fraction, excess, value = judge(step, loss, wire_bytes)
            points.append((step, fraction, excess))
            return score(step, value)

        lab.measure(f"trial {number}: {describe(settings)}", profile, steps, seed, None, report)
        forget_programs()
        return {"wire_fraction": points[-1][1], "excess": points[-1][2], "points": points}

    trials = run_search(
        lab.folder / "search.journal",
        name=f"calibrate {job.name}",
        seed=seed,
        num_trials=options.trials,
        protections=makers.protections,
        starts=STARTS,
        min_steps=min(step for step in reference if step >= _UNJUDGED_SHARE * steps),
        max_steps=steps,
        evaluate=evaluate,
        on_kept=lambda count: lab.tell("trials from before", count * steps),
    )
    judge = make_judge(job, makers.profile(BF16, steps), steps, reference)
    return trials, {"fp32": (1.0, 0.0), "bf16": judge(*half.curve[-1])[:2]}


def make_judge(
    job: Job, profile: Profile, steps: int, reference: dict[int, float]
) -> Callable[[int, float, int], tuple[float, float, float]]:
    """What scores a report: `(step, loss, wire_bytes)` -> (wire fraction, excess, score), lower is better.

    The wire fraction is that of the whole run, what is still to be sent as planned: otherwise every early
    report, in the warm-up, would look alike. The excess is the loss over FP32's at the same step, as a part
    of that. The score is the logarithm of the fraction, plus the excess beyond the tolerance in units of it.
    """
    planned = plan(profile, job.params, job.num_workers)
    rest = np.append(planned_bytes(profile, planned, steps)[::-1].cumsum()[::-1], 0)
    if not planned.fp32_bytes:
        raise ValueError(f"job {job.name!r}: expected workers that send something, got {job.num_workers}")

    def judge(step: int, loss: float, wire_bytes: int) -> tuple[float, float, float]:
        if step not in reference:
            raise ValueError(
                f"expected reports after steps {sorted(reference)}, as in FP32, got one after {step}"
            )
        fraction = (wire_bytes + int(rest[step])) / (planned.fp32_bytes * steps)
        excess = (loss - reference[step]) / max(abs(reference[step]), 1e-12)
        excess = min(excess, _MAX_EXCESS) if math.isfinite(excess) else _MAX_EXCESS
        return fraction, excess, math.log(fraction) + max(0.0, excess / job.loss_tolerance - 1)

    return judge


def pareto_front(trials: Iterable[Trial]) -> list[Trial]:
    """Whole trials that no other beats in both bytes and loss, from the cheapest on."""
    front: list[Trial] = []
    complete = [trial for trial in trials if trial.is_complete]
    for trial in sorted(complete, key=lambda t: (t.found["wire_fraction"], t.found["excess"], t.number)):
        if not front or trial.found["excess"] < front[-1].found["excess"]:
            front.append(trial)
    return front


def choose_finalists(trials: Iterable[Trial], count: int) -> list[Trial]:
    """The best scores of the Pareto front; of two and more, one is the end that loses least."""
    front = pareto_front(trials)
    best = sorted(front, key=lambda trial: (trial.score, trial.number))[:count]
    if count == 1 or not front or front[-1] in best:
        return best
    return [*best[:-1], front[-1]]
