"""Applies on arrival that overlap, in place: an update may be lost, but none is counted twice, and nothing breaks."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import NotInitialized, Unavailable
from ps_protocol.roles.shard import PushResult, ReadMetricsRequest, ShardStatusRequest
from ps_server.optimizers.rule import UpdateRule
from ps_server.serving.local import InProcessShard
from ps_server.shard import gate
from tests.support.parameter_servers.shards import EPOCH, Trainer, layout_of, table, variable, views

LAYOUT = layout_of(variable("w", (4,)), table("emb", (6, 2)))


class _HeldRule:
    """Makes the first block that is updated wait, after its values were read and before they are written, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self._may_go_on = threading.Event(), threading.Event()
        apply = UpdateRule.apply

        def held(rule: UpdateRule, *arguments: Any, **others: Any) -> None:
            is_first = not self.has_begun.is_set()
            self.has_begun.set()
            if is_first:
                assert self._may_go_on.wait(10)
            apply(rule, *arguments, **others)

        monkeypatch.setattr(UpdateRule, "apply", held)

    def let_go(self) -> None:
        self._may_go_on.set()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[_HeldRule]:
    held = _HeldRule(monkeypatch)
    yield held
    held.let_go()


@pytest.fixture
def arrivals() -> Trainer:
    """A shard that applies on arrival; all variables 0."""
    trainer = Trainer(InProcessShard(index=0), LAYOUT)
    trainer.create()
    trainer.configure(1, applies_on_arrival=True)
    return trainer


def test_without_locking_an_update_that_overlaps_another_is_lost(arrivals: Trainer, held: _HeldRule) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(arrivals.push_rows, 0, rows={0: ([3], 2.0)})
        assert held.has_begun.wait(10)
        arrivals.push_rows(1, rows={0: ([3], 20.0)})
        np.testing.assert_array_equal(arrivals.rows([3])[1], [[-10.0] * 2])
        held.let_go()
        assert first.result(10)[1].result is PushResult.APPLIED
    # Of the two only the one that was written last is there.
    np.testing.assert_array_equal(arrivals.rows([3])[1], [[-1.0] * 2])
    assert arrivals.shard.call(ShardStatusRequest()).step == 2


def test_locked_updates_are_never_lost(arrivals: Trainer, held: _HeldRule) -> None:
    arrivals.configure(2, accepts_stale=True)
    headers = [arrivals.push_rows(worker, rows={0: ([3], value)})[0] for worker, value in enumerate((2.0, 20.0))]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(arrivals.apply, headers[0].push_id, step=0)
        assert held.has_begun.wait(10)
        second = pool.submit(arrivals.apply, headers[1].push_id, step=1)
        held.let_go()
        assert (first.result(10).step, second.result(10).step) == (1, 2)
    np.testing.assert_array_equal(arrivals.rows([3])[1], [[-11.0] * 2])


def test_push_that_comes_again_while_it_is_applied_is_not_applied_again(arrivals: Trainer, held: _HeldRule) -> None:
    header = arrivals.header()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(arrivals.push, header)
        assert held.has_begun.wait(10)
        assert arrivals.push(header).result is PushResult.DUPLICATE
        held.let_go()
        assert first.result(10).result is PushResult.APPLIED
    np.testing.assert_array_equal(views(LAYOUT, arrivals.read()[1])["w"], [-0.5] * 4)


def test_reads_continue_during_arrivals_and_configuring_waits(arrivals: Trainer, held: _HeldRule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "TURN_WAIT_S", 0.05)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(arrivals.push, arrivals.header())
        assert held.has_begun.wait(10)
        assert arrivals.read()[0] == 0
        with pytest.raises(Unavailable, match="repeat the call"):
            arrivals.configure(2, applies_on_arrival=True)
        assert arrivals.push_rows(1, rows={0: ([1], 2.0)})[1].result is PushResult.APPLIED
        held.let_go()
        first.result(10)
    arrivals.configure(2, applies_on_arrival=True)
    assert arrivals.read()[0] == 2


def test_a_shard_whose_arrival_failed_half_way_refuses_further_calls(arrivals: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(rule: UpdateRule, *arguments: Any, **others: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(UpdateRule, "apply", failing)
    with pytest.raises(MemoryError):
        arrivals.push(arrivals.header())
    with pytest.raises(NotInitialized, match="ps 0 failed half-way through step 0 and has lost its variables"):
        arrivals.shard.call(ReadMetricsRequest(epoch=EPOCH))
