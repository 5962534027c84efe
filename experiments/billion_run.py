"""A billion parameters, trained for a few steps in several processes: FP32, signs, a fallback, signs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import resource
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
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
from nf_jax import Route, cluster, processes, training
from nf_jax.health import Health
from nf_jax.plan import Plan


@dataclasses.dataclass(frozen=True)
class Run:
    """Train for a few steps, as one of several processes or alone."""

    model: str = "1b"
    """A size of `gpt_neox.CONFIGS`."""
    devices: int = 2
    """Workers of all processes."""
    steps: int = 10
    """Updates."""
    spike_step: int = 4
    """The step whose loss is reported as infinite."""
    length: int = 32
    """Tokens that are predicted in a worker's sequence."""
    learning_rate: float = 0.03
    out: Path = Path("runs/billion")
    """Folder for run-<model>.json."""
    cluster: tyro.conf.OmitArgPrefixes[cluster.Cluster] = dataclasses.field(default_factory=cluster.Cluster)
    """The processes of the run."""


def train(config: Run) -> dict[str, Any]:
    """Compiles before there is anything to hold, then makes weights and residuals in place, and trains."""
    model, mesh, chosen = make_model(config.model), make_mesh(), profile()
    shapes = gpt_neox.param_shapes(model)
    plan = nf_jax.plan(chosen, shapes, config.devices)
    processes.check_agreement(chosen, plan, config=repr(dataclasses.replace(config, cluster=None)))
    aggregate = nf_jax.aggregate_gradients(chosen, axis=AXIS, num_workers=config.devices)
    tx = optax.chain(aggregate, optax.sgd(config.learning_rate))
    abstract = jax.eval_shape(functools.partial(make_state, tx=tx), shapes)
    spec = nf_jax.state_spec(abstract, AXIS)
    step = training.shard_map_step(functools.partial(loss_of, model), mesh, abstract, axis=AXIS)
    batch = make_batch(config, model.config.vocab_size, mesh, spike=0.0)
    start = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0).lower(placed(abstract, spec, mesh), batch)
    compiled = lowered.compile(COMPILER_OPTIONS.get(jax.default_backend(), {}))
    compile_seconds = time.perf_counter() - start
    state = start_training(tx, shapes, spec, mesh)
    rows = []
    for index in range(config.steps):
        spike = np.inf if index == config.spike_step else 0.0
        batch, start = make_batch(config, model.config.vocab_size, mesh, spike), time.perf_counter()
        state, metrics = jax.block_until_ready(compiled(state, batch))
        seconds = time.perf_counter() - start
        info = jax.device_get(nf_jax.step_info(state.opt_state))
        rows.append(describe_step(plan, info, float(metrics["model_loss"]), seconds))
        if cluster.is_first():
            print(json.dumps(rows[-1]), flush=True)
    check_routes(plan, rows)
    return {
        "model": config.model,
        "num_params": count_params(shapes),
        "num_workers": config.devices,
        "num_processes": jax.process_count(),
        "length": config.length,
        "learning_rate": config.learning_rate,
        **describe_plan(plan),
        "compile_seconds": compile_seconds,
        "planned_memory_bytes": hlo.memory_of(compiled)._asdict(),
        "steps": rows,
        "params_checksum": agreed_checksum(state.params),
        "peak_rss_bytes": [int(n) for n in gather_over_processes(peak_rss_bytes())],
    }


def make_state(params: Any, tx: optax.GradientTransformation) -> training.TrainState:
    state = training.TrainState.create(apply_fn=None, params=params, tx=tx)
    return state.replace(step=jnp.int32(0))


