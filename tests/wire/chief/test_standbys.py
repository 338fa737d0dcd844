"""A shard on two real servers, as a chief uses it: both do the same, one that fails is dropped, and it comes back."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from chief.core import messages as rev
from chief.shards import standby
from chief.shards.link import GrpcShardLink, ShardLink
from chief.shards.standby import ReplicaReturn, ReplicatedLink, distrust_unconfirmed
from ps_protocol import errors
from ps_protocol.roles.contribution import PushId, contributions_named
from ps_protocol.roles.fence import KEY_BYTES
from ps_protocol.roles.shard import (
    AdoptRequest,
    ApplyRequest,
    PushResult,
    ReplicaState,
    ShardSettings,
    ShardStatus,
    ShardStatusRequest,
)
from ps_server.config import ParameterServerConfig
from ps_server.model.shard_model import ShardModel, StepWork
from ps_server.server import ParameterServer
from ps_server.shard import gate
from tests.support.chief.eras import LIFE, fence
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import CHIEF, EPOCH, Trainer, keeping, layout_of, telling, variable

LAYOUT = layout_of(variable("a", (2,)), variable("b", (3,)))
PRIMARY, STANDBY = 0, 1


@contextmanager
def instead(link: ShardLink, kind: type, act: Callable[[Any], Coroutine[Any, Any, Any]]) -> Iterator[None]:
    """Has an act take the place of one kind of requests by a link."""
    call = link.call

    async def called(request: Any, *, timeout_s: float) -> Any:
        return await (act(request) if isinstance(request, kind) else call(request, timeout_s=timeout_s))

    with patch.object(link, "call", called):
        yield


def failing(why: str) -> Callable[[Any], Coroutine[Any, Any, Any]]:
    """An act that reaches nobody."""

    async def fail(request: object) -> None:
        raise errors.Unavailable(why)

    return fail


class Pair:
    """Two servers of one shard, and what the link has reported."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.stack = stack
        self.servers = [self._started(f"unix:{directory}/{name}") for name in ("ps", "standby")]
        self.addresses = [server.address for server in self.servers]
        self.trainers = [self._trainer(address) for address in self.addresses]
        self.reports: list[Any] = []

    def run(self, act: Callable[[ReplicatedLink], Awaitable[Any]], *, is_taken: bool = True) -> Any:
        """Does something with a link; `is_taken`: to replicas that it has taken over."""

        async def run() -> Any:
            link = ReplicatedLink([GrpcShardLink(address, index=0, cluster="job") for address in self.addresses], index=0)
            link.attach(self.reports.append)
            try:
                if is_taken:
                    await take(link)
                return await act(link)
            finally:
                await link.close()

        return asyncio.run(run())

    def stop(self, which: int) -> None:
        self.servers[which].stop(0.0)

    def restart(self, which: int) -> None:
        """Another process takes the place: it knows nothing."""
        self.stop(which)
        self.servers[which] = self._started(self.addresses[which])
        self.trainers[which] = self._trainer(self.addresses[which])

    def create(self, *which: int) -> None:
        for index in which or (PRIMARY, STANDBY):
            self.trainers[index].create()

    def push(self, *which: int, step: int = 0, worker: int = 0, lie: float = 0.0) -> PushId:
        """Gives the same contribution to these servers; the standby gets a `lie` more."""
        headers = [trainer.header(worker, step=step) for trainer in self.trainers]
        for index in which or (PRIMARY, STANDBY):
            trainer = self.trainers[index]
            gradients = trainer.arena(1.0 + worker + (lie if index == STANDBY else 0.0))
            assert trainer.push(headers[index], gradients).result is PushResult.STAGED
        return headers[0].push_id

    def values(self, which: int, step: int) -> bytes:
        return self.trainers[which].read(step)[1].tobytes()

    def status(self, which: int) -> Any:
        return self.trainers[which].shard.call(ShardStatusRequest())

    def _started(self, address: str) -> ParameterServer:
        config = ParameterServerConfig(index=0, address=address, cluster="job", checkpoint_dir=str(self.directory / "checkpoints"))
        server = ParameterServer(config)
        server.start()
        self.stack.callback(server.stop, 0.0)
        return server

    def _trainer(self, address: str) -> Trainer:
        return Trainer(self.stack.enter_context(closing(CommandedShard(address))), LAYOUT)


async def take(link: ReplicatedLink, *, epoch: int = EPOCH, chief: int = CHIEF) -> Any:
    await link.call(ShardStatusRequest(), timeout_s=5)
    return await link.call(AdoptRequest(fence=fence(epoch, chief), chief_address="chief:1"), timeout_s=5)


