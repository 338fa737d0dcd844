"""The commands of a chief to one parameter server, on one stream: any thread sends them. Knows the stream; decides nothing."""

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc

from ps_protocol.errors import Cancelled, DeadlineExceeded, MalformedMessage, PsError, Unavailable
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.process.waiting import CallDeadlines
from ps_protocol.roles.request import RPCS, Request
from ps_protocol.rpc.client import Connection, not_understood
from ps_protocol.rpc.client_stream import Stream, StreamEnded, open_stream
from ps_protocol.rpc.status import from_ending
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_protocol.wire.call_errors import decode_call_error
from ps_protocol.wire.codec import decode_message

log = logging.getLogger("lockstep.rpc")

METHOD = "Command"

Report = Callable[[pb.CommandResponse | PsError], None]


@light_dataclass(slots=True, eq=False)
class _Command:
    """A command under way. Implements Expiring."""

    commands: "Commands"
    data: bytes
    report: Report
    request: Request[Any]
    timeout_s: float
    deadline: int = 0

    def expire(self) -> None:
        """Its time is up."""
        self.commands.expire(self)


class Commands:
    """Thread-safe; nothing here waits. The stream is opened with the first command, and again once it has broken.

    The thread that begins a command sends it, and a thread of this object takes the answers: no thread has to wake another on the way to
    the server.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._deadlines = CallDeadlines()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stream: Stream | None = None  # where there is none, the thread sends what is under way once it has opened one
        self._under_way: dict[int, _Command] = {}
        self._expired: _Command | None = None
        self._is_cut = self._is_closed = False
        self._thread: threading.Thread | None = None

    def begin(self, request: Request[Any], report: Report, *, timeout_s: float) -> int:
        """Sends a command, and returns its number.

        `report` is called once, by any thread, with the answer or the error. That is what the server says, Unavailable if the stream
        breaks, DeadlineExceeded, or Cancelled after `close`.
        """
        number = next(self._numbers)
        message = pb.CommandRequest(call=number)
        codec.write(request, getattr(message, RPCS[type(request)].field))
        under_way = _Command(self, message.SerializeToString(), report, request, timeout_s)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._under_way[number] = under_way
                under_way.deadline = self._deadlines.begin(under_way, timeout_s=timeout_s)
                if self._stream is not None:
                    self._stream.request(under_way.data)
                elif self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="lockstep-commands", daemon=True)
                    self._thread.start()
                else:
                    self._changed.notify()
        if is_closed:
            report(self._closed())
        return number

    def give_up(self, number: int) -> None:
        """Ignores the answer of a command; nothing is reported. Idempotent."""
        with self._lock:
            command = self._under_way.pop(number, None)
        if command is not None:
            self._deadlines.end(command.deadline)

    def expire(self, command: _Command) -> None:
        """A command takes too long: breaks the stream, and with it what is under way."""
        with self._lock:
            self._expired = command
        self._cut()

    def close(self) -> None:
        """Ends the commands under way with Cancelled. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._changed.notify()
        self._cut()
        self._deadlines.close()

    def _cut(self) -> None:
        self._is_cut = True
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def _run(self) -> None:
        while self._await_command():
            end: StreamEnded | Unavailable | None = None
            try:
                self._serve()
            except StreamEnded as found:
                end = found.with_traceback(None)
            except MalformedMessage as error:
                end = Unavailable(not_understood(self._connection.target, error).message)
            except Exception as error:
                if not self._is_closed:
                    log.warning("the stream of commands to %s failed cause=%r", self._connection.target, error)
            self._broken(end)
            del end
        self._broken(None)

    def _await_command(self) -> bool:
        """Waits until a command is under way; False: there will be none."""
        with self._lock:
            self._changed.wait_for(lambda: self._under_way or self._is_closed)
            return not self._is_closed

    def _serve(self) -> None:
        """Opens a stream, and takes answers until it ends, which it does in an error."""
        connection = self._connection
        stream = open_stream(connection.channel, connection.path(METHOD), metadata=connection.metadata())
        with self._lock:
            self._stream = stream
            for command in self._under_way.values():
                stream.request(command.data)
        if self._is_cut:
            stream.cancel()
        while True:
            answer = decode_message(pb.CommandResponse, stream.answer())
            with self._lock:
                answered = self._under_way.pop(answer.call, None)
            if answered is not None:  # it has not been given up
                self._deadlines.end(answered.deadline)
                answered.report(decode_call_error(answer.error) if answer.HasField("error") else answer)

    def _broken(self, end: StreamEnded | Unavailable | None) -> None:
        """Gives up the commands under way, which may have been carried out; the next command opens another stream."""
        with self._lock:
            stream, self._stream = self._stream, None
            is_cut, self._is_cut, expired, self._expired = self._is_cut, False, self._expired, None
            failed, self._under_way = self._under_way, {}
        if stream is not None:
            stream.end()
        for command in failed.values():
            self._deadlines.end(command.deadline)
            command.report(self._error(command, end, is_expired=command is expired, is_cut=is_cut))

    def _error(self, command: _Command, end: StreamEnded | Unavailable | None, *, is_expired: bool, is_cut: bool) -> PsError:
        target, awaited = self._connection.target, command.request.awaited
        if self._is_closed:
            return self._closed()
        if isinstance(end, Unavailable):
            return Unavailable(end.message)  # each command has an error of its own
        if is_expired:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            return from_ending(code, "", (), target=target, awaited=awaited, timeout_s=command.timeout_s)
        error = None
        if end is not None and end.code is not grpc.StatusCode.OK and not is_cut:
            error = from_ending(end.code, end.details, end.metadata, target=target, awaited=awaited, timeout_s=command.timeout_s)
        if error is None or isinstance(error, (Cancelled, DeadlineExceeded)):
            return Unavailable(f"cannot reach {target}: the stream of commands was cut; did it end?")
        return error

    def _closed(self) -> Cancelled:
        return Cancelled(f"{self._connection.target}: the connection was closed by this process")
