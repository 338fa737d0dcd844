"""torchrun on two hosts of a network: its ranks are workers of one cluster, over TLS, and torchrun's own restart keeps the model."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.engines.demo import Demo
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


class Run(Demo):
    """The demo's worker as torchrun's program, one on each host."""

    def __init__(self, net: Network, directory: Path, *, flags: str) -> None:
        super().__init__(directory / "out")
        self._net = net
        place = f"{net.address('h1')}:29400"
        rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", place, "--rdzv-id", "digits", "--rdzv-conf", "last_call_timeout=2")
        words = ["--nnodes", "2", "--nproc-per-node", "1", *rendezvous, "--max-restarts", "3", "--monitor-interval", "0.2"]
        command = [str(TORCHRUN), *words, "-m", "lockstep.demo.worker", "--pace", "0.03", "--least-accuracy", "0.95"]
        environment = {**os.environ, "LOCKSTEP_UP": flags, "OMP_NUM_THREADS": "1"}
        for name in net.names:
            net.start(name, *command, out=self.path, environment=environment, cwd=directory)

    def await_end(self) -> None:
        for process in self._net.processes.values():
            assert process.wait(120) == 0, self.out


def rank(number: int) -> psutil.Process:
    """The program of a rank, on whichever host."""
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.environ().get("RANK") == str(number) and "lockstep.demo.worker" in one.cmdline():
                return one
    raise AssertionError(f"no rank {number} runs")


def test_ranks_on_two_hosts_train_one_model_and_go_on_with_it_after_a_restart(net: Network, tmp_path: Path) -> None:
    run = Run(net, tmp_path, flags="--ps 2 --max-steps 400")
    run.await_step(60)
    rank(1).kill()
    run.await_end()
    run.assert_trained()
    assert run.out.count("the chief are ready") == 1 and run.out.count("in the place of an earlier process") == 2, run.out


def test_training_goes_on_at_once_without_a_host_that_is_lost_where_there_is_a_backup_worker(net: Network, tmp_path: Path) -> None:
    run = Run(net, tmp_path, flags="--ps 2 --max-steps 400 --backup-workers 1")
    run.await_step(60)
    net.kill("h2")
    wait_until(lambda: "finished at step 400" in run.out, what="the other rank trains to the end", timeout_s=60)
    assert float(re.findall(r"finished at step 400: test accuracy (\d\.\d+)", run.out)[0]) >= 0.95
