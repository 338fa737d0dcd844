"""Where others reach this chief: what it is told to say, where it listens, or, if that is everywhere, as its servers see it."""

import dataclasses
import socket

from ps_protocol.addresses import Address, parse_address

_ANY_HOST = ("0.0.0.0", "::", "")


def reachable(address: str) -> str:
    """Returns an address as others may call it; empty if it is that of every network interface, which is nobody's name."""
    parsed = parse_address(address)
    return "" if _is_everywhere(parsed) else address


def towards(address: str, servers: tuple[str, ...]) -> str:
    """Returns an address that listens everywhere with the host that this machine has towards a server; empty if there is no way to one."""
    listening = parse_address(address)
    for server in servers:
        peer = parse_address(server)
        host = "127.0.0.1" if peer.is_unix else _host_towards(peer)
        if host:
            return str(dataclasses.replace(listening, host=host))
    return ""


def _is_everywhere(address: Address) -> bool:
    return not address.is_unix and address.host.strip("[]") in _ANY_HOST


def _host_towards(peer: Address) -> str:
    """Asks the system which of its addresses it would use; sends nothing."""
    try:
        found = socket.getaddrinfo(peer.host.strip("[]"), peer.port, type=socket.SOCK_DGRAM)
    except OSError:
        return ""
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return ""
