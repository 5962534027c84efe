"""What a line of a trace has to be: JSON as it was written, then every field of its kind, size and range."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from nf_jax.checks import show
from nf_jax.telemetry import Lanes, Reason

TRACE_VERSION = 1
NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How numbers that JSON has no word for are spelled."""
_NONFINITE_WORDS = (b'"NaN"', b'Infinity"')
_MAX_COUNT, _MAX_BYTES, _MAX_FLOAT = 2**31 - 1, 2**63 - 1, 3.4028234663852886e38  # int32, int64, f32

# ------------------------------------------------------------------------------------------------- JSON


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _to_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _to_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _refuse("a key that stands twice")


# What Python's own reader lets pass is refused: NaN, 1e999, a key that stands twice.
_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_to_float, object_pairs_hook=_to_dict)


def parse_line(line: bytes) -> Any:
    """The line's value, or None where it is not JSON."""
    try:
        value = _DECODER.decode(line.decode())
        # Decoding visits every value, and hardly a line needs it.
        return decode(value) if any(word in line for word in _NONFINITE_WORDS) else value
    except (ValueError, RecursionError):
        return None


def decode(value: Any) -> Any:
    """A value of JSON with the spelled numbers as floats."""
    if isinstance(value, str):
        return NONFINITE.get(value, value)
    if isinstance(value, list):
        return [decode(item) for item in value]
    return {key: decode(item) for key, item in value.items()} if type(value) is dict else value


# ---------------------------------------------------------------------------------------------- columns

Check = Callable[[Any], bool]


