"""Training that talks once in many steps: workers step by themselves, then all of them by how far each came. Knows a session and arrays.

The algorithm of `lockstep.DiLoCo`, of `lockstep.torch.DiLoCo` and of `lockstep.jax.DiLoCo`, which hold their values elsewhere.
"""

import hashlib
import json
import logging
import math
import os
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

import numpy as np

from ps_protocol.errors import InvalidSpec
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import OptimizerSpec
from ps_protocol.model.variables import Array, VariableSpec
from ps_protocol.roles.chief import PushOutcome
from worker_client.cluster.threads import Job, Lane
from worker_client.core.outcomes import Push
from worker_client.model import optimizers
from worker_client.model.optimizers import Rate
from worker_client.session.session import Session

log = logging.getLogger("lockstep.worker")

# Elements of a variable that metrics are computed from, at most.
_NUM_SAMPLED = 16384

# Returns the inner optimizer's state: name to array.
InnerState = Callable[[], Mapping[str, Any]]


@light_dataclass(frozen=True, slots=True, eq=False)
class _Contribution:
    """What fragments have to give: the step that it is for, the variables, and how many inner steps it is made of.

    `alpha`: how its result is mixed; None: it is not delayed, and taken as it is.
    """

    step: int
    names: frozenset[str]
    gradients: Mapping[str, Array | None]
    updates: Mapping[str, Array]
    num_inner_steps: int
    alpha: float | None


@light_dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """The cluster's values after a contribution; `is_anew`: those of all variables, and what workers did since their anchors is lost."""

    push: Push | None
    values: Mapping[str, Array]
    is_anew: bool


