"""The calls by which a chief leaves something for its successor, and saves and restores shards."""

import contextlib
from collections.abc import Callable, Iterator

import grpc

from ps_protocol import codec_checkpoints
from ps_protocol.codec import decode_message
from ps_protocol.status import answering
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.store import ParameterStore


class RecoveryService:
    """Serves one store. Thread-safe. `on_chief_call` is told of each call; it must not block."""

    def __init__(self, store: ParameterStore, *, on_chief_call: Callable[[], None]) -> None:
        self._store = store
        self._on_chief_call = on_chief_call
        self._name = f"ps {store.index}"

    def KeepRecord(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """See the .proto."""
        with self._answering(context):
            message = decode_message(pb.KeepRecordRequest, request)
            self._store.keep_record(
                epoch=message.epoch,
                chief_incarnation=message.chief_incarnation,
                version=message.version,
                record=message.record,
            )
            return pb.KeepRecordResponse().SerializeToString()

    def SaveShard(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """See the .proto."""
        with self._answering(context):
            message = decode_message(pb.SaveShardRequest, request)
            progress = self._store.save(
                codec_checkpoints.decode_save_request(message), max_wait_s=codec_checkpoints.decode_max_wait(message)
            )
            return codec_checkpoints.encode_save_progress(progress).SerializeToString()

    def RestoreShard(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        """See the .proto."""
        with self._answering(context):
            message = decode_message(pb.RestoreShardRequest, request)
            progress = self._store.restore(
                codec_checkpoints.decode_restore_request(message), max_wait_s=codec_checkpoints.decode_max_wait(message)
            )
            return codec_checkpoints.encode_restore_progress(progress).SerializeToString()

    @contextlib.contextmanager
    def _answering(self, context: grpc.ServicerContext) -> Iterator[None]:
        with answering(context, server_name=self._name):
            self._on_chief_call()
            yield
