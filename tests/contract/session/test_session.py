"""One contract for sessions and observers, with in-process objects and with servers behind gRPC."""

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import (
    DeadlineExceeded,
    IncompletePush,
    InvalidSpec,
    ModelMismatch,
    ShapeMismatch,
    SlotNotFound,
    StepNotReady,
    TrainingInterrupted,
    VariableNotFound,
    WorkerIndexOutOfRange,
    WorkerIndexTaken,
)
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import FinishTrainingRequest
from tests.support.cluster.here import also_over, start_over
from tests.support.cluster.shape import Shape, Start
from tests.support.waiting import wait_until
from worker_client import ClusterState, OptimizerSpec, PushOutcome, Session
from worker_client.core.sides import run

start = start_over(["in process", "shared memory"])

VALUES = {"table": np.arange(60.0).reshape(20, 3), "bias": np.zeros(5, np.float32), "scale": np.ones(()), "none": np.zeros((0, 2))}
# Numbers that float32 has too: rates and the like are float32, as in the original.
OPTIMIZER = worker_client.momentum(0.5, momentum=0.75)
ONES = {name: np.ones_like(value) for name, value in VALUES.items()}


def join(session: Session, *, split_bytes: int = 128) -> Session:
    session.create_or_join(VALUES, optimizer=OPTIMIZER, split_bytes=split_bytes, timeout_s=20)
    return session


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def assert_equal(found: dict[str, Array], expected: dict[str, Array]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)


def test_values_that_were_read_are_copies_that_the_caller_may_write(start: Start) -> None:
    """It can be written, in place too, and stays as it was whatever comes after: on every transport."""
    cluster = start(Shape(num_ps=3))
    session, observer = join(cluster.session()), cluster.observer()
    seen = []
    for _ in range(4):
        seen.append((session.read(), observer.read(), {name: view.copy() for name, view in session.views().items()}))
        session.step(ONES, timeout_s=20)
    for number, (own, observed, expected) in enumerate(seen):
        assert_equal(own, expected)
        assert_equal(observed, expected)
        for array in (*own.values(), *observed.values()):
            array += number  # nobody else's
            array.setflags(write=True)
    assert_equal(session.read(), {name: view.copy() for name, view in session.views().items()})
    assert not any(view.flags.writeable for view in (*session.views().values(), *observer.views().values()))


@also_over("grpc", "shared memory")
def test_steps_are_applied_and_counted(start: Start) -> None:
    session = join(start(Shape(num_ps=2, max_steps=3)).session())
    assert session.end_reason is None
    for step in range(3):
        result = session.step(ONES, timeout_s=20)
        assert (result.outcome, result.step, result.is_finished) == (PushOutcome.ACCEPTED, step, step == 2)
    # With gradients of one: 1 + 1.75 + 2.3125, times the rate.
    np.testing.assert_allclose(session.read()["table"], VALUES["table"] - 0.5 * 5.0625, rtol=1e-12)
    np.testing.assert_allclose(session.get_slot("table", "momentum"), np.full((20, 3), 2.3125), rtol=1e-12)
    assert session.get_slot_names() == ["momentum"]
    assert (session.is_finished, session.local_step, session.wait(timeout_s=5)) == (True, 3, False)
    assert session.end_reason == "finished"


@pytest.mark.parametrize("reason", [5, b"enough", ["enough"]])
def test_a_reason_that_is_no_text_finishes_nothing(start: Start, reason: Any) -> None:
    session = join(start(Shape()).session())
    with pytest.raises(InvalidSpec, match=r"reason: got .*, want a str"):
        session.finish(reason)
    assert not session.is_finished


