"""Rule 81: closures are scheduled in one program and run at least once in any worker; an error is raised once, and a value counts once."""

import itertools
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import Cancelled, DeadlineExceeded, InvalidSpec, LimitExceeded, ShuttingDown, Unavailable
from ps_protocol.model.variables import Array
from ps_protocol.roles.board import BoardRequest, Found, Key, PostHeader
from ps_server.boards import BoardRegistry
from tests.support.cluster.shape import Cluster, Shape, Start
from worker_client import IndexedSlices, sgd
from worker_client.strategy import ClusterCoordinator, RemoteValue, content, coordinator, serve
from worker_client.strategy.board import Board

NUM_WORKERS = 3
Pair = namedtuple("Pair", ["left", "right"])
Functions = dict[str, Callable[..., Any]]


def _fails(text: str) -> None:
    raise ValueError(text)


FUNCTIONS: Functions = {"square": lambda x: x * x, "same": lambda *args, **kwargs: (args, kwargs), "fails": _fails, "code": lambda: print}


@contextmanager
def serving(cluster: Cluster, functions: Functions = FUNCTIONS, *, num_workers: int = NUM_WORKERS) -> Iterator[list[int]]:
    """Has workers serve until the block ends, which must close its coordinator; gives how many closures each has run then."""
    counts, have_come = list[int](), threading.Barrier(num_workers + 1)

    def work(index: int) -> None:
        with cluster.session(index) as session:
            have_come.wait(30)
            counts.append(serve(session, functions))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_workers)]
    for thread in threads:
        thread.start()
    have_come.wait(30)
    yield counts
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def cluster(start: Start) -> Cluster:
    return start(Shape(num_ps=2, num_workers=NUM_WORKERS))


def test_rule_81_closures_are_run_by_any_worker_and_their_values_are_fetched(cluster: Cluster) -> None:
    with serving(cluster) as counts, ClusterCoordinator(cluster.observer()) as coordinator:
        values = [coordinator.schedule("square", (np.full(3, float(index)),)) for index in range(20)]
        coordinator.join(30)
        assert coordinator.done()
        assert [value.tolist() for value in coordinator.fetch(values)] == [[index**2.0] * 3 for index in range(20)]
    assert sum(counts) == 20
    with pytest.raises(RuntimeError, match=r"the coordinator is closed"):
        coordinator.schedule("square", (1,))


def test_arguments_and_values_are_nested_arrays_numbers_and_text_and_earlier_values(cluster: Cluster) -> None:
    rows = IndexedSlices(np.array([1, 2]), np.ones((2, 2), np.float32), (5, 2))
    with serving(cluster), ClusterCoordinator(cluster.observer()) as coordinator:
        earlier = coordinator.schedule("square", (np.float32(1.5),))
        value = coordinator.schedule("same", ("text ä", None, True, [1, (2.5, {"a": np.arange(3)})]), {"rows": rows, "earlier": earlier})
        args, kwargs = coordinator.fetch({"found": value}, 30)["found"]
        assert args[:3] == ("text ä", None, True)
        assert (args[3][0], args[3][1][0], args[3][1][1]["a"].tolist()) == (1, 2.5, [0, 1, 2])
        assert (kwargs["earlier"], kwargs["earlier"].dtype, kwargs["rows"].dense_shape) == (2.25, np.float32, (5, 2))
        with pytest.raises(InvalidSpec, match=r"closure 'same': a function cannot travel; want arrays, numbers, text"):
            coordinator.schedule("same", (_fails,))
        deep: list[Any] = []
        for _ in range(700):
            deep = [deep]
        for wrong, words in (
            (10**5000, r"closure 'same': an int of 16,610 bits cannot travel; want at most 4,096"),
            (deep, r"nested in more than 100 levels"),
            (Pair(1, 2), r"closure 'same': a Pair cannot travel; want arrays, numbers, text, and plain tuples"),
        ):
            with pytest.raises(InvalidSpec, match=words):
                coordinator.schedule("same", (wrong,))
        with pytest.raises(InvalidSpec, match=r"schedule\(\): got a int, want the name of a function"):
            coordinator.schedule(10**5000)  # type: ignore[arg-type]
        assert coordinator.schedule("same", (-(10**1200),)).fetch(30) == ((-(10**1200),), {})
        with pytest.raises(RuntimeError, match=r"'code' failed on worker .*: InvalidSpec: what the closure returned: a .* cannot travel"):
            coordinator.fetch(coordinator.schedule("code"), 30)
        with pytest.raises(RuntimeError):
            coordinator.join(30)


