"""Keeps the weights that a follower has in a store, step by step. Knows storages and their index; no cluster."""

import logging
import os
import random
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import replace

from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.errors import CheckpointNotFound, InvalidSpec, PermissionDenied, StorageFailed, StorageFull, Superseded
from ps_protocol.process.waiting import delays_s
from ps_protocol.weights.words import NO_PATCH, Patch
from worker_client.following.follower import Follower, Held
from worker_client.following.index import INDEX, Index, decode_index, encode_index
from worker_client.following.sources import Version
from worker_client.following.store import SILENT_BEATS, Taken, write_entry

log = logging.getLogger("lockstep.follow")

KEEP_STEPS = 100
KEEP_S = 60.0
ANCHOR_STEPS = 100
_MAX_PAUSE_S = 5.0
_OURS = re.compile(r"(anchor|patch)-[0-9]{9,}-.*")
_TRIED_AGAIN = (StorageFull, StorageFailed, PermissionDenied)


class StoreKeeper:
    """Writes what a follower has to a place: files first, then the index that names them. For one thread; `claim` comes first.

    `keep_steps`: a reader so far behind finds patches. `keep_s`: what the index does not name any more stays for so long, for those who
    have read the index before. `anchor_steps`: from one anchor to the next, or sooner, when the patches have as many bytes. `beat_s`: the
    index is written anew at least so often, and a writer that has not done so for three of them is taken for gone.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        *,
        keep_steps: int = KEEP_STEPS,
        keep_s: float = KEEP_S,
        anchor_steps: int = ANCHOR_STEPS,
        beat_s: float = 2.0,
    ) -> None:
        if keep_steps < 1 or anchor_steps < 1 or not keep_s >= 0:
            raise InvalidSpec(f"keep steps {keep_steps}, keep s {keep_s}, anchor steps {anchor_steps}: want at least 1, 0 and 1")
        self._storage = storage
        self._keep_steps, self._keep_s, self._anchor_steps, self._beat_s = keep_steps, keep_s, anchor_steps, beat_s
        self._writer = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        self._num_tags = 0
        # What is written: the index, its bytes, and the version of its last step.
        self._index: Index | None = None
        self._content = b""
        self._put_at = 0.0
        self._written: Version | None = None
        # Files that no index names any more, and since when.
        self._leaving: dict[str, float] = {}

    def claim(self) -> None:
        """Makes this the one who writes there; waits to see whether another one still does. Raises Superseded, DataLoss, InvalidSpec.

        What another one has written is gone on with where it is of the same training; leftovers are removed.
        """
        self._content = self._there()
        if self._content:
            index = decode_index(self._content, where=f"{self._storage.place}/{INDEX}")
            if index.writer:
                self._await_silence(index)
            self._index = replace(index, writer=self._writer, beat_s=self._beat_s, is_over=False)
        named = {entry.tag for entry in self._index.entries} if self._index is not None else set()
        stored = self._storage.stored()
        if foreign := [one.tag for one in stored if not _OURS.fullmatch(one.tag)]:
            raise InvalidSpec(f"{self._storage.place} has {foreign[0]!r}, which is nothing of weights; choose a place for them alone")
        self._leaving = {one.tag: time.monotonic() for one in stored if one.tag not in named}
        if self._index is not None:
            with suppress(*_TRIED_AGAIN):  # `keep` says so, and tries again
                self._put(self._index)

    def keep(self, follower: Follower) -> None:
        """Writes each step that the follower has, several as one where writing takes longer, until training ends.

        A place that cannot be written to is tried again. Raises Superseded, and the error that ended the following.
        """
        pauses = delays_s(random.Random(), max_s=_MAX_PAUSE_S)
        while True:
            is_over = follower.has_ended
            step = follower.look(self._taken, timeout_s=self._beat_s / 2)
            try:
                self._remove_old()  # first, since it makes room
                if step is not None:
                    self._write(step)
                elif is_over:
                    if self._index is not None:
                        self._put(replace(self._index, is_over=True, writer=""))
                    return
                elif self._index is not None and time.monotonic() - self._put_at >= self._beat_s:
                    self._put(replace(self._index, beat=self._index.beat + 1))
                pauses = delays_s(random.Random(), max_s=_MAX_PAUSE_S)
            except _TRIED_AGAIN as error:
                log.warning("the weights are not written: %s; trying again", error.message)
                time.sleep(next(pauses))

    def close(self) -> None:
        """Leaves the place to another one, who need not wait."""
        with suppress(*_TRIED_AGAIN, Superseded):
            if self._index is not None and self._index.writer:
                self._put(replace(self._index, writer=""))

    # -- who writes

    def _there(self) -> bytes:
        try:
            return self._storage.get(INDEX)
        except CheckpointNotFound:
            return b""

    def _await_silence(self, index: Index) -> None:
        silence_s = SILENT_BEATS * index.beat_s
        log.warning("%s was written by %s; seeing for %g s whether it still is", self._storage.place, index.writer, silence_s)
        end = time.monotonic() + silence_s
        while time.monotonic() < end:
            time.sleep(index.beat_s / 4)  # the other one says nothing but what it writes
            self._check_alone(index)

    def _check_alone(self, index: Index) -> None:
        """Raises Superseded if another one has written the index."""
        there = self._there()
        if there and there != self._content:
            writer = decode_index(there, where=f"{self._storage.place}/{INDEX}", known=index.followed).writer
            if writer != self._writer:  # else it was put, though it did not seem so
                raise Superseded(f"{self._storage.place} is written by another `lockstep store`, {writer}; end one of them")

    def _put(self, index: Index) -> None:
        """Replaces the index, unless another one has meanwhile."""
        self._check_alone(index)
        content = encode_index(index)
        self._storage.put(INDEX, content)
        before, self._index, self._content, self._put_at = self._index, index, content, time.monotonic()
        for entry in before.entries if before is not None else ():
            self._leaving.setdefault(entry.tag, self._put_at)
        for entry in index.entries:
            self._leaving.pop(entry.tag, None)

    def _remove_old(self) -> None:
        for tag in [tag for tag, since in self._leaving.items() if time.monotonic() - since >= self._keep_s]:
            self._storage.remove(tag)
            self._storage.remove_incomplete(tag)
            del self._leaving[tag]

    # -- steps

    def _taken(self, held: Held) -> Taken | None:
        """Takes what is to be written of a step, before the copies change; None: it is written."""
        if held.version == self._written:
            return None
        if not held.followed.policy.has_common_steps:
            raise InvalidSpec("each parameter server has steps of its own in this cluster (async): there is no step to write")
        patches: list[Patch] = []
        if self._index is not None and self._index.continues(held.followed):
            before = self._index.step
            found = [copy.patch_since(before) if copy.selection.num_words else (NO_PATCH, copy.digests) for copy in held.copies]
            if None not in found:
                patches = [one[0] for one in found if one is not None]
        is_due = not patches or self._is_anchor_due(held.version.step, sum(patch.nbytes for patch in patches))
        return Taken(held, [copy.digests for copy in held.copies], [copy.words.copy() for copy in held.copies] if is_due else (), patches)

    def _is_anchor_due(self, step: int, num_bytes: int) -> bool:
        assert self._index is not None
        anchor, *since = self._index.entries[self._index.anchor :]
        return step - anchor.step >= self._anchor_steps or sum(one.num_bytes for one in since) + num_bytes > anchor.num_bytes

    def _write(self, step: Taken) -> None:
        index, at = self._index, step.held.version.step
        if index is None or not index.continues(step.held.followed):
            if index is not None:
                log.warning("%s is begun anew with life %d, epoch %d", self._storage.place, *step.held.version[:2])
            index = Index(followed=step.held.followed, writer=self._writer, beat_s=self._beat_s)
        if at > (-1 if index.step is None else index.step):
            entries = list(index.entries)
            for kind, content, before in (("patch", step.patches, index.step), ("anchor", step.words, None)):
                if content:
                    self._num_tags += 1
                    steps = f"{at:09}" if before is None else f"{before:09}-{at:09}"
                    tag = f"{kind}-{steps}-{self._writer[-8:]}-{self._num_tags}"
                    self._leaving[tag] = time.monotonic()  # until an index names it
                    entries.append(write_entry(self._storage, tag, step, before=before))
            self._put(replace(index, entries=tuple(entries), newest_step=step.held.newest_step).pruned(self._keep_steps))
        self._written = step.held.version
