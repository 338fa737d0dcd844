"""docker-compose.yml and Dockerfile: their settings, and a whole run of the file's own commands as local processes."""

import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ps_protocol.process.options import TABLE
from ps_protocol.roles.request import CallerRole
from ps_protocol.security.tokens import parse_tokens
from tests.support.network.servers import free_ports
from tests.support.processes.warm import WarmPopen, run_warm
from tests.support.repository import ROOT
from tests.support.waiting import wait_until

PORT = 5000
# As many as the digits need. The file has more, so that there is something to watch.
FEWER_STEPS = {"LOCKSTEP_MAX_STEPS": "250"}

Service = Mapping[str, Any]


def services() -> dict[str, Service]:
    found: dict[str, Service] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return found


def mounts(service: Service) -> dict[str, str]:
    """Which volume is where in a service's container."""
    return {path: name for name, path, *_ in (volume.split(":") for volume in service["volumes"])}


def ports_of(names: list[str]) -> dict[str, int]:
    return dict(zip(names, itertools.count(free_ports(len(names))), strict=False))


class LocalCompose:
    """Does with processes what compose does with containers: names become loopback ports, and dependencies wait for health checks."""

    def __init__(self, log_dir: Path) -> None:
        self.services = services()
        self.ports = ports_of(list(self.services))
        self.log_dir = log_dir
        self.stack = ExitStack()
        self.running: dict[str, list[subprocess.Popen[bytes]]] = {}

    def here(self, text: str, *, service: str) -> str:
        """What is said of the service's container, addresses and paths, as the same on this machine."""
        for path, volume in sorted(mounts(self.services[service]).items(), reverse=True):
            text = text.replace(path, str(self.volume(volume)))
        text = text.replace("/tmp/made", str(self.log_dir / "made"))
        for name, port in {**self.ports, "0.0.0.0": self.ports[service], "127.0.0.1": self.ports[service]}.items():
            text = re.sub(rf"(?<![\w.]){re.escape(name)}:{PORT}\b", f"127.0.0.1:{port}", text)
        return text

    def volume(self, name: str) -> Path:
        path = self.log_dir / "volumes" / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def command(self, words: list[str], *, service: str) -> list[str]:
        program = {"lockstep": [sys.executable, "-m", "lockstep"], "python": [sys.executable], "sh": ["sh"]}[words[0]]
        return [*program, *(self.here(word, service=service) for word in words[1:])]

    def environment(self, name: str) -> dict[str, str]:
        own = {key: self.here(str(value), service=name) for key, value in self.services[name]["environment"].items()}
        own |= {key: value for key, value in FEWER_STEPS.items() if key in own}
        # Where `lockstep` is, for scripts.
        return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **own}

    def is_healthy(self, name: str) -> bool:
        kind, *words = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        command = self.command(words, service=name)
        return run_warm(command, environment=self.environment(name), timeout_s=10).returncode == 0

    def has_ended_well(self, name: str) -> bool:
        return [process.poll() for process in self.running[name]] == [0]

    def start(self, name: str, *, replicas: int) -> None:
        for dependency, condition in self.services[name].get("depends_on", {}).items():
            is_met = {"service_healthy": self.is_healthy, "service_completed_successfully": self.has_ended_well}[condition["condition"]]
            wait_until(functools.partial(is_met, dependency), timeout_s=20, what=f"{dependency} is ready")
        for index in range(replicas):
            log = self.stack.enter_context((self.log_dir / f"{name}-{index}.log").open("wb"))
            command = self.command(self.services[name]["command"], service=name)
            process = WarmPopen(command, env=self.environment(name), stdout=log, stderr=subprocess.STDOUT)
            self.stack.callback(process.wait)
            self.stack.callback(process.kill)
            self.running.setdefault(name, []).append(process)

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.log_dir.glob("*.log")))


@contextmanager
def composed(log_dir: Path, **scale: int) -> Iterator[LocalCompose]:
    compose = LocalCompose(log_dir)
    with compose.stack:
        for name in ("certs", "ps0", "ps1", "chief", "worker"):
            replicas = compose.services[name].get("deploy", {}).get("replicas", 1)
            compose.start(name, replicas=scale.get(name, replicas))
        yield compose


def test_the_files_commands_train_to_the_end_with_one_worker_more(tmp_path: Path) -> None:
    num_workers = services()["worker"]["deploy"]["replicas"] + 1
    with composed(tmp_path, worker=num_workers) as compose:
        assert len(compose.running["worker"]) == num_workers
        processes = [process for group in compose.running.values() for process in group]
        wait_until(lambda: all(process.poll() is not None for process in processes), timeout_s=45, what="every process ends by itself")
        assert [process.returncode for process in processes] == [0] * len(processes), compose.logs()
    for index in range(num_workers):
        match = re.search(r"finished at step 250: test accuracy (0\.\d+)", (tmp_path / f"worker-{index}.log").read_text())
        assert match is not None and float(match[1]) >= 0.95, compose.logs()


