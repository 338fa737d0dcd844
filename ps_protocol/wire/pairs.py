"""Every pair of a value and its message, with what their fields do not say. `generator` makes `coders` of it; no process imports it.

A request, its answer, and what their fields hold need no entry, unless they have something that their fields do not say: their RPC names
their messages.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ps_protocol.model.keys import KeySpec
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.merging import MergeSpec
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec
from ps_protocol.model.variables import Constraint, Initializer, VariableSpec
from ps_protocol.roles import accumulators, board, chief, fence, history, identity, shard, weights
from ps_protocol.roles.checkpoint import Checkpoint
from ps_protocol.roles.contribution import Attachments, PushId, StepAttachments
from ps_protocol.roles.request import RPCS, Rpc
from ps_protocol.v1 import (
    accumulator_service_pb2,
    board_service_pb2,
    chief_service_pb2,
    handshake_service_pb2,
    history_pb2,
    parameter_service_pb2,
    tensor_pb2,
)
from ps_protocol.wire import special
from ps_protocol.wire.fields import default_of


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A value and its message. All functions are those of `special`.

    `label`: what a field with such a message is called in errors about choices, as in "policy.name". `filled`: fields of the message that
    the value does not have; who sends it fills them in. `check`: raises what is wrong with a message before it is read. `place`: begins the
    text of what is malformed in it. `reads`: how a field of the value is read that is not what it seems; `writes`: and how one is written
    that is no field of the message. `after`: what becomes of the value read. `is_kept`: values that come again are found by their bytes.
    """

    value: type
    message: type[Message]
    label: str = ""
    filled: frozenset[str] = frozenset()
    check: Callable[[Any], None] | None = None
    place: Callable[[Any], str] | None = None
    reads: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    writes: Mapping[str, Callable[..., None]] = dataclasses.field(default_factory=dict)
    after: Callable[[Any], Any] | None = None
    is_kept: bool = False


def defaults_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass, or of a named tuple, with their defaults; dataclasses.MISSING for none."""
    if issubclass(value, tuple):
        return dict.fromkeys(typing.get_type_hints(value), dataclasses.MISSING)
    return {field.name: default_of(value, field.name) for field in dataclasses.fields(value)}


def message_fields(pair: Pair) -> dict[str, str]:
    """Returns which field of the message each of the value's is, by names, but for those in `writes`. Raises TypeError if there is none."""
    known = pair.message.DESCRIPTOR.fields_by_name
    names = {}
    for attribute in (one for one in defaults_of(pair.value) if one not in pair.writes):
        name = attribute if attribute in known else attribute.removesuffix("_s")
        if name not in known:
            raise TypeError(f"{pair.message.DESCRIPTOR.name} has no field for {pair.value.__name__}.{attribute}")
        names[attribute] = name
    return names


_SERVICES: Mapping[str, Any] = {
    name: service
    for module in (accumulator_service_pb2, chief_service_pb2, handshake_service_pb2, parameter_service_pb2)
    for name, service in module.DESCRIPTOR.services_by_name.items()
}

