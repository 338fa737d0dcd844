import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from ps_protocol.v1 import error_pb2 as _error_pb2
from ps_protocol.v1 import parameter_service_pb2 as _parameter_service_pb2
from ps_protocol.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ParticipantKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARTICIPANT_KIND_UNSPECIFIED: _ClassVar[ParticipantKind]
    PARTICIPANT_KIND_WORKER: _ClassVar[ParticipantKind]
    PARTICIPANT_KIND_OBSERVER: _ClassVar[ParticipantKind]

class End(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_UNSPECIFIED: _ClassVar[End]
    END_FINISHED: _ClassVar[End]
    END_INTERRUPTED: _ClassVar[End]

class ModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODEL_STATE_UNSPECIFIED: _ClassVar[ModelState]
    MODEL_STATE_ABSENT: _ClassVar[ModelState]
    MODEL_STATE_INITIALIZE: _ClassVar[ModelState]
    MODEL_STATE_WAIT: _ClassVar[ModelState]
    MODEL_STATE_READY: _ClassVar[ModelState]

class PushOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUSH_OUTCOME_UNSPECIFIED: _ClassVar[PushOutcome]
    PUSH_OUTCOME_ACCEPTED: _ClassVar[PushOutcome]
    PUSH_OUTCOME_STALE: _ClassVar[PushOutcome]
    PUSH_OUTCOME_DUPLICATE: _ClassVar[PushOutcome]
    PUSH_OUTCOME_LATE: _ClassVar[PushOutcome]
    PUSH_OUTCOME_ROLLED_BACK: _ClassVar[PushOutcome]

class TokenResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_RESULT_UNSPECIFIED: _ClassVar[TokenResult]
    TOKEN_RESULT_TOKEN: _ClassVar[TokenResult]
    TOKEN_RESULT_WAIT: _ClassVar[TokenResult]
    TOKEN_RESULT_FINISHED: _ClassVar[TokenResult]

class ClusterState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLUSTER_STATE_UNSPECIFIED: _ClassVar[ClusterState]
    CLUSTER_STATE_CONNECTING: _ClassVar[ClusterState]
    CLUSTER_STATE_WAITING_FOR_MODEL: _ClassVar[ClusterState]
    CLUSTER_STATE_TRAINING: _ClassVar[ClusterState]
    CLUSTER_STATE_FINISHED: _ClassVar[ClusterState]
    CLUSTER_STATE_FAILED: _ClassVar[ClusterState]
    CLUSTER_STATE_RECOVERING: _ClassVar[ClusterState]

class Level(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEVEL_UNSPECIFIED: _ClassVar[Level]
    LEVEL_GREEN: _ClassVar[Level]
    LEVEL_AMBER: _ClassVar[Level]
    LEVEL_RED: _ClassVar[Level]

class LeaseResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_RESULT_UNSPECIFIED: _ClassVar[LeaseResult]
    LEASE_RESULT_GRANTED: _ClassVar[LeaseResult]
    LEASE_RESULT_WAIT: _ClassVar[LeaseResult]
    LEASE_RESULT_EXHAUSTED: _ClassVar[LeaseResult]
PARTICIPANT_KIND_UNSPECIFIED: ParticipantKind
PARTICIPANT_KIND_WORKER: ParticipantKind
PARTICIPANT_KIND_OBSERVER: ParticipantKind
END_UNSPECIFIED: End
END_FINISHED: End
END_INTERRUPTED: End
MODEL_STATE_UNSPECIFIED: ModelState
MODEL_STATE_ABSENT: ModelState
MODEL_STATE_INITIALIZE: ModelState
MODEL_STATE_WAIT: ModelState
MODEL_STATE_READY: ModelState
PUSH_OUTCOME_UNSPECIFIED: PushOutcome
PUSH_OUTCOME_ACCEPTED: PushOutcome
PUSH_OUTCOME_STALE: PushOutcome
PUSH_OUTCOME_DUPLICATE: PushOutcome
PUSH_OUTCOME_LATE: PushOutcome
PUSH_OUTCOME_ROLLED_BACK: PushOutcome
TOKEN_RESULT_UNSPECIFIED: TokenResult
TOKEN_RESULT_TOKEN: TokenResult
TOKEN_RESULT_WAIT: TokenResult
TOKEN_RESULT_FINISHED: TokenResult
CLUSTER_STATE_UNSPECIFIED: ClusterState
CLUSTER_STATE_CONNECTING: ClusterState
CLUSTER_STATE_WAITING_FOR_MODEL: ClusterState
CLUSTER_STATE_TRAINING: ClusterState
CLUSTER_STATE_FINISHED: ClusterState
CLUSTER_STATE_FAILED: ClusterState
CLUSTER_STATE_RECOVERING: ClusterState
LEVEL_UNSPECIFIED: Level
LEVEL_GREEN: Level
LEVEL_AMBER: Level
LEVEL_RED: Level
LEASE_RESULT_UNSPECIFIED: LeaseResult
LEASE_RESULT_GRANTED: LeaseResult
LEASE_RESULT_WAIT: LeaseResult
LEASE_RESULT_EXHAUSTED: LeaseResult

class Participant(_message.Message):
    __slots__ = ("era", "kind", "index", "incarnation", "secret")
    ERA_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    era: _tensor_pb2.Era
    kind: ParticipantKind
    index: int
    incarnation: int
    secret: int
    def __init__(self, era: _Optional[_Union[_tensor_pb2.Era, _Mapping]] = ..., kind: _Optional[_Union[ParticipantKind, str]] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., secret: _Optional[int] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("kind", "index", "host", "pid", "takeover", "request_id", "former", "held")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TAKEOVER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    kind: ParticipantKind
    index: int
    host: str
    pid: int
    takeover: bool
    request_id: int
    former: Participant
    held: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[_Union[ParticipantKind, str]] = ..., index: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., takeover: bool = ..., request_id: _Optional[int] = ..., former: _Optional[_Union[Participant, _Mapping]] = ..., held: _Optional[_Iterable[int]] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("participant", "lease", "shard_addresses", "global_step", "may_contribute", "chief_incarnation", "standby_addresses", "shards_version", "rejects_nonfinite")
    PARTICIPANT_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SHARD_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    MAY_CONTRIBUTE_FIELD_NUMBER: _ClassVar[int]
    CHIEF_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STANDBY_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    SHARDS_VERSION_FIELD_NUMBER: _ClassVar[int]
    REJECTS_NONFINITE_FIELD_NUMBER: _ClassVar[int]
    participant: Participant
    lease: _duration_pb2.Duration
    shard_addresses: _containers.RepeatedScalarFieldContainer[str]
    global_step: int
    may_contribute: bool
    chief_incarnation: int
    standby_addresses: _containers.RepeatedScalarFieldContainer[str]
    shards_version: int
    rejects_nonfinite: bool
    def __init__(self, participant: _Optional[_Union[Participant, _Mapping]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., shard_addresses: _Optional[_Iterable[str]] = ..., global_step: _Optional[int] = ..., may_contribute: bool = ..., chief_incarnation: _Optional[int] = ..., standby_addresses: _Optional[_Iterable[str]] = ..., shards_version: _Optional[int] = ..., rejects_nonfinite: bool = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("participant", "transports", "traffic")
    PARTICIPANT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    participant: Participant
    transports: _containers.RepeatedScalarFieldContainer[str]
    traffic: WorkerTraffic
    def __init__(self, participant: _Optional[_Union[Participant, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., traffic: _Optional[_Union[WorkerTraffic, _Mapping]] = ...) -> None: ...

class WorkerTraffic(_message.Message):
    __slots__ = ("sent_bytes", "received_bytes", "num_reads", "reading", "cpu", "follower")
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_READS_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    FOLLOWER_FIELD_NUMBER: _ClassVar[int]
    sent_bytes: int
    received_bytes: int
    num_reads: int
    reading: _duration_pb2.Duration
    cpu: _duration_pb2.Duration
    follower: FollowerReport
    def __init__(self, sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., num_reads: _Optional[int] = ..., reading: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cpu: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., follower: _Optional[_Union[FollowerReport, _Mapping]] = ...) -> None: ...

class FollowerReport(_message.Message):
    __slots__ = ("step", "lag", "behind", "num_patches", "num_wholes", "whole_bytes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    LAG_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    NUM_PATCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_WHOLES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    step: int
    lag: int
    behind: _duration_pb2.Duration
    num_patches: int
    num_wholes: int
    whole_bytes: int
    def __init__(self, step: _Optional[int] = ..., lag: _Optional[int] = ..., behind: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_patches: _Optional[int] = ..., num_wholes: _Optional[int] = ..., whole_bytes: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("end",)
    END_FIELD_NUMBER: _ClassVar[int]
    end: End
    def __init__(self, end: _Optional[_Union[End, str]] = ...) -> None: ...

class DeregisterWorkerRequest(_message.Message):
    __slots__ = ("participant", "failure")
    PARTICIPANT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    participant: Participant
    failure: str
    def __init__(self, participant: _Optional[_Union[Participant, _Mapping]] = ..., failure: _Optional[str] = ...) -> None: ...

class DeregisterWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("variables", "optimizer", "placement", "averages", "clip")
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    AVERAGES_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    variables: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.VariableSpec]
    optimizer: _tensor_pb2.OptimizerSpec
    placement: PlacementPolicy
    averages: _tensor_pb2.AverageSpec
    clip: _tensor_pb2.ClipSpec
    def __init__(self, variables: _Optional[_Iterable[_Union[_tensor_pb2.VariableSpec, _Mapping]]] = ..., optimizer: _Optional[_Union[_tensor_pb2.OptimizerSpec, _Mapping]] = ..., placement: _Optional[_Union[PlacementPolicy, _Mapping]] = ..., averages: _Optional[_Union[_tensor_pb2.AverageSpec, _Mapping]] = ..., clip: _Optional[_Union[_tensor_pb2.ClipSpec, _Mapping]] = ...) -> None: ...

class PlacementPolicy(_message.Message):
    __slots__ = ("strategy", "split_bytes", "loads", "pins")
    class LoadsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class PinsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    SPLIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    strategy: str
    split_bytes: int
    loads: _containers.ScalarMap[str, float]
    pins: _containers.ScalarMap[str, int]
    def __init__(self, strategy: _Optional[str] = ..., split_bytes: _Optional[int] = ..., loads: _Optional[_Mapping[str, float]] = ..., pins: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PlacedSlice(_message.Message):
    __slots__ = ("slice", "shard")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    slice: _tensor_pb2.VariableSlice
    shard: int
    def __init__(self, slice: _Optional[_Union[_tensor_pb2.VariableSlice, _Mapping]] = ..., shard: _Optional[int] = ...) -> None: ...

class RegisterModelRequest(_message.Message):
    __slots__ = ("participant", "model", "max_wait", "joins_only")
    PARTICIPANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    JOINS_ONLY_FIELD_NUMBER: _ClassVar[int]
    participant: Participant
    model: ModelSpec
    max_wait: _duration_pb2.Duration
    joins_only: bool
    def __init__(self, participant: _Optional[_Union[Participant, _Mapping]] = ..., model: _Optional[_Union[ModelSpec, _Mapping]] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., joins_only: bool = ...) -> None: ...

class RegisterModelResponse(_message.Message):
    __slots__ = ("state", "placement", "attempt", "max_staged_per_worker", "global_step", "waiting_for", "policy", "attached", "shards_version")
    STATE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_STAGED_PER_WORKER_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    SHARDS_VERSION_FIELD_NUMBER: _ClassVar[int]
    state: ModelState
    placement: _containers.RepeatedCompositeFieldContainer[PlacedSlice]
    attempt: int
    max_staged_per_worker: int
    global_step: int
    waiting_for: str
    policy: PolicySpec
    attached: _tensor_pb2.Attachments
    shards_version: int
    def __init__(self, state: _Optional[_Union[ModelState, str]] = ..., placement: _Optional[_Iterable[_Union[PlacedSlice, _Mapping]]] = ..., attempt: _Optional[int] = ..., max_staged_per_worker: _Optional[int] = ..., global_step: _Optional[int] = ..., waiting_for: _Optional[str] = ..., policy: _Optional[_Union[PolicySpec, _Mapping]] = ..., attached: _Optional[_Union[_tensor_pb2.Attachments, _Mapping]] = ..., shards_version: _Optional[int] = ...) -> None: ...

class CompleteInitializationRequest(_message.Message):
    __slots__ = ("participant", "attempt")
    PARTICIPANT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    participant: Participant
    attempt: int
    def __init__(self, participant: _Optional[_Union[Participant, _Mapping]] = ..., attempt: _Optional[int] = ...) -> None: ...

class CompleteInitializationResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("max_wait",)
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    max_wait: _duration_pb2.Duration
    def __init__(self, max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("state", "model", "placement", "global_step", "optimizers", "policy", "kept")
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    state: ModelState
    model: ModelSpec
    placement: _containers.RepeatedCompositeFieldContainer[PlacedSlice]
    global_step: int
    optimizers: _containers.RepeatedCompositeFieldContainer[_parameter_service_pb2.OptimizerChange]
    policy: PolicySpec
    kept: KeptWeights
    def __init__(self, state: _Optional[_Union[ModelState, str]] = ..., model: _Optional[_Union[ModelSpec, _Mapping]] = ..., placement: _Optional[_Iterable[_Union[PlacedSlice, _Mapping]]] = ..., global_step: _Optional[int] = ..., optimizers: _Optional[_Iterable[_Union[_parameter_service_pb2.OptimizerChange, _Mapping]]] = ..., policy: _Optional[_Union[PolicySpec, _Mapping]] = ..., kept: _Optional[_Union[KeptWeights, _Mapping]] = ...) -> None: ...

class KeptWeights(_message.Message):
    __slots__ = ("encoding", "has_tables")
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    HAS_TABLES_FIELD_NUMBER: _ClassVar[int]
    encoding: _parameter_service_pb2.FloatEncoding
    has_tables: bool
    def __init__(self, encoding: _Optional[_Union[_parameter_service_pb2.FloatEncoding, str]] = ..., has_tables: bool = ...) -> None: ...

class PushCommit(_message.Message):
    __slots__ = ("push_id", "step", "staged", "is_applied", "ranges", "attached", "weight", "inner")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    IS_APPLIED_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    INNER_FIELD_NUMBER: _ClassVar[int]
    push_id: _tensor_pb2.PushId
    step: int
    staged: bool
    is_applied: bool
    ranges: _containers.RepeatedScalarFieldContainer[int]
    attached: _tensor_pb2.Attachments
    weight: float
    inner: InnerSteps
    def __init__(self, push_id: _Optional[_Union[_tensor_pb2.PushId, _Mapping]] = ..., step: _Optional[int] = ..., staged: bool = ..., is_applied: bool = ..., ranges: _Optional[_Iterable[int]] = ..., attached: _Optional[_Union[_tensor_pb2.Attachments, _Mapping]] = ..., weight: _Optional[float] = ..., inner: _Optional[_Union[InnerSteps, _Mapping]] = ...) -> None: ...

class InnerSteps(_message.Message):
    __slots__ = ("num", "duration")
    NUM_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    num: int
    duration: _duration_pb2.Duration
    def __init__(self, num: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class CommitResult(_message.Message):
    __slots__ = ("outcome", "first_outcome", "global_step", "applied_step", "staleness", "factor")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    APPLIED_STEP_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    outcome: PushOutcome
    first_outcome: PushOutcome
    global_step: int
    applied_step: int
    staleness: int
    factor: float
    def __init__(self, outcome: _Optional[_Union[PushOutcome, str]] = ..., first_outcome: _Optional[_Union[PushOutcome, str]] = ..., global_step: _Optional[int] = ..., applied_step: _Optional[int] = ..., staleness: _Optional[int] = ..., factor: _Optional[float] = ...) -> None: ...

class CommitPushRequest(_message.Message):
    __slots__ = ("participant", "commit")
    PARTICIPANT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    participant: Participant
    commit: PushCommit
    def __init__(self, participant: _Optional[_Union[Participant, _Mapping]] = ..., commit: _Optional[_Union[PushCommit, _Mapping]] = ...) -> None: ...

class DequeueTokenRequest(_message.Message):
    __slots__ = ("participant", "local_step", "request_id", "max_wait", "commit")
    PARTICIPANT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_STEP_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    participant: Participant
    local_step: int
    request_id: int
    max_wait: _duration_pb2.Duration
    commit: PushCommit
    def __init__(self, participant: _Optional[_Union[Participant, _Mapping]] = ..., local_step: _Optional[int] = ..., request_id: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., commit: _Optional[_Union[PushCommit, _Mapping]] = ...) -> None: ...

class TokenReply(_message.Message):
    __slots__ = ("result", "step", "commit", "waiting_for", "global_step", "reads_latest", "settings_version", "shards_version", "end", "speed")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    READS_LATEST_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_VERSION_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    result: TokenResult
    step: int
    commit: CommitResult
    waiting_for: str
    global_step: int
    reads_latest: bool
    settings_version: int
    shards_version: int
    end: End
    speed: float
    def __init__(self, result: _Optional[_Union[TokenResult, str]] = ..., step: _Optional[int] = ..., commit: _Optional[_Union[CommitResult, _Mapping]] = ..., waiting_for: _Optional[str] = ..., global_step: _Optional[int] = ..., reads_latest: bool = ..., settings_version: _Optional[int] = ..., shards_version: _Optional[int] = ..., end: _Optional[_Union[End, str]] = ..., speed: _Optional[float] = ...) -> None: ...

class ConverseRequest(_message.Message):
    __slots__ = ("call", "token", "commit")
    CALL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    call: int
    token: DequeueTokenRequest
    commit: CommitPushRequest
    def __init__(self, call: _Optional[int] = ..., token: _Optional[_Union[DequeueTokenRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitPushRequest, _Mapping]] = ...) -> None: ...

class ConverseResponse(_message.Message):
    __slots__ = ("call", "token", "commit", "error")
    CALL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call: int
    token: TokenReply
    commit: CommitResult
    error: _error_pb2.CallError
    def __init__(self, call: _Optional[int] = ..., token: _Optional[_Union[TokenReply, _Mapping]] = ..., commit: _Optional[_Union[CommitResult, _Mapping]] = ..., error: _Optional[_Union[_error_pb2.CallError, _Mapping]] = ...) -> None: ...

class GetClusterStatusRequest(_message.Message):
    __slots__ = ("max_ledger_entries",)
    MAX_LEDGER_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    max_ledger_entries: int
    def __init__(self, max_ledger_entries: _Optional[int] = ...) -> None: ...

class Condition(_message.Message):
    __slots__ = ("name", "level", "line", "advice", "commands", "is_standstill")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    IS_STANDSTILL_FIELD_NUMBER: _ClassVar[int]
    name: str
    level: Level
    line: str
    advice: str
    commands: _containers.RepeatedScalarFieldContainer[str]
    is_standstill: bool
    def __init__(self, name: _Optional[str] = ..., level: _Optional[_Union[Level, str]] = ..., line: _Optional[str] = ..., advice: _Optional[str] = ..., commands: _Optional[_Iterable[str]] = ..., is_standstill: bool = ...) -> None: ...

class ParticipantStatus(_message.Message):
    __slots__ = ("kind", "index", "incarnation", "host", "pid", "state", "seen_ago", "num_accepted", "num_stale", "num_late", "is_waiting", "failure", "transport", "traffic", "is_silent", "doing", "inner", "utilisation")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEEN_AGO_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_STALE_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FIELD_NUMBER: _ClassVar[int]
    IS_WAITING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    IS_SILENT_FIELD_NUMBER: _ClassVar[int]
    DOING_FIELD_NUMBER: _ClassVar[int]
    INNER_FIELD_NUMBER: _ClassVar[int]
    UTILISATION_FIELD_NUMBER: _ClassVar[int]
    kind: ParticipantKind
    index: int
    incarnation: int
    host: str
    pid: int
    state: str
    seen_ago: _duration_pb2.Duration
    num_accepted: int
    num_stale: int
    num_late: int
    is_waiting: bool
    failure: str
    transport: str
    traffic: WorkerTraffic
    is_silent: bool
    doing: str
    inner: InnerSteps
    utilisation: float
    def __init__(self, kind: _Optional[_Union[ParticipantKind, str]] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., seen_ago: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., num_accepted: _Optional[int] = ..., num_stale: _Optional[int] = ..., num_late: _Optional[int] = ..., is_waiting: bool = ..., failure: _Optional[str] = ..., transport: _Optional[str] = ..., traffic: _Optional[_Union[WorkerTraffic, _Mapping]] = ..., is_silent: bool = ..., doing: _Optional[str] = ..., inner: _Optional[_Union[InnerSteps, _Mapping]] = ..., utilisation: _Optional[float] = ...) -> None: ...

class ServerStatus(_message.Message):
    __slots__ = ("index", "address", "is_reachable", "step", "arena_bytes", "num_slices", "standby", "standby_missing", "report")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_REACHABLE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLICES_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    STANDBY_MISSING_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    index: int
    address: str
    is_reachable: bool
    step: int
    arena_bytes: int
    num_slices: int
    standby: str
    standby_missing: str
    report: _parameter_service_pb2.ShardReport
    def __init__(self, index: _Optional[int] = ..., address: _Optional[str] = ..., is_reachable: bool = ..., step: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., num_slices: _Optional[int] = ..., standby: _Optional[str] = ..., standby_missing: _Optional[str] = ..., report: _Optional[_Union[_parameter_service_pb2.ShardReport, _Mapping]] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("step", "contributors", "num_stale", "num_late", "duration", "apply_duration", "last_worker", "wait_duration", "arrivals_us", "weights")
    STEP_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_STALE_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    APPLY_DURATION_FIELD_NUMBER: _ClassVar[int]
    LAST_WORKER_FIELD_NUMBER: _ClassVar[int]
    WAIT_DURATION_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_US_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    contributors: _containers.RepeatedCompositeFieldContainer[_tensor_pb2.PushId]
    num_stale: int
    num_late: int
    duration: _duration_pb2.Duration
    apply_duration: _duration_pb2.Duration
    last_worker: int
    wait_duration: _duration_pb2.Duration
    arrivals_us: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, step: _Optional[int] = ..., contributors: _Optional[_Iterable[_Union[_tensor_pb2.PushId, _Mapping]]] = ..., num_stale: _Optional[int] = ..., num_late: _Optional[int] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., apply_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., last_worker: _Optional[int] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., arrivals_us: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ...) -> None: ...

class GetClusterStatusResponse(_message.Message):
    __slots__ = ("cluster", "epoch", "state", "reason", "global_step", "max_steps", "policy", "replicas_to_aggregate", "total_num_replicas", "num_contributions", "waiting_for", "step_age", "participants", "shards", "ledger", "num_accepted", "num_stale", "num_late", "settings_version", "optimizer", "max_observed_staleness", "chief_incarnation", "checkpoint", "num_rollbacks", "last_rollback", "min_replicas", "data", "chief_cpu", "page_url", "conditions", "earlier")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_TO_AGGREGATE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_STALE_FIELD_NUMBER: _ClassVar[int]
    NUM_LATE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    MAX_OBSERVED_STALENESS_FIELD_NUMBER: _ClassVar[int]
    CHIEF_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    LAST_ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    MIN_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHIEF_CPU_FIELD_NUMBER: _ClassVar[int]
    PAGE_URL_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    epoch: int
    state: ClusterState
    reason: str
    global_step: int
    max_steps: int
    policy: PolicySpec
    replicas_to_aggregate: int
    total_num_replicas: int
    num_contributions: int
    waiting_for: str
    step_age: _duration_pb2.Duration
    participants: _containers.RepeatedCompositeFieldContainer[ParticipantStatus]
    shards: _containers.RepeatedCompositeFieldContainer[ServerStatus]
    ledger: _containers.RepeatedCompositeFieldContainer[LedgerEntry]
    num_accepted: int
    num_stale: int
    num_late: int
    settings_version: int
    optimizer: str
    max_observed_staleness: int
    chief_incarnation: int
    checkpoint: CheckpointStatus
    num_rollbacks: int
    last_rollback: str
    min_replicas: int
    data: DataStatus
    chief_cpu: _duration_pb2.Duration
    page_url: str
    conditions: _containers.RepeatedCompositeFieldContainer[Condition]
    earlier: ContributionCounts
    def __init__(self, cluster: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[_Union[ClusterState, str]] = ..., reason: _Optional[str] = ..., global_step: _Optional[int] = ..., max_steps: _Optional[int] = ..., policy: _Optional[_Union[PolicySpec, _Mapping]] = ..., replicas_to_aggregate: _Optional[int] = ..., total_num_replicas: _Optional[int] = ..., num_contributions: _Optional[int] = ..., waiting_for: _Optional[str] = ..., step_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., participants: _Optional[_Iterable[_Union[ParticipantStatus, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[ServerStatus, _Mapping]]] = ..., ledger: _Optional[_Iterable[_Union[LedgerEntry, _Mapping]]] = ..., num_accepted: _Optional[int] = ..., num_stale: _Optional[int] = ..., num_late: _Optional[int] = ..., settings_version: _Optional[int] = ..., optimizer: _Optional[str] = ..., max_observed_staleness: _Optional[int] = ..., chief_incarnation: _Optional[int] = ..., checkpoint: _Optional[_Union[CheckpointStatus, _Mapping]] = ..., num_rollbacks: _Optional[int] = ..., last_rollback: _Optional[str] = ..., min_replicas: _Optional[int] = ..., data: _Optional[_Union[DataStatus, _Mapping]] = ..., chief_cpu: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., page_url: _Optional[str] = ..., conditions: _Optional[_Iterable[_Union[Condition, _Mapping]]] = ..., earlier: _Optional[_Union[ContributionCounts, _Mapping]] = ...) -> None: ...

class CheckpointStatus(_message.Message):
    __slots__ = ("durability", "tag", "step", "age", "saving", "failure")
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    SAVING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    durability: str
    tag: str
    step: int
    age: _duration_pb2.Duration
    saving: str
    failure: str
    def __init__(self, durability: _Optional[str] = ..., tag: _Optional[str] = ..., step: _Optional[int] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., saving: _Optional[str] = ..., failure: _Optional[str] = ...) -> None: ...

class ContributionCounts(_message.Message):
    __slots__ = ("accepted", "stale", "late")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    stale: int
    late: int
    def __init__(self, accepted: _Optional[int] = ..., stale: _Optional[int] = ..., late: _Optional[int] = ...) -> None: ...

class DataStatus(_message.Message):
    __slots__ = ("name", "epoch", "num_done", "num_leased", "num_ranges")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_DONE_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_FIELD_NUMBER: _ClassVar[int]
    NUM_RANGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    epoch: int
    num_done: int
    num_leased: int
    num_ranges: int
    def __init__(self, name: _Optional[str] = ..., epoch: _Optional[int] = ..., num_done: _Optional[int] = ..., num_leased: _Optional[int] = ..., num_ranges: _Optional[int] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("request_id", "max_wait")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    max_wait: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("tag", "step", "waiting_for")
    TAG_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    tag: str
    step: int
    waiting_for: str
    def __init__(self, tag: _Optional[str] = ..., step: _Optional[int] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class DataSpec(_message.Message):
    __slots__ = ("name", "num_samples", "range_size", "num_epochs", "shuffle_seed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    RANGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_SEED_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_samples: int
    range_size: int
    num_epochs: int
    shuffle_seed: int
    def __init__(self, name: _Optional[str] = ..., num_samples: _Optional[int] = ..., range_size: _Optional[int] = ..., num_epochs: _Optional[int] = ..., shuffle_seed: _Optional[int] = ...) -> None: ...

class DataRange(_message.Message):
    __slots__ = ("id", "epoch", "start", "stop")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    epoch: int
    start: int
    stop: int
    def __init__(self, id: _Optional[int] = ..., epoch: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class LeaseRangesRequest(_message.Message):
    __slots__ = ("participant", "data", "max_ranges", "request_id", "max_wait", "held")
    PARTICIPANT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MAX_RANGES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    participant: Participant
    data: DataSpec
    max_ranges: int
    request_id: int
    max_wait: _duration_pb2.Duration
    held: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, participant: _Optional[_Union[Participant, _Mapping]] = ..., data: _Optional[_Union[DataSpec, _Mapping]] = ..., max_ranges: _Optional[int] = ..., request_id: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., held: _Optional[_Iterable[int]] = ...) -> None: ...

class LeaseRangesResponse(_message.Message):
    __slots__ = ("result", "ranges", "waiting_for")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    result: LeaseResult
    ranges: _containers.RepeatedCompositeFieldContainer[DataRange]
    waiting_for: str
    def __init__(self, result: _Optional[_Union[LeaseResult, str]] = ..., ranges: _Optional[_Iterable[_Union[DataRange, _Mapping]]] = ..., waiting_for: _Optional[str] = ...) -> None: ...

class ChiefRecord(_message.Message):
    __slots__ = ("model", "policy", "settings_version", "optimizers", "num_rollbacks", "last_rollback", "epoch", "step", "chosen", "data", "earlier", "attached", "oldest_kept")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_VERSION_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZERS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    LAST_ROLLBACK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_KEPT_FIELD_NUMBER: _ClassVar[int]
    model: ModelSpec
    policy: PolicySpec
    settings_version: int
    optimizers: _containers.RepeatedCompositeFieldContainer[_parameter_service_pb2.OptimizerChange]
    num_rollbacks: int
    last_rollback: str
    epoch: int
    step: int
    chosen: _containers.RepeatedCompositeFieldContainer[ChosenPush]
    data: DataMarks
    earlier: _tensor_pb2.Fence
    attached: _tensor_pb2.StepAttachments
    oldest_kept: int
    def __init__(self, model: _Optional[_Union[ModelSpec, _Mapping]] = ..., policy: _Optional[_Union[PolicySpec, _Mapping]] = ..., settings_version: _Optional[int] = ..., optimizers: _Optional[_Iterable[_Union[_parameter_service_pb2.OptimizerChange, _Mapping]]] = ..., num_rollbacks: _Optional[int] = ..., last_rollback: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., chosen: _Optional[_Iterable[_Union[ChosenPush, _Mapping]]] = ..., data: _Optional[_Union[DataMarks, _Mapping]] = ..., earlier: _Optional[_Union[_tensor_pb2.Fence, _Mapping]] = ..., attached: _Optional[_Union[_tensor_pb2.StepAttachments, _Mapping]] = ..., oldest_kept: _Optional[int] = ...) -> None: ...

class ChosenPush(_message.Message):
    __slots__ = ("push_id", "ranges", "step", "weight", "attached")
    PUSH_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    push_id: _tensor_pb2.PushId
    ranges: _containers.RepeatedScalarFieldContainer[int]
    step: int
    weight: float
    attached: _tensor_pb2.Attachments
    def __init__(self, push_id: _Optional[_Union[_tensor_pb2.PushId, _Mapping]] = ..., ranges: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ..., weight: _Optional[float] = ..., attached: _Optional[_Union[_tensor_pb2.Attachments, _Mapping]] = ...) -> None: ...

class DataMarks(_message.Message):
    __slots__ = ("data", "epoch", "position", "passes")
    DATA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    data: DataSpec
    epoch: int
    position: int
    passes: _containers.RepeatedCompositeFieldContainer[DataPass]
    def __init__(self, data: _Optional[_Union[DataSpec, _Mapping]] = ..., epoch: _Optional[int] = ..., position: _Optional[int] = ..., passes: _Optional[_Iterable[_Union[DataPass, _Mapping]]] = ...) -> None: ...

class DataPass(_message.Message):
    __slots__ = ("epoch", "done")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    done: bytes
    def __init__(self, epoch: _Optional[int] = ..., done: _Optional[bytes] = ...) -> None: ...

class CheckpointManifest(_message.Message):
    __slots__ = ("format", "format_version", "tag", "cluster", "fence", "step", "num_shards", "record", "placement", "files", "pushes", "saved_at", "bases")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    format: str
    format_version: int
    tag: str
    cluster: str
    fence: _tensor_pb2.Fence
    step: int
    num_shards: int
    record: ChiefRecord
    placement: _containers.RepeatedCompositeFieldContainer[PlacedSlice]
    files: _containers.RepeatedCompositeFieldContainer[_parameter_service_pb2.CheckpointFile]
    pushes: _containers.RepeatedCompositeFieldContainer[_parameter_service_pb2.WorkerPushes]
    saved_at: str
    bases: _containers.RepeatedCompositeFieldContainer[_parameter_service_pb2.CheckpointFile]
    def __init__(self, format: _Optional[str] = ..., format_version: _Optional[int] = ..., tag: _Optional[str] = ..., cluster: _Optional[str] = ..., fence: _Optional[_Union[_tensor_pb2.Fence, _Mapping]] = ..., step: _Optional[int] = ..., num_shards: _Optional[int] = ..., record: _Optional[_Union[ChiefRecord, _Mapping]] = ..., placement: _Optional[_Iterable[_Union[PlacedSlice, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[_parameter_service_pb2.CheckpointFile, _Mapping]]] = ..., pushes: _Optional[_Iterable[_Union[_parameter_service_pb2.WorkerPushes, _Mapping]]] = ..., saved_at: _Optional[str] = ..., bases: _Optional[_Iterable[_Union[_parameter_service_pb2.CheckpointFile, _Mapping]]] = ...) -> None: ...

class FinishTrainingRequest(_message.Message):
    __slots__ = ("reason", "interrupts")
    REASON_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    interrupts: bool
    def __init__(self, reason: _Optional[str] = ..., interrupts: bool = ...) -> None: ...

class FinishTrainingResponse(_message.Message):
    __slots__ = ("global_step",)
    GLOBAL_STEP_FIELD_NUMBER: _ClassVar[int]
    global_step: int
    def __init__(self, global_step: _Optional[int] = ...) -> None: ...

class PolicySpec(_message.Message):
    __slots__ = ("name", "tokens", "num_tokens", "replicas_to_aggregate", "total_num_replicas", "staleness", "use_locking", "max_staleness", "too_stale", "grace", "merge")
    class Name(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NAME_UNSPECIFIED: _ClassVar[PolicySpec.Name]
        NAME_SYNC: _ClassVar[PolicySpec.Name]
        NAME_SSP: _ClassVar[PolicySpec.Name]
        NAME_ASYNC: _ClassVar[PolicySpec.Name]
        NAME_OUTER: _ClassVar[PolicySpec.Name]
    NAME_UNSPECIFIED: PolicySpec.Name
    NAME_SYNC: PolicySpec.Name
    NAME_SSP: PolicySpec.Name
    NAME_ASYNC: PolicySpec.Name
    NAME_OUTER: PolicySpec.Name
    class Tokens(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TOKENS_UNSPECIFIED: _ClassVar[PolicySpec.Tokens]
        TOKENS_STRICT: _ClassVar[PolicySpec.Tokens]
        TOKENS_FIFO: _ClassVar[PolicySpec.Tokens]
    TOKENS_UNSPECIFIED: PolicySpec.Tokens
    TOKENS_STRICT: PolicySpec.Tokens
    TOKENS_FIFO: PolicySpec.Tokens
    class TooStale(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        TOO_STALE_UNSPECIFIED: _ClassVar[PolicySpec.TooStale]
        TOO_STALE_DROP: _ClassVar[PolicySpec.TooStale]
        TOO_STALE_SCALE: _ClassVar[PolicySpec.TooStale]
    TOO_STALE_UNSPECIFIED: PolicySpec.TooStale
    TOO_STALE_DROP: PolicySpec.TooStale
    TOO_STALE_SCALE: PolicySpec.TooStale
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_TO_AGGREGATE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    USE_LOCKING_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    TOO_STALE_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    name: PolicySpec.Name
    tokens: PolicySpec.Tokens
    num_tokens: int
    replicas_to_aggregate: int
    total_num_replicas: int
    staleness: int
    use_locking: bool
    max_staleness: int
    too_stale: PolicySpec.TooStale
    grace: _duration_pb2.Duration
    merge: _tensor_pb2.Merge
    def __init__(self, name: _Optional[_Union[PolicySpec.Name, str]] = ..., tokens: _Optional[_Union[PolicySpec.Tokens, str]] = ..., num_tokens: _Optional[int] = ..., replicas_to_aggregate: _Optional[int] = ..., total_num_replicas: _Optional[int] = ..., staleness: _Optional[int] = ..., use_locking: bool = ..., max_staleness: _Optional[int] = ..., too_stale: _Optional[_Union[PolicySpec.TooStale, str]] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., merge: _Optional[_Union[_tensor_pb2.Merge, _Mapping]] = ...) -> None: ...

class ChangeSettingsRequest(_message.Message):
    __slots__ = ("request_id", "max_wait", "policy", "hyperparameters")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    max_wait: _duration_pb2.Duration
    policy: PolicySpec
    hyperparameters: HyperparameterChange
    def __init__(self, request_id: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., policy: _Optional[_Union[PolicySpec, _Mapping]] = ..., hyperparameters: _Optional[_Union[HyperparameterChange, _Mapping]] = ...) -> None: ...

class HyperparameterChange(_message.Message):
    __slots__ = ("variable", "learning_rate", "hyperparameters")
    class HyperparametersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    HYPERPARAMETERS_FIELD_NUMBER: _ClassVar[int]
    variable: str
    learning_rate: _tensor_pb2.LearningRateSchedule
    hyperparameters: _containers.ScalarMap[str, float]
    def __init__(self, variable: _Optional[str] = ..., learning_rate: _Optional[_Union[_tensor_pb2.LearningRateSchedule, _Mapping]] = ..., hyperparameters: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ChangeSettingsResponse(_message.Message):
    __slots__ = ("settings",)
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    settings: SettingsState
    def __init__(self, settings: _Optional[_Union[SettingsState, _Mapping]] = ...) -> None: ...

class SettingsState(_message.Message):
    __slots__ = ("version", "step")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    version: int
    step: int
    def __init__(self, version: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...
