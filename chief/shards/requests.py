"""Requests to shards for each instruction, and the events that follow from their answers. Plain values; knows no connection."""

import logging
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

from chief.core.messages import ApplyStep, RestoreShards
from ps_protocol.errors import PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.roles.checkpoint import ChiefRecord
from ps_protocol.roles.fence import NOBODY, Fence, joined_keys
from ps_protocol.roles.shard import Adoption, ApplyRequest, RestoreRequest, ShardStatus
from ps_protocol.wire.codec import unpack_record

log = logging.getLogger("lockstep.chief")


def step_requests(step: ApplyStep, *, num_shards: int) -> tuple[ApplyRequest, ...]:
    """Returns each shard's request for a step: the same for all, except the scales of its own slices and the contributions it lacks."""
    if not (step.scales or step.shares or step.without):
        return (step.request,) * num_shards
    each: dict[str, Any] = {"scales": step.scales, "shares": step.shares, "without": step.without}
    return tuple(replace(step.request, **{name: of_all[index] for name, of_all in each.items() if of_all}) for index in range(num_shards))


def restore_requests(work: RestoreShards) -> tuple[RestoreRequest, ...]:
    """Returns each shard's request to go back to a checkpoint."""
    return tuple(
        RestoreRequest(fence=work.fence, spec=spec, tag=work.tag, manifest_sha256=work.manifest_sha256, settings=work.settings)
        for spec in work.specs
    )


def are_of_one_time(before: Sequence[ShardStatus], statuses: Sequence[ShardStatus]) -> bool:
    """Whether all shards are unchanged since the look before.

    Who must wait for the last to answer may know of the first one what is over: it was restarted, and obeys another chief.
    """
    return [_identity(status) for status in before] == [_identity(status) for status in statuses]


def _identity(status: ShardStatus) -> tuple[int, Fence, bool]:
    return status.process_incarnation, status.fence, status.step is None


@light_dataclass(slots=True)
class Authority:
    """Of a chief's latest adoption; NOBODY: it has adopted nothing yet. `ShardWork` changes it in place.

    `session_key`: the chief's own. `session_keys`: that, and those of earlier chiefs of this life that shards have reported.
    """

    session_key: bytes = field(repr=False)
    fence: Fence = NOBODY
    chief_address: str = ""
    session_keys: tuple[bytes, ...] = field(default=(), repr=False)

    def obey(self, fence: Fence) -> None:
        """Everything is commanded by this from now on."""
        if fence.life != self.fence.life:
            self.session_keys = (self.session_key,)
        self.fence = fence

    def learn(self, session_keys: tuple[bytes, ...]) -> None:
        """A shard of this life knows these keys."""
        self.session_keys = joined_keys(self.session_keys, session_keys)


def newest_record(adoptions: Sequence[Adoption]) -> ChiefRecord | None:
    """Returns the newest readable record, or None: a chief can do without, so one that cannot be read is said."""
    kept = sorted((adoption for adoption in adoptions if adoption.record), key=lambda adoption: adoption.record_version, reverse=True)
    for adoption in kept:
        try:
            return unpack_record(adoption.record)
        except PsError as error:
            log.warning("cannot read the record of an earlier chief version=%d cause=%s", adoption.record_version, error.message)
    return None
