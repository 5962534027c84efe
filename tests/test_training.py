"""Training steps and checkpoints: one body under every mapping, and nothing lost on disk."""

from __future__ import annotations

import collections
import functools
import shutil
from pathlib import Path
from typing import Any

import chex
import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core as jax_core
from jax.sharding import AxisType, Mesh, PartitionSpec

import nf_jax
from nf_jax import checkpoint, training
from nf_jax.profile import Profile, Route
from nf_jax.state import find_states

W = 4
NUM_IN, NUM_HIDDEN, SHARE = 32, 64, 4  # only the first kernel is large enough for signs
COLLECTIVES = ("psum", "all_gather", "all_to_all", "reduce_scatter", "ppermute", "pmax", "pmin")
DEVICES = jax.devices()[:W]
MESH = Mesh(np.asarray(DEVICES), ("batch",), axis_types=(AxisType.Auto,))
MODES = ("pmap", "checked", "unchecked")  # the last two: shard_map with and without check_vma


class KeyedState(training.TrainState):
    rng: Any = None


def params_of(seed: int = 0) -> dict[str, Any]:
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "dense": {
            "kernel": jax.random.normal(first, (NUM_IN, NUM_HIDDEN)) / 6,
            "bias": jnp.zeros(NUM_HIDDEN),
        },
        "head": {"kernel": jax.random.normal(second, (NUM_HIDDEN, 1)) / 8},
    }


def aggregate(route: Route = Route.SIGN, num_workers: int = W) -> Any:
    return nf_jax.aggregate_gradients(Profile.static(route), axis="batch", num_workers=num_workers)


def state_of(tx: Any, **fields: Any) -> Any:
    return KeyedState.create(apply_fn=None, params=params_of(), tx=tx, **fields)


def batch_of(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(W * SHARE, NUM_IN)).astype(np.float32)
    return {"x": x, "y": 2 * x[:, :1]}


def loss_fn(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["dense"]["kernel"] + params["dense"]["bias"])
    error = hidden @ params["head"]["kernel"] - batch["y"]
    return jnp.mean(error**2), {"mean_error": jnp.mean(jnp.abs(error))}


def stepper(mode: str, state: Any, loss: Any = loss_fn, **options: Any) -> tuple[Any, Any]:
    """The state laid out for `mode`, and a step that takes a global batch in every mode."""
    if mode == "pmap":
        step = training.pmap_step(loss, devices=DEVICES, **options)
        split = lambda leaf: leaf.reshape(W, -1, *leaf.shape[1:])  # noqa: E731
        return training.replicate(state, DEVICES), lambda state, batch, load=None: step(
            state, jax.tree.map(split, batch), load
        )
    check_vma = mode == "checked"
    step = training.shard_map_step(loss, MESH, state, check_vma=check_vma, **options)
    return training.place(state, MESH), step


def one_copy(mode: str, tree: Any) -> Any:
    """Host copies; of what pmap stacked, worker 0's, once all rows are seen to be the same."""
    host: Any = jax.device_get(tree)
    if mode != "pmap":
        return host
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)), host)
    return jax.tree.map(lambda x: x[0], host)


def memory_of(state: Any) -> Any:
    """All workers' residuals, `[W, ...]` in either layout."""
    ((_, found),) = find_states(state)
    return jax.tree.map(lambda x: np.asarray(x).reshape(W, -1), jax.device_get(found.memory))


def count_collectives(function: Any, *args: Any) -> collections.Counter[str]:
    """Collectives in the jaxpr; those in a loop's body count once for every round."""
    found: collections.Counter[str] = collections.Counter()

    def visit(jaxpr: Any, times: int) -> None:
        for equation in jaxpr.eqns:
            name = equation.primitive.name.removesuffix("_invariant")
            if name.startswith(COLLECTIVES):
                found[name] += times
            length = equation.params.get("length", 1) if name == "scan" else 1
            if name == "cond":  # `MultiSteps` has one: skip (if told to), else run the update
                visit(equation.params["branches"][0].jaxpr, times)
                continue
            for sub in jax_core.jaxprs_in_params(equation.params):
                visit(sub, times * length)

    visit(jax.make_jaxpr(function)(*args).jaxpr, 1)
    return found