async def repeated(call: Callable[[], Awaitable[Any]]) -> Any:
    """Calls again while a connection is found to be lost, as a chief does."""
    while True:
        try:
            return await call()
        except errors.Unavailable:
            await asyncio.sleep(0)


def request(*contributors: PushId, step: int = 0) -> ApplyRequest:
    return ApplyRequest(fence=fence(EPOCH, CHIEF), step=step, contributors=contributors)


@pytest.fixture
def pair(socket_dir: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(socket_dir, stack)


def test_a_step_is_applied_at_both_replicas_with_equal_results(pair: Pair) -> None:
    pair.create()
    push = pair.push()
    reply = pair.run(lambda link: link.call(request(push), timeout_s=10))
    assert reply.step == 1
    assert pair.values(PRIMARY, 1) == pair.values(STANDBY, 1)
    assert pair.reports[-1] == rev.ReplicasChanged(shard=0, address=pair.addresses[0], standby=pair.addresses[1])


def test_the_next_chief_gets_the_newest_record_that_one_of_the_replicas_keeps(pair: Pair) -> None:
    pair.create()
    for which, version, record in ((PRIMARY, 3, b"older"), (STANDBY, 7, b"newer")):
        pair.trainers[which].shard.call(keeping(version, record))
    adoption = pair.run(lambda link: take(link, chief=CHIEF + 1))
    assert (adoption.record_version, adoption.record) == (7, b"newer")


def test_the_processor_time_of_both_replicas_is_counted(pair: Pair) -> None:
    pair.create()
    before_s = time.process_time()
    status = pair.run(lambda link: link.call(ShardStatusRequest(), timeout_s=5))
    # Both run in this process.
    assert 2 * before_s <= status.report.cpu_s <= 2 * time.process_time()


def test_the_standby_takes_over_from_a_lost_primary_and_records_that_it_is_alone(pair: Pair) -> None:
    pair.create()
    push = pair.push()

    async def act(link: ReplicatedLink) -> Any:
        before = (await link.call(ShardStatusRequest(), timeout_s=5)).process_incarnation
        pair.stop(PRIMARY)
        reply = await link.call(request(push), timeout_s=10)
        return before, reply, await link.call(ShardStatusRequest(), timeout_s=5), link.address

    before, reply, status, address = pair.run(act)
    assert (reply.step, address) == (1, pair.addresses[STANDBY])
    assert status.process_incarnation == before, "for the coordinator it is the same shard"
    last = pair.reports[-1]
    assert (last.address, last.standby) == (pair.addresses[STANDBY], "")
    assert pair.addresses[PRIMARY] in last.missing
    assert pair.status(STANDBY).is_alone


def test_a_chief_that_is_superseded_at_the_standby_names_it_to_no_worker_as_the_only_server_of_the_shard(pair: Pair) -> None:
    """Contributions that workers gave to that one alone would be missing under the later chief, which counts on both."""
    pair.create()

    async def act(link: ReplicatedLink) -> Any:
        later = fence(EPOCH, CHIEF + 1)
        await link.replicas[STANDBY].link.call(AdoptRequest(fence=later, chief_address="chief:2"), timeout_s=5)
        pair.stop(PRIMARY)
        return later.chief_incarnation, (await link.call(ShardStatusRequest(fence=link.fence), timeout_s=5)).fence.chief_incarnation

    later, found = pair.run(act)
    assert found == later, "by this the chief ends"
    assert {report.standby for report in pair.reports[1:]} == {pair.addresses[STANDBY]}


def test_a_replica_that_lacks_a_contribution_is_dropped_and_the_other_one_continues(pair: Pair) -> None:
    pair.create()
    push = pair.push(PRIMARY)
    assert pair.run(lambda link: link.call(request(push), timeout_s=10)).step == 1
    assert pair.reports[-1].standby == ""
    assert "not staged" in pair.reports[-1].missing
    assert not [report for report in pair.reports if isinstance(report, rev.Done)], "its worker may not have known better"
    assert pair.status(PRIMARY).is_alone


def test_a_replica_that_was_given_other_gradients_is_dropped_and_the_worker_is_named(pair: Pair) -> None:
    pair.create()
    honest, lie, other = pair.push(worker=0), pair.push(worker=1, lie=0.5), pair.push(worker=2, lie=0.5)
    assert pair.run(lambda link: link.call(request(honest, lie, other), timeout_s=10)).step == 1
    differ, changed = pair.reports[-2:]
    assert differ == rev.ContributionsDiffer(shard=0, step=0, contributions=(lie, other))
    assert (changed.address, changed.standby) == (pair.addresses[PRIMARY], "")
    assert "worker 1, worker 2 had given it other gradients for step 0" in changed.missing
    assert pair.status(PRIMARY).is_alone
    assert pair.status(STANDBY).step is None, "its step would not show a later chief that it was left behind"


def test_a_replica_that_was_given_other_gradients_keeps_its_variables_if_the_primary_is_lost_meanwhile(pair: Pair) -> None:
    """Else the shard would have no values left, and no checkpoint of it could be made."""
    pair.create()
    lie = pair.push(lie=0.5)

    async def act(link: ReplicatedLink) -> Any:
        primary, standby = (one.link for one in link.replicas)
        other_process = replace(await primary.call(ShardStatusRequest(), timeout_s=5), process_incarnation=1)
        is_marking, are_compared, call = asyncio.Event(), asyncio.Event(), standby.call

        def report(event: Any) -> None:
            pair.reports.append(event)
            if isinstance(event, rev.ContributionsDiffer):
                are_compared.set()

        async def adopt_late(request: AdoptRequest) -> Any:
            is_marking.set()
            await are_compared.wait()
            return await call(request, timeout_s=5)

        async def say(request: ShardStatusRequest) -> ShardStatus:
            return other_process

        link.attach(report)
        with instead(primary, ShardStatusRequest, say), instead(standby, AdoptRequest, adopt_late):
            looking = asyncio.create_task(link.call(ShardStatusRequest(), timeout_s=5))
            await is_marking.wait()
            reply = await link.call(request(lie), timeout_s=10)
            await looking
        return reply

    assert pair.run(act).step == 1
    last = pair.reports[-1]
    assert (last.address, last.standby) == (pair.addresses[STANDBY], "")
    assert "restarted" in last.missing
    assert (pair.status(STANDBY).step, pair.status(STANDBY).is_alone) == (1, True)


def test_a_standby_with_different_gradients_takes_over_from_a_primary_that_is_lost_right_after_the_step(pair: Pair) -> None:
    pair.create()
    lie = pair.push(lie=0.5)
    compare = standby.different_contributions

    def compare_late(*args: Any) -> Any:
        pair.stop(PRIMARY)
        return compare(*args)

    async def act(link: ReplicatedLink) -> Any:
        with patch.object(standby, "different_contributions", compare_late):
            return await link.call(request(lie), timeout_s=10)

    assert pair.run(act).step == 1
    last = pair.reports[-1]
    assert (last.address, last.standby) == (pair.addresses[STANDBY], "")
    assert (pair.status(STANDBY).step, pair.status(STANDBY).is_alone) == (1, True)


def test_a_step_that_both_replicas_refuse_is_refused_and_neither_is_dropped(pair: Pair) -> None:
    pair.create()
    with pytest.raises(errors.ContributionMissing):
        pair.run(lambda link: link.call(request(PushId(worker=9, incarnation=1, sequence=1)), timeout_s=10))
    assert pair.reports[-1].standby == pair.addresses[STANDBY]


@pytest.mark.parametrize("holder", [PRIMARY, STANDBY])
def test_of_two_replicas_that_lack_contributions_the_one_that_lacks_more_is_dropped(pair: Pair, holder: int) -> None:
    """A worker that knows of one server only has given it what it must; what neither has, nobody has given."""
    pair.create()
    given, nowhere = pair.push(holder), PushId(worker=9, incarnation=1, sequence=1)
    forged = request(given, nowhere)

    async def act(link: ReplicatedLink) -> Any:
        with pytest.raises(errors.ContributionMissing) as caught:
            await link.call(forged, timeout_s=10)
        return contributions_named(caught.value.facts), await link.call(replace(forged, without=(nowhere,)), timeout_s=10)

    lacked, reply = pair.run(act)
    assert (lacked, reply.step) == ((nowhere,), 1)
    last = pair.reports[-1]
    assert (last.address, last.standby) == (pair.addresses[holder], "")
    assert "not staged" in last.missing
    assert pair.status(holder).is_alone


def test_a_restarted_replica_is_noticed_without_a_step(pair: Pair) -> None:
    pair.create()

    async def act(link: ReplicatedLink) -> Any:
        pair.restart(STANDBY)
        return await link.call(ShardStatusRequest(), timeout_s=5)

    assert pair.run(act).step == 0
    assert (pair.reports[-1].standby, "restarted" in pair.reports[-1].missing) == ("", True)


def test_the_loss_of_both_replicas_shows_as_another_process(pair: Pair) -> None:
    pair.create()

    async def act(link: ReplicatedLink) -> Any:
        before = (await link.call(ShardStatusRequest(), timeout_s=5)).process_incarnation
        pair.restart(PRIMARY)
        pair.restart(STANDBY)
        after = await repeated(lambda: link.call(ShardStatusRequest(), timeout_s=5))
        await link.call(AdoptRequest(fence=fence(EPOCH + 1, CHIEF)), timeout_s=5)
        return before, after.process_incarnation, (await link.call(ShardStatusRequest(), timeout_s=5)).process_incarnation

    before, after, later = pair.run(act)
    assert before != after == later
    assert pair.reports[-1].standby == pair.addresses[STANDBY], "both are counted on in the next epoch"


def test_settings_that_allow_no_standby_drop_the_standby(pair: Pair) -> None:
    pair.create()
    settings = ShardSettings(fence=fence(EPOCH, CHIEF), version=1, applies_on_arrival=True)
    pair.run(lambda link: link.call(telling(settings), timeout_s=5))
    assert "as they arrive" in pair.reports[-1].missing
    assert (pair.status(PRIMARY).settings_version, pair.status(STANDBY).settings_version) == (1, 0)


def test_a_standby_that_is_another_shard_is_refused(pair: Pair) -> None:
    other = ParameterServer(ParameterServerConfig(index=1, address=f"unix:{pair.directory}/other", cluster="job"))
    other.start()
    pair.stack.callback(other.stop, 0.0)
    pair.addresses[STANDBY] = other.address
    with pytest.raises(errors.WrongRole):
        pair.run(lambda link: link.handshake(timeout_s=5), is_taken=False)


# -- another chief


def test_another_chief_has_the_replica_that_lacks_a_step_apply_it(pair: Pair) -> None:
    pair.create()
    push = pair.push()
    pair.trainers[PRIMARY].apply(push)
    adoption = pair.run(lambda link: take(link, chief=CHIEF + 1), is_taken=False)
    assert adoption.step == 1
    assert pair.values(STANDBY, 1) == pair.values(PRIMARY, 1)
    assert pair.reports[-1].standby == pair.addresses[STANDBY]


@pytest.mark.parametrize("has_both", [False, True])
@pytest.mark.parametrize("lie", [0.0, 0.5])
def test_another_chief_compares_the_gradients_of_the_last_step(pair: Pair, has_both: bool, lie: float) -> None:
    """The former one may have ended before it did."""
    pair.create()
    push = pair.push(lie=lie)
    for trainer in pair.trainers[: 1 + has_both]:
        trainer.shard.call(replace(request(push), wants_checksums=True))
    assert pair.run(lambda link: take(link, chief=CHIEF + 1), is_taken=False).step == 1
    differ = [report.contributions for report in pair.reports if isinstance(report, rev.ContributionsDiffer)]
    assert differ == ([(push,)] if lie else [])
    assert pair.reports[-1].standby == ("" if lie else pair.addresses[STANDBY])
    assert ("worker 0 had given it other gradients" in pair.reports[-1].missing) is bool(lie)


def test_another_chief_drops_a_replica_whose_last_step_has_other_contributions(pair: Pair) -> None:
    pair.create()
    pushes = [pair.push(worker=worker) for worker in (0, 1)]
    for trainer, push in zip(pair.trainers, pushes, strict=True):
        trainer.apply(push)
    assert pair.run(lambda link: take(link, chief=CHIEF + 1), is_taken=False).step == 1
    assert pair.reports[-1].standby == ""
    assert "other contributors" in pair.reports[-1].missing


def test_another_chief_drops_a_replica_that_is_more_than_a_step_behind(pair: Pair) -> None:
    pair.create()
    for step in range(2):
        push = pair.push(STANDBY, step=step)
        pair.trainers[STANDBY].apply(push, step=step)
    adoption = pair.run(lambda link: take(link, chief=CHIEF + 1), is_taken=False)
    assert adoption.step == 2
    assert (pair.reports[-1].address, pair.reports[-1].standby) == (pair.addresses[STANDBY], "")
    assert "step 0" in pair.reports[-1].missing


def test_another_chief_waits_for_a_replica_that_may_know_better_but_not_if_one_was_alone(pair: Pair) -> None:
    pair.create()
    pair.stop(PRIMARY)
    with pytest.raises(errors.Unavailable):
        pair.run(lambda link: take(link, chief=CHIEF + 1), is_taken=False)
    pair.run(lambda link: _mark_alone(link, STANDBY), is_taken=False)
    assert pair.run(lambda link: take(link, chief=CHIEF + 1), is_taken=False).step == 0


def test_another_chief_continues_once_no_replica_obeys_the_former_chief(pair: Pair) -> None:
    pair.create()

    async def act(link: ReplicatedLink) -> Any:
        await link.call(ShardStatusRequest(), timeout_s=5)
        with instead(link.replicas[STANDBY].link, AdoptRequest, failing("the answer was lost")):
            with pytest.raises(errors.Unavailable, match="the answer was lost"):
                await link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1), chief_address="chief:2"), timeout_s=5)
        assert not link.members
        return await link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1), chief_address="chief:2"), timeout_s=5)

    assert pair.run(act, is_taken=False).step == 0
    assert pair.reports[-1].standby == pair.addresses[STANDBY]


