"""Simulates training with any number of workers: the chief's own coordinator, driven by simulated time. No thread, clock or network.

The coordinator is the real one and gets the events that real workers and servers would send; only durations are simulated.
"""

import gc
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from chief.core import messages as ev
from chief.core.coordinator import Coordinator
from chief.core.messages import ShardsFound
from chief.options import CoordinationConfig
from lockstep.planning.latencies import Latency
from ps_protocol.errors import InvalidSpec, Unavailable
from ps_protocol.model.light_dataclass import light_dataclass
from ps_protocol.model.optimizers import OptimizerSpec, constant
from ps_protocol.model.policy import PolicySpec
from ps_protocol.model.spec import ModelSpec, PlacementPolicy
from ps_protocol.model.variables import DataType, VariableSpec
from ps_protocol.roles.chief import (
    MAX_LEASE_S,
    ClusterStatus,
    CompleteInitializationRequest,
    DequeueTokenRequest,
    ModelReply,
    Participant,
    ParticipantKind,
    PushCommit,
    PushOutcome,
    RegisterModelRequest,
    RegisterRequest,
    Registration,
    TokenReply,
    TokenResult,
)
from ps_protocol.roles.contribution import PushId
from ps_protocol.roles.fence import NOBODY
from ps_protocol.roles.request import Request
from ps_protocol.roles.shard import Adoption, ShardReport, ShardStatus

# A network link that concurrent transfers share evenly, in simulated time.


_LEAST_S = 1e-12
_ROUNDING = 1 + 1e-14


class Clock(Protocol):
    """Simulated time, and actions scheduled in it."""

    @property
    def now(self) -> float:
        """The time, in seconds."""

    def later(self, delay_s: float, what: Callable[[int], None], whose: int) -> None:
        """Calls `what` with `whose` after a delay; at once if there is none."""


class Transfers:
    """Transfers of one size over a link: each takes `alone_s` by itself, n times as long while n are under way, and they end in order.

    Calls `then` with a transfer's number when the transfer ends; at once if transfers take no time.
    """

    def __init__(self, clock: Clock, *, alone_s: float, then: Callable[[int], None]) -> None:
        self._clock, self._alone_s, self._then = clock, alone_s, then
        self._ends: deque[tuple[float, int]] = deque()  # of each transfer: the value of `_done` at which it ends, and its number
        self._done = 0.0  # seconds of exclusive use that a transfer under way since the beginning would have had
        self._at = 0.0
        self._is_check_scheduled = False

    def start(self, transfer: int) -> None:
        """Begins a transfer."""
        if not self._alone_s:
            self._then(transfer)
            return
        self._pass_time()
        self._ends.append((self._done + self._alone_s, transfer))
        # A new transfer delays the end of all others, so a check that is scheduled already comes too early, never too late.
        if not self._is_check_scheduled:
            self._schedule_check()

    def _pass_time(self) -> None:
        now = self._clock.now
        if self._ends:
            self._done += (now - self._at) / len(self._ends)
        self._at = now

    def _next_end(self) -> float:
        """Returns when the next transfer ends if no other begins before."""
        return self._at + (self._ends[0][0] - self._done) * len(self._ends)

    def _schedule_check(self) -> None:
        self._is_check_scheduled = bool(self._ends)
        if self._ends:
            self._clock.later(max(_LEAST_S, self._next_end() - self._clock.now), self._check_end, 0)

    def _check_end(self, _: int) -> None:
        if self._next_end() > self._clock.now * _ROUNDING + _LEAST_S:
            self._schedule_check()
            return
        self._pass_time()
        self._done, transfer = self._ends.popleft()  # exact: no rounding error is carried over
        self._schedule_check()
        self._then(transfer)


# Figures of a simulated training, made from counts: step times, efficiency, dropped work, staleness. Runs nothing.


