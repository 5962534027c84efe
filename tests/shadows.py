"""Shadow traces made up for tests: what a run would have measured, without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import nf_jax
from nf_jax import Candidate, Profile
from nf_jax.shadow_trace import ShadowTrace, ShadowWriter, read_shadow
from nf_jax.telemetry import ShadowInfo

FEW = (Candidate.of("BF16"), Candidate.of("SIGN", scale="leaf"), Candidate.of("SIGN", scale="rank1"))
PROFILE = Profile.static("SIGN").model_copy(update={"name": "tried"})
MLP = {
    "head/bias": (10,),
    "head/kernel": (384, 10),
    "hidden_0/bias": (384,),
    "hidden_0/kernel": (64, 384),
    "hidden_1/bias": (384,),
    "hidden_1/kernel": (384, 384),
    "hidden_2/bias": (384,),
    "hidden_2/kernel": (384, 384),
}

Ratio = Callable[[int, str], float]
"""(candidate, path) -> the residual ratio of every step."""


def shapes_of(model: dict[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    return {path: jax.ShapeDtypeStruct(shape, "float32") for path, shape in model.items()}


def info_of(leaves: Any, step: int, ratio: Ratio) -> ShadowInfo:
    """What one step measured: error and cosine go with the residual ratio."""
    sent = [*zip(leaves.paths, leaves.lossy, strict=True)]
    rows = [[ratio(c, path) if lossy else 0 for path, lossy in sent] for c in range(len(leaves.candidates))]
    residual = np.asarray(rows, np.float32)
    return ShadowInfo(
        step=np.asarray(step),
        cosine=1 / (1 + residual),
        relative_error=residual / 4,
        sign_agreement=0.5 + 0.5 / (1 + residual),
        residual_ratio=residual,
    )


def write_shadow(
    path: Path,
    ratio: Ratio,
    *,
    model: dict[str, tuple[int, ...]] = MLP,
    num_workers: Any = 8,
    num_steps: int = 40,
    profile: Profile = PROFILE,
    candidates: Any = FEW,
    **options: Any,
) -> ShadowTrace:
    leaves = nf_jax.shadow_plan(profile, shapes_of(model), num_workers, candidates).leaves
    with ShadowWriter(path, profile.dumps(), leaves, **options) as writer:
        for step in range(num_steps):
            writer.write(info_of(leaves, step, ratio))
    return read_shadow(path)
