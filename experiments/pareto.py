"""Loss against bytes: the policies of some jobs in one picture, and which of them no other beats on both.

    python -m experiments.pareto runs/text runs/text-bf16 --out pareto.png

A folder is what an experiment wrote; the policies of a workload are compared, whatever folder they lie in.
Rows of one policy and one `label` (by default none) are one point: the mean over seeds, with a line from the
best to the worst.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.jobs import STYLES

LETTER_WIDTH, LABEL_HEIGHT = 5.0, 10.0  # of a label in the picture, in typographic points


@dataclasses.dataclass(frozen=True)
class Config:
    """Which runs, and where to draw them."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders with a summary.json."""
    out: Path = Path("pareto.png")
    """The picture."""


class Point(NamedTuple):
    """Attributes: name; policy; wire_fraction; losses, one per seed; is_best: no other has less of both."""

    name: str
    policy: str
    wire_fraction: float
    losses: tuple[float, ...]
    is_best: bool = False

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses)


def read_rows(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of all folders, of one workload."""
    rows = []
    for folder in folders:
        path = folder / "summary.json"
        if not path.is_file():
            raise ValueError(f"{path}: expected what an experiment wrote, found no such file")
        rows += json.loads(path.read_text())
    workloads = {row.get("workload") for row in rows}
    if len(workloads) != 1:
        raise ValueError(f"folders: expected runs of one workload, got {sorted(map(str, workloads))}")
    return rows


def points_of(rows: Sequence[dict[str, Any]]) -> list[Point]:
    """A point for every policy and label, by bytes."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["policy"], row.get("label", "")), []).append(row)
    points = [
        Point(
            f"{policy} {label}".strip(),
            policy,
            statistics.mean(row["wire_fraction"] for row in own),
            tuple(row["test_loss"] for row in own),
        )
        for (policy, label), own in kinds.items()
    ]
    return sorted((p._replace(is_best=is_best(p, points)) for p in points), key=lambda p: p.wire_fraction)


def is_best(point: Point, points: Sequence[Point]) -> bool:
    """Whether no other has at most the same of both, and less of one."""
    own = (point.wire_fraction, point.loss)
    others = [(other.wire_fraction, other.loss) for other in points]
    return not any(o[0] <= own[0] and o[1] <= own[1] and o != own for o in others)


def draw(points: Sequence[Point], title: str, path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import, and not needed before

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    ax = figure.subplots()
    front = [point for point in points if point.is_best]
    ax.step([p.wire_fraction for p in front], [p.loss for p in front], "-", where="post", color="#BBBBBB")
    for point in points:
        color, _ = STYLES[point.policy]
        ax.plot([point.wire_fraction] * 2, [min(point.losses), max(point.losses)], color=color, linewidth=1)
        fill = color if point.is_best else "none"
        ax.plot(point.wire_fraction, point.loss, "o", color=color, markerfacecolor=fill)
    ax.set(xscale="log", xlabel="bytes sent over FP32's", ylabel="held-out loss", title=title)
    ax.margins(0.15)
    figure.draw_without_rendering()  # the axes get their place, which labels need to know
    for point, rise in zip(points, label_rises(ax, points), strict=True):
        at = (point.wire_fraction, point.loss)
        ax.annotate(point.name, at, (6, 4 + rise), textcoords="offset points", fontsize=8)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def label_rises(ax: Any, points: Sequence[Point]) -> list[float]:
    """By how many typographic points each label is moved up, so that none lies on another's."""
    in_points = 72 / ax.figure.dpi
    places = [ax.transData.transform((p.wire_fraction, p.loss)) * in_points for p in points]
    taken: list[tuple[float, float, float]] = []  # left end, right end, height
    rises = [0.0] * len(points)
    for index in sorted(range(len(points)), key=lambda i: places[i][1]):
        left, height = places[index]
        right, start = left + LETTER_WIDTH * len(points[index].name), height
        for begin, end, other in sorted(taken, key=lambda own: own[2]):
            if begin < right and left < end and abs(height - other) < LABEL_HEIGHT:
                height = other + LABEL_HEIGHT
        taken.append((left, right, height))
        rises[index] = float(height - start)
    return rises


def make_table(points: Sequence[Point]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("policy", "seeds", "wire/FP32", "test loss", "min - max", "on the front"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for p in points:
        spread = f"{min(p.losses):.4f} - {max(p.losses):.4f}"
        row = (str(len(p.losses)), f"{p.wire_fraction:.4f}", f"{p.loss:.4f}", spread)
        table.add_row(p.name, *row, "yes" if p.is_best else "")
    return table


def main(args: Sequence[str] | None = None) -> None:
    config = tyro.cli(Config, prog="experiments.pareto", description=__doc__, args=args)
    try:
        rows = read_rows(config.folders)
    except ValueError as error:
        sys.exit(f"error: {error}")
    points = points_of(rows)
    num_front = sum(point.is_best for point in points)
    draw(points, f"{rows[0]['workload']}: filled are the {num_front} that none beats on both", config.out)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file or a pipe has no edge to cut tables at
    console.print(make_table(points))
    console.print(f"Wrote {config.out}.")


if __name__ == "__main__":
    main()
