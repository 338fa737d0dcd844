"""Protobuf to checked values and back, for what a chief leaves for its successor. Knows messages; no RPC, no file."""

from ps_protocol import codec, codec_variables
from ps_protocol.checkpoint import ChiefRecord
from ps_protocol.codec_model import decode_model, encode_model
from ps_protocol.codec_settings import decode_policy, encode_policy
from ps_protocol.v1 import chief_service_pb2 as pb


def encode_record(record: ChiefRecord) -> pb.ChiefRecord:
    """Encodes the model and the settings; no model stays out of the message."""
    return pb.ChiefRecord(
        model=None if record.model is None else encode_model(record.model),
        policy=encode_policy(record.policy),
        settings_version=record.settings_version,
        optimizers=[codec_variables.encode_optimizer_change(original, current) for original, current in record.optimizers],
        num_rollbacks=record.num_rollbacks,
        last_rollback=record.last_rollback,
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
    )


def pack_record(record: ChiefRecord) -> bytes:
    """Returns the record as bytes, as parameter servers keep it."""
    return encode_record(record).SerializeToString(deterministic=True)


def unpack_record(packed: bytes) -> ChiefRecord:
    """Returns the record that bytes are. Raises MalformedMessage, InvalidSpec."""
    return decode_record(codec.decode_message(pb.ChiefRecord, packed))
