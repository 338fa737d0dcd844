"""Channels and ports: their options, each with its reason, encrypted or not, and the token that each call carries. Knows no method."""

import threading
from collections.abc import Callable, Sequence

import grpc

from ps_protocol.errors import InvalidSpec
from ps_protocol.process.listening import most_connections
from ps_protocol.roles.identity import Address, parse_address
from ps_protocol.roles.request import CallerRole
from ps_protocol.security import tokens
from ps_protocol.security.certificates import CallerCertificates
from ps_protocol.security.options import OPEN, Security

# The options of every gRPC channel and server, each with its reason, and the opening of channels.


MAX_MESSAGE_BYTES = 16 << 20
# A process has a connection of its own for each server and user, with a handful of streams and calls. A client that does not acknowledge
# the server's settings may begin as many altogether, and gRPC lets the headers of each unfold to 16 MiB, which keep the interpreter for
# 6 ms. With 16 such a client costs a third less, but honest ones that begin more at once are refused with RST_STREAM.
MAX_CALLS_A_CONNECTION = 64

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    # Bounds what one message can make the receiver allocate. Tensors of any size travel as many frames of FRAME_BYTES.
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # The sender refuses as well, with a clearer error than the receiver's reset.
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Bit 0 is "identity": gradients do not compress, and a compressed message could unfold to far more than its size.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # A peer that stops answering (power loss, SIGSTOP, a cut cable) is given up after 20 + 10 s instead of TCP's 15 minutes.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Newer versions of gRPC go by this one instead, whose default is a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # Also while no call is under way: otherwise the next call would be the one that finds out.
    ("grpc.keepalive_permit_without_calls", 1),
    # The default of 2 pings would end keepalive in the middle of a long wait for a token.
    ("grpc.http2.max_pings_without_data", 0),
    # Room for an error's text and facts, which `status.py` cuts to fit; no more, since any caller may fill it.
    ("grpc.max_metadata_size", 16_384),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    # Peers of a cluster talk to each other directly; http_proxy in the environment is meant for the web.
    ("grpc.enable_http_proxy", 0),
    # gRPC's own retry keeps copies of what was sent and gives up on streams of our size; `process.waiting.call` repeats instead.
    ("grpc.enable_retries", 0),
    # The service config would come from DNS TXT records; asking for them only delays the first connection.
    ("grpc.service_config_disable_resolution", 1),
    # Channels to one address share nothing, so that closing one, or one's backoff, does not touch another user of this process.
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted server is found within about a second: its users wait for it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name also how long one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 3_000),
    # After a failed lookup of a name, look again soon: containers get their names while they start.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)

_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    # With 1 two servers could share a port unnoticed, and each would get half of the calls; with 0 the second refuses to start.
    ("grpc.so_reuseport", 0),
    # Probing, gRPC lets every peer send tens of MiB ahead of what is taken: memory for nothing where it was measured (one host). Without, a
    # message under way is still asked for whole: a frame each round trip, 1 GB/s at one of 1 ms.
    ("grpc.http2.bdp_probe", 0),
    # Connections that stay silent, or do not finish TLS, are cut after this; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # More wait at the caller, or end as UNAVAILABLE, which costs the server little. Else a flood on one connection brings thousands of
    # calls at once, and all of them are refused before the next connection is read: training stopped for seconds.
    ("grpc.max_concurrent_streams", MAX_CALLS_A_CONNECTION),
    # Calls that have come and are not begun: beyond the default of 1,000 gRPC cancels calls at random, also those of a cluster, when
    # thousands of workers start at once. They wait instead. Not without end: each takes about 17 KiB, also if a stranger sends it.
    ("grpc.server.max_pending_requests", 4_096),
    ("grpc.server.max_pending_requests_hard_limit", 6_144),
    # Our clients ping. To answer a ping takes gRPC 1 us, to find that there are too many 30 us each; `strangers` cuts their senders.
    ("grpc.http2.max_ping_strikes", 0),
)


def server_options() -> list[tuple[str, int]]:
    """Returns the options for `grpc.server`."""
    # Any host that reaches the port can hold connections: they must not take the descriptors that a checkpoint or a worker's memory needs.
    return [*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most_connections())]


