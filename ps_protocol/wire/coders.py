"""Made by `make proto` from `pairs`, not for editing: `write_…` fills an empty message with a value, `read_…` checks one."""
# mypy: ignore-errors

from functools import lru_cache
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.model.data import DataMarks, DataPass, DataRange, DataSpec
from ps_protocol.model.keys import KeyKind, KeySpec
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.merging import MergeName, MergeSpec
from ps_protocol.model.optimizers import OptimizerSpec, Schedule, StepHyperparameter
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.model.spec import AverageSpec, ClipSpec, ModelSpec, PlacedSlice, PlacementPolicy
from ps_protocol.model.updates import FormulaUpdate
from ps_protocol.model.variables import Constraint, ConstraintKind, DataType, Initializer, InitializerKind, Partition, SparseMean, VariableSpec
from ps_protocol.roles.accumulators import AccumulatorCreation, AccumulatorSpec, AccumulatorStatus, AccumulatorStatusRequest, CreateAccumulatorRequest, DeleteAccumulatorRequest, GradientHeader, GradientReply, Reduction, SetAccumulatorStepRequest, TakeRequest
from ps_protocol.roles.board import BoardRequest, FoundHeader, Key, PostHeader
from ps_protocol.roles.checkpoint import Checkpoint, ChiefRecord, ChosenPush
from ps_protocol.roles.chief import AgreedModel, ChangeSettingsRequest, CheckpointStatus, ClusterState, ClusterStatus, ClusterStatusRequest, CommitPushRequest, CommitResult, CompleteInitializationRequest, Condition, ContributionCounts, DataStatus, DequeueTokenRequest, DeregisterRequest, End, FinishTrainingRequest, FollowerReport, GetModelRequest, HeartbeatRequest, HyperparameterChange, InnerSteps, LeaseRangesRequest, LeaseReply, LeaseResult, LedgerEntry, Level, ModelReply, ModelState, Participant, ParticipantKind, ParticipantStatus, PushCommit, PushOutcome, RegisterModelRequest, RegisterRequest, Registration, SaveCheckpointRequest, SavedCheckpoint, ServerStatus, SettingsReply, TokenReply, TokenResult, WorkerTraffic
from ps_protocol.roles.contribution import Attachments, GivenNumbers, PushId, StepAttachments, UserState
from ps_protocol.roles.fence import Era, Fence
from ps_protocol.roles.history import Answered, Applied, Arrived, Begun, Configured, Contributed, Counted, Created, StateKept
from ps_protocol.roles.identity import HandshakeReply, HandshakeRequest, Identity, ProtocolVersion, Role, SeenPlace, TryCheckpointsRequest
from ps_protocol.roles.shard import AdoptRequest, Adoption, AppliedPush, ApplyReply, ApplyRequest, CheckpointFile, CountRowsRequest, DataSocketRequest, HiddenState, Invitation, KeepRecordRequest, KeepStoryRequest, Metric, MetricCell, OptimizerPowers, PrepareRequest, PushHeader, PushReply, PushResult, ReadMetricsRequest, ReadRequest, ReplicaState, RestoreProgress, RestoreRequest, RowsRequest, SaveProgress, SaveRequest, SaveState, ShardReport, ShardSettings, ShardSpec, ShardStatus, ShardStatusRequest, ShutdownRequest, SparsePart, WorkerPushes
from ps_protocol.roles.weights import FetchReply, FetchRequest, KeptWeights
from ps_protocol.v1 import accumulator_service_pb2, board_service_pb2, chief_service_pb2, handshake_service_pb2, history_pb2, parameter_service_pb2, tensor_pb2
from ps_protocol.wire import fields, special
from typing import Any

_DataType_NUMBERS: dict[Any, Any] = {DataType.FLOAT32: 1, DataType.FLOAT64: 2, DataType.FLOAT16: 3, DataType.BFLOAT16: 4}
_SparseMean_NUMBERS: dict[Any, Any] = {SparseMean.PER_INDEX: 1, SparseMean.PER_REPLICA: 2}
_DataType_MEMBERS: dict[Any, Any] = {1: DataType.FLOAT32, 2: DataType.FLOAT64, 3: DataType.FLOAT16, 4: DataType.BFLOAT16}
_SparseMean_MEMBERS: dict[Any, Any] = {1: SparseMean.PER_INDEX, 2: SparseMean.PER_REPLICA}
_InitializerKind_NUMBERS: dict[Any, Any] = {InitializerKind.CONSTANT: 1, InitializerKind.UNIFORM: 2, InitializerKind.NORMAL: 3}
_InitializerKind_MEMBERS: dict[Any, Any] = {1: InitializerKind.CONSTANT, 2: InitializerKind.UNIFORM, 3: InitializerKind.NORMAL}
_ConstraintKind_NUMBERS: dict[Any, Any] = {ConstraintKind.NON_NEGATIVE: 1, ConstraintKind.CLIP: 2, ConstraintKind.MAX_NORM: 3, ConstraintKind.UNIT_NORM: 4, ConstraintKind.FORMULA: 5}
_ConstraintKind_MEMBERS: dict[Any, Any] = {1: ConstraintKind.NON_NEGATIVE, 2: ConstraintKind.CLIP, 3: ConstraintKind.MAX_NORM, 4: ConstraintKind.UNIT_NORM, 5: ConstraintKind.FORMULA}
_KeyKind_NUMBERS: dict[Any, Any] = {KeyKind.INT64: 1, KeyKind.UINT64: 2}
_KeyKind_MEMBERS: dict[Any, Any] = {1: KeyKind.INT64, 2: KeyKind.UINT64}
_OptimizerSpec_hyperparameters = fields.default_of(OptimizerSpec, "hyperparameters")
_OptimizerSpec_slot_values = fields.default_of(OptimizerSpec, "slot_values")
_MergeName_NUMBERS: dict[Any, Any] = {MergeName.MEAN: 1, MergeName.TRIMMED_MEAN: 2, MergeName.BOUNDED_MEAN: 3, MergeName.RADIAL_MEAN: 4}
_MergeName_MEMBERS: dict[Any, Any] = {1: MergeName.MEAN, 2: MergeName.TRIMMED_MEAN, 3: MergeName.BOUNDED_MEAN, 4: MergeName.RADIAL_MEAN}
_ModelSpec_clip = fields.default_of(ModelSpec, "clip")
_PolicyName_NUMBERS: dict[Any, Any] = {PolicyName.SYNC: 1, PolicyName.SSP: 2, PolicyName.ASYNC: 3, PolicyName.OUTER: 4}
_TokenMode_NUMBERS: dict[Any, Any] = {TokenMode.STRICT: 1, TokenMode.FIFO: 2}
_TooStale_NUMBERS: dict[Any, Any] = {TooStale.DROP: 1, TooStale.SCALE: 2}
_PolicySpec_merge = fields.default_of(PolicySpec, "merge")
_PolicyName_MEMBERS: dict[Any, Any] = {1: PolicyName.SYNC, 2: PolicyName.SSP, 3: PolicyName.ASYNC, 4: PolicyName.OUTER}
_TokenMode_MEMBERS: dict[Any, Any] = {1: TokenMode.STRICT, 2: TokenMode.FIFO}
_TooStale_MEMBERS: dict[Any, Any] = {1: TooStale.DROP, 2: TooStale.SCALE}
_FloatEncoding_NUMBERS: dict[Any, Any] = {FloatEncoding.AS_IS: 0, FloatEncoding.BFLOAT16: 1, FloatEncoding.FLOAT16: 2, FloatEncoding.INT8_BLOCKS: 3, FloatEncoding.TOP_K: 4, FloatEncoding.INT4_BLOCKS: 5}
_PushResult_NUMBERS: dict[Any, Any] = {PushResult.STAGED: 1, PushResult.STALE: 2, PushResult.DUPLICATE: 3, PushResult.APPLIED: 4}
_PushResult_MEMBERS: dict[Any, Any] = {1: PushResult.STAGED, 2: PushResult.STALE, 3: PushResult.DUPLICATE, 4: PushResult.APPLIED}
_ShardSpec_clip = fields.default_of(ShardSpec, "clip")
_ApplyRequest_attached = fields.default_of(ApplyRequest, "attached")
_ApplyRequest_merge = fields.default_of(ApplyRequest, "merge")
_AdoptRequest_replica = fields.default_of(AdoptRequest, "replica")
_SaveState_NUMBERS: dict[Any, Any] = {SaveState.WRITING: 1, SaveState.DONE: 2, SaveState.FAILED: 3}
_SaveState_MEMBERS: dict[Any, Any] = {1: SaveState.WRITING, 2: SaveState.DONE, 3: SaveState.FAILED}
_ParticipantKind_NUMBERS: dict[Any, Any] = {ParticipantKind.WORKER: 1, ParticipantKind.OBSERVER: 2}
_ParticipantKind_MEMBERS: dict[Any, Any] = {1: ParticipantKind.WORKER, 2: ParticipantKind.OBSERVER}
_PushCommit_attached = fields.default_of(PushCommit, "attached")
_PushOutcome_NUMBERS: dict[Any, Any] = {PushOutcome.ACCEPTED: 1, PushOutcome.STALE: 2, PushOutcome.DUPLICATE: 3, PushOutcome.LATE: 4, PushOutcome.ROLLED_BACK: 5}
_PushOutcome_MEMBERS: dict[Any, Any] = {1: PushOutcome.ACCEPTED, 2: PushOutcome.STALE, 3: PushOutcome.DUPLICATE, 4: PushOutcome.LATE, 5: PushOutcome.ROLLED_BACK}
_Role_NUMBERS: dict[Any, Any] = {Role.PARAMETER_SERVER: 1, Role.CHIEF: 2, Role.RELAY: 3}
_Role_MEMBERS: dict[Any, Any] = {1: Role.PARAMETER_SERVER, 2: Role.CHIEF, 3: Role.RELAY}
_Reduction_NUMBERS: dict[Any, Any] = {Reduction.MEAN: 1, Reduction.SUM: 2}
_Reduction_MEMBERS: dict[Any, Any] = {1: Reduction.MEAN, 2: Reduction.SUM}
_PostHeader_keeps_from = fields.default_of(PostHeader, "keeps_from")
_ShardStatusRequest_fence = fields.default_of(ShardStatusRequest, "fence")
_ModelState_NUMBERS: dict[Any, Any] = {ModelState.ABSENT: 1, ModelState.INITIALIZE: 2, ModelState.WAIT: 3, ModelState.READY: 4}
_ModelReply_policy = fields.default_of(ModelReply, "policy")
_ModelReply_attached = fields.default_of(ModelReply, "attached")
_ModelState_MEMBERS: dict[Any, Any] = {1: ModelState.ABSENT, 2: ModelState.INITIALIZE, 3: ModelState.WAIT, 4: ModelState.READY}
_AgreedModel_policy = fields.default_of(AgreedModel, "policy")
_TokenResult_NUMBERS: dict[Any, Any] = {TokenResult.TOKEN: 1, TokenResult.WAIT: 2, TokenResult.FINISHED: 3}
_End_NUMBERS: dict[Any, Any] = {End.NOT_YET: 0, End.FINISHED: 1, End.INTERRUPTED: 2}
_TokenResult_MEMBERS: dict[Any, Any] = {1: TokenResult.TOKEN, 2: TokenResult.WAIT, 3: TokenResult.FINISHED}
_End_MEMBERS: dict[Any, Any] = {0: End.NOT_YET, 1: End.FINISHED, 2: End.INTERRUPTED}
_LeaseResult_NUMBERS: dict[Any, Any] = {LeaseResult.GRANTED: 1, LeaseResult.WAIT: 2, LeaseResult.EXHAUSTED: 3}
_LeaseResult_MEMBERS: dict[Any, Any] = {1: LeaseResult.GRANTED, 2: LeaseResult.WAIT, 3: LeaseResult.EXHAUSTED}
_ClusterState_NUMBERS: dict[Any, Any] = {ClusterState.CONNECTING: 1, ClusterState.WAITING_FOR_MODEL: 2, ClusterState.TRAINING: 3, ClusterState.FINISHED: 4, ClusterState.FAILED: 5, ClusterState.RECOVERING: 6}
_ClusterState_MEMBERS: dict[Any, Any] = {1: ClusterState.CONNECTING, 2: ClusterState.WAITING_FOR_MODEL, 3: ClusterState.TRAINING, 4: ClusterState.FINISHED, 5: ClusterState.FAILED, 6: ClusterState.RECOVERING}
_Schedule_arguments = fields.default_of(Schedule, "arguments")
_FormulaUpdate_arrays = fields.default_of(FormulaUpdate, "arrays")
_FormulaUpdate_numbers = fields.default_of(FormulaUpdate, "numbers")
_ChiefRecord_attached = fields.default_of(ChiefRecord, "attached")
_ChiefRecord_earlier = fields.default_of(ChiefRecord, "earlier")
_HyperparameterChange_hyperparameters = fields.default_of(HyperparameterChange, "hyperparameters")
_Level_NUMBERS: dict[Any, Any] = {Level.GREEN: 1, Level.AMBER: 2, Level.RED: 3}
_Level_MEMBERS: dict[Any, Any] = {1: Level.GREEN, 2: Level.AMBER, 3: Level.RED}
_ChosenPush_attached = fields.default_of(ChosenPush, "attached")


def write_VariableSpec(value: VariableSpec, message: Any) -> None:
    message.name = value.name
    message.data_type = _DataType_NUMBERS[value.data_type]
    if one := value.shape:
        message.shape.extend(one)
    if (one := value.optimizer) is not None:
        write_OptimizerSpec(one, message.optimizer)
    message.is_sparse = value.is_sparse
    message.sparse_mean = _SparseMean_NUMBERS[value.sparse_mean]
    if (one := value.initializer) is not None:
        write_Initializer(one, message.initializer)
    if (one := value.constraint) is not None:
        write_Constraint(one, message.constraint)
    if (one := value.partition) is not None:
        write_Partition(one, message.partition)
    if (one := value.keys) is not None:
        write_KeySpec(one, message.keys)


def read_VariableSpec(message: Any) -> VariableSpec:
    try:
        special.check_variable(message)
        return VariableSpec(
            name=message.name,
            data_type=fields.chosen(_DataType_MEMBERS, message.data_type, "data_type"),
            shape=tuple(message.shape),
            optimizer=read_OptimizerSpec(message.optimizer) if message.HasField("optimizer") else None,
            is_sparse=message.is_sparse,
            sparse_mean=fields.chosen(_SparseMean_MEMBERS, message.sparse_mean, "sparse_mean") if message.sparse_mean else SparseMean.PER_INDEX,
            initializer=read_Initializer(message.initializer) if message.HasField("initializer") else None,
            constraint=read_Constraint(message.constraint) if message.HasField("constraint") else None,
            partition=read_Partition(message.partition) if message.HasField("partition") else None,
            keys=read_KeySpec(message.keys) if message.HasField("keys") else None,
        )
    except fields.MalformedMessage as error:
        words = f"{special.variable_place(message)}: {error.message}"
        raise fields.MalformedMessage(words, facts=error.facts) from None


def write_Initializer(value: Initializer, message: Any) -> None:
    message.kind = _InitializerKind_NUMBERS[value.kind]
    message.low = value.low
    message.high = value.high
    message.seed = value.seed
    if (one := value.zero_row) is not None:
        message.zero_row = one


def read_Initializer(message: Any) -> Initializer:
    return Initializer(
        kind=fields.chosen(_InitializerKind_MEMBERS, message.kind, "initializer.kind"),
        low=message.low,
        high=message.high,
        seed=message.seed,
        zero_row=message.zero_row if message.HasField("zero_row") else None,
    )


def write_Constraint(value: Constraint, message: Any) -> None:
    message.kind = _ConstraintKind_NUMBERS[value.kind]
    message.low = value.low
    message.high = value.high
    message.formula = value.formula


def read_Constraint(message: Any) -> Constraint:
    return Constraint(
        kind=fields.chosen(_ConstraintKind_MEMBERS, message.kind, "constraint.kind"),
        low=message.low,
        high=message.high,
        formula=message.formula,
    )


def write_KeySpec(value: KeySpec, message: Any) -> None:
    message.kind = _KeyKind_NUMBERS[value.kind]
    if (one := value.max_rows) is not None:
        message.max_rows = one
    if (one := value.max_age_steps) is not None:
        message.max_age_steps = one
    message.admit_probability = value.admit_probability
    if (one := value.admit_after) is not None:
        message.admit_after = one


