"""The standing stream of the chief: what it asks of a parameter server with every step, in order.

A chief may be silent for as long as it likes, so nothing cuts its stream but the end of the server.
"""

from collections.abc import Callable, Iterator

import grpc

from ps_protocol import codec_shard as codec
from ps_protocol.call_errors import encode_call_error
from ps_protocol.codec import decode_message, require
from ps_protocol.direct_serving import standing_method_handler
from ps_protocol.errors import MalformedMessage, PsError
from ps_protocol.standing_peer import Peer
from ps_protocol.status import defect
from ps_protocol.threaded_handler import ThreadedHandler
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.idle_streams import IdleStreams, Stream
from ps_server.store import ParameterStore


class CommandService:
    """Serves one store. Thread-safe. `on_chief_call` is told of each command; it must not block."""

    def __init__(self, store: ParameterStore, *, idle_streams: IdleStreams, on_chief_call: Callable[[], None]) -> None:
        self._store = store
        self._idle_streams = idle_streams
        self._on_chief_call = on_chief_call
        self._name = f"ps {store.index}"

        self.CommandShard = standing_method_handler(lambda peer, context: _Commands(self, peer, context), server_name=self._name)

    def begin(self, context: grpc.ServicerContext) -> Stream:
        """Notes a stream that begins, until `end`. Raises LimitExceeded."""
        return self._idle_streams.begin_standing(context, name="CommandShard")

    def end(self, stream: Stream) -> None:
        """Notes its end."""
        self._idle_streams.end_of(stream)

    def threaded(self, peer: Peer, stream: Stream, *, first: bytes) -> ThreadedHandler:
        """Returns a thread that carries out the commands of a stream, one after the other."""

        def answers(commands: Iterator[bytes]) -> Iterator[bytes]:
            for data in stream.incoming(commands):
                stream.is_resting = False
                said: list[bytes] = []
                self.carry_out(data, said.append)
                yield from said
                stream.is_resting = True

        return ThreadedHandler(peer, answers, first=first, server_name=self._name)

    @property
    def is_quick(self) -> bool:
        """Whether a command is carried out in a moment now."""
        return self._store.is_quick

    def carry_out(self, data: bytes, answer: Callable[[bytes], object]) -> None:
        """Carries out a command and answers it, before readers are told that there is a new step. Raises MalformedMessage."""
        message = decode_message(pb.CommandShardRequest, data)
        self._on_chief_call()
        try:
            self._carry_out(message, lambda reply: answer(reply.SerializeToString()))
            return
        except PsError as error:
            failure = error.with_traceback(None)  # which would hold this frame, and with it the model
        except Exception:
            failure = defect(self._name)
        answer(pb.CommandShardResponse(call=message.call, error=encode_call_error(failure)).SerializeToString())

    def _carry_out(self, message: pb.CommandShardRequest, answer: Callable[[pb.CommandShardResponse], object]) -> None:
        match message.WhichOneof("command"):
            case "apply":
                self._store.apply_step(
                    codec.decode_apply_request(message.apply),
                    on_applied=lambda reply: answer(pb.CommandShardResponse(call=message.call, apply=codec.encode_apply_reply(reply))),
                )
            case "prepare":
                require(message.prepare, "apply")
                sums = self._store.prepare_step(codec.decode_apply_request(message.prepare.apply))
                answer(pb.CommandShardResponse(call=message.call, prepare=pb.PrepareStepResponse(sums=sums)))
            case "configure":
                self._store.configure(codec.decode_settings(message.configure))
                answer(pb.CommandShardResponse(call=message.call, configure=pb.ConfigureShardResponse()))
            case _:
                raise MalformedMessage(f"command {message.call}: it asks for nothing that this server knows; use the calls of their own")


class _Commands:
    """See FinishingHandler. One stream; as soon as a command may take long, a thread of its own carries out this and all later ones."""

    def __init__(self, service: CommandService, peer: Peer, context: grpc.ServicerContext) -> None:
        self._service, self._peer = service, peer
        self._stream = service.begin(context)
        self._threaded: ThreadedHandler | None = None

    def take(self, message: bytes) -> None:
        if self._threaded is not None:
            self._threaded.take(message)
        elif self._service.is_quick:
            self._stream.is_resting = False
            self._service.carry_out(message, self._peer.send)
            self._stream.rest()
        else:
            self._threaded = self._service.threaded(self._peer, self._stream, first=message)

    def finish(self) -> None:
        if self._threaded is not None:
            self._threaded.finish()
        else:
            self._peer.end()

    def close(self) -> None:
        self._service.end(self._stream)
        if self._threaded is not None:
            self._threaded.close()
