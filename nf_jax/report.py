"""Tables and pictures for people: what a plan routes how, and what a run did."""

from __future__ import annotations

import collections
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from nf_jax.health import STATES, TRIGGERS, Health, Trigger
from nf_jax.plan import Plan
from nf_jax.profile import Profile, Route
from nf_jax.shadow_trace import is_shadow
from nf_jax.telemetry import REASONS, Lanes, Reason, StepInfo
from nf_jax.trace import Trace, read_trace

# Okabe and Ito's colours, told apart with every kind of sight; in the order of `Route`.
_COLORS = ("#DDDDDD", "#009E73", "#0072B2", "#E69F00")


def plan_tables(profile: Profile, plan: Plan) -> list[Table]:
    """What travels how: one line per lane, the sums per phase, and the reasons that occur."""
    lanes = new_table(f"{profile.name}: {plan.num_lanes} lanes, {plan.num_workers} workers; bytes by route")
    possible = [(_routes_of(plan, i)) for i in range(plan.num_lanes)]
    used = [route for route in Route if any(route in routes for routes in possible)]
    lanes.add_column("lane", no_wrap=True)
    for name in ("group", "leaves", "elements", "low-bit", *(route.name for route in used)):
        lanes.add_column(name, justify="right", no_wrap=True)
    lanes.add_column("why only FP32", no_wrap=True)
    packed = {leaf: s.size for g in plan.groups for leaf, s in zip(g.leaves, g.segments, strict=True)}
    for i, name in enumerate(plan.lanes.names):
        sizes = [packed.get(leaf, 0) * plan.num_inner for leaf in plan.lane_leaves[i]]
        group, reason = plan.lanes.groups[i], plan.lanes.fixed[i]
        lanes.add_row(
            name,
            str(group) if group >= 0 else "",
            str(len(plan.lane_leaves[i])),
            f"{plan.lanes.num_elements[i]:,}",
            f"{sum(sizes) / plan.lanes.num_elements[i]:.1%}",
            *(f"{plan.lanes.wire_bytes[i][r]:,}" if r in possible[i] else "" for r in used),
            "" if reason is None else _short(reason),
        )
    reasons = sorted({reason for reason in plan.lanes.fixed if reason is not None})
    lanes.caption = "\n".join(f"{_short(reason)}: {REASONS[reason]}" for reason in reasons)
    return [lanes, _phase_table(profile, plan)]


def _routes_of(plan: Plan, lane: int) -> tuple[Route, ...]:
    group = plan.lanes.groups[lane]
    return plan.groups[group].routes if group >= 0 else (Route.FP32,)


def _short(reason: Reason) -> str:
    return reason.name.lower().replace("_", " ")


def _phase_table(profile: Profile, plan: Plan) -> Table:
    table = new_table("what the profile asks for, and the bytes a worker then sends in one healthy step")
    for name in ("from step", *profile.region_names, "bytes", "of FP32"):
        table.add_column(name, justify="right", no_wrap=True)
    for start, by_region in profile.route_table:
        routes = [
            by_region[region] if fixed is None else Route.FP32
            for region, fixed in zip(plan.lanes.regions, plan.lanes.fixed, strict=True)
        ]
        sent = plan.wire_bytes(routes)
        fraction = f"{sent / plan.fp32_bytes:.2%}" if plan.fp32_bytes else "-"
        table.add_row(f"{start:,}", *(route.name for route in by_region), f"{sent:,}", fraction)
    table.caption = (
        f"protected share: {plan.protected_share:.2%} of the elements may only travel in FP32 here"
    )
    return table


