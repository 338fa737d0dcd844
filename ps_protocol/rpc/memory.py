"""Memory that a parameter server shares with a worker: how it is granted, and pushes and reads in it. Knows buffers, arenas and calls."""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import LimitExceeded, MalformedMessage, PsError, Unavailable, Unimplemented
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array
from ps_protocol.process.waiting import CallDeadlines
from ps_protocol.roles.shard import PushHeader, PushReply, ReadRequest
from ps_protocol.rpc.client import CancellingOnInterrupt, Connection, translating
from ps_protocol.shared_memory import segment as memory_segments
from ps_protocol.shared_memory import words
from ps_protocol.shared_memory.buffers import GradientBuffer, GradientBuffers, cut
from ps_protocol.shared_memory.segment import SharedSegment
from ps_protocol.shared_memory.variables import SharedVariables
from ps_protocol.shared_memory.words import SegmentKind
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire.codec import decode_message

# The conversation by which a worker comes to a shard's memory, and the stream that keeps it.


METHOD = "ShareMemory"
# The server writes a step to its memory before it reports the step: after the report, one look is enough.
_MAX_LOOKS = 3
# How long the shard may take to hear that the stream ends.
_GOODBYE_S = 0.1
# How long it may take to answer a wish for more memory, while its worker waits; otherwise gradients are sent.
_MORE_TIMEOUT_S = 0.9


class MemoryNotShared(Unimplemented):
    """Memory cannot be shared with this shard. Its fact "same_host" is "true" if the shard runs on the same host all the same."""

    def __init__(self, message: str, *, is_same_host: bool) -> None:
        super().__init__(message, facts={"same_host": "true" if is_same_host else "false"})


class MemoryLink:
    """One stream of ShareMemory. `close` ends it, and with it the sharing; so does whatever else ends it. For one thread at a time.

    `deadlines` watches how long its answers take. Implements Expiring.
    """

    def __init__(self, connection: Connection, *, arena_bytes: int, timeout_s: float, deadlines: CallDeadlines) -> None:
        self.target = connection.target
        self._deadlines = deadlines
        self._arena_bytes = arena_bytes
        self._timeout_s = timeout_s
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Whether the shard still shares, as far as is known here.
        self.is_open = True
        self._over = threading.Event()
        with translating(self.target, awaited="its memory", timeout_s=timeout_s):
            self._call: Any = connection.open_stream(METHOD, iter(self._sent.get, None))
        if not self._call.add_callback(self._end):
            self._end()

    def claim(self, claim: pb.MemoryClaim) -> tuple[SharedSegment, list[SharedSegment]]:
        """Returns the segment of the variables and the buffers. Raises MemoryNotShared, or what the shard raises."""
        wanted = [SegmentKind.VARIABLES, *[SegmentKind.GRADIENTS] * claim.num_buffers]
        found = self._converse(pb.ShareMemoryRequest(claim=claim), wanted, timeout_s=self._timeout_s)
        if not found:
            self.close()
            raise MalformedMessage(f"{self.target}: it grants memory, and has offered none for the variables; is it of the same version?")
        return found[0], found[1:]

    def want(self, num_buffers: int, *, num_more: int) -> list[SharedSegment]:
        """Asks for so many buffers in all, of which so many are new; returns the new ones. Takes two seconds at most."""
        wanted = [SegmentKind.GRADIENTS] * num_more
        return self._converse(pb.ShareMemoryRequest(num_buffers=num_buffers), wanted, timeout_s=min(self._timeout_s, _MORE_TIMEOUT_S))

    def close(self) -> None:
        """Ends the stream, and says so to the shard, which then gives the memory back at once. Takes 0.1 s at most. Idempotent."""
        self.is_open = False
        self._sent.put(None)
        self._over.wait(_GOODBYE_S)
        self._call.cancel()

    def expire(self) -> None:
        """Ends the stream, since an answer takes too long."""
        self._call.cancel()

    def _end(self) -> None:
        self.is_open = False
        self._over.set()
        # Lets go of the thread by which gRPC sends.
        self._sent.put(None)

    def _converse(self, request: pb.ShareMemoryRequest, wanted: Sequence[SegmentKind], *, timeout_s: float) -> list[SharedSegment]:
        """Returns the segments that are offered: as many as are wanted, or fewer.

        Whatever goes wrong ends the stream: the shard then takes back what it has offered.
        """
        try:
            with translating(self.target, awaited="its memory", timeout_s=timeout_s):
                answer = self._ask(request, timeout_s=timeout_s)
                segments: list[SharedSegment] = []
                if answer.HasField("offer"):
                    segments = self._map(answer.offer, wanted)
                    proof = pb.MemoryProof(nonces=[segment.nonce for segment in segments])
                    answer = self._ask(pb.ShareMemoryRequest(proof=proof), timeout_s=timeout_s)
                if not answer.HasField("grant"):
                    raise MalformedMessage("its answer about shared memory is no grant")
        except BaseException:
            self.close()
            raise
        return segments

    def _ask(self, request: pb.ShareMemoryRequest, *, timeout_s: float) -> pb.ShareMemoryResponse:
        number = self._deadlines.begin(self, timeout_s=timeout_s)
        try:
            with CancellingOnInterrupt(outlives_block=True) as block:
                block.watch(self._call)
                self._sent.put(request.SerializeToString())
                answer = next(self._call, None)
        finally:
            self._deadlines.end(number)
        if answer is None:
            raise Unavailable(f"{self.target}: the stream by which its memory is shared has ended")
        return decode_message(pb.ShareMemoryResponse, answer)

    def _map(self, offer: pb.MemoryOffer, wanted: Sequence[SegmentKind]) -> list[SharedSegment]:
        if len(offer.segments) > len(wanted):
            raise MalformedMessage(f"it offers {len(offer.segments)} segments of memory, {len(wanted)} were requested")
        try:
            return [
                memory_segments.map_segment(
                    pid=offer.pid,
                    descriptor=segment.descriptor,
                    num_bytes=segment.num_bytes,
                    kind=kind,
                    arena_bytes=self._arena_bytes,
                )
                for segment, kind in zip(offer.segments, wanted, strict=False)
            ]
        except (OSError, ValueError) as error:
            raise MemoryNotShared(f"{self.target}: its memory cannot be mapped here: {error}", is_same_host=True) from None


