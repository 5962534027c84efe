"""Laws of the health state machine: a table of signal sequences, then any signals at all."""

from __future__ import annotations

from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nf_jax import health
from nf_jax.health import Health, HealthState, Trigger
from nf_jax.profile import HealthLimits
from nf_jax.telemetry import Signals

NAN, INF = float("nan"), float("inf")
LIMITS: dict[str, Any] = dict(
    warmup_steps=2,
    patience_steps=3,
    cooldown_steps=4,
    probation_steps=3,
    max_trips=2,
    lane_hold_steps=3,
    smoothing_steps=50,
    min_agreement=0.1,
)
LANE_REGIONS = (0, 0, 1)  # two regions; the first one has two lanes
STEP = jax.jit(health.step, static_argnums=(0, 1))


def signals(**changes: Any) -> Signals:
    """A healthy step, and what differs from it."""
    healthy: dict[str, Any] = dict(
        loss=2.0,
        has_loss=True,
        nonfinite=[0, 0],
        gradient_norm=[1.0, 3.0],
        agreement=[0.5, 0.5, -1.0],
        residual_ratio=[5.0, 0.0, 0.0],
        reducer_load=0.0,
    )
    dtypes = dict(has_loss=np.bool_, nonfinite=np.int32)
    values = healthy | changes
    return Signals(**{k: np.asarray(v, dtypes.get(k, np.float32)) for k, v in values.items()})


EVENTS = {
    ".": signals(),  # healthy
    "n": signals(nonfinite=[0, 1]),  # one leaf of region 1 on one worker
    "m": signals(loss=NAN),
    "i": signals(gradient_norm=[INF, 1.0]),
    "u": signals(loss=NAN, has_loss=False),  # no loss was given: what stands there means nothing
    "s": signals(loss=50.0),
    "j": signals(gradient_norm=[1.0, 90.0]),  # region 1 only
    "a": signals(agreement=[0.05, 0.05, -1.0]),  # region 0 only
    "b": signals(agreement=[0.05, 0.5, -1.0]),  # the mean of region 0 is fine
    "r": signals(residual_ratio=[5.0, 60.0, 0.0]),  # lane 1 only
    "q": signals(residual_ratio=[5.0, NAN, 0.0]),
}
LETTER = {Health.WARMUP: "W", Health.ADMITTED: "A", Health.FALLBACK: "F"} | {
    Health.PROBATION: "P",
    Health.LOCKED: "L",
}


def run(events: str, **changes: Any) -> list[HealthState]:
    """The state after each event, from the start."""
    limits = HealthLimits(**LIMITS | changes)
    states = [health.init(limits, 2, 3)]
    for event in events:
        states.append(STEP(limits, LANE_REGIONS, states[-1], EVENTS[event]))
    return states[1:]


def letters(states: list[HealthState], region: int) -> str:
    return "".join(LETTER[Health(int(state.state[region]))] for state in states)


TEN = "." * 10  # enough steps for baselines; warm-up is over after two of them
ON = "W" + "A" * 9
BROKEN = "..n....n........n"  # every probation ends at once
LOCKS = "WAFFFFPFFFFFFFFPL"

