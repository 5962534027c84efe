"""Several hosts on one machine: network namespaces joined by links of a given rate.

    python -m experiments.testbed --hosts 4 --rate 1gbit -- python -m experiments.vision digits --distributed

Runs the command once in each of `--hosts` namespaces and prints how many bytes each really sent. Host 0
writes straight through; a line of another host is prefixed. What a process needs to find the others is in
`JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. If one ends with an error, the others get
`--grace` seconds, then all are stopped; the exit code is that of the first that failed.

Every host has one interface, `eth0`: a veth pair whose other end is a port of a bridge, in a namespace
of its own, so that nothing of this shows up in the machine's own network. A link is full duplex and limited
both ways, as a cable to a switch is: what the host sends (`tbf` on its `eth0`) and what it receives (`tbf` on
the bridge's port). Loopback is not limited.

Needs root, Linux and the commands `ip` and `tc` (Debian: iproute2). All is removed when the command ends,
fails, or is stopped by Ctrl-C or SIGTERM; what a killed testbed left behind goes when the next one starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import rich
import tyro
from rich import box
from rich.table import Table

INTERFACE = "eth0"
COORDINATOR_PORT = 8476
MAX_HOSTS = 250
PREFIX = "nf_jax"  # of namespaces: nf_jax-<testbed>-h<host> and nf_jax-<testbed>-switch
SETTINGS = Path("/etc/netns")  # `ip netns exec` mounts what is here over /etc

# ============================================================================================== rates

_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def bits_per_second(rate: str) -> float | None:
    """The number a rate stands for, None for `none`.

    Raises:
      ValueError: it is neither `none` nor a number with kbit, mbit or gbit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", rate)
    if rate == "none":
        return None
    if not match or not float(match[1]):
        raise ValueError(f"rate: expected none, or a number and kbit, mbit or gbit as in 1gbit, got {rate!r}")
    return float(match[1]) * _UNITS[match[2]]


def _burst_bytes(bits: float) -> int:
    # What may leave at once after a pause: 2 ms of the rate, so that a step's bytes cannot hide in it; but
    # at least one packet of segmentation offload, which would be cut up in software otherwise.
    return int(min(max(bits / 8 * 0.002, 72_000), 256 * 1024))


# ============================================================================================ testbed


