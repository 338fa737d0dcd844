"""One connection that carries payloads for a gRPC stream, which says what each of them is. Knows bytes; no message.

A payload is its number and its length (two uint64, little-endian), the bytes, and the number again: only then it is whole and may be used.
A zero in place of the last number takes it back.
Whatever else comes breaks the connection off, and the stream says why, or the payload is sent once more over another one.
"""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator

from ps_protocol.errors import Unavailable
from ps_protocol.roles.identity import Address, parse_address
from ps_protocol.roles.shard import Invitation

NONCE_BYTES = 16
# What the path of a server's Unix socket for data has, after that of its own.
SUFFIX = ".data"
# What a server says to a connection that it has asked for.
WELCOME = b"\x01"
_CONNECT_TIMEOUT_S = 3.0
# A peer that is gone without a word is given up as early as gRPC does it.
_SILENCE_S, _PROBE_S, _NUM_PROBES = 20, 5, 2
_BEGIN, _END = struct.Struct("<QQ"), struct.Struct("<Q")
# Ends a payload that its sender takes back, in place of the number. Numbers begin at 1.
_WITHDRAWN = 0
# One call of the system takes so many bytes, and waits for them so long: without that, each of the kernel's packets would need a poll and a
# read of its own.
_MOST_AT_ONCE, _AT_ONCE_S = 64 << 20, 0.1
# Fills some memory with what comes within a moment, and returns the number of bytes.
Receive = Callable[[memoryview], int]


class DataSocket:
    """One connection. `send` and `receive` belong to one thread at a time; any thread may `close`.

    All methods raise Unavailable when the connection is over, or does not carry what was announced; it is closed then.
    """

    def __init__(self, connection: socket.socket, *, nonce: bytes, peer: str) -> None:
        self.nonce = nonce
        self._connection, self._peer = connection, peer
        self.last_number = 0
        # A handler of a signal may close what its own thread is about to use.
        self._lock = threading.RLock()
        self._is_busy = self._is_closed = False
        self._num_wanted = 0
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, int(_AT_ONCE_S * 1_000_000)))
        if connection.family != socket.AF_UNIX:
            _set_options(connection)

    @property
    def is_over(self) -> bool:
        """Whether it is closed, by either side, or carries bytes that were not announced; for an idle connection."""
        with self._lock:
            if self._is_closed:
                return True
            try:
                self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                pass
            return True

    def next_number(self) -> int:
        """Returns the number of the next payload, which the stream announces."""
        self.last_number += 1
        return self.last_number

    def send(self, number: int, num_bytes: int, chunks: Iterable[memoryview], *, confirm: Callable[[], None] = lambda: None) -> None:
        """Sends a payload from the chunks' own memory. `confirm` is called when all has left it; if it raises, that is taken back."""
        with self._using():
            try:
                self._connection.sendall(_BEGIN.pack(number, num_bytes), socket.MSG_MORE if num_bytes else 0)
                for chunk in chunks:
                    self._connection.sendall(chunk)
            except OSError as error:
                raise self._lost(error) from None
            end = _WITHDRAWN
            try:
                confirm()
                end = number
            finally:
                try:
                    self._connection.sendall(_END.pack(end))
                except OSError as error:
                    raise self._lost(error) from None

    def receive(
        self,
        number: int,
        num_bytes: int,
        fill: Callable[[Receive], bool],
        *,
        on_wait: Callable[[], None] = lambda: None,
        on_bytes: Callable[[], None] = lambda: None,
    ) -> bool:
        """Receives a payload; `fill` gives a `Receive` the memory that comes next. False, and closed, if it does not want any more, or if
        the sender has taken the payload back.

        `on_wait` is called before each wait that is longer than a moment, `on_bytes` after it.
        """
        with self._using():
            try:
                begin = self._exactly(_BEGIN.size, on_wait, on_bytes)
                if begin != _BEGIN.pack(number, num_bytes):
                    raise self._broken(f"payload {number} of {num_bytes} bytes did not follow; it is not used")
                self._num_wanted = num_bytes
                while self._num_wanted:
                    before = self._num_wanted
                    if not fill(self._take):
                        self.close()
                        return False
                    if self._num_wanted == before:
                        self._await_bytes(on_wait, on_bytes)
                end = self._exactly(_END.size, on_wait, on_bytes)
                if end == _END.pack(_WITHDRAWN):
                    self.close()
                    return False
                if end != _END.pack(number):
                    raise self._broken(f"payload {number} does not end after {num_bytes} bytes; it is not used")
            except OSError as error:
                raise self._lost(error) from None
            return True

    def close(self) -> None:
        """Ends the connection, and with it what is under way. Idempotent; never waits."""
        with self._lock:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            if not self._is_busy:
                self._connection.close()

    def _take(self, memory: memoryview) -> int:
        try:
            count = self._connection.recv_into(memory, min(len(memory), self._num_wanted, _MOST_AT_ONCE), socket.MSG_WAITALL)
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionResetError("it was closed by the other side")
        self._num_wanted -= count
        return count

    def _exactly(self, num_bytes: int, on_wait: Callable[[], None], on_bytes: Callable[[], None]) -> bytes:
        received, self._num_wanted = bytearray(num_bytes), num_bytes
        while self._num_wanted:
            if not self._take(memoryview(received)[num_bytes - self._num_wanted :]):
                self._await_bytes(on_wait, on_bytes)
        return bytes(received)

    def _await_bytes(self, on_wait: Callable[[], None], on_bytes: Callable[[], None]) -> None:
        on_wait()
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.poll()
        on_bytes()

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise Unavailable(f"{self._peer}: the data socket is closed")
            self._is_busy = True
        try:
            yield
        except BaseException:
            self.close()
            raise
        finally:
            with self._lock:
                self._is_busy = False
                if self._is_closed:
                    # Not before: the number of a closed descriptor may be another's at once.
                    self._connection.close()

    def _lost(self, error: OSError) -> Unavailable:
        reason = "it was closed" if self._is_closed else error.strerror or str(error)
        return Unavailable(f"{self._peer}: the data socket was lost in the middle of a payload: {reason}; nothing was changed")

    def _broken(self, what: str) -> Unavailable:
        return Unavailable(f"{self._peer}: the data socket carries something else: {what}")


