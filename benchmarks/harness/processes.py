"""Starts and ends the processes of a benchmark, and reads the JSON lines that they report. Knows no workload and no figures."""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

import benchmarks
from benchmarks.harness import process_memory
from lockstep.launcher.cluster import LaunchedCluster
from lockstep.launcher.spec import ClusterSpec
from lockstep.launcher.supervisor import LaunchFailed, Process, ProcessSpec, Supervisor

_POLL_S = 0.02
_WORRYING = ("ERROR", "WARNING", "Traceback", "Error")

Event = dict[str, Any]


class Processes:
    """Processes that end with the `with` block. `is_quiet`: their output other than events is not shown."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.events: dict[str, list[Event]] = {}  # by kind, in order of arrival; each with its "process"
        self._incomplete: dict[str, str] = {}  # by process: the beginning of an incomplete event
        self._is_quiet = is_quiet
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        logs = self._stack.enter_context(tempfile.TemporaryDirectory())
        self.supervisor = self._stack.enter_context(Supervisor(log_directory=Path(logs), show_line=self._read_line))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @property
    def directory(self) -> Path:
        """The directory of the files that control the workers."""
        return self.supervisor.directory

    def start(self, name: str, command: Sequence[str], *, environment: Mapping[str, str | None] | None = None) -> Process:
        """Starts a process."""
        return self.supervisor.start(ProcessSpec(name=name, command=command, environment=environment or {}))

    def worker_command(self, module: str, orders: object) -> list[str]:
        """Returns the command of a worker that runs `module`'s work; `orders` is a dataclass or a dict."""
        fields = dataclasses.asdict(orders) if dataclasses.is_dataclass(orders) and not isinstance(orders, type) else orders
        return [sys.executable, "-m", "benchmarks.harness.worker", module, json.dumps(fields), str(self.directory)]

    def go(self) -> None:
        """Lets all waiting workers begin."""
        (self.directory / "go").touch()

    def release(self) -> None:
        """Lets all workers leave."""
        (self.directory / "release").touch()

    def await_events(self, kind: str, count: int, *, timeout_s: float) -> list[Event]:
        """Waits for `count` events of a kind and returns them. Raises LaunchFailed, as `polls` does."""
        for _ in self.polls(timeout_s=timeout_s, what=f"{count} times {kind!r}"):
            if len(self.events.get(kind, ())) >= count:
                break
            if not any(process.is_running for process in self.supervisor.processes):
                raise LaunchFailed(f"all processes ended before {count} had reported {kind!r}")
        return self.events[kind]

    def by_process(self, kind: str) -> list[Event]:
        """Returns the events of a kind in the order of the processes' names."""
        return sorted(self.events.get(kind, ()), key=lambda event: str(event["process"]))

    def polls(self, *, timeout_s: float, what: str) -> Iterator[None]:
        """Reads the processes' output repeatedly, and yields each time.

        Raises LaunchFailed after `timeout_s`, or if a process has failed.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for process in self.supervisor.poll(timeout_s=_POLL_S):
                if process.returncode:
                    raise LaunchFailed(f"{process.name} ended with exit code {process.returncode}. {process.tail}")
            yield
        raise LaunchFailed(f"no {what} within {timeout_s:g} s")

    def pass_time(self, seconds: float) -> None:
        """Only listens."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            self.supervisor.poll(timeout_s=left_s)

    def await_end(self, *, timeout_s: float = 20.0) -> float:
        """Waits for the end of all processes and returns the seconds; leaving the block ends those that still run."""
        begin = time.monotonic()
        while any(process.is_running for process in self.supervisor.processes) and time.monotonic() - begin < timeout_s:
            self.supervisor.poll(timeout_s=_POLL_S)
        return time.monotonic() - begin

    def _read_line(self, name: str, line: str) -> None:
        line = self._incomplete.pop(name, "") + line
        if line.startswith('{"event"'):
            try:
                event = {"process": name, **json.loads(line)}
            except ValueError:
                self._incomplete[name] = line  # a launcher splits lines of more than 64 KiB, such as the times of thousands of steps
                return
            self.events.setdefault(event["event"], []).append(event)
        elif not self._is_quiet and (name.startswith("worker") or any(word in line for word in _WORRYING)):
            print(f"{name}: {line}", file=sys.stderr)


class Cluster:
    """Parameter servers, a chief and workers, used in a `with` block.

    `security`: see LaunchedCluster; `programs`: replaces the programs of some roles.
    """

    def __init__(self, spec: ClusterSpec, *, security: Mapping[str, str] | None = None, programs: Mapping[str, str] | None = None) -> None:
        self.spec = spec
        self.processes = Processes()
        self._security = security
        self._programs = programs or {}

    def __enter__(self) -> Self:
        self.processes.__enter__()
        note = self._note
        self.local = _Roles(self.spec, self._programs, supervisor=self.processes.supervisor, note=note, security=self._security)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.processes.__exit__(kind, error, trace)

    @property
    def servers(self) -> list[Process]:
        """The parameter servers, by index."""
        return [role for role in self.local.roles if role.name.startswith("ps")]

    def start_workers(self, module: str, orders: object, *, environment: Mapping[str, str | None] | None = None) -> None:
        """Starts the workers of the spec, all with the same orders; each finds the cluster by its environment."""
        self.local.start_workers(self.processes.worker_command(module, orders), environment=environment)

    def time_status(self) -> float:
        """Returns the seconds that the command `lockstep status` takes. Raises LaunchFailed."""
        command = [sys.executable, "-m", "lockstep", "status", "--chief", self.local.chief_address]
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, check=False, cwd=Path(benchmarks.__file__).parents[1])
        if done.returncode:
            raise LaunchFailed(f"lockstep status: exit code {done.returncode}: {done.stderr.decode()}")
        return time.monotonic() - begin

    @staticmethod
    def _note(text: str) -> None:
        print(text, file=sys.stderr)


class _Roles(LaunchedCluster):
    """A cluster in which some roles run other programs."""

    def __init__(self, spec: ClusterSpec, programs: Mapping[str, str], **options: Any) -> None:
        super().__init__(spec, **options)
        self._programs = programs

    def _program_of(self, module: str) -> str:
        return self._programs.get(module, module)


def cpu_s(process: Process) -> float:
    """Returns the CPU seconds of a running process so far, user and system."""
    return sum(cpu_times_s(process))


def cpu_times_s(process: Process) -> tuple[float, float]:
    """Returns the CPU seconds of a running process so far, of user and system separately."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user, times.system


def rss_bytes(process: Process) -> int:
    """Returns the memory that a process has resident now."""
    return int(psutil.Process(process.pid).memory_info().rss)


def peak_rss_bytes(process: Process) -> int:
    """Returns the most memory that the process ever had resident."""
    # Without /proc, the present value is the best approximation.
    return process_memory.peak_rss_bytes(process.pid) or rss_bytes(process)
