"""From arguments and the environment to a session or an observer, over gRPC or in this process. Knows addresses; no model, no step."""

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ps_protocol.errors import InvalidSpec, is_boundary
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.shown import shown
from ps_protocol.process.failpoints import enable_worker_failpoints
from ps_protocol.process.history import HistoryWriter
from ps_protocol.process.local_clusters import with_local_secrets
from ps_protocol.process.options import (
    ALLOW_INSECURE_NETWORK,
    HISTORY,
    HISTORY_MAX_BYTES,
    MAX_STEPS,
    METRICS,
    OTEL,
    TAKE_PLACE,
    Given,
    security_of,
)
from ps_protocol.process.tf_config import parse_tf_config
from ps_protocol.process.waiting import checked_timeout
from ps_protocol.roles.chief import Chief, ParticipantKind, Registration
from ps_protocol.roles.request import CallerRole
from ps_protocol.roles.shard import Shard
from ps_protocol.rpc.channel import Access
from ps_protocol.security.options import Security
from worker_client.cluster.chief import ChiefLink
from worker_client.cluster.transport import GrpcTransport, LocalTransport
from worker_client.model.wire_format import WireFormat, wire_format
from worker_client.session.observer import Observer
from worker_client.session.session import Session, left_at_exit
from worker_client.session.spans import StepSpans, check_spans

if TYPE_CHECKING:
    from worker_client.session.exporting import WorkerMetrics

TIMEOUT_S = 60.0
_CHIEF_VARIABLES = ("LOCKSTEP_CHIEF", "TF_CONFIG")
# Where nothing says where the chief is, but such an engine has started this program, its module finds or starts a cluster.
_ENGINES = {
    "LOCKSTEP_RAY_TRAIN": "lockstep.ray_train",
    "TORCHELASTIC_RUN_ID": "lockstep.launcher.engines.torchrun",
    "OMPI_COMM_WORLD_RANK": "lockstep.launcher.engines.mpi",
}
# Nothing in a process is unreachable, so this bounds only what is repeated because a step moved on meanwhile.
IN_PROCESS_TIMEOUT_S = 60.0


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The address and identity to connect with: `worker_index` None is the lowest free one; an empty `cluster` accepts the chief's."""

    chief: str
    worker_index: int | None
    cluster: str


# Instead of an address: the chief is in this process, with everything else.
LOCAL_CHIEF = "local"


