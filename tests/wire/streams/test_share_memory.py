"""ShareMemory with real segments and raw messages: what is granted, what is refused, and that nothing is left of either."""

import contextlib
import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ps_protocol.errors import Cancelled, ContributionMissing, StepGone, StepNotReady, Superseded
from ps_protocol.model.layout import Segments
from ps_protocol.model.variables import Array
from ps_protocol.roles.contribution import contributions_named
from ps_protocol.roles.shard import AdoptRequest, Metric, PushResult, ReadMetricsRequest, ReadRequest, ShardStatusRequest
from ps_protocol.rpc.memory import MemoryNotShared, SharedMemory
from ps_protocol.shared_memory import segment as memory_segments
from ps_protocol.shared_memory import words
from ps_protocol.shared_memory.segment import NAME_PREFIX, SegmentMaker
from ps_protocol.v1 import parameter_service_pb2 as pb
from ps_server.config import ParameterServerConfig
from ps_server.server import ParameterServer
from tests.support.chief.eras import fence
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.raw_shard import RawShard
from tests.support.parameter_servers.shards import EPOCH, MIXED, Trainer, layout_of, open_server, variable
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not memory_segments.boot_id(), reason="this system has no memory that can be shared")


@pytest.fixture
def server() -> Iterator[ParameterServer]:
    with open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as started:
        yield started


@pytest.fixture
def trainer(server: ParameterServer) -> Iterator[Trainer]:
    with contextlib.closing(CommandedShard(server.address)) as shard:
        trainer = Trainer(shard)
        trainer.create(1.0)
        yield trainer


@contextlib.contextmanager
def sharing(
    server: ParameterServer, worker: int = 0, *, incarnation: int = 1, num_buffers: int = 1
) -> Iterator[tuple[CommandedShard, SharedMemory]]:
    with contextlib.closing(CommandedShard(server.address)) as shard:
        yield shard, shard.share(epoch=EPOCH, worker=worker, incarnation=incarnation, layout=MIXED, num_buffers=num_buffers)


def view(shard: CommandedShard, memory: SharedMemory, *, step: int) -> Array | None:
    return memory.view(ReadRequest(epoch=EPOCH, step=step, layout_hash=MIXED.hash), ask=shard.read)


def claim(**changes: object) -> pb.MemoryClaim:
    fields = {
        "epoch": EPOCH,
        "worker": 0,
        "incarnation": 1,
        "layout_hash": MIXED.hash,
        "num_buffers": 1,
        "boot_id": memory_segments.boot_id(),
    }
    return pb.MemoryClaim(**{**fields, **changes})  # type: ignore[arg-type]


def say(**message: object) -> bytes:
    return pb.ShareMemoryRequest(**message).SerializeToString()  # type: ignore[arg-type]


def num_mapped() -> int:
    """Segments of a shard that this process maps."""
    gc.collect()
    return sum(f"/memfd:{NAME_PREFIX}" in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())


def allocated(trainer: Trainer) -> int:
    return trainer.shard.call(ShardStatusRequest()).report.allocated_bytes


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([b"\xff\xff"], "MALFORMED_MESSAGE"),
        ([say(num_buffers=1)], "MALFORMED_MESSAGE"),
        ([], "MALFORMED_MESSAGE"),
        ([say(claim=claim(epoch=EPOCH + 1))], "EPOCH_MISMATCH"),
        ([say(claim=claim(layout_hash="another"))], "LAYOUT_MISMATCH"),
        ([say(claim=claim(incarnation=0))], "INVALID_SPEC"),
        ([say(claim=claim(boot_id="another host"))], "UNIMPLEMENTED"),
        ([say(claim=claim(boot_id=""))], "UNIMPLEMENTED"),
        ([say(claim=claim())], "TRUNCATED_STREAM"),
        ([say(claim=claim()), say(num_buffers=2)], "MALFORMED_MESSAGE"),
        ([say(claim=claim()), say(proof=pb.MemoryProof())], "INVALID_SPEC"),
        ([say(claim=claim()), say(proof=pb.MemoryProof(nonces=[b"x" * 16, b"y" * 16]))], "INVALID_SPEC"),
        ([say(claim=claim(num_buffers=0)), say(proof=pb.MemoryProof(nonces=[b""]))], "INVALID_SPEC"),
    ],
)
def test_wrong_claim_is_refused_and_takes_no_memory(server: ParameterServer, trainer: Trainer, messages: list[bytes], reason: str) -> None:
    before, mapped = allocated(trainer), num_mapped()
    with RawShard(server.address) as raw:
        assert raw.call("ShareMemory", *messages).reason == reason
    wait_until(lambda: allocated(trainer) == before, timeout_s=5, what="the memory is given back")
    wait_until(lambda: num_mapped() <= mapped, timeout_s=5, what="the segments are gone")  # and perhaps those of a test before
    assert trainer.shard.call(ShardStatusRequest()).report.num_sharing == 0
    assert trainer.train(0).step == 1


