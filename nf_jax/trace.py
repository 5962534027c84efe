"""A trace: telemetry on disk, one JSON line a step, complete enough to replay every decision."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from nf_jax import checks
from nf_jax.records import TRACE_VERSION, check_header, check_step, decode, lanes_from_header, parse_line
from nf_jax.telemetry import Lanes, Reason, Signals, StepInfo

MAX_LINE_BYTES = 16 * 2**20  # 100,000 lanes take about half


class Trace(NamedTuple):
    """A trace read back: the header, its lanes, one dict per step, whether the end was torn, and the file."""

    header: dict[str, Any]
    lanes: Lanes
    steps: list[dict[str, Any]]
    truncated: bool
    source: str

    @property
    def profile_source(self) -> str:
        """Where the profile of the run stands, for messages."""
        return f"{self.source}: line 1: profile"


class TraceWriter:
    """Writes a trace: a header line, then one flushed line per step. Use it on one process only.

    Args:
      path: the file; it may exist only where `resume_step` is given.
      profile_toml: the profile the run uses, as TOML.
      lanes: the run's lanes.
      resume_step: continue the file at this step: lines of that step or later are dropped (as is a
        torn last line), its header stays. Starts a new file where there is none.
      **header: anything else worth keeping (JSON-like), such as `num_workers=4`.

    Raises:
      ValueError: the file exists and is not resumed, is no trace of this profile and lanes, or ends before
        the step to resume.

    Example:
      with TraceWriter("run.jsonl", profile_toml, lanes, num_workers=4) as trace:
          trace.write(info, step_seconds=0.12)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        profile_toml: str,
        lanes: Lanes,
        *,
        resume_step: int | None = None,
        **header: Any,
    ):
        path = Path(path)
        self._num_lanes = len(lanes.names)
        head = _merge(_header(profile_toml, lanes), header)
        exists = path.exists() and path.stat().st_size > 0
        if exists and resume_step is None:
            raise ValueError(
                f"{path}: expected no such file, but it exists; pass resume_step to continue it, or remove it"
            )
        if exists and resume_step is not None:
            _cut(path, head, resume_step)
        else:
            _replace(path, [head])
        self._stream: IO[str] = path.open("a", encoding="ascii", newline="\n")

    def write(self, info: StepInfo, **extra: Any) -> None:
        """Appends one step; `extra` are more JSON-like fields, such as host-measured seconds."""
        if np.shape(info.step) != () or np.shape(info.routes) != (self._num_lanes,):
            raise ValueError(
                f"StepInfo: expected a scalar step and {self._num_lanes} routes, got shapes "
                f"{np.shape(info.step)} and {np.shape(info.routes)}; pass one worker's view"
            )
        record = info._asdict() | {"signals": info.signals._asdict()}
        del record["wire"], record["fp32_wire"]
        record |= {"wire_bytes": info.wire_bytes, "fp32_bytes": info.fp32_bytes}
        self._put(_merge(record, extra))

    def sync(self) -> None:
        """Returns when every line lies on the disk: before a checkpoint that stands on them gets its name."""
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, record: Mapping[str, Any]) -> None:
        self._stream.write(dump_line(record))
        self._stream.flush()


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace; a torn last line (the run was killed) is dropped and reported, not an error.

    Args:
      path: a file that `TraceWriter` wrote.

    Returns:
      The `Trace`; the strings that stand for NaN and the infinities are floats again.

    Raises:
      ValueError: the file cannot be read, is not a trace, or holds a broken line; names the line.
    """
    with open_trace(path) as stream:
        header, lanes = read_head(stream, path)
        steps = list(read_records(stream, len(lanes.names), path))
    truncated = bool(steps) and steps[-1] is None
    return Trace(header, lanes, [step for step in steps if step is not None], truncated, str(path))


def signals_from_record(record: Mapping[str, Any]) -> Signals:
    """The `Signals` (NumPy) of one step of a trace, as replay feeds them to the controller.

    Args:
      record: one entry of `Trace.steps`.

    Returns:
      Signals with the dtypes and shapes that the live run had.

    Raises:
      ValueError: a signal is missing or is not a number.
    """
    measured = record.get("signals")
    try:
        values = {
            name: np.asarray(measured[name], dtype)  # type: ignore[index] (caught below)
            for name, dtype in SIGNAL_DTYPES.items()
        }
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"step {record.get('step')}: expected the signals {', '.join(SIGNAL_DTYPES)} as "
            f"numbers, got {error!r}"
        ) from None
    return Signals(**values)


SIGNAL_DTYPES: dict[str, type[np.generic]] = {
    "loss": np.float32,
    "has_loss": np.bool_,
    "nonfinite": np.int32,
    "gradient_norm": np.float32,
    "agreement": np.float32,
    "residual_ratio": np.float32,
    "reducer_load": np.float32,
}


def open_trace(path: str | os.PathLike[str]) -> IO[bytes]:
    """The file, open at its first line; ValueError where that fails."""
    try:
        return checks.open_file(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: expected a readable file with a trace, cannot open it: {reason}") from None


def read_head(stream: IO[bytes], path: object) -> tuple[dict[str, Any], Lanes]:
    """The header and its lanes, from the first line."""
    header = check_header(parse_line(read_line(stream, path, 1)), path)
    return header, lanes_from_header(header, path)


def read_records(stream: IO[bytes], num_lanes: int, path: object) -> Iterator[dict[str, Any] | None]:
    """The steps of a trace, after its header; None at the end where the last line is torn."""
    before, number = None, 2
    while line := read_line(stream, path, number):
        record = parse_line(line)
        if record is None and not line.endswith(b"\n"):
            yield None
            return
        before = check_step(record, num_lanes, before, f"{path}: line {number}")
        number += 1
        yield before


def read_line(stream: IO[bytes], path: object, number: int) -> bytes:
    """The next line, empty at the end of the file; never more than `MAX_LINE_BYTES` of it."""
    try:
        line = stream.readline(MAX_LINE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{path}: line {number}: expected a readable file, got: {error.strerror}") from None
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"{path}: line {number}: expected at most {MAX_LINE_BYTES} bytes, got more")
    return line


def _encode(value: Any) -> Any:
    """Plain JSON values; f32 in its shortest spelling, NaN and infinities as strings."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_encode(item) for item in value]
    array = np.asarray(value)
    if array.dtype.kind not in "biufVU":
        raise ValueError(f"a trace holds numbers, text, lists and dicts, got {type(value)}")
    if array.ndim:
        return [_encode(item) for item in array]
    return array.item() if array.dtype.kind in "biuU" else _encode(float(str(array[()])))