# How this process reaches others: encrypted or not, and the token that each call carries. Opens channels; knows no method.


Metadata = tuple[tuple[str, str], ...]
_NO_METADATA: Metadata = ()


class Access:
    """The credentials that a caller of one role sends. Thread-safe.

    Without a token of its own it takes the one beside a Unix socket, where a launcher has left it. To other hosts a token goes by TLS only.
    """

    def __init__(self, security: Security = OPEN, *, role: CallerRole = CallerRole.WORKER) -> None:
        self.security, self.role = security, role

    def uses_tls(self, address: str) -> bool:
        """Whether calls to the address are encrypted."""
        return self.security.calls_with_tls and not parse_address(address).is_unix

    def open_channel(self, address: str) -> grpc.Channel:
        """Opens a channel; raises InvalidSpec for an address or a certificate that is none. Connects at the first call, again when lost."""
        target = str(parse_address(address))
        if not self.uses_tls(address):
            return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(target, CallerCertificates(self.security).credentials(), options=self._tls_options())

    def open_renewing(self, address: str) -> "RenewedChannel":
        """As `open_channel`; another channel takes its place when the certificates have changed."""
        target = str(parse_address(address))
        if not self.uses_tls(address):
            return RenewedChannel(grpc.insecure_channel(target, options=CHANNEL_OPTIONS))
        certificates, options = CallerCertificates(self.security), self._tls_options()

        def renewed() -> grpc.Channel | None:
            changed = certificates.changed()
            return grpc.secure_channel(target, changed, options=options) if changed is not None else None

        return RenewedChannel(grpc.secure_channel(target, certificates.credentials(), options=options), renewed=renewed)

    def metadata_for(self, address: str) -> Callable[[], Metadata]:
        """Returns what gives the metadata of each call to the address. Raises InvalidSpec rather than send a token in the clear."""
        parsed = parse_address(address)
        if not self._has_token:
            beside = tokens.tokens_beside(parsed.path) if parsed.is_unix else None
            return tokens.TokenSource(beside, role=self.role).header if beside is not None else lambda: _NO_METADATA
        self._check_privacy(parsed, address)
        if self.security.token_file is not None:
            return tokens.TokenSource(self.security.token_file, role=self.role).header
        header = tokens.bearer(self.security.token)
        return lambda: header

    @property
    def _has_token(self) -> bool:
        return bool(self.security.token) or self.security.token_file is not None

    def _check_privacy(self, parsed: Address, address: str) -> None:
        if not (parsed.is_loopback or self.uses_tls(address)):
            raise InvalidSpec(f"refusing to send a token without TLS to {parsed.host}; pass tls_ca= (--tls-ca) or tls=True")

    def _tls_options(self) -> Sequence[tuple[str, str | int]]:
        name = self.security.tls_server_name
        return (*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", name)) if name else CHANNEL_OPTIONS


class RenewedChannel:
    """The channel on which calls to one address begin. Thread-safe. Calls under way stay on the one that they began on."""

    def __init__(self, first: grpc.Channel, *, renewed: Callable[[], grpc.Channel | None] = lambda: None) -> None:
        self._newest, self._renewed = first, renewed
        # Of those before it only the last one is kept open: certificates change once an hour at most.
        self._former: grpc.Channel | None = None
        self._lock, self._is_closed = threading.Lock(), False

    def newest(self) -> grpc.Channel:
        """Returns the channel for a call that begins now."""
        other = self._renewed()
        if other is not None:
            self._replace(other)
        return self._newest

    def close(self) -> None:
        """Ends all calls under way. Idempotent."""
        with self._lock:
            self._is_closed = True
            channels = self._newest, self._former
        for channel in channels:
            if channel is not None:
                channel.close()

    def _replace(self, other: grpc.Channel) -> None:
        with self._lock:
            if self._is_closed:
                unneeded: grpc.Channel | None = other
            else:
                unneeded, self._former, self._newest = self._former, self._newest, other
        if unneeded is not None:
            unneeded.close()


# For callers without credentials: loopback, Unix sockets, and networks where every host is trusted.
DEFAULT_ACCESS = Access()