@pytest.fixture
def standard_promotion():
    """optax's own code (bias correction, injected hyperparameters) mixes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def sgd(route: Route = Route.SIGN) -> Any:
    return optax.chain(aggregate(route), optax.sgd(0.1))


def adamw(route: Route = Route.SIGN) -> Any:
    return optax.chain(aggregate(route), optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


@functools.cache
def sgd_in_signs(mode: str) -> tuple[Any, Any]:
    """A fresh state with a PRNG key, and a step compiled once for all tests that only need one."""
    return stepper(mode, state_of(sgd(), rng=jax.random.key(7)), donate=False)


def trained(mode: str, num_steps: int = 2) -> tuple[Any, Any]:
    state, step = sgd_in_signs(mode)
    for seed in range(num_steps):
        state, _ = step(state, batch_of(seed))
    return state, step


# ------------------------------------------------------------------------------------------- steps


def test_the_mean_has_the_same_bits_under_pmap_and_shard_map():
    txs = [aggregate(route) for route in (Route.FP32, Route.SIGN)]
    state = [tx.init(params_of()) for tx in txs]
    rng = np.random.default_rng(3)
    grads = jax.tree.map(lambda x: rng.normal(size=(W, *x.shape)).astype(np.float32), params_of())

    def means(grads, state):
        return [tx.update(grads, s)[0] for tx, s in zip(txs, state, strict=True)]

    pmapped = jax.pmap(means, axis_name="batch", devices=DEVICES)
    expected = one_copy("pmap", pmapped(grads, training.replicate(state, DEVICES)))
    for check_vma in (True, False):
        mapped = jax.shard_map(
            lambda grads, state: means(jax.tree.map(lambda x: x[0], grads), state),
            mesh=MESH,
            in_specs=(PartitionSpec("batch"), nf_jax.state_spec(state, "batch")),
            out_specs=PartitionSpec(),
            check_vma=check_vma,
        )
        found = jax.device_get(jax.jit(mapped)(grads, nf_jax.shard_state(state, MESH)))
        chex.assert_trees_all_equal(found, expected)


def test_whole_steps_agree_under_every_mapping_to_rounding():
    ends = []
    for mode in MODES:
        state, step = trained(mode)
        state, metrics = step(state, batch_of(2))
        assert set(metrics) == {"loss", "mean_error"}
        ends.append((one_copy(mode, (state.params, metrics)), memory_of(state)))
    for end in ends[1:]:
        chex.assert_trees_all_close(ends[0], end, rtol=1e-4, atol=1e-6)


def test_a_step_in_fp32_is_one_of_plain_data_parallel_training():
    state, step = stepper("checked", state_of(sgd(Route.FP32)))
    state, metrics = step(state, batch_of())
    (loss, extra), grads = jax.value_and_grad(loss_fn, has_aux=True)(params_of(), batch_of())
    chex.assert_trees_all_close(metrics, {"loss": loss, **extra}, rtol=1e-5)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, params_of(), grads)
    chex.assert_trees_all_close(one_copy("checked", state.params), expected, rtol=1e-5, atol=1e-7)
    assert int(state.step) == 1


@pytest.mark.parametrize("mode", ["pmap", "checked"])
def test_accumulation_equals_the_full_batch_and_communicates_once(mode):
    ends, counts = [], []
    for accumulate_steps in (1, 4):
        state, step = stepper(mode, state_of(sgd(Route.FP32)), accumulate_steps=accumulate_steps)
        counts.append(count_collectives(step, state, batch_of()))
        state, metrics = step(state, batch_of())
        ends.append(one_copy(mode, (state.params, metrics)))
    chex.assert_trees_all_close(*ends, rtol=1e-5, atol=1e-7)
    assert counts[0] == counts[1] and counts[0].total() > 0


def test_accumulate_steps_communicates_once_and_multi_steps_at_every_micro_batch(
    standard_promotion,
):
    """Why `MultiSteps` is not the way: a batch in 4 parts costs 4 steps' communication."""
    state, step = stepper("unchecked", state_of(sgd()))
    whole = count_collectives(step, state, batch_of())
    state, step = stepper("unchecked", state_of(sgd()), accumulate_steps=4)
    assert count_collectives(step, state, batch_of()) == whole and whole["all_to_all"]
    wrapped = optax.MultiSteps(sgd(), every_k_schedule=4).gradient_transformation()
    state, step = stepper("unchecked", state_of(wrapped))
    part = jax.tree.map(lambda x: x[: W * SHARE // 4], batch_of())
    assert count_collectives(step, state, part) == whole


def normalized_loss(params: Any, batch: Any, model_state: Any) -> Any:
    """A model with a running mean of its inputs, as batch norm keeps it."""
    mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0)
    loss, metrics = loss_fn(params, {**batch, "x": batch["x"] - mean})
    return loss, metrics, {"mean": mean, "count": model_state["count"] + 1}


def stateful(tx: Any) -> Any:
    model_state = {"mean": jnp.zeros(NUM_IN), "count": jnp.int32(0)}
    return training.TrainState.create(apply_fn=None, params=params_of(), tx=tx, model_state=model_state)


@pytest.mark.parametrize(("mode", "accumulate_steps"), [("pmap", 1), ("checked", 1), ("unchecked", 2)])
def test_the_models_own_state_is_averaged_exactly(mode, accumulate_steps):
    tx = optax.chain(aggregate(), optax.sgd(0.1))
    options = {"accumulate_steps": accumulate_steps}
    state, step = stepper(mode, stateful(tx), normalized_loss, **options)
    batch = batch_of()
    state, _ = step(state, batch)

    pieces = batch["x"].reshape(W, accumulate_steps, -1, NUM_IN).mean(2)
    expected = np.zeros((W, NUM_IN))
    for number in range(accumulate_steps):
        expected = 0.9 * expected + 0.1 * pieces[:, number]
    means = np.asarray(state.model_state["mean"])
    chex.assert_trees_all_close(means[0] if mode == "pmap" else means, expected.mean(0), atol=1e-6)
    assert np.all(np.asarray(state.model_state["count"]) == accumulate_steps)
    if mode == "pmap":
        assert (means == means[0]).all()


def test_a_step_that_is_not_finite_leaves_the_models_own_state_as_it_was():
    tx = optax.chain(aggregate(), optax.apply_if_finite(optax.sgd(0.1), 5))
    state, step = stepper("pmap", stateful(tx), normalized_loss)
    state, _ = step(state, batch_of())
    before = jax.device_get(state.model_state)
    spoiled = batch_of()
    spoiled["x"][0, 0] = np.nan  # one worker's
    state, _ = step(state, spoiled)
    chex.assert_trees_all_equal(jax.device_get(state.model_state), before)
    state, _ = step(state, batch_of())
    assert np.isfinite(jax.device_get(state.model_state["mean"])).all()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda params, batch, model_state: 0.0, "expected .loss, metrics, new_model_state."),
        (lambda params, batch, model_state: (params["head"]["kernel"].sum(), {}, {}), "of structure"),
    ],
)
def test_a_loss_that_keeps_no_model_state_is_an_error(loss, message):
    state, step = stepper("pmap", stateful(optax.chain(aggregate(), optax.sgd(0.1))), loss)
    with pytest.raises(ValueError, match=message):
        step(state, batch_of())


