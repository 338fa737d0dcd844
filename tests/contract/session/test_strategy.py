"""A strategy over the workers of a cluster: reductions over all replicas, variables on parameter servers, and missing workers by name."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.errors import DeadlineExceeded, InvalidSpec, LimitExceeded, Unavailable
from ps_protocol.model.variables import Array
from ps_protocol.roles.board import BoardRequest, Found, Key, PostHeader
from ps_protocol.roles.chief import PushOutcome
from ps_server.boards import BoardRegistry
from tests.support.cluster.shape import Shape, Start
from worker_client import IndexedSlices, Session, async_policy, sync_policy
from worker_client.strategy import (
    CollectiveHints,
    Optimizer,
    ParameterServerStrategy,
    PerReplica,
    ReplicaContext,
    Variable,
    VariableAggregation,
    get_replica_context,
)

NUM_WORKERS, PER_WORKER = 3, 2
Part = Callable[[ParameterServerStrategy, Session], Any]


@pytest.fixture
def together(start: Start) -> Callable[..., list[Any]]:
    """Has each worker call a function with a strategy of its own, and returns the results, errors too."""

    def each(part: Part, *, per_worker: int = PER_WORKER) -> list[Any]:
        cluster = start(Shape(num_ps=2, num_workers=NUM_WORKERS, replicas_to_aggregate=NUM_WORKERS))
        meet = threading.Barrier(NUM_WORKERS)

        def work(index: int) -> Any:
            with cluster.session(index) as session, ParameterServerStrategy(per_worker, session=session) as strategy:
                meet.wait(30)
                try:
                    return part(strategy, session)
                except Exception as error:
                    return error
                finally:
                    meet.wait(30)

        with ThreadPoolExecutor(NUM_WORKERS) as pool:
            return list(pool.map(work, range(NUM_WORKERS)))

    return each


def _context() -> ReplicaContext:
    context = get_replica_context()
    assert context is not None
    return context


def _numbered(strategy: ParameterServerStrategy, scale: float = 1.0) -> PerReplica:
    return strategy.experimental_distribute_values_from_function(lambda c: np.full(2, scale * c.replica_id_in_sync_group))


def test_replicas_are_numbered_over_all_workers_and_have_names(together: Any) -> None:
    def part(strategy: ParameterServerStrategy, session: Session) -> Any:
        ids, counts = strategy.run(lambda: (_context().replica_id_in_sync_group, _context().num_replicas_in_sync))
        (count,) = set(counts.values.values())
        return list(ids.values.values()), count, strategy.extended.worker_devices, len(strategy.extended.parameter_devices)

    devices = tuple(f"worker:{replica // 2}/replica:{replica}" for replica in range(6))
    assert together(part) == [([0, 1], 6, devices, 2), ([2, 3], 6, devices, 2), ([4, 5], 6, devices, 2)]


def test_variables_lie_on_parameter_servers_and_all_workers_see_every_write(together: Any) -> None:
    def part(strategy: ParameterServerStrategy, session: Session) -> Any:
        with strategy.scope():
            v = Variable(np.zeros(2), name="v", aggregation=VariableAggregation.SUM)
            w = Variable(np.ones(3, np.float32), name="w")
            with strategy.extended.colocate_vars_with(v):
                slot = Variable(np.zeros(2), name="slot")
        strategy.run(v.assign_add, args=(_numbered(strategy),))
        strategy.extended.update(w, lambda copy, factor: copy.assign(copy.read_value() * np.float32(factor)), args=(3,))
        with pytest.raises(KeyError):
            strategy.extended.update(w, lambda copy: {}[copy.assign(np.zeros(3, np.float32)).sum()])
        slot.assign(np.full(2, 0.1))
        with strategy.scope(), pytest.raises(RuntimeError, match="before the first is used"):
            Variable(0.0, name="late")
        return v.read_value().tolist(), w.read_value().tolist(), slot.read_value().tolist(), (v.device == slot.device, v.device == w.device)

    for seen in together(part):
        assert seen == ([15, 15], [3, 3, 3], [0.1, 0.1], (True, False))


def test_formulas_give_the_values_of_one_process_beside_all_other_reads_and_writes(together: Any) -> None:
    def part(strategy: ParameterServerStrategy, session: Session | None = None) -> Any:
        with strategy.scope():
            variables = [Variable(np.full(2, 1.0 + index), name=f"v{index}") for index in range(5)]
        rng, seen = np.random.default_rng(3), []
        extended = strategy.extended

        def something() -> None:
            first, second = (variables[index] for index in rng.permutation(5)[:2])
            what, array = rng.integers(6), rng.normal(size=2)
            if what == 0:
                extended.update(first, lambda copy, x: copy.assign_add(x), args=(array,))
            elif what == 1:
                seen.append(first.read_value().tolist())
            elif what == 2:
                first.assign(array)
            elif what == 3:
                extended.update(first, "v * 0.5 + w * k", kwargs={"w": second, "k": float(array[0])})
            elif what == 4:
                extended.update(first, "w = w - g; v = v + tanh * w", kwargs={"w": second, "g": array, "tanh": 0.5})
            else:
                extended.update(first, "v / norm(v)")

        def block(strategy: ParameterServerStrategy) -> None:
            for _ in range(rng.integers(1, 6)):
                something()

        for _ in range(12):
            strategy.run(lambda: _context().merge_call(block))
            seen.append([variable.read_value().tolist() for variable in variables])
        return seen

    assert together(part) == [part(ParameterServerStrategy(6))] * 3


def test_the_writes_of_one_run_are_one_step_and_those_of_a_run_that_fails_are_none(together: Any) -> None:
    def part(strategy: ParameterServerStrategy, session: Session) -> Any:
        with strategy.scope():
            v, w = (Variable(0.0, name=name, aggregation=VariableAggregation.SUM) for name in "vw")

        def step(*, fails: bool) -> float:
            v.assign_add(1.0 * _context().num_replicas_in_sync / np.float64(6))
            w.assign_add(v.read_value() + 0.0)
            if fails:
                raise KeyError(w.read_value())
            return float(w.read_value())

        strategy.run(step, kwargs={"fails": False})
        with pytest.raises(KeyError):
            strategy.run(step, kwargs={"fails": True})
        return session.global_step, float(v.read_value()), float(w.read_value()), float(session.read()["w"])

    assert together(part) == [(1, 6, 36, 36)] * 3


def test_a_missing_replica_is_named_within_2_s_and_at_the_deadline_by_all_workers(together: Any, caplog: pytest.LogCaptureFixture) -> None:
    def part(strategy: ParameterServerStrategy, session: Session) -> Any:
        if 2 in _numbered(strategy).values:
            return "elsewhere"
        with pytest.raises(DeadlineExceeded) as raised:
            strategy.extended.reduce_to(
                "SUM", _numbered(strategy), strategy.extended.parameter_devices[0], CollectiveHints(timeout_seconds=2.5)
            )
        return str(raised.value)

    first, elsewhere, third = together(part)
    assert elsewhere == "elsewhere"
    assert first == third
    assert "reduce_to() of SUM (call 1, exchange 1): missing after 2.5 s: replicas 2 to 3 of worker 1" in first
    # Long before, the log says so.
    assert "reduce_to() of SUM (call 1, exchange 1): waiting for 2 s: nothing has come of replicas 2 to 3 of worker 1" in caplog.text


@pytest.mark.parametrize("num_required", [1, 3])
def test_a_cluster_whose_steps_are_not_of_one_contribution_of_each_worker_is_refused(start: Start, num_required: int) -> None:
    cluster = start(Shape(num_workers=2, replicas_to_aggregate=num_required))
    with cluster.session(0) as session, ParameterServerStrategy(session=session) as strategy:
        with strategy.scope():
            v = Variable(0.0, name="v")
        words = f"each of the 2 workers, and a step of this cluster has {num_required}; start it without --backup-workers"
        with pytest.raises(InvalidSpec, match=words):
            v.read_value()
        for policy in (sync_policy(tokens="fifo", replicas_to_aggregate=2), async_policy(max_staleness=1, too_stale="scale")):
            session.set_policy(policy, timeout_s=20)
            with pytest.raises(InvalidSpec, match=r"need steps that drop no contribution, and this cluster's policy is .*; start"):
                v.read_value()
        session.set_policy(async_policy(), timeout_s=20)
        assert float(v.assign(2.0)) == 2.0


def test_a_write_that_a_changed_policy_drops_is_an_error_that_names_the_policy(start: Start) -> None:
    cluster = start(Shape(num_workers=2, replicas_to_aggregate=2))
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(cluster.session(index)) for index in range(2)]
        sessions[0].set_policy(async_policy(), timeout_s=20)
        variables = []
        for session in sessions:
            with stack.enter_context(ParameterServerStrategy(session=session)).scope():
                variables.append(Variable(0.0, name="v"))
            variables[-1].read_value()
        variables[0].assign(1.0)
        sessions[0].set_policy(async_policy(max_staleness=0), timeout_s=20)
        variables[0].assign(2.0)
        while sessions[1].step({}).outcome is not PushOutcome.ACCEPTED:
            pass  # its first is of step 0, and dropped
        words = r"not written: variables 'v': .* STALE; the policy, async, drops beyond staleness 0, drops"
        with pytest.raises(Unavailable, match=words):
            variables[0].assign(3.0)
        assert float(variables[0].read_value()) == 2.0


@pytest.mark.parametrize("author", range(NUM_WORKERS))
def test_what_is_lost_with_a_server_is_posted_again(together: Any, monkeypatch: pytest.MonkeyPatch, author: int) -> None:
    read, lost = BoardRegistry.read, list[Key]()

    def read_after_a_loss(boards: BoardRegistry, request: BoardRequest) -> Found:
        # What was posted is lost with the server, another process of which answers from now on.
        found = read(boards, request)
        if request.author == author and found.post is not None and found.post.key.fourth == 2 and not lost:
            lost.append(found.post.key)
            boards._posts.clear()
            boards._process_incarnation += 1
            return read(boards, replace(request, max_wait_s=0.0))
        return found

    monkeypatch.setattr(BoardRegistry, "read", read_after_a_loss)

    def part(strategy: ParameterServerStrategy, session: Session) -> Any:
        device = strategy.extended.parameter_devices[0]
        return [strategy.extended.reduce_to("SUM", _numbered(strategy), device).tolist() for _ in range(3)]

    assert together(part) == [[[15, 15]] * 3] * 3
    assert len(lost) == 1


def test_values_of_one_shape_for_different_variables_are_refused_alike_in_all_workers(together: Any) -> None:
    def part(strategy: ParameterServerStrategy, session: Session) -> Any:
        with strategy.scope():
            a, b = (Variable(np.zeros(2), name=name, aggregation=VariableAggregation.SUM) for name in ("a", "b"))
            optimizer = Optimizer(worker_client.sgd(1.0))
            optimizer.build([a, b])
        is_other, ones = session.worker_index == 1, np.ones(2)
        first, second = ([None, ones], [ones, None])

        def each(call: Callable[[], Any]) -> str:
            with pytest.raises(ValueError, match="; all workers must make the same calls in the same order") as caught:
                strategy.run(call)
            return str(caught.value)

        words = [
            each(lambda: optimizer.apply_gradients(zip(first if is_other else second, [a, b], strict=True))),
            each(lambda: optimizer.apply_gradients(zip([ones, ones], [b, a] if is_other else [a, b], strict=True))),
            each(lambda: (b if is_other else a).assign(ones)),
        ]
        strategy.run(lambda: optimizer.apply_gradients(zip([ones, None], [a, b], strict=True)))
        return words, a.read_value().tolist(), b.read_value().tolist()

    found = together(part)
    assert found == [found[0]] * 3
    words, *values = found[0]
    assert [one.partition(": ")[2].partition(";")[0] for one in words] == [
        'worker 1 reduces SUM for "b" where worker 0 reduces SUM for "a"',
        'worker 1 reduces SUM for "b", SUM for "a" where worker 0 reduces SUM for "a", SUM for "b"',
        'worker 1 reduces SUM for "b" where worker 0 reduces SUM for "a"',
    ]
    assert values == [[-6, -6], [0, 0]]


def test_hints_say_how_values_travel_and_all_workers_get_the_same_bits(together: Any) -> None:
    numbers = np.random.default_rng(2).normal(size=(6, 3, 40))

    def part(strategy: ParameterServerStrategy, session: Session) -> Any:
        def per_replica(make: Any) -> Any:
            return strategy.experimental_distribute_values_from_function(lambda c: make(numbers[c.replica_id_in_sync_group]))

        device = strategy.extended.parameter_devices[0]
        values = [per_replica(lambda n, row=row: n[row].astype(np.float32)) for row in range(3)]
        rows = per_replica(lambda n: IndexedSlices(np.arange(int(abs(n[0, 0]) * 9) + 1), np.ones(int(abs(n[0, 0]) * 9) + 1)))
        pairs = [(value, device) for value in (*values, rows)]
        whole = strategy.extended.batch_reduce_to("MEAN", pairs)
        packed = strategy.extended.batch_reduce_to("MEAN", pairs, CollectiveHints(bytes_per_pack=2 * 40 * 4))
        halves = strategy.extended.batch_reduce_to("MEAN", pairs, CollectiveHints(wire_dtype="float16"))
        found = [[np.asarray(one).tobytes() for one in results[:3]] for results in (whole, packed, halves)]
        assert {str(one.dtype) for one in (*halves[:3], halves[3].values)} == {"float32", "float64"}
        return found, [len(results[3].indices) for results in (whole, packed, halves)]

    found = together(part)
    assert found == [found[0]] * 3
    (whole, packed, halves), lengths = found[0]
    assert packed == whole and len(set(lengths)) == 1
    rounded = [
        sum(np.float32(np.float16(numbers[replica, row].astype(np.float32))) for replica in range(6)) / np.float32(6) for row in range(3)
    ]
    assert halves == [np.float16(one).astype(np.float32).tobytes() for one in rounded]


@pytest.mark.parametrize(
    ("hints", "reason"),
    [
        ({"bytes_per_pack": -1}, r"bytes_per_pack: got -1, want an int >= 0"),
        ({"timeout_seconds": 0}, r"timeout_seconds: got 0, want seconds > 0"),
        ({"timeout_seconds": "5"}, r"timeout_seconds: got '5', want seconds > 0"),
        ({"wire_dtype": "int8"}, r"wire_dtype: got 'int8', want float16, float32"),
    ],
)
def test_hints_that_mean_nothing_are_refused(hints: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSpec, match=reason):
        CollectiveHints(**hints)


def test_values_that_are_equal_by_chance_in_one_worker_are_reduced_over_all(together: Any) -> None:
    numbers, flags = [3, 3, 2, 5, 4, 4], [True, True, True, False, False, False]

    def part(strategy: ParameterServerStrategy, session: Session) -> Any:
        def step() -> Any:
            own = _context().replica_id_in_sync_group
            seen = _context().merge_call(lambda strategy, number: float(strategy.reduce("MEAN", number)), (numbers[own],))
            return numbers[own], flags[own], seen

        number, flag, seen = strategy.run(step)
        with pytest.raises(TypeError, match="not true or false"):
            bool(flag)
        return (
            float(strategy.reduce("MEAN", number)),
            [float(one) for one in strategy.experimental_local_results(seen)],
        )

    assert together(part) == [(3.5, [3.5, 3.5])] * 3


def test_after_a_write_that_was_refused_variables_read_as_they_are_on_the_servers(start: Start) -> None:
    cluster = start(Shape(num_workers=1, replicas_to_aggregate=1, max_steps=2))
    with cluster.session(0) as session, ParameterServerStrategy(session=session) as strategy:
        with strategy.scope():
            v = Variable(0.0, name="v")
        v.assign(1.0)
        v.assign(2.0)
        for _ in range(2):
            with pytest.raises(Unavailable, match="not written: variables 'v'"):
                v.assign_add(1.0)
            assert float(v.read_value()) == 2.0 == float(session.read()["v"])


@pytest.mark.parametrize("is_away", [False, True])
def test_after_a_step_that_failed_a_second_try_writes_once(start: Start, monkeypatch: pytest.MonkeyPatch, is_away: bool) -> None:
    cluster = start(Shape(num_workers=1, replicas_to_aggregate=1))

    def fails(*_: Any, **__: Any) -> Any:
        raise Unavailable("the server is away")

    with cluster.session(0) as session, ParameterServerStrategy(session=session) as strategy:
        with strategy.scope():
            v = Variable(1.0, name="v")
        v.assign(2.0)
        with monkeypatch.context() as patched, pytest.raises(Unavailable, match="the server is away"):
            patched.setattr(Session, "step", fails)
            if is_away:
                patched.setattr(Session, "read", fails)
            v.assign_add(1.0)
        assert float(v.read_value()) == 2.0
        assert float(v.assign_add(1.0)) == 3.0 == float(session.read()["v"])


def test_a_value_over_a_servers_limits_fails_in_all_workers_and_the_next_reduction_works(
    together: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    post = BoardRegistry.post

    def post_small(boards: BoardRegistry, header: PostHeader, content: Array) -> int:
        if header.content_bytes > 7000:
            raise LimitExceeded("ps 0: has no room for this")
        return post(boards, header, content)

    monkeypatch.setattr(BoardRegistry, "post", post_small)
    monkeypatch.setattr("worker_client.strategy.board.LIMIT_S", 0.3)

    def part(strategy: ParameterServerStrategy, session: Session) -> Any:
        device, replicas = strategy.extended.parameter_devices[0], _numbered(strategy).values
        # What is contributed, and what comes of it.
        for values in (np.zeros(1000), IndexedSlices(np.zeros(500, np.int64), np.zeros(500))):
            with pytest.raises(LimitExceeded, match="has no room for this"):
                strategy.extended.reduce_to("SUM", PerReplica(dict.fromkeys(replicas, values)), device)
            found = strategy.extended.reduce_to("SUM", _numbered(strategy), device).tolist()
        return found

    assert together(part, per_worker=1) == [[3, 3]] * 3


class _Lost(Exception):
    """Stands for the end of a program's process."""


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("num_reduced", [0, 1, 2])
def test_a_program_started_again_within_a_call_gets_the_earlier_results_and_its_writes_are_made_once(
    impatient: None, lost: int, num_reduced: int, is_async: bool
) -> None:
    cluster = InProcessCluster(num_ps=1, total_num_replicas=2, replicas_to_aggregate=2)
    if is_async:
        with worker_client.local(cluster, worker_index=0) as session:
            session.set_policy(async_policy(), timeout_s=20)

    def called(strategy: ParameterServerStrategy, v: Variable, *, ends_after: int | None = None) -> list[float]:
        seen: list[float] = []

        def merged(strategy: ParameterServerStrategy) -> None:
            for value in (1.0, 1000.0):
                if len(seen) == ends_after:
                    raise _Lost
                values = PerReplica({replica: np.float64(value + replica) for replica in _numbered(strategy).values})
                seen.append(float(strategy.extended.reduce_to("SUM", values, v, CollectiveHints(timeout_seconds=20))))
            if len(seen) == ends_after:
                raise _Lost
            v.assign_add(seen[0] + seen[1])

        strategy.run(lambda: _context().merge_call(merged))
        return seen

    # Under async the other worker does not wait at the end of a call: this one is then behind it.
    num_behind, has_ended = int(is_async and num_reduced == 2), threading.Event()

    def program(index: int, *, takes_over: bool = False, ends_after: int | None = None) -> list[list[float]]:
        session = worker_client.local(cluster, worker_index=index, takeover=takes_over)
        strategy = ParameterServerStrategy(session=session)
        try:
            with strategy.scope():
                v = Variable(0.0, name="v")
            if ends_after is not None:
                called(strategy, v, ends_after=ends_after)
            found = []
            for _ in range(3 - takes_over * num_behind):
                found.append(called(strategy, v))
                has_ended.set()
            return found
        finally:
            strategy.close()
            if ends_after is None:
                session.close()  # a process that is lost does not take its leave

    def work(index: int) -> Any:
        if index == lost:
            with pytest.raises(_Lost):
                program(index, ends_after=num_reduced)
            assert not num_behind or has_ended.wait(20)
        return program(index, takes_over=index == lost)

    with worker_client.observe_local(cluster) as observer, ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
        assert results[1 - lost] == [[3.0, 2001.0]] * 3
        assert results[lost] == [[3.0, 2001.0]] * (3 - num_behind)
        num_written = 3 - (num_behind if lost == 0 else 0)
        assert float(observer.read()["v"]) == num_written * 2004.0
