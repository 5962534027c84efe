"""What aggregation costs: codec, control, compile time, bytes on the wire, memory.

    python -m experiments.bench                # about 5 minutes on 2 cores
    python -m experiments.bench --only codec wire

Every ratio comes from one run in which its arms take turns; medians, with minimum and maximum beside
them. Absolute times say little about another machine. Writes `bench.json` and prints a table; each line
names its target where there is one. See experiments/results/ for runs on record.

`codec_over_copy` is pack + count + decode of 16 MiB against one `x * 2` of the same array; `codec_ef_*`
adds scales, residuals at the worker and at the reducer, and requantization: all that a SIGN majority step
computes for one leaf, less the collectives.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
import tyro
from jax import lax
from rich import box
from rich.console import Console
from rich.table import Table

import nf_jax
from experiments import hlo
from experiments.bench_codec import bench_codec
from experiments.timing import carried, interleave, ratio
from nf_jax import Profile, Route
from nf_jax.profile import Buckets, Codec, Phase, Region

AXIS = "batch"
Part = Literal["codec", "control", "compile", "wire", "memory"]

# ============================================================================================ config


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    out: Path = Path("runs/bench")
    """Folder for bench.json."""
    only: tuple[Part, ...] = ("codec", "control", "compile", "wire", "memory")
    """Parts to run."""
    repeats: int = 30
    """Timed calls of each arm, in turn."""
    megabytes: int = 16
    """Size of the gradient for codec, control and wire, in MiB of f32."""
    layers: int = 300
    """Layers of the model whose compile time is measured: two leaves each, two lanes to three layers."""
    workers: tuple[int, ...] = (2, 4, 8)
    """Numbers of workers for which bytes on the wire are read off the compiled program."""
    devices: int = 8
    """Virtual CPU devices; ignored on accelerators."""


# =========================================================================================== control


def bench_control(config: Config) -> dict[str, Any]:
    """What deciding costs when the decision is FP32: a whole train step, and the aggregation alone."""
    result = {"control_over_pmean": control_of_train_step(config)}
    side = int((config.megabytes * 2**18) ** 0.5)
    tree = {"kernel": jnp.ones((config.devices, side, side))}
    arms: dict[str, Callable[[], Any]] = {"pmean": functools.partial(mapped(plain_mean), tree)}
    for name, profile in {
        "guided, all FP32": guided_profile(start_step=2**30),
        "static FP32": Profile.static(Route.FP32),
        "SIGN majority": Profile.static(Route.SIGN),
        "SIGN count": Profile.static(Route.SIGN, down="count"),
        "TERNARY": Profile.static(Route.TERNARY, down="ternary"),
        "BF16": Profile.static(Route.BF16),
    }.items():
        tx = nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=config.devices)
        arms[name] = carried(mapped(tx.update, donate=True), tree, state=replicated(tx, tree, config))
    seconds = interleave(arms, max(config.repeats // 3, 5))
    for name in list(arms)[1:]:
        key = re.sub(r"\W+", "_", name.lower())
        result[f"aggregation_{key}_over_pmean"] = ratio(seconds, name, "pmean")
    return result


def guided_profile(start_step: int, **fields: Any) -> Profile:
    """Everything FP32 until `start_step`, then matrices as signs."""
    return Profile(
        name="bench",
        regions=(
            Region(name="bias", pattern=".*bias"),
            Region(name="backbone", pattern=".*", codec=Codec()),
        ),
        phases=(
            Phase(start_step=0, routes={"bias": Route.FP32, "backbone": Route.FP32}),
            Phase(start_step=start_step, routes={"backbone": Route.SIGN}),
        ),
        **fields,
    )


def control_of_train_step(config: Config) -> dict[str, float]:
    """The main job's own model, batch and optimizer; routes that all say FP32 against `lax.pmean`."""
    from experiments import batches, vision

    job = dataclasses.replace(vision.digits(), devices=config.devices)
    task = vision.TASKS[job.task](job)
    train, _ = task.load()
    params, _ = task.init(jax.random.key(0), train)
    shape = (config.devices, job.per_worker_batch)
    batch = next(batches.batches(train, 1, shape, seed=0))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    profile = Profile.load(job.profile)
    late = [profile.phases[0], *(p.model_copy(update={"start_step": 2**30}) for p in profile.phases[1:])]
    profile = profile.model_copy(update={"phases": tuple(late[:2])})
    aggregate = nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=config.devices)

    def step(batch: Any, state: Any, tx: Any, is_plain: bool) -> Any:
        params, opt_state = state
        (loss, _), grads = jax.value_and_grad(task.loss_fn, has_aux=True)(params, batch)
        if is_plain:
            updates, opt_state = tx.update(lax.pmean(grads, AXIS), opt_state, params)
        else:
            updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return loss, (optax.apply_updates(params, updates), opt_state)

    arms = {}
    for name, tx in {"plain": optimizer, "guided": optax.chain(aggregate, optimizer)}.items():
        state = stack((params, tx.init(params)), config.devices)
        call = mapped(functools.partial(step, tx=tx, is_plain=name == "plain"), donate=True)
        arms[name] = carried(call, batch, state=state)
    return ratio(interleave(arms, config.repeats * 10), "guided", "plain")


