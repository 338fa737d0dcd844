"""Deliberately broken copies, at least one for each promise, which the simulation must catch. Knows where to break the cores."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from chief.core.cluster.attachments import ContributedAttachments
from chief.core.cluster.checkpoints import Checkpoints
from chief.core.cluster.data import DataLeases
from chief.core.cluster.members import Members, PushOutcomes
from chief.core.coordinator import Coordinator
from chief.core.ending import Ending
from chief.core.epoch.answers import Answers
from chief.core.epoch.training import Training
from chief.core.messages import ApplyStep, EndProcesses
from chief.policies.base import Grant
from chief.policies.fifo import FifoTokens
from chief.policies.ordered import OrderedPolicy
from chief.policies.sync import StrictTokens, SyncPolicy
from chief.policies.unlocked import UnlockedPolicy
from chief.shards import standby
from chief.shards.standby import ReplicaReturn, ReplicatedLink
from chief.shards.work import ShardWork
from ps_protocol.checkpoint import catalog
from ps_protocol.checkpoint.tensor_file import TensorFileReader
from ps_protocol.model.merging import MEAN
from ps_protocol.model.policy import PolicyName, PolicySpec, TokenMode, TooStale
from ps_protocol.model.variables import Array
from ps_protocol.roles.checkpoint import Checkpoint, Durability
from ps_protocol.roles.chief import DEFAULT_POLICY, FinishTrainingRequest, Participant, ParticipantKind, PushOutcome
from ps_protocol.roles.contribution import NO_STEP_ATTACHMENTS, Attachments, PushId, StepAttachments
from ps_protocol.roles.fence import Era
from ps_protocol.roles.history import Counted
from ps_protocol.roles.shard import PushReply, PushResult, ShardStatusRequest
from ps_protocol.weights import copy
from ps_protocol.weights.words import Patch, overwrite
from ps_server.contributions.inbox import Inbox
from ps_server.contributions.staging import StagingMemory
from ps_server.model.shard_model import ShardModel, StepWork
from ps_server.numbers import apply
from ps_server.numbers.keyed_rows import KeyedRows
from ps_server.numbers.occurrences import Occurrences
from ps_server.numbers.tables import Table
from ps_server.shard.followed import FollowedWeights
from ps_server.shard.gate import AdmittedWorkers, Fences
from ps_server.shard.shard import ServedShard, ShardHistory
from tests.simulation.chief_links import SimulatedPace
from tests.simulation.oracle import Oracle
from tests.simulation.scenario import MERGES, Fault, Scenario, unlocked
from tests.simulation.shard_node import ShardNode
from tests.simulation.world import NetworkSpec
from worker_client.core.worker import Worker

Break = Callable[[pytest.MonkeyPatch], None]
# A scenario that may show it, made from one of a seed; None: that is of no use.
Suit = Callable[[Scenario], Scenario | None]


def _counts_repeated_commits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PushOutcomes, "is_repeated", lambda self, push_id, *, step: False)


def _gives_followers_what_was_before_a_rollback(patch: pytest.MonkeyPatch) -> None:
    """Copies for followers outlive the variables that they are of."""

    def of(self: FollowedWeights, kind: Any, model: Any) -> object:
        one = self._followed.get(kind)
        return one if one is not None else _FOLLOWED_OF(self, kind, model)

    patch.setattr(FollowedWeights, "_of", of)


_FOLLOWED_OF = FollowedWeights._of


def _forgets_a_word_of_a_patch(patch: pytest.MonkeyPatch) -> None:
    def without_the_last(words: Array, block: Array, start: int) -> Patch:
        found = overwrite(words, block, start)
        return Patch(positions=found.positions[:-1], changes=found.changes[:-1])

    patch.setattr(copy, "overwrite", without_the_last)


def _applies_repeated_steps(patch: pytest.MonkeyPatch) -> None:
    """A step that comes again is applied again, from what is staged then."""

    def is_repeated(self: ShardModel, request: Any) -> bool:
        return False

    patch.setattr(ShardModel, "is_repeated", is_repeated)


def _counts_a_step_before_all_have_it(patch: pytest.MonkeyPatch) -> None:
    whole = ShardWork._at_all

    async def at_all(self: ShardWork, what: str, call: Callable[[int], Any], *, is_again: bool = False) -> Any:
        pace = self._calls.pace
        if not what.startswith("to apply") or len(self._calls) < 2:
            return await whole(self, what, call, is_again=is_again)
        assert isinstance(pace, SimulatedPace)
        answer = await self._at(0, what, call, is_again=is_again)
        pace.loop.create_task(self._at(1, what, call, is_again=is_again))
        return [answer]

    patch.setattr(ShardWork, "_at_all", at_all)


def _serves_any_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fences, "check_caller", lambda self, epoch: None)
    patch.setattr(Fences, "check_epoch", lambda self, epoch: None)
    look_up = Members.look_up
    patch.setattr(Members, "look_up", lambda self, participant: look_up(self, replace(participant, era=self.fence.era)))


def _obeys_any_chief(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fences, "check_chief", lambda self, fence: None)


def _tells_before_it_is_saved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Checkpoints, "holds_steps", property(lambda self: False))


def _believes_rotten_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TensorFileReader, "_check", lambda self: None)


def _forgets_the_slots(patch: pytest.MonkeyPatch) -> None:
    real = ShardModel.begin_restore
    patch.setattr(ShardModel, "begin_restore", lambda self: [tensor for tensor in real(self) if not tensor.part])


def _forgets_the_phase_of_training(patch: pytest.MonkeyPatch) -> None:
    real = ShardModel.publish_restored
    patch.setattr(
        ShardModel, "publish_restored", lambda self, hidden, settings: real(self, replace(hidden, phase=0, phase_step=0), settings)
    )


def _adds_up_in_another_order(patch: pytest.MonkeyPatch) -> None:
    real = apply.mean_of

    def mean_of(blocks: Any, **named: Any) -> Any:
        return real(blocks[:-1] if len(blocks) > 2 else blocks, **named)

    patch.setattr(apply, "mean_of", mean_of)


def _leaves_callers_waiting(patch: pytest.MonkeyPatch) -> None:
    """When a step is applied, nothing follows from it."""
    real = Training.applied
    patch.setattr(Training, "applied", lambda self, event, now: False if event.work.request.step == 3 else real(self, event, now))


def _tells_before_anybody_keeps_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Answers, "_is_certain", lambda self, push_id, commit: True)


def _counts_ranges_before_they_are_applied(patch: pytest.MonkeyPatch) -> None:
    real = DataLeases.count

    def count(self: DataLeases, push_id: PushId, ranges: Sequence[int]) -> None:
        real(self, push_id, ranges)
        self.applied([push_id])

    patch.setattr(DataLeases, "count", count)


def _counts_ranges_of_refused_contributions(patch: pytest.MonkeyPatch) -> None:
    def give_back(self: DataLeases, worker: int, incarnation: int, ranges: Iterable[int]) -> bool:
        self.finish([identity for identity in ranges if self._leased.get(identity) == (worker, incarnation)])
        return False

    patch.setattr(DataLeases, "give_back", give_back)


def _leaves_ranges_with_the_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DataLeases, "drop", lambda self, worker, incarnation: False)


def _forgets_the_data_that_is_done(patch: pytest.MonkeyPatch) -> None:
    real = DataLeases.resume
    patch.setattr(DataLeases, "resume", lambda self, marks: real(self, None))


def _forgets_the_state_of_programs(patch: pytest.MonkeyPatch) -> None:
    real = ContributedAttachments.resume
    patch.setattr(ContributedAttachments, "resume", lambda self, lasting, since=(): real(self, NO_STEP_ATTACHMENTS, since))


def _keeps_states_that_are_undone(patch: pytest.MonkeyPatch) -> None:
    real = ContributedAttachments.resume

    def resume(self: ContributedAttachments, lasting: StepAttachments, since: Iterable[StepAttachments] = ()) -> None:
        is_new = not hasattr(self, "_counted")
        real(self, lasting if is_new or lasting.user_states else self.lasting, since)

    patch.setattr(ContributedAttachments, "resume", resume)


def _takes_states_of_contributions_that_are_not_applied(patch: pytest.MonkeyPatch) -> None:
    real = ContributedAttachments.count

    def count(self: ContributedAttachments, push_id: PushId, given: Attachments) -> None:
        real(self, push_id, given)
        if given.user_state:
            self._apply(push_id.worker, given.user_state)

    patch.setattr(ContributedAttachments, "count", count)


def _believes_what_was_said_in_another_life(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Participant, "shares_era", lambda self, other: self.era.epoch == other.era.epoch)


def _takes_other_lives_for_its_own(patch: pytest.MonkeyPatch) -> None:
    """At the chief, at servers and at workers: as if nothing had a life."""
    _believes_what_was_said_in_another_life(patch)
    patch.setattr(Era, "__eq__", lambda self, other: self.epoch == other.epoch)
    patch.setattr(Era, "__hash__", lambda self: hash(self.epoch))
    patch.setattr(Members, "_is_of_this_life", lambda self, participant: True)


def _takes_two_of_a_worker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StrictTokens, "spend", lambda self, worker: True)
    patch.setattr(SyncPolicy, "ask", lambda self, worker, *, local_step, request_id: self.step)


def _has_one_extra_too_many(patch: pytest.MonkeyPatch) -> None:
    real = StrictTokens._hand_out

    def hand_out(self: StrictTokens) -> Any:
        self.num_free += self.num_free == 0
        return real(self)

    patch.setattr(StrictTokens, "_hand_out", hand_out)


def _applies_with_one_too_few(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SyncPolicy, "is_complete", property(lambda self: self.num_contributions >= max(1, self.num_required - 1)))


def _queues_no_tokens(patch: pytest.MonkeyPatch) -> None:
    real = FifoTokens.open_step

    def open_step(self: FifoTokens, step: int) -> Any:
        self._tokens_per_step = 0
        return real(self, step)

    patch.setattr(FifoTokens, "open_step", open_step)


def _calls_stale_ones_accepted(patch: pytest.MonkeyPatch) -> None:
    """The servers drop what is computed from a step gone by, and the chief says that it counts."""
    real = Training._judge

    def judge(self: Training, commit: Any) -> Any:
        verdict = real(self, commit)
        is_late = verdict.outcome in (PushOutcome.STALE, PushOutcome.LATE)
        return replace(verdict, outcome=PushOutcome.ACCEPTED, applied_step=self.step) if is_late else verdict

    patch.setattr(Training, "_judge", judge)


def _goes_on_before_it_is_applied(patch: pytest.MonkeyPatch) -> None:
    def ask(self: OrderedPolicy, worker: int, *, local_step: int, request_id: int) -> int:
        self._wishes.pop(worker, None)
        return self.step

    patch.setattr(OrderedPolicy, "ask", ask)


def _lets_everybody_run_ahead(patch: pytest.MonkeyPatch) -> None:
    real = OrderedPolicy.__init__

    def init(self: OrderedPolicy, **options: Any) -> None:
        real(self, **options)
        self._limit = None

    patch.setattr(OrderedPolicy, "__init__", init)


def _forgets_the_limit_of_staleness(patch: pytest.MonkeyPatch) -> None:
    real = OrderedPolicy.commit

    def commit(self: OrderedPolicy, push_id: PushId, *, step: int, weight: float) -> Any:
        return real(self, push_id, step=max(step, self.step))

    patch.setattr(OrderedPolicy, "commit", commit)


def _forgets_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SyncPolicy, "weights", ())


def _compares_with_the_slowest(patch: pytest.MonkeyPatch) -> None:
    def speed_of(self: Members, index: int) -> float:
        own = self._members[ParticipantKind.WORKER][index].inner
        return 0.0 if own is None else max(one.inner.pace_s for one in self.live_workers if one.inner is not None) / own.pace_s

    patch.setattr(Members, "speed_of", speed_of)


def _forgets_how_to_merge(patch: pytest.MonkeyPatch) -> None:
    real = Training._have

    def have(self: Training, told: Any) -> None:
        real(self, replace(told, request=replace(told.request, merge=MEAN)) if isinstance(told, ApplyStep) else told)

    patch.setattr(Training, "_have", have)


def _counts_in_a_step_that_is_applied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SyncPolicy, "_is_open", True)


def _applies_one_twice(patch: pytest.MonkeyPatch) -> None:
    """The contribution whose turn it was comes to the end of the queue once more."""
    real = OrderedPolicy.advance

    def advance(self: OrderedPolicy) -> Any:
        first = self._queue[0]
        granted = real(self)
        if self.step % 5 == 0:
            self._queue.append(first)
        return granted

    patch.setattr(OrderedPolicy, "advance", advance)


def _takes_any_replica_along(patch: pytest.MonkeyPatch) -> None:
    """A new chief counts on servers that lack a step."""

    async def goes_along(one: Any, found: Any, best: Any, of_best: Any, fence: Any) -> Any:
        return None if found.step is None else ()

    patch.setattr(standby, "goes_along", goes_along)


def _believes_who_was_left_behind(patch: pytest.MonkeyPatch) -> None:
    """A new chief goes on with whichever server answers."""
    real = standby.judge
    patch.setattr(standby, "judge", lambda statuses, failures: real(statuses, [] if statuses else failures))
    patch.setattr(ReplicatedLink, "_taken_in_since", lambda self, wanted: [])


def _goes_on_beside_the_former_chief(patch: pytest.MonkeyPatch) -> None:
    """A new chief does not wait for a server that it could not adopt, with which the former one may go on."""
    patch.setattr(ReplicatedLink, "_check_adopted", lambda self, failed: None)


def _applies_at_the_first_alone(patch: pytest.MonkeyPatch) -> None:
    async def apply(self: ReplicatedLink, request: Any, timeout_s: float) -> Any:
        return await self.members[0].link.call(request, timeout_s=timeout_s)

    patch.setattr(ReplicatedLink, "_apply", apply)


def _counts_on_who_was_not_brought_back(patch: pytest.MonkeyPatch) -> None:
    async def restore(self: ReplicaReturn, link: ReplicatedLink, one: Any, request: Any) -> None:
        status = await one.link.call(ShardStatusRequest(), timeout_s=1.0)
        await link.join(one)
        one.process = status.process_incarnation
        link.count_on_too(one)

    patch.setattr(ReplicaReturn, "_restore", restore)


def _loses_the_standby_with_its_server(patch: pytest.MonkeyPatch) -> None:
    """A shard whose first server is gone is taken for lost."""
    patch.setattr(ReplicatedLink, "_drop", _drops_nobody)
    patch.setattr(standby, "why_lost", _is_there)


async def _drops_nobody(self: ReplicatedLink, one: Any, why: str) -> None:
    self.members = self.replicas[:1]


async def _is_there(replica: Any, fence: Any) -> str:
    return "gone"


def _tells_a_step_that_the_standby_lacks(patch: pytest.MonkeyPatch) -> None:
    """The first server's answer is the shard's; the standby's is not waited for."""
    real = ReplicatedLink._at_members

    async def at_members(self: ReplicatedLink, request: Any, timeout_s: float) -> Any:
        if len(self.members) < 2:
            return await real(self, request, timeout_s)
        first, second = (member.link.call(request, timeout_s=timeout_s) for member in self.members)
        asyncio.ensure_future(second).add_done_callback(lambda task: task.cancelled() or task.exception())
        return [await first] * 2

    patch.setattr(ReplicatedLink, "_at_members", at_members)


