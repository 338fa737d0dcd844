"""Memory of a process as Linux counts it: peak resident, and proportional to sharing. Knows /proc; only the standard library.

Also runs in the environments of other systems, where Lockstep is not installed.
"""

from pathlib import Path


def peak_rss_bytes(pid: int | str = "self") -> int:
    """Returns the most memory that the process ever had resident; pages that it shares count in full."""
    return _kib_of(pid, "status", "VmHWM:") * 1024


def rss_bytes(pid: int | str = "self") -> int:
    """Returns its resident memory now; pages that it shares count in full."""
    return _kib_of(pid, "status", "VmRSS:") * 1024


def shared_bytes(pid: int | str = "self") -> int:
    """Returns how much of its resident memory is shared memory."""
    return _kib_of(pid, "status", "RssShmem:") * 1024


def pss_bytes(pid: int | str = "self") -> int:
    """Returns its resident memory now, each shared page divided by the number of processes that have it; 0 if unknown."""
    return _kib_of(pid, "smaps_rollup", "Pss:") * 1024


def _kib_of(pid: int | str, name: str, field: str) -> int:
    try:
        text = Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8")
    except OSError:  # not Linux, or not permitted
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(field)), 0)
