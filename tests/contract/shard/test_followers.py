"""Followers of the variables at every `Shard`."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ps_protocol.encodings.arena import encoded_frames
from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.errors import EpochMismatch, InvalidSpec, LayoutMismatch, NotInitialized, StepGone, StepNotReady
from ps_protocol.model.layout import Layout
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import Array, DataType
from ps_protocol.roles.shard import AdoptRequest, Shard
from ps_protocol.roles.weights import FetchReply, FetchRequest
from ps_protocol.weights.copy import Transfer, WeightCopy
from ps_protocol.weights.words import Selection
from ps_server.shard import followed
from tests.support.chief.eras import era, fence
from tests.support.parameter_servers.shards import CHIEF, EPOCH, MIXED, Trainer, layout_of, table, variable, views
from worker_client.following.follower import decoded

ENCODINGS = (FloatEncoding.AS_IS, FloatEncoding.BFLOAT16, FloatEncoding.FLOAT16)
REQUEST = FetchRequest(era=era(EPOCH), layout_hash=MIXED.hash, encoding=FloatEncoding.BFLOAT16)


class Reader:
    """A copy of the shard's variables that is brought forward."""

    def __init__(
        self, shard: Shard, encoding: FloatEncoding = FloatEncoding.BFLOAT16, slices: tuple[int, ...] = (), layout: Layout = MIXED
    ) -> None:
        self.copy = WeightCopy(Selection(layout, encoding, slices or None))
        self.request = replace(REQUEST, encoding=encoding, slices=slices, layout_hash=layout.hash)
        self.shard = shard

    def bring(self, **more: object) -> FetchReply:
        transfer = Transfer(replace(self.request, held_step=self.copy.step, **more))  # type: ignore[arg-type]
        while not transfer.is_whole:
            transfer.take(self.shard.call(transfer.request))
        update = self.copy.understood(transfer)
        assert not self.copy.put(update)
        self.copy.keep(update)
        return transfer.first


def step(trainer: Trainer, number: int) -> None:
    header = trainer.header(step=number)
    trainer.push(header, trainer.random(number))
    trainer.apply(header.push_id, step=number)


def words_of(trainer: Trainer, encoding: FloatEncoding) -> Array:
    content = b"".join(bytes(frame) for _, frame in encoded_frames(MIXED, trainer.read()[1], encoding, 1 << 20))
    return np.frombuffer(content, np.uint16)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_follower_has_the_bits_of_each_step(trainer: Trainer, encoding: FloatEncoding) -> None:
    trainer.create(1.0)
    reader = Reader(trainer.shard, encoding)
    for number in range(4):
        reply = reader.bring()
        assert (reply.step, reply.newest_step) == (number, number)
        np.testing.assert_array_equal(reader.copy.words, words_of(trainer, encoding))
        step(trainer, number)


def test_a_follower_of_some_variables_gets_these(trainer: Trainer) -> None:
    trainer.create(1.0)
    reader = Reader(trainer.shard, slices=(0, 4))
    for number in range(3):
        reader.bring()
        whole = words_of(trainer, FloatEncoding.BFLOAT16)
        np.testing.assert_array_equal(reader.copy.words, reader.copy.selection.taken_from(whole, Selection(MIXED, FloatEncoding.BFLOAT16)))
        step(trainer, number)


# Dense variables, a table whose rows travel encoded, and one of which the shard has a part, whose optimizer moves all rows.
ADAM = OptimizerSpec(name="adam", learning_rate=constant(0.1))
BOTH = layout_of(
    variable("w", (5,)), table("emb", (50, 3)), variable("b"), table("wide", (6,), DataType.FLOAT64, rows=(2, 6), optimizer=ADAM)
)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("slices", [(2,), (0, 1, 3), (0, 1, 2, 3)])
def test_a_follower_of_tables_has_their_rows_of_each_step(shard: Shard, encoding: FloatEncoding, slices: tuple[int, ...]) -> None:
    trainer, rng = Trainer(shard, BOTH), np.random.default_rng(1)
    trainer.create(1.0)
    reader = Reader(shard, encoding, slices, BOTH)
    for number in range(8):
        if number not in (3, 4):  # several steps at once, too
            reply = reader.bring()
            assert reply.step == number
            for place, index in enumerate(reader.copy.selection.of):
                piece = BOTH.pieces[index]
                content, is_encoded = reader.copy.selection.content_of(reader.copy.words, place)
                found = decoded(content, piece, encoding if is_encoded else FloatEncoding.AS_IS)
                expected = (
                    trainer.rows(range(piece.stop - piece.start), position=index - 2)[1]
                    if piece.variable.is_sparse
                    else views(BOTH, trainer.read()[1])[piece.variable.name]
                )
                np.testing.assert_allclose(found.reshape(-1), np.asarray(expected).reshape(-1), rtol=2**-8 if is_encoded else 0)
        rows = {0: (rng.choice(50, 4, replace=False).tolist(), float(rng.normal())), 1: ([number % 4], 1.0)}
        header, _ = trainer.push_rows(step=number, rows=rows if number != 5 else {}, dense=trainer.arena(float(rng.normal())))
        trainer.apply(header.push_id, step=number)


