"""Exchanges of reductions, without a session: posts are lost with the server, workers give up, and programs are started again."""

import types
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ps_protocol.errors import DeadlineExceeded, InvalidSpec, LimitExceeded, MalformedMessage, ShapeMismatch, Unavailable
from ps_protocol.model.variables import Array
from ps_protocol.roles.board import FIRST_KEY, Found, Key, Post, Posts
from tests.support.examples import examples
from worker_client.core.sides import run
from worker_client.strategy.content import pack
from worker_client.strategy.exchange import FIRST, NO_STEP, Exchanges, Moment, Place, Places, Waited
from worker_client.strategy.group import Combination
from worker_client.strategy.reduction import ReduceOp

NUM_WORKERS, NUM_STEPS, NUM_REDUCTIONS = 3, 3, 2


class _Server:
    """A board, for programs that each have what they have posted, or read, posted again to a server that has lost it."""

    def __init__(self) -> None:
        self.posts: dict[tuple[bool, int], Posts] = {}
        self.process_incarnation = 1

    def lose(self) -> None:
        self.posts.clear()
        self.process_incarnation += 1

    def add(self, board: bool, author: int, post: Post, keeps_from: Key) -> None:
        self.posts.setdefault((board, author), Posts()).add(post, keeps_from=keeps_from)

    def find(self, board: bool, author: int, since: Key | None) -> Found:
        posts = self.posts.get((board, author), Posts())
        return Found(process_incarnation=self.process_incarnation, newest=posts.newest, post=posts.first(since))


class _Worker:
    """One program of a worker, and its boards: its part waits for each post that is not there."""

    def __init__(self, server: _Server, worker: int, *, incarnation: int = 1, num_workers: int = 2, is_restarted: bool = False) -> None:
        self.server, self.worker, self.incarnation = server, worker, incarnation
        self.exchanges = Exchanges(
            self, worker=worker, incarnation=incarnation, num_workers=num_workers, per_worker=1, is_restarted=is_restarted
        )
        self.kept = _Server()
        self.at, self.is_late = Moment(1, 0), False
        # Posts for which the server has no room.
        self.num_refused = 0
        self.outcome: Any = None

    def tend(self) -> None:
        """Posts again what the server has lost."""
        if self.kept.process_incarnation != self.server.process_incarnation:
            self.kept.process_incarnation = self.server.process_incarnation
            for (board, author), posts in self.kept.posts.items():
                for post in posts:
                    self.server.add(board, author, post, FIRST_KEY)

    async def put(self, author: int, place: Place, content: Array, *, keeps_from: Key, is_last: bool = False) -> None:
        self.tend()
        if self.num_refused:
            self.num_refused -= 1
            raise LimitExceeded("ps 0: has no room for this")
        post = Post(key=place.key, incarnation=self.incarnation, content=content)
        for server in (self.server, self.kept):
            server.add(_board(place), author, post, keeps_from)

    async def get(self, author: int, place: Place, *, since: Key | None) -> Found:
        self.tend()
        return self.server.find(_board(place), author, since)

    async def wait_for(self, author: int, place: Place, *, why: str) -> Waited:
        self.tend()
        found = self.server.find(_board(place), author, place.key)
        if found.post is None:
            await _until_the_next_turn()
            self.tend()
            found = self.server.find(_board(place), author, place.key)
        return Waited(found, self.is_late, self.at)

    async def keep(self, place: Place, post: Post, *, keeps_from: Key) -> None:
        self.tend()
        self.kept.add(_board(place), FIRST, post, keeps_from)

    def reduced(self, value: Any, *, op: ReduceOp = ReduceOp.SUM, variable: str = "") -> Generator[None, None, Any]:
        """Reduces one value of this worker's replica over all."""
        place = yield from self.exchanges.begin(self.at).__await__()
        contributions = {self.worker: value} if not isinstance(value, dict) else value
        combinations = [Combination(op=op, contributions=contributions, variable=variable)]
        (result,) = yield from self.exchanges.combined("sum", combinations, place, timeout_s=60.0).__await__()
        return result

    def begin_call(self) -> None:
        self.exchanges.places.begin_call(self.at)

    def end_call(self, *, has_failed: bool = False) -> None:
        run(self.exchanges.end_call(self.at, has_failed=has_failed))  # it waits for nobody


