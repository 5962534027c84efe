"""What user-written models are checked with: value types, safe regexes, messages, whole files."""

from __future__ import annotations

import contextlib
import datetime
import difflib
import enum
import os
import re
import reprlib
import secrets
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Annotated, Any, Self, TypeVar

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from nf_jax import patterns

MAX_FILE_BYTES = 2**20
_MAX_KEY_PARTS, _MAX_LINES = 20, 10


class Frozen(BaseModel):
    """An immutable, hashable model that takes no unknown key, no other type, no NaN or Inf."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def __hash__(self) -> int:  # pydantic's own cannot hash the dict fields
        values = self.__dict__.values()
        return hash(tuple(frozenset(v.items()) if isinstance(v, dict) else v for v in values))


def show(value: object) -> str:
    """Return a short `repr` for a message, whatever the value."""
    try:
        text = reprlib.repr(value)
    except ValueError:  # Python refuses to print an int of more than 4300 digits
        return "an integer too large to print"
    return text if len(text) <= 120 else text[:117] + "..."


def distinct(key: str = "") -> AfterValidator:
    """Return the check that no two values of a tuple, or their attributes `key`, are equal."""

    def check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        first: dict[str, int] = {}
        for index, value in enumerate(getattr(value, key) if key else value for value in values):
            if (at := first.setdefault(value, index)) != index:
                where = f"[{index}].{key}".rstrip(".")
                raise ValueError(f"{where}: expected no repeats, got {show(value)} as at [{at}]")
        return values

    return AfterValidator(check)


def by_name(kind: type[enum.IntEnum]) -> tuple[BeforeValidator, PlainSerializer]:
    """Return how a field of type `kind` is read and written: by name, all lower or all upper."""

    def parse(value: object) -> enum.IntEnum:
        if isinstance(value, kind):
            return value
        if isinstance(value, str) and value in (value.lower(), value.upper()):
            with contextlib.suppress(KeyError):
                return kind[value.upper()]
        raise ValueError(f"expected a string of {[*kind.__members__]}, got {show(value)}")

    return BeforeValidator(parse), PlainSerializer(lambda value: value.name, return_type=str)


def _check_name(name: str) -> str:
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]{0,63}", name):
        raise ValueError(f"expected 1 to 64 letters, digits or _, no digit first, got {show(name)}")
    return name


def _check_pattern(pattern: str) -> str:
    try:
        patterns.shape_of(pattern)
    except ValueError as error:
        raise ValueError(
            "expected a regular expression that is valid and cannot backtrack for long, "
            f"got {show(pattern)} ({error})"
        ) from None
    return pattern


T = TypeVar("T")
Many = Annotated[tuple[T, ...], Field(strict=False, min_length=1)]  # TOML's arrays are lists
Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, AfterValidator(_check_name)]
Pattern = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_check_pattern)]
Date = Annotated[  # TOML has dates of its own
    str, BeforeValidator(lambda v: v.isoformat() if isinstance(v, datetime.date) else v)
]
# Steps fit the int32 that the controller counts in, sizes fit TOML's int64, and limits stay finite
# in the float32 that they are compared in.
Steps = Annotated[int, Field(ge=0, le=2**31 - 1)]
PositiveSteps = Annotated[int, Field(ge=1, le=2**31 - 1)]
Size = Annotated[int, Field(ge=0, le=2**63 - 1)]
PositiveSize = Annotated[int, Field(ge=1, le=2**63 - 1)]
Limit = Annotated[float, Field(ge=0, le=1e38)]
PositiveLimit = Annotated[float, Field(gt=0, le=1e38)]


def join_lines(head: str, lines: Sequence[str]) -> str:
    """Return `head` and at most ten indented lines, then how many more there are."""
    more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return "\n  ".join([head, *lines[:_MAX_LINES], *more])


# Pydantic's words -> those of a TOML file.
_WORDS = {
    r"^\w+ should (be |have )?": "expected ",
    r"a valid tuple": "an array",
    r"valid dictionary( or instance of \w+)?": "table",
    r" after validation, not \d+": "",
    r"\b10{38}\b": "1e38",
}


def _show_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]{1,64}", key) else show(key[:64])


def _describe(item: Any) -> str:
    parts = [f"[{key}]" if isinstance(key, int) else f".{_show_key(key)}" for key in item["loc"]]
    where, kind = "".join(parts).lstrip("."), item["type"]
    if kind == "value_error":  # ours; a check across keys starts with the rest of the key path
        text = str(item["ctx"]["error"])
        joint = ": " if text.startswith("expected") else "" if text.startswith("[") else "."
        return f"{where}{joint}{text}".lstrip(".")
    if kind == "missing":
        return f"{where}: expected a value, got nothing; add the key"
    if kind == "extra_forbidden":
        models = (*Frozen.__subclasses__(), *File.__subclasses__())
        known = {name for model in models for name in model.model_fields}
        name = str(item["loc"][-1])[:64]
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else "remove it"
        if name in known:
            hint = "it belongs elsewhere, or to a file of another kind"
        return f"{where}: expected a known key, got this one; {hint}"
    wanted = item["msg"]
    for pattern, ours in _WORDS.items():
        wanted = re.sub(pattern, ours, wanted)
    return f"{where}: {wanted}, got {show(item['input'])}"


def _describe_all(error: ValidationError, source: str) -> str:
    """Return what is wrong in `source`: per problem the key path, what was expected and got."""
    items = error.errors(include_url=False)
    lines = [_describe(item) for item in items[:_MAX_LINES]]
    return join_lines(f"{source}: not valid:", [*lines, *[""] * (len(items) - len(lines))])


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """A file, open for reading; OSError or ValueError if it is none: a named pipe would wait for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("a folder, a device or a pipe")
    return open(path, "rb")


