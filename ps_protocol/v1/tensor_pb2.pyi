from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT64: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]

class SparseMean(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPARSE_MEAN_UNSPECIFIED: _ClassVar[SparseMean]
    SPARSE_MEAN_PER_INDEX: _ClassVar[SparseMean]
    SPARSE_MEAN_PER_REPLICA: _ClassVar[SparseMean]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT64: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BFLOAT16: DataType
SPARSE_MEAN_UNSPECIFIED: SparseMean
SPARSE_MEAN_PER_INDEX: SparseMean
SPARSE_MEAN_PER_REPLICA: SparseMean

class Era(_message.Message):
    __slots__ = ("life", "epoch")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    life: int
    epoch: int
    def __init__(self, life: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("era", "chief_incarnation")
    ERA_FIELD_NUMBER: _ClassVar[int]
    CHIEF_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    era: Era
    chief_incarnation: int
    def __init__(self, era: _Optional[_Union[Era, _Mapping]] = ..., chief_incarnation: _Optional[int] = ...) -> None: ...

class KeySpec(_message.Message):
    __slots__ = ("kind", "max_rows", "max_age_steps", "admit_probability", "admit_after")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[KeySpec.Kind]
        KIND_INT64: _ClassVar[KeySpec.Kind]
        KIND_UINT64: _ClassVar[KeySpec.Kind]
    KIND_UNSPECIFIED: KeySpec.Kind
    KIND_INT64: KeySpec.Kind
    KIND_UINT64: KeySpec.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_AGE_STEPS_FIELD_NUMBER: _ClassVar[int]
    ADMIT_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    ADMIT_AFTER_FIELD_NUMBER: _ClassVar[int]
    kind: KeySpec.Kind
    max_rows: int
    max_age_steps: int
    admit_probability: float
    admit_after: int
    def __init__(self, kind: _Optional[_Union[KeySpec.Kind, str]] = ..., max_rows: _Optional[int] = ..., max_age_steps: _Optional[int] = ..., admit_probability: _Optional[float] = ..., admit_after: _Optional[int] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("kind", "low", "high", "formula")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Constraint.Kind]
        KIND_NON_NEGATIVE: _ClassVar[Constraint.Kind]
        KIND_CLIP: _ClassVar[Constraint.Kind]
        KIND_MAX_NORM: _ClassVar[Constraint.Kind]
        KIND_UNIT_NORM: _ClassVar[Constraint.Kind]
        KIND_FORMULA: _ClassVar[Constraint.Kind]
    KIND_UNSPECIFIED: Constraint.Kind
    KIND_NON_NEGATIVE: Constraint.Kind
    KIND_CLIP: Constraint.Kind
    KIND_MAX_NORM: Constraint.Kind
    KIND_UNIT_NORM: Constraint.Kind
    KIND_FORMULA: Constraint.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    FORMULA_FIELD_NUMBER: _ClassVar[int]
    kind: Constraint.Kind
    low: float
    high: float
    formula: str
    def __init__(self, kind: _Optional[_Union[Constraint.Kind, str]] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., formula: _Optional[str] = ...) -> None: ...

class Initializer(_message.Message):
    __slots__ = ("kind", "low", "high", "seed", "zero_row")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Initializer.Kind]
        KIND_CONSTANT: _ClassVar[Initializer.Kind]
        KIND_UNIFORM: _ClassVar[Initializer.Kind]
        KIND_NORMAL: _ClassVar[Initializer.Kind]
    KIND_UNSPECIFIED: Initializer.Kind
    KIND_CONSTANT: Initializer.Kind
    KIND_UNIFORM: Initializer.Kind
    KIND_NORMAL: Initializer.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ZERO_ROW_FIELD_NUMBER: _ClassVar[int]
    kind: Initializer.Kind
    low: float
    high: float
    seed: int
    zero_row: int
    def __init__(self, kind: _Optional[_Union[Initializer.Kind, str]] = ..., low: _Optional[float] = ..., high: _Optional[float] = ..., seed: _Optional[int] = ..., zero_row: _Optional[int] = ...) -> None: ...

class Partition(_message.Message):
    __slots__ = ("axis", "num_slices")
    AXIS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLICES_FIELD_NUMBER: _ClassVar[int]
    axis: int
    num_slices: int
    def __init__(self, axis: _Optional[int] = ..., num_slices: _Optional[int] = ...) -> None: ...

class VariableSpec(_message.Message):
    __slots__ = ("name", "data_type", "shape", "optimizer", "is_sparse", "sparse_mean", "initializer", "constraint", "partition", "keys")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    IS_SPARSE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_MEAN_FIELD_NUMBER: _ClassVar[int]
    INITIALIZER_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    name: str
    data_type: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    optimizer: OptimizerSpec
    is_sparse: bool
    sparse_mean: SparseMean
    initializer: Initializer
    constraint: Constraint
    partition: Partition
    keys: KeySpec
    def __init__(self, name: _Optional[str] = ..., data_type: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., optimizer: _Optional[_Union[OptimizerSpec, _Mapping]] = ..., is_sparse: bool = ..., sparse_mean: _Optional[_Union[SparseMean, str]] = ..., initializer: _Optional[_Union[Initializer, _Mapping]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., partition: _Optional[_Union[Partition, _Mapping]] = ..., keys: _Optional[_Union[KeySpec, _Mapping]] = ...) -> None: ...

class VariableSlice(_message.Message):
    __slots__ = ("variable", "start", "stop", "axis")
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    variable: VariableSpec
    start: int
    stop: int
    axis: int
    def __init__(self, variable: _Optional[_Union[VariableSpec, _Mapping]] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., axis: _Optional[int] = ...) -> None: ...

class ArenaFrame(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class LearningRateSchedule(_message.Message):
    __slots__ = ("name", "arguments", "boundaries", "values")
    class ArgumentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: _containers.ScalarMap[str, float]
    boundaries: _containers.RepeatedScalarFieldContainer[float]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[_Mapping[str, float]] = ..., boundaries: _Optional[_Iterable[float]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class OptimizerSpec(_message.Message):
    __slots__ = ("name", "hyperparameters", "learning_rate", "formula", "slot_values", "group")
    class HyperparametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SlotValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    FORMULA_FIELD_NUMBER: _ClassVar[int]
    SLOT_VALUES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    name: str
    hyperparameters: _containers.ScalarMap[str, float]
    learning_rate: LearningRateSchedule
    formula: str
    slot_values: _containers.ScalarMap[str, float]
    group: str
    def __init__(self, name: _Optional[str] = ..., hyperparameters: _Optional[_Mapping[str, float]] = ..., learning_rate: _Optional[_Union[LearningRateSchedule, _Mapping]] = ..., formula: _Optional[str] = ..., slot_values: _Optional[_Mapping[str, float]] = ..., group: _Optional[str] = ...) -> None: ...

class StepHyperparameter(_message.Message):
    __slots__ = ("group", "name", "value")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    group: str
    name: str
    value: float
    def __init__(self, group: _Optional[str] = ..., name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class PushId(_message.Message):
    __slots__ = ("worker", "incarnation", "sequence")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    worker: int
    incarnation: int
    sequence: int
    def __init__(self, worker: _Optional[int] = ..., incarnation: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class Attachments(_message.Message):
    __slots__ = ("hyperparameters", "user_state")
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    USER_STATE_FIELD_NUMBER: _ClassVar[int]
    hyperparameters: _containers.RepeatedCompositeFieldContainer[StepHyperparameter]
    user_state: str
    def __init__(self, hyperparameters: _Optional[_Iterable[_Union[StepHyperparameter, _Mapping]]] = ..., user_state: _Optional[str] = ...) -> None: ...

class StepAttachments(_message.Message):
    __slots__ = ("numbers", "user_states")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    USER_STATES_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedCompositeFieldContainer[GivenNumbers]
    user_states: _containers.RepeatedCompositeFieldContainer[UserState]
    def __init__(self, numbers: _Optional[_Iterable[_Union[GivenNumbers, _Mapping]]] = ..., user_states: _Optional[_Iterable[_Union[UserState, _Mapping]]] = ...) -> None: ...

class GivenNumbers(_message.Message):
    __slots__ = ("push_ids", "hyperparameters")
    PUSH_IDS_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    push_ids: _containers.RepeatedCompositeFieldContainer[PushId]
    hyperparameters: _containers.RepeatedCompositeFieldContainer[StepHyperparameter]
    def __init__(self, push_ids: _Optional[_Iterable[_Union[PushId, _Mapping]]] = ..., hyperparameters: _Optional[_Iterable[_Union[StepHyperparameter, _Mapping]]] = ...) -> None: ...

class UserState(_message.Message):
    __slots__ = ("worker", "json")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    worker: int
    json: str
    def __init__(self, worker: _Optional[int] = ..., json: _Optional[str] = ...) -> None: ...

class AverageSpec(_message.Message):
    __slots__ = ("decay", "use_num_updates", "zero_debias", "variables")
    DECAY_FIELD_NUMBER: _ClassVar[int]
    USE_NUM_UPDATES_FIELD_NUMBER: _ClassVar[int]
    ZERO_DEBIAS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    decay: float
    use_num_updates: bool
    zero_debias: bool
    variables: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, decay: _Optional[float] = ..., use_num_updates: bool = ..., zero_debias: bool = ..., variables: _Optional[_Iterable[str]] = ...) -> None: ...

class Merge(_message.Message):
    __slots__ = ("name", "number")
    class Name(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NAME_UNSPECIFIED: _ClassVar[Merge.Name]
        NAME_MEAN: _ClassVar[Merge.Name]
        NAME_TRIMMED_MEAN: _ClassVar[Merge.Name]
        NAME_BOUNDED_MEAN: _ClassVar[Merge.Name]
        NAME_RADIAL_MEAN: _ClassVar[Merge.Name]
    NAME_UNSPECIFIED: Merge.Name
    NAME_MEAN: Merge.Name
    NAME_TRIMMED_MEAN: Merge.Name
    NAME_BOUNDED_MEAN: Merge.Name
    NAME_RADIAL_MEAN: Merge.Name
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    name: Merge.Name
    number: float
    def __init__(self, name: _Optional[_Union[Merge.Name, str]] = ..., number: _Optional[float] = ...) -> None: ...

class ClipSpec(_message.Message):
    __slots__ = ("value", "norm", "global_norm")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_NORM_FIELD_NUMBER: _ClassVar[int]
    value: float
    norm: float
    global_norm: float
    def __init__(self, value: _Optional[float] = ..., norm: _Optional[float] = ..., global_norm: _Optional[float] = ...) -> None: ...
