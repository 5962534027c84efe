"""Laws of telemetry: what is written is what is read, and what cannot be read says so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import chex
import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from nf_jax import columns as columns_module
from nf_jax import records, trace
from nf_jax.columns import read_columns
from nf_jax.telemetry import Lanes, Reason, Signals, StepInfo
from nf_jax.trace import TraceWriter, read_trace

LANES = Lanes(
    names=("0/backbone", "1/head"),
    regions=(0, 1),
    groups=(0, -1),
    fixed=(None, Reason.SMALL),
    num_elements=(1000, 10),
    wire_bytes=((4000, 2000, 140, 270), (40, 40, 40, 40)),
)
TOML = 'name = "é"\n'


def signals(**changes: Any) -> Signals:
    values: dict[str, Any] = dict(
        loss=jnp.float32(0.1),
        has_loss=jnp.asarray(True),
        nonfinite=jnp.asarray([0, 3], jnp.int32),
        gradient_norm=jnp.asarray([1e-30, 3e38], jnp.float32),
        agreement=jnp.asarray([0.5, -1.0], jnp.float32),
        residual_ratio=jnp.asarray([1.7, 0.0], jnp.float32),
        reducer_load=jnp.float32(0),
    )
    return Signals(**values | changes)


def info(step: int, **changes: Any) -> StepInfo:
    two = jnp.asarray([2, 0], jnp.int32)
    return StepInfo(
        step=jnp.int32(step),
        routes=two,
        reasons=jnp.asarray([Reason.PROFILE, Reason.SMALL], jnp.int32),
        next_routes=two,
        next_reasons=two,
        wire=jnp.asarray([70000, 65535], jnp.int32),
        fp32_wire=jnp.asarray([140000, 5], jnp.int32),
        health_state=two,
        trigger=two,
        trips=two,
        saturated=jnp.asarray(False),
        signals=signals(),
    )._replace(**changes)


def write(path: Path, steps: range, **options: Any) -> Path:
    with TraceWriter(path, TOML, LANES, **options) as trace:
        for step in steps:
            trace.write(info(step), seconds=0.5)
    return path


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_trace(path).steps]


def test_bytes_are_exact_beyond_int32():
    assert info(0).wire_bytes == 70000 * 65536 + 65535
    assert info(0).fp32_bytes == 140000 * 65536 + 5
    assert info(0).wire_fraction == info(0).wire_bytes / info(0).fp32_bytes


def test_nothing_to_send_is_a_fraction_of_one():
    zero = jnp.zeros([2], jnp.int32)
    assert info(0, wire=zero, fp32_wire=zero).wire_fraction == 1.0


def test_what_is_written_is_read(tmp_path: Path):
    trace = read_trace(write(tmp_path / "t.jsonl", range(3), num_workers=np.int64(4)))
    assert trace.lanes == LANES and hash(trace.lanes) == hash(LANES)
    assert trace.header["profile"] == TOML and trace.header["num_workers"] == 4
    assert not trace.truncated and len(trace.steps) == 3
    record = trace.steps[2]
    assert record["step"] == 2 and record["seconds"] == 0.5
    assert record["reasons"] == [0, 2] and record["saturated"] is False
    assert record["wire_bytes"] == info(2).wire_bytes and "wire" not in record


f32 = st.floats(width=32)


@hypothesis.given(loss=f32, norms=st.lists(f32, min_size=2, max_size=2))
def test_signals_survive_the_disk_to_the_bit(loss: float, norms: list[float]):
    measured = signals(loss=np.float32(loss), gradient_norm=np.asarray(norms, np.float32))
    line = trace.dump_line({"step": 0, "signals": measured._asdict()})

    def forbid(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    json.loads(line, parse_constant=forbid)
    back = trace.signals_from_record(records.parse_line(line.encode()))
    chex.assert_trees_all_equal_shapes_and_dtypes(back, measured)
    chex.assert_trees_all_equal(back, Signals(*map(np.asarray, measured)))


def test_non_finite_extras_survive(tmp_path: Path):
    with TraceWriter(tmp_path / "t", TOML, LANES) as trace:
        trace.write(info(0), a=math.nan, b=[np.float32(math.inf)], c={"d": -math.inf}, e=None)
    record = read_trace(tmp_path / "t").steps[0]
    assert math.isnan(record["a"]) and record["b"] == [math.inf]
    assert record["c"] == {"d": -math.inf} and record["e"] is None


def test_every_step_is_on_disk_at_once(tmp_path: Path):
    with TraceWriter(tmp_path / "t", TOML, LANES) as trace:
        trace.write(info(0))
        assert steps_of(tmp_path / "t") == [0]


def test_a_torn_last_line_is_dropped_and_reported(tmp_path: Path):
    path = write(tmp_path / "t", range(3))
    whole = path.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    for cut in range(start + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        trace = read_trace(path)
        assert trace.truncated and len(trace.steps) == 2
    path.write_bytes(whole[:-1])  # only the line feed is missing: nothing is lost
    assert not read_trace(path).truncated and steps_of(path) == [0, 1, 2]


@pytest.mark.parametrize("torn", [False, True])
def test_resume_drops_later_steps(tmp_path: Path, torn: bool):
    path = write(tmp_path / "t", range(5), seed=1)
    if torn:
        path.write_bytes(path.read_bytes()[:-9])
    write(path, range(3, 6), resume_step=3, seed=2)
    assert steps_of(path) == [0, 1, 2, 3, 4, 5]
    assert read_trace(path).header["seed"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_resume_keeps_lines_exactly(tmp_path: Path):
    path = write(tmp_path / "t", range(3))
    before = path.read_bytes()
    write(path, range(0), resume_step=3)
    assert path.read_bytes() == before


def test_resume_without_a_file_starts_one(tmp_path: Path):
    assert steps_of(write(tmp_path / "t", range(7, 9), resume_step=7)) == [7, 8]


def test_an_existing_trace_is_not_overwritten(tmp_path: Path):
    path = write(tmp_path / "t", range(2))
    with pytest.raises(ValueError, match="resume_step"):
        TraceWriter(path, TOML, LANES)
    assert steps_of(path) == [0, 1]


def test_resume_of_another_run_is_an_error(tmp_path: Path):
    path = write(tmp_path / "t", range(2))
    other = LANES._replace(names=("a", "b"))
    with pytest.raises(ValueError, match="profile and lanes differ"):
        TraceWriter(path, TOML + "#", other, resume_step=1)
    assert steps_of(path) == [0, 1]


HEADER = trace.dump_line(trace._header(TOML, LANES)).encode()
FOREIGN = {
    "an empty file": (b"", "line 1"),
    "a torn header": (HEADER[:-5], "line 1"),
    "text": (b"step,loss\n1,2\n", "line 1"),
    "other JSON lines": (b'{"step": 1}\n', "line 1"),
    "JSON that is no object": (b"[1]\n", "line 1"),
    "deep nesting": (b"[" * 100_000 + b"\n", "line 1"),
    "binary": (b"\x89PNG\r\n\x1a\n\x00\xff", "line 1"),
    "a newer trace": (HEADER.replace(b'_trace":1', b'_trace":2'), "newer nf_jax"),
    "no lanes": (b'{"nf_jax_trace":1,"profile":"","lanes":{}}\n', "lanes of the run"),
    "lanes of different lengths": (HEADER.replace(b'"regions":[0,1]', b'"regions":[0]'), "lanes"),
    "an unknown reason": (HEADER.replace(b"SMALL", b"SMELL"), "SMELL"),
    "a broken line inside": (HEADER + b'{"step":\n', "line 2"),
    "a line of something else": (HEADER + b'{"step":1}\n', "line 2"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_file_is_an_error_that_says_where(tmp_path: Path, kind: str):
    content, expected = FOREIGN[kind]
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot open it"):
        read_trace(tmp_path / "none")


def test_steps_of_other_lanes_are_an_error(tmp_path: Path):
    path = write(tmp_path / "t", range(1))
    path.write_bytes(path.read_bytes().replace(b'"routes":[2,0]', b'"routes":[2]', 1))
    with pytest.raises(ValueError, match=r"line 2: .* 2 routes"):
        read_trace(path)


def test_state_of_all_workers_is_an_error(tmp_path: Path):
    stacked = info(0)._replace(step=jnp.zeros([4], jnp.int32), routes=jnp.zeros([4, 2], jnp.int32))
    with TraceWriter(tmp_path / "t", TOML, LANES) as trace:
        with pytest.raises(ValueError, match="one worker's view"):
            trace.write(stacked)
        with pytest.raises(ValueError, match=r"\['step'\]"):
            trace.write(info(0), **{"step": 3})
        with pytest.raises(ValueError, match="numbers, text"):
            trace.write(info(0), thing=object())
    assert steps_of(tmp_path / "t") == []


@pytest.mark.parametrize("broken", [{}, {"signals": 3}, {"signals": {"loss": "high"}}])
def test_a_record_without_signals_is_an_error(broken: dict[str, Any]):
    with pytest.raises(ValueError, match="expected the signals"):
        trace.signals_from_record({"step": 4} | broken)


def test_columns_are_the_steps_as_arrays(tmp_path: Path):
    path = tmp_path / "t"
    odd = signals(loss=jnp.float32(jnp.nan), residual_ratio=jnp.asarray([jnp.inf, 0.1], jnp.float32))
    with TraceWriter(path, TOML, LANES, num_workers=2) as writer:
        for step in range(3):
            writer.write(info(step), step_seconds=0.25 * step)
        writer.write(info(3, signals=odd))
    columns, whole = read_columns(path), read_trace(path)
    assert columns.header == whole.header and columns.lanes == whole.lanes and not columns.truncated
    for name in ("routes", "reasons"):
        chex.assert_trees_all_equal(
            getattr(columns, name), np.asarray([step[name] for step in whole.steps], np.int32)
        )
    assert columns.steps.tolist() == [0, 1, 2, 3]
    assert columns.step_seconds is not None
    np.testing.assert_array_equal(columns.step_seconds, [0, 0.25, 0.5, np.nan])
    for index, step in enumerate(whole.steps):
        row = Signals(*(np.asarray(field[index]) for field in columns.signals))
        chex.assert_trees_all_equal(row, trace.signals_from_record(step))


def test_columns_of_many_chunks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(columns_module, "_CHUNK_STEPS", 2)
    assert read_columns(write(tmp_path / "t", range(5))).steps.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_columns_leave_a_torn_last_line_out(tmp_path: Path, num_steps: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(columns_module, "_CHUNK_STEPS", 2)
    path = write(tmp_path / "t", range(num_steps))
    path.write_bytes(path.read_bytes()[:-9])
    columns = read_columns(path)
    assert columns.truncated and columns.steps.tolist() == list(range(num_steps - 1))


def test_columns_of_no_step_are_empty(tmp_path: Path):
    columns = read_columns(write(tmp_path / "t", range(0)))
    assert columns.steps.shape == (0,) and columns.step_seconds is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"loss":0.1', b'"loss":"high"', "signals.loss: expected a number, got 'high'"),
        (b'"agreement":[0.5,-1.0]', b'"agreement":[0.5]', "expected 2 agreement, one for each lane, got 1"),
        (b'"reasons":[0,2]', b'"reasons":[0,[2]]', "reasons: expected reasons"),
        (b'"seconds":0.5', b'"step_seconds":"long"', "step_seconds: expected seconds"),
        (b'"nonfinite":[0,3]', b'"nonfinite":[0,33333333333]', "signals.nonfinite: expected counts"),
    ],
)
def test_columns_of_something_else_are_an_error(tmp_path: Path, old: bytes, new: bytes, said: str):
    path = write(tmp_path / "t", range(3))
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(ValueError, match=said):
        read_columns(path)


@pytest.mark.parametrize("kind", FOREIGN)
def test_columns_of_a_foreign_file_are_the_same_error(tmp_path: Path, kind: str):
    path = tmp_path / "t"
    path.write_bytes(FOREIGN[kind][0])
    with pytest.raises(ValueError, match=FOREIGN[kind][1]):
        read_columns(path)
