"""The training of one policy, inside a job.

An experiment supplies a `Task` (data, model, loss); `jobs.py` runs all policies of a job and shows what came
of it. In several processes each of them trains its own workers on its own rows of the same batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import nf_jax
from experiments.batches import Change, batches, changed, chunks
from experiments.config import AXIS, LEVELS, Config, Policy
from experiments.policies import PROFILES, Rule, make_optimizer, rule_of
from nf_jax import Profile, capacity, cluster, processes, trace, training


class Task(NamedTuple):
    """What an experiment supplies.

    Attributes:
      load: -> (train, test): pytrees of NumPy arrays `[n, ...]`, always the same. It runs, as does all that
        makes the task, before the job says how many devices there are: nothing of it may start JAX.
      init: (key, examples) -> (params, model state or None); not compiled, as pretrained weights would become
        constants of the program.
      loss_fn: as `training.LossFn`; the metrics hold the task's.
      test_fn: (params, model state, examples) -> {"loss": ..., metric: ...}, means over the examples.
      metric: the name of a run's result, `test_<metric>` in records; `jobs.METRICS` knows it.
        augment: changes training examples at every step; None: nothing does.
      spoil: what happens to training examples where shuffled labels are the trouble.
      test_size: examples that are tested at once.
    """

    load: Callable[[], tuple[Any, Any]]
    init: Callable[[jax.Array, Any], tuple[Any, Any]]
    loss_fn: training.LossFn
    test_fn: Callable[[Any, Any, Any], dict[str, jax.Array]]
    metric: str = "accuracy"
    augment: Change | None = None
    spoil: Change | None = None
    test_size: int = 1000


# ========================================================================================= mapping


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

# ========================================================================================= program


class Program(NamedTuple):
    """One policy, compiled once for all seeds.

    Attributes:
      profile, plan: what is routed how.
      init: seed -> one worker's fresh state.
      mapped: the step.
      evaluate: (params, model state, examples) -> scores.
      model_state_bytes: what a worker sends at every step for the model's own state, always exact.
    """

    profile: Profile
    plan: nf_jax.Plan
    init: Callable[[int], training.TrainState]
    mapped: Mapped
    evaluate: Callable[[Any, Any, Any], dict[str, jax.Array]]
    model_state_bytes: int


def prepare(config: Config, task: Task, train: Any, make_rule: Callable[[Any], Rule], name: str) -> Program:
    """What every run of a policy shares; processes compare that they run the same.

    Args:
      config, task, train: what is trained.
      make_rule: shapes of the params -> how gradients are averaged.
      name: of the policy.
    """
    key = lambda seed: jax.random.key(seed, impl="rbg")  # noqa: E731 threefry takes XLA 5 s to compile here
    rule = make_rule(jax.eval_shape(lambda: task.init(key(0), train)[0]))
    tx = make_optimizer(config, rule, name)

    @jax.jit
    def start(params: Any, model_state: Any) -> training.TrainState:
        state = training.TrainState.create(apply_fn=None, params=params, tx=tx, model_state=model_state)
        return state.replace(step=jnp.int32(0))  # Flax's Python int would compile anew

    def init(seed: int) -> training.TrainState:
        return start(*task.init(key(seed), train))

    shapes = jax.eval_shape(init, 0)
    plan = nf_jax.plan(rule.profile, shapes.params, config.num_workers, substrate=rule.substrate)
    shared = describe_shared(config)
    processes.check_agreement(rule.profile, plan, substrate=rule.substrate, config=shared, policy=name)
    devices = jax.devices()[: config.devices]
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes.model_state))
    return Program(
        rule.profile,
        plan,
        init,
        MAPPINGS[config.parallel](devices, task.loss_fn, shapes, config.devices_per_host),
        jax.jit(task.test_fn),
        -(-capacity.allreduce_bytes(num_bytes, config.devices) // config.devices_per_host),
    )


def describe_shared(config: Config) -> str:
    """All of the config that processes must share: not who each of them is, and where it lies."""
    own = ("cluster", "profile", "out", "substrate", "data", "resume")
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in own}
    return "\n".join(f"{name} = {value}" for name, value in values.items())


# ============================================================================================ runs


class Run(NamedTuple):
    """What one run left: its row of summary.json, and a record per step."""

    row: dict[str, Any]
    steps: list[dict[str, Any]]


def run_policy(config: Config, task: Task, policy: Policy, tick: Callable[[str], None]) -> Iterator[Run]:
    """One run per seed; the step is compiled for the first and used by all."""
    data = task.load()
    make_rule = functools.partial(rule_of, config, policy)
    make = functools.cache(lambda: prepare(config, task, data[0], make_rule, policy))
    for seed in config.seeds:
        header = {"policy": policy, "seed": seed, "num_workers": config.devices}
        if (run := finished_run(config, header)) is not None:
            for _ in run.steps:
                tick(f"{policy}, seed {seed}: finished earlier")
        else:
            run = train_run(config, task, make(), data, header, tick)
            keep_run(config, run)
        yield run


def train_run(
    config: Config,
    task: Task,
    program: Program,
    data: tuple[Any, Any],
    header: dict[str, Any],
    tick: Callable[[str], None],
) -> Run:
    """Trains once, and writes the trace."""
    steps: list[dict[str, Any]] = []
    with open_trace(config, program, header) as writer:
        for info, record in train_steps(config, task, program, data, header["seed"]):
            if writer is not None:
                writer.write(info, **record)
            steps.append(record | sent_bytes(program, info) | {"trips": int(np.max(info.trips))})
            tick(f"{header['policy']}, seed {header['seed']}: loss {record['train_loss']:.3f}")
    return Run(make_row(config, task, header, steps), steps)


def train_steps(
    config: Config, task: Task, program: Program, data: tuple[Any, Any], seed: int
) -> Iterator[tuple[nf_jax.StepInfo, dict[str, float]]]:
    """Trains; yields what each step did and measured, with the test's numbers where it was due."""
    train, test = data
    mapped = program.mapped
    due = {config.steps * (i + 1) // config.num_evaluations for i in range(config.num_evaluations)}
    state = mapped.place(jax.device_get(program.init(seed)))  # NumPy: copies are made without compiling
    for number, batch in enumerate(worker_batches(config, task, train, seed), start=1):
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(mapped.step(state, batch))
        record = {
            "step_seconds": time.perf_counter() - start,
            "train_loss": float(mapped.local(metrics["loss"])),
        }
        if number in due:
            params, model_state = jax.tree.map(mapped.local, (state.params, state.model_state))
            record |= test_scores(task, program.evaluate, params, model_state, test)
        yield jax.device_get(nf_jax.step_info(state.opt_state)), record


def worker_batches(config: Config, task: Task, train: Any, seed: int) -> Iterator[Any]:
    """What this process's workers train on: `[own workers, n, ...]` at every step."""
    rows = own_rows(jax.devices()[: config.devices])
    data = batches(train, config.steps, (config.devices, config.per_worker_batch), seed, rows)
    if task.augment is not None:
        data = changed(data, task.augment, None, seed, rows)
    if config.trouble == "labels" and task.spoil is not None:
        data = changed(data, task.spoil, config.troubled, seed, rows)
    return data


def test_scores(
    task: Task, evaluate: Callable[..., dict[str, jax.Array]], params: Any, model_state: Any, test: Any
) -> dict[str, float]:
    """Means over all test examples."""
    parts = [(n, evaluate(params, model_state, part)) for n, part in chunks(test, task.test_size)]
    total = sum(count for count, _ in parts)
    return {
        f"test_{name}": sum(count * float(scores[name]) for count, scores in parts) / total
        for name in ("loss", task.metric)
    }


def sent_bytes(program: Program, info: nf_jax.StepInfo) -> dict[str, int]:
    extra = program.model_state_bytes
    return {"wire_bytes": info.wire_bytes + extra, "fp32_bytes": info.fp32_bytes + extra}


def open_trace(
    config: Config, program: Program, header: dict[str, Any]
) -> contextlib.AbstractContextManager[trace.TraceWriter | None]:
    """The trace of a run; None where another process writes it."""
    if not cluster.is_first():
        return contextlib.nullcontext()
    folder = run_folder(config, header)
    folder.mkdir(parents=True, exist_ok=True)
    facts = header | {"backend": jax.default_backend(), "num_workers": config.num_workers}
    return trace.TraceWriter(folder / "trace.jsonl", program.profile.dumps(), program.plan.lanes, **facts)


def make_row(
    config: Config, task: Task, header: dict[str, Any], steps: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A row of summary.json; bytes are what one worker sent in the whole run, warm-up included."""
    wire, fp32 = (sum(step[name] for step in steps) for name in ("wire_bytes", "fp32_bytes"))
    metric = f"test_{task.metric}"
    last = [step for step in steps if metric in step][-config.last_evaluations :]
    return {
        "workload": config.task,
        **header,
        "metric": metric,
        "value": statistics.mean(step[metric] for step in last),
        "test_loss": statistics.mean(step["test_loss"] for step in last),
        "steps": len(steps),
        "wire_bytes": wire,
        "fp32_bytes": fp32,
        "wire_fraction": wire / fp32 if fp32 else 1.0,
        "trips": steps[-1]["trips"],
        "step_seconds_median": statistics.median(step["step_seconds"] for step in steps),
    }


# ==================================================================================== finished runs


def run_folder(config: Config, header: dict[str, Any]) -> Path:
    return config.out / f"{header['policy']}-{header['seed']}"


def keep_run(config: Config, run: Run) -> None:
    """Writes what `--resume` reads; under its name only when it is whole."""
    if not cluster.is_first():
        return
    path = run_folder(config, run.row) / "run.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"config": describe_run(config, run.row["policy"]), **run._asdict()}))
    partial.replace(path)


def finished_run(config: Config, header: dict[str, Any]) -> Run | None:
    """A run that an earlier job has finished, where it is to be kept."""
    path = run_folder(config, header) / "run.json"
    if not config.resume or not path.exists():
        return None
    kept = json.loads(path.read_text())
    if kept["config"] != describe_run(config, header["policy"]):
        raise ValueError(
            f"resume: expected {path} to be a run of this config, got one of another:\n{kept['config']}\n"
            "Choose another --out, or start anew without --resume."
        )
    return Run(kept["row"], kept["steps"])


def describe_run(config: Config, policy: Policy) -> str:
    """All of the config that a single run depends on."""
    lines = describe_shared(config).splitlines()
    kept = [line for line in lines if not line.startswith(("policies ", "seeds ", "parallel "))]
    if policy in PROFILES:
        kept.append(f"profile = {zlib.crc32(PROFILES[policy](config).dumps().encode()):08x}")
    return "\n".join(kept)
