"""Laws of the optax transform: local gradients in, means out, and every silent trap is an error."""

from __future__ import annotations

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from training_runs import Run
from workers import AXIS, MODES, mapped, mesh_of, rows_are_equal, sent_bytes

import nf_jax
from nf_jax import Profile, Route
from nf_jax.health import Health, Trigger
from nf_jax.profile import Buckets, CapacityLimits, Codec, HealthLimits, Phase, Region
from nf_jax.telemetry import Reason

FP32, BF16, SIGN, TERNARY = Route
W = 4
PARAMS = {
    "body": {"kernel": np.ones((96, 64), np.float32), "half": np.ones(2048, jnp.bfloat16)},
    "head": {"bias": np.ones(3, np.float32), "kernel": np.ones((64, 10), np.float32)},
}
HEAD, BODY = 0, 1  # regions


def profile(*, body: Any = SIGN, codec: Any = None, **changes: Any) -> Profile:
    """The head stays exact; the body goes by `body`, from the first step on or by phase."""
    phases = body if isinstance(body, dict) else {0: body}
    fields: dict[str, Any] = dict(
        name="test",
        regions=(
            Region(name="head", pattern="head/.*"),
            Region(name="body", pattern="body/.*", codec=Codec.model_validate(codec or {"scale": "leaf"})),
        ),
        phases=tuple(
            Phase(start_step=step, routes={"head": FP32, "body": route}) for step, route in phases.items()
        ),
        health=HealthLimits(warmup_steps=0, cooldown_steps=2, probation_steps=2),
        capacity=CapacityLimits(min_lane_bytes=0, hold_steps=2),
    )
    return Profile(**fields | changes)


def aggregate(chosen: Profile | None = None, num_workers: int = W, **kwargs: Any) -> Any:
    return nf_jax.aggregate_gradients(chosen or profile(), axis=AXIS, num_workers=num_workers, **kwargs)


def gradients(seed: int, num_workers: int = W) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.normal(size=(num_workers, *p.shape)).astype(p.dtype), PARAMS)


def spoiled(seed: int) -> Any:
    bad = gradients(seed)
    bad["body"]["kernel"][2, 5, 5] = np.nan
    return bad


@functools.cache
def shared_run(mode: str) -> Run:
    """A run that tests share, so that it is compiled once: `fresh` puts its state back."""
    run = Run(aggregate(), PARAMS, W, mode)
    run.first = run.state  # pyright: ignore[reportAttributeAccessIssue]
    return run


def fresh(mode: str = "unchecked") -> Run:
    run = shared_run(mode)
    run.state = run.first  # pyright: ignore[reportAttributeAccessIssue]
    return run


def lanes_of(region: int, chosen: Profile | None = None) -> list[int]:
    plan = nf_jax.plan(chosen or profile(), PARAMS, W)
    return [lane for lane, r in enumerate(plan.lanes.regions) if r == region]


# ------------------------------------------------------------------------------------ what it gives


@pytest.mark.parametrize("mode", MODES)
def test_updates_have_the_gradients_dtypes_and_residuals_are_f32(mode: str):
    run, local = fresh(mode), gradients(0)
    updates = run.step(local, value=0, reducer_load=0)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, local)
    assert rows_are_equal(updates)
    assert {leaf.dtype for leaf in jax.tree.leaves(run.memory)} == {np.dtype(np.float32)}
    assert set(run.memory.residual) == {"body/half", "body/kernel"}
    for name, leaf in local["head"].items():
        np.testing.assert_allclose(updates["head"][name][0], leaf.mean(0), rtol=1e-5, atol=1e-6)
    for path, kept in run.memory.residual.items():
        # What was sent is + or - one number per leaf.
        sent = local["body"][path.split("/")[1]].astype(np.float32) - kept
        np.testing.assert_allclose(np.abs(sent), np.abs(sent).max(), rtol=1e-5)
        np.testing.assert_allclose(np.abs(sent).max(), np.sqrt(2 / np.pi), rtol=0.05)


