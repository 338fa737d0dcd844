"""Admission: tokens, certificates and TLS at real servers, and the words of each refusal."""

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_protocol.errors import InvalidSpec, PermissionDenied, Unauthenticated, Unavailable
from ps_protocol.roles.request import CallerRole
from ps_protocol.roles.shard import AdoptRequest
from ps_protocol.rpc.accumulators import GrpcAccumulators
from ps_protocol.rpc.channel import DEFAULT_ACCESS, Access, Metadata
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.status import REASON_KEY
from ps_protocol.security import tokens
from ps_protocol.security.options import Security
from ps_protocol.security.permissions import ALLOWED
from ps_server.config import ParameterServerConfig
from tests.support.chief.eras import fence
from tests.support.chief.running_chief import RunningChief
from tests.support.network.certificates import Files, make
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import open_server

MISSING = r"^missing token\. Set LOCKSTEP_TOKEN_FILE or pass token=$"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("job"))


@contextlib.contextmanager
def serving(security: Security, *, address: str = "127.0.0.1:0") -> Iterator[str]:
    with open_server(ParameterServerConfig(index=0, cluster="job", address=address, security=security)) as server:
        yield server.address


@pytest.fixture(scope="module")
def tokens_only(files: Files) -> Iterator[str]:
    with serving(Security(token_file=files.directory / "tokens")) as address:
        yield address


@pytest.fixture(scope="module")
def with_tls(files: Files) -> Iterator[str]:
    with serving(files.server()) as address:
        yield address


@pytest.fixture(scope="module")
def with_certificates(files: Files) -> Iterator[str]:
    with serving(files.server(tokens=False, verify_clients=True)) as address:
        yield address


def greet(address: str, access: Access) -> str:
    with contextlib.closing(CommandedShard(address, index=0, cluster="job", access=access)) as shard:
        return shard.handshake().identity.name


def _call(channel: grpc.Channel, method: str, data: bytes = b"", *, metadata: Metadata = ()) -> Any:
    invoke: Any = channel.unary_unary(method)
    return invoke(data, timeout=10, metadata=metadata)


def test_a_caller_with_its_token_is_accepted(tokens_only: str, files: Files) -> None:
    for role in CallerRole:
        assert greet(tokens_only, files.caller(role.value, tls=False)) == "ps 0"


def test_the_refusal_of_a_caller_without_a_token_says_how_to_pass_one(tokens_only: str) -> None:
    with pytest.raises(Unauthenticated, match=MISSING):
        greet(tokens_only, DEFAULT_ACCESS)


def test_wrong_token_is_refused(tokens_only: str) -> None:
    with pytest.raises(Unauthenticated, match=r"^invalid token$"):
        greet(tokens_only, Access(Security(token=tokens.new_token())))


def adopt(access: Access, address: str) -> None:
    with contextlib.closing(CommandedShard(address, access=access)) as shard:
        shard.call(AdoptRequest(fence=fence(1, 1)))


def test_worker_cannot_do_the_chiefs_work(tokens_only: str, files: Files) -> None:
    with pytest.raises(PermissionDenied, match=r"^AdoptShard needs role chief, token has role worker$"):
        adopt(files.caller("worker", tls=False), tokens_only)
    adopt(files.caller("chief", tls=False), tokens_only)


def test_refusal_comes_without_waiting_for_the_request(tokens_only: str, files: Files) -> None:
    """A stream whose caller sends nothing holds nothing of a server that does not let it in."""
    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with DEFAULT_ACCESS.open_channel(tokens_only) as channel:
        stream: Any = channel.stream_stream("/ps_protocol.v1.ParameterService/Push")
        call = stream(iter(messages.get, None), timeout=10)
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        messages.put(None)


@pytest.mark.parametrize("method", sorted(ALLOWED))
def test_no_method_of_a_server_is_open_to_strangers(tokens_only: str, chief_address: str, method: str) -> None:
    address = chief_address if "ChiefService" in method else tokens_only
    with DEFAULT_ACCESS.open_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as failure:
            _call(channel, method)
        call: Any = failure.value
        assert (call.code(), dict(call.trailing_metadata())[REASON_KEY]) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")


