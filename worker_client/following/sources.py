"""Where a follower's weights come from: the parameter servers of a cluster. Knows the seams to chief and shards; no words of an arena."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ps_protocol.errors import DeadlineExceeded, NotInitialized, PsError, ShuttingDown, StepNotReady, Unavailable
from ps_protocol.model.layout import Layout
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec, PlacedSlice
from ps_protocol.process.memory import keep_freed_memory
from ps_protocol.process.waiting import Wait
from ps_protocol.roles.chief import (
    DEFAULT_POLICY,
    AgreedModel,
    ClusterState,
    FollowerReport,
    GetModelRequest,
    ModelState,
    Registration,
)
from ps_protocol.roles.fence import Era
from ps_protocol.roles.shard import Shard
from ps_protocol.roles.weights import FetchReply, FetchRequest, KeptWeights
from ps_protocol.rpc.shard import LARGE_BYTES
from worker_client.cluster.chief import ChiefLink
from worker_client.core.sides import run
from worker_client.model.memory import arranged
from worker_client.session.membership import Membership

# Who makes no step hears of the end of training by a heartbeat. A chief that is asked to end waits 1.5 s for those who have not heard.
_BEAT_S = 1.0


class Version(NamedTuple):
    """Which weights these are. Larger ones are newer within one life of the cluster; a rollback makes the epoch larger, not the step."""

    life: int
    epoch: int
    step: int


@light_dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Followed:
    """What a source has: the model, how each shard's part lies, and the era in which its steps count.

    `kept`: what can be had of the variables; None: all of them, in each encoding.
    """

    model: ModelSpec
    layouts: Sequence[Layout]
    era: Era
    policy: PolicySpec = DEFAULT_POLICY
    kept: KeptWeights | None = None

    def agreed(self, *, step: int) -> AgreedModel:
        """Returns it as a chief describes a model, for others to follow."""
        pieces = ((shard, piece) for shard, layout in enumerate(self.layouts) for piece in (*layout.slices, *layout.tables))
        return AgreedModel(
            state=ModelState.READY,
            model=self.model,
            placement=tuple(PlacedSlice(slice=piece, shard=shard) for shard, piece in pieces),
            global_step=step,
            policy=self.policy,
            kept=self.kept,
        )


class Source(Protocol):
    """See ClusterSource, which is one. For one thread."""

    @property
    def place(self) -> str:
        """What it is, for texts."""

    @property
    def poll_s(self) -> float:
        """How long one call may wait for the next step."""

    @property
    def is_over(self) -> bool:
        """Whether no more steps will come."""

    def open(self) -> Followed:
        """Returns what is there; the same object until that changes. Raises NotInitialized, whose words say what is waited for."""

    def fetch(self, requests: Mapping[int, FetchRequest]) -> Mapping[int, FetchReply]:
        """Returns the answers of these shards, but of those that have no such step yet."""

    def lost(self, error: PsError) -> None:
        """Takes note that a place was lost, as by a rollback; returns when there is another, or raises the error."""

    def report(self, follower: FollowerReport, *, received_bytes: int) -> None:
        """Takes note of what the follower has, for the cluster's status."""

    def close(self) -> None:
        """Ends the connections, and calls under way. For any thread."""


class ClusterSource:
    """Implements Source: a cluster that is being trained, as an observer has it."""

    def __init__(self, link: ChiefLink, registration: Registration) -> None:
        self._member = Membership(link, registration, what="the follower", renewal="follow()", max_beat_s=_BEAT_S)
        # What was opened, and the place in which that was.
        self._opened: Followed | None = None
        self._known = registration

    @property
    def place(self) -> str:
        """The chief."""
        return f"the cluster of the chief at {self._member.link.address or 'this process'}"

    @property
    def poll_s(self) -> float:
        """Less than the silence that is worth a warning; in one process no call can be cut short. Nothing comes after the end."""
        if self._member.link.transport.is_in_process:
            return 0.1
        return 0.0 if self._member.is_finished else 1.5

    @property
    def is_over(self) -> bool:
        """Whether training is finished, as the chief has said; in one process there are no heartbeats, and it is asked."""
        member = self._member
        if member.link.transport.is_in_process:
            return member.status(max_ledger_entries=0).state is ClusterState.FINISHED
        return member.is_finished

    def open(self) -> Followed:
        """Asks the chief for the model, unless it is known."""
        member = self._member
        if self._opened is not None and self._known.participant is member.participant:
            return self._opened
        self._opened, self._known = None, member.registration
        participant = self._known.participant
        agreed = member.link.ask(GetModelRequest(max_wait_s=0.5), what="the model")
        if agreed.state is not ModelState.READY or agreed.model is None:
            if self.is_over:
                raise NotInitialized("training ended before any worker gave the model its first values; there is nothing to follow")
            raise NotInitialized("the model has no values yet: the first worker to join gives them")
        shards = member.shards()
        layouts = arranged(agreed.model, agreed.placement, num_shards=len(shards))
        shards.know_layouts(layouts)
        if any(layout.nbytes >= LARGE_BYTES for layout in layouts):
            keep_freed_memory()  # else page faults are a third of what pages of weights cost here, and at a relay
        self._opened = Followed(model=agreed.model, layouts=layouts, era=participant.era, policy=agreed.policy, kept=agreed.kept)
        return self._opened

    def fetch(self, requests: Mapping[int, FetchRequest]) -> Mapping[int, FetchReply]:
        """Asks these shards at once."""

        def ask(index: int, shard: Shard, timeout_s: float) -> FetchReply | None:
            if index not in requests:
                return None
            try:
                return shard.call(requests[index], timeout_s=timeout_s)
            except StepNotReady:
                return None
            except (Unavailable, ShuttingDown) as error:
                # Not tried again here: the follower is to know at once, and goes on with all servers.
                raise DeadlineExceeded(f"{self.place} does not answer: {error.message}", facts=error.facts) from None

        found = self._member.shards().each("fetch the weights", ask)
        return {index: reply for index, reply in enumerate(found) if reply is not None}

    def lost(self, error: PsError) -> None:
        """Asks the chief what has become of the place."""
        self._opened = None
        member = self._member
        if member.is_finished:
            return  # there is none: the chief may be gone
        run(
            member.place.await_other(
                self._known,
                error,
                Wait("the follower asks what has become of its servers", timeout_s=member.link.transport.timeout_s),
            )
        )

    def report(self, follower: FollowerReport, *, received_bytes: int) -> None:
        """Has the next heartbeat say it."""
        traffic = self._member.traffic
        traffic.follower, traffic.received_bytes = follower, received_bytes

    def close(self) -> None:
        """Leaves the cluster."""
        self._member.leave("")