@pytest.mark.parametrize(("interrupts", "reason"), [(False, "finished"), (True, "interrupted")])
def test_a_program_can_tell_a_training_that_is_done_from_one_that_was_stopped(start: Start, interrupts: bool, reason: str) -> None:
    cluster = start(Shape(num_ps=1, num_workers=2, lease_s=0.3))
    sessions = cluster.session(), cluster.session()
    for session in sessions:
        session.create_or_join({"w": np.zeros(2)}, optimizer=worker_client.sgd(1.0), timeout_s=20)
    sessions[0].membership.link.ask(FinishTrainingRequest(reason="enough", interrupts=interrupts), what="finish")
    assert not sessions[0].wait(timeout_s=20)
    beat = sessions[1].membership.beat(sessions[1].membership.participant)
    assert run(beat).name.lower() == reason
    assert (sessions[0].is_finished, sessions[0].end_reason) == (True, reason)
    if not sessions[1].membership.link.transport.is_in_process:  # it has a heartbeat, and need not ask
        wait_until(lambda: sessions[1].is_finished, what="a heartbeat has heard of it")
        assert sessions[1].end_reason == reason
    assert not sessions[1].wait(timeout_s=20)
    assert sessions[1].end_reason == reason


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_program_whose_training_was_interrupted_ends_with_an_error(start: Start, interrupts: bool) -> None:
    cluster = start(Shape(num_ps=1, num_workers=2, max_steps=3))
    with pytest.raises(TrainingInterrupted, match="at step 0, before its end") if interrupts else nullcontext():
        with cluster.session() as session:
            join(session)
            session.membership.link.ask(FinishTrainingRequest(reason="enough", interrupts=interrupts), what="finish")
            assert not session.wait(timeout_s=20)


def test_an_error_of_the_program_is_not_replaced_where_its_training_was_interrupted(start: Start) -> None:
    cluster = start(Shape(num_ps=1))
    with pytest.raises(ZeroDivisionError), cluster.session() as session:
        join(session)
        session.membership.link.ask(FinishTrainingRequest(reason="enough", interrupts=True), what="finish")
        assert not session.wait(timeout_s=20)
        _ = 1 // 0


