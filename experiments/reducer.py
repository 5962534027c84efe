"""The capacity model against reality: predicted and measured seconds of every route over limited links.

    python -m experiments.reducer
    python -m experiments.reducer --hosts 2 --rates none 100mbit --shapes 1MiB --out runs/reducer

On a testbed (see `experiments.testbed`: root and iproute2), for every number of hosts and rate: probes a
substrate (`nf_jax.substrate`), predicts what each route takes for one square matrix (`nf_jax.costs`), and
measures it (`experiments.links`, all routes in turns). The matrix has sizes that the probe's whole steps do
not have. A prediction counts as good within 20 % of the median measured; a choice between FP32 and a low-bit
route as right if it is the faster one, where the two differ by more than 10 %.

Writes README.md, summary.json (a row per route and cell) and reducer.png under `--out`, and in its links/
what was measured and the substrates. One that is there already is not probed again.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tyro

from experiments import links, testbed
from experiments.links_hosts import ROOT, find_pythons
from experiments.links_jax import PROFILES
from experiments.links_worker import SHAPES
from nf_jax import Route, Substrate, costs, plan
from nf_jax.substrate import SIZES_BYTES

ROUTE_OF_ARM = {
    "fp32": Route.FP32,
    "bf16": Route.BF16,
    "sign-majority": Route.SIGN,
    "ternary": Route.TERNARY,
}
GOOD_RATIO, CLEAR_RATIO = 0.2, 1.1

# ============================================================================================= config


@dataclasses.dataclass(frozen=True)
class Config:
    """Which cells to measure, and where to write."""

    rates: tuple[str, ...] = ("none", "10gbit", "1gbit", "200mbit", "100mbit")
    """Of every link, both ways."""
    hosts: tuple[int, ...] = (2, 4)
    """Numbers of hosts."""
    shapes: tuple[str, ...] = ("64KiB", "1MiB", "16MiB")
    """Of the matrix: names that `experiments.links` knows."""
    out: Path | None = None
    """Folder to write; experiments/results/<date>-reducer by default."""
    rounds: int = 5
    """Turns of every route in a cell; a turn counts up to 20 steps."""
    probe_sizes_bytes: tuple[int, ...] = SIZES_BYTES
    """Sizes at which substrates are probed."""


# ========================================================================================= predictions


def predict(substrate: Substrate, arm: str, shapes: str) -> float:
    """Seconds that a substrate predicts for an arm."""
    route, profile = ROUTE_OF_ARM[arm], PROFILES[arm]
    params: Any = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES[shapes]().items()}
    lanes = plan(profile, params, substrate.num_workers).lanes
    return float(costs.lane_seconds(profile, lanes, substrate)[:, route].sum())


def make_rows(measured: Sequence[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """Rows of summary.json: what was measured, and what substrates predict.

    `what_if_seconds` is predicted from the substrate of unlimited links, told the rate alone.
    """
    rows = []
    for row in measured:
        hosts, rate, arm, shapes = (row[key] for key in ("hosts", "rate", "arm", "shapes"))
        if arm not in ROUTE_OF_ARM:
            continue
        here, free = (Substrate.load(links.substrate_path(out, hosts, name)) for name in (rate, "none"))
        bits = testbed.bits_per_second(rate)
        told = free.rescaled(link_bytes_per_second=None if bits is None else bits / 8)
        rows.append(
            {
                "route": ROUTE_OF_ARM[arm].name,
                "hosts": hosts,
                "rate": rate,
                "size_bytes": row["gradient_bytes"],
                "predicted_seconds": predict(here, arm, shapes),
                "measured_seconds": row["step_seconds_median"],
                "measured_seconds_min": row["step_seconds_min"],
                "measured_seconds_max": row["step_seconds_max"],
                "what_if_seconds": predict(told, arm, shapes),
            }
        )
    return rows


def is_good(row: dict[str, Any], key: str = "predicted_seconds") -> bool:
    """Whether a prediction is within 20 % of what was measured."""
    return abs(row[key] / row["measured_seconds"] - 1) <= GOOD_RATIO


def judge_choices(rows: Sequence[dict[str, Any]]) -> tuple[int, int, list[str]]:
    """Right choices between FP32 and each low-bit route, clear cases of them, and the wrong ones in words."""
    exact = {_cell(row): row for row in rows if row["route"] == "FP32"}
    right, clear, wrong = 0, 0, []
    for row in rows:
        if row["route"] == "FP32" or (other := exact.get(_cell(row))) is None:
            continue
        gain = other["measured_seconds"] / row["measured_seconds"]
        if max(gain, 1 / gain) <= CLEAR_RATIO:
            continue
        clear += 1
        predicted = other["predicted_seconds"] / row["predicted_seconds"]
        if (predicted > 1) == (gain > 1):
            right += 1
        else:
            size = f"{row['size_bytes'] // 1024} KiB"
            wrong.append(
                f"{row['route']}, {row['hosts']} hosts, {row['rate']}, {size}: FP32 took {gain:.2f} times as "
                f"long, {predicted:.2f} predicted"
            )
    return right, clear, wrong


def judge_auto(measured: Sequence[dict[str, Any]]) -> list[str]:
    """A line for every cell: the time of `auto` over the fastest arm's and over plain `pmean`'s, Markdown."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in measured:
        key = row["hosts"], row["rate"], row["shapes"]
        cells.setdefault(key, {})[row["arm"]] = row["step_seconds_median"]
    lines = []
    for (hosts, rate, shapes), seconds in cells.items():
        best = min((arm for arm in seconds if arm != "auto"), key=seconds.__getitem__)
        ratios = (f"{seconds['auto'] / seconds[arm]:.2f}" for arm in (best, "pmean"))
        lines.append(f"| {hosts} | {rate} | {shapes} | {best} | " + " | ".join(ratios) + " |")
    return lines


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["hosts"], row["rate"], row["size_bytes"]