def _board(place: Place) -> bool:
    return place.at.step != NO_STEP


@types.coroutine
def _until_the_next_turn() -> Generator[None, None, None]:
    yield


def _together(*parts: Generator[None, None, Any]) -> list[Any]:
    """Runs the parts by turns until each has ended; returns their results, or errors."""
    results: dict[int, Any] = {}
    for _ in range(100):
        for index, part in enumerate(parts):
            if index not in results:
                try:
                    next(part)
                except StopIteration as end:
                    results[index] = end.value
                except Exception as error:
                    results[index] = error
        if len(results) == len(parts):
            return [results[index] for index in range(len(parts))]
    raise AssertionError(f"still waiting; over: {results}")


def _two() -> tuple[_Worker, _Worker]:
    server = _Server()
    return _Worker(server, 0), _Worker(server, 1)


def _texts(results: Sequence[Any], kind: type[Exception]) -> list[str]:
    assert [type(one) for one in results] == [kind] * len(results), results
    return [str(one) for one in results]


class _Cluster:
    """What is left when programs end: the step, who has contributed to it, and all results that any program has seen."""

    def __init__(self) -> None:
        self.step = 0
        self.contributors = set[int]()
        self.seen: dict[tuple[int, int], set[float]] = {}
        self.written: list[float] = []

    def contribute(self, worker: int, step: int, written: float) -> None:
        if step != self.step or worker in self.contributors:
            return
        self.contributors.add(worker)
        if worker == FIRST:
            self.written.append(written)
        if len(self.contributors) == NUM_WORKERS:
            self.contributors.clear()
            self.step += 1


def _program(worker: _Worker, cluster: _Cluster, *, is_async: bool) -> Generator[None, None, None]:
    """Makes the cluster's steps, each of some reductions and a write, from where it is; yields wherever it waits."""
    while (step := cluster.step) < NUM_STEPS:
        worker.at = Moment() if is_async else Moment(1, step)
        worker.begin_call()
        written = 0.0
        for reduction in range(NUM_REDUCTIONS):
            result = yield from worker.reduced(float(10**worker.worker * (1 + step * NUM_REDUCTIONS + reduction)))
            written += float(result)
            cluster.seen.setdefault((step, reduction), set()).add(float(result))
            yield
        cluster.contribute(worker.worker, step, written)
        while cluster.step == step:
            yield
            worker.tend()
        worker.end_call()


@settings(max_examples=examples(100), deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from(["run", "run", "run", "end", "lose"]), st.integers(0, 2)), max_size=120))
# The others are at the next step before a program that was started again, and a server, too, has what it missed.
@example(False, [*(("run", worker) for worker in (1, 2, 0, 1, 1, 2, 2, 0, 0, 1, 2)), ("end", 0), ("lose", 0)])
def test_all_programs_get_the_sums_and_each_write_is_made_once_whatever_is_lost_or_restarted(
    is_async: bool, events: list[tuple[str, int]]
) -> None:
    server, cluster, incarnations = _Server(), _Cluster(), [1] * NUM_WORKERS

    def program(worker: int) -> Generator[None, None, None]:
        is_restarted = incarnations[worker] > 1
        own = _Worker(server, worker, incarnation=incarnations[worker], num_workers=NUM_WORKERS, is_restarted=is_restarted)
        return _program(own, cluster, is_async=is_async)

    programs = [program(worker) for worker in range(NUM_WORKERS)]
    for event, worker in events:
        match event:
            case "run":
                next(programs[worker], None)
            case "end" if not is_async:  # where a program that is started again begins is known by the step
                programs[worker].close()
                incarnations[worker] += 1
                programs[worker] = program(worker)
            case "lose":
                server.lose()
    # Nothing more is lost: then all comes to its end.
    for _ in range(400):
        for worker in range(NUM_WORKERS):
            next(programs[worker], None)
    sums = {(step, reduction): 111.0 * (1 + step * NUM_REDUCTIONS + reduction) for step in range(NUM_STEPS) for reduction in range(2)}
    assert cluster.step == NUM_STEPS
    assert cluster.seen == {key: {value} for key, value in sums.items()}
    assert cluster.written == [sums[step, 0] + sums[step, 1] for step in range(NUM_STEPS)]


