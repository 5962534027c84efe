"""The link benchmark's rows as tables and plots; called by `experiments.links`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.testbed import bits_per_second

Rows = Sequence[dict[str, Any]]

# Colour and dash by arm; PyTorch's are dashed.
STYLES: dict[str, tuple[str, str]] = {
    "pmean": ("black", "-"),
    "fp32": ("dimgray", "-."),
    "sign-count": ("tab:cyan", "-"),
    "sign-majority": ("tab:blue", "-"),
    "sign-majority-pinned": ("navy", "-"),
    "ternary": ("tab:green", "-"),
    "bf16": ("tab:gray", "-"),
    "auto": ("tab:purple", ":"),
    "torch-plain": ("black", "--"),
    "torch-fp16": ("tab:gray", "--"),
    "torch-powersgd-1": ("tab:orange", "--"),
    "torch-powersgd-4": ("tab:red", "--"),
    "torch-1bit-adam-port": ("tab:pink", "--"),
}


def write(out: Path, rows: Rows, labels: dict[str, str], *, command: str, machine: str) -> None:
    """Writes README.md and a plot per number of hosts.

    Args:
      out: the folder.
      rows: as in summary.json.
      labels: arm -> what people read, in the order to show; the first is the baseline of ratios.
      command: the exact one that measured them.
      machine: where.
    """
    hosts = sorted({row["hosts"] for row in rows})
    for count in hosts:
        plot([row for row in rows if row["hosts"] == count], labels, out / f"links-{count}.png")
    lines = [
        "# Aggregation over limited links",
        "",
        f"    python {command}",
        "",
        f"Machine: {machine}. Hosts are network namespaces on it and share its cores.",
        "",
        "Step time in ms: median (minimum - maximum) of the slowest host; `x`: the median of "
        f"{labels[next(iter(labels))]} over the arm's. MB: what left the interface per step, the most of any "
        "host; barriers between steps (under 1 kB) and acknowledgements are in it. PyTorch's arms are called "
        "DDP, and the 1-bit all-reduce is a port.",
    ]
    for count in hosts:
        for shapes in dict.fromkeys(row["shapes"] for row in rows):
            cell = [row for row in rows if row["hosts"] == count and row["shapes"] == shapes]
            if cell:
                megabytes = cell[0]["gradient_bytes"] / 1e6
                lines += [
                    "",
                    f"## {count} hosts, {shapes} ({megabytes:.1f} MB)",
                    "",
                    *make_table(cell, labels),
                ]
        lines += ["", f"![step time against rate, {count} hosts](links-{count}.png)"]
    (out / "README.md").write_text("\n".join(lines) + "\n")


def make_table(cell: Rows, labels: dict[str, str]) -> list[str]:
    """Markdown: a line per arm, a column per rate."""
    rates = list(dict.fromkeys(row["rate"] for row in cell))
    found = {(row["arm"], row["rate"]): row for row in cell}
    base = next(iter(labels))
    lines = ["| arm | MB | " + " | ".join(rates) + " |", "| --- " * (len(rates) + 2) + "|"]
    for arm, label in labels.items():
        # Where links are slow, retransmissions are counted too: the least is what the arm sends.
        sent = min(found[arm, rate]["tx_bytes_per_step"] for rate in rates) / 1e6
        texts = []
        for rate in rates:
            row, other = found[arm, rate], found[base, rate]
            low, middle, high = (1e3 * row[f"step_seconds_{part}"] for part in ("min", "median", "max"))
            ratio = other["step_seconds_median"] / row["step_seconds_median"]
            texts.append(f"{middle:.4g} ({low:.4g} - {high:.4g}) {ratio:.2f}x")
        lines.append(f"| {label} | {sent:.4g} | " + " | ".join(texts) + " |")
    return lines


def plot(rows: Rows, labels: dict[str, str], path: Path) -> None:
    """Step time against rate, log-log, a panel per shapes; a link without a limit stands at the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["shapes"] for row in rows))
    finite = [bits for row in rows if (bits := bits_per_second(row["rate"]))]
    unlimited = 4 * max(finite, default=1e9)
    position = lambda rate: (bits_per_second(rate) or unlimited) / 1e6  # noqa: E731
    figure = Figure(figsize=(4.2 * len(names) + 2.6, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    ticks = {position(row["rate"]): row["rate"] for row in rows}
    for panel, name in zip(panels, names, strict=True):
        for arm, label in labels.items():
            own = sorted(
                (row for row in rows if row["arm"] == arm and row["shapes"] == name),
                key=lambda row: position(row["rate"]),
            )
            x = [position(row["rate"]) for row in own]
            low, middle, high = (
                [1e3 * row[f"step_seconds_{part}"] for row in own] for part in ("min", "median", "max")
            )
            color, dash = STYLES[arm]
            panel.fill_between(x, low, high, color=color, alpha=0.12, linewidth=0)
            panel.plot(x, middle, dash, color=color, marker=".", label=label, linewidth=1.5)
        panel.set(xscale="log", yscale="log", title=name, xlabel="rate of a link")
        panel.set_xticks(list(ticks), list(ticks.values()), rotation=30)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("step, ms")
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside right center", frameon=False)
    figure.suptitle(f"gradients in, means out: {rows[0]['hosts']} hosts, median, band from best to worst")
    figure.savefig(path, dpi=120)
