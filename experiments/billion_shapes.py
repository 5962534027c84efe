"""A billion parameters, planned and compiled from shapes: nothing is allocated."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from rich import box
from rich.table import Table

import nf_jax
from experiments import gpt_neox, hlo
from experiments.billion_model import (
    AXIS,
    COMPILER_OPTIONS,
    GIB,
    count_params,
    describe_plan,
    headline,
    make_mesh,
    make_model,
    placed,
    profile,
    route_plans,
)
from nf_jax import Profile, Route


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Plan and compile the aggregation of one model; nothing is allocated."""

    model: str = "1.4b"
    """A size of `gpt_neox.CONFIGS`."""
    devices: int = 8
    """Workers: virtual CPU devices."""
    out: Path = Path("runs/billion")
    """Folder for shapes-<model>.json."""


def describe_shapes(config: Shapes) -> dict[str, Any]:
    """What the plan says, and for every way to compile the aggregation seconds, bytes sent, and memory."""
    shapes, chosen = gpt_neox.param_shapes(make_model(config.model)), profile()
    plan = nf_jax.plan(chosen, shapes, config.devices)
    found = {
        "model": config.model,
        "num_params": count_params(shapes),
        "num_workers": config.devices,
        **describe_plan(plan),
        "compiled": [],
    }
    for name, routes in {**route_plans(plan), "switched": None}.items():
        row = compile_aggregation(chosen, shapes, config.devices, routes)
        if routes is not None:
            row["claimed_bytes"] = plan.wire_bytes(routes)
            if row["sent_bytes"] != [row["claimed_bytes"]] * 2:
                raise AssertionError(
                    f"{name}: the compiled program sends {row['sent_bytes']} bytes (least, most), the plan "
                    f"claims {row['claimed_bytes']}"
                )
        found["compiled"].append({"routes": name, **row})
    return found


def compile_aggregation(
    chosen: Profile, shapes: Any, num_workers: int, routes: Sequence[Route] | None
) -> dict[str, Any]:
    """The aggregation alone, local gradients and state in, state and means out, from shapes."""
    mesh = make_mesh()
    tx = nf_jax.aggregate_gradients(chosen, axis=AXIS, num_workers=num_workers, routes=routes)
    state = jax.eval_shape(tx.init, shapes)
    spec = nf_jax.state_spec(state, AXIS)
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), shapes)
    gradients = placed(rows, jax.tree.map(lambda _: P(AXIS), rows), mesh)

    def update(state: Any, gradients: Any) -> Any:
        local = jax.tree.map(lambda leaf: leaf[0], gradients)
        means, state = tx.update(local, state, value=jnp.sum(jax.tree.leaves(local)[0][0, 0]))
        return state, means  # in this order, or the means take the place of donated residuals

    mapped = jax.shard_map(update, mesh=mesh, in_specs=(spec, P(AXIS)), out_specs=(spec, P()))
    start = time.process_time()
    lowered = jax.jit(mapped, donate_argnums=0).lower(placed(state, spec, mesh), gradients)
    traced = time.process_time()
    compiled = lowered.compile(COMPILER_OPTIONS.get(jax.default_backend(), {}))
    done = time.process_time()
    return {
        "trace_cpu_seconds": traced - start,
        "compile_cpu_seconds": done - traced,
        "sent_bytes": list(hlo.path_bytes(compiled.as_text() or "", num_workers)),
        "residual_bytes": memory_bytes(state, "residual"),
        "server_residual_bytes": memory_bytes(state, "server_residual"),
        "gradient_bytes": sum(
            leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes)
        ),
        "temporary_bytes": hlo.memory_of(compiled).temporaries,
    }


def memory_bytes(state: Any, field: str) -> int:
    """Of one worker; `state` is its view."""
    leaves = getattr(state.memory, field).values()
    return sum(leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in leaves)


def shapes_table(found: dict[str, Any]) -> Table:
    table = Table(title=headline(found), box=box.SIMPLE_HEAD)
    for name in ("routes", "trace s", "compile s", "bytes sent", "of FP32's", "state GiB", "temporaries GiB"):
        table.add_column(name, justify="left" if name == "routes" else "right")
    for row in found["compiled"]:
        sent = row.get("claimed_bytes")
        table.add_row(
            row["routes"],
            f"{row['trace_cpu_seconds']:.1f}",
            f"{row['compile_cpu_seconds']:.1f}",
            "by route" if sent is None else f"{sent:,}",
            "" if sent is None else f"{sent / found['fp32_bytes']:.4f}",
            f"{(row['residual_bytes'] + row['server_residual_bytes']) / GIB:.2f}",
            f"{row['temporary_bytes'] / GIB:.2f}",
        )
    return table
