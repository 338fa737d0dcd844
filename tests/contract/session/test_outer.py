"""Outer steps of several inner ones compute what their papers say, in whole and in fragments, beside the inner steps and not."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import InvalidSpec, Unavailable, VariableNotFound
from ps_protocol.model.layout import Segments
from ps_protocol.roles.shard import ReadRequest
from ps_protocol.rpc.shard import GrpcShard
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape, Start
from tests.support.waiting import wait_until
from worker_client import DiLoCo, PushOutcome, Session, outer

Values = dict[str, Any]
FIRST: Values = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.full(5, 2.0, np.float32),
    "c": np.ones(4),
    "d": np.zeros(3, np.float32),
}
RATE, MOMENTUM = 0.5, 0.8
OUTER = worker_client.momentum(RATE, MOMENTUM, use_nesterov=True)


def inner_step(values: Values, worker: int, number: int) -> None:
    """In place, and of another way for each worker, step and element."""
    for position, value in enumerate(values.values()):
        value -= 0.1 * (value - np.sin(worker + 3.0 * number + position + np.arange(value.size).reshape(value.shape))).astype(value.dtype)


def groups_of(fragments: int) -> list[list[str]]:
    """As two servers hold them."""
    return {1: [["a", "b", "c", "d"]], 2: [["a", "d"], ["b", "c"]], 4: [["a"], ["c"], ["d"], ["b"]]}[fragments]


def reference(num_workers: int, sync_every: int, num_inner: int, *, fragments: int = 1, delay: int = 0, alpha: float = 0.0) -> list[Values]:
    """Algorithm 2 of arXiv 2501.18512, with the Nesterov momentum of PyTorch; each worker's values after so many inner steps."""
    groups, anchors = groups_of(fragments), {name: value.copy() for name, value in FIRST.items()}
    velocity = {name: np.zeros_like(value) for name, value in FIRST.items()}
    workers = [{name: value.copy() for name, value in FIRST.items()} for _ in range(num_workers)]
    results: dict[float, Values] = {}  # by the inner step after which they are taken
    for number in range(1, num_inner + 1):
        for worker, values in enumerate(workers):
            inner_step(values, worker, number)
        taken = [float(number), number + 0.5]  # of an earlier contribution, and with no delay of the one of this inner step
        for moment in taken:
            for name, result in results.pop(moment, {}).items():
                anchors[name] = result
                for values in workers:
                    values[name][...] = (alpha * values[name] + (1 - alpha) * result).astype(result.dtype)
            if moment == number and number % (sync_every // fragments) == 0:
                group = groups[(number // (sync_every // fragments) - 1) % fragments]
                found = {}
                for name in group:
                    delta = sum(anchors[name] - values[name] for values in workers) / num_workers
                    velocity[name] = (MOMENTUM * velocity[name] + delta).astype(delta.dtype)
                    found[name] = (anchors[name] - RATE * (delta + MOMENTUM * velocity[name])).astype(delta.dtype)
                results[number + (delay or 0.5)] = found
    return workers


def trained(session: Session, worker: int, num_inner: int, **options: Any) -> Values:
    with DiLoCo(session, **options) as loop:
        values = loop.values
        for number in range(loop.num_inner_steps + 1, num_inner + 1):
            inner_step(values, worker, number)
            values |= loop.step(values)
        assert loop.num_inner_steps == num_inner
        return values


def all_trained(start: Start, shape: Shape, num_inner: int, **options: Any) -> list[Values]:
    cluster, found = start(shape), {}

    def work(worker: int) -> None:
        with cluster.session(worker) as session:
            session.create_or_join(FIRST, optimizer=OUTER)
            found[worker] = trained(session, worker, num_inner, **options)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(shape.num_workers or 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[worker] for worker in sorted(found)]


OPTIONS = [
    {"sync_every": 1},
    {"sync_every": 4},
    {"sync_every": 4, "fragments": 2},
    {"sync_every": 8, "fragments": 4},
    {"sync_every": 4, "delay": 2},
    {"sync_every": 4, "delay": 4, "alpha": 0.5},
    {"sync_every": 6, "fragments": 2, "delay": 2, "alpha": 0.25},
    {"sync_every": 6, "fragments": 2, "delay": 3, "alpha": 0.25},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_values_are_those_of_the_papers_and_the_same_bits_each_time(start: Start, options: dict[str, Any]) -> None:
    shape, num_inner = Shape(num_ps=2, num_workers=2), 25
    found = all_trained(start, shape, num_inner, **options)
    for mine, expected in zip(found, reference(2, num_inner=num_inner, **options), strict=True):
        for name, value in mine.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-5)
    for mine, again in zip(found, all_trained(start, shape, num_inner, **options), strict=True):
        for name, value in mine.items():
            np.testing.assert_array_equal(value, again[name])


def test_the_mean_is_weighted_by_inner_steps(start: Start) -> None:
    cluster = start(Shape(num_workers=2))
    with cluster.session(0) as one, cluster.session(1) as other:
        one.create_or_join(FIRST, optimizer=worker_client.sgd(1.0))
        other.create_or_join(FIRST, optimizer=worker_client.sgd(1.0))
        loops = [DiLoCo(one, sync_every=9), DiLoCo(other, sync_every=9)]
        moved = [{name: value + number for name, value in FIRST.items()} for number in (4, 8)]
        for loop, num_inner, values in zip(loops, (1, 3), moved, strict=True):
            for _ in range(num_inner):
                assert loop.step(values) == {}
        threads = [threading.Thread(target=loop.sync, args=(values,)) for loop, values in zip(loops, moved, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for name, value in one.read().items():
            np.testing.assert_allclose(value, FIRST[name] + (4 + 3 * 8) / 4, rtol=1e-6)


@pytest.mark.parametrize(("sync_every", "rate"), [(1, 0.1), (10, 0.313), (25, 0.495), (50, 0.7), (500, 0.7)])
def test_few_inner_steps_get_a_lower_outer_rate(sync_every: int, rate: float) -> None:
    assert worker_client.outer_optimizer(sync_every) == worker_client.momentum(rate, 0.9, use_nesterov=True)
    with pytest.raises(InvalidSpec, match="sync_every: got 0"):
        worker_client.outer_optimizer(0)


@pytest.mark.parametrize("bits", [None, 4])
def test_rate_and_momentum_of_outer_steps_may_be_others(bits: int | None) -> None:
    given = worker_client.outer_optimizer(10, rate=0.5, momentum=0.6, bits=bits)
    assert (given.learning_rate.argument("value"), given.hyperparameters["momentum"]) == (0.5, 0.6)
    with pytest.raises(InvalidSpec, match="momentum"):
        worker_client.outer_optimizer(10, momentum=-0.5, bits=bits)


class Clock:
    """A clock for each thread, which goes only where its program says."""

    def __init__(self) -> None:
        self.now_s: dict[int, float] = {}

    def __call__(self) -> float:
        return self.now_s.get(threading.get_ident(), 0.0)

    def go(self, seconds: float) -> None:
        self.now_s[threading.get_ident()] = self() + seconds


@pytest.mark.parametrize(
    ("options", "slow"),
    [({"sync_every": 40}, 10), ({"sync_every": 44, "fragments": 4}, 8), ({"sync_every": 40, "fragments": 2, "delay": 7}, 14)],
    ids=str,
)
def test_by_speed_a_slow_worker_makes_fewer_inner_steps(
    start: Start, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], slow: int
) -> None:
    monkeypatch.setattr(outer, "monotonic", clock := Clock())
    exchange = Session.step

    def step(*args: Any, **options: Any) -> Any:
        clock.go(1000.0)  # is no inner step
        return exchange(*args, **options)

    monkeypatch.setattr(Session, "step", step)
    cluster, found = start(Shape(num_ps=2, num_workers=2, max_steps=8)), {}

    def work(worker: int) -> None:
        with cluster.session(worker) as session:
            session.create_or_join(FIRST, optimizer=OUTER)
            with DiLoCo(session, by_speed=True, **options) as loop:
                while not loop.is_finished:
                    clock.go(4.0 if worker else 1.0)
                    loop.step(loop.values)
                found[worker] = loop.sync_every

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {0: options["sync_every"], 1: slow}


def test_two_metrics_tell_what_the_outer_optimizer_makes_of_contributions(start: Start) -> None:
    with start(Shape(num_ps=2)).session() as session:
        session.create_or_join(FIRST, optimizer=OUTER)
        loop = DiLoCo(session, sync_every=1)
        values, reports = loop.values, []
        for number in range(40):
            for value in values.values():
                value -= 1.0 if number < 39 else -1.0
            values |= loop.step(values)
            reports.append({name: report.by_worker[0].last for name, report in session.read_metrics().items()})
    assert reports[0] == {}, "nothing has come of it yet"
    # Of contributions that are all the same the momentum is the sum of a geometric series.
    assert reports[1] == {"outer_correlation": pytest.approx(1.0), "outer_rate": pytest.approx(RATE * (1 + MOMENTUM))}
    assert reports[-2] == {
        "outer_correlation": pytest.approx(1.0),
        "outer_rate": pytest.approx(RATE * (1 + MOMENTUM / (1 - MOMENTUM)), rel=1e-2),
    }
    assert reports[-1]["outer_correlation"] == pytest.approx(-1.0)


def test_contributions_without_a_way_report_no_metrics_of_it(start: Start) -> None:
    with start(Shape()).session() as session:
        session.create_or_join(FIRST, optimizer=OUTER)
        loop = DiLoCo(session, sync_every=1)
        for value in (0.0, 0.0, np.nan, np.inf):
            loop.step({name: one + np.asarray(value, one.dtype) for name, one in loop.values.items()})
        assert session.read_metrics() == {}


def test_sync_every_is_read_for_each_contribution(start: Start) -> None:
    with start(Shape()).session() as session:
        session.create_or_join(FIRST, optimizer=OUTER)
        loop, steps = DiLoCo(session, sync_every=2), []
        for number in range(9):
            loop.step(loop.values)
            steps.append(loop.global_step)
            loop.sync_every = 2 if number < 3 else 3
        assert steps == [0, 1, 1, 2, 2, 2, 3, 3, 3]
        for wrong in (0, 2.5, np.nan, "2"):
            with pytest.raises(InvalidSpec, match="sync_every"):
                loop.sync_every = wrong  # type: ignore[assignment]


def kept_and_killed(start: Start, directory: Path, at: Callable[[int], bool], options: dict[str, Any]) -> Values:
    """Trains alone for 21 inner steps, with another process in the worker's place after each at which it was killed."""
    cluster, done = start(Shape(num_workers=2, replicas_to_aggregate=1)), 0
    session, _ = cluster.session(0), cluster.session(1)  # the second one only stays, so that the first may leave
    session.create_or_join(FIRST, optimizer=OUTER)
    loop = DiLoCo(session, inner_state_dir=directory, **options)
    values = loop.values
    while (number := loop.num_inner_steps + 1) <= 21:
        inner_step(values, 0, number)
        values |= loop.step(values, lambda: {"moment": np.full(2, loop.num_inner_steps)})  # noqa: B023
        if number > done and at(number):
            done = number
            with closing(session), closing(loop):  # what is under way arrives
                pass
            session = cluster.session(0)
            session.create_or_join(FIRST, optimizer=OUTER)
            loop = DiLoCo(session, inner_state_dir=directory, **options)
            values = loop.values
            assert not loop.inner_state or loop.inner_state["moment"][0] == loop.num_inner_steps
    session.close()
    return values


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_worker_that_is_started_again_goes_on_to_the_same_bits(start: Start, tmp_path: Path, options: dict[str, Any]) -> None:
    expected = kept_and_killed(start, tmp_path / "never", lambda _: False, options)
    for period in (3, 5):
        found = kept_and_killed(start, tmp_path / f"{period}", lambda number: number % period == 0, options)  # noqa: B023
        for name, value in found.items():
            np.testing.assert_array_equal(value, expected[name])


def test_what_is_read_by_name_is_of_the_step_and_of_the_shards_that_hold_it(start: Start) -> None:
    values = {name: np.ones(200, np.float32) for name in "abcd"}
    with start(Shape(num_ps=4)).session() as session:
        session.create_or_join(values, optimizer=worker_client.sgd(1.0))
        before = session.membership.traffic.received_bytes
        session.step({**dict.fromkeys(values), "b": np.full(200, 0.5, np.float32)}, names=["b"])
        found = session.read(["b"])
        received = session.membership.traffic.received_bytes - before
        assert [*found] == ["b"]
        assert (found["b"] == 0.5).all()
        assert received in (0, 832), "of one of four shards, if any"
        session.step({**dict.fromkeys(values), "a": np.full(200, 0.5, np.float32)}, names=("a",))
        everything = session.read()
        assert {name: value[0] for name, value in everything.items()} == {"a": 0.5, "b": 0.5, "c": 1.0, "d": 1.0}
        assert session.read("c")["c"][0] == 1.0
        with pytest.raises(VariableNotFound, match="'e'"):
            session.read(["e"])


def test_an_error_in_the_background_comes_out_at_the_next_inner_step_and_the_contribution_is_made_again(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(Shape()).session() as session, DiLoCo(joined(session), sync_every=4, delay=3) as loop:
        has_failed, values = threading.Event(), loop.values

        def fail(*_: Any, **__: Any) -> Any:
            has_failed.set()
            raise Unavailable("no server answers")

        with monkeypatch.context() as patch:
            patch.setattr(session, "step", fail)
            for _ in range(4):
                assert loop.step(values) == {}
            assert has_failed.wait(30)
        moved = {name: value + 1 for name, value in values.items()}
        with pytest.raises(Unavailable, match="no server answers"):
            while True:  # the thread notes the error a moment after it is raised
                loop.step(moved)
        for _ in range(4):
            moved |= loop.step(moved)
        assert loop.global_step == 1
        np.testing.assert_allclose(moved["c"], FIRST["c"] + RATE * (1 + MOMENTUM))


def test_what_was_counted_before_an_error_does_not_count_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(Shape()).session() as session, DiLoCo(joined(session, worker_client.sgd(1.0)), sync_every=1) as loop:
        original, moved = session.step, {name: value + 1 for name, value in FIRST.items()}

        def count_and_fail(*given: Any, **named: Any) -> Any:
            original(*given, **named)
            raise Unavailable("no server answers")

        with monkeypatch.context() as patch, pytest.raises(Unavailable):
            patch.setattr(session, "step", count_and_fail)
            loop.step(moved)
        moved |= loop.step(moved)
        assert loop.global_step == session.local_step == 1
        np.testing.assert_allclose(moved["c"], FIRST["c"] + 1)


@pytest.mark.parametrize("delay", [0, 3])
def test_an_exception_contributes_nothing_and_no_thread_stays(start: Start, delay: int) -> None:
    cluster, before = start(Shape(num_workers=2)), {*threading.enumerate()}
    with cluster.session(0) as session, pytest.raises(ZeroDivisionError), DiLoCo(joined(session), sync_every=4, delay=delay) as loop:
        for _ in range(4 if delay else 3):  # what is under way waits for the other worker
            loop.step(loop.values)
        raise ZeroDivisionError
    wait_until(lambda: not [thread for thread in {*threading.enumerate()} - before if thread.name == "lockstep-0-outer"])
    with pytest.raises(RuntimeError, match="this DiLoCo is closed"):
        loop.step(loop.values)
    with cluster.observer() as observer:
        assert observer.status().global_step == 0


def test_a_late_worker_takes_what_others_did_and_loses_nothing(start: Start) -> None:
    cluster = start(Shape(num_workers=2, replicas_to_aggregate=1))
    with cluster.session(0) as fast, cluster.session(1) as late:
        loops = [DiLoCo(joined(one, worker_client.sgd(1.0)), sync_every=2, fragments=2) for one in (fast, late)]
        fast.set_policy(worker_client.outer_policy())
        values = [{name: value + number for name, value in loops[0].values.items()} for number in (1, 10)]
        for _ in range(3):
            values[0] |= loops[0].step(values[0])
        values[1] |= loops[1].step(values[1])  # to the first step, and three others have been made: all fragments have moved
        assert loops[1].global_step == fast.local_step + 1 == 4
        for name, value in late.read().items():
            np.testing.assert_allclose(values[1][name], value + (10 if name in ("a", "b") else 0))


def test_after_a_rollback_values_are_those_that_training_goes_on_from(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(Shape()).session() as session, DiLoCo(joined(session), sync_every=2, delay=1, alpha=0.5) as loop:
        values, original = loop.values, session.step
        for number in range(1, 4):
            inner_step(values, 0, number)
            values |= loop.step(values)
        restored = session.read()
        rolled_back = replace(loop.last_push, outcome=PushOutcome.ROLLED_BACK)  # type: ignore[type-var]
        monkeypatch.setattr(session, "step", lambda *_, **__: rolled_back)
        monkeypatch.setattr(session, "read", lambda *_: {name: value + 1 for name, value in restored.items()})
        for number in range(4, 6):
            inner_step(values, 0, number)
            values |= loop.step(values)
        monkeypatch.setattr(session, "step", original)
        for name, value in values.items():
            np.testing.assert_array_equal(value, restored[name] + 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync_every": 0}, "sync_every: got 0"),
        ({"sync_every": 2.0}, "sync_every: got 2.0"),
        ({"sync_every": 4, "fragments": 3}, "fragments: got 3, want a divisor of sync_every, which is 4"),
        ({"sync_every": 10, "fragments": 5}, "fragments: got 5, want at most as many as variables, 4"),
        ({"sync_every": 4, "fragments": 2, "delay": 3}, "delay: got 3, want at most sync_every / fragments = 2"),
        ({"sync_every": 4, "alpha": 1.0}, "alpha: got 1.0, want a number of at least 0 and below 1"),
        ({"sync_every": 4, "names": ["a", "z"]}, "names: the model has no variable 'z'"),
        ({"sync_every": 4, "inner_state_dir": f"{__file__}/state"}, "inner_state_dir: .* cannot be made"),
    ],
)
def test_misuse_is_said(options: dict[str, Any], words: str) -> None:
    with worker_client.local() as session:
        with pytest.raises(InvalidSpec, match=words):
            DiLoCo(joined(session), **options)
        with pytest.raises(InvalidSpec, match="values: 'a' is float64 of shape"):
            DiLoCo(session, sync_every=1).step({name: value.astype(np.float64) for name, value in FIRST.items()})
        with pytest.raises(InvalidSpec, match="values: 'a' is missing"):
            DiLoCo(session, sync_every=1).step({name: value for name, value in FIRST.items() if name != "a"})


def joined(session: Session, optimizer: Any = OUTER) -> Session:
    session.create_or_join(FIRST, optimizer=optimizer)
    return session


@pytest.mark.parametrize(("transport", "fragments"), [("grpc", 1), ("sockets", 1), ("grpc", 2)])
def test_moves_of_four_bits_are_read_exactly_and_in_an_eighth_of_the_bytes(transport: str, fragments: int, tmp_path: Path) -> None:
    rng, found, num_bytes = np.random.default_rng(0), {}, {}
    first = {"w": rng.standard_normal((300, 70)).astype(np.float32), "b": rng.standard_normal((300, 69)).astype(np.float32)}
    for variables in ("float32", "int4"):
        with ExitStack() as stack:
            cluster = ServedCluster(Shape(num_ps=2), stack, directory=tmp_path)
            wire = worker_client.WireFormat(variables=variables)
            session = stack.enter_context(worker_client.connect(cluster.chief_address, transport=transport, wire=wire))
            session.create_or_join(first, optimizer=outer.outer_optimizer(10, bits=4))
            read = []
            with DiLoCo(session, sync_every=10, fragments=fragments) as loop:
                before, values = session.membership.traffic.received_bytes, loop.values
                for number in range(1, 61):
                    inner_step(values, 0, number)
                    values |= loop.step(values)
                    read.append({name: value.copy() for name, value in values.items()})
            found[variables], num_bytes[variables] = read, session.membership.traffic.received_bytes - before
    assert all(one[name].tobytes() == other[name].tobytes() for one, other in zip(*found.values(), strict=True) for name in first)
    assert 7.9 < num_bytes["float32"] / num_bytes["int4"] < 8.1


def test_moves_of_four_bits_come_to_what_nesterov_momentum_comes_to(start: Start) -> None:
    ends = []
    for bits in (None, 4):
        with start(Shape()).session() as session:
            session.create_or_join(FIRST, optimizer=outer.outer_optimizer(50, bits=bits))
            for _ in range(150):
                session.step({name: 0.1 * (value - 3) for name, value in session.read().items()})
            ends.append(session.read())
    for exact, rounded in zip(*(end.values() for end in ends), strict=True):
        np.testing.assert_allclose(rounded, exact, atol=0.02)
    with pytest.raises(InvalidSpec, match="bits: got 3"):
        outer.outer_optimizer(50, bits=3)


def test_an_answer_that_breaks_off_leaves_nothing_that_moves_are_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int | None] = []

    def read(self: GrpcShard, request: ReadRequest, into: Segments, **more: Any) -> int:
        held.append(request.held_step)
        if len(held) == 1:
            into.pieces[0][:100] = 1
            raise Unavailable("the connection broke")
        return ask(self, request, into, **more)

    with ExitStack() as stack:
        cluster = ServedCluster(Shape(), stack, directory=tmp_path)
        wire = worker_client.WireFormat(variables="int4")
        session = stack.enter_context(worker_client.connect(cluster.chief_address, transport="grpc", wire=wire))
        session.create_or_join(FIRST, optimizer=outer.outer_optimizer(10, bits=4))
        session.read()
        ask = GrpcShard.read
        monkeypatch.setattr(GrpcShard, "read", read)
        session.step({name: np.ones_like(value) for name, value in FIRST.items()})
        found = session.read()
        assert held[:2] == [0, None]
        with closing(worker_client.observe(cluster.chief_address)) as observer:
            assert all(value.tobytes() == found[name].tobytes() for name, value in observer.read().items())
