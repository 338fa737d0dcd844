import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from ps_protocol.v1 import error_pb2 as _error_pb2
from ps_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SaveState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAVE_STATE_UNSPECIFIED: _ClassVar[SaveState]
    SAVE_STATE_WRITING: _ClassVar[SaveState]
    SAVE_STATE_DONE: _ClassVar[SaveState]
    SAVE_STATE_FAILED: _ClassVar[SaveState]

class FloatEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FLOAT_ENCODING_UNSPECIFIED: _ClassVar[FloatEncoding]
    FLOAT_ENCODING_BFLOAT16: _ClassVar[FloatEncoding]
    FLOAT_ENCODING_FLOAT16: _ClassVar[FloatEncoding]
    FLOAT_ENCODING_INT8_BLOCKS: _ClassVar[FloatEncoding]
    FLOAT_ENCODING_TOP_K: _ClassVar[FloatEncoding]
    FLOAT_ENCODING_INT4_BLOCKS: _ClassVar[FloatEncoding]

class PushResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUSH_RESULT_UNSPECIFIED: _ClassVar[PushResult]
    PUSH_RESULT_STAGED: _ClassVar[PushResult]
    PUSH_RESULT_STALE: _ClassVar[PushResult]
    PUSH_RESULT_DUPLICATE: _ClassVar[PushResult]
    PUSH_RESULT_APPLIED: _ClassVar[PushResult]
SAVE_STATE_UNSPECIFIED: SaveState
SAVE_STATE_WRITING: SaveState
SAVE_STATE_DONE: SaveState
SAVE_STATE_FAILED: SaveState
FLOAT_ENCODING_UNSPECIFIED: FloatEncoding
FLOAT_ENCODING_BFLOAT16: FloatEncoding
FLOAT_ENCODING_FLOAT16: FloatEncoding
FLOAT_ENCODING_INT8_BLOCKS: FloatEncoding
FLOAT_ENCODING_TOP_K: FloatEncoding
FLOAT_ENCODING_INT4_BLOCKS: FloatEncoding
PUSH_RESULT_UNSPECIFIED: PushResult
PUSH_RESULT_STAGED: PushResult
PUSH_RESULT_STALE: PushResult
PUSH_RESULT_DUPLICATE: PushResult
PUSH_RESULT_APPLIED: PushResult

class AdoptShardRequest(_message.Message):
    __slots__ = ("fence", "chief_address", "replica", "session_keys")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    CHIEF_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEYS_FIELD_NUMBER: _ClassVar[int]
    fence: _tensor_pb2.Fence
    chief_address: str
    replica: ReplicaState
    session_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, fence: _Optional[_Union[_tensor_pb2.Fence, _Mapping]] = ..., chief_address: _Optional[str] = ..., replica: _Optional[_Union[ReplicaState, _Mapping]] = ..., session_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReplicaState(_message.Message):
    __slots__ = ("version", "is_alone", "forgets")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_ALONE_FIELD_NUMBER: _ClassVar[int]
    FORGETS_FIELD_NUMBER: _ClassVar[int]
    version: int
    is_alone: bool
    forgets: bool
    def __init__(self, version: _Optional[int] = ..., is_alone: bool = ..., forgets: bool = ...) -> None: ...

class AdoptShardResponse(_message.Message):
    __slots__ = ("step", "layout_hash", "record", "record_version", "last_apply", "pushes", "session_keys", "was_alone", "given_up")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    RECORD_VERSION_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLY_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEYS_FIELD_NUMBER: _ClassVar[int]
    WAS_ALONE_FIELD_NUMBER: _ClassVar[int]
    GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    step: int
    layout_hash: str
    record: bytes
    record_version: int
    last_apply: ApplyRequest
    pushes: _containers.RepeatedCompositeFieldContainer[WorkerPushes]
    session_keys: _containers.RepeatedScalarFieldContainer[bytes]
    was_alone: bool
    given_up: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.PushId]
    def __init__(self, step: _Optional[int] = ..., layout_hash: _Optional[str] = ..., record: _Optional[bytes] = ..., record_version: _Optional[int] = ..., last_apply: _Optional[_Union[ApplyRequest, _Mapping]] = ..., pushes: _Optional[_Iterable[_Union[WorkerPushes, _Mapping]]] = ..., session_keys: _Optional[_Iterable[bytes]] = ..., was_alone: bool = ..., given_up: _Optional[_Iterable[_Union[_tensor_pb2.PushId, _Mapping]]] = ...) -> None: ...