def _is_whole(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def _are_whole(least: int, most: int) -> Check:
    return lambda values: (
        type(values) is list
        and (not values or (set(map(type, values)) == {int} and least <= min(values) and max(values) <= most))
    )


def _is_number(value: Any) -> bool:
    is_float32 = -_MAX_FLOAT <= value <= _MAX_FLOAT if type(value) in (int, float) else False
    return is_float32 or (type(value) is float and not math.isfinite(value))


def _are_numbers(values: Any) -> bool:
    return type(values) is list and all(map(_is_number, values))


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_seconds(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value < math.inf)


# Field -> (what of the run it has one value for each of, the check of all its values, in words).
_Table = dict[str, tuple[str, Check, str]]
_ROUTES, _REASONS = (_are_whole(0, 3), "routes, 0 to 3"), (_are_whole(0, len(Reason) - 1), "reasons")
_BYTES = (_is_whole(0, _MAX_BYTES), "a number of bytes")
_STEP: _Table = {
    "step": ("", _is_whole(0, _MAX_COUNT), f"a whole number, 0 to {_MAX_COUNT}"),
    "routes": ("lane", *_ROUTES),
    "reasons": ("lane", *_REASONS),
    "next_routes": ("lane", *_ROUTES),
    "next_reasons": ("lane", *_REASONS),
    "health_state": ("region", _are_whole(0, 4), "states, 0 to 4"),
    "trigger": ("region", _are_whole(0, 5), "triggers, 0 to 5"),
    "trips": ("region", _are_whole(0, _MAX_COUNT), f"counts, 0 to {_MAX_COUNT}"),
    "saturated": ("", _is_bool, "true or false"),
    "signals": ("", lambda value: type(value) is dict, "an object"),
    "wire_bytes": ("", *_BYTES),
    "fp32_bytes": ("", *_BYTES),
}
_SIGNALS: _Table = {
    "loss": ("", _is_number, "a number"),
    "has_loss": ("", _is_bool, "true or false"),
    "nonfinite": ("region", _are_whole(0, _MAX_COUNT), f"counts, 0 to {_MAX_COUNT}"),
    "gradient_norm": ("region", _are_numbers, "numbers"),
    "agreement": ("lane", _are_numbers, "numbers"),
    "residual_ratio": ("lane", _are_numbers, "numbers"),
    "reducer_load": ("", _is_number, "a number"),
}


def _are_names(values: Any) -> bool:
    return type(values) is list and set(map(type, values)) <= {str}


def _are_rows(check: Check) -> Check:
    return lambda rows: type(rows) is list and all(check(row) and len(row) == 4 for row in rows)


_LANES: _Table = {
    "names": ("lane", _are_names, "names"),
    "regions": ("lane", _are_whole(0, _MAX_COUNT), "indices of regions"),
    "groups": ("lane", _are_whole(-1, _MAX_COUNT), "groups"),
    "fixed": (
        "lane",
        lambda values: (
            type(values) is list
            and all(v is None or (type(v) is str and v in Reason.__members__) for v in values)
        ),
        f"null or one of {', '.join(Reason.__members__)}",
    ),
    "num_elements": ("lane", _are_whole(0, _MAX_BYTES), "counts of elements"),
    "wire_bytes": ("lane", _are_rows(_are_whole(0, _MAX_BYTES)), "4 numbers of bytes, one for each route"),
    "pays": (
        "lane",
        _are_rows(lambda row: type(row) is list and set(map(type, row)) == {bool}),
        "4 times true or false, one for each route",
    ),
}


def _check_fields(record: Mapping[str, Any], table: _Table, sizes: Mapping[str, int], where: str) -> None:
    for name, (each, is_good, words) in table.items():
        if name not in record:
            raise ValueError(f"{where}{name}: expected {words}, got nothing")
        value = record[name]
        if not is_good(value):
            raise ValueError(f"{where}{name}: expected {words}, got {show(value)}")
        if each and len(value) != sizes[each]:
            count = f"{sizes[each]} {name}, one for each {each}"
            raise ValueError(f"{where}{name}: expected {count}, got {len(value)}")


# ------------------------------------------------------------------------------------------------ lines


def check_header(header: Any, path: object) -> dict[str, Any]:
    """The first line; ValueError where it is no header of a trace that this version reads."""
    version = header.get("nf_jax_trace") if type(header) is dict else None
    if type(version) is not int or version < 1 or type(header.get("profile")) is not str:
        raise ValueError(
            f"{path}: line 1: expected the header of an nf_jax trace; is it another file, or cut off?"
        )
    if version > TRACE_VERSION:
        raise ValueError(
            f"{path}: line 1: expected version {TRACE_VERSION} or older, got {show(version)}: written by "
            "a newer nf_jax"
        )
    return header


def lanes_from_header(header: Mapping[str, Any], path: object) -> Lanes:
    """The run's lanes; ValueError that names the column where they are none."""
    read = header.get("lanes")
    if type(read) is not dict or type(read.get("names")) is not list:
        raise ValueError(f"{path}: line 1: expected the lanes of the run, got {show(read)}")
    num_lanes = len(read["names"])
    read = {"pays": []} | read
    table = {name: row for name, row in _LANES.items() if name != "pays" or read["pays"] != []}
    table["groups"] = ("lane", _are_whole(-1, num_lanes - 1), f"groups, -1 to {num_lanes - 1}")
    _check_fields(read, table, {"lane": num_lanes}, f"{path}: line 1: lanes.")
    columns = {name: tuple(read[name]) for name in Lanes._fields}
    columns["fixed"] = tuple(None if name is None else Reason[name] for name in columns["fixed"])
    columns |= {name: tuple(tuple(row) for row in columns[name]) for name in ("wire_bytes", "pays")}
    return Lanes(**columns)


def check_step(record: Any, num_lanes: int, before: Mapping[str, Any] | None, where: str) -> dict[str, Any]:
    """One line after the first; ValueError that names the field where it is no step of this run.

    Args:
      record: the line's value.
      num_lanes: L.
      before: the step on the line before; None on the first.
      where: file and line, for the message.
    """
    if type(record) is not dict or type(record.get("trips")) is not list:
        raise ValueError(f"{where}: expected one step of a trace, JSON with {', '.join(_STEP)}")
    num_regions = len(record["trips"] if before is None else before["trips"])
    sizes = {"lane": num_lanes, "region": num_regions}
    _check_fields(record, _STEP, sizes, f"{where}: ")
    _check_fields(record["signals"], _SIGNALS, sizes, f"{where}: signals.")
    if not _is_seconds(record.get("step_seconds")):
        got = show(record["step_seconds"])
        raise ValueError(f"{where}: step_seconds: expected seconds, from 0 on, or null, got {got}")
    if before is not None and record["step"] <= before["step"]:
        got = f"{record['step']} after {before['step']}"
        raise ValueError(f"{where}: step: expected steps that ascend, got {got}; are these two runs?")
    return record