def test_the_three_ways_agree_to_the_bit_over_many_steps_and_flips_without_a_retrace():
    chosen = profile(body={0: FP32, 2: SIGN, 4: FP32, 5: SIGN})
    found = []
    for mode in MODES:
        traces: list[None] = []
        run = Run(aggregate(chosen), PARAMS, W, mode, on_trace=lambda t=traces: t.append(None))
        steps, signals, routes = [], [], []
        for step in range(8):
            local = spoiled(step) if step == 6 else gradients(step)
            updates = run.step(local, value=step, reducer_load=0)
            assert rows_are_equal(updates)
            steps.append((updates, run.memory, run.info._replace(signals=0)))
            signals.append(run.info.signals)
            routes.append(run.info.routes[lanes_of(BODY)[0]])
            assert (run.info.routes[lanes_of(HEAD)] == FP32).all()
        assert routes == [FP32, FP32, SIGN, SIGN, FP32, SIGN, SIGN, FP32]
        # A pmapped function is traced once for the state it is given and once for its own.
        assert len(traces) <= (2 if mode == "pmap" else 1)
        found.append((steps, signals))
    for steps, signals in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0][0], steps)
        chex.assert_trees_all_close(found[0][1], signals, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_one_worker_is_the_identity(mode: str):
    run = Run(aggregate(num_workers=1), PARAMS, 1, mode)
    local = gradients(0, 1)
    updates = run.step(local, value=2.5, reducer_load=0)
    jax.tree.map(np.testing.assert_array_equal, updates, local)
    assert jax.tree.leaves(run.memory) == [] and run.info.wire_bytes == 0
    assert set(run.info.reasons.tolist()) == {Reason.SINGLE_WORKER}
    assert run.info.signals.loss == 2.5


def test_extra_arguments_are_optional_and_others_pass_by():
    tx = aggregate()

    def update(local: Any, _: Any) -> Any:
        updates, state = tx.update(local, tx.init(PARAMS), unknown=3)
        return updates, state.info.signals.has_loss

    updates, has_loss = mapped(update, W, "pmap")(gradients(0), None)
    assert not np.any(has_loss)
    chex.assert_trees_all_equal(
        jax.tree.map(np.asarray, updates), fresh("pmap").step(gradients(0), value=0, reducer_load=0)
    )


def test_an_axis_may_be_several_names():
    tx = nf_jax.aggregate_gradients(profile(), axis=("host", "device"), num_workers=W)
    mesh = jax.make_mesh((2, 2), ("host", "device"), axis_types=(AxisType.Auto,) * 2)
    spec = nf_jax.state_spec(tx.init(PARAMS), ("host", "device"))

    def step(local: Any, state: Any) -> Any:
        return tx.update(jax.tree.map(lambda x: x[0], local), state, value=0.0, reducer_load=0.0)

    expected = fresh().step(gradients(0), value=0, reducer_load=0)
    for check in (True, False):
        function = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(("host", "device")), spec),
            out_specs=(P(), spec),
            check_vma=check,
        )
        updates, state = jax.jit(function)(
            gradients(0), nf_jax.shard_state(tx.init(PARAMS), mesh, ("host", "device"))
        )
        for path in ("kernel", "half"):
            found = np.asarray(updates["body"][path])
            np.testing.assert_array_equal(found, expected["body"][path][0])
        assert int(nf_jax.step_info(state).step) == 0


def test_two_transforms_do_not_disturb_each_other():
    first, second = aggregate(), aggregate(profile(codec={"scale": "rank1", "down": "2bit"}))
    inits = first.init(PARAMS), second.init(PARAMS)
    specs = nf_jax.state_spec(inits, AXIS)

    def both(local: Any, states: Any) -> Any:
        local = jax.tree.map(lambda x: x[0], local)
        one, state_1 = first.update(local[0], states[0], value=0.0, reducer_load=0.0)
        two, state_2 = second.update(local[1], states[1], value=1.0, reducer_load=0.0)
        return (one, two), (state_1, state_2)

    function = jax.jit(
        jax.shard_map(
            both, mesh=mesh_of(W), in_specs=(P(AXIS), specs), out_specs=(P(), specs), check_vma=True
        )
    )
    states = nf_jax.shard_state(inits, mesh_of(W))
    alone = fresh()
    for step in range(2):
        (one, two), states = function((gradients(step), gradients(step + 9)), states)
        expected = alone.step(gradients(step), value=0, reducer_load=0)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[0]), one, expected)
        assert not np.array_equal(two["body"]["kernel"], one["body"]["kernel"])
    with pytest.raises(ValueError, match="got 2, at 0, 1"):
        nf_jax.step_info(states)
    assert [float(nf_jax.step_info(s).signals.loss) for s in states] == [0, 1]


# ------------------------------------------------------------------------------------------ signals