# law: (events, states of region 0, states of region 1, last triggers, trips)
N, F, S, J, A = Trigger.NONE, Trigger.NONFINITE, Trigger.LOSS_SPIKE, Trigger.NORM_JUMP, 4
LAWS = {
    "healthy steps end warm-up": ("....", "WAAA", "WAAA", (N, N), (0, 0)),
    "warm-up counts finite steps only": ("nm.n.", "WWWWA", "WWWWA", (F, F), (0, 0)),
    "a missing loss is not a NaN": ("uuuu", "WAAA", "WAAA", (N, N), (0, 0)),
    "nothing falls back in warm-up": ("nnn.nnn.", "WWWWWWWA", "WWWWWWWA", (F, F), (0, 0)),
    "one non-finite gradient trips every region at once": ("..n", "WAF", "WAF", (F, F), (1, 1)),
    "a NaN loss trips every region at once": ("..m", "WAF", "WAF", (F, F), (1, 1)),
    "an infinite norm counts as non-finite": ("..i", "WAF", "WAF", (F, F), (1, 1)),
    "one loss spike is forgiven": (TEN + "s.", ON + "AA", ON + "AA", (S, S), (0, 0)),
    "spikes trip all after patience": (TEN + "sss", ON + "AAF", ON + "AAF", (S, S), (1, 1)),
    "a healthy step resets patience": (TEN + "ss.ss", ON + "AAAAA", ON + "AAAAA", (S, S), (0, 0)),
    "no spike before there is a baseline": ("..sss", "WAAAA", "WAAAA", (N, N), (0, 0)),
    "a norm jump stays in its region": (TEN + "jjj", ON + "AAA", ON + "AAF", (N, J), (0, 1)),
    "low agreement stays in its region": ("..aaa", "WAAAF", "WAAAA", (A, N), (1, 0)),
    "agreement is a mean over lanes": ("..bbb", "WAAAA", "WAAAA", (N, N), (0, 0)),
    "different triggers share patience": (TEN + "sja", ON + "AAA", ON + "AAA", (A, J), (0, 0)),
    "cooldown, probation, admitted": ("..n........", "WAFFFFPPPAA", "WAFFFFPPPAA", (F, F), (1, 1)),
    "unhealthy steps do not cool down": ("..n..aa..", "WAFFFFFFP", "WAFFFFPPP", (A, F), (1, 1)),
    "probation trips at the first sign": ("..n....a", "WAFFFFPF", "WAFFFFPP", (A, F), (2, 1)),
    "cooldown doubles": ("..n....n.......", "WAFFFFPFFFFFFFF", "WAFFFFPFFFFFFFF", (F, F), (2, 2)),
    "too many trips lock": (BROKEN, LOCKS, LOCKS, (F, F), (3, 3)),
    "a locked region stays": (BROKEN + TEN, LOCKS + "L" * 10, LOCKS + "L" * 10, (F, F), (3, 3)),
    "endless overflow locks": ("..n" + "n" * 9, "WAFFFFFFFFLL", "WAFFFFFFFFLL", (F, F), (3, 3)),
    "endless overflow from the start locks": ("n" * 13, "W" * 11 + "LL", "W" * 11 + "LL", (F, F), (3, 3)),
    "an overflow that ends in time leaves warm-up": (
        "n" * 11 + "...",
        "W" * 12 + "AA",
        "W" * 12 + "AA",
        (F, F),
        (2, 2),
    ),
}


@pytest.mark.parametrize("law", LAWS)
def test_state_machine(law: str):
    events, first, second, triggers, trips = LAWS[law]
    states = run(events)
    assert (letters(states, 0), letters(states, 1)) == (first, second)
    assert tuple(states[-1].trigger.tolist()) == triggers
    assert tuple(states[-1].trips.tolist()) == trips


def test_only_what_is_not_finite_counts_in_warm_up():
    states = run("a" * 8 + ".", warmup_steps=9)
    assert letters(states, 0) == "W" * 8 + "A" and not np.any(states[-1].trips)


def test_no_probation_goes_straight_to_admitted():
    assert letters(run("..n.....", probation_steps=0), 0) == "WAFFFFAA"


def test_no_trips_allowed_locks_at_the_first():
    assert letters(run("..n.", max_trips=0), 0) == "WALL"


def test_no_warmup_starts_admitted():
    assert letters(run(".n", warmup_steps=0), 0) == "AF"


def test_disabled_health_reports_and_never_acts():
    states = run(TEN + "nsrj", enabled=False)
    assert set(letters(states, 0) + letters(states, 1)) == {"A"}
    assert not np.any(states[-1].lane_wait) and not np.any(states[-1].trips)
    assert states[10].trigger.tolist() == [Trigger.NONFINITE] * 2
    assert states[-1].trigger.tolist() == [Trigger.RESIDUAL, Trigger.NORM_JUMP]


@pytest.mark.parametrize("event", ["r", "q"])
def test_a_large_residual_refuses_its_lane_only(event: str):
    states = run(".." + event + "...")
    waits = [state.lane_wait.tolist() for state in states[1:]]
    assert waits == [[0, 0, 0], [0, 3, 0], [0, 2, 0], [0, 1, 0], [0, 0, 0]]
    assert [int(s.lane_wait[1]) == 0 for s in states[2:]] == [False, False, False, True]
    assert letters(states, 0) == "WAAAAA" and not np.any(states[-1].trips)
    assert states[-1].trigger.tolist() == [Trigger.RESIDUAL, Trigger.NONE]


