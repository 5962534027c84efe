"""Two levels: devices of a host average exactly, then hosts by the route: fewer bytes between hosts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from workers import rows_are_equal, sent_bytes

import nf_jax
from nf_jax import Profile, Route
from nf_jax.profile import HealthLimits
from nf_jax.state import find_states

NAMES = ("hosts", "devices")
FP32, BF16, SIGN, _ = Route
PROFILES = {
    "fp32": Profile.static(FP32),
    "guided, fp32": Profile.static(SIGN).model_copy(update={"fallback": True}),
    "guided, bf16": Profile.static(BF16).model_copy(update={"fallback": True}),
    "guided, warming up": Profile.static(SIGN).model_copy(
        update={"fallback": True, "health": HealthLimits(warmup_steps=100)}
    ),
    "sign": Profile.static(SIGN),
}
SHAPES = {"conv": (3, 3, 32, 64), "kernel": (256, 128), "odd": (7,), "twin": (256, 128), "vector": (4096,)}


def gradients(num_workers: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=(num_workers, *s)).astype(np.float32) for path, s in SHAPES.items()}


@functools.cache
def program(name: str, shape: tuple[int, int], mode: str) -> tuple[Any, Any, Any]:
    """`(compiled step, fresh state, tx)`; a step maps stacked gradients and a state to means and a state."""
    num_workers = shape[0] * shape[1]
    axis = "batch" if mode == "pmap" else NAMES
    tx = nf_jax.aggregate_gradients(PROFILES[name], axis=axis, num_workers=shape)
    fresh = tx.init(jax.tree.map(lambda x: x[0], gradients(num_workers)))
    devices = jax.devices()[:num_workers]
    if mode == "pmap":
        state = jax.tree.map(lambda x: jnp.stack([x] * num_workers), fresh)
        step = jax.pmap(lambda g, s: tx.update(g, s, value=0.0), axis_name="batch", devices=devices)
    else:
        mesh = jax.make_mesh(shape, NAMES, devices=devices, axis_types=(AxisType.Auto,) * 2)
        state, spec = nf_jax.shard_state(fresh, mesh, NAMES), nf_jax.state_spec(fresh, NAMES)

        def local(stacked: Any, state: Any) -> Any:
            updates, state = tx.update(jax.tree.map(lambda x: x[0], stacked), state, value=0.0)
            return jax.tree.map(lambda x: x[None], updates), state

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(NAMES), spec), out_specs=(P(NAMES), spec))
        step = jax.jit(mapped)
    compiled = step.lower(gradients(num_workers), state).compile()
    return compiled, state, tx


def run(name: str, shape: tuple[int, int], mode: str, num_steps: int = 3, bad: Any = None) -> Any:
    """Means of the last step, `[W, ...]`, and the state; `bad`: where the last kernel has a NaN then."""
    step, state, _ = program(name, shape, mode)
    means = None
    for seed in range(num_steps):
        local = gradients(shape[0] * shape[1], seed)
        if bad is not None and seed == num_steps - 1:
            local["kernel"][-1][bad] = np.nan
        means, state = step(local, state)
    return jax.tree.map(np.asarray, means), state


@pytest.mark.parametrize("name", ["guided, fp32", "guided, bf16", "sign"])
def test_a_mesh_and_a_grouped_axis_give_the_same_bits_on_all_workers(name: str):
    first, _ = run(name, (2, 2), "pmap")
    second, _ = run(name, (2, 2), "shard_map")
    assert rows_are_equal(first)
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(("name", "shape"), [("fp32", (2, 2)), ("sign", (2, 4)), ("sign", (4, 2))])
def test_hosts_average_the_means_of_their_devices(name: str, shape: tuple[int, int]):
    """The oracle is one level over hosts, on the pieces of the hosts' means as leaves of their own."""
    hosts, devices = shape
    found, _ = run(name, shape, "shard_map")
    pieces = []
    for seed in range(3):
        tree = {}
        for path, leaf in gradients(hosts * devices, seed).items():
            mean = leaf.reshape(hosts, devices, *leaf.shape[1:]).mean(1)
            parts = [mean] if path == "odd" else np.split(mean.reshape(hosts, -1, *MATRIX[path]), devices, 1)
            tree |= {f"{path}_{d}": part for d, part in enumerate(parts)}
        pieces.append(tree)
    tx = nf_jax.aggregate_gradients(PROFILES[name], axis="hosts", num_workers=hosts)
    state = tx.init(jax.tree.map(lambda x: x[0], pieces[0]))
    state = jax.tree.map(lambda x: jnp.stack([x] * hosts), state)
    step = jax.pmap(lambda g, s: tx.update(g, s, value=0.0), axis_name="hosts", devices=jax.devices()[:hosts])
    means: Any = None
    for tree in pieces:
        means, state = step(tree, state)
    for path, leaf in found.items():
        parts = [means[f"{path}_{d}"][0] for d in range(1 if path == "odd" else devices)]
        expected = np.concatenate(parts).reshape(SHAPES[path])
        np.testing.assert_allclose(leaf[0], expected, rtol=2.0**-7, atol=1e-6)


