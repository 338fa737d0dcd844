"""A reader's copy of one shard's weights: what was received is proved before it is put in place. Knows words and digests; no transport."""

from collections.abc import Sequence
from dataclasses import field, replace

import numpy as np

from ps_protocol.errors import MalformedMessage
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.weights.words import Patch, Selection, decode_patch


class Transfer:
    """The pages of one answer on their way, from one source or several. `request` asks for the next one."""

    def __init__(self, request: FetchRequest) -> None:
        self.request = request
        self._first: FetchReply | None = None
        self._content: Array | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all pages are there."""
        return self._first is not None and self.request.offset == self._first.num_bytes

    @property
    def first(self) -> FetchReply:
        """The first page."""
        assert self._first is not None
        return self._first

    @property
    def content(self) -> Array:
        """All bytes."""
        assert self._content is not None
        return self._content

    def take(self, reply: FetchReply) -> int:
        """Takes the next page and returns its bytes. Raises MalformedMessage if it is none of this answer."""
        if self._first is None:
            self._first, self._content = reply, np.empty(reply.num_bytes, np.uint8)
        assert self._content is not None
        start, size = self.request.offset, len(reply.content)
        if (reply.step, reply.is_patch, reply.num_bytes) != (self._first.step, self._first.is_patch, self._first.num_bytes) or (
            start + size > reply.num_bytes or not (size or start == reply.num_bytes)
        ):
            raise MalformedMessage(
                f"a page of {size} bytes at {start} of {reply.num_bytes}, step {reply.step}; want step {self._first.step}"
            )
        self._content[start : start + size] = np.frombuffer(reply.content, np.uint8)
        self.request = replace(self.request, step=reply.step, offset=start + size, max_wait_s=0.0)
        return size


@light_dataclass(slots=True, kw_only=True, eq=False)
class Update:
    """What brings a copy to a step. `wrong`: places of slices that would differ from the source's, to be fetched whole."""

    step: int
    digests: Array
    wrong: tuple[int, ...]
    patch: Patch | None = None
    words: Array | None = None
    mended: dict[int, Array] = field(default_factory=dict)


class WeightCopy:
    """The words of a selection at one step; `step` None: there are none yet. For one thread at a time."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.step: int | None = None
        self.words: Array = np.empty(0, np.uint16)
        self.digests: Array = np.empty(0, np.uint64)

    def prepare(self, received: Transfer) -> Update:
        """Returns the update that was received, proved by its digests; the copy stays as it is. Raises MalformedMessage."""
        reply, selection = received.first, self.selection
        proof = np.array(reply.digests, np.uint64)
        if proof.size != len(selection.of):
            raise MalformedMessage(f"{proof.size} digests for {len(selection.of)} slices")
        if not reply.is_patch:
            words = received.content.view(np.uint16) if received.content.size % 2 == 0 else self.words[:0]
            if words.size != selection.num_words:
                raise MalformedMessage(f"{reply.num_bytes} bytes of weights for {selection.num_words} words")
            digests = selection.digests(words)
            return Update(step=reply.step, digests=digests, wrong=_wrong(digests, proof), words=words)
        patch = decode_patch(received.content.data, num_words=selection.num_words)
        # Of the words that are there, so that one that was damaged since is noticed, too.
        digests = selection.digests(self.words)
        selection.add_changes(digests, patch.positions, self.words[patch.positions], patch.values)
        return Update(step=reply.step, digests=digests, wrong=_wrong(digests, proof), patch=patch)

    def mend(self, update: Update, received: Transfer) -> None:
        """Gives an update the wrong slices, fetched whole. Raises MalformedMessage if they are wrong again."""
        selection, at = self.selection, 0
        words = received.content[: received.content.size // 2 * 2].view(np.uint16)
        proof = received.first.digests
        for place, digest in zip(update.wrong, proof, strict=False):
            size = int(selection.sizes[place])
            part = words[at : at + size]
            at += size
            if part.size == size and selection.digest(part) == digest:
                update.mended[place] = part
                update.digests[place] = digest
        missing = [place for place in update.wrong if place not in update.mended]
        if missing or received.first.is_patch or at != words.size:
            raise MalformedMessage(f"weights of step {update.step}: {len(missing)} slices differ from their digests, also fetched whole")
        update.wrong = ()

    def put(self, update: Update) -> None:
        """Brings the copy to the update's step, which has nothing wrong."""
        assert not update.wrong
        if update.words is not None:
            self.words = update.words
        elif update.patch is not None:
            self.words[update.patch.positions] = update.patch.values
        for place, words in update.mended.items():
            self.selection.words_of(self.words, place)[:] = words
        self.step, self.digests = update.step, update.digests

    def forget(self) -> None:
        """Holds nothing any more, so that all of it is fetched again; `words` stay for whoever shows them still."""
        self.step = None


def _wrong(digests: Array, proof: Array) -> tuple[int, ...]:
    return tuple(np.flatnonzero(digests != proof).tolist())


def changed_places(copy: WeightCopy, shown: Array | None) -> Sequence[int]:
    """Returns the places of slices whose words have changed since a copy had the digests `shown` (None: all of them)."""
    if shown is None or shown.size != copy.digests.size:
        return range(len(copy.selection.of))
    return [int(place) for place in np.flatnonzero(copy.digests != shown)]
