"""A torch training loop over Lockstep computes what the torch optimizer computes, with each option, and keeps its public interface."""

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")
nn = torch.nn

import lockstep
import lockstep.torch as lt
from lockstep.in_process import InProcessCluster
from ps_protocol.roles.chief import PushOutcome
from worker_client import Push, Session

NUM_STEPS = 100
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.4, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.001, "momentum": 0.5, "maximize": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("AdamW", {"lr": 0.01}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.3, "amsgrad": True}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.0, "foreach": True}),
    ("Adagrad", {"lr": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-4}),
    ("RMSprop", {"lr": 0.01}),
    ("RMSprop", {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.1, "momentum": 0.5, "eps": 1e-4}),
    ("RMSprop", {"lr": 0.001, "centered": True, "momentum": 0.5, "eps": 1e-3}),
    ("Adadelta", {}),
    ("Adadelta", {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1, "eps": 1e-5}),
]
BATCHES = torch.Generator().manual_seed(1)
X, Y = torch.randn(NUM_STEPS, 16, 5, generator=BATCHES), torch.randn(NUM_STEPS, 16, 2, generator=BATCHES)


def made(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(dtype)


def test_the_status_names_the_optimizer_as_pytorch_does() -> None:
    model = made()
    with lockstep.local() as session:
        lt.Optimizer(session, model, torch.optim.RMSprop(model.parameters(), lr=0.01))
        assert session.status().optimizer.startswith("RMSprop (learning_rate 0.01, ")


def stepped(model: Any, optimizer: Any, step: int) -> Any:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    loss = nn.functional.mse_loss(model(X[step].to(dtype)), Y[step].to(dtype))
    loss.backward()
    optimizer.step()
    return loss


def distance(one: Any, other: Any) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


@pytest.fixture
def session() -> Iterator[Session]:
    with lockstep.local(num_ps=2) as session:
        yield session


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=lambda value: str(value))
def test_the_servers_compute_what_torch_computes_step_by_step(session: Session, name: str, options: dict[str, Any]) -> None:
    make: Callable[..., Any] = getattr(torch.optim, name)
    mine, theirs = made(), made()
    ours = lt.Optimizer(session, mine, make(mine.parameters(), **options))
    plain = make(theirs.parameters(), **options)
    for step in range(NUM_STEPS):
        stepped(mine, ours, step)
        stepped(theirs, plain, step)
        assert distance(mine, theirs) < 1e-6, step


def test_adamw_of_a_torch_whose_groups_do_not_say_so_decays_by_the_side(session: Session) -> None:
    mine, theirs = made(), made()
    inner = torch.optim.AdamW(mine.parameters(), lr=0.01, weight_decay=0.3)
    inner.param_groups[0].pop("decoupled_weight_decay", None)
    ours, plain = lt.Optimizer(session, mine, inner), torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.3)
    for step in range(5):
        stepped(mine, ours, step)
        stepped(theirs, plain, step)
    assert distance(mine, theirs) < 1e-6


def test_groups_have_their_own_numbers_and_decay_and_schedulers_move_them(session: Session) -> None:
    def groups(model: Any) -> Any:
        weights = [one for name, one in model.named_parameters() if name.endswith("weight")]
        biases = [one for name, one in model.named_parameters() if name.endswith("bias")]
        return torch.optim.AdamW([{"params": weights, "weight_decay": 0.3}, {"params": biases, "weight_decay": 0.0, "lr": 0.05}], lr=0.01)

    mine, theirs = made(), made()
    ours, plain = lt.Optimizer(session, mine, groups(mine)), groups(theirs)
    scheduling: Any = torch.optim.lr_scheduler
    total = NUM_STEPS + 1
    schedulers = [
        [
            scheduling.OneCycleLR(optimizer, max_lr=[0.02, 0.1], total_steps=total, cycle_momentum=False),
            scheduling.StepLR(optimizer, 10, gamma=0.5),
        ]
        for optimizer in (ours, plain)
    ]
    for step in range(NUM_STEPS):
        for model, optimizer, moved in ((mine, ours, schedulers[0]), (theirs, plain, schedulers[1])):
            stepped(model, optimizer, step)
            for scheduler in moved:
                scheduler.step()
        assert distance(mine, theirs) < 1e-6, step
    assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in plain.param_groups]


def test_a_scheduler_of_the_torch_optimizer_and_a_changed_momentum_count_from_the_next_step(session: Session) -> None:
    mine, theirs = made(), made()
    inner = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    ours, plain = lt.Optimizer(session, mine, inner), torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        stepped(mine, ours, step)
        stepped(theirs, plain, step)
        scheduler.step()
        for one in (ours, plain):
            one.param_groups[0]["momentum"] = 0.5 + step / 20
        plain.param_groups[0]["lr"] *= 0.5
        assert distance(mine, theirs) < 1e-6, step