def read_KeySpec(message: Any) -> KeySpec:
    return KeySpec(
        kind=fields.chosen(_KeyKind_MEMBERS, message.kind, "keys.kind") if message.kind else KeyKind.INT64,
        max_rows=message.max_rows if message.HasField("max_rows") else None,
        max_age_steps=message.max_age_steps if message.HasField("max_age_steps") else None,
        admit_probability=message.admit_probability,
        admit_after=message.admit_after if message.HasField("admit_after") else None,
    )


def write_OptimizerSpec(value: OptimizerSpec, message: Any) -> None:
    message.name = value.name
    write_Schedule(value.learning_rate, message.learning_rate)
    if one := value.hyperparameters:
        message.hyperparameters.update(one)
    message.formula = value.formula
    if one := value.slot_values:
        message.slot_values.update(one)
    message.group = value.group


def read_OptimizerSpec(message: Any) -> OptimizerSpec:
    special.check_optimizer(message)
    return OptimizerSpec(
        name=message.name,
        learning_rate=read_Schedule(message.learning_rate) if message.HasField("learning_rate") else fields.missing(message, "learning_rate"),
        hyperparameters=dict(sorted(message.hyperparameters.items())),
        formula=message.formula,
        slot_values=dict(sorted(message.slot_values.items())),
        group=message.group,
    )


def write_MergeSpec(value: MergeSpec, message: Any) -> None:
    message.name = _MergeName_NUMBERS[value.name]
    message.number = value.number


def read_MergeSpec(message: Any) -> MergeSpec:
    return MergeSpec(
        name=fields.chosen(_MergeName_MEMBERS, message.name, "merge.name") if message.name else MergeName.MEAN,
        number=message.number,
    )


def write_ModelSpec(value: ModelSpec, message: Any) -> None:
    if one := value.variables:
        for item in one:
            write_VariableSpec(item, message.variables.add())
    write_OptimizerSpec(value.optimizer, message.optimizer)
    write_PlacementPolicy(value.placement, message.placement)
    if (one := value.averages) is not None:
        write_AverageSpec(one, message.averages)
    if (one := value.clip) is not _ModelSpec_clip and one != _ModelSpec_clip:
        write_ClipSpec(one, message.clip)


def read_ModelSpec(message: Any) -> ModelSpec:
    special.check_model(message)
    return ModelSpec(
        variables=fields.decode_each(message.variables, read_VariableSpec, field="variables") if message.variables else (),
        optimizer=read_OptimizerSpec(message.optimizer) if message.HasField("optimizer") else fields.missing(message, "optimizer"),
        placement=read_PlacementPolicy(message.placement) if message.HasField("placement") else fields.missing(message, "placement"),
        averages=read_AverageSpec(message.averages) if message.HasField("averages") else None,
        clip=read_ClipSpec(message.clip) if message.HasField("clip") else _ModelSpec_clip,
    )


def write_PolicySpec(value: PolicySpec, message: Any) -> None:
    message.name = _PolicyName_NUMBERS[value.name]
    message.tokens = _TokenMode_NUMBERS[value.tokens]
    if (one := value.num_tokens) != -1:
        message.num_tokens = one
    if (one := value.replicas_to_aggregate) is not None:
        message.replicas_to_aggregate = one
    if (one := value.total_num_replicas) is not None:
        message.total_num_replicas = one
    message.staleness = value.staleness
    if (one := value.use_locking) != True:
        message.use_locking = one
    if (one := value.max_staleness) is not None:
        message.max_staleness = one
    message.too_stale = _TooStale_NUMBERS[value.too_stale]
    if (one := value.grace_s) != 0.0:
        fields.write_duration(one, message.grace)
    if (one := value.merge) is not _PolicySpec_merge and one != _PolicySpec_merge:
        write_MergeSpec(one, message.merge)


def read_PolicySpec(message: Any) -> PolicySpec:
    return PolicySpec(
        name=fields.chosen(_PolicyName_MEMBERS, message.name, "policy.name") if message.name else PolicyName.SYNC,
        tokens=fields.chosen(_TokenMode_MEMBERS, message.tokens, "policy.tokens") if message.tokens else TokenMode.STRICT,
        num_tokens=message.num_tokens if message.HasField("num_tokens") else -1,
        replicas_to_aggregate=message.replicas_to_aggregate if message.HasField("replicas_to_aggregate") else None,
        total_num_replicas=message.total_num_replicas if message.HasField("total_num_replicas") else None,
        staleness=message.staleness,
        use_locking=message.use_locking if message.HasField("use_locking") else True,
        max_staleness=message.max_staleness if message.HasField("max_staleness") else None,
        too_stale=fields.chosen(_TooStale_MEMBERS, message.too_stale, "policy.too_stale") if message.too_stale else TooStale.DROP,
        grace_s=fields.decode_duration(message.grace, field="policy.grace") if message.HasField("grace") else 0.0,
        merge=read_MergeSpec(message.merge) if message.HasField("merge") else _PolicySpec_merge,
    )


def write_Fence(value: Fence, message: Any) -> None:
    write_Era(value.era, message.era)
    message.chief_incarnation = value.chief_incarnation


def read_Fence(message: Any) -> Fence:
    data = message.SerializeToString()
    return _kept_Fence(data) if len(data) <= fields.MAX_KEPT_BYTES else _read_Fence(message)


@lru_cache(maxsize=fields.NUM_KEPT)
def _kept_Fence(data: bytes) -> Fence:
    return _read_Fence(tensor_pb2.Fence.FromString(data))


def _read_Fence(message: Any) -> Fence:
    return Fence(
        era=special.read_era(message, READ),
        chief_incarnation=message.chief_incarnation,
    )


def write_PushId(value: PushId, message: Any) -> None:
    message.worker = value.worker
    message.incarnation = value.incarnation
    message.sequence = value.sequence


def read_PushId(message: Any) -> PushId:
    special.check_push_id(message)
    return PushId(
        worker=message.worker,
        incarnation=message.incarnation,
        sequence=message.sequence,
    )


def write_Attachments(value: Attachments, message: Any) -> None:
    if one := value.hyperparameters:
        for item in one:
            write_StepHyperparameter(item, message.hyperparameters.add())
    message.user_state = value.user_state


def read_Attachments(message: Any) -> Attachments:
    special.check_attachments(message)
    return Attachments(
        hyperparameters=fields.decode_each(message.hyperparameters, read_StepHyperparameter, field="hyperparameters") if message.hyperparameters else (),
        user_state=message.user_state,
    )


def write_StepAttachments(value: StepAttachments, message: Any) -> None:
    if one := value.numbers:
        for item in one:
            write_GivenNumbers(item, message.numbers.add())
    if one := value.user_states:
        for item in one:
            write_UserState(item, message.user_states.add())


def read_StepAttachments(message: Any) -> StepAttachments:
    special.check_step_attachments(message)
    return StepAttachments(
        numbers=fields.decode_each(message.numbers, read_GivenNumbers, field="numbers") if message.numbers else (),
        user_states=fields.decode_each(message.user_states, read_UserState, field="user_states") if message.user_states else (),
    )


def write_PushHeader(value: PushHeader, message: Any) -> None:
    write_Era(value.era, message.era)
    write_PushId(value.push_id, message.push_id)
    message.step = value.step
    message.layout_hash = value.layout_hash
    if one := value.sparse:
        for item in one:
            write_SparsePart(item, message.sparse.add())
    if one := value.absent:
        message.absent.extend(one)
    if one := value.metrics:
        for key, item in one.items():
            write_Metric(item, message.metrics[key])
    if one := value.refused:
        message.refused.extend(one)
    message.encoding = _FloatEncoding_NUMBERS[value.encoding]
    message.encoded_bytes = value.encoded_bytes
    if (one := value.gradient_buffer) is not None:
        message.gradient_buffer = one
    message.secret = value.secret
    if one := value.formulas:
        for item in one:
            write_FormulaUpdate(item, message.formulas.add())


def read_PushHeader(message: Any) -> PushHeader:
    special.check_push_header(message)
    return PushHeader(
        era=read_Era(message.era) if message.HasField("era") else fields.missing(message, "era"),
        push_id=read_PushId(message.push_id) if message.HasField("push_id") else fields.missing(message, "push_id"),
        step=message.step,
        layout_hash=message.layout_hash,
        sparse=fields.decode_each(message.sparse, read_SparsePart, field="sparse") if message.sparse else (),
        absent=tuple(message.absent),
        metrics=special.read_metrics(message, READ),
        refused=tuple(message.refused),
        encoding=special.read_encoding(message, READ),
        encoded_bytes=message.encoded_bytes,
        gradient_buffer=message.gradient_buffer if message.HasField("gradient_buffer") else None,
        secret=message.secret,
        formulas=special.read_formulas(message, READ),
    )


def write_PushReply(value: PushReply, message: Any) -> None:
    message.result = _PushResult_NUMBERS[value.result]
    message.step = value.step


def read_PushReply(message: Any) -> PushReply:
    return PushReply(
        result=fields.chosen(_PushResult_MEMBERS, message.result, "result"),
        step=message.step,
    )


def write_ShardSpec(value: ShardSpec, message: Any) -> None:
    message.epoch = value.epoch
    message.shard = value.shard
    special.write_layout(value, message, WRITE)
    write_OptimizerSpec(value.optimizer, message.optimizer)
    message.initial_step = value.initial_step
    message.attempt = value.attempt
    message.max_staged_per_worker = value.max_staged_per_worker
    if (one := value.averages) is not None:
        write_AverageSpec(one, message.averages)
    if (one := value.clip) is not _ShardSpec_clip and one != _ShardSpec_clip:
        write_ClipSpec(one, message.clip)


def read_ShardSpec(message: Any) -> ShardSpec:
    return ShardSpec(
        epoch=message.epoch,
        shard=message.shard,
        layout=special.read_layout(message, READ),
        optimizer=read_OptimizerSpec(message.optimizer) if message.HasField("optimizer") else fields.missing(message, "optimizer"),
        initial_step=message.initial_step,
        attempt=message.attempt,
        max_staged_per_worker=message.max_staged_per_worker,
        averages=read_AverageSpec(message.averages) if message.HasField("averages") else None,
        clip=read_ClipSpec(message.clip) if message.HasField("clip") else _ShardSpec_clip,
    )


def write_ApplyRequest(value: ApplyRequest, message: Any) -> None:
    write_Fence(value.fence, message.fence)
    message.step = value.step
    if one := value.contributors:
        for item in one:
            write_PushId(item, message.contributors.add())
    if one := value.weights:
        message.weights.extend(one)
    if one := value.scales:
        message.scales.extend(one)
    if one := value.discards:
        for item in one:
            write_PushId(item, message.discards.add())
    if one := value.ranges:
        message.ranges.extend(one)
    if one := value.without:
        for item in one:
            write_PushId(item, message.without.add())
    if (one := value.attached) is not _ApplyRequest_attached and one != _ApplyRequest_attached:
        message.attached.SetInParent()
        write_StepAttachments(one, message.attached)
    message.wants_checksums = value.wants_checksums
    if (one := value.merge) is not _ApplyRequest_merge and one != _ApplyRequest_merge:
        write_MergeSpec(one, message.merge)
    if one := value.shares:
        message.shares.extend(one)


def read_ApplyRequest(message: Any) -> ApplyRequest:
    return special.in_order(ApplyRequest(
        fence=read_Fence(message.fence) if message.HasField("fence") else fields.missing(message, "fence"),
        step=message.step,
        contributors=fields.decode_each(message.contributors, read_PushId, field="contributors") if message.contributors else (),
        weights=tuple(message.weights),
        scales=tuple(message.scales),
        discards=special.read_discards(message, READ),
        ranges=tuple(message.ranges),
        without=fields.decode_each(message.without, read_PushId, field="without") if message.without else (),
        attached=read_StepAttachments(message.attached) if message.HasField("attached") else _ApplyRequest_attached,
        wants_checksums=message.wants_checksums,
        merge=read_MergeSpec(message.merge) if message.HasField("merge") else _ApplyRequest_merge,
        shares=tuple(message.shares),
    ))


def write_ReadRequest(value: ReadRequest, message: Any) -> None:
    message.epoch = value.epoch
    message.layout_hash = value.layout_hash
    if (one := value.step) is not None:
        message.step = one
    message.encoding = _FloatEncoding_NUMBERS[value.encoding]
    if (one := value.held_step) is not None:
        message.held_step = one
    message.slot = value.slot


def read_ReadRequest(message: Any) -> ReadRequest:
    return ReadRequest(
        epoch=message.epoch,
        layout_hash=message.layout_hash,
        step=message.step if message.HasField("step") else None,
        encoding=special.read_encoding_of_read(message, READ),
        held_step=message.held_step if message.HasField("held_step") else None,
        slot=message.slot,
    )


def write_FetchRequest(value: FetchRequest, message: Any) -> None:
    write_Era(value.era, message.era)
    message.layout_hash = value.layout_hash
    message.encoding = _FloatEncoding_NUMBERS[value.encoding]
    if (one := value.step) is not None:
        message.step = one
    if (one := value.held_step) is not None:
        message.held_step = one
    if one := value.slices:
        message.slices.extend(one)
    message.offset = value.offset
    if (one := value.max_wait_s) != 0.0:
        fields.write_max_wait(one, message.max_wait)


def read_FetchRequest(message: Any) -> FetchRequest:
    return FetchRequest(
        era=read_Era(message.era) if message.HasField("era") else fields.missing(message, "era"),
        layout_hash=message.layout_hash,
        encoding=special.read_encoding_for_variables(message, READ),
        step=message.step if message.HasField("step") else None,
        held_step=message.held_step if message.HasField("held_step") else None,
        slices=tuple(message.slices),
        offset=message.offset,
        max_wait_s=fields.decode_max_wait(message.max_wait) if message.HasField("max_wait") else 0.0,
    )


def write_KeptWeights(value: KeptWeights, message: Any) -> None:
    message.encoding = _FloatEncoding_NUMBERS[value.encoding]
    message.has_tables = value.has_tables


def read_KeptWeights(message: Any) -> KeptWeights:
    return KeptWeights(
        encoding=special.read_encoding_for_variables(message, READ),
        has_tables=message.has_tables,
    )


def write_VariableSlice(value: VariableSlice, message: Any) -> None:
    write_VariableSpec(value.variable, message.variable)
    message.start = value.start
    message.stop = value.stop
    message.axis = value.axis


def read_VariableSlice(message: Any) -> VariableSlice:
    return VariableSlice(
        variable=read_VariableSpec(message.variable) if message.HasField("variable") else fields.missing(message, "variable"),
        start=message.start,
        stop=message.stop,
        axis=message.axis,
    )


def write_RowsRequest(value: RowsRequest, message: Any) -> None:
    message.epoch = value.epoch
    message.layout_hash = value.layout_hash
    message.table = value.table
    if (one := value.step) is not None:
        message.step = one
    message.slot = value.slot
    message.is_prefetch = value.is_prefetch


def read_RowsRequest(message: Any) -> RowsRequest:
    return RowsRequest(
        epoch=message.epoch,
        layout_hash=message.layout_hash,
        table=message.table,
        step=message.step if message.HasField("step") else None,
        slot=message.slot,
        is_prefetch=message.is_prefetch,
    )


def write_HiddenState(value: HiddenState, message: Any) -> None:
    message.step = value.step
    if one := value.powers:
        for item in one:
            write_OptimizerPowers(item, message.powers.add())
    message.phase = value.phase
    message.phase_step = value.phase_step
    message.average_product = value.average_product
    message.num_nonfinite = value.num_nonfinite
    if one := value.table_rows:
        message.table_rows.extend(one)
    if one := value.metrics:
        for item in one:
            write_MetricCell(item, message.metrics.add())
    if one := value.pushes:
        for item in one:
            write_WorkerPushes(item, message.pushes.add())


def read_HiddenState(message: Any) -> HiddenState:
    return HiddenState(
        step=message.step,
        powers=fields.decode_each(message.powers, read_OptimizerPowers, field="powers") if message.powers else (),
        phase=message.phase,
        phase_step=message.phase_step,
        average_product=message.average_product,
        num_nonfinite=message.num_nonfinite,
        table_rows=tuple(message.table_rows),
        metrics=fields.decode_each(message.metrics, read_MetricCell, field="metrics") if message.metrics else (),
        pushes=fields.decode_each(message.pushes, read_WorkerPushes, field="pushes") if message.pushes else (),
    )


