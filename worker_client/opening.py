"""From arguments and the environment to a session or an observer, over gRPC or in this process. Knows addresses; no model, no step."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from ps_protocol.errors import InternalError, InvalidSpec, PsError
from ps_protocol.model.layout import Layout
from ps_protocol.model.policy import PolicySpec
from ps_protocol.process import waiting
from ps_protocol.process.failpoints import enable_worker_failpoints
from ps_protocol.process.history import VARIABLE as HISTORY_VARIABLE
from ps_protocol.process.history import HistoryWriter
from ps_protocol.process.tf_config import parse_tf_config
from ps_protocol.process.waiting import SilenceWatch
from ps_protocol.roles.chief import Chief, Participant, ParticipantKind, Registration
from ps_protocol.roles.identity import HandshakeReply
from ps_protocol.roles.shard import Shard, ShardStatus
from ps_protocol.rpc.channel import Access
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.shard import GrpcShard
from ps_protocol.security.options import Security, security_of
from ps_protocol.security.permissions import CallerRole
from ps_protocol.shared_memory.worker import MemoryNotShared, share_memory
from worker_client.cluster.chief import ChiefSearch, ClusterLink, MemorySharing, SharingShard, register
from worker_client.model.wire_format import WireFormat, wire_format
from worker_client.session.observer import Observer
from worker_client.session.session import Session
from worker_client.shards.standbys import ReplicatedShard

# What a program proves with who it is: arguments of `connect()` and `observe()`, else LOCKSTEP_*. Knows arguments; opens nothing.


PathLike = str | os.PathLike[str]


def access_of(
    environment: Mapping[str, str],
    *,
    role: CallerRole,
    token: str | None = None,
    token_file: PathLike | None = None,
    tls: bool | None = None,
    tls_ca: PathLike | None = None,
    tls_cert: PathLike | None = None,
    tls_key: PathLike | None = None,
) -> Access:
    """Returns how to reach servers: each part from its argument, else LOCKSTEP_*. Raises InvalidSpec."""
    if token is not None or token_file is not None:
        # What is given stands for both: the environment's must not contradict it.
        environment = {name: value for name, value in environment.items() if name not in ("LOCKSTEP_TOKEN", "LOCKSTEP_TOKEN_FILE")}
    if tls is False:
        environment = {name: value for name, value in environment.items() if name != "LOCKSTEP_TLS_CA"}
    given = {"token_file": token_file, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    # All at once: the parts are checked together.
    overlaid = {**environment, **{f"LOCKSTEP_{name.upper()}": os.fspath(path) for name, path in given.items() if path is not None}}
    security: Security = security_of(None, overlaid)
    if token is not None:
        security = replace(security, token=token)
    if tls is not None:
        security = replace(security, tls=tls)
    return Access(security, role=role)


# Whether a session shares memory with its shards, and what it says if it cannot. Knows clients and the log; no models and no steps.


log = logging.getLogger("lockstep.worker")

TRANSPORTS = ("auto", "shared_memory", "grpc")


def sharing_of(transport: str | None) -> MemorySharing | None:
    """Returns how to share memory for a transport, None for "grpc". None or empty stands for "auto". Raises InvalidSpec."""
    chosen = transport or "auto"
    if chosen not in TRANSPORTS:
        raise InvalidSpec(f"transport: got {transport!r}, want one of {', '.join(map(repr, TRANSPORTS))}")
    return None if chosen == "grpc" else _Sharing(is_required=chosen == "shared_memory")


class _Sharing:
    """Shares memory with each shard that it can; for one session. A shard that it cannot is an error if sharing is required."""

    def __init__(self, *, is_required: bool) -> None:
        self._is_required = is_required
        self._has_spoken = False

    def __call__(self, shard: Shard, *, where: str, participant: Participant, layout: Layout, timeout_s: float) -> SharingShard | None:
        """Returns a shard that shares memory, or None. Raises MemoryNotShared if it is required, and what the server's call raises."""
        if isinstance(shard, ReplicatedShard) and self._is_required and layout.nbytes:
            raise MemoryNotShared(f"{where}: it has a standby, and memory is shared with single servers only", is_same_host=True)
        if not isinstance(shard, GrpcShard):
            return None
        try:
            return share_memory(
                shard,
                epoch=participant.epoch,
                worker=participant.index,
                incarnation=participant.incarnation,
                layout=layout,
                timeout_s=timeout_s,
            )
        except (MemoryNotShared, InternalError) as error:
            is_same_host = isinstance(error, InternalError) or error.facts.get("same_host") == "true"
            if self._is_required and layout.nbytes:
                raise MemoryNotShared(
                    f"{where}: transport='shared_memory' cannot be had: {error.message}; run the worker where its parameter servers are,"
                    " or connect with transport='auto'",
                    is_same_host=is_same_host,
                ) from None
            self._say(error, where, is_odd=is_same_host and layout.nbytes > 0)
            return None

    def _say(self, error: PsError, where: str, *, is_odd: bool) -> None:
        # Shards are asked at the same time; that two of them speak is no harm.
        if is_odd and not self._has_spoken:
            self._has_spoken = True
            log.warning(
                "memory is not shared with %s, though it is on this host: %s; variables and gradients go over gRPC", where, error.message
            )
        else:
            log.debug("memory is not shared with %s: %s", where, error.message)


