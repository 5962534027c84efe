"""The command `nf-jax`: looks at profiles and runs. No logic here."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union

import jax
import tyro
from rich import progress
from rich.console import Console

from nf_jax import cluster, costs_report, replay_report, report, shadow_findings, shadow_report, substrate
from nf_jax.arguments import check_writable, find_function
from nf_jax.calibrate_command import Calibrate, calibrate_job
from nf_jax.columns import read_columns
from nf_jax.endpoint import Endpoint
from nf_jax.plan import model_shapes, plan
from nf_jax.profile import Profile
from nf_jax.replan import profile_of
from nf_jax.sensitivity import Thresholds
from nf_jax.stages import Substrate
from nf_jax.sweep import Case, Point, co_design, default_values, make_case, replay_case, what_if
from nf_jax.trace import read_trace

Positional = tyro.conf.Positional


@dataclasses.dataclass(frozen=True)
class Inspect:
    """What a profile does to a model: regions, buckets, lanes, routes and exact bytes per worker."""

    profile: Positional[Path]
    """A profile (TOML)."""
    workers: Annotated[int, tyro.conf.arg(aliases=["-w"])] = 8
    """Size of the data-parallel axis."""
    substrate: Path | None = None
    """What `nf-jax probe` wrote: adds predicted times, and keeps in FP32 what does not pay."""
    params: str | None = None
    """MODULE:FUNCTION that returns the parameters or their shapes; without it, the profile's."""


@dataclasses.dataclass(frozen=True)
class Validate:
    """Checks profiles; says what is wrong where."""

    profiles: Positional[tuple[Path, ...]]
    """Profiles (TOML)."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """Measures packing, counting and every route between the workers at hand; takes under two minutes.

    On one machine: nf-jax probe --out substrate.toml. Over several: the same command on all of them, with
    --distributed (SLURM, Open MPI, Kubernetes, TPU pods) or --coordinator HOST:PORT --num-processes N
    --process-id I. Give the file to aggregate_gradients(..., substrate=nf_jax.Substrate.load(...)).
    """

    out: Path
    """The file to write (TOML); a plot of what was measured and fitted goes beside it, as PNG."""
    devices: int = 8
    """Workers in all processes together; on cpu, virtual devices."""
    link: str | None = None
    """What links the workers, in words, kept in the file."""
    sizes_bytes: tuple[int, ...] = substrate.SIZES_BYTES
    """Sizes to measure, in FP32 bytes of a lane: at least four, ascending."""
    plots: bool = True
    """Whether to draw the PNG."""
    cluster: tyro.conf.OmitArgPrefixes[cluster.Cluster] = dataclasses.field(default_factory=cluster.Cluster)
    """The processes of the run."""


@dataclasses.dataclass(frozen=True)
class Report:
    """A run folder as a table, with a PNG beside every trace; of a shadow run, what is safe to admit."""

    run: Positional[Path]
    """A folder with trace.jsonl or shadow.jsonl files in it or below, or one trace."""
    plots: bool = True
    """Whether to draw the PNGs."""
    substrate: Path | None = None
    """Shadow runs: what `nf-jax probe` wrote between these workers; adds predicted milliseconds."""
    write_profile: Path | None = None
    """Shadow runs: write a profile (TOML) that admits what is safe, after a warm-up in FP32."""
    thresholds: tyro.conf.OmitArgPrefixes[Thresholds] = dataclasses.field(default_factory=Thresholds)
    """Shadow runs: what safe means."""


@dataclasses.dataclass(frozen=True)
class Replay:
    """Runs the controller over a recorded trace again, against a reducer that was measured or imagined.

    Without options it checks that the run decides again as it did. With --substrate (from nf-jax probe,
    between as many workers) lanes are admitted by predicted seconds. With --endpoint, low-bit lanes go to an
    endpoint reducer (a parameter-server node, a switch, a unit beside memory), and its load takes lanes back
    to FP32. Such a file holds, say,

        link_bytes_per_second = 1.25e9
        vote_elements_per_second = 8e9
        slots = 512

    and leaves the rest to the defaults: ingress_bytes_per_second, egress_bytes_per_second (of all workers),
    fp32_elements_per_second (without it FP32 lanes go by a ring between workers), slot_bytes, count_bits,
    round_trip_seconds, queue_bytes, background_load (0 to 1), name.
    """

    trace: Positional[Path]
    """A trace.jsonl, from the run's first step on; one that was cut off is replayed up to its last step."""
    substrate: Path | None = None
    """What `nf-jax probe` wrote."""
    endpoint: Path | None = None
    """An endpoint reducer (TOML)."""
    compute_seconds: float | None = None
    """What a step takes beside averaging; by default the trace's median step, less predicted averaging."""
    what_if: bool = False
    """Replay also with other links, workers, endpoints and buckets; with --out, draws the frontier."""
    out: Path | None = None
    """A folder for steps.csv (a line per step), summary.json and what-if.png."""
    write_profile: Path | None = None
    """Write the profile anew (TOML), with the smallest lane and the bucket cap that pay here."""


