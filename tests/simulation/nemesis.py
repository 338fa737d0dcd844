"""The faults of a simulated cluster: each kind, done to its processes, network and storage. Knows no promise."""

import itertools
from collections.abc import Callable
from typing import Any, Protocol

from ps_protocol.model.optimizers import constant
from ps_protocol.roles.chief import ChangeSettingsRequest, FinishTrainingRequest, HyperparameterChange, SaveCheckpointRequest
from ps_protocol.roles.request import Request
from tests.simulation.disk import SimulatedStorage
from tests.simulation.scenario import POLICIES, RATES, Fault
from tests.simulation.world import NetworkSpec, World

_STORM = NetworkSpec(drop=0.2, duplicate=0.2, late=0.1, jitter_s=0.05)
# How long an order may block.
_SLICE_S = 1.0


class Victim(Protocol):
    """A cluster that faults befall."""

    world: World
    storage: SimulatedStorage
    servers: tuple[str, ...]
    workers: tuple[str, ...]

    @property
    def chief(self) -> str:
        """The name of the chief that was started last."""

    def kill(self, name: str, seconds: float) -> None:
        """Ends a process, which is started again after so many seconds."""

    def ask_to_end(self, name: str, seconds: float) -> None:
        """Asks a process to end, which is started again after so many seconds."""

    def have_half_applied(self, name: str) -> None:
        """Has a parameter server fail half-way through the next step."""

    def start_another_chief(self, *, takes_over: bool) -> None:
        """Starts a chief under a new name."""

    def start_another_worker(self, name: str) -> None:
        """Starts another process of a worker's index, which takes its place."""

    def have_forged(self, name: str, *, may_be_nowhere: bool) -> None:
        """Has a worker commit what it has not given to all shards."""

    def have_lied(self, name: str, *, to_standbys: bool) -> None:
        """Has a worker give half of the servers other gradients than their twins."""

    def have_hoarded(self, name: str) -> None:
        """Has a worker give more than it may and commit none of that."""

    def have_impersonated(self, name: str) -> None:
        """Has somebody speak in a worker's name."""

    def order(self, request: Request[Any]) -> None:
        """Has somebody ask the chief for this until it is answered."""

    def allow_failure(self) -> None:
        """From now on the cluster may say that it has failed although something was saved: people must look at storage."""

    def allow_loss(self) -> None:
        """From now on a checkpoint that was whole may be lost."""


