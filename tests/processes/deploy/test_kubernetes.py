"""deploy/kubernetes, which `lockstep k8s render` writes: its commands as local processes. Each role has its own secrets and no more."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep import certs
from ps_protocol.process.options import TABLE
from tests.processes.deploy.test_compose import ports_of
from tests.support.processes.warm import WarmPopen
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

TEXT = (ROOT / "deploy" / "kubernetes" / "lockstep.yaml").read_text()
DOCUMENTS: list[dict[str, Any]] = [*yaml.safe_load_all(TEXT)]
PODS = {
    document["metadata"]["name"]: document["spec"]["template"]["spec"]
    for document in DOCUMENTS
    if document["kind"] in ("StatefulSet", "Job", "Deployment")
}
# The commands in the manifest's head.
HEAD = TEXT.partition("apiVersion")[0]
SECRETS = {
    name: dict(part.partition("=")[::2] if "=" in part else (part, part) for part in re.findall(r"--from-file=(\S+)", files))
    for name, files in re.findall(r"create secret generic (\S+)((?: +--from-file=\S+)+)", HEAD)
}
CALLED = ("LOCKSTEP_PS", "LOCKSTEP_CHIEF", "LOCKSTEP_ADVERTISE")
HOSTS = re.findall(r"--host (\S+)", HEAD)
CLUSTER = re.findall(r"certs create \S+ --cluster (\S+)", HEAD)


def container(pod: str) -> dict[str, Any]:
    (found,) = PODS[pod]["containers"]
    return dict(found)


def environment(pod: str) -> dict[str, str]:
    """Without the index of a worker, which Kubernetes gives."""
    return {variable["name"]: variable["value"] for variable in container(pod)["env"] if "value" in variable}


def test_manifests_name_what_the_roles_know() -> None:
    assert set(re.findall(r"LOCKSTEP_[A-Z_]+", TEXT)) <= {option.variable for option in TABLE}
    assert "ALLOW_INSECURE" not in TEXT
    assert {*CLUSTER} == {environment(pod)["LOCKSTEP_CLUSTER"] for pod in PODS} == {"digits"}
    assert {"NetworkPolicy", "PersistentVolumeClaim"} <= {document["kind"] for document in DOCUMENTS}


@pytest.mark.parametrize("pod", sorted(PODS))
def test_each_role_has_the_secrets_of_its_own_and_reads_no_others(pod: str) -> None:
    secrets = [volume["secret"] for volume in PODS[pod]["volumes"] if "secret" in volume]
    assert [secret["secretName"] for secret in secrets] == [pod]
    assert secrets[0]["defaultMode"] == 0o440
    wanted = {value.removeprefix("/secrets/") for value in environment(pod).values() if value.startswith("/secrets/")}
    assert wanted == set(SECRETS[pod])


def test_worker_is_given_no_key_and_no_token_but_its_own() -> None:
    assert SECRETS["digits-worker"] == {"ca.pem": "ca.pem", "token": "worker.token"}
    assert "ca.key" not in {file for secret in SECRETS.values() for file in secret.values()}


@pytest.mark.parametrize("pod", sorted(PODS))
def test_a_pod_has_no_privileges_that_it_does_not_need(pod: str) -> None:
    spec, own = PODS[pod], container(pod)["securityContext"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsUser"]
    assert own == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    mounted = {mount["name"] for mount in container(pod)["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_certificates_are_good_for_every_address_that_is_called() -> None:
    called = {address.rpartition(":")[0] for pod in PODS for name in CALLED for address in addresses(pod, name)}
    assert called == set(HOSTS)


def addresses(pod: str, name: str) -> list[str]:
    return [address for address in environment(pod).get(name, "").split(",") if address]


class LocalPods:
    """Does with processes what Kubernetes does with pods, as far as commands, environments, secrets and names go."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        certs.create(directory / "certs", cluster=CLUSTER[0], hosts=HOSTS)
        self.ports = ports_of([address for name in ("LOCKSTEP_PS", "LOCKSTEP_CHIEF") for address in addresses("digits-chief", name)])
        for secret, files in SECRETS.items():
            (directory / secret).mkdir()
            for name, source in files.items():
                (directory / secret / name).write_bytes((directory / "certs" / source).read_bytes())
        (directory / "checkpoints").mkdir()

    def here(self, text: str, *, pod: str, port: int) -> str:
        text = text.replace("/secrets/", f"{self.directory / pod}/").replace("/checkpoints", str(self.directory / "checkpoints"))
        for address, other in self.ports.items():
            text = text.replace(address, f"localhost:{other}")
        text = re.sub(r"(0\.0\.0\.0|127\.0\.0\.1):5000", rf"\1:{port}", text)
        return re.sub(r"(0\.0\.0\.0|127\.0\.0\.1):(8080|9090)", r"\1:0", text)  # page and metrics: a pod has all ports to itself

    def run(self, pod: str, words: list[str], *, port: int, hostname: str, **told: str) -> "subprocess.Popen[str]":
        variables = {name: self.here(value, pod=pod, port=port) for name, value in environment(pod).items()}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where `lockstep` is, for a shell
        program = {"lockstep": [sys.executable, "-m", "lockstep"], "python": [sys.executable], "sh": ["sh"]}[words[0]]
        return WarmPopen(
            [*program, *(self.here(word, pod=pod, port=port) for word in words[1:])],
            env={**os.environ, **variables, "PATH": path, "HOSTNAME": hostname, **told},
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def ask(self, pod: str, words: list[str], *, port: int) -> tuple[int, str]:
        process = self.run(pod, words, port=port, hostname=pod)
        text, _ = process.communicate(timeout=20)
        return process.returncode, text


@contextlib.contextmanager
def running(process: "subprocess.Popen[str]") -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(150)
def test_commands_of_the_manifests_train_and_a_worker_that_comes_back_takes_its_place(tmp_path: Path) -> None:
    pods = LocalPods(tmp_path)
    with contextlib.ExitStack() as stack:

        def start(pod: str, hostname: str, port: int, *more: str, **told: str) -> "subprocess.Popen[str]":
            process = pods.run(pod, [*container(pod)["command"], *more], port=port, hostname=hostname, **told)
            stack.enter_context(running(process))
            return process

        def start_worker(index: int) -> "subprocess.Popen[str]":
            return start("digits-worker", "worker", 0, "--pace", "0.01", LOCKSTEP_WORKER_INDEX=str(index))

        for address in addresses("digits-chief", "LOCKSTEP_PS"):
            start("digits-ps", address.partition(".")[0], pods.ports[address])
        (address,) = addresses("digits-chief", "LOCKSTEP_CHIEF")
        port = pods.ports[address]
        chief = start("digits-chief", "digits-chief-0", port, LOCKSTEP_MAX_STEPS="150")
        probe = container("digits-chief")["readinessProbe"]["exec"]["command"]
        wait_until(lambda: pods.ask("digits-chief", probe, port=port)[0] == 0, timeout_s=30, what="the chief is ready")
        _, text = pods.ask("digits-chief", shlex.split("lockstep why"), port=port)
        assert "no worker" in text or "waiting" in text.lower(), text
        workers = [start_worker(index) for index in range(3)]
        assert workers[1].stdout is not None and "learns from" in workers[1].stdout.readline()
        workers[1].kill()
        workers[1] = start_worker(1)
        for worker in workers:
            text, _ = worker.communicate(timeout=50)
            assert worker.returncode == 0 and "finished at step 150" in text
        assert chief.wait(timeout=20) == 0
