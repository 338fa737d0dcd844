"""Checks that a history is consistent: each contribution in at most one step, the same steps everywhere, and true answers to workers.

Knows facts; reads no array.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field

from lockstep.audit.facts import Facts, Sent, ShardLife
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.history import Answered
from ps_protocol.roles.shard import MAX_STEP

Contributors = tuple[PushId, ...]
_REFUSED = ("STALE", "LATE")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One epoch: its first step, the epoch whose checkpoint it began from (None: none), and the contributors of its steps.

    `arrived`: by shard, the contributions applied on arrival; such an epoch has no steps that shards have in common.
    """

    first_step: int
    parent: int | None
    steps: Mapping[int, Contributors]
    arrived: Mapping[int, frozenset[PushId]] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        """The number of its steps; where shards have no steps in common, the largest number that one shard made."""
        return max([len(self.steps), *map(len, self.arrived.values())])


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """The epochs, all problems, and the numbers of contributions that were applied, rolled back, refused, or are in no step."""

    epochs: Mapping[int, Epoch]
    problems: tuple[str, ...]
    counts: Mapping[str, int]


def check_books(facts: Facts) -> Books:
    """Returns the books, with every problem found in them."""
    problems = list(facts.problems)
    epochs = {number: _epoch(facts, number, problems) for number in sorted({number for number, *_ in facts.lives})}
    for number in epochs:
        problems += _applied_twice(epochs, number)
    problems += _wrong_counts(facts, epochs)
    problems += _wrong_outcomes(facts, epochs)
    problems += _unknown_pushes(facts, epochs)
    return Books(epochs=epochs, problems=tuple(problems), counts=_counts(facts, epochs))


def lineage(epochs: Mapping[int, Epoch], number: int) -> dict[int, Contributors]:
    """Returns all steps that led to an epoch's values: its own, and those of earlier epochs up to the step that it began with."""
    steps: dict[int, Contributors] = {}
    at, below = epochs.get(number), None
    while at is not None:
        steps |= {step: made for step, made in at.steps.items() if below is None or step < below}
        below = at.first_step if below is None else min(below, at.first_step)
        at = epochs.get(at.parent) if at.parent is not None else None
    return steps


def _epoch(facts: Facts, number: int, problems: list[str]) -> Epoch:
    lives = [life for (epoch, *_), life in sorted(facts.lives.items(), key=_key) if epoch == number]
    # Standbys that returned in the middle of the epoch began later.
    first_lives = [life for life in lives if life.from_epoch != number and not life.is_cut]
    firsts, parents = {life.spec.initial_step for life in first_lives}, {life.from_epoch for life in first_lives}
    if len(firsts) > 1 or len(parents) > 1:
        problems.append(f"epoch {number}: servers begin it at steps {sorted(firsts)}, from epochs {sorted(map(str, parents))}")
    steps: dict[int, Contributors] = {}
    weights: dict[int, tuple[float, ...]] = {}
    for life in lives:
        at = life.spec.initial_step
        for request in life.applied:
            step, made = request.step, request.contributors
            if step != at:
                problems.append(f"{life.where}: ps {life.shard} applied step {step} of epoch {number} when it was at step {at}")
            if steps.setdefault(step, made) != made:
                other = ", ".join(map(str, steps[step]))
                problems.append(f"epoch {number} step {step}: ps {life.shard} applied {', '.join(map(str, made))}, another server {other}")
            if weights.setdefault(step, request.weights) != request.weights:
                problems.append(f"epoch {number} step {step}: ps {life.shard} weighted it {request.weights}, another {weights[step]}")
            at = step + 1
    parent = max((one for one in parents if one is not None), default=None)
    first_step = min(firsts or {life.spec.initial_step for life in lives}, default=0)
    return Epoch(first_step=first_step, parent=parent, steps=steps, arrived=_arrived(lives, number, problems))


def _arrived(lives: list[ShardLife], number: int, problems: list[str]) -> dict[int, frozenset[PushId]]:
    if not any(life.arrived for life in lives):
        return {}
    arrived: dict[int, frozenset[PushId]] = {}
    for life in lives:
        given = Counter(life.arrived)
        twice = [push_id for push_id, count in given.items() if count > 1]
        problems += [f"{life.where}: ps {life.shard} applied push {push_id} of epoch {number} twice" for push_id in twice]
        arrived[life.shard] = arrived.get(life.shard, frozenset()) | given.keys()
    return arrived


def _key(item: tuple[tuple[int, int, int, int], ShardLife]) -> tuple[int, int, int, int]:
    number, shard, process, first_step = item[0]
    return number, shard, first_step, process


def _applied_twice(epochs: Mapping[int, Epoch], number: int) -> Iterator[str]:
    where: dict[PushId, int] = {}
    for step, made in sorted(lineage(epochs, number).items()):
        for push_id in made:
            if push_id in where:
                yield f"epoch {number}: push {push_id} is in step {where[push_id]} and in step {step}"
            where[push_id] = step