def main() -> None:
    """Entry point of `nf-jax`; exits with 1 on a user error, with one line that says what to do."""
    choices = tuple(
        Annotated[kind, tyro.conf.subcommand(name, prefix_name=False, description=_summary(name, kind))]
        for name, (kind, _) in COMMANDS.items()
    )
    any_command: Any = Union[choices]  # noqa: UP007 made of what is in the table
    command = tyro.cli(
        any_command,
        prog="nf-jax",
        description="Looks at profiles, workers and runs. `nf-jax COMMAND --help` tells more.",
    )
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=200)  # a file or a pipe has no edge to cut tables at
    try:
        dict(COMMANDS.values())[type(command)](command, console)
    except (ValueError, OSError) as error:
        print(f"nf-jax: {error}", file=sys.stderr)
        sys.exit(1)


def _summary(name: str, kind: type) -> str | None:
    """A command's first sentence, for the list of all; None (all of its text) where it is asked for."""
    return None if name in sys.argv[1:2] else (kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def inspect(command: Inspect, console: Console) -> None:
    profile = Profile.load(command.profile)
    measured = None if command.substrate is None else Substrate.load(command.substrate)
    if measured is not None:
        measured.check_workers(command.workers)
    try:
        params = _shapes_of(profile) if command.params is None else _call(command.params)
        planned = plan(profile, params, command.workers, substrate=measured)
    except ValueError as error:
        raise ValueError(f"{command.profile}: {error}") from None
    for table in report.plan_tables(profile, planned):
        console.print(table)
    if measured is not None:
        console.print(costs_report.seconds_table(profile, planned, measured))


def validate(command: Validate, console: Console) -> None:
    if not command.profiles:
        raise ValueError("validate: expected at least one profile, for example profiles/digits-mlp.toml")
    errors = []
    for path in command.profiles:
        try:
            profile = Profile.load(path)
        except ValueError as error:
            errors.append(str(error))
        else:
            console.print(f"{path}: good; {len(profile.regions)} regions, {len(profile.phases)} phases")
    if errors:
        raise ValueError("\n".join(errors))


def probe(command: Probe, console: Console) -> None:
    if command.devices < 1:
        raise ValueError(f"devices: expected at least 1, got {command.devices}")
    check_writable(command.out)
    columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
    with cluster.joined(command.cluster, command.devices):
        first = cluster.is_first()
        with progress.Progress(*columns, console=console, transient=True, disable=not first) as shown:
            task = shown.add_task("compiling", total=substrate.num_points(command.sizes_bytes))
            measured = substrate.probe(
                link=command.link,
                measured_by="nf-jax probe",
                sizes_bytes=command.sizes_bytes,
                tell=lambda text: shown.update(task, advance=1, description=text),
            )
        if first:
            measured.save(command.out)
            console.print(costs_report.substrate_table(measured))
            if command.plots:
                costs_report.plot_substrate(measured, command.out.with_suffix(".png"))


def replay_run(command: Replay, console: Console) -> None:
    asks = command.what_if or command.write_profile is not None
    if asks and command.substrate is None and command.endpoint is None:
        raise ValueError(
            "--what-if, --write-profile: expected --substrate or --endpoint with them, got neither, so that "
            "nothing would take time"
        )
    for path in (command.write_profile, command.out and command.out / "summary.json"):
        check_writable(path)
    case = make_case(
        read_columns(command.trace),
        None if command.substrate is None else Substrate.load(command.substrate),
        None if command.endpoint is None else Endpoint.load(command.endpoint),
        command.compute_seconds,
    )
    found = replay_case(case)
    console.print(replay_report.replay_table(str(command.trace), found))
    console.print(report.describe(replay_report.explain(found)), highlight=False)
    if command.out is not None:
        replay_report.write_replay(found, command.out)
        console.print(f"wrote {command.out}/steps.csv and summary.json", highlight=False)
    sweeps = sweep_all(case, console) if command.what_if or command.write_profile else {}
    if command.what_if:
        console.print(replay_report.sweep_table(sweeps))
    if command.what_if and command.out is not None:
        replay_report.plot_sweeps(sweeps, case, command.out / "what-if.png")
        console.print(f"drawn: {command.out}/what-if.png", highlight=False)
    if command.write_profile is not None:
        fitted = co_design(case, sweeps.get("cap", ()))
        fitted.save(command.write_profile)
        changes = replay_report.describe_design(profile_of(case.columns), fitted, case.columns)
        console.print(f"wrote {command.write_profile}: {changes}", highlight=False)


def sweep_all(case: Case, console: Console) -> dict[str, list[Point]]:
    columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("replaying", total=sum(map(len, default_values(case).values())))
        return what_if(case, tell=lambda text: shown.update(task, advance=1, description=text))


def report_run(command: Report, console: Console) -> None:
    check_writable(command.write_profile)
    traces, shadows = report.find_traces(command.run), report.find_shadows(command.run)
    if command.write_profile is not None and len(shadows) != 1:
        raise ValueError(f"--write-profile: expected one shadow trace in {command.run}, found {len(shadows)}")
    if traces:
        console.print(report.run_table(command.run))
    for path in traces:
        trace = read_trace(path)
        console.print(f"{path}:\n{report.describe(report.explain(trace))}", highlight=False)
        if command.plots and trace.steps:
            report.plot_trace(trace, _picture_of(path), path.parent.name)
            console.print(f"  drawn: {_picture_of(path)}", highlight=False)
    for path in shadows:
        _report_shadow(command, path, console)


def _report_shadow(command: Report, path: Path, console: Console) -> None:
    measured = None if command.substrate is None else Substrate.load(command.substrate)
    found = shadow_findings.find_out(path, command.thresholds, measured)
    console.print(shadow_report.leaves_table(found))
    console.print(shadow_report.parts_table(found))
    console.print(f"{path}:\n  {shadow_findings.sentence(found)}", highlight=False, soft_wrap=True)
    if command.plots and any(found.trace.leaves.lossy):
        shadow_report.plot_shadow(found, _picture_of(path), path.parent.name)
        console.print(f"  drawn: {_picture_of(path)}", highlight=False)
    if command.write_profile is not None:
        found.profile.save(command.write_profile)
        console.print(f"  wrote {command.write_profile}", highlight=False)


def _picture_of(path: Path) -> Path:
    picture = path.with_suffix(".png")
    if picture.is_symlink():
        raise ValueError(f"{picture}: expected no link: it would be written to where that points")
    return picture


def _shapes_of(profile: Profile) -> Any:
    if profile.model is None:
        raise ValueError(
            f"profile {profile.name!r} has no [model]; say which parameters to plan for: "
            "--params MODULE:FUNCTION, a function without arguments that returns them or their shapes"
        )
    return model_shapes(profile.model)


def _call(spec: str) -> Any:
    _, function = find_function(spec, "--params")
    try:
        return jax.eval_shape(function)
    except Exception as error:  # whatever the user's function raises
        raise ValueError(f"--params {spec}: expected MODULE:FUNCTION, cannot call it: {error}") from error


COMMANDS: dict[str, tuple[type, Callable[[Any, Console], None]]] = {
    "inspect": (Inspect, inspect),
    "validate": (Validate, validate),
    "probe": (Probe, probe),
    "report": (Report, report_run),
    "replay": (Replay, replay_run),
    "calibrate": (Calibrate, calibrate_job),
}

if __name__ == "__main__":
    main()
