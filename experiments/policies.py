"""The policies: how gradients are averaged, and the optimizer that follows; nothing else differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import nf_jax
from experiments.baselines import BASELINES, profile_of
from experiments.config import AXIS, Config, Policy
from nf_jax import Profile, Route

TROUBLE_FACTOR = 10.0


class Rule(NamedTuple):
    """How gradients are averaged.

    Attributes:
      transform: takes the place of a plain mean.
      profile, substrate: what its lanes are planned from.
    """

    transform: optax.GradientTransformationExtraArgs
    profile: Profile
    substrate: nf_jax.Substrate | None = None


def _static(**codec: Any) -> Profile:
    return Profile.static(Route.SIGN, down="majority", scale="leaf", **codec)


PROFILES: dict[Policy, Callable[[Config], Profile]] = {
    "fp32": lambda _: Profile.static(Route.FP32),
    "bf16": lambda _: Profile.static(Route.BF16),
    "static": lambda _: _static(error_feedback=False, server_error_feedback=False),
    "static-ef": lambda _: _static(),
    "guided": lambda config: Profile.load(config.profile),
}
"""Policies that are a profile."""


def rule_of(config: Config, policy: Policy, params: Any) -> Rule:
    """A policy's rule for a model of these params (or their shapes)."""
    if policy in PROFILES:
        return by_profile(config, PROFILES[policy](config))
    options = baseline_options(config, policy)
    return Rule(BASELINES[policy](AXIS, config.devices, **options), profile_of(policy, params, **options))


def by_profile(config: Config, profile: Profile) -> Rule:
    substrate = config.measured
    aggregate = nf_jax.aggregate_gradients(
        profile, axis=config.axis, num_workers=config.num_workers, substrate=substrate
    )
    return Rule(aggregate, profile, substrate)


def baseline_options(config: Config, policy: Policy) -> dict[str, Any]:
    """A published rule's settings: its paper's, but for what hangs on the length of a run."""
    if policy == "dgc":
        # Its momentum correction takes the place of SGD's momentum; AdamW has one of its own.
        return {"momentum": 0.9 if config.optimizer == "sgd" else 0.0, "warmup_steps": config.steps // 10}
    if policy == "accordion":
        return {"interval_steps": max(config.steps // 20, 1)}
    return {}


def check_files(config: Config) -> None:
    """Raises ValueError before a run for what it would find out in its middle."""
    for policy in config.policies:
        if policy in PROFILES:
            PROFILES[policy](config)
        elif config.devices_per_host > 1:
            raise ValueError(f"policies: expected one level for {policy}, got devices_per_host > 1")
    if config.measured is not None:
        config.measured.check_workers(config.devices // config.devices_per_host)


def make_optimizer(config: Config, rule: Rule, name: str) -> optax.GradientTransformation:
    """The same for every policy, but for how gradients are averaged, and for two rules that bring their own:
    signSGD's steps are signs, and DGC has SGD's momentum in it. AdamW hears of profiles' changes of route."""
    if name == "signsgd":
        signs = optax.sgd(learning_rates(config, config.signsgd_learning_rate))
        return optax.chain(rule.transform, signs)
    schedule = learning_rates(config, config.learning_rate)
    if config.optimizer == "adamw":
        following = optax.adamw(schedule, weight_decay=config.weight_decay)
    else:
        momentum = None if name == "dgc" else 0.9
        is_matrix = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
        decay = optax.add_decayed_weights(config.weight_decay, mask=is_matrix)
        following = optax.chain(decay, optax.sgd(schedule, momentum=momentum, nesterov=momentum is not None))
    tx = optax.chain(rule.transform, optax.clip_by_global_norm(config.clip_norm), following)
    return nf_jax.fresh_moments(tx) if config.optimizer == "adamw" and name in PROFILES else tx


def learning_rates(config: Config, peak: float) -> optax.Schedule:
    """Up in a line, down along a cosine; ten times as high where that is the trouble."""
    if config.warmup_steps:
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, config.warmup_steps, config.steps)
    else:
        schedule = optax.cosine_decay_schedule(peak, config.steps)
    if config.trouble != "learning_rate":
        return schedule
    start, stop = config.troubled.start, config.troubled.stop

    def struck(step: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        is_struck = (jnp.asarray(step) >= start) & (jnp.asarray(step) < stop)
        return schedule(step) * jnp.where(is_struck, TROUBLE_FACTOR, 1.0)

    return struck
