"""Which GPUs of its machine a worker gets. Knows variables and numbers; no process."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.launcher.supervisor import LaunchFailed
from ps_protocol.process.exit_codes import ExitCode
from ps_protocol.process.options import WORKER_GPUS

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")


def gpus_here(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the GPUs of this machine that this process may use, as CUDA names them."""
    if (visible := environment.get(VISIBLE)) is not None:
        return tuple(word.strip() for word in visible.split(",") if word.strip())
    return tuple(map(str, range(len([*_DRIVER.iterdir()])))) if _DRIVER.is_dir() else ()


class Gpus:
    """Gives each worker `count` GPUs that no other worker of its machine has. `here`: those of this machine; None: it is not known."""

    def __init__(self, count: int, *, here: Sequence[str] | None) -> None:
        self._count, self._here = count, here
        self._places: dict[int, tuple[str, int]] = {}

    def of(self, worker: int, *, host: str) -> dict[str, str]:
        """Returns a worker's variable. It keeps its GPUs while it stays on a host. Raises LaunchFailed if there are too few."""
        if not self._count:
            return {}
        if self._places.get(worker, (None, 0))[0] != host:
            taken = {place for other, (where, place) in self._places.items() if where == host and other != worker}
            self._places[worker] = host, next(place for place in itertools.count() if place not in taken)
        numbers = range(first := self._places[worker][1] * self._count, first + self._count)
        if self._here is None:
            return {VISIBLE: ",".join(map(str, numbers))}
        if numbers.stop > len(self._here):
            raise LaunchFailed(
                f"{WORKER_GPUS.flag} {self._count}: worker {worker} needs {numbers.stop} GPUs here with those before it, and there are"
                f" {len(self._here)} that this command may use",
                exit_code=ExitCode.USAGE,
            )
        return {VISIBLE: ",".join(self._here[number] for number in numbers)}