@pytest.mark.parametrize("num_losses", [1, 2])
def test_another_chief_begins_without_a_replica_that_was_left_behind_before(pair: Pair, num_losses: int) -> None:
    """Also if the answer of the one that was counted on alone is lost: it has forgotten that since."""
    pair.create()
    pair.run(lambda link: _mark_alone(link, PRIMARY), is_taken=False)

    async def act(link: ReplicatedLink) -> Any:
        await link.call(ShardStatusRequest(), timeout_s=5)
        call, lost = link.replicas[PRIMARY].link.call, iter(range(num_losses - 1))

        async def losing(request: AdoptRequest) -> Any:
            adoption = await call(request, timeout_s=5)
            if next(lost, None) is not None:
                raise errors.Unavailable("the answer was lost")
            return adoption

        with (
            instead(link.replicas[PRIMARY].link, AdoptRequest, losing),
            instead(link.replicas[STANDBY].link, AdoptRequest, failing("it is away")),
        ):
            return await repeated(lambda: link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1), chief_address="chief:2"), timeout_s=5))

    assert pair.run(act, is_taken=False).step == 0
    assert (pair.reports[-1].address, pair.reports[-1].standby) == (pair.addresses[PRIMARY], "")


def test_another_chief_keeps_the_step_that_the_former_one_has_made_at_one_meanwhile(pair: Pair) -> None:
    pair.create()
    push = pair.push()

    async def act(link: ReplicatedLink) -> Any:
        await link.call(ShardStatusRequest(), timeout_s=5)
        await asyncio.to_thread(pair.trainers[STANDBY].apply, push)
        return await link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1), chief_address="chief:2"), timeout_s=5)

    assert pair.run(act, is_taken=False).step == 1
    assert pair.values(PRIMARY, 1) == pair.values(STANDBY, 1)
    assert pair.reports[-1].standby == pair.addresses[STANDBY]