class WorkerPushes(_message.Message):
    __slots__ = ("worker", "incarnation", "applied")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    applied: _containers.RepeatedCompositeFieldContainer[AppliedPush]
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., applied: _Optional[_Iterable[_Union[AppliedPush, _Mapping]]] = ...) -> None: ...

class AppliedPush(_message.Message):
    __slots__ = ("sequence", "step")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    step: int
    def __init__(self, sequence: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class KeepRecordRequest(_message.Message):
    __slots__ = ("fence", "version", "record", "settings")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    fence: _tensor_pb2.Fence
    version: int
    record: bytes
    settings: ShardSettings
    def __init__(self, fence: _Optional[_Union[_tensor_pb2.Fence, _Mapping]] = ..., version: _Optional[int] = ..., record: _Optional[bytes] = ..., settings: _Optional[_Union[ShardSettings, _Mapping]] = ...) -> None: ...

class KeepRecordResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveShardRequest(_message.Message):
    __slots__ = ("fence", "step", "tag", "max_wait", "num_shards", "since")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    fence: _tensor_pb2.Fence
    step: int
    tag: str
    max_wait: _duration_pb2.Duration
    num_shards: int
    since: int
    def __init__(self, fence: _Optional[_Union[_tensor_pb2.Fence, _Mapping]] = ..., step: _Optional[int] = ..., tag: _Optional[str] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_shards: _Optional[int] = ..., since: _Optional[int] = ...) -> None: ...

class SaveShardResponse(_message.Message):
    __slots__ = ("state", "file", "failure")
    STATE_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    state: SaveState
    file: CheckpointFile
    failure: _error_pb2.CallError
    def __init__(self, state: _Optional[_Union[SaveState, str]] = ..., file: _Optional[_Union[CheckpointFile, _Mapping]] = ..., failure: _Optional[_Union[_error_pb2.CallError, _Mapping]] = ...) -> None: ...

class CheckpointFile(_message.Message):
    __slots__ = ("name", "shard", "num_bytes", "sha256", "tag", "is_delta")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    IS_DELTA_FIELD_NUMBER: _ClassVar[int]
    name: str
    shard: int
    num_bytes: int
    sha256: str
    tag: str
    is_delta: bool
    def __init__(self, name: _Optional[str] = ..., shard: _Optional[int] = ..., num_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., tag: _Optional[str] = ..., is_delta: bool = ...) -> None: ...

class RestoreShardRequest(_message.Message):
    __slots__ = ("fence", "spec", "tag", "manifest_sha256", "settings", "max_wait", "replica_version")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    REPLICA_VERSION_FIELD_NUMBER: _ClassVar[int]
    fence: _tensor_pb2.Fence
    spec: ShardSpec
    tag: str
    manifest_sha256: str
    settings: ShardSettings
    max_wait: _duration_pb2.Duration
    replica_version: int
    def __init__(self, fence: _Optional[_Union[_tensor_pb2.Fence, _Mapping]] = ..., spec: _Optional[_Union[ShardSpec, _Mapping]] = ..., tag: _Optional[str] = ..., manifest_sha256: _Optional[str] = ..., settings: _Optional[_Union[ShardSettings, _Mapping]] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., replica_version: _Optional[int] = ...) -> None: ...

class RestoreShardResponse(_message.Message):
    __slots__ = ("is_done", "num_bytes_read", "num_bytes")
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    is_done: bool
    num_bytes_read: int
    num_bytes: int
    def __init__(self, is_done: bool = ..., num_bytes_read: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class CreateVariablesRequest(_message.Message):
    __slots__ = ("spec", "frame")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    spec: ShardSpec
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, spec: _Optional[_Union[ShardSpec, _Mapping]] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class ShardSpec(_message.Message):
    __slots__ = ("epoch", "shard", "slices", "optimizer", "layout_hash", "initial_step", "attempt", "max_staged_per_worker", "averages", "clip")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    INITIAL_STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_STAGED_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    AVERAGES_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    shard: int
    slices: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.VariableSlice]
    optimizer: _tensor_pb2.OptimizerSpec
    layout_hash: str
    initial_step: int
    attempt: int
    max_staged_per_worker: int
    averages: _tensor_pb2.AverageSpec
    clip: _tensor_pb2.ClipSpec
    def __init__(self, epoch: _Optional[int] = ..., shard: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[_tensor_pb2.VariableSlice, _Mapping]]] = ..., optimizer: _Optional[_Union[_tensor_pb2.OptimizerSpec, _Mapping]] = ..., layout_hash: _Optional[str] = ..., initial_step: _Optional[int] = ..., attempt: _Optional[int] = ..., max_staged_per_worker: _Optional[int] = ..., averages: _Optional[_Union[_tensor_pb2.AverageSpec, _Mapping]] = ..., clip: _Optional[_Union[_tensor_pb2.ClipSpec, _Mapping]] = ...) -> None: ...

