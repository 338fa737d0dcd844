"""A worker's requests and their order, without a cluster: the test makes up each answer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ps_protocol.errors import Cancelled, DataMismatch, DeadlineExceeded, EpochMismatch, LeaseExpired, TooManyPushes
from ps_protocol.model.data import DataSpec
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.chief import (
    CommitResult,
    LeaseReply,
    LeaseResult,
    ModelReply,
    ModelState,
    Participant,
    ParticipantKind,
    PushOutcome,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import Attachments, PushId, named_contributions
from ps_protocol.roles.shard import PushResult
from tests.support.chief.eras import era
from worker_client.core import requests as ask
from worker_client.core.data import WorkerData
from worker_client.core.place import Place
from worker_client.core.worker import Worker

ME = Participant(era=era(1), kind=ParticipantKind.WORKER, index=0, incarnation=1)
FIRST = Registration(participant=ME, lease_s=30.0, global_step=0, shard_addresses=("ps",), may_contribute=True)
MODEL = ModelSpec(
    variables=(VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(1,)),),
    optimizer=OptimizerSpec(name="sgd", learning_rate=constant(1.0)),
    placement=PlacementPolicy(),
)
READY = ModelReply(state=ModelState.READY, placement=((),), attempt=1, max_staged_per_worker=2, global_step=0)  # type: ignore[arg-type]


class Surroundings:
    """Answers a worker as a cluster does in which all goes well; `asked` is what it has asked for, in order."""

    def __init__(self) -> None:
        self.place = Place(FIRST)
        self.waits: list[tuple[str, float | None]] = []
        self.asked: list[str] = []
        self.step = 0
        self.worker = Worker(self.place, begin_wait=self.begin_wait, timeout_s=60.0)
        self.answers: dict[type, Callable[[Any], Any]] = {
            ask.Agree: lambda _: replace(READY, global_step=self.step),
            ask.PushParts: lambda _: [PushResult.STAGED],
            ask.AwaitToken: self.token,
            ask.Count: lambda _: self.counted(),
            ask.Give: lambda _: {},
        }

    def begin_wait(self, what: str, timeout_s: float | None) -> Any:
        self.waits.append((what, timeout_s))
        return self

    def left_s(self) -> float | None:
        return 7.0

    def explain(self, waiting_for: str, *, is_of_all: bool = False) -> None:
        """Goes on waiting."""

    def counted(self) -> CommitResult:
        return CommitResult(outcome=PushOutcome.ACCEPTED, global_step=self.step, applied_step=self.step)

    def token(self, request: ask.AwaitToken) -> TokenReply:
        result = self.counted() if request.commit is not None else None
        self.step += 1
        return TokenReply(result=TokenResult.TOKEN, step=self.step, global_step=self.step, commit=result)

    def run(self, steps: ask.Asking[Any], **others: Callable[[Any], Any]) -> Any:
        acts: Mapping[str, Callable[[Any], Any]] = {kind.__name__: act for kind, act in self.answers.items()} | others
        return ask.run(steps, _Acts(self.asked, acts))

    def joined(self) -> "Surroundings":
        assert self.run(self.worker.join(MODEL, may_create=False, timeout_s=5.0)) is False
        self.asked.clear()
        return self

    def move(self) -> None:
        """The cluster goes back to its first step, in another epoch."""
        self.step = 0
        self.place.registration = replace(FIRST, participant=replace(ME, era=era(2)))


class _Acts(dict[type, Callable[[Any], Any]]):
    def __init__(self, asked: list[str], acts: Mapping[str, Callable[[Any], Any]]) -> None:
        super().__init__()
        self._asked, self._by_name = asked, acts

    def __missing__(self, kind: type) -> Callable[[Any], Any]:
        def act(request: Any) -> Any:
            self._asked.append(kind.__name__)
            found = self._by_name.get(kind.__name__)
            return None if found is None else found(request)

        return act


@pytest.fixture
def around() -> Surroundings:
    return Surroundings().joined()


def test_a_step_is_staged_pushed_counted_with_the_wish_for_a_token_and_read(around: Surroundings) -> None:
    outcome = around.run(around.worker.contribute("gradients", is_waited_for=True, timeout_s=5.0))
    assert (outcome.outcome, outcome.step, around.worker.state.local_step) == (PushOutcome.ACCEPTED, 0, 1)
    assert around.asked == ["Stage", "PushParts", "Expect", "AwaitToken", "FreeGradients", "Fetch"]


def test_an_unreadable_user_state_is_reported_and_replaced_and_the_worker_still_joins() -> None:
    around = Surroundings()
    given = replace(READY, attached=Attachments(user_state="[" * 60_000))
    around.run(around.worker.join(MODEL, may_create=False, timeout_s=5.0), Agree=lambda _: given)
    assert around.asked.count("StateUnreadable") == 1
    assert dict(around.worker.user_state) == {}
    assert around.worker.user_state.to_send() == "{}", "the next contribution that counts replaces it"


@pytest.mark.parametrize(("version", "asked"), [(0, []), (5, ["HearShards"])])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_worker_hears_which_servers_hold_the_shards_before_it_calls_one_if_they_have_changed_since_it_registered(
    version: int, asked: list[str], is_first: bool
) -> None:
    around = Surroundings()
    states = iter([ModelState.INITIALIZE, ModelState.READY] if is_first else [ModelState.READY])

    def agree(_: ask.Agree) -> ModelReply:
        return replace(READY, state=next(states), shards_version=version)

    def hear(request: ask.HearShards) -> None:
        assert request.version == version
        around.place.registration = replace(around.place.registration, shards_version=version)

    around.run(around.worker.join(MODEL, may_create=True, timeout_s=5.0), Agree=agree, HearShards=hear)
    assert around.asked == ["Agree", *asked, *(["Create", "Complete", "Agree"] if is_first else []), "Open", "Arrived"]


def test_a_worker_that_gets_another_place_while_it_hears_of_the_shards_joins_in_that_place(around: Surroundings) -> None:
    around.move()
    participants: list[Participant] = []

    def agree(request: ask.Agree) -> ModelReply:
        participants.append(request.participant)
        return replace(READY, shards_version=5)

    def hear(_: ask.HearShards) -> None:
        participant = replace(ME, era=era(3))
        around.place.registration = replace(FIRST, participant=participant, shards_version=5)

    around.run(around.worker.check_place(), Agree=agree, HearShards=hear)
    assert [one.era for one in participants] == [era(2), era(3)]
    assert around.worker.state.participant.era == era(3)


def test_a_push_is_counted_and_waits_for_nothing(around: Surroundings) -> None:
    assert around.run(around.worker.contribute("gradients", is_waited_for=False)).is_accepted
    assert around.asked == ["Stage", "PushParts", "Count"]


def test_a_failed_push_is_named_to_the_shards_with_the_next_push(around: Surroundings) -> None:
    def full(_: ask.PushParts) -> Any:
        raise TooManyPushes("two are under way")

    with pytest.raises(TooManyPushes):
        around.run(around.worker.contribute("gradients", is_waited_for=False), PushParts=full)
    pushes: list[ask.PushParts] = []

    def staged(push: ask.PushParts) -> list[PushResult]:
        pushes.append(push)
        return [PushResult.STAGED]

    around.run(around.worker.contribute("gradients", is_waited_for=False), PushParts=staged)
    assert [(push.push_id.sequence, push.refused) for push in pushes] == [(2, (1,))]


def test_a_push_to_a_full_shard_has_it_drop_uncommitted_contributions(around: Surroundings) -> None:
    held = [PushId(worker=0, incarnation=ME.incarnation, sequence=sequence) for sequence in (1, 2, 3)]
    pushes: list[ask.PushParts] = []

    def full_once(push: ask.PushParts) -> list[PushResult]:
        pushes.append(push)
        if push.push_id.sequence > 1 and not push.refused:
            raise TooManyPushes("three are under way", facts=named_contributions(held))
        return [PushResult.STAGED]

    def lost(_: Any) -> CommitResult:
        return CommitResult(outcome=PushOutcome.ACCEPTED, global_step=0, applied_step=0)

    around.run(around.worker.contribute("gradients", is_waited_for=False), PushParts=full_once, Count=lost)
    for _ in range(2):
        around.worker.state.number_push()
    around.run(around.worker.contribute("gradients", is_waited_for=False), PushParts=full_once, Count=lost)
    assert [(push.push_id.sequence, push.refused) for push in pushes] == [(1, ()), (4, ()), (4, (2, 3))]


def test_a_shard_that_names_unknown_contributions_is_not_asked_for_ever(around: Surroundings) -> None:
    def full(push: ask.PushParts) -> Any:
        held = [PushId(worker=0, incarnation=ME.incarnation, sequence=len(push.refused) + 1)]
        raise TooManyPushes("it is full", facts=named_contributions(held))

    around.worker.state.num_pushes = 1_000_000
    with pytest.raises(TooManyPushes, match="it is full"):
        around.run(around.worker.contribute("gradients", is_waited_for=False), PushParts=full)


def test_an_interrupted_wait_protects_the_arrays_that_are_being_sent(around: Surroundings) -> None:
    def interrupted(_: ask.AwaitToken) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        around.run(around.worker.wait(timeout_s=None), AwaitToken=interrupted)
    assert around.asked == ["AwaitToken", "ProtectGradients"]


def test_a_rollback_under_a_push_is_its_outcome_and_no_token_is_waited_for_then(around: Surroundings) -> None:
    def other_epoch(_: ask.PushParts) -> Any:
        around.move()
        raise EpochMismatch("epoch 2")

    outcome = around.run(around.worker.contribute("gradients", is_waited_for=False), PushParts=other_epoch)
    assert (outcome.outcome, around.worker.num_rollbacks) == (PushOutcome.ROLLED_BACK, 1)
    assert around.asked == ["Stage", "PushParts", "Agree", "Open", "Arrived"]
    around.asked.clear()
    assert around.run(around.worker.wait(timeout_s=None)) is True
    assert around.asked == []
    around.run(around.worker.wait(timeout_s=None))
    assert around.asked[0] == "AwaitToken", "who skips that step waits for the next one"


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_token_is_not_taken_at_another_place(around: Surroundings, is_heard: bool) -> None:
    def late(request: ask.AwaitToken) -> TokenReply:
        reply = around.token(request)
        if is_heard:
            return replace(reply, shards_version=5)
        around.move()  # as the heartbeat does
        return reply

    def hear(_: ask.HearShards) -> None:
        around.move()

    answers: dict[str, Callable[[Any], Any]] = {"AwaitToken": late, "HearShards": hear}
    outcome = around.run(around.worker.contribute("gradients", is_waited_for=True, timeout_s=5.0), **answers)
    assert outcome.outcome is PushOutcome.ROLLED_BACK
    assert around.asked[-4:] == ["Agree", "Open", "Arrived", "Fetch"], "it has come back to the model"
    assert around.worker.state.local_step == 0


def test_a_worker_whose_server_was_brought_back_by_a_chief_that_ended_continues_with_the_next_chief_in_the_same_epoch() -> None:
    around, num_beats, num_opened = Surroundings(), 0, 0

    def beat(_: ask.Beat) -> None:
        nonlocal num_beats
        num_beats += 1
        assert num_beats < 10, "it waits for another epoch"
        if num_beats == 3:
            around.place.registration = replace(FIRST, chief_incarnation=FIRST.chief_incarnation + 1)

    def opened(_: ask.Open) -> None:
        nonlocal num_opened
        num_opened += 1
        if num_opened == 1:
            raise EpochMismatch("ps 1: no chief has adopted it since it started, you have epoch 1")

    around.run(around.worker.join(MODEL, may_create=False, timeout_s=5.0), Beat=beat, Open=opened)
    assert (num_beats, num_opened) == (3, 2)


def test_the_outcome_of_a_contribution_stays_true_for_a_worker_whose_lease_ended(
    around: Surroundings,
) -> None:
    result = CommitResult(outcome=PushOutcome.ACCEPTED, global_step=3, applied_step=2, staleness=2, weight=0.5)
    replies = iter([TokenReply(result=TokenResult.WAIT, step=2, global_step=2, commit=result)])

    def lease_ends(_: ask.AwaitToken) -> TokenReply:
        reply = next(replies, None)
        if reply is None:
            around.place.registration = replace(FIRST, participant=replace(ME, incarnation=2), global_step=3)
            raise LeaseExpired("its lease had ended")
        return reply

    outcome = around.run(around.worker.contribute("gradients", is_waited_for=True, timeout_s=5.0), AwaitToken=lease_ends)
    assert (outcome.outcome, outcome.applied_step, outcome.staleness, outcome.weight) == (PushOutcome.ACCEPTED, 2, 2, 0.5)


def test_a_worker_whose_lease_ends_while_it_reads_learns_that_its_contribution_is_applied(
    around: Surroundings,
) -> None:
    has_failed: list[bool] = []

    def connections_end(_: ask.Fetch) -> None:
        if not has_failed:
            has_failed.append(True)
            around.place.registration = replace(FIRST, participant=replace(ME, incarnation=2), global_step=1)
            raise Cancelled("it has registered again")

    outcome = around.run(around.worker.contribute("gradients", is_waited_for=True, timeout_s=5.0), Fetch=connections_end)
    assert (outcome.outcome, outcome.applied_step) == (PushOutcome.ACCEPTED, 0)


@pytest.mark.parametrize(("of_session", "of_call", "expected"), [(3.0, None, 3.0), (3.0, 1.0, 1.0), (1.0, 3.0, 1.0), (None, None, None)])
def test_rejoining_is_bounded_by_the_time_limits_of_session_and_call(
    around: Surroundings, of_session: float | None, of_call: float | None, expected: float | None
) -> None:
    def other_epoch(_: ask.AwaitToken) -> Any:
        around.move()
        raise EpochMismatch("epoch 2")

    around.worker.recovery_timeout_s = of_session
    around.run(around.worker.wait(timeout_s=of_call), AwaitToken=other_epoch)
    assert ("worker 0 comes back to the model", expected) in around.waits


def test_a_worker_that_rejoins_during_a_wait_waits_again_at_the_next_call(around: Surroundings) -> None:
    def other_epoch(_: ask.AwaitToken) -> Any:
        around.move()
        raise EpochMismatch("epoch 2")

    assert around.run(around.worker.wait(timeout_s=None), AwaitToken=other_epoch) is True
    around.asked.clear()
    around.run(around.worker.wait(timeout_s=None))
    assert around.asked[0] == "AwaitToken"


def test_a_worker_that_follows_steps_asks_for_a_token_even_if_it_may_compute(around: Surroundings) -> None:
    def other_epoch(_: ask.PushParts) -> Any:
        around.move()
        raise EpochMismatch("epoch 2")

    around.run(around.worker.contribute("gradients", is_waited_for=False), PushParts=other_epoch)
    around.asked.clear()
    around.run(around.worker.follow(timeout_s=None))
    assert around.asked[0] == "AwaitToken"


def test_rejoining_during_a_read_is_bounded_by_the_recovery_timeout(around: Surroundings) -> None:
    has_failed: list[bool] = []

    def once(_: ask.Give) -> dict[str, Any]:
        if not has_failed:
            has_failed.append(True)
            around.move()
            raise EpochMismatch("epoch 2")
        return {"w": 1}

    assert around.run(around.worker.read(is_copied=True, timeout_s=5.0), Give=once) == {"w": 1}
    assert ("worker 0 comes back to the model", 5.0) in around.waits


def test_a_worker_whose_first_token_comes_with_another_policy_asks_for_it_and_joins() -> None:
    around = Surroundings()
    around.place.registration = replace(FIRST, may_contribute=False)

    def token(request: ask.AwaitToken) -> TokenReply:
        return replace(around.token(request), settings_version=3)

    around.run(around.worker.join(MODEL, may_create=False, timeout_s=5.0), AwaitToken=token)
    assert around.asked == ["Agree", "Open", "AwaitToken", "Agree", "FreeGradients", "Arrived"]
    assert around.worker.state.local_step == 1


@pytest.mark.parametrize("is_half_way", [False, True])
def test_a_worker_leases_training_data_in_a_new_place_once_it_has_come_back_to_the_model_there(
    around: Surroundings, is_half_way: bool
) -> None:
    commits = []

    def fetch(request: ask.Fetch) -> None:
        if around.worker.state.participant is not around.place.participant:
            raise EpochMismatch("epoch 2")

    def unheard(_: ask.Agree) -> Any:
        raise DeadlineExceeded("the chief does not answer")

    def count(request: ask.Count) -> CommitResult:
        commits.append(request.commit)
        return around.counted()

    # As the thread of the heartbeat may take the place again at any time.
    around.move()
    if is_half_way:
        with pytest.raises(DeadlineExceeded):
            around.run(around.worker.read(is_copied=True), Fetch=fetch, Agree=unheard)
    spec = DataSpec(name="train", num_samples=6, range_size=3, num_epochs=1)
    data = WorkerData(spec, around.worker, begin_wait=around.begin_wait)
    granted = LeaseReply(result=LeaseResult.GRANTED, ranges=(spec.range(0), spec.range(1)))
    assert around.run(data.next(timeout_s=None), Lease=lambda _: granted) == spec.range(0)
    around.run(around.worker.read(is_copied=True), Fetch=fetch)
    outcome = around.run(around.worker.contribute("gradients", is_waited_for=False), Count=count)
    assert (outcome.outcome, [commit.ranges for commit in commits]) == (PushOutcome.ACCEPTED, [(0,)])


@pytest.mark.parametrize("result", [LeaseResult.GRANTED, LeaseResult.EXHAUSTED])
def test_an_answer_about_training_data_that_a_rollback_follows_before_a_range_is_given_out_is_asked_for_again(
    around: Surroundings, result: LeaseResult
) -> None:
    spec = DataSpec(name="train", num_samples=6, range_size=3, num_epochs=1)
    ranges = (spec.range(1),) if result is LeaseResult.GRANTED else ()
    replies = iter([LeaseReply(result=LeaseResult.WAIT), LeaseReply(result=result, ranges=ranges)])
    last = LeaseReply(result=LeaseResult.GRANTED, ranges=(spec.range(0),))
    participants = []

    def lease(request: ask.Lease) -> LeaseReply:
        participants.append(request.participant)
        return next(replies, last)

    def token(request: ask.AwaitToken) -> TokenReply:
        if len(participants) == 2 and request.participant == ME:
            around.move()
            raise EpochMismatch("epoch 2")
        return around.token(request)

    data = WorkerData(spec, around.worker, begin_wait=around.begin_wait)
    status = SimpleNamespace(global_step=9)
    given = around.run(data.next(timeout_s=None), Lease=lease, AwaitToken=token, Status=lambda _: status)
    assert (given, participants) == (spec.range(0), [ME, ME, around.place.participant])


def test_a_range_of_a_contribution_that_was_not_sent_stays_with_its_data_while_other_data_is_refused(around: Surroundings) -> None:
    spec = DataSpec(name="train", num_samples=6, range_size=3, num_epochs=1)
    data, refused = (WorkerData(one, around.worker, begin_wait=around.begin_wait) for one in (spec, replace(spec, range_size=2)))

    def lease(request: ask.Lease) -> LeaseReply:
        if request.spec != spec:
            raise DataMismatch("the training data is 'train' in ranges of 3")
        return LeaseReply(result=LeaseResult.GRANTED, ranges=(spec.range(0),))

    def take() -> object:
        return around.run(data.next(timeout_s=None), Lease=lease)

    assert take() == spec.range(0)
    around.move()
    around.run(around.worker.read(is_copied=True))
    assert take() == spec.range(0)
    # The ranges of the former place have gone back to the chief, so nothing is sent.
    assert around.run(around.worker.contribute("gradients", is_waited_for=False)).outcome is PushOutcome.ROLLED_BACK
    with pytest.raises(DataMismatch):
        around.run(refused.next(timeout_s=None), Lease=lease)
    around.asked.clear()
    assert take() == spec.range(0)
    assert "Lease" not in around.asked