def test_slots_are_counted_and_given_back(server: ParameterServer, trainer: Trainer) -> None:
    before = allocated(trainer)
    with sharing(server, num_buffers=2):
        assert allocated(trainer) == before + 2 * MIXED.nbytes
        assert trainer.shard.call(ShardStatusRequest()).report.num_sharing == 1
    wait_until(lambda: allocated(trainer) == before, timeout_s=5, what="the memory is given back")
    assert trainer.shard.call(ShardStatusRequest()).report.num_sharing == 0


def test_wish_for_slots_without_end_is_cut_to_what_the_shard_holds(server: ParameterServer, trainer: Trainer) -> None:
    with sharing(server, num_buffers=1_000_000):
        assert allocated(trainer) == 2 * MIXED.nbytes * 2


def test_worker_may_not_write_the_variables(server: ParameterServer, trainer: Trainer) -> None:
    with sharing(server) as (shard, memory):
        found = view(shard, memory, step=0)
        assert found is not None and not found.flags.writeable
        with pytest.raises(ValueError, match=r"read-only|WRITEABLE"):
            found.flags.writeable = True
        np.testing.assert_array_equal(found, trainer.arena(1.0))


def test_view_of_a_step_that_is_not_there_says_which_are(server: ParameterServer, trainer: Trainer) -> None:
    with sharing(server) as (shard, memory):
        with pytest.raises(StepNotReady, match="the shard is at step 0"):
            view(shard, memory, step=1)
        trainer.train(0)
        trainer.train(1)
        with pytest.raises(StepGone, match="the shard is at step 2"):
            view(shard, memory, step=0)


def test_views_stay_the_same_two_and_readable_after_the_server_has_ended(trainer: Trainer) -> None:
    with open_server(ParameterServerConfig(index=0, address="127.0.0.1:0")) as other:
        own = Trainer(CommandedShard(other.address))
        own.create(1.0)
        with sharing(other) as (shard, memory):
            views = []
            for step in range(4):
                views.append(view(shard, memory, step=step))
                own.train(step, worker=1)
            last = view(shard, memory, step=4)
            assert views[0] is views[2] is last and views[1] is views[3]
        own.shard.close()
    assert last is not None
    np.testing.assert_array_equal(last, trainer.arena(1.0 - 0.5 * 4))


def test_pushed_memory_is_not_copied_and_comes_again(server: ParameterServer, trainer: Trainer) -> None:
    with sharing(server) as (_, memory):
        first = memory.gradients()
        for step in range(3):
            arena = memory.gradients()
            assert arena is not None and arena is first
            arena[:] = trainer.arena(2.0)
            header = trainer.header(step=step)
            assert memory.push(header, Segments([arena])) is not None
            trainer.apply(header.push_id, step=step)
        np.testing.assert_array_equal(trainer.read()[1], trainer.arena(1.0 - 3.0))


def test_padding_that_a_worker_fills_poisons_nothing(server: ParameterServer, trainer: Trainer) -> None:
    with sharing(server) as (shard, memory):
        arena = memory.gradients()
        assert arena is not None
        arena[:] = 255
        for index in range(len(MIXED.slices)):
            MIXED.view(arena, index)[...] = 1.0
        header = trainer.header()
        shard.push_gradients(header, Segments([arena]))
        trainer.apply(header.push_id)
    assert trainer.shard.call(ShardStatusRequest()).report.num_nonfinite == 0
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))


