"""A simulated cluster: its processes, how they are started again, and their faults. Raises BrokenPromise; decides nothing else."""

import base64
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from chief.options import CheckpointConfig, CoordinationConfig
from chief.shards.checkpoint_store import CheckpointStore
from ps_protocol.checkpoint.manifest import decode_json
from ps_protocol.model.keys import KeySpec
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.policy import TokenMode
from ps_protocol.model.spec import NO_CLIP, ClipSpec, ModelSpec, PlacementPolicy
from ps_protocol.model.variables import ANY, DataType, Initializer, InitializerKind, VariableSpec
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import DEFAULT_POLICY, ClusterState
from ps_protocol.roles.request import Request
from tests.simulation.arenas import FIRST_VALUE
from tests.simulation.chief_node import ChiefNode
from tests.simulation.disk import SimulatedStorage
from tests.simulation.follower import SimulatedFollower
from tests.simulation.histories import SimulatedHistory, audited
from tests.simulation.impostor import start_impostor
from tests.simulation.nemesis import Nemesis
from tests.simulation.operator_node import start_operator
from tests.simulation.oracle import LEARNING_RATE, MOMENTUM, BrokenPromise, Oracle, index_of
from tests.simulation.rules import PolicyRules
from tests.simulation.scenario import FAULTS_S, Fault, Scenario
from tests.simulation.shard_node import ShardNode
from tests.simulation.tasks import Life
from tests.simulation.worker_node import WorkerNode
from tests.simulation.world import NetworkSpec, World

SIZE = 4
# As many as a step has at most, and some more.
_ROWS_PER_SHARD = 18
_PROGRESS_STEPS = 4
_PROGRESS_S = 90.0
# No call may block for longer: its own limit, and the longest that a process stands still.
_BLOCKED_S = 5.0 + 5.5
_LOOK_S = 0.25
# How long people look on before they do what a chief advises.
_PATIENCE_S = 2.0
# How long a worker may go on once training is finished.
_HEARD_S = 20.0