class Nemesis:
    """Has faults befall a cluster."""

    def __init__(self, cluster: Victim, calm: NetworkSpec) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._calm = calm
        self._orders = itertools.count(1)

    def befall(self, fault: Fault) -> None:
        """Has one befall it now."""
        self._world.note(f"fault: {fault.kind} {fault.target} {fault.seconds:g} s")
        self._world.seen[f"fault: {fault.kind}"] += 1
        _FAULTS[fault.kind](self, fault)

    def heal(self) -> None:
        """From now on nothing befalls it, and what stood still or was broken is well."""
        storage = self._cluster.storage
        storage.fuse, storage.is_full, storage.is_broken = None, False, False
        self._world.heal()

    def _real(self, name: str) -> str:
        return self._cluster.chief if name == "chief" else name

    def _one_killed(self, fault: Fault) -> None:
        self._cluster.kill(self._real(fault.target[0]), fault.seconds)

    def _asked_to_end(self, fault: Fault) -> None:
        self._cluster.ask_to_end(self._real(fault.target[0]), fault.seconds)

    def _half_applied(self, fault: Fault) -> None:
        self._cluster.have_half_applied(fault.target[0])

    def _all_killed(self, fault: Fault) -> None:
        cluster = self._cluster
        for name in (*cluster.servers, cluster.chief, *cluster.workers):
            cluster.kill(name, fault.seconds * self._world.between(0.2, 1.0))

    def _all_lost(self, fault: Fault) -> None:
        """What the cluster knows is gone, and its workers are left."""
        cluster = self._cluster
        for name in (*cluster.servers, cluster.chief):
            cluster.kill(name, fault.seconds * self._world.between(0.2, 1.0))

    def _stopped(self, fault: Fault) -> None:
        name = self._real(fault.target[0])
        self._world.stop(name)
        self._world.at(fault.seconds, lambda: self._world.resume(name))

    def _cut(self, fault: Fault) -> None:
        source, target = (self._real(name) for name in fault.target)
        self._world.cut(source, target)
        if fault.number % 2:
            self._world.cut(target, source)
        self._world.at(fault.seconds, self._world.mend)

    def _new_chief(self, fault: Fault) -> None:
        """The chief stands still, and another one is started elsewhere; later the old one goes on."""
        old = self._cluster.chief
        self._world.stop(old)
        self._world.at(fault.seconds, lambda: self._world.resume(old))
        self._cluster.start_another_chief(takes_over=bool(fault.number % 2))

    def _new_worker(self, fault: Fault) -> None:
        """A worker stands still, or does not, and another process of its index is started: people believe it dead."""
        old = fault.target[0]
        if fault.number % 2:
            self._world.stop(old)
            self._world.at(fault.seconds, lambda: self._world.resume(old))
        self._cluster.start_another_worker(old)

    def _forge(self, fault: Fault) -> None:
        self._cluster.have_forged(fault.target[0], may_be_nowhere=bool(fault.number))

    def _lie(self, fault: Fault) -> None:
        self._cluster.have_lied(fault.target[0], to_standbys=bool(fault.number))

    def _hoard(self, fault: Fault) -> None:
        self._cluster.have_hoarded(fault.target[0])

    def _impersonate(self, fault: Fault) -> None:
        self._cluster.have_impersonated(fault.target[0])

    def _policy_changed(self, fault: Fault) -> None:
        policy = POLICIES[fault.number]
        self._cluster.order(ChangeSettingsRequest(request_id=next(self._orders), max_wait_s=_SLICE_S, policy=policy))

    def _numbers_changed(self, fault: Fault) -> None:
        change = HyperparameterChange(learning_rate=constant(RATES[fault.number % len(RATES)]))
        self._cluster.order(ChangeSettingsRequest(request_id=next(self._orders), max_wait_s=_SLICE_S, hyperparameters=change))

    def _saved(self, fault: Fault) -> None:
        self._cluster.order(SaveCheckpointRequest(request_id=next(self._orders), max_wait_s=_SLICE_S))

    def _finished(self, fault: Fault) -> None:
        self._cluster.order(FinishTrainingRequest(reason="people have seen enough"))

    def _storm(self, fault: Fault) -> None:
        self._world.network = _STORM
        self._world.at(fault.seconds, lambda: setattr(self._world, "network", self._calm))

    def _killed_in_save(self, fault: Fault) -> None:
        self._cluster.storage.fuse = fault.number

    def _full(self, fault: Fault) -> None:
        storage = self._cluster.storage
        storage.is_full = True
        self._world.at(fault.seconds, lambda: setattr(storage, "is_full", False))

    def _unreadable(self, fault: Fault) -> None:
        # A chief that starts just then says so and ends; people look at storage.
        storage = self._cluster.storage
        storage.is_broken = True
        self._cluster.allow_failure()
        self._world.at(fault.seconds, lambda: setattr(storage, "is_broken", False))

    def _rot(self, fault: Fault) -> None:
        storage = self._cluster.storage
        whole = storage.whole_tags
        if whole and storage.rot(whole[-1], fault.number):
            # Then a promise cannot be kept that needs it.
            self._cluster.allow_loss()
            self._cluster.allow_failure()
            if fault.target[0] in self._cluster.servers:  # what harmed the disk may take a server with it, and then the newest is wanted
                self._cluster.kill(fault.target[0], min(fault.seconds, 0.5))


_FAULTS: dict[str, Callable[[Nemesis, Fault], None]] = {
    "kill": Nemesis._one_killed,
    "end": Nemesis._asked_to_end,
    "half": Nemesis._half_applied,
    "kill all": Nemesis._all_killed,
    "lose all": Nemesis._all_lost,
    "stop": Nemesis._stopped,
    "cut": Nemesis._cut,
    "new chief": Nemesis._new_chief,
    "new worker": Nemesis._new_worker,
    "forge": Nemesis._forge,
    "hoard": Nemesis._hoard,
    "lie": Nemesis._lie,
    "impostor": Nemesis._impersonate,
    "policy": Nemesis._policy_changed,
    "numbers": Nemesis._numbers_changed,
    "save": Nemesis._saved,
    "finish": Nemesis._finished,
    "storm": Nemesis._storm,
    "kill in save": Nemesis._killed_in_save,
    "full": Nemesis._full,
    "unreadable": Nemesis._unreadable,
    "rot": Nemesis._rot,
}
