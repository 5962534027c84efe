"""The testbed: what it makes, what it limits and counts, and that nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cluster_worker
import process_groups
import pytest

from experiments import testbed

ROOT = Path(__file__).resolve().parent.parent
REASON = testbed.why_unavailable()
needs_root = pytest.mark.skipif(REASON is not None, reason=REASON or "")

RECEIVE = """
import socket, sys
server = socket.create_server(("0.0.0.0", 5000))
server.settimeout(20)
for _ in range(int(sys.argv[1])):
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
    connection.sendall(b"!")
"""
SEND = """
import socket, sys, time
for _ in range(200):
    try:
        connection = socket.create_connection((sys.argv[1], 5000), 20)
        break
    except OSError:
        time.sleep(0.02)
start = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(1) == b"!"
print(time.monotonic() - start)
"""


def transfer(bed: testbed.Testbed, num_bytes: int) -> float:
    """Seconds until host 1 has received `num_bytes` of host 0."""
    receiver = bed.popen(1, [sys.executable, "-c", RECEIVE, "1"])
    argv = [sys.executable, "-c", SEND, bed.address(1), str(num_bytes)]
    with bed.popen(0, argv, stdout=subprocess.PIPE, text=True) as sender:
        seconds = float(sender.communicate(timeout=30)[0])
    assert receiver.wait(timeout=5) == 0
    return seconds


# Where the tests run in the background, a shell has told them, and all they start, to ignore Ctrl-C.
START = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("experiments.testbed", run_name="__main__", alter_sys=True)
"""


def start_command(*options: str, script: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", START, *options, "--", "sh", "-c", script]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def namespaces(prefix: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"{prefix}-")]


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def read_start(process: subprocess.Popen[str]) -> tuple[str, int]:
    """The testbed's name and a process id inside, which host 0 has printed in one line."""
    assert process.stdout
    namespace, pid = process.stdout.readline().split()
    return namespace.removesuffix("-h0"), int(pid)


ANNOUNCE = "test $JAX_PROCESS_ID != 0 || echo $(ip netns identify $$) $$; exec sleep 60"


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")")[1].split()[0] != "Z"  # ended, but not yet collected by its parent


# --------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("none", None), ("10gbit", 1e10), ("1gbit", 1e9), ("1.5mbit", 1.5e6), ("200mbit", 2e8), ("8kbit", 8e3)],
)
def test_a_rate_is_spelled_as_tc_spells_it(rate: str, bits: float | None):
    assert testbed.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "fast", "1", "1Gbit", "0mbit", "-1gbit", "1gbps", "1 gbit"])
def test_a_bad_rate_is_refused(rate: str):
    with pytest.raises(ValueError, match="rate: expected none, or a number"):
        testbed.bits_per_second(rate)


@pytest.mark.parametrize("hosts", [0, -1, 251])
def test_a_bad_number_of_hosts_is_refused(hosts: int):
    with (
        pytest.raises(ValueError, match=f"hosts: expected 1 to 250, got {hosts}"),
        testbed.open_testbed(hosts),
    ):
        pass


def test_what_is_missing_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert testbed.main(["--hosts", "2", "--", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in ("root", "iproute2", "ip and tc missing"))


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]):
    assert testbed.main(["--hosts", "2"]) == 2
    assert "expected a command after --" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- hosts


@needs_root
def test_a_process_knows_coordinator_number_and_id_and_its_own_address():
    with testbed.open_testbed(3) as bed:
        script = "echo $JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID $(hostname -i) $EXTRA"
        for host in range(3):
            options = {"stdout": subprocess.PIPE, "text": True}
            with bed.popen(host, ["sh", "-c", script], {"EXTRA": "more"}, **options) as process:
                words = process.communicate()[0].split()
            assert words == ["10.77.0.1:8476", "3", str(host), bed.address(host), "more"]
        with pytest.raises(ValueError, match="host: expected 0 to 2, got 3"):
            bed.address(3)


@needs_root
def test_sent_bytes_are_counted():
    with testbed.open_testbed(2) as bed:
        before = bed.tx_bytes(0), bed.tx_bytes(1)
        transfer(bed, 4_000_000)
        sent, returned = bed.tx_bytes(0) - before[0], bed.tx_bytes(1) - before[1]
        assert 4_000_000 < sent < 4_300_000
        assert 0 < returned < 400_000


@needs_root
def test_a_rate_limits_a_link_and_changes_while_it_is_up():
    num_bytes, seconds_at_100mbit = 8_000_000, 0.64
    with testbed.open_testbed(2, "100mbit") as bed:
        assert 0.9 * seconds_at_100mbit < transfer(bed, num_bytes) < 3 * seconds_at_100mbit
        bed.set_rate("200mbit")
        assert 0.45 * seconds_at_100mbit < transfer(bed, num_bytes)
        bed.set_rate("none")
        bed.set_rate("none")
        assert transfer(bed, num_bytes) < 0.5 * seconds_at_100mbit


@needs_root
def test_receiving_is_limited_too():
    with testbed.open_testbed(3, "100mbit") as bed:
        receiver = bed.popen(2, [sys.executable, "-c", RECEIVE, "2"])
        argv = [sys.executable, "-c", SEND, bed.address(2), "4000000"]
        start = time.monotonic()
        senders = [bed.popen(host, argv, stdout=subprocess.DEVNULL) for host in (0, 1)]
        assert [process.wait(timeout=30) for process in (*senders, receiver)] == [0, 0, 0]
        assert time.monotonic() - start > 0.9 * 0.64  # both senders' bytes through one link


