"""`lockstep doctor`: runs the checks and prints each finding at once. Knows the terminal; checks nothing itself."""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator

from lockstep.cli.access import CommandFailed
from lockstep.cli.formatting import printable
from lockstep.doctor import link
from lockstep.doctor.findings import Finding, as_dict, is_fit, lines, summary
from lockstep.doctor.machine import machine_findings
from ps_protocol.errors import InvalidSpec
from ps_protocol.process import options
from ps_protocol.process.options import Given
from ps_protocol.roles.identity import parse_address


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `doctor`."""
    parser.epilog = (
        "Exit code: 0 if nothing has failed, 1 if something has. To measure a link: `lockstep doctor --serve 0.0.0.0:7070` on one host, and"
        " `lockstep doctor HOST:7070` on the other."
    )
    parser.add_argument("peer", nargs="?", metavar="HOST:PORT", help="also check what runs there: a role, or another doctor with --serve")
    parser.add_argument("--serve", metavar="ADDRESS", help="answer the measurements of doctors on other hosts, until Ctrl-C")
    parser.add_argument(
        "--listen", action="append", default=[], metavar="ADDRESS", help="also check whether a role could listen there; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options.add_options(parser, options.options_of(options.CALLER))


def run_doctor(arguments: argparse.Namespace) -> int:
    """Prints the findings and returns the exit code: 1 if something fails."""
    if arguments.serve is not None:
        return _serve(arguments.serve)
    found, is_json = [], arguments.json
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for finding in _findings(arguments):
        found.append(finding)
        if not is_json:
            for line in lines(finding, has_colours=has_colours):
                print(line if has_colours else printable(line), flush=True)
    if is_json:
        print(json.dumps({"is_fit": is_fit(found), "findings": [as_dict(one) for one in found]}, indent=2))
    else:
        print(summary(found))
    return 0 if is_fit(found) else 1


def _findings(arguments: argparse.Namespace) -> Iterator[Finding]:
    given = Given(vars(arguments), os.environ)
    security, cluster = options.security_of(given), given[options.CALLED_CLUSTER]
    peer = arguments.peer or given[options.CHIEF_ADDRESS]
    if peer:
        parse_address(peer)
    found = machine_findings(os.environ, addresses=tuple(arguments.listen))
    from lockstep.doctor.files import file_findings, role_to_call_as

    found = itertools.chain(found, file_findings(security, cluster=cluster))
    if peer:
        from lockstep.doctor.peers import peer_findings  # imports grpc, which the earlier checks may have found broken
        from ps_protocol.rpc.channel import Access

        found = itertools.chain(found, peer_findings(peer, cluster=cluster, access=Access(security, role=role_to_call_as(security))))
    yield from found


def _serve(text: str) -> int:
    address = parse_address(text, is_bind=True)
    if address.is_unix:
        raise InvalidSpec(f"--serve {text}: want host:port, since another host is to call it")
    try:
        link.serve(
            address,
            on_ready=_say_ready,
            on_caller=lambda words: print(words, flush=True),
        )
    except OSError as error:
        raise CommandFailed(f"cannot listen at {text}: {error.strerror}", exit_code=2) from error
    return 0


def _say_ready(address: str) -> None:
    print(f"answering at {address}, until Ctrl-C; on the other host: lockstep doctor HOST:{address.rpartition(':')[2]}", flush=True)
