"""Laws of limits from data: what is counted is what health compares, by the same recursions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import synthetic_job

from nf_jax import thresholds
from nf_jax.columns import Columns
from nf_jax.profile import HealthLimits, Profile
from nf_jax.replay import replay
from nf_jax.telemetry import Lanes, Signals

SMOOTHING, NUM_STEPS = 20, 300
LANES = Lanes(
    names=("a", "b", "c"),
    regions=(0, 1, 1),
    groups=(0, 1, 1),
    fixed=(None, None, None),
    num_elements=(64, 64, 64),
    wire_bytes=((8, 4, 1, 2),) * 3,
)


def make_signals(seed: int) -> Signals:
    """A falling loss with outliers, steps without one, steps that are not finite, lanes that do not vote."""
    rng = np.random.default_rng(seed)
    loss = 1 + np.exp(-np.arange(NUM_STEPS) / 50) + 0.1 * rng.standard_normal(NUM_STEPS)
    loss[rng.random(NUM_STEPS) < 0.02] += 5
    voted, kept = rng.random((2, NUM_STEPS, 3)) < 0.7
    return Signals(
        loss=loss.astype(np.float32),
        has_loss=rng.random(NUM_STEPS) < 0.9,
        nonfinite=(rng.random((NUM_STEPS, 2)) < 0.01).astype(np.int32),
        gradient_norm=rng.lognormal(size=(NUM_STEPS, 2)).astype(np.float32),
        agreement=np.where(voted, rng.random((NUM_STEPS, 3)), -1).astype(np.float32),
        residual_ratio=np.where(kept, 9 * rng.random((NUM_STEPS, 3)), 0).astype(np.float32),
        reducer_load=np.zeros(NUM_STEPS, np.float32),
    )


def make_columns(signals: Signals, lanes: Lanes = LANES, **header: object) -> Columns:
    zeros = np.zeros((len(signals.loss), len(lanes.names)), np.int32)
    steps = np.arange(len(signals.loss), dtype=np.int32)
    return Columns(dict(header), lanes, steps, zeros, zeros, signals, 0, 1, None, False)


def count(signals: Signals) -> dict[str, np.ndarray]:
    """The same in plain Python and float64, from the words of baselines.py alone."""
    losses, norms, mean, deviation, norm_mean = 0, 0, 0.0, 0.0, np.zeros(2)
    found: dict[str, list[float]] = {name: [] for name in (*thresholds.EXACT_RULES, *thresholds.LOSSY_RULES)}
    for i in range(NUM_STEPS):
        if signals.nonfinite[i].any():
            continue
        loss, norm = float(signals.loss[i]), signals.gradient_norm[i].astype(float)
        if signals.has_loss[i] and losses >= 10:
            found["loss_spike_deviations"].append((loss - mean) / max(deviation, 0.01 * abs(mean), 1e-6))
        if norms >= 10:
            found["norm_jump_ratio"] += list(norm / norm_mean)
        for members in ([0], [1, 2]):
            voted = [a for a in signals.agreement[i, members] if a >= 0]
            found["min_agreement"] += [float(np.mean(voted))] if voted else []
        found["max_residual_ratio"] += [float(r) for r in signals.residual_ratio[i] if r > 0]
        if signals.has_loss[i]:
            losses += 1
            shift = loss - mean
            spread = 0.0 if losses == 1 else abs(shift)
            mean += shift / min(losses, SMOOTHING)
            deviation += (spread - deviation) / min(losses, SMOOTHING)
        norms += 1
        norm_mean = norm if norms == 1 else norm_mean + (norm - norm_mean) / min(norms, SMOOTHING)
    return {name: np.sort(values) for name, values in found.items()}


@pytest.mark.parametrize("seed", range(3))
def test_distances_equal_a_count_in_plain_python(seed):
    signals = make_signals(seed)
    measured = thresholds.measure(make_columns(signals), HealthLimits(smoothing_steps=SMOOTHING))
    for name, expected in count(signals).items():
        values = np.ravel(getattr(measured, name))
        values = np.sort(values[np.isfinite(values)])
        np.testing.assert_allclose(values, expected, rtol=2e-3, atol=1e-5, err_msg=name)


def test_limits_are_the_documented_quantiles_of_all_runs_together():
    runs = [make_signals(seed) for seed in range(3)]
    own = HealthLimits(smoothing_steps=SMOOTHING)
    rules = thresholds.EXACT_RULES | thresholds.LOSSY_RULES
    found = thresholds.find_limits([make_columns(s, num_workers=8) for s in runs], own, rules)
    for name, rule in rules.items():
        values = np.sort(np.concatenate([count(signals)[name] for signals in runs]))
        # The least value that at most one in a thousand lies above; for agreement, below.
        place = math.ceil(rule.quantile * (len(values) - 1)) if rule.quantile > 0.5 else 0
        if rule.quantile < 0.5:
            place = math.floor(rule.quantile * (len(values) - 1))
        limit = found[name]
        assert limit.num_values == len(values)
        assert limit.at_quantile == pytest.approx(values[place], rel=2e-3)
        assert limit.most == pytest.approx(values[-1 if rule.quantile > 0.5 else 0], rel=2e-3)


@pytest.mark.parametrize("at", [1e-4, 0.0377, 0.9999, 1.0, 2.51, 999.1, 1e6 + 1, 1e30])
def test_a_limit_is_rounded_away_from_the_data_by_less_than_a_tenth(at):
    upper = thresholds.make_limit("max_residual_ratio", thresholds.Rule(0.999, 2.0, 1e-9), [at] * 60)
    assert 2 * at <= upper.value * (1 + 1e-12) and upper.value < 2 * at * 1.1
    if at <= 1:
        lower = thresholds.make_limit("min_agreement", thresholds.LOSSY_RULES["min_agreement"], [at] * 60)
        assert at / 2 * 0.9 < lower.value <= at / 2 * (1 + 1e-12)
    assert float(f"{upper.value:.1e}") == upper.value


def test_a_signal_that_hardly_moves_makes_no_hair_trigger():
    limit = thresholds.make_limit("norm_jump_ratio", thresholds.EXACT_RULES["norm_jump_ratio"], [1.0] * 60)
    assert limit.value == thresholds.EXACT_RULES["norm_jump_ratio"].least > 1


def test_too_few_values_make_no_limit():
    signals = make_signals(0)
    quiet = signals._replace(
        has_loss=np.arange(NUM_STEPS) < 10 + thresholds.MIN_VALUES - 2,
        nonfinite=np.zeros_like(signals.nonfinite),
        agreement=np.full_like(signals.agreement, -1),
        residual_ratio=np.zeros_like(signals.residual_ratio),
    )
    rules = thresholds.EXACT_RULES | thresholds.LOSSY_RULES
    found = thresholds.find_limits([make_columns(quiet)], HealthLimits(smoothing_steps=SMOOTHING), rules)
    assert set(found) == {"norm_jump_ratio"}
    assert thresholds.find_limits([], HealthLimits(), rules) == {}


@pytest.mark.parametrize("num_workers", [2, 3, 8, 64])
def test_an_agreement_that_chance_exceeds_is_no_limit(num_workers):
    rng = np.random.default_rng(0)
    coins = 2 * rng.integers(0, 2, (num_workers, 200_000)) - 1
    chance = float(np.abs(coins.mean(0)).mean())
    for agreement, expected in ((2 * chance * 0.97, 0.0), (min(2 * chance * 1.1, 1), chance * 1.1)):
        signals = make_signals(0)._replace(agreement=np.full((NUM_STEPS, 3), agreement, np.float32))
        columns = make_columns(signals, num_workers=[num_workers, 4])
        rules = {"min_agreement": thresholds.LOSSY_RULES["min_agreement"]}
        found = thresholds.find_limits([columns], HealthLimits(smoothing_steps=SMOOTHING), rules)
        if agreement < 1:
            assert found["min_agreement"].value == pytest.approx(expected, rel=0.1)


def test_runs_keep_within_the_limits_that_they_make():
    """By the controller itself: no trip and no refusal in a run that made the limits."""
    start = synthetic_job.START
    columns = synthetic_job.make_columns(start, 120, 1, lambda measured, seed: measured)
    rules = thresholds.EXACT_RULES | thresholds.LOSSY_RULES
    found = thresholds.find_limits([columns], start.health, rules)
    limits = {name: limit.value for name, limit in found.items()} | {"warmup_steps": 0}
    profile = start.model_copy(update={"health": start.health.model_copy(update=limits)})
    again = replay(columns._replace(header=columns.header | {"profile": profile.dumps()}))
    assert set(found) == set(rules)
    assert not again.trips.any()
    assert (again.routes[:, 1:].max(), again.routes.sum()) == (2, columns.routes.sum())
    assert Profile.loads(profile.dumps()) == profile