@is_boundary
def connect(
    chief: str | None = None,
    *,
    worker_index: int | None = None,
    cluster: str | None = None,
    timeout_s: float = TIMEOUT_S,
    takeover: bool = False,
    transport: str | None = None,
    wire: str | WireFormat | None = None,
    security: Security | None = None,
    otel: bool | None = None,
    metrics: str | None = None,
) -> Session:
    """Registers with the chief and returns a session; use it as a context manager, so that the cluster knows when this worker leaves.

    A session that is still open when the program ends is left then, and the program exits with 1 if training was interrupted.

    `chief` is "host:port" or "unix:/path", or "local": a cluster inside this process. What is not given comes from LOCKSTEP_CHIEF,
    LOCKSTEP_WORKER_INDEX and LOCKSTEP_CLUSTER, else from TF_CONFIG; without an index the lowest free one is taken. In a program of torchrun
    or mpirun without any of these, rank 0 starts a cluster, with the flags of `lockstep up` in LOCKSTEP_UP, and all ranks join it. Blocks
    until the chief answers, and says so after 2 s; `timeout_s` seconds bound this, and later every call to a server that does not answer.

    If the previous holder of an index ran on this machine and has exited, you take its index at once. `takeover`, or LOCKSTEP_TAKEOVER=1,
    takes it from any holder.

    `transport` is how dense gradients and variables come to the parameter servers and back: "shared_memory" (they lie in memory that worker
    and server share; only on one host), "sockets" (TCP or Unix sockets of their own; only where nothing is encrypted), "grpc", or "auto":
    with each server shared memory where it can be had, else sockets if they are large, else gRPC. None: LOCKSTEP_TRANSPORT, else "auto".
    If "shared_memory" cannot be had, `create_or_join()` raises MemoryNotShared; "sockets": Unimplemented or Unavailable. `wire` is how they
    travel: "float32", "bfloat16", "float16", or a `WireFormat`; None: LOCKSTEP_WIRE, else as they are. Nothing travels in shared memory.

    `security` proves who this is and says to whom it talks: a `Security` with `token` or `token_file` (lines `role token`, read again when
    it changes) and the files `tls_ca`, `tls_cert`, `tls_key`, or `tls=True`: TLS with the system's authorities. None: LOCKSTEP_TOKEN,
    LOCKSTEP_TOKEN_FILE, LOCKSTEP_TLS, LOCKSTEP_TLS_CA, LOCKSTEP_TLS_CERT and LOCKSTEP_TLS_KEY. Where no token is given, that of a cluster
    is used which this user's `lockstep up` runs on this machine, if its chief has the address.

    `otel`: makes OpenTelemetry spans of steps and of what they consist of; the extra `otel` has the API, and the program sets up an SDK.
    None: LOCKSTEP_OTEL, else False.

    `metrics`: where this worker serves `/metrics` for Prometheus over HTTP, "host:port"; port 0: any free one, which the log names. None:
    LOCKSTEP_METRICS, else not at all.

    Raises InvalidSpec, Unavailable, WrongCluster, WrongRole, WorkerIndexTaken, WorkerIndexOutOfRange, ClusterFull; ClusterNotStarted
    where rank 0 cannot start the cluster; Unauthenticated and PermissionDenied where a cluster asks for tokens or certificates.
    """
    enable_worker_failpoints(os.environ)
    environment = _environment(chief)
    target = resolve(environment, chief=chief, worker_index=worker_index, cluster=cluster)
    access = access_of(security, environment, role=CallerRole.WORKER, chief=target.chief)
    if target.chief == LOCAL_CHIEF:
        return local(_own_cluster(), worker_index=target.worker_index, takeover=takeover)
    given = Given({}, environment)
    directory, max_bytes = given[HISTORY], given[HISTORY_MAX_BYTES]
    way = GrpcTransport(
        cluster=target.cluster,
        timeout_s=checked_timeout(timeout_s),
        transport=transport if transport is not None else os.environ.get("LOCKSTEP_TRANSPORT"),
        wire=_wire(wire),
        access=access,
        history=HistoryWriter(directory, role="worker", max_bytes=max_bytes) if directory else None,
    )
    has_spans = otel if otel is not None else given[OTEL]
    if has_spans:
        check_spans()
    exported = _metrics(metrics if metrics is not None else given[METRICS], given, way)
    link, registration = _enter(way, target, kind=ParticipantKind.WORKER, takeover=takeover or given[TAKE_PLACE])
    spans = StepSpans(worker=registration.participant.index, cluster=way.cluster) if has_spans else None
    return left_at_exit(Session(link, registration, spans=spans, metrics=exported))


@is_boundary
def observe(
    chief: str | None = None,
    *,
    cluster: str | None = None,
    timeout_s: float = TIMEOUT_S,
    wire: str | WireFormat | None = None,
    security: Security | None = None,
) -> Observer:
    """Registers with the chief as one who only reads, and returns an observer; use it as a context manager.

    Arguments and errors are those of `connect()`. Any number may observe, also before there is a model. What an observer reads always comes
    over gRPC.
    """
    return Observer(*enter_as_observer(chief, cluster=cluster, timeout_s=timeout_s, wire=wire, security=security))


def enter_as_observer(
    chief: str | None, *, cluster: str | None, timeout_s: float, wire: str | WireFormat | None, security: Security | None
) -> tuple[ChiefLink, Registration]:
    """Registers with the chief as one who only reads; arguments and errors are those of `observe()`."""
    environment = _environment(chief)
    # A worker's index in the environment is not that of those who look on, of which it may open several.
    target = replace(resolve(environment, chief=chief, worker_index=None, cluster=cluster), worker_index=None)
    access = access_of(security, environment, role=CallerRole.OBSERVER, chief=target.chief)
    if target.chief == LOCAL_CHIEF:
        return enter_locally(_own_cluster())
    way = GrpcTransport(
        cluster=target.cluster, timeout_s=checked_timeout(timeout_s), transport="grpc", wire=_wire(wire), access=access, history=None
    )
    return _enter(way, target, kind=ParticipantKind.OBSERVER, takeover=False)


