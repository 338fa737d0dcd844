"""A copy of one shard's weights, which steps bring forward, and what it gives to those who follow it in turn.

Parameter servers have one, relays and stores, and each reader. Knows words, steps and digests; no transport, no clock. Its owner
serialises the calls.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ps_protocol.errors import InvalidSpec, MalformedMessage, StepGone
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
# A message stays for so long after a page of it was asked for, so that a slow reader gets all of it. All of them have at most the bytes of
# so many copies.
LEASE_S = 20.0
MAX_COPIES = 2
# Of the words, so many may change in a step that a patch is made: more of them take longer to find than to send.
MOST_CHANGED = 1 / 3
_MAX_SELECTIONS = 64


class Transfer:
    """The pages of one answer on their way, from one source or several. `request` asks for the next one; `content`: the bytes of all."""

    def __init__(self, request: FetchRequest) -> None:
        self.request = request
        self.content: Array = np.empty(0, np.uint8)
        self._first: FetchReply | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all pages are there."""
        return self._first is not None and self.request.offset == self._first.num_bytes

    @property
    def first(self) -> FetchReply:
        """The first page."""
        assert self._first is not None
        return self._first

    def take(self, reply: FetchReply) -> int:
        """Takes the next page and returns its bytes. Raises MalformedMessage if it is none of this answer."""
        if self._first is None:
            try:
                self._first, self.content = reply, np.empty(reply.num_bytes, np.uint8)
            except (MemoryError, ValueError):
                raise MalformedMessage(f"an answer of {reply.num_bytes} bytes, which no memory has") from None
        start, size = self.request.offset, len(reply.content)
        if (reply.step, reply.is_patch, reply.num_bytes) != (self._first.step, self._first.is_patch, self._first.num_bytes) or (
            start + size > reply.num_bytes or not (size or start == reply.num_bytes)
        ):
            raise MalformedMessage(
                f"a page of {size} bytes at {start} of {reply.num_bytes}, step {reply.step}; want step {self._first.step}"
            )
        self.content[start : start + size] = np.frombuffer(reply.content, np.uint8)
        held_step = self.request.held_step if reply.is_patch else None  # says of the pages to come of which answer they are
        self.request = replace(self.request, step=reply.step, held_step=held_step, offset=start + size, max_wait_s=0.0)
        return size


@light_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Update:
    """What brings a copy to a step, with the digests that it must have there: a patch, or all words."""

    step: int
    digests: Array
    patch: Patch = NO_PATCH
    words: Array | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Link:
    """What leads from one step to a later one, and the digests there."""

    before: int
    step: int
    patch: Patch
    digests: Array


@light_dataclass(slots=True, kw_only=True, eq=False)
class _Message:
    """The bytes that bring readers to a step, for all of its pages and all who are given them. `num_readers`: as far as is known."""

    step: int
    digests: Array
    is_patch: bool
    content: bytes | memoryview
    num_readers: int = 0
    read_at: float = 0.0

    def page(self, offset: int, *, now: float) -> bytes:
        """Returns the page that begins there, and counts who reads on."""
        end = offset + PAGE_BYTES
        self.num_readers = max(0, self.num_readers + (offset == 0) - (end >= len(self.content)))
        self.read_at = now
        return bytes(self.content[offset:end])

    def is_read(self, now: float) -> bool:
        """Whether somebody may ask for the next page."""
        return self.num_readers > 0 and now < self.read_at + LEASE_S


