"""torchrun's documented command, and its own restart of its ranks, which keeps the model."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.engines.torchrun import Torchrun
from tests.support.processes.commands import TRAIN
from tests.support.repository import printed

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("engine", ["torchrun"], indirect=True)
def test_ranks_go_on_with_their_model_after_a_restart(engine: Torchrun) -> None:
    run = engine.run()
    run.await_step(60)
    rank(1).kill()
    run.assert_trained()
    assert run.out.count("the chief are ready") == 1 and run.out.count("in the place of an earlier process") == 2, run.out


@pytest.mark.parametrize("engine", ["torchrun"], indirect=True)
def test_the_documented_command_trains_with_eight_ranks_on_two_hosts(engine: Torchrun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (line,) = [line for line in printed("torchrun").splitlines() if "torchrun" in line]
    run = engine.run_printed(line.replace("/shared/job", f"{tmp_path / 'kept'} --max-steps 20"))
    assert run.await_end() == 0 and run.out.count("value -10.0") == 8 and "Traceback" not in run.out, run.out


def rank(number: int) -> psutil.Process:
    """The program of a rank, on whichever host."""
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.environ().get("RANK") == str(number) and "lockstep.demo.worker" in one.cmdline():
                return one
    raise AssertionError(f"no rank {number} runs")
