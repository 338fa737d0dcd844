"""The long-lived stream of a chief to a parameter server, through a raw channel and through the chief's link."""

import asyncio
import contextlib
import queue
import re
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import grpc
import pytest

from chief.shards.link import GrpcShardLink
from ps_protocol.errors import DeadlineExceeded, Unavailable
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ApplyRequest, PrepareRequest, RestoreRequest, ShardSettings, ShardSpec, ShardStatusRequest
from ps_protocol.rpc.channel import DEFAULT_ACCESS
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer
from ps_server.serving.calls import SERVICE
from ps_server.serving.streams import MAX_OF_CHIEFS, IdleStreams
from ps_server.shard.shard import ServedShard
from tests.support.chief.eras import fence
from tests.support.network.servers import both_ways, serving
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import RawShard
from tests.support.parameter_servers.serving import serving_shard
from tests.support.parameter_servers.shards import CHIEF, EPOCH, Trainer, layout_of, variable
from tests.support.waiting import wait_until

LAYOUT = layout_of(variable("w", (3,)))


class Commands:
    """One stream, with bytes both ways."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # Typed as anything: gRPC's types ask for those of the messages, and a call is an iterator, too.
        begin: Any = channel.stream_stream(f"/{SERVICE}/Command")
        self.call: Any = begin(iter(self._outgoing.get, None), timeout=30)

    def send(self, data: bytes) -> None:
        self._outgoing.put(data)

    def command(self, call: int, **command: Any) -> pb.CommandResponse:
        self.send(pb.CommandRequest(call=call, **command).SerializeToString())
        return pb.CommandResponse.FromString(next(self.call))

    def close(self) -> None:
        self._outgoing.put(None)


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    server = ParameterServer(ParameterServerConfig(index=0))
    server.start()
    try:
        yield server
    finally:
        server.stop(0.0)


@pytest.fixture
def trainer(server: ParameterServer) -> Iterator[Trainer]:
    with contextlib.closing(CommandedShard(server.address)) as shard:
        trainer = Trainer(shard, LAYOUT)
        trainer.create()
        yield trainer


@pytest.fixture
def commands(server: ParameterServer) -> Iterator[Commands]:
    with DEFAULT_ACCESS.open_channel(server.address) as channel:
        commands = Commands(channel)
        yield commands
        commands.close()


def request_of(trainer: Trainer, step: int) -> ApplyRequest:
    """A contribution of ones, staged, and the request to apply it."""
    header = trainer.header(step=step)
    trainer.push(header, trainer.arena(1.0))
    return ApplyRequest(fence=fence(EPOCH, CHIEF), step=step, contributors=(header.push_id,))


def linked(address: str, ask: Callable[[GrpcShardLink], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        link = GrpcShardLink(address, index=0, cluster="")
        try:
            return await ask(link)
        finally:
            await link.close()

    return asyncio.run(run())


def test_commands_are_carried_out_in_order_and_answered_by_number(trainer: Trainer, commands: Commands) -> None:
    apply = codec.encode(request_of(trainer, 0))
    prepared = commands.command(9, prepare=apply)
    assert (prepared.call, list(prepared.prepare.sums)) == (9, [3.0])
    applied = commands.command(4, apply=apply)
    assert (applied.call, applied.apply.step, applied.apply.repeated_request) == (4, 1, False)


def test_step_whose_answer_was_lost_is_applied_once(trainer: Trainer, server: ParameterServer, commands: Commands) -> None:
    apply = codec.encode(request_of(trainer, 0))
    commands.send(pb.CommandRequest(call=1, apply=apply).SerializeToString())
    wait_until(lambda: trainer.shard.call(ShardStatusRequest()).step == 1)
    commands.call.cancel()
    with DEFAULT_ACCESS.open_channel(server.address) as channel:
        again = Commands(channel)
        answer = again.command(1, apply=apply).apply
        again.close()
    assert (answer.step, answer.repeated_request) == (1, True)
    assert LAYOUT.view(trainer.read(1)[1], 0).tolist() == [-0.5] * 3


def test_a_server_whose_answer_to_a_command_is_no_message_is_reported_by_name() -> None:
    request = ApplyRequest(fence=fence(EPOCH, CHIEF), step=0, contributors=(PushId(0, 1, 1),))
    with serving(both_ways(SERVICE, Command=lambda requests, _: (b"\xff\xff" for _ in requests))) as address:
        for asked in (request, PrepareRequest(of=request)):
            ask = partial(GrpcShardLink.call, request=asked, timeout_s=10)
            with pytest.raises(Unavailable, match=r"^cannot understand ps 0 at 127.0.0.1:\d+: 2 bytes are not a CommandResponse"):
                linked(address, ask)


def test_a_servers_refusal_of_a_request_keeps_its_text(server: ParameterServer) -> None:
    settings = ShardSettings(fence=fence(EPOCH, CHIEF), version=1)
    spec = ShardSpec(epoch=EPOCH, shard=0, layout=LAYOUT, optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.1)))
    request = RestoreRequest(fence=settings.fence, spec=spec, tag="step-1", manifest_sha256="none", settings=settings)
    with pytest.raises(Unavailable, match=r"^manifest_sha256: "):
        linked(server.address, lambda link: link.call(request, timeout_s=10))


def test_a_chief_whose_command_is_no_message_is_reported_by_name(
    trainer: Trainer, commands: Commands, caplog: pytest.LogCaptureFixture
) -> None:
    commands.send(b"\xff\xff")
    with pytest.raises(grpc.RpcError, match="2 bytes are not a CommandRequest"):
        next(commands.call)
    (words,) = [record.getMessage() for record in caplog.records if "cannot understand" in record.getMessage()]
    assert re.match(r"cannot understand the chief at ipv4:127.0.0.1:\d+: 2 bytes are not a CommandRequest", words)


def test_error_is_the_answer_of_its_command_and_the_stream_continues(trainer: Trainer, commands: Commands) -> None:
    request = request_of(trainer, 0)
    ahead = codec.encode(request)
    ahead.step = 7
    refused = commands.command(1, apply=ahead)
    assert (refused.call, refused.error.reason) == (1, "STEP_MISMATCH")
    assert commands.command(2, prepare=pb.ApplyRequest()).error.reason == "MALFORMED_MESSAGE"
    assert commands.command(3).error.reason == "MALFORMED_MESSAGE"
    assert commands.command(4, apply=codec.encode(request)).apply.step == 1


def test_bytes_that_are_no_message_end_the_command_stream(trainer: Trainer, server: ParameterServer) -> None:
    with RawShard(server.address) as raw:
        outcome = raw.call("Command", b"\xff\xff")
    assert (outcome.code, outcome.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert trainer.read()[0] == 0


def test_silent_chief_is_not_cut_off_as_other_streams_are() -> None:
    store, idle_streams = ServedShard(index=0, process_incarnation=1), IdleStreams(limit_s=0.05)
    idle_streams.start()
    with serving_shard(store, idle_streams) as address, RawShard(address) as raw, DEFAULT_ACCESS.open_channel(address) as channel:
        commands = Commands(channel)
        commands.command(1)
        silence: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        push = raw.begin_push(iter(silence.get, None))
        wait_until(lambda: push.code() is grpc.StatusCode.CANCELLED, what="the silent push was cut")
        assert commands.command(2).call == 2
        silence.put(None)
        commands.close()
    idle_streams.stop()


def test_a_chief_gets_in_and_stays_however_many_streams_there_are() -> None:
    store, idle_streams = ServedShard(index=0, process_incarnation=1), IdleStreams(max_open=0)
    with serving_shard(store, idle_streams) as address, contextlib.ExitStack() as stack:
        chief = Commands(stack.enter_context(DEFAULT_ACCESS.open_channel(address)))
        assert chief.command(1).call == 1
        for _ in range(2 * MAX_OF_CHIEFS):
            other = Commands(stack.enter_context(DEFAULT_ACCESS.open_channel(address)))
            assert other.command(2).call == 2
            assert chief.command(3).call == 3, "of chiefs' streams, those are ended that were used longest ago"
        assert idle_streams.num_streams <= MAX_OF_CHIEFS
        with RawShard(address) as raw:
            assert raw.call("Push", b"").code is grpc.StatusCode.RESOURCE_EXHAUSTED
        chief.close()


def test_link_repeats_a_step_on_a_new_stream_when_the_server_came_back(trainer: Trainer, server: ParameterServer) -> None:
    request = request_of(trainer, 0)

    async def twice(link: GrpcShardLink) -> tuple[bool, bool]:
        first = await link.call(request, timeout_s=10)
        link._commands._cut()
        wait_until(lambda: link._commands._stream is None, what="the stream has ended")
        return first.repeated_request, (await link.call(request, timeout_s=10)).repeated_request

    assert linked(server.address, twice) == (False, True)


def _cut(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    next(requests)
    return iter(())


def _silent(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from (b"" for _ in requests if False)


@pytest.mark.parametrize(("behaviour", "timeout_s", "error"), [(_cut, 10.0, Unavailable), (_silent, 0.2, DeadlineExceeded)])
def test_link_tells_a_stream_that_breaks_from_one_that_is_silent(behaviour: Any, timeout_s: float, error: type[Exception]) -> None:
    request = ApplyRequest(fence=fence(EPOCH, CHIEF), step=0, contributors=())
    handler = grpc.method_handlers_generic_handler(SERVICE, {"Command": grpc.stream_stream_rpc_method_handler(behaviour)})
    with serving(handler) as address, pytest.raises(error):
        linked(address, lambda link: link.call(request, timeout_s=timeout_s))
