"""The standing stream of the chief: what it asks of a parameter server with every step, in order. Decides nothing.

A chief may be silent for as long as it likes, so nothing cuts its stream but the end of the server.
"""

from collections.abc import Callable, Iterator

import grpc

from ps_protocol import codec_shard as codec
from ps_protocol.call_errors import encode_call_error
from ps_protocol.codec import decode_message, require
from ps_protocol.errors import MalformedMessage, PsError
from ps_protocol.status import answering, defect
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.idle_streams import IdleStreams
from ps_server.store import ParameterStore


class CommandService:
    """Serves one store. Thread-safe. `on_chief_call` is told of each command; it must not block."""

    def __init__(self, store: ParameterStore, *, idle_streams: IdleStreams, on_chief_call: Callable[[], None]) -> None:
        self._store = store
        self._idle_streams = idle_streams
        self._on_chief_call = on_chief_call
        self._name = f"ps {store.index}"

    def CommandShard(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serves the commands of one stream, one after the other."""
        with answering(context, server_name=self._name), self._idle_streams.standing(context, name="CommandShard") as stream:
            for data in stream.incoming(requests):
                stream.is_resting = False
                yield self._answer(data)
                stream.is_resting = True

    def _answer(self, data: bytes) -> bytes:
        message = decode_message(pb.CommandShardRequest, data)
        self._on_chief_call()
        try:
            return self._carry_out(message).SerializeToString()
        except PsError as error:
            failure = error
        except Exception:
            failure = defect(self._name)
        return pb.CommandShardResponse(call=message.call, error=encode_call_error(failure)).SerializeToString()

    def _carry_out(self, message: pb.CommandShardRequest) -> pb.CommandShardResponse:
        match message.WhichOneof("command"):
            case "apply":
                reply = self._store.apply_step(codec.decode_apply_request(message.apply))
                return pb.CommandShardResponse(call=message.call, apply=codec.encode_apply_reply(reply))
            case "prepare":
                require(message.prepare, "apply")
                sums = self._store.prepare_step(codec.decode_apply_request(message.prepare.apply))
                return pb.CommandShardResponse(call=message.call, prepare=pb.PrepareStepResponse(sums=sums))
            case "configure":
                self._store.configure(codec.decode_settings(message.configure))
                return pb.CommandShardResponse(call=message.call, configure=pb.ConfigureShardResponse())
        raise MalformedMessage(f"command {message.call}: it asks for nothing that this server knows; use the calls of their own")
