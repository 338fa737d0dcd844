"""What a chief can do about what its shards hold: begin anew, take over, look for a checkpoint, bring it back. Methods of the coordinator.

When it does which is decided in `recovery`. Knows no clock or wire.
"""

import enum

from chief import assurance
from chief.checkpoint_choice import Branch, Search, nothing_found
from chief.checkpointing import Checkpointing
from chief.cluster import Cluster
from chief.coordination import RESTORE_LATEST, RESTORE_NONE
from chief.deadlines import Key
from chief.ending import Ending
from chief.events import Instruction, Note
from chief.model_calls import ModelCalls
from chief.recovery_events import AdoptShards, FindCheckpoint, RestoreShards
from chief.settings import Settings
from chief.takeover import Takeover
from chief.wording import printable, seconds
from ps_protocol.checkpoint import Checkpoint, ChiefRecord
from ps_protocol.errors import LeaseExpired
from ps_protocol.shard import Adoption

# Storage that cannot be read is tried again after the first of these, then less and less often.
SEARCH_KEY: Key = ("search", 0)
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.5, 8.0
# Records of one epoch, as a power of two.
_BITS_OF_AN_EPOCH = 32
_MAX_EPOCH = 1 << 30  # beyond it, which nobody reaches by training, versions only count on


class Phase(enum.Enum):
    """What the chief is at with its shards."""

    IDLE = 0
    SEEK = 1  # for a checkpoint
    RESTORE = 2
    TAKE_OVER = 3  # shards that hold a model
    BEGIN = 4  # with empty shards
    RECORD = 5  # what is known is being kept at shards that were brought back


