"""A participant's place in its cluster, from registration to leaving. Knows the link, the lease and the process; no model and no step."""

import os
from collections.abc import Callable
from typing import TypeVar

from ps_protocol.chief import Chief, ClusterStatus, Participant, Registration
from ps_protocol.errors import EpochMismatch, LeaseExpired, PsError, Superseded
from ps_protocol.model import ModelSpec
from worker_client.cluster_link import ClusterLink
from worker_client.departure import leave
from worker_client.heartbeat import Heartbeat
from worker_client.open_commits import OpenCommits
from worker_client.patience import Patience
from worker_client.rejoining import Place
from worker_client.shard_group import ShardGroup

Result = TypeVar("Result")

_LOOK_AGAIN_S = 0.1
_ENDED = "its lease had ended, and it has registered again since"


class Membership:
    """Keeps the lease until it is left, and the place when chief or epoch change. `what` names the holder in errors, `renewal` how to get
    another.
    """

    def __init__(self, link: ClusterLink, registration: Registration, *, what: str, renewal: str) -> None:
        self.link = link
        self._place = Place(link, registration, moved=self._give_up_shards)
        self._what = what
        self._renewal = renewal
        self._shards: ShardGroup | None = None
        self._is_closed = False
        self._process_id = os.getpid()
        self._heartbeat: Heartbeat | None = None
        if not link.is_in_process:
            self._heartbeat = Heartbeat(self._beat, index=self.participant.index, lease_s=registration.lease_s)
            self._heartbeat.start()

    @property
    def participant(self) -> Participant:
        """Who the holder is at present; the same object for as long as it is the same identity."""
        return self._place.participant

    @property
    def registration(self) -> Registration:
        """What the chief has said at the latest registration."""
        return self._place.registration

    @property
    def commits(self) -> OpenCommits:
        """The contributions that another chief would have to be told of; for the holder's own thread."""
        return self._place.commits

    @property
    def is_finished(self) -> bool:
        """Whether the chief has said with a heartbeat that training is finished."""
        return self._heartbeat is not None and self._heartbeat.is_finished

    def ask(
        self,
        question: Callable[[Chief], Result],
        *,
        participant: Participant,
        what: str,
        timeout_s: float | None = None,
        expected_s: float = 0.0,
    ) -> Result:
        """Asks the chief something as this participant; where another chief has taken over, registers again and asks that one.

        Raises EpochMismatch or LeaseExpired if the holder has become another participant by that, and what `link.ask` raises.
        """
        place = self._place

        def settled(chief: Chief) -> Result:
            place.settle()
            return question(chief)

        while True:
            generation = place.generation
            try:
                return self.link.ask(settled, what=what, timeout_s=timeout_s, expected_s=expected_s)
            except (EpochMismatch, LeaseExpired) as error:
                place.renew(generation, error)
                if place.participant is not participant:
                    raise
            except Superseded as error:
                place.check_superseded(participant, error)
                raise LeaseExpired(_ENDED) from None

    def note_model(self, model: ModelSpec) -> None:
        """Takes note of the model that was joined, for a chief that does not know it."""
        self._place.model = model

    def await_new_place(self, participant: Participant, cause: PsError) -> PsError:
        """Returns once the holder is no longer this participant: a server has begun again, and the chief will soon know, too.

        What it returns is what the chief says of that, if it says anything. Raises the cause if the chief knows of nothing for as long as
        the link's timeout.
        """
        patience = Patience(f"{self._what} asks what has become of its servers", timeout_s=self.link.timeout_s)
        while participant is self.participant:
            try:
                self.ask(lambda chief: chief.heartbeat(participant), participant=participant, what="the epoch")
            except (EpochMismatch, LeaseExpired) as error:
                return error
            if isinstance(cause, Superseded) or not patience.left_s():
                raise cause
            patience.explain(f"the chief has not heard of it yet: {cause.message}")
            patience.pause(_LOOK_AGAIN_S)
        return cause

    def shards(self) -> ShardGroup:
        """Returns the connections to all shards, for the holder's present identity; opens them when first asked."""
        if self._shards is not None and self._shards.participant is not self.participant:
            self._shards.close()
            self._shards = None
        if self._shards is None:
            self._shards = ShardGroup(self.link, self.registration, ask_again=self._place.ask_again)
        return self._shards

    def hear_of_shards(self, version: int | None = None) -> None:
        """Asks the chief which servers hold the shards, if that may be others than is known here: not of `version` (None: in any case)."""
        known = self.registration.shards_version
        if self._shards is not None and known != version and (known or version):
            self._shards.hear()

    def status(self, *, max_ledger_entries: int, timeout_s: float | None = None) -> ClusterStatus:
        """Returns the chief's report."""
        self.check_open()
        return self.link.ask(lambda chief: chief.status(max_ledger_entries=max_ledger_entries), what="status", timeout_s=timeout_s)

    def applies_on_arrival(self) -> bool:
        """Asks the chief whether shards apply each contribution at once and without a lock, so that they have no common steps."""
        return "unlocked" in self.status(max_ledger_entries=0).policy

    def leave(self, failure: str) -> None:
        """Ends the lease and all connections, in at most 2 s. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = self._place.is_closed = True
        # A forked child has the parent's place, not its threads; leaving would end the parent's lease.
        if os.getpid() == self._process_id:
            leave(self.link, self.participant, heartbeat=self._heartbeat, shards=self._shards, failure=failure)

    def check_open(self) -> None:
        """Raises RuntimeError once it is left, and in a forked child."""
        if self._is_closed:
            raise RuntimeError(f"{self._what} is closed; open a new one with {self._renewal}")
        if os.getpid() != self._process_id:
            raise RuntimeError(f"{self._what} belongs to process {self._process_id}; a fork must connect anew")

    def _beat(self) -> bool:
        """One heartbeat, in its own thread, which takes the place again as well: the holder may compute for long."""
        place = self._place
        generation, participant = place.generation, place.participant
        try:
            return self.link.beat(participant)
        except (EpochMismatch, LeaseExpired) as error:
            place.renew(generation, error)
        except Superseded as error:
            place.check_superseded(participant, error)
        return False

    def _give_up_shards(self) -> None:
        """What is still tried at servers in the name of a former identity is of no use."""
        shards = self._shards
        if shards is not None and shards.participant is not self.participant:
            shards.give_up()
