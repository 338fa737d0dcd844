from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from chief.core.cluster.members import Member, Members, MemberState
from chief.core.waiting import Timers
from chief.core.wording import seconds
from chief.options import CoordinationConfig
from ps_protocol.errors import (
    ClusterFull,
    EpochMismatch,
    LeaseExpired,
    Superseded,
    WorkerIndexOutOfRange,
    WorkerIndexTaken,
)
from ps_protocol.roles.chief import Participant, ParticipantKind, ParticipantStatus, RegisterRequest
from tests.support.chief.eras import era

WORKER = ParticipantKind.WORKER


def membership_of(
    total: int | None = None,
    lease_s: float = 10.0,
    *,
    timers: Timers | None = None,
    on_lapse: Callable[[Member, float], None] = lambda member, now: None,
) -> Members:
    cluster: Any = SimpleNamespace(
        settings=SimpleNamespace(config=CoordinationConfig(total_num_replicas=total, lease_s=lease_s)),
        timers=timers or Timers(),
        joining=SimpleNamespace(lapse=on_lapse),
    )
    members = Members(cluster, epoch=4, session_key=b"key")
    members.meet_predecessors()
    return members


def request(
    index: int | None = None, *, request_id: int = 1, takeover: bool = False, kind: ParticipantKind = WORKER, host: str = "host-b"
) -> RegisterRequest:
    return RegisterRequest(kind=kind, index=index, host=host, pid=912, request_id=request_id, takeover=takeover)


def join(members: Members, index: int | None = None, *, now: float = 0.0, request_id: int = 1, takeover: bool = False) -> Participant:
    return members.participant(members.admit(request(index, request_id=request_id, takeover=takeover), now=now)[0])


def test_the_lowest_free_index_is_given() -> None:
    members = membership_of()
    join(members, 1)
    assert [join(members).index, join(members).index] == [0, 2]


@pytest.mark.parametrize("lease_s", [0.9, 10.0, 60.0])
def test_a_worker_is_silent_when_it_has_missed_a_heartbeat_whatever_the_lease(lease_s: float) -> None:
    members = membership_of(lease_s=lease_s)
    join(members)

    def status(now: float, *waiting: int) -> ParticipantStatus:
        return members.statuses(now=now, waiting=frozenset(waiting), is_training=True)[0]

    assert not status(0.4 * lease_s).is_silent and status(0.6 * lease_s).is_silent
    assert status(0.6 * lease_s).doing == status(0.6 * lease_s, 0).doing == f"silent for {seconds(0.6 * lease_s)}"


def test_a_worker_is_said_to_be_at_work_only_if_it_was_heard_just_now() -> None:
    members = membership_of(lease_s=10.0)
    index = join(members).index
    member = members.find(ParticipantKind.WORKER, index)
    assert member is not None

    def doing(now: float, *waiting: int) -> str:
        return members.statuses(now=now, waiting=frozenset(waiting), is_training=True)[0].doing

    assert (doing(0.5), doing(0.5, 0)) == ("at work", "waits for the step")
    assert doing(3.4) == "heard 3.4 s ago", "it may have been killed"
    members.lapse(member, now=10.0)
    assert doing(58.0) == "lease ended 48.0 s ago"


def test_a_taken_index_is_refused_and_its_holder_is_named() -> None:
    members = membership_of()
    join(members, 3)
    with pytest.raises(WorkerIndexTaken, match=r"worker 3 is already running on host-b pid 912 \(seen 0\.4 s ago") as caught:
        join(members, 3, now=0.4)
    assert str(caught.value).endswith("lease ends in 9.6 s); use another index, or connect(takeover=True)")
    assert caught.value.facts == {"worker": "3", "host": "host-b", "pid": "912", "seen_ago_s": "0.400", "lease_left_s": "9.600"}


def test_a_takeover_makes_a_newer_incarnation_and_fences_the_older() -> None:
    members = membership_of()
    older = join(members, 3)
    newer = join(members, 3, now=1.0, request_id=2, takeover=True)
    assert newer.incarnation == older.incarnation + 1
    with pytest.raises(Superseded, match=r"worker 3 \(incarnation 1\) was replaced by incarnation 2 on host-b pid 912"):
        members.check(older, now=1.0)
    assert members.check(newer, now=1.0).is_live
    assert members.num_live_workers == 1


