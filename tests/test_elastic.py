"""Laws of other workers than before: what the mean owes is conserved, and everything else goes on."""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from states import drawn, same_bits
from workers import AXIS

import nf_jax
from nf_jax import controller, elastic
from nf_jax.host_state import host_state, stack_state
from nf_jax.profile import CapacityLimits, Codec, HealthLimits, Phase, Profile, Region, Route

NUM_LOSSY_STEPS = 8
SHAPES = {"body/kernel": (120, 64), "body/odd": (50, 100), "half": (96, 80), "body/small": (8, 280)}
PARAMS = {path: jnp.zeros(shape) for path, shape in SHAPES.items()}
PROFILE = Profile(
    name="elastic",
    regions=(
        Region(name="body", pattern="body/.*", codec=Codec(down="ternary")),
        Region(name="half", pattern="half"),
    ),
    phases=(
        Phase(start_step=0, routes={"body": Route.SIGN, "half": Route.BF16}),
        Phase(start_step=NUM_LOSSY_STEPS, routes=dict.fromkeys(("body", "half"), Route.FP32)),
    ),
    health=HealthLimits(enabled=False),
    capacity=CapacityLimits(min_lane_bytes=0),
)
HALVES = PROFILE.model_copy(
    update={
        "regions": tuple(
            region.model_copy(
                update={"codec": region.codec.model_copy(update={"residual_dtype": "bfloat16"})}
            )
            for region in PROFILE.regions
        )
    }
)
Workers = int | tuple[int, int]


def plan_of(num_workers: Workers, profile: Profile = PROFILE) -> nf_jax.Plan:
    return nf_jax.plan(profile, PARAMS, num_workers)


def fresh(num_workers: Workers, profile: Profile = PROFILE) -> Any:
    tx = nf_jax.aggregate_gradients(profile, axis=AXIS, num_workers=num_workers)
    return tx.init(PARAMS)