def test_signals_are_those_of_the_raw_gradients():
    run = fresh()
    for step in range(2):
        local = gradients(step)
        run.step(local, value=[1, 2, 3, 6], reducer_load=[0.1, 0.5, 0.2, 0.3])
        signals = run.info.signals
        assert signals.loss == 3 and signals.has_loss and signals.reducer_load == np.float32(0.5)
        assert signals.nonfinite.tolist() == [0, 0]
        for region, name in ((HEAD, "head"), (BODY, "body")):
            squares = [np.square(x.astype(np.float64)).sum() for x in local[name].values()]
            expected = np.sqrt(sum(squares) / W)
            np.testing.assert_allclose(signals.gradient_norm[region], expected, rtol=1e-5)
        body = lanes_of(BODY)
        assert (signals.agreement[body] > 0.2).all() and (signals.agreement[body] < 0.6).all()
        assert (signals.agreement[lanes_of(HEAD)] == -1).all()
        assert (signals.residual_ratio[body] > 0.3).all()


def test_what_is_not_finite_is_counted_by_worker_and_leaf():
    run, local = fresh(), gradients(0)
    local["head"]["bias"][1] = np.inf
    local["body"]["kernel"][0, 0, 0] = np.nan
    local["body"]["kernel"][3, 1, :2] = -np.inf
    local["body"]["half"][3, 7] = np.nan
    run.step(local, value=0, reducer_load=0)
    assert run.info.signals.nonfinite.tolist() == [1, 3]


@pytest.mark.parametrize("mode", MODES)
def test_the_largest_load_acts_one_step_later(mode: str):
    run, routes, reasons = fresh(mode), [], []
    body = lanes_of(BODY)[0]
    for step, load in enumerate([0.1, 0.95, 0.1, 0.1, 0.1]):
        run.step(gradients(step), value=0, reducer_load=[0, 0, load, 0])
        info = run.info
        assert info.signals.reducer_load == np.float32(load)
        routes.append(info.routes[body])
        reasons.append(info.reasons[body])
    assert routes == [SIGN, SIGN, FP32, FP32, SIGN]
    assert reasons == [0, 0, Reason.LOAD, Reason.LOAD, 0]


# ------------------------------------------------------------------------------------------- health


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_is_not_finite_falls_back_and_training_returns(mode: str):
    run, states, routes = fresh(mode), [], []
    body = lanes_of(BODY)
    before = None
    for step in range(7):
        local = spoiled(step) if step == 1 else gradients(step)
        if step in (1, 2):
            before = run.memory
        updates = run.step(local, value=0, reducer_load=0)
        states.append(int(run.info.health_state[BODY]))
        routes.append(int(run.info.routes[body[0]]))
        if step == 1:
            assert np.isnan(updates["body"]["kernel"].astype(np.float32)).all()
            others = updates["body"]["half"], updates["head"]
            assert all(np.isfinite(x.astype(np.float32)).all() for x in jax.tree.leaves(others))
            jax.tree.map(np.testing.assert_array_equal, run.memory, before)
            assert run.info.trigger.tolist() == [Trigger.NONFINITE] * 2
            assert run.info.trips.tolist() == [1, 1]
        if step == 2:  # the first exact step drains both residuals
            assert before is not None
            assert not any(leaf.any() for leaf in jax.tree.leaves(run.memory))
            server = before.server_residual["body/kernel"].reshape(96, 64)  # no pads here
            expected = (local["body"]["kernel"] + before.residual["body/kernel"]).mean(0) + server
            np.testing.assert_allclose(updates["body"]["kernel"][0], expected, atol=2e-6)
            norm = np.sqrt(np.square(local["head"]["kernel"].astype(np.float64)).sum() / W)
            assert run.info.signals.gradient_norm[HEAD] > norm  # of what is raw, not drained
        if step == 3:
            exact = local["body"]["kernel"].mean(0)
            np.testing.assert_allclose(updates["body"]["kernel"][0], exact, atol=1e-6)
    on, off, probing = Health.ADMITTED, Health.FALLBACK, Health.PROBATION
    assert states == [on, off, off, probing, probing, on, on]
    assert routes == [SIGN, SIGN, FP32, FP32, SIGN, SIGN, SIGN]


def test_a_loss_that_is_not_finite_falls_back_too():
    run = fresh()
    run.step(gradients(0), value=[0, np.nan, 0, 0], reducer_load=0)
    assert run.info.trips.tolist() == [1, 1]
    assert (run.info.next_routes == FP32).all()
    assert (run.info.next_reasons[lanes_of(BODY)] == Reason.FALLBACK).all()


