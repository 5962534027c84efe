"""Shadow mode: gradients travel exactly, and beside them as every candidate would send them, to be compared.

A candidate runs the data plane itself (`pmean.average` with pinned routes) on the step's gradients, with
residuals of its own, at every step: what it would have built up by error feedback is what it has here, to
the bit. Only its means go nowhere but into `ShadowInfo`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from nf_jax import buckets, capacity, collectives, costs, wire
from nf_jax.candidates import Candidate, ShadowLeaves, to_candidates
from nf_jax.groups import nonzero
from nf_jax.plan import MAX_STACKED_SIZE, Plan, plan
from nf_jax.pmean import Memory, Result, average, init_memory
from nf_jax.profile import Phase, Profile, Route
from nf_jax.stages import Substrate
from nf_jax.telemetry import ShadowInfo

# --------------------------------------------------------------------------------------------- planning


@dataclasses.dataclass(frozen=True)
class ShadowPlan:
    """What a shadow run compares. Static; recomputed at trace time, as `Plan` is.

    Attributes:
      plans: for each candidate, the plan by which all leaves travel.
      leaves: candidates, leaves, and bytes; what a shadow trace has to know.
    """

    plans: tuple[Plan, ...]
    leaves: ShadowLeaves

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.leaves.candidates

    @property
    def watched(self) -> tuple[int, ...]:
        """Positions of the leaves that candidates can send; it is for the shape to say, not for a codec."""
        return tuple(np.flatnonzero(self.leaves.lossy).tolist())

    @property
    def wire_bytes(self) -> int:
        """Bytes that the shadow itself makes a worker send in a step."""
        first = self.plans[0]
        sent = sum(
            capacity.group_bytes(
                candidate.route, group.segments, len(group.lanes), group.codec, planned.num_hosts
            )
            for candidate, planned in zip(self.candidates, self.plans, strict=True)
            for group in planned.groups
        )
        num_values = len(self.candidates) * len(self.watched)
        return sent + wire.gather_bytes(num_values, first.num_hosts, first.num_inner)

    @property
    def fingerprint(self) -> str:
        """What the shadow's memory depends on, hashed."""
        parts = [(c.name, p.fingerprint) for c, p in zip(self.candidates, self.plans, strict=True)]
        return f"{zlib.crc32(repr(parts).encode()):08x}"


def exact_profile(profile: Profile) -> Profile:
    """The profile by which a shadow run trains: its regions, buckets and limits, every route FP32."""
    phase = Phase(start_step=0, routes=dict.fromkeys(profile.region_names, Route.FP32))
    return profile.model_copy(update={"phases": (phase,)})


def candidate_profile(profile: Profile, candidate: Candidate) -> Profile:
    """All leaves by one candidate from the first step on, protected ones too, in the profile's buckets."""
    static = Profile.static(candidate.route, **candidate.codec.model_dump())
    return static.model_copy(update={"buckets": profile.buckets})


def shadow_plan(
    profile: Profile,
    params: Any,
    num_workers: int | tuple[int, int],
    shadow: bool | Sequence[Candidate] = True,
    *,
    substrate: Substrate | None = None,
) -> ShadowPlan:
    """Plans a shadow run over a gradient tree shaped like `params`.

    Args:
      profile: names the regions, forms the buckets; its routes are not looked at.
      params: a pytree of arrays, or of anything with a shape and a dtype.
      num_workers: as `aggregate_gradients` takes it.
      shadow: True for the default candidates, or candidates.
      substrate: what was measured between these workers; adds predicted seconds.

    Returns:
      The plan; its `leaves` are what `ShadowWriter` takes.

    Raises:
      ValueError: as `plan`, or no candidates.

    Example:
      >>> import jax, nf_jax
      >>> params = {"dense": jax.ShapeDtypeStruct((512, 512), "float32")}
      >>> leaves = nf_jax.shadow_plan(nf_jax.Profile.static("SIGN"), params, num_workers=8).leaves
      >>> [round(row[0] / leaves.fp32_bytes[0], 3) for row in leaves.wire_bytes]
      [0.5, 0.032, 0.034, 0.082, 0.05]
    """
    candidates = to_candidates(shadow)
    if not candidates:
        raise ValueError("shadow_plan: expected True or candidates, got False: there is nothing to compare")
    exact = plan(exact_profile(profile), params, num_workers)
    profiles = [candidate_profile(profile, candidate) for candidate in candidates]
    plans = tuple(plan(candidate, params, num_workers) for candidate in profiles)
    lossy = {leaf for group in plans[0].groups for leaf in group.leaves}
    priced: dict[str, Any] = {}
    if substrate is not None:
        substrate.check_workers(exact.num_hosts)
        pairs = zip(profiles, plans, candidates, strict=True)
        priced["seconds"] = tuple(leaf_seconds(f, p, c.route, substrate) for f, p, c in pairs)
        priced["fp32_seconds"] = leaf_seconds(profiles[0], plans[0], Route.FP32, substrate)
    leaves = ShadowLeaves(
        num_workers=(exact.num_hosts, exact.num_inner) if exact.num_inner > 1 else exact.num_workers,
        candidates=candidates,
        paths=exact.paths,
        shapes=exact.shapes,
        dtypes=exact.dtypes,
        regions=tuple(profile.region_names[region] for region in exact.leaf_regions),
        order=buckets.backward_order(exact.paths, profile.buckets.order),
        lossy=tuple(leaf in lossy for leaf in range(len(exact.paths))),
        fp32_bytes=leaf_bytes(plans[0], Route.FP32),
        wire_bytes=tuple(leaf_bytes(p, c.route) for p, c in zip(plans, candidates, strict=True)),
        **priced,
    )
    return ShadowPlan(plans, leaves)


