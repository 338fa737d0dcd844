"""A cluster of real processes that a test may kill, stop and start again one by one. Knows how they are started; asserts no behaviour."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from tests.support.cluster.shape import ServingCluster, Shape
from tests.support.processes.processes import kill
from tests.support.processes.warm import WarmPopen
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

KILLED = -int(signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Shape):
    """What else processes can be. `durability` None: no checkpoints. `failpoints`: by name, of its first life only."""

    is_warm: bool = True  # forks of a process that has imported everything
    program: Sequence[str] = ()  # what each worker runs as `python …`; it finds its cluster and index in its environment
    checkpoint_steps: int | None = None
    durability: str | None = None
    has_standbys: bool = False  # "standby 0" beside "ps 0", and so on
    failpoints: Mapping[str, str] | None = None
    transport: str = "auto"
    history: bool = False
    wrapper: Mapping[str, Sequence[str]] | None = None  # by name: what `python -m` runs instead, before the module's name
    port: int | None = None  # the chief's on loopback, the servers' are the next ones; None: Unix sockets
    environment: Mapping[str, Mapping[str, str]] | None = None  # by role: "ps", "chief", "worker"
    access: Access = DEFAULT_ACCESS  # how the test itself calls the chief


class ProcessCluster(ServingCluster):
    """Names are "ps 0", "standby 0", "chief", "worker 0"; a test may start "relay 0". Everything ends with `stack`.

    Logs and checkpoints lie in `directory`. `sockets` is a directory with a short path.
    """

    def __init__(self, plan: Plan, stack: ExitStack, *, directory: Path, sockets: Path | None = None) -> None:
        self.plan = plan
        self.directory, self.sockets = directory, sockets or directory
        self.checkpoints, self.history = directory / "checkpoints", directory / "history"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.lives: dict[str, int] = {}
        super().__init__(stack, chief_address=self.address("chief"), transport=plan.transport, access=plan.access)
        directory.mkdir(parents=True, exist_ok=True)

    def address(self, name: str) -> str:
        """Where a role serves."""
        if self.plan.port is None:
            return f"unix:{self.sockets}/{name.replace(' ', '')}"
        return f"127.0.0.1:{self.plan.port + (0 if name == 'chief' else 1 + int(name.removeprefix('ps ')))}"

    def start(self) -> Self:
        """Starts all roles and all workers; waits for nothing."""
        for name in self.everybody:
            self.start_one(name)
        return self

    @property
    def roles(self) -> list[str]:
        """Names of the servers."""
        servers = [f"ps {index}" for index in range(self.plan.num_ps)]
        return [*servers, *(self.standbys if self.plan.has_standbys else ()), "chief"]

    @property
    def standbys(self) -> list[str]:
        """Names of the second servers of each shard."""
        return [f"standby {index}" for index in range(self.plan.num_ps)]

    @property
    def workers(self) -> list[str]:
        """Names of the workers that are processes."""
        return [f"worker {index}" for index in range(self.plan.num_workers or 0)] if self.plan.program else []

    @property
    def everybody(self) -> list[str]:
        """Names of all processes."""
        return [*self.roles, *self.workers]

    def start_one(self, name: str, *, flags: Sequence[str] = (), failpoints: str = "", address: str = "") -> "subprocess.Popen[bytes]":
        """Starts a process, also one that was there before; `address` is another one than before (chief), or what it follows (relay)."""
        life = self.lives[name] = self.lives.get(name, 0) + 1
        points = failpoints or ((self.plan.failpoints or {}).get(name, "") if life == 1 else "")
        role, _, index = name.partition(" ")
        environment = {**os.environ, "LOCKSTEP_TRANSPORT": self.plan.transport}
        environment |= {"LOCKSTEP_FAILPOINTS": points, "LOCKSTEP_ENABLE_FAILPOINTS": "1"} if points else {}
        environment |= {"LOCKSTEP_HISTORY": str(self.history)} if self.plan.history else {}
        environment |= {"LOCKSTEP_CHIEF": self.chief_address, "LOCKSTEP_WORKER_INDEX": index} if role == "worker" else {}
        environment |= (self.plan.environment or {}).get(role, {})
        if role == "worker":
            words = [*self.plan.program, *self._worker_flags(int(index))]
        elif role in ("ps", "standby"):
            words = ["-m", "ps_server", "--index", index, "--address", self.address(name), *self._checkpoint_place]
        elif role == "relay":
            words = ["-m", "lockstep", "relay", "--listen", self.address(name), "--chief", address or self.chief_address]
        else:
            words = ["-m", *self._before_chief, "chief", "--address", address or self.chief_address, *self._chief_flags()]
        if before := (self.plan.wrapper or {}).get(name):
            words = ["-m", *before, *words[1:]]
        log = self._stack.enter_context((self.directory / f"{name.replace(' ', '-')}.log").open("ab"))
        log.write(f"--- life {life} at {time.monotonic():.3f}\n".encode())
        log.flush()
        start = WarmPopen if self.plan.is_warm else subprocess.Popen
        process = start([sys.executable, *words, *flags], cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.processes[name] = process
        self._stack.callback(kill, process)
        return process

    def kill(self, *names: str) -> float:
        """SIGKILL to these, all at once as to a machine that loses its power, and waits for their ends; returns when."""
        for name in names:
            self.processes[name].kill()
        for name in names:
            self.processes[name].wait(10)
        return time.monotonic()

    def signal(self, name: str, number: signal.Signals) -> float:
        """Sends a signal; returns when."""
        self.processes[name].send_signal(number)
        return time.monotonic()

    def restart(self, *names: str, flags: Sequence[str] = (), address: str = "") -> float:
        """Starts processes anew that have ended, as a launcher does, which knows them to be dead; returns when."""
        for name in names:
            assert self.processes[name].poll() is not None
            self.start_one(name, flags=[*flags, *(["--takeover"] if name == "chief" else [])], address=address)
        return time.monotonic()

    def await_death(self, name: str, *, code: int = KILLED, timeout_s: float = 30.0) -> float:
        """Waits until the process has ended, by a failpoint's SIGKILL or with another `code`; returns when."""
        self.await_(lambda: self.processes[name].poll() is not None, what=f"{name} ends", timeout_s=timeout_s)
        assert self.processes[name].returncode == code, f"{name} ended otherwise: {self.processes[name].returncode}\n{self.logs()}"
        return time.monotonic()

    def name_of(self, pid: int) -> str:
        """Whose present process this is; "" if nobody's."""
        return next((name for name, process in self.processes.items() if process.pid == pid), "")

    def await_(self, condition: Callable[[], object], *, what: str, timeout_s: float = 40.0) -> None:
        """Waits, and shows all logs if it was in vain."""
        if not wait_until(condition, timeout_s=timeout_s, required=False):
            raise AssertionError(f"not so within {timeout_s:g} s: {what}\n{self.logs()}")

    def await_end(
        self, *, workers: Sequence[int] | None = None, timeout_s: float = 60.0, expected: Mapping[str, int] | None = None
    ) -> None:
        """Waits until everything has ended by itself, each process with 0 or the `expected` exit code."""
        names = [*self.roles, *(self.workers if workers is None else (f"worker {index}" for index in workers))]
        what = "every process ends by itself: "
        self.await_(lambda: not self.running(names), what=what + ", ".join(names), timeout_s=timeout_s)
        codes = {name: self.processes[name].returncode for name in names}
        wanted = {name: (expected or {}).get(name, 0) for name in names}
        assert codes == wanted, f"{codes}\n{self.logs()}"

    def running(self, names: Sequence[str]) -> list[str]:
        """Those of the names whose processes have not ended."""
        return [name for name in names if self.processes[name].poll() is None]

    def logs(self) -> str:
        """The last lines of every log."""
        parts = []
        for path in sorted(self.directory.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()
            parts.append("\n".join([f"--- {path.name}", *lines[-25:]]))
        return "\n".join(parts)

    def text_of(self, name: str) -> str:
        """All that a process has said, in all its lives."""
        return (self.directory / f"{name.replace(' ', '-')}.log").read_text(errors="replace")

    @property
    def _server_addresses(self) -> list[str]:
        """Where the chief finds the servers."""
        return [self.address(f"ps {index}") for index in range(self.plan.num_ps)]

    @property
    def _before_chief(self) -> Sequence[str]:
        """A module that runs the chief, with its words."""
        return ()

    @property
    def _checkpoint_place(self) -> list[str]:
        return ["--checkpoint-dir", str(self.checkpoints)] if self.plan.durability is not None else []

    def _worker_flags(self, index: int) -> Sequence[str]:
        return ()

    def _chief_flags(self) -> list[str]:
        plan = self.plan
        flags = ["--ps", ",".join(self._server_addresses), *plan.flags, *self._checkpoint_place]
        flags += ["--standbys", ",".join(map(self.address, self.standbys))] if plan.has_standbys else []
        if plan.durability is not None:
            flags += ["--durability", plan.durability]
            flags += ["--checkpoint-steps", str(plan.checkpoint_steps)] if plan.checkpoint_steps is not None else []
        return flags
