"""Calls of a session that fail on the way: which it repeats, which it gives up, and how it leaves. Real stores, a real coordinator."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.errors import LeaseExpired, ShuttingDown, StepGone, TooManyPushes, Unavailable
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.chief import ClusterState, HeartbeatRequest, Participant, ParticipantKind
from tests.support.chief.eras import era
from tests.support.network.faults import Flaky
from tests.support.waiting import wait_until
from worker_client import PushOutcome, Session
from worker_client.cluster.chief import ChiefLink
from worker_client.cluster.threads import FanOut
from worker_client.cluster.transport import LocalTransport
from worker_client.session.membership import Heartbeat

VALUES = {"a": np.zeros(40), "b": np.zeros(40)}
ONES = {name: np.ones(40) for name in VALUES}


class FaultyCluster:
    """Two shards and a chief that can be told to fail, and one session that reaches them as over a network: with threads and retries."""

    def __init__(
        self, *, timeout_s: float = 20.0, policy: PolicySpec | None = None, values: Mapping[str, Any] = VALUES, **sizes: int
    ) -> None:
        self.cluster = InProcessCluster(num_ps=2, policy=policy, **sizes)  # type: ignore[arg-type]
        self.chief = Flaky(self.cluster.chief)
        self.shards = [Flaky(shard) for shard in self.cluster.shards]
        self.link = ChiefLink(self.chief, LocalTransport(self.shards.__getitem__, timeout_s=timeout_s, is_in_process=False))
        self.session = Session(self.link, self.link.register(kind=ParticipantKind.WORKER, index=None, takeover=False))
        self.session.create_or_join(values, optimizer=worker_client.sgd(1.0))

    def assert_applied(self, *, num_steps: int) -> None:
        for value in self.session.read().values():
            np.testing.assert_array_equal(value, np.full(40, -float(num_steps)))
        assert self.session.status().num_accepted == num_steps


def test_newest_variables_that_were_overwritten_while_they_were_read_are_read_again() -> None:
    faulty = FaultyCluster(policy=worker_client.async_policy())
    with faulty.session as session:
        num_before = len(faulty.shards[1].arguments_of("read"))
        faulty.shards[1].refuse("read", *(StepGone("the copy was overwritten while it was read") for _ in range(3)))
        assert session.step(ONES, timeout_s=20).outcome is PushOutcome.ACCEPTED
        for value in session.read().values():
            np.testing.assert_array_equal(value, np.full(40, -1.0))
        assert len(faulty.shards[1].arguments_of("read")) >= num_before + 4


def test_push_whose_answer_is_lost_is_sent_again_and_counts_once() -> None:
    faulty = FaultyCluster()
    faulty.shards[1].lose_answers("push_gradients", count=2)
    with faulty.session as session:
        assert session.step(ONES, timeout_s=20).outcome is PushOutcome.ACCEPTED
        first, *again = faulty.shards[1].arguments_of("push_gradients")
        # By the same header a shard goes on where a contribution broke off.
        assert again[0] is first and again[1] is first
        faulty.assert_applied(num_steps=1)


@pytest.mark.parametrize("method", ["push_gradients", "read"])
def test_a_server_that_is_about_to_end_is_asked_again_until_its_successor_answers(method: str) -> None:
    faulty = FaultyCluster(policy=worker_client.async_policy())
    with faulty.session as session:
        faulty.shards[1].refuse(method, *(ShuttingDown("ps 1 is shutting down: SIGTERM") for _ in range(2)))
        assert session.step(ONES, timeout_s=20).outcome is PushOutcome.ACCEPTED
        faulty.assert_applied(num_steps=1)


def test_read_begins_again_on_all_shards_if_one_has_moved_on() -> None:
    faulty = FaultyCluster(replicas_to_aggregate=1, total_num_replicas=2)
    with worker_client.local(faulty.cluster) as other:
        other.create_or_join(VALUES, optimizer=worker_client.sgd(1.0))
        other.step(ONES, timeout_s=20)
        faulty.shards[1].refuse("read", StepGone("step 0 is gone"))
        with faulty.session as session:
            variables = session.read()
            assert session.local_step == 1
            np.testing.assert_array_equal(variables["a"], variables["b"])
            np.testing.assert_array_equal(variables["a"], np.full(40, -1.0))
            assert len(faulty.shards[0].arguments_of("read")) == 2


def test_worker_that_pushes_faster_than_is_applied_is_held_up_and_not_refused() -> None:
    faulty = FaultyCluster(policy=worker_client.async_policy())
    with faulty.session as session:
        faulty.shards[1].refuse("push_gradients", *[TooManyPushes("worker 0: 4 pushes in flight, limit 4")] * 2)
        assert session.push(ONES).outcome is PushOutcome.ACCEPTED
        # The same contribution each time, as on the shard that took it at once; and a token asked for in between.
        for shard in faulty.shards:
            assert {header.push_id.sequence for header in shard.arguments_of("push_gradients")} == {1}
        assert len(faulty.chief.arguments_of("DequeueTokenRequest")) == 2
        faulty.assert_applied(num_steps=1)
    strict = FaultyCluster()
    with strict.session as session:
        strict.shards[1].refuse("push_gradients", TooManyPushes("worker 0: 4 pushes in flight, limit 4"))
        with pytest.raises(TooManyPushes):
            session.push(ONES)


def test_exit_takes_two_seconds_at_most_if_the_chief_hangs() -> None:
    faulty = FaultyCluster()
    released = threading.Event()
    faulty.chief.answer("DeregisterRequest", lambda _: released.wait(30))
    start_s = time.monotonic()
    faulty.session.close()
    assert time.monotonic() - start_s < 4.0  # 2 s promised; the machine may be busy
    released.set()


def test_an_interrupt_while_waiting_is_raised_and_reported_to_the_chief() -> None:
    faulty = FaultyCluster(total_num_replicas=2)

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    faulty.chief.answer("DequeueTokenRequest", interrupt)
    with pytest.raises(KeyboardInterrupt), faulty.session as session:
        session.step(ONES, timeout_s=0.1)
    with worker_client.observe_local(faulty.cluster) as observer:
        (left,) = [participant for participant in observer.status().participants if participant.kind is ParticipantKind.WORKER]
        assert (left.state, left.failure) == ("left", "KeyboardInterrupt: interrupted while it waited for the cluster")
        assert observer.status().state is ClusterState.TRAINING


def test_fan_out_runs_all_calls_at_once_and_returns_in_order() -> None:
    fan_out = FanOut(3, name="test", is_parallel=True)
    barrier = threading.Barrier(3, timeout=10)

    def meeting(number: int) -> Callable[[], int]:
        return lambda: barrier.wait() * 0 + number

    assert fan_out.run([meeting(number) for number in range(3)]) == [0, 1, 2]
    fan_out.close()


def test_fan_out_raises_the_first_error_in_order_after_all_have_ended() -> None:
    fan_out = FanOut(3, name="test", is_parallel=True)
    ended: list[int] = []

    def failing(number: int) -> Callable[[], None]:
        def fail() -> None:
            threading.Event().wait(0.05 * number)
            ended.append(number)
            raise ValueError(number)

        return fail

    for first in (0, 1):
        ended.clear()
        with pytest.raises(ValueError, match=str(first)):
            fan_out.run([failing(0) if first == 0 else lambda: None, failing(1), failing(2)])
        assert sorted(ended) == list(range(first, 3))
    assert fan_out.run([lambda: 1] * 3) == [1, 1, 1]
    fan_out.close()


class FakeChief:
    """Answers heartbeats from a list of answers, and then always the last."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.num_beats = 0

    def call(self, request: HeartbeatRequest, *, timeout_s: float | None = None) -> bool:
        self.num_beats += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def beating(chief: Any, kind: ParticipantKind = ParticipantKind.WORKER) -> Heartbeat:
    participant = Participant(era=era(1), kind=kind, index=3, incarnation=1)
    heartbeat = Heartbeat(lambda: chief.call(HeartbeatRequest(participant=participant)), name=participant.name, interval_s=0.01)
    heartbeat.start()
    return heartbeat


