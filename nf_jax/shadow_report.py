"""A shadow trace for people: tables by part and by leaf, and a picture of leaves over training time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from nf_jax.report import new_figure, new_table
from nf_jax.sensitivity import Choice
from nf_jax.shadow_findings import Findings

_MAX_ROWS = 60  # leaves of a table, and of a picture that names them
_MAX_COLUMNS = 200  # steps of a picture

# ---------------------------------------------------------------------------------------------- tables


def parts_table(found: Findings) -> Table:
    """A line per part and candidate: the worst leaf's measures, the gain, and the verdict."""
    limits, steps = found.thresholds, found.trace.info.step
    title = f"the worst leaf of every part, by candidate; {len(steps):,} steps, {steps[0]:,} to {steps[-1]:,}"
    table, gains = new_table(title), ["saves MB", "saves ms"][: 1 + bool(found.trace.leaves.seconds)]
    table.add_column("part", no_wrap=True)
    table.add_column("leaves", justify="right")
    table.add_column("candidate", no_wrap=True)
    for name in ("cosine", "rel. error", "same sign", "residual", *gains):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for choice in found.choices:
        name, count = choice.part.name, f"{len(choice.part.leaves)}"
        if not choice.num_lossy:
            table.add_row(name, count, "", *[""] * (4 + len(gains)), "can only travel exactly")
        for row in _candidate_rows(found, choice):
            table.add_row(name, count, *row)
            name = count = ""
        table.add_section()
    table.caption = (
        f"safe: in {limits.quantile:.0%} of the steps from {limits.warmup_steps} on, residual at most "
        f"{limits.max_residual_ratio:g}, rel. error at most {limits.max_relative_error:g}, cosine at least "
        f"{limits.min_cosine:g}"
    )
    return table


def _candidate_rows(found: Findings, choice: Choice) -> Iterator[list[str]]:
    """What each candidate does to a part, as cells; nothing where all of it can only travel exactly."""
    leaves, judged, members = found.trace.leaves, found.judgment, choice.part.leaves
    lossy = [i for i in members if leaves.lossy[i]]
    for number, candidate in enumerate(leaves.candidates if lossy else ()):
        cosine, error, sign, residual = (values[number, lossy] for values in judged[1:])
        cells = [candidate.name, f"{cosine.min():.2f}", f"{error.max():.3g}", f"{sign.min():.2f}"]
        cells += [f"{residual.max():.3g}"]
        cells += [f"{_gain(leaves.fp32_bytes, leaves.wire_bytes[number], members) / 1e6:.3g}"]
        if leaves.seconds:
            cells += [f"{1e3 * _gain(leaves.fp32_seconds, leaves.seconds[number], members):.3g}"]
        num_bad = int((~judged.safe[number, lossy]).sum())
        verdict = f"no: {num_bad} of {len(lossy)} leaves" if num_bad else "safe"
        yield [*cells, verdict + ", chosen" * (number == choice.candidate)]


def leaves_table(found: Findings) -> Table:
    """Residual ratios, a line per leaf in backward order; what is not safe has a mark."""
    leaves, judged = found.trace.leaves, found.judgment
    shown = [i for i in leaves.order if leaves.lossy[i]]
    table = new_table("residual ratio of every leaf, the last layer first; !: not safe")
    for name in ("leaf", "part", "region"):
        table.add_column(name, no_wrap=True)
    for name in ("elements", *(candidate.name for candidate in leaves.candidates)):
        table.add_column(name, justify="right")
    parts = {i: choice.part.name for choice in found.choices for i in choice.part.leaves}
    for i in shown[:_MAX_ROWS]:
        cells = [
            f"{ratio:.3g}{' ' if safe else '!'}"
            for ratio, safe in zip(judged.residual_ratio[:, i], judged.safe[:, i], strict=True)
        ]
        size = int(np.prod(leaves.shapes[i]))
        table.add_row(leaves.paths[i], parts[i], leaves.regions[i], f"{size:,}", *cells)
    exact, more = len(leaves.order) - len(shown), len(shown) - _MAX_ROWS
    notes = [f"{exact} leaves can only travel exactly"] if exact else []
    notes += [f"{more} more leaves are not shown"] if more > 0 else []
    table.caption = "; ".join(notes)
    return table


def _gain(before: Sequence[float], after: Sequence[float], members: Sequence[int]) -> float:
    return sum(before[i] - after[i] for i in members)