def write_MetricCell(value: MetricCell, message: Any) -> None:
    message.name = value.name
    message.worker = value.worker
    message.total = value.total
    message.weight = value.weight
    message.count = value.count
    message.last = value.last


def read_MetricCell(message: Any) -> MetricCell:
    return MetricCell(
        name=message.name,
        worker=message.worker,
        total=message.total,
        weight=message.weight,
        count=message.count,
        last=message.last,
    )


def write_ShardStatus(value: ShardStatus, message: Any) -> None:
    message.shard = value.shard
    message.process_incarnation = value.process_incarnation
    write_Fence(value.fence, message.fence)
    if (one := value.step) is not None:
        message.step = one
    write_ShardReport(value.report, message.report)
    message.settings_version = value.settings_version
    message.chief_address = value.chief_address
    if (one := value.chief_heard_ago_s) is not None:
        fields.write_duration(one, message.chief_heard_ago)
    message.is_alone = value.is_alone
    if one := value.slots:
        message.slots.extend(one)
    message.damage = value.damage
    message.is_leaving = value.is_leaving


def read_ShardStatus(message: Any) -> ShardStatus:
    special.check_status(message)
    return ShardStatus(
        shard=message.shard,
        process_incarnation=message.process_incarnation,
        fence=read_Fence(message.fence) if message.HasField("fence") else fields.missing(message, "fence"),
        step=message.step if message.HasField("step") else None,
        report=read_ShardReport(message.report) if message.HasField("report") else fields.missing(message, "report"),
        settings_version=message.settings_version,
        chief_address=message.chief_address,
        chief_heard_ago_s=fields.decode_duration(message.chief_heard_ago, field="chief_heard_ago") if message.HasField("chief_heard_ago") else None,
        is_alone=message.is_alone,
        slots=tuple(message.slots),
        damage=message.damage,
        is_leaving=message.is_leaving,
    )


def write_AdoptRequest(value: AdoptRequest, message: Any) -> None:
    write_Fence(value.fence, message.fence)
    message.chief_address = value.chief_address
    if one := value.session_keys:
        message.session_keys.extend(one)
    if (one := value.replica) is not _AdoptRequest_replica and one != _AdoptRequest_replica:
        write_ReplicaState(one, message.replica)


def read_AdoptRequest(message: Any) -> AdoptRequest:
    special.check_adoption(message)
    return AdoptRequest(
        fence=read_Fence(message.fence) if message.HasField("fence") else fields.missing(message, "fence"),
        chief_address=message.chief_address,
        session_keys=tuple(message.session_keys),
        replica=read_ReplicaState(message.replica) if message.HasField("replica") else _AdoptRequest_replica,
    )


def write_PrepareRequest(value: PrepareRequest, message: Any) -> None:
    special.write_prepare(value, message, WRITE)


def read_PrepareRequest(message: Any) -> PrepareRequest:
    return PrepareRequest(
        of=special.read_prepare(message, READ),
    )


def write_Adoption(value: Adoption, message: Any) -> None:
    if (one := value.step) is not None:
        message.step = one
    message.layout_hash = value.layout_hash
    message.record = value.record
    message.record_version = value.record_version
    if (one := value.last_apply) is not None:
        write_ApplyRequest(one, message.last_apply)
    if one := value.pushes:
        for item in one:
            write_WorkerPushes(item, message.pushes.add())
    if one := value.session_keys:
        message.session_keys.extend(one)
    message.was_alone = value.was_alone
    if one := value.given_up:
        for item in one:
            write_PushId(item, message.given_up.add())


def read_Adoption(message: Any) -> Adoption:
    return Adoption(
        step=message.step if message.HasField("step") else None,
        layout_hash=message.layout_hash,
        record=message.record,
        record_version=message.record_version,
        last_apply=read_ApplyRequest(message.last_apply) if message.HasField("last_apply") else None,
        pushes=fields.decode_each(message.pushes, read_WorkerPushes, field="pushes") if message.pushes else (),
        session_keys=tuple(message.session_keys),
        was_alone=message.was_alone,
        given_up=special.read_given_up(message, READ),
    )


def write_SaveRequest(value: SaveRequest, message: Any) -> None:
    write_Fence(value.fence, message.fence)
    message.step = value.step
    message.tag = value.tag
    if (one := value.num_shards) != 1:
        message.num_shards = one
    if (one := value.since) is not None:
        message.since = one
    if (one := value.max_wait_s) != 0.0:
        fields.write_max_wait(one, message.max_wait)


def read_SaveRequest(message: Any) -> SaveRequest:
    special.check_save_request(message)
    return SaveRequest(
        fence=read_Fence(message.fence) if message.HasField("fence") else fields.missing(message, "fence"),
        step=message.step,
        tag=message.tag,
        num_shards=message.num_shards if message.HasField("num_shards") else 1,
        since=message.since if message.HasField("since") else None,
        max_wait_s=fields.decode_max_wait(message.max_wait) if message.HasField("max_wait") else 0.0,
    )


def write_SaveProgress(value: SaveProgress, message: Any) -> None:
    message.state = _SaveState_NUMBERS[value.state]
    if (one := value.file) is not None:
        write_CheckpointFile(one, message.file)
    if (one := value.failure) is not None:
        message.failure.CopyFrom(fields.encode_call_error(one))


def read_SaveProgress(message: Any) -> SaveProgress:
    special.check_save_progress(message)
    return SaveProgress(
        state=fields.chosen(_SaveState_MEMBERS, message.state, "state"),
        file=read_CheckpointFile(message.file) if message.HasField("file") else None,
        failure=fields.decode_call_error(message.failure) if message.HasField("failure") else None,
    )


def write_CheckpointFile(value: CheckpointFile, message: Any) -> None:
    message.name = value.name
    message.shard = value.shard
    message.num_bytes = value.num_bytes
    message.sha256 = value.sha256
    if (one := value.tag) != '':
        message.tag = one
    if (one := value.is_delta) != False:
        message.is_delta = one


def read_CheckpointFile(message: Any) -> CheckpointFile:
    special.check_file(message)
    return CheckpointFile(
        name=message.name,
        shard=message.shard,
        num_bytes=message.num_bytes,
        sha256=message.sha256,
        tag=message.tag if message.HasField("tag") else '',
        is_delta=message.is_delta if message.HasField("is_delta") else False,
    )


def write_RestoreRequest(value: RestoreRequest, message: Any) -> None:
    write_Fence(value.fence, message.fence)
    write_ShardSpec(value.spec, message.spec)
    message.tag = value.tag
    message.manifest_sha256 = value.manifest_sha256
    write_ShardSettings(value.settings, message.settings)
    message.replica_version = value.replica_version
    if (one := value.max_wait_s) != 0.0:
        fields.write_max_wait(one, message.max_wait)


def read_RestoreRequest(message: Any) -> RestoreRequest:
    special.check_restore_request(message)
    return RestoreRequest(
        fence=read_Fence(message.fence) if message.HasField("fence") else fields.missing(message, "fence"),
        spec=read_ShardSpec(message.spec) if message.HasField("spec") else fields.missing(message, "spec"),
        tag=message.tag,
        manifest_sha256=message.manifest_sha256,
        settings=read_ShardSettings(message.settings) if message.HasField("settings") else fields.missing(message, "settings"),
        replica_version=message.replica_version,
        max_wait_s=fields.decode_max_wait(message.max_wait) if message.HasField("max_wait") else 0.0,
    )


def write_Participant(value: Participant, message: Any) -> None:
    write_Era(value.era, message.era)
    message.kind = _ParticipantKind_NUMBERS[value.kind]
    message.index = value.index
    message.incarnation = value.incarnation
    message.secret = value.secret


def read_Participant(message: Any) -> Participant:
    data = message.SerializeToString()
    return _kept_Participant(data) if len(data) <= fields.MAX_KEPT_BYTES else _read_Participant(message)


@lru_cache(maxsize=fields.NUM_KEPT)
def _kept_Participant(data: bytes) -> Participant:
    return _read_Participant(chief_service_pb2.Participant.FromString(data))


def _read_Participant(message: Any) -> Participant:
    return Participant(
        era=read_Era(message.era) if message.HasField("era") else fields.missing(message, "era"),
        kind=fields.chosen(_ParticipantKind_MEMBERS, message.kind, "participant.kind"),
        index=message.index,
        incarnation=message.incarnation,
        secret=message.secret,
    )


def write_RegisterRequest(value: RegisterRequest, message: Any) -> None:
    message.kind = _ParticipantKind_NUMBERS[value.kind]
    if (one := value.index) is not None:
        message.index = one
    message.host = value.host
    message.pid = value.pid
    message.request_id = value.request_id
    message.takeover = value.takeover
    if (one := value.former) is not None:
        write_Participant(one, message.former)
    if one := value.held:
        message.held.extend(one)


def read_RegisterRequest(message: Any) -> RegisterRequest:
    special.check_register_request(message)
    return RegisterRequest(
        kind=fields.chosen(_ParticipantKind_MEMBERS, message.kind, "kind"),
        index=message.index if message.HasField("index") else None,
        host=message.host,
        pid=message.pid,
        request_id=message.request_id,
        takeover=message.takeover,
        former=read_Participant(message.former) if message.HasField("former") else None,
        held=tuple(message.held),
    )


def write_LeaseRangesRequest(value: LeaseRangesRequest, message: Any) -> None:
    write_Participant(value.participant, message.participant)
    write_DataSpec(value.data, message.data)
    message.max_ranges = value.max_ranges
    message.request_id = value.request_id
    if (one := value.max_wait_s) != 20.0:
        fields.write_max_wait(one, message.max_wait)
    if one := value.held:
        message.held.extend(one)


def read_LeaseRangesRequest(message: Any) -> LeaseRangesRequest:
    special.check_lease(message)
    return LeaseRangesRequest(
        participant=read_Participant(message.participant) if message.HasField("participant") else fields.missing(message, "participant"),
        data=read_DataSpec(message.data) if message.HasField("data") else fields.missing(message, "data"),
        max_ranges=message.max_ranges,
        request_id=message.request_id,
        max_wait_s=fields.decode_max_wait(message.max_wait) if message.HasField("max_wait") else 20.0,
        held=tuple(message.held),
    )


def write_Registration(value: Registration, message: Any) -> None:
    write_Participant(value.participant, message.participant)
    fields.write_duration(value.lease_s, message.lease)
    if one := value.shard_addresses:
        message.shard_addresses.extend(one)
    message.global_step = value.global_step
    message.may_contribute = value.may_contribute
    message.chief_incarnation = value.chief_incarnation
    if one := value.standby_addresses:
        message.standby_addresses.extend(one)
    message.shards_version = value.shards_version
    message.rejects_nonfinite = value.rejects_nonfinite


def read_Registration(message: Any) -> Registration:
    special.check_registration(message)
    return Registration(
        participant=read_Participant(message.participant) if message.HasField("participant") else fields.missing(message, "participant"),
        lease_s=fields.decode_duration(message.lease, field="lease"),
        shard_addresses=tuple(message.shard_addresses),
        global_step=message.global_step,
        may_contribute=message.may_contribute,
        chief_incarnation=message.chief_incarnation,
        standby_addresses=tuple(message.standby_addresses),
        shards_version=message.shards_version,
        rejects_nonfinite=message.rejects_nonfinite,
    )


def write_PushCommit(value: PushCommit, message: Any) -> None:
    write_PushId(value.push_id, message.push_id)
    message.step = value.step
    message.staged = value.staged
    message.is_applied = value.is_applied
    if one := value.ranges:
        message.ranges.extend(one)
    if (one := value.attached) is not _PushCommit_attached and one != _PushCommit_attached:
        write_Attachments(one, message.attached)
    if (one := value.weight) != 1.0:
        message.weight = one
    if (one := value.inner) is not None:
        write_InnerSteps(one, message.inner)


def read_PushCommit(message: Any) -> PushCommit:
    special.check_commit(message)
    return PushCommit(
        push_id=read_PushId(message.push_id) if message.HasField("push_id") else fields.missing(message, "push_id"),
        step=message.step,
        staged=message.staged,
        is_applied=message.is_applied,
        ranges=tuple(message.ranges),
        attached=read_Attachments(message.attached) if message.HasField("attached") else _PushCommit_attached,
        weight=message.weight if message.HasField("weight") else 1.0,
        inner=read_InnerSteps(message.inner) if message.HasField("inner") else None,
    )


def write_CommitResult(value: CommitResult, message: Any) -> None:
    message.outcome = _PushOutcome_NUMBERS[value.outcome]
    message.global_step = value.global_step
    if (one := value.first_outcome) is not None:
        message.first_outcome = _PushOutcome_NUMBERS[one]
    if (one := value.applied_step) is not None:
        message.applied_step = one
    message.staleness = value.staleness
    message.factor = value.factor


def read_CommitResult(message: Any) -> CommitResult:
    return CommitResult(
        outcome=fields.chosen(_PushOutcome_MEMBERS, message.outcome, "outcome"),
        global_step=message.global_step,
        first_outcome=fields.chosen(_PushOutcome_MEMBERS, message.first_outcome, "first_outcome") if message.first_outcome else None,
        applied_step=message.applied_step if message.HasField("applied_step") else None,
        staleness=message.staleness,
        factor=special.read_factor(message, READ),
    )


def write_SettingsReply(value: SettingsReply, message: Any) -> None:
    message.version = value.version
    message.step = value.step


def read_SettingsReply(message: Any) -> SettingsReply:
    return SettingsReply(
        version=message.version,
        step=message.step,
    )


def write_Checkpoint(value: Checkpoint, message: Any) -> None:
    message.tag = value.tag
    message.cluster = value.cluster
    write_Fence(value.fence, message.fence)
    message.step = value.step
    message.num_shards = value.num_shards
    write_ChiefRecord(value.record, message.record)
    if one := value.placement:
        for item in one:
            write_PlacedSlice(item, message.placement.add())
    if one := value.files:
        for item in one:
            write_CheckpointFile(item, message.files.add())
    if one := value.bases:
        for item in one:
            write_CheckpointFile(item, message.bases.add())
    if one := value.pushes:
        for item in one:
            write_WorkerPushes(item, message.pushes.add())


def read_Checkpoint(message: Any) -> Checkpoint:
    return Checkpoint(
        tag=message.tag,
        cluster=message.cluster,
        fence=read_Fence(message.fence) if message.HasField("fence") else fields.missing(message, "fence"),
        step=message.step,
        num_shards=message.num_shards,
        record=read_ChiefRecord(message.record) if message.HasField("record") else fields.missing(message, "record"),
        placement=fields.decode_each(message.placement, read_PlacedSlice, field="placement") if message.placement else (),
        files=fields.decode_each(message.files, read_CheckpointFile, field="files") if message.files else (),
        bases=fields.decode_each(message.bases, read_CheckpointFile, field="bases") if message.bases else (),
        pushes=fields.decode_each(message.pushes, read_WorkerPushes, field="pushes") if message.pushes else (),
    )


def write_Begun(value: Begun, message: Any) -> None:
    message.format = value.format
    message.role = value.role
    message.pid = value.pid
    message.segment = value.segment


def read_Begun(message: Any) -> Begun:
    return Begun(
        format=message.format,
        role=message.role,
        pid=message.pid,
        segment=message.segment,
    )


def write_Contributed(value: Contributed, message: Any) -> None:
    message.shard = value.shard
    write_PushHeader(value.header, message.header)


def read_Contributed(message: Any) -> Contributed:
    return Contributed(
        shard=message.shard,
        header=read_PushHeader(message.header) if message.HasField("header") else fields.missing(message, "header"),
    )


def write_Answered(value: Answered, message: Any) -> None:
    write_PushId(value.push_id, message.push_id)
    message.epoch = value.epoch
    message.outcome = value.outcome
    if (one := value.applied_step) is not None:
        message.applied_step = one


def read_Answered(message: Any) -> Answered:
    return Answered(
        push_id=read_PushId(message.push_id) if message.HasField("push_id") else fields.missing(message, "push_id"),
        epoch=message.epoch,
        outcome=message.outcome,
        applied_step=message.applied_step if message.HasField("applied_step") else None,
    )


