"""A large contribution, or variables, whose connection breaks in the middle: what has arrived is not sent again."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.encodings.gradients import GradientEncoder
from ps_protocol.errors import MalformedMessage, Unavailable
from ps_protocol.model.layout import Segments, aligned_bytes
from ps_protocol.process import waiting
from ps_protocol.roles.shard import PushReply, PushResult, ReadRequest, ShardStatusRequest
from ps_protocol.rpc.shard import GrpcShard
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.config import ParameterServerConfig
from tests.support.chief.running_chief import RunningChief, parameter_server
from tests.support.network.cutter import Cutter
from tests.support.network.tampering import Tampering
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import EPOCH, Trainer, layout_of, open_server, variable
from tests.support.waiting import wait_until

MIB = 1 << 20
LAYOUT = layout_of(variable("w", (8 * MIB,)))  # 32 MiB
CUT_AT = LAYOUT.nbytes * 7 // 8


@contextlib.contextmanager
def trained() -> Iterator[tuple[str, Trainer]]:
    with open_server(ParameterServerConfig(index=0)) as server, contextlib.closing(CommandedShard(server.address)) as shard:
        trainer = Trainer(shard, LAYOUT)
        trainer.create()
        yield server.address, trainer


@contextlib.contextmanager
def worker_at(address: str, **options: Any) -> Iterator[GrpcShard]:
    with contextlib.closing(GrpcShard(address, **options)) as worker:
        worker.handshake()
        yield worker


def repeated(call: Callable[[], Any]) -> Any:
    """What comes of a call that breaks off once, as the SDK repeats it."""
    with pytest.raises(Unavailable):
        call()
    return waiting.call(lambda left_s: call(), what="a transfer", timeout_s=20)


@pytest.mark.parametrize(
    ("encoding", "is_silent"),
    [
        pytest.param(FloatEncoding.AS_IS, False, id="both sides know"),
        pytest.param(FloatEncoding.AS_IS, True, id="the server does not know"),
        pytest.param(FloatEncoding.INT8_BLOCKS, False, id="int8"),
        pytest.param(FloatEncoding.TOP_K, False, id="top k"),
    ],
)
def test_a_contribution_goes_on_where_its_connection_broke(encoding: FloatEncoding, is_silent: bool) -> None:
    with trained() as (address, trainer):
        content, header = Segments([trainer.random(7)]), trainer.header()
        if encoding is not FloatEncoding.AS_IS:
            content = Segments([GradientEncoder(LAYOUT, encoding, fraction=0.5, feedback=0.0).encode(content)])
            header = replace(header, encoding=encoding, encoded_bytes=content.nbytes)
        cut_at = content.nbytes * 7 // 8
        with Cutter(address, cut_up_at=cut_at, is_silent=is_silent) as cutter, worker_at(cutter.address) as worker:
            reply: PushReply = repeated(lambda: worker.push_gradients(header, content))
            assert reply.result is PushResult.STAGED
            # What was on its way is sent again: of less, that may be nearly all.
            assert encoding is not FloatEncoding.AS_IS or cutter.num_up < content.nbytes + cut_at - MIB
        trainer.apply(header.push_id)
        found = trainer.read()[1]
        whole = replace(trainer.header(1, step=1), encoding=header.encoding, encoded_bytes=header.encoded_bytes)
        trainer.shard.push_gradients(whole, content)
        trainer.apply(whole.push_id, step=1)
        # The second step moves as much as the first one, from 0.
        np.testing.assert_array_equal(trainer.read()[1].view(np.float32), 2 * found.view(np.float32))


def test_another_contribution_begins_at_its_first_byte() -> None:
    with trained() as (address, trainer), Cutter(address, cut_up_at=CUT_AT) as cutter, worker_at(cutter.address) as worker:
        with pytest.raises(Unavailable):
            worker.push_gradients(trainer.header(), Segments([trainer.random(7)]))
        header = trainer.header()
        assert worker.push_gradients(header, Segments([trainer.arena(1.0)])).result is PushResult.STAGED
        assert cutter.num_up >= CUT_AT + LAYOUT.nbytes
        trainer.apply(header.push_id)
        assert set(trainer.read()[1].view(np.float32)) == {-0.5}


def test_what_has_arrived_goes_with_its_step() -> None:
    with trained() as (address, trainer), Cutter(address, cut_up_at=CUT_AT) as cutter, worker_at(cutter.address) as worker:

        def allocated() -> int:
            return trainer.shard.call(ShardStatusRequest()).report.allocated_bytes

        header = trainer.header(5)
        with pytest.raises(Unavailable):
            worker.push_gradients(header, Segments([trainer.random(7)]))
        for step in range(3):
            trainer.train(step)
        wait_until(lambda: allocated() <= 4 * LAYOUT.nbytes, what="the memory of the contribution is free")
        assert worker.push_gradients(header, Segments([trainer.random(7)])).result is PushResult.STALE


def test_a_server_that_claims_more_than_there_is_is_not_believed() -> None:
    def claim(method: str, answer: bytes, number: int) -> list[bytes]:
        if method != "Push" or not (reply := pb.PushResponse.FromString(answer)).HasField("received_bytes"):
            return [answer]
        reply.received_bytes = LAYOUT.nbytes + 1
        return [reply.SerializeToString()]

    with trained() as (address, trainer), Tampering(address, claim) as server, Cutter(server.address, cut_up_at=CUT_AT) as cutter:
        with worker_at(cutter.address) as worker, pytest.raises(MalformedMessage, match=rf"{LAYOUT.nbytes + 1} bytes of push"):
            header, content = trainer.header(), Segments([trainer.random(7)])
            repeated(lambda: worker.push_gradients(header, content))


@pytest.mark.parametrize("encoding", [FloatEncoding.AS_IS, FloatEncoding.BFLOAT16], ids=lambda one: one.name)
def test_variables_of_a_step_go_on_where_their_connection_broke(encoding: FloatEncoding) -> None:
    num_bytes = LAYOUT.nbytes if encoding is FloatEncoding.AS_IS else LAYOUT.nbytes // 2
    with trained() as (address, trainer):
        header = trainer.header()
        trainer.push(header, trainer.random(7))
        trainer.apply(header.push_id)
        with Cutter(address, cut_down_at=num_bytes * 7 // 8) as cutter, worker_at(cutter.address, variables_encoding=encoding) as worker:
            worker.know_layout(LAYOUT)
            memory = aligned_bytes(LAYOUT.nbytes)
            request = ReadRequest(epoch=EPOCH, step=1, layout_hash=LAYOUT.hash)
            assert repeated(lambda: worker.read(request, Segments([memory]))) == 1
            assert cutter.num_down < num_bytes + num_bytes * 7 // 8 - MIB
        with worker_at(address, variables_encoding=encoding) as worker:
            worker.know_layout(LAYOUT)
            whole = aligned_bytes(LAYOUT.nbytes)
            worker.read(request, Segments([whole]))
        np.testing.assert_array_equal(memory, whole)


def test_variables_that_broke_off_are_not_mistaken_for_what_was_expected_meanwhile() -> None:
    with trained() as (address, trainer):
        trainer.train(0)
        with Cutter(address, cut_down_at=CUT_AT) as cutter, worker_at(cutter.address) as worker:
            memory, request = aligned_bytes(LAYOUT.nbytes), ReadRequest(epoch=EPOCH, step=1, layout_hash=LAYOUT.hash)
            with pytest.raises(Unavailable):
                worker.read(request, Segments([memory]))
            # As another thread may do it.
            worker.expect(replace(request, step=0))
            assert waiting.call(lambda left_s: worker.read(request, Segments([memory])), what="a read", timeout_s=20) == 1
            np.testing.assert_array_equal(memory, trainer.read(1)[1])


def test_a_session_whose_connection_is_cut_trains_on_to_the_same_bits() -> None:
    first = {"w": np.zeros(2 * MIB, np.float32)}
    steps = [{"w": np.random.default_rng(seed).standard_normal(2 * MIB, np.float32)} for seed in range(3)]
    num_bytes = first["w"].nbytes

    def values_after(**cuts: Any) -> bytes:
        with parameter_server() as server, Cutter(server.address, **cuts) as cutter, RunningChief(cutter.address) as chief:
            with contextlib.closing(worker_client.connect(chief.address, timeout_s=60, transport="grpc")) as session:
                session.create_or_join(first, optimizer=worker_client.sgd(0.5), timeout_s=60)
                for gradients in steps:
                    assert session.step(gradients, timeout_s=60).is_accepted
                    values: bytes = session.read()["w"].tobytes()
                assert cutter.num_cuts == len(cuts)
                return values

    # In the first contribution, which follows the first values, and in a step that is read after it.
    assert values_after(cut_up_at=num_bytes * 15 // 8, cut_down_at=num_bytes * 15 // 8) == values_after()


def test_variables_that_are_asked_for_by_another_request_are_sent_whole() -> None:
    with trained() as (address, trainer):
        trainer.train(0)
        with Cutter(address, cut_down_at=CUT_AT) as cutter, worker_at(cutter.address) as worker:
            memory = aligned_bytes(LAYOUT.nbytes)
            with pytest.raises(Unavailable):
                worker.read(ReadRequest(epoch=EPOCH, step=1, layout_hash=LAYOUT.hash), Segments([memory]))
            memory[:] = 255  # its owner may have used it
            another = ReadRequest(epoch=EPOCH, step=1, layout_hash=LAYOUT.hash)
            assert waiting.call(lambda left_s: worker.read(another, Segments([memory])), what="a read", timeout_s=20) == 1
            np.testing.assert_array_equal(memory, trainer.read(1)[1])


def test_variables_of_another_process_are_sent_whole() -> None:
    """As after the loss of all servers, when another life of the cluster has come to a step of the same number."""
    with trained() as (address, trainer), trained() as (other, theirs), Cutter(address, cut_down_at=CUT_AT) as cutter:
        trainer.train(0, value=1.0)
        theirs.train(0, value=2.0)
        with worker_at(cutter.address) as worker:
            memory, request = aligned_bytes(LAYOUT.nbytes), ReadRequest(epoch=EPOCH, step=1, layout_hash=LAYOUT.hash)
            with pytest.raises(Unavailable):
                worker.read(request, Segments([memory]))
            cutter.lead_to(other)
            assert waiting.call(lambda left_s: worker.read(request, Segments([memory])), what="a read", timeout_s=20) == 1
        np.testing.assert_array_equal(memory, theirs.read(1)[1])
