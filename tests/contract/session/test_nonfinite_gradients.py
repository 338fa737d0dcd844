"""A cluster that refuses gradients that are not finite: only the worker that gives one gets an error, and its next right one counts.

Sessions check before they push, over every transport. Servers check everything that arrives over a wire.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.encodings.gradients import GradientEncoder
from ps_protocol.errors import NonFiniteGradient
from ps_protocol.model.layout import Layout, Segments
from ps_protocol.model.variables import Array, DataType
from ps_protocol.roles.shard import PushResult, Shard, ShardStatusRequest
from tests.support.cluster.here import also_over
from tests.support.cluster.shape import Shape, Start
from tests.support.parameter_servers.shards import Trainer, layout_of, open_shard, table, variable, views
from tests.support.waiting import wait_until
from worker_client import Buffer, EmbeddingTable, IndexedSlices, PushOutcome, Session

# Split over the servers, along both axes, and whole; one of them takes plain updates.
WHOLE, ROWS, COLUMNS = np.zeros(5, np.float32), np.zeros((40, 3), np.float32), np.zeros((4, 60))
GOOD: dict[str, Any] = {"whole": WHOLE + 1, "rows": ROWS + 1, "columns": COLUMNS + 1}
# The dtypes that a server has, padding behind each, and a table.
MIXED = layout_of(
    variable("w", (40, 7)),
    variable("h", (9,), DataType.FLOAT16),
    variable("d", (9,), DataType.FLOAT64),
    table("emb", (6, 2)),
)
FLOATS = layout_of(variable("w", (40, 7)), variable("b", (3,)))


def model() -> dict[str, Any]:
    return {
        "whole": WHOLE,
        "rows": worker_client.Variable(ROWS, partitioner=worker_client.fixed_size_partitioner(2)),
        "columns": worker_client.Variable(COLUMNS, partitioner=worker_client.fixed_size_partitioner(2, axis=1)),
        "best": Buffer(np.zeros(2, np.float32)),
        "table": EmbeddingTable((10, 2)),
    }


def joined(start: Start, *, reject: bool = True, num_workers: int = 1) -> list[Session]:
    cluster = start(Shape(num_ps=2, num_workers=num_workers, reject_nonfinite=reject))
    sessions = [cluster.session() for _ in range(num_workers)]
    for session in sessions:
        session.create_or_join(model(), optimizer=worker_client.sgd(1.0), timeout_s=20)
    return sessions


def test_the_status_counts_nonfinite_values_that_are_not_refused(start: Start) -> None:
    (one,) = joined(start, reject=False)
    one.push(bad("whole", 1, 4))
    assert one.wait(timeout_s=20)

    def counts() -> set[int]:
        return {shard.report.num_nonfinite for shard in one.status().shards if shard.report is not None}

    wait_until(lambda: counts() == {0, 2}, timeout_s=10, what="the chief has asked the servers")


def bad(name: str, *positions: int) -> dict[str, Any]:
    changed = GOOD[name].copy()
    changed.reshape(-1)[list(positions)] = (np.nan, np.inf, -np.inf)[: len(positions)]
    return {**GOOD, name: changed, "table": None}


@also_over("shared memory")
@pytest.mark.parametrize(("name", "positions"), [("whole", (4,)), ("rows", (0, 61, 119)), ("columns", (31, 100))])
def test_a_worker_with_a_nonfinite_gradient_is_refused_and_the_step_waits_for_another(
    start: Start, name: str, positions: tuple[int, ...]
) -> None:
    one, other = joined(start, num_workers=2)
    num = f"{len(positions)} non-finite value" + "s" * (len(positions) > 1)
    with pytest.raises(NonFiniteGradient, match=rf"^'{name}' has {num} \(worker 0, step 0\); nothing was changed"):
        one.push(bad(name, *positions))
    assert other.push(GOOD | {"table": None}).outcome is PushOutcome.ACCEPTED
    assert one.global_step == 0
    assert one.push(GOOD | {"table": None}).outcome is PushOutcome.ACCEPTED
    for session in (one, other):
        assert session.wait(timeout_s=20)
        for variable_name, value in GOOD.items():
            np.testing.assert_array_equal(session.read()[variable_name], -value)


def test_a_gradient_written_in_place_is_checked_and_one_left_out_is_not(start: Start) -> None:
    (session,) = joined(start)
    views_ = session.gradient_buffers()
    for name, gradient in GOOD.items():
        views_[name][...] = gradient
    views_["whole"][2] = np.nan
    with pytest.raises(NonFiniteGradient, match="'whole' has 1 non-finite value"):
        session.step(views_ | {"table": None}, timeout_s=20)
    # It still lies there.
    found = session.step({name: view for name, view in views_.items() if name != "whole"} | {"whole": None, "table": None}, timeout_s=20)
    assert (found.outcome, session.global_step) == (PushOutcome.ACCEPTED, 1)
    np.testing.assert_array_equal(session.read()["whole"], WHOLE)
    np.testing.assert_array_equal(session.read()["rows"], -GOOD["rows"])


def test_nonfinite_rows_of_a_table_are_refused(start: Start) -> None:
    (session,) = joined(start)
    values = np.ones((2, 2), np.float32)
    values[1, 0] = -np.inf
    with pytest.raises(NonFiniteGradient, match="'table' has 1 non-finite value "):
        session.step(GOOD | {"table": IndexedSlices(np.array([1, 7]), values)}, timeout_s=20)
    session.step(GOOD | {"table": IndexedSlices(np.array([1, 7]), np.ones((2, 2), np.float32))}, timeout_s=20)
    np.testing.assert_array_equal(session.read_rows("table", [1, 2, 7]), [[-1, -1], [0, 0], [-1, -1]])


def test_an_update_may_be_infinite(start: Start) -> None:
    (session,) = joined(start)
    session.step(GOOD | {"table": None}, updates={"best": np.full(2, np.inf, np.float32)}, timeout_s=20)
    np.testing.assert_array_equal(session.read()["best"], [np.inf, np.inf])


def test_the_data_ranges_of_a_refused_gradient_belong_to_the_next_one(start: Start) -> None:
    (session,) = joined(start)
    seen = []
    for batch in session.batches("train", num_samples=6, batch_size=2):
        seen.append((batch.start, batch.stop))
        if batch.start == 2:
            with pytest.raises(NonFiniteGradient):
                session.step(bad("whole", 0), timeout_s=20)
        session.step(GOOD | {"table": None}, timeout_s=20)
    assert sorted(seen) == [(0, 2), (2, 4), (4, 6)], "none is leased again"
    assert session.global_step == 3


def test_by_default_nonfinite_gradients_count_as_any_other(start: Start) -> None:
    (session,) = joined(start, reject=False)
    assert session.step(bad("whole", 1), timeout_s=20).outcome is PushOutcome.ACCEPTED
    assert np.isnan(session.read()["whole"][1])


@pytest.fixture(params=["in_process", "grpc_unix"])
def wired(request: pytest.FixtureRequest, socket_dir: Path) -> Any:
    """A shard that nobody who pushes shares memory with."""
    with open_shard(request.param, socket_dir=socket_dir) as opened:
        yield opened


def created(shard: Shard, layout: Layout) -> Trainer:
    trainer = Trainer(shard, layout)
    trainer.create()
    trainer.configure(1, rejects_nonfinite=True)
    return trainer


def spoilt(trainer: Trainer, name: str, position: int, value: float) -> Array:
    memory = trainer.arena(1.0)
    views(trainer.layout, memory)[name].reshape(-1)[position] = value
    return memory


@pytest.mark.parametrize("name", ["w", "h", "d"])
def test_a_server_refuses_and_drops_nonfinite_gradients_of_each_type(wired: Shard, name: str) -> None:
    trainer = created(wired, MIXED)
    with pytest.raises(NonFiniteGradient, match=rf"^'{name}' has 1 non-finite value \(worker 3, step 0\)"):
        trainer.push(trainer.header(3), spoilt(trainer, name, 8, np.nan))
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 0
    position = [piece.variable.name for piece in MIXED.slices].index(name)
    header = trainer.header(3, absent=(position,))
    assert trainer.push(header, spoilt(trainer, name, 8, np.inf)).result is PushResult.STAGED, "it is left out"
    assert trainer.apply(header.push_id).step == 1


def test_a_server_refuses_nonfinite_rows(wired: Shard) -> None:
    trainer = created(wired, MIXED)
    with pytest.raises(NonFiniteGradient, match="'emb' has 2 non-finite values"):
        trainer.push_rows(rows={0: ([4, 1], [[1.0, np.nan], [np.inf, 1.0]])})
    _, reply = trainer.push_rows(rows={0: ([4, 1], [[1.0, 2.0], [3.0, 1.0]])})
    assert reply.result is PushResult.STAGED


@pytest.mark.parametrize("encoding", [one for one in FloatEncoding if one is not FloatEncoding.AS_IS])
def test_a_server_refuses_nonfinite_encoded_gradients(wired: Shard, encoding: FloatEncoding) -> None:
    trainer = created(wired, FLOATS)

    def push(memory: Array) -> PushResult:
        encoder = GradientEncoder(FLOATS, encoding, fraction=1.0)
        encoded = encoder.encode(Segments([memory]), absent=())
        header = replace(trainer.header(), encoding=encoding, encoded_bytes=encoded.nbytes)
        return trainer.push(header, encoded).result

    with pytest.raises(NonFiniteGradient, match="'w' has "):
        push(spoilt(trainer, "w", 100, np.inf))
    assert push(trainer.arena(1.0)) is PushResult.STAGED


def test_a_gradient_that_overflows_in_its_encoding_is_refused_by_the_server(wired: Shard) -> None:
    trainer = created(wired, FLOATS)
    encoded = GradientEncoder(FLOATS, FloatEncoding.FLOAT16, fraction=1.0).encode(Segments([spoilt(trainer, "b", 1, 1e30)]), absent=())
    with pytest.raises(NonFiniteGradient, match="'b' has 1 non-finite value"):
        trainer.push(replace(trainer.header(), encoding=FloatEncoding.FLOAT16, encoded_bytes=encoded.nbytes), encoded)


def test_a_server_that_applies_on_arrival_refuses_nonfinite_gradients_before_it_applies(trainer: Trainer) -> None:
    trainer.create(1.0)
    trainer.configure(1, applies_on_arrival=True, rejects_nonfinite=True)
    with pytest.raises(NonFiniteGradient, match="'w' has 1 non-finite value"):
        trainer.push(trainer.header(), spoilt(trainer, "w", 0, np.nan))
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0))
    assert trainer.push(trainer.header()).result is PushResult.APPLIED
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))


def test_refusing_nonfinite_gradients_can_be_switched_off_again(wired: Shard) -> None:
    trainer = created(wired, FLOATS)
    trainer.configure(2)
    assert trainer.push(trainer.header(), spoilt(trainer, "w", 0, np.nan)).result is PushResult.STAGED
