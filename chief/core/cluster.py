"""The coordinator's state in one place, what it amounts to, and the status made of it. Decides nothing; `now` is an argument."""

import enum
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from chief.core.data import DataLeases
from chief.core.explain import Situation, explain, is_waiting
from chief.core.ledger import Ledger
from chief.core.members import Member, Membership, merged_pushes, quorum
from chief.core.messages import Instruction, Refuse, Reply
from chief.core.model import ModelRegistry
from chief.core.parameter_servers import ShardTable
from chief.core.waiting import Deadlines, WaitingCalls
from chief.core.wording import optimizers_words
from chief.options import CoordinationConfig
from chief.policies.base import Counted, Policy
from chief.policies.factory import new_policy
from chief.policies.sync import SyncPolicy
from ps_protocol.errors import InvalidSpec, PsError, TrainingFailed, Unavailable
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.roles.checkpoint import ChiefRecord
from ps_protocol.roles.chief import ClusterState, ClusterStatus, Participant, ParticipantKind
from ps_protocol.roles.shard import PushId, ShardSpec, WorkerPushes

# Contributions that shards hold and that will never be applied. Knows push ids; no call, lease or clock.
#
# Only shards that keep contributions of steps gone by need to be told; the others drop them by themselves.


_MAX_REMEMBERED = 10_000


class Discards:
    """Single contributions, and whole incarnations that are gone; the latter once nothing of theirs is left to apply.

    At most so many of each are remembered: more can only come from a caller that makes them up, or while nothing is applied for long.
    """

    def __init__(self) -> None:
        self._pushes: set[PushId] = set()
        self._gone: set[tuple[int, int]] = set()

    def __bool__(self) -> bool:
        return bool(self._pushes or self._gone)

    def add(self, push_id: PushId) -> None:
        """A contribution is not applied."""
        if len(self._pushes) < _MAX_REMEMBERED:
            self._pushes.add(push_id)

    def add_incarnation(self, worker: int, incarnation: int) -> None:
        """An incarnation is gone."""
        if len(self._gone) < _MAX_REMEMBERED:
            self._gone.add((worker, incarnation))

    def clear(self) -> None:
        """Forgets all."""
        self._pushes.clear()
        self._gone.clear()

    def take(self, counted: Iterable[Counted]) -> tuple[PushId, ...]:
        """Takes out what shards may drop now, sorted; an incarnation, as its sequence 0, unless something of its is still `counted`."""
        busy = {(entry.push_id.worker, entry.push_id.incarnation) for entry in counted}
        ready = self._gone - busy
        whole = [PushId(worker=worker, incarnation=incarnation, sequence=0) for worker, incarnation in ready]
        single = [push_id for push_id in self._pushes if (push_id.worker, push_id.incarnation) not in ready]
        self._gone -= ready
        self._pushes.clear()
        return tuple(sorted([*whole, *single]))


# Answers that wait for what they tell to be sure, and what the record at the shards covers. Knows calls and versions; decides nothing.


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An answer that tells of a contribution (None: of something else). `version`: the record that makes it sure; None: only its step."""

    reply: Reply
    push_id: PushId | None
    version: int | None


@dataclass(slots=True, kw_only=True)
class Told:
    """What is sure, and who waits for that. `is_needed` is False where the chief cannot die without its shards: all is sure there."""

    is_needed: bool = True
    version: int = 0  # of the latest record
    # The one under way: whether it goes to all shards, the contributions that it names, and how many of `unkept` it has.
    in_flight: int | None = None
    is_for_all: bool = False
    chosen: tuple[PushId, ...] = ()
    num_unkept: int = 0
    has_data: bool = False
    # Ranges of the training data that are done, and that no record has which is kept; and whether one has that there are any.
    unkept: list[int] = field(default_factory=list)
    is_data_kept: bool = False
    # Contributions that are not told to be applied, and that are sure all the same.
    sure: set[PushId] = field(default_factory=set)
    waiting: dict[int, Waiting] = field(default_factory=dict)

    @property
    def next_version(self) -> int:
        """Version of the first record that will have all that is known now."""
        return self.version + 1

    def kept(self) -> int:
        """The record under way is kept; returns its version."""
        version, self.in_flight = self.version, None
        self.sure.update(self.chosen)
        del self.unkept[: self.num_unkept]
        self.is_data_kept = self.is_data_kept or self.has_data
        return version

    def take(self, *, version: int = 0, applied: Collection[PushId] = ()) -> list[Reply]:
        """Takes out what is sure now that this record is kept, and these contributions are applied."""
        due = [
            call
            for call, one in self.waiting.items()
            if (one.version is not None and one.version <= version) or one.push_id in applied or one.push_id in self.sure
        ]
        return [self.waiting.pop(call).reply for call in due]

    def restart(self) -> None:
        """Another epoch begins: nothing is sure any more. Those who wait are somebody else's to refuse."""
        self.in_flight = None
        self.chosen, self.num_unkept, self.has_data, self.is_data_kept = (), 0, False, False
        self.unkept.clear()
        self.sure.clear()


