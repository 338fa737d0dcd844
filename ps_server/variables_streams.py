"""Variables that are asked for over one standing stream, also before they are there.

A request that has to wait holds no thread. What is small is copied and sent by the thread that takes gRPC's events, or that has made the
step; what is large, or what the reader is slow to take, by a thread of the stream's own. There is one request at a time: the next one is
taken when this one is answered.
"""

import queue
import threading

import grpc

from ps_protocol.call_deadlines import CallDeadlines
from ps_protocol.call_errors import encode_call_error
from ps_protocol.codec_reading import VariablesRequest, decode_standing_request
from ps_protocol.encodings import FloatEncoding
from ps_protocol.errors import PsError
from ps_protocol.standing_peer import Peer
from ps_protocol.status import defect
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.arena_stream import content_messages
from ps_server.idle_streams import IdleStreams
from ps_server.shard_model import SMALL_BYTES
from ps_server.store import ParameterStore
from ps_server.transactions import Reading

# Answers that a reader has not taken; from here on they are made one by one, as it takes them.
_MAX_UNSENT = 4

_Job = tuple[bytes, Reading, FloatEncoding]


class VariablesStreamOut:
    """See Handler. One stream of variables."""

    def __init__(
        self,
        store: ParameterStore,
        peer: Peer,
        context: grpc.ServicerContext,
        *,
        idle_streams: IdleStreams,
        deadlines: CallDeadlines,
        name: str,
    ) -> None:
        self._store, self._peer, self._idle_streams, self._deadlines, self._name = store, peer, idle_streams, deadlines, name
        self._stream = idle_streams.begin_standing(context, name="StreamVariables")
        self._waiting: _Wait | None = None
        self._jobs: queue.SimpleQueue[_Job | None] | None = None

    def take(self, message: bytes) -> None:
        """Answers a request, now or when its step is there."""
        self._peer.pause()
        try:
            wanted, max_wait_s = decode_standing_request(message)
        except PsError as error:
            self._break_off(error)
            return
        if max_wait_s > 0:
            self._waiting = wait = _Wait(self, wanted)
            if not self.look(wait):
                wait.begin(self._deadlines, max_wait_s)
        else:
            self.answer(wanted)

    def close(self) -> None:
        """The stream is over."""
        self._idle_streams.end_of(self._stream)
        wait = self._waiting
        if wait is not None and wait.settle():
            self._store.forget(wait.look)
        if self._jobs is not None:
            self._jobs.put(None)

    def look(self, wait: "_Wait") -> bool:
        """Answers a request whose step is there, or which is wrong; False if it waits on."""
        wanted = wait.wanted
        try:
            reading = self._store.await_variables(wait.look, epoch=wanted.epoch, step=wanted.step, layout_hash=wanted.layout_hash)
            if reading is None:
                return False
            if wait.settle():
                self._send(wanted, reading)
        except PsError as error:
            if wait.settle():
                self._break_off(error)
        except Exception:
            if wait.settle():
                self._break_off(defect(self._name))
        return True

    def answer(self, wanted: VariablesRequest) -> None:
        """Answers a request that does not wait, or not any more."""
        try:
            reading = self._store.open_variables(epoch=wanted.epoch, step=wanted.step, layout_hash=wanted.layout_hash)
            self._send(wanted, reading)
        except PsError as error:
            self._break_off(error)
        except Exception:
            self._break_off(defect(self._name))

    def forget(self, wait: "_Wait") -> None:
        """Has the store forget a request."""
        self._store.forget(wait.look)

    def _send(self, wanted: VariablesRequest, reading: Reading) -> None:
        header = pb.VariablesHeader(step=reading.step)
        if reading.step == wanted.held_step:
            self._peer.send(pb.StreamVariablesResponse(header=header).SerializeToString())
            self._done()
            return
        header.num_bytes = num_bytes = reading.nbytes(wanted.encoding)
        first = pb.StreamVariablesResponse(header=header).SerializeToString()
        if num_bytes <= SMALL_BYTES and self._peer.num_unsent < _MAX_UNSENT:
            for message in content_messages(first, reading, wanted.encoding):
                self._peer.send(message)
            self._done()
            return
        self._stream.is_resting = False
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._jobs,), name="standing-stream", daemon=True).start()
        self._jobs.put((first, reading, wanted.encoding))

    def _serve(self, jobs: "queue.SimpleQueue[_Job | None]") -> None:
        for first, reading, encoding in iter(jobs.get, None):
            messages = content_messages(first, reading, encoding)
            try:
                for message in self._stream.outgoing(messages):
                    if not self._peer.wait_for_room():
                        return
                    self._peer.send(message)
            except PsError as error:
                self._break_off(error)
            except Exception:
                self._break_off(defect(self._name))
            else:
                self._done()
            finally:
                messages.close()

    def _break_off(self, error: PsError) -> None:
        self._peer.send(pb.StreamVariablesResponse(header=pb.VariablesHeader(error=encode_call_error(error))).SerializeToString())
        self._done()

    def _done(self) -> None:
        self._stream.rest()
        self._peer.go_on()


class _Wait:
    """A request that waits for its step. Thread-safe: it is settled once, by the step, the time or the end of the stream."""

    def __init__(self, stream: VariablesStreamOut, wanted: VariablesRequest) -> None:
        self.wanted = wanted
        self._stream = stream
        self._lock = threading.Lock()
        self._is_settled = False
        self._watched: tuple[CallDeadlines, int] | None = None

    def begin(self, deadlines: CallDeadlines, max_wait_s: float) -> None:
        """Lets it wait so long."""
        number = deadlines.begin(self, timeout_s=max_wait_s)
        with self._lock:
            self._watched = deadlines, number
            is_late = self._is_settled
        if is_late:
            deadlines.end(number)

    def settle(self) -> bool:
        """Whether it is the caller's to answer; nobody else's then."""
        with self._lock:
            if self._is_settled:
                return False
            self._is_settled = True
            watched = self._watched
        if watched is not None:
            watched[0].end(watched[1])
        return True

    def look(self) -> None:
        """Something has changed."""
        if not self._is_settled:
            self._stream.look(self)

    def expire(self) -> None:
        """Its time is up."""
        if self.settle():
            self._stream.forget(self)
            self._stream.answer(self.wanted)
