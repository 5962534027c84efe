"""An experiment as `nf-jax calibrate` takes it: a Config and its Task -> a Job.

    nf-jax calibrate experiments.vision:digits --out profiles/digits-mlp.toml

Held out is every fifth training example, at most 2,000: the test examples take no part, so that a test of the
profile afterwards is one. A short run is a whole run in small, with the schedule's shape.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

import nf_jax
from experiments import jobs, runs
from experiments.config import Config
from experiments.policies import Rule, by_profile
from experiments.runs import Program, Task
from nf_jax import Profile, cluster
from nf_jax.calibrate import Job, Outcome, Report
from nf_jax.profile import Phase, Region, Route
from nf_jax.shadow_trace import ShadowWriter
from nf_jax.trace import TraceWriter

HELD_OUT, MAX_HELD_OUT = 5, 2000
"""One training example of so many is held out, and at most so many."""

SHADOW_LINES = 200
"""A shadow trace has about so many steps."""

START = Profile(
    name="start",
    regions=(
        Region(name="head", pattern="(.*/)?(head|classifier|embed_out)/.*"),
        Region(name="vectors", pattern="(.*/)?(bias|scale)"),
        Region(name="backbone", pattern=".*"),
    ),
    phases=(Phase(start_step=0, routes={"head": Route.FP32, "vectors": Route.FP32, "backbone": Route.SIGN}),),
)
"""Where there is no profile yet."""


def make_job(config: Config, task: Task, *, tolerance: float, loss_tolerance: float) -> Job:
    """The job.

    Args:
      config: of the experiment; `policies`, `seeds`, `out` and `trouble` have no part in it.
      task: its data and model.
      tolerance, loss_tolerance: as `Job` takes them.
    """
    cluster.use_devices(config.cluster.platform, config.devices)
    config = dataclasses.replace(config, trouble="none")
    train, held_out = split(task.load()[0])
    shapes, _ = jax.eval_shape(lambda key: task.init(key, train), jax.random.key(0, impl="rbg"))

    @functools.lru_cache(maxsize=1)  # the runs of a profile come one after the other
    def prepare(profile_toml: str, steps: int) -> tuple[Config, Program]:
        own = shorten(config, steps)
        profile = Profile.loads(profile_toml)
        return own, runs.prepare(own, task, train, lambda _: by_profile(own, profile), "calibrate")

    def measure(
        profile: Profile, *, steps: int, seed: int, trace: Path | None, report: Report
    ) -> Outcome | None:
        own, program = prepare(profile.dumps(), steps)
        return train_once(own, task, program, (train, held_out), seed, trace, report)

    def shadow(*, steps: int, seed: int, trace: Path) -> None:
        own = shorten(config, steps)
        program = runs.prepare(own, task, train, lambda _: in_shadow(own, start), "shadow")
        train_in_shadow(own, task, program, train, seed, trace)

    start = Profile.load(config.profile) if config.profile.exists() else START
    start = start.model_copy(update={"model": None})  # the profile found gets this job's
    return Job(
        name=config.task if not config.model else f"{config.task} {config.model}",
        params=shapes,
        num_workers=config.num_workers,
        steps=config.steps,
        start=start,
        metric=f"validation_{task.metric}",
        higher_is_better=jobs.METRICS[f"test_{task.metric}"].higher_is_better,
        tolerance=tolerance,
        loss_tolerance=loss_tolerance,
        measure=measure,
        batch_size=config.devices * config.per_worker_batch,
        optimizer=describe_optimizer(config),
        devices=f"{config.devices} virtual CPU devices" if config.cluster.platform == "cpu" else None,
        shadow=shadow,
    )


def split(examples: Any) -> tuple[Any, Any]:
    """(training, held out): pytrees of arrays `[n, ...]`."""
    total = len(jax.tree.leaves(examples)[0])
    is_held_out = np.arange(total) % max(HELD_OUT, -(-total // MAX_HELD_OUT)) == 0
    train, held_out = (
        jax.tree.map(lambda leaf, rows=rows: leaf[rows], examples) for rows in (~is_held_out, is_held_out)
    )
    return train, held_out


def shorten(config: Config, steps: int) -> Config:
    """The same run in so many steps: the learning rate rises and falls over the same parts of it."""
    return dataclasses.replace(
        config,
        steps=steps,
        warmup_steps=config.warmup_steps * steps // config.steps,
        num_evaluations=min(config.num_evaluations, steps),
    )


def train_once(
    config: Config,
    task: Task,
    program: Program,
    data: tuple[Any, Any],
    seed: int,
    trace: Path | None,
    report: Report,
) -> Outcome | None:
    """Trains, reports wherever the run is tested, and stops when told to."""
    steps: list[dict[str, Any]] = []
    with open_trace(config, program, trace) as writer:
        first = runs.first_state(program, seed)
        for state, record in runs.train_steps(config, task, program, data, seed, first):
            info = jax.device_get(nf_jax.step_info(state))
            if writer is not None:
                writer.write(info, **record)
            steps.append(runs.summary(program, record, info.wire_bytes, info.fp32_bytes, info.trips))
            if "test_loss" not in record:
                continue
            sent = sum(step["wire_bytes"] for step in steps)
            if not report(len(steps), record["test_loss"], sent):
                return None
    row = runs.make_row(config, task, {"seed": seed}, steps)
    return Outcome(row["value"], row["test_loss"], row["wire_bytes"], row["fp32_bytes"], row["trips"])


def in_shadow(config: Config, profile: Profile) -> Rule:
    """Averages exactly, and watches what candidates would have done."""
    aggregate = nf_jax.aggregate_gradients(
        profile, axis=config.axis, num_workers=config.num_workers, shadow=True
    )
    return Rule(aggregate, profile)


def train_in_shadow(config: Config, task: Task, program: Program, train: Any, seed: int, trace: Path) -> None:
    """Trains exactly, and writes what candidates would have done."""
    mapped, every = program.mapped, max(1, config.steps // SHADOW_LINES)
    watched = nf_jax.shadow_plan(program.profile, jax.eval_shape(program.init, 0).params, config.num_workers)
    state = runs.first_state(program, seed)
    with ShadowWriter(trace, program.profile.dumps(), watched.leaves, every=every) as writer:
        for batch in runs.worker_batches(config, task, train, seed):
            state, _ = jax.block_until_ready(mapped.step(state, batch))
            writer.write(jax.device_get(nf_jax.shadow_info(state.opt_state)))


def open_trace(
    config: Config, program: Program, path: Path | None
) -> contextlib.AbstractContextManager[TraceWriter | None]:
    """The trace of a run, if it is wanted."""
    if path is None:
        return contextlib.nullcontext()
    facts = {"backend": jax.default_backend(), "num_workers": config.num_workers}
    return TraceWriter(path, program.profile.dumps(), program.plan.lanes, **facts)


def describe_optimizer(config: Config) -> str:
    """The chain after aggregation, in words."""
    rule = f"{config.optimizer}, weight decay {config.weight_decay:g}, cosine from {config.learning_rate:g}"
    if config.warmup_steps:
        rule += f" after {config.warmup_steps} steps of warm-up"
    return f"clip_by_global_norm({config.clip_norm:g}), {rule} over {config.steps} steps"
