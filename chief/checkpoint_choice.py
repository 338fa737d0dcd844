"""Which checkpoint a cluster may begin with or go back to. Knows what was found and tried; no clock, wire or file."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from chief.cluster import Cluster
from chief.coordination import RESTORE_NONE
from chief.events import Note
from chief.wording import listed, printable
from ps_protocol.checkpoint import Checkpoint
from ps_protocol.errors import PsError

# What is skipped for these reasons has lost nothing: it was never whole, or is not of this cluster.
_HARMLESS = ("incomplete", "it is of cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """What checkpoints this run may go back to: those of its epochs, and the one that it began from or went back to, and older ones.

    What was saved of steps that were given up since, or by an earlier run, is newer than that and of an earlier epoch.
    """

    epoch: int = 0
    base: tuple[int, int] = (0, -1)

    def has(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint belongs to what this run has made or comes from."""
        return checkpoint.epoch >= self.epoch or checkpoint.age_order <= self.base


@dataclass(slots=True, kw_only=True)
class Search:
    """A search for a checkpoint: why, what did not do so far, and what else is there. `has_lost`: shards had a model, or some of it."""

    why: str = ""
    is_start: bool = True
    has_lost: bool = False
    has_looked: bool = False  # at what shards hold
    is_exhausted: bool = False  # there is none
    has_tried: bool = False  # to restore one
    num_failures: int = 0  # of storage, one after the other
    only: str = ""
    excluded: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    highest_epoch: int = 0

    def note_skipped(self, skipped: Iterable[tuple[str, str]]) -> list[str]:
        """Takes note of what was left out, and returns what is news, in words."""
        fresh = [(tag, why) for tag, why in skipped if tag not in self.excluded and tag not in self.damaged]
        self.damaged.update((printable(tag), printable(why)) for tag, why in fresh if not why.startswith(_HARMLESS))
        return [f"checkpoint {printable(tag)} is skipped: {printable(why)}" for tag, why in fresh]

    def exclude(self, tag: str, why: str) -> None:
        """One did not do."""
        self.excluded.append(tag)
        self.damaged[tag] = why

    @property
    def damage(self) -> str:
        """What is there and cannot be restored, to be put behind other words; empty: nothing."""
        words = [f"{tag}: {why}" for tag, why in self.damaged.items()]
        return f" ({listed(words, limit=3, separator='; ')})" if words else ""


def misfit(checkpoint: Checkpoint, *, cluster: Cluster, branch: Branch) -> str:
    """Says why a whole checkpoint is not one to go back to; empty: it is."""
    model = checkpoint.record.model
    if checkpoint.cluster != cluster.config.cluster:
        return f"it is of cluster {checkpoint.cluster!r}, this is {cluster.config.cluster!r}"
    if model is None:
        return "it has no model"
    if not branch.has(checkpoint):
        return f"it is of epoch {checkpoint.epoch}, of steps that were given up since"
    if cluster.registry.model is not None:
        differences = cluster.registry.model.differences(model)
        return f"it is of another model: {listed(differences, limit=3, separator='; ')}" if differences else ""
    try:
        cluster.config.with_policy(checkpoint.record.policy)
        cluster.registry.check_placeable(model)
    except PsError as error:
        return error.message
    return ""


def nothing_found(search: Search, *, restore: str, step: int, failure: str = "") -> str:
    """Says why a cluster cannot go on without a checkpoint; empty: it may begin anew. `failure`: of the latest attempt to make one."""
    there = search.damage
    last = f" (the last attempt failed: {failure})" if failure else ""
    if search.has_lost:
        return (
            f"{search.why}{'' if ' lost the variables' in search.why else ' and has lost its variables'} (global_step {step}),"
            f" and there is no whole checkpoint to go back to{there}{last}; start the whole cluster again"
        )
    if search.only:
        return f"there is no whole checkpoint {search.only!r} to begin with{there}; see `lockstep checkpoint ls`"
    if there and restore != RESTORE_NONE:
        return f"there are checkpoints, and none of them can be restored{there}; mend them, or begin anew with --restore none"
    return ""


def gone_back(checkpoint: Checkpoint, *, cluster: Cluster, search: Search) -> Note:
    """Counts a rollback, if it is one, and says so; loudly, since steps are done again."""
    if not search.has_lost:
        return Note(text=f"training goes on at step {checkpoint.step} of checkpoint {checkpoint.tag}, under epoch {cluster.epoch}")
    words = f"rolled back to step {checkpoint.step} (epoch {cluster.epoch}): {search.why}"
    cluster.num_rollbacks += 1
    cluster.last_rollback = words
    return Note(text=words, is_warning=True)