@light_dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Figures of the measured steps, times in seconds.

    `step_s` is the mean, `step_error_s` its standard error (by batch means, since successive steps are correlated). `accepted_per_s`:
    contributions accepted per second. `efficiency`: that rate, divided by the rate of workers that never wait, fail or lose anything.
    `dropped`: the share of contributions that were dropped as late or stale. Staleness is that of accepted contributions.
    """

    policy: str
    num_workers: int
    num_required: int
    num_steps: int
    step_s: float
    step_error_s: float
    median_step_s: float
    p90_step_s: float
    accepted_per_s: float
    efficiency: float
    dropped: float
    mean_staleness: float
    max_staleness: int

    @property
    def num_backups(self) -> int:
        """Workers beyond the contributions that a step needs."""
        return self.num_workers - self.num_required


def _result_of(
    before: ClusterStatus,
    after: ClusterStatus,
    *,
    duration_s: float,
    step_times: Sequence[float],
    stalenesses: Sequence[int],
    ideal_per_s: float,
) -> SimulationResult:
    """Returns the figures of the time between two reports; `step_times` begins with the time of the first."""
    durations = np.diff(np.asarray(step_times, np.float64))
    num_required = after.replicas_to_aggregate if after.policy.has_common_steps else 1
    num_steps = after.global_step - before.global_step
    num_applied = after.num_accepted - after.num_contributions - before.num_accepted + before.num_contributions
    accepted_per_s = num_applied / duration_s if duration_s else math.inf
    num_dropped = after.num_stale + after.num_late - before.num_stale - before.num_late
    num_contributions = num_dropped + num_applied
    return SimulationResult(
        policy=after.policy.text,
        num_workers=after.total_num_replicas,
        num_required=num_required,
        num_steps=num_steps,
        step_s=duration_s / num_steps,
        step_error_s=_standard_error(durations),
        median_step_s=float(np.median(durations)),
        p90_step_s=float(np.percentile(durations, 90)),
        accepted_per_s=accepted_per_s,
        efficiency=accepted_per_s / ideal_per_s,
        dropped=num_dropped / num_contributions,
        mean_staleness=float(np.mean(stalenesses)) if len(stalenesses) else 0.0,
        max_staleness=max(stalenesses, default=0),
    )


def _standard_error(durations: np.ndarray) -> float:
    """Returns the standard error of the mean of correlated values, by the means of up to 20 batches."""
    num_batches = min(20, len(durations) // 2)
    if num_batches < 2:
        return 0.0
    size = len(durations) // num_batches
    means = durations[: size * num_batches].reshape(num_batches, size).mean(axis=1)
    return float(means.std(ddof=1) / math.sqrt(num_batches))


MAX_WORKERS = 10_000
_LEASE_S = MAX_LEASE_S  # simulated workers do not die, and send no heartbeats
_MAX_WAIT_S, _REPEAT_S = 20.0, 0.05
_NUM_DRAWN = 32  # computing times drawn per call
_SETUP_CALL = MAX_WORKERS  # calls of workers are numbered by worker index


@light_dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The seconds that a contribution takes besides computing.

    `calls_s`: the calls of one contribution, half of them before it is computed and half after. `send_s`, `receive_s`: to send the
    variables to one worker, and to receive one contribution, with nothing else under way; transfers at the same time share the servers'
    link evenly. `apply_s`: to apply a step.
    """

    calls_s: float = 0.0
    send_s: float = 0.0
    receive_s: float = 0.0
    apply_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("calls_s", "send_s", "receive_s", "apply_s"):
            value = getattr(self, name)
            if not 0 <= value < 1e6:
                raise InvalidSpec(f"{name.removesuffix('_s')}: got {value:g}, want 0 or more seconds")


