"""A named accumulator's memory of its callers: when a place in the queue ends, which results are kept. The clock is a number."""

import numpy as np
import pytest

from ps_protocol.errors import Cancelled, LimitExceeded
from ps_protocol.model.variables import DataType
from ps_protocol.roles.accumulators import AccumulatorSpec, GradientHeader, Taken, TakeRequest
from ps_server.accumulators.registry import MAX_KEPT_RESULTS, PLACE_S, NamedAccumulator
from ps_server.accumulators.rounds import Gradient
from ps_server.numbers.memory import MemoryBudget


class Bench:
    """An accumulator of float32 vectors, and its clock."""

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self.now = 0.0
        self.budget = MemoryBudget(limit_bytes, owner="ps 0")
        spec = AccumulatorSpec(name="a", data_type=DataType.FLOAT32)
        self.accumulator = NamedAccumulator(spec, budget=self.budget, clock=lambda: self.now)
        self._num_sent = 0

    def push(self, value: float, *, size: int = 1) -> None:
        self._num_sent += 1
        step = self.accumulator.describe().step
        header = GradientHeader(name="a", client=1, sequence=self._num_sent, local_step=step, shape=(size,))
        self.accumulator.apply(header, Gradient(np.full(size, value, np.float32)))

    def ask(self, client: int, *, num_required: int = 1) -> None:
        """A call that ends before there is anything."""
        with self.accumulator.open_take(self._request(client, num_required)):
            pass

    def take(self, client: int, *, num_required: int = 1) -> Taken:
        """A call that finds what it wants."""
        with self.accumulator.open_take(self._request(client, num_required)) as taking:
            return taking.wait()

    @staticmethod
    def _request(client: int, num_required: int) -> TakeRequest:
        return TakeRequest(name="a", client=client, sequence=1, num_required=num_required, max_wait_s=1.0)


def test_a_caller_that_asks_again_in_time_keeps_its_place() -> None:
    bench = Bench()
    bench.ask(1)
    bench.now = PLACE_S - 0.1
    bench.ask(2)
    bench.push(3.0)
    assert bench.take(1).values is not None
    assert bench.accumulator.describe().num_waiting == 1


def test_the_place_of_a_caller_that_does_not_ask_again_goes_to_the_next() -> None:
    bench = Bench()
    bench.ask(1, num_required=5)
    bench.now = 1.0
    bench.ask(2)
    bench.now = PLACE_S + 0.1
    bench.push(3.0)
    taken = bench.take(2)
    assert taken.values is not None
    assert taken.values.tolist() == [3.0]
    assert bench.accumulator.describe().num_waiting == 0


def test_results_are_kept_for_a_while_and_a_forgotten_one_is_not_taken_twice() -> None:
    bench = Bench()
    clients = range(1, MAX_KEPT_RESULTS + 2)
    for client in clients:
        bench.push(float(client))
        bench.take(client)
    bench.push(99.0)
    with pytest.raises(Cancelled, match="not kept any more"):
        bench.take(clients[0])
    kept = bench.take(clients[1]).values
    assert kept is not None
    assert kept.tolist() == [2.0]
    assert bench.accumulator.describe().num_accumulated == 1


def test_memory_that_is_held_is_counted_and_what_does_not_fit_is_refused() -> None:
    bench = Bench(limit_bytes=1000)
    bench.push(1.0, size=100)
    assert bench.budget.allocated_bytes == 400
    bench.take(1)
    assert bench.budget.allocated_bytes == 400, "the result is kept in case its answer was lost"
    with pytest.raises(LimitExceeded, match="accumulator 'a'"):
        bench.push(1.0, size=200)
    assert bench.accumulator.describe().num_accumulated == 0
    bench.accumulator.end(Cancelled("deleted"))
    assert bench.budget.allocated_bytes == 0
