"""The JAX arms of the link benchmark: `lax.pmean` and every route of nf_jax. Started by `experiments.links`.

Each runs as it would in training: jit of shard_map over the devices of all processes, the state carried from
step to step and donated, error feedback and health on, the loss handed in. Hosts of several devices are two
levels to nf_jax's arms; `lax.pmean` averages over all devices at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import nf_jax
from experiments import links_worker
from nf_jax import Profile, Route, Substrate, cluster
from nf_jax.profile import Codec, HealthLimits, Phase, Region
from nf_jax.substrate import Bench, probe

AXES = ("hosts", "devices")

# ========================================================================================== profiles


def guided(route: Route, **codec: Any) -> Profile:
    """One route for everything from the first step on, with health and the size floor at their defaults."""
    return Profile(
        name=f"links_{route.name.lower()}",
        regions=(Region(name="all", pattern=".*", codec=Codec(**codec)),),
        phases=(Phase(start_step=0, routes={"all": route}),),
        health=HealthLimits(warmup_steps=0),
    )


PROFILES: dict[str, Profile] = {
    "fp32": guided(Route.FP32),
    "sign-count": guided(Route.SIGN, down="count"),
    "sign-majority": guided(Route.SIGN, down="majority"),
    "ternary": guided(Route.TERNARY, down="ternary"),
    "bf16": guided(Route.BF16),
    "auto": guided(Route.SIGN),  # what the controller admits of the default route, given a substrate
}

# ============================================================================================== arms


class Values(NamedTuple):
    """Attributes: first: path of the first array; tree: [workers, *shape], split; loss: [workers], split."""

    first: str
    tree: dict[str, jax.Array]
    loss: jax.Array


class JaxArm:
    """A compiled step and the state that it carries."""

    def __init__(self, step: Any, values: Values, state: Any) -> None:
        self._step, self._values, self._state = step, values, state
        self._means: dict[str, jax.Array] = {}

    def get_ready(self) -> None:
        self._means = {}

    def step(self) -> None:
        self._state, self._means = self._step(self._values.tree, self._values.loss, self._state)
        jax.block_until_ready((self._state, self._means))

    def first_mean(self) -> np.ndarray:
        return np.asarray(self._means[self._values.first].addressable_data(0))

    def describe(self) -> str:
        if not self._state:
            return "pmean"
        routes = nf_jax.step_info(self._state).routes.tolist()
        return ", ".join(f"{Route(route).name} x {routes.count(route)}" for route in sorted(set(routes)))

    def release(self) -> None:
        self._means = {}


class JaxBackend:
    """The devices of every process are a row of the mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._bench: Bench | None = None

    def place(self, array: np.ndarray) -> jax.Array:
        """This host's part of an array `[workers, ...]`; its devices hold the same."""
        split, devices = NamedSharding(self.mesh, P(AXES)), self.mesh.shape["devices"]
        return jax.make_array_from_process_local_data(split, np.stack([array] * devices))

    def load(self, values: dict[str, np.ndarray]) -> Values:
        tree = {path: self.place(array) for path, array in values.items()}
        return Values(next(iter(values)), tree, self.place(np.ones((), np.float32)))

    def probe(self, link: str, sizes_bytes: Sequence[int]) -> str:
        self._bench = self._bench or Bench()
        measured_by = "experiments.links"
        found = probe(link=link, measured_by=measured_by, sizes_bytes=sizes_bytes, bench=self._bench)
        return found.dumps()

    def make_arm(self, name: str, values: Values, substrate: str | None = None) -> JaxArm:
        """`-pinned`: with the routes compiled in that the controller starts with, no switch."""
        if name == "pmean":
            return JaxArm(self.map(lambda tree, *_: ((), lax.pmean(_local(tree), AXES)), P()), values, ())
        profile, shape = (
            PROFILES[name.removesuffix("-pinned")],
            (self.mesh.shape["hosts"], self.mesh.shape["devices"]),
        )
        level: dict[str, Any] = dict(axis=AXES, num_workers=shape)
        if substrate is not None:
            level["substrate"] = Substrate.loads(substrate, "the substrate")
        params: Any = {path: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for path, a in values.tree.items()}
        tx = nf_jax.aggregate_gradients(profile, **level)
        if name.endswith("-pinned"):
            routes = nf_jax.step_info(tx.init(params)).next_routes.tolist()
            tx = nf_jax.aggregate_gradients(profile, **level, routes=routes)

        def update(tree: Any, loss: jax.Array, state: Any) -> Any:
            means, state = tx.update(_local(tree), state, value=loss[0])
            return state, means

        state = nf_jax.shard_state(tx.init(params), self.mesh, AXES)
        return JaxArm(self.map(update, nf_jax.state_spec(state, AXES)), values, state)

    def map(self, body: Any, state_spec: Any) -> Any:
        """`body`: (values, loss, state) -> (state, means).

        In this order, because XLA writes into a donated array the first result that has its size: were that
        the means, the residuals would be copied at every step.
        """
        specs = {"in_specs": (P(AXES), P(AXES), state_spec), "out_specs": (state_spec, P())}
        return jax.jit(jax.shard_map(body, mesh=self.mesh, **specs), donate_argnums=2)

    def make_barrier(self) -> Callable[[], None]:
        token = self.place(np.zeros((), np.int32))
        body = lambda x: lax.psum(x[0], AXES)  # noqa: E731
        count = jax.jit(jax.shard_map(body, mesh=self.mesh, in_specs=P(AXES), out_specs=P()))
        return lambda: jax.block_until_ready(count(token)) and None


def _local(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], tree)


# ============================================================================================== main


def main() -> None:
    answers = links_worker.claim_stdout()
    host, hosts = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
    shape = (hosts, int(os.environ["NF_JAX_DEVICES_PER_HOST"]))
    with cluster.joined(cluster.Cluster(distributed=True), shape[0] * shape[1]):
        backend = JaxBackend(jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 2))
        links_worker.serve(backend, backend.make_barrier(), host, hosts, answers)


if __name__ == "__main__":
    main()
