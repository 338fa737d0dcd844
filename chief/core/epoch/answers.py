"""Holds back answers about contributions and data until they stay true even if the chief dies. Knows no clock, thread or wire.

A worker learns that its contribution is accepted once it is applied, or once a parameter server has recorded the choice for the next
chief. A step that has all its contributions is being applied anyway. For a step that lacks some, the record is written; one record at a
time serves all callers.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from chief.core.messages import Done, Failed, KeepRecord, ReplyValue
from chief.core.waiting import Blocked, Line
from ps_protocol.errors import PsError, Unavailable
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.chief import CommitResult, PushOutcome
from ps_protocol.roles.contribution import PushId, StepAttachments

if TYPE_CHECKING:
    from chief.core.epoch.training import Start
    from chief.core.state import Cluster

# A caller that waits for a record gets an answer after this time, and asks again.
_RECORD_S = 1.0
# Where workers are about equally fast, the step has all its contributions sooner than that, and no record is needed.
LINGER_S = 0.002
# Ranges done that travel with every step, at most about so many; then the record is written.
_MAX_UNKEPT = 512
# Records of one epoch, as a power of two.
_BITS_OF_AN_EPOCH = 32
_MAX_EPOCH = 1 << 30  # beyond it, which training never reaches, versions only count on


class RecordVersions:
    """Numbers the records that this chief has kept: shards keep that of the highest version, and one of a later epoch is later."""

    def __init__(self) -> None:
        self.latest = 0

    def next(self) -> int:
        """Returns the version of another record."""
        self.latest += 1
        return self.latest

    def skip_to(self, version: int) -> None:
        """Notes that shards may keep a record of this version; later ones get higher versions."""
        self.latest = max(self.latest, version)

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch, whose records are later than those of all earlier epochs."""
        self.skip_to(min(epoch, _MAX_EPOCH) << _BITS_OF_AN_EPOCH)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """An answer about a contribution (None: about something else). `version`: the record that makes it certain; None: only its step."""

    value: ReplyValue
    push_id: PushId | None
    version: int | None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A record on its way to the shards: the contributions that it names, and which ranges and attachments it has that no other has yet."""

    work: KeepRecord
    chosen: tuple[PushId, ...]
    num_unkept: int
    has_data: bool
    attached: StepAttachments


class Answers:
    """The facts of one epoch that survive the chief's death, and the answers that wait until a fact does.

    They wait only where another chief may follow: else this one cannot die without its shards.
    """

    def __init__(self, cluster: "Cluster", start: "Start") -> None:
        self._cluster, self._out, self._versions = cluster, cluster.out, cluster.versions
        self._data, self._attachments, self._fence = cluster.data, cluster.attachments, cluster.members.fence
        self._is_needed = cluster.has_successors
        self._line: Line[_Held] = cluster.waiting.line(self._expire)
        self._linger = cluster.timers.timer(self._linger_no_more)
        self._on_its_way: _Record | None = None
        # Ranges of the training data that are done, and that no record has which is kept; and whether one has that there are any.
        self._unkept = list(start.done)
        self._is_data_kept = start.is_data_kept
        # Contributions that are certain although their step is not announced yet.
        self._certain = {entry.push_id for entry in start.counted}

    # -- answers

    def tell(self, call: int, value: ReplyValue, *, push_id: PushId | None, commit: CommitResult | None, now: float) -> None:
        """Gives an answer with the outcome of a contribution: now, or once it is certain."""
        if self._is_certain(push_id, commit):
            self._out.reply(call, value)
            return
        policy = self._cluster.policy
        is_on_its_way = policy.is_complete
        self._hold(call, value, push_id=push_id, is_on_its_way=is_on_its_way, now=now)
        if is_on_its_way or self._on_its_way is not None:
            return
        if policy.num_required > self._cluster.members.num_live_workers:
            # A worker gives several contributions to the step: perhaps this one, which does not continue before it has its answer.
            self.keep(for_all=False)
        else:
            self._linger.set(now + LINGER_S)

    def tell_of_data(self, call: int, value: ReplyValue, *, now: float) -> None:
        """Gives an answer that depends on ranges that are done, or on lasting attachments: once another chief would know them."""
        if not self._is_needed or (self._is_data_kept and not self._unkept and not self._attachments.has_unkept):
            self._out.reply(call, value)
            return
        self._hold(call, value, push_id=None, is_on_its_way=False, now=now)
        self._keep_if_awaited()

    def tell_of_lease(self, call: int, value: ReplyValue, *, now: float) -> None:
        """Gives an answer that depends on which data is leased: when another chief would know that there is any."""
        if self._is_data_kept:
            self._out.reply(call, value)
        else:
            self.tell_of_data(call, value, now=now)

    def if_certain(self, push_id: PushId | None, commit: CommitResult | None) -> CommitResult | None:
        """Returns the outcome of a contribution if it may be reported now, else None: a later request gets it."""
        return commit if self._is_certain(push_id, commit) else None

    def refuse_about(self, push_ids: Collection[PushId], error: PsError) -> None:
        """Refuses all that wait for the outcomes of these contributions with this error."""
        for blocked in self._line:
            if blocked.ask.push_id in push_ids:
                self._line.refuse(blocked.who, error)

    def release(self) -> None:
        """Sends every held answer, since no other chief will follow."""
        for blocked in self._line:
            self._line.answer(blocked.who, blocked.ask.value)

    def refuse(self, error: PsError) -> None:
        """The held answers would be untrue now: all get this error."""
        self._line.refuse_all(error)

    def end(self, error: PsError) -> None:
        """The epoch is over. Calls that still wait get this error."""
        self._linger.clear()
        self._line.refuse_all(error)

    # -- events

    def is_of_interest(self) -> bool:
        """Whether anything depends on which contributions a step is made of."""
        return bool(self._line or self._certain)

    def applied(self, contributors: Sequence[PushId], *, is_held: bool) -> None:
        """All shards have applied these, so they are certain; `is_held`: the step is not announced yet."""
        if not self._is_needed:
            return
        if is_held:
            self._certain.update(contributors)
        elif self._certain:
            self._certain.difference_update(contributors)
        if self._line:
            self._release_what_is_certain(applied=contributors)
        if (len(self._unkept) >= _MAX_UNKEPT or self._attachments.is_record_due) and self._on_its_way is None:
            self.keep(for_all=False)

    def finished_ranges(self, ranges: Iterable[int]) -> None:
        """Ranges of the training data are done."""
        self._unkept += ranges

    def ranges_of_step(self, contributors: Sequence[PushId]) -> tuple[int, ...]:
        """Returns the ranges of the training data that are done with the next step, and those done earlier that no record has."""
        if self._data.spec is None or not self._is_needed:
            return ()
        counted_ranges = self._data.counted_ranges
        return (*self._unkept, *(identity for push_id in contributors for identity in counted_ranges(push_id)))

    # -- records

    def keep(self, *, for_all: bool = True) -> KeepRecord:
        """Has shards replace their record for a successor: all shards, or only the first one, since a successor asks all of them.

        Only all of them hear of new settings.
        """
        policy = self._cluster.policy
        is_for_all = for_all or (self._on_its_way is not None and self._on_its_way.work.is_for_all)
        chosen = [
            replace(one, ranges=self._data.counted_ranges(one.push_id), attached=self._attachments.of(one.push_id))
            for one in policy.counted()
        ]
        record = self._cluster.record(step=policy.step, chosen=chosen)
        settings = self._cluster.settings.newest.for_shards(self._fence)
        work = KeepRecord(fence=self._fence, version=self._versions.next(), settings=settings, record=record, is_for_all=is_for_all)
        self._on_its_way = _Record(
            work=work,
            chosen=tuple(one.push_id for one in chosen),
            num_unkept=len(self._unkept),
            has_data=record.data is not None,
            attached=self._attachments.unkept,
        )
        self._out.add(work)
        return work

    def kept(self, event: Done | Failed) -> None:
        """A record is kept, or cannot be: answers the calls that waited for it, and has the next one kept if a call waits for that."""
        record = self._on_its_way
        if record is None or event.work is not record.work:
            return
        error = event.error if isinstance(event, Failed) else event.result
        if error is not None:  # if a server is not what it should be, the next step shows that, too
            words = f"the parameter servers do not keep what another chief would have to know: {error.message}"
            self._out.note(words, is_warning=True)
        else:  # else the next steps carry it, until the next record is kept
            del self._unkept[: record.num_unkept]
            self._attachments.kept(record.attached)
            self._is_data_kept = self._is_data_kept or record.has_data
        self._on_its_way = None
        self._certain.update(record.chosen)
        self._release_what_is_certain(version=record.work.version)
        self._keep_if_awaited()

    # -- inside

    def _is_certain(self, push_id: PushId | None, commit: CommitResult | None) -> bool:
        if commit is None or not self._is_needed or self._cluster.ending.is_finished:
            return True
        if commit.original_outcome is not PushOutcome.ACCEPTED or commit.applied_step is None or commit.applied_step < self._cluster.step:
            return True
        return push_id in self._certain

    def _hold(self, call: int, value: ReplyValue, *, push_id: PushId | None, is_on_its_way: bool, now: float) -> None:
        version = None if is_on_its_way else self._versions.latest + 1
        self._line.block(call, _Held(value=value, push_id=push_id, version=version), until=now + _RECORD_S)

    def _release_what_is_certain(self, *, version: int = 0, applied: Collection[PushId] = ()) -> None:
        """Gives the answers that are certain now that this record is kept, and these contributions are applied."""
        for blocked in self._line:
            one = blocked.ask
            if (one.version is not None and one.version <= version) or one.push_id in applied or one.push_id in self._certain:
                self._line.answer(blocked.who, one.value)

    def _keep_if_awaited(self) -> None:
        """Has a record kept if a call waits for one and none is on its way."""
        versions = (blocked.ask.version for blocked in self._line)
        if self._on_its_way is None and any(version is not None and version > self._versions.latest for version in versions):
            self.keep(for_all=False)

    def _linger_no_more(self, now: float) -> None:
        if not self._cluster.policy.is_complete:
            self._keep_if_awaited()

    def _expire(self, blocked: Blocked[_Held], now: float) -> None:
        """Ends a call that has waited as long as one may. Its request stays, and the caller gets the answer when it asks again."""
        self._line.refuse(blocked.who, Unavailable(self._cluster.explain(now)))
        self._keep_if_awaited()
