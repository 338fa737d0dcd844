"""`lockstep demo`: what it learns from, and whole runs with real processes, some with killed workers."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lockstep.demo.digits import MISSING, NAMES, NETWORK, evaluate, initial_values, load_digits, optimizer_of, split
from ps_protocol.model.optimizers import GRADIENT_OPTIMIZERS
from tests.support.processes.commands import lockstep_here, read_until
from tests.support.processes.warm import WarmPopen


@contextmanager
def demo(*arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "lockstep", "demo", *arguments]
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **environment}) as process:
        try:
            yield process
        finally:
            process.kill()


def accuracies(out: str) -> list[float]:
    """What each worker has found at the end."""
    return [float(found) for found in re.findall(r"\] finished at step \d+: test accuracy (0\.\d+)", out)]


def test_one_process_alone_learns_the_digits() -> None:
    train, test = split(load_digits())
    variables = initial_values(seed=7)
    velocities = {name: np.zeros_like(value) for name, value in variables.items()}
    gradients = {name: np.zeros_like(value) for name, value in variables.items()}
    for step in range(600):
        batch = train.batch(64, worker=0, step=step)
        NETWORK.loss_and_gradients(variables, batch.images, batch.labels, into=gradients)
        for name, value in variables.items():
            velocities[name] = 0.9 * velocities[name] + gradients[name]
            value -= 0.05 * velocities[name]
    assert evaluate(variables, test.images, test.labels).accuracy > 0.95


def test_workers_have_parts_of_the_training_examples_and_none_of_the_test_examples() -> None:
    train, test = split(load_digits())
    parts = [train.part(index, num_parts=3) for index in range(3)]
    assert sum(len(part.labels) for part in parts) == len(train.labels)
    rows = [{row.tobytes() for row in examples.images} for examples in (*parts, test)]
    assert sum(map(len, rows)) == len(set().union(*rows)), "an image is in two of them"
    assert [len(train.labels), len(test.labels)] == [1437, 360]


def test_the_digits_are_those_that_scikit_learn_loads() -> None:
    from sklearn import datasets  # its import takes a second in each process that only collects the tests

    rows, theirs = load_digits(), datasets.load_digits()
    assert np.array_equal(rows, np.column_stack([theirs.data, theirs.target]))
    train, test = split(rows)
    assert train.images.dtype == np.float32 and train.images.min() == 0.0 and train.images.max() == 1.0
    assert sorted(set(test.labels)) == list(range(10))


def test_a_worker_that_is_replaced_draws_the_same_batches() -> None:
    part = split(load_digits())[0].part(1, num_parts=3)
    one, again, other = (part.batch(32, worker=worker, step=5) for worker in (1, 1, 2))
    assert np.array_equal(one.images, again.images) and np.array_equal(one.labels, again.labels)
    assert not np.array_equal(one.images, other.images)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backup-workers", "3"], "--backup-workers: got 3, want 0 to 2"),
        (["--pace", "-1"], "--pace: got -1"),
        (["--run-dir", "/dev/null/x"], "cannot write to /dev/null/x: Not a directory"),
        (["--staleness", "2"], "--staleness: it is for the policy ssp, not sync"),
        (["--policy", "async", "--backup-workers", "1"], "only sync and outer have steps of several contributions, not async"),
        (["--learning-rate=-1"], "--learning-rate: optimizer 'momentum': learning_rate = -1.0, want >= 0"),
    ],
)
def test_arguments_that_make_no_sense_are_reported_in_one_line(arguments: list[str], words: str) -> None:
    refused = lockstep_here("demo", *arguments)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_every_optimizer_that_takes_gradients_can_be_named() -> None:
    assert set(NAMES) == set(GRADIENT_OPTIMIZERS)
    rates = [optimizer_of(name, learning_rate=0.5).learning_rate.arguments["value"] for name in NAMES]
    assert np.all(np.array(rates) == 0.5)


def test_without_scikit_learn_the_demo_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").touch()
    with demo(PYTHONPATH=str(tmp_path)) as process:
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert out == f"lockstep demo: {MISSING}\n"


def test_the_demo_learns_to_the_end_although_a_worker_is_killed(tmp_path: Path) -> None:
    with demo("--max-steps", "250", "--pace", "0.005", "--run-dir", str(tmp_path)) as process:
        lines = read_until(process, "test accuracy")
        (pid,) = re.findall(r"worker 1 (\d+)", next(line for line in lines if "process ids: " in line))
        os.kill(int(pid), signal.SIGKILL)
        out, _ = process.communicate(timeout=50)
    assert process.returncode == 0, out
    assert re.search(r"worker 1 \(pid \d+\) failed: killed by SIGKILL", out)
    assert "training finished; failed on the way, within the backups: worker 1" in out
    assert len(accuracies(out)) == 2 and min(accuracies(out)) >= 0.95
    logs = {path.name for path in (tmp_path / "logs").iterdir()}
    assert logs == {"ps-0.log", "ps-1.log", "chief.log", "worker-0.log", "worker-1.log", "worker-2.log"}


def test_too_few_steps_to_learn_are_reported(tmp_path: Path) -> None:
    policy = ["--policy", "ssp", "--staleness", "2", "--max-staleness", "9", "--too-stale", "scale"]
    optimizer = ["--optimizer", "adagrad", "--learning-rate", "0.1", "--max-steps", "10", "--pace", "0"]
    with demo("--ps", "1", "--workers", "2", *policy, *optimizer, "--run-dir", str(tmp_path)) as process:
        out, _ = process.communicate(timeout=40)
    assert process.returncode == 1
    assert re.search(r"test accuracy 0\.\d+, want 0.95: train longer \(--max-steps\)", out), out
    assert "policy ssp(2), scales beyond staleness 9: every contribution is a step" in out
