"""The exchanges of values between all workers' replicas: messages in, messages and results out. Knows no session, mailbox, thread or clock.

Worker 0 gathers the contributions of the other workers to an exchange, combines them, and answers each worker. All keep the results of the
present step, by their place in it. So a program that was started again repeats its calls of the step and gets the earlier results: worker
0 from any other worker, the others from worker 0. Its writes are then those that it would have made before.
"""

import zlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

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
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from worker_client.model.declarations import IndexedSlices
from worker_client.strategy.group import Combination, combine
from worker_client.strategy.messages import Message, Sender, Serial, check
from worker_client.strategy.reduction import ReduceOp, frozen

# The step of a place before there are variables that steps change, and where steps are not made together.
NO_STEP = -1
FIRST = 0
_OPS: tuple[ReduceOp | None, ...] = (None, ReduceOp.SUM, ReduceOp.MEAN)
# The errors that may be answered instead of results, the same for all.
_ERRORS: tuple[type[Exception], ...] = (
    DeadlineExceeded,
    ShapeMismatch,
    DtypeMismatch,
    InvalidSpec,
    ValueError,
    Unavailable,
    LimitExceeded,
)
# Results of earlier calls of a step are kept up to so many bytes.
_KEPT_BYTES = 64 << 20
# Of values that differ so many are named.
_MOST_NAMED = 4
# Kinds of messages: values to be combined, or the error of a worker without them; results, or an error for all; worker 0's question for
# the results at a place, those, or that they are not known.
_CONTRIBUTION, _REFUSAL, _ANSWER, _ERROR, _QUESTION, _KEPT, _UNKNOWN = range(7)


# Exchanges are numbered by calls of the program, from 1, and within each call: (call, exchange) as one number, whose order is theirs.
_MOST_EXCHANGES = 1 << 20


def exchange_number(call: int, exchange: int) -> int:
    """Returns the number of an exchange of a call; both count from 1."""
    return call * _MOST_EXCHANGES + exchange


def exchange_text(number: int) -> str:
    """Names an exchange by its number."""
    call, exchange = divmod(number, _MOST_EXCHANGES)
    return f"call {call}, exchange {exchange}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Place:
    """The place of an exchange in the program: step, which call of it (even: between calls), which reduction, which part of that."""

    step: int
    call: int
    reduction: int
    part: int

    def __str__(self) -> str:
        call = f"call {self.call // 2 + 1}" if self.call % 2 else f"outside, before call {self.call // 2 + 1}"
        return f"{call} of the step, reduction {self.reduction + 1}, part {self.part}"


_NOWHERE = Place(step=NO_STEP, call=0, reduction=0, part=0)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """A message to be sent to a worker, again and again until it is known to have it or gets another."""

    worker: int
    message: Message


@light_dataclass(frozen=True, slots=True)
class Settled:
    """A worker has the latest message that was sent to it, so that it is not sent again."""

    worker: int


Action = Send | Settled


_NO_MESSAGE = Serial(0, 0)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The head of a message: its exchange by the number in the sender's run, its place, and the message that this one answers."""

    kind: int
    place: Place
    exchange: int = 0
    answered: Serial = _NO_MESSAGE
    # Whether the sender has received the answer to its message before this one.
    is_settled: bool = False
    # Whether the sender may not be its worker's first program, so that others have begun to count exchanges before it.
    is_restarted: bool = False

    def array(self) -> Array:
        answered = (self.answered.run, self.answered.number)
        return np.array([self.kind, *astuple(self.place), self.exchange, *answered, self.is_settled, self.is_restarted], np.int64)


def _head_of(message: Message) -> _Head:
    try:
        kind, step, call, reduction, part, exchange, run, number, *flags = (int(one) for one in message.values[0])
        is_settled, is_restarted = map(bool, flags)
    except (IndexError, TypeError, ValueError, OverflowError):
        raise MalformedMessage("a message of a reduction cannot be read") from None
    _check_body(kind, message.values[1:])
    place = Place(step=step, call=call, reduction=reduction, part=part)
    answered = Serial(run, number)
    return _Head(kind=kind, place=place, exchange=exchange, answered=answered, is_settled=is_settled, is_restarted=is_restarted)