class SimulatedCluster:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.shards = tuple(f"ps-{index}" for index in range(scenario.num_shards))
        self.standbys = tuple(f"{name}-standby" for name in self.shards) if scenario.has_standbys else ()
        self.servers = (*self.shards, *self.standbys)
        self.world = World(f"network {scenario.seed}", scenario.network)
        # Where workers wait for data that others have, a step goes on without theirs.
        min_if_strict = 1 if scenario.min_replicas or scenario.data else scenario.num_required
        rules = PolicyRules(
            spec=scenario.policy,
            num_workers=scenario.num_workers,
            num_required=scenario.num_required,
            min_required=min_if_strict if scenario.policy.needs_many_workers else scenario.num_required,
            min_if_strict=min_if_strict,
        )
        self.oracle = Oracle(
            servers=self.servers, size=SIZE, is_durable_at_once=scenario.durability is Durability.STEP, rules=rules,
            max_age=scenario.max_age, admitted=scenario.admitted, admit_after=scenario.admit_after,
        )  # fmt: skip
        self.storage = SimulatedStorage(on_commit=self._committed)
        self.workers = tuple(f"worker-{index}" for index in range(scenario.num_workers))
        self._nemesis = Nemesis(self, scenario.network)
        self._follower = SimulatedFollower(scenario.seed, self.oracle)
        self._chiefs: dict[str, ChiefNode] = {}
        self._worker_nodes: dict[str, WorkerNode] = {}
        self._shard_nodes: dict[str, ShardNode] = {}
        self.chief = ""
        self._num_chiefs = self._num_workers = 0
        # By index, the process that was started last.
        self._workers = dict(enumerate(self.workers))
        self._failure = ""
        self._may_fail = False
        self._histories: list[tuple[str, SimulatedHistory]] = []
        self._advised_for_s = 0.0
        self._is_over = self._is_finished = False
        self._wanted_step: int | None = None
        for name in self.servers:
            self._start_shard(name)
        self._start_chief("chief", takes_over=False)
        for index in range(scenario.num_workers):
            self._start_worker(index, takes_over=False)
        for fault in scenario.faults:
            self.world.at(fault.at, partial(self._befall, fault))

    def _befall(self, fault: Fault) -> None:
        if not self._is_finished:
            self._nemesis.befall(fault)

    def run(self) -> None:
        """Runs it all: first with faults, then without any, when training must go on; or end, once it is finished."""
        world = self.world
        self._look()
        world.run(FAULTS_S, is_over=lambda: bool(self._failure) or self._is_finished)
        self._heal()
        start = self._step
        self._wanted_step = start + _PROGRESS_STEPS
        world.run(world.now + _PROGRESS_S, is_over=lambda: self._is_over)
        if self._failure:
            if self.oracle.has_way_back and not self._may_fail:
                raise BrokenPromise(f"6: the cluster has failed although there is a whole checkpoint: {self._failure}")
            world.seen["failed, with words, since nothing was saved"] += 1
        elif not self._is_over:
            chief = self._chiefs[self.chief]
            if missing := self._missing_standbys(chief):
                raise BrokenPromise(f"S: standbys stay out: {missing}")
            words = chief.coordinator.cluster.explain(world.now)
            raise BrokenPromise(f"6: stands at step {self._step} for {_PROGRESS_S:g} s: {words}")
        self._audit()
        if self.scenario.is_for_a_standby and (self.oracle.num_rollbacks or self._failure):
            raise BrokenPromise(f"S: a server was lost, and the other one did not take its place: {self._failure or 'it was rolled back'}")

    @property
    def _step(self) -> int:
        """The open step, the highest of all chiefs that train."""
        training = [one.coordinator.cluster.step for one in self._living_chiefs() if one.coordinator.cluster.state is ClusterState.TRAINING]
        return max(training, default=-1)

    def _living_chiefs(self) -> list[ChiefNode]:
        return [chief for name, chief in self._chiefs.items() if (life := self.world.life(name)) is not None and not life.is_stopped]

    def _changed(self, chief: ChiefNode) -> None:
        """A chief has taken note of something."""
        state = chief.coordinator.cluster.state
        if state is ClusterState.FAILED and not self._failure:
            self._failure = chief.coordinator.status(self.world.now).reason
            self._is_over = True
        elif state is ClusterState.FINISHED and self._living_name(chief) == self.chief:
            if not self._is_finished:
                self.world.at(_HEARD_S, self._end_who_has_not_heard)
            self._is_finished = True
        elif self._wanted_step is not None and state is ClusterState.TRAINING and chief.coordinator.cluster.step >= self._wanted_step:
            self._is_over = not self._missing_standbys(chief)

    def _end_who_has_not_heard(self) -> None:
        """Nobody brings a server back that was lost before the end: a session that waits for it ends by its own limit."""
        for name in self._workers.values():
            self.world.seen["worker waited for a server when training was finished"] += self.world.life(name) is not None
            self.world.kill(name)

    def _living_name(self, chief: ChiefNode) -> str:
        return next((name for name, one in self._chiefs.items() if one is chief), "")

    def _missing_standbys(self, chief: ChiefNode) -> list[str]:
        """Why standbys are missing that could be brought back from a checkpoint."""
        takes_late = chief.coordinator.cluster.policy.spec.accepts_stale
        has_way_back = bool(self.standbys) and self.scenario.durability is not None and not takes_late
        shards = chief.coordinator.status(self.world.now).shards if has_way_back else ()
        return [shard.standby_missing for shard in shards if shard.standby_missing]

    def _look(self) -> None:
        for chief in self._living_chiefs():
            if overdue := chief.overdue(_BLOCKED_S):
                raise BrokenPromise(f"6: calls are not answered: {overdue}")
        self._do_as_advised()
        self._follow()
        self.world.at(_LOOK_S, self._look)

    def _follow(self) -> None:
        cluster = self._chiefs[self.chief].coordinator.cluster
        if cluster.state is not ClusterState.TRAINING:
            return  # nobody is registered meanwhile
        layouts, told = cluster.model.layouts, {record.address for record in cluster.servers}
        for name, node in self._shard_nodes.items():
            life = self.world.life(name)
            if name in told and life is not None and not life.is_stopped and life.process is node:
                self._follower.look(name, node, layouts, index=index_of(name), era=cluster.members.fence.era)
        self.world.seen["a follower was brought forward by what had changed"] = self._follower.num_patches

    def _do_as_advised(self) -> None:
        """With the original's queue the tokens of workers that were lost are lost too; people start one more when nobody has one left."""
        chief = self._chiefs[self.chief]
        may_lose = chief.coordinator.cluster.policy.spec.tokens is TokenMode.FIFO and bool(self.scenario.faults)
        is_advised = may_lose and "start one more worker" in chief.coordinator.cluster.explain(self.world.now)
        self._advised_for_s = self._advised_for_s + _LOOK_S if is_advised else 0.0
        if self._advised_for_s >= _PATIENCE_S:
            self._advised_for_s = 0.0
            self.world.seen["a worker was started since all waited for tokens of the queue"] += 1
            self.start_another_worker(self.workers[0])

    def _committed(self, manifest: bytes) -> None:
        fields = decode_json(manifest, where="simulated")
        self.world.note(f"whole: {fields['tag']}")
        self.world.seen["checkpoint whole"] += 1
        self.world.seen["checkpoint is a delta"] += "bases" in fields
        record = fields["record"]
        era = int(fields["fence"]["era"]["life"]), int(fields["fence"]["era"]["epoch"])
        self.oracle.committed_checkpoint(fields["tag"], era, int(fields.get("step", 0)), _done(record.get("data")), _user_states(record))

    def _audit(self) -> None:
        """Has what all processes have written audited, as long as there was one life: epochs of another have the same numbers."""
        if not self._histories or self.world.new_life() > 2:
            return
        if self.scenario.policy.applies_on_arrival and self.oracle.has_forged:
            return  # the chief counts what nobody applies by itself, and the audit says so
        if self.oracle.has_heard_lies:
            return  # the audit says that a server has applied what its worker did not note
        chronicles = [history.chronicle(f"{name}-{number}") for number, (name, history) in enumerate(self._histories)]
        problems, num_steps = audited(chronicles)
        self.world.seen["steps that the audit has computed again"] += num_steps
        self.world.seen["steps computed again although records were gone"] += num_steps * any(one.is_cut for one in chronicles)
        if problems:
            raise BrokenPromise(f"A: the audit says: {problems[:3]}")

    def _new_history(self, name: str) -> SimulatedHistory | None:
        if not self.scenario.has_history:
            return None
        history = SimulatedHistory(self.scenario.num_records_kept)
        self._histories.append((name, history))
        return history

    # -- processes

    def _start_shard(self, name: str) -> None:
        scenario = self.scenario
        if self.world.life(name) is not None:
            return

        def make(life: Life) -> ShardNode:
            node = self._shard_nodes[name] = ShardNode(
                self.world,
                life,
                index=index_of(name),
                storage=self.storage if scenario.durability else None,
                oracle=self.oracle,
                on_crash=lambda: self.kill(name, 0.3),
                history=self._new_history(name),
            )
            return node

        self.world.start(name, make)

    def _start_chief(self, name: str, *, takes_over: bool) -> None:
        if self.world.life(name) is not None:
            return
        scenario = self.scenario
        checkpoints = None
        if scenario.durability is not None:
            checkpoints = CheckpointConfig(
                durability=scenario.durability,
                interval_s=1.0,
                every_steps=scenario.every_steps,
                full_every=scenario.full_every,
                keep=2,
            )
        config = CoordinationConfig(
            total_num_replicas=scenario.num_workers,
            replicas_to_aggregate=scenario.num_required,
            lease_s=scenario.lease_s,
            min_replicas=scenario.min_replicas,
            max_steps=scenario.max_steps,
            policy=scenario.policy,
            checkpoints=checkpoints,
        )

        def make(life: Life) -> ChiefNode:
            node = ChiefNode(
                self.world,
                life,
                config=config,
                shards=self.shards,
                standbys=self.standbys,
                store=CheckpointStore(self.storage, cluster=config.cluster) if checkpoints else None,
                oracle=self.oracle,
                takes_over=takes_over,
                history=self._new_history(name),
                on_change=self._changed,
                on_end=lambda reason: self._chief_ended(name, reason),
            )
            self._chiefs[name] = node
            return node

        self.chief = name
        self.world.start(name, make)

    def _start_worker(self, index: int, *, takes_over: bool) -> None:
        name, scenario = self._workers[index], self.scenario
        if self.world.life(name) is not None:
            return
        self._num_workers += 1
        pid = self._num_workers

        def make(life: Life) -> WorkerNode:
            node = self._worker_nodes[name] = WorkerNode(
                self.world,
                life,
                index=index,
                pid=pid,
                model=_model(scenario),
                servers=self.servers,
                num_shards=len(self.shards),
                chief=self.chief,
                lease_s=scenario.lease_s,
                oracle=self.oracle,
                compute_s=scenario.compute_s,
                data=scenario.data,
                takes_over=takes_over,
                history=self._new_history(name),
                on_end=lambda reason: self._worker_ended(index, name, reason),
            )
            return node

        self.world.start(name, make)

    def ask_to_end(self, name: str, seconds: float) -> None:
        """Asks a process to end, which is started again after so many seconds: a chief may save first, and others end at once."""
        chief = self._chiefs.get(name)
        if chief is None:
            self.kill(name, seconds)
        elif (life := self.world.life(name)) is not None and not life.is_stopped:
            chief.ask_to_end()

    def have_half_applied(self, name: str) -> None:
        """Has a parameter server fail half-way through the next step."""
        self._shard_nodes[name].fails_half_way = True

    def start_another_chief(self, *, takes_over: bool) -> None:
        """Starts a chief under a new name."""
        self._num_chiefs += 1
        self._start_chief(f"chief-{self._num_chiefs}", takes_over=takes_over)

    def start_another_worker(self, name: str) -> None:
        """Starts another process of a worker's index, which takes its place."""
        index = int(name.split("-")[1])
        self._workers[index] = f"worker-{index}-again-{self._num_workers}"
        self._start_worker(index, takes_over=True)

    def have_forged(self, name: str, *, may_be_nowhere: bool) -> None:
        """Has a worker, if it runs, commit next what it has not given to all shards; with training data, to one at least, or to none."""
        process = self._worker_nodes.get(self._workers[int(name.split("-")[1])])
        if process is not None:
            process.forges, process.forges_nowhere = True, may_be_nowhere

    def have_lied(self, name: str, *, to_standbys: bool) -> None:
        """Has a worker, if it runs, give next half of the servers other gradients than their twins."""
        process = self._worker_nodes.get(self._workers[int(name.split("-")[1])])
        if process is not None:
            process.lies_to = self.standbys if to_standbys else self.shards

    def have_hoarded(self, name: str) -> None:
        """Has a worker, if it runs, give more than it may and commit none of that."""
        process = self._worker_nodes.get(self._workers[int(name.split("-")[1])])
        if process is not None:
            process.hoards = True

    def have_impersonated(self, name: str) -> None:
        """Has somebody speak in a worker's name, if that one has its place."""
        victim = self._worker_nodes.get(self._workers[int(name.split("-")[1])])
        if victim is not None and victim.is_joined:
            start_impostor(self.world, victim=victim, shards=self.shards, chief=self.chief)

    def order(self, request: Request[Any]) -> None:
        """Has somebody ask the chief for this until it is answered."""
        start_operator(self.world, request=request, chief=lambda: self.chief)

    def allow_failure(self) -> None:
        """From now on the cluster may say that it has failed although something was saved: people must look at storage."""
        self._may_fail = True

    def allow_loss(self) -> None:
        """From now on a checkpoint that was whole may be lost."""
        self.oracle.is_rotten = True

    def _chief_ended(self, name: str, reason: str) -> None:
        self.world.kill(name)
        others = [other for other in self._chiefs if other != name and self.world.life(other) is not None]
        if name == self.chief and self._chiefs[name].coordinator.cluster.state is ClusterState.FINISHED and reason != "killed":
            self._is_over = True
        elif name == self.chief and others:
            self.chief = others[-1]  # it has given up, since that one is at work
        elif name == self.chief and not self._failure:
            # Its successor has given up, or it was killed while it wrote: somebody starts it again.
            self.world.at(0.3, lambda: self._start_chief(name, takes_over=reason == "killed"))

    def _worker_ended(self, index: int, name: str, reason: str) -> None:
        self.world.kill(name)
        if reason == "TrainingFailed" and self._failure:
            return
        if reason == "TrainingFailed" and self._is_finished:
            self.world.seen["worker told that training was finished before it had a model"] += 1
            return
        if reason == "finished":
            # By a chief that has a successor, perhaps, which trains on.
            self.world.seen["worker heard that training is finished"] += 1
            if not any(chief.coordinator.cluster.state is ClusterState.FINISHED for chief in self._chiefs.values()):
                raise BrokenPromise(f"F: {name} was told that training is finished, and nobody has finished it")
            self.world.at(1.0, lambda: None if self._is_finished else self._start_worker(index, takes_over=False))
            return
        is_lost = not self.oracle.has_way_back or self.oracle.is_lost(self._worker_nodes[name].life_of_model)
        if reason == "TrainingFailed" and (self._may_fail or self.oracle.is_rotten or is_lost):
            # The cluster has begun anew, since nothing was saved: the workers are to be started again.
            self.world.seen["worker ended with its model"] += 1
        elif reason == "Superseded":
            self.world.seen["worker superseded"] += 1
        elif reason == "ContributionMissing" and self._worker_nodes[name].has_forged:
            self.world.seen["worker expelled for what it had not given"] += 1
        else:
            raise BrokenPromise(f"6: {name} ended with {reason}")
        self.world.at(1.0, lambda: self._start_worker(index, takes_over=False))

    def kill(self, name: str, seconds: float) -> None:
        """Ends a process, which is started again after so many seconds."""
        self.world.note(f"killed: {name}")
        self.world.kill(name)
        self.world.at(seconds, lambda: self._start_again(name))

    def _start_again(self, name: str) -> None:
        role, number, *_ = *name.split("-"), ""
        if role == "ps":
            self._start_shard(name)
        elif role == "worker":
            self._start_worker(int(number), takes_over=True)
        elif name == self.chief:
            self._start_chief(name, takes_over=True)

    def _heal(self) -> None:
        world = self.world
        world.note("healed")
        self._nemesis.heal()
        for name in self.servers:
            self._start_shard(name)
        if world.life(self.chief) is None and not self._failure:
            self._start_chief(self.chief, takes_over=True)
        for index in range(self.scenario.num_workers):
            self._start_worker(index, takes_over=True)


