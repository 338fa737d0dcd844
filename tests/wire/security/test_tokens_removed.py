"""Removed tokens: long-lived calls that began with them end, and holders of the new ones are not disturbed."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import worker_client
from ps_protocol.roles.request import CallerRole
from ps_protocol.roles.shard import ShardStatusRequest
from ps_protocol.rpc.admission import LongLivedCalls
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.memory import MemoryLink
from ps_protocol.rpc.server_stream import Call
from ps_protocol.security import tokens as credentials
from ps_protocol.security.options import Security
from ps_server.config import ParameterServerConfig
from tests.support.chief.running_chief import RunningChief
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import open_server
from tests.support.waiting import wait_until

SHARD, CHIEF = "/ps_protocol.v1.ParameterService", "/ps_protocol.v1.ChiefService"
ROLES = [role.value for role in CallerRole]


class Tokens:
    """A file of tokens, as an administrator changes it."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "tokens"
        self.lines = {role: [credentials.new_token()] for role in ROLES}
        self.write()

    def write(self) -> None:
        text = "".join(f"{role} {token}\n" for role, tokens in self.lines.items() for token in tokens)
        credentials.write_secret(self.path, text)

    def of(self, role: str) -> Access:
        return Access(Security(token=self.lines[role][0]))


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokens:
    monkeypatch.setattr(credentials, "LOOK_INTERVAL_S", 0.0)
    return Tokens(tmp_path)


@pytest.fixture
def addresses(tokens: Tokens) -> Iterator[dict[str, str]]:
    security = Security(token_file=tokens.path)
    config = ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0", security=security)
    with open_server(config) as alone, open_server(config) as shard, RunningChief(shard.address, security=security, cluster="job") as chief:
        yield {SHARD: alone.address, CHIEF: chief.address, "of the chief": shard.address}


@contextlib.contextmanager
def open_call(access: Access, address: str, method: str) -> Iterator[Any]:
    messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with access.open_channel(address) as channel:
        begin: Any = channel.stream_stream(method)
        call = begin(iter(messages.get, None), metadata=access.metadata_for(address)(), timeout=30)
        yield call
        messages.put(None)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> "queue.SimpleQueue[CallerRole]":
    """Whose long-lived calls the servers have let in."""
    roles: queue.SimpleQueue[CallerRole] = queue.SimpleQueue()
    watch = LongLivedCalls.watch

    def noted(calls: LongLivedCalls, call: Call, seen: tuple[int, CallerRole]) -> None:
        watch(calls, call, seen)
        roles.put(seen[1])

    monkeypatch.setattr(LongLivedCalls, "watch", noted)
    return roles


def test_thread_that_checks_tokens_ends_with_its_server(
    tokens: Tokens, watched: "queue.SimpleQueue[CallerRole]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "LOOK_INTERVAL_S", 60.0)

    def num_threads() -> int:
        return sum(thread.name == "long-lived-calls" for thread in threading.enumerate())

    before = num_threads()
    config = ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0", security=Security(token_file=tokens.path))
    with open_server(config) as server, open_call(tokens.of("worker"), server.address, f"{SHARD}/Push"):
        watched.get(timeout=10)
        wait_until(lambda: num_threads() == before + 1, what="the thread has begun")
    wait_until(lambda: num_threads() == before, what="the thread has ended")


@pytest.mark.parametrize(
    ("method", "role"),
    [
        (f"{SHARD}/Push", "worker"),
        (f"{SHARD}/Read", "observer"),
        (f"{SHARD}/Command", "chief"),
        (f"{SHARD}/ReadRows", "admin"),
        (f"{SHARD}/CreateVariables", "worker"),
        (f"{CHIEF}/Converse", "worker"),
    ],
)
def test_long_lived_call_ends_when_its_token_is_removed(
    tokens: Tokens, watched: "queue.SimpleQueue[CallerRole]", addresses: dict[str, str], method: str, role: str
) -> None:
    address = addresses[method.rpartition("/")[0]]
    with open_call(tokens.of(role), address, method) as call:
        while watched.get(timeout=10).value != role:
            pass  # the chief's own calls
        # Another change of the file does it no harm.
        tokens.lines["ps"] = [credentials.new_token()]
        tokens.write()
        tokens.lines[role] = [credentials.new_token()]
        with open_call(tokens.of(role), address, method) as refused, pytest.raises(grpc.RpcError):
            next(refused)
        assert refused.code() is grpc.StatusCode.UNAUTHENTICATED
        assert call.is_active()
        tokens.write()
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() is grpc.StatusCode.CANCELLED


def test_long_lived_call_ends_when_its_token_is_given_to_another_role(tokens: Tokens, addresses: dict[str, str]) -> None:
    with open_call(tokens.of("worker"), addresses[SHARD], f"{SHARD}/Push") as call:
        tokens.lines["observer"] += tokens.lines["worker"]
        tokens.lines["worker"] = [credentials.new_token()]
        tokens.write()
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.PERMISSION_DENIED)


