"""A parameter server, a chief and two workers as processes, each of which may be killed and started again. Asserts nothing by itself."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from ps_protocol.errors import PsError
from ps_protocol.roles.chief import ClusterStatus
from ps_protocol.rpc.chief import GrpcChief
from tests.support.processes.processes import Process, start
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

WORKERS = ("worker 0", "worker 1")
EVERYBODY = ("ps", "chief", *WORKERS)


class Cluster:
    """`program` is what each worker runs, with its words; `chief`: the chief's flags. Checkpoints lie in `directory`."""

    def __init__(self, directory: Path, stack: ExitStack, *, program: Sequence[object], chief: Sequence[object]) -> None:
        self._directory, self._stack, self._program, self._flags = directory, stack, program, chief
        self.address = f"unix:{directory}/chief"
        self._client = GrpcChief(self.address)
        stack.callback(self._client.close)
        self.processes = {name: self._start(name) for name in EVERYBODY}

    def restart(self, *names: str) -> None:
        """Kills these, and starts them again. A chief whose servers live on takes over from the killed one."""
        for name in names:
            self.processes[name].kill()
            self.processes[name].wait()
        for name in names:
            self.processes[name] = self._start(name, *(["--takeover"] if name == "chief" and "ps" not in names else []))

    def reach(self, is_there: Callable[[ClusterStatus], bool], what: str) -> ClusterStatus:
        """Waits until the chief reports that, and returns its report; it may be away meanwhile."""
        found: list[ClusterStatus] = []

        def has_come() -> bool:
            assert all(self.processes[worker].poll() in (None, 0) for worker in WORKERS), "a worker has failed"
            try:
                found.append(self._client.status())
            except PsError:
                return False
            return is_there(found[-1])

        wait_until(has_come, timeout_s=40, what=what)
        return found[-1]

    def await_workers(self) -> list[int]:
        """Waits until the workers have ended; returns their exit codes."""
        return [self.processes[worker].wait(60) for worker in WORKERS]

    def _start(self, name: str, *options: str) -> Process:
        role, _, index = name.partition(" ")
        if role == "worker":
            variables = {"PYTHONPATH": str(ROOT), "LOCKSTEP_CHIEF": self.address, "LOCKSTEP_WORKER_INDEX": index}
            return start(self._stack, *self._program, environment=variables)
        own = {"ps": ("ps_server", "--index", 0), "chief": ("chief", "--ps", f"unix:{self._directory}/ps", "--lease", 1.5, *self._flags)}
        place = ("--address", f"unix:{self._directory}/{role}", "--checkpoint-dir", self._directory / "checkpoints")
        return start(self._stack, "-m", *own[role], *place, *options, environment={"PYTHONPATH": str(ROOT)})
