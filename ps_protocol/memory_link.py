"""The conversation by which a worker comes to a shard's memory, and the stream that keeps it. Knows messages and segments; no gradient."""

import queue
import threading
from typing import Any

from ps_protocol import memory_segments
from ps_protocol.codec import decode_message
from ps_protocol.connection import Connection, translating
from ps_protocol.errors import MalformedMessage, Unavailable, Unimplemented
from ps_protocol.interrupts import CancellingOnInterrupt
from ps_protocol.memory_segments import Segment
from ps_protocol.shared_memory import SegmentKind
from ps_protocol.v1 import parameter_service_pb2 as pb

METHOD = "ShareMemory"
# Beyond any cluster, so that nonsense is noticed before it is mapped.
_MAX_SEGMENTS = 1_000
# How long the shard may take to hear that the stream ends.
_GOODBYE_S = 0.1


class MemoryNotShared(Unimplemented):
    """Memory cannot be shared with this shard. Its fact "same_host" is "true" if the shard runs on the same host all the same."""

    def __init__(self, message: str, *, is_same_host: bool) -> None:
        super().__init__(message, facts={"same_host": "true" if is_same_host else "false"})


class MemoryLink:
    """One stream of ShareMemory. `close` ends it, and with it the sharing; so does whatever else ends it. For one thread at a time."""

    def __init__(self, connection: Connection, *, arena_bytes: int, timeout_s: float) -> None:
        self.target = connection.target
        self._arena_bytes = arena_bytes
        self._timeout_s = timeout_s
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ended, self._over = threading.Event(), threading.Event()
        with translating(self.target, awaited="its memory", timeout_s=timeout_s):
            self._call: Any = connection.open_stream(METHOD, iter(self._sent.get, None))
        if not self._call.add_callback(self._end):
            self._end()

    @property
    def is_open(self) -> bool:
        """Whether the shard still shares, as far as is known here."""
        return not self._ended.is_set()

    def claim(self, claim: pb.MemoryClaim) -> tuple[list[Segment], int]:
        """Returns the segments, that of the variables first, and the number of slots. Raises MemoryNotShared, or what the shard raises."""
        return self._converse(pb.ShareMemoryRequest(claim=claim), first_kind=SegmentKind.VARIABLES)

    def want(self, num_slots: int) -> tuple[list[Segment], int]:
        """Asks for so many slots in all; returns the new ones and the number of all."""
        return self._converse(pb.ShareMemoryRequest(num_slots=num_slots), first_kind=SegmentKind.GRADIENTS)

    def close(self) -> None:
        """Ends the stream, and says so to the shard, which then gives the memory back at once. Takes 0.1 s at most. Idempotent."""
        self._ended.set()
        self._sent.put(None)
        self._over.wait(_GOODBYE_S)
        self._call.cancel()

    def _end(self) -> None:
        self._ended.set()
        self._over.set()
        # Lets go of the thread by which gRPC sends.
        self._sent.put(None)

    def _converse(self, request: pb.ShareMemoryRequest, *, first_kind: SegmentKind) -> tuple[list[Segment], int]:
        """Whatever goes wrong ends the stream: the shard then takes back what it has offered."""
        try:
            with translating(self.target, awaited="its memory", timeout_s=self._timeout_s):
                answer = self._ask(request)
                segments: list[Segment] = []
                if answer.HasField("offer"):
                    segments = self._map(answer.offer, first_kind)
                    answer = self._ask(pb.ShareMemoryRequest(proof=pb.MemoryProof(nonces=[segment.nonce for segment in segments])))
        except BaseException:
            self.close()
            raise
        if not answer.HasField("grant"):
            self.close()
            raise MalformedMessage(f"{self.target}: its answer about shared memory is no grant")
        return segments, answer.grant.num_slots

    def _ask(self, request: pb.ShareMemoryRequest) -> pb.ShareMemoryResponse:
        # A message has no deadline of its own in a stream that lasts; this one cancels the stream, and may not outlive the question.
        limit = threading.Timer(self._timeout_s, self._call.cancel)
        limit.daemon = True
        limit.start()
        try:
            with CancellingOnInterrupt(outlives_block=True) as block:
                block.watch(self._call)
                self._sent.put(request.SerializeToString())
                answer = next(self._call, None)
        finally:
            limit.cancel()
        if answer is None:
            raise Unavailable(f"{self.target}: the stream by which its memory is shared has ended")
        return decode_message(pb.ShareMemoryResponse, answer)

    def _map(self, offer: pb.MemoryOffer, first_kind: SegmentKind) -> list[Segment]:
        if len(offer.segments) > _MAX_SEGMENTS:
            raise MalformedMessage(f"{self.target}: offers {len(offer.segments)} segments, {_MAX_SEGMENTS} at most")
        kinds = [first_kind, *[SegmentKind.GRADIENTS] * len(offer.segments)]
        try:
            return [
                memory_segments.map_segment(
                    pid=offer.pid,
                    descriptor=segment.descriptor,
                    num_bytes=segment.num_bytes,
                    kind=kind,
                    arena_bytes=self._arena_bytes,
                )
                for segment, kind in zip(offer.segments, kinds, strict=False)
            ]
        except (OSError, ValueError) as error:
            raise MemoryNotShared(f"{self.target}: its memory cannot be mapped here: {error}", is_same_host=True) from None