class DiLoCo:
    """Counts a worker's inner steps, and after each `sync_every` of them has all workers step together, by how far each of them came.

    For a session that has its model. The program changes `values` by an optimizer of its own, and calls `step(values)` after each inner
    step; mostly that only counts. The last of `sync_every` contributes `anchor - values`, where the anchor is what the cluster had before,
    as a gradient, weighted by its number of inner steps; the servers step by the mean with the model's optimizer, the outer one, and the
    values become what comes of it: DiLoCo, arXiv 2311.08105, algorithm 1, with `lockstep.outer_optimizer(sync_every)`. With
    `lockstep.sgd(1.0)` it is local SGD, arXiv 1805.09767: the mean of the workers' values.

    The rest is Streaming DiLoCo, arXiv 2501.18512. `fragments`: the variables in so many groups of about the same bytes; each
    `sync_every / fragments` inner steps one of them is contributed, in turn. A server's variables travel together, also those of other
    groups: with as many servers as fragments, no others do. `delay`: the exchange runs in a thread beside so many further
    inner steps, and its result is taken only then, whenever it came; until then the session makes no other call. `alpha`: of the result,
    values become `alpha * values + (1 - alpha) * result`. Which values there are depends on numbers of inner steps only, not on time.

    `names`: the variables that the program has; None: all of the model, which may have no tables. `Buffer`s are updated by their values, in
    turn with their fragment; those named in `counts` by worker 0 only. `inner_state_dir`: a directory in which the worker's part is kept at
    each contribution, so that a process in its place goes on with it, to the same bits; None: it begins anew. `sync_every` may be set: the
    next contribution comes so many inner steps after the last one.

    `by_speed`: after each contribution `sync_every` is set to what `Session.inner_steps()` says of the number given here, by the seconds
    that inner steps took, so that all workers come together: the fastest makes them all, a slower one fewer, a multiple of `fragments` and
    at least `delay` for each fragment. Then the values depend on time.

    With contributions go two metrics that tell whether the outer optimizer suits them. `outer_correlation` is the cosine rho of the angle
    between this contribution's and the worker's one before of the same fragment. `outer_rate` is <anchor - new anchor, delta> / <delta,
    delta> of the last one, how far the servers went along its delta = anchor - values: for a worker alone and Nesterov momentum mu at a
    rate lr, lr * (1 + mu / (1 - mu * rho)) in the long run, where the correlation falls as rho^k (ours). Both are of 16384 elements of each
    variable at most, spread evenly. Belongs to the session's thread. Raises InvalidSpec.
    """

    def __init__(
        self,
        session: Session,
        *,
        sync_every: int,
        fragments: int = 1,
        delay: int = 0,
        alpha: float = 0.0,
        names: Collection[str] | None = None,
        counts: Collection[str] = (),
        inner_state_dir: "str | os.PathLike[str] | None" = None,
        by_speed: bool = False,
    ) -> None:
        if not isinstance(session, Session):
            raise InvalidSpec(f"session: got a {type(session).__name__}, want what lockstep.connect() or lockstep.local() returns")
        check_numbers(sync_every=sync_every, fragments=fragments, delay=delay, alpha=alpha)
        known = session.model().variables
        if unknown := sorted({*(names or ())} - {spec.name for spec in known}):
            raise InvalidSpec(f"names: the model has no variable {unknown[0]!r}")
        if tables := [spec.name for spec in known if spec.is_sparse and (names is None or spec.name in names)]:
            raise InvalidSpec(f"{tables[0]!r} is a table on the servers, whose rows take no inner steps: make it a dense variable")
        self._specs = {spec.name: spec for spec in known if names is None or spec.name in names}
        self._untouched = {spec.name: None for spec in known if not spec.is_state}
        self._groups = groups_of([*self._specs.values()], fragments, session.placement())
        self._counts = frozenset(counts)
        self._session, self._delay, self._alpha = session, delay, alpha
        self._sync_every = sync_every
        self.num_inner_steps = 0
        self.last_push: Push | None = None
        # Inner steps since the last contribution, and since that of each fragment; the fragment whose turn it is.
        self._num_since, self._since = 0, [0] * fragments
        self._turn = session.local_step % fragments
        self._anchors = session.read(self._specs)
        self._metrics: dict[str, Any] = {}
        # Of each variable's last contribution, some elements; what the last outer step came to.
        self._deltas: dict[str, Array] = {}
        self._outer_rate: dict[str, float] = {}
        # The most inner steps, where speed says how many; when the present ones began, and how much of the time since was spent here.
        self._most, self._began_s, self._waited_s = sync_every if by_speed else None, monotonic(), 0.0
        # A contribution that is under way, and one that ended in an error.
        self._under_way: tuple[_Contribution, Job] | None = None
        self._failed: _Contribution | None = None
        self._lane: Lane | None = None
        self._num_rollbacks, self._is_over, self._is_closed = session.num_rollbacks, False, False
        self.global_step = session.local_step
        self.inner_state: dict[str, Array] = {}
        self.values = {name: value.copy() for name, value in self._anchors.items()}
        self._kept = None if inner_state_dir is None else Path(inner_state_dir, f"worker-{session.worker_index}.state")
        if self._kept is not None:
            try:
                self._kept.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidSpec(f"inner_state_dir: {self._kept.parent} cannot be made: {error}") from None
        self._restore()

    @property
    def session(self) -> Session:
        """The session; for calls that change anything, while no contribution is under way."""
        return self._session

    @property
    def sync_every(self) -> int:
        """The inner steps of an outer one. Setting one that does not suit fragments and delay raises InvalidSpec."""
        return self._sync_every

    @sync_every.setter
    def sync_every(self, number: int) -> None:
        check_numbers(sync_every=number, fragments=len(self._groups), delay=self._delay, alpha=self._alpha)
        self._sync_every = number

    @property
    def is_finished(self) -> bool:
        """Whether training is finished; what a contribution under way has heard of that counts when its result is taken."""
        return self._session.is_finished and self._under_way is None

    def step(self, values: Mapping[str, Any], inner_state: InnerState | None = None) -> dict[str, Array]:
        """Counts an inner step, and returns the values that take the place of the program's, by name: mostly none.

        `values`: name to array, as the program has them; looked up only for what is contributed or mixed. `inner_state`: returns the
        optimizer's state as arrays, to be kept. Blocks, without a `delay`, until the cluster has made the outer step; with one, if the
        result is not there yet when it is to be taken. Raises what `Session.step` raises, also for a contribution that is under way: then
        the values stay, and the next inner step tries again; what was counted all the same does not count again.
        """
        self._check_open()
        self.num_inner_steps += 1
        self._num_since += 1
        self._since = [number + 1 for number in self._since]
        given: dict[str, Array] = {}
        is_due = self._is_to_be_repeated() or self._num_since >= self._sync_every // len(self._groups)
        if self._under_way is not None and (is_due or self._num_since >= self._delay or self._under_way[1].error is not None):
            given = self._take(values)
        if is_due and not self._is_over:
            self._contribute(_over(given, values), [self._turn], inner_state, alpha=self._alpha)
            if not self._delay:
                given |= self._take(_over(given, values))
        return given

    def sync(self, values: Mapping[str, Any], inner_state: InnerState | None = None) -> dict[str, Array]:
        """Makes an outer step now, of all fragments; all workers must do so. Returns the cluster's values, of all variables.

        Blocks, and raises, as `step()`.
        """
        self._check_open()
        self._is_to_be_repeated()
        given = {} if self._under_way is None else self._take(values)
        if self._is_over:
            return given
        self._contribute(_over(given, values), range(len(self._groups)), inner_state, alpha=None)
        return given | self._take(_over(given, values))

    def report(self, **metrics: Any) -> None:
        """Reports metrics with the next contribution: each a number, or a number and its weight; see `Session.step`."""
        self._metrics |= metrics

    def close(self) -> None:
        """Waits for a contribution that is under way, and ends the thread. Logs inner steps that were not contributed. Idempotent.

        Raises the error of that contribution.
        """
        if self._is_closed:
            return
        self._end_thread()
        if self._under_way is not None:
            made, job = self._under_way
            job.wait()
            if job.error is not None:
                raise job.error
            self._count_from(made)
        if any(self._since) and not self._session.is_finished:
            step = self._session.local_step
            log.warning("%d inner steps since outer step %d were not contributed: call sync() first", max(self._since), step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes; after an exception, contributes nothing more and waits for nothing: the end of the session ends what is under way."""
        if error is None:
            self.close()
        else:
            self._end_thread()

    # -- an outer step

    def _is_to_be_repeated(self) -> bool:
        """Whether a contribution has ended in an error, and was not counted before that. If it was, its result is under way."""
        failed, self._failed = self._failed, None
        if failed is None or self._session.local_step == failed.step:
            return failed is not None
        self._num_since = 0
        self._begin(failed, lambda: _Answer(None, self._session.read(self._specs), is_anew=False))
        return False

    def _contribute(self, values: Mapping[str, Any], groups: Sequence[int], inner_state: InnerState | None, *, alpha: float | None) -> None:
        """Begins to contribute these fragments."""
        session = self._session
        names = [name for group in groups for name in self._groups[group]]
        now = {name: _array(name, values, self._specs[name]) for name in names}
        gradients = {name: self._anchors[name] - now[name] for name in names if not self._specs[name].is_state}
        is_mine = session.worker_index == 0
        updates = {name: now[name].copy() for name in names if self._specs[name].is_state and (is_mine or name not in self._counts)}
        self._tell_speed()
        num_inner_steps = max(self._since[group] for group in groups)
        made = _Contribution(session.local_step, frozenset(names), {**self._untouched, **gradients}, updates, num_inner_steps, alpha)
        if self._kept is not None:
            self._keep(self._kept, made, values, inner_state)
        metrics, self._metrics = {**self._correlation(gradients), **self._outer_rate, **self._metrics}, {}
        self._num_since, self._outer_rate = 0, {}
        self._begin(made, lambda: self._exchange(made, metrics))
        self._began_s, self._waited_s = monotonic(), 0.0

    def _begin(self, made: _Contribution, exchange: Callable[[], _Answer]) -> None:
        if self._delay and made.alpha is not None:
            self._lane = self._lane or Lane(f"lockstep-{self._session.worker_index}-outer")
            job = self._lane.submit(exchange)
        else:
            job = Job(exchange)
            job.run()
        self._under_way = made, job

    def _exchange(self, made: _Contribution, metrics: Mapping[str, Any]) -> _Answer:
        """Contributes, again where that was rolled back to the same values, and returns what the cluster has then."""
        session, push, weight = self._session, None, max(1, made.num_inner_steps)
        if session.num_rollbacks > self._num_rollbacks and not self._are_anchors(now := session.read(self._specs)):
            return _Answer(None, now, is_anew=True)  # a call of the program's has heard of it
        while not session.is_finished:
            push = session.step(made.gradients, updates=made.updates, metrics=metrics or None, weight=weight, names=made.names)
            # Ranges of data went back to the chief with a contribution that was rolled back: others compute them again.
            if push.outcome is not PushOutcome.ROLLED_BACK or session.leases_data:
                break
            if session.local_step != made.step or not self._are_anchors(session.read(self._specs)):
                break
        if session.is_finished or (push is not None and push.outcome is PushOutcome.ROLLED_BACK):
            return _Answer(push, session.read(self._specs), is_anew=True)
        # Of steps that were made without this worker, it has no values yet.
        is_behind = len(self._groups) > 1 and session.local_step > made.step + 1
        return _Answer(push, session.read(self._specs if is_behind else made.names), is_anew=False)

    def _are_anchors(self, values: Mapping[str, Array]) -> bool:
        return all(np.array_equal(self._anchors[name], value, equal_nan=True) for name, value in values.items())

    def _take(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """Waits for the contribution under way, and returns the values that follow from it. Raises its error."""
        assert self._under_way is not None
        (made, job), began_s = self._under_way, monotonic()
        job.wait()
        self._under_way = None
        if job.error is not None:
            self._failed, self._deltas = made, {}
            raise job.error
        answer: _Answer = job.result
        self.last_push = answer.push or self.last_push
        given: dict[str, Array] = {}
        self._outer_rate = {} if answer.is_anew else self._rate_of(made, answer.values)
        for name, value in answer.values.items():
            if name in made.names:
                is_mixed = made.alpha and not answer.is_anew and name not in self._counts
                given[name] = _mixed(made.alpha, values[name], value) if is_mixed else value.copy()
            elif answer.is_anew:
                given[name] = value.copy()
            elif not np.array_equal(value, self._anchors[name], equal_nan=True):
                # Others have moved it: this worker's inner steps count from there.
                given[name] = (np.asarray(values[name]) + (value - self._anchors[name])).astype(value.dtype)
            self._anchors[name] = value
        self._count_from(made)
        if answer.is_anew:
            self._since = [0] * len(self._groups)
            self._deltas = {}
        session = self._session
        if self._most is not None and not session.is_finished:
            of_each = session.inner_steps(self._most) // len(self._groups)
            self.sync_every = max(1, self._delay, of_each) * len(self._groups)
        self._waited_s += monotonic() - began_s
        self.global_step, self._num_rollbacks, self._is_over = session.local_step, session.num_rollbacks, session.is_finished
        self._turn = (session.local_step if session.policy.has_common_steps else self._turn + 1) % len(self._groups)
        return given

    def _count_from(self, made: _Contribution) -> None:
        """Notes that inner steps up to this contribution have been contributed."""
        self._since = [
            self._num_since if group[0] in made.names else number for number, group in zip(self._since, self._groups, strict=True)
        ]

    def _tell_speed(self) -> None:
        """Has the next contribution say how long its inner steps took. Once their values are there: devices compute late."""
        if self._most is not None and self._num_since:
            made = self._num_since, max(1e-6, monotonic() - self._began_s - self._waited_s)
            self._session.inner_steps(self._most, made=made)

    def _correlation(self, gradients: Mapping[str, Array]) -> dict[str, float]:
        """Returns the cosine between these and those that the same variables had before, as a metric; keeps these."""
        given = {name: _some_of(gradient) for name, gradient in gradients.items()}
        before = {name: self._deltas[name] for name in given if name in self._deltas}
        now = {name: given[name] for name in before}
        self._deltas |= given
        return _metric("outer_correlation", _product(before, now), math.sqrt(_product(before, before)) * math.sqrt(_product(now, now)))

    def _rate_of(self, made: _Contribution, values: Mapping[str, Array]) -> dict[str, float]:
        """Returns how far the servers went along what was contributed, as a metric."""
        deltas = {name: _some_of(one) for name, one in made.gradients.items() if one is not None and name in values}
        with np.errstate(all="ignore"):
            way = {name: _some_of(self._anchors[name]) - _some_of(values[name]) for name in deltas}
        return _metric("outer_rate", _product(way, deltas), _product(deltas, deltas))

    def _end_thread(self) -> None:
        self._is_closed = True
        if self._lane is not None:
            self._lane.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this DiLoCo is closed: make another one for further inner steps")

    # -- what is kept for a process in this one's place

    def _keep(self, path: Path, made: _Contribution, values: Mapping[str, Any], inner_state: InnerState | None) -> None:
        inner = {} if inner_state is None else inner_state()
        about = {
            "step": made.step,
            "num_inner_steps": self.num_inner_steps,
            "since": self._since,
            "turn": self._turn,
            "alpha": made.alpha,
            "anchors": {name: _digest(value) for name, value in self._anchors.items()},
            "inner": [*inner],
        }
        arrays = [_bytes(_array(name, values, spec)) for name, spec in self._specs.items()]
        incomplete = path.with_suffix(".incomplete")
        with incomplete.open("wb") as file:
            for array in (np.frombuffer(json.dumps(about).encode(), np.uint8), *arrays, *map(np.asarray, inner.values())):
                np.lib.format.write_array(file, array, allow_pickle=False)
        incomplete.replace(path)

    def _restore(self) -> None:
        step = self._session.local_step
        if not step:
            return  # what may be there is of another training
        if self._kept is None or not self._kept.exists():
            log.warning("the inner optimizer begins anew at outer step %d: nothing was kept of its state", step)
            return
        try:
            with self._kept.open("rb") as file:
                read = partial(np.lib.format.read_array, file, allow_pickle=False)
                about = json.loads(read().tobytes())
                values = {name: read().view(spec.data_type.dtype).reshape(spec.shape) for name, spec in self._specs.items()}
                self.inner_state = {name: read() for name in about["inner"]}
            # What was not contributed then is that of the cluster as it was then.
            alpha = about["alpha"]
            groups = range(len(self._groups)) if alpha is None else [about["turn"]]
            given = frozenset(name for group in groups for name in self._groups[group])
            checked = self._specs.keys() - (given if step > about["step"] else ())
            is_exact = about["step"] in (step, step - 1) and all(about["anchors"][name] == _digest(self._anchors[name]) for name in checked)
            if is_exact:
                self.num_inner_steps, self._since, self._turn = about["num_inner_steps"], about["since"], about["turn"]
        except Exception as error:  # a file that was damaged may raise anything
            log.warning("the inner optimizer begins anew at outer step %d: %s cannot be used: %s", step, self._kept, error)
            return
        if not is_exact:
            log.warning(
                "only the inner optimizer goes on, with its state at outer step %d; the values are of outer step %d", about["step"], step
            )
            return
        log.info("the worker goes on from inner step %d, which outer step %d was made of", self.num_inner_steps, about["step"])
        self.values = values
        if step == about["step"]:
            self._kept, path = None, self._kept
            self._contribute(values, groups, None, alpha=alpha)
            self._kept = path
        else:
            made = _Contribution(about["step"], given, {}, {}, 0, alpha)
            self._begin(made, lambda: _Answer(None, {name: self._anchors[name] for name in given}, is_anew=False))
        if not self._delay or alpha is None:
            self.values |= self._take(values)


# What moves v is whole numbers of one power of two, so that its difference to the step before is exact in 4 bits; the rest is kept. The
# power of two is about 0.4 times the root mean square, and what is beyond 7 of it comes with later steps.
_OF_FOUR_BITS = """# Nesterov momentum, moves of 4 bits
m = m * momentum + g
u = left + lr * (g + momentum * m)
s = exp(round(log(max(0.4 * norm(u) / sqrt(sum(0 * v + 1)), 1e-30)) / log(2)) * log(2))
k = clip(round(u / s), -7, 7)
left = u - k * s
v = v - k * s
"""


def outer_optimizer(sync_every: int, *, rate: Rate | None = None, momentum: float = 0.9, bits: int | None = None) -> OptimizerSpec:
    """Returns the outer optimizer for so many inner steps: Nesterov momentum, at a rate of 0.7 from 50 of them on.

    `rate`: another number, or a schedule by outer steps. None is 0.7 * sqrt(sync_every / 50) with fewer, at least 0.1. Ours, between what
    was measured with four workers on a small language model (benchmarks/figures.md): at 10 inner steps 0.2 is better than 0.7 (a loss of
    2.1104 against 2.1460), at 50 0.7 is better than 0.33 (2.1238 against 2.1308). Where the inner rate is as high as gradients of each step
    take it, and outer steps are as few as 20 to 100, less momentum is better: with a rate of 0.7 and momentum of 0.6, 50 inner steps end at
    1.9155 instead of 2.1409, and 10 at 1.8782 instead of 1.9274.

    `bits`: 4, or None. With 4 each variable moves by -7 to 7 times a power of two at a step, and the next step has what that leaves.
    Sessions with `WireFormat(gradients="int4", variables="int4")` then read 4 bits an element, and lose nothing. Variables are not split
    over servers. Raises InvalidSpec.
    """
    check_numbers(sync_every=sync_every, fragments=1, delay=0, alpha=0.0)
    if rate is None:
        rate = round(max(0.1, 0.7 * min(1.0, math.sqrt(sync_every / 50))), 4)
    if bits not in (None, 4):
        raise InvalidSpec(f"bits: got {bits!r}, want 4, or None for moves of any size")
    of_any_size = optimizers.momentum(rate, momentum, use_nesterov=True)  # refuses wrong numbers in either case
    if bits is None:
        return of_any_size
    return optimizers.custom_optimizer(_OF_FOUR_BITS, rate, slots={"m": 0.0, "left": 0.0}, momentum=momentum)


def check_numbers(*, sync_every: int, fragments: int, delay: int, alpha: float) -> None:
    """Raises InvalidSpec unless outer steps can be made by these numbers."""
    for name, number, least in (("sync_every", sync_every, 1), ("fragments", fragments, 1), ("delay", delay, 0)):
        if type(number) is not int or number < least:
            raise InvalidSpec(f"{name}: got {number!r}, want a whole number of at least {least}")
    if sync_every % fragments:
        raise InvalidSpec(f"fragments: got {fragments}, want a divisor of sync_every, which is {sync_every}: each has a phase of its own")
    if delay > sync_every // fragments:
        raise InvalidSpec(f"delay: got {delay}, want at most sync_every / fragments = {sync_every // fragments} inner steps")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha < 1:
        raise InvalidSpec(f"alpha: got {alpha!r}, want a number of at least 0 and below 1")


def groups_of(specs: Sequence[VariableSpec], num_groups: int, placement: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Returns the names of the variables in so many groups of about the same bytes: the largest first, each to the smallest group.

    A server's variables are in as few groups as possible, since it takes and gives them together; and wherever else a group would be empty,
    in any. Raises InvalidSpec for more groups than variables.
    """
    if num_groups > len(specs):
        raise InvalidSpec(f"fragments: got {num_groups}, want at most as many as variables, {len(specs)}")
    shards = sorted({placement[spec.name] for spec in specs})
    for is_by_shard in (True, False):
        groups: list[list[VariableSpec]] = [[] for _ in range(num_groups)]
        for spec in sorted(specs, key=lambda spec: -spec.nbytes):
            rank = shards.index(placement[spec.name])
            fitting = groups[rank % num_groups :: len(shards)] if is_by_shard else groups
            min(fitting, key=lambda group: (sum(one.nbytes for one in group), len(group))).append(spec)
        if all(groups):
            break
    return [tuple(spec.name for spec in group) for group in groups]


def _over(given: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    return ChainMap(given, values) if given else values  # type: ignore[arg-type]  # nothing is written


def _some_of(array: Array) -> Array:
    # An odd stride, so that it does not stay in one column.
    return array.reshape(-1)[:: -(-array.size // _NUM_SAMPLED) | 1].astype(np.float64)


def _product(one: Mapping[str, Array], other: Mapping[str, Array]) -> float:
    with np.errstate(all="ignore"):
        return sum((float(np.dot(value, other[name])) for name, value in one.items()), 0.0)


def _metric(name: str, dividend: float, divisor: float) -> dict[str, float]:
    is_known = divisor > 0 and math.isfinite(divisor) and math.isfinite(dividend)
    return {name: dividend / divisor} if is_known else {}


def _array(name: str, values: Mapping[str, Any], spec: VariableSpec) -> Array:
    try:
        array = np.asarray(values[name])
    except KeyError:
        raise InvalidSpec(f"values: {name!r} is missing: give those of all variables that this DiLoCo has") from None
    if array.shape != spec.shape or array.dtype != spec.data_type.dtype:
        raise InvalidSpec(
            f"values: {name!r} is {array.dtype} of shape {array.shape}, and the variable {spec.data_type.dtype} of {spec.shape}: give the"
            " values that the program began with, changed in place or replaced by others of that type"
        )
    return array


def _mixed(alpha: Any, value: Any, result: Array) -> Array:
    mixed: Array = (alpha * np.asarray(value) + (1.0 - alpha) * result).astype(result.dtype)
    return mixed


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _digest(array: Array) -> str:
    return hashlib.blake2b(_bytes(array).data, digest_size=16).hexdigest()
