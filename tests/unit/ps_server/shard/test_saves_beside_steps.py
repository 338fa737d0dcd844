"""Saving beside steps: its memory, when it gives way, when it is cancelled. Knows one store and a storage that records its calls."""

import errno
import mmap
import re
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from ps_protocol.errors import PermissionDenied, PsError, StorageFailed, StorageFull, Unavailable
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.shard import AdoptRequest, SaveRequest, SaveState, ShardStatusRequest
from ps_server.model.snapshot import StateMemory
from ps_server.numbers.apply import ONE_THREAD
from ps_server.numbers.memory import MemoryBudget
from ps_server.serving.local import InProcessShard
from ps_server.shard.checkpoints import CopyMemories, SavePace, copy_memory
from ps_server.shard.table_files import TableFile
from tests.support.chief.eras import fence
from tests.support.parameter_servers.checkpoints import WatchedStorage
from tests.support.parameter_servers.sharded_training import CHIEF, ShardedTraining
from tests.support.parameter_servers.shards import telling
from tests.support.waiting import wait_until

_MIB = 1 << 20
_COPY_BYTES = 3 * _MIB


@pytest.fixture
def storage(tmp_path: Path) -> WatchedStorage:
    return WatchedStorage(tmp_path / "checkpoints")


def _training(storage: WatchedStorage, *, memory_limit_bytes: int | None = None) -> ShardedTraining:
    """One shard with a variable of 1 MiB and two slots."""
    variable = VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(_MIB // 4,))
    model = ModelSpec(variables=(variable,), optimizer=OptimizerSpec(name="adam", learning_rate=constant(0.1)), placement=PlacementPolicy())
    shard = InProcessShard(index=0, storage=storage, memory_limit_bytes=memory_limit_bytes)
    training = ShardedTraining(shards=[shard], model=model, checkpoint_dir=storage.place)
    training.create()
    training.train(1)
    return training


def _request(training: ShardedTraining, tag: str) -> SaveRequest:
    return SaveRequest(fence=fence(training.epoch, CHIEF), step=training.step, tag=tag)


def _lazily_free_bytes() -> int:
    """What this process has that the system may take without asking; skips the test where it does not say."""
    maps = Path("/proc/self/smaps")
    found = re.findall(r"LazyFree: +(\d+) kB", maps.read_text() if maps.exists() else "")
    if not found or not hasattr(mmap, "MADV_FREE"):
        pytest.skip("this system does not say what may be taken")
    return sum(map(int, found)) * 1024


def _save(training: ShardedTraining, tag: str) -> PsError | None:
    """Saves, and returns why not."""
    shard, request = training.shards[0], _request(training, tag)
    shard.call(request)
    progress = shard.call(replace(request, max_wait_s=20.0))
    assert progress.state in (SaveState.DONE, SaveState.FAILED)
    return progress.failure


def test_memory_of_a_copy_is_kept_once_for_the_next(storage: WatchedStorage) -> None:
    training = _training(storage)
    shard = training.shards[0]
    before = shard.call(ShardStatusRequest()).report.allocated_bytes
    for tag in ("one", "two", "three"):
        assert _save(training, tag) is None
        assert shard.call(ShardStatusRequest()).report.allocated_bytes == before + _COPY_BYTES


def test_system_may_take_the_pages_of_a_copy_that_is_written() -> None:
    like = StateMemory(values=np.ones(_COPY_BYTES, np.uint8), slots={}, average=None, tables=[])
    memories = CopyMemories(MemoryBudget(None, owner="ps 0"))
    memory = memories.lend(like, purpose="a copy")
    copy_memory(like, like, memory.state, stripes=ONE_THREAD)
    before = _lazily_free_bytes()
    memories.take_back(memory)
    assert _lazily_free_bytes() > before + _COPY_BYTES // 2  # the system is late with a few
    assert memories.lend(like, purpose="the next") is memory


def test_a_copy_in_a_file_gives_its_room_back_when_it_is_written(tmp_path: Path) -> None:
    like = StateMemory(values=np.ones(_COPY_BYTES, np.uint8), slots={}, average=None, tables=[])
    memories = CopyMemories(MemoryBudget(0, owner="ps 0", make_file=partial(TableFile, directory=tmp_path, owner="ps 0")))
    memory = memories.lend(like, purpose="a copy")
    copy_memory(like, like, memory.state, stripes=ONE_THREAD)
    assert memory.state.values.tobytes() == like.values.tobytes()
    memories.take_back(memory)
    is_there = weakref.ref(memory)
    del memory
    assert is_there() is None


def test_memory_that_is_kept_is_released_when_it_is_needed(storage: WatchedStorage) -> None:
    # Values twice, two slots, and two contributions or a copy.
    training = _training(storage, memory_limit_bytes=9 * _MIB)
    for tag in ("one", "two", "three"):
        training.train(1)
        training.shards[0].call(telling(training.settings))
        failure = _save(training, tag)
        assert failure is None


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, StorageFull), (errno.EIO, StorageFailed), (errno.EROFS, PermissionDenied), (errno.EFBIG, StorageFull)],
)
@pytest.mark.parametrize("at", [1, 3])
def test_disk_that_fails_at_any_write_harms_no_step_and_no_older_checkpoint(
    storage: WatchedStorage, number: int, kind: type[PsError], at: int
) -> None:
    training = _training(storage)
    training.save("old")
    expected = training.state()
    writes: list[int] = []

    def fail(size: int) -> None:
        writes.append(size)
        if len(writes) >= at:
            raise OSError(number, "no")

    storage.on_write = fail
    held = training.shards[0].call(ShardStatusRequest()).report.allocated_bytes
    for tag in ("a", "b", "c"):
        training.train(1)
        writes.clear()
        assert isinstance(_save(training, tag), kind)
    assert training.shards[0].call(ShardStatusRequest()).report.allocated_bytes <= held + _COPY_BYTES
    assert [(stored.tag, bool(stored.files)) for stored in storage.stored() if stored.files] == [("old", True)]
    # And as soon as there is room again, the same save succeeds.
    storage.on_write = lambda size: None
    training.save("c")
    training.restore("old", step=1, epoch=4)
    assert training.state() == expected


