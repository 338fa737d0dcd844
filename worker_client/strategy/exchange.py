"""The exchanges of values between all workers' replicas, as posts on a board. Knows no session, connection, thread or clock.

Each worker posts its values at the place of an exchange. Worker 0 reads them, combines them, and posts the results, or the error for all,
at the same place; the others read that. The results of the present step stay there. So a program that was started again makes its calls
of the step again, finds the results that there were, and makes the writes that it would have made before.

The parts are coroutines, which wait for the board alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from ps_protocol.errors import (
    DeadlineExceeded,
    DtypeMismatch,
    InvalidSpec,
    LimitExceeded,
    MalformedMessage,
    PsError,
    ShapeMismatch,
    Unavailable,
)
from ps_protocol.model.variables import Array
from ps_protocol.roles.board import Found, Key, Post
from worker_client.model.declarations import IndexedSlices
from worker_client.strategy.content import check, pack, unpack
from worker_client.strategy.group import Combination, combine
from worker_client.strategy.reduction import frozen

# The step of a place before there are variables that steps change, and where steps are not made together.
NO_STEP = -1
FIRST = 0
# The errors that may be posted instead of results, the same for all.
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (DeadlineExceeded, ShapeMismatch, DtypeMismatch, InvalidSpec, ValueError, Unavailable, LimitExceeded, MalformedMessage)
}
# Of values that differ so many are named.
_MOST_NAMED = 4


class Moment(NamedTuple):
    """The epoch and the step of a program's variables; where steps are not made together, 0 and NO_STEP."""

    epoch: int = 0
    step: int = NO_STEP


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """The place of an exchange: when, in which call (an odd number; even: outside, after so many calls twice), and which exchange in it."""

    at: Moment
    call: int
    exchange: int

    @property
    def key(self) -> Key:
        """The key of the posts there."""
        return Key(self.at.epoch, self.at.step - NO_STEP, self.call, self.exchange)

    @property
    def after(self) -> "Place":
        """The place of what comes after this exchange has failed: a call fails as a whole."""
        return replace(self, call=self.call + 1, exchange=0) if self.call % 2 else replace(self, exchange=self.exchange + 1)

    @property
    def begin(self) -> Key:
        """The first key whose results a program may ask for that is started again: in this step; where there is none, in this call."""
        if self.at.step != NO_STEP:
            return self.key._replace(third=0, fourth=0)
        return self.key._replace(fourth=0) if self.call % 2 else self.key

    def __str__(self) -> str:
        return f"call {self.call // 2 + 1}, exchange {self.exchange}"


def place_of(key: Key) -> Place:
    """Returns the place that a key is of."""
    return Place(Moment(key.first, key.second + NO_STEP), key.third, key.fourth)


class Places:
    """Counts calls and exchanges of a program, anew in each step. Programs that make the same calls have the same places.

    Calls without an exchange do not count, but failed ones do, since the others' may have had one.
    """

    def __init__(self) -> None:
        self._at = Moment()
        # Calls that have begun, and those of them that had before the present step.
        self._num_calls = self._num_before = 0
        # Exchanges in the present call, or since the last one; and those before the present call.
        self._num_exchanges = self._num_outside = 0
        self.is_in_call = False

    def begin_call(self, at: Moment) -> None:
        """Begins a call."""
        self.look(at)
        self.is_in_call = True
        self._num_calls += 1
        self._num_outside, self._num_exchanges = self._num_exchanges, 0

    def end_call(self, *, has_failed: bool) -> Place:
        """Ends the call; returns the place after it."""
        self.is_in_call = False
        if has_failed or self._num_exchanges:
            self._num_exchanges = 0
        else:
            self._num_calls -= 1
            self._num_exchanges = self._num_outside
        return self.present

    def next(self, at: Moment) -> Place:
        """Returns the place of the next exchange."""
        self.look(at)
        self._num_exchanges += 1
        return self.present

    @property
    def present(self) -> Place:
        """The place of the latest exchange."""
        return Place(self._at, 2 * self._num_counted - self.is_in_call, self._num_exchanges)

    def go_to(self, place: Place) -> Place:
        """Makes the present exchange the one at a later place, or the first after it in a call, or outside, as it is now; returns it."""
        call, exchange = place.call, place.exchange
        if (call - self.present.call) % 2:
            call, exchange = call + 1, 0
        if self.is_in_call:
            exchange = 0
        if (call, exchange) > (self.present.call, self.present.exchange):
            self._num_calls += (call + 1) // 2 - self._num_counted
            self._num_exchanges = max(exchange, 1)
        return self.present

    def catch_up(self, call: int) -> None:
        """Counts no fewer calls than another worker, which has left this call, or the one before."""
        missed = call // 2 - self._num_counted
        if missed > 0:
            self._num_calls += missed
            self._num_exchanges = 0

    @property
    def _num_counted(self) -> int:
        return self._num_calls - (0 if self._at.step == NO_STEP else self._num_before)

    def look(self, at: Moment) -> None:
        """Takes note of the moment; in another step, counts anew."""
        if at.step != self._at.step:
            self._num_before = self._num_calls - self.is_in_call
            self._num_exchanges = self._num_outside = 0
        self._at = at