def test_half_precision_gradients_accumulate_in_float32():
    def loss(params, batch):  # gradients 1, 2**-8, 2**-8, ...: bf16 sums would stay at 1
        return jnp.mean(batch["x"].astype(jnp.bfloat16)) * params["kernel"]

    tx = optax.chain(aggregate(Route.FP32), optax.sgd(1.0))
    params = {"kernel": jnp.zeros((), jnp.bfloat16)}
    fresh = training.TrainState.create(apply_fn=None, params=params, tx=tx)
    state, step = stepper("checked", fresh, loss, accumulate_steps=4)
    x = np.concatenate([[[1]] + [[2.0**-8]] * 3] * W).astype(np.float32)
    state, _ = step(state, {"x": x})
    assert float(state.params["kernel"]) == float(jnp.bfloat16(-(1 + 3 * 2.0**-8) / 4))


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_load_arrive_at_the_aggregation(mode):
    state, step = stepper(mode, state_of(sgd(Route.FP32)))
    state, metrics = step(state, batch_of(), 0.75)
    signals = nf_jax.step_info(state).signals
    assert bool(signals.has_loss) and float(signals.reducer_load) == 0.75
    assert float(signals.loss) == pytest.approx(float(one_copy(mode, metrics)["loss"]), rel=1e-6)


