"""What a shadow trace comes to: what is safe to admit, by which profile, and what that saves."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from nf_jax import costs
from nf_jax.plan import Plan, plan
from nf_jax.profile import HealthLimits, Leaf, Model, Phase, Profile, Route
from nf_jax.sensitivity import Choice, Judgment, Thresholds, choose, judge, suggest_regions
from nf_jax.shadow import exact_profile, shadow_plan
from nf_jax.shadow_trace import ShadowTrace, read_shadow
from nf_jax.stages import Substrate
from nf_jax.telemetry import Reason


class Findings(NamedTuple):
    """A shadow trace, judged.

    Attributes:
      trace: with predicted seconds where a substrate was given.
      thresholds: what safe means.
      judgment: by candidate and leaf.
      choices: by part, the cheapest that is safe.
      profile: the one that admits them.
      plan: what that profile makes of the model.
      substrate: what predicts seconds, or None.
    """

    trace: ShadowTrace
    thresholds: Thresholds
    judgment: Judgment
    choices: tuple[Choice, ...]
    profile: Profile
    plan: Plan
    substrate: Substrate | None


def find_out(
    path: Path, thresholds: Thresholds | None = None, substrate: Substrate | None = None
) -> Findings:
    """Reads and judges a shadow trace.

    Args:
      path: a file of `ShadowWriter`.
      thresholds: what safe means.
      substrate: measured between as many workers; adds predicted seconds, and candidates that would be
        slower than FP32 are no choice.

    Raises:
      ValueError: the file is no shadow trace or is too short, or the substrate is of other workers.
    """
    limits, trace = thresholds or Thresholds(), read_shadow(path)
    base = Profile.loads(trace.header["profile"], source="the shadow trace's profile")
    shapes, workers = _shapes(trace), trace.leaves.num_workers
    if substrate is not None:
        priced = shadow_plan(base, shapes, workers, trace.leaves.candidates, substrate=substrate).leaves
        seconds = {"seconds": priced.seconds, "fp32_seconds": priced.fp32_seconds}
        trace = trace._replace(leaves=trace.leaves._replace(**seconds))
    choices = choose(trace, limits)
    profile = suggest_profile(trace, limits)
    planned = plan(profile, shapes, workers, substrate=substrate)
    return Findings(trace, limits, judge(trace, limits), choices, profile, planned, substrate)


def suggest_profile(trace: ShadowTrace, thresholds: Thresholds | None = None) -> Profile:
    """The run's profile with the regions and routes of `suggest_regions`, after a warm-up in FP32."""
    limits = thresholds or Thresholds()
    base = Profile.loads(trace.header["profile"], source="the shadow trace's profile")
    regions, routes = suggest_regions(trace, limits)
    health = base.health if base.health.enabled else HealthLimits()
    warmup_steps = max(health.warmup_steps, limits.warmup_steps)
    columns = zip(trace.leaves.paths, trace.leaves.shapes, trace.leaves.dtypes, strict=True)
    leaves = tuple(Leaf(path=path, shape=shape, dtype=dtype) for path, shape, dtype in columns)
    return Profile(
        name=f"{base.name}_admitted",
        description="What a shadow run found safe; not yet trained with.",
        model=base.model or Model(name=base.name, leaves=leaves),
        regions=regions,
        phases=(Phase(start_step=0, routes=routes),),
        buckets=base.buckets,
        health=health.model_copy(update={"warmup_steps": warmup_steps}),
        capacity=base.capacity,
        target=base.target,
    )


def _shapes(trace: ShadowTrace) -> dict[str, jax.ShapeDtypeStruct]:
    columns = zip(trace.leaves.paths, trace.leaves.shapes, trace.leaves.dtypes, strict=True)
    return {
        path: jax.ShapeDtypeStruct(s, jax.dtypes.float0 if d == "float0" else d) for path, s, d in columns
    }


# ----------------------------------------------------------------------------------------------- words


def sentence(found: Findings) -> str:
    """What is safe to admit, and what that saves in one step of one worker, by the plan that admits it."""
    admitted: dict[str, list[str]] = collections.defaultdict(list)
    exact, small, slower = [], [], []
    for choice in found.choices:
        reasons = _reasons(found, choice)
        if choice.candidate is None:
            exact.append(choice.part.name)
        elif reasons and None not in reasons:
            (slower if Reason.SLOWER in reasons else small).append(choice.part.name)
        else:
            admitted[found.trace.leaves.candidates[choice.candidate].name].append(choice.part.name)
    lists = [f"{', '.join(parts)} ({name})" for name, parts in admitted.items()]
    text = f"safe to admit: {', '.join(lists) or 'nothing'}"
    for parts, why in ((exact, "stays in FP32"), (small, "too small to gain"), (slower, "would be slower")):
        text += f"; {why}: {', '.join(parts)}" if parts else ""
    return f"{text}. {_savings(found) if admitted else 'Saves nothing: stay with a plain mean.'}"


def _reasons(found: Findings, choice: Choice) -> set[Reason | None]:
    """Why lanes of a part stay exact in the plan that admits it; None for one that does not."""
    names = {choice.part.name, *(f"{choice.part.name}_{n + 1}" for n in range(len(choice.part.patterns)))}
    regions = {i for i, name in enumerate(found.profile.region_names) if name in names}
    lanes = found.plan.lanes
    return {fixed for region, fixed in zip(lanes.regions, lanes.fixed, strict=True) if region in regions}


def _savings(found: Findings) -> str:
    planned, (_, routes) = found.plan, found.profile.route_table[0]
    taken = [
        Route.FP32 if fixed is not None else routes[region]
        for region, fixed in zip(planned.lanes.regions, planned.lanes.fixed, strict=True)
    ]
    fp32, sent = planned.fp32_bytes, planned.wire_bytes(taken)
    share = (fp32 - sent) / fp32 if fp32 else 0.0
    text = f"Saves {(fp32 - sent) / 1e6:.3g} of {fp32 / 1e6:.3g} MB ({share:.1%})"
    if found.substrate is None:
        return f"{text} a step."
    exact = exact_profile(found.profile)
    before = plan(exact, _shapes(found.trace), found.trace.leaves.num_workers).lanes
    old = costs.lane_seconds(exact, before, found.substrate)[:, Route.FP32].sum()
    new = costs.lane_seconds(found.profile, planned.lanes, found.substrate)
    new = new[np.arange(len(taken)), taken].sum()
    return f"{text} and {1e3 * (old - new):.3g} of {1e3 * old:.3g} ms a step."
