"""What a compiled program sends and holds, read off its text and XLA's own analysis."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

Range = tuple[int, int]


def collective_bytes(hlo: str, num_workers: int) -> list[int]:
    """Bytes a worker sends in every collective of a compiled program: a ring's for all-reduce."""
    return [sent for line in hlo.splitlines() if (sent := line_bytes(line, num_workers)) is not None]


def path_bytes(hlo: str, num_workers: int) -> Range:
    """The least and the most that a worker sends in one run of a program, whichever branches it takes.

    A loop counts as one trip: nf_jax's are of one or none.
    """
    own: dict[str, Range] = {}
    bodies = _computations(hlo)

    def total(name: str) -> Range:
        if name not in own:
            own[name] = (0, 0)  # what calls itself does not exist; this ends the search if it did
            ranges = [_line_range(line) for line in bodies[name]]
            own[name] = (sum(low for low, _ in ranges), sum(high for _, high in ranges))
        return own[name]

    def _line_range(line: str) -> Range:
        sent = line_bytes(line, num_workers) or 0
        branches = [total(name) for name in _branches(line)]
        called = [total(name) for name in _CALLED.findall(line)]
        least = min((low for low, _ in branches), default=0) + sum(low for low, _ in called)
        most = max((high for _, high in branches), default=0) + sum(high for _, high in called)
        return sent + least, sent + most

    return total(next(name for name in bodies if name.startswith("ENTRY ")))


_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-to-all|all-gather)(-start)?\(")
_COMPUTATION = re.compile(r"^(ENTRY )?(%[\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=(%[\w.\-]+)")
_ONE_OF = re.compile(r"branch_computations=\{([^}]*)\}")
_TRUE_OR_FALSE = re.compile(r"(?:true|false)_computation=(%[\w.\-]+)")


def _computations(hlo: str) -> dict[str, list[str]]:
    """The lines of every computation, by its name; the first one to run as `ENTRY` and its name."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            lines = found.setdefault((match[1] or "") + match[2], [])
        else:
            lines.append(line)
    return found


def _branches(line: str) -> list[str]:
    listed = _ONE_OF.search(line)
    return listed[1].split(", ") if listed else _TRUE_OR_FALSE.findall(line)


def line_bytes(line: str, num_workers: int) -> int | None:
    """Bytes a worker sends in one instruction of a compiled program; None where that is no collective."""
    kinds = {
        "all-reduce": lambda n: -(-2 * (num_workers - 1) * n // num_workers),
        "all-to-all": lambda n: (num_workers - 1) * n // num_workers,
        "all-gather": lambda n: (num_workers - 1) * n // num_workers,  # n is the result's size here
    }
    if not (match := _COLLECTIVE.search(line)):
        return None
    return kinds[match[2]](sum(map(array_bytes, re.findall(r"(\w+)\[([\d,]*)\]", match[1]))))


def array_bytes(spelled: tuple[str, str]) -> int:
    bits = int(re.sub(r"\D", "", spelled[0]) or 8)
    return int(np.prod([int(n) for n in spelled[1].split(",") if n], dtype=np.int64)) * bits // 8


class Memory(NamedTuple):
    """Bytes of one device, as XLA planned them.

    Attributes:
      arguments: what goes in.
      overwritten: of that, what comes out in the same place (donated).
      results: what comes out elsewhere.
      temporaries: everything between.
    """

    arguments: int
    overwritten: int
    results: int
    temporaries: int

    @property
    def total(self) -> int:
        return self.arguments + self.results + self.temporaries


def memory_of(compiled: Any) -> Memory:
    found = compiled.memory_analysis()
    kept = found.alias_size_in_bytes
    return Memory(
        found.argument_size_in_bytes, kept, found.output_size_in_bytes - kept, found.temp_size_in_bytes
    )
