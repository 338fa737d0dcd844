"""What all tests share: a clean environment, short socket paths, and the check that no test leaves a process behind. Knows no role."""

import gc
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ps_protocol import rpc as rpc  # before any test imports grpc
from tests.support.examples import register_profiles
from tests.support.processes.warm import warm_server_pid
from tests.support.waiting import wait_until

# Inherited by every descendant of a test, also by one whose parent is gone, so that orphans are found too.
MARK = "LOCKSTEP_TEST_MARK"
# Tests in these folders start nothing, and run in less time than it takes to look at every process.
_FOLDERS_WITHOUT_PROCESSES = [Path(__file__).parent / "unit"]


# What has started a process here so far: whatever a test leaves behind descends from one of these, or from a child that was there before.
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"}
_started: list[str] = []


def pytest_configure() -> None:
    gc.disable()  # until all tests are collected: nothing of what is imported and collected goes again
    # Else each of the thousands of processes that tests start would compile every module anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Nor does any of them multiply large matrices: the threads for it would only spin for a while when a process starts.
    os.environ.update(dict.fromkeys(["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"], "1"))
    # A shell has what it runs in the background ignore interrupts, and so would every process that a test starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.addaudithook(lambda event, _: _started.append(event) if event in _STARTS else None)
    register_profiles()


def pytest_collection_finish() -> None:
    # Thousands of tests are there to stay: to go through them again and again in search of garbage took half the time of the simulations.
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000)


@pytest.fixture(scope="session", autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the user's shell says about some cluster, or about a proxy, must not reach the tests; nor do they find each other's clusters."""
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))
    for name in [*os.environ]:
        if name.startswith("LOCKSTEP_") or name == "TF_CONFIG" or name.lower().endswith("_proxy"):
            del os.environ[name]


@pytest.fixture(autouse=True)
def _no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    if any(request.path.is_relative_to(folder) for folder in _FOLDERS_WITHOUT_PROCESSES):
        yield
        return
    mark, num_started, has_children = uuid.uuid4().hex, len(_started), _has_children()
    earlier = {process.pid for process in psutil.Process().children(recursive=True)} if has_children else set()
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]
    if not has_children and len(_started) == num_started:
        return  # to look at every process of the machine takes longer than most tests
    if not wait_until(lambda: not _left(mark, earlier), timeout_s=5.0, required=False):
        left = _left(mark, earlier)
        described = "; ".join(_end(process) for process in left)
        assert not left, f"the test left {len(left)} process(es) running (ended now): {described}"


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A directory whose path is short enough for Unix sockets (about 100 bytes); pytest's own may not be."""
    path = Path(tempfile.mkdtemp(prefix="ls-", dir="/tmp" if Path("/tmp").is_dir() else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def _has_children() -> bool:
    """Whether this process has children besides the server of warm starts; psutil would look at every process of the machine."""
    try:
        listed = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread has ended meanwhile
        listed = []
    children = {int(pid) for pids in listed for pid in pids} if listed else {child.pid for child in psutil.Process().children()}
    return bool(children - {warm_server_pid()})


def _left(mark: str, earlier: set[int]) -> list[psutil.Process]:
    earlier = earlier | {warm_server_pid()}
    mine = {process.pid: process for process in psutil.Process().children(recursive=True) if not _is_of(process, earlier)}
    for pid in psutil.pids():
        try:
            if pid not in mine and f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                mine[pid] = psutil.Process(pid)
        except (OSError, psutil.NoSuchProcess):
            continue  # it ended meanwhile, or is not ours; or there is no /proc, and children are all that can be found
    return [process for process in mine.values() if _is_running(process)]


def _is_of(process: psutil.Process, earlier: set[int]) -> bool:
    """Whether it was there before the test, or was started by one that was, and ends with that: a renderer of a module's browser."""
    try:
        return process.pid in earlier or any(parent.pid in earlier for parent in process.parents())
    except psutil.Error:
        return False


def _is_running(process: psutil.Process) -> bool:
    try:
        # A child that ended but was not waited for holds nothing; and multiprocessing's tracker lives as long as its user by design.
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _end(process: psutil.Process) -> str:
    try:
        described = f"pid {process.pid}: {' '.join(process.cmdline())[:200]}"
        process.kill()
        return described
    except psutil.Error:
        return f"pid {process.pid}"
