"""Copies between tensors and the servers' memory: one call for all tensors, complete on return also with a GPU."""

import ctypes
import gc
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")

from lockstep.torch.tensors import Copies
from ps_protocol.shared_memory.segment import SegmentMaker, map_segment
from ps_protocol.shared_memory.words import SegmentKind

NAMES = ("a", "b")
GPU = torch.device("cuda", 1)  # not PyTorch's present one


class Stream:
    """Stands for a GPU's: what is to be copied without blocking is copied when somebody waits for it, and not before."""

    def __init__(self, copy: Callable[..., None]) -> None:
        self._copy = copy
        self._waiting: list[tuple[Any, Any]] = []

    def copy(self, targets: Any, sources: Any, non_blocking: bool = False) -> None:
        if non_blocking:
            self._waiting.append((targets, sources))
        else:
            self._copy(targets, sources)

    def synchronize(self) -> None:
        for targets, sources in self._waiting:
            self._copy(targets, sources)
        self._waiting.clear()


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    found = Stream(torch._foreach_copy_)
    monkeypatch.setattr(torch, "_foreach_copy_", found.copy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: {GPU: found}[device])
    return found


def arrays(first: float) -> dict[str, Any]:
    return {"a": np.full(3, first, np.float32), "b": np.full((2, 2), first + 1, np.float32)}


def tensors() -> list[Any]:
    return [torch.zeros(3), torch.zeros(2, 2)]


def test_values_have_reached_a_gpu_before_the_servers_memory_may_change(stream: Stream) -> None:
    copies, memory, found = Copies(NAMES, gpus=[GPU]), arrays(1.0), tensors()
    copies.out(memory, found)
    for array in memory.values():
        array += 10
    assert [float(one.max()) for one in found] == [1.0, 2.0]


class Cuda:
    """Stands for the library of CUDA: notes which memory it knows."""

    cudaError = SimpleNamespace(success=0)

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, int]] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address not in self.known
        self.known[address] = num_bytes, flags
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert ctypes.string_at(address, 1), "the memory is mapped still"
        del self.known[address]
        return 0


@pytest.mark.parametrize("is_read_only", [False, True])
def test_cuda_knows_the_servers_shared_memory_for_as_long_as_it_is_mapped(
    stream: Stream, monkeypatch: pytest.MonkeyPatch, is_read_only: bool
) -> None:
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    maker, num_bytes = SegmentMaker(cluster="one", index=0, process_incarnation=1), 1 << 16
    segment = maker.variables(num_bytes) if is_read_only else maker.gradients(num_bytes, worker=0)
    if is_read_only:  # as a worker maps the variables
        kind, descriptor = SegmentKind.VARIABLES, segment.descriptor
        assert descriptor is not None
        segment = map_segment(pid=os.getpid(), descriptor=descriptor, num_bytes=segment.num_bytes, kind=kind, arena_bytes=num_bytes)
    whole, want = segment.arenas[0], segment.num_bytes
    memory = {"a": whole[:12].view(np.float32), "b": whole[64:80].view(np.float32).reshape(2, 2)}
    for _ in range(2):
        copies = Copies(NAMES, gpus=[GPU])
        if is_read_only:
            copies.out(memory, tensors())
        else:
            copies.into(memory, {"a": torch.ones(3), "b": torch.ones(2, 2)})
    assert [*cuda.known.values()] == [(want, 8 if is_read_only else 0)]
    del segment, whole, memory, copies
    gc.collect()
    assert not cuda.known


def test_gradients_of_a_gpu_are_there_when_they_are_given(stream: Stream) -> None:
    copies, memory = Copies(NAMES, gpus=[GPU]), arrays(0.0)
    copies.into(memory, {"a": torch.full((3,), 3.0), "b": torch.full((2, 2), 5.0)}, scale=[2.0, -1.0])
    assert (memory["a"].tolist(), memory["b"].tolist()) == ([6.0] * 3, [[-5.0] * 2] * 2)
    copies.into(memory, {"b": torch.full((2, 2), 7.0)})
    assert (memory["a"].tolist(), memory["b"].tolist()) == ([6.0] * 3, [[7.0] * 2] * 2)


def test_all_tensors_are_copied_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, calls, copy = Copies(NAMES), [], torch._foreach_copy_

    def counted(targets: Any, sources: Any, non_blocking: bool) -> None:
        calls.append(len(targets))
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    copies.out(arrays(1.0), tensors())
    copies.into(arrays(1.0), dict(zip(NAMES, tensors(), strict=True)))
    assert calls == [2, 2]
