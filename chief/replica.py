"""One replica of a shard that has several, and what several of them say taken together. Knows links and statuses; decides no membership."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from chief.shard_calls import TRANSIENT
from chief.shard_links import ShardLink
from ps_protocol.errors import PsError
from ps_protocol.shard import Adoption, ShardStatus

# Whoever does not answer within this, while the other does, is lost.
GRACE_S = 0.7
_PAUSE_S = 0.1


class ReplicaLink(ShardLink, Protocol):
    """One process of several that hold a shard."""

    async def adopt(
        self,
        *,
        epoch: int,
        chief_incarnation: int,
        chief_address: str = "",
        life: int = 0,
        timeout_s: float,
        is_alone: bool = False,
        forgets: bool = False,
    ) -> Adoption:
        """As ShardLink. `is_alone`: the chief counts on this replica only; `forgets`: not on this one, which drops its variables."""


@dataclass(slots=True, eq=False)
class Replica:
    """A process that holds a shard, or shall. `process`: its process incarnation when it was adopted, or met; 0: neither."""

    link: ReplicaLink
    process: int = 0
    missing: str = "it has not been reached yet"

    @property
    def address(self) -> str:
        """Where it is."""
        return self.link.address


@dataclass(slots=True, kw_only=True)
class Finding:
    """What the replicas of one shard say before a chief has them: `best` is the one that has come farthest.

    `is_proven`: no other can have gone on without it. `is_known`: it holds a model.
    """

    best: Replica
    statuses: Mapping[Replica, ShardStatus] = field(default_factory=dict)
    is_proven: bool = True

    @property
    def is_known(self) -> bool:
        """Whether there is a model."""
        return self.statuses[self.best].step is not None

    def status(self) -> ShardStatus:
        """Returns the status of the shard."""
        heard = [status for status in self.statuses.values() if status.chief_incarnation and status.chief_heard_ago_s is not None]
        latest = min(heard, key=lambda status: status.chief_heard_ago_s or 0.0, default=self.statuses[self.best])
        return replace(
            self.statuses[self.best],
            chief_incarnation=max(status.chief_incarnation for status in self.statuses.values()),
            chief_address=latest.chief_address,
            chief_heard_ago_s=latest.chief_heard_ago_s,
        )


def judge(statuses: Mapping[Replica, ShardStatus], failures: Sequence[PsError]) -> Finding:
    """Returns what to make of replicas that no chief has yet. Raises a failure if the one that does not answer may know better.

    One that was counted on alone is enough. Else all must answer: the absent one might have gone on without the others.
    """
    alone = [replica for replica, status in statuses.items() if status.is_alone and status.step is not None]
    if failures and not alone:
        raise failures[0]
    best = max(alone if failures else statuses, key=lambda replica: _age_order(statuses[replica]))
    holders = [status for status in statuses.values() if status.step is not None]
    return Finding(best=best, statuses=statuses, is_proven=best in alone or len(holders) in (0, len(statuses)))


def distrusted(finding: Finding) -> Finding:
    """Returns the finding if nothing can vouch for the one that holds a model: the shard is lost, as the empty one says."""
    empty = next(replica for replica, status in finding.statuses.items() if status.step is None)
    return Finding(best=empty, statuses={empty: finding.statuses[empty]})


async def why_lost(replica: Replica, *, chief_incarnation: int) -> str:
    """Returns why a replica that failed is lost: it does not answer for a while, or is another process; empty: it is there."""
    until = time.monotonic() + GRACE_S
    while True:
        left_s = max(_PAUSE_S, until - time.monotonic())
        try:
            status = await replica.link.status(timeout_s=left_s, chief_incarnation=chief_incarnation)
        except TRANSIENT as error:
            if time.monotonic() + _PAUSE_S >= until:
                return error.message
            await asyncio.sleep(_PAUSE_S)
        except PsError as error:
            return error.message
        else:
            return "" if status.process_incarnation == replica.process else "it was restarted"


def are_equal(adoptions: Mapping[Replica, Adoption], epochs: Mapping[Replica, int]) -> bool:
    """Whether replicas hold the same: nothing, or the same step of the same epoch."""
    held = {(None,) if one.step is None else (one.step, one.layout_hash, epochs[replica]) for replica, one in adoptions.items()}
    return len(held) <= 1


def _age_order(status: ShardStatus) -> tuple[int, int]:
    return status.epoch, -1 if status.step is None else status.step
