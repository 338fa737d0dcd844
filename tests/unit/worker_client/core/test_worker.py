"""A worker's calls and their order, without a cluster: the test makes up each answer."""

from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ps_protocol.errors import Cancelled, DataMismatch, DeadlineExceeded, EpochMismatch, LeaseExpired, PsError, TooManyPushes
from ps_protocol.model.data import DataSpec
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.spec import ModelSpec, PlacementPolicy
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.chief import (
    CommitPushRequest,
    CommitResult,
    DequeueTokenRequest,
    HeartbeatRequest,
    LeaseRangesRequest,
    LeaseReply,
    LeaseResult,
    ModelReply,
    ModelState,
    Participant,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    RegisterModelRequest,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import Attachments, PushId, named_contributions
from ps_protocol.roles.shard import PushResult
from tests.support.chief.eras import era
from worker_client.core.data import WorkerData
from worker_client.core.place import Place
from worker_client.core.sides import run
from worker_client.core.worker import Worker

ME = Participant(era=era(1), kind=ParticipantKind.WORKER, index=0, incarnation=1)
FIRST = Registration(participant=ME, lease_s=30.0, global_step=0, shard_addresses=("ps",), may_contribute=True)
MODEL = ModelSpec(
    variables=(VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(1,)),),
    optimizer=OptimizerSpec(name="sgd", learning_rate=constant(1.0)),
    placement=PlacementPolicy(),
)
READY = ModelReply(state=ModelState.READY, placement=((),), attempt=1, max_staged_per_worker=2, global_step=0)  # type: ignore[arg-type]


Act = Callable[..., Any]


class Surroundings:
    """Both sides of a worker, in a cluster in which all goes well; `asked`: its calls in order, those of the chief by their requests."""

    def __init__(self) -> None:
        self.place = Place(FIRST, self)
        self.waits: list[tuple[str, float | None]] = []
        self.asked: list[str] = []
        self.warnings: list[str] = []
        self.step = 0
        self.worker = Worker[Surroundings](self.place, chief=self, own=self, timeout_s=60.0)
        self.answers: dict[str, Act] = {
            "RegisterModelRequest": lambda _: replace(READY, global_step=self.step),
            "push": lambda *_: [PushResult.STAGED],
            "DequeueTokenRequest": self.token,
            "CommitPushRequest": lambda _: self.counted_now(),
            "give": dict,
            "register": lambda known: known,
        }
        self.others: dict[str, Act] = {}

    def counted_now(self) -> CommitResult:
        return CommitResult(outcome=PushOutcome.ACCEPTED, global_step=self.step, applied_step=self.step)

    def token(self, request: DequeueTokenRequest) -> TokenReply:
        result = self.counted_now() if request.commit is not None else None
        self.step += 1
        return TokenReply(result=TokenResult.TOKEN, step=self.step, global_step=self.step, commit=result)

    def run(self, steps: Coroutine[Any, Any, Any], **others: Act) -> Any:
        """Runs a call of the worker, with some other answers."""
        self.others = others
        return run(steps)

    def joined(self) -> "Surroundings":
        assert self.run(self.worker.join(MODEL, may_create=False, timeout_s=5.0)) is False
        self.asked.clear()
        return self

    def move(self) -> None:
        """The cluster goes back to its first step, in another epoch."""
        self.step = 0
        self.place.registration = replace(FIRST, participant=replace(ME, era=era(2)))

    def _act(self, name: str, *given: Any) -> Any:
        self.asked.append(name)
        act = self.others.get(name) or self.answers.get(name)
        return None if act is None else act(*given)

    # -- waits

    def begin_wait(self, what: str, timeout_s: float | None) -> "Surroundings":
        self.waits.append((what, timeout_s))
        return self

    def left_s(self) -> float | None:
        return 7.0

    def slice_s(self) -> float:
        return 1.0

    def explain(self, waiting_for: str, *, is_of_all: bool = False) -> None:
        """Goes on waiting."""

    # -- the chief's side

    async def ask(self, request: Any, *, what: str, wait: Any = None, takes_place: bool = False) -> Any:
        return self._act(type(request).__name__, request)

    async def register(self, known: Registration, held: tuple[int, ...]) -> Registration:
        registration: Registration = self._act("register", known)
        return registration

    async def beat(self, participant: Participant) -> Any:
        return self._act("beat", participant)

    async def lease(self, request: LeaseRangesRequest, wait: Any) -> LeaseReply:
        reply: LeaseReply = self._act("lease", request)
        return reply

    def lease_ahead(self, request: LeaseRangesRequest) -> None:
        self._act("lease_ahead", request)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        yield

    async def await_turn(self) -> None:
        """Nobody else has a turn."""

    def moved(self) -> None:
        """Nothing is under way."""

    async def pause(self, wait: Any, seconds: float) -> None:
        self._act("pause", seconds)

    # -- the worker's own side

    async def create(self, reply: ModelReply) -> None:
        self._act("create", reply)

    async def open(self, model: ModelSpec, reply: ModelReply, *, has_created: bool) -> "Surroundings":
        self._act("open", model)
        return self

    def heard_of_shards(self) -> None:
        self._act("heard_of_shards")

    async def came_back(self, former: Participant, cause: PsError) -> None:
        self._act("came_back", former)

    def counts(self, commit: PushCommit) -> None:
        """The test sees the request."""

    def counted(self, commit: PushCommit, result: CommitResult) -> None:
        """The test sees the outcome."""

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    # -- its model

    held_step, has_dense = None, True

    async def stage(self, content: Any, step: int, *, is_waited_for: bool) -> Any:
        return self._act("stage", content)

    async def push(self, staged: Any, push_id: PushId, step: int, *, refused: tuple[int, ...]) -> list[PushResult]:
        results: list[PushResult] = self._act("push", push_id, refused)
        return results

    def expect(self, step: int, names: Collection[str] | None = None) -> None:
        self._act("expect", step)

    async def fetch(self, step: int, *, may_view: bool, names: Collection[str] | None = None) -> None:
        self._act("fetch", step)

    async def fetch_newest(self, *, is_aligned: bool) -> int | None:
        raise AssertionError("no test here reads the newest")

    async def give(self, *, is_copied: bool, names: Collection[str] | None = None) -> dict[str, Any]:
        variables: dict[str, Any] = self._act("give")
        return variables

    async def read_rows(self, name: str, indices: Any, *, step: int | None, is_aligned: bool) -> Any:
        raise AssertionError("no test here reads rows")

    async def free_gradients(self, timeout_s: float | None) -> None:
        self._act("free_gradients")

    def protect_gradients(self) -> None:
        self._act("protect_gradients")

    def release(self) -> None:
        """There is no memory."""


