"""Lockstep on Ray: runs a function on each worker of a cluster whose processes are actors on Ray's nodes. Programs import this module.

import lockstep.ray                                # pip install 'lockstep-ps[ray]'

results = lockstep.ray.up(train, num_workers=4, num_ps=2)     # train() calls lockstep.connect()
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.errors import InvalidSpec, Unavailable
from ps_protocol.process.options import parse_words

try:
    import ray
    import ray.cloudpickle
    from ray.exceptions import RayTaskError
except ImportError as error:
    raise ImportError("lockstep.ray needs Ray: pip install 'lockstep-ps[ray]'") from error

from lockstep.launcher.engines.ray import BRIDGE_VARIABLE
from lockstep.launcher.engines.ray_bridge import PLACED_WITHIN_S, Bridge, takes_of

__all__ = ["up"]

_STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")


def up(
    train: Callable[..., Any],
    *,
    num_workers: int,
    num_ps: int = 1,
    config: Any = None,
    resources_per_worker: Mapping[str, Any] | None = None,
    strategy: str = "SPREAD",
    placed_within_s: float = PLACED_WITHIN_S,
    flags: Sequence[str] | str = (),
) -> list[Any]:
    """Starts a cluster on Ray's nodes, calls `train` on each worker, and returns what the workers returned, by worker index. Blocks.

    `train`: a function of `config`, or of nothing if that is None; it calls `lockstep.connect()`. Nodes need this version of Lockstep.
    `resources_per_worker`: options of a Ray actor, such as `{"num_cpus": 2, "num_gpus": 1}`; without them, one CPU. Servers and the chief
    take none, and run on the workers' nodes. `strategy`: how a placement group chooses nodes for the workers, in Ray's words; given up if
    Ray has not placed them within `placed_within_s` seconds. `flags`: others of `lockstep up`, such as `--restart-workers 3` or
    `--checkpoint-dir`, with which a lost node costs no training. What the processes print is printed here.

    Connects to Ray if this process has not. An interrupt ends the cluster, which saves a checkpoint. Raises what `train` has raised on the
    worker that failed first, as `ray.get()` does: with that worker's traceback, as a RayTaskError and as the error's own class. Raises
    InvalidSpec for wrong arguments, and Unavailable if there is no room for the workers or the cluster has ended in another way.
    """
    if not callable(train):
        raise InvalidSpec(f"train: got a {type(train).__name__}, want a function")
    if num_workers < 1:
        raise InvalidSpec(f"num_workers = {num_workers}, want at least 1")
    if strategy not in _STRATEGIES:
        raise InvalidSpec(f"strategy = {strategy!r}, want one of {', '.join(_STRATEGIES)}")
    takes = {"num_cpus": 1, **(resources_per_worker or {})}
    if not takes_of(takes):
        raise InvalidSpec(
            f"resources_per_worker: got {resources_per_worker}, of which a worker takes nothing; want a part of a processor, at least"
        )
    words = ["--engine", "ray", "--ps", str(num_ps), "--workers", str(num_workers), "--host-dir", ".", *_words(flags)]
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    function = ray.cloudpickle.dumps((train, () if config is None else (config,)))
    bridge = Bridge(for_workers=takes, strategy=strategy, placed_within_s=placed_within_s, function=function)
    launcher = subprocess.Popen(
        [sys.executable, "-P", "-m", "lockstep", "up", *words, "--", sys.executable, "-m", "lockstep.launcher.engines.ray_program"],
        env={**os.environ, BRIDGE_VARIABLE: bridge.path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        last = _show(launcher)
    except BaseException:
        launcher.send_signal(signal.SIGINT)
        _show(launcher)
        raise
    finally:
        bridge.close()
    results = {name: ray.cloudpickle.loads(data) for name, data in bridge.results.items()}
    for name, (_, error, trace) in results.items():
        if error is not None:
            raise RayTaskError(name, trace, error).as_instanceof_cause()
    if launcher.returncode or len(results) < num_workers:
        raise Unavailable(f"lockstep up has ended with exit code {launcher.returncode}: {last}")
    return [results[f"worker {index}"][0] for index in range(num_workers)]


def _show(launcher: "subprocess.Popen[str]") -> str:
    """Prints what the launcher prints until it ends, and returns the last line."""
    assert launcher.stdout is not None
    line = ""
    for line in launcher.stdout:
        print(line, end="", flush=True)
    launcher.wait()
    return line.strip()


def _words(flags: Sequence[str] | str) -> Sequence[str]:
    try:
        return parse_words(flags) if isinstance(flags, str) else flags
    except ValueError as error:
        raise InvalidSpec(f"flags: got {flags!r}, want {error}") from None
