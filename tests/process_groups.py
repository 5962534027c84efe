"""Starts the processes of a run on this machine, joined over loopback, and waits for them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 120
PAUSE_SECONDS = float(os.environ.get("NF_JAX_PAUSE_SECONDS", "2"))
"""For how long tests stop a process, or cut a link; what the README promises takes 20 s, and 10 s."""


class Ended(NamedTuple):
    """One process that ended: its exit code, what it printed, and after how many seconds."""

    code: int
    output: str
    seconds: float


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def environment(process_id: int, num_processes: int, port: int) -> dict[str, str]:
    """The variables by which a process finds the others, as a launcher would set them."""
    return os.environ | {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(num_processes),
        "JAX_PROCESS_ID": str(process_id),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def started(
    num_processes: int, *arguments: str, port: int = 0, only: Sequence[int] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Runs `python *arguments` in every process, or in some `only`; none outlives the body."""
    port = port or free_port()
    group = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environment(index, num_processes, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in (range(num_processes) if only is None else only)
    ]
    try:
        yield group
    finally:
        for process in group:
            process.kill()
            process.communicate()


def wait(group: Sequence[subprocess.Popen[str]]) -> list[Ended]:
    start = time.monotonic()
    ended = []
    for process in group:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        ended.append(Ended(process.returncode, output, time.monotonic() - start))
    return ended


def run(num_processes: int, *arguments: str) -> list[Ended]:
    """Runs a whole group, and fails with its output unless all processes succeed."""
    with started(num_processes, *arguments) as group:
        all_ended = wait(group)
    for index, ended in enumerate(all_ended):
        assert ended.code == 0, f"process {index} of {num_processes}:\n{ended.output}"
    return all_ended