# The memory itself, once it has been granted.
#
# A push is a few numbers in a buffer's header, and a read is the server's own memory. In all other cases (another epoch, rows, a step that
# is not open, a server that ends) the server is called: it decides, and says why.


log = logging.getLogger("lockstep.rpc")

# Makes the call that a contribution takes.
Send = Callable[[PushHeader, Segments], PushReply]


def share_memory(
    connection: Connection, claim: pb.MemoryClaim, *, layout: Layout, timeout_s: float, deadlines: CallDeadlines
) -> "SharedMemory":
    """Maps the memory of a shard whose variables stand, for the worker of a claim. Blocks for a few calls.

    Raises MemoryNotShared if that cannot be, and what any call raises.
    """
    claim.boot_id = memory_segments.boot_id()
    if not claim.boot_id:
        raise MemoryNotShared(f"{connection.target}: this system has no memory without a name", is_same_host=False)
    link = MemoryLink(connection, arena_bytes=layout.nbytes, timeout_s=timeout_s, deadlines=deadlines)
    try:
        variables, buffers = link.claim(claim)
    except MemoryNotShared:
        raise
    except Unimplemented as error:
        # A server that can says whether it is on this host; one that does not know the method says nothing.
        raise MemoryNotShared(error.message, is_same_host=error.facts.get("same_host") == "true") from None
    except LimitExceeded as error:
        raise MemoryNotShared(error.message, is_same_host=True) from None
    own = GradientBuffers(variables.words, worker=claim.worker, incarnation=claim.incarnation)
    for buffer in buffers:
        own.add(buffer.arenas[0], buffer.words)
    return SharedMemory(link, SharedVariables(variables, layout_hash=layout.hash), own, layout=layout)


