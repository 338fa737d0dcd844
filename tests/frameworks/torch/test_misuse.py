"""Wrong uses of the adapter: an error with a reason, never a crash of the interpreter. Risky ones run in processes of their own."""

import copy
import gc
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")
nn = torch.nn

import lockstep
import lockstep.torch as lt
from lockstep.in_process import InProcessCluster
from tests.support.repository import ROOT

SGD: Any = torch.optim.SGD


def whole(model: Any) -> Any:
    """A tensor of whole numbers among the parameters."""
    model.register_parameter("n", nn.Parameter(torch.arange(3), requires_grad=False))
    return model


def on_meta(model: Any) -> Any:
    return model.to("meta")


class Own(SGD):  # type: ignore[misc]
    """A torch optimizer of a user's own: its step may be anything."""


MAKING: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a parameter of whole numbers": (
        lambda model: (whole(model), SGD(model.parameters(), 0.1)),
        TypeError,
        "parameter 'n' is int64: servers train float16",
    ),
    "a parameter without values": (
        lambda model: (on_meta(model), SGD(model.parameters(), 0.1)),
        ValueError,
        r"has no values \(device meta\)",
    ),
    "the parameters of another model": (
        lambda model: (model, SGD(nn.Linear(2, 2).parameters(), 0.1)),
        ValueError,
        "that is not the model's",
    ),
    "an optimizer of one's own": (
        lambda model: (model, Own(model.parameters(), 0.1)),
        TypeError,
        r"Own: the parameter servers do not know its formula; known are Adadelta, Adagrad, Adam, AdamW, RMSprop, SGD\. Pass",
    ),
    "one that the servers do not have": (
        lambda model: (model, torch.optim.LBFGS(model.parameters())),
        TypeError,
        "LBFGS: the parameter servers do not know",
    ),
    "a step that gradients go through": (
        lambda model: (model, SGD(model.parameters(), 0.1, differentiable=True)),
        ValueError,
        "no gradient goes through it",
    ),
    "parameters in place of an optimizer": (
        lambda model: (model, model.parameters()),
        TypeError,
        r"want torch\.optim\.SGD\(model\.parameters\(\), …\)",
    ),
}


@pytest.mark.parametrize(("make", "error", "words"), MAKING.values(), ids=MAKING)
def test_parameters_that_cannot_be_trained_are_refused_before_anything_is_sent(make: Any, error: type[Exception], words: str) -> None:
    with lockstep.local() as session:
        model, optimizer = make(nn.Linear(2, 2))
        with pytest.raises(error, match=words):
            lt.Optimizer(session, model, optimizer)
        # The session is as it was.
        good = nn.Linear(2, 2)
        lt.Optimizer(session, good, SGD(good.parameters(), 0.1))


def made(session: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    return model, lt.Optimizer(session, model, SGD(model.parameters(), 0.1))


def test_an_optimizer_of_an_optimizer_a_wrong_session_and_a_wrong_option_are_refused() -> None:
    with lockstep.local() as session:
        model, optimizer = made(session)
        with pytest.raises(TypeError, match=r"this is a lockstep\.torch\.Optimizer already"):
            lt.Optimizer(session, model, optimizer)
        plain = SGD(model.parameters(), 0.1)
        with pytest.raises(TypeError, match=r"session: got a str, want what lockstep\.connect\(\) returns"):
            lt.Optimizer("127.0.0.1:5000", model, plain)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="buffers = 'sum', want 'mean' or 'local'"):
            lt.Optimizer(session, model, plain, buffers="sum")
        for dtype in ("float32", torch.int8):
            with pytest.raises(TypeError, match=r"master_dtype = .*, want torch\.float32, another type of floats"):
                lt.Optimizer(session, model, plain, master_dtype=dtype)
        for other, kind in (
            (model.parameters(), "Parameter among the pairs"),
            (model.state_dict(), "OrderedDict"),
            (None, "NoneType"),
        ):
            with pytest.raises(TypeError, match=rf"model: got a {kind}, want a torch\.nn\.Module, or \(name, parameter\) pairs"):
                lt.Optimizer(session, other, plain)
        with pytest.raises(TypeError, match=r"ReduceLROnPlateau goes by a metric, not by the step: call scheduler\.step\(metric\)"):
            optimizer.follow(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_a_group_that_is_added_later_is_refused_with_what_to_do() -> None:
    with lockstep.local() as session:
        _, optimizer = made(session)
        with pytest.raises(RuntimeError, match=r"no parameter group can be added\. Give all groups to the torch optimizer first"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_a_model_that_differs_on_one_worker_is_refused_with_the_difference() -> None:
    cluster = InProcessCluster(total_num_replicas=2)
    with lockstep.local(cluster) as first, lockstep.local(cluster) as second:
        made(first)
        other = nn.Linear(3, 2)
        with pytest.raises(lockstep.errors.ModelMismatch, match=r"variables\['weight'\].shape is \(2, 3\), the cluster's is \(2, 2\)"):
            lt.Optimizer(second, other, SGD(other.parameters(), 0.1))


def test_a_step_without_gradients_is_refused_and_leaves_the_session_as_it_was() -> None:
    with lockstep.local() as session:
        model, optimizer = made(session)
        with pytest.raises(RuntimeError, match=r"no parameter has a gradient: call loss\.backward\(\) before step\(\)"):
            optimizer.step()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert optimizer.global_step == 1


def test_a_parameter_that_was_given_another_shape_is_refused() -> None:
    with lockstep.local() as session:
        model, optimizer = made(session)
        model.weight.data = torch.zeros(2, 5)
        model(torch.ones(1, 5)).sum().backward()
        with pytest.raises(ValueError, match=r"'weight' has shape \(2, 5\) now, and had \(2, 2\)"):
            optimizer.step()


def test_a_model_that_goes_to_another_device_later_is_refused_and_may_come_back() -> None:
    with lockstep.local() as session:
        model, optimizer = made(session)
        kept = copy.deepcopy(model).to("meta")
        with pytest.raises(RuntimeError, match=r"no parameter has a gradient.*make the optimizer after the model's last change"):
            kept(torch.ones(1, 2, device="meta")).sum().backward()
            optimizer.step()
        model.weight.grad, model.bias.grad = torch.ones(2, 2), torch.ones(2)
        optimizer.step()
        assert optimizer.global_step == 1


def test_a_forgotten_zero_grad_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with lockstep.local() as session:
        model, optimizer = made(session)
        for zero in (optimizer.zero_grad, lambda: optimizer.zero_grad(set_to_none=False), model.zero_grad):
            for _ in range(2):
                zero()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        assert not caplog.records
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["the gradients of the last step are part of this one's: call optimizer.zero_grad() before backward()"]


def test_values_that_are_loaded_into_the_model_later_are_replaced_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with lockstep.local() as session:
        model, optimizer = made(session)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

        step()
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(nn.Linear(2, 2).state_dict())  # for an evaluation with averages, for example
        model.load_state_dict(kept)
        step()
        assert not caplog.records
        for _ in range(2):
            model.load_state_dict(nn.Linear(2, 2).state_dict())
            step()
        np.testing.assert_array_equal(session.read()["weight"], model.weight.detach().numpy())
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "Set values before the optimizer is made" in said[0]


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")  # PyTorch's own words, before the error
def test_a_session_that_is_given_to_a_loaders_workers_is_refused() -> None:
    with lockstep.local() as session:
        loader = torch.utils.data.DataLoader([session], num_workers=1, multiprocessing_context="spawn")
        with pytest.raises(TypeError, match="the session of worker 0 belongs to one process: it cannot be copied or pickled"):
            next(iter(loader))
    gc.collect()


@pytest.mark.parametrize("act", [copy.deepcopy, torch.save], ids=lambda act: act.__name__)
def test_an_optimizer_stays_in_its_process(act: Any, tmp_path: Any) -> None:
    with lockstep.local() as session:
        _, optimizer = made(session)
        with pytest.raises(TypeError, match="belongs to one process: it cannot be copied, pickled, or given to a DataLoader's workers"):
            act(optimizer, *((tmp_path / "x",) if act is torch.save else ()))


class Samples:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index))


