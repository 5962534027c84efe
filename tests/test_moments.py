"""Laws of Adam's moments where gradients change their kind."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import nf_jax
from nf_jax import training
from nf_jax.profile import CapacityLimits, HealthLimits, Phase, Profile, Region, Route

B1, B2, NUM_STEPS = 0.9, 0.99, 5
FP32, BF16, SIGN, TERNARY = Route
PARAMS = {name: jnp.ones((64, 64)) for name in "abc"}
REGIONS = tuple(Region(name=name, pattern=name) for name in PARAMS)
PROFILE = Profile(
    name="three",
    regions=REGIONS,
    phases=(Phase(start_step=0, routes=dict.fromkeys(PARAMS, SIGN)),),
    capacity=CapacityLimits(min_lane_bytes=0),
)


def chain() -> Any:
    first = nf_jax.aggregate_gradients(PROFILE, axis="batch", num_workers=1)
    return optax.chain(first, optax.scale_by_adam(b1=B1, b2=B2))


def state_after(count: int, before: tuple[Route, ...], after: tuple[Route, ...]) -> Any:
    """A chain's state after `count` steps, with the last routes and the next."""
    aggregate, adam = chain().init(PARAMS)
    info = aggregate.info._replace(
        routes=jnp.asarray(before, jnp.int32), next_routes=jnp.asarray(after, jnp.int32)
    )
    rng = np.random.default_rng(count)
    draw = lambda: {name: jnp.asarray(rng.random((64, 64)), jnp.float32) for name in PARAMS}  # noqa: E731
    return aggregate._replace(info=info), adam._replace(count=jnp.int32(count), mu=draw(), nu=draw())


def handed_on(state: Any) -> Any:
    """Adam's state as the next step gets it, after one that takes the next routes and leaves the moments."""

    def take(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        aggregate, adam = state
        info = aggregate.info._replace(routes=aggregate.info.next_routes)
        return updates, (aggregate._replace(info=info), adam)

    inner = optax.GradientTransformation(chain().init, take)
    tx = nf_jax.fresh_moments(inner, b1=B1, b2=B2, num_steps=NUM_STEPS)
    return jax.jit(tx.update)(PARAMS, state)[1][1]


def corrected(adam: Any) -> Any:
    """What Adam makes of its moments."""
    mu, nu = (
        jax.tree.map(lambda x, decay=decay: x / (1 - decay ** float(adam.count)), moments)
        for moments, decay in ((adam.mu, B1), (adam.nu, B2))
    )
    return mu, nu


VOTE, EXACT = (SIGN, TERNARY, SIGN), (FP32, BF16, FP32)


@pytest.mark.parametrize(
    ("before", "after"),
    [(VOTE, EXACT), (EXACT, VOTE), ((SIGN, FP32, FP32), EXACT), ((SIGN, SIGN, FP32), (SIGN, FP32, FP32))],
)
@pytest.mark.parametrize("count", [NUM_STEPS + 1, 20, 3_000])
def test_at_a_change_the_corrected_moments_stay_and_weigh_no_more_than_so_many_steps(count, before, after):
    state = state_after(count, before, after)
    adam = handed_on(state)
    assert int(adam.count) == NUM_STEPS and adam.count.dtype == jnp.int32
    chex.assert_trees_all_close(corrected(adam), corrected(state[1]), rtol=1e-5)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (VOTE, VOTE),
        (EXACT, EXACT),
        ((SIGN,) * 3, (TERNARY,) * 3),
        (VOTE, (SIGN, TERNARY, FP32)),
        (EXACT, EXACT[::-1]),
    ],
)
def test_without_a_change_and_for_a_single_lane_nothing_is_touched(before, after):
    state = state_after(3_000, before, after)
    chex.assert_trees_all_equal(handed_on(state), state[1])


@pytest.mark.parametrize("count", [0, 1, NUM_STEPS])
def test_a_run_that_has_seen_no_more_steps_is_as_it_was(count):
    state = state_after(count, VOTE, EXACT)
    chex.assert_trees_all_equal(handed_on(state), state[1])


@jax.numpy_dtype_promotion("standard")  # optax.adam's own arithmetic
def test_after_a_change_mean_squares_follow_the_new_kind_at_once():
    """After as many steps again, the new kind has half of the weight; without, a hundredth of a thousand."""
    adam, old = optax.scale_by_adam(b1=B1, b2=B2), 9.0
    state = state_after(3_000, VOTE, EXACT)
    full = state[1]._replace(nu=jax.tree.map(lambda x: jnp.full_like(x, old), PARAMS))
    ends = []
    for own in (handed_on((state[0], full)), full):
        for _ in range(NUM_STEPS):
            _, own = adam.update(PARAMS, own)  # gradients of one
        ends.append(corrected(own)[1]["a"][0, 0])
    assert ends[0] == pytest.approx(5, rel=0.03), "the mean of 9 and 1"
    assert ends[1] > 8.5


