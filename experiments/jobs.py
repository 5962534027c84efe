"""A whole job: every policy with every seed, then one table, one picture, one summary.json."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from rich import box, progress
from rich.console import Console
from rich.table import Table

from experiments import kept, runs
from experiments.config import Config, Policy
from experiments.kept import Run
from experiments.paired import CONFIDENCE, difference
from experiments.policies import check_files
from experiments.runs import Task
from nf_jax import Profile, cluster


class Metric(NamedTuple):
    """How a result is shown. Attributes: title; digits after the point; higher_is_better."""

    title: str
    digits: int
    higher_is_better: bool


METRICS = {
    "test_accuracy": Metric("accuracy", 2, True),
    "test_loss_per_byte": Metric("nats/byte", 4, False),
}
UNITS = {"test_accuracy": "test accuracy in %", "test_loss_per_byte": "held-out loss in nats per byte"}

# =============================================================================================== job


def main(
    prog: str,
    configs: Mapping[str, Callable[[], Config]],
    tasks: Mapping[str, Callable[[Config], Task]],
    args: Sequence[str] | None = None,
) -> None:
    """An experiment's command line: a config by name, its fields as flags; runs the job."""
    choices = {name: (make.__doc__ or name, make()) for name, make in configs.items()}
    config = tyro.extras.overridable_config_cli(choices, prog=prog, args=args)
    try:
        check_files(config)
        kept.check_resumed(config)
        task = tasks[config.task](config)
        task = task._replace(load=functools.cache(task.load))
        task.load()
    except ValueError as error:
        sys.exit(f"error: {error}")
    with contextlib.ExitStack() as processes:
        try:
            processes.enter_context(cluster.joined(config.cluster, config.devices))
        except ValueError as error:
            sys.exit(f"error: {error}")
        run_here(config, task)


def describe_run(row: dict[str, Any]) -> str:
    metric = METRICS[row["metric"]]
    return (
        f"{row['policy']}, seed {row['seed']}: {metric.title} {row['value']:.{metric.digits}f}, "
        f"{row['wire_fraction']:.4f} of FP32's bytes, {row['trips']} trips, "
        f"{1000 * row['step_seconds_median']:.0f} ms a step"
    )


def run_job(config: Config, task: Task) -> list[dict[str, Any]]:
    """Runs a whole job, as one process of several if the config says so; returns the rows of summary.json."""
    with cluster.joined(config.cluster, config.devices):
        return run_here(config, task)


