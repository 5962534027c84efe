"""A host-side helper: measured step times -> `reducer_load=` of the next step."""

from __future__ import annotations

import collections
import math
import statistics

import numpy as np

from nf_jax.telemetry import StepInfo

_LEAST_STEPS = 3


class LoadMeter:
    """How loaded the reducer looks from outside: the time of low-bit steps over that of FP32 steps.

    For those who have no number from the reducer itself. At 1 low-bit steps take as long as FP32's did, so
    `capacity.max_reducer_load` (0.9) ends them; in FP32 the load reads 0, and the profile's hysteresis tries
    them again after `hold_steps`, twice as many each time.

    Args:
      window_steps: medians are over so many steps of a kind, the latest.

    Example:
      >>> import jax, nf_jax
      >>> meter = nf_jax.LoadMeter()
      >>> tx = nf_jax.aggregate_gradients(nf_jax.Profile.static("FP32"), axis="batch", num_workers=1)
      >>> meter.update(0.1, nf_jax.step_info(tx.init({"kernel": jax.numpy.ones(4)})))
      0.0
    """

    def __init__(self, window_steps: int = 9) -> None:
        if window_steps < _LEAST_STEPS:
            raise ValueError(f"window_steps: expected at least {_LEAST_STEPS}, got {window_steps}")
        self._seconds = {
            is_lossy: collections.deque[float](maxlen=window_steps) for is_lossy in (False, True)
        }

    def update(self, step_seconds: float, info: StepInfo) -> float:
        """The load to pass as `reducer_load=` to the next step.

        Args:
          step_seconds: what the step took, s: whole, from batch to new parameters.
          info: what it did (`nf_jax.step_info`), on the host.

        Returns:
          A ratio; 0 until there are three steps of either kind.

        Raises:
          ValueError: `step_seconds` is not a positive number.
        """
        if not 0 < step_seconds < math.inf:
            raise ValueError(f"step_seconds: expected a positive number, got {step_seconds}")
        is_lossy = bool(np.any(np.asarray(info.routes)))
        if not is_lossy:
            self._seconds[True].clear()  # they are out of date once steps have gone FP32
        self._seconds[is_lossy].append(step_seconds)
        exact, lossy = self._seconds[False], self._seconds[True]
        if min(len(exact), len(lossy)) < _LEAST_STEPS:
            return 0.0
        return statistics.median(lossy) / statistics.median(exact)
