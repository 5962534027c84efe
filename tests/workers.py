"""Runs a function on several workers, in each way that JAX has for it, and reads what it sends."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

AXIS = "batch"
MODES = ("pmap", "checked", "unchecked")  # the last two: shard_map with and without check_vma


def mesh_of(num_workers: int) -> Mesh:
    devices = jax.devices()[:num_workers]
    return jax.make_mesh((num_workers,), (AXIS,), devices=devices, axis_types=(AxisType.Auto,))


def mapped(
    function: Callable[[Any, Any], Any],
    num_workers: int,
    mode: str,
    *,
    on_trace: Callable[[], Any] = lambda: None,
) -> Any:
    """Runs `function(local, shared)` on every worker; what it returns is stacked: `[W, ...]`.

    Args:
      function: takes one worker's view of `local`, and `shared` as it is.
      num_workers: `W`.
      mode: one of `MODES`.
      on_trace: called whenever the function is traced.

    Returns:
      A jitted function of `local` (every leaf `[W, ...]`) and `shared`.
    """

    def traced(local: Any, shared: Any) -> Any:
        on_trace()
        return function(local, shared)

    if mode == "pmap":
        return jax.pmap(traced, axis_name=AXIS, in_axes=(0, None), devices=jax.devices()[:num_workers])

    def one_worker(local: Any, shared: Any) -> Any:
        result = traced(jax.tree.map(lambda leaf: leaf[0], local), shared)
        return jax.tree.map(lambda leaf: leaf[None], result)

    return jax.jit(
        jax.shard_map(
            one_worker,
            mesh=mesh_of(num_workers),
            in_specs=(P(AXIS), P()),
            out_specs=P(AXIS),
            check_vma=mode == "checked",
        )
    )


_COLLECTIVES = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
_OPERATION = re.compile(rf"= (\(.*?\)|\S+) ({_COLLECTIVES}|ragged-all-to-all|send)(-start)?\(")
_ARRAY = re.compile(r"([a-z]+[0-9]*)\[([0-9,]*)\]")
_ITEM_BYTES = {"pred": 1, "u8": 1, "s8": 1, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}
_ITEM_BYTES |= {"u32": 4, "s32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8}


def sent_bytes(hlo: str, num_workers: int, num_inner: int = 1) -> float:
    """Bytes that one worker sends to other hosts of `num_inner` devices, on average, by a compiled program.

    A ring all-reduce, laid host by host, sends `2 (n - 1) / n` of its operand over every border between
    hosts, the others send a share of `1 / n` of their whole to every other member.
    """
    total = 0.0
    for line in hlo.splitlines():
        if not (match := _OPERATION.search(line)):
            continue
        shapes, operation, asynchronous = match.groups()
        assert not asynchronous and operation in ("all-reduce", "all-gather", "all-to-all", "reduce-scatter")
        result = sum(
            _ITEM_BYTES[kind] * int(np.prod([int(n) for n in dims.split(",") if n]))
            for kind, dims in _ARRAY.findall(shapes)
        )
        members = _members(line, num_workers)
        size, num_hosts = len(members), len({member // num_inner for member in members})
        if num_hosts == 1:
            continue
        if operation == "all-reduce":
            total += 2 * (size - 1) / size * result * num_hosts / size
        else:
            assert operation != "reduce-scatter"
            total += result / size * (size - size // num_hosts)
    return total


def _members(line: str, num_workers: int) -> list[int]:
    """The first of an operation's groups: `{{0,2},{1,3}}`, or `[2,2]<=[2,2]T(1,0)`: numbers in order,
    transposed, cut into rows."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return [int(n) for n in listed[1].split(",")]
    match = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert match, line
    numbers = np.arange(num_workers).reshape([int(n) for n in match[3].split(",")])
    if match[4]:
        numbers = numbers.transpose([int(n) for n in match[4].split(",")])
    return numbers.reshape(int(match[1]), int(match[2]))[0].tolist()


def collectives_of(hlo: str) -> list[str]:
    """The names of a compiled program's collectives."""
    return [operation for _, operation, _ in _OPERATION.findall(hlo)]


def rows_are_equal(stacked: Any) -> bool:
    """Whether all workers hold the same bits."""
    return all(
        row.tobytes() == leaf[0].tobytes()
        for leaf in map(np.asarray, jax.tree.leaves(stacked))
        for row in leaf
    )
