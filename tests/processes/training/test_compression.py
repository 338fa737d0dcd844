"""Training with encoded gradients: real processes over gRPC, and the benchmark's report of it."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main as benchmarks
from benchmarks.suites.wire.compression import FORMATS, in_words
from benchmarks.suites.wire.training import wire_bytes
from tests.support.processes.processes import run
from worker_client.model.wire_format import wire_format

MIB = 1 << 20


def test_the_demo_learns_the_digits_with_a_twentieth_of_each_gradient(tmp_path: Path) -> None:
    shape = ["--ps", "1", "--workers", "2", "--backup-workers", "0", "--max-steps", "300", "--pace", "0"]
    done = run("-m", "lockstep", "demo", *shape, "--wire", "top_k:0.05", "--run-dir", tmp_path)
    # The demo itself wants 0.95.
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"finished at step 300: test accuracy (0\.\d+)", done.stdout)
    assert found is not None and float(found[1]) >= 0.95


def test_a_worker_with_a_format_that_means_nothing_does_not_join() -> None:
    environment = {"LOCKSTEP_CHIEF": "unix:/nowhere", "LOCKSTEP_WIRE": "bf16"}
    done = run("-c", "import worker_client; worker_client.connect()", environment=environment)
    assert done.returncode and "wire: got 'bf16'" in done.stderr


def test_only_bfloat16_loads_ml_dtypes() -> None:
    program = "import sys, worker_client; worker_client.WireFormat(gradients='int8'); assert 'ml_dtypes' not in sys.modules"
    assert run("-c", program).returncode == 0


@pytest.mark.parametrize(
    ("wire", "up", "down"),
    [
        ("float32", 1.0, 1.0),
        ("bfloat16", 0.5, 0.5),
        ("int8", 260 / 1024, 1.0),
        ("int4", 68 / 512, 1.0),
        ("top_k:0.01", (4 + 2 * 41) / 16384, 1.0),
    ],
)
def test_a_format_saves_the_bytes_that_it_promises(wire: str, up: float, down: float) -> None:
    found = wire_bytes(wire_format(wire), total_bytes=4 * MIB, num_steps=2)
    assert found.up == pytest.approx(up * 4 * MIB, rel=0.02)
    assert found.down == pytest.approx(down * 4 * MIB, rel=0.02)


def test_the_benchmark_prints_what_it_measured(capsys: pytest.CaptureFixture[str]) -> None:
    wires = ["--wire", "float32", "--wire", "top_k:0.5+no_feedback"]
    arguments = ["--what", "bytes", "accuracy", "--sizes", "65536", "--train-steps", "3", "--seeds", "1"]
    assert benchmarks(["run", "compression", *wires, *arguments]) == 0
    out = capsys.readouterr().out
    assert "| float32 | 64" in out and "| top_k:0.5+no_feedback |" in out
    assert {wire_format(wire).gradients for wire in FORMATS} >= {"bfloat16", "float16", "int8", "int4"}
    row = {"median_ms": 2.0, "ratio": 0.5, "cpu_ms": 3.0, "cpu_ratio": 0.75}
    assert "| bfloat16 | 2.0 | 0.50 | 3.0 | 0.75 |" in in_words({"time": {16 * MIB: {"bfloat16": row}}})
