"""A simulated cluster: its processes, whoever starts them again, and what befalls them. Raises BrokenPromise; decides nothing else."""

from collections.abc import Callable
from dataclasses import replace

from chief.checkpoint_store import CheckpointStore
from chief.coordination import CheckpointConfig, CoordinationConfig
from ps_protocol.checkpoint import Durability
from ps_protocol.checkpoint_manifest import decode_manifest
from ps_protocol.chief import ClusterState
from ps_protocol.clipping import NO_CLIP, ClipSpec
from ps_protocol.model import ModelSpec, PlacementPolicy
from ps_protocol.optimizer_spec import OptimizerSpec, constant
from ps_protocol.tensors import DataType, VariableSpec
from tests.simulation.chief_node import ChiefNode
from tests.simulation.disk import SimulatedStorage
from tests.simulation.oracle import LEARNING_RATE, MOMENTUM, BrokenPromise, Oracle
from tests.simulation.scenario import FAULTS_S, Fault, Scenario
from tests.simulation.shard_node import ShardNode
from tests.simulation.worker_node import WorkerNode
from tests.simulation.world import Life, NetworkSpec, World

SIZE = 4
_PROGRESS_STEPS = 4
_PROGRESS_S = 90.0
# No call may block for longer: its own limit, and the longest that a process stands still.
_BLOCKED_S = 5.0 + 5.5
_STORM = NetworkSpec(drop=0.2, duplicate=0.2, late=0.1, jitter_s=0.05)


