"""Observers and admins cannot call in a worker's name, or take resources that training needs."""

import contextlib
from collections.abc import Iterator

import pytest

from ps_protocol.errors import LimitExceeded, PermissionDenied
from ps_protocol.roles.chief import DeregisterRequest, HeartbeatRequest, Participant, ParticipantKind, RegisterRequest
from ps_protocol.roles.fence import NOBODY
from ps_protocol.roles.request import CallerRole
from ps_protocol.roles.shard import ShardStatusRequest, ShutdownRequest
from ps_protocol.rpc import admission
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.client_stream import open_stream
from ps_protocol.security.options import Security
from ps_server.config import ParameterServerConfig
from tests.support.chief.running_chief import RunningChief
from tests.support.network.certificates import Files, make
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import open_server
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def shard_address(files: Files) -> Iterator[str]:
    security = Security(token_file=files.directory / "tokens")
    with open_server(ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0", security=security)) as server:
        yield server.address


@pytest.fixture(scope="module")
def chief_address(files: Files, shard_address: str) -> Iterator[str]:
    with RunningChief(shard_address, security=Security(token_file=files.directory / "tokens"), cluster="job") as chief:
        yield chief.address


@contextlib.contextmanager
def calling(access: Access, address: str) -> Iterator[GrpcChief]:
    with contextlib.closing(GrpcChief(address, access=access)) as chief:
        yield chief


def register(chief: GrpcChief, kind: ParticipantKind, request_id: int) -> Participant:
    request = RegisterRequest(kind=kind, index=None, host="a", pid=1, request_id=request_id, takeover=False)
    return chief.call(request).participant


@pytest.mark.parametrize("role", ["observer", "admin"])
def test_a_role_that_may_only_observe_takes_no_workers_place(chief_address: str, files: Files, role: str) -> None:
    with calling(files.caller(role, tls=False), chief_address) as chief:
        with pytest.raises(PermissionDenied, match="RegisterWorker as a worker needs role worker"):
            register(chief, ParticipantKind.WORKER, 1)
        observer = register(chief, ParticipantKind.OBSERVER, 2)
        chief.call(HeartbeatRequest(participant=observer))
        chief.call(DeregisterRequest(participant=observer))


@pytest.mark.parametrize("role", ["observer", "admin"])
def test_a_role_that_may_only_observe_cannot_act_for_a_worker(chief_address: str, files: Files, role: str) -> None:
    """A worker's number is in the status for everybody: that must not be enough to have it struck off, or to keep it alive."""
    with calling(files.caller("worker", tls=False), chief_address) as own, calling(files.caller(role, tls=False), chief_address) as chief:
        worker = register(own, ParticipantKind.WORKER, len(role) + 10)
        with pytest.raises(PermissionDenied, match="Heartbeat as a worker needs role worker"):
            chief.call(HeartbeatRequest(participant=worker))
        with pytest.raises(PermissionDenied, match="DeregisterWorker as a worker needs role worker"):
            chief.call(DeregisterRequest(participant=worker))
        own.call(HeartbeatRequest(participant=worker))  # it is still there
        own.call(DeregisterRequest(participant=worker))


def look(access: Access, address: str) -> None:
    with contextlib.closing(CommandedShard(address, access=access)) as shard:
        shard.call(ShardStatusRequest())


def test_the_calls_of_observing_roles_are_limited_in_number(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_GUEST_CALLS", 3)
    security = Security(token_file=files.directory / "tokens")
    with open_server(ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0", security=security)) as server:
        access, address = files.caller("observer", tls=False), server.address

        def is_refused() -> bool:
            try:
                look(access, address)
            except LimitExceeded as error:
                assert "3 calls with the role observer are under way" in error.message
                return True
            return False

        with access.open_channel(address) as channel, contextlib.ExitStack() as stack:
            # A look of `is_refused` may take a stream's place, and that stream is refused then: one more takes its place.
            for _ in range(4):
                metadata = access.metadata_for(address)()
                stack.callback(open_stream(channel, "/ps_protocol.v1.ParameterService/Read", metadata=metadata).end)
            wait_until(is_refused, timeout_s=20, what="streams that rest take all the room")
            for role in set(CallerRole) - {CallerRole.OBSERVER}:
                look(files.caller(role.value, tls=False), address)
        wait_until(lambda: not is_refused(), timeout_s=20, what="there is room again")


def test_the_reason_of_a_shutdown_forges_no_line_of_the_log(files: Files) -> None:
    security = Security(token_file=files.directory / "tokens")
    with open_server(ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0", security=security)) as server:
        with contextlib.closing(CommandedShard(server.address, access=files.caller("admin", tls=False))) as shard:
            shard.call(ShutdownRequest(fence=NOBODY, reason="done\n2026-01-01 WARNING forged\x1b[2J" + "x" * 10_000))
        reason = server.wait()
    assert reason.startswith("done?2026-01-01 WARNING forged?[2J") and len(reason) <= 301
