"""From arguments and the environment to a session over gRPC. Knows addresses and clients; nothing of models and steps."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from ps_protocol import retry
from ps_protocol.access import Access
from ps_protocol.authorization import CallerRole
from ps_protocol.chief import Chief, ParticipantKind, Registration
from ps_protocol.chief_client import GrpcChief
from ps_protocol.errors import InvalidSpec
from ps_protocol.failpoints import enable_worker_failpoints
from ps_protocol.handshake import HandshakeReply
from ps_protocol.history import VARIABLE as HISTORY_VARIABLE
from ps_protocol.history import HistoryWriter
from ps_protocol.layout import Layout
from ps_protocol.shard import Shard, ShardStatus
from ps_protocol.shard_client import GrpcShard
from ps_protocol.silence import SilenceWatch
from ps_protocol.tf_config import parse_tf_config
from worker_client.chief_search import ChiefSearch
from worker_client.cluster_link import ClusterLink, MemorySharing, register
from worker_client.memory_sharing import sharing_of
from worker_client.observer import Observer
from worker_client.proof import PathLike, access_of
from worker_client.session import Session
from worker_client.wire_format import WireFormat, wire_format

log = logging.getLogger("lockstep.worker")

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
            reply = retry.call(client.handshake, what=what, timeout_s=timeout_s)
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
        _warn(address, retry.call(shard.handshake, what=f"ps {index} at {address}", timeout_s=timeout_s))
    except BaseException:
        shard.close()
        raise
    return shard


def _warn(address: str, reply: HandshakeReply) -> None:
    if reply.warning:
        log.warning("%s: %s", address, reply.warning)
