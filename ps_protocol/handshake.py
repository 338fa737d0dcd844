"""Who answers at an address, and whether that is whom the caller wants. Pure; `handshake_client` and `handshake_servicer` carry it."""

import enum
from dataclasses import dataclass

from ps_protocol.errors import WrongCluster, WrongRole
from ps_protocol.version import PROTOCOL_VERSION, ProtocolVersion, check_versions


class Role(enum.Enum):
    """What a process of the cluster is for."""

    PARAMETER_SERVER = 1
    CHIEF = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A process of a cluster. `process_incarnation` is random for each start; `index` is 0 for the chief."""

    cluster: str
    role: Role
    index: int
    process_incarnation: int

    @property
    def name(self) -> str:
        """The process in words."""
        return name_of(self.role, self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeRequest:
    """What the caller believes to be at the address; an empty cluster and None accept any."""

    cluster: str
    expected_role: Role | None
    expected_index: int | None
    version: ProtocolVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeReply:
    """What is at the address; `epoch` is 0 before a chief has adopted the process, `warning` a caution for the user, mostly empty."""

    identity: Identity
    version: ProtocolVersion
    epoch: int
    warning: str


def name_of(role: Role, index: int | None) -> str:
    """Returns "ps 0", "a parameter server" or "the chief"."""
    if role is Role.CHIEF:
        return "the chief"
    return "a parameter server" if index is None else f"ps {index}"


def answer(request: HandshakeRequest, *, identity: Identity, epoch: int) -> HandshakeReply:
    """Returns the answer of `identity`; raises ProtocolMismatch, WrongCluster or WrongRole if the caller wants somebody else."""
    warning = check_versions(client=request.version, server=PROTOCOL_VERSION)
    facts = {"cluster": identity.cluster, "role": identity.role.name, "index": str(identity.index)}
    if request.cluster and request.cluster != identity.cluster:
        raise WrongCluster(
            f"this is {identity.name} of cluster {identity.cluster!r}, not {request.cluster!r}; check LOCKSTEP_CLUSTER and the address",
            facts=facts,
        )
    is_other_role = request.expected_role is not None and request.expected_role is not identity.role
    if is_other_role or request.expected_index not in (None, identity.index):
        wanted = name_of(request.expected_role or identity.role, request.expected_index)
        raise WrongRole(f"this is {identity.name}, not {wanted}; check the addresses and their order", facts=facts)
    return HandshakeReply(identity=identity, version=PROTOCOL_VERSION, epoch=epoch, warning=warning)
