"""What a calibration found, for people: a table, a picture of loss against bytes, and everything as JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from nf_jax.calibrate import Candidate, Found
from nf_jax.job import Job
from nf_jax.lab import Options, search_steps, write_json
from nf_jax.report import new_figure, new_table
from nf_jax.shortlist import pareto_front
from nf_jax.space import Settings, describe

# Okabe and Ito's colours, told apart with every kind of sight; markers differ too.
_FP32, _BF16, _LOW, _CHOSEN, _STOPPED = "#000000", "#009E73", "#0072B2", "#D55E00", "#AAAAAA"
_TOP_TOLERANCES = 8  # losses further above FP32's are drawn at the edge


def write_results(job: Job, options: Options, found: Found, folder: Path) -> None:
    """Writes calibration.json."""
    write_json(folder / "calibration.json", summarize(job, options, found))


def candidates_table(job: Job, options: Options, found: Found) -> Table:
    """FP32 and the finalists at full length, a line each."""
    title = f"{job.name}: {len(options.seeds)} full runs of {job.steps:,} steps each"
    table = new_table(title)
    table.add_column("profile", no_wrap=True)
    for name in (job.metric, "worse than fp32", "bound", "wire/FP32", "trips"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("settings")
    table.add_column("verdict", no_wrap=True)
    for own in (found.exact, *sorted(found.candidates, key=lambda own: -own.wire_fraction)):
        table.add_row(
            own.name,
            f"{np.mean([run.outcome.value for run in own.runs]):.5g}",
            f"{np.mean(own.gaps):.4g}" if own.settings else "",
            f"{own.bound:.4g}" if own.settings else "",
            f"{own.wire_fraction:.4f}",
            str(max(run.outcome.trips for run in own.runs)),
            describe(own.settings) if own.settings else "",
            _judge(job, found, own),
        )
    table.caption = (
        f"bound: the mean is below it with {options.confidence:.0%} confidence (Student's t, pairs of one "
        f"seed); allowed: {job.tolerance:.4g}"
    )
    return table


def limits_table(found: Found) -> Table:
    """Health limits and what they come from."""
    table = new_table("health limits, from the runs' own signals")
    for name in ("limit", "value", "signal at its quantile", "nearest to the limit", "values"):
        table.add_column(name, justify="left" if name == "limit" else "right", no_wrap=True)
    for name, limit in found.limits.items():
        numbers = (f"{number:.4g}" for number in limit[:3])
        table.add_row(name, *numbers, f"{limit.num_values:,}")
    return table


def _judge(job: Job, found: Found, own: Candidate) -> str:
    if own.settings is None:
        return "reference"
    if own.name == found.chosen:
        return "chosen"
    return "admissible" if own.is_admissible(job.tolerance) else "not admissible"


def plot_pareto(job: Job, options: Options, found: Found, path: Path) -> None:
    """Loss against bytes, of short runs and of full ones, as a PNG.

    Raises:
      ValueError: matplotlib is not installed.
    """
    figure = new_figure((12, 5))
    left, right = figure.subplots(1, 2)
    _plot_short(left, job, options, found)
    _plot_full(right, job, options, found)
    for ax in (left, right):
        ax.set_xscale("log")
        for axis in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
            axis(_plain_number)
        ax.tick_params(axis="x", which="both", labelsize=8)
        ax.set_xlabel("bytes sent over FP32's, whole run")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"{job.name}: " + (f"{found.chosen} chosen" if found.chosen else found.message.split(".")[0])
    )
    figure.savefig(path, dpi=120)


def _plain_number(value: float, _: object) -> str:
    """Labels 1, 2 and 5 times a power of ten, in plain digits."""
    return f"{value:.4g}" if f"{value:e}"[0] in "125" else ""


def _plot_short(ax: Any, job: Job, options: Options, found: Found) -> None:
    top = 100 * _TOP_TOLERANCES * job.loss_tolerance
    for is_complete, color, label in ((False, _STOPPED, "stopped early"), (True, _LOW, "low-bit, whole")):
        own = [trial.found for trial in found.trials if trial.is_complete == is_complete]
        x, y = ([row[key] for row in own] for key in ("wire_fraction", "excess"))
        ax.scatter(x, np.minimum(np.multiply(y, 100), top), s=22, color=color, label=label, zorder=2)
    front = [(t.found["wire_fraction"], t.found["excess"]) for t in pareto_front(found.trials)]
    x, y = zip(*front, strict=True) if front else ((), ())
    ax.step(x, np.minimum(np.multiply(y, 100), top), where="post", color=_LOW, lw=1, zorder=1)
    for name, color, marker in (("fp32", _FP32, "s"), ("bf16", _BF16, "D")):
        fraction, excess = found.short[name]
        ax.scatter(fraction, min(100 * excess, top), s=50, color=color, marker=marker, label=name, zorder=3)
    for trial in found.trials:
        if f"trial {trial.number}" in {own.name for own in found.candidates}:
            color = _CHOSEN if f"trial {trial.number}" == found.chosen else _LOW
            x, y = trial.found["wire_fraction"], min(100 * trial.found["excess"], top)
            ax.scatter(x, y, s=110, facecolors="none", edgecolors=color, zorder=4)
            ax.annotate(f"{trial.number}", (x, y), xytext=(7, 4), textcoords="offset points", fontsize=8)
    ax.axhline(100 * job.loss_tolerance, color="#777777", ls="--", lw=1, label="tolerance of the search")
    ax.set(
        title=f"search: {len(found.trials)} short runs, at most {search_steps(job, options)} steps; "
        "rings: finalists",
        ylabel=f"held-out loss above FP32's, % ({top:g} and more at {top:g})",
    )
    ax.title.set_fontsize(10)


def _plot_full(ax: Any, job: Job, options: Options, found: Found) -> None:
    ax.scatter(1.0, 0.0, s=50, color=_FP32, marker="s", label="fp32", zorder=3)
    for own in found.candidates:
        color = _CHOSEN if own.name == found.chosen else _BF16 if own.name == "bf16" else _LOW
        mean = float(np.mean(own.gaps))
        marker = "D" if own.name == "bf16" else "o"
        if np.isfinite(own.bound):
            ax.plot([own.wire_fraction] * 2, [mean, own.bound], color=color, lw=1.5, zorder=2)
            ax.scatter(own.wire_fraction, own.bound, s=80, color=color, marker="_", zorder=3)
        label = own.name + (", chosen" if own.name == found.chosen else "")
        ax.scatter(own.wire_fraction, mean, s=50, color=color, marker=marker, label=label, zorder=3)
    ax.axhline(job.tolerance, color="#777777", ls="--", lw=1, label="tolerance")
    ax.set(
        title=f"full runs: mean of {len(options.seeds)} seeds, up to the {options.confidence:.0%} bound",
        ylabel=f"{job.metric} worse than FP32",
    )
    ax.title.set_fontsize(10)


def _plain_settings(settings: Settings | None) -> dict[str, Any] | None:
    return None if settings is None else settings._asdict() | {"route": settings.route.name}


def summarize(job: Job, options: Options, found: Found) -> dict[str, Any]:
    """All that was measured, as JSON."""
    full = [
        {
            "name": own.name,
            "settings": _plain_settings(own.settings),
            "runs": [
                {"seed": seed, **run.outcome._asdict()}
                for seed, run in zip(options.seeds, own.runs, strict=True)
            ],
            "gaps": own.gaps,
            "bound": own.bound,
            "wire_fraction": own.wire_fraction,
            "is_admissible": own.is_admissible(job.tolerance),
        }
        for own in (found.exact, *found.candidates)
    ]
    return {
        "job": job.name,
        "options": dataclasses.asdict(options),
        "metric": job.metric,
        "tolerance": job.tolerance,
        "message": found.message,
        "chosen": found.chosen,
        "limits": {name: limit._asdict() for name, limit in found.limits.items()},
        "full": full,
        "short": found.short,
        "trials": [trial._asdict() | {"settings": _plain_settings(trial.settings)} for trial in found.trials],
    }