@pytest.fixture
def around() -> Surroundings:
    return Surroundings().joined()


def test_a_step_is_staged_pushed_counted_with_the_wish_for_a_token_and_read(around: Surroundings) -> None:
    outcome = around.run(around.worker.contribute("gradients", is_waited_for=True, timeout_s=5.0))
    assert (outcome.outcome, outcome.step, around.worker.state.local_step) == (PushOutcome.ACCEPTED, 0, 1)
    assert around.asked == ["stage", "push", "expect", "DequeueTokenRequest", "free_gradients", "fetch"]


def test_an_unreadable_user_state_is_reported_and_replaced_and_the_worker_still_joins() -> None:
    around = Surroundings()
    given = replace(READY, attached=Attachments(user_state="[" * 60_000))
    around.run(around.worker.join(MODEL, may_create=False, timeout_s=5.0), RegisterModelRequest=lambda _: given)
    (warning,) = around.warnings
    assert "it continues with an empty user_state" in warning
    assert dict(around.worker.user_state) == {}
    assert around.worker.user_state.to_send() == "{}", "the next contribution that counts replaces it"


@pytest.mark.parametrize(("version", "asked"), [(0, []), (5, ["register", "heard_of_shards"])])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_worker_hears_which_servers_hold_the_shards_before_it_calls_one_if_they_have_changed_since_it_registered(
    version: int, asked: list[str], is_first: bool
) -> None:
    around = Surroundings()
    states = iter([ModelState.INITIALIZE, ModelState.READY] if is_first else [ModelState.READY])

    def agree(_: RegisterModelRequest) -> ModelReply:
        return replace(READY, state=next(states), shards_version=version)

    def register(known: Registration) -> Registration:
        return replace(known, shards_version=version)

    around.run(around.worker.join(MODEL, may_create=True, timeout_s=5.0), RegisterModelRequest=agree, register=register)
    assert around.asked == [
        "RegisterModelRequest",
        *asked,
        *(["create", "CompleteInitializationRequest", "RegisterModelRequest"] if is_first else []),
        "open",
    ]


