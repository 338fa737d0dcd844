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

class Reduction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCTION_UNSPECIFIED: _ClassVar[Reduction]
    REDUCTION_MEAN: _ClassVar[Reduction]
    REDUCTION_SUM: _ClassVar[Reduction]
REDUCTION_UNSPECIFIED: Reduction
REDUCTION_MEAN: Reduction
REDUCTION_SUM: Reduction

class AccumulatorSpec(_message.Message):
    __slots__ = ("name", "data_type", "has_shape", "shape", "reduction", "is_sparse", "sparse_mean")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    HAS_SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    REDUCTION_FIELD_NUMBER: _ClassVar[int]
    IS_SPARSE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_MEAN_FIELD_NUMBER: _ClassVar[int]
    name: str
    data_type: _tensor_pb2.DataType
    has_shape: bool
    shape: _containers.RepeatedScalarFieldContainer[int]
    reduction: Reduction
    is_sparse: bool
    sparse_mean: _tensor_pb2.SparseMean
    def __init__(self, name: _Optional[str] = ..., data_type: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., has_shape: bool = ..., shape: _Optional[_Iterable[int]] = ..., reduction: _Optional[_Union[Reduction, str]] = ..., is_sparse: bool = ..., sparse_mean: _Optional[_Union[_tensor_pb2.SparseMean, str]] = ...) -> None: ...

class CreateAccumulatorRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: AccumulatorSpec
    def __init__(self, spec: _Optional[_Union[AccumulatorSpec, _Mapping]] = ...) -> None: ...

class CreateAccumulatorResponse(_message.Message):
    __slots__ = ("created", "step")
    CREATED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    created: bool
    step: int
    def __init__(self, created: bool = ..., step: _Optional[int] = ...) -> None: ...

class ApplyGradientRequest(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: GradientHeader
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, header: _Optional[_Union[GradientHeader, _Mapping]] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class GradientHeader(_message.Message):
    __slots__ = ("name", "client", "sequence", "local_step", "shape", "num_indices", "dense_shape", "has_dense_shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NUM_INDICES_FIELD_NUMBER: _ClassVar[int]
    DENSE_SHAPE_FIELD_NUMBER: _ClassVar[int]
    HAS_DENSE_SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    client: int
    sequence: int
    local_step: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    num_indices: int
    dense_shape: _containers.RepeatedScalarFieldContainer[int]
    has_dense_shape: bool
    def __init__(self, name: _Optional[str] = ..., client: _Optional[int] = ..., sequence: _Optional[int] = ..., local_step: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., num_indices: _Optional[int] = ..., dense_shape: _Optional[_Iterable[int]] = ..., has_dense_shape: bool = ...) -> None: ...

class ApplyGradientResponse(_message.Message):
    __slots__ = ("accepted", "step")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    step: int
    def __init__(self, accepted: bool = ..., step: _Optional[int] = ...) -> None: ...

class TakeGradientRequest(_message.Message):
    __slots__ = ("name", "client", "sequence", "num_required", "max_wait")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    client: int
    sequence: int
    num_required: int
    max_wait: _duration_pb2.Duration
    def __init__(self, name: _Optional[str] = ..., client: _Optional[int] = ..., sequence: _Optional[int] = ..., num_required: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TakeGradientResponse(_message.Message):
    __slots__ = ("header", "frame")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    header: TakenHeader
    frame: _tensor_pb2.ArenaFrame
    def __init__(self, header: _Optional[_Union[TakenHeader, _Mapping]] = ..., frame: _Optional[_Union[_tensor_pb2.ArenaFrame, _Mapping]] = ...) -> None: ...

class TakenHeader(_message.Message):
    __slots__ = ("is_ready", "count", "step", "shape", "num_indices", "dense_shape")
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NUM_INDICES_FIELD_NUMBER: _ClassVar[int]
    DENSE_SHAPE_FIELD_NUMBER: _ClassVar[int]
    is_ready: bool
    count: int
    step: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    num_indices: int
    dense_shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, is_ready: bool = ..., count: _Optional[int] = ..., step: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., num_indices: _Optional[int] = ..., dense_shape: _Optional[_Iterable[int]] = ...) -> None: ...

class SetAccumulatorStepRequest(_message.Message):
    __slots__ = ("name", "step")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    name: str
    step: int
    def __init__(self, name: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class SetAccumulatorStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetAccumulatorRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetAccumulatorResponse(_message.Message):
    __slots__ = ("spec", "num_accumulated", "step", "num_waiting")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCUMULATED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    spec: AccumulatorSpec
    num_accumulated: int
    step: int
    num_waiting: int
    def __init__(self, spec: _Optional[_Union[AccumulatorSpec, _Mapping]] = ..., num_accumulated: _Optional[int] = ..., step: _Optional[int] = ..., num_waiting: _Optional[int] = ...) -> None: ...

class DeleteAccumulatorRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeleteAccumulatorResponse(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: bool
    def __init__(self, deleted: bool = ...) -> None: ...