def test_an_index_is_free_once_its_lease_is_over_even_before_the_timer_has_fired() -> None:
    members = membership_of()
    join(members, 3)
    assert join(members, 3, now=10.0, request_id=2).incarnation == 2


def test_an_index_beyond_the_number_of_workers_is_refused() -> None:
    with pytest.raises(WorkerIndexOutOfRange, match=r"worker index 9: want 0\.\.3"):
        join(membership_of(4), 9)


def test_a_full_cluster_says_how_many_places_there_are() -> None:
    members = membership_of(4)
    for number in range(4):
        join(members, request_id=number)
    with pytest.raises(ClusterFull, match="4 of 4 worker places taken") as caught:
        join(members, now=3.0, request_id=9)
    assert caught.value.facts["lease_left_s"] == "7.000"
    assert caught.value.message.endswith("; for one more worker end the cluster and start it again with --workers 5")


def test_observers_have_indices_of_their_own() -> None:
    members = membership_of(1)
    join(members, 0)
    observer, _ = members.admit(request(kind=ParticipantKind.OBSERVER, request_id=2), now=0.0)
    assert (observer.name, members.num_live, members.num_live_workers) == ("observer 0", 2, 1)


def test_a_repeated_registration_is_recognised_while_it_lives() -> None:
    members = membership_of()
    member, _ = members.admit(request(request_id=77), now=0.0)
    assert members.repeated(request(request_id=77)) is member
    members.lapse(member, now=10.0)
    assert members.repeated(request(request_id=77)) is None


def test_a_lapsed_worker_is_told_how_long_ago_its_lease_ended() -> None:
    members = membership_of()
    participant = join(members, 7)
    members.lapse(members.check(participant, now=0.0), now=10.0)
    with pytest.raises(LeaseExpired, match=r"worker 7: lease ended 31\.0 s ago\. Register again"):
        members.check(participant, now=41.0)


def test_an_unknown_worker_and_an_unknown_incarnation_are_told_to_register() -> None:
    members = membership_of()
    join(members, 0)
    for index, incarnation in ((5, 1), (0, 2)):
        with pytest.raises(LeaseExpired, match=r"not registered here\. Register again"):
            members.check(Participant(era=era(4, life=0), kind=WORKER, index=index, incarnation=incarnation), now=0.0)


def test_another_epoch_is_fenced() -> None:
    members = membership_of()
    join(members, 0)
    with pytest.raises(EpochMismatch, match="cluster epoch is 4, you have 3"):
        members.check(Participant(era=era(3, life=0), kind=WORKER, index=0, incarnation=1), now=0.0)


def test_a_renewed_lease_ends_later() -> None:
    timers, ended = Timers(), []
    members = membership_of(lease_s=2.0, timers=timers, on_lapse=lambda member, now: ended.append((member.index, now)))
    member = members.check(join(members, 0), now=0.0)
    members.renew(member, now=0.0)
    members.renew(member, now=1.5)
    timers.fire(3.4)
    assert ended == []
    timers.fire(3.5)
    assert ended == [(0, 3.5)]


def test_text_of_callers_cannot_forge_lines() -> None:
    members = membership_of()
    member, _ = members.admit(request(host="h\x1b[31m\nERROR"), now=0.0)
    members.leave(member, failure="boom\n" + "x" * 5000, now=1.0)
    assert member.host.isprintable()
    assert member.failure.isprintable()
    assert len(member.failure) < 400


@pytest.mark.parametrize(
    ("killed_at", "expected"),
    [(1.0, True), (8.0, False)],
    ids=["the one that left in peace was seen last", "the one that was killed was seen last"],
)
def test_training_ends_as_planned_if_the_worker_seen_last_has_left(killed_at: float, expected: bool) -> None:
    members = membership_of()
    killed, leaver = members.check(join(members, 0), now=0.0), members.check(join(members, 1, request_id=2), now=0.0)
    members.renew(killed, now=killed_at)
    members.leave(leaver, failure="", now=5.0)
    assert not members.last_left_in_peace()
    members.lapse(killed, now=killed_at + 10.0)
    assert members.last_left_in_peace() is expected
    assert killed.state is MemberState.LAPSED
