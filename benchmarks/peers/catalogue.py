"""The peers: what each is, what it needs, which processes it is made of. Knows words; starts nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`program` is run by each process. `servers` are named as roles are, "ps 0".

    The requirements of some exclude those of others; peers with one `environment` share it.
    """

    name: str
    title: str
    environment: str
    requirements: tuple[str, ...]
    module: str
    program: str
    arguments: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()


_TORCH = ("torch==2.13.0", "numpy<3")

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="tensorflow",
            title="TensorFlow 2.21 SyncReplicasOptimizer",
            environment="tensorflow",
            requirements=("tensorflow-cpu==2.21.0",),
            module="tensorflow",
            program="benchmarks.peers.tensorflow_role",
            servers=("ps 0",),
        ),
        Peer(
            name="gloo",
            title="torch 2.13 gloo all_reduce, a call for each variable",
            environment="torch",
            requirements=_TORCH,
            module="torch",
            program="benchmarks.peers.gloo_role",
        ),
        Peer(
            name="gloo-flat",
            title="torch 2.13 gloo all_reduce, one call",
            environment="torch",
            requirements=_TORCH,
            module="torch",
            program="benchmarks.peers.gloo_role",
            arguments=("flat",),
        ),
        Peer(
            name="mxnet",
            title="MXNet 1.9.1 dist_sync (ps-lite)",
            environment="mxnet",
            # The last MXNet uses names that NumPy removed in 1.24.
            requirements=("mxnet==1.9.1", "numpy==1.23.5"),
            module="mxnet",
            program="benchmarks.peers.mxnet_role",
            servers=("scheduler 0", "server 0"),
        ),
    )
}
