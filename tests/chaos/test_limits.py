"""Processes with too few files, descriptors, disk or time, also beside a flood: training continues, or says why it cannot."""

import itertools
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.chaos import claims
from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Started
from tests.chaos.plan import ENDLESS, Plan
from tests.chaos.test_checkpoints import whole
from tests.support.network.servers import free_ports
from tests.support.repository import ROOT

pytestmark = pytest.mark.timeout(200)
LIMITED = "tests.chaos.limited"


def limited(name: str, limit: str, value: object) -> dict[str, list[str]]:
    """The wrapper of one process."""
    return {name: [LIMITED, limit, str(value)]}


def saved_steps(cluster: Cluster) -> list[int]:
    """The steps of the whole checkpoints, but for those that are being removed."""
    return [int(path.name.split("-")[1]) for path in whole(cluster) if "." not in path.name]


def _remove(place: Path, aside: Path) -> None:
    place.rename(aside)


def _replace(place: Path, aside: Path, put: Callable[[], object]) -> None:
    """Puts something else there; the cluster may make the directory anew in between."""
    for attempt in itertools.count():
        place.rename(aside if not attempt else aside.with_name(f"aside-{attempt}"))
        with suppress(FileExistsError, IsADirectoryError):
            put()
            return


def _put_a_file_there(place: Path, aside: Path) -> None:
    _replace(place, aside, lambda: place.write_text("not a directory"))


def _link_to_nowhere(place: Path, aside: Path) -> None:
    _replace(place, aside, lambda: place.symlink_to(aside.parent / "nowhere" / "at all"))


def _link_to_another(place: Path, aside: Path) -> None:
    another = aside.with_name("another")
    another.mkdir()
    _replace(place, aside, lambda: place.symlink_to(another))


@pytest.mark.parametrize("take_away", [_remove, _put_a_file_there, _link_to_nowhere, _link_to_another])
@pytest.mark.shows("F19")
def test_training_continues_without_its_checkpoint_directory_and_saves_once_it_is_back(
    start: Started, take_away: Callable[[Path, Path], None]
) -> None:
    """And what was saved before it was taken away is whole still."""
    cluster = start(Plan(max_steps=ENDLESS))
    # Not of the first values any more.
    cluster.await_(lambda: min(saved_steps(cluster), default=0) > 0, what="there are checkpoints")
    place, aside = cluster.checkpoints, cluster.checkpoints.with_name("aside")
    take_away(place, aside)
    cluster.await_step(cluster.reached() + 15)
    assert cluster.rollbacks() == 0
    saved = claims.assert_checkpoints_are_of_one_step_each(aside, num_workers=3, scratch=cluster.directory)
    assert saved
    # A directory that is simply gone is made again.
    if place.is_symlink() or place.is_file():
        place.unlink()
        place.mkdir(exist_ok=True)  # the cluster may have made it anew
    at = cluster.reached()
    cluster.await_(lambda: max(saved_steps(cluster), default=0) > at, what="it saves again")
    cluster.kill("ps 0")
    cluster.restart("ps 0")
    cluster.await_step(cluster.reached() + 10)
    cluster.assert_as_without_faults(num_steps=cluster.finish())


def test_roles_whose_output_cannot_be_written_train_all_the_same(start: Started) -> None:
    """Its disk is full: /dev/full takes nothing."""
    wrapper = {name: [LIMITED, "LOG", "/dev/full"] for name in ("ps 0", "ps 1", "chief")}
    cluster = start(Plan(wrapper=wrapper))
    cluster.await_step(12)
    cluster.kill("ps 1")
    cluster.restart("ps 1")
    cluster.await_end()
    cluster.assert_as_without_faults()
    claims.assert_checkpoints_are_of_one_step_each(cluster.checkpoints, num_workers=3, scratch=cluster.directory)


def test_a_server_with_a_file_size_limit_below_a_checkpoint_reports_that_and_keeps_training(start: Started) -> None:
    """Its log is a file as well, and soon too long."""
    cluster = start(Plan(wrapper=limited("ps 1", "FSIZE", 600)))
    cluster.await_end()
    assert "File too large" in cluster.text_of("chief"), cluster.logs()
    assert not whole(cluster)
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults()


def test_a_server_with_few_descriptors_saves_and_shares_memory_beside_strangers_that_want_them_all(start: Started) -> None:
    """Strangers come to the port of its calls and to that of its data, again and again, and say nothing."""
    cluster = start(Plan(max_steps=ENDLESS, port=free_ports(), num_ps=1, wrapper=limited("ps 0", "NOFILE", 200)))
    cluster.await_(lambda: len(whole(cluster)) >= 1, what="there is a checkpoint")
    host, _, port = cluster.address("ps 0").rpartition(":")
    own = cluster.processes["ps 0"].pid
    ports = {int(port), *_ports_of(own)}
    at, end = cluster.reached(), time.monotonic() + 8
    with ExitStack() as stack:
        while time.monotonic() < end:
            for one in ports:
                with suppress(OSError):
                    stack.enter_context(socket.create_connection((host, one), timeout=0.2))
            time.sleep(0.005)  # the strangers' own pace: without, they fill the processor and not the descriptors
        assert max(saved_steps(cluster)) > at, cluster.logs()
        assert "Too many open files" not in cluster.text_of("chief") + cluster.text_of("ps 0")
    cluster.assert_as_without_faults(num_steps=cluster.finish())


def _ports_of(pid: int) -> set[int]:
    """Where a process listens on TCP."""
    inodes = {path.readlink().name for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


@pytest.mark.parametrize("kind", ["ping", "calls"])
@pytest.mark.parametrize("name", ["ps 0", "chief", "worker 0"])
def test_a_role_that_is_stopped_beside_a_flood_continues_where_it_was(start: Started, name: str, kind: str) -> None:
    """The flood is at the role itself, and at the chief where a worker is stopped."""
    cluster = start(Plan(max_steps=ENDLESS, num_ps=1, num_workers=2, port=free_ports(), lease_s=10.0, transport="grpc"))
    cluster.await_step(20)
    target = cluster.address("chief" if name.startswith("worker") else name)
    command = [sys.executable, "-m", "tests.support.network.floods", target, kind, "--connections", "2", "--seconds", "8"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as flood:
        cluster.signal(name, signal.SIGSTOP)
        time.sleep(5)  # how long the role is stopped: what is tried
        cluster.signal(name, signal.SIGCONT)
        at = cluster.reached()
        cluster.await_(lambda: cluster.reached() >= at + 20, what="it continues")
        words, _ = flood.communicate(timeout=60)
    assert json.loads(words)["connections"] >= 2
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults(num_steps=cluster.finish())