def run(scenario: Scenario) -> SimulatedCluster:
    """Runs a scenario and returns what has become of it. Raises BrokenPromise."""
    cluster = SimulatedCluster(scenario)
    try:
        cluster.run()
    except BrokenPromise as broken:
        broken.add_note("\n".join([scenario.words, *cluster.world.log[-60:]]))
        raise
    finally:
        cluster.world.end()
    return cluster


def shrunk(scenario: Scenario, *, breaks: Callable[[Scenario], bool]) -> Scenario:
    """Returns the scenario without the faults and options that it does not take to break the promise."""
    simplest = ({"network": NetworkSpec()}, {"data": None}, {"has_norms": False}, {"min_replicas": None}, {"policy": DEFAULT_POLICY})
    # Standbys stay: what befalls them would befall nobody.
    for simpler in simplest:
        smaller = replace(scenario, **simpler)
        if breaks(smaller):
            scenario = smaller
    for fault in scenario.faults:
        smaller = replace(scenario, faults=tuple(one for one in scenario.faults if one is not fault))
        if breaks(smaller):
            scenario = smaller
    return scenario


def _done(marks: dict[str, Any] | None) -> set[int]:
    """Returns the ranges of the training data that a manifest says are done."""
    if marks is None:
        return set()
    data = marks["data"]
    num_ranges = -(-int(data["num_samples"]) // int(data["range_size"]))
    done = {*range(int(marks.get("epoch", 0)) * num_ranges)}
    for one in marks.get("passes", ()):
        first, bits = int(one.get("epoch", 0)) * num_ranges, base64.b64decode(one["done"])
        done.update(first + index for index in range(num_ranges) if bits[index // 8] >> index % 8 & 1)
    return done


def _user_states(fields: dict[str, Any]) -> dict[int, str]:
    """Returns the states of workers' programs that a manifest has."""
    return {int(one.get("worker", 0)): one["json"] for one in fields.get("attached", {}).get("user_states", ())}


def _model(scenario: Scenario) -> ModelSpec:
    variables = tuple(VariableSpec(name=f"w{index}", data_type=DataType.FLOAT32, shape=(SIZE,)) for index in range(scenario.num_shards))
    # As many buckets as shards at least, which are a power of two.
    max_rows = _ROWS_PER_SHARD << (scenario.num_shards - 1).bit_length()
    table = VariableSpec(
        name="rows",
        data_type=DataType.FLOAT32,
        shape=(ANY, SIZE),
        is_sparse=True,
        initializer=Initializer(kind=InitializerKind.CONSTANT, low=FIRST_VALUE),
        # Rows of keys that only some contributions have make room for each other.
        keys=KeySpec(
            max_rows=max_rows,
            max_age_steps=scenario.max_age or None,
            admit_probability=scenario.admitted or 1.0,
            admit_after=scenario.admit_after or None,
        ),
    )
    optimizer = OptimizerSpec(name="momentum", learning_rate=constant(LEARNING_RATE), hyperparameters={"momentum": MOMENTUM})
    # So large a norm that nothing is scaled: what matters is the way through PrepareStep.
    clip = ClipSpec(global_norm=1e6) if scenario.has_norms else NO_CLIP
    return ModelSpec(variables=(*variables, table), optimizer=optimizer, placement=PlacementPolicy(), clip=clip)
