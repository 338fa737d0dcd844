"""`lockstep relay`: follows a cluster, and is followed in its place. Knows arguments; the work is the SDK's."""

import argparse
import logging
import os
from functools import partial

from lockstep.cli.access import add_arguments, chief_address
from ps_protocol.errors import Unavailable
from ps_protocol.process import options
from ps_protocol.process.ending import exit_at_sigterm
from ps_protocol.process.listening import allow_many_connections, check_bind_address
from ps_protocol.process.options import Given
from worker_client.following.follow import encoding_of
from worker_client.following.relay import Relay
from worker_client.opening import TIMEOUT_S, enter_as_observer

log = logging.getLogger("lockstep.relay")


def add_relay_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `relay`."""
    parser.add_argument("address", nargs="?", metavar="CHIEF", help="address of the chief, or of another relay; as --chief")
    parser.add_argument("--listen", required=True, metavar="ADDRESS", help="where readers follow it, host:port or unix:/path")
    parser.add_argument("--wire", metavar="FORMAT", help="how float32 variables travel: float32 (default), bfloat16 or float16")
    parser.add_argument("--tables", action="store_true", help="relay all rows of tables, too")
    add_arguments(parser)
    options.add_options(parser, [options.ALLOW_INSECURE_NETWORK, options.VERIFY_CLIENTS])


def run_relay(arguments: argparse.Namespace) -> int:
    """Serves until training ends and returns the exit code."""
    arguments.chief = arguments.address or arguments.chief
    given = Given(vars(arguments), os.environ)
    encoding, security = encoding_of(arguments.wire), options.security_of(given, is_server=True)
    is_open = given[options.ALLOW_INSECURE_NETWORK]
    check_bind_address(arguments.listen, is_insecure_network_allowed=is_open, is_closed=security.is_closed)
    allow_many_connections()
    exit_at_sigterm()
    enter = partial(
        enter_as_observer,
        chief_address(given),
        cluster=given[options.CALLED_CLUSTER],
        timeout_s=TIMEOUT_S,
        wire=None,
        security=options.security_of(given),
    )
    while True:
        try:
            link, registration = enter()
            break
        except Unavailable as error:  # it is started with its host, maybe before the cluster
            log.warning("there is nothing to relay yet, still waiting: %s", error.message)
    relay = Relay(
        link,
        registration,
        encoding=encoding,
        takes_kept=arguments.wire is None,
        address=arguments.listen,
        tables=arguments.tables,
        security=security,
    )
    with relay:
        print(f"relaying the weights of {link.transport.cluster!r}; to follow them: lockstep.follow({relay.address!r})", flush=True)
        relay.run()
    return 0
