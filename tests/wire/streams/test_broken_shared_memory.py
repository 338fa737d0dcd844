"""A worker beside a server with broken shared memory: no crash, no endless wait, and no use of impossible numbers."""

import contextlib
import fcntl
import os
import random
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps_protocol.errors import ContributionMissing, MalformedMessage
from ps_protocol.model.layout import Segments
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import PushResult, ReadRequest, ShardStatusRequest
from ps_protocol.rpc.memory import SharedMemory
from ps_protocol.shared_memory import segment as memory_segments
from ps_protocol.shared_memory import words
from ps_protocol.shared_memory.segment import map_segment
from ps_protocol.shared_memory.words import SegmentKind, segment_bytes
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.config import ParameterServerConfig
from ps_server.contributions.shared_buffers import SharedBuffer, SharedBuffers
from tests.support.network.tampering import Tampering
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import EPOCH, MIXED, Trainer, open_server
from tests.support.repository import ROOT

pytestmark = pytest.mark.skipif(not memory_segments.boot_id(), reason="this system has no memory that can be shared")

Answer = Callable[[pb.ShareMemoryResponse, int], list[pb.ShareMemoryResponse]]
STEPS = tuple(position + words.STEP for position in words.ARENA_AT)


@contextlib.contextmanager
def sharing(answer: Answer) -> Iterator[tuple[Trainer, CommandedShard, SharedMemory]]:
    """A trainer at a real server, and a worker for which what the server says of its memory goes through `answer`."""

    def change(method: str, message: bytes, number: int) -> list[bytes]:
        if method != "ShareMemory":
            return [message]
        return [one.SerializeToString() for one in answer(pb.ShareMemoryResponse.FromString(message), number)]

    with (
        open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as server,
        contextlib.closing(CommandedShard(server.address)) as shard,
        Tampering(server.address, change) as between,
    ):
        trainer = Trainer(shard)
        trainer.create(1.0)
        own = CommandedShard(between.address)
        with contextlib.closing(own):
            yield trainer, own, own.share(epoch=EPOCH, worker=0, incarnation=1, layout=MIXED)


def with_words(changes: dict[int, int]) -> Answer:
    """Offers a copy of the variables with other numbers in its header, which the server does not write."""
    descriptor = os.memfd_create(f"{memory_segments.NAME_PREFIX}broken", os.MFD_ALLOW_SEALING)

    def answer(response: pb.ShareMemoryResponse, number: int) -> list[pb.ShareMemoryResponse]:
        if number == 1:
            offered = response.offer.segments[0]
            content = bytearray(Path(f"/proc/{response.offer.pid}/fd/{offered.descriptor}").read_bytes())
            for position, value in changes.items():
                struct.pack_into("<Q", content, 8 * position, value)
            os.pwrite(descriptor, content, 0)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            # Both are in this process.
            offered.descriptor = descriptor
        return [response]

    return answer


@pytest.mark.parametrize("changes", [{words.EPOCH: 0}, dict.fromkeys(STEPS, words.NO_STEP), dict.fromkeys(STEPS, 7)])
def test_memory_that_differs_from_its_servers_answers_is_given_up(changes: dict[int, int]) -> None:
    """The worker would look again and again, and each time ask the server, which says that all is well."""
    with sharing(with_words(changes)) as (trainer, shard, memory):
        request = ReadRequest(epoch=EPOCH, step=0, layout_hash=MIXED.hash)
        assert memory.view(request, ask=shard.read) is None
        assert not memory.is_open
        into = np.zeros(MIXED.nbytes, np.uint8)
        assert shard.read(request, Segments([into])) == 0
        np.testing.assert_array_equal(into, trainer.arena(1.0))
        assert shard.push_gradients(trainer.header(), Segments([trainer.arena(1.0)])).result is PushResult.STAGED


@pytest.mark.parametrize("step", [(1 << 62) + 1, 1 << 63, (1 << 64) - 2])
def test_an_impossible_step_in_shared_memory_is_not_used(step: int) -> None:
    with sharing(with_words(dict.fromkeys(STEPS, step))) as (_, shard, _):
        into = np.zeros(MIXED.nbytes, np.uint8)
        assert shard.read(ReadRequest(epoch=EPOCH, step=None, layout_hash=MIXED.hash), Segments([into])) == 0


def granted_at_once(response: pb.ShareMemoryResponse, number: int) -> list[pb.ShareMemoryResponse]:
    return [pb.ShareMemoryResponse(grant=pb.MemoryGrant(num_buffers=1))]


def offered_without_end(response: pb.ShareMemoryResponse, number: int) -> list[pb.ShareMemoryResponse]:
    response.offer.segments.extend([response.offer.segments[-1]] * 100_000)
    return [response]


@pytest.mark.parametrize(
    ("answer", "words_of_it"),
    [(granted_at_once, "has offered none for the variables"), (offered_without_end, "offers 100002 segments of memory, 2 were requested")],
)
def test_shared_memory_that_was_not_requested_is_refused(answer: Answer, words_of_it: str) -> None:
    with pytest.raises(MalformedMessage, match=words_of_it), sharing(answer):
        pass


