"""Clusters to replay recorded cases on: parameter servers and a chief on loopback, as processes or in this one. Asserts nothing."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from chief.config import parse_config
from tests.support.chief.running_chief import RunningChief, parameter_server
from tests.support.processes.processes import Process, announced, start_role

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Addresses of a running cluster."""

    chief: str
    ps: tuple[str, ...]


# With so many parameter servers and these flags of the chief, until the block ends.
Start = Callable[[int, Sequence[str]], AbstractContextManager[Cluster]]


def _sized(chief_flags: Sequence[str]) -> Sequence[str]:
    """Accumulators need no workers; a chief must be told of some."""
    return chief_flags or ("--workers", "1")


@contextmanager
def cluster_in_this_process(num_ps: int, chief_flags: Sequence[str]) -> Iterator[Cluster]:
    """Parameter servers and a chief on threads."""
    with ExitStack() as stack:
        addresses = tuple(stack.enter_context(parameter_server(index)).address for index in range(num_ps))
        coordination = parse_config(["--ps", ",".join(addresses), *_sized(chief_flags)], environment={}).coordination
        options = {field.name: getattr(coordination, field.name) for field in fields(coordination)}
        yield Cluster(stack.enter_context(RunningChief(*addresses, **options)).address, addresses)


@contextmanager
def cluster_of_processes(num_ps: int, chief_flags: Sequence[str]) -> Iterator[Cluster]:
    """Parameter servers and a chief, each a process of its own."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replay-")))
        servers = [_start(stack, "ps_server", "--index", str(index), announce=directory / f"ps{index}") for index in range(num_ps)]
        # All at once: most of the time is Python's own start.
        addresses = [_address(process, path) for process, path in servers]
        chief, path = _start(stack, "chief", "--ps", ",".join(addresses), *_sized(chief_flags), announce=directory / "chief")
        yield Cluster(_address(chief, path), tuple(addresses))


def _start(stack: ExitStack, module: str, *words: str, announce: Path) -> tuple[Process, Path]:
    log = stack.enter_context(announce.with_suffix(".log").open("wb"))
    return start_role(stack, module, "--address", "127.0.0.1:0", *words, announce=announce, log=log), announce


def _address(process: Process, path: Path) -> str:
    try:
        return announced(process, path, timeout_s=START_TIMEOUT_S)
    except AssertionError:
        said = path.with_suffix(".log").read_text(encoding="utf-8")
        raise RuntimeError(f"{path.name} did not start: {said[-2000:]}") from None