class CreateVariablesResponse(_message.Message):
    __slots__ = ("created",)
    CREATED_FIELD_NUMBER: _ClassVar[int]
    created: bool
    def __init__(self, created: bool = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("epoch", "step", "layout_hash", "encoding", "held_step", "max_wait", "slot", "payload", "offset")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    HELD_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    layout_hash: str
    encoding: FloatEncoding
    held_step: int
    max_wait: _duration_pb2.Duration
    slot: str
    payload: Payload
    offset: int
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., layout_hash: _Optional[str] = ..., encoding: _Optional[_Union[FloatEncoding, str]] = ..., held_step: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., slot: _Optional[str] = ..., payload: _Optional[_Union[Payload, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchWeightsRequest(_message.Message):
    __slots__ = ("era", "layout_hash", "encoding", "step", "held_step", "slices", "offset", "max_wait")
    ERA_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HELD_STEP_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    era: _tensor_pb2.Era
    layout_hash: str
    encoding: FloatEncoding
    step: int
    held_step: int
    slices: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    max_wait: _duration_pb2.Duration
    def __init__(self, era: _Optional[_Union[_tensor_pb2.Era, _Mapping]] = ..., layout_hash: _Optional[str] = ..., encoding: _Optional[_Union[FloatEncoding, str]] = ..., step: _Optional[int] = ..., held_step: _Optional[int] = ..., slices: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class FetchWeightsResponse(_message.Message):
    __slots__ = ("step", "newest_step", "is_patch", "num_bytes", "content", "digests")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEWEST_STEP_FIELD_NUMBER: _ClassVar[int]
    IS_PATCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    newest_step: int
    is_patch: bool
    num_bytes: int
    content: bytes
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., newest_step: _Optional[int] = ..., is_patch: bool = ..., num_bytes: _Optional[int] = ..., content: _Optional[bytes] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: ReadHeader
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, header: _Optional[_Union[ReadHeader, _Mapping]] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class ReadHeader(_message.Message):
    __slots__ = ("step", "num_bytes", "error", "by_socket")
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BY_SOCKET_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_bytes: int
    error: _error_pb2.CallError
    by_socket: bool
    def __init__(self, step: _Optional[int] = ..., num_bytes: _Optional[int] = ..., error: _Optional[_Union[_error_pb2.CallError, _Mapping]] = ..., by_socket: bool = ...) -> None: ...

class PushRequest(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("era", "push_id", "step", "layout_hash", "sparse", "absent", "metrics", "refused", "encoding", "encoded_bytes", "gradient_buffer", "content_bytes", "secret", "resumes", "payload", "formulas")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Metric
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Metric, _Mapping]] = ...) -> None: ...
    ERA_FIELD_NUMBER: _ClassVar[int]
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    ENCODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_BUFFER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    FORMULAS_FIELD_NUMBER: _ClassVar[int]
    era: _tensor_pb2.Era
    push_id: _tensor_pb2.PushId
    step: int
    layout_hash: str
    sparse: _containers.RepeatedCompositeFieldContainer[SparsePart]
    absent: _containers.RepeatedScalarFieldContainer[int]
    metrics: _containers.MessageMap[str, Metric]
    refused: _containers.RepeatedScalarFieldContainer[int]
    encoding: FloatEncoding
    encoded_bytes: int
    gradient_buffer: int
    content_bytes: int
    secret: int
    resumes: bool
    payload: Payload
    formulas: _containers.RepeatedCompositeFieldContainer[FormulaUpdate]
    def __init__(self, era: _Optional[_Union[_tensor_pb2.Era, _Mapping]] = ..., push_id: _Optional[_Union[_tensor_pb2.PushId, _Mapping]] = ..., step: _Optional[int] = ..., layout_hash: _Optional[str] = ..., sparse: _Optional[_Iterable[_Union[SparsePart, _Mapping]]] = ..., absent: _Optional[_Iterable[int]] = ..., metrics: _Optional[_Mapping[str, Metric]] = ..., refused: _Optional[_Iterable[int]] = ..., encoding: _Optional[_Union[FloatEncoding, str]] = ..., encoded_bytes: _Optional[int] = ..., gradient_buffer: _Optional[int] = ..., content_bytes: _Optional[int] = ..., secret: _Optional[int] = ..., resumes: bool = ..., payload: _Optional[_Union[Payload, _Mapping]] = ..., formulas: _Optional[_Iterable[_Union[FormulaUpdate, _Mapping]]] = ...) -> None: ...

class FormulaUpdate(_message.Message):
    __slots__ = ("text", "variables", "arrays", "numbers")
    class VariablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ArraysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TEXT_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    text: str
    variables: _containers.ScalarMap[str, int]
    arrays: _containers.ScalarMap[str, int]
    numbers: _containers.ScalarMap[str, float]
    def __init__(self, text: _Optional[str] = ..., variables: _Optional[_Mapping[str, int]] = ..., arrays: _Optional[_Mapping[str, int]] = ..., numbers: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Payload(_message.Message):
    __slots__ = ("socket", "number")
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    socket: bytes
    number: int
    def __init__(self, socket: _Optional[bytes] = ..., number: _Optional[int] = ...) -> None: ...

class SparsePart(_message.Message):
    __slots__ = ("table", "num_rows")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    table: int
    num_rows: int
    def __init__(self, table: _Optional[int] = ..., num_rows: _Optional[int] = ...) -> None: ...

class Metric(_message.Message):
    __slots__ = ("value", "weight")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    value: float
    weight: float
    def __init__(self, value: _Optional[float] = ..., weight: _Optional[float] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("result", "step")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    result: PushResult
    step: int
    def __init__(self, result: _Optional[_Union[PushResult, str]] = ..., step: _Optional[int] = ...) -> None: ...

class PushResponse(_message.Message):
    __slots__ = ("push_id", "reply", "error", "received_bytes")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    push_id: _tensor_pb2.PushId
    reply: PushReply
    error: _error_pb2.CallError
    received_bytes: int
    def __init__(self, push_id: _Optional[_Union[_tensor_pb2.PushId, _Mapping]] = ..., reply: _Optional[_Union[PushReply, _Mapping]] = ..., error: _Optional[_Union[_error_pb2.CallError, _Mapping]] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class CommandRequest(_message.Message):
    __slots__ = ("call", "apply", "prepare")
    CALL_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    call: int
    apply: ApplyRequest
    prepare: ApplyRequest
    def __init__(self, call: _Optional[int] = ..., apply: _Optional[_Union[ApplyRequest, _Mapping]] = ..., prepare: _Optional[_Union[ApplyRequest, _Mapping]] = ...) -> None: ...

class CommandResponse(_message.Message):
    __slots__ = ("call", "apply", "prepare", "error")
    CALL_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call: int
    apply: ApplyReply
    prepare: PrepareReply
    error: _error_pb2.CallError
    def __init__(self, call: _Optional[int] = ..., apply: _Optional[_Union[ApplyReply, _Mapping]] = ..., prepare: _Optional[_Union[PrepareReply, _Mapping]] = ..., error: _Optional[_Union[_error_pb2.CallError, _Mapping]] = ...) -> None: ...

class ShareMemoryRequest(_message.Message):
    __slots__ = ("claim", "proof", "num_buffers")
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    NUM_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    claim: MemoryClaim
    proof: MemoryProof
    num_buffers: int
    def __init__(self, claim: _Optional[_Union[MemoryClaim, _Mapping]] = ..., proof: _Optional[_Union[MemoryProof, _Mapping]] = ..., num_buffers: _Optional[int] = ...) -> None: ...

class MemoryClaim(_message.Message):
    __slots__ = ("epoch", "worker", "incarnation", "layout_hash", "num_buffers", "boot_id", "secret")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    worker: int
    incarnation: int
    layout_hash: str
    num_buffers: int
    boot_id: str
    secret: int
    def __init__(self, epoch: _Optional[int] = ..., worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., layout_hash: _Optional[str] = ..., num_buffers: _Optional[int] = ..., boot_id: _Optional[str] = ..., secret: _Optional[int] = ...) -> None: ...

class MemoryProof(_message.Message):
    __slots__ = ("nonces",)
    NONCES_FIELD_NUMBER: _ClassVar[int]
    nonces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, nonces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ShareMemoryResponse(_message.Message):
    __slots__ = ("offer", "grant")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    offer: MemoryOffer
    grant: MemoryGrant
    def __init__(self, offer: _Optional[_Union[MemoryOffer, _Mapping]] = ..., grant: _Optional[_Union[MemoryGrant, _Mapping]] = ...) -> None: ...

class MemoryOffer(_message.Message):
    __slots__ = ("pid", "segments")
    PID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    segments: _containers.RepeatedCompositeFieldContainer[MemorySegment]
    def __init__(self, pid: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[MemorySegment, _Mapping]]] = ...) -> None: ...

class MemorySegment(_message.Message):
    __slots__ = ("descriptor", "num_bytes")
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    descriptor: int
    num_bytes: int
    def __init__(self, descriptor: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class MemoryGrant(_message.Message):
    __slots__ = ("num_buffers",)
    NUM_BUFFERS_FIELD_NUMBER: _ClassVar[int]
    num_buffers: int
    def __init__(self, num_buffers: _Optional[int] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("fence", "step", "contributors", "weights", "scales", "discards", "ranges", "without", "attached", "wants_checksums", "merge", "shares")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    DISCARDS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    WANTS_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    fence: _tensor_pb2.Fence
    step: int
    contributors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.PushId]
    weights: _containers.RepeatedScalarFieldContainer[float]
    scales: _containers.RepeatedScalarFieldContainer[float]
    discards: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.PushId]
    ranges: _containers.RepeatedScalarFieldContainer[int]
    without: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.PushId]
    attached: _tensor_pb2.StepAttachments
    wants_checksums: bool
    merge: _tensor_pb2.Merge
    shares: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, fence: _Optional[_Union[_tensor_pb2.Fence, _Mapping]] = ..., step: _Optional[int] = ..., contributors: _Optional[_Iterable[_Union[_tensor_pb2.PushId, _Mapping]]] = ..., weights: _Optional[_Iterable[float]] = ..., scales: _Optional[_Iterable[float]] = ..., discards: _Optional[_Iterable[_Union[_tensor_pb2.PushId, _Mapping]]] = ..., ranges: _Optional[_Iterable[int]] = ..., without: _Optional[_Iterable[_Union[_tensor_pb2.PushId, _Mapping]]] = ..., attached: _Optional[_Union[_tensor_pb2.StepAttachments, _Mapping]] = ..., wants_checksums: bool = ..., merge: _Optional[_Union[_tensor_pb2.Merge, _Mapping]] = ..., shares: _Optional[_Iterable[float]] = ...) -> None: ...

class ApplyReply(_message.Message):
    __slots__ = ("step", "repeated_request", "checksums")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REPEATED_REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    step: int
    repeated_request: bool
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., repeated_request: bool = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class ShardSettings(_message.Message):
    __slots__ = ("fence", "version", "accepts_stale", "applies_on_arrival", "optimizers", "rejects_nonfinite")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_STALE_FIELD_NUMBER: _ClassVar[int]
    APPLIES_ON_ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    REJECTS_NONFINITE_FIELD_NUMBER: _ClassVar[int]
    fence: _tensor_pb2.Fence
    version: int
    accepts_stale: bool
    applies_on_arrival: bool
    optimizers: _containers.RepeatedCompositeFieldContainer[OptimizerChange]
    rejects_nonfinite: bool
    def __init__(self, fence: _Optional[_Union[_tensor_pb2.Fence, _Mapping]] = ..., version: _Optional[int] = ..., accepts_stale: bool = ..., applies_on_arrival: bool = ..., optimizers: _Optional[_Iterable[_Union[OptimizerChange, _Mapping]]] = ..., rejects_nonfinite: bool = ...) -> None: ...

class OptimizerChange(_message.Message):
    __slots__ = ("original", "current")
    ORIGINAL_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    original: _tensor_pb2.OptimizerSpec
    current: _tensor_pb2.OptimizerSpec
    def __init__(self, original: _Optional[_Union[_tensor_pb2.OptimizerSpec, _Mapping]] = ..., current: _Optional[_Union[_tensor_pb2.OptimizerSpec, _Mapping]] = ...) -> None: ...

class PrepareReply(_message.Message):
    __slots__ = ("sums",)
    SUMS_FIELD_NUMBER: _ClassVar[int]
    sums: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sums: _Optional[_Iterable[float]] = ...) -> None: ...

