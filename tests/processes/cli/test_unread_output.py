"""Output of a launcher or a role without a reader: training continues, failures are handled, and Ctrl-C ends everything."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil

import worker_client
from tests.support.processes.commands import TRAIN, are_gone, descendants
from tests.support.processes.processes import announced, start_role
from tests.support.processes.unread import Unread, full_pipe, stopped_terminal
from tests.support.processes.warm import WarmPopen
from tests.support.waiting import wait_until

# What Ctrl-C may take: 2 s are promised; other tests keep the machine busy. It took for ever.
END_S = 6.0
# Fifty steps a second, each with more words than a terminal takes; three of them fill a pipe.
TALKATIVE = "import threading\n" + TRAIN.replace('print("step"', 'threading.Event().wait(0.02); print("talk " * 5_000); print("step"')


@contextmanager
def up(tmp_path: Path, *flags: str, worker: str, output: Unread) -> Iterator["subprocess.Popen[bytes]"]:
    script = tmp_path / "train.py"
    script.write_text(worker)
    command = [sys.executable, "-m", "lockstep", "up", *flags, "--run-dir", str(tmp_path / "run"), "--", sys.executable, str(script)]
    out, environment = output.descriptor, {**os.environ, "TERM": "xterm"}
    with WarmPopen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def running(process: "subprocess.Popen[bytes]", module: str) -> list[psutil.Process]:
    found = []
    for one in descendants(process):
        try:
            if module in one.cmdline() and "-m" in one.cmdline():
                found.append(one)
        except psutil.Error:  # gone meanwhile
            continue
    return found


def last_step(log: Path) -> int:
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return max((int(line.split()[1]) for line in lines if line.startswith("step ") and line.split()[1:]), default=0)


def test_killed_chief_is_restarted_and_a_signal_ends_all(tmp_path: Path) -> None:
    with stopped_terminal() as output, up(tmp_path, "--workers", "1", worker=TALKATIVE, output=output) as process:
        log = tmp_path / "run" / "logs" / "worker-0.log"
        wait_until(lambda: last_step(log) >= 10, timeout_s=30.0, what="ten steps are made")
        (chief,) = running(process, "chief")
        chief.kill()
        wait_until(lambda: [one for one in running(process, "chief") if one.pid != chief.pid], timeout_s=10.0, what="there is a new chief")
        step = last_step(log)
        wait_until(lambda: last_step(log) > step + 3, timeout_s=20.0, what="training continues")
        everybody = descendants(process)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(20.0) == 130
        assert time.monotonic() - begin < END_S
        assert are_gone(everybody)


def test_a_late_reader_sees_how_many_lines_were_dropped_and_the_reason_of_the_end(tmp_path: Path) -> None:
    with stopped_terminal() as output, up(tmp_path, "--workers", "1", worker=TALKATIVE, output=output) as process:
        log = tmp_path / "run" / "logs" / "worker-0.log"
        wait_until(lambda: last_step(log) >= 80, timeout_s=30.0, what="more is said than is kept")
        output.resume()
        parts: list[str] = []

        def has_said(words: str) -> bool:
            parts.append(output.read())
            return words in "".join(parts)

        wait_until(lambda: has_said("dropped: nobody read the output"), timeout_s=20.0, what="the reader is told what is missing")
        (worker_process,) = [one for one in descendants(process) if str(tmp_path / "train.py") in one.cmdline()]
        worker_process.kill()
        wait_until(lambda: has_said("ending all") and process.poll() is not None, timeout_s=20.0, what="the end is told")
        assert "worker 0" in "".join(parts) and "killed by SIGKILL" in "".join(parts)
        assert process.returncode == 128 + signal.SIGKILL


def test_roles_with_a_blocked_log_train_and_end(tmp_path: Path) -> None:
    with full_pipe() as output, ExitStack() as stack, open(os.dup(output.descriptor), "wb") as log:
        sockets = [f"unix:{tmp_path}/{name}.sock" for name in ("ps", "chief")]
        server = start_role(stack, "ps_server", "--index", 0, "--address", sockets[0], announce=tmp_path / "ps", log=log)
        flags = ["--address", sockets[1], "--ps", sockets[0], "--workers", "1", "--max-steps", "20"]
        chief = start_role(stack, "chief", *flags, announce=tmp_path / "chief", log=log)
        address = [announced(process, tmp_path / name) for process, name in ((server, "ps"), (chief, "chief"))][1]
        with worker_client.connect(address, worker_index=0, timeout_s=20.0) as session:
            session.create_or_join({"w": np.zeros(4)}, optimizer=worker_client.sgd(0.5))
            while not session.is_finished:
                session.step({"w": np.ones(4)})
            assert session.read()["w"][0] == -10.0
        assert [process.wait(20.0) for process in (chief, server)] == [0, 0]


def test_signal_ends_a_role_with_a_blocked_log(tmp_path: Path) -> None:
    with stopped_terminal() as output, ExitStack() as stack, open(os.dup(output.descriptor), "wb") as log:
        server = start_role(stack, "ps_server", "--index", 0, "--address", "127.0.0.1:0", announce=tmp_path / "ps", log=log)
        announced(server, tmp_path / "ps")
        begin = time.monotonic()
        server.send_signal(signal.SIGTERM)
        assert server.wait(20.0) == 0
        assert time.monotonic() - begin < END_S
