"""The configuration of one parameter server, from flags, LOCKSTEP_* and TF_CONFIG. Knows arguments and this machine's memory; no grpc."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.variables import check_name
from ps_protocol.process import options
from ps_protocol.process.listening import check_bind_address
from ps_protocol.process.tf_config import parse_tf_config
from ps_protocol.roles.identity import parse_address
from ps_protocol.security.options import OPEN, Security

# Beyond it the memory is busy, and the interpreter's lock is handed about more than held. The flag overrides it.
_MAX_DEFAULT_APPLY_THREADS = 8
_CGROUP_CPU_LIMIT = "/sys/fs/cgroup/cpu.max"
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class ParameterServerConfig:
    """One parameter server. `announce` is a file for its address once it serves; `max_memory_bytes` None: all memory of the machine.
    `table_dir`: where rows of tables with keys lie in files; None: in memory.

    `apply_threads`: how many share the work of applying a step; None: as many as it may use processors. `checkpoint_dir`: a path or a URL;
    empty: no checkpoints. `history`: a directory for the record of every contribution; None: none is kept. `data_port`: where data
    sockets come, on the host of `address`; 0: any port that is free. `metrics`: where /metrics is served over HTTP; empty: nowhere.
    """

    index: int
    address: str = options.DEFAULT_ADDRESS
    cluster: str = options.CLUSTER.default
    announce: Path | None = None
    max_memory_bytes: int | None = None
    table_dir: Path | None = None
    apply_threads: int | None = None
    data_port: int = 0
    checkpoint_dir: str = ""
    history: Path | None = None
    history_max_bytes: int = options.HISTORY_MAX_BYTES.default
    metrics: str = ""
    enable_failpoints: bool = False
    allow_insecure_network: bool = False
    security: Security = OPEN

    def __post_init__(self) -> None:
        parse_address(self.address, is_bind=True)
        check_bind_address(self.address, is_insecure_network_allowed=self.allow_insecure_network, is_closed=self.security.is_closed)
        if not self.cluster:
            raise InvalidSpec("--cluster: the name is empty; give one, or leave the flag out")
        if self.table_dir is not None and not (self.table_dir.is_dir() and os.access(self.table_dir, os.W_OK | os.X_OK)):
            raise InvalidSpec(f"--table-dir: {self.table_dir} is no directory that this process may write to; make it, on a local disk")
        try:
            check_name(self.cluster)
        except InvalidSpec as error:
            raise InvalidSpec(f"--cluster: {error.message}") from None


def parse_config(arguments: Sequence[str], *, environment: Mapping[str, str]) -> ParameterServerConfig:
    """Returns the configuration: each part from its flag, else LOCKSTEP_*, else TF_CONFIG, else its default. Raises InvalidSpec."""
    given = options.read_options(
        options.SERVER,
        arguments,
        environment=environment,
        prog="lockstep server",
        description="Runs one parameter server until it is asked to end.",
        examples=(
            "lockstep server --index 0 --address 127.0.0.1:5001",
            "lockstep server --index 1 --address 127.0.0.1:5002 --checkpoint-dir ckpt",
        ),
        epilog="`lockstep server … --with-chief …`, with the chief's flags behind it, runs the chief in the same process.",
    )
    tf_config = parse_tf_config(environment.get("TF_CONFIG", ""))
    task = tf_config if tf_config is not None and tf_config.task_type == "ps" else None
    index = given[options.INDEX]
    if index is None and task is None:
        raise InvalidSpec("which parameter server is this? give --index I (from 0), or set LOCKSTEP_PS_INDEX or TF_CONFIG")
    others = {
        "index": index if index is not None else task.task_index if task else 0,
        "address": given[options.ADDRESS] or (task.bind_address if task else None) or options.DEFAULT_ADDRESS,
        "security": options.security_of(given, is_server=True),
    }
    return ParameterServerConfig(**{**given.for_fields(ParameterServerConfig, options.SERVER), **others})


def machine_memory_bytes() -> int:
    """Returns the memory that this process may use: the machine's, or its container's if that is less."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        # Not a number ("max") or not there: no limit.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)


def default_apply_threads() -> int:
    """Returns the default number of apply threads: the processors that this process, or its container, may use, up to 8."""
    counts = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MAX_DEFAULT_APPLY_THREADS]
    # Not a number ("max") or not there: no limit.
    with contextlib.suppress(OSError, ValueError):
        quota_us, period_us = Path(_CGROUP_CPU_LIMIT).read_text(encoding="ascii").split()
        counts.append(-(-int(quota_us) // int(period_us)))
    return max(1, min(counts))