def test_a_table_is_copied_whole_while_steps_change_it(shard: Shard) -> None:
    """Rows of a step later or earlier than the dense variables would be noticed: each step adds the same to all that it touches."""
    layout = layout_of(variable("w", (5,)), table("emb", (20_000, 8)))
    trainer, rows = Trainer(shard, layout), [*range(0, 20_000, 40)]
    trainer.create(0.0)
    reader, is_over = Reader(shard, FloatEncoding.AS_IS, (0, 1), layout), threading.Event()

    def train() -> None:
        for number in range(60):
            header, _ = trainer.push_rows(step=number, rows={0: (rows, 1.0)}, dense=trainer.arena(1.0))
            trainer.apply(header.push_id, step=number)
        is_over.set()

    thread = threading.Thread(target=train)
    thread.start()
    steps = set()
    while not is_over.is_set() or reader.copy.step != 60:
        try:
            steps.add(reader.bring().step)
        except (StepGone, StepNotReady):
            continue
        dense, table_rows = (reader.copy.selection.content_of(reader.copy.words, place)[0].view(np.float32) for place in (0, 1))
        np.testing.assert_array_equal(table_rows.reshape(-1, 8)[rows], dense[0])
    thread.join()
    assert reader.copy.step == 60


def test_steps_that_pass_faster_than_they_are_encoded_wait_for_a_follower_that_gets_none(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step adds the same to all elements, so that a mixture would be noticed."""
    trainer, made, num_made = Trainer(shard, layout_of(variable("w", (1_000,)))), threading.Condition(), 0
    trainer.create(0.0)
    reader, is_over = Reader(shard, FloatEncoding.AS_IS, layout=trainer.layout), threading.Event()

    def train() -> None:
        nonlocal num_made
        while not is_over.is_set():
            header = trainer.header(step=num_made)
            trainer.push(header, trainer.arena(1.0))
            trainer.apply(header.push_id, step=num_made)
            with made:
                num_made += 1
                made.notify_all()

    def await_steps() -> None:
        with made:
            later = num_made + 3
            made.wait_for(lambda: num_made >= later, timeout=0.2)  # they do not come while they wait for the copy

    def frames_that_take_longer_than_steps(*arguments: Any) -> Iterator[Any]:
        for frame in encoded_frames(*arguments):
            await_steps()
            yield frame

    monkeypatch.setattr(followed, "encoded_frames", frames_that_take_longer_than_steps)
    thread = threading.Thread(target=train)
    thread.start()
    num_had, num_gone = 0, 0
    try:
        while num_had < 4 and num_gone <= 2 * 4:
            try:
                reader.bring(max_wait_s=20.0)
            except StepGone:
                num_gone += 1
                continue
            num_had += 1
            content, _ = reader.copy.selection.content_of(reader.copy.words, 0)
            assert np.unique(content.view(np.float32)).size == 1
    finally:
        is_over.set()
        thread.join()
    assert num_had == 4


def test_a_step_that_is_not_there_yet_is_waited_for(trainer: Trainer) -> None:
    trainer.create(1.0)
    reader = Reader(trainer.shard)
    reader.bring()
    found: list[FetchReply] = []
    thread = threading.Thread(target=lambda: found.append(reader.bring(max_wait_s=20.0)))
    thread.start()
    step(trainer, 0)
    thread.join(20)
    assert [reply.step for reply in found] == [1]


@pytest.mark.parametrize("wanted", [{"held_step": 0}, {"step": 1}])
def test_a_wait_for_a_step_ends_with_the_step_that_can_be_had(trainer: Trainer, wanted: dict[str, int]) -> None:
    trainer.create(1.0)
    with pytest.raises(StepNotReady) as caught:
        trainer.shard.call(replace(REQUEST, max_wait_s=0.01, **wanted))  # type: ignore[arg-type]
    assert caught.value.facts == {"step": "0"}


def test_the_step_before_can_be_had_and_an_earlier_one_cannot(trainer: Trainer) -> None:
    trainer.create(1.0)
    for number in range(3):
        step(trainer, number)
    assert trainer.shard.call(replace(REQUEST, step=2)).step == 2
    with pytest.raises(StepGone) as caught:
        trainer.shard.call(replace(REQUEST, step=1))
    assert caught.value.facts == {"step": "2"}


def test_what_is_wrong_with_a_request_is_said(trainer: Trainer) -> None:
    trainer.adopt()
    with pytest.raises(NotInitialized):
        trainer.shard.call(REQUEST)
    trainer.create(1.0)
    with pytest.raises(EpochMismatch):
        trainer.shard.call(replace(REQUEST, era=era(EPOCH + 1)))
    with pytest.raises(LayoutMismatch):
        trainer.shard.call(replace(REQUEST, layout_hash="another"))
    with pytest.raises(InvalidSpec, match="slices"):
        trainer.shard.call(replace(REQUEST, slices=(99,)))
    with pytest.raises(InvalidSpec, match="offset"):
        trainer.shard.call(replace(REQUEST, offset=1 << 40))


def test_a_new_epoch_ends_the_wait_of_a_follower(trainer: Trainer) -> None:
    trainer.create(1.0)
    found: list[Exception] = []

    def wait() -> None:
        try:
            trainer.shard.call(replace(REQUEST, held_step=0, max_wait_s=20.0))
        except EpochMismatch as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    trainer.shard.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF)))
    thread.join(10)
    assert len(found) == 1
