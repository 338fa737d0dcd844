"""How a launcher reaches the chief of its own cluster, whatever the shell says about others. Knows the chief's client; no process."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ps_protocol.chief import ClusterState
from ps_protocol.errors import PsError

if TYPE_CHECKING:
    from ps_protocol.chief_client import GrpcChief


def own_chief(address: str, *, cluster: str, token_file: Path | None) -> "GrpcChief":
    """Returns a client of the chief, to be closed. Imports grpc, which takes its time: call it in a thread."""
    from ps_protocol.access import Access
    from ps_protocol.authorization import CallerRole
    from ps_protocol.chief_client import GrpcChief
    from ps_protocol.security_options import Security

    return GrpcChief(address, cluster=cluster, access=Access(Security(token_file=token_file), role=CallerRole.ADMIN))


def finish(address: str, *, cluster: str, reason: str, timeout_s: float, token_file: Path | None = None) -> bool:
    """Has the chief finish training if it still can; a chief that is gone needs no telling. Returns False if no training had begun."""
    chief = own_chief(address, cluster=cluster, token_file=token_file)
    has_begun = True
    try:
        with suppress(PsError):
            chief.handshake(timeout_s=timeout_s)
            has_begun = chief.status().state not in (ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL)
            chief.finish(reason=reason)
    finally:
        chief.close()
    return has_begun
