"""`import lockstep`: quick, without heavy libraries, and with the names of the SDK."""

import importlib
from pathlib import Path

import pytest

import lockstep
import ps_protocol.errors
import worker_client
from tests.support.processes.processes import run


def test_the_package_lockstep_has_the_names_of_the_sdk_and_the_errors() -> None:
    assert set(lockstep.__all__) == {*worker_client.__all__, "errors"}
    assert all(getattr(lockstep, name) is getattr(worker_client, name) for name in worker_client.__all__)
    assert set(lockstep.__all__) <= set(dir(lockstep))
    with pytest.raises(AttributeError, match="module 'lockstep' has no attribute 'Sesion'"):
        lockstep.Sesion  # noqa: B018


def test_a_star_import_gives_every_name() -> None:
    script = "from lockstep import *; print(*sorted(globals()))"
    result = run("-c", script)
    assert result.returncode == 0, result.stderr
    assert set(lockstep.__all__) <= set(result.stdout.split())


def test_the_classifier_is_there_without_being_listed_since_it_needs_scikit_learn() -> None:
    from worker_client.estimator import DNNClassifier  # imports scikit-learn, which takes a second

    assert lockstep.DNNClassifier is DNNClassifier
    assert "DNNClassifier" not in lockstep.__all__


def test_errors_are_those_that_the_sdk_raises() -> None:
    assert all(issubclass(getattr(lockstep.errors, name), lockstep.PsError) for name in lockstep.errors.__all__)
    with pytest.raises(lockstep.errors.NotInitialized), lockstep.local() as session:
        session.read()


class OwnError(lockstep.errors.InvalidSpec):
    """An error of a program, made from one of the SDK."""


@pytest.mark.parametrize("error_type", [lockstep.errors.ModelMismatch, ps_protocol.errors.FrameOutOfOrder, OwnError])
def test_an_error_is_where_tracebacks_and_pickles_name_it_whosever_it_is(error_type: type[lockstep.PsError]) -> None:
    assert getattr(importlib.import_module(error_type.__module__), error_type.__name__) is error_type


def test_import_loads_no_other_package_before_a_name_is_asked_for() -> None:
    script = "import sys, lockstep; print(*sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    result = run("-c", script)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert not loaded & {"grpc", "google", "numpy", "worker_client"}, loaded


def test_an_interrupt_while_the_sdk_is_imported_ends_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise KeyboardInterrupt")  # as if Ctrl-C came just there
    result = run("-c", "import lockstep; lockstep.connect()", environment={"PYTHONPATH": str(tmp_path)})
    assert result.stderr.endswith("KeyboardInterrupt: interrupted while Lockstep was imported\n"), result.stderr
    assert "numpy" not in result.stderr


def test_no_framework_is_loaded_before_its_adapter_is_imported() -> None:
    script = "import sys, lockstep; [getattr(lockstep, name) for name in lockstep.__all__]; print(*sorted(sys.modules))"
    result = run("-c", script)
    assert result.returncode == 0, result.stderr
    loaded = {name.partition(".")[0] for name in result.stdout.split()} | {n for n in result.stdout.split() if n.startswith("lockstep.")}
    adapters = {f"lockstep.{name}" for name in ("torch", "jax", "keras")}
    assert not loaded & {"torch", "jax", "keras", "tensorflow", "optax", "sklearn", *adapters}, loaded