def test_a_rate_that_is_a_tensor_moves_with_its_scheduler(session: Session) -> None:
    mine, theirs = made(), made()
    inner, plain = (torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05)) for model in (mine, theirs))
    ours = lt.Optimizer(session, mine, inner)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (ours, plain)]  # it writes into the tensor
    for step in range(6):
        stepped(mine, ours, step)
        stepped(theirs, plain, step)
        for scheduler in schedulers:
            scheduler.step()
    assert distance(mine, theirs) < 1e-6


def test_a_group_without_parameters_may_have_a_scheduler(session: Session) -> None:
    model = made()
    optimizer = lt.Optimizer(session, model, torch.optim.SGD([{"params": model.parameters()}, {"params": []}], lr=0.1))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        stepped(model, optimizer, step)
        scheduler.step()
    assert optimizer.global_step == 3


CHANGED: list[tuple[str, dict[str, Any], str, Any]] = [
    ("SGD", {"momentum": 0.9}, "weight_decay", 0.1),
    ("SGD", {"momentum": 0.9}, "nesterov", True),
    ("SGD", {}, "momentum", 0.9),
    ("Adam", {}, "amsgrad", True),
    ("AdamW", {}, "maximize", True),
    ("RMSprop", {}, "centered", True),
    ("Adagrad", {}, "lr_decay", 0.1),
]


@pytest.mark.parametrize(("name", "options", "changed", "value"), CHANGED, ids=lambda value: str(value))
def test_an_option_that_changes_the_formula_while_training_is_refused_and_may_be_put_back(
    session: Session, name: str, options: dict[str, Any], changed: str, value: Any
) -> None:
    model = made()
    optimizer = lt.Optimizer(session, model, getattr(torch.optim, name)(model.parameters(), lr=0.1, **options))
    stepped(model, optimizer, 0)
    first, optimizer.param_groups[0][changed] = optimizer.param_groups[0][changed], value
    with pytest.raises(ValueError, match=f"group 0 has {changed} = {value}: it was {first} when the optimizer was made"):
        stepped(model, optimizer, 1)
    with pytest.raises(ValueError, match=f"load_state_dict.*: group 0 has {changed} = {value}"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0][changed] = first
    stepped(model, optimizer, 1)
    assert optimizer.global_step == 2


def test_the_state_of_another_optimizer_is_refused_and_one_of_an_older_torch_is_taken(session: Session) -> None:
    model = made()
    optimizer = lt.Optimizer(session, model, torch.optim.AdamW(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="group 0 has no 'betas', so it belongs to another optimizer"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=0.1).state_dict())
    older = copy.deepcopy(optimizer.state_dict())
    del older["param_groups"][0]["maximize"]
    optimizer.load_state_dict(older)
    stepped(model, optimizer, 0)


@pytest.mark.parametrize("optimizer", [lockstep.lion(0.01), None], ids=["lockstep", "torch"])
def test_the_model_may_be_given_as_pairs(session: Session, optimizer: Any) -> None:
    model = made()
    ours = lt.Optimizer(session, model.named_parameters(), optimizer or torch.optim.SGD(model.parameters(), lr=0.1))
    stepped(model, ours, 0)
    assert sorted(session.views()) == sorted(dict(model.named_parameters()))


OWN = [lockstep.lion(0.01), lockstep.nadam(0.01), lockstep.adam(lockstep.exponential_decay(0.1, 10, 0.5))]


@pytest.mark.parametrize("spec", OWN, ids=lambda spec: spec.name)
def test_an_optimizer_of_lockstep_trains_as_in_its_own_api(session: Session, spec: Any) -> None:
    mine, theirs = made(), made()
    ours = lt.Optimizer(session, mine, spec)
    with lockstep.local() as other:
        other.create_or_join({name: value.detach().numpy().copy() for name, value in theirs.named_parameters()}, optimizer=spec)
        for step in range(5):
            stepped(mine, ours, step)
            theirs.zero_grad()
            nn.functional.mse_loss(theirs(X[step]), Y[step]).backward()
            other.step({name: value.grad.numpy() for name, value in theirs.named_parameters()})
            for name, value in other.read().items():
                theirs.get_parameter(name).data.copy_(torch.from_numpy(value))
    assert distance(mine, theirs) == 0