CANNOT_TRAVEL: list[tuple[Any, str]] = [
    (np.arange(3, dtype=np.int16), "an array of int16"),
    (np.uint32(3), "an array of uint32"),
    (np.zeros(2, np.complex64), "an array of complex64"),
    (np.array(["text"]), "an array of <U4"),
    (IndexedSlices(np.array([1]), np.zeros((1, 2), np.int8)), "an array of int8"),
]


def test_arrays_that_cannot_travel_are_refused_where_they_are_scheduled_and_as_results_are_the_closures_error(cluster: Cluster) -> None:
    results: Functions = {"gives": lambda number: CANNOT_TRAVEL[number][0]}
    with serving(cluster, {**FUNCTIONS, **results}), ClusterCoordinator(cluster.observer()) as coordinator:
        for number, (value, words) in enumerate(CANNOT_TRAVEL):
            with pytest.raises(InvalidSpec, match=rf"closure 'same': {words}.* cannot travel between processes"):
                coordinator.schedule("same", ([value],))
            coordinator.schedule("gives", (number,))
            with pytest.raises(RuntimeError, match=rf"failed on worker .: InvalidSpec: what the closure returned: {words}.* cannot travel"):
                coordinator.join(30)
            coordinator.join(30)
        assert coordinator.schedule("square", (3,)).fetch(30) == 9


def test_integers_of_64_bits_travel_whole(cluster: Cluster) -> None:
    largest = np.array([(1 << 63) - 1, -(1 << 63)])
    with serving(cluster), ClusterCoordinator(cluster.observer()) as coordinator:
        ((found,), _) = coordinator.schedule("same", (largest,)).fetch(30)
    assert found.tolist() == largest.tolist()


@pytest.mark.parametrize("is_call", [True, False])
def test_a_malformed_message_fails_its_closure_and_the_next_closure_runs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_call: bool
) -> None:
    """The worker ended with KeyError, or join() waited for ever."""
    pack = content.pack

    def pack_wrongly(message: Any, **how: Any) -> Any:
        is_wrong = message is not None and ((49,) if is_call else 49) in message
        return pack({"function": 1} if is_wrong else message, **how)

    monkeypatch.setattr(coordinator, "pack", pack_wrongly)
    with serving(cluster), ClusterCoordinator(cluster.observer()) as scheduling:
        scheduling.schedule("square", (49 if is_call else 7,))
        with pytest.raises(RuntimeError, match=r"failed on worker .: .*a closure's post cannot be read"):
            scheduling.join(30)
        scheduling.join(30)
        assert [scheduling.schedule("square", (number,)).fetch(30) for number in range(6)] == [number**2 for number in range(6)]


