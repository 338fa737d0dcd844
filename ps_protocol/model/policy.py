"""How a cluster coordinates its workers, as a value: the one knob. Knows names and numbers; decides nothing."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.merging import MEAN, MergeSpec
from ps_protocol.model.shown import shown

MAX_STALENESS = 1 << 31
MAX_GRACE_S = 86_400
MAX_REPLICAS = 100_000
# Initial tokens of the fifo queue: at most MANY_TOKENS and those of so many steps, which the chief checks, since it knows R and T. Those
# beyond the first step's only give gradients that are dropped. MAX_TOKENS is the limit of the largest cluster.
MANY_TOKENS, MANY_STEPS_OF_TOKENS = 1_000, 10
MAX_TOKENS = MANY_TOKENS + MANY_STEPS_OF_TOKENS * MAX_REPLICAS


class PolicyName(enum.Enum):
    """SYNC: a step is the mean of R contributions. SSP: a worker too far ahead of the slowest waits. ASYNC: no worker waits.

    OUTER: sync for contributions that took long to compute: a step waits a while for more than R, and what comes later is in the next one.
    """

    SYNC = 1
    SSP = 2
    ASYNC = 3
    OUTER = 4

    # By identity, which every step needs: the hash of an enum is a function in Python.
    __hash__ = object.__hash__


class TokenMode(enum.Enum):
    """STRICT: a token is always of the open step. FIFO: exactly the queue of tf.compat.v1.train.SyncReplicasOptimizer."""

    STRICT = 1
    FIFO = 2


class TooStale(enum.Enum):
    """The treatment of a contribution beyond `max_staleness`: dropped, or applied with the weight 1 / (1 + staleness - max_staleness)."""

    DROP = 1
    SCALE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy with its numbers; those that it has no use for keep their defaults.

    SYNC: `tokens`, and with FIFO `num_tokens` initial ones (-1: as many as R). `replicas_to_aggregate` (R) and `total_num_replicas` (T):
    None leaves what the chief was started with. SSP: `staleness`, how many contributions a worker may be ahead of the slowest live one.
    ASYNC: `use_locking` (False: servers apply on arrival, without a lock, and concurrent updates may be lost). SSP and locked ASYNC:
    `max_staleness` (None: any) and `too_stale`. OUTER: `grace_s`, for how many seconds a step that has R contributions waits for those of
    the other live workers, and `max_staleness`, by how many steps a contribution may be late. SYNC and OUTER: `merge`, how contributions
    become one gradient.
    """

    name: PolicyName = PolicyName.SYNC
    tokens: TokenMode = TokenMode.STRICT
    num_tokens: int = -1
    replicas_to_aggregate: int | None = None
    total_num_replicas: int | None = None
    staleness: int = 0
    use_locking: bool = True
    max_staleness: int | None = None
    too_stale: TooStale = TooStale.DROP
    grace_s: float = 0.0
    merge: MergeSpec = MEAN

    def __post_init__(self) -> None:
        self._check_kinds()
        for field in ("replicas_to_aggregate", "total_num_replicas"):
            value = getattr(self, field)
            if value is not None and not 1 <= value <= MAX_REPLICAS:
                raise InvalidSpec(f"{field}: got {shown(value)}, want 1 to {MAX_REPLICAS}")
        if not 0 <= self.staleness <= MAX_STALENESS:
            raise InvalidSpec(f"staleness: got {shown(self.staleness)}, want 0 to {MAX_STALENESS}")
        if self.max_staleness is not None and not 0 <= self.max_staleness <= MAX_STALENESS:
            raise InvalidSpec(f"max_staleness: got {shown(self.max_staleness)}, want 0 to {MAX_STALENESS}, or None for any")
        if not -1 <= self.num_tokens <= MAX_TOKENS:
            raise InvalidSpec(f"num_tokens: got {shown(self.num_tokens)}, want -1 (as many as replicas_to_aggregate) to {MAX_TOKENS}")
        if not 0 <= self.grace_s <= MAX_GRACE_S:
            raise InvalidSpec(f"grace_s: got {shown(self.grace_s)}, want 0 to {MAX_GRACE_S} seconds")
        self._check_combination()

    def _check_kinds(self) -> None:
        for field in ("replicas_to_aggregate", "total_num_replicas", "staleness", "max_staleness", "num_tokens"):
            value = getattr(self, field)
            # Not isinstance: a bool is an int, but no number of anything.
            if type(value) is not int and (value is not None or field in ("staleness", "num_tokens")):
                raise InvalidSpec(f"{field}: got {shown(value)}, want a whole number")
        if type(self.grace_s) not in (int, float):
            raise InvalidSpec(f"grace_s: got {shown(self.grace_s)}, want a number of seconds")

    def _check_combination(self) -> None:
        if self.max_staleness is not None and not self.use_locking:
            why = "async without locking applies before anybody can look"
            raise InvalidSpec(f"max_staleness: {why}; use it with ssp, or with async and use_locking=True")
        for field in sorted(PARAMETERS - self.kind.parameters):
            if getattr(self, field) != _DEFAULTS[field]:
                raise InvalidSpec(f"{field}: it is for the policy {users_text(field)}, not {self.kind.text(self)}")

    @property
    def kind(self) -> "PolicyKind":
        """The properties that all policies of this name share."""
        return KINDS[self.name]

    @property
    def text(self) -> str:
        """The policy in a few words, for status and logs: "sync", "sync, fifo tokens", "ssp(2)", "async, unlocked"."""
        words = self.kind.text(self) if self.merge == MEAN else f"{self.kind.text(self)}, {self.merge}"
        if self.max_staleness is None:
            return words
        return f"{words}, {'drops' if self.too_stale is TooStale.DROP else 'scales'} beyond staleness {self.max_staleness}"

    @property
    def has_common_steps(self) -> bool:
        """Whether a step is the mean of several contributions; else each contribution is a step."""
        return KINDS[self.name].has_common_steps

    @property
    def needs_many_workers(self) -> bool:
        """Whether a step that needs R contributions needs as many workers, one contribution of each."""
        return self.tokens is TokenMode.STRICT and KINDS[self.name].has_common_steps

    @property
    def reads_latest(self) -> bool:
        """Whether a worker reads the newest variables there are, rather than exactly those of its local step."""
        return not (self.tokens is TokenMode.STRICT and KINDS[self.name].has_common_steps)

    @property
    def accepts_stale(self) -> bool:
        """Whether shards take contributions of steps gone by."""
        return KINDS[self.name].accepts_stale

    @property
    def applies_on_arrival(self) -> bool:
        """Whether shards apply a contribution as it comes, without the chief's word."""
        return not self.use_locking


