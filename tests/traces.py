"""A short live run that is no easy one, as a trace, and reducers to replay it against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import nf_jax
from nf_jax import costs, trace
from nf_jax.endpoint import Endpoint
from nf_jax.profile import CapacityLimits, Codec, HealthLimits, Model, Phase, Profile, Region, Route
from nf_jax.stages import COLLECTIVES, Substrate, fit
from nf_jax.telemetry import Signals, StepInfo

W, NUM_STEPS, MADE_UP_STEPS = 2, 60, 12
FP32, _, SIGN, TERNARY = Route
SHAPES = {
    "head/kernel": (128, 10),
    "body_0/kernel": (128, 128),
    "body_1/kernel": (128, 128),
    "wide/kernel": (64, 128),
}
PROFILE = Profile(
    name="replayed",
    model=Model.model_validate(
        {
            "name": "three layers",
            "leaves": [{"path": path, "shape": shape, "dtype": "float32"} for path, shape in SHAPES.items()],
        }
    ),
    regions=(
        Region(name="head", pattern="head/.*"),
        Region(name="wide", pattern="wide/.*", codec=Codec(scale="leaf", down="count")),
        Region(name="body", pattern=".*", codec=Codec(scale="leaf")),
    ),
    phases=(
        Phase(start_step=0, routes={"head": FP32, "body": FP32, "wide": TERNARY}),
        Phase(start_step=3, routes={"body": SIGN}),
    ),
    buckets={"first_bytes": 2**16, "cap_bytes": 2**16},  # type: ignore[arg-type] (pydantic takes a dict)
    health=HealthLimits(
        warmup_steps=4, cooldown_steps=3, probation_steps=3, max_residual_ratio=6.0, lane_hold_steps=4
    ),
    capacity=CapacityLimits(min_lane_bytes=2**12, hold_steps=3),
)


def write_run(path: Path, profile: Profile = PROFILE, **header: Any) -> Path:
    """A live run with a NaN, a loss spike, residuals that grow, and a reducer that fills up for a while."""
    tx = nf_jax.aggregate_gradients(profile, axis="batch", num_workers=W)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}

    def update(grads: Any, state: Any, loss: Any, load: Any) -> Any:
        return tx.update(grads, state, value=loss, reducer_load=load)[1]

    step = jax.pmap(update, "batch", devices=jax.devices()[:W])
    state = jax.tree.map(lambda x: jnp.stack([x] * W), tx.init(params))
    rng = np.random.default_rng(0)
    drift = {name: rng.standard_normal((1, *shape)) for name, shape in SHAPES.items()}
    lanes = nf_jax.plan(profile, params, W).lanes
    with trace.TraceWriter(path, profile.dumps(), lanes, **{"num_workers": W} | header) as writer:
        for number in range(NUM_STEPS):
            grads = {name: rng.standard_normal((W, *s)) + drift[name] for name, s in SHAPES.items()}
            if number >= 50:  # a gradient that shrinks leaves a residual that is large beside it
                grads["body_0/kernel"] *= 0.02
            if number == 15:
                grads["body_1/kernel"][1, 0, 0] = np.nan
            loss = np.full(W, 100.0 if 30 <= number < 34 else 1.0)
            load = np.asarray([0.1, 0.95 if 22 <= number < 25 else 0.2])
            inputs = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (grads, loss, load))
            state = step(inputs[0], state, *inputs[1:])
            writer.write(nf_jax.step_info(state), step_seconds=0.01)
    return path


def write_made_up(path: Path, num_steps: int, **header: Any) -> Path:
    """A trace of steps that nobody took: nothing is compiled. Every value is one that a run may have."""
    shapes = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    lanes = nf_jax.plan(PROFILE, shapes, W).lanes
    num_lanes, num_regions = len(lanes.names), len(PROFILE.regions)
    exact, low = (sum(row[route] for row in lanes.wire_bytes) for route in (FP32, SIGN))
    rng = np.random.default_rng(0)
    with trace.TraceWriter(path, PROFILE.dumps(), lanes, **{"num_workers": W} | header) as writer:
        for number in range(num_steps):
            by_lane, by_region = np.zeros(num_lanes, np.int32), np.zeros(num_regions, np.int32)
            signals = Signals(
                loss=np.asarray(np.nan if number == 2 else rng.random(), np.float32),
                has_loss=np.asarray(True),
                nonfinite=by_region + np.int32(number == 2),
                gradient_norm=rng.random(num_regions, np.float32),
                agreement=rng.random(num_lanes, np.float32),
                residual_ratio=np.full(num_lanes, np.inf if number == 3 else 1.5, np.float32),
                reducer_load=np.asarray(0.25, np.float32),
            )
            info = StepInfo(
                step=np.asarray(number, np.int32),
                routes=by_lane + np.int32(2 * (number > 4)),
                reasons=by_lane,
                next_routes=by_lane + np.int32(2 * (number > 3)),
                next_reasons=by_lane,
                wire=np.asarray(divmod((low if number > 4 else exact) + 64, 65536), np.int32),
                fp32_wire=np.asarray(divmod(exact, 65536), np.int32),
                health_state=by_region + np.int32(1),
                trigger=by_region,
                trips=by_region + np.int32(number > 2),
                saturated=np.asarray(False),
                signals=signals,
            )
            writer.write(info, step_seconds=0.01, train_loss=0.5)
    return path


def make_substrate(num_workers: int = W, rate: float = 1e8, latency: float = 1e-5) -> Substrate:
    """One where packing is free and collectives have a rate, bytes/s, and a latency, seconds."""
    free, wire = fit([1, 2**20], [0.0, 0.0]), fit([0, 2**20], [latency, latency + 2**20 / rate])
    return Substrate(
        num_workers=num_workers,
        num_processes=1,
        backend="cpu",
        device_kind="imagined",
        stages={name: wire if name in COLLECTIVES else free for name in costs.STAGES},
    )


FAST = Endpoint(fp32_elements_per_second=None, vote_elements_per_second=1e12)
