"""The reducer experiment: what it predicts, how it judges, what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import substrates

from experiments import links, reducer, testbed
from nf_jax import Route

REASON = testbed.why_unavailable()
COLUMNS = {"route", "hosts", "rate", "size_bytes", "predicted_seconds", "measured_seconds"}


def row(route: str, predicted: float, measured: float, size_bytes: int = 2**20) -> dict[str, Any]:
    return {
        "route": route,
        "hosts": 2,
        "rate": "1gbit",
        "size_bytes": size_bytes,
        "predicted_seconds": predicted,
        "measured_seconds": measured,
        "measured_seconds_min": measured,
        "measured_seconds_max": measured,
        "what_if_seconds": predicted,
    }


def measured(arm: str, seconds: float, rate: str = "none") -> dict[str, Any]:
    return {
        "arm": arm,
        "hosts": 2,
        "rate": rate,
        "shapes": "1MiB",
        "gradient_bytes": 2**20,
        "step_seconds_median": seconds,
        "step_seconds_min": seconds,
        "step_seconds_max": seconds,
    }


@pytest.mark.parametrize(("predicted", "good"), [(0.8, True), (1.2, True), (0.79, False), (1.21, False)])
def test_a_prediction_is_good_within_a_fifth(predicted: float, good: bool):
    assert reducer.is_good(row("SIGN", predicted, 1.0)) == good


def test_choices_are_judged_where_routes_differ():
    rows = [
        row("FP32", 3.0, 2.0),
        row("SIGN", 1.0, 1.0),  # right
        row("TERNARY", 4.0, 1.0),  # wrong
        row("BF16", 9.0, 1.9),  # not clear
        row("SIGN", 1.0, 1.0, size_bytes=4),  # nothing to compare with
    ]
    right, clear, wrong = reducer.judge_choices(rows)
    assert (right, clear) == (1, 2)
    assert len(wrong) == 1 and wrong[0].startswith("TERNARY, 2 hosts, 1gbit, 1024 KiB: FP32 took 2.00 times")


def test_auto_is_compared_with_the_fastest_and_with_pmean():
    rows = [measured("pmean", 2.0), measured("sign-majority", 1.0), measured("auto", 1.1)]
    assert reducer.judge_auto(rows) == ["| 2 | none | 1MiB | sign-majority | 1.10 | 0.55 |"]


def test_rows_hold_what_substrates_predict(tmp_path: Path):
    for rate in ("none", "1gbit"):
        substrates.substrate(2).save(links.substrate_path(tmp_path, 2, rate))
    rows = reducer.make_rows([measured("fp32", 0.5, "1gbit"), measured("pmean", 0.5, "1gbit")], tmp_path)
    (only,) = rows
    assert only.keys() >= COLUMNS and only["route"] == Route.FP32.name
    lane = 2**20 * 1e-9 + 1e-4  # 1 GB/s, and a latency
    assert only["predicted_seconds"] == pytest.approx(lane, rel=0.01)
    assert only["what_if_seconds"] == pytest.approx(2**20 / 125e6 + 1e-4, rel=0.01)


def test_a_report_says_what_is_good_and_draws_it(tmp_path: Path):
    rows = [row("FP32", 2.0, 2.0), row("SIGN", 1.0, 2.0)]
    reducer.write(tmp_path, rows, ["| auto |"], command="-m experiments.reducer", machine="a test")
    text = (tmp_path / "README.md").read_text()
    assert "1 of 2 predictions" in text and "1000 / 2000 (2000 - 2000) *" in text and "| auto |" in text
    assert json.loads((tmp_path / "summary.json").read_text()) == rows
    assert (tmp_path / "reducer.png").stat().st_size > 5_000


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_one_small_cell_on_the_testbed(tmp_path: Path):
    sizes = (4096, 16384, 32768, 65536)
    config = reducer.Config(
        rates=("none",), hosts=(2,), shapes=("64KiB",), rounds=1, out=tmp_path, probe_sizes_bytes=sizes
    )
    rows = reducer.run(config)
    assert {found["route"] for found in rows} == {"FP32", "BF16", "SIGN", "TERNARY"}
    assert all(found["predicted_seconds"] > 0 and found["measured_seconds"] > 0 for found in rows)
    assert links.substrate_path(tmp_path / "links", 2, "none").exists()
