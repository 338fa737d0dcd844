"""A long run with a random fault every few seconds: the history is clean, the values are right, and nothing grows."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import psutil
import pytest

from tests.chaos import script
from tests.chaos.conftest import ROOT, Started
from tests.chaos.processes import Cluster, Plan

SECONDS = float(os.environ.get("CHAOS_SOAK_S", "45"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
PERIOD_S = 5.0
PLAN = Plan(num_steps=10_000_000, num_workers=4, pace_s=0.02, checkpoint_steps=40, lease_s=4.0, history=True, has_proxies=True)
# A process that has been at work this long has everything that it needs.
_GROWN_S = 20.0
_MAX_MORE_FDS = 60
_MAX_MORE_BYTES = 96 << 20


class Nemesis:
    """Does one harm after the other, and mends it."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.names = [*cluster.roles, *(f"worker {index}" for index in range(cluster.plan.num_workers))]

    def strike(self) -> None:
        """Does one harm."""
        harm = self.random.choice([self.kill, self.kill, self.kill_two, self.stop, self.ask_to_end, self.sever, self.silence])
        name = self.random.choice(self.names)
        self.done[f"{harm.__name__} {name.partition(' ')[0]}"] += 1
        print(f"{time.monotonic():.1f} {harm.__name__} {name}, at step {self.cluster.reached()}", flush=True)
        harm(name)

    def mend(self) -> None:
        """Starts again what is gone."""
        for name in self.names:
            if self.cluster.processes[name].poll() is not None:
                self.cluster.restart(name)

    def kill(self, name: str) -> None:
        """One process."""
        self.cluster.kill(name)

    def kill_two(self, name: str) -> None:
        """Two at once."""
        self.cluster.kill(name)
        self.cluster.kill(self.random.choice([other for other in self.names if other != name]))

    def stop(self, name: str) -> None:
        """Sleeps for a while, longer than a lease or shorter."""
        self.cluster.signal(name, signal.SIGSTOP)
        threading.Event().wait(self.random.choice([0.5, 2.0, 6.0]))
        self.cluster.signal(name, signal.SIGCONT)

    def ask_to_end(self, name: str) -> None:
        """Of all but the chief, for whom that is the end of the training."""
        name = "ps 0" if name == "chief" else name
        self.cluster.signal(name, signal.SIGTERM)
        self.cluster.await_death(name)

    def sever(self, name: str) -> None:
        """All connections."""
        for proxy in [*self.cluster.proxies, self.cluster.chief_proxy]:
            proxy.sever()

    def silence(self, name: str) -> None:
        """Between two kinds of roles, in one direction or both."""
        weather = self.random.choice([self.cluster.chief_weather, self.cluster.worker_weather, self.cluster.worker_to_chief])
        weather.to_server, weather.to_client = self.random.choice([(False, False), (True, False), (False, True)])
        threading.Event().wait(self.random.choice([0.5, 2.0]))
        weather.to_server = weather.to_client = True


class Sizes:
    """Memory and descriptors of each life of each process: when it is grown, and at its latest."""

    def __init__(self) -> None:
        self._grown: dict[int, tuple[int, int]] = {}

    def look(self, cluster: Cluster) -> list[str]:
        """Returns what has grown beyond measure."""
        wrong = []
        for name, process in cluster.processes.items():
            try:
                one = psutil.Process(process.pid)
                size = (one.num_fds(), one.memory_info().rss)
                is_grown = time.time() - one.create_time() > _GROWN_S
            except psutil.Error:
                continue
            fds, rss = self._grown.setdefault(process.pid, size) if is_grown else size
            if size[0] > fds + _MAX_MORE_FDS or size[1] > rss + _MAX_MORE_BYTES:
                wrong.append(f"{name}: {fds} → {size[0]} descriptors, {rss >> 20} → {size[1] >> 20} MiB")
        return wrong


@pytest.mark.timeout(SECONDS * 2 + 400)
def test_a_random_fault_every_five_seconds_loses_nothing_and_grows_nothing(start: Started) -> None:
    print(f"CHAOS_SEED={SEED}", flush=True)
    cluster, sizes = start(PLAN), Sizes()
    nemesis = Nemesis(cluster, SEED)
    cluster.await_step(10)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        nemesis.strike()
        nemesis.mend()
        threading.Event().wait(PERIOD_S)
        nemesis.mend()
        assert not sizes.look(cluster), f"CHAOS_SEED={SEED}"
    # All is mended: now it must go on.
    before = len(cluster.events())
    cluster.await_(lambda: len(cluster.events()) > before + 200, what=f"steps go on (CHAOS_SEED={SEED})", timeout_s=60)
    subprocess.run([sys.executable, "-m", "lockstep", "finish", "--chief", cluster.chief_address], cwd=ROOT, check=True, timeout=30)
    cluster.await_end()
    print(f"faults: {dict(nemesis.done)}; last step {cluster.reached()}", flush=True)
    (last,) = {event["step"] for event in cluster.events() if event["event"] == "finished"}
    expected = script.reference(num_steps=last, num_workers=PLAN.num_workers)
    for index in range(PLAN.num_workers):
        script.assert_same_bytes(script.load(cluster.directory / f"worker-{index}.npz"), expected)
    verdict = subprocess.run([sys.executable, "-m", "lockstep", "verify", str(cluster.history)], cwd=ROOT, capture_output=True, text=True)
    print(verdict.stdout)
    assert verdict.returncode == 0, f"CHAOS_SEED={SEED}\n{verdict.stdout}{verdict.stderr}"
