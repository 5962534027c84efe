"""The layer table: which file may import which. Arrows point down only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "nf_jax"

# File -> (layer, what it imports of the package). None: anything.
LAYERS: dict[str, tuple[int, set[str] | None]] = {
    "patterns": (0, set()),
    "checks": (0, {"patterns"}),
    "profile": (0, {"checks"}),
    "regions": (0, {"patterns"}),
    "codecs": (0, set()),
    "telemetry": (0, set()),
    "ending": (0, set()),
    "arguments": (0, set()),
    "manifest": (0, set()),
    "cluster": (1, {"ending"}),
    "endpoint": (1, {"checks"}),
    "segments": (1, {"codecs"}),
    "buckets": (1, {"regions"}),
    "collectives": (1, {"codecs"}),
    "records": (1, {"checks", "telemetry"}),
    "trace": (2, {"checks", "telemetry", "records"}),
    "load": (1, {"telemetry"}),
    "running_means": (1, {"profile", "telemetry"}),
    "job": (1, {"profile"}),
    "stages": (1, {"checks", "profile"}),
    "health": (2, {"profile", "telemetry", "running_means"}),
    "candidates": (1, {"checks", "profile"}),
    "shadow_trace": (3, {"candidates", "records", "telemetry", "trace"}),
    "sensitivity": (
        4,
        {"checks", "profile", "patterns", "regions", "buckets", "candidates", "shadow_trace"},
    ),
    "groups": (2, {"codecs", "profile", "segments"}),
    "capacity": (2, {"codecs", "profile", "telemetry", "segments"}),
    "costs": (2, {"codecs", "profile", "telemetry", "stages"}),
    "columns": (3, {"telemetry", "trace"}),
    "thresholds": (4, {"profile", "running_means", "health", "columns"}),
    "reducer": (3, {"codecs", "collectives", "segments", "groups"}),
    "controller": (3, {"profile", "telemetry", "health", "capacity"}),
    "wire": (3, {"profile", "telemetry", "buckets", "collectives", "capacity", "groups"}),
    "prices": (3, {"codecs", "profile", "telemetry", "endpoint", "stages", "costs"}),
    "votes": (4, {"codecs", "profile", "collectives", "segments", "groups", "reducer"}),
    "plan": (
        4,
        {"profile", "regions", "telemetry", "buckets", "segments", "stages", "costs", "groups", "wire"},
    ),
    "routes": (5, {"codecs", "profile", "collectives", "segments", "groups", "votes"}),
    "space": (5, {"profile", "regions", "plan"}),
    "processes": (5, {"checks", "profile", "stages", "plan"}),
    "replan": (5, {"profile", "columns", "plan"}),
    "search": (6, {"space"}),
    "switch": (6, {"profile", "collectives", "groups", "routes"}),
    "replay": (
        6,
        {
            "profile",
            "telemetry",
            "endpoint",
            "health",
            "stages",
            "capacity",
            "columns",
            "costs",
            "controller",
            "prices",
            "replan",
        },
    ),
    "pmean": (7, {"profile", "regions", "collectives", "groups", "plan", "switch"}),
    "sweep": (7, {"profile", "endpoint", "stages", "columns", "prices", "plan", "replan", "replay"}),
    "shadow": (
        8,
        {
            "profile",
            "telemetry",
            "buckets",
            "candidates",
            "collectives",
            "stages",
            "capacity",
            "costs",
            "groups",
            "wire",
            "plan",
            "pmean",
        },
    ),
    "state": (8, {"regions", "telemetry", "collectives", "health", "capacity", "pmean"}),
    "transform": (
        9,
        {
            "profile",
            "regions",
            "telemetry",
            "candidates",
            "collectives",
            "health",
            "stages",
            "capacity",
            "controller",
            "plan",
            "pmean",
            "shadow",
            "state",
        },
    ),
    "host_state": (9, {"regions", "state"}),
    "leaves": (9, {"state"}),
    "substrate": (
        10,
        {
            "codecs",
            "profile",
            "telemetry",
            "collectives",
            "stages",
            "capacity",
            "costs",
            "plan",
            "state",
            "transform",
        },
    ),
    "training": (10, {"collectives", "state", "host_state"}),
    "checkpoint": (10, {"manifest", "state", "host_state", "leaves"}),
    "adopt": (10, {"state"}),
    "moments": (9, {"profile", "state"}),
    "elastic": (10, {"profile", "segments", "controller", "plan", "pmean", "state"}),
    "resume": (11, {"profile", "telemetry", "trace", "plan", "state", "checkpoint"}),
    "report": (10, {"profile", "telemetry", "health", "trace", "shadow_trace", "plan"}),
    "lab": (6, {"profile", "job", "space"}),
    "shortlist": (7, {"profile", "job", "plan", "space", "search", "lab"}),
    "protections": (7, {"profile", "sensitivity", "shadow_trace", "job", "space", "lab"}),
    "calibrate": (
        8,
        {
            "profile",
            "job",
            "columns",
            "thresholds",
            "space",
            "search",
            "replay",
            "lab",
            "shortlist",
            "protections",
        },
    ),
    "calibrate_report": (11, {"job", "space", "lab", "shortlist", "calibrate", "report"}),
    "shadow_findings": (
        9,
        {"profile", "telemetry", "stages", "shadow_trace", "costs", "sensitivity", "plan", "shadow"},
    ),
    "shadow_report": (11, {"sensitivity", "shadow_findings", "report"}),
    "replay_report": (11, {"columns", "profile", "telemetry", "replay", "sweep", "report"}),
    "costs_report": (11, {"profile", "telemetry", "stages", "costs", "plan", "report"}),
    "calibrate_command": (12, {"arguments", "lab", "calibrate", "calibrate_report"}),
    "cli": (13, None),
    "__init__": (13, None),
}

# The only imports inside a row: the profile's schema stands on the checks that any file needs, and these, as
# regions do, on what a pattern may be.
SAME_ROW = {("profile", "checks"), ("checks", "patterns"), ("regions", "patterns")}

# Third-party packages that only some files may import; None: no file.
RESTRICTED: dict[str, set[str] | None] = {
    "flax": {"training"},
    "orbax": {"checkpoint"},
    "optuna": {"search"},
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