def test_another_chief_leaves_out_a_replica_that_was_not_counted_on_though_it_has_the_same_step(pair: Pair) -> None:
    """What it holds need not be the same: an earlier chief may have had it make a step."""
    pair.create()
    pair.trainers[PRIMARY].apply(pair.push(PRIMARY, worker=1))
    pair.trainers[STANDBY].apply(pair.push(STANDBY, worker=0))
    pair.run(lambda link: _mark_alone(link, STANDBY), is_taken=False)
    assert pair.run(lambda link: take(link, chief=CHIEF + 1), is_taken=False).step == 1
    assert (pair.reports[-1].address, pair.reports[-1].standby) == (pair.addresses[STANDBY], "")
    assert "left behind" in pair.reports[-1].missing


def test_a_replica_restarted_after_the_chief_looked_may_have_been_the_only_one_before(pair: Pair) -> None:
    pair.create()

    async def act(link: ReplicatedLink) -> Any:
        await link.call(ShardStatusRequest(), timeout_s=5)
        assert link.is_proven
        pair.restart(STANDBY)
        adoption = await repeated(lambda: link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1)), timeout_s=5))
        assert (adoption.step, link.is_proven) == (0, False)
        found = await link.call(ShardStatusRequest(), timeout_s=5)
        assert distrust_unconfirmed([link, None], [found, replace(found, shard=1)]) == [], "another shard confirms it"
        assert distrust_unconfirmed([link], [found]) == [0]
        return (await link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1)), timeout_s=5)).step

    assert pair.run(act, is_taken=False) is None
    assert [pair.status(which).step for which in (PRIMARY, STANDBY)] == [None, None]
    assert pair.reports[-1].standby == pair.addresses[STANDBY], "both hold the same: nothing"