def loss_of(model: gpt_neox.NeoX, params: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss as health hears it, and as it is: a spike is added after the model, and has no gradient."""
    ids = batch["ids"]
    logits = jnp.asarray(model.apply({"params": params}, ids[:, :-1]))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()
    return loss + batch["spike"][0], {"model_loss": loss}


def make_batch(config: Run, vocab_size: int, mesh: Mesh, spike: float) -> Any:
    """Every worker's own sequence of random tokens, the same at every step, to be learnt by heart."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab_size, (config.devices, config.length + 1)).astype(np.int32)
    spikes = np.full((config.devices,), spike, np.float32)
    split = NamedSharding(mesh, P(AXIS))
    place = lambda rows: jax.make_array_from_callback(rows.shape, split, rows.__getitem__)  # noqa: E731
    return {"ids": place(ids), "spike": place(spikes)}


def start_training(
    tx: optax.GradientTransformation, shapes: Any, spec: Any, mesh: Mesh
) -> training.TrainState:
    """Random weights, tensor by tensor, and residuals of zero: never held twice, or all in f32."""
    draw = jax.jit(
        draw_weights, static_argnames=("kind", "shape", "dtype"), out_shardings=NamedSharding(mesh, P())
    )
    named = jax.tree_util.tree_leaves_with_path(shapes)
    leaves = [
        draw(np.uint32(index), kind=path[-1].key, shape=leaf.shape, dtype=leaf.dtype)
        for index, (path, leaf) in enumerate(named)
    ]
    params = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
    rest = jax.shard_map(
        lambda: make_state(shapes, tx).replace(params=None),
        mesh=mesh,
        in_specs=(),
        out_specs=spec.replace(params=None),
        check_vma=False,
    )
    return jax.jit(rest)().replace(params=params)


def draw_weights(
    index: jax.Array | np.ndarray | np.uint32, kind: str, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """As the model would: norms' scales 1, biases 0, all else normal with deviation 0.02."""
    if kind in ("scale", "bias"):
        return jnp.full(shape, 1 if kind == "scale" else 0, dtype)
    return (jax.random.normal(jax.random.key(index), shape) * 0.02).astype(dtype)


def describe_step(plan: Plan, info: nf_jax.StepInfo, loss: float, seconds: float) -> dict[str, Any]:
    routes = [Route(route) for route in info.routes.tolist()]
    if info.wire_bytes != plan.wire_bytes(routes):
        raise AssertionError(f"step {info.step}: sent {info.wire_bytes}, planned {plan.wire_bytes(routes)}")
    return {
        "step": int(info.step),
        "loss": loss,
        "heard_loss": str(float(info.signals.loss)),
        "lanes": {route.name: routes.count(route) for route in Route if route in routes},
        "health": Health(int(info.health_state.max())).name,
        "wire_bytes": info.wire_bytes,
        "wire_fraction": info.wire_fraction,
        "seconds": seconds,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def check_routes(plan: Plan, rows: Sequence[dict[str, Any]]) -> None:
    """Raises unless training went FP32, low-bit, FP32 again, and low-bit again."""
    low = plan.wire_bytes(route_plans(plan)["low-bit"])
    told = [row["wire_bytes"] == low for row in rows]
    changes = [told[0], *(b for a, b in itertools.pairwise(told) if a != b)]
    if changes != [False, True, False, True]:
        raise AssertionError(
            f"expected steps in FP32, low-bit, FP32 and low-bit, got {['low' if t else 'FP32' for t in told]}"
        )


def agreed_checksum(params: Any) -> str:
    """A checksum of the bits of all parameters; raises unless it is the same on every worker."""
    devices = jax.local_devices()
    sums = np.zeros(len(devices), np.uint32)
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            row = devices.index(shard.device)
            sums[row] = zlib.crc32(np.asarray(shard.data).view(np.uint8).data, int(sums[row]))
    everyone = np.ravel(gather_over_processes(sums))
    if len(set(everyone.tolist())) != 1:
        raise AssertionError(f"parameters differ between workers: checksums {everyone.tolist()}")
    return f"{everyone[0]:08x}"


def gather_over_processes(values: Any) -> np.ndarray:
    """`[processes, ...]`, as every process has them."""
    return np.reshape(multihost_utils.process_allgather(np.asarray(values)), (-1, *np.shape(values)))


def peak_rss_bytes() -> int:
    """The most memory that this process has held, as the kernel counts it (in KiB on Linux)."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_table(found: dict[str, Any]) -> Table:
    table = Table(title=headline(found), box=box.SIMPLE_HEAD)
    for name in ("step", "loss", "lanes", "bytes sent", "of FP32's", "seconds", "peak RSS GiB"):
        table.add_column(name, justify="left" if name == "lanes" else "right")
    for row in found["steps"]:
        table.add_row(
            str(row["step"]),
            f"{row['loss']:.4f}",
            ", ".join(f"{name} {count}" for name, count in row["lanes"].items()),
            f"{row['wire_bytes']:,}",
            f"{row['wire_fraction']:.4f}",
            f"{row['seconds']:.2f}",
            f"{row['peak_rss_bytes'] / GIB:.2f}",
        )
    return table
