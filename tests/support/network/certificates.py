"""Certificates and tokens for tests, made once a run. Knows the files of `lockstep certs create`."""

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from lockstep import certs
from ps_protocol.roles.request import CallerRole
from ps_protocol.rpc.channel import Access
from ps_protocol.security.options import Security
from ps_protocol.security.tokens import write_secret


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

    def variables(self, *, tls: bool, verify_clients: bool = False) -> dict[str, dict[str, str]]:
        """What servers, chief and workers find in their environment, by role; workers have certificates where clients are verified."""
        roles: dict[str, dict[str, str]] = {}
        for role in ("ps", "chief", "worker"):
            is_server = role != "worker"
            own = roles[role] = {"LOCKSTEP_TOKEN_FILE": str(self.directory / ("tokens" if is_server else "worker.token"))}
            if tls:
                own["LOCKSTEP_TLS_CA"] = str(self.directory / "ca.pem")
            if tls and (is_server or verify_clients):
                own |= {"LOCKSTEP_TLS_CERT": str(self.directory / f"{role}.pem"), "LOCKSTEP_TLS_KEY": str(self.directory / f"{role}.key")}
            if is_server and verify_clients:
                own["LOCKSTEP_VERIFY_CLIENTS"] = "1"
        return roles

    def renew(self, *holders: str, valid_s: float) -> None:
        """Gives holders new keys and certificates that are good for so many seconds, otherwise as they have them."""
        issuer_key = serialization.load_pem_private_key((self.directory / "ca.key").read_bytes(), None)
        assert isinstance(issuer_key, ec.EllipticCurvePrivateKey)
        now = datetime.datetime.now(datetime.UTC)
        for holder in holders:
            certificate, key = self.directory / f"{holder}.pem", ec.generate_private_key(ec.SECP256R1())
            old = x509.load_pem_x509_certificate(certificate.read_bytes())
            builder = (
                x509.CertificateBuilder()
                .subject_name(old.subject)
                .issuer_name(old.issuer)
                .public_key(key.public_key())
                .serial_number(x509.random_serial_number())
                .not_valid_before(old.not_valid_before_utc)
                .not_valid_after(now + datetime.timedelta(seconds=valid_s))
            )
            for extension in old.extensions:
                builder = builder.add_extension(extension.value, critical=extension.critical)
            form, pem = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
            write_secret(certificate.with_suffix(".key"), key.private_bytes(pem, form, serialization.NoEncryption()))
            certificate.write_bytes(builder.sign(issuer_key, hashes.SHA256()).public_bytes(pem))


def make(directory: Path, *, cluster: str = "job", hosts: tuple[str, ...] = ()) -> Files:
    certs.create(directory, cluster=cluster, hosts=hosts)
    return Files(directory)