def write_Created(value: Created, message: Any) -> None:
    write_ShardSpec(value.spec, message.spec)
    message.process = value.process


def read_Created(message: Any) -> Created:
    return Created(
        spec=read_ShardSpec(message.spec) if message.HasField("spec") else fields.missing(message, "spec"),
        process=message.process,
    )


def write_StateKept(value: StateKept, message: Any) -> None:
    write_ShardSpec(value.spec, message.spec)
    write_ShardSettings(value.settings, message.settings)
    message.process = value.process
    write_HiddenState(value.hidden, message.hidden)
    if (one := value.from_epoch) is not None:
        message.from_epoch = one


def read_StateKept(message: Any) -> StateKept:
    return StateKept(
        spec=read_ShardSpec(message.spec) if message.HasField("spec") else fields.missing(message, "spec"),
        settings=read_ShardSettings(message.settings) if message.HasField("settings") else fields.missing(message, "settings"),
        process=message.process,
        hidden=read_HiddenState(message.hidden) if message.HasField("hidden") else fields.missing(message, "hidden"),
        from_epoch=message.from_epoch if message.HasField("from_epoch") else None,
    )


def write_Configured(value: Configured, message: Any) -> None:
    message.step = value.step
    write_ShardSettings(value.settings, message.settings)


def read_Configured(message: Any) -> Configured:
    return Configured(
        step=message.step,
        settings=read_ShardSettings(message.settings) if message.HasField("settings") else fields.missing(message, "settings"),
    )


def write_Applied(value: Applied, message: Any) -> None:
    write_ApplyRequest(value.request, message.request)
    message.sha256 = value.sha256


def read_Applied(message: Any) -> Applied:
    return Applied(
        request=read_ApplyRequest(message.request) if message.HasField("request") else fields.missing(message, "request"),
        sha256=message.sha256,
    )


def write_Arrived(value: Arrived, message: Any) -> None:
    write_PushId(value.push_id, message.push_id)
    message.epoch = value.epoch


def read_Arrived(message: Any) -> Arrived:
    return Arrived(
        push_id=read_PushId(message.push_id) if message.HasField("push_id") else fields.missing(message, "push_id"),
        epoch=message.epoch,
    )


def write_Counted(value: Counted, message: Any) -> None:
    message.epoch = value.epoch
    message.step = value.step
    if one := value.contributors:
        for item in one:
            write_PushId(item, message.contributors.add())


def read_Counted(message: Any) -> Counted:
    return Counted(
        epoch=message.epoch,
        step=message.step,
        contributors=fields.decode_each(message.contributors, read_PushId, field="contributors") if message.contributors else (),
    )


def write_Identity(value: Identity, message: Any) -> None:
    message.cluster = value.cluster
    message.role = _Role_NUMBERS[value.role]
    message.index = value.index
    message.process_incarnation = value.process_incarnation


def read_Identity(message: Any) -> Identity:
    return Identity(
        cluster=message.cluster,
        role=fields.chosen(_Role_MEMBERS, message.role, "identity.role"),
        index=message.index,
        process_incarnation=message.process_incarnation,
    )


def write_AccumulatorSpec(value: AccumulatorSpec, message: Any) -> None:
    message.name = value.name
    message.data_type = _DataType_NUMBERS[value.data_type]
    if (one := value.shape) is not None:
        message.has_shape = True
        message.shape.extend(one)
    message.reduction = _Reduction_NUMBERS[value.reduction]
    message.is_sparse = value.is_sparse
    message.sparse_mean = _SparseMean_NUMBERS[value.sparse_mean]


def read_AccumulatorSpec(message: Any) -> AccumulatorSpec:
    special.check_accumulator(message)
    return AccumulatorSpec(
        name=message.name,
        data_type=fields.chosen(_DataType_MEMBERS, message.data_type, "data_type"),
        shape=tuple(message.shape) if message.has_shape else None,
        reduction=fields.chosen(_Reduction_MEMBERS, message.reduction, "reduction") if message.reduction else Reduction.MEAN,
        is_sparse=message.is_sparse,
        sparse_mean=fields.chosen(_SparseMean_MEMBERS, message.sparse_mean, "sparse_mean") if message.sparse_mean else SparseMean.PER_INDEX,
    )


def write_GradientHeader(value: GradientHeader, message: Any) -> None:
    message.name = value.name
    message.client = value.client
    message.sequence = value.sequence
    message.local_step = value.local_step
    if one := value.shape:
        message.shape.extend(one)
    message.num_indices = value.num_indices
    if (one := value.dense_shape) is not None:
        message.has_dense_shape = True
        message.dense_shape.extend(one)


def read_GradientHeader(message: Any) -> GradientHeader:
    return GradientHeader(
        name=message.name,
        client=message.client,
        sequence=message.sequence,
        local_step=message.local_step,
        shape=tuple(message.shape),
        num_indices=message.num_indices,
        dense_shape=tuple(message.dense_shape) if message.has_dense_shape else None,
    )


def write_GradientReply(value: GradientReply, message: Any) -> None:
    message.accepted = value.accepted
    message.step = value.step


def read_GradientReply(message: Any) -> GradientReply:
    return GradientReply(
        accepted=message.accepted,
        step=message.step,
    )


def write_TakeRequest(value: TakeRequest, message: Any) -> None:
    message.name = value.name
    message.client = value.client
    message.sequence = value.sequence
    message.num_required = value.num_required
    fields.write_max_wait(value.max_wait_s, message.max_wait)


def read_TakeRequest(message: Any) -> TakeRequest:
    return TakeRequest(
        name=message.name,
        client=message.client,
        sequence=message.sequence,
        num_required=message.num_required,
        max_wait_s=fields.decode_max_wait(message.max_wait),
    )


def write_PostHeader(value: PostHeader, message: Any) -> None:
    message.board = value.board
    message.author = value.author
    message.incarnation = value.incarnation
    write_Key(value.key, message.key)
    if (one := value.keeps_from) is not _PostHeader_keeps_from and one != _PostHeader_keeps_from:
        write_Key(one, message.keeps_from)
    message.content_bytes = value.content_bytes


def read_PostHeader(message: Any) -> PostHeader:
    return PostHeader(
        board=message.board,
        author=message.author,
        incarnation=message.incarnation,
        key=read_Key(message.key) if message.HasField("key") else fields.missing(message, "key"),
        keeps_from=read_Key(message.keeps_from) if message.HasField("keeps_from") else _PostHeader_keeps_from,
        content_bytes=message.content_bytes,
    )


def write_BoardRequest(value: BoardRequest, message: Any) -> None:
    message.board = value.board
    message.author = value.author
    if (one := value.since) is not None:
        write_Key(one, message.since)
    fields.write_max_wait(value.max_wait_s, message.max_wait)


def read_BoardRequest(message: Any) -> BoardRequest:
    return BoardRequest(
        board=message.board,
        author=message.author,
        since=read_Key(message.since) if message.HasField("since") else None,
        max_wait_s=fields.decode_max_wait(message.max_wait),
    )


def write_FoundHeader(value: FoundHeader, message: Any) -> None:
    message.process_incarnation = value.process_incarnation
    if (one := value.newest) is not None:
        write_Key(one, message.newest)
    if (one := value.key) is not None:
        write_Key(one, message.key)
    message.incarnation = value.incarnation
    message.content_bytes = value.content_bytes


def read_FoundHeader(message: Any) -> FoundHeader:
    return FoundHeader(
        process_incarnation=message.process_incarnation,
        newest=read_Key(message.newest) if message.HasField("newest") else None,
        key=read_Key(message.key) if message.HasField("key") else None,
        incarnation=message.incarnation,
        content_bytes=message.content_bytes,
    )


def write_CreateAccumulatorRequest(value: CreateAccumulatorRequest, message: Any) -> None:
    write_AccumulatorSpec(value.spec, message.spec)


def read_CreateAccumulatorRequest(message: Any) -> CreateAccumulatorRequest:
    return CreateAccumulatorRequest(
        spec=read_AccumulatorSpec(message.spec) if message.HasField("spec") else fields.missing(message, "spec"),
    )


def write_AccumulatorCreation(value: AccumulatorCreation, message: Any) -> None:
    message.created = value.created
    message.step = value.step


def read_AccumulatorCreation(message: Any) -> AccumulatorCreation:
    return AccumulatorCreation(
        created=message.created,
        step=message.step,
    )


def write_SetAccumulatorStepRequest(value: SetAccumulatorStepRequest, message: Any) -> None:
    message.name = value.name
    message.step = value.step


def read_SetAccumulatorStepRequest(message: Any) -> SetAccumulatorStepRequest:
    return SetAccumulatorStepRequest(
        name=message.name,
        step=message.step,
    )


def write_AccumulatorStatusRequest(value: AccumulatorStatusRequest, message: Any) -> None:
    message.name = value.name


def read_AccumulatorStatusRequest(message: Any) -> AccumulatorStatusRequest:
    return AccumulatorStatusRequest(
        name=message.name,
    )


def write_AccumulatorStatus(value: AccumulatorStatus, message: Any) -> None:
    write_AccumulatorSpec(value.spec, message.spec)
    message.num_accumulated = value.num_accumulated
    message.step = value.step
    message.num_waiting = value.num_waiting


def read_AccumulatorStatus(message: Any) -> AccumulatorStatus:
    return AccumulatorStatus(
        spec=read_AccumulatorSpec(message.spec) if message.HasField("spec") else fields.missing(message, "spec"),
        num_accumulated=message.num_accumulated,
        step=message.step,
        num_waiting=message.num_waiting,
    )


def write_DeleteAccumulatorRequest(value: DeleteAccumulatorRequest, message: Any) -> None:
    message.name = value.name


def read_DeleteAccumulatorRequest(message: Any) -> DeleteAccumulatorRequest:
    return DeleteAccumulatorRequest(
        name=message.name,
    )


def write_ApplyReply(value: ApplyReply, message: Any) -> None:
    message.step = value.step
    message.repeated_request = value.repeated_request
    if one := value.checksums:
        message.checksums.extend(one)


def read_ApplyReply(message: Any) -> ApplyReply:
    return ApplyReply(
        step=message.step,
        repeated_request=message.repeated_request,
        checksums=tuple(message.checksums),
    )


def write_KeepRecordRequest(value: KeepRecordRequest, message: Any) -> None:
    write_Fence(value.fence, message.fence)
    message.version = value.version
    write_ShardSettings(value.settings, message.settings)
    message.record = value.record


def read_KeepRecordRequest(message: Any) -> KeepRecordRequest:
    return KeepRecordRequest(
        fence=read_Fence(message.fence) if message.HasField("fence") else fields.missing(message, "fence"),
        version=message.version,
        settings=read_ShardSettings(message.settings) if message.HasField("settings") else fields.missing(message, "settings"),
        record=message.record,
    )


def write_KeepStoryRequest(value: KeepStoryRequest, message: Any) -> None:
    message.story = value.story


def read_KeepStoryRequest(message: Any) -> KeepStoryRequest:
    return KeepStoryRequest(
        story=message.story,
    )


def write_ReadMetricsRequest(value: ReadMetricsRequest, message: Any) -> None:
    message.epoch = value.epoch


def read_ReadMetricsRequest(message: Any) -> ReadMetricsRequest:
    return ReadMetricsRequest(
        epoch=message.epoch,
    )


def write_CountRowsRequest(value: CountRowsRequest, message: Any) -> None:
    message.epoch = value.epoch
    message.name = value.name


def read_CountRowsRequest(message: Any) -> CountRowsRequest:
    return CountRowsRequest(
        epoch=message.epoch,
        name=message.name,
    )


def write_ShardStatusRequest(value: ShardStatusRequest, message: Any) -> None:
    if (one := value.fence) is not _ShardStatusRequest_fence and one != _ShardStatusRequest_fence:
        write_Fence(one, message.fence)


def read_ShardStatusRequest(message: Any) -> ShardStatusRequest:
    return ShardStatusRequest(
        fence=read_Fence(message.fence) if message.HasField("fence") else _ShardStatusRequest_fence,
    )


def write_ShutdownRequest(value: ShutdownRequest, message: Any) -> None:
    write_Fence(value.fence, message.fence)
    message.reason = value.reason


def read_ShutdownRequest(message: Any) -> ShutdownRequest:
    return ShutdownRequest(
        fence=read_Fence(message.fence) if message.HasField("fence") else fields.missing(message, "fence"),
        reason=message.reason,
    )


def write_DataSocketRequest(value: DataSocketRequest, message: Any) -> None:
    pass


def read_DataSocketRequest(message: Any) -> DataSocketRequest:
    return DataSocketRequest(
    )


def write_Invitation(value: Invitation, message: Any) -> None:
    message.nonce = value.nonce
    message.port = value.port
    message.path = value.path


def read_Invitation(message: Any) -> Invitation:
    return Invitation(
        nonce=message.nonce,
        port=message.port,
        path=message.path,
    )


def write_RestoreProgress(value: RestoreProgress, message: Any) -> None:
    message.is_done = value.is_done
    message.num_bytes_read = value.num_bytes_read
    message.num_bytes = value.num_bytes


def read_RestoreProgress(message: Any) -> RestoreProgress:
    return RestoreProgress(
        is_done=message.is_done,
        num_bytes_read=message.num_bytes_read,
        num_bytes=message.num_bytes,
    )


def write_FetchReply(value: FetchReply, message: Any) -> None:
    message.step = value.step
    message.newest_step = value.newest_step
    message.is_patch = value.is_patch
    message.num_bytes = value.num_bytes
    message.content = value.content
    if one := value.digests:
        message.digests.extend(one)


def read_FetchReply(message: Any) -> FetchReply:
    return FetchReply(
        step=message.step,
        newest_step=message.newest_step,
        is_patch=message.is_patch,
        num_bytes=message.num_bytes,
        content=message.content,
        digests=tuple(message.digests),
    )


def write_HeartbeatRequest(value: HeartbeatRequest, message: Any) -> None:
    write_Participant(value.participant, message.participant)
    if one := value.transports:
        message.transports.extend(one)
    if (one := value.traffic) is not None:
        write_WorkerTraffic(one, message.traffic)


def read_HeartbeatRequest(message: Any) -> HeartbeatRequest:
    return HeartbeatRequest(
        participant=read_Participant(message.participant) if message.HasField("participant") else fields.missing(message, "participant"),
        transports=tuple(message.transports),
        traffic=read_WorkerTraffic(message.traffic) if message.HasField("traffic") else None,
    )


def write_DeregisterRequest(value: DeregisterRequest, message: Any) -> None:
    write_Participant(value.participant, message.participant)
    message.failure = value.failure


def read_DeregisterRequest(message: Any) -> DeregisterRequest:
    return DeregisterRequest(
        participant=read_Participant(message.participant) if message.HasField("participant") else fields.missing(message, "participant"),
        failure=message.failure,
    )


def write_RegisterModelRequest(value: RegisterModelRequest, message: Any) -> None:
    write_Participant(value.participant, message.participant)
    message.model.SetInParent()
    write_ModelSpec(value.model, message.model)
    if (one := value.max_wait_s) != 20.0:
        fields.write_max_wait(one, message.max_wait)
    message.joins_only = value.joins_only


def read_RegisterModelRequest(message: Any) -> RegisterModelRequest:
    return RegisterModelRequest(
        participant=read_Participant(message.participant) if message.HasField("participant") else fields.missing(message, "participant"),
        model=read_ModelSpec(message.model) if message.HasField("model") else fields.missing(message, "model"),
        max_wait_s=fields.decode_max_wait(message.max_wait) if message.HasField("max_wait") else 20.0,
        joins_only=message.joins_only,
    )


def write_ModelReply(value: ModelReply, message: Any) -> None:
    message.state = _ModelState_NUMBERS[value.state]
    if one := value.placement:
        for item in one:
            write_PlacedSlice(item, message.placement.add())
    message.attempt = value.attempt
    message.max_staged_per_worker = value.max_staged_per_worker
    message.global_step = value.global_step
    message.waiting_for = value.waiting_for
    if (one := value.policy) is not _ModelReply_policy and one != _ModelReply_policy:
        write_PolicySpec(one, message.policy)
    if (one := value.attached) is not _ModelReply_attached and one != _ModelReply_attached:
        write_Attachments(one, message.attached)
    message.shards_version = value.shards_version


