"""The command `nf-jax calibrate`. No logic here."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import tyro
from rich import progress
from rich.console import Console

from nf_jax import calibrate, calibrate_report, lab
from nf_jax.arguments import check_writable, find_function


@dataclasses.dataclass(frozen=True)
class Calibrate:
    """Searches the profile that sends the fewest bytes at which a job still trains as in FP32.

    JOB is MODULE:FUNCTION, a function without arguments that returns a `nf_jax.calibrate.Job`: the shapes of
    the parameters, the number of workers and of steps, the metric and how much worse it may be, a profile to
    start from, and `measure`, which trains once with a profile:

        def measure(profile, *, steps, seed, trace, report):
            ...     # aggregate_gradients(profile, ...), TraceWriter(trace, ...)
            if not report(step, held_out_loss, wire_bytes):    # several times, and after the last step
                return None
            return nf_jax.calibrate.Outcome(value, held_out_loss, wire_bytes, fp32_bytes, trips)

    It may return something else, of which the module's `calibration_job(what)` makes a Job, as
    experiments.vision:digits does.

    FP32 runs give the reference and, from their own signals, health limits; Hyperband tries short runs; the
    best run at full length with other seeds, and the cheapest whose one-sided bound on what is lost is
    within tolerance is written. If none is, nothing is written, and the exit code is 3: stay on FP32.

    What is measured is kept in a folder. The same command goes on after it was killed, to the same file.
    """

    job: tyro.conf.Positional[str]
    """MODULE:FUNCTION."""
    out: Path
    """The profile to write (TOML)."""
    folder: Path | None = None
    """What was measured, calibration.json and pareto.png; by default runs/calibrate/NAME-OF-OUT."""
    tolerance: float | None = None
    """How much worse than FP32 the metric may be, in its unit; by default what the job says."""
    date: str | None = None
    """Day to write into the profile; by default when the calibration began."""
    plots: bool = True
    """Whether to draw the PNG."""
    options: tyro.conf.OmitArgPrefixes[lab.Options] = dataclasses.field(default_factory=lab.Options)
    """How thoroughly to look."""


def calibrate_job(command: Calibrate, console: Console) -> None:
    check_writable(command.out)
    job = make_job(command.job)
    if command.tolerance is not None:
        job = dataclasses.replace(job, tolerance=command.tolerance)
    folder = command.folder or Path("runs/calibrate") / command.out.stem
    columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("calibrating", total=calibrate.num_steps(job, command.options))
        found = calibrate.calibrate(
            job,
            command.options,
            folder,
            measured_by=describe_calibration(command),
            date=command.date,
            tell=lambda text, steps: shown.update(task, advance=steps, description=text),
        )
    calibrate_report.write_results(job, command.options, found, folder)
    if found.profile is not None:
        found.profile.save(command.out)
    console.print(calibrate_report.candidates_table(job, command.options, found))
    console.print(calibrate_report.limits_table(found))
    console.print(f"wrote {folder}/calibration.json", highlight=False)
    if command.plots:
        calibrate_report.plot_pareto(job, command.options, found, folder / "pareto.png")
        console.print(f"drawn: {folder}/pareto.png", highlight=False)
    if found.profile is None:
        print(f"nf-jax: {found.message}", file=sys.stderr)
        sys.exit(3)
    console.print(f"wrote {command.out}: {found.message}", highlight=False)


def describe_calibration(command: Calibrate) -> str:
    """The command without what has no part in what it finds."""
    text = f"nf-jax calibrate {command.job}"
    if command.tolerance is not None:
        text += f" --tolerance {command.tolerance}"
    default = lab.Options()
    for name, value in dataclasses.asdict(command.options).items():
        if value != getattr(default, name):
            words = map(str, value) if isinstance(value, tuple) else [str(value)]
            flag = name.replace("_", "-")
            text += f" --no-{flag}" if value is False else f" --{flag} {' '.join(words)}"
    return text


def make_job(spec: str) -> calibrate.Job:
    """What the user's function returns, as a job."""
    module, function = find_function(spec, "JOB")
    try:
        made = function()
        return made if isinstance(made, calibrate.Job) else module.calibration_job(made)
    except Exception as error:  # whatever the user's function raises
        text = "expected MODULE:FUNCTION that returns a nf_jax.calibrate.Job, cannot call it"
        raise ValueError(f"JOB {spec}: {text}: {error}") from error
