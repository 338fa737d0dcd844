"""Sends bytes from this process to another, encrypted or not: the sender, and as a program the receiver. Run by `tls_bytes`.

Each connection has a thread and a blocking socket with a timeout, so nothing here can wait for ever.
"""

import contextlib
import dataclasses
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from ps_protocol.process.memory import keep_freed_memory
from ps_protocol.rpc.channel import CHANNEL_OPTIONS

TIMEOUT_S = 60.0
_METHOD = "/bench.Bytes/Send"
_HOST = "localhost"
_FRAME_BYTES = 1 << 20
# Transfers before the measured one: they allocate the memory for later ones, which takes a third of gRPC's time.
_NUM_WARM = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to send bytes. `write_bytes`: the number of bytes per write to a socket."""

    title: str
    is_grpc: bool = False
    is_encrypted: bool = True
    num_connections: int = 1
    write_bytes: int = 1 << 20

    def as_json(self) -> str:
        """Returns the way as JSON for the receiver's program."""
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Seconds from the first byte to the receiver's confirmation of the last, and CPU seconds."""

    seconds: float
    cpu_s: float

    def with_receiver(self, cpu_s: float) -> "Sent":
        """Returns a copy that includes the receiver's CPU seconds."""
        return dataclasses.replace(self, cpu_s=self.cpu_s + cpu_s)


def send(way: Way, num_bytes: int, *, port: int, files: Path) -> Sent:
    """Sends the bytes several times, and measures only the last time."""
    keep_freed_memory()
    content = np.ones(num_bytes, np.uint8).data
    parts = _parts(num_bytes, way.num_connections)
    with contextlib.ExitStack() as stack:
        if way.is_grpc:
            work = _grpc_sender(content, port=port, files=files, stack=stack)
        else:
            connections = [stack.enter_context(_connect(way, port=port, files=files)) for _ in parts]

            def send_part(index: int) -> None:
                part = content[parts[index]]
                for start in range(0, len(part), way.write_bytes):
                    connections[index].sendall(part[start : start + way.write_bytes])
                if not connections[index].recv(1):
                    raise ConnectionResetError("the receiver has closed a connection before it had everything")

            work = _in_threads(send_part, len(parts))
        for _ in range(_NUM_WARM):
            work()
        cpu_s, begin = time.process_time(), time.perf_counter()
        work()
        return Sent(seconds=time.perf_counter() - begin, cpu_s=time.process_time() - cpu_s)


def main() -> None:
    """Receives."""
    files, way, num_bytes = Path(sys.argv[1]), Way(**json.loads(sys.argv[2])), int(sys.argv[3])
    keep_freed_memory()
    # Touched, like memory that is used in every step.
    memory = np.ones(num_bytes, np.uint8).data
    if way.is_grpc:
        _receive_by_grpc(memory, files=files)
        return
    with socket.create_server((_HOST, 0)) as listening, contextlib.ExitStack() as stack:
        listening.settimeout(TIMEOUT_S)
        _say(port=listening.getsockname()[1])
        parts = _parts(num_bytes, way.num_connections)
        connections = [stack.enter_context(_accept(way, listening, files=files)) for _ in parts]

        def receive_part(index: int) -> None:
            rest = memory[parts[index]]
            while len(rest):
                count = connections[index].recv_into(rest)
                if not count:
                    raise ConnectionResetError("the sender has closed a connection before everything was there")
                rest = rest[count:]
            connections[index].sendall(b"x")

        receive = _in_threads(receive_part, len(parts))
        for _ in range(_NUM_WARM):
            receive()
        cpu_s = time.process_time()
        receive()
        _say(cpu_s=time.process_time() - cpu_s)
        # The sender reads the confirmation on each connection before this end closes it.
        for connection in connections:
            connection.recv(1)


def _parts(num_bytes: int, number: int) -> Sequence[slice]:
    ends = [num_bytes * index // number for index in range(number + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


def _in_threads(act: Callable[[int], None], number: int) -> Callable[[], None]:
    if number == 1:
        return lambda: act(0)

    def work() -> None:
        with ThreadPoolExecutor(number) as threads:
            for done in [threads.submit(act, index) for index in range(number)]:
                done.result()

    return work


def _connect(way: Way, *, port: int, files: Path) -> socket.socket:
    connection = socket.create_connection((_HOST, port), timeout=TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not way.is_encrypted:
        return connection
    import ssl  # imported here, because `--help` does not need it

    context = ssl.create_default_context(cafile=str(files / "ca.pem"))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context.wrap_socket(connection, server_hostname=_HOST)


def _accept(way: Way, listening: socket.socket, *, files: Path) -> socket.socket:
    connection = listening.accept()[0]
    connection.settimeout(TIMEOUT_S)
    if not way.is_encrypted:
        return connection
    import ssl

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(files / "all.pem", files / "all.key")
    return context.wrap_socket(connection, server_side=True)


def _grpc_sender(content: memoryview, *, port: int, files: Path, stack: contextlib.ExitStack) -> Callable[[], None]:
    credentials = grpc.ssl_channel_credentials((files / "ca.pem").read_bytes())
    channel = stack.enter_context(grpc.secure_channel(f"{_HOST}:{port}", credentials, options=CHANNEL_OPTIONS))
    grpc.channel_ready_future(channel).result(TIMEOUT_S)
    begin: Any = channel.stream_unary(_METHOD)

    def frames() -> Iterator[bytes]:
        for start in range(0, len(content), _FRAME_BYTES):
            yield bytes(content[start : start + _FRAME_BYTES])

    return lambda: begin(frames(), timeout=TIMEOUT_S)


def _receive_by_grpc(memory: memoryview, *, files: Path) -> None:
    is_over, ended_s = threading.Event(), list[float]()

    def receive(frames: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        received = 0
        for frame in frames:
            memory[received : received + len(frame)] = frame
            received += len(frame)
        ended_s.append(time.process_time())
        if len(ended_s) > _NUM_WARM:
            is_over.set()
        return b"x"

    handler = grpc.method_handlers_generic_handler("bench.Bytes", {"Send": grpc.stream_unary_rpc_method_handler(receive)})
    server = grpc.server(ThreadPoolExecutor(2), options=CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers((handler,))
    pair = (files / "all.key").read_bytes(), (files / "all.pem").read_bytes()
    port = server.add_secure_port(f"{_HOST}:0", grpc.ssl_server_credentials([pair]))
    server.start()
    _say(port=port)
    if is_over.wait(TIMEOUT_S):
        _say(cpu_s=ended_s[-1] - ended_s[-2])
    server.stop(grace=TIMEOUT_S).wait()


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
