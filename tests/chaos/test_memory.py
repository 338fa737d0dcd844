"""Servers whose memory ends while they train: the system refuses to give them more, or kills them. No step is lost or half done."""

import os
import resource
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Started
from tests.chaos.plan import ENDLESS, Plan
from tests.chaos.test_limits import LIMITED, saved_steps

pytestmark = pytest.mark.timeout(200)
_GROUPS = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group of version 2 whose processes share so much memory as the test says."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "memory.swap.max").write_text("0")

    def limit(self, value: str) -> None:
        """Bytes, or "max"."""
        (self.place / "memory.max").write_text(value)

    @property
    def num_killed(self) -> int:
        """Processes that the kernel has killed here since they needed more."""
        words = dict(line.split() for line in (self.place / "memory.events").read_text().splitlines())
        return int(words["oom_kill"])


def _made_group() -> Path | str:
    """Returns a group that was made for a test; or, in words, why this user may make none."""
    own = [line.partition("::")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    if not own or not (_GROUPS / "cgroup.controllers").is_file():
        return "this machine's control groups are not of version 2 alone"
    within = _GROUPS / own[0].lstrip("/")
    for parent in (within, within.parent):
        if parent.is_relative_to(_GROUPS) and "memory" in (parent / "cgroup.subtree_control").read_text().split():
            with suppress(OSError):
                place = parent / f"lockstep-{uuid.uuid4().hex[:8]}"
                place.mkdir()
                return place
    return "no control group's memory is delegated to this user; try systemd-run --user --scope -p Delegate=memory"


@pytest.fixture
def memory_group() -> Iterator[MemoryGroup]:
    place = _made_group()
    if isinstance(place, str):
        pytest.skip(place)
    yield MemoryGroup(place)
    for pid in (place / "cgroup.procs").read_text().split():  # those of the cluster, which ends after this
        with suppress(OSError):
            (place.parent / "cgroup.procs").write_text(pid)
    with suppress(OSError):
        place.rmdir()


@pytest.mark.shows("F37")
def test_a_server_that_the_kernel_kills_for_want_of_memory_costs_the_steps_since_the_checkpoint(
    start: Started, memory_group: MemoryGroup
) -> None:
    cluster = start(Plan(max_steps=ENDLESS, wrapper={"ps 1": [LIMITED, "GROUP", str(memory_group.place)]}))
    _await_save(cluster)
    memory_group.limit(str(8 << 20))
    cluster.await_death("ps 1")
    assert memory_group.num_killed
    memory_group.limit("max")
    cluster.restart("ps 1")
    _goes_on(cluster)
    assert cluster.rollbacks() == 1
    cluster.assert_as_without_faults(num_steps=cluster.finish())


@pytest.mark.parametrize("name", ["ps 1", "chief"])
@pytest.mark.shows("F37")
def test_a_role_that_gets_no_more_memory_while_it_trains_continues_or_ends_and_does_not_hang(start: Started, name: str) -> None:
    """What it needs for a save or a new connection is refused, or ends it; then it is started again, as launchers do."""
    cluster = start(Plan(max_steps=ENDLESS))
    _await_save(cluster)
    pid = cluster.processes[name].pid
    resource.prlimit(pid, resource.RLIMIT_AS, (_address_space(pid), resource.RLIM_INFINITY))
    at = cluster.reached()
    cluster.await_(lambda: cluster.reached() >= at + 40 or not cluster.running([name]), what="steps are made, or it has ended")
    if cluster.running([name]):
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    else:
        cluster.restart(name)
    _goes_on(cluster)
    cluster.assert_as_without_faults(num_steps=cluster.finish())


def _address_space(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _await_save(cluster: Cluster) -> None:
    cluster.await_(lambda: min(saved_steps(cluster), default=0) > 0, what="a step is saved")


def _goes_on(cluster: Cluster) -> None:
    at = cluster.reached()
    cluster.await_step(at + 15)
    cluster.await_(lambda: max(saved_steps(cluster), default=0) > at, what="it saves again")
