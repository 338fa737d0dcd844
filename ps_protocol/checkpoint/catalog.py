"""The checkpoints of a place: its storage, which checkpoints are whole, which is the newest, which may be removed. Knows no shard."""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import unquote, urlsplit

from ps_protocol.checkpoint.manifest import decode_json, read_checkpoint
from ps_protocol.checkpoint.storage import MANIFEST, CheckpointStorage, LocalStorage, StoredCheckpoint
from ps_protocol.checkpoint.tensor_file import MAX_TENSORS, check_file
from ps_protocol.checkpoint.trial import TRIAL
from ps_protocol.errors import CheckpointNotFound, DataLoss, InvalidSpec, PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.checkpoint import Checkpoint, epoch_of
from ps_protocol.roles.shard import MAX_STEP, CheckpointFile

# Which kind of storage a place for checkpoints needs: a path, or a URL.


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z].*)?://")


def open_storage(place: str) -> CheckpointStorage:
    """Returns the storage at a path ("~" is the home directory), at "file:///path", or at a URL of fsspec ("s3://bucket/run").

    Touches nothing there yet. Raises InvalidSpec if it is no place, or if a package that it needs is not installed.
    """
    if not isinstance(place, str) or not place.strip() or "\0" in place:
        raise InvalidSpec(f"checkpoint directory: got {str(place)[:80]!r}, want a path or a URL")
    if not _URL.match(place):
        return LocalStorage(place)
    if place.startswith("file:"):
        parts = urlsplit(place)
        if parts.netloc not in ("", "localhost"):
            raise InvalidSpec(f"checkpoint directory {place!r}: names the host {parts.netloc!r}; want file:///path, with three slashes")
        return LocalStorage(unquote(parts.path))
    # Not at the top: fsspec is an extra, which checkpoints in a directory do not need.
    from ps_protocol.checkpoint.fsspec_storage import RemoteStorage

    return RemoteStorage(place)


def storage_of_role(place: str) -> CheckpointStorage:
    """Returns the storage of a process that will write to it, and makes a directory. Raises InvalidSpec if it may not write there."""
    storage = open_storage(place)
    if isinstance(storage, LocalStorage):
        storage.make()
    return storage


# Which checkpoints of a place are whole, which of them is the newest, and which may go.


# Value, slots and averages of a variable's slice, at the very most.
_TENSORS_PER_SLICE = 16
_MAX_NAMED = 10


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A checkpoint that is not taken, and why: it is damaged, unless it was never finished, or is another cluster's."""

    tag: str
    reason: str
    is_incomplete: bool = False
    is_foreign: bool = False


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A whole checkpoint, the SHA-256 of its manifest, when it was saved (words), and the newer ones that could not be taken."""

    checkpoint: Checkpoint
    manifest_sha256: str
    saved_at: str = ""
    skipped: tuple[Skipped, ...] = ()


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    stored: StoredCheckpoint
    cluster: str
    age_order: tuple[int, int]


def find_checkpoint(storage: CheckpointStorage, *, cluster: str = "", tag: str | None = None, excluded: Collection[str] = ()) -> Found:
    """Returns the newest whole checkpoint of a cluster (empty: of any), or the one named, that is none of the excluded.

    Manifest and sizes of files are checked, not what is in the files: who reads them checks that. Raises CheckpointNotFound if there is
    none, saying what there is; DataLoss if the one named is damaged; others of the storage.
    """
    stored = storage.stored()
    candidates, skipped = _candidates(storage, stored, cluster=cluster, excluded=excluded)
    if tag is not None:
        return _found_named(storage, stored, tag, candidates, skipped)
    for candidate in reversed(candidates):
        try:
            return _read(storage, candidate.stored, stored, skipped)
        except (DataLoss, CheckpointNotFound) as error:
            skipped.append(Skipped(tag=candidate.stored.tag, reason=error.message))
    raise CheckpointNotFound(f"no complete checkpoint in {storage.place}{_words_of(skipped)}")


def list_checkpoints(storage: CheckpointStorage, *, cluster: str = "") -> tuple[tuple[Found, ...], tuple[Skipped, ...]]:
    """Returns the whole checkpoints of a cluster (empty: of any), the oldest first; and what is incomplete or damaged."""
    stored = storage.stored()
    candidates, skipped = _candidates(storage, stored, cluster=cluster)
    found = []
    for candidate in candidates:
        try:
            found.append(_read(storage, candidate.stored, stored, []))
        except (DataLoss, CheckpointNotFound) as error:
            skipped.append(Skipped(tag=candidate.stored.tag, reason=error.message))
    return tuple(found), tuple(skipped)


def highest_epoch(storage: CheckpointStorage) -> int:
    """Returns the highest epoch of all checkpoints, of whatever cluster, by their manifests or, of incomplete ones, by name; 0: none.

    A run that does not continue from one of them begins above it, or they would count as newer than its own.
    """
    candidates, skipped = _candidates(storage, storage.stored())
    return max((*(candidate.age_order[0] for candidate in candidates), *(epoch_of(one.tag) for one in skipped)), default=0)


def verify_checkpoint(
    storage: CheckpointStorage,
    checkpoint: Checkpoint,
    *,
    known: dict[CheckpointFile, PsError | None] | None = None,
    on_read: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Reads every byte of a checkpoint and of those that it rests on. Raises DataLoss if one is not what was written, and those of storage.

    `known`: from one call to the next, the outcomes of files, so that none is read twice. `on_read`: called with the number of bytes as
    they are read.
    """
    known = {} if known is None else known
    for file in (*checkpoint.bases, *checkpoint.files):
        key = replace(file, tag=file.tag or checkpoint.tag)
        if key not in known:
            known[key] = None
            try:
                check_file(storage, checkpoint.tag, file, max_tensors=max_tensors_of(checkpoint, file.shard), on_read=on_read)
            except (DataLoss, CheckpointNotFound) as error:
                known[key] = error
        if (failure := known[key]) is not None:
            raise failure


