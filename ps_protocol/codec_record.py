"""Protobuf to checked values and back, for what a chief leaves for its successor. Knows messages; no RPC, no file."""

from dataclasses import replace

from ps_protocol import codec, codec_variables
from ps_protocol.checkpoint import ChiefRecord, ChosenPush
from ps_protocol.codec_data_ranges import decode_data, encode_data
from ps_protocol.codec_model import decode_model, encode_model
from ps_protocol.codec_settings import decode_policy, encode_policy
from ps_protocol.data_ranges import DataMarks
from ps_protocol.v1 import chief_service_pb2 as pb


def encode_record(record: ChiefRecord) -> pb.ChiefRecord:
    """Encodes the model and the settings, and what is of a step; no model stays out of the message."""
    message = _encode_lasting(record)
    message.MergeFrom(_encode_of_step(record))
    return message


def _encode_lasting(record: ChiefRecord) -> pb.ChiefRecord:
    return pb.ChiefRecord(
        model=None if record.model is None else encode_model(record.model),
        policy=encode_policy(record.policy),
        settings_version=record.settings_version,
        optimizers=[codec_variables.encode_optimizer_change(original, current) for original, current in record.optimizers],
        num_rollbacks=record.num_rollbacks,
        last_rollback=record.last_rollback,
        rejects_nonfinite=record.rejects_nonfinite,
        earlier_life=record.earlier[0],
        earlier_chief_incarnation=record.earlier[1],
    )


def _encode_of_step(record: ChiefRecord) -> pb.ChiefRecord:
    data = record.data
    return pb.ChiefRecord(
        epoch=record.epoch,
        step=record.step,
        chosen=[
            pb.ChosenPush(push_id=codec.encode_push_id(one.push_id), step=one.step, weight=one.weight, ranges=one.ranges)
            for one in record.chosen
        ],
        data=None if data is None else encode_data(data.data),
        data_epoch=0 if data is None else data.epoch,
        passes=[] if data is None else [pb.DataPass(epoch=number, done=done) for number, done in data.passes],
    )


def decode_record(message: pb.ChiefRecord) -> ChiefRecord:
    """Decodes and checks the model and the settings. Raises MalformedMessage, InvalidSpec."""
    return ChiefRecord(
        model=decode_model(message.model) if message.HasField("model") else None,
        policy=decode_policy(message.policy),
        settings_version=message.settings_version,
        optimizers=codec.decode_each(message.optimizers, codec_variables.decode_optimizer_change, field="optimizers"),
        num_rollbacks=message.num_rollbacks,
        last_rollback=message.last_rollback,
        rejects_nonfinite=message.rejects_nonfinite,
        epoch=message.epoch,
        step=message.step,
        chosen=codec.decode_each(message.chosen, _decode_chosen, field="chosen"),
        data=_decode_marks(message) if message.HasField("data") else None,
        earlier=(message.earlier_life, message.earlier_chief_incarnation),
    )


def _decode_chosen(message: pb.ChosenPush) -> ChosenPush:
    codec.require(message, "push_id")
    push_id = codec.decode_push_id(message.push_id)
    return ChosenPush(push_id=push_id, step=message.step, weight=message.weight, ranges=tuple(message.ranges))


def _decode_marks(message: pb.ChiefRecord) -> DataMarks:
    passes = tuple((one.epoch, one.done) for one in message.passes)
    return DataMarks(data=decode_data(message.data), epoch=message.data_epoch, passes=passes)


class RecordPacker:
    """Makes bytes of records that come one after the other: what seldom changes, the model above all, is encoded once. For one thread."""

    def __init__(self) -> None:
        self._lasting: tuple[ChiefRecord, bytes] | None = None

    def pack(self, record: ChiefRecord) -> bytes:
        """Returns the record as bytes, as parameter servers keep it."""
        lasting = replace(record, epoch=0, step=0, chosen=(), data=None)
        # As a rule they are the same objects, and compared as such.
        if self._lasting is None or self._lasting[0] != lasting:
            self._lasting = lasting, _encode_lasting(lasting).SerializeToString(deterministic=True)
        # A message in two parts is the message.
        return self._lasting[1] + _encode_of_step(record).SerializeToString(deterministic=True)


def pack_record(record: ChiefRecord) -> bytes:
    """Returns a record as bytes, as parameter servers keep it."""
    return RecordPacker().pack(record)


def unpack_record(packed: bytes) -> ChiefRecord:
    """Returns the record that bytes are. Raises MalformedMessage, InvalidSpec."""
    return decode_record(codec.decode_message(pb.ChiefRecord, packed))