# JAX, where its tests have run in this process before, allows no fork.
LOADING = {"num_workers": 1, "multiprocessing_context": "spawn"}


def test_a_loader_that_fetches_ahead_of_the_steps_is_refused_with_a_reason() -> None:
    with lockstep.local() as session:
        _, optimizer = made(session)
        loader = torch.utils.data.DataLoader(Samples(), batch_sampler=lt.Sampler(optimizer, Samples(), 4), **LOADING)
        with pytest.raises(RuntimeError, match=r"this loader fetches ahead.*num_workers=0"):
            list(loader)
    gc.collect()  # the error holds the iterator, which ends its process when it goes


def test_a_data_set_without_a_length_is_refused() -> None:
    with lockstep.local() as session:
        _, optimizer = made(session)
        with pytest.raises(TypeError, match="a generator has no length: ranges of samples need a map-style data set"):
            next(optimizer.batches((one for one in range(3)), 2))
        with pytest.raises(TypeError, match="a DataLoader has no samples by index: give the data set itself"):
            next(optimizer.batches(torch.utils.data.DataLoader(Samples()), 2))
        with pytest.raises(TypeError, match="shuffle_seed = 'a', want None, or a whole number"):
            next(optimizer.batches(Samples(), 2, shuffle_seed="a"))


BEGIN = """
import faulthandler, os, sys
import torch, lockstep, lockstep.torch as lt
model = torch.nn.Linear(2, 2)
with lockstep.local() as session:
    optimizer = lt.Optimizer(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    step()
"""
# What might end a process: the code, and what it prints at last.
IN_PROCESSES = {
    "in-place writes to what was read": (
        """
        read = {name: torch.from_numpy(value) for name, value in session.read().items()}
        for value in read.values(): value.fill_(float("nan"))
        for one in model.parameters(): one.data.mul_(0)
        step()
        print(all(torch.isfinite(one).all() for one in model.parameters()))
        """,
        "True",
    ),
    "writes to the memory of gradients that was kept": (
        """
        kept = {name: torch.from_numpy(value) for name, value in session.gradient_buffers().items()}
        for _ in range(3):
            step()
            for value in kept.values(): value.fill_(1.0)
        print(optimizer.global_step)
        """,
        "4",
    ),
    "fork": (
        """
        pid = os.fork()
        if not pid:
            try:
                step()
            except RuntimeError as error:
                print("fork" in str(error), flush=True)
            os._exit(0)
        print(os.waitpid(pid, 0)[1], flush=True)
        step()
        """,
        "True\n0",
    ),
    "a loader's workers beside it": (
        """
        data = torch.utils.data.TensorDataset(torch.ones(8, 2))
        for (x,) in torch.utils.data.DataLoader(data, batch_size=2, num_workers=2):
            step()
        print(optimizer.global_step)
        """,
        "5",
    ),
}


@pytest.mark.parametrize("case", IN_PROCESSES)
def test_a_program_with_worker_processes_ends_without_crashing_the_interpreter(case: str) -> None:
    code, want = IN_PROCESSES[case]
    program = BEGIN + textwrap.indent(textwrap.dedent(code), "    ")
    command = [sys.executable, "-W", "ignore", "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, want), result.stderr
