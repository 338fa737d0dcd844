"""A cluster of real processes to replay recorded cases on: parameter servers and a chief on loopback. Asserts nothing."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import Process, announced, start_role

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Addresses of a running cluster."""

    chief: str
    ps: tuple[str, ...]


@contextmanager
def running_cluster(num_ps: int, *, chief_flags: Sequence[str] = ()) -> Iterator[Cluster]:
    """Parameter servers and a chief, until the block ends."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replay-")))
        servers = [_start(stack, "ps_server", "--index", str(index), announce=directory / f"ps{index}") for index in range(num_ps)]
        # All at once: most of the time is Python's own start.
        addresses = [_address(process, path) for process, path in servers]
        chief, path = _start(stack, "chief", "--ps", ",".join(addresses), *chief_flags, announce=directory / "chief")
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