def plain_mean(tree: Any) -> Any:
    return lax.pmean(tree, AXIS)


def mapped(function: Callable[..., Any], donate: bool = False) -> Callable[..., Any]:
    return jax.pmap(function, axis_name=AXIS, donate_argnums=1 if donate else ())


def stack(tree: Any, num: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * num), tree)


def replicated(tx: Any, tree: Any, config: Config) -> Any:
    return stack(tx.init(jax.tree.map(lambda leaf: leaf[0], tree)), config.devices)


# =========================================================================================== compile


def bench_compile(config: Config) -> dict[str, Any]:
    """Tracing + compiling a whole train step: a deep MLP, guided against plain. CPU seconds."""
    params = {
        f"layer_{i}": {"kernel": jnp.zeros((128, 128)), "bias": jnp.zeros(128)} for i in range(config.layers)
    }
    three_layers = 3 * 4 * (128 * 128 + 128)
    profile = guided_profile(10, buckets=Buckets(first_bytes=three_layers, cap_bytes=three_layers))
    plan = nf_jax.plan(profile, params, config.devices)

    def loss_fn(params: Any, inputs: jax.Array) -> jax.Array:
        for layer in params.values():
            inputs = inputs + jax.nn.relu(inputs @ layer["kernel"] + layer["bias"])
        return jnp.mean(inputs**2)

    def step(inputs: jax.Array, state: Any, tx: Any, is_plain: bool) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs)
        grads = lax.pmean(grads, AXIS) if is_plain else grads
        extra = {} if is_plain else {"value": loss}
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    aggregate = nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=config.devices)
    seconds = {}
    for name, tx in {"plain": optax.adam(1e-3), "guided": optax.chain(aggregate, optax.adam(1e-3))}.items():
        state = jax.eval_shape(lambda tx=tx: (params, tx.init(params)))
        args = ((jax.ShapeDtypeStruct((16, 128), jnp.float32)), state)
        args = jax.tree.map(lambda x: jax.ShapeDtypeStruct((config.devices, *x.shape), x.dtype), args)
        function = functools.partial(step, tx=tx, is_plain=name == "plain")
        with rich.get_console().status(f"compiling {name}"):
            start = time.process_time()
            lowered = mapped(function).lower(*args)
            traced = time.process_time()
            lowered.compile()
        seconds[name] = {"trace": traced - start, "compile": time.process_time() - traced}
    total = {name: sum(parts.values()) for name, parts in seconds.items()}
    return {
        "compile_ratio_200_lanes": total["guided"] / total["plain"],
        "compile_num_lanes": plan.num_lanes,
        "compile_num_leaves": len(plan.paths),
        "compile_cpu_seconds": seconds,
    }


# ============================================================================================== wire


def bench_wire(config: Config) -> dict[str, Any]:
    """Bytes a worker sends, from the collectives of the compiled program, over FP32's."""
    side = int((config.megabytes * 2**18) ** 0.5)
    shapes = {"kernel": (side, side)}
    settings: dict[str, tuple[Route, dict[str, Any]]] = {
        "sign_majority": (Route.SIGN, {"down": "majority", "scale": "leaf"}),
        "sign_majority_rank1": (Route.SIGN, {"down": "majority", "scale": "rank1"}),
        "sign_2bit": (Route.SIGN, {"down": "2bit", "scale": "leaf"}),
        "sign_count": (Route.SIGN, {"down": "count", "scale": "leaf"}),
        "ternary": (Route.TERNARY, {"down": "ternary", "scale": "leaf"}),
        "bf16": (Route.BF16, {}),
    }
    result: dict[str, Any] = {f"{name}_wire_fraction": {} for name in settings}
    for num_workers in [w for w in config.workers if w <= len(jax.devices())]:
        for name, (route, codec) in settings.items():
            profile = Profile.static(route, **codec)
            compiled, claimed, fp32 = compile_aggregation(profile, shapes, num_workers)
            sent = sum(hlo.collective_bytes(compiled.as_text(), num_workers))
            if sent != claimed:
                raise AssertionError(f"{name}, W={num_workers}: compiled {sent} bytes, claimed {claimed}")
            result[f"{name}_wire_fraction"][num_workers] = sent / fp32
    return result


