"""Exchanges of reductions, without a session: messages are lost, late and repeated, and programs are started again."""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_protocol.errors import DeadlineExceeded, InvalidSpec, LimitExceeded, MalformedMessage, ShapeMismatch, Unavailable
from worker_client.strategy.exchange import FIRST, NO_STEP, Action, Contributing, Gathering, Place, Send, Settled, exchange_number
from worker_client.strategy.group import Combination
from worker_client.strategy.links import new_sender
from worker_client.strategy.messages import Message
from worker_client.strategy.reduction import ReduceOp

NUM_WORKERS, NUM_STEPS, NUM_REDUCTIONS = 3, 3, 2


def _place(step: int = 0, *, call: int = 1, reduction: int = 0, part: int = 1) -> Place:
    return Place(step=step, call=call, reduction=reduction, part=part)


def _sum(replica: int, value: Any) -> list[Combination]:
    return [Combination(op=ReduceOp.SUM, contributions={replica: np.asarray(value)})]


def _gathering(num_workers: int = 2, *, is_restarted: bool = True) -> Gathering:
    return Gathering(new_sender(), num_workers=num_workers, per_worker=1, is_restarted=is_restarted)


def _contributing(*, is_restarted: bool = True) -> Contributing:
    return Contributing(new_sender(), is_restarted=is_restarted)


def _message(actions: Sequence[Action], worker: int = FIRST) -> Message:
    (message,) = [one.message for one in actions if isinstance(one, Send) and one.worker == worker]
    return message


class _Link:
    """One direction between two workers: a message that is not settled goes again, in place of what lies there."""

    def __init__(self) -> None:
        self.latest: Message | None = None
        self.lies: Message | None = None


class _Network:
    """The links of all pairs; what a program has sent last is forgotten with it, what lies there is not."""

    def __init__(self) -> None:
        self.links = {(one, other): _Link() for one in range(NUM_WORKERS) for other in range(NUM_WORKERS) if FIRST in (one, other)}

    def carry_out(self, worker: int, actions: Sequence[Action]) -> None:
        for action in actions:
            link = self.links[worker, action.worker]
            if isinstance(action, Settled):
                link.latest = None
            else:
                link.latest = link.lies = action.message

    def send_again(self, worker: int) -> None:
        for (sender, _), link in self.links.items():
            if sender == worker and link.latest is not None:
                link.lies = link.latest

    def forget(self, worker: int) -> None:
        for (sender, _), link in self.links.items():
            if sender == worker:
                link.latest = None

    def take(self, worker: int, sender: int) -> Message | None:
        link = self.links[sender, worker]
        message, link.lies = link.lies, None
        return message


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


def _program(worker: int, network: _Network, cluster: _Cluster, *, is_async: bool, is_restarted: bool) -> Generator[None, None, None]:
    """Makes the cluster's steps, each of some reductions and a write, from where it is; yields wherever it waits."""
    is_first = worker == FIRST
    side = _gathering(NUM_WORKERS, is_restarted=is_restarted) if is_first else _contributing(is_restarted=is_restarted)
    others = range(1, NUM_WORKERS) if worker == FIRST else [FIRST]
    exchange = 0

    def listen() -> None:
        for other in others:
            if (message := network.take(worker, other)) is not None:
                network.carry_out(worker, side.receive(other, message))

    while (step := cluster.step) < NUM_STEPS:
        written = 0.0
        for reduction in range(NUM_REDUCTIONS):
            exchange += 1
            place = _place(NO_STEP if is_async else step, reduction=reduction)
            value = _sum(worker, float(10**worker * (1 + step * NUM_REDUCTIONS + reduction)))
            if isinstance(side, Gathering):
                network.carry_out(worker, side.begin("sum", place, value, exchange=exchange, timeout_s=60.0))
                while (missing := side.waits_for) is not None:
                    yield
                    listen()
                    if side.waits_for == missing:
                        network.carry_out(worker, side.ask(missing))
            else:
                network.carry_out(worker, side.begin(place, value, exchange=exchange))
                while not side.is_over:
                    yield
                    listen()
            (result,) = side.results()
            written += float(result)
            cluster.seen.setdefault((step, reduction), set()).add(float(result))
            yield
        cluster.contribute(worker, step, written)
        while cluster.step == step:
            yield
            listen()


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from(["run", "run", "run", "end", "lose", "again"]), st.integers(0, 2)), max_size=120))
def test_all_programs_get_the_sums_and_each_write_is_made_once_whatever_is_lost_or_restarted(
    is_async: bool, events: list[tuple[str, int]]
) -> None:
    network, cluster = _Network(), _Cluster()
    programs = [_program(worker, network, cluster, is_async=is_async, is_restarted=False) for worker in range(NUM_WORKERS)]

    def run(worker: int) -> None:
        next(programs[worker], None)

    for event, worker in events:
        match event:
            case "run":
                run(worker)
            case "end" if not is_async:  # where a program that is started again begins is known by the step
                programs[worker].close()
                network.forget(worker)
                programs[worker] = _program(worker, network, cluster, is_async=is_async, is_restarted=True)
            case "lose":
                for (sender, _), link in network.links.items():
                    link.lies = link.lies if sender != worker else None
            case "again":
                network.send_again(worker)
    # Nothing more is lost: then all comes to its end.
    for _ in range(400):
        for worker in range(NUM_WORKERS):
            run(worker)
            network.send_again(worker)
    sums = {(step, reduction): 111.0 * (1 + step * NUM_REDUCTIONS + reduction) for step in range(NUM_STEPS) for reduction in range(2)}
    assert cluster.step == NUM_STEPS
    assert cluster.seen == {key: {value} for key, value in sums.items()}
    assert cluster.written == [sums[step, 0] + sums[step, 1] for step in range(NUM_STEPS)]


