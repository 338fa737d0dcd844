"""Embeddings whose rows are on the servers: outputs, gradients and steps are those of torch.nn, with all options."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")
nn = torch.nn

import lockstep
import lockstep.torch as lt
from lockstep.errors import DeadlineExceeded, IndexOutOfRange, VariableNotFound
from lockstep.in_process import InProcessCluster
from worker_client import Session

ROWS, WIDTH = 12, 4
FIRST = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[1, 3, 3], [0, 2, 11], [5, 5, 5]])
FLAT = torch.tensor([1, 3, 3, 0, 2, 11, 5, 2])


@pytest.fixture
def session() -> Iterator[Session]:
    with lockstep.local(num_ps=2) as session:
        yield session


class Bag(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding
        torch.manual_seed(2)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, *given: Any, **options: Any) -> Any:
        return self.head(self.embedding(*given, **options))


# What a bag is made of: its options, and what it is called with. Some bags are empty, some are all padding.
FORMS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "rows": ({}, (IDS,)),
    "offsets": ({}, (FLAT, torch.tensor([0, 3, 3, 6]))),
    "last offset": ({"include_last_offset": True}, (FLAT, torch.tensor([0, 3, 3, 6, 8]))),
    "int32": ({}, (FLAT.int(), torch.tensor([0, 6], dtype=torch.int32))),
    "nothing": ({}, (torch.empty(0, dtype=torch.int64), torch.tensor([0, 0]))),
}
PADDINGS = {"": None, ", padding": 5, ", padding from the end": -1, ", padding that is not there": 7}
Case = tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]
BAGS: dict[str, Case] = {
    f"{mode}, {form}{padding}": ({"mode": mode, "padding_idx": row, **options}, given, {})
    for mode in ("sum", "mean", "max")
    for form, (options, given) in FORMS.items()
    for padding, row in PADDINGS.items()
}
BAGS |= {
    f"weights, {form}{padding}": ({"mode": "sum", "padding_idx": row, **options}, given, {"per_sample_weights": weights})
    for form, (options, given) in FORMS.items()
    for padding, row in PADDINGS.items()
    for weights in [torch.linspace(-1, 1, given[0].numel()).view(given[0].shape)]
}
BAGS |= {f"scaled {mode}": ({"scale_grad_by_freq": True, "mode": mode}, FORMS["rows"][1], {}) for mode in ("sum", "mean")}


@pytest.mark.parametrize("case", BAGS)
def test_a_bag_trains_as_torch_s(session: Session, case: str) -> None:
    options, given, named = BAGS[case]
    mine = Bag(lt.EmbeddingBag(ROWS, WIDTH, _weight=FIRST.clone(), **options))
    theirs = Bag(nn.EmbeddingBag(ROWS, WIDTH, _weight=FIRST.clone(), **options))
    ours = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.01))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for _ in range(4):
        outputs = []
        for model, optimizer in ((mine, ours), (theirs, plain)):
            optimizer.zero_grad()
            outputs.append(model(*given, **named))
            (outputs[-1] ** 2).sum().backward()
            optimizer.step()
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
    np.testing.assert_allclose(session.read_rows("embedding.weight"), theirs.embedding.weight.detach().numpy(), atol=1e-6)


KEYS = torch.tensor([-(2**63), -5, 0, 7, 123_456_789_012, 2**63 - 1, 99, 10**18, -(10**15), 3, 4, 5])
ZEROS = lockstep.zeros_initializer()
PLAIN = [
    name
    for name in ("rows", "offsets", "last offset", "nothing")
    for name in (f"sum, {name}", f"mean, {name}, padding", f"max, {name}", f"weights, {name}, padding")
]


@pytest.mark.parametrize("case", PLAIN)
def test_a_bag_of_any_keys_trains_as_torch_s_of_row_numbers(session: Session, case: str) -> None:
    (options, given, named), first = BAGS[case], torch.zeros(ROWS, WIDTH)
    padding = options["padding_idx"]
    keyed = {**options, "padding_idx": None if padding is None else int(KEYS[padding])}
    mine = Bag(lt.EmbeddingBag(None, WIDTH, keys="int64", initializer=ZEROS, **keyed))
    theirs = Bag(nn.EmbeddingBag(ROWS, WIDTH, _weight=first, **options))
    ours = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.01))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for _ in range(4):
        outputs = []
        for model, optimizer, numbers in ((mine, ours, KEYS[given[0]]), (theirs, plain, given[0])):
            optimizer.zero_grad()
            outputs.append(model(numbers, *given[1:], **named))
            ((outputs[-1] - 1) ** 2).sum().backward()
            optimizer.step()
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
    np.testing.assert_allclose(session.read_rows("embedding.weight", KEYS.numpy()), theirs.embedding.weight.detach().numpy(), atol=1e-6)


def test_the_row_of_a_padding_key_reads_as_zeros_whatever_keys_begin_with(session: Session) -> None:
    model = Bag(lt.Embedding(None, WIDTH, padding_idx=-5, keys="int64"))
    optimizer = lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        rows = model.embedding(torch.tensor([-5, 8]))
        assert not rows[0].any()
        assert rows[1].any()
        model.head(rows).sum().backward()
        optimizer.step()


class Features(nn.Module):  # type: ignore[misc, name-defined]
    """Two features of one table: what a user has seen, and what is shown now."""

    def __init__(self, seen: Any, shown: Any) -> None:
        super().__init__()
        self.seen, self.shown, self.bias = seen, shown, nn.Parameter(torch.zeros(1))

    def forward(self, seen: Any, shown: Any) -> Any:
        return (self.seen(seen) * self.shown(shown)).sum(dim=1) + self.bias


def test_several_features_share_a_table_with_bounds(session: Session) -> None:
    options: Any = {"keys": "int64", "max_rows": 1000, "max_age_steps": 50, "initializer": lockstep.normal_initializer(0.0, 1.0, seed=3)}
    mine = Features(lt.EmbeddingBag(None, WIDTH, mode="sum", **options), lt.Embedding(None, WIDTH, **options))
    mine.shown.table = mine.seen.table
    ours = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.01))
    first = session.read_rows("seen.weight", KEYS.numpy())
    theirs = Features(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", _weight=torch.tensor(first)), nn.Embedding(ROWS, WIDTH))
    theirs.shown.weight = theirs.seen.weight
    plain = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for _ in range(3):
        for model, optimizer, names in ((mine, ours, KEYS), (theirs, plain, torch.arange(ROWS))):
            optimizer.zero_grad()
            model(names[IDS], names[IDS[:, 0]]).sum().backward()
            optimizer.step()
    np.testing.assert_allclose(session.read_rows("seen.weight", KEYS.numpy()), theirs.seen.weight.detach().numpy(), atol=1e-5)
    with pytest.raises(VariableNotFound):
        session.read_rows("shown.weight", [1])


def test_a_table_has_a_size_or_keys() -> None:
    for num_embeddings, keys in ((None, None), (10, "int64")):
        with pytest.raises(ValueError, match=f"num_embeddings = {num_embeddings}, keys = {keys!r}: a table has a size"):
            lt.Embedding(num_embeddings, WIDTH, keys=keys)


def test_weights_of_samples_may_be_trained(session: Session) -> None:
    mine = Bag(lt.EmbeddingBag(ROWS, WIDTH, mode="sum", _weight=FIRST.clone()))
    theirs = Bag(nn.EmbeddingBag(ROWS, WIDTH, mode="sum", _weight=FIRST.clone()))
    lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    gradients = []
    for model in (mine, theirs):
        weights = torch.linspace(-1, 1, IDS.numel()).view(IDS.shape).requires_grad_()
        (model(IDS, per_sample_weights=weights) ** 2).sum().backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=str)
def test_an_embedding_trains_as_torch_s_also_where_it_is_used_twice(session: Session, options: dict[str, Any]) -> None:
    mine = Bag(lt.Embedding(ROWS, WIDTH, _weight=FIRST.clone(), **options))
    theirs = Bag(nn.Embedding(ROWS, WIDTH, _weight=FIRST.clone(), **options))
    ours = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(4):
        for model, optimizer in ((mine, ours), (theirs, plain)):
            loss = (model(IDS) ** 2).sum() + model(FLAT).sum()
            optimizer.zero_grad()  # after the forward pass is as good
            loss.backward()
            with torch.no_grad():
                model(IDS)
            optimizer.step()
    np.testing.assert_allclose(session.read_rows("embedding.weight"), theirs.embedding.weight.detach().numpy(), atol=1e-6)


def test_adam_s_rows_are_lazy_and_a_scheduler_s_rate_is_theirs_too(session: Session) -> None:
    mine = Bag(lt.Embedding(ROWS, WIDTH, _weight=FIRST.clone()))
    theirs = Bag(nn.Embedding(ROWS, WIDTH, sparse=True, _weight=FIRST.clone()))
    ours = lt.Optimizer(session, mine, torch.optim.Adam(mine.parameters(), lr=0.1, eps=1e-16))  # SparseAdam's is at another place
    plain = torch.optim.SparseAdam(theirs.embedding.parameters(), lr=0.1, eps=1e-16), torch.optim.Adam(theirs.head.parameters(), lr=0.1)
    for step in range(5):
        ids = IDS if step % 2 else IDS[:1]
        for model, optimizers in ((mine, [ours]), (theirs, plain)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (model(ids) ** 2).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.1 / (step + 2)
    np.testing.assert_allclose(session.read_rows("embedding.weight"), theirs.embedding.weight.detach().numpy(), atol=1e-5)


def test_bags_without_any_row_change_no_row(session: Session) -> None:
    model = Bag(lt.EmbeddingBag(ROWS, WIDTH, mode="sum", _weight=FIRST.clone()))
    optimizer = lt.Optimizer(session, model, torch.optim.Adam(model.parameters(), lr=0.1))
    for given in ((IDS,), FORMS["nothing"][1]):
        before = session.read_rows("embedding.weight")
        optimizer.zero_grad()
        model(*given).sum().backward()
        optimizer.step()
    np.testing.assert_array_equal(session.read_rows("embedding.weight"), before)


def test_rows_are_made_by_the_servers_and_a_table_may_have_an_optimizer_of_its_own(session: Session) -> None:
    embedding = lt.Embedding(1_000_000, WIDTH, initializer=lockstep.constant_initializer(2.0), optimizer=lockstep.sgd(1.0))
    model = Bag(embedding)
    optimizer = lt.Optimizer(session, model, torch.optim.Adam(model.parameters(), lr=0.1))
    embedding(torch.tensor([999_999])).sum().backward()
    optimizer.step()
    np.testing.assert_array_equal(session.read_rows("embedding.weight", [999_999, 0]), [[1.0] * WIDTH, [2.0] * WIDTH])
    assert not list(embedding.parameters()), "nothing of the table is here"


def test_the_row_for_padding_begins_with_zeros_as_torch_s(session: Session) -> None:
    model = nn.ModuleList([lt.Embedding(ROWS, WIDTH, padding_idx=3, device="cpu"), lt.EmbeddingBag(ROWS, WIDTH, padding_idx=-1)])
    lt.Optimizer(session, model, lockstep.sgd(0.1))
    assert not model[0](torch.tensor([3])).any() and model[0](torch.tensor([2])).all()
    assert not session.read_rows("1.weight", [ROWS - 1]).any() and session.read_rows("1.weight", [ROWS - 2]).all()


def test_a_row_that_the_initializer_makes_zero_stays_so_without_padding(session: Session) -> None:
    initializer = replace(lockstep.normal_initializer(0.0, 1.0), zero_row=2)
    model = lt.Embedding(ROWS, WIDTH, initializer=initializer)
    lt.Optimizer(session, model, lockstep.sgd(0.1))
    assert not model(torch.tensor([2])).any() and model(torch.tensor([3])).all()
    with pytest.raises(ValueError, match="initializer makes row 2 zero, and padding_idx row 3; want one row"):
        lt.Embedding(ROWS, WIDTH, padding_idx=3, initializer=initializer)


def test_a_second_backward_pass_through_a_graph_adds_its_gradient_once(session: Session) -> None:
    model = lt.Embedding(ROWS, WIDTH, _weight=FIRST.clone())
    optimizer = lt.Optimizer(session, model, lockstep.sgd(1.0))
    loss = model(torch.tensor([3])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    np.testing.assert_allclose(session.read_rows("weight", [3]), FIRST[3:4].numpy() - 2.0, atol=1e-6)


def test_a_model_is_saved_with_its_tables_and_loads_into_plain_torch(session: Session, tmp_path: Any) -> None:
    mine = Bag(lt.EmbeddingBag(ROWS, WIDTH, _weight=FIRST.clone()))
    optimizer = lt.Optimizer(session, mine, torch.optim.SGD(mine.parameters(), lr=0.1))
    mine(IDS).sum().backward()
    optimizer.step()
    plain = Bag(nn.EmbeddingBag(ROWS, WIDTH))
    for name in ("model.pt", "model.safetensors"):
        assert lt.save_model(optimizer, mine, tmp_path / name) == 1
        if name.endswith("pt"):
            plain.load_state_dict(torch.load(tmp_path / name, weights_only=True))
        else:
            safetensors = pytest.importorskip("safetensors.torch")
            plain.load_state_dict(safetensors.load_file(tmp_path / name))
        torch.testing.assert_close(plain(IDS), mine(IDS))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "model.safetensors"]


def test_a_model_is_saved_of_one_step_though_others_make_steps_meanwhile(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = InProcessCluster(num_ps=2, total_num_replicas=2, replicas_to_aggregate=1)
    with lockstep.local(cluster) as session, lockstep.local(cluster) as other:
        models = [Bag(lt.EmbeddingBag(ROWS, WIDTH, _weight=FIRST.clone())) for _ in range(2)]
        optimizers = [
            lt.Optimizer(one, model, torch.optim.SGD(model.parameters(), lr=0.1))
            for one, model in zip((session, other), models, strict=True)
        ]

        def step() -> None:
            optimizers[1].zero_grad()
            models[1](IDS).sum().backward()
            optimizers[1].step()

        def read_late(*words: Any, **options: Any) -> Any:
            for _ in range(late.pop() if late else 0):
                step()
            return read_rows(*words, **options)

        late: list[int] = []  # how many steps the other makes before a reading, from the last
        read_rows = session.read_rows
        monkeypatch.setattr(session, "read_rows", read_late)
        for counts, at in (([2], 2), ([1], 3), ([0, 2, 1], 6)):
            late[:] = counts
            assert lt.save_model(optimizers[0], models[0], tmp_path / "model.pt") == at == optimizers[0].global_step
            saved = torch.load(tmp_path / "model.pt", weights_only=True)
            plain = Bag(nn.EmbeddingBag(ROWS, WIDTH, _weight=FIRST.clone()))
            theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
            for _ in range(at):
                theirs.zero_grad()
                plain(IDS).sum().backward()
                theirs.step()
            for name, value in plain.state_dict().items():
                torch.testing.assert_close(saved[name], value)
        late[:] = [2] * 100
        with pytest.raises(DeadlineExceeded, match="save a checkpoint and export it instead"):
            lt.save_model(optimizers[0], models[0], tmp_path / "model.pt")


def test_wrong_uses_of_an_embedding_are_refused_with_a_reason(session: Session) -> None:
    with pytest.raises(ValueError, match="max_norm changes rows while they are read"):
        lt.Embedding(3, 2, max_norm=1.0)
    with pytest.raises(ValueError, match="mode = 'median', want 'sum', 'mean' or 'max'"):
        lt.EmbeddingBag(3, 2, mode="median")
    with pytest.raises(ValueError, match="padding_idx = 9: there are 3 rows"):
        lt.Embedding(3, 2, padding_idx=9)
    with pytest.raises(ValueError, match=r"_weight has shape \(2, 2\), the module is for \(3, 2\)"):
        lt.Embedding(3, 2, _weight=torch.zeros(2, 2))
    model = Bag(lt.Embedding(ROWS, WIDTH))
    with pytest.raises(RuntimeError, match=r"make lockstep\.torch\.Optimizer with the model first"):
        model(IDS)
    optimizer = lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(IndexOutOfRange, match="12"):
        model(torch.tensor([12]))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(IDS).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="does not know the rows of tables"):
        scaler.step(optimizer)