def test_a_value_too_large_to_square_counts_as_not_finite():
    run, local = fresh(), gradients(0)
    local["body"]["kernel"][1, 0, 0] = 1e30
    before = run.memory
    run.step(local, value=0, reducer_load=0)
    assert run.info.signals.nonfinite.tolist() == [0, 1]
    jax.tree.map(np.testing.assert_array_equal, run.memory, before)


def test_the_next_routes_of_one_step_are_the_routes_of_the_next():
    run = fresh()
    promised = run.info.next_routes, run.info.next_reasons
    for step in range(4):
        run.step(spoiled(step) if step == 2 else gradients(step), value=0, reducer_load=0)
        np.testing.assert_array_equal(run.info.routes, promised[0])
        np.testing.assert_array_equal(run.info.reasons, promised[1])
        promised = run.info.next_routes, run.info.next_reasons


# ------------------------------------------------------------------------------------ pinned routes


@pytest.mark.parametrize("route", [FP32, SIGN], ids=lambda r: r.name)
def test_pinned_routes_give_the_same_bits_and_say_what_they_send(route: Route):
    plan = nf_jax.plan(profile(), PARAMS, W)
    fixed = [reason is not None for reason in plan.lanes.fixed]
    routes = np.where(fixed, FP32, route)
    run = Run(aggregate(routes=routes.tolist()), PARAMS, W, "unchecked")
    free = fresh()
    for step in range(2):
        extra = dict(value=0, reducer_load=0.95)  # saturated: the controller would go exact
        updates = run.step(gradients(step), **extra)
        np.testing.assert_array_equal(run.info.routes, routes)
        assert (run.info.next_routes == FP32).all()
        assert run.info.wire_bytes == plan.wire_bytes(routes.tolist())
        if route == SIGN and step == 0:
            expected = free.step(gradients(step), **extra)
            jax.tree.map(np.testing.assert_array_equal, updates, expected)
            jax.tree.map(np.testing.assert_array_equal, run.memory, free.memory)
    if route == SIGN:
        extra = {k: np.zeros(W, np.float32) for k in ("value", "reducer_load")}
        hlo = str(run.function.lower(gradients(0), run.state, extra).compile().as_text())
        assert 0 <= run.info.wire_bytes - sent_bytes(hlo, W) < len(routes) + 1


def test_a_static_profile_pins_itself_by_having_one_route():
    chosen = Profile.static(SIGN, scale="leaf")
    run = Run(aggregate(chosen), PARAMS, W, "unchecked")
    for step in range(2):
        run.step(spoiled(step), value=np.nan, reducer_load=9)
        fixed = nf_jax.plan(chosen, PARAMS, W).lanes.fixed
        expected = [SIGN if reason is None else FP32 for reason in fixed]
        assert run.info.routes.tolist() == run.info.next_routes.tolist() == expected


# ------------------------------------------------------------------------------- with what follows


def test_a_bad_step_can_be_dropped_by_what_follows():
    tx = optax.chain(
        aggregate(),
        optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=5),
    )
    run = Run(tx, PARAMS, W, "unchecked")
    updates = run.step(spoiled(0), value=0, reducer_load=0)
    assert not any(np.asarray(leaf, np.float32).any() for leaf in jax.tree.leaves(updates))
    updates = run.step(gradients(1), value=0, reducer_load=0)
    assert all(np.asarray(leaf, np.float32).any() for leaf in jax.tree.leaves(updates))


def test_clipping_masking_and_adam_follow_it():
    mask = {"body": True, "head": False}
    tx = optax.chain(
        aggregate(),
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.add_decayed_weights(0.1), mask),
        optax.scale_by_adam(),
    )
    # optax adds the norms of leaves of different dtypes, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        run = Run(tx, PARAMS, W, "checked")
        updates = run.step(gradients(0), value=0, reducer_load=0)
    assert rows_are_equal(updates) and int(run.info.step) == 0


# ------------------------------------------------------------------------------------------- misuse


def test_a_profile_is_a_profile():
    with pytest.raises(ValueError, match=r"expected an nf_jax\.Profile, got str"):
        nf_jax.aggregate_gradients("digits.toml", axis=AXIS, num_workers=2)  # type: ignore[arg-type]


