"""Training with Flax and optax: one step for pmap and shard_map, and checkpoints of all residuals.

The only file that imports flax or orbax; everything below it works without them (arXiv 2606.25759).
"""

from __future__ import annotations

import functools
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from nf_jax import collectives
from nf_jax.collectives import AxisName
from nf_jax.state import check_layout, find_states, shard_state, state_spec

LossFn = Callable[..., Any]
"""`(params, batch) -> loss` or `-> (loss, metrics)`: `f32[]` means over this worker's batch."""

Step = Callable[..., tuple[Any, dict[str, Array]]]
"""`(state, batch, reducer_load=None) -> (state, metrics)`."""

_Stepped = tuple[Any, dict[str, Array]]

_MANIFEST = "nf_jax.json"


class TrainState(train_state.TrainState):
    """Flax's `TrainState`, but its optimizer hears the loss and the reducer's load.

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
      batch: this worker's share, a pytree of arrays `[n, ...]`.
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
    params = jax.tree.map(lambda leaf: collectives.varying(leaf, axis), state.params)
    gradients, metrics = _gradients(loss_fn, params, batch, accumulate_steps, axis)
    metrics = _mean_over_workers(metrics, axis)
    loss = metrics["loss"]
    return state.apply_gradients(grads=gradients, value=loss, reducer_load=reducer_load), metrics


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

    def body(state: Any, batch: Any, load: Any) -> tuple[Any, dict[str, Array]]:
        return train_step(
            state,
            batch,
            loss_fn=loss_fn,
            axis=axis,
            accumulate_steps=accumulate_steps,
            reducer_load=load,
        )

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

    def body(state: Any, batch: Any, load: Any) -> tuple[Any, dict[str, Array]]:
        return train_step(
            state,
            batch,
            loss_fn=loss_fn,
            axis=axis,
            accumulate_steps=accumulate_steps,
            reducer_load=None if load is None else load[0],
        )

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
    """One copy of a fresh state per device, for `pmap_step` (`flax.jax_utils.replicate`).

    Named like the axis of the pmap, it is laid out as pmap returns it: one compilation, not two.
    """
    return jax_utils.replicate(state, devices, axis_name=axis)


def place(state: Any, mesh: Mesh, axis: AxisName | None = None) -> Any:
    """A fresh state on a mesh, for `shard_map_step`: `nf_jax.shard_state`, PRNG keys and all."""
    return _wrap_keys(state, shard_state(_unwrap_keys(state), mesh, axis))


def _gradients(
    loss_fn: LossFn, params: Any, batch: Any, accumulate_steps: int, axis: AxisName
) -> tuple[Any, dict[str, Array]]:
    """Local gradients and metrics, averaged over micro-batches."""
    differentiate = jax.grad(functools.partial(_measure, loss_fn), has_aux=True)
    if accumulate_steps == 1:
        return differentiate(params, batch)
    pieces = _split(batch, accumulate_steps)
    shapes = jax.eval_shape(differentiate, params, jax.tree.map(lambda leaf: leaf[0], pieces))
    half = (jnp.bfloat16, jnp.float16)  # sums of many small terms; accumulated in f32
    wide = lambda dtype: jnp.float32 if dtype in half else dtype  # noqa: E731
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, wide(s.dtype)), shapes)

    def add(total: Any, piece: Any) -> tuple[Any, None]:
        new = jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, differentiate(params, piece))
        return jax.tree.map(lambda leaf: collectives.varying(leaf, axis), new), None

    zeros = jax.tree.map(lambda leaf: collectives.varying(leaf, axis), zeros)
    total, _ = lax.scan(add, zeros, pieces)
    return jax.tree.map(
        lambda t, s: (t / jnp.asarray(accumulate_steps, t.dtype)).astype(s.dtype), total, shapes
    )


def _measure(loss_fn: LossFn, params: Any, batch: Any) -> tuple[Array, dict[str, Array]]:
    result = loss_fn(params, batch)
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    if "loss" in metrics:
        raise ValueError('loss_fn: the metrics hold a "loss", which the step adds; rename it')
    for name, number in {"loss": loss, **metrics}.items():
        if jnp.ndim(number):
            raise ValueError(
                f"loss_fn: expected {name!r} to be a scalar, got shape {np.shape(number)}; average it"
            )
    metrics = {"loss": loss, **metrics}
    return loss, {name: jnp.asarray(number).astype(jnp.float32) for name, number in metrics.items()}


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


def _check_global(state: Any, batch: Any, num_workers: int) -> None:
    for path, aggregate in find_states(state):
        sizes = {leaf.shape[0] for leaf in jax.tree.leaves(aggregate.memory)}
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


def _is_key(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _unwrap_keys(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)


def _wrap_keys(like: Any, tree: Any) -> Any:
    """Keys where `like` has keys, from their data."""

    def wrap(pattern: Any, leaf: Any) -> Any:
        if not _is_key(pattern):
            return leaf
        impls = []  # JAX tells it of arrays only, and `pattern` may be abstract
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), pattern)
        return jax.random.wrap_key_data(leaf, impl=impls[0])

    return jax.tree.map(wrap, like, tree)


# ------------------------------------------------------------------------------------- checkpoints


def save(directory: str | Path, state: Any, *, step: int | None = None) -> Path:
    """Writes `directory/<step>`: all of the state, every worker's residuals included.

    The checkpoint appears under its name only when it is whole. In several processes all of them
    call this, with a directory that they share.

    Args:
      directory: where a run's checkpoints lie, on a local or mounted file system; made if missing.
      state: any pytree as pmap returns it (stacked; do not unreplicate it) or shard_map (global).
      step: the checkpoint's number; by default `state.step`.

    Returns:
      The checkpoint's path.

    Raises:
      ValueError: there is such a checkpoint already, or only one worker's residuals are left.
    """
    for path, aggregate in find_states(state):
        check_layout(path, aggregate)
    step = _step_of(state) if step is None else int(step)
    target = Path(directory).absolute() / str(step)
    if target.exists():
        raise ValueError(f"save: {target} exists already; delete it or pass another step")
    partial = target.with_name(f"{step}.partial")
    leaves = {name: leaf for name, leaf in _named(state).items() if np.size(leaf)}
    ocp.save(str(partial), {name: _encode(leaf) for name, leaf in leaves.items()}, overwrite=True)
    if jax.process_index() == 0:
        described = {name: _describe(leaf) for name, leaf in _named(state).items()}
        manifest = {"format": 1, "leaves": described, "files": _checksums(partial)}
        own = zlib.crc32(json.dumps(manifest).encode())
        (partial / _MANIFEST).write_text(json.dumps({**manifest, "crc32": own}))
        os.replace(partial, target)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"nf_jax.save {target}")
    return target


def restore(directory: str | Path, state_like: Any, *, step: int | None = None) -> Any:
    """Reads a checkpoint of `save`, bit for bit.

    Args:
      directory: what `save` was given.
      state_like: a state with the structure, shapes and placement to restore: a fresh one after
        `replicate` or `place`. Leaves without a sharding (`jax.eval_shape`) come back on the
        default device.
      step: which; by default the latest.

    Returns:
      The state, placed like `state_like`.

    Raises:
      ValueError: there is no checkpoint, it is torn or corrupted, or it holds another model,
        profile, optimizer or number of workers, or the other layout.
    """
    root = Path(directory).absolute()
    step = latest_step(root) if step is None else step
    if step is None:
        raise ValueError(f"restore: expected a checkpoint in {root}, found none")
    path = root / str(step)
    manifest = _verified(path)
    named = _named(state_like)
    _check_leaves(path, manifest["leaves"], {name: _describe(leaf) for name, leaf in named.items()})
    try:
        loaded = ocp.load(str(path), {n: _abstract(x) for n, x in named.items() if np.size(x)})
    except Exception as error:  # whatever orbax meets in a checkpoint whose sums are right
        raise ValueError(f"restore: orbax cannot read the checkpoint {path}: {error}") from error
    leaves = [_decode(x, loaded[n]) if np.size(x) else _empty(x) for n, x in named.items()]
    return jax.tree.unflatten(jax.tree.structure(state_like), leaves)


def latest_step(directory: str | Path) -> int | None:
    """The number of the latest checkpoint in `directory`, or None."""
    root = Path(directory)
    names = [child.name for child in root.iterdir()] if root.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=None)


def _step_of(state: Any) -> int:
    if not hasattr(state, "step"):
        raise ValueError(f"save: a {type(state).__name__} has no `step`; pass step=")
    shards = getattr(state.step, "addressable_shards", None)
    return int(np.ravel(shards[0].data if shards else state.step)[0])


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _describe(leaf: Any) -> list[Any]:
    shape = list(np.shape(leaf))
    if _is_stacked(leaf):
        shape[0] = jax.device_count()
    return [shape, str(getattr(leaf, "dtype", None) or jnp.result_type(leaf))]


def _is_stacked(leaf: Any) -> bool:
    """Whether, in several processes, the leaf is pmap's: this process's rows, one per device."""
    if jax.process_count() == 1 or not isinstance(leaf, Array) or not leaf.is_fully_addressable:
        return False
    num_devices = len(leaf.sharding.device_set)
    return leaf.ndim > 0 and num_devices == leaf.shape[0] == jax.local_device_count()


def _global_sharding() -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(jax.devices()), ("worker",)), PartitionSpec("worker"))


def _encode(leaf: Any) -> Any:
    """What orbax can write: no typed keys, no Python or NumPy scalars, no process-local arrays."""
    if not isinstance(leaf, Array):
        return np.asarray(leaf, getattr(leaf, "dtype", None) or jnp.result_type(leaf))
    data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if _is_stacked(leaf):
        rows = [shard.data for shard in data.addressable_shards]
        shape = (jax.device_count(), *data.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, _global_sharding(), rows)
    if jax.process_count() > 1 and data.is_fully_addressable:
        return np.asarray(data)
    return data


def _abstract(leaf: Any) -> Any:
    """The shape, dtype and placement in which orbax is to read a leaf."""
    sharding = _global_sharding() if _is_stacked(leaf) else getattr(leaf, "sharding", None)
    shape, dtype = np.shape(leaf), getattr(leaf, "dtype", None) or jnp.result_type(leaf)
    if _is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype = data.shape, data.dtype
    if _is_stacked(leaf):
        shape = (jax.device_count(), *shape[1:])
    is_own = jax.process_count() > 1 and not _is_stacked(leaf)
    if sharding is None or (is_own and sharding.is_fully_addressable):
        # Orbax then reads NumPy; broadcasting takes no memory for it here.
        return np.broadcast_to(np.zeros((), dtype), shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _decode(like: Any, value: Any) -> Any:
    if _is_stacked(like):
        rows = [shard.data for shard in value.addressable_shards]
        shape = (like.shape[0], *value.shape[1:])
        value = jax.make_array_from_single_device_arrays(shape, like.sharding, rows)
    elif isinstance(like, np.ndarray | np.generic):
        return np.asarray(value)[()] if isinstance(like, np.generic) else np.asarray(value)
    elif isinstance(like, bool | int | float | complex):
        return type(like)(np.asarray(value).item())
    elif not isinstance(value, Array):
        value = jax.device_put(value, getattr(like, "sharding", None))
    return _wrap_keys(like, value)


def _empty(like: Any) -> Any:
    """Orbax stores no arrays of size 0."""
    if isinstance(like, Array | np.ndarray):
        return like
    return jnp.zeros(like.shape, like.dtype)


def _checksums(path: Path) -> dict[str, list[int]]:
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != _MANIFEST)
    name = lambda file: file.relative_to(path).as_posix()  # noqa: E731
    return {name(file): [file.stat().st_size, _crc32(file)] for file in files}


def _crc32(file: Path) -> int:
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def _verified(path: Path) -> dict[str, Any]:
    """The manifest, once every file has proved to be as written: orbax keeps no sums of data."""
    if not path.is_dir():
        raise ValueError(f"restore: expected a checkpoint at {path}, found none")
    damaged = f"restore: the checkpoint {path} is torn or corrupted"
    advice = "restore an earlier one with step=, and delete this one"
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        own = manifest.pop("crc32")
        intact = zlib.crc32(json.dumps(manifest).encode()) == own
        files, found = manifest["files"], _checksums(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{damaged}, or was not written by nf_jax: {_MANIFEST}: {error!r}; {advice}"
        ) from error
    wrong = sorted(name for name in {**files, **found} if files.get(name) != found.get(name))
    if wrong or not intact:
        shown = ", ".join(wrong[:5]) if intact else _MANIFEST
        raise ValueError(f"{damaged} ({shown}: missing, added or changed since then); {advice}")
    return manifest


def _check_leaves(path: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    wrong = [name for name in {**asked, **saved} if saved.get(name) != asked.get(name)]
    if wrong:
        lines = [f"  {n}: saved {saved.get(n)}, asked for {asked.get(n)}" for n in wrong[:5]]
        raise ValueError(
            f"restore: {len(wrong)} leaves of the checkpoint {path} differ from state_like:\n"
            + "\n".join(lines)
            + "\nResiduals belong to their workers: restore with the same model, profile, "
            "optimizer and number of workers, and in the layout that was saved: pmap's from "
            "replicate, shard_map's from place."
        )
