"""A copy of one shard's weights, which steps bring forward, and what it gives to those who follow it in turn.

Parameter servers have one, relays and stores, and each reader. Knows words, steps and digests; no transport, no clock. Its owner
serialises the calls.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ps_protocol.errors import InvalidSpec, LimitExceeded, MalformedMessage, StepGone
from ps_protocol.model.checksums import checksum
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.weights import FetchReply, FetchRequest, KeptWeights
from ps_protocol.weights.words import (
    MAX_WORDS,
    NO_PATCH,
    WORD_BYTES,
    Patch,
    Selection,
    decode_patch,
    encode_patch,
    joined,
    merged,
    overwrite,
)

# One answer carries so many bytes of a patch, or of a whole copy, at most.
PAGE_BYTES = 4 << 20
# A whole copy stays the same for so long after a page of it was asked for, so that a slow reader gets all of it; but so many at most.
WHOLE_LEASE_S = 20.0
MAX_LEASED = 2
# Newcomers are sent to a copy for so long after it was put aside: else they would keep it for ever, one after the other.
_JOIN_S = 2.0
# Of the words, so many may change in a step that a patch is made: more of them take longer to find than to send.
MOST_CHANGED = 1 / 3
_MAX_SELECTIONS = 64


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
            try:
                self._first, self._content = reply, np.empty(reply.num_bytes, np.uint8)
            except (MemoryError, ValueError):
                raise MalformedMessage(f"an answer of {reply.num_bytes} bytes, which no memory has") from None
        assert self._content is not None
        start, size = self.request.offset, len(reply.content)
        if (reply.step, reply.is_patch, reply.num_bytes) != (self._first.step, self._first.is_patch, self._first.num_bytes) or (
            start + size > reply.num_bytes or not (size or start == reply.num_bytes)
        ):
            raise MalformedMessage(
                f"a page of {size} bytes at {start} of {reply.num_bytes}, step {reply.step}; want step {self._first.step}"
            )
        self._content[start : start + size] = np.frombuffer(reply.content, np.uint8)
        held_step = self.request.held_step if reply.is_patch else None  # says of the pages to come of which answer they are
        self.request = replace(self.request, step=reply.step, held_step=held_step, offset=start + size, max_wait_s=0.0)
        return size


@light_dataclass(slots=True, kw_only=True, eq=False)
class Update:
    """What brings a copy to a step, with the digests that it must have there: a patch, or all words.

    `before`: what the copy had in the place of all this, once it is put.
    """

    step: int
    proof: Array
    patch: Patch = NO_PATCH
    words: Array | None = None
    before: "tuple[int | None, Array, Array, list[_Link]] | None" = None


@light_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Link:
    """What leads from one step to a later one, and the digests there."""

    before: int
    step: int
    patch: Patch
    digests: Array


@light_dataclass(slots=True, kw_only=True, eq=False)
class _Whole:
    """All words at a step, for those who fetch them. `num_readers`: as far as is known; until `leased_until` they stay for these."""

    step: int
    words: Array
    digests: Array
    num_readers: int = 0
    leased_until: float = 0.0
    joined_until: float = 0.0

    def count_reader(self, *, is_first: bool, is_last: bool, now: float) -> None:
        """Counts a page of it that is given out."""
        self.num_readers = max(0, self.num_readers + is_first - is_last)
        self.leased_until = now + WHOLE_LEASE_S if self.num_readers else now


class WeightCopy:
    """The words of a selection at one step; `step` None: there are none, or none that a patch is for.

    A reader brings it forward by `put`, a server by `advance`. `keeps_patches`: it is followed in turn, and keeps patches of its own bytes
    at most. `allocate` returns memory for so many bytes, or raises LimitExceeded; `release` takes it back. Whole copies are put aside for
    slow readers, two at most.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        keeps_patches: bool = False,
        allocate: Callable[[int], Array] = lambda nbytes: np.zeros(nbytes, np.uint8),
        release: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self.selection, self.keeps_patches = selection, keeps_patches
        self.step: int | None = None
        self.words: Array = np.empty(0, np.uint16)
        self.digests: Array = np.empty(0, np.uint64)
        self._allocate, self._release = allocate, release
        self._nbytes = selection.num_words * WORD_BYTES
        self._links: list[_Link] = []
        self._was_broken_off = False
        # Who fetches all words, of the step that is here and of those before.
        self._whole: _Whole | None = None
        self._aside: list[_Whole] = []
        self._selections: dict[tuple[int, ...], Selection] = {}
        self._messages: OrderedDict[tuple[int | None, int, tuple[int, ...]], bytes] = OrderedDict()

    # How it is brought forward

    def advance(self, step: int, blocks: Iterator[tuple[int, Array]], *, now: float) -> None:
        """Makes it the copy of a later step, whose words come in blocks, in order, each with the position of its first.

        What `blocks` raises is raised again; the copy is then what it was. Where most words had changed, or it is the second time in a row,
        it has no step, and the next is copied without a comparison, which takes half as long. Copies put aside stay.
        """
        if not self.words.size:
            self.words = self._allocate(self._nbytes).view(np.uint16)
        self._put_aside(now)
        before, most = self.step, int(self.words.size * MOST_CHANGED) if self.words.size <= MAX_WORDS else 0
        parts: list[Patch] = []
        num_changed = 0 if before is not None else self.words.size
        try:
            for start, block in blocks:
                if num_changed > most:
                    self.words[start : start + block.size] = block
                else:
                    parts.append(overwrite(self.words, block, start))
                    num_changed += parts[-1].positions.size
        except BaseException:
            if num_changed > most or self._was_broken_off:
                self.step = None
                self._links.clear()
            else:
                joined(parts).undo(self.words)
            self._was_broken_off = True
            raise
        self._was_broken_off = False
        self._arrive(step, self.selection.digests(self.words), joined(parts) if num_changed <= most else None)

    def understood(self, received: Transfer) -> Update:
        """Returns the update that was received. Raises MalformedMessage if it is not for this selection."""
        reply, selection = received.first, self.selection
        proof = np.array(reply.digests, np.uint64)
        if proof.size != len(selection.of):
            raise MalformedMessage(f"{proof.size} digests for {len(selection.of)} slices")
        if reply.is_patch:
            if self.step is None:
                raise MalformedMessage(f"a patch to step {reply.step}, where no step is held")
            patch = decode_patch(received.content.data, num_words=selection.num_words)
            return Update(step=reply.step, proof=proof, patch=patch)
        if reply.num_bytes != selection.num_words * WORD_BYTES:
            raise MalformedMessage(f"{reply.num_bytes} bytes of weights for {selection.num_words} words")
        return Update(step=reply.step, proof=proof, words=received.content.view(np.uint16))

    def put(self, update: Update, *, now: float = 0.0) -> tuple[int, ...]:
        """Brings the copy to the update's step; returns the places of slices that are not right there: then `undo` must follow."""
        self._put_aside(now)
        update.before = self.step, self.words, self.digests, [*self._links]
        if update.words is not None:
            self.words = update.words
        update.patch.apply(self.words)
        # Of all words, so that one that was damaged earlier is noticed, too.
        self._arrive(update.step, self.selection.digests(self.words), update.patch if update.words is None else None)
        return tuple(np.flatnonzero(self.digests != update.proof).tolist())

    def undo(self, update: Update) -> None:
        """Makes the copy what it was before an update was put."""
        assert update.before is not None
        update.patch.undo(self.words)
        self.step, self.words, self.digests, self._links = update.before

    def mend(self, update: Update, places: Sequence[int], received: Transfer) -> None:
        """Gives an update slices that were wrong, fetched whole. Raises MalformedMessage if they are wrong again."""
        sizes = [int(self.selection.sizes[place]) for place in places]
        if received.first.is_patch or received.first.step != update.step or received.first.num_bytes != WORD_BYTES * sum(sizes):
            raise MalformedMessage(f"{received.first.num_bytes} bytes of step {received.first.step} for {len(places)} wrong slices")
        parts = np.split(received.content.view(np.uint16), np.cumsum(sizes)[:-1])
        for place, part in zip(places, parts, strict=True):
            if checksum([part]) != int(update.proof[place]):
                raise MalformedMessage(f"weights of step {update.step}: a slice differs from its digest, also fetched whole")
        if update.words is None:
            update.words = self.words.copy()
            update.patch.apply(update.words)
            update.patch = NO_PATCH
        for place, part in zip(places, parts, strict=True):
            self.selection.words_of(update.words, place)[:] = part

    def forget(self) -> None:
        """Holds nothing any more, so that all of it is fetched again. `words` stay: a program may still be shown them."""
        self._release(self._nbytes * len(self._aside))
        self.step = self._whole = None
        for kept in (self._links, self._aside, self._messages):
            kept.clear()

    def close(self) -> None:
        """Gives all memory back; the owner must not use it again."""
        self.forget()
        self._release(self.words.nbytes)
        self.words = self.words[:0]

    def _arrive(self, step: int, digests: Array, patch: Patch | None) -> None:
        """Takes note of what led to the step that the words are of now; None: more than a patch."""
        if patch is None or self.step is None or not self.keeps_patches:
            self._links.clear()
        elif self.step != step:
            self._links.append(_Link(before=self.step, step=step, patch=patch, digests=digests))
            while sum(link.patch.nbytes for link in self._links) > self._nbytes and len(self._links) > 1:
                del self._links[0]
        self.step, self.digests = step, digests

    def _put_aside(self, now: float) -> None:
        """Copies what somebody reads all of before it changes, and lets go of the copies that nobody reads any more."""
        free = [one for one in self._aside if one.leased_until <= now]
        self._aside = [one for one in self._aside if one.leased_until > now]
        self._release(self._nbytes * len(free))
        whole, self._whole = self._whole, None
        if whole is not None and whole.leased_until > now and len(self._aside) < MAX_LEASED:
            with suppress(LimitExceeded):  # its readers begin again
                whole.words = self._allocate(self._nbytes).view(np.uint16)
                whole.words[:] = self.words
                whole.joined_until = now + _JOIN_S
                self._aside.append(whole)

    # What it gives to those who follow it

    def answer(self, request: FetchRequest, *, newest_step: int, now: float) -> FetchReply:
        """Returns a page of what brings a reader to a step; `newest_step`: of the shard. Raises StepGone, InvalidSpec."""
        if request.encoding is not self.selection.encoding:
            raise InvalidSpec(f"encoding {request.encoding.name}: only {self.selection.encoding.name} is kept here")
        selection = self._selected(request.slices)
        found = self._as_patch(request, selection)
        if found is None:
            whole = self._whole_for(request, now)
            if whole is None or (request.offset and request.held_step is not None):  # the rest of a patch that is let go
                later = newest_step if self.step is None else self.step
                raise StepGone(f"step {request.step}: followers get step {later} now", facts={"step": str(later)})
            step, digests = whole.step, whole.digests
            content = self._content_of(whole, selection)
            whole.count_reader(is_first=request.offset == 0, is_last=request.offset + PAGE_BYTES >= len(content), now=now)
        else:
            step, digests, message = found
            content = memoryview(message)
        if request.offset > len(content):
            raise InvalidSpec(f"offset {request.offset}: there are {len(content)} bytes")
        places = [self.selection.place(index) for index in selection.of]
        return FetchReply(
            step=step,
            newest_step=newest_step,
            is_patch=found is not None,
            num_bytes=len(content),
            content=bytes(content[request.offset : request.offset + PAGE_BYTES]),
            digests=tuple(digests[places].tolist()) if request.offset == 0 else (),
        )

    def patches_since(self, before: int | None, step: int | None = None) -> "tuple[list[Patch], Array] | None":
        """Returns what leads from one step to another (None: to the one that is here), and the digests there; None: it is not kept."""
        step = self.step if step is None else step
        if before is not None and before == step == self.step:
            return [], self.digests
        firsts = [place for place, link in enumerate(self._links) if link.before == before]
        lasts = [place for place, link in enumerate(self._links) if link.step == step]
        if not firsts or not lasts:
            return None
        return [link.patch for link in self._links[firsts[0] : lasts[0] + 1]], self._links[lasts[0]].digests

    def _as_patch(self, request: FetchRequest, selection: Selection) -> tuple[int, Array, bytes] | None:
        """Returns the step that a reader gets by a patch, the digests there, and the patch; None if it gets the whole."""
        step = self.step if request.step is None else request.step
        if step is None or request.held_step is None:
            return None
        key = (request.held_step, step, request.slices)
        message = self._messages.get(key)
        if message is not None and request.offset:
            return step, self.digests, message  # also where what it was made of is let go; its first page had the digests
        found = self.patches_since(request.held_step, step)
        if found is None:
            return None
        patches, digests = found
        if sum(patch.positions.size for patch in patches) > self.selection.num_words * MOST_CHANGED:
            return None
        if message is None:
            message = self._keep(key, encode_patch(selection.of_patch(merged(patches), self.selection)))
        return step, digests, message

    def _whole_for(self, request: FetchRequest, now: float) -> _Whole | None:
        if self._whole is None and self.step is not None:
            self._whole = _Whole(step=self.step, words=self.words, digests=self.digests)
        if request.step is None and self._whole is not None:
            # Where no more copies are put aside, those who are slow share the last one, while that is young and new to them.
            last = self._aside[-1] if len(self._aside) == MAX_LEASED else None
            is_young = last is not None and last.joined_until > now and (request.held_step is None or last.step > request.held_step)
            return last if last is not None and is_young else self._whole
        return next((one for one in (self._whole, *self._aside) if one is not None and one.step == request.step), None)

    def _content_of(self, whole: _Whole, selection: Selection) -> memoryview:
        if selection.of == self.selection.of:
            return whole.words.view(np.uint8).data
        key = (None, whole.step, selection.of)
        return memoryview(self._messages.get(key) or self._keep(key, selection.taken_from(whole.words, self.selection).tobytes()))

    def _keep(self, key: tuple[int | None, int, tuple[int, ...]], message: bytes) -> bytes:
        """Keeps a message for its other pages and other readers; the bytes of all but one have at most those of a copy."""
        self._messages[key] = message
        while len(self._messages) > 1 and sum(map(len, self._messages.values())) > self._nbytes:
            self._messages.popitem(last=False)
        return message

    def _selected(self, slices: tuple[int, ...]) -> Selection:
        found = self._selections.get(slices)
        if found is None:
            if len(self._selections) >= _MAX_SELECTIONS:
                self._selections.clear()
            found = Selection(self.selection.layout, self.selection.encoding, slices or None)
            if not set(found.of) <= set(self.selection.of):
                raise InvalidSpec(f"slices {found.of}: only {self.selection.of} are kept here")
            self._selections[slices] = found
        return found


def kept_of(copies: Sequence[WeightCopy]) -> KeptWeights:
    """Returns what the copies of all shards have of the variables."""
    selections = [copy.selection for copy in copies]
    return KeptWeights(encoding=selections[0].encoding, has_tables=any(one.tables for one in selections))


def changed_places(copy: WeightCopy, shown: Array | None) -> Sequence[int]:
    """Returns the places of slices whose words have changed since a copy had the digests `shown` (None: all of them)."""
    if shown is None or shown.size != copy.digests.size:
        return range(len(copy.selection.of))
    return [int(place) for place in np.flatnonzero(copy.digests != shown)]
