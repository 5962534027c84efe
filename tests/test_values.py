"""Non-finite and extreme values: what the optimizer sees of them, and what training makes of such a step.

A cell (number of workers, table of codecs) is compiled once; the value, where it stands and the state that
it meets are data. The oracle is a plain mean in NumPy. Every case is two steps: the value, then a clean one.

All cells, and every leaf by itself (20 minutes on 2 cores): `NF_JAX_FULL=1 pytest -n 0 tests/test_values.py`
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from workers import AXIS, mapped, rows_are_equal

import nf_jax
from nf_jax import Plan, Profile, Route, StepInfo, report
from nf_jax.health import Health, Trigger
from nf_jax.profile import CapacityLimits, Codec, HealthLimits, Phase, Region
from nf_jax.state import AggregateState
from nf_jax.trace import TraceWriter, read_trace

FP32, BF16, SIGN, TERNARY = Route
FULL = "NF_JAX_FULL" in os.environ
SHAPE = (96, 64)
NONE: dict[str, Any] = dict(error_feedback=False, server_error_feedback=False)
TABLES: dict[str, dict[Route, Codec]] = {
    "rank1": {
        BF16: Codec(),
        SIGN: Codec(scale="rank1"),
        TERNARY: Codec(scale="rank1", down="2bit", error_feedback=False),
    },
    "leaf": {
        BF16: Codec(residual_dtype="bfloat16"),
        SIGN: Codec(scale="leaf", down="count"),
        TERNARY: Codec(scale="leaf", down="ternary", residual_dtype="bfloat16"),
    },
    "by row, or only the server's feedback": {
        BF16: Codec(error_feedback=False),
        SIGN: Codec(scale="row", down="2bit", error_feedback=False),
        TERNARY: Codec(scale="channel", down="majority", error_feedback=False),
    },
    "no feedback": {
        BF16: Codec(**NONE),
        SIGN: Codec(scale="channel", down="majority", **NONE),
        TERNARY: Codec(scale="rank1", down="count", **NONE),
    },
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """What is compiled once. The third dtype of a region's leaves is `halves`, in the order of routes."""

    num_workers: int | tuple[int, int]
    table: str
    halves: str

    @property
    def size(self) -> int:
        return int(np.prod(self.num_workers))

    @property
    def profile(self) -> Profile:
        codecs = TABLES[self.table]
        names = {route.name.lower(): route for route in codecs}
        regions = [Region(name=name, pattern=f"{name}/.*", codec=codecs[r]) for name, r in names.items()]
        return Profile(
            name="values",
            regions=(regions[0], Region(name="exact", pattern="exact/.*"), *regions[1:]),
            phases=(Phase(start_step=0, routes={"exact": FP32, **names}),),
            health=HealthLimits(warmup_steps=1, cooldown_steps=3, probation_steps=3, max_residual_ratio=1e30),
            capacity=CapacityLimits(min_lane_bytes=0),
        )

    @property
    def params(self) -> dict[str, dict[str, np.ndarray]]:
        """Two alike leaves, which are worked on as one array, and one of half precision, in each region."""
        dtypes = {"b": "bfloat16", "f": "float16"}
        packed = {
            route.name.lower(): {
                "first": np.zeros(SHAPE, np.float32),
                "half": np.zeros(SHAPE, dtypes[half]),
                "twin": np.zeros(SHAPE, np.float32),
            }
            for route, half in zip(TABLES[self.table], self.halves, strict=True)
        }
        return {"exact": {"half": np.zeros(7, np.float16), "small": np.zeros(3, np.float32)}, **packed}

    @property
    def plan(self) -> Plan:
        return nf_jax.plan(self.profile, self.params, self.num_workers)


TWO = Cell(2, "by row, or only the server's feedback", "bfb")
CELLS = [Cell(5, "rank1", "fbf"), TWO, Cell(1, "leaf", "ffb")]
if FULL:
    workers: list[Any] = [1, 2, 3, 4, 5, (2, 2)]
    CELLS = [Cell(*args) for args in itertools.product(workers, TABLES, ("fbf", "bfb"))]


@pytest.fixture(scope="module", params=CELLS, ids=lambda cell: f"{cell.num_workers}, {cell.table}")
def cell(request: pytest.FixtureRequest) -> Cell:
    return request.param