class SharedMemory:
    """The memory that a shard and one incarnation of a worker share, which carries what can be read and pushed without a message.

    Thread-safe. Made by `share_memory`. Arrays that it has given out stay readable for ever. `arena_bytes`: of one copy of the dense
    variables, or of their gradients.
    """

    def __init__(self, link: MemoryLink, variables: SharedVariables, buffers: GradientBuffers, *, layout: Layout) -> None:
        self.arena_bytes = layout.nbytes
        self._link = link
        self._variables = variables
        self._buffers = buffers
        self._layout_hash, self._num_slices = layout.hash, len(layout.slices)
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether memory is shared; once it is not, everything travels."""
        return self._link.is_open

    def read(self, request: ReadRequest, into: Segments) -> int | None:
        """Copies the variables of a step into the caller's memory, and returns their step; None: the shard has to be asked."""
        return self._variables.copy(request, into) if self._link.is_open and not request.slot else None

    def view(self, request: ReadRequest, *, ask: Callable[[ReadRequest, Segments], int]) -> Array | None:
        """Returns the arena of the step that is wanted where the shard has it, read-only; None once memory is not shared.

        It is overwritten as soon as the step after the next is being made. There are two such arrays, and they stay the same ones. `ask`
        reads from the shard, which says why the step is not there: raises what that raises.
        """
        assert request.step is not None
        for _ in range(_MAX_LOOKS):
            if not self._link.is_open:
                return None
            found = self._variables.view(epoch=request.epoch, step=request.step, layout_hash=request.layout_hash)
            if found is not None:
                return found
            # If it says nothing, the step has come meanwhile.
            ask(dataclasses.replace(request, held_step=request.step), Segments(()))
        log.warning("%s: it reports step %d, and its memory does not have it; its memory is not used", self._link.target, request.step)
        self._link.close()
        return None

    def gradients(self) -> Array | None:
        """Returns an arena to write the next gradients into, whose push then need not copy them; None once memory is not shared.

        The same one until it has been pushed, and never one whose contribution may still be applied. It is not cleared. Raises
        TooManyPushes if there is none that is free, and no more can be had.
        """
        return self._memory_of(self._free_buffer)

    def kept(self) -> Array | None:
        """Returns the arena of one buffer that is set apart: always the same, and written by pushes from it only, so its views can be kept.

        None once memory is not shared. Raises TooManyPushes while the contribution that was last in it may still be applied.
        """
        return self._memory_of(self._kept_buffer)

    def push(self, header: PushHeader, gradients: Segments) -> PushReply | None:
        """Stages one contribution if that takes no call; else does nothing and returns None."""
        with self._lock:
            return self._push(header, gradients)

    def push_by(self, send: Send, header: PushHeader, gradients: Segments) -> PushReply:
        """Stages one contribution, by `send` if the shard has more to know than a buffer says: then the arena need not travel.

        An encoded one travels.
        """
        is_encoded = header.encoding is not FloatEncoding.AS_IS
        with self._lock:
            reply = None if is_encoded else self._push(header, gradients)
            if reply is not None:
                return reply
            has_arena = len(header.absent) < max(1, self._num_slices) and not is_encoded
            if has_arena and gradients.nbytes >= self.arena_bytes and self._is_mine(header):
                buffers = self._buffers
                buffer = buffers.of(header.push_id) or buffers.for_pieces(gradients.pieces) or self._free_buffer()
                if buffer is not None:
                    # Perhaps a buffer was all that was missing.
                    return self._push(header, gradients) or self._push_beside(buffer, send, header, gradients)
            self._buffers.pass_over(header)
        return send(header, gradients)

    def close(self) -> None:
        """Gives the memory back. Idempotent."""
        self._link.close()

    def _push(self, header: PushHeader, gradients: Segments) -> PushReply | None:
        if header.sparse or header.absent or header.metrics or header.formulas or not self._is_mine(header):
            return None
        if header.refused and self._buffers.release(header.refused):
            return None
        if gradients.nbytes != self.arena_bytes or not self._buffers.can_commit(header):
            return None
        buffer = self._buffers.for_pieces(gradients.pieces)
        if buffer is None:
            return None
        buffer.fill(gradients.pieces)
        reply = self._buffers.commit(buffer, header)
        # If it was closed meanwhile, the server may not have seen this one: it is sent, and still counts once.
        return None if self._buffers.is_closed else reply

    def _push_beside(self, buffer: GradientBuffer, send: Send, header: PushHeader, gradients: Segments) -> PushReply:
        """The arena lies in the buffer; only the rest travels."""
        arena, rest = cut(gradients.pieces, self.arena_bytes)
        is_repeated = self._buffers.begin_call(buffer, arena, header)
        told = dataclasses.replace(header, gradient_buffer=buffer.index, refused=self._buffers.release(header.refused))
        reply = send(told, Segments(rest))
        self._buffers.end_call(buffer, header, reply.result, is_repeated=is_repeated)
        return reply

    def _is_mine(self, header: PushHeader) -> bool:
        return (
            self._link.is_open
            and not self._buffers.is_closed
            and self._variables.epoch == header.era.epoch
            and header.layout_hash == self._layout_hash
            and self._buffers.are_of(header.push_id)
        )

    def _memory_of(self, find: Callable[[], GradientBuffer | None]) -> Array | None:
        with self._lock:
            buffer = find() if self._link.is_open else None
            if buffer is not None:
                return buffer.memory
            if not self._link.is_open:
                return None
            limit, in_flight = self._variables.max_buffers, self._buffers.num_busy
        raise words.too_many_pushes(self._buffers.worker, in_flight=in_flight, limit=limit)

    def _kept_buffer(self) -> GradientBuffer | None:
        if not self._buffers.has_kept:
            buffer = self._free_buffer()
            if buffer is not None:
                self._buffers.keep(buffer)
        return self._buffers.kept()

    def _free_buffer(self) -> GradientBuffer | None:
        buffer = self._buffers.free()
        if buffer is None and len(self._buffers) < self._variables.max_buffers:
            try:
                segments = self._link.want(len(self._buffers) + 1, num_more=1)
            except PsError as error:
                log.warning("%s: no more memory to share: %s", self._link.target, error.message)
                return None
            for segment in segments:
                self._buffers.add(segment.arenas[0], segment.words)
            buffer = self._buffers.free()
        return buffer
