"""Aggregation over real links: `lax.pmean`, nf_jax's routes and PyTorch's DDP, side by side on a testbed.

    python -m experiments.links
    python -m experiments.links --arms pmean sign-majority --rates 1gbit --hosts 2 --shapes 16MiB --out runs/l

For every number of hosts: makes the testbed (see `experiments.testbed`: root and iproute2), starts one JAX
and one PyTorch worker on every host, and changes the links' rate while they run. Within a cell (hosts, rate,
shapes) all arms take turns, `--rounds` times, so that a slow minute of the machine hits all alike. A step
is "local gradients in, means out", timed after a barrier until the slowest host is done; bytes are those that
left the interface, the largest of all hosts.

PyTorch is installed on first use, as torch==2.13.0, into a virtual environment of its own (`--torch-venv`,
about 1 GB where pip finds a build for CPUs, else several). Without `torch-` arms it is not needed.

`auto` is what the controller chooses of FP32 and SIGN majority, given a substrate that is probed at every
rate first (`nf_jax.substrate`: about a minute) and kept as substrate-<hosts>-<rate>.toml under `--out`.

Writes README.md, summary.json (a row per arm and cell) and links-<hosts>.png under `--out`.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro
from rich import progress

from experiments import links_report, testbed
from experiments.links_hosts import ROOT, Workers, find_pythons, runtime_of, start_workers
from experiments.links_worker import SHAPES, gradient_bytes
from nf_jax.substrate import SIZES_BYTES

WARMUP_STEPS = 4  # DDP forms its buckets anew after the first, PowerSGD compresses from the third on

# =============================================================================================== arms


class ArmKind(NamedTuple):
    """Attributes: label: for people; least_cosine: of its mean with the exact one, or it averages wrongly."""

    label: str
    least_cosine: float


ARMS: dict[str, ArmKind] = {
    "pmean": ArmKind("f32 pmean", 0.9999),
    "fp32": ArmKind("FP32", 0.9999),
    "sign-count": ArmKind("SIGN count", 0.5),
    "sign-majority": ArmKind("SIGN majority", 0.3),
    "sign-majority-pinned": ArmKind("SIGN majority, pinned", 0.3),
    "ternary": ArmKind("TERNARY", 0.3),
    "bf16": ArmKind("BF16", 0.999),
    "auto": ArmKind("auto", 0.3),
    "torch-plain": ArmKind("DDP", 0.9999),
    "torch-fp16": ArmKind("DDP, fp16 hook", 0.999),
    "torch-powersgd-1": ArmKind("DDP, PowerSGD rank 1", 0.005),
    "torch-powersgd-4": ArmKind("DDP, PowerSGD rank 4", 0.01),
    "torch-1bit-adam-port": ArmKind("1-bit Adam (port)", 0.3),
}


# ============================================================================================= config


@dataclasses.dataclass(frozen=True)
class Config:
    """Which cells to measure, and where to write."""

    arms: tuple[str, ...] = tuple(ARMS)
    """How gradients are averaged; the first is the baseline of ratios."""
    rates: tuple[str, ...] = ("none", "10gbit", "1gbit", "200mbit", "100mbit")
    """Of every link, both ways."""
    hosts: tuple[int, ...] = (2, 4)
    """Numbers of hosts."""
    shapes: tuple[str, ...] = ("16MiB", "resnet18", "bert6")
    """Whose gradient."""
    out: Path | None = None
    """Folder for README.md, summary.json and plots; experiments/results/<date>-links by default."""
    rounds: int = 5
    """Turns of every arm in a cell; a turn counts up to 20 steps, fewer where steps are slow."""
    devices: int = 1
    """Devices of every host, for JAX; nf_jax's arms then average exactly inside a host and route between."""
    keep_memory: bool = False
    """Tell glibc in all workers to keep what is freed. Else an array or XLA buffer above 32 MiB is mapped
    anew at every step, and its page faults are in the step's time."""
    probe_sizes_bytes: tuple[int, ...] = SIZES_BYTES
    """Sizes at which a substrate is probed, for `auto`."""
    torch_venv: Path = Path("runs/links-torch-venv")
    """Virtual environment for PyTorch; made if it is not there."""

    def __post_init__(self) -> None:
        for name, known in {"arms": ARMS, "shapes": SHAPES}.items():
            if unknown := [value for value in getattr(self, name) if value not in known]:
                raise ValueError(f"{name}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
        for rate in self.rates:
            testbed.bits_per_second(rate)
        for name in ("arms", "rates", "hosts", "shapes"):
            if not (values := getattr(self, name)) or len(set(values)) != len(values):
                raise ValueError(f"{name}: expected at least one and no repeats, got {values}")
        if min(self.hosts) < 2:
            raise ValueError(f"hosts: expected at least 2 each, got {self.hosts}")
        for name in ("rounds", "devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.devices > 1 and any(runtime_of(arm) == "torch" for arm in self.arms):
            raise ValueError("devices: PyTorch's arms have one device per host; choose other --arms")


# ============================================================================================== cells

Turn = tuple[list[float], list[float]]
"""Seconds of every counted step, of the slowest host; bytes per step of every host."""


def make_batches(arms: Sequence[str], hosts: int, shapes: str, memory_bytes: int) -> list[list[str]]:
    """Arms that fit into memory together; where not all do, every batch has the baseline.

    Measured: an arm keeps 1 to 2 gradients (residuals, buckets), JAX's worker 6 and PyTorch's 4 more at work.
    """
    gradient = gradient_bytes(shapes) * hosts
    room = max(int((0.8 * memory_bytes - 12 * gradient) / (1.6 * gradient)), 2)
    if len(arms) <= room:
        return [list(arms)]
    rest = arms[1:]
    return [[arms[0], *rest[i : i + room - 1]] for i in range(0, len(rest), room - 1)]


def measure_batch(
    bed: testbed.Testbed,
    workers: dict[str, Workers],
    arms: Sequence[str],
    shapes: str,
    config: Config,
    out: Path,
    shown: progress.Progress,
) -> dict[tuple[str, str], list[Turn]]:
    """All turns by (rate, arm)."""
    task = shown.task_ids[0]

    def bar(text: str) -> None:
        shown.update(task, advance=1, description=f"{bed.hosts} hosts, {shapes}, {text}")

    def prepare(arm: str, **more: Any) -> None:
        asked = {"do": "prepare", "arm": arm, "shapes": shapes, "steps": WARMUP_STEPS, **more}
        check_prepared(arm, workers[runtime_of(arm)].ask(**asked))

    bed.set_rate("none")
    for arm in arms:
        bar(f"preparing {arm}")
        if arm != "auto":
            prepare(arm)
    turns: dict[tuple[str, str], list[Turn]] = {}
    for rate in config.rates:
        bed.set_rate(rate)
        if "auto" in arms:
            shown.update(task, description=f"{bed.hosts} hosts, {rate}: probing")
            prepare("auto", substrate=find_substrate(workers["jax"], bed.hosts, rate, out, config))
        plans = {}
        for number in range(config.rounds + 1):
            # In another order each time: what an arm leaves in TCP's buffers meets different ones.
            for arm in random.Random(number).sample(arms, len(arms)):
                bar(f"{rate}: {arm}")
                plan = plans.get(arm, {"uncounted": 0, "counted": 1})
                answers = workers[runtime_of(arm)].ask(do="turn", arm=arm, **plan)
                seconds = [max(steps) for steps in zip(*(a["seconds"] for a in answers), strict=True)]
                if number:
                    sent = [answer["tx_bytes"] / plan["counted"] for answer in answers]
                    turns.setdefault((rate, arm), []).append((seconds, sent))
                else:  # after a change of rate TCP adapts: this turn only says how long steps take
                    plans[arm] = plan_turn(seconds[0])
        medians = {arm: statistics.median(s for turn in turns[rate, arm] for s in turn[0]) for arm in arms}
        texts = (f"{ARMS[arm].label} {1e3 * median:.4g} ms" for arm, median in medians.items())
        shown.console.print(f"{bed.hosts} hosts, {shapes}, {rate}: {'; '.join(texts)}")
    for group in workers.values():
        group.ask(do="drop")
    return turns


def substrate_path(out: Path, hosts: int, rate: str) -> Path:
    """Where a cell's substrate is kept."""
    return out / f"substrate-{hosts}-{rate}.toml"


def find_substrate(workers: Workers, hosts: int, rate: str, out: Path, config: Config) -> str:
    """The substrate of these hosts at this rate, probed unless it has been."""
    path = substrate_path(out, hosts, rate)
    if not path.exists():
        answers = workers.ask(do="probe", link=rate, sizes_bytes=config.probe_sizes_bytes)
        path.write_text(answers[0]["substrate"])
    return path.read_text()


def plan_turn(step_seconds: float) -> dict[str, int]:
    """Steps of a turn: about a second's worth, 1 to 20; the first after a pause counts only where slow."""
    counted = min(max(round(1 / step_seconds), 1), 20)
    return {"uncounted": int(step_seconds < 2), "counted": counted}


def check_prepared(arm: str, answers: Sequence[dict[str, Any]]) -> None:
    """Raises unless every host's mean agrees with the exact one as well as the arm's kind allows."""
    least = min(answer["cosine"] for answer in answers)
    if not least >= ARMS[arm].least_cosine:
        raise RuntimeError(
            f"links: {arm} does not average: cosine {least:.4f} with the exact mean, expected at least "
            f"{ARMS[arm].least_cosine}; it did {answers[0]['did']}"
        )


def make_row(arm: str, hosts: int, rate: str, shapes: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """A row of summary.json; seconds, bytes: of turns the median, so that no single retransmission counts."""
    seconds = [second for steps, _ in turns for second in steps]
    by_host = zip(*(sent for _, sent in turns), strict=True)
    return {
        "arm": arm,
        "hosts": hosts,
        "rate": rate,
        "shapes": shapes,
        "gradient_bytes": gradient_bytes(shapes),
        "step_seconds_median": statistics.median(seconds),
        "step_seconds_min": min(seconds),
        "step_seconds_max": max(seconds),
        "tx_bytes_per_step": round(max(statistics.median(sent) for sent in by_host)),
    }


# =============================================================================================== main


def run(config: Config) -> list[dict[str, Any]]:
    """Measures all cells and writes what came of it."""
    out = config.out or ROOT / "experiments" / "results" / f"{datetime.date.today()}-links"
    pythons = find_pythons(config.arms, config.torch_venv)
    rows = measure(config, out, pythons)
    labels = {arm: ARMS[arm].label for arm in config.arms}
    links_report.write(out, rows, labels, command=shlex.join(sys.orig_argv[1:]), machine=describe(pythons))
    return rows


def measure(config: Config, out: Path, pythons: dict[str, Path]) -> list[dict[str, Any]]:
    """The rows of all cells; writes summary.json after each number of hosts and shapes."""
    if reason := testbed.why_unavailable():
        raise ValueError(reason)
    out.mkdir(parents=True, exist_ok=True)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    batches = {
        (hosts, shapes): make_batches(config.arms, hosts, shapes, memory_bytes)
        for hosts in config.hosts
        for shapes in config.shapes
    }
    num_turns = 1 + len(config.rates) * (config.rounds + 1)
    rows: list[dict[str, Any]] = []
    columns = (*progress.Progress.get_default_columns(), progress.TimeElapsedColumn())
    with progress.Progress(*columns, transient=True) as shown:
        total = sum(len(batch) for cell in batches.values() for batch in cell) * num_turns
        shown.add_task("links", total=total)
        for hosts in config.hosts:
            with (
                testbed.open_testbed(hosts) as bed,
                start_workers(
                    bed, pythons, devices=config.devices, keep_memory=config.keep_memory
                ) as workers,
            ):
                for shapes in config.shapes:
                    turns: dict[tuple[str, str], Any] = {}
                    for batch in batches[hosts, shapes]:
                        for key, more in measure_batch(
                            bed, workers, batch, shapes, config, out, shown
                        ).items():
                            turns[key] = turns.get(key, []) + more
                    rows += [
                        make_row(arm, hosts, rate, shapes, turns[rate, arm])
                        for rate in config.rates
                        for arm in config.arms
                    ]
                    (out / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def describe(pythons: dict[str, Path]) -> str:
    """Machine and versions, in one line."""
    models = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        f"{os.cpu_count()} cores of {models[0].split(':')[1].strip() if models else platform.machine()}",
        f"{memory:.0f} GiB, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}",
    ]
    for name, python in pythons.items():
        script = f"import importlib.metadata as m; print(m.version({name!r}))"
        shown = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout
        parts.append(f"{name} {shown.strip()}")
    return ", ".join(parts)


def main(args: Sequence[str] | None = None) -> None:
    testbed.end_on_signals()
    try:
        run(tyro.cli(Config, prog="experiments.links", description=__doc__, args=args))
    except (ValueError, RuntimeError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
