"""The version of the protocol and the rule for telling whether two versions can work together. Pure; knows no message."""

from dataclasses import dataclass

from ps_protocol.errors import ProtocolMismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolVersion:
    """`major` changes when old and new cannot work together, `minor` when something is added."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


# 2: the name of a layout covers tables, axes and optimizers, and a worker must know policies that read the newest variables.
# 2.1: standing streams, shared memory and encodings of float32.
# 2.2: checkpoints, chiefs that take over, epochs that rise while participants stay, ranges of training data.
# 2.3: records have what is counted and the training data done, workers say what they hold; standbys of parameter servers.
# 2.4: gradients that are not finite are refused, where the cluster wants that; participants say of which life of the cluster they are.
PROTOCOL_VERSION = ProtocolVersion(major=2, minor=4)


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
