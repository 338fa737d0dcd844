"""The checks of `lockstep doctor`: findings in order, and for each fault its name and a remedy."""

import io
import shutil
import socket
import stat
import sys
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lockstep.doctor import machine, peers
from lockstep.doctor.files import file_findings, role_to_call_as
from lockstep.doctor.findings import Finding, Severity, fail, is_fit, lines, ok, summary, warn
from lockstep.doctor.machine import LEAST_PYTHON, LEAST_VERSIONS, machine_findings
from ps_protocol.errors import InvalidSpec, StorageFull
from ps_protocol.roles.request import CallerRole
from ps_protocol.rpc.channel import Access
from ps_protocol.security.options import Security
from tests.support.network.certificates import make
from tests.support.repository import ROOT


def of(check: str, findings: Sequence[Finding]) -> list[Severity]:
    return [one.severity for one in findings if one.check == check]


def wrong(findings: Sequence[Finding]) -> list[Finding]:
    return [one for one in findings if one.severity is not Severity.OK]


def test_report_says_below_each_thing_that_is_wrong_what_to_do() -> None:
    findings = [ok("a", "fine"), warn("b", "odd", "look"), fail("c", "broken", "mend it")]
    assert [line for one in findings for line in lines(one, has_colours=False)] == [
        "ok    a                fine",
        "warn  b                odd",
        "                       -> look",
        "fail  c                broken",
        "                       -> mend it",
    ]
    assert summary(findings) == "1 ok, 1 warn, 1 fail"
    assert not is_fit(findings) and is_fit(findings[:2])
    assert "\x1b[31mfail\x1b[0m" in next(iter(lines(findings[2], has_colours=True)))


def test_the_doctor_finds_no_fault_in_this_machine() -> None:
    findings = [*machine_findings({})]
    assert is_fit(findings), wrong(findings)
    assert {"python", "lockstep", "grpcio", "localhost", "clock", "shared memory", "descriptors", "memory"} <= {
        one.check for one in findings
    }
    assert all(one.advice for one in wrong(findings)) and not any(one.advice for one in findings if one.severity is Severity.OK)


def test_least_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={'.'.join(map(str, LEAST_PYTHON))}"
    given = dict(one.split(",")[0].split(">=") for one in project["dependencies"])
    assert {name: given[name] for name in LEAST_VERSIONS} == LEAST_VERSIONS


def test_old_and_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LEAST_VERSIONS", {"grpcio": "999", "no-such-package": "1"})
    findings = [*machine_findings({})]
    assert of("grpcio", findings) == of("no-such-package", findings) == [Severity.FAIL]
    assert [one.advice for one in wrong(findings)][:2] == ["pip install 'grpcio>=999'", "pip install 'no-such-package>=1'"]


def test_misspelt_variables_are_named() -> None:
    (found,) = [one for one in machine_findings({"LOCKSTEP_CHEIF": "x", "LOCKSTEP_CHIEF": "y"}) if one.check == "environment"]
    assert found.severity is Severity.WARN and "LOCKSTEP_CHEIF" in found.text and "LOCKSTEP_CHIEF," not in found.text


def test_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        findings = [*machine_findings({}, addresses=(address, "127.0.0.1:0"))]
    assert of("port", findings) == [Severity.FAIL, Severity.OK]
    assert address in next(one.text for one in findings if one.severity is Severity.FAIL)


def test_the_disk_of_table_files_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of("table files", [*machine_findings({})]) == []
    assert of("table files", [*machine_findings({}, table_dir=tmp_path / "none")]) == [Severity.FAIL]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1 << 31))
    assert of("table files", [*machine_findings({}, table_dir=tmp_path)]) == [Severity.OK]
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=(1 << 30) - 1))
    (found,) = [one for one in machine_findings({}, table_dir=tmp_path) if one.check == "table files"]
    assert found.severity is Severity.WARN and found.text == f"1.0 GiB free in {tmp_path}"


# -- certificates and tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("secrets")
    make(directory, cluster="job")
    return directory


def given(directory: Path, **changes: Path) -> Security:
    paths = {"token_file": directory / "tokens", "tls_ca": directory / "ca.pem"}
    paths |= {"tls_cert": directory / "ps.pem", "tls_key": directory / "ps.key"}
    return Security(**{**paths, **changes})  # type: ignore[arg-type]


def test_the_doctor_finds_no_fault_in_files_that_lockstep_certs_creates(directory: Path) -> None:
    findings = [*file_findings(given(directory), cluster="job")]
    assert not wrong(findings), wrong(findings)
    text = "\n".join(one.text for one in findings)
    assert "lockstep://job/ps" in text and "is signed by" in text and "valid from" in text and "chief" in text
    token = (directory / "tokens").read_text().split()[-1]
    assert token not in text, "no secret is shown"