@light_dataclass(frozen=True, slots=True, kw_only=True)
class PolicyKind:
    """The policies of one name: which numbers of PolicySpec they have a use for, what they are called, and what a step is made of.

    `has_common_steps`: a step is the mean of several contributions. `accepts_stale`: also of those computed from steps gone by.
    """

    parameters: frozenset[str]
    text: Callable[[PolicySpec], str]
    has_common_steps: bool = False
    accepts_stale: bool = True


def _sync_text(policy: PolicySpec) -> str:
    return "sync" if policy.tokens is TokenMode.STRICT else "sync, fifo tokens"


def _ssp_text(policy: PolicySpec) -> str:
    return f"ssp({policy.staleness})"


def _async_text(policy: PolicySpec) -> str:
    return "async" if policy.use_locking else "async, unlocked"


def _outer_text(policy: PolicySpec) -> str:
    return f"outer, {policy.grace_s:g} s of grace" if policy.grace_s else "outer"


KINDS: Mapping[PolicyName, PolicyKind] = {
    PolicyName.SYNC: PolicyKind(
        parameters=frozenset({"tokens", "num_tokens", "merge"}), text=_sync_text, has_common_steps=True, accepts_stale=False
    ),
    PolicyName.SSP: PolicyKind(parameters=frozenset({"staleness", "max_staleness", "too_stale"}), text=_ssp_text),
    PolicyName.ASYNC: PolicyKind(parameters=frozenset({"use_locking", "max_staleness", "too_stale"}), text=_async_text),
    PolicyName.OUTER: PolicyKind(parameters=frozenset({"grace_s", "max_staleness", "merge"}), text=_outer_text, has_common_steps=True),
}
# The numbers that only some have a use for; R and T are every policy's.
PARAMETERS = frozenset[str]().union(*(kind.parameters for kind in KINDS.values()))
_DEFAULTS = {field.name: field.default for field in fields(PolicySpec)}


def users_text(parameter: str) -> str:
    """Returns the names of the policies that have a use for a number, for example "async, outer and ssp"."""
    *others, last = sorted(name.name.lower() for name, kind in KINDS.items() if parameter in kind.parameters)
    return f"{', '.join(others)} and {last}" if others else last
