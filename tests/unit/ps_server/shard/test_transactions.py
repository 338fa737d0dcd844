"""Pushes, creations, readings and applies that overlap, on the store itself: each whole or without effect."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ps_protocol.errors import (
    Cancelled,
    EpochMismatch,
    NotInitialized,
    ShuttingDown,
    StepGone,
)
from ps_protocol.roles.shard import (
    AdoptRequest,
    ApplyRequest,
    PushHeader,
    PushReply,
    PushResult,
    ReadRequest,
    ShardSpec,
    ShardStatusRequest,
    ShutdownRequest,
)
from ps_server.model.shard_model import ShardModel
from ps_server.serving.local import InProcessShard
from ps_server.shard.shard import ServedShard
from tests.support.chief.eras import fence
from tests.support.parameter_servers.shards import CHIEF, EPOCH, MIXED, Trainer

HALF = MIXED.nbytes // 2


class _Fixture:
    """A store, and the words of chief and workers for it."""

    def __init__(self) -> None:
        self.store = ServedShard(index=0, process_incarnation=1)
        self.store.call(AdoptRequest(fence=fence(EPOCH, CHIEF)))
        # Only makes specifications and headers; its own shard is not used.
        self.words = Trainer(InProcessShard(index=0))
        self.bytes = self.words.arena(1.0).tobytes()

    def create(self, **changes: int) -> bool:
        with self.store.open_creation(self.spec(**changes)) as creation:
            creation.write(0, self.bytes)
            return creation.finish()

    def spec(self, **changes: int) -> ShardSpec:
        return self.words.spec(**changes)

    def header(
        self, worker: int = 0, *, step: int = 0, incarnation: int = 1, sequence: int | None = None, epoch: int = EPOCH
    ) -> PushHeader:
        return self.words.header(worker, step=step, incarnation=incarnation, sequence=sequence, epoch=epoch)

    def push(self, header: PushHeader) -> PushReply:
        with self.store.open_push(header) as push:
            push.write(0, self.bytes)
            return push.finish()

    def request(self, header: PushHeader) -> ApplyRequest:
        return ApplyRequest(fence=fence(EPOCH, CHIEF), step=header.step, contributors=(header.push_id,))


@pytest.fixture
def fixture() -> _Fixture:
    return _Fixture()


@pytest.fixture
def created(fixture: _Fixture) -> _Fixture:
    fixture.create()
    return fixture


# Pushes


def test_push_under_way_ends_with_its_epoch(created: _Fixture) -> None:
    with pytest.raises(EpochMismatch, match=f"cluster epoch rose to {EPOCH + 1}"):
        with created.store.open_push(created.header()) as push:
            created.store.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF)))
            push.finish()


# Creations


def test_creation_left_before_it_is_finished_frees_its_memory(fixture: _Fixture) -> None:
    with fixture.store.open_creation(fixture.spec()) as creation:
        creation.write(0, fixture.bytes[:HALF])
        words = rf"{HALF} bytes of {MIXED.nbytes} bytes for 5 variables there in attempt 1; waiting for the rest"
        with pytest.raises(NotInitialized, match=words):
            fixture.push(fixture.header())
    assert fixture.store.call(ShardStatusRequest()).report.allocated_bytes == 0
    assert fixture.create()


def test_creation_that_comes_again_displaces_the_first(fixture: _Fixture) -> None:
    with pytest.raises(Cancelled, match="attempt 1 was broken off, attempt 1 has begun on another stream"):
        with fixture.store.open_creation(fixture.spec()) as first:
            first.write(0, fixture.bytes[:HALF])
            assert fixture.create()
            assert not first.write(HALF, fixture.bytes[HALF:])
            first.finish()
    assert fixture.store.call(ShardStatusRequest()).report.allocated_bytes == 2 * MIXED.nbytes


def test_earlier_attempt_does_not_displace_a_later_one(fixture: _Fixture) -> None:
    with fixture.store.open_creation(fixture.spec(attempt=2)) as later:
        with pytest.raises(Cancelled, match="attempt 2 has begun"):
            fixture.store.open_creation(fixture.spec(attempt=1))
        later.write(0, fixture.bytes)
        assert later.finish()


def test_creation_under_way_ends_with_its_epoch(fixture: _Fixture) -> None:
    with pytest.raises(EpochMismatch):
        with fixture.store.open_creation(fixture.spec()) as creation:
            creation.write(0, fixture.bytes)
            fixture.store.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF)))
            creation.finish()
    assert fixture.store.call(ShardStatusRequest()).report.allocated_bytes == 0


# Readings


def test_a_read_whose_copy_was_overwritten_meanwhile_raises(created: _Fixture) -> None:
    reading = created.store.open_variables(ReadRequest(epoch=EPOCH, step=0, layout_hash=MIXED.hash))
    for step in range(2):
        reading.check()
        header = created.header(step=step)
        created.push(header)
        created.store.apply_step(created.request(header))
    with pytest.raises(StepGone, match="the copy of the variables of step 0 was overwritten while it was read"):
        reading.check()


def test_a_read_of_a_slot_that_changed_meanwhile_raises() -> None:
    fixture = _Fixture()
    fixture.words = Trainer(InProcessShard(index=0), optimizer="momentum")
    fixture.create()
    reading = fixture.store.open_slot(ReadRequest(slot="momentum", epoch=EPOCH, layout_hash=MIXED.hash))
    header = fixture.header()
    fixture.push(header)
    reading.check()
    fixture.store.apply_step(fixture.request(header))
    with pytest.raises(StepGone, match="slot 'momentum' of step 0"):
        reading.check()


# Applies


class _HeldApply:
    """Makes `run_apply` wait until it is let go, so that other calls meet an apply under way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self._may_go_on = threading.Event(), threading.Event()
        run_apply = ShardModel.run_apply

        def held(model: ShardModel, memory: object) -> int:
            self.has_begun.set()
            assert self._may_go_on.wait(10)
            return run_apply(model, memory)  # type: ignore[arg-type]

        monkeypatch.setattr(ShardModel, "run_apply", held)

    def let_go(self) -> None:
        self._may_go_on.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[_HeldApply]:
    held = _HeldApply(monkeypatch)
    yield held
    held.let_go()


