"""Readers and workers in many threads at once, over every transport: no reader sees a torn model, and no contribution is lost."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ps_protocol.errors import (
    PsError,
    StepGone,
)
from ps_protocol.model.layout import Segments
from ps_protocol.roles.shard import PushResult, Shard
from tests.support.parameter_servers.shards import TRANSPORTS, Trainer, layout_of, shard_over, variable

shard = shard_over(TRANSPORTS)


def _run(*tasks: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(tasks)) as pool:
        for future in [pool.submit(task) for task in tasks]:
            future.result(50)


def test_readers_never_see_a_torn_model(shard: Shard) -> None:
    """Two workers, a chief, and three readers that read as fast as they can; every read is of one step, bit for bit."""
    layout, num_steps = layout_of(variable("w", (1 << 18,)), variable("b", (5,))), 10
    trainer = Trainer(shard, layout)
    trainer.create()
    is_done = threading.Event()
    reads: list[int] = []

    def train() -> None:
        try:
            for step in range(num_steps):
                headers = [trainer.header(worker, step=step) for worker in range(2)]
                with ThreadPoolExecutor(2) as workers:
                    for reply in workers.map(trainer.push, headers, [trainer.arena(1.0), trainer.arena(3.0)]):
                        assert reply.result is PushResult.STAGED
                trainer.apply(*(header.push_id for header in headers), step=step)
        finally:
            is_done.set()

    def read() -> None:
        while not is_done.is_set():
            try:
                step, values = trainer.read()
            except StepGone:
                continue
            np.testing.assert_array_equal(values, trainer.arena(0.0 - step))
            reads.append(step)

    _run(train, read, read, read)
    step, values = trainer.read()
    assert step == num_steps
    np.testing.assert_array_equal(values, trainer.arena(0.0 - num_steps))
    assert reads, "no reader came through"


def test_many_workers_push_at_once(shard: Shard) -> None:
    trainer, num_workers = Trainer(shard), 16
    trainer.create()
    headers = [trainer.header(worker) for worker in range(num_workers)]
    gradients = [trainer.arena(float(worker)) for worker in range(num_workers)]
    with ThreadPoolExecutor(num_workers) as workers:
        # Each of them twice, one after the other: of two at once the later would displace the earlier.
        results = [reply.result for _ in range(2) for reply in list(workers.map(trainer.push, headers, gradients))]
    assert results.count(PushResult.STAGED) == num_workers
    trainer.apply(*(header.push_id for header in headers))
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(-0.5 * (num_workers - 1) / 2))


def test_a_caller_may_pass_several_segments(shard: Shard) -> None:
    trainer = Trainer(shard)
    trainer.create()
    values = trainer.arena(4.0)
    header = trainer.header()
    pieces = Segments([values[:64], values[64:65], values[65:65], values[65:]])
    assert shard.push_gradients(header, pieces).result is PushResult.STAGED
    trainer.apply(header.push_id)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(-2.0))


def test_a_read_that_is_refused_leaves_no_cycle(shard: Shard) -> None:
    """A program that makes few objects seldom looks for cycles: the error would keep what its frames hold for hours."""
    trainer, error = Trainer(shard, layout_of(variable("w", (4,)))), None
    gc.disable()
    try:
        try:
            trainer.read()
        except PsError as raised:
            error = weakref.ref(raised)
        assert error is not None and error() is None
    finally:
        gc.enable()
