"""Shards that have standbys: who holds them, and when a lost one is brought back. Methods of the coordinator; knows no clock or wire.

It is brought back between two steps, before anybody hears of the second: then nobody has given anything yet that it would lack. All
shards save the step, it takes over what the other replica of its shard has saved, and then the step is told, and who is there.
"""

from chief import assurance
from chief.checkpointing import Checkpointing
from chief.cluster import Cluster, UnderWay
from chief.events import Instruction, Note
from chief.recovery_events import BringReplicasBack, CheckpointCommitted, ReplicaReady, ReplicasBack, ReplicasChanged, SaveFailed
from chief.settings import Settings
from chief.shard_sequence import ShardSequence
from chief.wording import listed, printable


class Replicas:
    """Decides when replicas that were lost come back."""

    def __init__(self, cluster: Cluster, settings: Settings, checkpointing: Checkpointing, sequence: ShardSequence) -> None:
        self._cluster = cluster
        self._settings = settings
        self._checkpointing = checkpointing
        self._sequence = sequence
        self._returning: tuple[int, frozenset[int]] | None = None  # the epoch, and the shards whose replicas are being restored

    def changed(self, event: ReplicasChanged, now: float) -> list[Instruction]:
        """Other processes than before hold a shard; participants hear of it with their next token."""
        cluster = self._cluster
        cluster.shards.held_by(event.shard, address=event.address, standby=event.standby, missing=printable(event.missing))
        if event.standby:
            cluster.replicas_due.discard(event.shard)
        return []

    def ready(self, event: ReplicaReady, now: float) -> list[Instruction]:
        """A lost replica could be brought back: it is after the next step, if that can be."""
        cluster, record = self._cluster, self._cluster.shards[event.shard]
        if record.standby or cluster.failure or cluster.is_finished or cluster.recovering or event.shard in cluster.replicas_due:
            return []
        if cluster.config.checkpoints is None:
            record.standby_missing = (
                "it is there again, and empty; without --checkpoint-dir it stays out until the cluster is started again"
            )
        elif cluster.policy.spec.accepts_stale or cluster.policy.spec.applies_on_arrival:
            words = cluster.policy.spec.text
            record.standby_missing = f"it is there again, and empty; with the policy {words} it cannot be brought back between two steps"
        else:
            record.standby_missing = "it is there again, and is brought back after the next step"
            cluster.replicas_due.add(event.shard)
        return []

    def committed(self, event: CheckpointCommitted, now: float, *, is_told: bool) -> list[Instruction]:
        """A checkpoint is whole; `is_told`: the step that was held back for it may be told. Replicas come back from it first."""
        cluster = self._cluster
        if not is_told:
            return []
        if not cluster.holds_for_replicas:
            return self._sequence.tell(now)
        shards = tuple(sorted(cluster.replicas_due))
        cluster.under_way = UnderWay.SAVE
        cluster.saving = f"{self._named(shards)}: a standby is being brought back to step {cluster.policy.step + 1}"
        self._returning = cluster.epoch, frozenset(shards)
        step = cluster.policy.step + 1
        specs = cluster.shard_specs(step)
        order = BringReplicasBack(
            epoch=cluster.epoch,
            tag=event.tag,
            shards=shards,
            specs=tuple(specs[shard] for shard in shards),
            settings=self._settings.for_shards(step=step),
        )
        return [order]

    def save_failed(self, event: SaveFailed, now: float) -> list[Instruction]:
        """The step could not be saved: where it need not be, training goes on, and the replicas come back another time."""
        cluster = self._cluster
        if not (cluster.replicas_due and self._checkpointing.is_holding and not self._checkpointing.holds_steps):
            return []
        for shard in cluster.replicas_due:
            cluster.shards[
                shard
            ].standby_missing = f"the step that it is to be brought back from could not be saved: {printable(event.why)}"
        cluster.replicas_due.clear()
        self._checkpointing.let_go(now)
        return self._sequence.tell(now)

    def back(self, event: ReplicasBack, now: float) -> list[Instruction]:
        """Replicas have been brought back, or could not be: the step is told."""
        cluster, returning = self._cluster, self._returning
        if returning is None or event.epoch != returning[0] or event.epoch != cluster.epoch or cluster.failure:
            return []
        self._returning = None
        instructions: list[Instruction] = []
        for shard, why in event.failures:
            cluster.shards[shard].standby_missing = f"it could not be brought back: {printable(why)}"
            instructions.append(Note(text=f"the standby of {cluster.shards[shard].name} could not be brought back: {why}", is_warning=True))
        cluster.replicas_due -= returning[1]
        cluster.saving = ""
        return [*instructions, assurance.keep(cluster), *self._sequence.tell(now)]

    def _named(self, shards: tuple[int, ...]) -> str:
        return listed([self._cluster.shards[shard].name for shard in shards])
