"""Copies between tensors and the servers' memory: one call for all tensors, by way of pinned memory for a GPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")

from lockstep.torch.tensors import Copies

NAMES = ("a", "b")


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
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "_foreach_copy_", found.copy)
    monkeypatch.setattr(torch, "empty_like", lambda like, *, pin_memory: empty_like(like))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", found.synchronize)
    return found


def arrays(first: float) -> dict[str, Any]:
    return {"a": np.full(3, first, np.float32), "b": np.full((2, 2), first + 1, np.float32)}


def tensors() -> list[Any]:
    return [torch.zeros(3), torch.zeros(2, 2)]


def test_values_reach_a_gpu_though_the_servers_memory_changes_meanwhile(stream: Stream) -> None:
    copies, memory, first, second = Copies(NAMES, is_on_gpu=True), arrays(1.0), tensors(), tensors()
    copies.out(memory, first)
    for array in memory.values():
        array += 10
    copies.out(memory, second)
    for array in memory.values():
        array += 100
    stream.synchronize()
    assert [float(one.max()) for one in first] == [1.0, 2.0]
    assert [float(one.max()) for one in second] == [11.0, 12.0]


def test_gradients_of_a_gpu_are_there_when_they_are_given(stream: Stream) -> None:
    copies, memory = Copies(NAMES, is_on_gpu=True), arrays(0.0)
    copies.into(memory, {"a": torch.full((3,), 3.0), "b": torch.full((2, 2), 5.0)}, scale=[2.0, -1.0])
    assert (memory["a"].tolist(), memory["b"].tolist()) == ([6.0] * 3, [[-5.0] * 2] * 2)
    copies.into(memory, {"b": torch.full((2, 2), 7.0)})
    assert (memory["a"].tolist(), memory["b"].tolist()) == ([6.0] * 3, [[7.0] * 2] * 2)


def test_all_tensors_are_copied_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, calls, copy = Copies(NAMES, is_on_gpu=False), [], torch._foreach_copy_

    def counted(targets: Any, sources: Any) -> None:
        calls.append(len(targets))
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    copies.out(arrays(1.0), tensors())
    copies.into(arrays(1.0), dict(zip(NAMES, tensors(), strict=True)))
    assert calls == [2, 2]