def leaf_bytes(planned: Plan, route: Route) -> tuple[int, ...]:
    """Bytes that one worker sends of every leaf by `route`; a lane's add up to the lane's.

    What leaves of a lane share (a sketch, statistics, rounding) is divided by what each would cost alone.
    """
    alone = {
        leaf: capacity.group_bytes(route, [segment], 1, group.codec, planned.num_hosts)
        for group in planned.groups
        for leaf, segment in zip(group.leaves, group.segments, strict=True)
    }
    plain = {leaf: (planned.shapes[leaf], planned.dtypes[leaf]) for leaf in planned.exact}
    levels = planned.num_workers, planned.num_inner
    found = np.zeros(len(planned.paths), np.int64)
    for members, row in zip(planned.lane_leaves, planned.lanes.wire_bytes, strict=True):
        exact = [leaf for leaf in members if leaf in plain]
        packed = [leaf for leaf in members if leaf in alone]
        sent = wire.plain_leaf_bytes([plain[leaf] for leaf in exact], *levels)
        each = [wire.plain_leaf_bytes([plain[leaf]], *levels) for leaf in exact]
        found[exact] = _shares(sent, each)
        found[packed] = _shares(row[route] - sent, [alone[leaf] for leaf in packed])
    return tuple(found.tolist())


def _shares(total: int, weights: Sequence[int]) -> np.ndarray:
    """Whole parts of `total` in these proportions, `int64[n]`; they add up to it."""
    upto = np.cumsum(np.asarray(weights, float))
    return np.diff(np.rint(total * upto / max(upto[-1:].sum(), 1)).astype(np.int64), prepend=0)


def leaf_seconds(profile: Profile, planned: Plan, route: Route, substrate: Substrate) -> tuple[float, ...]:
    """Predicted seconds of every leaf by `route`: its part of its lane's, by elements."""
    sizes = np.asarray([np.prod(shape) for shape in planned.shapes], float)
    found = np.zeros(len(sizes))
    seconds = costs.lane_seconds(profile, planned.lanes, substrate)[:, route]
    for members, total in zip(planned.lane_leaves, seconds, strict=True):
        own = sizes[list(members)]
        found[list(members)] = total * own / own.sum()
    return tuple(found.tolist())


# -------------------------------------------------------------------------------------------- observing


def init_shadow(planned: ShadowPlan) -> tuple[tuple[Memory, ...], ShadowInfo]:
    """Nothing left unsent by any candidate, nothing measured yet: one worker's view."""
    shape = (len(planned.candidates), len(planned.leaves.paths))
    nothing = jnp.full(shape, jnp.nan, jnp.float32)
    return tuple(map(init_memory, planned.plans)), ShadowInfo(jnp.int32(-1), *[nothing] * 4)


def observe(
    planned: ShadowPlan,
    leaves: Sequence[Any],
    means: Sequence[Any],
    memories: Sequence[Memory],
    axis: collectives.AxisName,
    *,
    step: Array,
    seed: Array,
    ok: Array,
) -> tuple[tuple[Memory, ...], ShadowInfo]:
    """Sends the step's gradients by every candidate, and compares what comes back with the true means.

    Args:
      planned: the shadow plan (static).
      leaves: local gradients in the order of the flattened tree; differ between workers.
      means: their exact means, the same on all workers.
      memories: a candidate's residuals each.
      axis: name(s) of the mesh axis.
      step: `int32[]`, the step's number, to be reported.
      seed: `uint32[]`, the same on all workers; decides ties.
      ok: `bool[]`, the same on all workers; where False memories stay as they were.

    Returns:
      The new memories, and what was measured.
    """
    # Two barriers: one would type the means as differing between workers, as the leaves do.
    leaves, means = _apart(planned.plans[0], leaves), _apart(planned.plans[0], means)
    results = [
        _send(candidate, own, leaves, means, memory, axis, seed, ok)
        for candidate, own, memory in zip(planned.candidates, planned.plans, memories, strict=True)
    ]
    new = tuple(result.memory for result in results)
    order, measured = _compare(planned, means, results, axis)
    columns = []
    for values, fill in zip(measured, _EXACT, strict=True):
        table = jnp.full((len(results), len(leaves)), fill, jnp.float32)
        table = table.at[:, order].set(values) if order else table
        columns.append(jnp.where(ok, table, jnp.float32(jnp.nan)))
    return new, ShadowInfo(step, *columns)