def test_a_closure_over_a_servers_limits_fails_and_the_next_closure_runs(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    post, num_refused = BoardRegistry.post, itertools.count()

    def post_small(boards: BoardRegistry, header: PostHeader, content: Array) -> int:
        if header.content_bytes > 8000:
            next(num_refused)
            raise LimitExceeded("ps 0: has no room for this")
        if header.content_bytes > 7000 and next(num_refused) < 2:
            raise LimitExceeded("ps 0: has no room at the moment")
        return post(boards, header, content)

    monkeypatch.setattr(BoardRegistry, "post", post_small)
    monkeypatch.setattr("worker_client.strategy.board.LIMIT_S", 0.3)
    with serving(cluster, {**FUNCTIONS, "zeros": np.zeros}), ClusterCoordinator(cluster.observer()) as coordinator:
        # Others may fill a server for a moment.
        assert coordinator.schedule("same", (np.zeros(900),)).fetch(30)[0][0].size == 900
        coordinator.schedule("same", (np.zeros(1000),))
        with pytest.raises(RuntimeError, match=r"'same' failed on worker .: it cannot be sent: LimitExceeded: ps 0: has no room for this"):
            coordinator.join(30)
        coordinator.schedule("zeros", (1000,))
        with pytest.raises(RuntimeError, match=r"'zeros' failed on worker .: what the closure returned cannot be sent: LimitExceeded"):
            coordinator.join(30)
        assert coordinator.schedule("square", (3,)).fetch(30) == 9


def test_serving_ends_when_training_is_finished_and_the_servers_are_gone_during_a_closure(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, may_go_on, is_running = start(Shape(num_workers=1)), threading.Event(), threading.Event()

    def slow() -> None:
        is_running.set()
        may_go_on.wait(30)

    def send(*_: object, **__: object) -> None:
        raise ShuttingDown("training is finished")

    with ClusterCoordinator(cluster.observer()) as coordinator, cluster.session(0) as session, ThreadPoolExecutor(1) as pool:
        session.create_or_join({"w": np.zeros(2)}, optimizer=sgd(0.1))
        ends = pool.submit(serve, session, {"slow": slow})
        try:
            coordinator.schedule("slow")
            assert is_running.wait(30)
            session.finish()
            monkeypatch.setattr(BoardRegistry, "post", send)
            monkeypatch.setattr(BoardRegistry, "read", send)
        finally:
            may_go_on.set()
        assert ends.result(30) == 1


def test_rule_81_an_error_is_raised_once_and_cancels_closures_that_have_not_begun_and_then_more_can_be_scheduled(
    cluster: Cluster,
) -> None:
    may_go_on, num_running = threading.Event(), threading.Semaphore(0)

    def slow() -> str:
        num_running.release()
        may_go_on.wait(30)
        return "done"

    with serving(cluster, {**FUNCTIONS, "slow": slow}), ClusterCoordinator(cluster.observer()) as coordinator:
        running = [coordinator.schedule("slow") for _ in range(NUM_WORKERS - 1)]
        for _ in running:
            num_running.acquire()
        wrong = coordinator.schedule("fails", ("bad luck",))
        with pytest.raises(RuntimeError, match=r"'fails' failed on worker .: ValueError: bad luck"):
            wrong.fetch(30)
        # All workers are busy or the queue is closed until the error has been told; what was queued behind it is cancelled.
        threading.Timer(0.2, may_go_on.set).start()
        with pytest.raises(RuntimeError, match=r"'fails' failed on worker .: ValueError: bad luck"):
            coordinator.join(30)
        assert [value.is_done for value in running] == [True, True]
        coordinator.join(30)
        assert coordinator.done()
        assert coordinator.schedule("square", (3,)).fetch(30) == 9
        unknown = coordinator.schedule("cube", (3,))
        with pytest.raises(RuntimeError, match=r"the worker has no function 'cube'; it has code, fails, same, slow, square"):
            unknown.fetch(30)
        with pytest.raises(RuntimeError, match=r"no function 'cube'"):
            coordinator.schedule("square", (3,))
        assert coordinator.fetch([*running, 5]) == ["done", "done", 5]


def test_rule_81_closures_queued_behind_a_failure_are_cancelled(start: Start) -> None:
    cluster, may_fail = start(Shape(num_workers=1)), threading.Event()

    def fails() -> None:
        may_fail.wait(30)
        raise KeyError("x")

    with serving(cluster, {**FUNCTIONS, "late": fails}, num_workers=1), ClusterCoordinator(cluster.observer()) as coordinator:
        coordinator.schedule("late")
        behind = [coordinator.schedule("square", (index,)) for index in range(3)]
        may_fail.set()
        with pytest.raises(RuntimeError, match=r"'late' failed on worker 0: KeyError: 'x'"):
            coordinator.join(30)
        for value in behind:
            with pytest.raises(Cancelled, match=r"closure ., 'square' was cancelled: another closure had failed"):
                value.fetch(0)


def test_a_join_keeps_its_deadline_after_a_failure_and_only_one_of_several_raises_it(cluster: Cluster) -> None:
    may_go_on, is_running = threading.Event(), threading.Event()

    def slow() -> None:
        is_running.set()
        may_go_on.wait(30)

    with serving(cluster, {**FUNCTIONS, "slow": slow}), ClusterCoordinator(cluster.observer()) as coordinator:
        coordinator.schedule("slow")
        assert is_running.wait(30)
        with pytest.raises(RuntimeError, match=r"bad luck"):
            coordinator.schedule("fails", ("bad luck",)).fetch(30)
        try:
            with pytest.raises(DeadlineExceeded, match=r"join: not within 0.2 s: 0 closures queued, 1 running"):
                coordinator.join(0.2)
            with ThreadPoolExecutor(3) as pool:
                waiting = [pool.submit(ask) for ask in (coordinator.join, coordinator.join, coordinator.done)]
                assert not wait(waiting, 0.2).done
                may_go_on.set()
                errors = [repr(one.exception(30)) for one in waiting]
        finally:
            may_go_on.set()
        assert sorted("bad luck" in error for error in errors) == [False, False, True]
        assert errors.count("None") == 2
        coordinator.join(30)


def test_rule_81_a_key_is_one_closure_however_often_it_is_scheduled(cluster: Cluster) -> None:
    count = iter(range(100))
    with serving(cluster, {"next": lambda: next(count)}) as counts, ClusterCoordinator(cluster.observer()) as coordinator:
        values: list[RemoteValue] = [coordinator.schedule("next", key=f"key {index % 4}") for index in range(40)]
        coordinator.join(30)
        assert [value.fetch(0) for value in values] == [value.fetch(0) for value in values[:4]] * 10
        with pytest.raises(RuntimeError):
            coordinator.fetch(coordinator.schedule("unknown", key="again"), 30)
        with pytest.raises(RuntimeError, match=r"no function 'unknown'"):
            coordinator.join(30)
        assert coordinator.schedule("next", key="again").fetch(30) == 4
    assert sum(counts) == 6


def test_rule_81_each_worker_has_a_dataset_of_its_own_that_is_made_anew_where_another_takes_its_place(start: Start) -> None:
    cluster, made = start(Shape(num_workers=1)), list[int]()

    def numbers() -> Iterator[int]:
        made.append(1)
        return iter(range(100))

    functions: Functions = {"numbers": numbers, "sum": lambda rows, more: next(rows) + sum(more[0] for _ in range(1))}
    # One worker after the other at the same place, each of which serves until its coordinator is closed.
    for count in (1, 2):
        with serving(cluster, functions, num_workers=1), ClusterCoordinator(cluster.observer()) as coordinator:
            rows = iter(coordinator.create_per_worker_dataset(numbers))
            other = iter(coordinator.create_per_worker_dataset("numbers"))
            values = [coordinator.schedule("sum", (rows, [10])) for _ in range(3)]
            assert coordinator.fetch(values, 30) == [10, 11, 12]
            assert coordinator.schedule("sum", (other, [0])).fetch(30) == 0
            with pytest.raises(RuntimeError, match=r"are in the workers: pass its iterator to schedule"):
                next(rows)
            missing = iter(coordinator.create_per_worker_dataset("missing"))
            with pytest.raises(RuntimeError, match=r"the worker has no function 'missing'; it has numbers, sum"):
                coordinator.schedule("sum", (missing, [0])).fetch(30)
            with pytest.raises(RuntimeError, match=r"no function 'missing'"):
                coordinator.join(30)
        assert len(made) == 2 * count


def test_a_worker_that_coordinates_runs_no_closure_itself_and_waits_are_reported(
    impatient: None, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with start(Shape(num_workers=2)).session(0) as session, ClusterCoordinator(session) as coordinator:
        value = coordinator.schedule("square", (2,))
        with pytest.raises(DeadlineExceeded, match=r"join: not within 0.5 s: 1 closures queued, 0 running: no worker has called serve"):
            coordinator.join(0.5)
        assert "join: waiting for 0 s: 1 closures queued" in caplog.text
        with pytest.raises(DeadlineExceeded, match=r"join: not within 0 s: 1 closures queued, 0 running: no worker has called serve"):
            coordinator.join(0)
        assert not value.is_done and not coordinator.done()


def test_a_target_that_is_no_session_and_functions_that_are_no_mapping_of_callables_are_refused(cluster: Cluster) -> None:
    with pytest.raises(InvalidSpec, match=r"target: got a str, want the session of lockstep.connect\(\)"):
        ClusterCoordinator("x")  # type: ignore[arg-type]
    with pytest.raises(InvalidSpec, match=r"session: got a NoneType, want the session"):
        serve(None, FUNCTIONS)  # type: ignore[arg-type]
    with cluster.session(0) as session:
        for wrong in ([_fails], {"fails": "fails"}):
            with pytest.raises(InvalidSpec, match=r"serve\(\): got a (list|str), want"):
                serve(session, wrong)  # type: ignore[arg-type]
    with ClusterCoordinator(cluster.observer()) as coordinator:
        with pytest.raises(InvalidSpec, match=r"schedule\(\): args: got a int, want a tuple"):
            coordinator.schedule("square", args=5)  # type: ignore[arg-type]
        with pytest.raises(InvalidSpec, match="timeout_s: got 'x', want seconds >= 0"):
            coordinator.join("x")  # type: ignore[arg-type]


def test_a_worker_that_the_coordinator_never_saw_hears_that_it_is_closed(
    impatient: None, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, serves, read = start(Shape(num_ps=2, num_workers=1)), threading.Event(), Board.read

    def read_and_tell(board: Board, author: int, since: Key | None, wait_s: float) -> Found | None:
        if since is not None:
            serves.set()
        return read(board, author, since, wait_s)

    monkeypatch.setattr(Board, "read", read_and_tell)
    with serving(cluster, num_workers=1) as counts:
        observer, asked = cluster.observer(), threading.Event()
        assert serves.wait(30)

        def status() -> None:
            asked.set()
            raise Unavailable("the chief is away")

        monkeypatch.setattr(observer, "status", status)
        with ClusterCoordinator(observer):
            assert asked.wait(30)
    assert counts == [0]


def test_a_coordinator_ignores_outcomes_for_an_earlier_one_and_a_worker_serves_one_after_the_other(impatient: None, start: Start) -> None:
    cluster, counts, may_go_on = start(Shape(num_workers=1)), list[int](), threading.Event()
    functions: Functions = {**FUNCTIONS, "slow": lambda: may_go_on.wait(30) and "of slow"}
    with cluster.session(0) as session, ThreadPoolExecutor(1) as pool:

        def work() -> None:
            while sum(counts) < 3:
                counts.append(serve(session, functions))

        rounds = pool.submit(work)
        with ClusterCoordinator(cluster.observer()) as coordinator:
            value = coordinator.schedule("slow")
            with pytest.raises(DeadlineExceeded):
                coordinator.join(0.1)
            may_go_on.set()
            assert value.fetch(30) == "of slow"
        for number in (2, 3):
            with ClusterCoordinator(cluster.observer()) as coordinator:
                assert coordinator.schedule("square", (number,)).fetch(30) == number**2
        rounds.result(30)
    assert sum(counts) == 3


def test_rule_81_a_coordinator_that_was_killed_and_is_started_again_has_its_closures_run_by_the_workers_that_serve(start: Start) -> None:
    cluster = start(Shape(num_workers=1))
    with serving(cluster, num_workers=1):
        killed = ClusterCoordinator(cluster.observer())
        assert killed.schedule("square", (2,)).fetch(30) == 4
        # Without another closure, and not being closed, it says nothing more.
        with ClusterCoordinator(cluster.observer()) as coordinator:
            assert coordinator.schedule("square", (3,)).fetch(30) == 9
    killed.close()


@pytest.mark.parametrize("author", [0, 1])
def test_a_closure_or_an_outcome_that_a_server_has_lost_is_posted_again_and_runs_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, author: int
) -> None:
    cluster, read, lost, count = start(Shape(num_workers=1)), BoardRegistry.read, list[Key](), itertools.count()

    def read_after_a_loss(boards: BoardRegistry, request: BoardRequest) -> Found:
        # What was posted is lost with the server, another process of which answers from now on.
        found = read(boards, request)
        if not lost and request.author == author and found.post is not None and b"number" in found.post.content.tobytes():
            lost.append(found.post.key)
            boards._posts.clear()
            boards._process_incarnation += 1
            return read(boards, replace(request, max_wait_s=0.0))
        return found

    monkeypatch.setattr(BoardRegistry, "read", read_after_a_loss)
    with serving(cluster, {"number": lambda: ("number", next(count))}, num_workers=1):
        with ClusterCoordinator(cluster.observer()) as coordinator:
            assert [coordinator.schedule("number").fetch(30)[1] for _ in range(3)] == [0, 1, 2]
    assert len(lost) == 1


def test_a_closure_that_ends_the_program_is_an_error_and_its_worker_serves_on(cluster: Cluster) -> None:
    with serving(cluster, FUNCTIONS | {"leave": sys.exit}), ClusterCoordinator(cluster.observer()) as coordinator:
        coordinator.schedule("leave", (3,))
        with pytest.raises(RuntimeError, match=r"'leave' failed on worker .: SystemExit: 3"):
            coordinator.join(30)
        value = coordinator.schedule("square", (3,))
        assert coordinator.fetch(value) == 9
