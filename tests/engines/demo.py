"""The demo in an engine: how far a run is, whether it has learnt the digits, and what the contract of engines asks of each engine."""

import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from tests.support.waiting import wait_until


class Demo:
    """A run, by the file that has its output, or that of its workers alone. `poll`: its exit code; None while it runs."""

    # What it says at its end, and whether it says what is started again.
    end_words, names_restarts = "[lockstep] training finished", True

    def __init__(self, path: Path, poll: Callable[[], int | None]) -> None:
        self.path, self._poll = path, poll
        # On how many hosts its workers are, while it is under way.
        self.num_places: Callable[[], int] = lambda: len(set(re.findall(r"worker \d joined on (\w+)", self.out)))

    @property
    def out(self) -> str:
        return self.path.read_text() if self.path.exists() else ""

    @property
    def step(self) -> int:
        return max((int(text) for text in re.findall(r"^(?:\[worker \d+\] )?step (\d+):", self.out, re.MULTILINE)), default=-1)

    def await_step(self, step: int) -> None:
        wait_until(lambda: self.step >= step, what=f"step {step}", timeout_s=60)

    def await_end(self) -> int | None:
        has_ended = wait_until(lambda: self._poll() is not None, timeout_s=150, required=False)
        assert has_ended, f"it has not ended by itself\n{self.out[-5000:]}"
        return self._poll()

    def assert_trained(self) -> None:
        assert self.await_end() == 0 and self.end_words in self.out and "Traceback" not in self.out, self.out
        assert float(re.findall(r"accuracy (\d\.\d+)", self.out)[-1]) >= 0.95, self.out


class Command:
    """Begins a run by a command of this machine, and once more on demand; what runs then ends with the stack."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], directory: Path, stack: ExitStack) -> None:
        self._given = command, environment, directory, stack
        self.run = Demo(directory / "out", lambda: self._process.poll())
        self.begin()

    def ask_to_end(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def begin(self) -> None:
        command, environment, directory, stack = self._given
        with self.run.path.open("ab") as out:
            self._process = process = subprocess.Popen(command, cwd=directory, env=environment, stdout=out, stderr=out)
        stack.callback(process.wait)
        stack.callback(process.kill)


class Engine(Protocol):
    """A real engine with hosts of its own, made in an empty directory; it ends with the stack."""

    # The processes of a run that may be lost with their host while it goes on, and those with whose host it ends, to be run again.
    survives: tuple[str, ...]
    ends_with: tuple[str, ...]

    def __init__(self, directory: Path, stack: ExitStack) -> None: ...

    @staticmethod
    def why_not() -> str:
        """Why it cannot run here; empty: it can."""

    def greet(self) -> None:
        """Has the engine itself run a program that does nothing on its hosts, and waits for its end."""

    def run(self, *flags: str, pace: float = 0.05) -> Demo:
        """Begins a run with these flags and RECOVERY, on all hosts."""

    def run_again(self) -> None:
        """Runs it once more, once it has ended with a host."""

    def lose(self, role: str) -> None:
        """Loses the host of one such as "worker 2": all that runs there is killed."""

    def ask_to_end(self) -> None:
        """What a user does to end a run early."""

    def has_noticed(self, role: str, run: Demo) -> bool:
        """Whether the engine knows that this host is lost."""

    def left(self) -> list[str]:
        """What of Lockstep runs on the hosts."""


def recovery(directory: Path) -> list[str]:
    """The flags with which a run bears the loss of a host."""
    return ["--lease", "3", "--checkpoint-dir", str(directory / "kept"), "--checkpoint-steps", "50"]
