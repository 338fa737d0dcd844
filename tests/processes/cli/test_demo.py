"""`lockstep demo`: the model's mathematics, its data, and whole runs with real processes, some with killed workers."""

import csv
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lockstep.demo.digits import MISSING, Evaluation, evaluate, initial_values, load_digits, loss_and_gradients, split
from lockstep.demo.display import PlainDisplay, status_line
from lockstep.demo.observer import DemoStatus, Meter, WorkerCounts
from ps_protocol.process.output import BoundedOutput
from tests.support.chief.cluster_status import cluster_status, worker_status
from tests.support.processes.commands import lockstep_here
from tests.support.waiting import wait_until

# Enough where it does not matter what is trained.
SMALL = ("--ps", "1", "--workers", "2", "--backup-workers", "0")

STATUS = DemoStatus(
    step=120,
    elapsed_s=3.0,
    loss=0.25,
    test_accuracy=0.93,
    steps_per_s=40.0,
    num_stale=1,
    num_late=17,
    waiting_for="",
    workers=tuple(WorkerCounts(index=index, num_accepted=80 + index) for index in range(3)),
)


@contextmanager
def demo(*arguments: str, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "lockstep", "demo", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: "subprocess.Popen[str]", *, is_last: Callable[[str], object]) -> list[str]:
    assert process.stdout is not None and process.stderr is not None
    lines: list[str] = []
    while not lines or not is_last(lines[-1]):
        line = process.stdout.readline()
        assert line, f"the demo ended early: {lines} {process.stderr.read()}"
        lines.append(line.rstrip("\n"))
    return lines


def pids(lines: list[str]) -> dict[str, int]:
    (line,) = [line for line in lines if line.startswith("processes: ")]
    return {name: int(pid) for name, pid in re.findall(r"((?:worker|ps) \d+|chief) pid (\d+)", line)}


def is_past(step: int) -> Callable[[str], bool]:
    def condition(line: str) -> bool:
        match = re.match(r"step +(\d+)/", line)
        return match is not None and int(match[1]) >= step

    return condition


def test_gradients_are_those_of_finite_differences() -> None:
    random = np.random.default_rng(3)
    variables = {name: value.astype(np.float64) for name, value in initial_values(seed=3, num_hidden=7).items()}
    images, labels = random.random((5, 64)), random.integers(10, size=5)
    gradients = {name: np.empty_like(value) for name, value in variables.items()}
    loss_and_gradients(variables, images, labels, into=gradients)
    for name, value in variables.items():
        for index in random.integers(value.size, size=8):
            around = []
            for change in (1e-6, -1e-6):
                changed = {**variables, name: value.copy()}
                changed[name].flat[index] += change
                around.append(evaluate(changed, images, labels).loss)
            expected = (around[0] - around[1]) / 2e-6
            assert gradients[name].flat[index] == pytest.approx(expected, rel=1e-4, abs=1e-7), (name, index)


def test_a_model_that_is_sure_and_wrong_has_a_finite_loss() -> None:
    variables = initial_values(seed=1)
    variables["output/biases"][3] = 1e4
    images, labels = np.zeros((2, 64), np.float32), np.array([1, 2])
    assert np.isfinite(
        loss_and_gradients(variables, images, labels, into={name: np.empty_like(value) for name, value in variables.items()})
    )
    assert np.isfinite(evaluate(variables, images, labels).loss)


def test_one_process_alone_learns_the_digits() -> None:
    train, test = split(load_digits())
    variables = initial_values(seed=7)
    velocities = {name: np.zeros_like(value) for name, value in variables.items()}
    gradients = {name: np.zeros_like(value) for name, value in variables.items()}
    for step in range(600):
        batch = train.batch(64, worker=0, step=step)
        loss_and_gradients(variables, batch.images, batch.labels, into=gradients)
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


