"""Image classification, trained alike with every policy: what do cheap gradients cost?

    python -m experiments.vision digits        # 3 policies x 3 seeds: 150 s of CPU time

Real handwritten digits (scikit-learn ships them: 1797 images of 8x8), an MLP of 0.32 M parameters,
8 data-parallel workers as virtual CPU devices. Policies differ in how gradients are averaged, in
nothing else: `fp32` (plain mean), `static` (every lane as majority signs from step 0, no error
feedback), `guided` (a profile; profiles/digits-mlp.toml unless `--profile` says otherwise), `bf16`.

Expected test accuracy in %, mean of seeds 0 to 2, and bytes sent over FP32's: fp32 98.4 and 1, static
96.8 and 0.035, guided 98.1 and 0.073. Under 1 point is noise. How much static loses depends on the
optimizer too: AdamW is the quickstart's.

Writes under `--out`: summary.json (a row per run), <policy>-<seed>/trace.jsonl (a line per step)
and curves.png.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
import tyro
from flax import jax_utils
from rich import box, progress
from rich.table import Table
from sklearn import datasets

import nf_jax
from nf_jax import Profile, Route, trace, training

Policy = Literal["fp32", "bf16", "static", "guided"]
AXIS = "batch"
ROOT = Path(__file__).resolve().parent.parent

# ============================================================================================ config


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a job depends on; every field is a flag."""

    task: tyro.conf.Suppress[str]
    """Row of `TASKS`: data and model."""
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
    """Workers, as virtual CPU devices."""
    parallel: Literal["pmap", "shard_map"] = "pmap"
    """How the step is mapped over the workers."""
    weight_decay: float = 1e-4
    """AdamW's."""
    clip_norm: float = 1.0
    """Global norm to which mean gradients are clipped."""
    num_evaluations: int = 10
    """Times that a run is tested, evenly spaced; the last one is its result."""

    def __post_init__(self) -> None:
        counts = ("steps", "per_worker_batch", "devices", "num_evaluations")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("policies", "seeds"):
            if not (values := getattr(self, name)) or len(set(values)) != len(values):
                raise ValueError(f"{name}: expected at least one and no repeats, got {values}")


def digits() -> Config:
    """Handwritten digits, MLP: the main job, small enough for a laptop."""
    return Config(
        task="digits",
        profile=ROOT / "profiles" / "digits-mlp.toml",
        out=Path("runs/digits"),
        steps=200,
        per_worker_batch=16,
        learning_rate=1e-3,
    )


CONFIGS: dict[str, Callable[[], Config]] = {"digits": digits}

# ========================================================================================== policies

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

# ==================================================================================== data and models


class Examples(NamedTuple):
    """Attributes: inputs: f32[n, ...]; labels: int32[n]."""

    inputs: np.ndarray
    labels: np.ndarray


class Task(NamedTuple):
    """Attributes: load: -> (train, test), always the same split; model: inputs -> logits."""

    load: Callable[[], tuple[Examples, Examples]]
    model: nn.Module


