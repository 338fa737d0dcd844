"""What a chief asks of a parameter server over gRPC: adoption, steps, checkpoints, its end. Knows messages; no tensor."""

from collections.abc import Sequence

from ps_protocol import codec_checkpoints, codec_shard_status
from ps_protocol import codec_shard as codec
from ps_protocol.connection import Connection
from ps_protocol.shard import (
    Adoption,
    ApplyReply,
    ApplyRequest,
    RestoreProgress,
    RestoreRequest,
    SaveProgress,
    SaveRequest,
    ShardSettings,
    ShardStatus,
)
from ps_protocol.v1 import parameter_service_pb2 as pb

# For calls that only look or note something down.
CONTROL_TIMEOUT_S = 10.0
# For calls whose work grows with the model. A server that is gone is noticed by keepalive long before.
TENSOR_TIMEOUT_S = 120.0


class ChiefCalls:
    """A part of GrpcShard: one attempt a call, over its connection. Thread-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def adopt(self, *, epoch: int, chief_incarnation: int, chief_address: str = "", life: int = 0) -> Adoption:
        """Puts the shard under a chief (AdoptShard)."""
        request = pb.AdoptShardRequest(epoch=epoch, chief_incarnation=chief_incarnation, chief_address=chief_address, life=life)
        return codec_checkpoints.decode_adoption(
            self._connection.unary("AdoptShard", request, pb.AdoptShardResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="its adoption")
        )

    def keep_record(self, *, epoch: int, chief_incarnation: int, version: int, record: bytes) -> None:
        """Has a record kept for the chief's successor (KeepRecord)."""
        request = pb.KeepRecordRequest(epoch=epoch, chief_incarnation=chief_incarnation, version=version, record=record)
        self._connection.unary("KeepRecord", request, pb.KeepRecordResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="its record to be kept")

    def save(self, request: SaveRequest, *, max_wait_s: float = 0.0) -> SaveProgress:
        """Has a step saved, or asks how far that is (SaveShard)."""
        message = codec_checkpoints.encode_save_request(request, max_wait_s=max_wait_s)
        awaited, timeout_s = f"step {request.step} to be saved", TENSOR_TIMEOUT_S + max_wait_s
        return codec_checkpoints.decode_save_progress(
            self._connection.unary("SaveShard", message, pb.SaveShardResponse, timeout_s=timeout_s, awaited=awaited)
        )

    def restore(self, request: RestoreRequest, *, max_wait_s: float = 0.0) -> RestoreProgress:
        """Has the shard brought back to a checkpoint, or asks how far that is (RestoreShard)."""
        message = codec_checkpoints.encode_restore_request(request, max_wait_s=max_wait_s)
        awaited, timeout_s = f"checkpoint {request.tag} to be restored", CONTROL_TIMEOUT_S + max_wait_s
        return codec_checkpoints.decode_restore_progress(
            self._connection.unary("RestoreShard", message, pb.RestoreShardResponse, timeout_s=timeout_s, awaited=awaited)
        )

    def configure(self, settings: ShardSettings) -> None:
        """Changes how the shard works."""
        message = codec.encode_settings(settings)
        self._connection.unary("ConfigureShard", message, pb.ConfigureShardResponse, timeout_s=TENSOR_TIMEOUT_S, awaited="its new settings")

    def prepare_step(self, request: ApplyRequest) -> Sequence[float]:
        """Returns the sums of squares of the step's mean."""
        message = pb.PrepareStepRequest(apply=codec.encode_apply_request(request))
        awaited = f"the norms of step {request.step}"
        answer = self._connection.unary("PrepareStep", message, pb.PrepareStepResponse, timeout_s=TENSOR_TIMEOUT_S, awaited=awaited)
        return tuple(answer.sums)

    def apply_step(self, request: ApplyRequest) -> ApplyReply:
        """Has the contributions averaged and the next step made."""
        message = codec.encode_apply_request(request)
        return codec.decode_apply_reply(
            self._connection.unary(
                "ApplyStep", message, pb.ApplyStepResponse, timeout_s=TENSOR_TIMEOUT_S, awaited=f"step {request.step} to be applied"
            )
        )

    def status(self) -> ShardStatus:
        """Returns step, memory and counters."""
        return codec_shard_status.decode_shard_status(
            self._connection.unary(
                "GetShardStatus", pb.GetShardStatusRequest(), pb.GetShardStatusResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="its status"
            )
        )

    def shutdown(self, *, epoch: int, reason: str) -> None:
        """Ends the server."""
        request = pb.ShutdownShardRequest(epoch=epoch, reason=reason)
        self._connection.unary("ShutdownShard", request, pb.ShutdownShardResponse, timeout_s=CONTROL_TIMEOUT_S, awaited="its end")