@needs_root
def test_two_testbeds_do_not_meet():
    with testbed.open_testbed(2) as one, testbed.open_testbed(2) as two:
        assert one.name != two.name
        transfer(one, 1_000_000)
        assert one.tx_bytes(0) > 1_000_000 and two.tx_bytes(0) < 10_000
    assert not namespaces(one.name) and not namespaces(two.name)


# ------------------------------------------------------------------------------------------- cables

WORKER = str(cluster_worker.__file__)


def start_workers(bed: testbed.Testbed, *arguments: str) -> list[subprocess.Popen[str]]:
    """A process of `cluster_worker` on each of two hosts, both up."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    variables = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    argv = [sys.executable, WORKER, *arguments]
    processes = [bed.popen(host, argv, variables, **streams) for host in (0, 1)]
    for process in processes:
        assert process.stdout and any("is up" in line for line in process.stdout)
    return processes


@needs_root
def test_a_cable_that_is_pulled_for_a_while_holds_the_run_up_and_all_go_on():
    """10 s: NF_JAX_PAUSE_SECONDS=10 pytest ..."""
    with testbed.open_testbed(2) as bed:
        processes = start_workers(bed, "to-the-end", "60", "60")
        bed.set_cable(1, False)
        sent = bed.tx_bytes(0)
        time.sleep(process_groups.PAUSE_SECONDS)
        assert [process.poll() for process in processes] == [None, None]
        assert bed.tx_bytes(0) - sent < 100_000  # retries alone
        bed.set_cable(1, True)
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs


@needs_root
@pytest.mark.skipif("NF_JAX_PAUSE_SECONDS" not in os.environ, reason="takes 30 s; set NF_JAX_PAUSE_SECONDS")
def test_a_cable_that_stays_out_ends_both_sides_with_a_message_after_the_heartbeats_timeout():
    with testbed.open_testbed(2) as bed:
        processes = start_workers(bed, "for-ever", "60", "10")
        bed.set_cable(1, False)
        start = time.monotonic()
        outputs = [process.communicate(timeout=120)[0] for process in processes]
        assert time.monotonic() - start < 10 + 20
    for host, (process, output) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode not in (0, None)
        assert f"error: process {host} of 2" in output and "another process" in output


# ---------------------------------------------------------------------------------------- teardown


@needs_root
def test_success_forwards_output_reports_bytes_and_leaves_nothing():
    script = "echo $(ip netns identify $$) and $JAX_PROCESS_ID"
    process = start_command("--hosts", "2", script=script)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    lines = out.splitlines()
    name = next(line.split("-h")[0] for line in lines if line.startswith(testbed.PREFIX))
    assert f"{name}-h0 and 0" in lines and f"[host 1] {name}-h1 and 1" in lines
    assert "tx_bytes" in out
    assert not namespaces(name) and not list(testbed.SETTINGS.glob(f"{name}-*"))


@needs_root
def test_one_failure_ends_the_others_in_bounded_time():
    script = "test $JAX_PROCESS_ID != 1 || exit 7; echo $(ip netns identify $$) $$; exec sleep 60"
    start = time.monotonic()
    process = start_command("--hosts", "2", "--grace", "0.5", script=script)
    name, pid = read_start(process)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 7 and time.monotonic() - start < 10
    assert "host 1 ended with 7" in err
    assert not namespaces(name) and not is_alive(pid)


@needs_root
@pytest.mark.parametrize(("kind", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_removes_everything(kind: signal.Signals, code: int):
    process = start_command("--hosts", "2", script=ANNOUNCE)
    name, pid = read_start(process)
    assert len(namespaces(name)) == 3
    process.send_signal(kind)
    process.communicate(timeout=20)
    assert process.returncode == code
    assert not namespaces(name) and not is_alive(pid)


@needs_root
def test_a_process_that_ignores_sigterm_is_killed():
    with testbed.open_testbed(1) as bed:
        process = bed.popen(0, ["sh", "-c", "trap '' TERM; echo ready; sleep 60"], stdout=subprocess.PIPE)
        assert process.stdout and process.stdout.readline()
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL and not namespaces(bed.name)


@needs_root
def test_the_next_start_removes_what_a_killed_one_left():
    process = start_command("--hosts", "2", script=ANNOUNCE)
    name, pid = read_start(process)
    process.kill()
    process.wait(timeout=20)
    assert process.stdout and process.stderr
    for pipe in (process.stdout, process.stderr):
        pipe.close()  # what it left holds the other ends: no communicate()
    assert len(namespaces(name)) == 3 and is_alive(pid)
    with testbed.open_testbed(1):
        wait_until(lambda: not is_alive(pid))
        assert f"{name}-h1" not in namespaces(name)  # its number may be in use again


@needs_root
def test_a_failure_while_making_it_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []

    def fail(bed: testbed.Testbed, rate: str) -> None:
        made.append(bed.name)
        raise RuntimeError(rate)

    monkeypatch.setattr(testbed.Testbed, "set_rate", fail)
    with pytest.raises(RuntimeError, match="1gbit"), testbed.open_testbed(2, "1gbit"):
        pass
    assert not namespaces(made[0])
