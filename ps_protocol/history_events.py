"""The records of a history, each with its words: what workers, parameter servers and the chief write, and how it is read again.

Knows values and JSON; no file.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from ps_protocol import codec_shard
from ps_protocol.errors import DataLoss, PsError
from ps_protocol.history import HistoryWriter, Record
from ps_protocol.segments import Segments
from ps_protocol.shard import ApplyRequest, PushHeader, PushId, ShardSettings, ShardSpec
from ps_protocol.tensors import Array
from ps_protocol.v1 import parameter_service_pb2 as pb

AnyMessage = TypeVar("AnyMessage", bound=Message)
Value = TypeVar("Value")
# Written by workers.
CONTRIBUTION, OUTCOME = "contribution", "outcome"
# Written by parameter servers.
CREATED, CONFIGURED, APPLIED, ARRIVED, RESTORED, DROPPED = "created", "configured", "applied", "arrived", "restored", "dropped"
# Written by the chief.
STEP, ROLLED_BACK, FINISHED = "step", "rolled-back", "finished"


def note_contribution(history: HistoryWriter, header: PushHeader, gradients: Segments, *, shard: int) -> None:
    """Notes what one shard is about to be sent; before it is sent, so that whatever was applied is known."""
    history.write(CONTRIBUTION, {"shard": shard, "header": _json(codec_shard.encode_push_header(header))}, gradients.pieces)


def note_outcome(history: HistoryWriter, push_id: PushId, *, epoch: int, outcome: str, step: int, applied_step: int | None = None) -> None:
    """Notes what the worker was told of its contribution: the name of a PushOutcome, or "UNKNOWN" if nobody could tell."""
    words = {"push": list(_key(push_id)), "epoch": epoch, "outcome": outcome, "step": step, "applied_step": applied_step}
    history.write(OUTCOME, words)


def note_created(history: HistoryWriter, spec: ShardSpec, content: Sequence[Array], *, process: int) -> None:
    """Notes a shard's model with its first values: the arena, then those tables that have no initializer, as they were sent."""
    history.write(CREATED, {"shard": spec.shard, "process": process, "spec": _json(codec_shard.encode_shard_spec(spec))}, content)


def note_configured(history: HistoryWriter, settings: ShardSettings, *, shard: int) -> None:
    """Notes how a shard works from now on."""
    history.write(CONFIGURED, {"shard": shard, "settings": _json(codec_shard.encode_settings(settings))})


def note_applied(history: HistoryWriter, request: ApplyRequest, *, shard: int, sha256: str) -> None:
    """Notes a step that a shard has applied, with the digest of its variables afterwards; before anybody is told of it."""
    history.write(APPLIED, {"shard": shard, "request": _json(codec_shard.encode_apply_request(request)), "sha256": sha256})


def note_arrived(history: HistoryWriter, push_id: PushId, *, shard: int, epoch: int, step: int) -> None:
    """Notes a contribution that a shard has applied on arrival, which has made `step` of it."""
    history.write(ARRIVED, {"shard": shard, "push": list(_key(push_id)), "epoch": epoch, "step": step})


def note_restored(
    history: HistoryWriter, spec: ShardSpec, settings: ShardSettings, *, process: int, tag: str, from_epoch: int, sha256: str
) -> None:
    """Notes that a shard was brought back to a checkpoint, which was saved at `spec.initial_step` of `from_epoch`."""
    words = {
        "shard": spec.shard,
        "process": process,
        "spec": _json(codec_shard.encode_shard_spec(spec)),
        "settings": _json(codec_shard.encode_settings(settings)),
        "tag": tag,
        "from_epoch": from_epoch,
        "sha256": sha256,
    }
    history.write(RESTORED, words)


def note_step(history: HistoryWriter, *, epoch: int, step: int, contributors: Sequence[PushId], chief: int) -> None:
    """Notes a step that all shards have applied, as the chief counts it, before anybody is told of it; `chief`: its incarnation."""
    history.write(STEP, {"epoch": epoch, "step": step, "contributors": [list(_key(one)) for one in contributors], "chief": chief})


def note_rolled_back(history: HistoryWriter, *, epoch: int, step: int, tag: str, chief: int) -> None:
    """Notes that the cluster goes on at `step` of a checkpoint, under a new epoch."""
    history.write(ROLLED_BACK, {"epoch": epoch, "step": step, "tag": tag, "chief": chief})


def digest(arena: Array, tables: Sequence[Array] = ()) -> str:
    """Returns the digest of a shard's variables: of its arena, then of its tables in their order, as bytes."""
    sha = hashlib.sha256(arena.data)
    for table in tables:
        sha.update(table.data)
    return sha.hexdigest()


def header_of(record: Record) -> PushHeader:
    """Returns the header of a CONTRIBUTION. Raises DataLoss."""
    return _decoded(record, "header", pb.PushHeader, codec_shard.decode_push_header)


def spec_of(record: Record) -> ShardSpec:
    """Returns the model of CREATED or RESTORED. Raises DataLoss."""
    return _decoded(record, "spec", pb.ShardSpec, codec_shard.decode_shard_spec)


def settings_of(record: Record) -> ShardSettings:
    """Returns the settings of CONFIGURED or RESTORED. Raises DataLoss."""
    return _decoded(record, "settings", pb.ConfigureShardRequest, codec_shard.decode_settings)


def request_of(record: Record) -> ApplyRequest:
    """Returns the step of APPLIED. Raises DataLoss."""
    return _decoded(record, "request", pb.ApplyStepRequest, codec_shard.decode_apply_request)


def push_of(record: Record) -> PushId:
    """Returns the push id of OUTCOME or ARRIVED. Raises DataLoss."""
    return _push_id(record, record.words.get("push"))


def contributors_of(record: Record) -> tuple[PushId, ...]:
    """Returns the contributors of STEP. Raises DataLoss."""
    listed = record.words.get("contributors")
    if not isinstance(listed, list):
        raise _broken(record, "contributors")
    return tuple(_push_id(record, one) for one in listed)


def number_of(record: Record, field: str) -> int:
    """Returns a whole number. Raises DataLoss."""
    value = record.words.get(field)
    if type(value) is not int:
        raise _broken(record, field)
    return value


def text_of(record: Record, field: str) -> str:
    """Returns a text. Raises DataLoss."""
    value = record.words.get(field)
    if not isinstance(value, str):
        raise _broken(record, field)
    return value


def _key(push_id: PushId) -> tuple[int, int, int]:
    return push_id.worker, push_id.incarnation, push_id.sequence


def _push_id(record: Record, value: object) -> PushId:
    if not (isinstance(value, list) and len(value) == 3 and all(type(one) is int for one in value)):
        raise _broken(record, "push id")
    worker, incarnation, sequence = value
    return PushId(worker=worker, incarnation=incarnation, sequence=sequence)


def _json(message: Message) -> dict[str, object]:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _decoded(record: Record, field: str, message_type: type[AnyMessage], decode: Callable[[AnyMessage], Value]) -> Value:
    value = record.words.get(field)
    try:
        if not isinstance(value, dict):
            raise _broken(record, field)
        return decode(json_format.ParseDict(value, message_type()))
    except (json_format.ParseError, PsError) as error:
        raise DataLoss(f"record {record.number} ({record.kind}): {field}: {str(error)[:200]}") from None


def _broken(record: Record, field: str) -> DataLoss:
    return DataLoss(f"record {record.number} ({record.kind}): {field}: got {str(record.words.get(field))[:80]!r}")
