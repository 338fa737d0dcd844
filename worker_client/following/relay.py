"""A relay: gives the steps that it follows to followers of its own, who take it for a chief with its parameter servers. Decides no step."""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import (
    EpochMismatch,
    LayoutMismatch,
    ShuttingDown,
    StepNotReady,
    TrainingFailed,
    Unavailable,
    WrongRole,
)
from ps_protocol.roles.chief import (
    AgreedModel,
    ClusterStatus,
    ClusterStatusRequest,
    DeregisterRequest,
    End,
    GetModelRequest,
    HeartbeatRequest,
    ModelState,
    Participant,
    ParticipantKind,
    RegisterRequest,
    Registration,
)
from ps_protocol.roles.fence import Era
from ps_protocol.roles.identity import Identity, Role
from ps_protocol.roles.request import RPCS
from ps_protocol.roles.shard import MAX_WAIT_SLICE_S
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.rpc.chief import SERVICE
from ps_protocol.rpc.door import by_thread, plain
from ps_protocol.rpc.server import RpcServer
from ps_protocol.rpc.server_stream import Call
from ps_protocol.security.options import OPEN, Security
from worker_client.cluster.chief import ChiefLink
from worker_client.following.follower import Follower, Held
from worker_client.following.sources import ClusterSource

# The end of training comes with a heartbeat; there are three of them in a lease.
_LEASE_S = 3.0
# Two polls of its own. Readers count on from there: what they have is fresh for 5 s more.
_SILENT_S = 3.0
_LOOK_S = 0.5
_GRACE_S = 1.0
# Of who asks for the status; that of a relay of a relay has to come from there.
_STATUS_S = 5.0


