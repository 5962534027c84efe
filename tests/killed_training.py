"""A run that is killed with SIGKILL again and again, beside one that is not; also run as a script.

python -m tests.killed_training --kills 20     # says whether both ended with the same bits
python tests/killed_training.py FOLDER         # one life of a run
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import nf_jax
from nf_jax import checkpoint, resume, trace, training
from nf_jax.profile import CapacityLimits, Codec, HealthLimits, Phase, Profile, Region, Route

W, NUM_STEPS, EVERY_STEPS, SEED = 4, 240, 10, 3
NUM_IN, NUM_HIDDEN, NUM_CLASSES, SHARE = 64, 256, 16, 4  # large enough for signs
PROFILE = Profile(
    name="killed",
    regions=(
        Region(name="head", pattern="head/.*", codec=Codec(down="majority", residual_dtype="bfloat16")),
        Region(name="body", pattern=".*", codec=Codec(down="ternary")),
    ),
    phases=(
        Phase(start_step=0, routes={"head": Route.FP32, "body": Route.SIGN}),
        Phase(start_step=60, routes={"head": Route.BF16, "body": Route.SIGN}),
        Phase(start_step=120, routes={"head": Route.SIGN, "body": Route.TERNARY}),
    ),
    health=HealthLimits(warmup_steps=10, cooldown_steps=15, probation_steps=20, patience_steps=2),
    capacity=CapacityLimits(min_lane_bytes=0, hold_steps=6),
)
NONFINITE_STEPS, LOADED_STEPS = (50, 150), range(95, 100)  # a trip at each, and a saturated reducer


def params_of(key: jax.Array) -> Any:
    first, second = jax.random.split(key)
    return {
        "body": {"kernel": jax.random.normal(first, (NUM_IN, NUM_HIDDEN)) / 8, "bias": jnp.zeros(NUM_HIDDEN)},
        "head": {"kernel": jax.random.normal(second, (NUM_HIDDEN, NUM_CLASSES)) / 12},
    }


def loss_fn(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["body"]["kernel"] + params["body"]["bias"])
    logits = hidden @ params["head"]["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def batches() -> Iterator[tuple[int, Any]]:
    """Which examples a step takes, as a checksum, and them: `[W, SHARE, ...]`, a new order every epoch."""
    rng = np.random.default_rng(SEED)
    x = rng.normal(size=(512, NUM_IN)).astype(np.float32)
    y = (x[:, :NUM_CLASSES] + rng.normal(size=(512, NUM_CLASSES))).argmax(1).astype(np.int32)
    for step in itertools.count():
        if step % 32 == 0:
            order = rng.permutation(512)
        chosen = order[step % 32 * W * SHARE :][: W * SHARE].reshape(W, SHARE)
        batch = {"x": x[chosen].copy(), "y": y[chosen]}
        if step in NONFINITE_STEPS:
            batch["x"][W - 1, 0] = np.nan
        yield zlib.crc32(chosen.tobytes()), batch


def make_state() -> tuple[training.TrainState, nf_jax.Plan]:
    """One worker's fresh state, and its plan."""
    params = params_of(jax.random.key(SEED))
    tx = optax.chain(
        nf_jax.aggregate_gradients(PROFILE, axis="batch", num_workers=W),
        optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)), 10),
    )
    state = training.TrainState.create(apply_fn=None, params=params, tx=tx)
    return state.replace(step=jnp.int32(0)), nf_jax.plan(PROFILE, params, W)


def live(folder: Path) -> None:
    """One life: from the latest whole checkpoint to the end, or as far as it gets."""
    state, plan = make_state()
    step = training.pmap_step(loss_fn, devices=jax.devices()[:W])
    fresh = training.replicate(state, jax.devices()[:W])
    with resume.Run(folder, fresh, PROFILE, plan, every_steps=EVERY_STEPS, seed=SEED) as run:
        state = run.state
        for order, batch in itertools.islice(batches(), run.step, NUM_STEPS):
            load = 1.0 if run.step in LOADED_STEPS else 0.0
            state, metrics = step(state, batch, load)
            run.record(state, order=order, metric=float(metrics["loss"][0]))
        run.save(state)