@pytest.mark.parametrize("role", list(CallerRole), ids=lambda role: role.value)
def test_methods_accept_the_roles_of_the_table_and_no_other(tokens_only: str, chief_address: str, files: Files, role: CallerRole) -> None:
    access = files.caller(role.value, tls=False)
    # What would end the server, or wait for it, if it were let in: the others show that the table is what counts.
    ending = {"ShutdownShard", "FinishTraining", "GetModel", "Push", "Command", "Read", "Converse", "ShareMemory"}
    for method, roles in ALLOWED.items():
        if role in roles and method.rpartition("/")[2] in ending:
            continue
        address = chief_address if "ChiefService" in method else tokens_only
        with access.open_channel(address) as channel:
            try:
                _call(channel, method, b"\xff", metadata=access.metadata_for(address)())
                code = grpc.StatusCode.OK
            except grpc.RpcError as failure:
                call: Any = failure
                code = call.code()
            assert (code is not grpc.StatusCode.PERMISSION_DENIED) is (role in roles), method


def test_health_needs_no_token(tokens_only: str) -> None:
    with DEFAULT_ACCESS.open_channel(tokens_only) as channel:
        assert _call(channel, "/grpc.health.v1.Health/Check") == b"\x08\x01"


def test_unknown_method_says_nothing_to_strangers(tokens_only: str, files: Files) -> None:
    access = files.caller(tls=False)
    for metadata, code in (((), "UNAUTHENTICATED"), (access.metadata_for(tokens_only)(), "UNIMPLEMENTED")):
        with access.open_channel(tokens_only) as channel, pytest.raises(grpc.RpcError) as failure:
            _call(channel, "/ps_protocol.v1.ParameterService/Invent", metadata=metadata)
        call: Any = failure.value
        assert call.code().name == code


def test_tokens_are_replaced_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "LOOK_INTERVAL_S", 0.0)
    path, old, new = tmp_path / "tokens", tokens.new_token(), tokens.new_token()
    tokens.write_secret(path, f"worker {old}\n")
    with serving(Security(token_file=path)) as address:
        assert greet(address, Access(Security(token=old))) == "ps 0"
        with pytest.raises(Unauthenticated):
            greet(address, Access(Security(token=new)))
        tokens.write_secret(path, f"worker {new}\n")
        assert greet(address, Access(Security(token=new))) == "ps 0"
        with pytest.raises(Unauthenticated):
            greet(address, Access(Security(token=old)))


