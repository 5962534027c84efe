"""Tables, files and pictures of replays."""

from __future__ import annotations

import collections
import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from nf_jax.columns import Columns
from nf_jax.profile import Profile, Route
from nf_jax.replay import Replay
from nf_jax.report import new_figure, new_table
from nf_jax.sweep import AXES, Axis, Case, Point
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


def describe_design(before: Profile, after: Profile, columns: Columns) -> str:
    """What `co_design` changed, in words."""
    floor, cap = after.capacity.min_lane_bytes, after.buckets.cap_bytes
    text = (
        f"smallest lane {floor:,} bytes (was {before.capacity.min_lane_bytes:,}), bucket cap {cap:,} bytes "
        f"(was {before.buckets.cap_bytes:,})"
    )
    none_pays = floor > 4 * max(columns.lanes.num_elements, default=0)
    return text + "; no lane of this run is as large, so all of it would stay in FP32" * none_pays


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


def sweep_table(sweeps: Mapping[str, Sequence[Point]]) -> Table:
    """What was swept: a line per point."""
    table = new_table("what if: seconds of averaging in a mean step, and what the reducer has to take")
    costs, loads = ("as chosen, ms", "all FP32, ms", "speedup"), ("highest load", "flips", "trips")
    for name in ("axis", "value", *costs, "low-bit", *loads):
        table.add_column(name, justify="left" if name == "axis" else "right", no_wrap=True)
    for axis, points in sweeps.items():
        for value, found in points:
            table.add_row(
                AXES[axis].title,
                f"{value:,.0f}" if AXES[axis].is_whole else _decimal(value),
                *(_milliseconds(seconds) for seconds in (_mean_seconds(found), found.fp32_seconds)),
                f"{found.speedup:.2f}" if math.isfinite(found.speedup) else "-",
                f"{found.low_bit_share:.1%}",
                f"{found.load.max():.3g}",
                f"{found.num_flips}",
                f"{found.trips[-1].sum()}",
            )
        table.add_section()
    return table


def plot_sweeps(sweeps: Mapping[str, Sequence[Point]], case: Case, path: Path) -> None:
    """The frontier between low-bit and FP32, a panel per axis, as a PNG.

    Raises:
      ValueError: matplotlib is not installed.
    """
    num_rows = math.ceil(len(sweeps) / 3)
    figure = new_figure((13, 0.8 + 3.4 * num_rows))
    grid = figure.subplots(num_rows, min(3, len(sweeps)), sharey=True, squeeze=False)
    panels = grid.reshape(-1)
    for panel, (axis, points) in zip(panels, sweeps.items(), strict=False):
        _plot_axis(panel, AXES[axis], points, AXES[axis].now(case))
    for panel in grid[:, 0]:
        panel.set_ylabel("milliseconds")
    for panel in panels[len(sweeps) :]:
        panel.set_axis_off()
    handles: dict[str, Any] = {}
    for panel in panels:
        lines, labels = panel.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle("averaging in a mean step: as the controller chooses, and all in FP32")
    figure.savefig(path, dpi=120)


def _plot_axis(panel: Any, axis: Axis, points: Sequence[Point], now: float | None) -> None:
    values = np.asarray([point.value for point in points])
    chosen, exact = (
        1e3 * np.asarray([measure(point.found) for point in points])
        for measure in (_mean_seconds, lambda found: found.fp32_seconds)
    )
    from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator  # slow, and maybe not there

    refused = np.asarray([not point.found.routes.any() for point in points])
    chosen, exact = (np.where(np.isfinite(line), line, np.nan) for line in (chosen, exact))
    panel.plot(values, exact, "--", color="#000000", lw=1.4, label="all FP32")
    panel.plot(values, chosen, "-", color="#0072B2", lw=1.8, label="as chosen")
    panel.plot(values[~refused], chosen[~refused], "o", color="#0072B2", ms=5, label="with low-bit lanes")
    hollow: dict[str, Any] = dict(marker="o", ls="", mfc="white", mec="#D55E00", ms=6)
    panel.plot(values[refused], chosen[refused], label="every lane refused", **hollow)
    if now is not None and values[0] <= now <= values[-1]:
        panel.axvline(now, color="#999999", lw=1, ls=":", label="as given")
    panel.set_yscale("log")
    panel.set_xscale("log", base=2 if axis.is_whole else 10)
    panel.set_xlabel(axis.title)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(_binary if axis.is_whole else _decimal))
    panel.yaxis.set_major_formatter(FuncFormatter(_plain))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def _plain(value: float, _: object = None) -> str:
    return f"{value:,g}"


def _decimal(value: float, _: object = None) -> str:
    power = min(max(int(math.log10(max(value, 1)) // 3), 0), 4)
    return f"{value / 1000**power:.3g}{('', ' k', ' M', ' G', ' T')[power]}"


def _binary(value: float, _: object = None) -> str:
    if value < 2**16:
        return _plain(value)
    return f"{value / 2**10:,g} Ki" if value < 2**20 else f"{value / 2**20:,g} Mi"


def _mean_seconds(found: Replay) -> float:
    return found.total_seconds / len(found.steps)


def _milliseconds(seconds: float) -> str:
    return "never" if math.isinf(seconds) else f"{1e3 * seconds:,.4g}"


def _bytes(found: Replay) -> tuple[int, int]:
    return int(found.wire_bytes.sum()), found.fp32_bytes * len(found.steps)


def _seconds(value: float) -> str:
    return "never" if math.isinf(value) else "-" if math.isnan(value) else f"{value:,.4f}"
