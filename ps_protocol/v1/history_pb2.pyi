from ps_protocol.v1 import parameter_service_pb2 as _parameter_service_pb2
from ps_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HistoryRecord(_message.Message):
    __slots__ = ("number", "content_bytes", "begun", "contributed", "answered", "created", "state_kept", "configured", "applied", "arrived", "counted")
    class Begun(_message.Message):
        __slots__ = ("format", "role", "pid", "segment")
        FORMAT_FIELD_NUMBER: _ClassVar[int]
        ROLE_FIELD_NUMBER: _ClassVar[int]
        PID_FIELD_NUMBER: _ClassVar[int]
        SEGMENT_FIELD_NUMBER: _ClassVar[int]
        format: int
        role: str
        pid: int
        segment: int
        def __init__(self, format: _Optional[int] = ..., role: _Optional[str] = ..., pid: _Optional[int] = ..., segment: _Optional[int] = ...) -> None: ...
    class Contributed(_message.Message):
        __slots__ = ("shard", "header")
        SHARD_FIELD_NUMBER: _ClassVar[int]
        HEADER_FIELD_NUMBER: _ClassVar[int]
        shard: int
        header: _parameter_service_pb2.PushHeader
        def __init__(self, shard: _Optional[int] = ..., header: _Optional[_Union[_parameter_service_pb2.PushHeader, _Mapping]] = ...) -> None: ...
    class Answered(_message.Message):
        __slots__ = ("push_id", "epoch", "outcome", "applied_step")
        PUSH_ID_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        OUTCOME_FIELD_NUMBER: _ClassVar[int]
        APPLIED_STEP_FIELD_NUMBER: _ClassVar[int]
        push_id: _tensor_pb2.PushId
        epoch: int
        outcome: str
        applied_step: int
        def __init__(self, push_id: _Optional[_Union[_tensor_pb2.PushId, _Mapping]] = ..., epoch: _Optional[int] = ..., outcome: _Optional[str] = ..., applied_step: _Optional[int] = ...) -> None: ...
    class Created(_message.Message):
        __slots__ = ("spec", "process")
        SPEC_FIELD_NUMBER: _ClassVar[int]
        PROCESS_FIELD_NUMBER: _ClassVar[int]
        spec: _parameter_service_pb2.ShardSpec
        process: int
        def __init__(self, spec: _Optional[_Union[_parameter_service_pb2.ShardSpec, _Mapping]] = ..., process: _Optional[int] = ...) -> None: ...
    class StateKept(_message.Message):
        __slots__ = ("spec", "settings", "process", "hidden", "from_epoch")
        SPEC_FIELD_NUMBER: _ClassVar[int]
        SETTINGS_FIELD_NUMBER: _ClassVar[int]
        PROCESS_FIELD_NUMBER: _ClassVar[int]
        HIDDEN_FIELD_NUMBER: _ClassVar[int]
        FROM_EPOCH_FIELD_NUMBER: _ClassVar[int]
        spec: _parameter_service_pb2.ShardSpec
        settings: _parameter_service_pb2.ShardSettings
        process: int
        hidden: _parameter_service_pb2.HiddenState
        from_epoch: int
        def __init__(self, spec: _Optional[_Union[_parameter_service_pb2.ShardSpec, _Mapping]] = ..., settings: _Optional[_Union[_parameter_service_pb2.ShardSettings, _Mapping]] = ..., process: _Optional[int] = ..., hidden: _Optional[_Union[_parameter_service_pb2.HiddenState, _Mapping]] = ..., from_epoch: _Optional[int] = ...) -> None: ...
    class Configured(_message.Message):
        __slots__ = ("step", "settings")
        STEP_FIELD_NUMBER: _ClassVar[int]
        SETTINGS_FIELD_NUMBER: _ClassVar[int]
        step: int
        settings: _parameter_service_pb2.ShardSettings
        def __init__(self, step: _Optional[int] = ..., settings: _Optional[_Union[_parameter_service_pb2.ShardSettings, _Mapping]] = ...) -> None: ...
    class Applied(_message.Message):
        __slots__ = ("request", "sha256")
        REQUEST_FIELD_NUMBER: _ClassVar[int]
        SHA256_FIELD_NUMBER: _ClassVar[int]
        request: _parameter_service_pb2.ApplyRequest
        sha256: str
        def __init__(self, request: _Optional[_Union[_parameter_service_pb2.ApplyRequest, _Mapping]] = ..., sha256: _Optional[str] = ...) -> None: ...
    class Arrived(_message.Message):
        __slots__ = ("push_id", "epoch")
        PUSH_ID_FIELD_NUMBER: _ClassVar[int]
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        push_id: _tensor_pb2.PushId
        epoch: int
        def __init__(self, push_id: _Optional[_Union[_tensor_pb2.PushId, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...
    class Counted(_message.Message):
        __slots__ = ("epoch", "step", "contributors")
        EPOCH_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
        epoch: int
        step: int
        contributors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.PushId]
        def __init__(self, epoch: _Optional[int] = ..., step: _Optional[int] = ..., contributors: _Optional[_Iterable[_Union[_tensor_pb2.PushId, _Mapping]]] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CONTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTED_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    STATE_KEPT_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    number: int
    content_bytes: int
    begun: HistoryRecord.Begun
    contributed: HistoryRecord.Contributed
    answered: HistoryRecord.Answered
    created: HistoryRecord.Created
    state_kept: HistoryRecord.StateKept
    configured: HistoryRecord.Configured
    applied: HistoryRecord.Applied
    arrived: HistoryRecord.Arrived
    counted: HistoryRecord.Counted
    def __init__(self, number: _Optional[int] = ..., content_bytes: _Optional[int] = ..., begun: _Optional[_Union[HistoryRecord.Begun, _Mapping]] = ..., contributed: _Optional[_Union[HistoryRecord.Contributed, _Mapping]] = ..., answered: _Optional[_Union[HistoryRecord.Answered, _Mapping]] = ..., created: _Optional[_Union[HistoryRecord.Created, _Mapping]] = ..., state_kept: _Optional[_Union[HistoryRecord.StateKept, _Mapping]] = ..., configured: _Optional[_Union[HistoryRecord.Configured, _Mapping]] = ..., applied: _Optional[_Union[HistoryRecord.Applied, _Mapping]] = ..., arrived: _Optional[_Union[HistoryRecord.Arrived, _Mapping]] = ..., counted: _Optional[_Union[HistoryRecord.Counted, _Mapping]] = ...) -> None: ...
