"""The rows of docs/reference/bad-input.md: the call of each, and the other test of a row that takes more than one call."""

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from ps_protocol.security.tokens import new_token
from ps_protocol.v1 import handshake_service_pb2
from ps_protocol.v1 import parameter_service_pb2 as pb
from tests.support.parameter_servers.raw_shard import WHOLE, Outcome, Server, fresh_shard, push_stream
from tests.support.parameter_servers.shards import variable
from tests.wire.bad_input import calls
from tests.wire.bad_input import test_chief as chief_cases
from tests.wire.bad_input import test_encodings as encoding_cases
from tests.wire.bad_input import test_parameter_service as shard_cases
from tests.wire.bad_input import test_rows as table_cases
from tests.wire.bad_input.scenes import Scene, greet, plain

CODE = grpc.StatusCode
OK, INVALID, FAILED, FULL = CODE.OK, CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION, CODE.RESOURCE_EXHAUSTED
SHARD = "/ps_protocol.v1.ParameterService"


@dataclass(frozen=True, slots=True)
class Case:
    """One call: `server` is the one that must keep working afterwards; `answer` looks at what a call that ends well was answered."""

    act: Callable[[Scene], Outcome]
    code: grpc.StatusCode
    reason: str
    text: str
    server: str = "shard"
    answer: Callable[[bytes], object] | None = None


@dataclass(frozen=True, slots=True)
class HeldBy:
    """Another test, FILE::NAME, holds the row, since it takes more than one raw call."""

    test: str


Row = Case | HeldBy
_SHARD = {row[0]: row for row in shard_cases.ROWS}
_TABLE = {row[0]: row for row in table_cases.ROWS}
_CHIEF = {row[0]: row for row in chief_cases.BAD_INPUT}


def shard(name: str, answer: Callable[[bytes], object] | None = None) -> Case:
    """A case of `test_parameter_service_bad_input`."""
    _, call, code, reason, text = _SHARD[name]
    return Case(lambda scene: call(scene.shard), code, reason, text, answer=answer)


def table(name: str) -> Case:
    """A case of `test_sparse_bad_input`."""
    _, call, code, reason, text = _TABLE[name]
    return Case(lambda scene: call(scene.table), code, reason, text, "table")


def chief(name: str) -> Case:
    """A case of `test_chief_bad_input`."""
    _, method, message, code, reason, text = _CHIEF[name]
    return Case(lambda scene: scene.chief(method, message), code, reason, text, "chief")


def encoded(name: str) -> Case:
    """A case of `test_encoding_bad_input`."""
    encoding, encoded_bytes, content, reason, text = encoding_cases.BAD[name]
    return Case(lambda scene: encoding_cases.push(scene.shard.trainer, encoding, encoded_bytes, content), INVALID, reason, text)


def fresh(
    act: Callable[[Server], Outcome],
    code: grpc.StatusCode,
    reason: str,
    text: str,
    after: Callable[[Server], bool] = calls.creates,
) -> Case:
    """A case for a shard that has no model yet; `after` makes the next right call there."""

    def run(scene: Scene) -> Outcome:
        with fresh_shard() as server:
            ended = act(server)
            assert after(server)
            return ended

    return Case(run, code, reason, text)


def guarded(act: Callable[[Scene], Outcome], code: grpc.StatusCode, reason: str, text: str, server: str = "tokens") -> Case:
    """A case for a server that asks who calls."""
    return Case(act, code, reason, text, server)