def test_the_largest_of_the_workers_loads_counts():
    def body(state, batch, load):
        options = {"loss_fn": loss_fn, "axis": "batch", "reducer_load": load}
        return training.train_step(state, batch, **options)[0]

    mapped = jax.pmap(body, axis_name="batch", devices=DEVICES)
    shares = jax.tree.map(lambda x: x.reshape(W, SHARE, -1), batch_of())
    state = training.replicate(state_of(sgd(Route.FP32)), DEVICES)
    state = mapped(state, shares, jnp.asarray([0.1, 0.9, 0.2, 0.3]))
    assert float(nf_jax.step_info(state).signals.reducer_load) == pytest.approx(0.9)


def test_every_worker_hears_the_same_loss():
    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * extra["value"], updates), state

    by_loss = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax.chain(aggregate(Route.FP32), by_loss, optax.sgd(0.1))
    state, step = stepper("pmap", state_of(tx))
    one_copy("pmap", step(state, batch_of())[0].params)  # asserts that all rows are equal


def test_an_optimizer_without_extra_arguments_is_called_as_flax_calls_it():
    state = state_of(optax.sgd(0.5), rng=jax.random.key(0))
    after = state.apply_gradients(
        grads=params_of(), value=jnp.float32(1), reducer_load=jnp.float32(0), rng=None
    )
    chex.assert_trees_all_close(after.params, jax.tree.map(lambda x: x / 2, params_of()))
    assert after.rng is None and after.step == 1 and after.tx is state.tx


@pytest.mark.parametrize("mode", ["pmap", "checked"])
def test_a_step_is_traced_once_and_takes_the_old_state_only_if_it_may(mode):
    traces = []

    def counted(params, batch):
        traces.append(None)
        return loss_fn(params, batch)

    state, step = stepper(mode, state_of(sgd(Route.FP32), rng=jax.random.key(1)), counted)
    for seed in range(3):
        old = state
        state, _ = step(state, batch_of(seed))
        assert old.params["dense"]["kernel"].is_deleted()
    assert len(traces) == 1
    kept, step = sgd_in_signs(mode)
    step(kept, batch_of())
    assert not kept.params["dense"]["kernel"].is_deleted()


@pytest.mark.parametrize(
    ("mode", "change", "message"),
    [
        ("checked", {"batch": {"x": np.zeros((W * 3 + 1, 2))}}, r"batch leaf \['x'\].*4 workers"),
        ("checked", {"accumulate_steps": 3}, r"batch leaf \['x'\].*into 3 equal micro-batches"),
        ("pmap", {"accumulate_steps": 0}, "accumulate_steps: expected a positive int, got 0"),
        ("checked", {"loss": lambda p, b: b["x"]}, r"'loss' to be a scalar, got shape \(4, 32\)"),
        ("checked", {"loss": lambda p, b: (b["x"].mean(), {"loss": 1.0})}, "rename it"),
        ("checked", {"tx": optax.sgd(0.1)}, "expected nf_jax.aggregate_gradients in state.tx"),
    ],
)
def test_a_misuse_is_an_error_that_says_what_to_do(mode, change, message):
    change = {"batch": batch_of(), "loss": loss_fn, "tx": sgd(), "accumulate_steps": 1, **change}
    state, step = stepper(
        mode,
        state_of(change["tx"]),
        change["loss"],
        accumulate_steps=change["accumulate_steps"],
    )
    with pytest.raises(ValueError, match=message):
        step(state, change["batch"])


