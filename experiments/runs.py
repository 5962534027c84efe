"""What experiments share, inside: what a job depends on, policies, and the training of one policy.

An experiment supplies a `Task` (data, model, loss); `jobs.py` runs all policies of a job and shows what came
of it. In several processes each of them trains its own workers on its own rows of the same batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nf_jax
from nf_jax import Profile, Route, cluster, processes, trace, training

Policy = Literal["fp32", "bf16", "static", "guided"]
AXIS = "batch"
LEVELS = ("hosts", "devices")  # the axes of a mesh with two levels

# ============================================================================================ config


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a job depends on; every field is a flag."""

    task: tyro.conf.Suppress[str]
    """Data and model: a name that the experiment knows."""
    profile: Path
    """Operating profile (TOML) of the policy `guided`."""
    out: Path
    """Folder for summary.json, traces and curves.png; an earlier run's are replaced."""
    steps: int
    """Optimizer steps per run."""
    per_worker_batch: int
    """Examples per worker and step."""
    learning_rate: float
    """Peak of AdamW's learning rate, which falls to 0 along a cosine."""
    policies: tuple[Policy, ...] = ("fp32", "static", "guided")
    """How gradients are averaged: fp32, bf16, static, guided."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Each decides initial parameters and the order of the examples, alike for all policies."""
    devices: int = 8
    """Workers in all processes together, as virtual CPU devices by default."""
    devices_per_host: int = 1
    """Workers that average exactly among themselves: only the means of hosts are routed, between hosts."""
    substrate: Path | None = None
    """What `nf-jax probe` wrote between these workers: lanes of `guided` that would not gain stay in FP32."""
    parallel: Literal["pmap", "shard_map"] = "pmap"
    """How the step is mapped over the workers."""
    weight_decay: float = 1e-4
    """AdamW's."""
    clip_norm: float = 1.0
    """Global norm to which mean gradients are clipped."""
    num_evaluations: int = 10
    """Times that a run is tested, evenly spaced; the last one is its result."""
    cluster: tyro.conf.OmitArgPrefixes[cluster.Cluster] = dataclasses.field(default_factory=cluster.Cluster)
    """The processes of the run."""

    def __post_init__(self) -> None:
        counts = ("steps", "per_worker_batch", "devices", "devices_per_host", "num_evaluations")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if min(self.seeds, default=0) < 0:
            raise ValueError(f"seeds: expected numbers from 0 on, got {self.seeds}")
        for name in ("policies", "seeds"):
            if not (values := getattr(self, name)) or len(set(values)) != len(values):
                raise ValueError(f"{name}: expected at least one and no repeats, got {values}")
        if self.devices % self.devices_per_host:
            raise ValueError(
                f"devices_per_host: expected a divisor of devices={self.devices}, got {self.devices_per_host}"
            )

    @property
    def num_workers(self) -> int | tuple[int, int]:
        """As `aggregate_gradients` takes it: a pair for two levels."""
        inner = self.devices_per_host
        return self.devices if inner == 1 else (self.devices // inner, inner)

    @property
    def measured(self) -> nf_jax.Substrate | None:
        """The substrate, read from its file."""
        return None if self.substrate is None else nf_jax.Substrate.load(self.substrate)

    @property
    def axis(self) -> str | tuple[str, str]:
        """What the workers lie along; pmap has one axis, whose members are grouped."""
        return LEVELS if self.devices_per_host > 1 and self.parallel == "shard_map" else AXIS


POLICIES: dict[Policy, Callable[[Config], Profile]] = {
    "fp32": lambda _: Profile.static(Route.FP32),
    "bf16": lambda _: Profile.static(Route.BF16),
    "static": lambda _: Profile.static(
        Route.SIGN,
        down="majority",
        error_feedback=False,
        server_error_feedback=False,
        scale="leaf",
    ),
    "guided": lambda config: Profile.load(config.profile),
}


def check_files(config: Config) -> None:
    """Raises ValueError before a run for what it would find out in its middle."""
    for policy in config.policies:
        POLICIES[policy](config)
    if config.measured is not None:
        config.measured.check_workers(config.devices // config.devices_per_host)


class Task(NamedTuple):
    """What an experiment supplies.

    Attributes:
      load: -> (train, test): pytrees of arrays `[n, ...]`, always the same.
      init: (key, examples) -> params.
      loss_fn: (params, batch) -> (loss, {"accuracy": in percent}), means over the batch.
    """

    load: Callable[[], tuple[Any, Any]]
    init: Callable[[jax.Array, Any], Any]
    loss_fn: training.LossFn


# =========================================================================================== batches


def batches(
    examples: Any, num_steps: int, shape: Sequence[int], seed: int, rows: Sequence[int] | None = None
) -> Iterator[Any]:
    """Batches of leading dimensions `shape`, epoch after epoch, each in an order of its own.

    Args:
      examples: a pytree of arrays `[n, ...]`.
      num_steps: how many.
      shape: `(num_workers, per_worker_batch)`, say.
      seed: of the order, which does not depend on `rows`.
      rows: take only these of the first dimension: one process's share.
    """
    size, total = math.prod(shape), len(jax.tree.leaves(examples)[0])
    rng = np.random.default_rng(seed)
    epochs = [rng.permutation(total) for _ in range(math.ceil(num_steps * size / total))]
    for chosen in np.concatenate(epochs)[: num_steps * size].reshape(num_steps, *shape):
        own = chosen if rows is None else chosen[list(rows)]
        yield jax.tree.map(lambda values, index=own: values[index], examples)


class Mapped(NamedTuple):
    """One step on all workers, under pmap or shard_map.

    Attributes:
      step: (state, batch) -> (state, metrics); the batch `[own workers, n, ...]` of this process.
      place: one worker's fresh state -> the state of all.
      local: one leaf as the first worker of this process has it.
    """

    step: training.Step
    place: Callable[[Any], Any]
    local: Callable[[jax.Array], jax.Array]


def own_rows(devices: Sequence[Any]) -> list[int]:
    """The workers that live in this process."""
    return [row for row, device in enumerate(devices) if device.process_index == jax.process_index()]


def map_with_pmap(
    devices: Sequence[Any], loss_fn: training.LossFn, state: Any, devices_per_host: int = 1
) -> Mapped:
    """`replicate` is told the axis: under its own name for it, the second step compiles anew."""
    del state, devices_per_host
    own = [devices[row] for row in own_rows(devices)]
    return Mapped(
        step=training.pmap_step(loss_fn, axis=AXIS, devices=devices),
        place=lambda fresh: training.replicate(fresh, own, axis=AXIS),
        local=lambda leaf: leaf.addressable_data(0)[0],
    )


def map_with_shard_map(
    devices: Sequence[Any], loss_fn: training.LossFn, state: Any, devices_per_host: int = 1
) -> Mapped:
    if devices_per_host == 1:
        mesh, axis = Mesh(np.asarray(devices), (AXIS,)), AXIS
    else:
        mesh, axis = Mesh(np.asarray(devices).reshape(-1, devices_per_host), LEVELS), LEVELS
    mapped = training.shard_map_step(loss_fn, mesh, state, axis=axis)
    split = NamedSharding(mesh, PartitionSpec(axis))

    def spread(leaf: np.ndarray) -> jax.Array:
        own = leaf.reshape(-1, *leaf.shape[2:])
        return jax.make_array_from_process_local_data(split, own)

    return Mapped(
        step=lambda state, batch: mapped(state, jax.tree.map(spread, batch)),
        place=lambda fresh: training.place(fresh, mesh, axis),
        local=lambda leaf: leaf.addressable_data(0),
    )


MAPPINGS = {"pmap": map_with_pmap, "shard_map": map_with_shard_map}

# ========================================================================================== training


class Run(NamedTuple):
    """What one run left: its row of summary.json, and a record per step."""

    row: dict[str, Any]
    steps: list[dict[str, Any]]


def make_optimizer(config: Config, profile: Profile) -> optax.GradientTransformation:
    """The same for every policy, but for how gradients are averaged."""
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.steps)
    return optax.chain(
        nf_jax.aggregate_gradients(
            profile, axis=config.axis, num_workers=config.num_workers, substrate=config.measured
        ),
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, weight_decay=config.weight_decay),
    )


