"""The calls that workers make with every step, from messages to events and from answers to messages. Knows no stream; decides nothing."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from chief import events as ev
from ps_protocol import codec_chief as codec
from ps_protocol.call_errors import encode_call_error
from ps_protocol.chief import CommitResult, TokenReply
from ps_protocol.errors import PsError
from ps_protocol.v1 import chief_service_pb2 as pb


def heartbeat_event(message: pb.HeartbeatRequest, call: int) -> ev.Heartbeat:
    """Decodes a sign of life."""
    return ev.Heartbeat(call=call, participant=codec.decode_participant(message))


def commit_event(message: pb.CommitPushRequest, call: int) -> ev.CommitPush:
    """Decodes a contribution to be counted."""
    return ev.CommitPush(call=call, participant=codec.decode_participant(message), commit=codec.decode_commit(message.commit))


def dequeue_event(message: pb.DequeueTokenRequest, call: int) -> ev.DequeueToken:
    """Decodes the wish for a token."""
    return ev.DequeueToken(
        call=call,
        participant=codec.decode_participant(message),
        local_step=message.local_step,
        request_id=message.request_id,
        max_wait_s=codec.decode_max_wait(message),
        commit=codec.decode_commit(message.commit) if message.HasField("commit") else None,
    )


def heartbeat_answer(finished: bool) -> pb.HeartbeatResponse:
    """Encodes whether training is finished."""
    return pb.HeartbeatResponse(finished=finished)


def commit_answer(result: CommitResult) -> pb.CommitPushResponse:
    """Encodes what became of a contribution."""
    return pb.CommitPushResponse(result=codec.encode_commit_result(result))


def dequeue_answer(reply: TokenReply) -> pb.DequeueTokenResponse:
    """Encodes how a wait for a token ended."""
    return codec.encode_token_reply(reply)


# By the field that a call has in ConverseRequest, and its answer in ConverseResponse: how to read the one and to write the other.
CALLS: dict[str, tuple[Callable[[Any, int], ev.Event], Callable[[Any], Any]]] = {
    "dequeue_token": (dequeue_event, dequeue_answer),
    "commit_push": (commit_event, commit_answer),
    "heartbeat": (heartbeat_event, heartbeat_answer),
}


def encoded_answer(number: int, kind: str, value: Any) -> bytes:
    """Returns an answer on a standing stream, as it travels. `kind` is the field of its call."""
    # A message in two parts is the message; the second part is the same for all workers that get the same answer.
    return pb.ConverseResponse(call=number).SerializeToString() + _encoded(kind, value)


def encoded_error(number: int, error: PsError) -> bytes:
    """Returns the answer to a call on a standing stream that is refused."""
    return pb.ConverseResponse(call=number, error=encode_call_error(error)).SerializeToString()


@lru_cache(maxsize=16)
def _encoded(kind: str, value: CommitResult | TokenReply | bool) -> bytes:
    return pb.ConverseResponse(**{kind: CALLS[kind][1](value)}).SerializeToString()
