"""A participant's place that two threads hold: news that one thread has already learned is no error for the other."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from ps_protocol.errors import LeaseExpired, Superseded
from ps_protocol.roles.chief import End, HeartbeatRequest, Participant, ParticipantKind, RegisterRequest, Registration
from tests.support.chief.eras import era
from worker_client.cluster.chief import ChiefLink
from worker_client.cluster.transport import LocalTransport
from worker_client.core.sides import run
from worker_client.session.membership import Membership

FIRST = Registration(
    participant=Participant(kind=ParticipantKind.WORKER, index=0, incarnation=1, era=era(1)),
    lease_s=30.0,
    global_step=0,
    shard_addresses=(),
    may_contribute=True,
)


class StrictChief:
    """Knows the newest incarnation of one worker only."""

    def __init__(self) -> None:
        self.incarnation = 1
        self.has_ended = False

    def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        match request:
            case RegisterRequest():
                self.incarnation, self.has_ended = self.incarnation + 1, False
                return replace(FIRST, participant=replace(FIRST.participant, incarnation=self.incarnation))
            case HeartbeatRequest():
                incarnation = request.participant.incarnation
                if incarnation < self.incarnation:
                    raise Superseded(f"worker 0 (incarnation {incarnation}) was replaced. End this process")
                if self.has_ended:
                    raise LeaseExpired("worker 0: its lease has ended. Register again")
                return End.NOT_YET
        return None

    def close(self) -> None:
        """There is nothing to close."""


@pytest.fixture
def chief() -> StrictChief:
    return StrictChief()


@pytest.fixture
def member(chief: StrictChief) -> Iterator[Membership]:
    seam: Any = chief
    link = ChiefLink(seam, LocalTransport(lambda index: seam, timeout_s=5.0, is_in_process=False))
    member = Membership(link, FIRST, what="the session of worker 0", renewal="connect()")
    yield member
    member.leave("")


def ask(member: Membership, participant: Participant) -> End:
    request = HeartbeatRequest(participant=participant)
    return run(member.place.ask(participant, lambda: member.ask(request, what="the epoch")))


def test_worker_that_its_own_heartbeat_has_brought_back_is_not_superseded(chief: StrictChief, member: Membership) -> None:
    asleep = member.participant
    chief.has_ended = True
    member._beat()
    assert member.participant.incarnation == 2
    with pytest.raises(LeaseExpired, match="it has registered again since"):
        ask(member, asleep)
    assert ask(member, member.participant) is End.NOT_YET


def test_the_heartbeat_continues_for_a_worker_that_rejoined_by_itself(chief: StrictChief, member: Membership) -> None:
    chief.has_ended = True
    with pytest.raises(LeaseExpired):
        ask(member, member.participant)

    answer = chief.call

    def is_late(request: object, **_: object) -> Any:
        if isinstance(request, HeartbeatRequest):
            # The beat was under way in the name of the former incarnation.
            raise Superseded("worker 0 (incarnation 1) was replaced by incarnation 2. End this process")
        return answer(request)

    with patch.object(chief, "call", is_late), pytest.raises(Superseded):
        member._beat()  # nobody here has registered since
    member._beat()


def test_worker_that_another_process_has_replaced_is_superseded(chief: StrictChief, member: Membership) -> None:
    chief.incarnation = 2
    with pytest.raises(Superseded, match="was replaced"):
        ask(member, member.participant)
    with pytest.raises(Superseded, match="was replaced"):
        member._beat()
