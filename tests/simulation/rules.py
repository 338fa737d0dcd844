"""The promises of each policy about its steps and tokens, checked by separate counts. Knows numbers; no chief, and no other promise."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ps_protocol.model.merging import MergeSpec
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.roles.chief import CommitResult, PushOutcome
from ps_protocol.roles.contribution import PushId

# A live worker: its index, and which of the processes of that index.
Who = tuple[int, int]
# A policy, or a learning rate.
Setting = PolicySpec | float


def weight_of(worker: int) -> float:
    """Returns how much a worker's contributions count in the mean of a step."""
    return 3.0 if worker == 2 else 1.0


def pace_s_of(worker: int) -> float:
    """Returns how long a worker takes for a step of its own: worker 1 the shortest."""
    return 0.5 if worker == 1 else 1.0 + worker


def broken_by_speed(worker: int, speed: float) -> str:
    """Returns how a worker that makes steps of its own is told wrongly how fast they are beside the others'; empty: it is not."""
    possible = {pace_s_of(other) / pace_s_of(worker) for other in range(32)}
    return "" if speed <= 1 and speed in possible else f"P: worker {worker} is {speed} times as fast as the fastest"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRules:
    """The rules of one policy; `num_required` is R, and `min_required` what a step needs at least when workers or data are short.

    `min_if_strict`: the same, if it were strict sync. `num_workers`: T; for each by which R is more, a step has an extra token.
    """

    spec: PolicySpec
    num_workers: int
    num_required: int
    min_required: int
    min_if_strict: int

    def under(self, spec: PolicySpec, *, is_closing: bool = False) -> "PolicyRules":
        """Returns the rules of another policy; `is_closing`: the open step is made of what it has, since one without such steps follows."""
        if spec == self.spec and not is_closing:
            return self
        num_required = spec.replicas_to_aggregate or self.num_required
        least = min(self.min_if_strict, num_required) if spec.needs_many_workers else num_required
        return replace(self, spec=spec, num_required=num_required, min_required=1 if is_closing else least)

    def broken_by_step(
        self,
        step: int,
        contributors: tuple[PushId, ...],
        weights: tuple[float, ...],
        made_at: Mapping[PushId, int],
        counted_under: Mapping[PushId, "Collection[PolicyRules]"],
        *,
        merge: MergeSpec,
    ) -> str:
        """Returns which rule a step breaks, in words; empty: none.

        `made_at`: the step whose variables each was computed from. `counted_under`: the rules that held when a chief was asked to count it;
        what was counted under others before a change goes over as it is.
        """
        former = [rules for push_id in contributors for rules in counted_under.get(push_id, ())]
        if merge not in {rules.spec.merge for rules in (self, *former)}:
            return f"its contributions are merged as {merge}"
        if self.spec.has_common_steps:
            return self._broken_by_common_step(step, contributors, made_at, former)
        if len(contributors) != 1:
            return f"it is made of {len(contributors)} contributions, and each is a step by itself"
        staleness, weight = max(0, step - made_at[contributors[0]]), weights[0] if weights else 1.0
        ordered = [rules for rules in former if not rules.spec.has_common_steps]
        if any(not rules._broken_by_staleness(staleness, weight) for rules in ordered):
            return ""
        return self._broken_by_staleness(staleness, weight)

    def _broken_by_common_step(
        self, step: int, contributors: tuple[PushId, ...], made_at: Mapping[PushId, int], former: "Collection[PolicyRules]"
    ) -> str:
        takes_late = self.spec.accepts_stale or any(rules.spec.accepts_stale for rules in former)
        limits = [rules.spec.max_staleness if rules.spec.accepts_stale else 0 for rules in (self, *former)]
        limit = step if None in limits else max(one for one in limits if one is not None)
        stale = [push_id for push_id in contributors if not step - limit <= made_at[push_id] <= step]
        if stale:
            return f"{stale} were computed from steps {[made_at[push_id] for push_id in stale]}"
        most = max(self.num_required, *(rules.num_required for rules in former)) if former else self.num_required
        # A step that was complete when the policy changed stays so.
        least = min(self.min_required, *(rules.min_required for rules in former)) if former else self.min_required
        if not least <= len(contributors) <= (most if not takes_late else len(contributors)):
            return f"it is made of {len(contributors)} contributions, and R is {most}, at least {least}"
        is_strict = self.spec.tokens is TokenMode.STRICT and all(rules.spec.tokens is TokenMode.STRICT for rules in former)
        num_extras = max(0, most - self.num_workers)
        if is_strict and len({(one.worker, made_at[one]) for one in contributors}) < len(contributors) - num_extras:
            return f"a worker has given two of {contributors}, and there are {num_extras} extra tokens"
        return ""

    def _broken_by_staleness(self, staleness: int, weight: float) -> str:
        limit = self.spec.max_staleness
        excess = 0 if limit is None else max(0, staleness - limit)
        if excess and self.spec.too_stale is TooStale.DROP:
            return f"what it is made of is {staleness} steps old, and the limit is {limit}"
        if weight != (1 / (1 + excess) if excess else 1.0):
            return f"what it is made of is {staleness} steps old and has the weight {weight}; the limit is {limit}"
        return ""

    @property
    def has_own_steps(self) -> bool:
        """Whether a token means that all is applied that its worker has given.

        Not one of the original's queue, nor an extra one, nor one of a worker whose contribution is late: it goes on at once.
        """
        has_extras = self.spec.has_common_steps and self.num_required > self.num_workers
        takes_late = self.spec.has_common_steps and self.spec.accepts_stale
        return self.spec.tokens is TokenMode.STRICT and not has_extras and not takes_late

    @property
    def max_lead(self) -> int | None:
        """By how many contributions a worker may be ahead of the slowest when it goes on; None: any number."""
        return self.spec.staleness if self.spec.name is PolicyName.SSP else None


