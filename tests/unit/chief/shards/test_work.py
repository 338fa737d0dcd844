"""The chief's work at shards: an instruction ends in its events, one of an older epoch in none, and one of another chief does nothing."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from chief.core import messages
from ps_protocol.checkpoint.storage import LocalStorage
from ps_protocol.errors import (
    DataLoss,
    EpochMismatch,
    InternalError,
    LimitExceeded,
    PsError,
    StorageFull,
    Superseded,
    TrainingFailed,
    Unauthenticated,
    Unavailable,
)
from ps_protocol.roles.shard import Adoption, RestoreProgress
from ps_protocol.wire.codec import RecordPacker
from tests.support.chief.chief_shards import APPLY, COPY, RECORD, WRITE, Scene, adopting, keeping, play, restoring
from tests.support.chief.eras import fence


def test_the_statuses_of_all_shards_are_read_before_any_shard_is_changed() -> None:
    async def act(scene: Scene) -> None:
        scene.links[1].step, scene.links[1].epoch = 12, 3
        scene.begin()
        found = await scene.one_of(messages.ShardsFound)
        assert [(one.step, one.fence.epoch, one.process_incarnation) for one in found.statuses] == [(None, 0, 7), (12, 3, 7)]
        assert [link.chief_incarnation for link in scene.links] == [0, 0]

    play(act)


@pytest.mark.parametrize("is_of_connection", [True, False])
def test_a_wrong_certificate_in_place_of_a_shard_that_was_adopted_is_tried_again_and_a_refusal_is_not(is_of_connection: bool) -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.adopted()
        facts = {"failed": "connection"} if is_of_connection else {}
        scene.links[1].errors["apply_step"] = [Unauthenticated("its certificate is not of the authority", facts=facts)]
        scene.side.carry_out(APPLY)
        assert isinstance(await scene.end_of(APPLY), messages.Done) == is_of_connection

    play(act)


def test_the_newest_record_is_reported_with_the_adoptions() -> None:
    async def act(scene: Scene) -> None:
        scene.begin()
        old = dataclasses.replace(RECORD, num_rollbacks=1)
        scene.links[0].adoption = Adoption(step=4, layout_hash="a", record=RecordPacker().pack(RECORD), record_version=9)
        scene.links[1].adoption = Adoption(step=4, layout_hash="b", record=RecordPacker().pack(old), record_version=8)
        scene.side.carry_out(adopting())
        found = await scene.adopted()
        assert found.record == RECORD
        assert [*found.adoptions] == [link.adoption for link in scene.links]
        assert [link.chief_address for link in scene.links] == ["host-c:1", "host-c:1"]

    play(act)


def test_a_shard_that_refuses_to_be_adopted_is_reported_with_its_reason_and_watched_all_the_same() -> None:
    async def act(scene: Scene) -> None:
        scene.links[1].always["adopt"] = InternalError("it failed half-way through step 3")
        scene.side.carry_out(order := adopting())
        failed = await scene.end_of(order)
        assert failed.error.message == "ps 1 at host-p:5001: it failed half-way through step 3"
        assert not scene.all_of(messages.Done)
        assert await scene.one_of(messages.ShardSeen)

    play(act)


def test_a_record_that_cannot_be_read_is_done_without() -> None:
    async def act(scene: Scene) -> None:
        scene.links[0].adoption = Adoption(step=4, layout_hash="a", record=b"\xff\xff", record_version=9)
        scene.side.carry_out(adopting())
        assert (await scene.adopted()).record is None

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
def test_a_silent_or_replaced_chief_loses_its_shards(heard_ago_s: float, is_takeover: bool) -> None:
    async def act(scene: Scene) -> None:
        scene.links[1].chief_incarnation, scene.links[1].chief_heard_ago_s = 4, heard_ago_s
        scene.begin(is_takeover=is_takeover)
        assert (await scene.one_of(messages.ShardsFound)).statuses[1].fence.chief_incarnation == 4

    play(act)


def test_a_step_is_reported_when_all_shards_have_applied_it() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        scene.side.carry_out(APPLY)
        assert await scene.end_of(APPLY) == messages.Done(work=APPLY)
        assert [link.applied[0].fence.chief_incarnation for link in scene.links] == [5, 5]

    play(act)


def test_another_epoch_gives_up_work_under_way_without_a_report() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.adopted()
        scene.links[0].hangs |= {"apply_step", "save"}
        scene.side.carry_out(APPLY)
        scene.side.carry_out(WRITE)
        await scene.settle()
        scene.side.carry_out(later := restoring())
        assert (await scene.end_of(later)).result == (7, 7)
        scene.links[0].never.set()
        await scene.settle()
        assert not scene.has_ended(APPLY) and not scene.has_ended(WRITE)
        assert [link.epoch for link in scene.links] == [2, 2]

    play(act)


def test_an_order_of_an_older_epoch_is_not_carried_out() -> None:
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
        scene.side.carry_out(COPY)
        assert await scene.end_of(COPY) == messages.Done(work=COPY)
        scene.side.carry_out(WRITE)
        assert [file.shard for file in (await scene.end_of(WRITE)).result] == [0, 1]
        assert {request.num_shards for link in scene.links for request in link.saved} == {2}

    play(act)


def test_a_save_that_fails_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        storage = LocalStorage(tmp_path)
        with storage.create(COPY.tag, "ps-0", num_bytes=1) as file:
            file.write(b"x")
        scene.side.carry_out(adopting())
        scene.links[1].errors["save"] = [StorageFull("need 1 GiB")]
        scene.side.carry_out(WRITE)
        error = (await scene.end_of(WRITE)).error
        assert isinstance(error, StorageFull)
        assert "need 1 GiB" in error.message
        assert storage.stored() == ()

    play(act, tmp_path)


def test_how_far_a_restoration_is_is_reported() -> None:
    async def act(scene: Scene) -> None:
        scene.links[1].far = [RestoreProgress(is_done=False, num_bytes_read=number, num_bytes=8) for number in (2, 6)]
        scene.side.carry_out(work := restoring())
        await scene.end_of(work)
        reports = scene.all_of(messages.ShardRestoring)
        assert [(report.shard, report.num_bytes_read, report.num_bytes) for report in reports] == [(1, 2, 8), (1, 6, 8)]

    play(act)


def test_a_shard_that_restarts_while_it_is_brought_back_is_brought_back_again() -> None:
    async def act(scene: Scene) -> None:
        link = scene.links[1]
        link.hangs.add("restore")
        scene.side.carry_out(work := restoring())
        await scene.settle()
        link.process_incarnation, link.epoch = 8, 0
        link.errors["restore"] = [EpochMismatch("no chief has adopted it since it started")]
        link.hangs.clear()
        link.never.set()
        assert (await scene.end_of(work)).result == (7, 8)
        assert link.epoch == 2

    play(act)


@pytest.mark.parametrize("error", [DataLoss("ps-1: its SHA-256 differs"), StorageFull("no memory")])
def test_a_shard_that_cannot_be_brought_back_says_why(error: PsError) -> None:
    async def act(scene: Scene) -> None:
        scene.links[1].always["restore"] = error
        scene.side.carry_out(work := restoring())
        failed = (await scene.end_of(work)).error
        assert type(failed) is type(error)
        assert failed.message == f"ps 1 at host-p:5001: {error.message}"

    play(act)


@pytest.mark.parametrize("wish", [adopting(), restoring(), COPY, APPLY], ids=lambda wish: type(wish).__name__)
def test_a_superseded_chief_learns_it_and_reports_nothing(wish: Any) -> None:
    async def act(scene: Scene) -> None:
        scene.side.authority.fence = fence(1, 5)
        error = Superseded("chief incarnation 6 has adopted it, you are 5; end this chief")
        method = {messages.ApplyStep: "apply_step", messages.CopyStep: "begin_save"}.get(type(wish), "adopt")
        scene.links[1].always[method] = error
        scene.side.carry_out(wish)
        async with asyncio.timeout(10):
            while not scene.superseded:
                await asyncio.sleep(0)
        await scene.settle()
        assert "chief incarnation 6" in scene.superseded[0]
        assert not scene.all_of(messages.Done, messages.Failed, messages.ShardFailed)

    play(act)


def test_a_superseded_chief_learns_it_although_the_server_then_falls_silent() -> None:
    async def act(scene: Scene) -> None:
        scene.side.authority.fence = fence(1, 5)
        scene.links[1].always["apply_step"] = Superseded("a chief of another life of the cluster has adopted it")
        scene.links[1].hangs.add("status")
        scene.side.carry_out(APPLY)
        async with asyncio.timeout(10):
            while not scene.superseded:
                await asyncio.sleep(0)

    play(act)


def test_a_chief_of_another_life_with_the_same_number_ends_this_one_when_a_shard_is_looked_at() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.adopted()
        scene.links[1].life += 1
        scene.links[1].always["apply_step"] = EpochMismatch("the cluster has begun anew")
        scene.side.carry_out(APPLY)
        async with asyncio.timeout(10):
            while not scene.superseded:
                await asyncio.sleep(0)
        assert "another chief (incarnation 5) has taken it over" in scene.superseded[0]

    play(act)


@pytest.mark.parametrize("of_another", ["chief_incarnation", "life"])
def test_shards_of_another_chief_or_life_are_not_ended(of_another: str) -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.adopted()
        setattr(scene.links[1], of_another, getattr(scene.links[1], of_another) + 1)
        await scene.side.shut_down_all(reason="told to", within_s=5.0)
        assert [link.ended_because for link in scene.links] == ["told to", ""]

    play(act)


def test_a_shard_that_restarts_while_it_is_adopted_is_reported_as_the_process_that_it_is() -> None:
    async def act(scene: Scene) -> None:
        link = scene.links[1]
        link.hangs.add("adopt")
        scene.side.carry_out(adopting())
        await scene.settle()
        link.process_incarnation = 8
        link.errors["adopt"] = [Unavailable("ps-1: connection lost")]
        link.hangs.clear()
        link.never.set()
        assert (await scene.adopted()).process_incarnations == (7, 8)

    play(act)


def test_a_record_that_is_overtaken_is_given_up() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.adopted()
        scene.links[0].hangs.add("keep_record")
        scene.side.carry_out(keeping(1))
        await scene.settle()
        scene.side.carry_out(keeping(2))
        scene.links[0].hangs.clear()
        await scene.settle()
        assert [*scene.links[0].records] == [2]
        assert [*scene.links[1].records] == [1, 2]

    play(act)


def test_all_shards_hear_of_the_settings_although_one_does_not_keep_the_record() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.adopted()
        scene.links[0].errors["keep_record"] = [error := LimitExceeded("too large")]
        scene.links[1].errors["keep_record"] = [Unavailable("gone")] * 2
        scene.side.carry_out(work := keeping(1))
        assert (await scene.end_of(work)).result is error
        assert [*scene.links[1].records] == [1]

    play(act)


def test_without_a_place_there_is_no_checkpoint() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(search := messages.FindCheckpoint())
        assert (await scene.end_of(search)).result == messages.Found(checkpoint=None)

    play(act)


def test_an_unfinished_checkpoint_is_reported_as_skipped(tmp_path: Path) -> None:
    async def act(scene: Scene) -> None:
        with LocalStorage(tmp_path).create(COPY.tag, "ps-0", num_bytes=1) as file:
            file.write(b"x")
        scene.side.carry_out(search := messages.FindCheckpoint())
        found = (await scene.end_of(search)).result
        assert found.checkpoint is None
        assert [tag for tag, _ in found.skipped] == [COPY.tag]
        assert found.skipped[0][1].startswith("incomplete")

    play(act, tmp_path)