def _compares_no_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(standby, "different_contributions", lambda request, one, other: ())


def _compares_no_gradients_of_the_former_chief(patch: pytest.MonkeyPatch) -> None:
    real = standby.goes_along

    async def goes_along(*args: Any) -> Any:
        others = await real(*args)
        return None if others is None else ()

    patch.setattr(standby, "goes_along", goes_along)


def _believes_who_lacks_settings(patch: pytest.MonkeyPatch) -> None:
    """Any shard that holds a model confirms a standby whose primary is empty."""
    real = standby.distrust_unconfirmed
    patch.setattr(
        "chief.shards.work.distrust_unconfirmed", lambda links, found: real(links, [replace(one, settings_version=0) for one in found])
    )


def _forgets_whom_it_distrusts(patch: pytest.MonkeyPatch) -> None:
    """A standby that is not believed is believed at the next look."""
    patch.setattr(ReplicatedLink, "distrust", lambda self: None)
    real = standby.distrust_unconfirmed

    def distrust(links: Any, found: Any) -> Any:
        real(links, found)
        return []

    patch.setattr("chief.shards.work.distrust_unconfirmed", distrust)


def _hears_of_no_other_servers_with_the_model(patch: pytest.MonkeyPatch) -> None:
    real = Worker._agree

    async def nothing() -> None:
        """Asks nobody."""

    async def agree(self: Worker[Any], *args: Any, **named: Any) -> Any:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(self, "_hear_shards", nothing)
            return await real(self, *args, **named)

    patch.setattr(Worker, "_agree", agree)