def test_a_worker_that_gets_another_place_while_it_hears_of_the_shards_joins_in_that_place(around: Surroundings) -> None:
    around.move()
    participants: list[Participant] = []

    def agree(request: RegisterModelRequest) -> ModelReply:
        participants.append(request.participant)
        return replace(READY, shards_version=5)

    def register(_: Registration) -> Registration:
        return replace(FIRST, participant=replace(ME, era=era(3)), shards_version=5)

    around.run(around.worker.check_place(), RegisterModelRequest=agree, register=register)
    assert [one.era for one in participants] == [era(2), era(3)]
    assert around.worker.state.participant.era == era(3)


def test_a_push_is_counted_and_waits_for_nothing(around: Surroundings) -> None:
    assert around.run(around.worker.contribute("gradients", is_waited_for=False)).is_accepted
    assert around.asked == ["stage", "push", "CommitPushRequest"]


def test_a_failed_push_is_named_to_the_shards_with_the_next_push(around: Surroundings) -> None:
    def full(*_: Any) -> Any:
        raise TooManyPushes("two are under way")

    with pytest.raises(TooManyPushes):
        around.run(around.worker.contribute("gradients", is_waited_for=False), push=full)
    pushes: list[tuple[int, tuple[int, ...]]] = []

    def staged(push_id: PushId, refused: tuple[int, ...]) -> list[PushResult]:
        pushes.append((push_id.sequence, refused))
        return [PushResult.STAGED]

    around.run(around.worker.contribute("gradients", is_waited_for=False), push=staged)
    assert pushes == [(2, (1,))]


def test_a_push_to_a_full_shard_has_it_drop_uncommitted_contributions(around: Surroundings) -> None:
    held = [PushId(worker=0, incarnation=ME.incarnation, sequence=sequence) for sequence in (1, 2, 3)]
    pushes: list[tuple[int, tuple[int, ...]]] = []

    def full_once(push_id: PushId, refused: tuple[int, ...]) -> list[PushResult]:
        pushes.append((push_id.sequence, refused))
        if push_id.sequence > 1 and not refused:
            raise TooManyPushes("three are under way", facts=named_contributions(held))
        return [PushResult.STAGED]

    def lost(_: Any) -> CommitResult:
        return CommitResult(outcome=PushOutcome.ACCEPTED, global_step=0, applied_step=0)

    around.run(around.worker.contribute("gradients", is_waited_for=False), push=full_once, CommitPushRequest=lost)
    for _ in range(2):
        around.worker.state.number_push()
    around.run(around.worker.contribute("gradients", is_waited_for=False), push=full_once, CommitPushRequest=lost)
    assert pushes == [(1, ()), (4, ()), (4, (2, 3))]


def test_a_shard_that_names_unknown_contributions_is_not_asked_for_ever(around: Surroundings) -> None:
    def full(_: PushId, refused: tuple[int, ...]) -> Any:
        held = [PushId(worker=0, incarnation=ME.incarnation, sequence=len(refused) + 1)]
        raise TooManyPushes("it is full", facts=named_contributions(held))

    around.worker.state.num_pushes = 1_000_000
    with pytest.raises(TooManyPushes, match="it is full"):
        around.run(around.worker.contribute("gradients", is_waited_for=False), push=full)


def test_an_interrupted_wait_protects_the_arrays_that_are_being_sent(around: Surroundings) -> None:
    def interrupted(_: DequeueTokenRequest) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        around.run(around.worker.wait(timeout_s=None), DequeueTokenRequest=interrupted)
    assert around.asked == ["DequeueTokenRequest", "protect_gradients"]


def test_a_rollback_under_a_push_is_its_outcome_and_no_token_is_waited_for_then(around: Surroundings) -> None:
    def other_epoch(*_: Any) -> Any:
        around.move()
        raise EpochMismatch("epoch 2")

    outcome = around.run(around.worker.contribute("gradients", is_waited_for=False), push=other_epoch)
    assert (outcome.outcome, around.worker.num_rollbacks) == (PushOutcome.ROLLED_BACK, 1)
    assert around.asked == ["stage", "push", "RegisterModelRequest", "open", "came_back"]
    around.asked.clear()
    assert around.run(around.worker.wait(timeout_s=None)) is True
    assert around.asked == []
    around.run(around.worker.wait(timeout_s=None))
    assert around.asked[0] == "DequeueTokenRequest", "who skips that step waits for the next one"


@pytest.mark.parametrize("is_heard", [False, True])
def test_a_token_is_not_taken_at_another_place(around: Surroundings, is_heard: bool) -> None:
    def late(request: DequeueTokenRequest) -> TokenReply:
        reply = around.token(request)
        if is_heard:
            return replace(reply, shards_version=5)
        around.move()  # as the heartbeat does
        return reply

    def register(_: Registration) -> Registration:
        around.move()
        return around.place.registration

    answers: dict[str, Act] = {"DequeueTokenRequest": late, "register": register}
    outcome = around.run(around.worker.contribute("gradients", is_waited_for=True, timeout_s=5.0), **answers)
    assert outcome.outcome is PushOutcome.ROLLED_BACK
    assert around.asked[-4:] == ["RegisterModelRequest", "open", "came_back", "fetch"], "it has come back to the model"
    assert around.worker.state.local_step == 0


