"""Whether a server speaks TLS, found out by greeting it once: a lost connection alone does not say. Knows sockets; no gRPC."""

import contextlib
import socket

from ps_protocol.addresses import parse_address

_TIMEOUT_S = 0.5
# First bytes of TLS records: a handshake, an alert.
_RECORDS = (b"\x16", b"\x15")


def may_be_tls(text: str) -> bool:
    """Whether the words of a failure fit a server that waits for TLS and was greeted without."""
    return "connection was lost" in text


def speaks_tls(address: str) -> bool:
    """Greets what listens at the address, for half a second at most. False also if nothing can be found out."""
    parsed = parse_address(address)
    greeting = _greeting()
    if parsed.is_unix or not greeting:
        return False
    with contextlib.suppress(OSError), socket.create_connection((parsed.host, parsed.port), timeout=_TIMEOUT_S) as connection:
        connection.settimeout(_TIMEOUT_S)
        connection.sendall(greeting)
        return connection.recv(1) in _RECORDS
    return False


def _greeting() -> bytes:
    try:
        import ssl
    except ImportError:  # a parameter server does without
        return b""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_side=False).do_handshake()
    return outgoing.read()
