"""What a process was given to prove who it is and to check others by: flags, LOCKSTEP_* and their sense. Reads no file."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ps_protocol.errors import InvalidSpec

# All that the environment may say about it.
SECURITY_VARIABLES = tuple(
    f"LOCKSTEP_{name}" for name in ("TOKEN", "TOKEN_FILE", "TLS", "TLS_CA", "TLS_CERT", "TLS_KEY", "TLS_SERVER_NAME", "VERIFY_CLIENTS")
)
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Tokens, certificates and keys of one process, as caller and as server; nothing of it is needed on loopback and Unix sockets.

    As a caller: `token`, or the line of its role in `token_file`; TLS if there is a `tls_ca`, or `tls` is true (then the system's
    authorities count; False: never); `tls_server_name` is what the servers' certificates say if that is not the address.
    As a server: `tls_cert` and `tls_key` make it speak TLS, `token_file` says who is who, and with `verify_clients` callers need a
    certificate of `tls_ca` with their cluster and role. Unix sockets have no TLS.
    """

    token: str = field(default="", repr=False)
    token_file: Path | None = None
    tls: bool | None = None
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str = ""
    verify_clients: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) is not (self.tls_key is None):
            missing, given = ("--tls-key", "--tls-cert") if self.tls_key is None else ("--tls-cert", "--tls-key")
            raise InvalidSpec(f"{missing}: a certificate and its key go together, and there is only {given}")
        if self.verify_clients and (self.tls_ca is None or self.tls_cert is None):
            raise InvalidSpec(
                "--verify-clients: callers' certificates are checked with --tls-ca, by a server with --tls-cert and --tls-key"
            )
        if self.tls is False and self.tls_ca is not None:
            raise InvalidSpec("tls=False and an authority for TLS contradict each other; leave out one of them")
        if self.token and self.token_file is not None:
            raise InvalidSpec("a token and a file of tokens; give one of them")

    @property
    def calls_with_tls(self) -> bool:
        """Whether calls to other hosts are encrypted."""
        return self.tls if self.tls is not None else self.tls_ca is not None

    @property
    def is_closed(self) -> bool:
        """Whether a server lets in only those who prove who they are, and nobody else can read along."""
        return self.tls_cert is not None and (self.token_file is not None or self.verify_clients)


OPEN = Security()


def add_security_flags(parser: argparse.ArgumentParser, *, is_server: bool) -> None:
    """Adds the flags to a parser, in a group of their own."""
    group = parser.add_argument_group("security")
    tokens = "lines `role token`: who may call, and what this process sends" if is_server else "with the line of the role admin"
    group.add_argument("--token-file", metavar="FILE", help=f"{tokens}; read again when it changes [LOCKSTEP_TOKEN_FILE]")
    group.add_argument("--tls-ca", metavar="FILE", help="authority that signed the certificates of the others [LOCKSTEP_TLS_CA]")
    group.add_argument("--tls-cert", metavar="FILE", help="certificate of this process [LOCKSTEP_TLS_CERT]")
    group.add_argument("--tls-key", metavar="FILE", help="its key [LOCKSTEP_TLS_KEY]")
    group.add_argument(
        "--tls-server-name", metavar="NAME", help="name in the servers' certificates, if not the address [LOCKSTEP_TLS_SERVER_NAME]"
    )
    if is_server:
        group.add_argument(
            "--verify-clients",
            action="store_true",
            help="callers need a certificate of --tls-ca for this cluster and their role [LOCKSTEP_VERIFY_CLIENTS=1]",
        )


def security_of(flags: argparse.Namespace | None, environment: Mapping[str, str], *, is_server: bool = False) -> Security:
    """Returns what flags and environment say, a flag before its variable. Raises InvalidSpec."""

    def text(name: str) -> str:
        given = getattr(flags, name, None)
        return str(given) if given is not None else environment.get(f"LOCKSTEP_{name.upper()}", "").strip()

    def path(name: str) -> Path | None:
        return Path(value) if (value := text(name)) else None

    token_file = path("token_file")
    return Security(
        # A server's own token is a line of its file; the variable is a caller's.
        token="" if is_server or token_file is not None else environment.get("LOCKSTEP_TOKEN", "").strip(),
        token_file=token_file,
        tls=None if is_server else truth("LOCKSTEP_TLS", environment),
        tls_ca=path("tls_ca"),
        tls_cert=path("tls_cert"),
        tls_key=path("tls_key"),
        tls_server_name=text("tls_server_name"),
        verify_clients=is_server and (getattr(flags, "verify_clients", False) or bool(truth("LOCKSTEP_VERIFY_CLIENTS", environment))),
    )


def truth(variable: str, environment: Mapping[str, str]) -> bool | None:
    """Returns a variable's yes or no; None if it is not set. Raises InvalidSpec."""
    word = environment.get(variable, "").strip().lower()
    if word in ("", *_TRUE, *_FALSE):
        return None if not word else word in _TRUE
    raise InvalidSpec(f"{variable}: got {word[:40]!r}, want 1 or 0")
