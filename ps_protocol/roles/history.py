"""What processes note in their histories, as values; `lockstep audit` reads them. `content` below: bytes that go with an event."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol, TypeAlias

from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import Array
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ApplyRequest, HiddenState, PushHeader, ShardSettings, ShardSpec


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A file begins: the process's `segment`-th, from 1."""

    format: int
    role: str
    pid: int
    segment: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Contributed:
    """A worker is about to send a contribution to one shard; content: its bytes. Noted first, so that all that is applied is known."""

    shard: int
    header: PushHeader


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A worker was told the outcome of its contribution: the name of a PushOutcome."""

    push_id: PushId
    epoch: int
    outcome: str
    applied_step: int | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """A shard has its first values; content: the arena, then those tables that have no initializer, as they were sent."""

    spec: ShardSpec
    process: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StateKept:
    """All that a shard's next steps depend on; content: its tensors in order. `hidden`: its numbers.

    `spec` has the epoch and step of the state. `from_epoch`: it is that of a checkpoint saved in this epoch; None: it is the shard's own,
    kept so that what came before need not be.
    """

    spec: ShardSpec
    settings: ShardSettings
    process: int
    hidden: HiddenState
    from_epoch: int | None = None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A shard has other settings from now on; `step` is its open step."""

    step: int
    settings: ShardSettings


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A shard has applied a step, which is not announced yet; `sha256` is the digest of its variables."""

    request: ApplyRequest
    sha256: str


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A shard has applied a contribution as it came."""

    push_id: PushId
    epoch: int


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """All shards have applied a step, as the chief counts it before it is announced."""

    epoch: int
    step: int
    contributors: tuple[PushId, ...]


Event: TypeAlias = Begun | Contributed | Answered | Created | StateKept | Configured | Applied | Arrived | Counted


class History(Protocol):
    """Takes events, in order."""

    def write(self, event: Event, pieces: Iterable[Array] = ()) -> None:
        """Appends one event; `pieces` are arrays, whose bytes are its content."""


def contributed(header: PushHeader, *, shard: int) -> Contributed:
    """Returns the event of a contribution, without the worker's secret."""
    return Contributed(shard=shard, header=replace(header, secret=0))
