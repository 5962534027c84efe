"""Batches of examples, in an order that a seed decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np


def batches(
    examples: Any, num_steps: int, shape: Sequence[int], seed: int, rows: Sequence[int] | None = None
) -> Iterator[Any]:
    """Batches of leading dimensions `shape`, epoch after epoch, each in an order of its own.

    Args:
      examples: a pytree of arrays `[n, ...]`.
      num_steps: how many.
      shape: `(num_workers, per_worker_batch)`, say.
      seed: of the order, which does not depend on `rows`.
      rows: take only these of the first dimension: one process's share.
    """
    size, total = math.prod(shape), len(jax.tree.leaves(examples)[0])
    rng = np.random.default_rng(seed)
    epochs = [rng.permutation(total) for _ in range(math.ceil(num_steps * size / total))]
    for chosen in np.concatenate(epochs)[: num_steps * size].reshape(num_steps, *shape):
        own = chosen if rows is None else chosen[list(rows)]
        yield jax.tree.map(lambda values, index=own: values[index], examples)


Change = Callable[[np.random.Generator, Any], Any]
"""`(generator, examples of one worker [n, ...]) -> examples`, alike in shape."""


def changed(
    data: Iterator[Any], change: Change, steps: range | None, seed: int, rows: Sequence[int]
) -> Iterator[Any]:
    """Batches with every worker's share changed at these steps (None: all), by a generator of its own.

    Args:
      data: batches `[len(rows), n, ...]`.
      change: what is done.
      steps: at which.
      seed: of the run.
      rows: which workers the shares belong to: in several processes the same changes come out.
    """
    for step, batch in enumerate(data):
        if steps is not None and step not in steps:
            yield batch
            continue
        shares = []
        for position, row in enumerate(rows):
            own = jax.tree.map(lambda values, p=position: values[p], batch)
            shares.append(change(np.random.default_rng((seed, step, row)), own))
        yield jax.tree.map(lambda *parts: np.stack(parts), *shares)


def chunks(examples: Any, size: int) -> Iterator[tuple[int, Any]]:
    """`(count, examples)` in their order, `size` at a time, what is left at the end."""
    total = len(jax.tree.leaves(examples)[0])
    for start in range(0, total, size):
        part = jax.tree.map(lambda values, s=start: values[s : s + size], examples)
        yield min(size, total - start), part
