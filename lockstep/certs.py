"""An authority, certificates and tokens for one cluster, as files. Knows cryptography; no cluster and no terminal.

For development, and for clusters without an authority of their own. The holder of `ca.key` can make certificates for every role.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.variables import check_name
from ps_protocol.roles.request import CallerRole
from ps_protocol.security.tokens import new_token_lines, write_secret

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_SERVERS = (CallerRole.CHIEF, CallerRole.PS)
# Clocks differ, so a certificate is valid from a little before it was made.
_CLOCK_SKEW = datetime.timedelta(minutes=10)


def create(directory: Path, *, cluster: str, hosts: Sequence[str] = (), days: int = 365, with_all: bool = False) -> list[str]:
    """Makes the files and returns their names. Overwrites none. Keys and tokens are readable by their owner only.

    `with_all`: also makes `all.pem` and `all.key`, which are valid for every role: for processes that share one environment, as in
    benchmarks. Raises InvalidSpec, and OSError if the directory cannot be written to.
    """
    try:
        check_name(cluster)
    except InvalidSpec as error:
        raise InvalidSpec(f"--cluster: {error.message}") from None
    if not 1 <= days <= 36_500:
        raise InvalidSpec(f"--days: got {days}, want 1 to 36500")
    directory.mkdir(parents=True, exist_ok=True)
    files = _files(cluster, hosts=[*_LOCAL_HOSTS, *hosts], days=days, with_all=with_all)
    if taken := [name for name in files if (directory / name).exists()]:
        raise InvalidSpec(f"{directory / taken[0]} already exists; choose another directory, or remove its files")
    for name, content in files.items():
        if name.endswith(".pem"):
            (directory / name).write_bytes(content)
        else:
            write_secret(directory / name, content)
    return list(files)


def _files(cluster: str, *, hosts: Sequence[str], days: int, with_all: bool) -> dict[str, bytes]:
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise InvalidSpec("making certificates needs the package cryptography: pip install 'lockstep-ps[certs]'") from None
    from ps_protocol.security.certificates import identity_uri

    issuer_key = ec.generate_private_key(ec.SECP256R1())
    issuer = _authority(cluster, issuer_key, days=days)
    files = {"ca.pem": _pem(issuer), "ca.key": _pem(issuer_key)}
    holders = {role.value: (role,) for role in CallerRole} | ({"all": tuple(CallerRole)} if with_all else {})
    # To a chief a relay of weights is an observer, and it serves others.
    holders["relay"] = (CallerRole.OBSERVER,)
    for holder, roles in holders.items():
        key = ec.generate_private_key(ec.SECP256R1())
        names = hosts if holder == "relay" or set(roles) & set(_SERVERS) else ()
        uris = [identity_uri(cluster, role) for role in roles]
        certificate = _certificate(holder, key, uris=uris, hosts=names, issuer=issuer, issuer_key=issuer_key, days=days)
        files |= {f"{holder}.pem": _pem(certificate), f"{holder}.key": _pem(key)}
    tokens = new_token_lines()
    files["tokens"] = tokens.encode()
    return files | {f"{line.split()[0]}.token": f"{line}\n".encode() for line in tokens.splitlines()}


def _authority(cluster: str, key: "ec.EllipticCurvePrivateKey", *, days: int) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    name = _name(f"Lockstep authority of {cluster}")
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _builder(name, issuer=name, key=key, days=days)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    holder: str,
    key: "ec.EllipticCurvePrivateKey",
    *,
    uris: Sequence[str],
    hosts: Sequence[str],
    issuer: "x509.Certificate",
    issuer_key: "ec.EllipticCurvePrivateKey",
    days: int,
) -> "x509.Certificate":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID

    # The chief is a client of the parameter servers and a server for the others, so it needs both uses.
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    names = [*map(x509.UniformResourceIdentifier, uris), *map(_host_name, dict.fromkeys(hosts))]
    return (
        _builder(_name(f"Lockstep {holder}"), issuer=issuer.subject, key=key, days=days)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def _builder(subject: "x509.Name", *, issuer: "x509.Name", key: "ec.EllipticCurvePrivateKey", days: int) -> "x509.CertificateBuilder":
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(common: str) -> "x509.Name":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _host_name(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or not host.isascii() or any(character.isspace() or character in "/:@" for character in host):
        raise InvalidSpec(f"--host: got {host[:80]!r}, want a name or an IP address, without a port")
    if "*" in host and (not host.startswith("*.") or "*" in host[1:] or "." not in host[2:].strip(".")):
        raise InvalidSpec(f"--host: got {host[:80]!r}; a star stands for one name before two others, as in *.ps.example; name each host")
    return x509.DNSName(host)


def _pem(what: "x509.Certificate | ec.EllipticCurvePrivateKey") -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    if isinstance(what, x509.Certificate):
        return what.public_bytes(serialization.Encoding.PEM)
    form = serialization.PrivateFormat.PKCS8
    return what.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