def test_apply_repeated_while_it_is_at_work_is_answered_once_it_is_done(created: _Fixture, held: _HeldApply) -> None:
    header = created.header()
    created.push(header)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(created.store.apply_step, created.request(header))
        assert held.has_begun.wait(10)
        second = pool.submit(created.store.apply_step, created.request(header))
        held.let_go()
        assert (first.result(10).repeated_request, second.result(10).repeated_request) == (False, True)
    assert created.store.call(ShardStatusRequest()).step == 1


def test_all_calls_but_reads_of_slots_continue_during_an_apply(created: _Fixture, held: _HeldApply) -> None:
    header = created.header()
    created.push(header)
    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(created.store.apply_step, created.request(header))
        assert held.has_begun.wait(10)
        assert created.store.open_variables(ReadRequest(epoch=EPOCH, step=None, layout_hash=MIXED.hash)).step == 0
        assert created.store.call(ShardStatusRequest()).step == 0
        late = created.header(1)
        assert created.push(late) == PushReply(result=PushResult.STAGED, step=0)
        held.let_go()
        assert applied.result(10).step == 1
    # It was whole before the step was, but did not belong to it.
    assert created.store.call(ShardStatusRequest()).report.num_staged == 0
    assert created.push(late) == PushReply(result=PushResult.DUPLICATE, step=1)


def test_apply_under_way_is_finished_when_the_shard_shuts_down(created: _Fixture, held: _HeldApply) -> None:
    header = created.header()
    created.push(header)
    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(created.store.apply_step, created.request(header))
        assert held.has_begun.wait(10)
        created.store.call(ShutdownRequest(fence=fence(EPOCH, CHIEF), reason="test"))
        with pytest.raises(ShuttingDown):
            created.push(created.header(1))
        held.let_go()
        assert applied.result(10).step == 1


def test_a_shard_whose_apply_failed_half_way_refuses_further_calls(created: _Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(model: ShardModel, memory: object) -> int:
        raise MemoryError

    monkeypatch.setattr(ShardModel, "run_apply", failing)
    header = created.header()
    created.push(header)
    with pytest.raises(MemoryError):
        created.store.apply_step(created.request(header))
    with pytest.raises(NotInitialized, match="ps 0 failed half-way through step 0 and has lost its variables"):
        created.store.open_variables(ReadRequest(epoch=EPOCH, step=None, layout_hash=MIXED.hash))
    assert created.store.call(ShardStatusRequest()).damage == "ps 0 failed half-way through step 0"
    assert created.store.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1))).step is None, "it says so, and refuses nothing"
    assert created.store.call(ShardStatusRequest()).damage
    assert created.store.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF + 1))).step is None
    assert not created.store.call(ShardStatusRequest()).damage
