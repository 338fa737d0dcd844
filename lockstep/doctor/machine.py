"""Checks this machine: Python, libraries, names, ports, clock, shared memory, limits, environment. Calls no other process."""

import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from lockstep import __version__
from lockstep.doctor.findings import Finding, fail, ok, warn
from ps_protocol.errors import InvalidSpec
from ps_protocol.process import options
from ps_protocol.process.listening import check_address_is_free, check_bind_address, num_descriptors
from ps_protocol.roles.identity import MAX_UNIX_PATH_BYTES, PROTOCOL_VERSION

# The same as in pyproject.toml; a test compares them.
LEAST_PYTHON = (3, 11)
LEAST_VERSIONS = {"grpcio": "1.84", "protobuf": "6.31.1", "numpy": "1.26"}
# A server needs one for each connection and file, and uses three quarters of them for connections, of which a worker has about three.
_FEW_DESCRIPTORS = 4_096
_LITTLE_MEMORY = _LITTLE_DISK = 1 << 30
# The characters that a launcher adds to the directory of temporary files: a directory of its own, and the name of a socket.
_SOCKET_CHARACTERS = len("/lockstep-xxxxxxxx/standby100.sock")
# STA_UNSYNC of adjtimex(2), the offset of the status in its structure, and a buffer size that holds the structure.
_UNSYNCHRONISED, _STATUS_AT, _TIMEX_BYTES = 0x0040, 40, 512
# Variables that are not options: those of a launcher's children, and those read outside the table of options.
_OTHER_VARIABLES = {
    "LOCKSTEP_NUM_WORKERS",
    "LOCKSTEP_OWN_POLLING",
    "LOCKSTEP_KEEP_MEMORY",
    "LOCKSTEP_FAILPOINTS",
}


def machine_findings(
    environment: Mapping[str, str], *, addresses: tuple[str, ...] = (), table_dir: Path | None = None
) -> Iterator[Finding]:
    """Yields all findings about this machine. `addresses`: where a role is to listen; `table_dir`: where rows are to lie in files."""
    yield _python()
    yield from _libraries()
    yield from _names()
    for address in addresses:
        yield _port(address)
    yield _temporary_directory()
    if table_dir is not None:
        yield _table_directory(table_dir)
    yield _clock()
    yield _shared_memory()
    yield _descriptors()
    yield _memory()
    yield _processors()
    yield _environment(environment)


def _python() -> Finding:
    text = f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}, {platform.system()} {platform.release()}"
    if sys.version_info[:2] < LEAST_PYTHON:
        return fail("python", text, f"install Python {'.'.join(map(str, LEAST_PYTHON))} or newer")
    if not sys.platform.startswith("linux"):
        return warn("python", text, "Lockstep is tested on Linux; elsewhere there is no shared memory between processes")
    return ok("python", text)


def _libraries() -> Iterator[Finding]:
    yield ok("lockstep", f"lockstep-ps {__version__}, protocol {PROTOCOL_VERSION}")
    for name, least in LEAST_VERSIONS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield fail(name, "is not installed", f"pip install '{name}>={least}'")
            continue
        if _numbers(version) < _numbers(least):
            yield fail(name, f"{version}, want {least} or newer", f"pip install '{name}>={least}'")
        else:
            yield ok(name, version)
    try:
        from ps_protocol.v1 import chief_service_pb2  # noqa: F401
    except Exception as error:  # a broken installation may raise anything
        yield fail("messages", f"the generated messages cannot be used: {error}", "pip install --force-reinstall protobuf lockstep-ps")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _names() -> Iterator[Finding]:
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo("localhost", None)}
    except OSError as error:
        yield fail("localhost", f"the name is unknown: {error.strerror}", "add the line `127.0.0.1 localhost` to /etc/hosts")
    else:
        local = found & {"127.0.0.1", "::1"}
        is_right = bool(local) and local == found
        advice = "have localhost stand for 127.0.0.1 (and ::1) in /etc/hosts"
        yield ok("localhost", ", ".join(sorted(found))) if is_right else fail("localhost", ", ".join(sorted(found)), advice)
    name = socket.gethostname()
    try:
        known = sorted({str(one[4][0]) for one in socket.getaddrinfo(name, None)})
    except OSError as error:
        advice = "give roles and workers IP addresses, or add the name to the DNS or to /etc/hosts"
        yield warn("host name", f"{name}: unknown here ({error.strerror})", advice)
        return
    is_local = all(one.startswith("127.") or one == "::1" for one in known)
    where = f"{name} is {', '.join(known)}" + ("; other machines need another name or address for this one" if is_local else "")
    yield ok("host name", where)


