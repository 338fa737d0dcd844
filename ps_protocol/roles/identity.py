"""The identity of the process at an address, and its comparison with the wanted one: addresses, versions, the handshake. Opens nothing."""

import enum
import ipaddress
from typing import ClassVar

from ps_protocol.errors import InvalidSpec, ProtocolMismatch, WrongCluster, WrongRole
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.request import ADMIN, EVERYBODY, asks

# The address forms "host:port" and "unix:/path", checked.


# sizeof(sun_path) - 1: the kernel cuts or refuses anything longer.
MAX_UNIX_PATH_BYTES = 107


@light_dataclass(frozen=True, slots=True, kw_only=True)
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
    if "://" in text:
        raise _invalid(text, f"it has no scheme; leave out {text.partition('://')[0] + '://'!r}")
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


# The version of the protocol and the rule for telling whether two versions can work together.


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolVersion:
    """`major` changes when old and new cannot work together, `minor` when something is added."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


# 4: one call for each thing: Push, Read, Command and Converse have no twins of one message each.
PROTOCOL_VERSION = ProtocolVersion(major=4, minor=0)


def check_versions(*, client: ProtocolVersion, server: ProtocolVersion) -> str:
    """Returns a caution for the user, empty if there is none; raises ProtocolMismatch if the majors differ."""
    if client.major != server.major:
        raise ProtocolMismatch(
            f"client speaks protocol {client.major}.x, server {server.major}.x; install the same major version of Lockstep on both",
            facts={"client": str(client), "server": str(server)},
        )
    if client.minor > server.minor:
        return f"client speaks protocol {client}, server only {server}: what came after {server} is switched off; update the server"
    return ""


# The identity of the process at an address, and whether it is the wanted one.


class Role(enum.Enum):
    """The purpose of a process of the cluster."""

    PARAMETER_SERVER = 1
    CHIEF = 2
    RELAY = 3


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A process of a cluster. `process_incarnation` is random for each start; `index` is 0 for all but parameter servers."""

    cluster: str
    role: Role
    index: int
    process_incarnation: int

    @property
    def name(self) -> str:
        """A description of the process."""
        return name_of(self.role, self.index)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeReply:
    """The process at the address; `epoch` is 0 before a chief has adopted the process, `warning` a caution for the user, mostly empty."""

    identity: Identity
    version: ProtocolVersion
    epoch: int
    warning: str


@asks("HandshakeService", "Handshake", by=EVERYBODY)
class HandshakeRequest:
    """The process that the caller expects at the address; an empty cluster and None accept any."""

    cluster: str
    expected_role: Role | None
    expected_index: int | None
    version: ProtocolVersion
    answer: ClassVar[type[HandshakeReply]] = HandshakeReply
    awaited: ClassVar[str] = "the handshake"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SeenPlace:
    """A process's place for checkpoints as it names it (empty: it has none), and the trials of others that it has seen there."""

    place: str = ""
    seen: tuple[str, ...] = ()


@asks("HandshakeService", "TryCheckpoints", by=ADMIN)
class TryCheckpointsRequest:
    """Has a process try its place for checkpoints under the name `tag`; `is_last`: makes the trial whole, reads it back, and removes it."""

    tag: str
    is_last: bool
    answer: ClassVar[type[SeenPlace]] = SeenPlace
    awaited: ClassVar[str] = "its checkpoint directory"


def name_of(role: Role, index: int | None) -> str:
    """Returns "ps 0", "a parameter server", "the chief" or "a relay of weights"."""
    if role is not Role.PARAMETER_SERVER:
        return "the chief" if role is Role.CHIEF else "a relay of weights"
    return "a parameter server" if index is None else f"ps {index}"


def answer(request: HandshakeRequest, *, identity: Identity, epoch: int) -> HandshakeReply:
    """Returns the answer of `identity`; raises ProtocolMismatch, WrongCluster or WrongRole if the caller expects another process.

    A relay stands for a chief, and for each of its parameter servers.
    """
    warning = check_versions(client=request.version, server=PROTOCOL_VERSION)
    facts = {"cluster": identity.cluster, "role": identity.role.name, "index": str(identity.index)}
    if request.cluster and request.cluster != identity.cluster:
        raise WrongCluster(
            f"this is {identity.name} of cluster {identity.cluster!r}, not {request.cluster!r}; check LOCKSTEP_CLUSTER and the address",
            facts=facts,
        )
    is_other_role = request.expected_role is not None and request.expected_role is not identity.role
    if identity.role is not Role.RELAY and (is_other_role or request.expected_index not in (None, identity.index)):
        wanted = name_of(request.expected_role or identity.role, request.expected_index)
        raise WrongRole(f"this is {identity.name}, not {wanted}; check the addresses and their order", facts=facts)
    return HandshakeReply(identity=identity, version=PROTOCOL_VERSION, epoch=epoch, warning=warning)
