"""The parameter servers as the chief knows them: adopted, reachable, restarted. Knows no connection; `now` is an argument."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field

from chief.core.wording import percent, printable, seconds
from ps_protocol.model.layout import Layout
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.shown import format_bytes
from ps_protocol.roles.chief import ServerStatus
from ps_protocol.roles.fence import numbered
from ps_protocol.roles.shard import ShardReport, creation_words, held_bytes


@light_dataclass(slots=True, kw_only=True)
class ShardRecord:
    """One parameter server."""

    index: int
    address: str
    process_incarnation: int = 0
    is_adopted: bool = False
    is_reachable: bool = False
    unreachable_since: float = 0.0
    why: str = ""
    # While it reads a checkpoint: how many bytes it has read, and of how many.
    restoring: tuple[int, int] | None = None
    # The address of its active standby, or why there is none; both empty: no standby is configured.
    standby: str = ""
    standby_missing: str = ""
    # Its latest status.
    report: ShardReport | None = None
    # Earlier processes with this index, which have ended; a late answer may still be about one of them.
    gone: set[int] = field(default_factory=set)
    # The process that was heard of last, and whether it would refuse this chief if a later one had commanded the shards in this life.
    heard: int = 0
    is_witness: bool = False

    def hear_of(self, process_incarnation: int) -> None:
        """Notes which process is there. Another one than before does not know what was commanded meanwhile."""
        self.is_witness = self.is_witness and process_incarnation == self.heard
        self.heard = process_incarnation

    @property
    def name(self) -> str:
        """For example "ps 1 at 10.0.0.4:5000"."""
        return f"ps {self.index} at {self.address}"


class ShardTable:
    """All parameter servers, by index."""

    def __init__(self, addresses: Sequence[str], *, now: float) -> None:
        self.version = 0
        self._records = [ShardRecord(index=index, address=address, unreachable_since=now) for index, address in enumerate(addresses)]
        self._num_adopted = 0

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the shards, by index."""
        return tuple(record.address for record in self._records)

    @property
    def standby_addresses(self) -> tuple[str, ...]:
        """The addresses of active standbys, by index; "" for a shard without one. Empty if the cluster has no standbys."""
        return tuple(record.standby for record in self._records) if self.version else ()

    def held_by(self, index: int, *, address: str, standby: str, missing: str) -> None:
        """Says which servers hold a shard that has a standby. `version` grows when they change; it begins with 0."""
        record = self._records[index]
        if (address, standby) != (record.address, record.standby) or not self.version:
            self.version += 1
        record.address, record.standby, record.standby_missing = address, standby, missing

    def version_under(self, chief_incarnation: int) -> int:
        """Grows when other processes hold the shards, also from one chief to the next; 0: the cluster was given no standbys."""
        return numbered(chief_incarnation, self.version) if self.version else 0

    def miss_standby(self, index: int, *, why: str) -> None:
        """Says why a shard's standby does not go along."""
        self._records[index].standby_missing = why

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> ShardRecord:
        return self._records[index]

    def __iter__(self) -> Iterator[ShardRecord]:
        return iter(self._records)

    @property
    def are_adopted(self) -> bool:
        """Whether all obey this chief."""
        return self._num_adopted == len(self._records)

    @property
    def have_witness(self) -> bool:
        """Whether some process would refuse this chief if a later one had commanded the shards in this life. If not, one may have."""
        return any(record.is_witness for record in self._records)

    def looked_at(self, process_incarnations: Sequence[int]) -> None:
        """Notes the processes that have told this chief which life they are in."""
        for record, process_incarnation in zip(self._records, process_incarnations, strict=True):
            record.heard, record.is_witness = process_incarnation, True

    def doubt(self) -> None:
        """Notes that a command has failed. It is not known which processes it has reached."""
        for record in self._records:
            record.is_witness = False

    def begin_life(self) -> None:
        """Notes that this chief begins another life. No other chief has heard of it."""
        for record in self._records:
            record.is_witness = True

    def adopted(self, index: int, *, process_incarnation: int) -> None:
        """A shard obeys this chief."""
        record = self._records[index]
        record.hear_of(process_incarnation)
        self._num_adopted += not record.is_adopted
        record.is_adopted, record.is_reachable, record.process_incarnation, record.why = True, True, process_incarnation, ""
        record.restoring = None
        if self.are_adopted and self.have_witness:
            # A later chief commands all shards, so that one process which has not refused this chief speaks for the others.
            for one in self._records:
                one.is_witness = True

    def release_all(self) -> None:
        """No shard is adopted any more: all are to be adopted anew."""
        self._num_adopted = 0
        for record in self._records:
            record.is_adopted, record.restoring = False, None

    def seen(self, index: int, *, process_incarnation: int, report: ShardReport) -> bool:
        """A shard answered; True if it is not the process that it was: then it is not adopted any more."""
        record = self._records[index]
        record.is_reachable, record.why = True, ""
        known = record.process_incarnation
        if process_incarnation in record.gone:
            return False
        record.report = report
        record.hear_of(process_incarnation)
        if not known or known == process_incarnation:
            return False
        record.gone.add(known)
        record.process_incarnation = process_incarnation
        self._num_adopted -= record.is_adopted
        record.is_adopted = False
        return True

    def restoring(self, index: int, num_bytes_read: int, num_bytes: int) -> None:
        """A shard reads a checkpoint, and is so far."""
        self._records[index].restoring = num_bytes_read, num_bytes

    def unreachable(self, index: int, *, why: str, now: float) -> None:
        """A shard did not answer."""
        record = self._records[index]
        if record.is_reachable:
            record.is_reachable, record.unreachable_since = False, now
        record.why = printable(why)

    def explain_unreachable(self, now: float) -> list[str]:
        """Says of each shard that does not answer that it does not."""
        return [_silence(record, now) for record in self._records if not record.is_reachable]

    def explain_restoring(self) -> list[str]:
        """Says of each shard that reads a checkpoint how far it is."""
        reading = [(record.name, *record.restoring) for record in self._records if record.restoring is not None and record.restoring[1]]
        return [f"{name} has read {percent(done, total)} of {format_bytes(total)}" for name, done, total in reading]

    def explain_creating(self, layouts: Sequence[Layout]) -> list[str]:
        """Says of each shard that is given first values what it does and how far it is, as it said last; nothing before some are there."""
        pairs = zip(self._records, layouts, strict=True) if layouts else ()
        found = [
            (record, creation_words(layout, record.report.created_bytes))
            for record, layout in pairs
            if record.report is not None and record.report.created_bytes
        ]
        return [f"ps {record.index} {words}: {percent(part, 1)}" for record, (words, part) in found]

    @property
    def restoring_progress(self) -> tuple[int, int] | None:
        """How many bytes of a checkpoint all shards have read together, and of how many; None: none reads one."""
        return _total(record.restoring for record in self._records if record.restoring is not None)

    def creation_progress(self, layouts: Sequence[Layout]) -> tuple[int, int] | None:
        """How many bytes of first values all shards have together, and of how many; None before some have arrived."""
        found = _total(
            (_created(record.report, layout), held_bytes(layout)) for record, layout in zip(self._records, layouts, strict=bool(layouts))
        )
        return found if found is not None and found[0] else None

    @property
    def unreachable_since(self) -> float | None:
        """The time since when some shard has not answered; None if all answer."""
        return min((record.unreachable_since for record in self._records if not record.is_reachable), default=None)

    @property
    def names(self) -> tuple[str, ...]:
        """For example ("ps 0 at 10.0.0.4:5000", …)."""
        return tuple(record.name for record in self._records)

    def links(self, *, step: int | None, layouts: Sequence[Layout]) -> tuple[ServerStatus, ...]:
        """Returns all shards; `step` is the step that all have applied, None before there are variables."""
        return tuple(
            ServerStatus(
                index=record.index,
                address=record.address,
                is_reachable=record.is_reachable,
                step=step,
                arena_bytes=held_bytes(layouts[record.index]) if layouts else 0,
                num_slices=len(layouts[record.index].slices) + len(layouts[record.index].tables) if layouts else 0,
                standby=record.standby,
                standby_missing=record.standby_missing,
                report=record.report,
            )
            for record in self._records
        )


def _created(report: ShardReport | None, layout: Layout) -> int:
    """Returns how much a shard has of its first values. One that has all reports its variables, and no more how far it is."""
    if report is None:
        return 0
    return report.created_bytes or (held_bytes(layout) if report.variables_bytes else 0)


def _total(parts: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    pairs = list(parts)
    return (sum(done for done, _ in pairs), sum(total for _, total in pairs)) if pairs else None


def _silence(record: ShardRecord, now: float) -> str:
    cause = f" ({record.why})" if record.why else ""
    return f"{record.name} has not answered for {seconds(now - record.unreachable_since)}{cause}"
