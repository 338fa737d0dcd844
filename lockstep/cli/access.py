"""How a command reaches a chief that may not be there, and how a command fails. Knows the chief's client; renders nothing."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def chief_of(arguments: argparse.Namespace) -> Iterator[GrpcChief]:
    """Connects to the chief; raises ChiefAbsent within two seconds if none answers."""
    given = Given(vars(arguments), os.environ)
    address = given[options.CHIEF_ADDRESS]
    if not address:
        text = "which chief? give --chief ADDRESS or set LOCKSTEP_CHIEF; `lockstep up` prints the address when it starts a cluster"
        raise ChiefAbsent(text, exit_code=2)
    try:
        access = Access(options.security_of(given), role=CallerRole.ADMIN)
        chief = GrpcChief(address, cluster=given[options.CALLED_CLUSTER], access=access)
    except InvalidSpec as error:
        raise ChiefAbsent(error.message, exit_code=2) from error
    try:
        chief.handshake(timeout_s=CONNECT_TIMEOUT_S)
        yield chief
    except (Unavailable, DeadlineExceeded) as error:
        text = f"no chief answers at {address}: is it running, and is this its address?\n({error.message})"
        raise ChiefAbsent(text) from error
    finally:
        chief.close()
