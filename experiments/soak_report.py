"""What a soak found, as summary.json and as a table."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import sys
from typing import Any

import jax
import numpy as np
from rich import box
from rich.table import Table

from experiments import soak_laws
from experiments.soak_laws import Found
from experiments.soak_watch import describe_memory
from nf_jax import Profile
from nf_jax.telemetry import Lanes

COUNTS = ("load_flips", "trips", "health_flips", "residual_falls", "route_flips")


def summarize(found: Found, profile: Profile, lanes: Lanes, options: dict[str, Any]) -> dict[str, Any]:
    """summary.json; the counts of an episode are the largest of its regions or lanes."""
    rows = []
    for episode in found.episodes:
        row = dataclasses.asdict(episode) | {name: int(np.max(getattr(episode, name))) for name in COUNTS}
        rows.append(row | {"bounds": soak_laws.bounds(profile, lanes, episode.steps)})
    for row, accuracy in zip(rows, found.accuracy, strict=False):  # an episode that was cut off has none
        row["accuracy"] = accuracy
    return {
        "command": "python " + shlex.join(sys.orig_argv[1:]),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, jax {jax.__version__}",
        "options": options,
        "steps": found.steps,
        "seconds": found.seconds,
        "steps_per_second": found.steps / found.seconds,
        "compilations": dict(zip(("first_episode", "later"), found.compilations, strict=True)),
        "arrays_alive": sorted({number for number, _ in found.arrays}),
        "memory": describe_memory(found.memory),
        "memory_samples": found.memory[:: max(len(found.memory) // 100, 1)],
        "broken": found.broken,
        "episodes": rows,
    }


def make_table(summary: dict[str, Any]) -> Table:
    """A line per kind of trouble: sums of steps, the largest of any episode's counts."""
    memory = summary["memory"]
    table = Table(
        title=f"{summary['steps']:,} steps in {summary['seconds']:.0f} s",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    table.add_column("trouble", no_wrap=True)
    for name in ("steps", "not finite", "low-bit", "load", "trips", "residual", "routes", "acc. %"):
        table.add_column(name, justify="right")
    for kind in dict.fromkeys(row["kind"] for row in summary["episodes"]):
        rows = [row for row in summary["episodes"] if row["kind"] == kind]
        total = {name: sum(row[name] for row in rows) for name in ("steps", "nonfinite", "low_bit", "wanted")}
        scores = [row["accuracy"] for row in rows if "accuracy" in row]
        counts = [
            f"{max(row[name] for row in rows)}/{max(row['bounds'][name] for row in rows):.0f}"
            for name in ("load_flips", "trips", "residual_falls", "route_flips")
        ]
        table.add_row(
            kind,
            f"{total['steps']:,}",
            f"{total['nonfinite']:,}",
            f"{total['low_bit'] / max(total['wanted'], 1):.0%}",
            *counts,
            f"{min(scores):.1f}" if scores else "-",
        )
    table.caption = (
        "low-bit: of the lane steps that the profile wants so. load: flips of the reducer;\n"
        "trips: falls of a region's health; residual: falls of a lane by its residual;\n"
        "routes: changes of a lane's route. Each: the most in an episode / its bound.\n"
        "acc.: the least test accuracy after an episode.\n"
        f"Compiled: {summary['compilations']['first_episode']} programs in the first episode, "
        f"{summary['compilations']['later']} later.\n"
        f"Memory: {memory['early_mib']:.0f} MiB, then {memory['late_mib']:.0f} MiB "
        f"({memory['slope_bytes_per_step']:+.0f} bytes a step)."
    )
    return table
