"""Whole clusters of real processes with authentication: tokens of the launcher, TLS with certificates, and every command against them."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import worker_client
from ps_protocol.errors import PermissionDenied, Unauthenticated
from ps_protocol.rpc.chief import GrpcChief
from ps_protocol.security.tokens import parse_tokens
from tests.support.cluster.processes import Plan, ProcessCluster
from tests.support.network.certificates import Files, make
from tests.support.network.servers import free_ports
from tests.support.processes.commands import TRAIN, lockstep_here, read_until, up
from tests.support.processes.warm import run_warm


def proofs(files: Files, role: str = "worker") -> dict[str, Any]:
    proof = {"tls_ca": "ca.pem", "tls_cert": f"{role}.pem", "tls_key": f"{role}.key", "token_file": f"{role}.token"}
    return {name: files.directory / file for name, file in proof.items()}


def flags_of(files: Files, role: str) -> list[str]:
    return [word for name, path in proofs(files, role).items() for word in (f"--{name.replace('_', '-')}", str(path))]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make(tmp_path_factory.mktemp("secured") / "certs", cluster="lockstep")


@pytest.fixture(scope="module")
def chief(files: Files) -> Iterator[str]:
    """The address of the chief of two parameter servers over TCP that want TLS, a token and a certificate."""
    environment = files.variables(tls=True, verify_clients=True)
    plan = Plan(num_ps=2, num_workers=1, port=free_ports(3), transport="grpc", environment=environment)
    with contextlib.ExitStack() as stack:
        address = ProcessCluster(plan, stack, directory=files.directory.parent).start().chief_address
        # The processes stay as long as somebody looks on.
        security = worker_client.Security(**proofs(files, "observer"))
        stack.enter_context(worker_client.observe(address, timeout_s=20, security=security))
        yield address


def test_training_continues_under_tls_tokens_and_certificates(chief: str, files: Files) -> None:
    with worker_client.connect(chief, timeout_s=20, security=worker_client.Security(**proofs(files))) as session:
        halves = worker_client.fixed_size_partitioner(2)
        values = {"w": np.zeros((64, 8), np.float32), "rows": worker_client.EmbeddingTable((30, 2), partitioner=halves)}
        session.create_or_join(values, optimizer=worker_client.sgd(1.0))
        for _ in range(5):
            session.step({"w": np.ones((64, 8), np.float32), "rows": np.ones((30, 2), np.float32)}, timeout_s=20)
        assert (session.read()["w"] == -5.0).all()
        with worker_client.observe(chief, timeout_s=20, security=worker_client.Security(**proofs(files, "observer"))) as observer:
            assert (observer.read()["w"] == -5.0).all()
            assert (observer.read_rows("rows", [3]) == -5.0).all()
            with pytest.raises(PermissionDenied, match="ChangeSettings needs role admin or worker, token has role observer"):
                observer.set_policy(worker_client.async_policy())


def test_status_and_health_reach_a_secured_cluster(chief: str, files: Files) -> None:
    for words in (["status", "--chief", chief, *flags_of(files, "admin")], ["health", "--address", chief]):
        flags = flags_of(files, "admin")[:-2] if words[0] == "health" else []
        result = lockstep_here(*words, *flags)
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "server speaks TLS; pass tls=True or --tls-ca"),
        (["--tls-ca"], "pass --tls-cert and --tls-key"),
        (["--tls-ca", "--tls-cert", "--tls-key"], "missing token. Set LOCKSTEP_TOKEN_FILE or pass token="),
    ],
)
def test_command_without_its_proofs_says_what_to_pass(chief: str, files: Files, flags: list[str], words: str) -> None:
    own = flags_of(files, "admin")
    given = [word for flag in flags for word in own[own.index(flag) : own.index(flag) + 2]]
    begin = time.monotonic()
    result = lockstep_here("status", "--chief", chief, *given)
    assert result.returncode != 0
    assert words in result.stderr
    assert time.monotonic() - begin < 20


def test_worker_without_its_proofs_is_refused_at_once(chief: str, files: Files) -> None:
    proof = {**proofs(files), "token_file": None}
    with pytest.raises(Unauthenticated, match=r"^missing token"):
        worker_client.connect(chief, timeout_s=20, security=worker_client.Security(**proof))
    with pytest.raises(Unauthenticated, match=r"^invalid token$"):
        worker_client.connect(chief, timeout_s=20, security=worker_client.Security(token="0" * 64, **proof))


@pytest.mark.parametrize("network", [[], ["--tcp"]], ids=["unix", "tcp"])
def test_cluster_of_the_launcher_has_tokens_without_any_option(tmp_path: Path, network: list[str]) -> None:
    # The shell speaks of another cluster; that must not matter.
    shell = {"LOCKSTEP_TLS_CA": "/nowhere", "LOCKSTEP_TOKEN": "of another cluster"}
    with up("--workers", "1", *network, worker=TRAIN, run_dir=tmp_path / "run", **shell) as process:
        lines = read_until(process, "step 3")
        words = next(line for line in lines if "lockstep status --chief" in line).partition("lockstep status ")[2].split()
        address = words[words.index("--chief") + 1]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")}
        result = run_warm([sys.executable, "-m", "lockstep", "status", *words], environment=environment, timeout_s=30.0)
        assert result.returncode == 0, result.stderr
        assert_secrets_are_nowhere(psutil.Process(process.pid), logs=tmp_path / "run" / "logs")
        if network:
            with contextlib.closing(GrpcChief(address)) as client, pytest.raises(Unauthenticated, match=r"^missing token"):
                client.handshake()
        process.terminate()
        process.communicate(timeout=30)


def assert_secrets_are_nowhere(launcher: psutil.Process, *, logs: Path) -> None:
    """Neither on a command line nor in a log: where others look, and what people send around."""
    family = launcher.children(recursive=True)
    (path,) = {one.environ()["LOCKSTEP_TOKEN_FILE"] for one in family if "LOCKSTEP_TOKEN_FILE" in one.environ()}
    tokens = parse_tokens(Path(path).read_text(), name="tokens")
    assert Path(path).stat().st_mode & 0o77 == 0 and Path(path).parent.stat().st_mode & 0o77 == 0
    said = [" ".join(one.cmdline()) for one in (launcher, *family)] + [log.read_text() for log in logs.iterdir()]
    assert len(said) > 5
    assert not [token for token in tokens for text in said if token in text]
