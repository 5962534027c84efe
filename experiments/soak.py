"""Does it hold out? Thousands of steps of the digits model in one process, while signals and loads go wrong.

    python -m experiments.soak                 # 20,000 steps: 10 to 20 minutes of 2 cores
    python -m experiments.soak --seconds 300   # as many steps as five minutes allow

Real digits, the main job's MLP and profile, but with waits of few steps and every route in turn, 8 virtual
workers. Episodes of `--episode-steps` start from fresh states, each under another kind of trouble
(`soak_troubles.py`), all in one process and by one compiled step. What has to hold (`soak_laws.py`, here):

- every step takes the routes that were chosen before it, and only those that the profile allows;
- how often routes change, and why, stays below what the states' hysteresis promises;
- workers hold the same bits; a step that was not finite changes no parameter; parameters stay finite;
- nothing is compiled after the first episode; arrays that are alive, and memory, do not grow;
- a step takes less than `--stall-seconds`, or the process ends and prints where it hangs.

Writes `--out`/summary.json; exits with 1 if any of it did not hold.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
import tyro
from rich import progress

import nf_jax
from experiments import soak_laws, soak_report, soak_troubles, vision
from experiments.batches import batches
from experiments.soak_laws import Episode, Found
from experiments.soak_troubles import Trouble
from experiments.soak_watch import counted_compilations, memory_bytes, watchdog
from nf_jax import Profile, StepInfo, cluster, training
from nf_jax.profile import Phase
from nf_jax.telemetry import Array, Lanes

AXIS = "batch"
SAMPLE_STEPS = 20  # memory is looked at this often

# ============================================================================================== config


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a soak depends on; every field is a flag."""

    steps: int = 20_000
    """Steps in all."""
    seconds: float | None = None
    """Stop at the end of the step in which this much time is over, whatever `steps` says."""
    seed: int = 0
    """Of parameters, batches and troubles."""
    out: Path = Path("runs/soak")
    """Folder for summary.json."""
    kinds: tuple[str, ...] = tuple(soak_troubles.KINDS)
    """Kinds of trouble, one an episode, in turn."""
    episode_steps: int = 400
    """Steps from one fresh state to the next."""
    devices: int = 8
    """Workers, as virtual CPU devices."""
    per_worker_batch: int = 16
    """Examples per worker and step."""
    stall_seconds: float = 300.0
    """A step that takes longer, the first one's compilation included, counts as a deadlock."""
    max_growth_mib: float = 64.0
    """How much more memory the process may hold in the last fifth of the run than in the second."""

    def __post_init__(self) -> None:
        for name in ("steps", "episode_steps", "devices", "per_worker_batch", "stall_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"seconds: expected more than 0, got {self.seconds}")
        if unknown := set(self.kinds) - set(soak_troubles.KINDS) or (not self.kinds and {"none"}):
            known = ", ".join(soak_troubles.KINDS)
            raise ValueError(f"kinds: expected some of {known}, got {', '.join(sorted(unknown))}")


def make_profile() -> Profile:
    """The main job's, with short waits, and each low-bit route in turn."""
    profile = Profile.load(vision.digits().profile)
    low_bit = (("SIGN", 5), ("TERNARY", 200), ("BF16", 260), ("SIGN", 300))
    phases = tuple(
        Phase(start_step=start, routes={"backbone": nf_jax.Route[route]}) for route, start in low_bit
    )
    short = {"patience_steps": 2, "cooldown_steps": 3, "probation_steps": 4, "lane_hold_steps": 5}
    return profile.model_copy(
        update={
            "name": "soak",
            "phases": (profile.phases[0], *phases),
            "health": profile.health.model_copy(update=short | {"max_trips": 8}),
            "capacity": profile.capacity.model_copy(update={"hold_steps": 2}),
        }
    )


# ================================================================================================ step


class Seen(NamedTuple):
    """What one step shows beside its `StepInfo`; `[W]` each.

    Attributes:
      loss: f32, of this worker's examples, before any trouble.
      has_moved: bool, whether any parameter changed.
      is_finite: bool, whether all parameters are finite.
      digest: uint32, of the bits of all parameters and of the routes of the next step.
    """

    loss: Array
    has_moved: Array
    is_finite: Array
    digest: Array


def make_step(loss_fn: Callable[..., Any], tx: Any, devices: Sequence[Any]) -> Callable[..., Any]:
    """`(params, opt_state, batch, trouble) -> (params, opt_state, Seen)` on all workers."""

    def step(params: Any, opt_state: Any, batch: Any, trouble: Trouble) -> Any:
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        leaves, treedef = jax.tree.flatten(grads)
        grads = jax.tree.unflatten(treedef, [x * trouble.factors[i] for i, x in enumerate(leaves)])
        updates, opt_state = tx.update(
            grads, opt_state, params, value=loss + trouble.loss, reducer_load=trouble.load
        )
        new = optax.apply_updates(params, updates)
        pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(new), strict=True))
        moved = jnp.stack([jnp.any(old != now) for old, now in pairs]).any()
        finite = jnp.stack([jnp.isfinite(now).all() for _, now in pairs]).all()
        words = [now.view(jnp.uint32).sum(dtype=jnp.uint32) for _, now in pairs]
        routes = nf_jax.step_info(opt_state).next_routes.astype(jnp.uint32)
        digest = jnp.stack(words).sum(dtype=jnp.uint32) * jnp.uint32(31) + (
            routes * jnp.arange(1, len(routes) + 1, dtype=jnp.uint32)
        ).sum(dtype=jnp.uint32)
        return new, opt_state, Seen(loss, moved, finite, digest)

    return jax.pmap(step, axis_name=AXIS, devices=devices, donate_argnums=(0, 1))


