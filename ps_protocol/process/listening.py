"""The address that a server listens at: whether it is allowed and free, and its announcement. Knows sockets and files; no gRPC, no role."""

import errno
import os
import resource
import socket
import stat
from pathlib import Path

from ps_protocol.errors import InvalidSpec
from ps_protocol.roles.identity import Address, parse_address

# Ten thousand workers have some of each; one that rests takes about 12 KiB.
_MAX_DESCRIPTORS = 65_536


def check_bind_address(address: str, *, is_insecure_network_allowed: bool, is_closed: bool = False) -> None:
    """Raises InvalidSpec unless only this machine can reach `address`, the server is closed to strangers, or it may be open to all."""
    if parse_address(address, is_bind=True).is_loopback or is_closed or is_insecure_network_allowed:
        return
    raise InvalidSpec(
        f"address {address}: others than this machine can reach it, and there is neither encryption nor a password; give --tls-cert,"
        " --tls-key and --token-file (see `lockstep certs create`), listen at 127.0.0.1 or unix:/path, or, in a network where everybody is"
        " trusted, pass --allow-insecure-network"
    )


def check_address_is_free(address: str) -> None:
    """Raises InvalidSpec if nothing can listen at `address`: taken, not of this machine, forbidden.

    gRPC itself would take over the socket file of a living server, and is content with one of the two addresses of localhost.
    """
    parsed = parse_address(address, is_bind=True)
    try:
        if parsed.is_unix:
            _check_unix(parsed)
        elif parsed.port:
            _check_tcp(parsed)
    except OSError as error:
        raise InvalidSpec(f"cannot listen at {address}: {why_not(error)}") from None


def allow_many_connections() -> None:
    """Lets this process have as many connections as its user may give it, up to _MAX_DESCRIPTORS: the usual 1,024 are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def most_connections() -> int:
    """Returns the most connections that a server of this process admits. The other descriptors are for files, memory and its own calls."""
    return num_descriptors() * 3 // 4


def num_descriptors() -> int:
    """Returns how many descriptors this process may have, as far as it counts on them."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, _MAX_DESCRIPTORS)


def announce(path: Path, *, address: str) -> None:
    """Writes `address` as the one line of the file, all at once, so that no reader finds half of it. Raises InvalidSpec if it cannot."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(f"{address}\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InvalidSpec(f"cannot write --announce {path}: {error.strerror}") from None


def page_beside(path: Path) -> Path:
    """Returns the file that has the address of the page, where `path` has that of the chief."""
    return path.with_name(f"{path.name}.page")


def end_beside(path: Path) -> Path:
    """Returns the file that says where a training ended, once its chief has, where `path` has the address of the chief."""
    return path.with_name(f"{path.name}.end")


def _check_unix(address: Address) -> None:
    if os.path.exists(address.path) and not stat.S_ISSOCK(os.stat(address.path).st_mode):
        raise OSError(errno.ENOTSOCK, "")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address.path)
        except (FileNotFoundError, ConnectionRefusedError):
            # Nothing, or the file of a killed server, which gRPC replaces. The directory must exist all the same.
            os.stat(os.path.dirname(address.path))
        else:
            raise OSError(errno.EADDRINUSE, "")


def _check_tcp(address: Address) -> None:
    for family, kind, protocol, _, target in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections of an earlier server that are still closing do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(target)
            except OSError as error:
                # localhost may have an IPv6 address on a machine without IPv6.
                if error.errno != errno.EADDRNOTAVAIL or address.host != "localhost":
                    raise


def why_not(error: OSError) -> str:
    """Says why nothing can listen at an address, and what to do."""
    if isinstance(error, socket.gaierror):
        return "the name is unknown; check the host"
    known = {
        errno.EADDRINUSE: "another process listens there; choose another address, or port 0 for any free one",
        errno.EADDRNOTAVAIL: "it is no address of this machine; check the host",
        errno.EACCES: "permission denied; choose a port above 1023, or a directory of yours",
        errno.ENOTSOCK: "a file that is not a socket is there; choose another path",
        errno.ENOENT: "its directory does not exist; make it",
    }
    return known.get(error.errno or 0, error.strerror or str(error))
