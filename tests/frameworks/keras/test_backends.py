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

from tests.support.commands import descendants, read_until, up
from tests.support.repository import ROOT

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
    environment = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "failures.json"
        words = [sys.executable, "-m", "tests.frameworks.keras.claims", str(out)]
        ended = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        failures: dict[str, str] = json.loads(out.read_text(encoding="utf-8"))
        return failures


@pytest.mark.timeout(420)
@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_claim_holds(backend: str, claim: str) -> None:
    _installed(backend)
    assert claim not in _failures(backend), _failures(backend)[claim]


MODEL = """
import sys, time
import keras, numpy as np
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(20 * 48, 6)).astype("float32")
y = np.sin(x.sum(axis=1, keepdims=True))
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.AdamW(0.002, clipnorm=1.0)
def save():
    np.savez(sys.argv[1], *model.get_weights())
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
    + """
import lockstep.keras
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 8 and session.worker_index == 0:
            print("in the middle", flush=True)
        time.sleep(0.1)
with lockstep.connect() as session:
    model.compile(optimizer=lockstep.keras.Optimizer(session, optimizer), loss="mse", run_eagerly=keras.backend.backend() != "torch")
    model.optimizer.build(model.trainable_variables)
    start, part = session.local_step * 48, slice(session.worker_index, None, 3)
    callbacks = [lockstep.keras.StopWhenFinished(session), *[Slow()] * (len(sys.argv) > 2)]
    model.fit(x[start:][part], y[start:][part], batch_size=16, shuffle=False, verbose=0, callbacks=callbacks)
    if session.worker_index == 0:
        save()
"""
)


def _arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as file:
        return [file[name] for name in file.files]


def _together(backend: str, tmp_path: Path, *, victim: str = "") -> list[np.ndarray]:
    """The final weights of three workers on two parameter servers, after a kill -9 of one process in the middle."""
    tmp_path.mkdir(exist_ok=True)
    out, slow = tmp_path / "together.npz", ["slow"] if victim else []
    options = ["--restart-workers", "3", "--checkpoint-dir", str(tmp_path / "checkpoints"), "--durability", "step"] if victim else []
    arguments = ("--ps", "2", "--workers", "3", "--max-steps", "20", *options, "--", str(out), *slow)
    with up(*arguments, worker=TOGETHER, run_dir=tmp_path / "run", KERAS_BACKEND=backend) as process:
        if victim:
            read_until(process, "in the middle")
            for one in descendants(process):
                if victim in one.cmdline() or (victim == "worker" and one.environ().get("LOCKSTEP_WORKER_INDEX") == "1"):
                    one.kill()
                    break
            else:
                raise AssertionError(f"no {victim} is running")
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return _arrays(out)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_three_workers_with_a_third_of_each_batch_train_what_one_process_does(backend: str, tmp_path: Path) -> None:
    _installed(backend)
    (tmp_path / "alone.py").write_text(ALONE, encoding="utf-8")
    words = [sys.executable, str(tmp_path / "alone.py"), str(tmp_path / "alone.npz")]
    subprocess.run(words, env={**os.environ, "KERAS_BACKEND": backend}, check=True, timeout=150)
    for together, alone in zip(_together(backend, tmp_path), _arrays(tmp_path / "alone.npz"), strict=True):
        np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("backend", ["torch", "jax", "tensorflow"])
def test_programs_of_the_tutorial_run_as_they_are_printed(backend: str, tmp_path: Path) -> None:
    _installed(backend)
    page = (ROOT / "docs/tutorials/keras.md").read_text(encoding="utf-8")
    alone, together = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    environment = {**os.environ, "KERAS_BACKEND": backend}
    ended = subprocess.run([sys.executable, "-c", alone], env=environment, capture_output=True, text=True, timeout=150, check=True)
    assert ended.stdout.startswith("loss 0.")
    with up("--ps", "2", "--workers", "3", worker=together, run_dir=tmp_path / "run", KERAS_BACKEND=backend) as process:
        said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert said.count(" loss 0.") == 3, said


@pytest.mark.chaos
@pytest.mark.timeout(700)
@pytest.mark.parametrize("victim", ["worker", "ps_server", "chief"])
def test_a_killed_process_leaves_the_bits_as_they_are(victim: str, tmp_path: Path) -> None:
    _installed("torch")
    undisturbed, killed = _together("torch", tmp_path / "undisturbed"), _together("torch", tmp_path / "killed", victim=victim)
    for one, other in zip(undisturbed, killed, strict=True):
        assert one.tobytes() == other.tobytes()
