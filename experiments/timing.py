"""Arms that take turns: ratios of one run, whatever the machine does meanwhile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
from rich import progress


def interleave(arms: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call; arms take turns, so that a slow minute of the machine hits all alike."""
    for call in arms.values():
        jax.block_until_ready(call())
        jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in progress.track(range(repeats), description=" / ".join(arms), transient=True):
        for name, call in arms.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, base: str) -> dict[str, float]:
    """Median, minimum and maximum of one arm's time over another's in the same turn."""
    turns = [a / b for a, b in zip(seconds[name], seconds[base], strict=True)]
    return {"median": statistics.median(turns), "min": min(turns), "max": max(turns)}


def carried(step: Callable[..., Any], *fixed: Any, state: Any) -> Callable[[], Any]:
    """Calls `step(*fixed, state) -> (out, state)` on the state it left: donated buffers are used up."""
    held = [state]

    def call() -> Any:
        out, held[0] = step(*fixed, held[0])
        return out

    return call