def _wrong_counts(facts: Facts, epochs: Mapping[int, Epoch]) -> Iterator[str]:
    """Yields each step that a chief counted and a server has not applied, or that two chiefs counted with different contributions."""
    known: dict[tuple[int, int], Contributors] = {}
    # By epoch, then by shard: the steps that a server of the shard has applied; None: contributions were applied on arrival.
    applied: dict[int, dict[int, set[int] | None]] = {}
    for (number, shard, *_), life in facts.lives.items():
        steps = applied.setdefault(number, {}).setdefault(shard, set())
        if life.arrived or steps is None:
            applied[number][shard] = None
        else:
            steps.update(request.step for request in life.applied)
    for counted, where in facts.steps:
        number, step = counted.epoch, counted.step
        if known.setdefault((number, step), counted.contributors) != counted.contributors:
            yield f"{where}: step {step} of epoch {number} was counted before, with other contributions"
        made = epochs[number].steps.get(step) if number in epochs else None
        if made != counted.contributors and not (made is None and facts.may_have_applied(None, number, step)):
            yield f"{where}: step {step} of epoch {number} was counted, and the servers applied {made}"
        for shard, steps in sorted(applied.get(number, {}).items()):
            if steps is not None and step not in steps and not facts.may_have_applied(shard, number, step):
                yield f"{where}: step {step} of epoch {number} was counted, and ps {shard} has not applied it"


def _wrong_outcomes(facts: Facts, epochs: Mapping[int, Epoch]) -> Iterator[str]:
    made_of = {number: lineage(epochs, number) for number in {reply.epoch for reply, _ in facts.outcomes}}
    where = {number: {push_id: step for step, made in steps.items() for push_id in made} for number, steps in made_of.items()}
    for reply, said in facts.outcomes:
        if (epoch := epochs.get(reply.epoch)) is not None and epoch.arrived:
            yield from _wrong_outcome_on_arrival(facts, reply, epoch, said)
            continue
        steps, applied = made_of[reply.epoch], where[reply.epoch].get(reply.push_id)
        if reply.outcome == "ACCEPTED" and applied is not None and reply.applied_step is not None and applied != reply.applied_step:
            yield f"{said}: push {reply.push_id} was accepted for step {reply.applied_step}, and is in step {applied}"
        if reply.outcome == "ACCEPTED" and applied is None and reply.applied_step in steps:
            yield f"{said}: push {reply.push_id} was accepted for step {reply.applied_step}, which is made without it"
        if reply.outcome in _REFUSED and applied is not None:
            yield f"{said}: push {reply.push_id} was reported as {reply.outcome}, and is in step {applied}"


def _wrong_outcome_on_arrival(facts: Facts, reply: Answered, epoch: Epoch, said: str) -> Iterator[str]:
    """Compares an outcome with what shards applied on arrival. The chief numbers these steps by itself, so numbers are not compared."""
    for shard, arrived in sorted(epoch.arrived.items()):
        if reply.outcome == "ACCEPTED" and reply.push_id not in arrived and not facts.may_have_applied(shard, reply.epoch, -1):
            yield f"{said}: push {reply.push_id} was accepted, and ps {shard} never applied it"
        if reply.outcome in _REFUSED and reply.push_id in arrived:
            yield f"{said}: push {reply.push_id} was reported as {reply.outcome}, and ps {shard} applied it"


def _unknown_pushes(facts: Facts, epochs: Mapping[int, Epoch]) -> Iterator[str]:
    for number, epoch in epochs.items():
        for step, made in epoch.steps.items():
            for push_id in made:
                if not _was_sent(facts, number, push_id) and not _was_never_sent(facts, number, step, push_id):
                    yield f"epoch {number} step {step}: no worker recorded that it sent push {push_id}"
        for push_id in sorted(frozenset[PushId]().union(*epoch.arrived.values())):
            if not _was_sent(facts, number, push_id):
                yield f"epoch {number}: no worker recorded that it sent push {push_id}"


def _was_sent(facts: Facts, number: int, push_id: PushId) -> bool:
    return (number, push_id) in facts.parts or facts.may_be_cut(number, push_id)


def _was_never_sent(facts: Facts, number: int, step: int, push_id: PushId) -> bool:
    """Whether all servers applied a step without a contribution that it names: it was committed and never sent."""
    lives = [life for (epoch, *_), life in facts.lives.items() if epoch == number]
    return all(push_id in request.without for life in lives for request in life.applied if request.step == step)


def _sent_in_lineage(epochs: Mapping[int, Epoch]) -> set[Sent]:
    """Returns the contributions that led to the final values."""
    number: int | None = max(epochs, default=None)
    sent: set[Sent] = set()
    below = MAX_STEP
    while number is not None and number in epochs:
        epoch = epochs[number]
        sent |= {(number, push_id) for step, made in epoch.steps.items() if step < below for push_id in made}
        if number == max(epochs):  # for earlier epochs, no record says how many of them a checkpoint had
            sent |= {(number, push_id) for arrived in epoch.arrived.values() for push_id in arrived}
        number, below = epoch.parent, min(below, epoch.first_step)
    return sent


def _counts(facts: Facts, epochs: Mapping[int, Epoch]) -> Mapping[str, int]:
    """Counts each contribution once: in the final values, lost with a rollback, refused, or in no step."""
    counts: Counter[str] = Counter()
    last = _sent_in_lineage(epochs)
    made_in = [(number, made) for number, epoch in epochs.items() for made in (*epoch.steps.values(), *epoch.arrived.values())]
    ever = {(number, push_id) for number, made in made_in for push_id in made}
    refused = {(reply.epoch, reply.push_id) for reply, _ in facts.outcomes if reply.outcome in _REFUSED}
    for sent, parts in facts.parts.items():
        step = next(iter(parts.values())).header.step
        if facts.may_have_applied(None, sent[0], step):
            counts["sent before the first kept values"] += 1
        elif sent in ever:
            counts["applied" if sent in last else "rolled back"] += 1
        elif sent in refused:
            counts["stale or late"] += 1
        else:
            counts["in no step"] += 1
    return counts
