"""Secrets that are replaced while a cluster trains: no participant is cut off for long, and no step differs."""

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ps_protocol.rpc.channel import Access
from ps_protocol.security.tokens import LOOK_INTERVAL_S, new_token, write_secret
from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Started
from tests.chaos.plan import ENDLESS, Plan
from tests.support.network import certificates
from tests.support.network.servers import free_ports

pytestmark = pytest.mark.timeout(200)
# Files are looked at so often; the longest time that nobody may get a step done.
LOOK_S, STANDSTILL_S = 2 * LOOK_INTERVAL_S, 3.0
# How long certificates are good, and how often they are replaced.
_GOOD_S, _NUM_RENEWALS = 15.0, 8


def replace_tokens(files: Path, cluster: Cluster) -> float:
    """As docs/how-to/tls.md says: servers take both, callers send the new ones, the old ones go; returns when they went."""
    tokens = files / "tokens"
    old = [line for line in tokens.read_text().splitlines() if line.strip() and not line.startswith("#")]
    new = [f"{line.split()[0]} {new_token()}" for line in old]
    of_role = dict(line.split() for line in new)
    write_secret(tokens, "\n".join([*old, *new]) + "\n")
    _let_pass(cluster, LOOK_S)
    for path in files.glob("*.token"):
        words = path.read_text().split()
        write_secret(path, " ".join([*words[:-1], of_role[path.stem]]) + "\n")
    write_secret(tokens, "\n".join([*new, *old]) + "\n")
    _let_pass(cluster, LOOK_S)
    write_secret(tokens, "\n".join(new) + "\n")
    return _let_pass(cluster, 0.0)


def _endless(environment: Mapping[str, dict[str, str]], access: Access) -> Plan:
    return Plan(
        max_steps=ENDLESS,
        num_ps=1,
        num_workers=2,
        port=free_ports(),
        transport="grpc",
        environment=environment,
        access=access,
        pace_s=0.01,
        lease_s=10.0,
    )


def _let_pass(cluster: Cluster, seconds: float) -> float:
    """Waits while training continues; returns when that is over."""
    until = time.monotonic() + seconds
    cluster.await_(lambda: time.monotonic() > until, what="time passes")
    return time.monotonic()


@pytest.mark.parametrize("security", ["tokens", "tls"])
def test_training_continues_while_all_tokens_are_replaced_twice(start: Started, tmp_path: Path, security: str) -> None:
    files = certificates.make(tmp_path / "files", cluster="lockstep")
    access = files.caller("worker", tls=security == "tls")
    cluster = start(_endless(files.variables(tls=security == "tls"), access))
    cluster.await_step(20)
    for _ in range(2):
        went_at = replace_tokens(files.directory, cluster)
        _let_pass(cluster, 5.0)
        assert cluster.standstill_s(went_at) < STANDSTILL_S
        assert "its token was removed" in cluster.text_of("ps 0")
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults(num_steps=cluster.finish())


def test_training_continues_while_certificates_of_a_few_seconds_expire(start: Started, tmp_path: Path) -> None:
    """All have certificates, which are replaced in time; who comes late, or again, finds those that are good then. Then they are not."""
    files = certificates.make(tmp_path / "files", cluster="lockstep")
    roles = ("chief", "ps", "worker")
    files.renew(*roles, valid_s=_GOOD_S)
    cluster = start(_endless(files.variables(tls=True, verify_clients=True), files.caller("worker", certificate="worker")))
    cluster.await_step(20)
    began_at = time.monotonic()
    for number in range(_NUM_RENEWALS):
        files.renew(*roles, valid_s=_GOOD_S)
        _let_pass(cluster, _GOOD_S / 3)
        # The first certificates have expired when the later ones of these come.
        if number % 2:
            cluster.kill("worker 1")
            cluster.restart("worker 1")
            cluster.await_step(cluster.reached() + 5)
    assert time.monotonic() - began_at > 2 * _GOOD_S
    # Nobody renews them in time: connections that stand continue, and what connects anew says why it waits.
    _let_pass(cluster, _GOOD_S + 2)
    cluster.kill("chief")
    cluster.restart("chief")
    cluster.await_(lambda: "its certificate has expired" in cluster.text_of("chief"), what="the chief says what it waits for")
    files.renew(*roles, valid_s=600)
    at = cluster.reached()
    cluster.await_(lambda: cluster.reached() > at + 20, what="training continues with certificates that are good")
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults(num_steps=cluster.finish())
