"""Streams and calls that are repeated, cut off or left open: each has its effect once or not at all, and leaves nothing behind."""

import contextlib
import threading
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from ps_protocol.errors import StepGone
from ps_protocol.model.layout import Segments, aligned_bytes
from ps_protocol.roles.shard import PushResult, ShardStatusRequest
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.config import ParameterServerConfig
from ps_server.serving.streams import IdleStreams
from ps_server.shard.shard import ServedShard
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import (
    HALF,
    Outcome,
    RawShard,
    Server,
    assert_moved,
    cut_push_off,
    frame,
    outcome,
    push_reply,
    push_stream,
    trained_shard,
)
from tests.support.parameter_servers.serving import serving_shard
from tests.support.parameter_servers.shards import EPOCH, MIXED, Trainer, layout_of, open_server, variable
from tests.support.waiting import wait_until

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with trained_shard() as running:
        yield running


def test_push_cut_off_half_way_has_no_effect_and_can_be_repeated(server: Server) -> None:
    server.apply_one()
    before = server.trainer.read()[1]
    num_staged = server.trainer.shard.call(ShardStatusRequest()).report.num_staged
    header = server.trainer.header(step=server.step)
    content = server.trainer.arena(1.0).tobytes()
    cut_push_off(server, push_stream(header, frame(0, content[:HALF])))
    assert server.trainer.shard.call(ShardStatusRequest()).report.num_staged == num_staged
    assert server.trainer.push(header, server.trainer.arena(1.0)).result is PushResult.STAGED
    server.trainer.apply(header.push_id, step=server.step)
    assert_moved(server, before, by=-0.5)


def test_streams_that_are_cancelled_leave_nothing_behind(server: Server) -> None:
    server.apply_one()
    allocated, num_threads = server.trainer.shard.call(ShardStatusRequest()).report.allocated_bytes, threading.active_count()
    for _ in range(20):
        cut_push_off(server, push_stream(server.trainer.header(worker=5, step=server.step), frame(0, bytes(HALF))))
    assert server.trainer.shard.call(ShardStatusRequest()).report.allocated_bytes <= allocated + MIXED.nbytes
    # Threads of the server's pool stay; those of calls do not.
    wait_until(lambda: threading.active_count() <= num_threads + 3, what="the threads of the cancelled calls have ended")
    # Each would count towards the worker's limit, were it still open.
    assert server.trainer.push(server.trainer.header(worker=5, step=server.step)).result is PushResult.STAGED
    server.apply_one()


def test_push_that_is_not_wanted_is_answered_before_it_is_sent(server: Server) -> None:
    server.apply_one()
    is_answered = threading.Event()

    def endless() -> Iterator[bytes]:
        yield push_stream(server.trainer.header(worker=8, step=server.step - 1))[0]
        assert is_answered.wait(20)

    call = server.raw.begin_push(endless())
    assert push_reply(Outcome(CODE.OK, "", "", (next(call),))).result is PushResult.STALE
    is_answered.set()


def test_a_reader_that_stops_in_the_middle_delays_no_other() -> None:
    layout = layout_of(variable("w", (1 << 22,)))
    with open_server(ParameterServerConfig(index=0)) as running, RawShard(running.address) as raw:
        with contextlib.closing(CommandedShard(running.address)) as shard:
            trainer = Trainer(shard, layout)
            trainer.create()
            message = pb.ReadRequest(epoch=EPOCH, layout_hash=layout.hash).SerializeToString()
            stopped = [raw.begin_read(message) for _ in range(5)]
            firsts = [next(call) for call in stopped]
            trainer.train(0)
            trainer.train(1)
            for call in stopped[1:]:
                call.cancel()
            # The first continues. What it reads was overwritten, and it is told; or all of it was on its way before, which is as well.
            ended = outcome(stopped[0])
            assert ended.code is CODE.OK
            answers = [pb.ReadResponse.FromString(message) for message in (firsts[0], *ended.messages)]
            if answers[-1].header.HasField("error"):
                assert answers[-1].header.error.reason == StepGone.reason
            else:
                assert b"".join(answer.frame.data for answer in answers) == bytes(layout.nbytes)
            assert trainer.read()[0] == 2


@pytest.mark.shows("F29")
def test_streams_opened_and_cancelled_without_pause_hold_nothing(server: Server) -> None:
    """A caller opens and cancels streams as fast as it can, while a worker trains."""

    def num_threads() -> int:
        return sum(thread.name.startswith("rpc") for thread in threading.enumerate())

    read = pb.ReadRequest(epoch=EPOCH, layout_hash=MIXED.hash).SerializeToString()
    push = push_stream(server.trainer.header(7, step=server.step))[:1]
    server.apply_one()
    step, num_before = server.step, num_threads()
    num_staged = server.trainer.shard.call(ShardStatusRequest()).report.num_staged
    for number in range(500):
        reading, pushing = server.raw.begin_read(read), server.raw.begin_push(push)
        if number % 10 == 0:
            with contextlib.suppress(grpc.RpcError):  # more streams than one connection may have are refused
                next(reading)
        if number % 100 == 0:
            server.apply_one()
        reading.cancel()
        pushing.cancel()
    server.apply_one()
    assert server.step == step + 6
    assert server.trainer.shard.call(ShardStatusRequest()).report.num_staged == num_staged
    # Threads begin calls, a few at a time, and none stays with one.
    assert num_threads() <= num_before + 32


@pytest.mark.shows("F25")
def test_idle_streams_are_cut() -> None:
    store, idle_streams = ServedShard(index=0, process_incarnation=1), IdleStreams(limit_s=0.2)
    idle_streams.start()
    layout = layout_of(variable("w", (1 << 24,)))
    with (
        serving_shard(store, idle_streams) as address,
        RawShard(address) as raw,
        contextlib.closing(CommandedShard(address)) as shard,
    ):
        trainer = Trainer(shard, layout)
        trainer.create()
        is_over = threading.Event()

        def silent() -> Iterator[bytes]:
            yield push_stream(trainer.header(5))[0]
            is_over.wait(20)

        push = raw.begin_push(silent())
        read = raw.begin_read(pb.ReadRequest(epoch=EPOCH, layout_hash=layout.hash).SerializeToString())
        next(read)
        assert outcome(push).code is CODE.CANCELLED
        is_over.set()
        # A reader that does not read is cut as well, unless all of it was on its way already.
        wait_until(lambda: idle_streams.num_streams == 0, what="the reader was cut")
        assert outcome(read).code in (CODE.CANCELLED, CODE.OK)
        assert trainer.train(0).step == 1
    idle_streams.stop()


@pytest.mark.timeout(120)
def test_64_mib_travel_there_and_back() -> None:
    layout = layout_of(variable("w", (1 << 24,)))
    values = aligned_bytes(layout.nbytes)
    values.view(np.uint32)[:] = np.arange(1 << 24, dtype=np.uint32) & 0x3F7FFFFF
    with open_server(ParameterServerConfig(index=0)) as running, contextlib.closing(CommandedShard(running.address)) as shard:
        trainer = Trainer(shard, layout)
        trainer.adopt()
        assert shard.create_variables(trainer.spec(), Segments([values]))
        header = trainer.header()
        assert shard.push_gradients(header, Segments([values])).result is PushResult.STAGED
        trainer.apply(header.push_id)
        _, read = trainer.read(0)
        assert np.array_equal(read, values)
        _, read = trainer.read(1)
        expected = values.view(np.float32)
        expected -= np.float32(0.5) * expected
        assert np.array_equal(read.view(np.float32), expected)
