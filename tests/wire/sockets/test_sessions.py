"""Data sockets during a rollback in the middle of a payload, beside observers that read, and after a fork."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import PsError
from ps_protocol.model.layout import Segments
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy
from ps_protocol.model.variables import Array, DataType, VariableSpec
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import PushHeader, Shard, ShardStatusRequest
from tests.support.chief.eras import era
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.parameter_servers.sharded_training import ShardedTraining
from tests.support.parameter_servers.shards import open_shard
from tests.support.processes.processes import talking

TIMEOUT_S = 20.0
SIZE = 1 << 18
MODEL = ModelSpec(
    variables=(VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(SIZE,)),),
    optimizer=OptimizerSpec(name="momentum", learning_rate=constant(0.5)),
    placement=PlacementPolicy(),
)


class Halves:
    """The bytes of a contribution, as Segments has them; the second half comes once `go_on` is set."""

    def __init__(self, memory: Array) -> None:
        self.memory, self.nbytes = memory, memory.nbytes
        self.has_begun, self.go_on = threading.Event(), threading.Event()

    def chunks(self, max_bytes: int) -> Iterator[tuple[int, memoryview]]:
        half = self.nbytes // 2
        yield 0, self.memory.data[:half]
        self.has_begun.set()
        assert self.go_on.wait(TIMEOUT_S)
        yield half, self.memory.data[half:]


def training_on(shard: Shard, directory: Path) -> ShardedTraining:
    training = ShardedTraining(shards=[shard], model=MODEL, checkpoint_dir=str(directory))
    training.create()
    training.train(2)
    training.save("two")
    training.train(1)
    return training


def test_rollback_in_the_middle_of_a_payload_leaves_nothing_of_it(tmp_path: Path, socket_dir: Path) -> None:
    with ExitStack() as stack:
        trainings = []
        for name in ("disturbed", "quiet"):
            directory = tmp_path / name
            shard = stack.enter_context(open_shard("sockets", socket_dir=socket_dir, checkpoint_dir=str(directory)))
            trainings.append(training_on(shard, directory))
        disturbed, quiet = trainings
        shard, halves, errors = disturbed.shards[0], Halves(np.full(4 * SIZE, 0x40, np.uint8)), list[PsError]()
        header = PushHeader(era=era(disturbed.epoch), push_id=PushId(7, 1, 1), step=3, layout_hash=disturbed.layouts[0].hash)

        def push() -> None:
            with pytest.raises(PsError) as raised:
                shard.push_gradients(header, cast("Segments", halves))
            errors.append(raised.value)

        thread = threading.Thread(target=push)
        thread.start()
        assert halves.has_begun.wait(TIMEOUT_S)
        for training in trainings:
            training.restore("two", step=2, epoch=4)
        assert shard.call(ShardStatusRequest()).report.num_staged == 0
        halves.go_on.set()
        thread.join(TIMEOUT_S)
        assert len(errors) == 1
        with pytest.raises(PsError, match="epoch is 4, you have epoch 3"):
            shard.push_gradients(header, Segments([halves.memory]))
        # What comes in the new epoch comes over sockets again, and nothing else counts.
        for training in trainings:
            training.train(2)
        assert disturbed.state() == quiet.state()
        assert shard.call(ShardStatusRequest()).report.num_staged == 0


def test_observers_read_whole_steps_while_workers_train_over_sockets(socket_dir: Path) -> None:
    with ExitStack() as stack:
        cluster = ServedCluster(Shape(num_workers=2), stack, directory=socket_dir, transport="sockets")
        workers = [cluster.session(index) for index in range(2)]
        threads = [threading.Thread(target=_train, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        observer = cluster.observer()
        steps = set[int]()
        while any(thread.is_alive() for thread in threads):
            values = observer.read()["w"]
            assert observer.step is not None
            assert (values == -observer.step).all()
            steps.add(observer.step)
        for thread in threads:
            thread.join(TIMEOUT_S)
        assert len(steps) > 2
        assert all(worker.transport == ("sockets",) for worker in workers)


def _train(session: Any) -> None:
    session.create_or_join({"w": np.zeros(SIZE, np.float32)}, optimizer=worker_client.sgd(1.0), timeout_s=TIMEOUT_S)
    ones = {"w": np.ones(SIZE, np.float32)}
    for _ in range(20):
        assert session.step(ones, timeout_s=TIMEOUT_S).is_accepted


@pytest.mark.shows("F32")
def test_forked_child_leaves_the_parents_data_socket_alone(socket_dir: Path) -> None:
    script = f"""
import os, sys, numpy, worker_client
ones = {{"w": numpy.ones({SIZE}, numpy.float32)}}
with worker_client.connect(sys.argv[1], transport="sockets") as session:
    session.create_or_join({{"w": numpy.zeros({SIZE}, numpy.float32)}}, optimizer=worker_client.sgd(0.5))
    session.step(ones)
    pid = os.fork()
    if pid == 0:
        try:
            session.step(ones)
        except RuntimeError as error:
            print("child:", error, flush=True)
        session.close()
        os._exit(0)
    os.waitpid(pid, 0)
    outcomes = [session.step(ones).outcome.name for _ in range(3)]
    print("parent:", *outcomes, session.transport, float(session.read()["w"].min()), flush=True)
"""
    with ExitStack() as stack:
        cluster = ServedCluster(Shape(), stack, directory=socket_dir)
        process = talking(stack, sys.executable, "-W", "ignore", "-c", script, cluster.chief_address, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert "a fork must connect anew" in process.stdout.readline().decode()
        assert process.stdout.readline().decode().strip() == "parent: ACCEPTED ACCEPTED ACCEPTED ('sockets',) -2.0"