def test_a_file_that_is_no_longer_needed_is_given_up_before_its_next_piece(storage: WatchedStorage) -> None:
    training = _training(storage)
    shard, writes = training.shards[0], []

    def rise(size: int) -> None:
        writes.append(size)
        if len(writes) == 2:
            shard.call(AdoptRequest(fence=fence(4, CHIEF)))

    storage.on_write = rise
    shard.call(_request(training, "t"))
    wait_until(lambda: len(writes) == 2 and not any(stored.files for stored in storage.stored()), timeout_s=20.0)
    training.epoch = 4

    def is_saved() -> bool:
        with suppress(Unavailable):  # until the attempt before has noticed
            training.save("t")
            return True
        return False

    wait_until(is_saved)
    assert len(writes) > 4


def test_a_save_pauses_for_steps_only_as_long_as_its_pace_allows() -> None:
    clock = _Clock()
    turns = _Turns(clock, step_s=1.5)
    pace = SavePace(cast(Any, turns), clock=clock)
    clock.now += 1.0
    pace.give_way()
    assert turns.waits == []  # nobody is at work
    turns.is_idle = False
    pace.give_way()
    assert turns.waits == [2.0] and clock.now == 2.5  # the step was over after 1.5 s
    pace.give_way()
    assert turns.waits == [2.0, 0.5]
    clock.now += 1.0
    turns.step_s = 100.0
    pace.give_way()
    assert turns.waits == [2.0, 0.5, 2.0]


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Turns:
    """Turns of which each is taken by a step of `step_s` seconds, unless nobody has one."""

    def __init__(self, clock: _Clock, *, step_s: float) -> None:
        self.is_idle, self.step_s, self.waits = True, step_s, list[float]()
        self._clock = clock

    def wait_until_idle(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        self._clock.now += min(self.step_s, timeout_s)