def simulate(
    *,
    policy: PolicySpec,
    num_workers: int,
    latency: Latency,
    num_required: int | None = None,
    costs: Costs | None = None,
    num_rounds: int = 200,
    num_warm_up: int = 10,
    seed: int = 0,
) -> SimulationResult:
    """Simulates a training and returns its figures; the same arguments give the same result.

    `num_required`: R of sync and outer (None: as many as workers). A round has as many steps as need one
    contribution of each worker, at least one; the first `num_warm_up` are not measured. Worker w computes the same times in every run
    with the same seed. Raises InvalidSpec.
    """
    if not 1 <= num_workers <= MAX_WORKERS:
        raise InvalidSpec(f"workers: got {num_workers}, want 1 to {MAX_WORKERS}")
    if num_required is not None and not 1 <= num_required <= num_workers:
        raise InvalidSpec(f"contributions a step needs: got {num_required}, want 1 to {num_workers}, the number of workers")
    if num_rounds < 1 or num_warm_up < 0:
        raise InvalidSpec(f"rounds: got {num_rounds} and {num_warm_up} before them, want 1 or more and 0 or more")
    if policy.applies_on_arrival:
        raise InvalidSpec(f"policy {policy.text}: without locking, nothing waits for anything, so there is nothing to simulate")
    steps_per_round = num_workers // (num_required or num_workers) if policy.has_common_steps else num_workers
    with _without_garbage_collector():
        simulation = _Simulation(
            policy=policy, num_workers=num_workers, num_required=num_required, latency=latency, costs=costs or Costs(), seed=seed
        )
        return simulation.run(num_warm_up=num_warm_up * steps_per_round, num_steps=num_rounds * steps_per_round)


