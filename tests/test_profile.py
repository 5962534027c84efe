"""A profile is valid or does not exist, and a file says where it is wrong."""

from __future__ import annotations

import doctest
import os
import random
import re
import time
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from nf_jax import profile as module
from nf_jax.checks import MAX_FILE_BYTES, Frozen
from nf_jax.profile import (
    Buckets,
    CapacityLimits,
    Codec,
    HealthLimits,
    Leaf,
    Model,
    Phase,
    Profile,
    Provenance,
    Region,
    Route,
    Target,
)

GOOD = """\
schema_version = 1
name = "example"
description = "two regions, two phases"

[model]
name = "mlp"
leaves = [
  {path = "head/bias", shape = [10], dtype = "float32"},
  {path = "body/kernel", shape = [64, 10], dtype = "float32"},
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


def edited(old: str, new: str) -> str:
    assert GOOD.count(old) == 1, old
    return GOOD.replace(old, new)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SOME_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
STEPS = st.integers(1, 2**31 - 1)
SIZES = st.integers(1, 2**63 - 1)
LIMITS = st.floats(1.5, 1e38)
NAMES = st.from_regex("[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
LEAVES = st.builds(Leaf, path=TEXT, shape=st.lists(st.integers(0, 2**20), max_size=3), dtype=SOME_TEXT)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    pattern = st.one_of(TEXT.map(re.escape).filter(bool), st.sampled_from([".*", r"a/\d+", "a|b"]))
    starts = sorted(draw(st.sets(STEPS, max_size=3)))
    route = st.sampled_from(Route)
    later = st.dictionaries(st.sampled_from(names), route, min_size=1)
    first = Phase(start_step=0, routes={name: draw(route) for name in names})
    resume, most = sorted(draw(st.tuples(LIMITS, LIMITS)))
    return Profile(
        name=draw(SOME_TEXT),
        description=draw(TEXT),
        fallback=draw(st.booleans()),
        model=draw(
            st.none()
            | st.builds(
                Model,
                name=SOME_TEXT,
                leaves=st.lists(LEAVES, min_size=1, max_size=3, unique_by=lambda leaf: leaf.path),
            )
        ),
        regions=tuple(
            Region(
                name=name,
                pattern=draw(pattern),
                codec=draw(st.builds(Codec, gate=st.floats(1e-9, 1.5), error_feedback=st.booleans())),
            )
            for name in names
        ),
        phases=(first, *(Phase(start_step=start, routes=draw(later)) for start in starts)),
        buckets=draw(
            st.builds(
                Buckets,
                first_bytes=SIZES,
                cap_bytes=SIZES,
                order=st.none() | st.lists(TEXT, min_size=1, max_size=3, unique=True),
            )
        ),
        health=draw(st.builds(HealthLimits, warmup_steps=STEPS, norm_jump_ratio=LIMITS)),
        capacity=CapacityLimits(max_reducer_load=most, resume_reducer_load=resume),
        target=draw(
            st.none() | st.builds(Target, metric=SOME_TEXT, reference=FINITE, tolerance=st.floats(0, 1e300))
        ),
        provenance=draw(
            st.none()
            | st.builds(
                Provenance,
                notes=st.none() | TEXT,
                date=st.none() | TEXT,
                num_workers=st.none() | SIZES,
                versions=st.dictionaries(TEXT, TEXT, max_size=3),
            )
        ),
    )


@hypothesis.settings(max_examples=40)
@hypothesis.given(profiles())
def test_a_profile_survives_text_and_a_dict_and_hashes_alike(profile):
    again = Profile.loads(profile.dumps())
    assert again == profile
    assert hash(again) == hash(profile)
    assert again.dumps() == profile.dumps()
    assert Profile.model_validate(profile.model_dump()) == profile


@hypothesis.settings(max_examples=10)
@hypothesis.given(profile=profiles())
def test_a_profile_survives_a_file(tmp_path_factory, profile):
    path = tmp_path_factory.mktemp("profile") / "p.toml"
    profile.save(path)
    assert Profile.load(path) == profile
    assert os.listdir(path.parent) == ["p.toml"]


def test_the_good_text_means_what_it_says():
    profile = Profile.loads(GOOD)
    assert profile.region_names == ("head", "body")
    assert profile.route_table == ((0, (Route.FP32, Route.FP32)), (20, (Route.FP32, Route.SIGN)))
    assert profile.regions[1].codec == Codec(scale="rank1", down="2bit", gate=1.0)
    assert profile.health == HealthLimits(max_trips=3, loss_spike_deviations=6.5)
    assert profile.provenance is not None and profile.provenance.date == "2024-05-17"
    assert Profile.loads(profile.dumps()) == profile


# What is wrong -> (text, key path, a word of the message).
BAD = {
    "not TOML": ("name = ", "", "end of document"),
    "deep nesting": ("a = " + "[" * 5000, "", "TOML"),
    "long integer": (f"a = {'9' * 5000}", "", "TOML"),
    "long hexadecimal integer": (
        edited("max_trips = 3", f"max_trips = 0x{'f' * 5000}"),
        "health.max_trips",
        "too large to print",
    ),
    "empty": ("", "regions", "got nothing"),
    "unknown key": (edited("max_trips", "max_tripz"), "health.max_tripz", "mean max_trips?"),
    "unknown section": (GOOD + "[zzz]", "zzz", "remove it"),
    "missing key": (edited("start_step = 20", ""), "phases[1].start_step", "got nothing"),
    "missing name": (edited('name = "example"', ""), "name", "got nothing"),
    "empty name": (edited('"example"', '""'), "name", "at least 1 character"),
    "newer version": (
        edited("schema_version = 1", "schema_version = 2\nnew_key = 3"),
        "schema_version",
        "written by a newer nf_jax",
    ),
    "version 0": (edited("schema_version = 1", "schema_version = 0"), "schema_version", "got 0"),
    "version true": (edited("schema_version = 1", "schema_version = true"), "schema_version", "1"),
    "text for int": (edited("max_trips = 3", 'max_trips = "3"'), "health.max_trips", "got '3'"),
    "float for int": (edited("max_trips = 3", "max_trips = 3.0"), "health.max_trips", "got 3.0"),
    "bool for int": (edited("max_trips = 3", "max_trips = true"), "health.max_trips", "got True"),
    "unknown section, close": (GOOD + "[health2]", "health2", "did you mean health?"),
    "int for bool": (edited("better = true", "better = 1"), "target.higher_is_better", "got 1"),
    "negative": (edited("max_trips = 3", "max_trips = -3"), "health.max_trips", "got -3"),
    "past int32": (edited("step = 20", f"step = {2**31}"), "phases[1].start_step", f"{2**31 - 1}"),
    "past int64": (edited("workers = 4", f"workers = {2**63}"), "provenance.num_workers", ""),
    "nan": (edited("6.5", "nan"), "health.loss_spike_deviations", "finite"),
    "inf": (edited("reference = 0.7", "reference = 1e999"), "target.reference", "finite"),
    "past float32": (edited("6.5", "1e39"), "health.loss_spike_deviations", "1e38"),
    "past float64": (edited("6.5", "9" * 400), "health.loss_spike_deviations", "number"),
    "negative tolerance": (edited("0.01", "-0.01"), "target.tolerance", "got -0.01"),
    "gate": (edited("gate = 1", "gate = 0.0"), "regions[1].codec.gate", "greater than 0"),
    "choice": (edited('"rank1"', '"tensor"'), "regions[1].codec.scale", "got 'tensor'"),
    "table for a text": (edited('"example"', "{a = 1}"), "name", "valid string"),
    "text for a list": (edited('["body/kernel", "head/bias"]', '"a"'), "buckets.order", "array"),
    "number in a list": (edited('["body/kernel", ', "[3, "), "buckets.order[0]", "got 3"),
    "repeated path": (edited('"body/kernel", "head/bias"', '"a", "a"'), "buckets.order[1]", "[0]"),
    "repeated leaf": (edited('= "head/bias"', '= "body/kernel"'), "model.leaves[1].path", "[0]"),
    "negative dimension": (edited("[64, 10]", "[-1]"), "model.leaves[1].shape[0]", "got -1"),
    "no leaves": (re.sub(r"(?s)leaves = .*?\n\]", "leaves = []", GOOD), "model.leaves", "1 item"),
    "repeated region": (edited('name = "body"', 'name = "head"'), "regions[1].name", "'head'"),
    "region's name": (edited('name = "body"', 'name = "1 body"'), "regions[1].name", "'1 body'"),
    "region's name, newline": (edited('name = "body"', 'name = "a\\n"'), "regions[1].name", "a"),
    "no phases": ('name = "a"\nphases = []\nregions = []', "phases", "at least 1 item"),
    "first phase late": (edited("step = 0", "step = 1"), "phases[0].start_step", "got 1"),
    "phases out of order": (edited("step = 20", "step = 0"), "phases[1].start_step", "at least 1"),
    "first phase incomplete": (edited('head = "FP32", ', ""), "phases[0].routes", "'head'"),
    "unknown region": (edited("routes.body", "routes.bodi"), "phases[1].routes", "'bodi'"),
    "no routes": (edited('routes.body = "sign"', "routes = {}"), "phases[1].routes", "1 item"),
    "unknown route": (edited('"sign"', '"SING"'), "phases[1].routes.body", "got 'SING'"),
    "mixed case route": (edited('"sign"', '"Sign"'), "phases[1].routes.body", "got 'Sign'"),
    "route number": (edited('"sign"', "2"), "phases[1].routes.body", "'TERNARY'"),
    "resume above max": (edited("load = 0.8", "load = 0.5"), "capacity.resume_reducer_load", "0.7"),
    "version text": (edited('"0.10.2"', "3"), "provenance.versions.jax", "got 3"),
}  # fmt: skip

BAD_PATTERNS = {
    "unbalanced": "(a",
    "nested repeats": "(a+)+",
    "nested lazy repeats": "(?:a*?b?)*?",
    "nested bounded repeats": "(a{1,30}){1,30}",
    "fixed count of repeats": "(a*){30}",
    "alternatives in a repeat": "(?:a|aa)+",
    "deeply hidden": "(?:x(?=(?:y(a+))))*",
    "possessive outside": "(a+)*+",
    "backreference in a repeat": r"(a)(?:\1)+",
    "too many repeats": ".*" * 7,
    "too many choices": "a?" * 13,
    "look-behind of variable width": "(?<=a+)b",
    "huge count": "a{99999999999999999999}",
    "deep nesting": "(" * 30 + ")" * 30,
    "deeper nesting": "(" * 250 + ")" * 250,
    "possible set operation": "[[a]",
    "late flags": "a(?i)b",
    "empty": "",
    "long": "a" * 501,
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_a_value_error_that_names_file_and_key(tmp_path: Path, case: str):
    text, key, word = BAD[case]
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        Profile.load(path)
    message = str(caught.value)
    assert type(caught.value) is ValueError
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert message.startswith(f"{path}: ")
    assert f"\n  {key}: expected" in message if key else "expected" in message
    assert "got" in message and word in message
    assert "pydantic" not in message and "Value error" not in message
    assert max(map(len, message.splitlines())) < 500


@pytest.mark.parametrize("case", BAD_PATTERNS)
def test_a_bad_pattern_is_refused_with_its_place(case: str):
    text = edited('"head/.*"', f"'{BAD_PATTERNS[case]}'")
    with pytest.raises(ValueError, match=r"p\.toml.*\n  regions\[0\]\.pattern: expected") as caught:
        Profile.loads(text, "p.toml")
    assert type(caught.value) is ValueError


@pytest.mark.parametrize(
    "pattern",
    [".*", r"(?:.*/)?(kernel|bias)", r"block_\d+/.*/(?:q|k|v)", r"(?:ab){3}", r"(?i:[a-z]{2,5})x"],
)
def test_an_ordinary_pattern_is_accepted(pattern: str):
    assert Region(name="a", pattern=pattern).pattern == pattern


@hypothesis.settings(max_examples=150)
@hypothesis.given(st.lists(st.sampled_from([*"aab(|)*+?.", "(?:", "{1,3}", "[ab]"]), max_size=14))
def test_an_accepted_pattern_matches_fast(pieces: list[str]):
    try:
        pattern = Region(name="a", pattern="".join(pieces)).pattern
    except ValueError:
        return
    start = time.process_time()
    re.fullmatch(pattern, "a" * 24 + "!")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "No such file"),
        (b"name = '\xff'", "UTF-8"),
        (b"#" * (MAX_FILE_BYTES + 1), f"at most {MAX_FILE_BYTES} bytes"),
    ],
)
def test_an_unreadable_file_is_a_value_error(tmp_path: Path, content: bytes | None, word: str):
    path = tmp_path / "p.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"p.toml: .*{word}") as caught:
        Profile.load(path)
    assert type(caught.value) is ValueError


def test_a_folder_or_an_impossible_path_is_a_value_error(tmp_path: Path):
    for path in (tmp_path, "a\0b", tmp_path / "missing" / "p.toml"):
        with pytest.raises(ValueError, match="expected"):
            Profile.load(path)
        with pytest.raises(ValueError, match="expected"):
            Profile.loads(GOOD).save(path)
    assert os.listdir(tmp_path) == []


def test_a_text_with_too_many_problems_lists_ten_and_a_count():
    with pytest.raises(ValueError) as caught:
        Profile.loads(GOOD + "[other]\n" + "[capacity2]\n" + "".join(f"[x{i}]\n" for i in range(20)))
    assert str(caught.value).splitlines()[-1] == "  and 12 more"
    assert len(str(caught.value).splitlines()) == 12


def test_windows_text_is_read(tmp_path: Path):
    path = tmp_path / "p.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert Profile.load(path) == Profile.loads(GOOD)


def test_a_failed_save_leaves_the_old_file_alone(tmp_path: Path, monkeypatch):
    path = tmp_path / "p.toml"
    old, new = Profile.static(Route.SIGN), Profile.static(Route.BF16)
    old.save(path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(ValueError, match=r"p\.toml: .*No space left"):
            new.save(path)
    for unsaveable in ("x" * MAX_FILE_BYTES, "\ud800"):
        with pytest.raises(ValueError, match=r"p\.toml: "):
            old.model_copy(update={"description": unsaveable}).save(path)
    assert Profile.load(path) == old
    assert os.listdir(tmp_path) == ["p.toml"]
    new.save(path)
    assert Profile.load(path) == new


def test_saving_to_a_link_keeps_the_link(tmp_path: Path):
    (tmp_path / "link.toml").symlink_to(tmp_path / "p.toml")
    Profile.static(Route.SIGN).save(tmp_path / "link.toml")
    assert (tmp_path / "link.toml").is_symlink()
    assert Profile.load(tmp_path / "p.toml") == Profile.static(Route.SIGN)


TOKENS = [
    *("=", "[", "]", "{", "}", '"', "'", ",", ".", "\n", "#", "\\", "\0", "é", "-1", "0x1", "1e9"),
    *("nan", "true", "2024-01-01", "[[regions]]", "\\ud800", "((a+)+)+", "SIGN", "9" * 20),
]


def mutate(rng: random.Random, text: str) -> str:
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, length = rng.randrange(len(text) + 1), rng.choice((1, 3, 20))
        lines = text.split("\n")
        match rng.randrange(5):
            case 0:
                text = text[:at] + text[at + length :]
            case 1:
                text = text[:at] + rng.choice(TOKENS) + text[at + rng.choice((0, 1)) :]
            case 2:
                text = text[:at] + text[at : at + length] + text[at:]
            case 3:
                lines.insert(rng.randrange(len(lines)), rng.choice(lines))
                text = "\n".join(lines)
            case 4:  # another value for a key
                index = rng.choice([i for i, line in enumerate(lines) if " = " in line] or [0])
                lines[index] = lines[index].split(" = ")[0] + " = " + rng.choice(TOKENS)
                text = "\n".join(lines)
    return text


@pytest.mark.parametrize("base", ["by hand", "saved"])
def test_a_mutated_text_loads_or_is_a_value_error(base: str):
    good = GOOD if base == "by hand" else Profile.loads(GOOD).dumps()
    num_loaded = 0
    for seed in range(400):
        text = mutate(random.Random(seed), good)
        try:
            profile = Profile.loads(text, "p.toml")
        except ValueError as error:
            assert type(error) is ValueError, text
            assert str(error).startswith("p.toml: "), text
        else:
            num_loaded += 1
            assert Profile.loads(profile.dumps()) == profile, text
            assert {len(routes) for _, routes in profile.route_table} == {len(profile.regions)}
    assert 20 < num_loaded < 380


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_are_a_value_error(tmp_path: Path, seed: int):
    path = tmp_path / "p.toml"
    rng = random.Random(seed)
    for _ in range(30):
        path.write_bytes(rng.randbytes(rng.randrange(1, 200)))
        with pytest.raises(ValueError, match="expected"):
            Profile.load(path)


@pytest.mark.parametrize("route", Route)
def test_a_static_profile_takes_exactly_its_route(route: Route):
    profile = Profile.static(route, down="count", error_feedback=False)
    assert profile.routes_of(0) == (route,)
    assert profile.route_table == ((0, (route,)),)
    assert profile.regions[0].codec == Codec(down="count", error_feedback=False)
    assert not profile.health.enabled and profile.capacity.min_lane_bytes == 0
    with pytest.raises(ValueError, match="dwon"):
        Profile.static(route, dwon="count")


@hypothesis.settings(max_examples=40)
@hypothesis.given(profiles())
def test_routes_of_are_those_of_the_table_and_the_fallback(profile):
    for index, name in enumerate(profile.region_names):
        seen = {routes[index] for _, routes in profile.route_table}
        seen |= {Route.FP32} if profile.fallback else set()
        assert profile.routes_of(index) == tuple(sorted(seen))
        current = profile.phases[0].routes[name]
        for phase, (start, routes) in zip(profile.phases, profile.route_table, strict=True):
            current = phase.routes.get(name, current)
            assert (start, routes[index]) == (phase.start_step, current)


def test_a_model_is_compared_leaf_by_leaf():
    profile = Profile.loads(GOOD)
    assert profile.model is not None
    leaves = profile.model.leaves
    profile.check_model(leaves[::-1])
    Profile.static(Route.SIGN).check_model([])
    other = [
        Leaf(path="body/kernel", shape=(64, 11), dtype="bfloat16"),
        Leaf(path="tail", shape=(), dtype="float32"),
    ]
    with pytest.raises(ValueError) as caught:
        profile.check_model(other)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: head/bias",
        "  unexpected: tail",
        "  shape of body/kernel: expected (64, 10), got (64, 11)",
        "  dtype of body/kernel: expected float32, got bfloat16",
    ]
    many = [Leaf(path=f"extra_{i}", shape=(1,), dtype="float32") for i in range(13)]
    with pytest.raises(ValueError, match=r"extra_9\n  and 3 more$"):
        profile.check_model([*leaves, *many])


@pytest.mark.parametrize(
    ("higher", "met", "missed"), [(True, (0.75, 1.0), (0.74,)), (False, (1.25, 0.0), (1.26,))]
)
def test_a_target_is_met_within_its_tolerance(higher, met, missed):
    target = Target(metric="m", reference=1.0, tolerance=0.25, higher_is_better=higher)
    assert all(target.is_met(value) for value in met)
    assert not any(target.is_met(value) for value in (*missed, float("nan")))


def test_nothing_can_be_changed_and_every_field_says_what_it_means():
    with pytest.raises(ValueError, match="frozen"):
        Profile.loads(GOOD).name = "other"
    models = [*Frozen.__subclasses__(), Profile]
    assert len(models) >= 11
    for model in models:
        assert model.__doc__
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"
            if not name.startswith("num_") and name.endswith(("_steps", "_bytes", "_ratio")):
                assert re.search("step|bytes|ratio", field.description), f"{model.__name__}.{name}"


def test_the_example_runs():
    results = doctest.testmod(module)
    assert results.attempted >= 3 and results.failed == 0
