"""What a soak is watched with: a deadline for every step, compilations, memory."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nf_jax import ending

_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def watchdog(seconds: float) -> Iterator[Callable[[], None]]:
    """Yields a function; ends the process, and prints where it hangs, unless that is called often enough."""
    last = [time.monotonic()]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(min(seconds / 4, 1.0)):
            if time.monotonic() - last[0] > seconds:
                try:
                    ending.say(f"soak: no step ended within {seconds:g} s; this is where it hangs:")
                    faulthandler.dump_traceback()
                finally:
                    os._exit(1)

    def beat() -> None:
        last[0] = time.monotonic()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield beat
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """A list that grows by an entry with each program that XLA compiles."""
    found: list[str] = []

    def hear(event: str, duration_secs: float, **more: Any) -> None:
        if event == _COMPILED:
            found.append(str(more.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)


def memory_bytes() -> int:
    """What the process holds in memory now; where the system does not tell, the most it ever held."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def describe_memory(samples: Sequence[tuple[int, int]]) -> dict[str, float]:
    """How memory went after the first fifth of `(step, bytes)`, which is warm-up: medians, growth, slope."""
    steps, sizes = np.asarray(samples, float).T
    fifth = len(steps) // 5
    early, late = np.median(sizes[fifth : 2 * fifth + 1]), np.median(sizes[-fifth - 1 :])
    slope = np.polyfit(steps[fifth:], sizes[fifth:], 1)[0] if len(steps) > 2 else 0.0
    return {
        "early_mib": float(early) / 2**20,
        "late_mib": float(late) / 2**20,
        "growth_mib": float(late - early) / 2**20,
        "slope_bytes_per_step": float(slope),
    }
