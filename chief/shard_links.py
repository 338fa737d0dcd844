"""The parameter servers behind gRPC, for asyncio: what a chief asks of them. Makes one attempt a call; repeating is the caller's."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from chief.shard_caller import SERVICE, GrpcShardCaller
from chief.shard_stream import ShardStream
from ps_protocol import codec_checkpoints, codec_shard_status
from ps_protocol import codec_shard as codec
from ps_protocol.access import DEFAULT_ACCESS, Access
from ps_protocol.codec_handshake import decode_handshake_reply, encode_handshake_request
from ps_protocol.errors import InternalError, LimitExceeded, ProtocolMismatch, Unimplemented, WrongCluster, WrongRole
from ps_protocol.handshake import HandshakeReply, HandshakeRequest, Role, name_of
from ps_protocol.shard import (
    Adoption,
    ApplyReply,
    ApplyRequest,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    ShardSettings,
    ShardStatus,
)
from ps_protocol.status import rebuild
from ps_protocol.v1 import handshake_service_pb2
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.version import PROTOCOL_VERSION, check_versions

_HANDSHAKE: str = handshake_service_pb2.DESCRIPTOR.services_by_name["HandshakeService"].full_name

Response = TypeVar("Response", bound=Message)
_ENDED_EARLY = "Internal error from Core"


class ShardLink(Protocol):
    """One parameter server, as a chief uses it. Every call may raise Unavailable or DeadlineExceeded."""

    @property
    def address(self) -> str:
        """Where it is."""

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns who is there. Raises WrongCluster, WrongRole or ProtocolMismatch if it is not this shard."""

    async def status(self, *, timeout_s: float, chief_incarnation: int = 0) -> ShardStatus:
        """Returns step, memory and counters. The chief that has the shard says who it is, as a sign of life; others leave that 0."""

    async def adopt(self, *, epoch: int, chief_incarnation: int, chief_address: str = "", life: int = 0, timeout_s: float) -> Adoption:
        """Puts the shard under a chief, who listens at `chief_address`, in this life of the cluster."""

    async def keep_record(self, *, epoch: int, chief_incarnation: int, version: int, record: bytes, timeout_s: float) -> None:
        """Keeps a record for the chief's successor."""

    async def save(self, request: SaveRequest, *, max_wait_s: float, timeout_s: float) -> SaveProgress:
        """Copies the values of a step and writes them; asked again, waits for the end, `max_wait_s` at most."""

    async def restore(self, request: RestoreRequest, *, max_wait_s: float, timeout_s: float) -> RestoreProgress:
        """Replaces what is there by a checkpoint's values; asked again, waits for the end, `max_wait_s` at most."""

    async def configure(self, settings: ShardSettings, *, timeout_s: float) -> None:
        """Changes how the shard works."""

    async def prepare_step(self, request: ApplyRequest, *, timeout_s: float) -> Sequence[float]:
        """Returns the sums of squares of the step's mean, slice by slice."""

    async def apply_step(self, request: ApplyRequest, *, timeout_s: float) -> ApplyReply:
        """Has the contributions averaged and the next step made."""

    async def shutdown(self, *, epoch: int, reason: str, timeout_s: float) -> None:
        """Ends the server."""

    async def close(self) -> None:
        """Closes the connection; the server goes on."""


