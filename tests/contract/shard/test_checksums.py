"""Every `Shard` reports checksums of the contributions that it applies: equal ones for equal gradients, on each transport."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ps_protocol.encodings.formats import FloatEncoding
from ps_protocol.encodings.gradients import GradientEncoder
from ps_protocol.model.layout import Segments
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.updates import FormulaUpdate
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import PushResult, Shard
from tests.support.parameter_servers.shards import EACH_WAY, Trainer, layout_of, shard_over, table, variable

shard = shard_over(EACH_WAY)

_PLAIN = OptimizerSpec(name="assign_mean", learning_rate=constant(1.0))
_STATE = VariableSpec(name="state", data_type=DataType.FLOAT32, shape=(6,), optimizer=_PLAIN)
# Padding, two element types, one that formulas may write, and a table.
LAYOUT = layout_of(
    variable("w", (40, 7)),
    variable("b", (3,)),
    variable("d", (9,), DataType.FLOAT64),
    replace(variable("state", (6,)), variable=_STATE),
    table("emb", (10, 3)),
)
STATE = 3
Give = Callable[[Trainer, int, float], PushId]


@pytest.fixture
def all_kinds(shard: Shard) -> Trainer:
    trainer = Trainer(shard, LAYOUT)
    trainer.create()
    return trainer


def _dense(trainer: Trainer, worker: int, change: float) -> PushId:
    arena = trainer.random(1)
    LAYOUT.view(arena, 1)[2] += change
    header = trainer.header(worker)
    assert trainer.push(header, arena).result is PushResult.STAGED
    return header.push_id


def _padded(trainer: Trainer, worker: int, change: float) -> PushId:
    """With other bytes between the variables, which mean nothing."""
    arena = trainer.random(1)
    used = np.zeros(arena.size, bool)
    for piece, start in zip(LAYOUT.slices, LAYOUT.offsets, strict=True):
        used[start : start + piece.nbytes] = True
    arena[~used] = worker + 1
    LAYOUT.view(arena, 0)[0, 0] += change
    header = trainer.header(worker)
    trainer.push(header, arena)
    return header.push_id


def _in_part(trainer: Trainer, worker: int, change: float) -> PushId:
    """Without a gradient for two variables, where there may be anything."""
    arena = trainer.random(1)
    for position in (0, 2):
        LAYOUT.view(arena, position)[...] = worker + 7
    LAYOUT.view(arena, 1)[0] += change
    header = trainer.header(worker, absent=(0, 2))
    trainer.push(header, arena)
    return header.push_id


def _rows(trainer: Trainer, worker: int, change: float) -> PushId:
    return trainer.push_rows(worker, rows={0: ([7, 2], [[1.0, 2.0, 3.0 + change], [4.0] * 3])}, dense=trainer.random(1))[0].push_id


def _other_rows(trainer: Trainer, worker: int, change: float) -> PushId:
    return trainer.push_rows(worker, rows={0: ([7, 2 + int(change)], 1.0)})[0].push_id


def _formula(trainer: Trainer, worker: int, change: float) -> PushId:
    formula = FormulaUpdate(text="v = v + g * by", variables={"v": STATE}, arrays={"g": STATE}, numbers={"by": 2.0 + change})
    header = replace(trainer.header(worker, absent=(0, 1, 2)), formulas=(formula,))
    trainer.push(header, trainer.random(1))
    return header.push_id


def _array_of_a_formula(trainer: Trainer, worker: int, change: float) -> PushId:
    formula = FormulaUpdate(text="v = v + g", variables={"v": STATE}, arrays={"g": STATE})
    arena = trainer.random(1)
    LAYOUT.view(arena, STATE)[5] += change
    header = replace(trainer.header(worker, absent=(0, 1, 2)), formulas=(formula,))
    trainer.push(header, arena)
    return header.push_id


def _encoded(encoding: FloatEncoding) -> Give:
    def give(trainer: Trainer, worker: int, change: float) -> PushId:
        arena = trainer.random(1)
        LAYOUT.view(arena, 0)[...] *= 1 + change
        content = GradientEncoder(LAYOUT, encoding, fraction=0.1).encode(Segments([arena]))
        header = replace(trainer.header(worker), encoding=encoding, encoded_bytes=content.nbytes)
        trainer.push(header, content)
        return header.push_id

    return give


_KINDS: dict[str, Give] = {
    "dense": _dense,
    "padding": _padded,
    "in part": _in_part,
    "rows": _rows,
    "indices": _other_rows,
    "number of a formula": _formula,
    "array of a formula": _array_of_a_formula,
} | {encoding.name: _encoded(encoding) for encoding in FloatEncoding if encoding is not FloatEncoding.AS_IS}


@pytest.mark.parametrize("kind", _KINDS)
def test_checksums_are_equal_exactly_for_equal_gradients(all_kinds: Trainer, kind: str) -> None:
    trainer, give = all_kinds, _KINDS[kind]
    given = [give(trainer, worker, change) for worker, change in enumerate((0.0, 0.0, 1.0))]
    reply = trainer.shard.call(replace(trainer.request(*given), wants_checksums=True))
    first, second, changed = reply.checksums
    assert first == second != changed


def test_checksums_come_when_they_are_asked_for_and_again_with_the_answer(all_kinds: Trainer) -> None:
    trainer, replies = all_kinds, []
    for step, wants_checksums in enumerate((False, True, True, False)):
        header = trainer.header(step=step)
        trainer.push(header, trainer.random(1))
        request = replace(trainer.request(header.push_id, step=step), wants_checksums=wants_checksums)
        replies.append(trainer.shard.call(request))
        again = trainer.shard.call(request)
        assert (again.repeated_request, again.checksums) == (True, replies[-1].checksums)
    assert [len(reply.checksums) for reply in replies] == [0, 1, 1, 0]
    assert replies[1].checksums == replies[2].checksums