def run_policy(config: Config, task: Task, policy: Policy, tick: Callable[[str], None]) -> Iterator[Run]:
    """One run per seed; the step is compiled for the first and used by all."""
    train, test = task.load()
    profile = POLICIES[policy](config)
    tx = make_optimizer(config, profile)

    @jax.jit
    def init(seed: int) -> training.TrainState:
        key = jax.random.key(seed, impl="rbg")  # threefry takes XLA 5 s to compile here
        state = training.TrainState.create(apply_fn=None, params=task.init(key, train), tx=tx)
        return state.replace(step=jnp.int32(0))  # Flax's Python int would compile anew

    shapes = jax.eval_shape(init, 0)
    substrate = config.measured
    plan = nf_jax.plan(profile, shapes.params, config.num_workers, substrate=substrate)
    processes.check_agreement(
        profile, plan, substrate=substrate, config=describe_shared(config), policy=policy
    )
    devices = jax.devices()[: config.devices]
    mapped = MAPPINGS[config.parallel](devices, task.loss_fn, shapes, config.devices_per_host)
    evaluate = jax.jit(lambda params: task.loss_fn(params, test))
    for seed in config.seeds:
        header = {"policy": policy, "seed": seed, "num_workers": config.devices}
        shape = (config.devices, config.per_worker_batch)
        data = batches(train, config.steps, shape, seed, own_rows(devices))
        steps: list[dict[str, Any]] = []
        with open_trace(config, profile, plan, header) as writer:
            for info, record in train_steps(config, mapped, init(seed), data, evaluate):
                if writer is not None:
                    writer.write(info, **record)
                bytes_sent = {"wire_bytes": info.wire_bytes, "fp32_bytes": info.fp32_bytes}
                steps.append(record | bytes_sent | {"trips": int(np.max(info.trips))})
                tick(f"{policy}, seed {seed}: loss {record['train_loss']:.3f}")
        yield Run(make_row(header, steps), steps)