def max_tensors_of(checkpoint: Checkpoint, shard: int) -> int:
    """Returns more tensors than the file of this shard can have, so that more are taken for damage before they cost memory."""
    return max(MAX_TENSORS, _TENSORS_PER_SLICE * sum(placed.shard == shard for placed in checkpoint.placement))


class KnownCheckpoints:
    """Remembers whole checkpoints, so that adding one does not read every manifest again: a manifest never changes."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def look(self, storage: CheckpointStorage, stored: Collection[StoredCheckpoint]) -> list["_Seen"]:
        """Returns those of these that are whole and have a manifest that can be read. Raises errors of the storage."""
        seen = {}
        for one in stored:
            before = self._seen.get(one.tag)
            if before is not None and before.candidate.stored == one:
                seen[one.tag] = before
            elif one.is_whole:
                with suppress(DataLoss, CheckpointNotFound):
                    seen[one.tag] = _see(storage, one)
        self._seen = seen
        return list(seen.values())


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One whole checkpoint, the sizes of its files (None: its manifest is not a valid one), and those that it rests on."""

    candidate: _Candidate
    sizes: Mapping[str, int] | None
    base_tags: tuple[str, ...] = ()


def prune(
    storage: CheckpointStorage, *, cluster: str, keep: int, spare: Collection[str] = (), known: KnownCheckpoints | None = None
) -> tuple[str, ...]:
    """Removes a cluster's checkpoints older than the newest `keep` full ones, and what attempts have left; returns the tags of what went.

    `spare`: tags that are being written or read; these stay, and what they rest on.
    What is damaged goes when it is older than all that are kept; what belongs to another
    cluster stays, and a trial, which its maker removes. `known`: from one call to the next, spares reading manifests again. Raises errors
    of the storage; then some may be gone.
    """
    stored = storage.stored()
    seen = (known or KnownCheckpoints()).look(storage, stored)
    own = sorted((one for one in seen if cluster in ("", one.candidate.cluster)), key=lambda one: one.candidate.age_order)
    kept = [one.candidate for one in reversed(own) if _has_all_sizes(one) and not one.base_tags][: max(1, keep)]
    oldest = kept[-1].age_order if kept else (0, 0)
    kept_tags = {candidate.stored.tag for candidate in kept} | set(spare)
    kept_tags |= {tag for one in own if one.candidate.stored.tag in spare for tag in one.base_tags}
    removed = []
    for candidate in (one.candidate for one in own):
        if candidate.stored.tag not in kept_tags and candidate.age_order <= oldest:
            storage.remove(candidate.stored.tag)
            removed.append(candidate.stored.tag)
    for one in stored:
        if not one.is_whole and one.tag not in spare and not one.tag.startswith(TRIAL):
            storage.remove_incomplete(one.tag)
            removed.append(one.tag)
    return tuple(dict.fromkeys(removed))


def _see(storage: CheckpointStorage, stored: StoredCheckpoint) -> _Seen:
    candidate = _candidate(storage, stored)
    try:
        checkpoint = read_checkpoint(storage, stored.tag).checkpoint
    except (DataLoss, CheckpointNotFound):
        return _Seen(candidate=candidate, sizes=None)
    sizes = {file.name: file.num_bytes for file in checkpoint.files}
    return _Seen(candidate=candidate, sizes=sizes, base_tags=checkpoint.base_tags)


