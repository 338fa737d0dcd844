"""How this process reaches others: encrypted or not, and the token that each call carries. Opens channels; knows no method."""

from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from ps_protocol import credentials
from ps_protocol.addresses import Address, parse_address
from ps_protocol.authorization import CallerRole
from ps_protocol.channel import CHANNEL_OPTIONS
from ps_protocol.errors import InvalidSpec
from ps_protocol.security_options import OPEN, Security
from ps_protocol.tls import channel_credentials

Metadata = tuple[tuple[str, str], ...]
_NO_METADATA: Metadata = ()


class Access:
    """What a caller of one role sends to prove who it is. Thread-safe.

    Without a token of its own it takes the one beside a Unix socket, where a launcher has left it. To other hosts a token goes by TLS only.
    """

    def __init__(self, security: Security = OPEN, *, role: CallerRole = CallerRole.WORKER) -> None:
        self._security, self._role = security, role

    @property
    def security(self) -> Security:
        """What it was made of."""
        return self._security

    def uses_tls(self, address: str) -> bool:
        """Whether calls to the address are encrypted."""
        return self._security.calls_with_tls and not parse_address(address).is_unix

    def open_channel(self, address: str) -> grpc.Channel:
        """Opens a channel; raises InvalidSpec for an address or a certificate that is none. Connects at the first call, again when lost."""
        target = str(parse_address(address))
        if not self.uses_tls(address):
            return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(target, channel_credentials(self._security), options=self._tls_options())

    def open_aio_channel(self, address: str) -> grpc.aio.Channel:
        """Opens a channel for asyncio, as `open_channel` does."""
        target = str(parse_address(address))
        if not self.uses_tls(address):
            return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(target, channel_credentials(self._security), options=self._tls_options())

    def metadata_for(self, address: str) -> Callable[[], Metadata]:
        """Returns what gives the metadata of each call to the address. Raises InvalidSpec rather than send a token in the clear."""
        parsed = parse_address(address)
        if not self._has_token:
            beside = credentials.tokens_beside(parsed.path) if parsed.is_unix else None
            return credentials.TokenSource(beside, role=self._role).header if beside is not None else lambda: _NO_METADATA
        self._check_privacy(parsed, address)
        if self._security.token_file is not None:
            return credentials.TokenSource(self._security.token_file, role=self._role).header
        header = credentials.bearer(self._security.token)
        return lambda: header

    @property
    def _has_token(self) -> bool:
        return bool(self._security.token) or self._security.token_file is not None

    def _check_privacy(self, parsed: Address, address: str) -> None:
        if not (parsed.is_loopback or self.uses_tls(address)):
            raise InvalidSpec(f"refusing to send a token without TLS to {parsed.host}; pass tls_ca= (--tls-ca) or tls=True")

    def _tls_options(self) -> Sequence[tuple[str, str | int]]:
        name = self._security.tls_server_name
        return (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name)) if name else CHANNEL_OPTIONS


# For whoever was given nothing: loopback, Unix sockets, and networks where everybody is trusted.
DEFAULT_ACCESS = Access()
