"""Training with Flax and optax: one step for pmap and for shard_map.

The only file that imports flax; everything below it works without (arXiv 2606.25759).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from nf_jax import collectives
from nf_jax.collectives import AxisName
from nf_jax.host_state import stack_state
from nf_jax.state import find_states, own_part, shard_state, state_spec

LossFn = Callable[..., Any]
"""`(params, batch) -> loss` or `-> (loss, metrics)`: `f32[]` means over this worker's batch.

With a `model_state` in the TrainState, `(params, batch, model_state) -> (loss, metrics, new_model_state)`.
"""

Step = Callable[..., tuple[Any, dict[str, Array]]]
"""`(state, batch, reducer_load=None) -> (state, metrics)`."""

_Stepped = tuple[Any, dict[str, Array]]


class TrainState(train_state.TrainState):
    """Flax's `TrainState`, but its optimizer hears the loss and the reducer's load.

    Attributes:
      model_state: what the model changes itself, such as batch-norm statistics (`batch_stats`), a pytree of
        arrays; the same on all workers: averaged exactly after every step, never packed. None: nothing.

    Example:
      >>> import jax.numpy as jnp, optax, nf_jax
      >>> tx = optax.chain(
      ...     nf_jax.aggregate_gradients(
      ...         nf_jax.Profile.static(nf_jax.Route.SIGN), axis="batch", num_workers=1
      ...     ),
      ...     optax.sgd(0.1),
      ... )
      >>> state = TrainState.create(apply_fn=None, params={"kernel": jnp.ones((4, 4))}, tx=tx)
      >>> state.step
      0
    """

    model_state: Any = None

    def apply_gradients(
        self, *, grads: Any, value: Any = None, reducer_load: Any = None, **kwargs: Any
    ) -> Any:
        """Like Flax's, but hands `value=` and `reducer_load=` to `tx.update` if given.

        Args:
          grads: local gradients, shaped like the params.
          value: `f32[]`, the loss. Hand in its mean over workers if anything after the aggregation
            reads it too: `optax.contrib.reduce_on_plateau` would let the workers drift apart.
          reducer_load: `f32[]`, this process's measured load of the reducer; 1 is full.
          **kwargs: fields to replace, as in Flax.

        Returns:
          The next state.
        """
        given = {"value": value, "reducer_load": reducer_load}
        extra = {name: number for name, number in given.items() if number is not None}
        update = functools.partial(optax.with_extra_args_support(self.tx).update, **extra)
        hearing = self.replace(tx=optax.GradientTransformation(self.tx.init, update))
        fields = {"tx": self.tx, **kwargs}
        return train_state.TrainState.apply_gradients(hearing, grads=grads, **fields)


# ------------------------------------------------------------------------------------------- steps


def train_step(
    state: Any,
    batch: Any,
    *,
    loss_fn: LossFn,
    axis: AxisName,
    accumulate_steps: int = 1,
    reducer_load: Any = None,
) -> tuple[Any, dict[str, Array]]:
    """One worker's step, the same body under pmap and under shard_map with either `check_vma`.

    Use it in a mapped function of your own where `pmap_step` and `shard_map_step` are too narrow,
    say for dropout: `loss_fn=functools.partial(loss_fn, rng=jax.random.fold_in(rng, state.step))`.

    Gradients of `accumulate_steps` micro-batches are averaged here, and communicated once.
    `optax.MultiSteps` around the aggregation runs all of it at every micro-batch, k times the bytes
    for one result; a NaN stays in its accumulator for good, and with a `should_skip_update_fn`
    workers that decide differently wait for each other for ever.

    Args:
      state: a `TrainState` (or its subclass) with one `aggregate_gradients` first in its `tx`.
      batch: this worker's share, a pytree of arrays `[n, ...]`. All workers count alike. Where they hold
        different numbers of examples, pad to one size and weigh: `weight` 0 for a pad, `W * n / total`
        for an example, in `loss = mean(weight * losses)`.
      loss_fn: `(params, batch) -> loss` or `(loss, metrics)`, all means over the batch given: only
        then is accumulation the same as one large batch.
      axis: name(s) of the data-parallel axis.
      accumulate_steps: micro-batches, must divide `n`. They run in a `lax.scan`, in which XLA on
        CPU is slow at convolutions.
      reducer_load: `f32[]`, see `TrainState.apply_gradients`.

    Returns:
      The next state, and `{"loss": ..., **metrics}`: `f32[]` means over workers, the same on all.

    Raises:
      ValueError: at trace time, for a `tx` that averages nothing, a loss or metric that is not a
        scalar, a batch that cannot be split.
    """
    if not isinstance(state, TrainState):
        raise ValueError(
            f"train_step: expected an nf_jax.training.TrainState, got {type(state).__name__} of "
            f"{type(state).__module__}, whose apply_gradients hands no loss to the optimizer"
        )
    if not find_states(state.opt_state):
        raise ValueError(
            "train_step: expected nf_jax.aggregate_gradients in state.tx, found none: every worker "
            "would train on its own gradients. Use "
            "tx=optax.chain(nf_jax.aggregate_gradients(...), optimizer)."
        )
    if not isinstance(state.params, Array) and OVERWRITE_WITH_GRADIENT in state.params:
        raise ValueError(
            f"train_step: the params hold {OVERWRITE_WITH_GRADIENT!r} (Flax's FP8 statistics), "
            "which local gradients replace: workers would drift apart. Average them yourself."
        )
    own = functools.partial(collectives.varying, axis=axis)
    params, model_state = jax.tree.map(own, (state.params, state.model_state))
    gradients, metrics, model_state = _gradients(loss_fn, params, model_state, batch, accumulate_steps, axis)
    metrics = _mean_over_workers(metrics, axis)
    model_state = _mean_of_finite(model_state, state.model_state, axis)
    state = state.apply_gradients(
        grads=gradients, value=metrics["loss"], reducer_load=reducer_load, model_state=model_state
    )
    return state, metrics


def pmap_step(
    loss_fn: LossFn,
    *,
    axis: str = "batch",
    accumulate_steps: int = 1,
    devices: Sequence[Any] | None = None,
    donate: bool = True,
) -> Step:
    """`train_step` under `jax.pmap`.

    Args:
      loss_fn, accumulate_steps: see `train_step`.
      axis: the name that `aggregate_gradients` was given.
      devices: one per worker; all by default.
      donate: reuse the old state's buffers; it cannot be read afterwards.

    Returns:
      `step(state, batch, reducer_load=None)`: the state as from `replicate`, the batch
      `[W, n, ...]` (this process's workers), the load a number of this process. Metrics are `[W]`,
      all rows equal.

    Example:
      >>> import jax.numpy as jnp, optax, nf_jax
      >>> profile = nf_jax.Profile.static(nf_jax.Route.FP32)
      >>> tx = nf_jax.aggregate_gradients(profile, axis="batch", num_workers=1)
      >>> tx = optax.chain(tx, optax.sgd(0.1))
      >>> state = TrainState.create(apply_fn=None, params={"kernel": jnp.ones(4)}, tx=tx)
      >>> device = jax.local_devices()[:1]
      >>> step = pmap_step(lambda params, x: (x @ params["kernel"]).mean(), devices=device)
      >>> state, metrics = step(replicate(state, device), jnp.ones((1, 8, 4)))
      >>> float(metrics["loss"][0])
      4.0
    """

    one = functools.partial(train_step, loss_fn=loss_fn, axis=axis, accumulate_steps=accumulate_steps)

    def body(state: Any, batch: Any, load: Any) -> tuple[Any, dict[str, Array]]:
        return one(state, batch, reducer_load=load)

    donated = (0,) if donate else ()
    mapped = jax.pmap(body, axis_name=axis, devices=devices, donate_argnums=donated)

    def step(state: Any, batch: Any, reducer_load: float | None = None) -> _Stepped:
        if np.ndim(state.step) != 1:
            raise ValueError(
                "pmap_step: expected a state with one copy per device, got one of a single worker; "
                "use replicate(state)."
            )
        if reducer_load is None:
            return mapped(state, batch, None)
        return mapped(state, batch, np.full(np.shape(state.step), reducer_load, np.float32))

    return step


def shard_map_step(
    loss_fn: LossFn,
    mesh: Mesh,
    state: Any,
    *,
    axis: AxisName = "batch",
    accumulate_steps: int = 1,
    check_vma: bool = True,
    donate: bool = True,
) -> Step:
    """`train_step` under `jax.jit(jax.shard_map(...))`.

    Args:
      loss_fn, accumulate_steps, donate: see `train_step` and `pmap_step`.
      mesh: the device mesh, its axes of type Auto.
      state: the state, placed or not, or its `jax.eval_shape`: only its structure is read.
      axis: the mesh axis (or axes) that `aggregate_gradients` was given.
      check_vma: whether JAX checks what varies between workers.

    Returns:
      `step(state, batch, reducer_load=None)`: the state as from `place`, the batch `[W * n, ...]`
      (in several processes, global arrays sharded over `axis`), the load a number of this process.
      Metrics are `f32[]`.
    """
    spec, split = state_spec(state, axis), PartitionSpec(axis)
    names = (axis,) if isinstance(axis, str) else axis
    num_workers = int(np.prod([mesh.shape[name] for name in names]))
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"mesh: expected axes of type Auto, got {mesh.axis_types}; build it with "
            "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
        )

    one = functools.partial(train_step, loss_fn=loss_fn, axis=axis, accumulate_steps=accumulate_steps)

    def body(state: Any, batch: Any, load: Any) -> tuple[Any, dict[str, Array]]:
        return one(state, batch, reducer_load=None if load is None else load[0])

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(spec, split, split),
        out_specs=(spec, PartitionSpec()),
        check_vma=check_vma,
    )

    @functools.partial(jax.jit, donate_argnums=(0,) if donate else ())
    def run(state: Any, batch: Any, load: Any) -> tuple[Any, dict[str, Array]]:
        _check_global(state, batch, num_workers)
        return mapped(state, batch, load)

    def step(state: Any, batch: Any, reducer_load: float | None = None) -> _Stepped:
        if reducer_load is None:
            return run(state, batch, None)
        # Sharded: processes measure different loads, and jit takes replicated values for equal.
        load = np.full((num_workers,), reducer_load, np.float32)
        place_load = functools.partial(jax.make_array_from_callback, load.shape)
        return run(state, batch, place_load(NamedSharding(mesh, split), load.__getitem__))

    return step


def replicate(state: Any, devices: Sequence[Any] | None = None, *, axis: str = "batch") -> Any:
    """A fresh state, or a `host_state`, on every device of this process, for `pmap_step`.

    Laid out as pmap returns it, for which it is named like the axis of the pmap: one compilation, not two.

    Args:
      state: as `init` returns it, or all workers' as `nf_jax.host_state.host_state` does.
      devices: this process's, one per worker; all by default.
      axis: the name that `aggregate_gradients` was given.

    Raises:
      ValueError: the state was unreplicated: all residuals but one worker's are gone.
    """
    devices = list(jax.local_devices() if devices is None else devices)
    order = devices if jax.process_count() == 1 else jax.devices()
    stacked = stack_state(state, [order.index(device) for device in devices])
    sharding = NamedSharding(Mesh(np.asarray(devices), (axis,)), PartitionSpec(axis))
    return jax.device_put(stacked, sharding)


def place(state: Any, mesh: Mesh, axis: AxisName | None = None) -> Any:
    """A fresh state, or a `host_state`, on a mesh, for `shard_map_step`: `nf_jax.shard_state`."""
    return shard_state(state, mesh, axis)


def _gradients(
    loss_fn: LossFn, params: Any, model_state: Any, batch: Any, accumulate_steps: int, axis: AxisName
) -> tuple[Any, dict[str, Array], Any]:
    """Local gradients and metrics, averaged over micro-batches, and the model state after the last."""
    measured = jax.grad(functools.partial(_measure, loss_fn), has_aux=True)

    def differentiate(params: Any, batch: Any, model_state: Any) -> tuple[tuple[Any, Any], Any]:
        gradients, (metrics, model_state) = measured(params, batch, model_state)
        return (gradients, metrics), model_state

    if accumulate_steps == 1:
        (gradients, metrics), model_state = differentiate(params, batch, model_state)
        return gradients, metrics, model_state
    pieces = _split(batch, accumulate_steps)
    first = jax.tree.map(lambda leaf: leaf[0], pieces)
    shapes, _ = jax.eval_shape(differentiate, params, first, model_state)
    half = (jnp.bfloat16, jnp.float16)  # sums of many small terms; accumulated in f32
    wide = lambda dtype: jnp.float32 if dtype in half else dtype  # noqa: E731
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, wide(s.dtype)), shapes)

    def add(carry: Any, piece: Any) -> tuple[Any, None]:
        total, model_state = carry
        found, model_state = differentiate(params, piece, model_state)
        new = jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, found)
        return jax.tree.map(lambda leaf: collectives.varying(leaf, axis), (new, model_state)), None

    zeros = jax.tree.map(lambda leaf: collectives.varying(leaf, axis), zeros)
    (total, model_state), _ = lax.scan(add, (zeros, model_state), pieces)
    mean = lambda t, s: (t / jnp.asarray(accumulate_steps, t.dtype)).astype(s.dtype)  # noqa: E731
    return *jax.tree.map(mean, total, shapes), model_state


def _measure(
    loss_fn: LossFn, params: Any, batch: Any, model_state: Any
) -> tuple[Array, tuple[dict[str, Array], Any]]:
    if model_state is None:
        result = loss_fn(params, batch)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
    else:
        result = loss_fn(params, batch, model_state)
        if not isinstance(result, tuple) or len(result) != 3:
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise ValueError(
                "loss_fn: expected (loss, metrics, new_model_state), as the TrainState has a model_state, "
                f"got {got}"
            )
        loss, metrics, model_state = result
    if "loss" in metrics:
        raise ValueError('loss_fn: the metrics hold a "loss", which the step adds; rename it')
    for name, number in {"loss": loss, **metrics}.items():
        if jnp.ndim(number):
            raise ValueError(
                f"loss_fn: expected {name!r} to be a scalar, got shape {np.shape(number)}; mean it"
            )
    metrics = {"loss": loss, **metrics}
    metrics = {name: jnp.asarray(number).astype(jnp.float32) for name, number in metrics.items()}
    return loss, (metrics, model_state)


def _split(batch: Any, accumulate_steps: int) -> Any:
    if type(accumulate_steps) is not int or accumulate_steps < 1:
        raise ValueError(f"accumulate_steps: expected a positive int, got {accumulate_steps!r}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not leaf.ndim or leaf.shape[0] % accumulate_steps:
            name = jax.tree_util.keystr(path) or "<root>"
            raise ValueError(
                f"accumulate_steps: batch leaf {name} of shape {leaf.shape} (one worker's share) "
                f"cannot be split into {accumulate_steps} equal micro-batches along its first dim"
            )
    return jax.tree.map(lambda x: x.reshape(accumulate_steps, -1, *x.shape[1:]), batch)


def _mean_over_workers(metrics: dict[str, Array], axis: AxisName) -> dict[str, Array]:
    gathered = collectives.gather(jnp.stack(list(metrics.values())), axis).mean(0)
    return dict(zip(metrics, gathered, strict=True))


def _mean_of_finite(new: Any, old: Any, axis: AxisName) -> Any:
    """The exact mean over workers of a model's own state; a step that spoils any of it changes none."""
    leaves, treedef = jax.tree.flatten(new)
    if jax.tree.structure(old) != treedef:
        raise ValueError(
            f"loss_fn: expected a new_model_state of structure {jax.tree.structure(old)}, got {treedef}"
        )
    if not leaves:
        return new
    means = collectives.mean_leaves(leaves, axis)
    is_sound = jnp.all(jnp.asarray([jnp.all(jnp.isfinite(mean)) for mean in means]))
    kept = [jnp.where(is_sound, mean, leaf) for mean, leaf in zip(means, jax.tree.leaves(old), strict=True)]
    return jax.tree.unflatten(treedef, kept)


def _check_global(state: Any, batch: Any, num_workers: int) -> None:
    for path, aggregate in find_states(state):
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(own_part(aggregate))}
        if aggregate.step.ndim or sizes - {num_workers}:
            raise ValueError(
                f"shard_map_step: expected the state at {path} to hold residuals of {num_workers} "
                "workers; use place(state, mesh) on a fresh state."
            )
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not leaf.ndim or leaf.shape[0] % num_workers:
            name = jax.tree_util.keystr(path) or "<root>"
            raise ValueError(
                f"shard_map_step: batch leaf {name} of shape {leaf.shape} cannot be divided among "
                f"{num_workers} workers along its first dim"
            )