def test_a_state_in_the_wrong_layout_is_an_error_that_says_what_to_do():
    fresh = state_of(sgd())
    with pytest.raises(ValueError, match=r"opt_state/0 .* place\(state, mesh\)"):
        training.shard_map_step(loss_fn, MESH, fresh)(fresh, batch_of())
    with pytest.raises(ValueError, match=r"use replicate\(state\)"):
        training.pmap_step(loss_fn)(fresh, batch_of())
    explicit = Mesh(np.asarray(DEVICES), ("batch",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match="expected axes of type Auto"):
        training.shard_map_step(loss_fn, explicit, fresh)


# ------------------------------------------------------------------------------- optax around them


@pytest.mark.parametrize(("mode", "route"), [("pmap", Route.FP32), ("checked", Route.SIGN)])
def test_clipping_and_adamw_come_after_the_aggregation(mode, route, standard_promotion):
    state, step = stepper(mode, state_of(adamw(route)))
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch_of())
        losses.append(float(one_copy(mode, metrics)["loss"]))
    assert losses[-1] < 0.9 * losses[0]
    one_copy(mode, state.params)
    assert all(np.ptp(leaf, axis=0).any() for leaf in jax.tree.leaves(memory_of(state)))


def test_flaxs_own_train_state_works_without_a_loss(standard_promotion):
    from flax.training.train_state import TrainState

    state = TrainState.create(apply_fn=None, params=params_of(), tx=adamw(Route.FP32))

    def body(state, batch):
        grads, _ = jax.grad(loss_fn, has_aux=True)(state.params, batch)
        return state.apply_gradients(grads=grads)

    shares = jax.tree.map(lambda x: x.reshape(W, SHARE, -1), batch_of())
    mapped = jax.pmap(body, axis_name="batch", devices=DEVICES)
    state = mapped(training.replicate(state, DEVICES), shares)
    one_copy("pmap", state.params)
    assert not bool(nf_jax.step_info(state).signals.has_loss)
    with pytest.raises(ValueError, match=r"an nf_jax\.training\.TrainState, got TrainState"):
        training.train_step(state, shares, loss_fn=loss_fn, axis="batch")


LABELS = {"dense": {"kernel": "dense", "bias": "dense"}, "head": {"kernel": "head"}}


@pytest.mark.parametrize("mode", ["pmap", "checked"])
def test_masked_and_multi_transform_work_after_the_aggregation(mode):
    decay = optax.masked(optax.add_decayed_weights(0.1), {"dense": True, "head": False})
    rates: dict[Any, Any] = {"dense": optax.sgd(0.1), "head": optax.sgd(0.0)}
    tx = optax.chain(aggregate(Route.FP32), decay, optax.multi_transform(rates, LABELS))
    state, step = stepper(mode, state_of(tx))
    state, _ = step(state, batch_of())
    after = one_copy(mode, state.params)
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), after, params_of())
    assert changed == {"dense": {"kernel": True, "bias": True}, "head": {"kernel": False}}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.masked(tx, {"dense": True, "head": False}),
        lambda tx: optax.multi_transform({"dense": tx, "head": optax.sgd(0.1)}, LABELS),
    ],
)
def test_masks_around_the_aggregation_are_an_error(wrap):
    with pytest.raises(ValueError, match="Put it first and mask what follows"):
        state_of(wrap(sgd()))


@pytest.mark.parametrize("mode", ["pmap", "checked"])
def test_apply_if_finite_skips_a_step_and_its_residuals(mode, standard_promotion):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    tx = optax.chain(aggregate(), optax.apply_if_finite(inner, 5))
    state, step = stepper(mode, state_of(tx), donate=False)
    state, _ = step(state, batch_of(0))
    bad = batch_of(1)
    bad["x"][SHARE, 0] = np.nan  # one example of worker 1 only
    skipped, _ = step(state, bad)
    chex.assert_trees_all_equal(one_copy(mode, skipped.params), one_copy(mode, state.params))
    chex.assert_trees_all_equal(memory_of(skipped), memory_of(state))
    counters, kept = skipped.opt_state[1], state.opt_state[1]
    chex.assert_trees_all_equal(*jax.device_get((counters.inner_state, kept.inner_state)))
    assert int(one_copy(mode, counters.total_notfinite)) == 1
    assert int(nf_jax.step_info(skipped).signals.nonfinite.sum()) > 0
    assert all(map(np.any, jax.tree.leaves(memory_of(state))))
    after, _ = step(skipped, batch_of(2))
    chex.assert_tree_all_finite(one_copy(mode, after.params))


