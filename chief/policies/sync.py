"""Synchronous steps: R contributions make one. A token rule decides which worker may contribute, and when a worker continues.

Strict tokens are here: a worker that waits continues when the step is applied. Knows no leases, calls or clocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from chief.policies.base import Grant, Policy, TokenRule, Verdict
from ps_protocol.errors import StepAhead, Unavailable
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.policy import PolicySpec
from ps_protocol.roles.checkpoint import ChosenPush
from ps_protocol.roles.chief import PushOutcome
from ps_protocol.roles.contribution import PushId


class SyncPolicy(Policy):
    """The first R contributions make the next step, of workers that have leave of `tokens` to contribute to the open one.

    The mean is weighted. Under the policy "outer" contributions of steps gone by are a part of the open step too, and a step that has R
    waits a while for those of the other live `workers`.
    """

    def __init__(
        self,
        *,
        spec: PolicySpec,
        num_required: int,
        tokens: TokenRule,
        step: int = 0,
        counted: Sequence[ChosenPush] = (),
        workers: Iterable[int] = (),
    ) -> None:
        self.spec = spec
        self.num_required = num_required
        self.step = step
        self.tokens = tokens
        self._counted = [*counted]
        self._live = set(workers)
        # A step that is complete stays complete, also if another worker joins before it is applied.
        self._is_complete = self._is_last = False
        self._look()

    @property
    def contributors(self) -> tuple[PushId, ...]:
        """The contributions to the open step so far, sorted."""
        return tuple(sorted(entry.push_id for entry in self._counted))

    @property
    def weights(self) -> tuple[float, ...]:
        """How much each of `contributors` counts in the mean; empty: all the same."""
        first = self._counted[0].weight if self._counted else 1.0
        if all(entry.weight == first for entry in self._counted):
            return ()
        return tuple(entry.weight for entry in sorted(self._counted, key=lambda entry: entry.push_id))

    @property
    def last_worker(self) -> int:
        """The worker that contributed last."""
        return self._counted[-1].push_id.worker

    @property
    def num_contributions(self) -> int:
        """Contributions that the open step has."""
        return len(self._counted)

    @property
    def is_complete(self) -> bool:
        """Whether the open step has its R contributions and the grace is over, or is the last and has any."""
        return self._is_complete

    @property
    def is_in_grace(self) -> bool:
        """Whether the open step has its R contributions, and waits for those of other live workers."""
        return not self._is_complete and len(self._counted) >= self.num_required

    def end_grace(self) -> None:
        """The open step waits no longer."""
        self._is_complete = self.is_in_grace or self._is_complete

    def stay_complete(self) -> None:
        """The open step takes no more, however many this policy needs."""
        self._is_complete = True

    def _look(self) -> None:
        """Notes whether the open step is complete now."""
        num_required = 1 if self._is_last else self.num_required
        if not self._is_complete and len(self._counted) >= num_required:
            waits = self.spec.grace_s and not self._is_last
            # After a change of chiefs nobody has come yet.
            self._is_complete = not waits or (bool(self._live) and self._live <= {entry.push_id.worker for entry in self._counted})

    def require(self, num_required: int) -> None:
        """Has the open step, and those after it, need so many contributions; a step that is complete stays so."""
        self.num_required = num_required
        self._look()

    def gives_way(self, policy: PolicySpec) -> bool:
        """At once to steps that can take what is counted; else when that has made the open step, however little it is."""
        self._is_last = not policy.has_common_steps or (self.spec.accepts_stale and not policy.accepts_stale)
        self._look()
        return not (self._is_last and self._counted)

    @property
    def _is_open(self) -> bool:
        return not self._is_last and not self._is_complete

    def may_contribute(self, worker: int) -> bool:
        """Whether a worker that just joined may contribute to the open step without asking for a token."""
        # The policy that takes the place of this one begins with a step that nothing was counted for.
        is_open = self._is_open or (self._is_last and not self._counted)
        return self.tokens.may_contribute(worker, is_open=is_open)

    def has_contributed(self, worker: int) -> bool:
        """Whether a worker (as any incarnation) has given its share for now."""
        return self.tokens.has_contributed(worker)

    def join(self, worker: int, incarnation: int) -> None:
        """A live worker, for which a step may wait."""
        self._live.add(worker)

    def commit(self, push_id: PushId, *, step: int, weight: float = 1.0) -> Verdict:
        """Counts a contribution to the open step, until that is complete, if its worker may give it.

        Under "outer" a contribution that comes just then is too dear to be dropped: raises Unavailable, and it counts in the next step.
        """
        if step > self.step:
            raise _ahead(step, self.step)
        staleness, takes_late = self.step - step, self.spec.accepts_stale
        limit = self.spec.max_staleness if takes_late else 0
        if limit is not None and staleness > limit:
            return Verdict(outcome=PushOutcome.STALE, staleness=staleness)
        if not self._is_open and takes_late:
            raise Unavailable(f"step {self.step} is being applied: a contribution counts in the next one")
        if not self._is_open or not (staleness or self.tokens.spend(push_id.worker)):
            return Verdict(outcome=PushOutcome.LATE)
        self._counted.append(ChosenPush(push_id=push_id, step=step, weight=weight))
        self._look()
        return Verdict(outcome=PushOutcome.ACCEPTED, applied_step=self.step, staleness=staleness)

    def after_commit(self, worker: int) -> list[Grant]:
        """Returns the tokens that are due because `worker` has contributed, or tried to."""
        return self.tokens.after_commit(worker) if self._is_open else []

    def ask(self, worker: int, *, local_step: int, request_id: int) -> int | None:
        """Returns the step of a token, or None: the worker waits. Raises StepAhead."""
        if local_step > self.step:
            raise _ahead(local_step, self.step)
        if self._is_complete and self.spec.accepts_stale:
            local_step = self.step  # a worker that is late had better wait for the step that is being applied
        return self.tokens.ask(worker, local_step=local_step, request_id=request_id, is_open=self._is_open)

    def forget_wish(self, worker: int) -> None:
        """Ends a worker's wait; it keeps its tokens."""
        self.tokens.forget_wish(worker)

    def drop(self, worker: int) -> list[Grant]:
        """Forgets a lost worker. Its contributions stay counted."""
        self._live.discard(worker)
        self._look()
        return self.tokens.drop(worker)

    def advance(self) -> list[Grant]:
        """Opens the next step."""
        self._counted.clear()
        self._is_complete = False
        self.step += 1
        return self.tokens.open_step(self.step)

    def counted(self) -> Sequence[ChosenPush]:
        """Returns the contributions of the open step, in order of their coming."""
        return tuple(self._counted)


