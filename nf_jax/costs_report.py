"""Tables and pictures of what averaging costs: what was measured, and what that predicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.table import Table

from nf_jax import costs
from nf_jax.plan import Plan
from nf_jax.profile import Profile, Route
from nf_jax.report import new_figure, new_table
from nf_jax.stages import OWN_STAGE, Substrate
from nf_jax.telemetry import Reason


def seconds_table(profile: Profile, plan: Plan, substrate: Substrate) -> Table:
    """What a substrate predicts for a plan: milliseconds per lane and route, and who goes low-bit."""
    table = new_table(f"predicted milliseconds by route, {_mesh_of(substrate)}")
    for name in ("lane", *(route.name for route in Route), "goes low-bit"):
        table.add_column(name, justify="left" if name == "lane" else "right", no_wrap=True)
    seconds = costs.lane_seconds(profile, plan.lanes, substrate)
    for name, region, row, pays, fixed in zip(
        plan.lanes.names, plan.lanes.regions, seconds, plan.lanes.pays, plan.lanes.fixed, strict=True
    ):
        possible = profile.routes_of(region) if fixed in (None, Reason.SLOWER) else (Route.FP32,)
        taken = [route.name for route in possible if route != Route.FP32 and pays[route] and fixed is None]
        times = (f"{1e3 * row[route]:.3f}" if route in possible else "" for route in Route)
        table.add_row(name, *times, ", ".join(taken) or "no")
    table.caption = (
        "lanes that travel together share their latency; low-bit has to be "
        f"{profile.capacity.min_speedup:g} times as fast as FP32 (capacity.min_speedup)"
    )
    return table


def substrate_table(substrate: Substrate) -> Table:
    """What a probe measured: a line per stage, fits with their standard errors."""
    table = new_table(f"stages, {_mesh_of(substrate)}")
    for name in ("stage", "latency, us", "+-", "ns per byte", "+-", "GB/s", "from", "to"):
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    for name, stage in substrate.stages.items():
        rate = f"{1e-9 / stage.seconds_per_byte:.3g}" if stage.seconds_per_byte else "-"
        table.add_row(
            name,
            f"{1e6 * stage.latency_seconds:.1f}",
            f"{1e6 * stage.latency_error_seconds:.1f}",
            f"{1e9 * stage.seconds_per_byte:.4f}",
            f"{1e9 * stage.seconds_per_byte_error:.4f}",
            "" if name in OWN_STAGE.values() else rate,
            _kib(stage.sizes_bytes[0]),
            _kib(stage.sizes_bytes[-1]),
        )
    table.caption = (
        "bytes: what a worker sends in a collective, votes counted, else the lane's FP32 bytes;\n"
        "fp32 to ternary: what a whole step takes beside the stages above them"
    )
    noisy = [name for name, s in substrate.stages.items() if s.seconds_per_byte_error > s.seconds_per_byte]
    if noisy:
        table.caption += f"\nnoisy, probe again while the workers are idle: {', '.join(noisy)}"
    return table


def plot_substrate(substrate: Substrate, path: Path) -> None:
    """What was measured and fitted, a panel per stage, as a PNG.

    Raises:
      ValueError: matplotlib is not installed.
    """
    figure = new_figure((14, 6))
    panels = figure.subplots(2, 5, sharex=True)
    for panel, (name, stage) in zip(panels.flat, substrate.stages.items(), strict=True):
        sizes = np.asarray(stage.sizes_bytes, float)
        line = np.geomspace(sizes[0], sizes[-1], 50)
        fitted = stage.latency_seconds + line * stage.seconds_per_byte
        panel.plot(line, 1e3 * fitted, color="tab:gray", lw=1, label="fitted")
        panel.plot(sizes, 1e3 * np.asarray(stage.measured_seconds), "o", ms=4, label="measured")
        panel.set(xscale="log", yscale="log", title=name)
        panel.grid(alpha=0.3)
    for panel in panels[:, 0]:
        panel.set_ylabel("milliseconds")
    for panel in panels[1]:
        panel.set_xlabel("bytes")
    panels[0, 0].legend(frameon=False)
    figure.suptitle(f"stages, {_mesh_of(substrate)}; points at or below 0 are not shown")
    figure.savefig(path, dpi=120)


def _mesh_of(substrate: Substrate) -> str:
    link = f", {substrate.link}" if substrate.link else ""
    plural = "es" if substrate.num_processes > 1 else ""
    return (
        f"{substrate.num_workers} workers in {substrate.num_processes} process{plural}, "
        f"{substrate.backend} ({substrate.device_kind}){link}"
    )


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.4g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.4g} KiB"
