"""The client's side of both kinds of long-lived streams: which faults break them, and which they survive."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest

from ps_protocol.errors import Cancelled, DeadlineExceeded, StepGone, Unavailable, Unimplemented
from ps_protocol.process.memory import is_allowed, keep_freed_memory
from ps_protocol.process.waiting import CallDeadlines
from ps_protocol.rpc import client_stream
from ps_protocol.rpc.client import Connection
from ps_protocol.rpc.client_stream import LongLivedStream, Stream, Streams
from tests.support.network.servers import answering, serving
from tests.support.waiting import wait_until

# What the product takes, whatever a test puts in its place.
_OPEN_STREAM = client_stream.open_stream

MIB = 1 << 20
Handler = Callable[[Iterator[bytes], grpc.ServicerContext], Iterator[bytes]]


@pytest.fixture(params=[client_stream._DirectStream, client_stream._FedStream], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_stream, "open_stream", request.param)


@contextlib.contextmanager
def stream_to(handler: Handler) -> Iterator[Streams]:
    generic = grpc.method_handlers_generic_handler("S", {"M": grpc.stream_stream_rpc_method_handler(handler)})
    deadlines = CallDeadlines()
    with serving(generic) as address, contextlib.closing(Connection(address, name="ps 0", service="S")) as connection:
        with contextlib.closing(Streams(connection, "M", deadlines=deadlines)) as streams:
            yield streams
    deadlines.close()


def ask(streams: Streams, *messages: bytes, timeout_s: float = 20.0) -> bytes:
    return streams.use(lambda use: use.stream.exchange(messages), timeout_s=timeout_s, awaited="an answer")


def echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from requests


def test_one_stream_serves_many_uses() -> None:
    opened: list[object] = []

    def counted(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        opened.append(context)
        yield from requests

    with stream_to(counted) as streams:
        assert [ask(streams, b"%d" % number) for number in range(20)] == [b"%d" % number for number in range(20)]
    assert len(opened) == 1


def test_requests_of_many_threads_are_answered_one_after_the_other() -> None:
    def answer_all(use: LongLivedStream) -> list[bytes]:
        stream = use.stream
        threads = [threading.Thread(target=stream.request, args=(b"%d" % number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        return [stream.answer() for _ in threads]

    with stream_to(echo) as streams:
        for _ in range(3):
            answers = streams.use(answer_all, timeout_s=20, awaited="answers")
            assert sorted(answers) == sorted(b"%d" % number for number in range(20))


def test_a_stream_that_ends_between_calls_wakes_the_thread_that_waits_for_answers() -> None:
    def once(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield next(requests)

    def ask_twice(use: LongLivedStream) -> bytes:
        use.stream.request(b"1")
        assert use.stream.answer() == b"1"
        return use.stream.answer()

    with stream_to(once) as streams, pytest.raises(Unavailable, match="it ended the stream M"):
        streams.use(ask_twice, timeout_s=20, awaited="an answer")


def test_large_messages_travel_and_are_made_one_by_one() -> None:
    def total(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        count = 0
        for message in requests:
            count += len(message)
            if count == 32 * MIB:
                yield b"%d" % count

    with stream_to(total) as streams:
        assert ask(streams, *[bytes(MIB)] * 32) == b"%d" % (32 * MIB)


def test_answer_that_comes_early_ends_the_sending() -> None:
    def early(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        yield b"early"
        for message in requests:
            if message == b"again":
                yield b"late"

    def endless() -> Iterator[bytes]:
        while True:
            yield bytes(MIB)

    with stream_to(early) as streams:
        assert streams.use(lambda use: use.stream.exchange(endless()), timeout_s=20, awaited="") == b"early"
        assert ask(streams, b"again") == b"late"


def test_stream_that_the_server_ends_without_an_answer_is_unavailable_and_the_next_use_opens_another() -> None:
    answers: list[bytes] = []

    def every_other(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        message = next(requests)
        answers.append(message)
        if len(answers) % 2 == 0:
            yield message

    with stream_to(every_other) as streams:
        with pytest.raises(Unavailable, match="ended the stream M"):
            ask(streams, b"b")
        assert ask(streams, b"a") == b"a"


def test_error_that_ends_the_stream_is_rebuilt() -> None:
    def failing(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with answering(context):
            for _ in requests:
                raise StepGone("step 1 is gone", facts={"step": "3"})
        yield b""

    with stream_to(failing) as streams, pytest.raises(StepGone, match="step 1 is gone") as raised:
        ask(streams, b"a")
    assert raised.value.facts == {"step": "3"}


def test_server_that_cannot_be_reached_is_unavailable() -> None:
    with stream_to(echo) as streams:
        connection = streams.connection
    with contextlib.closing(Connection(connection.address, name="ps 0", service="S")) as late:
        with pytest.raises(Unavailable, match="cannot reach ps 0"):
            ask(Streams(late, "M", deadlines=CallDeadlines()), b"a")


def test_answer_that_does_not_come_in_time_breaks_the_stream_and_no_other() -> None:
    is_patient = threading.Event()

    def slow(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for message in requests:
            if message == b"slow":
                is_patient.wait(20)
            yield message

    with stream_to(slow) as streams:
        assert ask(streams, b"a") == b"a"
        with pytest.raises(DeadlineExceeded, match=r"waited for an answer, which did not come within 0\.05 s"):
            ask(streams, b"slow", timeout_s=0.05)
        assert ask(streams, b"b") == b"b"
        is_patient.set()


def test_an_exception_in_the_use_of_a_stream_breaks_the_stream() -> None:
    def act(use: LongLivedStream) -> None:
        use.stream.send(b"never read")
        raise KeyError("a defect")

    with stream_to(echo) as streams:
        with pytest.raises(KeyError):
            streams.use(act, timeout_s=20, awaited="")
        assert ask(streams, b"a") == b"a"


def test_uses_at_the_same_time_have_streams_of_their_own_and_one_is_kept() -> None:
    opened: list[grpc.ServicerContext] = []

    def counted(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        opened.append(context)
        yield from requests

    with stream_to(counted) as streams:
        in_use, may_end = threading.Event(), threading.Event()

        def act(use: LongLivedStream) -> bool:
            use.stream.send(b"first")
            assert use.stream.receive() == b"first"
            in_use.set()
            return may_end.wait(20)

        thread = threading.Thread(target=streams.use, args=(act,), kwargs={"timeout_s": 20, "awaited": ""})
        thread.start()
        assert in_use.wait(20)
        assert ask(streams, b"a") == b"a"
        may_end.set()
        thread.join(20)
        assert len(opened) == 2
        wait_until(lambda: sum(context.is_active() for context in opened) == 1, what="one of the streams has ended")
        assert ask(streams, b"b") == b"b"
        assert len(opened) == 2


def test_a_server_without_the_method_is_reported() -> None:
    with stream_to(echo) as streams, pytest.raises(Unimplemented):
        ask(Streams(streams.connection, "Other", deadlines=CallDeadlines()), b"a")


def test_close_ends_the_use_under_way_with_cancelled() -> None:
    outcome: list[type[BaseException]] = []
    came = threading.Event()

    def silent(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        came.set()
        yield from requests

    with stream_to(silent) as streams:

        def wait() -> None:
            try:
                ask(streams, b"a")
            except Cancelled as error:
                outcome.append(type(error))

        thread = threading.Thread(target=wait)
        thread.start()
        assert came.wait(20)
        streams.close()
        thread.join(20)
        assert outcome == [Cancelled]


def test_request_and_its_answer_have_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_stream, "open_stream", _OPEN_STREAM)
    num_events = [0]
    there = client_stream._DirectStream._take_event

    def counted(stream: client_stream._DirectStream) -> None:
        num_events[0] += 1
        there(stream)

    def ask_once(use: LongLivedStream) -> bytes:
        use.stream.request(b"x")
        return use.stream.answer()

    with stream_to(echo) as streams:
        streams.use(ask_once, timeout_s=20, awaited="an answer")
        streams.use(ask_once, timeout_s=20, awaited="an answer")  # by now the stream has begun
        monkeypatch.setattr(client_stream._DirectStream, "_take_event", counted)
        for _ in range(10):
            streams.use(ask_once, timeout_s=20, awaited="an answer")
        assert num_events == [10]
        monkeypatch.undo()


def test_grpcio_has_what_the_direct_stream_needs() -> None:
    with stream_to(echo) as streams:
        stream: Stream = _OPEN_STREAM(streams.connection.channel, "/S/M")
        assert isinstance(stream, client_stream._DirectStream)
        stream.end()


def test_deadlines_take_the_nearest_first() -> None:
    class Call:
        def __init__(self) -> None:
            self.has_expired = threading.Event()

        def expire(self) -> None:
            self.has_expired.set()

    deadlines, late, soon, ended = CallDeadlines(), Call(), Call(), Call()
    deadlines.begin(late, timeout_s=1000)
    number = deadlines.begin(ended, timeout_s=0.02)
    deadlines.end(number)
    deadlines.begin(soon, timeout_s=0.02)
    wait_until(soon.has_expired.is_set, what="the nearest deadline")
    assert not late.has_expired.is_set() and not ended.has_expired.is_set()
    deadlines.close()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"LOCKSTEP_KEEP_MEMORY": "1"}, True),
        ({"LOCKSTEP_KEEP_MEMORY": "0"}, False),
        ({"MALLOC_TRIM_THRESHOLD_": "1"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"}, False),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, True),
    ],
)
def test_memory_is_kept_unless_the_environment_forbids_it(environment: dict[str, str], expected: bool) -> None:
    assert is_allowed(environment) is expected


def test_asking_twice_to_keep_freed_memory_changes_nothing() -> None:
    assert keep_freed_memory() == keep_freed_memory()


# A stream whose first message is still on its way when the program ends, which takes its last event only then.
ENDING = """
import threading
import grpc
from ps_protocol.rpc import client_stream

there = client_stream._DirectStream._take_last_events
def late(stream):
    threading.main_thread().join()
    there(stream)
    print("taken", flush=True)
client_stream._DirectStream._take_last_events = late

stream = client_stream._DirectStream(grpc.insecure_channel("unix:/nowhere.sock"), "/a/b", ())
stream.send(b"message")
stream.end()
"""


def test_a_process_ends_after_the_last_events_of_its_streams() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout) == (0, "taken\n"), ended.stderr
