"""Which reducer, which buckets, which routes? A digits run is recorded, its mesh probed, the run replayed.

    python -m experiments.reducer_replay                 # about 3 minutes on 2 cores
    python -m experiments.reducer_replay --benchmark     # and times a trace of 100,000 steps x 50 lanes

1. Trains the digits MLP for a short while with the guided profile and keeps its trace (experiments.vision).
2. Probes the mesh of virtual CPU devices (nf_jax.substrate).
3. Replays the trace: as it was (every decision has to be the recorded one), on the substrate, and against
   an endpoint reducer; then sweeps link, workers, the endpoint's rates, slots, counters and the bucket cap.
4. Writes the profile that fits, README.md, summary.json, what-if.png and steps.csv under `--out`.

Expected: no decision differs; in one process collectives are cheap and packing is not, so low-bit gains
little or nothing on the substrate as probed, and several times beside links of 1 Gbit/s or less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich
import tyro
from rich import progress
from rich.table import Table

from experiments import jobs, vision
from nf_jax import replay_report, substrate
from nf_jax.columns import read_columns
from nf_jax.endpoint import Endpoint
from nf_jax.profile import Phase, Profile, Region, Route
from nf_jax.replay import replay
from nf_jax.stages import Substrate
from nf_jax.sweep import Case, Point, co_design, default_values, make_case, replay_case, what_if
from nf_jax.telemetry import Lanes, Reason, Signals, StepInfo
from nf_jax.trace import TraceWriter

# ================================================================================================ config

ENDPOINT = Endpoint(
    name="a sign counter beside 1 Gbit/s links",
    ingress_bytes_per_second=1.25e9,
    egress_bytes_per_second=1.25e9,
    link_bytes_per_second=1.25e8,
    vote_elements_per_second=8e9,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything the experiment depends on; every field is a flag."""

    out: Path = Path("runs/reducer-replay")
    """Folder for all results."""
    steps: int = 120
    """Steps of the recorded run."""
    devices: int = 4
    """Workers, as virtual CPU devices."""
    endpoint: Path | None = None
    """An endpoint reducer (TOML); by default one that counts signs beside links of 1 Gbit/s."""
    substrate: Path | None = None
    """What `nf-jax probe` wrote for as many workers; by default this mesh is probed."""
    benchmark: bool = False
    """Also time the reading and replaying of a trace of 100,000 steps x 50 lanes."""


# ================================================================================================= steps


def record(config: Config) -> Path:
    """A short guided run on the digits; returns its trace."""
    job = dataclasses.replace(
        vision.digits(),
        out=config.out / "run",
        steps=config.steps,
        devices=config.devices,
        policies=("guided",),
        seeds=(0,),
    )
    jobs.run_job(job, vision.TASKS[job.task](job))
    return job.out / "guided-0" / "trace.jsonl"


@contextlib.contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[str], None]]:
    columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
    with progress.Progress(*columns, transient=True) as shown:
        task = shown.add_task(title, total=total)
        yield lambda text: shown.update(task, advance=1, description=text)


def measure(config: Config) -> Substrate:
    """The substrate of this mesh, or the one that was given; kept beside the results."""
    if config.substrate is not None:
        measured = Substrate.load(config.substrate)
    else:
        with progress_bar("probing", substrate.num_points()) as tell:
            measured = substrate.probe(measured_by="experiments.reducer_replay", tell=tell)
    measured.save(config.out / "substrate.toml")
    return measured


def sweep_all(case: Case) -> dict[str, list[Point]]:
    with progress_bar("replaying", sum(map(len, default_values(case).values()))) as tell:
        return what_if(case, tell)


# ============================================================================================== benchmark

NUM_STEPS, NUM_LANES, WARMUP_STEPS = 100_000, 50, 20


def write_long_trace(path: Path) -> None:
    """A trace of random signals with full mantissas, as a run writes them; every tenth lane is protected."""
    profile = Profile(
        name="long",
        regions=(Region(name="head", pattern="head.*"), Region(name="backbone", pattern=".*")),
        phases=(Phase(start_step=0, routes={"head": Route.FP32, "backbone": Route.SIGN}),),
    )
    is_head = [lane % 10 == 0 for lane in range(NUM_LANES)]
    lanes = Lanes(
        names=tuple(f"{lane}" for lane in range(NUM_LANES)),
        regions=tuple(0 if head else 1 for head in is_head),
        groups=tuple(-1 if head else lane % 4 for lane, head in enumerate(is_head)),
        fixed=tuple(Reason.PROTECTED if head else None for head in is_head),
        num_elements=(2**18,) * NUM_LANES,
        wire_bytes=((2**21, 2**20, 2**16, 2**17),) * NUM_LANES,
    )
    rng = np.random.default_rng(0)
    routes = np.asarray([Route.FP32 if head else Route.SIGN for head in is_head], np.int32)
    exact = np.zeros_like(routes)
    fixed = np.asarray([Reason.PROTECTED if head else Reason.PROFILE for head in is_head], np.int32)
    warm = np.asarray([Reason.PROTECTED if head else Reason.WARMUP for head in is_head], np.int32)
    regions = np.zeros(2, np.int32)
    plain: Any = {name: regions for name in StepInfo._fields} | {"saturated": np.asarray(False)}
    with TraceWriter(path, profile.dumps(), lanes, num_workers=8) as writer:
        for step in range(NUM_STEPS):
            is_warm = step < WARMUP_STEPS
            signals = Signals(
                loss=np.ones((), np.float32),
                has_loss=np.asarray(True),
                nonfinite=regions,
                gradient_norm=1 + rng.random(2, np.float32),
                agreement=rng.random(NUM_LANES, np.float32),
                residual_ratio=10 * rng.random(NUM_LANES, np.float32),
                reducer_load=np.full((), 0.1, np.float32),
            )
            chosen, why = (exact, warm) if is_warm else (routes, fixed)
            plain |= {"routes": chosen, "next_routes": chosen, "reasons": why, "next_reasons": why}
            info = StepInfo(**plain | {"step": np.int32(step), "signals": signals})
            writer.write(info, step_seconds=0.1)


