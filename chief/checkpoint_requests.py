"""Who wants a checkpoint, and which one fulfils the wish. Knows calls and tags; no step, shard or clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from chief.deadlines import Deadlines
from chief.events import Instruction, Refuse, Reply
from ps_protocol.chief import SavedCheckpoint
from ps_protocol.errors import LimitExceeded, PsError

# Wishes that are fulfilled and remembered, so that a repeated one has its effect once; and those that wait.
_MAX_REMEMBERED = 64
_MAX_WAITING = 1024


@dataclass(slots=True, kw_only=True)
class _Request:
    """A wish for a checkpoint, and which one fulfils it (empty: the next)."""

    calls: list[int] = field(default_factory=list)
    tag: str = ""


class CheckpointRequests:
    """Wishes by the number that their callers have given them; each may come again, in several calls."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._requests: dict[int, _Request] = {}
        self._fulfilled: dict[int, SavedCheckpoint] = {}

    def fulfilled(self, request: int) -> SavedCheckpoint | None:
        """Returns what a wish came to that is fulfilled already."""
        return self._fulfilled.get(request)

    def add(self, request: int, call: int | None, *, tag: str, until: float) -> bool:
        """Takes a wish in, to be fulfilled by `tag` (empty: by the next); True if it waits for the next. Raises LimitExceeded."""
        if request not in self._requests and len(self._requests) >= _MAX_WAITING:
            raise LimitExceeded(f"{_MAX_WAITING} wishes for a checkpoint wait already; wait for one of them")
        wish = self._requests.setdefault(request, _Request())
        wish.tag = wish.tag or tag
        if call is not None:
            wish.calls.append(call)
            self._deadlines.set(("save", call), until)
        return not wish.tag

    def cancel(self, call: int) -> bool:
        """Forgets a caller; False if it does not wait here."""
        self._deadlines.clear(("save", call))
        for wish in self._requests.values():
            if call in wish.calls:
                wish.calls.remove(call)
                return True
        return False

    @property
    def wait_for_next(self) -> bool:
        """Whether some wish is to be fulfilled by a checkpoint that is not begun."""
        return any(not wish.tag for wish in self._requests.values())

    def bind(self, tag: str) -> None:
        """A checkpoint is begun: it fulfils what waits for one."""
        for wish in self._requests.values():
            wish.tag = wish.tag or tag

    def release(self) -> None:
        """What was begun comes to nothing: all wait for the next one."""
        for wish in self._requests.values():
            wish.tag = ""

    def fulfil(self, saved: SavedCheckpoint, *, tag: str) -> list[Instruction]:
        """A checkpoint is whole: answers who was to get `tag`."""
        instructions: list[Instruction] = []
        for request in self._of(tag):
            self._fulfilled[request] = saved
            if len(self._fulfilled) > _MAX_REMEMBERED:
                del self._fulfilled[next(iter(self._fulfilled))]
            instructions += [Reply(call=call, value=saved) for call in self._take_calls(request)]
        return instructions

    def refuse(self, error: PsError, *, tag: str | None = None) -> list[Instruction]:
        """There will be none, of this tag or (None) at all."""
        requests = [*self._requests] if tag is None else self._of(tag)
        return [Refuse(call=call, error=error) for request in requests for call in self._take_calls(request)]

    def _of(self, tag: str) -> Sequence[int]:
        return [request for request, wish in self._requests.items() if wish.tag == tag]

    def _take_calls(self, request: int) -> list[int]:
        calls = self._requests.pop(request).calls
        for call in calls:
            self._deadlines.clear(("save", call))
        return calls