def _with_standbys(scenario: Scenario) -> Scenario:
    return replace(scenario, has_standbys=True, policy=DEFAULT_POLICY, min_replicas=None)


def _loses_a_server(scenario: Scenario) -> Scenario:
    """And nothing else befalls it."""
    fault = Fault(at=1.5 + scenario.seed % 97 * 0.01, kind="kill", target=("ps-0",), seconds=0.5)
    return replace(_with_standbys(scenario), network=NetworkSpec(), faults=(fault,))


def _loses_both_by_turns(scenario: Scenario) -> Scenario:
    """The first server comes back, and then the standby is lost."""
    at = 1.0 + scenario.seed % 97 * 0.01
    first = Fault(at=at, kind="kill", target=("ps-0",), seconds=0.3)
    other = Fault(at=at + 2.5, kind="kill", target=("ps-0-standby",), seconds=0.5)
    return replace(_with_standbys(scenario), network=NetworkSpec(), durability=Durability.INTERVAL, data=None, faults=(first, other))


def _dies_before_the_standby_applies(scenario: Scenario) -> Scenario:
    """The standby does not hear of a step that the first server applies, and then the chief is killed."""
    at = 1.0 + scenario.seed % 97 * 0.01
    cut = Fault(at=at, kind="cut", target=("chief", "ps-0-standby"), seconds=0.4, number=2)
    killed = Fault(at=at + 0.3, kind="kill", target=("chief",), seconds=0.05)
    return replace(
        _with_standbys(scenario), network=NetworkSpec(), num_shards=1, compute_s=0.1, durability=None, data=None, faults=(cut, killed)
    )


