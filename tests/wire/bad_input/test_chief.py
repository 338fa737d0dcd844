"""Input that no client of ours would send: a chief refuses it with its status and reason, and the next call works."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from chief.serving.service import SERVICE
from ps_protocol.roles.fence import session_secret
from ps_protocol.rpc.channel import DEFAULT_ACCESS
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.v1 import parameter_service_pb2, tensor_pb2
from tests.support.chief.eras import LIFE
from tests.support.chief.running_chief import SESSION_KEY, RunningChief, Worker, client_of, cluster
from tests.support.network.talk import Talk, converse
from tests.support.parameter_servers.raw_shard import Outcome, outcome
from tests.support.waiting import wait_until


def raw(channel: grpc.Channel, method: str) -> Any:
    return channel.unary_unary(f"/{SERVICE}/{method}", request_serializer=bytes, response_deserializer=bytes)


def participant(index: int = 0, *, epoch: int = 1, incarnation: int = 1, kind: int = 1) -> pb.Participant:
    secret = session_secret(SESSION_KEY, name=f"{'observer' if kind == 2 else 'worker'} {index}", incarnation=incarnation)
    era = tensor_pb2.Era(life=LIFE, epoch=epoch)
    return pb.Participant(era=era, index=index, incarnation=incarnation, kind=kind, secret=secret)  # type: ignore[arg-type]


def register(**fields: Any) -> pb.RegisterWorkerRequest:
    return pb.RegisterWorkerRequest(**{"kind": 1, "host": "h", "pid": 1, "request_id": 10**9, **fields})


def commit(step: int = 0, *, worker: int = 0, incarnation: int = 1, sequence: int = 99, index: int = 0, epoch: int = 1) -> Any:
    push_id = tensor_pb2.PushId(worker=worker, incarnation=incarnation, sequence=sequence)
    counted = pb.PushCommit(push_id=push_id, step=step, staged=True)
    return pb.ConverseRequest(commit=pb.CommitPushRequest(participant=participant(index, epoch=epoch), commit=counted))


def with_state(num_bytes: int) -> Any:
    request = commit()
    request.commit.commit.attached.user_state = "a" * num_bytes
    return request


def token(**fields: Any) -> pb.ConverseRequest:
    return pb.ConverseRequest(token=pb.DequeueTokenRequest(**fields))


def tokens(number: int) -> pb.ChangeSettingsRequest:
    policy = pb.PolicySpec(name=pb.PolicySpec.NAME_SYNC, tokens=pb.PolicySpec.TOKENS_FIFO, num_tokens=number)
    return pb.ChangeSettingsRequest(request_id=10, policy=policy)


def pieces(number: int) -> tensor_pb2.LearningRateSchedule:
    return tensor_pb2.LearningRateSchedule(name="piecewise_constant", boundaries=range(number), values=[0.1] * (number + 1))


def model(optimizer: str) -> pb.RegisterModelRequest:
    """A model that is not the cluster's."""
    rate = tensor_pb2.LearningRateSchedule(name="constant", arguments={"value": 0.1})
    return pb.RegisterModelRequest(
        participant=participant(),
        model=pb.ModelSpec(
            variables=[tensor_pb2.VariableSpec(name="w", data_type=1, shape=[2])],  # type: ignore[arg-type]
            optimizer=tensor_pb2.OptimizerSpec(name=optimizer, learning_rate=rate),
            placement=pb.PlacementPolicy(strategy="greedy_bytes"),
        ),
    )


INVALID, PRECONDITION, ABORTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED
TAKEN, RANGE, FULL = grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.RESOURCE_EXHAUSTED

