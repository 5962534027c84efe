"""Published rules for cheap gradients, to compare with: `BASELINES`, a name -> a factory.

    tx = optax.chain(baselines.BASELINES["powersgd2"]("batch", 8), optax.sgd(0.1, momentum=0.9))

Each takes the place of `nf_jax.aggregate_gradients` at the head of `optax.chain`: local gradients in, and out
comes what the paper hands to its optimizer, the same on all workers. It carries an `AggregateState`, so
`training`'s steps, `step_info`, `state_spec`, traces and checkpoints take it as it is, under pmap and
shard_map. Learning rates are the rule's own: signSGD's steps are signs, and DGC has the momentum in it.

All but `accordion` are simulated: the mean is exact arithmetic, in FP32, on what would have been sent. The
bytes of `step_info(state)` are those that one worker would send if all were packed as the paper says, by the
counts that `nf_jax` uses for itself. Seconds say nothing, and health signals are those of what was sent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from experiments.baselines_accordion import accordion, accordion_profile
from experiments.baselines_bucket import bucketsign
from experiments.baselines_dgc import dgc
from experiments.baselines_rule import Leaves, Rule, Shapes, exact_profile, transform
from nf_jax import Profile
from nf_jax.capacity import allreduce_bytes, gather_bytes

# ==================================================================================== signs, ternary


def signsgd(
    axis: str, num_workers: int, *, momentum: float = 0.0, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """signSGD with majority vote: every element is a step of +1 or -1 (arXiv 1802.04434, 1810.05291).

    Follow it with plain SGD at a learning rate of its own, which is how far every weight goes in a step
    (about 1e-4 to 1e-3). One bit cannot say zero: a zero, and a tie between workers, is decided by a coin,
    alike on all workers.

    Simulated: the votes are counted by an exact mean in FP32. Bytes: one bit an element to the worker that
    counts it (all-to-all), one bit back (all-gather).

    Args:
      axis, num_workers: see `BASELINES`.
      momentum: what a worker votes by is a running mean of its gradients with this decay (Signum); 0: the
        gradient itself.
      seed: of the coins.
    """

    def make_rule(shapes: Shapes) -> Rule:
        shard_bytes = 4 * _ceil_div(_num_elements(shapes), 32 * num_workers)

        def send(gradients: Leaves, own: Leaves, shared: Any, step: Array) -> tuple[Leaves, Any]:
            means = {p: momentum * own[p] + (1 - momentum) * gradients[p] for p in own}
            draws = _uniform(shapes, seed, step)
            coins = {path: jnp.where(draw < 0.5, -1.0, 1.0) for path, draw in draws.items()}
            return {p: _sign(leaf, coins[p]) for p, leaf in (gradients | means).items()}, (coins, means)

        def receive(votes: Leaves, kept: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves, Any]:
            coins, means = kept
            return {path: _sign(vote, coins[path]) for path, vote in votes.items()}, means, ()

        num_bytes = 2 * gather_bytes(shard_bytes, num_workers)
        return Rule(send, receive, wire_bytes=(num_bytes,), own=shapes if momentum else {})

    return transform(axis, num_workers, make_rule)


def _sign(values: Array, coins: Array) -> Array:
    return jnp.where(values == 0, coins, jnp.sign(values))


def terngrad(
    axis: str, num_workers: int, *, clip_deviations: float | None = 2.5, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """TernGrad: an element is -s, 0 or s, by chance, and right on average (arXiv 1705.07878).

    `s` is the largest magnitude of the leaf on any worker ("scaler sharing"), and workers draw independently.
    Follow it with the optimizer that plain gradients have.

    Simulated: the mean is exact arithmetic, in FP32, on what would have been sent. Bytes: 2 bits an element
    to the worker that adds it up (all-to-all), back the sum, one of `2 W + 1` integers (all-gather), and one
    f32 a leaf for `s` (all-reduce).

    Args:
      axis, num_workers: see `BASELINES`.
      clip_deviations: gradients of a leaf are clipped to so many standard deviations first, which biases
        them and keeps `s` small; 2.5 is the paper's. None: not at all.
      seed: of the draws.
    """

    def make_rule(shapes: Shapes) -> Rule:
        shard_size = _ceil_div(_num_elements(shapes), num_workers)
        bits_down = math.ceil(math.log2(2 * num_workers + 1))
        words = _ceil_div(2 * shard_size, 32) + _ceil_div(bits_down * shard_size, 32)
        num_bytes = gather_bytes(4 * words, num_workers) + allreduce_bytes(4 * len(shapes), num_workers)

        def send(gradients: Leaves, own: Leaves, shared: Any, step: Array) -> tuple[Leaves, Any]:
            if clip_deviations is not None:
                limits = {path: clip_deviations * jnp.std(leaf) for path, leaf in gradients.items()}
                gradients = {path: jnp.clip(x, -limits[path], limits[path]) for path, x in gradients.items()}
            scales = dict(zip(gradients, lax.pmax(_magnitudes(gradients), axis), strict=True))
            draws = _uniform(shapes, seed, step, lax.axis_index(axis))
            return {p: _ternary(leaf, scales[p], draws[p]) for p, leaf in gradients.items()}, ()

        return Rule(send, wire_bytes=(num_bytes,))

    return transform(axis, num_workers, make_rule)


def _magnitudes(gradients: Leaves) -> Array:
    """The largest of every leaf; infinite where one is not finite, as no maximum over workers tells NaN."""
    largest = [jnp.max(jnp.abs(leaf), initial=0) for leaf in gradients.values()]
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in gradients.values()]
    return jnp.where(jnp.stack(finite), jnp.stack(largest), jnp.inf)


def _ternary(values: Array, scale: Array, draws: Array) -> Array:
    """-scale, 0 or scale, as the draw falls; NaN all over where the scale is infinite."""
    sent = jnp.where(draws * scale < jnp.abs(values), jnp.copysign(scale, values), 0)
    return jnp.where(jnp.isinf(scale), jnp.nan, sent)


def _uniform(shapes: Shapes, seed: int, step: Array, worker: Array | None = None) -> Leaves:
    """Draws in [0, 1), `f32`; the same on all workers where no worker is given."""
    key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), step)
    key = key if worker is None else jax.random.fold_in(key, worker)
    draws = jax.random.uniform(key, (_num_elements(shapes),))
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    parts = jnp.split(draws, ends[:-1])
    return {path: part.reshape(shapes[path]) for path, part in zip(shapes, parts, strict=True)}


# ======================================================================================== low rank


def powersgd(
    axis: str, num_workers: int, *, rank: int, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """PowerSGD: the mean of every matrix M as P Q', one power iteration a step (arXiv 1905.13727).

    With error feedback, and started from the last step's Q. A kernel is a matrix of [everything, last
    dimension]; what would not shrink (vectors, small matrices) is averaged exactly. Follow it with SGD and
    momentum, as the paper does, or with what plain gradients have.

    What a worker keeps is what the *mean* lacks of its own matrix, as in the authors' code: over the workers,
    the mean and what is kept add up to what they had.

    Simulated but for P: the mean is exact arithmetic, in FP32, on every worker's P Q'. Bytes: P and Q, each
    all-reduced, and the exact leaves.
    """
    if rank < 1:
        raise ValueError(f"powersgd: expected a rank of at least 1, got {rank}")

    def make_rule(shapes: Shapes) -> Rule:
        matrices = {path: size for path, shape in shapes.items() if (size := _low_rank_size(shape, rank))}
        numbers = sum(r * (rows + cols) for rows, cols, r in matrices.values())
        numbers += sum(math.prod(shape) for path, shape in shapes.items() if path not in matrices)
        rng = np.random.default_rng(seed)
        first = {p: rng.normal(size=(cols, r)).astype(np.float32) for p, (_, cols, r) in matrices.items()}

        def send(gradients: Leaves, own: Leaves, shared: Leaves, step: Array) -> tuple[Leaves, Any]:
            corrected = {p: (gradients[p] + own[p]).reshape(m[:2]) for p, m in matrices.items()}
            lefts = lax.pmean({p: _matmul(corrected[p], shared[p]) for p in matrices}, axis)
            # QR, not Gram-Schmidt: where the rank is lower than r, it still gives r orthogonal columns.
            lefts = {p: jnp.linalg.qr(left)[0] for p, left in lefts.items()}
            rights = {p: _matmul(corrected[p].T, lefts[p]) for p in matrices}
            approximate = {p: _matmul(lefts[p], rights[p].T).reshape(shapes[p]) for p in matrices}
            return gradients | approximate, (corrected, lefts)

        def receive(means: Leaves, kept: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves, Leaves]:
            corrected, lefts = kept
            mean = {p: means[p].reshape(m[:2]) for p, m in matrices.items()}
            own = {p: (corrected[p] - mean[p]).reshape(shapes[p]) for p in matrices}
            return means, own, {p: _matmul(mean[p].T, lefts[p]) for p in matrices}  # P is orthonormal

        return Rule(
            send,
            receive,
            wire_bytes=(allreduce_bytes(4 * numbers, num_workers),),
            own={path: shapes[path] for path in matrices},
            shared=first,
        )

    return transform(axis, num_workers, make_rule)


_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def _low_rank_size(shape: tuple[int, ...], rank: int) -> tuple[int, int, int] | None:
    """`(rows, columns, rank)`, or None where P and Q would be no smaller."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    rows, cols = math.prod(shape[:-1]), shape[-1]
    rank = min(rank, rows, cols)
    return (rows, cols, rank) if rank * (rows + cols) < rows * cols else None


