"""Training through a network that loses, doubles, delays and reorders calls ends with the same bytes as training without faults."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import worker_client
from chief.options import CoordinationConfig
from chief.serving.in_process import InProcessChief
from ps_protocol.model.variables import Array
from ps_protocol.roles.chief import Chief, ParticipantKind
from ps_protocol.roles.shard import Shard
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.rpc.shard import GrpcShard
from ps_server.serving.local import InProcessShard
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from tests.support.network.faults import REPEATS, WORST, Nemesis
from worker_client import PushOutcome, Session
from worker_client.cluster.chief import ChiefLink
from worker_client.cluster.transport import LocalTransport

NUM_WORKERS, NUM_STEPS = 3, 8
VALUES = {"a": np.linspace(0, 1, 40), "b": np.linspace(-1, 0, 17, dtype=np.float32).astype(np.float64)}

Opened = tuple[Chief, list[Shard]]


class _NobodyBetween:
    """One chief and its shards, as each worker reaches them."""

    def __init__(self, kind: str, stack: ExitStack, directory: Path, *, seed: int | None) -> None:
        self._kind, self._seed, self.nemeses = kind, seed, list[Nemesis]()
        self._stack = stack
        if kind == "grpc":
            shape = Shape(num_ps=2, replicas_to_aggregate=NUM_WORKERS, num_workers=NUM_WORKERS)
            cluster = ServedCluster(shape, stack, directory=directory)
            self._addresses, self._chief_address = cluster.ps_addresses, cluster.chief_address
            return
        shards: list[Any] = [InProcessShard(index=index) for index in range(2)]
        self._shards = shards
        config = CoordinationConfig(replicas_to_aggregate=NUM_WORKERS, total_num_replicas=NUM_WORKERS, lease_s=1e9)
        # A chief in process does not repeat what it asks of shards: nothing can be cut off there.
        self._chief = InProcessChief(
            [self._behind(shard, index, REPEATS) for index, shard in enumerate(shards)], config=config, clock=lambda: 0.0
        )

    def link(self, worker: int) -> ChiefLink:
        def open_shard(index: int) -> Shard:
            shard = GrpcShard(self._addresses[index], index=index) if self._kind == "grpc" else self._shards[index]
            return self._behind(shard, 10 * worker + index)  # type: ignore[no-any-return]

        chief = GrpcChief(self._chief_address) if self._kind == "grpc" else self._chief
        self._stack.callback(chief.close)
        way = LocalTransport(open_shard, timeout_s=40.0, is_in_process=False)
        return ChiefLink(self._behind(chief, 10 * worker + 9), way)

    def _behind(self, target: Any, number: int, evils: tuple[str, ...] = WORST) -> Any:
        if self._seed is None:
            return target
        nemesis = Nemesis(target, seed=self._seed * 1000 + number, evils=evils)
        self.nemeses.append(nemesis)
        return nemesis


def _gradient(worker: int, step: int) -> dict[str, Array]:
    return {name: np.sin(np.arange(value.size, dtype=np.float64) * (worker + 2) + step) for name, value in VALUES.items()}


def _train(session: Session, outcomes: list[PushOutcome]) -> None:
    while session.local_step < NUM_STEPS:
        session.read()
        outcomes.append(session.step(_gradient(session.worker_index, session.local_step), timeout_s=40).outcome)


@contextmanager
def _trained(kind: str, directory: Path, *, seed: int | None) -> Iterator[tuple[dict[str, Array], Sequence[PushOutcome], Counter[str]]]:
    with ExitStack() as stack:
        network = _NobodyBetween(kind, stack, directory, seed=seed)
        links = [network.link(index) for index in range(NUM_WORKERS)]
        sessions = [
            Session(link, link.register(kind=ParticipantKind.WORKER, index=index, takeover=False)) for index, link in enumerate(links)
        ]
        for session in sessions:
            stack.callback(session.close)
        outcomes: list[PushOutcome] = []
        joins = [
            threading.Thread(target=one.create_or_join, args=(VALUES,), kwargs={"optimizer": worker_client.adam(0.1)}) for one in sessions
        ]
        _run(joins)
        _run([threading.Thread(target=_train, args=(session, outcomes)) for session in sessions])
        for nemesis in network.nemeses:
            nemesis.release_all()
        seen = sum((nemesis.seen for nemesis in network.nemeses), Counter[str]())
        yield sessions[0].read(), outcomes, seen


def _run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive(), "a worker hangs"


@pytest.mark.parametrize(("kind", "seed"), [("in process", 1), ("in process", 2), ("in process", 3), ("grpc", 4)])
@pytest.mark.shows("F16")
def test_lost_doubled_delayed_and_reordered_calls_change_no_bit(kind: str, seed: int, socket_dir: Path) -> None:
    (socket_dir / "good").mkdir()
    (socket_dir / "bad").mkdir()
    with _trained("in process", socket_dir / "good", seed=None) as (want, _, _):
        pass
    with _trained(kind, socket_dir / "bad", seed=seed) as (values, outcomes, seen):
        assert set(outcomes) == {PushOutcome.ACCEPTED}
        for name in want:
            assert values[name].tobytes() == want[name].tobytes()
    for evil in WORST:
        assert any(what.endswith(f" {evil}") for what in seen), f"{evil}: never happened"
    assert seen["push_gradients answer lost"]
