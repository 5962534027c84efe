"""A job without training, whose best profile is known: losses are a formula of the profile, traces are whole.

Low-bit costs a part of the loss that grows without error feedback, with coarse scales and with a short
warm-up; `TERNARY` costs nothing more than `SIGN`, but more bytes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nf_jax.calibrate import Job, Outcome
from nf_jax.columns import Columns, wire_bytes_of
from nf_jax.plan import plan
from nf_jax.profile import CapacityLimits, Codec, Phase, Profile, Region, Route
from nf_jax.telemetry import Reason, Signals, StepInfo
from nf_jax.trace import TraceWriter

W, STEPS = 4, 120
Signal = Callable[[Signals, int], Signals]
SHAPES = {"head/kernel": (64, 10), "body/kernel": (128, 128)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
FP32, BF16, SIGN, TERNARY = Route
START = Profile(
    name="synthetic",
    regions=(Region(name="head", pattern="head/.*"), Region(name="body", pattern=".*", codec=Codec())),
    phases=(Phase(start_step=0, routes={"head": FP32, "body": SIGN}),),
    capacity=CapacityLimits(min_lane_bytes=0),
)


def penalty(profile: Profile, steps: int) -> float:
    """The part of the loss that the profile's low-bit route costs; 0 for FP32, 1e-5 for BF16."""
    route = low_route(profile)
    if route in (FP32, BF16):
        return 1e-5 * route
    codec = profile.regions[-1].codec
    cost = 0.002
    cost += 0.0 if codec.error_feedback else 0.5
    cost += 0.0 if codec.server_error_feedback or codec.down == "count" else 0.3
    cost += {"leaf": 0.03, "channel": 0.02}.get(codec.scale, 0.0)
    cost += 0.2 if profile.health.warmup_steps < 0.04 * steps else 0.0
    return cost


def low_route(profile: Profile) -> Route:
    """The lossiest route that the body ever takes."""
    return max(routes[-1] for _, routes in profile.route_table)


def held_out_loss(profile: Profile, step: int, steps: int, seed: int) -> float:
    noise = np.random.default_rng(seed).normal(scale=1e-3)
    pair = np.random.default_rng([seed, low_route(profile)]).normal(scale=2e-4)
    return float((0.2 + 2 * np.exp(-8 * step / steps)) * (1 + penalty(profile, steps) + noise + pair))


def make_columns(profile: Profile, steps: int, seed: int, signals: Signal) -> Columns:
    """The trace that such a run leaves: random signals, and the decisions on them while nothing trips."""
    planned = plan(profile, PARAMS, W)
    lanes, rng = planned.lanes, np.random.default_rng([seed, 7])
    starts, table = zip(*profile.route_table, strict=True)
    phase = np.searchsorted(starts, np.arange(steps), side="right") - 1
    is_free = [reason is None for reason in lanes.fixed]
    routes = np.where(is_free, np.asarray(table)[:, list(lanes.regions)], 0)[phase].astype(np.int32)
    is_lossy, num_lanes = routes != FP32, planned.num_lanes

    def draw(mean: float, scale: float, *shape: int) -> np.ndarray:
        return (mean + scale * rng.standard_normal((steps, *shape))).astype(np.float32)

    measured = Signals(
        loss=np.asarray([held_out_loss(profile, s, steps, seed) for s in range(steps)], np.float32)
        + np.abs(draw(0, 0.01)),
        has_loss=np.ones(steps, bool),
        nonfinite=np.zeros((steps, 2), np.int32),
        gradient_norm=draw(1, 0.1, 2),
        agreement=np.where(is_lossy, draw(0.6, 0.03, num_lanes), np.float32(-1)),
        residual_ratio=np.where(is_lossy, draw(5, 0.5, num_lanes), np.float32(0)),
        reducer_load=np.zeros(steps, np.float32),
    )
    fixed = [Reason.PROFILE if reason is None else reason for reason in lanes.fixed]
    return Columns(
        header={"profile": profile.dumps(), "num_workers": W},
        lanes=lanes,
        steps=np.arange(steps, dtype=np.int32),
        routes=routes,
        reasons=np.broadcast_to(np.asarray(fixed, np.int32), routes.shape),
        signals=signals(measured, seed),
        overhead_bytes=planned.overhead_bytes,
        fp32_bytes=planned.fp32_bytes,
        step_seconds=None,
        truncated=False,
    )


def write_trace(path: Path, profile: Profile, columns: Columns) -> None:
    zeros = np.zeros(2, np.int32)
    plain: dict[str, Any] = {name: zeros for name in StepInfo._fields} | {"saturated": np.asarray(False)}
    sent = wire_bytes_of(columns.lanes, columns.routes) + columns.overhead_bytes
    with TraceWriter(path, profile.dumps(), columns.lanes, num_workers=W) as writer:
        for i, step in enumerate(columns.steps):
            measured = Signals(*(field[i] for field in columns.signals))
            own = {"routes": columns.routes[i], "reasons": columns.reasons[i], "signals": measured}
            wire = np.asarray(divmod(int(sent[i]), 65536), np.int32)
            full = np.asarray(divmod(columns.fp32_bytes, 65536), np.int32)
            info = plain | own | {"step": step, "wire": wire, "fp32_wire": full}
            writer.write(StepInfo(**info | {"next_routes": own["routes"], "next_reasons": own["reasons"]}))


def make_job(
    *,
    tolerance: float = 0.003,
    cost: float = 0.0,
    signals: Signal = lambda measured, seed: measured,
    on_report: Callable[[], None] = lambda: None,
    **changes: Any,
) -> Job:
    """The job.

    Args:
      tolerance: of the final loss, which is about 0.2.
      cost: what every route but FP32 loses in addition.
      signals: `(signals, seed)`: what traces hold instead.
      on_report: called before every report.
      **changes: fields of `Job`.
    """

    def measure(
        profile: Profile, *, steps: int, seed: int, trace: Path | None, report: Any
    ) -> Outcome | None:
        columns = make_columns(profile, steps, seed, signals)
        sent = (wire_bytes_of(columns.lanes, columns.routes) + columns.overhead_bytes).cumsum()
        extra = cost if low_route(profile) != FP32 else 0.0
        loss = 0.0
        for step in range(steps // 10, steps + 1, steps // 10):
            on_report()
            loss = held_out_loss(profile, step, steps, seed) + extra
            if not report(step, loss, int(sent[step - 1])):
                return None
        if trace is not None:
            write_trace(trace, profile, columns)
        return Outcome(loss, loss, int(sent[-1]), columns.fp32_bytes * steps, 0)

    fields: dict[str, Any] = {
        "name": "synthetic",
        "params": PARAMS,
        "num_workers": W,
        "steps": STEPS,
        "start": START,
        "metric": "loss",
        "higher_is_better": False,
        "tolerance": tolerance,
        "measure": measure,
        "loss_tolerance": 0.01,
        "batch_size": 32,
        "optimizer": "none",
        "devices": "imagined",
    }
    return Job(**fields | changes)


def good() -> Job:
    return make_job()


def hopeless() -> Job:
    """Nothing but FP32 is within tolerance."""
    return make_job(cost=0.1)


def killed() -> Job:
    """Kills its process at the report whose number the environment says; 0: never."""
    left = int(os.environ.get("KILL_AT_REPORT", "0"))

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return make_job(on_report=count)
