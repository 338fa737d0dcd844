"""The chief's state: one `Cluster`, whose parts hold it. Each part alone changes what it owns. No clock, thread or wire."""

import math
from collections.abc import Callable, Iterable, Sequence

from chief.core.cluster.attachments import ContributedAttachments
from chief.core.cluster.checkpoints import Checkpoints
from chief.core.cluster.data import DataLeases
from chief.core.cluster.ledger import Ledger
from chief.core.cluster.members import Member, Members
from chief.core.cluster.model import ModelCalls, ModelRegistry
from chief.core.cluster.parameter_servers import ShardTable
from chief.core.cluster.settings import Settings
from chief.core.ending import Ending
from chief.core.epoch.answers import RecordVersions
from chief.core.epoch.training import Start, Training
from chief.core.joining import Joining
from chief.core.recovery import Recovery
from chief.core.report import explain
from chief.core.waiting import Outbox, Timers, Waiting
from chief.options import CoordinationConfig
from chief.policies.base import Policy
from ps_protocol.errors import PsError
from ps_protocol.roles.checkpoint import ChiefRecord, ChosenPush
from ps_protocol.roles.chief import ClusterState, Participant, ParticipantKind

# A thousand callers whose time is up get one explanation, not each their own.
_SAME_WORDS_S = 0.25


class Cluster:
    """All that the chief knows. Made once; only `training` is replaced, when another epoch begins.

    `has_successors`: another chief may follow. `address`: where workers reach this chief, for messages to people; empty: unknown.
    """

    def __init__(
        self,
        *,
        config: CoordinationConfig,
        shard_addresses: Sequence[str],
        now: float,
        has_successors: bool,
        new_life: Callable[[], int],
        session_key: bytes,
    ) -> None:
        self.has_successors, self.address = has_successors, ""
        self.out, self.timers = Outbox(), Timers()
        self.waiting = Waiting(self.out, self.timers)
        self.model = ModelRegistry(num_shards=len(shard_addresses))
        self.servers = ShardTable(shard_addresses, now=now)
        self.ledger = Ledger(size=config.ledger_size, now=now)
        self.data, self.versions = DataLeases(), RecordVersions()
        self.settings = Settings(self, config)
        self.attachments = ContributedAttachments(self)
        self.checkpoints = Checkpoints(self, config.checkpoints)
        self.members = Members(self, epoch=1, session_key=session_key)
        self.model_calls = ModelCalls(self)
        self.joining = Joining(self)
        self.ending = Ending(self)
        self.recovery = Recovery(self, new_life=new_life)
        self.training = Training(self, Start(step=0))
        self._words: tuple[float, int, int, str] = (-math.inf, 0, 0, "")

    @property
    def state(self) -> ClusterState:
        """The state of the cluster."""
        if self.ending.is_failed:
            return ClusterState.FAILED
        if self.ending.is_finished:
            return ClusterState.FINISHED
        if self.recovery.why:
            return ClusterState.RECOVERING
        if not self.servers.are_adopted:
            return ClusterState.CONNECTING
        return ClusterState.TRAINING if self.model.is_ready else ClusterState.WAITING_FOR_MODEL

    @property
    def policy(self) -> Policy:
        """The policy that holds, to be read."""
        return self.training.policy

    @property
    def step(self) -> int:
        """The open step."""
        return self.training.step

    def explain(self, now: float) -> str:
        """Returns words for the cluster's wait."""
        return explain(self, now=now)

    def explain_to_many(self, now: float) -> str:
        """As `explain`, up to a quarter of a second old."""
        at, step, num_contributions, text = self._words
        policy = self.policy
        if now - at > _SAME_WORDS_S or (step, num_contributions) != (policy.step, policy.num_contributions):
            text = self.explain(now)
            self._words = now, policy.step, policy.num_contributions, text
        return text

    def record(self, *, step: int, chosen: Iterable[ChosenPush] = ()) -> ChiefRecord:
        """Returns what another chief needs to continue at a step; `chosen`: the contributions that are counted and not applied."""
        settings = self.settings.newest
        return ChiefRecord(
            model=self.model.model,
            policy=settings.config.policy,
            settings_version=settings.number,
            oldest_kept=self.training.oldest_kept,
            optimizers=tuple(settings.optimizers.values()),
            num_rollbacks=self.recovery.num_rollbacks,
            last_rollback=self.recovery.last_rollback,
            epoch=self.training.fence.epoch,
            step=step,
            chosen=tuple(chosen),
            data=self.data.marks(),
            attached=self.attachments.lasting,
            earlier=self.members.earlier,
        )

    def worker(self, participant: Participant, what: str, now: float) -> Member:
        """Returns the live worker that calls. Raises InvalidSpec, TrainingFailed, EpochMismatch, Superseded or LeaseExpired."""
        if participant.kind is ParticipantKind.WORKER:
            self.ending.refuse_if_failed()
        return self.members.check_worker(participant, what, now=now)

    def begin_training(self, start: Start) -> Training:
        """Replaces the present training by another."""
        self.training.end()
        self.training = Training(self, start)
        return self.training

    def proceed(self, now: float) -> None:
        """Begins the next task of the shards."""
        self.training.proceed(now)

    def refuse_participants(self, error: PsError) -> None:
        """All calls that wait as participants get this error."""
        self.training.refuse_tokens(error)
        self.model_calls.refuse_participants(error)
        self.training.refuse_the_rest(error)