def read_ModelReply(message: Any) -> ModelReply:
    return ModelReply(
        state=fields.chosen(_ModelState_MEMBERS, message.state, "state"),
        placement=fields.decode_each(message.placement, read_PlacedSlice, field="placement") if message.placement else (),
        attempt=message.attempt,
        max_staged_per_worker=message.max_staged_per_worker,
        global_step=message.global_step,
        waiting_for=message.waiting_for,
        policy=read_PolicySpec(message.policy) if message.HasField("policy") else _ModelReply_policy,
        attached=read_Attachments(message.attached) if message.HasField("attached") else _ModelReply_attached,
        shards_version=message.shards_version,
    )


def write_CompleteInitializationRequest(value: CompleteInitializationRequest, message: Any) -> None:
    write_Participant(value.participant, message.participant)
    message.attempt = value.attempt


def read_CompleteInitializationRequest(message: Any) -> CompleteInitializationRequest:
    return CompleteInitializationRequest(
        participant=read_Participant(message.participant) if message.HasField("participant") else fields.missing(message, "participant"),
        attempt=message.attempt,
    )


def write_GetModelRequest(value: GetModelRequest, message: Any) -> None:
    if (one := value.max_wait_s) != 20.0:
        fields.write_max_wait(one, message.max_wait)


def read_GetModelRequest(message: Any) -> GetModelRequest:
    return GetModelRequest(
        max_wait_s=fields.decode_max_wait(message.max_wait) if message.HasField("max_wait") else 20.0,
    )


def write_AgreedModel(value: AgreedModel, message: Any) -> None:
    message.state = _ModelState_NUMBERS[value.state]
    if (one := value.model) is not None:
        message.model.SetInParent()
        write_ModelSpec(one, message.model)
    if one := value.placement:
        for item in one:
            write_PlacedSlice(item, message.placement.add())
    message.global_step = value.global_step
    if one := value.optimizers:
        for item in one:
            element = message.optimizers.add()
            write_OptimizerSpec(item[0], element.original)
            write_OptimizerSpec(item[1], element.current)
    if (one := value.policy) is not _AgreedModel_policy and one != _AgreedModel_policy:
        write_PolicySpec(one, message.policy)
    if (one := value.kept) is not None:
        write_KeptWeights(one, message.kept)


def read_AgreedModel(message: Any) -> AgreedModel:
    return AgreedModel(
        state=fields.chosen(_ModelState_MEMBERS, message.state, "state"),
        model=read_ModelSpec(message.model) if message.HasField("model") else None,
        placement=fields.decode_each(message.placement, read_PlacedSlice, field="placement") if message.placement else (),
        global_step=message.global_step,
        optimizers=fields.decode_each(message.optimizers, lambda item: (read_OptimizerSpec(item.original) if item.HasField("original") else fields.missing(item, "original"), read_OptimizerSpec(item.current) if item.HasField("current") else fields.missing(item, "current"),), field="optimizers") if message.optimizers else (),
        policy=read_PolicySpec(message.policy) if message.HasField("policy") else _AgreedModel_policy,
        kept=read_KeptWeights(message.kept) if message.HasField("kept") else None,
    )


def write_CommitPushRequest(value: CommitPushRequest, message: Any) -> None:
    write_Participant(value.participant, message.participant)
    write_PushCommit(value.commit, message.commit)


def read_CommitPushRequest(message: Any) -> CommitPushRequest:
    return CommitPushRequest(
        participant=read_Participant(message.participant) if message.HasField("participant") else fields.missing(message, "participant"),
        commit=read_PushCommit(message.commit) if message.HasField("commit") else fields.missing(message, "commit"),
    )


def write_DequeueTokenRequest(value: DequeueTokenRequest, message: Any) -> None:
    write_Participant(value.participant, message.participant)
    message.local_step = value.local_step
    message.request_id = value.request_id
    if (one := value.max_wait_s) != 20.0:
        fields.write_max_wait(one, message.max_wait)
    if (one := value.commit) is not None:
        write_PushCommit(one, message.commit)


def read_DequeueTokenRequest(message: Any) -> DequeueTokenRequest:
    return DequeueTokenRequest(
        participant=read_Participant(message.participant) if message.HasField("participant") else fields.missing(message, "participant"),
        local_step=message.local_step,
        request_id=message.request_id,
        max_wait_s=fields.decode_max_wait(message.max_wait) if message.HasField("max_wait") else 20.0,
        commit=read_PushCommit(message.commit) if message.HasField("commit") else None,
    )


def write_TokenReply(value: TokenReply, message: Any) -> None:
    message.result = _TokenResult_NUMBERS[value.result]
    message.step = value.step
    if (one := value.commit) is not None:
        write_CommitResult(one, message.commit)
    message.waiting_for = value.waiting_for
    message.global_step = value.global_step
    message.reads_latest = value.reads_latest
    message.settings_version = value.settings_version
    message.shards_version = value.shards_version
    message.end = _End_NUMBERS[value.end]
    message.speed = value.speed


def read_TokenReply(message: Any) -> TokenReply:
    return TokenReply(
        result=fields.chosen(_TokenResult_MEMBERS, message.result, "result"),
        step=message.step,
        commit=read_CommitResult(message.commit) if message.HasField("commit") else None,
        waiting_for=message.waiting_for,
        global_step=message.global_step,
        reads_latest=message.reads_latest,
        settings_version=message.settings_version,
        shards_version=message.shards_version,
        end=fields.chosen(_End_MEMBERS, message.end, "end"),
        speed=message.speed,
    )


def write_ChangeSettingsRequest(value: ChangeSettingsRequest, message: Any) -> None:
    message.request_id = value.request_id
    if (one := value.max_wait_s) != 20.0:
        fields.write_max_wait(one, message.max_wait)
    if (one := value.policy) is not None:
        write_PolicySpec(one, message.policy)
    if (one := value.hyperparameters) is not None:
        write_HyperparameterChange(one, message.hyperparameters)


def read_ChangeSettingsRequest(message: Any) -> ChangeSettingsRequest:
    return ChangeSettingsRequest(
        request_id=message.request_id,
        max_wait_s=fields.decode_max_wait(message.max_wait) if message.HasField("max_wait") else 20.0,
        policy=read_PolicySpec(message.policy) if message.HasField("policy") else None,
        hyperparameters=read_HyperparameterChange(message.hyperparameters) if message.HasField("hyperparameters") else None,
    )


def write_SaveCheckpointRequest(value: SaveCheckpointRequest, message: Any) -> None:
    message.request_id = value.request_id
    if (one := value.max_wait_s) != 20.0:
        fields.write_max_wait(one, message.max_wait)


def read_SaveCheckpointRequest(message: Any) -> SaveCheckpointRequest:
    return SaveCheckpointRequest(
        request_id=message.request_id,
        max_wait_s=fields.decode_max_wait(message.max_wait) if message.HasField("max_wait") else 20.0,
    )


def write_SavedCheckpoint(value: SavedCheckpoint, message: Any) -> None:
    message.tag = value.tag
    message.step = value.step
    message.waiting_for = value.waiting_for


def read_SavedCheckpoint(message: Any) -> SavedCheckpoint:
    return SavedCheckpoint(
        tag=message.tag,
        step=message.step,
        waiting_for=message.waiting_for,
    )


def write_LeaseReply(value: LeaseReply, message: Any) -> None:
    message.result = _LeaseResult_NUMBERS[value.result]
    if one := value.ranges:
        for item in one:
            write_DataRange(item, message.ranges.add())
    message.waiting_for = value.waiting_for


def read_LeaseReply(message: Any) -> LeaseReply:
    return LeaseReply(
        result=fields.chosen(_LeaseResult_MEMBERS, message.result, "result"),
        ranges=fields.decode_each(message.ranges, read_DataRange, field="ranges") if message.ranges else (),
        waiting_for=message.waiting_for,
    )


def write_FinishTrainingRequest(value: FinishTrainingRequest, message: Any) -> None:
    message.reason = value.reason
    message.interrupts = value.interrupts


def read_FinishTrainingRequest(message: Any) -> FinishTrainingRequest:
    return FinishTrainingRequest(
        reason=message.reason,
        interrupts=message.interrupts,
    )


def write_ClusterStatusRequest(value: ClusterStatusRequest, message: Any) -> None:
    message.max_ledger_entries = value.max_ledger_entries


def read_ClusterStatusRequest(message: Any) -> ClusterStatusRequest:
    return ClusterStatusRequest(
        max_ledger_entries=message.max_ledger_entries,
    )


def write_ClusterStatus(value: ClusterStatus, message: Any) -> None:
    message.cluster = value.cluster
    message.epoch = value.epoch
    message.state = _ClusterState_NUMBERS[value.state]
    message.reason = value.reason
    message.global_step = value.global_step
    if (one := value.max_steps) is not None:
        message.max_steps = one
    write_PolicySpec(value.policy, message.policy)
    message.replicas_to_aggregate = value.replicas_to_aggregate
    message.total_num_replicas = value.total_num_replicas
    message.num_contributions = value.num_contributions
    message.waiting_for = value.waiting_for
    fields.write_duration(value.step_age_s, message.step_age)
    if one := value.participants:
        for item in one:
            write_ParticipantStatus(item, message.participants.add())
    if one := value.shards:
        for item in one:
            write_ServerStatus(item, message.shards.add())
    if one := value.ledger:
        for item in one:
            write_LedgerEntry(item, message.ledger.add())
    message.num_accepted = value.num_accepted
    message.num_stale = value.num_stale
    message.num_late = value.num_late
    if one := value.conditions:
        for item in one:
            write_Condition(item, message.conditions.add())
    message.settings_version = value.settings_version
    message.optimizer = value.optimizer
    message.max_observed_staleness = value.max_observed_staleness
    message.chief_incarnation = value.chief_incarnation
    if (one := value.checkpoint) is not None:
        write_CheckpointStatus(one, message.checkpoint)
    message.num_rollbacks = value.num_rollbacks
    message.last_rollback = value.last_rollback
    message.min_replicas = value.min_replicas
    if (one := value.data) is not None:
        write_DataStatus(one, message.data)
    if (one := value.chief_cpu_s) != 0.0:
        fields.write_duration(one, message.chief_cpu)
    message.page_url = value.page_url
    if (one := value.earlier) is not None:
        write_ContributionCounts(one, message.earlier)


def read_ClusterStatus(message: Any) -> ClusterStatus:
    return ClusterStatus(
        cluster=message.cluster,
        epoch=message.epoch,
        state=fields.chosen(_ClusterState_MEMBERS, message.state, "state"),
        reason=message.reason,
        global_step=message.global_step,
        max_steps=message.max_steps if message.HasField("max_steps") else None,
        policy=read_PolicySpec(message.policy) if message.HasField("policy") else fields.missing(message, "policy"),
        replicas_to_aggregate=message.replicas_to_aggregate,
        total_num_replicas=message.total_num_replicas,
        num_contributions=message.num_contributions,
        waiting_for=message.waiting_for,
        step_age_s=fields.decode_duration(message.step_age, field="step_age"),
        participants=fields.decode_each(message.participants, read_ParticipantStatus, field="participants") if message.participants else (),
        shards=fields.decode_each(message.shards, read_ServerStatus, field="shards") if message.shards else (),
        ledger=fields.decode_each(message.ledger, read_LedgerEntry, field="ledger") if message.ledger else (),
        num_accepted=message.num_accepted,
        num_stale=message.num_stale,
        num_late=message.num_late,
        conditions=fields.decode_each(message.conditions, read_Condition, field="conditions") if message.conditions else (),
        settings_version=message.settings_version,
        optimizer=message.optimizer,
        max_observed_staleness=message.max_observed_staleness,
        chief_incarnation=message.chief_incarnation,
        checkpoint=read_CheckpointStatus(message.checkpoint) if message.HasField("checkpoint") else None,
        num_rollbacks=message.num_rollbacks,
        last_rollback=message.last_rollback,
        min_replicas=message.min_replicas,
        data=read_DataStatus(message.data) if message.HasField("data") else None,
        chief_cpu_s=fields.decode_duration(message.chief_cpu, field="chief_cpu") if message.HasField("chief_cpu") else 0.0,
        page_url=message.page_url,
        earlier=read_ContributionCounts(message.earlier) if message.HasField("earlier") else None,
    )


def write_HandshakeRequest(value: HandshakeRequest, message: Any) -> None:
    message.cluster = value.cluster
    if (one := value.expected_role) is not None:
        message.expected_role = _Role_NUMBERS[one]
    if (one := value.expected_index) is not None:
        message.expected_index = one
    write_ProtocolVersion(value.version, message.version)


def read_HandshakeRequest(message: Any) -> HandshakeRequest:
    return HandshakeRequest(
        cluster=message.cluster,
        expected_role=fields.chosen(_Role_MEMBERS, message.expected_role, "expected_role") if message.expected_role else None,
        expected_index=message.expected_index if message.HasField("expected_index") else None,
        version=read_ProtocolVersion(message.version) if message.HasField("version") else fields.missing(message, "version"),
    )


def write_HandshakeReply(value: HandshakeReply, message: Any) -> None:
    write_Identity(value.identity, message.identity)
    write_ProtocolVersion(value.version, message.version)
    message.epoch = value.epoch
    message.warning = value.warning


def read_HandshakeReply(message: Any) -> HandshakeReply:
    return HandshakeReply(
        identity=read_Identity(message.identity) if message.HasField("identity") else fields.missing(message, "identity"),
        version=read_ProtocolVersion(message.version) if message.HasField("version") else fields.missing(message, "version"),
        epoch=message.epoch,
        warning=message.warning,
    )


def write_TryCheckpointsRequest(value: TryCheckpointsRequest, message: Any) -> None:
    message.tag = value.tag
    message.is_last = value.is_last


def read_TryCheckpointsRequest(message: Any) -> TryCheckpointsRequest:
    return TryCheckpointsRequest(
        tag=message.tag,
        is_last=message.is_last,
    )


def write_SeenPlace(value: SeenPlace, message: Any) -> None:
    message.place = value.place
    if one := value.seen:
        message.seen.extend(one)


def read_SeenPlace(message: Any) -> SeenPlace:
    return SeenPlace(
        place=message.place,
        seen=tuple(message.seen),
    )


def write_Partition(value: Partition, message: Any) -> None:
    message.axis = value.axis
    message.num_slices = value.num_slices


def read_Partition(message: Any) -> Partition:
    return Partition(
        axis=message.axis,
        num_slices=message.num_slices,
    )


def write_Schedule(value: Schedule, message: Any) -> None:
    message.name = value.name
    if one := value.arguments:
        message.arguments.update(one)
    if one := value.boundaries:
        message.boundaries.extend(one)
    if one := value.values:
        message.values.extend(one)


def read_Schedule(message: Any) -> Schedule:
    return Schedule(
        name=message.name,
        arguments=dict(sorted(message.arguments.items())),
        boundaries=tuple(message.boundaries),
        values=tuple(message.values),
    )


def write_PlacementPolicy(value: PlacementPolicy, message: Any) -> None:
    message.strategy = value.strategy
    message.split_bytes = value.split_bytes
    if one := value.loads:
        message.loads.update(dict(one))
    if one := value.pins:
        message.pins.update(dict(one))


def read_PlacementPolicy(message: Any) -> PlacementPolicy:
    return PlacementPolicy(
        strategy=message.strategy,
        split_bytes=message.split_bytes,
        loads=tuple(sorted(message.loads.items())),
        pins=tuple(sorted(message.pins.items())),
    )


def write_AverageSpec(value: AverageSpec, message: Any) -> None:
    message.decay = value.decay
    message.use_num_updates = value.use_num_updates
    message.zero_debias = value.zero_debias
    if one := value.variables:
        message.variables.extend(one)


def read_AverageSpec(message: Any) -> AverageSpec:
    return AverageSpec(
        decay=message.decay,
        use_num_updates=message.use_num_updates,
        zero_debias=message.zero_debias,
        variables=tuple(message.variables),
    )


def write_ClipSpec(value: ClipSpec, message: Any) -> None:
    message.value = value.value
    message.norm = value.norm
    message.global_norm = value.global_norm


def read_ClipSpec(message: Any) -> ClipSpec:
    return ClipSpec(
        value=message.value,
        norm=message.norm,
        global_norm=message.global_norm,
    )


def write_Era(value: Era, message: Any) -> None:
    message.life = value.life
    message.epoch = value.epoch


