"""Joins the processes of one run; with `ending.py`, ends all of them when one is lost.

JAX's own runtime does the work: its coordination service (on process 0) introduces the processes to each
other and watches their heartbeats; gloo on CPU, NCCL on GPU, ICI and DCN on TPU move the data. This file
hands it what it needs, bounds every wait, and turns what can go wrong into one clear line:

- nobody answers at the start: a deadline, `--start-timeout-seconds`, then exit code 1;
- a worker dies: its peers' collectives fail at once (exit code 1), or, where no connection breaks because
  a host froze or lost power, JAX ends them after `--heartbeat-timeout-seconds` (it aborts: exit code 134);
- a worker raises: it prints its traceback and leaves without waiting for the others, who then lose it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import jax
from jax.experimental import multihost_utils

from nf_jax import ending


@dataclasses.dataclass(frozen=True)
class Cluster:
    """How the processes of a run find each other; every field is a flag."""

    distributed: bool = False
    """Run as one process of several, which SLURM, Open MPI, Kubernetes, a TPU pod or the variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID describe."""
    coordinator: str | None = None
    """HOST:PORT where process 0 listens and all others find it; implies --distributed."""
    num_processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    platform: Literal["cpu", "gpu", "tpu"] = "cpu"
    """What the workers are; on cpu, virtual devices."""
    start_timeout_seconds: int = 120
    """How long to wait for all processes to come."""
    heartbeat_timeout_seconds: int = 60
    """After how long without a sign of life a process counts as dead."""

    def __post_init__(self) -> None:
        for name in ("start_timeout_seconds", "heartbeat_timeout_seconds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.coordinator is not None:
            _check_address(self.coordinator, "--coordinator")
        if (count := self.num_processes) is not None and count < 1:
            raise ValueError(f"num_processes: expected at least 1, got {count}")
        last = "num_processes - 1" if count is None else count - 1
        if self.process_id is not None and (
            self.process_id < 0 or (count is not None and self.process_id >= count)
        ):
            raise ValueError(f"process_id: expected 0 to {last}, got {self.process_id}")
        if not self.is_distributed and (count, self.process_id) != (None, None):
            raise ValueError(
                "num_processes, process_id: expected --distributed or --coordinator HOST:PORT with them"
            )

    @property
    def is_distributed(self) -> bool:
        return self.distributed or self.coordinator is not None


def resolve(options: Cluster, variables: Mapping[str, str]) -> Cluster:
    """Fills in from the environment what no flag says; what is then still None, JAX has to find out."""
    address = options.coordinator or variables.get("JAX_COORDINATOR_ADDRESS")
    if address is not None:
        _check_address(address, "JAX_COORDINATOR_ADDRESS")

    def number(value: int | None, name: str) -> int | None:
        if value is not None or (text := variables.get(name)) is None:
            return value
        if not text.isdecimal():
            raise ValueError(f"{name}: expected a whole number, got {text!r}")
        return int(text)

    return dataclasses.replace(
        options,
        coordinator=address,
        num_processes=number(options.num_processes, "JAX_NUM_PROCESSES"),
        process_id=number(options.process_id, "JAX_PROCESS_ID"),
    )


@contextlib.contextmanager
def joined(options: Cluster, num_devices: int) -> Iterator[None]:
    """Runs its body as one process of the run, with `num_devices` workers over all processes.

    Without `--distributed` there is one process, and this only makes virtual devices. Otherwise any
    exception in the body ends this process here and now (`os._exit`): an orderly exit would wait for
    processes that wait for this one.

    Args:
      options: how to find the other processes.
      num_devices: workers in total, a multiple of the number of processes.

    Raises:
      ValueError: nothing says where the other processes are, or there are not that many devices.
    """
    if not options.is_distributed:
        use_devices(options.platform, num_devices)
        yield
        return
    options = _connect(resolve(options, os.environ), num_devices)
    witness = ending.start_witness(_name(options))
    try:
        yield
        jax.distributed.shutdown()
    except BaseException as error:
        ending.leave(error, _name(options), witness, is_last=options.process_id == 0)
    ending.dismiss(witness)


def is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def use_devices(platform: str, num_devices: int, num_processes: int = 1) -> None:
    """Virtual CPU devices, or a check of the real ones.

    What has used JAX before this in the same process decided already.

    Raises:
      ValueError: there are too few devices, or, in several processes, other than asked for.
    """
    if num_devices % num_processes:
        raise ValueError(
            f"devices: expected a multiple of the {num_processes} processes, got {num_devices} workers in all"
        )
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", platform)
        if platform == "cpu":
            jax.config.update("jax_num_cpu_devices", num_devices // num_processes)
    try:
        found = len(jax.devices())
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"platform: expected {platform} devices, but JAX finds none: {reason}") from None
    if num_processes > 1 and found != num_devices:
        raise ValueError(
            f"devices: expected {num_devices}, all processes have {found}; pass --devices {found}"
        )
    if found < num_devices:
        raise ValueError(
            f"devices: expected {num_devices}, got {found}: JAX has started already, with fewer. "
            f"Ask for at most {found}, or start a new process."
        )


# ------------------------------------------------------------------------------------------- start


def _connect(options: Cluster, num_devices: int) -> Cluster:
    """Joins, and exchanges a first word with all processes; returns the options as JAX found them."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for a notice to be polled, and nobody here polls: a scheduler's
    # request to end would be ignored.
    jax.config.update("jax_enable_preemption_service", False)
    known = None not in (options.coordinator, options.num_processes, options.process_id)
    with _deadline(options.start_timeout_seconds, functools.partial(_explain_silence, options)):
        _check_addresses(options)
        try:
            jax.distributed.initialize(
                options.coordinator,
                options.num_processes,
                options.process_id,
                cluster_detection_method="deactivate" if known else None,
                # JAX aborts at its own timeout; ours comes first, and says more.
                initialization_timeout=options.start_timeout_seconds + 30,
                heartbeat_timeout_seconds=options.heartbeat_timeout_seconds,
                # At the end the others wait while process 0 writes; heartbeats go on meanwhile.
                shutdown_timeout_seconds=max(300, options.start_timeout_seconds),
            )
        except (ValueError, TypeError, RuntimeError, KeyError, OSError) as error:
            raise ValueError(
                f"--distributed: JAX cannot start: {error}\nExpected to run under SLURM (srun), Open MPI "
                "(mpirun), Kubernetes or on a TPU pod, or to be told --coordinator HOST:PORT "
                "--num-processes N --process-id I (or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, "
                "JAX_PROCESS_ID), before anything else uses JAX."
            ) from error
        found = _as_found(options)
        try:
            use_devices(options.platform, num_devices, found.num_processes or 1)
            multihost_utils.sync_global_devices("start")  # opens every connection under the deadline
        except Exception as error:
            ending.leave(error, _name(found), is_last=found.process_id == 0)
    return found


