"""How a command reaches a chief that may not be there, and how a command fails. Knows the chief's client; renders nothing."""

import argparse
import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.launcher.registry import LocalEntry, local_clusters
from ps_protocol.errors import DeadlineExceeded, InvalidSpec, Unavailable
from ps_protocol.process import options
from ps_protocol.process.options import Given
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.security.permissions import CallerRole

# A person waits for the answer: an absent chief must be reported within two seconds.
CONNECT_TIMEOUT_S = 1.5


class CommandFailed(Exception):
    """A command failed; the text is for the user, and `main` prints it."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ChiefAbsent(CommandFailed):
    """There is no chief to talk to; the text says what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which chief is meant."""
    options.add_options(parser, options.options_of(options.CALLER))


def _only_local() -> tuple[str, Path | None]:
    """Returns where the chief of the only cluster is that a launcher runs here, and its tokens. Raises ChiefAbsent if there is not one."""
    clusters = local_clusters()
    if not clusters:
        text = "which chief? none of yours that `lockstep up` started is running here; give --chief ADDRESS or set LOCKSTEP_CHIEF"
        raise ChiefAbsent(text, exit_code=2)
    if len(clusters) > 1:
        lines = "".join(f"\n  --chief {one.chief}{_tokens_of(one)}  (pid {one.pid}, {one.command[:60]})" for one in clusters)
        raise ChiefAbsent(f"which chief? {len(clusters)} clusters of yours are running here; give one of them:{lines}", exit_code=2)
    (cluster,) = clusters
    return cluster.chief, Path(cluster.token_file) if cluster.token_file else None


def _tokens_of(cluster: LocalEntry) -> str:
    # Beside a Unix socket a caller finds the tokens by itself.
    return f" --token-file {cluster.token_file}" if cluster.token_file and not cluster.chief.startswith("unix:") else ""


@contextmanager
def chief_of(arguments: argparse.Namespace) -> Iterator[GrpcChief]:
    """Connects to the chief; raises ChiefAbsent within two seconds if none answers."""
    with chief_and_access_of(arguments) as (chief, _):
        yield chief


@contextmanager
def chief_and_access_of(arguments: argparse.Namespace) -> Iterator[tuple[GrpcChief, Access]]:
    """As `chief_of`, and how its parameter servers are called."""
    given = Given(vars(arguments), os.environ)
    address, token_file = given[options.CHIEF_ADDRESS], None
    if not address:
        address, token_file = _only_local()
    try:
        security = options.security_of(given)
        if token_file is not None and not security.token and security.token_file is None:
            security = dataclasses.replace(security, token_file=token_file)
        access = Access(security, role=CallerRole.ADMIN)
        chief = GrpcChief(address, cluster=given[options.CALLED_CLUSTER], access=access)
    except InvalidSpec as error:
        raise ChiefAbsent(error.message, exit_code=2) from error
    try:
        chief.handshake(timeout_s=CONNECT_TIMEOUT_S)
        yield chief, access
    except (Unavailable, DeadlineExceeded) as error:
        text = f"no chief answers at {address}: is it running, and is this its address?\n({error.message})"
        raise ChiefAbsent(text) from error
    finally:
        chief.close()
