"""A cluster whose processes report in JSON lines: started, listened to, looked at. Knows processes; nobody's workload or figures."""

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
from benchmarks.harness.watching import POLL_S
from lockstep.launcher.cluster import ClusterSpec, LocalCluster, last_lines
from lockstep.launcher.environments import with_checkout
from lockstep.launcher.supervisor import LaunchFailed, Process, ProcessSpec, Supervisor


class ReportingCluster:
    """Parameter servers and a chief, used in a `with` block, and processes beside them that print an event a line: {"event": kind, …}."""

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.events: dict[str, list[dict[str, Any]]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        logs = self._stack.enter_context(tempfile.TemporaryDirectory())
        self.supervisor = self._stack.enter_context(Supervisor(log_directory=Path(logs), show_line=self._hear))
        # Without tokens: the crowd's calls are bytes made beforehand.
        self.local = LocalCluster(self.spec, supervisor=self.supervisor, note=lambda text: print(text, file=sys.stderr), security={})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def start(self, name: str, arguments: Sequence[str], *, environment: Mapping[str, str | None] | None = None) -> Process:
        """Starts a process `python -m …` that reports."""
        command = [sys.executable, "-m", *arguments]
        return self.supervisor.start(ProcessSpec(name=name, command=command, environment={**with_checkout(), **(environment or {})}))

    def await_events(self, kind: str, count: int, *, timeout_s: float) -> list[dict[str, Any]]:
        """Returns the events of a kind once there are so many. Raises LaunchFailed, as `polls`."""
        for _ in self.polls(timeout_s=timeout_s, what=f"{count} times {kind!r}"):
            if len(self.events.get(kind, ())) >= count:
                break
        return self.events[kind]

    def polls(self, *, timeout_s: float, what: str) -> Iterator[None]:
        """Passes on what processes say and yields, again and again. Raises LaunchFailed after `timeout_s`, or if one of them has failed."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for process in self.supervisor.poll(timeout_s=POLL_S / 10):
                if process.returncode:
                    raise LaunchFailed(f"{process.name} ended with exit code {process.returncode}. {last_lines(process)}")
            yield
        raise LaunchFailed(f"no {what} within {timeout_s:g} s")

    def await_end(self, *, timeout_s: float = 20.0) -> float:
        """Returns how many seconds it took until all processes had ended; those that have not by then are ended by leaving the block."""
        begin = time.monotonic()
        while any(process.is_running for process in self.supervisor.processes) and time.monotonic() - begin < timeout_s:
            self.supervisor.poll(timeout_s=POLL_S / 10)
        return time.monotonic() - begin

    def time_status(self, *flags: str) -> float:
        """Returns the seconds that the command `lockstep status` takes, from its start to its end. Raises LaunchFailed."""
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "lockstep", "status", "--chief", self.local.chief_address, *flags],
            capture_output=True,
            check=False,
            cwd=Path(benchmarks.__file__).parents[1],
        )
        if done.returncode:
            raise LaunchFailed(f"lockstep status: exit code {done.returncode}: {done.stderr.decode()}")
        return time.monotonic() - begin

    def _hear(self, name: str, line: str) -> None:
        if line.startswith('{"event"'):
            event = {"process": name, **json.loads(line)}
            self.events.setdefault(event["event"], []).append(event)
        elif "ERROR" in line or "WARNING" in line or "Traceback" in line or line.startswith(("lockstep", "RuntimeError")):
            print(f"{name}: {line}", file=sys.stderr)


def rss_bytes(process: Process) -> int:
    """Returns the memory that a process has resident now."""
    return int(psutil.Process(process.pid).memory_info().rss)
