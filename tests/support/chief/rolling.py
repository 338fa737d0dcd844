"""A cluster in this process that a test can roll back to its beginning, or give another chief, under its workers. Asserts nothing.

Its checkpoint is the first values of the model. Callers see epochs that rise and participants that stay; behind them is each time a new
cluster, whose epoch is always 1.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from lockstep.in_process import InProcessCluster
from ps_protocol.errors import EpochMismatch, LeaseExpired
from ps_protocol.roles.chief import Participant, ParticipantKind, PushCommit, RegisterRequest, Registration
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import PushHeader, ReadMetricsRequest, ReadRequest, RowsRequest, ShardStatusRequest
from ps_protocol.roles.weights import FetchRequest
from tests.support.chief.eras import era, fence
from tests.support.network.faults import Flaky
from worker_client import Session
from worker_client.cluster.chief import ChiefLink
from worker_client.cluster.transport import LocalTransport

# Of a cluster inside one process.
_INNER_LIFE = 1


class RollingCluster:
    """Two shards and a chief, reached as over a network: with threads, heartbeats and retries."""

    def __init__(self, restore: Callable[[Session], Any], *, timeout_s: float = 20.0, lease_s: float = 30.0, **sizes: int) -> None:
        self._restore = restore
        self._sizes = sizes
        self._timeout_s = timeout_s
        self.lease_s = lease_s
        self.epoch = self.life = 1
        self.num_rollbacks = 0
        self.incarnation_offsets: dict[int, int] = {}
        self.registered: set[tuple[ParticipantKind, int]] = set()
        self.restarted_shards: set[int] = set()
        self.inner = InProcessCluster(num_ps=2, **sizes)  # type: ignore[arg-type]
        self.chief = Flaky(_Chief(self))
        self.shards = [Flaky(_Shard(self, index)) for index in range(2)]

    def link(self) -> ChiefLink:
        return ChiefLink(self.chief, LocalTransport(self.shards.__getitem__, timeout_s=self._timeout_s, is_in_process=False))

    def session(self) -> Session:
        """Returns another worker's session, with the model."""
        link = self.link()
        session = Session(link, link.register(kind=ParticipantKind.WORKER, index=None, takeover=False))
        self._restore(session)
        return session

    def roll_back(self) -> None:
        """Brings the cluster back to its first values, in a new epoch."""
        inner = InProcessCluster(num_ps=2, **self._sizes)  # type: ignore[arg-type]
        # The worker that restores the values is worker 0 of the new cluster, so the real one is its next incarnation.
        link = ChiefLink(inner.chief, LocalTransport(inner.shards.__getitem__, timeout_s=5.0))
        self._restore(Session(link, link.register(kind=ParticipantKind.WORKER, index=0, takeover=False)))
        self.rise()
        self.inner, self.incarnation_offsets = inner, {0: 1}
        self.num_rollbacks += 1

    def begin_anew(self) -> None:
        """Has a cluster in its place that knows nothing of it, and begins with the same first values in an epoch of the same number."""
        epoch = self.epoch
        self.roll_back()
        self.epoch, self.life = epoch, self.life + 1

    def rise(self) -> None:
        """Has a new epoch at the step that is open: its checkpoint was the newest."""
        self.epoch += 1
        self.registered.clear()
        self.restarted_shards.clear()

    def replace_chief(self) -> None:
        """Has another chief in the same epoch, who knows no participant."""
        self.registered.clear()

    def restart_shard(self, index: int) -> None:
        """Has a server that holds nothing, which the chief has not noticed yet."""
        self.restarted_shards.add(index)

    def inside(self, value: Any) -> Any:
        """Returns what a caller has given as the cluster behind knows it."""
        match value:
            case Participant():
                self._check_epoch(value.era.epoch, value.era.life)
                if (value.kind, value.index) not in self.registered:
                    raise LeaseExpired(f"worker {value.index} (incarnation {value.incarnation}) is not registered here. Register again")
                return dataclasses.replace(value, era=era(1, life=_INNER_LIFE), incarnation=value.incarnation + self._offset(value.index))
            case PushCommit():
                return dataclasses.replace(value, push_id=self._push_id(value.push_id))
            case PushHeader():
                self._check_epoch(value.era.epoch, value.era.life)
                return dataclasses.replace(value, era=era(1, life=_INNER_LIFE), push_id=self._push_id(value.push_id))
            case ReadRequest() | RowsRequest() | ReadMetricsRequest():
                self._check_epoch(value.epoch)
                return dataclasses.replace(value, epoch=1)
            case FetchRequest():
                self._check_epoch(value.era.epoch, value.era.life)
                return dataclasses.replace(value, era=era(1, life=_INNER_LIFE))
            case _ if hasattr(value, "participant"):
                changes = {"participant": self.inside(value.participant)}
                if getattr(value, "commit", None) is not None:
                    changes["commit"] = self.inside(value.commit)
                return dataclasses.replace(value, **changes)
        return value

    def outside(self, registration: Registration) -> Registration:
        """Returns a registration as the caller is to see it."""
        inner = registration.participant
        incarnation = inner.incarnation - self._offset(inner.index)
        participant = dataclasses.replace(inner, era=era(self.epoch, life=self.life), incarnation=incarnation)
        self.registered.add((inner.kind, inner.index))
        return dataclasses.replace(registration, participant=participant, lease_s=self.lease_s)

    def call(self, target: Any, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Passes a call on."""
        return getattr(target, method)(*map(self.inside, arguments), **named)

    def _push_id(self, push_id: PushId) -> PushId:
        return push_id._replace(incarnation=push_id.incarnation + self._offset(push_id.worker))

    def _offset(self, worker: int) -> int:
        return self.incarnation_offsets.get(worker, 0)

    def _check_epoch(self, epoch: int, life: int | None = None) -> None:
        if life not in (None, self.life):
            raise EpochMismatch("the cluster that you have joined was lost as a whole. Connect again")
        if epoch != self.epoch:
            raise EpochMismatch(f"cluster epoch is {self.epoch}, you have {epoch} (rolled back to step 0). Connect again")


class _Chief:
    def __init__(self, cluster: RollingCluster) -> None:
        self._cluster = cluster
        self._places: dict[tuple[ParticipantKind, int, int], Registration] = {}

    def call(self, request: Any, *, timeout_s: float | None = None) -> Any:
        if isinstance(request, RegisterRequest):
            return self._register(request)
        return self._cluster.inner.chief.call(self._cluster.inside(request))

    def _register(self, request: RegisterRequest) -> Registration:
        cluster, former = self._cluster, request.former
        key = (request.kind, -1 if request.index is None else request.index, cluster.num_rollbacks)
        if former is not None and key in self._places:
            return cluster.outside(self._places[key])
        found = cluster.inner.chief.call(dataclasses.replace(request, former=None, takeover=former is not None))
        self._places[found.participant.kind, found.participant.index, cluster.num_rollbacks] = found
        return cluster.outside(found)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *arguments, **named: self._cluster.call(self._cluster.inner.chief, method, arguments, named)


class _Shard:
    transport = "local"

    def __init__(self, cluster: RollingCluster, index: int) -> None:
        self._cluster = cluster
        self._index = index

    def create_variables(self, spec: Any, *arguments: Any, **named: Any) -> Any:
        spec = dataclasses.replace(spec, epoch=1)
        return self._cluster.inner.shards[self._index].create_variables(spec, *arguments, **named)

    def call(self, request: Any, **named: Any) -> Any:
        shard = self._cluster.inner.shards[self._index]
        if isinstance(request, ShardStatusRequest):
            return dataclasses.replace(shard.call(request), fence=fence(self._cluster.epoch))
        return self._forwarded("call", request, **named)

    def close(self) -> None:
        """Does nothing: there is no connection."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._forwarded, method)

    def _forwarded(self, method: str, *arguments: Any, **named: Any) -> Any:
        if self._index in self._cluster.restarted_shards:
            raise EpochMismatch(f"ps {self._index}: no chief has adopted it since it started, you have epoch 1; reconnect")
        return self._cluster.call(self._cluster.inner.shards[self._index], method, arguments, named)