def _check_body(kind: int, body: Sequence[Any]) -> None:
    """Raises MalformedMessage for a contribution without the values to combine, and for an error without its text."""
    try:
        if kind == _CONTRIBUTION:
            ops = body[0].reshape(len(body[0]), 2)[:, 0]
            if not ((ops >= 0) & (ops < len(_OPS))).all():
                raise ValueError
        elif kind in (_REFUSAL, _ERROR):
            _error_in(body)
    except (IndexError, TypeError, ValueError, OverflowError, AttributeError):
        raise MalformedMessage("a message of a reduction cannot be read: what it contributes, or its error") from None


class _Kept:
    """Results by place: those of the present step. Those of its earlier calls only up to a number of bytes."""

    def __init__(self) -> None:
        self._results: dict[Place, list[Any]] = {}

    def begin(self, place: Place) -> None:
        """Notes an exchange that begins. Drops the results of its place and of later ones, which are made again."""
        latest = max(self._results, default=place)
        self._results = {one: results for one, results in self._results.items() if one.step == place.step and one < place}
        if place.call != latest.call and sum(_num_bytes(results) for results in self._results.values()) > _KEPT_BYTES:
            self._results = {}

    def add(self, place: Place, results: list[Any]) -> None:
        self._results[place] = results

    def end_call(self) -> None:
        """Drops results without a step: the same place of the next call looks the same."""
        self._results = {one: results for one, results in self._results.items() if one.step != NO_STEP}

    def get(self, place: Place) -> list[Any] | None:
        return self._results.get(place)


class Contributing:
    """The part of a worker other than worker 0.

    Call `begin`, carry out the actions that it returns, and hand over each message from worker 0, until `is_over`. Messages may come
    between exchanges, too. `is_restarted`: another program of this worker may have had part in exchanges.
    """

    def __init__(self, sender: Sender, *, is_restarted: bool) -> None:
        self._sender, self._is_restarted, self._kept = sender, is_restarted, _Kept()
        self._place = _NOWHERE
        # The contribution that is not answered yet, and the latest message that was sent.
        self._contribution: Message | None = None
        self._latest: Message | None = None
        # Whether this program has received the answer to its last message.
        self._is_settled = False
        self._outcome: list[Any] | Exception | None = None

    def begin(self, place: Place, combinations: Sequence[Combination], *, exchange: int) -> list[Action]:
        """Contributes to an exchange."""
        own = [one.contributions[replica] for one in combinations for replica in sorted(one.contributions)]
        self._kept.begin(place)
        self._place, self._outcome = place, None
        try:
            _check_all(own)
        except InvalidSpec as error:
            return self.refuse(error, exchange=exchange)
        return self._contribute(_CONTRIBUTION, exchange, [_codes(combinations), *own])

    def refuse(self, error: Exception, *, exchange: int) -> list[Action]:
        """Says that this worker's contribution cannot be sent: the exchange fails for all."""
        return self._contribute(_REFUSAL, exchange, _failed(error))

    def receive(self, worker: int, message: Message) -> list[Action]:
        """Takes in a message of `worker`, which is worker 0."""
        head, contribution = _head_of(message), self._contribution
        if head.kind == _QUESTION:
            if (results := self._kept.get(head.place)) is not None:
                kept = _Head(kind=_KEPT, place=head.place, answered=message.serial)
                return self._sent(self._sender.message([kept.array(), *results]))
            if head.place < self._place:
                return self._sent(self._sender.message([_Head(kind=_UNKNOWN, place=head.place, answered=message.serial).array()]))
            # The program that holds it may be lost.
            return [] if contribution is None or self._latest is contribution else self._sent(contribution)
        if contribution is None or head.answered != contribution.serial:
            return []  # belongs to an exchange that was given up
        self._contribution, self._is_settled = None, True
        if head.kind == _ERROR:
            self._outcome = _error_in(message.values[1:])
        else:
            self._outcome = [frozen(one) if isinstance(one, np.ndarray) else one for one in message.values[1:]]
            self._kept.add(self._place, self._outcome)
        return [Settled(worker)]

    def end_call(self) -> None:
        """Takes note that the program's call is over, and its writes are made."""
        self._kept.end_call()

    def give_up(self, error: Exception) -> None:
        """Ends the exchange with this error."""
        self._contribution, self._outcome = None, error

    @property
    def is_over(self) -> bool:
        """Whether the exchange has ended."""
        return self._outcome is not None

    def results(self) -> list[Any]:
        """Returns the results of the exchange that is over. Raises its error."""
        return _results_of(self._outcome)

    def _contribute(self, kind: int, exchange: int, values: list[Any]) -> list[Action]:
        is_settled, self._is_settled = self._is_settled, False
        head = _Head(kind=kind, place=self._place, exchange=exchange, is_settled=is_settled, is_restarted=self._is_restarted)
        self._contribution = self._sender.message([head.array(), *values])
        return self._sent(self._contribution)

    def _sent(self, message: Message) -> list[Action]:
        self._latest = message
        return [Send(worker=FIRST, message=message)]


