"""Models that torch.compile() has compiled train unchanged, with the names of the original model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")
nn = torch.nn

import lockstep
import lockstep.torch as lt

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own: it reads what torch says not to read
]
X = torch.randn(6, 16, 5, generator=torch.Generator().manual_seed(1))
IDS = torch.randint(9, (6, 16, 3), generator=torch.Generator().manual_seed(2))


class Net(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, bag: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bag, self.body = bag, nn.Sequential(nn.Linear(5 + 4, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, x: Any, ids: Any) -> Any:
        return self.body(torch.cat([x, self.bag(ids)], dim=1))


def whole(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def in_place(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


def one_part(model: Any) -> Any:
    model.body = torch.compile(model.body, backend="aot_eager")
    return model


def trained(compiled: Any, rows: Any) -> dict[str, Any]:
    model = compiled(Net(lt.EmbeddingBag(9, 4, mode="sum", _weight=rows)))
    with lockstep.local() as session:
        optimizer = lt.Optimizer(session, model, torch.optim.AdamW(model.parameters(), lr=0.05))
        for x, ids in zip(X, IDS, strict=True):
            optimizer.zero_grad()
            model(x, ids).square().mean().backward()
            optimizer.step()
        return {**session.read(), "bag.weight": session.read_rows("bag.weight")}


def test_a_compiled_model_is_saved_with_the_names_of_the_model_itself(tmp_path: Path) -> None:
    model = whole(nn.Sequential(nn.Linear(2, 2), lt.Embedding(3, 2)))
    with lockstep.local() as session:
        optimizer = lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
        lt.save_model(optimizer, model, tmp_path / "model.pt")
    assert sorted(torch.load(tmp_path / "model.pt", weights_only=True)) == ["0.bias", "0.weight", "1.weight"]


@pytest.mark.parametrize("compiled", [whole, in_place, one_part], ids=lambda one: one.__name__)
def test_a_compiled_model_trains_as_it_does_uncompiled_with_the_same_names(compiled: Any) -> None:
    rows = torch.randn(9, 4, generator=torch.Generator().manual_seed(4))
    want, found = trained(lambda model: model, rows.clone()), trained(compiled, rows.clone())
    assert found.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5, err_msg=name)
