"""The calls that block, who wants a checkpoint, and which deadline is due when. Knows whose call it is; decides nothing, reads no clock."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from chief.core.messages import Instruction, Refuse, RegisterWorker, Reply
from ps_protocol.errors import LimitExceeded, PsError
from ps_protocol.model.data import DataSpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.roles.chief import MAX_WAIT_SLICE_S, CommitResult, Participant, SavedCheckpoint
from ps_protocol.roles.shard import PushId

# Which key is due when, for keys whose deadline is moved far more often than it passes. Knows numbers; reads no clock.
#
# Moving a deadline later costs one dictionary store: the heap keeps an entry at the earlier time and looks again when that comes.
# So the heap holds few entries a key, however often a lease is renewed or a call blocks and is answered.


Key = tuple[str, int]


class Deadlines:
    """Deadlines by key. `next()` may be earlier than the earliest deadline, never later."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._armed: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []

    def set(self, key: Key, when: float) -> None:
        """Sets or moves the deadline of `key`."""
        self._due[key] = when
        if when < self._armed.get(key, float("inf")):
            self._arm(key, when)

    def clear(self, key: Key) -> None:
        """Forgets the deadline of `key`, if it has one."""
        self._due.pop(key, None)

    def next(self) -> float | None:
        """Returns when to call `pop_due` at the latest; None: never."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[Key]:
        """Takes out the keys whose deadline has come, the earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            when, key = heapq.heappop(self._heap)
            if self._armed.get(key) != when:
                continue  # a later entry of a key that was since armed earlier
            del self._armed[key]
            actual = self._due.get(key)
            if actual is None:
                continue
            if actual <= now:
                del self._due[key]
                due.append(key)
            else:
                self._arm(key, actual)
        return due

    def _arm(self, key: Key, when: float) -> None:
        self._armed[key] = when
        heapq.heappush(self._heap, (when, key))


# The callers that block: on a token, on the model, on the end of training. Knows whose call it is; decides nothing.


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """A worker waits for a token, as it has asked for it; `commit` is what became of the commit of `push_id` that rode along."""

    call: int
    worker: int
    commit: CommitResult | None
    local_step: int
    request_id: int
    push_id: PushId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """Somebody waits for the model: a worker that presented `model`, or (both None) somebody who wants to know it."""

    call: int
    participant: Participant | None = None
    model: ModelSpec | None = None
    may_initialize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCall:
    """A worker waits for ranges of the training data."""

    call: int
    participant: Participant
    data: DataSpec
    max_ranges: int
    request_id: int


def slice_s(max_wait_s: float) -> float:
    """Returns how long a call may block: what it asked for, and 20 s at most."""
    return min(max_wait_s, MAX_WAIT_SLICE_S) if max_wait_s > 0 else 0.0


class WaitingCalls:
    """Blocked calls with their deadlines: at most one token call a worker, so that a repeated one takes the place of a lost one."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._token_calls: dict[int, TokenCall] = {}
        self._worker_of_call: dict[int, int] = {}
        self._model_calls: dict[int, ModelCall] = {}
        self._data_calls: dict[int, DataCall] = {}
        self._arrivals: dict[int, RegisterWorker] = {}
        self.has_arrivals = False  # asked for with every event

    @property
    def token_workers(self) -> frozenset[int]:
        """The workers that block on a token."""
        return frozenset(self._token_calls)

    def __contains__(self, worker: object) -> bool:
        return worker in self._token_calls

    def add_token_call(self, waiting: TokenCall, *, until: float) -> None:
        """Blocks a worker that does not block already."""
        self._token_calls[waiting.worker] = waiting
        self._worker_of_call[waiting.call] = waiting.worker
        self._deadlines.set(_token_key(waiting.worker), until)

    def add_model_call(self, waiting: ModelCall, *, until: float) -> None:
        """Blocks a caller until the model is there."""
        self._model_calls[waiting.call] = waiting
        self._deadlines.set(_model_key(waiting.call), until)

    def revise_commit(self, push_id: PushId, result: CommitResult) -> None:
        """Has a worker that waits told something else of the commit that rode along."""
        waiting = self._token_calls.get(push_id.worker)
        if waiting is not None and waiting.push_id == push_id and waiting.commit is not None:
            self._token_calls[push_id.worker] = replace(waiting, commit=_revised(waiting.commit, result))

    def take_token_call(self, worker: int) -> TokenCall | None:
        """Takes out the call that a worker blocks in, if it does."""
        waiting = self._token_calls.pop(worker, None)
        if waiting is not None:
            del self._worker_of_call[waiting.call]
            self._deadlines.clear(_token_key(worker))
        return waiting

    def token_calls(self) -> Iterator[TokenCall]:
        """The calls for a token at this moment, the oldest first."""
        return iter([*self._token_calls.values()])

    def take_token_calls(self) -> list[TokenCall]:
        """Takes out all calls for a token."""
        return [waiting for worker in [*self._token_calls] if (waiting := self.take_token_call(worker)) is not None]

    def take_model_call(self, call: int) -> ModelCall | None:
        """Takes out a call for the model."""
        waiting = self._model_calls.pop(call, None)
        if waiting is not None:
            self._deadlines.clear(_model_key(call))
        return waiting

    def model_calls(self) -> Iterator[ModelCall]:
        """The calls for the model at this moment, the oldest first."""
        return iter([*self._model_calls.values()])

    def add_data_call(self, waiting: DataCall, *, until: float) -> None:
        """Blocks a worker until there are ranges."""
        self._data_calls[waiting.call] = waiting
        self._deadlines.set(_data_key(waiting.call), until)

    def take_data_call(self, call: int) -> DataCall | None:
        """Takes out a call for ranges."""
        waiting = self._data_calls.pop(call, None)
        if waiting is not None:
            self._deadlines.clear(_data_key(call))
        return waiting

    def take_data_calls(self) -> list[int]:
        """Takes out all calls for ranges."""
        calls = [*self._data_calls]
        for call in calls:
            self.take_data_call(call)
        return calls

    def data_calls(self) -> Sequence[DataCall]:
        """The calls for ranges at this moment, the oldest first."""
        return [*self._data_calls.values()] if self._data_calls else ()

    def add_arrival(self, call: int, event: RegisterWorker, *, until: float) -> None:
        """Blocks somebody who wants to take part."""
        self._arrivals[call] = event
        self.has_arrivals = True
        self._deadlines.set(_arrival_key(call), until)

    def take_arrival(self, call: int) -> RegisterWorker | None:
        """Takes out the call of somebody who wants to take part."""
        event = self._arrivals.pop(call, None)
        self.has_arrivals = bool(self._arrivals)
        if event is not None:
            self._deadlines.clear(_arrival_key(call))
        return event

    def take_arrivals(self) -> list[RegisterWorker]:
        """Takes out all calls of those who want to take part, in the order in which they came."""
        return [event for call in [*self._arrivals] if (event := self.take_arrival(call)) is not None]

    def worker_of(self, call: int) -> int | None:
        """Returns the worker that blocks in this call on a token."""
        return self._worker_of_call.get(call)


def _revised(told: CommitResult, result: CommitResult) -> CommitResult:
    return replace(told, applied_step=result.applied_step, staleness=result.staleness, weight=result.weight)


def _data_key(call: int) -> Key:
    return ("ranges", call)


def _arrival_key(call: int) -> Key:
    return ("arrival", call)


def _token_key(worker: int) -> Key:
    return ("token", worker)


def _model_key(call: int) -> Key:
    return ("model", call)


# Who wants a checkpoint, and which one fulfils the wish. Knows calls and tags; no step, shard or clock.


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