class Relay:
    """Follows all dense variables, and `tables` if it is to, in one encoding, and serves them at an address.

    `encoding`, `takes_kept`: as of a Follower.

    A context manager, which begins to serve when it is made. `link` and `registration`: of an observer of the cluster, or of another relay.
    It knows nothing that its readers would lose with it: one that is started again goes on with them. Raises InvalidSpec where it cannot
    listen.
    """

    def __init__(
        self,
        link: ChiefLink,
        registration: Registration,
        *,
        encoding: FloatEncoding,
        takes_kept: bool = False,
        address: str,
        tables: bool = False,
        security: Security = OPEN,
    ) -> None:
        self._link, self._cluster = link, link.transport.cluster
        # Until there is a step.
        self._first_era, self._num_shards = registration.participant.era, len(registration.shard_addresses)
        # What the follower held when somebody asked last.
        self._held: Held | None = None
        self._num_readers, self._asked_at = 0, time.monotonic()
        self._end, self._failure, self._closed = End.NOT_YET, "", threading.Event()
        identity = Identity(cluster=self._cluster, role=Role.RELAY, index=0, process_incarnation=secrets.randbits(63) | 1)
        self._server = RpcServer(security, identity=identity, address=address)
        self._follower = Follower(ClusterSource(link, registration), encoding=encoding, takes_kept=takes_kept, tables=tables)
        answers: dict[type, Callable[[Any, Call], object]] = {
            RegisterRequest: self._register,
            HeartbeatRequest: self._beat,
            DeregisterRequest: self._leave,
            GetModelRequest: self._model,
            FetchRequest: self._fetch,
            ClusterStatusRequest: self._status,
        }
        methods = {RPCS[kind].path: by_thread(plain(kind, answer), self._server.threads) for kind, answer in answers.items()}
        try:
            self.address = self._server.listen(methods, epoch=lambda: self._era.epoch)
        except BaseException:
            self._follower.close()
            self._server.close()
            raise
        self._server.report_health("", SERVICE, is_serving=True)
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the following and the server, in some seconds."""
        self._closed.set()
        self._follower.close()
        self._server.stop(_GRACE_S)
        self._server.close()

    def run(self) -> None:
        """Serves until training has ended and nobody asks any more. Raises the error that ended the following."""
        end, failure = End.FINISHED, None
        try:
            while not self._follower.has_ended:
                self._follower.look(self._keep, timeout_s=_LOOK_S)
        except TrainingFailed as error:
            end, failure = End.INTERRUPTED, error
        self._end, self._failure = end, failure.message if failure is not None else ""
        while self._asked_at + _LEASE_S > time.monotonic() and not self._closed.wait(_LOOK_S):
            pass
        if failure is not None:
            raise failure

    def _keep(self, held: Held) -> None:
        self._held = held

    # -- what readers ask

    @property
    def _era(self) -> Era:
        return self._first_era if self._held is None else self._held.followed.era

    def _register(self, request: RegisterRequest, call: Call) -> Registration:
        if request.kind is not ParticipantKind.OBSERVER:
            raise WrongRole(f"this is a relay of the weights of cluster {self._cluster!r}, for lockstep.follow(); workers join its chief")
        former, held = request.former, self._held
        if former is not None:
            self._check_era(former.era, is_new=True)
        self._num_readers += former is None
        participant = Participant(
            era=former.era if former is not None and held is None else self._era,
            kind=request.kind,
            index=self._num_readers if former is None else former.index,
            incarnation=max(1, request.request_id) if former is None else former.incarnation,
        )
        return Registration(
            participant=participant,
            lease_s=_LEASE_S,
            # Of all of them: here, whatever it is called from there.
            shard_addresses=("",) * (self._num_shards if held is None else len(held.followed.layouts)),
            global_step=0 if held is None else held.version.step,
            may_contribute=False,
        )

    def _beat(self, request: HeartbeatRequest, call: Call) -> End:
        self._check_era(request.participant.era)
        return self._end

    def _leave(self, request: DeregisterRequest, call: Call) -> None:
        """Nobody waits for it."""

    def _model(self, request: GetModelRequest, call: Call) -> AgreedModel:
        held = self._held
        if held is None:
            return AgreedModel(state=ModelState.ABSENT, model=None, placement=(), global_step=0)
        return held.followed.agreed(step=held.version.step)

    def _status(self, request: ClusterStatusRequest, call: Call) -> ClusterStatus:
        """Returns the chief's: to who looks on, too, a relay stands for it."""
        return self._link.ask(request, what="status", timeout_s=_STATUS_S)

    def _fetch(self, request: FetchRequest, call: Call) -> FetchReply:
        silent_s, reason = self._follower.silence()
        least = (-1 if request.held_step is None else request.held_step + 1) if request.step is None else request.step
        is_early = False

        def answer(held: Held) -> FetchReply | None:
            nonlocal is_early
            self._keep(held)
            self._check_era(request.era)
            copy = next((one for one in held.copies if one.selection.layout.hash == request.layout_hash), None)
            if copy is None:
                raise LayoutMismatch("the relay has another model, or another number of servers")
            step = -1 if copy.step is None else copy.step
            if step < least:
                is_early = True
                return None
            # Of the steps that come, a relay has some: the next of them will do.
            wanted = replace(request, step=None) if is_early else request
            return copy.answer(wanted, newest_step=max(held.newest_step, step), now=time.monotonic())

        # Who is far from the servers is not to be taken for fresh by its readers, and has them wait for nothing.
        is_silent = silent_s > _SILENT_S and not self._end
        self._check_era(request.era)
        try:
            reply = self._follower.look(answer, timeout_s=0 if is_silent else min(request.max_wait_s, MAX_WAIT_SLICE_S))
        except RuntimeError:
            raise ShuttingDown("the relay ends") from None  # and so its follower has
        if reply is not None:
            return reply
        if (held := self._held) is None:
            raise Unavailable(f"this relay has no weights yet: {reason}")
        if is_silent:
            raise Unavailable(f"this relay has heard nothing for {silent_s:.0f} s: {reason}")
        step = held.version.step
        raise StepNotReady(f"the relay has no step {least} yet; it has {step}", facts={"step": str(max(0, step))})

    def _check_era(self, era: Era, *, is_new: bool = False) -> None:
        """Raises EpochMismatch if a caller must register again, unless it is about to; Unavailable if it is this relay that is behind."""
        own, self._asked_at = self._era, time.monotonic()
        if self._closed.is_set():
            raise ShuttingDown("the relay ends")
        if self._failure:
            raise TrainingFailed(self._failure)
        if era.life == own.life and era.epoch > own.epoch:
            raise Unavailable(f"this relay is at epoch {own.epoch} still, and the caller has seen epoch {era.epoch}")
        if era != own and self._held is not None and not is_new:
            raise EpochMismatch(f"this relay is at epoch {own.epoch} of life {own.life}; the caller at {era.epoch} of {era.life}")