def _has_all_sizes(seen: _Seen) -> bool:
    there = seen.candidate.stored.files
    return seen.sizes is not None and all(there.get(name) == num_bytes for name, num_bytes in seen.sizes.items())


def _candidates(
    storage: CheckpointStorage, there: Collection[StoredCheckpoint], *, cluster: str = "", excluded: Collection[str] = ()
) -> tuple[list[_Candidate], list[Skipped]]:
    """Returns the requested whole checkpoints, the oldest first, and those left out with the reason; manifests are not checked."""
    candidates, skipped = [], []
    for stored in there:
        if not stored.is_whole:
            skipped.append(Skipped(tag=stored.tag, reason="incomplete: it was never finished", is_incomplete=True))
        elif stored.tag in excluded:
            skipped.append(Skipped(tag=stored.tag, reason="it could not be restored before"))
        else:
            try:
                candidate = _candidate(storage, stored)
            except (DataLoss, CheckpointNotFound) as error:
                skipped.append(Skipped(tag=stored.tag, reason=error.message))
                continue
            if cluster and candidate.cluster != cluster:
                reason = f"it is of cluster {candidate.cluster!r}, this is {cluster!r}"
                skipped.append(Skipped(tag=stored.tag, reason=reason, is_foreign=True))
            else:
                candidates.append(candidate)
    return sorted(candidates, key=lambda candidate: candidate.age_order), skipped


def _candidate(storage: CheckpointStorage, stored: StoredCheckpoint) -> _Candidate:
    where = f"{stored.tag}/{MANIFEST}"
    fields: Mapping[str, Any] = decode_json(storage.manifest(stored.tag), where=where)
    try:
        age_order = int(fields["fence"]["era"]["epoch"]), int(fields.get("step", 0))
    except (KeyError, ValueError, TypeError):
        age_order = -1, -1
    # Checked even of one that will not be read: a new run's epochs begin above all of these.
    if not (1 <= age_order[0] <= MAX_STEP and 0 <= age_order[1] <= MAX_STEP):
        raise DataLoss(f"{where}: not a valid manifest: its epoch or step is invalid")
    return _Candidate(stored=stored, cluster=str(fields.get("cluster", "")), age_order=age_order)


def _read(storage: CheckpointStorage, stored: StoredCheckpoint, there: Collection[StoredCheckpoint], skipped: list[Skipped]) -> Found:
    manifest = read_checkpoint(storage, stored.tag)
    check_sizes(stored.tag, (*manifest.checkpoint.bases, *manifest.checkpoint.files), there)
    return Found(checkpoint=manifest.checkpoint, manifest_sha256=manifest.sha256, saved_at=manifest.saved_at, skipped=tuple(skipped))


def check_sizes(tag: str, files: Collection[CheckpointFile], there: Collection[StoredCheckpoint]) -> None:
    """Raises DataLoss naming the first of the files that a checkpoint names that is not there, whole, as long as it should be."""
    sizes = {one.tag: one.files for one in there if one.is_whole}
    for file in files:
        where = file.tag or tag
        size = sizes.get(where, {}).get(file.name)
        if size != file.num_bytes:
            how = "is not there" if size is None else f"has {size} bytes, want {file.num_bytes}"
            raise DataLoss(f"{where}/{file.name}: {how}")


def _found_named(
    storage: CheckpointStorage, there: Collection[StoredCheckpoint], tag: str, candidates: list[_Candidate], skipped: list[Skipped]
) -> Found:
    for candidate in candidates:
        if candidate.stored.tag == tag:
            return _read(storage, candidate.stored, there, [])
    reasons = [one.reason for one in skipped if one.tag == tag]
    known = [candidate.stored.tag for candidate in candidates][-_MAX_NAMED:]
    others = f"; there are {', '.join(known)}" if known else "; there is none"
    raise CheckpointNotFound(f"no complete checkpoint {tag!r} in {storage.place}{': ' + reasons[0] if reasons else others}")


def _words_of(skipped: list[Skipped]) -> str:
    if not skipped:
        return ""
    incomplete = [one.tag for one in skipped if one.is_incomplete]
    others = [f"{one.tag}: {one.reason}" for one in skipped if not one.is_incomplete]
    words = [f"{len(incomplete)} incomplete: {', '.join(incomplete[:_MAX_NAMED])}"] if incomplete else []
    return f" ({'; '.join([*words, *others[:_MAX_NAMED]])})"
