import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from ps_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUSH_RESULT_UNSPECIFIED: _ClassVar[PushResult]
    PUSH_RESULT_STAGED: _ClassVar[PushResult]
    PUSH_RESULT_STALE: _ClassVar[PushResult]
    PUSH_RESULT_DUPLICATE: _ClassVar[PushResult]
PUSH_RESULT_UNSPECIFIED: PushResult
PUSH_RESULT_STAGED: PushResult
PUSH_RESULT_STALE: PushResult
PUSH_RESULT_DUPLICATE: PushResult

class AdoptShardRequest(_message.Message):
    __slots__ = ("epoch", "chief_incarnation")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHIEF_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    chief_incarnation: int
    def __init__(self, epoch: _Optional[int] = ..., chief_incarnation: _Optional[int] = ...) -> None: ...

class AdoptShardResponse(_message.Message):
    __slots__ = ("step", "layout_hash")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    step: int
    layout_hash: str
    def __init__(self, step: _Optional[int] = ..., layout_hash: _Optional[str] = ...) -> None: ...

class CreateVariablesRequest(_message.Message):
    __slots__ = ("spec", "frame")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    spec: ShardSpec
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, spec: _Optional[_Union[ShardSpec, _Mapping]] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class ShardSpec(_message.Message):
    __slots__ = ("epoch", "shard", "slices", "optimizer", "layout_hash", "initial_step", "attempt", "max_staged_per_worker")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    INITIAL_STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_STAGED_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    shard: int
    slices: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.VariableSlice]
    optimizer: _tensor_pb2.OptimizerSpec
    layout_hash: str
    initial_step: int
    attempt: int
    max_staged_per_worker: int
    def __init__(self, epoch: _Optional[int] = ..., shard: _Optional[int] = ..., slices: _Optional[_Iterable[_Union[_tensor_pb2.VariableSlice, _Mapping]]] = ..., optimizer: _Optional[_Union[_tensor_pb2.OptimizerSpec, _Mapping]] = ..., layout_hash: _Optional[str] = ..., initial_step: _Optional[int] = ..., attempt: _Optional[int] = ..., max_staged_per_worker: _Optional[int] = ...) -> None: ...

class CreateVariablesResponse(_message.Message):
    __slots__ = ("created",)
    CREATED_FIELD_NUMBER: _ClassVar[int]
    created: bool
    def __init__(self, created: bool = ...) -> None: ...

class ReadVariablesRequest(_message.Message):
    __slots__ = ("epoch", "step", "layout_hash")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    step: int
    layout_hash: str
    def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., layout_hash: _Optional[str] = ...) -> None: ...

class ReadVariablesResponse(_message.Message):
    __slots__ = ("step", "frame")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    step: int
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, step: _Optional[int] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class PushGradientsRequest(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("epoch", "push_id", "step", "layout_hash")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    push_id: _tensor_pb2.PushId
    step: int
    layout_hash: str
    def __init__(self, epoch: _Optional[int] = ..., push_id: _Optional[_Union[_tensor_pb2.PushId, _Mapping]] = ..., step: _Optional[int] = ..., layout_hash: _Optional[str] = ...) -> None: ...

class PushGradientsResponse(_message.Message):
    __slots__ = ("result", "step")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    result: PushResult
    step: int
    def __init__(self, result: _Optional[_Union[PushResult, str]] = ..., step: _Optional[int] = ...) -> None: ...

class ApplyStepRequest(_message.Message):
    __slots__ = ("epoch", "chief_incarnation", "step", "contributors")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHIEF_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    chief_incarnation: int
    step: int
    contributors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.PushId]
    def __init__(self, epoch: _Optional[int] = ..., chief_incarnation: _Optional[int] = ..., step: _Optional[int] = ..., contributors: _Optional[_Iterable[_Union[_tensor_pb2.PushId, _Mapping]]] = ...) -> None: ...

class ApplyStepResponse(_message.Message):
    __slots__ = ("step", "repeated_request")
    STEP_FIELD_NUMBER: _ClassVar[int]
    REPEATED_REQUEST_FIELD_NUMBER: _ClassVar[int]
    step: int
    repeated_request: bool
    def __init__(self, step: _Optional[int] = ..., repeated_request: bool = ...) -> None: ...

class ListSlotsRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class ListSlotsResponse(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class ReadSlotRequest(_message.Message):
    __slots__ = ("epoch", "name", "layout_hash")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    name: str
    layout_hash: str
    def __init__(self, epoch: _Optional[int] = ..., name: _Optional[str] = ..., layout_hash: _Optional[str] = ...) -> None: ...

class ReadSlotResponse(_message.Message):
    __slots__ = ("step", "frame")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    step: int
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, step: _Optional[int] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class GetShardStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetShardStatusResponse(_message.Message):
    __slots__ = ("shard", "process_incarnation", "epoch", "step", "num_slices", "arena_bytes", "allocated_bytes", "num_staged", "num_pushes", "num_stale", "num_duplicates", "num_nonfinite", "last_apply", "chief_incarnation")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PROCESS_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_SLICES_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGED_FIELD_NUMBER: _ClassVar[int]
    NUM_PUSHES_FIELD_NUMBER: _ClassVar[int]
    NUM_STALE_FIELD_NUMBER: _ClassVar[int]
    NUM_DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    NUM_NONFINITE_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLY_FIELD_NUMBER: _ClassVar[int]
    CHIEF_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    shard: int
    process_incarnation: int
    epoch: int
    step: int
    num_slices: int
    arena_bytes: int
    allocated_bytes: int
    num_staged: int
    num_pushes: int
    num_stale: int
    num_duplicates: int
    num_nonfinite: int
    last_apply: _duration_pb2.Duration
    chief_incarnation: int
    def __init__(self, shard: _Optional[int] = ..., process_incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., num_slices: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., num_staged: _Optional[int] = ..., num_pushes: _Optional[int] = ..., num_stale: _Optional[int] = ..., num_duplicates: _Optional[int] = ..., num_nonfinite: _Optional[int] = ..., last_apply: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., chief_incarnation: _Optional[int] = ...) -> None: ...

class ShutdownShardRequest(_message.Message):
    __slots__ = ("epoch", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ShutdownShardResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