_NAMED: tuple[Pair, ...] = (
    # What a model is made of.
    Pair(value=VariableSpec, message=tensor_pb2.VariableSpec, check=special.check_variable, place=special.variable_place),
    Pair(value=Initializer, message=tensor_pb2.Initializer, label="initializer"),
    Pair(value=Constraint, message=tensor_pb2.Constraint, label="constraint"),
    Pair(value=KeySpec, message=tensor_pb2.KeySpec, label="keys"),
    Pair(value=OptimizerSpec, message=tensor_pb2.OptimizerSpec, check=special.check_optimizer),
    Pair(value=MergeSpec, message=tensor_pb2.Merge, label="merge"),
    Pair(value=ModelSpec, message=chief_service_pb2.ModelSpec, check=special.check_model),
    Pair(value=PolicySpec, message=chief_service_pb2.PolicySpec, label="policy"),
    # Parameter servers.
    Pair(value=fence.Fence, message=tensor_pb2.Fence, reads={"era": special.read_era}, is_kept=True),
    Pair(value=PushId, message=tensor_pb2.PushId, check=special.check_push_id),
    Pair(value=Attachments, message=tensor_pb2.Attachments, check=special.check_attachments),
    Pair(value=StepAttachments, message=tensor_pb2.StepAttachments, check=special.check_step_attachments),
    Pair(
        value=shard.PushHeader,
        message=parameter_service_pb2.PushHeader,
        filled=frozenset({"content_bytes", "payload", "resumes"}),
        check=special.check_push_header,
        reads={"metrics": special.read_metrics, "encoding": special.read_encoding, "formulas": special.read_formulas},
    ),
    Pair(value=shard.PushReply, message=parameter_service_pb2.PushReply),
    Pair(
        value=shard.ShardSpec,
        message=parameter_service_pb2.ShardSpec,
        writes={"layout": special.write_layout},
        reads={"layout": special.read_layout},
    ),
    Pair(
        value=shard.ApplyRequest,
        message=parameter_service_pb2.ApplyRequest,
        reads={"discards": special.read_discards},
        after=special.in_order,
    ),
    Pair(
        value=shard.ReadRequest,
        message=parameter_service_pb2.ReadRequest,
        filled=frozenset({"max_wait", "payload", "offset"}),
        reads={"encoding": special.read_encoding_of_read},
    ),
    Pair(
        value=weights.FetchRequest,
        message=parameter_service_pb2.FetchWeightsRequest,
        reads={"encoding": special.read_encoding_for_variables},
    ),
    Pair(
        value=weights.KeptWeights,
        message=chief_service_pb2.KeptWeights,
        reads={"encoding": special.read_encoding_for_variables},
    ),
    Pair(value=VariableSlice, message=tensor_pb2.VariableSlice),
    Pair(value=shard.RowsRequest, message=parameter_service_pb2.RowsHeader, filled=frozenset({"num_rows"})),
    Pair(value=shard.HiddenState, message=parameter_service_pb2.HiddenState),
    Pair(value=shard.MetricCell, message=parameter_service_pb2.MetricCell),
    Pair(value=shard.ShardStatus, message=parameter_service_pb2.GetShardStatusResponse, check=special.check_status),
    Pair(value=shard.AdoptRequest, message=parameter_service_pb2.AdoptShardRequest, check=special.check_adoption),
    Pair(
        value=shard.PrepareRequest,
        message=parameter_service_pb2.ApplyRequest,
        writes={"of": special.write_prepare},
        reads={"of": special.read_prepare},
    ),
    Pair(value=shard.Adoption, message=parameter_service_pb2.AdoptShardResponse, reads={"given_up": special.read_given_up}),
    Pair(value=shard.SaveRequest, message=parameter_service_pb2.SaveShardRequest, check=special.check_save_request),
    Pair(value=shard.SaveProgress, message=parameter_service_pb2.SaveShardResponse, check=special.check_save_progress),
    Pair(value=shard.CheckpointFile, message=parameter_service_pb2.CheckpointFile, check=special.check_file),
    Pair(value=shard.RestoreRequest, message=parameter_service_pb2.RestoreShardRequest, check=special.check_restore_request),
    # The chief.
    Pair(value=chief.Participant, message=chief_service_pb2.Participant, label="participant", is_kept=True),
    Pair(value=chief.RegisterRequest, message=chief_service_pb2.RegisterWorkerRequest, check=special.check_register_request),
    Pair(value=chief.LeaseRangesRequest, message=chief_service_pb2.LeaseRangesRequest, check=special.check_lease),
    Pair(value=chief.Registration, message=chief_service_pb2.RegisterWorkerResponse, check=special.check_registration),
    Pair(value=chief.PushCommit, message=chief_service_pb2.PushCommit, check=special.check_commit),
    Pair(value=chief.CommitResult, message=chief_service_pb2.CommitResult, reads={"factor": special.read_factor}),
    Pair(value=chief.SettingsReply, message=chief_service_pb2.SettingsState),
    Pair(value=Checkpoint, message=chief_service_pb2.CheckpointManifest, filled=frozenset({"format", "format_version", "saved_at"})),
    # Histories.
    *(Pair(value=event, message=getattr(history_pb2.HistoryRecord, event.__name__)) for event in typing.get_args(history.Event)),
    # The handshake.
    Pair(value=identity.Identity, message=handshake_service_pb2.Identity, label="identity"),
    # Named accumulators.
    Pair(value=accumulators.AccumulatorSpec, message=accumulator_service_pb2.AccumulatorSpec, check=special.check_accumulator),
    Pair(value=accumulators.GradientHeader, message=accumulator_service_pb2.GradientHeader),
    Pair(value=accumulators.GradientReply, message=accumulator_service_pb2.ApplyGradientResponse),
    Pair(value=accumulators.TakeRequest, message=accumulator_service_pb2.TakeGradientRequest),
    # Boards.
    Pair(value=board.PostHeader, message=board_service_pb2.PostHeader),
    Pair(value=board.BoardRequest, message=board_service_pb2.ReadBoardRequest),
    Pair(value=board.FoundHeader, message=board_service_pb2.FoundHeader),
)


def is_value(answer: Any) -> bool:
    """Whether an answer has fields of its own, and not the one of its message."""
    return dataclasses.is_dataclass(answer)


def messages_of(rpc: Rpc) -> tuple[type[Message], type[Message]]:
    """Returns the messages that carry a request and its answer."""
    service = _SERVICES[rpc.service]
    types = service.methods_by_name[rpc.name].input_type, service.methods_by_name[rpc.name].output_type
    if rpc.field:
        types = types[0].fields_by_name[rpc.field].message_type, types[1].fields_by_name[rpc.field].message_type
    return GetMessageClass(types[0]), GetMessageClass(types[1])


def _all_pairs() -> Iterator[Pair]:
    """Yields those with a name above, one for each request and each answer, and one for each value that a field of another holds."""
    known = {pair.value: pair for pair in _NAMED}
    for request, rpc in RPCS.items():
        declared: Any = request
        for value, message in zip((request, declared.answer), messages_of(rpc), strict=True):
            if is_value(value):
                known.setdefault(value, Pair(value=value, message=message))
    to_see = [*known.values()]
    for pair in to_see:
        for value, message in _held_by(pair):
            if value not in known:
                known[value] = Pair(value=value, message=message)
                to_see.append(known[value])
    yield from known.values()


def _held_by(pair: Pair) -> Iterator[tuple[type, type[Message]]]:
    """Yields the values in the fields of a value, each with the message of the field."""
    hints = typing.get_type_hints(pair.value)
    for attribute, name in message_fields(pair).items():
        held: Any = pair.message.DESCRIPTOR.fields_by_name[name].message_type
        if held is not None and held.GetOptions().map_entry:
            held = held.fields_by_name["value"].message_type
        if held is not None:
            yield from ((one, GetMessageClass(held)) for one in _classes_in(hints[attribute]))


def _classes_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")):
        yield hint
    for part in typing.get_args(hint):
        yield from _classes_in(part)


PAIRS: tuple[Pair, ...] = tuple(_all_pairs())
