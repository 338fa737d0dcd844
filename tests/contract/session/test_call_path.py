"""The path from `session.step(gradients)` to the wire: few modules and few frames, so that a reader can follow it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import worker_client
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from worker_client import Session

OWN = ("worker_client", "ps_protocol")
# What gives the bytes to grpcio.
WIRE = "ps_protocol.rpc.client_stream"
WRITES = ("exchange", "send", "request")
# A frame: its module and its function.
Frame = tuple[str, str]


@pytest.fixture
def session(socket_dir: Path) -> Iterator[Session]:
    with ExitStack() as stack:
        cluster = ServedCluster(Shape(), stack, directory=socket_dir)
        session = stack.enter_context(worker_client.connect(cluster.chief_address, transport="grpc", timeout_s=20))
        session.create_or_join({"w": np.zeros(1000)}, optimizer=worker_client.sgd(1.0), timeout_s=20)
        yield session


def ways_to_the_wire(session: Session) -> set[tuple[Frame, ...]]:
    """Returns the stacks, from the session on, with which one step comes to the streams that it writes to."""
    ways: set[tuple[Frame, ...]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "") == WIRE and frame.f_code.co_name in WRITES:
            ways.add(tuple(stack_of(frame)))

    step_under(note, session)
    return ways


def step_under(profiler: Callable[[FrameType, str, Any], None], session: Session) -> None:
    """Makes a few steps, until the streams stand, and one more that the profiler sees."""
    gradients = {"w": np.ones(1000)}
    for _ in range(3):
        session.step(gradients, timeout_s=20)
    sys.setprofile(profiler)
    try:
        session.step(gradients, timeout_s=20)
    finally:
        sys.setprofile(None)


def calls_of_a_step(session: Session) -> int:
    """Returns how many functions in Python the caller's thread begins or resumes for one step."""
    num_calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    step_under(note, session)
    return num_calls


def stack_of(frame: FrameType | None) -> list[Frame]:
    found: list[Frame] = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in OWN:
            found.append((module, frame.f_code.co_name))
        frame = frame.f_back
    return found[::-1]


def test_push_and_token_are_few_frames_from_the_wire(session: Session) -> None:
    ways = ways_to_the_wire(session)
    pushes = [way for way in ways if any(name == "push" for _, name in way)]
    tokens = [way for way in ways if any(name == "ask_for_token" for _, name in way)]
    assert pushes and tokens
    longest = max(pushes, key=len)
    assert len(longest) <= 15, "\n".join(map(str, longest))
    modules = {module for way in pushes for module, _ in way}
    assert len(modules) <= 8, sorted(modules)
    for way in tokens:
        own = [frame for frame in way if frame[0].startswith("worker_client")]
        assert len(own) <= 9, own


def test_step_takes_few_calls(session: Session) -> None:
    """Most of a small step's time: a call that is added here costs every step of every worker."""
    # 328, and a few more where an answer is late.
    assert calls_of_a_step(session) <= 343