TABLE: dict[int, tuple[Row, ...]] = {
    1: (guarded(lambda s: s.call("tokens", f"{SHARD}/GetShardStatus"), CODE.UNAUTHENTICATED, "UNAUTHENTICATED", "missing token. Set"),),
    2: (
        guarded(
            lambda s: s.call("tokens", f"{SHARD}/GetShardStatus", access=plain(new_token())),
            CODE.UNAUTHENTICATED,
            "UNAUTHENTICATED",
            "invalid token",
        ),
    ),
    3: (
        guarded(
            lambda s: s.call("tokens", f"{SHARD}/Command", access=s.files.caller(tls=False)),
            CODE.PERMISSION_DENIED,
            "PERMISSION_DENIED",
            "Command needs role chief, token has role worker",
        ),
    ),
    4: (
        guarded(
            lambda s: s.call("tls", f"{SHARD}/GetShardStatus", access=s.files.caller(has_token=False, certificate="worker")),
            CODE.PERMISSION_DENIED,
            "PERMISSION_DENIED",
            "certificate is for cluster 'job-a', this is 'job-b'",
            "tls",
        ),
    ),
    5: (
        guarded(lambda s: s.call("tls", f"{SHARD}/GetShardStatus"), CODE.UNAVAILABLE, "", "", "tls"),
        guarded(
            lambda s: greet(s.addresses["tls"], plain(new_token())), INVALID, "INVALID_SPEC", "server speaks TLS; pass tls=True", "tls"
        ),
    ),
    6: (
        guarded(lambda s: s.call("tokens", f"{SHARD}/GetShardStatus", access=s.files.caller()), CODE.UNAVAILABLE, "", "WRONG_VERSION"),
        guarded(lambda s: greet(s.addresses["tokens"], s.files.caller()), INVALID, "INVALID_SPEC", "is not using TLS; pass tls=False"),
    ),
    7: (
        guarded(
            lambda s: greet("10.0.0.5:5000", plain(new_token())), INVALID, "INVALID_SPEC", "refusing to send a token without TLS to 10."
        ),
    ),
    8: (shard("unknown method"), HeldBy("tests/wire/calls/test_connection.py::test_unknown_method_says_that_versions_or_roles_differ")),
    9: (shard("no protobuf for AdoptShard"), shard("no protobuf for Push"), chief("9 not a protobuf")),
    10: (shard("message beyond the limit"),),
    11: (shard("compressed message"),),
    12: (Case(calls.big_metadata, FULL, "", "metadata"),),
    13: (Case(calls.deadline, CODE.DEADLINE_EXCEEDED, "", ""),),
    14: (Case(calls.wait, OK, "", "", "chief"),),
    15: (shard("other major"),),
    16: (shard("client of a newer minor", lambda data: "4.9" in handshake_service_pb2.HandshakeResponse.FromString(data).warning),),
    17: (shard("other cluster"),),
    18: (shard("other role"), shard("other index")),
    19: (shard("old epoch"), shard("read of an old epoch"), chief("19 old epoch")),
    20: (Case(calls.unregistered, FAILED, "LEASE_EXPIRED", "worker 2 (incarnation 999) is not registered here. Register again", "chief"),),
    21: (chief("21 index taken"),),
    22: (chief("22 index too high"), chief("22 index negative")),
    23: (Case(calls.full, FULL, "CLUSTER_FULL", "3 of 3 worker places taken", "chief"),),
    24: (
        *(
            Case(calls.usage("--replicas-to-aggregate", text), INVALID, "INVALID_SPEC", "--replicas-to-aggregate: got", "chief")
            for text in ("0", "-1", "x")
        ),
    ),
    25: (
        Case(
            calls.usage("--tokens", "fifo", "--num-tokens", "1", "--replicas-to-aggregate", "4", "--workers", "2"),
            INVALID,
            "INVALID_SPEC",
            "Too few tokens to finish the first step: 1 (given) vs 2 (needed)",
            "chief",
        ),
    ),
    26: (Case(calls.hyperparameters, CODE.NOT_FOUND, "VARIABLE_NOT_FOUND", "did you mean 'w'?", "chief"),),
    27: (shard("layout of another model"),),
    28: (shard("header alone"), HeldBy("tests/unit/worker_client/model/test_gradients.py::test_missing_variables_are_named")),
    29: (shard("empty name"),),
    30: (shard("long name"), shard("control character")),
    31: (Case(calls.many(2), INVALID, "INVALID_SPEC", "occur twice"),),
    32: (Case(calls.many(100_001), FULL, "LIMIT_EXCEEDED", "100000 at most"),),
    33: (shard("no data type"), shard("unknown data type")),
    34: (
        HeldBy("tests/unit/worker_client/model/test_gradients.py::test_a_bad_gradient_is_refused_with_a_reason_and_changes_nothing"),
        shard("layout of another model"),
    ),
    35: (HeldBy("tests/unit/ps_protocol/model/test_tensors.py::test_a_big_endian_array_is_refused_with_the_conversion_to_call"),),
    36: (
        HeldBy("tests/unit/worker_client/model/test_gradients.py::test_a_bad_gradient_is_refused_with_a_reason_and_changes_nothing"),
        shard("layout of another model"),
    ),
    37: (shard("negative extent"),),
    38: (shard("rank 65"),),
    39: (shard("overflowing shape"),),
    40: (shard("one byte too many"), shard("stream ends early")),
    41: (shard("huge variable"),),
    42: (
        fresh(
            calls.model(*(variable(f"v{index}", (1 << 34,)) for index in range(64))),
            FULL,
            "LIMIT_EXCEEDED",
            "--max-memory-bytes",
            after=calls.creates,
        ),
    ),
    43: (fresh(calls.model(variable("none", (0, 3))), OK, "", "", calls.answers),),
    44: (HeldBy("tests/wire/bad_input/test_creation.py::test_scalar_is_not_a_vector_of_one"),),
    45: (
        Case(calls.nonfinite, OK, "", ""),
        fresh(
            calls.nonfinite_refused,
            INVALID,
            "NON_FINITE_GRADIENT",
            "'w' has 35 non-finite values (worker 2, step 0)",
            after=calls.stages,
        ),
    ),
    46: (table("46 fewer rows"), table("46 more rows"), table("46 fewer indices")),
    47: (table("47 beyond the end"), table("47 negative"), table("47 huge"), table("47 row beyond the end")),
    48: (HeldBy("tests/wire/bad_input/test_rows.py::test_rows_that_are_unsorted_and_repeated_are_summed"),),
    49: (table("49 not a table"),),
    50: (shard("stale", lambda data: pb.PushResponse.FromString(data).reply.result == pb.PUSH_RESULT_STALE),),
    51: (shard("step ahead"), chief("51 step ahead"), chief("51 token ahead")),
    52: (shard("negative step"), shard("step beyond 2^62"), chief("52 step negative")),
    53: (Case(calls.twice, OK, "", ""),),
    54: (shard("push id again"), chief("54 push id reused")),
    56: (
        fresh(
            lambda s: s.raw.push(*push_stream(s.trainer.header(), WHOLE)),
            FAILED,
            "NOT_INITIALIZED",
            "waiting for",
            after=calls.creates,
        ),
    ),
    57: (shard("the same model again", lambda data: not pb.CreateVariablesResponse.FromString(data).created),),
    58: (shard("another model"), chief("58 another model")),
    59: (shard("stream ends early"),),
    60: (shard("gap"), shard("overlap"), shard("beyond the end")),
    62: (Case(calls.cut_off, CODE.CANCELLED, "", ""),),
    63: (HeldBy("tests/wire/streams/test_cut_streams.py::test_idle_streams_are_cut"),),
    64: (encoded("no such encoding"),),
    65: (encoded("halves that do not end"), encoded("top k that are more than they say")),
    66: (shard("unknown optimizer"), chief("66 unknown optimizer")),
    67: (shard("hyper-parameter nan"), shard("negative learning rate"), shard("unknown hyper-parameter")),
    68: (*(Case(calls.save(tag), INVALID, "INVALID_SPEC", "checkpoint tag") for tag in ("../../x", "/x", "a\0", "x" * 65, "", "..")),),
    69: (HeldBy("tests/unit/ps_protocol/checkpoint/test_local.py::test_link_out_of_the_root_is_refused"),),
    70: (Case(calls.restore("step-000000404"), CODE.NOT_FOUND, "CHECKPOINT_NOT_FOUND", "step-000000404"),),
    71: (HeldBy("tests/contract/storage/test_storage.py::test_damaged_checkpoint_is_skipped_saying_why"),),
    72: (HeldBy("tests/contract/shard/test_checkpoints.py::test_a_changed_file_is_not_restored"),),
    73: (HeldBy("tests/unit/ps_protocol/checkpoint/test_files.py::test_files_that_are_no_checkpoint_files_are_refused"),),
    74: (HeldBy("tests/unit/ps_protocol/checkpoint/test_local.py::test_save_without_room_is_refused_before_it_begins"),),
    75: (Case(calls.saved_twice, OK, "", "", answer=lambda data: not pb.SaveShardResponse.FromString(data).HasField("failure")),),
    76: (Case(calls.too_many, FULL, "TOO_MANY_PUSHES", "worker 41"),),
    77: (fresh(calls.draining, CODE.UNAVAILABLE, "SHUTTING_DOWN", "ps 0 is shutting down: training is finished", calls.answers),),
    78: (HeldBy("tests/unit/chief/core/test_explain.py::test_a_step_that_waits_for_an_unreachable_shard_names_the_shard"),),
    79: (Case(calls.finished, OK, "", "FINISHED", "chief"),),
    80: (shard("unknown field", lambda data: pb.GetShardStatusResponse.FromString(data).step > 0),),
    82: (Case(calls.http, OK, "", "closed"),),
    83: (shard("control character"), Case(calls.escaped, OK, "", "", "chief")),
    84: (HeldBy("tests/wire/bad_input/test_parameter_service.py::test_defect_is_answered_with_a_number_that_is_in_the_log"),),
}
