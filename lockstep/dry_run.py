"""Runs one worker's program for a few steps against a cluster inside its own process, to find wrong calls before a cluster is started.

`lockstep up --dry-run` runs it as `python -m lockstep.dry_run train.py …`. Knows the program only through its cluster.
"""

import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ps_protocol.errors import PsError
from ps_protocol.roles.chief import ClusterState
from ps_protocol.roles.shard import ShardStatusRequest
from worker_client.opening import made_cluster

# After this many late contributions, the program evidently does not check whether training is finished.
_MANY_LATE = 20
_LOOK_EVERY_S = 0.1
_PREFIX = "[dry run] "
_OURS = tuple(Path(__file__).resolve().parents[1] / package for package in ("lockstep", "worker_client", "ps_protocol"))


def run_program(words: list[str]) -> int:
    """Runs a program as Python runs it (`train.py …` or `-m package.train …`), prints the findings, and returns the exit code."""
    begin = time.monotonic()
    threading.Thread(target=_watch, args=(begin,), name="dry-run-watch", daemon=True).start()
    code = _exit_code(lambda: _run(words))
    return _report(begin, code)


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")


def _exit_code(run: Callable[[], None]) -> int:
    try:
        run()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exception(type(error), error, _of_program(error))
        return 1
    return 0


def _of_program(error: BaseException) -> TracebackType | None:
    """Returns the part of the traceback that is of the program: not of what runs it, nor of ours below the line whose call we refused."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        first = first.tb_next
    entry = first if isinstance(error, PsError) else None
    while entry is not None and entry.tb_next is not None:
        path = Path(entry.tb_next.tb_frame.f_code.co_filename)
        if any(path.is_relative_to(package) for package in _OURS):
            entry.tb_next = None
        entry = entry.tb_next
    return first or error.__traceback__


def _watch(begin: float) -> None:
    """Ends the process if the program continues after the last step."""
    while True:
        time.sleep(_LOOK_EVERY_S)  # polls: late contributions are only counted in the status, and no call waits for a number of them
        cluster = made_cluster()
        if cluster is None:
            continue
        status = cluster.chief.status()
        if status.state is ClusterState.FINISHED and status.num_late + status.num_stale >= _MANY_LATE:
            sys.stdout.flush()
            code = _report(begin, 0)
            sys.stdout.flush()
            os._exit(code)


def _report(begin: float, code: int) -> int:
    if code:
        return _print(f"the program ended with exit code {code}: see above", code)
    cluster = made_cluster()
    if cluster is None:
        return _print("the program opened no session: call lockstep.connect(), and leave the address out", 1)
    status, found = cluster.chief.status(), list[str]()
    if status.state is ClusterState.WAITING_FOR_MODEL:
        found.append("it created no model: call session.create_or_join() with the first values")
    elif not status.global_step:
        found.append("it made no step: call session.step() with the gradients")
    if status.num_late + status.num_stale >= _MANY_LATE:
        found.append("it continued after the last step: check session.is_finished, or what step() returns")
    if num_nonfinite := sum(shard.call(ShardStatusRequest()).report.num_nonfinite for shard in cluster.shards):
        found.append(f"{num_nonfinite} elements of the last step's gradient were NaN or infinite")
    if found:
        return _print("\n".join(found), 1)
    size = sum(server.arena_bytes for server in status.shards)
    return _print(f"{status.global_step} steps in {time.monotonic() - begin:.1f} s with a model of {size} bytes: found nothing wrong", 0)


def _print(text: str, code: int) -> int:
    for line in text.splitlines():
        print(_PREFIX + line, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(run_program(sys.argv[1:]))