# Two workers of three places are live (0 and 1), the model is initialised, step 1 is open.
BAD_INPUT = [
    ("not a protobuf", "Heartbeat", b"\xff\xff", INVALID, "MALFORMED_MESSAGE", "2 bytes are not a HeartbeatRequest"),
    ("no participant", "Heartbeat", pb.HeartbeatRequest(), INVALID, "MALFORMED_MESSAGE", "participant"),
    (
        "no commit",
        "Converse",
        pb.ConverseRequest(commit=pb.CommitPushRequest(participant=participant())),
        INVALID,
        "MALFORMED_MESSAGE",
        "commit is missing",
    ),
    (
        "old epoch",
        "Heartbeat",
        pb.HeartbeatRequest(participant=participant(epoch=7)),
        ABORTED,
        "EPOCH_MISMATCH",
        "cluster epoch is 1, you have 7",
    ),
    (
        "not registered",
        "Heartbeat",
        pb.HeartbeatRequest(participant=participant(2)),
        PRECONDITION,
        "LEASE_EXPIRED",
        "worker 2 (incarnation 1) is not registered here. Register again",
    ),
    ("index taken", "RegisterWorker", register(index=1), TAKEN, "WORKER_INDEX_TAKEN", "worker 1 is already running on host-b pid 912"),
    ("index too high", "RegisterWorker", register(index=9), RANGE, "WORKER_INDEX_OUT_OF_RANGE", "worker index 9: want 0..2"),
    ("index negative", "RegisterWorker", register(index=2**32 - 1), INVALID, "INVALID_SPEC", "worker index: got"),
    (
        "seconds beyond all time",
        "Heartbeat",
        pb.HeartbeatRequest(participant=participant(), traffic=pb.WorkerTraffic(reading=Duration(seconds=(1 << 63) - 1))),
        INVALID,
        "MALFORMED_MESSAGE",
        "reading: got 9223372036854775807 s and 0 ns, want 0 to",
    ),
    (
        "more tokens than steps can use",
        "ChangeSettings",
        tokens(50_000),
        INVALID,
        "INVALID_SPEC",
        "num_tokens: got 50000, want at most 1030 where a step queues 3",
    ),
    (
        "a schedule of too many pieces",
        "ChangeSettings",
        pb.ChangeSettingsRequest(request_id=11, hyperparameters=pb.HyperparameterChange(learning_rate=pieces(300_000))),
        INVALID,
        "INVALID_SPEC",
        "300000 boundaries, want at most 1000",
    ),
    ("no kind", "RegisterWorker", register(kind=0), INVALID, "MALFORMED_MESSAGE", "kind"),
    (
        "step ahead",
        "Converse",
        commit(12),
        PRECONDITION,
        "STEP_AHEAD",
        "local_step 12 is ahead of global_step 1; read again",
    ),
    (
        "token ahead",
        "Converse",
        token(participant=participant(), local_step=12),
        PRECONDITION,
        "STEP_AHEAD",
        "local_step 12",
    ),
    ("step negative", "Converse", commit(-1), INVALID, "INVALID_SPEC", "local_step: got -1"),
    ("push id reused", "Converse", commit(1, sequence=1), INVALID, "PUSH_ID_REUSED", "push 0/1/1 was for step 0, now for step 1"),
    ("user state too large", "Converse", with_state(65_537), FULL, "LIMIT_EXCEEDED", "user_state: 65537 bytes, 65536 at most"),
    (
        "push sequence far ahead",
        "Converse",
        commit(1, sequence=1 << 63),
        INVALID,
        "INVALID_SPEC",
        "number contributions one after the other",
    ),
    (
        "another model",
        "RegisterModel",
        model("sgd"),
        TAKEN,
        "MODEL_MISMATCH",
        "variables['b'] is missing",
    ),
    (
        "unknown optimizer",
        "RegisterModel",
        model("adamm"),
        INVALID,
        "INVALID_SPEC",
        "adamm",
    ),
    (
        "not the initialiser",
        "CompleteInitialization",
        pb.CompleteInitializationRequest(participant=participant(1), attempt=1),
        PRECONDITION,
        "NOT_INITIALIZER",
        "worker 1 (attempt 1) does not have the task",
    ),
    (
        "observers give nothing",
        "Converse",
        token(participant=participant(kind=2)),
        INVALID,
        "INVALID_SPEC",
        "an observer cannot take a token",
    ),
]


@pytest.fixture(scope="module")
def busy_chief() -> Iterator[RunningChief]:
    with cluster(replicas_to_aggregate=1, total_num_replicas=3, lease_s=600.0) as chief, client_of(chief) as client:
        with Worker(client) as first, Worker(client):
            first.join_model()
            assert first.wait(first.push()).step == 1
            yield chief


def ask(channel: grpc.Channel, method: str, data: bytes) -> Outcome:
    """Calls the chief with bytes, a method of the stream or any other."""
    if method == "Converse":
        return converse(channel, data)
    call: Any = channel.unary_stream(f"/{SERVICE}/{method}")
    return outcome(call(data, timeout=20))


@pytest.mark.parametrize(
    ("method", "request_", "code", "reason", "text"), [row[1:] for row in BAD_INPUT], ids=[row[0] for row in BAD_INPUT]
)
def test_bad_input_is_refused_with_its_status_and_the_next_call_works(
    method: str, request_: Any, code: grpc.StatusCode, reason: str, text: str, busy_chief: RunningChief
) -> None:
    data = request_ if isinstance(request_, bytes) else request_.SerializeToString()
    with DEFAULT_ACCESS.open_channel(busy_chief.address) as channel, client_of(busy_chief) as client:
        before = client.status()
        ended = ask(channel, method, data)
        assert text in ended.text
        assert (ended.code, ended.reason) == (code, reason)
        raw(channel, "Heartbeat")(pb.HeartbeatRequest(participant=participant()).SerializeToString(), timeout=20)
        after = client.status()
        assert (after.global_step, after.num_accepted, after.state) == (before.global_step, before.num_accepted, before.state)


def test_a_full_cluster_is_refused_with_its_status() -> None:
    with cluster(total_num_replicas=1) as chief, client_of(chief) as client, DEFAULT_ACCESS.open_channel(chief.address) as channel:
        Worker(client)
        with pytest.raises(grpc.RpcError) as caught:
            raw(channel, "RegisterWorker")(register().SerializeToString(), timeout=20)
        error: Any = caught.value
        assert (error.code(), dict(error.trailing_metadata())["ps-reason"]) == (FULL, "CLUSTER_FULL")
        assert error.details().startswith("1 of 1 worker places taken")


def test_a_blocking_call_without_a_wait_of_its_own_blocks_and_one_with_zero_does_not(busy_chief: RunningChief) -> None:
    with DEFAULT_ACCESS.open_channel(busy_chief.address) as channel, client_of(busy_chief) as client:
        # On two streams: on one, the second call would be taken when the first is answered, which is after 20 s.
        blocked, other = Talk(channel), Talk(channel)
        request = pb.DequeueTokenRequest(participant=participant(1), local_step=1, request_id=5)
        blocked.ask(1, token=request)
        wait_until(lambda: next(one.is_waiting for one in client.status().participants if one.index == 1), what="the worker waits")
        request.max_wait.CopyFrom(Duration())
        other.ask(2, token=request)
        answer = other.answer()
        assert (answer.call, answer.token.result) == (2, pb.TOKEN_RESULT_WAIT)
        assert answer.token.waiting_for
        blocked.call.cancel()
        other.close()


def test_a_parameter_servers_method_is_not_one_of_the_chiefs(busy_chief: RunningChief) -> None:
    service = parameter_service_pb2.DESCRIPTOR.services_by_name["ParameterService"].full_name
    with DEFAULT_ACCESS.open_channel(busy_chief.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{service}/GetShardStatus", request_serializer=bytes, response_deserializer=bytes)(b"", timeout=20)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
