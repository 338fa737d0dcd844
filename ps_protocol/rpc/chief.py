"""The chief behind gRPC: the `Chief` of another process. Knows its methods and messages; no retries, no state of a session."""

import copy
import itertools
import math
from typing import Any, Self

from google.protobuf.message import Message

from ps_protocol.model.data import DataSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.process.waiting import CallDeadlines
from ps_protocol.roles.chief import (
    AgreedModel,
    ClusterStatus,
    CommitResult,
    HyperparameterChange,
    LeaseReply,
    ModelReply,
    Participant,
    PushCommit,
    RegisterRequest,
    Registration,
    SavedCheckpoint,
    SettingsReply,
    TokenReply,
)
from ps_protocol.roles.identity import HandshakeReply, Role, name_of
from ps_protocol.roles.shard import MAX_WAIT_SLICE_S
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access
from ps_protocol.rpc.client import Connection, Response, handshake
from ps_protocol.rpc.client_stream import StandingStream
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import decode_call_error
from ps_protocol.wire.codec import decode_message

SERVICE = "ps_protocol.v1.ChiefService"
TIMEOUT_S = 10.0


class GrpcChief:
    """The chief at `address`. Implements Chief: thread-safe, one attempt a call, nothing is sent before the first call.

    A call that waits is given 10 s more than it may wait. `cluster` is what `handshake` insists on; "" accepts any. What is called with
    every step travels on a standing stream (Converse), or by calls of its own (CommitPush, DequeueToken) if the chief has no such stream.
    """

    def __init__(self, address: str, *, cluster: str = "", access: Access = DEFAULT_ACCESS) -> None:
        self.address = address
        self._cluster = cluster
        self._connection = Connection(address, name=name_of(Role.CHIEF, None), service=SERVICE, access=access)
        self._deadlines = CallDeadlines()
        self._stream = StandingStream(self._connection, "Converse", deadlines=self._deadlines)
        self._numbers = itertools.count(1)
        self._limit_s = math.inf

    def within(self, timeout_s: float) -> Self:
        """Returns this chief, by the same connection, each of whose calls ends after `timeout_s` seconds at the latest."""
        bounded = copy.copy(self)
        bounded._limit_s = max(0.0, timeout_s)
        return bounded

    def handshake(self, timeout_s: float = TIMEOUT_S) -> HandshakeReply:
        """Returns who is there; raises WrongCluster, WrongRole or ProtocolMismatch if it is not this cluster's chief."""
        channel, access = self._connection.channel, self._connection.access
        return handshake(channel, address=self.address, role=Role.CHIEF, cluster=self._cluster, timeout_s=timeout_s, access=access)

    def register_worker(self, request: RegisterRequest) -> Registration:
        """Takes a participant in."""
        message = codec.encode(request)
        return codec.decode(Registration, self._call("RegisterWorker", message, pb.RegisterWorkerResponse, "a place"))

    def heartbeat(self, participant: Participant) -> bool:
        """Renews the lease; True once training is finished."""
        # By a call of its own: it comes from another thread, which must not keep the worker's from its stream.
        message = pb.HeartbeatRequest(participant=codec.encode(participant))
        return self._call("Heartbeat", message, pb.HeartbeatResponse, "the lease to be renewed").finished

    def deregister_worker(self, participant: Participant, *, failure: str = "") -> None:
        """Ends the lease."""
        message = pb.DeregisterWorkerRequest(participant=codec.encode(participant), failure=failure)
        self._call("DeregisterWorker", message, pb.DeregisterWorkerResponse, "the lease to be ended")

    def register_model(self, participant: Participant, model: ModelSpec, *, max_wait_s: float, may_initialize: bool = True) -> ModelReply:
        """Agrees on the model; blocks at most `max_wait_s` (and 20 s)."""
        message = pb.RegisterModelRequest(
            participant=codec.encode(participant),
            model=codec.encode(model),
            max_wait=codec.encode_max_wait(max_wait_s),
            joins_only=not may_initialize,
        )
        answer = self._call("RegisterModel", message, pb.RegisterModelResponse, "the model to be agreed on", max_wait_s=max_wait_s)
        return codec.decode(ModelReply, answer)

    def complete_initialization(self, participant: Participant, *, attempt: int) -> None:
        """Tells that the shards hold their initial values."""
        message = pb.CompleteInitializationRequest(participant=codec.encode(participant), attempt=attempt)
        self._call("CompleteInitialization", message, pb.CompleteInitializationResponse, "the initialisation to be noted")

    def get_model(self, *, max_wait_s: float) -> AgreedModel:
        """Returns the agreed model; blocks at most `max_wait_s` (and 20 s) for it to be initialised."""
        message = pb.GetModelRequest(max_wait=codec.encode_max_wait(max_wait_s))
        return codec.decode(AgreedModel, self._call("GetModel", message, pb.GetModelResponse, "the model", max_wait_s=max_wait_s))

    def commit_push(self, participant: Participant, commit: PushCommit) -> CommitResult:
        """Counts a contribution. Never waits for others."""
        message = pb.CommitPushRequest(participant=codec.encode(participant), commit=codec.encode(commit))
        awaited = "a contribution to be counted"
        if (answer := self._converse(awaited, commit_push=message)) is not None:
            return codec.decode(CommitResult, answer.commit_push.result)
        return codec.decode(CommitResult, self._call("CommitPush", message, pb.CommitPushResponse, awaited).result)

    def dequeue_token(
        self, participant: Participant, *, local_step: int, request_id: int, max_wait_s: float, commit: PushCommit | None = None
    ) -> TokenReply:
        """Waits for a token, at most `max_wait_s` (and 20 s); counts `commit` first."""
        message = pb.DequeueTokenRequest(
            participant=codec.encode(participant),
            local_step=local_step,
            request_id=request_id,
            max_wait=codec.encode_max_wait(max_wait_s),
            commit=None if commit is None else codec.encode(commit),
        )
        awaited = f"a token after step {local_step}"
        if (answer := self._converse(awaited, max_wait_s=max_wait_s, dequeue_token=message)) is not None:
            return codec.decode(TokenReply, answer.dequeue_token)
        return codec.decode(TokenReply, self._call("DequeueToken", message, pb.DequeueTokenResponse, awaited, max_wait_s=max_wait_s))

    def status(self, *, max_ledger_entries: int = 0) -> ClusterStatus:
        """Returns the cluster's status."""
        message = pb.GetClusterStatusRequest(max_ledger_entries=max_ledger_entries)
        return codec.decode(ClusterStatus, self._call("GetClusterStatus", message, pb.GetClusterStatusResponse, "the status"))

    def set_policy(self, policy: PolicySpec, *, request_id: int, max_wait_s: float) -> SettingsReply | None:
        """Changes how workers are coordinated; None if the moment has not come within `max_wait_s` (and 20 s)."""
        message = pb.ChangeSettingsRequest(policy=codec.encode(policy), request_id=request_id)
        return self._change(message, f"the policy {policy.text}", max_wait_s=max_wait_s)

    def set_hyperparameters(self, change: HyperparameterChange, *, request_id: int, max_wait_s: float) -> SettingsReply | None:
        """Changes an optimizer; None if the moment has not come within `max_wait_s` (and 20 s)."""
        message = pb.ChangeSettingsRequest(hyperparameters=codec.encode(change), request_id=request_id)
        return self._change(message, "the optimizer's change", max_wait_s=max_wait_s)

    def _change(self, message: pb.ChangeSettingsRequest, awaited: str, *, max_wait_s: float) -> SettingsReply | None:
        message.max_wait.CopyFrom(codec.encode_max_wait(max_wait_s))
        answer = self._call("ChangeSettings", message, pb.ChangeSettingsResponse, awaited, max_wait_s=max_wait_s)
        return codec.decode_some(SettingsReply, answer, "settings")

    def save_checkpoint(self, *, request_id: int, max_wait_s: float) -> SavedCheckpoint:
        """Saves a checkpoint, and waits until it is whole, at most `max_wait_s` (and 20 s)."""
        message = pb.SaveCheckpointRequest(request_id=request_id, max_wait=codec.encode_max_wait(max_wait_s))
        answer = self._call("SaveCheckpoint", message, pb.SaveCheckpointResponse, "a checkpoint", max_wait_s=max_wait_s)
        return codec.decode(SavedCheckpoint, answer)

    def lease_ranges(
        self,
        participant: Participant,
        data: DataSpec,
        *,
        max_ranges: int,
        request_id: int,
        max_wait_s: float,
        returned: tuple[int, ...] = (),
    ) -> LeaseReply:
        """Leases ranges of the training data; blocks at most `max_wait_s` (and 20 s)."""
        message = pb.LeaseRangesRequest(
            participant=codec.encode(participant),
            data=codec.encode(data),
            max_ranges=max_ranges,
            request_id=request_id,
            max_wait=codec.encode_max_wait(max_wait_s),
            returned=returned,
        )
        answer = self._call("LeaseRanges", message, pb.LeaseRangesResponse, "ranges of the training data", max_wait_s=max_wait_s)
        return codec.decode(LeaseReply, answer)

    def finish(self, *, reason: str) -> int:
        """Ends training; returns the last step."""
        message = pb.FinishTrainingRequest(reason=reason)
        return self._call("FinishTraining", message, pb.FinishTrainingResponse, "the end of training").global_step

    def close(self) -> None:
        """Closes the connection; calls under way end with Cancelled. The chief goes on. Idempotent."""
        self._stream.close()
        self._deadlines.close()
        self._connection.close()

    def _converse(self, awaited: str, *, max_wait_s: float = 0.0, **request: Any) -> pb.ConverseResponse | None:
        """Returns the answer to a call on the standing stream; None if there is none to be had: then a call of its own will do."""
        number = next(self._numbers)

        def exchange(standing: StandingStream) -> pb.ConverseResponse:
            stream = standing.stream
            stream.send(pb.ConverseRequest(call=number, **request).SerializeToString())
            while True:
                answer = decode_message(pb.ConverseResponse, stream.receive())
                if answer.call == number:
                    return answer

        answer = self._stream.use(exchange, timeout_s=self._timeout_s(max_wait_s), awaited=awaited)
        if answer is not None and answer.HasField("error"):
            raise decode_call_error(answer.error)
        return answer

    def _call(self, method: str, message: Message, response_type: type[Response], awaited: str, *, max_wait_s: float = 0.0) -> Response:
        return self._connection.unary(method, message, response_type, timeout_s=self._timeout_s(max_wait_s), awaited=awaited)

    def _timeout_s(self, max_wait_s: float) -> float:
        return min(min(max_wait_s, MAX_WAIT_SLICE_S) + TIMEOUT_S, self._limit_s)
