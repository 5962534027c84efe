"""A Pythia's shapes, the profile that it is averaged by, and the mesh: what `billion`'s two halves share."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import gpt_neox
from nf_jax import Profile, Route
from nf_jax.plan import Plan
from nf_jax.profile import Codec, HealthLimits, Phase, Region

AXIS = "batch"
GIB = 2**30
COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {
    "cpu": {"xla_cpu_enable_concurrency_optimized_scheduler": False}
}
"""XLA on CPU otherwise orders operations for speed, not for memory: all weights are held in f32 at once."""


def profile() -> Profile:
    """Norms and biases exact; the embeddings, every matrix and the head as signs, a scale a row and column.

    The head is a tenth of a billion parameters: in FP32 it alone would send more than all the rest as signs.
    """
    codec = Codec(scale="rank1", residual_dtype="bfloat16")
    exact, signs = {"norm": Route.FP32, "bias": Route.FP32}, {"head": Route.SIGN, "body": Route.SIGN}
    return Profile(
        name="billion",
        regions=(
            Region(name="norm", pattern=".*norm/.*"),
            Region(name="bias", pattern=".*/bias"),
            Region(name="head", pattern="top/.*", codec=codec),
            Region(name="body", pattern=".*", codec=codec),
        ),
        phases=(Phase(start_step=0, routes=exact | signs),),
        health=HealthLimits(warmup_steps=2, cooldown_steps=2, probation_steps=2),
    )


def make_model(name: str) -> gpt_neox.NeoX:
    if name not in gpt_neox.CONFIGS:
        raise ValueError(f"model: expected one of {', '.join(gpt_neox.CONFIGS)}, got {name!r}")
    return gpt_neox.NeoX(gpt_neox.CONFIGS[name], jnp.bfloat16)


def count_params(shapes: Any) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))


def route_plans(plan: Plan) -> dict[str, list[Route]]:
    """A route per lane: exact everywhere, and low-bit wherever a lane may."""
    low = {lane: group.routes[-1] for group in plan.groups for lane in group.lanes}
    lanes = range(plan.num_lanes)
    return {"FP32": [Route.FP32 for _ in lanes], "low-bit": [low.get(lane, Route.FP32) for lane in lanes]}


def make_mesh() -> Mesh:
    return jax.make_mesh((len(jax.devices()),), (AXIS,), axis_types=(AxisType.Auto,))


def placed(shapes: Any, spec: Any, mesh: Mesh) -> Any:
    """One worker's shapes as those of global arrays: what is split has a row a worker."""

    def of_all(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        rows = leaf.shape[0] * mesh.size if spec == P(AXIS) else None
        shape = leaf.shape if rows is None else (rows, *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(of_all, shapes, spec)


def describe_plan(plan: Plan) -> dict[str, Any]:
    return {
        "num_leaves": len(plan.paths),
        "num_buckets": max(plan.lane_buckets) + 1,
        "num_lanes": plan.num_lanes,
        "num_groups": len(plan.groups),
        "protected_share": plan.protected_share,
        "fp32_bytes": plan.fp32_bytes,
    }


def headline(found: dict[str, Any]) -> str:
    counts = ", ".join(f"{found[f'num_{name}']} {name}" for name in ("leaves", "buckets", "lanes", "groups"))
    return f"{found['model']}: {found['num_params']:,} parameters, {found['num_workers']} workers; {counts}"
