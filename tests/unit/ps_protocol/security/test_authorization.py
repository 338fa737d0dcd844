"""Permissions: the table has a row for every RPC. Token files: which token has which role."""

import os
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ps_protocol.errors import InvalidSpec, PermissionDenied, Unauthenticated
from ps_protocol.process.options import Given, security_of
from ps_protocol.roles.request import CallerRole
from ps_protocol.security import tokens
from ps_protocol.security.permissions import ALLOWED, HEALTH, check_allowed, is_long_lived, is_open
from ps_protocol.security.tokens import (
    TokenSource,
    TokenTable,
    bearer,
    new_token,
    new_token_lines,
    parse_tokens,
    tokens_beside,
    write_secret,
)
from ps_protocol.v1 import accumulator_service_pb2, board_service_pb2, chief_service_pb2, handshake_service_pb2, parameter_service_pb2

MODULES = (accumulator_service_pb2, board_service_pb2, chief_service_pb2, handshake_service_pb2, parameter_service_pb2)
PREFIX = "/ps_protocol.v1."


def test_every_rpc_has_a_row_and_every_row_an_rpc() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for module in MODULES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods | {f"/{HEALTH}/Watch"} == set(ALLOWED)


def test_every_service_of_the_package_is_known_here() -> None:
    files = Path(str(chief_service_pb2.__file__)).parent.glob("*_service_pb2.py")
    assert {file.stem for file in files} == {module.__name__.rpartition(".")[2] for module in MODULES}


@pytest.mark.parametrize("method", ["AdoptShard", "Command", "KeepRecord", "SaveShard", "RestoreShard"])
def test_the_chiefs_commands_to_a_shard_are_allowed_to_no_other_role(method: str) -> None:
    assert ALLOWED[f"{PREFIX}ParameterService/{method}"] == {CallerRole.CHIEF}


def test_refusal_names_the_method_the_role_it_needs_and_the_role_given() -> None:
    with pytest.raises(PermissionDenied, match=r"^Command needs role chief, token has role worker$"):
        check_allowed(f"{PREFIX}ParameterService/Command", CallerRole.WORKER)
    with pytest.raises(PermissionDenied, match=r"^ChangeSettings needs role admin or worker, certificate has role observer$"):
        check_allowed(f"{PREFIX}ChiefService/ChangeSettings", CallerRole.OBSERVER, proof="certificate")


def test_a_method_without_a_row_is_allowed_to_no_role() -> None:
    for role in CallerRole:
        with pytest.raises(PermissionDenied, match=r"^no role may call Invent; token has role "):
            check_allowed(f"{PREFIX}ChiefService/Invent", role)


def test_only_the_health_check_is_open_to_callers_without_a_token() -> None:
    assert is_open("/grpc.health.v1.Health/Check")
    assert not is_open("/grpc.health.v1.Health/Watch")
    assert not any(map(is_open, ALLOWED))
    assert not is_open("/grpc.health.v1.HealthX/Check")


def test_the_methods_listed_as_long_lived_are_exactly_the_streaming_ones() -> None:
    streams = {
        f"/{service.full_name}/{method.name}"
        for module in MODULES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.client_streaming or method.server_streaming
    }
    assert {method for method in ALLOWED if is_long_lived(method)} == streams | {f"/{HEALTH}/Watch"}


def test_observer_changes_nothing_and_takes_no_part() -> None:
    may = {method.rpartition("/")[2] for method, roles in ALLOWED.items() if CallerRole.OBSERVER in roles}
    assert not may & {"Push", "Converse", "ChangeSettings", "FinishTraining", "ShutdownShard"}


def write(path: Path, text: str) -> Path:
    write_secret(path, text)
    return path


def test_an_access_token_determines_the_role_of_its_caller(tmp_path: Path) -> None:
    worker, chief = new_token(), new_token()
    table = TokenTable(write(tmp_path / "tokens", f"# ours\nworker {worker}\n\nchief {chief} # it\n"))
    assert table.role_of(f"Bearer {worker}") is CallerRole.WORKER
    assert table.role_of(f"Bearer {chief}".encode()) is CallerRole.CHIEF


@pytest.mark.parametrize("given", ["Bearer wrong", "Bearer ", "Basic abc", "bearer", "Bearer \udcff", b"Bearer \xff"])
def test_wrong_token_is_refused_without_a_hint(tmp_path: Path, given: str | bytes) -> None:
    table = TokenTable(write(tmp_path / "tokens", new_token_lines()))
    with pytest.raises(Unauthenticated, match=r"^invalid token$"):
        table.role_of(given)


@pytest.mark.parametrize("given", [None, "", b""])
def test_the_refusal_of_a_missing_token_says_how_to_pass_one(tmp_path: Path, given: str | bytes | None) -> None:
    table = TokenTable(write(tmp_path / "tokens", new_token_lines()))
    with pytest.raises(Unauthenticated, match=r"^missing token\. Set LOCKSTEP_TOKEN_FILE or pass token=$"):
        table.role_of(given)


def test_tokens_are_replaced_without_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "LOOK_INTERVAL_S", 0.0)
    path, old, new = tmp_path / "tokens", new_token(), new_token()
    table = TokenTable(write(path, f"worker {old}\n"))
    source = TokenSource(path, role=CallerRole.WORKER)
    assert source.header() == bearer(old)
    write(path, f"worker {new}\nworker {old}\n")
    assert table.role_of(f"Bearer {old}") is table.role_of(f"Bearer {new}") is CallerRole.WORKER
    assert source.header() == bearer(new)
    write(path, f"worker {new}\n")
    with pytest.raises(Unauthenticated):
        table.role_of(f"Bearer {old}")