class SimulatedCluster:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(f"network {scenario.seed}", scenario.network)
        self.oracle = Oracle(num_shards=scenario.num_shards, size=SIZE, is_durable_at_once=scenario.durability is Durability.STEP)
        self._storage = SimulatedStorage(on_commit=self._committed)
        self._shards = tuple(f"ps-{index}" for index in range(scenario.num_shards))
        self._chiefs: dict[str, ChiefNode] = {}
        self._chief = ""
        self._num_chiefs = 0
        self._failure = ""
        self._may_fail = False
        for index in range(scenario.num_shards):
            self._start_shard(index)
        self._start_chief("chief", takes_over=False)
        for index in range(scenario.num_workers):
            self._start_worker(index, takes_over=False)
        for fault in scenario.faults:
            self.world.at(fault.at, lambda fault=fault: self._befall(fault))  # type: ignore[misc]

    def run(self) -> None:
        """Runs it all: first with faults, then without any, when training must go on."""
        world = self.world
        world.after_event = self._check
        world.run(FAULTS_S, is_over=lambda: bool(self._failure))
        self._heal()
        start = self._step
        world.run(world.now + _PROGRESS_S, is_over=lambda: bool(self._failure) or self._step >= start + _PROGRESS_STEPS)
        if self._failure:
            if self.oracle.committed and not self._may_fail:
                raise BrokenPromise(f"6: the cluster has failed although there is a whole checkpoint: {self._failure}")
            world.seen["failed, with words, since nothing was saved"] += 1
        elif self._step < start + _PROGRESS_STEPS:
            chief = self._chiefs[self._chief]
            raise BrokenPromise(f"6: stands at step {self._step} for {_PROGRESS_S:g} s: {chief.coordinator.explain(world.now)}")

    @property
    def _step(self) -> int:
        """The open step, counted on through rollbacks."""
        training = [one.coordinator.global_step for one in self._living_chiefs() if one.coordinator.state is ClusterState.TRAINING]
        return max(training, default=-1)

    def _living_chiefs(self) -> list[ChiefNode]:
        return [chief for name, chief in self._chiefs.items() if (life := self.world.life(name)) is not None and not life.is_stopped]

    def _check(self) -> None:
        for chief in self._living_chiefs():
            if chief.coordinator.state is ClusterState.FAILED and not self._failure:
                self._failure = chief.coordinator.status(self.world.now).reason
            if overdue := chief.overdue(_BLOCKED_S):
                raise BrokenPromise(f"6: calls are not answered: {overdue}")

    def _committed(self, manifest: bytes) -> None:
        checkpoint, _ = decode_manifest(manifest, where="simulated")
        self.world.note(f"whole: {checkpoint.tag}")
        self.world.seen["checkpoint whole"] += 1
        self.oracle.committed_checkpoint(checkpoint.epoch, checkpoint.step)

    # -- processes

    def _start_shard(self, index: int) -> None:
        name, scenario = self._shards[index], self.scenario
        if self.world.life(name) is not None:
            return

        def make(life: Life) -> ShardNode:
            return ShardNode(
                self.world,
                life,
                index=index,
                storage=self._storage if scenario.durability else None,
                oracle=self.oracle,
                on_crash=lambda: self._kill(name, 0.3),
            )

        self.world.start(name, make)

    def _start_chief(self, name: str, *, takes_over: bool) -> None:
        if self.world.life(name) is not None:
            return
        scenario = self.scenario
        checkpoints = None
        if scenario.durability is not None:
            checkpoints = CheckpointConfig(durability=scenario.durability, interval_s=1.0, every_steps=scenario.every_steps, keep=2)
        config = CoordinationConfig(
            total_num_replicas=scenario.num_workers,
            replicas_to_aggregate=scenario.num_required,
            lease_s=scenario.lease_s,
            min_replicas=scenario.min_replicas,
            checkpoints=checkpoints,
        )

        def make(life: Life) -> ChiefNode:
            node = ChiefNode(
                self.world,
                life,
                config=config,
                shards=self._shards,
                store=CheckpointStore(self._storage, cluster=config.cluster) if checkpoints else None,
                oracle=self.oracle,
                takes_over=takes_over,
                on_end=lambda reason: self._chief_ended(name, reason),
            )
            self._chiefs[name] = node
            return node

        self._chief = name
        self.world.start(name, make)

    def _start_worker(self, index: int, *, takes_over: bool) -> None:
        name, scenario = f"worker-{index}", self.scenario
        if self.world.life(name) is not None:
            return

        def make(life: Life) -> WorkerNode:
            return WorkerNode(
                self.world,
                life,
                index=index,
                model=_model(scenario),
                shards=self._shards,
                chief=self._chief,
                lease_s=scenario.lease_s,
                oracle=self.oracle,
                compute_s=scenario.compute_s,
                takes_over=takes_over,
                on_end=lambda reason: self._worker_ended(index, reason),
            )

        self.world.start(name, make)

    def _chief_ended(self, name: str, reason: str) -> None:
        self.world.kill(name)
        others = [other for other in self._chiefs if other != name and self.world.life(other) is not None]
        if name == self._chief and others:
            self._chief = others[-1]  # it has given up, since that one is at work
        elif name == self._chief and not self._failure:
            # Its successor has given up, or it was killed while it wrote: somebody starts it again.
            self.world.at(0.3, lambda: self._start_chief(name, takes_over=reason == "killed"))

    def _worker_ended(self, index: int, reason: str) -> None:
        name = f"worker-{index}"
        self.world.kill(name)
        if reason == "TrainingFailed" and self._failure:
            return
        if reason != "Superseded":
            raise BrokenPromise(f"6: {name} ended with {reason}")
        self.world.seen["worker superseded"] += 1
        self.world.at(1.0, lambda: self._start_worker(index, takes_over=False))

    def _kill(self, name: str, seconds: float) -> None:
        self.world.note(f"killed: {name}")
        self.world.kill(name)
        self.world.at(seconds, lambda: self._start_again(name))

    def _start_again(self, name: str) -> None:
        role, _, number = name.partition("-")
        if role == "ps":
            self._start_shard(int(number))
        elif role == "worker":
            self._start_worker(int(number), takes_over=True)
        elif name == self._chief:
            self._start_chief(name, takes_over=True)

    # -- faults

    def _befall(self, fault: Fault) -> None:
        self.world.note(f"fault: {fault.kind} {fault.target} {fault.seconds:g} s")
        self.world.seen[f"fault: {fault.kind}"] += 1
        _FAULTS[fault.kind](self, fault)

    def _real(self, name: str) -> str:
        return self._chief if name == "chief" else name

    def _one_killed(self, fault: Fault) -> None:
        self._kill(self._real(fault.target[0]), fault.seconds)

    def _all_killed(self, fault: Fault) -> None:
        for name in (*self._shards, self._chief, *(f"worker-{index}" for index in range(self.scenario.num_workers))):
            self._kill(name, fault.seconds * self.world.between(0.2, 1.0))

    def _stopped(self, fault: Fault) -> None:
        name = self._real(fault.target[0])
        self.world.stop(name)
        self.world.at(fault.seconds, lambda: self.world.resume(name))

    def _cut(self, fault: Fault) -> None:
        source, target = (self._real(name) for name in fault.target)
        self.world.cut(source, target)
        if fault.number % 2:
            self.world.cut(target, source)
        self.world.at(fault.seconds, self.world.mend)

    def _new_chief(self, fault: Fault) -> None:
        """The chief stands still, and another one is started elsewhere; later the old one goes on."""
        old = self._chief
        self.world.stop(old)
        self.world.at(fault.seconds, lambda: self.world.resume(old))
        self._num_chiefs += 1
        self._start_chief(f"chief-{self._num_chiefs}", takes_over=bool(fault.number % 2))

    def _storm(self, fault: Fault) -> None:
        self.world.network = _STORM
        self.world.at(fault.seconds, lambda: setattr(self.world, "network", self.scenario.network))

    def _killed_in_save(self, fault: Fault) -> None:
        self._storage.fuse = fault.number

    def _full(self, fault: Fault) -> None:
        self._storage.is_full = True
        self.world.at(fault.seconds, lambda: setattr(self._storage, "is_full", False))

    def _unreadable(self, fault: Fault) -> None:
        # A chief that starts just then says so and ends; people look at storage.
        self._storage.is_broken = self._may_fail = True
        self.world.at(fault.seconds, lambda: setattr(self._storage, "is_broken", False))

    def _rot(self, fault: Fault) -> None:
        whole = self._storage.whole_tags
        if whole and self._storage.rot(whole[-1], fault.number):
            # Then a promise cannot be kept that needs it.
            self.oracle.is_rotten = self._may_fail = True

    def _heal(self) -> None:
        world, storage = self.world, self._storage
        world.note("healed")
        storage.fuse, storage.is_full, storage.is_broken = None, False, False
        world.heal()
        for index in range(self.scenario.num_shards):
            self._start_shard(index)
        if world.life(self._chief) is None and not self._failure:
            self._start_chief(self._chief, takes_over=True)
        for index in range(self.scenario.num_workers):
            self._start_worker(index, takes_over=True)


