"""Input that no client of ours would send, or that a user gets wrong: the call and its answer, or the test that holds it."""

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


# By a number that is a stable name.
TABLE: dict[int, tuple[Row, ...]] = {
    # A call without a token, where one is required.
    1: (guarded(lambda s: s.call("tokens", f"{SHARD}/GetShardStatus"), CODE.UNAUTHENTICATED, "UNAUTHENTICATED", "missing token. Set"),),
    # A wrong or expired token.
    2: (
        guarded(
            lambda s: s.call("tokens", f"{SHARD}/GetShardStatus", access=plain(new_token())),
            CODE.UNAUTHENTICATED,
            "UNAUTHENTICATED",
            "invalid token",
        ),
    ),
    # A worker's token on a method that only the chief may call.
    3: (
        guarded(
            lambda s: s.call("tokens", f"{SHARD}/Command", access=s.files.caller(tls=False)),
            CODE.PERMISSION_DENIED,
            "PERMISSION_DENIED",
            "Command needs role chief, token has role worker",
        ),
    ),
    # A client certificate of another cluster.
    4: (
        guarded(
            lambda s: s.call("tls", f"{SHARD}/GetShardStatus", access=s.files.caller(has_token=False, certificate="worker")),
            CODE.PERMISSION_DENIED,
            "PERMISSION_DENIED",
            "certificate is for cluster 'job-a', this is 'job-b'",
            "tls",
        ),
    ),
    # A plaintext client on a TLS port.
    5: (
        guarded(lambda s: s.call("tls", f"{SHARD}/GetShardStatus"), CODE.UNAVAILABLE, "", "", "tls"),
        guarded(
            lambda s: greet(s.addresses["tls"], plain(new_token())), INVALID, "INVALID_SPEC", "server speaks TLS; pass tls=True", "tls"
        ),
    ),
    # A TLS client on a plaintext port.
    6: (
        guarded(lambda s: s.call("tokens", f"{SHARD}/GetShardStatus", access=s.files.caller()), CODE.UNAVAILABLE, "", "WRONG_VERSION"),
        guarded(lambda s: greet(s.addresses["tokens"], s.files.caller()), INVALID, "INVALID_SPEC", "is not using TLS; pass tls=False"),
    ),
    # A token over plaintext to another machine.
    7: (
        guarded(
            lambda s: greet("10.0.0.5:5000", plain(new_token())), INVALID, "INVALID_SPEC", "refusing to send a token without TLS to 10."
        ),
    ),
    # An unknown method.
    8: (shard("unknown method"), HeldBy("tests/wire/calls/test_connection.py::test_unknown_method_says_that_versions_or_roles_differ")),
    # Bytes that are not the method's message.
    9: (shard("no protobuf for AdoptShard"), shard("no protobuf for Push"), chief("9 not a protobuf")),
    # A message larger than the limit of 16 MiB.
    10: (shard("message beyond the limit"),),
    # A compressed message.
    11: (shard("compressed message"),),
    # Metadata larger than 8 KiB.
    12: (Case(calls.big_metadata, FULL, "", "metadata"),),
    # A deadline that has passed before the work begins.
    13: (Case(calls.deadline, CODE.DEADLINE_EXCEEDED, "", ""),),
    # A blocking call without a deadline.
    14: (Case(calls.wait, OK, "", "", "chief"),),
    # Another major version of the protocol.
    15: (shard("other major"),),
    # A newer minor version.
    16: (shard("client of a newer minor", lambda data: "4.9" in handshake_service_pb2.HandshakeResponse.FromString(data).warning),),
    # The identity of another cluster.
    17: (shard("other cluster"),),
    # The right cluster, but another role or index at this address.
    18: (shard("other role"), shard("other index")),
    # An epoch that has ended.
    19: (shard("old epoch"), shard("read of an old epoch"), chief("19 old epoch")),
    # A worker that is not registered, or whose lease has expired.
    20: (Case(calls.unregistered, FAILED, "LEASE_EXPIRED", "worker 2 (incarnation 999) is not registered here. Register again", "chief"),),
    # A worker index that somebody holds.
    21: (chief("21 index taken"),),
    # A worker index that is negative or too large.
    22: (chief("22 index too high"), chief("22 index negative")),
    # One worker more than there are places.
    23: (Case(calls.full, FULL, "CLUSTER_FULL", "3 of 3 worker places taken", "chief"),),
    # `--replicas-to-aggregate` zero, negative or not a number.
    24: (
        *(
            Case(calls.usage("--replicas-to-aggregate", text), INVALID, "INVALID_SPEC", "--replicas-to-aggregate: got", "chief")
            for text in ("0", "-1", "x")
        ),
    ),
    # Fewer tokens than the first step needs.
    25: (
        Case(
            calls.usage("--tokens", "fifo", "--num-tokens", "1", "--replicas-to-aggregate", "4", "--workers", "2"),
            INVALID,
            "INVALID_SPEC",
            "Too few tokens to finish the first step: 1 (given) vs 2 (needed)",
            "chief",
        ),
    ),
    # An unknown variable.
    26: (Case(calls.hyperparameters, CODE.NOT_FOUND, "VARIABLE_NOT_FOUND", "did you mean 'w'?", "chief"),),
    # Content laid out for another model.
    27: (shard("layout of another model"),),
    # A gradient that misses variables of the step.
    28: (shard("header alone"), HeldBy("tests/unit/worker_client/model/test_gradients.py::test_missing_variables_are_named")),
    # An empty variable name.
    29: (shard("empty name"),),
    # A name that is too long, or has control characters.
    30: (shard("long name"), shard("control character")),
    # The same variable twice.
    31: (Case(calls.many(2), INVALID, "INVALID_SPEC", "occur twice"),),
    # More than 100,000 variables.
    32: (Case(calls.many(100_001), FULL, "LIMIT_EXCEEDED", "100000 at most"),),
    # An unknown element type.
    33: (shard("no data type"), shard("unknown data type")),
    # A gradient of another element type than its variable.
    34: (
        HeldBy("tests/unit/worker_client/model/test_gradients.py::test_a_bad_gradient_is_refused_with_a_reason_and_changes_nothing"),
        shard("layout of another model"),
    ),
    # Big-endian arrays.
    35: (HeldBy("tests/unit/ps_protocol/model/test_tensors.py::test_a_big_endian_array_is_refused_with_the_conversion_to_call"),),
    # A gradient of another shape than its variable.
    36: (
        HeldBy("tests/unit/worker_client/model/test_gradients.py::test_a_bad_gradient_is_refused_with_a_reason_and_changes_nothing"),
        shard("layout of another model"),
    ),
    # A negative extent in a shape.
    37: (shard("negative extent"),),
    # A shape of more than 32 dimensions.
    38: (shard("rank 65"),),
    # A shape whose product overflows 64 bits.
    39: (shard("overflowing shape"),),
    # More or fewer bytes than the shapes say.
    40: (shard("one byte too many"), shard("stream ends early")),
    # A variable larger than the limit for one.
    41: (shard("huge variable"),),
    # A model larger than the server's memory budget.
    42: (
        fresh(
            calls.model(*(variable(f"v{index}", (1 << 34,)) for index in range(64))),
            FULL,
            "LIMIT_EXCEEDED",
            "--max-memory-bytes",
            after=calls.creates,
        ),
    ),
    # A variable without elements.
    43: (fresh(calls.model(variable("none", (0, 3))), OK, "", "", calls.answers),),
    # A scalar sent as a vector of one element.
    44: (HeldBy("tests/wire/bad_input/test_creation.py::test_scalar_is_not_a_vector_of_one"),),
    # NaN or infinity.
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
    # Sparse: fewer or more rows than indices.
    46: (table("46 fewer rows"), table("46 more rows"), table("46 fewer indices")),
    # Sparse: an index outside the table.
    47: (table("47 beyond the end"), table("47 negative"), table("47 huge"), table("47 row beyond the end")),
    # Sparse: indices that are unsorted or repeated.
    48: (HeldBy("tests/wire/bad_input/test_rows.py::test_rows_that_are_unsorted_and_repeated_are_summed"),),
    # Sparse gradients for a dense variable.
    49: (table("49 not a table"),),
    # A gradient of a step that is over.
    50: (shard("stale", lambda data: pb.PushResponse.FromString(data).reply.result == pb.PUSH_RESULT_STALE),),
    # A gradient or commit of a step that has not begun.
    51: (shard("step ahead"), chief("51 step ahead"), chief("51 token ahead")),
    # A step that is negative, or beyond 2^62.
    52: (shard("negative step"), shard("step beyond 2^62"), chief("52 step negative")),
    # A push that is repeated, byte for byte.
    53: (Case(calls.twice, OK, "", ""),),
    # A push id that is used again for another step.
    54: (shard("push id again"), chief("54 push id reused")),
    # A push before the model has values.
    56: (
        fresh(
            lambda s: s.raw.push(*push_stream(s.trainer.header(), WHOLE)),
            FAILED,
            "NOT_INITIALIZED",
            "waiting for",
            after=calls.creates,
        ),
    ),
    # The model that is already there, created again.
    57: (shard("the same model again", lambda data: not pb.CreateVariablesResponse.FromString(data).created),),
    # Another model than the one that is there.
    58: (shard("another model"), chief("58 another model")),
    # A stream that ends early.
    59: (shard("stream ends early"),),
    # Frames with a gap, an overlap, or beyond the end.
    60: (shard("gap"), shard("overlap"), shard("beyond the end")),
    # A caller that cancels in the middle.
    62: (Case(calls.cut_off, CODE.CANCELLED, "", ""),),
    # A stream on which nothing comes for 30 s.
    63: (HeldBy("tests/wire/streams/test_cut_streams.py::test_idle_streams_are_cut"),),
    # An encoding that does not exist.
    64: (encoded("no such encoding"),),
    # Encoded content of another size than declared.
    65: (encoded("halves that do not end"), encoded("top k that are more than they say")),
    # An unknown optimizer.
    66: (shard("unknown optimizer"), chief("66 unknown optimizer")),
    # A hyper-parameter that is NaN, negative or unknown.
    67: (shard("hyper-parameter nan"), shard("negative learning rate"), shard("unknown hyper-parameter")),
    # A tag that is a path, too long, or empty.
    68: (*(Case(calls.save(tag), INVALID, "INVALID_SPEC", "checkpoint tag") for tag in ("../../x", "/x", "a\0", "x" * 65, "", "..")),),
    # A symbolic link that leads out of the directory.
    69: (HeldBy("tests/unit/ps_protocol/checkpoint/test_local.py::test_link_out_of_the_root_is_refused"),),
    # A checkpoint that is not there.
    70: (Case(calls.restore("step-000000404"), CODE.NOT_FOUND, "CHECKPOINT_NOT_FOUND", "step-000000404"),),
    # A damaged checkpoint.
    71: (HeldBy("tests/contract/storage/test_storage.py::test_damaged_checkpoint_is_skipped_saying_why"),),
    # A checkpoint of another model.
    72: (HeldBy("tests/contract/shard/test_checkpoints.py::test_a_changed_file_is_not_restored"),),
    # A file that is no tensor file: header too large, overlapping or missing ranges.
    73: (HeldBy("tests/unit/ps_protocol/checkpoint/test_files.py::test_files_that_are_no_checkpoint_files_are_refused"),),
    # A save without room for it on the disk.
    74: (HeldBy("tests/unit/ps_protocol/checkpoint/test_local.py::test_save_without_room_is_refused_before_it_begins"),),
    # A save while the same save runs.
    75: (Case(calls.saved_twice, OK, "", "", answer=lambda data: not pb.SaveShardResponse.FromString(data).HasField("failure")),),
    # More pushes at once than one worker may have open.
    76: (Case(calls.too_many, FULL, "TOO_MANY_PUSHES", "worker 41"),),
    # A call to a server that is shutting down.
    77: (fresh(calls.draining, CODE.UNAVAILABLE, "SHUTTING_DOWN", "ps 0 is shutting down: training is finished", calls.answers),),
    # A step that waits for a parameter server nobody can reach.
    78: (HeldBy("tests/unit/chief/core/test_explain.py::test_a_step_that_waits_for_an_unreachable_shard_names_the_shard"),),
    # A call after training has finished.
    79: (Case(calls.finished, OK, "", "FINISHED", "chief"),),
    # Unknown protobuf fields.
    80: (shard("unknown field", lambda data: pb.GetShardStatusResponse.FromString(data).step > 0),),
    # HTTP/1.1 on the gRPC port.
    82: (Case(calls.http, OK, "", "closed"),),
    # Names with line breaks or terminal escapes.
    83: (shard("control character"), Case(calls.escaped, OK, "", "", "chief")),
    # Anything that makes the server raise.
    84: (HeldBy("tests/wire/bad_input/test_parameter_service.py::test_defect_is_answered_with_a_number_that_is_in_the_log"),),
}
