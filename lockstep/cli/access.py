"""Connects a command to the chief, and defines how a command fails. Knows the chief's client; renders nothing."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from ps_protocol.errors import DeadlineExceeded, InvalidSpec, Unavailable
from ps_protocol.process import options
from ps_protocol.process.local_clusters import LocalEntry, local_clusters, with_local_tokens
from ps_protocol.process.options import Given
from ps_protocol.roles.identity import parse_address
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.security.permissions import CallerRole

# A user waits for the answer, so an absent chief must be reported within two seconds.
CONNECT_TIMEOUT_S = 1.5


class CommandFailed(Exception):
    """A command failed; the text is for the user, and `main` prints it."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ChiefAbsent(CommandFailed):
    """No chief answers; the text says what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name the chief."""
    options.add_options(parser, options.options_of(options.CALLER))


def _only_local() -> LocalEntry:
    """Returns the only cluster that a launcher runs here. Raises ChiefAbsent if there is not one."""
    clusters = local_clusters()
    if not clusters:
        text = "which chief? none of yours that `lockstep up` started is running here; give --chief ADDRESS or set LOCKSTEP_CHIEF"
        raise ChiefAbsent(text, exit_code=2)
    if len(clusters) > 1:
        lines = "".join(f"\n  --chief {one.chief}  (pid {one.pid}, {one.command[:60]})" for one in clusters)
        raise ChiefAbsent(f"which chief? {len(clusters)} clusters of yours are running here; give one of them:{lines}", exit_code=2)
    (cluster,) = clusters
    return cluster


def _without_chief(address: str) -> str:
    """Returns a likely reason why no chief answers at an address, and what to do."""
    parsed = parse_address(address)
    launched = next((one for one in local_clusters() if one.chief == address), None)
    if launched is not None:
        return f"its launcher runs (pid {launched.pid}), and starts the chief again if it was killed"
    if parsed.is_unix and not os.path.exists(parsed.path):
        return "this cluster is not running; its last checkpoint, if it had any, is in its --checkpoint-dir"
    return (
        "if its training has ended, its last checkpoint, if it had any, is in its --checkpoint-dir. If the chief was killed, the parameter"
        " servers keep the model, and the workers wait: start the chief again, best at the same address"
    )


@contextmanager
def chief_of(arguments: argparse.Namespace) -> Iterator[GrpcChief]:
    """Connects to the chief; raises ChiefAbsent within two seconds if none answers."""
    with chief_and_access_of(arguments) as (chief, _):
        yield chief


@contextmanager
def chief_and_access_of(arguments: argparse.Namespace) -> Iterator[tuple[GrpcChief, Access]]:
    """Connects as `chief_of` does; also yields the access options for its parameter servers."""
    given = Given(vars(arguments), os.environ)
    address = given[options.CHIEF_ADDRESS] or _only_local().chief
    try:
        access = Access(with_local_tokens(options.security_of(given), chief=address), role=CallerRole.ADMIN)
        chief = GrpcChief(address, cluster=given[options.CALLED_CLUSTER], access=access)
    except InvalidSpec as error:
        raise ChiefAbsent(error.message, exit_code=2) from error
    try:
        chief.handshake(timeout_s=CONNECT_TIMEOUT_S)
        yield chief, access
    except (Unavailable, DeadlineExceeded) as error:
        text = f"no chief answers at {address}: is it running, and is this its address?\n({error.message})"
        raise ChiefAbsent(f"{text}\n{_without_chief(address)}") from error
    finally:
        chief.close()
