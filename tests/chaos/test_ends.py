"""Requested ends: of each role in the middle of a step, of all roles one after the other, and of `lockstep up` around them."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.chaos import script
from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Record, Started
from tests.chaos.plan import Plan
from tests.chaos.test_checkpoints import whole
from tests.support.processes.commands import TRAIN, are_gone, read_until
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(150)


@pytest.mark.shows("F30")
def test_a_chief_that_is_asked_to_end_saves_a_checkpoint_and_its_successor_continues(start: Started) -> None:
    """`scancel` of one task, a drained node. Workers and servers wait, and say so; nobody takes the training for finished."""
    cluster = start(Plan(max_steps=80, checkpoint_steps=2000))
    cluster.await_step(12)
    cluster.signal("chief", signal.SIGTERM)
    cluster.await_death("chief", code=0)
    assert int(whole(cluster)[-1].name.split("-")[1]) >= 12
    cluster.await_standstill(silence_s=3.0)
    assert cluster.running(cluster.everybody) == [name for name in cluster.everybody if name != "chief"]
    for index in range(3):
        words = cluster.text_of(f"worker {index}")
        assert re.search(r"still trying what=the chief: \S+.* elapsed_s=[12]\.", words) or "no answer yet from the chief" in words, words
    cluster.restart("chief")
    cluster.await_end()
    assert cluster.rollbacks() == 0
    assert "finished" not in cluster.text_of("chief").partition("--- life 2")[0]
    cluster.assert_as_without_faults()


@pytest.mark.shows("F30")
def test_a_whole_cluster_that_is_asked_to_end_continues_where_it_was(start: Started) -> None:
    """Compose stop, which ends workers first, then the chief, then the servers."""
    cluster = start(Plan(checkpoint_steps=2000))
    cluster.await_step(12)
    for index in range(3):
        cluster.signal(f"worker {index}", signal.SIGTERM)
        cluster.await_death(f"worker {index}", code=-signal.SIGTERM)
    told = cluster.reached()
    for name in ("chief", "ps 0", "ps 1"):
        cluster.signal(name, signal.SIGTERM)
        cluster.await_death(name, code=0)
    cluster.restart(*cluster.everybody)
    cluster.await_end()
    begun = [event["step"] for event in cluster.events() if event["event"] == "joined"]
    assert begun[-1] >= told
    cluster.assert_as_without_faults()


@pytest.mark.parametrize("has_standbys", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.shows("F30")
def test_every_role_and_worker_can_be_restarted_one_after_the_other(
    start: Started, seed: int, number: signal.Signals, has_standbys: bool
) -> None:
    """A rolling restart in any order. With durability `step`, or standbys, nothing that was told to be done is done again."""
    durability = "interval" if has_standbys else "step"
    cluster = start(Plan(max_steps=150, durability=durability, checkpoint_steps=5 if has_standbys else None, has_standbys=has_standbys))
    order = cluster.everybody
    random.Random(seed).shuffle(order)
    for name in order:
        cluster.await_step(cluster.reached() + 4)
        cluster.await_(lambda: not missing_standbys(cluster), what="all standbys are there")
        told, ended_at = cluster.reached(), cluster.signal(name, number)
        is_worker = name.startswith("worker")
        cluster.await_death(name, code=0 if number is signal.SIGTERM and not is_worker else -number)
        cluster.restart(name)
        cluster.await_step(told + 4)
        again = [event["step"] for event in cluster.events() if event["event"] == "step" and event["at"] > ended_at + 0.5]
        assert min(again, default=told) >= told - 1, f"{name}, of {order}"
    cluster.await_end()
    if has_standbys:
        assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


def missing_standbys(cluster: Cluster) -> list[str]:
    status = cluster.status()
    return ["no answer"] if status is None else [shard.standby_missing for shard in status.shards if shard.standby_missing]


@pytest.mark.parametrize("durability", ["step", "interval"])
@pytest.mark.shows("F30")
def test_everything_asked_to_end_at_once_loses_nothing_that_was_told(start: Started, durability: str) -> None:
    """A machine that is shut down, a cancelled job. The next run continues behind all that a worker was told."""
    cluster = start(Plan(durability=durability, checkpoint_steps=None if durability == "step" else 2000))
    cluster.await_step(12)
    told = cluster.reached()
    for name in cluster.everybody:
        ended_at = cluster.signal(name, signal.SIGTERM)
    cluster.await_(lambda: not cluster.running(cluster.everybody), what="all have ended")
    codes = {name: cluster.processes[name].returncode for name in cluster.everybody}
    assert {codes[name] for name in cluster.roles} == {0}, f"{codes}\n{cluster.logs()}"
    cluster.restart(*cluster.everybody)
    cluster.await_end()
    again = [event["step"] for event in cluster.events() if event["event"] == "joined" and event["at"] > ended_at]
    assert min(again) >= told
    cluster.assert_as_without_faults()


@pytest.mark.shows("F30")
def test_a_server_that_is_asked_to_end_has_a_checkpoint_saved_first(start: Started) -> None:
    """A preempted machine. What is lost is what was applied while it ended."""
    cluster = start(Plan(max_steps=80, checkpoint_steps=2000))
    cluster.await_step(12)
    cluster.signal("ps 1", signal.SIGTERM)
    cluster.await_death("ps 1", code=0)
    assert int(whole(cluster)[-1].name.split("-")[1]) >= 12
    cluster.restart("ps 1")
    cluster.await_end()
    assert cluster.rollbacks() > 0
    cluster.assert_as_without_faults()


def test_without_checkpoints_workers_may_still_come_and_go(start: Started) -> None:
    cluster = start(Plan(durability=None))
    cluster.await_step(10)
    cluster.signal("worker 1", signal.SIGTERM)
    cluster.await_death("worker 1", code=-signal.SIGTERM)
    cluster.restart("worker 1")
    cluster.await_end()
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


class Up:
    """`lockstep up` around the chaos worker."""

    def __init__(self, directory: Path, *flags: str, num_steps: int = 60) -> None:
        self.directory, self.num_steps = directory, num_steps
        self.checkpoints = directory / "checkpoints"
        worker = [sys.executable, "-m", "tests.chaos.up_worker", str(directory), "0.02"]
        command = [sys.executable, "-m", "lockstep", "up", "--ps", "2", "--workers", "3", "--lease", "3", "--max-steps", str(num_steps)]
        command += ["--run-dir", str(directory / "run"), "--checkpoint-dir", str(self.checkpoints), "--checkpoint-steps", "5"]
        self.process = subprocess.Popen(
            [*command, *flags, "--", *worker], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []

    def until(self, text: str, *, times: int = 1) -> None:
        self.lines += read_until(self.process, text, times=times)

    def find(self, *words: str) -> psutil.Process:
        return next(
            one for one in psutil.Process(self.process.pid).children(recursive=True) if all(word in one.cmdline() for word in words)
        )

    def finish(self) -> tuple[int, str]:
        # Not `communicate`, which loses what `until` has read ahead.
        assert self.process.stdout is not None
        with self.process.stdout as rest:
            out = rest.read()
        return self.process.wait(60), "\n".join([*self.lines, out])

    def assert_as_without_faults(self) -> None:
        expected = script.reference(num_steps=self.num_steps, num_workers=3)
        for index in range(3):
            script.assert_same_bytes(script.load(self.directory / f"worker-{index}.npz"), expected)


@pytest.mark.parametrize("words", [("ps_server", "1"), ("chief",), ("tests.chaos.up_worker",)])
def test_the_launcher_starts_again_what_was_killed(tmp_path: Path, words: tuple[str, ...]) -> None:
    up = Up(tmp_path, "--restart-workers", "1")
    up.until("step 12")
    up.find(*words).kill()
    code, out = up.finish()
    assert code == 0, out
    assert re.search(r"(ps 1|chief|worker \d) \(pid \d+\) failed: killed by SIGKILL", out)
    assert re.search(r"is started again, as pid \d+", out)
    up.assert_as_without_faults()


def test_the_launcher_that_is_interrupted_saves_a_last_checkpoint_and_the_next_continues_from_it(tmp_path: Path, record: Record) -> None:
    up = Up(tmp_path)
    up.until("step 17")
    up.process.send_signal(signal.SIGINT)
    interrupted_at = time.monotonic()
    code, out = up.finish()
    record("Ctrl-C to prompt, with a last checkpoint", standstill_s=time.monotonic() - interrupted_at, target_s=12.0)
    assert code == 130, out
    assert "interrupting training" in out and "SIGINT to" not in out, "the workers have heard of it"
    newest = sorted(path.parent.name for path in up.checkpoints.glob("*/MANIFEST.json"))[-1]
    assert int(newest.split("-")[1]) >= 17
    again = Up(tmp_path)
    code, out = again.finish()
    assert code == 0, out
    assert "] step 3 " not in out
    again.assert_as_without_faults()


@contextmanager
def busy_machine() -> Iterator[None]:
    """Eight processes for each processor that do nothing but compute."""
    with ExitStack() as stack:
        for _ in range(8 * (os.cpu_count() or 1)):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def test_another_interrupt_brings_the_prompt_back_in_two_seconds_on_a_busy_machine_too(tmp_path: Path, record: Record) -> None:
    for number in range(3):
        directory = tmp_path / str(number)
        worker = [sys.executable, "-c", TRAIN]
        command = [sys.executable, "-m", "lockstep", "up", "--ps", "2", "--workers", "3", "--run-dir", str(directory), "--", *worker]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            read_until(process, "step", times=20)
            everybody = psutil.Process(process.pid).children(recursive=True)
            with busy_machine():
                process.send_signal(signal.SIGINT)
                read_until(process, "interrupting training")
                process.send_signal(signal.SIGINT)
                interrupted_at = time.monotonic()
                assert process.wait(20) == 128 + signal.SIGINT
                took_s = time.monotonic() - interrupted_at
        record("a second Ctrl-C to prompt, on a busy machine", standstill_s=took_s, target_s=2.0)
        assert took_s < 2.0
        wait_until(partial(are_gone, everybody), timeout_s=20, what="no process is left")


def test_a_role_that_fails_again_and_again_ends_the_run_with_its_last_lines(tmp_path: Path) -> None:
    up = Up(tmp_path, "--max-restarts", "2", num_steps=100_000)
    up.until("step 7")
    for number in range(3):
        up.find("ps_server", "1").kill()
        up.until("ps 1 (pid", times=1)
        if number < 2:
            up.until("ps 1 is started again")
            wait_until(lambda: _serves(up), timeout_s=20, what="ps 1 is there again")
    code, out = up.finish()
    assert code == 128 + signal.SIGKILL, out
    assert "it has ended 3 times in quick succession, and is not started again" in out


def _serves(up: Up) -> bool:
    try:
        return bool(up.find("ps_server", "1"))
    except StopIteration:
        return False
