"""The files of checkpoints: other readers can read them, and other files are refused."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps_protocol.checkpoint.tensor_file import (
    MAX_HEADER_BYTES,
    SavedTensor,
    decode_header,
    decode_length,
    encode_header,
    tensor_name,
)
from ps_protocol.errors import DataLoss, InvalidSpec
from ps_protocol.model.layout import VariableSlice
from ps_protocol.model.spec import place
from ps_protocol.model.variables import DataType, VariableSpec
from tests.support.parameter_servers.checkpoints import MODEL, tensors_of


def file_of(tensors: list[SavedTensor], **metadata: str) -> bytes:
    header, ordered = encode_header(tensors, metadata)
    return header + b"".join(tensor.array.tobytes() for tensor in ordered)


def file_with(header: object, *, content: bytes = b"", padding: bytes = b"") -> bytes:
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + padding
    return len(text).to_bytes(8, "little") + text + content


def read(file: bytes, **limits: int) -> Any:
    length = decode_length(file[:8], file_bytes=len(file), where="f")
    return decode_header(file[8 : 8 + length], file_bytes=len(file), where="f", **limits)


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def piece(name: str, *, start: int = 0, stop: int = 6, axis: int = 0) -> VariableSlice:
    variable = VariableSpec(name=name, data_type=DataType.FLOAT32, shape=(6, 6))
    return VariableSlice(variable=variable, start=start, stop=stop, axis=axis)


def test_the_safetensors_package_reads_a_checkpoint_file() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = tensors_of(place(MODEL, num_shards=1), 0, step=3)
    halves = [tensor for tensor in tensors if tensor.array.dtype.name != "bfloat16"]  # which it has no NumPy type for
    read_back = safetensors.load(file_of(halves, step="3"))
    assert read_back.keys() == {tensor.name for tensor in halves}
    for tensor in halves:
        assert read_back[tensor.name].dtype == tensor.array.dtype
        np.testing.assert_array_equal(read_back[tensor.name], tensor.array)


def test_a_checkpoint_file_can_be_read_with_numpy_alone() -> None:
    file = file_of([SavedTensor(name="w", array=np.arange(6, dtype=np.float32).reshape(2, 3))])
    length = int.from_bytes(file[:8], "little")
    about = json.loads(file[8 : 8 + length])["w"]
    begin, end = about["data_offsets"]
    array = np.frombuffer(file[8 + length :][begin:end], np.float32).reshape(about["shape"])
    np.testing.assert_array_equal(array, [[0, 1, 2], [3, 4, 5]])


def test_header_comes_back_as_it_was_written() -> None:
    tensors = tensors_of(place(MODEL, num_shards=2), 1, step=3)
    file = file_of(tensors, step="3", word="späßig")
    header = read(file)
    assert header.metadata == {"step": "3", "word": "späßig"}
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in header.tensors} == {
        tensor.name: (tensor.array.dtype, tensor.array.shape) for tensor in tensors
    }
    assert header.num_bytes % 64 == 0
    assert all(tensor.start % tensor.dtype.itemsize == 0 for tensor in header.tensors), "each can be mapped into memory"


def test_names_of_variables_slices_and_slots_are_never_alike() -> None:
    assert tensor_name(piece("w")) == "w"
    assert tensor_name(piece("w"), "velocity") == "w@velocity"
    assert tensor_name(piece("w", start=2)) == "w[2:6]"
    assert tensor_name(piece("w", start=2, axis=1), "m") == "w[:,2:6]@m"
    names = ["w", "w@", "@w", "w@m", "w@@m", "w[2:6]", "w[[2:6]", "w[2:6]@m", "__metadata__", "__metadata__[:]", "@__metadata__"]
    made = [
        tensor_name(one, part)
        for name in names
        for one in (piece(name), piece(name, start=2), piece(name, start=2, axis=1))
        for part in ("", "m", "average")
    ]
    assert len({*made, "__metadata__"}) == len(made) + 1


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"", "header"),
        (b"\x05\0\0", "header"),
        ((1 << 63).to_bytes(8, "little") + b"{}", "header alone"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "header alone"),
        (file_with(b""), "not JSON"),
        (file_with(b"{"), "not JSON"),
        (file_with(b"\xff\xfe{}"), "not JSON"),
        (file_with(b" {}"), "JSON object"),
        (file_with([]), "JSON object"),
        (file_with(b"[" * 200_000), "not JSON"),
        (file_with(b'{"w":' * 100_000), "not JSON"),
        (file_with(b'{"w":{},"w":{}}'), "twice"),
        (file_with(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}'), "no JSON"),
        (file_with({"__metadata__": {"a": 1}}), "object of strings"),
        (file_with({"__metadata__": []}), "object of strings"),
        (file_with({"w": 3}), "just data_offsets, dtype, shape"),
        (file_with({"w": {**entry(), "more": 1}}), "just data_offsets, dtype, shape"),
        (file_with({"w": entry(dtype="O")}), "dtype"),
        (file_with({"w": entry(dtype=["F32"])}), "dtype"),
        (file_with({"w": entry(shape=(-2,))}), "shape"),
        (file_with({"w": entry(shape=(True, 2))}), "shape"),
        (file_with({"w": entry(shape=(2.0,))}), "shape"),
        (file_with({"w": entry(shape=(1,) * 33)}), "shape"),
        (file_with({"w": entry(shape=(1 << 40, 1 << 40, 0), offsets=(0, 0))}), "shape"),
        (file_with({"w": entry(offsets=(8, 0))}), "data_offsets"),
        (file_with({"w": entry(offsets=(0, 8, 9))}), "data_offsets"),
        (file_with({"w": entry(offsets=(0, 7))}, content=bytes(7)), "has 7 bytes"),
        (file_with({"w": entry()}, content=bytes(7)), "its header speaks of 8"),
        (file_with({"w": entry()}, content=bytes(9)), "its header speaks of 8"),
        (file_with({"v": entry(), "w": entry(offsets=(4, 12))}, content=bytes(12)), "overlaps"),
        (file_with({"v": entry(), "w": entry(offsets=(0, 8))}, content=bytes(8)), "overlaps"),
        (file_with({"v": entry(), "w": entry(offsets=(12, 20))}, content=bytes(20)), "hole"),
        (file_with({"w": entry(offsets=(4, 12))}, content=bytes(12)), "hole"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_no_checkpoint_files_are_refused(file: bytes, why: str) -> None:
    with pytest.raises(DataLoss, match=r"^f: ") as refusal:
        read(file)
    assert "not a valid safetensors file" in refusal.value.message
    assert why in refusal.value.message


def test_more_tensors_than_there_can_be_are_refused_before_they_cost_memory() -> None:
    file = file_with({f"w{number}": entry(shape=(0,), offsets=(0, 0)) for number in range(5)})
    assert len(read(file, max_tensors=5).tensors) == 5
    with pytest.raises(DataLoss, match="more than 4 tensors"):
        read(file, max_tensors=4)


def test_header_longer_than_any_is_refused_before_it_is_read() -> None:
    with pytest.raises(DataLoss, match="100000000 at most"):
        decode_length((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), file_bytes=1 << 40, where="f")


def test_tensor_that_cannot_be_saved_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="complex64 cannot be saved"):
        encode_header([SavedTensor(name="w", array=np.zeros(3, np.complex64))], {})
    with pytest.raises(InvalidSpec, match="occurs twice"):
        encode_header([SavedTensor(name="w", array=np.zeros(3))] * 2, {})


@given(st.binary(max_size=200))
def test_random_bytes_are_read_as_a_file_or_refused_as_data_loss(content: bytes) -> None:
    for file in (content, file_with(content)):
        try:
            read(file)
        except DataLoss:
            continue


@given(st.data())
def test_a_damaged_header_is_read_as_a_file_or_refused_as_data_loss(data: st.DataObject) -> None:
    file = bytearray(file_of([SavedTensor(name=name, array=np.zeros(3, np.float32)) for name in ("v", "w")], key="value"))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = read(bytes(file))
    except DataLoss:
        return
    assert header.num_bytes + sum(tensor.num_bytes for tensor in header.tensors) == len(file)
