"""Runs a gradient transform step by step on several workers, in each way that JAX has for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from workers import AXIS, mesh_of

import nf_jax
from nf_jax.state import find_states


class Run:
    """A transform and its state on `W` workers; `step` moves it on and returns `[W, ...]` updates."""

    def __init__(
        self,
        tx: Any,
        params: Any,
        num_workers: int,
        mode: str,
        on_trace: Callable[[], Any] = lambda: None,
    ):
        self.mode, self.num_workers = mode, num_workers
        state = tx.init(params)

        def update(gradients: Any, state: Any, extra: dict[str, Any]) -> Any:
            on_trace()
            return tx.update(gradients, state, params, **extra)

        def one_worker(gradients: Any, state: Any, extra: Any) -> Any:
            gradients, extra = jax.tree.map(lambda leaf: leaf[0], (gradients, extra))
            updates, state = update(gradients, state, extra)
            return jax.tree.map(lambda leaf: leaf[None], updates), state

        if mode == "pmap":
            devices = jax.devices()[:num_workers]
            self.function = jax.pmap(update, axis_name=AXIS, devices=devices)
            self.state = jax.tree.map(
                lambda leaf: np.broadcast_to(np.asarray(leaf), (num_workers, *np.shape(leaf))), state
            )
            return
        mesh, spec = mesh_of(num_workers), nf_jax.state_spec(state, AXIS)
        self.function = jax.jit(
            jax.shard_map(
                one_worker,
                mesh=mesh,
                in_specs=(P(AXIS), spec, P(AXIS)),
                out_specs=(P(AXIS), spec),
                check_vma=mode == "checked",
            )
        )
        self.state = nf_jax.shard_state(state, mesh)

    def step(self, gradients: Any, **extra: Any) -> Any:
        """One step; every leaf of the gradients and of the extra arguments is `[W, ...]`."""
        extra = {
            name: np.broadcast_to(np.asarray(value, np.float32), (self.num_workers,))
            for name, value in extra.items()
        }
        updates, self.state = self.function(gradients, self.state, extra)
        return jax.tree.map(np.asarray, updates)

    @property
    def info(self) -> nf_jax.StepInfo:
        return jax.tree.map(np.asarray, nf_jax.step_info(self.state))

    @property
    def memory(self) -> Any:
        """Residuals as `[W, 1, ...]` under pmap and `[W, ...]` under shard_map: here the latter."""
        ((_, state),) = find_states(self.state)
        memory = jax.tree.map(np.asarray, state.memory)
        return jax.tree.map(lambda x: x[:, 0], memory) if self.mode == "pmap" else memory
