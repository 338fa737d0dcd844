"""Checks certificates, keys and token files as a process would use them. Reads files; makes no call, shows no secret."""

import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from lockstep.doctor.findings import Finding, fail, ok, warn
from ps_protocol.errors import InvalidSpec
from ps_protocol.roles.request import CallerRole
from ps_protocol.security.options import Security
from ps_protocol.security.tokens import parse_tokens

_PREFERRED = (CallerRole.ADMIN, CallerRole.OBSERVER, CallerRole.WORKER, CallerRole.CHIEF, CallerRole.PS)
_SOON = timedelta(days=14)
_MAKE = "make new ones: lockstep certs create"


def file_findings(security: Security, *, cluster: str) -> Iterator[Finding]:
    """Yields findings about the files that a process is given; none if it is given no files."""
    if security.token_file is not None:
        yield from _token_file(security.token_file)
    if security.tls_key is not None:
        yield _permissions("tls key", security.tls_key)
    if security.tls_cert is not None and security.tls_key is not None:
        yield _fits(security.tls_cert, security.tls_key)
    paths = {"tls authority": security.tls_ca, "tls certificate": security.tls_cert}
    if any(paths.values()):
        yield from _certificates(paths["tls authority"], paths["tls certificate"], cluster=cluster)


def role_to_call_as(security: Security) -> CallerRole:
    """Returns the role in which to call others: any role may do a handshake, but the token file may have a token for one role only."""
    if security.token_file is None:
        return CallerRole.ADMIN
    try:
        tokens = parse_tokens(security.token_file.read_text(encoding="utf-8"), name=str(security.token_file))
    except (OSError, UnicodeDecodeError, InvalidSpec):
        return CallerRole.ADMIN  # another check reports what is wrong with the file
    roles = {grant.role for grant in tokens.values()}
    return next((role for role in _PREFERRED if role in roles), CallerRole.ADMIN)


def _token_file(path: Path) -> Iterator[Finding]:
    try:
        tokens = parse_tokens(path.read_text(encoding="utf-8"), name=str(path))
    except (OSError, UnicodeDecodeError) as error:
        yield fail(
            "token file",
            f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not text'}",
            "give an existing file that you may read",
        )
        return
    except InvalidSpec as error:
        yield fail("token file", error.message, "make one: lockstep certs create")
        return
    roles = sorted({grant.role.value if grant.role is not None else "any role" for grant in tokens.values()})
    yield ok("token file", f"{path} has tokens for {', '.join(roles)}")
    yield _permissions("token file", path)


def _permissions(check: str, path: Path) -> Finding:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        return fail(check, f"cannot read {path}: {error.strerror}", "give an existing file that you may read")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        words = f"{path} has the permissions {mode:04o}: others than its owner can use it"
        return (fail if mode & stat.S_IRWXO else warn)(check, words, f"chmod 600 {path}")
    return ok(check, f"{path}: only its owner can read it")


def _fits(certificate: Path, key: Path) -> Finding:
    try:
        # Given any password, OpenSSL does not ask at the terminal for the password of an encrypted key.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(str(certificate), str(key), password="")
    except (OSError, ValueError) as error:
        return fail("tls key", f"{certificate} and {key} cannot be used together: {getattr(error, 'reason', None) or error}", _MAKE)
    return ok("tls key", f"{key} belongs to {certificate}")


def _certificates(authority: Path | None, certificate: Path | None, *, cluster: str) -> Iterator[Finding]:
    try:
        from cryptography import x509
    except ImportError:
        yield warn("tls dates", "cannot be checked without the package cryptography", "pip install 'lockstep-ps[certs]'")
        return
    found: dict[str, list[Any]] = {}
    for check, path in (("tls authority", authority), ("tls certificate", certificate)):
        if path is None:
            continue
        try:
            found[check] = x509.load_pem_x509_certificates(path.read_bytes())
        except (OSError, ValueError) as error:
            yield fail(check, f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not a certificate'}", _MAKE)
            continue
        yield from (_dates(check, path, one) for one in found[check])
    if "tls certificate" in found and certificate is not None:
        yield from _holder(found["tls certificate"][0], certificate, cluster=cluster)
        if "tls authority" in found:
            yield _chain(found["tls certificate"], found["tls authority"], certificate, authority)


def _dates(check: str, path: Path, certificate: Any) -> Finding:
    now, first, last = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    text = f"{path} is valid from {first:%Y-%m-%d} to {last:%Y-%m-%d %H:%M} UTC"
    if now < first:
        return fail(check, f"{text}: not yet", "set this machine's clock, or make new ones: lockstep certs create")
    if now > last:
        return fail(check, f"{text}: no more", _MAKE)
    # A certificate that lasts only a day is renewed often, so a fixed limit would always warn.
    if last - now < min(_SOON, (last - first) / 4):
        return warn(check, f"{text}: it ends soon", f"{_MAKE}; processes read changed files again by themselves")
    return ok(check, text)


def _holder(certificate: Any, path: Path, *, cluster: str) -> Iterator[Finding]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        yield fail("tls names", f"{path} has no subject alternative name", _MAKE)
        return
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    uris = [uri for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if uri.startswith("lockstep://")]
    yield ok("tls names", f"{path} is for {', '.join([*hosts, *uris]) or 'no host and no role'}")
    if cluster and uris and not any(uri.startswith(f"lockstep://{cluster}/") for uri in uris):
        yield fail(
            "tls names",
            f"{path} is for another cluster than {cluster!r}",
            "give the name of its cluster, or make certificates for this one",
        )


def _chain(certificates: list[Any], authorities: list[Any], path: Path, authority: Path | None) -> Finding:
    """Checks that the first certificate is issued by one of the authorities, directly or through other certificates of its file."""
    known, current = certificates[1:], certificates[0]
    for _ in range(len(certificates)):
        if any(_is_issued_by(current, one) for one in authorities):
            return ok("tls chain", f"{path} is signed by {authority}")
        following = next((one for one in known if _is_issued_by(current, one)), None)
        if following is None:
            break
        current = following
    return fail("tls chain", f"{path} is not signed by {authority}", "give the authority that has signed it as --tls-ca")


def _is_issued_by(certificate: Any, issuer: Any) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except Exception:  # from several packages: a wrong name, a wrong signature, an unknown kind of key
        return False
    return True