def test_a_restarted_gatherer_asks_for_missing_contributions_and_joins_the_current_exchange() -> None:
    first, other = _gathering(), _contributing()
    for reduction in range(2):
        first.begin("sum", _place(reduction=reduction), _sum(0, 1.0), exchange=reduction + 1, timeout_s=60.0)
        answer = _message(first.receive(1, _message(other.begin(_place(reduction=reduction), _sum(1, 2.0), exchange=reduction + 1))), 1)
        assert other.receive(0, answer) == [Settled(0)]
    contribution = _message(other.begin(_place(reduction=2), _sum(1, 2.0), exchange=3))
    again = _gathering()
    assert again.begin("sum", _place(), _sum(0, 1.0), exchange=1, timeout_s=60.0) == []
    # It sees that the other is ahead; what the other has is asked for, the second time at once.
    actions = again.receive(1, contribution)
    for reduction in range(2):
        assert again.receive(1, _message(other.receive(0, _message(actions, 1)))) == []
        assert [float(one) for one in again.results()] == [3.0]
        actions = again.begin("sum", _place(reduction=reduction + 1), _sum(0, 1.0), exchange=reduction + 2, timeout_s=60.0)
    assert again.waits_for is None
    assert other.receive(0, _message(actions, 1)) == [Settled(0)]
    assert again.results() == other.results() == [3.0]


def test_results_for_a_question_that_is_over_are_not_taken() -> None:
    first, other = _gathering(), _contributing()
    first.begin("sum", _place(), _sum(0, 1.0), exchange=1, timeout_s=60.0)
    other.receive(0, _message(first.receive(1, _message(other.begin(_place(), _sum(1, 2.0), exchange=1))), 1))
    again = _gathering()
    again.begin("sum", _place(), _sum(0, 1.0), exchange=1, timeout_s=60.0)
    kept = _message(other.receive(0, _message(again.ask(1), 1)))
    assert again.ask(1) == []  # once
    again.miss(1)
    with pytest.raises(DeadlineExceeded, match=r"sum: missing after 60 s: replica 1 of worker 1; is its process there"):
        again.results()
    again.begin("sum", _place(), _sum(0, 5.0), exchange=2, timeout_s=60.0)
    assert again.receive(1, kept) == [] and again.waits_for == 1
    # Nor what was reduced before this worker has begun the same anew.
    contribution = _message(other.begin(_place(), _sum(1, 7.0), exchange=2))
    assert other.receive(0, _message(again.ask(1), 1)) == []
    again.receive(1, contribution)
    assert again.results() == [12.0]


def test_programs_at_different_places_are_refused_and_can_repeat_the_call() -> None:
    first, other = _gathering(), _contributing()
    first.begin("sum", _place(), _sum(0, 1.0), exchange=1, timeout_s=60.0)
    ahead = _message(other.begin(_place(reduction=1), _sum(1, 2.0), exchange=1))
    unknown = _message(other.receive(0, _message(first.receive(1, ahead), 1)))
    answer = _message(first.receive(1, unknown), 1)
    other.receive(0, answer)
    words = "worker 1 is at call 1 of the step, reduction 2, part 1, worker 0 at call 1 of the step, reduction 1, part 1; all workers must"
    for side in (first, other):
        with pytest.raises(ValueError, match=words):
            side.results()
    first.begin("sum", _place(), _sum(0, 1.0), exchange=2, timeout_s=60.0)
    first.receive(1, _message(other.begin(_place(), _sum(1, 2.0), exchange=2)))
    assert first.results() == [3.0]


