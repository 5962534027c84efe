"""Laws of a run that goes on: killed at any moment, it is the run that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import killed_training
import optax
import pytest
from states import drawn

import nf_jax
from nf_jax import resume, trace, training
from nf_jax.profile import Profile, Route
from nf_jax.state import AggregateState, is_aggregate

NUM_KILLS = 3  # `python -m tests.killed_training --kills 20` for more
PROFILE = Profile.static(Route.SIGN)
PARAMS = {"kernel": jax.numpy.ones((64, 64))}


def test_a_run_killed_at_random_moments_is_the_run_that_never_was(tmp_path):
    """Parameters, optimizer, residuals, health, phase, data order and telemetry, to the bit."""
    cache = tmp_path / "cache"
    assert killed_training.start(tmp_path / "whole", cache).wait() == 0
    kills = killed_training.run_killed(tmp_path / "killed", cache, NUM_KILLS, seed=0)
    assert kills.while_saving and kills.at_steps == sorted(kills.at_steps)
    assert killed_training.differences(tmp_path / "whole", tmp_path / "killed") == []
    steps = trace.read_trace(tmp_path / "whole" / "trace.jsonl").steps
    # The run is no easy one: every route, falls back, probation, a saturated reducer.
    assert {route for step in steps for route in step["routes"]} == set(Route)
    assert {state for step in steps for state in step["health_state"]} == {0, 1, 2, 3}
    assert steps[-1]["trips"] == [2, 2] and any(step["saturated"] for step in steps)


# ----------------------------------------------------------------------------------- without training


def fresh() -> Any:
    tx = nf_jax.aggregate_gradients(PROFILE, axis="batch", num_workers=2)
    state = training.TrainState.create(apply_fn=None, params=PARAMS, tx=optax.chain(tx, optax.sgd(0.1)))
    return training.replicate(state, jax.devices()[:2])


def open_run(folder: Path, every_steps: int = 2, **facts: Any) -> resume.Run:
    return resume.Run(
        folder, fresh(), PROFILE, nf_jax.plan(PROFILE, PARAMS, 2), every_steps=every_steps, **facts
    )


def after(step: int) -> Any:
    """A state that says it is the one after `step`."""
    tx = nf_jax.aggregate_gradients(PROFILE, axis="batch", num_workers=2)
    state = training.TrainState.create(apply_fn=None, params=PARAMS, tx=optax.chain(tx, optax.sgd(0.1)))

    def at_step(node: Any) -> Any:
        if not isinstance(node, AggregateState):
            return node
        number = jax.numpy.int32(step)
        return node._replace(info=node.info._replace(step=number), step=number + 1)

    state = jax.tree.map(at_step, drawn(state, seed=step), is_leaf=is_aggregate)
    return training.replicate(state, jax.devices()[:2])


def steps_of(folder: Path) -> list[int]:
    return [step["step"] for step in trace.read_trace(folder / "trace.jsonl").steps]


def test_steps_after_the_latest_checkpoint_are_taken_again_and_written_once(tmp_path):
    with open_run(tmp_path) as run:
        assert run.step == 0
        for step in range(5):
            run.record(after(step), order=step)
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
    with open_run(tmp_path) as run:
        assert run.step == 4 and steps_of(tmp_path) == [0, 1, 2, 3]
        assert int(nf_jax.step_info(run.state).step) == 3
        run.record(after(4), order=4)
        run.save(after(4))
        assert run.save(after(4)).name == "5"
    with open_run(tmp_path) as run:
        assert run.step == 5 and steps_of(tmp_path) == [0, 1, 2, 3, 4]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "5"]


def test_a_damaged_checkpoint_takes_the_trace_back_with_it_and_is_replaced(tmp_path):
    with open_run(tmp_path) as run:
        for step in range(4):
            run.record(after(step))
    (tmp_path / "checkpoints" / "4" / "nf_jax.json").unlink()
    with pytest.warns(RuntimeWarning, match="checkpoints/4 is torn or corrupted"), open_run(tmp_path) as run:
        assert run.step == 2 and steps_of(tmp_path) == [0, 1]
        for step in (2, 3):
            run.record(after(step))
    with open_run(tmp_path) as run:
        assert run.step == 4 and steps_of(tmp_path) == [0, 1, 2, 3]


def test_every_line_reaches_the_disk_before_its_checkpoint_gets_a_name(tmp_path, monkeypatch):
    order = []
    sync, save = trace.TraceWriter.sync, nf_jax.checkpoint.save  # type: ignore[attr-defined]

    def synced(writer: Any) -> None:
        sync(writer)
        order.append(("synced", steps_of(tmp_path)))

    def saved(*args: Any, **options: Any) -> Path:
        order.append(("saved", options["step"]))
        return save(*args, **options)

    monkeypatch.setattr(trace.TraceWriter, "sync", synced)
    monkeypatch.setattr(nf_jax.checkpoint, "save", saved)  # type: ignore[attr-defined]
    with open_run(tmp_path) as run:
        for step in range(4):
            run.record(after(step))
    assert order == [("synced", [0, 1]), ("saved", 2), ("synced", [0, 1, 2, 3]), ("saved", 4)]


def test_a_trace_that_lost_its_end_is_refused(tmp_path):
    with open_run(tmp_path) as run:
        for step in range(4):
            run.record(after(step))
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    with pytest.raises(ValueError, match="expected a trace up to step 3, but it ends at step 1"):
        open_run(tmp_path)


def test_a_step_out_of_turn_is_not_recorded(tmp_path):
    with open_run(tmp_path) as run:
        run.record(after(0))
        for step in (0, 2):
            with pytest.raises(ValueError, match=f"expected the state after step 1, got that of {step}"):
                run.record(after(step))
    assert steps_of(tmp_path) == [0]


def test_a_run_of_other_facts_is_refused_by_name(tmp_path):
    with open_run(tmp_path, seed=1, rates={"peak": 0.1}) as run:
        run.record(after(0))
    with pytest.raises(
        ValueError, match=r"(?s)rates: there \{'peak': 0.1\}, here \{'peak': 0.2\}.*another folder"
    ):
        open_run(tmp_path, seed=1, rates={"peak": 0.2})
    with open_run(tmp_path, seed=1, rates={"peak": 0.1}) as run:
        assert run.step == 0 and steps_of(tmp_path) == []  # nothing was saved
