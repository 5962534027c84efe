"""Laws of the state: one worker's view, laid out over workers, read from anywhere."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from training_runs import Run
from workers import AXIS, MODES, mesh_of

import nf_jax
from nf_jax import Profile, Route
from nf_jax.state import AggregateState, find_states

W = 4
PARAMS = {"bias": np.ones(3, np.float32), "kernel": np.ones((64, 32), np.float32)}
SIGN = Profile.static(Route.SIGN)


def aggregate(num_workers: int = W, profile: Profile = SIGN) -> Any:
    return nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=num_workers)


def gradients(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(W, *v.shape)).astype(np.float32) for k, v in PARAMS.items()}


def test_init_is_one_workers_view():
    state = aggregate().init(PARAMS)
    assert set(state.memory.residual) == {"kernel"}  # a bias of 3 stays exact
    assert state.memory.residual["kernel"].shape == (1, 64, 32)
    assert state.memory.residual["kernel"].dtype == jnp.float32
    (server,) = state.memory.server_residual.values()
    assert server.shape == (1, 64 * 32 // W)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.memory))
    assert int(state.num_workers) == W and int(state.step) == 0


def test_init_inside_is_init_outside():
    tx = aggregate()
    outside = tx.init(PARAMS)
    inside = jax.jit(
        jax.shard_map(
            lambda params: tx.init(params),
            mesh=mesh_of(W),
            in_specs=P(),
            out_specs=nf_jax.state_spec(jax.eval_shape(tx.init, PARAMS), AXIS),
            check_vma=False,
        )
    )(PARAMS)
    chex.assert_trees_all_equal(inside, nf_jax.shard_state(outside, mesh_of(W)))


def test_a_codec_without_feedback_keeps_nothing():
    off = Profile.static(Route.SIGN, error_feedback=False, server_error_feedback=False)
    assert jax.tree.leaves(aggregate(profile=off).init(PARAMS).memory) == []
    assert jax.tree.leaves(aggregate(num_workers=1).init(PARAMS).memory) == []
    half = Profile.static(Route.SIGN, residual_dtype="bfloat16", down="count")
    memory = aggregate(profile=half).init(PARAMS).memory
    assert [leaf.dtype for leaf in jax.tree.leaves(memory)] == [jnp.bfloat16]


def test_specs_split_the_memory_and_nothing_else():
    state = optax.chain(aggregate(), optax.adam(1e-3)).init(PARAMS)
    spec = nf_jax.state_spec(state, AXIS)
    chex.assert_trees_all_equal_structs(spec, jax.tree.map(lambda _: P(), state))
    ((_, found),) = find_states(spec)
    assert set(jax.tree.leaves(found.memory)) == {P(AXIS)}
    split = [s for s in jax.tree.leaves(spec) if s != P()]
    assert len(split) == len(jax.tree.leaves(found.memory)) == 2
    abstract = jax.eval_shape(optax.chain(aggregate(), optax.adam(1e-3)).init, PARAMS)
    assert nf_jax.state_spec(abstract, AXIS) == spec


def test_sharding_gives_every_worker_its_own_memory():
    state: Any = optax.chain(aggregate(), optax.adam(1e-3)).init(PARAMS)
    placed = nf_jax.shard_state(state, mesh_of(W))
    ((_, aggregated),) = find_states(placed)
    residual = aggregated.memory.residual["kernel"]
    assert residual.shape == (W, 64, 32)
    assert [shard.data.shape for shard in residual.addressable_shards] == [(1, 64, 32)] * W
    others = jax.tree.leaves((aggregated._replace(memory=None), placed[1:]))
    assert all(leaf.sharding.is_fully_replicated for leaf in others)
    chex.assert_trees_all_equal(placed[1], state[1])


def test_sharding_over_the_wrong_mesh_is_an_error():
    state = {"opt": aggregate(8).init(PARAMS)}
    with pytest.raises(ValueError, match=r"state at opt was made for num_workers=8.*4 members"):
        nf_jax.shard_state(state, mesh_of(W))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"\('data', 'model'\).*axis=\.\.\."):
        nf_jax.shard_state(aggregate(2).init(PARAMS), mesh)
    placed = nf_jax.shard_state(aggregate(2).init(PARAMS), mesh, axis="data")
    assert placed.memory.residual["kernel"].sharding.spec == P("data")


# --------------------------------------------------------------------------------------- step_info


def test_before_the_first_step_there_is_only_what_comes_next():
    info = nf_jax.step_info(aggregate().init(PARAMS))
    assert int(info.step) == -1 and info.wire_bytes == 0
    plan = nf_jax.plan(SIGN, PARAMS, W)
    assert info.next_routes.tolist() == [Route.SIGN] * plan.num_lanes
    assert info.fp32_bytes == plan.fp32_bytes


@pytest.mark.parametrize("mode", MODES)
def test_step_info_reads_the_state_as_each_way_returns_it(mode: str):
    tx = optax.chain(aggregate(), optax.sgd(0.1))
    run = Run({"o": tx}["o"], PARAMS, W, mode)
    plan = nf_jax.plan(SIGN, PARAMS, W)
    for step in range(2):
        run.step(gradients(step), value=np.arange(W))
        info = nf_jax.step_info({"state": run.state, "step": 3})
        assert int(info.step) == step and info.step.shape == ()
        assert info.routes.tolist() == [Route.SIGN] * plan.num_lanes
        assert info.wire_bytes == plan.wire_bytes(info.routes.tolist())
        assert info.fp32_bytes == plan.fp32_bytes
        assert float(info.signals.loss) == 1.5
        assert info.signals.gradient_norm.shape == (1,)


def test_step_info_wants_exactly_one():
    with pytest.raises(ValueError, match="got none"):
        nf_jax.step_info(optax.adam(1e-3).init(PARAMS))
    two = {"gen": aggregate().init(PARAMS), "dis": (aggregate().init(PARAMS), 0)}
    with pytest.raises(ValueError, match=r"got 2, at dis/0, gen; pass one of them"):
        nf_jax.step_info(two)
    assert int(nf_jax.step_info(two["gen"]).step) == -1


def under_replicated_spec() -> AggregateState:
    """One step with per-worker state under `P()`: runs silently, and loses three residuals."""
    tx = aggregate()

    def step(local: Any, state: Any) -> Any:
        local = jax.tree.map(lambda leaf: leaf[0], local)
        return tx.update(local, state)[1]

    function = jax.shard_map(step, mesh=mesh_of(W), in_specs=(P(AXIS), P()), out_specs=P(), check_vma=False)
    return jax.jit(function)(gradients(), tx.init(PARAMS))


def test_state_that_lost_its_workers_is_refused():
    with pytest.raises(ValueError, match=r"expected 4: .*PartitionSpec\(\).*state_spec"):
        nf_jax.step_info({"opt": under_replicated_spec()})


def test_one_workers_view_of_a_stacked_state_is_refused():
    run = Run(aggregate(), PARAMS, W, "pmap")
    run.step(gradients())
    nf_jax.step_info(run.state)
    with pytest.raises(ValueError, match="unreplicated"):
        nf_jax.step_info(jax.tree.map(lambda leaf: leaf[0], run.state))


def test_a_single_worker_keeps_nothing_that_could_be_lost():
    run = Run(aggregate(1), PARAMS, 1, "unchecked")
    run.step(jax.tree.map(lambda leaf: leaf[:1], gradients()))
    assert int(nf_jax.step_info(run.state).step) == 0
    run = Run(aggregate(1), PARAMS, 1, "pmap")
    run.step(jax.tree.map(lambda leaf: leaf[:1], gradients()))
    assert int(nf_jax.step_info(jax.tree.map(lambda leaf: leaf[0], run.state)).step) == 0
