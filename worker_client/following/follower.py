"""A follower of weights: a thread fetches whole steps, the program takes them when it likes. Knows copies and a source; no transport."""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from ps_protocol.encodings.formats import FORMATS, FloatEncoding, Units
from ps_protocol.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidSpec,
    LimitExceeded,
    MalformedMessage,
    NotInitialized,
    PsError,
    ShuttingDown,
    StepGone,
    Unavailable,
    VariableNotFound,
)
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.shown import shown
from ps_protocol.model.variables import Array, VariableSpec
from ps_protocol.process.waiting import Wait, delays_s
from ps_protocol.roles.chief import FollowerReport
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.weights.copy import Transfer, Update, WeightCopy, changed_places, kept_of
from ps_protocol.weights.words import WORD_BYTES, Selection
from worker_client.core.place import LOST
from worker_client.following.sources import Followed, Source, Version

log = logging.getLogger("lockstep.follow")

# Where servers have steps of their own, one that has none is not waited for longer, for the others' sake.
_SHORT_POLL_S = 0.1
# What was heard longer ago says nothing about how old the weights are.
FRESH_S = 5.0
_MAX_PAUSE_S = 1.0
_FAILED_AT_THE_END = 6
_LOOK_S = 0.1
_WAITS = "the follower waits for weights"
_CLOSE_WAIT_S = 2.0
# Steps ahead that are aimed for, where they pass faster than all servers can be asked.
_MAX_AHEAD = 1 << 16
# So many targets of a program are known with what they have; of others everything is copied.
_MAX_TARGETS = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a variable: `Part("layers.0.qkv", index=np.s_[:64])` is what NumPy's basic indexing gives."""

    name: str
    index: Any = ()


class Held(NamedTuple):
    """What a follower holds: of which model and era, as far as it is kept here; its version; the newest step; the shards' copies."""

    followed: Followed
    version: Version
    newest_step: int
    copies: Sequence[WeightCopy]


T = TypeVar("T")
# What a slice is given to: a name, the part of the variable that is wanted under it, the slice, its bytes, and how they are encoded.
PutSlice = Callable[[str, Part, VariableSlice, Array, FloatEncoding], None]