@dataclasses.dataclass(frozen=True)
class Testbed:
    """Hosts that exist while `open_testbed` is open.

    Attributes:
      name: the prefix of its namespaces.
      hosts: how many there are; they are numbered from 0.
      processes: everything that `popen` has started.
    """

    name: str
    hosts: int
    processes: list[subprocess.Popen[Any]] = dataclasses.field(default_factory=list)

    def namespace(self, host: int) -> str:
        """The network namespace of a host, for `ip -n`."""
        return f"{self.name}-h{self._check(host)}"

    def address(self, host: int) -> str:
        """The IPv4 address of a host, to which its host name resolves inside its namespace."""
        return f"10.77.0.{self._check(host) + 1}"

    def environment(self, host: int) -> dict[str, str]:
        """The variables by which a process on a host finds the others; host 0 coordinates.

        `jax.distributed.initialize()` reads the first by itself; the other two have to be handed to it.
        """
        return {
            "JAX_COORDINATOR_ADDRESS": f"{self.address(0)}:{COORDINATOR_PORT}",
            "JAX_NUM_PROCESSES": str(self.hosts),
            "JAX_PROCESS_ID": str(self._check(host)),
        }

    def set_rate(self, rate: str) -> None:
        """Limits every link both ways from now on, `none` lifts it; processes run on meanwhile.

        Args:
          rate: such as `1gbit`, `100mbit` or `none`.
        """
        bits = bits_per_second(rate)
        ends = [(self.namespace(host), INTERFACE) for host in range(self.hosts)]
        ends += [(f"{self.name}-switch", f"port{host}") for host in range(self.hosts)]
        for namespace, interface in ends:
            where = ["tc", "-n", namespace, "qdisc"]
            if bits is not None:
                limits = ["rate", rate, "burst", str(_burst_bytes(bits)), "latency", "100ms"]
                _call(*where, "replace", "dev", interface, "root", "tbf", *limits)
            elif "tbf" in _call(*where, "show", "dev", interface):
                _call(*where, "del", "dev", interface, "root")

    def set_cable(self, host: int, is_in: bool) -> None:
        """Pulls the cable of a host out of the switch, or puts it in again; processes run on meanwhile."""
        port = f"port{host}"
        _call("ip", "-n", f"{self.name}-switch", "link", "set", port, "up" if is_in else "down")

    def popen(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts a command on a host, in a session of its own; closing the testbed ends it.

        Args:
          host: where, from 0.
          argv: the command.
          env: variables on top of this process's own and `environment(host)`.
          **options: as for `subprocess.Popen`.
        """
        env = {**os.environ, **self.environment(host), **(env or {})}
        argv = ["ip", "netns", "exec", self.namespace(host), *argv]
        process = subprocess.Popen(argv, env=env, start_new_session=True, **options)
        self.processes.append(process)
        return process

    def tx_bytes(self, host: int) -> int:
        """Bytes a host has sent over its link so far, headers included.

        The kernel counts a packet that offload will segment once, so headers are fewer than on a wire.
        """
        shown = _call("ip", "-n", self.namespace(host), "-s", "-j", "link", "show", "dev", INTERFACE)
        return json.loads(shown)[0]["stats64"]["tx"]["bytes"]

    def _check(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise ValueError(f"host: expected 0 to {self.hosts - 1}, got {host}")
        return host


@contextlib.contextmanager
def open_testbed(hosts: int, rate: str = "none") -> Iterator[Testbed]:
    """Makes the hosts; ends their processes and removes everything on the way out.

    First removes what testbeds whose process is gone have left. Several may be open at a time.

    Args:
      hosts: how many, at most 250.
      rate: of every link, see `Testbed.set_rate`.

    Raises:
      ValueError: a bad argument, or a machine that cannot do it, with the reason.

    Example:
      with open_testbed(2, "1gbit") as bed:
          bed.popen(0, ["hostname", "-i"]).wait()
    """
    if not 1 <= hosts <= MAX_HOSTS:
        raise ValueError(f"hosts: expected 1 to {MAX_HOSTS}, got {hosts}")
    bits_per_second(rate)
    if reason := why_unavailable():
        raise ValueError(reason)
    for number in sorted({int(name.split("-")[1]) for name in _leftovers(r"\d+")}):
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as claim:
            if _is_claimed(claim, number):
                _remove(f"{PREFIX}-{number}")
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as claim:
        number = next(number for number in range(1000) if _is_claimed(claim, number))
        bed = Testbed(f"{PREFIX}-{number}", hosts)
        try:
            _make(bed)
            bed.set_rate(rate)
            yield bed
        finally:
            with _deaf():
                _remove(bed.name)
                for process in bed.processes:
                    process.wait()


def why_unavailable() -> str | None:
    """What this machine lacks for a testbed, in one line; None if nothing."""
    absent = [name for name in ("ip", "tc") if not shutil.which(name)]
    if sys.platform != "linux" or os.geteuid() != 0 or absent:
        need = "testbed: needs Linux, root and the commands ip and tc (Debian package iproute2)"
        user = "root" if os.geteuid() == 0 else "not root"
        return f"{need}; here: {sys.platform}, {user}, {' and '.join(absent) or 'nothing'} missing"
    probe = f"{PREFIX}_probe_{os.getpid()}"
    try:
        _call("ip", "netns", "add", probe)
        try:
            tbf = ["tbf", "rate", "1gbit", "burst", "256kb", "latency", "100ms"]
            _call("tc", "-n", probe, "qdisc", "add", "dev", "lo", "root", *tbf)
        finally:
            _call("ip", "netns", "del", probe)
    except ValueError as error:
        return f"testbed: network namespaces or tbf are refused here (a container's limits?): {error}"
    return None


def _make(bed: Testbed) -> None:
    switch = f"{bed.name}-switch"
    _call("ip", "netns", "add", switch)
    _call("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge", "forward_delay", "0")
    _call("ip", "-n", switch, "link", "set", "bridge0", "addrgenmode", "none", "up")
    for host in range(bed.hosts):
        name, port = bed.namespace(host), f"port{host}"
        _call("ip", "netns", "add", name)
        # JAX's gloo listens on the address that the host name stands for.
        (SETTINGS / name).mkdir(parents=True, exist_ok=True)
        lines = f"127.0.0.1 localhost\n{bed.address(host)} {socket.gethostname()}\n"
        (SETTINGS / name / "hosts").write_text(lines)
        pair = ["type", "veth", "peer", "name", port, "netns", switch]
        _call("ip", "link", "add", INTERFACE, "netns", name, *pair)
        # No link-local IPv6 addresses: their chatter would count as sent.
        _call("ip", "-n", switch, "link", "set", port, "addrgenmode", "none", "master", "bridge0", "up")
        _call("ip", "-n", name, "link", "set", INTERFACE, "addrgenmode", "none", "up")
        _call("ip", "-n", name, "link", "set", "lo", "up")
        _call("ip", "-n", name, "address", "add", f"{bed.address(host)}/24", "dev", INTERFACE)


def _remove(prefix: str) -> None:
    """Ends all processes of a testbed, asking first, and deletes its namespaces and settings."""
    names = _leftovers(re.escape(prefix.removeprefix(f"{PREFIX}-")))
    _end_processes(names)
    for name in names:
        _call("ip", "netns", "del", name)  # takes its interfaces along
    for folder in SETTINGS.glob(f"{prefix}-*"):
        shutil.rmtree(folder)


def _end_processes(namespaces: Sequence[str], ask_seconds: float = 2.0, kill_seconds: float = 10.0) -> None:
    """Asks every process to end, then kills it; none that forks meanwhile gets away."""
    start = time.monotonic()
    kind = signal.SIGTERM
    while pids := {int(pid) for name in namespaces for pid in _call("ip", "netns", "pids", name).split()}:
        passed = time.monotonic() - start
        if passed > ask_seconds + kill_seconds:
            raise ValueError(f"testbed: processes {sorted(pids)} do not end, not even by SIGKILL")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, kind)
        kind = 0 if passed < ask_seconds else signal.SIGKILL
        time.sleep(0.02)


def _leftovers(number: str) -> list[str]:
    listed = (line.split()[0] for line in _call("ip", "netns", "list").splitlines())
    return [name for name in listed if re.fullmatch(rf"{PREFIX}-{number}-(h\d+|switch)", name)]


def _is_claimed(claim: socket.socket, number: int) -> bool:
    """Claims a number with an abstract socket: a name that the kernel frees when its process dies."""
    try:
        claim.bind(f"\0{PREFIX}-testbed-{number}")
    except OSError:
        return False
    return True


def _call(*argv: str) -> str:
    result = subprocess.run(argv, capture_output=True, text=True)
    if result.returncode:
        raise ValueError(f"testbed: `{' '.join(argv)}` failed: {result.stderr.strip()}")
    return result.stdout


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Ignores a second Ctrl-C or SIGTERM, so that removing is not left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(kind, signal.SIG_IGN) for kind in kinds]
    try:
        yield
    finally:
        for kind, handler in zip(kinds, before, strict=True):
            signal.signal(kind, handler)


def end_on_signals() -> None:
    """Makes SIGTERM and SIGHUP leave `with` blocks as Ctrl-C does: testbeds are removed."""

    def end(kind: int, _: Any) -> None:
        sys.exit(128 + kind)

    for kind in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, end)


# ======================================================================================= command line


@dataclasses.dataclass(frozen=True)
class Config:
    """`python -m experiments.testbed [options] -- command ...`"""

    hosts: int = 2
    """Namespaces, each with one process of the command."""
    rate: str = "none"
    """Of every link, both ways: none, or as tc spells it, say 1gbit or 100mbit."""
    grace: float = 10.0
    """Seconds that the others get when one process fails."""


def run_command(bed: Testbed, command: Sequence[str], grace_seconds: float) -> int:
    """Runs a command on every host to its end; the exit code of the first that failed, or 0."""
    processes = [bed.popen(0, command)]
    readers = []
    for host in range(1, bed.hosts):
        process = bed.popen(
            host,
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        readers.append(threading.Thread(target=_forward, args=(process.stdout, host), daemon=True))
        readers[-1].start()
    first, deadline = 0, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.05)
        failed = [(host, code) for host, process in enumerate(processes) if (code := process.poll())]
        if failed and not first:
            host, code = failed[0]
            first, deadline = code, time.monotonic() + grace_seconds
            print(
                f"testbed: host {host} ended with {code}; the others have {grace_seconds:g} s",
                file=sys.stderr,
            )
    if not first:
        first = next((code for process in processes if (code := process.poll())), 0)
    _end_processes([bed.namespace(host) for host in range(bed.hosts)])
    for reader in readers:
        reader.join(timeout=2)
    return 128 - first if first < 0 else first


def _forward(lines: TextIO, host: int) -> None:
    with lines:
        for line in lines:
            print(f"[host {host}] {line}", end="", flush=True)


def make_table(bed: Testbed, rate: str) -> Table:
    """Bytes that every host has sent."""
    table = Table(title=f"sent over the links, {rate}", box=box.SIMPLE_HEAD)
    for name in ("host", "address", "tx_bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for host in range(bed.hosts):
        table.add_row(str(host), bed.address(host), f"{bed.tx_bytes(host):,}")
    return table


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = list(sys.argv[1:] if args is None else args)
    cut = given.index("--") if "--" in given else len(given)
    config = tyro.cli(Config, prog="experiments.testbed", description=__doc__, args=given[:cut])
    command = given[cut + 1 :]
    if not command:
        print("testbed: expected a command after --, got none", file=sys.stderr)
        return 2
    end_on_signals()
    try:
        with open_testbed(config.hosts, config.rate) as bed:
            try:
                return run_command(bed, command, config.grace)
            finally:
                rich.print(make_table(bed, config.rate))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
