"""A history's records, sorted by subject: contributions, what shards held, what the chief counted. Judges none of them."""

from collections.abc import Iterable
from dataclasses import field, replace

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.process import history as events
from ps_protocol.process.history import Chronicle, Record
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ApplyRequest, PushHeader, ShardSpec

# A contribution belongs to the epoch in which it was sent: servers drop all contributions when another epoch begins.
Sent = tuple[int, PushId]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One shard's part of a contribution, as its worker was about to send it."""

    header: PushHeader
    content: Array


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a contribution that its worker received."""

    push_id: PushId
    epoch: int
    outcome: str
    applied_step: int | None
    where: str


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CountedStep:
    """A step as a chief counted it."""

    epoch: int
    step: int
    contributors: tuple[PushId, ...]
    chief: int
    where: str


@light_dataclass(slots=True, kw_only=True)
class ShardLife:
    """One process's copy of a shard in one epoch: how it began, and its records in order.

    A standby that left and returned within one epoch has several.

    `from_epoch`: the epoch whose values at this life's first step it began with (this same epoch where a standby returned in the middle of
    it); None: the values are new. `begun`: the record of its creation or restoration; None: the process read nothing and continued with its
    values. `applied`: its steps, each with the digest of the values after it; `arrived`: the contributions applied on arrival, each with
    the step that it made.
    """

    shard: int
    process: int
    spec: ShardSpec
    from_epoch: int | None
    where: str
    begun: Record | None
    records: list[Record] = field(default_factory=list)
    applied: list[tuple[ApplyRequest, str]] = field(default_factory=list)
    arrived: list[tuple[PushId, int]] = field(default_factory=list)

    def take(self, record: Record) -> None:
        """Adds the next record."""
        self.records.append(record)
        if record.kind == events.APPLIED:
            self.applied.append((events.request_of(record), events.text_of(record, "sha256")))
        elif record.kind == events.ARRIVED:
            self.arrived.append((events.push_of(record), events.number_of(record, "step")))


@light_dataclass(slots=True, kw_only=True)
class Facts:
    """All records of all processes, sorted by subject.

    `parts`: the contributions sent, by epoch and push id, then by shard. `lives`: by epoch, shard, process and first step; a shard with a
    standby has several processes. A later life of a process at the same epoch and first step replaces the earlier one.
    """

    parts: dict[Sent, dict[int, Part]] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    lives: dict[tuple[int, int, int, int], ShardLife] = field(default_factory=dict)
    steps: list[CountedStep] = field(default_factory=list)
    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def facts_of(chronicles: Iterable[Chronicle]) -> Facts:
    """Returns the facts. Raises DataLoss if a record lacks a field of its kind."""
    facts = Facts()
    for chronicle in chronicles:
        facts.processes.append(chronicle.name)
        if chronicle.is_torn:
            facts.torn.append(chronicle.name)
        lives: dict[int, ShardLife] = {}
        for record in chronicle.records:
            _add_record(facts, lives, record, where=f"{chronicle.name} record {record.number}")
    return facts


def _add_record(facts: Facts, lives: dict[int, ShardLife], record: Record, *, where: str) -> None:
    match record.kind:
        case events.CONTRIBUTION:
            _add_part(facts, record, where)
        case events.OUTCOME:
            applied = record.words.get("applied_step")
            outcome = Outcome(
                push_id=events.push_of(record),
                epoch=events.number_of(record, "epoch"),
                outcome=events.text_of(record, "outcome"),
                applied_step=applied if isinstance(applied, int) else None,
                where=where,
            )
            facts.outcomes.append(outcome)
        case events.CREATED | events.RESTORED:
            from_epoch = events.number_of(record, "from_epoch") if record.kind == events.RESTORED else None
            spec, process = events.spec_of(record), events.number_of(record, "process")
            life = ShardLife(shard=spec.shard, process=process, spec=spec, from_epoch=from_epoch, where=where, begun=record)
            lives[spec.shard] = facts.lives[spec.epoch, spec.shard, process, spec.initial_step] = life
        case events.APPLIED | events.CONFIGURED | events.ARRIVED:
            shard = events.number_of(record, "shard")
            if shard in lives:
                _begin_life_if_continued(facts, lives, record, shard, where=where)
                lives[shard].take(record)
            else:
                facts.problems.append(f"{where}: {record.kind} before ps {shard} had any variables")
        case events.STEP:
            step = CountedStep(
                epoch=events.number_of(record, "epoch"),
                step=events.number_of(record, "step"),
                contributors=events.contributors_of(record),
                chief=events.number_of(record, "chief"),
                where=where,
            )
            facts.steps.append(step)
        case events.ROLLED_BACK:
            facts.rollbacks.append((events.number_of(record, "epoch"), events.number_of(record, "step")))


def _begin_life_if_continued(facts: Facts, lives: dict[int, ShardLife], record: Record, shard: int, *, where: str) -> None:
    """Begins a new life if this is the first record of an epoch in which the server continued with its values and read no checkpoint."""
    life, epoch, step = lives[shard], 0, 0
    if record.kind == events.CONFIGURED:
        epoch, step = events.settings_of(record).fence.epoch, events.number_of(record, "step")
    elif record.kind == events.APPLIED:
        request = events.request_of(record)
        epoch, step = request.fence.epoch, request.step
    if epoch > life.spec.epoch:
        spec = replace(life.spec, epoch=epoch, initial_step=step)
        later = ShardLife(shard=shard, process=life.process, spec=spec, from_epoch=life.spec.epoch, where=where, begun=None)
        lives[shard] = facts.lives[epoch, shard, life.process, step] = later


def _add_part(facts: Facts, record: Record, where: str) -> None:
    header, shard = events.header_of(record), events.number_of(record, "shard")
    parts = facts.parts.setdefault((header.era.epoch, header.push_id), {})
    before = parts.get(shard)
    if before is not None and before.content.tobytes() != record.content.tobytes():
        facts.problems.append(f"{where}: push {words_of(header.push_id)} was sent to ps {shard} with other bytes before")
    parts[shard] = Part(header=header, content=record.content)


def words_of(push_id: PushId) -> str:
    """Returns a push id as messages show it: worker/incarnation/sequence."""
    return f"{push_id.worker}/{push_id.incarnation}/{push_id.sequence}"
