"""`make test-compose`: docker-compose.yml on a real engine, to the end, with a parameter server killed on the way.

Builds the image, starts the file's cluster with four workers, kills ps1 once there is a checkpoint, brings it back, and waits until every
container has ended by itself with 0. Where no engine answers, says why and ends with 0.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PROJECT = "lockstep-test"
IMAGE = "lockstep-ps:local"
NUM_WORKERS = 4
MAX_STEPS = 1500
KILL_AT_STEP = 300
_TIMEOUT_S = 180.0


class ComposeFailed(Exception):
    """The cluster did not do what docker-compose.yml promises."""


def main() -> int:
    """Returns 0 if the cluster trained to its end, or there is no engine to run it."""
    if why := missing():
        print(f"test-compose: not run: {why}")
        return 0
    started = time.monotonic()
    # A machine whose containers have no way out during a build needs flags such as --network host.
    run("docker", "build", *shlex.split(os.environ.get("DOCKER_BUILD_FLAGS", "")), "--tag", IMAGE, str(ROOT), timeout_s=1200)
    print(f"image {IMAGE} built in {time.monotonic() - started:.0f} s", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        compose = Compose(Path(directory))
        try:
            train(compose)
        except BaseException:
            print(compose("logs", "--no-color"), file=sys.stderr)
            raise
        finally:
            compose("down", "--volumes", "--timeout", "5")
    return 0


def missing() -> str:
    """Returns why there is nothing to run on; empty if there is."""
    if shutil.which("docker") is None:
        return "there is no `docker` here"
    found = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=60)
    if found.returncode:
        return f"no engine answers: {(found.stderr.strip().splitlines() or ['`docker info` fails'])[-1]}"
    if not compose_command():
        return "an engine answers, but there is neither `docker compose` nor `docker-compose`"
    return ""


def compose_command() -> list[str]:
    """Returns how Compose is called here; empty: it is not."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=60).returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else []


class Compose:
    """The file's cluster, as a project of its own, with more steps than the file asks for: there must be time to lose a server."""

    def __init__(self, directory: Path) -> None:
        command = compose_command()
        file = directory / "docker-compose.yml"
        lines = (ROOT / "docker-compose.yml").read_text().splitlines(keepends=True)
        # Compose 1 knows no name in the file, and the project has one of its own.
        file.write_text("".join(line for line in lines if not line.startswith("name:")))
        more = directory / "more.yml"
        environment = {"LOCKSTEP_MAX_STEPS": str(MAX_STEPS)}
        more.write_text(json.dumps({"services": {"chief": {"environment": environment}}}))
        self._words = [*command, "--project-name", PROJECT, "--project-directory", str(ROOT), "--file", str(file), "--file", str(more)]

    def __call__(self, *words: str) -> str:
        """Runs a subcommand and returns what it printed."""
        return run(*self._words, *words)

    def container(self, service: str) -> str:
        """Returns the container of a service that has one."""
        return self("ps", "--quiet", service).split()[0]

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns the state of every container, by its name."""
        names = run("docker", "ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}").split()
        found: list[dict[str, Any]] = json.loads(run("docker", "inspect", *names))
        return {one["Name"].lstrip("/"): one["State"] for one in found}


def train(compose: Compose) -> None:
    """Runs the cluster to its end and prints what happened when. Raises ComposeFailed."""
    started = time.monotonic()

    def say(words: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {words}", flush=True)

    compose("up", "--detach", "--no-build", "--scale", f"worker={NUM_WORKERS}")
    chief, victim = compose.container("chief"), compose.container("ps1")
    say(f"all containers are up: {len(compose.states())}")
    before = wait_for(
        f"step {KILL_AT_STEP} and a checkpoint",
        lambda: status if (status := status_of(chief)) and status["global_step"] >= KILL_AT_STEP and status["checkpoint"]["tag"] else None,
    )
    say(f"step {before['global_step']}, checkpoint {before['checkpoint']['tag']}: killing ps1")
    run("docker", "kill", victim)
    wait_for("the end of ps1", lambda: not json.loads(run("docker", "inspect", victim))[0]["State"]["Running"] or None)
    # Docker restarts a process that dies by itself, but not a container that was killed by command.
    run("docker", "start", victim)
    say("ps1 is started again")
    after = wait_for("the rollback", lambda: status if (status := status_of(chief)) and status["num_rollbacks"] else None)
    say(f"rolled back: {after['last_rollback']}")
    wait_for("the end", lambda: all(not state["Running"] for state in compose.states().values()) or None)
    say("all containers have ended")
    wrong = {name: state["ExitCode"] for name, state in compose.states().items() if state["ExitCode"]}
    if wrong:
        raise ComposeFailed(f"these ended with a failure: {wrong}")
    last = [line for line in compose("logs", "--no-color", "worker").splitlines() if "finished at step" in line]
    print("\n".join(last))
    if len(last) != NUM_WORKERS or not all(f"step {MAX_STEPS}:" in line for line in last):
        raise ComposeFailed(f"want {NUM_WORKERS} workers that finish at step {MAX_STEPS}")


def status_of(chief: str) -> dict[str, Any] | None:
    """Returns the chief's status; None if it cannot say."""
    found = subprocess.run(["docker", "exec", chief, "lockstep", "status", "--json"], capture_output=True, text=True, timeout=60)
    status: dict[str, Any] | None = json.loads(found.stdout) if found.returncode == 0 else None
    return status


def wait_for(what: str, look: Callable[[], Any]) -> Any:
    """Looks again and again until there is something to see, and returns it. Raises ComposeFailed."""
    deadline = time.monotonic() + _TIMEOUT_S
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise ComposeFailed(f"{what}: not within {_TIMEOUT_S:g} s")
        threading.Event().wait(0.2)
    return found


def run(*words: str, timeout_s: float = 300.0) -> str:
    """Runs a command and returns its output. Raises ComposeFailed with its words."""
    result = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s)
    if result.returncode:
        raise ComposeFailed(f"{shlex.join(words)}: exit code {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


if __name__ == "__main__":
    sys.exit(main())
