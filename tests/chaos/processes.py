"""A cluster of real processes that a test may kill, stop and start again one by one. Knows how they are started; asserts no behaviour."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.relay import Conditions, Relay
from ps_protocol.errors import PsError
from ps_protocol.roles.chief import ClusterStatus, FinishTrainingRequest
from ps_protocol.rpc.chief import GrpcChief
from tests.chaos import claims, script
from tests.chaos.plan import Plan
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

Event = Mapping[str, Any]
KILLED = -int(signal.SIGKILL)


class Cluster:
    """Names are "ps 0", "chief", "worker 0". Everything ends with `stack`. Logs, diaries and checkpoints lie in `directory`.

    `sockets` is a directory with a short path.
    """

    def __init__(self, plan: Plan, stack: ExitStack, *, directory: Path, sockets: Path) -> None:
        self.plan = plan
        self.directory = directory
        self.sockets = sockets
        self.checkpoints = directory / "checkpoints"
        self.chief_address = self.address("chief")
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.lives: dict[str, int] = {}
        self.chief_conditions, self.worker_conditions = Conditions(), Conditions()
        self.worker_to_chief, self.lonely_conditions = Conditions(), Conditions()
        self.proxies: list[Relay] = []
        self._stack = stack
        self._chief: GrpcChief | None = None
        directory.mkdir(parents=True, exist_ok=True)
        stack.callback(self._close)
        if plan.has_proxies:
            ways = [partial(self._conditions_of, index) for index in range(plan.num_ps)]
            relays = (Relay(f"unix:{sockets}/ps{index}", conditions_of=way) for index, way in enumerate(ways))
            self.proxies = [stack.enter_context(relay) for relay in relays]
            self.chief_proxy = stack.enter_context(Relay(f"unix:{sockets}/chief", conditions_of=lambda pid: self.worker_to_chief))

    def address(self, name: str) -> str:
        """Where a role serves."""
        if self.plan.port is None:
            return f"unix:{self.sockets}/{name.replace(' ', '')}"
        return f"127.0.0.1:{self.plan.port + (0 if name == 'chief' else 1 + int(name.removeprefix('ps ')))}"

    def start(self) -> "Cluster":
        """Starts all roles and all workers; waits for nothing."""
        for name in self.roles:
            self.start_one(name)
        for index in range(self.plan.num_workers):
            self.start_one(f"worker {index}")
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
    def everybody(self) -> list[str]:
        """Names of all processes."""
        return [*self.roles, *(f"worker {index}" for index in range(self.plan.num_workers))]

    def start_one(self, name: str, *, flags: Sequence[str] = (), failpoints: str = "", address: str = "") -> "subprocess.Popen[bytes]":
        """Starts a process, also one that was there before; `address` is another one than before (chief)."""
        life = self.lives[name] = self.lives.get(name, 0) + 1
        points = failpoints or ((self.plan.failpoints or {}).get(name, "") if life == 1 else "")
        environment = {**os.environ, "LOCKSTEP_TRANSPORT": self.plan.transport}
        environment |= {"LOCKSTEP_FAILPOINTS": points} if points else {}
        environment |= {"LOCKSTEP_ENABLE_FAILPOINTS": "1"} if points and name.startswith("worker") else {}
        environment |= {"LOCKSTEP_HISTORY": str(self.history)} if self.plan.history else {}
        role, _, index = name.partition(" ")
        environment |= (self.plan.environment or {}).get(role, {})
        if role == "worker":
            words = ["tests.chaos.worker", *self._worker_flags(int(index))]
        elif role in ("ps", "standby"):
            words = ["ps_server", "--index", index, "--address", self.address(name), *self._kept_flags(points)]
        else:
            behind = ["tests.chaos.behind_proxy", self.chief_proxy.address] if self.plan.has_proxies else []
            words = [*behind, "chief", "--address", address or self.chief_address, *self._chief_flags(), *self._kept_flags(points)]
        module = [*(self.plan.wrapper or {}).get(name, ()), *words]
        log = self._stack.enter_context((self.directory / f"{name.replace(' ', '-')}.log").open("ab"))
        log.write(f"--- life {life} at {time.monotonic():.3f}\n".encode())
        log.flush()
        process = subprocess.Popen([sys.executable, "-m", *module, *flags], cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.processes[name] = process
        self._stack.callback(_end, process)
        return process

    @property
    def history(self) -> Path:
        """Where histories go."""
        return self.directory / "history"

    def kill(self, name: str) -> float:
        """SIGKILL, and waits for the end; returns when."""
        self.processes[name].kill()
        self.processes[name].wait(10)
        return time.monotonic()

    def kill_all(self) -> float:
        """As a machine that loses its power; returns when."""
        for name in self.everybody:
            self.processes[name].kill()
        for name in self.everybody:
            self.processes[name].wait(10)
        return time.monotonic()

    def restart_all(self) -> None:
        """After `kill_all`."""
        for name in self.everybody:
            self.restart(name)

    def signal(self, name: str, number: signal.Signals) -> float:
        """Sends a signal; returns when."""
        self.processes[name].send_signal(number)
        return time.monotonic()

    def restart(self, name: str, *, flags: Sequence[str] = (), address: str = "") -> float:
        """Starts a process anew that has ended, as a launcher does, which knows it to be dead; returns when."""
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

    def rollbacks(self) -> int:
        """How often workers were told of one, and how often the epoch has risen."""
        return claims.rollbacks(self.events())

    def events(self, index: int | None = None) -> list[Event]:
        """What workers have written down (`index`: one of them), by time."""
        paths = self.directory.glob("worker-*.jsonl" if index is None else f"worker-{index}.jsonl")
        lines = [(path.stem.partition("-")[2], line) for path in paths for line in path.read_bytes().splitlines()]
        return sorted(({"worker": int(worker), **json.loads(line)} for worker, line in lines), key=lambda event: event["at"])

    def reached(self) -> int:
        """The newest step that a worker has."""
        return max((event.get("after", event.get("step", 0)) for event in self.events()), default=0)

    def await_step(self, step: int, *, timeout_s: float = 40.0) -> None:
        """Waits until a worker has this step."""
        self.await_(lambda: self.reached() >= step, what=f"step {step} is reached", timeout_s=timeout_s)

    def await_(self, condition: Callable[[], object], *, what: str, timeout_s: float = 40.0) -> None:
        """Waits, and shows all logs if it was in vain."""
        if not wait_until(condition, timeout_s=timeout_s, required=False):
            raise AssertionError(f"not so within {timeout_s:g} s: {what}\n{self.logs()}")

    def await_standstill(self, *, silence_s: float = 3.0, timeout_s: float = 20.0) -> float:
        """Waits until no step has been made for longer than any patience within a call would make of it; returns when."""

        def stands() -> bool:
            latest = max(event["at"] for event in self.events() if event["event"] == "step")
            return bool(time.monotonic() > latest + silence_s)

        self.await_(stands, what="the cluster stands still", timeout_s=timeout_s)
        return time.monotonic()

    def status(self) -> ClusterStatus | None:
        """What the chief says; None if it does not."""
        if self._chief is None:
            self._chief = GrpcChief(self.chief_address, cluster="lockstep", access=self.plan.access)
        try:
            return self._chief.status()
        except PsError:
            return None

    def waiting_for(self) -> str:
        """What the chief says that it waits for; "" if it says nothing."""
        status = self.status()
        return status.waiting_for if status is not None else ""

    def await_end(
        self, *, workers: Sequence[int] | None = None, timeout_s: float = 60.0, expected: Mapping[str, int] | None = None
    ) -> None:
        """Waits until everything has ended by itself, each process with 0 or the `expected` exit code."""
        numbers = range(self.plan.num_workers) if workers is None else workers
        names = [*self.roles, *(f"worker {index}" for index in numbers)]
        what = "every process ends by itself: "
        self.await_(lambda: not self.running(names), what=what + ", ".join(names), timeout_s=timeout_s)
        codes = {name: self.processes[name].returncode for name in names}
        wanted = {name: (expected or {}).get(name, 0) for name in names}
        assert codes == wanted, f"{codes}\n{self.logs()}"

    def finish(self) -> int:
        """Ends the training by order, waits until all have ended, and returns the last step."""
        chief = GrpcChief(self.chief_address, cluster="lockstep", access=self.plan.access)
        try:
            chief.call(FinishTrainingRequest(reason="the test has seen enough"))
        finally:
            chief.close()
        self.await_end()
        (last,) = {event["step"] for event in self.events() if event["event"] == "finished"}
        return int(last)

    def running(self, names: Sequence[str]) -> list[str]:
        """Those of the names whose processes have not ended."""
        return [name for name in names if self.processes[name].poll() is None]

    def assert_as_without_faults(self, *, num_steps: int | None = None) -> None:
        """Every worker has, bit for bit, the values of a run in which nothing happened, and was told of each of its steps once."""
        claims.assert_each_step_once(self.events())
        self.assert_values(script.reference(num_steps=num_steps or self.plan.num_steps, num_workers=self.plan.num_workers))

    def assert_values(self, expected: script.Values) -> None:
        """Every worker has, bit for bit, these values in the end."""
        for index in range(self.plan.num_workers):
            script.assert_same_bytes(script.load(self._values(index)), expected)

    def standstill_s(self, since: float) -> float:
        """The longest time after `since` in which no worker got a step done."""
        return claims.standstill_s(self.events(), since)

    def contributing_s(self, index: int) -> float:
        """How long the newest process of a worker took from the beginning of its program to its first step."""
        return claims.contributing_s(self.events(index))

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

    def _values(self, index: int) -> Path:
        return self.directory / f"worker-{index}.npz"

    def _worker_flags(self, index: int) -> list[str]:
        address = self.chief_proxy.address if self.plan.has_proxies else self.chief_address
        flags = ["--chief", address, "--index", str(index), "--pace", str(self.plan.pace_s)]
        flags += ["--diary", str(self.directory / f"worker-{index}.jsonl"), "--values", str(self._values(index))]
        return [*flags, *(self.plan.worker_flags or {}).get(index, ())]

    def _chief_flags(self) -> list[str]:
        plan = self.plan
        servers = [proxy.address for proxy in self.proxies] or [self.address(f"ps {index}") for index in range(plan.num_ps)]
        flags = ["--ps", ",".join(servers), "--workers", str(plan.num_workers), "--lease", str(plan.lease_s)]
        flags += ["--max-steps", str(plan.num_steps), *plan.chief_flags]
        flags += ["--standbys", ",".join(map(self.address, self.standbys))] if plan.has_standbys else []
        if plan.durability is not None:
            flags += ["--durability", plan.durability]
            flags += ["--checkpoint-steps", str(plan.checkpoint_steps)] if plan.checkpoint_steps is not None else []
        return flags

    def _kept_flags(self, points: str) -> list[str]:
        flags = ["--checkpoint-dir", str(self.checkpoints)] if self.plan.durability is not None else []
        flags += ["--history", str(self.history)] if self.plan.history else []
        return [*flags, *(["--enable-failpoints"] if points else [])]

    def _conditions_of(self, server: int, pid: int) -> Conditions:
        name = self.name_of(pid)
        if (name, server) == self.plan.lonely:
            return self.lonely_conditions
        return self.worker_conditions if name.startswith("worker") else self.chief_conditions

    def _close(self) -> None:
        if self._chief is not None:
            self._chief.close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.kill()
    process.wait(10)
