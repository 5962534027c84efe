"""Which regions a search may send low-bit: found in a shadow run, or taken from the starting profile."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nf_jax.job import Job
from nf_jax.lab import Lab, Options
from nf_jax.profile import Region, Route
from nf_jax.sensitivity import Thresholds, suggest_regions
from nf_jax.shadow_trace import ShadowTrace, read_shadow
from nf_jax.space import LOW_BIT, Protection, protection_of, relax

LENIENCES = (1.0, 2.0, 4.0, 0.5)
"""Multiples of the default thresholds of `sensitivity.py`; the first is what the search starts with."""
_WARMUP_SHARE = 0.1


def find_protections(job: Job, lab: Lab, options: Options) -> tuple[Protection, ...]:
    """What the search chooses among, without repeats.

    Args:
      job: with a shadow run, regions and routes are suggested by it, at several thresholds. Without one they
        are the starting profile's, and the same with BF16 for what it keeps in FP32.
      lab: keeps the shadow run.
      options: the seed, and whether a shadow run is wanted.

    Raises:
      ValueError: no region may go low-bit.
    """
    if job.shadow is not None and options.shadow:
        found = suggest_all(run_shadow(job, lab, options), LENIENCES)
        if found:
            return found
        lab.tell("the shadow run finds no leaf safe: regions of the starting profile", 0)
    own = protection_of(job.start)
    if not own.free:
        raise ValueError(
            f"profile {job.start.name!r}: expected a region that may go low-bit, got none: the search starts "
            "from the regions that it sends as SIGN or TERNARY in some phase"
        )
    return (own, relax(own)) if relax(own) != own else (own,)


def run_shadow(job: Job, lab: Lab, options: Options) -> ShadowTrace:
    """The shadow run of a full length, from the folder if it is there."""
    path = lab.folder / "shadow.jsonl"
    if not path.exists():
        lab.tell("shadow run", 0)
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)  # of a run that was cut off
        assert job.shadow is not None
        job.shadow(steps=job.steps, seed=options.search_seed, trace=partial)
        os.replace(partial, path)
    lab.tell("shadow run", job.steps)
    return read_shadow(path)


def suggest_all(trace: ShadowTrace, leniences: Sequence[float]) -> tuple[Protection, ...]:
    """What each leniency suggests, without repeats and without those that free no region."""
    usual = Thresholds()
    last = int(trace.info.step.max(initial=0))
    found: list[Protection] = []
    for lenience in leniences:
        thresholds = Thresholds(
            max_residual_ratio=usual.max_residual_ratio * lenience,
            max_relative_error=usual.max_relative_error * lenience,
            min_cosine=min(usual.min_cosine / lenience, 1.0),
            quantile=usual.quantile,
            warmup_steps=min(usual.warmup_steps, round(_WARMUP_SHARE * last)),
        )
        suggested = _to_protection(*suggest_regions(trace, thresholds))
        if suggested.free and suggested not in found:
            found.append(suggested)
    return tuple(found)


def _to_protection(regions: tuple[Region, ...], routes: dict[str, Route]) -> Protection:
    """Codecs are searched, so those of the suggestion are left out: two that differ in them alone are one."""
    bare = tuple(Region(name=region.name, pattern=region.pattern) for region in regions)
    return Protection(bare, {name: route for name, route in routes.items() if route not in LOW_BIT})
