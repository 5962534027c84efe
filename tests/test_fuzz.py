"""Bad input: every file is refused in words, or rightly accepted; nothing hangs, crashes or fills memory.

The share of `fuzz.py` that fits here; all of it: python tests/fuzz.py --count 10000 --seed 0.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import fuzz
import fuzz_oracles
import hypothesis
import hypothesis.strategies as st
import pytest
import substrates
import tomli_w
import traces

from nf_jax import cli, patterns, regions, trace
from nf_jax.checks import MAX_FILE_BYTES
from nf_jax.columns import read_columns
from nf_jax.endpoint import Endpoint
from nf_jax.profile import Profile
from nf_jax.trace import MAX_LINE_BYTES, read_trace

SHARE = 900
KINDS = list(fuzz_oracles.READERS)


@pytest.fixture(scope="module")
def good() -> dict[str, list[bytes]]:
    return fuzz.good_files()


def test_good_files_are_accepted(good: dict[str, list[bytes]], tmp_path: Path):
    for kind, contents in good.items():
        for content in contents:
            (tmp_path / kind).write_bytes(content)
            assert fuzz.judge(kind, tmp_path / kind), kind


def test_a_mutated_file_is_refused_in_words_or_rightly_accepted(tmp_path: Path):
    counts: collections.Counter[tuple[str, bool]] = collections.Counter()
    for kind, number, content in fuzz.mutants(seed=0, count=SHARE):
        path = tmp_path / f"{kind}-{number}"
        path.write_bytes(content)
        try:
            counts[kind, fuzz.judge(kind, path)] += 1
        except Exception as error:
            raise AssertionError(f"python tests/fuzz.py --first {number} --count {number + 1}") from error
        path.unlink()
    assert min(counts[kind, verdict] for kind in KINDS for verdict in (True, False)) > 5


def test_a_number_means_the_same_file_whatever_the_count():
    few, more = (list(fuzz.mutants(3, count)) for count in (5, 9))
    assert few == more[:5] != list(fuzz.mutants(4, 5))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, item in items for place in places(item, (*path, key))]


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


@pytest.mark.parametrize("kind", KINDS)
def test_any_value_in_any_place_is_refused_in_words_or_rightly_accepted(
    kind: str, good: dict[str, list[bytes]], tmp_path: Path
):
    lines = good[kind][0].decode().splitlines() if kind == "trace" else [good[kind][0].decode()]
    read: Any = json.loads if kind == "trace" else tomllib.loads

    def without_none(value: Any) -> Any:  # TOML has none
        if isinstance(value, dict):
            return {key: without_none(item) for key, item in value.items() if item is not None}
        return [without_none(v) for v in value if v is not None] if isinstance(value, list) else value

    @hypothesis.settings(max_examples=60)
    @hypothesis.given(st.data())
    def check(data: st.DataObject):
        at = data.draw(st.integers(0, len(lines) - 1))
        document = read(lines[at])
        put(document, data.draw(st.sampled_from(places(document))), data.draw(VALUES))
        write = json.dumps if kind == "trace" else lambda value: tomli_w.dumps(without_none(value))
        text = "\n".join([*lines[:at], write(document), *lines[at + 1 :], ""])
        path = tmp_path / kind
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        fuzz.judge(kind, path)

    check()


# ------------------------------------------------------------------------------------- what takes long

DEEP = "[" * 100_000
SLOW = {
    "a key of 100,000 parts": ("name = 'x'\n" + "a." * 100_000 + "b = 1", "line 2"),
    "a quoted key of 50,000 parts": ('"a" . ' * 50_000 + "b = 1", "line 1"),
    "a table of 100,000 parts": ("[a" + ".a" * 100_000 + "]", "line 1"),
    "an inline key of 100,000 parts": ("x = {a = 1, " + "a." * 100_000 + "b = 1}", "line 1"),
    "100,000 tables": ("[[regions]]\n" * 80_000, "regions"),
    "100,000 keys": ("".join(f"k{i} = 1\n" for i in range(90_000)), "remove it"),
    "deep arrays": ("name = 'x'\nx = " + DEEP, "line 2"),
    "deep tables": ("x = " + "{a = " * 50_000, "line 1"),
    "deep arrays that end": ("\nx = " + "[" * 5000 + "]" * 5000, "line 2"),
    "an integer of a million digits": ("\n\nx = " + "9" * 1_000_000, "line 3"),
    "a string that does not end": ('x = "' + "a" * 1_000_000, ""),
    "a comment of a million dots": ("# " + "a." * 400_000, "regions"),
    "quotes": ("'" * 1_000_000, ""),
    "backslashes": ('x = "' + "\\" * 1_000_000, ""),
}


@pytest.mark.parametrize("case", SLOW)
def test_a_text_made_to_take_long_is_refused_at_once(case: str):
    text, said = SLOW[case]
    start = time.process_time()
    with pytest.raises(ValueError, match=r"p\.toml: ") as caught:
        Profile.loads(text, "p.toml")
    assert time.process_time() - start < 10
    assert said in str(caught.value) and len(str(caught.value)) < 3000
    assert type(caught.value) is ValueError


def test_dots_in_strings_and_comments_are_no_keys():
    dots = ".".join("a" * 200)
    text = fuzz.HAND_WRITTEN.replace('"example"', f'"""\n{dots} \\" {dots}"""  # {dots}')
    assert Profile.loads(text.replace("'two", f"'{dots} two")).name == f'{dots} " {dots}'
    with pytest.raises(ValueError, match=r"a key of more than 20 parts \(at line 6\)"):
        Profile.loads(f"x = '''\n{dots}\n''\n'''\n# {dots}\n{dots} = 1")


