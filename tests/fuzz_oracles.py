"""How a file has to be refused, and which may be accepted: told from the file, not from its reader."""

from __future__ import annotations

import datetime
import functools
import io
import json
import math
import re
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import traces
from rich.console import Console

import nf_jax
from nf_jax import replay, report
from nf_jax.columns import read_columns
from nf_jax.endpoint import Endpoint, rates
from nf_jax.plan import model_shapes
from nf_jax.profile import Profile
from nf_jax.regions import assign_regions
from nf_jax.stages import Substrate
from nf_jax.trace import Trace, read_trace

READERS: dict[str, Callable[[Path], Any]] = {
    "profile": Profile.load,
    "substrate": Substrate.load,
    "endpoint": Endpoint.load,
    "trace": read_trace,
}

# --------------------------------------------------------------------------------------------- refusals

_PLACES = (
    r"\n  [\w\[\].\"' -]+: ",  # the path of a key
    r"line \d+",
    r": \w+: expected",  # what all lines of a trace have in common
    r"at end of document",
    r"readable UTF-8",  # the file as a whole
    r"at most \d+ bytes",
    r"got nothing",
)


def check_refusal(error: ValueError, path: Path) -> None:
    """A ValueError, no subclass of it, that names file, place and reason in few words of ours."""
    text = str(error)
    assert type(error) is ValueError, f"{type(error).__name__}: {text[:200]}"
    assert text.startswith(f"{path}: "), f"does not name the file: {text[:200]}"
    assert "expected" in text, f"does not say what was expected: {text[:200]}"
    assert any(re.search(place, text) for place in _PLACES), f"names no place: {text[:300]}"
    assert len(text) < 6000 and max(map(len, text.splitlines())) < 1200, f"long: {len(text)}: {text[:200]}"
    assert not re.search(r"pydantic|Value error|Traceback|Decimal|object at 0x", text), text[:300]
    assert "\0" not in text and "\x1b" not in text, f"prints control characters: {text[:200]!r}"


# ------------------------------------------------------------------------------------------- TOML files


def check_contains(dump: Any, given: Any, where: str = "") -> None:
    """Everything that stands in the file stands in what was loaded, with the same value."""
    if isinstance(given, dict):
        assert isinstance(dump, dict), where
        for key, value in given.items():
            assert key in dump, f"{where}.{key} was ignored"
            check_contains(dump[key], value, f"{where}.{key}")
    elif isinstance(given, list):
        assert len(dump) == len(given), where
        for index, value in enumerate(given):
            check_contains(dump[index], value, f"{where}[{index}]")
    elif isinstance(given, datetime.date):
        assert dump == given.isoformat(), where
    elif isinstance(given, str) and ".routes." in where:
        assert dump == given.upper(), where
    elif isinstance(given, float) or isinstance(dump, float):
        assert type(given) in (int, float) and math.isclose(float(dump), float(given), rel_tol=1e-15), where
    else:
        assert dump == given and type(dump) is type(given), f"{where}: {given!r} became {dump!r}"


_SIGNED = ("reference", "measured_seconds")  # may be below 0


def check_numbers(dump: Any, where: str = "") -> None:
    """Every number is finite; none is negative that may not be; counts of steps fit int32, the rest int64."""
    if isinstance(dump, dict):
        for key, value in dump.items():
            check_numbers(value, f"{where}.{key}")
    elif isinstance(dump, (list, tuple)):
        for value in dump:
            check_numbers(value, where)
    elif isinstance(dump, (int, float)) and not isinstance(dump, bool):
        name = where.rsplit(".", 1)[-1]
        assert math.isfinite(dump), f"{where} = {dump}"
        assert dump >= 0 or name in _SIGNED, f"{where} = {dump}"
        assert not isinstance(dump, int) or dump < 2 ** (31 if name.endswith(("_steps", "_step")) else 63), (
            where
        )


