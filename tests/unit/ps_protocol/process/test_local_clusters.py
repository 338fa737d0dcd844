"""Finding the clusters of launchers: only running ones, only this user's, and no files that others have put there."""

import dataclasses
import json
import os
import stat
from pathlib import Path

import pytest

from ps_protocol.process.local_clusters import LocalEntry, entry, listed, local_clusters, with_local_secrets
from ps_protocol.security.options import Security


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "lockstep"


def own(**changes: object) -> LocalEntry:
    security = Security(token_file=Path("/x/tokens"))
    made = entry(name="up-1", chief="unix:/x/chief.sock", page="http://127.0.0.1:1/", security=security, command="python train.py")
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def put(directory: Path, name: str, text: str) -> Path:
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / name
    path.write_text(text)
    return path


def test_a_cluster_is_found_while_it_runs_and_not_afterwards(directory: Path) -> None:
    with listed(own()):
        assert local_clusters() == [own(started_at=local_clusters()[0].started_at)]
    assert local_clusters() == []
    assert list(directory.iterdir()) == []


def test_the_tokens_of_a_cluster_on_a_port_are_found_by_its_address() -> None:
    with listed(own(chief="127.0.0.1:4711")):
        assert with_local_secrets(Security(), chief="127.0.0.1:4711") == Security(token_file=Path("/x/tokens"))
        for given in (Security(token="0123456789abcdef"), Security(token_file=Path("/other"))):
            assert with_local_secrets(given, chief="127.0.0.1:4711") == given
        assert with_local_secrets(Security(), chief="127.0.0.1:4712") == Security()
    assert with_local_secrets(Security(), chief="127.0.0.1:4711") == Security()
    with listed(own(chief="h1:4711", tls_ca="/x/ca.pem")):
        assert with_local_secrets(Security(), chief="h1:4711") == Security(token_file=Path("/x/tokens"), tls_ca=Path("/x/ca.pem"))
    with listed(own(chief="")):
        assert with_local_secrets(Security(), chief="") == Security(), "a server that is called by itself gets the tokens of no cluster"


def test_the_file_of_a_local_cluster_is_readable_by_its_owner_only(directory: Path) -> None:
    with listed(own()):
        (path,) = directory.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_the_file_of_a_local_cluster_contains_no_token(directory: Path) -> None:
    with listed(own()):
        (path,) = directory.iterdir()
        assert "token=" not in path.read_text()


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 5}, {"process_start": 12345}])
def test_the_file_of_a_process_that_is_gone_counts_for_nothing_and_the_next_launcher_takes_it_away(
    directory: Path, changes: dict[str, int]
) -> None:
    path = put(directory, "1.json", json.dumps(dataclasses.asdict(own(**changes))))
    assert local_clusters() == []
    assert path.exists(), "one who looks may be in a container, and see no process outside of it"
    with listed(own()):
        assert not path.exists() and len(local_clusters()) == 1


def test_looking_for_local_clusters_creates_no_directory(directory: Path) -> None:
    assert with_local_secrets(Security(), chief="127.0.0.1:4711") == Security()
    assert not directory.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        "{" * 50_000,
        '{"pid": 1}',
        json.dumps({**dataclasses.asdict(own()), "pid": "1"}),
        json.dumps({**dataclasses.asdict(own()), "x": 1}),
    ],
)
def test_a_foreign_file_is_ignored(directory: Path, text: str) -> None:
    put(directory, "1.json", text)
    assert local_clusters() == []


def test_links_and_pipes_are_not_followed(directory: Path, tmp_path: Path) -> None:
    directory.mkdir(mode=0o700)
    (tmp_path / "elsewhere").write_text(json.dumps(dataclasses.asdict(own())))
    (directory / "1.json").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(directory / "2.json")
    assert local_clusters() == []
    assert (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_directory_that_others_may_use_is_not_used(directory: Path, mode: int) -> None:
    put(directory, "1.json", json.dumps(dataclasses.asdict(own())))
    directory.chmod(mode)
    assert local_clusters() == []
    with listed(own()):
        assert [path.name for path in directory.iterdir()] == ["1.json"]


def test_a_link_in_place_of_the_directory_is_not_used(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "other")
    with listed(own()):
        assert list((tmp_path / "other").iterdir()) == []
    assert local_clusters() == []


def test_without_a_runtime_directory_clusters_are_listed_in_a_directory_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    with listed(own()):
        assert [path.name for path in (tmp_path / f"lockstep-{os.getuid()}").iterdir()] == [f"{os.getpid()}.json"]


def test_a_directory_of_clusters_that_cannot_be_written_does_not_end_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/proc")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with listed(own()):
        assert local_clusters() == []
