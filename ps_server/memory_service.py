"""Sharing of memory with workers of the same host: offer, proof, grant, and the end of it."""

import os
from collections.abc import Iterator, Sequence

import grpc

from ps_protocol import memory_segments
from ps_protocol.codec import decode_message
from ps_protocol.errors import MalformedMessage, TruncatedStream, Unimplemented
from ps_protocol.memory_segments import Segment
from ps_protocol.status import answering
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.idle_streams import IdleStreams
from ps_server.sharing import Claim, Sharing
from ps_server.store import ParameterStore


class MemoryService:
    """Serves one store. Thread-safe."""

    def __init__(self, store: ParameterStore, *, idle_streams: IdleStreams) -> None:
        self._store = store
        self._idle_streams = idle_streams
        self._boot_id = memory_segments.boot_id()

    def ShareMemory(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Shares memory for as long as the stream lasts."""
        with (
            answering(context, server_name=f"ps {self._store.index}"),
            self._idle_streams.standing(context, name="ShareMemory") as stream,
        ):
            messages = (decode_message(pb.ShareMemoryRequest, message) for message in stream.incoming(requests))
            claim = self._claim(next(messages, None))
            with self._store.open_sharing(claim, on_end=context.cancel) as sharing:
                for response in _granted(sharing, claim.num_slots, messages):
                    yield response.SerializeToString()

    def _claim(self, message: pb.ShareMemoryRequest | None) -> Claim:
        if message is None or not message.HasField("claim"):
            raise MalformedMessage("ShareMemoryRequest: the stream does not begin with a claim; begin with it")
        claim = message.claim
        if not self._boot_id or claim.boot_id != self._boot_id:
            raise Unimplemented(
                f"ps {self._store.index}: you run on another host; memory is shared on one only", facts={"same_host": "false"}
            )
        return Claim(
            epoch=claim.epoch,
            worker=claim.worker,
            incarnation=claim.incarnation,
            layout_hash=claim.layout_hash,
            num_slots=claim.num_slots,
        )


def _granted(sharing: Sharing, num_slots: int, messages: Iterator[pb.ShareMemoryRequest]) -> Iterator[pb.ShareMemoryResponse]:
    """Answers wishes for memory, until there are no more."""
    while True:
        offered = sharing.offer(num_slots)
        if offered:
            yield pb.ShareMemoryResponse(offer=_offer(offered))
            proof = next(messages, None)
            if proof is None:
                raise TruncatedStream("the stream ended before the proof that its memory is mapped; nothing was changed")
            if not proof.HasField("proof"):
                raise MalformedMessage("ShareMemoryRequest: want the proof of what was offered, and nothing else")
            sharing.prove(proof.proof.nonces, offered)
        # What ends the stream may keep this frame for long, and whatever is named here with it: that shall not be as much as the model.
        offered = ()
        yield pb.ShareMemoryResponse(grant=pb.MemoryGrant(num_slots=sharing.num_slots))
        wish = next(messages, None)
        if wish is None:
            return
        if not wish.HasField("num_slots"):
            raise MalformedMessage("ShareMemoryRequest: want the number of slots that are wished for, and nothing else")
        num_slots = wish.num_slots


def _offer(segments: Sequence[Segment]) -> pb.MemoryOffer:
    pieces = [pb.MemorySegment(descriptor=segment.descriptor, num_bytes=segment.num_bytes) for segment in segments]
    return pb.MemoryOffer(pid=os.getpid(), segments=pieces)
