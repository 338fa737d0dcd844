"""What a simulated worker takes for granted of a contribution once its place is another, as the SDK does. Knows the calls of the chief."""

from dataclasses import replace

from ps_protocol.roles.chief import CommitResult, Participant, PushCommit, PushOutcome
from tests.simulation.epochs import era_of
from tests.simulation.oracle import Oracle
from tests.simulation.tasks import Task
from tests.simulation.worker_calls import WorkerCalls
from tests.simulation.world import World


class WorkerFate:
    """The contribution under way of one worker process: whose it is, and whether the chief has said that it counts."""

    def __init__(self, world: World, calls: WorkerCalls, oracle: Oracle) -> None:
        self._world, self._calls, self._oracle = world, calls, oracle
        self._given: tuple[Participant, PushCommit] | None = None
        self._is_accepted = False

    def gives(self, commit: PushCommit) -> None:
        """One is under way from now on."""
        self._given, self._is_accepted = (self._calls.me, commit), False

    def said(self, outcome: PushOutcome | None) -> None:
        """The chief has said what becomes of it."""
        self._is_accepted = outcome is PushOutcome.ACCEPTED

    def known(self) -> None:
        """There is nothing more to be said of it: its worker has the next token."""
        self._given = None

    def conclude(self, *, local_step: int) -> Task:
        """The worker goes on in another place, at this step: what does its user hear of the contribution?"""
        given, me, self._given = self._given, self._calls.me, None
        if given is None or not given[1].staged:
            return
        giver, commit = given
        push_id = commit.push_id
        if giver.era == me.era and self._is_accepted:
            self._world.seen["what was said before holds in the new place"] += 1
            result = CommitResult(outcome=PushOutcome.ACCEPTED, global_step=local_step, applied_step=commit.step)
            self._oracle.told_commit(era_of(me), push_id, result)
        elif commit.step < local_step and (push_id.worker, push_id.incarnation) == (me.index, me.incarnation):
            self._world.seen["worker asked what had become of a contribution"] += 1
            yield from self._calls.ask("commit", me, replace(commit, staged=False, ranges=()))
