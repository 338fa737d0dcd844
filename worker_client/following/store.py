"""A store of weights: files of anchors and patches, and a follower's source that reads them. Knows storages and files; no cluster."""

import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ps_protocol.checkpoint.catalog import open_storage
from ps_protocol.checkpoint.storage import CheckpointStorage
from ps_protocol.checkpoint.tensor_file import SavedTensor, open_file, tensor_name, write_file
from ps_protocol.encodings.formats import FORMATS, FloatEncoding
from ps_protocol.errors import (
    CheckpointNotFound,
    DataLoss,
    InvalidSpec,
    MalformedMessage,
    NotInitialized,
    PsError,
    StorageFailed,
    Unavailable,
)
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import FollowerReport
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.weights.words import Patch, Selection, decode_patch, encode_patch
from worker_client.following.follower import Held
from worker_client.following.index import FORMAT, INDEX, Entry, Index, decode_index
from worker_client.following.sources import Followed

log = logging.getLogger("lockstep.follow")

# A writer that has not written for so many of its beats is taken for gone.
SILENT_BEATS = 3
_CODES = {FloatEncoding.BFLOAT16: "BF16", FloatEncoding.FLOAT16: "F16"}


# Files. An anchor has a tensor for each slice, a patch the bytes that travel elsewhere, too.


class Taken(NamedTuple):
    """A step to be written, taken of what a follower holds: by shard its digests, all words, and what leads there; empty: not wanted."""

    held: Held
    digests: Sequence[Array]
    words: Sequence[Array]
    patches: Sequence[Patch]


def write_entry(storage: CheckpointStorage, tag: str, taken: Taken, *, before: int | None) -> Entry:
    """Writes a file for each shard, of its words or, from a step `before`, of its patch. Raises errors of the storage."""
    files = []
    life, epoch, step = taken.held.version
    num_shards = len(taken.held.copies)
    for shard, selection in enumerate(copy.selection for copy in taken.held.copies):
        encoding = FORMATS[selection.encoding].name
        metadata = {"life": life, "epoch": epoch, "step": step, "encoding": encoding, "shard": shard, "num_shards": num_shards}
        metadata["digests"] = ",".join(f"{digest:016x}" for digest in taken.digests[shard].tolist())
        if before is None:
            tensors = [_tensor_of(selection, taken.words[shard], place) for place in range(len(selection.of))]
        else:
            metadata |= {"before": before, "num_words": selection.num_words}
            tensors = [SavedTensor(name="patch", array=np.frombuffer(encode_patch(taken.patches[shard]), np.uint8))]
        about = {name: str(value) for name, value in metadata.items()}
        files.append(write_file(storage, tag, shard=shard, num_shards=num_shards, tensors=tensors, metadata=about))
    manifest = {"format": FORMAT, "files": [{"name": file.name} for file in files]}
    storage.commit(tag, json.dumps(manifest).encode(), files=files)
    return Entry(tag=tag, before=before, step=step, files=tuple(files))


def _tensor_of(selection: Selection, words: Array, place: int) -> SavedTensor:
    piece = selection.layout.pieces[selection.of[place]]
    content, is_encoded = selection.content_of(words, place)
    dtype, code = (np.dtype(np.uint16), _CODES[selection.encoding]) if is_encoded else (piece.variable.data_type.dtype, "")
    return SavedTensor(name=tensor_name(piece), array=content.view(dtype).reshape(piece.shape), code=code)


def read_entry(storage: CheckpointStorage, entry: Entry, shard: int, whole: Selection) -> tuple[Array | Patch, Array]:
    """Returns all words of a shard, or a patch, and the digests that slices have then. Raises DataLoss and others of the storage."""
    with open_file(storage, entry.tag, entry.files[shard]) as reader:
        found = {tensor.name: np.empty(tensor.num_bytes, np.uint8) for tensor in reader.tensors}
        for tensor in reader:
            reader.read_into(found[tensor.name])
        metadata = reader.metadata
    try:
        digests = np.array([int(text, 16) for text in metadata["digests"].split(",") if text], np.uint64)
        if digests.size != len(whole.of):
            raise ValueError(f"{digests.size} digests for {len(whole.of)} slices")
        if entry.before is None:
            words = np.zeros(whole.num_words, np.uint16)
            for place, at in enumerate(whole.of):
                whole.content_of(words, place)[0][:] = found[tensor_name(whole.layout.pieces[at])]
            return words, digests
        return decode_patch(found["patch"].data, num_words=whole.num_words), digests
    except (KeyError, ValueError, OverflowError, MalformedMessage) as error:
        raise DataLoss(f"{entry.tag}: not of this model: {type(error).__name__}: {str(error)[:200]}") from None


# The source.