def test_copy_is_of_one_step_while_steps_are_made(server: ParameterServer) -> None:
    layout = layout_of(variable("w", (1 << 18,)))
    with contextlib.closing(CommandedShard(server.address)) as shard, ThreadPoolExecutor(1) as pool:
        trainer = Trainer(shard, layout)
        trainer.create(1.0)
        with contextlib.closing(CommandedShard(server.address)) as reader:
            reader.share(epoch=EPOCH, worker=0, incarnation=1, layout=layout, num_buffers=0)
            training = pool.submit(lambda: [trainer.train(step, worker=1) for step in range(60)])
            into, last = np.zeros(layout.nbytes, np.uint8), 0
            while not training.done():
                step = reader.read(ReadRequest(epoch=EPOCH, step=None, layout_hash=layout.hash), Segments([into]))
                assert set(np.unique(into.view(np.float32))) == {1.0 - 0.5 * step}
                assert step >= last
                last = step
            assert training.result()[-1].step == 60


def test_push_with_metrics_tells_only_of_its_slot(server: ParameterServer, trainer: Trainer) -> None:
    with sharing(server) as (shard, memory):
        header = trainer.header(metrics={"loss": Metric(value=2.0)})
        assert memory.push(header, Segments([trainer.arena(1.0)])) is None
        assert shard.push_gradients(header, Segments([trainer.arena(1.0)])).result is PushResult.STAGED
        trainer.apply(header.push_id)
        assert [(cell.name, cell.total) for cell in trainer.shard.call(ReadMetricsRequest(epoch=EPOCH))] == [("loss", 2.0)]
        np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))


def test_contribution_counts_even_if_its_worker_goes(server: ParameterServer, trainer: Trainer) -> None:
    before = allocated(trainer)
    with sharing(server) as (shard, _):
        header = trainer.header()
        shard.push_gradients(header, Segments([trainer.arena(1.0)]))
    wait_until(lambda: trainer.shard.call(ShardStatusRequest()).report.num_sharing == 0, timeout_s=5, what="the worker has gone")
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 1
    trainer.apply(header.push_id)
    np.testing.assert_array_equal(trainer.read()[1], trainer.arena(0.5))
    assert allocated(trainer) == before


def test_contribution_that_a_worker_withdraws_harms_no_other(server: ParameterServer, trainer: Trainer) -> None:
    with sharing(server) as (bad, memory):
        header, other = trainer.header(0), trainer.header(1)
        bad.push_gradients(header, Segments([trainer.arena(1.0)]))
        memory._buffers._buffers[0].words[words.SEQUENCE] = 0
        trainer.push(other)
        with pytest.raises(ContributionMissing) as caught:
            trainer.apply(header.push_id, other.push_id)
        assert contributions_named(caught.value.facts) == (header.push_id,)
        assert trainer.apply(other.push_id).step == 1


def test_later_incarnation_takes_the_earlier_ones_memory(server: ParameterServer, trainer: Trainer) -> None:
    with sharing(server, incarnation=1) as (earlier, memory), sharing(server, incarnation=2) as (later, _):
        wait_until(lambda: not memory.is_open, timeout_s=5, what="the earlier one has heard")
        assert later.push_gradients(trainer.header(incarnation=2), Segments([trainer.arena(1.0)])).result is PushResult.STAGED
        with pytest.raises(Superseded):
            earlier.push_gradients(trainer.header(incarnation=1), Segments([trainer.arena(1.0)]))
    with pytest.raises(Superseded), sharing(server, incarnation=1):
        pass


def test_new_epoch_ends_sharing(server: ParameterServer, trainer: Trainer) -> None:
    before = allocated(trainer)
    with sharing(server) as (shard, memory):
        shard.push_gradients(trainer.header(), Segments([trainer.arena(1.0)]))
        trainer.shard.call(AdoptRequest(fence=fence(EPOCH + 1, 9)))
        wait_until(lambda: not memory.is_open, timeout_s=5, what="the worker has heard")
        assert memory.gradients() is None
    assert (allocated(trainer), trainer.shard.call(ShardStatusRequest()).report.num_staged) == (before, 0)


def test_a_closed_shard_that_has_shared_memory_raises(server: ParameterServer, trainer: Trainer) -> None:
    with sharing(server) as (shard, _):
        pass
    with pytest.raises(Cancelled):
        shard.push_gradients(trainer.header(), Segments([trainer.arena(1.0)]))