def test_each_container_has_the_secrets_of_its_role_and_no_other(tmp_path: Path) -> None:
    """A second start makes nothing anew: what runs has the old ones."""
    compose = LocalCompose(tmp_path)
    stamps = []
    with compose.stack:
        for _ in range(2):
            compose.running.clear()
            compose.start("certs", replicas=1)
            assert compose.running["certs"][0].wait(30) == 0, compose.logs()
            stamps.append({path: path.stat().st_mtime_ns for path in tmp_path.glob("volumes/*/*")})
    assert stamps[0] == stamps[1]
    found = {path.name: {file.name for file in path.iterdir()} for path in (tmp_path / "volumes").iterdir()}
    of_a_server = {"ca.pem", "cert.pem", "cert.key", "tokens"}
    assert found == {"ps-secrets": of_a_server, "chief-secrets": of_a_server, "worker-secrets": {"ca.pem", "token"}}
    grants = parse_tokens((tmp_path / "volumes/worker-secrets/token").read_text(), name="token").values()
    assert [grant.role for grant in grants] == [CallerRole.WORKER]
    for path in stamps[0]:
        assert path.suffix == ".pem" or path.stat().st_mode & 0o77 == 0, path


def test_a_role_that_is_not_there_yet_is_not_healthy(tmp_path: Path) -> None:
    compose = LocalCompose(tmp_path)
    assert not compose.is_healthy("ps0")


def test_the_services_are_those_of_the_readme() -> None:
    found = services()
    assert set(found) == {"certs", "chief", "ps0", "ps1", "worker"}
    assert {service["image"] for service in found.values()} == {"lockstep-ps:local"}
    assert [name for name, service in found.items() if "build" in service] == ["certs"]
    assert found["worker"]["deploy"]["replicas"] == 3


def test_workers_can_be_scaled() -> None:
    found = services()
    assert "LOCKSTEP_WORKER_INDEX" not in found["worker"]["environment"]
    assert "container_name" not in found["worker"]
    assert "LOCKSTEP_NUM_WORKERS" not in found["chief"]["environment"]
    assert found["chief"]["environment"]["LOCKSTEP_REPLICAS_TO_AGGREGATE"] == "2"


def test_health_is_checked_every_two_seconds_and_waited_for() -> None:
    found = services()
    for name in ("chief", "ps0", "ps1"):
        assert found[name]["healthcheck"]["interval"] == "2s"
    assert found["chief"]["depends_on"] == {"ps0": {"condition": "service_healthy"}, "ps1": {"condition": "service_healthy"}}
    assert found["worker"]["depends_on"] == {"chief": {"condition": "service_healthy"}}


def test_everything_is_encrypted_and_no_port_is_published() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert "ALLOW_INSECURE" not in text
    whole = yaml.safe_load(text)
    for name in ("ps0", "ps1", "chief"):
        environment = whole["services"][name]["environment"]
        assert environment["LOCKSTEP_ADDRESS"] == "0.0.0.0:5000", "which needs a certificate and tokens"
        assert not {"LOCKSTEP_TOKEN", "LOCKSTEP_TLS"} & environment.keys()
    assert whole["networks"] == {"cluster": {"internal": True}}
    for service in whole["services"].values():
        assert service["networks"] == ["cluster"]
        assert not {"ports", "expose", "network_mode", "privileged", "secrets"} & service.keys()


def test_roles_that_are_lost_come_back_and_share_a_volume_for_checkpoints() -> None:
    whole = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    for name in ("ps0", "ps1", "chief"):
        service = whole["services"][name]
        assert service["restart"] == "on-failure"
        assert mounts(service)["/checkpoints"] == "checkpoints"
        assert service["environment"]["LOCKSTEP_CHECKPOINT_DIR"] == "/checkpoints"
    assert whole["services"]["worker"]["restart"] == "no"
    assert set(whole["volumes"]) == {name for service in services().values() for name in mounts(service).values()}


def test_every_variable_of_a_service_is_one_that_its_command_knows() -> None:
    known = {option.variable for option in TABLE}
    for service in services().values():
        for name in service["environment"]:
            assert name in known or not name.startswith("LOCKSTEP_"), name


def test_the_image_is_slim_and_runs_as_an_ordinary_user() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "FROM python:3.11-slim" in lines
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and users[-1] not in ("root", "0")
    assert not [line for line in lines if re.search(r"(?i)token|password|\.key|\.pem", line)]


def test_everything_that_the_image_copies_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY "):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, source


def test_compose_itself_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, timeout=20).returncode != 0:
        pytest.skip("`docker compose` does not answer on this machine, so it can't be asked about docker-compose.yml")
    for arguments in ([], ["--services"]):
        result = subprocess.run([docker, "compose", "config", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)
        assert result.returncode == 0, result.stderr