class ReadRowsRequest(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: RowsHeader
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, header: _Optional[_Union[RowsHeader, _Mapping]] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class RowsHeader(_message.Message):
    __slots__ = ("epoch", "layout_hash", "table", "step", "slot", "num_rows", "is_prefetch")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    IS_PREFETCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    layout_hash: str
    table: int
    step: int
    slot: str
    num_rows: int
    is_prefetch: bool
    def __init__(self, epoch: _Optional[int] = ..., layout_hash: _Optional[str] = ..., table: _Optional[int] = ..., step: _Optional[int] = ..., slot: _Optional[str] = ..., num_rows: _Optional[int] = ..., is_prefetch: bool = ...) -> None: ...

class ReadRowsResponse(_message.Message):
    __slots__ = ("step", "frame")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    step: int
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, step: _Optional[int] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class ReadMetricsRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ReadMetricsResponse(_message.Message):
    __slots__ = ("cells",)
    CELLS_FIELD_NUMBER: _ClassVar[int]
    cells: _containers.RepeatedCompositeFieldContainer[MetricCell]
    def __init__(self, cells: _Optional[_Iterable[_Union[MetricCell, _Mapping]]] = ...) -> None: ...

class CountRowsRequest(_message.Message):
    __slots__ = ("epoch", "name")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    name: str
    def __init__(self, epoch: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class CountRowsResponse(_message.Message):
    __slots__ = ("counts",)
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ...) -> None: ...

class KeepStoryRequest(_message.Message):
    __slots__ = ("story",)
    STORY_FIELD_NUMBER: _ClassVar[int]
    story: bytes
    def __init__(self, story: _Optional[bytes] = ...) -> None: ...

class KeepStoryResponse(_message.Message):
    __slots__ = ("story",)
    STORY_FIELD_NUMBER: _ClassVar[int]
    story: bytes
    def __init__(self, story: _Optional[bytes] = ...) -> None: ...

class MetricCell(_message.Message):
    __slots__ = ("name", "worker", "total", "weight", "count", "last")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    name: str
    worker: int
    total: float
    weight: float
    count: int
    last: float
    def __init__(self, name: _Optional[str] = ..., worker: _Optional[int] = ..., total: _Optional[float] = ..., weight: _Optional[float] = ..., count: _Optional[int] = ..., last: _Optional[float] = ...) -> None: ...

class HiddenState(_message.Message):
    __slots__ = ("step", "powers", "phase", "phase_step", "average_product", "num_nonfinite", "metrics", "pushes", "table_rows")
    STEP_FIELD_NUMBER: _ClassVar[int]
    POWERS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_STEP_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_PRODUCT_FIELD_NUMBER: _ClassVar[int]
    NUM_NONFINITE_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    TABLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    step: int
    powers: _containers.RepeatedCompositeFieldContainer[OptimizerPowers]
    phase: int
    phase_step: int
    average_product: float
    num_nonfinite: int
    metrics: _containers.RepeatedCompositeFieldContainer[MetricCell]
    pushes: _containers.RepeatedCompositeFieldContainer[WorkerPushes]
    table_rows: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., powers: _Optional[_Iterable[_Union[OptimizerPowers, _Mapping]]] = ..., phase: _Optional[int] = ..., phase_step: _Optional[int] = ..., average_product: _Optional[float] = ..., num_nonfinite: _Optional[int] = ..., metrics: _Optional[_Iterable[_Union[MetricCell, _Mapping]]] = ..., pushes: _Optional[_Iterable[_Union[WorkerPushes, _Mapping]]] = ..., table_rows: _Optional[_Iterable[int]] = ...) -> None: ...

