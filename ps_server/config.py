"""How one parameter server is to run, from flags, LOCKSTEP_* and TF_CONFIG. Knows arguments and this machine's memory; no grpc."""

import argparse
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.variables import check_name
from ps_protocol.process.listening import check_bind_address
from ps_protocol.process.tf_config import parse_tf_config
from ps_protocol.roles.identity import parse_address
from ps_protocol.security.options import OPEN, Security, add_security_flags, security_of

DEFAULT_ADDRESS = "127.0.0.1:0"
DEFAULT_CLUSTER = "lockstep"
# Beyond it the memory is busy, and the interpreter's lock is handed about more than held. Who knows better says so by the flag.
_MAX_DEFAULT_APPLY_THREADS = 8
_MAX_APPLY_THREADS = 256
_CGROUP_CPU_LIMIT = "/sys/fs/cgroup/cpu.max"
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServerConfig:
    """One parameter server. `announce` is a file for its address once it serves; `max_memory_bytes` None: all memory of the machine.

    `apply_threads`: how many share the work of applying a step; None: as many as it may use processors. `checkpoint_dir`: a path or a URL;
    empty: no checkpoints. `history`: a directory to write down in what became of every contribution; None: nowhere.
    """

    index: int
    address: str = DEFAULT_ADDRESS
    cluster: str = DEFAULT_CLUSTER
    announce: Path | None = None
    max_memory_bytes: int | None = None
    apply_threads: int | None = None
    checkpoint_dir: str = ""
    history: Path | None = None
    enable_failpoints: bool = False
    allow_insecure_network: bool = False
    security: Security = OPEN

    def __post_init__(self) -> None:
        if not 0 <= self.index < 1 << 32:
            raise InvalidSpec(f"--index: got {self.index}, want an integer from 0")
        parse_address(self.address, is_bind=True)
        check_bind_address(self.address, is_insecure_network_allowed=self.allow_insecure_network, is_closed=self.security.is_closed)
        if not self.cluster:
            raise InvalidSpec("--cluster: the name is empty; give one, or leave the flag out")
        try:
            check_name(self.cluster)
        except InvalidSpec as error:
            raise InvalidSpec(f"--cluster: {error.message}") from None
        if self.max_memory_bytes is not None and self.max_memory_bytes < 1:
            raise InvalidSpec(f"--max-memory-bytes: got {self.max_memory_bytes}, want >= 1")
        if self.apply_threads is not None and not 1 <= self.apply_threads <= _MAX_APPLY_THREADS:
            raise InvalidSpec(f"--apply-threads: got {self.apply_threads}, want 1 to {_MAX_APPLY_THREADS}")


def parse_config(arguments: Sequence[str], *, environment: Mapping[str, str]) -> ParameterServerConfig:
    """Returns the configuration: each part from its flag, else LOCKSTEP_*, else TF_CONFIG, else its default. Raises InvalidSpec."""
    flags = _parser().parse_args(arguments)
    tf_config = parse_tf_config(environment.get("TF_CONFIG", ""))
    task = tf_config if tf_config is not None and tf_config.task_type == "ps" else None
    index = _integer("--index", flags.index, "LOCKSTEP_PS_INDEX", environment)
    if index is None and task is None:
        raise InvalidSpec("which parameter server is this? give --index I (from 0), or set LOCKSTEP_PS_INDEX or TF_CONFIG")
    address = flags.address or environment.get("LOCKSTEP_ADDRESS") or (task.bind_address if task else None)
    return ParameterServerConfig(
        index=index if index is not None else task.task_index if task else 0,
        address=address or DEFAULT_ADDRESS,
        cluster=flags.cluster if flags.cluster is not None else environment.get("LOCKSTEP_CLUSTER") or DEFAULT_CLUSTER,
        announce=flags.announce,
        max_memory_bytes=_integer("--max-memory-bytes", flags.max_memory_bytes, "LOCKSTEP_MAX_MEMORY_BYTES", environment),
        apply_threads=_integer("--apply-threads", flags.apply_threads, "LOCKSTEP_APPLY_THREADS", environment),
        checkpoint_dir=flags.checkpoint_dir if flags.checkpoint_dir is not None else environment.get("LOCKSTEP_CHECKPOINT_DIR", ""),
        history=flags.history or (Path(environment["LOCKSTEP_HISTORY"]) if environment.get("LOCKSTEP_HISTORY") else None),
        enable_failpoints=flags.enable_failpoints,
        allow_insecure_network=flags.allow_insecure_network or _truth("LOCKSTEP_ALLOW_INSECURE_NETWORK", environment),
        security=security_of(flags, environment, is_server=True),
    )


