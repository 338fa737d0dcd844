"""A relay: gives the steps that it follows to followers of its own, who take it for a chief with its parameter servers. Decides no step."""

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

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
from ps_protocol.model.variables import Array
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
from ps_protocol.weights.copy import WeightCopy
from ps_protocol.weights.versions import WeightVersions
from worker_client.cluster.chief import ChiefLink
from worker_client.following.follower import Follower
from worker_client.following.sources import ClusterSource, Followed, Version

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
        self._changed = threading.Condition()
        # Under the condition: what there is, by the hash of its layout. A step is taken under it, which may last for seconds.
        self._followed: Followed | None = None
        self._versions: dict[str, WeightVersions] = {}
        self._version: Version | None = None
        # Under a condition of their own: readers, with when they were heard, who must not be silent meanwhile.
        self._hearing = threading.Condition()
        self._readers: dict[int, float] = {}
        self._end, self._failure, self._is_closed = End.NOT_YET, "", False
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
        self._is_closed = True
        for condition in (self._hearing, self._changed):
            with condition:
                condition.notify_all()
        self._follower.close()
        self._server.stop(_GRACE_S)
        self._server.close()

    def run(self) -> None:
        """Takes each step until training has ended and all readers have left, or are silent. Raises the error that ended the following."""
        end, failure = End.FINISHED, None
        try:
            is_over = False
            while not is_over:
                is_last = self._follower.has_ended
                is_over = self._follower.pass_on(self._version, self._take, timeout_s=_LOOK_S) is None and is_last
        except TrainingFailed as error:
            end, failure = End.INTERRUPTED, error
        with self._changed:
            self._end, self._failure = end, failure.message if failure is not None else ""
            self._changed.notify_all()
        with self._hearing:
            while not self._is_closed and any(heard_at + _LEASE_S > time.monotonic() for heard_at in self._readers.values()):
                self._hearing.wait(_LOOK_S)
        if failure is not None:
            raise failure

    def _take(self, followed: Followed, version: Version, newest_step: int, copies: Sequence[WeightCopy]) -> bool:
        with self._changed:
            if self._followed is None or self._followed.era != followed.era:
                self._versions = {copy.selection.layout.hash: _versions_of(copy) for copy in copies}
            self._followed, self._version = followed, version
            for copy in copies:
                versions = self._versions[copy.selection.layout.hash]
                # Where servers have steps of their own, some may have made none.
                if copy.step is not None and (versions.step is None or copy.step > versions.step):
                    fill = partial(_fill, copy.words)
                    versions.take(copy.step, fill, now=time.monotonic(), digests=copy.digests)
            self._changed.notify_all()
        return True

    # -- what readers ask

    @property
    def _era(self) -> Era:
        return self._first_era if self._followed is None else self._followed.era

    def _register(self, request: RegisterRequest, call: Call) -> Registration:
        if request.kind is not ParticipantKind.OBSERVER:
            raise WrongRole(f"this is a relay of the weights of cluster {self._cluster!r}, for lockstep.follow(); workers join its chief")
        former, followed, version = request.former, self._followed, self._version
        if former is not None:
            self._check_era(former.era, is_new=True)
        participant = Participant(
            era=former.era if former is not None and followed is None else self._era,
            kind=request.kind,
            index=len(self._readers) if former is None else former.index,
            incarnation=max(1, request.request_id) if former is None else former.incarnation,
        )
        self._hear(participant)
        return Registration(
            participant=participant,
            lease_s=_LEASE_S,
            # Of all of them: here, whatever it is called from there.
            shard_addresses=("",) * (self._num_shards if followed is None else len(followed.layouts)),
            global_step=0 if version is None else version.step,
            may_contribute=False,
        )

    def _beat(self, request: HeartbeatRequest, call: Call) -> End:
        self._check_era(request.participant.era)
        self._hear(request.participant)
        return self._end

    def _hear(self, reader: Participant) -> None:
        now = time.monotonic()
        with self._hearing:
            self._readers = {one: heard_at for one, heard_at in self._readers.items() if heard_at + _LEASE_S > now}
            self._readers[reader.incarnation] = now

    def _leave(self, request: DeregisterRequest, call: Call) -> None:
        with self._hearing:
            self._readers.pop(request.participant.incarnation, None)
            self._hearing.notify_all()

    def _model(self, request: GetModelRequest, call: Call) -> AgreedModel:
        followed, version = self._followed, self._version
        if followed is None or version is None:
            return AgreedModel(state=ModelState.ABSENT, model=None, placement=(), global_step=0)
        return followed.agreed(step=version.step)

    def _status(self, request: ClusterStatusRequest, call: Call) -> ClusterStatus:
        """Returns the chief's: to who looks on, too, a relay stands for it."""
        return self._link.ask(request, what="status", timeout_s=_STATUS_S)

    def _fetch(self, request: FetchRequest, call: Call) -> FetchReply:
        newest_step, silent_s, reason = self._follower.news()
        least = (-1 if request.held_step is None else request.held_step + 1) if request.step is None else request.step
        with self._changed:
            if self._followed is None:
                raise Unavailable(f"this relay has no weights yet: {reason}")
            is_early = self._step(request) < least
            if is_early and silent_s > _SILENT_S and not self._end:
                # Else readers would take what they have for fresh.
                raise Unavailable(f"this relay has heard nothing for {silent_s:.0f} s: {reason}")
            self._changed.wait_for(lambda: self._step(request) >= least, min(request.max_wait_s, MAX_WAIT_SLICE_S))
            if (step := self._step(request)) < least:
                raise StepNotReady(f"the relay has no step {least} yet; it has {step}", facts={"step": str(max(0, step))})
            # Of the steps that come, a relay has some: the next of them will do.
            wanted = replace(request, step=None) if is_early else request
            return self._versions[request.layout_hash].answer(wanted, newest_step=max(newest_step, step), now=time.monotonic())

    def _step(self, request: FetchRequest) -> int:
        """Returns the newest step of what a request is about; -1: there is none. Raises what is wrong with the request."""
        self._check_era(request.era)
        if request.layout_hash not in self._versions:
            raise LayoutMismatch("the relay has another model, or another number of servers")
        step = self._versions[request.layout_hash].step
        return -1 if step is None else step

    def _check_era(self, era: Era, *, is_new: bool = False) -> None:
        """Raises EpochMismatch if a caller must register again, unless it is about to; Unavailable if it is this relay that is behind."""
        own = self._era
        if self._is_closed:
            raise ShuttingDown("the relay ends")
        if self._failure:
            raise TrainingFailed(self._failure)
        if era.life == own.life and era.epoch > own.epoch:
            raise Unavailable(f"this relay is at epoch {own.epoch} still, and the caller has seen epoch {era.epoch}")
        if era != own and self._followed is not None and not is_new:
            raise EpochMismatch(f"this relay is at epoch {own.epoch} of life {own.life}; the caller at {era.epoch} of {era.life}")


def _versions_of(copy: WeightCopy) -> WeightVersions:
    return WeightVersions(copy.selection, allocate=lambda nbytes: np.empty(nbytes, np.uint8), release=lambda nbytes: None)


def _fill(words: Array, memory: Array) -> None:
    memory.view(np.uint16)[:] = words