def test_a_residual_ratio_of_a_non_finite_step_is_ignored():
    limits = HealthLimits(**LIMITS)
    bad = signals(nonfinite=[1, 0], residual_ratio=[NAN] * 3)
    state = STEP(limits, LANE_REGIONS, health.init(limits, 2, 3), bad)
    assert state.lane_wait.tolist() == [0, 0, 0]


def test_only_admitted_and_probation_are_admitted():
    state = health.init(HealthLimits(), len(Health), 0)._replace(state=np.arange(5, dtype=np.int32))
    assert np.asarray(health.admitted(state)).tolist() == [False, True, False, True, False]


def test_the_most_severe_trigger_is_recorded():
    limits = HealthLimits(**LIMITS)
    state = run(TEN)[-1]
    everything = dict(residual_ratio=[99.0] * 3, agreement=[0.0] * 3, gradient_norm=[90.0] * 2)
    for drop, expected in [("", 3), ("gradient_norm", 4), ("agreement", 5)]:
        everything.pop(drop, None)
        after = STEP(limits, LANE_REGIONS, state, signals(**everything))
        assert after.trigger.tolist() == [expected] * 2


def losses(state: HealthState, values: list[float], limits: HealthLimits) -> list[HealthState]:
    states = []
    for value in values:
        state = STEP(limits, LANE_REGIONS, state, signals(loss=value))
        states.append(state)
    return states


def test_a_spike_barely_moves_the_baseline():
    limits = HealthLimits(**LIMITS)
    noise = np.random.default_rng(0).normal(2.0, 0.1, 100).tolist()
    before = losses(health.init(limits, 2, 3), noise, limits)[-1]
    after = losses(before, [1e9], limits)[-1]
    assert abs(float(after.loss_mean) - float(before.loss_mean)) < 0.05
    assert float(after.loss_deviation) < 1.5 * float(before.loss_deviation)


def test_a_new_level_is_learnt():
    limits = HealthLimits(**{**LIMITS, "max_trips": 100})
    rng = np.random.default_rng(0)
    before = losses(health.init(limits, 2, 3), rng.normal(2.0, 0.1, 100).tolist(), limits)[-1]
    states = losses(before, rng.normal(8.0, 0.1, 120).tolist(), limits)
    assert states[2].trips.tolist() == [1, 1]
    assert letters(states, 0).endswith("A" * 30)


def test_a_late_loss_starts_its_own_baseline():
    """A loss that is given from step 100 on has no mean of zero to jump from."""
    limits = HealthLimits(**LIMITS)
    state = health.init(limits, 2, 3)
    for _ in range(100):
        state = STEP(limits, LANE_REGIONS, state, EVENTS["u"])
    states = losses(state, [2.0, 2.1, 1.9, 2.05] * 10, limits)
    assert states[-1].trigger.tolist() == [0, 0] and int(states[-1].num_losses) == 40


def test_a_region_that_starts_at_zero_does_not_jump():
    """Frozen or zero-initialised parts have no gradient at first."""
    limits = HealthLimits(**LIMITS)
    state = health.init(limits, 2, 3)
    for norm in [0.0] * 15 + [0.1, 0.12, 0.2, 0.15]:
        state = STEP(limits, LANE_REGIONS, state, signals(gradient_norm=[norm, 3.0]))
    assert state.trigger.tolist() == [0, 0]


any_float = st.floats(width=32) | st.sampled_from([0.0, 1.0, 1e30, 3e38, -3e38, 1e-45, NAN, INF])
any_count = st.integers(-(2**31), 2**31 - 1) | st.just(0)