class StoreSource:
    """Implements Source: a directory or a URL in which `lockstep store` keeps the weights of a cluster. Talks to no cluster.

    `interval_s`: from one look at the index to the next.
    """

    def __init__(self, place: str, *, interval_s: float = 0.5) -> None:
        if not interval_s > 0:
            raise InvalidSpec(f"interval_s: got {interval_s}, want more than 0 seconds")
        self._storage = open_storage(place)
        self._interval_s = interval_s
        # What was read last, and when.
        self._index: Index | None = None
        self._content = b""
        self._looked_at = self._changed_at = 0.0
        self._wholes: Sequence[Selection] = ()
        # Tags of which a file is not what it should be.
        self._bad: set[str] = set()
        self._is_drained = False
        self._closed = threading.Event()

    @property
    def place(self) -> str:
        """The store."""
        return f"the store at {self._storage.place}"

    @property
    def poll_s(self) -> float:
        """How long one call may wait for the next step."""
        return 1.5

    @property
    def is_over(self) -> bool:
        """Whether training has ended, and its last step was given."""
        return self._index is not None and self._index.is_over and self._is_drained

    def open(self) -> Followed:
        """Reads the index, unless it is known. Raises NotInitialized while there is none, DataLoss if it is none, InvalidSpec."""
        if self._index is None:
            self._look()
        if self._index is None:
            raise NotInitialized(f"{self.place} has no weights yet; `lockstep store --to` this place writes them")
        return self._index.followed

    def fetch(self, requests: Mapping[int, FetchRequest]) -> Mapping[int, FetchReply]:
        """Answers with the next entry, all of it in one page; waits for a later step where none is named. All readers hold one step."""
        request = next(iter(requests.values()))
        if request.step is None:
            self._await_news(request)
        index = self._index
        assert index is not None
        if index.step in (None, request.held_step) or request.era != index.followed.era:
            return {}
        while (entry := index.next_entry(request.held_step, without=self._bad)) is not None:
            if request.step not in (None, entry.step):
                return {}
            try:
                return {shard: self._reply(entry, shard, one.slices, index) for shard, one in requests.items()}
            except StorageFailed as error:
                raise Unavailable(error.message) from None
            except (CheckpointNotFound, DataLoss) as error:
                log.warning("%s: %s; another way is tried", self.place, error.message)
                self._bad.add(entry.tag)
        self._look()
        raise Unavailable(f"{self.place}: step {index.step} cannot be read; the next anchor is waited for")

    def lost(self, error: PsError) -> None:
        """There is no place to lose: the index says what is there."""

    def report(self, follower: FollowerReport, *, received_bytes: int) -> None:
        """Nobody looks on."""

    def close(self) -> None:
        """Ends the waiting."""
        self._closed.set()

    def _look(self) -> None:
        """Reads the index. One that cannot be understood is an error at first; later what was there stays."""
        self._looked_at, before = time.monotonic(), self._index
        try:
            content = self._storage.get(INDEX)
            if content == self._content:
                return
            known = None if before is None else before.followed
            index = decode_index(content, where=f"{self._storage.place}/{INDEX}", known=known)
        except CheckpointNotFound:
            return
        except (StorageFailed, DataLoss) as error:
            if before is None and isinstance(error, DataLoss):
                raise
            raise Unavailable(error.message) from None
        if before is not None and index.followed is known and (index.step or 0) < (before.step or 0):
            return  # an earlier one, out of a cache on the way
        if index.followed is not known:
            if before is not None:
                log.warning("%s is begun anew: another training, or one that was rolled back", self.place)
            self._wholes = [
                Selection(layout, index.kept.encoding, range(len(layout.pieces)) if index.kept.has_tables else None)
                for layout in index.followed.layouts
            ]
            self._bad.clear()
        self._index, self._content, self._changed_at, self._is_drained = index, content, self._looked_at, False

    def _await_news(self, request: FetchRequest) -> None:
        """Waits until the index has a step beyond the one that is held, or is of another training; looks at it once in each interval."""
        end = time.monotonic() + request.max_wait_s
        while not self._closed.is_set():
            index, now = self._index, time.monotonic()
            assert index is not None
            if request.era != index.followed.era or request.held_step != index.step:
                return
            if index.is_over or (now >= end and now < self._looked_at + self._interval_s):
                self._is_drained, silent_s = True, now - self._changed_at
                if not index.is_over and silent_s > SILENT_BEATS * index.beat_s + self._interval_s:
                    raise Unavailable(f"{self.place}: nothing was written for {silent_s:.0f} s; start `lockstep store` again")
                return
            self._closed.wait(self._looked_at + self._interval_s - now)
            self._look()

    def _reply(self, entry: Entry, shard: int, slices: tuple[int, ...], index: Index) -> FetchReply:
        """Returns what an entry has for a reader of a shard. Raises DataLoss and others of the storage."""
        whole = self._wholes[shard]
        selection = Selection(whole.layout, whole.encoding, slices or None)
        found, digests = read_entry(self._storage, entry, shard, whole)
        if isinstance(found, Patch):
            content = encode_patch(selection.of_patch(found, whole))
        else:
            content = selection.taken_from(found, whole).tobytes()
        return FetchReply(
            step=entry.step,
            newest_step=max(index.newest_step, entry.step),
            is_patch=entry.before is not None,
            num_bytes=len(content),
            content=content,
            digests=tuple(digests[[whole.place(at) for at in selection.of]].tolist()),
        )
