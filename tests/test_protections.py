"""Laws of what a search may send low-bit: what a shadow run finds unsafe stays protected, once measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from synthetic_job import START, STEPS, W, make_job

import nf_jax
from nf_jax.calibrate import Job, Options
from nf_jax.lab import Lab
from nf_jax.profile import Profile, Route
from nf_jax.protections import LENIENCES, find_protections, suggest_all
from nf_jax.shadow_trace import ShadowWriter, read_shadow
from nf_jax.space import protection_of
from nf_jax.telemetry import ShadowInfo

OPTIONS = Options()
PARAMS = {name: jax.ShapeDtypeStruct((64, 64), "float32") for name in ("head/kernel", "body/kernel")}
LEAVES = nf_jax.shadow_plan(Profile.static("SIGN"), PARAMS, W).leaves
BODY, HEAD = (LEAVES.paths.index(name) for name in ("body/kernel", "head/kernel"))


def write_shadow(path: Path, steps: int, body: float, head: float) -> None:
    """A trace in which low bits leave residuals of these ratios; BF16 is as good as exact."""
    shape = (len(LEAVES.candidates), len(LEAVES.paths))
    ratio = np.zeros(shape, np.float32)
    ratio[:, BODY], ratio[:, HEAD] = body, head
    ratio[[candidate.route == Route.BF16 for candidate in LEAVES.candidates]] = 0.0
    fields: dict[str, Any] = {name: np.zeros(shape, np.float32) for name in ShadowInfo._fields}
    fields |= {"cosine": np.ones(shape, np.float32), "residual_ratio": ratio}
    with ShadowWriter(path, START.dumps(), LEAVES) as writer:
        for step in range(steps):
            writer.write(ShadowInfo(**fields | {"step": np.asarray(step)}))


def make_shadow_job(body: float, head: float, started: list[int]) -> Job:
    def shadow(*, steps: int, seed: int, trace: Path) -> None:
        started.append(seed)
        write_shadow(trace, steps, body, head)

    return make_job(shadow=shadow)


def find(folder: Path, job: Job, **changes: Any) -> list[tuple[str, ...]]:
    """The free regions of each protection."""
    lab = Lab(job, folder, lambda text, steps: None)
    return [own.free for own in find_protections(job, lab, Options(**changes))]


def test_without_a_shadow_run_the_starting_profile_protects(tmp_path):
    assert find(tmp_path, make_job()) == [("body",), ("body",)]
    assert find(tmp_path, make_shadow_job(1, 1, []), shadow=False) == [("body",), ("body",)]
    with pytest.raises(ValueError, match="expected a region that may go low-bit"):
        find(tmp_path, make_job(start=Profile.static("BF16")))


@pytest.mark.parametrize(("head", "frees"), [(3.9, 3), (4.1, 2), (7.9, 2), (8.1, 1), (15.9, 1), (16.1, 0)])
def test_a_region_is_freed_by_the_leniencies_whose_threshold_it_keeps_to(head, frees, tmp_path):
    assert LENIENCES == (1.0, 2.0, 4.0, 0.5)
    write_shadow(tmp_path / "shadow.jsonl", 40, body=1.0, head=head)
    trace = read_shadow(tmp_path / "shadow.jsonl")
    single = [suggest_all(trace, [lenience])[0] for lenience in LENIENCES[:3]]
    assert sum("head" not in own.routes for own in single) == frees
    assert [own.routes.get("head") for own in single[: 3 - frees]] == [Route.BF16] * (3 - frees)
    together = suggest_all(trace, LENIENCES)
    assert together[0] == single[0]
    assert len(together) == len({own.free for own in together}), "no repeats"


def test_where_no_leaf_is_safe_the_starting_profile_decides(tmp_path):
    assert find(tmp_path, make_shadow_job(1e3, 1e3, [])) == [("body",), ("body",)]


def test_regions_found_match_every_leaf(tmp_path):
    write_shadow(tmp_path / "shadow.jsonl", 40, body=1.0, head=5.0)
    for own in suggest_all(read_shadow(tmp_path / "shadow.jsonl"), LENIENCES):
        phases = ({"start_step": 0, "routes": dict.fromkeys((r.name for r in own.regions), Route.SIGN)},)
        profile = Profile.model_validate({"name": "found", "regions": own.regions, "phases": phases})
        nf_jax.plan(profile, PARAMS, W)
        assert protection_of(profile).free == tuple(region.name for region in own.regions)


def test_a_shadow_run_is_measured_once_and_again_if_it_was_cut_off(tmp_path):
    started: list[int] = []
    job = make_shadow_job(1.0, 5.0, started)
    (tmp_path / "shadow.partial").write_text("torn")
    first = find(tmp_path, job)
    assert started == [OPTIONS.search_seed]
    assert find(tmp_path, job) == first
    assert started == [OPTIONS.search_seed]
    lines = (tmp_path / "shadow.jsonl").read_text().splitlines()
    assert len(lines) == 1 + STEPS and json.loads(lines[-1])["step"] == STEPS - 1
