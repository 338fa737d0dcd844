"""A participant's place in its cluster, from registration to leaving. Knows the link, the lease and the process; no model and no step."""

import os

from ps_protocol.chief import ClusterStatus, Registration
from worker_client.cluster_link import ClusterLink
from worker_client.departure import leave
from worker_client.heartbeat import Heartbeat
from worker_client.shard_group import ShardGroup


class Membership:
    """Keeps the lease until it is left. `what` names the holder in errors, `renewal` how to get another."""

    def __init__(self, link: ClusterLink, registration: Registration, *, what: str, renewal: str) -> None:
        self.link = link
        self.registration = registration
        self.participant = registration.participant
        self._what = what
        self._renewal = renewal
        self._shards: ShardGroup | None = None
        self._is_closed = False
        self._process_id = os.getpid()
        self._heartbeat: Heartbeat | None = None
        if not link.is_in_process:
            self._heartbeat = Heartbeat(link.chief, self.participant, lease_s=registration.lease_s)
            self._heartbeat.start()

    @property
    def is_finished(self) -> bool:
        """Whether the chief has said with a heartbeat that training is finished."""
        return self._heartbeat is not None and self._heartbeat.is_finished

    def shards(self) -> ShardGroup:
        """Returns the connections to all shards; opens them when first asked."""
        if self._shards is None:
            self._shards = ShardGroup(self.link, self.registration)
        return self._shards

    def status(self, *, max_ledger_entries: int) -> ClusterStatus:
        """Returns the chief's report."""
        self.check_open()
        return self.link.ask(lambda chief: chief.status(max_ledger_entries=max_ledger_entries), what="status")

    def applies_on_arrival(self) -> bool:
        """Asks the chief whether shards apply each contribution at once and without a lock, so that they have no common steps."""
        return "unlocked" in self.status(max_ledger_entries=0).policy

    def leave(self, failure: str) -> None:
        """Ends the lease and all connections, in at most 2 s. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        # A forked child has the parent's place, not its threads; leaving would end the parent's lease.
        if os.getpid() == self._process_id:
            leave(self.link, self.participant, heartbeat=self._heartbeat, shards=self._shards, failure=failure)

    def check_open(self) -> None:
        """Raises RuntimeError once it is left, and in a forked child."""
        if self._is_closed:
            raise RuntimeError(f"{self._what} is closed; open a new one with {self._renewal}")
        if os.getpid() != self._process_id:
            raise RuntimeError(f"{self._what} belongs to process {self._process_id}; a fork must connect anew")
