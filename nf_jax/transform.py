"""The optax transform: where the data plane and the control plane meet. Start reading here.

A gradient's path, in `update_fn`: plan (static) -> signals -> average by the routes chosen one step ago ->
health, capacity -> the routes of the next step. NEURON-Fabric: arXiv 2606.25759, 2606.15045.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from nf_jax import capacity, collectives, controller, health, regions
from nf_jax.candidates import Candidate, to_candidates
from nf_jax.plan import MAX_STACKED_SIZE, Plan
from nf_jax.plan import plan as make_plan
from nf_jax.pmean import Memory, average, init_memory
from nf_jax.profile import Profile, Route, to_route
from nf_jax.shadow import ShadowPlan, exact_profile, init_shadow, observe, shadow_plan
from nf_jax.stages import Substrate
from nf_jax.state import AggregateState, Layout, ShadowState
from nf_jax.telemetry import Signals, StepInfo


def aggregate_gradients(
    profile: Profile,
    *,
    axis: collectives.AxisName,
    num_workers: int | tuple[int, int],
    substrate: Substrate | None = None,
    routes: Sequence[int] | None = None,
    shadow: bool | Sequence[Candidate] = False,
) -> optax.GradientTransformationExtraArgs:
    """Averages local gradients over workers, per lane as sign counts or in full precision.

    Takes the place of `jax.lax.pmean(grads, axis)`. Put it first in `optax.chain`: it must see the whole
    tree of raw local gradients (loss scaling undone, nothing clipped); clipping, `optax.masked`,
    `optax.apply_if_finite` and the optimizer come after it, and see the mean. Wrapped *around* it,
    `apply_if_finite` deadlocks when one worker alone has a NaN, `masked` leaves what it masks unaveraged
    (an error here), and `MultiSteps` communicates on every mini-step: accumulate gradients yourself and
    call `update` once (`nf_jax.training` does).

    Routes are derived from reduced signals and from a state that is the same on all workers; what differs
    would deadlock. Where JAX tracks it (`shard_map` with `check_vma=True`) such a state is an error; under
    pmap and `check_vma=False` nothing can tell, so never branch on, or restore, what is a worker's own.

    Aggregation does not overlap with the backward pass in this version.

    Args:
      profile: what may travel how, and when.
      axis: name of the data-parallel axis of the surrounding `pmap` or `shard_map`, or a tuple of names.
      num_workers: its size; the state depends on it, and `init` may run outside the mapped function. A pair
        `(hosts, devices)` makes two levels: devices of a host average exactly among themselves, and only
        their means take the routes, between hosts (residuals are 1/devices of the size). `axis` is then
        `(outer, inner)`, or one name whose members are grouped host by host.
      substrate: what `nf-jax probe` measured between these workers: lanes that it predicts to gain too
        little by going low-bit stay in FP32. Without one only the profile's size floor applies.
      routes: pins the routes: one per lane, compiled in without a switch. The controller still says in
        `step_info(state).next_routes` what it would choose, so that a host loop can change programs.
      shadow: train exactly, whatever the profile's routes, and find out what low bits would have done: every
        step also travels by each candidate (True: `candidates.DEFAULT_CANDIDATES`), with residuals of its
        own, and `shadow_info(state)` compares, leaf by leaf, what would have come back with the true mean.
        The updates are the bits of `Profile.static("FP32")`. It costs time (8 times the CPU
        time of an FP32 step with all five, on the digits MLP), the candidates' bytes (counted in
        `step_info(state).wire_bytes`), and an f32 copy of the parameters for each candidate.

    Returns:
      An optax transform. Its `update` takes `value=` (this worker's loss, `f32[]`) and `reducer_load=`
      (a host-measured load of the reducer, 1 is full) as keyword arguments, given by all workers or by
      none; both are reduced over workers and act one step later. The updates it returns are means, in the
      gradients' dtypes.

    Raises:
      ValueError: at trace time, for anything that would go wrong silently: see the tests' names.

    Example:
      >>> import jax, optax, nf_jax
      >>> tx = optax.chain(
      ...     nf_jax.aggregate_gradients(nf_jax.Profile.static("SIGN"), axis="batch", num_workers=1),
      ...     optax.sgd(0.1),
      ... )
      >>> params = {"kernel": jax.numpy.ones((4, 4))}
      >>> step = jax.pmap(lambda g, s: tx.update(g, s, value=0.0), axis_name="batch")
      >>> stack = lambda tree: jax.tree.map(lambda x: x[None], tree)
      >>> updates, state = step(stack(params), stack(tx.init(params)))
    """
    if not isinstance(profile, Profile):
        raise ValueError(f"profile: expected an nf_jax.Profile, got {type(profile).__name__}")
    if substrate is not None:
        substrate.check_backend(jax.default_backend())
    pinned = None if routes is None else tuple(to_route(route) for route in routes)
    candidates = to_candidates(shadow)
    if candidates and pinned is not None:
        raise ValueError(
            "routes: expected None with shadow, where every lane travels in FP32, got pinned ones"
        )
    axis = axis if isinstance(axis, str) else tuple(axis)
    if isinstance(num_workers, (tuple, list)) and not isinstance(axis, str) and len(axis) != 2:
        raise ValueError(
            f"axis: expected (outer, inner) or one name for num_workers={num_workers!r}, got {axis!r}"
        )

    trained = exact_profile(profile) if candidates else profile

    def plan_both(tree: Any) -> tuple[Plan, ShadowPlan | None]:
        planned = make_plan(trained, tree, num_workers, substrate=substrate)
        if not candidates:
            return planned, None
        beside = shadow_plan(profile, tree, num_workers, candidates)
        sent = planned.overhead_bytes + beside.wire_bytes
        return dataclasses.replace(planned, overhead_bytes=sent), beside

    def init_fn(params: Any) -> Any:
        _check_unmasked(params)
        planned, beside = plan_both(params)
        state = _init(trained, planned)
        if beside is None:
            return state
        return state._replace(shadow=ShadowState(*init_shadow(beside), Layout(beside.fingerprint)))

    def update_fn(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        value: Any = None,
        reducer_load: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        del params, extra_args
        _check_unmasked(updates)
        named, treedef = regions.leaves_with_paths(updates)
        plan, beside = plan_both(updates)
        leaves = [leaf for _, leaf in named]
        _check_call(plan, beside, leaves, state, axis)

        own = _own_numbers(plan, len(trained.regions), leaves, value, reducer_load)
        exact, gathered = collectives.mean_and_gather([leaves[i] for i in plan.exact], own, axis)
        signals, ok = _signals(gathered, len(trained.regions), has_loss=value is not None)
        chosen = jnp.asarray(state.info.next_routes) if pinned is None else pinned
        seed = _seed(state.step)
        result = average(
            plan, chosen, leaves, state.memory, state.pending, axis, seed=seed, ok=ok, exact=exact
        )
        signals = signals._replace(agreement=result.agreement, residual_ratio=result.residual_ratio)

        new_state = _advance(trained, plan, state, jnp.asarray(chosen, jnp.int32), signals)
        new_state = new_state._replace(pending=result.pending, memory=result.memory)
        if beside is not None:
            found = observe(
                beside, leaves, result.means, state.shadow.memory, axis, step=state.step, seed=seed, ok=ok
            )
            new_state = new_state._replace(shadow=ShadowState(*found, state.shadow.layout))
        return jax.tree.unflatten(treedef, result.means), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init(profile: Profile, plan: Plan) -> AggregateState:
    num_regions, num_lanes = len(profile.regions), plan.num_lanes
    states = health.init(profile.health, num_regions, num_lanes), capacity.init(profile.capacity)
    step = jnp.int32(0)
    routes, reasons = controller.choose_routes(profile, plan.lanes, step, *states)
    signals = Signals(
        loss=jnp.float32(0),
        has_loss=jnp.asarray(False),
        nonfinite=jnp.zeros((num_regions,), jnp.int32),
        gradient_norm=jnp.zeros((num_regions,), jnp.float32),
        agreement=jnp.full((num_lanes,), -1, jnp.float32),
        residual_ratio=jnp.zeros((num_lanes,), jnp.float32),
        reducer_load=jnp.float32(0),
    )
    info = _info(plan, jnp.int32(-1), jnp.zeros((num_lanes,), jnp.int32), signals, *states)
    info = info._replace(
        reasons=reasons, next_routes=routes, next_reasons=reasons, wire=jnp.zeros((2,), jnp.int32)
    )
    return AggregateState(
        step=step,
        pending=jnp.zeros((len(plan.groups),), bool),
        memory=init_memory(plan),
        health=states[0],
        capacity=states[1],
        info=info,
        num_workers=jnp.int32(plan.num_workers),
        layout=Layout(plan.fingerprint, plan.num_inner),
    )


def _own_numbers(plan: Plan, num_regions: int, leaves: Sequence[Any], value: Any, reducer_load: Any) -> Array:
    """What this worker contributes to the step's signals: loss, load, and per region squared norm and count
    of leaves that are not finite."""
    squared, owners = _squared_norms(plan, leaves)
    is_bad = (~jnp.isfinite(squared)).astype(jnp.float32)
    by_region = jax.ops.segment_sum(jnp.stack([squared, is_bad], axis=1), owners, num_regions)
    own = jnp.stack([_scalar(value, "value"), _scalar(reducer_load, "reducer_load")])
    return jnp.concatenate([own, by_region.T.reshape(-1)])


def _signals(gathered: Array, num_regions: int, has_loss: bool) -> tuple[Signals, Array]:
    """The step's signals from every worker's numbers, `f32[W, n]`, and whether all is finite."""
    mean, total = gathered.mean(0), gathered.sum(0)
    nonfinite = total[2 + num_regions :].astype(jnp.int32)
    signals = Signals(
        loss=mean[0],
        has_loss=jnp.asarray(has_loss),
        nonfinite=nonfinite,
        gradient_norm=jnp.sqrt(mean[2 : 2 + num_regions]),
        agreement=jnp.zeros((), jnp.float32),
        residual_ratio=jnp.zeros((), jnp.float32),
        reducer_load=gathered[:, 1].max(),
    )
    return signals, jnp.sum(nonfinite) == 0


def _squared_norms(plan: Plan, leaves: Sequence[Any]) -> tuple[Array, np.ndarray]:
    """Squared norms of the local gradients, `f32[n]`, and the region each belongs to.

    Small leaves of one shape are taken together: one reduction instead of hundreds to compile.
    """
    alike: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if i not in plan.idle and jnp.issubdtype(leaf.dtype, jnp.inexact):
            alone = leaf.size > MAX_STACKED_SIZE
            alike.setdefault((leaf.shape, leaf.dtype, i if alone else None), []).append(i)
    if not alike:
        return jnp.zeros((1,), jnp.float32), np.zeros((1,), np.int32)
    parts = [
        _squares(jnp.concatenate([leaves[i].reshape(1, -1) for i in members])) for members in alike.values()
    ]
    order = [i for members in alike.values() for i in members]
    return jnp.concatenate(parts), np.asarray([plan.leaf_regions[i] for i in order], np.int32)


def _squares(stack: Array) -> Array:
    """Sums of squares in f32, `[k, n]` -> `f32[k]`."""
    if jnp.issubdtype(stack.dtype, jnp.complexfloating):
        stack = jnp.concatenate([stack.real, stack.imag], axis=1)
    if stack.dtype == jnp.float32:
        # As a product: three times as fast on CPU as a sum of squares.
        return jnp.einsum("kn,kn->k", stack, stack, precision=jax.lax.Precision.HIGHEST)
    # A product would have its operand written out in f32, twice the size of the gradient.
    return jnp.sum(jnp.square(stack.astype(jnp.float32)), axis=1)


def _scalar(value: Any, name: str) -> Array:
    scalar = jnp.asarray(0.0 if value is None else value)
    if scalar.ndim:
        raise ValueError(
            f"{name}: expected a scalar, this worker's own number, got shape {scalar.shape}; reduce it first "
            "(the mean of a batch's losses, the largest of several loads)"
        )
    return scalar.astype(jnp.float32)


def _seed(step: Array) -> Array:
    return (step.astype(jnp.uint32) + jnp.uint32(1)) * jnp.uint32(0x9E3779B9) >> jnp.uint32(3)


def _advance(
    profile: Profile, plan: Plan, state: AggregateState, routes: Array, signals: Signals
) -> AggregateState:
    """The control plane's part of a step: next states, next routes, what to report."""
    next_step = jnp.asarray(optax.safe_increment(state.step))
    next_health, next_capacity, next_routes, next_reasons = controller.advance(
        profile, plan.lanes, next_step, state.health, state.capacity, signals
    )
    info = _info(plan, state.step, routes, signals, next_health, next_capacity)._replace(
        reasons=state.info.next_reasons, next_routes=next_routes, next_reasons=next_reasons
    )
    return state._replace(step=next_step, health=next_health, capacity=next_capacity, info=info)


def _info(
    plan: Plan,
    step: Array,
    routes: Array,
    signals: Signals,
    health_state: health.HealthState,
    capacity_state: capacity.CapacityState,
) -> StepInfo:
    table = np.asarray(plan.lanes.wire_bytes, np.int64).reshape(plan.num_lanes, len(Route))
    lanes = np.arange(plan.num_lanes)
    high, low = jnp.asarray(table >> 16, jnp.int32), jnp.asarray(table & 0xFFFF, jnp.int32)
    high, low = jnp.sum(high[lanes, routes]), jnp.sum(low[lanes, routes])
    low = low + jnp.int32(plan.overhead_bytes)
    return StepInfo(
        step=step,
        routes=routes,
        reasons=jnp.zeros_like(routes),
        next_routes=jnp.zeros_like(routes),
        next_reasons=jnp.zeros_like(routes),
        wire=jnp.stack([high + (low >> 16), low & 0xFFFF]),
        fp32_wire=jnp.asarray([plan.fp32_bytes >> 16, plan.fp32_bytes & 0xFFFF], jnp.int32),
        health_state=health_state.state,
        trigger=health_state.trigger,
        trips=health_state.trips,
        saturated=capacity_state.saturated,
        signals=signals,
    )


# --------------------------------------------------------------------------------------------- checks


def _check_unmasked(tree: Any) -> None:
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    if any(map(is_masked, jax.tree.leaves(tree, is_leaf=is_masked))):
        raise ValueError(
            "aggregate_gradients: expected the whole gradient tree, got one with masked leaves: optax.masked "
            "(or multi_transform) is wrapped around it, and what it masks would never be averaged. Put it "
            "first and mask what follows: optax.chain(aggregate_gradients(...), optax.masked(inner, mask))."
        )


def _check_call(
    plan: Plan,
    beside: ShadowPlan | None,
    leaves: Sequence[Any],
    state: AggregateState,
    axis: collectives.AxisName,
) -> None:
    if not isinstance(state, AggregateState):
        raise ValueError(f"state: expected the AggregateState of this transform, got {type(state).__name__}")
    collectives.check_axis(axis, plan.num_workers, plan.num_inner)
    moving = [i for i in range(len(leaves)) if i not in plan.idle]
    collectives.check_local([leaves[i] for i in moving], [plan.paths[i] for i in moving], axis)
    _check_state(plan, state.memory, state.layout)
    if (state.shadow is None) != (beside is None):
        asked, got = ("with", "without") if beside is not None else ("without", "with")
        raise ValueError(
            f"state: expected one that was made {asked} shadow, as this transform is, got one {got} shadow. "
            "Call init anew."
        )
    if beside is not None and state.shadow is not None:
        if state.shadow.layout.fingerprint != beside.fingerprint:
            raise ValueError(
                "state: expected one that was made for these shadow candidates, got one of others. Call "
                "init anew."
            )
        for planned, memory in zip(beside.plans, state.shadow.memory, strict=True):
            _check_memory(planned, memory, "shadow ")
    for path, leaf in regions.leaves_with_paths(state._replace(memory=(), shadow=None))[0]:
        collectives.check_uniform(jnp.asarray(leaf), axis, f"state: {path}")


def _check_state(plan: Plan, memory: Memory, layout: Layout) -> None:
    _check_memory(plan, memory)
    if layout.fingerprint != plan.fingerprint:
        raise ValueError(
            "state: expected one that was made with this substrate and this profile's regions, buckets, "
            "routes and codecs, got one of others. Call init anew; health limits alone may differ."
        )


def _check_memory(plan: Plan, memory: Memory, whose: str = "") -> None:
    want = jax.eval_shape(lambda: init_memory(plan))
    for field, expected in want._asdict().items():
        found = getattr(memory, field)
        for path in {**expected, **found}:
            shapes = [getattr(tree.get(path), "shape", None) for tree in (expected, found)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"state: expected {whose}{field} {path!r} of shape {shapes[0]} (one worker's view), got "
                    f"{shapes[1]}. Either the state was made for another model, profile or num_workers (call "
                    "init anew), or it entered the mapped function under the wrong PartitionSpec: use "
                    "state_spec(state, axis) and shard_state(state, mesh) with shard_map, "
                    "flax.jax_utils.replicate(state) with pmap."
                )