def test_the_rate_is_that_of_the_last_seconds() -> None:
    status = cluster_status()
    meter = Meter(num_workers=3)
    nothing = Evaluation(loss=0.0, accuracy=0.0)
    rates = [
        meter.measure(train=nothing, test=nothing, step=step, cluster=status, elapsed_s=at).steps_per_s
        for at, step in [(0.0, 0), (1.0, 10), (2.0, 20), (10.0, 420), (11.0, 470)]
    ]
    assert rates == [0.0, 10.0, 10.0, pytest.approx(50.0), pytest.approx(50.0)]


def test_a_worker_that_has_not_come_yet_has_no_contributions() -> None:
    nothing = Evaluation(loss=0.0, accuracy=0.0)
    cluster = cluster_status(worker_status(0, num_accepted=42), worker_status(1, num_accepted=41))
    status = Meter(num_workers=3).measure(train=nothing, test=nothing, step=41, cluster=cluster, elapsed_s=1.0)
    assert [worker.num_accepted for worker in status.workers] == [42, 41, 0]


def test_a_line_tells_step_loss_accuracy_speed_and_contributions() -> None:
    line = status_line(STATUS, num_steps=600)
    for part in (
        "step  120/600",
        "loss 0.2500",
        "test accuracy 0.930",
        "40.0 steps/s",
        "contributions 0:80 1:81 2:82",
        "stale 1",
        "late 17",
    ):
        assert part in line


def test_plain_lines_come_once_a_second_at_most() -> None:
    shown = io.StringIO()
    with BoundedOutput(shown) as output:
        display = PlainDisplay(output, num_steps=600)
        for _ in range(100):
            display.show(STATUS, [])
    assert len(shown.getvalue().splitlines()) == 1


def test_the_live_table_shows_the_same() -> None:
    live = importlib.import_module("lockstep.demo.live")
    shown = io.StringIO()
    with BoundedOutput(shown) as output, live.LiveDisplay(output, num_steps=600) as display:
        display.show(None, [])
        wait_until(lambda: not output.is_behind, what="the first table is written")
        display.show(STATUS, [])
        display.say("words that stay")
    out = shown.getvalue()
    assert "120 of 600" in out and "93.0%" in out and "1 / 17" in out and "words that stay" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "0"], "--steps: got 0, want 1 or more"),
        (["--workers", "0"], "--workers: got '0'"),
        (["--backup-workers", "3"], "--backup-workers: got 3, want 0 to 2"),
        (["--ps", "0"], "--ps: got '0'"),
        (["--pace", "-1"], "--pace: got -1"),
        (["--output", "/dev/null/x"], "cannot write to /dev/null/x: Not a directory; choose another --output"),
    ],
)
def test_arguments_that_make_no_sense_are_reported_in_one_line(arguments: list[str], words: str) -> None:
    refused = lockstep_here("demo", *arguments)
    assert refused.returncode == 2
    assert words in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_without_scikit_learn_the_demo_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sklearn").mkdir()
    (tmp_path / "sklearn" / "__init__.py").touch()
    with demo("--output", str(tmp_path / "out"), PYTHONPATH=str(tmp_path)) as process:
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert MISSING in stderr


def test_the_demo_learns_to_the_end_and_leaves_its_files(tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / "logs").mkdir(parents=True)
    (output / "metrics.csv").write_text("of a former run\n")
    (output / "logs" / "worker-9.log").write_text("of a former run\n")
    (output / "mine.txt").write_text("not the demo's\n")
    with demo("--pace", "0", "--steps", "250", "--output", str(output)) as process:
        stdout, stderr = process.communicate(timeout=50)
    assert (process.returncode, stderr) == (0, ""), stdout
    assert "finished: 250 steps" in stdout
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 250 and summary["test_accuracy"] >= 0.95 and summary["workers_that_failed"] == {}
    assert sum(summary["accepted_by_worker"].values()) == 500
    _, test = split(load_digits())
    with np.load(output / "model.npz") as variables:
        assert evaluate(variables, test.images, test.labels).accuracy == summary["test_accuracy"]
    rows = list(csv.DictReader((output / "metrics.csv").read_text().splitlines()))
    assert int(rows[-1]["step"]) == 250 and float(rows[-1]["test_accuracy"]) == pytest.approx(summary["test_accuracy"], abs=1e-6)
    assert {path.name for path in (output / "logs").iterdir()} == {
        "ps-0.log",
        "ps-1.log",
        "chief.log",
        *(f"worker-{i}.log" for i in range(3)),
    }
    assert (output / "mine.txt").exists()


