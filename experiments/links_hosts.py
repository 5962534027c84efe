"""The link benchmark's workers, as its parent sees them: one on every host, asked all at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import rich

from experiments import testbed

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
ANSWER_SECONDS = 900.0


def runtime_of(arm: str) -> str:
    """Which worker runs an arm: jax or torch."""
    return "torch" if arm.startswith("torch-") else "jax"


class Workers:
    """The workers of one library, one on every host, asked all at once."""

    def __init__(
        self, bed: testbed.Testbed, runtime: str, python: Path, devices: int, keep_memory: bool
    ) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(bed.hosts)
        self._logs: list[IO[str]] = [tempfile.TemporaryFile("w+") for _ in range(bed.hosts)]  # noqa: SIM115, closed in close()
        env = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        env["NF_JAX_DEVICES_PER_HOST"] = str(devices)
        if keep_memory:
            env |= {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
        if runtime == "torch":
            env["OMP_NUM_THREADS"] = "1"  # as torchrun sets it where several processes share a machine
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
        argv = [str(python), "-m", f"experiments.links_{runtime}"]
        self._processes = [
            bed.popen(host, argv, env, stderr=self._logs[host], **pipes) for host in range(bed.hosts)
        ]
        self._read()

    def ask(self, **message: Any) -> list[dict[str, Any]]:
        """Every host's answer, in order."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # it has ended; reading says why
                stdin = cast(IO[str], process.stdin)
                stdin.write(json.dumps(message) + "\n")
                stdin.flush()
        return self._read()

    def _read(self) -> list[dict[str, Any]]:
        waiting = [self._pool.submit(self._read_one, host) for host in range(len(self._processes))]
        done, late = concurrent.futures.wait(waiting, ANSWER_SECONDS, concurrent.futures.FIRST_EXCEPTION)
        for future in done:
            future.result()
        if late:
            raise RuntimeError(f"links: {len(late)} worker(s) gave no answer in {ANSWER_SECONDS:g} s")
        return [future.result() for future in waiting]

    def _read_one(self, host: int) -> dict[str, Any]:
        process = self._processes[host]
        assert process.stdout
        if line := process.stdout.readline():
            return json.loads(line)
        process.wait()
        self._logs[host].seek(0)
        tail = "".join(self._logs[host].readlines()[-25:])
        raise RuntimeError(f"links: the worker on host {host} ended with {process.returncode}:\n{tail}")

    def close(self, patience_seconds: float) -> None:
        """Lets the workers end; whoever does not in time is ended with the testbed."""
        deadline = time.monotonic() + patience_seconds
        for process in self._processes:
            with contextlib.suppress(OSError):
                cast(IO[str], process.stdin).close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0))
                cast(IO[str], process.stdout).close()
        for log in self._logs:
            log.close()
        self._pool.shutdown(wait=False)


@contextlib.contextmanager
def start_workers(
    bed: testbed.Testbed, pythons: dict[str, Path], *, devices: int, keep_memory: bool
) -> Iterator[dict[str, Workers]]:
    """Workers by runtime, from the Python to run each with; see `links.Config`."""
    workers: dict[str, Workers] = {}
    patience_seconds = 0.0
    try:
        for runtime, python in pythons.items():
            workers[runtime] = Workers(bed, runtime, python, devices, keep_memory)
        yield workers
        patience_seconds = 10.0
    finally:
        for group in workers.values():
            group.close(patience_seconds)


def find_pythons(arms: Sequence[str], torch_venv: Path) -> dict[str, Path]:
    """The Python of every runtime that the arms need; installs PyTorch if it is not there yet."""
    runtimes = {runtime_of(arm) for arm in arms}
    pythons = {"jax": Path(sys.executable)} if "jax" in runtimes else {}
    if "torch" in runtimes:
        pythons["torch"] = python = (torch_venv / "bin" / "python").absolute()
        probe = [python, "-c", f"import torch; assert torch.__version__.split('+')[0] == {TORCH[7:]!r}"]
        if not python.exists() or subprocess.run(probe, capture_output=True).returncode:
            rich.print(f"installing {TORCH} into {torch_venv}: once, about 1 GB or more")
            subprocess.run([sys.executable, "-m", "venv", torch_venv], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", TORCH, "numpy"], check=True)
    return pythons
