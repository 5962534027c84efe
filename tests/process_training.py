"""A training with a lane for every route, the same in one process and in several; also run as a script.

python process_training.py OUT pmap     # one process of several
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import substrates

import nf_jax
from experiments import config, mapping
from nf_jax import checkpoint, cluster, processes, training
from nf_jax.profile import CapacityLimits, Codec, HealthLimits, Phase, Profile, Region, Route
from nf_jax.state import find_states

ROUTES = {
    "exact": (Route.FP32, Codec()),
    "half": (Route.BF16, Codec()),
    "majority": (Route.SIGN, Codec(down="majority")),
    "gated": (Route.TERNARY, Codec(down="count", scale="leaf")),
}
SHAPE = (96, 128)  # divides among 1, 2 and 3 workers without pads
NUM_STEPS, NUM_BEFORE_SAVE = 4, 2


def profile_of(name: str = "every_route") -> Profile:
    return Profile(
        name=name,
        fallback=False,
        regions=tuple(Region(name=key, pattern=key, codec=codec) for key, (_, codec) in ROUTES.items()),
        phases=(Phase(start_step=0, routes={key: route for key, (route, _) in ROUTES.items()}),),
        health=HealthLimits(enabled=False),
        capacity=CapacityLimits(min_lane_bytes=0),
    )


def make_init(num_workers: int) -> Any:
    """A jitted function that makes a fresh state."""
    aggregate = nf_jax.aggregate_gradients(profile_of(), axis=config.AXIS, num_workers=num_workers)
    tx = optax.chain(aggregate, optax.sgd(1.0))

    @jax.jit
    def init() -> training.TrainState:
        params = {name: jnp.zeros(SHAPE) for name in ROUTES}
        state = training.TrainState.create(apply_fn=None, params=params, tx=tx)
        return state.replace(step=jnp.int32(0))

    return init


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Its gradient is the batch's only example, to the bit."""
    return sum((jnp.vdot(params[name], batch[name][0]) for name in ROUTES), start=jnp.float32(0))


def train(num_workers: int, mode: str, folder: Path | None = None) -> dict[str, np.ndarray]:
    """Trains; returns parameters, losses and residuals after every step, `[own workers, ...]`.

    Args:
      num_workers: the first of all devices.
      mode: pmap or shard_map.
      folder: save there in the middle, and afterwards go on from that once more, as run "restored".
    """
    devices, init = jax.devices()[:num_workers], make_init(num_workers)
    mapped = mapping.MAPPINGS[mode](devices, loss_fn, jax.eval_shape(init))
    rng = np.random.default_rng(0)
    gradients = {
        name: rng.normal(size=(NUM_STEPS, num_workers, 1, *SHAPE)).astype(np.float32) for name in ROUTES
    }
    kept = {}

    def go_on(run: str, state: Any, indices: Sequence[int]) -> Any:
        for index in indices:
            batch = {name: values[index][mapping.own_rows(devices)] for name, values in gradients.items()}
            state, metrics = mapped.step(state, batch)
            ((_, aggregate),) = find_states(state.opt_state)
            leaves = {"params": state.params, "loss": metrics["loss"], "memory": aggregate.memory}
            for path, leaf in jax.tree_util.tree_leaves_with_path(leaves):
                kept[f"{run}{index}{jax.tree_util.keystr(path)}"] = rows_of(leaf)
        return state

    state = go_on("", mapped.place(jax.device_get(init())), range(NUM_BEFORE_SAVE))
    if folder is not None:
        checkpoint.save(folder, state)
    go_on("", state, range(NUM_BEFORE_SAVE, NUM_STEPS))
    if folder is not None:
        state = checkpoint.restore(folder, mapped.place(jax.device_get(init())))
        go_on("restored ", state, range(NUM_BEFORE_SAVE, NUM_STEPS))
    return kept


def rows_of(leaf: jax.Array) -> np.ndarray:
    """What each worker of this process holds, `[own workers, ...]`."""
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
    return np.stack([np.ravel(np.asarray(shard.data)) for shard in shards])


def disagree(process_id: int, num_workers: int) -> str:
    """What `check_agreement` says when process 1 differs in everything."""
    other = process_id == 1
    profile = profile_of("another" if other else "every_route")
    plan = nf_jax.plan(
        profile, {name: jax.ShapeDtypeStruct(SHAPE, "float32") for name in ROUTES}, num_workers
    )
    processes.check_agreement(profile_of(), plan, learning_rate="0.1")  # the same: fine
    version = "3.9.9" if other else platform.python_version()
    measured = substrates.substrate(link="x" * 500 + version)
    try:
        with mock.patch.object(platform, "python_version", lambda: version):
            processes.check_agreement(profile, plan, substrate=measured, rate=f"{process_id}")
    except ValueError as error:
        return str(error)
    return ""


def main(out: str, mode: str) -> None:
    options = cluster.Cluster(distributed=True, start_timeout_seconds=60)
    num_workers = cluster.resolve(options, os.environ).num_processes or 0
    with cluster.joined(options, num_workers):
        own = jax.process_index()
        folders = {name: processes.is_shared(Path(out) / name) for name in ("", f"of {own}")}
        (Path(out) / f"{own}.json").write_text(
            json.dumps({"refused": disagree(own, num_workers), "shared": list(folders.values())})
        )
        kept = train(num_workers, mode, Path(out) / "checkpoints")
        np.savez(Path(out) / f"{own}.npz", allow_pickle=False, **kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