def test_a_worker_that_is_killed_does_not_keep_the_demo_from_its_end(tmp_path: Path) -> None:
    with demo("--ps", "1", "--steps", "250", "--pace", "0.005", "--output", str(tmp_path)) as process:
        lines = read_until(process, is_last=is_past(1))
        os.kill(pids(lines)["worker 1"], signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=50)
    assert (process.returncode, stderr) == (0, ""), stdout
    assert re.search(r"worker 1 \(pid \d+\) failed: killed by SIGKILL", stdout)
    assert "training continues: 2 workers are left, a step needs 2" in stdout
    assert "lost during training: worker 1 (killed by SIGKILL)" in stdout
    assert json.loads((tmp_path / "summary.json").read_text())["workers_that_failed"] == {"worker 1": "killed by SIGKILL"}


def test_the_demo_reports_that_too_many_workers_died_and_fails(tmp_path: Path) -> None:
    with demo(*SMALL, "--output", str(tmp_path)) as process:
        workers = pids(read_until(process, is_last=is_past(1)))
        os.kill(workers["worker 1"], signal.SIGKILL)
        begin = time.monotonic()
        stdout, stderr = process.communicate(timeout=20)
    assert time.monotonic() - begin < 12.0  # workers have 5 s to leave
    assert process.returncode == 1
    assert re.search(r"worker 1 \(pid \d+\) failed: killed by SIGKILL", stdout)
    assert "ending all: 1 worker is left, a step needs 2" in stdout
    assert "worker 1 failed first: killed by SIGKILL" in stderr


@pytest.mark.parametrize("phase", ["starting", "training"])
def test_ctrl_c_ends_the_demo_within_two_seconds(tmp_path: Path, phase: str) -> None:
    with demo(*SMALL, "--output", str(tmp_path)) as process:
        read_until(process, is_last=is_past(1) if phase == "training" else lambda line: line.startswith("starting"))
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert time.monotonic() - begin < 4.0  # 2 s promised; the machine may be busy
    assert process.returncode == 130
    assert "ended by SIGINT" in stderr and "Traceback" not in stderr


def test_a_worker_that_comes_when_all_is_over_is_not_waited_for(tmp_path: Path) -> None:
    with demo("--ps", "1", "--workers", "3", "--backup-workers", "2", "--steps", "3", "--pace", "0", "--output", str(tmp_path)) as process:
        stdout, _ = process.communicate(timeout=20)
    assert "finished: 3 steps" in stdout


def test_too_few_steps_to_learn_are_reported_also_without_locks(tmp_path: Path) -> None:
    policy = ["--policy", "async", "--no-locking", "--optimizer", "adagrad", "--learning-rate", "0.1"]
    with demo("--ps", "1", "--workers", "2", *policy, "--steps", "10", "--pace", "0", "--output", str(tmp_path)) as process:
        stdout, stderr = process.communicate(timeout=40)
    assert process.returncode == 1
    assert re.search(r"test accuracy 0\.\d+ after 1[01] steps, want 0.95: train longer \(--steps\)", stderr), stderr
    assert "policy async, unlocked: every contribution is a step" in stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["policy"], summary["optimizer"], summary["steps_asked_for"]) == ("async, unlocked", "adagrad", 10)
    # Without a lock nobody can be kept from contributing once more while the last one is counted.
    assert sum(summary["accepted_by_worker"].values()) == summary["steps"] <= 11
