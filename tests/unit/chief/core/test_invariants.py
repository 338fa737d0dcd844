"""Random histories of a cluster; after every event the promises of the strict policy must hold."""

import contextlib

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chief.core import messages as ev
from ps_protocol.errors import LeaseExpired, Superseded, WorkerIndexTaken
from ps_protocol.roles.chief import ClusterState, ModelReply, ModelState, PushCommit, PushOutcome, TokenReply, TokenResult
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import Driver, Worker
from tests.support.examples import machine_settings

LEASE_S = 10.0
pick = st.integers(min_value=0, max_value=1 << 16)


class StrictSync(RuleBasedStateMachine):
    """Workers that compute, repeat themselves, die, come back and are replaced, at shards that apply when they like."""

    @initialize(r=st.integers(1, 4), t=st.one_of(st.none(), st.integers(1, 4)))
    def start(self, r: int, t: int | None) -> None:
        self.r, self.t = r, t
        self.extras = max(0, r - t) if t else 0
        self.driver = Driver(replicas_to_aggregate=r, total_num_replicas=t, lease_s=LEASE_S, applies_at_once=False)
        self.workers = self.driver.train(*range(t or r))
        self.waiting: dict[int, Worker] = {}  # call -> who asked, with its local_step at the time
        self.asked_at: dict[int, int] = {}
        self.accepted: dict[int, list[PushId]] = {}
        self.last_step = 0

    def some(self, number: int) -> Worker:
        return self.workers[number % len(self.workers)]

    @rule(number=pick, step_back=st.integers(0, 2), is_staged=st.booleans())
    def commit(self, number: int, step_back: int, is_staged: bool) -> None:
        worker = self.some(number)
        step = max(0, worker.local_step - step_back)
        push_id = worker.next_push()
        with contextlib.suppress(LeaseExpired, Superseded):
            result = worker.commit(step=step, push_id=push_id, staged=is_staged)
            if result.outcome is PushOutcome.ACCEPTED:
                assert step == result.global_step
                self.accepted.setdefault(step, []).append(push_id)

    @rule(number=pick)
    def repeat_commit(self, number: int) -> None:
        worker = self.some(number)
        if not worker.sequence:
            return
        push_id = PushId(worker=worker.index, incarnation=worker.participant.incarnation, sequence=worker.sequence)
        step = next((step for step, pushes in self.accepted.items() if push_id in pushes), None)
        if step is None:
            return
        with contextlib.suppress(LeaseExpired, Superseded):
            assert worker.commit(step=step, push_id=push_id).first_outcome is PushOutcome.ACCEPTED

    @rule(number=pick, is_repeated=st.booleans(), with_commit=st.booleans(), max_wait_s=st.sampled_from([0.0, 2.0, 20.0]))
    def ask(self, number: int, is_repeated: bool, with_commit: bool, max_wait_s: float) -> None:
        worker = self.some(number)
        commit = PushCommit(push_id=worker.next_push(), step=worker.local_step, staged=True) if with_commit else None
        before = self.driver.coordinator.status(self.driver.now).num_accepted
        try:
            call = worker.ask(repeat=is_repeated and worker.request_id > 0, max_wait_s=max_wait_s, commit=commit)
        except (LeaseExpired, Superseded):
            return
        if commit is not None and self.driver.coordinator.status(self.driver.now).num_accepted > before:
            self.accepted.setdefault(commit.step, []).append(commit.push_id)
        self.waiting[call], self.asked_at[call] = worker, worker.local_step

    @precondition(lambda self: self.waiting)
    @rule(number=pick)
    def cancel(self, number: int) -> None:
        call = sorted(self.waiting)[number % len(self.waiting)]
        self.driver.send(ev.CallCancelled(call=call))
        del self.waiting[call]

    @precondition(lambda self: self.driver.to_apply)
    @rule()
    def apply(self) -> None:
        self.driver.apply()

    @rule(duration_s=st.floats(0.1, 6.0), number=pick)
    def pass_time(self, duration_s: float, number: int) -> None:
        """Time passes; all but one worker send heartbeats."""
        silent = self.some(number)
        for worker in self.workers:
            if worker is not silent:
                with contextlib.suppress(LeaseExpired, Superseded):
                    worker.heartbeat()
        self.driver.pass_time(duration_s)

    @rule(number=pick, is_takeover=st.booleans(), failure=st.sampled_from(["boom", None]))
    def replace(self, number: int, is_takeover: bool, failure: str | None) -> None:
        place = number % len(self.workers)
        if failure is not None:
            with contextlib.suppress(Superseded):
                self.workers[place].leave(failure=failure)
        with contextlib.suppress(WorkerIndexTaken):
            self.workers[place] = Worker(self.driver, self.workers[place].index, takeover=is_takeover)

    @invariant()
    def answers_are_tokens_of_the_open_step(self) -> None:
        for call in [call for call in self.waiting if call in self.driver.answers]:
            worker, reply = self.waiting.pop(call), self.driver.answers[call]
            if not isinstance(reply, TokenReply):
                assert isinstance(reply, (LeaseExpired, Superseded))
                continue
            if reply.result is TokenResult.TOKEN:
                assert reply.step == self.driver.step, "a token of a step gone by, or of one to come"
                assert reply.step >= self.asked_at[call]
                if worker in self.workers:
                    worker.local_step = max(worker.local_step, reply.step)
            else:
                assert reply.result is TokenResult.WAIT
                assert reply.waiting_for

    @invariant()
    def nobody_waits_for_a_step_that_has_passed(self) -> None:
        for call in self.waiting:
            assert self.asked_at[call] == self.driver.step

    @invariant()
    def the_step_rises_one_by_one_and_only_by_being_applied(self) -> None:
        assert self.driver.step == len(self.driver.applied)
        assert self.driver.step >= self.last_step
        self.last_step = self.driver.step
        assert self.driver.coordinator.state is ClusterState.TRAINING

    @invariant()
    def each_step_is_made_of_what_was_accepted_for_it(self) -> None:
        for step in self.driver.applied + self.driver.to_apply:
            assert list(step.contributors) == sorted(self.accepted[step.step])
            assert len(step.contributors) == self.r
            workers = [push.worker for push in step.contributors]
            assert len(workers) - len(set(workers)) <= self.extras, "more from some worker than there were extra tokens"
        every_push = [push for pushes in self.accepted.values() for push in pushes]
        assert len(every_push) == len(set(every_push)), "a push is part of two steps"

    def teardown(self) -> None:
        """Heal everything: every index has a live worker that works properly; then the steps must continue."""
        if not hasattr(self, "driver"):
            return
        workers = [Worker(self.driver, worker.index, takeover=True) for worker in self.workers]
        for _ in range(4 * self.r):
            while self.driver.to_apply:
                self.driver.apply()
            for worker in workers:
                if worker.registration.may_contribute or worker.local_step > worker.registration.global_step or worker.request_id:
                    worker.commit()
                call = worker.ask()
                worker.has_token(call)
            while self.driver.to_apply:
                self.driver.apply()
            for worker in workers:
                worker.local_step = self.driver.step
        assert self.driver.step > self.last_step, "the cluster is stuck although all is healed"


StrictSync.TestCase.settings = machine_settings(num_examples=25, num_steps=30)
TestStrictSync = StrictSync.TestCase


def test_the_state_machine_of_the_invariants_begins_with_a_worker_that_initialises_the_model() -> None:
    driver = Driver()
    call = driver.ask_model(Worker(driver))
    assert isinstance(driver.answers[call], ModelReply)
    assert driver.answers[call].state is ModelState.INITIALIZE
