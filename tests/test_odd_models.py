"""Odd models: nothing at all, a number, a thousand crumbs, a giant; tied, frozen, unused and sparse parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from training_runs import Run
from workers import AXIS, collectives_of, mapped, mesh_of, rows_are_equal

import nf_jax
from nf_jax import Profile, Route, training
from nf_jax.plan import MAX_PAD_RATIO
from nf_jax.profile import CapacityLimits, HealthLimits
from nf_jax.telemetry import Reason

FP32, BF16, SIGN, TERNARY = Route
W = 2
DEVICES = jax.devices()[:W]
GUIDED = Profile.static(SIGN, scale="rank1").model_copy(
    update=dict(
        fallback=True,
        health=HealthLimits(warmup_steps=1, cooldown_steps=1, probation_steps=0),
        capacity=CapacityLimits(min_lane_bytes=0),
    )
)


def aggregate(profile: Profile = GUIDED, num_workers: int = W) -> Any:
    return nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=num_workers)


def normal(params: Any, seed: int = 0, num_workers: int = W) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.normal(size=(num_workers, *np.shape(p))).astype(p.dtype), params)


def close(found: Any, given: Any, atol: float = 1e-6) -> None:
    """Every worker holds the plain mean."""
    assert rows_are_equal(found)
    jax.tree.map(lambda x, g: np.testing.assert_allclose(x[0], g.mean(0), atol=atol), found, given)


# ------------------------------------------------------------------------------------ few and small


@pytest.mark.parametrize(
    ("params", "mode"),
    [({}, "pmap"), ({"a": None, "b": ()}, "checked"), ({"empty": np.zeros((0, 4), np.float32)}, "pmap")],
    ids=["no leaf", "no array", "size 0"],
)
def test_a_model_of_nothing_sends_signals_only(params: Any, mode: str):
    run = Run(aggregate(), params, W, mode)
    for step in range(3):
        means = run.step(normal(params), value=[1.0, 3.0])
        assert jax.tree.structure(means) == jax.tree.structure(params)
        jax.tree.map(lambda x, p: np.testing.assert_array_equal(x.shape, (W, *p.shape)), means, params)
        info = run.info
        assert int(info.step) == step and info.fp32_bytes == 0 and info.wire_fraction == 1.0
        assert info.routes.shape == (0,) and float(info.signals.loss) == 2
    assert nf_jax.plan(GUIDED, params, W).protected_share == 0


@pytest.mark.parametrize("params", [np.float32(1), np.ones(3, np.float32)], ids=["scalar", "array"])
def test_a_model_of_one_array_has_the_empty_path(params: Any):
    run = Run(aggregate(), params, W, "checked")
    given = normal(params)
    close(run.step(given, value=0), given)
    assert nf_jax.plan(GUIDED, params, W).paths == ("",)


SIZES = (1, 7, 31, 32, 33, 512, 1023, 1025, 2**20 + 1)


def _pads(size: int) -> int:
    return -(-size // (512 * W)) * 512 * W - size


def test_leaves_of_any_size_are_averaged_and_repaid():
    """Sizes around words and blocks, and a prime-like large one: the time average is the true mean."""
    params = {f"{size:07}": np.zeros(size, np.float32) for size in SIZES}
    run = Run(aggregate(), params, W, "unchecked")
    given, total = normal(params), {}
    num_steps = 12
    for step in range(num_steps + 1):
        means = run.step(given, value=0)
        assert rows_are_equal(means)
        if step:  # after warm-up
            total = {path: total.get(path, 0) + mean[0] for path, mean in means.items()}
    plan = nf_jax.plan(GUIDED, params, W)
    packed = {plan.paths[i] for group in plan.groups for i in group.leaves}
    assert packed == {f"{size:07}" for size in SIZES if _pads(size) <= MAX_PAD_RATIO * size}
    assert {f"{1023:07}", f"{2**20 + 1:07}"} <= packed
    for path, leaf in given.items():
        true = leaf.mean(0)
        error = np.linalg.norm(total[path] / num_steps - true) / np.linalg.norm(true)
        assert error < (0.35 if path in packed else 1e-5), (path, error)


# ------------------------------------------------------------------------------------ many and large


def test_a_thousand_tiny_leaves_compile_to_few_collectives():
    params = {f"layer_{i}": {"scale": np.zeros(3 + i % 2, np.float32)} for i in range(1000)}
    tx = aggregate()
    step = jax.pmap(tx.update, axis_name=AXIS, devices=jax.devices()[:W])
    state = jax.tree.map(lambda x: np.stack([x] * W), tx.init(params))
    given = normal(params)
    compiled = step.lower(given, state).compile()
    found = collectives_of(compiled.as_text())
    assert set(found) == {"all-reduce"} and len(found) < 10
    means, state = compiled(given, state)
    close(jax.tree.map(np.asarray, means), given)


@pytest.mark.parametrize(
    ("shape", "packed"),
    [((2**16, 2**16 + 2), True), ((2**30 + 1, 3), True), ((2**31 - 8,), True), ((2**31,), False)],
    ids=str,
)
@pytest.mark.parametrize("down", ["majority", "2bit"])
def test_a_leaf_of_more_than_2_to_the_31_elements_is_planned_and_traced(
    shape: tuple[int, ...], packed: bool, down: str
):
    """Elements may be beyond int32; rows may not, and such a leaf stays exact."""
    num_workers, size = 8, int(np.prod(shape))
    params = {
        "giant": jax.ShapeDtypeStruct(shape, "bfloat16"),
        "small": jax.ShapeDtypeStruct((8,), "float32"),
    }
    profile = GUIDED.model_copy(update=dict(regions=Profile.static(SIGN, down=down).regions))
    plan, tx = nf_jax.plan(profile, params, num_workers), aggregate(profile, num_workers)
    assert plan.fp32_bytes == 2 * 7 * 4 * (size + 8) // 8
    routes = [SIGN if fixed is None else FP32 for fixed in plan.lanes.fixed]
    assert (plan.wire_bytes(routes) < 0.06 * plan.fp32_bytes) == packed
    assert (Reason.UNSUITABLE in plan.lanes.fixed) == (not packed) or packed

    def both(local: Any, _: Any) -> Any:
        return tx.update(local, tx.init(params), value=jnp.float32(0))

    local = jax.tree.map(lambda s: jax.ShapeDtypeStruct((num_workers, *s.shape), s.dtype), params)
    means, state = jax.eval_shape(mapped(both, num_workers, "checked"), local, None)
    assert means["giant"].shape == (num_workers, *shape)
    kept = sum(leaf.size for leaf in jax.tree.leaves(state.memory.residual))
    assert kept == (num_workers * size if packed else 0)


# ------------------------------------------------------------- tied, frozen, unused, sparse


def test_a_tied_parameter_is_one_leaf_with_the_sum_of_its_gradients():
    params = {"tied": np.full((64, 32), 0.5, np.float32)}
    x = np.random.default_rng(0).normal(size=(W, 4, 64)).astype(np.float32)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["tied"]) @ params["tied"].T - x) ** 2)

    tx = aggregate(Profile.static(FP32))
    step = jax.pmap(lambda x: tx.update(jax.grad(loss)(params, x), tx.init(params))[0], AXIS, devices=DEVICES)
    expected = np.mean([jax.grad(loss)(params, part)["tied"] for part in x], 0)
    np.testing.assert_allclose(step(x)["tied"][1], expected, rtol=1e-5, atol=1e-6)


ROWS = 256


def embedding_gradients(seed: int) -> dict[str, np.ndarray]:
    """Rows of an embedding that this batch holds, others on each worker; a frozen and an unused leaf."""
    rng = np.random.default_rng(seed)
    given = normal(EMBEDDING, seed)
    held = rng.random((W, ROWS)) < 0.2
    held[:, ROWS // 2 :] = False  # the vocabulary's second half never occurs
    given["embedding"] *= held[..., None]
    given["frozen"][:] = 0
    given["one_sided"][1] = 0  # unused on worker 1 at every step
    return given


EMBEDDING = {
    "body": np.zeros((64, 32), np.float32),
    "embedding": np.zeros((ROWS, 32), np.float32),
    "frozen": np.zeros((64, 32), np.float32),
    "one_sided": np.zeros((64, 32), np.float32),
}


@pytest.mark.parametrize("feedback", [True, False], ids=["feedback", "no feedback"])
def test_what_is_frozen_or_never_occurs_stays_zero_and_what_is_unused_on_one_worker_does_not(feedback: bool):
    codec = dict(error_feedback=feedback, server_error_feedback=feedback, scale="rank1")
    run = Run(aggregate(Profile.static(SIGN, **codec)), EMBEDDING, W, "unchecked")
    total, true = (jax.tree.map(lambda p: np.zeros(p.shape), EMBEDDING) for _ in range(2))
    for step in range(24):
        given = embedding_gradients(step)
        means = run.step(given, value=0)
        assert rows_are_equal(means)
        assert not means["frozen"].any() and not means["embedding"][:, ROWS // 2 :].any()
        for path in total:
            total[path] += means[path][0]
            true[path] += given[path].mean(0)
    assert (run.info.routes == SIGN).all()
    for path in ("body", "one_sided", "embedding"):
        error = np.linalg.norm(total[path] - true[path]) / np.linalg.norm(true[path])
        assert error < 1.3 if feedback else error > 0.2, (path, error)
        assert np.isfinite(total[path]).all() and total[path].any()


# ---------------------------------------------------------------------------------- trees of all kinds


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Block:
    kernel: Any
    rest: Any


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(32, 64, rngs=rngs)
        self.second = nnx.Linear(64, 32, rngs=rngs)


def test_nested_dataclasses_and_nnx_states_keep_their_structure_and_readable_paths():
    nested = Block(np.zeros((64, 32), np.float32), [Block(np.zeros(3, np.float32), None)])
    params = {"nested": nested, "net": nnx.state(Net(nnx.Rngs(0)), nnx.Param)}
    run, given = Run(aggregate(), params, W, "checked"), normal(params)
    means = run.step(given, value=0)
    assert jax.tree.structure(means) == jax.tree.structure(params)
    close(means, given)
    run.step(given, value=0)
    assert SIGN in run.info.routes
    paths = [path.removesuffix("/value") for path in nf_jax.plan(GUIDED, params, W).paths]
    inside = ("first/bias", "first/kernel", "second/bias", "second/kernel")
    assert paths == ["nested/kernel", "nested/rest/0/kernel", *(f"net/{path}" for path in inside)]


# ------------------------------------------------------------------------------- training steps


def regression(params: Any, batch: Any) -> Any:
    weight = batch.get("weight", jnp.ones(batch["y"].shape, jnp.float32))
    return jnp.mean(weight * (jnp.tanh(batch["x"] @ params["kernel"]).sum(-1) - batch["y"]) ** 2)


def trainer(tx: Any, **options: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(32, 64)).astype(np.float32) / 6}
    state = training.TrainState.create(apply_fn=None, params=params, tx=tx)
    mesh = mesh_of(W)
    return training.place(state, mesh), training.shard_map_step(
        regression, mesh, state, donate=False, **options
    )


def batch_of(seed: int, size: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 32)).astype(np.float32)
    return {"x": x, "y": x[:, 0]}


def test_a_nan_in_one_micro_batch_costs_that_step_and_no_other():
    tx = optax.chain(aggregate(), optax.apply_if_finite(optax.sgd(0.01), max_consecutive_errors=3))
    state, step = trainer(tx, accumulate_steps=4)
    state, _ = step(state, batch_of(0))
    bad = batch_of(1)
    bad["x"][9, 3] = np.nan  # in the first micro-batch of worker 1
    after, _ = step(state, bad)
    np.testing.assert_array_equal(after.params["kernel"], state.params["kernel"])
    info = nf_jax.step_info(after)
    assert info.routes.tolist() == [SIGN] and info.signals.nonfinite.tolist() == [1]
    later, metrics = step(after, batch_of(2))
    assert np.isfinite(later.params["kernel"]).all() and np.isfinite(metrics["loss"])
    assert (np.asarray(later.params["kernel"]) != np.asarray(state.params["kernel"])).mean() > 0.9


def test_workers_count_alike_so_unequal_batches_are_padded_and_weighted():
    """5 examples of worker 0 and 3 of worker 1 (the rest are pads), as one batch of 8 would count them."""
    tx = optax.chain(aggregate(Profile.static(FP32)), optax.sgd(0.1))
    state, step = trainer(tx)
    batch, counts = batch_of(3), (5, 3)
    real = np.concatenate([np.arange(8) < count for count in counts])
    batch["weight"] = (real * (W * 8 / sum(counts))).astype(np.float32)
    batch["x"][~real] = 1e3  # whatever stands in a pad
    found, _ = step(state, batch)
    whole = {name: batch[name][real] for name in ("x", "y")}
    gradient = jax.grad(regression)(jax.device_get(state.params), whole)
    expected = np.asarray(state.params["kernel"]) - 0.1 * np.asarray(gradient["kernel"])
    np.testing.assert_allclose(found.params["kernel"], expected, rtol=1e-5, atol=1e-6)