def test_a_restarted_gatherer_takes_the_results_that_are_there_and_joins_the_current_exchange() -> None:
    first, other = _two()
    for worker in (first, other):
        worker.begin_call()
    assert _together(*(worker.reduced(10.0**worker.worker) for worker in (first, other))) == [11.0, 11.0]
    waiting = other.reduced(20.0)
    next(waiting)
    again = _Worker(first.server, 0, incarnation=2, is_restarted=True)
    again.begin_call()
    # What it contributes to the exchange that is over does not count.
    assert _together(again.reduced(5.0)) == [11.0]
    assert _together(again.reduced(2.0), waiting) == [22.0, 22.0]


def test_programs_at_different_places_are_refused_and_can_repeat_the_call() -> None:
    first, other = _two()
    assert _together(first.reduced(1.0), other.reduced(2.0)) == [3.0, 3.0]
    waiting = other.reduced(2.0)  # outside of a call
    next(waiting)
    first.begin_call()
    results = _together(first.reduced(1.0), waiting)
    assert "worker 1 is at its call 1, exchange 2, worker 0 at its call 1, exchange 1; all workers must" in str(results[0])
    assert [type(one) for one in results] == [ValueError, DeadlineExceeded]
    first.end_call(has_failed=True)
    assert _together(first.reduced(1.0), other.reduced(2.0)) == [3.0, 3.0]


def test_an_exchange_that_one_side_gave_up_fails_on_the_other_and_the_next_ones_are_paired() -> None:
    first, other = _two()
    assert _together(first.reduced(1), other.reduced(10)) == [11, 11]
    given_up = other.reduced(20)
    next(given_up)
    other.is_late = True
    assert "worker 0 with replica 0 has not answered within 60 s" in _texts(_together(given_up), DeadlineExceeded)[0]
    other.is_late = False
    waiting = other.reduced(30)
    next(waiting)
    (text,) = _texts(_together(first.reduced(2)), DeadlineExceeded)
    assert "worker 1 has given up this exchange, and is at its call 1, exchange 3" in text
    assert _together(first.reduced(3), waiting) == [33, 33]
    assert _together(first.reduced(4), other.reduced(40)) == [44, 44]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("at", [Moment(1, 0), Moment()])
def test_a_call_that_has_failed_in_one_program_alone_is_never_paired_with_the_next(at: Moment, failing: int) -> None:
    workers = _two()
    for worker in workers:
        worker.at = at
        worker.begin_call()
    waits = workers[1 - failing].reduced(1.0)
    next(waits)
    workers[failing].end_call(has_failed=True)
    next(waits)  # it may still be started again, and make the call
    workers[failing].begin_call()
    after = workers[failing].reduced(10.0)
    next(after)
    (text,) = _texts(_together(waits), DeadlineExceeded)
    assert f"worker {failing} has given up" in text
    workers[1 - failing].end_call(has_failed=True)
    workers[1 - failing].begin_call()
    assert _together(after, workers[1 - failing].reduced(20.0)) == [30.0, 30.0]