def check_toml(path: Path, loaded: Any) -> None:
    """What all TOML files have to keep."""
    given = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    dump = json.loads(loaded.model_dump_json())
    check_contains(dump, given)
    check_numbers(dump)
    again = type(loaded).loads(loaded.dumps())
    assert again == loaded and hash(again) == hash(loaded) and again.dumps() == loaded.dumps()


def check_profile(path: Path, loaded: Profile) -> None:
    check_toml(path, loaded)
    starts = [phase.start_step for phase in loaded.phases]
    assert starts[0] == 0 and starts == sorted(set(starts))
    assert {len(routes) for _, routes in loaded.route_table} == {len(loaded.regions)}
    assert loaded.capacity.resume_reducer_load <= loaded.capacity.max_reducer_load < math.inf
    for region in loaded.regions:
        for text in ("a" * 60 + "!", "a/" * 30 + "!", "block_" + "1" * 60 + "/"):
            try:
                assign_regions([text], [region.pattern, ".*"])
            except ValueError as error:
                assert "pattern" in str(error), error
    if loaded.model is not None:
        try:
            plan = nf_jax.plan(loaded, model_shapes(loaded.model), 8)
        except ValueError as error:
            assert type(error) is ValueError and "expected" in str(error), repr(error)
            return
        assert sum(plan.lanes.num_elements) <= sum(math.prod(leaf.shape) for leaf in loaded.model.leaves)
        shown(*report.plan_tables(loaded, plan))


def check_substrate(path: Path, loaded: Substrate) -> None:
    check_toml(path, loaded)
    for stage in loaded.stages.values():
        assert math.isfinite(stage.seconds(2.0**40))
        assert list(stage.sizes_bytes) == sorted(set(stage.sizes_bytes))
    moved = loaded.rescaled(num_workers=64, link_bytes_per_second=1e9)
    assert all(math.isfinite(stage.seconds(2.0**20)) for stage in moved.stages.values())


def check_endpoint(path: Path, loaded: Endpoint) -> None:
    check_toml(path, loaded)
    assert loaded.max_workers >= 1
    for number in rates(loaded):
        assert np.asarray(number).dtype == np.float32 and not np.isnan(number) and number >= 0


# ----------------------------------------------------------------------------------------------- traces


def whole(value: Any, least: float, most: float) -> bool:
    return type(value) is int and least <= value <= most


def number(value: Any) -> bool:
    if isinstance(value, str):
        return value in ("NaN", "Infinity", "-Infinity")
    return isinstance(value, (int, float)) and type(value) is not bool and abs(value) <= 3.5e38


def every(check: Callable[..., bool], *more: Any) -> Callable[[Any, int], bool]:
    return lambda values, size: (
        type(values) is list and len(values) == size and all(check(value, *more) for value in values)
    )


# Field -> (whether its size is that of lanes, regions or nothing, what each value has to be).
_STEP: dict[str, tuple[str, Callable[..., bool]]] = {
    "step": ("", lambda value: whole(value, 0, 2**31 - 1)),
    "routes": ("L", every(whole, 0, 3)),
    "reasons": ("L", every(whole, 0, 11)),
    "next_routes": ("L", every(whole, 0, 3)),
    "next_reasons": ("L", every(whole, 0, 11)),
    "wire_bytes": ("", lambda value: whole(value, 0, 2**63 - 1)),
    "fp32_bytes": ("", lambda value: whole(value, 0, 2**63 - 1)),
    "health_state": ("R", every(whole, 0, 4)),
    "trigger": ("R", every(whole, 0, 5)),
    "trips": ("R", every(whole, 0, 2**31 - 1)),
    "saturated": ("", lambda value: type(value) is bool),
}
_SIGNALS: dict[str, tuple[str, Callable[..., bool]]] = {
    "loss": ("", number),
    "has_loss": ("", lambda value: type(value) is bool),
    "nonfinite": ("R", every(whole, 0, 2**31 - 1)),
    "gradient_norm": ("R", every(number)),
    "agreement": ("L", every(number)),
    "residual_ratio": ("L", every(number)),
    "reducer_load": ("", number),
}


