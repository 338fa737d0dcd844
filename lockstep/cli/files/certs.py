"""`lockstep certs create`: makes certificates and tokens for one cluster. Knows the terminal; no cryptography."""

import argparse
from pathlib import Path

from lockstep.certs import create
from lockstep.cli.results import CommandFailed, CommandResult
from ps_protocol.process.exit_codes import ExitCode


def add_certs_create_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `certs create`."""
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="directory to write to; created if missing; must not contain such files yet"
    )
    parser.add_argument("--cluster", default="lockstep", metavar="NAME", help="name of the cluster (default lockstep)")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="name, pattern (*.ps.example) or IP address by which servers are reached; may be repeated (always: localhost, 127.0.0.1, ::1)",
    )
    parser.add_argument("--days", type=int, default=365, metavar="N", help="days that the certificates are valid (default 365)")


def run_certs_create(arguments: argparse.Namespace) -> CommandResult:
    """Makes the files and returns their names."""
    directory: Path = arguments.directory
    try:
        names = create(directory, cluster=arguments.cluster, hosts=arguments.host, days=arguments.days)
    except OSError as error:
        text = f"cannot write to {directory}: {error.strerror}; choose another DIR"
        raise CommandFailed(text, exit_code=ExitCode.USAGE) from error
    words = (
        f"made in {directory}: {', '.join(names)}",
        "a server:  --tls-cert ps.pem --tls-key ps.key --token-file tokens  [--tls-ca ca.pem --verify-clients]",
        "a worker:  LOCKSTEP_TLS_CA=ca.pem LOCKSTEP_TOKEN_FILE=worker.token  [LOCKSTEP_TLS_CERT=worker.pem LOCKSTEP_TLS_KEY=worker.key]",
        "keep ca.key secret: its holder can make certificates for this cluster",
    )
    return CommandResult(words="\n".join(words), fields={"directory": str(directory), "files": [*names]})