def check_seen(trouble: Trouble, seen: Seen, info: StepInfo) -> list[str]:
    """A line for each law that what one step shows breaks."""
    broken = []
    if len(set(seen.digest.tolist())) > 1:
        broken.append("workers hold different bits")
    if not np.isfinite(trouble.factors).all() and np.any(seen.has_moved):
        broken.append("a gradient was not finite, but parameters moved")
    if not np.isfinite(trouble.factors).all() and not np.any(info.signals.nonfinite):
        broken.append("a gradient was not finite, and no signal says so")
    if not np.all(seen.is_finite):
        broken.append("parameters are not finite")
    return [f"step {int(info.step)}: {line}" for line in broken]


# ================================================================================================ soak


class Programs(NamedTuple):
    """What is compiled, once.

    Attributes:
      init: seed -> (params, opt_state) of one worker.
      step: see `make_step`.
      evaluate: params -> accuracy of the test images, percent.
    """

    init: Callable[[int], Any]
    step: Callable[..., Any]
    evaluate: Callable[[Any], Any]


def make_programs(config: Config, profile: Profile) -> tuple[Programs, Any, Lanes]:
    """The programs, the examples to train on, and the lanes of the plan."""
    task = vision.TASKS["digits"](vision.digits())
    train, test = task.load()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tx = optax.chain(
        nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=config.devices),
        optax.apply_if_finite(optimizer, max_consecutive_errors=2**30),
    )

    @jax.jit
    def init(seed: int) -> Any:
        params, _ = task.init(jax.random.key(seed, impl="rbg"), train)
        return params, tx.init(params)

    devices = jax.devices()[: config.devices]
    lanes = nf_jax.plan(profile, jax.eval_shape(init, 0)[0], config.devices).lanes
    evaluate = jax.jit(lambda params: task.test_fn(params, None, test)["accuracy"])
    return Programs(init, make_step(task.loss_fn, tx, devices), evaluate), train, lanes


