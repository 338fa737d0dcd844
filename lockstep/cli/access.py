"""Connects a command to the chief. Knows the chief's client; renders nothing."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.cli.results import CommandFailed
from ps_protocol.errors import DeadlineExceeded, InvalidSpec, Unavailable
from ps_protocol.process import options
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.local_clusters import LocalEntry, local_clusters, with_local_secrets
from ps_protocol.process.options import Given
from ps_protocol.roles.identity import parse_address
from ps_protocol.roles.request import CallerRole
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.chief import GrpcChief

# A user waits for the answer, so an absent chief must be reported within two seconds.
CONNECT_TIMEOUT_S = 1.5


_KEPT = "If training has ended, its last checkpoint is in its --checkpoint-dir."


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
        raise ChiefAbsent(text, exit_code=ExitCode.USAGE)
    if len(clusters) > 1:
        lines = "".join(f"\n  --chief {one.chief}  (pid {one.pid}, {one.command[:60]})" for one in clusters)
        raise ChiefAbsent(
            f"which chief? {len(clusters)} clusters of yours are running here; give one of them:{lines}", exit_code=ExitCode.USAGE
        )
    (cluster,) = clusters
    return cluster


def _cause(error: Unavailable) -> str:
    """Returns in a few words why a chief does not answer."""
    return error.message.rpartition(": ")[2].partition(";")[0].removeprefix("there is ")


def _without_chief(address: str) -> str:
    """Returns what to do where no chief answers at an address."""
    parsed = parse_address(address)
    launched = next((one for one in local_clusters() if one.chief == address), None)
    if launched is not None:
        return f"Its launcher runs (pid {launched.pid}), and starts it again if it was killed. If it is stopped, kill -CONT lets it go on."
    if parsed.is_unix and not os.path.exists(parsed.path):
        return f"Start the cluster again, or give its address with --chief. {_KEPT}"
    return f"Start it again, or give its address with --chief. The parameter servers keep the model meanwhile. {_KEPT}"


def chief_address(given: Given) -> str:
    """Returns the address that is given, else that of the only cluster here. Raises ChiefAbsent if there is not one."""
    return given[options.CHIEF_ADDRESS] or _only_local().chief


@contextmanager
def chief_of(arguments: argparse.Namespace) -> Iterator[GrpcChief]:
    """Connects to the chief; raises ChiefAbsent within two seconds if none answers."""
    given = Given(vars(arguments), os.environ)
    address = chief_address(given)
    try:
        access = Access(with_local_secrets(options.security_of(given), chief=address), role=CallerRole.ADMIN)
        chief = GrpcChief(address, cluster=given[options.CALLED_CLUSTER], access=access)
    except InvalidSpec as error:
        raise ChiefAbsent(error.message, exit_code=ExitCode.USAGE) from error
    try:
        try:
            chief.handshake(timeout_s=CONNECT_TIMEOUT_S)
        except DeadlineExceeded as error:
            raise Unavailable("no answer") from error
        # A deadline of what is asked for then is no sign that the chief is absent.
        yield chief
    except Unavailable as error:
        raise ChiefAbsent(f"No chief answers at {address} ({_cause(error)})\n{_without_chief(address)}") from error
    finally:
        chief.close()