def test_the_optimizer_is_a_torch_optimizer_with_hooks_closures_and_a_state_dict(session: Session) -> None:
    model = made()
    optimizer = lt.Optimizer(session, model, torch.optim.Adam(model.parameters(), lr=0.5))
    assert isinstance(optimizer, torch.optim.Optimizer)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Any:
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(model(X[0]), Y[0])
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert calls == ["before", "after"]
    state = copy.deepcopy(optimizer.state_dict())
    assert state["lockstep"] == {"step": 1} and state["param_groups"][0]["lr"] == 0.5
    state["param_groups"][0]["lr"] = 0.0
    optimizer.load_state_dict(state)
    before = [one.clone() for one in model.parameters()]
    optimizer.step(closure)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True)), "a rate of 0 moves nothing"
    optimizer.zero_grad()
    assert all(one.grad is None for one in model.parameters())


def test_values_are_copied_and_autograd_sees_it(session: Session) -> None:
    model = made()
    optimizer = lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
    held = session.views()["0.weight"].copy()
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    np.testing.assert_array_equal(session.views()["0.weight"], held)
    loss = nn.functional.mse_loss(model(X[0]), Y[0])
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_tied_weights_count_once_and_frozen_ones_are_left_out(session: Session) -> None:
    def tied() -> Any:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2))
        model[1].weight = model[0].weight
        model[2].bias.requires_grad_(False)
        return model

    mine, theirs = tied(), tied()
    trained = [one for one in mine.parameters() if one.requires_grad]
    ours = lt.Optimizer(session, mine, torch.optim.SGD(trained, lr=0.1))
    plain = torch.optim.SGD([one for one in theirs.parameters() if one.requires_grad], lr=0.1)
    assert sorted(session.views()) == ["0.bias", "0.weight", "1.bias", "2.weight"]
    for step in range(5):
        stepped(mine, ours, step)
        stepped(theirs, plain, step)
    assert distance(mine, theirs) < 1e-6
    assert mine[1].weight is mine[0].weight


def test_a_parameter_that_is_thawed_later_trains_from_then_on(session: Session) -> None:
    mine, theirs = made(), made()
    ours = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(4):
        for model in (mine, theirs):
            model[0].weight.requires_grad_(step >= 2)
        stepped(mine, ours, step)
        stepped(theirs, plain, step)
    assert distance(mine, theirs) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_parameters_of_other_types_train_and_masters_are_rounded(dtype: Any) -> None:
    for master in (None, torch.float32):
        mine, theirs = made(dtype), made(dtype)
        with lockstep.local() as session:
            ours = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1), master_dtype=master)
            plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
            for step in range(5):
                stepped(mine, ours, step)
                stepped(theirs, plain, step)
            assert distance(mine, theirs) < {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-7}[dtype]
            assert session.views()["0.weight"].dtype.name == ("float32" if master is not None else str(dtype).removeprefix("torch."))


def test_autocast_and_a_scaler_count_in_every_step_also_where_a_gradient_is_infinite(session: Session) -> None:
    mine, theirs = made(), made()
    ours = lt.Optimizer(session, mine, torch.optim.Adam(mine.parameters(), lr=0.01))
    plain = torch.optim.Adam(theirs.parameters(), lr=0.01)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        for model, optimizer, scaler in ((mine, ours, scalers[0]), (theirs, plain, scalers[1])):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(X[step]).float(), Y[step])
            scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    assert ours.global_step == 6, "the step with an infinite gradient was counted, without one"
    # Adam's powers move on in that step on the servers, so compare what does not depend on them.
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert all(torch.isfinite(one).all() for one in mine.parameters())


def test_a_scaler_with_sgd_is_exact(session: Session) -> None:
    mine, theirs = made(), made()
    ours = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2)]
    for step in range(6):
        for model, optimizer, scaler in ((mine, ours, scalers[0]), (theirs, plain, scalers[1])):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(X[step]), Y[step]) * (float("nan") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert distance(mine, theirs) < 1e-6


def test_gradients_accumulate_and_are_clipped_before_the_push_or_as_a_mean() -> None:
    for on_mean in (False, True):
        mine, theirs = made(), made()
        with lockstep.local() as session:
            options: dict[str, Any] = {"clip_global_norm": 0.1} if on_mean else {}
            ours = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.5), **options)
            plain = torch.optim.SGD(theirs.parameters(), lr=0.5)
            for step in range(0, 10, 2):
                for model, optimizer in ((mine, ours), (theirs, plain)):
                    optimizer.zero_grad()
                    for half in (step, step + 1):
                        (nn.functional.mse_loss(model(X[half]), Y[half]) / 2).backward()
                    if not on_mean or optimizer is plain:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
            assert distance(mine, theirs) < 2e-6


