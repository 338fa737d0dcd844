"""Checkpoints of one store; the test runs the background work. Knows no file system but the test's own."""

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ps_protocol.checkpoint.catalog import open_storage
from ps_protocol.errors import (
    EpochMismatch,
    LimitExceeded,
    NotInitialized,
    ShuttingDown,
    StepMismatch,
    Unavailable,
    VariableExists,
)
from ps_protocol.model.layout import Segments
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.checkpoint import Checkpoint
from ps_protocol.roles.shard import AdoptRequest, ReplicaState, SaveRequest, SaveState, ShardSettings, ShardStatusRequest, ShutdownRequest
from ps_server.model.shard_model import ShardModel
from ps_server.serving.local import InProcessShard
from ps_server.shard.shard import ServedShard
from tests.support.chief.eras import fence
from tests.support.parameter_servers.sharded_training import CHIEF, ShardedTraining
from tests.support.parameter_servers.shards import telling
from tests.support.waiting import wait_until

MODEL = ModelSpec(
    variables=(VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(1024,)),),
    optimizer=OptimizerSpec(name="adam", learning_rate=constant(0.1)),
    placement=PlacementPolicy(),
)


class Later:
    """Work that was begun and waits to be done."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def __call__(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def do_all(self) -> None:
        """Does it all, in order."""
        while self.work:
            self.work.pop(0)()


@pytest.fixture
def later() -> Later:
    return Later()


@pytest.fixture
def training(tmp_path: Path, later: Later) -> ShardedTraining:
    """One shard at step 1, whose files are written and read by `later`."""
    directory = str(tmp_path / "checkpoints")
    shard = InProcessShard(index=0, storage=open_storage(directory), run_in_background=later)
    training = ShardedTraining(shards=[shard], model=MODEL, checkpoint_dir=directory)
    training.create()
    training.train(1)
    return training


def _request(training: ShardedTraining, tag: str = "t") -> SaveRequest:
    return SaveRequest(fence=fence(training.epoch, CHIEF), step=training.step, tag=tag)


def _saved(training: ShardedTraining, later: Later, tag: str = "t") -> Checkpoint:
    training.shards[0].call(_request(training, tag))
    later.do_all()
    return training.save(tag)


def test_save_is_begun_once_however_often_it_is_asked_for(training: ShardedTraining, later: Later) -> None:
    for _ in range(3):
        assert training.shards[0].call(_request(training)).state is SaveState.WRITING
    assert len(later.work) == 1
    later.do_all()
    done = training.shards[0].call(replace(_request(training), max_wait_s=1.0))
    assert done.state is SaveState.DONE
    # Its file is there: nothing is to be done again, though steps have continued.
    assert training.shards[0].call(_request(training)) == done
    assert not later.work


def test_a_save_writes_the_requested_step_however_late_it_is_written(training: ShardedTraining, later: Later) -> None:
    expected = training.state()
    training.shards[0].call(_request(training))
    training.train(3)
    later.do_all()
    training.step = 1
    training.save("t")
    training.epoch = 4
    training.shards[0].call(training.restore_request(0, "t"))
    later.do_all()
    assert training.state() == expected


def test_a_save_whose_file_was_removed_is_started_again(training: ShardedTraining, later: Later) -> None:
    training.shards[0].call(_request(training))
    later.do_all()
    open_storage(training.checkpoint_dir).remove_incomplete("t")
    assert training.shards[0].call(_request(training)).state is SaveState.WRITING
    later.do_all()
    assert training.shards[0].call(_request(training)).state is SaveState.DONE


def test_another_save_waits_until_the_one_before_has_been_given_up(training: ShardedTraining, later: Later) -> None:
    shard = training.shards[0]
    shard.call(_request(training, "one"))
    with pytest.raises(Unavailable, match="checkpoint one is still being written"):
        shard.call(_request(training, "two"))
    later.do_all()
    assert shard.call(_request(training, "two")).state is SaveState.WRITING
    later.do_all()
    assert shard.call(_request(training, "two")).state is SaveState.DONE


def test_a_copy_without_memory_for_it_does_no_harm(tmp_path: Path, later: Later) -> None:
    directory = str(tmp_path / "checkpoints")
    # Values twice, two slots and two contributions fit.
    shard = InProcessShard(index=0, storage=open_storage(directory), run_in_background=later, memory_limit_bytes=7 * 4096)
    training = ShardedTraining(shards=[shard], model=MODEL, checkpoint_dir=directory)
    training.create()
    training.train(1)
    before = shard.call(ShardStatusRequest()).report.allocated_bytes
    with pytest.raises(LimitExceeded, match=r"the copy for checkpoint t needs 12\.0 KiB.*--max-memory-bytes"):
        shard.call(_request(training))
    assert shard.call(ShardStatusRequest()).report.allocated_bytes == before
    training.train(1)


def test_save_under_way_is_answered_while_the_shard_ends(training: ShardedTraining, later: Later) -> None:
    shard = training.shards[0]
    shard.call(_request(training))
    shard.call(ShutdownRequest(fence=fence(training.epoch, CHIEF), reason="test"))
    later.do_all()
    assert shard.call(replace(_request(training), max_wait_s=1.0)).state is SaveState.DONE
    with pytest.raises(ShuttingDown):
        shard.call(_request(training, "another"))


def test_a_shard_reports_its_restoration_and_refuses_other_values_meanwhile(training: ShardedTraining, later: Later) -> None:
    _saved(training, later)
    shard = training.shards[0]
    shard.call(AdoptRequest(fence=fence(4, CHIEF)))
    training.epoch = 4
    request = training.restore_request(0, "t")
    for _ in range(2):
        assert not shard.call(request).is_done
    assert len(later.work) == 1
    with pytest.raises(Unavailable, match="being restored from checkpoint t"):
        training.create()
    later.do_all()
    progress = shard.call(replace(request, max_wait_s=1.0))
    assert progress.is_done and progress.num_bytes_read == progress.num_bytes > 0
    training.train(1)


def test_later_epoch_breaks_a_restoration_off(training: ShardedTraining, later: Later) -> None:
    _saved(training, later)
    shard = training.shards[0]
    training.epoch = 4
    old = training.restore_request(0, "t")
    shard.call(old)
    shard.call(AdoptRequest(fence=fence(5, CHIEF)))
    with pytest.raises(EpochMismatch):
        shard.call(replace(old, max_wait_s=1.0))
    training.epoch = 5
    assert not shard.call(training.restore_request(0, "t")).is_done
    later.do_all()
    assert shard.call(replace(training.restore_request(0, "t"), max_wait_s=1.0)).is_done
    training.train(1)


def test_a_replica_that_was_brought_back_ignores_late_copies_of_earlier_commands(training: ShardedTraining, later: Later) -> None:
    _saved(training, later)
    shard = training.shards[0]
    assert isinstance(shard, InProcessShard)
    lost = partial(AdoptRequest, fence=fence(training.epoch, CHIEF))
    assert shard.call(lost(replica=ReplicaState(version=1, forgets=True))).step is None
    earlier = dataclasses.replace(training.restore_request(0, "t"), replica_version=1)
    shard.call(earlier)
    later.do_all()
    training.train(1)
    _saved(training, later, "another")
    # It is lost once more, and brought back from a later checkpoint.
    assert shard.call(lost(replica=ReplicaState(version=2, forgets=True))).step is None
    request = dataclasses.replace(training.restore_request(0, "another"), replica_version=2)
    shard.call(request)
    later.do_all()
    training.train(1)
    for version in (1, 2):
        assert shard.call(lost(replica=ReplicaState(version=version, forgets=True))).step == training.step
        lost(replica=ReplicaState(version=version, is_alone=True))
        assert not shard.call(ShardStatusRequest()).is_alone
    with pytest.raises(Unavailable):
        shard.call(earlier)
    assert shard.call(request).is_done
    training.train(1)


def test_the_replica_state_of_a_later_chief_replaces_one_with_a_higher_version(training: ShardedTraining) -> None:
    shard = training.shards[0]
    assert isinstance(shard, InProcessShard)
    shard.call(AdoptRequest(fence=fence(training.epoch, CHIEF), replica=ReplicaState(version=7, is_alone=True)))
    assert shard.call(ShardStatusRequest()).is_alone
    shard.call(AdoptRequest(fence=fence(training.epoch, CHIEF + 1), replica=ReplicaState(version=1)))
    assert not shard.call(ShardStatusRequest()).is_alone
    assert shard.call(AdoptRequest(fence=fence(training.epoch, CHIEF + 1), replica=ReplicaState(version=2, forgets=True))).step is None


def test_memory_is_the_same_after_any_number_of_restorations(training: ShardedTraining, later: Later) -> None:
    _saved(training, later)
    counts = []
    for epoch in range(4, 8):
        training.epoch, training.step = epoch, 1
        request = training.restore_request(0, "t")
        training.shards[0].call(request)
        later.do_all()
        training.train(2)
        counts.append(training.shards[0].call(ShardStatusRequest()).report.allocated_bytes)
    assert len(set(counts)) == 1


def test_shard_whose_step_failed_half_way_is_whole_again_after_a_restoration(
    training: ShardedTraining, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    _saved(training, later)
    expected = training.state()

    def failing(model: ShardModel, work: object) -> int:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ShardModel, "run_apply", failing)
        with pytest.raises(MemoryError):
            training.train(1)
    shard = training.shards[0]
    with pytest.raises(NotInitialized):
        training.state()
    # What is half old and half new is gone, not served under the new epoch.
    assert shard.call(AdoptRequest(fence=fence(4, CHIEF))).step is None
    training.epoch = 4
    with pytest.raises(NotInitialized):
        training.state()
    shard.call(training.restore_request(0, "t"))
    later.do_all()
    assert training.state() == expected


def test_values_applied_on_arrival_are_saved_unchanged(training: ShardedTraining, later: Later) -> None:
    with pytest.raises(StepMismatch):
        training.shards[0].call(SaveRequest(fence=fence(training.epoch, CHIEF), step=7, tag="t"))
    shard = InProcessShard(index=0, storage=open_storage(training.checkpoint_dir), run_in_background=later)
    training = ShardedTraining(shards=[shard], model=MODEL, checkpoint_dir=training.checkpoint_dir)
    training.create()
    shard.call(telling(ShardSettings(fence=fence(training.epoch, CHIEF), version=1, applies_on_arrival=True)))
    training.step = 7
    assert _saved(training, later).step == 7
    training.epoch = 4
    shard.call(training.restore_request(0, "t"))
    later.do_all()
    assert shard.call(ShardStatusRequest()).step == 7


def test_untrained_values_are_replaced_by_those_of_a_later_epoch(training: ShardedTraining) -> None:
    shard = training.shards[0]
    training.epoch = 4
    shard.call(AdoptRequest(fence=fence(4, CHIEF)))
    other = dataclasses.replace(MODEL, variables=(VariableSpec(name="v", data_type=DataType.FLOAT64, shape=(3,)),))
    with pytest.raises(VariableExists):
        ShardedTraining(shards=[shard], model=other, checkpoint_dir="", epoch=4).create()
    fresh = InProcessShard(index=0)
    ShardedTraining(shards=[fresh], model=MODEL, checkpoint_dir="", epoch=3).create()
    later = ShardedTraining(shards=[fresh], model=other, checkpoint_dir="", epoch=4)
    later.create()
    later.train(1)
    assert not fresh.create_variables(dataclasses.replace(later.spec(0), initial_step=0), Segments(()))


def leaving(training: ShardedTraining) -> threading.Thread:
    """Has the shard wait for its last save, until the chief has been told that it does."""
    shard: ServedShard = training.shards[0]._shard  # type: ignore[attr-defined]  # no call of the chief's asks for this
    thread = threading.Thread(target=shard.await_last_save, args=(60.0,), kwargs={"is_hurried": lambda: False})
    thread.start()
    asks = ShardStatusRequest(fence=_request(training).fence)
    wait_until(lambda: training.shards[0].call(asks).is_leaving, what="the chief is told")
    return thread


def test_a_server_that_is_asked_to_end_waits_until_the_chief_knows_that_it_has_saved(training: ShardedTraining, later: Later) -> None:
    thread = leaving(training)
    training.shards[0].call(_request(training))
    thread.join(1.5)
    assert thread.is_alive(), "a save has begun"
    later.do_all()
    thread.join(0.3)
    assert thread.is_alive(), "the chief has to hear of the file, too"
    assert training.shards[0].call(replace(_request(training), max_wait_s=1.0)).state is SaveState.DONE
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_server_that_is_asked_to_end_waits_only_a_moment_for_a_chief_that_has_no_need_to_save(training: ShardedTraining) -> None:
    thread = leaving(training)
    thread.join(5.0)
    assert not thread.is_alive()


def test_a_server_with_nothing_to_lose_does_not_wait_for_a_chief() -> None:
    shard = ServedShard(index=0, process_incarnation=1)
    shard.call(AdoptRequest(fence=fence(3, CHIEF)))
    shard.await_last_save(60.0, is_hurried=lambda: False)


def test_a_server_whose_variables_another_one_has_too_does_not_wait_for_a_chief(training: ShardedTraining) -> None:
    fenced = _request(training).fence
    training.shards[0].call(AdoptRequest(fence=fenced, replica=ReplicaState(version=7)))
    shard: ServedShard = training.shards[0]._shard  # type: ignore[attr-defined]
    shard.await_last_save(60.0, is_hurried=lambda: False)