# --------------------------------------------------------------------------------------------- picture


def plot_shadow(found: Findings, path: Path, title: str) -> None:
    """Residual ratios over layers and time, a panel for each candidate, as a PNG.

    Raises:
      ValueError: matplotlib is not installed, or no leaf can travel by candidates.
    """
    leaves, limit = found.trace.leaves, found.thresholds.max_residual_ratio
    rows, borders = _rows(found)
    if not rows:
        raise ValueError(f"{title}: expected a leaf that can travel by candidates, found none to draw")
    edges, grid = _binned(
        np.asarray(found.trace.info.step), np.asarray(found.trace.info.residual_ratio)[:, :, rows]
    )
    candidates, height = len(leaves.candidates), 0.16 * min(len(rows), _MAX_ROWS)
    figure = new_figure((3 + 2.5 * candidates, 2.2 + height))
    from matplotlib import colormaps

    panels = figure.subplots(1, candidates, sharey=True, squeeze=False)[0]
    colors = colormaps["RdBu_r"].with_extremes(bad="#BBBBBB")
    image: Any = None
    for number, (panel, candidate) in enumerate(zip(panels, leaves.candidates, strict=True)):
        # Octaves from the threshold: white at it, blue below, red beyond.
        with np.errstate(divide="ignore"):
            octaves = np.log2(grid[:, number].T / limit)
        image = panel.pcolormesh(
            edges, np.arange(len(rows) + 1), np.clip(octaves, -4, 4), cmap=colors, vmin=-4, vmax=4
        )
        num_safe = int(found.judgment.safe[number, rows].sum())
        panel.set_title(f"{candidate.name}\n{num_safe} of {len(rows)} leaves safe", fontsize=9)
        panel.set_xlabel("step")
        panel.axvline(found.thresholds.warmup_steps, color="#000000", lw=0.8, ls=":")
        for border in borders[1:]:
            panel.axhline(border, color="#000000", lw=0.6)
    _name_rows(panels[0], found, rows, borders)
    panels[0].invert_yaxis()
    bar = figure.colorbar(image, ax=list(panels), pad=0.01, fraction=0.03, ticks=[-4, -2, 0, 2, 4])
    bar.ax.set_yticklabels([f"{limit * 2.0**octave:.3g}" for octave in (-4, -2, 0, 2, 4)])
    bar.set_label("residual / mean gradient")
    meaning = f"red: beyond {limit:g}; dotted: end of the warm-up"
    figure.suptitle(f"{title}: what has not been sent yet ({meaning})", fontsize=10)
    figure.savefig(path, dpi=120)


def _rows(found: Findings) -> tuple[list[int], list[int]]:
    """The leaves of the picture, part by part, the last layer first; and where a part begins."""
    leaves = found.trace.leaves
    place = {leaf: position for position, leaf in enumerate(leaves.order)}
    rows: list[int] = []
    borders: list[int] = []
    blocks = [[i for i in choice.part.leaves if leaves.lossy[i]] for choice in found.choices]
    for block in sorted(filter(None, blocks), key=lambda block: np.mean([place[i] for i in block])):
        borders.append(len(rows))
        rows += sorted(block, key=place.__getitem__)
    return rows, borders


def _name_rows(panel: Any, found: Findings, rows: Sequence[int], borders: Sequence[int]) -> None:
    """Leaves by name where they are few enough to be read, else the parts."""
    if len(rows) <= _MAX_ROWS:
        paths = [found.trace.leaves.paths[i] for i in rows]
        panel.set_yticks(np.arange(len(rows)) + 0.5, paths, fontsize=7)
        return
    parts = {i: choice.part.name for choice in found.choices for i in choice.part.leaves}
    middles = [(a + b) / 2 for a, b in zip(borders, [*borders[1:], len(rows)], strict=True)]
    panel.set_yticks(middles, [parts[rows[border]] for border in borders], fontsize=8)


def _binned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Medians over so many steps that the picture stays small: edges `[n + 1]`, values `[n, ...]`."""
    bins = np.array_split(np.arange(len(steps)), min(len(steps), _MAX_COLUMNS))
    grid = np.stack([np.median(values[own], axis=0) for own in bins])
    last = 2 * steps[-1] - steps[-2] if len(steps) > 1 else steps[-1] + 1
    return np.append([steps[own[0]] for own in bins], last), grid
