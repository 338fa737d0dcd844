"""lockstep.keras with each backend that is installed, in a process of its own: its claims, and a cluster of real processes."""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes.commands import up
from tests.support.repository import ROOT
from tests.support.sessions.trained_by_three import EXACT, IN_THE_MIDDLE, alone, arrays_in, together

if importlib.util.find_spec("keras") is None:  # not imported: its default backend may not be there
    pytest.skip("Keras is not installed: `make test-frameworks` has it", allow_module_level=True)


def _installed(backend: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"the backend {backend} is not installed: `make test-frameworks` has it")


# Read, not imported: Keras would take one backend for this process.
CLAIMS = [
    line.strip(" ,")
    for line in (Path(__file__).parent / "claims.py")
    .read_text(encoding="utf-8")
    .partition("CLAIMS = (\n")[2]
    .partition(")")[0]
    .splitlines()
]


@functools.cache
def _failures(backend: str) -> dict[str, str]:
    environment = {**os.environ, **EXACT, "KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "failures.json"
        words = [sys.executable, "-m", "tests.frameworks.keras.claims", str(out)]
        ended = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        failures: dict[str, str] = json.loads(out.read_text(encoding="utf-8"))
        return failures


@pytest.mark.timeout(820)
@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_every_claim_holds_with_every_backend(backend: str, claim: str) -> None:
    _installed(backend)
    assert claim not in _failures(backend), _failures(backend)[claim]


MODEL = """
import sys
import keras, numpy as np
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(20 * 48, 6)).astype("float32")
y = np.sin(x.sum(axis=1, keepdims=True))
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.AdamW(0.002, clipnorm=1.0)
def save():
    with open(sys.argv[1], "wb") as file:
        np.savez(file, *model.get_weights())
"""
ALONE = (
    MODEL
    + """
model.compile(optimizer=optimizer, loss="mse")
model.fit(x, y, batch_size=48, shuffle=False, verbose=0)
save()
"""
)
TOGETHER = (
    MODEL
    + IN_THE_MIDDLE
    + """
import lockstep.keras
class Middle(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 8 and session.worker_index == 0:
            in_the_middle()
with lockstep.connect() as session:
    model.compile(optimizer=lockstep.keras.Optimizer(session, optimizer), loss="mse", run_eagerly=keras.backend.backend() != "torch")
    model.optimizer.build(model.trainable_variables)
    start, part = session.local_step * 48, slice(session.worker_index, None, 3)
    callbacks = [lockstep.keras.StopWhenFinished(session), Middle()]
    model.fit(x[start:][part], y[start:][part], batch_size=16, shuffle=False, verbose=0, callbacks=callbacks)
    if session.worker_index == 0:
        save()
"""
)


RECOVERY = ("--durability", "step")


@pytest.mark.timeout(500)
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_three_workers_with_a_third_of_each_batch_train_what_one_process_does(backend: str, tmp_path: Path) -> None:
    _installed(backend)
    of_one = arrays_in(alone(ALONE, tmp_path, KERAS_BACKEND=backend))
    for found, value in zip(arrays_in(together(TOGETHER, tmp_path, KERAS_BACKEND=backend)), of_one, strict=True):
        np.testing.assert_allclose(found, value, rtol=0, atol=1e-6)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_programs_of_the_tutorial_run_as_they_are_printed(backend: str, tmp_path: Path) -> None:
    _installed(backend)
    page = (ROOT / "docs/tutorials/keras.md").read_text(encoding="utf-8")
    alone, together, in_phases = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    environment = {**os.environ, "KERAS_BACKEND": backend}
    ended = subprocess.run([sys.executable, "-c", alone], env=environment, capture_output=True, text=True, timeout=150, check=True)
    assert ended.stdout.startswith("loss 0.")
    with up("--ps", "2", "--workers", "3", worker=together, run_dir=tmp_path / "run", KERAS_BACKEND=backend) as process:
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert said.count(" loss 0.") == 3, said
    in_phases += "print('ended', session.local_step, session.phase)\n"
    with up("--ps", "1", "--workers", "2", worker=in_phases, run_dir=tmp_path / "phases", KERAS_BACKEND=backend) as process:
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and said.count(" ended 40 1") == 2, said


@functools.cache
def _undisturbed(backend: str) -> list[bytes]:
    with tempfile.TemporaryDirectory() as directory:
        return [one.tobytes() for one in arrays_in(together(TOGETHER, Path(directory), KERAS_BACKEND=backend))]


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["worker", "ps_server", "chief"])
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_a_killed_process_leaves_the_bits_as_they_are(backend: str, victim: str, tmp_path: Path) -> None:
    _installed(backend)
    killed = arrays_in(together(TOGETHER, tmp_path, victim=victim, recovery=RECOVERY, KERAS_BACKEND=backend))
    assert [one.tobytes() for one in killed] == _undisturbed(backend)
