"""Calls to parameter servers that are repeated, with jittered pauses, until there is an answer. Knows when each answered; decides nothing.

Each call made this way may be sent twice. A server that does not answer is reported, and logged: after a second, and then every 10 s.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from chief.core import messages as ev
from chief.core.wording import seconds
from chief.shards.link import ShardLink
from ps_protocol.errors import Cancelled, DeadlineExceeded, EpochMismatch, PsError, ShuttingDown, Unavailable
from ps_protocol.process.waiting import FIRST_NOTICE_S, NOTICE_INTERVAL_S
from ps_protocol.roles.shard import ShardStatus, ShardStatusRequest

log = logging.getLogger("lockstep.chief")

TRANSIENT = (Unavailable, DeadlineExceeded, ShuttingDown, Cancelled)
# Short, so that the first line about an absent shard is logged within 2 s.
CONTROL_TIMEOUT_S = 1.5
# Checked between two attempts, each of which may take as long as that, so the line is logged in time.
_FIRST_NOTICE_S = FIRST_NOTICE_S / 2

Result = TypeVar("Result")


class Pace(Protocol):
    """The clock of coroutines that call shards: that of an event loop, none, or a simulated one."""

    def now(self) -> float:
        """Returns a monotonic time in seconds."""

    def pauses(self) -> Iterator[float] | None:
        """Returns the pauses between the repetitions of a call; None: repeating is of no use."""

    async def sleep(self, seconds: float) -> None:
        """Lets time pass."""

    async def together(self, calls: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Runs several calls at once, and returns their results, in order; the first error ends all of them."""

    async def at_storage(self, work: Callable[[], Result]) -> Result:
        """Does something that blocks on storage, one thing at a time."""


class ShardCalls:
    """The links of one chief. `report` takes the events."""

    def __init__(self, links: Sequence[ShardLink], *, report: Callable[[ev.Event], None], pace: Pace) -> None:
        self.links = tuple(links)
        self.report = report
        self.pace = pace
        self._heard_at = [0.0] * len(self.links)
        self._processes: dict[int, int] = {}  # that have been adopted

    def __len__(self) -> int:
        return len(self.links)

    def heard(self, index: int) -> None:
        """A shard has answered. Thread-safe."""
        self._heard_at[index] = self.pace.now()

    def heard_all(self) -> None:
        """All shards have just answered another caller, so they need not be checked. Thread-safe."""
        self._heard_at[:] = [self.pace.now()] * len(self.links)

    def silence_s(self, index: int) -> float:
        """For how long a shard was not heard."""
        return self.pace.now() - self._heard_at[index]

    def adopted(self, index: int, *, process_incarnation: int) -> None:
        """Makes this process the one that repeated calls go to."""
        self._processes[index] = process_incarnation

    async def check_process(self, index: int) -> None:
        """Raises EpochMismatch if another process is at the address of the adopted one."""
        status = await self.links[index].call(ShardStatusRequest(), timeout_s=CONTROL_TIMEOUT_S)
        if status.process_incarnation != self._processes.get(index, status.process_incarnation):
            raise EpochMismatch(f"{self.name(index)} is another process than this chief adopted")

    def name(self, index: int) -> str:
        """For example "ps 1 at 10.0.0.4:5000"."""
        return f"ps {index} at {self.links[index].address}"

    def cause(self, index: int, error: PsError) -> str:
        """Returns why a shard does not answer; the caller adds which shard."""
        if isinstance(error, DeadlineExceeded):
            return "no answer; is it stopped, busy, or cut off?"
        return error.message.removeprefix(f"cannot reach {self.name(index)}: ")

    def may_pass(self, index: int, error: PsError) -> bool:
        """Whether a failure of a call may pass. At a shard that was adopted also that something answers there with another certificate."""
        return isinstance(error, TRANSIENT) or (index in self._processes and error.facts.get("failed") == "connection")

    async def look_at(self, index: int) -> ShardStatus:
        """Waits until a shard is reached, and returns its status. Raises PsError if it is another process than expected."""
        link = self.links[index]
        reply = await self.insist(index, lambda: link.handshake(timeout_s=CONTROL_TIMEOUT_S))
        if reply.warning:
            log.warning("%s ps=%d", reply.warning, index)
        return await self.insist(index, lambda: link.call(ShardStatusRequest(), timeout_s=CONTROL_TIMEOUT_S))

    async def insist(self, index: int, call: Callable[[], Awaitable[Result]]) -> Result:
        """Calls until there is an answer. Raises PsError if it is a refusal."""
        start, notice_s = self.pace.now(), _FIRST_NOTICE_S
        pauses: Iterator[float] | None = None
        while True:
            try:
                result = await call()
            except PsError as error:
                pauses = pauses or self.pace.pauses()
                if pauses is None or not self.may_pass(index, error):
                    raise
                waited_s = self.pace.now() - start
                self.report(ev.ShardUnreachable(shard=index, why=self.cause(index, error)))
                if waited_s >= notice_s:
                    notice_s = waited_s + NOTICE_INTERVAL_S
                    log.warning("waiting for %s for %s cause=%s", self.name(index), seconds(waited_s), self.cause(index, error))
                await self.pace.sleep(next(pauses))
            else:
                self.heard(index)
                return result

    async def at_all(self, call: Callable[[int], Coroutine[Any, Any, Result]]) -> list[Result]:
        """Runs a call for all shards at once, and returns the results, by index; the first error ends all of them."""
        if len(self.links) == 1:
            return [await call(0)]  # needs no task of its own
        return await self.pace.together([call(index) for index in range(len(self.links))])
