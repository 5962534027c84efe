"""The training of one policy, inside a job.

An experiment supplies a `Task` (data, model, loss); `jobs.py` runs all policies of a job and shows what came
of it. In several processes each of them trains its own workers on its own rows of the same batches.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import nf_jax
from experiments import kept
from experiments.batches import Change, batches, changed, chunks
from experiments.config import Config, Policy
from experiments.kept import Run
from experiments.mapping import MAPPINGS, Mapped, own_rows
from experiments.policies import Rule, make_optimizer, rule_of
from nf_jax import Profile, capacity, processes, resume, trace, training


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
    shared = "\n".join(f"{name} = {value}" for name, value in kept.shared_facts(config).items())
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


# ============================================================================================ runs


MEASURED = ("step_seconds", "train_loss")
"""What every step measures; where it is tested, `test_...` too."""


def run_policy(config: Config, task: Task, policy: Policy, tick: Callable[[str], None]) -> Iterator[Run]:
    """One run per seed; the step is compiled for the first and used by all."""
    data = task.load()
    make_rule = functools.partial(rule_of, config, policy)
    make = functools.cache(lambda: prepare(config, task, data[0], make_rule, policy))
    for seed in config.seeds:
        header = {"policy": policy, "seed": seed, "num_workers": config.devices}
        if (run := kept.finished(config, header)) is not None:
            for _ in run.steps:
                tick(f"{policy}, seed {seed}: finished earlier")
        else:
            run = train_run(config, task, make(), data, header, tick)
            kept.keep(config, run)
        yield run


def train_run(
    config: Config,
    task: Task,
    program: Program,
    data: tuple[Any, Any],
    header: dict[str, Any],
    tick: Callable[[str], None],
) -> Run:
    """Trains once, from where an earlier job's last checkpoint is if there is one; writes the trace."""
    with open_run(config, program, header) as run:
        steps = earlier_steps(config, program, header, run.step)
        for _ in steps:
            tick(f"{header['policy']}, seed {header['seed']}: trained earlier")
        for state, record in train_steps(config, task, program, data, header["seed"], run.state, run.step):
            info = run.record(state, **record)
            steps.append(summary(program, record, info.wire_bytes, info.fp32_bytes, info.trips))
            tick(f"{header['policy']}, seed {header['seed']}: loss {record['train_loss']:.3f}")
    return Run(make_row(config, task, header, steps), steps)


def first_state(program: Program, seed: int) -> Any:
    """The state before the first step, placed."""
    return program.mapped.place(
        jax.device_get(program.init(seed))
    )  # NumPy: copies are made without compiling


def train_steps(
    config: Config, task: Task, program: Program, data: tuple[Any, Any], seed: int, state: Any, start: int = 0
) -> Iterator[tuple[Any, dict[str, float]]]:
    """Trains from step `start` on; yields the state after each step and what that measured, with the test's
    numbers where it was due."""
    train, test = data
    mapped = program.mapped
    due = {config.steps * (i + 1) // config.num_evaluations for i in range(config.num_evaluations)}
    left = itertools.islice(worker_batches(config, task, train, seed), start, None)
    for number, batch in enumerate(left, start=start + 1):
        begin = time.perf_counter()
        state, metrics = jax.block_until_ready(mapped.step(state, batch))
        record = {
            "step_seconds": time.perf_counter() - begin,
            "train_loss": float(mapped.local(metrics["loss"])),
        }
        if number in due:
            params, model_state = jax.tree.map(mapped.local, (state.params, state.model_state))
            record |= test_scores(task, program.evaluate, params, model_state, test)
        yield state, record


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


def summary(
    program: Program, record: dict[str, Any], wire_bytes: int, fp32_bytes: int, trips: Any
) -> dict[str, Any]:
    """A step as a run's results are made of it: with the bytes of batch-norm statistics, and most trips."""
    extra = program.model_state_bytes
    sent = {"wire_bytes": wire_bytes + extra, "fp32_bytes": fp32_bytes + extra}
    return record | sent | {"trips": int(np.max(trips))}


def open_run(config: Config, program: Program, header: dict[str, Any]) -> resume.Run:
    """A run's trace, and its checkpoints where it is to have some."""
    facts: dict[str, Any] = header | {"backend": jax.default_backend(), "num_workers": config.num_workers}
    facts |= kept.run_facts(config, header["policy"])
    return resume.Run(
        kept.run_folder(config, header),
        first_state(program, header["seed"]),
        program.profile,
        program.plan,
        every_steps=config.checkpoint_every or config.steps + 1,
        **facts,
    )


def earlier_steps(
    config: Config, program: Program, header: dict[str, Any], num_steps: int
) -> list[dict[str, Any]]:
    """What the steps before a checkpoint left, from the trace."""
    if num_steps == 0:
        return []
    steps = trace.read_trace(kept.run_folder(config, header) / "trace.jsonl").steps
    measured = lambda step: {name: step[name] for name in step if name in MEASURED or "test_" in name}  # noqa: E731
    return [summary(program, measured(s), s["wire_bytes"], s["fp32_bytes"], s["trips"]) for s in steps]


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