def _meets_the_former_chief(scenario: Scenario) -> Scenario:
    """Another chief looks at both servers, and cannot reach the standby any more when it takes them; then the former chief goes on."""
    at = 1.0 + scenario.seed % 97 * 0.01
    other = Fault(at=at, kind="new chief", target=("chief",), seconds=0.4, number=1)
    cut = Fault(at=at + 0.012 + scenario.seed % 31 * 0.001, kind="cut", target=("chief", "ps-0-standby"), seconds=3.0, number=1)
    return replace(
        _with_standbys(scenario), network=NetworkSpec(), num_shards=1, compute_s=0.1, durability=None, data=None, faults=(other, cut)
    )


def _gets_different_gradients(scenario: Scenario) -> Scenario:
    lie = Fault(at=1.0 + scenario.seed % 97 * 0.01, kind="lie", target=("worker-0",), number=scenario.seed % 2)
    return replace(_with_standbys(scenario), network=NetworkSpec(), faults=(lie,))


def _dies_before_it_compares(scenario: Scenario) -> Scenario:
    """Both servers have applied a step of different gradients, and the chief is killed before it has heard that from both."""
    at = 1.0 + scenario.seed % 97 * 0.01
    lie = Fault(at=at, kind="lie", target=("worker-0",), number=scenario.seed % 2)
    killed = Fault(at=at + 0.03 + scenario.seed % 53 * 0.002, kind="kill", target=("chief",), seconds=0.05)
    fast = replace(_with_standbys(scenario), network=NetworkSpec(), num_shards=1, num_workers=1, num_required=1, compute_s=0.06)
    return replace(fast, durability=None, data=None, faults=(lie, killed))


def _loses_the_first_server_and_the_chief(scenario: Scenario) -> Scenario:
    """Soon after the standbys were left out, since servers apply contributions as they arrive."""
    at = 0.15 + scenario.seed % 37 * 0.01
    lost = tuple(Fault(at=at, kind="kill", target=(name,), seconds=0.05) for name in ("ps-0", "chief"))
    fast = replace(scenario, network=NetworkSpec(), num_shards=2, compute_s=0.03, has_standbys=True)
    return unlocked(replace(fast, durability=None, faults=lost))


def _changes_servers_in_a_rollback(scenario: Scenario) -> Scenario:
    """One shard is lost, and while all are brought back the chief may not hear that the first server of the other one obeys."""
    lost = tuple(Fault(at=at + scenario.seed % 97 * 0.003, kind="kill", target=("ps-1",), seconds=0.05) for at in (1.0, 2.3, 3.6))
    rough = replace(scenario, network=NetworkSpec(drop=0.2, jitter_s=0.02), num_shards=2, num_workers=4, compute_s=0.05, has_standbys=True)
    return unlocked(replace(rough, durability=Durability.INTERVAL, every_steps=2, has_history=False, faults=lost))


def _wakes_beside_a_new_chief(scenario: Scenario) -> Scenario:
    """The standby stands still while training goes on without it; then chief and first server are lost, and it wakes."""
    at = 1.0 + scenario.seed % 97 * 0.01
    stopped = Fault(at=at, kind="stop", target=("ps-0-standby",), seconds=2.0)
    lost = Fault(at=at + 1.9, kind="kill", target=("ps-0",), seconds=3.0)
    chief = Fault(at=at + 1.9, kind="kill", target=("chief",), seconds=0.05)
    return replace(_with_standbys(scenario), network=NetworkSpec(), num_shards=1, faults=(stopped, lost, chief))


_SEEN_BY_THE_ORACLE = (
    "created",
    "applied",
    "arrived",
    "restored",
    "served",
    "told_step",
    "told_commit",
    "told_token",
    "told_exhausted",
    "read",
)


def _unseen(break_it: Break) -> Break:
    """Returns the same, with an oracle that looks away: only the audit of what the processes have written can find it."""

    def broken(patch: pytest.MonkeyPatch) -> None:
        for name in (*_SEEN_BY_THE_ORACLE, "committed_checkpoint"):
            patch.setattr(Oracle, name, lambda *args, **named: None)
        break_it(patch)

    return broken


def _stages_other_gradients(patch: pytest.MonkeyPatch) -> None:
    real = ShardNode._push

    def push(self: ShardNode, header: Any, gradients: Any) -> Any:
        changed = gradients.copy()
        changed[:1] ^= header.push_id.sequence % 5 == 0
        return real(self, header, changed)

    patch.setattr(ShardNode, "_push", push)


