"""The chief's work on the storage of checkpoints: finds the newest whole one, makes one whole, removes old ones. Decides nothing.

Every method blocks on storage.
"""

import datetime
import logging

from chief.core.cluster.checkpoints import PASSING
from chief.core.messages import CommitCheckpoint, FindCheckpoint, Found
from ps_protocol.checkpoint.catalog import KnownCheckpoints, check_sizes, find_checkpoint, highest_epoch, list_checkpoints, prune
from ps_protocol.checkpoint.manifest import ManifestEncoder
from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.errors import CheckpointNotFound, PsError

log = logging.getLogger("lockstep.chief")


class CheckpointStore:
    """The checkpoints of one cluster at one place. For one thread at a time, but that it may look, and `expect`, while it writes."""

    def __init__(self, storage: CheckpointStorage, *, cluster: str) -> None:
        self._storage = storage
        self._cluster = cluster
        self._encoder = ManifestEncoder()
        self._known = KnownCheckpoints()
        # The latest that is, or was: no `prune` removes them, and one under way sees at once what is written next.
        self._latest = dict.fromkeys(("written", "committed", "read"), "")

    @property
    def place(self) -> str:
        """The place as people name it."""
        return self._storage.place

    def find(self, work: FindCheckpoint) -> Found:
        """Returns the newest whole checkpoint that is wanted. Raises the errors of a place that cannot be read now."""
        top = 0
        try:
            top = highest_epoch(self._storage)
            found = find_checkpoint(self._storage, cluster=self._cluster, tag=work.only or None, excluded=work.excluded)
        except CheckpointNotFound as error:
            log.info("%s", error.message)
            return Found(checkpoint=None, skipped=self._unusable(work, error), highest_epoch=top)
        except PASSING:
            raise
        except PsError as error:
            return Found(checkpoint=None, skipped=((work.only or self.place, error.message),), highest_epoch=top)
        self._latest["read"] = found.checkpoint.tag
        skipped = tuple((one.tag, one.reason) for one in found.skipped)
        return Found(checkpoint=found.checkpoint, manifest_sha256=found.manifest_sha256, skipped=skipped, highest_epoch=top)

    def expect(self, tag: str) -> None:
        """Files of a checkpoint are about to be written."""
        self._latest["written"] = tag

    def commit(self, work: CommitCheckpoint) -> None:
        """Makes a checkpoint whole, whose files stand; if that fails, removes them. Raises PsError."""
        checkpoint = work.checkpoint
        saved_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            if checkpoint.bases:
                check_sizes(checkpoint.tag, checkpoint.bases, self._storage.stored())
            self._storage.commit(checkpoint.tag, self._encoder.encode(checkpoint, saved_at=saved_at), files=checkpoint.files)
        except PsError:
            self.abandon(checkpoint.tag)
            raise
        self._latest["committed"] = checkpoint.tag

    def abandon(self, tag: str) -> None:
        """Removes the files of a checkpoint that could not be completed, if storage allows it."""
        try:
            self._storage.remove_incomplete(tag)
        except PsError as error:
            log.warning("cannot remove what is left of a checkpoint tag=%s cause=%s", tag, error.message)

    def prune(self, keep: int) -> None:
        """Removes old checkpoints and the rest of failed attempts, once one has been committed. Takes long; need not be waited for."""
        try:
            removed = prune(self._storage, cluster=self._cluster, keep=keep, spare=self._latest.values(), known=self._known)
        except PsError as error:
            log.warning("cannot remove old checkpoints place=%s cause=%s", self.place, error.message)
        else:
            if removed:
                log.debug("removed checkpoints tags=%s", ",".join(removed))

    def _unusable(self, work: FindCheckpoint, error: PsError) -> tuple[tuple[str, str], ...]:
        if work.only:
            return ((work.only, error.message),)
        try:
            _, skipped = list_checkpoints(self._storage, cluster=self._cluster)
        except PsError as later:
            return ((self.place, later.message),)
        return tuple((one.tag, one.reason) for one in skipped)