def test_a_worker_whose_contributions_are_all_dropped_for_long_is_warned_once(
    start: Start, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = start(Shape(num_ps=1, replicas_to_aggregate=1, num_workers=2))
    fast, slow = cluster.session(), cluster.session()
    for session in (fast, slow):
        session.create_or_join({"w": np.zeros(2)}, optimizer=worker_client.sgd(1.0), timeout_s=20)
    with caplog.at_level("WARNING", logger="lockstep.worker"):
        for number in range(30):
            if number == 25:
                assert "contributions of worker" not in caplog.text, "it may be its turn to be a backup worker"
                monkeypatch.setattr("worker_client.session.calls._DROPPED_S", 0.0)
            assert fast.step({"w": np.ones(2)}, timeout_s=20).is_accepted
            assert not slow.step({"w": np.ones(2)}, timeout_s=20).is_accepted
    words = f"none of the last 26 contributions of worker {slow.worker_index} counted, because steps were complete without it"
    assert [one.getMessage() for one in caplog.records if words in one.getMessage()] != []
    assert sum("contributions of worker" in one.getMessage() for one in caplog.records) == 1
    counts = {one.index: (one.num_accepted, one.num_stale + one.num_late) for one in cluster.observer().status().participants if one.pid}
    assert counts[slow.worker_index] == (0, 30)


RESUMED: dict[str, Any] = {"w": np.zeros(2), "own": worker_client.Variable(np.zeros(2), optimizer=worker_client.momentum(0.5, 0.5))}
CHANGED = {**RESUMED, "own": worker_client.Variable(np.zeros(2), optimizer=worker_client.momentum(0.25, 0.5))}
HORIZON = worker_client.polynomial_decay(1.0, 4, final=0.0)


def test_a_worker_with_other_numbers_of_the_optimizers_adopts_keeps_or_is_refused(start: Start) -> None:
    cluster = start(Shape(num_ps=2, replicas_to_aggregate=1, num_workers=2))
    first = cluster.session()  # training ends when it leaves
    first.create_or_join(RESUMED, optimizer=worker_client.sgd(0.5), timeout_s=20)
    first.step({"w": np.ones(2), "own": np.ones(2)})

    def resumed(how: str, *, optimizer: OptimizerSpec, variables: dict[str, Any]) -> dict[str, float]:
        with cluster.session() as session:
            assert not session.create_or_join(variables, optimizer=optimizer, on_optimizer_change=how, timeout_s=20)
            before = session.read()
            session.step({"w": np.ones(2), "own": np.zeros(2)}, timeout_s=20)
            return {name: float(before[name][0] - value[0]) for name, value in session.read().items()}

    with pytest.raises(ModelMismatch, match=r"0\.5.* say create_or_join\(…, on_optimizer_change='adopt'\); with the cluster's: 'keep'"):
        resumed("refuse", optimizer=worker_client.sgd(0.25), variables=RESUMED)
    # The slot of "own" stays: 0.5 after another step, then 0.25, and so on.
    assert resumed("keep", optimizer=worker_client.sgd(0.25), variables=CHANGED) == {"w": 0.5, "own": 0.25}
    assert resumed("adopt", optimizer=worker_client.sgd(0.25), variables=CHANGED) == {"w": 0.25, "own": 0.0625}
    assert resumed("keep", optimizer=worker_client.sgd(0.125), variables=RESUMED) == {"w": 0.25, "own": 0.03125}
    # Steps 4 and 5 of a schedule that has been stretched.
    assert resumed("adopt", optimizer=worker_client.sgd(HORIZON), variables=RESUMED)["w"] == 0.0
    assert resumed("adopt", optimizer=worker_client.sgd(worker_client.polynomial_decay(1.0, 10, final=0.0)), variables=RESUMED)["w"] == 0.5
    # What the cluster began with is what this program says; it holds again.
    assert resumed("adopt", optimizer=worker_client.sgd(0.5), variables=RESUMED)["w"] == 0.5


def test_an_optimizer_that_differs_in_more_than_numbers_is_always_refused(start: Start) -> None:
    cluster = start(Shape(num_ps=1, num_workers=2))
    cluster.session().create_or_join({"w": np.zeros(2)}, optimizer=worker_client.adagrad(0.5, 0.1), timeout_s=20)
    other = cluster.session()
    cases: list[tuple[dict[str, Any], OptimizerSpec]] = [
        ({"w": np.zeros(2)}, worker_client.sgd(0.5)),
        ({"w": np.zeros(2)}, worker_client.adagrad(0.5, 0.2)),
        ({"w": np.zeros(3)}, worker_client.adagrad(0.25, 0.1)),
    ]
    for variables, optimizer in cases:
        for how in ("keep", "adopt"):
            with pytest.raises(ModelMismatch, match="begin anew"):
                other.create_or_join(variables, optimizer=optimizer, on_optimizer_change=how, timeout_s=20)
    with pytest.raises(InvalidSpec, match="on_optimizer_change: got 'ignore', want one of 'refuse', 'keep', 'adopt'"):
        other.create_or_join({"w": np.zeros(2)}, optimizer=worker_client.adagrad(0.5, 0.1), on_optimizer_change="ignore")


@also_over("grpc", "shared memory")
def test_workers_in_threads_make_steps_together(start: Start) -> None:
    cluster = start(Shape(num_ps=2, num_workers=3, max_steps=20))
    outcomes: list[PushOutcome] = []

    def work(session: Session) -> None:
        with session:
            join(session)
            while not session.is_finished:
                gradients = {name: np.full_like(value, session.worker_index) for name, value in session.read().items()}
                outcomes.append(session.step(gradients, timeout_s=20).outcome)

    threads = [in_thread(partial(work, cluster.session())) for _ in range(3)]
    observer = cluster.observer()
    for thread in threads:
        thread.join(30)
    assert outcomes == [PushOutcome.ACCEPTED] * 60
    status = observer.status(max_ledger_entries=100)
    assert (status.state, status.global_step, status.num_accepted) == (ClusterState.FINISHED, 20, 60)
    assert all(len(entry.contributors) == 3 for entry in status.ledger)
    velocity, expected = 0.0, 1.0
    for _ in range(20):
        velocity = 0.75 * velocity + 1.0  # the mean of 0, 1 and 2
        expected -= 0.5 * velocity
    np.testing.assert_allclose(observer.read(timeout_s=20)["scale"], expected, rtol=1e-12)


def test_extra_tokens_let_one_worker_give_all_of_a_step(start: Start) -> None:
    session = join(start(Shape(replicas_to_aggregate=3, num_workers=1)).session())
    steps = [session.step(ONES, timeout_s=20).step for _ in range(7)]
    assert steps == [0, 0, 0, 1, 1, 1, 2]


def test_wait_says_whom_it_waits_for(start: Start, impatient: None, caplog: pytest.LogCaptureFixture) -> None:
    cluster = start(Shape(num_workers=2))
    first, second = join(cluster.session()), join(cluster.session())
    with pytest.raises(DeadlineExceeded, match=r"worker 0 wants a token after step 0: not within 0\.5 s: .*worker 1"):
        first.step(ONES, timeout_s=0.5)
    (words,) = [record.getMessage() for record in caplog.records if record.name == "lockstep.waits"]
    assert "waiting for 0 s" in words
    assert "worker 1" in words
    assert second.step(ONES, timeout_s=20).is_accepted
    assert first.wait(timeout_s=20)


def test_worker_that_was_slow_reads_the_newest_step(start: Start) -> None:
    cluster = start(Shape(num_ps=2, replicas_to_aggregate=1, num_workers=2))
    fast, slow = join(cluster.session()), join(cluster.session())
    for _ in range(4):
        fast.step(ONES, timeout_s=20)
    assert_equal(slow.read(), fast.read())
    assert slow.local_step == 4


def test_replacement_of_a_worker_that_has_given_its_share_begins_with_the_next_step(start: Start) -> None:
    cluster = start(Shape(num_workers=2))
    first, second = join(cluster.session(0)), join(cluster.session(1))
    assert first.push(ONES).is_accepted
    with pytest.raises(ZeroDivisionError), first:
        raise ZeroDivisionError("boom")
    replacement = cluster.session(0)
    with pytest.raises(DeadlineExceeded, match="worker 1"):
        replacement.create_or_join(VALUES, optimizer=OPTIMIZER, split_bytes=128, timeout_s=0.2)
    assert second.push(ONES).is_accepted
    join(replacement)
    assert replacement.local_step == 1
    assert replacement.push(ONES).is_accepted
    assert second.wait(timeout_s=20)
    assert second.push(ONES).is_accepted
    assert replacement.wait(timeout_s=20)
    np.testing.assert_allclose(replacement.read()["scale"], 1 - 0.5 * 2.75, rtol=1e-12)


def test_another_model_is_refused_and_the_right_one_accepted(start: Start) -> None:
    cluster = start(Shape(num_workers=2))
    join(cluster.session())
    second = cluster.session()
    with pytest.raises(ModelMismatch, match=r"\['bias'\] is missing"):
        second.create_or_join({"table": VALUES["table"]}, optimizer=OPTIMIZER, split_bytes=128)
    join(second)
    assert_equal(second.read(), VALUES)


def test_refused_gradients_change_nothing(start: Start) -> None:
    session = join(start(Shape()).session())
    with pytest.raises(ShapeMismatch):
        session.step({**ONES, "scale": np.ones(1)})
    with pytest.raises(IncompletePush):
        session.push({"table": ONES["table"]})
    for give in (session.push, session.step):  # a function that forgot to return its gradients
        with pytest.raises(InvalidSpec, match="gradients: got None"):
            give(None)  # type: ignore[arg-type]
    with pytest.raises(SlotNotFound):
        session.get_slot("table", "nosuch")
    with pytest.raises(VariableNotFound, match="did you mean 'table'"):
        session.get_slot("tabel", "momentum")
    assert session.step(ONES, timeout_s=20).is_accepted
    np.testing.assert_allclose(session.read()["scale"], 0.5)


def test_workers_places_are_limited_and_each_has_one_holder(start: Start) -> None:
    cluster = start(Shape(num_workers=2))
    cluster.session(1)
    with pytest.raises(WorkerIndexTaken, match="worker 1"):
        cluster.session(1)
    with pytest.raises(WorkerIndexOutOfRange):
        cluster.session(9)
    assert cluster.session().worker_index == 0


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy], ids=lambda act: act.__name__)
def test_a_session_stays_in_its_process(act: Callable[[object], object]) -> None:
    with worker_client.local() as session:
        with pytest.raises(TypeError, match="the session of worker 0 belongs to one process: it cannot be copied or pickled"):
            act(session)
        join(session).step(ONES)


def test_observer_waits_for_a_model_and_reads_along(start: Start) -> None:
    cluster = start(Shape(num_ps=2))
    observer = cluster.observer()
    with pytest.raises(DeadlineExceeded, match="no values yet"):
        observer.read(timeout_s=0.1)
    session = join(cluster.session())
    assert_equal(observer.read(timeout_s=20), VALUES)
    session.step(ONES, timeout_s=20)
    assert_equal(observer.read(), session.read())
    assert observer.step == 1
    assert_equal(observer.read(0), VALUES)
    with pytest.raises(StepNotReady):
        observer.read(2)