def test_outside_the_mapped_function_there_is_no_axis():
    tx = aggregate()
    with pytest.raises(ValueError, match="inside pmap or shard_map with axis 'batch'"):
        tx.update(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("mode", MODES)
def test_another_number_of_workers_is_an_error(mode: str):
    tx = aggregate(num_workers=8)
    update = mapped(lambda local, _: tx.update(local, tx.init(PARAMS))[0], W, mode)
    with pytest.raises(ValueError, match=r"num_workers=8.*4 members.*Pass num_workers=4"):
        update(gradients(0), None)


def loss(params: Any, x: jax.Array) -> jax.Array:
    return sum((jnp.sum(p.astype(jnp.float32)) for p in jax.tree.leaves(params)), jnp.sum(x))


@pytest.mark.parametrize("local", [False, True])
def test_gradients_that_jax_has_summed_are_an_error_that_says_what_to_do(local: bool):
    tx = aggregate()

    def update(x: Any, params: Any) -> Any:
        if local:
            params = jax.lax.pcast(params, AXIS, to="varying")
        return tx.update(jax.grad(lambda p: loss(p, x))(params), tx.init(PARAMS))[0]

    function = mapped(update, W, "checked")
    x = np.ones((W, 3), np.float32)
    if local:
        assert rows_are_equal(function(x, PARAMS))
        return
    with pytest.raises(ValueError, match=r"already summed.*pcast\(params, 'batch', to='varying'\)"):
        function(x, PARAMS)


def test_masked_around_it_is_an_error_that_shows_the_right_order():
    tx = optax.masked(aggregate(), {"body": True, "head": False})
    with pytest.raises(ValueError, match=r"optax\.chain\(aggregate_gradients.*masked\(inner"):
        tx.init(PARAMS)
    state = aggregate().init(PARAMS)
    masked = {"body": PARAMS["body"], "head": optax.MaskedNode()}
    with pytest.raises(ValueError, match="masked leaves"):
        aggregate().update(masked, state)


def run_with(state: Any, mode: str = "pmap", chosen: Profile | None = None) -> Any:
    tx = aggregate(chosen)
    return mapped(lambda local, shared: tx.update(local, shared)[0], W, mode)(gradients(0), state)


def test_a_state_that_is_not_its_own_is_an_error():
    with pytest.raises(ValueError, match=r"expected the AggregateState.*got EmptyState"):
        run_with(optax.EmptyState())
    other = aggregate(profile(codec={"scale": "leaf", "down": "count"})).init(PARAMS)
    with pytest.raises(ValueError, match=r"server_residual 'body/.*call init anew"):
        run_with(other)
    small = {**PARAMS, "body": {**PARAMS["body"], "kernel": np.ones((48, 64), np.float32)}}
    message = r"residual 'body/kernel' of shape \(1, 96, 64\).*another model.*call init anew"
    with pytest.raises(ValueError, match=message):
        run_with(aggregate().init(small))


def test_a_state_of_another_number_of_workers_is_an_error():
    with pytest.raises(ValueError, match="num_workers"):
        run_with(aggregate(num_workers=2).init(PARAMS))


def test_a_state_of_all_workers_on_each_of_them_is_an_error():
    stacked = nf_jax.shard_state(aggregate().init(PARAMS), mesh_of(W))
    with pytest.raises(ValueError, match=r"got \(4, 2048\).*state_spec.*shard_state"):
        run_with(stacked, "unchecked")


@pytest.mark.parametrize("name", ["value", "reducer_load"])
def test_a_signal_that_is_no_scalar_is_an_error(name: str):
    tx = aggregate()
    update = mapped(lambda local, x: tx.update(local, tx.init(PARAMS), **{name: x})[0], W, "unchecked")
    with pytest.raises(ValueError, match=rf"{name}: expected a scalar.*got shape \(3,\)"):
        update(gradients(0), np.ones(3, np.float32))


def test_pinned_routes_are_checked():
    with pytest.raises(ValueError, match="one route for each of the"):
        Run(aggregate(routes=[0]), PARAMS, W, "pmap").step(gradients(0))


def test_parameters_that_are_sharded_over_another_axis_are_an_error():
    tx = nf_jax.aggregate_gradients(profile(), axis="data", num_workers=2)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    spec = nf_jax.state_spec(tx.init(PARAMS), "data")

    def step(local: Any, state: Any) -> Any:
        return tx.update(jax.tree.map(lambda x: x[0], local), state)

    function = jax.shard_map(
        step, mesh=mesh, in_specs=(P(("data", "model")), spec), out_specs=(P("model"), spec)
    )
    with pytest.raises(ValueError, match=r"aggregate_gradients: .*'model'"):
        jax.jit(function)(gradients(0), nf_jax.shard_state(tx.init(PARAMS), mesh, "data"))


# ------------------------------------------------------------------------- cases that once went wrong


@pytest.mark.parametrize(
    "other",
    [
        profile(body=BF16),
        profile(codec={"scale": "leaf", "error_feedback": False}),
        profile(codec={"scale": "rank1"}),
        Profile.static(SIGN),
    ],
    ids=["routes", "feedback", "scale", "regions"],
)
def test_a_state_of_another_profile_is_an_error(other: Profile):
    state = aggregate(other).init(PARAMS)
    with pytest.raises(ValueError, match=r"got one of others|expected (server_)?residual"):
        jax.eval_shape(jax.vmap(aggregate().update, axis_name=AXIS, in_axes=(0, None)), gradients(0), state)


def test_health_limits_may_change_under_a_state():
    state = aggregate(profile(health=HealthLimits(warmup_steps=7))).init(PARAMS)
    update = jax.vmap(aggregate().update, axis_name=AXIS, in_axes=(0, None))
    jax.eval_shape(update, gradients(0), state)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1.0, 1e15])