# ============================================================================================== report


def write(
    out: Path, rows: Sequence[dict[str, Any]], auto: Sequence[str], *, command: str, machine: str
) -> None:
    """Writes README.md, summary.json and reducer.png."""
    (out / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(rows, out / "reducer.png")
    right, clear, wrong = judge_choices(rows)
    shares = {
        key: f"{sum(is_good(row, key) for row in rows)} of {len(rows)}"
        for key in ("predicted_seconds", "what_if_seconds")
    }
    lines = [
        "# The capacity model against measured steps",
        "",
        f"    python {command}",
        "",
        f"Machine: {machine}. Hosts are network namespaces on it and share its cores.",
        "",
        f"- Within 20 % of the measured median: {shares['predicted_seconds']} predictions from the substrate "
        "of the same hosts and rate (target: 80 %).",
        f"- From the substrate of unlimited links, told the rate alone: {shares['what_if_seconds']}.",
        f"- FP32 or low-bit, where they differ by more than 10 %: {right} of {clear} choices right"
        + ("." if not wrong else "; wrong:"),
        *(f"  - {line}" for line in wrong),
        "",
        "Milliseconds: predicted / measured median (minimum - maximum); `*`: off by more than 20 %.",
    ]
    for hosts in sorted({row["hosts"] for row in rows}):
        lines += ["", f"## {hosts} hosts", "", *_table([row for row in rows if row["hosts"] == hosts])]
    lines += [
        "",
        "![predicted against measured seconds](reducer.png)",
        "",
        "## What the controller chose",
        "",
        "`auto` is FP32 or SIGN majority as the substrate says. Its median over that of the fastest arm, and "
        "over f32 `pmean`'s:",
        "",
        "| hosts | rate | size | fastest | over it | over pmean |",
        "| --- | --- | --- | --- | --- | --- |",
        *auto,
    ]
    (out / "README.md").write_text("\n".join(lines) + "\n")


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    found = {(row["size_bytes"], row["route"], row["rate"]): row for row in rows}
    lines = ["| KiB | route | " + " | ".join(rates) + " |", "| --- " * (len(rates) + 2) + "|"]
    for size, route in dict.fromkeys((row["size_bytes"], row["route"]) for row in rows):
        texts = [_cell_text(found[size, route, rate]) for rate in rates]
        lines.append(f"| {size // 1024} | {route} | " + " | ".join(texts) + " |")
    return lines


def _cell_text(row: dict[str, Any]) -> str:
    names = ("predicted_seconds", "measured_seconds", "measured_seconds_min", "measured_seconds_max")
    predicted, middle, low, high = (1e3 * row[name] for name in names)
    mark = "" if is_good(row) else " *"
    return f"{predicted:.4g} / {middle:.4g} ({low:.4g} - {high:.4g}){mark}"


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted against measured, log-log, a panel per number of hosts; the band is 20 %."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = sorted({row["hosts"] for row in rows})
    figure = Figure(figsize=(5 * len(counts) + 1, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    colors = {"FP32": "black", "BF16": "tab:gray", "SIGN": "tab:blue", "TERNARY": "tab:green"}
    ends = [f([row["measured_seconds"] for row in rows]) * 1e3 for f in (min, max)]
    for panel, hosts in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        panel.fill_between(ends, [0.8 * x for x in ends], [1.2 * x for x in ends], color="0.9")
        panel.plot(ends, ends, color="0.6", lw=1)
        for route, color in colors.items():
            own = [row for row in rows if row["hosts"] == hosts and row["route"] == route]
            x, y = ([1e3 * row[f"{name}_seconds"] for row in own] for name in ("measured", "predicted"))
            panel.plot(x, y, "o", ms=4, color=color, label=route)
        panel.set(xscale="log", yscale="log", title=f"{hosts} hosts", xlabel="measured, ms")
        panel.grid(alpha=0.3)
    figure.axes[0].set_ylabel("predicted, ms")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


# ================================================================================================ main


def run(config: Config) -> list[dict[str, Any]]:
    """Measures, predicts, writes."""
    out = config.out or ROOT / "experiments" / "results" / f"{datetime.date.today()}-reducer"
    asked = links.Config(
        arms=("pmean", *ROUTE_OF_ARM, "auto"),
        rates=config.rates,
        hosts=config.hosts,
        shapes=config.shapes,
        rounds=config.rounds,
        probe_sizes_bytes=config.probe_sizes_bytes,
        keep_memory=True,
    )
    pythons = find_pythons(asked.arms, asked.torch_venv)
    measured = links.measure(asked, out / "links", pythons)
    rows = make_rows(measured, out / "links")
    auto = judge_auto(measured)
    write(out, rows, auto, command=shlex.join(sys.orig_argv[1:]), machine=links.describe(pythons))
    return rows


def main(args: Sequence[str] | None = None) -> None:
    testbed.end_on_signals()
    try:
        run(tyro.cli(Config, prog="experiments.reducer", description=__doc__, args=args))
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