def test_heartbeats_survive_an_absent_chief_and_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    chief = FakeChief(*[Unavailable("nobody there")] * 3, False)
    heartbeat = beating(chief, ParticipantKind.OBSERVER)
    wait_until(lambda: chief.num_beats >= 5, what="the heartbeat continues after the chief has come back")
    heartbeat.stop()
    beats = chief.num_beats
    (warning,) = [record.getMessage() for record in caplog.records if "nobody there" in record.getMessage()]
    assert warning.startswith("observer 3: heartbeat failed")
    threading.Event().wait(0.05)
    assert chief.num_beats == beats


def test_heartbeat_ends_with_its_lease(caplog: pytest.LogCaptureFixture) -> None:
    chief = FakeChief(LeaseExpired("worker 3: lease ended 31 s ago"))
    heartbeat = beating(chief)
    wait_until(lambda: any("lease ended" in record.getMessage() for record in caplog.records))
    heartbeat.stop()
    assert chief.num_beats == 1


def test_saying_how_gradients_travel_opens_no_connection() -> None:
    cluster = InProcessCluster(num_ps=2)

    def refuse(index: int) -> Any:
        raise AssertionError(f"ps {index} is connected to")

    link = ChiefLink(cluster.chief, LocalTransport(refuse, timeout_s=5.0, is_in_process=False))
    with Session(link, link.register(kind=ParticipantKind.WORKER, index=None, takeover=False)) as session:
        assert session.transport == ()