def test_an_exchange_that_one_side_gave_up_fails_on_the_other_and_the_next_ones_are_paired() -> None:
    first, other = _gathering(), _contributing()

    def exchanged(number: int) -> None:
        first.begin("sum", _place(), _sum(0, number), exchange=number, timeout_s=60.0)
        answer = first.receive(1, _message(other.begin(_place(), _sum(1, 10 * number), exchange=number)))
        other.receive(0, _message(answer, 1))
        assert first.results() == other.results() == [11 * number]

    exchanged(1)
    late = _message(other.begin(_place(), _sum(1, 20), exchange=2))
    other.give_up(DeadlineExceeded("no answer"))
    first.begin("sum", _place(), _sum(0, 2), exchange=2, timeout_s=60.0)
    other_next = _message(other.begin(_place(), _sum(1, 30), exchange=3))
    first.receive(1, other_next)
    with pytest.raises(DeadlineExceeded, match="worker 1 has given up this exchange, and waits for a later one"):
        first.results()
    answer = first.begin("sum", _place(), _sum(0, 3), exchange=3, timeout_s=60.0)
    # The copy of what was given up is answered as that, and the answer is not taken for the one that is waited for.
    assert other.receive(0, _message(first.receive(1, late), 1)) == []
    other.receive(0, _message(answer, 1))
    assert first.results() == other.results() == [33]
    exchanged(4)


def test_a_first_exchange_that_has_failed_in_one_program_alone_is_never_paired_with_the_second() -> None:
    first, other = _gathering(is_restarted=False), _contributing(is_restarted=False)
    first.begin("sum", _place(), _sum(0, 1.0), exchange=exchange_number(1, 1), timeout_s=60.0)
    first.receive(1, _message(other.begin(_place(), _sum(1, 20.0), exchange=exchange_number(2, 1))))
    with pytest.raises(DeadlineExceeded, match="worker 1 has given up this exchange"):
        first.results()
    answer = first.begin("sum", _place(), _sum(0, 2.0), exchange=exchange_number(2, 1), timeout_s=60.0)
    other.receive(0, _message(answer, 1))
    assert first.results() == other.results() == [22.0]


def test_a_program_that_is_started_again_after_a_call_without_a_step_has_part_in_the_next_and_gets_nothing_of_the_former() -> None:
    first, other, again = _gathering(), _contributing(), _contributing()

    def exchanged(side: Contributing, value: float, *, number: int, own: int) -> None:
        early = first.receive(1, _message(side.begin(_place(NO_STEP), _sum(1, value), exchange=own)))
        assert early == []
        actions = first.begin("sum", _place(NO_STEP), _sum(0, 1.0), exchange=number, timeout_s=60.0)
        side.receive(0, _message(actions, 1))
        assert first.results() == side.results() == [1.0 + value]
        first.end_call()
        side.end_call()

    exchanged(other, 10.0, number=1, own=1)
    exchanged(again, 20.0, number=2, own=1)


def test_the_count_of_exchanges_restarts_in_each_call_after_a_program_has_joined_in_the_middle_of_one() -> None:
    first, other = _gathering(), _contributing()
    for own, theirs in [((7, 3), (1, 1)), ((7, 4), (1, 2)), ((8, 1), (2, 1)), ((8, 2), (2, 2)), ((10, 1), (4, 1))]:
        first.begin("sum", _place(), _sum(0, 1.0), exchange=exchange_number(*own), timeout_s=60.0)
        first.receive(1, _message(other.begin(_place(), _sum(1, 2.0), exchange=exchange_number(*theirs))))
        assert first.results() == [3.0]


def test_a_worker_whose_variables_are_older_has_no_part_in_a_reduction() -> None:
    first, other = _gathering(), _contributing()
    first.begin("sum", _place(3), _sum(0, 1.0), exchange=1, timeout_s=60.0)
    other.receive(0, _message(first.receive(1, _message(other.begin(_place(2), _sum(1, 1.0), exchange=1))), 1))
    with pytest.raises(Unavailable, match="worker 1 is at step 2, worker 0 at 3: they would reduce values of different steps"):
        other.results()
    assert first.waits_for == 1
    # The older one may be worker 0: the other says again what it has said, to the program that comes after that.
    ahead = _message(other.begin(_place(4), _sum(1, 1.0), exchange=2))
    assert first.receive(1, ahead) == []
    with pytest.raises(Unavailable, match="worker 0 is at step 3, worker 1 at 4"):
        first.results()