def test_another_chief_takes_also_the_replica_that_the_former_one_has_counted_on_again_since_it_looked(pair: Pair) -> None:
    """Else the former chief could have it make a step that this chief does not know."""
    pair.create()
    pair.run(lambda link: _mark_alone(link, STANDBY), is_taken=False)

    async def act(link: ReplicatedLink) -> Any:
        primary, standby = (one.link for one in link.replicas)
        with instead(primary, ShardStatusRequest, failing("it is away")):
            await link.call(ShardStatusRequest(), timeout_s=5)
        await standby.call(AdoptRequest(fence=fence(EPOCH, CHIEF), replica=ReplicaState(version=10)), timeout_s=5)
        with instead(primary, AdoptRequest, failing("it is away")), pytest.raises(errors.Unavailable, match="it is away"):
            await link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1), chief_address="chief:2"), timeout_s=5)
        assert not link.members
        return await link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1), chief_address="chief:2"), timeout_s=5)

    assert pair.run(act, is_taken=False).step == 0
    assert (pair.reports[-1].address, pair.reports[-1].standby) == (pair.addresses[STANDBY], pair.addresses[PRIMARY])


def test_another_chief_takes_also_the_replica_that_the_former_one_counts_on_again_while_it_adopts_the_first(pair: Pair) -> None:
    pair.create()
    pair.run(lambda link: _mark_alone(link, STANDBY), is_taken=False)

    async def act(link: ReplicatedLink) -> Any:
        primary, standby = (one.link for one in link.replicas)
        with instead(primary, ShardStatusRequest, failing("it is away")):
            await link.call(ShardStatusRequest(), timeout_s=5)
        call, numbers = standby.call, iter([10])

        async def adopt_late(request: AdoptRequest) -> Any:
            for number in numbers:
                await call(AdoptRequest(fence=fence(EPOCH, CHIEF), replica=ReplicaState(version=number)), timeout_s=5)
            return await call(request, timeout_s=5)

        with instead(standby, AdoptRequest, adopt_late):
            await link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1), chief_address="chief:2"), timeout_s=5)
        with pytest.raises(errors.Superseded):
            await primary.call(AdoptRequest(fence=fence(EPOCH, CHIEF)), timeout_s=5)

    pair.run(act, is_taken=False)
    assert (pair.reports[-1].address, pair.reports[-1].standby) == (pair.addresses[STANDBY], pair.addresses[PRIMARY])