def as_read(record: Mapping[str, Any]) -> dict[str, Any]:
    """What `record` is when it has been written and read back."""
    return decode(json.loads(dump_line(record)))


def dump_line(record: Mapping[str, Any]) -> str:
    """One line of JSON, NaN and infinities spelled as strings."""
    return json.dumps(_encode(record), allow_nan=False, separators=(",", ":")) + "\n"


def _merge(record: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    if taken := sorted(record.keys() & extra.keys()):
        raise ValueError(f"extra fields {taken}: the trace uses these names itself; rename them")
    return record | extra


def _header(profile_toml: str, lanes: Lanes) -> dict[str, Any]:
    fixed = [None if reason is None else Reason(reason).name for reason in lanes.fixed]
    return {
        "nf_jax_trace": TRACE_VERSION,
        "profile": profile_toml,
        "lanes": lanes._asdict() | {"fixed": fixed},
    }


def _cut(path: Path, head: dict[str, Any], resume_step: int) -> None:
    """Keeps the steps before `resume_step`, in a file that is replaced as a whole."""
    old = read_trace(path)
    new = as_read(head)
    if changed := [key for key in ("profile", "lanes") if old.header[key] != new[key]]:
        raise ValueError(
            f"{path}: expected a trace of the same run, but its {' and '.join(changed)} differ; "
            "start a new trace"
        )
    kept = [record for record in old.steps if record["step"] < resume_step]
    last = kept[-1]["step"] if kept else -1
    if kept and last != resume_step - 1:
        raise ValueError(
            f"{path}: expected a trace up to step {resume_step - 1}, but it ends at step {last}: "
            "it is of another run, or lost its end; restore an earlier checkpoint, or start a new trace"
        )
    _replace(path, [old.header, *kept])


def _replace(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes the file as a whole: who is killed here finds the old one, or none."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="ascii", newline="\n") as stream:
        stream.writelines(map(dump_line, records))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