def run_here(config: Config, task: Task) -> list[dict[str, Any]]:
    """The job, where the processes are joined; but for checkpoints, only the first prints and writes."""
    has_checkpoints = config.checkpoint_every > 0
    if cluster.is_first() and not config.resume:
        for name, step in kept.stopped_runs(config).items():
            print(
                f"{name}: replaces a run that stopped after step {step}; --resume would have gone on with it."
            )
    config = kept.open_folder(config)
    if not cluster.is_first():
        done = run_policies(config, task, is_shown=False)
        return [run.row for own in done.values() for run in own]
    config.out.mkdir(parents=True, exist_ok=True)
    if config.resume:
        print(kept.describe_resumed(config))
    if has_checkpoints and not config.checkpoint_every:
        print(f"No checkpoints: not all processes see {config.out}. With a shared --out, --resume goes on.")
    done = run_policies(config, task, is_shown=True)
    rows = [run.row for own in done.values() for run in own]
    (config.out / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot_curves(config, done, config.out / "curves.png")
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file or a pipe has no edge to cut tables at
    console.print(make_table(config, rows))
    console.print(f"Wrote {config.out}/summary.json, curves.png and a trace.jsonl per run.")
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
    """One line per policy over its seeds, and its difference to fp32."""
    num_seeds, metric = len(config.seeds), METRICS[rows[0]["metric"]]
    table = Table(
        title=f"{config.task}: {UNITS[rows[0]['metric']]}; {config.steps} steps, {config.devices} workers, "
        f"{num_seeds} seed(s)",
        caption=make_caption(config, rows),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("policy", no_wrap=True)
    names = [metric.title, "min - max", "vs fp32 (bound)", "test loss", "wire/FP32", "trips", "steps/s"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    exact = [row["value"] for row in rows if row["policy"] == "fp32"]
    for policy in config.policies:
        own = [row for row in rows if row["policy"] == policy]
        values = [row["value"] for row in own]
        show = lambda value, digits=metric.digits: f"{value:.{digits}f}"  # noqa: E731
        table.add_row(
            policy,
            show(statistics.mean(values)),
            f"{show(min(values))} - {show(max(values))}",
            show_difference(metric, values, exact) if exact and policy != "fp32" else "",
            f"{mean_of(own, 'test_loss'):.3f}",
            f"{mean_of(own, 'wire_fraction'):.4f}",
            str(sum(row["trips"] for row in own)),
            f"{1 / mean_of(own, 'step_seconds_median'):.1f}",
        )
    return table


def show_difference(metric: Metric, own: Sequence[float], exact: Sequence[float]) -> str:
    """The mean difference, and how bad it may be: the one-sided bound, where there are seeds to tell."""
    found = difference(own, exact)
    bound = found.low if metric.higher_is_better else found.high
    text = f"{found.mean:+.{metric.digits}f}"
    return f"{text} ({bound:+.{metric.digits}f})" if math.isfinite(bound) else text


def mean_of(rows: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.mean(row[name] for row in rows)


def make_caption(config: Config, rows: Sequence[dict[str, Any]]) -> str:
    """What the run found, from its numbers alone."""
    by_policy = {p: [row for row in rows if row["policy"] == p] for p in config.policies}
    exact = by_policy.pop("fp32", None)
    lines = [describe_gap(policy, own, exact) for policy, own in by_policy.items() if exact]
    if exact and by_policy and len(exact) > 1:
        lines.append(
            f"In brackets: the worse end of a one-sided {CONFIDENCE:.0%} interval of the mean difference."
        )
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
    """One policy against fp32, seed by seed."""
    gaps = [a["value"] - b["value"] for a, b in zip(own, exact, strict=True)]
    gap = statistics.mean(gaps)
    ratio = mean_of(own, "test_loss") / mean_of(exact, "test_loss")
    metric = METRICS[own[0]["metric"]]
    if metric.higher_is_better:
        verdict, shown = judge_accuracy(gap, ratio), f"{gap:+.2f} points"
        shown += f", by seed {min(gaps):+.2f} to {max(gaps):+.2f}; {ratio:.1f} x the test loss"
    else:
        relative = [100 * gap / row["value"] for gap, row in zip(gaps, exact, strict=True)]
        verdict = judge_loss(statistics.mean(relative))
        shown = f"{statistics.mean(relative):+.2f} %"
        shown += f", by seed {min(relative):+.2f} to {max(relative):+.2f}"
    return f"{policy}: {verdict} ({shown}) for 1/{1 / mean_of(own, 'wire_fraction'):.1f} of the bytes."


def judge_accuracy(gap: float, loss_ratio: float) -> str:
    """By the design, under 1 point is noise."""
    if not math.isfinite(loss_ratio) or gap <= -1.0:
        return "visibly worse than fp32"
    if loss_ratio > 1.5:
        return "accuracy does not suffer visibly on this easy task, the test loss does"
    return "no visible difference to fp32 on this task"


def judge_loss(percent: float) -> str:
    if not percent <= 1.0:
        return "visibly worse than fp32"
    return "within 1 % of fp32's loss" if percent > 0 else "no worse than fp32"


STYLES = {  # Okabe and Ito's colours, told apart with every kind of sight; lines differ too
    "fp32": ("#000000", "-"),
    "bf16": ("#009E73", "-."),
    "static": ("#D55E00", "--"),
    "static-ef": ("#CC79A7", "--"),
    "guided": ("#0072B2", "-"),
    "signsgd": ("#E69F00", ":"),
    "terngrad": ("#56B4E9", ":"),
    "powersgd1": ("#8B6F00", ":"),
    "powersgd2": ("#8B6F00", "--"),
    "powersgd4": ("#8B6F00", "-"),
    "dgc": ("#999999", "-."),
    "accordion": ("#0072B2", ":"),
    "sign-per-leaf": ("#332288", "-"),
    "sign-per-1mib": ("#332288", "--"),
    "sign-per-5mib": ("#332288", "-."),
    "sign-per-25mib": ("#332288", ":"),
}


def plot_curves(config: Config, done: dict[Policy, list[Run]], path: Path) -> None:
    """The result, training loss and bytes sent, over steps; bands span the seeds."""
    from matplotlib.figure import Figure  # slow to import, and not needed before

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for policy, own in done.items():
        color, line = STYLES[policy]
        for ax, (x, curves) in zip(axes, curves_of(own), strict=True):
            ax.fill_between(x, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
            ax.plot(x, curves.mean(0), line, color=color, label=policy, linewidth=1.8)
    metric = METRICS[done[config.policies[0]][0].row["metric"]]
    titles = (f"test {metric.title}", "training loss, 15-step mean", "sent by one worker, MB")
    for ax, title in zip(axes, titles, strict=True):
        ax.set(title=title, xlabel="step")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[1].set_yscale("log")
    axes[2].set_yscale("log")
    axes[0].legend(loc="lower right" if metric.higher_is_better else "upper right", frameon=False)
    num_seeds = len(config.seeds)
    figure.suptitle(
        f"{config.task}, {config.devices} workers: mean of {num_seeds} seed(s), bands from worst to best"
    )
    figure.savefig(path, dpi=120)


def curves_of(own: Sequence[Run]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(steps, curves [seed, step]) of the result, smoothed training loss and cumulative MB."""
    steps = own[0].steps
    every = np.arange(1, len(steps) + 1)
    metric = own[0].row["metric"]
    tested = [i for i, step in enumerate(steps) if metric in step]
    width = min(15, len(steps))
    results = np.array([[run.steps[i][metric] for i in tested] for run in own])
    losses = np.array([[step["train_loss"] for step in run.steps] for run in own])
    smooth = np.array([np.convolve(row, np.full(width, 1 / width), "valid") for row in losses])
    sent = np.array([[step["wire_bytes"] for step in run.steps] for run in own]).cumsum(1) / 1e6
    return [(every[tested], results), (every[width - 1 :], smooth), (every, sent)]
