"""`lockstep.ray.up()` on a real Ray: functions train there, what they return or raise comes back, and nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: `make test-engines ENGINE=ray` has it")

from tests.engines.ray_nodes import left_on_nodes, ray_cluster
from tests.engines.ssh import LOCKSTEP
from tests.support.processes.commands import TRAIN
from tests.support.repository import ROOT, printed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(300)


def test_without_a_ray_the_command_says_how_to_start_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lockstep", "up", "--engine", "ray", "--", "python", "train.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and re.search("no Ray answers: .*; start one by `ray start --head`", ended.stderr), ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr


@pytest.fixture(scope="module")
def ray_of_three() -> Iterator[Any]:
    with ray_cluster(3) as nodes:
        yield nodes


def run(nodes: Any, directory: Path, program: str) -> "subprocess.CompletedProcess[str]":
    """Runs a driver of Ray."""
    (directory / "driver.py").write_text(textwrap.dedent(program))
    environment = {**os.environ, "RAY_ADDRESS": nodes.address}
    command = [sys.executable, "driver.py"]
    return subprocess.run(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False
    )


def assert_nothing_is_left() -> None:
    wait_until(lambda: not left_on_nodes(), what="nothing of Lockstep is left on Ray's nodes", timeout_s=20)


def test_a_function_trains_on_each_worker_and_what_it_returns_comes_back(ray_of_three: Any, tmp_path: Path) -> None:
    ended = run(
        ray_of_three,
        tmp_path,
        """
        import ray
        import lockstep.ray

        class Model:  # of the driver's own module
            def __init__(self, rate):
                self.rate = rate

        def train(model):
            import lockstep, numpy as np
            with lockstep.connect() as session:
                session.create_or_join({"w": np.zeros(4)}, optimizer=lockstep.sgd(model.rate))
                while not session.is_finished:
                    session.step({"w": np.ones(4)})
                return session.worker_index, float(session.read()["w"][0]), ray.util.get_node_ip_address()

        print("results", lockstep.ray.up(train, num_workers=3, num_ps=2, config=Model(0.5), flags="--max-steps 50"))
        """,
    )
    assert ended.returncode == 0, ended.stdout
    assert [int(index) for index, value in re.findall(r"\((\d), (-?[\d.]+), '", ended.stdout) if value == "-25.0"] == [0, 1, 2], (
        ended.stdout
    )
    assert_nothing_is_left()


def test_what_a_function_raises_is_raised_by_the_driver(ray_of_three: Any, tmp_path: Path) -> None:
    ended = run(
        ray_of_three,
        tmp_path,
        """
        import lockstep.ray

        def train():
            import lockstep, numpy as np
            with lockstep.connect() as session:
                session.create_or_join({"w": np.zeros(4)}, optimizer=lockstep.sgd(0.5))
                if session.worker_index == 1:
                    raise LookupError("no such file")
                while not session.is_finished:
                    session.step({"w": np.ones(4)})

        try:
            lockstep.ray.up(train, num_workers=2)
        except LookupError as error:
            print("the driver has", repr(error.cause), "as", type(error).__name__)
            print("the traceback is here" if 'raise LookupError("no such file")' in str(error) else error)
        """,
    )
    assert "the driver has LookupError('no such file') as RayTaskError(LookupError)\nthe traceback is here" in ended.stdout, ended.stdout
    assert_nothing_is_left()


def test_the_documented_call_and_command_train_with_a_gpu_for_each_worker(ray_of_three: Any, tmp_path: Path) -> None:
    train = """
        import lockstep.ray

        def train():
            import os, lockstep, numpy as np
            with lockstep.connect() as session:
                session.create_or_join({"w": np.zeros(4)}, optimizer=lockstep.sgd(0.5))
                while session.global_step < 20:
                    session.step({"w": np.ones(4)})
                return len(os.environ["CUDA_VISIBLE_DEVICES"])

        """
    ended = run(ray_of_three, tmp_path, f"{train}{printed('lockstep.ray.up(').strip()}\n        print('results', results)")
    assert ended.returncode == 0 and "results [1, 1, 1, 1]" in ended.stdout, ended.stdout
    (tmp_path / "train.py").write_text(TRAIN)
    (command,) = re.findall(r"`(lockstep up --engine ray [^`]*)`", (ROOT / "docs/how-to/running.md").read_text())
    words = command.replace("lockstep", LOCKSTEP, 1).replace("--workers 4", "--workers 4 --max-steps 20").split()
    environment = {**os.environ, "RAY_ADDRESS": ray_of_three.address}
    again = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0 and again.stdout.count("value -10.0") == 4, again.stdout + again.stderr
    assert_nothing_is_left()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("lockstep.ray.up(3, num_workers=2)", "train: got a int, want a function"),
        ("lockstep.ray.up(print, num_workers=0)", "num_workers = 0, want at least 1"),
        ("lockstep.ray.up(print, num_workers=1, resources_per_worker={'num_gpus': 9})", "no node of Ray has processors, or GPUs if"),
        ("lockstep.ray.up(print, num_workers=1, flags='--max-step 5')", "ended with exit code 2: .*--max-step"),
        ('lockstep.ray.up(print, num_workers=1, flags="--name \'x")', "flags: got .* want words as in a shell: No closing quotation"),
        (
            "lockstep.ray.up(print, num_workers=1, strategy='spread')",
            "strategy = 'spread', want one of SPREAD, PACK, STRICT_SPREAD, STRICT_PACK",
        ),
        (
            "lockstep.ray.up(print, num_workers=1, resources_per_worker={'num_cpus': 0})",
            "a worker takes nothing; want a part of a processor",
        ),
        ("lockstep.ray.up(print, num_workers=7, placed_within_s=3)", "within 3 s; 7 workers need 7 CPU, and 6 of 6 are free"),
        (
            "lockstep.ray.up(print, num_workers=4, strategy='STRICT_SPREAD', placed_within_s=3)",
            "Ray has not placed the workers within 3 s; 4 workers of 1 CPU each do not fit on 4 nodes",
        ),
        ("lockstep.ray.up(lambda: open('/nowhere'), num_workers=1)", "No such file or directory: '/nowhere'"),
    ],
)
def test_a_mistake_is_an_error_of_the_driver_in_a_sentence(ray_of_three: Any, tmp_path: Path, call: str, words: str) -> None:
    program = f"import lockstep.ray\ntry:\n    {call}\nexcept Exception as error:\n    print('the driver has', error)\n"
    said = run(ray_of_three, tmp_path, program).stdout
    assert re.search(f"the driver has .*{words}", said, re.DOTALL), said


@pytest.mark.parametrize(("strategy", "num_nodes"), [("STRICT_PACK", 1), ("STRICT_SPREAD", 2), ("SPREAD", 2)])
def test_workers_are_on_the_nodes_that_a_strategy_of_placement_groups_says(
    ray_of_three: Any, tmp_path: Path, strategy: str, num_nodes: int
) -> None:
    ended = run(
        ray_of_three,
        tmp_path,
        f"""
        import lockstep.ray

        def train():
            import os, lockstep
            with lockstep.connect():
                return os.environ["RAY_RAYLET_PID"]

        found = lockstep.ray.up(train, num_workers=2, strategy="{strategy}")
        print("nodes", len(set(found)))
        """,
    )
    assert ended.returncode == 0 and f"nodes {num_nodes}" in ended.stdout, ended.stdout
    assert_nothing_is_left()


def test_a_driver_that_is_interrupted_saves_a_checkpoint_and_one_that_is_killed_leaves_nothing(ray_of_three: Any, tmp_path: Path) -> None:
    (tmp_path / "driver.py").write_text(
        textwrap.dedent(
            f"""
            import lockstep.ray

            def train():
                import lockstep, numpy as np
                with lockstep.connect() as session:
                    session.create_or_join({{"w": np.zeros(4)}}, optimizer=lockstep.sgd(0.5))
                    while not session.is_finished:
                        session.step({{"w": np.ones(4)}})
                        if session.global_step == 20:
                            print("underway", flush=True)

            lockstep.ray.up(train, num_workers=2, flags="--checkpoint-dir {tmp_path / "kept"}")
            """
        )
    )
    for number in (signal.SIGINT, signal.SIGKILL):
        out = tmp_path / f"out-{number}"
        with out.open("w") as sink:
            environment = {**os.environ, "RAY_ADDRESS": ray_of_three.address, "PYTHONUNBUFFERED": "1"}
            driver = subprocess.Popen([sys.executable, "driver.py"], cwd=tmp_path, env=environment, stdout=sink, stderr=sink)
        wait_until(lambda out=out: "training continues" in out.read_text() or "underway" in out.read_text(), what="it trains", timeout_s=60)  # type: ignore[misc]
        driver.send_signal(number)
        driver.wait(60)
        assert_nothing_is_left()
        if number == signal.SIGINT:
            assert list((tmp_path / "kept").rglob("step-*")) or "saved" in out.read_text(), out.read_text()


def test_the_workers_of_a_trainer_of_ray_train_are_those_of_a_cluster_which_ends_with_them(ray_of_three: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Ray Train is not installed: `make test-engines ENGINE=ray` has it")
    ended = run(
        ray_of_three,
        tmp_path,
        f"""
        import lockstep.ray_train, ray.train
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

        def train():
            import lockstep, numpy as np
            with lockstep.connect() as session:
                session.create_or_join({{"w": np.zeros(4)}}, optimizer=lockstep.sgd(0.5))
                while not session.is_finished:
                    session.step({{"w": np.ones(4)}})
                print("value", session.read()["w"][0], "of", session.num_workers, flush=True)

        def fit(flags):
            scaling = ray.train.ScalingConfig(num_workers=3, placement_strategy="SPREAD")
            storage = ray.train.RunConfig(storage_path={str(tmp_path)!r})
            config = lockstep.ray_train.LockstepConfig(flags)
            return DataParallelTrainer(train, backend_config=config, scaling_config=scaling, run_config=storage).fit()

        fit("--ps 2 --max-steps 20")
        try:
            fit("--pss 2")
        except Exception as error:
            print("the driver has", error)
        """,
    )
    assert ended.stdout.count("value -10.0 of 3") >= 3, ended.stdout
    assert "the driver has" in ended.stdout and "ended with exit code 2; its words are above" in ended.stdout, ended.stdout
    assert "no such argument: --pss" in ended.stdout, ended.stdout
    assert_nothing_is_left()
