"""`lockstep doctor`: runs the checks and prints each finding at once. Knows the terminal; checks nothing itself."""

import argparse
import itertools
import os
import sys
from collections.abc import Iterator

from lockstep.cli.formatting import plain, printable
from lockstep.cli.results import CommandResult
from lockstep.doctor.findings import Finding, is_fit, lines, summary
from lockstep.doctor.machine import machine_findings
from ps_protocol.process import options
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.options import Given
from ps_protocol.roles.identity import parse_address


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `doctor`."""
    parser.add_argument(
        "peer",
        nargs="?",
        metavar="HOST:PORT",
        help="also check the role that runs there; the chief: that each role of its cluster is reached, writes and reads in its"
        " --checkpoint-dir, and shares that with the others",
    )
    parser.add_argument(
        "--listen", action="append", default=[], metavar="ADDRESS", help="also check whether a role could listen there; may be repeated"
    )
    parser.add_argument("--chief", default=argparse.SUPPRESS, metavar="ADDRESS", help="as HOST:PORT [LOCKSTEP_CHIEF]")
    options.add_options(parser, [one for one in options.options_of(options.CALLER) if one is not options.CHIEF_ADDRESS])
    options.add_options(parser, [options.HOSTS, options.ENGINE, options.HOST_PYTHON, options.HOST_DIR])
    options.add_options(parser, [options.CHECKPOINT_DIR, options.TABLE_DIR])


def run_doctor(arguments: argparse.Namespace) -> CommandResult:
    """Prints each finding at once, and returns how many there are; exit code 1 if something fails."""
    found = []
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for finding in _findings(arguments):
        found.append(finding)
        if not arguments.json:
            for line in lines(finding, has_colours=has_colours):
                print(line if has_colours else printable(line), flush=True)
    fields = {"is_fit": is_fit(found), "findings": plain(found)}
    return CommandResult(words=summary(found), fields=fields, exit_code=ExitCode.DONE if is_fit(found) else ExitCode.FAILED)


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    given = Given(vars(arguments), os.environ)
    security, cluster = options.security_of(given), given[options.CALLED_CLUSTER]
    peer = arguments.peer or given[options.CHIEF_ADDRESS]
    if peer:
        parse_address(peer)
    found = machine_findings(os.environ, addresses=tuple(arguments.listen), table_dir=given[options.TABLE_DIR])
    from lockstep.doctor.files import file_findings, role_to_call_as

    found = itertools.chain(found, file_findings(security, cluster=cluster))
    if given[options.ENGINE] or given[options.HOSTS]:
        from lockstep.doctor.hosts import host_findings

        found = itertools.chain(found, host_findings(given))
    if peer:
        from lockstep.doctor.peers import peer_findings  # imports grpc, which the earlier checks may have found broken
        from ps_protocol.rpc.channel import Access

        found = itertools.chain(found, peer_findings(peer, cluster=cluster, access=Access(security, role=role_to_call_as(security))))
    yield from found