def test_a_wish_for_more_memory_that_is_not_answered_holds_its_worker_up_for_less_than_two_seconds() -> None:
    with sharing(lambda response, number: [response] if number <= 2 else []) as (trainer, shard, memory):
        arena = memory.gradients()
        assert arena is not None
        shard.push_gradients(trainer.header(), Segments([arena]))
        began = time.monotonic()
        # The one buffer is under way.
        assert memory.gradients() is None
        assert time.monotonic() - began < 2
        assert shard.push_gradients(trainer.header(), Segments([trainer.arena(1.0)])).result is PushResult.STAGED


_CUT_OFF = """
import fcntl, os
from ps_protocol.rpc.memory import SharedMemory
from ps_protocol.shared_memory import segment
from ps_protocol.shared_memory.words import SegmentKind, segment_bytes

size = segment_bytes(100, kind=SegmentKind.GRADIENTS)
descriptor = os.memfd_create(f"{segment.NAME_PREFIX}cut", os.MFD_ALLOW_SEALING)
os.ftruncate(descriptor, size)
real = os.fstat

def cut(own):
    found = real(own)
    try:
        os.ftruncate(descriptor, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except PermissionError:
        pass
    return found

os.fstat = cut
try:
    segment.map_segment(pid=os.getpid(), descriptor=descriptor, num_bytes=size, kind=SegmentKind.GRADIENTS, arena_bytes=100)
except OSError as error:
    print(error)
"""


def test_memory_that_is_cut_off_while_it_is_looked_at_does_not_kill_the_worker() -> None:
    """Its size is looked at, it is cut off, and then sealed: to read there would be a SIGBUS."""
    ended = subprocess.run([sys.executable, "-c", _CUT_OFF], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "is not sealed against being cut off" in ended.stdout


def test_a_pipe_in_the_place_of_memory_does_not_make_the_worker_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes that place after its name has been looked at; to open it for reading would wait for a writer."""
    reading, writing = os.pipe()
    os.close(writing)
    monkeypatch.setattr(os, "readlink", lambda path: f"/memfd:{memory_segments.NAME_PREFIX}gone (deleted)")
    kind = SegmentKind.VARIABLES
    try:
        with pytest.raises(OSError, match="Invalid argument"):
            map_segment(pid=os.getpid(), descriptor=reading, num_bytes=segment_bytes(100, kind=kind), kind=kind, arena_bytes=100)
    finally:
        os.close(reading)


class Changing:
    """A header whose worker writes another step into it each time that one has been read."""

    def __init__(self, words_of_it: dict[int, int]) -> None:
        self._words = words_of_it
        self._num_reads = 0

    def __getitem__(self, position: int) -> int:
        if position == words.OF_STEP:
            self._num_reads += 1
            return 0 if self._num_reads == 1 else (1 << 64) - 1
        return self._words.get(position, 0)


def test_a_step_that_a_worker_changes_after_it_was_checked_is_not_used() -> None:
    header: Any = Changing({words.SEQUENCE: 1, words.OF_EPOCH: EPOCH})
    buffer = SharedBuffer(np.zeros(64, np.uint8), header, worker=0, incarnation=1, epoch=EPOCH)
    buffers = SharedBuffers(release=lambda _: None)
    buffers.add([buffer])
    found = buffers.find(PushId(worker=0, incarnation=1, sequence=1))
    assert found is not None and found[1] == 0


def test_a_worker_that_overwrites_its_buffer_all_the_time_harms_no_other() -> None:
    """Header and gradients, also while they are applied; the others' contributions count as they are."""
    with (
        open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as server,
        contextlib.closing(CommandedShard(server.address)) as plain,
    ):
        trainer = Trainer(plain)
        trainer.create(1.0)
        with contextlib.closing(CommandedShard(server.address)) as scribbler:
            memory = scribbler.share(epoch=EPOCH, worker=5, incarnation=1, layout=MIXED, num_buffers=2)
            buffers, is_over = memory._buffers._buffers, threading.Event()

            def scribble() -> None:
                chance, noise = random.Random(0), np.random.default_rng(0)
                while not is_over.is_set():
                    for buffer in buffers:
                        for position in (*range(words.SEQUENCE, words.NUM_PUSHES + 1), words.DONE, words.CLOSED):
                            buffer.words[position] = chance.choice([0, 1, 2, EPOCH, chance.getrandbits(64), (1 << 64) - 1])
                        buffer.memory[:] = noise.integers(0, 256, buffer.memory.size, np.uint8)

            thread = threading.Thread(target=scribble)
            thread.start()
            try:
                for step in range(40):
                    header = trainer.header(1, step=step)
                    trainer.push(header, trainer.arena(1.0))
                    with contextlib.suppress(ContributionMissing):
                        # Its own may be there at that moment.
                        trainer.apply(PushId(worker=5, incarnation=1, sequence=1), step=step, without=())
                        continue
                    trainer.apply(header.push_id, step=step)
                    trainer.shard.call(ShardStatusRequest())
            finally:
                is_over.set()
                thread.join()
        assert trainer.shard.call(ShardStatusRequest()).step == 40
        other = trainer.header(1, step=40)
        before = trainer.read()[1]
        trainer.push(other, trainer.arena(0.0))
        trainer.apply(other.push_id, step=40)
        np.testing.assert_array_equal(trainer.read()[1], before)
