"""The bench measures what it names: bytes from compiled programs, ratios from turns."""

from __future__ import annotations

import pytest

from experiments import bench, timing


def test_a_ratio_is_taken_turn_by_turn():
    seconds = {"a": [2.0, 30.0, 4.0], "b": [1.0, 10.0, 1.0]}
    assert timing.ratio(seconds, "a", "b") == {"median": 3.0, "min": 2.0, "max": 4.0}


def test_compiled_bytes_are_claimed_bytes():
    results = bench.bench_wire(bench.Config(megabytes=1, workers=(8,)))
    assert results["sign_majority_wire_fraction"][8] == pytest.approx(1 / 32, rel=0.01)
    assert results["bf16_wire_fraction"][8] == pytest.approx(1 / 2, rel=0.01)


def test_state_is_a_residual_and_a_shard_of_one():
    results = bench.bench_memory(bench.Config(megabytes=2))
    assert results["memory_sign_residual_over_gradient"] == 1
    assert results["memory_sign_server_over_gradient"] == 1 / 8
