"""The manifest of a checkpoint as JSON, and back, checked. Knows messages and values; opens no file."""

import hashlib
import json
import reprlib
from dataclasses import replace
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from ps_protocol.checkpoint.storage import MANIFEST, CheckpointStorage, check_name
from ps_protocol.errors import DataLoss, InvalidSpec, PsError
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.spec import ModelSpec, Placement, check_placement
from ps_protocol.roles.checkpoint import Checkpoint, check_tag
from ps_protocol.roles.shard import MAX_STEP, CheckpointFile
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.wire import codec

FORMAT = "lockstep-checkpoint"
FORMAT_VERSION = 1
_END_BYTES = len(',\n"sha256": ""\n}\n') + 64


@light_dataclass(frozen=True, slots=True, kw_only=True)
class StoredManifest:
    """A checkpoint as its manifest describes it, the SHA-256 of the manifest itself, and the time of the save as text."""

    checkpoint: Checkpoint
    sha256: str
    saved_at: str


def manifest_sha256(content: bytes) -> str:
    """Returns the name of just this manifest: its SHA-256, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def read_checkpoint(storage: CheckpointStorage, tag: str, *, sha256: str | None = None) -> StoredManifest:
    """Returns a whole checkpoint; with `sha256` only if its manifest is just this one.

    Raises CheckpointNotFound, DataLoss if the manifest is damaged or another one, and others of the storage.
    """
    content = storage.manifest(tag)
    found = manifest_sha256(content)
    if sha256 is not None and found != sha256:
        raise DataLoss(f"{tag}/{MANIFEST}: sha256 mismatch; do all roles have the same --checkpoint-dir?")
    checkpoint, saved_at = decode_manifest(content, where=f"{tag}/{MANIFEST}")
    if checkpoint.tag != tag:
        raise DataLoss(f"{tag}/{MANIFEST}: speaks of {checkpoint.tag!r}; it belongs to another checkpoint")
    return StoredManifest(checkpoint=checkpoint, sha256=found, saved_at=saved_at)


class ManifestEncoder:
    """Encodes manifests, one after the other; the model and its placement, which stay, are only encoded once. For one thread."""

    def __init__(self) -> None:
        self._last: tuple[ModelSpec | None, Placement] | None = None
        self._model_text = self._placement_text = ""

    def encode(self, checkpoint: Checkpoint, *, saved_at: str) -> bytes:
        """Returns a manifest; `saved_at` is the date and time as text, for people."""
        self._encode_what_stays(checkpoint.record.model, checkpoint.placement)
        message = codec.encode(replace(checkpoint, record=replace(checkpoint.record, model=None), placement=()))
        message.format, message.format_version, message.saved_at = FORMAT, FORMAT_VERSION, saved_at
        rest: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
        record = _joined(rest.pop("record", {}), {"model": self._model_text})
        content = _joined(rest, {"record": record, "placement": self._placement_text}).encode().removesuffix(b"\n}")
        return content + manifest_end(content)

    def _encode_what_stays(self, model: ModelSpec | None, placement: Placement) -> None:
        # By identity: to compare two models would take as long as to encode one.
        if self._last is not None and self._last[0] is model and self._last[1] is placement:
            return
        if model is None:
            raise InvalidSpec("checkpoint: there is no model to save")
        placed = pb.CheckpointManifest(placement=[codec.encode(placed) for placed in placement])
        self._placement_text = _text(MessageToDict(placed, preserving_proto_field_name=True).get("placement", []))
        self._model_text = _text(MessageToDict(codec.encode(model), preserving_proto_field_name=True))
        self._last = (model, placement)


def decode_manifest(content: bytes, *, where: str) -> tuple[Checkpoint, str]:
    """Checks a manifest and returns the checkpoint, and when it was saved. Raises DataLoss saying what is wrong with it."""
    return decode_fields(decode_json(content, where=where), where=where)


def decode_json(content: bytes, *, where: str, kind: str = FORMAT, kind_version: int = FORMAT_VERSION) -> dict[str, Any]:
    """Returns the fields of a manifest, or of another file of this `kind`; only its format and its own SHA-256 are checked.

    Raises DataLoss.
    """
    begin = max(0, len(content) - _END_BYTES)
    if content[begin:] != manifest_end(content[:begin]):
        raise _invalid(where, "its own sha256 is wrong; it is not what was written")
    try:
        fields = json.loads(content.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _invalid(where, f"it is not JSON ({str(error)[:80]})") from None
    if not isinstance(fields, dict) or fields.get("format") != kind:
        raise _invalid(where, f"it is not of format {kind!r}")
    version = fields.get("format_version")
    if type(version) is not int or version != kind_version:
        raise _invalid(where, f"format version {reprlib.repr(version)}, this program reads {kind_version}; install a newer one")
    del fields["sha256"]
    return fields


def decode_fields(fields: dict[str, Any], *, where: str) -> tuple[Checkpoint, str]:
    """Checks the fields of a manifest and returns the checkpoint, and when it was saved. Raises DataLoss."""
    message = pb.CheckpointManifest()
    try:
        ParseDict(fields, message)
        checkpoint = codec.decode(Checkpoint, message)
        _check(checkpoint)
    except PsError as error:
        raise _invalid(where, error.message) from None
    except (ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:  # all of these come out of ParseDict
        raise _invalid(where, str(error)[:200]) from None
    return checkpoint, message.saved_at


def _check(checkpoint: Checkpoint) -> None:
    check_tag(checkpoint.tag)
    if not 0 <= checkpoint.step <= MAX_STEP:
        raise InvalidSpec(f"step {checkpoint.step}, want 0 to 2^62")
    if checkpoint.fence.epoch < 1 or checkpoint.num_shards < 1:
        raise InvalidSpec(f"epoch {checkpoint.fence.epoch} and {checkpoint.num_shards} shards, want 1 or more of each")
    _check_files(checkpoint.files, checkpoint.num_shards)
    _check_bases(checkpoint)
    if checkpoint.record.model is None:
        raise InvalidSpec("it has no model")
    check_placement(checkpoint.placement, checkpoint.record.model, num_shards=checkpoint.num_shards)
    _check_same_variables(checkpoint.placement, checkpoint.record.model)


def _check_files(files: tuple[CheckpointFile, ...], num_shards: int) -> None:
    if len(files) != num_shards or any(file.shard != shard for shard, file in enumerate(files)):
        raise InvalidSpec(f"files of shards {reprlib.repr([file.shard for file in files])}, want one of each of {num_shards}, in order")
    for file in files:
        check_name(file.name)
    if len({file.name for file in files}) < num_shards:
        raise InvalidSpec("two shards have one file")


def _check_bases(checkpoint: Checkpoint) -> None:
    for file in checkpoint.bases:
        check_name(file.name)
        check_tag(file.tag)
        if not 0 <= file.shard < checkpoint.num_shards:
            raise InvalidSpec(f"it rests on a file of shard {file.shard}, of {checkpoint.num_shards}")
    for shard, own in enumerate(checkpoint.files):
        first, *deltas = checkpoint.files_of(shard)
        if first.is_delta or not all(file.is_delta for file in deltas[-1:]) or own.tag:
            raise InvalidSpec(f"its files of shard {shard} do not begin with a full one, or do not end with its own")


def _check_same_variables(placement: Placement, model: ModelSpec) -> None:
    variables = {variable.name: variable for variable in model.variables}
    for placed in placement:
        if variables[placed.slice.variable.name] != placed.slice.variable:
            raise InvalidSpec(f"variable {placed.slice.variable.name!r} is placed as another one than the model's")


def manifest_end(content: bytes) -> bytes:
    """Returns how a manifest that begins so ends: with the SHA-256 of all before."""
    return b',\n"sha256": "' + hashlib.sha256(content).hexdigest().encode() + b'"\n}\n'


def _joined(fields: dict[str, Any], texts: dict[str, str]) -> str:
    """Returns a JSON object of fields, and of others that are JSON already; a line for each."""
    lines = [f"{json.dumps(name)}: {text}" for name, text in {**{name: _text(value) for name, value in fields.items()}, **texts}.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _invalid(where: str, why: str) -> DataLoss:
    return DataLoss(f"{where}: not a valid manifest: {why}")