def test_a_call_that_has_failed_without_an_exchange_is_caught_up_with() -> None:
    first, other = _two()
    for worker in (first, other):
        worker.begin_call()
    other.end_call(has_failed=True)  # it leaves out the reduction that follows
    first.end_call()
    waiting = first.reduced(1.0)
    next(waiting)
    other.begin_call()
    after = other.reduced(10.0)
    next(after)
    _texts(_together(waiting), DeadlineExceeded)
    first.begin_call()
    assert _together(first.reduced(20.0), after) == [30.0, 30.0]


def test_a_program_that_is_started_again_passes_over_calls_that_have_failed() -> None:
    first, other = _two()
    for worker in (first, other):
        worker.begin_call()
    _texts(_together(first.reduced(np.zeros(2)), other.reduced(np.zeros(3))), ShapeMismatch)
    for worker in (first, other):
        worker.end_call(has_failed=True)
        worker.begin_call()
    waiting = first.reduced(1.0)
    next(waiting)
    again = _Worker(first.server, 1, incarnation=2, is_restarted=True)
    again.begin_call()
    assert _together(waiting, again.reduced(2.0)) == [3.0, 3.0]


def test_a_program_that_is_started_again_where_there_are_no_steps_has_part_in_the_next_call_and_gets_nothing_of_the_former() -> None:
    first, other = _two()
    again = _Worker(first.server, 1, incarnation=2, is_restarted=True)
    for worker, value in ((other, 10.0), (again, 20.0)):
        for one in (first, worker):
            one.at = Moment()
            one.begin_call()
        assert _together(first.reduced(1.0), worker.reduced(value)) == [1.0 + value] * 2
        for one in (first, worker):
            one.end_call()


def test_a_second_strategy_of_the_same_process_goes_on_after_the_first() -> None:
    first, other = _two()
    assert _together(first.reduced(1.0), other.reduced(2.0)) == [3.0, 3.0]
    again = [_Worker(first.server, worker) for worker in range(2)]
    assert _together(*(worker.reduced(10.0) for worker in again)) == [20.0, 20.0]


def test_what_was_reduced_in_another_epoch_is_never_taken() -> None:
    first, other = _two()
    assert _together(first.reduced(1.0), other.reduced(2.0)) == [3.0, 3.0]
    again = [_Worker(first.server, worker, incarnation=2, is_restarted=True) for worker in range(2)]
    for worker in again:
        worker.at = Moment(2, 0)
    assert _together(*(worker.reduced(10.0) for worker in again)) == [20.0, 20.0]


def test_an_exchange_goes_on_where_the_cluster_goes_back_to_the_same_step_and_fails_where_to_another() -> None:
    first, other = _two()
    waiting = first.reduced(1.0)
    next(waiting)
    first.at = other.at = Moment(2, 0)
    assert _together(waiting, other.reduced(2.0)) == [3.0, 3.0]
    waiting = first.reduced(1.0)
    next(waiting)
    first.at = Moment(3, -1 + 5)
    (text,) = _texts(_together(waiting), Unavailable)
    assert "the cluster went back from step 0 to step 4" in text


def test_a_worker_whose_variables_are_older_has_no_part_in_a_reduction() -> None:
    first, other = _two()
    first.at, other.at = Moment(1, 3), Moment(1, 2)
    texts = _texts(_together(other.reduced(1.0), first.reduced(1.0)), Unavailable)
    assert all("worker 1 is at step 2, worker 0 at 3: they would reduce values of different steps" in text for text in texts)
    # The older one may be worker 0: the other waits for the program that comes after that.
    other.at = Moment(1, 4)
    waiting = other.reduced(1.0)
    next(waiting)
    (text,) = _texts(_together(first.reduced(1.0)), Unavailable)
    assert "worker 0 is at step 3, worker 1 at 4" in text
    first.at = Moment(1, 4)
    assert _together(first.reduced(1.0), waiting) == [2.0, 2.0]