class GrpcShardLink:
    """Implements ShardLink. Belongs to the event loop that it was made in.

    What is asked with every step travels on a standing stream, or by calls of its own if the server has no such stream.
    """

    def __init__(self, address: str, *, index: int, cluster: str, access: Access = DEFAULT_ACCESS) -> None:
        self._access, self._metadata = access, access.metadata_for(address)
        self._address, self._index, self._cluster = address, index, cluster
        self._target = f"{name_of(Role.PARAMETER_SERVER, index)} at {address}"
        self._channel = access.open_aio_channel(address)
        self._methods: dict[str, Any] = {}
        self._stream = ShardStream(self._channel, path=f"/{SERVICE}/CommandShard", target=self._target, metadata=self._metadata)
        self._has_stream = True

    @property
    def address(self) -> str:
        """Where it is."""
        return self._address

    def open_caller(self) -> GrpcShardCaller:
        """Returns the way for threads; whoever opens it closes it."""
        return GrpcShardCaller(self._address, name=name_of(Role.PARAMETER_SERVER, self._index), access=self._access)

    async def handshake(self, *, timeout_s: float) -> HandshakeReply:
        """Returns who is there."""
        role = Role.PARAMETER_SERVER
        request = HandshakeRequest(cluster=self._cluster, expected_role=role, expected_index=self._index, version=PROTOCOL_VERSION)
        path, message = f"/{_HANDSHAKE}/Handshake", encode_handshake_request(request)
        try:
            answer = await self._call(path, message, handshake_service_pb2.HandshakeResponse, timeout_s=timeout_s, awaited="the handshake")
            reply = decode_handshake_reply(answer)
            check_versions(client=PROTOCOL_VERSION, server=reply.version)
        except (WrongCluster, WrongRole, ProtocolMismatch) as error:
            # The server does not know by which address it was called.
            raise type(error)(f"{self._address}: {error.message}", facts=error.facts) from None
        except Unimplemented:
            raise WrongRole(f"{self._address}: a gRPC server answers there, but not one of Lockstep's; check the address") from None
        return reply

    async def status(self, *, timeout_s: float, chief_incarnation: int = 0) -> ShardStatus:
        """Returns step, memory and counters."""
        request = pb.GetShardStatusRequest(chief_incarnation=chief_incarnation)
        answer = await self._unary("GetShardStatus", request, pb.GetShardStatusResponse, timeout_s=timeout_s, awaited="its status")
        return codec_shard_status.decode_shard_status(answer)

    async def adopt(
        self,
        *,
        epoch: int,
        chief_incarnation: int,
        chief_address: str = "",
        life: int = 0,
        timeout_s: float,
        is_alone: bool = False,
        forgets: bool = False,
    ) -> Adoption:
        """Puts the shard under a chief. `is_alone`, `forgets`: see ReplicaLink."""
        request = pb.AdoptShardRequest(
            epoch=epoch,
            chief_incarnation=chief_incarnation,
            chief_address=chief_address,
            alone=is_alone,
            forget=forgets,
            life=life,
        )
        answer = await self._unary("AdoptShard", request, pb.AdoptShardResponse, timeout_s=timeout_s, awaited="its adoption")
        return codec_checkpoints.decode_adoption(answer)

    async def keep_record(self, *, epoch: int, chief_incarnation: int, version: int, record: bytes, timeout_s: float) -> None:
        """Keeps a record for the chief's successor."""
        request = pb.KeepRecordRequest(epoch=epoch, chief_incarnation=chief_incarnation, version=version, record=record)
        await self._unary("KeepRecord", request, pb.KeepRecordResponse, timeout_s=timeout_s, awaited="a record to be kept")

    async def save(self, request: SaveRequest, *, max_wait_s: float, timeout_s: float) -> SaveProgress:
        """Copies the values of a step and writes them."""
        message, awaited = codec_checkpoints.encode_save_request(request, max_wait_s=max_wait_s), f"step {request.step} to be saved"
        answer = await self._unary("SaveShard", message, pb.SaveShardResponse, timeout_s=timeout_s, awaited=awaited)
        return codec_checkpoints.decode_save_progress(answer)

    async def restore(self, request: RestoreRequest, *, max_wait_s: float, timeout_s: float) -> RestoreProgress:
        """Replaces what is there by a checkpoint's values."""
        message, awaited = codec_checkpoints.encode_restore_request(request, max_wait_s=max_wait_s), f"{request.tag} to be restored"
        answer = await self._unary("RestoreShard", message, pb.RestoreShardResponse, timeout_s=timeout_s, awaited=awaited)
        return codec_checkpoints.decode_restore_progress(answer)

    async def configure(self, settings: ShardSettings, *, timeout_s: float) -> None:
        """Changes how the shard works."""
        message, awaited = codec.encode_settings(settings), "its new settings"
        if await self._command(timeout_s, awaited, configure=message) is None:
            await self._unary("ConfigureShard", message, pb.ConfigureShardResponse, timeout_s=timeout_s, awaited=awaited)

    async def prepare_step(self, request: ApplyRequest, *, timeout_s: float) -> Sequence[float]:
        """Returns the sums of squares of the step's mean, slice by slice."""
        message, awaited = pb.PrepareStepRequest(apply=codec.encode_apply_request(request)), f"the norms of step {request.step}"
        if (answer := await self._command(timeout_s, awaited, prepare=message)) is not None:
            return tuple(answer.prepare.sums)
        return tuple((await self._unary("PrepareStep", message, pb.PrepareStepResponse, timeout_s=timeout_s, awaited=awaited)).sums)

    async def apply_step(self, request: ApplyRequest, *, timeout_s: float) -> ApplyReply:
        """Has the contributions averaged and the next step made."""
        message, awaited = codec.encode_apply_request(request), f"step {request.step} to be applied"
        if (answer := await self._command(timeout_s, awaited, apply=message)) is not None:
            return codec.decode_apply_reply(answer.apply)
        return codec.decode_apply_reply(await self._unary("ApplyStep", message, pb.ApplyStepResponse, timeout_s=timeout_s, awaited=awaited))

    async def shutdown(self, *, epoch: int, reason: str, timeout_s: float) -> None:
        """Ends the server."""
        request = pb.ShutdownShardRequest(epoch=epoch, reason=reason)
        await self._unary("ShutdownShard", request, pb.ShutdownShardResponse, timeout_s=timeout_s, awaited="its end")
        self._stream.close()

    async def close(self) -> None:
        """Closes the connection; the server goes on."""
        self._stream.close()
        await self._channel.close()

    async def _command(self, timeout_s: float, awaited: str, **command: Any) -> pb.CommandShardResponse | None:
        """Returns the answer on the standing stream; None if the server has no such stream, or no room for one."""
        if self._has_stream:
            try:
                return await self._stream.command(pb.CommandShardRequest(**command), timeout_s=timeout_s, awaited=awaited)
            except (Unimplemented, LimitExceeded):
                self._has_stream = False
            except InternalError as error:
                # What grpc.aio says when a stream ends before its first write has left. A call of its own says why.
                if _ENDED_EARLY not in error.message:
                    raise
        return None

    async def _unary(self, method: str, request: Message, response: type[Response], *, timeout_s: float, awaited: str) -> Response:
        return await self._call(f"/{SERVICE}/{method}", request, response, timeout_s=timeout_s, awaited=awaited)

    async def _call(self, path: str, request: Message, response_type: type[Response], *, timeout_s: float, awaited: str) -> Response:
        if path not in self._methods:
            self._methods[path] = self._channel.unary_unary(
                path, request_serializer=type(request).SerializeToString, response_deserializer=response_type.FromString
            )
        try:
            answer: Response = await self._methods[path](request, timeout=timeout_s, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise rebuild(error, target=self._target, awaited=awaited, timeout_s=timeout_s) from None
        return answer