CATASTROPHES = {
    "alternatives of one text": "(?:a.|.a|aa|..|a[a]|[a]a)" * 8 + "!",
    "groups of many alternatives": "(?:a.|.a|bb|..|[ab]a|a[ab]|ab.|.ba|b|.)" * 4,
    "optional groups": "(?:a|..)?" * 12 + "!",
}


@pytest.mark.parametrize("case", CATASTROPHES)
def test_a_pattern_with_too_many_ways_is_refused(case: str):
    with pytest.raises(ValueError, match="4096 ways to choose"):
        patterns.shape_of(CATASTROPHES[case])


@pytest.mark.parametrize("length", [10, 40, 300, 5000])
@pytest.mark.parametrize("pattern", [".*" * 6 + "!", r"(?:.*/)?(?:a|b|c)/.*!", "(?:a|.)" * 12 + ".*.*!"])
def test_a_path_is_matched_fast_or_refused(pattern: str, length: int):
    start = time.process_time()
    try:
        assert regions.assign_regions(["a" * length], [pattern, ".*"]) == (1,)
    except ValueError as error:
        assert "expected fewer repeats" in str(error) and length > 10
    assert time.process_time() - start < 10


# ----------------------------------------------------------------------------------- what is no such file


def sparse(path: Path, num_bytes: int, start: bytes = b"") -> Path:
    """A file of so many bytes, zeros after the first ones, that takes no room on the disk."""
    path.write_bytes(start)
    os.truncate(path, num_bytes)
    return path


READERS = {**fuzz_oracles.READERS, "columns": read_columns}


