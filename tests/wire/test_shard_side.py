"""What the chief does at shards for its coordinator: each wish ends in its events, an older epoch's in none, another chief's in nothing."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from chief import events as ev
from chief import recovery_events as rec
from chief.checkpoint_store import CheckpointStore
from chief.shard_side import ShardSide
from ps_protocol.checkpoint import ChiefRecord
from ps_protocol.checkpoint_local import LocalStorage
from ps_protocol.chief import DEFAULT_POLICY
from ps_protocol.codec_record import pack_record
from ps_protocol.errors import DataLoss, EpochMismatch, PsError, StorageFull, Superseded, TrainingFailed, Unavailable
from ps_protocol.layout import Layout
from ps_protocol.optimizer_spec import OptimizerSpec, constant
from ps_protocol.shard import Adoption, PushId, ShardSettings, ShardSpec
from tests.wire.test_chief_runner import FakeLink

APPLY = ev.ApplyStep(epoch=1, step=3, contributors=(PushId(worker=0, incarnation=1, sequence=1),))
SAVE = rec.SaveStep(epoch=1, step=3, tag="step-000000003")
RECORD = ChiefRecord(model=None, policy=DEFAULT_POLICY, num_rollbacks=4)
SGD = OptimizerSpec(name="sgd", learning_rate=constant(0.1))


def adopting(epoch: int = 1) -> rec.AdoptShards:
    return rec.AdoptShards(epoch=epoch, chief_incarnation=5)


def restoring(epoch: int = 2) -> rec.RestoreShards:
    return rec.RestoreShards(
        epoch=epoch,
        chief_incarnation=5,
        tag="step-000000003",
        manifest_sha256="ab",
        specs=tuple(ShardSpec(epoch=epoch, shard=index, layout=Layout(()), optimizer=SGD, initial_step=3) for index in range(2)),
        settings=ShardSettings(epoch=epoch, chief_incarnation=5, version=0, step=3),
    )


class Scene:
    """A shard side over two fake shards, and what it has reported."""

    def __init__(self, place: Path | None = None) -> None:
        self.links = [FakeLink(index) for index in range(2)]
        self.events: list[ev.Event] = []
        self.defects: list[BaseException] = []
        self.superseded: list[str] = []
        self.failures: list[PsError] = []
        self.now = 100.0
        store = None if place is None else CheckpointStore(LocalStorage(place), cluster="lockstep")
        self.side = ShardSide(
            self.links,
            store=store,
            report=self.events.append,
            on_defect=self.defects.append,
            on_superseded=self.superseded.append,
            clock=lambda: self.now,
        )

    def begin(self, *, is_takeover: bool = False) -> None:
        self.side.begin(chief_address="host-c:1", is_takeover=is_takeover, on_failure=self.failures.append)

    def all_of(self, *kinds: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    async def one_of(self, *kinds: type) -> Any:
        async with asyncio.timeout(10):
            while not (found := self.all_of(*kinds)):
                await asyncio.sleep(0)
        return found[0]

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)


def play(act: Callable[[Scene], Coroutine[Any, Any, None]], place: Path | None = None) -> None:
    async def run() -> None:
        scene = Scene(place)
        try:
            await act(scene)
        finally:
            await scene.side.cancel_all()
            await scene.side.close()
        assert not scene.defects

    asyncio.run(run())


def test_shards_are_looked_at_before_anything_is_done_to_them() -> None:
    async def act(scene: Scene) -> None:
        scene.links[1].step, scene.links[1].epoch = 12, 3
        scene.begin()
        found = await scene.one_of(rec.ShardsFound)
        assert [(one.step, one.epoch, one.process_incarnation) for one in found.findings] == [(None, 0, 7), (12, 3, 7)]
        assert [link.chief_incarnation for link in scene.links] == [0, 0]

    play(act)


def test_a_record_is_reported_before_the_adoptions_and_the_newest_one() -> None:
    async def act(scene: Scene) -> None:
        scene.begin()
        old = dataclasses.replace(RECORD, num_rollbacks=1)
        scene.links[0].adoption = Adoption(step=4, layout_hash="a", record=pack_record(RECORD), record_version=9)
        scene.links[1].adoption = Adoption(step=4, layout_hash="b", record=pack_record(old), record_version=8)
        scene.side.carry_out(adopting())
        await scene.one_of(ev.ShardAdopted)
        found, *adopted = scene.all_of(rec.RecordFound, ev.ShardAdopted)
        assert found.record == RECORD
        assert [(one.shard, one.adoption) for one in adopted] == [(index, link.adoption) for index, link in enumerate(scene.links)]
        assert [link.chief_address for link in scene.links] == ["host-c:1", "host-c:1"]

    play(act)


def test_a_record_that_cannot_be_read_is_done_without() -> None:
    async def act(scene: Scene) -> None:
        scene.links[0].adoption = Adoption(step=4, layout_hash="a", record=b"\xff\xff", record_version=9)
        scene.side.carry_out(adopting())
        await scene.one_of(ev.ShardAdopted)
        assert not scene.all_of(rec.RecordFound)

    play(act)


def test_a_living_chief_keeps_its_shards() -> None:
    async def act(scene: Scene) -> None:
        scene.links[1].chief_incarnation, scene.links[1].chief_heard_ago_s, scene.links[1].chief_address = 4, 0.3, "host-o:7"
        scene.begin()
        await scene.settle()
        assert not scene.events
        scene.now += 10.0
        async with asyncio.timeout(10):
            while not scene.failures:
                await asyncio.sleep(0.01)
        assert isinstance(scene.failures[0], TrainingFailed)
        for words in ("ps 1 at host-p:5001 obeys another chief at host-o:7 (incarnation 4)", "heard 0.3 s ago", "--takeover"):
            assert words in scene.failures[0].message

    play(act)


@pytest.mark.parametrize(("heard_ago_s", "is_takeover"), [(0.3, True), (2.6, False)])
def test_a_silent_chief_or_one_to_be_replaced_loses_them(heard_ago_s: float, is_takeover: bool) -> None:
    async def act(scene: Scene) -> None:
        scene.links[1].chief_incarnation, scene.links[1].chief_heard_ago_s = 4, heard_ago_s
        scene.begin(is_takeover=is_takeover)
        assert (await scene.one_of(rec.ShardsFound)).findings[1].chief_incarnation == 4

    play(act)


def test_an_applied_step_is_reported_with_its_epoch() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        scene.side.carry_out(APPLY)
        assert await scene.one_of(ev.StepApplied) == ev.StepApplied(step=3, epoch=1)
        assert [link.applied[0].chief_incarnation for link in scene.links] == [5, 5]

    play(act)


def test_another_epoch_gives_up_what_is_under_way_without_a_report() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.one_of(ev.ShardAdopted)
        scene.links[0].hangs |= {"apply_step", "save"}
        scene.side.carry_out(APPLY)
        scene.side.carry_out(SAVE)
        await scene.one_of(rec.StepCopied)
        scene.events.clear()
        scene.side.carry_out(restoring())
        assert await scene.one_of(rec.ShardsRestored) == rec.ShardsRestored(epoch=2, tag=SAVE.tag, process_incarnations=(7, 7))
        scene.links[0].never.set()
        await scene.settle()
        assert not scene.all_of(ev.StepApplied, ev.ShardFailed, rec.StepSaved, rec.SaveFailed)
        assert not scene.side.is_saving
        assert [link.epoch for link in scene.links] == [2, 2]

    play(act)


def test_a_wish_of_an_older_epoch_is_not_begun() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting(epoch=2))
        scene.side.carry_out(APPLY)
        await scene.settle()
        assert not any(link.applied for link in scene.links)

    play(act)


def test_a_step_is_copied_everywhere_before_it_is_saved_anywhere() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        scene.links[1].errors["begin_save"] = [Unavailable("busy")]
        scene.side.carry_out(SAVE)
        saved = await scene.one_of(rec.StepSaved)
        copied, _ = scene.all_of(rec.StepCopied, rec.StepSaved)
        assert (copied.tag, saved.tag) == (SAVE.tag, SAVE.tag)
        assert [file.shard for file in saved.files] == [0, 1]
        assert {request.num_shards for link in scene.links for request in link.saved} == {2}

    play(act)


def test_a_save_that_fails_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        storage = LocalStorage(tmp_path)
        with storage.create(SAVE.tag, "ps-0", num_bytes=1) as file:
            file.write(b"x")
        scene.side.carry_out(adopting())
        scene.links[1].errors["save"] = [StorageFull("need 1 GiB")]
        scene.side.carry_out(SAVE)
        failed = await scene.one_of(rec.SaveFailed)
        assert (failed.tag, failed.is_full) == (SAVE.tag, True)
        assert "need 1 GiB" in failed.why
        assert storage.stored() == ()

    play(act, tmp_path)


def test_a_shard_that_restarts_while_it_is_brought_back_is_brought_back_again() -> None:
    async def act(scene: Scene) -> None:
        link = scene.links[1]
        link.hangs.add("restore")
        scene.side.carry_out(restoring())
        await scene.settle()
        link.process_incarnation, link.epoch = 8, 0
        link.errors["restore"] = [EpochMismatch("no chief has adopted it since it started")]
        link.hangs.clear()
        link.never.set()
        restored = await scene.one_of(rec.ShardsRestored, rec.RestoreFailed)
        assert restored.process_incarnations == (7, 8)
        assert link.epoch == 2

    play(act)


@pytest.mark.parametrize(("error", "is_damaged"), [(DataLoss("ps-1: its SHA-256 differs"), True), (StorageFull("no memory"), False)])
def test_a_shard_that_cannot_be_brought_back_says_why(error: PsError, is_damaged: bool) -> None:
    async def act(scene: Scene) -> None:
        scene.links[1].always["restore"] = error
        scene.side.carry_out(restoring())
        failed = await scene.one_of(rec.RestoreFailed)
        assert (failed.epoch, failed.tag, failed.is_damaged) == (2, SAVE.tag, is_damaged)
        assert failed.why == f"ps 1 at host-p:5001: {error.message}"

    play(act)


@pytest.mark.parametrize("wish", [adopting(), restoring(), SAVE, APPLY], ids=lambda wish: type(wish).__name__)
def test_a_superseded_chief_is_told_so_and_reports_nothing(wish: Any) -> None:
    async def act(scene: Scene) -> None:
        scene.side.authority.epoch, scene.side.authority.chief_incarnation = 1, 5
        error = Superseded("chief incarnation 6 has adopted it, you are 5; end this chief")
        method = {ev.ApplyStep: "apply_step", rec.SaveStep: "begin_save"}.get(type(wish), "adopt")
        scene.links[1].always[method] = error
        scene.side.carry_out(wish)
        async with asyncio.timeout(10):
            while not scene.superseded:
                await asyncio.sleep(0)
        await scene.settle()
        assert "chief incarnation 6" in scene.superseded[0]
        assert not scene.all_of(
            ev.ShardAdopted, ev.StepApplied, ev.ShardFailed, rec.StepCopied, rec.SaveFailed, rec.ShardsRestored, rec.RestoreFailed
        )

    play(act)


def test_shards_of_another_chief_are_not_ended() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.one_of(ev.ShardAdopted)
        scene.links[1].chief_incarnation = 6
        await scene.side.shut_down_all(reason="told to", within_s=5.0)
        assert [link.ended_because for link in scene.links] == ["told to", ""]

    play(act)


def test_a_record_that_is_overtaken_is_given_up() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.one_of(ev.ShardAdopted)
        scene.links[0].hangs.add("keep_record")
        scene.side.carry_out(rec.KeepRecord(epoch=1, version=1, record=RECORD))
        await scene.settle()
        scene.side.carry_out(rec.KeepRecord(epoch=1, version=2, record=RECORD))
        scene.links[0].hangs.clear()
        await scene.settle()
        assert [*scene.links[0].records] == [2]
        assert [*scene.links[1].records] == [1, 2]

    play(act)


def test_without_a_place_there_is_no_checkpoint() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(rec.FindCheckpoint())
        assert await scene.one_of(rec.CheckpointFound) == rec.CheckpointFound(checkpoint=None)

    play(act)


def test_what_was_never_finished_is_reported_as_skipped(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        with LocalStorage(tmp_path).create(SAVE.tag, "ps-0", num_bytes=1) as file:
            file.write(b"x")
        scene.side.carry_out(rec.FindCheckpoint())
        found = await scene.one_of(rec.CheckpointFound)
        assert found.checkpoint is None
        assert [tag for tag, _ in found.skipped] == [SAVE.tag]
        assert found.skipped[0][1].startswith("incomplete")

    play(act, tmp_path)


def test_an_empty_place_is_no_cause_for_worry(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(rec.FindCheckpoint())
        assert await scene.one_of(rec.CheckpointFound) == rec.CheckpointFound(checkpoint=None)

    play(act, tmp_path)