# ----------------------------------------------------------------------------------------- one step


class After(NamedTuple):
    """What a step leaves, `[W, ...]` everywhere."""

    means: dict[str, dict[str, np.ndarray]]
    state: AggregateState

    @property
    def info(self) -> StepInfo:
        return jax.tree.map(lambda x: x[0], self.state.info)


@functools.cache
def program(cell: Cell) -> Any:
    tx = nf_jax.aggregate_gradients(cell.profile, axis=AXIS, num_workers=cell.num_workers)

    def step(local: Any, _: Any) -> Any:
        gradients, state = local
        return tx.update(gradients, state, value=1.0)

    fresh = jax.tree.map(lambda x: np.stack([x] * cell.size), tx.init(cell.params))
    function = mapped(step, cell.size, "unchecked")
    return function.lower((clean(cell, 0), fresh), None).compile(), fresh


def run(cell: Cell, gradients: Any, state: AggregateState) -> After:
    compiled, _ = program(cell)
    return After(*jax.tree.map(np.asarray, compiled((gradients, state), None)))


@functools.cache
def clean(cell: Cell, seed: int) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: rng.normal(size=(cell.size, *p.shape)).astype(p.dtype), cell.params)


def unsound(cell: Cell, seed: int) -> dict[str, dict[str, np.ndarray]]:
    spoiled = jax.tree.map(np.copy, clean(cell, seed))
    spoiled["exact"]["small"][0, 0] = np.nan
    return spoiled


COURSE = {  # what a step leaves: its gradients, and the health that they lead to
    "first low-bit": (clean, Health.ADMITTED),
    "low-bit": (clean, Health.ADMITTED),
    "first fallback": (unsound, Health.FALLBACK),
    "fallback": (clean, Health.FALLBACK),
    "last fallback": (clean, Health.FALLBACK),
    "first probation": (clean, Health.PROBATION),
    "probation": (clean, Health.PROBATION),
}


@functools.cache
def states(cell: Cell) -> dict[str, AggregateState]:
    """One state of every kind, each reached by training."""
    found = {"warm-up": program(cell)[1]}
    state = found["warm-up"]
    for seed, (name, (gradients, health)) in enumerate(COURSE.items(), 11):
        found[name] = state = run(cell, gradients(cell, seed), state).state
        assert set(np.ravel(state.health.state)) == {health}, name
    return found


# ----------------------------------------------------------------------------------------- the cases

VALUES = {
    "nan": np.nan,
    "inf": np.inf,
    "minus inf": -np.inf,
    "zero": 0.0,
    "1e38": 1e38,
    "-1e36": -1e36,
    "1e18": 1e18,
    "largest": None,  # of the leaf's dtype
    "1e-25": 1e-25,
    "1e-38": 1e-38,
    "denormal": 1e-40,
    "smallest": -1e-45,
}


