"""GrpcChief against a tiny server: every call names its caller, has a deadline beyond its wait, and returns values."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from ps_protocol.errors import DeadlineExceeded, LeaseExpired, Unavailable
from ps_protocol.model.data import DataSpec
from ps_protocol.roles import chief
from ps_protocol.roles.chief import (
    ChangeSettingsRequest,
    CommitPushRequest,
    CompleteInitializationRequest,
    DequeueTokenRequest,
    DeregisterRequest,
    FinishTrainingRequest,
    GetModelRequest,
    HeartbeatRequest,
    LeaseRangesRequest,
    RegisterModelRequest,
    SaveCheckpointRequest,
)
from ps_protocol.rpc import chief as chief_client
from ps_protocol.rpc.chief import SERVICE, TIMEOUT_S, GrpcChief
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import encode_call_error
from ps_protocol.wire.fields import encode_duration
from tests.support.network.servers import serving_aio, unary
from tests.wire.codecs.examples import COMMIT, MODEL, PIECEWISE, PLACEMENT, POLICIES, RESULT, STATUS, WORKER

REGISTER = chief.RegisterRequest(kind=chief.ParticipantKind.WORKER, index=2, host="h", pid=1, request_id=9)
REGISTRATION = chief.Registration(participant=WORKER, lease_s=10.0, shard_addresses=("a:1",), global_step=4, may_contribute=True)
REPLY = chief.ModelReply(
    state=chief.ModelState.WAIT, placement=PLACEMENT, attempt=1, max_staged_per_worker=2, global_step=3, waiting_for="w"
)
AGREED = chief.AgreedModel(state=chief.ModelState.READY, model=MODEL, placement=PLACEMENT, global_step=3)
TOKEN = chief.TokenReply(result=chief.TokenResult.TOKEN, step=5, commit=RESULT)
CHANGE = chief.HyperparameterChange(variable="w", learning_rate=PIECEWISE, hyperparameters={"momentum": 0.5})

Call = Callable[[GrpcChief], object]
DATA = DataSpec(name="train", num_samples=100, range_size=32, num_epochs=2, shuffle_seed=0)
LEASE = chief.LeaseReply(result=chief.LeaseResult.GRANTED, ranges=(DATA.range(0), DATA.range(7)))

# Method, call, what the server receives, what it answers, what the caller gets, the wait that the call asks for.
CALLS: list[tuple[str, Call, Any, Any, object, float]] = [
    ("RegisterWorker", lambda c: c.call(REGISTER), codec.encode(REGISTER),
     codec.encode(REGISTRATION), REGISTRATION, 0.0),
    ("Heartbeat", lambda c: c.call(HeartbeatRequest(participant=WORKER)), pb.HeartbeatRequest(participant=codec.encode(WORKER)),
     pb.HeartbeatResponse(end=pb.END_INTERRUPTED), chief.End.INTERRUPTED, 0.0),
    ("DeregisterWorker", lambda c: c.call(DeregisterRequest(participant=WORKER, failure="x")),
     pb.DeregisterWorkerRequest(participant=codec.encode(WORKER), failure="x"), pb.DeregisterWorkerResponse(), None, 0.0),
    ("RegisterModel", lambda c: c.call(RegisterModelRequest(participant=WORKER, model=MODEL, max_wait_s=2.0)),
     pb.RegisterModelRequest(participant=codec.encode(WORKER), model=codec.encode(MODEL),
                             max_wait=encode_duration(2.0)), codec.encode(REPLY), REPLY, 2.0),
    ("RegisterModel", lambda c: c.call(RegisterModelRequest(participant=WORKER, model=MODEL, max_wait_s=2.0, joins_only=True)),
     pb.RegisterModelRequest(participant=codec.encode(WORKER), model=codec.encode(MODEL),
                             max_wait=encode_duration(2.0), joins_only=True),
     codec.encode(REPLY), REPLY, 2.0),
    ("CompleteInitialization", lambda c: c.call(CompleteInitializationRequest(participant=WORKER, attempt=3)),
     pb.CompleteInitializationRequest(participant=codec.encode(WORKER), attempt=3),
     pb.CompleteInitializationResponse(), None, 0.0),
    ("GetModel", lambda c: c.call(GetModelRequest(max_wait_s=1e9)), pb.GetModelRequest(max_wait=encode_duration(20.0)),
     codec.encode(AGREED), AGREED, 20.0),
    ("GetClusterStatus", lambda c: c.status(max_ledger_entries=3), pb.GetClusterStatusRequest(max_ledger_entries=3),
     codec.encode(STATUS), STATUS, 0.0),
    ("ChangeSettings", lambda c: c.call(ChangeSettingsRequest(policy=POLICIES[2], request_id=7, max_wait_s=2.0)),
     pb.ChangeSettingsRequest(policy=codec.encode(POLICIES[2]), request_id=7, max_wait=encode_duration(2.0)),
     pb.ChangeSettingsResponse(settings=pb.SettingsState(version=3, step=9)), chief.SettingsReply(version=3, step=9), 2.0),
    ("ChangeSettings", lambda c: c.call(ChangeSettingsRequest(hyperparameters=CHANGE, request_id=(1 << 64) - 1, max_wait_s=2.0)),
     pb.ChangeSettingsRequest(hyperparameters=codec.encode(CHANGE), request_id=(1 << 64) - 1, max_wait=encode_duration(2.0)),
     pb.ChangeSettingsResponse(), None, 2.0),
    ("SaveCheckpoint", lambda c: c.call(SaveCheckpointRequest(request_id=7, max_wait_s=2.0)),
     pb.SaveCheckpointRequest(request_id=7, max_wait=encode_duration(2.0)),
     pb.SaveCheckpointResponse(tag="step-000000009", step=9), chief.SavedCheckpoint(tag="step-000000009", step=9), 2.0),
    ("SaveCheckpoint", lambda c: c.call(SaveCheckpointRequest(request_id=7, max_wait_s=0.0)),
     pb.SaveCheckpointRequest(request_id=7, max_wait=encode_duration(0.0)), pb.SaveCheckpointResponse(waiting_for="ps 1"),
     chief.SavedCheckpoint(tag="", step=0, waiting_for="ps 1"), 0.0),
    ("LeaseRanges",
     lambda c: c.call(LeaseRangesRequest(participant=WORKER, data=DATA, max_ranges=2, request_id=5, max_wait_s=1.0, held=(3,))),
     pb.LeaseRangesRequest(participant=codec.encode(WORKER), data=codec.encode(DATA), max_ranges=2,
                           request_id=5, max_wait=encode_duration(1.0), held=[3]),
     codec.encode(LEASE), LEASE, 1.0),
    ("FinishTraining", lambda c: c.call(FinishTrainingRequest(reason="enough")), pb.FinishTrainingRequest(reason="enough"),
     pb.FinishTrainingResponse(global_step=12), 12, 0.0),
]  # fmt: skip


@dataclasses.dataclass
class Tape:
    """What the server shall answer, and what it was asked."""

    answer: bytes = b""
    request: bytes = b""
    remaining_s: float = 0.0


@pytest.fixture(scope="module")
def played() -> Iterator[tuple[GrpcChief, Tape]]:
    tape = Tape()

    async def serve(request: bytes, context: Any) -> bytes:
        tape.request, tape.remaining_s = request, context.time_remaining()
        return tape.answer

    with serving_aio(unary(SERVICE, **{row[0]: serve for row in CALLS})) as address, contextlib.closing(GrpcChief(address)) as client:
        yield client, tape


@pytest.mark.parametrize(("method", "call", "request_", "answer", "expected", "max_wait_s"), CALLS, ids=[row[0] for row in CALLS])
def test_call_travels_and_has_a_deadline_beyond_its_wait(
    played: tuple[GrpcChief, Tape], method: str, call: Call, request_: Any, answer: Any, expected: object, max_wait_s: float
) -> None:
    client, tape = played
    tape.answer = answer.SerializeToString()
    assert call(client) == expected
    assert type(request_).FromString(tape.request) == request_
    assert max_wait_s + TIMEOUT_S / 2 < tape.remaining_s <= max_wait_s + TIMEOUT_S + 1.0


def test_every_method_of_the_service_is_called_here() -> None:
    # Converse has its own claims below.
    assert {row[0] for row in CALLS} == {method.name for method in pb.DESCRIPTOR.services_by_name["ChiefService"].methods} - {"Converse"}


@contextlib.contextmanager
def conversing(serve: Callable[[Any], Any]) -> Iterator[GrpcChief]:
    """A client of a chief that serves each stream so."""

    async def converse(requests: object, context: Any) -> None:
        await serve(context)

    handler = grpc.method_handlers_generic_handler(SERVICE, {"Converse": grpc.stream_stream_rpc_method_handler(converse)})
    with serving_aio(handler) as address, contextlib.closing(GrpcChief(address)) as client:
        yield client


# Call, what the server receives, what it answers, what the caller gets.
TALKS: list[tuple[Call, Any, Any, object]] = [
    (lambda c: c.call(CommitPushRequest(participant=WORKER, commit=COMMIT)),
     pb.ConverseRequest(commit=pb.CommitPushRequest(participant=codec.encode(WORKER), commit=codec.encode(COMMIT))),
     pb.ConverseResponse(commit=codec.encode(RESULT)), RESULT),
    (lambda c: c.call(DequeueTokenRequest(participant=WORKER, local_step=4, request_id=7, max_wait_s=20.0, commit=COMMIT)),
     pb.ConverseRequest(token=pb.DequeueTokenRequest(participant=codec.encode(WORKER), local_step=4, request_id=7,
                                              commit=codec.encode(COMMIT))),
     pb.ConverseResponse(token=codec.encode(TOKEN)), TOKEN),
    (lambda c: c.call(DequeueTokenRequest(participant=WORKER, local_step=0, request_id=7, max_wait_s=0.5)),
     pb.ConverseRequest(token=pb.DequeueTokenRequest(participant=codec.encode(WORKER), request_id=7, max_wait=encode_duration(0.5))),
     pb.ConverseResponse(token=codec.encode(TOKEN)), TOKEN),
]  # fmt: skip


@pytest.mark.parametrize(("call", "request_", "answer", "expected"), TALKS, ids=["commit", "token and commit", "token"])
def test_call_of_every_step_travels_on_a_stream(call: Call, request_: Any, answer: Any, expected: object) -> None:
    received: list[pb.ConverseRequest] = []

    async def serve(context: Any) -> None:
        received.append(pb.ConverseRequest.FromString(await context.read()))
        answer.call = received[0].call
        await context.write(answer.SerializeToString())

    with conversing(serve) as client:
        assert call(client) == expected
    request_.call = received[0].call
    assert received == [request_]


def take(client: GrpcChief, *, max_wait_s: float = 0.0) -> chief.TokenReply:
    return client.call(DequeueTokenRequest(participant=WORKER, local_step=4, request_id=7, max_wait_s=max_wait_s))


def answer_to(data: bytes, number: int | None = None) -> bytes:
    call = pb.ConverseRequest.FromString(data).call if number is None else number
    return pb.ConverseResponse(call=call, token=codec.encode(TOKEN)).SerializeToString()


def test_calls_of_every_step_share_one_stream_and_answers_to_others_are_passed_over() -> None:
    streams = []

    async def serve(context: Any) -> None:
        streams.append(context)
        while (data := await context.read()) is not grpc.aio.EOF:
            await context.write(answer_to(data, number=0))
            await context.write(answer_to(data))

    with conversing(serve) as client:
        assert [take(client) for _ in range(3)] == [TOKEN] * 3
    assert len(streams) == 1


def test_stream_that_breaks_is_unavailable_and_the_next_call_opens_another() -> None:
    streams = []

    async def serve(context: Any) -> None:
        streams.append(context)
        data = await context.read()
        if len(streams) > 1:
            await context.write(answer_to(data))

    with conversing(serve) as client:
        with pytest.raises(Unavailable, match="the chief"):
            take(client)
        assert take(client) == TOKEN
    assert len(streams) == 2


def test_call_without_an_answer_in_time_says_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chief_client, "TIMEOUT_S", 0.1)

    async def serve(context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            pass

    with (
        conversing(serve) as client,
        pytest.raises(DeadlineExceeded, match=r"waited for a token after step 4, which did not come within 0\.3 s"),
    ):
        take(client, max_wait_s=0.2)


def test_error_on_the_stream_is_the_error_of_its_call() -> None:
    async def serve(context: Any) -> None:
        while (data := await context.read()) is not grpc.aio.EOF:
            error = encode_call_error(LeaseExpired("gone", facts={"worker": "2"}))
            await context.write(pb.ConverseResponse(call=pb.ConverseRequest.FromString(data).call, error=error).SerializeToString())

    with conversing(serve) as client:
        for _ in range(2):
            with pytest.raises(LeaseExpired, match="gone") as raised:
                client.call(CommitPushRequest(participant=WORKER, commit=COMMIT))
            assert raised.value.facts == {"worker": "2"}
