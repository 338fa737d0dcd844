"""What a launcher is told by the engine in whose job it runs, and which engines there are. Starts nothing."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from lockstep.launcher.hosts import Host
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.misspelling import known_names
from ps_protocol.process.waiting import SilenceWatch

# Each is a module of this package with a function `engine`, and what it says of itself: a constant `KIND`.
ENGINES = ("slurm", "ray", "ray_train", "skypilot", "torchrun", "mpi")
# Variables that say in how many parts a job is, each with what makes one cluster of them. Here, since modules are slow to import.
_PARTS = {
    "SLURM_JOB_NUM_NODES": "--engine slurm has one on all nodes of the job",
    "SLURM_STEP_NUM_TASKS": "--engine slurm has one for all tasks of srun",
    "SKYPILOT_NUM_NODES": "--engine skypilot has one on all nodes of the task",
    "OMPI_COMM_WORLD_SIZE": "ranks of mpirun are one if it starts their program without lockstep up",
}
# These run no launcher: the command that writes what they start a cluster from, and the program that then starts it.
ELSEWHERE = {"kubernetes": ("lockstep k8s render", "kubectl"), "systemd": ("lockstep systemd", "systemctl")}


@light_dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """What is so of an engine on any machine. `program`: what must be in PATH; `module`: what this Python must have, an extra of Lockstep.

    `starts_workers`: see Engine. `check`: returns what is wrong with the program that is here, and what to do; None: nothing. It may take
    10 s.
    """

    program: str = ""
    module: str = ""
    starts_workers: bool = False
    check: Callable[[], tuple[str, str] | None] = lambda: None


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The job of an engine, as a process in it finds it. `hosts`: its machines, of which the first has the chief.

    `num_workers`, `worker_gpus`: how many workers, and GPUs of each, the user has asked the engine for; 0: it does not say. `is_launcher`:
    False where the engine has started this command several times, and this one leaves the work to another. `starts_workers`: it has started
    the programs itself, and the launcher's workers only stand for them. `run_again`: has it run the job again, which it is about to end,
    and may not return; `again_words`: what then follows. `place`: has it find room for so many workers together, and returns the host of
    each; None: they take turns. `held`: what ends with the launcher.
    """

    hosts: tuple[Host, ...]
    num_workers: int = 0
    worker_gpus: int = 0
    is_launcher: bool = True
    starts_workers: bool = False
    run_again: Callable[[], object] = lambda: None
    again_words: str = "start it again to continue from its newest checkpoint"
    place: Callable[[int], tuple[Host, ...]] | None = None
    held: object = None


def what_is_left_out(environment: Mapping[str, str]) -> str:
    """Returns words for a cluster of this machine alone in a job that has more; empty: this is none."""
    words = next((words for name, words in _PARTS.items() if environment.get(name, "1") != "1"), "")
    return words and f"this cluster is on this machine alone; {words}"


def module_of(name: str) -> Any:
    """Returns the module of one of ENGINES."""
    return import_module(f"lockstep.launcher.engines.{name}")


def engine_of(name: str, environment: Mapping[str, str]) -> Engine:
    """Returns an engine by its name, as this process finds it. Raises InvalidSpec where it is unknown, or this is no job of it."""
    if name in ELSEWHERE:
        raise InvalidSpec(f"--engine: {name} runs no `lockstep up`; `{ELSEWHERE[name][0]}` writes what it starts a cluster from")
    if name not in ENGINES:
        raise InvalidSpec(f"--engine: got {name!r}, want {known_names(name, ENGINES)}")
    watch = SilenceWatch()
    try:
        with watch.expecting(f"the engine {name}"):
            engine: Engine = module_of(name).engine(environment)
        return engine
    finally:
        watch.close()