@pytest.mark.parametrize("kind", READERS)
def test_what_is_no_file_of_this_kind_is_refused(kind: str, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to("../../nowhere")
    names = ["pipe", "loop", "dangling", ".", "a\0b", "x" * 5000, "missing/file", "/dev/zero", "/dev/null"]
    for name in names:
        with fuzz.time_limit(5), pytest.raises(ValueError, match="expected a readable") as caught:
            READERS[kind](tmp_path / name)
        assert type(caught.value) is ValueError


@pytest.mark.parametrize("kind", READERS)
def test_a_file_of_100_mb_is_refused_unread(kind: str, tmp_path: Path, good: dict[str, list[bytes]]):
    path = sparse(tmp_path / kind, 10**8, good["trace" if kind == "columns" else kind][0])
    limit = MAX_FILE_BYTES if kind in ("profile", "substrate", "endpoint") else MAX_LINE_BYTES
    with fuzz.time_limit(10), pytest.raises(ValueError, match=f"expected at most {limit} bytes") as caught:
        READERS[kind](path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_trace_may_be_longer_than_a_line_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = traces.write_made_up(tmp_path / "t", 40)
    monkeypatch.setattr(trace, "MAX_LINE_BYTES", path.stat().st_size // 2)
    assert len(read_trace(path).steps) == 40


def test_names_in_a_file_open_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = fuzz.HAND_WRITTEN.replace("head/", "../../../etc/").replace('"mlp"', '"/etc/passwd"')
    (tmp_path / "p.toml").write_text(text.replace("etc/.*", "etc/bias"))
    opened = []
    hook = lambda event, args: opened.append(args[0]) if event == "open" and watched else None  # noqa: E731
    watched = True
    sys.addaudithook(hook)  # it stays for good, so it is told when to stop
    profile = Profile.load(tmp_path / "p.toml")
    fuzz_oracles.check_profile(tmp_path / "p.toml", profile)
    watched = False
    assert {str(path) for path in opened} == {str(tmp_path / "p.toml")}


# ----------------------------------------------------------------------------------------- command line


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["nf-jax", *map(str, args)])
    cli.main()


def command_of(kind: str, path: Path, folder: Path) -> tuple[object, ...]:
    """A command that reads the file."""
    if kind == "profile":
        return "validate", path
    if kind == "trace":
        return "report", "--no-plots", path
    if kind == "substrate":
        return "inspect", folder / "profile.toml", "-w", 4, "--substrate", path
    return "replay", folder / "trace.jsonl", "--endpoint", path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    traces.write_made_up(folder / "trace.jsonl", 3)
    (folder / "profile.toml").write_text(fuzz.HAND_WRITTEN)
    return folder


def test_a_command_ends_with_1_and_the_readers_words(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    num_refused = 0
    for kind, number, content in fuzz.mutants(seed=1, count=60):
        path = tmp_path / f"{kind}-{number}"
        path.write_bytes(content)
        if fuzz.judge(kind, path):
            continue
        num_refused += 1
        with pytest.raises(SystemExit) as stopped:
            run(monkeypatch, *command_of(kind, path, folder))
        shown = capsys.readouterr()
        assert stopped.value.code == 1
        assert shown.err.startswith(f"nf-jax: {path}: ") and "Traceback" not in shown.err + shown.out
    assert num_refused > 30


SUMMARIES = [
    "",
    "[",
    "3",
    "null",
    "[3]",
    '[{"policy": 3}]',
    '[{"policy": "../..", "seed": []}]',
    "[" * 10_000,
]


@pytest.mark.parametrize("text", SUMMARIES)
def test_a_summary_that_is_none_is_refused_by_name(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "guided-0").mkdir()
    traces.write_made_up(tmp_path / "guided-0" / "trace.jsonl", 3)
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "report", "--no-plots", tmp_path)
    error = capsys.readouterr().err
    assert stopped.value.code == 1 and error.startswith(f"nf-jax: {tmp_path / 'summary.json'}: expected")


def test_a_report_writes_through_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    outside = tmp_path / "outside.png"
    outside.write_bytes(b"mine")
    (tmp_path / "run").mkdir()
    traces.write_made_up(tmp_path / "run" / "trace.jsonl", 3)
    (tmp_path / "run" / "trace.png").symlink_to(outside)
    with pytest.raises(SystemExit):
        run(monkeypatch, "report", tmp_path / "run")
    assert "expected no link" in capsys.readouterr().err and outside.read_bytes() == b"mine"


def test_a_model_of_no_dtype_is_refused_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for dtype in ("float33", "Infinity", "f4", "a,b", "object", "S8"):
        (tmp_path / "p.toml").write_text(fuzz.HAND_WRITTEN.replace('"float32"', f'"{dtype}"', 1))
        with pytest.raises(SystemExit):
            run(monkeypatch, "inspect", tmp_path / "p.toml")
        error = capsys.readouterr().err
        assert error.startswith(f"nf-jax: {tmp_path / 'p.toml'}: ") and "dtype" in error and dtype in error


def test_substrates_and_endpoints_of_each_others_kind_are_refused(tmp_path: Path):
    substrates.substrate().save(tmp_path / "s.toml")
    Endpoint().save(tmp_path / "e.toml")
    for kind, name in (("endpoint", "s.toml"), ("substrate", "e.toml"), ("profile", "e.toml")):
        assert not fuzz.judge(kind, tmp_path / name)
