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
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]  # no public regex parser
from typing import Annotated, Any, Self, TypeVar

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

MAX_FILE_BYTES = 2**20
_MAX_LOOPS, _MAX_CHOICES, _MAX_DEPTH, _MAX_LINES = 6, 12, 20, 10


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


def _subpatterns(value: object) -> Iterator[Any]:
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _subpatterns(item)


def _count_loops(tree: Any, repeated: bool = False, depth: int = 0) -> tuple[int, int]:
    """Count a parsed regex's loops and choices; ValueError if one is inside a repeated group."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"groups nested at most {_MAX_DEPTH} deep")
    loops = choices = 0
    for code, value in tree:
        least, most = value[:2] if repr(code).endswith("REPEAT") else (1, 1)
        varies = least != most or repr(code) in ("BRANCH", "GROUPREF", "GROUPREF_EXISTS")
        if varies and repeated:
            raise ValueError("nothing optional, repeated or alternative in a repeated group")
        loops += varies and most > 1
        choices += varies and most <= 1
        for part in _subpatterns(value):
            inner = _count_loops(part, repeated or most > 1, depth + 1)
            loops, choices = loops + inner[0], choices + inner[1]
    return loops, choices


def _check_pattern(pattern: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what `re` only warns of is a mistake here
            loops, choices = _count_loops(_parser.parse(pattern))
            re.compile(pattern)
        if loops > _MAX_LOOPS or choices > _MAX_CHOICES:
            allowed = f"at most {_MAX_LOOPS} repeats and {_MAX_CHOICES} choices (? or |)"
            raise ValueError(f"{allowed}, not {loops} and {choices}")
    except (re.error, ValueError, OverflowError, RecursionError, Warning) as error:
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


def _describe(item: Any) -> str:
    parts = [f"[{key}]" if isinstance(key, int) else f".{key[:64]}" for key in item["loc"]]
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


def _read(path: str | os.PathLike[str]) -> str:
    """Return a small UTF-8 file; ValueError, naming it, if it cannot be read or is too large."""
    try:
        with open(path, "rb") as file:
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
            return cls.model_validate(tomllib.loads(text))
        except ValidationError as error:
            message = _describe_all(error, source)
        except (ValueError, RecursionError) as error:
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
