"""Processes find each other or say why not, and none outlives a lost one for long."""

from __future__ import annotations

import dataclasses
import signal
import socket
import time

import cluster_worker
import jax
import process_groups
import pytest

from nf_jax import cluster
from nf_jax.cluster import Cluster

WORKER = str(cluster_worker.__file__)
BOUND_SECONDS = 20  # the heartbeat timeout is 4; the rest is for a busy machine


def read_until_up(process) -> None:
    for line in process.stdout:
        if "is up" in line:
            return
    raise AssertionError("the process ended before it was up")


# --------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"coordinator": "10.0.0.1"}, "HOST:PORT"),
        ({"coordinator": "10.0.0.1:99999"}, "HOST:PORT"),
        ({"coordinator": "a:1", "num_processes": 0}, "num_processes: expected at least 1"),
        ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "process_id: expected 0 to 1, got 2"),
        ({"num_processes": 2}, "--distributed or --coordinator"),
        ({"start_timeout_seconds": 0}, "start_timeout_seconds: expected at least 1"),
    ],
)
def test_an_option_that_means_nothing_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(Cluster(), **change)


def test_flags_go_before_the_environment():
    variables = {
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:80",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
    }
    found = cluster.resolve(Cluster(distributed=True), variables)
    assert (found.coordinator, found.num_processes, found.process_id) == ("10.0.0.1:80", 4, 3)
    found = cluster.resolve(Cluster(coordinator="[::1]:9", num_processes=2, process_id=0), variables)
    assert (found.coordinator, found.num_processes, found.process_id) == ("[::1]:9", 2, 0)
    found = cluster.resolve(Cluster(distributed=True), {})
    assert (found.coordinator, found.num_processes, found.process_id) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("JAX_PROCESS_ID", "one"), ("JAX_COORDINATOR_ADDRESS", "here"), ("JAX_PROCESS_ID", "9")],
)
def test_a_variable_that_means_nothing_is_refused(name, value):
    variables = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
    with pytest.raises(ValueError, match="expected"):
        cluster.resolve(Cluster(distributed=True), variables | {name: value})


def test_one_process_needs_no_other():
    with cluster.joined(Cluster(), num_devices=len(jax.devices())):
        assert cluster.is_first() and not jax.distributed.is_initialized()


def test_more_devices_than_jax_started_with_is_an_error():
    have = len(jax.devices())
    with pytest.raises(ValueError, match="start a new process"):
        cluster.use_devices("cpu", have + 1)


def test_workers_that_do_not_divide_among_processes_are_an_error():
    with pytest.raises(ValueError, match="multiple of the 3 processes, got 8"):
        cluster.use_devices("cpu", 8, num_processes=3)


# ------------------------------------------------------------------------------------ what may go wrong


def test_a_coordinator_that_never_answers_or_refuses_ends_the_wait_with_a_message():
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,  # accepts, by the kernel, and says nothing
        process_groups.started(2, WORKER, "for-ever", "3", only=[1]) as refused,
        process_groups.started(2, WORKER, "for-ever", "3", only=[1], port=mute.getsockname()[1]) as unheard,
    ):
        first, second = process_groups.wait(refused + unheard)
    for ended in (first, second):
        assert ended.code == 1 and ended.seconds < BOUND_SECONDS, ended
        assert "process 1 of 2" in ended.output and "waited 3 s" in ended.output, ended
        assert "Check failure" not in ended.output, ended
    assert "connection refused" in first.output and "start process 0" in first.output
    assert "something answers there" in second.output


def test_a_port_that_is_taken_is_an_error_of_process_0():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        options = Cluster(coordinator=f"127.0.0.1:{port}", num_processes=2, process_id=0)
        with pytest.raises(ValueError, match="choose another port"), cluster.joined(options, 2):
            pass


@pytest.mark.parametrize(
    ("what", "victim", "number"),
    [
        ("for-ever", 1, signal.SIGKILL),  # the connections break
        ("for-ever", 0, signal.SIGTERM),  # a scheduler ends the coordinator
        ("asleep", 1, signal.SIGSTOP),  # a host froze while the others are in no collective
    ],
)
def test_a_lost_process_ends_the_others_with_a_message_in_bounded_time(what, victim, number):
    with process_groups.started(2, WORKER, what) as group:
        for process in group:
            read_until_up(process)
        time.sleep(0.5)
        group[victim].send_signal(number)
        (other,) = process_groups.wait([group[1 - victim]])
        assert other.code not in (0, None) and other.seconds < BOUND_SECONDS, other
        assert f"error: process {1 - victim} of 2" in other.output, other
        assert "another process" in other.output, other
        if number != signal.SIGSTOP:
            (lost,) = process_groups.wait([group[victim]])
            assert f"error: process {victim} of 2" in lost.output and "killed" in lost.output, lost


def test_a_process_that_is_stopped_for_a_while_holds_the_others_up_and_all_go_on():
    """What a hypervisor does when it moves a machine. 20 s: NF_JAX_PAUSE_SECONDS=20 pytest ..."""
    assert Cluster().heartbeat_timeout_seconds >= 2 * 20
    with process_groups.started(2, WORKER, "to-the-end", "60", "60") as group:
        for process in group:
            read_until_up(process)
        for victim in (1, 0):  # a worker, then the coordinator
            group[victim].send_signal(signal.SIGSTOP)
            time.sleep(process_groups.PAUSE_SECONDS)
            assert group[1 - victim].poll() is None
            group[victim].send_signal(signal.SIGCONT)
        assert [(ended.code, ended.output) for ended in process_groups.wait(group)] == [(0, "")] * 2


def test_a_process_that_raises_says_why_and_ends_the_others():
    with process_groups.started(2, WORKER, "raise") as group:
        other, raised = process_groups.wait(group)
    assert (other.code, raised.code) == (1, 1)
    assert other.seconds < BOUND_SECONDS
    assert "ValueError: too much of something" in raised.output
    assert "process 1 of 2" in raised.output and "process 0 of 2" in other.output