def test_memory_that_cannot_be_mapped_leaves_the_connection_as_it_was(
    server: ParameterServer, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)  # of another space of process numbers
    with contextlib.closing(CommandedShard(server.address)) as shard:
        with pytest.raises(MemoryNotShared, match="cannot be mapped here") as caught:
            shard.share(epoch=EPOCH, worker=0, incarnation=1, layout=MIXED)
        assert caught.value.facts == {"same_host": "true"}
        assert shard.push_gradients(trainer.header(), Segments([trainer.arena(1.0)])).result is PushResult.STAGED


@pytest.mark.parametrize("boot_id", ["", "of another host"])
def test_a_caller_on_another_host_is_refused_shared_memory_with_the_reason(
    server: ParameterServer, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, boot_id: str
) -> None:
    monkeypatch.setattr(memory_segments, "boot_id", lambda: boot_id)
    with pytest.raises(MemoryNotShared) as caught, sharing(server):
        pass
    assert caught.value.facts == {"same_host": "false"}


def descriptors_of(suffix: str) -> list[Path]:
    """Descriptors of this process, of the server's side and the worker's, that lead to a segment whose name ends so."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(entry).removesuffix(" (deleted)")
            found += [entry] if f"memfd:{NAME_PREFIX}" in name and name.endswith(suffix) else []
    return found


def test_no_descriptor_leads_to_a_buffer_that_was_handed_over(server: ParameterServer, trainer: Trainer) -> None:
    before = num_mapped()
    with sharing(server, worker=7, num_buffers=2) as (shard, _):
        assert num_mapped() == before + 2 * 2 + 1  # both sides map two buffers, and the worker the variables
        assert descriptors_of("-w7") == []
        assert descriptors_of("-variables")  # for the next worker
        assert shard.push_gradients(trainer.header(7), Segments([trainer.arena(1.0)])).result is PushResult.STAGED


def test_process_that_opened_a_buffer_before_cannot_write_it_after() -> None:
    segment = SegmentMaker(cluster="test", index=0, process_incarnation=1).gradients(4096, worker=0)
    with open(f"/proc/self/fd/{segment.descriptor}", "r+b", buffering=0) as stranger:
        segment.hand_over()
        assert segment.descriptor is None
        segment.arenas[0][:] = 7
        with pytest.raises(PermissionError):
            mmap.mmap(stranger.fileno(), 0)
        with pytest.raises(PermissionError):
            stranger.write(b"forged")
        with pytest.raises(PermissionError):
            stranger.truncate(0)
        assert set(np.asarray(segment.arenas[0])) == {7}


def test_variables_cannot_be_written_through_their_descriptor(server: ParameterServer, trainer: Trainer) -> None:
    with sharing(server):
        for path in descriptors_of("-variables"):
            with path.open("r+b", buffering=0) as stranger:
                with pytest.raises(PermissionError):
                    mmap.mmap(stranger.fileno(), 0)
                with pytest.raises(PermissionError):
                    stranger.write(b"forged")


def test_buffer_whose_seals_a_stranger_has_set_is_not_used(
    server: ParameterServer, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = allocated(trainer)
    make = SegmentMaker.gradients

    def sealed(self: SegmentMaker, arena_bytes: int, *, worker: int) -> memory_segments.SharedSegment:
        segment = make(self, arena_bytes, worker=worker)
        assert segment.descriptor is not None
        fcntl.fcntl(segment.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        return segment

    monkeypatch.setattr(SegmentMaker, "gradients", sealed)
    with pytest.raises(MemoryNotShared, match="cannot be sealed"), sharing(server):
        pass
    wait_until(lambda: allocated(trainer) == before, timeout_s=5, what="the memory is given back")


def test_segment_of_another_kind_is_not_believed() -> None:
    segment = SegmentMaker(cluster="odd / name", index=0, process_incarnation=1).gradients(100, worker=0)
    assert segment.descriptor is not None
    kind = words.SegmentKind.GRADIENTS
    good = {"pid": os.getpid(), "descriptor": segment.descriptor, "num_bytes": segment.num_bytes, "kind": kind, "arena_bytes": 100}
    assert memory_segments.map_segment(**good).nonce == segment.nonce  # type: ignore[arg-type]
    for changes in (
        {"num_bytes": 4096},
        {"arena_bytes": 101},
        {"kind": words.SegmentKind.VARIABLES},
        {"descriptor": 0},
        {"pid": 0},
    ):
        with pytest.raises(OSError, match=r"/proc|No such"):
            memory_segments.map_segment(**{**good, **changes})  # type: ignore[arg-type]
