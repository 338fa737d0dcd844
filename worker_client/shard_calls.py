"""How calls reach a model's shards: all at once, repeated while a server does not answer. Knows connections; no memory and no model."""

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from ps_protocol import retry
from ps_protocol.chief import Registration
from ps_protocol.shard import Shard
from worker_client.bounded import run_bounded
from worker_client.cluster_link import ClusterLink
from worker_client.fan_out import FanOut
from worker_client.replicated_shard import ReplicatedShard
from worker_client.shard_places import ShardPlaces

Result = TypeVar("Result")

# A transfer gets this much longer than a call without a payload, so that a large model needs no larger timeout.
SLOWEST_BYTES_PER_S = 10e6
CLOSE_WAIT_S = 0.25


class ShardCalls:
    """Connections to all shards, by index, opened when it is made. The errors of several shards end as that of the first of them.

    `shards`: what each is called by, its owner's to replace. `ask_again` tells where shards are that have standbys. For one thread.
    """

    def __init__(self, link: ClusterLink, registration: Registration, *, ask_again: Callable[[int], Registration] | None) -> None:
        self._link = link
        # Where the shards are, if they have standbys: then that changes, and `ask_again` tells where to.
        self._places = ShardPlaces(registration, ask_again=ask_again) if registration.shards_version and ask_again is not None else None
        self._timeout_s = link.timeout_s
        self.addresses = registration.shard_addresses
        name = f"lockstep-{registration.participant.index}-ps"
        self._fan_out = FanOut(len(self.addresses), name=name, is_parallel=not link.is_in_process)
        self._closed = threading.Event()
        self.shards: list[Shard] = []
        try:
            self._open(link)
        except BaseException:
            self._fan_out.close()
            raise

    def _open(self, link: ClusterLink) -> None:
        def opening(index: int, address: str) -> Callable[[], Shard]:
            if (places := self._places) is not None:
                return lambda: ReplicatedShard(index, places, open_replica=link.open_replica or link.open_shard)
            return lambda: link.open_shard(index, address)

        opened = self._fan_out.run([opening(index, address) for index, address in enumerate(self.addresses)])
        self.shards = [shard for shard in opened if shard is not None]

    def hear(self) -> None:
        """Asks the chief where the shards are now, if they have standbys."""
        if self._places is not None:
            self._places.hear(self._places.version, is_urgent=True)

    def each(self, what: str, call: Callable[[int, Shard, float], Result], *, num_bytes: Sequence[int] | None = None) -> list[Result]:
        """Returns the results of `call(index, shard, timeout_s)` for all shards at once; `num_bytes` is what each transfers."""
        results = self.some(what, call, range(len(self.addresses)), num_bytes=num_bytes)
        return [results[index] for index in range(len(self.addresses))]

    def some(
        self, what: str, call: Callable[[int, Shard, float], Result], indices: Collection[int], *, num_bytes: Sequence[int] | None = None
    ) -> dict[int, Result]:
        """Does the same for some of them; returns the results by index."""
        if len(self.addresses) == 1:
            return {0: self._at(0, what, call, num_bytes)} if indices else {}
        calls = [partial(self._at, index, what, call, num_bytes) if index in indices else None for index in range(len(self.addresses))]
        results = self._fan_out.run(calls)
        return {index: results[index] for index in indices}  # type: ignore[misc]  # those have a call

    def one(self, index: int, what: str, call: Callable[[float], Result], *, transfer_s: float = 0.0) -> Result:
        """Returns `call(timeout_s)`, a call of one shard; `transfer_s`: how much longer it may take for what it transfers."""
        address = self.addresses[index] if self._places is None else self._places.addresses(index)[0]
        subject = f"ps {index} at {address}: {what}"
        with self._link.watching(subject, expected_s=transfer_s):
            return retry.call(call, what=subject, timeout_s=self._timeout_s + transfer_s, stop=self._closed)

    def _at(self, index: int, what: str, call: Callable[[int, Shard, float], Result], num_bytes: Sequence[int] | None) -> Result:
        transfer_s = num_bytes[index] / SLOWEST_BYTES_PER_S if num_bytes else 0.0
        return self.one(index, what, partial(call, index, self.shards[index]), transfer_s=transfer_s)

    def give_up(self) -> None:
        """Has all calls end as Cancelled, also one that hangs at a server that is gone. May come from any thread."""
        self._closed.set()
        run_bounded([shard.close for shard in self.shards], name="lockstep-close", timeout_s=CLOSE_WAIT_S)

    def close(self) -> None:
        """Releases the connections, which ends calls under way. Takes a quarter of a second at most."""
        self._closed.set()
        self._fan_out.close()
        if self._places is not None:
            self._places.close()
        # A channel closes only when its last write has left, and a server that is stopped does not take it.
        run_bounded([shard.close for shard in self.shards], name="lockstep-close", timeout_s=CLOSE_WAIT_S)
