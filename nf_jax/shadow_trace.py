"""A shadow trace: what candidates would have done, on disk beside the trace, one JSON line a step."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from nf_jax.candidates import Candidate, ShadowLeaves
from nf_jax.records import parse_line
from nf_jax.telemetry import ShadowInfo
from nf_jax.trace import dump_line, open_trace, read_line

SHADOW_VERSION = 1
MEASURES = tuple(name for name in ShadowInfo._fields if name != "step")
_TAG = "nf_jax_shadow"
_TABLES = ("shapes", "wire_bytes", "seconds")


class ShadowTrace(NamedTuple):
    """A shadow trace read back: n steps, C candidates, m leaves.

    Attributes:
      header: the file's first line.
      leaves: candidates, leaves, and bytes.
      info: every measure `f32[n, C, m]`, NaN at steps whose gradients were not finite; `step` is `int64[n]`.
      truncated: whether the last line was torn, and left out.
    """

    header: dict[str, Any]
    leaves: ShadowLeaves
    info: ShadowInfo
    truncated: bool


class ShadowWriter:
    """Writes a shadow trace: a header line, then one flushed line for every so many steps.

    Use it on one process only, and call `write` after every step. A report finds the file by its content; by
    custom it is `shadow.jsonl`, beside `trace.jsonl`.

    Args:
      path: the file; it may exist only where `resume_step` is given.
      profile_toml: the profile that was given to `aggregate_gradients`, as TOML.
      leaves: of `nf_jax.shadow_plan(profile, params, num_workers, ...)`.
      every: write the steps that this divides. A line takes about 30 bytes a leaf and candidate.
      resume_step: continue the file at this step: lines of that step or later are dropped (as is a
        torn last line), its header stays. Starts a new file where there is none.
      **header: anything else worth keeping (JSON-like).

    Raises:
      ValueError: the file exists and is not resumed, or is of another run; `every` is not positive.

    Example:
      watched = nf_jax.shadow_plan(profile, params, num_workers).leaves
      with ShadowWriter("run/shadow.jsonl", profile.dumps(), watched, every=10) as shadow:
          shadow.write(nf_jax.shadow_info(state))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        profile_toml: str,
        leaves: ShadowLeaves,
        *,
        every: int = 1,
        resume_step: int | None = None,
        **header: Any,
    ):
        if type(every) is not int or every < 1:
            raise ValueError(f"every: expected a positive number of steps, got {every!r}")
        path, self._every = Path(path), every
        self._shape = (len(leaves.candidates), len(leaves.paths))
        own = {_TAG: SHADOW_VERSION, "profile": profile_toml, "leaves": _encode(leaves)}
        if taken := sorted(own.keys() & header.keys()):
            raise ValueError(f"extra fields {taken}: the trace uses these names itself; rename them")
        exists = path.exists() and path.stat().st_size > 0
        if exists and resume_step is None:
            raise ValueError(
                f"{path}: expected no such file, but it exists; pass resume_step to continue it, or remove it"
            )
        if exists and resume_step is not None:
            _cut(path, own, resume_step)
        self._stream: IO[str] = path.open("a", encoding="ascii", newline="\n")
        if not exists:
            self._put(own | header)

    def write(self, info: ShadowInfo) -> None:
        """Appends one step, if it is one of those to be written; measures keep four digits."""
        shapes = {np.shape(measure) for measure in info[1:]}
        if np.shape(info.step) != () or shapes != {self._shape}:
            raise ValueError(
                f"ShadowInfo: expected a scalar step and measures of shape {self._shape}, got shapes "
                f"{np.shape(info.step)} and {sorted(shapes)}; pass one worker's view (nf_jax.shadow_info)"
            )
        step = int(np.asarray(info.step))
        if step < 0 or step % self._every:
            return
        rounded = {name: _rounded(np.asarray(getattr(info, name))) for name in MEASURES}
        self._put({"step": step} | rounded)

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> ShadowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, record: Mapping[str, Any]) -> None:
        self._stream.write(dump_line(record))
        self._stream.flush()


