"""A long run with a random fault every few seconds: the history is clean, the values are right, and nothing grows."""

import os
import random
import signal
import threading
import time
from collections import Counter

import psutil
import pytest

from tests.chaos import claims
from tests.chaos.cluster import Cluster
from tests.chaos.conftest import Record, Started
from tests.chaos.plan import ENDLESS, Plan

SECONDS = float(os.environ.get("CHAOS_SOAK_S", "45"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
PERIOD_S = 5.0
PLAN = Plan(max_steps=ENDLESS, num_workers=4, pace_s=0.05, checkpoint_steps=40, lease_s=4.0, history=True, has_proxies=True)
# A process that has been at work this long has everything that it needs.
_GROWN_S = 20.0
# A fault that strikes while the last one is still being mended makes it longer.
_MAX_STANDSTILL_S = 30.0
_MAX_MORE_FDS = 20
_MAX_MORE_BYTES = 32 << 20


class Nemesis:
    """Does one harm after the other, and mends it."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.names = cluster.everybody

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
        """A role ends well; the chief leaves the training to the next one."""
        self.cluster.signal(name, signal.SIGTERM)
        self.cluster.await_death(name, code=-signal.SIGTERM if name.startswith("worker") else 0)

    def sever(self, name: str) -> None:
        """All connections."""
        for proxy in [*self.cluster.proxies, self.cluster.chief_proxy]:
            proxy.sever()

    def silence(self, name: str) -> None:
        """Between two kinds of roles, in one direction or both."""
        conditions = self.random.choice([self.cluster.chief_conditions, self.cluster.worker_conditions, self.cluster.worker_to_chief])
        conditions.to_server, conditions.to_client = self.random.choice([(False, False), (True, False), (False, True)])
        threading.Event().wait(self.random.choice([0.5, 2.0]))
        conditions.to_server = conditions.to_client = True


class Sizes:
    """Memory and descriptors of each life of each process: when it is grown, and at its latest."""

    def __init__(self) -> None:
        self._grown: dict[int, tuple[int, int]] = {}
        self._ages: dict[int, float] = {}
        self._most = {"descriptors": (0, ""), "MiB": (0, "")}

    def look(self, cluster: Cluster) -> list[str]:
        """Returns what has grown beyond measure."""
        wrong = []
        for name, process in cluster.processes.items():
            try:
                one = psutil.Process(process.pid)
                size = (one.num_fds(), one.memory_info().rss)
                self._ages[process.pid] = time.time() - one.create_time()
            except psutil.Error:
                continue
            fds, rss = self._grown.setdefault(process.pid, size) if self._ages[process.pid] > _GROWN_S else size
            for what, growth in (("descriptors", size[0] - fds), ("MiB", (size[1] - rss) >> 20)):
                self._most[what] = max(self._most[what], (growth, name))
            if size[0] > fds + _MAX_MORE_FDS or size[1] > rss + _MAX_MORE_BYTES:
                wrong.append(f"{name}: {fds} → {size[0]} descriptors, {rss >> 20} → {size[1] >> 20} MiB")
        return wrong

    def words(self) -> str:
        """What was seen."""
        oldest = max(self._ages.values(), default=0.0)
        num_looked = sum(age > _GROWN_S for age in self._ages.values())
        growth = " and ".join(f"{most} {what} ({name})" for what, (most, name) in self._most.items())
        return f"{num_looked} processes, the oldest of {oldest:.0f} s, have grown by {growth} at most"


@pytest.mark.timeout(SECONDS * 2 + 400)
@pytest.mark.shows("F35")
def test_a_random_fault_every_five_seconds_loses_nothing_and_grows_nothing(start: Started, record: Record) -> None:
    print(f"CHAOS_SEED={SEED}", flush=True)
    cluster, sizes = start(PLAN), Sizes()
    nemesis = Nemesis(cluster, SEED)
    cluster.await_step(10)
    begun_at = time.monotonic()
    end = begun_at + SECONDS
    while time.monotonic() < end:
        nemesis.strike()
        nemesis.mend()
        threading.Event().wait(PERIOD_S)
        nemesis.mend()
        assert not sizes.look(cluster), f"CHAOS_SEED={SEED}"
    # All is mended: now it must continue.
    before = len(cluster.events())
    cluster.await_(lambda: len(cluster.events()) > before + 200, what=f"steps continue (CHAOS_SEED={SEED})", timeout_s=60)
    last = cluster.finish()
    print(f"faults: {dict(nemesis.done)}; last step {last}; {sizes.words()}", flush=True)
    cluster.assert_as_without_faults(num_steps=last)
    print(claims.assert_history_is_clean(cluster.history), flush=True)
    standstill_s = cluster.standstill_s(begun_at)
    record("soak: longest standstill", standstill_s=standstill_s, target_s=_MAX_STANDSTILL_S)
    assert standstill_s < 2 * _MAX_STANDSTILL_S, f"it stood still for {standstill_s:.0f} s, CHAOS_SEED={SEED}"
