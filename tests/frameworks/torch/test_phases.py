"""Fine-tuning: freeze, then train all, on one session: each phase is that of a new torch optimizer on the values that there are."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")
nn = torch.nn

import lockstep
import lockstep.torch as lt
from tests.frameworks.torch.test_optimizer import distance, made, stepped
from tests.support.processes.commands import up
from tests.support.repository import program_of_page

KINDS = {
    "Adam": lambda groups, rate: torch.optim.Adam(groups, lr=rate),
    "AdamW": lambda groups, rate: torch.optim.AdamW(groups, lr=rate, weight_decay=rate, betas=(0.8, 0.9)),
    "SGD": lambda groups, rate: torch.optim.SGD(groups, lr=rate, momentum=0.9, dampening=0.5),
    "Adagrad": lambda groups, rate: torch.optim.Adagrad(groups, lr=rate, lr_decay=0.1, initial_accumulator_value=0.1),
}


def fine_tuned(model: Any, begin: Any) -> None:
    """Trains the head, then all, then the body alone, by the optimizer that `begin` returns for each phase."""
    body, head = list(model[0].parameters()), list(model[2].parameters())
    phases = [(head, [body, head], (0.1, 0.1)), ([*body, *head], [body, head], (0.01, 0.05)), (body, [body], (0.02,))]
    for phase, (trained, groups, rates) in enumerate(phases):
        for one in model.parameters():
            one.requires_grad_(any(one is other for other in trained))
        optimizer = begin([{"params": group, "lr": rate} for group, rate in zip(groups, rates, strict=True)], rates[0])
        for step in range(4):
            stepped(model, optimizer, 4 * phase + step)


@pytest.mark.parametrize("kind", KINDS)
def test_each_phase_is_that_of_a_new_optimizer_on_the_values_that_there_are(kind: str) -> None:
    mine, theirs = made(), made()
    fine_tuned(theirs, KINDS[kind])
    with lockstep.local(num_ps=2) as session:
        fine_tuned(mine, lambda groups, rate: lt.Optimizer(session, mine, KINDS[kind](groups, rate)))
        assert (session.local_step, session.phase) == (12, 2)
    assert distance(mine, theirs) < 1e-6


def test_a_scheduler_of_a_phase_moves_its_rate() -> None:
    mine, theirs = made(), made()

    def train(model: Any, begin: Any) -> None:
        for phase in range(2):
            optimizer = begin(torch.optim.Adam(model.parameters(), lr=0.1 / (1 + phase)))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            for step in range(6):
                stepped(model, optimizer, step)
                scheduler.step()

    train(theirs, lambda optimizer: optimizer)
    with lockstep.local() as session:
        train(mine, lambda optimizer: lt.Optimizer(session, mine, optimizer))
    assert distance(mine, theirs) < 1e-6


def test_the_optimizer_of_an_earlier_phase_is_refused() -> None:
    with lockstep.local() as session:
        model = made()
        first, second = (lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.1)) for _ in range(2))
        with pytest.raises(RuntimeError, match=r"another optimizer has been made on this session since.*use that one"):
            stepped(model, first, 0)
        stepped(model, second, 0)
        assert session.local_step == 1


def test_a_phase_of_parameters_that_the_first_optimizer_lacks_is_refused_with_advice_that_works() -> None:
    with lockstep.local() as session:
        model = made()
        optimizer = lt.Optimizer(session, model, torch.optim.SGD(model[2].parameters(), lr=0.1))
        with pytest.raises(
            lockstep.errors.ModelMismatch, match=r"'0\.weight'.*give the first optimizer all variables that any phase trains"
        ):
            lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.01))
        stepped(model, optimizer, 0)
    with lockstep.local() as session:
        model = made()
        lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
        lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.01))


def test_embeddings_and_buffers_go_through_phases() -> None:
    torch.manual_seed(1)
    table = lt.EmbeddingBag(10, 4, mode="sum")
    model = nn.Sequential(table, nn.BatchNorm1d(4), nn.Linear(4, 2))
    rows = torch.arange(10).reshape(5, 2)
    with lockstep.local() as session:
        for rate in (0.1, 0.0):
            optimizer = lt.Optimizer(session, model, torch.optim.Adam(model.parameters(), lr=rate))
            before = session.read_rows("0.weight").copy()
            optimizer.zero_grad()
            model(rows).square().sum().backward()
            optimizer.step()
            assert (session.read_rows("0.weight") != before).any() == bool(rate), "the rate of the phase holds for tables, too"
        assert int(session.read()["1.num_batches_tracked"]) == 2


@pytest.mark.timeout(300)
def test_two_workers_train_the_program_of_the_page(tmp_path: Any) -> None:
    program = program_of_page("docs/tutorials/torch.md", "requires_grad_(False)") + "\nprint('ended', session.local_step, session.phase)\n"
    with up("--ps", "1", "--workers", "2", worker=program, run_dir=tmp_path / "run") as process:
        out, _ = process.communicate(timeout=250)
    assert process.returncode == 0 and all(f"[worker {index}] ended 20 1" in out for index in range(2)), out
