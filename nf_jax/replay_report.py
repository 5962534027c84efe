"""Tables, files and pictures of replays."""

from __future__ import annotations

import collections
import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from nf_jax.profile import Route
from nf_jax.replay import Replay
from nf_jax.report import new_table
from nf_jax.telemetry import REASONS, Reason


def summarize(found: Replay) -> dict[str, Any]:
    """A replay in plain numbers; what is not known or never ends is None."""
    num_steps = len(found.steps)
    numbers = {
        "steps": num_steps,
        "seconds": found.total_seconds,
        "fp32_seconds": found.fp32_seconds * num_steps,
        "speedup": found.speedup,
        "compute_seconds_per_step": found.compute_seconds,
        "wire_bytes": int(found.wire_bytes.sum()),
        "fp32_bytes": found.fp32_bytes * num_steps,
        "wire_fraction": found.wire_fraction,
        "low_bit_share": found.low_bit_share,
        "queue_bytes_peak": float(found.queue_bytes.max()),
        "load_peak": float(found.load.max()),
        "saturated_steps": int(found.saturated.sum()),
        "flips": found.num_flips,
        "refusals": int(found.refusals.sum()),
        "trips": int(found.trips[-1].sum()),
        "first_difference": found.first_difference,
        "truncated": found.truncated,
    }
    is_odd = lambda x: isinstance(x, float) and not math.isfinite(x)  # noqa: E731
    return {name: None if is_odd(number) else number for name, number in numbers.items()}


def replay_table(title: str, found: Replay) -> Table:
    """A replay as one table: what it costs, beside all in FP32, and what the reducer had to take."""
    table = new_table(f"{title}: {len(found.steps):,} steps, {len(found.lanes.names)} lanes")
    for name in ("", "replayed", "all FP32"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    num_steps = len(found.steps)
    seconds = _seconds(found.total_seconds), _seconds(found.fp32_seconds * num_steps)
    table.add_row("averaging, s", *seconds)
    table.add_row("sent by a worker, MB", *(f"{n / 1e6:,.3f}" for n in _bytes(found)))
    table.add_row("bytes of FP32's", f"{found.wire_fraction:.2%}", "100.00%")
    table.add_row("elements that went low-bit", f"{found.low_bit_share:.1%}", "0.0%")
    table.add_row("longest queue, bytes", f"{found.queue_bytes.max():,.0f}", "")
    table.add_row("highest load (1 is full)", f"{found.load.max():.3f}", "")
    table.add_row("saturated, steps (flips)", f"{found.saturated.sum():,} ({found.num_flips:,})", "")
    table.add_row("lanes refused low-bit, lane-steps", f"{found.refusals.sum():,}", "")
    table.add_row("trips, all regions", f"{found.trips[-1].sum():,}", "")
    return table


def explain(found: Replay) -> list[str]:
    """Sentences: how a replay compares with the run, and why lanes went FP32."""
    lines = []
    if found.truncated:
        lines.append("the trace was cut off in the middle of a line: replayed up to its last whole step")
    if found.is_rerun:
        at = found.first_difference
        differ = f"decisions differ from the recorded ones at step {at}: pinned routes, or another version?"
        lines.append("every decision is the recorded one" if at is None else differ)
    elif math.isfinite(found.speedup):
        lines.append(f"averaging is {found.speedup:.2f} times as fast as all in FP32")
    is_exact = found.routes == Route.FP32
    counts = collections.Counter(found.reasons[is_exact].tolist())
    lines += [
        f"{count:,} lane-steps in FP32: {REASONS[Reason(reason)]}" for reason, count in counts.most_common()
    ]
    return lines


def write_replay(found: Replay, folder: Path) -> None:
    """Writes summary.json, and steps.csv with a line per step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summarize(found), indent=1) + "\n")
    columns: dict[str, np.ndarray] = {
        "step": found.steps,
        "seconds": found.seconds,
        "wire_bytes": found.wire_bytes,
        "low_bit_lanes": (found.routes != Route.FP32).sum(1),
        "refusals": found.refusals,
        "queue_bytes": found.queue_bytes,
        "load": found.load,
        "saturated": found.saturated.astype(int),
        "trips": found.trips.sum(1),
    }
    with (folder / "steps.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(columns)
        writer.writerows(zip(*(column.tolist() for column in columns.values()), strict=True))


def _bytes(found: Replay) -> tuple[int, int]:
    return int(found.wire_bytes.sum()), found.fp32_bytes * len(found.steps)


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else "-" if math.isnan(value) else f"{value:,.4f}"
