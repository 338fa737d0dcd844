"""How a cluster coordinates its steps: the options that the coordinator decides by, checked. Knows no flag, file or environment."""

from dataclasses import dataclass

from ps_protocol.errors import InvalidSpec

MAX_PARTICIPANTS = 100_000
DEFAULT_LEASE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinationConfig:
    """R is `replicas_to_aggregate`, T is `total_num_replicas`. T None: any number of workers. R None: T, or 1 if that is None too."""

    cluster: str = "lockstep"
    replicas_to_aggregate: int | None = None
    total_num_replicas: int | None = None
    max_steps: int | None = None
    lease_s: float = DEFAULT_LEASE_S
    ledger_size: int = 256

    def __post_init__(self) -> None:
        if not self.cluster or not self.cluster.isprintable() or self.cluster != self.cluster.strip():
            raise InvalidSpec(f"cluster name: got {self.cluster!r}, want printable characters without a space at either end")
        _check_count("replicas_to_aggregate", self.replicas_to_aggregate, limit=MAX_PARTICIPANTS)
        _check_count("total_num_replicas", self.total_num_replicas, limit=MAX_PARTICIPANTS)
        _check_count("max_steps", self.max_steps, limit=1 << 62)
        _check_count("ledger_size", self.ledger_size, limit=1_000_000)
        if isinstance(self.lease_s, bool) or not isinstance(self.lease_s, (int, float)) or not self.lease_s >= 0.1:
            raise InvalidSpec(f"lease: got {self.lease_s!r} s, want >= 0.1 s")

    @property
    def num_required(self) -> int:
        """Contributions that a step needs (R)."""
        return self.replicas_to_aggregate or self.total_num_replicas or 1

    @property
    def num_extras(self) -> int:
        """Tokens of a step beyond one for each worker, so that fewer workers than contributions can make it: max(0, R - T)."""
        return max(0, self.num_required - self.total_num_replicas) if self.total_num_replicas else 0


def _check_count(name: str, value: object, *, limit: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidSpec(f"{name}: got {value!r}, want an integer >= 1")
    if not 1 <= value <= limit:
        raise InvalidSpec(f"{name}: got {value}, want >= 1" + (f" and <= {limit}" if value > limit else ""))
