"""The ways to a parameter server that a step takes when all is well: one attempt, and nobody waits for it. Repeat and explain nothing."""

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable

from ps_protocol import codec_shard as codec
from ps_protocol.access import DEFAULT_ACCESS, Access
from ps_protocol.call_deadlines import CallDeadlines
from ps_protocol.call_errors import decode_call_error
from ps_protocol.codec import decode_message
from ps_protocol.connection import Connection
from ps_protocol.direct_stream import Stream, StreamEnded, open_stream
from ps_protocol.errors import PsError
from ps_protocol.shard import ApplyRequest
from ps_protocol.v1 import parameter_service_pb2 as pb

log = logging.getLogger("lockstep.chief")

SERVICE: str = pb.DESCRIPTOR.services_by_name["ParameterService"].full_name
# Short: whoever insists asks again, says what is wrong, and waits as long as a step may take.
_TIMEOUT_S = 1.0

Report = Callable[[bool], None]
Work = Callable[[], None]


class ShardCaller(Protocol):
    """Has steps applied by one shard. Thread-safe."""

    def begin(self, request: ApplyRequest, report: Report) -> Work | None:
        """Has a step applied, and never waits; `report` is called once, by any thread: False if the step is not known to be applied.

        Returns what the calling thread shall do itself, when it holds no lock, where the way to another thread would take longer.
        """

    def close(self) -> None:
        """Ends what is under way. Idempotent, never waits."""


@runtime_checkable
class DirectLink(Protocol):
    """A link that has such a way, too."""

    def open_caller(self) -> ShardCaller:
        """Returns the way; whoever opens it closes it."""


class BlockingCaller:
    """Implements ShardCaller by a call that blocks until the step is applied, and raises PsError: in a thread of its own.

    `is_quick` says whether the call would now return in a moment, without waiting for anybody: then any thread may make it.
    """

    def __init__(self, apply_step: Callable[[ApplyRequest], object], *, is_quick: Callable[[], bool], name: str) -> None:
        self._apply_step, self._is_quick = apply_step, is_quick
        self._steps: queue.SimpleQueue[tuple[ApplyRequest, Report] | None] = queue.SimpleQueue()
        # A thread that hangs at a shard must not keep the process from ending.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, request: ApplyRequest, report: Report) -> Work | None:
        """Has a step applied: by the calling thread, if that takes no time."""
        if self._is_quick():
            return partial(self._apply, request, report)
        self._steps.put((request, report))
        return None

    def close(self) -> None:
        """Ends the thread, as soon as the shard lets it."""
        self._steps.put(None)

    def _run(self) -> None:
        for request, report in iter(self._steps.get, None):
            self._apply(request, report)

    def _apply(self, request: ApplyRequest, report: Report) -> None:
        is_applied = False
        try:
            self._apply_step(request)
            is_applied = True
        except PsError as error:
            log.debug("the fast way did not apply step=%d cause=%s", request.step, error.message)
        except Exception:
            log.exception("the fast way broke off step=%d", request.step)
        report(is_applied)


class GrpcShardCaller:
    """Implements ShardCaller over a standing stream of its own.

    Who begins a step sends it, and a thread of this caller's takes the answers: no thread has to wake another on the way to the shard.
    """

    def __init__(self, address: str, *, name: str, access: Access = DEFAULT_ACCESS) -> None:
        self._connection = Connection(address, name=name, service=SERVICE, access=access)
        self._deadlines = CallDeadlines()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stream: Stream | None = None
        self._unsent: list[bytes] = []  # what is to be sent once there is a stream
        self._under_way: dict[int, tuple[Report, int]] = {}  # by number of the command: whom to tell, and its deadline
        self._is_cut = self._is_closed = False
        threading.Thread(target=self._run, name=f"steps of {name}", daemon=True).start()

    def begin(self, request: ApplyRequest, report: Report) -> None:
        """Sends a step."""
        number = next(self._numbers)
        data = pb.CommandShardRequest(call=number, apply=codec.encode_apply_request(request)).SerializeToString()
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._under_way[number] = report, self._deadlines.begin(self, timeout_s=_TIMEOUT_S)
                if self._stream is not None:
                    self._stream.send(data)
                else:
                    self._unsent.append(data)
                    self._changed.notify()
        if is_closed:
            report(False)

    def expire(self) -> None:
        """A step takes too long: breaks what is under way."""
        self._is_cut = True
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        """Breaks the steps under way."""
        with self._lock:
            self._is_closed = True
            self._changed.notify()
        self.expire()
        self._deadlines.close()
        self._connection.close()

    def _run(self) -> None:
        while self._await_first():
            try:
                self._serve()
            except StreamEnded as end:
                log.debug("the fast way to %s has ended cause=%s", self._connection.target, end)
            except Exception as error:
                if not self._is_closed:
                    log.warning("the fast way to %s broke off cause=%r", self._connection.target, error)
            self._give_up()

    def _await_first(self) -> bool:
        """Waits for a step; False: there will be none."""
        with self._lock:
            self._changed.wait_for(lambda: self._unsent or self._is_closed)
            return not self._is_closed

    def _serve(self) -> None:
        """Opens a stream, and takes answers until it ends, which it does in an error."""
        connection = self._connection
        stream = open_stream(connection.channel, connection.path("CommandShard"), metadata=connection.metadata())
        with self._lock:
            self._stream, unsent = stream, [*self._unsent]
            self._unsent.clear()
            for data in unsent:
                stream.send(data)
        if self._is_cut:
            stream.cancel()
        while True:
            answer = decode_message(pb.CommandShardResponse, stream.receive())
            with self._lock:
                report, deadline = self._under_way.pop(answer.call)
            self._deadlines.end(deadline)
            is_applied = not answer.HasField("error")
            if not is_applied:
                log.debug("the fast way did not apply a step cause=%s", decode_call_error(answer.error).message)
            report(is_applied)

    def _give_up(self) -> None:
        """What is under way is not known to be applied; the next step opens another stream."""
        with self._lock:
            stream, self._stream, self._is_cut = self._stream, None, False
            given_up = [*self._under_way.values()]
            self._under_way.clear()
            self._unsent.clear()
        for report, deadline in given_up:
            self._deadlines.end(deadline)
            report(False)
        if stream is not None:
            stream.end()