def read_shadow(path: str | os.PathLike[str]) -> ShadowTrace:
    """Reads a shadow trace; a torn last line (the run was killed) is dropped and reported, not an error.

    Args:
      path: a file that `ShadowWriter` wrote.

    Raises:
      ValueError: the file cannot be read, is no shadow trace, or holds a broken line; names the line.
    """
    with open_trace(path) as stream:
        header, leaves = _read_head(read_line(stream, path, 1), path)
        shape, truncated = (len(leaves.candidates), len(leaves.paths)), False
        steps: list[int] = []
        columns: dict[str, list[np.ndarray]] = {name: [] for name in MEASURES}
        number = 1
        while line := read_line(stream, path, number := number + 1):
            record = parse_line(line)
            if record is None and not line.endswith(b"\n"):
                truncated = True
                break
            step, measures = _check_step(record, shape, f"{path}: line {number}")
            steps.append(step)
            for name, values in zip(MEASURES, measures, strict=True):
                columns[name].append(values)
    stacked = [
        np.stack(values) if values else np.zeros((0, *shape), np.float32) for values in columns.values()
    ]
    return ShadowTrace(header, leaves, ShadowInfo(np.asarray(steps, np.int64), *stacked), truncated)


def is_shadow(path: str | os.PathLike[str]) -> bool:
    """Whether a file is a shadow trace, by its first bytes."""
    with open_trace(path) as stream:
        return stream.read(len(_TAG) + 3).startswith(f'{{"{_TAG}"'.encode())


def _encode(leaves: ShadowLeaves) -> dict[str, Any]:
    return leaves._asdict() | {"candidates": [c.model_dump() for c in leaves.candidates]}


def _rounded(values: np.ndarray) -> list[list[float]]:
    return [[float(f"{value:.4g}") for value in row] for row in values.tolist()]


def _read_head(line: bytes, path: object) -> tuple[dict[str, Any], ShadowLeaves]:
    header = parse_line(line)
    version = header.get(_TAG) if type(header) is dict else None
    if type(version) is not int or type(header.get("profile")) is not str:
        raise ValueError(
            f"{path}: line 1: expected the header of an nf_jax shadow trace; is it another file, or cut off?"
        )
    if version > SHADOW_VERSION:
        raise ValueError(
            f"{path}: line 1: expected version {SHADOW_VERSION} or older, got {version}: written by "
            "a newer nf_jax"
        )
    try:
        return header, _leaves_of(header["leaves"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: line 1: expected the leaves of the run, got {error!r}") from None


def _leaves_of(read: dict[str, Any]) -> ShadowLeaves:
    read = ShadowLeaves._field_defaults | read
    fields = {name: read[name] for name in ShadowLeaves._fields}
    columns = {name: tuple(value) for name, value in fields.items() if isinstance(value, list | tuple)}
    columns |= {name: tuple(tuple(row) for row in columns[name]) for name in _TABLES}
    columns["candidates"] = tuple(Candidate.model_validate(c) for c in columns["candidates"])
    leaves = ShadowLeaves(**fields | columns)
    num, tables = len(leaves.paths), (leaves.wire_bytes, leaves.seconds or leaves.wire_bytes)
    sizes = {len(getattr(leaves, name)) for name in ("shapes", "dtypes", "regions", "order", "lossy")}
    sizes |= {len(leaves.fp32_bytes), len(leaves.fp32_seconds or leaves.paths)}
    if sizes != {num} or any([len(row) for row in t] != [num] * len(leaves.candidates) for t in tables):
        raise ValueError("columns of different lengths")
    return leaves


def _check_step(record: Any, shape: tuple[int, int], where: str) -> tuple[int, list[np.ndarray]]:
    if (
        type(record) is not dict
        or not record.keys() >= {"step", *MEASURES}
        or type(record["step"]) is not int
    ):
        raise ValueError(
            f"{where}: expected one step of a shadow trace (JSON with step, {', '.join(MEASURES)})"
        )
    try:
        measures = [np.asarray(record[name], np.float32) for name in MEASURES]
    except (TypeError, ValueError):
        measures = []
    if not measures or any(values.shape != shape for values in measures):
        raise ValueError(f"{where}: expected {shape[0]} candidates x {shape[1]} numbers in every measure")
    return record["step"], measures


def _cut(path: Path, head: dict[str, Any], resume_step: int) -> None:
    """Keeps the steps before `resume_step`, in a file that is replaced as a whole."""
    old, new = read_shadow(path), json.loads(dump_line(head))
    if changed := [key for key in ("profile", "leaves") if old.header[key] != new[key]]:
        raise ValueError(
            f"{path}: expected a shadow trace of the same run, but its {' and '.join(changed)} differ; "
            "start a new trace"
        )
    kept = (old.info.step < resume_step).tolist()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with path.open("rb") as lines, temporary.open("wb") as written:
        written.write(lines.readline())
        written.writelines(line for line, keep in zip(lines, kept, strict=False) if keep)
    os.replace(temporary, path)