@pytest.mark.parametrize("num_new", [1, 2, 3, 4, 6, 8, 9])
@pytest.mark.parametrize("num_old", [1, 2, 3, 4, 6, 8, 9])
def test_sharing_keeps_the_mean_and_enlarges_no_residual(num_old, num_new):
    rows = np.random.default_rng(0).normal(size=(num_old, 50)).astype(np.float32)
    shared = elastic.share(rows, num_new)
    np.testing.assert_allclose(shared.mean(0), rows.astype(np.float64).mean(0), atol=1e-15)
    assert (shared <= rows.max(0)).all() and (shared >= rows.min(0)).all()
    if num_new % num_old == 0:  # copies, to the bit
        np.testing.assert_array_equal(shared, np.repeat(rows, num_new // num_old, axis=0))


CHANGES = [8, 4, 6, 8, (2, 2), (4, 2), 5, 1, 3]


@pytest.mark.parametrize(("profile", "atol"), [(PROFILE, 1e-6), (HALVES, 2e-2)], ids=["f32", "bf16"])
def test_what_the_mean_owes_is_conserved_through_any_change_of_workers(profile, atol):
    """Residuals, server residuals and pads; what has no place in a plan is handed out, not lost."""
    state, missing = drawn(fresh(CHANGES[0], profile)), {}
    for num_workers in CHANGES[1:]:
        plan = plan_of(num_workers, profile)
        before = elastic.owed(state, plan)
        state, unpaid = elastic.resize(state, profile, plan)
        after = elastic.owed(state, plan)
        missing[num_workers] = sorted(unpaid)
        for path in before:
            total = after.get(path, np.float32(0)) + unpaid.get(path, np.float32(0))
            np.testing.assert_allclose(total, before[path], atol=atol, err_msg=f"{num_workers} {path}")
            assert path not in unpaid or path not in after  # wholly paid out, or wholly kept
        chex.assert_trees_all_equal_shapes_and_dtypes(state.memory, rows_of(fresh(num_workers, profile)))
    # Between 6 workers one kernel would be cut into shards of mostly pads; one worker sends nothing at all.
    assert missing[6] == ["body/small"] and missing[1] == ["body/kernel", "body/odd", "half"]
    assert not missing[4] and not missing[(2, 2)] and not missing[(4, 2)]


def rows_of(one: Any) -> Any:
    """A fresh state's memory as a host state has it, of all workers."""
    return jax.tree.map(lambda x: np.zeros((int(one.num_workers), *x.shape[1:]), x.dtype), one.memory)


def test_the_same_workers_change_nothing():
    for num_workers in (4, (2, 2)):
        state = drawn(fresh(num_workers))
        again, unpaid = elastic.resize(state, PROFILE, plan_of(num_workers))
        assert same_bits(again.memory, without_pads(state.memory, num_workers)) and not unpaid


def without_pads(memory: Any, num_workers: Workers) -> Any:
    """Drawn server residuals have numbers in their pads, which real ones have not."""
    plan, server = plan_of(num_workers), {}
    for group in plan.groups:
        for leaf, segment in zip(group.leaves, group.segments, strict=True):
            if (path := plan.paths[leaf]) in memory.server_residual:
                server[path] = elastic._cut(
                    elastic._join(
                        memory.server_residual[path].reshape(plan.num_hosts, plan.num_inner, -1), segment
                    ),
                    segment,
                )
    return memory._replace(server_residual=server)


def test_step_health_capacity_and_counters_go_on_and_routes_are_chosen_anew():
    old = drawn(fresh(8))
    new, _ = elastic.resize(old, PROFILE, plan := plan_of(6))
    for field in ("step", "health", "capacity"):
        assert same_bits(getattr(new, field), getattr(old, field))
    routes, reasons = controller.choose_routes(PROFILE, plan.lanes, old.step, old.health, old.capacity)
    np.testing.assert_array_equal(new.info.next_routes, routes)
    np.testing.assert_array_equal(new.info.next_reasons, reasons)
    was = old.info._replace(next_routes=new.info.next_routes, next_reasons=new.info.next_reasons)
    assert same_bits(new.info, was)
    assert int(new.num_workers) == 6 and new.layout.fingerprint == plan.fingerprint


def test_a_state_that_is_not_off_its_devices_or_has_no_aggregation_is_refused():
    stacked = stack_state(drawn(fresh(4)), range(4))
    with pytest.raises(ValueError, match=r"expected a host state, got pmap's; give it host_state"):
        elastic.resize(stacked, PROFILE, plan_of(2))
    with pytest.raises(ValueError, match="expected a state with an aggregate_gradients in it, found none"):
        elastic.resize({"count": 3}, PROFILE, plan_of(2))


# ------------------------------------------------------------------------------------------- training


@functools.cache
def program(num_workers: Workers) -> Any:
    """A step: (gradients `[W, ...]`, stacked state) -> (means `[W, ...]`, state)."""
    tx = nf_jax.aggregate_gradients(PROFILE, axis=AXIS, num_workers=num_workers)
    devices = jax.devices()[: int(np.prod(num_workers))]
    return jax.pmap(lambda g, s: tx.update(g, s, value=0.0), axis_name=AXIS, devices=devices)


def test_everything_is_paid_in_the_end_through_8_4_6_and_8_workers():
    """Two lossy steps with each, then an exact one: all means sum to those of plain averaging."""
    rng, sums, state = np.random.default_rng(1), [], fresh(8)
    owed: dict[str, Any] = {}
    for round_, num_workers in enumerate((8, 4, 6, 8)):
        if round_:
            state, unpaid = elastic.resize(host_state(state), PROFILE, plan_of(num_workers))
            owed = {path: owed.get(path, 0) + unpaid.get(path, 0) for path in {**owed, **unpaid}}
        state = stack_state(state, range(num_workers))
        for step in range(2 + (round_ == 3)):
            grads = {p: rng.normal(size=(num_workers, *s)).astype(np.float32) for p, s in SHAPES.items()}
            given = {p: g + owed.pop(p, np.float32(0)) for p, g in grads.items()}  # how the unpaid is paid
            means, state = program(num_workers)(given, state)
            sums.append({p: (grads[p].mean(0), np.asarray(means[p])[0]) for p in SHAPES})
            routes = [int(route) for route in nf_jax.step_info(state).routes]
            assert (max(routes) > 0) == (round_ < 3 or step < 2)
    for path in SHAPES:
        plain, paid = (np.sum([s[path][i] for s in sums], axis=0, dtype=np.float64) for i in (0, 1))
        early = np.sum([s[path][1] - s[path][0] for s in sums[:-1]], axis=0)
        assert np.abs(early).max() > 1e-3  # before the last step much was owed
        np.testing.assert_allclose(paid, plain, atol=2e-5, err_msg=path)
    assert not any(np.any(x) for x in jax.tree.leaves(host_state(state).memory))


def test_a_state_of_one_level_pays_all_it_owes_between_hosts_of_several_devices():
    old = drawn(fresh(8))._replace(step=np.int32(NUM_LOSSY_STEPS))
    plan = plan_of((2, 2))
    before = elastic.owed(old, plan)
    new, unpaid = elastic.resize(old, PROFILE, plan)
    zeros = {path: np.zeros((4, *shape), np.float32) for path, shape in SHAPES.items()}
    means, state = program((2, 2))(zeros, stack_state(new, range(4)))
    assert not unpaid and set(before) == set(SHAPES)
    for path, value in before.items():
        np.testing.assert_allclose(np.asarray(means[path])[0], value, atol=1e-6, err_msg=path)
    assert not any(np.any(x) for x in jax.tree.leaves(host_state(state).memory))
