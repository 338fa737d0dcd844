"""Times calls of classes from outside, in this process: the part, the begin, the duration, and the CPU time of the thread.

A seam is a method or function that is replaced by a timed one, so the timed code needs no change. A seam that no longer exists is an error,
because its time would be missing without notice. All times are from the machine's monotonic clock, so times of several processes can be
compared.
"""

import importlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Interval(NamedTuple):
    """One call: seconds of the monotonic clock, and CPU seconds of the thread that made it."""

    part: str
    begin: float
    end: float
    cpu_s: float


# A worker's calls to shards and chief, over any transport.
_OF_SHARDS = (
    ("push_gradients", "push"),
    ("expect", "expect"),
    ("read", "read"),
)
_OF_SHARED_MEMORY = (
    ("push", "push"),
    ("gradients", "gradient memory"),
    ("view", "read"),
)
WORKER_SEAMS = (
    *((f"ps_protocol.rpc.shard:GrpcShard.{method}", part) for method, part in _OF_SHARDS),
    *((f"ps_protocol.rpc.memory:SharedMemory.{method}", part) for method, part in _OF_SHARED_MEMORY),
)
# All requests to the chief go through one method; these requests belong to a step.
WORKER_REQUESTS = ("ps_protocol.rpc.chief:GrpcChief.call", ("DequeueTokenRequest", "CommitPushRequest"), "commit and token")
SERVER_SEAMS = (
    ("ps_server.shard.shard:ServedShard.apply_step", "apply"),
    ("ps_server.shard.shard:ServedShard._prepare_step", "norms"),
)
# Generators of messages with variables, in each module that calls them.
SERVER_STREAMS = (("ps_server.serving.streams:content_messages", "send"),)
# The first call for a contribution at a parameter server, and the later ones.
RECEIVING_BEGIN = "ps_server.shard.shard:ServedShard.open_push"
RECEIVING_CALLS = tuple(f"ps_server.shard.handles:OpenPush.{method}" for method in ("write", "finish", "finish_with"))
SEAMS = (*(seam for seam, _ in (*WORKER_SEAMS, *SERVER_SEAMS, *SERVER_STREAMS)), WORKER_REQUESTS[0], RECEIVING_BEGIN, *RECEIVING_CALLS)


class SeamGone(Exception):
    """A seam does not exist; the text names it."""


class Recorder:
    """Keeps intervals. Thread-safe. A nested call of the same part and thread is included in the outer one."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._active = threading.local()

    def note(self, part: str, call: Callable[[], Any]) -> Any:
        """Makes the call, times it, and returns what it returns."""
        active: set[str] = self._active.__dict__.setdefault("parts", set())
        if part in active:
            return call()
        active.add(part)
        begin, cpu_s = time.perf_counter(), time.thread_time()
        try:
            return call()
        finally:
            self.intervals.append(Interval(part, begin, time.perf_counter(), time.thread_time() - cpu_s))
            active.discard(part)

    def wrap(self, seam: str, part: str) -> None:
        """Times every call of "module:Class.method" or "module:function" from now on."""
        owner, name, function = find(seam)
        setattr(owner, name, self._timed(function, part))

    def wrap_requests(self, seam: str, requests: Sequence[str], part: str) -> None:
        """Times the calls of a method whose request is of one of these classes."""
        owner, name, call = find(seam)

        def timed(target: Any, request: Any, **options: Any) -> Any:
            if type(request).__name__ not in requests:
                return call(target, request, **options)
            return self.note(part, lambda: call(target, request, **options))

        setattr(owner, name, timed)

    def wrap_stream(self, seam: str, part: str) -> None:
        """Times a generator from its first item to its end; CPU time is that of making the items."""
        owner, name, function = find(seam)
        setattr(owner, name, self._timed_stream(function, part))

    def wrap_receiving(self, part: str) -> None:
        """Times a contribution at a parameter server from its first message until it is staged.

        The CPU time is that of its copies and its end.
        """
        begins: dict[int, list[float]] = {}  # by contribution: begin, and CPU seconds so far in all threads
        owner, name, open_push = find(RECEIVING_BEGIN)

        def opened(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            push = open_push(*arguments, **options)
            begins[id(push)] = [begin, 0.0]
            return push

        setattr(owner, name, opened)
        for seam in RECEIVING_CALLS:
            owner, name, function = find(seam)

            def timed(push: Any, *arguments: Any, _call: Any = function, _is_end: bool = name != "write") -> Any:
                before = time.thread_time()
                result, seen = _call(push, *arguments), begins[id(push)]
                seen[1] += time.thread_time() - before
                if _is_end:
                    self.intervals.append(Interval(part, seen[0], time.perf_counter(), seen[1]))
                    del begins[id(push)]
                return result

            setattr(owner, name, timed)

    def write(self, path: Path) -> None:
        """Writes all intervals as JSON."""
        path.write_text(json.dumps(self.intervals), encoding="utf-8")

    def _timed(self, function: Any, part: str) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            return self.note(part, lambda: function(*arguments, **options))

        return timed

    def _timed_stream(self, function: Any, part: str) -> Any:
        def timed(*arguments: Any, **options: Any) -> Iterator[Any]:
            items, begin, cpu_s = iter(function(*arguments, **options)), time.perf_counter(), 0.0
            try:
                while True:
                    before = time.thread_time()
                    item = next(items, _END)
                    cpu_s += time.thread_time() - before
                    if item is _END:
                        return
                    yield item
            finally:
                self.intervals.append(Interval(part, begin, time.perf_counter(), cpu_s))

        return timed


_END = object()


def read_intervals(path: Path) -> list[Interval]:
    """Returns the intervals that `write` wrote."""
    return [Interval(*fields) for fields in json.loads(path.read_text(encoding="utf-8"))]


def find(seam: str) -> tuple[Any, str, Any]:
    """Returns the owner, the name and the function of "module:Class.method" or "module:function". Raises SeamGone."""
    module_name, _, path = seam.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each)
        return owner, name, vars(owner)[name]
    except (ImportError, AttributeError, KeyError):
        raise SeamGone(f"{seam} does not exist any more; name its replacement in benchmarks/harness/seams.py") from None