MATRIX = {path: shape[-1:] if len(shape) > 1 else () for path, shape in SHAPES.items()}


def test_residuals_are_a_piece_of_the_leaf():
    _, state, _ = program("sign", (2, 2), "pmap")
    ((_, aggregate),) = find_states(state)
    for path, residual in aggregate.memory.residual.items():
        assert residual.size == 4 * np.prod(SHAPES[path]) // 2
    assert set(aggregate.memory.residual) == set(SHAPES) - {"odd"}


@pytest.mark.parametrize("name", ["guided, bf16", "sign"])
def test_a_value_that_is_not_finite_spoils_its_whole_leaf_and_no_other(name: str):
    means, state = run(name, (2, 2), "shard_map", bad=(3, 5))
    assert np.isnan(means.pop("kernel")).all()
    assert all(np.isfinite(leaf).all() for leaf in means.values())
    ((_, aggregate),) = find_states(state)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(aggregate.memory))
    assert nf_jax.step_info(state).signals.nonfinite.sum() == 1


@pytest.mark.parametrize("bad", [(0, 0), (3, 5)])
def test_in_full_precision_it_spoils_itself_alone(bad: tuple[int, int]):
    means, _ = run("guided, warming up", (2, 2), "shard_map", bad=bad)
    assert np.argwhere(~np.isfinite(means["kernel"][0])).tolist() == [list(bad)]


@pytest.mark.parametrize("name", PROFILES)
def test_claimed_bytes_are_those_between_hosts(name: str):
    compiled, state, _ = program(name, (2, 2), "shard_map")
    _, state = run(name, (2, 2), "shard_map", num_steps=1)
    info = nf_jax.step_info(state)
    if "guided" not in name:  # of several branches only one is taken
        assert sent_bytes(compiled.as_text(), 4, num_inner=2) == pytest.approx(info.wire_bytes, abs=2)
    total = sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert info.fp32_bytes == 2 * 3 * 4 * total // 4 // 2


def test_signs_cost_a_32nd_between_hosts():
    params = {"kernel": jax.ShapeDtypeStruct((2048, 2048), "float32")}
    plan = nf_jax.plan(Profile.static(SIGN, scale="leaf"), params, (2, 2))
    assert plan.wire_bytes([SIGN]) / plan.fp32_bytes < 0.035


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("bad", [(2,), (2, 2, 2), (0, 2), (2, True), "22", None])
def test_num_workers_is_a_number_or_a_pair(bad: Any):
    with pytest.raises(ValueError, match=r"num_workers: expected a positive int, or a pair"):
        nf_jax.plan(PROFILES["sign"], {"kernel": jnp.ones((64, 64))}, bad)


def test_a_pair_goes_with_two_names_or_one():
    with pytest.raises(ValueError, match=r"axis: expected \(outer, inner\) or one name"):
        nf_jax.aggregate_gradients(PROFILES["sign"], axis=("a", "b", "c"), num_workers=(2, 2))


def test_axes_in_the_wrong_order_are_an_error():
    tx = nf_jax.aggregate_gradients(PROFILES["sign"], axis=NAMES, num_workers=(4, 2))
    mesh = jax.make_mesh((2, 4), NAMES, axis_types=(AxisType.Auto,) * 2)
    fresh = tx.init({"kernel": jnp.ones((64, 64))})
    step = jax.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s)[0],
        mesh=mesh,
        in_specs=(P(NAMES), nf_jax.state_spec(fresh, NAMES)),
        out_specs=P(NAMES),
    )
    with pytest.raises(ValueError, match=r"sizes \(4, 2\), as in num_workers, got \(2, 4\)"):
        jax.eval_shape(step, {"kernel": jnp.ones((8, 64, 64))}, nf_jax.shard_state(fresh, mesh, NAMES))


def test_grouping_one_axis_needs_check_vma_off():
    tx = nf_jax.aggregate_gradients(PROFILES["sign"], axis="batch", num_workers=(2, 2))
    mesh = jax.make_mesh((4,), ("batch",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    fresh = tx.init({"kernel": jnp.ones((64, 64))})
    step = jax.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s)[0],
        mesh=mesh,
        in_specs=(P("batch"), nf_jax.state_spec(fresh, "batch")),
        out_specs=P("batch"),
    )
    with pytest.raises(ValueError, match="check_vma=False"):
        jax.eval_shape(step, {"kernel": jnp.ones((4, 64, 64))}, nf_jax.shard_state(fresh, mesh, "batch"))


def test_pmean_takes_one_level_only():
    plan = nf_jax.plan(PROFILES["sign"], {"kernel": jnp.ones((64, 64))}, (2, 2))
    step = jax.pmap(
        lambda g: nf_jax.pmean({"kernel": g}, plan, [SIGN], axis="batch"),
        axis_name="batch",
        devices=jax.devices()[:4],
    )
    with pytest.raises(ValueError, match="expected a plan of one level"):
        step(jnp.ones((4, 64, 64)))
