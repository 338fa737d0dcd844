"""Certificates and their authority change while callers and servers use them: no process has to be restarted."""

import shutil
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from ps_protocol.errors import PsError
from ps_protocol.roles.shard import ShardStatusRequest
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.shard import GrpcShard
from ps_protocol.security import certificates
from ps_protocol.security.options import Security
from ps_server.config import ParameterServerConfig
from tests.support.network.certificates import Files, make
from tests.support.parameter_servers.shards import open_server
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_LOOK_INTERVAL_S", 0.0)


class Installed:
    """A directory from which a server and a caller take their files, as an administrator replaces them."""

    def __init__(self, directory: Path) -> None:
        self.old, self.new = make(directory / "old"), make(directory / "new")
        shutil.copytree(self.old.directory, directory / "used")
        self.used = Files(directory / "used")

    def trust(self, *authorities: Files) -> None:
        self._replace("ca.pem", b"".join((one.directory / "ca.pem").read_bytes() for one in authorities))

    def take(self, files: Files) -> None:
        for name in ("ps.pem", "ps.key", "worker.pem", "worker.key"):
            self._replace(name, (files.directory / name).read_bytes())

    def _replace(self, name: str, content: bytes) -> None:
        other = self.used.directory / f"{name}.new"
        other.write_bytes(content)
        other.replace(self.used.directory / name)


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    return Installed(tmp_path)


@pytest.fixture
def config(installed: Installed) -> ParameterServerConfig:
    return ParameterServerConfig(index=0, cluster="job", address="127.0.0.1:0", security=installed.used.server(verify_clients=True))


def worker(files: Files, *, tokens: Files) -> Access:
    directory = files.directory
    token_file, authority = tokens.directory / "worker.token", directory / "ca.pem"
    return Access(Security(token_file=token_file, tls_ca=authority, tls_cert=directory / "worker.pem", tls_key=directory / "worker.key"))


def answers(shard: GrpcShard) -> bool:
    try:
        shard.call(ShardStatusRequest())
    except PsError:
        return False
    return True


def is_let_in(files: Files, address: str, *, tokens: Files) -> bool:
    with closing(GrpcShard(address, access=worker(files, tokens=tokens))) as shard:
        return answers(shard)


def test_caller_and_server_go_over_to_another_authority_and_the_old_one_is_refused(
    installed: Installed, config: ParameterServerConfig
) -> None:
    used = installed.used
    with open_server(config) as server, closing(GrpcShard(server.address, access=worker(used, tokens=used))) as shard:
        assert answers(shard)
        installed.trust(installed.old, installed.new)
        assert answers(shard)
        installed.take(installed.new)
        assert answers(shard)
        installed.trust(installed.new)
        assert answers(shard)
        assert is_let_in(installed.new, server.address, tokens=used)
        assert not is_let_in(installed.old, server.address, tokens=used)


def test_caller_finds_a_restarted_server_that_has_other_certificates(installed: Installed, config: ParameterServerConfig) -> None:
    used = installed.used
    with ExitStack() as stack:
        with open_server(config) as server:
            shard = stack.enter_context(closing(GrpcShard(server.address, access=worker(used, tokens=used))))
            assert answers(shard)
            again = replace(config, address=server.address)
        installed.trust(installed.new)
        installed.take(installed.new)
        stack.enter_context(open_server(again))
        wait_until(lambda: answers(shard), timeout_s=20, what="the server answers")


def test_certificates_that_cannot_be_used_change_nothing(
    installed: Installed, config: ParameterServerConfig, caplog: pytest.LogCaptureFixture
) -> None:
    used = installed.used
    with open_server(config) as server, closing(GrpcShard(server.address, access=worker(used, tokens=used))) as shard:
        assert answers(shard)
        (used.directory / "worker.pem").write_text("nothing")
        assert answers(shard)
        assert "changed certificates cannot be used" in caplog.text
        installed.take(installed.old)
        assert answers(shard)