def test_a_replica_that_was_left_out_stays_out_when_the_chief_takes_the_shard_again(pair: Pair) -> None:
    pair.create()
    pair.trainers[PRIMARY].apply(pair.push(PRIMARY))
    pair.run(lambda link: _mark_alone(link, PRIMARY), is_taken=False)

    async def act(link: ReplicatedLink) -> Any:
        await take(link, chief=CHIEF + 1)
        return await link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1)), timeout_s=5)

    assert pair.run(act, is_taken=False).step == 1
    assert pair.reports[-1].standby == ""


@pytest.mark.parametrize("num_looks", [0, 1, 2])
def test_a_standby_beside_an_empty_primary_is_not_used_without_confirmation(pair: Pair, num_looks: int) -> None:
    pair.create()
    pair.restart(PRIMARY)

    async def act(link: ReplicatedLink) -> Any:
        found = await link.call(ShardStatusRequest(), timeout_s=5)
        assert (found.step, link.is_proven) == (0, False)
        assert distrust_unconfirmed([link], [found]) == [0]
        for _ in range(num_looks):
            again = await link.call(ShardStatusRequest(), timeout_s=5)
            assert (again.step, again.fence) == (None, found.fence), "the next chief is above what that one obeys"
            assert distrust_unconfirmed([link], [again]) == []
        return [(await link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1)), timeout_s=5)).step for _ in range(2)]

    assert pair.run(act, is_taken=False) == [None, None]
    with pytest.raises(errors.NotInitialized):
        pair.trainers[STANDBY].read(0)


