"""What a step measures (`Signals`), why lanes go where they go (`Reason`), what it reports (`StepInfo`).

`ShadowInfo` is what a shadow run reports beside it.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import numpy as np

Array = jax.Array | np.ndarray


class Reason(enum.IntEnum):
    """Why a lane travels as it does in one step."""

    PROFILE = 0
    PROTECTED = 1
    SMALL = 2
    UNSUITABLE = 3
    SINGLE_WORKER = 4
    WARMUP = 5
    FALLBACK = 6
    LOCKED = 7
    RESIDUAL = 8
    LOAD = 9
    GROUP = 10
    SLOWER = 11


REASONS: dict[Reason, str] = {
    Reason.PROFILE: "the profile's current phase says so",
    Reason.PROTECTED: "the profile never lets this region go low-bit",
    Reason.SMALL: "too few bytes to be worth compressing",
    Reason.UNSUITABLE: "its dtype or shape cannot travel low-bit between so many workers",
    Reason.SINGLE_WORKER: "there is only one worker, so nothing travels",
    Reason.WARMUP: "training is still warming up",
    Reason.FALLBACK: "its region was unhealthy and is cooling down",
    Reason.LOCKED: "its region was unhealthy too often and stays in FP32",
    Reason.RESIDUAL: "its residual grew too large for its gradient",
    Reason.LOAD: "the reducer is saturated",
    Reason.GROUP: "another lane of its group was refused, and a group switches as one",
    Reason.SLOWER: "low-bit is predicted to gain too little here, by the substrate or endpoint given",
}


class Lanes(NamedTuple):
    """The lanes of one plan: static, hashable Python data; every field has one entry per lane.

    Attributes:
      names: what people call the lane.
      regions: index of the lane's region in the profile.
      groups: lanes of one group switch together; -1 where the lane is never switched.
      fixed: a static reason why the lane is always FP32, else None.
      num_elements: elements of the lane.
      wire_bytes: bytes one worker sends in a step, for each `Route` in order.
      pays: whether each `Route` is expected to pay here, in order; empty: no substrate says, so all do.
    """

    names: tuple[str, ...]
    regions: tuple[int, ...]
    groups: tuple[int, ...]
    fixed: tuple[Reason | None, ...]
    num_elements: tuple[int, ...]
    wire_bytes: tuple[tuple[int, int, int, int], ...]
    pays: tuple[tuple[bool, bool, bool, bool], ...] = ()


class ShadowInfo(NamedTuple):
    """What candidates would have done in one step; every measure is `f32[C, n]`, the same on all workers.

    C candidates, n leaves in the order of the flattened tree. NaN throughout where the step's gradients are
    not finite. A leaf that can only travel exactly has 1, 0, 1, 0.

    Attributes:
      step: int32[], the step that this describes.
      cosine: between the mean as the candidate would give it and the true mean, -1 to 1.
      relative_error: norm of their difference over the norm of the true mean. It counts what error feedback
        repays from earlier steps, so values about 1 are usual for signs and no harm by themselves.
      sign_agreement: share of the true mean's elements that are not zero which keep their sign; an element
        that comes back as zero counts half.
      residual_ratio: norm of what the workers have not sent yet (RMS over workers) over the norm of the true
        mean: by about how many steps the candidate lags behind.
    """

    step: Array
    cosine: Array
    relative_error: Array
    sign_agreement: Array
    residual_ratio: Array


class Signals(NamedTuple):
    """What one step measured; R regions, L lanes; every field is the same on all workers.

    Attributes:
      loss: f32[], mean over workers; means nothing where `has_loss` is False.
      has_loss: bool[], whether the caller gave a loss.
      nonfinite: int32[R], (worker, leaf) pairs whose raw gradient is not finite, or overflows f32
        when squared and summed.
      gradient_norm: f32[R], root mean square over workers of the raw local gradient's norm.
      agreement: f32[L], mean |votes| per element in 0..1; -1 where it did not travel as signs.
      residual_ratio: f32[L], residual norm (RMS over workers) over the estimated norm of the mean
        gradient; 0 where nothing is kept.
      reducer_load: f32[], 0..1, the largest over workers; 0 where not given.
    """

    loss: Array
    has_loss: Array
    nonfinite: Array
    gradient_norm: Array
    agreement: Array
    residual_ratio: Array
    reducer_load: Array


class StepInfo(NamedTuple):
    """What one step reports; R regions, L lanes; every field is the same on all workers.

    Attributes:
      step: int32[], the step that this describes.
      routes: int32[L], the `Route` each lane took.
      reasons: int32[L], the `Reason` for it.
      next_routes: int32[L], the routes that the new state implies for the next step.
      next_reasons: int32[L], the reasons for those.
      wire: int32[2], bytes a worker sent, as `wire[0] * 65536 + wire[1]`.
      fp32_wire: int32[2], bytes it would have sent in FP32, in the same form.
      health_state: int32[R], `Health` after the step.
      trigger: int32[R], the last `Trigger` seen.
      trips: int32[R], times the region fell back; an endless overflow counts on (see `health`).
      saturated: bool[], whether the reducer counts as saturated after the step.
      signals: what was measured.
    """

    step: Array
    routes: Array
    reasons: Array
    next_routes: Array
    next_reasons: Array
    wire: Array
    fp32_wire: Array
    health_state: Array
    trigger: Array
    trips: Array
    saturated: Array
    signals: Signals

    @property
    def wire_bytes(self) -> int:
        """Bytes a worker sent (host only: needs concrete arrays)."""
        return _join_bytes(self.wire)

    @property
    def fp32_bytes(self) -> int:
        """Bytes a worker would have sent in FP32 (host only)."""
        return _join_bytes(self.fp32_wire)

    @property
    def wire_fraction(self) -> float:
        """Bytes sent over bytes in FP32; 1.0 where FP32 would send nothing either (host only)."""
        return self.wire_bytes / self.fp32_bytes if self.fp32_bytes else 1.0


def _join_bytes(pair: Array) -> int:
    high, low = np.asarray(pair).tolist()
    return high * 65536 + low
