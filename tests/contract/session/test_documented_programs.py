"""Each block of Python on a page of the documentation runs as it is printed, against a cluster in this process."""

import re
import runpy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.in_process import InProcessCluster
from tests.support.cluster.here import follower_of
from tests.support.repository import ROOT
from worker_client.following.publisher import Publisher, reader_of
from worker_client.sync_replicas import Graph

PAGES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
# Pages whose programs another test runs; it names the page.
ELSEWHERE = {
    "docs/tutorials/keras.md": "tests/frameworks/keras/test_backends.py",  # a process has one backend; Keras itself warns in some
    "docs/how-to/migrate.md": "tests/processes/cli/test_readme.py",
    "docs/tutorials/first-cluster.md": "tests/processes/cli/test_readme.py",
}
# Blocks that cannot run by themselves, by page and number on the page.
NOT_RUN = {
    ("docs/how-to/tls.md", 0): "its host is an example",
    ("docs/reference/sync-replicas.md", 2): "`...` stands for the reader's own arguments",
    ("docs/reference/sync-replicas.md", 3): "it reads a checkpoint of the reader's own",
    ("docs/how-to/estimator.md", 3): "it needs three workers' processes; tests/contract/session/test_estimator_cluster.py has them",
}
# What frameworks are not installed for; `make test-frameworks` runs the same where they are.
FRAMEWORKS = ("torch", "jax", "keras", "dask")
# Numbers of a block that only take time, and what they are here.
SHORTER = {
    ("docs/how-to/sparse.md", 0): ("10_000_000", "10_000"),
    ("docs/reference/api.md", 1): ("10_000_000", "10_000"),
    ("docs/how-to/estimator.md", 0): ("hidden_units=(64,)", "hidden_units=(64,), max_iter=5"),
    ("docs/how-to/estimator.md", 2): ("(64,)", "(64,), max_iter=5"),
}
# How many workers run the block at once, where it is not one.
WORKERS = {("docs/reference/strategy.md", 4): 2}

SESSION = """
import lockstep, numpy as np, time
session = lockstep.connect()
"""
MODEL = (
    SESSION
    + """
session.create_or_join({"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}, optimizer=lockstep.adam(0.01))
def compute(variables, *batch, out=None): return {name: np.ones_like(value) for name, value in variables.items()}
"""
)
SYNC_REPLICAS = """
import numpy as np
from worker_client.sync_replicas import *
w, left = get_variable("w", np.ones(3)), [1, 2, 3]
def loss(values):
    if not left: raise StopIteration
    return left.pop(), {"w": values["w"]}
train_op = GradientDescentOptimizer(0.1).minimize(loss, get_or_create_global_step())
"""
STRATEGY = """
import numpy as np
from worker_client.strategy import ParameterServerStrategy, Variable
strategy = ParameterServerStrategy(2)
with strategy.scope():
    w, slot = Variable(np.ones(3), name="w"), Variable(np.ones(3), name="slot")
v, gradient = w, np.ones(3)
"""
CHECKPOINT = """
import numpy as np, pathlib
from safetensors.numpy import save_file
path = pathlib.Path("ckpt/step-000001200")
path.mkdir(parents=True)
save_file({"layer/weights": np.ones((784, 100), np.float32)}, path / "ps-00000-of-00001.safetensors")
"""
DIGITS = """
import os
from sklearn.datasets import load_digits
X_train, y_train = load_digits(return_X_y=True)
"""
# What is the reader's own, or stands on the page in words.
BEFORE = {
    ("docs/explanation/policies.md", 0): MODEL,
    ("docs/reference/optimizers.md", 4): SESSION + "values = {'w': np.zeros(3)}",
    ("docs/how-to/data.md", 0): MODEL
    + "whole, images, labels = compute, np.zeros((60_000, 3)), np.zeros(60_000)\ndef compute(*given): return 0.5, whole(*given)\n",
    ("docs/reference/api.md", 6): MODEL + "def evaluate(variables): return sorted(variables)",
    ("docs/explanation/policies.md", 1): MODEL + "import io; times = io.StringIO()",
    ("docs/how-to/sparse.md", 0): SESSION + "indices = np.arange(5)\n"
    "w_gradient, row_gradients = np.ones((16, 1), np.float32), np.ones((5, 16), np.float32)",
    ("docs/how-to/sparse.md", 1): SESSION,
    ("docs/reference/api.md", 0): "import numpy as np; initial_values = {'w': np.zeros(3)}\n"
    "def compute_gradients(variables): return {'w': np.ones(3)}",
    ("docs/reference/optimizers.md", 2): SESSION
    + """head = lockstep.Variable(np.zeros(2), optimizer=lockstep.momentum(0.1).in_group("head"))
session.create_or_join({"w": np.zeros(3), "head": head}, optimizer=lockstep.sgd(0.1))
gradients, rate = {"w": np.ones(3), "head": np.ones(2)}, 0.05""",
    ("docs/reference/optimizers.md", 3): SESSION
    + """body, head = np.zeros(3), np.zeros(2)
def gradient_of_head(values): return np.ones(2)
def gradients_of_all(values): return {name: np.ones_like(value) for name, value in values.items()}""",
    ("docs/reference/api.md", 1): SESSION,
    ("docs/reference/api.md", 2): MODEL,
    ("docs/reference/api.md", 3): SESSION
    + """session.create_or_join({"w": np.zeros(3), "b": np.zeros(2), "embedding": lockstep.EmbeddingTable((9, 2)),
    "batch_mean": lockstep.Buffer(np.zeros(3), "mean")}, optimizer=lockstep.sgd(0.1))
dw, ids, rows, mean, loss, accuracy, batch_size = np.ones(3), np.arange(2), np.ones((2, 2), np.float32), np.ones(3), 0.5, 0.9, 32""",
    ("docs/how-to/fresh-weights.md", 0): MODEL
    + """import threading
has_begun = threading.Event()
def train():
    while not session.is_finished:
        session.step(compute(session.read()))
        assert has_begun.wait(20)
    session.close()
threading.Thread(target=train).start()
def generate(arrays, made_at):
    has_begun.set()
    assert bool((arrays["w"] != 0).all()) == (made_at > 0)
""",
    ("docs/how-to/fresh-weights.md", 1): """import types, numpy as np
w = np.zeros(3)
model, batches = types.SimpleNamespace(named_parameters=lambda: [("w", w)]), [1.0, 2.0]
def train(model, batch): w[:] += batch
""",
    ("docs/how-to/resume.md", 0): CHECKPOINT,
    ("docs/reference/sync-replicas.md", 0): SYNC_REPLICAS,
    ("docs/reference/sync-replicas.md", 1): SYNC_REPLICAS,
    ("docs/reference/api.md", 4): MODEL
    + "batches = [1.0, 2.0]\ndef compute(variables, batch): return batch, {name: np.ones_like(one) for name, one in variables.items()}\n",
    ("docs/reference/api.md", 5): SESSION + "gradient = np.ones(3)\n"
    "session.create_or_join({name: lockstep.Buffer(np.ones(3)) for name in ('w', 'slot')}, optimizer=lockstep.sgd(1.0),"
    " placement=lockstep.Placement(pins={'w': 0, 'slot': 0}))\n",
    ("docs/reference/strategy.md", 1): STRATEGY + "import lockstep\nfrom worker_client.strategy import Optimizer\n"
    "def gradient_of(variable): return variable.read_value() + 1\n",
    ("docs/reference/strategy.md", 2): STRATEGY,
    ("docs/reference/strategy.md", 3): "import lockstep\nfrom worker_client.strategy import ParameterServerStrategy",
    ("docs/how-to/estimator.md", 2): DIGITS,
}


