"""A worker's beginning and end with real processes: absent or wrong servers, workers' indices, and Ctrl-C at every point."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import DeadlineExceeded, Unavailable, WorkerIndexTaken, WrongCluster, WrongRole
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.processes import Plan, ProcessCluster
from tests.support.cluster.shape import Shape
from tests.support.processes.processes import talking
from tests.support.waiting import wait_until
from worker_client.cluster.chief import machine_name

VALUES = {"w": np.zeros(3)}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_absent_chief_is_named_after_two_seconds_and_given_up_at_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    address, start_s = f"127.0.0.1:{closed_port()}", time.monotonic()
    with pytest.raises(Unavailable, match=f"cannot reach the chief at {address}: connection refused; is it started"):
        worker_client.connect(address, timeout_s=4.0)  # two seconds and a pause between two tries, which may take one
    assert time.monotonic() - start_s < 8.0
    assert any(address in record.getMessage() for record in caplog.records)


def test_chief_that_comes_later_is_found(stack: ExitStack, socket_dir: Path) -> None:
    cluster = ProcessCluster(Plan(), stack, directory=socket_dir).start()
    assert cluster.session().create_or_join(VALUES, optimizer=worker_client.sgd(0.1))


def test_parameter_server_is_not_taken_for_the_chief_nor_another_cluster_for_this(stack: ExitStack, socket_dir: Path) -> None:
    cluster = ServedCluster(Shape(), stack, directory=socket_dir)
    with pytest.raises(WrongRole, match=r"this is ps 0.*, not the chief"):
        worker_client.connect(cluster.ps_addresses[0], timeout_s=5)
    with pytest.raises(WrongCluster, match="'lockstep', not 'job-b'; check LOCKSTEP_CLUSTER"):
        worker_client.connect(cluster.chief_address, cluster="job-b", timeout_s=5)
    assert cluster.session().create_or_join(VALUES, optimizer=worker_client.sgd(0.1))


def test_environment_leads_to_the_cluster_and_a_proxy_does_not_matter(
    stack: ExitStack, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ServedCluster(Shape(num_workers=2), stack, directory=socket_dir)
    for name, value in {"LOCKSTEP_CHIEF": cluster.chief_address, "LOCKSTEP_WORKER_INDEX": "1", "http_proxy": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    with worker_client.connect(timeout_s=20) as session, worker_client.observe(timeout_s=20) as observer:
        assert session.worker_index == 1
        assert session.create_or_join(VALUES, optimizer=worker_client.sgd(0.1))
        np.testing.assert_array_equal(observer.read(timeout_s=20)["w"], VALUES["w"])


HOLDER = """
import sys, threading, numpy, worker_client
with worker_client.connect(sys.argv[1], worker_index=0) as session:
    session.create_or_join({"w": numpy.zeros(3)}, optimizer=worker_client.sgd(0.1))
    print("ready", flush=True)
    threading.Event().wait(60)
"""


def read_line(stream: IO[bytes] | None) -> str:
    assert stream is not None
    return stream.readline().decode().strip()


def test_living_worker_keeps_its_index_and_a_killed_one_is_replaced_at_once(
    stack: ExitStack, socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = ServedCluster(Shape(num_workers=2, lease_s=30), stack, directory=socket_dir)
    holder = talking(stack, sys.executable, "-c", HOLDER, cluster.chief_address, stderr=subprocess.PIPE)
    assert read_line(holder.stdout) == "ready"
    with pytest.raises(WorkerIndexTaken, match=f"worker 0 is already running on {machine_name()} pid {holder.pid}"):
        cluster.session(0)
    holder.kill()
    # Not waited for: a zombie counts as gone.
    wait_until(lambda: Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", what="the worker has died")
    replacement = cluster.session(0)
    assert f"taking over from worker 0: its process on this machine, pid {holder.pid}, has ended" in caplog.messages
    assert not replacement.create_or_join(VALUES, optimizer=worker_client.sgd(0.1))
    assert replacement.push({"w": np.ones(3)}).is_accepted


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_takeover_ends_the_former_holder_with_a_reason(
    stack: ExitStack, socket_dir: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    cluster = ServedCluster(Shape(), stack, directory=socket_dir)
    former = cluster.session(0)
    former.create_or_join(VALUES, optimizer=worker_client.sgd(0.1))
    if by_variable:
        monkeypatch.setenv("LOCKSTEP_TAKEOVER", "1")
    with worker_client.connect(cluster.chief_address, worker_index=0, takeover=not by_variable, timeout_s=20) as holder:
        assert holder.worker_index == 0
        with pytest.raises(worker_client.PsError) as raised:
            former.push({"w": np.ones(3)})
        assert raised.value.reason == "SUPERSEDED"
        assert not holder.create_or_join(VALUES, optimizer=worker_client.sgd(0.1))
        assert holder.step({"w": np.ones(3)}, timeout_s=20).is_accepted


@pytest.mark.shows("F32")
def test_forked_child_leaves_the_parents_session_alone(stack: ExitStack, socket_dir: Path) -> None:
    script = """
