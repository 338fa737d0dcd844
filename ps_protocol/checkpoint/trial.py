"""A trial of a place for checkpoints: writes a small one as a save does, reads it back and removes it. Knows no role and no RPC."""

from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.errors import DataLoss, InvalidSpec
from ps_protocol.roles.shard import CheckpointFile

# What the tags of trials begin with. None has a manifest that a restore would take.
TRIAL = "doctor-"
_FILE, _CONTENT = "trial", bytes(range(256)) * 256


class PlaceTrial:
    """Trials of one place. May be run by several threads."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage

    @property
    def place(self) -> str:
        """The place as people name it."""
        return self._storage.place

    def run(self, tag: str, *, is_last: bool) -> tuple[str, ...]:
        """Writes the file; with `is_last`, makes it whole, reads it and removes it. Returns the tags of all trials that are there before.

        If each process of a cluster writes first, each sees those of the others in one of its calls, unless their places differ. Raises
        errors of the storage.
        """
        storage = self._storage
        if not tag.startswith(TRIAL):
            raise InvalidSpec(f"trial {tag[:80]!r}: want a tag that begins with {TRIAL!r}")
        seen = tuple(one.tag for one in storage.stored() if one.tag.startswith(TRIAL))
        if not is_last:
            with storage.create(tag, _FILE, num_bytes=len(_CONTENT)) as file:
                file.write(_CONTENT)
            return seen
        try:
            storage.commit(tag, b"{}", files=[CheckpointFile(name=_FILE, shard=0, num_bytes=len(_CONTENT), sha256="")])
            found = bytearray(len(_CONTENT))
            with storage.open(tag, _FILE) as written:
                written.read_into(memoryview(found), offset=0)
            if found != _CONTENT:
                raise DataLoss(f"{tag}/{_FILE} in {storage.place} is not what was written")
            return seen
        finally:
            storage.remove(tag)
            storage.remove_incomplete(tag)
