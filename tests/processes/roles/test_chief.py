"""`lockstep chief` as a process: exit codes, words, signals, announcement."""

import contextlib
import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from chief.page.story import unpack
from ps_protocol.process.listening import end_beside, page_beside
from ps_protocol.roles.chief import ClusterState
from ps_protocol.roles.shard import KeepStoryRequest
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.shard import GrpcShard
from tests.support.chief.running_chief import Worker, parameter_server
from tests.support.network.servers import unused_address
from tests.support.processes.commands import lockstep_here
from tests.support.processes.processes import announced, end_of, speaking
from tests.support.waiting import wait_until


def chief(*flags: str) -> AbstractContextManager["subprocess.Popen[str]"]:
    return speaking("-m", "chief", *flags)


def test_a_signal_ends_the_chief_with_zero_and_its_successor_continues(tmp_path: Path) -> None:
    with parameter_server() as server, chief("--ps", server.address, "--workers", "1", "--announce", str(tmp_path / "a")) as process:
        client = GrpcChief(announced(process, tmp_path / "a"))
        with Worker(client) as worker:
            worker.join_model()
            assert worker.wait(worker.push()).step == 1
            start = time.monotonic()
            process.send_signal(signal.SIGTERM)
            code, words = end_of(process)
            assert time.monotonic() - start < 5.0  # 2 s promised; the machine may be busy
        client.close()
        assert code == 0, words
        assert "SIGTERM: this chief ends, and leaves the training to its successor" in words
        assert "Traceback" not in words
        assert not end_beside(tmp_path / "a").exists(), "training has not ended"
        # Without --takeover: it waits until the server has not heard the first one for a while.
        with chief("--ps", server.address, "--workers", "1", "--announce", str(tmp_path / "b")) as second:
            client = GrpcChief(announced(second, tmp_path / "b"))
            wait_until(lambda: client.status().state is ClusterState.TRAINING, timeout_s=20, what="the second chief continues")
            assert client.status().global_step == 1
            client.close()


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


def test_a_wrong_flag_is_one_line_and_exit_code_two() -> None:
    with chief("--ps", "127.0.0.1:1", "--replicas-to-aggregate", "0") as process:
        assert end_of(process) == (2, "lockstep chief: --replicas-to-aggregate: got '0', want a whole number from 1 to 100000\n")


def test_a_checkpoint_directory_that_cannot_be_made_is_one_line_and_exit_code_two() -> None:
    with chief("--ps", "127.0.0.1:1", "--workers", "1", "--checkpoint-dir", "/dev/null/x") as process:
        said = "lockstep chief: --checkpoint-dir: cannot write to /dev/null/x: there is a file; choose another directory\n"
        assert end_of(process) == (2, said)


def test_the_page_of_a_new_chief_shows_the_past_of_one_that_was_killed(tmp_path: Path) -> None:
    def page(name: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{page_beside(tmp_path / name).read_text().strip()}api/cluster", timeout=20) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def kinds(name: str) -> list[str]:
        return [event[3] for event in page(name)["events"]]

    with parameter_server() as server, contextlib.closing(GrpcShard(server.address, index=0, cluster="lockstep")) as shard:
        flags = ("--ps", server.address, "--workers", "1", "--page", "127.0.0.1:0", "--announce")
        with chief(*flags, str(tmp_path / "a")) as first:
            client = GrpcChief(announced(first, tmp_path / "a"))
            with Worker(client) as worker:
                worker.join_model()
                for _ in range(3):
                    worker.wait(worker.push())
                    wait_for_points(lambda: page("a")["speed"])
                wait_until(
                    lambda: unpack(shard.call(KeepStoryRequest(story=b""))).counts.accepted == 3,
                    timeout_s=30,
                    what="the page's past is kept",
                )
                kept = unpack(shard.call(KeepStoryRequest(story=b"")))
                first.kill()
                first.wait()
            client.close()
        with chief(*flags, str(tmp_path / "b"), "--takeover") as second:
            announced(second, tmp_path / "b")
            wait_until(lambda: "joined" in kinds("b"), timeout_s=30, what="the past is there")
            seen = page("b")
            assert [event[4] for event in seen["events"]][: len(kept.events)] == [event.text for event in kept.events]
            assert kinds("b").index("joined") < kinds("b").index("chief"), "the coming of the new chief is after it"
            assert [point[0] for point in seen["speed"]][: len(kept.speed) - 1] == [one.at for one in kept.speed][1:]
            assert seen["accepted"] == 3
            with contextlib.closing(GrpcChief(announced(second, tmp_path / "b"))) as client:
                status = client.status()
            assert (status.num_accepted, status.counts.accepted) == (0, 3), "a counter of its own, and what people read"
            said = lockstep_here("status", "--chief", announced(second, tmp_path / "b")).stdout
            assert "contributions since the start: 3 accepted" in said


def wait_for_points(points: Callable[[], list[Any]]) -> None:
    before = len(points())
    wait_until(lambda: len(points()) > before, timeout_s=20, what="the curve has another point")