@dataclass(slots=True)
class _Count:
    """One worker under one chief, in one era: what was counted, by its step, and the most that it may have given."""

    applied_at: list[int] = field(default_factory=list)
    given: set[PushId] = field(default_factory=set)
    base: int = 0

    @property
    def most(self) -> int:
        return self.base + len(self.given)

    def least(self, step: int) -> int:
        return sum(at < step for at in self.applied_at)


class Leads:
    """How far workers are ahead of each other, as far as one can be sure who sees what one chief is asked and answers, in one era."""

    def __init__(self) -> None:
        self._counts: dict[Who, _Count] = {}

    def live(self, who: Collection[Who]) -> None:
        """These live, and no others."""
        for gone in [one for one in self._counts if one not in who]:
            del self._counts[gone]
        base = min((count.most for count in self._counts.values()), default=0)
        for one in who:
            self._counts.setdefault(one, _Count(base=base))

    def gave(self, push_id: PushId) -> None:
        """A worker wants a contribution counted."""
        if (count := self._counts.get((push_id.worker, push_id.incarnation))) is not None:
            count.given.add(push_id)

    def told(self, push_id: PushId, result: CommitResult) -> None:
        """A worker is told that its contribution counts, for the first time."""
        count = self._counts.get((push_id.worker, push_id.incarnation))
        if count is not None and result.outcome is PushOutcome.ACCEPTED and result.applied_step is not None:
            count.applied_at.append(result.applied_step)

    def least_lead(self, who: Who, *, step: int) -> int:
        """Returns by how much a worker is ahead of the slowest at the least, once `step` steps are applied."""
        count = self._counts.get(who)
        return 0 if count is None else count.least(step) - min(one.most for one in self._counts.values())


class Changes:
    """One kind of settings, in one era: which of them may hold at a step, as far as those who asked for changes were told."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, Setting | None]] = {}

    def told(self, value: Setting | None, *, version: int, step: int) -> None:
        """Somebody was told that this holds from a step on; None: another chief need not know what does."""
        self._told[version] = step, value

    def wanted_at(self, step: int) -> Setting | None:
        """Returns what was said last to hold at a step; None: nothing was said that every chief knows."""
        held = [(version, value) for version, (since, value) in self._told.items() if since <= step]
        return max(held, key=lambda one: one[0])[1] if held else None
