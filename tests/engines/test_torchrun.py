"""torchrun's own restart of its ranks keeps the model."""

from contextlib import suppress

import psutil
import pytest

from tests.engines.torchrun import Torchrun

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("engine", ["torchrun"], indirect=True)
def test_ranks_go_on_with_their_model_after_a_restart(engine: Torchrun) -> None:
    run = engine.run()
    run.await_step(60)
    rank(1).kill()
    run.assert_trained()
    assert run.out.count("the chief are ready") == 1 and run.out.count("in the place of an earlier process") == 2, run.out


def rank(number: int) -> psutil.Process:
    """The program of a rank, on whichever host."""
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.environ().get("RANK") == str(number) and "lockstep.demo.worker" in one.cmdline():
                return one
    raise AssertionError(f"no rank {number} runs")