def test_a_token_ends_at_its_time_and_calls_that_began_with_it_are_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, other = new_token(), new_token()
    end_s = datetime(2026, 12, 31, 18, tzinfo=UTC).timestamp()
    now_s = [end_s - 1]
    monkeypatch.setattr("ps_protocol.security.tokens.time.time", lambda: now_s[0])
    table = TokenTable(write(tmp_path / "tokens", f"worker {token} 2026-12-31T19:00+01:00\nworker {other}\n"))
    version = table.version
    assert table.role_of(f"Bearer {token}") is CallerRole.WORKER
    assert table.version == version
    now_s[0] = end_s
    with pytest.raises(Unauthenticated, match=r"^the token ended at 2026-12-31T18:00\+00:00\. Ask for a new one$"):
        table.role_of(f"Bearer {token}")
    assert table.version == version + 1
    assert table.role_of(f"Bearer {other}") is CallerRole.WORKER
    assert table.version == version + 1, "once for each end"


@pytest.mark.parametrize("broken", ["", "worker short\n", "king 0123456789abcdef\n", "\xff"])
def test_file_that_becomes_wrong_leaves_the_tokens_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(tokens, "LOOK_INTERVAL_S", 0.0)
    path, token = tmp_path / "tokens", new_token()
    table = TokenTable(write(path, f"worker {token}\n"))
    source = TokenSource(path, role=CallerRole.WORKER)
    path.write_bytes(broken.encode("latin-1"))
    assert table.role_of(f"Bearer {token}") is CallerRole.WORKER
    assert source.header() == bearer(token)
    path.unlink()
    assert table.role_of(f"Bearer {token}") is CallerRole.WORKER


def test_a_file_that_stays_away_is_spoken_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tokens, "LOOK_INTERVAL_S", 0.0)
    path, token = tmp_path / "tokens", new_token()
    source = TokenSource(write(path, f"worker {token}\n"), role=CallerRole.WORKER)
    for num_words in (1, 2):
        path.unlink()
        assert [source.header() for _ in range(3)] == [bearer(token)] * 3
        assert len(caplog.messages) == num_words, "once each time that it goes away"
        write(path, f"worker {token}\n")
        assert source.header() == bearer(token)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no token in it"),
        ("king 0123456789abcdef", "the roles are chief, worker"),
        ("worker a b c", "want a role, a token, and the time"),
        ("worker 0123456789abcdef tomorrow", "line 1: the third word is no time"),
        ("worker short", "16 to 1024 printable"),
        ("worker 0123456789abcdef\nchief 0123456789abcdef", "line 2: one token for two roles"),
        ("worker 0123456789abcdef\nworker 0123456789abcdef 2026-12-31", "line 2: one token for two roles or with two ends"),
        ("worker 0123456789abcdé", "printable ASCII"),
    ],
)
def test_the_refusal_of_a_bad_token_file_names_the_mistake_and_no_token(text: str, words: str) -> None:
    with pytest.raises(InvalidSpec, match=words) as error:
        parse_tokens(text, name="tokens")
    assert "0123456789abcd" not in error.value.message.replace("0123456789abcdef0123456789abcdef", "")


def test_a_role_before_a_callers_own_token_is_refused_and_the_variable_named() -> None:
    token = new_token()
    given = {"LOCKSTEP_TOKEN": f"worker {token}"}
    with pytest.raises(InvalidSpec, match=r"^LOCKSTEP_TOKEN: there is a space in it; want the token alone, without its role$") as caught:
        security_of(Given({}, given))
    assert token not in caught.value.message
    assert security_of(Given({}, {"LOCKSTEP_TOKEN": token})).token == token


def test_server_needs_a_role_for_each_token(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="a token without a role"):
        TokenTable(write(tmp_path / "tokens", new_token()))


def test_caller_sends_the_token_of_its_own_role(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", "chief aaaaaaaaaaaaaaaa\nworker bbbbbbbbbbbbbbbb\nworker cccccccccccccccc\n")
    assert TokenSource(path, role=CallerRole.WORKER).header() == bearer("bbbbbbbbbbbbbbbb")
    assert TokenSource(path, role=CallerRole.OBSERVER).header() == bearer("bbbbbbbbbbbbbbbb"), "a worker may observe"
    with pytest.raises(InvalidSpec, match="no token for the role ps"):
        TokenSource(path, role=CallerRole.PS)
    assert TokenSource(write(tmp_path / "own", "dddddddddddddddd\n"), role=CallerRole.PS).header() == bearer("dddddddddddddddd")


def test_secrets_are_readable_for_their_owner_only(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", new_token_lines())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_tokens_beside_a_socket_count_only_if_they_are_ours_alone(tmp_path: Path) -> None:
    socket = str(tmp_path / "chief.sock")
    assert tokens_beside(socket) is None
    path = write(tmp_path / tokens.BESIDE_SOCKET, new_token_lines())
    assert tokens_beside(socket) == path
    path.chmod(0o640)
    assert tokens_beside(socket) is None
    path.unlink()
    os.symlink(write(tmp_path / "elsewhere", new_token_lines()), path)
    assert tokens_beside(socket) is None
