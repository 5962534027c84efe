"""Agreement: every worker holds the same means and the same state, to the bit, however routes change.

A long run under changing routes; then all that a route, a tie or a state may be derived from: what differs
between workers is reduced first, or refused at trace time where JAX's types tell it.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from workers import AXIS, mapped, mesh_of, rows_are_equal

import nf_jax
from nf_jax import Profile, Route
from nf_jax.health import Trigger
from nf_jax.profile import CapacityLimits, Codec, HealthLimits, Phase, Region
from nf_jax.state import AggregateState

FP32, BF16, SIGN, TERNARY = Route
W = 4
PARAMS = {
    "body": {"half": np.zeros((2048,), jnp.bfloat16), "kernel": np.zeros((64, 32), np.float32)},
    "head": {"kernel": np.zeros((32, 10), np.float32)},
}


_ROUTES = [SIGN, TERNARY, BF16, FP32]
PROFILE = Profile(  # the body goes by another route every 30 steps, the head stays exact
    name="changing",
    regions=(
        Region(name="body", pattern="body/.*", codec=Codec(scale="rank1")),
        Region(name="head", pattern="head/.*"),
    ),
    phases=(
        Phase(start_step=0, routes={"head": FP32, "body": SIGN}),
        *(Phase(start_step=30 * n, routes={"body": _ROUTES[n % 4]}) for n in range(1, 32)),
    ),
    health=HealthLimits(warmup_steps=5, cooldown_steps=4, probation_steps=4, max_trips=1000),
    capacity=CapacityLimits(min_lane_bytes=0, hold_steps=2),
)


def gradients(rng: np.random.Generator, step: int) -> Any:
    """Ordinary ones; now and then one that is zero, huge, or not finite on one worker."""
    found = jax.tree.map(lambda p: rng.normal(size=(W, *p.shape)).astype(p.dtype), PARAMS)
    if step % 197 == 50:
        found["body"]["kernel"][step % W, 3, 5] = [np.nan, np.inf, 1e38][step % 3]
    if step % 89 == 40:
        found["body"]["half"][:] = 0
    if step % 83 == 30:
        found["body"]["kernel"] *= np.float32(1e-30)
    return found


def transform() -> Any:
    return nf_jax.aggregate_gradients(PROFILE, axis=AXIS, num_workers=W)


def stacked_state() -> AggregateState:
    return jax.tree.map(lambda x: np.stack([x] * W), transform().init(PARAMS))


QUIET = np.zeros((W, 2), np.float32)  # loss and load


@functools.cache
def compiled(num_transforms: int = 1) -> Any:
    """A step of transforms whose whole states are `[W, ...]`, so that what must be equal is seen to be.

    A compiled program cannot be traced again: another shape, dtype or way of routing would be an error.
    """
    txs = [transform() for _ in range(num_transforms)]

    def step(local: Any, _: Any) -> Any:
        return [
            tx.update(given, state, value=signals[0], reducer_load=signals[1])
            for tx, (given, state, signals) in zip(txs, local, strict=True)
        ]

    given = (gradients(np.random.default_rng(0), 0), stacked_state(), QUIET)
    return mapped(step, W, "unchecked").lower([given] * num_transforms, None).compile()


def test_a_thousand_steps_under_changing_routes_agree_to_the_bit_in_one_program():
    state = stacked_state()
    memory = state.memory
    rng, routes, triggers = np.random.default_rng(1), [], set()
    for number in range(1000):
        loss = rng.normal(size=W) + (50 if number % 101 == 90 else 0)
        load = np.where(rng.random(W) < 0.001, 0.97, 0.1)  # of one worker, seldom
        signals = np.stack([loss, load], 1).astype(np.float32)
        ((means, state),) = compiled()([(gradients(rng, number), state, signals)], None)
        assert rows_are_equal(means), number
        assert rows_are_equal(state._replace(memory=())), number
        info = jax.tree.map(lambda x: np.asarray(x)[0], state.info)
        routes.append(tuple(info.routes.tolist()))
        triggers |= {Trigger(t) for t in info.trigger.tolist()}
        memory = state.memory if any(routes[-1]) else memory
    flips = sum(one != other for one, other in itertools.pairwise(routes))
    assert flips >= 20 and {route for step in routes for route in step} == set(Route)
    assert sum(any(step) for step in routes) > 400
    assert Trigger.NONFINITE in triggers and int(state.health.trips[0, 0]) >= 5
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(memory))
    rows = np.asarray(memory.residual["body/kernel"]).reshape(W, -1)
    assert all((rows[0] != row).any() for row in rows[1:])  # what may differ does


def test_two_transforms_in_one_program_are_each_as_if_alone():
    """A GAN's two optimizers: one trips and falls back, the other does not hear of it."""
    starts = [stacked_state() for _ in range(2)]
    together, alone = list(starts), list(starts)
    for number in range(24):
        rngs = [np.random.default_rng([number, which]) for which in range(2)]
        given = [gradients(rngs[0], 0), gradients(rngs[1], 0)]
        if number == 8:
            given[1]["body"]["kernel"][2, 3, 5] = np.nan
        steps = compiled(2)([(g, state, QUIET) for g, state in zip(given, together, strict=True)], None)
        for which in range(2):
            ((means, alone[which]),) = compiled()([(given[which], alone[which], QUIET)], None)
            jax.tree.map(np.testing.assert_array_equal, tuple(steps[which]), (means, alone[which]))
        together = [state for _, state in steps]
    trips = [np.asarray(state.health.trips)[0].tolist() for state in together]
    assert trips == [[0, 0], [1, 1]]


