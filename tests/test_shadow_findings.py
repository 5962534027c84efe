"""Laws of what a shadow trace comes to: savings are those of the plan that admits what is safe."""

from __future__ import annotations

from pathlib import Path

import pytest
from shadows import FEW, MLP, shapes_of, write_shadow
from substrates import stage, substrate

import nf_jax
from nf_jax import Profile, Route, costs, trace
from nf_jax.profile import CapacityLimits, Phase, Region
from nf_jax.report import find_shadows, find_traces
from nf_jax.sensitivity import Thresholds
from nf_jax.shadow import exact_profile
from nf_jax.shadow_findings import find_out, sentence
from nf_jax.shadow_report import leaves_table, parts_table, plot_shadow

GUIDED = Profile(
    name="guided",
    regions=(Region(name="all", pattern=".*"),),
    phases=(Phase(start_step=0, routes={"all": Route.SIGN}),),
    capacity=CapacityLimits(min_lane_bytes=2**16),
)


def kernels_only(candidate: int, path: str) -> float:
    """Signs are fit for hidden kernels, one scale a leaf only for the last one; BF16 for all."""
    if candidate == 0 or path == "hidden_2/kernel":
        return 0.01
    return 1.0 if candidate == 2 and path.startswith("hidden") else 9.0


def test_the_sentence_says_what_the_admitting_plan_saves(tmp_path: Path):
    path = tmp_path / "shadow.jsonl"
    write_shadow(path, kernels_only, profile=GUIDED)
    found = find_out(path)
    planned = nf_jax.plan(found.profile, shapes_of(MLP), 8)
    routes = [
        found.profile.route_table[0][1][region] if fixed is None else Route.FP32
        for region, fixed in zip(planned.lanes.regions, planned.lanes.fixed, strict=True)
    ]
    saved = planned.fp32_bytes - planned.wire_bytes(routes)
    assert 0.9 < saved / planned.fp32_bytes < 1
    assert sentence(found) == (
        "safe to admit: first, early (SIGN rank1 majority), late (SIGN leaf majority); stays in FP32: bias; "
        f"too small to gain: head. Saves {saved / 1e6:.3g} of {planned.fp32_bytes / 1e6:.3g} MB "
        f"({saved / planned.fp32_bytes:.1%}) a step."
    )


def test_the_admitting_profile_warms_up_and_keeps_what_was_the_runs(tmp_path: Path):
    path = tmp_path / "shadow.jsonl"
    write_shadow(path, kernels_only, profile=GUIDED)
    found = find_out(path, Thresholds(warmup_steps=30))
    profile = found.profile
    assert profile == Profile.loads(profile.dumps())
    assert profile.health.warmup_steps == 30 and profile.health.enabled and profile.fallback
    assert profile.capacity == GUIDED.capacity and profile.buckets == GUIDED.buckets
    assert profile.model is not None and {leaf.path for leaf in profile.model.leaves} == set(MLP)
    assert find_out(path, Thresholds(max_residual_ratio=0.001)).profile.route_table == (
        (0, (Route.FP32,) * len(profile.regions)),
    )
    assert sentence(find_out(path, Thresholds(max_residual_ratio=0.001))).startswith(
        "safe to admit: nothing; stays in FP32: head, bias, first, early, late. Saves nothing"
    )


def test_with_a_substrate_milliseconds_are_those_of_the_two_plans(tmp_path: Path):
    path, measured = tmp_path / "shadow.jsonl", substrate(8)
    write_shadow(path, kernels_only, profile=GUIDED)
    found = find_out(path, substrate=measured)
    exact = exact_profile(found.profile)
    lanes = nf_jax.plan(exact, shapes_of(MLP), 8).lanes
    before = costs.lane_seconds(exact, lanes, measured)[:, Route.FP32].sum()
    assert f"of {1e3 * before:.3g} ms a step." in sentence(found)
    gained = float(sentence(found).split(") and ")[1].split(" ")[0])
    assert 0 < gained < 1e3 * before
    slow = find_out(path, substrate=substrate(8, sign=stage(1.0, 0.0)))
    assert {choice.candidate for choice in slow.choices} <= {0, None}
    with pytest.raises(ValueError, match="num_workers=8"):
        find_out(path, substrate=substrate(4))


def test_shadow_traces_are_told_from_traces(tmp_path: Path):
    write_shadow(tmp_path / "shadow.jsonl", kernels_only, profile=GUIDED, num_steps=1)
    lanes = nf_jax.plan(GUIDED, shapes_of(MLP), 8).lanes
    with trace.TraceWriter(tmp_path / "trace.jsonl", GUIDED.dumps(), lanes):
        pass
    assert find_shadows(tmp_path) == [tmp_path / "shadow.jsonl"]
    assert find_traces(tmp_path) == [tmp_path / "trace.jsonl"]


def test_tables_and_pictures_take_models_of_any_size(tmp_path: Path):
    big = {f"block_{n}/{name}/kernel": (64, 64) for n in range(35) for name in ("a", "b")} | {"b": (64,)}
    for name, model, steps in (("small", MLP, 40), ("big", big, 240)):
        path = tmp_path / f"{name}.jsonl"
        write_shadow(path, kernels_only, model=model, num_workers=4, num_steps=steps)
        found = find_out(path)
        assert leaves_table(found).row_count == min(sum(found.trace.leaves.lossy), 60)
        lossy = sum(bool(choice.num_lossy) for choice in found.choices)
        assert parts_table(found).row_count == len(FEW) * lossy + len(found.choices) - lossy
        plot_shadow(found, path.with_suffix(".png"), name)
        picture = path.with_suffix(".png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_a_model_that_can_only_travel_exactly_has_nothing_to_draw(tmp_path: Path):
    write_shadow(tmp_path / "s.jsonl", kernels_only, model={"b": (3,), "c": (4,)})
    found = find_out(tmp_path / "s.jsonl")
    assert sentence(found).startswith("safe to admit: nothing")
    with pytest.raises(ValueError, match="found none to draw"):
        plot_shadow(found, tmp_path / "s.png", "tiny")