class Waited(NamedTuple):
    """What was found in a wait; whether time is up; and the moment of this program's variables."""

    found: Found
    is_late: bool
    at: Moment


class BoardSide(Protocol):
    """The boards that workers post on, as one worker uses them: one for exchanges with a step, and one for those without."""

    async def put(self, author: int, place: Place, content: Array, *, keeps_from: Key, is_last: bool = False) -> None:
        """Posts as an author. `is_last`: the program may end after this, so that the post has to arrive now. Raises LimitExceeded."""

    async def get(self, author: int, place: Place, *, since: Key | None) -> Found:
        """Returns an author's first post from a key on, None: its newest, on the board of a place."""

    async def wait_for(self, author: int, place: Place, *, why: str) -> Waited:
        """Waits a while for an author's first post at a place or after it; `why` it is waited for."""

    async def keep(self, place: Place, post: Post, *, keeps_from: Key) -> None:
        """Has results that were read posted again if the server loses them."""


class _Moved(Exception):
    """The cluster has gone back to this same step, in another epoch."""

    def __init__(self, at: Moment) -> None:
        self.at = at


class Exchanges:
    """The part of one worker in the exchanges of `num_workers` workers with `per_worker` replicas each, of which worker 0 combines.

    `incarnation`: of this worker's process. `is_restarted`: another process may have been in its place.
    """

    def __init__(self, boards: BoardSide, *, worker: int, incarnation: int, num_workers: int, per_worker: int, is_restarted: bool) -> None:
        self._boards = boards
        self._worker, self._incarnation, self._is_restarted = worker, incarnation, is_restarted
        self._num_workers, self._per_worker = num_workers, per_worker
        self.places = Places()
        # Whether this program has reduced with steps, and without.
        self._has_begun = {True: False, False: False}
        # The step in which the program that was in this place may have reduced, too; None: none.
        self._former_step: int | None = None
        # The place in a call of this program that has failed where others may still wait for it.
        self._failed_at: Place | None = None
        # Of worker 0: whether results of its predecessor may be there, and the latest place that results or an error were posted for.
        self._is_new, self._latest = False, Key()

    async def begin(self, at: Moment) -> Place:
        """Returns the place of the next exchange."""
        if self._num_workers == 1:
            return self.places.next(at)
        failed_at, self._failed_at = self._failed_at, None
        if failed_at is not None and self._worker == FIRST:
            await self._posted(failed_at, _failed(DeadlineExceeded(f"worker 0 has given up its {failed_at}"), failed_at.call))
        place = self.places.next(at)
        has_steps = at.step != NO_STEP
        if not self._has_begun[has_steps]:
            self._has_begun[has_steps] = True
            place = await self._entered(place)
        if self._former_step is not None and self._former_step != at.step:
            self._former_step, self._is_new = None, False
        if self._former_step is not None and (place.exchange == 1 or not place.call % 2):
            place = await self._past_failures(place)
        return place

    async def combined(self, what: str, combinations: Sequence[Combination], place: Place, *, timeout_s: float) -> list[Any]:
        """Returns the combined contributions of all workers. Raises the exchange's error. `timeout_s` is named in errors."""
        part = self._gathered if self._worker == FIRST else self._contributed
        while True:
            try:
                return await part(what, combinations, place, timeout_s)
            except _Moved as moved:
                place = replace(place, at=moved.at)

    async def end_call(self, at: Moment, *, has_failed: bool) -> None:
        """Ends a call. Where there are no steps, tells the others, so that a program that is started again does not begin with it."""
        if has_failed:
            self.places.look(at)  # the variables may have been created in it
        place = self.places.present
        after = self.places.end_call(has_failed=has_failed)
        if has_failed:
            # The others hear of it with the next exchange: if this program ends now, the next one makes the call again.
            self._failed_at = replace(place, exchange=place.exchange + 1)
        elif self._num_workers > 1 and place.at.step == NO_STEP and place.exchange:
            await self._boards.put(self._worker, after, pack(None), keeps_from=place.begin)

    async def _entered(self, place: Place) -> Place:
        """Finds out where this program comes in: after what this process has reduced before, or where a former one may have been."""
        own = (await self._boards.get(self._worker, place, since=None)).post
        if own is not None and own.incarnation == self._incarnation:
            self._latest = own.key
            former = place_of(own.key)
            return self.places.go_to(former.after) if former.at.step == place.at.step else place
        if own is None and not self._is_restarted:
            return place
        self._is_new, self._latest = True, own.key if own is not None else place.key
        if place.at.step != NO_STEP:
            self._former_step = place.at.step
            return place
        # Calls are counted from the beginning of each program: the others' count holds.
        newest = []
        for author in range(self._num_workers):
            if author != self._worker or author == FIRST:
                found = await self._boards.get(author, place, since=None)
                if found.newest is not None:
                    there = place_of(found.newest)
                    newest.append(there if author or there.call % 2 else there.after)
        return (await self._past_failures(self.places.go_to(max(newest)))) if newest else place

    async def _past_failures(self, place: Place) -> Place:
        """Returns the place after calls that have failed, which the others do not make again."""
        since = place.key
        while True:
            post = (await self._boards.get(FIRST, place, since=since)).post
            if post is None or post.key[:3] != place.key[:3] or (post.key != place.key and not place.call % 2):
                return place
            since = post.key.next
            if _is_error(post):
                place = self.places.go_to(place_of(post.key).after)
                since = place.key

    async def _contributed(self, what: str, combinations: Sequence[Combination], place: Place, timeout_s: float) -> list[Any]:
        first = f"worker 0 with {replicas_of(FIRST, self._per_worker)}"
        ops = _ops(combinations)
        try:
            own = [_array(one.contributions[replica]) for one in combinations for replica in sorted(one.contributions)]
            await self._contribute(place, pack({"ops": ops, "values": own}))
        except (InvalidSpec, LimitExceeded) as error:
            await self._contribute(place, _failed(error, place.call))
        why = f"no answer of {first}, which gathers what all contribute; it says who is missing"
        while True:
            waited = await self._boards.wait_for(FIRST, place, why=why)
            post = waited.found.post
            if post is not None and post.key.first == place.key.first:
                break
            if waited.is_late:
                raise DeadlineExceeded(f"{what}: {first} has not answered within {timeout_s:g} s; is its process there?")
            self._check_moment(what, place, waited.at)
        there = place_of(post.key)
        if there.at.step != place.at.step:
            raise _behind(what, self._worker, place.at.step, of=FIRST, at=there.at.step)
        if post.key != place.key:
            self.places.catch_up((there.after if _is_error(post) else there).call)
            raise DeadlineExceeded(f"{what}: worker 0 has given up this exchange, and is at its {there}")
        return await self._taken(what, post, ops, place)

    async def _gathered(self, what: str, combinations: Sequence[Combination], place: Place, timeout_s: float) -> list[Any]:
        if self._is_new and (known := (await self._known(place))) is not None:
            return await self._taken(what, known, _ops(combinations), place)
        ops, gathered, reached = _ops(combinations), [dict(one.contributions) for one in combinations], place.call
        failed: Exception | None = None
        missing = list[int]()
        for worker in range(1, self._num_workers):
            post = await self._contribution_of(worker, what, place)
            if post is None:
                missing.append(worker)
            elif post.key == place.key:
                failed = failed or self._take(worker, what, post, ops, gathered)
            else:
                # A server that was started anew may have got the results only now.
                if self._is_new and (known := (await self._known(place))) is not None:
                    return await self._taken(what, known, ops, place)
                there = place_of(post.key)
                if there.at.step > place.at.step:
                    # Not told: the other waits for the program that is started next here.
                    raise _behind(what, FIRST, place.at.step, of=worker, at=there.at.step)
                failed, reached = failed or _apart(what, worker, there, place), max(reached, there.call)
        if missing:
            names = "; ".join(f"{replicas_of(worker, self._per_worker)} of worker {worker}" for worker in missing)
            failed = DeadlineExceeded(f"{what}: missing after {timeout_s:g} s: {names}; is its process there?")
        try:
            results = _combined(combinations, gathered, failed)
            await self._posted(place, pack({"ops": ops, "results": results}))
        except tuple(_ERRORS.values()) as error:
            self.places.catch_up(reached)
            await self._posted(place, _failed(error, reached))
            raise
        self._is_new = False
        return results

    async def _known(self, place: Place) -> Post | None:
        """Returns the results, or the error, that are there for this place; None: none."""
        post = (await self._boards.get(FIRST, place, since=place.key)).post
        return post if post is not None and post.key == place.key else None

    async def _contribution_of(self, worker: int, what: str, place: Place) -> Post | None:
        """Returns a worker's post at the place or after it, or one before it that nobody will answer; None: time is up."""
        why = f"nothing has come of {replicas_of(worker, self._per_worker)} of worker {worker}; is its process there?"
        while True:
            waited = await self._boards.wait_for(worker, place, why=why)
            post, newest = waited.found.post, waited.found.newest
            if post is not None and post.key.first == place.key.first:
                return post
            if post is None and newest is not None and newest.fourth and newest > self._latest and newest.first == place.key.first:
                return (await self._boards.get(worker, place, since=None)).post
            if waited.is_late:
                return None
            self._check_moment(what, place, waited.at)

    def _take(self, worker: int, what: str, post: Post, ops: list[Any], gathered: list[dict[int, Any]]) -> Exception | None:
        """Takes in a worker's contribution; returns what is wrong with it."""
        try:
            message = _read(post)
            if "error" in message:
                return _error_in(message)
            theirs, values = message["ops"], message["values"]
            if theirs != ops:
                return _unlike(f"{what}: {_difference(worker, theirs, ops)}")
            if len(values) != len(ops) * self._per_worker:
                return _unlike(f"{what}: worker {worker} has other replicas than {self._per_worker}, as worker 0 has")
        except MalformedMessage as error:
            return error
        rest = iter(values)
        for contributions in gathered:
            contributions.update((worker * self._per_worker + index, next(rest)) for index in range(self._per_worker))
        return None

    async def _taken(self, what: str, post: Post, ops: list[Any], place: Place) -> list[Any]:
        """Takes in the results at this place, or raises the error that is there."""
        self._latest = max(self._latest, post.key)
        message = _read(post)
        await self._boards.keep(place, post, keeps_from=place.begin)
        if "error" in message:
            self.places.catch_up(message["call"])
            raise _error_in(message)
        if message["ops"] != ops:
            raise _unlike(f"{what}: {_difference(FIRST, message['ops'], ops, of=self._worker)}")
        return [frozen(one) if isinstance(one, np.ndarray) else one for one in message["results"]]

    async def _posted(self, place: Place, content: Array) -> None:
        self._latest = max(self._latest, place.key)
        if self._num_workers > 1:
            await self._boards.put(FIRST, place, content, keeps_from=place.begin, is_last=True)

    async def _contribute(self, place: Place, content: Array) -> None:
        await self._boards.put(self._worker, place, content, keeps_from=place.key)

    def _check_moment(self, what: str, place: Place, at: Moment) -> None:
        """Raises _Moved, or Unavailable, if the cluster has gone back to this step, or to another one."""
        if at == place.at or NO_STEP in (at.step, place.at.step):
            return
        if at.step != place.at.step:
            raise Unavailable(f"{what}: the cluster went back from step {place.at.step} to step {at.step}")
        raise _Moved(at)


