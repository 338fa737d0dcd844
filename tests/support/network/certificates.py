"""Certificates and tokens for tests, made once a run. Knows what `lockstep certs create` writes."""

from dataclasses import dataclass
from pathlib import Path

from lockstep import certs
from ps_protocol.rpc.channel import Access
from ps_protocol.security.options import Security
from ps_protocol.security.permissions import CallerRole


@dataclass(frozen=True, slots=True)
class Files:
    """A directory of files for one cluster."""

    directory: Path

    def server(self, role: str = "ps", *, tokens: bool = True, verify_clients: bool = False) -> Security:
        return Security(
            token_file=self.directory / "tokens" if tokens else None,
            tls_ca=self.directory / "ca.pem",
            tls_cert=self.directory / f"{role}.pem",
            tls_key=self.directory / f"{role}.key",
            verify_clients=verify_clients,
        )

    def caller(self, role: str = "worker", *, has_token: bool = True, tls: bool = True, certificate: str = "") -> Access:
        """How a process of the role calls; `certificate`: whose it presents."""
        security = Security(
            token_file=self.directory / f"{role}.token" if has_token else None,
            tls_ca=self.directory / "ca.pem" if tls else None,
            tls_cert=self.directory / f"{certificate}.pem" if certificate else None,
            tls_key=self.directory / f"{certificate}.key" if certificate else None,
        )
        return Access(security, role=CallerRole(role))


def make(directory: Path, *, cluster: str = "job") -> Files:
    certs.create(directory, cluster=cluster)
    return Files(directory)
