"""What a soak does to training: losses, gradients and loads that go wrong, by chance or on purpose.

A trouble is data of one step, shaped alike at every step, so that no kind of it compiles anything. An
adversary sees what the last step reported, as a person would who wants routes to change as often as they can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import nf_jax
from nf_jax.health import Health


class Trouble(NamedTuple):
    """What is done to one step; W workers, n leaves.

    Attributes:
      loss: f32[W], added to what each worker says its loss is.
      factors: f32[W, n], multiplies each leaf of its gradient.
      load: f32[W], what it says the reducer's load is.
    """

    loss: np.ndarray
    factors: np.ndarray
    load: np.ndarray


Adversary = Callable[[np.random.Generator, nf_jax.StepInfo, Trouble], None]
"""Writes into a trouble that does nothing yet."""

LOSSES = (1e3, -1e3, 3e38, -3e38, np.inf, -np.inf, np.nan)
FACTORS = (0.0, 1e-6, -1.0, 1e3, 1e20, 3e38, np.inf, -np.inf, np.nan)
LOADS = (0.0, 0.69, 0.71, 0.89, 0.9, 1.0, 7.0, -1.0, np.inf, np.nan)


def calm(rng: np.random.Generator, info: nf_jax.StepInfo, trouble: Trouble) -> None:
    """Nothing goes wrong."""


def random(rng: np.random.Generator, info: nf_jax.StepInfo, trouble: Trouble) -> None:
    """Each signal is anything at all once in thirty steps, on one worker."""
    for values, choices in ((trouble.loss, LOSSES), (trouble.factors, FACTORS), (trouble.load, LOADS)):
        if rng.random() < 1 / 30:
            values[tuple(rng.integers(size) for size in values.shape)] = rng.choice(choices)


def load(rng: np.random.Generator, info: nf_jax.StepInfo, trouble: Trouble) -> None:
    """The reducer is full whenever it is used, and idle as soon as it is not."""
    trouble.load[rng.integers(len(trouble.load))] = 0.0 if info.saturated else 1.0


def health(rng: np.random.Generator, info: nf_jax.StepInfo, trouble: Trouble) -> None:
    """Training breaks whenever a region is trusted, and recovers as soon as none is."""
    if np.isin(info.health_state, (Health.ADMITTED, Health.PROBATION)).any():
        worker, leaf = (rng.integers(size) for size in trouble.factors.shape)
        if rng.random() < 0.5:
            trouble.factors[worker, leaf] = np.nan
        else:
            trouble.loss[worker] = 1e6


def residual(rng: np.random.Generator, info: nf_jax.StepInfo, trouble: Trouble) -> None:
    """Gradients shrink whenever a lane is low-bit, so that what it still owes is large beside them."""
    if info.next_routes.any() and rng.random() < 0.8:
        trouble.factors[:] = 1e-3


def overflow(rng: np.random.Generator, info: nf_jax.StepInfo, trouble: Trouble) -> None:
    """One worker's gradients are never finite for twenty steps in every fifty."""
    if int(info.step) % 50 >= 30:
        trouble.factors[0] = np.inf


def everything(rng: np.random.Generator, info: nf_jax.StepInfo, trouble: Trouble) -> None:
    """All of these, each in one step of eight."""
    for adversary in (random, load, health, residual):
        if rng.random() < 1 / 8:
            adversary(rng, info, trouble)


KINDS: dict[str, Adversary] = {
    adversary.__name__: adversary
    for adversary in (calm, random, load, health, residual, overflow, everything)
}


def make_trouble(
    kind: str, rng: np.random.Generator, info: nf_jax.StepInfo, num_workers: int, num_leaves: int
) -> Trouble:
    """The trouble of the step after the one that `info` reports."""
    trouble = Trouble(
        loss=np.zeros((num_workers,), np.float32),
        factors=np.ones((num_workers, num_leaves), np.float32),
        load=np.zeros((num_workers,), np.float32),
    )
    KINDS[kind](rng, info, trouble)
    return trouble