@light_dataclass(slots=True, kw_only=True)
class _Exchange:
    """Worker 0's state of the present exchange."""

    what: str
    number: int
    place: Place
    combinations: Sequence[Combination]
    timeout_s: float
    # The workers' contributions, and the messages that are to be answered.
    contributed: dict[int, Sequence[Any]] = field(default_factory=dict)
    arrived: dict[int, Serial] = field(default_factory=dict)
    # The workers that were asked for earlier results, and the message to each.
    asked: dict[int, Serial] = field(default_factory=dict)
    # The workers that will not take part, and those of them that are missing.
    absent: set[int] = field(default_factory=set)
    missing: list[int] = field(default_factory=list)
    # The first thing that was wrong.
    failed: Exception | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _Numbering:
    """How worker 0 numbers the exchanges of another worker, of which one is known to both: calls count on from there."""

    theirs: int = 0
    own: int = 0

    def own_of(self, exchange: int) -> int:
        """Returns this side's number of the other side's exchange."""
        num_calls = exchange // _MOST_EXCHANGES - self.theirs // _MOST_EXCHANGES
        if not num_calls:
            return self.own + exchange - self.theirs
        return exchange_number(self.own // _MOST_EXCHANGES + num_calls, exchange % _MOST_EXCHANGES)


class Gathering:
    """Worker 0's part: gathers contributions of `num_workers` workers with `per_worker` replicas each, and answers them.

    Call `begin`, carry out the actions that it returns, and hand over messages of the worker that `waits_for` names, or say that none
    comes, until it is None. Messages may come between exchanges, too. `is_restarted`: another program of worker 0 may have made exchanges.
    """

    def __init__(self, sender: Sender, *, num_workers: int, per_worker: int, is_restarted: bool) -> None:
        self._sender, self._num_workers, self._per_worker, self._is_restarted = sender, num_workers, per_worker, is_restarted
        self._kept = _Kept()
        # Of the present exchange, or the latest.
        self._place, self._number = _NOWHERE, 0
        self._present: _Exchange | None = None
        self._outcome: list[Any] | Exception | None = None
        # Of each worker: its run, and the own numbers of its exchanges.
        self._runs: dict[int, tuple[int, _Numbering]] = {}
        # Of each worker: its latest message that was answered, and the answer.
        self._answers: dict[int, tuple[Serial, Message]] = {}
        # Messages for a later exchange.
        self._early: dict[int, Message] = {}
        # The workers that had the results of the latest exchange already, and so may have those of the next.
        self._knows: int | None = None

    def begin(self, what: str, place: Place, combinations: Sequence[Combination], *, exchange: int, timeout_s: float) -> list[Action]:
        """Begins an exchange with the contributions of worker 0's own replicas. `timeout_s` is named in the error about missing workers."""
        self._kept.begin(place)
        self._place, self._number, self._outcome = place, exchange, None
        self._present = _Exchange(what=what, number=exchange, place=place, combinations=combinations, timeout_s=timeout_s)
        early, self._early = self._early, {}
        actions = [action for worker, message in early.items() for action in self._received(worker, message)]
        knows, self._knows = self._knows, None
        if knows is not None and knows == self.waits_for:
            actions += self.ask(knows)
        return [*actions, *self._ended()]

    def is_new_to(self, worker: int) -> bool:
        """Whether no exchange with this worker's program has been made, so that it may have been here before this one."""
        return worker not in self._runs

    @property
    def waits_for(self) -> int | None:
        """The worker whose message is next; None: the exchange is over."""
        present = self._present
        if present is None:
            return None
        return next((one for one in range(1, self._num_workers) if one not in present.arrived and one not in present.absent), None)

    def ask(self, worker: int) -> list[Action]:
        """Asks a worker for the results of the present exchange, which it has if this program was started again; once."""
        present = self._present
        if present is None or worker in present.asked:
            return []
        question = self._sender.message([_Head(kind=_QUESTION, place=present.place).array()])
        present.asked[worker] = question.serial
        return [Send(worker=worker, message=question)]

    def end_call(self) -> None:
        """Notes that the program's call is over, and its writes are made: a program restarted from now on is at the next call."""
        self._kept.end_call()
        if self._place.step == NO_STEP:
            self._place = _NOWHERE

    def miss(self, worker: int) -> list[Action]:
        """Does without a worker, for which time is up."""
        assert self._present is not None
        self._present.absent.add(worker)
        self._present.missing.append(worker)
        return self._ended()

    def receive(self, worker: int, message: Message) -> list[Action]:
        """Takes in a worker's message."""
        return [*self._received(worker, message), *self._ended()]

    def fail(self, error: Exception) -> list[Action]:
        """Fails the exchange for all workers without its results, since a part of it cannot be sent."""
        answered = {worker: serial for worker, (serial, _) in self._answers.items()}
        arrived = answered if self._present is None else self._present.arrived
        self._present, self._outcome = None, error
        self._kept.begin(self._place)
        return [self._answer(worker, serial, _ERROR, _failed(error)) for worker, serial in arrived.items()]

    def results(self) -> list[Any]:
        """Returns the results of the exchange that is over. Raises its error."""
        return _results_of(self._outcome)

    def _received(self, worker: int, message: Message) -> list[Action]:
        head, present = _head_of(message), self._present
        if head.kind in (_KEPT, _UNKNOWN):
            is_asked = present is not None and present.asked.get(worker) == head.answered
            return self._told(worker, message, is_known=head.kind == _KEPT) if is_asked else []
        if head.kind not in (_CONTRIBUTION, _REFUSAL):
            return []
        if worker not in self._runs and not self._is_restarted and not head.is_restarted:
            # Also where its first message is not of the first exchange, which has failed in one of the two.
            self._runs[worker] = message.serial.run, _Numbering()
        elif worker not in self._runs or self._runs[worker][0] != message.serial.run:
            if present is None or head.place != present.place:
                return self._elsewhere(worker, message, head)
            # A program that was started again begins to count anew.
            self._runs[worker] = message.serial.run, _Numbering(theirs=head.exchange, own=present.number)
        number = self._runs[worker][1].own_of(head.exchange)
        if number > self._number:
            return self._later(worker, message, head)
        if present is None or number < present.number:
            return self._earlier(worker, message, head, number)
        present.arrived[worker] = message.serial
        if NO_STEP < present.place.step < head.place.step:
            return self._end(_behind(present.what, FIRST, present.place.step, of=worker, at=head.place.step), is_told=False)
        if NO_STEP < head.place.step < present.place.step:
            self._note(_behind(present.what, worker, head.place.step, of=FIRST, at=present.place.step))
        elif head.kind == _REFUSAL:
            self._note(_error_in(message.values[1:]))
        elif not np.array_equal(message.values[1], codes := _codes(present.combinations)):
            self._note(_unlike(f"{present.what}: {_difference(worker, message.values[1], codes, present.combinations)}"))
        elif len(message.values) - 2 != len(codes) * self._per_worker:
            self._note(_unlike(f"{present.what}: worker {worker} has other replicas than {self._per_worker}, as worker 0 has"))
        else:
            present.contributed[worker] = message.values[2:]
        return [Settled(worker)] if head.is_settled and worker not in present.asked else []

    def _told(self, worker: int, message: Message, *, is_known: bool) -> list[Action]:
        """Takes in the answer to a question."""
        if is_known:
            self._knows = worker
            return self._end([frozen(one) if isinstance(one, np.ndarray) else one for one in message.values[1:]])
        return self._apart(worker, early) if (early := self._early.pop(worker, None)) is not None else []

    def _apart(self, worker: int, message: Message) -> list[Action]:
        """Has the present exchange fail: a worker is at another place of the program."""
        present = self._present
        assert present is not None
        present.arrived[worker] = message.serial
        place = _head_of(message).place
        self._note(_unlike(f"{present.what}: a program was started again: worker {worker} is at {place}, worker 0 at {present.place}"))
        return []

    def _elsewhere(self, worker: int, message: Message, head: _Head) -> list[Action]:
        """Takes in the message of a program that was started again, or was there before this one, and is at another place."""
        present, place = self._present, head.place
        if (results := self._kept.get(place)) is not None:
            return [self._answer(worker, message.serial, _ANSWER, results)]
        if NO_STEP < place.step < self._place.step:
            error: Exception = _behind("a reduction", worker, place.step, of=FIRST, at=self._place.step)
            return [self._answer(worker, message.serial, _ERROR, _failed(error))]
        if place > self._place:
            self._early[worker] = message
            if present is None:
                return []
            if NO_STEP < present.place.step < place.step:
                return self._end(_behind(present.what, FIRST, present.place.step, of=worker, at=place.step), is_told=False)
            return self.ask(worker)
        if present is None:
            error = Unavailable(f"what was reduced at {place} is not kept any more; start the program of worker {worker} again")
            return [self._answer(worker, message.serial, _ERROR, _failed(error))]
        return self._apart(worker, message)

    def _later(self, worker: int, message: Message, head: _Head) -> list[Action]:
        """Keeps a worker's message for a later exchange; it has sent none for the present one."""
        self._early[worker] = message
        if self._present is not None:
            self._present.absent.add(worker)
            self._note(DeadlineExceeded(f"{self._present.what}: worker {worker} has given up this exchange, and waits for a later one"))
        return [Settled(worker)] if head.is_settled else []

    def _earlier(self, worker: int, message: Message, head: _Head, number: int) -> list[Action]:
        """Answers a message for an exchange that is over."""
        answered = self._answers.get(worker)
        if answered is not None and answered[0] == message.serial:
            return [Send(worker=worker, message=answered[1])]  # the answer was lost
        if (results := self._kept.get(head.place)) is not None:
            return [self._answer(worker, message.serial, _ANSWER, results)]
        error: Exception = DeadlineExceeded(f"worker 0 has given up the reduction that this was for: its {exchange_text(number)}")
        if NO_STEP < head.place.step < self._place.step:
            error = _behind("a reduction", worker, head.place.step, of=FIRST, at=self._place.step)
        return [self._answer(worker, message.serial, _ERROR, _failed(error))]

    def _note(self, error: Exception) -> None:
        assert self._present is not None
        self._present.failed = self._present.failed or error

    def _ended(self) -> list[Action]:
        """Ends the present exchange if no other worker is waited for."""
        present = self._present
        if present is None or self.waits_for is not None:
            return []
        if present.missing:
            names = "; ".join(f"{replicas_of(worker, self._per_worker)} of worker {worker}" for worker in present.missing)
            words = f"{present.what}: missing after {present.timeout_s:g} s: {names}; is its process there?"
            return self._end(DeadlineExceeded(words))
        if present.failed is not None:
            return self._end(present.failed)
        try:
            return self._end(self._combined(present))
        except _ERRORS as error:
            return self._end(error)

    def _combined(self, present: _Exchange) -> list[Any]:
        gathered = [dict(one.contributions) for one in present.combinations]
        _check_all([value for contributions in gathered for value in contributions.values()])
        for worker, contributed in present.contributed.items():
            values = iter(contributed)
            for contributions in gathered:
                contributions.update((worker * self._per_worker + index, next(values)) for index in range(self._per_worker))
        results = [combine(one.op, contributions) for one, contributions in zip(present.combinations, gathered, strict=True)]
        _check_all(results)
        return results

    def _end(self, outcome: list[Any] | Exception, *, is_told: bool = True) -> list[Action]:
        """Ends the present exchange, and answers all that have come. Not `is_told`: sends nothing; the program started next here does."""
        present, self._present, self._outcome = self._present, None, outcome
        assert present is not None
        if not isinstance(outcome, Exception):
            self._kept.add(present.place, outcome)
        if not is_told:
            return []
        kind, values = (_ERROR, _failed(outcome)) if isinstance(outcome, Exception) else (_ANSWER, outcome)
        return [self._answer(worker, serial, kind, values) for worker, serial in present.arrived.items()]

    def _answer(self, worker: int, serial: Serial, kind: int, values: Sequence[Any]) -> Action:
        message = self._sender.message([_Head(kind=kind, place=self._place, answered=serial).array(), *values])
        self._answers[worker] = serial, message
        return Send(worker=worker, message=message)


def replicas_of(worker: int, per_worker: int) -> str:
    """Returns the words for a worker's replicas."""
    first = worker * per_worker
    return f"replica {first}" if per_worker == 1 else f"replicas {first} to {first + per_worker - 1}"


def _results_of(outcome: list[Any] | Exception | None) -> list[Any]:
    assert outcome is not None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _behind(what: str, worker: int, step: int, *, of: int, at: int) -> Unavailable:
    return Unavailable(
        f"{what}: worker {worker} is at step {step}, worker {of} at {at}: they would reduce values of different steps; "
        f"start the program of worker {worker} again"
    )


def _unlike(what: str) -> ValueError:
    return ValueError(f"{what}; all workers must make the same calls in the same order")


def _check_all(values: Sequence[Any]) -> None:
    for value in values:
        check(value)


def _num_bytes(results: Sequence[Any]) -> int:
    return sum(one.values.nbytes if isinstance(one, IndexedSlices) else np.asarray(one).nbytes for one in results)


def _error_in(message: Sequence[Any]) -> Exception:
    """Returns the error of which `_failed` made this."""
    return _ERRORS[int(message[0])](bytes(message[1].astype(np.uint8)).decode())


def _failed(error: Exception) -> list[Any]:
    kind = next(index for index, known in enumerate(_ERRORS) if isinstance(error, known))
    words = error.message if isinstance(error, PsError) else str(error)
    return [np.int64(kind), np.frombuffer(words.encode(), np.uint8)]


def _codes(combinations: Sequence[Combination]) -> Array:
    """Returns the values to combine as numbers that identify them: values of one shape may be for different variables."""
    return np.array([(_OPS.index(one.op), zlib.crc32(one.variable.encode())) for one in combinations], np.int64)


def _difference(worker: int, theirs: Array, own: Array, combinations: Sequence[Combination]) -> str:
    """Returns words for the difference between a worker's values and worker 0's, from the first that differs."""
    names = {zlib.crc32(one.variable.encode()): f' for "{one.variable}"' if one.variable else "" for one in combinations}
    least = min(len(theirs), len(own))
    first = next((place for place in range(least) if not np.array_equal(theirs[place], own[place])), least)
    begin = first if max(len(theirs), len(own)) > _MOST_NAMED else 0

    def asked(codes: Array) -> str:
        ops = ["the first" if (op := _OPS[int(code)]) is None else op.name for code, _ in codes]
        texts = [op + names.get(int(name), " for another variable") for op, (_, name) in zip(ops, codes, strict=True)]
        return ", ".join(texts[begin : begin + _MOST_NAMED]) or "nothing"

    return f"worker {worker} reduces {asked(theirs)} where worker 0 reduces {asked(own)}"