def test_moments_kept_in_bf16_stay_so():
    state = state_after(100, VOTE, EXACT)
    small = state[1]._replace(mu=jax.tree.map(lambda x: x.astype(jnp.bfloat16), state[1].mu))
    adam = handed_on((state[0], small))
    chex.assert_trees_all_equal_shapes_and_dtypes(adam, small)


def test_what_cannot_be_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"b2: expected 0 to below 1, as Adam's own, got 1"):
        nf_jax.fresh_moments(chain(), b2=1.0)
    with pytest.raises(ValueError, match="num_steps: expected at least 1, got 0"):
        nf_jax.fresh_moments(chain(), num_steps=0)
    first = nf_jax.aggregate_gradients(PROFILE, axis="batch", num_workers=1)
    with pytest.raises(ValueError, match="expected Adam in the transform"):
        nf_jax.fresh_moments(optax.chain(first, optax.sgd(0.1))).init(PARAMS)
    with pytest.raises(ValueError, match="aggregate_gradients"):
        nf_jax.fresh_moments(optax.adam(0.1)).init(PARAMS)


@pytest.mark.parametrize(
    "adam", [optax.adam(0.1), optax.adamw(0.1), optax.lamb(0.1)], ids=["adam", "adamw", "lamb"]
)
def test_the_state_is_that_of_the_chain(adam):
    tx = optax.chain(nf_jax.aggregate_gradients(PROFILE, axis="batch", num_workers=1), adam)
    chex.assert_trees_all_equal_structs(nf_jax.fresh_moments(tx).init(PARAMS), tx.init(PARAMS))


@jax.numpy_dtype_promotion("standard")
def test_pinned_routes_count_as_taken_whatever_the_controller_would_choose():
    """Pinned to FP32 for good under a profile that would vote: no change, so that the count goes on."""
    profile = PROFILE.model_copy(update={"health": HealthLimits(warmup_steps=1)})
    first = nf_jax.aggregate_gradients(profile, axis="batch", num_workers=2, routes=[FP32] * 3)
    tx = nf_jax.fresh_moments(optax.chain(first, optax.adam(1e-3)), num_steps=2)
    state = training.replicate(
        training.TrainState.create(apply_fn=None, params=PARAMS, tx=tx), jax.devices()[:2]
    )
    step = training.pmap_step(
        lambda params, x: (sum(map(jnp.sum, params.values())) + x.sum(), {}), devices=jax.devices()[:2]
    )
    for _ in range(5):
        state, _ = step(state, np.zeros((2, 1), np.float32))
    assert np.any(nf_jax.step_info(state).next_routes), "the controller would vote"
    assert int(state.opt_state[1][0].count[0]) == 5


@pytest.mark.parametrize("mapping", ["pmap", "shard_map"])
@jax.numpy_dtype_promotion("standard")  # optax.adam's own arithmetic
def test_in_training_it_is_phases_and_fallbacks_that_shorten_the_count(mapping):
    """SIGN from step 4 on, a loss that is not finite after 9: FP32 for 3 steps, then SIGN again."""
    profile = PROFILE.model_copy(
        update={
            "phases": (
                Phase(start_step=0, routes=dict.fromkeys(PARAMS, FP32)),
                Phase(start_step=4, routes=dict.fromkeys(PARAMS, SIGN)),
            ),
            "health": HealthLimits(warmup_steps=1, cooldown_steps=3, probation_steps=3),
        }
    )
    loss_fn = lambda params, x: (sum(map(jnp.sum, params.values())) + x.sum(), {})  # noqa: E731
    first = nf_jax.aggregate_gradients(profile, axis="batch", num_workers=2)
    tx = nf_jax.fresh_moments(optax.chain(first, optax.adam(1e-3)), num_steps=2)
    state = training.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    devices, shape = jax.devices()[:2], (2, 1) if mapping == "pmap" else (2,)
    if mapping == "pmap":
        step, state = training.pmap_step(loss_fn, devices=devices), training.replicate(state, devices)
    else:
        mesh = jax.make_mesh((2,), ("batch",), devices=devices, axis_types=(AxisType.Auto,))
        step, state = training.shard_map_step(loss_fn, mesh, state), training.place(state, mesh)
    counts, routes = [], []
    for number in range(16):
        state, _ = step(state, np.full(shape, np.inf if number == 9 else 0, np.float32))
        counts.append(int(np.ravel(state.opt_state[1][0].count)[0]))
        routes.append(int(nf_jax.step_info(state).routes[0]))
    assert routes == [0] * 4 + [2] * 6 + [0] * 3 + [2] * 3
    assert counts == [1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 2, 3, 4, 2, 3, 4]
