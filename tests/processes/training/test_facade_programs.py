"""A program in the style of tf.compat.v1.train as processes: the example trains."""

from pathlib import Path

from tests.support.processes.commands import run_up
from tests.support.repository import ROOT


def test_example_trains_with_two_workers(tmp_path: Path) -> None:
    example = (ROOT / "examples" / "sync_replicas.py").read_text(encoding="utf-8")
    status, out = run_up("--ps", "1", "--workers", "2", worker=example, run_dir=tmp_path / "run")
    assert status == 0, out
    for worker in range(2):
        assert f"[worker {worker}] worker {worker}: weights [ 1.99" in out, out
    assert "training is finished at step 200: the chief worker (0) has ended its session" in out