def _ahead(step: int, open_step: int) -> StepAhead:
    return StepAhead(f"local_step {step} is ahead of global_step {open_step}; read again")


@light_dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    request_id: int
    may_take_extra: bool


class StrictTokens(TokenRule):
    """A token is always of the open step. Each worker gives one contribution to a step, and one more for each extra token.

    A worker of an older step gets the open step, however often it asks. With fewer workers than contributions a step has extra tokens,
    shared by all: those are counted here as free, held, or spent. `contributed`: workers that are part of the open step already, each as
    often as it has contributed.
    """

    def __init__(self, *, num_extras: int = 0, step: int = 0, contributed: Sequence[int] = ()) -> None:
        self._step = step
        self._num_extras = num_extras
        self._contributed = set(contributed)
        self.num_free = max(0, num_extras - (len(contributed) - len(self._contributed)))
        self._held: set[int] = set()
        self._last_extra: dict[int, int] = {}  # worker -> request id of its latest extra of this step
        self._wishes: dict[int, _Wish] = {}  # in order of their asking

    def may_contribute(self, worker: int, *, is_open: bool) -> bool:
        """Whether the step takes more, and the worker has not given its own contribution yet."""
        return is_open and worker not in self._contributed

    def has_contributed(self, worker: int) -> bool:
        """Whether a worker is part of the open step."""
        return worker in self._contributed

    def holds(self, worker: int) -> bool:
        """Whether the worker has an extra token that it has not contributed with yet."""
        return worker in self._held

    def spend(self, worker: int) -> bool:
        """A worker's first contribution to the step is free, further ones cost an extra token each."""
        if worker in self._contributed and worker not in self._held:
            return False
        if worker in self._contributed:
            self._held.remove(worker)
        self._contributed.add(worker)
        return True

    def after_commit(self, worker: int) -> list[Grant]:
        """A worker that waited before it contributed may take an extra now."""
        if worker not in self._contributed:
            return []
        wish = self._wishes.get(worker)
        if wish is not None:
            self._wishes[worker] = replace(wish, may_take_extra=True)
        return self._hand_out()

    def ask(self, worker: int, *, local_step: int, request_id: int, is_open: bool) -> int | None:
        """Gives the open step's token to a worker of an older step, and an extra to one that has contributed to this step."""
        if local_step < self._step or worker in self._held or request_id <= self._last_extra.get(worker, -1):
            self._wishes.pop(worker, None)
            return self._step
        may_take_extra = is_open and worker in self._contributed
        if may_take_extra and self.num_free:
            self._wishes.pop(worker, None)
            self._take_extra(worker, request_id)
            return self._step
        # A repeated wish keeps its place.
        self._wishes[worker] = _Wish(request_id=request_id, may_take_extra=may_take_extra)
        return None

    def forget_wish(self, worker: int) -> None:
        """Stops waiting on behalf of a worker; an extra that it holds stays its own."""
        self._wishes.pop(worker, None)

    def drop(self, worker: int) -> list[Grant]:
        """Forgets a lost worker, and takes its unspent extra token back for others."""
        self._wishes.pop(worker, None)
        self._last_extra.pop(worker, None)
        if worker in self._held:
            self._held.remove(worker)
            self.num_free += 1
        return self._hand_out()

    def open_step(self, step: int) -> list[Grant]:
        """Opens the next step, with new extras; all waiting workers have a token of it."""
        released = [Grant(worker, step) for worker in self._wishes]
        self._step, self.num_free = step, self._num_extras
        self._contributed.clear()
        self._held.clear()
        self._last_extra.clear()
        self._wishes.clear()
        return released

    def _take_extra(self, worker: int, request_id: int) -> None:
        self.num_free -= 1
        self._held.add(worker)
        self._last_extra[worker] = request_id

    def _hand_out(self) -> list[Grant]:
        if not self.num_free:
            return []
        granted = [worker for worker, wish in self._wishes.items() if wish.may_take_extra][: self.num_free]
        for worker in granted:
            self._take_extra(worker, self._wishes.pop(worker).request_id)
        return [Grant(worker, self._step) for worker in granted]