def test_a_value_that_cannot_be_sent_or_combined_fails_in_all_programs() -> None:
    first, other = _gathering(), _contributing()

    def fails(actions: Sequence[Action], expected: type[Exception], words: str) -> None:
        other.receive(0, _message(actions, 1))
        for side in (first, other):
            with pytest.raises(expected, match=words):
                side.results()

    first.begin("sum", _place(), _sum(0, np.zeros(2)), exchange=1, timeout_s=60.0)
    fails(first.receive(1, _message(other.begin(_place(), _sum(1, np.zeros(3)), exchange=1))), ShapeMismatch, "replica 1 contributes")
    first.begin("sum", _place(), _sum(0, np.int16(1)), exchange=2, timeout_s=60.0)
    fails(first.receive(1, _message(other.begin(_place(), _sum(1, 1.0), exchange=2))), InvalidSpec, "int16 cannot travel")
    first.begin("sum", _place(), _sum(0, 1.0), exchange=3, timeout_s=60.0)
    fails(first.receive(1, _message(other.begin(_place(), _sum(1, np.int16(1)), exchange=3))), InvalidSpec, "int16 cannot travel")
    first.begin("sum", _place(), _sum(0, 1.0), exchange=4, timeout_s=60.0)
    other.begin(_place(), _sum(1, 1.0), exchange=4)
    fails(first.receive(1, _message(other.refuse(LimitExceeded("too large"), exchange=4))), LimitExceeded, "too large")
    first.begin("sum", _place(), _sum(0, 1.0), exchange=5, timeout_s=60.0)
    first.receive(1, _message(other.begin(_place(), _sum(1, 1.0), exchange=5)))
    fails(first.fail(LimitExceeded("the results are too large")), LimitExceeded, "the results are too large")
    two = _message(_contributing().begin(_place(), [*_sum(1, 1.0), *_sum(1, 1.0)], exchange=6))
    first.begin("sum", _place(), _sum(0, 1.0), exchange=6, timeout_s=60.0)
    first.receive(1, two)
    with pytest.raises(ValueError, match="worker 1 reduces SUM, SUM where worker 0 reduces SUM"):
        first.results()


def test_workers_with_different_numbers_of_replicas_are_refused() -> None:
    first, other = _gathering(), _contributing()
    first.begin("sum", _place(), _sum(0, 1.0), exchange=1, timeout_s=60.0)
    combination = Combination(op=ReduceOp.SUM, contributions={1: np.zeros(1), 2: np.zeros(1)})
    first.receive(1, _message(other.begin(_place(), [combination], exchange=1)))
    with pytest.raises(ValueError, match="worker 1 has other replicas than 1, as worker 0 has"):
        first.results()


def test_results_of_a_steps_earlier_calls_are_kept_up_to_64_mib() -> None:
    for nbytes, is_kept in ((1 << 20, True), (65 << 20, False)):
        first = _gathering(1)
        value = np.zeros(nbytes, np.uint8)
        first.begin("sum", _place(call=1), _sum(0, value), exchange=1, timeout_s=60.0)
        first.begin("sum", _place(call=3), _sum(0, value[:1]), exchange=2, timeout_s=60.0)
        asks = _contributing().begin(_place(call=1), _sum(1, value), exchange=1)
        answer = _message(first.receive(1, _message(asks)), 1)
        assert (len(answer.values[1].tobytes()) == nbytes) is is_kept


def test_a_message_that_cannot_be_read_is_an_error_and_changes_nothing() -> None:
    first, other = _gathering(), _contributing()
    first.begin("sum", _place(), _sum(0, 1.0), exchange=1, timeout_s=60.0)
    contribution = _message(other.begin(_place(), _sum(1, 1.0), exchange=1))
    for values in ([], [np.zeros(3)], [np.full(9, np.nan)], [None]):
        for receive in (first.receive, other.receive):
            with pytest.raises(MalformedMessage, match="cannot be read"):
                receive(1, new_sender().message(values))
    head = contribution.values[0]
    for body in ([], [np.zeros(4)], [np.array([[7, 0]])], [np.array([[np.nan, 0]])], [None]):
        with pytest.raises(MalformedMessage, match="cannot be read: what it contributes"):
            first.receive(1, new_sender().message([head, *body]))
    first.receive(1, contribution)
    assert first.results() == [2.0]


def test_an_error_that_cannot_be_read_is_ignored_and_the_answer_is_still_taken() -> None:
    first, other = _gathering(), _contributing()
    first.begin("sum", _place(), _sum(0, np.zeros(2)), exchange=1, timeout_s=60.0)
    refused = _message(first.receive(1, _message(other.begin(_place(), _sum(1, np.zeros(3)), exchange=1))), 1)
    for body in ([], [np.int64(99), np.zeros(1)], [np.int64(0), np.array([255])], [np.int64(0), None]):
        with pytest.raises(MalformedMessage, match="or its error"):
            other.receive(0, new_sender().message([refused.values[0], *body]))
    other.receive(0, refused)
    with pytest.raises(ShapeMismatch):
        other.results()
