"""What contributions have their step use of hyper-parameters: kept while they are counted and not applied. Knows values; no step or clock.

A step has one set of them, that of the contribution with the lowest push id that has any, so that nothing depends on what came first. Who
lacks a contribution takes that of the next one: so what is committed and given to nobody changes nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from chief.core.cluster.model import ModelRegistry
from chief.core.waiting import Outbox
from ps_protocol.errors import InvalidSpec
from ps_protocol.model.optimizers import StepHyperparameter
from ps_protocol.model.spec import ModelSpec, StepNumbers
from ps_protocol.roles.contribution import GivenNumbers, PushId

Numbers = tuple[StepHyperparameter, ...]


class ContributedNumbers:
    """Of all contributions that are counted; `given`: by those that an earlier chief has counted."""

    def __init__(self, model: ModelRegistry, out: Outbox, given: Mapping[PushId, Numbers]) -> None:
        self._model, self._out = model, out
        self._by_push = dict(given)
        self._checks: tuple[ModelSpec, StepNumbers] | None = None
        self._has_warned = False

    def check(self, given: Numbers, *, applies_on_arrival: bool) -> None:
        """Raises InvalidSpec if no step of the model can use these."""
        model = self._model.model
        assert model is not None
        if applies_on_arrival:
            raise InvalidSpec("hyperparameters: where contributions are applied on arrival, none has numbers of its own; use locking")
        if self._checks is None or self._checks[0] is not model:
            self._checks = model, StepNumbers(model)
        self._checks[1].check(given)

    def count(self, push_id: PushId, given: Numbers) -> None:
        """A contribution that has some is counted."""
        self._by_push[push_id] = given

    def of(self, push_id: PushId) -> Numbers:
        """Returns what a contribution that is counted has its step use."""
        return self._by_push.get(push_id, ())

    def of_step(self, contributors: Sequence[PushId]) -> tuple[GivenNumbers, ...]:
        """Returns what these contributions bring for their step, in their order."""
        if not self._by_push:
            return ()
        given = [(push_id, self._by_push[push_id]) for push_id in sorted(contributors) if push_id in self._by_push]
        if not given:
            return ()
        first, numbers = given[0]
        other = next(((push_id, others) for push_id, others in given if others != numbers), None)
        if other is not None and not self._has_warned:
            self._warn(first, numbers, *other)
        self._has_warned = other is not None
        runs = groupby(given, key=lambda one: one[1])
        return tuple(GivenNumbers(push_ids=tuple(one[0] for one in run), hyperparameters=same) for same, run in runs)

    def applied(self, contributors: Sequence[PushId]) -> None:
        """These contributions are applied."""
        if self._by_push:
            for push_id in contributors:
                self._by_push.pop(push_id, None)

    def _warn(self, first: PushId, numbers: Numbers, second: PushId, others: Numbers) -> None:
        known = {(one.group, one.name): one.value for one in numbers}
        theirs = {(one.group, one.name): one.value for one in others}
        group, name = next(key for key in (*known, *theirs) if known.get(key) != theirs.get(key))
        of = f" of group {group!r}" if group else ""
        self._out.note(
            f"workers {first.worker} and {second.worker} have a step use different numbers: {name}{of} is {known.get((group, name))} and"
            f" {theirs.get((group, name))}; the step uses those of worker {first.worker}, the lowest",
            is_warning=True,
        )
