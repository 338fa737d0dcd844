"""Strangers that send as fast as they can: training continues nearly as fast, and no step differs. Needs the machine for itself."""

import itertools
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ps_protocol.rpc.channel import DEFAULT_ACCESS
from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Started
from tests.chaos.plan import ENDLESS, Plan
from tests.support.network import certificates
from tests.support.network.floods import KINDS
from tests.support.network.servers import free_ports
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(1200)
ROLES, SECURITIES = ("ps 0", "chief"), ("plain", "plain, gRPC's own polling", "tokens", "tls")
# One of each sort.
NAMES = [
    "priority",
    "window_update",
    "settings",
    "ping",
    "hpack remembered",
    "hpack unfolded",
    "data of a call",
    "rapid reset",
    "calls",
    "garbage",
    "nothing",
]
ALL = os.environ.get("FLOODS") == "all"
PLAN = Plan(num_ps=1, num_workers=2, max_steps=ENDLESS, pace_s=0.01, lease_s=5.0, durability=None, transport="grpc")
NUM_CONNECTIONS, SECONDS, NUM_STEPS = 4, 3.0, 50
# Of the steps before and after. Others may have used the machine.
TARGET, NUM_TRIES = 0.8, 3
# Headers that unfold to 16 MiB, which gRPC takes from a client that does not acknowledge its settings: once in 16 s, and so for longer.
SLOW, SLOW_SECONDS = "hpack unfolded", 20.0


def chosen(security: str) -> list[tuple[str, str]]:
    """Roles and the floods that they get: each sort meets both roles, with two securities. FLOODS=all: everything with everything."""
    if ALL:
        return [(name, kind) for name in ROLES for kind in KINDS]
    place = SECURITIES.index(security)
    numbers = itertools.product(enumerate(NAMES), enumerate(ROLES))
    return [(name, kind) for (number, kind), (role, name) in numbers if (number + role) % len(SECURITIES) == place]


def can_connect(address: str) -> bool:
    """Whether somebody who comes now is let in."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=0.5).close()
    except TimeoutError:
        return False
    return True


def steps(cluster: Cluster, since: float, until: float) -> list[Any]:
    """One worker's steps in that time."""
    return [event for event in cluster.events(0) if event["event"] == "step" and since <= event["at"] < until]


def rate(cluster: Cluster, since: float, until: float) -> float:
    """Steps a second of one worker."""
    return len(steps(cluster, since, until)) / (until - since)


def await_steps(cluster: Cluster, since: float) -> None:
    """Returns after enough steps to take a rate of."""
    wait_until(lambda: len(steps(cluster, since, math.inf)) >= NUM_STEPS, timeout_s=60, what="steps to compare with")


def flooded(cluster: Cluster, address: str, kind: str, *, tls: bool) -> tuple[float, Mapping[str, int]]:
    """Steps a second during a flood at an address, and what the flood says of itself."""
    command = [sys.executable, "-m", "tests.support.network.floods", address, kind, *(["--tls"] if tls else [])]
    seconds = SLOW_SECONDS if kind == SLOW else SECONDS
    command += ["--connections", str(NUM_CONNECTIONS), "--seconds", str(seconds)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        from_, until = time.monotonic(), time.monotonic() + seconds
        words, _ = process.communicate(timeout=60)
    return rate(cluster, from_, until), json.loads(words)


def rate_alone(cluster: Cluster) -> float:
    """Steps a second from now on, while nobody floods."""
    begin = time.monotonic()
    await_steps(cluster, begin)
    return rate(cluster, begin, time.monotonic())


def slow_beside(cluster: Cluster, floods: Sequence[tuple[str, str, str]], *, tls: bool = False) -> list[str]:
    """Floods one after the other: description, address, kind. Returns the descriptions of floods that training does not survive."""
    slow = []
    after = rate_alone(cluster)
    for what, address, kind in floods:
        for number in range(NUM_TRIES):
            if number:  # with connections, or it would show nothing
                cluster.await_(partial(can_connect, address), what="the flood is let in once more")
            before = after
            during, about = flooded(cluster, address, kind, tls=tls)
            after = rate_alone(cluster)
            share = during / ((before + after) / 2 or 1.0)
            words = f"{what} {kind:27} {before:6.1f} {during:6.1f} {after:6.1f} steps/s: {share:4.2f}"
            print(f"{words}; {about['connections']} connections, {about['cut']} cut, {about['bytes'] >> 20} MiB", flush=True)
            if share >= TARGET and about["connections"]:
                break
        else:
            slow.append(words)
    return slow


@pytest.mark.shows("F36")
def test_training_continues_beside_floods_of_the_port_for_data(start: Started) -> None:
    """A connection that says no nonce is not even taken while nobody is invited: it waits in the system's queue, and costs nothing."""
    port = free_ports(3)
    cluster = start(replace(PLAN, transport="sockets", port=port, environment={"ps": {"LOCKSTEP_DATA_PORT": str(port + 2)}}))
    cluster.await_step(50)
    # "nothing" comes last: it leaves the queue full, so that the next flood would have no connection.
    slow = slow_beside(cluster, [("data sockets", f"127.0.0.1:{port + 2}", kind) for kind in ("garbage", "silence", "nothing")])
    assert cluster.running(cluster.everybody) == cluster.everybody
    last = cluster.finish()
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults(num_steps=last)
    assert not slow, "\n".join(["too slow:", *slow])


@pytest.mark.parametrize("security", SECURITIES)
@pytest.mark.shows("F36")
def test_training_continues_beside_floods(start: Started, tmp_path: Path, security: str) -> None:
    """On plain TCP with both ways of polling, with tokens, and with TLS and tokens."""
    files = certificates.make(tmp_path / "files", cluster="lockstep")
    access, environment = DEFAULT_ACCESS, dict[str, dict[str, str]]()
    if security in ("tokens", "tls"):
        access, environment = files.caller("worker", tls=security == "tls"), files.variables(tls=security == "tls")
    elif security != "plain":
        environment = {role: {"LOCKSTEP_OWN_POLLING": "0"} for role in ("ps", "chief", "worker")}
    cluster = start(replace(PLAN, port=free_ports(), environment=environment, access=access))
    cluster.await_step(50)
    floods = [(f"{security:26} {name:6}", cluster.address(name), kind) for name, kind in chosen(security)]
    slow = slow_beside(cluster, floods, tls=security == "tls")
    assert cluster.running(cluster.everybody) == cluster.everybody
    # We come from where the flood did.
    cluster.await_(lambda: can_connect(cluster.chief_address), what="who comes from there may connect again")
    last = cluster.finish()
    assert cluster.rollbacks() == 0
    cluster.assert_as_without_faults(num_steps=last)
    assert not slow, "\n".join(["too slow:", *slow])
