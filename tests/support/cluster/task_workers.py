"""Workers of a cluster that are processes and do what a test asks for. Knows how they start and end; asserts no behaviour."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from tests.support.processes.processes import end, talking

Outcome = Callable[[], Any]


class TaskWorker:
    """A process that does the tasks of `tests.support.cluster.tasks`, one after the other."""

    def __init__(self, chief_address: str, index: int, stack: ExitStack) -> None:
        command = [sys.executable, "-m", "tests.support.cluster.tasks", chief_address, str(index)]
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


def all_do(workers: Sequence[TaskWorker], task: str, **arguments: Any) -> list[Any]:
    """Has workers do a task at the same time, and returns their results in order."""
    outcomes = [worker.begin(task, **arguments) for worker in workers]
    return [outcome() for outcome in outcomes]