def run_table(folder: Path) -> Table:
    """A run folder as one table: a line per trace, targets said to be met or missed.

    Raises:
      ValueError: no trace lies in the folder or below it.
    """
    table = new_table(str(folder))
    table.add_column("run", no_wrap=True)
    for name in ("steps", "wire/FP32", "low-bit", "trips", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("regions at the end")
    table.add_column("target")
    base = folder.parent if folder.is_file() else folder
    results = _results(base)
    torn = []
    for path in find_traces(folder):
        trace = read_trace(path)
        name = str(path.parent.relative_to(base)) if path.parent != base else path.stem
        torn += [name] if trace.truncated else []
        table.add_row(name, *_summarize(trace), _judge(trace, results.get(name)))
    if torn:
        table.caption = f"cut off in the middle of a line, read up to the last whole step: {', '.join(torn)}"
    return table


def find_traces(folder: Path) -> list[Path]:
    """All traces in a run folder and below."""
    return [path for path in _find_files(folder) if not is_shadow(path)]


def find_shadows(folder: Path) -> list[Path]:
    """All shadow traces in a run folder and below."""
    return [path for path in _find_files(folder) if is_shadow(path)]


def _find_files(folder: Path) -> list[Path]:
    found = [folder] if folder.is_file() else sorted(folder.rglob("*.jsonl"))
    if not found:
        raise ValueError(
            f"{folder}: expected a run folder with trace.jsonl files in it, found none. Runs of the "
            "experiments write them under --out; nf_jax.trace.TraceWriter and "
            "nf_jax.shadow_trace.ShadowWriter write your own."
        )
    return found


def _summarize(trace: Trace) -> list[str]:
    steps = trace.steps
    if not steps:
        return ["0", *["-"] * 5]
    sent, fp32 = (sum(step[key] for step in steps) for key in ("wire_bytes", "fp32_bytes"))
    low = sum(any(step["routes"]) for step in steps)
    states = collections.Counter(Health(state).name for state in steps[-1]["health_state"])
    loss = steps[-1]["signals"]["loss"] if steps[-1]["signals"]["has_loss"] else None
    return [
        f"{len(steps):,}",
        f"{sent / fp32:.4f}" if fp32 else "-",
        f"{low / len(steps):.1%}",
        str(max(steps[-1]["trips"], default=0)),
        "-" if loss is None else f"{loss:.4g}",
        ", ".join(f"{count} {state}" for state, count in states.items()),
    ]


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / "summary.json"
    if not path.is_file():
        return {}
    try:
        rows = json.loads(path.read_bytes())
        if type(rows) is not list or not all(map(_is_row, rows)):
            raise ValueError("something else")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected an array with a row for each run (policy, seed, metric, value), got: {error}"
        ) from None
    return {f"{row['policy']}-{row['seed']}": row for row in rows}


def _is_row(row: Any) -> bool:
    if type(row) is not dict or not all(type(row.get(name)) is str for name in ("policy", "metric")):
        return False
    return type(row.get("seed")) is int and type(row.get("value")) in (int, float)


def _judge(trace: Trace, row: dict[str, Any] | None) -> str:
    target = Profile.loads(trace.header["profile"], source=trace.profile_source).target
    if target is None or row is None or row["metric"] != target.metric:
        return "-"
    verdict = "met" if target.is_met(row["value"]) else "missed"
    return f"{verdict}: {row['value']:.2f} against {target.reference:.2f} +- {target.tolerance:.2f}"


def explain(trace: Trace) -> list[str]:
    """Sentences: why lanes travelled as they did, and what tripped when."""
    counts: collections.Counter[tuple[int, int]] = collections.Counter()
    for step in trace.steps:
        keys = zip(step["routes"], step["reasons"], strict=True)
        for key, size in zip(keys, trace.lanes.num_elements, strict=True):
            counts[key] += size
    total = sum(counts.values())
    lines = [
        f"{n / total:.1%} of all elements sent by {Route(route).name}: {REASONS[Reason(reason)]}"
        for (route, reason), n in counts.most_common()
    ]
    before = [0] * len(trace.steps[0]["trips"]) if trace.steps else []
    names = Profile.loads(trace.header["profile"], source=trace.profile_source).region_names
    for step in trace.steps:
        for region, (old, new) in enumerate(zip(before, step["trips"], strict=True)):
            if new > old:
                said = _say(step["trigger"][region], step["health_state"][region])
                lines.append(f"step {step['step']}, {names[region]}: {said}")
        before = step["trips"]
    return lines + _count_nonfinite(trace.steps, names)


