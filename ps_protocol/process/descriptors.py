"""TCP sockets of this process that a library has opened, found by their descriptors. Knows Linux; no gRPC, no role.

gRPC gives no access to its sockets, so they are found by their descriptors. At any moment a descriptor may be closed, and its number may
belong to another file; every function here tolerates that. On other systems than Linux no sockets are found.
"""

import ctypes
import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

_DIRECTORY = "/proc/self/fd"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)
# Python has no names for these. The last one is where the kernel says of a connection how many bytes have left, and how many have come.
_SO_COOKIE, _TCP_MD5SIG_EXT, _BY_PREFIX, _AT_BYTES = 57, 32, 1, 120
_LIBRARY, _NOWHERE = ctypes.CDLL(None), struct.pack("=H14x", socket.AF_UNSPEC)


class Network(NamedTuple):
    """Addresses that begin with the same bits. One of IPv4 is written as in IPv6 (::ffff:127.0.0.1), its bits counted as in IPv4."""

    address: bytes
    num_bits: int

    @property
    def is_v4(self) -> bool:
        """Whether the network is one of IPv4."""
        return self.address.startswith(_MAPPED)


_MAPPED = bytes(10) + b"\xff\xff"
EVERYWHERE = (Network(_MAPPED + bytes(4), 0), Network(bytes(16), 0))


class Seen(NamedTuple):
    """A connection: its unique number, and the bytes received and sent. All 0 for anything else."""

    number: int
    num_received: int
    num_sent: int


_NO_CONNECTION = Seen(0, 0, 0)


def network_of(host: str) -> Network:
    """Returns the network that counts as one caller: the address itself, or the /64 of an IPv6 address, which one host can fill."""
    if ":" in host:
        return Network(socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8] + bytes(8), 64)
    return Network(_MAPPED + socket.inet_aton(host), 32)


def descriptors() -> set[int]:
    """Returns those that are open; none if no descriptor is left to look with."""
    with suppress(OSError):
        return {*map(int, os.listdir(_DIRECTORY))}
    return set()


def listening_at(port: int) -> list[int]:
    """Returns the sockets that listen at a port; none where connections cannot be inspected."""
    found = []
    for descriptor in descriptors():
        with suppress(OSError), _socket_at(descriptor) as one:
            if one.family in _FAMILIES and one.getsockname()[1] == port and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _bytes(one)
                found.append(descriptor)
    return found


def look(descriptor: int) -> Seen | None:
    """Returns which file a descriptor belongs to; None: it is free.

    It takes 2 us, and never lets another thread run: a thread that is busy with a flood might keep the interpreter for long.
    """
    try:
        # The base of socket.socket, whose own part takes as long again: it makes enumerations of the kind, which are not used here.
        one = socket.SocketType(fileno=descriptor)
    except OSError as error:
        return None if error.errno == errno.EBADF else _NO_CONNECTION
    try:
        if one.family not in _FAMILIES:
            return _NO_CONNECTION
        num_sent, num_received = _bytes(one)
        return Seen(_number(one), num_received, num_sent)
    except OSError:
        return _NO_CONNECTION
    finally:
        one.detach()


def caller_at(descriptor: int, *, port: int) -> tuple[str, int] | None:
    """Returns the host and port of a connection's caller; None if there is no caller, ("", 0) if it is over. IPv4 hosts are plain."""
    with suppress(OSError), _socket_at(descriptor) as one:
        if one.getsockname()[1] != port or one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return None
        try:
            host, other = one.getpeername()[:2]
        except OSError:
            return "", 0
        return (host.removeprefix("::ffff:") if "." in host else host), other
    return None


def cut(descriptor: int, *, number: int) -> bool:
    """Ends a connection at once; False if the descriptor is not this one's any more."""
    # By a descriptor of our own, which stays the same file's.
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        if _number(one) == number:
            # After `shutdown` alone, gRPC would still read all received bytes, megabytes of them. Connecting it to nowhere drops them.
            if _LIBRARY.connect(one.fileno(), _NOWHERE, len(_NOWHERE)):
                one.shutdown(socket.SHUT_RDWR)
            return True
    return False


def shut_out(listening: int, network: Network, *, is_out: bool) -> None:
    """Has the kernel drop packets that would open a connection from a network, or accept them again. Open connections continue.

    It sets that packets from there are signed (RFC 2385), with a random key. Any process may do that, while a packet filter
    needs an administrator. On a kernel without signatures it has no effect.
    """
    key = os.urandom(16) if is_out else b""
    with suppress(OSError), _socket_at(listening) as one:
        if one.family == socket.AF_INET6:
            address = struct.pack("=HHI16sI", socket.AF_INET6, 0, 0, network.address, 0)
        elif network.is_v4:
            address = struct.pack("=HH4s", socket.AF_INET, 0, network.address[len(_MAPPED) :])
        else:
            return
        wish = struct.pack("=128sBBHi80s", address, _BY_PREFIX, network.num_bits, len(key), 0, key)
        one.setsockopt(socket.IPPROTO_TCP, _TCP_MD5SIG_EXT, wish)


@contextmanager
def _socket_at(descriptor: int) -> Iterator[socket.socket]:
    """Returns a descriptor's socket, which stays open. Raises OSError if the descriptor is no socket."""
    found = socket.socket(fileno=descriptor)
    try:
        yield found
    finally:
        found.detach()


def _number(connection: socket.SocketType) -> int:
    (number,) = struct.unpack("=Q", connection.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8))
    return int(number)


def _bytes(connection: socket.SocketType) -> tuple[int, int]:
    """Returns the bytes that were sent and acknowledged, and the bytes received."""
    about = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _AT_BYTES + 16)
    if len(about) < _AT_BYTES + 16:
        raise OSError("this kernel does not count them")
    sent, received = struct.unpack_from("=QQ", about, _AT_BYTES)
    return sent, received
