"""What a parameter server answers to input that no client of ours would send, and that it goes on serving afterwards."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from ps_protocol import codec_shard
from ps_protocol.errors import StepGone
from ps_protocol.layout import Layout, aligned_bytes
from ps_protocol.segments import Segments
from ps_protocol.shard import PushReply, PushResult
from ps_protocol.shard_client import GrpcShard
from ps_protocol.v1 import handshake_service_pb2, tensor_pb2
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.config import ParameterServerConfig
from ps_server.idle_streams import IdleStreams
from ps_server.service import ParameterService, parameter_service_handler
from ps_server.store import ParameterStore
from tests.contract.shards import CHIEF, EPOCH, MIXED, Trainer, layout_of, open_server, variable
from tests.waiting import wait_until
from tests.wire.raw_shard import Outcome, RawShard, create_stream, frame, outcome, push_stream
from tests.wire.servers import serving

CODE = grpc.StatusCode
HALF = MIXED.nbytes // 2


@dataclass
class Server:
    """A parameter server with a model, called rightly by `trainer` and wrongly by `raw`."""

    raw: RawShard
    trainer: Trainer

    @property
    def step(self) -> int:
        step = self.trainer.shard.status().step
        assert step is not None
        return step

    def apply_one(self) -> None:
        assert self.trainer.train(self.step).repeated_request is False

    def push(self, *frames: tensor_pb2.ArenaFrame, **changes: Any) -> Outcome:
        header = self.trainer.header(**{"step": self.step, **changes})
        return self.raw.call("PushGradients", *push_stream(header, *frames))

    def push_header(self, **changes: object) -> Outcome:
        header = codec_shard.encode_push_header(self.trainer.header(step=self.step))
        header.MergeFrom(pb.PushHeader(**changes))  # type: ignore[arg-type]
        return self.raw.call("PushGradients", *push_stream(header, frame(0, bytes(MIXED.nbytes))))

    def create(self, spec: pb.ShardSpec, *frames: tensor_pb2.ArenaFrame) -> Outcome:
        return self.raw.call("CreateVariables", *create_stream(spec, *frames))

    def create_variable(self, **changes: object) -> Outcome:
        fields = {"name": "w", "data_type": tensor_pb2.DATA_TYPE_FLOAT32, "shape": [5, 7], **changes}
        spec = self.encoded_spec()
        del spec.slices[1:]
        spec.slices[0].variable.CopyFrom(tensor_pb2.VariableSpec(**fields))  # type: ignore[arg-type]
        return self.create(spec)

    def create_optimizer(self, **changes: object) -> Outcome:
        rate = tensor_pb2.LearningRateSchedule(name="constant", arguments={"value": 0.1})
        spec = self.encoded_spec()
        spec.optimizer.CopyFrom(tensor_pb2.OptimizerSpec(**{"name": "sgd", "learning_rate": rate, **changes}))  # type: ignore[arg-type]
        return self.create(spec)

    def encoded_spec(self, **changes: int) -> pb.ShardSpec:
        return codec_shard.encode_shard_spec(self.trainer.spec(**changes))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with open_server(ParameterServerConfig(index=0, cluster="job-a")) as running, RawShard(running.address) as raw:
        with contextlib.closing(GrpcShard(running.address)) as shard:
            trainer = Trainer(shard)
            trainer.create()
            trainer.train(0)
            yield Server(raw, trainer)


def _read(server: Server, **fields: object) -> Outcome:
    request = {"epoch": EPOCH, "layout_hash": MIXED.hash, **fields}
    return server.raw.call("ReadVariables", pb.ReadVariablesRequest(**request).SerializeToString())  # type: ignore[arg-type]


def _apply(server: Server, **fields: object) -> Outcome:
    push_id = tensor_pb2.PushId(worker=77, incarnation=1, sequence=1)
    request = {"epoch": EPOCH, "chief_incarnation": CHIEF, "step": server.step, "contributors": [push_id], **fields}
    return server.raw.call("ApplyStep", pb.ApplyStepRequest(**request).SerializeToString())  # type: ignore[arg-type]


def _adoption_from_nowhere(server: Server) -> Outcome:
    request = pb.AdoptShardRequest(epoch=EPOCH, chief_incarnation=CHIEF + 1, chief_address="somewhere\n")
    return server.raw.call("AdoptShard", request.SerializeToString())


def _push_messages(server: Server, *messages: pb.PushGradientsRequest) -> Outcome:
    return server.raw.call("PushGradients", *(message.SerializeToString() for message in messages))


def _header(server: Server) -> pb.PushHeader:
    return codec_shard.encode_push_header(server.trainer.header(step=server.step))


Row = tuple[str, Callable[[Server], Outcome], grpc.StatusCode, str, str]
INVALID, FAILED = CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION
WHOLE = frame(0, bytes(MIXED.nbytes))

# Case, call, status, reason, what the text contains.
ROWS: list[Row] = [
    ("unknown method", lambda s: s.raw.call("Nothing", b""), CODE.UNIMPLEMENTED, "", "Method not found"),
    ("message beyond the limit", lambda s: s.raw.call("PushGradients", bytes(17 << 20)), CODE.RESOURCE_EXHAUSTED, "", "larger than max"),
    (
        "compressed message",
        lambda s: s.raw.call("AdoptShard", bytes(10_000), compression=grpc.Compression.Gzip),
        CODE.UNIMPLEMENTED,
        "",
        "gzip",
    ),
    # Handshake
    (
        "other major",
        lambda s: s.raw.handshake(version=handshake_service_pb2.ProtocolVersion(major=1, minor=0)),
        FAILED,
        "PROTOCOL_MISMATCH",
        "client speaks protocol 1.x, server 2.x",
    ),
    ("other cluster", lambda s: s.raw.handshake(cluster="job-b"), FAILED, "WRONG_CLUSTER", "cluster 'job-a', not 'job-b'"),
    ("other role", lambda s: s.raw.handshake(expected_role="ROLE_CHIEF"), FAILED, "WRONG_ROLE", "this is ps 0, not the chief"),
    ("other index", lambda s: s.raw.handshake(expected_index=3), FAILED, "WRONG_ROLE", "this is ps 0, not ps 3"),
    # Epochs and chiefs
    ("old epoch", lambda s: s.push(WHOLE, epoch=EPOCH - 1), CODE.ABORTED, "EPOCH_MISMATCH", f"cluster epoch is {EPOCH}, you have epoch"),
    ("read of an old epoch", lambda s: _read(s, epoch=1), CODE.ABORTED, "EPOCH_MISMATCH", "reconnect"),
    ("old chief", lambda s: _apply(s, chief_incarnation=1), CODE.ABORTED, "SUPERSEDED", "chief incarnation 2 has adopted it"),
    ("chief at no address", _adoption_from_nowhere, INVALID, "INVALID_SPEC", "want host:port or unix:/path"),
    ("adoption by nobody", lambda s: s.raw.call("AdoptShard", b""), INVALID, "INVALID_SPEC", "want both >= 1"),
    # Specifications
    ("no data type", lambda s: s.create_variable(data_type=0), INVALID, "INVALID_SPEC", "dtype 0 unknown; want one of float32, float64"),
    ("unknown data type", lambda s: s.create_variable(data_type=99), INVALID, "INVALID_SPEC", "slices[0]: variable 'w': dtype 99 unknown"),
    ("negative extent", lambda s: s.create_variable(shape=[2, -3]), INVALID, "INVALID_SPEC", "shape[1] = -3"),
    ("rank 65", lambda s: s.create_variable(shape=[1] * 65), INVALID, "INVALID_SPEC", "rank 65, want <= 32"),
    ("overflowing shape", lambda s: s.create_variable(shape=[4194305] * 6), INVALID, "INVALID_SPEC", "is too large"),
    ("huge variable", lambda s: s.create_variable(shape=[1 << 40]), CODE.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED", "limit"),
    ("empty name", lambda s: s.create_variable(name=""), INVALID, "INVALID_SPEC", "name is empty"),
    ("long name", lambda s: s.create_variable(name="x" * 300), INVALID, "INVALID_SPEC", "300 bytes, want <= 256"),
    ("control character", lambda s: s.create_variable(name="a\x1b[2J\n"), INVALID, "INVALID_SPEC", "control character"),
    ("rows beyond the variable", lambda s: s.create_variable(shape=[4]), INVALID, "INVALID_SPEC", "of axis 0, want rows within 0 to 4"),
    ("another layout hash", lambda s: s.create_variable(), FAILED, "LAYOUT_MISMATCH", "the server's is"),
    ("unknown optimizer", lambda s: s.create_optimizer(name="adamm"), INVALID, "INVALID_SPEC", "did you mean 'adam'?"),
    (
        "unknown hyper-parameter",
        lambda s: s.create_optimizer(name="momentum", hyperparameters={"momentun": 0.9}),
        INVALID,
        "INVALID_SPEC",
        "did you mean 'momentum'?",
    ),
    (
        "hyper-parameter nan",
        lambda s: s.create_optimizer(name="momentum", hyperparameters={"momentum": float("nan")}),
        INVALID,
        "INVALID_SPEC",
        "momentum = nan",
    ),
    (
        "negative learning rate",
        lambda s: s.create_optimizer(learning_rate=tensor_pb2.LearningRateSchedule(name="constant", arguments={"value": -1.0})),
        INVALID,
        "INVALID_SPEC",
        "learning_rate = -1.0, want >= 0",
    ),
    ("no optimizer", lambda s: s.create(pb.ShardSpec(epoch=EPOCH)), INVALID, "MALFORMED_MESSAGE", "optimizer is missing"),
    ("another shard", lambda s: s.create(s.encoded_spec(shard=2)), FAILED, "WRONG_ROLE", "this is ps 0, not ps 2"),
    ("another model", lambda s: s.create_optimizer(name="adam"), CODE.ALREADY_EXISTS, "VARIABLE_EXISTS", "the optimizer is"),
    # Steps and push ids
    ("step ahead", lambda s: s.push(WHOLE, step=s.step + 2), FAILED, "STEP_AHEAD", "is ahead of global_step"),
    ("negative step", lambda s: s.push_header(step=-1), INVALID, "INVALID_SPEC", "local_step: got -1, want 0 to 2^62"),
    ("step beyond 2^62", lambda s: s.push_header(step=(1 << 62) + 1), INVALID, "INVALID_SPEC", "want 0 to 2^62"),
    ("push id again", lambda s: s.push(WHOLE, sequence=s.trainer.last_sequence()), INVALID, "PUSH_ID_REUSED", "and came again for step"),
    ("layout of another model", lambda s: s.push_header(layout_hash="x"), FAILED, "LAYOUT_MISMATCH", "you have 'x'"),
    ("read of a step gone", lambda s: _read(s, step=0) if s.step > 1 else _read(s, step=-5), FAILED, "STEP_GONE", "read a later one"),
    ("read of a step to come", lambda s: _read(s, step=1 << 40), FAILED, "STEP_NOT_READY", "is not there yet"),
    ("read with another layout", lambda s: _read(s, layout_hash=""), FAILED, "LAYOUT_MISMATCH", "ask the chief for the model"),
    ("apply of nobody", lambda s: _apply(s, contributors=[]), INVALID, "MALFORMED_MESSAGE", "no contributors; name at least one"),
    (
        "apply of what is not staged",
        lambda s: _apply(s),
        FAILED,
        "CONTRIBUTION_MISSING",
        "1 of 1 contributions are not staged here: 77/1/1",
    ),
    ("apply of a step to come", lambda s: _apply(s, step=1 << 40), FAILED, "STEP_MISMATCH", "is not the one to apply"),
    ("apply of a negative step", lambda s: _apply(s, step=-1), FAILED, "STEP_MISMATCH", "is not the one to apply"),
    (
        "push without an id",
        lambda s: s.raw.call("PushGradients", *push_stream(pb.PushHeader(epoch=EPOCH, layout_hash=MIXED.hash), WHOLE)),
        INVALID,
        "MALFORMED_MESSAGE",
        "push_id is missing",
    ),
    (
        "incarnation 0",
        lambda s: s.raw.call("PushGradients", *push_stream(pb.PushHeader(epoch=EPOCH, push_id=tensor_pb2.PushId(sequence=1)), WHOLE)),
        INVALID,
        "MALFORMED_MESSAGE",
        "want both >= 1",
    ),
    (
        "slot that there is not",
        lambda s: s.raw.call("ReadSlot", pb.ReadSlotRequest(epoch=EPOCH, name="vélo\n", layout_hash=MIXED.hash).SerializeToString()),
        CODE.NOT_FOUND,
        "SLOT_NOT_FOUND",
        "has no slot",
    ),
    # Streams
    ("no message", lambda s: s.raw.call("PushGradients"), INVALID, "TRUNCATED_STREAM", "ended before its first PushGradientsRequest"),
    ("empty message", lambda s: s.raw.call("PushGradients", b""), INVALID, "MALFORMED_MESSAGE", "has no header; begin with it"),
    (
        "frame before the header",
        lambda s: _push_messages(s, pb.PushGradientsRequest(frame=WHOLE), pb.PushGradientsRequest(header=_header(s))),
        INVALID,
        "MALFORMED_MESSAGE",
        "has no header",
    ),
    (
        "header twice",
        lambda s: _push_messages(s, *[pb.PushGradientsRequest(header=_header(s))] * 2),
        INVALID,
        "MALFORMED_MESSAGE",
        "a header came again",
    ),
    ("header alone", lambda s: s.push(), INVALID, "TRUNCATED_STREAM", f"0 of {MIXED.nbytes} bytes received; nothing was changed"),
    ("stream ends early", lambda s: s.push(frame(0, bytes(HALF))), INVALID, "TRUNCATED_STREAM", f"{HALF} of {MIXED.nbytes} bytes received"),
    ("gap", lambda s: s.push(frame(0, bytes(HALF)), frame(HALF + 64, bytes(64))), INVALID, "FRAME_OUT_OF_ORDER", f"expected {HALF}"),
    ("overlap", lambda s: s.push(frame(0, bytes(HALF)), frame(HALF - 64, bytes(64))), INVALID, "FRAME_OUT_OF_ORDER", f"expected {HALF}"),
    ("beyond the end", lambda s: s.push(frame(0, bytes(MIXED.nbytes + 64))), INVALID, "FRAME_OUT_OF_ORDER", "ends beyond the arena's"),
    ("one byte too many", lambda s: s.push(WHOLE, frame(MIXED.nbytes, b"x")), INVALID, "FRAME_OUT_OF_ORDER", "ends beyond the arena's"),
    ("offset of 2^64 - 1", lambda s: s.push(frame((1 << 64) - 1, b"x")), INVALID, "FRAME_OUT_OF_ORDER", "expected 0"),
    # Nothing is wrong with these
    ("one byte at a time", lambda s: s.push(*(frame(i, b"\0") for i in range(MIXED.nbytes))), CODE.OK, "", ""),
    ("empty frames", lambda s: s.push(frame(0, b""), WHOLE, frame(MIXED.nbytes, b"")), CODE.OK, "", ""),
    ("stale", lambda s: s.push(WHOLE, step=s.step - 1, worker=9), CODE.OK, "", ""),
    ("the same model again", lambda s: s.create(s.encoded_spec()), CODE.OK, "", ""),
    (
        "client of a newer minor",
        lambda s: s.raw.handshake(version=handshake_service_pb2.ProtocolVersion(major=2, minor=9)),
        CODE.OK,
        "",
        "",
    ),
    ("unknown field", lambda s: s.raw.call("GetShardStatus", b"\xf8\x07\x01"), CODE.OK, "", ""),
]


def _no_protobuf(method: str) -> Row:
    return f"no protobuf for {method}", lambda s: s.raw.call(method, b"\xff" * 4), INVALID, "MALFORMED_MESSAGE", "send what the .proto"


# These answer within the stream; see test_standing_pushes and test_standing_variables.
STANDING = {"StreamPushes", "StreamVariables"}
ROWS += [_no_protobuf(method) for method in pb.DESCRIPTOR.services_by_name["ParameterService"].methods_by_name if method not in STANDING]


@pytest.mark.parametrize(("case", "call", "code", "reason", "text"), ROWS, ids=[row[0] for row in ROWS])
def test_bad_input_is_answered_and_harms_nobody(
    server: Server, case: str, call: Callable[[Server], Outcome], code: grpc.StatusCode, reason: str, text: str
) -> None:
    server.apply_one()
    allocated, num_staged = server.trainer.shard.status().allocated_bytes, server.trainer.shard.status().num_staged
    ended = call(server)
    assert (ended.code, ended.reason) == (code, reason), ended.text
    assert text in ended.text
    status = server.trainer.shard.status()
    assert status.allocated_bytes == allocated
    assert status.num_staged == num_staged + (case in ("one byte at a time", "empty frames"))
    server.apply_one()


@pytest.fixture
def fresh() -> Iterator[Server]:
    with open_server(ParameterServerConfig(index=0)) as running, RawShard(running.address) as raw:
        with contextlib.closing(GrpcShard(running.address)) as shard:
            trainer = Trainer(shard)
            trainer.adopt()
            yield Server(raw, trainer)


def test_push_before_initialisation_is_told_what_is_missing(fresh: Server) -> None:
    ended = fresh.raw.call("PushGradients", *push_stream(fresh.trainer.header(), WHOLE))
    assert (ended.code, ended.reason) == (FAILED, "NOT_INITIALIZED")
    assert "waiting for a worker to initialise the model" in ended.text


@pytest.mark.parametrize(
    ("frames", "reason"),
    [((), "TRUNCATED_STREAM"), ((frame(0, bytes(HALF)),), "TRUNCATED_STREAM"), ((frame(64, bytes(64)),), "FRAME_OUT_OF_ORDER")],
    ids=["no values", "half of the values", "a gap"],
)
def test_creation_that_is_not_whole_creates_nothing(fresh: Server, frames: tuple[tensor_pb2.ArenaFrame, ...], reason: str) -> None:
    assert fresh.create(fresh.encoded_spec(), *frames).reason == reason
    assert fresh.trainer.shard.status().allocated_bytes == 0
    assert fresh.trainer.create()


def test_model_beyond_the_memory_is_refused_before_it_is_allocated(fresh: Server) -> None:
    layout = layout_of(*(variable(f"v{index}", (1 << 34,)) for index in range(64)))
    ended = fresh.create(codec_shard.encode_shard_spec(fresh.trainer.spec(layout)))
    assert (ended.code, ended.reason) == (CODE.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
    assert "needs 8.0 TiB" in ended.text and "--max-memory-bytes" in ended.text
    assert fresh.trainer.create()


def test_any_values_of_no_elements_are_fine(fresh: Server) -> None:
    trainer = Trainer(fresh.trainer.shard, layout_of(variable("none", (0, 3))))
    assert trainer.create()
    assert trainer.train(0).step == 1


def test_scalar_is_not_a_vector_of_one(fresh: Server) -> None:
    assert Trainer(fresh.trainer.shard, layout_of(variable("scale"))).create()
    ended = fresh.create(codec_shard.encode_shard_spec(fresh.trainer.spec(layout_of(variable("scale", (1,))))))
    assert (ended.code, ended.reason) == (CODE.ALREADY_EXISTS, "VARIABLE_EXISTS")
    assert "'scale' with shape () float32 exists, asked for is variable 'scale' with shape (1,) float32" in ended.text


# Exactly once


def test_push_sent_twice_counts_once(server: Server) -> None:
    server.apply_one()
    before = server.trainer.read()[1]
    header = server.trainer.header(step=server.step)
    messages = push_stream(header, frame(0, server.trainer.arena(1.0).tobytes()))
    replies = [_push_reply(server.raw.call("PushGradients", *messages)) for _ in range(2)]
    assert [reply.result for reply in replies] == [PushResult.STAGED, PushResult.DUPLICATE]
    server.trainer.apply(header.push_id, step=server.step)
    assert _push_reply(server.raw.call("PushGradients", *messages)).result is PushResult.DUPLICATE
    _assert_moved(server, before, by=-0.5)


def test_push_cut_off_half_way_has_no_effect_and_can_be_repeated(server: Server) -> None:
    server.apply_one()
    before = server.trainer.read()[1]
    num_staged = server.trainer.shard.status().num_staged
    header = server.trainer.header(step=server.step)
    content = server.trainer.arena(1.0).tobytes()
    _cut_off(server, push_stream(header, frame(0, content[:HALF])))
    assert server.trainer.shard.status().num_staged == num_staged
    assert server.trainer.push(header, server.trainer.arena(1.0)).result is PushResult.STAGED
    server.trainer.apply(header.push_id, step=server.step)
    _assert_moved(server, before, by=-0.5)


def test_apply_repeated_has_its_effect_once(server: Server) -> None:
    server.apply_one()
    before, step = server.trainer.read()[1], server.step
    header = server.trainer.header(step=step)
    server.trainer.push(header)
    request = pb.ApplyStepRequest(epoch=EPOCH, chief_incarnation=CHIEF, step=step)
    push_id = header.push_id
    request.contributors.add(worker=push_id.worker, incarnation=push_id.incarnation, sequence=push_id.sequence)
    replies = [pb.ApplyStepResponse.FromString(server.raw.call("ApplyStep", request.SerializeToString()).messages[0]) for _ in range(3)]
    assert [(reply.step, reply.repeated_request) for reply in replies] == [(step + 1, repeated) for repeated in (False, True, True)]
    _assert_moved(server, before, by=-0.5)


def test_streams_that_are_cancelled_leave_nothing_behind(server: Server) -> None:
    server.apply_one()
    allocated, num_threads = server.trainer.shard.status().allocated_bytes, threading.active_count()
    for _ in range(20):
        _cut_off(server, push_stream(server.trainer.header(worker=5, step=server.step), frame(0, bytes(HALF))))
    assert server.trainer.shard.status().allocated_bytes <= allocated + MIXED.nbytes
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
    assert _push_reply(Outcome(CODE.OK, "", "", (call.result(),))).result is PushResult.STALE
    is_answered.set()


def test_reader_that_stops_in_the_middle_harms_nobody() -> None:
    layout = layout_of(variable("w", (1 << 22,)))
    with open_server(ParameterServerConfig(index=0)) as running, RawShard(running.address) as raw:
        with contextlib.closing(GrpcShard(running.address)) as shard:
            trainer = Trainer(shard, layout)
            trainer.create()
            message = pb.ReadVariablesRequest(epoch=EPOCH, layout_hash=layout.hash).SerializeToString()
            stopped = [raw.begin_read(message) for _ in range(5)]
            firsts = [next(call) for call in stopped]
            trainer.train(0)
            trainer.train(1)
            for call in stopped[1:]:
                call.cancel()
            # The first goes on. What it reads was overwritten, and it is told; or all of it was on its way before, which is as well.
            ended = outcome(stopped[0])
            if ended.code is not CODE.OK:
                assert (ended.code, ended.reason) == (FAILED, StepGone.reason)
            else:
                frames = [pb.ReadVariablesResponse.FromString(message).frame.data for message in (firsts[0], *ended.messages)]
                assert b"".join(frames) == bytes(layout.nbytes)
            assert trainer.read()[0] == 2


# Ends and defects


def test_idle_streams_are_cut() -> None:
    store, idle_streams = ParameterStore(index=0, process_incarnation=1), IdleStreams(limit_s=0.2)
    idle_streams.start()
    handler = parameter_service_handler(ParameterService(store, idle_streams=idle_streams, on_chief_call=lambda: None))
    layout = layout_of(variable("w", (1 << 24,)))
    with serving(handler) as address, RawShard(address) as raw, contextlib.closing(GrpcShard(address)) as shard:
        trainer = Trainer(shard, layout)
        trainer.create()
        is_over = threading.Event()

        def silent() -> Iterator[bytes]:
            yield push_stream(trainer.header(5))[0]
            is_over.wait(20)

        push = raw.begin_push(silent())
        read = raw.begin_read(pb.ReadVariablesRequest(epoch=EPOCH, layout_hash=layout.hash).SerializeToString())
        next(read)
        wait_until(push.done, what="the silent push was cut")
        is_over.set()
        assert push.code() is CODE.CANCELLED
        # A reader that does not read is cut as well, unless all of it was on its way already.
        wait_until(lambda: not idle_streams.num_streams, what="the reader was cut")
        assert outcome(read).code in (CODE.CANCELLED, CODE.OK)
        assert trainer.train(0).step == 1
    idle_streams.stop()


def test_shard_that_drains_says_so(fresh: Server) -> None:
    fresh.trainer.create()
    fresh.trainer.shard.shutdown(epoch=EPOCH, reason="training is finished")
    ended = fresh.raw.call("PushGradients", *push_stream(fresh.trainer.header(), WHOLE))
    assert (ended.code, ended.reason) == (CODE.UNAVAILABLE, "SHUTTING_DOWN")
    assert ended.text == "ps 0 is shutting down: training is finished"


def test_defect_is_answered_with_a_number_that_is_in_the_log(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defective(store: ParameterStore) -> None:
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(ParameterStore, "status", defective)
        ended = server.raw.call("GetShardStatus", b"")
    assert (ended.code, ended.reason) == (CODE.INTERNAL, "INTERNAL")
    assert ended.text.startswith("internal error ") and ended.text.endswith(" (see the log of ps 0)")
    assert "secret" not in ended.text
    number = ended.text.split()[2]
    assert sum(number in record.getMessage() for record in caplog.records) == 1
    server.apply_one()


# Size


@pytest.mark.timeout(120)
def test_256_mib_travel_there_and_back() -> None:
    layout = layout_of(variable("w", (1 << 26,)))
    values = aligned_bytes(layout.nbytes)
    values.view(np.uint32)[:] = np.arange(1 << 26, dtype=np.uint32) & 0x3F7FFFFF
    with open_server(ParameterServerConfig(index=0)) as running, contextlib.closing(GrpcShard(running.address)) as shard:
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


def _push_reply(ended: Outcome) -> PushReply:
    assert ended.code is CODE.OK, ended.text
    return codec_shard.decode_push_reply(pb.PushGradientsResponse.FromString(ended.messages[0]))


def _cut_off(server: Server, messages: list[bytes]) -> None:
    """Sends the messages, waits until the server has them all and more, and cancels."""
    are_sent, may_end = threading.Event(), threading.Event()

    def stream() -> Iterator[bytes]:
        yield from messages
        are_sent.set()
        may_end.wait(20)

    call = server.raw.begin_push(stream())
    assert are_sent.wait(20)
    call.cancel()
    may_end.set()
    assert call.code() is CODE.CANCELLED


def _assert_moved(server: Server, before: object, *, by: float) -> None:
    layout: Layout = server.trainer.layout
    after = server.trainer.read()[1]
    for index in range(len(layout.slices)):
        np.testing.assert_array_equal(layout.view(after, index), layout.view(np.asarray(before), index) + by)
