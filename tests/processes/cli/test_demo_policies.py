"""`lockstep demo` under other policies, from stale contributions; and which optimizers it has."""

from pathlib import Path

import numpy as np
import pytest

from lockstep.demo.digits import NAMES, optimizer_of
from ps_protocol.model.optimizers import GRADIENT_OPTIMIZERS
from tests.processes.cli.test_demo import accuracies, demo
from tests.support.processes.commands import lockstep_here


def test_the_demo_learns_the_digits_from_stale_contributions(tmp_path: Path) -> None:
    arguments = "--ps 1 --policy ssp --staleness 2 --max-staleness 9 --too-stale scale"
    with demo(*arguments.split(), "--pace", "0", "--run-dir", str(tmp_path)) as process:
        out, _ = process.communicate(timeout=55)
    assert process.returncode == 0, out
    assert "policy ssp(2), scales beyond staleness 9: every contribution is a step" in out
    assert "finished at step 800: test accuracy" in out and min(accuracies(out)) >= 0.95


def test_every_optimizer_that_takes_gradients_can_be_named() -> None:
    assert set(NAMES) == set(GRADIENT_OPTIMIZERS)
    rates = [optimizer_of(name, learning_rate=0.5).learning_rate.arguments["value"] for name in NAMES]
    assert np.all(np.array(rates) == 0.5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--staleness 2", "--staleness: it is for the policy ssp, not sync"),
        ("--policy async --backup-workers 1", "--backup-workers: only the policy sync has steps of several contributions, not async"),
        ("--learning-rate=-1", "--learning-rate: optimizer 'momentum': learning_rate = -1.0, want >= 0"),
    ],
)
def test_arguments_that_make_no_sense_together_are_reported_in_one_line(arguments: str, words: str) -> None:
    refused = lockstep_here("demo", *arguments.split())
    assert refused.returncode == 2
    assert words in refused.stderr and len(refused.stderr.splitlines()) == 1
