"""Messages between two participants: what is sent again, late or in place of another never costs a message."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import worker_client
from lockstep.in_process import InProcessCluster
from ps_protocol.errors import Unavailable
from ps_protocol.model.variables import Array
from ps_protocol.roles.accumulators import AccumulatorSpec
from ps_server.accumulators.registry import AccumulatorRegistry
from worker_client.accumulators import ConditionalAccumulator
from worker_client.strategy.links import Link, new_sender
from worker_client.strategy.mailboxes import Mailboxes
from worker_client.strategy.messages import HEAD, Message

SENDER = new_sender()


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    """Both ends of a link between two workers of a cluster."""
    cluster = InProcessCluster(num_ps=1, total_num_replicas=2)
    with worker_client.local(cluster, worker_index=0) as one, worker_client.local(cluster, worker_index=1) as other:
        there, back = "one to other", "other to one"
        yield Link(Mailboxes(one), outgoing=there, incoming=back), Link(Mailboxes(other), outgoing=back, incoming=there)


def _message(value: float) -> Message:
    return SENDER.message([np.full(2, value)])


def _value(message: Message | None) -> float | None:
    return None if message is None else float(message.values[0][0])


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """The messages that are sent from now on; each is sent again as soon as that may be."""
    send, found = Mailboxes.send, list[float | None]()

    def spied(mailboxes: Mailboxes, name: str, message: Message, **how: Any) -> None:
        found.append(_value(message))
        send(mailboxes, name, message, **how)

    monkeypatch.setattr(Mailboxes, "send", spied)
    monkeypatch.setattr("worker_client.strategy.links.AGAIN_S", 0.0)
    monkeypatch.setattr("worker_client.strategy.links._PATIENCE", 0)
    return found


def test_a_message_is_not_sent_again_where_its_answer_has_come(ends: tuple[Link, Link], sent: list[float | None]) -> None:
    one, other = ends
    one.send(_message(1.0))
    assert _value(other.receive(0.0)) == 1.0
    other.send(_message(2.0))
    assert (_value(one.receive(0.0)), sent) == (2.0, [1.0, 2.0])
    assert (one.receive(0.0), sent) == (None, [1.0, 2.0, 1.0])  # it has not been settled


@pytest.mark.parametrize("is_settled", [True, False])
def test_the_next_message_comes_whole_where_the_other_is_still_reading_a_copy_of_the_one_before(
    ends: tuple[Link, Link], sent: list[float | None], is_settled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ends
    one.send(_message(1.0))
    assert _value(other.receive(0.0)) == 1.0
    assert one.receive(0.0) is None  # sends it again
    take = ConditionalAccumulator.take_grad

    def interrupted(accumulator: ConditionalAccumulator, *args: Any, **kwargs: Any) -> Array:
        taken = take(accumulator, *args, **kwargs)
        if accumulator.name.endswith(HEAD):
            monkeypatch.setattr(ConditionalAccumulator, "take_grad", take)
            if is_settled:
                one.settle()
            one.send(_message(2.0))
        return taken

    monkeypatch.setattr(ConditionalAccumulator, "take_grad", interrupted)
    found = [_value(other.receive(0.0)) for _ in range(2)]
    assert sent == [1.0, 1.0, 2.0]
    assert found[-1] == 2.0


def test_a_message_that_could_not_be_sent_is_sent_before_the_program_continues(
    ends: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ends
    send, failures = Mailboxes.send, [Unavailable("ps 0: cannot be reached")] * 2

    def failing(mailboxes: Mailboxes, name: str, message: Message, **how: Any) -> None:
        if failures:
            raise failures.pop()
        send(mailboxes, name, message, **how)

    monkeypatch.setattr(Mailboxes, "send", failing)
    monkeypatch.setattr("worker_client.strategy.links._PAUSE_S", 0.0)
    one.send(_message(1.0))
    one.deliver(30.0)
    assert (_value(other.receive(0.0)), failures) == (1.0, [])
    one.deliver(30.0)
    assert other.receive(0.0) is None  # once is enough


def test_a_link_asks_its_server_for_the_accumulator_of_heads_once(ends: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ends
    made = list[str]()

    def created(registry: AccumulatorRegistry, spec: AccumulatorSpec) -> bool:
        made.append(spec.name)
        return create(registry, spec)

    create = AccumulatorRegistry.create
    one.send(_message(0.0))  # also removes what an earlier program may have left
    assert _value(other.receive(0.0)) == 0.0
    one.settle()
    monkeypatch.setattr(AccumulatorRegistry, "create", created)
    for value in (1.0, 2.0, 3.0):
        one.send(_message(value))
        assert _value(other.receive(0.0)) == value
        one.settle()
    assert not [name for name in made if name.endswith(HEAD)]
