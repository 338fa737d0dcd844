"""DiLoCo computes what its paper says, with any number of workers, and loses nothing that was contributed."""

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")
nn = torch.nn

import lockstep
import lockstep.torch as lt
from lockstep.errors import InvalidSpec
from lockstep.in_process import InProcessCluster
from tests.frameworks.torch.test_optimizer import distance, made, stepped
from tests.support.cluster.here import start_over
from tests.support.cluster.shape import Shape, Start

start = start_over(["grpc"])

RATE, MOMENTUM = 0.5, 0.8
OUTER = lockstep.momentum(RATE, MOMENTUM, use_nesterov=True)


def inner_of(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def reference(*, num_workers: int, sync_every: int, num_outer: int) -> Any:
    """Algorithm 1 of the paper, with torch's own outer optimizer."""
    anchor = made()
    outer = torch.optim.SGD(anchor.parameters(), lr=RATE, momentum=MOMENTUM, nesterov=True)
    workers = [made() for _ in range(num_workers)]
    inners = [inner_of(model) for model in workers]
    for round_ in range(num_outer):
        for index, (model, inner) in enumerate(zip(workers, inners, strict=True)):
            model.load_state_dict(anchor.state_dict())
            for step in range(sync_every):
                stepped(model, inner, batch(index, num_workers, round_ * sync_every + step))
        for position, parameter in enumerate(anchor.parameters()):
            deltas = [parameter.detach() - [*model.parameters()][position].detach() for model in workers]
            parameter.grad = sum(deltas) / num_workers
        outer.step()
    return anchor


def batch(index: int, num_workers: int, step: int) -> int:
    return (step * num_workers + index) % 100


@pytest.mark.parametrize(("num_workers", "sync_every"), [(1, 1), (1, 5), (2, 4), (3, 7)])
def test_it_computes_what_the_paper_says(num_workers: int, sync_every: int) -> None:
    cluster = InProcessCluster(num_ps=2, replicas_to_aggregate=num_workers, total_num_replicas=num_workers)
    models = [made() for _ in range(num_workers)]  # here: threads share the generator of first values
    found: list[Any] = [None] * num_workers

    def work(index: int) -> None:
        model = models[index]
        inner = inner_of(model)
        with (
            lockstep.local(cluster, worker_index=index) as session,
            lt.DiLoCo(session, model, inner, sync_every=sync_every, outer=OUTER) as loop,
        ):
            for step in range(3 * sync_every):
                stepped(model, inner, batch(index, num_workers, step))
            assert (loop.outer.global_step, loop.outer.num_inner_steps) == (3, 3 * sync_every)
            found[index] = model

    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    expected = reference(num_workers=num_workers, sync_every=sync_every, num_outer=3)
    for model in found:
        assert distance(model, expected) < 1e-5
        assert distance(model, found[0]) == 0


def test_with_a_rate_of_one_the_mean_of_the_parameters_is_what_comes_out() -> None:
    mine, theirs = made(), made()
    inner = inner_of(mine)
    alone: Any = {"sync_every": 4, "by_speed": True}  # so the fastest, too
    with lockstep.local() as session, lt.DiLoCo(session, mine, inner, outer=lockstep.sgd(1.0), **alone):
        for step in range(12):
            stepped(mine, inner, step)
    plain = inner_of(theirs)
    for step in range(12):
        stepped(theirs, plain, step)
    assert distance(mine, theirs) < 1e-5


def test_inner_steps_that_were_not_contributed_are_told_and_sync_contributes_them(caplog: pytest.LogCaptureFixture) -> None:
    model = made()
    inner = inner_of(model)
    with lockstep.local() as session:
        with lt.DiLoCo(session, model, inner, sync_every=10) as loop:
            for step in range(13):
                stepped(model, inner, step)
            loop.sync()
            assert loop.outer.global_step == 2
            assert session.model().optimizer == lockstep.outer_optimizer(10)
            stepped(model, inner, 13)
        assert "1 inner steps since outer step 2 were not contributed: call sync() first" in caplog.text
        stepped(model, inner, 14)
        assert session.local_step == 2


def test_an_exception_contributes_nothing_and_the_gradient_is_the_programs_own() -> None:
    model, plain = made(), made()
    inner, alone = inner_of(model), inner_of(plain)
    cluster = InProcessCluster()
    with lockstep.local(cluster) as session, pytest.raises(ZeroDivisionError), lt.DiLoCo(session, model, inner, sync_every=2):
        for step in range(2):
            stepped(model, inner, step)
            stepped(plain, alone, step)
        assert torch.equal(model[0].weight.grad, plain[0].weight.grad)
        stepped(model, inner, 2)
        raise ZeroDivisionError
    with lockstep.observe_local(cluster) as observer:
        assert observer.status().global_step == 1


def test_buffers_are_averaged_and_whole_numbers_are_worker_0s_in_fragments_and_beside_inner_steps() -> None:
    cluster, models = InProcessCluster(replicas_to_aggregate=2, total_num_replicas=2), [with_batch_norm() for _ in range(2)]
    found: list[Any] = [None, None]

    def work(index: int) -> None:
        model = models[index]
        inner = inner_of(model)
        with (
            lockstep.local(cluster, worker_index=index) as session,
            lt.DiLoCo(session, model, inner, sync_every=6, fragments=3, delay=1, alpha=0.5, outer=OUTER) as loop,
        ):
            for step in range(13 + index):
                model(torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * index + step)) + index).sum().backward()
                if step < 13:
                    inner.step()
            before = [buffer.clone() for buffer in model.buffers()]
            loop.sync()
            found[index] = before, [*model.buffers()]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for mine, theirs, *now in zip(found[0][0], found[1][0], found[0][1], found[1][1], strict=True):
        assert torch.equal(now[0], now[1])
        assert torch.allclose(now[0].double(), (mine.double() + theirs.double()) / 2) if mine.is_floating_point() else now[0] == mine
    assert models[0][1].num_batches_tracked.dtype == torch.int64


