"""Fences of every `Shard`, on every transport: which callers are admitted, and how a shard ends."""

import dataclasses
from collections.abc import Callable

import pytest

from ps_protocol.errors import (
    ContributionMissing,
    EpochMismatch,
    LeaseExpired,
    ShuttingDown,
    Superseded,
)
from ps_protocol.model.layout import Segments
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import session_secret
from ps_protocol.roles.shard import (
    Adoption,
    AdoptRequest,
    PushHeader,
    PushResult,
    ReadMetricsRequest,
    ReadRequest,
    Shard,
    ShardStatusRequest,
    ShutdownRequest,
)
from tests.support.chief.eras import era, fence
from tests.support.parameter_servers.shards import CHIEF, EPOCH, MIXED, SharingWorkers, Trainer, keeping

# Adoption and fences


def test_fresh_shard_has_no_step(shard: Shard) -> None:
    assert shard.call(AdoptRequest(fence=fence(1, 1))) == Adoption(step=None, layout_hash="")
    assert shard.call(AdoptRequest(fence=fence(1, 1))) == Adoption(step=None, layout_hash="")


def test_an_adoption_returns_the_shards_step(trainer: Trainer) -> None:
    trainer.create()
    trainer.train(0)
    adoption = trainer.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1)))
    assert (adoption.step, adoption.layout_hash) == (1, MIXED.hash)


@pytest.mark.parametrize(("epoch", "chief_incarnation"), [(EPOCH, CHIEF - 1), (EPOCH - 1, CHIEF), (EPOCH + 1, CHIEF - 1)])
def test_earlier_chief_is_superseded(trainer: Trainer, epoch: int, chief_incarnation: int) -> None:
    trainer.adopt()
    with pytest.raises(Superseded):
        trainer.shard.call(AdoptRequest(fence=fence(epoch, chief_incarnation)))


def test_earlier_chief_cannot_apply(trainer: Trainer) -> None:
    trainer.create()
    header = trainer.header()
    trainer.push(header)
    trainer.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1)))
    with pytest.raises(Superseded, match=f"chief incarnation {CHIEF + 1} has adopted it"):
        trainer.apply(header.push_id)
    assert trainer.apply(header.push_id, chief_incarnation=CHIEF + 1).step == 1


def test_earlier_chief_of_an_earlier_epoch_hears_that_it_is_superseded_and_not_that_its_epoch_is_over(trainer: Trainer) -> None:
    """What it does then is to end; for one that rules, another epoch at a server would mean that the training has failed."""
    trainer.create()
    header = trainer.header()
    trainer.shard.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF + 1)))
    with pytest.raises(Superseded, match="end this chief"):
        trainer.apply(header.push_id)
    with pytest.raises(Superseded, match="end this chief"):
        trainer.shard.call(keeping(1))


@pytest.mark.parametrize("epoch", [0, EPOCH - 1, EPOCH + 1])
def test_every_call_of_another_epoch_is_refused(trainer: Trainer, epoch: int) -> None:
    trainer.create()
    shard, into = trainer.shard, Segments([trainer.arena()])
    calls: list[Callable[[], object]] = [
        lambda: shard.create_variables(trainer.spec(epoch=epoch), into),
        lambda: trainer.read(epoch=epoch),
        lambda: trainer.push(trainer.header(epoch=epoch)),
        lambda: trainer.apply(PushId(worker=0, incarnation=1, sequence=1), epoch=epoch),
        lambda: shard.call(ReadMetricsRequest(epoch=epoch)),
        lambda: shard.read(ReadRequest(epoch=epoch, layout_hash=MIXED.hash, slot="momentum"), into),
        lambda: shard.call(ShutdownRequest(fence=fence(epoch, CHIEF), reason="test")),
    ]
    for call in calls:
        with pytest.raises(EpochMismatch, match=f"cluster epoch is {EPOCH}, you have epoch {epoch}"):
            call()
    assert trainer.train(0).step == 1


def test_a_shard_that_no_chief_adopted_refuses_with_a_reason(trainer: Trainer) -> None:
    with pytest.raises(EpochMismatch, match="no chief has adopted it since it started"):
        trainer.read()
    with pytest.raises(EpochMismatch, match="no chief has adopted it"):
        trainer.shard.call(ReadMetricsRequest(epoch=0))


def test_a_later_epoch_drops_staged_contributions(trainer: Trainer) -> None:
    trainer.create()
    header = trainer.header()
    trainer.push(header)
    trainer.shard.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF)))
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 0
    with pytest.raises(ContributionMissing):
        trainer.apply(header.push_id, epoch=EPOCH + 1)


# Lives