class OptimizerPowers(_message.Message):
    __slots__ = ("key", "powers")
    KEY_FIELD_NUMBER: _ClassVar[int]
    POWERS_FIELD_NUMBER: _ClassVar[int]
    key: str
    powers: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, key: _Optional[str] = ..., powers: _Optional[_Iterable[float]] = ...) -> None: ...

class GetShardStatusRequest(_message.Message):
    __slots__ = ("fence",)
    FENCE_FIELD_NUMBER: _ClassVar[int]
    fence: _tensor_pb2.Fence
    def __init__(self, fence: _Optional[_Union[_tensor_pb2.Fence, _Mapping]] = ...) -> None: ...

class GetShardStatusResponse(_message.Message):
    __slots__ = ("shard", "process_incarnation", "fence", "step", "report", "settings_version", "chief_address", "chief_heard_ago", "is_alone", "slots", "damage", "is_leaving")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PROCESS_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHIEF_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CHIEF_HEARD_AGO_FIELD_NUMBER: _ClassVar[int]
    IS_ALONE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    IS_LEAVING_FIELD_NUMBER: _ClassVar[int]
    shard: int
    process_incarnation: int
    fence: _tensor_pb2.Fence
    step: int
    report: ShardReport
    settings_version: int
    chief_address: str
    chief_heard_ago: _duration_pb2.Duration
    is_alone: bool
    slots: _containers.RepeatedScalarFieldContainer[str]
    damage: str
    is_leaving: bool
    def __init__(self, shard: _Optional[int] = ..., process_incarnation: _Optional[int] = ..., fence: _Optional[_Union[_tensor_pb2.Fence, _Mapping]] = ..., step: _Optional[int] = ..., report: _Optional[_Union[ShardReport, _Mapping]] = ..., settings_version: _Optional[int] = ..., chief_address: _Optional[str] = ..., chief_heard_ago: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., is_alone: bool = ..., slots: _Optional[_Iterable[str]] = ..., damage: _Optional[str] = ..., is_leaving: bool = ...) -> None: ...

