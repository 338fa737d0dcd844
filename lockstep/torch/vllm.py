"""vLLM's weight transfer from a cluster: an engine that its workers load by the plugin point `vllm.general_plugins`. Knows no trainer.

LLM(model=…, weight_transfer_config=WeightTransferConfig(backend="lockstep"))

As the interface is in vLLM 0.25 to 0.33. The workers follow the cluster themselves, so a trainer sends vLLM nothing but the calls
`init_weight_transfer_engine`, `start_weight_update`, `update_weights`, `finish_weight_update`, with the fields below.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from lockstep.torch.following import part_of, tensor_of_slice
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import NotInitialized, PsError
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.variables import Array
from worker_client import Follower, Part
from worker_client.following.follow import follow
from worker_client.following.sources import Version


def register() -> None:
    """Makes the backend "lockstep" known to vLLM, which calls this in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine("lockstep", __name__, LockstepWeightTransferEngine.__name__)


@dataclass
class LockstepInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM may not be installed where types are checked
    """Where the weights are: arguments of `lockstep.follow()`."""

    chief: str | None = None
    wire: str | None = "bfloat16"
    names: dict[str, str] | None = None
    cluster: str | None = None
    timeout_s: float = 60.0


@dataclass
class LockstepUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which weights are wanted: arguments of `Follower.wait()`."""

    step: int | None = None
    max_lag: int | None = None
    timeout_s: float | None = None


class LockstepWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Loads the newest step of a cluster into vLLM's model, the same step in all workers of it.

    Each worker follows, receives what has changed, and keeps the weights in its host's memory; they are loaded from there as from a
    checkpoint, so that fused, sharded and quantized layers are made of them as usual. `version`: the weights that were loaded last.
    """

    init_info_cls = LockstepInitInfo
    update_info_cls = LockstepUpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.version: Version | None = None
        self._weights: Follower | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def init_transfer_engine(self, init_info: LockstepInitInfo) -> None:
        """Begins to follow. Raises what `lockstep.follow()` raises."""
        self.shutdown()
        self._weights = follow(
            init_info.chief, wire=init_info.wire, names=init_info.names, cluster=init_info.cluster, timeout_s=init_info.timeout_s
        )

    def start_weight_update(self) -> None:
        """Makes the layers ready for weights as a checkpoint has them."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Makes what the layers compute with of the weights that were loaded."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def receive_weights(self, update_info: LockstepUpdateInfo) -> None:
        """Loads the newest step that is there, all of it. Blocks, and raises, as `Follower.wait()` does, in all workers."""
        if self._weights is None:
            raise NotInitialized("the engine follows no cluster: call init_weight_transfer_engine() first")
        step, max_lag = update_info.step, update_info.max_lag
        while True:
            error = found = None
            try:
                self._weights.wait(step=step, max_lag=max_lag, timeout_s=update_info.timeout_s)
                found = self._take(self._weights)
            except PsError as failure:
                error = failure
            versions = _of_all_workers(found)
            if None in versions:
                raise error or NotInitialized("another worker of this model got no weights; its log says why")
            newest = max(version for version in versions if version is not None)
            if all(version == newest for version in versions):
                break
            step, max_lag = newest.step, None  # those behind wait for the others' step
        shapes = self._weights.shapes
        self.model.load_weights([(name, self._tensors[name]) for name in shapes if name in self._tensors])
        self.version = newest

    def shutdown(self) -> None:
        """Ends the following."""
        if self._weights is not None:
            self._weights.close()
            self._weights = None
        self._tensors.clear()

    def _take(self, weights: Follower) -> Version:
        """Brings the tensors in the host's memory to the newest step."""
        shapes: dict[str, tuple[int, ...]] = {}

        def put(name: str, part: Part, piece: VariableSlice, content: Array, encoding: FloatEncoding) -> None:
            shapes.update(shapes or weights.shapes)
            source = tensor_of_slice(part, piece, content, encoding)
            target = self._tensors.get(name)
            if target is None or target.shape != shapes[name]:  # another model may have taken the place of the one before
                target = self._tensors[name] = source.new_empty(shapes[name])
            part_of(target, piece).copy_(source)

        return weights.take(self, put)


def _of_all_workers(version: Version | None) -> list[Version | None]:
    """Returns the versions of all workers that hold parts of this model: called by all of them."""
    if not torch.distributed.is_initialized():
        return [version]
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    versions: list[Version | None] = [None] * group.world_size
    torch.distributed.all_gather_object(versions, version, group=group.cpu_group)
    return versions
