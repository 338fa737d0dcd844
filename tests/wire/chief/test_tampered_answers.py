"""Workers whose chief and parameter servers give wrong answers: they end soon, in a typed error."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

import worker_client
from ps_protocol.errors import DeadlineExceeded, InvalidSpec, LimitExceeded, MalformedMessage, PsError
from ps_protocol.v1 import chief_service_pb2 as pb
from ps_protocol.v1 import parameter_service_pb2 as shard_pb
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.network.tampering import Tampering
from worker_client import Session

Changes = dict[str, Callable[[Any], None]]
_MESSAGES: dict[str, Any] = {
    "RegisterWorker": pb.RegisterWorkerResponse,
    "RegisterModel": pb.RegisterModelResponse,
    "GetModel": pb.GetModelResponse,
    "Converse": pb.ConverseResponse,
    "Read": shard_pb.ReadResponse,
}


@contextlib.contextmanager
def session_of(directory: Path, changes: Changes) -> Iterator[Session]:
    """A session without a model, in a cluster whose answers to these methods are changed."""

    def change(method: str, answer: bytes, number: int) -> list[bytes]:
        if method == "RegisterWorker":
            registration = pb.RegisterWorkerResponse.FromString(answer)
            registration.shard_addresses[:] = [shard.address for shard in shards]
            answer = registration.SerializeToString()
        if method not in changes:
            return [answer]
        message = _MESSAGES[method].FromString(answer)
        changes[method](message)
        return [message.SerializeToString()]

    with contextlib.ExitStack() as stack:
        cluster = ServedCluster(Shape(num_ps=2), stack, directory=directory)
        shards = [stack.enter_context(Tampering(address, change)) for address in cluster.ps_addresses]
        chief = stack.enter_context(Tampering(cluster.chief_address, change))
        yield stack.enter_context(worker_client.connect(chief.address, timeout_s=2, transport="grpc"))


def join(session: Session) -> None:
    values = {"w": np.zeros((3, 4), np.float32), "x": np.zeros(5, np.float32)}
    session.create_or_join(values, optimizer=worker_client.sgd(0.1), timeout_s=1)


def lease(seconds: int) -> Callable[[pb.RegisterWorkerResponse], None]:
    return lambda message: message.lease.CopyFrom(Duration(seconds=seconds))


def addresses(*found: str) -> Callable[[pb.RegisterWorkerResponse], None]:
    def change(message: pb.RegisterWorkerResponse) -> None:
        message.shard_addresses[:] = found

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (addresses(), "0 parameter servers"),
        (addresses(*(f"127.0.0.1:{port}" for port in range(1, 10_002))), "10001 parameter servers and 0 standbys, want 1 to 10000"),
        (addresses("127.0.0.1:1", "127.0.0.1:1"), "two parameter servers have one address"),
        (lambda message: message.standby_addresses.extend("abc"), "3 standbys"),
        (lease(0), "a lease of 0 s, want 0.1 to 1e+09"),
        (lease(1 << 38), "a lease of 2.74878e+11 s"),
        (lambda message: message.ClearField("lease"), "a lease of 0 s"),
        (lambda message: setattr(message.participant, "incarnation", 0), "incarnation 0"),
        (lambda message: setattr(message.participant, "index", (1 << 32) - 1), "index 4294967295"),
        (lambda message: setattr(message, "global_step", -1), "step: got -1"),
    ],
)
def test_an_unusable_registration_is_refused(socket_dir: Path, change: Callable[[Any], None], words: str) -> None:
    with pytest.raises((MalformedMessage, InvalidSpec), match=re.escape(words)), session_of(socket_dir, {"RegisterWorker": change}):
        pass


def placed(**fields: Any) -> Callable[[pb.RegisterModelResponse], None]:
    def change(message: pb.RegisterModelResponse) -> None:
        if message.placement:
            variable = message.placement[0].slice.variable
            for name, value in fields.items():
                if name == "shape":
                    variable.shape[:] = value
                elif name == "shard":
                    message.placement[0].shard = value
                else:
                    setattr(variable, name, value)

    return change


def without_one(message: pb.RegisterModelResponse) -> None:
    del message.placement[:1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (placed(shard=2), "'w' lies on ps 2, there are 2"),
        (placed(shard=(1 << 32) - 1), "there are 2"),
        (placed(shape=(3, 4_000_000)), "'w' is placed as another one"),
        (placed(shape=(3,)), "'w' is placed as another one"),
        (placed(name="v"), "'v' is placed as another one"),
        (placed(is_sparse=True), "'w' is placed as another one"),
        (placed(data_type=2), "'w' is placed as another one"),
        (without_one, "'w' is not placed, or not all of it"),
        (lambda message: message.placement.extend(list(message.placement)), "occur twice"),
    ],
)
def test_a_model_that_is_placed_as_another_one_is_refused(socket_dir: Path, change: Callable[[Any], None], words: str) -> None:
    with pytest.raises(MalformedMessage, match=re.escape(f"{words}")), session_of(socket_dir, {"RegisterModel": change}) as session:
        join(session)


def other_epoch(message: pb.RegisterWorkerResponse) -> None:
    message.participant.era.epoch = 9


def always_initialize(message: pb.RegisterModelResponse) -> None:
    message.state = pb.MODEL_STATE_INITIALIZE


def other_attempt(message: pb.RegisterModelResponse) -> None:
    message.attempt = 77


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RegisterWorker": other_epoch}, "cluster epoch is 1, you have 9"),
        ({"RegisterModel": always_initialize}, "asks for the first values of the variables again and again"),
        ({"RegisterModel": other_attempt}, "asks for the first values of the variables again and again"),
    ],
)
def test_a_chief_that_takes_a_worker_in_and_then_refuses_it_is_given_up_in_time(socket_dir: Path, changes: Changes, words: str) -> None:
    """The worker asked again at once, for ever, and said nothing."""
    with session_of(socket_dir, changes) as session:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=words):
            join(session)
        assert time.monotonic() - began < 10


def next_step(message: shard_pb.ReadResponse) -> None:
    if message.HasField("header"):
        message.header.step += 1


def test_variables_of_another_step_are_not_taken_for_those_of_the_workers_own(socket_dir: Path) -> None:
    with session_of(socket_dir, {"Read": next_step}) as session:
        join(session)
        with pytest.raises(MalformedMessage, match="step 0 was requested, and it answers with step 1"):
            session.read()


@pytest.mark.parametrize("step", [-1, (1 << 63) - 1, -(1 << 63)])
def test_a_token_for_a_step_that_cannot_be_ends_in_a_typed_error(socket_dir: Path, step: int) -> None:
    def change(message: pb.ConverseResponse) -> None:
        if message.HasField("token"):
            message.token.step = step

    with session_of(socket_dir, {"Converse": change}) as session:
        join(session)
        with pytest.raises(PsError):
            session.step({"w": np.ones((3, 4), np.float32), "x": np.ones(5, np.float32)}, timeout_s=1)


def test_a_model_that_the_machine_has_no_memory_for_is_refused_with_a_reason(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> None:
        raise MemoryError

    monkeypatch.setattr("worker_client.model.memory.aligned_bytes", refuse)
    with session_of(socket_dir, {}) as session:
        with pytest.raises(LimitExceeded, match=r"does not give the \d+ bytes that variables of the model take"):
            join(session)
