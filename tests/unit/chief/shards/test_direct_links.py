"""The fast path of a step to its shards: all at once, in threads of their own; a call that fails there is repeated by the slow path."""

import asyncio
import queue
import threading
from collections.abc import Callable

import pytest

from chief.options import CoordinationConfig
from chief.serving.runner import Runner
from chief.shards.link import DirectLinks
from ps_protocol.errors import ContributionMissing, PsError, Unavailable
from ps_protocol.roles.chief import ClusterState, TokenResult
from ps_protocol.roles.shard import ApplyRequest
from tests.support.chief.chief_runner import FakeLink, Scene
from tests.support.chief.eras import fence

REQUEST = ApplyRequest(fence=fence(1, 1), step=0, contributors=())


class DirectFakeLink(FakeLink):
    """A shard with a fast way, too: it applies at once, when it may; or fails."""

    def __init__(self, *, error: BaseException | None = None, is_quick: bool = False) -> None:
        super().__init__(0)
        self.error, self.is_quick = error, is_quick
        self.may_go = threading.Event()
        self.may_go.set()
        self.applied_by: list[threading.Thread] = []

    def begin(self, request: ApplyRequest, report: Callable[[bool], None]) -> Callable[[], None] | None:
        def apply() -> None:
            assert self.may_go.wait(20)
            if self.error is None:
                self.applied_by.append(threading.current_thread())
            report(self.error is None)

        if self.is_quick:
            return apply
        threading.Thread(target=apply).start()
        return None

    async def close(self) -> None:
        self.may_go.set()
        await super().close()


class DirectScene(Scene):
    """A runner whose shards have fast ways, and one worker."""

    def __init__(self, *links: DirectFakeLink) -> None:
        self.links = [*links]
        for index, link in enumerate(links):
            link.index = index
        self.states: list[ClusterState] = []
        self.runner = Runner(self.links, config=CoordinationConfig(), on_state=self.states.append)
        self.running = asyncio.get_running_loop().create_task(self.runner.run())
        self.sequence = 0


def steps_with(*links: DirectFakeLink, num_steps: int = 1) -> list[FakeLink]:
    """Takes steps, each of which must be given a token; returns the shards."""

    async def run() -> list[FakeLink]:
        scene = DirectScene(*links)
        try:
            async with asyncio.timeout(20):
                await scene.initialise()
                for step in range(num_steps):
                    reply = await scene.take_step()
                    assert (reply.result, reply.step) == (TokenResult.TOKEN, step + 1)
        finally:
            await scene.close()
        return scene.links

    return asyncio.run(run())


def test_all_shards_apply_at_once_and_the_last_one_reports() -> None:
    links = [DirectFakeLink() for _ in range(3)]
    links[1].may_go.clear()
    reports: queue.SimpleQueue[bool] = queue.SimpleQueue()
    DirectLinks(links).apply([REQUEST] * 3, reports.put)
    assert reports.empty()
    links[1].may_go.set()
    assert reports.get(timeout=20)
    assert reports.empty()


@pytest.mark.parametrize("error", [Unavailable("gone"), ContributionMissing("not here"), RuntimeError("a defect")])
def test_a_step_that_fails_on_the_fast_path_is_applied_by_the_ordinary_one(error: Exception) -> None:
    links = steps_with(DirectFakeLink(), DirectFakeLink(error=error), num_steps=2)
    assert [[request.step for request in link.applied] for link in links] == [[0, 1], [0, 1]]


def test_a_shard_that_hangs_does_not_delay_the_error_of_another_shard() -> None:
    hanging = DirectFakeLink()
    hanging.may_go.clear()
    links = steps_with(hanging, DirectFakeLink(error=Unavailable("gone")))
    assert [len(link.applied) for link in links] == [1, 1]


def test_steps_that_succeed_on_the_fast_path_do_not_use_the_ordinary_one() -> None:
    link = DirectFakeLink()
    links = steps_with(link, num_steps=3)
    assert not links[0].applied
    assert len(link.applied_by) == 3 and threading.current_thread() not in link.applied_by


def test_quick_shard_is_left_to_the_thread_that_completes_the_step() -> None:
    quick, other = DirectFakeLink(is_quick=True), DirectFakeLink()
    steps_with(quick, other, num_steps=3)
    assert quick.applied_by == [threading.current_thread()] * 3
    assert len(other.applied_by) == 3 and threading.current_thread() not in other.applied_by


def test_a_quick_shard_that_refuses_ends_training_with_its_reason() -> None:
    async def run() -> None:
        scene = DirectScene(DirectFakeLink(error=ContributionMissing("not here"), is_quick=True))
        scene.links[0].always["apply_step"] = ContributionMissing("not here")
        try:
            async with asyncio.timeout(20):
                await scene.initialise()
                with pytest.raises(PsError, match="not here"):
                    await scene.take_step()
        finally:
            await scene.close()

    asyncio.run(run())
