"""A reader's copy of one shard's weights, which is proved at each step. Knows words and digests; no transport."""

from collections.abc import Sequence
from dataclasses import field, replace

import numpy as np

from ps_protocol.errors import MalformedMessage
from ps_protocol.model.checksums import checksum
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.weights import FetchReply, FetchRequest, KeptWeights
from ps_protocol.weights.words import NO_PATCH, WORD_BYTES, Patch, Selection, decode_patch


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
    """What brings a copy to a step, with the digests that it must have there: a patch, or all words.

    `mended`: slices that were fetched whole, by place. `before`: what the copy had in the place of all this, once it is put.
    """

    step: int
    proof: Array
    patch: Patch | None = None
    words: Array | None = None
    mended: dict[int, Array] = field(default_factory=dict)
    before: "tuple[int | None, Array, Array, Array, dict[int, Array]] | None" = None


class WeightCopy:
    """The words of a selection at one step; `step` None: there are none, or none that a patch is for. For one thread at a time."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.step: int | None = None
        self.words: Array = np.empty(0, np.uint16)
        self.digests: Array = np.empty(0, np.uint64)

    def understood(self, received: Transfer) -> Update:
        """Returns the update that was received. Raises MalformedMessage if it is not for this selection."""
        reply, selection = received.first, self.selection
        proof = np.array(reply.digests, np.uint64)
        if proof.size != len(selection.of):
            raise MalformedMessage(f"{proof.size} digests for {len(selection.of)} slices")
        if reply.is_patch:
            patch = decode_patch(received.content.data, num_words=selection.num_words)
            return Update(step=reply.step, proof=proof, patch=patch)
        if reply.num_bytes != selection.num_words * WORD_BYTES:
            raise MalformedMessage(f"{reply.num_bytes} bytes of weights for {selection.num_words} words")
        return Update(step=reply.step, proof=proof, words=received.content.view(np.uint16))

    def put(self, update: Update) -> tuple[int, ...]:
        """Brings the copy to the update's step; returns the places of slices that are not right there: then `undo` must follow."""
        former = self.step, self.words, self.digests
        if update.words is not None:
            self.words = update.words
        changed = update.patch if update.patch is not None else NO_PATCH
        values = self.words[changed.positions]
        self.words[changed.positions] = changed.values
        slices = {place: self.selection.words_of(self.words, place).copy() for place in update.mended}
        for place, words in update.mended.items():
            self.selection.words_of(self.words, place)[:] = words
        update.before = (*former, values, slices)
        # Of all words, so that one that was damaged earlier is noticed, too.
        self.step, self.digests = update.step, self.selection.digests(self.words)
        return tuple(np.flatnonzero(self.digests != update.proof).tolist())

    def undo(self, update: Update) -> None:
        """Makes the copy what it was before an update was put."""
        assert update.before is not None
        step, words, digests, values, slices = update.before
        for place, content in slices.items():
            self.selection.words_of(self.words, place)[:] = content
        if update.patch is not None:
            self.words[update.patch.positions] = values
        self.step, self.words, self.digests = step, words, digests

    def mend(self, update: Update, places: Sequence[int], received: Transfer) -> None:
        """Gives an update slices that were wrong, fetched whole. Raises MalformedMessage if they are wrong again."""
        sizes = [int(self.selection.sizes[place]) for place in places]
        if received.first.is_patch or received.first.step != update.step or received.first.num_bytes != WORD_BYTES * sum(sizes):
            raise MalformedMessage(f"{received.first.num_bytes} bytes of step {received.first.step} for {len(places)} wrong slices")
        words = received.content.view(np.uint16)
        for place, part in zip(places, np.split(words, np.cumsum(sizes)[:-1]), strict=True):
            if checksum([part]) != int(update.proof[place]):
                raise MalformedMessage(f"weights of step {update.step}: a slice differs from its digest, also fetched whole")
            update.mended[place] = part

    def forget(self) -> None:
        """Holds nothing any more, so that all of it is fetched again. `words` stay: a program may still be shown them."""
        self.step = None


def kept_of(copies: Sequence[WeightCopy]) -> KeptWeights:
    """Returns what the copies of all shards have of the variables."""
    selections = [copy.selection for copy in copies]
    return KeptWeights(encoding=selections[0].encoding, has_tables=any(one.tables for one in selections))


def changed_places(copy: WeightCopy, shown: Array | None) -> Sequence[int]:
    """Returns the places of slices whose words have changed since a copy had the digests `shown` (None: all of them)."""
    if shown is None or shown.size != copy.digests.size:
        return range(len(copy.selection.of))
    return [int(place) for place in np.flatnonzero(copy.digests != shown)]
