"""From arguments and the environment to a session over gRPC. Knows addresses and clients; nothing of models and steps."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from ps_protocol import retry
from ps_protocol.chief import ParticipantKind, Registration
from ps_protocol.chief_client import GrpcChief
from ps_protocol.errors import InvalidSpec
from ps_protocol.handshake import HandshakeReply
from ps_protocol.shard import Shard
from ps_protocol.shard_client import GrpcShard
from ps_protocol.silence import SilenceWatch
from ps_protocol.tf_config import parse_tf_config
from worker_client.cluster_link import ClusterLink, register
from worker_client.observer import Observer
from worker_client.session import Session

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0


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
) -> Session:
    """Registers with the chief and returns a session; use it as a context manager, so that the cluster knows when this worker leaves.

    `chief` is "host:port" or "unix:/path". What is not given comes from LOCKSTEP_CHIEF, LOCKSTEP_WORKER_INDEX and LOCKSTEP_CLUSTER, else
    from TF_CONFIG; without an index the lowest free one is taken. Blocks until the chief answers, and says so after 2 s; `timeout_s`
    seconds bound this, and later every call to a server that does not answer.

    An index whose holder was a process of this machine that is gone is taken over at once; `takeover` does so whoever holds it.
    Raises InvalidSpec, Unavailable, WrongCluster, WrongRole, WorkerIndexTaken, WorkerIndexOutOfRange, ClusterFull.
    """
    target = resolve(os.environ, chief=chief, worker_index=worker_index, cluster=cluster)
    link, registration = _enter(target, kind=ParticipantKind.WORKER, timeout_s=timeout_s, takeover=takeover)
    return Session(link, registration)


def observe(chief: str | None = None, *, cluster: str | None = None, timeout_s: float = TIMEOUT_S) -> Observer:
    """Registers with the chief as one who only reads, and returns an observer; use it as a context manager.

    Arguments and errors are those of `connect()`. Any number may observe, also before there is a model.
    """
    target = resolve(os.environ, chief=chief, worker_index=None, cluster=cluster)
    link, registration = _enter(target, kind=ParticipantKind.OBSERVER, timeout_s=timeout_s, takeover=False)
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


def _enter(target: Target, *, kind: ParticipantKind, timeout_s: float, takeover: bool) -> tuple[ClusterLink, Registration]:
    if not timeout_s > 0:
        raise InvalidSpec(f"timeout_s: got {timeout_s!r}, want seconds > 0")
    client, watch = GrpcChief(target.chief, cluster=target.cluster), SilenceWatch()
    try:
        what = f"the chief at {target.chief}"
        with watch.expecting(what):
            reply = retry.call(client.handshake, what=what, timeout_s=timeout_s)
        _warn(target.chief, reply)
        cluster = reply.identity.cluster

        def open_shard(index: int, address: str) -> Shard:
            with watch.expecting(f"ps {index} at {address}"):
                return _open_shard(index, address, cluster=cluster, timeout_s=timeout_s)

        link = ClusterLink(chief=client, open_shard=open_shard, is_in_process=False, timeout_s=timeout_s, watch=watch)
        return link, register(link, kind=kind, index=target.worker_index, takeover=takeover)
    except BaseException:
        watch.close()
        client.close()
        raise


def _open_shard(index: int, address: str, *, cluster: str, timeout_s: float) -> Shard:
    shard = GrpcShard(address, index=index, cluster=cluster)
    try:
        _warn(address, retry.call(shard.handshake, what=f"ps {index} at {address}", timeout_s=timeout_s))
    except BaseException:
        shard.close()
        raise
    return shard


def _warn(address: str, reply: HandshakeReply) -> None:
    if reply.warning:
        log.warning("%s: %s", address, reply.warning)
