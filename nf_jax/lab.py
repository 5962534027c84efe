"""Runs of a calibration, each measured once and kept in a folder, so that what was killed goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import hashlib
import importlib.metadata
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from nf_jax.job import Job, Outcome, Report
from nf_jax.profile import Profile
from nf_jax.space import STARTS, model_of

Tell = Callable[[str, int], None]
"""`(what is going on, steps done since the last call)`."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How thoroughly to look."""

    trials: int = 30
    """Short runs to try, those that are stopped early included."""
    search_steps: int | None = None
    """Length of a short run; by default a quarter of a full one."""
    search_seed: int = 0
    """Seed of short runs and of the search itself."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of full runs; others than the search's, so that its luck does not count."""
    finalists: int = 3
    """Profiles of the search that run at full length, beside BF16."""
    confidence: float = 0.95
    """Of the one-sided bound, of each finalist on its own."""
    shadow: bool = True
    """Find regions, and which of them are safe, by a shadow run, if the job has one; otherwise they are
    those of the profile that it starts from."""

    def __post_init__(self) -> None:
        for name in ("trials", "finalists"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if len(set(self.seeds)) != len(self.seeds) or len(self.seeds) < 2 or min(self.seeds) < 0:
            raise ValueError(f"seeds: expected two or more from 0 on, no repeats, got {self.seeds}: a spread")
        if self.search_seed in self.seeds or self.search_seed < 0:
            raise ValueError(
                f"search_seed: expected one from 0 on, not of {self.seeds}, got {self.search_seed}"
            )
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence: expected between 0.5 and 1, got {self.confidence}")


def num_steps(job: Job, options: Options) -> int:
    """Training steps that a calibration takes at most, unless a finalist has to be measured again."""
    full = (2 + options.finalists) * len(options.seeds) * job.steps
    full += job.steps if job.shadow is not None and options.shadow else 0
    return full + (2 + options.trials) * search_steps(job, options)


def search_steps(job: Job, options: Options) -> int:
    """Length of a short run."""
    steps = job.steps // 4 if options.search_steps is None else options.search_steps
    if not 1 <= steps <= job.steps:
        raise ValueError(f"search_steps: expected 1 to the job's {job.steps} steps, got {steps}")
    return steps


class Run(NamedTuple):
    """A measured run. Attributes: outcome; curve: its reports; trace: its file, None where there is none."""

    outcome: Outcome
    curve: tuple[tuple[int, float, int], ...]
    trace: Path | None


class Lab(NamedTuple):
    """Measures, each thing once. Attributes: job; folder: what is kept; tell: progress."""

    job: Job
    folder: Path
    tell: Tell

    def run(self, text: str, profile: Profile, steps: int, seed: int) -> Run:
        """A whole run, with its trace, from the folder if it is there."""
        key = hashlib.sha256(f"{profile.dumps()}\n{steps}\n{seed}".encode()).hexdigest()[:16]
        kept, trace = self.folder / "runs" / f"{key}.json", self.folder / "runs" / f"{key}.jsonl"
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            trace.unlink(missing_ok=True)  # of a run that was cut off
            curve: list[tuple[int, float, int]] = []
            outcome = self.measure(text, profile, steps, seed, trace, _keeper(curve))
            if outcome is None:
                raise ValueError(f"{text}: expected the job to measure whole runs, got None for an outcome")
            write_json(kept, {"what": text, "seed": seed, "outcome": outcome._asdict(), "curve": curve})
        else:
            self.tell(text, steps)
        read = _read_numbers(json.loads(kept.read_text()))
        curve_read = tuple((int(step), float(loss), int(sent)) for step, loss, sent in read["curve"])
        return Run(Outcome(**read["outcome"]), curve_read, trace if trace.exists() else None)

    def run_full(self, name: str, profile: Profile, seeds: Sequence[int]) -> tuple[Run, ...]:
        """A run of full length for each seed."""
        runs = tuple(self.run(f"{name}, seed {seed}", profile, self.job.steps, seed) for seed in seeds)
        forget_programs()
        return runs

    def measure(
        self, text: str, profile: Profile, steps: int, seed: int, trace: Path | None, report: Report
    ) -> Outcome | None:
        """One run, watched: reports have to rise to the last step."""
        done = 0

        def watched(step: int, loss: float, wire_bytes: int) -> bool:
            nonlocal done
            if not done < step <= steps:
                raise ValueError(
                    f"{text}: expected a report after a step from {done + 1} to {steps}, got {step}"
                )
            self.tell(text, step - done)
            done = step
            return report(step, float(loss), int(wire_bytes))

        outcome = self.job.measure(profile, steps=steps, seed=seed, trace=trace, report=watched)
        if outcome is not None and done != steps:
            raise ValueError(
                f"{text}: expected a report after the last step, {steps}, got the last after {done}"
            )
        self.tell(text, steps - done)
        return outcome


def forget_programs() -> None:
    """Frees what was compiled for a profile that is done with.

    JAX would keep it: thirty profiles of a decoder filled a process's table of memory mappings.
    """
    jax.clear_caches()
    gc.collect()


def _keeper(curve: list[tuple[int, float, int]]) -> Report:
    def keep(step: int, loss: float, wire_bytes: int) -> bool:
        curve.append((step, loss, wire_bytes))
        return True

    return keep


# ---------------------------------------------------------------------------------------------- folder


def open_folder(folder: Path, job: Job, options: Options) -> str:
    """Refuses a folder of another calibration; returns the day on which this one began."""
    identity = {
        "job": job.name,
        "start": job.start.dumps(),
        "model": model_of(job.name, job.params).model_dump(mode="json"),
        "num_workers": job.num_workers,
        "steps": job.steps,
        "metric": job.metric,
        "tolerance": job.tolerance,
        "loss_tolerance": job.loss_tolerance,
        "options": dataclasses.asdict(options),
        "versions": find_versions(),
        "starts": [settings._asdict() for settings in STARTS],
    }
    identity = json.loads(json.dumps(identity))
    path = folder / "job.json"
    if path.exists():
        kept = json.loads(path.read_text())
        began = kept.pop("began")
        if other := [name for name in identity if kept.get(name) != identity[name]]:
            raise ValueError(
                f"{folder}: expected the same calibration as before, but {', '.join(other)} differ; "
                "remove the folder or name another"
            )
        return began
    folder.mkdir(parents=True, exist_ok=True)
    began = datetime.date.today().isoformat()
    write_json(path, identity | {"began": began})
    return began


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all; what is not finite as text, so that any reader takes it."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(to_plain(value), indent=1, allow_nan=False) + "\n")
    os.replace(temporary, path)


def to_plain(value: Any) -> Any:
    """The same with text for what is not finite, which JSON does not know."""
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _read_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_read_numbers(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def find_versions() -> dict[str, str]:
    versions = {}
    for name in ("nf-jax", "jax", "optax", "flax", "optuna"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