def read_Era(message: Any) -> Era:
    return Era(
        life=message.life,
        epoch=message.epoch,
    )


def write_StepHyperparameter(value: StepHyperparameter, message: Any) -> None:
    message.group = value.group
    message.name = value.name
    message.value = value.value


def read_StepHyperparameter(message: Any) -> StepHyperparameter:
    return StepHyperparameter(
        group=message.group,
        name=message.name,
        value=message.value,
    )


def write_GivenNumbers(value: GivenNumbers, message: Any) -> None:
    if one := value.push_ids:
        for item in one:
            write_PushId(item, message.push_ids.add())
    if one := value.hyperparameters:
        for item in one:
            write_StepHyperparameter(item, message.hyperparameters.add())


def read_GivenNumbers(message: Any) -> GivenNumbers:
    return GivenNumbers(
        push_ids=fields.decode_each(message.push_ids, read_PushId, field="push_ids") if message.push_ids else (),
        hyperparameters=fields.decode_each(message.hyperparameters, read_StepHyperparameter, field="hyperparameters") if message.hyperparameters else (),
    )


def write_UserState(value: UserState, message: Any) -> None:
    message.worker = value.worker
    message.json = value.json


def read_UserState(message: Any) -> UserState:
    return UserState(
        worker=message.worker,
        json=message.json,
    )


def write_SparsePart(value: SparsePart, message: Any) -> None:
    message.table = value.table
    message.num_rows = value.num_rows


def read_SparsePart(message: Any) -> SparsePart:
    return SparsePart(
        table=message.table,
        num_rows=message.num_rows,
    )


def write_Metric(value: Metric, message: Any) -> None:
    message.value = value.value
    message.weight = value.weight


def read_Metric(message: Any) -> Metric:
    return Metric(
        value=message.value,
        weight=message.weight,
    )


def write_FormulaUpdate(value: FormulaUpdate, message: Any) -> None:
    message.text = value.text
    if one := value.variables:
        message.variables.update(one)
    if one := value.arrays:
        message.arrays.update(one)
    if one := value.numbers:
        message.numbers.update(one)


def read_FormulaUpdate(message: Any) -> FormulaUpdate:
    return FormulaUpdate(
        text=message.text,
        variables=dict(sorted(message.variables.items())),
        arrays=dict(sorted(message.arrays.items())),
        numbers=dict(sorted(message.numbers.items())),
    )


def write_OptimizerPowers(value: OptimizerPowers, message: Any) -> None:
    message.key = value.key
    if one := value.powers:
        message.powers.extend(one)


def read_OptimizerPowers(message: Any) -> OptimizerPowers:
    return OptimizerPowers(
        key=message.key,
        powers=tuple(message.powers),
    )


def write_WorkerPushes(value: WorkerPushes, message: Any) -> None:
    message.worker = value.worker
    message.incarnation = value.incarnation
    if one := value.applied:
        for item in one:
            write_AppliedPush(item, message.applied.add())


def read_WorkerPushes(message: Any) -> WorkerPushes:
    return WorkerPushes(
        worker=message.worker,
        incarnation=message.incarnation,
        applied=fields.decode_each(message.applied, read_AppliedPush, field="applied") if message.applied else (),
    )


def write_ShardReport(value: ShardReport, message: Any) -> None:
    message.allocated_bytes = value.allocated_bytes
    message.limit_bytes = value.limit_bytes
    message.variables_bytes = value.variables_bytes
    message.slots_bytes = value.slots_bytes
    message.files_bytes = value.files_bytes
    message.num_staged = value.num_staged
    message.num_pushes = value.num_pushes
    message.num_stale = value.num_stale
    message.num_duplicates = value.num_duplicates
    message.num_nonfinite = value.num_nonfinite
    message.num_sharing = value.num_sharing
    if (one := value.last_apply_s) != 0.0:
        fields.write_duration(one, message.last_apply)
    message.created_bytes = value.created_bytes
    if (one := value.cpu_s) != 0.0:
        fields.write_duration(one, message.cpu)
    message.num_rows = value.num_rows
    message.num_made = value.num_made
    message.num_evicted = value.num_evicted
    message.num_refused = value.num_refused
    message.num_unadmitted = value.num_unadmitted
    message.num_found = value.num_found


def read_ShardReport(message: Any) -> ShardReport:
    return ShardReport(
        allocated_bytes=message.allocated_bytes,
        limit_bytes=message.limit_bytes,
        variables_bytes=message.variables_bytes,
        slots_bytes=message.slots_bytes,
        files_bytes=message.files_bytes,
        num_staged=message.num_staged,
        num_pushes=message.num_pushes,
        num_stale=message.num_stale,
        num_duplicates=message.num_duplicates,
        num_nonfinite=message.num_nonfinite,
        num_sharing=message.num_sharing,
        last_apply_s=fields.decode_duration(message.last_apply, field="last_apply") if message.HasField("last_apply") else 0.0,
        created_bytes=message.created_bytes,
        cpu_s=fields.decode_duration(message.cpu, field="cpu") if message.HasField("cpu") else 0.0,
        num_rows=message.num_rows,
        num_made=message.num_made,
        num_evicted=message.num_evicted,
        num_refused=message.num_refused,
        num_unadmitted=message.num_unadmitted,
        num_found=message.num_found,
    )


def write_ReplicaState(value: ReplicaState, message: Any) -> None:
    message.version = value.version
    message.is_alone = value.is_alone
    message.forgets = value.forgets


def read_ReplicaState(message: Any) -> ReplicaState:
    return ReplicaState(
        version=message.version,
        is_alone=message.is_alone,
        forgets=message.forgets,
    )


def write_ShardSettings(value: ShardSettings, message: Any) -> None:
    write_Fence(value.fence, message.fence)
    message.version = value.version
    message.accepts_stale = value.accepts_stale
    message.applies_on_arrival = value.applies_on_arrival
    if one := value.optimizers:
        for item in one:
            element = message.optimizers.add()
            write_OptimizerSpec(item[0], element.original)
            write_OptimizerSpec(item[1], element.current)
    message.rejects_nonfinite = value.rejects_nonfinite


def read_ShardSettings(message: Any) -> ShardSettings:
    return ShardSettings(
        fence=read_Fence(message.fence) if message.HasField("fence") else fields.missing(message, "fence"),
        version=message.version,
        accepts_stale=message.accepts_stale,
        applies_on_arrival=message.applies_on_arrival,
        optimizers=fields.decode_each(message.optimizers, lambda item: (read_OptimizerSpec(item.original) if item.HasField("original") else fields.missing(item, "original"), read_OptimizerSpec(item.current) if item.HasField("current") else fields.missing(item, "current"),), field="optimizers") if message.optimizers else (),
        rejects_nonfinite=message.rejects_nonfinite,
    )


def write_DataSpec(value: DataSpec, message: Any) -> None:
    message.name = value.name
    message.num_samples = value.num_samples
    message.range_size = value.range_size
    message.num_epochs = value.num_epochs
    if (one := value.shuffle_seed) is not None:
        message.shuffle_seed = one


def read_DataSpec(message: Any) -> DataSpec:
    return DataSpec(
        name=message.name,
        num_samples=message.num_samples,
        range_size=message.range_size,
        num_epochs=message.num_epochs,
        shuffle_seed=message.shuffle_seed if message.HasField("shuffle_seed") else None,
    )


def write_InnerSteps(value: InnerSteps, message: Any) -> None:
    message.num = value.num
    fields.write_duration(value.duration_s, message.duration)


def read_InnerSteps(message: Any) -> InnerSteps:
    return InnerSteps(
        num=message.num,
        duration_s=fields.decode_duration(message.duration, field="duration"),
    )


def write_ChiefRecord(value: ChiefRecord, message: Any) -> None:
    if (one := value.model) is not None:
        message.model.SetInParent()
        write_ModelSpec(one, message.model)
    write_PolicySpec(value.policy, message.policy)
    message.settings_version = value.settings_version
    if one := value.optimizers:
        for item in one:
            element = message.optimizers.add()
            write_OptimizerSpec(item[0], element.original)
            write_OptimizerSpec(item[1], element.current)
    message.num_rollbacks = value.num_rollbacks
    message.last_rollback = value.last_rollback
    message.oldest_kept = value.oldest_kept
    message.epoch = value.epoch
    message.step = value.step
    if one := value.chosen:
        for item in one:
            write_ChosenPush(item, message.chosen.add())
    if (one := value.data) is not None:
        write_DataMarks(one, message.data)
    if (one := value.attached) is not _ChiefRecord_attached and one != _ChiefRecord_attached:
        message.attached.SetInParent()
        write_StepAttachments(one, message.attached)
    if (one := value.earlier) is not _ChiefRecord_earlier and one != _ChiefRecord_earlier:
        write_Fence(one, message.earlier)


def read_ChiefRecord(message: Any) -> ChiefRecord:
    return ChiefRecord(
        model=read_ModelSpec(message.model) if message.HasField("model") else None,
        policy=read_PolicySpec(message.policy) if message.HasField("policy") else fields.missing(message, "policy"),
        settings_version=message.settings_version,
        optimizers=fields.decode_each(message.optimizers, lambda item: (read_OptimizerSpec(item.original) if item.HasField("original") else fields.missing(item, "original"), read_OptimizerSpec(item.current) if item.HasField("current") else fields.missing(item, "current"),), field="optimizers") if message.optimizers else (),
        num_rollbacks=message.num_rollbacks,
        last_rollback=message.last_rollback,
        oldest_kept=message.oldest_kept,
        epoch=message.epoch,
        step=message.step,
        chosen=fields.decode_each(message.chosen, read_ChosenPush, field="chosen") if message.chosen else (),
        data=read_DataMarks(message.data) if message.HasField("data") else None,
        attached=read_StepAttachments(message.attached) if message.HasField("attached") else _ChiefRecord_attached,
        earlier=read_Fence(message.earlier) if message.HasField("earlier") else _ChiefRecord_earlier,
    )


def write_PlacedSlice(value: PlacedSlice, message: Any) -> None:
    write_VariableSlice(value.slice, message.slice)
    message.shard = value.shard


def read_PlacedSlice(message: Any) -> PlacedSlice:
    return PlacedSlice(
        slice=read_VariableSlice(message.slice) if message.HasField("slice") else fields.missing(message, "slice"),
        shard=message.shard,
    )


def write_Key(value: Key, message: Any) -> None:
    message.first = value.first
    message.second = value.second
    message.third = value.third
    message.fourth = value.fourth


def read_Key(message: Any) -> Key:
    return Key(
        first=message.first,
        second=message.second,
        third=message.third,
        fourth=message.fourth,
    )


def write_WorkerTraffic(value: WorkerTraffic, message: Any) -> None:
    message.sent_bytes = value.sent_bytes
    message.received_bytes = value.received_bytes
    message.num_reads = value.num_reads
    if (one := value.reading_s) != 0.0:
        fields.write_duration(one, message.reading)
    if (one := value.cpu_s) != 0.0:
        fields.write_duration(one, message.cpu)
    if (one := value.follower) is not None:
        write_FollowerReport(one, message.follower)


def read_WorkerTraffic(message: Any) -> WorkerTraffic:
    return WorkerTraffic(
        sent_bytes=message.sent_bytes,
        received_bytes=message.received_bytes,
        num_reads=message.num_reads,
        reading_s=fields.decode_duration(message.reading, field="reading") if message.HasField("reading") else 0.0,
        cpu_s=fields.decode_duration(message.cpu, field="cpu") if message.HasField("cpu") else 0.0,
        follower=read_FollowerReport(message.follower) if message.HasField("follower") else None,
    )


def write_HyperparameterChange(value: HyperparameterChange, message: Any) -> None:
    message.variable = value.variable
    if (one := value.learning_rate) is not None:
        write_Schedule(one, message.learning_rate)
    if one := value.hyperparameters:
        message.hyperparameters.update(one)


def read_HyperparameterChange(message: Any) -> HyperparameterChange:
    return HyperparameterChange(
        variable=message.variable,
        learning_rate=read_Schedule(message.learning_rate) if message.HasField("learning_rate") else None,
        hyperparameters=dict(sorted(message.hyperparameters.items())),
    )


def write_DataRange(value: DataRange, message: Any) -> None:
    message.id = value.id
    message.epoch = value.epoch
    message.start = value.start
    message.stop = value.stop


def read_DataRange(message: Any) -> DataRange:
    return DataRange(
        id=message.id,
        epoch=message.epoch,
        start=message.start,
        stop=message.stop,
    )


def write_ParticipantStatus(value: ParticipantStatus, message: Any) -> None:
    message.kind = _ParticipantKind_NUMBERS[value.kind]
    message.index = value.index
    message.incarnation = value.incarnation
    message.host = value.host
    message.pid = value.pid
    message.state = value.state
    fields.write_duration(value.seen_ago_s, message.seen_ago)
    message.num_accepted = value.num_accepted
    message.num_stale = value.num_stale
    message.num_late = value.num_late
    message.is_waiting = value.is_waiting
    message.failure = value.failure
    message.transport = value.transport
    if (one := value.traffic) is not None:
        write_WorkerTraffic(one, message.traffic)
    message.is_silent = value.is_silent
    message.doing = value.doing
    if (one := value.inner) is not None:
        write_InnerSteps(one, message.inner)
    message.utilisation = value.utilisation


def read_ParticipantStatus(message: Any) -> ParticipantStatus:
    return ParticipantStatus(
        kind=fields.chosen(_ParticipantKind_MEMBERS, message.kind, "kind"),
        index=message.index,
        incarnation=message.incarnation,
        host=message.host,
        pid=message.pid,
        state=message.state,
        seen_ago_s=fields.decode_duration(message.seen_ago, field="seen_ago"),
        num_accepted=message.num_accepted,
        num_stale=message.num_stale,
        num_late=message.num_late,
        is_waiting=message.is_waiting,
        failure=message.failure,
        transport=message.transport,
        traffic=read_WorkerTraffic(message.traffic) if message.HasField("traffic") else None,
        is_silent=message.is_silent,
        doing=message.doing,
        inner=read_InnerSteps(message.inner) if message.HasField("inner") else None,
        utilisation=message.utilisation,
    )


def write_ServerStatus(value: ServerStatus, message: Any) -> None:
    message.index = value.index
    message.address = value.address
    message.is_reachable = value.is_reachable
    if (one := value.step) is not None:
        message.step = one
    message.arena_bytes = value.arena_bytes
    message.num_slices = value.num_slices
    message.standby = value.standby
    message.standby_missing = value.standby_missing
    if (one := value.report) is not None:
        write_ShardReport(one, message.report)


def read_ServerStatus(message: Any) -> ServerStatus:
    return ServerStatus(
        index=message.index,
        address=message.address,
        is_reachable=message.is_reachable,
        step=message.step if message.HasField("step") else None,
        arena_bytes=message.arena_bytes,
        num_slices=message.num_slices,
        standby=message.standby,
        standby_missing=message.standby_missing,
        report=read_ShardReport(message.report) if message.HasField("report") else None,
    )


def write_LedgerEntry(value: LedgerEntry, message: Any) -> None:
    message.step = value.step
    if one := value.contributors:
        for item in one:
            write_PushId(item, message.contributors.add())
    message.num_stale = value.num_stale
    message.num_late = value.num_late
    fields.write_duration(value.duration_s, message.duration)
    fields.write_duration(value.apply_duration_s, message.apply_duration)
    message.last_worker = value.last_worker
    if (one := value.wait_duration_s) != 0.0:
        fields.write_duration(one, message.wait_duration)
    if one := value.arrivals_us:
        message.arrivals_us.extend(one)
    if one := value.weights:
        message.weights.extend(one)


def read_LedgerEntry(message: Any) -> LedgerEntry:
    return LedgerEntry(
        step=message.step,
        contributors=fields.decode_each(message.contributors, read_PushId, field="contributors") if message.contributors else (),
        num_stale=message.num_stale,
        num_late=message.num_late,
        duration_s=fields.decode_duration(message.duration, field="duration"),
        apply_duration_s=fields.decode_duration(message.apply_duration, field="apply_duration"),
        last_worker=message.last_worker,
        wait_duration_s=fields.decode_duration(message.wait_duration, field="wait_duration") if message.HasField("wait_duration") else 0.0,
        arrivals_us=tuple(message.arrivals_us),
        weights=tuple(message.weights),
    )


