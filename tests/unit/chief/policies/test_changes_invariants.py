"""Random histories under all policies, which change meanwhile: no contribution is lost or applied twice, and no wait is in vain."""

import contextlib

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ps_protocol.errors import InvalidSpec, LeaseExpired, StepAhead, Superseded
from ps_protocol.model.optimizers import constant
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.roles.chief import CommitResult, HyperparameterChange, PushOutcome, SettingsReply, TokenReply, TokenResult
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import Driver, Worker
from tests.support.examples import machine_settings

pick = st.integers(min_value=0, max_value=1 << 16)
POLICIES = (
    PolicySpec(),
    PolicySpec(replicas_to_aggregate=1),
    PolicySpec(tokens=TokenMode.FIFO),
    PolicySpec(tokens=TokenMode.FIFO, num_tokens=0, total_num_replicas=3),
    PolicySpec(name=PolicyName.SSP, staleness=0),
    PolicySpec(name=PolicyName.SSP, staleness=2, max_staleness=1),
    PolicySpec(name=PolicyName.ASYNC),
    PolicySpec(name=PolicyName.ASYNC, max_staleness=1, too_stale=TooStale.SCALE),
    PolicySpec(name=PolicyName.ASYNC, use_locking=False),
)


class ChangingPolicies(RuleBasedStateMachine):
    """Workers, shards that obey when they like, and somebody who changes the settings."""

    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy: PolicySpec) -> None:
        self.driver = Driver(replicas_to_aggregate=2, total_num_replicas=3, policy=policy, applies_at_once=False, lease_s=10.0)
        self.workers = self.driver.train(0, 1, 2)
        self.shards_obey()
        self.owed: dict[PushId, CommitResult] = {}  # accepted, and not applied on arrival
        self.num_told = 0  # applied on arrival and counted
        self.changes: list[int] = []
        self.seen = 0

    def some(self, number: int) -> Worker:
        return self.workers[number % len(self.workers)]

    def shards_obey(self) -> bool:
        if self.driver.to_configure:
            self.driver.configure()
        elif self.driver.to_apply:
            self.driver.apply()
        else:
            return False
        return True

    @property
    def are_shards_free(self) -> bool:
        """Whether shards apply on arrival, as far as they have been told."""
        return bool(self.driver.configured) and self.driver.configured[-1].applies_on_arrival

    @rule(number=pick, age=st.integers(0, 3))
    def commit(self, number: int, age: int) -> None:
        worker, is_applied = self.some(number), self.are_shards_free
        push_id, before = worker.next_push(), self.driver.step
        with contextlib.suppress(LeaseExpired, Superseded, StepAhead):
            result = worker.commit(max(0, self.driver.step - age), push_id=push_id, is_applied=is_applied, staged=not is_applied)
            if is_applied:
                self.num_told += self.driver.step - before
            elif result.outcome is PushOutcome.ACCEPTED:
                self.owed[push_id] = result

    @rule(number=pick, is_repeated=st.booleans())
    def ask(self, number: int, is_repeated: bool) -> None:
        worker = self.some(number)
        with contextlib.suppress(LeaseExpired, Superseded, StepAhead):
            worker.has_token(worker.ask(repeat=is_repeated and worker.request_id > 0))

    @rule()
    def obey(self) -> None:
        self.shards_obey()

    @rule(policy=st.sampled_from(POLICIES))
    def change_policy(self, policy: PolicySpec) -> None:
        if policy.applies_on_arrival is self.are_shards_free:
            self.changes.append(self.driver.set_policy(policy, max_wait_s=20.0))
            return
        with pytest.raises(InvalidSpec, match="cannot change once there is a model"):
            self.driver.set_policy(policy)

    @rule(rate=st.floats(0.1, 1.0))
    def change_rate(self, rate: float) -> None:
        self.changes.append(self.driver.set_hyperparameters(HyperparameterChange(learning_rate=constant(rate)), max_wait_s=20.0))

    @rule(duration_s=st.floats(0.1, 6.0), number=pick)
    def pass_time(self, duration_s: float, number: int) -> None:
        for worker in self.workers:
            if worker is not self.some(number):
                with contextlib.suppress(LeaseExpired, Superseded):
                    worker.heartbeat()
        self.driver.pass_time(duration_s)

    @rule(number=pick)
    def replace(self, number: int) -> None:
        place = number % len(self.workers)
        self.workers[place] = Worker(self.driver, self.workers[place].index, takeover=True)

    @invariant()
    def steps_follow_each_other(self) -> None:
        if not hasattr(self, "driver"):
            return
        for step in self.driver.applied[self.seen :]:
            for push_id in step.contributors:
                assert self.owed.pop(push_id, None) is not None, "applied twice, or never accepted"
            assert not set(step.discards) & self.owed.keys(), "what is still owed was dropped"
            whole = {(push.worker, push.incarnation) for push in step.discards if not push.sequence}
            assert not whole & {(push.worker, push.incarnation) for push in self.owed}
        self.seen = len(self.driver.applied)
        assert self.driver.step == self.seen + self.num_told

    @precondition(lambda self: self.driver.configured)
    @invariant()
    def settings_are_numbered(self) -> None:
        versions = [change.version for change in self.driver.configured]
        assert versions == sorted(set(versions))

    def teardown(self) -> None:
        """Let the shards obey: every change is answered; then steps must continue, and everything accepted gets applied."""
        if not hasattr(self, "driver"):
            return
        while self.shards_obey():
            pass
        for call in self.changes:
            assert self.driver.answers[call] is None or isinstance(self.driver.answers[call], SettingsReply)
        last = self.driver.step
        workers = [Worker(self.driver, worker.index, takeover=True) for worker in self.workers]
        for _ in range(6):
            for worker in workers:
                worker.local_step = self.driver.step
                call = worker.ask(commit=worker.next_commit(is_applied=self.are_shards_free, staged=not self.are_shards_free))
                while self.shards_obey():
                    pass
                reply = self.driver.answers.get(call)
                assert not isinstance(reply, TokenReply) or reply.result is TokenResult.TOKEN
        assert self.driver.step > last, "the cluster is stuck"
        applied = {push_id for step in self.driver.applied for push_id in step.contributors}
        waiting = self.driver.coordinator.status(self.driver.now).num_contributions
        assert len(self.owed.keys() - applied) <= waiting


ChangingPolicies.TestCase.settings = machine_settings(num_examples=60, num_steps=40)
TestChangingPolicies = ChangingPolicies.TestCase
