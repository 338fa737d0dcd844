"""The long-lived stream of a worker to its chief, through a raw channel: one call after the other, and bad input harms no other stream."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from ps_protocol.roles.chief import DeregisterRequest, Participant, PushCommit
from ps_protocol.rpc.channel import DEFAULT_ACCESS
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_protocol.wire import codec
from ps_protocol.wire.fields import encode_duration
from tests.support.chief.running_chief import RunningChief, Worker, client_of, cluster
from tests.support.network.talk import Talk
from tests.support.waiting import wait_until

CODE = grpc.StatusCode


@pytest.fixture
def chief() -> Iterator[RunningChief]:
    with cluster(total_num_replicas=2) as running:
        yield running


@pytest.fixture
def first(chief: RunningChief) -> Iterator[Worker]:
    with client_of(chief) as client, Worker(client, 0) as worker:
        worker.join_model()
        yield worker


@pytest.fixture
def channel(chief: RunningChief) -> Iterator[grpc.Channel]:
    with DEFAULT_ACCESS.open_channel(chief.address) as channel:
        yield channel


@pytest.fixture
def talk(channel: grpc.Channel) -> Iterator[Talk]:
    talk = Talk(channel)
    yield talk
    talk.close()


def of_stranger() -> pb.CommitPushRequest:
    """What is answered at once, with an error: the caller is of an epoch that is not."""
    stranger = pb.Participant(era=tensor_pb2.Era(epoch=9), kind=pb.PARTICIPANT_KIND_WORKER, incarnation=1)
    push_id = tensor_pb2.PushId(incarnation=1, sequence=1)
    return pb.CommitPushRequest(participant=stranger, commit=pb.PushCommit(push_id=push_id, staged=True))


def dequeue(participant: Participant, commit: PushCommit | None = None, *, request_id: int = 1, max_wait_s: float = 20.0) -> Any:
    return pb.DequeueTokenRequest(
        participant=codec.encode(participant),
        request_id=request_id,
        max_wait=encode_duration(max_wait_s),
        commit=None if commit is None else codec.encode(commit),
    )


def is_waiting(worker: Worker) -> bool:
    return next(one.is_waiting for one in worker.chief.status().participants if one.index == worker.participant.index)


def test_next_call_of_a_stream_is_taken_when_the_one_before_is_answered(
    first: Worker, talk: Talk, channel: grpc.Channel, chief: RunningChief
) -> None:
    talk.ask(7, token=dequeue(first.participant, first.push()))
    talk.ask(3, commit=of_stranger())
    wait_until(lambda: is_waiting(first))
    other = Talk(channel)
    other.ask(4, commit=of_stranger())
    assert other.answer().call == 4, "another stream waits for nothing"
    with client_of(chief) as client, Worker(client, 1) as second:
        second.join_model()
        caller, commit = codec.encode(second.participant), codec.encode(second.push())
        other.ask(5, commit=pb.CommitPushRequest(participant=caller, commit=commit))
        assert other.answer().commit.outcome == pb.PUSH_OUTCOME_ACCEPTED
    answer = talk.answer()
    assert (answer.call, answer.token.result, answer.token.step) == (7, pb.TOKEN_RESULT_TOKEN, 1)
    answer = talk.answer()
    assert (answer.call, answer.error.reason) == (3, "EPOCH_MISMATCH")
    other.close()


def test_error_is_the_answer_of_its_call_and_the_stream_continues(first: Worker, talk: Talk) -> None:
    talk.ask(1, commit=of_stranger())
    answer = talk.answer()
    assert (answer.call, answer.error.reason, answer.error.facts["epoch"]) == (1, "EPOCH_MISMATCH", "1")
    talk.ask(2, commit=pb.CommitPushRequest())
    assert talk.answer().error.reason == "MALFORMED_MESSAGE"
    talk.ask(3, token=dequeue(first.participant, max_wait_s=0.0))
    assert talk.answer().token.result == pb.TOKEN_RESULT_WAIT


def test_unknown_kind_of_call_is_refused_and_the_stream_continues(first: Worker, talk: Talk) -> None:
    talk.ask(5)
    answer = talk.answer()
    assert (answer.call, answer.error.reason) == (5, "MALFORMED_MESSAGE")
    talk.ask(5, commit=of_stranger())
    assert talk.answer().call == 5


def test_a_malformed_message_ends_its_stream_and_no_other(first: Worker, talk: Talk, channel: grpc.Channel) -> None:
    other = Talk(channel)
    other.ask(1, token=dequeue(first.participant, first.push()))
    wait_until(lambda: is_waiting(first))
    talk.send(b"\xff\xff")
    assert talk.end() == (CODE.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert is_waiting(first)
    other.call.cancel()


def test_stream_that_is_cut_ends_the_wait_on_it(first: Worker, talk: Talk) -> None:
    talk.ask(1, token=dequeue(first.participant, first.push()))
    wait_until(lambda: is_waiting(first))
    talk.call.cancel()
    wait_until(lambda: not is_waiting(first))


def test_caller_that_asks_no_more_is_still_answered(first: Worker, talk: Talk) -> None:
    talk.ask(1, token=dequeue(first.participant, first.push(), max_wait_s=0.2))
    talk.close()
    assert talk.answer().token.result == pb.TOKEN_RESULT_WAIT
    assert talk.call.code() is CODE.OK


def test_contribution_whose_answer_was_lost_is_counted_once(first: Worker, channel: grpc.Channel) -> None:
    commit = first.push()
    lost = Talk(channel)
    lost.ask(1, token=dequeue(first.participant, commit))
    wait_until(lambda: is_waiting(first))
    lost.call.cancel()
    again = Talk(channel)
    again.ask(1, token=dequeue(first.participant, commit, max_wait_s=0.0))
    answer = again.answer().token
    # What rides along is told with the token, which is when it is sure.
    assert (answer.result, answer.commit.outcome) == (pb.TOKEN_RESULT_WAIT, pb.PUSH_OUTCOME_UNSPECIFIED)
    assert first.chief.status().num_contributions == 1
    again.close()


def test_many_answers_that_nobody_takes_stop_the_reading_and_harm_nobody(first: Worker, talk: Talk, channel: grpc.Channel) -> None:
    for call in range(1, 3_001):
        talk.ask(call)
    other = Talk(channel)
    other.ask(1, commit=of_stranger())
    assert other.answer().call == 1
    assert [talk.answer().call for _ in range(3_000)] == [*range(1, 3_001)]
    other.close()


def test_ending_chief_ends_streams_at_once(chief: RunningChief, first: Worker, talk: Talk) -> None:
    talk.ask(1, commit=of_stranger())
    talk.answer()
    first.chief.call(DeregisterRequest(participant=first.participant))
    chief.request_stop()
    chief.request_stop()
    with pytest.raises((StopIteration, grpc.RpcError)):
        talk.answer()
    assert chief.ended() == 0