def describe_shared(config: Config) -> str:
    """All of the config that processes must share: not who each of them is, and where it lies."""
    own = ("cluster", "profile", "out", "substrate")
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in own}
    return "\n".join(f"{name} = {value}" for name, value in values.items())


def open_trace(
    config: Config, profile: Profile, plan: nf_jax.Plan, header: dict[str, Any]
) -> contextlib.AbstractContextManager[trace.TraceWriter | None]:
    """The trace of a run; None where another process writes it."""
    if not cluster.is_first():
        return contextlib.nullcontext()
    folder = config.out / f"{header['policy']}-{header['seed']}"
    folder.mkdir(parents=True, exist_ok=True)
    backend = jax.default_backend()
    facts = header | {"backend": backend, "num_workers": config.num_workers}
    return trace.TraceWriter(folder / "trace.jsonl", profile.dumps(), plan.lanes, **facts)


def train_steps(
    config: Config,
    mapped: Mapped,
    state: training.TrainState,
    data: Iterator[Any],
    evaluate: Callable[[Any], tuple[jax.Array, dict[str, jax.Array]]],
) -> Iterator[tuple[nf_jax.StepInfo, dict[str, float]]]:
    """Trains; yields what each step did and measured, with the test's numbers where it was due."""
    due = {config.steps * (i + 1) // config.num_evaluations for i in range(config.num_evaluations)}
    state = mapped.place(jax.device_get(state))  # NumPy: copies are made without compiling
    for number, batch in enumerate(data, start=1):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(mapped.step(state, batch))
        record = {
            "step_seconds": time.perf_counter() - start,
            "train_loss": float(mapped.local(metrics["loss"])),
        }
        if number in due:
            loss, scores = evaluate(jax.tree.map(mapped.local, state.params))
            record |= {"test_loss": float(loss), "test_accuracy": float(scores["accuracy"])}
        yield jax.device_get(nf_jax.step_info(state.opt_state)), record


def make_row(header: dict[str, Any], steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A row of summary.json; bytes are what one worker sent in the whole run, warm-up included."""
    wire, fp32 = (sum(step[name] for step in steps) for name in ("wire_bytes", "fp32_bytes"))
    return {
        **header,
        "metric": "test_accuracy",
        "value": steps[-1]["test_accuracy"],
        "test_loss": steps[-1]["test_loss"],
        "steps": len(steps),
        "wire_bytes": wire,
        "fp32_bytes": fp32,
        "wire_fraction": wire / fp32 if fp32 else 1.0,
        "trips": steps[-1]["trips"],
        "step_seconds_median": statistics.median(step["step_seconds"] for step in steps),
    }