# From arguments and the environment to a session over gRPC. Knows addresses and clients; nothing of models and steps.


TIMEOUT_S = 60.0
SEARCH_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to connect, and as whom: `worker_index` None is the lowest free one; an empty `cluster` accepts the chief's."""

    chief: str
    worker_index: int | None
    cluster: str


def connect(
    chief: str | None = None,
    *,
    worker_index: int | None = None,
    cluster: str | None = None,
    timeout_s: float = TIMEOUT_S,
    takeover: bool = False,
    transport: str | None = None,
    wire: str | WireFormat | None = None,
    token: str | None = None,
    token_file: PathLike | None = None,
    tls: bool | None = None,
    tls_ca: PathLike | None = None,
    tls_cert: PathLike | None = None,
    tls_key: PathLike | None = None,
) -> Session:
    """Registers with the chief and returns a session; use it as a context manager, so that the cluster knows when this worker leaves.

    `chief` is "host:port" or "unix:/path". What is not given comes from LOCKSTEP_CHIEF, LOCKSTEP_WORKER_INDEX and LOCKSTEP_CLUSTER, else
    from TF_CONFIG; without an index the lowest free one is taken. Blocks until the chief answers, and says so after 2 s; `timeout_s`
    seconds bound this, and later every call to a server that does not answer.

    An index whose holder was a process of this machine that is gone is taken over at once; `takeover` does so whoever holds it.

    `transport` is how dense gradients and variables come to the parameter servers and back: "shared_memory" (they lie in memory that worker
    and server share; only on one host), "grpc", or "auto": shared memory with each server where it can be had, else gRPC. None:
    LOCKSTEP_TRANSPORT, else "auto". If "shared_memory" cannot be had, `create_or_join()` raises MemoryNotShared. `wire` is how they travel
    over gRPC: "float32", "bfloat16", "float16", or a `WireFormat`; None: LOCKSTEP_WIRE, else as they are. Nothing travels in shared memory.

    `token` or `token_file` (lines `role token`, read again when it changes) and the `tls_` files prove who this is and to whom it talks;
    what is not given comes from LOCKSTEP_TOKEN, LOCKSTEP_TOKEN_FILE, LOCKSTEP_TLS_CA, LOCKSTEP_TLS_CERT and LOCKSTEP_TLS_KEY. `tls=True`:
    TLS with the system's authorities; False: none.

    Raises InvalidSpec, Unavailable, WrongCluster, WrongRole, WorkerIndexTaken, WorkerIndexOutOfRange, ClusterFull; Unauthenticated and
    PermissionDenied where a cluster asks for tokens or certificates.
    """
    enable_worker_failpoints(os.environ)
    files = {"token_file": token_file, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    access = access_of(os.environ, role=CallerRole.WORKER, token=token, tls=tls, **files)
    target = resolve(os.environ, chief=chief, worker_index=worker_index, cluster=cluster)
    sharing = sharing_of(transport if transport is not None else os.environ.get("LOCKSTEP_TRANSPORT"))
    link, registration = _enter(
        target, kind=ParticipantKind.WORKER, timeout_s=timeout_s, takeover=takeover, sharing=sharing, wire=_wire(wire), access=access
    )
    return Session(link, registration)


def observe(
    chief: str | None = None,
    *,
    cluster: str | None = None,
    timeout_s: float = TIMEOUT_S,
    wire: str | WireFormat | None = None,
    token: str | None = None,
    token_file: PathLike | None = None,
    tls: bool | None = None,
    tls_ca: PathLike | None = None,
    tls_cert: PathLike | None = None,
    tls_key: PathLike | None = None,
) -> Observer:
    """Registers with the chief as one who only reads, and returns an observer; use it as a context manager.

    Arguments and errors are those of `connect()`. Any number may observe, also before there is a model. What an observer reads always comes
    over gRPC.
    """
    files = {"token_file": token_file, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    access = access_of(os.environ, role=CallerRole.OBSERVER, token=token, tls=tls, **files)
    target = resolve(os.environ, chief=chief, worker_index=None, cluster=cluster)
    link, registration = _enter(
        target, kind=ParticipantKind.OBSERVER, timeout_s=timeout_s, takeover=False, sharing=None, wire=_wire(wire), access=access
    )
    return Observer(link, registration)


def resolve(environment: Mapping[str, str], *, chief: str | None, worker_index: int | None, cluster: str | None) -> Target:
    """Returns the target: each part from the arguments, else LOCKSTEP_*, else TF_CONFIG. Raises InvalidSpec."""
    address = chief or environment.get("LOCKSTEP_CHIEF")
    index = worker_index
    if index is None and (text := environment.get("LOCKSTEP_WORKER_INDEX")):
        index = _index_of(text)
    # Read only if something is missing: an engine may set it for another system than this one.
    if (not address or index is None) and (tf_config := parse_tf_config(environment.get("TF_CONFIG", ""))):
        address = address or tf_config.chief
        index = tf_config.task_index if index is None and tf_config.task_type == "worker" else index
    if not address:
        raise InvalidSpec("no chief to connect to: pass connect('host:port'), set LOCKSTEP_CHIEF, or start this program by `lockstep up`")
    _check_index(index)
    return Target(chief=address, worker_index=index, cluster=cluster if cluster is not None else environment.get("LOCKSTEP_CLUSTER", ""))


def _index_of(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise InvalidSpec(f"LOCKSTEP_WORKER_INDEX: got {text!r}, want a number from 0")
    return int(text)


def _check_index(index: object) -> None:
    if index is not None and (isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 1 << 32):
        raise InvalidSpec(f"worker_index: got {index!r}, want an int from 0, or None for the lowest free one")


def _wire(wire: str | WireFormat | None) -> WireFormat:
    return wire_format(wire if wire is not None else os.environ.get("LOCKSTEP_WIRE") or None)


def _enter(
    target: Target,
    *,
    kind: ParticipantKind,
    timeout_s: float,
    takeover: bool,
    sharing: MemorySharing | None,
    wire: WireFormat,
    access: Access,
) -> tuple[ClusterLink, Registration]:
    if not timeout_s > 0:
        raise InvalidSpec(f"timeout_s: got {timeout_s!r}, want seconds > 0")
    client, watch = GrpcChief(target.chief, cluster=target.cluster, access=access), SilenceWatch()
    try:
        what = f"the chief at {target.chief}"
        with watch.expecting(what):
            reply = waiting.call(client.handshake, what=what, timeout_s=timeout_s)
        _warn(target.chief, reply)
        cluster = reply.identity.cluster

        def open_shard(index: int, address: str) -> Shard:
            with watch.expecting(f"ps {index} at {address}"):
                return _open_shard(index, address, cluster=cluster, timeout_s=timeout_s, wire=wire, access=access)

        def open_chief(address: str) -> Chief:
            found = GrpcChief(address, cluster=cluster, access=access)
            try:
                found.handshake(SEARCH_TIMEOUT_S)
            except BaseException:
                found.close()
                raise
            return found

        def look(address: str) -> ShardStatus:
            shard = GrpcShard(address, cluster=cluster, access=access)
            try:
                return shard.status()
            finally:
                shard.close()

        link = ClusterLink(
            chief=client,
            search=ChiefSearch(client, address=target.chief, open_chief=open_chief, look=look, bounded=_bounded),
            open_shard=open_shard,
            open_replica=partial(_shard, cluster=cluster, wire=wire, access=access),
            is_in_process=False,
            timeout_s=timeout_s,
            watch=watch,
            sharing=sharing,
            know_layout=_know_layout,
            wire=wire,
            access=access,
            history=_history(kind),
        )
        return link, register(link, kind=kind, index=target.worker_index, takeover=takeover)
    except BaseException:
        watch.close()
        client.close()
        raise


def _history(kind: ParticipantKind) -> HistoryWriter | None:
    directory = os.environ.get(HISTORY_VARIABLE, "")
    return HistoryWriter(directory, role="worker") if directory and kind is ParticipantKind.WORKER else None


def _bounded(chief: Chief, timeout_s: float) -> Chief:
    return chief.within(timeout_s) if isinstance(chief, GrpcChief) else chief


def _know_layout(shard: Shard, layout: Layout) -> None:
    if isinstance(shard, GrpcShard):
        shard.know_layout(layout)


def _shard(index: int, address: str, *, cluster: str, wire: WireFormat, access: Access) -> GrpcShard:
    return GrpcShard(address, index=index, cluster=cluster, variables_encoding=wire.variable_encoding, access=access)


def _open_shard(index: int, address: str, *, cluster: str, timeout_s: float, wire: WireFormat, access: Access) -> Shard:
    shard = _shard(index, address, cluster=cluster, wire=wire, access=access)
    try:
        _warn(address, waiting.call(shard.handshake, what=f"ps {index} at {address}", timeout_s=timeout_s))
    except BaseException:
        shard.close()
        raise
    return shard


def _warn(address: str, reply: HandshakeReply) -> None:
    if reply.warning:
        log.warning("%s: %s", address, reply.warning)


# Sessions and observers of a cluster inside this process, by the same code as over a network. Knows the shape of such a cluster.


# Nothing in a process is unreachable, so this bounds only what is repeated because a step moved on meanwhile.
IN_PROCESS_TIMEOUT_S = 60.0


class LocalCluster(Protocol):
    """A chief and shards in this process, for example a `lockstep.in_process.InProcessCluster`."""

    @property
    def chief(self) -> Chief:
        """The chief."""

    @property
    def shards(self) -> Sequence[Shard]:
        """The parameter servers by index."""


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
    arguments are not to be given again; each worker then needs a thread of its own; `takeover` gives it `worker_index` whoever holds that.

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
    return Session(link, register(link, kind=ParticipantKind.WORKER, index=worker_index, takeover=takeover))


def observe_local(cluster: LocalCluster) -> Observer:
    """Returns an observer of a cluster inside this process."""
    link = _local_link(cluster)
    return Observer(link, register(link, kind=ParticipantKind.OBSERVER, index=None, takeover=False))


def _local_link(cluster: LocalCluster) -> ClusterLink:
    return ClusterLink(
        chief=cluster.chief, open_shard=lambda index, _: cluster.shards[index], is_in_process=True, timeout_s=IN_PROCESS_TIMEOUT_S
    )