def replicas_of(worker: int, per_worker: int) -> str:
    """Returns the words for a worker's replicas."""
    first = worker * per_worker
    return f"replica {first}" if per_worker == 1 else f"replicas {first} to {first + per_worker - 1}"


def _array(value: Any) -> Any:
    return value if isinstance(value, IndexedSlices) else np.asarray(value)


def _combined(combinations: Sequence[Combination], gathered: Sequence[dict[int, Any]], failed: Exception | None) -> list[Any]:
    if failed is not None:
        raise failed
    for contributions in gathered:
        for value in contributions.values():
            check(value)
    return [_array(combine(one.op, contributions)) for one, contributions in zip(combinations, gathered, strict=True)]


def _apart(what: str, worker: int, there: Place, place: Place) -> Exception:
    if there.at.step < place.at.step:
        return _behind(what, worker, there.at.step, of=FIRST, at=place.at.step)
    if there < place:
        return _unlike(f"{what}: a program was started again: worker {worker} is at its {there}, worker 0 at its {place}")
    return DeadlineExceeded(f"{what}: worker {worker} has given up this exchange, and is at its {there}")


def _behind(what: str, worker: int, step: int, *, of: int, at: int) -> Unavailable:
    return Unavailable(
        f"{what}: worker {worker} is at step {step}, worker {of} at {at}: they would reduce values of different steps; "
        f"start the program of worker {worker} again"
    )


