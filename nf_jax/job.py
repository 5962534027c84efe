"""What is calibrated: a training job, known by one function that measures, not by model, data or loop."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nf_jax.profile import Profile

Report = Callable[[int, float, int], bool]
"""`report(step, loss, wire_bytes)`: held-out loss after `step` steps, and the bytes that a worker has sent
so far. Returns whether to go on; False: the run is not worth more time, stop here."""


class Outcome(NamedTuple):
    """What one whole run came to.

    Attributes:
      value: the job's metric, held out, in the metric's unit.
      loss: held-out loss at the end.
      wire_bytes: bytes that a worker sent in all steps (`StepInfo.wire_bytes`, summed).
      fp32_bytes: what it would have sent in FP32 (`StepInfo.fp32_bytes`, summed).
      trips: most falls back to FP32 of any region (`max(StepInfo.trips)` of the last step).
    """

    value: float
    loss: float
    wire_bytes: int
    fp32_bytes: int
    trips: int


class Measure(Protocol):
    """Trains once with a profile. The same arguments have to give the same numbers."""

    def __call__(
        self, profile: Profile, *, steps: int, seed: int, trace: Path | None, report: Report
    ) -> Outcome | None:
        """Trains for `steps` steps from a fresh start.

        Args:
          profile: what `aggregate_gradients` is given; anything else stays as it always is. What JAX
            compiled is forgotten when the calibration goes on to another profile.
          steps: length of the run. A schedule ends with it: a short run is a small whole run.
          seed: of initial parameters and the order of examples. Runs of one seed are compared in pairs, so
            it must decide both alike for all profiles.
          trace: a file to write with `TraceWriter`, one that does not exist; None: no trace is wanted.
            Without traces health limits stay those of the starting profile.
          report: to be called several times, evenly spaced, at the same steps in all runs of a length, and
            after the last step. Stop where it returns False.

        Returns:
          The `Outcome`; None where it was stopped.
        """
        ...


class Shadow(Protocol):
    """Trains once with `aggregate_gradients(..., shadow=True)`."""

    def __call__(self, *, steps: int, seed: int, trace: Path) -> None:
        """As `Measure`, but writes `trace`, a file that does not exist, with `ShadowWriter`."""
        ...


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job, as `calibrate` needs to know it.

    Example:
      def my_job() -> Job:                    # nf-jax calibrate my_module:my_job --out profiles/mine.toml
          return Job(
              name="my model",
              params=jax.eval_shape(init_params, jax.random.key(0)),
              num_workers=8,
              steps=5_000,
              start=nf_jax.Profile.load("start.toml"),
              metric="validation_loss",
              higher_is_better=False,
              tolerance=0.02,
              measure=train_once,             # see `Measure`
          )
    """

    name: str
    """Name of the model, for people and for the profile's fingerprint."""
    params: Any
    """The parameters, or their shapes (`jax.eval_shape`)."""
    num_workers: int | tuple[int, int]
    """Size of the data-parallel axis, as `aggregate_gradients` takes it."""
    steps: int
    """Optimizer steps of a full run."""
    start: Profile
    """Where the search starts: its regions, which of them may go low-bit (those that it ever sends as SIGN
    or TERNARY), its buckets and capacity limits, and what is not searched of its health limits."""
    metric: str
    """What is judged at the end of full runs. A fine one, such as a loss, says more than the accuracy on few
    examples: where all seeds differ by the same step of it, or by none, their spread is not known."""
    higher_is_better: bool
    """True for an accuracy, False for a loss."""
    tolerance: float
    """How much worse than FP32 the metric may be, in its unit."""
    measure: Measure
    """Trains once."""
    loss_tolerance: float = 0.05
    """How far the held-out loss of a short run may lie above FP32's before the search counts it as too
    much, as a part of FP32's. It steers; full runs and the metric decide."""
    batch_size: int | None = None
    """Examples per step, all workers; written down."""
    optimizer: str | None = None
    """The optimizer and its settings; written down."""
    devices: str | None = None
    """What the workers are; written down. None: what JAX calls them."""
    shadow: Shadow | None = None
    """Trains in shadow mode: regions and their protection can then be found, not taken from `start`."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"job {self.name!r}: steps: expected at least 1, got {self.steps}")
        for name in ("tolerance", "loss_tolerance"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"job {self.name!r}: {name}: expected a number from 0 on, got {value}")
        if self.loss_tolerance == 0:
            raise ValueError(f"job {self.name!r}: loss_tolerance: expected more than 0, got 0")