@pytest.mark.parametrize(("settings_version", "step"), [(0, 0), (1, None)])
def test_a_shard_confirms_a_standby_only_if_that_has_heard_of_its_settings(pair: Pair, settings_version: int, step: int | None) -> None:
    """A standby is left out when contributions are applied as they arrive; what the other shards have applied since has no common step."""
    pair.create()
    pair.restart(PRIMARY)

    async def act(link: ReplicatedLink) -> Any:
        found = await link.call(ShardStatusRequest(), timeout_s=5)
        confirming = replace(found, shard=1, settings_version=settings_version)
        distrust_unconfirmed([link, None], [found, confirming])
        return (await link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1)), timeout_s=5)).step

    assert pair.run(act, is_taken=False) == step


@pytest.mark.parametrize(("is_trained", "restarted"), [(False, PRIMARY), (True, PRIMARY), (True, STANDBY)])
def test_a_restarted_replica_learns_from_the_other_one_which_workers_earlier_chiefs_have_admitted(
    pair: Pair, is_trained: bool, restarted: int
) -> None:
    earlier, later = b"1" * KEY_BYTES, b"2" * KEY_BYTES
    for trainer in pair.trainers:
        trainer.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF), session_keys=(earlier,)))
    if is_trained:
        pair.create()  # then the one that is empty is not counted on
    pair.restart(restarted)

    async def act(link: ReplicatedLink) -> Any:
        first, second = (replica.link for replica in link.replicas)
        calls, is_adopted = (first.call, second.call), asyncio.Event()

        async def before(request: AdoptRequest) -> Any:
            try:
                return await calls[PRIMARY](request, timeout_s=5)
            finally:
                is_adopted.set()

        async def after(request: AdoptRequest) -> Any:
            await is_adopted.wait()
            return await calls[STANDBY](request, timeout_s=5)

        with instead(first, AdoptRequest, before), instead(second, AdoptRequest, after):
            await link.call(ShardStatusRequest(), timeout_s=5)
            return await link.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1), chief_address="chief:1", session_keys=(later,)), timeout_s=5)

    assert pair.run(act, is_taken=False).session_keys == (later, earlier)
    for trainer in pair.trainers:
        assert set(trainer.shard.call(AdoptRequest(fence=fence(EPOCH, CHIEF + 1))).session_keys) == {earlier, later}


async def _mark_alone(link: ReplicatedLink, which: int) -> None:
    await link.replicas[which].link.call(
        AdoptRequest(fence=fence(EPOCH, CHIEF), replica=ReplicaState(version=9, is_alone=True)), timeout_s=5
    )


# -- coming back


def test_a_lost_replica_is_emptied_and_brought_back_from_what_the_other_one_saved(pair: Pair) -> None:
    pair.create()
    push = pair.push()

    async def act(link: ReplicatedLink) -> None:
        pair.stop(PRIMARY)
        await link.call(request(push), timeout_s=10)
        pair.restart(PRIMARY)
        told: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        back = ReplicaReturn({0: link}, report=told.put_nowait, manifest_of=lambda tag: "", clock=loop.time)
        watching = asyncio.create_task(back.watch(is_paused=lambda: False))
        try:
            assert await asyncio.wait_for(told.get(), 10) == rev.ReplicaReady(shard=0)
        finally:
            watching.cancel()
        await back.bring_back(_order(pair))
        (failure,) = told.get_nowait().result
        assert failure[0] == 0, "there is no such checkpoint"
        assert link.address == pair.addresses[STANDBY]
        assert pair.status(STANDBY).is_alone

    pair.run(act)


def test_a_replica_that_fails_half_way_through_a_step_can_take_a_checkpoint_in_the_same_epoch(pair: Pair) -> None:
    pair.create()
    push, run_apply, damaged = pair.push(), ShardModel.run_apply, pair.servers[STANDBY].shard._model

    def half_applied(model: ShardModel, work: StepWork) -> int:
        if model is damaged:
            raise MemoryError
        return run_apply(model, work)

    async def act(link: ReplicatedLink) -> None:
        with patch.object(ShardModel, "run_apply", half_applied):
            assert (await link.call(request(push), timeout_s=10)).step == 1
        assert "failed half-way through step 0" in pair.status(STANDBY).damage
        told: asyncio.Queue[Any] = asyncio.Queue()
        back = ReplicaReturn({0: link}, report=told.put_nowait, manifest_of=lambda tag: "", clock=asyncio.get_running_loop().time)
        watching = asyncio.create_task(back.watch(is_paused=lambda: False))
        assert await asyncio.wait_for(told.get(), 10) == rev.ReplicaReady(shard=0)
        watching.cancel()
        await back.bring_back(_order(pair))  # there is no such checkpoint, but it is ready to take one

    pair.run(act)
    status = pair.status(STANDBY)
    assert (status.damage, status.step, status.fence) == ("", None, fence(EPOCH, CHIEF))
    assert pair.status(PRIMARY).step == 1
    pair.create(STANDBY)


