"""Random histories of a cluster whose chief, servers and storage fail; after every event the promises of recovery must hold."""

import contextlib
import itertools

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chief.options import CheckpointConfig
from ps_protocol.errors import PsError
from ps_protocol.roles.checkpoint import Durability
from ps_protocol.roles.chief import ClusterState, PushOutcome
from ps_protocol.roles.contribution import PushId
from tests.support.chief.chief_driver import Driver, Worker
from tests.support.examples import machine_settings

pick = st.integers(min_value=0, max_value=1 << 16)
# All continues within that once all is well.
_HEALED_S = 40.0


class Recovery(RuleBasedStateMachine):
    """Two servers and as many workers as a step needs. What the chief orders is done one thing at a time, when it pleases."""

    @initialize(num_workers=st.integers(1, 3), is_at_once=st.booleans(), every=st.integers(1, 3))
    def start(self, num_workers: int, is_at_once: bool, every: int) -> None:
        durability = Durability.STEP if is_at_once else Durability.INTERVAL
        checkpoints = CheckpointConfig(durability=durability, interval_s=1000.0, every_steps=every, keep=2)
        self.is_at_once = is_at_once
        self.driver = Driver.outlived(total_num_replicas=num_workers, checkpoints=checkpoints, applies_at_once=False, lease_s=1000.0)
        self.workers = self.driver.train(*range(num_workers))
        # By worker: the number of its registration that is not answered.
        self.registering: dict[int, int] = {}
        self.request_ids = itertools.count(1000)
        # By call: the epoch and the contribution of each commit that is not answered.
        self.committing: dict[int, tuple[int, PushId]] = {}
        # What was told, by epoch: the step of each contribution that was accepted, and the highest step.
        self.accepted: dict[tuple[int, PushId], int] = {}
        self.told: dict[int, int] = {}

    def some(self, number: int) -> Worker:
        return self.workers[number % len(self.workers)]

    def give(self, worker: Worker, *, repeat: bool = False) -> None:
        """Gives a contribution to the worker's step, or its latest one again; it may be refused, or not answered yet."""
        if repeat and not worker.sequence:
            return
        if repeat:
            push_id = PushId(worker=worker.index, incarnation=worker.participant.incarnation, sequence=worker.sequence)
        else:
            push_id = worker.next_push()
        with contextlib.suppress(PsError, KeyError):
            call = worker.send_commit(push_id=push_id)
            self.committing[call] = worker.participant.era.epoch, push_id
        self.hear()

    def hear(self) -> None:
        """Notes the answers to commits; one may come long after its call."""
        for call in self.committing.keys() & self.driver.answers.keys():
            key, answer = self.committing.pop(call), self.driver.answers[call]
            outcome = getattr(answer, "first_outcome", None) or getattr(answer, "outcome", None)
            if outcome is PushOutcome.ACCEPTED and answer.applied_step is not None:
                assert self.accepted.setdefault(key, answer.applied_step) == answer.applied_step, "accepted for two steps"

    # -- what happens

    @rule(number=pick)
    def contribute(self, number: int) -> None:
        self.give(self.some(number))

    @rule(number=pick)
    def repeat(self, number: int) -> None:
        self.give(self.some(number), repeat=True)

    @rule(number=pick)
    def go_on(self, number: int) -> None:
        """A worker hears of the step that is open, or takes its place again."""
        worker = self.some(number)
        if worker.participant.era.epoch == self.driver.coordinator.epoch and self.driver.coordinator.state is ClusterState.TRAINING:
            with contextlib.suppress(PsError, KeyError):
                if worker.heartbeat():
                    worker.local_step = self.driver.step
                    return
        # As long as it has not heard its new place, its request is the same one: it may have been given that place.
        request_id = self.registering.setdefault(worker.index, next(self.request_ids))
        with contextlib.suppress(PsError, KeyError, AssertionError):
            self.driver.come_back(worker, request_id=request_id)
            del self.registering[worker.index]
            if self.driver.coordinator.state is ClusterState.WAITING_FOR_MODEL:
                # All servers were lost before there was a checkpoint.
                self.driver.initialise(worker)

    @rule(num_steps=st.integers(1, 3))
    def train(self, num_steps: int) -> None:
        """Some steps in peace, if nothing is amiss."""
        for _ in range(num_steps):
            self.train_once()

    def train_once(self) -> None:
        for number, worker in enumerate(self.workers):
            self.go_on(number)
            self.give(worker)
        if self.driver.to_configure:
            self.driver.configure()
        if self.can_apply():
            self.driver.apply()

    def can_apply(self) -> bool:
        """Whether there is a step to be applied, and no server has lost its values, which refuses."""
        return bool(self.driver.to_apply) and all(shard.step is not None for shard in self.driver.shards)

    @precondition(can_apply)
    @rule()
    def apply(self) -> None:
        self.driver.apply()

    @precondition(can_apply)
    @rule(number=pick)
    def apply_at_one(self, number: int) -> None:
        """One server has applied the step, and the chief does not know."""
        self.driver.apply_at(number % len(self.driver.shards))

    @precondition(lambda self: self.driver.orders)
    @rule()
    def obey(self) -> None:
        self.driver.do(self.driver.orders.pop(0))

    @rule(is_manual=st.booleans())
    def slow_down(self, is_manual: bool) -> None:
        self.driver.is_manual = is_manual

    @rule()
    def lose_the_chief(self) -> None:
        self.driver.new_chief()

    @rule(number=pick)
    def lose_a_server(self, number: int) -> None:
        """Its orders under way come to nothing: those of an older epoch are given up, as the shell does."""
        self.driver.restart(number % len(self.driver.shards))

    @rule(is_full=st.booleans())
    def fill_the_disk(self, is_full: bool) -> None:
        self.driver.full = is_full

    @rule(duration_s=st.floats(0.1, 5.0))
    def pass_time(self, duration_s: float) -> None:
        self.driver.pass_time(duration_s)

    # -- what must hold

    @invariant()
    def a_step_is_made_of_the_same_everywhere(self) -> None:
        for step in {step for shard in self.driver.shards for step in shard.applied}:
            made_of = {shard.applied[step] for shard in self.driver.shards if step in shard.applied}
            assert len(made_of) == 1, f"step {step} is made of {made_of}"

    @invariant()
    def every_contribution_counts_once(self) -> None:
        for shard in self.driver.shards:
            pushes = [push for made_of in shard.applied.values() for push in made_of]
            assert len(pushes) == len(set(pushes)), "a contribution is in two steps"

    @invariant()
    def a_step_is_told_when_all_have_it(self) -> None:
        coordinator = self.driver.coordinator
        if coordinator.state is not ClusterState.TRAINING:
            return
        step, epoch = self.driver.step, coordinator.epoch
        here = [shard.step for shard in self.driver.shards if shard.epoch == epoch and shard.step is not None]
        assert len(here) < len(self.driver.shards) or min(here) >= step, f"step {step} is told, servers are at {here}"
        self.told[epoch] = max(step, self.told.get(epoch, 0))
        if self.is_at_once and self.driver.storage:
            lost = [told for earlier, told in self.told.items() if earlier <= epoch and told > step]
            assert not lost, f"step {lost} was told, and now {step} is open"

    @invariant()
    def what_was_accepted_is_in_its_step(self) -> None:
        epoch = self.driver.coordinator.epoch
        for (told_in, push_id), step in self.accepted.items():
            for shard in self.driver.shards:
                if told_in == epoch == shard.epoch and shard.step is not None and step in shard.applied:
                    assert push_id in shard.applied[step], f"{push_id} was accepted for step {step}, made of {shard.applied[step]}"

    def teardown(self) -> None:
        """Heal everything; then steps must continue."""
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.is_manual = driver.full = False
        driver.work_off()
        start, done = driver.now, len(driver.applied)
        while driver.now < start + _HEALED_S and len(driver.applied) < done + 2 and driver.coordinator.state is not ClusterState.FAILED:
            self.train_once()
            driver.pass_time(1.1)
        if driver.coordinator.state is ClusterState.FAILED:
            assert not driver.storage, "it has failed although there is a checkpoint"
        else:
            assert len(driver.applied) >= done + 2, f"stuck although all is healed: {driver.coordinator.explain(driver.now)}"


Recovery.TestCase.settings = machine_settings(num_examples=40, num_steps=30)
TestRecovery = Recovery.TestCase
