"""Sessions and observers of a cluster inside this process, by the same code as over a network. Knows the shape of such a cluster."""

from collections.abc import Sequence
from typing import Protocol

from ps_protocol.chief import Chief, ParticipantKind
from ps_protocol.policy_spec import PolicySpec
from ps_protocol.shard import Shard
from worker_client.cluster_link import ClusterLink, register
from worker_client.observer import Observer
from worker_client.session import Session

# Nothing in a process is unreachable, so this bounds only what is repeated because a step moved on meanwhile.
TIMEOUT_S = 60.0


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
    link = _link(cluster)
    return Session(link, register(link, kind=ParticipantKind.WORKER, index=worker_index, takeover=takeover))


def observe_local(cluster: LocalCluster) -> Observer:
    """Returns an observer of a cluster inside this process."""
    link = _link(cluster)
    return Observer(link, register(link, kind=ParticipantKind.OBSERVER, index=None, takeover=False))


def _link(cluster: LocalCluster) -> ClusterLink:
    return ClusterLink(chief=cluster.chief, open_shard=lambda index, _: cluster.shards[index], is_in_process=True, timeout_s=TIMEOUT_S)
