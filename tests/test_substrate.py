"""Laws of the probe: it measures what the cost model asks for, and what it writes can be used."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import process_groups
import pytest
from flax import jax_utils

import nf_jax
from nf_jax import Route, Substrate, costs, substrate
from nf_jax.stages import OWN_STAGE, STAGES, StageName

SIZES = (4096, 16384, 32768, 65536)


@pytest.fixture(scope="module")
def measured() -> tuple[Substrate, list[str]]:
    told: list[str] = []
    return substrate.probe(link="none", measured_by="a test", sizes_bytes=SIZES, tell=told.append), told


def test_every_stage_is_measured_at_the_ladder(measured: tuple[Substrate, list[str]]):
    found, told = measured
    assert set(found.stages) == set(STAGES)
    assert found.num_workers == jax.device_count() and found.backend == jax.default_backend()
    assert found.link == "none" and found.num_processes == 1 and found.versions["jax"] == jax.__version__
    for name, make in substrate.SHARED_STAGES.items():
        stage = found.stages[name]
        assert make and min(stage.measured_seconds) > 0 and len(stage.sizes_bytes) == len(SIZES)
    for name in OWN_STAGE.values():
        assert found.stages[name].sizes_bytes == SIZES[1:]
    assert len(told) == substrate.num_points(SIZES)


def test_predictions_at_measured_sizes_are_what_was_measured(measured: tuple[Substrate, list[str]]):
    """The stages of a route add up to a whole step, so no more than its own stage may be missing."""
    found, _ = measured
    for route in Route:
        profile, size = substrate.one_route(route), SIZES[1]
        lanes = substrate._lanes_of(profile, size, found.num_workers)
        predicted = costs.lane_seconds(profile, lanes, found)[0, route]
        own = found.stages[OWN_STAGE[route]]
        shared = [
            found.stages[name].seconds(num_bytes)
            for name, num_bytes in costs.stages_of(
                route,
                profile.regions[0].codec,
                size // 4,
                lanes.wire_bytes[0][route],
                found.num_workers,
            )
            if name in substrate.SHARED_STAGES
        ]
        assert predicted == pytest.approx(own.measured_seconds[0] + sum(shared))
        assert predicted > 0


def test_bytes_of_collectives_are_those_that_a_worker_sends(measured: tuple[Substrate, list[str]]):
    found, _ = measured
    workers = found.num_workers
    times_sent: dict[StageName, int] = {"all_reduce": 2, "all_to_all": 1, "all_gather": 1}
    for name, times in times_sent.items():
        expected = times * (workers - 1) / workers * np.asarray(SIZES)
        np.testing.assert_allclose(found.stages[name].sizes_bytes, expected, atol=4 * workers)


def test_it_can_be_saved_and_used(measured: tuple[Substrate, list[str]], tmp_path: Path):
    found, _ = measured
    found.save(tmp_path / "substrate.toml")
    again = Substrate.load(tmp_path / "substrate.toml")
    assert again == found
    tx = nf_jax.aggregate_gradients(
        substrate.one_route(Route.SIGN), axis="batch", num_workers=found.num_workers, substrate=again
    )
    gradient = np.arange(found.num_workers, dtype=np.float32)[:, None, None] * np.ones((32, 32), np.float32)
    state = jax_utils.replicate(tx.init({"kernel": gradient[0]}))
    step = jax.pmap(lambda g, s: tx.update({"kernel": g}, s, value=0.0), axis_name="batch")
    means, state = step(gradient, state)
    info = nf_jax.step_info(state)
    assert info.routes.tolist() == ([Route.FP32] if info.reasons[0] else [Route.SIGN])
    np.testing.assert_allclose(np.asarray(means["kernel"]), gradient.mean(), rtol=1e-6)


@pytest.mark.parametrize("sizes", [(4096, 8192), (4096, 8192, 8192, 16384), (1024, 4096, 8192, 16384)])
def test_a_ladder_that_is_none_is_refused(sizes: tuple[int, ...]):
    with pytest.raises(ValueError, match="sizes_bytes: expected at least 4, ascending, from 4096"):
        substrate.probe(sizes_bytes=sizes)


def test_one_worker_has_nothing_to_measure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="at least 2 workers"):
        substrate.probe()


def test_slow_steps_end_the_ladder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(substrate, "_median_seconds", lambda bench, step: 1.0)
    bench = substrate.Bench()
    found = substrate._climb(bench, "pack", lambda _, size: (lambda: None, size), SIZES, lambda text: None)
    assert found.sizes_bytes == [4096, 16384]


def test_two_processes_measure_the_same(tmp_path: Path):
    argv = ["-m", "nf_jax.cli", "probe", "--out", str(tmp_path / "s.toml"), "--devices", "2", "--distributed"]
    process_groups.run(2, *argv, "--sizes-bytes", *map(str, SIZES))
    found = Substrate.load(tmp_path / "s.toml")
    assert (found.num_workers, found.num_processes) == (2, 2)
    assert (tmp_path / "s.png").stat().st_size > 10_000