class RecoveryMoves:
    """What is done, and where that stands."""

    def __init__(self, cluster: Cluster, settings: Settings, models: ModelCalls, ending: Ending, checkpointing: Checkpointing) -> None:
        self._cluster = cluster
        self._settings = settings
        self._models = models
        self._ending = ending
        self._checkpointing = checkpointing
        self._takeover = Takeover(cluster, settings)
        self._phase = Phase.IDLE
        self._branch = Branch()
        self._search = Search()
        self._checkpoint: tuple[Checkpoint, str] | None = None
        self._adoptions: dict[int, Adoption | None] = {}
        self._record: ChiefRecord | None = None

    def _begin_anew(self, *, is_again: bool = False) -> list[Instruction]:
        cluster = self._cluster
        highest = self._search.highest_epoch
        instructions: list[Instruction] = []
        if is_again or highest or cluster.chief_incarnation > 1:
            self._rise(max(cluster.epoch, highest) + 1, why="nothing was trained yet")
            instructions = self._refuse_all()
        self._takeover.give_up()
        cluster.registry.restart()
        self._settings.begin_anew(is_again=is_again)
        cluster.new_policy(step=0, is_start=True)
        cluster.shards.release_all()
        cluster.recovering = cluster.plan = ""
        self._adoptions.clear()
        self._branch = Branch(epoch=cluster.epoch)
        self._phase = Phase.BEGIN
        return [*instructions, self._adoption()]

    def _take_over(self, why: str) -> list[Instruction]:
        cluster = self._cluster
        cluster.recovering, cluster.plan = why, "the parameter servers are asked where they are"
        self._phase = Phase.TAKE_OVER
        return [self._adoption()]

    def _seek(self, why: str, *, is_start: bool, has_lost: bool) -> list[Instruction]:
        cluster, config = self._cluster, self._cluster.config.checkpoints
        assert config is not None
        cluster.recovering, cluster.plan = why, "looking for the newest whole checkpoint"
        only = "" if has_lost or config.restore in (RESTORE_LATEST, RESTORE_NONE) else config.restore
        has_looked = self._phase is Phase.TAKE_OVER
        self._search = Search(why=why, is_start=is_start, has_lost=has_lost, only=only, has_looked=has_looked)
        self._phase = Phase.SEEK
        # An earlier chief may be alive: what it tells from now on must be in what is found.
        is_first = is_start and not has_looked
        fence = self._adoption() if is_first else None
        return [Note(text=f"{why}; {cluster.plan}", is_warning=has_lost), FindCheckpoint(only=only, fence=fence)]

    def _try_again_later(self, why: str, now: float) -> list[Instruction]:
        """Storage cannot be read, for now: whoever runs it may mend that."""
        cluster, search = self._cluster, self._search
        search.num_failures += 1
        pause_s = min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2 ** (search.num_failures - 1))
        cluster.deadlines.set(SEARCH_KEY, now + pause_s)
        cluster.plan = f"{printable(why)}; it is tried again every {seconds(pause_s)}"
        return [Note(text=f"{search.why}; {cluster.plan}", is_warning=True)] if pause_s < _MAX_PAUSE_S else []

    def _seek_another(self, tag: str, why: str) -> list[Instruction]:
        search = self._search
        search.exclude(tag, why)
        self._phase, self._cluster.plan = Phase.SEEK, "looking for an older checkpoint"
        return [FindCheckpoint(excluded=tuple(search.excluded), only=search.only)]

    def _without_checkpoint(self) -> list[Instruction]:
        search, config = self._search, self._cluster.config.checkpoints
        if search.has_lost and search.is_start and not search.has_looked:
            search.is_exhausted = True
            return self._take_over(search.why)  # perhaps nothing is lost
        step, failure = self._cluster.policy.step, self._checkpointing.failure
        if config is not None and (why := nothing_found(search, restore=config.restore, step=step, failure=failure)):
            return self._ending.fail(why)
        return self._begin_anew()

    def _restore(self, checkpoint: Checkpoint, manifest_sha256: str) -> list[Instruction]:
        cluster, search = self._cluster, self._search
        least = cluster.epoch + 1 if search.is_start or search.has_tried else cluster.epoch
        self._rise(max(least, search.highest_epoch + 1), why=f"rolled back to step {checkpoint.step}", step=checkpoint.step)
        search.has_tried = cluster.membership.knows_predecessors = True
        is_of_this_life = checkpoint.life == cluster.membership.life
        cluster.membership.earlier = checkpoint.record.earlier if is_of_this_life else (checkpoint.life, checkpoint.chief_incarnation)
        self._takeover.begin_with(checkpoint.record)
        cluster.shards.release_all()
        cluster.new_policy(step=checkpoint.step, is_start=True)
        self._checkpoint = checkpoint, manifest_sha256
        self._phase = Phase.RESTORE
        cluster.recovering, cluster.plan = search.why, f"then step {checkpoint.step} of checkpoint {checkpoint.tag}"
        text = f"bringing back step {checkpoint.step} of checkpoint {checkpoint.tag} under epoch {cluster.epoch}: {search.why}"
        order = RestoreShards(
            epoch=cluster.epoch,
            chief_incarnation=cluster.chief_incarnation,
            life=cluster.membership.life,
            tag=checkpoint.tag,
            manifest_sha256=manifest_sha256,
            specs=cluster.shard_specs(checkpoint.step),
            settings=self._settings.for_shards(step=checkpoint.step),
        )
        return [*self._refuse_all(), Note(text=text), order]

    def _open(self, now: float, *, oldest_kept: int = 0) -> list[Instruction]:
        cluster = self._cluster
        self._phase, self._checkpoint, self._search = Phase.IDLE, None, Search()
        cluster.recovering = cluster.plan = ""
        cluster.under_way = None
        cluster.registry.open()
        cluster.oldest_kept = oldest_kept
        cluster.ledger.roll_back(cluster.policy.step, now=now)
        self._checkpointing.opened(now)
        cluster.told.version = max(cluster.told.version, self._takeover.record_version)
        instructions = [*self._models.settle(), assurance.keep(cluster)]
        max_steps = cluster.config.max_steps
        if max_steps is not None and cluster.policy.step >= max_steps:
            instructions += self._ending.finish(f"max_steps {max_steps} reached", now)
        return instructions

    # -- inside

    @property
    def _is_over(self) -> bool:
        return bool(self._cluster.failure) or self._cluster.is_finished

    def _is_restoring(self, epoch: int, tag: str) -> bool:
        is_it = self._checkpoint is not None and (epoch, tag) == (self._cluster.epoch, self._checkpoint[0].tag)
        return self._phase is Phase.RESTORE and is_it and not self._is_over

    def _adoption(self) -> AdoptShards:
        cluster = self._cluster
        return AdoptShards(epoch=cluster.epoch, chief_incarnation=cluster.chief_incarnation, life=cluster.membership.life)

    def _rise(self, epoch: int, *, why: str, step: int | None = None) -> None:
        cluster = self._cluster
        cluster.has_taken_over = cluster.has_taken_over and epoch <= cluster.epoch
        if epoch > cluster.epoch:
            cluster.told.restart()
        cluster.epoch = max(cluster.epoch, epoch)
        # Shards keep the record of the highest version: one of a later epoch is later.
        cluster.told.version = max(cluster.told.version, min(cluster.epoch, _MAX_EPOCH) << _BITS_OF_AN_EPOCH)
        cluster.membership.begin_epoch(cluster.epoch, why=why, step=step)

    def _leave_epoch(self, why: str) -> None:
        """What is under way comes to nothing, and nobody is served before there is a step again."""
        cluster = self._cluster
        self._takeover.give_up()
        self._checkpointing.roll_back()
        cluster.under_way = None
        cluster.registry.is_ready = False
        cluster.new_policy(step=cluster.policy.step, is_start=True)
        self._rise(cluster.epoch + 1, why=why)

    def _refuse_all(self) -> list[Instruction]:
        cluster = self._cluster
        return cluster.refuse_waiting(cluster.membership.other_epoch(max(1, cluster.epoch - 1)))

    def _renumber(self) -> list[Instruction]:
        """The checkpoint is of another life, in which chiefs' numbers had come farther: numbers given meanwhile mean nothing any more."""
        cluster = self._cluster
        cluster.membership.succeed(chief_incarnation=cluster.chief_incarnation, life=cluster.new_life())
        return cluster.refuse_waiting(LeaseExpired("not registered here: another chief was here before. Register again"))