def test_token_beside_a_unix_socket_is_found(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/ps.sock"
    tokens.write_secret(tmp_path / tokens.BESIDE_SOCKET, tokens.new_token_lines())
    with serving(Security(token_file=tmp_path / tokens.BESIDE_SOCKET), address=address) as address:
        assert greet(address, DEFAULT_ACCESS) == "ps 0"
        with contextlib.closing(GrpcAccumulators(address)) as accumulators:
            assert accumulators.handshake().identity.name == "ps 0"


def test_tls_encrypts_and_tokens_count_all_the_same(with_tls: str, files: Files) -> None:
    assert greet(with_tls, files.caller()) == "ps 0"
    with pytest.raises(Unauthenticated, match=MISSING):
        greet(with_tls, files.caller(has_token=False))


def test_a_plaintext_caller_of_a_tls_server_learns_that_the_server_speaks_tls(with_tls: str, files: Files) -> None:
    with pytest.raises(InvalidSpec, match=r"server speaks TLS; pass tls=True or --tls-ca$"):
        greet(with_tls, files.caller(tls=False))


def test_a_tls_caller_of_a_plaintext_server_learns_that_the_server_does_not_use_tls(tokens_only: str, files: Files) -> None:
    with pytest.raises(InvalidSpec, match="server is not using TLS; pass tls=False"):
        greet(tokens_only, files.caller())


def test_server_of_another_authority_is_not_trusted(with_tls: str, tmp_path: Path) -> None:
    with pytest.raises(Unauthenticated, match="not of the authority that was given; check --tls-ca"):
        greet(with_tls, make(tmp_path).caller())


def test_caller_of_a_server_whose_certificate_has_expired_may_try_again(tmp_path: Path) -> None:
    """It was told that the certificate was of another authority, and ended."""
    files = make(tmp_path)
    files.renew("ps", valid_s=-1.0)
    with serving(files.server(tokens=False)) as address:
        with pytest.raises(Unavailable, match="its certificate has expired; replace it by a new one"):
            greet(address, files.caller(has_token=False))


def test_server_of_another_name_is_not_trusted(with_tls: str, files: Files) -> None:
    own = files.caller().security
    other = Security(token_file=own.token_file, tls_ca=own.tls_ca, tls_server_name="elsewhere.example")
    with pytest.raises(Unauthenticated, match="its certificate is for other names"):
        greet(with_tls, Access(other))


@pytest.mark.parametrize("host", ["10.0.0.5:5000", "ps0.example:5000"])
def test_token_does_not_leave_the_machine_in_the_clear(files: Files, host: str) -> None:
    for access in (files.caller(tls=False), Access(Security(token=tokens.new_token()))):
        for client in (CommandedShard, GrpcChief, GrpcAccumulators):
            with pytest.raises(InvalidSpec, match=rf"^refusing to send a token without TLS to {host.partition(':')[0]}"):
                client(host, access=access)
    CommandedShard(host, access=files.caller()).close()


def test_certificate_of_the_cluster_and_role_lets_in(with_certificates: str, files: Files) -> None:
    assert greet(with_certificates, files.caller(has_token=False, certificate="worker")) == "ps 0"
    with pytest.raises(PermissionDenied, match=r"^AdoptShard needs role chief, certificate has role worker$"):
        adopt(files.caller(has_token=False, certificate="worker"), with_certificates)
    adopt(files.caller(has_token=False, certificate="chief"), with_certificates)


def test_certificate_of_another_cluster_is_refused(files: Files) -> None:
    """One authority for two clusters."""
    with open_server(ParameterServerConfig(index=0, cluster="other", security=files.server(tokens=False, verify_clients=True))) as server:
        with pytest.raises(PermissionDenied, match=r"^certificate is for cluster 'job', this is 'other'$"):
            greet(server.address, files.caller(has_token=False, certificate="worker"))


def test_the_refusal_of_a_caller_without_a_certificate_says_that_it_may_need_one(with_certificates: str, files: Files) -> None:
    with pytest.raises(Unavailable, match="pass --tls-cert and --tls-key"):
        greet(with_certificates, files.caller(has_token=False))


def test_token_does_not_widen_what_a_certificate_gives(files: Files) -> None:
    """The chief's token on a worker's certificate, and the other way round."""
    with serving(files.server(verify_clients=True)) as address:
        for role, certificate, proof in (("chief", "worker", "certificate"), ("worker", "chief", "token")):
            with pytest.raises(PermissionDenied, match=rf"^AdoptShard needs role chief, {proof} has role worker$"):
                adopt(files.caller(role, certificate=certificate), address)
        adopt(files.caller("chief", certificate="chief"), address)


def test_certificates_are_replaced_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps_protocol.security.certificates._LOOK_INTERVAL_S", 0.0)
    old, new = make(tmp_path / "old"), make(tmp_path / "new")
    with serving(old.server(tokens=False)) as address:
        assert greet(address, old.caller(has_token=False)) == "ps 0"
        for name in ("ps.key", "ps.pem"):
            (new.directory / name).rename(old.directory / name)
        assert greet(address, new.caller(has_token=False)) == "ps 0"
        with pytest.raises(Unauthenticated, match="not of the authority"):
            greet(address, old.caller(has_token=False))


@pytest.fixture(scope="module")
def chief_address(files: Files) -> Iterator[str]:
    security = Security(token_file=files.directory / "tokens")
    with serving(security) as shard, RunningChief(shard, security=security, cluster="job") as chief:
        yield chief.address


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tls_cert": Path("a")}, "--tls-key: a certificate and its key go together"),
    ({"tls_key": Path("a")}, "--tls-cert: a certificate and its key go together"),
    ({"verify_clients": True}, "--verify-clients: callers' certificates are checked with --tls-ca"),
    ({"tls": False, "tls_ca": Path("a")}, "contradict each other"),
    ({"token": "x", "token_file": Path("a")}, "give one of them"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=[words[:20] for _, words in REFUSED])
def test_options_that_contradict_each_other_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSpec, match=words):
        Security(**fields)


def test_server_that_others_can_reach_needs_both_a_certificate_and_proof_of_callers(files: Files) -> None:
    def config(security: Security) -> ParameterServerConfig:
        return ParameterServerConfig(index=0, address="0.0.0.0:0", security=security)

    for security in (Security(), Security(token_file=files.directory / "tokens"), files.server(tokens=False)):
        with pytest.raises(InvalidSpec, match="neither encryption nor a password"):
            config(security)
    for security in (files.server(), files.server(tokens=False, verify_clients=True)):
        config(security)


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca", "token_file"])
def test_file_that_is_not_there_is_named_before_anything_listens(files: Files, tmp_path: Path, name: str) -> None:
    security = files.server(verify_clients=True)
    fields = {key: getattr(security, key) for key in ("tls_cert", "tls_key", "tls_ca", "token_file", "verify_clients")}
    for path, words in ((tmp_path / "absent", "cannot read"), (tmp_path / "empty", "there is no")):
        if words == "there is no":
            path.touch(mode=0o600)
        with pytest.raises(InvalidSpec, match=f"{words}|{path}"), serving(Security(**{**fields, name: path})):
            pass


def test_token_is_not_shown_where_settings_are() -> None:
    token = tokens.new_token()
    assert token not in repr(Security(token=token))
