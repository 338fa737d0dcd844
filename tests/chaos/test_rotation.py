"""Tokens, certificates and the authority are replaced while training runs: nothing is started again or lost, and old ones are refused."""

import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ps_protocol.errors import PsError
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.shard import GrpcShard
from ps_protocol.security.options import Security
from tests.chaos.conftest import Started
from tests.chaos.plan import ENDLESS, Plan
from tests.chaos.processes import Cluster
from tests.chaos.test_floods import two_ports
from tests.support import certificates
from tests.support.certificates import Files

pytestmark = pytest.mark.timeout(240)
PLAN = Plan(num_ps=1, num_workers=3, num_steps=ENDLESS, pace_s=0.01, lease_s=5.0, durability=None, transport="grpc")


class Installed:
    """The files that all processes use, as an administrator replaces them one by one."""

    def __init__(self, directory: Path) -> None:
        self.old, self.new = (certificates.make(directory / name, cluster="lockstep") for name in ("old", "new"))
        shutil.copytree(self.old.directory, directory / "used")
        self.used = Files(directory / "used")

    def join(self, name: str, *files: Files) -> None:
        """A file is replaced by those of the same name of others, one after the other."""
        other = self.used.directory / f"{name}.next"
        other.write_bytes(b"".join((one.directory / name).read_bytes() for one in files))
        other.chmod(0o600)
        other.replace(self.used.directory / name)

    @property
    def environment(self) -> Mapping[str, Mapping[str, str]]:
        """The roles' variables."""
        return {role: self._variables(role) for role in ("ps", "chief", "worker")}

    def _variables(self, role: str) -> Mapping[str, str]:
        used = self.used.directory
        own = {"LOCKSTEP_TLS_CA": used / "ca.pem", "LOCKSTEP_TLS_CERT": used / f"{role}.pem", "LOCKSTEP_TLS_KEY": used / f"{role}.key"}
        tokens = {"LOCKSTEP_TOKEN_FILE": used / ("worker.token" if role == "worker" else "tokens")}
        callers = {} if role == "worker" else {"LOCKSTEP_VERIFY_CLIENTS": "1"}
        return {name: str(value) for name, value in (own | tokens).items()} | callers


def caller(*, tokens: Files, certificate: Files, authority: Files) -> Access:
    return Access(
        Security(
            token_file=tokens.directory / "worker.token",
            tls_ca=authority.directory / "ca.pem",
            tls_cert=certificate.directory / "worker.pem",
            tls_key=certificate.directory / "worker.key",
        )
    )


def is_let_in(cluster: Cluster, name: str, access: Access) -> bool:
    address = cluster.address(name)
    with closing(GrpcChief(address, access=access) if name == "chief" else GrpcShard(address, access=access)) as client:
        try:
            client.status()
        except PsError:
            return False
        return True


def _is_as_wanted(cluster: Cluster, name: str, access: Access, is_wanted: bool) -> bool:
    return is_let_in(cluster, name, access) is is_wanted


def test_everything_is_replaced_while_training_runs(start: Started, tmp_path: Path) -> None:
    installed = Installed(tmp_path / "files")
    old, new, used = installed.old, installed.new, installed.used
    access = caller(tokens=used, certificate=used, authority=used)
    cluster = start(replace(PLAN, port=two_ports(), environment=installed.environment, access=access))
    cluster.await_step(50)

    def await_let_in(access: Access, *, is_wanted: bool, what: str) -> None:
        for name in cluster.roles:
            cluster.await_(partial(_is_as_wanted, cluster, name, access, is_wanted), what=f"{name}: {what}")

    # Both are good, then all use the new ones, then only these are good.
    installed.join("ca.pem", old, new)
    installed.join("tokens", new, old)
    await_let_in(caller(tokens=new, certificate=new, authority=used), is_wanted=True, what="takes the new token and certificate, too")
    for name in ("ps", "chief", "worker"):
        installed.join(f"{name}.pem", new)
        installed.join(f"{name}.key", new)
    installed.join("worker.token", new)
    cluster.await_step(cluster.reached() + 200)
    await_let_in(caller(tokens=new, certificate=new, authority=new), is_wanted=True, what="has the new certificate")
    installed.join("ca.pem", new)
    installed.join("tokens", new)
    await_let_in(caller(tokens=old, certificate=new, authority=new), is_wanted=False, what="refuses the old token")
    await_let_in(caller(tokens=new, certificate=old, authority=new), is_wanted=False, what="refuses the old certificate")
    cluster.await_step(cluster.reached() + 200)
    # All connections to the chief are new ones from here on.
    cluster.kill("chief")
    cluster.restart("chief")
    cluster.await_step(cluster.reached() + 200)
    assert cluster.running(cluster.everybody) == cluster.everybody
    last = cluster.finish()
    assert cluster.rollbacks() == 0
    assert {cluster.lives[name] for name in cluster.everybody if name != "chief"} == {1}
    cluster.assert_as_without_faults(num_steps=last)
