"""A billion parameters: what is planned, compiled and sent, and a few real steps within 24 GiB.

    python -m experiments.billion shapes --model 1.4b --devices 8
    python -m experiments.billion run --model 1b --coordinator localhost:9876 --num-processes 2 --process-id 0
    python -m experiments.billion run --model 1b --coordinator localhost:9876 --num-processes 2 --process-id 1

`shapes` allocates no array: it plans the aggregation of a Pythia's gradients in bf16, compiles it from shapes
for so many workers (every lane in FP32; all that may go low-bit; routes that are data), and stops unless the
compiled collectives send what the plan claims. 1.4b on 8: 317 MB instead of 9.9 GB a step, 3.2 %.

`run` trains: weights and residuals in bf16 on every worker, one short sequence a worker and step, plain
SGD. Two steps in FP32 to warm up, then signs; at `--spike-step` the loss is reported as infinite, health
falls back to FP32 for two steps, of which the first pays the residuals out, and goes low-bit again. It stops
unless every step sent what the plan claims for its routes, training went through FP32, SIGN, FP32 and SIGN
in this order, and all workers hold the same bits at the end.

Both write their rows as JSON under `--out`; experiments/results/ has runs on record.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import platform
import resource
import sys
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
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

import nf_jax
from experiments import gpt_neox, hlo
from nf_jax import Profile, Route, cluster, processes, training
from nf_jax.health import Health
from nf_jax.plan import Plan
from nf_jax.profile import Codec, HealthLimits, Phase, Region

AXIS = "batch"
GIB = 2**30
COMPILER_OPTIONS: dict[str, dict[str, str | bool]] = {
    "cpu": {"xla_cpu_enable_concurrency_optimized_scheduler": False}
}
"""XLA on CPU otherwise orders operations for speed, not for memory: all weights are held in f32 at once."""

# ============================================================================================ config


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Plan and compile the aggregation of one model; nothing is allocated."""

    model: str = "1.4b"
    """A size of `gpt_neox.CONFIGS`."""
    devices: int = 8
    """Workers: virtual CPU devices."""
    out: Path = Path("runs/billion")
    """Folder for shapes-<model>.json."""


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


# ============================================================================================ shapes


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


def describe_plan(plan: Plan) -> dict[str, Any]:
    return {
        "num_leaves": len(plan.paths),
        "num_buckets": max(plan.lane_buckets) + 1,
        "num_lanes": plan.num_lanes,
        "num_groups": len(plan.groups),
        "protected_share": plan.protected_share,
        "fp32_bytes": plan.fp32_bytes,
    }


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


# =============================================================================================== run


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


# =========================================================================================== results


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


def headline(found: dict[str, Any]) -> str:
    counts = ", ".join(f"{found[f'num_{name}']} {name}" for name in ("leaves", "buckets", "lanes", "groups"))
    return f"{found['model']}: {found['num_params']:,} parameters, {found['num_workers']} workers; {counts}"


def save(found: dict[str, Any], path: Path, table: Table) -> None:
    found = {
        "machine": f"{platform.processor() or platform.machine()}, {jax.default_backend()}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        **found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file or a pipe has no edge to cut tables at
    console.print(table)
    console.print(f"written to {path}")


# ============================================================================================== main


def shapes(config: Shapes) -> None:
    cluster.use_devices("cpu", config.devices)
    found = describe_shapes(config)
    save(found, config.out / f"shapes-{config.model}.json", shapes_table(found))


def run(config: Run) -> None:
    with cluster.joined(config.cluster, config.devices):
        found = train(config)
        if cluster.is_first():
            save(found, config.out / f"run-{config.model}.json", run_table(found))


def main(args: Sequence[str] | None = None) -> None:
    config = tyro.extras.subcommand_cli_from_dict(
        {"shapes": Shapes, "run": Run}, prog="experiments.billion", description=__doc__, args=args
    )
    try:
        shapes(config) if isinstance(config, Shapes) else run(config)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
