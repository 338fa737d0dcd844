"""How the command reaches a chief that may not be there. Knows the chief's client; renders nothing."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ps_protocol.access import Access
from ps_protocol.authorization import CallerRole
from ps_protocol.chief import ClusterState
from ps_protocol.chief_client import GrpcChief
from ps_protocol.errors import DeadlineExceeded, InvalidSpec, PsError, Unavailable
from ps_protocol.security_options import Security, add_security_flags, security_of

# A person waits for the answer: an absent chief must be told within two seconds.
CONNECT_TIMEOUT_S = 1.5


class ChiefAbsent(Exception):
    """There is no chief to talk to; the text says what to do."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which chief is meant."""
    parser.add_argument("--chief", default=os.environ.get("LOCKSTEP_CHIEF", ""), metavar="ADDRESS", help="its address (or LOCKSTEP_CHIEF)")
    parser.add_argument(
        "--cluster", default=os.environ.get("LOCKSTEP_CLUSTER", ""), metavar="NAME", help="(or LOCKSTEP_CLUSTER) default: any"
    )
    add_security_flags(parser, is_server=False)


@contextmanager
def chief_of(arguments: argparse.Namespace) -> Iterator[GrpcChief]:
    """Connects to the chief; raises ChiefAbsent within two seconds if none answers."""
    if not arguments.chief:
        text = "which chief? give --chief ADDRESS or set LOCKSTEP_CHIEF; `lockstep up` prints the address when it starts a cluster"
        raise ChiefAbsent(text, exit_code=2)
    try:
        access = Access(security_of(arguments, os.environ), role=CallerRole.ADMIN)
        chief = GrpcChief(arguments.chief, cluster=arguments.cluster, access=access)
    except InvalidSpec as error:
        raise ChiefAbsent(error.message, exit_code=2) from error
    try:
        chief.handshake(timeout_s=CONNECT_TIMEOUT_S)
        yield chief
    except (Unavailable, DeadlineExceeded) as error:
        text = f"no chief answers at {arguments.chief}: is it running, and is this its address?\n({error.message})"
        raise ChiefAbsent(text) from error
    finally:
        chief.close()


def launcher_access(token_file: Path | None) -> Access:
    """Returns how a launcher reaches the chief of its own cluster, whatever the shell says about others."""
    return Access(Security(token_file=token_file), role=CallerRole.ADMIN)


def finish(address: str, *, cluster: str, reason: str, timeout_s: float, token_file: Path | None = None) -> bool:
    """Has the chief finish training if it still can; a chief that is gone needs no telling. Returns False if no training had begun."""
    chief = GrpcChief(address, cluster=cluster, access=launcher_access(token_file))
    has_begun = True
    try:
        with suppress(PsError):
            chief.handshake(timeout_s=timeout_s)
            has_begun = chief.status().state not in (ClusterState.CONNECTING, ClusterState.WAITING_FOR_MODEL)
            chief.finish(reason=reason)
    finally:
        chief.close()
    return has_begun