@contextmanager
def _without_garbage_collector() -> Iterator[None]:
    """Turns the garbage collector off within the block.

    With ten thousand workers it would take a quarter of the time, and a run makes few cycles.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Worker:
    """One worker: its identity, the step of its variables, and its next computing times."""

    __slots__ = ("index", "local_step", "participant", "random", "request", "request_id", "sequence", "times", "token")

    def __init__(self, participant: Participant, *, seed: int) -> None:
        self.participant = participant
        self.index = participant.index
        self.token = self.local_step = self.sequence = self.request_id = 0
        self.random = np.random.default_rng((seed, participant.index))
        self.times: list[float] = []
        self.request: DequeueTokenRequest | None = None


class _Simulation:
    def __init__(
        self, *, policy: PolicySpec, num_workers: int, num_required: int | None, latency: Latency, costs: Costs, seed: int
    ) -> None:
        self._latency, self._costs = latency, costs
        self._reads_latest = policy.reads_latest
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[int], None], int]] = []
        self._num_queued = 0
        self._step_times: list[float] = []
        self._stalenesses: list[int] = []
        self._setup_reply: ev.ReplyValue = None
        self._step: ev.ApplyStep | None = None  # that is being applied
        self._sends = Transfers(self, alone_s=costs.send_s, then=self._compute)
        self._receives = Transfers(self, alone_s=costs.receive_s, then=self._received)
        config = CoordinationConfig(
            policy=policy, total_num_replicas=num_workers, replicas_to_aggregate=num_required, lease_s=_LEASE_S, ledger_size=1
        )
        self._coordinator = Coordinator(
            config=config, shard_addresses=["simulated:1"], now=0.0, has_successors=False, new_life=lambda: 1, session_key=b""
        )
        empty = ShardStatus(shard=0, process_incarnation=1, fence=NOBODY, step=None, report=ShardReport())
        self._handle(ShardsFound(statuses=(empty,)))
        self._workers = [self._join(index, seed) for index in range(num_workers)]
        self._begin()

    def later(self, delay_s: float, what: Callable[[int], None], whose: int) -> None:
        """Calls `what` with `whose` after a delay; at once if there is none."""
        if delay_s <= 0:
            what(whose)
            return
        self._num_queued += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._num_queued, what, whose))

    def run(self, *, num_warm_up: int, num_steps: int) -> SimulationResult:
        """Runs until `num_steps` steps after the warm-up are applied, and returns their figures."""
        for worker in self._workers:
            self._released(worker.index)
        self._run_to(num_warm_up)
        begin, before = self.now, self._coordinator.status(self.now)
        self._step_times, self._stalenesses = [begin], []
        self._run_to(num_warm_up + num_steps)
        return _result_of(
            before,
            self._coordinator.status(self.now),
            duration_s=self.now - begin,
            step_times=self._step_times,
            stalenesses=self._stalenesses,
            ideal_per_s=sum(1 / self._latency.mean_s(worker.index) for worker in self._workers),
        )

    def _run_to(self, step: int) -> None:
        coordinator, queue = self._coordinator, self._queue
        while coordinator.cluster.step < step:
            when, _, what, whose = heapq.heappop(queue)
            while (due := coordinator.next_deadline()) is not None and due < when:
                self.now = max(self.now, due)
                self._handle(ev.TimerFired())
            self.now = when
            what(whose)

    # -- joining

    def _join(self, index: int, seed: int) -> _Worker:
        request = RegisterRequest(kind=ParticipantKind.WORKER, index=index, host="", pid=0, request_id=index)
        registration = self._setup(request)
        assert isinstance(registration, Registration)
        return _Worker(registration.participant, seed=seed)

    def _begin(self) -> None:
        variable = VariableSpec(name="w", data_type=DataType.FLOAT32, shape=(1,))
        optimizer = OptimizerSpec(name="sgd", learning_rate=constant(0.1))
        model = ModelSpec(variables=(variable,), optimizer=optimizer, placement=PlacementPolicy())
        first = self._workers[0].participant
        reply = self._setup(RegisterModelRequest(participant=first, model=model, max_wait_s=_MAX_WAIT_S))
        assert isinstance(reply, ModelReply)
        self._setup(CompleteInitializationRequest(participant=first, attempt=reply.attempt))

    def _setup(self, request: Request[Any]) -> ev.ReplyValue:
        self._handle(ev.Asked(call=_SETUP_CALL, request=request))
        return self._setup_reply

    # -- the coordinator

    def _handle(self, event: ev.Event) -> None:
        for instruction in self._coordinator.handle(event, self.now):
            match instruction:
                case ev.Reply(call=call, value=TokenReply() as reply):
                    self._answered(call, reply)
                case ev.Reply(value=value):
                    self._setup_reply = value
                case ev.Refuse(error=error):
                    raise error
                case ev.AdoptShards():
                    found = ev.Adopted(process_incarnations=(1,), adoptions=(Adoption(step=None, layout_hash=""),))
                    self._handle(ev.Done(work=instruction, result=found))
                case ev.ApplyStep():
                    self._step = instruction
                    self.later(self._costs.apply_s, self._applied, 0)
                case ev.KeepRecord():
                    self._handle(ev.Done(work=instruction))

    def _applied(self, _: int) -> None:
        self._step_times.append(self.now)
        assert self._step is not None
        self._handle(ev.Done(work=self._step))

    # -- one contribution, from token to token

    def _answered(self, index: int, reply: TokenReply) -> None:
        worker = self._workers[index]
        if reply.commit is not None and reply.commit.outcome is PushOutcome.ACCEPTED:
            self._stalenesses.append(reply.commit.staleness)
        if reply.result is TokenResult.WAIT:
            self._request_token(worker, None)
        elif reply.result is TokenResult.TOKEN:
            worker.token = reply.step
            self.later(self._costs.calls_s / 2, self._released, index)

    def _released(self, index: int) -> None:
        worker = self._workers[index]
        worker.local_step = self._coordinator.cluster.step if self._reads_latest else worker.token
        self._sends.start(index)

    def _compute(self, index: int) -> None:
        worker = self._workers[index]
        if not worker.times:
            worker.times = self._latency.draw(worker.random, _NUM_DRAWN, index).tolist()
        self.later(worker.times.pop(), self._receives.start, index)

    def _received(self, index: int) -> None:
        self.later(self._costs.calls_s / 2, self._contribute, index)

    def _contribute(self, index: int) -> None:
        worker = self._workers[index]
        worker.sequence += 1
        worker.request_id += 1
        push_id = PushId(worker=index, incarnation=worker.participant.incarnation, sequence=worker.sequence)
        self._request_token(worker, PushCommit(push_id=push_id, step=worker.local_step, staged=True))

    def _request_token(self, worker: _Worker, commit: PushCommit | None) -> None:
        request = DequeueTokenRequest(
            participant=worker.participant,
            local_step=worker.token,
            request_id=worker.request_id,
            max_wait_s=_MAX_WAIT_S,
            commit=commit,
        )
        worker.request = request
        self._ask(worker.index)

    def _ask(self, index: int) -> None:
        request = self._workers[index].request
        assert request is not None
        try:
            self._handle(ev.Asked(call=index, request=request))
        except Unavailable:  # a step is being applied, which the contribution is too late for: it counts in the next one
            self.later(_REPEAT_S, self._ask, index)
