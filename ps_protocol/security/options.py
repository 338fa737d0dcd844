"""The security options of a process: its own credentials, and what it checks callers by. Reads no file."""

from dataclasses import dataclass, field
from pathlib import Path

from ps_protocol.errors import InvalidSpec

# A guess must be hopeless: 16 characters are 64 bits at least, as hexadecimal digits.
_MIN_TOKEN_CHARACTERS, _MAX_TOKEN_CHARACTERS = 16, 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Tokens, certificates and keys of one process, as caller and as server; nothing of it is needed on loopback and Unix sockets.

    As a caller: `token`, or the line of its role in `token_file`; TLS if there is a `tls_ca`, or `tls` is true (then the system's
    authorities count; False: never); `tls_server_name` is what the servers' certificates say if that is not the address.
    As a server: `tls_cert` and `tls_key` make it speak TLS, `token_file` has the callers' tokens, and with `verify_clients` callers need a
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
        """Whether a server admits only callers that prove who they are, and traffic is encrypted."""
        return self.tls_cert is not None and (self.token_file is not None or self.verify_clients)


def check_token(token: str, name: str) -> None:
    """Raises InvalidSpec, which says `name` and not the token, if the text cannot be one."""
    if " " in token:
        raise InvalidSpec(f"{name}: there is a space in it; want the token alone, without its role")
    if not (token.isascii() and token.isprintable() and _MIN_TOKEN_CHARACTERS <= len(token) <= _MAX_TOKEN_CHARACTERS):
        raise InvalidSpec(f"{name}: a token has {_MIN_TOKEN_CHARACTERS} to {_MAX_TOKEN_CHARACTERS} printable ASCII characters, no spaces")


OPEN = Security()
