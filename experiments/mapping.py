"""How a step is spread over the workers: by pmap, or by shard_map over a mesh of one or two levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.config import AXIS, LEVELS
from nf_jax import training


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