def test_training_continues_while_all_tokens_are_replaced(tokens: Tokens, addresses: dict[str, str], tmp_path: Path) -> None:
    """Every token of every role, three times over, with the old ones removed in between: no step is lost or counted twice."""
    own = tmp_path / "worker.token"
    credentials.write_secret(own, f"{tokens.lines['worker'][0]}\n")
    session = worker_client.connect(addresses[CHIEF], cluster="job", security=Security(token_file=own), timeout_s=30)
    with session:
        session.create_or_join({"w": np.zeros(4, np.float32)}, optimizer=worker_client.sgd(1.0))
        steps = 0

        def train(count: int) -> None:
            nonlocal steps
            for _ in range(count):
                assert session.step({"w": np.full(4, -1.0, np.float32)}).outcome is worker_client.PushOutcome.ACCEPTED
                steps += 1

        train(3)
        for _ in range(3):
            tokens.lines = {role: [credentials.new_token(), *old] for role, old in tokens.lines.items()}
            tokens.write()
            credentials.write_secret(own, f"{tokens.lines['worker'][0]}\n")
            train(2)
            tokens.lines = {role: [newest] for role, (newest, *_) in tokens.lines.items()}
            tokens.write()
            train(5)
        assert session.global_step == steps
        np.testing.assert_array_equal(session.read()["w"], np.full(4, steps, np.float32))


def test_worker_that_does_not_hear_that_its_shared_memory_is_taken_away_loses_no_step(
    tokens: Tokens, addresses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast one makes many steps before it hears of it; this one never does."""
    monkeypatch.setattr(MemoryLink, "_end", lambda link: None)
    own = tmp_path / "worker.token"
    credentials.write_secret(own, f"{tokens.lines['worker'][0]}\n")
    with worker_client.connect(
        addresses[CHIEF], cluster="job", security=Security(token_file=own), transport="shared_memory", timeout_s=30
    ) as session:
        session.create_or_join({"w": np.zeros(4, np.float32)}, optimizer=worker_client.sgd(1.0))

        def train(count: int) -> None:
            for _ in range(count):
                assert session.step({"w": np.full(4, -1.0, np.float32)}).outcome is worker_client.PushOutcome.ACCEPTED

        train(3)
        with contextlib.closing(CommandedShard(addresses["of the chief"], access=tokens.of("observer"))) as shard:
            assert shard.call(ShardStatusRequest()).report.num_sharing == 1
            tokens.lines["worker"] = [credentials.new_token()]
            credentials.write_secret(own, f"{tokens.lines['worker'][0]}\n")
            tokens.write()
            wait_until(lambda: shard.call(ShardStatusRequest()).report.num_sharing == 0, timeout_s=20, what="the server shares no more")
        train(10)
        assert session.global_step == 13
        np.testing.assert_array_equal(session.read()["w"], np.full(4, 13, np.float32))


def test_file_that_is_written_to_in_place_counts_when_it_has_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a file may be whole lines: nobody is put out by what an editor has not finished."""
    monkeypatch.setattr(credentials, "LOOK_INTERVAL_S", 0.0)
    path, first, second = tmp_path / "tokens", credentials.new_token(), credentials.new_token()
    credentials.write_secret(path, f"worker {first}\nchief {second}\n")
    table = credentials.TokenTable(path)
    with open(path, "r+", encoding="utf-8") as file:
        file.truncate(0)
        file.write(f"worker {first}\n")
        file.flush()
        assert table.is_token_of(CallerRole.CHIEF, f"Bearer {second}")
        file.write(f"chief {second}\n")
        file.flush()
        for _ in range(3):
            assert table.is_token_of(CallerRole.CHIEF, f"Bearer {second}")
        file.truncate(len(f"worker {first}\n"))
        file.flush()
        assert table.is_token_of(CallerRole.CHIEF, f"Bearer {second}")
    assert not table.is_token_of(CallerRole.CHIEF, f"Bearer {second}")
    assert table.is_token_of(CallerRole.WORKER, f"Bearer {first}")
