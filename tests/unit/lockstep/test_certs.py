"""`lockstep certs create` refuses names that no caller would find in a certificate, before it makes anything."""

from pathlib import Path

import pytest

from lockstep import certs
from ps_protocol.errors import InvalidSpec


@pytest.mark.parametrize("host", ["*.ps", "*", "ps.*.example", "**.ps.example", "*.", "*..", "ps0:5000", "a b", "ü.example", ""])
def test_name_that_cannot_be_checked_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidSpec, match=r"^--host: "):
        certs.create(tmp_path / "made", cluster="job", hosts=[host])
    assert not [*(tmp_path / "made").glob("*")]


def test_star_before_two_names_and_addresses_are_taken(tmp_path: Path) -> None:
    names = certs.create(tmp_path / "made", cluster="job", hosts=["*.ps.example", "10.0.0.5", "fd00::1", "chief"])
    assert {path.name for path in (tmp_path / "made").iterdir()} == set(names)
    secret = [path for path in (tmp_path / "made").iterdir() if path.suffix != ".pem"]
    assert all(path.stat().st_mode & 0o77 == 0 for path in secret)


def test_existing_certificates_are_not_overwritten(tmp_path: Path) -> None:
    certs.create(tmp_path, cluster="job")
    before = (tmp_path / "ca.key").read_bytes()
    with pytest.raises(InvalidSpec, match="already exists"):
        certs.create(tmp_path, cluster="job")
    assert (tmp_path / "ca.key").read_bytes() == before