@pytest.mark.parametrize("mode", ["pmap", "checked"])
def test_hyperparameters_can_be_injected_around_it(mode, standard_promotion):
    def make(learning_rate, profile, num_workers):
        first = nf_jax.aggregate_gradients(profile, axis="batch", num_workers=num_workers)
        return optax.chain(first, optax.sgd(learning_rate))

    static = ("profile", "num_workers")
    tx = optax.inject_hyperparams(make, static_args=static)(
        learning_rate=lambda count: 0.1 * (count < 1),
        profile=Profile.static(Route.FP32),
        num_workers=W,
    )
    state, step = stepper(mode, state_of(tx))
    start = one_copy(mode, state.params)
    state, _ = step(state, batch_of())
    first = one_copy(mode, state.params)
    state, _ = step(state, batch_of())
    chex.assert_trees_all_equal(first, one_copy(mode, state.params))  # the second rate is 0
    assert np.any(first["head"]["kernel"] != start["head"]["kernel"])
    assert bool(nf_jax.step_info(state).signals.has_loss)


def test_several_aggregations_in_one_state_are_told_apart_by_path():
    state = state_of(optax.chain(aggregate(), optax.identity(), aggregate(Route.FP32)))
    with pytest.raises(ValueError, match=r"got 2, at opt_state/0, opt_state/2; pass one of them"):
        nf_jax.step_info(state)
    assert int(nf_jax.step_info(state.opt_state[2]).step) == -1


# ------------------------------------------------------------------------------------- checkpoints


def host(tree: Any) -> Any:
    return jax.device_get(jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree))


def is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("mode", ["pmap", "checked"])
def test_training_continues_from_a_checkpoint_bit_for_bit(mode, tmp_path):
    state, step = trained(mode)
    assert checkpoint.latest_step(tmp_path) is None
    assert checkpoint.save(tmp_path, state) == tmp_path / "2"
    checkpoint.save(tmp_path, state, step=1)
    assert checkpoint.latest_step(tmp_path) == 2
    fresh = state_of(sgd(), rng=jax.random.key(0))
    like = training.replicate(fresh, DEVICES) if mode == "pmap" else training.place(fresh, MESH)
    back = checkpoint.restore(tmp_path, like)
    assert jax.tree.structure(back) != jax.tree.structure(state)  # another tx of the same make
    back = back.replace(tx=state.tx)
    chex.assert_trees_all_equal(host(back), host(state))
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), back) == jax.tree.map(
        lambda x: (x.dtype, x.sharding), state
    )
    for rows in jax.tree.leaves(memory_of(back)):
        assert all(np.any(rows[0] != row) for row in rows[1:])
    chex.assert_trees_all_equal(*(host(step(start, batch_of(9))) for start in (state, back)))


def test_leaves_of_every_kind_survive(tmp_path):
    tree = {
        "key": jax.random.key(3, impl="rbg"),
        "keys": jax.random.split(jax.random.key(4), 2),
        "half": jnp.asarray([1.5, jnp.nan, -0.0], jnp.bfloat16),
        "nothing": jnp.zeros((0, 3)),
        "a/b": {"c": np.arange(3), "d": np.float64(1 / 3), "none": None},
        "a": {"b/c": jnp.int32(5)},
        "python": [True, 7, 1.5],
        "empty": optax.EmptyState(),
    }
    checkpoint.save(tmp_path, tree, step=0)
    back = checkpoint.restore(tmp_path, tree)
    assert list(map(type, jax.tree.leaves(back))) == list(map(type, jax.tree.leaves(tree)))
    jax.tree.map(np.testing.assert_array_equal, *(host_leaves(x) for x in (back, tree)))
    assert str(back["key"].dtype) == "key<rbg>"
    assert back["python"] == [True, 7, 1.5]


def host_leaves(tree: Any) -> list[np.ndarray]:
    return [
        np.asarray(jax.random.key_data(x) if isinstance(x, jax.Array) and is_key(x) else x)
        for x in jax.tree.leaves(tree)
    ]


