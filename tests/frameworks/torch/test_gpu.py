"""Models on a GPU train as in plain PyTorch there. Skipped where PyTorch knows no GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")
nn = torch.nn

import lockstep
import lockstep.torch as lt
from tests.support.processes.commands import up
from worker_client import Session

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch knows no GPU here"),
    pytest.mark.timeout(300),  # the first kernel of a process may be compiled
]
NUM_STEPS = 30
FIRST = torch.Generator().manual_seed(1)
X, Y = torch.randn(NUM_STEPS, 16, 5, generator=FIRST), torch.randn(NUM_STEPS, 16, 2, generator=FIRST)
IDS = torch.randint(9, (NUM_STEPS, 16, 3), generator=FIRST)


@pytest.fixture
def session() -> Iterator[Session]:
    with lockstep.local(num_ps=2) as session:
        yield session


def made(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2)).to("cuda", dtype)


def stepped(model: Any, optimizer: Any, step: int) -> None:
    like = next(model.parameters())
    optimizer.zero_grad()
    nn.functional.mse_loss(model(X[step].to(like)), Y[step].to(like)).backward()
    optimizer.step()


def distance(one: Any, other: Any) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True, "weight_decay": 0.1}),
        ("AdamW", {"lr": 0.01, "fused": True}),
        ("AdamW", {"lr": 0.01, "capturable": True}),
        ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
        ("RMSprop", {"lr": 0.001, "centered": True, "momentum": 0.5, "eps": 1e-3}),
        ("Adadelta", {"lr": 0.5}),
    ],
    ids=str,
)
def test_the_servers_compute_what_the_gpu_computes_step_by_step(session: Session, name: str, options: dict[str, Any]) -> None:
    mine, theirs = made(), made()
    ours = lt.Optimizer(session, mine, getattr(torch.optim, name)(mine.parameters(), **options))
    plain = getattr(torch.optim, name)(theirs.parameters(), **options)
    for step in range(NUM_STEPS):
        stepped(mine, ours, step)
        stepped(theirs, plain, step)
        assert distance(mine, theirs) < 2e-6, step
    assert all(one.is_cuda for one in mine.state_dict().values()) and int(mine[1].num_batches_tracked) == NUM_STEPS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("master", [None, torch.float32], ids=str)
def test_parameters_of_other_types_train(session: Session, dtype: Any, master: Any) -> None:
    mine, theirs = made(dtype), made(dtype)
    ours = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1), master_dtype=master)
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(5):
        stepped(mine, ours, step)
        stepped(theirs, plain, step)
    assert distance(mine, theirs) < {torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float64: 1e-6}[dtype]


def test_autocast_and_a_scaler_are_exact_with_sgd_and_count_an_infinite_gradient_as_a_step(session: Session) -> None:
    mine, theirs = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).cuda() for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    ours, plain = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1)), torch.optim.SGD(theirs.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cuda", init_scale=64.0, growth_interval=2) for _ in range(2)]
    for step in range(8):
        for model, optimizer, scaler in ((mine, ours, scalers[0]), (theirs, plain, scalers[1])):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(model(X[step].cuda()).float(), Y[step].cuda())
            scaler.scale(loss * (float("inf") if step == 3 else 1.0)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    assert ours.global_step == 8 and scalers[0].get_scale() == scalers[1].get_scale()
    assert distance(mine, theirs) < 1e-4


def test_gradients_of_another_stream_arrive_whole(session: Session) -> None:
    """Each stream is kept busy for a while, so that what does not wait for it copies an earlier gradient, or an earlier value."""
    model = nn.Linear(1 << 10, 1 << 10, bias=False, device="cuda")
    nn.init.zeros_(model.weight)
    optimizer, busy = lt.Optimizer(session, model, lockstep.sgd(1.0)), torch.randn(4096, 4096, device="cuda")
    for step in range(6):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                busy = (busy @ busy).clamp(-1, 1)
            model.weight.grad = torch.full_like(model.weight, -float(step + 1))
            optimizer.step()
            assert bool((model.weight == sum(range(step + 2))).all()), step
    np.testing.assert_array_equal(session.read()["weight"], 21.0)


def test_a_captured_graph_trains_since_parameters_stay_where_they_are(session: Session) -> None:
    mine, theirs = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).cuda() for _ in range(2))
    theirs.load_state_dict(mine.state_dict())
    ours, plain = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1)), torch.optim.SGD(theirs.parameters(), lr=0.1)
    x, y = X[0].cuda(), Y[0].cuda()

    def backward() -> None:
        for one in mine.parameters():
            if one.grad is not None:
                one.grad.zero_()
        nn.functional.mse_loss(mine(x), y).backward()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            backward()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward()
    for step in range(NUM_STEPS):
        x.copy_(X[step])
        y.copy_(Y[step])
        graph.replay()
        ours.step()
        stepped(theirs, plain, step)
    assert distance(mine, theirs) < 2e-6


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_model_compiled_for_the_gpu_trains_as_it_does_uncompiled(session: Session) -> None:
    mine, theirs = made(), made()
    ours = lt.Optimizer(session, mine, torch.optim.AdamW(mine.parameters(), lr=0.01))
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    with torch._inductor.config.patch(compile_threads=1):  # no processes that outlive the test
        compiled = torch.compile(mine)
        for step in range(5):
            stepped(compiled, ours, step)
            stepped(theirs, plain, step)
    assert distance(mine, theirs) < 1e-4


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_bag_of_rows_on_servers_trains_as_one_on_the_gpu(session: Session, mode: str) -> None:
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(4))

    def net(bag: Any) -> Any:
        torch.manual_seed(5)
        return nn.Sequential(bag, nn.Linear(4, 2)).cuda()

    mine, theirs = net(lt.EmbeddingBag(9, 4, mode=mode, _weight=rows.clone())), net(nn.EmbeddingBag(9, 4, mode=mode, _weight=rows.clone()))
    ours, plain = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1)), torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(NUM_STEPS):
        for model, optimizer in ((mine, ours), (theirs, plain)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(IDS[step].cuda()), Y[step].cuda()).backward()
            optimizer.step()
    np.testing.assert_allclose(session.read_rows("0.weight"), theirs[0].weight.detach().cpu().numpy(), atol=2e-6)
    assert float((mine[1].weight - theirs[1].weight).detach().abs().max()) < 2e-6


def test_a_model_moved_to_the_gpu_after_the_optimizer_was_made_trains(session: Session) -> None:
    mine, theirs = made().cpu(), made()
    ours, plain = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1)), torch.optim.SGD(theirs.parameters(), lr=0.1)
    mine.cuda()
    for step in range(5):
        stepped(mine, ours, step)
        stepped(theirs, plain, step)
    assert distance(mine, theirs) < 2e-6


def test_a_model_is_saved_from_the_gpu_and_loads_without_one(session: Session, tmp_path: Path) -> None:
    model = made()
    optimizer = lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
    stepped(model, optimizer, 0)
    lt.save_model(optimizer, model, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True, map_location="cpu")
    assert all(torch.equal(saved[name], value.cpu()) for name, value in model.state_dict().items())


PROGRAM = """
import sys, torch
from torch import nn
import lockstep.torch as lt
torch.manual_seed(1)
x, y = torch.randn(20, 32, 64), torch.randn(20, 32, 8)
model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).cuda()
optimizer = lt.Optimizer(None, model, torch.optim.AdamW(model.parameters(), lr=0.01))
while not optimizer.is_finished:
    part = slice(optimizer.worker_index, None, 2)
    given, wanted = (one[optimizer.global_step][part].cuda() for one in (x, y))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(given), wanted).backward()
    optimizer.step()
if optimizer.worker_index == 0:
    lt.save_model(optimizer, model, sys.argv[1])
"""


def test_two_workers_that_share_a_gpu_train_what_one_process_does(tmp_path: Path) -> None:
    flags = ["--ps", "2", "--workers", "2", "--max-steps", "20"]
    with up(*flags, "--", str(tmp_path / "model.pt"), worker=PROGRAM, run_dir=tmp_path / "run") as process:
        said, _ = process.communicate(timeout=250)
    assert process.returncode == 0, said
    torch.manual_seed(1)
    x, y = torch.randn(20, 32, 64), torch.randn(20, 32, 8)
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 8)).cuda()
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(20):
        plain.zero_grad()
        nn.functional.mse_loss(model(x[step].cuda()), y[step].cuda()).backward()
        plain.step()
    found = torch.load(tmp_path / "model.pt", weights_only=True, map_location="cuda")
    # AdamW divides by the root of a square that is near 0 for some elements, so the order of a sum shows in them.
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4, msg=name)