def printed(page: str) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def blocks() -> Iterator[Any]:
    """Those to run here: page, number, text."""
    for page in PAGES:
        for number, text in enumerate(printed(page) if page not in ELSEWHERE else ()):
            if (page, number) not in NOT_RUN:
                yield pytest.param(page, number, text, id=f"{Path(page).stem}-{number}")


@pytest.mark.parametrize(("page", "number", "text"), [*blocks()])
def test_program_of_a_page_runs_as_it_is_printed(
    page: str, number: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for framework in FRAMEWORKS:
        if re.search(rf"^(?:import|from) {framework}\b", text, flags=re.MULTILINE):
            pytest.importorskip(framework, reason=f"{framework} is not installed here; make test-frameworks runs this with it")
    monkeypatch.chdir(tmp_path)
    num_workers = WORKERS.get((page, number), 1)
    cluster = InProcessCluster(num_ps=2, total_num_replicas=num_workers, max_steps=20)
    with ExitStack() as stack, Graph().as_default(), ThreadPoolExecutor(num_workers) as threads:
        monkeypatch.setattr(lockstep, "connect", lambda *_, **__: stack.enter_context(lockstep.local(cluster)))
        monkeypatch.setattr(lockstep, "publish", lambda parameters: Publisher(reader_of(parameters), lockstep.connect()))
        monkeypatch.setattr(lockstep, "follow", lambda *_, wire="float32", **__: follower_of(cluster, wire))
        monkeypatch.setattr(lockstep, "observe", lambda: lockstep.observe_local(cluster))

        program = tmp_path / f"{Path(page).stem}_{number}.py"
        printed_number, shorter_number = SHORTER.get((page, number), ("", ""))
        assert printed_number in text
        text = text.replace(printed_number, shorter_number) if printed_number else text
        program.write_text(f"{BEFORE.get((page, number), '')}\n{text}", encoding="utf-8")
        for running in [threads.submit(runpy.run_path, str(program), run_name=f"worker_{index}") for index in range(num_workers)]:
            running.result()


def test_tests_that_run_a_page_elsewhere_name_it() -> None:
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text(encoding="utf-8"), (page, test)


def test_exceptions_are_those_of_blocks_that_there_are() -> None:
    there = {(page, number) for page in PAGES for number in range(len(printed(page)))}
    assert {*NOT_RUN, *BEFORE, *WORKERS, *SHORTER} <= there
