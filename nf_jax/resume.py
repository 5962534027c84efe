"""A run that can be killed at any moment and goes on: checkpoints and a trace that agree, in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from nf_jax import checkpoint, trace
from nf_jax.plan import Plan
from nf_jax.profile import Profile
from nf_jax.state import step_info
from nf_jax.telemetry import StepInfo


class Run:
    """A run's folder: `trace.jsonl`, a line per step, and `checkpoints/<step>`, one every few steps.

    Opened again after whatever ended it, `state` and `step` are those of the latest checkpoint that is
    whole, and the trace ends just before: neither gaps nor duplicates. What depends on the step alone
    (batches, schedules, keys folded in) then makes the run that was never ended, bit for bit.

    In several processes all of them open it, at the same point, on a file system that they share; the first
    writes the trace.
    A step that is saved is in the trace: lines reach the disk before the checkpoint gets its name.

    Args:
      folder: made if missing.
      fresh: the state before the first step, placed: from `training.replicate` or `training.place`, with
        one `aggregate_gradients` in it.
      profile: the operating profile.
      plan: `nf_jax.plan(profile, params, num_workers)`, for the trace's lanes.
      every_steps: steps from one checkpoint to the next.
      keep: how many checkpoints to keep; at least 2 leave one to go back to.
      **facts: what else makes the run what it is (JSON-like): seed, learning rate. They are the trace's
        header, and a run that goes on must have the same.

    Attributes:
      state: the state to go on from; `fresh` where there is no checkpoint.
      step: steps that it has taken, and the number of the next one.

    Raises:
      ValueError: what lies in the folder is another run's: the leaves or facts that differ are named.

    Example:
      with resume.Run("runs/0", training.replicate(fresh), profile, plan, every_steps=100, seed=0) as run:
          state = run.state
          for batch in itertools.islice(batches(seed=0), run.step, num_steps):
              state, metrics = step(state, batch)
              run.record(state, loss=float(metrics["loss"][0]))
    """

    def __init__(
        self,
        folder: str | Path,
        fresh: Any,
        profile: Profile,
        plan: Plan,
        *,
        every_steps: int,
        keep: int = 2,
        **facts: Any,
    ):
        if every_steps < 1:
            raise ValueError(f"every_steps: expected at least 1, got {every_steps}")
        folder = Path(folder)
        self._checkpoints, self._every_steps, self._keep = folder / "checkpoints", every_steps, keep
        is_saved = checkpoint.latest_step(self._checkpoints) is not None
        self.state = checkpoint.restore(self._checkpoints, fresh) if is_saved else fresh
        self.step = int(step_info(self.state).step) + 1
        self._saved_step = self.step if is_saved else None
        self._trace = None
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "trace.jsonl"
            _check_facts(path, facts)
            self._trace = trace.TraceWriter(path, profile.dumps(), plan.lanes, resume_step=self.step, **facts)
        if jax.process_count() > 1:  # who reads the trace finds that it ends where the checkpoint does
            multihost_utils.sync_global_devices(f"nf_jax.resume {self.step}")

    def record(self, state: Any, **extra: Any) -> StepInfo:
        """Takes note of a step: a line in the trace, and a checkpoint where one is due.

        Args:
          state: the state after it, as the step returned it.
          **extra: more of what it measured (JSON-like), for the trace.

        Returns:
          What the step did, NumPy.

        Raises:
          ValueError: it is not the step after the last one.
        """
        info = jax.device_get(step_info(state))
        if int(info.step) != self.step:
            raise ValueError(f"record: expected the state after step {self.step}, got that of {info.step}")
        if self._trace is not None:
            self._trace.write(info, **extra)
        self.step += 1
        if self.step % self._every_steps == 0:
            self.save(state)
        return info

    def save(self, state: Any) -> Path:
        """Saves now, unless that has been done: at the end, say. `record` saves when it is due."""
        if self._saved_step != self.step:
            if self._trace is not None:
                self._trace.sync()
            checkpoint.save(self._checkpoints, state, step=self.step, keep=self._keep)
            self._saved_step = self.step
        return self._checkpoints / str(self.step)

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_facts(path: Path, facts: dict[str, Any]) -> None:
    """Raises unless the trace of a run that goes on has these facts in its header."""
    if not path.exists():
        return
    with trace.open_trace(path) as stream:
        header, _ = trace.read_head(stream, path)
    asked = trace.as_read(facts)
    wrong = [name for name in asked if header.get(name) != asked[name]]
    if wrong:
        lines = "".join(f"\n  {n}: there {header.get(n)!r}, here {asked[n]!r}" for n in wrong)
        raise ValueError(f"{path}: expected the trace of a run like this one:{lines}\nUse another folder.")