def _port(address: str) -> Finding:
    try:
        check_address_is_free(address)
        check_bind_address(address, is_insecure_network_allowed=True)
    except InvalidSpec as error:
        return fail("port", error.message, "choose another --listen ADDRESS, or end what listens there")
    return ok("port", f"{address} is free")


def _temporary_directory() -> Finding:
    place, check = tempfile.gettempdir(), "temporary files"
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        return fail(check, f"cannot write to {place}: {error.strerror}", "free space there, or set TMPDIR")
    if len(place.encode()) + _SOCKET_CHARACTERS > MAX_UNIX_PATH_BYTES:
        return fail(
            check, f"{place} is too long a name for Unix sockets", "set TMPDIR to a shorter one, or start clusters with `lockstep up --tcp`"
        )
    return ok(check, place)


def _table_directory(place: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=place):
            free_bytes = shutil.disk_usage(place).free
    except OSError as error:
        return fail("table files", f"cannot write to {place}: {error.strerror}", "make it, on a local disk, or give another --table-dir")
    text = f"{free_bytes / 2**30:.1f} GiB free in {place}"
    if free_bytes < _LITTLE_DISK:
        return warn("table files", text, "rows and slots that do not fit are refused: free space there, or give another --table-dir")
    return ok("table files", text)


def _clock() -> Finding:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    filled = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        has_answer = ctypes.CDLL(None).adjtimex(filled) >= 0
    except (OSError, AttributeError):
        has_answer = False
    if has_answer and int.from_bytes(filled.raw[_STATUS_AT : _STATUS_AT + 4], sys.byteorder) & _UNSYNCHRONISED:
        advice = "training does not depend on it; certificates and the times in logs do. Run an NTP client, such as chrony, on the host"
        return warn("clock", f"{now}, not synchronised", advice)
    return ok("clock", f"{now}{', synchronised' if has_answer else ''}")


def _shared_memory() -> Finding:
    check, advice = "shared memory", "gradients then travel over sockets or gRPC; on Linux 5.1 or newer, with /proc mounted, it works"
    try:
        from ps_protocol.shared_memory.segment import SegmentMaker

        segment = SegmentMaker(cluster="doctor", index=0, process_incarnation=1).variables(4096)
        assert segment.descriptor is not None
        os.close(os.open(f"/proc/{os.getpid()}/fd/{segment.descriptor}", os.O_RDONLY))
    except (OSError, InvalidSpec, AttributeError) as error:
        return warn(check, f"cannot be made: {error}", advice)
    return ok(check, "can be made and opened")


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    names = ["no limit" if one == resource.RLIM_INFINITY else str(one) for one in (soft, hard)]
    text = f"soft limit {names[0]}, hard limit {names[1]}; servers raise theirs to {num_descriptors() if hard < 0 else min(hard, 65_536)}"
    if hard != resource.RLIM_INFINITY and hard < _FEW_DESCRIPTORS:
        return warn(
            "descriptors",
            text,
            f"for more than {hard // 4} workers raise the hard limit: ulimit -Hn 65536, or LimitNOFILE=65536 in systemd",
        )
    return ok("descriptors", text)


def _memory() -> Finding:
    from ps_server.config import machine_memory_bytes

    may_use, available = machine_memory_bytes(), _available_bytes()
    text = f"{may_use / 2**30:.1f} GiB for this process" + (f", {available / 2**30:.1f} GiB available now" if available is not None else "")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        return warn("memory", f"{text}; address space limited to {limit / 2**30:.1f} GiB", "remove the limit: ulimit -v unlimited")
    if min(may_use, may_use if available is None else available) < _LITTLE_MEMORY:
        return warn(
            "memory", text, "a server needs twice the variables' size, their slots, and a contribution of each worker: end other programs"
        )
    return ok("memory", text)


def _available_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _processors() -> Finding:
    from ps_server.config import default_apply_threads

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError):
        load = os.getloadavg()[0]
        if load > 2 * usable:
            advice = "steps will be slow: end other programs, or use another machine"
            return warn("processors", f"{usable} usable, and {load:.1f} threads want to run", advice)
    return ok("processors", f"{usable} usable; a parameter server applies with {default_apply_threads()} threads")


def _environment(environment: Mapping[str, str]) -> Finding:
    known = {option.variable for option in options.TABLE if option.variable} | _OTHER_VARIABLES
    given = sorted(name for name in environment if name.startswith("LOCKSTEP_"))
    unknown = [name for name in given if name not in known]
    if unknown:
        return warn(
            "environment",
            f"{', '.join(unknown)}: there is no such variable",
            "look for a misspelling; docs/reference/cli.md has them all",
        )
    return ok("environment", f"set: {', '.join(given)}" if given else "no LOCKSTEP_ variable is set")
