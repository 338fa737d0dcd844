"""The address forms "host:port" and "unix:/path", checked. Pure: resolves no name and opens nothing."""

import ipaddress
from dataclasses import dataclass

from ps_protocol.errors import InvalidSpec

# sizeof(sun_path) - 1: the kernel cuts or refuses anything longer.
MAX_UNIX_PATH_BYTES = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Either a host and a port, or the path of a Unix socket (then `host` is empty)."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_unix(self) -> bool:
        """Whether this is a Unix socket."""
        return bool(self.path)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it; a host name other than localhost counts as reachable from elsewhere."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str, *, is_bind: bool = False) -> Address:
    """Returns the parts of an address; raises InvalidSpec with both forms in its text. Port 0 (any free port) only where `is_bind`."""
    if text.startswith("unix:"):
        return _unix(text)
    host, colon, port_text = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise _invalid(text, "an IPv6 host needs brackets, as in [::1]:5000")
    if not colon or not host or any(character.isspace() or character == "/" for character in host):
        raise _invalid(text, "no host and port in it")
    if not (port_text.isascii() and port_text.isdigit()):
        raise _invalid(text, f"port {port_text!r} is not a number")
    port = int(port_text)
    if not (0 if is_bind else 1) <= port <= 65535:
        raise _invalid(text, f"port {port}, want {0 if is_bind else 1} to 65535")
    return Address(host=host, port=port)


def _unix(text: str) -> Address:
    path = text.removeprefix("unix:").removeprefix("//")
    if not path.startswith("/"):
        raise _invalid(text, "the path of a Unix socket must begin with /")
    if "\0" in path or len(path.encode()) > MAX_UNIX_PATH_BYTES:
        raise _invalid(text, f"the path of a Unix socket has at most {MAX_UNIX_PATH_BYTES} bytes; use a directory with a shorter name")
    return Address(path=path)


def _invalid(text: str, what: str) -> InvalidSpec:
    return InvalidSpec(f"address {text!r}: {what}; want host:port or unix:/path")


def is_loopback(text: str) -> bool:
    """Whether only this machine can reach the address; raises InvalidSpec if it is none."""
    return parse_address(text, is_bind=True).is_loopback