import os, sys, numpy, worker_client
with worker_client.connect(sys.argv[1]) as session:
    session.create_or_join({"w": numpy.zeros(3)}, optimizer=worker_client.sgd(0.1))
    pid = os.fork()
    if pid == 0:
        try:
            session.push({"w": numpy.ones(3)})
        except RuntimeError as error:
            print("child:", error, flush=True)
        session.close()
        os._exit(0)
    os.waitpid(pid, 0)
    print("parent:", session.step({"w": numpy.ones(3)}).outcome.name, flush=True)
"""
    cluster = ServedCluster(Shape(), stack, directory=socket_dir)
    process = talking(stack, sys.executable, "-W", "ignore", "-c", script, cluster.chief_address, stderr=subprocess.PIPE)
    assert "a fork must connect anew" in read_line(process.stdout)
    assert read_line(process.stdout) == "parent: ACCEPTED"


def stop(cluster: ProcessCluster) -> None:
    """Returns when all threads of the server stand still: one takes the signal, and until then others may still apply something."""
    cluster.signal("ps 0", signal.SIGSTOP)
    tasks = Path(f"/proc/{cluster.processes['ps 0'].pid}/task")
    wait_until(
        lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()),
        what="the process stands still",
    )


@pytest.mark.parametrize("phase", ["connecting", "pushing"])
def test_interrupt_ends_a_worker_within_two_seconds_in_a_sentence_and_not_in_our_frames(
    phase: str, stack: ExitStack, socket_dir: Path
) -> None:
    address = f"unix:{socket_dir}/nobody"
    observer = None
    if phase != "connecting":
        cluster = ProcessCluster(Plan(num_workers=2), stack, directory=socket_dir).start()
        address, observer = cluster.chief_address, cluster.observer()
    worker = talking(stack, sys.executable, "-m", "tests.processes.roles.interrupted_worker", phase, address, stderr=subprocess.PIPE)
    assert read_line(worker.stdout) == phase
    if phase == "pushing":
        stop(cluster)
        assert worker.stdin is not None
        worker.stdin.write(b"\n")
        worker.stdin.flush()
    # Long enough to be in the midst of it; nothing outside tells.
    assert not wait_until(lambda: worker.poll() is not None, timeout_s=1.0, required=False)
    start_s = time.monotonic()
    worker.send_signal(signal.SIGINT)
    assert worker.wait(10) != 0
    assert time.monotonic() - start_s < 4.5  # 2 s promised; the machine may be busy
    assert worker.stderr is not None
    words = worker.stderr.read().decode()
    sentence = "KeyboardInterrupt: interrupted while it waited for the cluster"
    assert words.rstrip().endswith(sentence) and "During handling" not in words, words
    assert len(re.findall(r'File ".*/(?:ps_protocol|worker_client)/', words)) == 1, words
    if observer is not None:
        status = observer.status()
        assert [participant.failure for participant in status.participants if participant.state == "left"] == [sentence]


def test_a_stopped_parameter_server_is_named_while_the_push_hangs(
    stack: ExitStack, socket_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = ProcessCluster(Plan(transport="grpc"), stack, directory=socket_dir).start()
    session = cluster.session()
    session.create_or_join({"w": np.zeros(3)}, optimizer=worker_client.sgd(0.1))
    stop(cluster)
    stack.callback(cluster.signal, "ps 0", signal.SIGCONT)  # first of all, or the session would wait for it
    results: list[object] = []
    pushing = threading.Thread(target=lambda: results.append(session.push({"w": np.ones(3)})), daemon=True)
    pushing.start()
    wait_until(lambda: any("no answer yet from ps 0" in record.getMessage() for record in caplog.records), what="the notice")
    assert not results
    cluster.signal("ps 0", signal.SIGCONT)
    pushing.join(20)
    assert session.wait(20)
    assert session.read()["w"] == pytest.approx(-0.1 * np.ones(3))


def test_a_stopped_parameter_server_is_named_while_the_policy_is_changed_and_it_is_changed_all_the_same(
    stack: ExitStack, socket_dir: Path
) -> None:
    cluster = ProcessCluster(Plan(), stack, directory=socket_dir).start()
    session = cluster.session()
    session.create_or_join({"w": np.zeros(3)}, optimizer=worker_client.sgd(0.1))
    stop(cluster)
    stack.callback(cluster.signal, "ps 0", signal.SIGCONT)  # first of all, or the session would wait for it
    with pytest.raises(DeadlineExceeded, match=r"sets the policy: not within 1 s: .*for the servers' new settings") as caught:
        session.set_policy(worker_client.async_policy(), timeout_s=1)
    assert caught.value.message.endswith("; the change will be made all the same")
    wait_until(lambda: "for ps 0" in session.status().waiting_for, timeout_s=30, what="the chief's notice")
    with pytest.raises(DeadlineExceeded, match=r"Waiting \d+ s for ps 0"):
        session.set_policy(worker_client.async_policy(), timeout_s=0)
    cluster.signal("ps 0", signal.SIGCONT)
    wait_until(lambda: session.status().policy.text == "async", what="the change")
    assert session.step({"w": np.ones(3)}, timeout_s=20).applied_step == 0
