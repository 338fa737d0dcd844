"""Sessions that share memory with their servers: no needless copy is made, and nothing that is being sent is overwritten."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import worker_client
from ps_protocol.errors import DeadlineExceeded, InvalidSpec
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.variables import Array
from ps_protocol.rpc.memory import MemoryNotShared
from ps_protocol.rpc.shard import GrpcShard
from tests.support.cluster.here import ServedCluster
from tests.support.cluster.shape import Shape
from worker_client import Session

Opening = Callable[..., Session]


@pytest.fixture
def opened(socket_dir: Path) -> Iterator[Opening]:
    """Opens sessions of one cluster, with a model of whole variables and one that is split over the servers."""
    with ExitStack() as stack:
        clusters: list[ServedCluster] = []

        def open_session(shape: Shape | None = None, *, policy: PolicySpec | None = None) -> Session:
            if not clusters:
                clusters.append(ServedCluster(shape or Shape(num_ps=2), stack, directory=socket_dir, transport="shared_memory"))
            session = clusters[0].session()
            if policy is not None:
                session.set_policy(policy, timeout_s=20)
            session.create_or_join(values(0.0), optimizer=worker_client.sgd(1.0), split_bytes=256)
            return session

        yield open_session


def values(value: float) -> dict[str, Array]:
    return {"w": np.full((5, 3), value, np.float32), "b": np.full(3, value), "split": np.full((40, 4), value, np.float32)}


def assert_all(variables: dict[str, Array], value: float) -> None:
    for name, array in variables.items():
        np.testing.assert_array_equal(array, np.full(array.shape, value), err_msg=name)


def fill(arrays: dict[str, Array], value: float) -> dict[str, Array]:
    for array in arrays.values():
        array[...] = value
    return arrays


def test_arrays_of_gradients_are_the_same_from_step_to_step_and_variables_those_of_the_servers(opened: Opening) -> None:
    session = opened()
    assert session.transport == ("shared_memory", "shared_memory")
    kept, seen = session.gradient_buffers(), []
    for step in range(6):
        variables = session.views()
        assert_all(variables, -step)
        assert not variables["w"].flags.writeable
        seen.append(variables["w"])
        assert session.step(fill(kept, 1)).is_accepted
        assert all(session.gradient_buffers()[name] is kept[name] for name in kept)
    # Two buffers by turns, whose views are made once; what is cut is copied, into the same memory each time.
    assert len({id(array) for array in seen}) == 2
    assert all(a is b for a, b in zip(seen, seen[2:], strict=False))


def test_final_variables_do_not_lie_with_the_servers(opened: Opening) -> None:
    session = opened()
    session.step(fill(session.gradient_buffers(), 1))
    before = session.views()
    session.finish("enough")
    after = session.views()
    assert_all(after, -1)
    assert not np.shares_memory(before["w"], after["w"])


def test_writing_to_an_array_after_a_push_does_not_change_the_contribution_under_way(opened: Opening) -> None:
    session = opened(Shape(num_ps=2, replicas_to_aggregate=2, num_workers=2))
    other = opened()
    kept = session.gradient_buffers()
    views = {name: array.reshape(-1)[1:] for name, array in kept.items()}
    for step in range(3):
        assert session.push(fill(kept, 2)).is_accepted
        fill(views, 1000)
        fill(kept, 1000)
        assert all(session.gradient_buffers()[name] is kept[name] for name in kept)
        assert other.push(values(4.0)).is_accepted
        for each in (session, other):
            assert each.wait(timeout_s=20)
            assert_all(each.views(), -3 * (step + 1))


def test_arrays_of_a_step_that_was_given_up_are_read_only_until_it_is_over(opened: Opening) -> None:
    session = opened(Shape(num_ps=2, replicas_to_aggregate=2, num_workers=2))
    other = opened()
    kept = session.gradient_buffers()
    with pytest.raises(DeadlineExceeded):
        session.step(fill(kept, 2), timeout_s=0.05)
    with pytest.raises(ValueError, match="read-only"):
        kept["w"][...] = 1000
    fill(session.gradient_buffers(), 1000)  # others meanwhile, but for those that are copied anyway
    other.step(values(4.0), timeout_s=20)
    assert session.wait(timeout_s=20)
    assert_all(session.views(), -3)
    fill(kept, 1)
    assert all(session.gradient_buffers()[name] is kept[name] for name in kept)


@pytest.mark.parametrize("call", ["push", "step"])
@pytest.mark.parametrize(
    "changed",
    [
        worker_client.async_policy(),
        worker_client.ssp_policy(1),
        worker_client.sync_policy(tokens="fifo"),
    ],
    ids=["async", "ssp", "fifo"],
)
def test_kept_arrays_keep_training_under_another_policy(opened: Opening, socket_dir: Path, changed: PolicySpec, call: str) -> None:
    session = opened(Shape(num_ps=2))
    kept = session.gradient_buffers()
    views = {name: array.reshape(-1) for name, array in kept.items()}
    with worker_client.observe(f"unix:{socket_dir}/chief") as operator:
        value, counted = 0, []
        for policy in (None, changed, worker_client.sync_policy(), changed):
            if policy is not None:
                operator.set_policy(policy, timeout_s=20)
            for _ in range(6):
                value += 1
                result = session.push(fill(kept, value)) if call == "push" else session.step(fill(kept, value), timeout_s=20)
                counted += [value] if result.is_accepted else []
                fill(views, 1000)
                if call == "push":
                    session.wait(timeout_s=20)
        assert len(counted) >= 20  # a change may cost one that was on its way
        while (found := operator.status().global_step) < len(counted):
            assert session.wait(timeout_s=20), found
    assert_all(session.read(), -sum(counted))


def test_several_contributions_to_one_step_do_not_overwrite_each_other(opened: Opening) -> None:
    session = opened(Shape(num_ps=2, replicas_to_aggregate=3, num_workers=1))
    for step in range(3):
        for value in (1, 2, 6):
            assert session.step(fill(session.gradient_buffers(), value), timeout_s=20).is_accepted
        assert_all(session.views(), -3 * (step + 1))


def test_a_worker_that_reuses_its_arrays_may_give_several_contributions_to_one_step(opened: Opening) -> None:
    session = opened(Shape(num_ps=2, replicas_to_aggregate=3, num_workers=1))
    kept = session.gradient_buffers()
    for step in range(3):
        for value in (1, 2, 6):
            assert session.step(fill(kept, value), timeout_s=20).is_accepted
        assert_all(session.views(), -3 * (step + 1))


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "asked for each time"])
@pytest.mark.parametrize("policy", [worker_client.ssp_policy(3), worker_client.async_policy()], ids=["ssp", "async"])
def test_contributions_under_way_are_all_applied_once(opened: Opening, policy: PolicySpec, is_kept: bool) -> None:
    session = opened(policy=policy)
    kept = session.gradient_buffers()
    for value in range(20):
        session.push(fill(kept if is_kept else session.gradient_buffers(), value))
    # Each is a step by itself, so the last one is part of what is read when so many steps are applied.
    while session.status().global_step < 20:
        session.wait(timeout_s=20)
    assert_all(session.views(), -sum(range(20)))


def test_foreign_arrays_and_missing_gradients_are_accepted_over_shared_memory(opened: Opening) -> None:
    session = opened()
    gradients = values(1.0)
    session.step({**gradients, "w": gradients["w"].T.copy().T, "b": None})
    np.testing.assert_array_equal(session.views()["b"], np.zeros(3))
    np.testing.assert_array_equal(session.views()["w"], np.full((5, 3), -1))
    session.step(gradients, metrics={"loss": 3.0})
    assert session.read_metrics()["loss"].sum == 3.0
    assert_all({name: array for name, array in session.views().items() if name != "b"}, -2)


def test_slow_backup_worker_continues_with_a_step_that_is_still_kept(opened: Opening) -> None:
    slow, fast = opened(Shape(num_ps=2, replicas_to_aggregate=1, num_workers=2)), opened()
    slow.read()
    for _ in range(5):
        fast.step(fill(fast.gradient_buffers(), 1), timeout_s=20)
    assert_all(slow.read(), -5)
    assert slow.local_step == 5
    assert slow.step(fill(slow.gradient_buffers(), 1), timeout_s=20).is_accepted


def test_a_session_continues_over_grpc_when_its_memory_is_no_longer_shared(opened: Opening) -> None:
    session = opened()
    kept = session.gradient_buffers()
    session.step(fill(kept, 1))
    for memory in session.membership.shards().memories.of.values():
        memory.close()
    assert session.transport == ("grpc", "grpc")
    for step in range(1, 4):
        assert_all(session.views(), -step)
        session.step(fill(kept, 1), timeout_s=20)
    session.step(fill(session.gradient_buffers(), 1), timeout_s=20)
    assert_all(session.views(), -5)


@pytest.mark.parametrize("policy", [worker_client.sync_policy(), worker_client.ssp_policy(1)], ids=["sync", "ssp"])
def test_memory_that_was_lost_for_a_while_is_shared_again(
    opened: Opening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, policy: PolicySpec
) -> None:
    session = opened(policy=policy)
    memories = session.membership.shards().memories
    monkeypatch.setattr("worker_client.shards.shards._LOOK_AGAIN_S", 0.0)
    for step in range(6):
        assert_all(session.views(), -step)
        gradients = session.gradient_buffers()
        if step % 2:
            for memory in memories.of.values():
                memory.close()
            assert session.transport == ("grpc", "grpc")
        session.step(fill(gradients, 1), timeout_s=20)
        session.views()
        assert session.transport == ("shared_memory", "shared_memory")
    assert_all(session.views(), -6)


def test_transport_is_known_still_when_the_session_is_closed(opened: Opening) -> None:
    session = opened()
    session.close()
    assert session.transport == ("shared_memory", "shared_memory")


@pytest.mark.parametrize("policy", [worker_client.sync_policy(), worker_client.async_policy()], ids=["sync", "async"])
def test_shared_memory_rounds_nothing_whatever_the_wire_format(socket_dir: Path, policy: PolicySpec) -> None:
    with ExitStack() as stack:
        cluster = ServedCluster(Shape(num_ps=2), stack, directory=socket_dir)
        session = stack.enter_context(worker_client.connect(cluster.chief_address, transport="shared_memory", wire="bfloat16"))
        session.set_policy(policy, timeout_s=20)
        session.create_or_join(values(0.0), optimizer=worker_client.sgd(1.0), split_bytes=256)
        kept, fine = session.gradient_buffers(), 1 + 2**-12
        for step in range(1, 3):
            session.step(fill(kept, fine), timeout_s=20)
            while session.status().global_step < step:
                session.wait(timeout_s=20)
        assert_all(session.views(), -2 * fine)


def test_memory_that_cannot_be_shared_is_an_error_only_if_it_is_asked_for(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise MemoryNotShared("another user's process", is_same_host=True)

    monkeypatch.setattr(GrpcShard, "share", refuse)
    with ExitStack() as stack:
        asking = ServedCluster(Shape(num_ps=2, num_workers=2), stack, directory=socket_dir, transport="shared_memory")
        with pytest.raises(MemoryNotShared, match=r"ps 0 at .*transport='shared_memory' cannot be had: another user.*transport='auto'"):
            asking.session().create_or_join(values(0.0), optimizer=worker_client.sgd(1.0), split_bytes=256)
        with worker_client.connect(asking.chief_address, timeout_s=20) as session, caplog.at_level(logging.WARNING):
            session.create_or_join(values(0.0), optimizer=worker_client.sgd(1.0), split_bytes=256)
            assert session.transport == ("grpc", "grpc")
            assert_all(session.views(), 0)
    assert 1 <= sum("memory is not shared with ps" in record.getMessage() for record in caplog.records) <= 2


def test_unknown_transport_is_refused_before_anybody_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSpec, match="transport: got 'rdma', want one of 'auto', 'shared_memory', 'sockets', 'grpc'"):
        worker_client.connect("unix:/nowhere", transport="rdma")
    monkeypatch.setenv("LOCKSTEP_TRANSPORT", "tcp")
    with pytest.raises(InvalidSpec, match="transport: got 'tcp'"):
        worker_client.connect("unix:/nowhere")