def compile_aggregation(profile: Profile, shapes: dict[str, tuple[int, ...]], num_workers: int) -> Any:
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    tx = nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=num_workers)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_workers, *x.shape), x.dtype),
        (tree, jax.eval_shape(tx.init, tree)),
    )
    devices = jax.devices()[:num_workers]
    lowered = jax.pmap(tx.update, axis_name=AXIS, donate_argnums=1, devices=devices).lower(*args)
    plan = nf_jax.plan(profile, tree, num_workers)
    claimed = plan.wire_bytes([profile.route_table[0][1][r] for r in plan.lanes.regions])
    return lowered.compile(), claimed, plan.fp32_bytes


# ============================================================================================ memory


def bench_memory(config: Config) -> dict[str, Any]:
    """State and temporaries of one worker's aggregation, over the gradient's bytes, as XLA plans them."""
    shapes = {f"layer_{i}": (512, 512) for i in range(config.megabytes)}
    gradient_bytes = sum(4 * int(np.prod(shape)) for shape in shapes.values())
    result = {}
    for name, profile in {"sign": Profile.static(Route.SIGN), "guided": guided_profile(10)}.items():
        compiled, *_ = compile_aggregation(profile, shapes, config.devices)
        tx = nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=config.devices)
        state: Any = tx.init({key: jnp.zeros(shape) for key, shape in shapes.items()})
        memory_bytes = {
            field: sum(leaf.nbytes for leaf in getattr(state.memory, field).values())
            for field in state.memory._fields
        }
        result |= {
            f"memory_{name}_residual_over_gradient": memory_bytes["residual"] / gradient_bytes,
            f"memory_{name}_server_over_gradient": memory_bytes["server_residual"] / gradient_bytes,
            f"memory_{name}_temporaries_over_gradient": hlo.memory_of(compiled).temporaries / gradient_bytes,
        }
    return result


# =========================================================================================== results

PARTS: dict[Part, Callable[[Config], dict[str, Any]]] = {
    "codec": lambda config: bench_codec(config.megabytes, config.repeats),
    "control": bench_control,
    "compile": bench_compile,
    "wire": bench_wire,
    "memory": bench_memory,
}

TARGETS = {
    "codec_over_copy": 1.0,
    "codec_ef_over_copy": 2.0,
    "codec_ef_rank1_over_copy": 2.0,
    "control_over_pmean": 1.05,
    "aggregation_guided_all_fp32_over_pmean": 2.0,
    "compile_ratio_200_lanes": 2.0,
    "sign_majority_wire_fraction": 0.032,
    "sign_2bit_wire_fraction": 0.048,
}


def make_table(results: dict[str, Any]) -> Table:
    table = Table(title="nf_jax bench", box=box.SIMPLE_HEAD)
    for name in ("measure", "value", "min - max", "target", ""):
        table.add_column(name, justify="left" if name == "measure" else "right", no_wrap=True)
    for name, value in results.items():
        if not isinstance(value, dict) or "median" in value:
            add_row(table, name, value)
        elif all(isinstance(v, float) for v in value.values()):
            for num_workers, fraction in value.items():
                add_row(table, name, fraction, f" W={num_workers}")
    return table


def add_row(table: Table, name: str, value: Any, suffix: str = "") -> None:
    middle = value["median"] if isinstance(value, dict) else value
    spread = f"{value['min']:.3g} - {value['max']:.3g}" if isinstance(value, dict) else ""
    target = TARGETS.get(name)
    verdict = "" if target is None else "met" if middle <= target else "missed"
    shown = "" if target is None else f"<= {target:g}"
    table.add_row(name + suffix, f"{middle:.4g}", spread, shown, verdict)


def main(config: Config) -> None:
    if jax.default_backend() == "cpu":
        config = dataclasses.replace(config, devices=min(config.devices, len(jax.devices())))
    results: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {jax.default_backend()}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "num_devices": len(jax.devices()),
    }
    for part in config.only:
        results |= PARTS[part](config)
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "bench.json").write_text(json.dumps(results, indent=2) + "\n")
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)  # a file or a pipe has no edge to cut tables at
    console.print(make_table({k: v for k, v in results.items() if k not in ("machine", "versions")}))
    console.print(f"{results['machine']}; written to {config.out / 'bench.json'}")


if __name__ == "__main__":
    parsed = tyro.cli(Config, description=__doc__)
    jax.config.update("jax_num_cpu_devices", parsed.devices)
    main(parsed)
