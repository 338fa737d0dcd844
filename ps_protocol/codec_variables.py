"""Protobuf to checked values and back, for what a model is made of: variables, slices, optimizers, averages, limits. Knows no RPC."""

from ps_protocol import codec
from ps_protocol.averages import AverageSpec
from ps_protocol.clipping import NO_CLIP, ClipSpec
from ps_protocol.layout import VariableSlice
from ps_protocol.optimizer_spec import OptimizerSpec, Schedule, check_optimizer_name
from ps_protocol.tensors import VariableSpec
from ps_protocol.v1 import chief_service_pb2, parameter_service_pb2
from ps_protocol.v1 import tensor_pb2 as pb
from ps_protocol.variable_options import Constraint, ConstraintKind, Initializer, InitializerKind, Partition


def encode_variable(variable: VariableSpec) -> pb.VariableSpec:
    """Encodes the specification of one variable."""
    return pb.VariableSpec(
        name=variable.name,
        data_type=codec.encode_data_type(variable.data_type),
        shape=variable.shape,
        optimizer=None if variable.optimizer is None else encode_optimizer(variable.optimizer),
        is_sparse=variable.is_sparse,
        sparse_mean=codec.encode_sparse_mean(variable.sparse_mean) if variable.is_sparse else None,
        initializer=None if variable.initializer is None else _encode_initializer(variable.initializer),
        constraint=None if variable.constraint is None else _encode_constraint(variable.constraint),
        partition=None if variable.partition is None else _encode_partition(variable.partition),
    )


def decode_variable(message: pb.VariableSpec) -> VariableSpec:
    """Decodes and checks the specification of one variable."""
    what = f"variable {message.name!r}"
    return VariableSpec(
        name=message.name,
        data_type=codec.decode_data_type(message.data_type, what=what),
        shape=tuple(message.shape),
        optimizer=decode_optimizer(message.optimizer) if message.HasField("optimizer") else None,
        is_sparse=message.is_sparse,
        sparse_mean=codec.decode_sparse_mean(message.sparse_mean),
        initializer=_decode_initializer(message.initializer, what=what) if message.HasField("initializer") else None,
        constraint=_decode_constraint(message.constraint, what=what) if message.HasField("constraint") else None,
        partition=_decode_partition(message.partition) if message.HasField("partition") else None,
    )


def encode_slice(piece: VariableSlice) -> pb.VariableSlice:
    """Encodes a part of a variable."""
    return pb.VariableSlice(variable=encode_variable(piece.variable), start=piece.start, stop=piece.stop, axis=piece.axis)


def decode_slice(message: pb.VariableSlice) -> VariableSlice:
    """Decodes and checks a part of a variable."""
    codec.require(message, "variable")
    return VariableSlice(variable=decode_variable(message.variable), start=message.start, stop=message.stop, axis=message.axis)


def encode_schedule(schedule: Schedule) -> pb.LearningRateSchedule:
    """Encodes a learning rate."""
    return pb.LearningRateSchedule(name=schedule.name, arguments=schedule.arguments, boundaries=schedule.boundaries, values=schedule.values)


def decode_schedule(message: pb.LearningRateSchedule) -> Schedule:
    """Decodes and checks a learning rate."""
    return Schedule(
        name=message.name, arguments=dict(message.arguments), boundaries=tuple(message.boundaries), values=tuple(message.values)
    )


def encode_optimizer(optimizer: OptimizerSpec) -> pb.OptimizerSpec:
    """Encodes an optimizer with its learning rate."""
    return pb.OptimizerSpec(
        name=optimizer.name, hyperparameters=optimizer.hyperparameters, learning_rate=encode_schedule(optimizer.learning_rate)
    )


def decode_optimizer(message: pb.OptimizerSpec) -> OptimizerSpec:
    """Decodes and checks an optimizer with its learning rate."""
    # First: an unknown optimizer explains whatever else may look odd.
    check_optimizer_name(message.name)
    codec.require(message, "learning_rate")
    return OptimizerSpec(
        name=message.name, hyperparameters=dict(message.hyperparameters), learning_rate=decode_schedule(message.learning_rate)
    )


def encode_optimizer_change(original: OptimizerSpec, current: OptimizerSpec) -> parameter_service_pb2.OptimizerChange:
    """Encodes an optimizer as the model has it, and as it is now."""
    return parameter_service_pb2.OptimizerChange(original=encode_optimizer(original), current=encode_optimizer(current))


def decode_optimizer_change(message: parameter_service_pb2.OptimizerChange) -> tuple[OptimizerSpec, OptimizerSpec]:
    """Decodes and checks an optimizer as the model has it, and as it is now."""
    codec.require(message, "original")
    codec.require(message, "current")
    return decode_optimizer(message.original), decode_optimizer(message.current)


def encode_averages(averages: AverageSpec | None) -> pb.AverageSpec | None:
    """Encodes the moving averages to keep; None stays out of the message."""
    if averages is None:
        return None
    return pb.AverageSpec(
        decay=averages.decay,
        use_num_updates=averages.use_num_updates,
        zero_debias=averages.zero_debias,
        variables=averages.variables,
    )


def decode_averages(message: chief_service_pb2.ModelSpec | parameter_service_pb2.ShardSpec) -> AverageSpec | None:
    """Decodes and checks the moving averages to keep; None if the message has none."""
    if not message.HasField("averages"):
        return None
    averages = message.averages
    return AverageSpec(
        decay=averages.decay,
        use_num_updates=averages.use_num_updates,
        zero_debias=averages.zero_debias,
        variables=tuple(averages.variables),
    )


def encode_clip(clip: ClipSpec) -> pb.ClipSpec | None:
    """Encodes the limits on a step's mean gradient; no limits stay out of the message."""
    return None if clip == NO_CLIP else pb.ClipSpec(value=clip.value, norm=clip.norm, global_norm=clip.global_norm)


def decode_clip(message: chief_service_pb2.ModelSpec | parameter_service_pb2.ShardSpec) -> ClipSpec:
    """Decodes and checks the limits on a step's mean gradient."""
    return ClipSpec(value=message.clip.value, norm=message.clip.norm, global_norm=message.clip.global_norm)


def _encode_constraint(constraint: Constraint) -> pb.Constraint:
    return pb.Constraint(kind=f"KIND_{constraint.kind.name}", low=constraint.low, high=constraint.high)


def _decode_constraint(message: pb.Constraint, *, what: str) -> Constraint:
    kind = codec.decode_choice(ConstraintKind, message.kind, field=f"{what}: constraint.kind")
    return Constraint(kind=kind, low=message.low, high=message.high)


def _encode_initializer(initializer: Initializer) -> pb.Initializer:
    return pb.Initializer(kind=f"KIND_{initializer.kind.name}", low=initializer.low, high=initializer.high, seed=initializer.seed)


def _decode_initializer(message: pb.Initializer, *, what: str) -> Initializer:
    kind = codec.decode_choice(InitializerKind, message.kind, field=f"{what}: initializer.kind")
    return Initializer(kind=kind, low=message.low, high=message.high, seed=message.seed)


def _encode_partition(partition: Partition) -> pb.Partition:
    return pb.Partition(axis=partition.axis, num_slices=partition.num_slices)


def _decode_partition(message: pb.Partition) -> Partition:
    return Partition(axis=message.axis, num_slices=message.num_slices)
