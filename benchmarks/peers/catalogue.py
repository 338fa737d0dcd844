"""The peers: for each its title, requirements and processes. Starts nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`program`: run by each process. `arguments`: by policy that the peer supports.

    `server`: the name of its parameter servers, if it has any; `others`: roles of which there is always one. Requirements of different
    peers conflict; peers with the same `environment` share it.
    """

    name: str
    title: str
    environment: str
    requirements: tuple[str, ...]
    module: str
    program: str
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"sync": ()})
    server: str = ""
    others: tuple[str, ...] = ()

    def takes_part(self, *, policy: str, num_ps: int) -> bool:
        """Whether the peer supports the policy, and this number of servers."""
        return policy in self.arguments and (num_ps == 1 or bool(self.server))

    def servers(self, num_ps: int) -> list[str]:
        """Returns the names of the processes that are not workers, such as "ps 0"."""
        return [*(f"{other} 0" for other in self.others), *(f"{self.server} {index}" for index in range(num_ps) if self.server)]


_TORCH = ("torch==2.13.0", "numpy<3")

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="tensorflow",
            title="TensorFlow 2.21",
            environment="tensorflow",
            requirements=("tensorflow-cpu==2.21.0",),
            module="tensorflow",
            program="benchmarks.peers.tensorflow_role",
            arguments={"sync": ("sync",), "async": ("async",)},
            server="ps",
        ),
        Peer(
            name="gloo",
            title="gloo, a call for each variable",
            environment="torch",
            requirements=_TORCH,
            module="torch",
            program="benchmarks.peers.gloo_role",
        ),
        Peer(
            name="gloo-flat",
            title="gloo, one call",
            environment="torch",
            requirements=_TORCH,
            module="torch",
            program="benchmarks.peers.gloo_role",
            arguments={"sync": ("flat",)},
        ),
        Peer(
            name="mxnet",
            title="MXNet 1.9.1",
            environment="mxnet",
            # The last release of MXNet uses names that NumPy removed in 1.24.
            requirements=("mxnet==1.9.1", "numpy==1.23.5"),
            module="mxnet",
            program="benchmarks.peers.mxnet_role",
            server="server",
            others=("scheduler",),
        ),
    )
}
