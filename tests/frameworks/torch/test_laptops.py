"""The lines of "Four laptops, one model" train as they are printed, also when a laptop goes and comes back."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make test-frameworks` has it")

from tests.support.processes.processes import announced, end
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

_LOOP = re.compile(r"## Talk once in many steps\n.*?```python\n(.*?)```", re.DOTALL)
_LINES = re.compile(r"## Four laptops, one model\n.*?```sh\n(.*?)```", re.DOTALL)


def _printed(page: str, pattern: re.Pattern[str]) -> str:
    found = pattern.search((ROOT / page).read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def _replaced(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.mark.timeout(180)
def test_the_printed_lines_train_one_model_and_a_laptop_that_went_comes_back(tmp_path: Path) -> None:
    loop = _replaced(
        _printed("docs/tutorials/torch.md", _LOOP),
        ("sync_every=20)", "sync_every=20, inner_state_dir='state', wire='int4')"),
        ("loop.outer.global_step < 5 and ", ""),
        ("    while", "    print('joined at', loop.outer.global_step, flush=True)\n    while"),
    )
    (tmp_path / "train.py").write_text(f"{loop}\nprint('ended at', loop.outer.global_step)\n", encoding="utf-8")
    # The names and ports of this machine, and seconds that a test has.
    text = _replaced(
        _printed("docs/how-to/running.md", _LINES),
        ("vm.example", "localhost"),
        ("0.0.0.0:5000", "127.0.0.1:0"),
        ("0.0.0.0:5001", "127.0.0.1:0"),
    )
    text = _replaced(text, ("--lease 30", "--lease 2"), ("--grace 60", "--grace 1"), (" && cd certs", ""), (" &\n", "\n"))
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    create, server, chief, laptop = map(shlex.split, lines)
    certs, environment = tmp_path / "certs", {**os.environ, "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:

        def start(words: list[str], cwd: Path, log: str) -> "subprocess.Popen[bytes]":
            output = stack.enter_context((tmp_path / log).open("wb"))
            variables = dict(word.split("=", 1) for word in words if word.startswith("LOCKSTEP_"))
            rest = [word for word in words if word not in {f"{name}={value}" for name, value in variables.items()}]
            command = [sys.executable, *(("-m", "lockstep") if rest[0] == "lockstep" else ()), *rest[1:]]
            process = subprocess.Popen(
                command, cwd=cwd, env=environment | variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
            stack.callback(end, process)
            return process

        def said(log: str) -> str:
            return (tmp_path / log).read_text(encoding="utf-8")

        assert start(create, tmp_path, "create.log").wait(30) == 0, said("create.log")
        process = start([*server, "--announce", str(tmp_path / "ps")], certs, "ps.log")
        port = announced(process, tmp_path / "ps").rpartition(":")[2]
        chief = [word.replace("localhost:5001", f"localhost:{port}") for word in chief]
        process = start([*chief, "--announce", str(tmp_path / "chief")], certs, "chief.log")
        port = announced(process, tmp_path / "chief").rpartition(":")[2]

        def start_laptop(index: int, log: str) -> "subprocess.Popen[bytes]":
            words = [word.replace("localhost:5000", f"localhost:{port}").replace("INDEX=0", f"INDEX={index}") for word in laptop]
            home = tmp_path / f"laptop-{index}"
            home.mkdir(exist_ok=True)
            words = [word.replace("=ca.pem", f"={certs}/ca.pem").replace("=worker.token", f"={certs}/worker.token") for word in words]
            return start([*words[:-1], str(tmp_path / words[-1])], home, log)

        laptops = [start_laptop(index, f"{index}.log") for index in range(4)]
        wait_until(lambda: (tmp_path / "laptop-3/state").exists(), timeout_s=60, what="the last laptop has contributed")
        laptops[3].send_signal(signal.SIGKILL)
        wait_until(lambda: "worker 3" in said("chief.log").rpartition("joined")[2], timeout_s=60, what="it is missed")
        laptops[3] = start_laptop(3, "3-again.log")
        wait_until(lambda: "joined at" in said("3-again.log"), timeout_s=60, what="it is back")
        access = ["--tls-ca", "ca.pem", "--token-file", "admin.token"]
        finish = start(["lockstep", "finish", "--chief", f"localhost:{port}", *access], certs, "finish.log")
        assert finish.wait(30) == 0, said("finish.log")
        for process, log in zip(laptops, ("0.log", "1.log", "2.log", "3-again.log"), strict=True):
            assert process.wait(60) == 0, said(log)
            assert re.search(r"ended at [1-9]", said(log)), said(log)
        assert re.search(r"joined at [1-9]", said("3-again.log")), "in the middle of training"