def test_a_worker_whose_server_was_brought_back_by_a_chief_that_ended_continues_with_the_next_chief_in_the_same_epoch() -> None:
    around, num_beats, num_opened = Surroundings(), 0, 0

    def beat(_: HeartbeatRequest) -> None:
        nonlocal num_beats
        num_beats += 1
        assert num_beats < 10, "it waits for another epoch"
        if num_beats == 3:
            around.place.registration = replace(FIRST, chief_incarnation=FIRST.chief_incarnation + 1)

    def opened(_: ModelSpec) -> None:
        nonlocal num_opened
        num_opened += 1
        if num_opened == 1:
            raise EpochMismatch("ps 1: no chief has adopted it since it started, you have epoch 1")

    around.run(around.worker.join(MODEL, may_create=False, timeout_s=5.0), HeartbeatRequest=beat, open=opened)
    assert (num_beats, num_opened) == (3, 2)


def test_the_outcome_of_a_contribution_stays_true_for_a_worker_whose_lease_ended(
    around: Surroundings,
) -> None:
    result = CommitResult(outcome=PushOutcome.ACCEPTED, global_step=3, applied_step=2, staleness=2, factor=0.5)
    replies = iter([TokenReply(result=TokenResult.WAIT, step=2, global_step=2, commit=result)])

    def lease_ends(_: DequeueTokenRequest) -> TokenReply:
        reply = next(replies, None)
        if reply is None:
            raise LeaseExpired("its lease had ended")
        return reply

    def register(_: Registration) -> Registration:
        return replace(FIRST, participant=replace(ME, incarnation=2), global_step=3)

    answers: dict[str, Act] = {"DequeueTokenRequest": lease_ends, "register": register}
    outcome = around.run(around.worker.contribute("gradients", is_waited_for=True, timeout_s=5.0), **answers)
    assert (outcome.outcome, outcome.applied_step, outcome.staleness, outcome.factor) == (PushOutcome.ACCEPTED, 2, 2, 0.5)


def test_a_worker_whose_lease_ends_while_it_reads_learns_that_its_contribution_is_applied(
    around: Surroundings,
) -> None:
    has_failed: list[bool] = []

    def connections_end(_: int) -> None:
        if not has_failed:
            has_failed.append(True)
            around.place.registration = replace(FIRST, participant=replace(ME, incarnation=2), global_step=1)
            raise Cancelled("it has registered again")

    outcome = around.run(around.worker.contribute("gradients", is_waited_for=True, timeout_s=5.0), fetch=connections_end)
    assert (outcome.outcome, outcome.applied_step) == (PushOutcome.ACCEPTED, 0)


@pytest.mark.parametrize(("of_session", "of_call", "expected"), [(3.0, None, 3.0), (3.0, 1.0, 1.0), (1.0, 3.0, 1.0), (None, None, None)])
def test_rejoining_is_bounded_by_the_time_limits_of_session_and_call(
    around: Surroundings, of_session: float | None, of_call: float | None, expected: float | None
) -> None:
    def other_epoch(_: DequeueTokenRequest) -> Any:
        around.move()
        raise EpochMismatch("epoch 2")

    around.worker.recovery_timeout_s = of_session
    around.run(around.worker.wait(timeout_s=of_call), DequeueTokenRequest=other_epoch)
    assert ("worker 0 comes back to the model", expected) in around.waits


def test_a_worker_that_rejoins_during_a_wait_waits_again_at_the_next_call(around: Surroundings) -> None:
    def other_epoch(_: DequeueTokenRequest) -> Any:
        around.move()
        raise EpochMismatch("epoch 2")

    assert around.run(around.worker.wait(timeout_s=None), DequeueTokenRequest=other_epoch) is True
    around.asked.clear()
    around.run(around.worker.wait(timeout_s=None))
    assert around.asked[0] == "DequeueTokenRequest"


def test_a_worker_that_follows_steps_asks_for_a_token_even_if_it_may_compute(around: Surroundings) -> None:
    def other_epoch(*_: Any) -> Any:
        around.move()
        raise EpochMismatch("epoch 2")

    around.run(around.worker.contribute("gradients", is_waited_for=False), push=other_epoch)
    around.asked.clear()
    around.run(around.worker.follow(timeout_s=None))
    assert around.asked[0] == "DequeueTokenRequest"


