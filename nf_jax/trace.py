"""A trace: telemetry on disk, one JSON line a step, complete enough to replay every decision."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from nf_jax.telemetry import Lanes, Reason, Signals, StepInfo

TRACE_VERSION = 1
MAX_HEADER_BYTES = 64 * 2**20
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NONFINITE_WORDS = (b'"NaN"', b'Infinity"')


class Trace(NamedTuple):
    """A trace read back: the header, its lanes, one dict per step, and whether the end was torn."""

    header: dict[str, Any]
    lanes: Lanes
    steps: list[dict[str, Any]]
    truncated: bool


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
      ValueError: the file exists and is not resumed, or is no trace of this profile and lanes.

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
        self._stream: IO[str] = path.open("a", encoding="ascii", newline="\n")
        if not exists:
            self._put(head)

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
    return Trace(header, lanes, [step for step in steps if step is not None], truncated)


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
_STEP_FIELDS = {*StepInfo._fields, "wire_bytes", "fp32_bytes"} - {"wire", "fp32_wire"}


def open_trace(path: str | os.PathLike[str]) -> IO[bytes]:
    """The file, open at its first line; ValueError where that fails."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise ValueError(f"{path}: expected a trace, cannot open it: {error.strerror}") from None


def read_head(stream: IO[bytes], path: object) -> tuple[dict[str, Any], Lanes]:
    """The header and its lanes, from the first line."""
    header = _check_header(parse_line(stream.readline(MAX_HEADER_BYTES)), path)
    return header, _lanes_from_header(header, path)


def read_records(lines: Iterable[bytes], num_lanes: int, path: object) -> Iterator[dict[str, Any] | None]:
    """The steps of a trace, after its header; None at the end where the last line is torn."""
    for number, line in enumerate(lines, start=2):
        record = parse_line(line)
        if record is None and not line.endswith(b"\n"):
            yield None
            return
        yield _check_step(record, num_lanes, f"{path}: line {number}")


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


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NONFINITE.get(value, value)
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return {key: _decode(item) for key, item in value.items()} if type(value) is dict else value


def dump_line(record: Mapping[str, Any]) -> str:
    """One line of JSON, NaN and infinities spelled as strings."""
    return json.dumps(_encode(record), allow_nan=False, separators=(",", ":")) + "\n"


def parse_line(line: bytes) -> Any:
    """The line's value, or None where it is not JSON."""
    try:
        value = json.loads(line)
        # Decoding visits every value, and hardly a line needs it.
        return _decode(value) if any(word in line for word in _NONFINITE_WORDS) else value
    except (ValueError, RecursionError):
        return None


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


def _check_header(header: Any, path: object) -> dict[str, Any]:
    version = header.get("nf_jax_trace") if type(header) is dict else None
    if type(version) is not int or type(header.get("profile")) is not str:
        raise ValueError(
            f"{path}: line 1: expected the header of an nf_jax trace; is it another file, or cut off?"
        )
    if version > TRACE_VERSION:
        raise ValueError(
            f"{path}: line 1: expected version {TRACE_VERSION} or older, got {version}: written by "
            "a newer nf_jax"
        )
    return header


def _lanes_from_header(header: dict[str, Any], path: object) -> Lanes:
    try:
        read = Lanes._field_defaults | header["lanes"]
        columns = {name: tuple(read[name]) for name in Lanes._fields}
        columns["fixed"] = tuple(None if name is None else Reason[name] for name in columns["fixed"])
        columns |= {name: tuple(tuple(row) for row in columns[name]) for name in ("wire_bytes", "pays")}
        sizes = {len(column) for name, column in columns.items() if column or name != "pays"}
        if len(sizes) != 1:
            raise ValueError("columns of different lengths")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: line 1: expected the lanes of the run, got {error!r}") from None
    return Lanes(**columns)


def _check_step(record: Any, num_lanes: int, where: str) -> dict[str, Any]:
    if type(record) is not dict or not record.keys() >= _STEP_FIELDS:
        raise ValueError(f"{where}: expected one step of a trace (JSON with {sorted(_STEP_FIELDS)})")
    routes = record["routes"]
    if type(record["step"]) is not int or type(routes) is not list or len(routes) != num_lanes:
        raise ValueError(f"{where}: expected an integer step and {num_lanes} routes")
    return record


def _cut(path: Path, head: dict[str, Any], resume_step: int) -> None:
    """Keeps the steps before `resume_step`, in a file that is replaced as a whole."""
    old = read_trace(path)
    new = json.loads(dump_line(head))
    if changed := [key for key in ("profile", "lanes") if old.header[key] != _decode(new[key])]:
        raise ValueError(
            f"{path}: expected a trace of the same run, but its {' and '.join(changed)} differ; "
            "start a new trace"
        )
    kept = [old.header, *(record for record in old.steps if record["step"] < resume_step)]
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text("".join(map(dump_line, kept)), encoding="ascii", newline="\n")
    os.replace(temporary, path)
