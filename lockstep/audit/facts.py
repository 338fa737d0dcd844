"""A history's records, sorted by subject: contributions, what shards held, what the chief counted. Judges none of them."""

from collections.abc import Iterable
from dataclasses import field, replace

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.process.history import Chronicle, Record
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.history import Answered, Applied, Arrived, Configured, Contributed, Counted, Created, StateKept
from ps_protocol.roles.shard import ApplyRequest, PushHeader, ShardSpec

# A contribution belongs to the epoch in which it was sent: servers drop all contributions when another epoch begins.
Sent = tuple[int, PushId]


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One shard's part of a contribution, as its worker was about to send it."""

    header: PushHeader
    content: Array


@light_dataclass(slots=True, kw_only=True)
class ShardLife:
    """One process's copy of a shard in one epoch: how it began, and its records in order.

    A standby that left and returned within one epoch has several.

    `from_epoch`: the epoch whose values at this life's first step it began with (this same epoch where a standby returned in the middle of
    it); None: the values are new. `is_cut`: the beginning is no longer in the history. `records`: the first is that of its creation, its
    restoration or a state, unless the process continued with its values. `applied`: its steps, each with the digest of the values after it;
    `arrived`: the contributions applied on arrival.
    """

    shard: int
    process: int
    spec: ShardSpec
    from_epoch: int | None
    where: str
    is_cut: bool = False
    records: list[Record] = field(default_factory=list)
    applied: list[ApplyRequest] = field(default_factory=list)
    arrived: list[PushId] = field(default_factory=list)

    def take(self, record: Record) -> None:
        """Adds the next record."""
        self.records.append(record)
        match record.event:
            case Applied(request=request):
                self.applied.append(request)
            case Arrived(push_id=push_id):
                self.arrived.append(push_id)


@light_dataclass(slots=True, kw_only=True)
class Facts:
    """All records of all processes, sorted by subject.

    `parts`: the contributions sent, by epoch and push id, then by shard. `lives`: by epoch, shard, process and first step; a shard with a
    standby has several processes. A later life of a process at the same epoch and first step replaces the earlier one. `outcomes` and
    `steps` each with their place. `cut`: processes whose oldest records are no longer there; of these, `sent_from` has for each worker the
    first contribution that is (of the latest process), and `held_from` for each shard epoch and step of the first state.
    """

    parts: dict[Sent, dict[int, Part]] = field(default_factory=dict)
    outcomes: list[tuple[Answered, str]] = field(default_factory=list)
    lives: dict[tuple[int, int, int, int], ShardLife] = field(default_factory=dict)
    steps: list[tuple[Counted, str]] = field(default_factory=list)
    processes: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    sent_from: dict[int, Sent] = field(default_factory=dict)
    held_from: dict[int, tuple[int, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def may_be_cut(self, epoch: int, push_id: PushId) -> bool:
        """Whether a contribution that is not here, or not with all its parts, may have been in records that are gone."""
        first = self.sent_from.get(push_id.worker)
        return first is not None and (epoch, push_id) <= first

    def may_have_applied(self, shard: int | None, epoch: int, step: int) -> bool:
        """Whether a shard (None: any) may have applied a step in records that are gone."""
        firsts = self.held_from.values() if shard is None else [self.held_from.get(shard, (0, 0))]
        return any((epoch, step) < first for first in firsts)


def facts_of(chronicles: Iterable[Chronicle]) -> Facts:
    """Returns the facts."""
    facts = Facts()
    for chronicle in chronicles:
        facts.processes.append(chronicle.name)
        if chronicle.is_torn:
            facts.torn.append(chronicle.name)
        if chronicle.is_cut:
            facts.cut.append(chronicle.name)
            _add_cut(facts, chronicle)
        life: ShardLife | None = None
        for record in chronicle.records:
            life = _add_record(facts, life, record, chronicle)
    return facts


def _add_cut(facts: Facts, chronicle: Chronicle) -> None:
    firsts: dict[int, Sent] = {}
    for event in (record.event for record in chronicle.records):
        if isinstance(event, Contributed):
            firsts.setdefault(event.header.push_id.worker, (event.header.era.epoch, event.header.push_id))
        elif isinstance(event, (Created, StateKept)):
            at = (event.spec.epoch, event.spec.initial_step)
            facts.held_from[event.spec.shard] = max(facts.held_from.get(event.spec.shard, at), at)
            break
    for worker, first in firsts.items():
        facts.sent_from[worker] = max(facts.sent_from.get(worker, first), first)


def _add_record(facts: Facts, life: ShardLife | None, record: Record, chronicle: Chronicle) -> ShardLife | None:
    """Adds one record; returns the life of the process's shard that goes on after it, if it has one."""
    where, event = f"{chronicle.name} record {record.number}", record.event
    match event:
        case Contributed():
            _add_part(facts, event, record.content, where)
        case Answered():
            facts.outcomes.append((event, where))
        case Counted():
            facts.steps.append((event, where))
        case StateKept(from_epoch=None) if life is not None:
            life.take(record)
        case Created(spec=spec) | StateKept(spec=spec):
            from_epoch = event.from_epoch if isinstance(event, StateKept) else None
            is_cut = isinstance(event, StateKept) and from_epoch is None
            life = ShardLife(
                shard=spec.shard, process=event.process, spec=spec, from_epoch=from_epoch, where=where, is_cut=is_cut, records=[record]
            )
            facts.lives[spec.epoch, spec.shard, event.process, spec.initial_step] = life
        case Applied() | Configured() | Arrived() if life is not None:
            life = _continued(facts, life, event, where=where)
            life.take(record)
        case Applied() | Configured() | Arrived():
            facts.problems.append(f"{where}: {type(event).__name__} before {chronicle.role} had any variables")
    return life


def _continued(facts: Facts, life: ShardLife, event: Applied | Configured | Arrived, *, where: str) -> ShardLife:
    """Returns a new life if this is the first record of an epoch in which the server continued with its values and read no checkpoint."""
    match event:
        case Configured(step=step, settings=settings):
            epoch = settings.fence.epoch
        case Applied(request=request):
            epoch, step = request.fence.epoch, request.step
        case Arrived():
            return life
    if epoch <= life.spec.epoch:
        return life
    spec = replace(life.spec, epoch=epoch, initial_step=step)
    later = ShardLife(shard=life.shard, process=life.process, spec=spec, from_epoch=life.spec.epoch, where=where)
    facts.lives[epoch, life.shard, life.process, step] = later
    return later


def _add_part(facts: Facts, event: Contributed, content: Array, where: str) -> None:
    header, shard = event.header, event.shard
    parts = facts.parts.setdefault((header.era.epoch, header.push_id), {})
    before = parts.get(shard)
    if before is not None and before.content.tobytes() != content.tobytes():
        facts.problems.append(f"{where}: push {header.push_id} was sent to ps {shard} with other bytes before")
    parts[shard] = Part(header=header, content=content)