# The coordinator's state in one place, what it amounts to, and the status made of it. Decides nothing; `now` is an argument.


_TOLD_S = 0.25
# Contributions looked at to know what was applied lately: each worker's latest are among them.
_MAX_PUSHES = 20_000


class UnderWay(enum.Enum):
    """What all shards are at: they say how large a step's mean is, apply it, learn how to work from now on, or copy a step to save it."""

    PREPARE = 1
    APPLY = 2
    CONFIGURE = 3
    SAVE = 4


@dataclass(slots=True, kw_only=True)
class Cluster:
    """All that the chief knows. The coordinator alone changes it."""

    config: CoordinationConfig
    epoch: int
    membership: Membership
    policy: Policy
    registry: ModelRegistry
    shards: ShardTable
    ledger: Ledger
    deadlines: Deadlines
    waiting: WaitingCalls
    chief_incarnation: int = 1
    # Names a life of the cluster that begins.
    new_life: Callable[[], int] = lambda: 0
    has_taken_over: bool = False  # from another chief, in this epoch
    data: DataLeases = field(default_factory=DataLeases)
    told: Told = field(default_factory=Told)
    # Workers to which an earlier chief may have leased data: it is known what they have once they have come back.
    awaited: set[int] = field(default_factory=set)
    discards: Discards = field(default_factory=Discards)
    # Contributions of steps before this one may have been dropped by shards, while they kept none of steps gone by.
    oldest_kept: int = 0
    # Workers whose latest contribution met a change of policy and counts for nothing: they may contribute to the open step all the same.
    turned_away: set[int] = field(default_factory=set)
    under_way: UnderWay | None = None
    # The latest settings that hold, the optimizers that they change, and all in words (empty: as the model has them, not asked for yet).
    settings_version: int = 0
    optimizers: tuple[tuple[OptimizerSpec, OptimizerSpec], ...] = ()
    optimizer: str = ""
    # Why shards are being brought back to a checkpoint or taken over from another chief, and what comes of it; empty: they are not.
    recovering: str = ""
    plan: str = ""
    num_rollbacks: int = 0
    last_rollback: str = ""
    # What holds up steps while one is being saved; whether one is to be saved, and whether the processes wait for that to end.
    saving: str = ""
    is_save_due: bool = False
    is_quorum_changed: bool = False
    has_opened: bool = False  # just now: the model is initialised
    is_saving_last: bool = False
    # Shards with a lost replica that is there again: it is brought back between two steps.
    replicas_due: set[int] = field(default_factory=set)
    is_quorum_lowered: bool = False
    failure: str = ""
    finish_reason: str = ""
    # Set while a step is being applied that shall be the last one, with the calls that wait for that.
    pending_finish: str = ""
    finish_calls: list[int] = field(default_factory=list)
    is_ended: bool = False
    _told: tuple[float, int, int, str] = (-math.inf, 0, 0, "")

    @property
    def state(self) -> ClusterState:
        """Where the cluster is."""
        if self.failure:
            return ClusterState.FAILED
        if self.finish_reason:
            return ClusterState.FINISHED
        if self.recovering:
            return ClusterState.RECOVERING
        if not self.shards.are_adopted:
            return ClusterState.CONNECTING
        return ClusterState.TRAINING if self.registry.is_ready else ClusterState.WAITING_FOR_MODEL

    @property
    def is_due(self) -> bool:
        """Whether something may have to begin at the shards that no contribution brings about."""
        return self.is_save_due or self.is_quorum_changed or self.has_opened or (self.waiting.has_arrivals and self.are_arrivals_due)

    @property
    def are_arrivals_due(self) -> bool:
        """Whether those who wait to be taken in can be, or never will."""
        return self.waiting.has_arrivals and (self.membership.knows_predecessors or bool(self.failure) or self.is_ended)

    @property
    def shards_version(self) -> int:
        """Grows when other processes hold the shards, also from one chief to the next; 0: the cluster was given no standbys."""
        return self.chief_incarnation << 20 | self.shards.version if self.shards.version else 0

    @property
    def holds_for_replicas(self) -> bool:
        """Whether the step that has just been applied is not told before replicas have been brought back."""
        return bool(self.replicas_due) and not (self.policy.spec.accepts_stale or self.pending_finish or self.finish_reason)

    @property
    def is_finished(self) -> bool:
        """Whether training is finished."""
        return bool(self.finish_reason)

    def refuse_if_failed(self) -> None:
        """Raises TrainingFailed once the cluster cannot go on."""
        if self.failure:
            raise TrainingFailed(self.failure)

    def check(self, participant: Participant, *, now: float) -> Member:
        """Returns the live member that calls. Raises TrainingFailed, EpochMismatch, Superseded or LeaseExpired."""
        self.refuse_if_failed()
        return self.membership.check(participant, now=now)

    def check_worker(self, participant: Participant, what: str, *, now: float) -> Member:
        """As `check`, for what only workers do."""
        if participant.kind is not ParticipantKind.WORKER:
            raise InvalidSpec(f"an observer cannot {what}; register as a worker")
        return self.check(participant, now=now)

    def refuse_waiting(self, error: PsError) -> list[Instruction]:
        """Everybody who blocks as a participant gets this error; those who only want to know the model wait on."""
        calls = [waiting.call for waiting in self.waiting.take_token_calls()]
        for asking in self.waiting.model_calls():
            if asking.participant is not None:
                self.waiting.take_model_call(asking.call)
                calls.append(asking.call)
        calls += self.waiting.take_data_calls()
        for call in self.told.waiting:
            self.deadlines.clear(("told", call))
            calls.append(call)
        self.told.waiting.clear()
        return [Refuse(call=call, error=error) for call in calls]

    def refuse_if_recovering(self, now: float) -> None:
        """Raises Unavailable while nothing can be counted, so that whoever calls tries again."""
        if self.recovering:
            raise Unavailable(self.explain(now))

    def requota(self) -> None:
        """Has the open step need as many contributions as it can get, where that may be fewer than ever."""
        policy = self.policy
        if not isinstance(policy, SyncPolicy) or (
            self.config.min_replicas is None and not self.data.starved and not self.is_quorum_lowered
        ):
            return
        required = quorum(self.config, membership=self.membership, policy=policy, starved=self.data.starved)
        self.is_quorum_lowered = required < self.config.num_required
        self.is_quorum_changed = self.is_quorum_changed or required < policy.num_required
        policy.require(required)

    def new_policy(self, *, step: int, is_start: bool, counted: Sequence[Counted] = ()) -> None:
        """Coordinates anew from this step on, with the workers that live; nothing is counted but this."""
        live = [member.index for member in self.membership.workers() if member.is_live]
        self.policy = new_policy(self.config, step=step, workers=live, is_start=is_start, counted=counted)
        self.turned_away.clear()
        self.discards.clear()
        self.requota()

    def record(self) -> ChiefRecord:
        """Returns what a successor of this chief must know."""
        return ChiefRecord(
            model=self.registry.model,
            policy=self.config.policy,
            settings_version=self.settings_version,
            rejects_nonfinite=self.config.reject_nonfinite,
            optimizers=self.optimizers,
            num_rollbacks=self.num_rollbacks,
            last_rollback=self.last_rollback,
            earlier=self.membership.earlier,
        )

    def shard_specs(self, step: int) -> tuple[ShardSpec, ...]:
        """Returns what is to lie at each shard that is brought back to this step."""
        return self.registry.shard_specs(epoch=self.epoch, step=step, max_staged_per_worker=self.config.max_staged_per_worker)

    def applied_pushes(self, *, extra: Sequence[PushId] = ()) -> tuple[WorkerPushes, ...]:
        """Returns what has been applied of each worker lately; `extra` as the open step."""
        steps = [(self.policy.step, tuple(extra)), *self.ledger.contributors(_MAX_PUSHES)]
        return merged_pushes(steps, earlier=self.membership.remembered)

    def renew(self, member: Member, *, now: float) -> None:
        """A member has called: its lease runs anew."""
        self.deadlines.set((member.kind.name, member.index), self.membership.touch(member, now=now))

    def ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Asks the policy for a token on behalf of a worker; None: it must wait."""
        behind = worker in self.turned_away
        return self.policy.ask(worker, local_step=local_step - behind, request_id=request_id)

    def explain(self, now: float, *, asking: int | None = None) -> str:
        """Says in words what the cluster waits for; `asking` is a worker that waits for a token although it does not block."""
        return explain(self.situation(asking), now=now)

    def explain_to_many(self, now: float) -> str:
        """As `explain`, up to a quarter of a second old: a thousand callers whose time is up get one explanation, not each their own."""
        at, step, num_contributions, text = self._told
        if now - at > _TOLD_S or (step, num_contributions) != (self.policy.step, self.policy.num_contributions):
            text = self.explain(now)
            self._told = now, self.policy.step, self.policy.num_contributions, text
        return text

    def ranges_of_step(self) -> tuple[int, ...]:
        """Returns the ranges of the training data that are done with the next step, and those done earlier that no record has."""
        if self.data.spec is None or not self.told.is_needed:
            return ()
        counted_ranges = self.data.counted_ranges
        return (*self.told.unkept, *(identity for push_id in self.policy.contributors for identity in counted_ranges(push_id)))

    def take_discards(self) -> tuple[PushId, ...]:
        """Takes out the contributions that shards may drop with the step that begins now."""
        return self.discards.take(self.policy.counted()) if self.discards and self.policy.spec.accepts_stale else ()

    def situation(self, asking: int | None = None) -> Situation:
        """Returns what is explained; `asking` is a worker that waits for a token although it does not block."""
        return Situation(
            state=self.state,
            reason=self.failure or self.finish_reason,
            membership=self.membership,
            policy=self.policy,
            registry=self.registry,
            shards=self.shards,
            ledger=self.ledger,
            total_num_replicas=self.config.num_workers,
            waiting=self.waiting.token_workers if asking is None else self.waiting.token_workers | {asking},
            is_configuring=self.under_way is UnderWay.CONFIGURE,
            saving=self.saving,
            recovering=self.recovering,
            plan=self.plan,
            is_lost_for_good=self.config.checkpoints is None,
        )


def new_cluster(
    config: CoordinationConfig, *, shard_addresses: Sequence[str], policy: Policy | None, now: float, has_successors: bool
) -> Cluster:
    """Returns a cluster that nobody has joined and no shard has been reached of; `policy` None: the configuration's.

    `has_successors`: whether its chief can die without its shards.
    """
    deadlines = Deadlines()
    return Cluster(
        config=config,
        epoch=1,
        membership=Membership(config=config, epoch=1),
        policy=policy or new_policy(config),
        registry=ModelRegistry(num_shards=len(shard_addresses)),
        shards=ShardTable(shard_addresses, now=now),
        ledger=Ledger(size=config.ledger_size, now=now),
        deadlines=deadlines,
        waiting=WaitingCalls(deadlines),
        told=Told(is_needed=has_successors),
    )


# What the chief reports of its cluster, put together from what it knows. Changes nothing; `now` is an argument.


def cluster_status(cluster: Cluster, now: float, *, max_ledger_entries: int) -> ClusterStatus:
    """Reports the cluster."""
    situation, policy = cluster.situation(), cluster.policy
    return ClusterStatus(
        cluster=cluster.config.cluster,
        epoch=cluster.epoch,
        state=situation.state,
        reason=situation.reason,
        global_step=policy.step,
        max_steps=cluster.config.max_steps,
        policy=policy.spec.text,
        replicas_to_aggregate=cluster.config.num_required if cluster.is_quorum_lowered else policy.num_required,
        total_num_replicas=cluster.config.num_workers or 0,
        num_contributions=policy.num_contributions,
        waiting_for=explain(situation, now=now) if is_waiting(situation, now=now) else "",
        step_age_s=cluster.ledger.step_age_s(now),
        participants=cluster.membership.statuses(now=now, waiting=cluster.waiting.token_workers),
        shards=cluster.shards.links(step=policy.step if cluster.registry.is_ready else None, layouts=cluster.registry.layouts),
        ledger=cluster.ledger.entries(max_ledger_entries),
        num_accepted=cluster.ledger.num_accepted,
        num_stale=cluster.ledger.num_stale,
        num_late=cluster.ledger.num_late,
        hyperparameters_version=cluster.settings_version,
        optimizer=_optimizer_words(cluster),
        max_observed_staleness=cluster.ledger.max_staleness,
        chief_incarnation=cluster.chief_incarnation,
        num_rollbacks=cluster.num_rollbacks,
        last_rollback=cluster.last_rollback,
        min_replicas=cluster.config.min_replicas or 0,
        data=cluster.data.status(),
    )


def _optimizer_words(cluster: Cluster) -> str:
    if cluster.optimizer or cluster.registry.model is None:
        return cluster.optimizer
    words = optimizers_words(cluster.registry.model, {})
    if cluster.registry.is_ready:
        cluster.optimizer = words  # a model may have very many variables
    return words
