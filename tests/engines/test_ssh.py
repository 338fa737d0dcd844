"""`lockstep up --hosts` over real ssh to hosts of their own trains on, through the loss of each and a link that is cut for a while."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.demo import Demo
from tests.engines.ssh import SshHosts, ssh_hosts, why_no_ssh
from tests.support.waiting import wait_until

if why := why_no_ssh():
    pytest.skip(f"no hosts with ssh here: {why}", allow_module_level=True)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    (tmp_path / "ssh").mkdir()
    with ssh_hosts(3, tmp_path / "ssh") as made:
        yield made


class Run(Demo):
    """The demo on hosts 1 and 2, or all."""

    def __init__(self, process: "subprocess.Popen[bytes]", out: Path) -> None:
        super().__init__(out)
        self._process = process

    def await_end(self) -> None:
        assert self._process.wait(150) == 0, self.out


@contextmanager
def demo(hosts: SshHosts, directory: Path, *flags: str, names: tuple[str, ...] = ("h1", "h2", "h3"), pace: str = "0.05") -> Iterator[Run]:
    at = ",".join(hosts.net.address(name) for name in names)
    words = [str(Path(sys.executable).parent / "lockstep"), "demo", "--hosts", at, "--pace", pace, "--lease", "3", *flags]
    command = [*words, "--checkpoint-dir", str(directory / "kept"), "--checkpoint-steps", "50"]
    with (directory / "out").open("wb") as out:
        process = subprocess.Popen(command, cwd=directory, env=hosts.environment, stdout=out, stderr=out)
    try:
        yield Run(process, directory / "out")
    finally:
        process.kill()
        process.wait()


def left_on(hosts: SshHosts, name: str) -> str:
    return hosts.run(name, "ps", "-eo", "args").stdout


def test_the_digits_train_on_all_hosts_and_nothing_is_left_there(hosts: SshHosts, tmp_path: Path) -> None:
    with demo(hosts, tmp_path, pace="0.01") as run:
        run.await_end()
    run.assert_trained()
    assert {name for _, name in re.findall(r"worker (\d) joined on (\w+)", run.out)} == {"h1", "h2", "h3"}
    for name in hosts.net.names:
        wait_until(lambda name=name: "lockstep" not in left_on(hosts, name), what=f"nothing is left on {name}", timeout_s=20)  # type: ignore[misc]


@pytest.mark.parametrize(("name", "what"), [("h3", "worker 2"), ("h2", "ps 1"), ("h1", "chief")])
def test_training_goes_on_within_ten_seconds_of_the_notice_that_a_host_is_lost(
    hosts: SshHosts, tmp_path: Path, name: str, what: str
) -> None:
    with demo(hosts, tmp_path, "--max-steps", "1000", "--restart-workers", "9") as run:
        run.await_step(60)
        hosts.net.kill(name)
        wait_until(lambda: f"host {hosts.net.address(name)} is lost" in run.out, what="it is noticed", timeout_s=60)
        noticed_at, before = time.monotonic(), run.out

        def goes_on() -> bool:  # worker 0 says its step once a second, unless it was there
            later = run.out.removeprefix(before)
            return f"{what} is started again" in run.out and re.search(r"\[worker 0\] step |state=TRAINING", later) is not None

        wait_until(goes_on, what=f"it goes on\n{run.out}", timeout_s=11)
        print(f"{what}: went on {time.monotonic() - noticed_at:.1f} s after the notice")
        run.await_end()
    run.assert_trained()


@pytest.mark.parametrize("rate", ["1gbit", "100mbit"])
def test_a_link_that_is_cut_for_twenty_seconds_costs_no_step_and_is_named_within_three(hosts: SshHosts, tmp_path: Path, rate: str) -> None:
    hosts.net.limit("h2", rate)
    flags = ("--max-steps", "300", "--lease", "60", "--backup-workers", "0", "--restart-workers", "9")
    with demo(hosts, tmp_path, *flags, names=("h1", "h2")) as run:
        run.await_step(60)
        hosts.net.cut("h2")
        cut_at, step, before = time.monotonic(), run.step, run.out
        wait_until(lambda: re.search("(?i)waiting|no answer", run.out.removeprefix(before)), what="it is named", timeout_s=15)
        print(f"named after {time.monotonic() - cut_at:.1f} s")
        threading.Event().wait(max(0.0, cut_at + 20 - time.monotonic()))
        hosts.net.join("h2")
        wait_until(lambda: run.step > step + 20, what=f"it goes on\n{run.out}", timeout_s=40)
        print(f"went on {time.monotonic() - cut_at - 20:.1f} s after the link was there again")
        run.await_end()
    run.assert_trained()
    assert "rolled back" not in run.out and "is started again" not in run.out, run.out