def _unlike(what: str) -> ValueError:
    return ValueError(f"{what}; all workers must make the same calls in the same order")


def _failed(error: Exception, call: int) -> Array:
    """Returns the content of a post that says that an exchange has failed; `call`: how far a worker is."""
    kind = next(name for name, known in _ERRORS.items() if isinstance(error, known))
    return pack({"error": kind, "words": error.message if isinstance(error, PsError) else str(error), "call": call})


def _error_in(message: dict[str, Any]) -> Exception:
    return _ERRORS[message["error"]](message["words"])


def _is_list_of_ops(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(op, list) and [type(part) for part in op] == [str, str] for op in value)


# The messages, by the names of their fields, and what each may be.
_FIELDS: tuple[dict[str, Callable[[Any], bool]], ...] = (
    {"ops": _is_list_of_ops, "values": lambda one: isinstance(one, list)},
    {"ops": _is_list_of_ops, "results": lambda one: isinstance(one, list)},
    {
        "error": lambda one: isinstance(one, str) and one in _ERRORS,
        "words": lambda one: isinstance(one, str),
        "call": lambda one: isinstance(one, int),
    },
)


def _read(post: Post) -> dict[str, Any]:
    """Returns what a post says. Raises MalformedMessage."""
    message = unpack(post.content)
    if not isinstance(message, dict) or not any(
        fields.keys() == message.keys() and all(fits(message[name]) for name, fits in fields.items()) for fields in _FIELDS
    ):
        raise MalformedMessage("a post cannot be read: it is no part of a reduction")
    return message


def _is_error(post: Post) -> bool:
    message = unpack(post.content)
    return isinstance(message, dict) and "error" in message


def _ops(combinations: Sequence[Combination]) -> list[Any]:
    """Returns what is combined, of which variable: values of one shape may be for different variables."""
    return [[one.op.name if one.op is not None else "", one.variable] for one in combinations]


def _difference(worker: int, theirs: list[Any], own: list[Any], *, of: int = FIRST) -> str:
    """Returns words for the difference between a worker's values and worker 0's, from the first that differs."""
    least = min(len(theirs), len(own))
    first = next((place for place in range(least) if theirs[place] != own[place]), least)
    begin = first if max(len(theirs), len(own)) > _MOST_NAMED else 0

    def asked(ops: list[Any]) -> str:
        texts = [f"{op or 'the first'}{variable and f' for {chr(34)}{variable}{chr(34)}'}" for op, variable in ops]
        return ", ".join(texts[begin : begin + _MOST_NAMED]) or "nothing"

    return f"worker {worker} reduces {asked(theirs)} where worker {of} reduces {asked(own)}"