def test_rejoining_during_a_read_is_bounded_by_the_recovery_timeout(around: Surroundings) -> None:
    has_failed: list[bool] = []

    def once() -> dict[str, Any]:
        if not has_failed:
            has_failed.append(True)
            around.move()
            raise EpochMismatch("epoch 2")
        return {"w": 1}

    assert around.run(around.worker.read(is_copied=True, timeout_s=5.0), give=once) == {"w": 1}
    assert ("worker 0 comes back to the model", 5.0) in around.waits


def test_a_worker_whose_first_token_comes_with_another_policy_asks_for_it_and_joins() -> None:
    around = Surroundings()
    around.place.registration = replace(FIRST, may_contribute=False)

    def token(request: DequeueTokenRequest) -> TokenReply:
        return replace(around.token(request), settings_version=3)

    around.run(around.worker.join(MODEL, may_create=False, timeout_s=5.0), DequeueTokenRequest=token)
    assert around.asked == ["RegisterModelRequest", "open", "DequeueTokenRequest", "RegisterModelRequest"]
    assert around.worker.state.local_step == 1


@pytest.mark.parametrize("is_half_way", [False, True])
def test_a_worker_leases_training_data_in_a_new_place_once_it_has_come_back_to_the_model_there(
    around: Surroundings, is_half_way: bool
) -> None:
    commits = []

    def fetch(_: int) -> None:
        if around.worker.state.participant is not around.place.participant:
            raise EpochMismatch("epoch 2")

    def unheard(_: RegisterModelRequest) -> Any:
        raise DeadlineExceeded("the chief does not answer")

    def count(request: CommitPushRequest) -> CommitResult:
        commits.append(request.commit)
        return around.counted_now()

    # As the thread of the heartbeat may take the place again at any time.
    around.move()
    if is_half_way:
        with pytest.raises(DeadlineExceeded):
            around.run(around.worker.read(is_copied=True), fetch=fetch, RegisterModelRequest=unheard)
    spec = DataSpec(name="train", num_samples=6, range_size=3, num_epochs=1)
    data = WorkerData(spec, around.worker)
    granted = LeaseReply(result=LeaseResult.GRANTED, ranges=(spec.range(0), spec.range(1)))
    assert around.run(data.next(timeout_s=None), lease=lambda _: granted) == spec.range(0)
    around.run(around.worker.read(is_copied=True), fetch=fetch)
    outcome = around.run(around.worker.contribute("gradients", is_waited_for=False), CommitPushRequest=count)
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

    def lease(request: LeaseRangesRequest) -> LeaseReply:
        participants.append(request.participant)
        return next(replies, last)

    def token(request: DequeueTokenRequest) -> TokenReply:
        if len(participants) == 2 and request.participant == ME:
            around.move()
            raise EpochMismatch("epoch 2")
        return around.token(request)

    data = WorkerData(spec, around.worker)
    status = SimpleNamespace(global_step=9)
    given = around.run(data.next(timeout_s=None), lease=lease, DequeueTokenRequest=token, ClusterStatusRequest=lambda _: status)
    assert (given, participants) == (spec.range(0), [ME, ME, around.place.participant])


def test_a_range_of_a_contribution_that_was_not_sent_stays_with_its_data_while_other_data_is_refused(around: Surroundings) -> None:
    spec = DataSpec(name="train", num_samples=6, range_size=3, num_epochs=1)
    data, refused = (WorkerData(one, around.worker) for one in (spec, replace(spec, range_size=2)))

    def lease(request: LeaseRangesRequest) -> LeaseReply:
        if request.data != spec:
            raise DataMismatch("the training data is 'train' in ranges of 3")
        return LeaseReply(result=LeaseResult.GRANTED, ranges=(spec.range(0),))

    def take() -> object:
        return around.run(data.next(timeout_s=None), lease=lease)

    assert take() == spec.range(0)
    around.move()
    around.run(around.worker.read(is_copied=True))
    assert take() == spec.range(0)
    # The ranges of the former place have gone back to the chief, so nothing is sent.
    assert around.run(around.worker.contribute("gradients", is_waited_for=False)).outcome is PushOutcome.ROLLED_BACK
    with pytest.raises(DataMismatch):
        around.run(refused.next(timeout_s=None), lease=lease)
    around.asked.clear()
    assert take() == spec.range(0)
    assert "lease" not in around.asked
