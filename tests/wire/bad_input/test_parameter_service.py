"""Input that no client of ours would send: a parameter server refuses it and keeps serving."""

import logging
from collections.abc import Callable, Iterator

import grpc
import pytest

from ps_protocol.roles.shard import ShardStatusRequest
from ps_protocol.v1 import handshake_service_pb2, tensor_pb2
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.wire import codec
from ps_server.shard.shard import ServedShard
from tests.support.chief.eras import era, fence
from tests.support.parameter_servers.raw_shard import HALF, WHOLE, Outcome, Server, frame, push_stream, trained_shard
from tests.support.parameter_servers.shards import CHIEF, EPOCH, MIXED

CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with trained_shard() as running:
        yield running


def _apply(server: Server, **fields: object) -> Outcome:
    push_id = tensor_pb2.PushId(worker=77, incarnation=1, sequence=1)
    request = {"fence": codec.encode(fence(EPOCH, CHIEF)), "step": server.step, "contributors": [push_id], **fields}
    return server.raw.command(apply=pb.ApplyRequest(**request))


def _adoption_from_nowhere(server: Server) -> Outcome:
    request = pb.AdoptShardRequest(fence=codec.encode(fence(EPOCH, CHIEF + 1)), chief_address="somewhere\n")
    return server.raw.call("AdoptShard", request.SerializeToString())


NOBODYS = pb.AdoptShardRequest(fence=tensor_pb2.Fence()).SerializeToString()

FIRST, REST = frame(0, bytes(HALF)), bytes(MIXED.nbytes - HALF)
Row = tuple[str, Callable[[Server], Outcome], grpc.StatusCode, str, str]
INVALID, FAILED = CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION


# Case, call, status, reason, what the text contains.
def _without(spec: pb.ShardSpec, field: str) -> pb.ShardSpec:
    spec.ClearField(field)
    return spec