class WeightCopy:
    """The words of a selection at one step; `step` None: there are none, or none that a patch is for.

    A reader brings it forward by updates, a server by `advance`. It is followed in turn: where it `keeps_patches`, by patches of its own
    bytes at most. `allocate` returns memory for the words, or raises LimitExceeded; `reserve` says whether there is room for so many bytes
    of patches and messages, without which all words are sent; `release` takes both back.
    """

    def __init__(
        self,
        selection: Selection,
        *,
        keeps_patches: bool = False,
        allocate: Callable[[int], Array] = lambda nbytes: np.zeros(nbytes, np.uint8),
        reserve: Callable[[int], bool] = lambda nbytes: True,
        release: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self.selection, self.keeps_patches = selection, keeps_patches
        self.step: int | None = None
        self.words: Array = np.empty(0, np.uint16)
        self.digests: Array = np.empty(0, np.uint64)
        self._allocate, self._reserve, self._release = allocate, reserve, release
        self._nbytes = selection.num_words * WORD_BYTES
        self._links: list[_Link] = []
        # By the step that a reader holds (None: all words are sent), the step that it gets, and its slices; in the order of their making.
        self._messages: dict[tuple[int | None, int, tuple[int, ...]], _Message] = {}
        self._selections: dict[tuple[int, ...], Selection] = {}

    # How it is brought forward

    def advance(self, step: int, blocks: Iterator[tuple[int, Array]], *, now: float) -> None:
        """Makes it the copy of a later step, whose words come in blocks, in order, each with the position of its first.

        What `blocks` raises is raised again; the copy is then what it was, or has no step where most words had changed.
        """
        if not self.words.size:
            self.words = self._allocate(self._nbytes).view(np.uint16)
        most = int(self.words.size * MOST_CHANGED) if self.words.size <= MAX_WORDS else 0
        parts: list[Patch] = []
        num_changed = 0 if self.step is not None else self.words.size
        try:
            for start, block in blocks:
                if num_changed > most:
                    self.words[start : start + block.size] = block
                else:
                    parts.append(overwrite(self.words, block, start))
                    num_changed += parts[-1].positions.size
        except BaseException:
            if num_changed > most:
                self.step = None
            else:
                joined(parts).undo(self.words)
            raise
        self._arrive(step, self.selection.digests(self.words), joined(parts) if num_changed <= most else None, now)

    def understood(self, received: Transfer) -> Update:
        """Returns the update that was received. Raises MalformedMessage if it is not for this selection."""
        reply, selection = received.first, self.selection
        digests = np.array(reply.digests, np.uint64)
        if digests.size != len(selection.of):
            raise MalformedMessage(f"{digests.size} digests for {len(selection.of)} slices")
        if reply.is_patch:
            if self.step is None:
                raise MalformedMessage(f"a patch to step {reply.step}, where no step is held")
            patch = decode_patch(received.content.data, num_words=selection.num_words)
            return Update(step=reply.step, digests=digests, patch=patch)
        if reply.num_bytes != selection.num_words * WORD_BYTES:
            raise MalformedMessage(f"{reply.num_bytes} bytes of weights for {selection.num_words} words")
        return Update(step=reply.step, digests=digests, words=received.content.view(np.uint16))

    def put(self, update: Update) -> tuple[int, ...]:
        """Changes words as an update says; returns the places of slices that are not right then. Either `keep` or `undo` must follow."""
        words = self.words if update.words is None else update.words
        update.patch.apply(words)
        # Of all words, so that one that was damaged earlier is noticed, too.
        return tuple(np.flatnonzero(self.selection.digests(words) != update.digests).tolist())

    def undo(self, update: Update) -> None:
        """Makes the words what they were before an update was put."""
        update.patch.undo(self.words)

    def keep(self, update: Update, *, now: float = 0.0) -> None:
        """Makes it the copy of the step of an update that was put."""
        if update.words is not None:
            self.words = update.words
        self._arrive(update.step, update.digests, update.patch if update.words is None else None, now)

    def mended(self, update: Update, places: Sequence[int], received: Transfer) -> Update:
        """Returns an update with slices that were wrong as they were fetched whole. Raises MalformedMessage if these are others."""
        sizes = [int(self.selection.sizes[place]) for place in places]
        if received.first.is_patch or received.first.step != update.step or received.first.num_bytes != WORD_BYTES * sum(sizes):
            raise MalformedMessage(f"{received.first.num_bytes} bytes of step {received.first.step} for {len(places)} wrong slices")
        words = self.words.copy() if update.words is None else update.words
        update.patch.apply(words)
        for place, part in zip(places, np.split(received.content.view(np.uint16), np.cumsum(sizes)[:-1]), strict=True):
            self.selection.words_of(words, place)[:] = part
        return Update(step=update.step, digests=update.digests, words=words)

    def forget(self) -> None:
        """Holds nothing any more, so that all of it is fetched again. `words` stay: a program may still be shown them."""
        self.step = None
        self._drop_links(len(self._links))
        self._drop_messages(self._messages)

    def close(self) -> None:
        """Gives all memory back; the owner must not use it again."""
        self.forget()
        self._release(self.words.nbytes)
        self.words = self.words[:0]

    def _arrive(self, step: int, digests: Array, patch: Patch | None, now: float) -> None:
        """Takes note of what led to the step that the words are of now; None: more than a patch."""
        self._drop_messages([key for key, message in self._messages.items() if not message.is_read(now)])
        if patch is None or self.step is None or not self.keeps_patches:
            self._drop_links(len(self._links))
        elif self.step != step:
            while self._links and sum(link.patch.nbytes for link in self._links) + patch.nbytes > self._nbytes:
                self._drop_links(1)
            if self._reserve(patch.nbytes):
                self._links.append(_Link(before=self.step, step=step, patch=patch, digests=digests))
            else:
                self._drop_links(len(self._links))
        self.step, self.digests = step, digests

    def _drop_links(self, count: int) -> None:
        for link in self._links[:count]:
            self._release(link.patch.nbytes)
        del self._links[:count]

    def _drop_messages(self, keys: Iterable[tuple[int | None, int, tuple[int, ...]]]) -> None:
        for key in [*keys]:
            self._release(len(self._messages.pop(key).content))

    # What it gives to those who follow it

    def answer(self, request: FetchRequest, *, newest_step: int, now: float) -> FetchReply:
        """Returns a page of what brings a reader to a step; `newest_step`: of the shard. Raises StepGone, InvalidSpec."""
        if request.encoding is not self.selection.encoding:
            raise InvalidSpec(f"encoding {request.encoding.name}: only {self.selection.encoding.name} is kept here")
        selection = self._selected(request.slices)
        message = self._message_for(request, selection, now)
        if message is None:
            later = newest_step if self.step is None else self.step
            raise StepGone(f"step {request.step}: followers get step {later} now", facts={"step": str(later)})
        if request.offset > len(message.content):
            raise InvalidSpec(f"offset {request.offset}: there are {len(message.content)} bytes")
        places = [self.selection.place(index) for index in selection.of]
        return FetchReply(
            step=message.step,
            newest_step=newest_step,
            is_patch=message.is_patch,
            num_bytes=len(message.content),
            content=message.page(request.offset, now=now),
            digests=tuple(message.digests[places].tolist()) if request.offset == 0 else (),
        )

    def patch_since(self, before: int | None, step: int | None = None) -> tuple[Patch, Array] | None:
        """Returns what leads from one step to another (None: to the one that is here), and the digests there; None: all words are less."""
        step = self.step if step is None else step
        if before is not None and before == step == self.step:
            return NO_PATCH, self.digests
        firsts = [place for place, link in enumerate(self._links) if link.before == before]
        lasts = [place for place, link in enumerate(self._links) if link.step == step]
        if not firsts or not lasts:
            return None
        patches = [link.patch for link in self._links[firsts[0] : lasts[0] + 1]]
        if sum(patch.positions.size for patch in patches) > self.selection.num_words * MOST_CHANGED:
            return None
        return merged(patches), self._links[lasts[0]].digests

    def _message_for(self, request: FetchRequest, selection: Selection, now: float) -> _Message | None:
        """Returns what a page is asked of; None: it is not there any more."""
        step = self.step if request.step is None else request.step
        if step is None:
            return None
        key = request.held_step, step, request.slices
        if key in self._messages:
            return self._messages[key]
        if request.held_step is not None:
            if request.offset:
                return None  # the rest of a patch that is let go
            found = self.patch_since(request.held_step, step)
            if found is not None:
                content = encode_patch(selection.of_patch(found[0], self.selection))
                message = _Message(step=step, digests=found[1], is_patch=True, content=content)
                if self._has_room(len(content), now):
                    self._messages[key] = message
                    return message
                if len(content) <= PAGE_BYTES:
                    return message
        return self._whole_for(step, request, selection, now)

    def _whole_for(self, step: int, request: FetchRequest, selection: Selection, now: float) -> _Message | None:
        key = None, step, request.slices
        if key in self._messages or step != self.step:
            return self._messages.get(key)
        words, content = selection.taken_from(self.words, self.selection), None
        if words.nbytes > PAGE_BYTES and request.offset == 0:
            # The words will change before a slow reader has all pages. Who finds no room shares what others read, if that is news.
            if self._has_room(words.nbytes, now):
                content = words.tobytes()
            elif request.step is None:
                for (held_step, at, slices), message in reversed(self._messages.items()):
                    if held_step is None and slices == request.slices and at >= request.least:
                        return message
        message = _Message(step=step, digests=self.digests, is_patch=False, content=content or words.view(np.uint8).data)
        if content is not None:
            self._messages[key] = message
        return message

    def _has_room(self, nbytes: int, now: float) -> bool:
        """Whether a message of so many bytes may be kept, which then are reserved."""
        most = MAX_COPIES * self._nbytes - nbytes
        if sum(len(message.content) for message in self._messages.values()) > most:
            self._drop_messages([key for key, message in self._messages.items() if not message.is_read(now)])
        return sum(len(message.content) for message in self._messages.values()) <= most and self._reserve(nbytes)

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
