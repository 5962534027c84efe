"""Accordion's rule, driving the library's routes: FP32 while gradients change, SIGN while they do not.

The rule is arXiv 2010.16248's: a layer is in a critical regime while the norm of its gradient, summed over
an interval, differs from the last interval's by a share of `eta` or more. There it switched ranks or
densities of other compressors; here it takes the place of `nf_jax`'s controller, with the same lanes, codecs,
error feedback and bytes. So nothing is simulated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import nf_jax
from experiments.baselines_rule import (
    BaselineState,
    Leaves,
    add_bytes,
    check_one_level,
    is_finite,
    leaf_shapes,
)
from nf_jax import AggregateState, Plan, Profile, Route, collectives
from nf_jax import regions as region_rules
from nf_jax.capacity import gather_bytes
from nf_jax.pmean import Memory
from nf_jax.profile import CapacityLimits, Codec, HealthLimits, Phase, Region
from nf_jax.telemetry import Reason


def accordion(
    axis: str,
    num_workers: int,
    *,
    eta: float = 0.5,
    interval_steps: int = 50,
    regions: Mapping[str, str] | None = None,
    codec: Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Routes every region by how much its gradient's norm changes. Follow it with any optimizer.

    Every worker sums its own raw gradients; the norms that decide are the root mean square over workers, so
    all take the same route. All is FP32 until there are two intervals to compare. The paper's other trigger,
    a learning rate that drops, is left out: schedules here fall smoothly. In `step_info` a critical lane's
    reason reads FALLBACK, and the bytes have the norms in them, which are gathered at every step.

    Args:
      axis, num_workers: see `BASELINES`.
      eta: share of change from which a regime counts as critical; 0.5 is the paper's.
      interval_steps: steps between decisions; the paper takes 10 epochs.
      regions: name -> pattern over paths of leaves; None: every leaf by itself, as in the paper.
      codec: how SIGN is encoded; None: `nf_jax`'s defaults.
    """
    check_one_level(num_workers)
    if not eta > 0 or interval_steps < 1:
        raise ValueError(
            f"accordion: expected eta above 0 and interval_steps of at least 1, got {eta}, {interval_steps}"
        )

    def plan_of(tree: Any) -> tuple[Any, Plan]:
        profile = accordion_profile(tree, regions=regions, codec=codec)
        inner = nf_jax.aggregate_gradients(profile, axis=axis, num_workers=num_workers)
        return inner, nf_jax.plan(profile, tree, num_workers)

    def init_fn(params: Any) -> Any:
        inner, plan = plan_of(params)
        aggregate, num_regions = inner.init(params), max(plan.leaf_regions) + 1
        summed = {path: jnp.zeros((1, *shape), jnp.float32) for path, shape in leaf_shapes(params).items()}
        shared = {"norms": jnp.full((num_regions,), jnp.nan), "critical": jnp.ones((num_regions,), bool)}
        aggregate = aggregate._replace(memory=_join(aggregate.memory, summed))
        return BaselineState(_route(plan, aggregate, shared["critical"]), shared)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        inner, plan = plan_of(updates)
        memory, summed = _part(state.aggregate.memory)
        means, after = inner.update(updates, state.aggregate._replace(memory=memory), params, **extra_args)

        summed = _add(summed, updates, is_finite(after))
        norms, last = _norms(plan, summed, axis), state.shared["norms"]
        critical = ~(jnp.abs(norms - last) < eta * last)  # no norm before it: NaN, so critical
        ends = after.step % interval_steps == 0
        shared = {
            "norms": jnp.where(ends, norms, last),
            "critical": jnp.where(ends, critical, state.shared["critical"]),
        }
        summed = {path: jnp.where(ends, 0, total) for path, total in summed.items()}
        wire = add_bytes(after.info.wire, gather_bytes(norms.nbytes, num_workers))
        after = after._replace(memory=_join(after.memory, summed), info=after.info._replace(wire=wire))
        return means, BaselineState(_route(plan, after, shared["critical"]), shared)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def accordion_profile(
    params: Any, *, regions: Mapping[str, str] | None = None, codec: Codec | None = None
) -> Profile:
    """The profile whose regions `accordion` decides about: every leaf by itself, unless they are given."""
    shapes = leaf_shapes(params)
    patterns = regions or {f"leaf_{i}": re.escape(path) or ".*" for i, path in enumerate(shapes)}
    return Profile(
        name="accordion",
        regions=tuple(Region(name=n, pattern=p, codec=codec or Codec()) for n, p in patterns.items()),
        phases=(Phase(start_step=0, routes=dict.fromkeys(patterns, Route.SIGN)),),
        health=HealthLimits(enabled=False),
        capacity=CapacityLimits(min_lane_bytes=0),
    )


def _add(summed: Leaves, updates: Any, ok: Array) -> Leaves:
    leaves = dict(region_rules.leaves_with_paths(updates)[0])
    added = {path: total + leaves[path].astype(jnp.float32) for path, total in summed.items()}
    return {path: jnp.where(ok, added[path], total) for path, total in summed.items()}


def _norms(plan: Plan, summed: Leaves, axis: str) -> Array:
    """Norms by region, `f32[R]`: root mean square over workers, the same bits on all."""
    squared = jnp.stack([jnp.sum(total * total) for total in summed.values()])
    own = jax.ops.segment_sum(squared, np.asarray(plan.leaf_regions), max(plan.leaf_regions) + 1)
    return jnp.sqrt(collectives.gather(own, axis).mean(0))


def _route(plan: Plan, aggregate: AggregateState, critical: Array) -> AggregateState:
    """Overrules the controller: the routes of the next step, by region."""
    fixed = plan.lanes.fixed
    is_exact = np.asarray([reason is not None for reason in fixed])
    static = np.asarray([Reason.PROFILE if reason is None else reason for reason in fixed], np.int32)
    in_fp32 = critical[np.asarray(plan.lanes.regions, np.int32)]
    routes = jnp.where(in_fp32 | is_exact, np.int32(Route.FP32), np.int32(Route.SIGN))
    reasons = jnp.where(in_fp32 & ~is_exact, np.int32(Reason.FALLBACK), static)
    return aggregate._replace(info=aggregate.info._replace(next_routes=routes, next_reasons=reasons))


_SUMMED = "summed: "


def _join(memory: Memory, summed: Leaves) -> Memory:
    """Keeps the sums where the state keeps all that differs between workers."""
    return memory._replace(residual=memory.residual | {_SUMMED + path: leaf for path, leaf in summed.items()})


def _part(memory: Memory) -> tuple[Memory, Leaves]:
    """The inverse of `_join`."""
    summed = {k[len(_SUMMED) :]: leaf for k, leaf in memory.residual.items() if k.startswith(_SUMMED)}
    residual = {path: leaf for path, leaf in memory.residual.items() if not path.startswith(_SUMMED)}
    return memory._replace(residual=residual), summed
