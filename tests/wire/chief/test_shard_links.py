"""The chief's calls of parameter servers over asyncio: each arrives unchanged at a real server."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from chief.shards.link import GrpcShardLink
from ps_protocol import errors
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.shard import ApplyRequest, PrepareRequest, PushResult, ShardSettings, ShardStatusRequest
from ps_server.config import ParameterServerConfig
from tests.support.chief.eras import fence
from tests.support.parameter_servers.commanded_shard import CommandedShard
from tests.support.parameter_servers.shards import CHIEF, EPOCH, Trainer, layout_of, open_server, variable

LAYOUT = layout_of(variable("a", (2,)), variable("b", (3,)))


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with open_server(ParameterServerConfig(index=0, cluster="job")) as server, contextlib.closing(CommandedShard(server.address)) as shard:
        trainer = Trainer(shard, LAYOUT)
        trainer.create()
        yield trainer


def ask(trainer: Trainer, call: Callable[[GrpcShardLink], Awaitable[Any]], *, index: int = 0) -> Any:
    assert isinstance(trainer.shard, CommandedShard)
    address = trainer.shard.address

    async def run() -> Any:
        link = GrpcShardLink(address, index=index, cluster="job")
        try:
            return await call(link)
        finally:
            await link.close()

    return asyncio.run(run())


def settings(version: int = 1, **changes: Any) -> ShardSettings:
    return ShardSettings(**{"fence": fence(EPOCH, CHIEF), "version": version, **changes})


def request(*contributors: PushId, step: int = 0, **changes: Any) -> ApplyRequest:
    return ApplyRequest(fence=fence(EPOCH, CHIEF), step=step, contributors=contributors, **changes)


def pushed(trainer: Trainer, value: float, *, worker: int, step: int = 0) -> PushId:
    header = trainer.header(worker, step=step)
    assert trainer.push(header, trainer.arena(value)).result is PushResult.STAGED
    return header.push_id


def test_step_is_prepared_and_applied_with_weights_and_scales(trainer: Trainer) -> None:
    ids = pushed(trainer, 1.0, worker=0), pushed(trainer, 4.0, worker=1)
    weighted: dict[str, Any] = {"weights": (1.0, 0.5)}
    sums = ask(trainer, lambda link: link.call(PrepareRequest(of=request(*ids, **weighted)), timeout_s=10))
    assert sums == pytest.approx((2 * 1.5**2, 3 * 1.5**2))  # (1 + 4 * 0.5) / 2 in each element
    reply = ask(trainer, lambda link: link.call(request(*ids, **weighted, scales=(1.0, 0.0)), timeout_s=10))
    assert (reply.step, reply.repeated_request) == (1, False)
    _, values = trainer.read(1)
    assert LAYOUT.view(values, 0).tolist() == [-0.75, -0.75]
    assert not np.any(LAYOUT.view(values, 1))


def test_settings_change_the_optimizer_from_the_next_step_on(trainer: Trainer) -> None:
    faster = OptimizerSpec(name="sgd", learning_rate=constant(2.0))
    ask(trainer, lambda link: link.call(settings(optimizers=((trainer.optimizer, faster),)), timeout_s=10))
    assert ask(trainer, lambda link: link.call(ShardStatusRequest(), timeout_s=10)).settings_version == 1
    trainer.train(0)
    assert LAYOUT.view(trainer.read(1)[1], 0).tolist() == [-2.0, -2.0]


def test_a_shard_that_accepts_stale_contributions_holds_them_until_they_are_discarded(trainer: Trainer) -> None:
    ask(trainer, lambda link: link.call(settings(accepts_stale=True), timeout_s=10))
    first, second, third = (pushed(trainer, 1.0, worker=worker) for worker in range(3))
    ask(trainer, lambda link: link.call(request(first), timeout_s=10))
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 2
    stale = PushId(worker=third.worker, incarnation=third.incarnation, sequence=0)
    ask(trainer, lambda link: link.call(request(second, step=1, discards=(stale,)), timeout_s=10))
    assert trainer.shard.call(ShardStatusRequest()).report.num_staged == 0
    assert LAYOUT.view(trainer.read(2)[1], 0).tolist() == [-1.0, -1.0]


def test_a_shard_that_applies_on_arrival_reports_that(trainer: Trainer) -> None:
    ask(trainer, lambda link: link.call(settings(accepts_stale=True, applies_on_arrival=True), timeout_s=10))
    reply = trainer.push(trainer.header(step=0), trainer.arena(1.0))
    assert reply.result is PushResult.APPLIED
    assert LAYOUT.view(trainer.read()[1], 0).tolist() == [-0.5, -0.5]


def test_errors_are_typed_and_name_the_server(trainer: Trainer) -> None:
    missing = PushId(worker=7, incarnation=1, sequence=1)
    with pytest.raises(errors.ContributionMissing, match="7/1/1"):
        ask(trainer, lambda link: link.call(PrepareRequest(of=request(missing)), timeout_s=10))
    with pytest.raises(errors.WrongRole, match="this is ps 0, not ps 3"):
        ask(trainer, lambda link: link.handshake(timeout_s=10), index=3)
