"""Readers and steps that overlap: no reader sees half a step, and readers get through also where steps do not wait for them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ps_protocol.errors import StepGone, Superseded, Unavailable
from ps_protocol.roles.shard import (
    AdoptRequest,
    ApplyRequest,
    PushHeader,
    ReadRequest,
    RowsRequest,
    Shard,
    ShardSettings,
    ShardStatusRequest,
)
from ps_server.numbers.memory import MemoryBudget
from ps_server.serving.local import InProcessShard
from ps_server.shard import gate
from ps_server.shard.shard import ServedShard
from tests.support.chief.eras import fence
from tests.support.parameter_servers.shards import CHIEF, EACH_WAY, EPOCH, Trainer, layout_of, shard_over, table, telling, variable

shard = shard_over(EACH_WAY)

LAYOUT = layout_of(variable("w", (4,)), table("emb", (6, 2)))


def _run(*tasks: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(tasks)) as pool:
        for future in [pool.submit(task) for task in tasks]:
            future.result(50)


class _Fixture:
    """A store that accepts stale contributions, and the words of chief and workers for it."""

    def __init__(self) -> None:
        self.store = ServedShard(index=0, process_incarnation=1)
        self.store.call(AdoptRequest(fence=fence(EPOCH, CHIEF)))
        # Only makes specifications and headers; its own shard is not used.
        self.words = Trainer(InProcessShard(index=0), LAYOUT)
        with self.store.open_creation(self.words.spec()) as creation:
            creation.write(0, bytes(self.words.spec().content_bytes))
            creation.finish()
        self.store.call(telling(ShardSettings(fence=fence(EPOCH, CHIEF), version=1, accepts_stale=True)))

    def push(self) -> PushHeader:
        header = self.words.header()
        with self.store.open_push(header) as push:
            push.write(0, self.words.arena(1.0).tobytes())
            push.finish()
        return header

    def step(self, step: int) -> None:
        request = ApplyRequest(fence=fence(EPOCH, CHIEF), step=step, contributors=(self.push().push_id,))
        self.store.apply_step(request)


@pytest.fixture
def fixture() -> _Fixture:
    return _Fixture()


def test_step_waits_for_a_reader_of_what_it_would_overwrite(fixture: _Fixture) -> None:
    reading = fixture.store.open_variables(ReadRequest(epoch=EPOCH, step=None, layout_hash=LAYOUT.hash))
    chunks = reading.chunks(8)
    next(chunks)
    fixture.step(0)
    has_begun = threading.Event()

    def step() -> None:
        has_begun.set()
        fixture.step(1)

    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(step)
        assert has_begun.wait(10)
        for _ in chunks:
            reading.check()
        applied.result(10)
    assert fixture.store.call(ShardStatusRequest()).step == 2


def test_step_waits_for_a_reader_of_rows(fixture: _Fixture) -> None:
    request = RowsRequest(epoch=EPOCH, layout_hash=LAYOUT.hash, table=0, step=None)
    has_begun = threading.Event()

    def step() -> None:
        has_begun.set()
        fixture.step(1)

    with ThreadPoolExecutor(1) as pool:
        with fixture.store.open_rows(request) as reading:
            fixture.step(0)
            applied = pool.submit(step)
            assert has_begun.wait(10)
            for row in range(6):
                reading.take(np.array([row]))
        applied.result(10)
    assert fixture.store.call(ShardStatusRequest()).step == 2


def test_step_does_not_wait_for_ever(fixture: _Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "READERS_WAIT_S", 0.01)
    reading = fixture.store.open_variables(ReadRequest(epoch=EPOCH, step=None, layout_hash=LAYOUT.hash))
    chunks = reading.chunks(8)
    next(chunks)
    fixture.step(0)
    fixture.step(1)
    # Nor again for a reader that it has waited for in vain: this test would take too long.
    monkeypatch.setattr(gate, "READERS_WAIT_S", 1000.0)
    fixture.step(2)
    with pytest.raises(StepGone):
        reading.check()
    chunks.close()


def test_a_call_that_waits_too_long_for_its_turn_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "TURN_WAIT_S", 0.01)
    mine = gate.Gate("ps 0", budget=MemoryBudget(None, owner="ps 0"))

    def other() -> None:
        with mine.turn(lambda: None):
            raise AssertionError

    with ThreadPoolExecutor(1) as pool:
        with mine.turn(lambda: None) as turn, turn.unlocked():
            with pytest.raises(Unavailable, match=r"ps 0: a step has been under way for 0\.01 s; repeat the call"):
                pool.submit(other).result(10)
        # An arrival is in the way, too, and afterwards the turn is free again.
        with mine.arrival() as arrival, arrival.unlocked():
            with pytest.raises(Unavailable):
                pool.submit(other).result(10)
            assert not mine.is_idle
        assert mine.is_free
        with mine.turn(lambda: None):
            assert not mine.is_free


def test_a_caller_that_is_refused_after_its_wait_gives_its_turn_back() -> None:
    mine, answers = gate.Gate("ps 0", budget=MemoryBudget(None, owner="ps 0")), [None, Superseded("a later chief has it")]
    has_begun = threading.Event()

    def check() -> None:
        has_begun.set()
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    def other() -> None:
        with mine.turn(check):
            raise AssertionError

    with ThreadPoolExecutor(1) as pool:
        with mine.turn(lambda: None) as turn, turn.unlocked():
            waiting = pool.submit(other)
            assert has_begun.wait(10)
        with pytest.raises(Superseded):
            waiting.result(10)
    assert mine.is_free


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_readers_of_rows_never_see_half_a_step(shard: Shard, optimizer: str) -> None:
    """A chief that steps as fast as it can, and readers; all rows that were read belong to one step, bit for bit."""
    num_rows, num_steps = 1 << 13, 12
    layout = layout_of(table("emb", (num_rows, 16)))
    trainer = Trainer(shard, layout, optimizer=optimizer)
    trainer.create()
    expected: dict[int, float] = {0: 0.0}
    seen: list[tuple[int, float]] = []
    is_done = threading.Event()
    # Every second row has a gradient; all of those are equal in each step.
    touched = list(range(0, num_rows, 2))

    def train() -> None:
        try:
            for step in range(num_steps):
                trainer.train_rows(step, touched, 1.0)
                expected[step + 1] = float(trainer.rows([0], step=step + 1)[1][0, 0])
        finally:
            is_done.set()

    def read() -> None:
        indices = np.random.default_rng(0).permutation(num_rows)
        while not is_done.is_set():
            try:
                step, rows = trainer.rows(indices)
            except StepGone:
                continue
            values = np.unique(rows[indices % 2 == 0])
            assert values.size == 1
            assert not rows[indices % 2 == 1].any()
            seen.append((step, float(values[0])))

    _run(train, read, read)
    assert seen, "no reader came through"
    assert all(expected[step] == value for step, value in seen)
