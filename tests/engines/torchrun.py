"""torchrun on two hosts of a network, whose ranks are workers of one cluster."""

import os
from contextlib import ExitStack
from pathlib import Path

from tests.engines.demo import Demo, recovery
from tests.engines.network import network, why_not
from tests.support.repository import ROOT

_TORCHRUN = ROOT / ".venv-frameworks" / "bin" / "torchrun"


class Torchrun:
    """A rank on each host; the first one serves torchrun's store, without which no rank can run."""

    survives: tuple[str, ...] = ("worker 1",)
    ends_with: tuple[str, ...] = ("chief",)

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.net, self._directory = stack.enter_context(network(2, directory)), directory
        self._out = directory / "out"

    @staticmethod
    def why_not() -> str:
        return why_not() or ("" if _TORCHRUN.exists() else "no PyTorch in .venv-frameworks; make test-frameworks puts it there")

    def run_printed(self, command: str) -> Demo:
        """Runs a command of the pages on both hosts, in the directory; what it leaves open is how they meet."""
        command = command.replace("torchrun", str(_TORCHRUN)).replace("…", " ".join(self._rendezvous))
        self._command, self._environment = ["sh", "-c", command], {**os.environ, "OMP_NUM_THREADS": "1"}
        self._begin()
        return Demo(self._out, self._poll)

    @property
    def _rendezvous(self) -> tuple[str, ...]:
        place = f"{self.net.address('h1')}:29400"
        return ("--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--rdzv-id", "digits", "--rdzv-conf", "last_call_timeout=2")

    def greet(self) -> None:
        assert self.run_printed("torchrun --nnodes 2 --nproc-per-node 1 … --no-python hostname").await_end() == 0
        self._out.unlink()

    def run(self, *flags: str, pace: float = 0.05) -> Demo:
        words = ["--nnodes", "2", "--nproc-per-node", "1", *self._rendezvous, "--max-restarts", "3", "--monitor-interval", "0.2"]
        self._command = [str(_TORCHRUN), *words, "-m", "lockstep.demo.worker", "--pace", str(pace), "--least-accuracy", "0.95"]
        up = " ".join(["--ps", "2", "--max-steps", "400", "--min-replicas", "1", *recovery(self._directory), *flags])
        self._environment = {**os.environ, "LOCKSTEP_UP": up, "OMP_NUM_THREADS": "1"}
        self._begin()
        return Demo(self._out, self._poll)

    def left(self) -> list[str]:
        return [words for words in self.net.left() if "torchrun" not in words]

    def _begin(self) -> None:
        for name in self.net.names:
            self.net.start(name, *self._command, out=self._out, environment=self._environment, cwd=self._directory)

    def _poll(self) -> int | None:
        if len(self.net.processes) < len(self.net.names):  # torchrun itself waits five minutes for one that is lost
            return 0 if "[lockstep] training finished" in self._out.read_text() else None
        codes = [process.poll() for process in self.net.processes.values()]
        return None if None in codes else max(map(abs, filter(None, codes)), default=0)

    def run_again(self) -> None:
        for process in self.net.processes.values():
            process.wait(120)
        self._out.unlink()  # with the frames of torchrun's end
        self._begin()

    def ask_to_end(self) -> None:
        self.net.terminate("torchrun")

    def lose(self, role: str) -> None:
        self.net.kill(self.net.host_of(role))

    def has_noticed(self, role: str, run: Demo) -> bool:
        return True  # it never does
