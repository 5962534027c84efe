"""What a trace's header says of its run, and the same run with its lanes planned another way."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nf_jax.columns import Columns
from nf_jax.plan import Plan, model_shapes, plan
from nf_jax.profile import Profile


def profile_of(columns: Columns) -> Profile:
    """The profile that the run used; ValueError where it is no valid one."""
    return Profile.loads(columns.header["profile"], source=columns.profile_source)


def hosts_of(columns: Columns) -> int:
    """W, of hosts where there are two levels; ValueError where the trace's header does not say."""
    found = columns.header.get("num_workers")
    found = found[0] if isinstance(found, (list, tuple)) and found else found
    if type(found) is not int or found < 1:
        raise ValueError(
            f"{columns.source}: line 1: num_workers: expected a number of workers, got {found!r}: a "
            "substrate or an endpoint depends on it. Record it: TraceWriter(..., num_workers=W)."
        )
    return found


def replan(columns: Columns, *, profile: Profile | None = None, num_workers: int | None = None) -> Columns:
    """The trace as if its lanes had been planned with another profile or between other workers.

    Losses and norms stay as measured. A new lane is said to agree as much as the old lanes it shares elements
    with do on average, and to keep the largest of their residual ratios.

    Raises:
      ValueError: the profile has no [model] to plan from, or the trace's lanes are not those of its model.
    """
    old_profile = profile_of(columns)
    profile = old_profile if profile is None else profile
    hosts_of(columns)  # checks what the header says
    recorded: Any = columns.header["num_workers"]
    recorded = tuple(recorded) if isinstance(recorded, list) else recorded
    workers = recorded if num_workers is None else num_workers
    if profile.model is None:
        raise ValueError(
            f"profile {profile.name!r} has no [model], so its lanes cannot be planned for other buckets or "
            "workers; write the model's leaves into the profile the run uses, or leave this axis out"
        )
    old, new = (
        plan(asked, model_shapes(profile.model), count)
        for asked, count in ((old_profile, recorded), (profile, workers))
    )
    lanes = columns.lanes
    if (old.lanes.names, old.lanes.num_elements) != (lanes.names, lanes.num_elements):
        raise ValueError(
            f"{columns.source}: line 1: lanes: expected those of the profile's [model], got others"
        )
    header = columns.header | {"num_workers": workers, "profile": profile.dumps()}
    signals = columns.signals
    if new.lane_leaves != old.lane_leaves:
        agreement, ratio = _move_signals(columns, _common_elements(old, new))
        signals = signals._replace(agreement=agreement, residual_ratio=ratio)
    return columns._replace(
        header=header,
        lanes=new.lanes,
        routes=np.zeros((len(columns.steps), new.num_lanes), np.int32),
        reasons=np.zeros((len(columns.steps), new.num_lanes), np.int32),
        signals=signals,
        overhead_bytes=new.overhead_bytes,
        fp32_bytes=new.fp32_bytes,
    )


def _common_elements(old: Plan, new: Plan) -> np.ndarray:
    """f32[old lanes, new lanes], elements that both hold."""
    common = np.zeros((old.num_lanes, new.num_lanes), np.float32)
    where = {leaf: lane for lane, leaves in enumerate(old.lane_leaves) for leaf in leaves}
    for lane, leaves in enumerate(new.lane_leaves):
        for leaf in leaves:
            common[where[leaf], lane] += math.prod(new.shapes[leaf])
    return common


def _move_signals(columns: Columns, common: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(agreement, residual_ratio), `f32[n, new lanes]`."""
    agreement, ratio = columns.signals.agreement, columns.signals.residual_ratio
    voted = agreement >= 0
    weight = voted.astype(np.float32) @ common
    mean = np.where(voted, agreement, np.float32(0)) @ common / np.maximum(weight, 1)
    largest = np.stack([ratio[:, lane > 0].max(1) for lane in common.T], 1)
    return np.where(weight > 0, mean, np.float32(-1)), largest