def _environment(chief: str | None) -> Mapping[str, str]:
    """Returns the variables of this process, with those by which a rank of an engine finds its cluster, which may be another one later."""
    if chief or {*_CHIEF_VARIABLES} & {*os.environ} or not (engines := [name for name in _ENGINES if name in os.environ]):
        return os.environ
    return {**os.environ, **import_module(_ENGINES[engines[0]]).join(os.environ)}


def _metrics(address: str, given: Given, way: GrpcTransport) -> "WorkerMetrics | None":
    if not address:
        return None
    # Only where it is wanted: it imports OpenSSL.
    from worker_client.session.exporting import WorkerMetrics

    may_be_open = given[ALLOW_INSECURE_NETWORK]
    try:
        return WorkerMetrics(address, cluster=way.cluster, security=way.access.security, allow_insecure_network=may_be_open)
    except InvalidSpec as error:
        raise InvalidSpec(f"metrics: {error.message}") from None


def access_of(security: Security | None, environment: Mapping[str, str], *, role: CallerRole, chief: str = "") -> Access:
    """Returns how to reach servers: by what is given, else by LOCKSTEP_*, else as a local cluster asks for it. Raises InvalidSpec."""
    if security is None:
        return Access(with_local_secrets(security_of(Given({}, environment)), chief=chief), role=role)
    if not isinstance(security, Security):
        raise InvalidSpec(f"security: got {type(security).__name__}, want a Security, for example Security(token_file='worker.token')")
    files = {name: getattr(security, name) for name in ("token_file", "tls_ca", "tls_cert", "tls_key")}
    paths: dict[str, Any] = {name: Path(file) for name, file in files.items() if file is not None}
    return Access(with_local_secrets(replace(security, **paths), chief=chief), role=role)


def resolve(environment: Mapping[str, str], *, chief: str | None, worker_index: int | None, cluster: str | None) -> Target:
    """Returns the target: each part from the arguments, else LOCKSTEP_*, else TF_CONFIG. Raises InvalidSpec."""
    address = chief or environment.get("LOCKSTEP_CHIEF")
    index = worker_index
    if index is None and (text := environment.get("LOCKSTEP_WORKER_INDEX")):
        if not (text.isascii() and text.isdigit()):
            raise InvalidSpec(f"LOCKSTEP_WORKER_INDEX: got {text!r}, want a number from 0")
        index = int(text)
    # Read only if something is missing: an engine may set it for another system than this one.
    if (not address or index is None) and (tf_config := parse_tf_config(environment.get("TF_CONFIG", ""))):
        address = address or tf_config.chief
        index = tf_config.task_index if index is None and tf_config.task_type == "worker" else index
    if not address:
        raise InvalidSpec("no chief to connect to: pass connect('host:port'), set LOCKSTEP_CHIEF, or start this program by `lockstep up`")
    if not isinstance(address, str):
        raise InvalidSpec(f"chief: got {shown(address)}, want a str such as '127.0.0.1:5000' or 'unix:/path'")
    if index is not None and (isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 1 << 32):
        raise InvalidSpec(f"worker_index: got {shown(index)}, want an int from 0, or None for the lowest free one")
    name = cluster if cluster is not None else environment.get("LOCKSTEP_CLUSTER", "")
    if not isinstance(name, str):
        raise InvalidSpec(f"cluster: got {shown(name)}, want a str")
    return Target(chief=address, worker_index=index, cluster=name)


def _wire(wire: str | WireFormat | None) -> WireFormat:
    return wire_format(wire if wire is not None else os.environ.get("LOCKSTEP_WIRE") or None)


