"""A trace read back as arrays, for replay: a long one in seconds."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nf_jax.telemetry import Lanes, Signals
from nf_jax.trace import SIGNAL_DTYPES, open_trace, read_head, read_records

_CHUNK_STEPS = 1024  # steps that are held as Python objects at a time
_COLUMN_DTYPES: dict[str, type[np.generic]] = {
    "step": np.int32,
    "routes": np.int32,
    "reasons": np.int32,
    "wire_bytes": np.int64,
    "fp32_bytes": np.int64,
    "step_seconds": np.float64,
    **SIGNAL_DTYPES,
}


class Columns(NamedTuple):
    """A trace read back as arrays, for replay: n steps, L lanes, R regions.

    Attributes:
      header: the trace's first line.
      lanes: the run's lanes.
      steps: int32[n], the steps in the order of the file.
      routes: int32[n, L], the `Route` each lane took.
      reasons: int32[n, L], the `Reason` for it.
      signals: what was measured; every field has a leading dimension n.
      overhead_bytes: what a worker sent for the signals at every step, whatever the routes.
      fp32_bytes: what it would have sent at every step in FP32.
      step_seconds: f64[n], the host's time of a step, NaN where a line has none; None: no line has one.
      truncated: whether the last line was torn, and left out.
      source: the file, for messages.
    """

    header: dict[str, Any]
    lanes: Lanes
    steps: np.ndarray
    routes: np.ndarray
    reasons: np.ndarray
    signals: Signals
    overhead_bytes: int
    fp32_bytes: int
    step_seconds: np.ndarray | None
    truncated: bool
    source: str = "the trace"

    @property
    def profile_source(self) -> str:
        """Where the profile of the run stands, for messages."""
        return f"{self.source}: line 1: profile"


def read_columns(path: str | os.PathLike[str]) -> Columns:
    """Reads what replay needs of a trace, as arrays: a long one in seconds, in little memory.

    Args:
      path: a file that `TraceWriter` wrote.

    Returns:
      The `Columns`; a torn last line is dropped and reported, as by `read_trace`.

    Raises:
      ValueError: as `read_trace`.
    """
    with open_trace(path) as stream:
        header, lanes = read_head(stream, path)
        records = read_records(stream, len(lanes.names), path)
        chunks, truncated = [], False
        while chunk := list(itertools.islice(records, _CHUNK_STEPS)):
            truncated = chunk[-1] is None
            if whole := [record for record in chunk if record is not None]:
                chunks.append(_stack(whole))
    columns = {
        name: np.concatenate([chunk[name] for chunk in chunks] or [np.zeros((0,))]) for name in _COLUMN_DTYPES
    }
    seconds, routes = columns.pop("step_seconds"), columns.pop("routes")
    sent, fp32_bytes = (columns.pop(name) for name in ("wire_bytes", "fp32_bytes"))
    beside = sent - wire_bytes_of(lanes, routes) if len(sent) else sent
    return Columns(
        header=header,
        lanes=lanes,
        steps=columns.pop("step"),
        routes=routes,
        reasons=columns.pop("reasons"),
        overhead_bytes=_constant(beside, "wire_bytes", path),
        fp32_bytes=_constant(fp32_bytes, "fp32_bytes", path),
        signals=Signals(**columns),
        step_seconds=seconds if np.isfinite(seconds).any() else None,
        truncated=truncated,
        source=str(path),
    )


def wire_bytes_of(lanes: Lanes, routes: np.ndarray) -> np.ndarray:
    """int64[n], bytes that a worker sends of all lanes by the routes of each step, int32[n, L]."""
    table = np.asarray(lanes.wire_bytes, np.int64)
    total = np.zeros(len(routes), np.int64)
    for lane, row in enumerate(table):
        total += row[routes[:, lane]]
    return total


def _constant(num_bytes: np.ndarray, name: str, path: object) -> int:
    """Bytes that are the same in all steps, 0 where there is none; ValueError where they are not."""
    wrong = np.flatnonzero((num_bytes != num_bytes[:1]) | (num_bytes < 0))
    if len(wrong):
        raise ValueError(
            f"{path}: line {wrong[0] + 2}: {name}: expected what this step's routes send, and beside it as "
            f"much as on line 2, at least 0: {num_bytes[0]} bytes; got {num_bytes[wrong[0]]}"
        )
    return int(num_bytes[0]) if len(num_bytes) else 0


def _stack(records: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    rows = [record | record["signals"] | {"step_seconds": _seconds(record)} for record in records]
    return {name: np.asarray([row[name] for row in rows], dtype) for name, dtype in _COLUMN_DTYPES.items()}


def _seconds(record: Mapping[str, Any]) -> float:
    value = record.get("step_seconds")
    return math.nan if value is None else value
