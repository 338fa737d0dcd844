"""A module follows a training of PyTorch elsewhere: whole steps, in place, in its own types, tied weights once, buffers too."""

from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")
nn = torch.nn

import lockstep.torch as lt
import worker_client
from lockstep.in_process import InProcessCluster
from tests.support.cluster.here import follower_of
from worker_client import Part


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """A tied pair, a layer that is split over servers, and buffers."""

    def __init__(self, *, is_tied: bool = True, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.norm = nn.BatchNorm1d(width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, 40, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        return self.head(torch.tanh(self.body(self.norm(self.embed(ids)))))


class Trainer:
    """A training of such a module by lockstep.torch, and followers of it, in this process."""

    def __init__(self, stack: ExitStack, *, model: Any = None, lr: float = 1e-3) -> None:
        torch.manual_seed(1)
        self._stack, self.cluster = stack, InProcessCluster(num_ps=2)
        self.model = model if model is not None else Net()
        session = stack.enter_context(closing(worker_client.local(self.cluster)))
        self.optimizer = lt.Optimizer(session, self.model, torch.optim.AdamW(self.model.parameters(), lr=lr))

    def step(self) -> int:
        ids = torch.arange(40) if isinstance(self.model, Net) else torch.randn(8, 4)
        self.optimizer.zero_grad()
        self.model(ids).square().mean().backward()
        self.optimizer.step()
        return int(self.optimizer.global_step)

    def follower(self, module: Any, *, wire: str = "bfloat16", names: Any = None) -> Any:
        weights = follower_of(self.cluster, wire, **({} if names is None else {"names": names}))
        return self._stack.enter_context(lt.ModuleFollower(module, weights, is_part=names is not None))


@pytest.fixture
def stack() -> Any:
    with ExitStack() as stack:
        yield stack


def state(module: Any) -> dict[str, Any]:
    return {name: one.detach().clone() for name, one in module.state_dict().items()}


def check_equal(followed: Any, trained: Any) -> None:
    """Each tensor has the trained one's values, rounded once to its own type."""
    expected = state(trained)
    for name, one in state(followed).items():
        assert torch.equal(one, expected[name].to(one.dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_swap_gives_parameters_and_buffers_of_one_step(stack: ExitStack, dtype: Any) -> None:
    trainer = Trainer(stack)
    torch.manual_seed(7)
    module = Net().to(dtype)
    held = [*module.parameters()]
    follower = trainer.follower(module, wire=str(dtype).removeprefix("torch."))
    for _ in range(4):
        step = trainer.step()
        assert follower.swap(step=step, timeout_s=20) == step == follower.weights.step
        for name, one in module.named_parameters():
            assert torch.equal(one, dict(trainer.model.named_parameters())[name].to(dtype)), name
        running = trainer.model.norm.running_mean.to(dtype)
        assert torch.equal(module.norm.running_mean, running)
        assert module.norm.num_batches_tracked == trainer.model.norm.num_batches_tracked == step
    assert all(one is other for one, other in zip(module.parameters(), held, strict=True)), "in place"
    assert module.head.weight is module.embed.weight, "still tied"


def test_words_of_bfloat16_reach_parameters_of_bfloat16_bit_for_bit_also_those_that_are_no_number(stack: ExitStack) -> None:
    special = [float("nan"), float("inf"), -0.0, 1e-40, 3.389e38, 1 / 3]
    model = nn.Linear(len(special), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([special]))
    trainer = Trainer(stack, model=model)
    module = nn.Linear(len(special), 1, bias=False).bfloat16()
    trainer.follower(module).swap(timeout_s=20)
    expected = torch.tensor([special]).bfloat16()
    assert torch.equal(module.weight.view(torch.int16)[:, 1:], expected.view(torch.int16)[:, 1:])
    assert torch.isnan(module.weight[0, 0])


def test_only_what_has_changed_is_copied_and_a_tensor_that_was_replaced_is_filled_anew(stack: ExitStack) -> None:
    trainer = Trainer(stack)
    module = Net()
    follower = trainer.follower(module, wire="float32")
    follower.swap(step=trainer.step(), timeout_s=20)
    version = module.body.weight._version
    follower.swap()
    assert module.body.weight._version == version, "nothing has changed"
    module.body.weight = nn.Parameter(torch.zeros(64, 64))
    follower.swap()
    check_equal(module, trainer.model)


def test_ties_that_only_the_reader_has_are_refused_and_resolved_by_names(stack: ExitStack) -> None:
    trainer = Trainer(stack, model=Net(is_tied=False))
    module = Net(is_tied=True)
    before = state(module)
    with pytest.raises(ValueError, match=r"'embed.weight' and 'head.weight' are one tensor .* choose by names="):
        trainer.follower(module).swap(timeout_s=20)
    assert all(torch.equal(one, before[name]) for name, one in state(module).items()), "nothing was copied"
    trainer.follower(module, wire="float32", names=["embed.weight"]).swap(timeout_s=20)
    assert torch.equal(module.head.weight, trainer.model.embed.weight)


def test_ties_of_the_trainer_that_the_reader_does_not_have_are_told(stack: ExitStack) -> None:
    trainer = Trainer(stack)
    module = Net(is_tied=False)
    with pytest.raises(ValueError, match=r"no dense variable for the parameter 'head.weight'.* by names="):
        trainer.follower(module).swap(timeout_s=20)
    names = {"embed.weight": "embed.weight", "head.weight": "embed.weight"}
    trainer.follower(module, wire="float32", names=names).swap(timeout_s=20)
    assert torch.equal(module.head.weight, trainer.model.embed.weight)
    assert torch.equal(module.embed.weight, trainer.model.embed.weight)


def test_a_module_of_another_shape_is_refused_before_anything_is_copied(stack: ExitStack) -> None:
    trainer = Trainer(stack)
    module = Net()
    module.body = nn.Linear(64, 32)
    before = state(module)
    with pytest.raises(ValueError, match=r"'body.(weight|bias)' has shape \(32.*\) in the module, and \(64.*\) in the cluster"):
        trainer.follower(module).swap(timeout_s=20)
    assert all(torch.equal(one, before[name]) for name, one in state(module).items())


def test_names_that_the_module_does_not_have_are_refused(stack: ExitStack) -> None:
    with pytest.raises(ValueError, match="the module has no parameter or buffer 'bodi'"):
        Trainer(stack).follower(Net(), names={"bodi": "body.weight"}).swap(timeout_s=20)


def test_tensors_without_values_are_refused(stack: ExitStack) -> None:
    with torch.device("meta"):
        module = Net()
    with pytest.raises(ValueError, match="is not a plain tensor with values"):
        Trainer(stack).follower(module).swap(timeout_s=20)


def test_a_reader_holds_a_part_of_a_variable(stack: ExitStack) -> None:
    trainer = Trainer(stack, model=nn.Linear(4, 6))
    module = nn.Linear(4, 3)
    names = {"weight": Part("weight", np.s_[4:1:-1]), "bias": Part("bias", np.s_[1::2])}
    trainer.follower(module, wire="float32", names=names).swap(timeout_s=20)
    assert torch.equal(module.weight, trainer.model.weight.flip(0)[1:4])
    assert torch.equal(module.bias, trainer.model.bias[1::2])


def test_a_compiled_module_has_the_names_of_its_own(stack: ExitStack) -> None:
    trainer = Trainer(stack)
    module = Net()
    trainer.follower(torch.compile(module, backend="eager"), wire="float32").swap(timeout_s=20)
    check_equal(module, trainer.model)


def test_a_module_of_one_half_type_asks_for_that_type() -> None:
    from lockstep.torch.following import _wire_of

    mixed = Net().bfloat16()
    mixed.norm.float()
    assert [_wire_of(one) for one in (Net().bfloat16(), Net().half(), Net(), mixed)] == ["bfloat16", "float16", None, None]
