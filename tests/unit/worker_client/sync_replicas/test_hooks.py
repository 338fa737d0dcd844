"""The ready-made hooks: when each logs, stops or writes, and the errors of the original in the same cases."""

import logging
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import DataLoss
from ps_protocol.process.event_file import EventFile, crc32c
from tests.support.formats.event_files import records
from tests.support.sessions.facade import FakeCluster, quadratic
from worker_client import sync_replicas
from worker_client.sync_replicas import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    ExponentialMovingAverage,
    FeedFnHook,
    FinalOpsHook,
    GradientDescentOptimizer,
    LoggingTensorHook,
    MonitoredTrainingSession,
    NanLossDuringTrainingError,
    NanTensorHook,
    SecondOrStepTimer,
    SessionRunHook,
    StepCounterHook,
    StopAtStepHook,
    SummarySaverHook,
    TrainOp,
)

LOSS = quadratic()


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def train(
    cluster: FakeCluster, hooks: list[SessionRunHook], *, num_runs: int, loss: Any = LOSS, before: Callable[[], None] = lambda: None
) -> int:
    """Returns how many runs there were."""
    op: TrainOp = GradientDescentOptimizer(1.0).minimize(loss)
    done = 0
    with MonitoredTrainingSession(cluster, hooks=hooks, log_step_count_steps=None) as session:
        while done < num_runs and not session.should_stop():
            before()
            session.run(op)
            done += 1
    return done


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StopAtStepHook(), "One of num_steps or last_step must be specified"),
        (lambda: StopAtStepHook(num_steps=1, last_step=1), "Only one of num_steps or last_step can be specified"),
        (lambda: SecondOrStepTimer(), "Either every_secs or every_steps should be provided"),
        (lambda: SecondOrStepTimer(1.0, 1), "Can not provide both every_secs and every_steps"),
        (lambda: LoggingTensorHook(["w"]), "exactly one of every_n_iter and every_n_secs must be provided"),
        (lambda: LoggingTensorHook(["w"], every_n_iter=1, every_n_secs=1.0), "exactly one of every_n_iter and every_n_secs"),
        (lambda: LoggingTensorHook(["w"], every_n_iter=0), "invalid every_n_iter=0"),
        (lambda: StepCounterHook(every_n_steps=1, every_n_secs=1.0), "exactly one of every_n_steps and every_n_secs"),
        (lambda: CheckpointSaverHook("d", save_steps=1, saver=object(), scaffold=object()), "both saver and scaffold"),
        (lambda: CheckpointSaverHook("d"), "Either every_secs or every_steps"),
        (lambda: SummarySaverHook(save_steps=1), "Exactly one of scaffold or summary_op"),
    ],
)
def test_arguments_that_the_original_refuses_are_value_errors(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_timer_is_due_at_first_and_then_every_so_many_steps_or_seconds(clock: Clock) -> None:
    steps, seconds = SecondOrStepTimer(every_steps=3), SecondOrStepTimer(every_secs=2.0, clock=clock)
    assert steps.should_trigger_for_step(5)
    assert steps.update_last_triggered_step(5) == (None, None)
    assert [steps.should_trigger_for_step(step) for step in (5, 6, 7, 8, 11)] == [False, False, False, True, True]
    seconds.update_last_triggered_step(1)
    assert not seconds.should_trigger_for_step(2)
    clock.now_s += 2.0
    assert (seconds.should_trigger_for_step(1), seconds.should_trigger_for_step(2)) == (False, True)
    assert seconds.update_last_triggered_step(2) == (2.0, 1)
    assert seconds.last_triggered_step() == 2


def test_training_stops_at_the_last_step_or_after_so_many() -> None:
    cluster = FakeCluster()
    assert train(cluster, [StopAtStepHook(last_step=3)], num_runs=9) == 3
    assert train(cluster, [StopAtStepHook(num_steps=2)], num_runs=9) == 2
    assert train(cluster, [StopAtStepHook(last_step=4)], num_runs=9) == 0  # reached before it began


def test_nan_loss_fails_or_stops(caplog: pytest.LogCaptureFixture) -> None:
    losses = iter([1.0, math.nan, 1.0, math.nan, 1.0])

    def loss(variables: Any) -> Any:
        return next(losses), {"w": np.zeros(2)}

    with pytest.raises(NanLossDuringTrainingError, match=r"NaN loss during training\."):
        train(FakeCluster(), [NanTensorHook(loss)], num_runs=5, loss=loss)
    assert train(FakeCluster(), [NanTensorHook(loss, fail_on_nan_loss=False)], num_runs=5, loss=loss) == 2
    assert "Model diverged with loss = NaN." in caplog.text


def test_values_are_logged_every_so_many_runs_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    hook = LoggingTensorHook({"step": "global_step", "loss": LOSS, "w": "w"}, every_n_iter=2, at_end=True)
    with caplog.at_level(logging.INFO):
        train(FakeCluster(), [hook], num_runs=4)
    lines = [record.getMessage() for record in caplog.records if record.name == "lockstep.hooks"]
    assert [line.partition(" (")[0] for line in lines] == [
        "step = 1, loss = 1, w = [0. 0.]",
        "step = 3, loss = 0, w = [1. 1.]",
        "step = 4, loss = 0, w = [1. 1.]",
    ]


def test_log_lines_can_be_made_by_the_program_and_at_the_end_alone(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        train(FakeCluster(), [LoggingTensorHook(["global_step"], at_end=True, formatter=lambda values: f"steps: {values}")], num_runs=2)
    assert "steps: {'global_step': 2}" in caplog.text


def test_speed_is_that_of_the_global_step(caplog: pytest.LogCaptureFixture, clock: Clock) -> None:
    def tick() -> None:
        clock.now_s += 0.5

    with caplog.at_level(logging.INFO):
        train(FakeCluster(), [StepCounterHook(every_n_steps=2, clock=clock)], num_runs=5, before=tick)
    assert [record.getMessage() for record in caplog.records if "sec" in record.getMessage()] == ["global_step/sec: 2"] * 2


def test_runs_are_fed_and_something_is_evaluated_at_the_end() -> None:
    cluster, final = FakeCluster(), FinalOpsHook(["w", "global_step"])
    numbers = iter([2.0, 3.0])
    train(cluster, [FeedFnHook(lambda: next(numbers)), final], num_runs=2, loss=lambda _, number: (0.0, {"w": np.full(2, -number)}))
    assert (final.final_ops_values[0].tolist(), final.final_ops_values[1]) == ([5.0, 5.0], 2)


def test_checkpoints_are_written_at_the_start_when_due_and_at_the_end(tmp_path: Path) -> None:
    told: list[str] = []

    class Listener(CheckpointSaverListener):
        def begin(self) -> None:
            told.append("begin")

        def before_save(self, session: Any, global_step_value: int) -> None:
            told.append(f"before {global_step_value}")

        def after_save(self, session: Any, global_step_value: int) -> bool:
            told.append(f"after {global_step_value}")
            return global_step_value >= 4

        def end(self, session: Any, global_step_value: int) -> None:
            told.append(f"end {global_step_value}")

    ExponentialMovingAverage(0.9, name="average").apply()
    hook = CheckpointSaverHook(tmp_path / "new", save_steps=2, listeners=[Listener()], max_to_keep=2)
    assert train(FakeCluster(), [hook], num_runs=9) == 4
    assert told == ["begin", "before 0", "after 0", "before 2", "after 2", "before 4", "after 4", "end 4"]
    files = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert files == ["model.ckpt-00000002.safetensors", "model.ckpt-00000004.safetensors"]
    newest = sync_replicas.latest_checkpoint(tmp_path / "new")
    assert newest is not None and newest.name == files[-1]
    checkpoint = sync_replicas.load_checkpoint(newest)
    assert checkpoint.global_step == 4
    np.testing.assert_equal(checkpoint.values, {"w": np.ones(2), "w/average": np.full(2, 0.5)})


@pytest.mark.parametrize(
    "content", [b"", b"1234", struct.pack("<Q", 10**12) + b"{}", struct.pack("<Q", 2) + b"{}", struct.pack("<Q", 2) + b"[]"]
)
def test_damaged_checkpoint_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt-00000001.safetensors"
    path.write_bytes(content)
    with pytest.raises(DataLoss, match=path.name):
        sync_replicas.load_checkpoint(path)
    assert sync_replicas.latest_checkpoint(tmp_path / "nowhere") is None


def test_summaries_are_records_that_tensorboard_reads(tmp_path: Path) -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the algorithm's published check value
    train(FakeCluster(), [SummarySaverHook(save_steps=2, output_dir=tmp_path, summary_op={"loss": LOSS})], num_runs=5)
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("events.out.tfevents.")
    events = list(records(path.read_bytes()))
    assert b"brain.Event:2" in events[0]
    assert [b"loss" in event for event in events[1:]] == [True] * 3
    assert struct.pack("<f", 1.0) in events[1]


def test_each_event_file_has_a_name_of_its_own(tmp_path: Path) -> None:
    file = EventFile.in_directory(tmp_path)
    file.add_scalars({"a": 1e300, "b": math.nan}, step=300)
    assert len(list(records(file.path.read_bytes()))) == 2
    assert EventFile.in_directory(tmp_path).path != file.path