class Follower:
    """Whole steps of a cluster's variables, as they are made. Made by `follow()`, used as a context manager.

    A thread fetches what changes, proves it by digests, and keeps one copy, as it travels. What a program sees changes only in its own
    calls: `wait`, `into`. Never a mixture of two steps, and never a step whose bytes were not proved. For one thread of the program.
    """

    def __init__(
        self,
        source: Source,
        *,
        encoding: FloatEncoding,
        takes_kept: bool = False,
        parts: "Mapping[str, Part] | None" = None,
        tables: bool = False,
    ) -> None:
        """`takes_kept`: where the source has only another encoding, that one will do."""
        self._source, self._encoding, self._takes_kept = source, encoding, takes_kept
        self._wanted, self._wants_tables = parts, tables  # None: all variables, but for tables
        self._changed = threading.Condition()
        self._closed = threading.Event()
        # What the thread has, under the condition: what the source has, and what of it is kept here; copies of one step, or of none.
        self._followed: Followed | None = None
        self._kept: Followed | None = None
        self._copies: list[WeightCopy] = []
        self._version: Version | None = None
        self._newest_step, self._heard_at = 0, -FRESH_S
        self._reason = f"{source.place} has not answered yet"
        self._error: Exception | None = None
        self._is_over = self._is_awaited = self._passes_on = False
        self.received_bytes = self.num_patches = self.num_wholes = self.num_mended = 0
        self._ahead = 0
        self._behind_since: float | None = None
        # What the program has.
        self._taken: Version | None = None
        self._arrays: dict[str, Array] | None = None
        self._shown: dict[object, tuple[tuple[Array, ...], Mapping[str, Array] | None]] = {}
        self._thread = threading.Thread(target=self._run, name="lockstep-follow", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and the connections, in 2 s at most. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            with self._changed:
                self._changed.notify_all()
            self._source.close()  # also while the thread waits for it
            self._thread.join(_CLOSE_WAIT_S)

    # What a program asks

    @property
    def version(self) -> Version | None:
        """The version that `wait` or `into` gave last; None before that."""
        return self._taken

    @property
    def step(self) -> int | None:
        """The step of the weights that `wait` or `into` gave last; None before that."""
        return None if self._taken is None else self._taken.step

    @property
    def lag(self) -> int:
        """How many steps the weights that the program has are behind the newest that was heard of."""
        with self._changed:
            return max(0, self._newest_step - (self._taken.step if self._taken is not None else 0))

    def silence(self) -> tuple[float, str]:
        """Returns how many seconds ago anything was heard, and what is waited for."""
        with self._changed:
            return time.monotonic() - self._heard_at, self._reason

    @property
    def is_over(self) -> bool:
        """Whether training has ended, and the program has its last step."""
        with self._changed:
            return self._is_over and self._taken == self._version

    @property
    def has_ended(self) -> bool:
        """Whether no other version will come than the one that can be taken, for those who pass the weights on."""
        with self._changed:
            return self._is_over

    @property
    def arrays(self) -> Mapping[str, Array]:
        """The weights of `step` by name, read-only, in memory of the follower's own: the next `wait` changes them in place.

        An encoded float32 variable is shown as float32. The first use waits for the first step, and takes the newest.
        """
        with self._changed:  # all along: another model may come between
            if self._arrays is None:
                if self._version is None:
                    self.wait()
                self._arrays = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._kinds().items()}
                self._take()
            return {name: _read_only(array) for name, array in self._arrays.items()}

    def wait(self, *, max_lag: int | None = None, step: int | None = None, timeout_s: float | None = None) -> int:
        """Blocks until there are weights, at most `max_lag` steps behind the newest, and at least of `step`; shows and returns their step.

        None: whichever are there. With `max_lag` the cluster must have been heard of in the last 5 s (3 s more behind each relay). Once
        training has ended, returns the last step. Says what it waits for after 2 s. Raises DeadlineExceeded after `timeout_s`,
        NotInitialized where training ended before there were any, and the error that ended the following.
        """
        wait = Wait(_WAITS, timeout_s=timeout_s)
        with self._changed, self._awaiting():
            while (reason := self._missing(max_lag, step)) is not None:
                if self._error is not None:
                    raise self._error
                self._check_open()
                if self._is_over:  # before there was anything
                    raise NotInitialized(reason)
                if wait.left_s() == 0:
                    raise DeadlineExceeded(f"no such weights after {timeout_s:g} s: {reason}")
                wait.explain(reason)
                left_s = wait.left_s()
                self._changed.wait(_LOOK_S if left_s is None else min(_LOOK_S, left_s))
            found = self._take()
        return found.step

    def into(self, target: Mapping[str, Array]) -> int:
        """Copies the newest weights that are there into arrays of the caller's, by name; returns their step. All of one step, in one call.

        Waits for the first step. `target` may leave names out; an array must have its variable's shape, and takes its values in its own
        type. Only variables that have changed since the last call with this very `target` are copied: change them by `into` alone. Raises
        VariableNotFound, InvalidSpec, and then has copied nothing.
        """
        with self._changed:
            if self._version is None:
                self.wait()
            for name, array in target.items():
                self._check_target(name, array)
            self._show(target)
            return self._take().step

    def take(self, key: object, put: PutSlice) -> Version:
        """Gives `put` all that has changed since the last call with this `key`, of one step; for adapters of frameworks."""
        with self._changed:
            if self._version is None:
                raise NotInitialized(self._reason)
            self._give(key, put)
            return self._take()

    def look(self, wanted: "Callable[[Held], T | None]", *, timeout_s: float) -> T | None:
        """Waits until `wanted` makes something of what is held, and returns it; None: it has not in that time. Asks it at each change.

        For those who pass the weights on: from the first call on, patches are kept, and each step counts as taken. Any thread may call it,
        but what `wanted` is given changes when it has returned. Raises the error that ended the following.
        """
        with self._changed:
            if not self._passes_on:
                self._passes_on = True
                for copy in self._copies:
                    copy.keeps_patches = True
            found: T | None = None

            def is_found() -> bool:
                nonlocal found
                if self._error is not None:
                    raise self._error
                self._check_open()
                followed, version = self._kept, self._version
                # Not what stays of an era that is over, until a step of the next one is there.
                if followed is not None and version is not None and version[:2] == (followed.era.life, followed.era.epoch):
                    found = wanted(Held(followed, version, self._newest_step, self._copies))
                return found is not None

            self._changed.wait_for(is_found, timeout_s)
            return found

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each variable that is followed, by the name that it has here. Empty before the first step is there."""
        with self._changed:
            return {name: shape for name, (shape, _) in self._kinds().items()}

    # -- what a program has

    @contextmanager
    def _awaiting(self) -> Iterator[None]:
        """Has the program's thread alone say what it waits for."""
        self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False

    def _missing(self, max_lag: int | None, step: int | None) -> str | None:
        """Returns what is missing for a wait; None: nothing."""
        if self._version is None:
            return self._reason
        if self._is_over or (max_lag is None and step is None):
            return None
        at = self._version.step
        if step is not None and at < step:
            return f"step {step} is wanted and {at} is there; {self._reason}"
        if max_lag is not None and time.monotonic() - self._heard_at > FRESH_S:
            return f"nothing was heard of newer steps for {time.monotonic() - self._heard_at:.0f} s; {self._reason}"
        if max_lag is not None and self._newest_step - at > max_lag:
            return f"step {at} is there, {self._newest_step} the newest; {self._reason}"
        return None

    def _take(self) -> Version:
        assert self._version is not None
        taken, self._taken = self._taken, self._version
        if taken is not None and (taken.life, taken.epoch) != self._version[:2]:
            log.warning("the weights go from step %d to step %d: the cluster was rolled back or begun anew", taken.step, self._version.step)
        if self._arrays is not None:
            self._show(self._arrays)
        return self._version

    def _show(self, target: Mapping[str, Array]) -> None:
        """Copies what has changed since the last call with these arrays."""

        def put(name: str, part: Part, piece: VariableSlice, content: Array, encoding: FloatEncoding) -> None:
            if name in target:
                _put(target[name], part, piece, content, encoding)

        self._give(tuple((name, id(array)) for name, array in target.items()), put, of=target)

    def _give(self, key: object, put: PutSlice, *, of: Mapping[str, Array] | None = None) -> None:
        known, _ = self._shown.pop(key, ((), None))
        for place, copy in enumerate(self._copies):
            for at in changed_places(copy, known[place] if known else None):
                piece = copy.selection.layout.pieces[copy.selection.of[at]]
                content, is_encoded = copy.selection.content_of(copy.words, at)
                for name, part in self._names_of(piece.variable):
                    put(name, part, piece, content, self._encoding if is_encoded else FloatEncoding.AS_IS)
        # Of the targets that were used last, whose arrays are kept, so that others cannot have their identities.
        self._shown[key] = tuple(copy.digests for copy in self._copies), None if of is None else dict(of)
        if len(self._shown) > _MAX_TARGETS:
            del self._shown[next(iter(self._shown))]

    def _names_of(self, variable: VariableSpec) -> Iterable[tuple[str, Part]]:
        if self._wanted is None:
            is_left_out = variable.keys is not None or (variable.is_sparse and not self._wants_tables)
            return () if is_left_out else ((variable.name, Part(name=variable.name)),)
        return [(name, part) for name, part in self._wanted.items() if part.name == variable.name]

    def _kinds(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Returns shape and type of what is followed, by name."""
        found = {}
        for variable in self._followed.model.variables if self._followed is not None else ():
            for name, part in self._names_of(variable):
                like = np.broadcast_to(np.empty((), variable.data_type.dtype), variable.shape)[part.index]
                found[name] = like.shape, like.dtype
        return found

    def _check_target(self, name: str, array: Array) -> None:
        kinds = self._kinds()
        if name not in kinds:
            raise VariableNotFound(f"{name!r} is not followed; followed are {shown(sorted(kinds))}")
        if not isinstance(array, np.ndarray) or array.shape != kinds[name][0] or not array.flags.writeable:
            raise InvalidSpec(f"{name!r}: want a writable array of shape {kinds[name][0]}, got {shown(array)}")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise RuntimeError("the follower is closed; open a new one with follow()")

    # -- the thread

    def _run(self) -> None:
        pauses, num_failed, silence = delays_s(random.Random(), max_s=_MAX_PAUSE_S), 0, Wait(_WAITS, None)
        while not self._closed.is_set():
            if self._is_over:
                self._source.close()  # its processes end when nobody looks on any more
                return
            self._source.report(self._report(), received_bytes=self.received_bytes)
            try:
                self._round()
                pauses, num_failed, silence = delays_s(random.Random(), max_s=_MAX_PAUSE_S), 0, Wait(_WAITS, None)
                continue
            except StepGone as error:
                num_failed, self._ahead = 0, min(max(1, 2 * self._ahead), _MAX_AHEAD)
                self._heard(int(error.facts.get("step", 0)))
                reason = f"steps pass faster than {self._source.place} gives them: {error.message}"
            except LOST as error:
                num_failed, reason = num_failed + 1, error.message
                if not self._ask_for_place(error):
                    return
            except MalformedMessage as error:
                log.warning("fetching all of the weights anew: %s", error.message)
                num_failed, reason = num_failed + 1, error.message
                with self._changed:
                    for copy in self._copies:
                        copy.forget()
            except (Unavailable, ShuttingDown, DeadlineExceeded, LimitExceeded) as error:
                num_failed, reason = num_failed + 1, error.message
            except Exception as error:  # else those who wait would wait for ever
                self._end(error)
                return
            # The servers of a training that has ended may be gone.
            self._say(reason, is_over=num_failed >= _FAILED_AT_THE_END and self._source.is_over)
            if not self._is_awaited:
                silence.explain(reason)
            if num_failed:
                self._closed.wait(next(pauses))

    def _report(self) -> FollowerReport:
        with self._changed:
            taken, now = self._version if self._passes_on else self._taken, time.monotonic()
            lag = 0 if taken is None else max(0, self._newest_step - taken.step)
            is_behind = lag > 0 or (taken is None and self._version is not None)
            self._behind_since = (self._behind_since or now) if is_behind else None
            return FollowerReport(
                step=None if taken is None else taken.step,
                lag=lag,
                behind_s=now - self._behind_since if self._behind_since is not None else 0.0,
                num_patches=self.num_patches,
                num_wholes=self.num_wholes,
                whole_bytes=sum(copy.selection.num_words for copy in self._copies) * WORD_BYTES,
            )

    def _round(self) -> None:
        """Fetches one step from all shards, proves it, and puts it in the place of the one before."""
        try:
            followed = self._source.open()
        except NotInitialized as error:
            raise Unavailable(error.message) from None
        if followed is not self._followed:
            self._begin(followed)
        copies = self._copies
        with_words = [index for index, copy in enumerate(copies) if copy.selection.num_words]
        if not with_words:
            keyed = [variable.name for variable in followed.model.variables if variable.keys is not None]
            also = f". {_not_followed(keyed)}" if keyed else ""
            raise InvalidSpec(f"the model has nothing but tables: pass tables=True, or the names of those to follow{also}")
        was_over = self._source.is_over  # before the last step may have been made
        if followed.policy.has_common_steps:
            received = self._receive_step(with_words)
        else:
            received = self._receive({index: self._request(index, step=None, max_wait_s=_SHORT_POLL_S) for index in with_words})
        if not received:
            if was_over:
                self._say("training has ended", is_over=True)
            return
        updates = {index: copies[index].understood(transfer) for index, transfer in received.items()}
        if wrong := self._put(updates):
            updates |= {index: self._mended(index, updates[index], places) for index, places in wrong.items()}
            if wrong := self._put(updates):
                raise MalformedMessage(f"weights of step {updates[min(wrong)].step}: a slice differs from its digest, also fetched whole")
        self._ahead //= 2

    def _receive_step(self, indices: Sequence[int]) -> dict[int, Transfer]:
        """Fetches one step from all shards: the newest, or one ahead where steps pass too fast for that; nothing if there is none."""
        step = self._newest_step + self._ahead if self._ahead else None
        received = self._receive({index: self._request(index, step=step, max_wait_s=self._source.poll_s) for index in indices})
        if len(received) == len(indices):
            step = max(transfer.first.step for transfer in received.values())
            behind = [index for index, transfer in received.items() if transfer.first.step < step]
            received |= self._receive({index: self._request(index, step=step, max_wait_s=self._source.poll_s) for index in behind})
            if all(transfer.first.step == step for transfer in received.values()):
                return received
        self._ahead = 0  # what was aimed for did not come
        return {}

    def _begin(self, followed: Followed) -> None:
        variables = {variable.name: variable for variable in followed.model.variables}
        if self._wants_tables and (keyed := [name for name, variable in variables.items() if variable.keys is not None]):
            log.warning("%s", _not_followed(keyed))
        for part in self._wanted.values() if self._wanted is not None else ():
            if (variable := variables.get(part.name)) is None:
                raise VariableNotFound(f"the model has no variable {part.name!r}; it has {shown([*variables])}")
            if variable.keys is not None:
                raise InvalidSpec(_not_followed([part.name]))
            try:
                np.broadcast_to(False, variable.shape)[part.index]
            except (IndexError, TypeError) as error:
                raise InvalidSpec(f"{part.name!r} has shape {variable.shape}, and no part {shown(part.index)}: {error}") from None
        if (kept := followed.kept) is not None:
            if not kept.has_tables and any(one.is_sparse and [*self._names_of(one)] for one in followed.model.variables):
                raise InvalidSpec(f"{self._source.place} has no tables; start what keeps the weights there with --tables")
            if not self._takes_kept and kept.encoding is not self._encoding:
                there, wanted = (FORMATS[one].name for one in (kept.encoding, self._encoding))
                raise InvalidSpec(f"{self._source.place} has {there}, and wire={wanted!r} is wanted; leave wire out")
            self._encoding = kept.encoding
        selections = []
        for layout in followed.layouts:
            chosen = [at for at, piece in enumerate(layout.pieces) if [*self._names_of(piece.variable)]]
            selections.append(Selection(layout, self._encoding, chosen))
        split = {piece.variable.name for layout in followed.layouts for piece in layout.pieces if not piece.is_whole}
        for part in self._wanted.values() if self._wanted is not None else ():
            if part.name in split and part.index != ():
                raise InvalidSpec(f"{part.name!r} is split over servers: follow all of it, and index the array")
        with self._changed:
            former = [copy.selection for copy in self._copies]
            if [(one.layout.hash, one.encoding) for one in former] == [(one.layout.hash, one.encoding) for one in selections]:
                # What is shown stays until a step of the new epoch is there.
                for copy in self._copies:
                    copy.forget()
            else:
                if self._version is not None:
                    log.warning("the cluster has another model or another number of servers now; the weights are fetched anew")
                self._copies = [WeightCopy(selection, keeps_patches=self._passes_on) for selection in selections]
                self._version, self._arrays = None, None
                self._shown.clear()
            if self._followed is None or followed.era != self._followed.era:
                self._newest_step = 0
            self._followed, self._kept = followed, replace(followed, kept=kept_of(self._copies))

    def _request(self, index: int, *, step: int | None, max_wait_s: float = 0.0, slices: tuple[int, ...] | None = None) -> FetchRequest:
        assert self._followed is not None
        copy = self._copies[index]
        chosen = () if copy.selection.is_arena else copy.selection.of
        return FetchRequest(
            era=self._followed.era,
            layout_hash=self._followed.layouts[index].hash,
            encoding=self._encoding,
            step=step,
            held_step=copy.step if slices is None else None,
            slices=chosen if slices is None else slices,
            max_wait_s=max_wait_s,
        )

    def _receive(self, requests: Mapping[int, FetchRequest]) -> dict[int, Transfer]:
        """Returns the answers of shards, all pages, but of those that have no such step yet; asks all of them at once."""
        transfers = {index: Transfer(request) for index, request in requests.items()}
        while pending := {index: transfer.request for index, transfer in transfers.items() if not transfer.is_whole}:
            found = self._source.fetch(pending)
            for index, reply in found.items():
                is_first = transfers[index].request.offset == 0
                self._count(transfers[index].take(reply), reply, is_first=is_first)
            for index in pending.keys() - found.keys():
                del transfers[index]
        self._heard(0)
        return transfers

    def _count(self, num_bytes: int, reply: FetchReply, *, is_first: bool) -> None:
        self.received_bytes += num_bytes
        self.num_patches += is_first and reply.is_patch
        self.num_wholes += is_first and not reply.is_patch
        self._heard(reply.newest_step)

    def _put(self, updates: Mapping[int, Update]) -> dict[int, tuple[int, ...]]:
        """Brings all copies to their updates' steps at once; or none, and returns the places of slices that are wrong, by shard."""
        assert self._followed is not None
        with self._changed:
            found = {index: self._copies[index].put(update) for index, update in updates.items()}
            if wrong := {index: places for index, places in found.items() if places}:
                for index, update in updates.items():
                    self._copies[index].undo(update)
                return wrong
            for index, update in updates.items():
                self._copies[index].keep(update, now=time.monotonic())
            steps = [copy.step for copy in self._copies if copy.selection.num_words]
            if None not in steps:
                era = self._followed.era
                self._version = Version(era.life, era.epoch, min(step for step in steps if step is not None))
            self._reason = "no later step has been made"
            self._changed.notify_all()
        return {}

    def _mended(self, index: int, update: Update, places: tuple[int, ...]) -> Update:
        """Fetches slices whole that would differ from the source's, and returns the update with them."""
        copy = self._copies[index]
        slices = tuple(copy.selection.of[place] for place in places)
        names = sorted({copy.selection.layout.pieces[at].variable.name for at in slices})
        log.warning("ps %d: %s differ from what the server has at step %d; fetching them whole", index, shown(names), update.step)
        received = self._receive({index: self._request(index, step=update.step, slices=slices)})
        if index not in received:
            raise MalformedMessage(f"ps {index} does not have step {update.step} any more, of which slices are missing")
        self.num_mended += len(slices)
        return copy.mended(update, places, received[index])

    def _heard(self, newest_step: int) -> None:
        with self._changed:
            self._newest_step, self._heard_at = max(self._newest_step, newest_step), time.monotonic()
            self._changed.notify_all()

    def _ask_for_place(self, error: PsError) -> bool:
        """Asks what has become of the place, which may be another one then; False: the following has ended."""
        try:
            self._source.lost(error)
        except (Unavailable, DeadlineExceeded, NotInitialized, Cancelled) as failure:  # a server that ends cancels the calls there
            self._say(failure.message)
        except PsError as failure:
            self._end(failure)
            return False
        return not self._closed.is_set()

    def _say(self, reason: str, *, is_over: bool = False) -> None:
        with self._changed:
            self._reason, self._is_over = reason, self._is_over or is_over
            self._changed.notify_all()

    def _end(self, error: Exception) -> None:
        with self._changed:
            if not self._closed.is_set():
                self._error = error.with_traceback(None)
            self._changed.notify_all()


def _not_followed(names: Sequence[str]) -> str:
    one = f"{names[0]!r} is a table" if len(names) == 1 else f"{', '.join(map(repr, names))} are tables"
    return (
        f"{one} with keys, which are not followed: lockstep.checkpoint_changes.changes() gives the rows that each checkpoint has changed"
        " (with --durability step, each step), and observe().read_rows() the rows of keys"
    )


def parts_of(names: "Iterable[str] | Mapping[str, str | Part] | None") -> dict[str, Part] | None:
    """Returns what a program wants to follow, by the names that it has there; None: all variables. Raises InvalidSpec."""
    if names is None:
        return None
    if isinstance(names, str):
        raise InvalidSpec(f"names: got the str {names!r}, want several names, for example [{names!r}]")
    if not isinstance(names, Mapping):
        names = {name: name for name in names}
    found = {name: part if isinstance(part, Part) else Part(name=part) for name, part in names.items()}
    for name, part in found.items():
        if not isinstance(name, str) or not isinstance(part.name, str):
            raise InvalidSpec(f"names: got {shown(names)}, want names of variables, or a dict from a name here to one there or to a Part")
    if not found:
        raise InvalidSpec("names: there are none; leave it out to follow all variables")
    return found


def _put(target: Array, part: Part, piece: VariableSlice, content: Array, encoding: FloatEncoding) -> None:
    """Writes a slice's values to where they lie in a target that has the part of the variable."""
    if not piece.is_whole:
        target = np.moveaxis(np.moveaxis(target, piece.axis, 0)[piece.start : piece.stop], 0, piece.axis)
    coding = FORMATS[encoding].coding
    if isinstance(coding, Units) and part.index == () and target.dtype == np.float32 and target.flags.c_contiguous:
        coding.decode(content, target.reshape(-1))  # half the time of decoding and copying
    else:
        np.copyto(target, decoded(content, piece, encoding)[part.index], casting="unsafe")


def decoded(content: Array, piece: VariableSlice, encoding: FloatEncoding) -> Array:
    """Returns the values that a slice's bytes stand for, in its shape."""
    dtype = piece.variable.data_type.dtype
    coding = FORMATS[encoding].coding
    if not isinstance(coding, Units):
        return content.view(dtype).reshape(piece.shape)
    values = np.empty(content.nbytes * 8 // coding.element_bits, np.float32)
    coding.decode(content, values)
    return values.reshape(piece.shape)


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