def with_batch_norm() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_wire_is_that_of_the_session_that_is_opened_here(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = made(), {}
    monkeypatch.setattr(lockstep, "connect", lambda **arguments: (given.update(arguments), lockstep.local())[1])
    with lt.DiLoCo({"chief": "here"}, model, inner_of(model), sync_every=2, wire="int8") as loop:
        assert given == {"chief": "here", "wire": "int8"}
        with pytest.raises(TypeError, match="the session is open already"):
            lt.DiLoCo(loop.outer.session, model, inner_of(model), sync_every=2, wire="int8")


def test_an_outer_step_that_fails_leaves_the_inner_ones_and_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = made(), made()
    inner, alone = inner_of(model), inner_of(plain)
    with lockstep.local() as session, lt.DiLoCo(session, model, inner, sync_every=3, outer=lockstep.sgd(1.0)) as loop:
        with monkeypatch.context() as patch, pytest.raises(TimeoutError):
            patch.setattr(session, "step", lambda *_, **__: (_ for _ in ()).throw(TimeoutError))
            for step in range(3):
                stepped(plain, alone, step)
                stepped(model, inner, step)
        assert distance(model, plain) < 1e-6
        loop.sync()
        assert loop.outer.global_step == 1
        assert distance(model, plain) < 1e-6


def test_a_late_worker_loses_nothing_under_the_policy_outer() -> None:
    first, late, *alone = [made() for _ in range(4)]
    cluster, inners = InProcessCluster(replicas_to_aggregate=1, total_num_replicas=2), [inner_of(first), inner_of(late)]
    with lockstep.local(cluster) as one, lockstep.local(cluster) as other:
        one.set_policy(lockstep.outer_policy())
        with (
            lt.DiLoCo(one, first, inners[0], sync_every=2, outer=lockstep.sgd(1.0)) as fast,
            lt.DiLoCo(other, late, inners[1], sync_every=3, outer=lockstep.sgd(1.0)) as slow,
        ):
            begin = copy.deepcopy(late)
            for model, inner, plain, num_inner in ((first, inners[0], alone[0], 2), (late, inners[1], alone[1], 3)):
                plain_inner = inner_of(plain)
                for step in range(num_inner):
                    stepped(model, inner, step)
                    stepped(plain, plain_inner, step)
            assert slow.outer.last_push is not None
            assert slow.outer.last_push.staleness == 1
            assert (slow.outer.global_step, fast.outer.global_step) == (2, 1)
    with torch.no_grad():
        for value, start, *came in zip(*(model.parameters() for model in (late, begin, *alone)), strict=True):
            assert torch.allclose(value, start + sum(one - start for one in came), atol=1e-6)


def test_an_inner_state_that_cannot_be_read_or_is_of_another_training_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = InProcessCluster()
    Path(tmp_path, "worker-0.state").write_bytes(b"damaged")
    for step in range(2):
        model = made()
        inner = inner_of(model)
        session = lockstep.local(cluster, worker_index=0, takeover=bool(step))
        lt.DiLoCo(session, model, inner, sync_every=1, outer=OUTER, inner_state_dir=tmp_path).__enter__()
        assert ("cannot be used" in caplog.text) == bool(step)
        stepped(model, inner, step)
        Path(tmp_path, "worker-0.state").write_bytes(b"damaged again")


def test_a_worker_that_is_started_again_goes_on_with_its_inner_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lockstep.worker")
    whole, cluster = made(), InProcessCluster()
    inner = inner_of(whole)
    with lockstep.local() as session, lt.DiLoCo(session, whole, inner, sync_every=3, outer=OUTER):
        for step in range(12):
            stepped(whole, inner, step)
    for begin in (0, 6):  # the second time in the place of a worker that was killed
        model = made()
        inner = inner_of(model)
        session = lockstep.local(cluster, worker_index=0, takeover=bool(begin))
        lt.DiLoCo(session, model, inner, sync_every=3, outer=OUTER, inner_state_dir=tmp_path).__enter__()
        for step in range(begin, begin + 6):
            stepped(model, inner, step)
    assert "the worker goes on from inner step 6, which outer step 1 was made of" in caplog.text
    assert distance(model, whole) == 0
    model = made()
    with (
        lockstep.local(cluster, worker_index=0, takeover=True) as session,
        lt.DiLoCo(session, model, inner_of(model), sync_every=3, outer=OUTER),
    ):
        assert "the inner optimizer begins anew at outer step 4" in caplog.text


def test_a_schedule_of_the_rate_and_inner_steps_that_grow_with_it_go_on_in_a_worker_that_is_started_again(tmp_path: Path) -> None:
    def train(session: Any, model: Any, until: int) -> None:
        inner = inner_of(model)
        loop = lt.DiLoCo(session, model, inner, sync_every=2, outer=OUTER, inner_state_dir=tmp_path)
        loop.__enter__()
        done = loop.outer.num_inner_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1 / (1 + step), last_epoch=done - 1)
        for step in range(done, until):
            assert inner.param_groups[0]["lr"] == 0.01 * (1 / (1 + step))
            loop.outer.sync_every = (2, 4, 6)[loop.outer.global_step]
            stepped(model, inner, step)
            schedule.step()
        assert loop.outer.global_step == {6: 2, 12: 3}[until]

    whole, cluster = made(), InProcessCluster()
    train(lockstep.local(), whole, 12)
    for until in (6, 12):  # the second time in the place of a worker that was killed
        model = made()
        train(lockstep.local(cluster, worker_index=0, takeover=until == 12), model, until)
    assert distance(model, whole) == 0