def vector(elements: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(elements, min_size=size, max_size=size)


any_signals = st.builds(
    signals,
    loss=any_float,
    has_loss=st.booleans(),
    nonfinite=vector(any_count, 2),
    gradient_norm=vector(any_float, 2),
    agreement=vector(any_float, 3),
    residual_ratio=vector(any_float, 3),
    reducer_load=any_float,
)


def check(limits: HealthLimits, before: HealthState, after: HealthState) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
    assert all(np.isfinite(leaf).all() for leaf in after[6:9]), after
    assert all((np.asarray(leaf) >= 0).all() for leaf in after if leaf is not after.loss_mean)
    assert np.isin(after.state, list(Health)).all() and np.isin(after.trigger, list(Trigger)).all()
    assert (after.trips >= before.trips).all()
    assert max(after.trips.tolist()) <= limits.max_trips + 1
    assert (after.cooldown <= health.MAX_COOLDOWN_STEPS).all()
    locked = np.asarray(before.state) == Health.LOCKED
    assert (np.asarray(after.state)[locked] == Health.LOCKED).all()
    waits = np.isin(after.state, [Health.FALLBACK, Health.PROBATION])
    assert (waits == (np.asarray(after.wait) > 0)).all()


@hypothesis.settings(max_examples=60)
@hypothesis.given(sequence=st.lists(any_signals | st.sampled_from(list(EVENTS.values())), max_size=40))
def test_any_signals_leave_a_valid_state(sequence: list[Signals]):
    limits = HealthLimits(**LIMITS)
    state = health.init(limits, 2, 3)
    for measured in sequence:
        after = STEP(limits, LANE_REGIONS, state, measured)
        check(limits, state, after)
        state = after


@hypothesis.settings(max_examples=20)
@hypothesis.given(events=st.text(list(EVENTS), max_size=30), last=any_signals)
def test_jit_changes_nothing(events: str, last: Signals):
    limits = HealthLimits(**LIMITS)
    state = run(events)[-1] if events else health.init(limits, 2, 3)
    jitted = STEP(limits, LANE_REGIONS, state, last)
    plain = health.step(limits, LANE_REGIONS, jax.tree.map(np.asarray, state), last)
    chex.assert_trees_all_close(jitted, plain, rtol=1e-6)
    for name in ("state", "trigger", "trips", "streak", "wait", "cooldown", "lane_wait"):
        chex.assert_trees_all_equal(getattr(jitted, name), getattr(plain, name))


def test_extreme_limits_leave_a_valid_state():
    floats = ("loss_spike_deviations", "norm_jump_ratio", "max_residual_ratio")
    counts = ("patience_steps", "probation_steps", "max_trips", "smoothing_steps")
    huge = {**LIMITS, "cooldown_steps": 2**20}
    huge.update(dict.fromkeys(floats, 1e38))
    huge.update(dict.fromkeys(counts, 2**31 - 1))
    limits = HealthLimits(**huge)
    state = health.init(limits, 2, 3)
    for loss, norm in [(3e38, 3e38), (-3e38, 0.0), (3e38, 1e-45), (0.0, 3e38), (NAN, NAN)] * 4:
        after = STEP(limits, LANE_REGIONS, state, signals(loss=loss, gradient_norm=[norm, norm]))
        check(limits, state, after)
        state = after


def test_one_trace_whatever_the_signals():
    traced = chex.assert_max_traces(n=1)(lambda *args: health.step(HealthLimits(), (0, 0, 1), *args))
    state, once = health.init(HealthLimits(), 2, 3), jax.jit(traced)
    for event in EVENTS.values():
        state = once(state, jax.tree.map(jnp.asarray, event))


def test_few_operations_are_traced_into_a_step():
    limits, lanes = HealthLimits(**LIMITS), tuple(i % 4 for i in range(600))
    state = health.init(limits, 4, 600)
    measured = signals(
        nonfinite=[0] * 4, gradient_norm=[1] * 4, agreement=[1] * 600, residual_ratio=[1] * 600
    )
    jaxpr = jax.make_jaxpr(lambda s, m: health.step(limits, lanes, s, m))(state, measured)
    assert str(jaxpr).count(" = ") < 200


@pytest.mark.parametrize("enumeration, texts", [(Health, health.STATES), (Trigger, health.TRIGGERS)])
def test_every_value_has_a_sentence(enumeration: Any, texts: dict[Any, str]):
    assert list(texts) == list(enumeration) and all(texts.values())
