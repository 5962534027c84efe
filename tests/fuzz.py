"""A mutation fuzzer for every file that the library reads: profiles, substrates, endpoints, traces.

    python tests/fuzz.py --count 10000 --seed 0      # a minute of one core

Each file is a good one, damaged by chance: bytes, lines, tokens, values, keys, structure. It is either
refused, by a ValueError that names file, place and reason, or accepted, and then an oracle of its own decides
whether that was right (`fuzz_oracles.py`): nothing that stands in the file was ignored or changed, every
number is finite and in range, it survives being saved, and what works on it later works. Nothing takes long.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz_oracles
import substrates
import traces

from nf_jax import profile
from nf_jax.endpoint import Endpoint

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 10.0

# ------------------------------------------------------------------------------------------ good files

HAND_WRITTEN = """\
schema_version = 1
name = "example"  # a comment
description = 'two regions, two phases'

[model]
name = "mlp"
leaves = [
  {path = "head/bias", shape = [10], dtype = "float32"},
  {path = "body/kernel", shape = [640, 1000], dtype = "float32"},
]

[[regions]]
name = "head"
pattern = "head/.*"

[[regions]]
name = "body"
pattern = '(?:body|trunk)/block_\\d+/kernel|body/.*'
codec = {scale = "rank1", down = "2bit", gate = 1}

[[phases]]
start_step = 0
routes = {head = "FP32", body = "fp32"}

[[phases]]
start_step = 20
routes.body = "sign"

[buckets]
order = ["body/kernel", "head/bias"]

[health]
max_trips = 3
loss_spike_deviations = 6.5

[capacity]
max_reducer_load = 0.8

[target]
metric = "accuracy"
reference = 0.7
tolerance = 0.01
higher_is_better = true

[provenance]
date = 2024-05-17
num_workers = 4
versions = {jax = "0.10.2"}
"""


def good_files() -> dict[str, list[bytes]]:
    """Kind of file -> good ones."""
    shipped = [path.read_bytes() for path in sorted((ROOT / "profiles").glob("*.toml"))]
    with tempfile.TemporaryDirectory() as folder:
        traced = traces.write_made_up(Path(folder) / "t.jsonl", traces.MADE_UP_STEPS).read_bytes()
    return {
        "profile": [HAND_WRITTEN.encode(), profile.Profile.loads(HAND_WRITTEN).dumps().encode(), *shipped],
        "substrate": [substrates.substrate(link="1gbit").dumps().encode()],
        "endpoint": [Endpoint(fp32_elements_per_second=1e9).dumps().encode()],
        "trace": [traced],
    }


# ------------------------------------------------------------------------------------------- mutations

VALUES = [
    *("nan", "-nan", "inf", "-inf", "NaN", "Infinity", "-Infinity", '"NaN"', '"Infinity"', "1e999", "-1e999"),
    *(
        "0",
        "1",
        "-1",
        "0.0",
        "-0.0",
        "1e-320",
        "1e39",
        "3.5e38",
        "1e300",
        "-1e300",
        "2147483647",
        "2147483648",
        "-2147483649",
    ),
    *("9223372036854775807", "9223372036854775808", "1" + "0" * 400, "9" * 5000, "0x" + "f" * 5000, "1_000"),
    *("true", "false", "null", "None", '""', "''", '"x"', '"1"', '"SIGN"', '"sign"', '"FP64"', "2024-01-01"),
    *("[]", "{}", "[[]]", "[1]", "[1, 2]", '["a", "a"]', "{a = 1}", '{"a": 1}', "[" * 200 + "]" * 200),
    *("[" * 5000, "[" * 5000 + "]" * 5000, '{"a":' * 3000 + "1" + "}" * 3000, "{a=" * 400 + "1" + "}" * 400),
    *('"(a+)+$"', '"(.*)*"', "'(?:a|aa)+'", '"' + ".*" * 6 + 'x"', '"' + "(?:a|a|.)" * 12 + '"'),
    *('"../../etc/passwd"', '"/dev/zero"', "'C:\\\\con'", '"a\\u0000b"', '"\\ud800"', '"' + "x" * 3000 + '"'),
    *("a." * 30 + "a", '"' + "\\u00e9" * 300 + '"', "-7", "12", "float32", '"float33"', '"object"', '"int4"'),
]
TOKENS = [
    *("=", "[", "]", "{", "}", '"', "'", ",", ".", ":", "\n", "\r\n", "\r", "#", "\\", "\0", "é", "\ufeff"),
    *("\x1b[31m", "\u2028", "[[regions]]", "[model]", "[[phases]]", "a.b.c.d = 1", "schema_version = 2"),
    *('"step":', "'''", '"""', "-", "e", "1", "}" * 50, "a." * 2000 + "b = 1", "[x" + ".x" * 2000 + "]"),
]