@pytest.mark.parametrize("role", ["observer", "ps", "chief"])
def test_the_doctor_calls_other_processes_in_a_role_that_it_has_a_token_for(directory: Path, role: str) -> None:
    assert role_to_call_as(Security(token_file=directory / f"{role}.token")).value == role
    assert role_to_call_as(Security()) is role_to_call_as(given(directory)) is CallerRole.ADMIN


def test_the_doctor_reports_nothing_about_files_that_are_not_given() -> None:
    assert [*file_findings(Security(), cluster="")] == []


def test_certificate_of_another_cluster_authority_or_key_fails(directory: Path, tmp_path: Path) -> None:
    make(tmp_path, cluster="other")
    assert of("tls names", [*file_findings(given(directory), cluster="another")]) == [Severity.OK, Severity.FAIL]
    assert of("tls chain", [*file_findings(given(directory, tls_ca=tmp_path / "ca.pem"), cluster="")]) == [Severity.FAIL]
    assert Severity.FAIL in of("tls key", [*file_findings(given(directory, tls_key=tmp_path / "ps.key"), cluster="")])


def signed(path: Path, *, begins: timedelta, ends: timedelta) -> Path:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    certificate = builder.not_valid_before(now + begins).not_valid_after(now + ends).sign(key, hashes.SHA256())
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.mark.parametrize(
    ("begins", "ends", "severity"),
    [
        (timedelta(days=-30), timedelta(days=-1), Severity.FAIL),
        (timedelta(days=1), timedelta(days=30), Severity.FAIL),
        (timedelta(days=-300), timedelta(days=3), Severity.WARN),
        (timedelta(hours=-1), timedelta(hours=23), Severity.OK),
        (timedelta(days=-1), timedelta(days=90), Severity.OK),
    ],
    ids=["expired", "not yet", "ends soon", "lasts a day", "in order"],
)
def test_the_doctor_checks_the_dates_of_a_certificate(tmp_path: Path, begins: timedelta, ends: timedelta, severity: Severity) -> None:
    path = signed(tmp_path / "ca.pem", begins=begins, ends=ends)
    assert of("tls authority", [*file_findings(Security(tls_ca=path), cluster="")]) == [severity]


def test_the_doctor_checks_no_dates_without_the_cryptography_package(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)  # importing it raises ImportError
    assert of("tls dates", [*file_findings(given(directory), cluster="")]) == [Severity.WARN]


def test_secrets_that_others_can_read_and_wrong_files_are_named(directory: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_bytes((directory / "tokens").read_bytes())
    for mode, severity in ((0o644, Severity.FAIL), (0o640, Severity.WARN), (0o600, Severity.OK)):
        tokens.chmod(stat.S_IFREG | mode)
        assert of("token file", [*file_findings(Security(token_file=tokens), cluster="")])[-1] is severity
    tokens.write_text("worker short\n")
    (found,) = file_findings(Security(token_file=tokens), cluster="")
    assert found.severity is Severity.FAIL and "line 1" in found.text and "short" not in found.text
    (found,) = file_findings(Security(token_file=tmp_path / "nowhere"), cluster="")
    assert found.severity is Severity.FAIL and "cannot read" in found.text
    (tmp_path / "ca.pem").write_text("no certificate")
    assert of("tls authority", [*file_findings(Security(tls_ca=tmp_path / "ca.pem"), cluster="")]) == [Severity.FAIL]


def test_the_doctor_says_which_role_failed_and_has_it_remove_what_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bool]] = []

    class Role:
        def __init__(self, address: str, *, name: str, **_: object) -> None:
            if name == "ps 1":
                raise InvalidSpec("server speaks TLS")
            self.name, self.channel = name, io.BytesIO()

        def try_checkpoints(self, tag: str, *, is_last: bool, timeout_s: float) -> tuple[str, tuple[str, ...]]:
            calls.append((self.name, is_last))
            if self.name == "ps 0" and not is_last:
                raise StorageFull("the disk is full")
            return ("", ()) if self.name == "ps 2" else ("/ckpt", (tag,))

    monkeypatch.setattr(peers, "Connection", Role)
    roles = dict.fromkeys(("chief", "ps 0", "ps 1", "ps 2"), "h:1")
    found = list(peers.checkpoint_findings(roles, access=Access(role=CallerRole.ADMIN)))
    assert [one.text for one in found[:2]] == ["ps 0: the disk is full", "ps 1: server speaks TLS"]
    assert calls == [("chief", False), ("ps 0", False), ("ps 2", False), ("chief", True), ("ps 0", True)]