def _notes_too_few_contributors(patch: pytest.MonkeyPatch) -> None:
    def counted(*, contributors: tuple[PushId, ...], **fields: Any) -> Counted:
        return Counted(contributors=contributors[1:], **fields)

    patch.setattr("chief.shards.work.Counted", counted)


def _applies_again_what_comes_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inbox, "_repeated", lambda self, push_id, step: None)


def _calls_applied_what_it_drops(patch: pytest.MonkeyPatch) -> None:
    """Where contributions are applied as they arrive."""
    real = ServedShard._apply_arrival

    def apply_arrival(self: ServedShard, model: ShardModel, contribution: Any) -> PushReply:
        if contribution.push_id.sequence % 5:
            return real(self, model, contribution)
        return PushReply(result=PushResult.APPLIED, step=model.step)

    patch.setattr(ServedShard, "_apply_arrival", apply_arrival)


def _counts_two_as_one_step(patch: pytest.MonkeyPatch) -> None:
    real = UnlockedPolicy.commit

    def commit(self: UnlockedPolicy, push_id: PushId, *, step: int, weight: float) -> Any:
        verdict = real(self, push_id, step=step)
        self.step -= verdict.applied_step == 5
        return verdict

    patch.setattr(UnlockedPolicy, "commit", commit)


def _forgets_to_note_arrivals(patch: pytest.MonkeyPatch) -> None:
    real = ShardHistory.arrived

    def arrived(self: ShardHistory, model: ShardModel, push_id: PushId, work: StepWork, *, epoch: int) -> None:
        if push_id.sequence % 5:
            real(self, model, push_id, work, epoch=epoch)

    patch.setattr(ShardHistory, "arrived", arrived)


def _unlocked(scenario: Scenario) -> Scenario:
    return unlocked(replace(scenario, has_history=True, network=replace(scenario.network, duplicate=0.1)))


def _with_history(scenario: Scenario) -> Scenario:
    return replace(scenario, has_history=True, has_standbys=scenario.seed % 2 == 0, network=replace(scenario.network, duplicate=0.1))


def under(policy: PolicySpec) -> Suit:
    """Returns scenarios under another policy."""
    return lambda scenario: replace(scenario, policy=policy, num_workers=max(2, scenario.num_workers), min_replicas=None)


def _undisturbed(policy: PolicySpec) -> Suit:
    """Returns scenarios in which no token is lost with a worker, so that nobody needs one more to be started."""
    return lambda scenario: replace(scenario, policy=policy, num_required=scenario.num_workers, network=NetworkSpec(), faults=())


def _with_an_extra(scenario: Scenario) -> Scenario:
    """Three workers, one of which gives a step two contributions."""
    return replace(scenario, policy=DEFAULT_POLICY, num_workers=3, num_required=4, min_replicas=None)


_FIFO = PolicySpec(tokens=TokenMode.FIFO)
_SSP = PolicySpec(name=PolicyName.SSP, staleness=0)
_ASYNC = PolicySpec(name=PolicyName.ASYNC)
_OUTER = PolicySpec(name=PolicyName.OUTER, replicas_to_aggregate=1)
_TRIMMED = PolicySpec(merge=MERGES[-1])
_ASYNC_DROP = PolicySpec(name=PolicyName.ASYNC, max_staleness=0)
_SSP_SCALE = PolicySpec(name=PolicyName.SSP, staleness=3, max_staleness=0, too_stale=TooStale.SCALE)


def _gives_up_where_a_contribution_is_missing(patch: pytest.MonkeyPatch) -> None:
    def do_without(self: Training, told: Any, missing: Any, now: float) -> None:
        self._ending.fail("a contribution is missing")

    patch.setattr(Training, "_do_without", do_without)


def _takes_incarnations_from_nowhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdmittedWorkers, "check", lambda self, worker, incarnation, secret: None)


def _lets_anybody_speak_for_a_worker(patch: pytest.MonkeyPatch) -> None:
    real = Members.look_up

    def look_up(self: Members, participant: Participant) -> Any:
        member = self.find(participant.kind, participant.index)
        return real(self, participant if member is None else replace(participant, secret=member.secret))

    patch.setattr(Members, "look_up", look_up)


def _finishes_when_asked_to_end(patch: pytest.MonkeyPatch) -> None:
    def leave(self: Ending, event: Any, now: float) -> None:
        self.ask(None, FinishTrainingRequest(reason=event.why, interrupts=True), now)
        self._out.add(EndProcesses(exit_code=0, reason=event.why))

    patch.setattr(Ending, "leave", leave)


def _ends_where_a_step_is_half_applied(patch: pytest.MonkeyPatch) -> None:
    real = Coordinator._see_shard
    patch.setattr(Coordinator, "_see_shard", lambda self, event, now: real(self, replace(event, damage=""), now))


def _half_applies_and_is_saved(scenario: Scenario) -> Scenario:
    half = Fault(at=1.0 + scenario.seed % 97 * 0.01, kind="half", target=("ps-0",))
    return replace(scenario, durability=Durability.INTERVAL, has_standbys=False, network=NetworkSpec(), faults=(half,))


def _keeps_data_counted_that_no_server_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DataLeases, "uncount", lambda self, push_id: False)


def _takes_any_number_of_contributions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inbox, "_check_room", lambda self, header: None)


def _keeps_the_memory_of_contributions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StagingMemory, "take_back", lambda self, staged: None)


def _restores_too_few_rows(patch: pytest.MonkeyPatch) -> None:
    extend = Table.extend
    patch.setattr(Table, "extend", lambda table, keys: extend(table, keys[1:]))