def _read(path: str | os.PathLike[str]) -> str:
    """Return a small UTF-8 file; ValueError, naming it, if it cannot be read or is too large."""
    try:
        with open_file(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8-sig") if len(content) <= MAX_FILE_BYTES else None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: expected a readable UTF-8 file, got: {reason}") from None
    if text is None:
        raise ValueError(f"{path}: expected at most {MAX_FILE_BYTES} bytes, got more")
    return text


def _write(path: str | os.PathLike[str], text: str) -> None:
    """Write a small UTF-8 file whole or not at all; ValueError, naming it, if that fails."""
    temporary = None
    try:
        content = text.encode()
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"it has {len(content)} bytes, more than {MAX_FILE_BYTES}")
        target = Path(os.path.realpath(path))  # a link keeps pointing to the new content
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: expected to write this file, got: {reason}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):  # gone after success
                temporary.unlink()


_STRINGS_AND_COMMENTS = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:"""|$)|"(?:[^"\\\n]|\\.)*+"?'
    r"|'''(?:[^']|'(?!''))*+(?:'''|$)|'[^'\n]*+'?|#[^\n]*+",
    re.DOTALL,
)


def _blank_strings(text: str) -> str:
    """A TOML text of as many lines with an x for every string, and no comments."""
    return _STRINGS_AND_COMMENTS.sub(
        lambda found: "" if found[0][0] == "#" else "x" + "\n" * found[0].count("\n"), text
    )


def _parse(text: str) -> dict[str, Any]:
    """The values in a TOML text; ValueError with the line of what is wrong."""
    line = 1
    # tomllib takes time that is quadratic in the parts of a key, minutes for 100,000 of them.
    for piece in re.split(r"([,=\[\]{}\n])", _blank_strings(text)):
        line += piece == "\n"
        if piece.count(".") >= _MAX_KEY_PARTS:
            raise ValueError(f"a key of more than {_MAX_KEY_PARTS} parts (at line {line})")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python refuses to read an int of more than 4300 digits
        found = re.search("[0-9_]{4300}", text)
        at = text.count("\n", 0, found.start()) + 1 if found else 1
        raise ValueError(f"an integer of too many digits (at line {at})") from None
    except RecursionError:
        raise ValueError(f"values nested too deep (at line {_deepest_line(text)})") from None


def _deepest_line(text: str) -> int:
    depth = deepest = at = 0
    for number, line in enumerate(_blank_strings(text).split("\n"), start=1):
        for mark in re.findall(r"[\[\]{}]", line):
            depth += 1 if mark in "[{" else -1
            if depth > deepest:
                deepest, at = depth, number
    return at


class File(Frozen):
    """A model that is kept as a TOML file."""

    schema_version: int = 1
    """Version of the file's format; another one is refused."""

    @model_validator(mode="before")
    @classmethod
    def _check_version(cls, data: Any) -> Any:  # first: a newer version may know other keys
        ours = cls.model_fields["schema_version"].default
        version = data.get("schema_version", ours) if isinstance(data, dict) else ours
        if type(version) is not int or version != ours:
            newer = type(version) is int and version > ours
            hint = " (written by a newer nf_jax: upgrade to read it)" if newer else ""
            raise ValueError(f"schema_version: expected {ours}, got {show(version)}{hint}")
        return data

    @classmethod
    def loads(cls, text: str, source: str = "profile") -> Self:
        """Return the model in a TOML text; ValueError says where in `source` it is wrong."""
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"{source}: expected at most {MAX_FILE_BYTES} bytes, got more")
        try:
            return cls.model_validate(_parse(text))
        except ValidationError as error:
            message = _describe_all(error, source)
        except ValueError as error:
            message = f"{source}: expected valid TOML, got: {str(error)[:200]}"
        raise ValueError(message)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the model in a TOML file; ValueError names the file and the key."""
        return cls.loads(_read(path), str(path))

    def dumps(self) -> str:
        """Return the model as TOML, with its defaults, so that a change of them is no matter."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a TOML file, whole or not at all; ValueError if that fails."""
        _write(path, self.dumps())