_FAULTS: dict[str, Callable[[SimulatedCluster, Fault], None]] = {
    "kill": SimulatedCluster._one_killed,
    "kill all": SimulatedCluster._all_killed,
    "stop": SimulatedCluster._stopped,
    "cut": SimulatedCluster._cut,
    "new chief": SimulatedCluster._new_chief,
    "storm": SimulatedCluster._storm,
    "kill in save": SimulatedCluster._killed_in_save,
    "full": SimulatedCluster._full,
    "unreadable": SimulatedCluster._unreadable,
    "rot": SimulatedCluster._rot,
}


def run(scenario: Scenario) -> SimulatedCluster:
    """Runs a scenario and returns what has become of it. Raises BrokenPromise."""
    cluster = SimulatedCluster(scenario)
    try:
        cluster.run()
    except BrokenPromise as broken:
        broken.add_note("\n".join([scenario.words, *cluster.world.log[-60:]]))
        raise
    return cluster


def shrunk(scenario: Scenario, *, breaks: Callable[[Scenario], bool]) -> Scenario:
    """Returns the scenario without the faults, and the roughness of the network, that it does not take to break the promise."""
    smaller = replace(scenario, network=NetworkSpec())
    if breaks(smaller):
        scenario = smaller
    for fault in scenario.faults:
        smaller = replace(scenario, faults=tuple(one for one in scenario.faults if one is not fault))
        if breaks(smaller):
            scenario = smaller
    return scenario


def _model(scenario: Scenario) -> ModelSpec:
    variables = tuple(VariableSpec(name=f"w{index}", data_type=DataType.FLOAT32, shape=(SIZE,)) for index in range(scenario.num_shards))
    optimizer = OptimizerSpec(name="momentum", learning_rate=constant(LEARNING_RATE), hyperparameters={"momentum": MOMENTUM})
    # So large a norm that nothing is scaled: what matters is the way through PrepareStep.
    clip = ClipSpec(global_norm=1e6) if scenario.has_norms else NO_CLIP
    return ModelSpec(variables=variables, optimizer=optimizer, placement=PlacementPolicy(), clip=clip)
