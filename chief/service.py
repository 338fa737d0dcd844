"""The chief's RPCs: decode, one call to the runner, encode. Knows messages; decides nothing.

All methods take bytes, so that what is no message at all is refused by us, with a reason. Errors become statuses in one place for all.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from chief import events as ev
from chief import worker_calls as calls
from chief.conversation import Context, Conversation
from chief.runner import Runner
from ps_protocol import codec_chief as codec
from ps_protocol import codec_model, codec_settings
from ps_protocol.chief import AgreedModel, CommitResult, ModelReply, Registration, SettingsReply, TokenReply
from ps_protocol.codec import decode_message, require
from ps_protocol.codec_status import encode_cluster_status
from ps_protocol.status import answering_aio
from ps_protocol.v1 import chief_service_pb2 as pb

SERVICE: str = pb.DESCRIPTOR.services_by_name["ChiefService"].full_name


class ChiefService:
    """Serves one runner, in its event loop."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._conversations: set[Conversation] = set()

    def end_conversations(self) -> None:
        """Ends all standing streams, once what is answered has been sent."""
        for conversation in [*self._conversations]:
            conversation.end()

    async def RegisterWorker(self, data: bytes) -> Message:
        request = codec.decode_register_request(decode_message(pb.RegisterWorkerRequest, data))
        return codec.encode_registration(await self._runner.call(Registration, lambda call: ev.RegisterWorker(call=call, request=request)))

    async def Heartbeat(self, data: bytes) -> Message:
        message = decode_message(pb.HeartbeatRequest, data)
        return calls.heartbeat_answer(await self._runner.call(bool, partial(calls.heartbeat_event, message)))

    async def DeregisterWorker(self, data: bytes) -> Message:
        message = decode_message(pb.DeregisterWorkerRequest, data)
        participant = codec.decode_participant(message)
        await self._runner.call(type(None), lambda call: ev.DeregisterWorker(call=call, participant=participant, failure=message.failure))
        return pb.DeregisterWorkerResponse()

    async def RegisterModel(self, data: bytes) -> Message:
        message = decode_message(pb.RegisterModelRequest, data)
        event = ev.RegisterModel(
            call=0,
            participant=codec.decode_participant(message),
            model=codec_model.decode_model(message.model),
            max_wait_s=codec.decode_max_wait(message),
            may_initialize=not message.joins_only,
        )
        return codec_model.encode_model_reply(await self._runner.call(ModelReply, lambda call: replace(event, call=call)))

    async def CompleteInitialization(self, data: bytes) -> Message:
        message = decode_message(pb.CompleteInitializationRequest, data)
        participant = codec.decode_participant(message)
        await self._runner.call(
            type(None), lambda call: ev.CompleteInitialization(call=call, participant=participant, attempt=message.attempt)
        )
        return pb.CompleteInitializationResponse()

    async def GetModel(self, data: bytes) -> Message:
        max_wait_s = codec.decode_max_wait(decode_message(pb.GetModelRequest, data))
        agreed = await self._runner.call(AgreedModel, lambda call: ev.GetModel(call=call, max_wait_s=max_wait_s))
        return codec_model.encode_agreed_model(agreed)

    async def CommitPush(self, data: bytes) -> Message:
        message = decode_message(pb.CommitPushRequest, data)
        return calls.commit_answer(await self._runner.call(CommitResult, partial(calls.commit_event, message)))

    async def DequeueToken(self, data: bytes) -> Message:
        message = decode_message(pb.DequeueTokenRequest, data)
        return calls.dequeue_answer(await self._runner.call(TokenReply, partial(calls.dequeue_event, message)))

    async def Converse(self, context: Context) -> None:
        conversation = Conversation(self._runner, context)
        self._conversations.add(conversation)
        try:
            await conversation.serve()
        finally:
            self._conversations.discard(conversation)

    async def GetClusterStatus(self, data: bytes) -> Message:
        message = decode_message(pb.GetClusterStatusRequest, data)
        return encode_cluster_status(self._runner.status(max_ledger_entries=message.max_ledger_entries))

    async def SetPolicy(self, data: bytes) -> Message:
        message = decode_message(pb.SetPolicyRequest, data)
        require(message, "policy")
        policy, max_wait_s = codec_settings.decode_policy(message.policy), codec.decode_max_wait(message)
        event = ev.SetPolicy(call=0, policy=policy, request_id=message.request_id, max_wait_s=max_wait_s)
        return pb.SetPolicyResponse(settings=await self._change(event))

    async def SetHyperparameters(self, data: bytes) -> Message:
        message = decode_message(pb.SetHyperparametersRequest, data)
        change, max_wait_s = codec_settings.decode_hyperparameter_change(message), codec.decode_max_wait(message)
        event = ev.SetHyperparameters(call=0, change=change, request_id=message.request_id, max_wait_s=max_wait_s)
        return pb.SetHyperparametersResponse(settings=await self._change(event))

    async def FinishTraining(self, data: bytes) -> Message:
        reason = decode_message(pb.FinishTrainingRequest, data).reason
        step = await self._runner.call(int, lambda call: ev.FinishTraining(call=call, reason=reason))
        return pb.FinishTrainingResponse(global_step=step)

    async def _change(self, event: ev.SetPolicy | ev.SetHyperparameters) -> pb.SettingsState | None:
        reply = await self._runner.call(object, lambda call: replace(event, call=call))
        assert reply is None or isinstance(reply, SettingsReply)
        return codec_settings.encode_settings_reply(reply)


def chief_service_handler(service: ChiefService) -> grpc.GenericRpcHandler:
    """Returns the handler of every RPC of the service's descriptor, for `server.add_generic_rpc_handlers((handler,))`."""
    handlers: dict[str, Any] = {}
    for method in pb.DESCRIPTOR.services_by_name["ChiefService"].methods:
        serve = getattr(service, method.name)
        if method.client_streaming:
            handlers[method.name] = grpc.stream_stream_rpc_method_handler(_conversed(serve))
        else:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(_answered(serve))
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _conversed(method: Callable[[Context], Awaitable[None]]) -> Callable[[object, Context], Awaitable[None]]:
    async def answer(requests: object, context: Context) -> None:
        async with answering_aio(context, server_name="the chief"):
            await method(context)

    return answer


def _answered(method: Callable[[bytes], Awaitable[Message]]) -> Callable[[bytes, Context], Awaitable[bytes]]:
    async def answer(data: bytes, context: Context) -> bytes:
        async with answering_aio(context, server_name="the chief"):
            return (await method(data)).SerializeToString()

    return answer
