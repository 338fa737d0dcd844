"""Every RPC with messages of its own type and random content: no defect, no damage, nothing that grows. A seed repeats a run."""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from ps_protocol.roles.shard import ShardStatusRequest
from ps_protocol.v1 import accumulator_service_pb2, board_service_pb2, chief_service_pb2, handshake_service_pb2, parameter_service_pb2
from ps_server.config import ParameterServerConfig
from tests.support.chief.running_chief import Worker, client_of, cluster
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import outcome
from tests.support.parameter_servers.shards import Trainer, open_server

NUM_CALLS = 400
MAX_DEPTH = 5
# Of the sender's messages and the first calls of each kind; a request that was believed would take far more.
MAX_MORE_BYTES = 64 << 20
NUMBERS = (0, 1, 2, 3, 7, -1, 1 << 20, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 62) + 1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
FLOATS = (0.0, 1.0, -1.0, 0.1, float("nan"), float("inf"), -float("inf"), 1e38, 1e-38)
WORDS = (
    "",
    "w",
    "b",
    "sgd",
    "adam",
    "a" * 300,
    "x\0y",
    "../../x",
    "ünï",
    "\n\x1b[31m",
    "step-000000001",
    "unix:/tmp/x",
)
# What makes a call get further than the first check.
LIKELY: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("epoch", "chief_incarnation", "incarnation", "sequence"), (1, 1, 1, 2)),
    "worker": (0, 1),
    "index": (0, 1),
    "major": (3,),
    "num_samples": (100,),
    "range_size": (10,),
}
DEFECTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)
# They end servers, as they should.
ENDING = ("ShutdownShard", "FinishTraining")
METHODS = [
    (service.full_name, method)
    for module in (accumulator_service_pb2, board_service_pb2, chief_service_pb2, handshake_service_pb2, parameter_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name not in ENDING
]


class Filler:
    """Fills messages by their descriptors."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def messages(self, method: Any) -> list[bytes]:
        """Returns the messages of a call."""
        made = message_factory.GetMessageClass(method.input_type)
        count = self._random.choice((1, 1, 2, 3)) if method.client_streaming else 1
        data = [self._filled(made(), 0).SerializeToString() for _ in range(count)]
        if self._random.random() < 0.05:
            data[-1] = data[-1][: self._random.randint(0, len(data[-1]))] + self._random.randbytes(3)
        return data

    def _filled(self, message: Message, depth: int) -> Message:
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < 0.75 and depth < MAX_DEPTH:
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: Any, depth: int) -> None:
        target: Any = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            for _ in range(self._random.randint(0, 3)):
                key = self._value(entry["key"])
                if entry["value"].message_type is None:
                    target[key] = self._value(entry["value"])
                else:
                    self._filled(target[key], depth + 1)
        elif field.is_repeated:
            for _ in range(self._random.choice((0, 1, 1, 2, 3, 30 if depth < 2 else 2))):
                if field.message_type is None:
                    target.append(self._value(field))
                else:
                    self._filled(target.add(), depth + 1)
        elif field.message_type is not None:
            target.SetInParent()
            self._filled(target, depth + 1)
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: Any) -> Any:
        makers: dict[int, Callable[[], Any]] = {
            FieldDescriptor.CPPTYPE_STRING: lambda: self._text(is_bytes=field.type == FieldDescriptor.TYPE_BYTES),
            FieldDescriptor.CPPTYPE_BOOL: lambda: self._random.random() < 0.5,
            FieldDescriptor.CPPTYPE_ENUM: lambda: self._random.choice([*(value.number for value in field.enum_type.values), 99]),
            FieldDescriptor.CPPTYPE_FLOAT: lambda: self._random.choice(FLOATS),
            FieldDescriptor.CPPTYPE_DOUBLE: lambda: self._random.choice(FLOATS),
            FieldDescriptor.CPPTYPE_INT32: lambda: self._number(field.name, -(1 << 31), (1 << 31) - 1),
            FieldDescriptor.CPPTYPE_INT64: lambda: self._number(field.name, -(1 << 63), (1 << 63) - 1),
            FieldDescriptor.CPPTYPE_UINT32: lambda: self._number(field.name, 0, (1 << 32) - 1),
            FieldDescriptor.CPPTYPE_UINT64: lambda: self._number(field.name, 0, (1 << 64) - 1),
        }
        return makers[field.cpp_type]()

    def _text(self, *, is_bytes: bool) -> str | bytes:
        return self._random.randbytes(self._random.choice((0, 1, 8, 32, 96, 1000))) if is_bytes else self._random.choice(WORDS)

    def _number(self, name: str, least: int, most: int) -> int:
        choices = LIKELY.get(name, NUMBERS) if self._random.random() < 0.85 else NUMBERS
        return min(max(self._random.choice(choices), least), most)


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """A server with a model and no chief, a cluster that trains, and what is left of both in the end: they still work."""
    with contextlib.ExitStack() as stack:
        alone = stack.enter_context(open_server(ParameterServerConfig(index=0)))
        trainer = Trainer(stack.enter_context(contextlib.closing(CommandedShard(alone.address))))
        trainer.create()
        chief = stack.enter_context(cluster(total_num_replicas=4, replicas_to_aggregate=1, lease_s=600.0))
        with client_of(chief) as client, Worker(client) as worker:
            worker.join_model()
            assert worker.wait(worker.push()).step == 1
            yield {"shard": alone.address, "chief": chief.address}
            assert client.status().state is not None
        # A chief may have a model forgotten, and the messages were a chief's, too.
        assert trainer.shard.call(ShardStatusRequest()).shard == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.timeout(120)
def test_no_random_message_causes_an_internal_error(addresses: dict[str, str], seed: int) -> None:
    filler, choice = Filler(seed), random.Random(seed)
    wrong: list[str] = []
    before = psutil.Process().memory_info().rss
    with contextlib.ExitStack() as stack:
        channels: dict[str, Any] = {name: stack.enter_context(grpc.insecure_channel(address)) for name, address in addresses.items()}
        for _ in range(NUM_CALLS):
            service, method = choice.choice(METHODS)
            channel = channels["chief" if service.endswith("ChiefService") else "shard"]
            messages = filler.messages(method)
            ended = outcome(channel.stream_stream(f"/{service}/{method.name}")(iter(messages), timeout=0.5))  # what waits, waits
            # A random boot id is another host's, and it is told so.
            is_elsewhere = method.name == "ShareMemory" and "you run on another host" in ended.text
            if not is_elsewhere and ended.code in (
                grpc.StatusCode.INTERNAL,
                grpc.StatusCode.UNKNOWN,
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.UNIMPLEMENTED,
            ):
                wrong.append(f"{method.name}: {ended.code.name} {ended.text[:100]} to {messages!r}"[:2_000])
    assert not wrong, wrong
    assert psutil.Process().memory_info().rss < before + MAX_MORE_BYTES