def test_a_checkpoint_restores_into_an_abstract_state(tmp_path):
    fresh = state_of(sgd(), rng=jax.random.key(7))
    checkpoint.save(tmp_path, fresh)
    back = checkpoint.restore(tmp_path, jax.eval_shape(lambda: fresh))
    jax.tree.map(np.testing.assert_array_equal, *(host_leaves(x) for x in (back, fresh)))


def test_a_state_that_lost_its_residuals_is_not_saved(tmp_path):
    state, _ = trained("pmap", 1)
    with pytest.raises(ValueError, match=r"state at opt_state/0 .* was unreplicated"):
        checkpoint.save(tmp_path, flax.jax_utils.unreplicate(state))
    state, _ = trained("unchecked", 1)
    lost = find_states(state)[0][1].memory
    lost = jax.tree.map(lambda leaf: leaf[:1], lost)  # what out_specs=P() leaves of it
    opt_state = (state.opt_state[0]._replace(memory=lost), *state.opt_state[1:])
    with pytest.raises(ValueError, match=r"left the mapped function under PartitionSpec\(\)"):
        checkpoint.save(tmp_path, state.replace(opt_state=opt_state))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("saved")
    state = training.place(state_of(sgd()), MESH)
    checkpoint.save(directory, state, step=5)
    return directory, state


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [remove, truncate, flip])
@pytest.mark.parametrize("which", ["largest", "_METADATA", "manifest.ocdbt", "nf_jax.json"])
def test_a_torn_checkpoint_is_refused_by_name(which, damage, saved, tmp_path):
    source, state = saved
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    files = [file for file in (tmp_path / "5").rglob("*") if file.is_file()]
    sizes = {file: file.stat().st_size for file in files}
    damage(
        max(files, key=lambda file: sizes[file])
        if which == "largest"
        else next(file for file in files if file.name == which)
    )
    with pytest.raises(ValueError, match=f"checkpoint {tmp_path}/5 is torn or corrupted"):
        checkpoint.restore(tmp_path, state)


def test_a_missing_checkpoint_is_refused_by_name(tmp_path, saved):
    directory, state = saved
    with pytest.raises(ValueError, match=f"expected a checkpoint in {tmp_path}, found none"):
        checkpoint.restore(tmp_path, state)
    with pytest.raises(ValueError, match=f"expected a checkpoint at {directory}/6, found none"):
        checkpoint.restore(directory, state, step=6)
    with pytest.raises(ValueError, match=f"{directory}/5 exists already"):
        checkpoint.save(directory, state, step=5)


def test_a_save_that_was_interrupted_is_no_checkpoint(tmp_path, saved):
    source, state = saved
    shutil.copytree(source / "5", tmp_path / "6.partial")
    assert checkpoint.latest_step(tmp_path) is None
    assert checkpoint.save(tmp_path, state, step=6).name == "6"
    assert [child.name for child in tmp_path.iterdir()] == ["6"]


@pytest.mark.parametrize(
    ("other", "leaf"),
    [
        (lambda: state_of(adamw()), r"\.opt_state\[.*saved None"),
        (lambda: state_of(sgd(), rng=jax.random.key(0)), r"\.rng: saved None"),
        (lambda: state_of(sgd(Route.FP32)), "memory.residual"),
    ],
)
def test_a_checkpoint_of_another_make_is_refused_by_leaf(other, leaf, saved):
    directory, _ = saved
    with pytest.raises(ValueError, match=rf"(?s)checkpoint {directory}/5 differ.*{leaf}"):
        checkpoint.restore(directory, training.place(other(), MESH))


def test_a_checkpoint_for_another_number_of_workers_or_layout_is_refused(saved):
    directory, _ = saved
    devices = DEVICES[:2]
    two = state_of(optax.chain(aggregate(num_workers=2), optax.sgd(0.1)))
    mesh = Mesh(np.asarray(devices), ("batch",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="and number of workers"):
        checkpoint.restore(directory, training.place(two, mesh))
    with pytest.raises(ValueError, match="in the layout that was saved"):
        checkpoint.restore(directory, training.replicate(state_of(sgd()), DEVICES))
