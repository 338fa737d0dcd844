"""Brings back replicas that were lost: looks for them, empties those that come again, and has them restored. Decides not when."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence

from chief import events as ev
from chief import recovery_events as rec
from chief.replica import Replica
from chief.replicated_link import ReplicatedLink
from chief.shard_calls import CONTROL_TIMEOUT_S
from ps_protocol.errors import PsError, Unavailable
from ps_protocol.shard import RestoreRequest, ShardStatus

log = logging.getLogger("lockstep.chief")

_LOOK_INTERVAL_S = 0.5
# How often the coordinator is told again of one that waits.
_REMIND_S = 5.0
_POLL_S = 5.0
_RESTORE_TIMEOUT_S = 60.0


class ReplicaReturn:
    """The replicated shards of one chief, by index. Belongs to one event loop.

    `manifest_of` returns the SHA-256 of the manifest of a whole checkpoint.
    """

    def __init__(
        self,
        links: Mapping[int, ReplicatedLink],
        *,
        report: Callable[[ev.Event], None],
        manifest_of: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self.links = links
        self._report = report
        self._manifest_of = manifest_of
        self._clock = clock

    async def watch(self, *, is_paused: Callable[[], bool]) -> None:
        """Looks again and again for replicas that are not counted on, and reports ReplicaReady for those that could be. Does not end."""
        told: dict[Replica, float] = {}
        while True:
            await asyncio.sleep(_LOOK_INTERVAL_S)
            for link in self.links.values():
                for one in [one for one in link.replicas if link.members and one not in link.members]:
                    if is_paused() or self._clock() < told.get(one, 0.0):
                        continue
                    if await self._is_there(link, one):
                        told[one] = self._clock() + _REMIND_S
                        self._report(rec.ReplicaReady(shard=link.index))

    async def bring_back(self, work: rec.BringReplicasBack) -> None:
        """Restores the lost replicas of some shards, at once, and reports ReplicasBack."""
        try:
            sha256 = await asyncio.to_thread(self._manifest_of, work.tag)
        except PsError as error:
            self._report(rec.ReplicasBack(epoch=work.epoch, failures=tuple((shard, error.message) for shard in work.shards)))
            return
        requests = [(self.links[spec.shard], self._request(work, spec.shard, sha256)) for spec in work.specs]
        whys = await asyncio.gather(*(self._bring_back(link, request) for link, request in requests))
        failures = tuple((shard, why) for shard, why in zip(work.shards, whys, strict=True) if why)
        self._report(rec.ReplicasBack(epoch=work.epoch, failures=failures))

    def _request(self, work: rec.BringReplicasBack, shard: int, sha256: str) -> RestoreRequest:
        spec = next(spec for spec in work.specs if spec.shard == shard)
        link = self.links[shard]
        return RestoreRequest(
            chief_incarnation=link.chief_incarnation,
            spec=spec,
            tag=work.tag,
            manifest_sha256=sha256,
            settings=work.settings,
            life=link.life,
        )

    async def _is_there(self, link: ReplicatedLink, one: Replica) -> bool:
        """Whether a process is there that can be brought back; it is empty then: what it held may be older than what the others hold."""
        try:
            status = await one.link.status(timeout_s=CONTROL_TIMEOUT_S)
            async with link.changing:
                is_new = status.process_incarnation != one.process
                if one not in link.members and (is_new or status.step is not None):
                    await one.link.handshake(timeout_s=CONTROL_TIMEOUT_S)
                    await link.join(one, forgets=True)
                    one.process = status.process_incarnation
                    log.info("a lost replica is there again, and empty ps=%d address=%s", link.index, one.address)
        except PsError as error:
            log.debug("a lost replica does not answer ps=%d address=%s cause=%s", link.index, one.address, error.message)
            return False
        return one not in link.members

    async def _bring_back(self, link: ReplicatedLink, request: RestoreRequest) -> str:
        """Returns why it did not succeed; empty: it did."""
        for one in [one for one in link.replicas if one not in link.members]:
            try:
                async with link.changing:
                    await self._restore(link, one, request)
            except PsError as error:
                with contextlib.suppress(PsError):
                    await link.mark_alone()
                log.warning("a replica could not be brought back ps=%d address=%s cause=%s", link.index, one.address, error.message)
                return error.message
        return ""

    async def _restore(self, link: ReplicatedLink, one: Replica, request: RestoreRequest) -> None:
        status = await one.link.status(timeout_s=CONTROL_TIMEOUT_S)
        await link.join(one, forgets=True)
        one.process = status.process_incarnation
        until = self._clock() + _RESTORE_TIMEOUT_S
        while not (await one.link.restore(request, max_wait_s=_POLL_S, timeout_s=_POLL_S + CONTROL_TIMEOUT_S)).is_done:
            if self._clock() > until:
                raise Unavailable(f"it was not brought back within {_RESTORE_TIMEOUT_S:g} s")
        # From here on the others are not counted on alone; they must know before that is so.
        for member in link.members:
            await link.join(member)
        after = await one.link.status(timeout_s=CONTROL_TIMEOUT_S)
        if (after.process_incarnation, after.step) != (one.process, request.spec.initial_step):
            raise Unavailable("it was restarted while it was brought back")
        link.count_on_too(one)


def replicated(links: Sequence[object]) -> dict[int, ReplicatedLink]:
    """Returns those that have several replicas, by index."""
    return {index: link for index, link in enumerate(links) if isinstance(link, ReplicatedLink)}


def trusted(links: Sequence[object], statuses: Sequence[ShardStatus]) -> list[ShardStatus]:
    """Returns what shards say, but that those count as lost for which nothing vouches.

    A standby that holds a model while its other replica is empty may have been left behind long ago. It has not been if a shard that
    cannot have been left behind holds a model too: whether they are at the same step is then looked at as ever.
    """
    known, doubted = list(statuses), [link for link in replicated(links).values() if not link.is_proven]
    if doubted and not any(status.step is not None for status in known if status.shard not in {link.index for link in doubted}):
        for link in doubted:
            log.warning("ps %d: one replica is empty, and the other one may be older; it is not counted on", link.index)
            known[link.index] = link.distrust()
    return known
