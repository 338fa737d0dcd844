"""`python -m chief` as a process: exit codes, words, signals, announcement."""

import signal
import socket
import subprocess
import time
from contextlib import AbstractContextManager
from pathlib import Path

from ps_protocol.roles.chief import ClusterState
from ps_protocol.rpc.chief import GrpcChief
from tests.support.chief.running_chief import Worker, parameter_server
from tests.support.network.servers import unused_address
from tests.support.processes.processes import announced, end_of, speaking
from tests.support.waiting import wait_until


def chief(*flags: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    return speaking("-m", "chief", *flags)


def test_a_signal_finishes_training_for_all_and_ends_with_zero(tmp_path: Path) -> None:
    with parameter_server() as server, chief("--ps", server.address, "--workers", "1", "--announce", str(tmp_path / "a")) as process:
        client = GrpcChief(announced(process, tmp_path / "a"))
        with Worker(client) as worker:
            worker.join_model()
            start = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert server.wait() == "the chief got SIGTERM"
            code, words = end_of(process)
            assert time.monotonic() - start < 5.0  # 2 s promised; the machine may be busy
        client.close()
        assert code == 0, words
        assert "Traceback" not in words


def test_a_chief_names_the_server_that_it_still_looks_for_and_ends_at_a_signal() -> None:
    absent = unused_address()
    with chief("--ps", absent, "--workers", "1") as process:
        assert process.stderr is not None
        wanted = f"waiting for ps 0 at {absent}"
        start = 0.0
        for line in process.stderr:
            start = start or time.monotonic()
            if wanted in line:
                break
        assert "connection refused; is it started?" in line
        assert time.monotonic() - start < 4.0  # 2 s promised; the machine may be busy
        process.send_signal(signal.SIGINT)
        code, words = end_of(process)
    assert (code, "Traceback" in words) == (0, False), words


def test_an_address_that_is_taken_is_refused_with_exit_code_two() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with chief("--ps", "127.0.0.1:1", "--workers", "1", "--address", address) as process:
            code, words = end_of(process)
    assert code == 2
    assert f"chief: cannot listen at {address}: another process listens there" in words.splitlines()[-1]


def test_a_killed_chief_is_followed_by_one_that_has_its_model(tmp_path: Path) -> None:
    with parameter_server() as server:
        with chief("--ps", server.address, "--workers", "1", "--announce", str(tmp_path / "a")) as first:
            client = GrpcChief(announced(first, tmp_path / "a"))
            with Worker(client) as worker:
                worker.join_model()
                assert worker.wait(worker.push()).step == 1
            client.close()
            first.kill()
            first.wait(10)
        with chief("--ps", server.address, "--workers", "1", "--announce", str(tmp_path / "b"), "--takeover") as second:
            client = GrpcChief(announced(second, tmp_path / "b"))
            wait_until(lambda: client.status().state is ClusterState.TRAINING, timeout_s=20, what="the second chief continues")
            status = client.status()
            client.close()
            assert (status.global_step, status.epoch, status.chief_incarnation) == (1, 1, 2)
            second.send_signal(signal.SIGTERM)
            assert end_of(second)[0] == 0


def test_a_wrong_flag_is_one_line_and_exit_code_two() -> None:
    with chief("--ps", "127.0.0.1:1", "--replicas-to-aggregate", "0") as process:
        assert end_of(process) == (2, "chief: --replicas-to-aggregate: got '0', want a whole number from 1 to 100000\n")


def test_a_checkpoint_directory_that_cannot_be_made_is_one_line_and_exit_code_two() -> None:
    with chief("--ps", "127.0.0.1:1", "--workers", "1", "--checkpoint-dir", "/dev/null/x") as process:
        said = "chief: --checkpoint-dir: cannot write to /dev/null/x: there is a file; choose another directory\n"
        assert end_of(process) == (2, said)
