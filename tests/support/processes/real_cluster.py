"""A cluster of processes or of threads, and workers that carry out a test's tasks. Knows how they start and end; asserts no behaviour."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import worker_client
from benchmarks.harness.relay import Relay
from tests.support.processes.commands import lockstep_here
from tests.support.processes.processes import Process, announced, end, start_role, talking
from tests.support.processes.worker_tasks import TASKS
from tests.support.sessions.clusters import Shape, run_chief, start_chief, start_ps

Outcome = Callable[[], Any]


class Worker:
    """A process that does the tasks of `tests.support.processes.worker_tasks`, one after the other."""

    def __init__(self, chief_address: str, index: int, stack: ExitStack) -> None:
        command = [sys.executable, "-m", "tests.support.processes.worker_tasks", chief_address, str(index)]
        self.index = index
        self._process = talking(stack, *command)
        stack.callback(self._end)

    def begin(self, task: str, **arguments: Any) -> Outcome:
        """Has a task begun; what is returned waits for its result, and fails with its error."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"task": task, "arguments": arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return partial(self._result, task)

    def do(self, task: str, **arguments: Any) -> Any:
        """Has a task done and returns its result."""
        return self.begin(task, **arguments)()

    def kill(self) -> None:
        """Ends the process with SIGKILL, as a machine that fails would."""
        self._process.kill()
        self._process.wait(10)

    def _end(self) -> None:
        """Ends the process by itself if it can: it leaves the cluster when it is told nothing any more."""
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=3)
        end(self._process)

    def _result(self, task: str) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"worker {self.index} ended with {self._process.wait(10)} during {task}"
        answer = json.loads(line)
        assert "error" not in answer, f"worker {self.index}: {task}: {answer['error']}"
        return answer["result"]


class ThreadWorker:
    """A thread of this process that does the same tasks."""

    def __init__(self, chief_address: str, index: int, stack: ExitStack) -> None:
        self.index = index
        self._session = stack.enter_context(worker_client.connect(chief_address, worker_index=index, timeout_s=20))
        self._thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix=f"worker-{index}"))

    def begin(self, task: str, **arguments: Any) -> Outcome:
        """Has a task begun; what is returned waits for its result, and fails with its error."""
        return self._thread.submit(TASKS[task], self._session, **arguments).result

    def do(self, task: str, **arguments: Any) -> Any:
        """Has a task done and returns its result."""
        return self.begin(task, **arguments)()


AnyWorker = TypeVar("AnyWorker", Worker, ThreadWorker)


class TaskCluster(Generic[AnyWorker]):
    """A running cluster whose workers do tasks. What travels to and from each parameter server passes through `counters`, if any."""

    def __init__(
        self,
        chief_address: str,
        workers: list[AnyWorker],
        stack: ExitStack,
        *,
        servers: Sequence[Process] = (),
        counters: Sequence[Relay] = (),
    ) -> None:
        self.chief_address, self.servers, self.counters = chief_address, servers, counters
        self.workers: list[AnyWorker] = workers
        self.observer = stack.enter_context(worker_client.observe(chief_address, timeout_s=20))

    def all_do(self, task: str, **arguments: Any) -> list[Any]:
        """Has all workers do a task at the same time, and returns their results in order."""
        outcomes = [worker.begin(task, **arguments) for worker in self.workers]
        return [outcome() for outcome in outcomes]

    def lockstep(self, *arguments: str) -> str:
        """Returns what the command line says about this cluster."""
        ended = lockstep_here(*arguments, "--chief", self.chief_address)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def finish(self) -> int:
        """Ends the training from outside and returns the last step."""
        found = re.search(r"at step (\d+)", self.lockstep("finish", "--reason", "enough"))
        assert found is not None
        return int(found[1])


RealCluster = TaskCluster[Worker]
ThreadedCluster = TaskCluster[ThreadWorker]


def real_cluster(shape: Shape, stack: ExitStack, *, directory: Path) -> RealCluster:
    """Starts parameter servers, a chief and workers, each a process of its own; all at once."""
    addresses = [f"unix:{directory}/ps{index}" for index in range(shape.num_ps)]
    started = [(_start_ps(index, address, stack), Path(f"{address[5:]}.address")) for index, address in enumerate(addresses)]
    chief, chief_address = start_chief(shape, stack, ps_addresses=addresses, directory=directory), f"unix:{directory}/chief"
    workers = [Worker(chief_address, index, stack) for index in range(shape.total_num_replicas or 1)]
    for process, path in [*started, (chief, directory / "chief.address")]:
        announced(process, path)
    return TaskCluster(chief_address, workers, stack, servers=[process for process, _ in started])


def threaded_cluster(shape: Shape, stack: ExitStack, *, directory: Path, counts_bytes: bool = False) -> ThreadedCluster:
    """Starts them in this process, where nobody is killed; they talk over the same sockets."""
    addresses = [start_ps(index, stack, directory=directory) for index in range(shape.num_ps)]
    counters = [stack.enter_context(Relay(address)) for address in addresses] if counts_bytes else []
    known = [counter.address for counter in counters] or addresses
    chief_address = run_chief(shape, stack, ps_addresses=known, directory=directory).address
    workers = [ThreadWorker(chief_address, index, stack) for index in range(shape.total_num_replicas or 1)]
    return TaskCluster(chief_address, workers, stack, counters=counters)


def _start_ps(index: int, address: str, stack: ExitStack) -> Process:
    return start_role(stack, "ps_server", "--index", index, "--address", address, announce=Path(f"{address[5:]}.address"))
