"""A whole job: every policy with every seed, then one table, one picture, one summary.json."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich
from rich import box, progress
from rich.table import Table

from experiments import runs
from experiments.runs import Config, Policy, Run, Task
from nf_jax import Profile, cluster

# =============================================================================================== job


def remove_results(out: Path) -> None:
    """Deletes what an earlier job wrote, so that no folder mixes two."""
    traces = [path for policy in runs.POLICIES for path in out.glob(f"{policy}-*/trace.jsonl")]
    for path in [out / "summary.json", out / "curves.png", *traces]:
        path.unlink(missing_ok=True)


def describe_run(row: dict[str, Any]) -> str:
    return (
        f"{row['policy']}, seed {row['seed']}: accuracy {row['value']:.2f} %, "
        f"{row['wire_fraction']:.4f} of FP32's bytes, {row['trips']} trips, "
        f"{1000 * row['step_seconds_median']:.0f} ms a step"
    )


def run_job(config: Config, task: Task) -> list[dict[str, Any]]:
    """Runs a whole job, as one process of several if the config says so; returns the rows of summary.json.

    Only the first process prints and writes.
    """
    with cluster.joined(config.cluster, config.devices):
        if not cluster.is_first():
            done = run_policies(config, task, is_shown=False)
            return [run.row for own in done.values() for run in own]
        config.out.mkdir(parents=True, exist_ok=True)
        remove_results(config.out)
        done = run_policies(config, task, is_shown=True)
        rows = [run.row for own in done.values() for run in own]
        (config.out / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
        plot_curves(config, done, config.out / "curves.png")
        rich.print(make_table(config, rows))
        rich.print(f"Wrote {config.out}/summary.json, curves.png and a trace.jsonl per run.")
        return rows


def run_policies(config: Config, task: Task, is_shown: bool) -> dict[Policy, list[Run]]:
    """All runs of all policies, with a progress bar if it is shown."""
    done: dict[Policy, list[Run]] = {}
    columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
    with progress.Progress(*columns, transient=True, disable=not is_shown) as bar:
        total = len(config.policies) * len(config.seeds) * config.steps
        job = bar.add_task(config.task, total=total)

        def tick(text: str) -> None:
            bar.update(job, advance=1, description=text)

        for policy in config.policies:
            done[policy] = []
            for run in runs.run_policy(config, task, policy, tick):
                done[policy].append(run)
                if is_shown:
                    bar.console.print(describe_run(run.row))
    return done


# =========================================================================================== results


def make_table(config: Config, rows: Sequence[dict[str, Any]]) -> Table:
    """One line per policy over its seeds."""
    num_seeds = len(config.seeds)
    table = Table(
        title=f"{config.task}: test accuracy in %; {config.steps} steps, {config.devices} workers, "
        f"{num_seeds} seed(s)",
        caption=make_caption(config, rows),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("policy", no_wrap=True)
    for name in ("accuracy", "min - max", "test loss", "wire/FP32", "trips", "steps/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for policy in config.policies:
        own = [row for row in rows if row["policy"] == policy]
        values = [row["value"] for row in own]
        table.add_row(
            policy,
            f"{statistics.mean(values):.2f}",
            f"{min(values):.2f} - {max(values):.2f}",
            f"{mean_of(own, 'test_loss'):.3f}",
            f"{mean_of(own, 'wire_fraction'):.4f}",
            str(sum(row["trips"] for row in own)),
            f"{1 / mean_of(own, 'step_seconds_median'):.1f}",
        )
    return table


def mean_of(rows: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.mean(row[name] for row in rows)


def make_caption(config: Config, rows: Sequence[dict[str, Any]]) -> str:
    """What the run found, from its numbers alone."""
    by_policy = {p: [row for row in rows if row["policy"] == p] for p in config.policies}
    exact = by_policy.pop("fp32", None)
    lines = [describe_gap(policy, own, exact) for policy, own in by_policy.items() if exact]
    target = Profile.load(config.profile).target if "guided" in by_policy else None
    if target and target.metric == by_policy["guided"][0]["metric"]:
        is_met = target.is_met(mean_of(by_policy["guided"], "value"))
        lines.append(
            f"The profile's target, {target.reference:.2f} with a tolerance of "
            f"{target.tolerance:.2f}, is {'met' if is_met else 'missed'} by guided."
        )
    if jax.process_count() == 1:
        lines.append("All workers share this machine's cores: steps/s is no network's.")
    return "\n".join(lines)


def describe_gap(policy: str, own: Sequence[dict[str, Any]], exact: Sequence[dict[str, Any]]) -> str:
    """One policy against fp32, seed by seed; by the design, under 1 point is noise."""
    gaps = [a["value"] - b["value"] for a, b in zip(own, exact, strict=True)]
    gap = statistics.mean(gaps)
    loss_ratio = mean_of(own, "test_loss") / mean_of(exact, "test_loss")
    if not math.isfinite(loss_ratio) or gap <= -1.0:
        verdict = "visibly worse than fp32"
    elif loss_ratio > 1.5:
        verdict = "accuracy does not suffer visibly on this easy task, the test loss does"
    else:
        verdict = "no visible difference to fp32 on this task"
    return (
        f"{policy}: {verdict} ({gap:+.2f} points, by seed {min(gaps):+.2f} to {max(gaps):+.2f}; "
        f"{loss_ratio:.1f} x the test loss) for 1/{1 / mean_of(own, 'wire_fraction'):.1f} of the bytes."
    )


STYLES = {  # Okabe and Ito's colours, told apart with every kind of sight; lines differ too
    "fp32": ("#000000", "-"),
    "bf16": ("#009E73", "-."),
    "static": ("#D55E00", "--"),
    "guided": ("#0072B2", "-"),
}


def plot_curves(config: Config, done: dict[Policy, list[Run]], path: Path) -> None:
    """Test accuracy, training loss and bytes sent, over steps; bands span the seeds."""
    from matplotlib.figure import Figure  # slow to import, and not needed before

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for policy, own in done.items():
        color, line = STYLES[policy]
        for ax, (x, curves) in zip(axes, curves_of(own), strict=True):
            ax.fill_between(x, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
            ax.plot(x, curves.mean(0), line, color=color, label=policy, linewidth=1.8)
    titles = ("test accuracy, %", "training loss, 15-step mean", "sent by one worker, MB")
    for ax, title in zip(axes, titles, strict=True):
        ax.set(title=title, xlabel="step")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[1].set_yscale("log")
    axes[2].set_yscale("log")
    axes[0].legend(loc="lower right", frameon=False)
    num_seeds = len(config.seeds)
    figure.suptitle(
        f"{config.task}, {config.devices} workers: mean of {num_seeds} seed(s), bands from worst to best"
    )
    figure.savefig(path, dpi=120)


def curves_of(own: Sequence[Run]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(steps, curves [seed, step]) of test accuracy, smoothed training loss and cumulative MB."""
    steps = own[0].steps
    every = np.arange(1, len(steps) + 1)
    tested = [i for i, step in enumerate(steps) if "test_accuracy" in step]
    width = min(15, len(steps))
    accuracy = np.array([[run.steps[i]["test_accuracy"] for i in tested] for run in own])
    losses = np.array([[step["train_loss"] for step in run.steps] for run in own])
    smooth = np.array([np.convolve(row, np.full(width, 1 / width), "valid") for row in losses])
    sent = np.array([[step["wire_bytes"] for step in run.steps] for run in own]).cumsum(1) / 1e6
    return [(every[tested], accuracy), (every[width - 1 :], smooth), (every, sent)]
