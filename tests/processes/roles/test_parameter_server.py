"""`lockstep server` as a process: how it starts, its errors, and how it ends."""

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ps_protocol.errors import PsError
from ps_protocol.roles.shard import SaveRequest, ShardStatusRequest
from ps_protocol.rpc.channel import DEFAULT_ACCESS
from ps_server.config import ParameterServerConfig, parse_config
from ps_server.server import ParameterServer
from tests.support.chief.eras import fence
from tests.support.chief.running_chief import MODEL
from tests.support.network.servers import unused_address
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.sharded_training import CHIEF, ShardedTraining
from tests.support.parameter_servers.shards import open_server
from tests.support.processes.processes import announced, run, speaking


@contextlib.contextmanager
def _serving(tmp_path: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    with speaking("-m", "ps_server", "--index", "0", "--announce", tmp_path / "announced", *arguments) as process:
        yield process, announced(process, tmp_path / "announced")


def _refusal(*arguments: str) -> str:
    """Runs a server that must refuse to start; returns its one line."""
    result = run("-m", "ps_server", "--index", "0", *arguments)
    assert result.returncode == 2, result.stderr
    lines = [line for line in result.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1 and lines[0].startswith("lockstep server: "), result.stderr
    assert " ready " not in result.stderr
    return lines[0]


def _health(address: str, service: str) -> str:
    with DEFAULT_ACCESS.open_channel(address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


@pytest.mark.parametrize(("is_unix", "number"), [(False, signal.SIGTERM), (True, signal.SIGINT)], ids=["tcp", "unix"])
def test_a_server_announces_its_address_and_a_signal_ends_it_in_order_within_two_seconds(
    tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch, is_unix: bool, number: signal.Signals
) -> None:
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:3128")  # which matters to nobody
    address = f"unix:{socket_dir / 'ps'}" if is_unix else "127.0.0.1:0"
    with _serving(tmp_path, "--address", address, "--cluster", "job-a") as (process, announced):
        assert announced == address if is_unix else announced.startswith("127.0.0.1:") and not announced.endswith(":0")
        with contextlib.closing(CommandedShard(announced, index=0, cluster="job-a")) as shard:
            assert shard.handshake().identity.cluster == "job-a"
        assert {_health(announced, service) for service in ("", "ps_protocol.v1.ParameterService")} == {"SERVING"}
        with DEFAULT_ACCESS.open_channel(announced) as channel:
            # A call under way that would last for ever.
            watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
            next(watched)
            begun = time.monotonic()
            process.send_signal(number)
            _, said = process.communicate(timeout=10)
            assert time.monotonic() - begun < 4.0  # 2 s promised; the machine may be busy
    assert process.returncode == 0
    assert f"ps 0 ready address={announced} cluster=job-a" in said
    assert f"ps 0 ended reason={number.name}" in said and "Traceback" not in said


def test_a_save_under_way_is_finished_before_the_server_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FAILPOINTS", "ps.save.before_fsync=delay:0.3")
    place = tmp_path / "checkpoints"
    with _serving(tmp_path, "--checkpoint-dir", str(place), "--enable-failpoints") as (process, announced):
        with contextlib.closing(CommandedShard(announced)) as shard:
            training = ShardedTraining(shards=[shard], model=MODEL, checkpoint_dir=str(place))
            training.create()
            shard.call(SaveRequest(fence=fence(3, CHIEF), step=0, tag="t"))
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    (file,) = (place / "t.incomplete").iterdir()
    assert file.name == "ps-00000-of-00001.safetensors" and file.stat().st_size > 0


def test_socket_of_a_living_server_is_not_taken_over(tmp_path: Path, socket_dir: Path) -> None:
    address = f"unix:{socket_dir / 'ps'}"
    with _serving(tmp_path, "--address", address) as (_, announced):
        assert "another process listens there" in _refusal("--address", address)
        with contextlib.closing(CommandedShard(announced)) as shard:
            assert shard.call(ShardStatusRequest()).shard == 0


def test_a_killed_server_is_reported_unavailable_and_its_socket_file_is_replaced(tmp_path: Path, socket_dir: Path) -> None:
    address = f"unix:{socket_dir / 'ps'}"
    with _serving(tmp_path, "--address", address) as (process, announced), contextlib.closing(CommandedShard(announced, index=0)) as shard:
        assert shard.call(ShardStatusRequest()).shard == 0
        process.kill()
        process.wait(10)
        with pytest.raises(PsError, match=f"ps 0 at {announced}") as caught:
            shard.call(ShardStatusRequest())
        assert caught.value.reason == "UNAVAILABLE"
    assert (socket_dir / "ps").exists()
    (tmp_path / "announced").unlink()
    with _serving(tmp_path, "--address", address) as (_, announced):
        with contextlib.closing(CommandedShard(announced)) as shard:
            assert shard.call(ShardStatusRequest()).shard == 0


def test_file_that_is_not_a_socket_is_left_alone(socket_dir: Path) -> None:
    path = socket_dir / "notes"
    path.write_text("mine")
    assert _refusal("--address", f"unix:{path}") == (
        f"lockstep server: cannot listen at unix:{path}: a file that is not a socket is there; choose another path"
    )
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--address", "192.0.2.1:5000"], "there is neither encryption nor a password"),
        (["--address", "192.0.2.1:5000", "--allow-insecure-network"], "it is no address of this machine; check the host"),
        (["--address", "no-such-host.invalid:5000", "--allow-insecure-network"], "the name is unknown; check the host"),
        (["--address", "unix:/etc/passwd"], "a file that is not a socket is there"),
        (["--address", "unix:/no/such/directory/ps"], "its directory does not exist; make it"),
        (["--announce", "/no/such/directory/announced"], "cannot write --announce /no/such/directory/announced: No such file or directory"),
        (["--checkpoint-dir", "/dev/null/x"], "--checkpoint-dir: cannot write to /dev/null/x: there is a file; choose another directory"),
        (["--checkpoint-dir", "file:///dev/null"], "--checkpoint-dir: cannot write to /dev/null: there is a file"),
        (["--index", "x"], "--index: got 'x', want a whole number from 0"),
    ],
    ids=[
        "network",
        "foreign address",
        "unknown name",
        "not a socket",
        "no directory",
        "no directory to announce in",
        "not a directory",
        "file",
        "index",
    ],
)
def test_each_error_at_the_start_is_reported_in_one_line(arguments: list[str], said: str) -> None:
    with contextlib.ExitStack() as stack, pytest.raises(PsError) as caught:
        server = ParameterServer(parse_config(["--index", "0", *arguments], environment={}))
        stack.callback(server.stop, 0.0)
        server.start()
    assert said in caught.value.message and len(caught.value.message.splitlines()) == 1


def test_grpc_is_what_answers_and_nothing_else() -> None:
    """An HTTP/1.1 client is turned away, and the server continues."""
    with open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")
            while connection.recv(4096):
                pass
        assert _health(server.address, "") == "SERVING"
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            _health(server.address, "ps_protocol.v1.ChiefService")


def test_a_data_port_that_is_the_servers_own_is_called_that() -> None:
    port = unused_address().rpartition(":")[2]
    server = ParameterServer(parse_config(["--index", "0", "--address", f"127.0.0.1:{port}", "--data-port", port], environment={}))
    with contextlib.ExitStack() as stack, pytest.raises(PsError, match=f"--data-port: {port} is the port of the server itself"):
        stack.callback(server.stop, 0.0)
        server.start()


def test_a_data_port_beside_a_unix_socket_is_said_to_be_unused(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_server(ParameterServerConfig(index=0, address=f"unix:{socket_dir}/ps", data_port=5999)):
        assert "--data-port 5999 is not used, and nothing listens there: its data sockets are Unix sockets, too" in caplog.messages
