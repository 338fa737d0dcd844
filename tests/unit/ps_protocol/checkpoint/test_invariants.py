"""Random histories of a directory of checkpoints: after any crash or damage, the newest whole one is found, and never a mix of two."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ps_protocol.checkpoint.catalog import KnownCheckpoints, find_checkpoint, prune, verify_checkpoint
from ps_protocol.checkpoint.storage import MANIFEST, LocalStorage
from ps_protocol.errors import CheckpointNotFound, DataLoss
from ps_protocol.roles.checkpoint import Checkpoint
from tests.support.examples import machine_settings
from tests.support.parameter_servers.checkpoints import CLUSTER, Crash, Disk, save

KEEP = 2
pick = st.integers(min_value=0, max_value=1 << 16)


@dataclass(slots=True)
class Whole:
    """A checkpoint that was whole once; `harm` is what was done to it then: nothing, a bit, or more, which sizes show."""

    checkpoint: Checkpoint
    harm: str = ""


class Storage(RuleBasedStateMachine):
    """One chief saves and removes; it dies at any call to the disk, and what lies there rots."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="checkpoints-"))
        self.storage, self.known = LocalStorage(self.root), KnownCheckpoints()
        self.whole: dict[str, Whole] = {}
        self.epoch, self.step = 1, 0

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(num_steps=st.integers(1, 5), num_shards=st.integers(1, 3))
    def save(self, num_steps: int, num_shards: int) -> None:
        self.step += num_steps
        self._note(save(self.storage, step=self.step, epoch=self.epoch, num_shards=num_shards))

    @rule()
    def prune(self) -> None:
        prune(self.storage, cluster=CLUSTER, keep=KEEP, known=self.known)
        self._forget()
        assert {stored.tag for stored in self.storage.stored()} == set(self.whole), "more or less is left than was to be kept"

    @rule(num_steps=st.integers(1, 5), crash_at=st.integers(1, 60))
    def die_while_saving(self, num_steps: int, crash_at: int) -> None:
        """The process dies at this call to the disk, if it makes so many; another one takes its place."""
        step, disk = self.step + num_steps, Disk(self.root, crash_at=crash_at)
        disk.note_synced()
        saved: Checkpoint | None = None
        try:
            with disk.installed():
                saved = save(self.storage, step=step, epoch=self.epoch, num_shards=2)
                prune(self.storage, cluster=CLUSTER, keep=KEEP, known=self.known)
        except Crash:
            disk.tear()
        self.step, self.storage, self.known = step, LocalStorage(self.root), KnownCheckpoints()
        there = {stored.tag for stored in self.storage.stored() if stored.is_whole}
        found = saved or self._newest_if(step)
        if found is not None:
            self._note(found)
        before = dict(self.whole)
        self._forget()
        self.whole |= {tag: one for tag, one in before.items() if tag in there}  # it died before all had gone that were to go

    @rule(back=st.integers(0, 6))
    def roll_back(self, back: int) -> None:
        self.epoch, self.step = self.epoch + 1, max(0, self.step - back)

    @precondition(lambda self: self.whole)
    @rule(number=pick, position=pick, what=st.sampled_from(["bit", "cut", "gone", "manifest"]))
    def rot(self, number: int, position: int, what: str) -> None:
        one = self.whole[sorted(self.whole)[number % len(self.whole)]]
        if one.harm:
            return
        file = one.checkpoint.files[position % len(one.checkpoint.files)].name
        path = self.root / one.checkpoint.tag / (MANIFEST if what == "manifest" else file)
        content = bytearray(path.read_bytes())
        if what == "gone":
            path.unlink()
        else:
            content[position % len(content)] ^= 1 << position % 8
            path.write_bytes(content[: len(content) // 2] if what == "cut" else content)
        one.harm = what
        self.known = KnownCheckpoints()  # as another process finds it

    @invariant()
    def the_newest_whole_one_is_found(self) -> None:
        unharmed = [one.checkpoint for one in self.whole.values() if not one.harm]
        newest = max(unharmed, key=lambda checkpoint: checkpoint.age_order, default=None)
        assert self._found() == newest

    def _found(self) -> Checkpoint | None:
        """What a chief goes back to: it takes the next older one when servers find that a file is not what was written."""
        excluded: list[str] = []
        while True:
            try:
                checkpoint = find_checkpoint(self.storage, cluster=CLUSTER, excluded=excluded).checkpoint
            except CheckpointNotFound:
                return None
            try:
                verify_checkpoint(self.storage, checkpoint)
            except DataLoss:
                excluded.append(checkpoint.tag)
            else:
                return checkpoint

    def _newest_if(self, step: int) -> Checkpoint | None:
        """What was being saved when the process died, if it is whole: then all of it is."""
        found = self._found()
        return found if found is not None and (found.fence.epoch, found.step) == (self.epoch, step) else None

    def _note(self, checkpoint: Checkpoint) -> None:
        self.whole[checkpoint.tag] = Whole(checkpoint)

    def _forget(self) -> None:
        """Only the newest are kept; one whose sizes are wrong does not count, and goes with those that are older than all kept."""
        readable = [one for one in self.whole.values() if one.harm != "manifest"]
        kept = [one for one in readable if one.harm in ("", "bit")]
        kept = sorted(kept, key=lambda one: one.checkpoint.age_order)[-KEEP:]
        oldest = kept[0].checkpoint.age_order if kept else (0, 0)
        for one in readable:
            if one not in kept and one.checkpoint.age_order <= oldest:
                del self.whole[one.checkpoint.tag]


Storage.TestCase.settings = machine_settings(num_examples=12, num_steps=16)
TestStorage = Storage.TestCase