def mutate(rng: random.Random, content: bytes, others: list[bytes]) -> bytes:
    """One to four damages."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        content = rng.choice(MUTATIONS)(rng, content, others)
    return content


def _cut(rng: random.Random, content: bytes, _: Any) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + content[at + rng.choice((1, 3, 20, 200)) :]


def _insert(rng: random.Random, content: bytes, _: Any) -> bytes:
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice(TOKENS).encode() + content[at + rng.choice((0, 1)) :]


def _repeat(rng: random.Random, content: bytes, _: Any) -> bytes:
    at, length = rng.randrange(len(content) + 1), rng.choice((1, 3, 20, 200))
    return content[:at] + content[at : at + length] * rng.choice((1, 1, 50)) + content[at:]


def _flip(rng: random.Random, content: bytes, _: Any) -> bytes:
    damaged = bytearray(content or b"x")
    for _ in range(rng.choice((1, 1, 8))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def _truncate(rng: random.Random, content: bytes, _: Any) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _lines(rng: random.Random, content: bytes, _: Any) -> bytes:
    lines = content.split(b"\n")
    one, other = (rng.randrange(len(lines)) for _ in range(2))
    match rng.randrange(4):
        case 0:
            lines.insert(one, lines[other])
        case 1:
            lines[one], lines[other] = lines[other], lines[one]
        case 2:
            del lines[one]
        case 3:
            lines[one] = lines[one] * 2
    return b"\n".join(lines)


def _splice(rng: random.Random, content: bytes, others: list[bytes]) -> bytes:
    other = rng.choice(others)
    return content[: rng.randrange(len(content) + 1)] + other[rng.randrange(len(other) + 1) :]


_VALUE = re.compile(rb'(?<=[=:\[, ])\s*(?:-?\d[\w.+-]*|true|false|null|"[^"\n]*")')


def _value(rng: random.Random, content: bytes, _: Any) -> bytes:
    found = list(_VALUE.finditer(content))
    if not found:
        return content
    at = rng.choice(found)
    return content[: at.start()] + rng.choice(VALUES).encode() + content[at.end() :]


_KEY = re.compile(rb'[A-Za-z_]\w*(?=\s*=)|(?<=")\w+(?="\s*:)')


def _key(rng: random.Random, content: bytes, _: Any) -> bytes:
    found = list(_KEY.finditer(content))
    if not found:
        return content
    at, other = rng.choice(found), rng.choice(found).group()
    new = rng.choice([other, at.group() + b"x", at.group()[:-1] or b"_", b"zzz", b"", at.group().upper()])
    return content[: at.start()] + new + content[at.end() :]


def _number(rng: random.Random, content: bytes, _: Any) -> bytes:
    found = list(re.finditer(rb"(?<![\w.\"])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", content))
    if not found:
        return content
    at = rng.choice(found)
    old = at.group().decode()
    new = rng.choice(
        ["-" + old, old + "0" * 12, old + ".5", str(rng.randrange(-3, 20)), "1e" + old, old * 40]
    )
    return content[: at.start()] + new.encode() + content[at.end() :]


def _json(rng: random.Random, content: bytes, _: Any) -> bytes:
    """Another value somewhere inside one line of a trace, the rest of it whole."""
    lines = content.split(b"\n")
    index = rng.randrange(len(lines))
    try:
        record = json.loads(lines[index])
    except (ValueError, RecursionError):
        return _value(rng, content, _)
    node, mark = record, "\x00mark\x00"
    while True:
        keys = (
            list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
        )
        if not keys:
            return content
        key = rng.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.7:
            node = node[key]
            continue
        match rng.randrange(4):
            case 0:
                del node[key]
            case 1 if isinstance(node, list):
                node.insert(key, node[key])
            case _:
                node[key] = mark
        break
    text = json.dumps(record, separators=(",", ":"))
    lines[index] = text.replace(json.dumps(mark), rng.choice(VALUES)).encode()
    return b"\n".join(lines)


Mutation = Callable[[random.Random, bytes, list[bytes]], bytes]
MUTATIONS: list[Mutation] = [
    *(_cut, _insert, _repeat, _flip, _truncate, _lines, _splice),
    *(_value, _value, _value, _key, _number, _number, _json, _json),
]


def mutants(seed: int, count: int) -> Iterator[tuple[str, int, bytes]]:
    """`(kind, number, content)`; a number always means the same file, whatever the count."""
    good = good_files()
    everything = [content for contents in good.values() for content in contents]
    kinds = ("profile", "trace", "substrate", "trace", "profile", "endpoint")
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        kind = kinds[number % len(kinds)]
        yield kind, number, mutate(rng, rng.choice(good[kind]), everything)


# --------------------------------------------------------------------------------------------- verdicts


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the body after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(kind: str, path: Path) -> bool:
    """Whether the file is accepted; AssertionError where that, or how it is refused, is not right."""
    with time_limit(LIMIT_SECONDS):
        try:
            loaded = fuzz_oracles.READERS[kind](path)
        except ValueError as error:
            fuzz_oracles.check_refusal(error, path)
            return False
        fuzz_oracles.ORACLES[kind](path, loaded)
        return True


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first file, to repeat one")
    parser.add_argument("--keep", type=Path, help="a folder for the files that fail")
    given = parser.parse_args()
    counts: collections.Counter[tuple[str, bool]] = collections.Counter()
    failures: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for kind, number, content in mutants(given.seed, given.count):
            if number < given.first:
                continue
            path = Path(folder) / f"{kind}-{number}"
            path.write_bytes(content)
            try:
                counts[kind, judge(kind, path)] += 1
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[:300]}"
                failures[re.sub(r"\d+", "N", text)[:120]] += 1
                if failures[re.sub(r"\d+", "N", text)[:120]] <= 3:
                    print(f"\r{kind} {number}: {text}", file=sys.stderr)
                if given.keep:
                    given.keep.mkdir(parents=True, exist_ok=True)
                    (given.keep / path.name).write_bytes(content)
            path.unlink()
            if sys.stderr.isatty():
                print(f"\r{number + 1:,} of {given.count:,}", end="", file=sys.stderr)
    for kind in dict.fromkeys(kind for kind, _ in counts):
        print(f"{kind}: {counts[kind, False]:,} refused, {counts[kind, True]:,} accepted")
    if failures:
        sys.exit(f"error: {sum(failures.values())} files were neither refused nor accepted as they should be")


if __name__ == "__main__":
    main()
