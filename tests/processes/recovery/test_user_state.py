"""State of workers' programs over killed processes: it matches the step at every step, and a cluster resumes with it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ps_protocol.checkpoint.catalog import list_checkpoints, open_storage
from ps_protocol.errors import PsError
from ps_protocol.roles.chief import ClusterStatus
from ps_protocol.rpc.chief import GrpcChief
from tests.support.processes.processes import Process, start
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

WORKER = Path(__file__).with_name("state_worker.py")
NUM_STEPS = 400


class StateCluster:
    """A server, a chief and two workers as processes, and a checkpoint now and then."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self._client = GrpcChief(f"unix:{directory}/chief")
        stack.callback(self._client.close)
        self.begin()

    def begin(self) -> None:
        self.server, self.chief = self.start_server(), self.start_chief()
        self.workers = [self.start_worker(index) for index in range(2)]

    def start_server(self) -> Process:
        return self._start("-m", "ps_server", "--index", "0", "--address", f"unix:{self._directory}/ps", *self._place)

    def start_chief(self, *options: str) -> Process:
        flags = ("--workers", "2", "--lease", "1.5", "--checkpoint-steps", "25", "--max-steps", str(NUM_STEPS), *options)
        return self._start(
            "-m", "chief", "--address", f"unix:{self._directory}/chief", "--ps", f"unix:{self._directory}/ps", *flags, *self._place
        )

    def start_worker(self, index: int) -> Process:
        variables = {"LOCKSTEP_CHIEF": f"unix:{self._directory}/chief", "LOCKSTEP_WORKER_INDEX": str(index)}
        return self._start(str(WORKER), str(NUM_STEPS), **variables)

    def reach(self, is_there: Callable[[ClusterStatus], bool], what: str) -> ClusterStatus:
        """Waits until the chief reports that; it may be away meanwhile."""
        found: list[ClusterStatus] = []

        def has_come() -> bool:
            assert all(worker.poll() in (None, 0) for worker in self.workers), "a worker has failed"
            try:
                found.append(self._client.status())
            except PsError:
                return False
            return is_there(found[-1])

        wait_until(has_come, timeout_s=40, what=what)
        return found[-1]

    def go_on(self, num_steps: int) -> None:
        begin = self.reach(lambda status: True, "the chief").global_step
        self.reach(lambda status: status.global_step >= begin + num_steps, f"{num_steps} more steps")

    @property
    def _place(self) -> tuple[str, str]:
        return "--checkpoint-dir", str(self._directory / "checkpoints")

    def _start(self, *command: str, **variables: str) -> Process:
        return start(self._stack, *command, environment={"PYTHONPATH": str(ROOT), **variables})


@pytest.fixture
def cluster(socket_dir: Path) -> Iterator[StateCluster]:
    with ExitStack() as stack:
        yield StateCluster(socket_dir, stack)


def killed(process: Process) -> None:
    process.kill()
    process.wait()


def test_the_state_is_that_of_the_step_whatever_is_killed_and_after_a_resume(cluster: StateCluster, socket_dir: Path) -> None:
    cluster.go_on(30)
    killed(cluster.workers[0])
    cluster.workers[0] = cluster.start_worker(0)
    cluster.go_on(40)
    killed(cluster.server)
    cluster.server = cluster.start_server()
    cluster.reach(lambda status: status.epoch == 2, "the new epoch")
    cluster.go_on(30)
    killed(cluster.chief)
    cluster.chief = cluster.start_chief("--takeover")
    cluster.go_on(30)
    killed(cluster.chief)
    killed(cluster.workers[1])
    cluster.chief, cluster.workers[1] = cluster.start_chief("--takeover"), cluster.start_worker(1)
    cluster.go_on(30)
    for process in (*cluster.workers, cluster.chief, cluster.server):
        killed(process)
    cluster.begin()
    assert [worker.wait(60) for worker in cluster.workers] == [0, 0]
    whole, _ = list_checkpoints(open_storage(str(socket_dir / "checkpoints")), cluster="lockstep")
    last = whole[-1].checkpoint
    assert last.step == NUM_STEPS
    assert [f'"n":{NUM_STEPS},' in one.json for one in last.attached.user_states] == [True, True]