@pytest.mark.parametrize("shard", ["in_process", "grpc_unix"], indirect=True)
def test_contribution_of_another_life_is_refused(trainer: Trainer) -> None:
    """All servers were lost and the epoch begins again with the same number: a worker that was there before does not know.

    Memory is shared with one process, which is of one life.
    """
    trainer.create()
    trainer.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1, life=2**63 + 5)))
    assert trainer.shard.call(ShardStatusRequest()).fence.life == 2**63 + 5
    mine = trainer.header()
    with pytest.raises(EpochMismatch, match="the cluster has begun anew since you joined it"):
        trainer.push(mine)
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 0
    trainer.push(dataclasses.replace(mine, era=era(EPOCH, life=2**63 + 5)))
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 1


def test_a_chiefs_number_of_another_life_says_nothing(trainer: Trainer) -> None:
    trainer.create()
    trainer.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1, life=5)))
    with pytest.raises(Superseded, match="a chief of another life of the cluster has adopted it"):
        trainer.shard.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF + 1, life=6)))
    assert trainer.shard.call(ShardStatusRequest()).fence.epoch == EPOCH
    trainer.shard.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF + 2, life=6)))
    assert trainer.shard.call(ShardStatusRequest()).fence.life == 6, "that one has looked at who was here"


# The end


def test_shard_that_shuts_down_refuses_with_the_reason(trainer: Trainer) -> None:
    trainer.create()
    trainer.shard.call(ShutdownRequest(fence=fence(EPOCH, CHIEF), reason="training is finished"))
    trainer.shard.call(ShutdownRequest(fence=fence(EPOCH, CHIEF), reason="again"))
    with pytest.raises(ShuttingDown, match="ps 0 is shutting down: training is finished"):
        trainer.read()
    with pytest.raises(ShuttingDown):
        trainer.push(trainer.header())
    assert trainer.shard.call(ShardStatusRequest()).step == 0


def test_a_shard_that_no_chief_adopted_can_be_shut_down(shard: Shard) -> None:
    shard.call(ShutdownRequest(fence=fence(1, 1), reason="not needed"))
    with pytest.raises(ShuttingDown):
        shard.call(AdoptRequest(fence=fence(1, 1)))


# Workers

KEY, LATER_KEY = b"a" * 32, b"b" * 32


def header_of(trainer: Trainer, incarnation: int, *, key: bytes) -> PushHeader:
    """A header with the secret that a chief with this key has given."""
    secret = session_secret(key, name="worker 0", incarnation=incarnation)
    return dataclasses.replace(trainer.header(incarnation=incarnation), secret=secret)


@pytest.fixture
def guarded(trainer: Trainer) -> Trainer:
    """A shard with a model, whose chief makes secrets with KEY."""
    trainer.create()
    trainer.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF), session_keys=(KEY,)))
    return trainer


@pytest.mark.parametrize("secret", [0, 1, 2**64 - 1])
def test_an_unknown_incarnation_is_refused_and_excludes_no_worker(guarded: Trainer, secret: int) -> None:
    made_up = dataclasses.replace(guarded.header(incarnation=2**64 - 1), secret=secret)
    with pytest.raises(LeaseExpired, match=f"ps 0: incarnation {2**64 - 1} of worker 0 is not registered, or not to you"):
        guarded.push(made_up)
    mine = header_of(guarded, 1, key=KEY)
    assert guarded.push(mine).result is PushResult.STAGED
    assert guarded.apply(mine.push_id).step == 1


def test_no_other_caller_can_push_or_drop_in_a_workers_name(guarded: Trainer) -> None:
    mine = header_of(guarded, 1, key=KEY)
    guarded.push(mine)
    theirs = dataclasses.replace(guarded.header(), refused=(mine.push_id.sequence,))
    another = guarded.shard.shard if isinstance(guarded.shard, SharingWorkers) else guarded.shard  # shares nobody's memory
    with pytest.raises(LeaseExpired):
        another.push_gradients(theirs, Segments([guarded.arena(1.0)]))
    assert guarded.apply(mine.push_id).step == 1


def test_the_secret_of_another_worker_or_incarnation_is_not_enough(guarded: Trainer) -> None:
    others = session_secret(KEY, name="worker 1", incarnation=1), session_secret(KEY, name="worker 0", incarnation=2)
    for secret in others:
        with pytest.raises(LeaseExpired):
            guarded.push(dataclasses.replace(guarded.header(), secret=secret))


def test_workers_of_an_earlier_chief_are_known_to_the_next_one(guarded: Trainer) -> None:
    mine = header_of(guarded, 1, key=KEY)
    adoption = guarded.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1), session_keys=(LATER_KEY,)))
    assert adoption.session_keys == (LATER_KEY, KEY)
    assert guarded.push(mine).result is PushResult.STAGED
    with pytest.raises(LeaseExpired):
        guarded.push(guarded.header(incarnation=3))
    assert guarded.push(header_of(guarded, 1 << 20, key=LATER_KEY)).result is PushResult.STAGED


def test_another_epoch_of_the_same_life_knows_the_keys_and_another_life_does_not(guarded: Trainer) -> None:
    assert guarded.shard.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF))).session_keys == (KEY,)
    assert guarded.shard.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF + 1, life=99), session_keys=(LATER_KEY,))).session_keys == (
        LATER_KEY,
    )
