"""TorchRL's weight synchronization from a cluster: a collector's policy becomes that of the newest step. Knows schemes; no transport.

collector = Collector(env, policy, …)
collector.register_scheme_receiver({"policy": LockstepWeightSyncScheme("chief-host:5000")})
for batch in collector:
    collector.receive_weights()
"""

from typing import Any

from torchrl.weight_update import WeightSyncScheme

from lockstep.torch.following import ModuleFollower, follow


class LockstepWeightSyncScheme(WeightSyncScheme):  # type: ignore[misc]  # TorchRL may not be installed where types are checked
    """The receiving side of a scheme whose sender is a cluster.

    `max_lag`: how many steps the policy may be behind at `receive()`; None: any. The other arguments are those of
    `lockstep.torch.follow()`. A collector of several processes swaps weights while its policy runs, and is refused: give each process a
    `Collector` of its own.
    """

    def __init__(self, chief: str | None = None, *, max_lag: int | None = None, **arguments: Any) -> None:
        super().__init__()
        self._arguments = {"chief": chief, **arguments}
        self._max_lag = max_lag
        self.follower: ModuleFollower | None = None

    def receive(self, timeout: float | None = None) -> Any:
        """Swaps the newest weights into the model, between two batches, and returns them. Raises what `ModuleFollower.swap()` raises."""
        if self.follower is None:
            raise RuntimeError("the scheme is not connected: register it by collector.register_scheme_receiver(), or call connect()")
        self.follower.swap(max_lag=self._max_lag, timeout_s=timeout)
        return self.weights

    def shutdown(self) -> None:
        """Ends the following. Idempotent."""
        if self.follower is not None:
            self.follower.weights.close()
        super().shutdown()

    def create_transport(self, **arguments: Any) -> Any:
        """Raises NotImplementedError: the follower is the transport."""
        raise NotImplementedError("weights come from the cluster; there is no transport between collectors")

    def _init_on_sender_impl(self, **arguments: Any) -> None:
        raise RuntimeError(
            "weights come from the cluster, not from a collector: give it to the collector of each process by register_scheme_receiver()"
        )

    def _init_on_receiver_impl(self, *, model_id: str, context: Any = None, model: Any = None, **arguments: Any) -> None:
        self.model_id, self.context = model_id, context
        if model is not None:
            self.model = model

    def _setup_connection_and_weights_on_receiver_impl(self, *, worker_idx: int | None = None) -> None:
        self.follower = follow(self.model, **self._arguments)
        self.receive()
