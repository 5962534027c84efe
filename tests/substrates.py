"""Substrates made up for tests."""

from __future__ import annotations

from typing import Any

import jax

from nf_jax.stages import COLLECTIVES, STAGES, Stage, Substrate

MIB = 2**20


def stage(latency_seconds: float = 1e-4, seconds_per_byte: float = 1e-9) -> Stage:
    sizes = (4096, 2**16, MIB)
    return Stage(
        latency_seconds=latency_seconds,
        seconds_per_byte=seconds_per_byte,
        latency_error_seconds=0.0,
        seconds_per_byte_error=0.0,
        sizes_bytes=sizes,
        measured_seconds=tuple(latency_seconds + size * seconds_per_byte for size in sizes),
    )


FREE = stage(0.0, 0.0)


def substrate(num_workers: int = 4, *, link: str | None = None, **stages: Any) -> Substrate:
    """Links of 1 GB/s; the worker's own part costs nothing, unless told."""
    told: dict[Any, Stage] = dict.fromkeys(STAGES, FREE) | dict.fromkeys(COLLECTIVES, stage()) | stages
    return Substrate(
        num_workers=num_workers,
        num_processes=num_workers,
        backend=jax.default_backend(),
        device_kind="cpu",
        link=link,
        stages=told,
    )
