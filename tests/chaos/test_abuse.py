"""Mixed abuse beside a training, by strangers and by a holder of a worker's token: the values are those of an undisturbed run.

`ABUSE_S` says for how long.
"""

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from ps_protocol.errors import PsError
from ps_protocol.roles.chief import (
    ClusterStatusRequest,
    CommitPushRequest,
    DeregisterRequest,
    HeartbeatRequest,
    Participant,
    ParticipantKind,
    PushCommit,
)
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Era
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.security.permissions import ALLOWED
from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Started
from tests.chaos.plan import ENDLESS, Plan
from tests.chaos.test_floods import can_connect
from tests.support.network import certificates
from tests.support.network.certificates import Files
from tests.support.network.floods import KINDS
from tests.support.network.servers import free_ports
from tests.support.repository import ROOT

SECONDS = float(os.environ.get("ABUSE_S", "40"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
PLAN = Plan(num_ps=1, num_workers=4, max_steps=ENDLESS, pace_s=0.03, lease_s=10.0, durability=None, transport="grpc")
NUM_IDLE, MAX_GARBAGE_BYTES = 200, 100_000
# Methods whose calls may be made by a worker's token, and which do what they are asked to if a message happens to be one.
HARMFUL = ("FinishTraining", "ChangeSettings", "DeregisterWorker", "RegisterWorker", "DeleteAccumulator")

pytestmark = pytest.mark.timeout(SECONDS + 240)


class Abuse:
    """What one abuser does after the other. Each returns when it is done; nothing that it is answered matters."""

    def __init__(self, cluster: Cluster, files: Files, *, seed: int) -> None:
        self.cluster, self.files, self.random = cluster, files, random.Random(seed)
        self.done: Counter[str] = Counter()

    def run(self, until: float) -> None:
        """Does one thing after the other, also beside other threads."""
        while time.monotonic() < until:
            kind: Callable[[str], None] = self.random.choice([self.flood, self.flood, self.idle, self.trickle, self.forge, self.garbage])
            name = self.random.choice(self.cluster.roles)
            self.done[f"{kind.__name__} at {name}"] += 1
            # Its address may have to wait.
            with suppress(OSError, PsError, grpc.RpcError):
                kind(self.cluster.address(name))

    def flood(self, address: str) -> None:
        """Frames and calls without a token, as fast as they go."""
        words = [sys.executable, "-m", "tests.support.network.floods", address, self.random.choice([*KINDS])]
        words += ["--connections", str(self.random.randint(1, 4)), "--seconds", str(self.random.randint(1, 4))]
        subprocess.run(words, cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=60)

    def idle(self, address: str) -> None:
        """Many connections that say nothing."""
        with ExitStack() as stack:
            for _ in range(NUM_IDLE):
                stack.enter_context(self._connect(address))

    def trickle(self, address: str) -> None:
        """A greeting that comes byte by byte, and never ends."""
        with self._connect(address) as connection:
            connection.settimeout(0.1)
            for byte in b"PRI * HTTP/2.0\r\n\r\nSM":
                connection.send(bytes([byte]))
                with suppress(TimeoutError):
                    connection.recv(100)

    def forge(self, address: str) -> None:
        """Commits, signs of life and goodbyes in the name of workers, by a worker's token."""
        with closing(GrpcChief(self.cluster.chief_address, access=self.files.caller("worker", tls=False))) as chief:
            status = chief.call(ClusterStatusRequest(), timeout_s=5.0)
            for victim in status.participants:
                era = Era(life=self.random.choice([0, 1, self.random.getrandbits(60)]), epoch=status.epoch)
                incarnation = victim.incarnation + self.random.choice([0, 0, 1, 1 << 62])
                them = Participant(
                    era=era, kind=ParticipantKind.WORKER, index=victim.index, incarnation=incarnation, secret=self.random.getrandbits(64)
                )
                push_id = PushId(worker=victim.index, incarnation=incarnation, sequence=self.random.choice([1, 1 << 20, 1 << 63]))
                commit = PushCommit(push_id=push_id, step=status.global_step, staged=True)
                for request in (CommitPushRequest(participant=them, commit=commit), HeartbeatRequest(participant=them)):
                    with suppress(PsError):
                        chief.call(request)
                with suppress(PsError):
                    chief.call(DeregisterRequest(participant=them))

    def garbage(self, address: str) -> None:
        """Messages that are none, to each method, by a worker's token."""
        access = self.files.caller("worker", tls=False)
        with access.open_channel(address) as channel:
            metadata = access.metadata_for(address)()
            for method in self.random.sample([method for method in ALLOWED if not method.endswith(HARMFUL)], 10):
                messages = [self.random.randbytes(self.random.randint(0, MAX_GARBAGE_BYTES)) for _ in range(3)]
                with suppress(grpc.RpcError):
                    invoke: Any = channel.stream_stream(method)
                    for _ in invoke(iter(messages), metadata=metadata, timeout=2):
                        pass

    @staticmethod
    def _connect(address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=1.0)


@pytest.mark.shows("F36")
def test_values_beside_mixed_abuse_are_those_of_an_undisturbed_run(start: Started, tmp_path: Path) -> None:
    print(f"seed {SEED}", flush=True)
    files = certificates.make(tmp_path / "files", cluster="lockstep")
    environment = files.variables(tls=False)
    cluster = start(replace(PLAN, port=free_ports(), environment=environment, access=files.caller("worker", tls=False)))
    cluster.await_step(50)
    begin, begun_at = cluster.reached(), time.monotonic()
    abuses = [Abuse(cluster, files, seed=SEED + number) for number in range(2)]
    threads = [threading.Thread(target=abuse.run, args=(begun_at + SECONDS,)) for abuse in abuses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 90)
        assert not thread.is_alive()
    took_s, num_steps = time.monotonic() - begun_at, cluster.reached() - begin
    print(f"{num_steps} steps in {took_s:.0f} s beside {dict(sum((abuse.done for abuse in abuses), Counter()))}", flush=True)
    assert cluster.running(cluster.everybody) == cluster.everybody
    # We come from where the abuse did.
    cluster.await_(lambda: can_connect(cluster.chief_address), what="who comes from there may connect again")
    cluster.await_step(cluster.reached() + 50)
    last = cluster.finish()
    assert cluster.rollbacks() == 0
    assert set(cluster.lives.values()) == {1}
    assert Counter(event["event"] for event in cluster.events())["joined"] == PLAN.num_workers
    cluster.assert_as_without_faults(num_steps=last)
