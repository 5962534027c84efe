"""Laws of sensitivity: leaves fall into parts that rules find again, each as safe as its worst leaf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shadows import FEW, MLP, PROFILE, shapes_of, write_shadow

import nf_jax
from nf_jax import Route, regions
from nf_jax.profile import Phase, Profile
from nf_jax.sensitivity import KINDS, Thresholds, choose, judge, parts_of, suggest_regions

BF16, LEAF, RANK1 = range(3)


def transformer(num_blocks: int) -> dict[str, tuple[int, ...]]:
    model: dict[str, tuple[int, ...]] = {
        "token_embed/embedding": (1000, 64),
        "pos_emb": (128, 64),
        "ln_f/scale": (64,),
        "ln_f/bias": (64,),
        "lm_head/kernel": (64, 1000),
    }
    for n in range(num_blocks):
        for name in (
            "attention/query",
            "attention/key",
            "attention/value",
            "attention/out",
            "mlp/up",
            "mlp/down",
        ):
            model |= {f"block_{n}/{name}/kernel": (64, 64), f"block_{n}/{name}/bias": (64,)}
        model |= {f"block_{n}/ln_{i}/{name}": (64,) for i in (1, 2) for name in ("scale", "bias")}
        model |= {f"block_{n}/attention/relative": (64,)}
    return model


CONV = {
    "conv_init/kernel": (3, 3, 3, 64),
    "BatchNorm_0/scale": (64,),
    "BatchNorm_0/bias": (64,),
    **{
        f"stage_{s}/block_{b}/conv_{c}/kernel": (3, 3, 64, 64)
        for s in range(4)
        for b in range(2)
        for c in range(2)
    },
    **{f"stage_{s}/block_{b}/bn_{c}/scale": (64,) for s in range(4) for b in range(2) for c in range(2)},
    "Dense_0/kernel": (64, 10),
    "Dense_0/bias": (10,),
}


def leaves_of(model: dict[str, tuple[int, ...]]) -> Any:
    return nf_jax.shadow_plan(PROFILE, shapes_of(model), 4, FEW).leaves


def named(model: dict[str, tuple[int, ...]]) -> dict[str, list[str]]:
    leaves = leaves_of(model)
    return {part.name: [leaves.paths[i] for i in part.leaves] for part in parts_of(leaves)}


# ------------------------------------------------------------------------------------------- grouping


def test_an_mlp_has_a_head_biases_a_first_kernel_and_the_rest_by_depth():
    assert named(MLP) == {
        "head": ["head/bias", "head/kernel"],
        "bias": ["hidden_0/bias", "hidden_1/bias", "hidden_2/bias"],
        "first": ["hidden_0/kernel"],
        "early": ["hidden_1/kernel"],
        "late": ["hidden_2/kernel"],
    }


def test_a_transformer_falls_into_thirds_of_its_blocks():
    parts = named(transformer(13))
    assert set(parts["embedding"]) == {"token_embed/embedding", "pos_emb"}
    assert parts["head"] == ["lm_head/kernel"]
    assert len(parts["norm"]) == 13 * 4 + 2 and len(parts["bias"]) == 13 * 6
    assert len(parts["vector"]) == 13 and all(path.endswith("relative") for path in parts["vector"])
    blocks = {
        name: {path.split("/")[0] for path in parts[name]} for name in ("first", "early", "middle", "late")
    }
    numbers = {name: sorted(int(b.removeprefix("block_")) for b in found) for name, found in blocks.items()}
    assert numbers == {"first": [0], "early": [1, 2, 3, 4], "middle": [5, 6, 7, 8], "late": [9, 10, 11, 12]}


def test_behind_convolutions_the_head_is_what_is_none():
    parts = named(CONV)
    assert parts["head"] == ["Dense_0/bias", "Dense_0/kernel"]
    assert len(parts["norm"]) == 2 + 16 and "bias" not in parts
    assert parts["first"] == ["conv_init/kernel"]
    assert [len(parts[name]) for name in ("early", "middle", "late")] == [5, 6, 5]


@pytest.mark.parametrize(
    "path", ["attention/value/kernel", "multi_head_attention/query/kernel", "subln/w", "a/b_1"]
)
def test_names_that_only_look_like_a_kind_are_none(path: str):
    rules = [pattern for patterns in KINDS.values() for pattern in patterns]
    assert regions.assign_regions([path], [*rules, ".*"]) == (len(rules),)


@pytest.mark.parametrize(
    "model",
    [
        MLP,
        CONV,
        transformer(2),
        transformer(24),
        {f"block_{n}/w": (64, 64) for n in range(400)},
        {"": (64, 64)},
        {"w": (64, 64), "v": (64,)},
        {f"layer.{i}/w+{k}": (64, 64) for i in range(30) for k in ("a", "b(c)")},
        {f"{'very_' * 30}long_{i}x{j}/{k}": (64, 64) for i in range(9) for j in range(3) for k in "abc"},
        {f"{name}/kernel": (64, 64) for name in "qwertyuiopasdfghjklzxcvbnm"},
    ],
    ids=lambda model: f"{len(model)} leaves",
)
def test_the_rules_are_valid_and_find_the_parts_again(model: dict[str, tuple[int, ...]], tmp_path: Path):
    trace = write_shadow(tmp_path / "s.jsonl", lambda c, p: 1.0, model=model, num_workers=4)
    parts, (found, routes) = parts_of(trace.leaves), suggest_regions(trace)
    profile = Profile(name="p", regions=found, phases=(Phase(start_step=0, routes=routes),))
    owners = regions.assign_regions(trace.leaves.paths, [region.pattern for region in profile.regions])
    for part in parts:
        rules = {owners[i] for i in part.leaves}
        names = {part.name, *(f"{part.name}_{n}" for n in range(2, len(part.patterns) + 1))}
        assert {found[rule].name for rule in rules} == names
    assert sorted(i for part in parts for i in part.leaves) == list(range(len(model)))
    assert profile.regions[-1].pattern == ".*"


# ------------------------------------------------------------------------------------------- judgment


def test_a_part_takes_the_cheapest_candidate_that_is_safe_for_its_worst_leaf(tmp_path: Path):
    def ratio(candidate: int, path: str) -> float:
        if candidate == BF16:
            return 100.0 if path.startswith("hidden_2") else 0.01
        if candidate == RANK1 and path.startswith("hidden_1"):
            return 2.0
        return 1.0 if path.startswith("hidden_0") else 50.0

    trace = write_shadow(tmp_path / "s.jsonl", ratio)
    found, routes = suggest_regions(trace)
    assert routes == {
        "head": Route.BF16,  # only that is safe
        "bias": Route.FP32,  # cannot travel otherwise
        "first": Route.SIGN,  # all are safe: one scale a leaf is cheapest
        "early": Route.SIGN,
        "late": Route.FP32,  # nothing is safe
    }
    scales = {region.name: region.codec.scale for region in found}
    assert scales["first"] == "leaf" and scales["early"] == "rank1"
    bad = write_shadow(
        tmp_path / "t.jsonl",
        lambda c, p: 50.0 if p == "block_1/mlp/up/kernel" else 1.0,
        model=transformer(2),
        num_workers=4,
    )
    by_name = {choice.part.name: choice.candidate for choice in choose(bad)}
    assert by_name["first"] == LEAF and by_name["middle"] is None


def test_where_seconds_are_known_they_decide(tmp_path: Path):
    trace = write_shadow(tmp_path / "s.jsonl", lambda c, p: 1.0)
    num = len(trace.leaves.paths)
    slow, fast = (1.0,) * num, (0.1,) * num
    by_seconds = trace._replace(
        leaves=trace.leaves._replace(seconds=(fast, slow, slow), fp32_seconds=(0.5,) * num)
    )
    assert {c.candidate for c in choose(by_seconds) if c.num_lossy} == {BF16}
    no_gain = trace._replace(leaves=by_seconds.leaves._replace(fp32_seconds=fast))
    assert {c.candidate for c in choose(no_gain)} == {None}


@pytest.mark.parametrize(
    ("measure", "bad"), [("residual_ratio", 4.1), ("relative_error", 2.1), ("cosine", 0.1), ("cosine", -0.9)]
)
def test_each_measure_can_refuse_and_only_beyond_warmup_and_quantile(
    measure: str, bad: float, tmp_path: Path
):
    trace = write_shadow(tmp_path / "s.jsonl", lambda c, p: 1.0, num_steps=40)
    assert judge(trace).safe.all()
    at = trace.leaves.paths.index("head/kernel")

    def spoil(steps: slice) -> Any:
        values = getattr(trace.info, measure).copy()
        values[steps, LEAF, at] = bad
        return trace._replace(info=trace.info._replace(**{measure: values}))

    assert judge(spoil(slice(0, 20))).safe.all()  # before the end of the warm-up
    assert judge(spoil(slice(35, 40))).safe.all()  # in a quarter of the steps that count
    refused = ~judge(spoil(slice(34, 40))).safe
    assert refused.sum() == 1 and refused[LEAF, at]
    assert judge(spoil(slice(34, 40)), Thresholds(quantile=0.5)).safe.all()
    assert not judge(
        spoil(slice(0, 8)), Thresholds(warmup_steps=10, quantile=1.0, max_residual_ratio=0.5)
    ).safe.all()


def test_bad_steps_do_not_count_and_too_few_are_an_error(tmp_path: Path):
    trace = write_shadow(tmp_path / "s.jsonl", lambda c, p: 1.0, num_steps=30)
    values = {name: getattr(trace.info, name).copy() for name in trace.info._fields[1:]}
    for array in values.values():
        array[22:25] = np.nan
    bad = trace._replace(info=trace.info._replace(**values))
    assert judge(bad).safe.all()
    for array in values.values():
        array[22:28] = np.nan
    with pytest.raises(ValueError, match="at least 5 finite steps from step 20 on, got 4"):
        judge(bad)
    assert judge(bad, Thresholds(warmup_steps=0)).safe.all()