# ------------------------------------------------------------------------------------------ killing


@dataclasses.dataclass
class Kills:
    """What happened: how many lives ended while a checkpoint was being written, and at which steps."""

    while_saving: int = 0
    at_steps: list[int] = dataclasses.field(default_factory=list)


def start(folder: Path, cache: Path) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parent.parent)
    settings = {
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "JAX_COMPILATION_CACHE_DIR": str(cache),  # a new life need not compile anew
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return subprocess.Popen([sys.executable, __file__, str(folder)], env=os.environ | settings)


def run_killed(folder: Path, cache: Path, num_kills: int, seed: int) -> Kills:
    """A run that is killed `num_kills` times, every other time in the middle of a checkpoint."""
    rng, kills = random.Random(seed), Kills()
    checkpoints = folder / "checkpoints"
    for number in range(num_kills):
        first = checkpoint.latest_step(checkpoints) or 0
        # All lives together reach the end only after the last one.
        target = first + rng.randint(0, max((NUM_STEPS - first) // (num_kills - number + 1) - EVERY_STEPS, 0))
        process = start(folder, cache)
        wait_for(process, lambda target=target: (checkpoint.latest_step(checkpoints) or 0) >= target)
        if number % 2:
            stop_while_saving(process, checkpoints, rng.random() * 0.1)
        else:
            time.sleep(rng.random() * 0.3)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
        kills.while_saving += any(checkpoints.glob("*.partial*"))
        kills.at_steps.append(last_line(folder))
    assert start(folder, cache).wait() == 0
    return kills


def stop_while_saving(process: subprocess.Popen[bytes], checkpoints: Path, delay: float) -> None:
    """Stops the process `delay` seconds into a save; where the save was over by then, sooner in the next."""
    while True:
        wait_for(process, lambda: any(checkpoints.glob("*.partial*")), seconds=0)
        time.sleep(delay)
        os.kill(process.pid, signal.SIGSTOP)
        _, status = os.waitpid(process.pid, os.WUNTRACED)  # only then do all its threads stand still
        assert os.WIFSTOPPED(status), "the run ended before it was killed"
        if any(checkpoints.glob("*.partial*")):
            return
        os.kill(process.pid, signal.SIGCONT)
        delay /= 2


def wait_for(process: subprocess.Popen[bytes], condition: Any, seconds: float = 0.001) -> None:
    while not condition():
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(seconds)


def last_line(folder: Path) -> int:
    """The last step in a trace, -1 where there is none."""
    try:
        return max((step["step"] for step in trace.read_trace(folder / "trace.jsonl").steps), default=-1)
    except ValueError:
        return -1


def differences(one: Path, other: Path) -> list[str]:
    """The leaves of the last checkpoints and the parts of the traces that differ, to the bit."""
    shapes, _ = make_state()
    trees = [checkpoint.read(folder / "checkpoints", shapes) for folder in (one, other)]
    flat = [jax.tree_util.tree_leaves_with_path(tree) for tree in trees]
    wrong = [
        jax.tree_util.keystr(path)
        for (path, a), (_, b) in zip(*flat, strict=True)
        if np.asarray(a).tobytes() != np.asarray(b).tobytes()
    ]
    traces = [(folder / "trace.jsonl").read_bytes() for folder in (one, other)]
    if traces[0] != traces[1]:
        wrong.append("trace.jsonl")
    steps = [step["step"] for step in trace.read_trace(other / "trace.jsonl").steps]
    if steps != list(range(NUM_STEPS)):
        wrong.append("steps of the trace")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert start(folder / "whole", folder / "cache").wait() == 0
        kills = run_killed(folder / "killed", folder / "cache", options.kills, options.seed)
        wrong = differences(folder / "whole", folder / "killed")
    print(json.dumps({"kills": options.kills, **dataclasses.asdict(kills), "differ": wrong}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", W)
        live(Path(sys.argv[1]))
    else:
        main()
