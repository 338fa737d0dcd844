"""What a launcher asks of an engine, and which engines there are. Starts nothing."""

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from lockstep.launcher.hosts import Host
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.misspelling import known_names

# Each is a module of this package with a function `engine`.
ENGINES = ("slurm", "ray", "torchrun", "mpi")


class Engine(Protocol):
    """What `lockstep up` asks of an engine, in whose job it runs."""

    # The machines of the job. The first has the chief.
    hosts: tuple[Host, ...]
    # How many workers the user has asked the engine for; 0: it does not say.
    num_workers: int
    # False: the engine has started this command several times, and this one leaves the work to another.
    is_launcher: bool
    # True: it has started the programs itself, and the launcher's workers only stand for them.
    starts_workers: bool

    @property
    def again_words(self) -> str:
        """What `run_again` does, and what then follows."""

    def run_again(self) -> None:
        """Has the engine run the job again, which it is about to end; may not return."""


def engine_of(name: str, environment: Mapping[str, str]) -> Engine:
    """Returns an engine by its name, as this process finds it. Raises InvalidSpec where it is unknown, or this is no job of it."""
    if name not in ENGINES:
        raise InvalidSpec(f"--engine: got {name!r}, want {known_names(name, ENGINES)}")
    engine: Engine = import_module(f"lockstep.launcher.engines.{name}").engine(environment)
    return engine
