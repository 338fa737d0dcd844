"""torchrun on two hosts of a network: its ranks are workers of one cluster, over TLS, and torchrun's own restart keeps the model."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from tests.engines.network import Network, network, why_not
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

TORCHRUN = ROOT / ".venv-frameworks" / "bin" / "torchrun"
if why := why_not() or ("" if TORCHRUN.exists() else "no PyTorch in .venv-frameworks; make test-frameworks puts it there"):
    pytest.skip(f"no torchrun on hosts here: {why}", allow_module_level=True)
pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with network(2, tmp_path) as made:
        yield made


class Run:
    """The demo's worker as torchrun's program, one on each host."""

    def __init__(
        self, net: Network, stack: ExitStack, directory: Path, *, flags: str, nodes: str = "2", names: tuple[str, ...] = ("h1", "h2")
    ) -> None:
        self._net, self._stack, self._directory, self._out = net, stack, directory, directory / "out"
        place = f"{net.address('h1')}:29400"
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--rdzv-id", "digits", "--rdzv-conf", "last_call_timeout=2")
        words = ["--nnodes", nodes, "--nproc-per-node", "1", *rendezvous, "--max-restarts", "3", "--monitor-interval", "0.2"]
        self._command = [str(TORCHRUN), *words, "-m", "lockstep.demo.worker", "--pace", "0.03", "--least-accuracy", "0.95"]
        self._environment = {**os.environ, "LOCKSTEP_UP": flags, "OMP_NUM_THREADS": "1"}
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        command = self._net.on(name, *self._command)
        with self._out.open("ab") as out:
            self.nodes[name] = subprocess.Popen(
                command, cwd=self._directory, env=self._environment, stdout=out, stderr=out, start_new_session=True
            )
        self._stack.callback(self.kill, name)

    @property
    def out(self) -> str:
        return self._out.read_text()

    def kill(self, name: str) -> None:
        """What a lost host is: all that runs there is killed."""
        with suppress(ProcessLookupError):
            os.killpg(self.nodes[name].pid, signal.SIGKILL)
        self.nodes[name].wait()

    def await_step(self, step: int) -> None:
        def reached() -> bool:
            return max(map(int, re.findall(r"^step (\d+):", self.out, re.MULTILINE)), default=-1) >= step

        wait_until(reached, what=f"step {step}", timeout_s=60)

    def await_end(self, *names: str) -> None:
        for name in names:
            assert self.nodes[name].wait(120) == 0, self.out
        assert float(re.findall(r"finished at step \d+: test accuracy (\d\.\d+)", self.out)[-1]) >= 0.95, self.out


def rank(number: int) -> psutil.Process:
    """The program of a rank, on whichever host."""
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.environ().get("RANK") == str(number) and "lockstep.demo.worker" in one.cmdline():
                return one
    raise AssertionError(f"no rank {number} runs")


def test_ranks_on_two_hosts_train_one_model_and_go_on_with_it_after_a_restart(net: Network, tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = Run(net, stack, tmp_path, flags="--ps 2 --max-steps 400")
        run.await_step(60)
        rank(1).kill()
        run.await_end("h1", "h2")
    assert run.out.count("the chief are ready") == 1 and run.out.count("in the place of an earlier process") == 2, run.out


def test_training_goes_on_at_once_without_a_host_that_is_lost_where_there_is_a_backup_worker(net: Network, tmp_path: Path) -> None:
    with ExitStack() as stack:
        run = Run(net, stack, tmp_path, flags="--ps 2 --max-steps 400 --backup-workers 1")
        run.await_step(60)
        run.kill("h2")
        wait_until(lambda: "finished at step 400" in run.out, what="the other rank trains to the end", timeout_s=60)
        assert float(re.findall(r"finished at step 400: test accuracy (\d\.\d+)", run.out)[0]) >= 0.95
