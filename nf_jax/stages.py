"""Stages of averaging: how long each takes as a function of its bytes, measured on one mesh of workers.

`nf_jax.substrate.probe` measures them, `costs.py` adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from nf_jax import checks
from nf_jax.checks import Frozen, Many, PositiveSize, Size, Text
from nf_jax.profile import Route

StageName = Literal[
    "pack", "count", "decode", "all_reduce", "all_to_all", "all_gather", "fp32", "bf16", "sign", "ternary"
]
STAGES: tuple[StageName, ...] = StageName.__args__
COLLECTIVES: frozenset[StageName] = frozenset(("all_reduce", "all_to_all", "all_gather"))
OWN_STAGE: dict[Route, StageName] = {
    Route.FP32: "fp32",
    Route.BF16: "bf16",
    Route.SIGN: "sign",
    Route.TERNARY: "ternary",
}
"""What a route does on the worker beside the stages that routes share: scales, residuals, health's norms."""

# Nothing takes longer than 30 years, and products with bytes stay finite.
NonNegative = Annotated[float, Field(ge=0, le=1e9)]
Error = Annotated[float, Field(ge=0, le=1e30)]
Seconds = Annotated[float, Field(ge=-1e9, le=1e9)]


class Stage(Frozen):
    """One stage, measured at several sizes; a fit, latency + bytes x seconds per byte, goes beyond them."""

    latency_seconds: NonNegative
    """Of one call without bytes, s."""
    seconds_per_byte: NonNegative
    """Of every byte, s. A collective's bytes are those a worker sends; else votes, or the lane in FP32."""
    latency_error_seconds: Error
    """Standard error of the latency, s."""
    seconds_per_byte_error: Error
    """Standard error of the seconds per byte, s."""
    sizes_bytes: Many[Size]
    """Where it was measured, ascending, bytes."""
    measured_seconds: Many[Seconds]
    """What was measured there, s; of a route's own stage what the shared ones leave, so maybe below 0."""

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        sizes, num = list(self.sizes_bytes), len(self.measured_seconds)
        if sizes != sorted(set(sizes)) or len(sizes) != num:
            raise ValueError(
                f"sizes_bytes: expected {num} ascending sizes, one for each of measured_seconds, got {sizes}"
            )
        return self

    def seconds(self, num_bytes: float) -> float:
        """Predicted seconds: between two measured sizes on the line through them, beyond the largest parallel
        to the fit. Caches and page faults bend the curve where one line over all sizes would miss."""
        beyond = max(num_bytes - self.sizes_bytes[-1], 0)
        inside = float(np.interp(num_bytes, self.sizes_bytes, self.measured_seconds))
        return inside + beyond * self.seconds_per_byte

    def slowed(self, longer: float, seconds_per_byte: float) -> Self:
        """Return it with `longer` times the latency, and at least so many seconds per byte."""
        latency, extra = self.latency_seconds * longer, self.latency_seconds * (longer - 1)
        points = zip(self.sizes_bytes, self.measured_seconds, strict=True)
        return self.model_copy(
            update={
                "latency_seconds": latency,
                "seconds_per_byte": max(self.seconds_per_byte, seconds_per_byte),
                "measured_seconds": tuple(max(t + extra, latency + b * seconds_per_byte) for b, t in points),
            }
        )


class Substrate(checks.File):
    """How long every stage takes between these workers. Written by `nf-jax probe`; immutable, checked."""

    num_workers: PositiveSize
    """W, count."""
    num_processes: PositiveSize
    """Processes that they live in, count."""
    backend: Text
    """Name of JAX's backend: cpu, gpu, tpu."""
    device_kind: Text
    """Kind of device, as JAX calls it."""
    link: str | None = None
    """What links them, in words, such as 1gbit."""
    measured_by: str | None = None
    """Command or person."""
    date: checks.Date | None = None
    """Day of the measurement, ISO 8601."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Package -> version. Read-only."""
    stages: dict[StageName, Stage]
    """Stage -> what was measured. Read-only."""

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if missing := [name for name in STAGES if name not in self.stages]:
            raise ValueError(f"stages: expected all of {', '.join(STAGES)}, got none for {missing}")
        return self

    def check_workers(self, num_workers: int) -> None:
        """Raise ValueError unless it was measured between as many workers."""
        self._check("num_workers", self.num_workers, num_workers)

    def check_backend(self, backend: str) -> None:
        """Raise ValueError unless it was measured on the same backend."""
        self._check("backend", self.backend, backend)

    def _check(self, name: str, own: object, other: object) -> None:
        if own != other:
            raise ValueError(
                f"substrate: expected one measured with {name}={other}, as this run has it, got {own}: what "
                "pays there says nothing about here. Measure here: nf-jax probe."
            )

    def rescaled(self, *, num_workers: int | None = None, link_bytes_per_second: float | None = None) -> Self:
        """Return what it would be with other workers or links, for what-if questions.

        A collective's latency goes with its messages (`W - 1`); its seconds per byte are at least the link's.
        Probe without a limit first: a slow link cannot be taken out of what was measured through it.
        """
        workers = num_workers or self.num_workers
        longer = (workers - 1) / max(self.num_workers - 1, 1)
        slope = 0.0 if link_bytes_per_second is None else 1 / link_bytes_per_second
        stages = {
            name: stage.slowed(longer, slope) if name in COLLECTIVES else stage
            for name, stage in self.stages.items()
        }
        return self.model_copy(update={"num_workers": workers, "stages": stages})


def fit(sizes_bytes: Sequence[int], seconds: Sequence[float], scales: Sequence[float] | None = None) -> Stage:
    """Fits latency and seconds per byte to medians: least squares of relative errors, neither below 0.

    Args:
      sizes_bytes: at least one size, ascending.
      seconds: the median at each size; below 0 counts as nothing.
      scales: what an error at each size is relative to, s; the medians themselves by default.

    Returns:
      The stage, standard errors from the residuals of the fit (0 where it goes through all points).
    """
    x, y = np.asarray(sizes_bytes, float), np.maximum(np.asarray(seconds, float), 0)
    weights = 1 / np.maximum(y if scales is None else np.asarray(scales, float), 1e-9)
    design = np.stack([np.ones_like(x), x], 1) * weights[:, None]
    chosen = min(
        (_least_squares(design, y * weights, columns) for columns in ([0, 1], [1], [0])),
        key=lambda found: (np.any(found[0] < 0), found[1]),
    )
    (latency, slope), squared = chosen
    free = max(len(x) - 2, 1)
    covariance = np.linalg.pinv(design.T @ design) * squared / free
    errors = np.sqrt(np.maximum(np.diag(covariance), 0))
    return Stage(
        latency_seconds=max(float(latency), 0.0),
        seconds_per_byte=max(float(slope), 0.0),
        latency_error_seconds=float(errors[0]),
        seconds_per_byte_error=float(errors[1]),
        sizes_bytes=tuple(int(size) for size in sizes_bytes),
        measured_seconds=tuple(float(value) for value in seconds),
    )


def _least_squares(design: np.ndarray, target: np.ndarray, columns: list[int]) -> tuple[np.ndarray, float]:
    """Coefficients with those outside `columns` at 0, and the sum of squares that is left."""
    found = np.zeros(design.shape[1])
    found[columns] = np.linalg.lstsq(design[:, columns], target, rcond=None)[0]
    return found, float(np.sum((design @ found - target) ** 2))