def benchmark() -> dict[str, float]:
    """Seconds of one core to read and to replay a long trace, without and with an endpoint."""
    found: dict[str, float] = {"steps": NUM_STEPS, "lanes": NUM_LANES}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "long.jsonl"
        write_long_trace(path)
        found["megabytes"] = path.stat().st_size / 1e6
        start = time.process_time()
        columns = read_columns(path)
        found["read_seconds"] = time.process_time() - start
    for name, endpoint in (("replay_seconds", None), ("endpoint_replay_seconds", ENDPOINT)):
        start = time.process_time()
        again = replay(columns, endpoint=endpoint)
        found[name] = time.process_time() - start
        if again.first_difference is not None:
            raise RuntimeError(f"the long trace decides otherwise at step {again.first_difference}")
    return found


# =============================================================================================== results


def write_results(config: Config, found: dict[str, Any], tables: list[Table], lines: list[str]) -> None:
    (config.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    console = rich.console.Console(record=True, width=170)
    for table in tables:
        console.print(table)
    text = "\n".join(line.rstrip() for line in console.export_text().splitlines())
    (config.out / "README.md").write_text(
        "# A digits run, replayed against reducers\n\n"
        f"`python -m experiments.reducer_replay --steps {config.steps} --devices {config.devices}`\n\n"
        + "\n".join(f"- {line}" for line in lines)
        + f"\n\n```\n{text}\n```\n\n![what if](what-if.png)\n"
    )


def summarize_sweeps(sweeps: dict[str, list[Point]]) -> dict[str, list[dict[str, Any]]]:
    return {
        axis: [{"value": value, **replay_report.summarize(found)} for value, found in points]
        for axis, points in sweeps.items()
    }


# ================================================================================================== main


def main(args: list[str] | None = None) -> None:
    config = tyro.cli(Config, description=__doc__, args=args)
    config.out.mkdir(parents=True, exist_ok=True)
    columns = read_columns(record(config))
    measured = measure(config)
    endpoint = ENDPOINT if config.endpoint is None else Endpoint.load(config.endpoint)
    endpoint.save(config.out / "endpoint.toml")

    case = make_case(columns, measured, endpoint)
    replays = {
        "as recorded": replay(columns),
        "on the substrate": replay(columns, substrate=measured),
        "endpoint": replay_case(case),
    }
    sweeps = sweep_all(case)
    designed = co_design(case, sweeps["cap"])
    designed.save(config.out / "profile.toml")
    replay_report.write_replay(replays["endpoint"], config.out)
    replay_report.plot_sweeps(sweeps, case, config.out / "what-if.png")

    before = Profile.loads(columns.header["profile"])
    lines = [f"{name}: {replay_report.explain(found)[0]}" for name, found in replays.items()]
    lines.append(f"profile.toml: {replay_report.describe_design(before, designed, columns)}")
    summary: dict[str, Any] = {name: replay_report.summarize(found) for name, found in replays.items()}
    summary |= {"what_if": summarize_sweeps(sweeps), "jax": jax.__version__}
    if config.benchmark:
        summary["benchmark"] = timed = benchmark()
        lines.append(
            f"a trace of {NUM_STEPS:,} steps x {NUM_LANES} lanes: read in {timed['read_seconds']:.1f} s, "
            f"replayed in {timed['replay_seconds']:.1f} s, with an endpoint in "
            f"{timed['endpoint_replay_seconds']:.1f} s of CPU time"
        )
    tables = [replay_report.replay_table(name, found) for name, found in replays.items()]
    write_results(config, summary, [*tables, replay_report.sweep_table(sweeps)], lines)
    rich.print("\n".join(lines))
    rich.print(f"Wrote {config.out}/README.md, summary.json, what-if.png, steps.csv and TOML files.")


if __name__ == "__main__":
    main()