def test_a_value_that_cannot_be_posted_or_combined_fails_in_all_programs() -> None:
    first, other = _two()

    def fails(one: Any, another: Any, expected: type[Exception], words: str) -> None:
        assert all(words in text for text in _texts(_together(first.reduced(one), other.reduced(another)), expected))

    fails(np.zeros(2), np.zeros(3), ShapeMismatch, "replica 1 contributes")
    fails(np.int16(1), 1.0, InvalidSpec, "int16 cannot travel")
    fails(1.0, np.int16(1), InvalidSpec, "int16 cannot travel")
    for worker in (first, other):
        worker.num_refused = 1
        fails(1.0, 1.0, LimitExceeded, "has no room")
        assert not worker.num_refused
    assert _together(first.reduced(1.0), other.reduced(2.0)) == [3.0, 3.0]


def test_workers_that_reduce_different_values_are_refused_with_both() -> None:
    first, other = _two()
    results = _together(first.reduced(1.0, variable="a"), other.reduced(1.0, op=ReduceOp.MEAN, variable="b"))
    assert all('worker 1 reduces MEAN for "b" where worker 0 reduces SUM for "a"; all' in text for text in _texts(results, ValueError))
    results = _together(first.reduced(1.0), other.reduced({1: np.zeros(1), 2: np.zeros(1)}))
    assert all("worker 1 has other replicas than 1, as worker 0 has" in text for text in _texts(results, ValueError))
    # A program that was started again with other calls does not take what its former one has reduced.
    assert _together(first.reduced(1.0), other.reduced(1.0)) == [2.0, 2.0]
    again = _Worker(first.server, 1, incarnation=2, is_restarted=True)
    (text,) = _texts(_together(again.reduced(1.0, op=ReduceOp.MEAN)), ValueError)
    assert "worker 0 reduces SUM where worker 1 reduces MEAN" in text


def test_missing_workers_are_named_by_all_at_the_deadline() -> None:
    server = _Server()
    first, other = _Worker(server, 0, num_workers=3), _Worker(server, 1, num_workers=3)
    first.is_late = True
    texts = _texts(_together(other.reduced(1.0), first.reduced(1.0)), DeadlineExceeded)
    assert texts == ["sum: missing after 60 s: replica 2 of worker 2; is its process there?"] * 2


@pytest.mark.parametrize(
    "message",
    [
        None,
        3,
        {},
        {"ops": 1, "values": []},
        {"ops": [["SUM"]], "values": []},
        {"ops": [], "values": None},
        {"error": "Exit", "words": "", "call": 0},
    ],
)
def test_a_post_that_cannot_be_read_is_an_error_for_all(message: Any) -> None:
    first, other = _two()
    assert _together(first.reduced(1.0), other.reduced(2.0)) == [3.0, 3.0]
    place = Place(Moment(1, 0), 0, 2)
    first.server.add(True, 1, Post(key=place.key, incarnation=1, content=pack(message)), FIRST_KEY)
    texts = _texts(_together(first.reduced(1.0), other.reduced(1.0)), MalformedMessage)
    assert all("cannot be read" in text for text in texts)
    assert _together(first.reduced(1.0), other.reduced(1.0)) == [2.0, 2.0]


def test_calls_without_an_exchange_do_not_count_and_failed_ones_do() -> None:
    places, at = Places(), Moment(1, 7)
    assert str(places.next(at)) == "call 1, exchange 1"
    places.begin_call(at)
    places.end_call(has_failed=False)
    assert (places.next(at).call, places.present.exchange) == (0, 2)
    places.begin_call(at)
    places.end_call(has_failed=True)
    assert (places.next(at).call, places.present.exchange) == (2, 1)
    places.begin_call(at)
    assert places.next(at).call == 3
    # Counts begin anew in each step; where there are no steps, all calls count.
    assert (places.next(Moment(1, 8)).call, places.present.exchange) == (1, 1)
    places.end_call(has_failed=False)
    assert places.next(Moment()).call == 4