def _enter(way: GrpcTransport, target: Target, *, kind: ParticipantKind, takeover: bool) -> tuple[ChiefLink, Registration]:
    try:
        link = ChiefLink(way.enter(target.chief), way, address=target.chief)
    except BaseException:
        way.close()
        raise
    try:
        return link, link.register(kind=kind, index=target.worker_index, takeover=takeover)
    except BaseException:
        way.close()
        link.chief.close()
        raise


class LocalCluster(Protocol):
    """A chief and shards in this process, for example a `lockstep.in_process.InProcessCluster`."""

    @property
    def chief(self) -> Chief:
        """The chief."""

    @property
    def shards(self) -> Sequence[Shard]:
        """The parameter servers by index."""


@is_boundary
def local(
    cluster: LocalCluster | None = None,
    *,
    worker_index: int | None = None,
    num_ps: int = 1,
    replicas_to_aggregate: int | None = None,
    total_num_replicas: int | None = None,
    max_steps: int | None = None,
    policy: PolicySpec | None = None,
    reject_nonfinite: bool = False,
    takeover: bool = False,
) -> Session:
    """Returns a worker's session in a cluster inside this process: no network, no other process, the same behaviour.

    Without `cluster` makes a new one of `num_ps` parameter servers; a step takes `replicas_to_aggregate` contributions (default: as many as
    `total_num_replicas`, else 1), training finishes by itself after `max_steps` steps (None: never), and `policy` coordinates it (None:
    sync); with `reject_nonfinite` gradients that are not finite are refused. With `cluster` joins that one as another worker, and its
    arguments are not to be given again; each worker then needs a thread of its own; `takeover` takes `worker_index` from any holder.

    Raises InvalidSpec for numbers that make no cluster, WorkerIndexTaken, WorkerIndexOutOfRange, ClusterFull.
    """
    if cluster is None:
        # The roles never import each other; this is the one place where the SDK reaches a composition root, and only when asked to.
        from lockstep.in_process import InProcessCluster

        cluster = InProcessCluster(
            num_ps=num_ps,
            replicas_to_aggregate=replicas_to_aggregate,
            total_num_replicas=total_num_replicas,
            max_steps=max_steps,
            policy=policy,
            reject_nonfinite=reject_nonfinite,
        )
    elif num_ps != 1 or reject_nonfinite or (replicas_to_aggregate, total_num_replicas, max_steps, policy) != (None, None, None, None):
        given = "num_ps, replicas_to_aggregate, total_num_replicas, max_steps, policy and reject_nonfinite"
        raise TypeError(f"local(): the cluster is given, so {given} must not be")
    link = _local_link(cluster)
    return Session(link, link.register(kind=ParticipantKind.WORKER, index=worker_index, takeover=takeover))


_made: list[LocalCluster] = []  # one at most
_making = threading.Lock()


def _own_cluster() -> LocalCluster:
    """Returns the cluster of this process, which `connect()` joins where the chief is called "local"; makes it when first asked."""
    with _making:
        if not _made:
            from lockstep.in_process import InProcessCluster

            # One worker, so that it gets all of the data that it divides by `num_workers`.
            _made.append(InProcessCluster(total_num_replicas=1, max_steps=Given({}, os.environ)[MAX_STEPS]))
        return _made[0]


def made_cluster() -> LocalCluster | None:
    """Returns the cluster of this process; None: the program has opened none."""
    return _made[0] if _made else None


def observe_local(cluster: LocalCluster) -> Observer:
    """Returns an observer of a cluster inside this process."""
    return Observer(*enter_locally(cluster))


def enter_locally(cluster: LocalCluster) -> tuple[ChiefLink, Registration]:
    """Registers in a cluster inside this process as one who only reads."""
    link = _local_link(cluster)
    return link, link.register(kind=ParticipantKind.OBSERVER, index=None, takeover=False)


def _local_link(cluster: LocalCluster) -> ChiefLink:
    return ChiefLink(cluster.chief, LocalTransport(lambda index: cluster.shards[index], timeout_s=IN_PROCESS_TIMEOUT_S))