def test_a_replica_that_answers_again_after_it_was_dropped_keeps_nothing_that_could_be_older(pair: Pair) -> None:
    pair.create()
    push = pair.push(PRIMARY)

    async def act(link: ReplicatedLink) -> None:
        await link.call(request(push), timeout_s=10)  # the standby lacks the contribution
        told: asyncio.Queue[Any] = asyncio.Queue()
        back = ReplicaReturn({0: link}, report=told.put_nowait, manifest_of=lambda tag: "", clock=asyncio.get_running_loop().time)
        watching = asyncio.create_task(back.watch(is_paused=lambda: False))
        await asyncio.wait_for(told.get(), 10)
        watching.cancel()

    pair.run(act)
    assert (pair.status(STANDBY).step, pair.status(PRIMARY).step) == (None, 1)
    with pytest.raises(errors.NotInitialized):
        pair.trainers[STANDBY].read(0)


@pytest.mark.parametrize(
    ("life", "why"),
    [
        pytest.param(LIFE, "the chief at chief:2 has adopted it", id="of the same life"),
        pytest.param(LIFE + 1, "a chief of another life of the cluster has adopted it", id="of another life"),
    ],
)
def test_a_replica_that_obeyed_another_chief_of_equal_incarnation_returns_once_that_chief_is_silent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, life: int, why: str
) -> None:
    """What the other one had sent reached a server that was restarted since. Chiefs of one life and number have equal fences."""
    monkeypatch.setattr(gate, "LIVING_CHIEF_S", 1.0)
    pair.create()

    async def act(link: ReplicatedLink) -> None:
        pair.restart(STANDBY)
        await link.call(ShardStatusRequest(), timeout_s=5)
        of_other = fence(EPOCH, CHIEF, life=life)
        await repeated(lambda: link.replicas[STANDBY].link.call(AdoptRequest(fence=of_other, chief_address="chief:2"), timeout_s=5))
        told: asyncio.Queue[Any] = asyncio.Queue()
        back = ReplicaReturn({0: link}, report=told.put_nowait, manifest_of=lambda tag: "", clock=asyncio.get_running_loop().time)
        watching = asyncio.create_task(back.watch(is_paused=lambda: False))
        assert await asyncio.wait_for(told.get(), 10) == rev.ReplicaReady(shard=0)
        assert why in pair.reports[-1].missing
        assert (pair.status(STANDBY).fence, pair.status(STANDBY).chief_address) == (link.fence, "chief:1")
        watching.cancel()

    pair.run(act)


def test_a_replica_that_waits_to_be_brought_back_hears_its_chief_all_the_time(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a late message of another chief of the same number could have it meanwhile: it is empty."""
    monkeypatch.setattr(standby, "_REMIND_S", 60.0)

    async def act(link: ReplicatedLink) -> None:
        pair.restart(STANDBY)
        await link.call(ShardStatusRequest(), timeout_s=5)
        told: asyncio.Queue[Any] = asyncio.Queue()
        back = ReplicaReturn({0: link}, report=told.put_nowait, manifest_of=lambda tag: "", clock=asyncio.get_running_loop().time)
        watching = asyncio.create_task(back.watch(is_paused=lambda: False))
        assert await asyncio.wait_for(told.get(), 10) == rev.ReplicaReady(shard=0)
        first_s = await _heard_s(pair)
        await asyncio.wait_for(_until_heard_after(pair, first_s), 10)
        assert told.empty(), "the coordinator is reminded only now and then"
        watching.cancel()

    pair.run(act)


async def _heard_s(pair: Pair) -> float:
    """When the standby heard its chief last."""
    status = await asyncio.to_thread(pair.status, STANDBY)
    return time.monotonic() - float(status.chief_heard_ago_s)


async def _until_heard_after(pair: Pair, since_s: float) -> None:
    while await _heard_s(pair) < since_s + 0.2:
        await asyncio.sleep(0.05)


def _order(pair: Pair) -> rev.BringReplicasBack:
    spec = pair.trainers[STANDBY].spec(step=1)
    settings = ShardSettings(fence=fence(EPOCH, CHIEF), version=0)
    return rev.BringReplicasBack(fence=fence(EPOCH), tag="step-000000001", shards=(0,), specs=(spec,), settings=settings)