def test_buffers_follow_their_rule(session: Session) -> None:
    def normed() -> Any:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))

    mine, theirs = normed(), normed()
    ours = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(10):
        stepped(mine, ours, step)
        stepped(theirs, plain, step)
    assert distance(mine, theirs) < 1e-6
    assert mine[1].num_batches_tracked.dtype is torch.int64 and int(mine[1].num_batches_tracked) == 10
    with lockstep.local() as other:
        model = normed()
        lt.Optimizer(other, model, torch.optim.SGD(model.parameters(), lr=0.1), buffers="local")
        assert "1.running_mean" not in other.views()


def test_sparse_gradients_of_a_dense_parameter_are_made_dense(session: Session) -> None:
    model = nn.Embedding(5, 3, sparse=True)
    before = model.weight.detach().clone()
    optimizer = lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.tensor([1, 1, 3])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(before - model.weight.detach(), torch.tensor([0.0, 2, 0, 1, 0])[:, None].expand(5, 3))


def test_metrics_go_with_the_next_step(session: Session) -> None:
    model = made()
    optimizer = lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        optimizer.report(loss=torch.tensor(float(step)), accuracy=(0.5, 32))
        stepped(model, optimizer, step)
    metrics = session.read_metrics()
    assert (metrics["loss"].mean, metrics["loss"].count, metrics["accuracy"].mean) == (0.5, 2, 0.5)


@pytest.mark.parametrize("is_the_same", [True, False])
def test_a_batch_that_a_rollback_took_is_given_again_where_the_parameters_are_the_same(
    session: Session, is_the_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = made(), made()
    ours = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    step = session.step
    taken: list[dict[str, Any]] = []

    def rolled_back_once(gradients: Any, **options: Any) -> Push:
        if taken:
            return step(gradients, **options)
        taken.append({name: array.copy() for name, array in gradients.items()})
        for array in gradients.values():
            array.fill(9.0)  # that server's memory is gone
        if not is_the_same:
            mine[0].bias.data += 1
        return Push(outcome=PushOutcome.ROLLED_BACK, step=0, global_step=0)

    monkeypatch.setattr(session, "step", rolled_back_once)
    stepped(mine, ours, 0)
    assert (ours.last_push is not None and ours.last_push.is_accepted) == is_the_same == (session.local_step == 1)
    if is_the_same:
        stepped(theirs, plain, 0)
    assert distance(mine, theirs) < 1e-6


@pytest.mark.parametrize("way", ["batches", "sampler"])
def test_all_workers_have_the_parameters_of_the_last_step_when_the_data_ends(way: str) -> None:
    cluster, ended = InProcessCluster(total_num_replicas=2), threading.Barrier(2)
    data = torch.utils.data.TensorDataset(X[0, :9], Y[0, :9])  # an odd number: one worker makes the last step alone
    found: list[tuple[int, Any]] = []

    def work() -> None:
        with lockstep.local(cluster) as own:
            model = made()
            optimizer = lt.Optimizer(own, model, torch.optim.Adam(model.parameters(), lr=0.1))
            loader = torch.utils.data.DataLoader(data, batch_sampler=lt.Sampler(optimizer, data, 1))
            for x, y in loader if way == "sampler" else optimizer.batches(data, 1):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            found.append((optimizer.global_step, [one.detach().clone() for one in model.parameters()]))
            ended.wait(30)  # nobody leaves before both have looked

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    (step, mine), (other_step, others) = found
    assert step == other_step and all(torch.equal(one, other) for one, other in zip(mine, others, strict=True))


def test_a_mismatch_names_the_optimizer_of_torch_and_advice_that_works() -> None:
    cluster, model, other = InProcessCluster(total_num_replicas=2), made(), made()
    with lockstep.local(cluster) as first, lockstep.local(cluster) as second:
        lt.Optimizer(first, model, torch.optim.SGD(model.parameters(), lr=0.1))
        rate = torch.optim.SGD(other.parameters(), lr=0.2)
        with pytest.raises(lockstep.errors.ModelMismatch, match=r"Optimizer\(session, …, on_optimizer_change='adopt'\)"):
            lt.Optimizer(second, other, rate)
        lt.Optimizer(second, other, rate, on_optimizer_change="adopt")


def test_after_the_end_of_training_a_step_changes_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    model = made()
    with lockstep.local(max_steps=2) as session:
        optimizer = lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(4):
            stepped(model, optimizer, step)
        assert optimizer.is_finished and optimizer.global_step == 2
        want = made()
        plain = torch.optim.SGD(want.parameters(), lr=0.1)
        for step in range(2):
            stepped(want, plain, step)
        assert distance(model, want) < 1e-6
    said = [record.getMessage() for record in caplog.records if record.name == "lockstep.torch"]
    assert said == ["training is finished: this step and later ones change nothing; end the loop when optimizer.is_finished"]
