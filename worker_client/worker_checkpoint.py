"""A worker's checkpoint file: variables and averages by name, in the safetensors format. Knows files and arrays; no session.

These are values only. Optimizer slots and the step of the servers are not in it.
"""

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ps_protocol.errors import MalformedMessage
from ps_protocol.tensors import Array, DataType

_TYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
_NAMES = {code: name for name, code in _TYPES.items()}
_FILE = re.compile(r"-(\d+)\.safetensors$")
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The content of a checkpoint: arrays by name, and the global step at which they were read."""

    values: dict[str, Array]
    global_step: int


def save_checkpoint(prefix: str | Path, values: Mapping[str, Array], *, global_step: int) -> Path:
    """Writes `<prefix>-<step>.safetensors`, whole or not at all, and returns its path. Makes the directory if need be."""
    path = Path(f"{prefix}-{global_step:08d}.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {"__metadata__": {"global_step": str(global_step)}}
    offset = 0
    for name, value in values.items():
        header[name] = {"dtype": _TYPES[value.dtype.name], "shape": list(value.shape), "data_offsets": [offset, offset + value.nbytes]}
        offset += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for value in values.values():
            file.write(np.ascontiguousarray(value).tobytes())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    return path


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Returns the content of a checkpoint. Raises OSError, and MalformedMessage for a file that is damaged or is none."""
    content = Path(path).read_bytes()
    try:
        (size,) = struct.unpack_from("<Q", content)
        if size > min(_MAX_HEADER_BYTES, len(content) - 8):
            raise ValueError("the header is longer than the file")
        header = json.loads(content[8 : 8 + size])
        step = int(header.pop("__metadata__")["global_step"])
        values = {name: _array(entry, memoryview(content)[8 + size :]) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise MalformedMessage(f"{path} is no checkpoint, or a damaged one: {error}; use an earlier one") from error
    return Checkpoint(values=values, global_step=step)


def checkpoints(checkpoint_dir: str | Path) -> list[Path]:
    """Returns the paths of a directory's checkpoints, the one written last first: a training that began anew has lower steps."""
    found = [path for path in Path(checkpoint_dir).glob("*.safetensors") if _FILE.search(path.name)]
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def latest_checkpoint(checkpoint_dir: str | Path) -> Path | None:
    """Returns the path of the checkpoint that was written last in a directory; None if there is none."""
    return next(iter(checkpoints(checkpoint_dir)), None)


def _array(entry: Mapping[str, Any], content: memoryview) -> Array:
    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop <= len(content):
        raise ValueError("an array lies outside the file")
    value = np.frombuffer(content[start:stop], DataType(_NAMES[entry["dtype"]]).dtype)
    return value.reshape(entry["shape"]).copy()
