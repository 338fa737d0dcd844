"""Messages of arrays between participants, over named accumulators on the parameter servers. Knows no replica and no closure.

The name of a mailbox decides which parameter server carries its messages. A message is lost with that server.
"""

import threading

import numpy as np

from ps_protocol.errors import AccumulatorNotFound, Cancelled, InvalidSpec
from ps_protocol.model.variables import Array
from ps_protocol.roles.accumulators import MAX_STEP, shard_of
from worker_client.accumulators import Access, ConditionalAccumulator, open_access
from worker_client.session.observer import Observer
from worker_client.session.session import Session
from worker_client.strategy.messages import HEAD, VECTORS, Message, pack, unpack


class Mailboxes:
    """Sends and receives messages over a participant's cluster. `timeout_s`: for a server that does not answer; None: the participant's.

    Thread-safe.
    """

    def __init__(self, target: Session | Observer, *, timeout_s: float | None = None) -> None:
        self._target, self._timeout_s = target, timeout_s
        self._lock = threading.Lock()
        self._accesses: dict[int, Access] = {}
        # By name, kept: a server remembers the latest calls of each client, and every accumulator object is a client.
        self._heads: dict[str, ConditionalAccumulator] = {}

    def send(self, name: str, message: Message, *, turn: int = 0, again: bool = False) -> None:
        """Sends a message. `again`: it, or another, may have been sent before, in part or whole, and goes away first.

        `turn`: 0 or 1, another one than that of the message before it, which may still be read.
        """
        parts = pack(message, turn=turn)
        if again:
            self.discard(name)
        # The head is sent last: a receiver that has it finds the rest.
        for part in parts.keys() - {HEAD}:
            with self._mailbox(name, part) as mailbox:
                mailbox.apply_grad(parts[part])
        self._head(name).apply_grad(parts[HEAD], MAX_STEP)  # however many have been taken before

    def receive(self, name: str, timeout_s: float) -> Message:
        """Returns the message once it is there, and removes it. Raises DeadlineExceeded; MalformedMessage for parts of several messages."""

        def receive(part: str) -> Array:
            if part == HEAD:
                try:
                    # It is not deleted: it may have the next message by now.
                    return self._head(name).take_grad(1, timeout_s=timeout_s)
                except (AccumulatorNotFound, Cancelled):
                    self._forget(name)
                    raise
            with self._mailbox(name, part) as mailbox:
                # What the head names is there, or has been removed again.
                vector = mailbox.take_grad(1, timeout_s=0.0)
                mailbox.delete()
                return vector

        return unpack(receive)

    def discard(self, name: str) -> None:
        """Removes the message, if it is there."""
        self._forget(name)
        for part in VECTORS:
            with self._mailbox(name, part) as mailbox:
                mailbox.delete()

    def mark(self, name: str) -> None:
        """Counts one more mark of this name."""
        with self._mailbox(name, HEAD) as mailbox:
            mailbox.apply_grad(np.zeros(1))

    def num_marks(self, name: str) -> int:
        """Returns how many marks of this name have been counted."""
        with self._mailbox(name, HEAD) as mailbox:
            return mailbox.num_accumulated()

    def close(self) -> None:
        """Closes the connections; later calls connect again, also if servers have moved. Idempotent."""
        with self._lock:
            accesses, self._accesses, self._heads = self._accesses, {}, {}
        for access in accesses.values():
            access.close()

    def _head(self, name: str) -> ConditionalAccumulator:
        with self._lock:
            found = self._heads.get(name)
        if found is None:
            found = self._mailbox(name, HEAD)
            with self._lock:
                self._heads[name] = found
        return found

    def _forget(self, name: str) -> None:
        with self._lock:
            self._heads.pop(name, None)

    def _mailbox(self, name: str, part: str) -> ConditionalAccumulator:
        """The accumulator for one vector of the messages."""
        num_shards = len(self._target.membership.registration.shard_addresses)
        if not num_shards:
            raise InvalidSpec("messages between workers go over parameter servers, and the cluster has none")
        shard = shard_of(name, num_shards=num_shards)
        with self._lock:
            if shard not in self._accesses:
                self._accesses[shard] = open_access(self._target, name, timeout_s=self._timeout_s)
            access = self._accesses[shard]
        return ConditionalAccumulator(access, VECTORS[part], shared_name=f"{name}/{part}", reduction_type="SUM")