def write_Condition(value: Condition, message: Any) -> None:
    message.name = value.name
    message.level = _Level_NUMBERS[value.level]
    message.line = value.line
    message.advice = value.advice
    if one := value.commands:
        message.commands.extend(one)
    message.is_standstill = value.is_standstill


def read_Condition(message: Any) -> Condition:
    return Condition(
        name=message.name,
        level=fields.chosen(_Level_MEMBERS, message.level, "level"),
        line=message.line,
        advice=message.advice,
        commands=tuple(message.commands),
        is_standstill=message.is_standstill,
    )


def write_CheckpointStatus(value: CheckpointStatus, message: Any) -> None:
    message.durability = value.durability
    message.tag = value.tag
    message.step = value.step
    if (one := value.age_s) != 0.0:
        fields.write_duration(one, message.age)
    message.saving = value.saving
    message.failure = value.failure


def read_CheckpointStatus(message: Any) -> CheckpointStatus:
    return CheckpointStatus(
        durability=message.durability,
        tag=message.tag,
        step=message.step,
        age_s=fields.decode_duration(message.age, field="age") if message.HasField("age") else 0.0,
        saving=message.saving,
        failure=message.failure,
    )


def write_DataStatus(value: DataStatus, message: Any) -> None:
    message.name = value.name
    message.epoch = value.epoch
    message.num_done = value.num_done
    message.num_leased = value.num_leased
    message.num_ranges = value.num_ranges


def read_DataStatus(message: Any) -> DataStatus:
    return DataStatus(
        name=message.name,
        epoch=message.epoch,
        num_done=message.num_done,
        num_leased=message.num_leased,
        num_ranges=message.num_ranges,
    )


def write_ContributionCounts(value: ContributionCounts, message: Any) -> None:
    message.accepted = value.accepted
    message.stale = value.stale
    message.late = value.late


def read_ContributionCounts(message: Any) -> ContributionCounts:
    return ContributionCounts(
        accepted=message.accepted,
        stale=message.stale,
        late=message.late,
    )


def write_ProtocolVersion(value: ProtocolVersion, message: Any) -> None:
    message.major = value.major
    message.minor = value.minor


def read_ProtocolVersion(message: Any) -> ProtocolVersion:
    return ProtocolVersion(
        major=message.major,
        minor=message.minor,
    )


def write_AppliedPush(value: AppliedPush, message: Any) -> None:
    message.sequence = value.sequence
    message.step = value.step


def read_AppliedPush(message: Any) -> AppliedPush:
    return AppliedPush(
        sequence=message.sequence,
        step=message.step,
    )


def write_ChosenPush(value: ChosenPush, message: Any) -> None:
    write_PushId(value.push_id, message.push_id)
    message.step = value.step
    message.weight = value.weight
    if one := value.ranges:
        message.ranges.extend(one)
    if (one := value.attached) is not _ChosenPush_attached and one != _ChosenPush_attached:
        write_Attachments(one, message.attached)


def read_ChosenPush(message: Any) -> ChosenPush:
    return ChosenPush(
        push_id=read_PushId(message.push_id) if message.HasField("push_id") else fields.missing(message, "push_id"),
        step=message.step,
        weight=message.weight,
        ranges=tuple(message.ranges),
        attached=read_Attachments(message.attached) if message.HasField("attached") else _ChosenPush_attached,
    )


def write_DataMarks(value: DataMarks, message: Any) -> None:
    write_DataSpec(value.data, message.data)
    message.epoch = value.epoch
    message.position = value.position
    if one := value.passes:
        for item in one:
            write_DataPass(item, message.passes.add())


def read_DataMarks(message: Any) -> DataMarks:
    return DataMarks(
        data=read_DataSpec(message.data) if message.HasField("data") else fields.missing(message, "data"),
        epoch=message.epoch,
        position=message.position,
        passes=fields.decode_each(message.passes, read_DataPass, field="passes") if message.passes else (),
    )


def write_FollowerReport(value: FollowerReport, message: Any) -> None:
    if (one := value.step) is not None:
        message.step = one
    message.lag = value.lag
    if (one := value.behind_s) != 0.0:
        fields.write_duration(one, message.behind)
    message.num_patches = value.num_patches
    message.num_wholes = value.num_wholes
    message.whole_bytes = value.whole_bytes


def read_FollowerReport(message: Any) -> FollowerReport:
    return FollowerReport(
        step=message.step if message.HasField("step") else None,
        lag=message.lag,
        behind_s=fields.decode_duration(message.behind, field="behind") if message.HasField("behind") else 0.0,
        num_patches=message.num_patches,
        num_wholes=message.num_wholes,
        whole_bytes=message.whole_bytes,
    )


def write_DataPass(value: DataPass, message: Any) -> None:
    message.epoch = value.epoch
    message.done = value.done


def read_DataPass(message: Any) -> DataPass:
    return DataPass(
        epoch=message.epoch,
        done=message.done,
    )


def write_SetAccumulatorStepResponse(value: Any, message: Any) -> None:
    pass


def read_SetAccumulatorStepResponse(message: Any) -> Any:
    return None


def write_DeleteAccumulatorResponse(value: Any, message: Any) -> None:
    message.deleted = value


def read_DeleteAccumulatorResponse(message: Any) -> Any:
    return message.deleted


def write_PrepareReply(value: Any, message: Any) -> None:
    message.sums.extend(value)


def read_PrepareReply(message: Any) -> Any:
    return tuple(message.sums)


def write_KeepRecordResponse(value: Any, message: Any) -> None:
    pass


def read_KeepRecordResponse(message: Any) -> Any:
    return None


def write_KeepStoryResponse(value: Any, message: Any) -> None:
    message.story = value


def read_KeepStoryResponse(message: Any) -> Any:
    return message.story


def write_ReadMetricsResponse(value: Any, message: Any) -> None:
    for item in value:
        write_MetricCell(item, message.cells.add())


def read_ReadMetricsResponse(message: Any) -> Any:
    return fields.decode_each(message.cells, read_MetricCell, field="cells") if message.cells else ()


def write_CountRowsResponse(value: Any, message: Any) -> None:
    message.counts.extend(value)


def read_CountRowsResponse(message: Any) -> Any:
    return tuple(message.counts)


def write_ShutdownShardResponse(value: Any, message: Any) -> None:
    pass


def read_ShutdownShardResponse(message: Any) -> Any:
    return None


def write_HeartbeatResponse(value: Any, message: Any) -> None:
    message.end = _End_NUMBERS[value]


def read_HeartbeatResponse(message: Any) -> Any:
    return fields.chosen(_End_MEMBERS, message.end, "end")


def write_DeregisterWorkerResponse(value: Any, message: Any) -> None:
    pass


def read_DeregisterWorkerResponse(message: Any) -> Any:
    return None


def write_CompleteInitializationResponse(value: Any, message: Any) -> None:
    pass


def read_CompleteInitializationResponse(message: Any) -> Any:
    return None


def write_ChangeSettingsResponse(value: Any, message: Any) -> None:
    if value is not None:
        write_SettingsReply(value, message.settings)


def read_ChangeSettingsResponse(message: Any) -> Any:
    return read_SettingsReply(message.settings) if message.HasField("settings") else None


def write_FinishTrainingResponse(value: Any, message: Any) -> None:
    message.global_step = value


def read_FinishTrainingResponse(message: Any) -> Any:
    return message.global_step


