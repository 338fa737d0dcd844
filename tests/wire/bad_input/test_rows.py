"""Gradients and reads of rows that no client of ours would send: a parameter server refuses them and keeps serving."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from ps_protocol.model.layout import Segments
from ps_protocol.model.variables import Array
from ps_protocol.roles.shard import ReadMetricsRequest, RowsRequest, ShardStatusRequest
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_protocol.v1 import tensor_pb2
from ps_protocol.wire import codec
from ps_server.config import ParameterServerConfig
from ps_server.serving.streams import IdleStreams
from ps_server.shard.shard import ServedShard
from tests.support.chief.eras import fence
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import Outcome, RawShard, frame, push_stream
from tests.support.parameter_servers.serving import serving_shard
from tests.support.parameter_servers.shards import CHIEF, EPOCH, Trainer, layout_of, open_server, variable
from tests.support.waiting import wait_until

CODE = grpc.StatusCode
INVALID, FAILED, ABORTED, NOT_FOUND = CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION, CODE.ABORTED, CODE.NOT_FOUND
FULL = CODE.RESOURCE_EXHAUSTED

_TABLE = variable("table", (10, 2))
# A dense variable of one float, and a table.
LAYOUT = layout_of(variable("w", (1,)), dataclasses.replace(_TABLE, variable=dataclasses.replace(_TABLE.variable, is_sparse=True)))
PAD = bytes(LAYOUT.nbytes)


def sparse_bytes(*indices: int, value: float = 1.0) -> bytes:
    return np.array(indices, "<i8").tobytes() + np.full(2 * len(indices), value, "<f4").tobytes()


class Server:
    """A parameter server with the model, called rightly by `trainer` and wrongly by `raw`."""

    def __init__(self, raw: RawShard, shard: CommandedShard) -> None:
        self.raw, self.shard, self.trainer = raw, shard, Trainer(shard, LAYOUT)
        self.trainer.adopt()
        # A table's first values follow the arena.
        shard.create_variables(self.trainer.spec(), Segments([np.zeros(self.trainer.spec().content_bytes, np.uint8)]))

    @property
    def step(self) -> int:
        step = self.shard.call(ShardStatusRequest()).step
        assert step is not None
        return step

    def push(self, content: bytes, *, num_rows: int = 0, table: int = 0, absent: tuple[int, ...] = (), **fields: Any) -> Outcome:
        """A contribution of the bytes, with a header that speaks of `num_rows` rows of the table."""
        header = codec.encode(self.trainer.header(step=self.step))
        header.sparse.add(table=table, num_rows=num_rows)
        header.absent.extend(absent)
        header.MergeFrom(pb.PushHeader(**fields))
        return self.raw.push(*push_stream(header, *([frame(0, content)] if content else [])))

    def apply_one(self, *indices: int) -> None:
        """One good step: the gradient of these rows is 1."""
        assert self.push(PAD + sparse_bytes(*indices), num_rows=len(indices)).code is CODE.OK
        last = self.trainer.header(sequence=self.trainer.last_sequence()).push_id
        assert not self.trainer.apply(last, step=self.step).repeated_request

    def read(self, *indices: int, num_rows: int | None = None, **fields: Any) -> Outcome:
        header = {"epoch": EPOCH, "layout_hash": LAYOUT.hash, "num_rows": len(indices) if num_rows is None else num_rows, **fields}
        message = pb.ReadRowsRequest(header=pb.RowsHeader(**header), frame=frame(0, np.array(indices, "<i8").tobytes()))
        return self.raw.call("ReadRows", message.SerializeToString())

    def rows(self) -> Array:
        """The whole table."""
        into = np.zeros((10, 2), "<f4")
        request = RowsRequest(epoch=EPOCH, layout_hash=LAYOUT.hash, table=0, step=None)
        self.shard.read_rows(request, np.arange(10), Segments([into.reshape(-1).view(np.uint8)]))
        return into

    def chief(self, method: str, **fields: Any) -> Outcome:
        push_id = tensor_pb2.PushId(worker=77, incarnation=1, sequence=1)
        fenced = codec.encode(fence(EPOCH, CHIEF))
        apply = pb.ApplyRequest(**{"fence": fenced, "step": self.step, "contributors": [push_id], **fields})
        return self.raw.command(**{method: apply})

    def configure(self, **fields: Any) -> Outcome:
        settings = pb.ShardSettings(**{"fence": codec.encode(fence(EPOCH, CHIEF)), "version": 1, **fields})
        message = pb.KeepRecordRequest(fence=settings.fence, version=1, settings=settings)
        return self.raw.call("KeepRecord", message.SerializeToString())


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with open_server(ParameterServerConfig(index=0)) as running, RawShard(running.address) as raw:
        with contextlib.closing(CommandedShard(running.address)) as shard:
            yield Server(raw, shard)


Row = tuple[str, Callable[[Server], Outcome], grpc.StatusCode, str, str]
# Case, call, status, reason, what the text contains.
ROWS: list[Row] = [
    ("fewer rows", lambda s: s.push(PAD + sparse_bytes(1, 2)[:-8], num_rows=2), INVALID, "TRUNCATED_STREAM", "88 of 96 bytes"),
    ("more rows", lambda s: s.push(PAD + sparse_bytes(1, 2), num_rows=1), INVALID, "FRAME_OUT_OF_ORDER", "beyond"),
    (
        "beyond the end",
        lambda s: s.push(PAD + sparse_bytes(0, 10), num_rows=2),
        INVALID,
        "INDEX_OUT_OF_RANGE",
        "indices[1] = 10, want",
    ),
    ("negative", lambda s: s.push(PAD + sparse_bytes(-1), num_rows=1), INVALID, "INDEX_OUT_OF_RANGE", "indices[0] = -1, want 0"),
    ("huge", lambda s: s.push(PAD + sparse_bytes(1 << 62), num_rows=1), INVALID, "INDEX_OUT_OF_RANGE", f"= {1 << 62}, want 0"),
    ("not a table", lambda s: s.push(PAD + sparse_bytes(0), num_rows=1, table=1), INVALID, "INVALID_SPEC", "1 tables"),
    (
        "a table twice",
        lambda s: s.push(PAD, num_rows=0, sparse=[pb.SparsePart(table=0)]),
        INVALID,
        "MALFORMED_MESSAGE",
        "sparse: the tables 0 and 0 do not ascend",
    ),
    ("absent slice that is not there", lambda s: s.push(PAD, absent=(1,)), INVALID, "INVALID_SPEC", "1 slices"),
    ("rows beyond all memory", lambda s: s.push(PAD, num_rows=1 << 60), FULL, "LIMIT_EXCEEDED", f"{1 << 60} rows"),
    (
        "metric of a nameless kind",
        lambda s: s.push(PAD, metrics={"": pb.Metric(weight=1.0)}),
        INVALID,
        "INVALID_SPEC",
        "metrics: name is empty",
    ),
    (
        "metric with a weight below 0",
        lambda s: s.push(PAD, metrics={"loss": pb.Metric(weight=-1.0)}),
        INVALID,
        "INVALID_SPEC",
        "metric 'loss': weight = -1.0, want a finite number >= 0",
    ),
    # Formulas
    (
        "formula that would run code",
        lambda s: s.push(PAD, formulas=[pb.FormulaUpdate(text="v + __import__('os').system('true')", variables={"v": 0})]),
        INVALID,
        "INVALID_SPEC",
        "formulas[0]: formula, line 1, column 5: attributes are not allowed",
    ),
    (
        "formula without a variable",
        lambda s: s.push(PAD, formulas=[pb.FormulaUpdate(text="v + 1")]),
        INVALID,
        "INVALID_SPEC",
        "formulas[0]: formula: its variable 'v' is missing",
    ),
    (
        "array of a formula that lies nowhere",
        lambda s: s.push(PAD, formulas=[pb.FormulaUpdate(text="v + g", variables={"v": 0}, arrays={"g": 1})]),
        INVALID,
        "INVALID_SPEC",
        "formulas[0]: formula: the array 'g' does not lie where a variable does that it assigns to",
    ),
    (
        "more names than a formula may have",
        lambda s: s.push(PAD, formulas=[pb.FormulaUpdate(text="v + 1", variables={"v": 0}, numbers={f"n{i}": 0.0 for i in range(32)})]),
        INVALID,
        "INVALID_SPEC",
        "names, 32 at most",
    ),
    (
        "deeply nested formula",
        lambda s: s.push(PAD, formulas=[pb.FormulaUpdate(text="(" * 2000 + "v" + ")" * 2000, variables={"v": 0})]),
        INVALID,
        "INVALID_SPEC",
        "formulas[0]: formula",
    ),
    # Reading
    ("row beyond the end", lambda s: s.read(0, 10), INVALID, "INDEX_OUT_OF_RANGE", "10"),
    ("negative row", lambda s: s.read(-1), INVALID, "INDEX_OUT_OF_RANGE", "-1"),
    ("fewer indices", lambda s: s.read(1, num_rows=2), INVALID, "TRUNCATED_STREAM", "8 of 16 bytes of indices"),
    ("table that is not there", lambda s: s.read(0, table=1), INVALID, "INVALID_SPEC", "table"),
    ("slot that is not there", lambda s: s.read(0, slot="momentum"), NOT_FOUND, "SLOT_NOT_FOUND", "momentum"),
    ("step gone", lambda s: s.read(0, step=s.step - 2), FAILED, "STEP_GONE", "read a later one"),
    ("step to come", lambda s: s.read(0, step=s.step + 1), FAILED, "STEP_NOT_READY", "step"),
    ("other layout", lambda s: s.read(0, layout_hash="other"), FAILED, "LAYOUT_MISMATCH", "you have 'other'"),
    ("other epoch", lambda s: s.read(0, epoch=EPOCH + 1), ABORTED, "EPOCH_MISMATCH", f"cluster epoch is {EPOCH}"),
    # What only chiefs ask
    ("nothing staged", lambda s: s.chief("prepare"), FAILED, "CONTRIBUTION_MISSING", "77/1/1"),
    ("norms of another step", lambda s: s.chief("prepare", step=s.step + 5), FAILED, "STEP_MISMATCH", "step"),
    (
        "weights for others",
        lambda s: s.chief("apply", weights=[1.0, 2.0]),
        INVALID,
        "MALFORMED_MESSAGE",
        "weights for 1",
    ),
    (
        "settings of an older chief",
        lambda s: s.configure(fence=codec.encode(fence(EPOCH, CHIEF - 1))),
        ABORTED,
        "SUPERSEDED",
        "chief incarnation",
    ),
    (
        "settings of another epoch",
        lambda s: s.configure(fence=codec.encode(fence(EPOCH + 1, CHIEF))),
        ABORTED,
        "EPOCH_MISMATCH",
        f"cluster epoch is {EPOCH}",
    ),
]


@pytest.mark.parametrize(("case", "call", "code", "reason", "text"), ROWS, ids=[row[0] for row in ROWS])
def test_bad_rows_are_refused_and_others_are_served(
    server: Server, case: str, call: Callable[[Server], Outcome], code: grpc.StatusCode, reason: str, text: str
) -> None:
    server.apply_one(3)
    before, rows = server.shard.call(ShardStatusRequest()), server.rows()
    ended = call(server)
    assert (ended.code, ended.reason) == (code, reason), ended.text
    assert text in ended.text
    after = server.shard.call(ShardStatusRequest())
    assert (after.report.allocated_bytes, after.report.num_staged) == (before.report.allocated_bytes, before.report.num_staged)
    assert np.array_equal(server.rows(), rows)
    server.apply_one(3)


def test_rows_that_are_unsorted_and_repeated_are_summed(server: Server) -> None:
    before = server.rows()
    server.apply_one(5, 0, 5)
    expected = before.copy()
    # The learning rate is 0.5.
    expected[0] -= 0.5
    expected[5] -= 1.0
    assert np.array_equal(server.rows(), expected)


def test_value_of_a_metric_may_be_anything(server: Server) -> None:
    """A loss that is not finite shall show, and break nothing."""
    pushed = server.push(b"", absent=(0,), metrics={"loss": pb.Metric(value=float("nan"), weight=1.0)})
    assert pushed.code is CODE.OK
    last = server.trainer.header(sequence=server.trainer.last_sequence()).push_id
    server.trainer.apply(last, step=server.step)
    assert any(np.isnan(cell.last) for cell in server.shard.call(ReadMetricsRequest(epoch=EPOCH)) if cell.name == "loss")


def test_reader_of_rows_that_goes_away_in_the_middle_holds_nothing_up() -> None:
    store, idle_streams = ServedShard(index=0, process_incarnation=1), IdleStreams()
    with (
        serving_shard(store, idle_streams) as address,
        RawShard(address) as raw,
        contextlib.closing(CommandedShard(address)) as shard,
    ):
        Server(raw, shard)
        header = pb.RowsHeader(epoch=EPOCH, layout_hash=LAYOUT.hash, num_rows=2)
        gone = threading.Event()

        def half() -> Iterator[bytes]:
            yield pb.ReadRowsRequest(header=header, frame=frame(0, bytes(8))).SerializeToString()
            gone.wait(20)

        calls = [raw.begin_rows(half()) for _ in range(3)]
        for call in calls:
            assert pb.ReadRowsResponse.FromString(next(call)).frame.data == bytes(8), "the first row, before the second is asked for"
        assert idle_streams.num_streams == 3
        for call in calls:
            call.cancel()
        gone.set()
        wait_until(lambda: not (idle_streams.num_streams or store._gate._readers), timeout_s=10, what="streams and readers have ended")
