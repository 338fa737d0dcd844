"""Sizes of models as benchmarks take and name them, and how many steps are enough for each. Knows words and numbers."""

import re

from benchmarks.figures import human_bytes
from benchmarks.workload import Workload

SIZES = ("4KiB/4", "1MiB/8", "4MB/1000", "16MiB/16", "64MiB/16", "256MiB/16")
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def workload_of(size: str, *, num_steps: int, num_ps: int = 1, num_workers: int = 2) -> Workload:
    """Returns the workload of a size such as "4KiB/4": bytes and variables. Raises ValueError for what is no size."""
    total_bytes, num_variables = parse_size(size)
    return Workload(total_bytes=total_bytes, num_variables=num_variables, num_workers=num_workers, num_ps=num_ps, num_steps=num_steps)


def parse_size(size: str) -> tuple[int, int]:
    """Returns bytes and variables. Raises ValueError."""
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)/(\d+)", size)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"--sizes {size}: want bytes/variables, such as 4KiB/4 or 1048576/8")
    return int(match[1]) * _UNITS[match[2]], int(match[3])


def size_title(workload: Workload) -> str:
    """For example "64 MiB / 16"."""
    return f"{human_bytes(workload.total_bytes)} / {workload.num_variables}"


def steps_for(total_bytes: int, counts: tuple[tuple[int, int], ...], *, fewest: int) -> int:
    """Returns the count of the first entry (bytes at most, steps) that the size fits into, else `fewest`."""
    return next((steps for limit, steps in counts if total_bytes <= limit), fewest)