def connect(address: str, invitation: Invitation, *, peer: str) -> DataSocket:
    """Connects to a server's listener, from where its gRPC `address` is reached. Takes 3 s at most. Raises Unavailable."""
    own = parse_address(address)
    is_port = 0 < invitation.port < 1 << 16
    if len(invitation.nonce) != NONCE_BYTES or bool(invitation.path) != own.is_unix or is_port == own.is_unix:
        # Else a server could have its callers talk to any server on their own machine.
        raise Unavailable(f"{peer} invites to a data socket that is none of its own")
    target = Address(path=own.path + SUFFIX) if own.is_unix else Address(host=own.host, port=invitation.port)
    try:
        if target.is_unix:
            connection = _connect_unix(target.path)
        else:
            connection = socket.create_connection((target.host, target.port), timeout=_CONNECT_TIMEOUT_S)
    except OSError as error:
        raise Unavailable(f"cannot reach {peer} at {target} for a data socket: {error.strerror or error}") from None
    try:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        connection.sendall(invitation.nonce)
        if connection.recv(len(WELCOME)) != WELCOME:
            raise Unavailable(f"{peer} has closed a data socket at {target} before its first use")
    except OSError as error:
        connection.close()
        raise Unavailable(f"{peer} does not answer at {target} on a data socket: {error.strerror or error}") from None
    except BaseException:
        connection.close()
        raise
    return DataSocket(connection, nonce=invitation.nonce, peer=peer)


def _connect_unix(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(_CONNECT_TIMEOUT_S)
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def _set_options(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, (_SILENCE_S + _PROBE_S * _NUM_PROBES) * 1_000)