def _keeps_rows_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyedRows, "_are_gone", lambda rows, numbers, step: np.zeros(numbers.size, np.bool_))


def _admits_every_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyedRows, "are_admitted", lambda rows, keys, step, now: None)


def _counts_no_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Occurrences, "count", lambda occurrences, keys: None)


def _restores_no_counts_of_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Occurrences, "take_over", lambda occurrences, piece, memory: None)


def _forgets_a_row_that_changed(patch: pytest.MonkeyPatch) -> None:
    mark = Table._mark
    patch.setattr(Table, "_mark", lambda table, numbers: mark(table, numbers[1:]))


def _rests_on_the_full_one_alone(patch: pytest.MonkeyPatch) -> None:
    on_base = Checkpoints._on_base

    def broken(checkpoints: Checkpoints, checkpoint: Checkpoint) -> Checkpoint:
        whole = on_base(checkpoints, checkpoint)
        return replace(whole, bases=tuple(file for file in whole.bases if not file.is_delta))

    patch.setattr(Checkpoints, "_on_base", broken)


def _removes_what_deltas_rest_on(patch: pytest.MonkeyPatch) -> None:
    see = catalog._see
    patch.setattr(catalog, "_see", lambda storage, stored: replace(see(storage, stored), base_tags=()))


def _loses_what_was_counted_in_a_change(patch: pytest.MonkeyPatch) -> None:
    install = Training._install

    def broken(training: Training, now: float) -> None:
        with patch.context() as inside:
            inside.setattr(type(training.policy), "counted", lambda policy: ())
            install(training, now)

    patch.setattr(Training, "_install", broken)


def _frees_nobody_in_a_change(patch: pytest.MonkeyPatch) -> None:
    """Who waited under the former policy is taken for one that has contributed to the open step."""
    install = Training._install

    def broken(training: Training, now: float) -> None:
        waiting = training.waiting_workers
        install(training, now)
        if isinstance(training.policy, SyncPolicy) and isinstance(training.policy.tokens, StrictTokens):
            training.policy.tokens._contributed.update(waiting)

    patch.setattr(Training, "_install", broken)


def _takes_a_step_after_the_last(patch: pytest.MonkeyPatch) -> None:
    end_or_continue = Training._end_or_continue

    def broken(training: Training, granted: Sequence[Grant], now: float) -> None:
        if training.step != training._settings.config.max_steps:
            end_or_continue(training, granted, now)
            return
        training._grant(granted, now)
        training.proceed(now)

    patch.setattr(Training, "_end_or_continue", broken)


def _changes(*numbers: int, policy: PolicySpec = DEFAULT_POLICY) -> Suit:
    """Returns scenarios in which people change the policy to these, and nothing else befalls it."""

    def suited(scenario: Scenario) -> Scenario:
        at = 0.5 + scenario.seed % 97 * 0.01
        faults = tuple(Fault(at=at + 0.7 * place, kind="policy", number=number) for place, number in enumerate(numbers))
        return replace(scenario, policy=policy, num_workers=3, num_required=3, data=None, network=NetworkSpec(), faults=faults)

    return suited


def _ends_soon(scenario: Scenario) -> Scenario:
    return replace(scenario, max_steps=5, network=NetworkSpec(), faults=())


def has(kind: str) -> Suit:
    """Returns those scenarios that such a fault befalls."""
    return lambda scenario: scenario if any(fault.kind == kind for fault in scenario.faults) else None


def _lets_rows_age(scenario: Scenario) -> Scenario:
    return replace(scenario, max_age=1)


def _admits_few_keys(scenario: Scenario) -> Scenario:
    return replace(scenario, admitted=0.3, admit_after=0)


def _admits_the_second_time(scenario: Scenario) -> Scenario:
    return replace(scenario, admitted=0.0, admit_after=2)


def _kills_a_server_after_the_first_step(scenario: Scenario) -> Scenario:
    fault = Fault(at=1.0 + scenario.seed % 97 * 0.01, kind="kill", target=("ps-0",), seconds=0.05)
    scenario = replace(_admits_the_second_time(scenario), durability=Durability.STEP, every_steps=1, compute_s=0.5, has_standbys=False)
    return replace(scenario, faults=(fault,), network=NetworkSpec(), policy=DEFAULT_POLICY, max_age=0)


def _goes_back_to_a_delta(scenario: Scenario) -> Scenario | None:
    durability = scenario.durability or Durability.STEP
    return replace(scenario, durability=durability, every_steps=1, full_every=8) if has("kill")(scenario) else None


def _kills_a_worker_with_data(scenario: Scenario) -> Scenario | None:
    """Nothing else: a new chief or epoch frees what the dead had as well. The data has an end, which is to be reached."""
    killed = tuple(fault for fault in scenario.faults if fault.kind == "kill" and fault.target[0].startswith("worker-"))
    return replace(scenario, faults=killed) if killed and scenario.data is not None and scenario.data.num_epochs else None


def _dies_after_it_has_told(scenario: Scenario) -> Scenario:
    """A worker that was told stands still, and the others fill the step with a new chief."""
    at = 0.3 + scenario.seed % 97 * 0.01
    stopped = Fault(at=at, kind="stop", target=("worker-1",), seconds=2.0)
    killed = Fault(at=at + 0.01, kind="kill", target=("chief",), seconds=0.05)
    return replace(scenario, num_workers=4, num_required=2, network=NetworkSpec(), faults=(stopped, killed))


def _lost_as_a_whole_and_unsaved(scenario: Scenario) -> Scenario:
    """All that knows of what a worker was told is lost, but for the worker.

    It is told while it waits for another, which stands still, and comes back when the others have begun anew.
    """
    at = 0.3 + scenario.seed % 97 * 0.01
    missing = Fault(at=at, kind="stop", target=("worker-1",), seconds=2.0)
    told = Fault(at=at + 1.5, kind="stop", target=("worker-0",), seconds=2.5)
    lost = Fault(at=at + 1.6, kind="lose all", seconds=0.05)
    return replace(scenario, num_workers=4, num_required=4, durability=None, data=None, network=NetworkSpec(), faults=(missing, told, lost))


