"""Certificates and keys in the form that gRPC takes, for callers and for servers. Knows files and gRPC; no method and no token."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from ps_protocol.errors import InvalidSpec, PermissionDenied
from ps_protocol.roles.request import CallerRole
from ps_protocol.security.options import Security

if TYPE_CHECKING:  # callers and servers of gRPC have imported it by then; who only reads names does without
    import grpc

log = logging.getLogger("lockstep.rpc")

Made = TypeVar("Made")

_SCHEME = "lockstep"
_LOOK_INTERVAL_S = 1.0
_MAX_FILE_BYTES = 1 << 20


def identity_uri(cluster: str, role: CallerRole) -> str:
    """Returns what a certificate says about its holder."""
    return f"{_SCHEME}://{quote(cluster, safe='')}/{role.value}"


def certified_roles(auth_context: Mapping[str, Sequence[bytes]], *, cluster: str) -> frozenset[CallerRole]:
    """Returns the roles that the caller's certificate gives it in this cluster. Raises PermissionDenied if there is none."""
    # URIs only: an authority that checks who has a host name may put any other text that looks like one into a certificate.
    by_cluster = _identities(auth_context.get("peer_uri", ()))
    if not by_cluster:
        raise PermissionDenied(f"the certificate has no name {identity_uri(cluster, CallerRole.WORKER)!r}; see `lockstep certs create`")
    if cluster not in by_cluster:
        raise PermissionDenied(f"certificate is for cluster {min(by_cluster)!r}, this is {cluster!r}")
    return frozenset(by_cluster[cluster])


def _identities(names: Iterable[bytes]) -> dict[str, set[CallerRole]]:
    roles = {role.value: role for role in CallerRole}
    found: dict[str, set[CallerRole]] = {}
    for name in names:
        try:
            parts = urlsplit(name.decode("utf-8", "replace"))
        except ValueError:
            continue
        role = roles.get(parts.path.removeprefix("/"))
        if parts.scheme == _SCHEME and role is not None and not (parts.query or parts.fragment):
            # `netloc`, since `hostname` would make lower-case letters of the cluster's.
            found.setdefault(unquote(parts.netloc), set()).add(role)
    return found


class _Files:
    """The files of one process's certificates, which may change. Looks at them once a second at most. Not thread-safe."""

    def __init__(self, security: Security) -> None:
        self._paths = [path for path in (security.tls_cert, security.tls_key, security.tls_ca) if path is not None]
        self._next_look = 0.0
        self._seen: tuple[tuple[int, int], ...] = ()

    def read(self, make: Callable[[], Made]) -> Made:
        """Returns what `make` makes of them. Raises InvalidSpec if it does, and if one of them is not there."""
        self._next_look = time.monotonic() + _LOOK_INTERVAL_S
        # Before the files are read: what is replaced meanwhile is seen at the next look.
        stamps = self._stamps()
        made = make()
        self._seen = stamps
        return made

    def read_again(self, make: Callable[[], Made]) -> Made | None:
        """As `read`, if they have changed; None if they have not, or cannot be used, which is logged."""
        if not self._paths or time.monotonic() < self._next_look:
            return None
        try:
            if self._stamps() == self._seen:
                return None
            made = self.read(make)
        except InvalidSpec as error:
            log.warning("changed certificates cannot be used, those read before stay cause=%s", error.message)
            return None
        log.info("read the certificates again path=%s", self._paths[0])
        return made

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        try:
            return tuple((about.st_ino, about.st_mtime_ns) for about in map(os.stat, self._paths))
        except OSError as error:
            raise InvalidSpec(f"cannot read {error.filename}: {error.strerror}") from None


class CallerCertificates:
    """A caller's certificates, read again when their files change. Thread-safe. Raises InvalidSpec for files that are not right."""

    def __init__(self, security: Security) -> None:
        self._security, self._files, self._lock = security, _Files(security), threading.Lock()

    def credentials(self) -> "grpc.ChannelCredentials":
        """Returns what a caller opens a channel with; the files are read now."""
        with self._lock:
            return self._files.read(self._read)

    def changed(self) -> "grpc.ChannelCredentials | None":
        """Returns other ones than before, if the files have changed; None also if another thread is looking at them. Never waits."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._files.read_again(self._read)
        finally:
            self._lock.release()

    def _read(self) -> "grpc.ChannelCredentials":
        import grpc

        security = self._security
        return grpc.ssl_channel_credentials(
            root_certificates=_pem(security.tls_ca, "CERTIFICATE"),
            private_key=_pem(security.tls_key, "PRIVATE KEY"),
            certificate_chain=_pem(security.tls_cert, "CERTIFICATE"),
        )


class ServerCertificates:
    """A server's certificates, read again when their files change: for new connections. Raises InvalidSpec for files that are not right."""

    def __init__(self, security: Security) -> None:
        self._security, self._files, self._lock = security, _Files(security), threading.Lock()
        self._first = self._files.read(self._read)

    def credentials(self) -> "grpc.ServerCredentials":
        """Returns what a server opens its port with."""
        import grpc

        # grpcio takes None for "as before", which its types do not say.
        newest: Any = self._newest
        return grpc.dynamic_ssl_server_credentials(self._first, newest, require_client_authentication=self._security.verify_clients)

    def _newest(self) -> "grpc.ServerCertificateConfiguration | None":
        """Is asked by gRPC for each connection; None: what was given last."""
        with self._lock:
            return self._files.read_again(self._read)

    def _read(self) -> "grpc.ServerCertificateConfiguration":
        import grpc

        security = self._security
        key, chain = _pem(security.tls_key, "PRIVATE KEY") or b"", _pem(security.tls_cert, "CERTIFICATE") or b""
        authority = _pem(security.tls_ca, "CERTIFICATE") if security.verify_clients else None
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=authority)


def _pem(path: Path | None, kind: str) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidSpec(f"cannot read {path}: {error.strerror}") from None
    if f"{kind}-----".encode() not in text:
        raise InvalidSpec(f"{path}: there is no PEM block {kind} in it")
    return text