# =========================================================================================== table

BASELINES: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "signsgd": signsgd,
    "terngrad": terngrad,
    "powersgd1": functools.partial(powersgd, rank=1),
    "powersgd2": functools.partial(powersgd, rank=2),
    "powersgd4": functools.partial(powersgd, rank=4),
    "dgc": dgc,
    "accordion": accordion,
    "sign-per-leaf": functools.partial(bucketsign, cap_bytes=0),
    "sign-per-1mib": functools.partial(bucketsign, cap_bytes=2**20),
    "sign-per-5mib": functools.partial(bucketsign, cap_bytes=5 * 2**20),
    "sign-per-25mib": functools.partial(bucketsign, cap_bytes=25 * 2**20),
}
"""`(axis, num_workers, **options)` -> a transform; `axis` is the name of the data-parallel axis of the
surrounding `pmap` or `shard_map`, and `num_workers` its size."""


def profile_of(name: str, params: Any, **options: Any) -> Profile:
    """The profile by which a baseline averages: `nf_jax.plan` of it has the lanes of its `step_info`.

    Args:
      name: of `BASELINES`.
      params: what the baseline is initialised with.
      **options: what its factory is given.
    """
    if name not in BASELINES:
        raise ValueError(f"baseline: expected one of {', '.join(BASELINES)}, got {name!r}")
    if name != "accordion":
        return exact_profile()
    return accordion_profile(params, **{key: options[key] for key in ("regions", "codec") if key in options})


def _num_elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