class Case(NamedTuple):
    """A value in some leaves: in their first element, or all over, of one worker or of all."""

    value: str
    whole: bool
    every_worker: bool
    state: str
    leaves: tuple[tuple[str, str], ...]

    def gradients(self, cell: Cell) -> dict[str, dict[str, np.ndarray]]:
        spoiled = jax.tree.map(np.copy, clean(cell, 7))
        for region, name in self.leaves:
            leaf = spoiled[region][name]
            value = VALUES[self.value]
            value = jnp.finfo(leaf.dtype).max if value is None else value
            worker = slice(None) if self.every_worker else slice(cell.size // 2, cell.size // 2 + 1)
            with np.errstate(over="ignore"):  # f16 has no 1e38: an infinity
                leaf[worker].reshape(leaf[worker].shape[0], -1)[:, slice(None if self.whole else 1)] = (
                    np.asarray(value, np.float32).astype(leaf.dtype)
                )
        return spoiled


def cases(cell: Cell) -> Iterator[Case]:
    """All kinds in all leaves; in short, every pair of properties, in leaves by turns."""
    names = [(region, name) for region, leaves in cell.params.items() for name in leaves]
    patterns = [tuple(names[::2]), tuple(names[1::2]), *((name,) for name in names)]
    axes = [list(VALUES), [False, True], [False, True], list(states(cell))]
    for index, places in enumerate(itertools.product(*(range(len(axis)) for axis in axes))):
        if FULL or sum(places) % 2:
            some = patterns if FULL else [patterns[index // 2 % len(patterns)]]
            kind: Any = [axis[place] for axis, place in zip(axes, places, strict=True)]
            yield from (Case(*kind, leaves=leaves) for leaves in some)


# ------------------------------------------------------------------------------------------- oracle

_LARGEST = float(np.finfo(np.float32).max)


def plain_mean(values: np.ndarray) -> np.ndarray:
    """In f32, in worker order, then in the leaf's dtype."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.zeros(values.shape[1:], np.float32)
        for row in values:
            total = total + row.astype(np.float32)
        return (total / np.float32(len(values))).astype(values.dtype)


def sum_of_sizes(values: np.ndarray) -> float:
    """What a scale is made of: the sum of all magnitudes, over elements and workers."""
    return float(np.abs(values.astype(np.float64)).sum())


def check_means(cell: Cell, gradients: Any, after: After, case: Any) -> None:
    for route, (region, name, leaf) in zip(routes_by_leaf(cell, after), walk(gradients), strict=True):
        mean, expected = after.means[region][name][0].astype(np.float32), plain_mean(leaf).astype(np.float32)
        found, plain = np.isfinite(mean), np.isfinite(expected)
        where = case, region, name, route.name
        if route == FP32:
            np.testing.assert_array_equal(found, plain, str(where))
            if any(counted(gradients)):  # such a step may be dropped, so it pays no residuals out
                slack = 2.0**-7 if name == "half" else 1e-6
                np.testing.assert_allclose(mean[plain], expected[plain], slack, slack, err_msg=str(where))
            continue
        if not plain.all():
            assert not found.any(), where
        elif route == BF16 or sum_of_sizes(leaf) < 0.98 * _LARGEST:
            assert found.all(), where


def walk(tree: Any) -> list[tuple[str, str, np.ndarray]]:
    return [(region, name, leaf) for region, leaves in tree.items() for name, leaf in leaves.items()]


def routes_by_leaf(cell: Cell, after: After) -> list[Route]:
    """The route that each leaf took."""
    packed = {leaf: group.lanes[0] for group in cell.plan.groups for leaf in group.leaves}
    taken = after.info.routes
    return [Route(taken[packed[i]]) if i in packed else FP32 for i in range(len(cell.plan.paths))]


def check_agreement(after: After, case: Any) -> None:
    assert rows_are_equal(after.means), case
    assert rows_are_equal(after.state._replace(memory=())), case


def check_memory(before: AggregateState, after: After, kept: bool, case: Any) -> None:
    for leaf in jax.tree.leaves(after.state.memory):
        assert np.isfinite(leaf.astype(np.float32)).all(), case
    if kept:
        jax.tree.map(np.testing.assert_array_equal, after.state.memory, before.memory)
        np.testing.assert_array_equal(after.state.pending, before.pending)


def counted(gradients: Any) -> list[int]:
    """Per region, (worker, leaf) pairs that are not finite or too large to square and sum."""
    with np.errstate(over="ignore", invalid="ignore"):
        return [
            sum(
                not np.isfinite(np.float32(np.square(row.astype(np.float64)).sum()))
                for leaf in leaves.values()
                for row in leaf
            )
            for leaves in gradients.values()
        ]


def check_health(before: AggregateState, gradients: Any, after: After, case: Any) -> bool:
    """Whether the step was unsound, as health must have seen it."""
    expected, info = counted(gradients), after.info
    assert info.signals.nonfinite.tolist() == expected, case
    is_bad, start = any(expected), Health(before.health.state[0, 0])
    tripped = is_bad and start in (Health.ADMITTED, Health.PROBATION)
    trips = before.health.trips[0] + int(tripped)
    np.testing.assert_array_equal(info.trips, trips, str(case))
    if is_bad:
        assert set(info.trigger) == {Trigger.NONFINITE}, case
        end = start if start == Health.WARMUP else Health.FALLBACK
        assert set(info.health_state) == {end}, case
        assert not info.next_routes.any(), case
    return is_bad


# ---------------------------------------------------------------------------------------------- laws


def check_two_steps(cell: Cell, case: Case) -> None:
    """The case, then a clean step."""
    before, gradients = states(cell)[case.state], case.gradients(cell)
    after = run(cell, gradients, before)
    check_agreement(after, case)
    check_means(cell, gradients, after, case)
    is_bad = check_health(before, gradients, after, case)
    check_memory(before, after, is_bad, case)
    later = run(cell, clean(cell, 8), after.state)
    check_agreement(later, case)
    assert all(np.isfinite(x.astype(np.float32)).all() for _, _, x in walk(later.means)), case
    assert later.info.signals.nonfinite.tolist() == [0] * 4, case
    check_memory(after.state, later, False, case)


def test_any_value_anywhere_spoils_its_leaf_alone_and_training_goes_on(cell: Cell):
    num_cases = 0
    for case in cases(cell):
        check_two_steps(cell, case)
        num_cases += 1
    assert num_cases >= 2 * len(VALUES) * len(states(cell))


@pytest.mark.parametrize(
    "case",
    [
        # The level of what a reducer owes, in units of a scale so small, overflowed.
        Case("1e-25", True, True, "low-bit", (("ternary", "first"),)),
        # A scale, rounded to bf16, went beyond the largest f16.
        Case("largest", True, True, "low-bit", (("ternary", "half"),)),
        # A mean that overflows only in the sum over workers was hidden by its signs.
        Case("1e38", False, True, "low-bit", (("sign", "first"),)),
    ],
    ids=lambda case: case.value,
)
def test_cases_that_once_went_wrong(case: Case):
    check_two_steps(CELLS[0], case)


DEAD_ROWS = [0, 50, 95]


def test_what_is_always_zero_comes_back_exactly_zero_in_every_state(cell: Cell):
    """A leaf that nothing reaches, and rows of an embedding that no batch holds: error feedback or not."""
    _, state = program(cell)
    codecs = {route.name.lower(): codec for route, codec in TABLES[cell.table].items()}
    for seed, (gradients, health) in enumerate(COURSE.values(), 21):
        given = jax.tree.map(np.copy, gradients(cell, seed))
        for region in codecs:
            given[region]["twin"][:] = 0
            given[region]["first"][:, DEAD_ROWS] = 0
        after = run(cell, given, state)
        state = after.state
        assert set(np.ravel(state.health.state)) == {health}
        for region, codec in codecs.items():
            zero = [after.means[region]["twin"], state.memory.residual.get(f"{region}/twin", np.zeros(1))]
            zero.append(state.memory.server_residual.get(f"{region}/twin", np.zeros(1)))
            if region == "bf16" or codec.scale in ("rank1", "row"):
                zero.append(after.means[region]["first"][:, DEAD_ROWS])
            assert not any(part.any() for part in zero)
            assert (after.means[region]["first"] != 0).mean() > 0.3


@pytest.mark.parametrize("start", ["warm-up", "low-bit", "last fallback", "probation"])
def test_an_endless_overflow_ends_in_locked_and_says_why(start: str, tmp_path: Path):
    cell = TWO
    state, health = states(cell)[start], []
    limits, plan = cell.profile.health, cell.plan
    most = (limits.max_trips + 1) * limits.cooldown_steps
    spoiled = jax.tree.map(np.copy, clean(cell, 7))
    spoiled["sign"]["half"][0] = np.inf
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, cell.profile.dumps(), plan.lanes, num_workers=cell.size) as trace:
        for _ in range(most):
            after = run(cell, spoiled, state)
            state = after.state
            health.append(int(after.info.health_state[0]))
            trace.write(nf_jax.step_info(state))
    assert health[-1] == Health.LOCKED and health.count(Health.LOCKED) <= most - limits.max_trips
    state = run(cell, clean(cell, 8), state).state
    assert set(nf_jax.step_info(state).health_state) == {Health.LOCKED}

    said = "a loss or gradient was not finite, or too large to square; in FP32 for good, after more trips"
    for sentence in report.explain_step(nf_jax.step_info(state), cell.profile.region_names):
        assert said in sentence and f"(trips: {limits.max_trips + 1})" in sentence
    lines = report.explain(read_trace(path))
    assert sum(said in line for line in lines) == 4
    assert f"not finite in {most} of {most} steps, first at step" in lines[-1] and lines[-1].endswith(
        ", in sign"
    )
