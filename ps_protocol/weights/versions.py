"""The newest copies of one shard's weights in one encoding, and the patches that lead from one to the next.

Knows steps; no message, no clock. Its owner serialises the calls.
"""

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from ps_protocol.errors import InvalidSpec, StepGone
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.weights.words import NO_PATCH, WORD_BYTES, Patch, Selection, difference, encode_patch, merged

# One answer carries so many bytes of a patch, or of a whole copy, at most.
PAGE_BYTES = 4 << 20
# A whole copy stays the same for so long after a page of it was asked for, so that a slow reader gets all of it; but so many at most.
WHOLE_LEASE_S = 20.0
MAX_LEASED = 2
# Newcomers are sent to a copy for so long after it was put aside: else they would keep it for ever, one after the other.
_JOIN_S = 2.0
# Of the words, so many may change in a step that a patch is made: each takes about three bytes, and two in a whole copy.
_MOST_CHANGED = 1 / 3
_MAX_SELECTIONS = 64


@light_dataclass(slots=True, kw_only=True, eq=False)
class _Copy:
    """A whole copy at a step. `num_readers`: those who fetch all of it, as far as is known; until `leased_until` it is kept for them."""

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


@light_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Link:
    """What leads from one step to a later one, and the digests there."""

    before: int
    step: int
    patch: Patch
    digests: Array


class WeightVersions:
    """Answers followers of one shard. Holds two copies, one more for each that slow readers read, and patches of a copy's bytes.

    `selection`: the slices that it has copies of; readers may want some of them. `allocate` returns memory for so many bytes, or raises
    LimitExceeded; `release` takes it back.
    """

    def __init__(self, selection: Selection, *, allocate: Callable[[int], Array], release: Callable[[int], object]) -> None:
        self.selection = selection
        self.step: int | None = None
        self._allocate, self._release = allocate, release
        self._nbytes = self.selection.num_words * WORD_BYTES
        self._newest: _Copy | None = None
        self._leased: list[_Copy] = []
        self._spare: Array | None = None
        self._links: list[_Link] = []
        self._selections: dict[tuple[int, ...], Selection] = {}
        self._messages: OrderedDict[tuple[int | None, int, tuple[int, ...]], bytes] = OrderedDict()

    def take(self, step: int, fill: Callable[[Array], object], *, now: float, digests: Array | None = None) -> None:
        """Makes a copy at a later step the newest; `fill` fills its bytes. What it or `allocate` raises changes nothing.

        `digests`: those that the bytes have where they come from; None: of what `fill` has filled in.
        """
        if self._spare is None:
            self._spare = self._allocate(self._nbytes)
        fill(self._spare)
        words, before = self._spare.view(np.uint16), self._newest
        patch = None
        if before is not None:
            patch = difference(before.words, words, max_changed=int(words.size * _MOST_CHANGED))
        if digests is None:
            digests = self.selection.digests(words)
        if before is None or patch is None:
            self._links.clear()
        else:
            self._links.append(_Link(before=before.step, step=step, patch=patch, digests=digests))
            self._forget_old_links()
        self._spare = None
        self._newest, self.step = _Copy(step=step, words=words, digests=digests), step
        self._put_aside(before, now)

    def answer(self, request: FetchRequest, *, newest_step: int, now: float) -> FetchReply:
        """Returns a page of what brings a reader to a step, after `take`; `newest_step`: of the shard. Raises StepGone, InvalidSpec."""
        if request.encoding is not self.selection.encoding:
            raise InvalidSpec(f"encoding {request.encoding.name}: only {self.selection.encoding.name} is kept here")
        selection = self._selected(request.slices)
        found = self._as_patch(request, selection)
        if found is None:
            copy = self._whole(request, now)
            step, digests = copy.step, copy.digests
            content = self._whole_of(copy, selection)
            copy.count_reader(is_first=request.offset == 0, is_last=request.offset + PAGE_BYTES >= len(content), now=now)
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

    def close(self) -> None:
        """Gives all memory back; the owner must not use it again."""
        for copy in (self._newest, *self._leased):
            if copy is not None:
                self._release(self._nbytes)
        if self._spare is not None:
            self._release(self._nbytes)
        self._newest, self._spare, self.step = None, None, None
        self._leased.clear()
        self._links.clear()
        self._messages.clear()

    def _put_aside(self, before: _Copy | None, now: float) -> None:
        """Keeps the copy before the newest if somebody reads all of it, and lets go of those that nobody reads any more."""
        free = [copy.words for copy in self._leased if copy.leased_until <= now]
        self._leased = [copy for copy in self._leased if copy.leased_until > now]
        if before is not None and before.leased_until > now and len(self._leased) < MAX_LEASED:
            before.joined_until = now + _JOIN_S
            self._leased.append(before)
        elif before is not None:
            free.append(before.words)
        for words in free:
            if self._spare is None:
                self._spare = words.view(np.uint8)
            else:
                self._release(self._nbytes)

    def _forget_old_links(self) -> None:
        while sum(link.patch.nbytes for link in self._links) > self._nbytes and len(self._links) > 1:
            del self._links[0]

    def _as_patch(self, request: FetchRequest, selection: Selection) -> tuple[int, Array, bytes] | None:
        """Returns the step that a reader gets by a patch, the digests there, and the patch; None if it gets the whole."""
        newest = self._newest
        if newest is None or request.held_step is None:
            return None
        step = newest.step if request.step is None else request.step
        firsts = [place for place, link in enumerate(self._links) if link.before == request.held_step]
        lasts = [place for place, link in enumerate(self._links) if link.step == step]
        if request.held_step == step == newest.step:
            links, digests = [], newest.digests
        elif not firsts or not lasts:
            return None
        else:
            links, digests = self._links[firsts[0] : lasts[0] + 1], self._links[lasts[0]].digests
        if sum(link.patch.positions.size for link in links) > self.selection.num_words * _MOST_CHANGED:
            return None
        key = (request.held_step, step, request.slices)
        message = self._messages.get(key)
        if message is None:
            patch = selection.of_patch(merged([link.patch for link in links]) if links else NO_PATCH, self.selection)
            words = newest.words if step == newest.step and selection.of == self.selection.of else None
            message = self._keep(key, encode_patch(patch, num_words=selection.num_words, words=words))
        return step, digests, message

    def _whole(self, request: FetchRequest, now: float) -> _Copy:
        newest = self._newest
        assert newest is not None
        if request.step is None:
            # Where no more copies are put aside, those who are slow share the last one, while that is young and new to them.
            last = self._leased[-1] if len(self._leased) == MAX_LEASED else None
            is_young = last is not None and last.joined_until > now and (request.held_step is None or last.step > request.held_step)
            return last if last is not None and is_young else newest
        for copy in (newest, *self._leased):
            if copy.step == request.step:
                return copy
        raise StepGone(f"step {request.step}: followers get step {newest.step} now", facts={"step": str(newest.step)})

    def _whole_of(self, copy: _Copy, selection: Selection) -> memoryview:
        if selection.of == self.selection.of:
            return copy.words.view(np.uint8).data
        key = (None, copy.step, selection.of)
        return memoryview(self._messages.get(key) or self._keep(key, selection.taken_from(copy.words, self.selection).tobytes()))

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