class ShardReport(_message.Message):
    __slots__ = ("allocated_bytes", "num_staged", "num_pushes", "num_stale", "num_duplicates", "num_nonfinite", "num_sharing", "last_apply", "variables_bytes", "slots_bytes", "created_bytes", "cpu", "num_rows", "num_evicted", "num_refused", "num_made", "num_unadmitted", "limit_bytes", "files_bytes", "num_found")
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGED_FIELD_NUMBER: _ClassVar[int]
    NUM_PUSHES_FIELD_NUMBER: _ClassVar[int]
    NUM_STALE_FIELD_NUMBER: _ClassVar[int]
    NUM_DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    NUM_NONFINITE_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARING_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLY_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_MADE_FIELD_NUMBER: _ClassVar[int]
    NUM_UNADMITTED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILES_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FOUND_FIELD_NUMBER: _ClassVar[int]
    allocated_bytes: int
    num_staged: int
    num_pushes: int
    num_stale: int
    num_duplicates: int
    num_nonfinite: int
    num_sharing: int
    last_apply: _duration_pb2.Duration
    variables_bytes: int
    slots_bytes: int
    created_bytes: int
    cpu: _duration_pb2.Duration
    num_rows: int
    num_evicted: int
    num_refused: int
    num_made: int
    num_unadmitted: int
    limit_bytes: int
    files_bytes: int
    num_found: int
    def __init__(self, allocated_bytes: _Optional[int] = ..., num_staged: _Optional[int] = ..., num_pushes: _Optional[int] = ..., num_stale: _Optional[int] = ..., num_duplicates: _Optional[int] = ..., num_nonfinite: _Optional[int] = ..., num_sharing: _Optional[int] = ..., last_apply: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., variables_bytes: _Optional[int] = ..., slots_bytes: _Optional[int] = ..., created_bytes: _Optional[int] = ..., cpu: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_rows: _Optional[int] = ..., num_evicted: _Optional[int] = ..., num_refused: _Optional[int] = ..., num_made: _Optional[int] = ..., num_unadmitted: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., files_bytes: _Optional[int] = ..., num_found: _Optional[int] = ...) -> None: ...

class OpenDataSocketRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenDataSocketResponse(_message.Message):
    __slots__ = ("nonce", "port", "path")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    port: int
    path: str
    def __init__(self, nonce: _Optional[bytes] = ..., port: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class ShutdownShardRequest(_message.Message):
    __slots__ = ("fence", "reason")
    FENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fence: _tensor_pb2.Fence
    reason: str
    def __init__(self, fence: _Optional[_Union[_tensor_pb2.Fence, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class ShutdownShardResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
