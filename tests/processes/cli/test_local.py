"""Commands that find the only cluster of this machine by themselves, or list them; and `lockstep top` in a terminal."""

import contextlib
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import worker_client
from ps_protocol.errors import PsError
from tests.support.processes.commands import TRAIN, Ended, lockstep_here, read_until, up
from tests.support.waiting import wait_until

SLOWLY = TRAIN.replace("session.step({", "__import__('time').sleep(0.02); session.step({").replace(
    """print("step", session.local_step, flush=True)""", "pass"
)
SLOWLY = SLOWLY.replace("np.ones(4)})", "np.ones(4)}, metrics={'loss': 0.25})")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, runtime: Path) -> Iterator[list[str]]:
    """A cluster on ports, whose callers need its file of tokens; the lines that it has printed."""
    directory = tmp_path_factory.mktemp("run") / "run"
    with up("--workers", "2", "--tcp", worker=SLOWLY, run_dir=directory, XDG_RUNTIME_DIR=str(runtime)) as process:
        lines = read_until(process, "worker 1 joined")
        try:
            yield lines
        finally:
            process.terminate()
            process.communicate(timeout=30)


def here(runtime: Path, *arguments: str) -> Ended:
    return lockstep_here(*arguments, XDG_RUNTIME_DIR=str(runtime))


def test_the_only_cluster_is_found(running: list[str], runtime: Path) -> None:
    assert "policy sync" in here(runtime, "status").stdout
    assert "cluster 'up-" in here(runtime, "why").stdout
    assert here(runtime, "policy").stdout.startswith("policy sync")


def test_where_its_address_is_given_its_tokens_are_found(running: list[str], runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (address,) = re.findall(r"lockstep status --chief (127\.0\.0\.1:\d+)", "\n".join(running))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("LOCKSTEP_CHIEF", address)
    for command in (["status"], ["set", "learning_rate=0.5"], ["policy"]):
        answer = lockstep_here(*command)
        assert answer.returncode == 0, answer.stderr
    with worker_client.observe() as observer:
        assert observer.status().total_num_replicas == 2
    with pytest.raises(PsError, match=r"2 of 2 worker places taken.*start it again with --workers 3"):
        worker_client.connect(timeout_s=1.0)


def test_lockstep_ls_lists_the_running_cluster(running: list[str], runtime: Path) -> None:
    listed = here(runtime, "ls").stdout
    assert "train.py" in listed and "http://127.0.0.1:" in listed


def test_lockstep_ls_prints_an_address_of_the_page_whose_token_is_accepted(running: list[str], runtime: Path) -> None:
    ((printed,),) = [re.findall(r"http://\S+", here(runtime, "ls", "--token").stdout)]
    assert any(line.endswith(printed) for line in running), "it is the address that `up` has printed"
    url, _, token = printed.partition("#token=")
    request = urllib.request.Request(f"{url}api/cluster", headers={"Authorization": f"Bearer {token}"})

    def is_training() -> bool:
        with urllib.request.urlopen(request, timeout=10) as response:
            return b'"state":"training"' in response.read()

    wait_until(is_training, what="the page says that it trains")
    assert f"its page, in a browser: {url}" in here(runtime, "status").stdout


def test_with_several_clusters_the_commands_ask_which_one(running: list[str], runtime: Path) -> None:
    (path,) = (runtime / "lockstep").glob("*.json")
    other = path.with_name("other.json")
    other.write_text(path.read_text())
    try:
        for command in ("status", "why", "top"):
            refused = here(runtime, command)
            assert refused.returncode == 2
            assert "2 clusters of yours are running here" in refused.stderr
            assert "--chief 127.0.0.1:" in refused.stderr
    finally:
        other.unlink()


def test_without_a_running_cluster_the_commands_say_so(tmp_path: Path) -> None:
    refused = here(tmp_path, "status")
    assert refused.returncode == 2
    assert "none of yours that `lockstep up` started is running here; give --chief ADDRESS or set LOCKSTEP_CHIEF" in refused.stderr
    assert "no cluster of yours" in here(tmp_path, "ls").stdout


def test_top_without_a_terminal_prints_once(running: list[str], runtime: Path) -> None:
    printed = here(runtime, "top")
    assert printed.returncode == 0, printed.stderr
    assert "steps/s" in printed.stdout and "worker 1" in printed.stdout and "\x1b" not in printed.stdout
    has_loss = re.compile(r"^loss +0\.25 ", re.MULTILINE)
    wait_until(lambda: bool(has_loss.search(here(runtime, "top").stdout)), timeout_s=30, what="what workers report of some steps")


def screen_until(descriptor: int, pattern: bytes, *, timeout_s: float = 20.0) -> bytes:
    seen, until = b"", time.monotonic() + timeout_s
    while not re.search(pattern, seen):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        assert ready, seen.decode(errors="replace")
        with contextlib.suppress(OSError):  # the other end has closed
            data = os.read(descriptor, 1 << 16)
            assert data, seen.decode(errors="replace")
            seen += data
    return seen


def test_top_lives_in_a_terminal_and_leaves_it_as_it_was(running: list[str], runtime: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 100))
    before = termios.tcgetattr(theirs)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "TERM": "xterm"}
    command = [sys.executable, "-m", "lockstep", "top"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        try:
            seen = screen_until(ours, rb"(?s)\x1b\[\?1049h.*worker 1.*\x1b\[H.*worker 1")
            assert b"up-" in seen
            os.write(ours, b"q")
            screen_until(ours, rb"\x1b\[\?1049l")
            assert process.wait(10) == 0
        finally:
            process.kill()
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)
