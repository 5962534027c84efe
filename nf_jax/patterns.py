"""Regular expressions that a user wrote, and how long Python may take to match them.

Python's `re` backtracks. A repeat inside a repeat can take exponential time, so it is refused; what is left
takes at most as many tries as there are ways to choose an alternative everywhere and to place the ends of the
repeats in the text (`num_tries`), which is bounded before a text is matched.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Iterator
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]  # no public regex parser
from typing import Any, NamedTuple

MAX_LOOPS = 6
MAX_WAYS = 2**12
MAX_TRIES = 3e7  # about a second
_MAX_DEPTH = 20


class Shape(NamedTuple):
    """What matching a pattern costs: `loops` repeats of variable count, `ways` to choose all alternatives."""

    loops: int
    ways: int


@functools.lru_cache(1024)
def shape_of(pattern: str) -> Shape:
    """The shape of a pattern.

    Raises:
      ValueError: it is no valid regular expression, or might backtrack for long.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what `re` only warns of is a mistake here
            shape = _measure(_parser.parse(pattern))
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ValueError(str(error)) from None
    if shape.loops > MAX_LOOPS or shape.ways > MAX_WAYS:
        allowed = f"at most {MAX_LOOPS} repeats and {MAX_WAYS} ways to choose by ? and |"
        raise ValueError(f"{allowed}, not {shape.loops} and {shape.ways}")
    return shape


def num_tries(shape: Shape, length: int) -> int:
    """The most ways to match a text of so many characters, which may all have to be tried."""
    return math.comb(length + shape.loops, shape.loops) * shape.ways


def _subpatterns(value: object) -> Iterator[Any]:
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _subpatterns(item)


def _measure(tree: Any, repeated: bool = False, depth: int = 0) -> Shape:
    """The shape of a parsed pattern; ValueError if something that varies is inside a repeated group."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"groups nested at most {_MAX_DEPTH} deep")
    loops, ways = 0, 1
    for code, value in tree:
        least, most = value[:2] if repr(code).endswith("REPEAT") else (1, 1)
        is_choice = repr(code) in ("BRANCH", "GROUPREF", "GROUPREF_EXISTS")
        if repeated and (least != most or is_choice):
            raise ValueError("nothing optional, repeated or alternative in a repeated group")
        loops += least != most and most > 1
        ways *= 2 if least != most and most <= 1 else 1
        ways *= len(value[1]) if repr(code) == "BRANCH" else 2 if is_choice else 1
        for part in _subpatterns(value):
            inner = _measure(part, repeated or most > 1, depth + 1)
            loops, ways = loops + inner.loops, ways * inner.ways
    return Shape(loops, ways)