WRITE: dict[type, Any] = {
    VariableSpec: write_VariableSpec,
    Initializer: write_Initializer,
    Constraint: write_Constraint,
    KeySpec: write_KeySpec,
    OptimizerSpec: write_OptimizerSpec,
    MergeSpec: write_MergeSpec,
    ModelSpec: write_ModelSpec,
    PolicySpec: write_PolicySpec,
    Fence: write_Fence,
    PushId: write_PushId,
    Attachments: write_Attachments,
    StepAttachments: write_StepAttachments,
    PushHeader: write_PushHeader,
    PushReply: write_PushReply,
    ShardSpec: write_ShardSpec,
    ApplyRequest: write_ApplyRequest,
    ReadRequest: write_ReadRequest,
    FetchRequest: write_FetchRequest,
    KeptWeights: write_KeptWeights,
    VariableSlice: write_VariableSlice,
    RowsRequest: write_RowsRequest,
    HiddenState: write_HiddenState,
    MetricCell: write_MetricCell,
    ShardStatus: write_ShardStatus,
    AdoptRequest: write_AdoptRequest,
    PrepareRequest: write_PrepareRequest,
    Adoption: write_Adoption,
    SaveRequest: write_SaveRequest,
    SaveProgress: write_SaveProgress,
    CheckpointFile: write_CheckpointFile,
    RestoreRequest: write_RestoreRequest,
    Participant: write_Participant,
    RegisterRequest: write_RegisterRequest,
    LeaseRangesRequest: write_LeaseRangesRequest,
    Registration: write_Registration,
    PushCommit: write_PushCommit,
    CommitResult: write_CommitResult,
    SettingsReply: write_SettingsReply,
    Checkpoint: write_Checkpoint,
    Begun: write_Begun,
    Contributed: write_Contributed,
    Answered: write_Answered,
    Created: write_Created,
    StateKept: write_StateKept,
    Configured: write_Configured,
    Applied: write_Applied,
    Arrived: write_Arrived,
    Counted: write_Counted,
    Identity: write_Identity,
    AccumulatorSpec: write_AccumulatorSpec,
    GradientHeader: write_GradientHeader,
    GradientReply: write_GradientReply,
    TakeRequest: write_TakeRequest,
    PostHeader: write_PostHeader,
    BoardRequest: write_BoardRequest,
    FoundHeader: write_FoundHeader,
    CreateAccumulatorRequest: write_CreateAccumulatorRequest,
    AccumulatorCreation: write_AccumulatorCreation,
    SetAccumulatorStepRequest: write_SetAccumulatorStepRequest,
    AccumulatorStatusRequest: write_AccumulatorStatusRequest,
    AccumulatorStatus: write_AccumulatorStatus,
    DeleteAccumulatorRequest: write_DeleteAccumulatorRequest,
    ApplyReply: write_ApplyReply,
    KeepRecordRequest: write_KeepRecordRequest,
    KeepStoryRequest: write_KeepStoryRequest,
    ReadMetricsRequest: write_ReadMetricsRequest,
    CountRowsRequest: write_CountRowsRequest,
    ShardStatusRequest: write_ShardStatusRequest,
    ShutdownRequest: write_ShutdownRequest,
    DataSocketRequest: write_DataSocketRequest,
    Invitation: write_Invitation,
    RestoreProgress: write_RestoreProgress,
    FetchReply: write_FetchReply,
    HeartbeatRequest: write_HeartbeatRequest,
    DeregisterRequest: write_DeregisterRequest,
    RegisterModelRequest: write_RegisterModelRequest,
    ModelReply: write_ModelReply,
    CompleteInitializationRequest: write_CompleteInitializationRequest,
    GetModelRequest: write_GetModelRequest,
    AgreedModel: write_AgreedModel,
    CommitPushRequest: write_CommitPushRequest,
    DequeueTokenRequest: write_DequeueTokenRequest,
    TokenReply: write_TokenReply,
    ChangeSettingsRequest: write_ChangeSettingsRequest,
    SaveCheckpointRequest: write_SaveCheckpointRequest,
    SavedCheckpoint: write_SavedCheckpoint,
    LeaseReply: write_LeaseReply,
    FinishTrainingRequest: write_FinishTrainingRequest,
    ClusterStatusRequest: write_ClusterStatusRequest,
    ClusterStatus: write_ClusterStatus,
    HandshakeRequest: write_HandshakeRequest,
    HandshakeReply: write_HandshakeReply,
    TryCheckpointsRequest: write_TryCheckpointsRequest,
    SeenPlace: write_SeenPlace,
    Partition: write_Partition,
    Schedule: write_Schedule,
    PlacementPolicy: write_PlacementPolicy,
    AverageSpec: write_AverageSpec,
    ClipSpec: write_ClipSpec,
    Era: write_Era,
    StepHyperparameter: write_StepHyperparameter,
    GivenNumbers: write_GivenNumbers,
    UserState: write_UserState,
    SparsePart: write_SparsePart,
    Metric: write_Metric,
    FormulaUpdate: write_FormulaUpdate,
    OptimizerPowers: write_OptimizerPowers,
    WorkerPushes: write_WorkerPushes,
    ShardReport: write_ShardReport,
    ReplicaState: write_ReplicaState,
    ShardSettings: write_ShardSettings,
    DataSpec: write_DataSpec,
    InnerSteps: write_InnerSteps,
    ChiefRecord: write_ChiefRecord,
    PlacedSlice: write_PlacedSlice,
    Key: write_Key,
    WorkerTraffic: write_WorkerTraffic,
    HyperparameterChange: write_HyperparameterChange,
    DataRange: write_DataRange,
    ParticipantStatus: write_ParticipantStatus,
    ServerStatus: write_ServerStatus,
    LedgerEntry: write_LedgerEntry,
    Condition: write_Condition,
    CheckpointStatus: write_CheckpointStatus,
    DataStatus: write_DataStatus,
    ContributionCounts: write_ContributionCounts,
    ProtocolVersion: write_ProtocolVersion,
    AppliedPush: write_AppliedPush,
    ChosenPush: write_ChosenPush,
    DataMarks: write_DataMarks,
    FollowerReport: write_FollowerReport,
    DataPass: write_DataPass,
}
READ: dict[type, Any] = {
    VariableSpec: read_VariableSpec,
    Initializer: read_Initializer,
    Constraint: read_Constraint,
    KeySpec: read_KeySpec,
    OptimizerSpec: read_OptimizerSpec,
    MergeSpec: read_MergeSpec,
    ModelSpec: read_ModelSpec,
    PolicySpec: read_PolicySpec,
    Fence: read_Fence,
    PushId: read_PushId,
    Attachments: read_Attachments,
    StepAttachments: read_StepAttachments,
    PushHeader: read_PushHeader,
    PushReply: read_PushReply,
    ShardSpec: read_ShardSpec,
    ApplyRequest: read_ApplyRequest,
    ReadRequest: read_ReadRequest,
    FetchRequest: read_FetchRequest,
    KeptWeights: read_KeptWeights,
    VariableSlice: read_VariableSlice,
    RowsRequest: read_RowsRequest,
    HiddenState: read_HiddenState,
    MetricCell: read_MetricCell,
    ShardStatus: read_ShardStatus,
    AdoptRequest: read_AdoptRequest,
    PrepareRequest: read_PrepareRequest,
    Adoption: read_Adoption,
    SaveRequest: read_SaveRequest,
    SaveProgress: read_SaveProgress,
    CheckpointFile: read_CheckpointFile,
    RestoreRequest: read_RestoreRequest,
    Participant: read_Participant,
    RegisterRequest: read_RegisterRequest,
    LeaseRangesRequest: read_LeaseRangesRequest,
    Registration: read_Registration,
    PushCommit: read_PushCommit,
    CommitResult: read_CommitResult,
    SettingsReply: read_SettingsReply,
    Checkpoint: read_Checkpoint,
    Begun: read_Begun,
    Contributed: read_Contributed,
    Answered: read_Answered,
    Created: read_Created,
    StateKept: read_StateKept,
    Configured: read_Configured,
    Applied: read_Applied,
    Arrived: read_Arrived,
    Counted: read_Counted,
    Identity: read_Identity,
    AccumulatorSpec: read_AccumulatorSpec,
    GradientHeader: read_GradientHeader,
    GradientReply: read_GradientReply,
    TakeRequest: read_TakeRequest,
    PostHeader: read_PostHeader,
    BoardRequest: read_BoardRequest,
    FoundHeader: read_FoundHeader,
    CreateAccumulatorRequest: read_CreateAccumulatorRequest,
    AccumulatorCreation: read_AccumulatorCreation,
    SetAccumulatorStepRequest: read_SetAccumulatorStepRequest,
    AccumulatorStatusRequest: read_AccumulatorStatusRequest,
    AccumulatorStatus: read_AccumulatorStatus,
    DeleteAccumulatorRequest: read_DeleteAccumulatorRequest,
    ApplyReply: read_ApplyReply,
    KeepRecordRequest: read_KeepRecordRequest,
    KeepStoryRequest: read_KeepStoryRequest,
    ReadMetricsRequest: read_ReadMetricsRequest,
    CountRowsRequest: read_CountRowsRequest,
    ShardStatusRequest: read_ShardStatusRequest,
    ShutdownRequest: read_ShutdownRequest,
    DataSocketRequest: read_DataSocketRequest,
    Invitation: read_Invitation,
    RestoreProgress: read_RestoreProgress,
    FetchReply: read_FetchReply,
    HeartbeatRequest: read_HeartbeatRequest,
    DeregisterRequest: read_DeregisterRequest,
    RegisterModelRequest: read_RegisterModelRequest,
    ModelReply: read_ModelReply,
    CompleteInitializationRequest: read_CompleteInitializationRequest,
    GetModelRequest: read_GetModelRequest,
    AgreedModel: read_AgreedModel,
    CommitPushRequest: read_CommitPushRequest,
    DequeueTokenRequest: read_DequeueTokenRequest,
    TokenReply: read_TokenReply,
    ChangeSettingsRequest: read_ChangeSettingsRequest,
    SaveCheckpointRequest: read_SaveCheckpointRequest,
    SavedCheckpoint: read_SavedCheckpoint,
    LeaseReply: read_LeaseReply,
    FinishTrainingRequest: read_FinishTrainingRequest,
    ClusterStatusRequest: read_ClusterStatusRequest,
    ClusterStatus: read_ClusterStatus,
    HandshakeRequest: read_HandshakeRequest,
    HandshakeReply: read_HandshakeReply,
    TryCheckpointsRequest: read_TryCheckpointsRequest,
    SeenPlace: read_SeenPlace,
    Partition: read_Partition,
    Schedule: read_Schedule,
    PlacementPolicy: read_PlacementPolicy,
    AverageSpec: read_AverageSpec,
    ClipSpec: read_ClipSpec,
    Era: read_Era,
    StepHyperparameter: read_StepHyperparameter,
    GivenNumbers: read_GivenNumbers,
    UserState: read_UserState,
    SparsePart: read_SparsePart,
    Metric: read_Metric,
    FormulaUpdate: read_FormulaUpdate,
    OptimizerPowers: read_OptimizerPowers,
    WorkerPushes: read_WorkerPushes,
    ShardReport: read_ShardReport,
    ReplicaState: read_ReplicaState,
    ShardSettings: read_ShardSettings,
    DataSpec: read_DataSpec,
    InnerSteps: read_InnerSteps,
    ChiefRecord: read_ChiefRecord,
    PlacedSlice: read_PlacedSlice,
    Key: read_Key,
    WorkerTraffic: read_WorkerTraffic,
    HyperparameterChange: read_HyperparameterChange,
    DataRange: read_DataRange,
    ParticipantStatus: read_ParticipantStatus,
    ServerStatus: read_ServerStatus,
    LedgerEntry: read_LedgerEntry,
    Condition: read_Condition,
    CheckpointStatus: read_CheckpointStatus,
    DataStatus: read_DataStatus,
    ContributionCounts: read_ContributionCounts,
    ProtocolVersion: read_ProtocolVersion,
    AppliedPush: read_AppliedPush,
    ChosenPush: read_ChosenPush,
    DataMarks: read_DataMarks,
    FollowerReport: read_FollowerReport,
    DataPass: read_DataPass,
}
MESSAGE: dict[type, Any] = {
    VariableSpec: tensor_pb2.VariableSpec,
    Initializer: tensor_pb2.Initializer,
    Constraint: tensor_pb2.Constraint,
    KeySpec: tensor_pb2.KeySpec,
    OptimizerSpec: tensor_pb2.OptimizerSpec,
    MergeSpec: tensor_pb2.Merge,
    ModelSpec: chief_service_pb2.ModelSpec,
    PolicySpec: chief_service_pb2.PolicySpec,
    Fence: tensor_pb2.Fence,
    PushId: tensor_pb2.PushId,
    Attachments: tensor_pb2.Attachments,
    StepAttachments: tensor_pb2.StepAttachments,
    PushHeader: parameter_service_pb2.PushHeader,
    PushReply: parameter_service_pb2.PushReply,
    ShardSpec: parameter_service_pb2.ShardSpec,
    ApplyRequest: parameter_service_pb2.ApplyRequest,
    ReadRequest: parameter_service_pb2.ReadRequest,
    FetchRequest: parameter_service_pb2.FetchWeightsRequest,
    KeptWeights: chief_service_pb2.KeptWeights,
    VariableSlice: tensor_pb2.VariableSlice,
    RowsRequest: parameter_service_pb2.RowsHeader,
    HiddenState: parameter_service_pb2.HiddenState,
    MetricCell: parameter_service_pb2.MetricCell,
    ShardStatus: parameter_service_pb2.GetShardStatusResponse,
    AdoptRequest: parameter_service_pb2.AdoptShardRequest,
    PrepareRequest: parameter_service_pb2.ApplyRequest,
    Adoption: parameter_service_pb2.AdoptShardResponse,
    SaveRequest: parameter_service_pb2.SaveShardRequest,
    SaveProgress: parameter_service_pb2.SaveShardResponse,
    CheckpointFile: parameter_service_pb2.CheckpointFile,
    RestoreRequest: parameter_service_pb2.RestoreShardRequest,
    Participant: chief_service_pb2.Participant,
    RegisterRequest: chief_service_pb2.RegisterWorkerRequest,
    LeaseRangesRequest: chief_service_pb2.LeaseRangesRequest,
    Registration: chief_service_pb2.RegisterWorkerResponse,
    PushCommit: chief_service_pb2.PushCommit,
    CommitResult: chief_service_pb2.CommitResult,
    SettingsReply: chief_service_pb2.SettingsState,
    Checkpoint: chief_service_pb2.CheckpointManifest,
    Begun: history_pb2.HistoryRecord.Begun,
    Contributed: history_pb2.HistoryRecord.Contributed,
    Answered: history_pb2.HistoryRecord.Answered,
    Created: history_pb2.HistoryRecord.Created,
    StateKept: history_pb2.HistoryRecord.StateKept,
    Configured: history_pb2.HistoryRecord.Configured,
    Applied: history_pb2.HistoryRecord.Applied,
    Arrived: history_pb2.HistoryRecord.Arrived,
    Counted: history_pb2.HistoryRecord.Counted,
    Identity: handshake_service_pb2.Identity,
    AccumulatorSpec: accumulator_service_pb2.AccumulatorSpec,
    GradientHeader: accumulator_service_pb2.GradientHeader,
    GradientReply: accumulator_service_pb2.ApplyGradientResponse,
    TakeRequest: accumulator_service_pb2.TakeGradientRequest,
    PostHeader: board_service_pb2.PostHeader,
    BoardRequest: board_service_pb2.ReadBoardRequest,
    FoundHeader: board_service_pb2.FoundHeader,
    CreateAccumulatorRequest: accumulator_service_pb2.CreateAccumulatorRequest,
    AccumulatorCreation: accumulator_service_pb2.CreateAccumulatorResponse,
    SetAccumulatorStepRequest: accumulator_service_pb2.SetAccumulatorStepRequest,
    AccumulatorStatusRequest: accumulator_service_pb2.GetAccumulatorRequest,
    AccumulatorStatus: accumulator_service_pb2.GetAccumulatorResponse,
    DeleteAccumulatorRequest: accumulator_service_pb2.DeleteAccumulatorRequest,
    ApplyReply: parameter_service_pb2.ApplyReply,
    KeepRecordRequest: parameter_service_pb2.KeepRecordRequest,
    KeepStoryRequest: parameter_service_pb2.KeepStoryRequest,
    ReadMetricsRequest: parameter_service_pb2.ReadMetricsRequest,
    CountRowsRequest: parameter_service_pb2.CountRowsRequest,
    ShardStatusRequest: parameter_service_pb2.GetShardStatusRequest,
    ShutdownRequest: parameter_service_pb2.ShutdownShardRequest,
    DataSocketRequest: parameter_service_pb2.OpenDataSocketRequest,
    Invitation: parameter_service_pb2.OpenDataSocketResponse,
    RestoreProgress: parameter_service_pb2.RestoreShardResponse,
    FetchReply: parameter_service_pb2.FetchWeightsResponse,
    HeartbeatRequest: chief_service_pb2.HeartbeatRequest,
    DeregisterRequest: chief_service_pb2.DeregisterWorkerRequest,
    RegisterModelRequest: chief_service_pb2.RegisterModelRequest,
    ModelReply: chief_service_pb2.RegisterModelResponse,
    CompleteInitializationRequest: chief_service_pb2.CompleteInitializationRequest,
    GetModelRequest: chief_service_pb2.GetModelRequest,
    AgreedModel: chief_service_pb2.GetModelResponse,
    CommitPushRequest: chief_service_pb2.CommitPushRequest,
    DequeueTokenRequest: chief_service_pb2.DequeueTokenRequest,
    TokenReply: chief_service_pb2.TokenReply,
    ChangeSettingsRequest: chief_service_pb2.ChangeSettingsRequest,
    SaveCheckpointRequest: chief_service_pb2.SaveCheckpointRequest,
    SavedCheckpoint: chief_service_pb2.SaveCheckpointResponse,
    LeaseReply: chief_service_pb2.LeaseRangesResponse,
    FinishTrainingRequest: chief_service_pb2.FinishTrainingRequest,
    ClusterStatusRequest: chief_service_pb2.GetClusterStatusRequest,
    ClusterStatus: chief_service_pb2.GetClusterStatusResponse,
    HandshakeRequest: handshake_service_pb2.HandshakeRequest,
    HandshakeReply: handshake_service_pb2.HandshakeResponse,
    TryCheckpointsRequest: handshake_service_pb2.TryCheckpointsRequest,
    SeenPlace: handshake_service_pb2.TryCheckpointsResponse,
    Partition: tensor_pb2.Partition,
    Schedule: tensor_pb2.LearningRateSchedule,
    PlacementPolicy: chief_service_pb2.PlacementPolicy,
    AverageSpec: tensor_pb2.AverageSpec,
    ClipSpec: tensor_pb2.ClipSpec,
    Era: tensor_pb2.Era,
    StepHyperparameter: tensor_pb2.StepHyperparameter,
    GivenNumbers: tensor_pb2.GivenNumbers,
    UserState: tensor_pb2.UserState,
    SparsePart: parameter_service_pb2.SparsePart,
    Metric: parameter_service_pb2.Metric,
    FormulaUpdate: parameter_service_pb2.FormulaUpdate,
    OptimizerPowers: parameter_service_pb2.OptimizerPowers,
    WorkerPushes: parameter_service_pb2.WorkerPushes,
    ShardReport: parameter_service_pb2.ShardReport,
    ReplicaState: parameter_service_pb2.ReplicaState,
    ShardSettings: parameter_service_pb2.ShardSettings,
    DataSpec: chief_service_pb2.DataSpec,
    InnerSteps: chief_service_pb2.InnerSteps,
    ChiefRecord: chief_service_pb2.ChiefRecord,
    PlacedSlice: chief_service_pb2.PlacedSlice,
    Key: board_service_pb2.PostKey,
    WorkerTraffic: chief_service_pb2.WorkerTraffic,
    HyperparameterChange: chief_service_pb2.HyperparameterChange,
    DataRange: chief_service_pb2.DataRange,
    ParticipantStatus: chief_service_pb2.ParticipantStatus,
    ServerStatus: chief_service_pb2.ServerStatus,
    LedgerEntry: chief_service_pb2.LedgerEntry,
    Condition: chief_service_pb2.Condition,
    CheckpointStatus: chief_service_pb2.CheckpointStatus,
    DataStatus: chief_service_pb2.DataStatus,
    ContributionCounts: chief_service_pb2.ContributionCounts,
    ProtocolVersion: handshake_service_pb2.ProtocolVersion,
    AppliedPush: parameter_service_pb2.AppliedPush,
    ChosenPush: chief_service_pb2.ChosenPush,
    DataMarks: chief_service_pb2.DataMarks,
    FollowerReport: chief_service_pb2.FollowerReport,
    DataPass: chief_service_pb2.DataPass,
}
# By the request: the message of its answer, and its writer and reader.
ANSWERS: dict[type, Any] = {
    CreateAccumulatorRequest: (accumulator_service_pb2.CreateAccumulatorResponse, write_AccumulatorCreation, read_AccumulatorCreation),
    SetAccumulatorStepRequest: (accumulator_service_pb2.SetAccumulatorStepResponse, write_SetAccumulatorStepResponse, read_SetAccumulatorStepResponse),
    AccumulatorStatusRequest: (accumulator_service_pb2.GetAccumulatorResponse, write_AccumulatorStatus, read_AccumulatorStatus),
    DeleteAccumulatorRequest: (accumulator_service_pb2.DeleteAccumulatorResponse, write_DeleteAccumulatorResponse, read_DeleteAccumulatorResponse),
    ApplyRequest: (parameter_service_pb2.ApplyReply, write_ApplyReply, read_ApplyReply),
    PrepareRequest: (parameter_service_pb2.PrepareReply, write_PrepareReply, read_PrepareReply),
    AdoptRequest: (parameter_service_pb2.AdoptShardResponse, write_Adoption, read_Adoption),
    KeepRecordRequest: (parameter_service_pb2.KeepRecordResponse, write_KeepRecordResponse, read_KeepRecordResponse),
    KeepStoryRequest: (parameter_service_pb2.KeepStoryResponse, write_KeepStoryResponse, read_KeepStoryResponse),
    ReadMetricsRequest: (parameter_service_pb2.ReadMetricsResponse, write_ReadMetricsResponse, read_ReadMetricsResponse),
    CountRowsRequest: (parameter_service_pb2.CountRowsResponse, write_CountRowsResponse, read_CountRowsResponse),
    ShardStatusRequest: (parameter_service_pb2.GetShardStatusResponse, write_ShardStatus, read_ShardStatus),
    ShutdownRequest: (parameter_service_pb2.ShutdownShardResponse, write_ShutdownShardResponse, read_ShutdownShardResponse),
    DataSocketRequest: (parameter_service_pb2.OpenDataSocketResponse, write_Invitation, read_Invitation),
    SaveRequest: (parameter_service_pb2.SaveShardResponse, write_SaveProgress, read_SaveProgress),
    RestoreRequest: (parameter_service_pb2.RestoreShardResponse, write_RestoreProgress, read_RestoreProgress),
    FetchRequest: (parameter_service_pb2.FetchWeightsResponse, write_FetchReply, read_FetchReply),
    RegisterRequest: (chief_service_pb2.RegisterWorkerResponse, write_Registration, read_Registration),
    HeartbeatRequest: (chief_service_pb2.HeartbeatResponse, write_HeartbeatResponse, read_HeartbeatResponse),
    DeregisterRequest: (chief_service_pb2.DeregisterWorkerResponse, write_DeregisterWorkerResponse, read_DeregisterWorkerResponse),
    RegisterModelRequest: (chief_service_pb2.RegisterModelResponse, write_ModelReply, read_ModelReply),
    CompleteInitializationRequest: (chief_service_pb2.CompleteInitializationResponse, write_CompleteInitializationResponse, read_CompleteInitializationResponse),
    GetModelRequest: (chief_service_pb2.GetModelResponse, write_AgreedModel, read_AgreedModel),
    CommitPushRequest: (chief_service_pb2.CommitResult, write_CommitResult, read_CommitResult),
    DequeueTokenRequest: (chief_service_pb2.TokenReply, write_TokenReply, read_TokenReply),
    ChangeSettingsRequest: (chief_service_pb2.ChangeSettingsResponse, write_ChangeSettingsResponse, read_ChangeSettingsResponse),
    SaveCheckpointRequest: (chief_service_pb2.SaveCheckpointResponse, write_SavedCheckpoint, read_SavedCheckpoint),
    LeaseRangesRequest: (chief_service_pb2.LeaseRangesResponse, write_LeaseReply, read_LeaseReply),
    FinishTrainingRequest: (chief_service_pb2.FinishTrainingResponse, write_FinishTrainingResponse, read_FinishTrainingResponse),
    ClusterStatusRequest: (chief_service_pb2.GetClusterStatusResponse, write_ClusterStatus, read_ClusterStatus),
    HandshakeRequest: (handshake_service_pb2.HandshakeResponse, write_HandshakeReply, read_HandshakeReply),
    TryCheckpointsRequest: (handshake_service_pb2.TryCheckpointsResponse, write_SeenPlace, read_SeenPlace),
}