ROWS: list[Row] = [
    ("unknown method", lambda s: s.raw.call("Nothing", b""), CODE.UNIMPLEMENTED, "UNIMPLEMENTED", "no such method here"),
    (
        "compressed message",
        lambda s: s.raw.call("AdoptShard", bytes(10_000), compression=grpc.Compression.Gzip),
        CODE.UNIMPLEMENTED,
        "",
        "gzip",
    ),
    (
        "metadata beyond the limit",
        lambda s: s.raw.call("GetShardStatus", b"", metadata=(("x-large", "x" * 40_000),)),
        CODE.RESOURCE_EXHAUSTED,
        "",
        "metadata",
    ),
    ("deadline in the past", lambda s: s.raw.call("GetShardStatus", b"", timeout_s=-1.0), CODE.DEADLINE_EXCEEDED, "", ""),
    # Handshake
    (
        "other major",
        lambda s: s.raw.handshake(version=handshake_service_pb2.ProtocolVersion(major=1, minor=0)),
        FAILED,
        "PROTOCOL_MISMATCH",
        "client speaks protocol 1.x, server 4.x",
    ),
    # Epochs and chiefs
    (
        "old chief",
        lambda s: _apply(s, fence=codec.encode(fence(EPOCH, 1))),
        CODE.ABORTED,
        "SUPERSEDED",
        "chief incarnation 2 has adopted it",
    ),
    ("chief at no address", _adoption_from_nowhere, INVALID, "INVALID_SPEC", "want host:port or unix:/path"),
    ("adoption without a fence", lambda s: s.raw.call("AdoptShard", b""), INVALID, "MALFORMED_MESSAGE", "fence is missing"),
    ("adoption by nobody", lambda s: s.raw.call("AdoptShard", NOBODYS), INVALID, "INVALID_SPEC", "want life, epoch and chief"),
    # Specifications
    ("unknown data type", lambda s: s.create_variable(data_type=99), INVALID, "INVALID_SPEC", "slices[0]: variable 'w': dtype 99 unknown"),
    ("huge variable", lambda s: s.create_variable(shape=[1 << 40]), CODE.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED", "limit"),
    ("control character", lambda s: s.create_variable(name="a\x1b[2J\n"), INVALID, "INVALID_SPEC", "control character"),
    ("another layout hash", lambda s: s.create_variable(), FAILED, "LAYOUT_MISMATCH", "the server's is"),
    ("unknown optimizer", lambda s: s.create_optimizer(name="adamm"), INVALID, "INVALID_SPEC", "did you mean 'adam'?"),
    ("no optimizer", lambda s: s.create(_without(s.encoded_spec(), "optimizer")), INVALID, "MALFORMED_MESSAGE", "optimizer is missing"),
    ("another shard", lambda s: s.create(s.encoded_spec(shard=2)), FAILED, "WRONG_ROLE", "this is ps 0, not ps 2"),
    ("another model", lambda s: s.create_optimizer(name="adam"), CODE.ALREADY_EXISTS, "VARIABLE_EXISTS", "optimizer.name is 'adam'"),
    # Steps and push ids
    ("negative step", lambda s: s.push_header(step=-1), INVALID, "INVALID_SPEC", "local_step: got -1, want 0 to 2^62"),
    ("push id again", lambda s: s.push(WHOLE, sequence=s.trainer.last_sequence()), INVALID, "PUSH_ID_REUSED", "and came again for step"),
    ("apply of nobody", lambda s: _apply(s, contributors=[]), INVALID, "MALFORMED_MESSAGE", "no contributors; name at least one"),
    (
        "apply of what is not staged",
        lambda s: _apply(s),
        FAILED,
        "CONTRIBUTION_MISSING",
        "1 of 1 contributions are not staged here: 77/1/1",
    ),
    ("apply of a step to come", lambda s: _apply(s, step=1 << 40), FAILED, "STEP_MISMATCH", "is not the one to apply"),
    (
        "incarnation 0",
        lambda s: s.raw.push(*push_stream(pb.PushHeader(era=codec.encode(era(EPOCH)), push_id=tensor_pb2.PushId(sequence=1)), WHOLE)),
        INVALID,
        "MALFORMED_MESSAGE",
        "want both >= 1",
    ),
    (
        "slot that there is not",
        lambda s: s.raw.read(pb.ReadRequest(epoch=EPOCH, slot="vélo\n", layout_hash=MIXED.hash).SerializeToString()),
        CODE.NOT_FOUND,
        "SLOT_NOT_FOUND",
        "has no slot",
    ),
    # Streams
    ("no message", lambda s: s.raw.call("CreateVariables"), INVALID, "TRUNCATED_STREAM", "ended before its first CreateVariablesRequest"),
    ("gap", lambda s: s.push(frame(0, bytes(HALF)), frame(HALF + 64, bytes(64))), INVALID, "FRAME_OUT_OF_ORDER", f"expected {HALF}"),
    ("offset of 2^64 - 1", lambda s: s.push(frame((1 << 64) - 1, b"x")), INVALID, "FRAME_OUT_OF_ORDER", "expected 0"),
    # Nothing is wrong with these
    ("one byte at a time", lambda s: s.push(*(frame(i, b"\0") for i in range(MIXED.nbytes))), CODE.OK, "", ""),
    (
        "empty frames",
        lambda s: s.push(frame(0, b""), FIRST, frame(HALF, b""), frame(HALF, REST)),
        CODE.OK,
        "",
        "",
    ),
    ("stale", lambda s: s.push(WHOLE, step=s.step - 1, worker=9), CODE.OK, "", ""),
    ("the same model again", lambda s: s.create(s.encoded_spec()), CODE.OK, "", ""),
    (
        "client of a newer minor",
        lambda s: s.raw.handshake(version=handshake_service_pb2.ProtocolVersion(major=4, minor=9)),
        CODE.OK,
        "",
        "",
    ),
    ("unknown field", lambda s: s.raw.call("GetShardStatus", b"\xf8\x07\x01"), CODE.OK, "", ""),
]


def _no_protobuf(method: str) -> Row:
    return f"no protobuf for {method}", lambda s: s.raw.call(method, b"\xff" * 4), INVALID, "MALFORMED_MESSAGE", "use the same .proto"


# These answer within the stream.
STANDING = {"Push", "Read"}
ROWS += [_no_protobuf(method) for method in pb.DESCRIPTOR.services_by_name["ParameterService"].methods_by_name if method not in STANDING]


@pytest.mark.parametrize(("case", "call", "code", "reason", "text"), ROWS, ids=[row[0] for row in ROWS])
def test_bad_input_to_a_parameter_server_is_refused_and_others_are_served(
    server: Server, case: str, call: Callable[[Server], Outcome], code: grpc.StatusCode, reason: str, text: str
) -> None:
    server.apply_one()
    before = server.trainer.shard.call(ShardStatusRequest()).report
    ended = call(server)
    assert (ended.code, ended.reason) == (code, reason), ended.text
    assert text in ended.text
    status = server.trainer.shard.call(ShardStatusRequest())
    assert status.report.allocated_bytes == before.allocated_bytes
    assert status.report.num_staged == before.num_staged + (case in ("one byte at a time", "empty frames"))
    server.apply_one()


def test_defect_is_answered_with_a_number_that_is_in_the_log(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def defective(store: ServedShard, request: object) -> None:
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(ServedShard, "call", defective)
        ended = server.raw.call("GetShardStatus", b"")
    assert (ended.code, ended.reason) == (CODE.INTERNAL, "INTERNAL")
    assert ended.text.startswith("internal error ") and ended.text.endswith(" (see the log of ps 0)")
    assert "secret" not in ended.text
    number = ended.text.split()[2]
    assert sum(number in record.getMessage() for record in caplog.records) == 1
    server.apply_one()