def test_what_is_lossy_on_the_wire_is_the_anchor_as_it_was_decoded(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_WIRE", "bfloat16")
    model = made()
    inner = inner_of(model)
    with start(Shape(num_ps=2, num_workers=1)).session() as session, lt.DiLoCo(session, model, inner, sync_every=2, outer=OUTER):
        for step in range(6):
            stepped(model, inner, step)
        for name, value in session.read().items():
            bits = value.view(np.uint32)
            assert not (bits & 0xFFFF).any(), "nothing was rounded on the wire"
            np.testing.assert_array_equal(model.get_parameter(name).detach().numpy(), value)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"sync_every": 0}, InvalidSpec, "sync_every: got 0"),
        ({"sync_every": True}, InvalidSpec, "sync_every: got True"),
        ({"inner": "adam"}, TypeError, "inner: got a str, want an optimizer of torch"),
    ],
)
def test_misuse_is_said(change: dict[str, Any], error: type[Exception], words: str) -> None:
    model = made()
    with lockstep.local() as session, pytest.raises(error, match=words):
        lt.DiLoCo(session, model, **{"inner": inner_of(model), "sync_every": 2, **change})


def test_a_table_is_refused() -> None:
    model = nn.Sequential(lt.Embedding(10, 3), nn.Linear(3, 1))
    with lockstep.local() as session, pytest.raises(TypeError, match=r"'0.weight' is a table on the servers"):
        lt.DiLoCo(session, model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2)