def check_fields(
    record: Any, table: dict[str, tuple[str, Callable[..., bool]]], sizes: dict[str, int]
) -> None:
    for name, (size, check) in table.items():
        value = record[name]
        assert check(value, sizes[size]) if size else check(value), f"{name} = {str(value)[:80]}"


def check_trace(path: Path, loaded: Trace) -> None:
    lines = path.read_bytes().split(b"\n")
    if loaded.truncated or not lines[-1]:
        lines.pop()
    head, *records = (json.loads(line) for line in lines)
    num_lanes = len(loaded.lanes.names)
    assert len(records) == len(loaded.steps), "steps were left out"
    assert head["profile"] == loaded.header["profile"]
    lanes = head["lanes"]
    assert every(lambda name: type(name) is str)(lanes["names"], num_lanes)
    assert every(whole, 0, 63)(lanes["regions"], num_lanes)
    assert every(whole, -1, num_lanes - 1)(lanes["groups"], num_lanes)
    assert every(whole, 0, 2**63 - 1)(lanes["num_elements"], num_lanes)
    for row in lanes["wire_bytes"]:
        assert every(whole, 0, 2**63 - 1)(row, 4)
    sizes = {"L": num_lanes, "R": len(records[0]["trips"]) if records else 0}
    last = -1
    for record in records:
        check_fields(record, _STEP, sizes)
        check_fields(record["signals"], _SIGNALS, sizes)
        seconds = record.get("step_seconds", 0.0)
        assert seconds is None or (type(seconds) in (int, float) and 0 <= seconds < math.inf), seconds
        assert record["step"] > last, f"step {record['step']} after {last}"
        last = record["step"]
    by_route = np.asarray(lanes["wire_bytes"]).reshape(-1, 4)
    lanes_sent = [sum(by_route[lane][route] for lane, route in enumerate(r["routes"])) for r in records]
    beside = {record["wire_bytes"] - sent for record, sent in zip(records, lanes_sent, strict=True)}
    adds_up = len(beside) < 2 and min(beside, default=0) >= 0 and len({r["fp32_bytes"] for r in records}) < 2
    try:
        columns = read_columns(path)
    except ValueError as error:
        assert not adds_up, error
        check_refusal(error, path)
        return
    assert adds_up and columns.truncated == loaded.truncated
    assert columns.steps.tolist() == [record["step"] for record in records]
    check_use(path, loaded, columns)


def check_use(path: Path, loaded: Trace, columns: Any) -> None:
    """Reports and replay take it, or refuse it as a file is refused."""
    uses = [lambda: shown(report.run_table(path)), lambda: report.explain(loaded)]
    # What differs in the header, or in length, would compile the replay anew: its checks are enough there.
    is_alike = (columns.header, columns.lanes, len(columns.steps)) == made_up()
    uses.append(lambda: check_replay(columns) if is_alike else replay._check(columns))
    for use in uses:
        try:
            use()
        except ValueError as error:
            check_refusal(error, path)


@functools.cache
def made_up() -> tuple[Any, Any, int]:
    """Header, lanes and length of the good trace."""
    with tempfile.TemporaryDirectory() as folder:
        columns = read_columns(traces.write_made_up(Path(folder) / "t", traces.MADE_UP_STEPS))
    return columns.header, columns.lanes, len(columns.steps)


def check_replay(columns: Any) -> None:
    found = replay.replay(columns)
    assert np.isin(found.routes, range(4)).all() and (found.wire_bytes >= 0).all()
    assert (np.diff(found.trips, axis=0) >= 0).all() and found.is_rerun


def shown(*tables: Any) -> None:
    console = Console(file=io.StringIO(), width=120)
    for table in tables:
        console.print(table)


ORACLES: dict[str, Callable[[Path, Any], None]] = {
    "profile": check_profile,
    "substrate": check_substrate,
    "endpoint": check_endpoint,
    "trace": check_trace,
}
