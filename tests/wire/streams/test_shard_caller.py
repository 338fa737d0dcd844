"""The fast path of steps to one server: it blocks no caller, reports each step once, and an error ends no other step."""

import asyncio
import contextlib
import queue
from collections.abc import Callable, Iterator

import grpc
import pytest

from chief.shards import link as link_module
from chief.shards.link import GrpcShardLink
from ps_protocol.roles.shard import ApplyRequest
from ps_protocol.rpc import client_stream, commands
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.serving.calls import SERVICE
from tests.support.chief.eras import fence
from tests.support.network.servers import serving

Handler = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


@pytest.fixture(params=[client_stream._DirectStream, client_stream._FedStream], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "open_stream", request.param)


@contextlib.contextmanager
def link_to(handler: Handler) -> Iterator[GrpcShardLink]:
    generic = grpc.method_handlers_generic_handler(SERVICE, {"Command": grpc.stream_stream_rpc_method_handler(handler)})
    with serving(generic) as address, link_at(address) as link:
        yield link


@contextlib.contextmanager
def link_at(address: str) -> Iterator[GrpcShardLink]:
    link = GrpcShardLink(address, index=0, cluster="")
    try:
        yield link
    finally:
        asyncio.run(link.close())


def step(number: int) -> ApplyRequest:
    return ApplyRequest(fence=fence(1, 1), step=number, contributors=())


def answer(data: bytes, *, is_error: bool = False) -> bytes:
    call = pb.CommandRequest.FromString(data).call
    said = pb.CommandResponse(call=call, error=pb.CommandResponse().error) if is_error else pb.CommandResponse(call=call)
    return said.SerializeToString()


def reported(link: GrpcShardLink, *numbers: int) -> list[bool]:
    """Begins steps, all before any is answered, and returns the reports in their order."""
    reports: queue.SimpleQueue[bool] = queue.SimpleQueue()
    for number in numbers:
        link.begin(step(number), reports.put)
    return [reports.get(timeout=20) for _ in numbers]


def test_steps_are_reported_one_by_one_on_one_stream() -> None:
    opened: list[object] = []

    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        opened.append(context)
        yield from map(answer, requests)

    with link_to(serve) as link:
        assert [reported(link, number) for number in range(10)] == [[True]] * 10
        assert reported(link, 10, 11, 12) == [True] * 3
    assert len(opened) == 1


def test_a_step_that_a_server_refuses_is_not_applied_and_the_next_one_is() -> None:
    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for number, data in enumerate(requests):
            yield answer(data, is_error=number == 0)

    with link_to(serve) as link:
        assert [reported(link, number) for number in range(2)] == [[False], [True]]


def test_stream_that_breaks_gives_up_its_steps_and_the_next_one_opens_another() -> None:
    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield answer(next(requests))
        next(requests)
        context.abort(grpc.StatusCode.UNAVAILABLE, "broken")

    with link_to(serve) as link:
        assert [reported(link, number) for number in range(4)] == [[True], [False], [True], [False]]


def test_server_that_does_not_answer_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_TIMEOUT_S", 0.05)

    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for data in requests:
            if is_silent.empty():
                yield answer(data)

    is_silent: queue.SimpleQueue[None] = queue.SimpleQueue()
    with link_to(serve) as link:
        is_silent.put(None)
        assert reported(link, 0) == [False]
        is_silent.get()
        monkeypatch.setattr(link_module, "_TIMEOUT_S", 20.0)
        assert reported(link, 1) == [True]


def test_closing_ends_calls_under_way_and_takes_no_more() -> None:
    def serve(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for _ in requests:
            heard.put(None)
        yield from ()

    heard: queue.SimpleQueue[None] = queue.SimpleQueue()
    reports: queue.SimpleQueue[bool] = queue.SimpleQueue()
    generic = grpc.method_handlers_generic_handler(SERVICE, {"Command": grpc.stream_stream_rpc_method_handler(serve)})
    with serving(generic) as address, link_at(address) as link:
        link.begin(step(0), reports.put)
        heard.get(timeout=20)
        asyncio.run(link.close())
        assert not reports.get(timeout=20)
        link.begin(step(1), reports.put)
        assert not reports.get(timeout=20)


def test_an_address_without_a_listener_is_reported() -> None:
    with link_at("127.0.0.1:1") as link:
        assert reported(link, 0) == [False]