_EXACT = (1.0, 0.0, 1.0, 0.0)  # cosine, relative error, sign agreement, residual ratio of an exact mean


def _apart(planned: Plan, values: Sequence[Any]) -> list[Any]:
    """The same arrays behind a barrier: XLA must not fuse the shadow into what trains, nor share with it."""
    moving = [i for i in range(len(values)) if i not in planned.idle]
    found = list(values)
    for i, value in zip(moving, lax.optimization_barrier([values[i] for i in moving]), strict=True):
        found[i] = value
    return found


def _send(
    candidate: Candidate,
    planned: Plan,
    leaves: Sequence[Any],
    means: Sequence[Any],
    memory: Memory,
    axis: collectives.AxisName,
    seed: Array,
    ok: Array,
) -> Result:
    routes = [candidate.route if group >= 0 else Route.FP32 for group in planned.lanes.groups]
    pending = jnp.zeros((len(planned.groups),), bool)
    exact = [means[i] for i in planned.exact]
    return average(planned, routes, leaves, memory, pending, axis, seed=seed, ok=ok, exact=exact)


def _compare(
    planned: ShadowPlan, means: Sequence[Array], results: Sequence[Result], axis: collectives.AxisName
) -> tuple[list[int], tuple[Array, ...]]:
    """The watched leaves in some order, and `f32[C, watched]` of each measure.

    Everything is relative to the largest element of the leaf's mean, so that no square leaves f32's range.
    """
    kinds = _alike(planned)
    measured, residuals = [], []
    for members in kinds:
        mean = _rows([means[i] for i in members])
        unit = nonzero(jnp.max(jnp.abs(mean), axis=1, keepdims=True))
        mean, found = mean / unit, []
        norm, num_live = jnp.sqrt(_dot(mean, mean)), jnp.sum(mean != 0, axis=1).astype(jnp.float32)
        for result in results:
            ours = _rows([result.means[i] for i in members]) / unit
            left = _rows([result.memory.residual[planned.leaves.paths[i]] for i in members]) / unit
            found.append(_numbers(mean, norm, num_live, ours))
            residuals.append(_dot(left, left))
        measured.append([jnp.stack(column) for column in zip(*found, strict=True)])
    if not kinds:
        return [], tuple(jnp.zeros((len(results), 0), jnp.float32) for _ in _EXACT)
    cosine, error, agreement, norm = (jnp.concatenate(part, axis=1) for part in zip(*measured, strict=True))
    num_hosts = jnp.float32(planned.plans[0].num_hosts)
    squared = collectives.gather(jnp.concatenate(residuals), axis).sum(0) / num_hosts
    pieces = jnp.split(squared, np.cumsum([len(members) * len(results) for members in kinds])[:-1])
    squared = jnp.concatenate([piece.reshape(len(results), -1) for piece in pieces], axis=1)
    order = [i for members in kinds for i in members]
    return order, (cosine, error, agreement, _ratio(jnp.sqrt(squared), norm))


def _numbers(mean: Array, norm: Array, num_live: Array, ours: Array) -> tuple[Array, Array, Array, Array]:
    """Cosine, relative error, sign agreement and the mean's norm, `f32[k]` each."""
    gap, own = ours - mean, jnp.sqrt(_dot(ours, ours))
    both_zero = (norm == 0) & (own == 0)
    cosine = jnp.where(both_zero, jnp.float32(1), _dot(mean, ours) / nonzero(norm * own))
    same = jnp.sum(jnp.sign(mean) * jnp.sign(ours), axis=1)
    agreement = jnp.where(num_live > 0, (1 + same / nonzero(num_live)) / 2, jnp.float32(1))
    return jnp.clip(cosine, -1, 1), _ratio(jnp.sqrt(_dot(gap, gap)), norm), agreement, norm


def _ratio(part: Array, whole: Array) -> Array:
    """`part / whole`; nothing of nothing is 0, something of nothing is infinite."""
    return jnp.where(part == 0, jnp.float32(0), part / whole)


def _alike(planned: ShadowPlan) -> list[list[int]]:
    """The watched leaves, small ones of one shape together: one reduction instead of hundreds to compile."""
    kinds: dict[Any, list[int]] = {}
    for i in planned.watched:
        shape = planned.leaves.shapes[i]
        kinds.setdefault((shape, i if np.prod(shape) > MAX_STACKED_SIZE else None), []).append(i)
    return list(kinds.values())


def _rows(leaves: Sequence[Array]) -> Array:
    return jnp.concatenate([leaf.reshape(1, -1).astype(jnp.float32) for leaf in leaves])


def _dot(a: Array, b: Array) -> Array:
    return jnp.einsum("kn,kn->k", a, b, precision=lax.Precision.HIGHEST)