def load_digits() -> tuple[Examples, Examples]:
    """A third is for testing: one image is 0.17 points, and three images are no difference."""
    inputs, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (inputs[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    cut = len(labels) * 2 // 3
    return Examples(images[:cut], labels[:cut]), Examples(images[cut:], labels[cut:])


class MLP(nn.Module):
    """Dense layers with ReLU, then a head of one logit per class."""

    hidden_sizes: tuple[int, ...]
    num_classes: int

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, kernel_init=nn.initializers.lecun_uniform())
        values = inputs
        for index, size in enumerate(self.hidden_sizes):
            values = nn.relu(dense(size, name=f"hidden_{index}")(values))
        return dense(self.num_classes, name="head")(values)


TASKS: dict[str, Task] = {"digits": Task(load_digits, MLP((384, 384, 384), num_classes=10))}


def cross_entropy(model: nn.Module, params: Any, batch: Examples) -> tuple[jax.Array, dict]:
    """Mean loss, and the accuracy in percent."""
    logits = jnp.asarray(model.apply({"params": params}, batch.inputs))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    hits = jnp.argmax(logits, axis=-1) == batch.labels
    return losses.mean(), {"accuracy": 100 * hits.astype(jnp.float32).mean()}


def batches(examples: Examples, num_steps: int, shape: Sequence[int], seed: int) -> Iterator[Any]:
    """Batches of leading dimensions `shape`, epoch after epoch, each in an order of its own."""
    size, total = math.prod(shape), len(examples.labels)
    rng = np.random.default_rng(seed)
    epochs = [rng.permutation(total) for _ in range(math.ceil(num_steps * size / total))]
    for chosen in np.concatenate(epochs)[: num_steps * size].reshape(num_steps, *shape):
        yield jax.tree.map(lambda values, index=chosen: values[index], examples)


# ========================================================================================== training


class Mapped(NamedTuple):
    """One step on all workers, under pmap or shard_map.

    Attributes:
      step: (state, batch) -> (state, metrics).
      place: one worker's fresh state -> the state of all.
      batch_shape: leading dimensions of a batch.
      local: one leaf as worker 0 has it.
    """

    step: training.Step
    place: Callable[[Any], Any]
    batch_shape: tuple[int, ...]
    local: Callable[[jax.Array], jax.Array]


def map_with_pmap(config: Config, loss_fn: training.LossFn, state: Any) -> Mapped:
    """`replicate` is told the axis: under its own name for it, the second step compiles anew."""
    del state
    devices = jax.devices()[: config.devices]
    return Mapped(
        step=training.pmap_step(loss_fn, axis=AXIS, devices=devices),
        place=lambda fresh: jax_utils.replicate(fresh, devices, axis_name=AXIS),
        batch_shape=(config.devices, config.per_worker_batch),
        local=lambda leaf: leaf.addressable_data(0)[0],
    )


def map_with_shard_map(config: Config, loss_fn: training.LossFn, state: Any) -> Mapped:
    mesh = jax.sharding.Mesh(jax.devices()[: config.devices], (AXIS,))
    return Mapped(
        step=training.shard_map_step(loss_fn, mesh, state, axis=AXIS),
        place=lambda fresh: training.place(fresh, mesh, AXIS),
        batch_shape=(config.devices * config.per_worker_batch,),
        local=lambda leaf: leaf.addressable_data(0),
    )


MAPPINGS = {"pmap": map_with_pmap, "shard_map": map_with_shard_map}


def make_optimizer(config: Config, profile: Profile) -> optax.GradientTransformation:
    """The same for every policy, but for how gradients are averaged."""
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.steps)
    return optax.chain(
        nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=config.devices),
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, weight_decay=config.weight_decay),
    )


class Run(NamedTuple):
    """What one run left: its row of summary.json, and a record per step."""

    row: dict[str, Any]
    steps: list[dict[str, Any]]


def run_policy(config: Config, policy: Policy, tick: Callable[[str], None]) -> Iterator[Run]:
    """One run per seed; the step is compiled for the first and used by all."""
    task = TASKS[config.task]
    train, test = task.load()
    profile = POLICIES[policy](config)
    loss_fn = functools.partial(cross_entropy, task.model)
    tx = make_optimizer(config, profile)

    @jax.jit
    def init(seed: int) -> training.TrainState:
        key = jax.random.key(seed, impl="rbg")  # threefry takes XLA 5 s to compile here
        params = task.model.init(key, train.inputs[:1])["params"]
        state = training.TrainState.create(apply_fn=task.model.apply, params=params, tx=tx)
        return state.replace(step=jnp.int32(0))  # Flax's Python int would compile anew

    shapes = jax.eval_shape(init, 0)
    lanes = nf_jax.plan(profile, shapes.params, config.devices).lanes
    mapped = MAPPINGS[config.parallel](config, loss_fn, shapes)
    evaluate = jax.jit(lambda params: loss_fn(params, test))
    for seed in config.seeds:
        folder = config.out / f"{policy}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        header = {"policy": policy, "seed": seed, "num_workers": config.devices}
        data = batches(train, config.steps, mapped.batch_shape, seed)
        steps: list[dict[str, Any]] = []
        with trace.TraceWriter(folder / "trace.jsonl", profile.dumps(), lanes, **header) as writer:
            for info, record in train_steps(config, mapped, init(seed), data, evaluate):
                writer.write(info, **record)
                bytes_sent = {"wire_bytes": info.wire_bytes, "fp32_bytes": info.fp32_bytes}
                steps.append(record | bytes_sent | {"trips": int(np.max(info.trips))})
                tick(f"{policy}, seed {seed}: loss {record['train_loss']:.3f}")
        yield Run(make_row(header, steps), steps)


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


