"""The picture of loss against bytes."""

from __future__ import annotations

import json

import pytest

from experiments import pareto


def row(policy: str, loss: float, fraction: float, **more: object) -> dict:
    return {"workload": "text", "policy": policy, "test_loss": loss, "wire_fraction": fraction, **more}


ROWS = [
    row("fp32", 1.0, 1.0),
    row("fp32", 1.2, 1.0),
    row("bf16", 1.1, 0.5),
    row("static", 1.5, 0.04),
    row("guided", 1.2, 0.08),
    row("guided", 1.6, 0.07, label="late"),
]


def test_seeds_are_one_point_and_labels_are_points_of_their_own():
    points = {point.name: point for point in pareto.points_of(ROWS)}
    assert list(points) == ["static", "guided late", "guided", "bf16", "fp32"]  # by bytes
    assert points["fp32"].losses == (1.0, 1.2) and points["fp32"].loss == pytest.approx(1.1)


def test_the_front_is_what_none_beats_on_both():
    best = {point.name for point in pareto.points_of(ROWS) if point.is_best}
    # bf16 has fp32's mean loss for half the bytes; a worse loss for more bytes is never on the front.
    assert best == {"static", "guided", "bf16"}


def test_labels_do_not_lie_on_each_other():
    from matplotlib.figure import Figure

    ax = Figure(dpi=72).subplots()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    one, near, far = (
        pareto.Point(name, "guided", fraction, (loss,))
        for name, fraction, loss in (("one", 0.1, 0.5), ("near", 0.11, 0.501), ("far", 0.9, 0.5))
    )
    low, high, other = pareto.label_rises(ax, [one, near, far])
    assert low == other == 0 and 9 < high <= 10
    assert pareto.label_rises(ax, [near, one, far]) == [high, low, other]


def test_the_command_draws_what_lies_in_several_folders(tmp_path, capsys):
    for name, rows in {"one": ROWS[:3], "two": ROWS[3:]}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(rows))
    out = tmp_path / "new" / "pareto.png"
    pareto.main([str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(out)])
    assert out.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("static", "guided late", "bf16", "on the front"))


def test_other_workloads_and_missing_folders_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="found no such file"):
        pareto.main([str(tmp_path)])
    (tmp_path / "summary.json").write_text(json.dumps([ROWS[0], {**ROWS[1], "workload": "digits"}]))
    with pytest.raises(SystemExit, match="expected runs of one workload"):
        pareto.main([str(tmp_path)])