def test_signs_follow_gradients_of_any_magnitude(magnitude: float):
    codec = {"scale": "leaf", "down": "majority"}
    run = Run(aggregate(profile(codec=codec, health=HealthLimits(enabled=False))), PARAMS, W, "pmap")
    local = gradients(3)
    local["body"]["kernel"] = (local["body"]["kernel"] * magnitude).astype(np.float32)
    total = sum(np.asarray(run.step(local)["body"]["kernel"][0], np.float64) for _ in range(40))
    true = local["body"]["kernel"].mean(0, dtype=np.float64)
    assert np.linalg.norm(total / 40 - true) < 0.4 * np.linalg.norm(true)


@pytest.mark.parametrize("route", ["INT4", 7, -1, None, True])
def test_a_route_that_does_not_exist_is_an_error_that_lists_them(route: Any):
    with pytest.raises(ValueError, match="FP32, BF16, SIGN, TERNARY"):
        Profile.static(route)
    with pytest.raises(ValueError, match="FP32, BF16, SIGN, TERNARY"):
        aggregate(routes=[route])


def test_a_gate_beyond_which_residuals_never_drain_is_refused():
    with pytest.raises(ValueError, match=r"1\.5"):
        Codec(gate=1.6)


def test_an_axis_may_be_a_list_of_names():
    names: Any = [AXIS]
    update = nf_jax.aggregate_gradients(profile(), axis=names, num_workers=W).update
    mapped_update: Any = jax.vmap(update, axis_name=AXIS, in_axes=(0, None))
    updates, _ = jax.eval_shape(mapped_update, gradients(0), aggregate().init(PARAMS))
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, gradients(0))


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("route", [SIGN, TERNARY])
def test_residuals_are_overwritten_in_place(route: Route, num_workers: int):
    tx = aggregate(profile(body=route), num_workers)
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_workers), tx.init(PARAMS))
    step = jax.pmap(tx.update, axis_name=AXIS, donate_argnums=1, devices=jax.devices()[:num_workers])
    hlo = step.lower(gradients(0, num_workers), state).compile().as_text()
    assert "f32[1,96,64]" in hlo and not re.search(r"= f32\[1,(96,64|2048)\]\S* copy\(", hlo)


@pytest.mark.parametrize("routes", [None, [SIGN] * 6], ids=["switched", "pinned"])
def test_of_small_dtypes_one_group_at_a_time_is_held_in_f32(routes: list[Route] | None):
    tree = {f"layer_{i}": jax.ShapeDtypeStruct((2, 256, 512), "bfloat16") for i in range(6)}
    chosen = Profile(
        name="one_lane_a_leaf",
        regions=(Region(name="all", pattern=".*", codec=Codec(residual_dtype="bfloat16")),),
        phases=(Phase(start_step=0, routes={"all": SIGN}),),
        buckets=Buckets(first_bytes=2**18, cap_bytes=2**18),
    )
    tx = nf_jax.aggregate_gradients(chosen, axis=AXIS, num_workers=2, routes=routes)
    state = jax.eval_shape(tx.init, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree))
    assert state.pending.shape == (6,)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), state)
    step = jax.pmap(tx.update, axis_name=AXIS, donate_argnums=1, devices=jax.devices()[:2])
    temporary_bytes = step.lower(tree, state).compile().memory_analysis().temp_size_in_bytes
    # A mean and what it is made of, the f32 of a sketch, and every leaf's words; pinned, no group waits for
    # another, but a leaf has one f32 at a time.
    assert temporary_bytes < (4 if routes is None else 8) * (256 * 512 * 4)  # of six