def _hoards(scenario: Scenario) -> Scenario:
    hoard = Fault(at=1.0 + scenario.seed % 97 * 0.01, kind="hoard", target=("worker-0",))
    return replace(scenario, faults=(hoard,))


def _forges_and_is_saved(scenario: Scenario) -> Scenario:
    """Nothing else befalls it, and there is a way back: it must not fail."""
    forged = Fault(at=1.0 + scenario.seed % 97 * 0.01, kind="forge", target=("worker-0",), number=1)
    return replace(scenario, durability=Durability.INTERVAL, network=NetworkSpec(), faults=(forged,))


def _forges_with_data(scenario: Scenario) -> Scenario | None:
    return _forges_and_is_saved(scenario) if scenario.data is not None and scenario.data.num_epochs else None


@dataclass(frozen=True, slots=True)
class Mutation:
    """A broken copy: the promises that may be seen to break (the first letter of what is said), and how a scenario is made to suit it.

    `first_seed`: where the search for a scenario that shows it begins.
    """

    promises: str
    break_it: Break
    suit: Suit = lambda scenario: scenario
    first_seed: int = 1000


MUTATIONS: dict[str, Mutation] = {
    "a repeated commit counts again": Mutation("13", _counts_repeated_commits),
    "a step that comes again is applied again": Mutation("126", _applies_repeated_steps),
    "a step counts when the first server has it": Mutation("2", _counts_a_step_before_all_have_it, first_seed=1009),
    "callers of any epoch are served": Mutation("236", _serves_any_epoch, has("kill"), first_seed=1093),
    "servers obey any chief": Mutation("236", _obeys_any_chief, has("new chief"), first_seed=1399),
    "a step is told before it is saved": Mutation("4", _tells_before_it_is_saved, first_seed=1018),
    "a rotten file is believed": Mutation("25", _believes_rotten_files, has("rot"), first_seed=1290),
    "a restored server has lost its slots": Mutation("5", _forgets_the_slots, has("kill"), first_seed=1027),
    "a restored table lacks a row": Mutation("5", _restores_too_few_rows, has("kill"), first_seed=1017),
    "a row that no step used for long is read": Mutation("5", _keeps_rows_for_ever, _lets_rows_age, first_seed=1003),
    "a key gets a row without being admitted": Mutation("5", _admits_every_key, _admits_few_keys),
    "keys are admitted without having occurred": Mutation("5", _admits_every_key, _admits_the_second_time),
    "keys that wait are never admitted": Mutation("5", _counts_no_keys, _admits_the_second_time),
    "a restored server has lost the counts of keys": Mutation("5", _restores_no_counts_of_keys, _kills_a_server_after_the_first_step),
    "a delta lacks a row that changed": Mutation("5", _forgets_a_row_that_changed, _goes_back_to_a_delta, first_seed=1020),
    "a delta rests on the full checkpoint alone": Mutation("45", _rests_on_the_full_one_alone, _goes_back_to_a_delta, first_seed=1191),
    "what a delta rests on is removed": Mutation("6", _removes_what_deltas_rest_on, _goes_back_to_a_delta, first_seed=1056),
    "a restored server begins the phase of training again": Mutation("5", _forgets_the_phase_of_training, has("kill"), first_seed=1020),
    "a mean leaves one contribution out": Mutation("5", _adds_up_in_another_order, first_seed=1068),
    "an applied step opens no other": Mutation("6", _leaves_callers_waiting, first_seed=1009),
    "what is accepted is told before anybody keeps it": Mutation(
        "3", _tells_before_anybody_keeps_it, _dies_after_it_has_told, first_seed=1030
    ),
    "what was said in a lost life is believed": Mutation(
        "3", _believes_what_was_said_in_another_life, _lost_as_a_whole_and_unsaved, first_seed=1018
    ),
    "other lives are taken for the own one": Mutation("123", _takes_other_lives_for_its_own, _lost_as_a_whole_and_unsaved, first_seed=1018),
    "training data is done before its step is applied": Mutation("8", _counts_ranges_before_they_are_applied, first_seed=1018),
    "training data of refused contributions is done": Mutation("8", _counts_ranges_of_refused_contributions, first_seed=1026),
    "training data stays with workers that are gone": Mutation(
        "6", _leaves_ranges_with_the_lost, _kills_a_worker_with_data, first_seed=1067
    ),
    "training data of contributions that no server has is done": Mutation(
        "8", _keeps_data_counted_that_no_server_has, _forges_with_data, first_seed=1014
    ),
    "strict: a worker gives a step two contributions": Mutation("P", _takes_two_of_a_worker, under(DEFAULT_POLICY)),
    "strict: a step is applied with one contribution too few": Mutation(
        "P3", _applies_with_one_too_few, under(DEFAULT_POLICY), first_seed=1051
    ),
    "strict: a step has an extra token too many": Mutation("P", _has_one_extra_too_many, _with_an_extra),
    "fifo: a step queues no tokens": Mutation("6", _queues_no_tokens, _undisturbed(_FIFO), first_seed=1005),
    "fifo: stale contributions are called accepted": Mutation("3", _calls_stale_ones_accepted, under(_FIFO)),
    "async: a worker goes on before what it gave is applied": Mutation("P", _goes_on_before_it_is_applied, under(_ASYNC)),
    "async: a contribution is applied twice": Mutation("136", _applies_one_twice, under(_ASYNC)),
    "async: what is too stale is applied": Mutation("P", _forgets_the_limit_of_staleness, under(_ASYNC_DROP)),
    "ssp: workers run ahead of the slowest": Mutation("P", _lets_everybody_run_ahead, under(_SSP)),
    "ssp: what is too stale has its full weight": Mutation("P", _forgets_the_limit_of_staleness, under(_SSP_SCALE)),
    "merge: contributions are merged as their mean": Mutation("P", _forgets_how_to_merge, under(_TRIMMED)),
    "sync: contributions count without their weights": Mutation("5", _forgets_weights, under(DEFAULT_POLICY)),
    "outer: what comes while a step is applied counts in it": Mutation(
        "23", _counts_in_a_step_that_is_applied, under(_OUTER), first_seed=1002
    ),
    "workers are told how fast they are beside the slowest": Mutation(
        "P", _compares_with_the_slowest, under(DEFAULT_POLICY), first_seed=1002
    ),
    "unlocked: what comes again is applied again": Mutation("1", _applies_again_what_comes_again, _unlocked),
    "unlocked: a server calls applied what it drops": Mutation("5", _calls_applied_what_it_drops, _unlocked),
    "unlocked: a chief counts two contributions as one step": Mutation("3", _counts_two_as_one_step, _unlocked, first_seed=1199),
    "audit, unlocked: a server never applied what was accepted": Mutation("A", _unseen(_forgets_to_note_arrivals), _unlocked),
    "standby: a new chief counts on servers that lack a step": Mutation(
        "25", _takes_any_replica_along, _dies_before_the_standby_applies, first_seed=1018
    ),
    "standby: who was left behind is believed": Mutation("2346", _believes_who_was_left_behind, _wakes_beside_a_new_chief, first_seed=1018),
    "standby: a new chief goes on beside the former one": Mutation(
        "23", _goes_on_beside_the_former_chief, _meets_the_former_chief, first_seed=1006
    ),
    "standby: only the first server applies steps": Mutation("2", _applies_at_the_first_alone, _with_standbys),
    "standby: who was not brought back is counted on": Mutation("26", _counts_on_who_was_not_brought_back, _loses_both_by_turns),
    "standby: a lost server is not replaced": Mutation("S6", _loses_the_standby_with_its_server, _loses_a_server),
    "standby: a step is told that the standby lacks": Mutation("2", _tells_a_step_that_the_standby_lacks, _with_standbys, first_seed=1006),
    "standby: different gradients are not compared": Mutation("2", _compares_no_gradients, _gets_different_gradients, first_seed=1015),
    "standby: a new chief compares nothing": Mutation(
        "2", _compares_no_gradients_of_the_former_chief, _dies_before_it_compares, first_seed=1037
    ),
    "standby, unlocked: one that lacks settings is believed": Mutation(
        "3", _believes_who_lacks_settings, _loses_the_first_server_and_the_chief
    ),
    "standby, unlocked: distrust is forgotten": Mutation("3", _forgets_whom_it_distrusts, _loses_the_first_server_and_the_chief),
    "standby: a worker hears of no other servers with the model": Mutation(
        "23", _hears_of_no_other_servers_with_the_model, _changes_servers_in_a_rollback, first_seed=1631
    ),
    "audit: a contribution is in two steps": Mutation("A", _unseen(_counts_repeated_commits), _with_history, first_seed=1016),
    "audit: a server stages other gradients than were sent": Mutation(
        "A", _unseen(_stages_other_gradients), _with_history, first_seed=1027
    ),
    "audit: a chief notes other contributors than servers": Mutation(
        "A", _unseen(_notes_too_few_contributors), _with_history, first_seed=1001
    ),
    "incarnations from nowhere are believed": Mutation("36", _takes_incarnations_from_nowhere, has("impostor"), first_seed=1044),
    "anybody speaks for a worker": Mutation("36", _lets_anybody_speak_for_a_worker, has("impostor"), first_seed=1063),
    "training ends where a contribution is missing": Mutation(
        "6", _gives_up_where_a_contribution_is_missing, _forges_and_is_saved, first_seed=1001
    ),
    "a chief that is asked to end finishes the training": Mutation("E", _finishes_when_asked_to_end, has("end")),
    "training ends where a step is half applied": Mutation("6", _ends_where_a_step_is_half_applied, _half_applies_and_is_saved),
    "a worker may fill a server with contributions": Mutation("7", _takes_any_number_of_contributions, _hoards, first_seed=1009),
    "memory of contributions is not given back": Mutation(
        "7", _keeps_the_memory_of_contributions, _undisturbed(DEFAULT_POLICY), first_seed=1002
    ),
    "a change loses what was counted": Mutation("36", _loses_what_was_counted_in_a_change, _changes(2, 0, 2, 0), first_seed=1001),
    "a change frees nobody": Mutation("6", _frees_nobody_in_a_change, _changes(3, 0, 3, 0, 3, 0), first_seed=1005),
    "a finished training takes one more step": Mutation("F", _takes_a_step_after_the_last, _ends_soon),
    "a rollback forgets what data is done": Mutation("8", _forgets_the_data_that_is_done, has("kill"), first_seed=1018),
    "a rollback forgets the state of programs": Mutation("9", _forgets_the_state_of_programs, has("kill"), first_seed=1027),
    "a rollback to a step without the state of programs keeps what they have": Mutation(
        "9", _keeps_states_that_are_undone, has("kill"), first_seed=1206
    ),
    "followers are given what was before a rollback": Mutation(
        "2", _gives_followers_what_was_before_a_rollback, has("kill"), first_seed=1117
    ),
    "followers are given a patch that lacks a word": Mutation("2", _forgets_a_word_of_a_patch, _undisturbed(DEFAULT_POLICY)),
    "a checkpoint has states of a later step": Mutation("9", _takes_states_of_contributions_that_are_not_applied, first_seed=1006),
}