def run_episode(
    config: Config,
    programs: Programs,
    episode: Episode,
    data: Iterator[Any],
    seed: int,
    tell: Callable[[Trouble, StepInfo, StepInfo, Seen], bool],
) -> Any:
    """Trains from a fresh state on; `tell` hears of every step, and ends it by False. Returns the params."""
    rng = np.random.default_rng(seed)
    fresh = jax.device_get(programs.init(seed))
    info, num_leaves = nf_jax.step_info(fresh[1]), len(jax.tree.leaves(fresh[0]))
    params, opt_state = training.replicate(fresh, jax.devices()[: config.devices], axis=AXIS)
    for batch in data:
        trouble = soak_troubles.make_trouble(episode.kind, rng, info, config.devices, num_leaves)
        params, opt_state, seen = programs.step(params, opt_state, batch, trouble)
        before, info = info, jax.device_get(nf_jax.step_info(opt_state))
        if not tell(trouble, before, info, jax.device_get(seen)):
            break
    return jax.tree.map(lambda leaf: np.array(leaf.addressable_data(0))[0], params)


def soak(config: Config, tick: Callable[[str], None]) -> tuple[Found, Lanes]:
    """Runs it; calls `tick` after every step."""
    found, profile = Found(), make_profile()
    programs, train, lanes = make_programs(config, profile)
    shape, start = (config.devices, config.per_worker_batch), time.monotonic()
    end = math.inf if config.seconds is None else start + config.seconds
    with counted_compilations() as compiled, watchdog(config.stall_seconds) as beat:

        def tell(trouble: Trouble, before: StepInfo, info: StepInfo, seen: Seen) -> bool:
            beat()
            found.broken += check_seen(trouble, seen, info)
            found.broken += soak_laws.observe(found.episodes[-1], profile, lanes, before, info)
            if found.steps % SAMPLE_STEPS == 1:
                found.memory.append((found.steps, memory_bytes()))
            tick(f"{found.episodes[-1].kind}: loss {seen.loss.mean():.3f}")
            return time.monotonic() < end

        while found.steps < config.steps and time.monotonic() < end:
            number, num_left = len(found.episodes), config.steps - found.steps
            found.episodes.append(Episode(config.kinds[number % len(config.kinds)]))
            seed = 1000 * config.seed + number
            data = batches(train, min(config.episode_steps, num_left), shape, seed)
            params = run_episode(config, programs, found.episodes[-1], data, seed, tell)
            found.broken += soak_laws.judge_episode(found.episodes[-1], profile, lanes)
            if found.episodes[-1].steps == config.episode_steps:
                found.accuracy.append(float(programs.evaluate(params)))
                gc.collect()
                found.arrays.append((len(alive := jax.live_arrays()), sum(x.nbytes for x in alive)))
                del alive
            first = len(compiled) if number == 0 else found.compilations[0]
            found.compilations = (first, len(compiled) - first)
    found.seconds = time.monotonic() - start
    found.broken += soak_laws.judge_run(found, config.episode_steps, config.max_growth_mib)
    return found, lanes


# ================================================================================================ main


def run(config: Config) -> dict[str, Any]:
    """Soaks, writes, prints."""
    cluster.use_devices("cpu", config.devices)
    config.out.mkdir(parents=True, exist_ok=True)
    columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
    with progress.Progress(*columns, transient=True) as bar:
        job = bar.add_task("compiling", total=config.steps)
        found, lanes = soak(config, lambda text: bar.update(job, advance=1, description=text))
    options = {name: value for name, value in dataclasses.asdict(config).items() if name != "out"}
    summary = soak_report.summarize(found, make_profile(), lanes, options)
    (config.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    rich.print(soak_report.make_table(summary))
    rich.print(f"Wrote {config.out}/summary.json.")
    return summary


def main(args: Sequence[str] | None = None) -> None:
    try:
        summary = run(tyro.cli(Config, prog="experiments.soak", description=__doc__, args=args))
    except ValueError as error:
        sys.exit(f"error: {error}")
    if summary["broken"]:
        lines = "\n  ".join(summary["broken"][:20])
        sys.exit(f"error: soak: {len(summary['broken'])} times something did not hold:\n  {lines}")


if __name__ == "__main__":
    main()
