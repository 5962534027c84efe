"""Laws of the searched space: settings make the profile that they say, and its bytes are the plan's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_job import PARAMS, SHAPES, START, W, make_columns

import nf_jax
from nf_jax.plan import plan
from nf_jax.profile import Profile, Route
from nf_jax.replay import replay
from nf_jax.space import (
    BF16,
    STARTS,
    Protection,
    Settings,
    choose_settings,
    describe,
    make_profile,
    model_of,
    planned_bytes,
    protection_of,
    relax,
    to_params,
)

MODEL = model_of("synthetic", PARAMS)
OWN = protection_of(START)
FREE = OWN._replace(routes={})  # head and body may both go low-bit


class Drawn:
    """Chooses by hypothesis."""

    def __init__(self, data: st.DataObject):
        self.data = data

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        if step is not None:
            return low + step * self.data.draw(st.integers(0, round((high - low) / step)))
        return self.data.draw(st.floats(low, high))

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self.data.draw(st.sampled_from(choices))


class Given:
    """Chooses again what was chosen; anything else is an error."""

    def __init__(self, params: dict[str, Any]):
        self.params = params

    def suggest_float(self, name: str, *_: Any, **__: Any) -> Any:
        return self.params[name]

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        assert self.params[name] in choices
        return self.params[name]


def test_the_choices_of_settings_make_the_same_settings():
    @given(st.data(), st.sampled_from([[OWN], [FREE, OWN], [FREE, relax(OWN), OWN]]))
    def law(data: st.DataObject, protections: list[Protection]) -> None:
        settings = choose_settings(Drawn(data), protections)
        assert choose_settings(Given(to_params(settings, protections)), protections) == settings
        free = protections[settings.protection].free
        assert set(settings.held) < set(free), "some, where it means something, and never all"

    law()
    for settings in STARTS:
        assert choose_settings(Given(to_params(settings, [FREE, OWN])), [FREE, OWN]) == settings
        bare = settings._replace(held=())
        assert choose_settings(Given(to_params(settings, [OWN])), [OWN]) == bare, "nothing to hold there"


def test_a_held_region_travels_in_bf16_where_the_others_go_low_bit():
    settings = Settings(held=("head",))
    profile = make_profile(START, MODEL, FREE, settings, {}, 100)
    assert profile.route_table == ((0, (Route.FP32, Route.FP32)), (5, (Route.BF16, Route.SIGN)))
    assert describe(settings).endswith("warm-up, head in BF16") and "in BF16" not in describe(Settings())
    kept, plain = (make_profile(START, MODEL, OWN, s, {}, 100) for s in (settings, Settings()))
    assert kept == plain, "what is in FP32 stays there"


def test_phases_are_the_shares_of_the_run():
    @given(st.data(), st.integers(1, 3000))
    def law(data: st.DataObject, steps: int) -> None:
        settings = choose_settings(Drawn(data), [OWN])
        profile = make_profile(START, MODEL, OWN, settings, {}, steps)
        warmup = profile.health.warmup_steps
        starts, table = zip(*profile.route_table, strict=True)
        routes = [table[np.searchsorted(starts, step, side="right") - 1] for step in range(steps)]
        head, body = (np.asarray(column) for column in zip(*routes, strict=True))
        assert (head == Route.FP32).all()
        assert warmup == max(1, round(settings.warmup_share * steps))
        assert (body[:warmup] == Route.FP32).all()
        bridge = (body == Route.BF16).sum()
        tail = (body[warmup:] == Route.FP32).sum()
        low = np.flatnonzero(body == settings.route)
        if len(low):
            assert (np.diff(low) == 1).all()
            assert abs(bridge - settings.bridge_share * steps) <= 1
            assert abs(tail - settings.tail_share * steps) <= 1
        assert Profile.loads(profile.dumps()) == profile

    law()


def test_settings_reach_the_codec_of_free_regions_alone():
    settings = Settings(scale="leaf", down="count", server_error_feedback=False, on_fallback="drop", gate=0.5)
    profile = make_profile(START, MODEL, OWN, settings, {"norm_jump_ratio": 3.5}, 100)
    head, body = profile.regions
    assert head == START.regions[0]
    for name in ("scale", "down", "server_error_feedback", "on_fallback", "gate", "error_feedback"):
        assert getattr(body.codec, name) == getattr(settings, name)
    assert profile.health.norm_jump_ratio == 3.5
    assert (profile.buckets, profile.capacity) == (START.buckets, START.capacity)


def test_what_a_profile_protects_comes_back_from_the_profiles_made_of_it():
    assert Protection(START.regions, {"head": Route.FP32}) == OWN and OWN.free == ("body",)
    assert relax(OWN).routes == {"head": Route.BF16}
    for protection in (OWN, relax(OWN)):
        made = make_profile(START, MODEL, protection, Settings(tail_share=0.1), {}, 100)
        assert protection_of(made).routes == protection.routes
    assert make_profile(START, MODEL, OWN, None, {}, 100).route_table == ((0, (Route.FP32, Route.FP32)),)


def test_the_model_is_the_tree_that_the_plan_takes():
    assert {leaf.path: leaf.shape for leaf in MODEL.leaves} == SHAPES
    plan(make_profile(START, MODEL, OWN, None, {}, 10), PARAMS, W)
    other = PARAMS | {"more": PARAMS["head/kernel"]}
    with pytest.raises(ValueError, match="unexpected: more"):
        plan(make_profile(START, MODEL, OWN, None, {}, 10), other, W)


@pytest.mark.parametrize("settings", [Settings(bridge_share=0.1, tail_share=0.05), BF16])
def test_planned_bytes_are_those_that_the_controller_sends_in_a_healthy_run(settings):
    steps = 60
    profile = make_profile(START, MODEL, OWN, settings, {}, steps)
    planned = nf_jax.plan(profile, PARAMS, W)
    columns = make_columns(profile, steps, 0, lambda measured, seed: measured)
    healthy = columns._replace(
        signals=columns.signals._replace(
            loss=np.ones(steps, np.float32), gradient_norm=np.ones((steps, 2), np.float32)
        )
    )
    np.testing.assert_array_equal(planned_bytes(profile, planned, steps), replay(healthy).wire_bytes)