# =========================================================================================== results


def make_table(config: Config, rows: Sequence[dict[str, Any]]) -> Table:
    """One line per policy over its seeds."""
    num_seeds = len(config.seeds)
    table = Table(
        title=f"{config.task}: test accuracy in %; {config.steps} steps, {config.devices} workers, "
        f"{num_seeds} seed(s)",
        caption=make_caption(config, rows),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("policy", no_wrap=True)
    for name in ("accuracy", "min - max", "test loss", "wire/FP32", "trips", "steps/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for policy in config.policies:
        own = [row for row in rows if row["policy"] == policy]
        values = [row["value"] for row in own]
        table.add_row(
            policy,
            f"{statistics.mean(values):.2f}",
            f"{min(values):.2f} - {max(values):.2f}",
            f"{mean_of(own, 'test_loss'):.3f}",
            f"{mean_of(own, 'wire_fraction'):.4f}",
            str(sum(row["trips"] for row in own)),
            f"{1 / mean_of(own, 'step_seconds_median'):.1f}",
        )
    return table


def mean_of(rows: Sequence[dict[str, Any]], name: str) -> float:
    return statistics.mean(row[name] for row in rows)


def make_caption(config: Config, rows: Sequence[dict[str, Any]]) -> str:
    """What the run found, from its numbers alone."""
    by_policy = {p: [row for row in rows if row["policy"] == p] for p in config.policies}
    exact = by_policy.pop("fp32", None)
    lines = [describe_gap(policy, own, exact) for policy, own in by_policy.items() if exact]
    target = Profile.load(config.profile).target if "guided" in by_policy else None
    if target and target.metric == by_policy["guided"][0]["metric"]:
        is_met = target.is_met(mean_of(by_policy["guided"], "value"))
        lines.append(
            f"The profile's target, {target.reference:.2f} with a tolerance of "
            f"{target.tolerance:.2f}, is {'met' if is_met else 'missed'} by guided."
        )
    lines.append("All workers share this machine's cores: steps/s is no network's.")
    return "\n".join(lines)


def describe_gap(policy: str, own: Sequence[dict[str, Any]], exact: Sequence[dict[str, Any]]) -> str:
    """One policy against fp32, seed by seed; by the design, under 1 point is noise."""
    gaps = [a["value"] - b["value"] for a, b in zip(own, exact, strict=True)]
    gap = statistics.mean(gaps)
    loss_ratio = mean_of(own, "test_loss") / mean_of(exact, "test_loss")
    if not math.isfinite(loss_ratio) or gap <= -1.0:
        verdict = "visibly worse than fp32"
    elif loss_ratio > 1.5:
        verdict = "accuracy does not suffer visibly on this easy task, the test loss does"
    else:
        verdict = "no visible difference to fp32 on this task"
    return (
        f"{policy}: {verdict} ({gap:+.2f} points, by seed {min(gaps):+.2f} to {max(gaps):+.2f}; "
        f"{loss_ratio:.1f} x the test loss) for 1/{1 / mean_of(own, 'wire_fraction'):.1f} of the bytes."
    )


STYLES = {  # Okabe and Ito's colours, told apart with every kind of sight; lines differ too
    "fp32": ("#000000", "-"),
    "bf16": ("#009E73", "-."),
    "static": ("#D55E00", "--"),
    "guided": ("#0072B2", "-"),
}


def plot_curves(config: Config, runs: dict[Policy, list[Run]], path: Path) -> None:
    """Test accuracy, training loss and bytes sent, over steps; bands span the seeds."""
    from matplotlib.figure import Figure  # slow to import, and not needed before

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for policy, own in runs.items():
        color, line = STYLES[policy]
        for ax, (x, curves) in zip(axes, curves_of(own), strict=True):
            ax.fill_between(x, curves.min(0), curves.max(0), color=color, alpha=0.15, linewidth=0)
            ax.plot(x, curves.mean(0), line, color=color, label=policy, linewidth=1.8)
    titles = ("test accuracy, %", "training loss, 15-step mean", "sent by one worker, MB")
    for ax, title in zip(axes, titles, strict=True):
        ax.set(title=title, xlabel="step")
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    axes[1].set_yscale("log")
    axes[2].set_yscale("log")
    axes[0].legend(loc="lower right", frameon=False)
    num_seeds = len(config.seeds)
    figure.suptitle(
        f"{config.task}, {config.devices} workers: mean of {num_seeds} seed(s), bands from worst to best"
    )
    figure.savefig(path, dpi=120)


def curves_of(runs: Sequence[Run]) -> list[tuple[np.ndarray, np.ndarray]]:
    """(steps, curves [seed, step]) of test accuracy, smoothed training loss and cumulative MB."""
    steps = runs[0].steps
    every = np.arange(1, len(steps) + 1)
    tested = [i for i, step in enumerate(steps) if "test_accuracy" in step]
    width = min(15, len(steps))
    accuracy = np.array([[run.steps[i]["test_accuracy"] for i in tested] for run in runs])
    losses = np.array([[step["train_loss"] for step in run.steps] for run in runs])
    smooth = np.array([np.convolve(row, np.full(width, 1 / width), "valid") for row in losses])
    sent = np.array([[step["wire_bytes"] for step in run.steps] for run in runs]).cumsum(1) / 1e6
    return [(every[tested], accuracy), (every[width - 1 :], smooth), (every, sent)]


# ============================================================================================== main


def use_cpu_devices(num_devices: int) -> None:
    """Virtual CPU devices; what has used JAX before this in the same process decided already."""
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError:
        pass
    if (found := len(jax.devices())) < num_devices:
        raise ValueError(
            f"devices: expected {num_devices}, got {found}: JAX has started already, with fewer. "
            f"Ask for at most {found}, or start a new process."
        )


def remove_results(out: Path) -> None:
    """Deletes what an earlier job wrote, so that no folder mixes two."""
    traces = [path for policy in POLICIES for path in out.glob(f"{policy}-*/trace.jsonl")]
    for path in [out / "summary.json", out / "curves.png", *traces]:
        path.unlink(missing_ok=True)


def describe_run(row: dict[str, Any]) -> str:
    return (
        f"{row['policy']}, seed {row['seed']}: accuracy {row['value']:.2f} %, "
        f"{row['wire_fraction']:.4f} of FP32's bytes, {row['trips']} trips, "
        f"{1000 * row['step_seconds_median']:.0f} ms a step"
    )


def run_job(config: Config) -> list[dict[str, Any]]:
    """Runs a whole job; returns the rows of summary.json."""
    use_cpu_devices(config.devices)
    config.out.mkdir(parents=True, exist_ok=True)
    remove_results(config.out)
    runs: dict[Policy, list[Run]] = {}
    columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
    with progress.Progress(*columns, transient=True) as bar:
        total = len(config.policies) * len(config.seeds) * config.steps
        job = bar.add_task(config.task, total=total)

        def tick(text: str) -> None:
            bar.update(job, advance=1, description=text)

        for policy in config.policies:
            runs[policy] = []
            for run in run_policy(config, policy, tick):
                runs[policy].append(run)
                bar.console.print(describe_run(run.row))
    rows = [run.row for own in runs.values() for run in own]
    (config.out / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot_curves(config, runs, config.out / "curves.png")
    rich.print(make_table(config, rows))
    rich.print(f"Wrote {config.out}/summary.json, curves.png and a trace.jsonl per run.")
    return rows


def main(args: Sequence[str] | None = None) -> None:
    choices = {name: (make.__doc__ or name, make()) for name, make in CONFIGS.items()}
    run_job(tyro.extras.overridable_config_cli(choices, prog="experiments.vision", args=args))


if __name__ == "__main__":
    main()
