"""The layer table: which file may import which. Arrows point down only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "nf_jax"

# File -> (layer, what it imports of the package). None: anything.
LAYERS: dict[str, tuple[int, set[str] | None]] = {
    "checks": (0, set()),
    "profile": (0, {"checks"}),
    "regions": (0, set()),
    "codecs": (0, set()),
    "telemetry": (0, set()),
    "ending": (0, set()),
    "cluster": (1, {"ending"}),
    "endpoint": (1, {"checks"}),
    "segments": (1, {"codecs"}),
    "buckets": (1, {"regions"}),
    "collectives": (1, {"codecs"}),
    "trace": (1, {"telemetry"}),
    "load": (1, {"telemetry"}),
    "health": (1, {"profile", "telemetry"}),
    "groups": (2, {"profile", "codecs", "segments"}),
    "capacity": (2, {"profile", "codecs", "segments", "telemetry"}),
    "reducer": (3, {"codecs", "segments", "collectives", "groups"}),
    "controller": (3, {"profile", "health", "capacity", "telemetry"}),
    "costs": (3, {"checks", "profile", "codecs", "capacity", "telemetry"}),
    "wire": (3, {"profile", "buckets", "collectives", "groups", "capacity", "telemetry"}),
    "votes": (4, {"profile", "codecs", "segments", "collectives", "groups", "reducer"}),
    "plan": (4, {"profile", "regions", "segments", "buckets", "costs", "groups", "telemetry", "wire"}),
    "routes": (5, {"profile", "codecs", "segments", "collectives", "groups", "votes"}),
    "processes": (5, {"checks", "profile", "costs", "plan"}),
    "switch": (6, {"profile", "collectives", "groups", "routes"}),
    "pmean": (7, {"profile", "regions", "collectives", "groups", "plan", "switch"}),
    "state": (8, {"regions", "collectives", "health", "capacity", "telemetry", "pmean"}),
    "transform": (
        9,
        {
            "profile",
            "regions",
            "collectives",
            "health",
            "capacity",
            "controller",
            "costs",
            "telemetry",
            "plan",
            "pmean",
            "state",
        },
    ),
    "prices": (4, {"profile", "codecs", "costs", "endpoint", "telemetry"}),
    "replan": (5, {"profile", "plan", "trace"}),
    "replay": (
        9,
        {
            "profile",
            "replan",
            "health",
            "capacity",
            "controller",
            "costs",
            "endpoint",
            "prices",
            "telemetry",
            "trace",
        },
    ),
    "substrate": (
        10,
        {
            "profile",
            "codecs",
            "collectives",
            "capacity",
            "costs",
            "plan",
            "state",
            "telemetry",
            "transform",
        },
    ),
    "training": (10, {"collectives", "state", "transform"}),
    "checkpoint": (10, {"state"}),
    "report": (10, {"profile", "health", "plan", "telemetry", "trace"}),
    "calibrate": (10, {"profile", "transform", "replay", "telemetry", "trace"}),
    "sweep": (10, {"profile", "costs", "endpoint", "plan", "prices", "replan", "replay", "trace"}),
    "replay_report": (11, {"profile", "replay", "report", "sweep", "telemetry"}),
    "costs_report": (11, {"profile", "costs", "plan", "report", "telemetry"}),
    "cli": (12, None),
    "__init__": (12, None),
}

# The only import inside a row: the profile's schema stands on the checks that any file needs.
SAME_ROW = {("profile", "checks")}

# Third-party packages that only some files may import; None: no file.
RESTRICTED: dict[str, set[str] | None] = {
    "flax": {"training"},
    "orbax": {"checkpoint"},
    "optuna": {"calibrate"},
    "experiments": None,
    "tests": None,
    "chex": None,
    "pytest": None,
    "hypothesis": None,
}

MODULES = sorted((ROOT / PACKAGE).rglob("*.py"))


def imported_names(source: str) -> set[str]:
    """Every module that a file of the package imports, absolute, wherever the import stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = ".".join(filter(None, [PACKAGE if node.level else "", node.module]))
            if origin == PACKAGE:
                names |= {f"{origin}.{alias.name}" for alias in node.names}
            else:
                names.add(origin)
    return names


def own_imports(source: str) -> set[str]:
    """The files of the package that a file imports; a public name counts as ``__init__``."""
    own = set()
    for name in imported_names(source):
        top, *rest = name.split(".")
        if top == PACKAGE:
            own.add(rest[0] if rest and rest[0] in LAYERS else "__init__")
    return own


def foreign_imports(source: str) -> set[str]:
    return {name.split(".")[0] for name in imported_names(source)} - {PACKAGE}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import nf_jax.codecs", {"codecs"}),
        ("from nf_jax.codecs import pack", {"codecs"}),
        ("from nf_jax import codecs, routes as r", {"codecs", "routes"}),
        ("from . import codecs", {"codecs"}),
        ("from .codecs import pack", {"codecs"}),
        ("def f():\n    from nf_jax import codecs", {"codecs"}),
        ("from nf_jax import guided", {"__init__"}),
        ("import nf_jax", {"__init__"}),
        ("import jax, numpy.linalg", set()),
    ],
)
def test_every_spelling_of_an_import_is_seen(source, expected):
    assert own_imports(source) == expected


def test_the_table_itself_points_down_only():
    for module, (layer, allowed) in LAYERS.items():
        for other in allowed or ():
            assert LAYERS[other][0] < layer or (module, other) in SAME_ROW, (module, other)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_file_is_in_the_table_and_imports_what_it_lists(path: Path):
    assert path.parent == ROOT / PACKAGE, f"{path}: the package is flat"
    assert path.stem in LAYERS, f"{path.name} has no row in the layer table"
    allowed = LAYERS[path.stem][1]
    if allowed is not None:
        surplus = own_imports(path.read_text()) - allowed
        assert not surplus, f"{path.name} imports {sorted(surplus)}; it may: {sorted(allowed)}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_restricted_packages_stay_where_they_belong(path: Path):
    for name in foreign_imports(path.read_text()) & set(RESTRICTED):
        owners = RESTRICTED[name] or set()
        assert path.stem in owners, f"{path.name} imports {name}; only {sorted(owners)} may"


def test_the_profile_needs_no_jax():
    path = ROOT / PACKAGE / "profile.py"
    if not path.exists():
        pytest.skip("nf_jax/profile.py does not exist")
    assert not foreign_imports(path.read_text()) & {"jax", "jaxlib", "flax", "optax", "orbax"}