def explain_step(info: StepInfo, names: Sequence[str], lanes: Lanes | None = None) -> list[str]:
    """Sentences, one per region: how healthy it is after a step, and what was last wrong with it.

    Args:
      info: `nf_jax.step_info(state)`.
      names: `profile.region_names`.
      lanes: `nf_jax.plan(...).lanes`; with them, then one per lane: how it travelled, and why so (where
        routes are pinned, why the controller's would); before the first step, how and why it will.
    """
    triggers, states, trips = (np.asarray(x).tolist() for x in (info.trigger, info.health_state, info.trips))
    rows = zip(names, triggers, states, trips, strict=True)
    regions = [f"{name}: {_say(trigger, state)} (trips: {count})" for name, trigger, state, count in rows]
    if lanes is None:
        return regions
    is_fresh = int(info.step) < 0
    shown = (info.next_routes, info.next_reasons) if is_fresh else (info.routes, info.reasons)
    routes, reasons = (np.asarray(x).tolist() for x in shown)
    ways = zip(lanes.names, routes, reasons, strict=True)
    return regions + [f"{name}: {Route(route).name}, {REASONS[Reason(why)]}" for name, route, why in ways]


def _say(trigger: int, state: int) -> str:
    return f"{TRIGGERS[Trigger(trigger)]}; {STATES[Health(state)]}"


def _count_nonfinite(steps: Sequence[dict[str, Any]], names: Sequence[str]) -> list[str]:
    """How many steps held a gradient that is not finite, where it began and in which regions."""
    bad = [step for step in steps if any(step["signals"]["nonfinite"])]
    if not bad:
        return []
    regions = [name for r, name in enumerate(names) if any(step["signals"]["nonfinite"][r] for step in bad)]
    return [
        f"gradients were not finite in {len(bad):,} of {len(steps):,} steps, first at step {bad[0]['step']}, "
        f"in {', '.join(regions)}"
    ]


def plot_trace(trace: Trace, path: Path, title: str) -> None:
    """Loss, gradient norm and routes over steps, as a PNG.

    Raises:
      ValueError: matplotlib is not installed, or the trace has no step.
    """
    if not trace.steps:
        raise ValueError(f"{title}: expected a trace with at least one step to plot")
    figure = new_figure((9, 6 + 0.12 * len(trace.lanes.names)))
    from matplotlib.colors import ListedColormap

    steps = [step["step"] for step in trace.steps]
    signals = [step["signals"] for step in trace.steps]
    heights = (2, 2, 1 + 0.12 * len(trace.lanes.names))
    axes = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    axes[0].plot(steps, [s["loss"] if s["has_loss"] else np.nan for s in signals], color="#000000", lw=1)
    axes[0].set(title=f"{title}: loss", ylabel="mean over workers")
    names = Profile.loads(trace.header["profile"], source=trace.profile_source).region_names
    norms = np.asarray([s["gradient_norm"] for s in signals], float)
    norms[~(norms > 0)] = np.nan
    for region, name in enumerate(names):
        axes[1].plot(steps, norms[:, region], lw=1, label=name)
    axes[1].set(title="norm of the local gradient", ylabel="RMS over workers")
    if np.isfinite(norms).any():
        axes[1].set_yscale("log")
    axes[1].legend(frameon=False, ncols=4, fontsize=8)
    grid = np.asarray([step["routes"] for step in trace.steps]).T
    edges = np.append(steps, steps[-1] + 1), np.arange(grid.shape[0] + 1)
    axes[2].pcolormesh(*edges, grid, cmap=ListedColormap(_COLORS), vmin=0, vmax=3)
    axes[2].set(title=f"route of every lane ({_legend(grid)})", xlabel="step")
    axes[2].set_yticks(np.arange(grid.shape[0]) + 0.5, trace.lanes.names, fontsize=7)
    axes[2].invert_yaxis()
    figure.savefig(path, dpi=120)


def new_figure(size: tuple[float, float]) -> Any:
    """An empty figure, `size` in inches.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError('plots need matplotlib: pip install "nf-jax[experiments]"') from None
    return Figure(figsize=size, layout="constrained")


def _legend(grid: np.ndarray) -> str:
    colors = ("grey", "green", "blue", "orange")
    return ", ".join(f"{colors[r]}: {Route(r).name}" for r in np.unique(grid).tolist())


def new_table(title: str) -> Table:
    """An empty table in the style of all of them."""
    return Table(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)


def describe(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)
