"""The options of a cluster's coordination and of its checkpoints, checked. A leaf: knows no flag, policy object or state."""

import dataclasses

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.policy import MANY_STEPS_OF_TOKENS, MANY_TOKENS, PolicySpec, TokenMode
from ps_protocol.process import options
from ps_protocol.roles.checkpoint import Durability, check_tag
from ps_protocol.roles.chief import DEFAULT_POLICY, MAX_LEASE_S, MIN_LEASE_S

MAX_PARTICIPANTS = 100_000
RESTORE_LATEST = options.RESTORE.default
RESTORE_NONE = "none"


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When a cluster that has a place for checkpoints makes them, how many are kept, and which one it begins with.

    With INTERVAL one is made every `interval_s` seconds, and (unless `every_steps` is None) every so many steps; with STEP after each step,
    before it is announced; with NONE only on demand and at the end. Every `full_every`-th has all rows of tables, those between only what
    changed; `keep` full ones stay, with those between. `restore`: "latest", "none", or the tag of one.
    """

    durability: Durability = Durability.INTERVAL
    interval_s: float = options.CHECKPOINT_INTERVAL.default
    every_steps: int | None = None
    full_every: int = options.FULL_EVERY.default
    keep: int = options.KEEP_CHECKPOINTS.default
    restore: str = RESTORE_LATEST

    def __post_init__(self) -> None:
        if isinstance(self.interval_s, bool) or not isinstance(self.interval_s, (int, float)) or not 0.1 <= self.interval_s < 1e9:
            raise InvalidSpec(f"checkpoint interval: got {self.interval_s!r} s, want >= 0.1 s")
        _check_count("checkpoint steps", self.every_steps, limit=1 << 62)
        _check_count("checkpoints from one full one to the next", self.full_every, limit=1_000)
        _check_count("checkpoints kept", self.keep, limit=1_000_000)
        if self.restore not in (RESTORE_LATEST, RESTORE_NONE):
            check_tag(self.restore)


@light_dataclass(frozen=True, slots=True, kw_only=True)
class CoordinationConfig:
    """R is `replicas_to_aggregate`, T is `total_num_replicas`. T None: any number of workers. R None: T, or 1 if that is None too.

    `policy` may have its own R and T, which then hold instead. `min_replicas`: under strict sync, contributions that a step needs at least
    when workers are gone; None: as many as ever. `checkpoints` None: there is no place for them. `reject_nonfinite`: gradients that are not
    finite are refused; else they count as any other.
    """

    cluster: str = "lockstep"
    replicas_to_aggregate: int | None = None
    total_num_replicas: int | None = None
    max_steps: int | None = None
    lease_s: float = options.LEASE.default
    ledger_size: int = 256
    policy: PolicySpec = DEFAULT_POLICY
    min_replicas: int | None = None
    checkpoints: CheckpointConfig | None = None
    reject_nonfinite: bool = False

    def __post_init__(self) -> None:
        if not self.cluster or not self.cluster.isprintable() or self.cluster != self.cluster.strip():
            raise InvalidSpec(f"cluster name: got {self.cluster!r}, want printable characters without a space at either end")
        _check_count("replicas_to_aggregate", self.replicas_to_aggregate, limit=MAX_PARTICIPANTS)
        _check_count("total_num_replicas", self.total_num_replicas, limit=MAX_PARTICIPANTS)
        _check_count("max_steps", self.max_steps, limit=1 << 62)
        _check_count("ledger_size", self.ledger_size, limit=1_000_000)
        _check_count("min_replicas", self.min_replicas, limit=MAX_PARTICIPANTS)
        if isinstance(self.lease_s, bool) or not isinstance(self.lease_s, (int, float)) or not MIN_LEASE_S <= self.lease_s <= MAX_LEASE_S:
            raise InvalidSpec(f"lease: got {self.lease_s!r} s, want {MIN_LEASE_S:g} to {MAX_LEASE_S:g} s")
        self._check_tokens()

    def _check_tokens(self) -> None:
        num_tokens, num_needed = self.policy.num_tokens, self.num_extras
        if self.policy.tokens is not TokenMode.FIFO or num_tokens < 0:
            return
        if num_tokens < num_needed:
            raise InvalidSpec(f"Too few tokens to finish the first step: {num_tokens} (given) vs {num_needed} (needed)")
        most = MANY_TOKENS + MANY_STEPS_OF_TOKENS * self.tokens_per_step
        if num_tokens > most:
            raise InvalidSpec(
                f"num_tokens: got {num_tokens}, want at most {most} where a step queues {self.tokens_per_step}:"
                " each one beyond the first step's gives a gradient that is dropped"
            )

    def with_policy(self, policy: PolicySpec) -> "CoordinationConfig":
        """Returns the same with another policy. Raises InvalidSpec if the two do not go together."""
        return dataclasses.replace(self, policy=policy)

    def with_former_policy(self, policy: PolicySpec) -> "CoordinationConfig":
        """Returns the same with a policy that an earlier chief has left, perhaps one with other options.

        Initial tokens that do not go with these are as many as R: the training that they were for has begun.
        """
        try:
            return self.with_policy(policy)
        except InvalidSpec:
            return self.with_policy(dataclasses.replace(policy, num_tokens=-1))

    @property
    def num_workers(self) -> int | None:
        """Workers expected (T); None: any number."""
        return self.policy.total_num_replicas or self.total_num_replicas

    @property
    def num_required(self) -> int:
        """Contributions that a synchronous step needs (R)."""
        return self.policy.replicas_to_aggregate or self.replicas_to_aggregate or self.num_workers or 1

    @property
    def num_extras(self) -> int:
        """Tokens of a step beyond one for each worker, so that fewer workers than contributions can make it: max(0, R - T)."""
        return max(0, self.num_required - self.num_workers) if self.num_workers else 0

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step puts into the fifo queue: max(T, R), where T is R if it is not given."""
        return max(self.num_required, self.num_workers or 0)

    @property
    def num_initial_tokens(self) -> int:
        """Tokens that the fifo queue begins with: as many as R, unless a number is given."""
        return self.policy.num_tokens if self.policy.num_tokens >= 0 else self.num_required

    @property
    def max_staged_per_worker(self) -> int:
        """Contributions that a server keeps of one worker: what a step may take from it under any policy, a late and a repeated one."""
        return self.num_required + 2


def _check_count(name: str, value: object, *, limit: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidSpec(f"{name}: got {value!r}, want an integer >= 1")
    if not 1 <= value <= limit:
        raise InvalidSpec(f"{name}: got {value}, want >= 1" + (f" and <= {limit}" if value > limit else ""))