def _as_found(options: Cluster) -> Cluster:
    # No public function tells this before devices exist, whose number depends on it.
    from jax._src.distributed import global_state

    return dataclasses.replace(
        options,
        coordinator=global_state.coordinator_address,
        num_processes=global_state.num_processes,
        process_id=global_state.process_id,
    )


@contextlib.contextmanager
def _deadline(seconds: float, explain: Callable[[], str]) -> Iterator[None]:
    """Ends the process with a message unless the body ends in time: JAX waits in C++, so by a thread."""

    def end() -> None:
        try:
            ending.say(explain())
        finally:
            os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _explain_silence(options: Cluster) -> str:
    """Why the processes did not come together, as far as it can be seen from here."""
    found = _as_found(options)
    options = options if found.coordinator is None else found
    waited = f"waited {options.start_timeout_seconds} s for all processes to come together"
    longer = "If they only start slowly, raise --start-timeout-seconds."
    if options.coordinator is None or options.process_id == 0:
        return f"{_name(options)}: {waited}, not all came. Look at the others' output. {longer}"
    host, port = options.coordinator.rsplit(":", 1)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
        seen = "something answers there, so other processes are missing, or it is no coordinator of this run"
    except socket.gaierror:
        seen = "this host name is unknown here"
    except ConnectionRefusedError:
        seen = "nothing listens there (connection refused); start process 0 on that host and port"
    except OSError as error:
        seen = f"it cannot be reached from here ({error}): look for a firewall, or another network"
    return f"{_name(options)}: {waited} with the coordinator at {options.coordinator}: {seen}. {longer}"


def _name(options: Cluster) -> str:
    which, count = ("?" if n is None else n for n in (options.process_id, options.num_processes))
    return f"process {which} of {count} (pid {os.getpid()} on {socket.gethostname()})"


def _check_address(address: str, where: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"{where}: expected HOST:PORT, such as 10.0.0.1:9876, got {address!r}")


def _check_addresses(options: Cluster) -> None:
    """Of two mistakes, JAX's runtime would crash at the first and wait for ever at the second."""
    if options.coordinator is None:
        return
    host, port = options.coordinator.rsplit(":", 1)
    if options.process_id == 0:
        try:
            socket.create_server(("", int(port))).close()
        except OSError as error:
            raise ValueError(
                f"coordinator: expected to listen on port {port} as process 0, got: {error.strerror}; "
                "choose another port for all processes"
            ) from error
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        own, coordinator = map(socket.gethostbyname, (name, host))
        is_alone = ipaddress.ip_address(own).is_loopback
        if options.platform == "cpu" and is_alone and not ipaddress.ip_address(coordinator).is_loopback:
            raise ValueError(  # gloo listens where this host's own name points; Debian's default is 127.0.1.1
                f"coordinator: this host's name {name!r} stands for {own}, where no other host can reach "
                f"it; in /etc/hosts, let it stand for the address that {coordinator} can reach"
            )
