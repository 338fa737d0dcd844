"""The fuzzed functions: all that parse bytes from a network or a disk. A target raises only if there is a defect."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps_protocol.checkpoint.manifest import ManifestEncoder, decode_manifest, manifest_end
from ps_protocol.checkpoint.tensor_file import SavedTensor, TensorFileReader, encode_header
from ps_protocol.errors import DataLoss, MalformedMessage
from ps_protocol.roles.shard import CheckpointFile
from ps_protocol.v1 import accumulator_service_pb2, board_service_pb2, tensor_pb2
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import frames as framing
from tests.support.parameter_servers.checkpoints import checkpoint_of

_STREAMS: tuple[Any, ...] = (
    *(pb.CreateVariablesRequest, pb.PushRequest, pb.ReadResponse, pb.ReadRowsRequest),
    *(pb.ReadRowsResponse,),
    *(accumulator_service_pb2.ApplyGradientRequest, accumulator_service_pb2.TakeGradientResponse),
    *(board_service_pb2.PostOnBoardRequest, board_service_pb2.ReadBoardResponse),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A function that takes any bytes, and examples to begin with."""

    run: Callable[[bytes], None]
    examples: tuple[bytes, ...]


def frames(message: bytes) -> None:
    """The parser made by hand accepts and means what protobuf does, for every kind of stream."""
    for message_type in _STREAMS:
        assert _outcome(framing.parse, message, message_type) == _outcome(framing._parse_slowly, message, message_type), message_type


def tensor_file(content: bytes) -> None:
    """A file is read to its end, every byte once, or is damaged."""
    file = CheckpointFile(name="f", shard=0, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    try:
        reader = TensorFileReader(_Bytes(content), file=file, where="f", max_tensors=1000)
        values = []
        for tensor in reader:
            values.append(bytearray(tensor.num_bytes))
            reader.read_into(memoryview(values[-1]))
    except DataLoss:
        return
    assert content.endswith(b"".join(values))
    assert reader.num_bytes_read == len(content)


def manifest(content: bytes) -> None:
    """A manifest whose own hash is right is a checkpoint, which can be written again, or is damaged."""
    for whole in (content, content + manifest_end(content)):
        try:
            checkpoint, saved_at = decode_manifest(whole, where="m")
        except DataLoss:
            continue
        assert decode_manifest(ManifestEncoder().encode(checkpoint, saved_at=saved_at), where="m") == (checkpoint, saved_at)


class _Bytes:
    def __init__(self, content: bytes) -> None:
        self._content = content
        self.num_bytes = len(content)

    def read_into(self, memory: memoryview, *, offset: int) -> None:
        memory[:] = self._content[offset : offset + len(memory)]


def _outcome(parse: Callable[..., tuple[Any, Any]], message: bytes, message_type: Any) -> object:
    try:
        header, frame = parse(message, message_type)
    except MalformedMessage:
        return "malformed"
    # Not compared as messages: a NaN differs from itself.
    header_bytes = None if header is None else header.SerializeToString(deterministic=True)
    return header_bytes, None if frame is None else (frame.offset, bytes(frame.data))


def _frame_examples() -> tuple[bytes, ...]:
    push = pb.PushHeader(era=tensor_pb2.Era(life=1, epoch=3), step=7, layout_hash="abc")
    header = pb.PushRequest(header=push).SerializeToString()
    return (b"", header, *(framing.encode_frame(first, offset=offset, data=b"12345") for first in (b"", header) for offset in (0, 300)))


def _file_examples() -> tuple[bytes, ...]:
    tensors = [SavedTensor(name=f"w{size}", array=np.ones((size, 2), np.float32)) for size in (0, 1, 3)]
    header, ordered = encode_header(tensors, {"key": "value"})
    return (header + b"".join(tensor.array.tobytes() for tensor in ordered), b"\x02" + bytes(7) + b"{}")


def _manifest_examples() -> tuple[bytes, ...]:
    files = [CheckpointFile(name=f"ps-{shard}", shard=shard, num_bytes=9, sha256="0" * 64) for shard in range(2)]
    whole = ManifestEncoder().encode(checkpoint_of(files, step=5), saved_at="now")
    return (whole, whole[: -len(manifest_end(b""))], b'{"format":"lockstep-checkpoint","format_version":1')


TARGETS = {
    "frames": Target(run=frames, examples=_frame_examples()),
    "tensor_file": Target(run=tensor_file, examples=_file_examples()),
    "manifest": Target(run=manifest, examples=_manifest_examples()),
}
