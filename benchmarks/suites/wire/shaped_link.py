"""Makes a link with a limited rate between two network namespaces, and measures its throughput. Run by `shaped`, in namespaces of its own.

Knows `ip`, `tc`, a parameter server and its client; prints one JSON object a line.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Self, TypeVar

import numpy as np

from benchmarks.harness.arguments import parse_bytes
from chief.shards.link import GrpcShardLink
from ps_protocol.encodings.formats import FloatEncoding, encoded_nbytes
from ps_protocol.errors import PsError
from ps_protocol.model.layout import Layout, Segments, VariableSlice, aligned_bytes
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import Era, Fence
from ps_protocol.roles.shard import ApplyRequest, PushHeader, ShardSpec
from ps_protocol.rpc.shard import GrpcShard

_THERE, _HERE, _PORT, _START_S = "10.99.0.1", "10.99.0.2", 5000, 30.0
# The burst size, and the longest time in the queue.
_SHAPE = ("tbf", "burst", "64kb", "latency", "50ms", "rate")
_IN_PEER = ("ip", "netns", "exec", "peer")
Result = TypeVar("Result")
_ERA, _CHUNK_BYTES, _NUM_STEPS = Era(life=1, epoch=1), 1 << 20, 6
_FENCE = Fence(era=_ERA, chief_incarnation=1)


def make_link(mbit: int) -> None:
    """Makes the other namespace and the link to it. Raises CalledProcessError with the output of `ip` and `tc`."""
    rate = f"{mbit}mbit"
    for command in (
        ("mkdir", "-p", "/run/netns"),
        ("mount", "-t", "tmpfs", "none", "/run/netns"),
        ("ip", "link", "set", "lo", "up"),
        ("ip", "netns", "add", "peer"),
        ("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", "peer"),
        ("ip", "addr", "add", f"{_HERE}/24", "dev", "here"),
        ("ip", "link", "set", "here", "up"),
        (*_IN_PEER, "ip", "addr", "add", f"{_THERE}/24", "dev", "there"),
        (*_IN_PEER, "ip", "link", "set", "there", "up"),
        (*_IN_PEER, "ip", "link", "set", "lo", "up"),
        ("tc", "qdisc", "add", "dev", "here", "root", *_SHAPE, rate),
        (*_IN_PEER, "tc", "qdisc", "add", "dev", "there", "root", *_SHAPE, rate),
    ):
        subprocess.run(command, check=True, capture_output=True, text=True)


def main() -> None:
    """Measures, or runs the other end of a plain copy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, required=True)
    parser.add_argument("--bytes", type=parse_bytes, default=64 << 20)
    parser.add_argument("--only-try", action="store_true")
    parser.add_argument("--sink", action="store_true")
    options = parser.parse_args()
    if options.sink:
        _sink()
        return
    try:
        make_link(options.mbit)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd)}: {error.stderr.strip()}")
    if options.only_try:
        return
    _say("plain socket", "float32", up_s=_plain_copy(options.bytes), nbytes=options.bytes)
    for transport in ("sockets", "grpc"):
        for encoding, words in ((FloatEncoding.AS_IS, "float32"), (FloatEncoding.INT8_BLOCKS, "int8 up")):
            with _server() as address:
                _measure(address, transport, encoding, words, nbytes=options.bytes)


def _measure(address: str, transport: str, encoding: FloatEncoding, words: str, *, nbytes: int) -> None:
    variable = VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(nbytes // 4,))
    layout = Layout([VariableSlice(variable=variable, start=0, stop=variable.num_rows)])
    least = 1 if transport == "sockets" else None
    with (
        contextlib.closing(GrpcShard(address, index=0, least_socket_bytes=least, must_use_sockets=least is not None)) as shard,
        _Chief(address) as chief,
    ):
        spec = ShardSpec(epoch=1, shard=0, layout=layout, optimizer=OptimizerSpec(name="sgd", learning_rate=constant(0.5)))
        memory = Segments([aligned_bytes(layout.nbytes)])
        shard.create_variables(spec, memory)
        as_is = encoding is FloatEncoding.AS_IS
        sent = layout.nbytes if as_is else encoded_nbytes(layout, encoding)
        gradients = Segments([np.zeros(sent, np.uint8)])
        ups_s, downs_s = [], []
        for step in range(_NUM_STEPS):
            push_id = PushId(worker=0, incarnation=1, sequence=step + 1)
            header = PushHeader(
                era=_ERA, push_id=push_id, step=step, layout_hash=layout.hash, encoding=encoding, encoded_bytes=0 if as_is else sent
            )
            ups_s.append(_timed(partial(shard.push_gradients, header, gradients)))
            chief.apply(ApplyRequest(fence=_FENCE, step=step, contributors=(push_id,)))
            if as_is:
                downs_s.append(_timed(partial(shard.read_variables, memory, epoch=1, step=step + 1, layout_hash=layout.hash)))
        # The first transfer is slower: the kernel allocates its memory page by page meanwhile.
        down_s = statistics.median(downs_s[1:]) if downs_s else None
        _say(transport, words, up_s=statistics.median(ups_s[1:]), nbytes=sent, down_s=down_s, first_up_s=ups_s[0])


class _Chief:
    """A minimal chief: adopts a server, and makes it apply steps."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.Runner()
        self._link = GrpcShardLink(address, index=0, cluster="")

    def __enter__(self) -> Self:
        self._loop.run(self._link.adopt(_FENCE, timeout_s=_START_S))
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._link.close())
        self._loop.close()

    def apply(self, request: ApplyRequest) -> None:
        self._loop.run(self._link.apply_step(request, timeout_s=_START_S))


@contextlib.contextmanager
def _server() -> Iterator[str]:
    address = f"{_THERE}:{_PORT}"
    words = ("-m", "ps_server", "--index", "0", "--address", address, "--allow-insecure-network")
    with subprocess.Popen([*_IN_PEER, sys.executable, *words], stdout=sys.stderr) as process:
        try:
            with contextlib.closing(GrpcShard(address)) as shard:
                _insist(shard.status)
            yield address
        finally:
            process.terminate()


def _plain_copy(nbytes: int) -> float:
    words = ("-m", "benchmarks.suites.wire.shaped_link", "--mbit", "1", "--sink")
    with subprocess.Popen([*_IN_PEER, sys.executable, *words]) as process:
        try:
            connection = _insist(lambda: socket.create_connection((_THERE, _PORT)))
            with connection:
                return _timed(lambda: _send_all(connection, bytes(nbytes)))
        finally:
            process.wait()


def _send_all(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)


def _sink() -> None:
    with socket.create_server((_THERE, _PORT)) as listening, listening.accept()[0] as connection:
        memory = bytearray(_CHUNK_BYTES)
        while connection.recv_into(memory):
            pass
        connection.sendall(b"x")


def _insist(attempt: Callable[[], Result]) -> Result:
    until = time.monotonic() + _START_S
    while True:
        try:
            return attempt()
        except (OSError, PsError):
            if time.monotonic() > until:
                raise
            time.sleep(0.1)  # between two attempts to connect to a process that starts


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _say(transport: str, words: str, *, up_s: float, nbytes: int, down_s: float | None = None, first_up_s: float | None = None) -> None:
    figures = {"transport": transport, "encoding": words, "bytes": nbytes, "up_s": up_s, "down_s": down_s, "first_up_s": first_up_s}
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