def test_a_run_is_repeatable_to_the_bit():
    ends = []
    for _ in range(2):
        rng, state, means = np.random.default_rng(2), stacked_state(), None
        for number in range(40, 75):
            ((means, state),) = compiled()([(gradients(rng, number), state, QUIET)], None)
        ends.append(jax.tree.map(np.asarray, (means, state)))
    jax.tree.map(np.testing.assert_array_equal, *ends)


# --------------------------------------------------------------- what may not differ between workers


def differ(value: jax.Array) -> jax.Array:
    """The same number, but typed as each worker's own."""
    return jax.lax.pcast(value, AXIS, to="varying")


FIELDS = {
    "routes": lambda s: s._replace(info=s.info._replace(next_routes=differ(s.info.next_routes))),
    "pending": lambda s: s._replace(pending=differ(s.pending)),
    "step": lambda s: s._replace(step=differ(s.step)),
    "health": lambda s: s._replace(health=s.health._replace(state=differ(s.health.state))),
    "capacity": lambda s: s._replace(capacity=s.capacity._replace(saturated=differ(s.capacity.saturated))),
}


@pytest.mark.parametrize("field", FIELDS)
def test_a_state_that_differs_between_workers_is_refused_at_trace_time(field: str):
    tx = transform()
    spec = nf_jax.state_spec(tx.init(PARAMS), AXIS)

    def step(local: Any, state: Any) -> Any:
        return tx.update(jax.tree.map(lambda x: x[0], local), FIELDS[field](state))[0]

    function = jax.shard_map(step, mesh=mesh_of(W), in_specs=(P(AXIS), spec), out_specs=P())
    placed = gradients(np.random.default_rng(0), 0), nf_jax.shard_state(tx.init(PARAMS), mesh_of(W))
    with pytest.raises(ValueError, match=rf"{field}.* differs between the workers of axis 'batch'"):
        jax.eval_shape(function, *placed)


def test_a_seed_that_differs_between_workers_is_refused_at_trace_time():
    plan = nf_jax.plan(PROFILE, PARAMS, W)

    def average(local: Any, _: Any) -> Any:
        seed = jax.lax.axis_index(AXIS)
        return nf_jax.pmean(local, plan, [FP32] * plan.num_lanes, axis=AXIS, seed=seed)[0]

    with pytest.raises(ValueError, match="seed differs between the workers"):
        jax.eval_shape(mapped(average, W, "checked"), gradients(np.random.default_rng(0), 0), None)
