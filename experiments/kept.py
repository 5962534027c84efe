"""What a job leaves in its folder, per run, and what a later one may keep of it.

<policy>-<seed>/trace.jsonl    every step; nf_jax.resume
<policy>-<seed>/checkpoints    while the run is not whole
<policy>-<seed>/run.json       when it is
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import zlib
from pathlib import Path
from typing import Any, NamedTuple, get_args

from experiments.config import Config, Policy
from experiments.policies import PROFILES
from nf_jax import checkpoint, cluster, processes, trace


class Run(NamedTuple):
    """What one run left: its row of summary.json, and a record per step."""

    row: dict[str, Any]
    steps: list[dict[str, Any]]


def shared_facts(config: Config) -> dict[str, str]:
    """All of the config that processes must share: not who each of them is, and where it lies."""
    own = ("cluster", "profile", "out", "substrate", "data", "resume", "checkpoint_every")
    return {f.name: str(getattr(config, f.name)) for f in dataclasses.fields(config) if f.name not in own}


def run_facts(config: Config, policy: Policy) -> dict[str, str]:
    """All of the config that a single run depends on."""
    facts = {n: v for n, v in shared_facts(config).items() if n not in ("policies", "seeds")}
    if policy in PROFILES:
        facts["profile_crc32"] = f"{zlib.crc32(PROFILES[policy](config).dumps().encode()):08x}"
    return facts


def run_folder(config: Config, header: dict[str, Any]) -> Path:
    return config.out / f"{header['policy']}-{header['seed']}"


def open_folder(config: Config) -> Config:
    """Makes `out` ready for a job, on all its processes; checkpoints are only where all of them see them.

    Returns:
      The config, without checkpoints where every process has an `out` of its own.

    Raises:
      ValueError: such a job is to be resumed, or processes would go on from different things.
    """
    processes.check_same(resume=str(config.resume), checkpoint_every=str(config.checkpoint_every))
    is_shared = processes.is_shared(config.out)  # first: a network file system remembers what was not there
    if not config.resume:
        remove(config)  # on every host: none may go on from what an earlier job left on its disk
    if is_shared:  # and all wait here until the last has removed what it saw
        processes.check_same(kept=describe_resumed(config) if config.resume else "")
        return config
    if config.resume:
        raise ValueError(
            f"resume: expected --out on a file system that all processes share, got {config.out}, where "
            "each sees other files. Choose a shared folder, or start anew without --resume."
        )
    return dataclasses.replace(config, checkpoint_every=0)


def keep(config: Config, run: Run) -> None:
    """Writes what `--resume` reads, under its name only when it is whole; its checkpoints are done with."""
    if not cluster.is_first():
        return
    path = run_folder(config, run.row) / "run.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(run._asdict()))
    partial.replace(path)
    shutil.rmtree(path.parent / "checkpoints", ignore_errors=True)


def remove(config: Config) -> None:
    """Deletes all that earlier jobs left in `out`, so that no folder mixes two."""
    for name in ("summary.json", "curves.png"):
        (config.out / name).unlink(missing_ok=True)
    for policy in get_args(Policy):
        for folder in config.out.glob(f"{policy}-*"):
            for name in ("trace.jsonl", "run.json"):
                (folder / name).unlink(missing_ok=True)
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def finished(config: Config, header: dict[str, Any]) -> Run | None:
    """A run that an earlier job has finished, where it is to be kept."""
    path = run_folder(config, header) / "run.json"
    if not config.resume or not path.exists():
        return None
    check_run(config, header)
    return Run(**json.loads(path.read_text()))


def check_resumed(config: Config) -> None:
    """Raises ValueError unless all runs that are to be kept, whole or not, are of this config."""
    if config.resume:
        for policy, seed in itertools.product(config.policies, config.seeds):
            check_run(config, {"policy": policy, "seed": seed})


def stopped_runs(config: Config) -> dict[str, int]:
    """Runs asked for that an earlier job did not finish -> the step of their last checkpoint."""
    found = {}
    for policy, seed in itertools.product(config.policies, config.seeds):
        folder = run_folder(config, {"policy": policy, "seed": seed})
        if (step := checkpoint.latest_step(folder / "checkpoints")) is not None:
            found[f"{policy}, seed {seed}"] = step
    return found


def describe_resumed(config: Config) -> str:
    """What a job goes on with, for people: of the runs that it is asked for."""
    parts, stopped = [], stopped_runs(config)
    for policy, seed in itertools.product(config.policies, config.seeds):
        name = f"{policy}, seed {seed}"
        if (run_folder(config, {"policy": policy, "seed": seed}) / "run.json").exists():
            parts.append(f"{name}: finished earlier")
        elif name in stopped:
            parts.append(f"{name}: goes on after step {stopped[name]}")
    return "\n".join(parts) or "Nothing to resume: every run starts anew."


def check_run(config: Config, header: dict[str, Any]) -> None:
    """Raises ValueError if there is a trace of a run of another config; its header tells."""
    path = run_folder(config, header) / "trace.jsonl"
    if not path.exists():
        return
    with trace.open_trace(path) as stream:
        there, _ = trace.read_head(stream, path)
    here = run_facts(config, header["policy"])
    if wrong := [name for name in here if there.get(name) != here[name]]:
        lines = "".join(f"\n  {name}: there {there.get(name)}, here {here[name]}" for name in wrong)
        raise ValueError(
            f"resume: expected {path} to be of a run of this config, got one of another:{lines}\n"
            "Choose another --out, or start anew without --resume."
        )