def machine_memory_bytes() -> int:
    """Returns the memory that this process may use: the machine's, or its container's if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        # Not a number ("max") or not there: no limit.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)


def default_apply_threads() -> int:
    """Returns how many threads an apply has if nobody says: the processors that this process, or its container, may use, up to 8."""
    counts = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MAX_DEFAULT_APPLY_THREADS]
    # Not a number ("max") or not there: no limit.
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = Path(_CGROUP_CPU_LIMIT).read_text(encoding="ascii").split()
        counts.append(-(-int(quota_us) // int(period_us)))
    return max(1, min(counts))


class _Parser(argparse.ArgumentParser):
    """Leaves the words of an error to the caller, which says them in one line."""

    def error(self, message: str) -> NoReturn:
        raise InvalidSpec(f"{message} (see --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m ps_server",
        description="Runs one parameter server until it is told to end.",
        epilog="`lockstep ps … --with-chief …`, with the chief's flags behind it, runs the chief in the same process.",
        allow_abbrev=False,
    )
    parser.add_argument("--index", metavar="I", help="which parameter server this is, from 0 [LOCKSTEP_PS_INDEX]")
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="where to listen, host:port or unix:/path; port 0: any free one [LOCKSTEP_ADDRESS] (127.0.0.1:0)",
    )
    parser.add_argument("--cluster", metavar="NAME", help="name of the cluster; others are refused [LOCKSTEP_CLUSTER] (lockstep)")
    parser.add_argument("--announce", metavar="FILE", type=Path, help="file to write the address to, once it serves")
    parser.add_argument(
        "--max-memory-bytes", metavar="N", help="for variables, slots and contributions [LOCKSTEP_MAX_MEMORY_BYTES] (all of the machine's)"
    )
    parser.add_argument(
        "--apply-threads",
        metavar="N",
        help="that share the work of a step [LOCKSTEP_APPLY_THREADS] (as many as it may use processors, up to 8)",
    )
    parser.add_argument(
        "--checkpoint-dir",
        metavar="DIR",
        help="where checkpoints are, a path or a URL, the same for all roles [LOCKSTEP_CHECKPOINT_DIR] (none)",
    )
    parser.add_argument(
        "--history", metavar="DIR", type=Path, help="write down there what became of every step [LOCKSTEP_HISTORY] (nowhere)"
    )
    parser.add_argument("--enable-failpoints", action="store_true", help="for tests: do what LOCKSTEP_FAILPOINTS says")
    parser.add_argument(
        "--allow-insecure-network",
        action="store_true",
        help="listen where others than this machine can reach it, without encryption [LOCKSTEP_ALLOW_INSECURE_NETWORK=1]",
    )
    add_security_flags(parser, is_server=True)
    return parser


def _integer(flag: str, given: str | None, variable: str, environment: Mapping[str, str]) -> int | None:
    name, text = (flag, given) if given is not None else (variable, environment.get(variable, ""))
    if not text and name == variable:
        return None
    if not (text.isascii() and text.isdigit()):
        raise InvalidSpec(f"{name}: got {text!r}, want a whole number from 0")
    return int(text)


def _truth(variable: str, environment: Mapping[str, str]) -> bool:
    text = environment.get(variable, "").strip().lower()
    if text in ("", "0", "false", "no"):
        return False
    if text in ("1", "true", "yes"):
        return True
    raise InvalidSpec(f"{variable}: got {text!r}, want 1 or 0")
