"""The chief's work at shards beside another live chief: neither announces anything that the other does not know."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from chief.core import messages
from chief.shards.checkpoint_store import CheckpointStore
from ps_protocol.errors import InternalError, Superseded, Unavailable
from ps_protocol.roles.checkpoint import Checkpoint
from tests.support.chief.chief_shards import APPLY, COPY, RECORD, Scene, adopting, keeping, play
from tests.support.chief.eras import LIFE, fence

FENCE = fence(3, 5)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0)


@pytest.fixture
def commit(monkeypatch: pytest.MonkeyPatch) -> messages.CommitCheckpoint:
    """A checkpoint whose manifest is written without fail."""
    monkeypatch.setattr(CheckpointStore, "commit", lambda self, work: None)
    checkpoint = Checkpoint(
        tag=COPY.tag, cluster="lockstep", fence=fence(1, 5), step=3, num_shards=2, record=RECORD, placement=(), files=()
    )
    return messages.CommitCheckpoint(checkpoint=checkpoint, keep=3, is_awaited=True)


def test_a_shard_refuses_a_chief_only_once_all_others_obey() -> None:
    async def act(scene: Scene) -> None:
        scene.links[0].always["adopt"] = InternalError("it failed half-way")
        scene.links[1].errors["adopt"] = [Unavailable("away")]
        scene.side.carry_out(work := adopting())
        end = await scene.end_of(work)
        assert isinstance(end, messages.Failed) and "it failed half-way" in end.error.message
        assert (scene.links[1].epoch, scene.links[1].chief_incarnation) == (1, 5), "no earlier chief goes on"
        assert not scene.all_of(messages.Done)

    play(act)


def test_a_checkpoint_of_a_chief_that_is_still_in_charge_is_reported(tmp_path: Path, commit: messages.CommitCheckpoint) -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.adopted()
        scene.side.carry_out(commit)
        assert await scene.end_of(commit) == messages.Done(work=commit)

    play(act, tmp_path)


@pytest.mark.parametrize("obeys", [6, 0])
def test_a_checkpoint_completed_after_another_chief_took_over_is_not_reported(
    tmp_path: Path, commit: messages.CommitCheckpoint, obeys: int
) -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.adopted()
        scene.links[0].chief_incarnation = obeys  # 0: another process, which nobody has adopted yet
        looks = scene.links[0].num_looks
        scene.side.carry_out(commit)
        await until(lambda: scene.links[0].num_looks > looks)
        await scene.settle()
        assert not scene.has_ended(commit)
        assert bool(scene.superseded) == (obeys > 5)

    play(act, tmp_path)


def test_a_checkpoint_is_reported_once_a_standby_has_replaced_the_process_that_ended_after_its_save(
    tmp_path: Path, commit: messages.CommitCheckpoint
) -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.adopted()
        scene.links[0].chief_incarnation = 0  # started again, and adopted by nobody
        looks = scene.links[0].num_looks
        scene.side.carry_out(commit)
        await until(lambda: scene.links[0].num_looks > looks)
        scene.links[0].chief_incarnation = 5  # that of the standby
        assert await scene.end_of(commit) == messages.Done(work=commit)

    play(act, tmp_path)


def test_a_superseded_chief_does_not_report_a_record_that_no_shard_kept() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.adopted()
        scene.links[0].always["keep_record"] = Superseded("chief 6 has it")
        scene.side.carry_out(record := keeping(1))
        await until(lambda: bool(scene.superseded))
        assert not scene.has_ended(record)

    play(act)


def test_a_step_is_not_asked_again_of_another_process() -> None:
    async def act(scene: Scene) -> None:
        scene.side.carry_out(adopting())
        await scene.adopted()
        scene.links[1].errors["apply_step"] = [Unavailable("connection reset")]
        scene.links[1].process_incarnation = 8
        scene.side.carry_out(APPLY)
        assert isinstance(await scene.end_of(APPLY), messages.Failed)
        assert [len(link.applied) for link in scene.links] == [1, 0]
        assert [(one.shard, one.process_incarnation) for one in scene.all_of(messages.ShardSeen)] == [(1, 8)]

    play(act)


@pytest.mark.parametrize("own_life", [LIFE, LIFE + 1])
def test_a_chief_leaves_shards_that_another_chief_has_begun_anew_to_that_chief(own_life: int) -> None:
    async def act(scene: Scene) -> None:
        for link in scene.links:
            link.step, link.epoch, link.chief_incarnation = 7, 1, 4
        scene.begin()
        await scene.one_of(messages.ShardsFound)
        scene.links[1].life, scene.links[1].process_incarnation = LIFE + 2, 8
        scene.side.carry_out(messages.AdoptShards(fence=fence(1, 5, life=own_life)))
        # One that begins a life of its own has no number in common with the other chief.
        await until(lambda: bool(scene.superseded if own_life == LIFE else scene.all_of(messages.Done)))
        assert [link.chief_incarnation for link in scene.links][1] == (4 if own_life == LIFE else 5)

    play(act)
