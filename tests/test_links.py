"""The link benchmark: its shapes, its rows, its arguments, what it writes, and one small cell."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import links, links_report, links_worker, testbed

REASON = testbed.why_unavailable()
COLUMNS = [
    "arm",
    "hosts",
    "rate",
    "shapes",
    "gradient_bytes",
    "step_seconds_median",
    "step_seconds_min",
    "step_seconds_max",
    "tx_bytes_per_step",
]


# ------------------------------------------------------------------------------------------ shapes


@pytest.mark.parametrize(
    ("name", "num_arrays", "num_parameters"),
    [("16MiB", 1, 2**22), ("resnet18", 62, 11_689_512), ("bert6", 100, 66_362_880)],
)
def test_shapes_are_those_of_the_model(name: str, num_arrays: int, num_parameters: int):
    shapes = links_worker.SHAPES[name]()
    assert len(shapes) == num_arrays
    assert sum(math.prod(shape) for shape in shapes.values()) == num_parameters
    assert links_worker.gradient_bytes(name) == 4 * num_parameters


def test_values_are_the_same_in_every_process_and_differ_between_hosts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(links_worker.SHAPES, "tiny", lambda: {"b": (3, 4), "a": (5,)})
    one, again, other = (links_worker.make_values("tiny", host) for host in (0, 0, 1))
    assert list(one) == ["b", "a"] and one["b"].dtype == np.float32
    assert all(np.array_equal(one[name], again[name]) for name in one)
    assert not np.array_equal(one["b"], other["b"])
    mean = links_worker.mean_of_first("tiny", 2)
    np.testing.assert_allclose(mean, (one["b"] + other["b"]) / 2, rtol=1e-6)


# ------------------------------------------------------------------------------------------- turns


class Noted:
    """An arm that notes what happens to it."""

    def __init__(self, notes: list[str], mean: np.ndarray) -> None:
        self.notes, self.mean = notes, mean

    def get_ready(self) -> None:
        self.notes.append("ready")

    def step(self) -> None:
        self.notes.append("step")

    def first_mean(self) -> np.ndarray:
        return self.mean

    def describe(self) -> str:
        return "nothing"

    def release(self) -> None:
        self.notes.append("release")


def test_a_turn_waits_before_every_step_and_counts_those_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    counter = tmp_path / "tx_bytes"
    counter.write_text("1000\n")
    monkeypatch.setattr(links_worker, "INTERFACE_BYTES", counter)
    notes: list[str] = []

    def barrier() -> None:
        notes.append("barrier")
        counter.write_text(str(int(counter.read_text()) + 10))

    turn = links_worker.take_turn(Noted(notes, np.ones(1)), barrier, num_uncounted=1, num_counted=2)
    one = ["ready", "barrier", "step"]
    assert notes == [*one, "barrier", *one, *one, "barrier", "release"]
    assert len(turn["seconds"]) == 2 and turn["tx_bytes"] == 30


def test_preparing_tells_a_mean_from_something_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(links_worker.SHAPES, "tiny", lambda: {"a": (64, 64)})
    exact, wrong = links_worker.mean_of_first("tiny", 2), links_worker.make_values("tiny", 7)["a"]
    cosines = []
    for mean in (exact, wrong):
        arm = Noted([], mean.astype(np.float32))
        cosines.append(links_worker.prepare(arm, lambda: None, "tiny", hosts=2, num_steps=1)["cosine"])
    assert cosines[0] > 0.9999 > 0.1 > abs(cosines[1])
    links.check_prepared("pmean", [{"cosine": cosines[0], "did": ""}])
    with pytest.raises(RuntimeError, match="pmean does not average"):
        links.check_prepared("pmean", [{"cosine": cosines[0], "did": ""}, {"cosine": cosines[1], "did": ""}])
    with pytest.raises(RuntimeError, match="sign-majority does not average"):
        links.check_prepared("sign-majority", [{"cosine": float("nan"), "did": ""}])


@pytest.mark.parametrize(
    ("seconds", "uncounted", "counted"), [(0.01, 1, 20), (0.3, 1, 3), (1.2, 1, 1), (2.5, 0, 1), (40.0, 0, 1)]
)
def test_slow_steps_make_short_turns(seconds: float, uncounted: int, counted: int):
    assert links.plan_turn(seconds) == {"uncounted": uncounted, "counted": counted}


def test_arms_that_do_not_fit_into_memory_go_in_batches_with_the_baseline():
    arms = list(links.ARMS)
    assert links.make_batches(arms, 4, "16MiB", 16 * 2**30) == [arms]
    batches = links.make_batches(arms, 4, "bert6", 24 * 2**30)
    assert len(batches) > 1 and all(batch[0] == "pmean" for batch in batches)
    assert sorted({arm for batch in batches for arm in batch}) == sorted(arms)
    assert all(len(batch) >= 2 for batch in links.make_batches(arms, 4, "bert6", 2**30))


# -------------------------------------------------------------------------------- rows and results


def test_a_row_has_the_median_of_all_steps_and_the_most_bytes_of_any_host():
    turns = [([0.3, 0.1], [100.0, 120.0]), ([0.2], [100.0, 140.0])]
    row = links.make_row("pmean", 2, "1gbit", "16MiB", turns)
    assert list(row) == COLUMNS
    assert [row[f"step_seconds_{part}"] for part in ("min", "median", "max")] == [0.1, 0.2, 0.3]
    assert row["gradient_bytes"] == 2**24 and row["tx_bytes_per_step"] == 130


def test_results_have_a_line_per_arm_and_a_plot_per_number_of_hosts(tmp_path: Path):
    rows = [
        links.make_row(arm, hosts, rate, shapes, [([seconds], [1e6] * hosts)])
        for arm, seconds in (("pmean", 0.4), ("torch-plain", 0.2))
        for hosts in (2, 4)
        for rate in ("none", "1gbit")
        for shapes in ("16MiB", "resnet18")
    ]
    labels = {arm: links.ARMS[arm].label for arm in ("pmean", "torch-plain")}
    links_report.write(tmp_path, rows, labels, command="-m experiments.links --x", machine="a machine")
    text = (tmp_path / "README.md").read_text()
    assert "python -m experiments.links --x" in text and "a machine" in text
    assert text.count("| DDP | 1 | 200 (200 - 200) 2.00x | 200 (200 - 200) 2.00x |") == 4
    assert all((tmp_path / f"links-{hosts}.png").stat().st_size > 10_000 for hosts in (2, 4))


def test_every_arm_has_a_style():
    assert set(links_report.STYLES) == set(links.ARMS)


# --------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arms": ("pmean", "morse")}, "arms: expected some of pmean, .*, got morse"),
        ({"shapes": ("vgg",)}, "shapes: expected some of 64KiB, 1MiB, 16MiB, resnet18, bert6, got vgg"),
        ({"rates": ("fast",)}, "rate: expected none, or a number"),
        ({"hosts": (1, 2)}, "hosts: expected at least 2 each"),
        ({"hosts": ()}, "hosts: expected at least one"),
        ({"rates": ("none", "none")}, "rates: expected at least one and no repeats"),
        ({"rounds": 0}, "rounds: expected at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        links.Config(**options)


def test_without_pytorch_arms_nothing_is_installed(tmp_path: Path):
    config = links.Config(arms=("pmean", "bf16"), torch_venv=tmp_path / "venv")
    assert list(links.find_pythons(config.arms, config.torch_venv)) == ["jax"]
    assert not config.torch_venv.exists()


# -------------------------------------------------------------------------------------------- cell


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_one_cell_end_to_end(tmp_path: Path):
    options = ["--arms", "pmean", "sign-majority", "--rates", "1gbit", "--hosts", "2", "--shapes", "16MiB"]
    links.main([*options, "--rounds", "1", "--out", str(tmp_path)])
    exact, signs = json.loads((tmp_path / "summary.json").read_text())
    assert list(exact) == COLUMNS
    assert exact["arm"] == "pmean" and 1 <= exact["tx_bytes_per_step"] / 2**24 < 1.02
    assert signs["tx_bytes_per_step"] / exact["tx_bytes_per_step"] < 0.033
    assert (tmp_path / "README.md").exists() and (tmp_path / "links-2.png").exists()
